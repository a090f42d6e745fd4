"""
What may be the cause of a wrong answer, in sentences: those of an exercise's known mistakes
(known_mistakes), and where none of them fits, what can be said of any exercise (general). No
sentence contradicts a value that is right.
"""
import dis
import inspect
import math
import warnings
from functools import partial
from itertools import combinations

import torch

from answers import aligned, answers, arguments, close, code_of, copy, gap, near, same, values
from explain import part_names


# ---- Known mistakes ------------------------------------------------------------------------------

def agree_at(label, part, ones, others, exercise):
    """Whether two functions' answers to an input agree in one of its values (None: in all); two that
    failed agree."""
    a, b = ones[label], others[label]
    if isinstance(a, Exception) or isinstance(b, Exception):
        return isinstance(a, Exception) and isinstance(b, Exception)
    a, b = aligned(a, b, exercise.parts)
    if part is not None:
        return len(a) == len(b) > part and same(a[part], b[part], exercise.tolerance)
    return len(a) == len(b) and all(same(x, y, exercise.tolerance) for x, y in zip(a, b))


def parameters(function):
    """The names of its arguments that have a place."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:                                      # of torch's own, such as torch.ones_like
        return ["unknown"]
    return [x.name for x in found if x.kind in (x.POSITIONAL_OR_KEYWORD, x.VAR_POSITIONAL)]


def call(function, exercise, given, first=(), right=None):
    """function(*first, ...), and then what it names of an exercise's arguments, of the right answer and
    of the values in it; all arguments, if it names something else."""
    known = {"right": right}
    if exercise.parts and right is not None:
        known |= zip(exercise.parts, right)
    known |= zip(parameters(exercise.reference), given)
    names = parameters(function)[len(first):]
    if set(names) <= known.keys():
        given = [known[name] for name in names]
    return function(*first, *given)


def places_of(expected, exercise):
    """(label, number of the value) of all that is asked."""
    found = []
    for label, parts in expected.items():
        found += [(label, i) for i in range(len(aligned(parts, parts, exercise.parts)[1]))]
    return found


def known_mistakes(given, overwritten, expected, exercise):
    """The sentences of the known mistakes whose answers these are: one, or two that were made
    together, or none."""
    if all(isinstance(x, Exception) for x in given.values()):
        return []
    def explains(theirs):
        return all(agree_at(label, None, given, theirs, exercise) for label in given)

    known = []
    for wrong, sentence in exercise.misconceptions:
        theirs, theirs_overwritten = answers(wrong, exercise)
        if theirs_overwritten == overwritten:
            if explains(theirs):
                return [sentence]
            known.append((wrong, theirs, sentence))
    for (f, _, one), (g, _, two) in combinations(known, 2):
        both = together(f, g)
        if both and explains(answers(both, exercise)[0]):
            return [one, two]
    return in_parts(given, expected, known, exercise)


def together(f, g):
    """The function in which both mistakes are made, where they are functools.partial of one function."""
    of_one = isinstance(f, partial) and isinstance(g, partial) and f.func is g.func
    if of_one and not f.keywords.keys() & g.keywords.keys():
        return partial(f.func, **f.keywords, **g.keywords)


def in_parts(given, expected, known, exercise):
    """One known mistake for some of several values, another for the rest; or for some of them only,
    which it names. A mistake that gets a value wrong which is right in the answer was not made."""
    places = places_of(expected, exercise)
    if max(i for _, i in places) == 0:
        return []

    def wrong_places(answers):
        return {place for place in places if not agree_at(*place, answers, expected, exercise)}

    wrong = wrong_places(given)
    numbers = sorted({i for _, i in wrong if is_evidence(i, wrong, expected, exercise)})
    found = []
    for _, theirs, sentence in known:
        its = {i for i in numbers
               if all(agree_at(*place, given, theirs, exercise) for place in wrong if place[1] == i)}
        tells_of_others = " right" in sentence and its != set(numbers)      # "The steps are right."
        if its and wrong_places(theirs) <= wrong and not tells_of_others:
            found.append((its, sentence))
    for count in 1, 2:
        for some in combinations(found, count):
            if set().union(*(its for its, _ in some)) == {i for _, i in wrong}:
                return [sentence for _, sentence in some]
    names = part_names(exercise, len(places))
    return [named(sentence, [names[i] for i in sorted(its)]) for its, sentence in found[:1]]


def named(sentence, names):
    return sentence if sentence.startswith(names[0]) else f"{' and '.join(names)}: {sentence}"


def is_evidence(part, wrong, expected, exercise):
    """Whether agreement in that value would mean something: a yes, or one number, agrees by chance."""
    tensors = [aligned(x, x, exercise.parts)[1][part] for x in expected.values()]
    if all((x * x == x).all() for x in tensors):
        return False
    times = sum(i == part for _, i in wrong)
    return times > 1 or max(x.numel() for x in tensors) > 1


# ---- What can be said of any exercise ------------------------------------------------------------

def general(function, given, expected, exercise):
    """Sentences for an answer that is none of the known mistakes."""
    pairs, broken = {}, broken_property(given, expected, exercise)
    for label in expected:
        if isinstance(given[label], Exception):
            if not pairs:
                return of_an_error(function, given[label]) or never_used(function, exercise)
            continue
        ours, theirs = aligned(given[label], expected[label], exercise.parts)
        if [x.shape for x in ours] != [x.shape for x in theirs]:
            return transposed(ours, theirs, exercise) or never_used(function, exercise) or broken
        pairs[label] = [(a.double(), b.double()) for a, b in zip(ours, theirs)]
    if all(close(a, b, exercise.tolerance) for parts in pairs.values() for a, b in parts):
        for error in given.values():
            if isinstance(error, Exception):
                return of_an_error(function, error)
        return ["The numbers are right, their kind (dtype) is not."]
    count = min(len(parts) for parts in pairs.values())
    found = exchanged(pairs, count, exercise) or only_not_finite(pairs, exercise)
    if found:
        return found

    def of_every_input(pairs, part):
        words = constant(pairs, part, function, exercise) or as_given(pairs, function, exercise)
        return words or relation_everywhere(pairs) or named_factor(pairs, function, exercise)

    def of_one_input(pairs, part):
        return relation_of_one_input(pairs)

    of_all = relations(pairs, count, exercise, of_every_input)
    if of_all and all(is_plain_factor(sentence) for sentence in of_all):
        of_all = of_all + broken
    of_one = of_all or approximated(pairs) or broken
    of_one = of_one or relations(pairs, count, exercise, of_one_input)
    return never_used(function, exercise) + (of_one or nearly(pairs))


def relations(pairs, count, exercise, find):
    """For each value that is wrong, a sentence on what it is to the right one."""
    found = []
    for i, name in enumerate(part_names(exercise, count)[:count]):
        of_part = {label: parts[i] for label, parts in pairs.items()}
        if not all(close(a, b, exercise.tolerance) for a, b in of_part.values()):
            words = find(of_part, i)
            if words:
                found.append(f"{name}: {words}" if count > 1 else words)
    return found[:2]


def broken_property(given, expected, exercise):
    """The sentence of the first of the exercise's properties that the answers do not have."""
    all_known = True
    for place, (holds, sentence) in enumerate(exercise.properties):
        is_last = place == len(exercise.properties) - 1     # it may count on those before it
        for label, numbers in arguments(exercise).items():
            if isinstance(given[label], Exception):
                all_known = False
                continue
            parts, wanted = aligned(given[label], expected[label], exercise.parts)
            if not_finite(parts) and not not_finite(wanted):
                all_known = False
                continue                                    # 0/0 keeps no property, whatever its cause
            if [x.shape for x in parts] != [x.shape for x in wanted]:
                all_known = False
            found = has(holds, doubles(parts), doubles(wanted), numbers, exercise)
            if found is False and (all_known or not is_last):
                return [sentence]
            all_known = all_known and found is not None
    return []


