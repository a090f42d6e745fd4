"""
Call a function on the inputs of an exercise and bring what it returns into one form.

Answers are compared as lists of tensors. Numbers, NumPy arrays, lists of numbers, generators, and
one stacked tensor in place of a list are all accepted.
"""
import inspect
import linecache
import traceback
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch


# ---- Calling a function --------------------------------------------------------------------------

def copy(x):
    """Return a deep copy of tensors, and of dicts, tuples and lists of them."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    if isinstance(x, dict):
        return {key: copy(y) for key, y in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(copy(y) for y in x)
    return x


def unchanged(now, before):
    """Return True if an argument still has its values, up to the rounding of += and -=."""
    if isinstance(before, torch.Tensor):
        now, before = now.detach(), before.detach()
        # torch.equal is faster than close.
        return torch.equal(now, before) or close(now, before, 1e-6)
    if isinstance(before, dict):
        same_keys = now.keys() == before.keys()
        return same_keys and all(unchanged(now[key], before[key]) for key in before)
    if isinstance(before, (tuple, list)):
        return len(now) == len(before) and all(unchanged(x, y) for x, y in zip(now, before))
    return True


def arguments(exercise):
    """Return a dict: the label of each input -> the list of its arguments."""
    generator = torch.Generator().manual_seed(1337)
    return {label: values for label, *values in exercise.inputs(generator)}


def answers(function, exercise, labels=None):
    """Call `function` on all inputs of the exercise, or on those with these labels.

    Return a dict and a set. The dict maps each label to what the function returned, as a list of
    tensors (a row of numbers is one tensor), or to the exception that it raised. The set has the
    positions of the arguments that the function changed in place.
    """
    found, overwritten = {}, set()
    for label, inputs in arguments(exercise).items():
        if labels and label not in labels:
            continue
        # Seed the generator directly, because torch.manual_seed takes a millisecond longer.
        torch.default_generator.manual_seed(1337)
        copies = copy(inputs)
        try:
            with warnings.catch_warnings():
                # torch warns for example about the variance of one element.
                warnings.simplefilter("ignore")
                found[label] = values(function(*copies))
        except Exception as error:
            # The stubs raise NotImplementedError without a message; torch's own have one.
            is_stub = isinstance(error, NotImplementedError) and not error.args
            if is_stub:
                raise
            error.line = line_of(function, error)
            error.in_given_function = arose_in_given_function(error)
            found[label] = error
        overwritten |= {i for i, x in enumerate(copies) if not unchanged(x, inputs[i])}
    return found, overwritten


@cache
def own_answers(function, exercise, label=None):
    """Return answers() of one of the exercise's own functions, to all inputs or only this one.

    They are computed once and kept.
    """
    labels = None if label is None else [label]
    return answers(function, exercise, labels)


def gradients(function, exercise):
    """Return a dict: the name of an argument that counts in training -> its gradient or None.

    exercise.trains names these arguments. If one is a dict of tensors, its tensors have names such
    as p["w_o"]. The gradient is that of a weighted sum of what the function returns for the first
    input. It is None if no gradient reaches the argument.

    Return an empty dict if the function returns anything but a tensor, such as a list. The
    function may raise an exception, as NumPy's functions do for a tensor that requires a gradient,
    and autograd may, for example if a tensor that it needs was changed in place.
    """
    inputs = copy(next(iter(arguments(exercise).values())))
    leaves = {}
    for name, value in zip(inspect.signature(exercise.reference).parameters, inputs):
        if name not in exercise.trains:
            continue
        if isinstance(value, dict):
            leaves |= {f'{name}["{key}"]': x for key, x in value.items()}
        else:
            leaves[name] = value
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = function(*inputs)
    if not isinstance(y, torch.Tensor):
        return {}
    if not y.requires_grad:
        return dict.fromkeys(leaves)
    # A plain sum would not do, because it is constant behind a norm that subtracts the mean.
    weights = torch.arange(y.numel()).cos().view(y.shape)
    total = (y * weights).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, found))


def code_of(function):
    """Return the code object of a Python function, or None."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if inspect.iscode(code) else None


def line_of(function, error):
    """Return ", line N: source" for the last line of the student's own code before the error.

    The student's own code is that in the function's file or notebook. Return "" if the error came
    before any line of it.
    """
    own = getattr(inspect.unwrap(function), "__globals__", None)
    words = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        source = linecache.getline(frame.f_code.co_filename, number).strip()
        if frame.f_globals is own and source:
            words = f", line {number}: {source}"
    return words


