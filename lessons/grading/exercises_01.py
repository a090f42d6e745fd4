"""
Lesson 1, LayerNorm and RMSNorm: what both do forward and backward, and what becomes of a stream.

See grader.py for the form. A keyword of a reference is a step of it, or something that can go wrong
with it: functools.partial makes the wrong answer. The references are written out in elementary
operations, so that they check torch's and model.py's forms from outside.
"""
import math
from functools import partial

import torch

from answers import near
from grader import AUTOGRAD, Exercise
from pieces import never, randn64


def root_of(square, eps, eps_at="inside", power=0.5):
    """eps_at: inside the root, behind it, nowhere, or the least that is taken."""
    if eps_at == "inside":
        return (square + eps) ** power
    if eps_at == "behind":
        return square ** power + eps
    if eps_at == "least":
        return square.clamp(min=eps).sqrt()
    return square ** power


def centred(x):
    return x - x.mean(-1, keepdim=True)


def standardize(x, eps, correction=0):
    """(x - mean) / sqrt(variance + eps) over the last axis, and that root."""
    n = x.shape[-1]
    variance = centred(x).square().sum(-1, keepdim=True) / (n - correction)
    root = root_of(variance, eps)
    return centred(x) / root, root


# 1.1  Mean and variance after some blocks ---------------------------------------------------------

def drift_inputs(generator):
    yield "no block at all", 0, 1.5, 1.2, 0.0, 1.0
    yield "one block", 1, 1.5, 1.2, 0.0, 1.0
    yield "five blocks of the essay's", 5, 1.5, 1.2, 0.0, 1.0
    yield "a start at mean 2 and variance 3", 4, -0.5, 0.9, 2.0, 3.0
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
    "The factor is the variance's. You took it for a factor of the values: then the variance gets "
    "its square.":
        scale_of_values,
    "One block too many: after no block nothing has happened yet.":
        one_block_more,
    "One block too few: after one block mean and variance have changed already.":
        one_block_short,
    "You multiply the variance by the number of blocks. Each block multiplies by scale once "
    "more.":
        times_the_blocks,
    "In yours the values themselves are stretched, mean and all. In this picture the mean is only "
    "shifted.":
        values_stretched,
})


# 1.2  LayerNorm -----------------------------------------------------------------------------------

def norm_inputs(generator):
    yield "three rows of five", randn64(generator, 3, 5) * 2 + 1, 1e-5
    yield "a batch of shape (2, 3, 4)", randn64(generator, 2, 3, 4) - 3, 1e-5
    yield "a row of equal entries", torch.full((1, 6), 7.0, dtype=torch.float64), 1e-5
    yield "a row of zeros", torch.zeros(1, 4, dtype=torch.float64), 1e-5
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
    """The variance as a difference of two large numbers."""
    mean = x.mean(-1, keepdim=True)
    variance = x.square().mean(-1, keepdim=True) - mean.square()
    return (x - mean) / root_of(variance, eps)


LAYER_NORM = Exercise(reference=layer_norm, inputs=norm_inputs, misconceptions={
    "You divide the squares by n - 1, the sample variance (torch.var's default). LayerNorm "
    "divides them by n.":
        partial(layer_norm, correction=1),
    "Your eps is outside the root. It belongs to the variance, before the root is taken.":
        partial(layer_norm, eps_at="behind"),
    "You normalized along the first axis. Every row is normalized on its own: look at dim.":
        partial(layer_norm, axis=0),
    "Your eps is missing: equal entries give 0/0 then.":
        partial(layer_norm, eps_at="nowhere"),
    "You took mean and variance of the whole tensor. Every row has its own: give dim.":
        partial(layer_norm, axis=None),
    "You divide by the variance. LayerNorm divides by its root.":
        partial(layer_norm, power=1.0),
    "You normalized along axis 1, the last one of a matrix. Is it the last one of a batch of "
    "matrices?":
        partial(layer_norm, axis=1),
    "You take the larger of the variance and eps. eps is added to the variance, however large "
    "that is.":
        partial(layer_norm, eps_at="least"),
    "E[x^2] - mean^2 is the variance on paper. In float32 two numbers near 10^8 have lost the "
    "digits of their difference: subtract the mean first, then square.":
        by_mean_of_squares,
}, without=("layer_norm", "LayerNorm", "native_layer_norm", "group_norm", "instance_norm",
            "batch_norm"))


# 1.3  The largest entry ---------------------------------------------------------------------------

