"""
Check a student's answer to an exercise of the lessons, and recognize common mistakes.

    from grader import grade, inputs
    layer_norm = grade("1.2", layer_norm)

grade calls the function on inputs that the student has not seen, edge cases included, and prints
whether its results are right. It returns the function if it is right, and a right one if it is
wrong or not written yet, so that the notebook can continue. The right answer is never shown.
inputs("1.2") returns the arguments of the input that went wrong and prints what the function gave.

grade_class.py grades a class.

The exercises of lesson 1 are the dict EXERCISES of exercises_01.py: number -> Exercise. A new one
needs a reference, inputs, and the wrong answers that you expect, each with a sentence that helps:

    def unit_rows(x, *, dim=-1, least=1e-12):
        return x / x.square().sum(dim, keepdim=True).sqrt().clamp(min=least)

    def rows(generator):
        yield "three rows", torch.randn(3, 5, generator=generator)
        yield "a row of zeros", torch.zeros(1, 5)

    EXERCISES["1.99"] = Exercise(reference=unit_rows, inputs=rows, misconceptions={
        "Each row has a length of its own: look at dim.": partial(unit_rows, dim=None),
        "A row of zeros gives 0/0.": partial(unit_rows, least=0)})

Mistakes that are functools.partial of one function, as here, are also tried in pairs.
"""
import dis
import importlib
import inspect
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import torch

from answers import (
    NothingReturned, answers, arguments, code_of, copy, gradients, largest_gap, own_answers)
from explain import difference, yes_or_no
from mistakes import (
    agree, call_by_name, general_sentences, known_mistake_sentences, overwriting_sentence,
    parameter_names)

AUTOGRAD = ("autograd", "backward", "grad", "jacobian", "jacrev", "jacfwd", "vjp", "jvp", "hessian")
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))                      # some exercises import model.py
CONTINUES = "     the notebook continues with the grader's own function"


@dataclass(eq=False)                            # so that an Exercise can be a key of a dict
class Exercise:
    """One exercise: its right answer, its inputs, and the wrong answers that are known.

    reference(*arguments) returns the right answer: a number, a tensor, or a tuple or list of these.
    A tuple or list of numbers only counts as one tensor.

    inputs(generator) yields (label, *arguments), with a seeded torch.Generator. Students see the
    label.

    misconceptions maps a helpful sentence to the wrong function that it explains. No two of these
    functions may give the same answers, and none may give the right ones. Leave out what
    mistakes.general_sentences recognizes by itself: a factor, an unused argument, another order, a
    missing root. The wrong function names what it needs: some of the reference's arguments, `right`
    (the right answer), or one of its values by the name that it has in `parts`.

    An output is right within tolerance * (1 + its size).

    parts names the values of a tuple, for example ("dx", "dweight").

    properties maps a sentence to a check of something that holds for every right answer. If no
    misconception fits, the first sentence whose check fails is printed. The last check may be
    `never`. A check takes the answer first, and then by name some of the reference's arguments and
    `right`.

    about has a sentence for each question that is answered by True or False: by input label, or by
    position if the answer is a list.

    trains names the arguments whose gradients have to be right, too, because the notebook trains a
    model with the answer.

    without lists names that may not appear in the function, nor in the notebook's functions that it
    calls.

    misconceptions and properties may be dicts; they are stored as lists of (function, sentence).
    """

    reference: Callable
    inputs: Callable
    misconceptions: list
    tolerance: float = 1e-5
    parts: tuple = ()
    properties: list = field(default_factory=list)
    about: dict = field(default_factory=dict)
    trains: tuple = ()
    without: tuple = ()

    def __setattr__(self, name, value):
        if isinstance(value, dict) and name in ("misconceptions", "properties"):
            value = [(function, sentence) for sentence, function in value.items()]
        super().__setattr__(name, value)

    def __post_init__(self):
        self.misconceptions = [
            (self.with_all_arguments(wrong), sentence) for wrong, sentence in self.misconceptions]

    def with_all_arguments(self, wrong):
        """Turn a function of the arguments that it names into a function of all arguments."""
        names = parameter_names(self.reference)
        wanted = parameter_names(wrong)
        has_all = sorted(wanted) == sorted(names)
        if has_all or not set(wanted) <= {*names, *self.parts, "right"}:
            return wrong

        def answer(*inputs):
            right = None
            if not set(wanted) <= set(names):
                right = self.reference(*inputs)
            return call_by_name(wrong, self, inputs, right=right)
        return answer


