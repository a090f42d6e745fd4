"""
The exercises of lesson 1: LayerNorm and RMSNorm, forward and backward, and the residual stream.

grader.py explains the form. A keyword argument of a reference is one of its steps, or something
that can go wrong in it; functools.partial sets it to make a wrong answer. The references use only
elementary operations, so that they check torch's and model.py's versions independently.
"""
import math
from functools import partial

import torch

from answers import near
from grader import AUTOGRAD, Exercise
from pieces import never, randn64


def root_of(square, eps, eps_at="inside", power=0.5):
    """Return the root of `square`, with eps added inside the root, added behind it, left out, or
    taken as the smallest value that is allowed ("least")."""
    if eps_at == "inside":
        return (square + eps) ** power
    if eps_at == "behind":
        return square ** power + eps
    if eps_at == "least":
        return square.clamp(min=eps).sqrt()
    return square ** power


def centered(x):
    return x - x.mean(-1, keepdim=True)


def standardize(x, eps, correction=0, eps_at="inside"):
    """Return (x - mean) / sqrt(variance + eps) along the last axis, and that root."""
    n = x.shape[-1]
    variance = centered(x).square().sum(-1, keepdim=True) / (n - correction)
    root = root_of(variance, eps, eps_at)
    return centered(x) / root, root


# 1.1  Mean and variance after some blocks ---------------------------------------------------------

def drift_inputs(generator):
    yield "no block at all", 0, 1.5, 1.2, 2.0, 3.0
    yield "one block", 1, 1.5, 1.2, 0.0, 1.0
    yield "five of the essay's blocks", 5, 1.5, 1.2, 0.0, 1.0
    yield "mean 2 and variance 3 at first", 4, -0.5, 0.9, 2.0, 3.0
    yield "blocks that only shift", 12, 1.0, 1.0, 0.0, 1.0


def drift(blocks, shift, scale, mean, variance):
    return mean + blocks * shift, variance * scale ** blocks


def scale_of_values(blocks, shift, scale, mean, variance):
    return drift(blocks, shift, scale ** 2, mean, variance)


def one_block_more(blocks, shift, scale, mean, variance):
    return drift(blocks + 1, shift, scale, mean, variance)


def one_block_short(blocks, shift, scale, mean, variance):
    return drift(max(blocks - 1, 0), shift, scale, mean, variance)


def times_the_blocks(blocks, shift, scale, mean, variance):
    return mean + blocks * shift, variance * scale * blocks


def values_stretched(blocks, shift, scale, mean, right):
    for _ in range(blocks):
        mean = math.sqrt(scale) * mean + shift
    return mean, right[1]


DRIFT = Exercise(reference=drift, inputs=drift_inputs, parts=("mean", "variance"), misconceptions={
    "Each of your blocks multiplies the variance by scale^2. Do you multiply the values by scale, "
    "or the variance twice? A block multiplies the variance by scale, once.":
        scale_of_values,
    "Yours is one block ahead: after 0 blocks nothing has happened yet.":
        one_block_more,
    "Yours is one block behind: after 1 block mean and variance have already changed.":
        one_block_short,
    "Yours is the first variance times scale times blocks. Instead, each block multiplies the "
    "variance that it is given by scale once more.":
        times_the_blocks,
    "In yours each block stretches the values, and so it stretches the mean, too. Here the mean is "
    "only shifted.":
        values_stretched,
})


# 1.2  LayerNorm -----------------------------------------------------------------------------------

def norm_inputs(generator):
    yield "three rows of five", randn64(generator, 3, 5) * 2 + 1, 1e-5
    yield "a batch of shape (2, 3, 4)", randn64(generator, 2, 3, 4) - 3, 1e-5
    counted = 1000 * torch.arange(6.0).double()
    yield "a row of equal entries and another", torch.stack((counted * 0 + 7, counted)), 1e-5
    yield "a row of zeros and another", torch.stack((counted * 0, counted)), 1e-5
    yield "rows of one element", randn64(generator, 2, 1), 1e-5
    yield "entries near 0.001", randn64(generator, 2, 5) * 1e-3, 1e-5
    yield "entries near 10,000", randn64(generator, 2, 5) * 1e4, 1e-5
    yield "a large eps", randn64(generator, 2, 5), 0.5
    whole = torch.tensor([[-3.0, -1.0, 1.0, 3.0], [6.0, -6.0, -6.0, 6.0]])
    yield "whole numbers near 10,000, in float32", whole + 10_000, 1e-5


def layer_norm(x, eps, *, axis=-1, correction=0, eps_at="inside", power=0.5):
    mean = x.mean(axis, keepdim=True)
    count = x.numel() // mean.numel()
    variance = (x - mean).square().sum(axis, keepdim=True) / (count - correction)
    return (x - mean) / root_of(variance, eps, eps_at, power)


def by_mean_of_squares(x, eps):
    """Normalize with the variance computed as a difference of two large numbers."""
    mean = x.mean(-1, keepdim=True)
    variance = x.square().mean(-1, keepdim=True) - mean.square()
    return (x - mean) / root_of(variance, eps)


LAYER_NORM = Exercise(reference=layer_norm, inputs=norm_inputs, misconceptions={
    "You divide the sum of the squares by n - 1: that is the sample variance, torch.var's default. "
    "LayerNorm divides by n.":
        partial(layer_norm, correction=1),
    "You add eps outside the root. Add it to the variance, before you take the root.":
        partial(layer_norm, eps_at="behind"),
    "You normalize along the first axis. Each row should be normalized on its own: look at dim.":
        partial(layer_norm, axis=0),
    "eps has no effect in yours. Without eps under the root, equal entries give 0/0.":
        partial(layer_norm, eps_at="nowhere"),
    "You take the mean and the variance of the whole tensor. Each row has its own: set dim.":
        partial(layer_norm, axis=None),
    "You divide by the variance, or by its root twice. LayerNorm divides by its root once.":
        partial(layer_norm, power=1.0),
    "You multiply by the root, as a division by rsqrt does. LayerNorm divides by it.":
        partial(layer_norm, power=-0.5),
    "In x - mean / root only the mean is divided: / comes before -, so x - mean needs brackets.":
        lambda x, eps: x - x.mean(-1, keepdim=True) / (
            centered(x).square().mean(-1, keepdim=True) + eps).sqrt(),
    "You normalize along axis 1. That is the last axis of a matrix. Is it the last axis of a batch "
    "of matrices?":
        partial(layer_norm, axis=1),
    "You take the larger of the variance and eps. eps is always added to the variance, however "
    "large the variance is.":
        partial(layer_norm, eps_at="least"),
    "On paper E[x^2] - mean^2 is the variance. But in float32 two numbers near 10^8 no longer hold "
    "the digits of their difference: subtract the mean first, then square.":
        by_mean_of_squares,
    "Your variance is mean^2 too large. It should be the mean of (x - mean)^2: do you take that of "
    "x^2, or do you subtract the mean twice?":
        lambda x, eps: centered(x) / root_of(x.square().mean(-1, keepdim=True), eps),
    "All your rows share one variance. Each row has its own: set dim there, too.":
        lambda x, eps: centered(x) / root_of(centered(x).square().mean(), eps),
}, without=("layer_norm", "LayerNorm", "native_layer_norm", "group_norm", "instance_norm",
            "batch_norm"))