def doubles(parts):
    return [part.double() for part in parts]


def not_finite(parts):
    return any(not part.isfinite().all() for part in parts)


def has(holds, parts, right, numbers, exercise):
    """True, False, or None where that cannot be told."""
    answer, right = [x[0] if len(x) == 1 else x for x in (parts, right)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return bool(call(holds, exercise, copy(numbers), [answer], right))
    except Exception:                                       # another shape, or fewer values
        return None


def of_overwriting(function, places, exercise):
    """The sentence for a function that writes into its arguments, by their places."""
    count = len(next(iter(arguments(exercise).values())))
    names = [name for i, name in enumerate(argument_names(function, count)) if i in places]
    return (f"You changed {' and '.join(names)} in place: whoever calls the function finds another "
            f"{names[0]} afterwards, and so do your own later lines. Operations such as -=, *=, add_ "
            "or a list's pop write into what they are given; x = x * 2 makes a new one.")


def of_an_error(function, error):
    words, code = str(error), code_of(function)
    names = used_names(code) if code else set()
    unfit = "must match the size of tensor" in words or "broadcast" in words
    reduces = names & {"mean", "sum", "norm", "var", "std", "amax", "max", "median"}
    if unfit and reduces and not names & {"keepdim", "keepdims"}:
        return ["Two shapes do not fit. A mean, a sum or a norm takes its axis away unless it is told "
                "keepdim=True; x[:, None] puts an axis in."]
    if unfit:
        return ["Two shapes do not fit: write down the shape of each part of that line."]
    products = "shapes cannot be multiplied", "to match, but got", "mismatch in its core", "size mismatch"
    if any(product in words for product in products):
        return ["A product of matrices (n, k) and (k, m) needs the same k in both: is one of them "
                "transposed?"]
    if isinstance(error, ZeroDivisionError):
        return ["With this input something is divided by 0."]
    return []


def is_plain_factor(sentence):
    """Whether it only says which number is the factor, and not where that may come from."""
    return "everywhere" in sentence and sentence.endswith("times what is expected.")


def transposed(ours, theirs, exercise):
    names = part_names(exercise, len(theirs))
    for name, a, b in zip(names, ours, theirs):
        if a.shape != b.shape and b.dim() > 1 and close(a, b.mT, 1e-4):
            return [f"{name} is transposed." if len(theirs) > 1 else "Yours is transposed."]
    return []


def exchanged(pairs, count, exercise):
    """Names two values that stand in each other's place."""
    def stands_for(i, j):
        return all(close(parts[i][0], parts[j][1], exercise.tolerance) for parts in pairs.values())

    for i, j in combinations(range(count), 2):
        if stands_for(i, j) and stands_for(j, i) and not stands_for(i, i):
            names, others = part_names(exercise, count), set(range(count)) - {i, j}
            all_right = all(stands_for(k, k) for k in others)
            words = ": the values are right, in another order" if all_right else ""
            return [f"{names[i]} and {names[j]} are exchanged{words}."]
    return []


def only_not_finite(pairs, exercise):
    """Of an answer that is right wherever it is a number."""
    inputs, seen = [], 0
    for label, parts in pairs.items():
        for a, b in parts:
            lost = ~a.isfinite() & b.isfinite()
            if gap(a, b)[~lost].gt(exercise.tolerance).any():
                return []
            inputs += [label] * bool(lost.any())
            seen += int((~lost).sum())
    if not inputs or not seen:
        return []
    right_but = f"All numbers that you give are right, but with {inputs[0]} "
    nan_is_an_answer = any(b.isnan().any() for parts in pairs.values() for _, b in parts)
    if nan_is_an_answer:
        return [right_but + "you give NaN, where there is an answer: when is there none?"]
    return [right_but + "some are NaN or infinite: what is divided by 0 there, or becomes too large?"]


def used_names(code):
    """The names that a function's code reads, of keywords and of functions in it among them."""
    found = set(code.co_cellvars)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            found |= used_names(constant)
        if isinstance(constant, tuple):
            found.update(x for x in constant if isinstance(x, str))         # keywords of calls
    for step in dis.get_instructions(code):
        if step.opname.startswith("LOAD_"):
            found.update(step.argval if isinstance(step.argval, tuple) else [str(step.argval)])
    return found


def never_used(function, exercise):
    """Names arguments that the answer depends on and the function does not read."""
    code = code_of(function)
    if code is None or code.co_flags & inspect.CO_VARARGS:
        return []
    used = used_names(code)
    names = enumerate(code.co_varnames[:code.co_argcount])
    unused = [name for i, name in names if name not in used and counts(i, exercise)]
    return [f"Your function never looks at {' and '.join(unused)}."] if unused else []


def counts(place, exercise, part=None):
    """Whether the right answer to the first input, or that part of it, changes with the argument at
    that place."""
    given = next(iter(arguments(exercise).values()))
    if place >= len(given):
        return False
    other = copy(given)
    other[place] = another(other[place])
    try:
        before, after = values(exercise.reference(*copy(given))), values(exercise.reference(*other))
    except Exception:
        return False
    if part is not None:
        before = aligned(before, before, exercise.parts)[0][part:part + 1]
        after = aligned(after, after, exercise.parts)[0][part:part + 1]
    return not all(close(x, y, 1e-6) for x, y in zip(before, after))


def another(x):
    if isinstance(x, bool):
        return not x
    is_tensor = isinstance(x, torch.Tensor) and x.is_floating_point()
    return 2 * x + 1 if is_tensor or isinstance(x, (int, float)) else x


RELATIONS = [                                               # of a wrong answer to b, which is right
    ("it is 0 everywhere", lambda b: 0 * b),
    ("the sign is the other one", lambda b: -b),
    ("transposed", lambda b: b.mT if b.dim() > 1 else None),
    ("in reverse order", lambda b: b.flip(-1) if b.dim() else None),
    ("upside down, one over what is expected", lambda b: 1 / b),
    ("1 minus what is expected: the other part of the whole", lambda b: 1 - b),
    ("the square of what is expected", lambda b: b * b),
    ("the root of what is expected", lambda b: b.sqrt()),
    ("one over the square of what is expected", lambda b: 1 / (b * b)),
    ("one over the root of what is expected", lambda b: b.rsqrt()),
    ("the exponential of what is expected", lambda b: b.exp()),
    ("the logarithm of what is expected", lambda b: b.log()),
    ("rounded to whole numbers", lambda b: b.round()),
    ("rounded down to whole numbers", lambda b: b.floor()),
    ("rounded up to whole numbers", lambda b: b.ceil()),
]


def constant(pairs, part, function, exercise):
    """The one number that all of the answers, label -> (given, expected), are, in words."""
    given = torch.cat([a.flatten() for a, _ in pairs.values()])
    expected = torch.cat([b.flatten() for _, b in pairs.values()])
    one_number = len(given) > 1 and given[0] and near(given, given[0], 1e-9)
    if one_number and not near(expected, expected[0]):
        words = f"Yours is {given[0].item():.4g} everywhere, whatever is given."
        names = argument_names(function, len(next(iter(arguments(exercise).values()))))
        changing = [name for i, name in enumerate(names) if counts(i, exercise, part)]
        return f"{words} The right one changes with {' and '.join(changing)}." if changing else words
    return ""


def as_given(pairs, function, exercise):
    """Says so where all of the answers, label -> (given, expected), are one of the arguments."""
    inputs = arguments(exercise)
    for i, name in enumerate(argument_names(function, len(next(iter(inputs.values()))))):
        tensors = [(a, inputs[label][i]) for label, (a, _) in pairs.items()]
        if all(isinstance(x, torch.Tensor) and close(a, x, 1e-6) for a, x in tensors):
            return f"Yours is {name} as it was given."
    return ""


def relation_everywhere(pairs):
    """What would explain all differences between the pairs, label -> (given, expected), in words."""
    words = one_relation(list(pairs.values()))
    return f"With every input: {words}." if words else ""


def relation_of_one_input(pairs):
    for label, (a, b) in pairs.items():
        if not alike(a, b):
            words = one_relation([(a, b)]) if len(b.unique()) > 1 else ""
            return f"With {label}: {words}." if words else ""
    return ""


def one_relation(pairs):
    if sum(b.numel() for _, b in pairs) < 2 or all(alike(a, b) for a, b in pairs):
        return ""
    for words, f in RELATIONS:
        wanted = [f(b) for _, b in pairs if f(b) is not None]
        is_one_number = wanted and len(torch.cat([w.flatten() for w in wanted]).unique()) == 1
        if is_one_number and words != "it is 0 everywhere":
            continue                                        # then any constant would be that
        if all(f(b) is not None and alike(a, f(b)) for a, b in pairs):
            return words
    a = torch.cat([a.flatten() for a, _ in pairs])
    b = torch.cat([b.flatten() for _, b in pairs])
    finite = a.isfinite() & b.isfinite()
    words = factor_or_shift("everywhere", a[finite], b[finite], 0)
    is_matrix = len(pairs) == 1 and pairs[0][1].dim() > 1 and min(pairs[0][1].shape[-2:]) > 1
    if is_matrix:
        words = words or factor_or_shift("each row, with a number of its own:", *pairs[0], -1)
        words = words or factor_or_shift("each column, with a number of its own:", *pairs[0], -2)
    return words


def alike(a, b):
    """Whether a is b, but for rounding at the size of b's largest entry."""
    finite = b[b.isfinite()].abs()
    least = 1e-5 * finite.max().item() if len(finite) else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=least, equal_nan=True)