def count_inputs(generator):
    yield "n = 1", 1
    yield "n = 2", 2
    yield "n = 5", 5
    yield "n = 64", 64
    yield "n = 768", 768


def largest(n):
    return math.sqrt(n - 1)


LARGEST = Exercise(reference=largest, inputs=count_inputs, tolerance=1e-4, misconceptions={
    "sqrt(n) would need all other entries to be zero. But the entries have to add up to zero too, "
    "so the others cannot be.":
        lambda n: math.sqrt(n),
    "You used the sample variance. With the population variance, the squares of the result add up "
    "to n.":
        lambda n: (n - 1) / math.sqrt(n),
    "Variance 1 does not mean that no entry is above 1: one may be far out if the others are "
    "close together.":
        lambda: 1,
    "That is the largest square of an entry: a root is missing.":
        lambda n: n - 1,
    "When the variance is small, so is every x - mean: try one entry away from equal others.":
        lambda: math.inf,
})


# 1.4  RMSNorm -------------------------------------------------------------------------------------

def rms_norm(x, eps, *, axis=-1, of=torch.mean, centred=False, eps_at="inside", power=0.5):
    """centred: whether the squares are those of x - mean."""
    squares = x * x
    if centred:
        squares = (x - x.mean(-1, keepdim=True)).square()
    return x / root_of(of(squares, axis, keepdim=True), eps, eps_at, power)


RMS_NORM = Exercise(reference=rms_norm, inputs=norm_inputs, misconceptions={
    "You divide by the length, so the result has length 1. RMSNorm takes the mean square: length "
    "sqrt(n).":
        partial(rms_norm, of=torch.sum),
    "That is LayerNorm. RMSNorm subtracts nothing.":
        layer_norm,
    "You divide by the root of the variance, which has the mean taken out. RMSNorm knows no "
    "mean.":
        partial(rms_norm, centred=True),
    "Your eps is outside the root. It belongs to the mean square, before the root is taken.":
        partial(rms_norm, eps_at="behind"),
    "Your eps is missing: a row of zeros gives 0/0 then.":
        partial(rms_norm, eps_at="nowhere"),
    "You took the mean square of the whole tensor. Every row has its own: give dim.":
        partial(rms_norm, axis=None),
    "You divide by the mean square. RMSNorm divides by its root.":
        partial(rms_norm, power=1.0),
    "You take the larger of the mean square and eps. eps is added to the mean square, however "
    "large that is.":
        partial(rms_norm, eps_at="least"),
}, without=("rms_norm", "RMSNorm"))


# 1.5  The essay's blocks with RMSNorm between them ------------------------------------------------

def normed(mean, variance):
    """Mean and variance of what RMSNorm gives."""
    square = mean * mean + variance
    return mean / math.sqrt(square), variance / square


def rms_drift(blocks, shift, scale, mean, variance, *, norm=normed):
    for _ in range(blocks):
        mean, variance = norm(mean + shift, variance * scale)
    return mean, variance


def by_deviation(mean, variance):
    return mean / math.sqrt(variance), 1.0


def both_by_root(mean, variance):
    root = math.sqrt(mean * mean + variance)
    return mean / root, variance / root


def mean_first(mean, variance):
    new_mean, _ = normed(mean, variance)
    return new_mean, variance / (new_mean * new_mean + variance)


def norm_before_block(blocks, shift, scale, mean, variance):
    for _ in range(blocks):
        mean, variance = normed(mean, variance)
        mean, variance = drift(1, shift, scale, mean, variance)
    return mean, variance


def norm_at_the_end(blocks, shift, scale, mean, variance):
    mean, variance = drift(blocks, shift, scale, mean, variance)
    return normed(mean, variance)


RMS_DRIFT = Exercise(reference=rms_drift, inputs=drift_inputs, parts=("mean", "variance"),
                     misconceptions={
    "You divide by the root of the variance. That is the root mean square only when the mean is "
    "0.":
        partial(rms_drift, norm=by_deviation),
    "When values are divided by r, their variance is divided by r squared.":
        partial(rms_drift, norm=both_by_root),
    "You changed the mean first and then used the new one for the variance. Both need the same "
    "mean square.":
        partial(rms_drift, norm=mean_first),
    "The norm comes after the block, on what the block gives.":
        norm_before_block,
    "You normalized once, at the end. The norm acts after every block.":
        norm_at_the_end,
    "That is what LayerNorm leaves. RMSNorm does not subtract the mean.":
        lambda: (0.0, 1.0),
})