# 1.3  The largest entry ---------------------------------------------------------------------------

def count_inputs(generator):
    yield "n = 2", 2
    yield "n = 5", 5
    yield "n = 64", 64
    yield "n = 768", 768
    yield "n = 1", 1                        # last: n = 1 would be a poor first example of an error


def largest(n):
    return math.sqrt(n - 1)


NOTHING_LEFT = ("The square of yours is n, so all other entries would have to be zero. But all "
                "entries add up to zero.")
LARGEST = Exercise(reference=largest, inputs=count_inputs, tolerance=1e-4, misconceptions={
    NOTHING_LEFT:
        lambda n: math.sqrt(n),
    "Do you use the sample variance, or a mean of squares without the mean subtracted? With "
    "LayerNorm's variance, the squares of the outputs add up to n.":
        lambda n: (n - 1) / math.sqrt(n),
    "Do you divide by the root of the sample variance, torch.std's default? LayerNorm's variance "
    "divides by n. (With n = 1 the sample variance is 0/0.)":
        lambda n: (n - 1) / math.sqrt(n) if n > 1 else math.nan,
    "Variance 1 does not mean that no entry is above 1: one entry can be far out if the others are "
    "close together.":
        lambda: 1,
    "That is the square of the largest entry: is a root missing, or the division by it?":
        lambda n: n - 1,
    "When the variance is small, every x - mean is small, too. Try one entry apart from equal "
    "others.":
        lambda: math.inf,
    "The output stays bounded even without eps, because its n squares add up to n. Try one entry "
    "apart from equal others.":
        lambda n: math.inf if n > 1 else 0.0,
})


# 1.4  RMSNorm -------------------------------------------------------------------------------------

def rms_norm(x, eps, *, axis=-1, of=torch.mean, centered=False, eps_at="inside", power=0.5):
    """Return x over its root mean square. centered=True takes the squares of x - mean instead."""
    squares = x * x
    if centered:
        squares = (x - x.mean(-1, keepdim=True)).square()
    return x / root_of(of(squares, axis, keepdim=True), eps, eps_at, power)


RMS_NORM = Exercise(reference=rms_norm, inputs=norm_inputs, misconceptions={
    "You divide by the length, so your result has length 1. RMSNorm divides by the root of the "
    "*mean* square, so its result has length sqrt(n).":
        partial(rms_norm, of=torch.sum),
    "That is LayerNorm. RMSNorm subtracts nothing.":
        layer_norm,
    "You divide by the root of the variance, from which the mean has been removed. RMSNorm never "
    "computes a mean of x.":
        partial(rms_norm, centered=True),
    "You add eps outside the root. Add it to the mean square, before you take the root.":
        partial(rms_norm, eps_at="behind"),
    "You add eps to the sum of the squares, so only eps / n of it reaches their mean. Add it to "
    "the mean.":
        lambda x, eps: x / ((x.square().sum(-1, keepdim=True) + eps) / x.shape[-1]).sqrt(),
    "You take the root of each square, and then their mean, which is the mean absolute value. Take "
    "the mean of the squares first, and then the root.":
        lambda x, eps: x / (x.square() + eps).sqrt().mean(-1, keepdim=True),
    "You square the mean. Take the mean of the squares.":
        lambda x, eps: x / (x.mean(-1, keepdim=True).square() + eps).sqrt(),
    "You add eps to the entries of x before you square them. Add it to their mean square.":
        lambda x, eps: x / (x + eps).square().mean(-1, keepdim=True).sqrt(),
    "eps has no effect in yours. Without eps under the root, a row of zeros gives 0/0.":
        partial(rms_norm, eps_at="nowhere"),
    "You take the mean square of the whole tensor. Each row has its own: set dim.":
        partial(rms_norm, axis=None),
    "You divide by the mean square, or by its root twice. RMSNorm divides by its root once.":
        partial(rms_norm, power=1.0),
    "You multiply by the root, as a division by rsqrt does. RMSNorm divides by it.":
        partial(rms_norm, power=-0.5),
    "You take the larger of the mean square and eps. eps is always added to the mean square, "
    "however large the mean square is.":
        partial(rms_norm, eps_at="least"),
}, without=("rms_norm", "RMSNorm"))


# 1.5  The essay's blocks with RMSNorm between them ------------------------------------------------

def normed(mean, variance):
    """Return mean and variance after RMSNorm."""
    square = mean * mean + variance
    return mean / math.sqrt(square), variance / square


def rms_drift_inputs(generator):
    yield from drift_inputs(generator)
    yield "a block of values near 0.001", 1, 0.001, 1.2, 0.0, 1e-6


def rms_drift(blocks, shift, scale, mean, variance, *, norm=normed):
    for _ in range(blocks):
        mean, variance = norm(mean + shift, variance * scale)
    return mean, variance


def standard(mean, variance):
    return 0.0, 1.0


def by_deviation(mean, variance):
    return mean / math.sqrt(variance), 1.0


def both_by_root(mean, variance):
    root = math.sqrt(mean * mean + variance)
    return mean / root, variance / root


def mean_first(mean, variance):
    new_mean, _ = normed(mean, variance)
    return new_mean, variance / (new_mean * new_mean + variance)


def variance_set_to_1(mean, variance):
    return mean / math.sqrt(mean * mean + variance), 1.0


