"""
Say in a sentence what may have caused an error that a student's function raised.

Python's and PyTorch's own messages are printed in any case. The sentences here are for messages
that beginners find hard to read. If none fits, nothing is said.
"""
import difflib
import math
import re
import statistics

import torch

from answers import NothingReturned

# Methods that return values and indices together when they get an axis.
WITH_INDICES = "median|max|min|sort|mode|topk|kthvalue|cummax|cummin"
REDUCTIONS = {"mean", "sum", "prod", "norm", "var", "std", "amax", "amin", "max", "min", "median"}


def values_and_indices(name):
    return (f"With an axis, .{name}() returns two things, the values and their indices: take "
            f".{name}(...).values.")


TUPLE = ("Something in that line is a tuple. A function that returns several values gives one: "
         "pick the value that you need, as in logits = model(x, y)[0].")
ONE_NUMBER = ("One number is needed there, and it got a tensor of several: index the tensor, or "
              "reduce it with mean(), sum() or another function first.")
ONE_CONDITION = ("`if`, `while`, `and`, `or` and `not` need a single True or False, and here a "
                 "tensor has many. Use torch.where to decide for each entry on its own; .all() or "
                 ".any() make one answer of many; `x is not None` asks whether there is a tensor.")
PRODUCT = ("A product of matrices (n, k) and (k, m) needs the same k in both: does one of them "
           "have to be transposed, is one transposed that should not be, or did you merge or sum "
           "other axes than you meant?")


def error_sentences(error, names):
    """Return the sentences for an exception, at most one.

    `error.line` is the student's line in which it was raised, as answers.line_of gives it. `names`
    are the names that the function's code uses.
    """
    words = str(error)
    if getattr(error, "in_given_function", False):
        return ["The error arises inside a function that you were given. What do you pass to it?"]
    sentence = (returned_nothing(error) or returned_no_number(words)
                or values_with_indices(error, words)
                or wrong_kind(words, error.line) or wrong_shape(words, names)
                or wrong_number(error, words) or wrong_call(error, words))
    return [sentence] if sentence else []


def returned_nothing(error):
    if isinstance(error, NothingReturned):
        return ("Your function ends without a `return`, or returns something that is None: a "
                "function that only prints, and methods such as append, give None.")


def returned_no_number(words):
    """Recognize what a function returned by its beginning, as answers.tensor prints it."""
    start = "the function returned "
    if words.startswith(start) and words.endswith(" is None"):
        return ("One of the values that your function returns is None. Return what the task asks "
                "for, and nothing else.")
    if words.startswith(f"{start}<function"):
        return ("Your function returns a function. Return the values themselves: norm(x) calls a "
                "function, norm without parentheses does not.")
    if words.startswith((f"{start}<built-in method", f"{start}<bound method",
                         f"{start}<built-in function")):
        return ("Your function returns a function. Return what that computes: x.mean() calls it, "
                "x.mean without parentheses does not.")
    if words.startswith((f"{start}'", f'{start}"')):
        return ("Your function returns text. Return numbers, or True and False, without quotes, f "
                "or str().")
    if words.startswith(f"{start}{{"):
        return ("Your function returns something in braces, a set or a dict. Several values are "
                "returned with commas between them, as in return a, b.")


def values_with_indices(error, words):
    """Recognize x.median(dim) and its relatives, used as if they gave a tensor."""
    if found := re.search(r"torch\.return_types\.(\w+)", words):
        return values_and_indices(found[1])
    # The message does not always name the type: look at the line, too.
    with_axis = rf"\.({WITH_INDICES})\((dim=|axis=)?-?\d\)(?!\.values|\.indices|\[)"
    found = re.search(with_axis, error.line)
    if found and "converted to" in words:
        return values_and_indices(found[1])


def wrong_kind(words, line):
    """Recognize a Python number, list or tuple where a tensor is needed, and the reverse."""
    number = r"(float|int|bool|numpy\.float64)"
    if found := re.search(rf"^(\w+)\(\).* must be Tensor, not {number}", words):
        name = found[1]
        use = f"math.{name} takes one; " if hasattr(math, name) else ""
        return (f"torch's {name} takes a tensor, and here it got a Python number: "
                f"{use}torch.tensor(x) makes a tensor of it.")
    first_is_number = rf"^(\w+)\(\) received an invalid combination .* got \({number}[,)]"
    if found := re.search(first_is_number, words):
        return f"torch's {found[1]} takes a tensor, and here its first argument is a Python number."
    if found := re.search(rf"'{number}' object has no attribute '(\w+)'", words):
        name = found[2]
        use = f": use math.{name}(x)" if hasattr(math, name) else ""
        return f"That is a Python number and no tensor, so it has no .{name}{use}."
    many = "only one element tensors can be", "cannot be converted to Scalar", "only size-1"
    if any(phrase in words for phrase in many):
        if found := re.search(r"math\.(\w+)", line):
            return (f"math.{found[1]} takes one number, and here it got a tensor of several: "
                    f"torch.{found[1]} takes tensors.")
        return ONE_NUMBER
    if "Boolean value of Tensor" in words or "truth value of an array" in words:
        return ONE_CONDITION
    if re.search(r"must be Tensor, not tuple|'tuple' object|tuple indices|not \"tuple\"|"
                 r"'tuple' and|and 'tuple'", words):
        return TUPLE
    if re.search(r"must be Tensor, not list|'list' object has no attribute", words):
        return ("Something in that line is a list. torch.tensor makes a tensor of a list of "
                "numbers, torch.stack makes one of a list of tensors.")
    if re.search(r"expected Tensor as element \d+ in argument 0, but got (float|int)", words):
        return "torch.stack and torch.cat join tensors. For a list of numbers use torch.tensor."
    if "builtin_function_or_method" in words or "'method'" in words:
        return "A method stands there without its parentheses: x.mean() calls it, x.mean does not."
    if "'function' and" in words or "and 'function'" in words:
        return "A function stands there without its arguments: norm(x) calls it, norm does not."
    if "NoneType" in words:
        return ("Something in that line is None. Is it an argument that is None for this input? "
                "Methods that change a list, such as append and sort, return None, too, and so "
                "does a function without a `return`.")
    if "could not infer output dtype" in words:
        return ("mean() works on numbers with fractions. Booleans and whole numbers need .double() "
                "or .float() before it.")
    if re.search(r"iteration over a 0-d|'(float|int)' object is not (iterable|subscriptable)"
                 r"|len\(\) of a 0-d|object of type '(float|int)' has no len"
                 r"|invalid index of a 0-dim", words):
        return ("A single number stands where several are needed. Without an axis, mean(), sum() "
                "and similar functions reduce over everything.")