def arose_in_given_function(error):
    """Return True if an exception arose in one of the functions of the exercises' files.

    The student's function was given such a function as an argument, or by an earlier exercise.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    path = Path(frames[-1].f_code.co_filename)
    return path.parent == Path(__file__).parent and path.name.startswith("exercises_")


# ---- One form for what a function returns --------------------------------------------------------

class NothingReturned(TypeError):
    """A function returned None."""


def tensor(x):
    """Return a number, a tensor, an array, or a list of these with one shape as a tensor."""
    # Tensors and arrays of complex numbers have a dtype that says so.
    if isinstance(x, complex) or "complex" in str(getattr(x, "dtype", "")):
        raise TypeError("the function returned a complex number: did you take the root of a "
                        "negative number?")
    if x is None:
        raise NothingReturned("the function returned None")
    if isinstance(x, torch.Tensor):
        # It may be sparse, or lie on a GPU.
        return x.detach().to_dense().cpu()
    try:
        if isinstance(x, (tuple, list)):
            return torch.stack([tensor(y) for y in x])
        return torch.as_tensor(np.array(x))
    except NothingReturned:
        raise
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"the function returned {x!r:.60}; expected a number or a tensor") from None


def values(returned):
    """Return the answer as a list of tensors, or as a tuple of one tensor.

    A list of numbers becomes a list of one tensor. An answer that was no list becomes a tuple, so
    that a list with one row can be told from the row itself.
    """
    if isinstance(returned, Iterator):
        returned = list(returned)
    if not isinstance(returned, (tuple, list)):
        return (tensor(returned),)
    is_none = [x is None for x in returned]
    if any(is_none) and not all(is_none):
        place = is_none.index(True) + 1
        raise TypeError(f"the function returned {len(returned)} values, and value {place} is None")
    found = [tensor(x) for x in returned]
    if found and all(x.dim() == 0 for x in found):
        return [torch.stack(found)]
    return found


def aligned(answer, expected, names):
    """Return `answer` and `expected` as lists of equal length where possible.

    A stacked tensor is accepted for a list, and a list of rows for a tensor. `names` are the names
    of the exercise's values. If both are one row with a number for each name, the numbers become
    values of their own.
    """
    if len(answer) == 1 < len(expected) and answer[0].dim() and len(answer[0]) == len(expected):
        answer = list(answer[0])
    elif len(expected) == 1 and isinstance(answer, list) and len({x.shape for x in answer}) == 1:
        rows = torch.stack(answer)
        if rows.shape == expected[0].shape:
            answer = [rows]
    if len(expected) == len(answer) == 1 and answer[0].shape == expected[0].shape == (len(names),):
        return list(answer[0]), list(expected[0])
    return answer, expected


# ---- Comparing -----------------------------------------------------------------------------------

def gap(a, b):
    """Return |a - b| / (1 + |b|), and 0 where both are NaN or the same infinity."""
    a, b = a.double(), b.double()
    equal = (a.isnan() & b.isnan()) | (a == b)
    off = torch.where(equal, 0.0, (a - b).abs() / (1 + b.abs()))
    return off.nan_to_num(nan=torch.inf)


def close(a, b, tolerance):
    """Return True if two tensors have one shape and no gap above the tolerance."""
    if a.shape != b.shape:
        return False
    return a.numel() == 0 or gap(a, b).max().item() <= tolerance


def near(a, b, tolerance=1e-3):
    """Return True if two numbers, or all entries of two tensors, agree. NaN never agrees."""
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return bool(((a - b).abs() <= tolerance * (1 + b.abs())).all())


def half_mismatch(a, b):
    """Return True if the dtypes differ and at least one of them is float16 or bfloat16.

    No other difference between dtypes counts.
    """
    return a.dtype != b.dtype and bool({a.dtype, b.dtype} & {torch.float16, torch.bfloat16})


def same(a, b, tolerance):
    """Return True if two tensors are close and neither is wrongly in half precision."""
    if b.dtype == torch.bfloat16:
        tolerance = max(tolerance, 4e-3)            # its rounding
    return close(a, b, tolerance) and not half_mismatch(a, b)


def largest_gap(found, expected):
    """Return the largest gap(a, b) over all answers to all inputs."""
    largest = 0.0
    for label in found:
        for a, b in zip(*aligned(found[label], expected[label], ())):
            if a.numel():
                largest = max(largest, gap(a, b).max().item())
    return largest