def by_the_input(blocks, shift, scale, mean, variance):
    for _ in range(blocks):
        square = mean * mean + variance
        mean, variance = (mean + shift) / math.sqrt(square), variance * scale / square
    return mean, variance


def norm_before_block(blocks, shift, scale, mean, variance):
    for _ in range(blocks):
        mean, variance = normed(mean, variance)
        mean, variance = drift(1, shift, scale, mean, variance)
    return mean, variance


def norm_at_the_end(blocks, shift, scale, mean, variance):
    mean, variance = drift(blocks, shift, scale, mean, variance)
    return normed(mean, variance)


RMS_DRIFT = Exercise(reference=rms_drift, inputs=rms_drift_inputs, parts=("mean", "variance"),
                     misconceptions={
    "RMSNorm does not set the variance to 1. It divides the values by r, and so their variance by "
    "r^2.":
        partial(rms_drift, norm=variance_set_to_1),
    "You divide by the root of the variance. That is the root mean square only if the mean is 0.":
        partial(rms_drift, norm=by_deviation),
    "You divide the variance by the root mean square r, too. Dividing values by r divides their "
    "variance by r^2.":
        partial(rms_drift, norm=both_by_root),
    "Your root mean square is that of the block's input. The norm acts on the block's output, "
    "after shift and scale.":
        by_the_input,
    "You normalize the mean first and then use the new mean to normalize the variance. Both need "
    "the same mean square.":
        partial(rms_drift, norm=mean_first),
    "You normalize before each block. The norm comes after the block, on its output.":
        norm_before_block,
    "You normalize once, at the end. The norm acts after every block.":
        norm_at_the_end,
    "Mean 0 and variance 1 is what LayerNorm gives. RMSNorm does not subtract the mean.":
        partial(rms_drift, norm=standard),
})


# 1.6  Which parameters write into the residual stream ---------------------------------------------

WRITERS_ABOUT = {
    "wte.weight":
        "wte gives a vector for each token. Where in GPT.forward does that vector go?",
    "wpe.weight":
        "wpe holds learned positions. What does GPT.forward do with them before the first block?",
    "blocks.0.norm1.weight":
        "norm1: read the line in PreNormBlock that uses it. Is its output added to h?",
    "blocks.0.w_qkv.weight":
        "w_qkv gives queries, keys and values. What happens to them before anything is added?",
    "blocks.0.w_o.weight":
        "w_o is the last map of the attention branch. What happens to its output?",
    "blocks.0.w_o.bias":
        "The bias of w_o is part of w_o's output. What happens to that output?",
    "blocks.5.norm2.bias":
        "The bias of norm2 is part of norm2's output. Is that added to h, or does w_up read it?",
    "blocks.3.w_qkv.bias":
        "The bias of w_qkv is part of the queries, keys and values. What happens to them before "
        "anything is added?",
    "blocks.5.w_up.weight":
        "w_up gives the MLP's hidden units, more than there are channels. Can they be added to h?",
    "blocks.7.w_up.bias":
        "The bias of w_up is part of the MLP's hidden units. Can they be added to h?",
    "blocks.5.w_down.weight":
        "blocks.5.w_down is the last map of an MLP. What happens to its output in each block?",
    "blocks.11.w_down.bias":
        "blocks.11.w_down.bias is part of w_down's output. What happens to that in each block? "
        "(If you take other biases for writers: do you read a block's number of two digits?)",
    "norm_f.weight":
        "norm_f comes after the last block. What reads its output?",
    "lm_head.weight":
        "lm_head gives one number for each token of the vocabulary. Are those channels of the "
        "residual stream?",
}


def parameter_names(generator):
    for name in WRITERS_ABOUT:
        yield name, name


def writers(*modules):
    """Return the answer that says True for the parameters of these modules."""
    def writes_to_stream(name):
        return name.split(".")[-2] in modules
    return writes_to_stream


WRITERS = Exercise(reference=writers("wte", "wpe", "w_o", "w_down"), inputs=parameter_names,
                   about=WRITERS_ABOUT, misconceptions={
    "You leave out what h is before the first block. Where does that come from?":
        writers("w_o", "w_down"),
    "The residual stream begins with the embeddings, as you say. But every block adds to it twice, "
    "and yours is False for all parameters of a block.":
        writers("wte", "wpe"),
    "You count the norms. The output of a norm goes into a branch (norm_f's into the head), and h "
    "itself continues without it.":
        writers("wte", "wpe", "w_o", "w_down", "norm1", "norm2", "norm_f"),
    "Those are the matrices that read the residual stream. The question is which ones write to it: "
    "what h is before the first block, and what is added to h.":
        writers("w_qkv", "w_up", "lm_head"),
    "You count all parameters of a block. Only the output of a branch's last map is added to h; "
    "what comes before it stays inside the branch.":
        writers("wte", "wpe", "norm1", "w_qkv", "w_o", "norm2", "w_up", "w_down"),
    "Yours is False for every name. Does it look for the module inside a name such as "
    "\"blocks.0.w_qkv.weight\"?":
        lambda: False,
    "Yours is True for every name, but not every output is added to h. Or is a condition always "
    "true, as `\"a\" or \"b\" in name` is?":
        lambda: True,
})


# 1.7  LayerNorm's Jacobian ------------------------------------------------------------------------

def jacobian_inputs(generator):
    yield "five entries", randn64(generator, 5), 1e-5
    yield "a long vector", 30 * randn64(generator, 8) + 100, 1e-5
    yield "two entries", randn64(generator, 2), 1e-5
    yield "equal entries", torch.full((4,), 3.0, dtype=torch.float64), 1e-2
    yield "one entry", torch.ones(1, dtype=torch.float64), 1e-2
    yield "a large eps", randn64(generator, 5), 1.0
    # For these entries no step of a difference quotient is small enough.
    yield "entries near 0.000001", 1e-6 * randn64(generator, 5), 1e-14


def by_variance(x, eps):
    _, root = standardize(x, eps)
    return centered(x) / root ** 2, root ** 2


def jacobian(x, eps, *, norm=standardize, mean_part=1, y_part=1, mean_over_n=True, y_over_n=True,
             y_over_root=True, over_root=True, product=torch.outer, identity=torch.eye):
    """mean_part and y_part multiply what comes from the mean and from the root."""
    n = len(x)
    y, root = norm(x, eps)
    from_root = product(y, y)
    if not y_over_root:
        from_root = from_root * root ** 2
    if y_over_n:
        from_root = from_root / n
    from_mean = mean_part / n if mean_over_n else mean_part
    J = identity(n, dtype=x.dtype) - from_mean - y_part * from_root
    if over_root:
        J = J / root
    return J


