"""
What a function gives, and what is wrong with it, in words. grader.py prints them.

Answers are compared as lists of tensors. A number, an array, a list of numbers, a generator and a stacked tensor in
place of a list are taken for what they stand for.
"""
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import combinations, permutations

import numpy as np
import torch


# ---- What a function gives -------------------------------------------------------------------------------------------

def copy(x):
    if isinstance(x, torch.Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    if isinstance(x, dict):
        return {key: copy(y) for key, y in x.items()}
    return type(x)(copy(y) for y in x) if isinstance(x, (tuple, list)) else x


def tensor(x):
    """x, a number, a tensor, an array, or a list of such that have one shape, as a tensor."""
    if x is None:
        raise TypeError("nothing was returned")
    if isinstance(x, torch.Tensor):
        return x.detach()
    try:
        return torch.stack([tensor(y) for y in x]) if isinstance(x, (tuple, list)) else torch.as_tensor(np.array(x))
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{x!r:.60} was returned, expected a number or a tensor") from None


def values(given):
    """What was returned as a list of tensors, or a tuple of one; numbers only make one."""
    given = list(given) if isinstance(given, Iterator) else given
    if not isinstance(given, (tuple, list)):
        return (tensor(given),)                             # no list: so one row in a list is told from a row
    found = [tensor(x) for x in given]
    return [torch.stack(found)] if found and all(x.dim() == 0 for x in found) else found


def arguments(exercise):
    """label -> arguments"""
    return {label: given for label, *given in exercise.inputs(torch.Generator().manual_seed(1337))}


def answers(function, exercise):
    """label -> what `function` gives: a list of tensors (one for a row of numbers), or the exception it raised."""
    found = {}
    for label, given in arguments(exercise).items():
        torch.default_generator.manual_seed(1337)               # torch.manual_seed takes a millisecond more
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")             # of a variance of one element, say: the answer tells
                found[label] = values(function(*copy(given)))           # copies: it may write into them
        except Exception as error:
            if isinstance(error, NotImplementedError) and not error.args:       # a stub's; torch's own come with words
                raise
            found[label] = error
    return found


def aligned(given, expected, names):
    """Both as lists of as many tensors: a stacked tensor is taken for a list, a list of rows for a tensor."""
    if len(given) == 1 < len(expected) and given[0].dim() and len(given[0]) == len(expected):
        given = list(given[0])
    elif len(expected) == 1 and isinstance(given, list) and len({x.shape for x in given}) == 1:
        rows = torch.stack(given)
        given = [rows] if rows.shape == expected[0].shape else given
    if len(expected) == len(given) == 1 and given[0].shape == expected[0].shape == (len(names),):
        given, expected = list(given[0]), list(expected[0])             # numbers that have names
    return given, expected


# ---- What is different, in words -------------------------------------------------------------------------------------

def gap(a, b):
    """|a - b| / (1 + |b|), 0 where both are NaN or the same infinity"""
    a, b = a.double(), b.double()
    off = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, (a - b).abs() / (1 + b.abs()))
    return off.nan_to_num(nan=torch.inf)


def close(a, b, tolerance):
    return a.shape == b.shape and (not a.numel() or gap(a, b).max().item() <= tolerance)


def halves(a, b):
    """Whether one is of a half-precision dtype that the other has not; no other dtype counts."""
    return a.dtype != b.dtype and bool({a.dtype, b.dtype} & {torch.float16, torch.bfloat16})


def same(a, b, tolerance):
    return close(a, b, tolerance) and not halves(a, b)


def form(parts):
    """What there is, in words."""
    words = [f"shape {tuple(part.shape)}" if part.dim() else "a number" for part in parts]
    return words[0] if len(parts) == 1 else f"{len(parts)} values ({', '.join(words)})"


RELATIONS = [                                               # of a wrong answer to b, which is right
    ("it is 0 everywhere", lambda b: 0 * b),
    ("the sign is the other one", lambda b: -b),
    ("transposed", lambda b: b.mT if b.dim() > 1 else None),
    ("in reverse order", lambda b: b.flip(-1) if b.dim() else None),
    ("upside down: one over what is expected", lambda b: 1 / b),
    ("the square of what is expected", lambda b: b * b),
    ("the root of what is expected", lambda b: b.sqrt()),
    ("one over the square of what is expected", lambda b: 1 / (b * b)),
    ("one over the root of what is expected", lambda b: b.rsqrt()),
    ("the exponential of what is expected", lambda b: b.exp()),
    ("the logarithm of what is expected", lambda b: b.log()),
]