# 1.6  Which parameters write into the residual stream ---------------------------------------------

WRITERS_ABOUT = {
    "wte.weight":
        "The stream begins with something. wte gives a vector for each token: where does it go?",
    "wpe.weight":
        "Learned positions: look at what GPT.forward does with wpe before the first block.",
    "blocks.0.norm1.weight":
        "norm1: read the line in PreNormBlock that uses it. Is its output added to h?",
    "blocks.0.w_qkv.weight":
        "w_qkv gives queries, keys and values. What becomes of them before anything is added?",
    "blocks.0.w_o.weight":
        "w_o is the last map of the attention branch. What happens to its output?",
    "blocks.0.w_o.bias":
        "A bias goes where the output of its map goes: follow w_o's.",
    "blocks.5.norm2.bias":
        "norm2's bias is part of what norm2 gives. Is that added to h, or read by w_up?",
    "blocks.5.w_up.weight":
        "w_up gives the MLP's hidden units, more than there are channels. Can they be added?",
    "blocks.5.w_down.weight":
        "w_down is the last map of the MLP. What happens to its output?",
    "blocks.11.w_down.bias":
        "w_down's bias goes where w_down's output goes.",
    "norm_f.weight":
        "norm_f stands behind the last block. What reads its output?",
    "lm_head.weight":
        "lm_head gives a number for each token of the vocabulary: are those channels of the "
        "stream?",
}


def parameter_names(generator):
    for name in WRITERS_ABOUT:
        yield name, name


def writers(*modules):
    """The answer that says yes to the parameters of these modules."""
    def writes_to_stream(name):
        return name.split(".")[-2] in modules
    return writes_to_stream


WRITERS = Exercise(reference=writers("wte", "wpe", "w_o", "w_down"), inputs=parameter_names,
                   about=WRITERS_ABOUT, misconceptions={
    "The stream begins somewhere: what is h before the first block?":
        writers("w_o", "w_down"),
    "The embeddings begin the stream, but every block adds to it twice.":
        writers("wte", "wpe"),
    "What a norm gives goes into a branch (norm_f's into the head). h itself goes on without it.":
        writers("wte", "wpe", "w_o", "w_down", "norm1", "norm2", "norm_f"),
    "Those are the matrices that read the stream. Asked for are those whose output is added to "
    "it, and what it begins with.":
        writers("w_qkv", "w_up", "lm_head"),
    "You take all of a block's parameters for writers. Only what the last map of a branch gives "
    "is added to h; what comes before it stays inside the branch.":
        writers("wte", "wpe", "norm1", "w_qkv", "w_o", "norm2", "w_up", "w_down"),
})


# 1.7  LayerNorm's Jacobian ------------------------------------------------------------------------

def jacobian_inputs(generator):
    yield "five entries", randn64(generator, 5), 1e-5
    yield "a long vector", 30 * randn64(generator, 8) + 100, 1e-5
    yield "two entries", randn64(generator, 2), 1e-5
    yield "equal entries", torch.full((4,), 3.0, dtype=torch.float64), 1e-2
    yield "one entry", torch.ones(1, dtype=torch.float64), 1e-2
    yield "a large eps", randn64(generator, 5), 1.0
    # no step of a difference quotient is small here
    yield "entries near 0.000001", 1e-6 * randn64(generator, 5), 1e-14


def jacobian(x, eps, *, norm=standardize, mean_part=1, y_part=1, y_over_n=True, y_over_root=True,
             over_root=True):
    """mean_part, y_part: the factors of what comes from the mean and from the root."""
    n = len(x)
    y, root = norm(x, eps)
    from_root = torch.outer(y, y)
    if not y_over_root:
        from_root = from_root * root ** 2
    if y_over_n:
        from_root = from_root / n
    J = torch.eye(n, dtype=x.dtype) - mean_part / n - y_part * from_root
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
    "You treat the root s as a constant, but s depends on every entry of x.":
        partial(jacobian, y_part=0),
    "You treat the mean as a constant, but it too changes when one entry of x does.":
        partial(jacobian, mean_part=0),
    "s is the root of a mean over n entries: its derivative carries a 1/n.":
        partial(jacobian, y_over_n=False),
    "In the last term stands x - mean where y = (x - mean)/s belongs, twice.":
        partial(jacobian, y_over_root=False),
    "The division by s itself is missing: y is (x - mean) over s.":
        partial(jacobian, over_root=False),
    "Your s has the sample variance, torch.var's default. LayerNorm's divides by n.":
        partial(jacobian, norm=partial(standardize, correction=1)),
    "That is RMSNorm's Jacobian: LayerNorm subtracts the mean first.":
        partial(jacobian, norm=rms_and_root, mean_part=0),
    "Your diagonal is right. But every entry of y depends on every entry of x, through mean and "
    "s.":
        lambda right: right.diagonal().diag(),
    "That is the diagonal. All n x n derivatives are asked for, and the others are not 0.":
        lambda right: right.diagonal(),
    "The y of your last term was divided by a root without eps. It is LayerNorm's output, eps and "
    "all.":
        y_without_eps,
}, without=AUTOGRAD)


