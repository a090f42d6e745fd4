"""
Where an answer differs from what is right, and by how much, in words. mistakes.py has the sentences
that say why.
"""
import numpy as np
import torch

from answers import aligned, arguments, close, copy, gap, halves, same, values


def form(parts):
    """What there is, in words."""
    words = [f"shape {tuple(part.shape)}" if part.dim() else "a number" for part in parts]
    if len(words) == 1:
        return words[0]
    return f"{len(parts)} values ({', '.join(words)})"


def size(a, b):
    """Whether all of a errs to one side of b, in words."""
    same_sign = a * b >= 0
    sides = {
        "too large": a > b,
        "too small": a < b,
        "too large in size": same_sign & (b != 0) & (a.abs() > b.abs()),
        "too small in size": same_sign & (a.abs() < b.abs()),
    }
    for words, holds in sides.items():
        if holds.all():
            return f", {words}" if len(a) == 1 else f", all {words}"
    return ""


def off_by(a, b, tolerance):
    """How a differs from b, both one tensor of one shape."""
    if halves(a, b):
        return f"{b.dtype} expected, given {a.dtype}"
    off, a, b = gap(a, b), a.double(), b.double()
    wrong = off > tolerance
    place = np.unravel_index(off.argmax().item(), off.shape)  # torch's own imports sympy first
    at = f" at {[int(i) for i in place]}" if place else ""
    if not a[place].isfinite():
        return f"{a[place].item()}{at}"
    if not b[place].isfinite():
        return f"{a[place].item():.3g}{at}, where {b[place].item()} is expected"
    by = (a - b)[place].abs().item()
    some = f"; {int(wrong.sum())} of {off.numel()} entries" if off.numel() > 1 else ""
    return f"off by {by:.3g}{at}{some}{size(a[wrong], b[wrong])}"


def part_names(exercise, count):
    return exercise.parts or [f"value {i + 1}" for i in range(count)]


def difference(label, given, expected, exercise):
    """What is different in the answers to an input, in words. given, expected: label -> answers."""
    ours = given[label]
    if isinstance(ours, Exception):
        return f"{type(ours).__name__}: {ours}{ours.line}"
    ours, theirs = aligned(ours, expected[label], exercise.parts)
    if [a.shape for a in ours] != [b.shape for b in theirs]:
        words = another_shape(ours, theirs) or along_another_axis(label, ours, theirs, exercise)
        words = words or one_row_off(ours, theirs)
        return f"{form(theirs)} expected, given {form(ours)}{words}"
    wrong = [i for i, (a, b) in enumerate(zip(ours, theirs)) if not same(a, b, exercise.tolerance)]
    words = [off_by(ours[i], theirs[i], exercise.tolerance) for i in wrong[:2]]
    if len(theirs) > 1:
        names = part_names(exercise, len(theirs))
        words = [f"{names[i]}: {what}" for i, what in zip(wrong, words)]
        if len(wrong) > 2:
            words.append("wrong too: " + ", ".join(names[i] for i in wrong[2:]))
        if len(wrong) < len(theirs):
            right = [name for i, name in enumerate(names) if i not in wrong]
            words.append("right: " + ", ".join(right))
    return "\n     ".join(words) + along_another_axis(label, ours, theirs, exercise)


def another_shape(ours, theirs):
    """Of answers whose shapes differ: what they have in common, in words."""
    if not len(ours) == len(theirs) == 1:
        return ""
    a, b = ours[0], theirs[0]
    if b.dim() > 1 and close(a, b.mT, 1e-4):
        return "; transposed"
    if a.numel() == b.numel() and close(a.flatten(), b.flatten(), 1e-4):
        return "; the numbers are right, the shape is not"
    return ""


def one_row_off(ours, theirs):
    if not len(ours) == len(theirs) == 1 or not ours[0].dim() == theirs[0].dim() > 0:
        return ""
    a, b = ours[0], theirs[0]
    if a.shape[1:] != b.shape[1:] or abs(len(a) - len(b)) != 1:
        return ""
    long, short = (a, b) if len(a) > len(b) else (b, a)
    words = "; one too many" if long is a else "; one is missing"
    if close(long[:-1], short, 1e-4):
        return words + ", the last one. The others are right"
    if close(long[1:], short, 1e-4):
        return words + ", the first one. The others are right"
    return words


def along_another_axis(label, ours, theirs, exercise):
    """Says so where the answer is what the reference gives for the transposed input."""
    def turn(x):
        can_be_turned = isinstance(x, torch.Tensor) and x.dim() > 1 and x.dtype != torch.bool
        return x.mT if can_be_turned else x

    def agree(first, second):
        pairs = zip(first, second)
        return len(first) == len(second) and all(close(x, y, exercise.tolerance) for x, y in pairs)

    try:
        straight = values(exercise.reference(*map(turn, copy(arguments(exercise)[label]))))
    except Exception:
        return ""
    for found in straight, [turn(x) for x in straight]:
        if agree(ours, found) and not agree(found, theirs):
            return "; as if taken along the other axis"
    return ""


def yes_or_no(given, expected, exercise):
    """Of questions answered by True or False: how many are wrong, of how many, (label, place) of the
    first."""
    if any(part.dtype != torch.bool for parts in expected.values() for part in parts):
        return None
    wrong = []
    for label in expected:
        if isinstance(given[label], Exception):
            return None
        ours, theirs = aligned(given[label], expected[label], ())
        if [a.shape for a in ours] != [b.shape for b in theirs]:
            return None
        off = gap(ours[0], theirs[0]).flatten()
        wrong += [(label, i) for i, x in enumerate(off) if x > exercise.tolerance]
    if not wrong:
        return None
    questions = sum(parts[0].numel() for parts in expected.values())
    return len(wrong), questions, wrong[0]
