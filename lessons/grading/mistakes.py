"""
Say in sentences what may have caused a wrong answer.

known_mistake_sentences compares the answer with the exercise's known mistakes. If none of them
fits, general_sentences says what can be said about any exercise. A sentence is only said if no
value in the student's answer contradicts it.
"""
import dis
import inspect
import math
import warnings
from functools import cache, partial
from itertools import combinations, permutations

import torch

from answers import (
    NothingReturned, aligned, arguments, close, code_of, copy, gap, half_mismatch, near,
    own_answers, same, values)
from error_sentences import REDUCTIONS, error_sentences, values_and_indices
from explain import another_shape, listed, part_names, rows_too_many


# ---- Known mistakes ------------------------------------------------------------------------------

def agree(label, part, found, others, exercise):
    """Return True if two functions give the same answer to one input.

    `part` is the number of the value that is compared, or None for all of them. Two functions that
    both raised an exception agree.
    """
    a, b = found[label], others[label]
    if isinstance(a, Exception) or isinstance(b, Exception):
        return isinstance(a, Exception) and isinstance(b, Exception)
    a, b = aligned(a, b, exercise.parts)
    if part is not None:
        return len(a) == len(b) > part and same(a[part], b[part], exercise.tolerance)
    return len(a) == len(b) and all(same(x, y, exercise.tolerance) for x, y in zip(a, b))