FACTORS = {                                                 # that logarithms of another base make
    "which is 1/ln 2: bits where nats are asked, or a logarithm to base 2": 1 / math.log(2),
    "which is ln 2": math.log(2),
    "which is 1/ln 10: a logarithm to base 10 for a natural one": 1 / math.log(10),
    "which is ln 10": math.log(10),
}


def factor_or_shift(of, a, b, axis):
    """Whether one factor, or one number that was added, makes a of b along an axis, in words."""
    if b.numel() < 2:
        return ""
    factor = (a * b).sum(axis, True) / (b * b).sum(axis, True)
    if (factor - 1).abs().max() > 1e-3 and torch.allclose(a, factor * b, rtol=1e-4, atol=1e-9):
        words = f"{of} {ends(factor, '.4g')} times what is expected"
        if close(factor, torch.full_like(factor, 100), 1e-3):
            words += ", percent where a share is asked"
        if close(factor, torch.full_like(factor, 0.01), 1e-5):
            words += ", a share where percent are asked"
        for power in -9, -6, -4, -3, 3, 4, 6, 9:            # 100 and 0.01 are percent
            if near(factor / 10 ** power, 1, 1e-4):
                words += ", a power of ten, as another unit makes it"
        for meaning, value in FACTORS.items():
            if near(factor, value, 1e-4):
                words += f", {meaning}"
        return words
    shift = (a - b).mean(axis, keepdim=True)
    if (a - b - shift).abs().max() < 1e-3 * shift.abs().max():
        return f"{of} {ends(shift, '+.4g')}"
    return ""


