"""
Checks what a reader wrote for an exercise of the lessons, and tells a common mistake by name.

    from grader import grade, inputs
    layer_norm = grade("1.2", layer_norm)

prints whether the function gives what it should on inputs that it has not seen, edge cases among
them, and returns it; unsolved or wrong, it returns a function that is right, so that the notebook
goes on. What is right is never shown. inputs("1.2") gives the arguments of the input that went
wrong, and prints what the function gave on it.

grade_class.py grades a class.

The exercises of lesson 1 are the dict EXERCISES of exercises_01.py, number -> Exercise. A new one
needs a reference, inputs, and the wrong answers that one expects, each with the sentence that would
help:

    def unit_rows(x, *, dim=-1, least=1e-12):
        return x / x.square().sum(dim, keepdim=True).sqrt().clamp(min=least)

    def rows(generator):
        yield "three rows", torch.randn(3, 5, generator=generator)
        yield "a row of zeros", torch.zeros(1, 5)

    EXERCISES["1.99"] = Exercise(reference=unit_rows, inputs=rows, misconceptions={
        "Each row has a length of its own: look at dim.": partial(unit_rows, dim=None),
        "A row of zeros gives 0/0.": partial(unit_rows, least=0)})

Mistakes that are functools.partial of one function, as here, are tried together too.
"""
import importlib
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import torch

from answers import answers, arguments, code_of, copy, largest_gap
from explain import difference, yes_or_no
from mistakes import agree_at, call, general, known_mistakes, of_overwriting, parameters

AUTOGRAD = ("autograd", "backward", "grad", "jacobian", "jacrev", "jacfwd", "vjp", "jvp", "hessian")
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))                                              # exercises import model.py


@dataclass(eq=False)                    # so that it can be a key
class Exercise:
    """reference(*arguments) is the right answer: a number, a tensor, or a tuple or list of them.

    inputs(generator) yields (label, *arguments) with a seeded torch.Generator; the label is shown.
    misconceptions: helpful sentence -> wrong function; no two give the same answers, nor one those of
    the reference. What mistakes.general says as well by itself (a factor, an argument that is not looked
    at, another order, a missing root) is none. The function takes what it needs by name: some of the
    reference's arguments, `right`, what that gives, or one of its values that `parts` names.
    An output is right within tolerance * (1 + its size). A tuple or list of numbers only is one tensor.
    parts: names for the values of a tuple, such as ("dx", "dweight").
    properties: sentence -> check of what every right answer has. Where no misconception fits, the first
    sentence is said whose check does not hold; the last may be `never`. A check takes the answer first,
    and then by name what it needs: some of the reference's arguments, and `right`.
    about: of questions answered by True or False, a sentence each, by input (or by place, where the
    answer is a list).
    without: names that may not stand in the function, nor in those of the notebook that it calls.

    Made of dicts, misconceptions and properties are kept as lists of (function, sentence).
    """

    reference: Callable
    inputs: Callable
    misconceptions: list
    tolerance: float = 1e-5
    parts: tuple = ()
    properties: list = field(default_factory=list)
    about: dict = field(default_factory=dict)
    without: tuple = ()

    def __setattr__(self, name, value):
        if isinstance(value, dict) and name in ("misconceptions", "properties"):
            value = [(function, sentence) for sentence, function in value.items()]
        super().__setattr__(name, value)

    def __post_init__(self):
        self.misconceptions = [(self.answering(wrong), sentence) for wrong, sentence in self.misconceptions]

    def answering(self, wrong):
        """The function that may name what it needs, as one of all arguments."""
        names = parameters(self.reference)
        wanted = parameters(wrong)
        has_all = sorted(wanted) == sorted(names)
        if has_all or not set(wanted) <= {*names, *self.parts, "right"}:
            return wrong

        def answer(*given):
            right = None
            if not set(wanted) <= set(names):
                right = self.reference(*given)
            return call(wrong, self, given, right=right)
        return answer


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


# ---- One exercise --------------------------------------------------------------------------------

results = {}                            # number -> ("solved" | "unsolved" | "wrong", sentences)
went_wrong = {}                         # number -> label of the first input that did, the function