def parameter_names(function):
    """Return the names of a function's positional parameters."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:                                  # built-in functions such as torch.ones_like
        return ["unknown"]
    return [x.name for x in found if x.kind in (x.POSITIONAL_OR_KEYWORD, x.VAR_POSITIONAL)]


def call_by_name(function, exercise, inputs, first=(), right=None):
    """Call function(*first, ...) with the values that its other parameters name.

    They may name arguments of the exercise, `right` (the right answer) and the values in it. If one
    of them names something else, the function gets all arguments.
    """
    known = {"right": right}
    if exercise.parts and right is not None:
        known |= zip(exercise.parts, right)
    known |= zip(parameter_names(exercise.reference), inputs)
    names = parameter_names(function)[len(first):]
    if set(names) <= known.keys():
        inputs = [known[name] for name in names]
    return function(*first, *inputs)


def all_places(expected, exercise):
    """Return (label, number of the value) for every value that is asked for."""
    places = []
    for label, parts in expected.items():
        count = len(aligned(parts, parts, exercise.parts)[1])
        places += [(label, i) for i in range(count)]
    return places


def known_mistake_sentences(found, overwritten, expected, exercise):
    """Return the sentences of the known mistakes that give exactly this answer.

    There may be one, or two that were made together, or none.
    """
    if all(isinstance(x, Exception) for x in found.values()):
        return []

    def explains(others):
        return all(agree(label, None, found, others, exercise) for label in others)

    known = []
    for wrong, sentence in exercise.misconceptions:
        others, others_overwritten = own_answers(wrong, exercise)
        if others_overwritten == overwritten:
            if explains(others):
                return [sentence]
            known.append((wrong, others, sentence))
    # Most pairs differ from the answer with the first input already, so try that one alone first.
    first_label = next(iter(found))
    for (f, _, first), (g, _, second) in combinations(known, 2):
        both = both_mistakes(f, g)
        if both and explains(own_answers(both, exercise, first_label)[0]):
            if explains(own_answers(both, exercise)[0]):
                return [first, second]
    return mistakes_in_parts(found, expected, known, exercise)


@cache
def both_mistakes(f, g):
    """Return the function that makes both mistakes, if both are partial of one function."""
    of_one = isinstance(f, partial) and isinstance(g, partial) and f.func is g.func
    if of_one and not f.keywords.keys() & g.keywords.keys():
        return partial(f.func, **f.keywords, **g.keywords)
    return None


def mistakes_in_parts(found, expected, known, exercise):
    """Explain an answer of several values with a different known mistake for some of them.

    A mistake that makes a value wrong was not made if that value is right in the answer.
    """
    places = all_places(expected, exercise)
    if max(i for _, i in places) == 0:
        return []

    def wrong_places(answers):
        return {place for place in places if not agree(*place, answers, expected, exercise)}

    wrong = wrong_places(found)
    wrong_parts = {i for _, i in wrong}
    numbers = [i for i in sorted(wrong_parts) if is_evidence(i, wrong, found, expected, exercise)]
    fitting = []
    for _, others, sentence in known:
        explained = {i for i in numbers
                     if all(agree(*place, found, others, exercise)
                            for place in wrong if place[1] == i)}
        # A sentence such as "The steps are right." also speaks about the other values.
        speaks_of_others = " right" in sentence and explained != wrong_parts
        if explained and wrong_places(others) <= wrong and not speaks_of_others:
            fitting.append((explained, sentence))
    for count in 1, 2:
        for some in combinations(fitting, count):
            if set().union(*(explained for explained, _ in some)) == wrong_parts:
                return [sentence for _, sentence in some]
    names = part_names(exercise, len(places))
    return [with_names(sentence, [names[i] for i in sorted(explained)])
            for explained, sentence in fitting[:1]]


def with_names(sentence, names):
    """Return the sentence with the names of the values that it is about."""
    return sentence if sentence.startswith(names[0]) else f"{listed(names)}: {sentence}"


def is_evidence(part, wrong, found, expected, exercise):
    """Return True if agreement with a known mistake in this value means something.

    A yes or no, or a single number, may agree by chance. So may numbers that are nearly 0, because
    many mistakes make something tiny.
    """
    tensors = [aligned(x, x, exercise.parts)[1][part] for x in expected.values()]
    if all((x * x == x).all() for x in tensors):
        return False
    ours = [aligned(found[label], expected[label], exercise.parts)[0]
            for label, i in wrong if i == part and not isinstance(found[label], Exception)]
    if all(len(x) > part and near(x[part], 0.0, 1e-5) and x[part].any() for x in ours):
        return False
    times = sum(i == part for _, i in wrong)
    return times > 1 or max(x.numel() for x in tensors) > 1


# ---- What can be said about any exercise ---------------------------------------------------------

def general_sentences(function, found, expected, exercise):
    """Return sentences for an answer that no known mistake explains."""
    if reordered := arguments_reordered(function, exercise):
        return reordered
    broken = broken_property(found, expected, exercise)
    errors = {label: x for label, x in found.items() if isinstance(x, Exception)}
    if len(errors) < len(found) and all(isinstance(x, NothingReturned) for x in errors.values()):
        if errors:
            return [f"With {next(iter(errors))} your function returns nothing: one of its paths "
                    "ends without a `return`, or returns something that is None."]
    pairs = {}
    for label in expected:
        if label in errors:
            if not pairs:
                sentences = error_sentences(errors[label], used_names(code_of(function)))
                return sentences or unused_arguments(function, exercise)
            continue
        ours, theirs = aligned(found[label], expected[label], exercise.parts)
        if [x.shape for x in ours] != [x.shape for x in theirs]:
            return shape_sentences(function, found, expected, label, exercise, broken)
        pairs[label] = [(a.double(), b.double()) for a, b in zip(ours, theirs)]
    if errors and exercise.about:
        # The answers are True or False, so say which of the answers that there are is wrong, and
        # what the first error means.
        wrong = [label for label, parts in pairs.items()
                 if not all(close(a, b, exercise.tolerance) for a, b in parts)]
        sentences = [exercise.about[label] for label in wrong[:1] if label in exercise.about]
        if any(((a != 0) & (a != 1)).any() for parts in pairs.values() for a, _ in parts):
            sentences = ["Return True or False, not the size of something: compare it with a small "
                         "number."]
        error = next(iter(errors.values()))
        return sentences + error_sentences(error, used_names(code_of(function)))
    if all(close(a, b, exercise.tolerance) for parts in pairs.values() for a, b in parts):
        for error in errors.values():
            return error_sentences(error, used_names(code_of(function)))
        return dtypes_exchanged(found, expected, exercise) or [
            "The numbers are right, their dtype is not."]
    rounded_to = None if errors else dtype_of_rounding(found, expected, exercise)
    if rounded_to:
        return [f"The numbers are right, apart from being rounded to {rounded_to}: do not return "
                "them in this dtype."]
    sentences = value_sentences(function, found, expected, pairs, exercise, broken)
    if errors:
        label, error = next(iter(errors.items()))
        message = str(error).split("\n")[0]
        sentence = f"With {label} there is an error: {type(error).__name__}: {message}"
        sentences = [*sentences, sentence]
    return sentences


def value_sentences(function, found, expected, pairs, exercise, broken):
    """Return sentences for an answer that has the right shapes. pairs: label -> (ours, right)."""
    count = min(len(parts) for parts in pairs.values())
    sentences = exchanged(pairs, count, exercise) or only_not_finite(pairs, exercise)
    sentences = sentences or other_axis(found, expected, exercise)
    if sentences:
        return sentences

    def over_all_inputs(pairs, part):
        words = constant(pairs, part, function, exercise) or same_as_argument(
            pairs, function, exercise)
        return words or relation_everywhere(pairs) or named_factor(pairs, function, exercise)

    def over_one_input(pairs, part):
        return relation_for_one_input(pairs)

    over_all = relations(pairs, count, exercise, over_all_inputs)
    if over_all and all(is_plain_factor(sentence) for sentence in over_all):
        over_all = over_all + broken
    # An argument that is never used is cause enough. A lack of a property would follow from it.
    if unused := unused_arguments(function, exercise):
        return unused + over_all
    rest = over_all or approximated(pairs, exercise) or broken or not_a_number(pairs)
    rest = rest or relations(pairs, count, exercise, over_one_input)
    return rest or nearly_right(pairs)


def relations(pairs, count, exercise, describe):
    """Return for each wrong value a sentence about its relation to the right one."""
    found = []
    for i, name in enumerate(part_names(exercise, count)[:count]):
        of_part = {label: parts[i] for label, parts in pairs.items()}
        if not all(close(a, b, exercise.tolerance) for a, b in of_part.values()):
            words = describe(of_part, i)
            if words:
                found.append(f"{name}: {words}" if count > 1 else words)
    return found[:2]


# ---- Shapes --------------------------------------------------------------------------------------

def shape_sentences(function, found, expected, label, exercise, broken):
    """Return sentences for an answer whose shapes differ, first with the input `label`."""
    ours, theirs = aligned(found[label], expected[label], exercise.parts)
    if another_shape(ours, theirs):
        # The student has just read that the numbers are right. A property that they lack in this
        # shape would say that they are wrong.
        broken = []
    return (shapes_exchanged(ours, theirs, exercise)
            or flattened(ours, theirs, exercise)
            or transposed(ours, theirs, exercise)
            or values_and_indices_returned(function, label, exercise)
            or other_axis(found, expected, exercise)
            or reduction_missing(found, expected)
            or unused_arguments(function, exercise)
            or number_of_values(ours, theirs, exercise)
            or one_value_expected(ours, theirs)
            or numbers_expected(ours, theirs)
            or broken
            or number_of_answers(ours, theirs)
            or one_row_sentence(found, expected, exercise)
            or reduced_too_much(function, ours, theirs)
            or reduced_other_axes(function, label, ours, theirs, exercise))


def shapes_exchanged(ours, theirs, exercise):
    """Recognize an answer whose values have the right shapes, but in another order."""
    shapes = [[tuple(x.shape) for x in answer] for answer in (ours, theirs)]
    if sorted(shapes[0]) != sorted(shapes[1]):
        return []
    names = part_names(exercise, len(theirs))
    return [f"Return the values in this order: {listed(names)}. By their shapes, yours are in "
            "another one."]


def flattened(ours, theirs, exercise):
    """Recognize values that have the right numbers in another shape, each other value right."""
    if not 1 < len(ours) == len(theirs):
        return []
    names, reshaped = part_names(exercise, len(theirs)), []
    for name, a, b in zip(names, ours, theirs):
        if a.shape != b.shape:
            if a.numel() != b.numel() or not close(a.flatten(), b.flatten(), 1e-4):
                return []
            reshaped.append(name)
    return [f"{listed(reshaped)}: the numbers are right, the shape is not."]


def transposed(ours, theirs, exercise):
    names = part_names(exercise, len(theirs))
    for name, a, b in zip(names, ours, theirs):
        if a.shape != b.shape and b.dim() > 1 and close(a, b.mT, 1e-4):
            return [f"{name} is transposed." if len(theirs) > 1 else "Your answer is transposed."]
    return []


def values_and_indices_returned(function, label, exercise):
    """Recognize an answer that is, or contains, what x.median(dim) returns."""
    try:
        returned = function(*copy(arguments(exercise)[label]))
    except Exception:
        return []
    for x in (returned, *(returned if isinstance(returned, (tuple, list)) else ())):
        if type(x).__module__ == "torch.return_types":
            return [values_and_indices(type(x).__name__)]
    return []


REDUCED = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.sum(),
    "all": lambda x: x.bool().all().double(),
    "any": lambda x: x.bool().any().double(),
    "max": lambda x: x.max(),
}


def reduction_missing(found, expected):
    """Recognize an answer with many entries where one number is expected."""
    pairs = []
    for label, theirs in expected.items():
        ours = found[label]
        if isinstance(ours, Exception) or len(theirs) != 1 or theirs[0].dim() or len(ours) > 1:
            return []
        answer = ours[0] if ours else torch.zeros(0)
        pairs.append((answer.double(), theirs[0].double()))
    yes_or_no = all(theirs[0].dtype == torch.bool for theirs in expected.values())
    # An empty tensor has no mean. But its .all() is True.
    can_be_reduced = yes_or_no or all(a.numel() for a, _ in pairs)
    if not can_be_reduced or not any(a.numel() > 1 for a, _ in pairs):
        return []
    what = "a mean, a sum"
    kind = "number"
    if yes_or_no:
        what, kind = ".all() or .any()", "True or False"
    for name, reduce in REDUCED.items():
        if yes_or_no == (name in ("all", "any")):
            if all(close(reduce(a), b, 1e-4) for a, b in pairs):
                return [f"One {kind} is expected, and .{name}() over yours gives it."]
    return [f"One {kind} is expected, and yours has one for each entry: is {what} missing at the "
            "end?"]


def numbers_expected(ours, theirs):
    """Recognize values that are lists or tensors where each should be a single number."""
    numbers_only = len(theirs) == 1 and theirs[0].shape == (len(ours),)
    if numbers_only and any(x.dim() for x in ours):
        return ["Each value should be a single number, and at least one of yours is a list or a "
                "tensor."]
    return []


def one_value_expected(ours, theirs):
    """Recognize several tensors, each of the shape of the one that is expected."""
    if len(theirs) == 1 < len(ours) and all(x.shape == theirs[0].shape for x in ours):
        return [f"One tensor of that shape is expected, and you return {len(ours)}: which of them "
                "is the answer?"]
    return []


def number_of_values(ours, theirs, exercise):
    """Say how many values are expected."""
    numbers_only = len(theirs) == 1 and theirs[0].shape == (len(exercise.parts),)
    wanted = len(exercise.parts) if numbers_only else len(theirs)
    count = ours[0].numel() if numbers_only and len(ours) == 1 else len(ours)
    if wanted < 2 or count == wanted:
        return []
    names = f": {listed(exercise.parts)}" if exercise.parts else ""
    return [f"{wanted} values are expected{names}. Yours has {count}."]


def number_of_answers(ours, theirs):
    """Say how many answers True or False are expected in a row."""
    if not len(ours) == len(theirs) == 1 or not ours[0].dim() == theirs[0].dim() == 1:
        return []
    if theirs[0].dtype != torch.bool:
        return []
    return [f"{len(theirs[0])} answers are expected. Yours has {len(ours[0])}."]


def one_row_sentence(found, expected, exercise):
    """Say so if the answers to all inputs that are wrong have one row too many, or one too few."""
    rows = set()
    for label, theirs in expected.items():
        if isinstance(found[label], Exception):
            continue
        ours, theirs = aligned(found[label], theirs, exercise.parts)
        if len(ours) != len(theirs):
            return []
        for part, (a, b) in enumerate(zip(ours, theirs)):
            if a.shape != b.shape:
                rows.add((part, rows_too_many([a], [b])))
    if len(rows) != 1:
        return []
    part, difference = rows.pop()
    start = "Yours"
    if len(theirs) > 1:
        start = f"{part_names(exercise, len(theirs))[part]}: yours"
    if difference == 1:
        return [f"{start} has one row too many: where does the count begin, and does the loop run "
                "once too often?"]
    if difference == -1:
        return [f"{start} has one row too few: where does the count begin, and does the loop end "
                "too early?"]
    return []


def reduced_too_much(function, ours, theirs):
    """Recognize a single number where a tensor is expected, made by a mean() or sum()."""
    if not len(ours) == len(theirs) == 1 or ours[0].dim() or not theirs[0].dim():
        return []
    if not used_names(code_of(function)) & REDUCTIONS:
        return []
    return ["Yours is a single number. Without an axis, functions such as mean(), sum() and norm() "
            "reduce over everything: which axis should stay?"]


def reduced_other_axes(function, label, ours, theirs, exercise):
    """Recognize a mean or sum over some axes of an argument where others should be reduced."""
    if not len(ours) == len(theirs) == 1 or not ours[0].dim() or not theirs[0].dim():
        return []
    if not used_names(code_of(function)) & REDUCTIONS:
        return []
    for x in arguments(exercise)[label]:
        if isinstance(x, torch.Tensor):
            some_axes = {tuple(shape) for count in range(1, x.dim())
                         for shape in combinations(x.shape, count)}
            if {tuple(ours[0].shape), tuple(theirs[0].shape)} <= some_axes:
                return ["By the shape of your answer, a mean, a sum or a norm runs over other axes "
                        "than it should: which ones should stay?"]
    return []


def other_axis(found, expected, exercise):
    """Say so if all answers are what the reference gives for transposed inputs."""
    def turn(x):
        can_be_turned = isinstance(x, torch.Tensor) and x.dim() > 1 and x.dtype != torch.bool
        return x.mT if can_be_turned else x

    def all_close(first, second):
        pairs = zip(first, second)
        return len(first) == len(second) and all(close(x, y, exercise.tolerance) for x, y in pairs)

    some_wrong = False
    for label, inputs in arguments(exercise).items():
        if isinstance(found[label], Exception):
            return []
        ours, theirs = aligned(found[label], expected[label], exercise.parts)
        try:
            straight = values(exercise.reference(*map(turn, copy(inputs))))
        except Exception:
            return []
        straight, _ = aligned(straight, theirs, exercise.parts)
        if not all_close(ours, straight) and not all_close(ours, [turn(x) for x in straight]):
            return []
        some_wrong = some_wrong or not all_close(ours, theirs)
    if not some_wrong:
        return []
    return ["Yours would be right for the transposed input, so you work along the other axis: look "
            "at dim, or at a .T."]


# ---- Properties of the right answer --------------------------------------------------------------

# Words with which a property's sentence says that something in the answer is right
PRAISE = "is right", "are right", "as it should", "as they should"


def broken_property(found, expected, exercise):
    """Return the sentence of the exercise's first property that the answers do not have.

    The student is shown the first input that went wrong. If the property fails only with a later
    one, the sentence names it.
    """
    wrong = [label for label in expected if not agree(label, None, found, expected, exercise)]
    all_known = True
    for place, (holds, sentence) in enumerate(exercise.properties):
        # The last property may rely on all those before it. A sentence that says what is right may
        # do so, too. Neither is printed if some answer could not be checked.
        is_last = place == len(exercise.properties) - 1
        relies_on_others = is_last or any(words in sentence for words in PRAISE)
        for label, inputs in arguments(exercise).items():
            if isinstance(found[label], Exception):
                all_known = False
                continue
            parts, right = aligned(found[label], expected[label], exercise.parts)
            if not_finite(parts) and not not_finite(right):
                # NaN has no property, whatever its cause.
                all_known = False
                continue
            if [x.shape for x in parts] != [x.shape for x in right]:
                all_known = False
            result = property_holds(holds, doubles(parts), doubles(right), inputs, exercise)
            if result is False and (all_known or not relies_on_others):
                is_later = label in wrong[1:]
                return [f"{sentence} (See the input: {label}.)" if is_later else sentence]
            all_known = all_known and result is not None
    return []


def doubles(parts):
    return [part.double() for part in parts]


def not_finite(parts):
    return any(not part.isfinite().all() for part in parts)


def property_holds(holds, parts, right, inputs, exercise):
    """Return True or False, or None if the check fails, for example because of another shape."""
    answer, right = [x[0] if len(x) == 1 else x for x in (parts, right)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(call_by_name(holds, exercise, copy(inputs), [answer], right))
    except Exception:
        return None


# ---- Arguments -----------------------------------------------------------------------------------

def overwriting_sentence(function, positions, exercise):
    """Return the sentence for a function that changes the arguments at these positions in place."""
    count = len(next(iter(arguments(exercise).values())))
    names = [name for i, name in enumerate(argument_names(function, count)) if i in positions]
    return (f"You changed {listed(names)} in place, so whoever calls your function finds other "
            "values there afterwards, and so do the later lines of your function. Operations such "
            "as -=, *=, add_ or a list's pop change their operand; x = x * 2 makes a new tensor.")


def used_names(code):
    """Return the names that a function's code reads, including keywords and functions inside it."""
    if code is None:
        return set()
    found = set(code.co_cellvars)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            found |= used_names(constant)
        if isinstance(constant, tuple):
            found.update(x for x in constant if isinstance(x, str))     # keywords of calls
    for step in dis.get_instructions(code):
        if step.opname.startswith("LOAD_"):
            found.update(step.argval if isinstance(step.argval, tuple) else [str(step.argval)])
    return found