def rms_and_root(x, eps):
    root = root_of(x.square().mean(), eps)
    return x / root, root


def y_without_eps(x, eps):
    n = len(x)
    y, _ = standardize(x, 0.0)
    _, root = standardize(x, eps)
    return (torch.eye(n, dtype=x.dtype) - 1 / n - torch.outer(y, y) / n) / root


JACOBIAN = Exercise(reference=jacobian, inputs=jacobian_inputs, misconceptions={
    "The term that comes from the root s is missing or 0, but s depends on every entry of x.":
        partial(jacobian, y_part=0),
    "The term that comes from the mean is missing or 0. But the mean changes, too, when one entry "
    "of x changes.":
        partial(jacobian, mean_part=0),
    "You have 1 where the identity matrix belongs: the 1 comes from the derivative of x[i] with "
    "respect to x[j], and that is 0 for i != j.":
        partial(jacobian, identity=torch.ones),
    "y @ y is a single number, and so is y @ y.T for a vector y. The last term needs a matrix with "
    "y_i y_j in row i, column j.":
        partial(jacobian, product=torch.dot),
    "y * y multiplies entry by entry and gives a vector. The last term needs a matrix with y_i "
    "y_j in row i, column j.":
        partial(jacobian, product=torch.mul),
    "s is the root of a mean over n entries: its derivative carries a 1/n.":
        partial(jacobian, y_over_n=False),
    "The mean is a sum divided by n: its derivative is 1/n, and not 1.":
        partial(jacobian, mean_over_n=False),
    "Your last term is s^2 times too large. Do you have x - mean in it where y = (x - mean)/s "
    "belongs, or is a division by s^2 missing?":
        partial(jacobian, y_over_root=False),
    "A division by s is missing: y is (x - mean) / s, so its derivative has a 1/s.":
        partial(jacobian, over_root=False),
    "Your s uses the sample variance, torch.var's default. LayerNorm divides by n.":
        partial(jacobian, norm=partial(standardize, correction=1)),
    "Your s is torch's std plus eps. That is the root of the sample variance; LayerNorm divides by "
    "n, and adds eps to the variance, under the root.":
        partial(jacobian, norm=partial(standardize, correction=1, eps_at="behind")),
    "Your s is the variance plus eps. LayerNorm divides by the root of that.":
        partial(jacobian, norm=by_variance),
    "That is RMSNorm's Jacobian. LayerNorm subtracts the mean first.":
        partial(jacobian, norm=rms_and_root, mean_part=0),
    "Your diagonal is right, and everything else is 0. But every entry of y depends on every "
    "entry of x, through the mean and through s.":
        lambda right: right.diagonal().diag(),
    "That is the diagonal. Return all n x n derivatives; the others are not 0.":
        lambda right: right.diagonal(),
    "Your last term is the one without eps. It should be y y^T / n with LayerNorm's y. Is eps "
    "under the root when you compute y, and do you divide by n, and not by the sum of y^2?":
        y_without_eps,
}, without=AUTOGRAD)


# 1.8  LayerNorm's backward pass -------------------------------------------------------------------

def backward_inputs(generator):
    def case(x):
        g = randn64(generator, *x.shape)
        weight = 0.5 + randn64(generator, x.shape[1])
        return g, x, weight, 1e-3

    rows = 3 * randn64(generator, 4, 5) + 1
    single = randn64(generator, 1, 6)
    equal_and_not = torch.stack((torch.ones(4), torch.arange(4.0))).double()
    numbers = randn64(generator, 3, 1)
    yield "four rows of five", *case(rows)
    yield "a single row", *case(single)
    yield "a row of equal entries and another", *case(equal_and_not)
    yield "rows of one element", *case(numbers)


def layer_norm_backward(g, x, weight, eps, *, norm=standardize, use_weight=True, mean_part=1,
                        root_part=1, row=torch.mean):
    """mean_part and root_part multiply what passes through the mean and through the root."""
    y, root = norm(x, eps)
    u = g
    if use_weight:
        u = g * weight
    through_mean = row(u, -1, keepdim=True)
    through_root = y * row(u * y, -1, keepdim=True)
    dx = (u - mean_part * through_mean - root_part * through_root) / root
    return dx, (g * y).sum(0), g.sum(0)


def weight_at_the_end(g, x, weight, eps):
    dx, dweight, dbias = layer_norm_backward(g, x, torch.ones_like(weight), eps)
    return weight * dx, dweight, dbias


def gain_in_last_term(g, x, weight, eps):
    y, root = standardize(x, eps)
    u, out = g * weight, y * weight
    dx = (u - u.mean(-1, keepdim=True) - out * (u * out).mean(-1, keepdim=True)) / root
    return dx, (g * y).sum(0), g.sum(0)


BACKWARD = Exercise(reference=layer_norm_backward, inputs=backward_inputs,
                    parts=("dx", "dweight", "dbias"), misconceptions={
    "dx: the term that comes from s is missing or 0, but s depends on x: y times a row mean is "
    "needed. (The mean of a product is not the product of the means.)":
        partial(layer_norm_backward, root_part=0),
    "You treat the mean as a constant, but it depends on x: a row mean is missing.":
        partial(layer_norm_backward, mean_part=0),
    "On its way back to x the gradient passes through the gain: multiply g by weight first.":
        partial(layer_norm_backward, use_weight=False),
    "Your dx is weight times the gradient of the norm alone. The gain comes after the norm, so on "
    "the way back it comes first: take the two row means of g times weight.":
        weight_at_the_end,
    "dx: your last term contains the output with its gain, weight * y. It should contain y, which "
    "is what the norm gives before the gain.":
        gain_in_last_term,
    "The gain multiplies the normalized x, so its gradient is a sum of g * y, not of g * x.":
        lambda dx, g, x, dbias: (dx, (g * x).sum(0), dbias),
    "The gain multiplies y, not x - mean, so its gradient is a sum of g * y.":
        lambda dx, g, x, dbias: (dx, (g * centered(x)).sum(0), dbias),
    "Your s comes from the sample variance, torch.var's default. LayerNorm divides by n.":
        partial(layer_norm_backward, norm=partial(standardize, correction=1)),
    "Your s is torch's std plus eps. That is the root of the sample variance; LayerNorm divides by "
    "n, and adds eps to the variance, under the root.":
        partial(layer_norm_backward, norm=partial(standardize, correction=1, eps_at="behind")),
    "dx has two means over the row. You take sums: a 1/n is missing in both.":
        partial(layer_norm_backward, row=torch.sum),
    "dweight: you sum g * weight * y. The output is linear in the gain, so the gain's gradient "
    "does not contain the gain.":
        lambda dx, dweight, weight, dbias: (dx, weight * dweight, dbias),
    "dweight and dbias have one axis too many, of length 1. Their shape should be (n,): sum over "
    "the rows without keepdim.":
        lambda dx, dweight, dbias: (dx, dweight[None], dbias[None]),
}, without=AUTOGRAD + ("native_layer_norm_backward", "eye"))