def relation(pairs, where="everywhere"):
    """What would explain all of the differences between the pairs (given, expected), in words, or ""."""
    pairs = [(a.double(), b.double()) for a, b in pairs if a.numel()]
    if sum(a.numel() for a, b in pairs) < 2:
        return ""
    for words, f in RELATIONS:
        wanted = [f(b) for a, b in pairs]
        if all(w is not None and close(a, w, 1e-4) for (a, b), w in zip(pairs, wanted)) and any(
                not close(a, b, 1e-4) for a, b in pairs):
            return f"; {words}"
    if any(a.shape != b.shape for a, b in pairs):
        return "; the numbers are right, the shape is not" if all(
            a.numel() == b.numel() and close(a.flatten(), b.flatten(), 1e-4) for a, b in pairs) else ""
    a, b = (torch.cat([pair[i].flatten() for pair in pairs]) for i in (0, 1))
    finite = a.isfinite() & b.isfinite()
    ways = [(where, a[finite], b[finite], 0)]
    if len(pairs) == 1 and pairs[0][1].dim() > 1 and min(pairs[0][1].shape[-2:]) > 1:
        ways += [(f"each {of}, with a number of its own:", *pairs[0], axis)
                 for of, axis in (("row", -1), ("column", -2))]
    for of, x, y, axis in ways:
        if y.numel() < 2:
            continue
        factor, shift = (x * y).sum(axis, True) / (y * y).sum(axis, True), (x - y).mean(axis, keepdim=True)
        if (factor - 1).abs().max() > 1e-3 and torch.allclose(x, factor * y, rtol=1e-4, atol=1e-9):
            ends = dict.fromkeys(f"{x.item():.4g}" for x in (factor.min(), factor.max()))
            return f"; {of} {' to '.join(ends)} times what is expected"
        if (x - y - shift).abs().max() < 1e-3 * shift.abs().max():
            ends = dict.fromkeys(f"{x.item():+.4g}" for x in (shift.min(), shift.max()))
            return f"; {of} {' to '.join(ends)}"
    return ""


def size(a, b, wrong):
    """Whether all that is wrong errs to one side, in words."""
    a, b = a[wrong], b[wrong]
    for words, yes in (("too large", a > b), ("too small", a < b),
                       ("too large in size", (a * b > 0) & (a.abs() > b.abs())),
                       ("too small in size", (a * b >= 0) & (a.abs() < b.abs()))):
        if yes.all():
            return f", {words}" if len(a) == 1 else f", all {words}"
    return ""


def off_by(a, b, tolerance, everywhere):
    """How a differs from b, both one tensor of one shape. everywhere: such pairs of all inputs."""
    if halves(a, b):
        return f"{b.dtype} expected, given {a.dtype}"
    off, a, b = gap(a, b), a.double(), b.double()
    wrong, place = off > tolerance, torch.unravel_index(off.argmax(), off.shape)
    at = f" at {[int(i) for i in place]}" if place else ""
    if not a[place].isfinite():
        return f"{a[place].item()}{at}"
    some = f"; {int(wrong.sum())} of {off.numel()} entries" if off.numel() > 1 else ""
    return (f"off by {(a - b).abs()[place].item():.3g}{at}{some}{size(a, b, wrong)}"
            f"{relation(everywhere) or (relation([(a, b)], 'here everywhere') if len(b.unique()) > 1 else '')}")


def difference(label, given, expected, exercise):
    """None where the answers to an input agree, else what is different, in words. given, expected: label -> answers."""
    ours, names, tolerance = given[label], exercise.parts, exercise.tolerance
    if isinstance(ours, Exception):
        line = next((f", line {f.lineno}: {f.line}" for f in reversed(traceback.extract_tb(ours.__traceback__))
                     if f.line and f.filename != __file__ and "site-packages" not in f.filename), "")
        return f"{type(ours).__name__}: {ours}{line}"
    ours, theirs = aligned(ours, expected[label], names)
    if [a.shape for a in ours] != [b.shape for b in theirs]:
        words = relation([(ours[0], theirs[0])]) if len(ours) == len(theirs) == 1 else ""
        words = words or along_another_axis(label, ours, theirs, exercise)
        return f"{form(theirs)} expected, given {form(ours)}{words}"
    wrong = [i for i, (a, b) in enumerate(zip(ours, theirs)) if not same(a, b, tolerance)]
    if not wrong:
        return None
    words, order = [], range(len(theirs))
    all_pairs = [aligned(given[x], expected[x], names) for x in given if not isinstance(given[x], Exception)]
    for i in wrong[:2]:
        everywhere = [(a[i], b[i]) for a, b in all_pairs if len(a) == len(b) > i and a[i].shape == b[i].shape]
        words.append(off_by(ours[i], theirs[i], tolerance, everywhere))
    if len(theirs) > 1:
        names = names or [f"value {i + 1}" for i in range(len(theirs))]
        words = [f"{names[i]}: {what}" for i, what in zip(wrong, words)]
        words += [f"wrong too: {', '.join(names[i] for i in wrong[2:])}"] if len(wrong) > 2 else []
        right = [names[i] for i in range(len(theirs)) if i not in wrong]
        words += [f"right: {', '.join(right)}"] if right else []
        if len(theirs) < 6 and any(all(len(a) == len(b) == len(x) and all(same(a[i], b[j], tolerance) for i, j in zip(
                order, x)) for a, b in all_pairs) for x in permutations(order)):
            words.append("the values are right, in another order")
    return "\n     ".join(words) + along_another_axis(label, ours, theirs, exercise)