def arguments_reordered(function, exercise):
    """Say so if a function's parameters have the names of the stub's, in another order."""
    wanted = parameter_names(exercise.reference)
    names = parameter_names(function)
    if names == wanted or sorted(names) != sorted(wanted):
        return []
    return [f"The grader calls your function with {listed(wanted)}, in this order. Yours takes "
            f"{listed(names)}."]


def unused_arguments(function, exercise):
    """Name the arguments that the right answer depends on and the function does not read."""
    code = code_of(function)
    if code is None or code.co_flags & inspect.CO_VARARGS:
        return []
    used = used_names(code)
    names = enumerate(code.co_varnames[:code.co_argcount])
    unused = [name for i, name in names if name not in used and argument_matters(i, exercise)]
    return [f"Your function never uses {listed(unused, 'or')}."] if unused else []


def argument_matters(position, exercise, part=None):
    """Return True if the right answer to any input depends on an argument.

    `part` limits that to one value of the answer.
    """
    return any(changes_the_answer(position, inputs, exercise, part)
               for inputs in arguments(exercise).values())


def changes_the_answer(position, inputs, exercise, part):
    """Return True if the right answer to one input changes with an argument."""
    if position >= len(inputs):
        return False
    others = copy(inputs)
    others[position] = changed(others[position])
    try:
        before = values(exercise.reference(*copy(inputs)))
        after = values(exercise.reference(*others))
    except Exception:
        return False
    if part is not None:
        before = aligned(before, before, exercise.parts)[0][part:part + 1]
        after = aligned(after, after, exercise.parts)[0][part:part + 1]
    return not all(close(x, y, 1e-6) for x, y in zip(before, after))


