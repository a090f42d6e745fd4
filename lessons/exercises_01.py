"""
Lesson 1, LayerNorm and RMSNorm: what is right, what it is tried on, and which mistakes are known (see grader.py).

The references are written out in elementary operations, so that they check torch's and model.py's forms from outside.
"""
import math
from functools import partial

import torch
from answers import near
from grader import AUTOGRAD, Exercise


def standardize(x, eps, correction=0):
    """(x - mean) / sqrt(variance + eps) over the last axis, and that root."""
    centred = x - x.mean(-1, keepdim=True)
    root = ((centred ** 2).sum(-1, keepdim=True) / (x.shape[-1] - correction) + eps).sqrt()
    return centred / root, root


def randn(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# 1.1  Mean and variance after some blocks -----------------------------------------------------------------------------

def drift_inputs(generator):
    yield "no block at all", 0, 1.5, 1.2, 0.0, 1.0
    yield "one block", 1, 1.5, 1.2, 0.0, 1.0
    yield "five blocks of the essay's", 5, 1.5, 1.2, 0.0, 1.0
    yield "a start at mean 2 and variance 3", 4, -0.5, 0.9, 2.0, 3.0
    yield "blocks that only shift", 12, 1.0, 1.0, 0.0, 1.0


def one_block_short(blocks, shift, scale, mean, variance):
    done = max(blocks - 1, 0)
    return mean + done * shift, variance * scale ** done


def times_the_blocks(blocks, shift, scale, mean, variance):
    return mean + blocks * shift, variance * scale * blocks


def stretching(new_mean):
    """A wrong drift, in which the factor acts on the mean: new_mean(mean, shift, scale)."""
    def drift(blocks, shift, scale, mean, variance):
        for _ in range(blocks):
            mean = new_mean(mean, shift, scale)
            variance = variance * scale
        return mean, variance
    return drift


drift = Exercise(
    reference=lambda blocks, shift, scale, mean, variance: (mean + blocks * shift, variance * scale ** blocks),
    inputs=drift_inputs,
    misconceptions=[
        (lambda n, shift, scale, mean, variance: (mean + n * shift, variance * scale ** (2 * n)),
         "The factor is the variance's. You took it for a factor of the values: then the variance gets its square."),
        (lambda n, shift, scale, mean, variance: (mean + n * shift, variance * (1 + n * (scale - 1))),
         "Every block multiplies the variance that it is given. You added the same amount each time."),
        (lambda n, shift, scale, mean, variance: (mean + (n + 1) * shift, variance * scale ** (n + 1)),
         "One block too many: after no block nothing has happened yet."),
        (one_block_short, "One block too few: after one block mean and variance have changed already."),
        (times_the_blocks,
         "You multiply the variance by the number of blocks. Each block multiplies by scale once more."),
        (lambda n, shift, scale, mean, variance: (
            mean * scale ** (n / 2) + shift * sum(scale ** (k / 2) for k in range(n)), variance * scale ** n),
         "In yours the values themselves are stretched, mean and all. In this picture the mean is only shifted."),
        (stretching(lambda mean, shift, scale: mean * scale + shift),
         "Your factor multiplies the mean as well, before the shift. It is the variance's alone."),
        (stretching(lambda mean, shift, scale: (mean + shift) * scale),
         "Your factor multiplies the mean as well, behind the shift. It is the variance's alone."),
        (lambda n, shift, scale, mean, variance: (mean * scale ** n + n * shift, variance * scale ** n),
         "The mean that you start from is multiplied in yours. A factor leaves the mean alone."),
        (lambda n, shift, scale, mean, variance: ((mean + n * shift) * scale ** n, variance * scale ** n),
         "You multiply the mean that comes out. A factor leaves the mean alone."),
        (lambda n, shift, scale, mean, variance: (n * shift, scale ** n),
         "That is right for a start at mean 0 and variance 1. Where it starts is given too."),
    ], parts=("mean", "variance"))


# 1.2  LayerNorm -------------------------------------------------------------------------------------------------------

def norm_inputs(generator):
    yield "three rows of five", randn(generator, 3, 5) * 2 + 1, 1e-5
    yield "a batch of shape (2, 3, 4)", randn(generator, 2, 3, 4) - 3, 1e-5
    yield "a row of equal entries", torch.full((1, 6), 7.0, dtype=torch.float64), 1e-5
    yield "a row of zeros", torch.zeros(1, 4, dtype=torch.float64), 1e-5
    yield "rows of one element", randn(generator, 2, 1), 1e-5
    yield "entries near 0.001", randn(generator, 2, 5) * 1e-3, 1e-5
    yield "entries near 10,000", randn(generator, 2, 5) * 1e4, 1e-5
    yield "a large eps", randn(generator, 2, 5), 0.5
    whole = torch.tensor([[-3.0, -1.0, 1.0, 3.0], [6.0, -6.0, -6.0, 6.0]])
    yield "whole numbers near 10,000, in float32", whole + 10_000, 1e-5


def mean_of_squares(x, eps):
    """The variance as a difference of two large numbers."""
    mean = x.mean(-1, keepdim=True)
    variance = x.square().mean(-1, keepdim=True) - mean.square()
    return (x - mean) / (variance + eps).sqrt()


def eps_as_least(x, eps):
    """The variance held at eps or more, in place of a sum."""
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / variance.clamp(min=eps).sqrt()


def layer_norm_as(x, eps, *, correction=0, outside=False, axis=-1, no_eps=False, power=0.5):
    """LayerNorm, and what becomes of it with one thing done otherwise."""
    axes = tuple(range(x.dim())) if axis is None else axis
    count = x.numel() if axis is None else x.shape[axis]
    centred = x - x.sum(axes, keepdim=True) / count
    variance = (centred ** 2).sum(axes, keepdim=True) / (count - correction)
    eps = 0 * eps if no_eps else eps
    return centred / (variance ** power + eps if outside else (variance + eps) ** power)


layer_norm = Exercise(
    reference=lambda x, eps: standardize(x, eps)[0],
    inputs=norm_inputs,
    misconceptions=[
        (partial(layer_norm_as, correction=1),
         "You divide the squares by n - 1, the sample variance (torch.var's default). LayerNorm divides them by n."),
        (partial(layer_norm_as, outside=True),
         "Your eps is outside the root. It belongs to the variance, before the root is taken."),
        (partial(layer_norm_as, axis=0),
         "You normalized along the first axis. Every row is normalized on its own: look at dim."),
        (partial(layer_norm_as, no_eps=True), "Your eps is missing: equal entries give 0/0 then."),
        (partial(layer_norm_as, axis=None),
         "You took mean and variance of the whole tensor. Every row has its own: give dim."),
        (partial(layer_norm_as, power=1.0), "You divide by the variance. LayerNorm divides by its root."),
        (lambda x, eps: layer_norm_as(x, eps, axis=1),
         "You normalized along axis 1, the last one of a matrix. Is it the last one of a batch of matrices?"),
        (eps_as_least,
         "You take the larger of the variance and eps. eps is added to the variance, however large that is."),
        (mean_of_squares,
         "E[x^2] - mean^2 is the variance on paper. In float32 two numbers near 10^8 have lost the digits of their "
         "difference: subtract the mean first, then square."),
    ], without=("layer_norm", "LayerNorm", "native_layer_norm", "group_norm", "instance_norm", "batch_norm"))


# 1.3  The largest entry -----------------------------------------------------------------------------------------------

largest = Exercise(
    reference=lambda n: math.sqrt(n - 1),
    inputs=lambda generator: ((f"n = {n}", n) for n in (1, 2, 5, 64, 768)),
    misconceptions=[
        (lambda n: math.sqrt(n), "sqrt(n) would need all other entries to be zero. But the entries have to add up to "
                                 "zero too, so the others cannot be."),
        (lambda n: (n - 1) / math.sqrt(n), "You used the sample variance. With the population variance, the squares of "
                                           "the result add up to n."),
        (lambda n: 1, "Variance 1 does not mean that no entry is above 1: one may be far out if the others are "
                      "close together."),
        (lambda n: n - 1, "That is the largest square of an entry: a root is missing."),
        (lambda n: math.inf, "When the variance is small, so is every x - mean: try one entry away from equal others."),
    ], tolerance=1e-4)


# 1.4  RMSNorm ---------------------------------------------------------------------------------------------------------

def rms_norm_as(x, eps, *, count=None, outside=False, axis=-1, no_eps=False, power=0.5, centred=False):
    """RMSNorm, and what becomes of it with one thing done otherwise."""
    axes = tuple(range(x.dim())) if axis is None else axis
    count = count or (x.numel() if axis is None else x.shape[axis])
    around = x - x.mean(-1, keepdim=True) if centred else x
    square = (around ** 2).sum(axes, keepdim=True) / count
    eps = 0 * eps if no_eps else eps
    return x / (square ** power + eps if outside else (square + eps) ** power)


def eps_as_least_square(x, eps):
    square = x.square().mean(-1, keepdim=True)
    return x / square.clamp(min=eps).sqrt()


rms_norm = Exercise(
    reference=lambda x, eps: x / ((x ** 2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt(),
    inputs=norm_inputs,
    misconceptions=[
        (partial(rms_norm_as, count=1),
         "You divide by the length, so the result has length 1. RMSNorm takes the mean square: length sqrt(n)."),
        (lambda x, eps: standardize(x, eps)[0], "That is LayerNorm. RMSNorm subtracts nothing."),
        (partial(rms_norm_as, centred=True),
         "You divide by the root of the variance, which has the mean taken out. RMSNorm knows no mean."),
        (partial(rms_norm_as, outside=True),
         "Your eps is outside the root. It belongs to the mean square, before the root is taken."),
        (partial(rms_norm_as, no_eps=True), "Your eps is missing: a row of zeros gives 0/0 then."),
        (partial(rms_norm_as, axis=None),
         "You took the mean square of the whole tensor. Every row has its own: give dim."),
        (partial(rms_norm_as, power=1.0), "You divide by the mean square. RMSNorm divides by its root."),
        (eps_as_least_square,
         "You take the larger of the mean square and eps. eps is added to the mean square, however large that is."),
    ], without=("rms_norm", "RMSNorm"))


# 1.5  The essay's blocks with RMSNorm between them --------------------------------------------------------------------

def rms_drifting(divisors, norm_first=False):
    """divisors(m, v) -> what divides the mean and what divides the variance of what the norm is given."""
    def drift(blocks, shift, scale, mean, variance):
        for _ in range(blocks):
            if not norm_first:
                mean, variance = mean + shift, variance * scale
            of_mean, of_variance = divisors(mean, variance)
            mean, variance = mean / of_mean, variance / of_variance
            if norm_first:
                mean, variance = mean + shift, variance * scale
        return mean, variance
    return drift


def of_rms(m, v):
    return math.sqrt(m * m + v), m * m + v


def rms_at_the_end(blocks, shift, scale, mean, variance):
    mean, variance = mean + blocks * shift, variance * scale ** blocks
    of_mean, of_variance = of_rms(mean, variance)
    return mean / of_mean, variance / of_variance


rms_drift = Exercise(
    reference=rms_drifting(of_rms),
    inputs=drift_inputs,
    misconceptions=[
        (rms_drifting(lambda m, v: (math.sqrt(v), v)),
         "You divide by the root of the variance. That is the root mean square only when the mean is 0."),
        (rms_drifting(lambda m, v: (math.sqrt(m * m + v), math.sqrt(m * m + v))),
         "When values are divided by r, their variance is divided by r squared."),
        (rms_drifting(lambda m, v: (math.sqrt(m * m + v), m * m / (m * m + v) + v)),
         "You changed the mean first and then used the new one for the variance. Both need the same mean square."),
        (rms_drifting(of_rms, norm_first=True), "The norm comes after the block, on what the block gives."),
        (rms_at_the_end, "You normalized once, at the end. The norm acts after every block."),
        (lambda *_: (0.0, 1.0), "That is what LayerNorm leaves. RMSNorm does not subtract the mean."),
    ], parts=("mean", "variance"))


# 1.6  Which parameters write into the residual stream -----------------------------------------------------------------

def writers(*modules):
    return lambda name: name.split(".")[-2] in modules


def parameter_names(generator):
    for name in ("wte.weight", "wpe.weight", "blocks.0.norm1.weight", "blocks.0.w_qkv.weight", "blocks.0.w_o.weight",
                 "blocks.0.w_o.bias", "blocks.5.norm2.bias", "blocks.5.w_up.weight", "blocks.5.w_down.weight",
                 "blocks.11.w_down.bias", "norm_f.weight", "lm_head.weight"):
        yield name, name


writes_to_stream = Exercise(
    reference=writers("wte", "wpe", "w_o", "w_down"),
    inputs=parameter_names,
    misconceptions=[
        (writers("w_o", "w_down"), "The stream begins somewhere: what is h before the first block?"),
        (writers("wte", "wpe"), "The embeddings begin the stream, but every block adds to it twice."),
        (writers("wte", "wpe", "w_o", "w_down", "w_qkv", "w_up"),
         "w_qkv and w_up read from the stream, through a norm. What they give stays inside the branch."),
        (writers("wte", "wpe", "w_o", "w_down", "lm_head"),
         "lm_head reads the last state of the stream, through norm_f; its output is the logits."),
        (writers("wte", "wpe", "w_o", "w_down", "norm1", "norm2", "norm_f"),
         "What a norm gives goes into a branch (norm_f's into the head). h itself goes on without it."),
        (writers("w_qkv", "w_up", "lm_head"),
         "Those are the matrices that read the stream. Asked for are those whose output is added to it, and "
         "what it begins with."),
        (writers("w_qkv", "w_o", "w_up", "w_down", "norm1", "norm2", "wte", "wpe"),
         "You take all of a block's parameters for writers. Only what the last map of a branch gives is added "
         "to h; what comes before it stays inside the branch."),
    ], about={
        "wte.weight": "The stream begins with something. wte gives a vector for each token: where does it go?",
        "wpe.weight": "Learned positions: look at what GPT.forward does with wpe before the first block.",
        "blocks.0.norm1.weight": "norm1: read the line in PreNormBlock that uses it. Is its output added to h?",
        "blocks.0.w_qkv.weight": "w_qkv gives queries, keys and values. What becomes of them before anything is added?",
        "blocks.0.w_o.weight": "w_o is the last map of the attention branch. What happens to its output?",
        "blocks.0.w_o.bias": "A bias goes where the output of its map goes: follow w_o's.",
        "blocks.5.norm2.bias": "norm2's bias is part of what norm2 gives. Is that added to h, or read by w_up?",
        "blocks.5.w_up.weight": "w_up gives the MLP's hidden units, more than there are channels. Can they be added?",
        "blocks.5.w_down.weight": "w_down is the last map of the MLP. What happens to its output?",
        "blocks.11.w_down.bias": "w_down's bias goes where w_down's output goes.",
        "norm_f.weight": "norm_f stands behind the last block. What reads its output?",
        "lm_head.weight": "lm_head gives a number for each token of the vocabulary: are those channels of the stream?",
    })


# 1.7  LayerNorm's Jacobian --------------------------------------------------------------------------------------------

def jacobian_as(x, eps, *, mean_term=True, y_term=True, y_over_n=True, y_over_root=True, over_root=True, correction=0,
                rms=False):
    y, root = rms_norm_as(x, eps), ((x ** 2).mean(-1, keepdim=True) + eps).sqrt()
    if not rms:
        y, root = standardize(x, eps, correction)
    n, yy = len(x), torch.outer(y, y) * (1 if y_over_root else root ** 2)
    mean_term = 0 if rms else mean_term
    J = torch.eye(n, dtype=x.dtype) - mean_term / n - y_term * yy / (n if y_over_n else 1)
    return J / root if over_root else J


def jacobian_with(x, eps, y):
    """The Jacobian with another y in its last term."""
    root = standardize(x, eps)[1]
    n = len(x)
    return (torch.eye(n, dtype=x.dtype) - 1 / n - torch.outer(y, y) / n) / root


def last_term_whole(x, eps):
    y, root = standardize(x, eps)
    n = len(x)
    return (torch.eye(n, dtype=x.dtype) - 1 / n) / root - torch.outer(y, y) / n


def jacobian_inputs(generator):
    yield "five entries", randn(generator, 5), 1e-5
    yield "a long vector", 30 * randn(generator, 8) + 100, 1e-5
    yield "two entries", randn(generator, 2), 1e-5
    yield "equal entries", torch.full((4,), 3.0, dtype=torch.float64), 1e-2
    yield "one entry", torch.ones(1, dtype=torch.float64), 1e-2
    yield "a large eps", randn(generator, 5), 1.0
    yield "entries near 0.000001", 1e-6 * randn(generator, 5), 1e-14         # no step of a difference quotient is small


jacobian = Exercise(
    reference=jacobian_as,
    inputs=jacobian_inputs,
    misconceptions=[
        (partial(jacobian_as, mean_term=False, y_term=False),
         "You treat mean and s as constants, but both depend on every entry of x: J is not diagonal."),
        (partial(jacobian_as, y_term=False), "You treat the root s as a constant, but s depends on every entry of x."),
        (partial(jacobian_as, mean_term=False),
         "You treat the mean as a constant, but it too changes when one entry of x does."),
        (partial(jacobian_as, y_over_n=False), "s is the root of a mean over n entries: its derivative carries a 1/n."),
        (partial(jacobian_as, y_over_root=False),
         "In the last term stands x - mean where y = (x - mean)/s belongs, twice."),
        (last_term_whole,
         "The last term is not divided by s as the others are. It has one more s than y twice brings."),
        (partial(jacobian_as, over_root=False), "The division by s itself is missing: y is (x - mean) over s."),
        (partial(jacobian_as, correction=1),
         "Your s has the sample variance, torch.var's default. LayerNorm's divides by n."),
        (partial(jacobian_as, rms=True), "That is RMSNorm's Jacobian: LayerNorm subtracts the mean first."),
        (lambda x, eps: jacobian_as(x, eps).diagonal().diag(),
         "Your diagonal is right. But every entry of y depends on every entry of x, through mean and s."),
        (lambda x, eps: jacobian_as(x, eps).diagonal(),
         "That is the diagonal. All n x n derivatives are asked for, and the others are not 0."),
        (lambda x, eps: jacobian_with(x, eps, standardize(x, 0 * eps)[0]),
         "The y of your last term was divided by a root without eps. It is LayerNorm's output, eps and all."),
        (partial(jacobian_as, y_term=-1), "A sign: when s grows, y shrinks. The term with y twice is taken away."),
        (partial(jacobian_as, mean_term=-1), "A sign: the mean is subtracted from x, and so is its derivative, 1/n."),
    ], without=AUTOGRAD)


# 1.8  LayerNorm's backward pass ---------------------------------------------------------------------------------------

def backward_as(g, x, weight, eps, *, use_weight=True, through_mean=True, through_root=True, over_root=True,
                y_for_weight=True, y_for_x=True, correction=0, row=torch.mean, down=torch.sum):
    y, root = standardize(x, eps, correction)
    u = g * weight if use_weight else g
    last = y if y_for_x else y * root
    dx = u - through_mean * row(u, -1, keepdim=True) - through_root * last * row(u * last, -1, keepdim=True)
    return dx / (root if over_root else 1), down(g * (y if y_for_weight else y * root), 0), down(g, 0)


def backward_with(g, x, weight, eps, mean_of, product_of):
    """The backward pass with other things in dx's two row means."""
    y, root = standardize(x, eps)
    mean = mean_of.mean(-1, keepdim=True)
    product = (product_of * y).mean(-1, keepdim=True)
    return (g * weight - mean - y * product) / root, (g * y).sum(0), g.sum(0)


def over_variance(g, x, weight, eps):
    dx, dweight, dbias = backward_as(g, x, weight, eps)
    return dx / standardize(x, eps)[1], dweight, dbias


def backward_inputs(generator):
    for label, x in (("four rows of five", 3 * randn(generator, 4, 5) + 1), ("a single row", randn(generator, 1, 6)),
                     ("a row of equal entries and another", torch.stack((torch.ones(4), torch.arange(4.0))).double()),
                     ("rows of one element", randn(generator, 3, 1))):
        yield label, randn(generator, *x.shape), x, 1 + 0.5 * randn(generator, x.shape[1]), 1e-3


layer_norm_backward = Exercise(
    reference=backward_as,
    inputs=backward_inputs,
    misconceptions=[
        (partial(backward_as, through_mean=False, through_root=False),
         "You treat mean and s as constants. They depend on x: two more terms, both means over the row."),
        (partial(backward_as, through_root=False),
         "You treat s as a constant, but it depends on x: y times a row mean is missing."),
        (partial(backward_as, through_mean=False),
         "You treat the mean as a constant, but it depends on x: a row mean is missing."),
        (partial(backward_as, use_weight=False),
         "On its way to x the gradient passes the gain: multiply g by weight first."),
        (lambda g, x, w, eps: (w * backward_as(g, x, torch.ones_like(w), eps)[0], *backward_as(g, x, w, eps)[1:]),
         "You multiply dx by weight at the end. The gain comes after the norm, so on the way back it comes first: the "
         "two row means are of g times weight."),
        (lambda g, x, w, eps: backward_with(g, x, w, eps, mean_of=g * w, product_of=g),
         "dx: in the mean that goes with y you have g without weight. Both row means are of g times weight."),
        (lambda g, x, w, eps: backward_with(g, x, w, eps, mean_of=g, product_of=g * w),
         "dx: the first row mean is of g without weight. Both row means are of g times weight."),
        (lambda g, x, w, eps: backward_with(g, x, w, eps, mean_of=g, product_of=g),
         "dx: only the first g is multiplied by weight. The two row means are of g times weight as well."),
        (lambda g, x, w, eps: (backward_as(g, x, w, eps)[0], (g * x).sum(0), g.sum(0)),
         "The gain is multiplied with the normalized x: its gradient sums g * y, not g * x."),
        (partial(backward_as, y_for_weight=False),
         "The gain is multiplied with y, not with x - mean: its gradient sums g * y."),
        (partial(backward_as, y_for_x=False),
         "In dx's last term stands x - mean where the normalized x belongs, twice."),
        (partial(backward_as, correction=1),
         "Your s comes from the sample variance, torch.var's default. LayerNorm divides by n."),
        (over_variance,
         "You divide dx by s squared. The forward pass divided by s once, and so does the way back."),
        (partial(backward_as, over_root=False), "dx is not divided by s: the forward pass was."),
        (partial(backward_as, row=torch.sum),
         "dx has two means over the row. You took sums: a 1/n is missing in both."),
        (partial(backward_as, down=torch.mean),
         "Gain and bias act on all rows: their gradients are sums over the rows, not means."),
        (partial(backward_as, through_root=-1),
         "A sign: the term with y and a row mean is taken away; a larger s makes every y smaller."),
        (partial(backward_as, through_mean=-1), "A sign: the row mean of u is taken away, not added."),
        (lambda g, x, w, eps: (backward_as(g, x, w, eps)[0], w * backward_as(g, x, w, eps)[1], g.sum(0)),
         "dweight: you sum g weight y. The output is linear in the gain, so its gradient has no gain in it."),
        (lambda g, x, w, eps: (*backward_as(g, x, w, eps)[:2], (g * w).sum(0)),
         "dbias: the bias is added behind the gain, so its gradient does not pass through weight."),
    ], parts=("dx", "dweight", "dbias"), without=AUTOGRAD + ("native_layer_norm_backward", "eye"))


# 1.9  Pre-LN and Post-LN ----------------------------------------------------------------------------------------------

def residual_inputs(generator):
    W, A = randn(generator, 6, 6), randn(generator, 4, 4)
    def rms(x):
        return x / x.square().mean(-1, keepdim=True).sqrt()
    def layer(x):
        return standardize(x, 1e-5)[0]
    yield "a linear branch and LayerNorm", 2 * randn(generator, 3, 6) + 1, lambda x: x @ W, layer
    yield "a tanh branch and RMSNorm", 2 * randn(generator, 2, 3, 4) + 1, lambda x: (x @ A).tanh(), rms
    yield "a branch that gives zeros", 5 * randn(generator, 2, 6), torch.zeros_like, layer
    yield "a norm that does nothing", randn(generator, 2, 6), lambda x: x @ W, lambda x: x


def one_after_the_other(h, branch, norm):
    before = h + branch(norm(h))
    return before, norm(before + branch(before))


residuals = Exercise(
    reference=lambda h, branch, norm: (h + branch(norm(h)), norm(h + branch(h))),
    inputs=residual_inputs,
    misconceptions=[
        (lambda h, branch, norm: (norm(h) + branch(norm(h)), norm(h + branch(h))),
         "Pre-LN adds to h itself, never to norm(h); else the stream would be normalized before every branch."),
        (lambda h, branch, norm: (h + norm(branch(h)), norm(h + branch(h))),
         "In Pre-LN the norm comes before the branch, on what the branch is given."),
        (lambda h, branch, norm: (h + branch(norm(h)), h + norm(branch(h))),
         "In Post-LN the norm comes after the addition, on the sum."),
        (lambda h, branch, norm: (h + branch(norm(h)), norm(h + branch(norm(h)))),
         "Post-LN has one norm a branch, after the sum; the branch is given h as it is."),
        (lambda h, branch, norm: (norm(h + branch(h)), h + branch(norm(h))),
         "You have both, in the other order: Pre-LN first."),
        (one_after_the_other,
         "Your Post-LN starts from what Pre-LN has made of h. Both start from the same h: is h written over?"),
        (lambda h, branch, norm: (norm(h) + branch(h), norm(h + branch(h))),
         "In Pre-LN the branch is given norm(h), and h goes on as it is. You have it the other way round."),
    ], parts=("Pre-LN", "Post-LN"))


# 1.10  How long the stream gets ---------------------------------------------------------------------------------------

stream_norms = Exercise(
    reference=lambda L: (math.sqrt(L), 2 ** ((L - 1) / 2)),
    inputs=lambda generator: ((f"{L} contribution{'s' * (L > 1)}", L) for L in (1, 2, 3, 12, 24)),
    misconceptions=[
        (lambda L: (L, 2 ** (L - 1)),
         "Those are the expected squares: is the root at the end missing? (Or did you add lengths? Of independent "
         "vectors it is the squares that add up, on average.)"),
        (lambda L: (L, 2 ** ((L - 1) / 2)), "The first is the expected square: its root is missing."),
        (lambda L: (math.sqrt(L), 2 ** (L / 2)),
         "The second is one doubling too far: the first contribution has length 1."),
        (lambda L: (math.sqrt(L), math.sqrt(1 + L * (L - 1) / 2)),
         "In the second you let contribution l + 1 have length sqrt(l). That is the stream's length under the first "
         "rule; under the second the stream is longer by then."),
        (lambda L: (math.sqrt(L), math.sqrt(L)),
         "Under the second rule the contributions are not of length 1: each doubles the stream's expected square."),
        (lambda L: (math.sqrt(L), 2 ** (L - 1)),
         "The second is the expected square, without its root. Independent directions add squares, not lengths."),
    ], parts=("rule a", "rule b"))


# 1.11  The skip path of Post-LN ---------------------------------------------------------------------------------------

def skip_inputs(generator):
    yield "different branches", torch.tensor([0.1, 2.0, 0.5, 1.0], dtype=torch.float64)
    yield "three sublayers of equal branch and stream", torch.ones(3, dtype=torch.float64)
    yield "branches that give nothing", torch.zeros(5, dtype=torch.float64)
    yield "a single sublayer", torch.tensor([3.0], dtype=torch.float64)


def backwards(factors):
    return factors.flip(0).cumprod(0).flip(0)


skip_gain = Exercise(
    reference=lambda r: backwards(1 / (1 + r ** 2).sqrt()),
    inputs=skip_inputs,
    misconceptions=[
        (lambda r: (1 / (1 + r ** 2).sqrt()).cumprod(0),
         "The gradient comes from the last sublayer: entry i has the factors of sublayer i and of all later ones."),
        (lambda r: backwards(1 / (1 + r ** 2).sqrt()) * (1 + r ** 2).sqrt(),
         "Entry i is the gradient at the input of sublayer i: sublayer i's own factor belongs to it."),
        (lambda r: backwards(1 / (1 + r)),
         "1 + r would be the length of the sum if branch and stream pointed the same way. Here the squares add."),
        (lambda r: backwards(1 / (1 + r ** 2)), "1 + r^2 is the sum's mean square; the norm divides by its root."),
        (lambda r: backwards((1 + r ** 2).sqrt()),
         "The norm divides by the length of the sum, forward and backward. You multiply by it."),
        (lambda r: 1 / (1 + r ** 2).sqrt(),
         "Those are the sublayers' own factors. On its way to the input of sublayer i the gradient passes more."),
        (lambda r: (1 / (1 + r ** 2).sqrt()).prod().expand(len(r)),
         "You give the product of all factors for each. At the input of a late sublayer the gradient has passed few."),
    ])


# What holds of every right answer: said where none of the known mistakes fits ----------------------------------------

def first_of(L, y):
    return L != 1 or near(y[0], 1) and near(y[1], 1)


def wide(x, eps):
    """Whether eps counts little beside the variance of each row."""
    return x.shape[-1] > 1 and x.var(-1).min() > 1000 * eps


PROPERTIES = {
    "1.1": [
        (lambda y, n, *_: n != 0 or near(y[0], _[2]) and near(y[1], _[3]),
         "After no block at all nothing has happened: mean and variance are those of the start."),
        (lambda y, n, shift, scale, mean, variance: scale != 1 or near(y[1], variance),
         "Blocks that only shift leave the variance as it is. Yours changes."),
        (lambda y, n, shift, scale, mean, variance: near(y[0], mean + n * shift),
         "Each block shifts the mean by the same amount, and nothing else happens to it."),
        (lambda y, n, shift, scale, mean, variance: n != 5 or y[1] > 2 * variance,
         "Five blocks multiply five times; in yours the variance grows by less.")],
    "1.2": [
        (lambda y, x, eps: near(y.mean(-1), 0), "The entries of each row should add up to 0. Yours do not."),
        (lambda y, x, eps: not wide(x, eps) or near(y.square().mean(-1), 1),
         "The mean square of each row should come out as 1, eps apart. Yours does not.")],
    "1.3": [
        (lambda y, n: n == 1 or y * y * n / (n - 1) <= n + 0.01,
         "Yours is too large: its square, and those of the entries that balance it, add up to more than n."),
        (lambda y, n: n == 1 or y * y * n / (n - 1) >= n - 0.01,
         "Take one entry away from equal others: it comes out larger than what you give."),
        (lambda y, n: n != 1 or near(y, 0), "A single channel minus its mean is 0.")],
    "1.4": [
        (lambda y, x, eps: near(y * x.norm(dim=-1, keepdim=True), x * y.norm(dim=-1, keepdim=True)),
         "A row should only be stretched. Yours points elsewhere: something is subtracted, or entries have factors of "
         "their own."),
        (lambda y, x, eps: x.square().mean(-1).min() < 1000 * eps or near(y.square().mean(-1), 1),
         "The mean square of each row should come out as 1, eps apart. Yours does not.")],
    "1.5": [
        (lambda y, n, *_: n != 0 or near(y[0], _[2]) and near(y[1], _[3]), "With no block there is no norm either."),
        (lambda y, n, *_: n == 0 or near(y[0] ** 2 + y[1], 1),
         "What leaves RMSNorm has mean square 1; mean^2 + variance of yours is not 1."),
        (lambda y, *_: False, "Write down mean and variance behind the first norm. The second block begins there.")],
    "1.7": [
        (lambda y, x, eps: near(y.sum(-1), 0),
         "A constant added to x changes nothing, so each row of J sums to 0. Yours do not."),
        (lambda y, x, eps: near(y, y.T), "J is symmetric; yours is not."),
        (lambda y, x, eps: x.var() < 1000 * eps or near(y @ (x - x.mean()), 0),
         "To stretch x around its mean changes nothing, eps apart: J times (x - mean) should be 0. Yours is not."),
        (lambda y, x, eps: False, "Two things to compare: the diagonal, entry by entry, and whether s divides every term.")],
    "1.8": [
        (lambda y, g, x, w, eps: y[1].shape == y[2].shape == w.shape,
         "dweight and dbias have an entry for each channel: which axis counts the rows?"),
        (lambda y, g, x, w, eps: near(y[0].sum(-1), 0),
         "dx: a constant added to a row of x changes nothing, so each row of dx sums to 0. Yours do not."),
        (lambda y, g, x, w, eps: not wide(x, eps) or near((y[0] * (x - x.mean(-1, keepdim=True))).mean(-1), 0, 0.01),
         "dx: to stretch a row around its mean changes nothing, eps apart, so dx times (x - mean) sums to 0. Yours "
         "does not."),
        (lambda y, g, x, w, eps: near(y[2], g.sum(0)), "dbias: the bias is added to each row. What does each row send?"),
        (lambda y, g, x, w, eps: len(x) > 1 or near((y[1] / y[2]).mean(), 0),
         "dweight: with one row, dweight over dbias is what the gain multiplies, which has mean 0. Yours has not.")],
    "1.9": [
        (lambda y, h, branch, norm: branch(h).any() or near(y[0], h),
         "With a branch that gives zeros, Pre-LN leaves h as it is."),
        (lambda y, h, branch, norm: near(norm(y[1]), y[1]),
         "What Post-LN gives has just left a norm, so that another norm changes nothing. In yours it does."),
        (lambda y, h, branch, norm: near(y[0] - h, branch(norm(h))),
         "Pre-LN: take h away from yours. What is left should be what the branch makes of a normalized h.")],
    "1.10": [
        (lambda y, L: first_of(L, y), "A single contribution has length 1 under both rules."),
        (lambda y, L: L != 2 or near(y[0], 2 ** 0.5) and near(y[1], 2 ** 0.5),
         "Two contributions of length 1 at right angles: by Pythagoras both rules give the same. Yours give something "
         "else."),
        (lambda y, L: near(y[0] ** 2, L), "Rule a: the square of the length grows by 1 with each contribution."),
        (lambda y, L: L != 3 or near(y[1] ** 2, 4), "Rule b: what does the third contribution do to the square?")],
    "1.11": [
        (lambda y, r: r.any() or near(y, 1), "Branches that give nothing leave the gradient as it is."),
        (lambda y, r: (y.diff() > -1e-6).all(),
         "The earlier a sublayer, the more factors below 1: yours do not fall towards the front."),
        (lambda y, r: near((y[-1] ** -2 - 1), r[-1] ** 2, 0.01),
         "The last entry has one factor, 1 over the length of stream and branch at right angles. Yours is another."),
        (lambda y, r: y.max() <= 1.001, "A norm of a sum makes the gradient on the skip path smaller, never larger."),
        (lambda y, r: len(r) < 2 or near((y[1] / y[0]) ** 2 - 1, r[0] ** 2, 0.01),
         "Entry 0 has one factor more than entry 1: sublayer 0's. In yours they differ by something else.")],
}


EXERCISES = {
    "1.1": drift, "1.2": layer_norm, "1.3": largest, "1.4": rms_norm, "1.5": rms_drift, "1.6": writes_to_stream,
    "1.7": jacobian, "1.8": layer_norm_backward, "1.9": residuals, "1.10": stream_norms, "1.11": skip_gain,
}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
