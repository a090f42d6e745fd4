"""
Checks what a reader wrote for an exercise of the lessons, and tells a common mistake by name.

    from grader import grade, inputs
    layer_norm = grade("1.2", layer_norm)

prints whether the function gives what it should on inputs that it has not seen, edge cases among them, and returns it;
unsolved or wrong, it returns a function that is right, so that the notebook goes on. What is right is never shown.
inputs("1.2") gives the arguments of the input that went wrong.

    python lessons/grader.py submissions/*.ipynb

grades a class: a row a notebook (grade_class.py). THIS RUNS THE STUDENTS' CODE.

The exercises of lesson 1 are the dict EXERCISES of exercises_01.py, number -> Exercise. A new one needs a reference,
inputs, and the wrong answers that one expects, each with the sentence that would help:

    def unit_rows(x, *, dim=-1, least=1e-12):
        return x / x.square().sum(dim, keepdim=True).sqrt().clamp(min=least)

    def rows(generator):
        yield "three rows", torch.randn(3, 5, generator=generator)
        yield "a row of zeros", torch.zeros(1, 5)

    EXERCISES["1.99"] = Exercise(reference=unit_rows, inputs=rows, misconceptions=[
        (partial(unit_rows, dim=None), "Each row has a length of its own: look at dim."),
        (partial(unit_rows, least=0), "A row of zeros gives 0/0.")])

Mistakes that are functools.partial of one function, as here, are tried together too.
"""
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import torch

from explain import aligned, answers, arguments, difference, mistakes, yes_or_no

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))                                              # exercises import model.py


@dataclass
class Exercise:
    """reference(*arguments) is the right answer: a number, a tensor, or a tuple or list of them.

    inputs(generator) yields (label, *arguments) with a seeded torch.Generator; the label is shown to the reader.
    misconceptions: (wrong function, helpful sentence); no two give the same answers, nor one those of the reference.
    An output is right within tolerance * (1 + its size). A tuple or list of numbers only is taken as one tensor.
    parts: names for the values of a tuple, such as ("dx", "dweight").
    about: of questions answered by True or False, a sentence each, by input (or by place, where the answer is a list).
    without: names that may not stand in the function, such as ("layer_norm",).
    """

    reference: Callable
    inputs: Callable
    misconceptions: list
    tolerance: float = 1e-5
    parts: tuple = ()
    about: dict = field(default_factory=dict)
    without: tuple = ()


def find(number):
    """The Exercise of that number, such as "1.2". Raises KeyError with what there is."""
    lesson = number.split(".")[0]
    try:
        exercises = importlib.import_module(f"exercises_{int(lesson):02d}").EXERCISES
    except (ModuleNotFoundError, ValueError) as error:
        if not (getattr(error, "name", None) or "exercises_").startswith("exercises_"):
            raise
        raise KeyError(f"no exercise {number!r}: there is no lesson {lesson}") from None
    if number not in exercises:
        raise KeyError(f"no exercise {number!r}; there are {', '.join(exercises)}")
    return exercises[number]


# ---- One exercise ----------------------------------------------------------------------------------------------------

results = {}                                                # number -> ("solved" | "unsolved" | "wrong", sentences)
went_wrong = {}                                             # number -> label of the first input that did


def words_in(code):
    """The names in a function's code, those of the functions in it too."""
    return set(code.co_names).union(*(words_in(x) for x in code.co_consts if hasattr(x, "co_names")))


def inputs(number):
    """A tuple: the arguments with which the last grade(number, ...) went wrong; before that, the first ones."""
    given = arguments(find(number))
    return tuple(given[went_wrong.get(number, next(iter(given)))])


def grade(number, function):
    """Prints how `function` does on exercise `number`; returns it if it is right, else a function that is."""
    if not isinstance(number, str) or not callable(function):
        raise TypeError(f'grade("1.2", layer_norm) takes the number in quotes (1.10 without them is 1.1) and then the '
                        f"function itself, got {number!r:.30} and {function!r:.30}")
    exercise = find(number)
    results[number] = "unsolved", []
    if function is exercise.reference:
        print(f"{number}  this name stands for the grader's own function now: run the cell with your function first")
        return function
    code = getattr(function, "__code__", None)
    if used := words_in(code) & set(exercise.without) if code else ():
        print(f"{number}  not yet: this one is to be solved without {', '.join(sorted(used))}")
        print("     going on with the reference")
        results[number] = "wrong", [f"solved with {', '.join(sorted(used))}"]
        return exercise.reference
    try:
        given = answers(function, exercise)
    except NotImplementedError:
        print(f"{number}  not solved yet, going on with the reference")
        return exercise.reference
    expected = answers(exercise.reference, exercise)
    wrong = {label: what for label in expected if (what := difference(label, given, expected, exercise))}
    if not wrong:
        largest = max(((a.double() - b.double()).abs().nan_to_num().max().item() for label in given
                       for a, b in zip(*aligned(given[label], expected[label], ())) if a.numel()), default=0.0)
        print(f"{number}  pass: {len(given)} inputs, largest difference {largest:.1g}")
        results[number] = "solved", []
        return function
    sentences = mistakes(given, expected, exercise)
    results[number] = "wrong", sentences
    label = went_wrong[number] = next(iter(wrong))
    if answered := yes_or_no(given, expected, exercise):
        count, of, (label, place) = answered
        print(f"{number}  not yet: {count} of {of} answers wrong")
        sentences = sentences or [exercise.about.get(label) or exercise.about.get(place) or
                                  f"Look again at {label if len(expected) > 1 else f'number {place + 1}'}."]
    else:
        print(f"{number}  not yet: with {label}, {wrong[label]}")
        if len(wrong) < len(expected):
            print(f"     right with: {'; '.join(x for x in expected if x not in wrong)}")
            print(f"     wrong with: {'; '.join(wrong)}")
        print(f'     the input that went wrong: inputs("{number}")')
    print(*(f"     {sentence}" for sentence in sentences), "     going on with the reference", sep="\n")
    return exercise.reference


if __name__ == "__main__":
    import grade_class
    grade_class.main()
