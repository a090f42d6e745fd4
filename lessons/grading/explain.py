"""
Say in words where an answer differs from the right one, and by how much. The sentences that say why
are in mistakes.py.
"""
import numpy as np
import torch

from answers import NothingReturned, aligned, close, gap, half_mismatch, same


def shapes_in_words(parts):
    """Return for example "shape (2, 3)", "a number", or "2 values (shape (2, 3), a number)"."""
    words = [f"shape {tuple(part.shape)}" if part.dim() else "a number" for part in parts]
    if len(words) == 1:
        return words[0]
    return f"{len(parts)} values ({', '.join(words)})"


def listed(names, conjunction="and"):
    """Return "a", "a and b" or "a, b and c"."""
    names = list(names)
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {conjunction} {names[-1]}"


def direction(a, b):
    """Return ", too large" or a similar phrase if all of a lies to one side of b, else ""."""
    same_sign = a * b >= 0
    signed = {"too large": a > b, "too small": a < b}
    in_size = {
        "too large in size": same_sign & (b != 0) & (a.abs() > b.abs()),
        "too small in size": same_sign & (a.abs() < b.abs()),
    }
    sides = signed | in_size
    if (b < 0).any():
        # -3 in place of -2 is too small, but a reader thinks of the size. So try that first.
        sides = in_size | signed
    for words, holds in sides.items():
        if holds.all():
            return f", {words}" if len(a) == 1 else f", all {words}"
    return ""


def off_by(a, b, tolerance):
    """Describe the difference between two tensors of one shape."""
    if half_mismatch(a, b):
        return f"expected {b.dtype}, got {a.dtype}"
    off, a, b = gap(a, b), a.double(), b.double()
    wrong = off > tolerance
    # torch.unravel_index would import sympy first.
    place = np.unravel_index(off.argmax().item(), off.shape)
    at = f" at {[int(i) for i in place]}" if place else ""
    if not b[place].isfinite():
        return f"{a[place].item():.3g}{at}, where {b[place].item()} is expected"
    if not a[place].isfinite():
        return f"{a[place].item()}{at}"
    by = (a - b)[place].abs().item()
    some = f"; {int(wrong.sum())} of {off.numel()} entries" if off.numel() > 1 else ""
    return f"off by {by:.3g}{at}{some}{direction(a[wrong], b[wrong])}"


def part_names(exercise, count):
    """Return a name for each value of an answer."""
    return exercise.parts or [f"value {i + 1}" for i in range(count)]


def difference(label, found, expected, exercise):
    """Describe what differs in the answer to one input. found, expected: label -> answer."""
    ours = found[label]
    if isinstance(ours, NothingReturned):
        return str(ours)
    if isinstance(ours, Exception):
        # The lines after the first list the arguments that a function of torch takes.
        message = str(ours).split("\n")[0].removesuffix(", but expected one of:")
        return f"{type(ours).__name__}: {message}{ours.line}"
    ours, theirs = aligned(ours, expected[label], exercise.parts)
    if [a.shape for a in ours] != [b.shape for b in theirs]:
        words = another_shape(ours, theirs) or one_row_off(ours, theirs)
        return f"expected {shapes_in_words(theirs)}, got {shapes_in_words(ours)}{words}"
    wrong = [i for i, (a, b) in enumerate(zip(ours, theirs)) if not same(a, b, exercise.tolerance)]
    words = [off_by(ours[i], theirs[i], exercise.tolerance) for i in wrong[:2]]
    if len(theirs) > 1:
        names = part_names(exercise, len(theirs))
        words = [f"{names[i]}: {what}" for i, what in zip(wrong, words)]
        if len(wrong) > 2:
            words.append("also wrong: " + ", ".join(names[i] for i in wrong[2:]))
        if right := parts_right_everywhere(found, expected, exercise):
            words.append("right: " + ", ".join(names[i] for i in right))
    return "\n     ".join(words)


def parts_right_everywhere(found, expected, exercise):
    """Return the positions of the values that are right with every input."""
    right = None
    for label, theirs in expected.items():
        if isinstance(found[label], Exception):
            return []
        ours, theirs = aligned(found[label], theirs, exercise.parts)
        if [a.shape for a in ours] != [b.shape for b in theirs]:
            return []
        here = {i for i, (a, b) in enumerate(zip(ours, theirs)) if same(a, b, exercise.tolerance)}
        right = here if right is None else right & here
    return sorted(right or ())


def another_shape(ours, theirs):
    """Say what two answers of different shapes have in common, or return ""."""
    if not len(ours) == len(theirs) == 1:
        return ""
    a, b = ours[0], theirs[0]
    if b.dim() > 1 and close(a, b.mT, 1e-4):
        return "; transposed"
    if a.numel() == b.numel() and close(a.flatten(), b.flatten(), 1e-4):
        return "; the numbers are right, the shape is not"
    return ""


def rows_too_many(ours, theirs):
    """Return 1 if an answer has one row too many, -1 if it lacks one, else 0."""
    if not len(ours) == len(theirs) == 1 or not ours[0].dim() == theirs[0].dim() > 0:
        return 0
    a, b = ours[0], theirs[0]
    if a.shape[1:] != b.shape[1:] or abs(len(a) - len(b)) != 1:
        return 0
    return len(a) - len(b)


def one_row_off(ours, theirs):
    """Say which row is missing or one too many, or return ""."""
    rows = rows_too_many(ours, theirs)
    if not rows:
        return ""
    a, b = ours[0], theirs[0]
    long, short = (a, b) if rows > 0 else (b, a)
    words = "; one too many" if rows > 0 else "; one is missing"
    if b.dtype == torch.bool:
        # Several of the answers are equal, so any of them may be the missing one.
        return words
    # Where two neighbors are equal, either of them may be the missing one.
    if close(long[:-1], short, 1e-4) and not close(long[-2:-1], long[-1:], 1e-4):
        return words + ", the last one. The others are right"
    if close(long[1:], short, 1e-4) and not close(long[:1], long[1:2], 1e-4):
        return words + ", the first one. The others are right"
    return words


def yes_or_no(found, expected, exercise):
    """Count the wrong answers to questions with the answer True or False.

    Return a list with (label, position) of each wrong answer, and the number of questions. Return
    None if the exercise has other answers, or if none can be compared.
    """
    if any(part.dtype != torch.bool for parts in expected.values() for part in parts):
        return None
    wrong = []
    for label in expected:
        if isinstance(found[label], Exception):
            return None
        ours, theirs = aligned(found[label], expected[label], ())
        if [a.shape for a in ours] != [b.shape for b in theirs]:
            return None
        off = gap(ours[0], theirs[0]).flatten()
        wrong += [(label, i) for i, x in enumerate(off) if x > exercise.tolerance]
    if not wrong:
        return None
    questions = sum(parts[0].numel() for parts in expected.values())
    return wrong, questions