# 1.9  Pre-LN and Post-LN --------------------------------------------------------------------------

def residual_inputs(generator):
    w = randn64(generator, 6, 6)
    v = randn64(generator, 4, 4)

    def linear(x):
        return x @ w

    def tanh(x):
        return (x @ v).tanh()

    def rms(x):
        return rms_norm(x, 0.0)

    def layer(x):
        return layer_norm(x, 1e-5)

    def same(x):
        return x

    yield "a linear branch and LayerNorm", 2 * randn64(generator, 3, 6) + 1, linear, layer
    yield "a tanh branch and RMSNorm", 2 * randn64(generator, 2, 3, 4) + 1, tanh, rms
    yield "a branch that gives zeros", 5 * randn64(generator, 2, 6), torch.zeros_like, layer
    yield "a norm that does nothing", randn64(generator, 2, 6), linear, same


def pre_ln(h, branch, norm):
    return h + branch(norm(h))


def post_ln(h, branch, norm):
    return norm(h + branch(h))


def residuals(h, branch, norm, *, pre=pre_ln, post=post_ln):
    return pre(h, branch, norm), post(h, branch, norm)


RESIDUALS = Exercise(reference=residuals, inputs=residual_inputs, parts=("Pre-LN", "Post-LN"),
                     misconceptions={
    "Pre-LN adds the branch to h itself. You add it to norm(h), which would normalize h itself "
    "before every branch.":
        partial(residuals, pre=lambda h, branch, norm: norm(h) + branch(norm(h))),
    "Your Post-LN normalizes the branch's output. The norm comes after the addition, on the sum.":
        partial(residuals, post=lambda h, branch, norm: h + norm(branch(h))),
    "Your Post-LN has two norms. It has one per branch, after the sum; the branch is given h as it "
    "is.":
        partial(residuals, post=lambda h, branch, norm: norm(h + branch(norm(h)))),
    "Your Post-LN starts from the result of Pre-LN. Both should start from the same h: do you "
    "overwrite h?":
        lambda right, branch, norm: (right[0], post_ln(right[0], branch, norm)),
    "In Pre-LN the branch is given norm(h), and h itself is added. You have it the other way "
    "round.":
        partial(residuals, pre=lambda h, branch, norm: norm(h) + branch(h)),
})


# 1.10  How long the residual stream gets ---------------------------------------------------------

def length_inputs(generator):
    yield "1 contribution", 1
    yield "2 contributions", 2
    yield "3 contributions", 3
    yield "12 contributions", 12
    yield "24 contributions", 24


def stream_norms(count):
    return math.sqrt(count), math.sqrt(2) ** (count - 1)


def lengths_of_earlier_ones_added(count):
    lengths = [1.0]
    while len(lengths) < count:
        lengths.append(sum(lengths))
    return math.sqrt(sum(length ** 2 for length in lengths))


STREAM_NORMS = Exercise(reference=stream_norms, inputs=length_inputs, parts=("rule a", "rule b"),
                        misconceptions={
    "The two numbers are exchanged: each is right for the other rule.":
        lambda right: right[::-1],
    "Those are the expected squares: is the root at the end missing? (Or did you add lengths? For "
    "independent vectors the squares add up, on average.)":
        lambda count: (count, 2 ** (count - 1)),
    "Is the root of your first number missing, or did you add lengths? For independent directions "
    "the squares add up.":
        lambda count, right: (count, right[1]),
    "For the second number you give contribution l + 1 the length sqrt(l). That is the length of "
    "the sum under rule a; under rule b the sum is longer by then.":
        lambda count, right: (right[0], math.sqrt(1 + count * (count - 1) / 2)),
    "Under rule b the contributions from the third on are longer than 1: each is as long as the "
    "sum so far, and so doubles the expected square.":
        lambda right: (right[0], right[0]),
    "For rule b you add the lengths of the earlier contributions. A later one is as long as the "
    "sum of the earlier vectors, and in independent directions the squares of the lengths add up.":
        lambda count, right: (right[0], lengths_of_earlier_ones_added(count)),
    "Is the root of your second number missing, or did you add lengths? For independent directions "
    "the squares of the lengths add up.":
        lambda count, right: (right[0], 2 ** (count - 1)),
})


# 1.11  The skip path of Post-LN -------------------------------------------------------------------

def skip_inputs(generator):
    yield "different branches", torch.tensor([0.1, 2.0, 0.5, 0.8], dtype=torch.float64)
    yield "three sublayers with branches as long as h", torch.ones(3, dtype=torch.float64)
    yield "branches that give nothing", torch.zeros(5, dtype=torch.float64)
    yield "a single sublayer", torch.tensor([3.0], dtype=torch.float64)


def own_factors(r):
    return 1 / (1 + r * r).sqrt()


def backwards(factors):
    return factors.flip(0).cumprod(0).flip(0)


def skip_gain(r, *, factors=own_factors, passed=backwards):
    return passed(factors(r))


def of_later_ones(factors):
    return backwards(factors) / factors


def forwards(factors):
    return factors.cumprod(0)


def product_for_each(factors):
    return factors.prod().expand(len(factors))