def changed(x):
    """Return another value for a bool, a number or a tensor of floats, and else x itself."""
    if isinstance(x, bool):
        return not x
    is_tensor = isinstance(x, torch.Tensor) and x.is_floating_point()
    return 2 * x + 1 if is_tensor or isinstance(x, (int, float)) else x


def argument_names(function, count):
    try:
        names = list(inspect.signature(function).parameters)[:count]
    except (TypeError, ValueError):
        names = []
    return names + [f"argument {i + 1}" for i in range(len(names), count)]


# ---- Relations between wrong and right values ----------------------------------------------------

def is_plain_factor(sentence):
    """Return True if a sentence only gives the factor and not where it may come from."""
    return "everywhere" in sentence and sentence.endswith("times what is expected.")


def exchanged(pairs, count, exercise):
    """Recognize right values in another order: two exchanged, or three or four moved round."""
    def stands_for(i, j):
        return all(close(parts[i][0], parts[j][1], exercise.tolerance) for parts in pairs.values())

    # More than four values have too many orders to try.
    orders = permutations(range(count)) if count <= 4 else []
    for order in orders:
        moved = [i for i in range(count) if order[i] != i]
        if len(moved) > 2 and all(stands_for(i, order[i]) for i in range(count)):
            if not any(stands_for(i, i) for i in moved):
                names = listed(part_names(exercise, count))
                return [f"The values are right, but in another order than {names}."]
    for i, j in combinations(range(count), 2):
        if stands_for(i, j) and stands_for(j, i) and not stands_for(i, i):
            names, others = part_names(exercise, count), set(range(count)) - {i, j}
            all_right = all(stands_for(k, k) for k in others)
            words = ": the values are right, in another order" if all_right else ""
            return [f"{names[i]} and {names[j]} are exchanged{words}."]
    return []