# 1.8  LayerNorm's backward pass -------------------------------------------------------------------

def backward_inputs(generator):
    def case(x):
        g = randn64(generator, *x.shape)
        weight = 1 + 0.5 * randn64(generator, x.shape[1])
        return g, x, weight, 1e-3

    rows = 3 * randn64(generator, 4, 5) + 1
    single = randn64(generator, 1, 6)
    equal_and_not = torch.stack((torch.ones(4), torch.arange(4.0))).double()
    numbers = randn64(generator, 3, 1)
    yield "four rows of five", *case(rows)
    yield "a single row", *case(single)
    yield "a row of equal entries and another", *case(equal_and_not)
    yield "rows of one element", *case(numbers)


def layer_norm_backward(g, x, weight, eps, *, correction=0, use_weight=True, mean_part=1,
                        root_part=1, row=torch.mean):
    """mean_part, root_part: the factors of what goes through the mean and through the root."""
    y, root = standardize(x, eps, correction)
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


BACKWARD = Exercise(reference=layer_norm_backward, inputs=backward_inputs,
                    parts=("dx", "dweight", "dbias"), misconceptions={
    "You treat s as a constant, but it depends on x: y times a row mean is missing.":
        partial(layer_norm_backward, root_part=0),
    "You treat the mean as a constant, but it depends on x: a row mean is missing.":
        partial(layer_norm_backward, mean_part=0),
    "On its way to x the gradient passes the gain: multiply g by weight first.":
        partial(layer_norm_backward, use_weight=False),
    "You multiply dx by weight at the end. The gain comes after the norm, so on the way back it "
    "comes first: the two row means are of g times weight.":
        weight_at_the_end,
    "The gain is multiplied with the normalized x: its gradient sums g * y, not g * x.":
        lambda dx, g, x, dbias: (dx, (g * x).sum(0), dbias),
    "The gain is multiplied with y, not with x - mean: its gradient sums g * y.":
        lambda dx, g, x, dbias: (dx, (g * centred(x)).sum(0), dbias),
    "Your s comes from the sample variance, torch.var's default. LayerNorm divides by n.":
        partial(layer_norm_backward, correction=1),
    "dx has two means over the row. You took sums: a 1/n is missing in both.":
        partial(layer_norm_backward, row=torch.sum),
    "dweight: you sum g weight y. The output is linear in the gain, so its gradient has no gain "
    "in it.":
        lambda dx, dweight, weight, dbias: (dx, weight * dweight, dbias),
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
    "Pre-LN adds to h itself, never to norm(h); else the stream would be normalized before every "
    "branch.":
        partial(residuals, pre=lambda h, branch, norm: norm(h) + branch(norm(h))),
    "In Post-LN the norm comes after the addition, on the sum.":
        partial(residuals, post=lambda h, branch, norm: h + norm(branch(h))),
    "Post-LN has one norm a branch, after the sum; the branch is given h as it is.":
        partial(residuals, post=lambda h, branch, norm: norm(h + branch(norm(h)))),
    "Your Post-LN starts from what Pre-LN has made of h. Both start from the same h: is h written "
    "over?":
        lambda right, branch, norm: (right[0], post_ln(right[0], branch, norm)),
    "In Pre-LN the branch is given norm(h), and h goes on as it is. You have it the other way "
    "round.":
        partial(residuals, pre=lambda h, branch, norm: norm(h) + branch(h)),
})


# 1.10  How long the stream gets -------------------------------------------------------------------

def length_inputs(generator):
    yield "1 contribution", 1
    yield "2 contributions", 2
    yield "3 contributions", 3
    yield "12 contributions", 12
    yield "24 contributions", 24


def stream_norms(count):
    return math.sqrt(count), math.sqrt(2) ** (count - 1)