SKIP_GAIN = Exercise(reference=skip_gain, inputs=skip_inputs, misconceptions={
    "The gradient comes from the last sublayer: entry i has the factors of sublayer i and of all "
    "later ones. Yours has those of sublayer i and of all earlier ones.":
        partial(skip_gain, passed=forwards),
    "Entry i is for the input of sublayer i, so sublayer i's own factor belongs to it. Yours "
    "leaves it out.":
        partial(skip_gain, passed=of_later_ones),
    "1 + r would be the length of the sum if h and f(h) pointed the same way. They are "
    "independent, so their squares add up.":
        partial(skip_gain, factors=lambda r: 1 / (1 + r)),
    "You have 1 + r under the root. The squared length of h is 1, and that of the branch is r^2.":
        partial(skip_gain, factors=lambda r: 1 / (1 + r).sqrt()),
    "You have 1 + r above the root. The gradient through the branch is not asked for: on the skip "
    "path h keeps its factor of 1.":
        partial(skip_gain, factors=lambda r: (1 + r) / (1 + r * r).sqrt()),
    "Those are the factors of the single sublayers. On its way to the input of sublayer i the "
    "gradient passes through more of them.":
        own_factors,
    "You return the product of all factors for every sublayer. At the input of a late sublayer the "
    "gradient has passed through only a few.":
        partial(skip_gain, passed=product_for_each),
    "You return one number, the product of all factors. There is one for each sublayer: on its "
    "way to which input does the gradient pass through which factors?":
        partial(skip_gain, passed=torch.prod),
})


# 1.12  A LayerNorm GPT as an RMSNorm GPT ---------------------------------------------------------

def weight_inputs(generator):
    def matrix(*shape):
        return randn64(generator, *shape) + 0.5

    def gain():
        return 1 + 0.5 * randn64(generator, 4)

    yield "wte.weight", "wte.weight", matrix(7, 4), None
    yield "wpe.weight", "wpe.weight", matrix(3, 4), None
    yield "blocks.0.norm1.weight", "blocks.0.norm1.weight", gain(), None
    yield "blocks.0.w_qkv.weight", "blocks.0.w_qkv.weight", matrix(12, 4), gain()
    yield "blocks.0.w_o.weight", "blocks.0.w_o.weight", matrix(4, 4), None
    yield "blocks.0.w_o.bias", "blocks.0.w_o.bias", matrix(4), None
    yield "blocks.1.norm2.weight", "blocks.1.norm2.weight", gain(), None
    yield "blocks.1.w_up.weight", "blocks.1.w_up.weight", matrix(16, 4), gain()
    yield "blocks.1.w_down.weight", "blocks.1.w_down.weight", matrix(4, 16), None
    yield "norm_f.weight", "norm_f.weight", gain(), None
    yield "lm_head.weight", "lm_head.weight", matrix(7, 4), gain()


def minus_mean(x, axis):
    return x - x.mean(axis, keepdim=True)


def times_gain(weight, gain):
    return weight * gain


def for_rms(name, weight, gain, *, table_axis=1, matrix_axis=0, tables=("wte", "wpe"), norms=True,
            bias=True, reader=times_gain, centre=minus_mean):
    """table_axis and matrix_axis: where the mean is taken; tables: those that are centered."""
    module, kind = name.split(".")[-2:]
    if "norm" in module:
        return torch.ones_like(weight) if norms else weight
    if module in ("wte", "wpe"):
        return centre(weight, table_axis) if module in tables else weight
    if kind == "bias":
        return centre(weight, 0) if bias else weight
    if module in ("w_o", "w_down"):
        return centre(weight, matrix_axis)
    return reader(weight, gain)


def mean_of_all(x, axis):
    return x - x.mean()


FOR_RMS = Exercise(reference=for_rms, inputs=weight_inputs, misconceptions={
    "w_o and w_down: you take the mean out of each row. Their output is a sum of columns, so each "
    "column needs mean 0.":
        partial(for_rms, matrix_axis=1),
    "wte and wpe: you take the mean out of each column. A token or a position writes one row, so "
    "each row needs mean 0.":
        partial(for_rms, table_axis=0),
    "You subtract one mean from the whole tensor. Each vector that is written needs mean 0 on its "
    "own.":
        partial(for_rms, centre=mean_of_all),
    "You leave the gains in the norms. They have moved into the matrices, and the new norms have "
    "none: what is a gain that changes nothing?":
        partial(for_rms, norms=False),
    "For a norm you return one number. It has d gains: return a tensor of the shape of weight.":
        lambda name, right: torch.tensor(1.0) if "norm" in name else right,
    "The gain multiplies what the matrix reads. You divide by it.":
        partial(for_rms, reader=lambda weight, gain: weight / gain),
    "The matrices behind a norm have lost its gain: the new norms do not multiply by it any more.":
        partial(for_rms, reader=lambda weight, gain: weight),
    "You take the mean out of the matrices behind a norm, too. That changes no logit, but it is "
    "not needed: only what is added to h gets mean 0.":
        partial(for_rms, reader=lambda weight, gain: minus_mean(weight * gain, 1)),
    "You take the mean out of each column of the matrices behind a norm, too. Nothing adds their "
    "output to h, and this changes the logits.":
        partial(for_rms, reader=lambda weight, gain: minus_mean(weight * gain, 0)),
    "h begins with the embeddings: what wte and wpe write needs mean 0, too.":
        partial(for_rms, tables=()),
    "Learned positions are part of h: what wpe writes needs mean 0, too.":
        partial(for_rms, tables=("wte",)),
    "lm_head reads the output of norm_f, so the gain of norm_f moves into it. You leave lm_head as "
    "it is.":
        lambda name, weight, right: weight if name == "lm_head.weight" else right,
    "A bias of w_o or w_down is added to h: it needs mean 0, too.":
        partial(for_rms, bias=False),
})


# Properties of every right answer. The first that does not hold is named if no known mistake fits.

def equals(y, right):
    """Return whether y is nearly right. Another shape is left to other sentences."""
    return y.shape != right.shape or near(y, right)


def start_without_blocks(y, blocks, shift, scale, mean, variance):
    return blocks != 0 or near(y[0], mean) and near(y[1], variance)


def is_wide(x, eps):
    """Return whether eps is small against the variance of each row."""
    return x.shape[-1] > 1 and x.var(-1).min() > 1000 * eps


def square_with_balance(y, n):
    """Return the entry's square plus those of the n - 1 equal entries that bring the sum to 0."""
    return y * y * n / (n - 1)


def only_stretched(y, x):
    of_x = x.norm(dim=-1, keepdim=True)
    of_y = y.norm(dim=-1, keepdim=True)
    return near(y * of_x, x * of_y)