def dtypes_exchanged(found, expected, exercise):
    """Name two values of equal numbers whose dtypes show that they are exchanged."""
    for label, theirs in expected.items():
        ours, theirs = aligned(found[label], theirs, exercise.parts)
        first, second = [[x.dtype for x in parts] for parts in (ours, theirs)]
        if len(first) != 2 or first == second or first != second[::-1]:
            return []
    return [f"{listed(part_names(exercise, 2))} are exchanged, as their dtypes show."]


def dtype_of_rounding(found, expected, exercise):
    """Return the 16-bit dtype of an answer that is right apart from its rounding, or None."""
    dtype = None
    for label, theirs in expected.items():
        for a, b in zip(*aligned(found[label], theirs, exercise.parts)):
            if half_mismatch(a, b) and a.dtype in (torch.float16, torch.bfloat16):
                dtype = a.dtype
                # Rounding makes an error of at most half an eps. Allow for a second one on the way.
                is_right = a.shape == b.shape and torch.allclose(
                    a.double(), b.double(), rtol=torch.finfo(dtype).eps, atol=exercise.tolerance,
                    equal_nan=True)
            else:
                is_right = close(a, b, exercise.tolerance)
            if not is_right:
                return None
    return dtype


def only_not_finite(pairs, exercise):
    """Return a sentence for an answer that is right wherever it is a number."""
    labels = []
    finite_entries = lost_entries = 0
    for label, parts in pairs.items():
        for a, b in parts:
            lost = ~a.isfinite() & b.isfinite()
            if gap(a, b)[~lost].gt(exercise.tolerance).any():
                return []
            if lost.any():
                labels.append(label)
            lost_entries += int(lost.sum())
            finite_entries += int(a.isfinite().sum())
    if not 0 < lost_entries <= 3 * finite_entries:
        return []
    right_but = f"All numbers in your answer are right, but with {labels[0]} "
    nan_is_an_answer = any(b.isnan().any() for parts in pairs.values() for _, b in parts)
    if nan_is_an_answer:
        return [right_but + "it is NaN where there is an answer: when is there none?"]
    return [right_but + "some are NaN or infinite: is something divided by 0 there, or does "
            "something become too large?"]