STREAM_NORMS = Exercise(reference=stream_norms, inputs=length_inputs, parts=("rule a", "rule b"),
                        misconceptions={
    "Those are the expected squares: is the root at the end missing? (Or did you add lengths? Of "
    "independent vectors it is the squares that add up, on average.)":
        lambda count: (count, 2 ** (count - 1)),
    "The first is the expected square: its root is missing.":
        lambda count, right: (count, right[1]),
    "In the second you let contribution l + 1 have length sqrt(l). That is the stream's length "
    "under the first rule; under the second the stream is longer by then.":
        lambda count, right: (right[0], math.sqrt(1 + count * (count - 1) / 2)),
    "Under the second rule the contributions are not of length 1: each doubles the stream's "
    "expected square.":
        lambda right: (right[0], right[0]),
    "The second is the expected square, without its root. Independent directions add squares, not "
    "lengths.":
        lambda count, right: (right[0], 2 ** (count - 1)),
})


# 1.11  The skip path of Post-LN -------------------------------------------------------------------

def skip_inputs(generator):
    yield "different branches", torch.tensor([0.1, 2.0, 0.5, 0.8], dtype=torch.float64)
    yield "three sublayers of equal branch and stream", torch.ones(3, dtype=torch.float64)
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
    "later ones.":
        partial(skip_gain, passed=forwards),
    "Entry i is the gradient at the input of sublayer i: sublayer i's own factor belongs to it.":
        partial(skip_gain, passed=of_later_ones),
    "1 + r would be the length of the sum if branch and stream pointed the same way. Here the "
    "squares add.":
        partial(skip_gain, factors=lambda r: 1 / (1 + r)),
    "Under the root stands 1 + r. The stream's square is 1, the branch's is r^2.":
        partial(skip_gain, factors=lambda r: 1 / (1 + r).sqrt()),
    "Those are the sublayers' own factors. On its way to the input of sublayer i the gradient "
    "passes more.":
        own_factors,
    "You give the product of all factors for each. At the input of a late sublayer the gradient "
    "has passed few.":
        partial(skip_gain, passed=product_for_each),
})


# What holds of every right answer: said where none of the known mistakes fits ---------------------


def start_without_blocks(y, blocks, shift, scale, mean, variance):
    return blocks != 0 or near(y[0], mean) and near(y[1], variance)


def is_wide(x, eps):
    """Whether eps counts little beside the variance of each row."""
    return x.shape[-1] > 1 and x.var(-1).min() > 1000 * eps


def square_with_balance(y, n):
    """The entry's square and those of the n - 1 equal ones that bring the sum to 0."""
    return y * y * n / (n - 1)


def only_stretched(y, x):
    of_x = x.norm(dim=-1, keepdim=True)
    of_y = y.norm(dim=-1, keepdim=True)
    return near(y * of_x, x * of_y)


def square_of_one(y, x, eps):
    eps_counts = x.square().mean(-1).min() < 1000 * eps
    return eps_counts or near(y.square().mean(-1), 1)