def eps_counts(x, eps):
    """Return whether eps is not small against the mean square of each row."""
    return x.square().mean(-1).min() < 1000 * eps


def square_of_one(y, x, eps):
    return eps_counts(x, eps) or near(y.square().mean(-1), 1, 0.02)


def written(y, name):
    """Return the vectors that a writer adds to h, as rows; None if it is not a writer."""
    module = name.split(".")[-2]
    if module in ("wte", "wpe"):
        return y
    return y.T if module in ("w_o", "w_down") else None


def writes_mean_0(y, name):
    vectors = written(y, name)
    return vectors is None or near(vectors.mean(-1), 0)


def loses_only_the_mean(y, name, weight):
    vectors = written(y - weight, name)
    return vectors is None or near(vectors, vectors.mean(-1, keepdim=True))


def has_an_axis_too_many(y, x, weight):
    return len(x) > 1 and any(part.dim() == 2 and part.numel() == weight.numel() for part in y[1:])


def is_tiny(x):
    return x.abs().max() < 1e-4


def without_diagonal(matrix):
    return matrix - torch.diag(matrix.diagonal())


def of_largest(x):
    """Divide large numbers by the largest of them, so that their rounding stays small."""
    return x / x.abs().max().clamp(min=1)


EPS_IN_ANOTHER_PLACE = (
    "Where eps is small against every row, yours has nearly the right size. Is eps itself added "
    "under the root, to a mean and not to a sum, do you normalize once, and is no row a special "
    "case?")