RELATIONS = [                                   # what a wrong answer may be to b, the right one
    ("is 0 for every input", lambda b: 0 * b),
    ("has the wrong sign", lambda b: -b),
    ("is transposed", lambda b: b.mT if b.dim() > 1 else None),
    ("is in reverse order", lambda b: b.flip(-1) if b.dim() else None),
    ("is upside down, one over what is expected", lambda b: 1 / b),
    ("is 1 minus what is expected, the other part of the whole", lambda b: 1 - b),
    ("is 100 minus what is expected", lambda b: 100 - b),
    ("is the square of what is expected", lambda b: b * b),
    ("is the root of what is expected", lambda b: b.sqrt()),
    ("is one over the square of what is expected", lambda b: 1 / (b * b)),
    ("is one over the root of what is expected", lambda b: b.rsqrt()),
    ("is the exponential of what is expected", lambda b: b.exp()),
    ("is the logarithm of what is expected", lambda b: b.log()),
    ("is rounded to whole numbers", lambda b: b.round()),
    ("is rounded down to whole numbers", lambda b: b.floor()),
    ("is rounded up to whole numbers", lambda b: b.ceil()),
    ("is rounded to one decimal", lambda b: b.round(decimals=1)),
    ("is rounded to 2 decimals", lambda b: b.round(decimals=2)),
    ("is rounded to 3 decimals", lambda b: b.round(decimals=3)),
]


def varies(x, relative):
    """Return True if the entries of x differ by more than this part of the largest of them."""
    return bool((x - x[0]).abs().max() > relative * x.abs().max())


def constant(pairs, part, function, exercise):
    """Say so if all answers are one number. pairs: label -> (ours, right)."""
    ours = torch.cat([a.flatten() for a, _ in pairs.values()])
    right = torch.cat([b.flatten() for _, b in pairs.values()])
    is_constant = len(ours) > 1 and ours[0] and ours.isfinite().all() and not varies(ours, 1e-9)
    if not is_constant or not right.isfinite().all() or not varies(right, 1e-3):
        return ""
    words = f"Yours is {ours[0].item():.4g} for every input."
    names = argument_names(function, len(next(iter(arguments(exercise).values()))))
    changing = [name for i, name in enumerate(names) if argument_matters(i, exercise, part)]
    return f"{words} The right answer depends on {listed(changing)}." if changing else words


def same_as_argument(pairs, function, exercise):
    """Say so if all answers are one of the arguments, unchanged. pairs: label -> (ours, right)."""
    inputs = arguments(exercise)
    for i, name in enumerate(argument_names(function, len(next(iter(inputs.values()))))):
        tensors = [(a, inputs[label][i]) for label, (a, _) in pairs.items()]
        if all(isinstance(x, torch.Tensor) and close(a, x, 1e-6) for a, x in tensors):
            return f"Yours is {name}, unchanged."
    return ""


