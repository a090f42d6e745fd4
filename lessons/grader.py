"""
Checks what a reader wrote for an exercise of the lessons, and tells a common mistake by name.

    from grader import grade
    layer_norm = grade("1.2", layer_norm)

prints whether the function gives what it should on inputs that it has not seen, edge cases among them, and returns it;
unsolved or wrong, it returns a function that is right, so that the notebook goes on. What is right is never shown.

The exercises of lesson 1 are the dict EXERCISES of exercises_01.py, number -> Exercise. A new one needs a reference,
inputs, and the wrong answers that one expects, each with the sentence that would help:

    def inputs(generator):
        yield "three rows", torch.randn(3, 5, generator=generator)
        yield "a row of zeros", torch.zeros(1, 5)

    EXERCISES["1.12"] = Exercise(
        reference=lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12), inputs=inputs,
        misconceptions=[(lambda x: x / x.norm(), "Each row has a length of its own: look at dim."),
                        (lambda x: x / x.norm(dim=-1, keepdim=True), "A row of zeros gives 0/0.")])
"""
import importlib
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))          # exercises import model.py


@dataclass
class Exercise:
    """reference(*arguments) is the right answer: a number, a tensor, or a tuple or list of them.

    inputs(generator) yields (label, *arguments) with a seeded torch.Generator; the label is shown to the reader.
    misconceptions: (wrong function, helpful sentence); no two give the same answers, nor one those of the reference.
    An output is right within tolerance * (1 + its size). A tuple or list of numbers only is taken as one tensor.
    """

    reference: Callable
    inputs: Callable
    misconceptions: list
    tolerance: float = 1e-5


def find(number):
    """The Exercise of that number, such as "1.2". Raises KeyError with what there is."""
    lesson = number.split(".")[0]
    try:
        exercises = importlib.import_module(f"exercises_{int(lesson):02d}").EXERCISES
    except ModuleNotFoundError as error:
        if not error.name.startswith("exercises_"):
            raise
        raise KeyError(f"no exercise {number!r}: there is no lesson {lesson}") from None
    if number not in exercises:
        raise KeyError(f"no exercise {number!r}; there are {', '.join(exercises)}")
    return exercises[number]


def copy(x):
    if isinstance(x, torch.Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    return type(x)(copy(y) for y in x) if isinstance(x, (tuple, list)) else x


def number(x):
    """x as a tensor."""
    if x is None:
        raise TypeError("nothing was returned")
    try:
        return torch.as_tensor(x).detach()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{x!r:.60} was returned, expected a number or a tensor") from None


def answers(function, exercise):
    """label -> what `function` gives: a list of tensors (one for a row of numbers), or the exception it raised."""
    found = {}
    for label, *arguments in exercise.inputs(torch.Generator().manual_seed(1337)):
        torch.manual_seed(1337)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")             # of a variance of one element, say: the answer tells
                given = function(*copy(arguments))          # copies: it may write into them
            parts = [number(x) for x in given] if isinstance(given, (tuple, list)) else [number(given)]
            numbers = isinstance(given, (tuple, list)) and parts and all(part.dim() == 0 for part in parts)
            found[label] = [torch.stack(parts)] if numbers else parts
        except Exception as error:
            if isinstance(error, NotImplementedError) and not error.args:       # a stub's; torch's own come with words
                raise
            found[label] = error
    return found


def form(parts):
    """What there is, in words."""
    words = [f"shape {tuple(part.shape)}" if part.dim() else "a number" for part in parts]
    return words[0] if len(parts) == 1 else f"{len(parts)} values ({', '.join(words)})"


def difference(given, expected, tolerance):
    """None where they agree, else what is different, in words."""
    if isinstance(given, Exception):
        line = next((f", line {f.lineno}: {f.line}" for f in reversed(traceback.extract_tb(given.__traceback__))
                     if f.line and f.filename != __file__ and "site-packages" not in f.filename), "")
        return f"{type(given).__name__}: {given}{line}"
    if isinstance(expected, Exception):                     # only a mistake may: then nothing is equal to it
        return "an answer where none was expected"
    if [a.shape for a in given] != [b.shape for b in expected]:
        return f"{form(expected)} expected, given {form(given)}"
    for part, (a, b) in enumerate(zip(given, expected)):
        where = f"value {part + 1}: " if len(expected) > 1 else ""
        if a.dtype != b.dtype and {a.dtype, b.dtype} & {torch.float16, torch.bfloat16}:     # no other dtype counts
            return f"{where}{b.dtype} expected, given {a.dtype}"
        yes_no, a, b = b.dtype == torch.bool, a.double(), b.double()
        off = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, (a - b).abs() / (1 + b.abs()))
        off = off.nan_to_num(nan=torch.inf)
        if off.numel() and off.max() > tolerance:
            place = [int(i) for i in torch.unravel_index(off.argmax(), off.shape)]
            at = f" at {place}" if place else ""
            if yes_no:
                return f"{(off > 0).sum()} of {off.numel()} answers are wrong" if at else "the other answer is expected"
            if not a[tuple(place)].isfinite():
                return f"{where}{a[tuple(place)].item()}{at}"
            return f"{where}off by {(a - b).abs()[tuple(place)].item():.3g}{at}{pattern(a, b)}"
    return None


def pattern(a, b):
    """A factor or a constant that would explain all of the difference, in words."""
    if a.numel() < 2:
        return ""
    ratio, shift = (a * b).sum() / (b * b).sum(), (a - b).mean()
    if not a.any():
        return "; it is 0 everywhere"
    if torch.allclose(a, ratio * b, rtol=1e-4, atol=1e-9) and abs(ratio - 1) > 1e-3:
        return f"; everywhere {ratio.item():.4g} times what is expected"
    return f"; everywhere {shift.item():+.4g}" if torch.allclose(a, b + shift, rtol=1e-4, atol=1e-9) else ""


def mistake(given, exercise):
    """The sentence of the first known mistake whose answers these are, or None."""
    for wrong, sentence in exercise.misconceptions:
        theirs = answers(wrong, exercise)
        same = [given[label] if isinstance(given[label], Exception) and isinstance(theirs[label], Exception) else
                difference(given[label], theirs[label], exercise.tolerance) is None for label in given]
        if all(same) and not all(isinstance(x, Exception) for x in given.values()):
            return sentence


def grade(number, function):
    """Prints how `function` does on exercise `number`; returns it if it is right, else a function that is."""
    exercise = find(number)
    try:
        given = answers(function, exercise)
    except NotImplementedError:
        print(f"{number}  not solved yet, going on with the reference")
        return exercise.reference
    expected = answers(exercise.reference, exercise)
    wrong = {label: what for label in expected
             if (what := difference(given[label], expected[label], exercise.tolerance))}
    if not wrong:
        size = max(((a.double() - b.double()).abs().nan_to_num().max().item() for label in given
                    for a, b in zip(given[label], expected[label]) if a.numel()), default=0.0)
        print(f"{number}  pass: {len(given)} inputs, largest difference {size:.1g}")
        return function
    label, what = next(iter(wrong.items()))
    right = [label for label in expected if label not in wrong]
    print(f"{number}  not yet: with {label}, {what}")
    if right:
        print(f"     right with: {'; '.join(right)}\n     wrong with: {'; '.join(wrong)}")
    if sentence := mistake(given, exercise):
        print(f"     {sentence}")
    print("     going on with the reference")
    return exercise.reference
