"""
What a function gives: it is called with copies of an exercise's inputs, and what it returns is
brought into one form.

Answers are compared as lists of tensors. A number, an array, a list of numbers, a generator and a
stacked tensor in place of a list are taken for what they stand for.
"""
import inspect
import linecache
import traceback
import warnings
from collections.abc import Iterator

import numpy as np
import torch


# ---- Calling a function --------------------------------------------------------------------------

def copy(x):
    if isinstance(x, torch.Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    if isinstance(x, dict):
        return {key: copy(y) for key, y in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(copy(y) for y in x)
    return x


def unchanged(now, before):
    """Whether an argument holds what it held. What rounding leaves of += and -= is no change."""
    if isinstance(before, torch.Tensor):
        now, before = now.detach(), before.detach()
        return torch.equal(now, before) or close(now, before, 1e-6)  # the first is quick
    if isinstance(before, dict):
        same_keys = now.keys() == before.keys()
        return same_keys and all(unchanged(now[key], before[key]) for key in before)
    if isinstance(before, (tuple, list)):
        return len(now) == len(before) and all(unchanged(x, y) for x, y in zip(now, before))
    return True


def arguments(exercise):
    """label -> arguments"""
    return {label: given for label, *given in exercise.inputs(torch.Generator().manual_seed(1337))}


def answers(function, exercise):
    """label -> what `function` gives: a list of tensors (one for a row of numbers), or the exception
    it raised. And a set: the places of the arguments that it has overwritten."""
    found, overwritten = {}, set()
    for label, given in arguments(exercise).items():
        torch.default_generator.manual_seed(1337)       # torch.manual_seed takes a millisecond more
        copies = copy(given)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")         # of a variance of one element, say
                found[label] = values(function(*copies))
        except Exception as error:
            is_stub = isinstance(error, NotImplementedError) and not error.args
            if is_stub:                                 # torch's own come with words
                raise
            error.line = line_of(function, error)
            found[label] = error
        overwritten |= {i for i, x in enumerate(copies) if not unchanged(x, given[i])}
    return found, overwritten


def code_of(function):
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if inspect.iscode(code) else None


def line_of(function, error):
    """The last line of the function's own file or notebook that ran before the error, in words."""
    own, words = getattr(inspect.unwrap(function), "__globals__", None), ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        source = linecache.getline(frame.f_code.co_filename, number).strip()
        if frame.f_globals is own and source:
            words = f", line {number}: {source}"
    return words


# ---- One form for what it returns ----------------------------------------------------------------

def tensor(x):
    """x, a number, a tensor, an array, or a list of such that have one shape, as a tensor."""
    if isinstance(x, complex):
        raise TypeError("a complex number was returned: is it a root of something negative?")
    if x is None:
        raise TypeError("nothing was returned")
    if isinstance(x, torch.Tensor):
        return x.detach()
    try:
        if isinstance(x, (tuple, list)):
            return torch.stack([tensor(y) for y in x])
        return torch.as_tensor(np.array(x))
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{x!r:.60} was returned, expected a number or a tensor") from None


def values(given):
    """What was returned as a list of tensors, or a tuple of one; numbers only make one."""
    if isinstance(given, Iterator):
        given = list(given)
    if not isinstance(given, (tuple, list)):
        return (tensor(given),)                         # no list: a row in a list is told from a row
    found = [tensor(x) for x in given]
    if found and all(x.dim() == 0 for x in found):
        return [torch.stack(found)]
    return found


def aligned(given, expected, names):
    """Both as lists of as many tensors: a stacked tensor is taken for a list, a list of rows for a
    tensor."""
    if len(given) == 1 < len(expected) and given[0].dim() and len(given[0]) == len(expected):
        given = list(given[0])
    elif len(expected) == 1 and isinstance(given, list) and len({x.shape for x in given}) == 1:
        rows = torch.stack(given)
        if rows.shape == expected[0].shape:
            given = [rows]
    if len(expected) == len(given) == 1 and given[0].shape == expected[0].shape == (len(names),):
        return list(given[0]), list(expected[0])            # numbers that have names
    return given, expected


# ---- Whether two are the same --------------------------------------------------------------------

def gap(a, b):
    """|a - b| / (1 + |b|), 0 where both are NaN or the same infinity"""
    a, b = a.double(), b.double()
    equal = (a.isnan() & b.isnan()) | (a == b)
    off = torch.where(equal, 0.0, (a - b).abs() / (1 + b.abs()))
    return off.nan_to_num(nan=torch.inf)


def close(a, b, tolerance):
    if a.shape != b.shape:
        return False
    return a.numel() == 0 or gap(a, b).max().item() <= tolerance


def near(a, b, tolerance=1e-3):
    """Whether numbers, or all entries of tensors, agree; never with NaN."""
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return bool(((a - b).abs() <= tolerance * (1 + b.abs())).all())


def halves(a, b):
    """Whether one is of a half-precision dtype that the other has not; no other dtype counts."""
    return a.dtype != b.dtype and bool({a.dtype, b.dtype} & {torch.float16, torch.bfloat16})


def same(a, b, tolerance):
    return close(a, b, tolerance) and not halves(a, b)


def largest_gap(given, expected):
    largest = 0.0
    for label in given:
        for a, b in zip(*aligned(given[label], expected[label], ())):
            if a.numel():
                off = (a.double() - b.double()).abs().nan_to_num()
                largest = max(largest, off.max().item())
    return largest