def ends(numbers, form):
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
    """Where an answer is too large or too small by a number that was given: which one, in words."""
    factors, given = [], []
    inputs = arguments(exercise)
    for label, (a, b) in pairs.items():
        if not a.any() and not b.any():
            continue                                        # any factor makes 0 of 0
        factor = (a * b).sum() / (b * b).sum()
        if not torch.allclose(a, factor * b, rtol=1e-4, atol=1e-9) or not b.any():
            return ""
        factors.append(factor.item())
        given.append(inputs[label])
    if not given:
        return ""
    names = argument_names(function, len(given[0]))
    known = [numbers_in(x, names) for x in given]
    for name in known[0]:
        numbers = [x[name] for x in known if name in x]
        if len(numbers) == len(factors) > 1 and len(set(numbers)) > 1 and min(numbers) > 0:
            for power, words in POWERS.items():
                if all(abs(factor / n ** power - 1) < 1e-4 for factor, n in zip(factors, numbers)):
                    return f"With every input: {words.format(name)} what is expected."
    return ""


def numbers_in(given, names):
    """What a factor may come from: words -> the numbers among the arguments, and the tensors' sizes."""
    found = {}
    for name, x in zip(names, given):
        if isinstance(x, (int, float)):
            found[name] = float(x)
        elif isinstance(x, torch.Tensor):
            found |= {f"{name}.shape[{axis}]": float(x.shape[axis]) for axis in range(-x.dim(), 0)}
    return found