def relation_everywhere(pairs):
    """Describe what relates all wrong answers to the right ones. pairs: label -> (ours, right)."""
    words = one_relation(list(pairs.values()))
    return f"Yours {words}." if words else ""


def relation_for_one_input(pairs):
    for label, (a, b) in pairs.items():
        if not alike(a, b):
            words = one_relation([(a, b)]) if len(b.unique()) > 1 else ""
            words = words.replace("for every input", "everywhere")
            return f"With {label}, yours {words}." if words else ""
    return ""


def one_relation(pairs):
    """Return the words for a relation that holds in all pairs (ours, right), or ""."""
    if sum(b.numel() for _, b in pairs) < 2 or all(alike(a, b) for a, b in pairs):
        return ""
    near_1 = all(close(b.abs(), torch.ones_like(b), 0.01) for _, b in pairs)
    for words, f in RELATIONS:
        wanted = [f(b) for _, b in pairs if f(b) is not None]
        is_one_number = wanted and len(torch.cat([w.flatten() for w in wanted]).unique()) == 1
        if is_one_number and f is not RELATIONS[0][1]:
            # Any constant would have this relation.
            continue
        if near_1 and ("one over" in words or "square" in words or "root" in words):
            # There a number is nearly its own reciprocal, square and root.
            continue
        if words.startswith("is rounded") and wrong_values_are_one_number(pairs):
            # Then something else made them so.
            continue
        if all(f(b) is not None and alike(a, f(b)) for a, b in pairs):
            return words
    a = torch.cat([a.flatten() for a, _ in pairs])
    b = torch.cat([b.flatten() for _, b in pairs])
    finite = a.isfinite() & b.isfinite()
    a, b = a[finite], b[finite]
    # An input with large numbers would hide those with small ones. So for a factor divide the
    # numbers of each input by their size.
    sizes = [torch.full((b.numel(),), size_of(b), dtype=torch.float64) for _, b in pairs]
    sizes = torch.cat(sizes)[finite]
    words = times_a_factor("is everywhere", a / sizes, b / sizes, 0)
    words = words or shifted("is everywhere", a, b, 0)
    is_matrix = len(pairs) == 1 and pairs[0][1].dim() > 1 and min(pairs[0][1].shape[-2:]) > 1
    if is_matrix:
        words = words or factor_or_shift("is, row by row,", *pairs[0], -1)
        words = words or factor_or_shift("is, column by column,", *pairs[0], -2)
    return words


def size_of(b):
    """Return the largest finite |entry|, or 1 if all are 0."""
    finite = b[b.isfinite() & (b != 0)].abs()
    return float(finite.max()) if len(finite) else 1.0


def wrong_values_are_one_number(pairs):
    """Return True if all values that differ from the right ones are the same number."""
    return len(torch.cat([a[a != b] for a, b in pairs]).unique()) == 1


def alike(a, b):
    """Return True if a is b up to rounding, relative to b's largest entry."""
    finite = b[b.isfinite()].abs()
    least = 1e-5 * finite.max().item() if len(finite) else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=least, equal_nan=True)


def is_multiple(a, factor, b):
    """Return True if a is factor * b up to rounding, relative to a's largest entry."""
    if not a.isfinite().all():
        return False
    least = 1e-6 * a.abs().max().item() if a.numel() else 0.0
    return torch.allclose(a, factor * b, rtol=1e-4, atol=least)


FACTORS = {                                     # factors that come from logarithms to another base
    "which is 1/ln 2: bits instead of nats, or a logarithm to base 2": 1 / math.log(2),
    "which is ln 2": math.log(2),
    "which is 1/ln 10: a logarithm to base 10 instead of a natural one": 1 / math.log(10),
    "which is ln 10": math.log(10),
}


def factor_or_shift(start, a, b, axis):
    """Say so if along an axis a is b times one factor, or b plus one number."""
    return times_a_factor(start, a, b, axis) or shifted(start, a, b, axis)


def times_a_factor(start, a, b, axis):
    """Say so if along an axis a is b times one factor."""
    if b.numel() < 2:
        return ""
    factor = (a * b).sum(axis, True) / (b * b).sum(axis, True)
    if (factor - 1).abs().max() > 1e-3 and is_multiple(a, factor, b):
        words = f"{start} {span(factor, '.4g')} times what is expected"
        if close(factor, torch.full_like(factor, 100), 1e-3):
            words += ", percent instead of a share"
        if close(factor, torch.full_like(factor, 0.01), 1e-5):
            words += ", a share instead of percent"
        for power in -9, -6, -4, -3, 3, 4, 6, 9:        # 100 and 0.01 are percent
            if ((factor / 10 ** power - 1).abs() < 1e-4).all():
                words += ", a power of ten, as another unit would give"
        for meaning, value in FACTORS.items():
            if ((factor / value - 1).abs() < 1e-4).all():
                words += f", {meaning}"
        return words
    return ""