def words_in(code, own, seen):
    """The names in a function's code, in that of functions in it, and in that of others of its notebook
    that it calls: `own` are the notebook's names."""
    if code is None or code in seen:
        return set()
    seen.add(code)
    words = set()
    for name in code.co_names:
        thing = own.get(name)
        is_own_function = getattr(thing, "__globals__", None) is own
        if is_own_function:
            words |= words_in(code_of(thing), own, seen)
        else:
            words |= {name, getattr(thing, "__name__", name)}
    for inner in code.co_consts:
        if inspect.iscode(inner):
            words |= words_in(inner, own, seen)
    return words


def shortcuts(function, exercise):
    """The names that the exercise rules out and the function uses."""
    own = getattr(inspect.unwrap(function), "__globals__", {})
    return sorted(words_in(code_of(function), own, set()) & set(exercise.without))


def inputs(number):
    """A tuple: the arguments with which the last grade(number, ...) went wrong, and prints what your
    function gives on them; before that, the first arguments."""
    given = arguments(find(number))
    label, function = went_wrong.get(number, (next(iter(given)), None))
    if function:
        try:
            found = f"gave\n{function(*copy(given[label]))}"
        except Exception as error:
            found = f"raised {type(error).__name__}: {error}"
        print(f"{number}  with {label}, your function {found}")
        print("     Its name stands for the grader's own now: to call yours, run its cell again")
    return tuple(given[label])


def grade(number, function):
    """Prints how `function` does on exercise `number`; returns it if it is right, else one that is."""
    if not isinstance(number, str) or not callable(function):
        raise TypeError(
            'grade("1.2", layer_norm) takes the number in quotes (1.10 without them is 1.1) and then the '
            f"function itself, got {number!r:.30} and {function!r:.30}")
    exercise = find(number)
    results[number] = "unsolved", []
    if function is exercise.reference:
        print(f"{number}  this name stands for the grader's own function now: "
              "run the cell with your function first")
        return function
    if used := ", ".join(shortcuts(function, exercise)):
        print(f"{number}  not yet: this one is to be solved without {used}")
        print("     going on with the reference")
        results[number] = "wrong", [f"solved with {used}"]
        return exercise.reference
    went_wrong.pop(number, None)
    try:
        given, overwritten = answers(function, exercise)
    except NotImplementedError:
        print(f"{number}  not solved yet, going on with the reference")
        return exercise.reference
    expected, _ = answers(exercise.reference, exercise)
    wrong = [label for label in expected if not agree_at(label, None, given, expected, exercise)]
    if not wrong and not overwritten:
        largest = largest_gap(given, expected)
        print(f"{number}  pass: {len(given)} inputs, largest difference {largest:.1g}")
        results[number] = "solved", []
        return function
    sentences = known_mistakes(given, overwritten, expected, exercise) if wrong else []
    if overwritten:
        sentences.append(of_overwriting(function, overwritten, exercise))
    if wrong:
        went_wrong[number] = wrong[0], function
        sentences = print_wrong(number, exercise, function, given, expected, wrong, sentences)
    else:
        print(f"{number}  not yet: the values are right, but the function changes what it is given")
    results[number] = "wrong", sentences
    for sentence in sentences:
        print(f"     {sentence}")
    print("     going on with the reference")
    return exercise.reference


def print_wrong(number, exercise, function, given, expected, wrong, sentences):
    """Prints where the answers differ -> the sentences that say why."""
    if answered := yes_or_no(given, expected, exercise):
        count, questions, (label, place) = answered
        print(f"{number}  not yet: {count} of {questions} answers wrong")
        if not sentences and count == questions > 2:
            return ["Every answer is the opposite of the right one: what does True stand for?"]
        question = label if len(expected) > 1 else f"number {place + 1}"
        about = exercise.about.get(label) or exercise.about.get(place)
        return sentences or [about or f"Look again at {question}."]
    print(f"{number}  not yet: with {wrong[0]}, {difference(wrong[0], given, expected, exercise)}")
    if len(wrong) < len(expected):
        print(f"     right with: {'; '.join(x for x in expected if x not in wrong)}")
        print(f"     wrong with: {'; '.join(wrong)}")
    print(f'     the input that went wrong, and what you gave: inputs("{number}")')
    return sentences or general(function, given, expected, exercise)