def wrong_shape(words, names):
    """Recognize shapes that do not fit together."""
    if "to match target batch_size" in words:
        return ("F.cross_entropy needs one target for each row of logits: compare the shapes of "
                "the two.")
    if "Expected target size" in words:
        return ("F.cross_entropy needs logits of shape (N, classes) and targets of shape (N,): "
                "flatten batch and time into one axis in both.")
    unfit = "must match the size of tensor" in words or "broadcast" in words
    if unfit and names & REDUCTIONS and not names & {"keepdim", "keepdims"}:
        return ("Two shapes do not fit together. A mean, a sum or a norm removes its axis unless "
                "it gets keepdim=True; x[:, None] adds an axis.")
    if unfit:
        return "Two shapes do not fit together: write down the shape of each part of that line."
    products = ("shapes cannot be multiplied", "to match, but got", "mismatch in its core",
                "size mismatch")
    if any(phrase in words for phrase in products):
        return PRODUCT
    if "layer_norm(): argument 'normalized_shape'" in words and "not Tensor" in words:
        return "F.layer_norm takes a shape, such as x.shape[-1:], before the gain and the bias."
    if "view size is not compatible" in words:
        return ("After a transpose, a slice or an expand the numbers do not lie as .view needs "
                "them. .reshape(...) copies them if necessary.")
    if re.search(r"shape '.*' is invalid for input of size", words):
        return "The new shape has another number of entries than the tensor."
    if "stack expects each tensor to be equal size" in words:
        return "torch.stack needs tensors of one shape: write down the shape of each."
    if re.search(r"[Dd]imension out of range", words):
        return ("There is no such axis. A tensor with n axes has the axes 0 to n - 1, or -1 for "
                "the last; has a sum or a mean removed one?")


def wrong_number(error, words):
    """Recognize values that a function cannot take."""
    if isinstance(error, ZeroDivisionError):
        return "With this input something is divided by 0."
    if isinstance(error, statistics.StatisticsError) and "constant" not in words:
        return ("With this input the statistics module has too few numbers, such as a single one "
                "for a standard deviation. Treat that case by itself.")
    if isinstance(error, OverflowError):
        return "With this input a number becomes too large for a float."
    if "math domain error" in words or re.search(r"expected a (positive|nonnegative) input", words):
        return "With this input a root or a logarithm gets a number that it is not defined for."
    if "out of bounds" in words or "out of range" in words:
        return ("An index lies beyond the end: the last of n entries is entry n - 1, and an empty "
                "list has none.")
    if "step must be greater than zero" in words:
        return "A tensor cannot be sliced with a negative step: x.flip(0) reverses an axis."
    if "same dtype" in words or re.search(r"expected .*(dtype|scalar type) .* but", words):
        return ("Two tensors have different dtypes: x.to(y.dtype) converts one. torch.zeros and "
                "similar functions give float32 unless they are told otherwise.")


def similar_name(name, owner):
    """Return the end of a sentence about a misspelled name."""
    similar = difflib.get_close_matches(name, dir(owner), 1)
    return f"; did you mean .{similar[0]}?" if similar else "."


def wrong_call(error, words):
    """Recognize arguments that do not fit a function, and names that are not defined."""
    if re.search(r"missing \d+ required positional|takes \d+ positional argument", words):
        if not error.line:
            return "The grader calls your function with the arguments of the stub, in that order."
        return "A function is called with too many or too few arguments in that line."
    if type(error) is NameError:
        return ("That name is not defined: is it misspelled, or was the cell that defines it not "
                "run?")
    if found := re.search(r"'Tensor' object has no attribute '(\w+)'", words):
        return f"A tensor has no .{found[1]}{similar_name(found[1], torch.Tensor)}"
    if found := re.search(r"module 'torch' has no attribute '(\w+)'", words):
        return f"There is no torch.{found[1]}{similar_name(found[1], torch)}"
    if isinstance(error, KeyError):
        return "The dict has no such key: compare its spelling with the keys that there are."
    if "unsupported operand type(s) for ^" in words or "bitwise_xor" in words:
        return "A power is x ** y. In Python x ^ y is something else, for whole numbers only."
    if isinstance(error, UnboundLocalError):
        return "A variable is used before it has a value: does the function reach its assignment?"
    if isinstance(error, RecursionError):
        return "The function calls itself without end."