def argument_names(function, count):
    try:
        names = list(inspect.signature(function).parameters)[:count]
    except (TypeError, ValueError):
        names = []
    return names + [f"argument {i + 1}" for i in range(len(names), count)]


def approximated(pairs):
    """Of an answer that is nearly right with most inputs, and exactly so with none of these, with
    errors to both sides: a wrong formula is further off, or always too large or too small."""
    nearly_right, far_off = [], []
    errors = torch.cat([(a - b).flatten() for parts in pairs.values() for a, b in parts])
    if not (errors > 0).any() or not (errors < 0).any():
        return []
    for label, parts in pairs.items():
        off = max(relative_gap(a, b) for a, b in parts)
        few = max(b.numel() for _, b in parts) < 4          # numbers that a formula may come near to
        if few:
            continue
        if 1e-5 < off < 0.003:
            nearly_right.append(label)
        elif not off <= 1e-5:
            far_off.append(label)
    if len(nearly_right) < 3 or len(nearly_right) < 2 * len(far_off):
        return []
    but = f", but not with {far_off[0]}" if far_off else ""
    return [f"Nearly right with most inputs{but}: do you approximate, such as a derivative by a quotient of "
            "differences, or a mean by random numbers?"]


def relative_gap(a, b):
    """The largest error, over the largest number that is expected."""
    if not b.numel():
        return 0.0
    largest = b.abs().max().clamp(min=1e-12)
    return ((a - b).abs().max() / largest).item()


def nearly(pairs):
    off = max(gap(a, b).max().item() for parts in pairs.values() for a, b in parts if a.numel())
    if off < 0.01:
        return ["Nearly: an approximation, a rounded number or an eps at another place makes such a "
                "difference."]
    return []