def find(number):
    """Return the Exercise with this number, such as "1.2". Raise KeyError if there is none."""
    lesson = number.split(".")[0]
    try:
        exercises = importlib.import_module(f"exercises_{int(lesson):02d}").EXERCISES
    except (ModuleNotFoundError, ValueError) as error:
        if not (getattr(error, "name", None) or "exercises_").startswith("exercises_"):
            raise
        raise KeyError(f"no exercise {number!r}: there is no lesson {lesson}") from None
    if number not in exercises:
        raise KeyError(f"no exercise {number!r}; there are {', '.join(exercises)} (if the notebook "
                       "is newer than this repository: `git pull`, then restart the kernel)")
    return exercises[number]


# ---- One exercise --------------------------------------------------------------------------------

results = {}                # number -> ("solved" | "unsolved" | "wrong", sentences)
wrong_inputs = {}           # number -> (label of the first input that went wrong, the function)


def used_names(code, own, seen):
    """Return the names that a function's code uses.

    Functions inside it count, too, and so do functions of its notebook that it calls. `own` has the
    names of the notebook, and `seen` the code objects that were visited before.
    """
    if code is None or code in seen:
        return set()
    seen.add(code)
    words = set()
    for step in dis.get_instructions(code):
        if step.argval not in code.co_names:
            continue
        # In F.layer_norm, layer_norm is an attribute, even if the notebook has a function of that
        # name.
        is_global = step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        value = own.get(step.argval) if is_global else None
        is_own_function = getattr(value, "__globals__", None) is own
        if is_own_function:
            words |= used_names(code_of(value), own, seen)
        else:
            words |= {step.argval, getattr(value, "__name__", step.argval)}
    for constant in code.co_consts:
        if inspect.iscode(constant):
            words |= used_names(constant, own, seen)
    return words


def forbidden_names(function, exercise):
    """Return the names that the function uses although the exercise forbids them."""
    own = getattr(inspect.unwrap(function), "__globals__", {})
    return sorted(used_names(code_of(function), own, set()) & set(exercise.without))


def inputs(number):
    """Return the arguments, as a tuple, for which the last grade(number, ...) went wrong.

    Print what the student's function gives for them. If nothing went wrong, return the first
    arguments.
    """
    by_label = arguments(find(number))
    label, function = wrong_inputs.get(number, (next(iter(by_label)), None))
    if function:
        try:
            outcome = f"returned\n{function(*copy(by_label[label]))}"
        except Exception as error:
            outcome = f"raised {type(error).__name__}: {error}"
        lines = outcome.splitlines()
        if len(lines) > 25:
            lines = [*lines[:20], f"... ({len(lines) - 20} more lines)"]
        print(f"{number}  with {label}, your function", "\n".join(lines))
        print("     its name stands for the grader's own function now; "
              "to call yours, run its cell again")
    return tuple(by_label[label])


def grade(number, function):
    """Print how `function` does on exercise `number`. Return it, or a right one if it is wrong."""
    if not isinstance(number, str) or not callable(function):
        raise TypeError(
            'grade("1.2", layer_norm) takes the number in quotes (1.10 without them is 1.1) and '
            f"then the function itself, but got {number!r:.30} and {function!r:.30}")
    exercise = find(number)
    results[number] = "unsolved", []
    if function is exercise.reference:
        print(f"{number}  this name stands for the grader's own function now: "
              "run the cell with your function first")
        return function
    if used := ", ".join(forbidden_names(function, exercise)):
        print(f"{number}  not yet: this exercise is to be solved without {used}")
        print(CONTINUES)
        results[number] = "wrong", [f"solved with {used}"]
        return exercise.reference
    wrong_inputs.pop(number, None)
    try:
        found, overwritten = answers(function, exercise)
    except NotImplementedError:
        print(f"{number}  not solved yet: the notebook continues with the grader's own function")
        return exercise.reference
    expected, _ = own_answers(exercise.reference, exercise)
    wrong = [label for label in expected if not agree(label, None, found, expected, exercise)]
    about_gradients = None
    if exercise.trains and not wrong and not overwritten:
        about_gradients = gradient_sentence(function, exercise)
    if not wrong and not overwritten and not about_gradients:
        largest = largest_gap(found, expected)
        inputs_in_words = "1 input" if len(found) == 1 else f"{len(found)} inputs"
        print(f"{number}  pass: {inputs_in_words}, largest difference {largest:.1g}")
        results[number] = "solved", []
        return function

    sentences = []
    if wrong:
        sentences = known_mistake_sentences(found, overwritten, expected, exercise)
    if overwritten:
        sentences.append(overwriting_sentence(function, overwritten, exercise))
    if wrong:
        wrong_inputs[number] = wrong[0], function
        sentences = print_wrong(number, exercise, function, found, expected, wrong, sentences)
    elif overwritten:
        print(f"{number}  not yet: the values are right, but the function changes its arguments")
    else:
        print(f"{number}  not yet: the values are right, but not all gradients are")
        sentences.append(about_gradients)
    # The student has just read which exception the function raised. The table of a class needs it,
    # too.
    raised = [f"{type(x).__name__}: {x}" for x in found.values()
              if isinstance(x, Exception) and not isinstance(x, NothingReturned)]
    results[number] = "wrong", [*sentences, *raised[:1]]
    for sentence in sentences:
        print(f"     {sentence}")
    print(CONTINUES)
    return exercise.reference