def shifted(start, a, b, axis):
    """Say so if along an axis a is b plus one number."""
    if b.numel() < 2:
        return ""
    shift = (a - b).mean(axis, keepdim=True)
    if (a - b - shift).abs().max() < 1e-3 * shift.abs().max():
        if (shift > 0).all():
            return f"{start} {span(shift, '.4g')} too large"
        if (shift < 0).all():
            return f"{start} {span(-shift, '.4g')} too small"
        return f"{start} off by {span(shift, '+.4g')}"
    return ""


def span(numbers, form):
    smallest, largest = format(numbers.min().item(), form), format(numbers.max().item(), form)
    return smallest if smallest == largest else f"{smallest} to {largest}"


POWERS = {
    1: "{} times",
    -1: "1/{} times",
    0.5: "sqrt({}) times",
    -0.5: "1/sqrt({}) times",
    2: "{}^2 times",
    -2: "1/{}^2 times",
}


def named_factor(pairs, function, exercise):
    """Name the argument or size that an answer is too large or too small by."""
    factors, used_inputs = [], []
    inputs = arguments(exercise)
    for label, (a, b) in pairs.items():
        if a.abs().max() < 1e-6 and b.abs().max() < 1e-6:
            # Any factor makes 0 of 0. (One of the zeros may have been rounded.)
            continue
        factor = (a * b).sum() / (b * b).sum()
        if not is_multiple(a, factor, b) or not b.any():
            return ""
        factors.append(factor.item())
        used_inputs.append(inputs[label])
    if not used_inputs:
        return ""
    names = argument_names(function, len(used_inputs[0]))
    known = [numbers_in(x, names) for x in used_inputs]
    for name in known[0]:
        numbers = [x[name] for x in known if name in x]
        if len(numbers) == len(factors) > 1 and len(set(numbers)) > 1 and min(numbers) > 0:
            for power, words in POWERS.items():
                if all(abs(factor / n ** power - 1) < 1e-4 for factor, n in zip(factors, numbers)):
                    sentence = f"Yours is {words.format(name)} what is expected."
                    if name in exercise.parts:
                        sentence += f" ({name} is the argument here.)"
                    return sentence
    return ""


def numbers_in(inputs, names):
    """Return numbers that a factor may come from, as a dict by name.

    These are the numbers among the arguments, and the sizes of tensors.
    """
    found = {}
    for name, x in zip(names, inputs):
        if isinstance(x, (int, float)):
            found[name] = float(x)
        elif isinstance(x, torch.Tensor):
            found |= {f"{name}.shape[{axis}]": float(x.shape[axis]) for axis in range(-x.dim(), 0)}
    return found


def approximated(pairs, exercise):
    """Recognize an approximation.

    It is nearly right with most inputs and exactly right with few, and it errs to both sides. A
    wrong formula is further off, or always too large or too small.
    """
    nearly, exactly, far_off = [], [], []
    errors = torch.cat([(a - b).flatten() for parts in pairs.values() for a, b in parts])
    if not (errors > 0).any() or not (errors < 0).any():
        return []
    for label, parts in pairs.items():
        off = max(relative_gap(a, b) for a, b in parts)
        # A wrong formula may come near a few numbers by chance.
        few = max(b.numel() for _, b in parts) < 4
        if few:
            continue
        if off <= 1e-5:
            exactly.append(label)
        elif off < 0.003:
            nearly.append(label)
        else:
            far_off.append(label)
    if len(nearly) < 3 or len(nearly) < 2 * len(far_off) or len(nearly) < len(exactly):
        return []
    # If all that is nearly right is within the tolerance, the mistake is in what is far off.
    if all(close(a, b, exercise.tolerance) for label in nearly for a, b in pairs[label]):
        return []
    but = f", but not with {far_off[0]}" if far_off else ""
    return [f"Nearly right with most inputs{but}: is there an eps of another size, in another "
            "place or where none should be, do you calculate in bfloat16 or float16, or do you "
            "approximate, for example a derivative by a quotient of differences, or a mean by "
            "random numbers?"]


def relative_gap(a, b):
    """Return the largest error, divided by the largest number that is expected."""
    if not b.numel():
        return 0.0
    largest = b.abs().max().clamp(min=1e-12)
    return ((a - b).abs().max() / largest).item()


def not_a_number(pairs):
    """Say what gives NaN, if some value is NaN that should be a number."""
    nan_is_an_answer = any(b.isnan().any() for parts in pairs.values() for _, b in parts)
    for label, parts in pairs.items():
        if any((a.isnan() & ~b.isnan()).any() for a, b in parts):
            if nan_is_an_answer:
                return [f"With {label}, yours is NaN where there is an answer: when is there none?"]
            return [f"With {label}, there is NaN in yours. 0/0 and inf - inf give NaN, and so do a "
                    "root or a logarithm of a negative number, and a softmax over nothing but "
                    "-inf."]
    return []


def nearly_right(pairs):
    if any(not_finite([a]) and not not_finite([b]) for parts in pairs.values() for a, b in parts):
        return []
    off = max(relative_gap(a, b) for parts in pairs.values() for a, b in parts)
    if off < 0.01:
        return ["Nearly right: an approximation, a rounded number or an eps in another place makes "
                "such a difference."]
    return []