PROPERTIES = {
    "1.1": {
        "After 0 blocks the mean is the one that you were given. Yours is not. Is it counted once, "
        "however many blocks there are?":
            lambda y, blocks, mean: blocks != 0 or near(y[0], mean),
        "After 0 blocks the variance is the one that you were given. Yours is not. Is it counted "
        "once, however many blocks there are?":
            lambda y, blocks, variance: blocks != 0 or near(y[1], variance),
        "With scale = 1 the blocks only shift, and the variance stays as it is. Yours changes.":
            lambda y, scale, variance: scale != 1 or near(y[1], variance),
        "Your mean is not the first mean plus one shift per block.":
            lambda y, blocks, shift, mean: near(y[0], mean + blocks * shift),
        "Your mean is right. Each block multiplies the variance that it is given by scale: by what "
        "does yours multiply, and how often?":
            never},
    "1.2": {
        "The entries of each row should add up to 0. Yours do not: do you subtract the row's own "
        "mean, divide all entries of a row by one number, and change nothing afterwards?":
            lambda y: near(y.mean(-1), 0),
        "The mean square of each row should be 1, apart from eps. Yours is not. Which numbers go "
        "into the mean by whose root you divide, and how many are they?":
            lambda y, x, eps: not is_wide(x, eps) or near(y.square().mean(-1), 1, 0.02),
        EPS_IN_ANOTHER_PLACE:
            lambda y, x, eps, right: is_wide(x, eps) or equals(y, right),
        "Only in float32, with entries far from 0, yours is not precise. x / root - mean / root is "
        "right on paper, but it subtracts two large numbers that have been rounded: subtract the "
        "mean from x first, and divide then.":
            lambda y, x, right: x.dtype != torch.float32 or near(y, right, 1e-5)},
    "1.3": {
        NOTHING_LEFT:
            lambda y, n: n == 1 or not near(y * y, n, 1e-6),
        "Yours is too large: its square, plus the squares of the entries that balance it, is more "
        "than n.":
            lambda y, n: n == 1 or square_with_balance(y, n) <= n + 0.01,
        "Take one entry apart from equal others, and no eps: its output is larger than yours.":
            lambda y, n: n == 1 or square_with_balance(y, n) >= n - 0.01,
        "For n = 1 the only entry minus its mean is 0.":
            lambda y, n: n != 1 or near(y, 0)},
    "1.4": {
        "Each row should only be stretched. Yours points in another direction: do you add or "
        "subtract something, do entries have factors of their own, or is a divisor negative?":
            only_stretched,
        "The mean square of each row should be 1, apart from eps. Yours is not. Which numbers go "
        "into the mean by whose root you divide, and how many are they?":
            square_of_one,
        EPS_IN_ANOTHER_PLACE:
            lambda y, x, eps, right: not eps_counts(x, eps) or equals(y, right)},
    "1.5": {
        "With 0 blocks there is no norm either: return the mean and the variance that you were "
        "given.":
            start_without_blocks,
        "The output of RMSNorm has mean square 1. In yours mean^2 + variance is not 1.":
            lambda y, blocks, variance: blocks == 0 or variance < 1e-3
            or near(y[0] ** 2 + y[1], 1),
        "Only where the values are small, mean^2 + variance is not 1 in yours. Do you add an eps, "
        "or treat small values as a special case? In this exercise eps is 0.":
            lambda y, variance: variance >= 1e-3 or near(y[0] ** 2 + y[1], 1),
        "One block is wrong already, though mean^2 + variance is right. Does the loop run once, "
        "and are mean and variance before the norm those of 1.1?":
            lambda y, blocks, right: blocks != 1 or near(y[0], right[0]) and near(y[1], right[1]),
        "Take two blocks by hand, from mean 2 and variance 3. Does your first block do to these "
        "what one of 1.1 does, and normalize only then? Is the second given the result?":
            never},
    "1.7": {
        "At least once only your diagonal is wrong. Does every term act there, too?":
            lambda y, x, right: is_tiny(x) or len(x) <= 2 or equals(y, right)
            or not equals(without_diagonal(y), without_diagonal(right)),
        "Adding a constant to x changes nothing, so each row of J sums to 0. Yours do not. Is the "
        "term from the mean wrong (its factor, sign or 1/s), or do the rows of the last term not "
        "sum to 0?":
            lambda y, x: is_tiny(x) or near(of_largest(y).sum(-1), 0),
        "J is symmetric; yours is not.":
            lambda y, x: is_tiny(x) or near(of_largest(y), of_largest(y).T),
        "Stretching x around its mean changes nothing, apart from eps, so J times (x - mean) "
        "should be 0. Yours is not. Look at the factors and the sign of the term that contains y "
        "twice. Does s divide the other terms as often?":
            lambda y, x, eps: x.var() < 1000 * eps or near(y @ (x - x.mean()), 0),
        "Compare the diagonal, entry by entry. Does s divide every term once, and is it the root "
        "that LayerNorm divides by?":
            lambda y, x, eps, right: x.var() < 1000 * eps or equals(y, right),
        "Where the variance is far larger than eps, yours is right, or nearly so. Is eps under the "
        "root wherever s is used (in y, too), and is no x treated as a special case?":
            lambda y, x, right: is_tiny(x) or equals(y, right),
        "Yours is wrong only where the entries are tiny: does it use steps or limits that are not "
        "small against them?":
            never},
    "1.8": {
        "dx should have the shape of x. Yours has another: do you keep the result of every row?":
            lambda y, x: y[0].shape == x.shape,
        "dweight and dbias should have shape (n,). One of yours has two axes: is a keepdim=True "
        "too much?":
            lambda y, x, weight: not has_an_axis_too_many(y, x, weight),
        "dweight and dbias have one entry per channel: do you sum over the rows, and along which "
        "axis is that?":
            lambda y, weight: y[1].shape == y[2].shape == weight.shape,
        "dx: adding a constant to a row of x changes nothing, so each row of dx sums to 0. Yours "
        "do not: do you subtract from g times weight its own row mean, and has what you multiply "
        "the other mean by a row mean of 0? Is every term divided by s as often?":
            lambda y: near(y[0].sum(-1), 0),
        "dx: stretching a row around its mean changes nothing, apart from eps, so dx times (x - "
        "mean) sums to 0. Yours does not. In the term that contains y twice, look at y, g times "
        "weight, the mean, the factor and the sign. Is every term divided by the row's s as often?":
            lambda y, x, eps: not is_wide(x, eps) or near((y[0] * centered(x)).mean(-1), 0, 0.01),
        "dx: its rows have the right direction but the wrong length: how often do you divide by s, "
        "is s LayerNorm's root, and if you divide by a number, is it that of the channels?":
            lambda y, right: near(y[0], right[0]) or not only_stretched(y[0], right[0]),
        "dx: is g multiplied by weight, and only once, before the two row means are taken? Is the "
        "second a mean over n, not divided by the sum of y^2? Is eps under the root wherever s or "
        "a power of s occurs?":
            lambda y, right: near(y[0], right[0]),
        "dbias: the bias is added to each row, after the gain. What does each row contribute?":
            lambda y, g: near(y[2], g.sum(0)),
        "dweight: with one row, dweight / dbias is what the gain multiplies, and that has mean 0. "
        "Yours does not.":
            lambda y, x: len(x) > 1 or near((y[1] / y[2]).mean(), 0),
        "dweight: each row contributes g times what the gain multiplies in that row. What is that?":
            lambda y, right: near(y[1], right[1])},
    "1.9": {
        "With a branch that returns zeros, Pre-LN leaves h as it is. Yours does not.":
            lambda y, h, branch: branch(h).any() or near(y[0], h),
        "The result of Post-LN comes out of a norm, so applying the norm once more changes "
        "nothing. In yours it does.":
            lambda y, norm: near(norm(y[1]), y[1]),
        "Pre-LN: subtract h from yours. The rest should be what the branch gives for h as the "
        "given norm normalizes it, and is not.":
            lambda y, h, branch, norm: near(y[0] - h, branch(norm(h))),
        "Post-LN: your result comes out of a norm, as it should. What is normalized there, and "
        "what is the branch given?":
            lambda y, right: equals(y[1], right[1])},
    "1.10": {
        "A single contribution has length 1 under both rules.":
            lambda y, count: count != 1 or near(y[0], 1) and near(y[1], 1),
        "Two contributions of length 1 at right angles: by Pythagoras both rules give the same "
        "length. At least one of yours is another.":
            lambda y, count: count != 2 or near(y[0], math.sqrt(2)) and near(y[1], math.sqrt(2)),
        "Rule a: the square of the length grows by 1 with each contribution.":
            lambda y, count: near(y[0] ** 2, count),
        "Rule b: what does the third contribution do to the squared length, and what does each "
        "later one?":
            lambda y, count: near(y[1] ** 2, 2 ** (count - 1))},
    "1.11": {
        "Branches of length 0 leave the gradient as it is. In yours they do not.":
            lambda y, r: r.any() or near(y, 1),
        "A norm after the sum makes the gradient on the skip path smaller, never larger.":
            lambda y: y.max() <= 1.001,
        "The earlier a sublayer, the more factors below 1 it collects. Yours do not fall towards "
        "the front.":
            lambda y: (y.diff() > -1e-6).all(),
        "With a single sublayer there is one factor, |h| / |h + f(h)| for directions at right "
        "angles. Yours is different. Has every sublayer this factor, the first and the last, too?":
            lambda y, r: len(r) > 1 or near(y[-1] ** -2 - 1, r[-1] ** 2, 0.01),
        "The last entry has one factor, |h| / |h + f(h)| for directions at right angles. The "
        "sublayer before has normalized h, so only the last ratio matters. Yours is different.":
            lambda y, r: near(y[-1] ** -2 - 1, r[-1] ** 2, 0.01),
        "Entry 0 has one factor more than entry 1: that of sublayer 0. In yours the two differ by "
        "something else.":
            lambda y, r: len(r) < 2 or near((y[1] / y[0]) ** 2 - 1, r[0] ** 2, 0.01)},
    "1.12": {
        "What wte, wpe, w_o and w_down write to h, with their biases, should have mean 0. Yours "
        "does not everywhere: do you subtract a mean in all of them, and along which axis is a "
        "vector that is written?":
            writes_mean_0,
        "wte, wpe, w_o and w_down should lose their means and nothing else. In yours something "
        "else changes, too.":
            loses_only_the_mean,
        "Norms without gain have gains of 1.":
            lambda y, name: "norm" not in name or near(y, 1),
        "A matrix behind a norm takes in its gain, and nothing else changes in it. In yours the "
        "gain is missing or enters in another way, or something else changes.":
            lambda y, gain, right: gain is None or equals(y, right)},
}


EXERCISES = {
    "1.1": DRIFT,
    "1.2": LAYER_NORM,
    "1.3": LARGEST,
    "1.4": RMS_NORM,
    "1.5": RMS_DRIFT,
    "1.6": WRITERS,
    "1.7": JACOBIAN,
    "1.8": BACKWARD,
    "1.9": RESIDUALS,
    "1.10": STREAM_NORMS,
    "1.11": SKIP_GAIN,
    "1.12": FOR_RMS,
}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