def gradient_sentence(function, exercise):
    """Return what is wrong with the gradients of a function whose values are right, or None."""
    # The caller may have switched gradients off.
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = gradients(exercise.reference, exercise)
        try:
            found = gradients(function, exercise)
        except Exception as error:
            sentence = f"Training with your function would fail: {type(error).__name__}: {error}"
            if "inplace" in str(error):
                sentence += " (An operation in place, such as *=, changes its operand.)"
            return sentence
    names = []
    for name, gradient in found.items():
        if gradient is None:
            gradient = torch.zeros_like(expected[name])
        # The two forms of GELU differ by less than this.
        tolerance = 0.02 * expected[name].abs().max()
        is_right = (gradient - expected[name]).abs().max() <= tolerance
        if not is_right:
            names.append(name)
    if not names:
        return None
    return ("Training with your function would go wrong, because the gradients of these are wrong "
            f"or missing: {some_of(names)}. Do you hide something from autograd, for example with "
            ".item(), .tolist(), .detach(), .data, torch.tensor() or torch.no_grad()?")


def print_wrong(number, exercise, function, found, expected, wrong, sentences):
    """Print where the answers differ from the right ones. Return the sentences that say why."""
    if answered := yes_or_no(found, expected, exercise):
        wrong_places, questions = answered
        if not only_yes_or_no(found):
            print(f"{number}  not yet: some answers are neither True nor False")
            return ["Return True or False, not the size of something: compare it with a small "
                    "number."]
        print(f"{number}  not yet: {len(wrong_places)} of {questions} answers are wrong")
        return sentences or yes_or_no_sentences(wrong_places, questions, exercise, expected)
    print(f"{number}  not yet: with {wrong[0]}, {difference(wrong[0], found, expected, exercise)}")
    if len(wrong) < len(expected):
        print(f"     right with: {some_of(x for x in expected if x not in wrong)}")
        print(f"     wrong with: {some_of(wrong)}")
    print(f'     to see the input that went wrong and your result: inputs("{number}")')
    return sentences or general_sentences(function, found, expected, exercise)


def only_yes_or_no(found):
    """Return True if all answers are True, False, 0 or 1. NaN is left to other sentences."""
    return all(((x == 0) | (x == 1) | x.isnan()).all() for parts in found.values() for x in parts)


def some_of(labels, most=4):
    """Return the first labels in one line, and the number of the others."""
    labels = list(labels)
    rest = f"; and {len(labels) - most} more" if len(labels) > most else ""
    return "; ".join(labels[:most]) + rest


def yes_or_no_sentences(wrong_places, questions, exercise, expected):
    """Return a sentence for each of the first two wrong answers, as far as the exercise has any."""
    if len(wrong_places) == questions > 2:
        return ["Every answer is the opposite of the right one: what does True stand for?"]
    sentences, used, rest = [], set(), 0
    for label, place in wrong_places:
        sentence = exercise.about.get(label) or exercise.about.get(place)
        if sentence in used:
            continue                            # it speaks of this answer, too
        if sentence and len(sentences) < 2:
            used.add(sentence)
            if len(expected) > 1 and label not in exercise.about:
                sentence += f" (Input: {label}.)"
            sentences.append(sentence)
        else:
            rest += 1
    if sentences and rest:
        return [*sentences, f"{rest} more to find."]
    label, place = wrong_places[0]
    question = label if len(expected) > 1 else f"number {place + 1}"
    return sentences or [f"Look again at {question}."]