def along_another_axis(label, ours, theirs, exercise):
    """Says so where the answer is what the reference gives for the transposed input."""
    def turn(x):
        return x.mT if isinstance(x, torch.Tensor) and x.dim() > 1 and x.dtype != torch.bool else x
    try:
        turned = values(exercise.reference(*map(turn, copy(arguments(exercise)[label]))))
    except Exception:
        return ""
    found = any(len(ours) == len(turned) and all(close(a, f(b), exercise.tolerance) for a, b in zip(ours, turned))
                and not all(close(f(b), c, exercise.tolerance) for b, c in zip(turned, theirs))
                for f in (lambda x: x, turn))
    return "; as if taken along the other axis" if found else ""


def yes_or_no(given, expected, exercise):
    """Of questions answered by True or False: how many are wrong, of how many, (label, place) of the first."""
    if any(part.dtype != torch.bool for parts in expected.values() for part in parts):
        return None
    wrong = []
    for label in expected:
        ours, theirs = ([], []) if isinstance(given[label], Exception) else aligned(given[label], expected[label], ())
        if [a.shape for a in ours] != [b.shape for b in theirs] or not ours:
            return None
        wrong += [(label, i) for i, x in enumerate(gap(ours[0], theirs[0]).flatten()) if x > exercise.tolerance]
    return len(wrong), sum(parts[0].numel() for parts in expected.values()), wrong[0]


# ---- Known mistakes --------------------------------------------------------------------------------------------------

def mistakes(given, expected, exercise):
    """The sentences of the known mistakes whose answers these are: one, or two that were made together, or none."""
    def is_same(a, b, part=None):
        if isinstance(a, Exception) or isinstance(b, Exception):
            return part is None and isinstance(a, Exception) and isinstance(b, Exception)
        a, b = aligned(a, b, exercise.parts)
        return len(a) == len(b) and all(same(x, y, exercise.tolerance) for i, (x, y) in enumerate(zip(a, b))
                                        if part in (None, i))

    def explains(theirs):
        return all(is_same(given[label], theirs[label]) for label in given)

    if all(isinstance(x, Exception) for x in given.values()):
        return []
    theirs = []
    for wrong, sentence in exercise.misconceptions:
        theirs.append(answers(wrong, exercise))
        if explains(theirs[-1]):
            return [sentence]
    for (f, one), (g, two) in combinations(exercise.misconceptions, 2):         # both made in one function
        ways = isinstance(f, partial) and isinstance(g, partial) and f.func is g.func
        if ways and not f.keywords.keys() & g.keywords.keys():
            if explains(answers(partial(f.func, **f.keywords, **g.keywords), exercise)):
                return [one, two]
    right = {label: aligned(x, x, exercise.parts)[1] for label, x in expected.items()}
    places = [(label, i) for label, x in right.items() for i in range(len(x))]
    yes_or_no = {i for _, i in places if all((x[i] * x[i] == x[i]).all() for x in right.values() if len(x) > i)}
    wrong = [(label, i) for label, i in places if not is_same(given[label], expected[label], i)]
    found = [{(label, i) for label, i in wrong if i not in yes_or_no and is_same(given[label], answer[label], i)}
             for answer in theirs]                          # a mistake that always says yes would explain a few
    for answer, its in zip(theirs, found):                  # but not where it would have got a right value wrong
        its -= {(label, i) for label, i in its for j in range(len(right[label]))
                if (label, j) not in wrong and not is_same(expected[label], answer[label], j)}
    for count in (1, 2):                                    # one for some inputs or values, the other for the rest
        for some in combinations(range(len(theirs)), count):
            if wrong and set().union(*(found[i] for i in some)) == set(wrong) and len(places) > 1:
                return [exercise.misconceptions[i][1] for i in some]
    return []