PROPERTIES = {
    "1.1": {
        "After no block at all nothing has happened: mean and variance are those of the start.":
            start_without_blocks,
        "Blocks that only shift leave the variance as it is. Yours changes.":
            lambda y, scale, variance: scale != 1 or near(y[1], variance),
        "In yours the mean is not only shifted by each block. Is it multiplied? The factor is "
        "the variance's alone.":
            lambda y, blocks, shift, mean: near(y[0], mean + blocks * shift),
        "Every block multiplies the variance that it is given. Five do so five times; yours has "
        "grown by less.":
            lambda y, blocks, variance: blocks != 5 or y[1] > 2 * variance},
    "1.2": {
        "The entries of each row should add up to 0. Yours do not.":
            lambda y: near(y.mean(-1), 0),
        "The mean square of each row should come out as 1, eps apart. Yours does not.":
            lambda y, x, eps: not is_wide(x, eps) or near(y.square().mean(-1), 1)},
    "1.3": {
        "Yours is too large: its square, and those of the entries that balance it, add up to more "
        "than n.":
            lambda y, n: n == 1 or square_with_balance(y, n) <= n + 0.01,
        "Take one entry away from equal others: it comes out larger than what you give.":
            lambda y, n: n == 1 or square_with_balance(y, n) >= n - 0.01,
        "A single channel minus its mean is 0.":
            lambda y, n: n != 1 or near(y, 0)},
    "1.4": {
        "A row should only be stretched. Yours points elsewhere: something is subtracted, or "
        "entries have factors of their own.":
            only_stretched,
        "The mean square of each row should come out as 1, eps apart. Yours does not.":
            square_of_one},
    "1.5": {
        "With no block there is no norm either.":
            start_without_blocks,
        "What leaves RMSNorm has mean square 1; mean^2 + variance of yours is not 1.":
            lambda y, blocks: blocks == 0 or near(y[0] ** 2 + y[1], 1),
        "Write down mean and variance behind the first norm. The second block begins there.":
            never},
    "1.7": {
        "A constant added to x changes nothing, so each row of J sums to 0. Yours do not: look "
        "at what the mean brings in, and its sign.":
            lambda y: near(y.sum(-1), 0),
        "J is symmetric; yours is not.":
            lambda y: near(y, y.T),
        "To stretch x around its mean changes nothing, eps apart: J times (x - mean) should be "
        "0. Yours is not: look at the term with y twice, its factors and its sign.":
            lambda y, x, eps: x.var() < 1000 * eps or near(y @ (x - x.mean()), 0),
        "Two things to compare: the diagonal, entry by entry, and whether s divides every term.":
            never},
    "1.8": {
        "dweight and dbias have an entry for each channel: which axis counts the rows?":
            lambda y, weight: y[1].shape == y[2].shape == weight.shape,
        "dx: a constant added to a row of x changes nothing, so each row of dx sums to 0. Yours "
        "do not: look at the plain row mean, its sign, and whether g has passed the gain in it.":
            lambda y: near(y[0].sum(-1), 0),
        "dx: to stretch a row around its mean changes nothing, eps apart, so dx times (x - mean) "
        "sums to 0. Yours does not: look at the term with y twice: is it y, has g passed the "
        "gain in it, and which sign?":
            lambda y, x, eps: not is_wide(x, eps) or near((y[0] * centred(x)).mean(-1), 0, 0.01),
        "dx: its rows point where they should, but are too long or too short: how often do you "
        "divide by s?":
            lambda y, right: near(y[0], right[0]) or not only_stretched(y[0], right[0]),
        "dx: has g passed the gain, on its way to x, before the two row means are taken of it?":
            lambda y, right: near(y[0], right[0]),
        "dbias: the bias is added to each row, behind the gain. What does each row send?":
            lambda y, g: near(y[2], g.sum(0)),
        "dweight: with one row, dweight over dbias is what the gain multiplies, which has mean 0. "
        "Yours has not.":
            lambda y, x: len(x) > 1 or near((y[1] / y[2]).mean(), 0)},
    "1.9": {
        "With a branch that gives zeros, Pre-LN leaves h as it is.":
            lambda y, h, branch: branch(h).any() or near(y[0], h),
        "What Post-LN gives has just left a norm, so that another norm changes nothing. In yours "
        "it does.":
            lambda y, norm: near(norm(y[1]), y[1]),
        "Pre-LN: take h away from yours. What is left should be what the branch makes of a "
        "normalized h.":
            lambda y, h, branch, norm: near(y[0] - h, branch(norm(h)))},
    "1.10": {
        "A single contribution has length 1 under both rules.":
            lambda y, count: count != 1 or near(y[0], 1) and near(y[1], 1),
        "Two contributions of length 1 at right angles: by Pythagoras both rules give the same. "
        "Yours give something else.":
            lambda y, count: count != 2 or near(y[0], math.sqrt(2)) and near(y[1], math.sqrt(2)),
        "Rule a: the square of the length grows by 1 with each contribution.":
            lambda y, count: near(y[0] ** 2, count),
        "Rule b: what does the third contribution do to the square?":
            lambda y, count: count != 3 or near(y[1] ** 2, 4)},
    "1.11": {
        "Branches that give nothing leave the gradient as it is.":
            lambda y, r: r.any() or near(y, 1),
        "The earlier a sublayer, the more factors below 1: yours do not fall towards the front.":
            lambda y: (y.diff() > -1e-6).all(),
        "The last entry has one factor, 1 over the length of stream and branch at right angles. "
        "Yours is another.":
            lambda y, r: near(y[-1] ** -2 - 1, r[-1] ** 2, 0.01),
        "A norm of a sum makes the gradient on the skip path smaller, never larger.":
            lambda y: y.max() <= 1.001,
        "Entry 0 has one factor more than entry 1: sublayer 0's. In yours they differ by "
        "something else.":
            lambda y, r: len(r) < 2 or near((y[1] / y[0]) ** 2 - 1, r[0] ** 2, 0.01)},
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
}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
