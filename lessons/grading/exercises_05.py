"""
Lesson 5, from nGPT to anGPT: factors that stand in for norms, and what is left of them.

Numbers and equations are those of the anGPT paper. See grader.py for the form.
"""
import math
from functools import partial

import torch

from answers import near
from grader import Exercise
from pieces import (
    NO_TOKEN, attend, block_inputs, every_nth_channel, heads_one_by_one, neighbouring_channels,
    never, randn, rope_tables, side_by_side, silu, turned, unit_rows)


# 5.1 Concentration --------------------------------------------------------------------------------

def projection_inputs(generator):
    yield "W (16, 8), X (5, 8)", randn(generator, 16, 8), randn(generator, 5, 8)
    yield "one row in W, one in X", randn(generator, 1, 6), randn(generator, 1, 6)
    yield "a square W", randn(generator, 7, 7), randn(generator, 3, 7)
    yield "entries near 1e6", 1e6 * randn(generator, 4, 9), 1e6 * randn(generator, 2, 9)
    differences = torch.eye(3, 5) - torch.eye(3, 5)[0]
    yield "a row of zeros in X", randn(generator, 4, 5), differences


def projected_norms(W, X):
    return (unit_rows(X) @ unit_rows(W).T).square().sum(-1).sqrt()


PROJECTION = Exercise(reference=projected_norms, inputs=projection_inputs, misconceptions={
    "You normalized the columns of W. A row is what one output takes its inner product with.":
        lambda W, X: (unit_rows(X) @ unit_rows(W.T)).norm(dim=-1),
    "The rows of X keep the lengths they came with: they are to be unit vectors too.":
        lambda W, X: (X @ unit_rows(W).T).norm(dim=-1),
    "X is normalized, W is not: its rows are to be unit vectors as well.":
        lambda W, X: (unit_rows(X) @ W.T).norm(dim=-1),
    "You divided W by one number, its norm as a whole. Each row has a length of its own.":
        lambda W, X: (unit_rows(X) @ (W / W.norm()).T).norm(dim=-1),
    "Nothing is normalized: both have rows that are to be unit vectors.":
        lambda W, X: (X @ W.T).norm(dim=-1),
})


# 5.2 Linear maps ----------------------------------------------------------------------------------

def linear_inputs(generator):
    yield "d = 256, 4 heads, 4-fold MLP", 256, 4, 4
    yield "d = 1024, 16 heads, 4-fold MLP", 1024, 16, 4
    yield "d = 768, one head, 3-fold MLP", 768, 1, 3
    yield "d = 96, 6 heads, an MLP as wide as the stream", 96, 6, 1


def linear_factors(d, n_head, mlp_ratio):
    d_head = d / n_head
    d_mlp = mlp_ratio * d
    nu_qkv = math.sqrt(d / d_head)
    nu_p = math.sqrt(d_head / d)
    nu_uz = math.sqrt(d / d_mlp)
    nu_d = math.sqrt(d_mlp / d)
    return [nu_qkv, nu_p, nu_uz, nu_d]


LINEAR_PARTS = ("nu_qkv", "nu_p", "nu_uz", "nu_d")
LINEAR = Exercise(
    reference=linear_factors, inputs=linear_inputs, parts=LINEAR_PARTS, misconceptions={
    "All four are upside down: these are the expected norms, nu is what brings them back to 1.":
        lambda right: [1 / nu for nu in right],
    "For attention you took a map from d to d. q, k and v belong to one head each: count the "
    "entries of one.":
        lambda nu_uz, nu_d: [1.0, 1.0, nu_uz, nu_d],
    "W_p keeps lengths, but its input is not a unit vector: how long are n_head unit "
    "vectors side by side?":
        lambda nu_qkv, nu_uz, nu_d: [nu_qkv, 1.0, nu_uz, nu_d],
    "W_uz has twice as many rows as u has entries: u and z are two vectors, each of unit length.":
        lambda nu_qkv, nu_p, nu_uz, nu_d: [nu_qkv, nu_p, nu_uz / math.sqrt(2), nu_d],
    "E||Wx||^2 = r/d is the expected square. nu belongs to the length: the roots are missing.":
        lambda right: [nu ** 2 for nu in right],
})


# 5.3 The residual step ----------------------------------------------------------------------------

def residual_inputs(generator):
    yield "steps of 0.05", torch.full((4,), 0.05)
    yield "a different step for each of 6 channels", torch.rand(6, generator=generator)
    yield "no step, and the whole way", torch.tensor([0.0, 1.0])
    yield "half the way", torch.tensor([0.5])


def nu_residual(alpha):
    squares = (1 - alpha) ** 2 + alpha ** 2
    return squares ** -0.5


def printed_nu(alpha):
    """The expected squared norm, as the paper prints it."""
    return 1 - 2 * alpha + 2 * alpha ** 2


RESIDUAL = Exercise(reference=nu_residual, inputs=residual_inputs, misconceptions={
    "This is the paper's printed line, the expected squared norm. What has to stand before a "
    "vector to undo it?":
        printed_nu,
    "1 - alpha and alpha add up to 1, but h and y stand at right angles: the sum is "
    "shorter than 1.":
        torch.ones_like,
    "You divide by the expected squared norm; a vector is divided by its norm.":
        lambda alpha: 1 / printed_nu(alpha),
    "This undoes the factor 1 - alpha on h. The other part, alpha y, has a length too.":
        lambda alpha: 1 / (1 - alpha),
    "This belongs to h + alpha y. The step is h + alpha (y - h): h keeps 1 - alpha of itself.":
        lambda alpha: (1 + alpha ** 2) ** -0.5,
})


# 5.4 The stream over many steps -------------------------------------------------------------------

def stream_inputs(generator):
    yield "24 steps of 0.05 without a factor", 0.05, 1.0, 24
    yield "24 steps of 0.05 with the printed factor", 0.05, 0.905, 24
    yield "8 steps of 0.3 with a factor of 1.3", 0.3, 1.3, 8
    yield "no steps at all", 0.2, 1.1, 0
    yield "a step that goes the whole way", 1.0, 1.0, 3


def stream_norms(alpha, nu, steps):
    squares = [1.0]
    for _ in range(steps):
        along = (1 - alpha) ** 2 * squares[-1]
        squares.append(nu ** 2 * (along + alpha ** 2))
    return torch.tensor(squares, dtype=torch.float64).sqrt()


def lengths_added(alpha, nu, steps):
    lengths = [1.0]
    for _ in range(steps):
        lengths.append(nu * ((1 - alpha) * lengths[-1] + alpha))
    return torch.tensor(lengths, dtype=torch.float64)


def powers(factor, steps):
    """1, factor, factor ** 2, ..., factor ** steps"""
    return factor ** torch.arange(steps + 1, dtype=torch.float64)


def last_nu_missing(alpha, nu, steps):
    lengths = stream_norms(alpha, nu, steps)
    lengths[1:] = lengths[1:] / nu
    return lengths


STREAM = Exercise(reference=stream_norms, inputs=stream_inputs, misconceptions={
    "You added lengths. Independent directions are orthogonal: their squares add.":
        lengths_added,
    "Only what is left of the old h is counted; the branch adds alpha of a unit vector.":
        lambda alpha, nu, steps: powers(nu * (1 - alpha), steps),
    "The factor nu stands around the whole sum, the last step's too: h is measured after it.":
        last_nu_missing,
    "1 - 2a + 2a^2 is for an h of length 1. Here h has the length n_k that the step before left.":
        lambda alpha, nu, steps: powers(nu * math.sqrt(printed_nu(alpha)), steps),
    "You multiply the square by nu: a factor nu on h is nu^2 on its square.":
        lambda alpha, nu, steps: stream_norms(alpha, nu ** 0.5, steps),
})


# 5.5 The gate -------------------------------------------------------------------------------------

def gate_inputs(generator):
    for sigma in (0.5, 1.0, 0.7, 3.0):
        yield f"sigma = {sigma}", sigma


def mean_of(f, sigma):
    """E f(t), t ~ N(0, sigma^2), as a weighted mean over a fine grid."""
    grid = torch.linspace(-10, 10, 20001, dtype=torch.float64)
    weight = torch.exp(-grid.square() / 2)
    return ((f(sigma * grid) * weight).sum() / weight.sum()).item()


def mean_square(f, sigma):
    return mean_of(lambda t: f(t) ** 2, sigma)


def nu_gate(sigma):
    return mean_square(silu, sigma) ** -0.5


def by_deviation(sigma):
    variance = mean_square(silu, sigma) - mean_of(silu, sigma) ** 2
    return variance ** -0.5


GATE = Exercise(reference=nu_gate, inputs=gate_inputs, tolerance=3e-3, misconceptions={
    "sigma is the standard deviation; you used it as the variance.":
        lambda sigma: nu_gate(sigma ** 0.5),
    "You squared the mean: what is wanted is the mean of the square, which is larger.":
        lambda sigma: 1 / abs(mean_of(silu, sigma)),
    "This is the factor of the sigmoid; SiLU(t) = t sigmoid(t).":
        lambda sigma: mean_square(torch.sigmoid, sigma) ** -0.5,
    "You took the standard deviation, which leaves the mean out. A length counts the mean too.":
        by_deviation,
    "You average sizes, E|f|. A length is made of squares: the root of E[f^2], which is larger.":
        lambda sigma: 1 / mean_of(lambda t: silu(t).abs(), sigma),
    "2 / sigma is for small sigma, where SiLU is the straight line t / 2. It bends.":
        lambda sigma: 2 / sigma,
})


# 5.6 Averaging in attention -----------------------------------------------------------------------

def weights_inputs(generator):
    later = torch.ones(5, 5).triu(1).bool()
    causal = randn(generator, 5, 5).masked_fill(later, -torch.inf)
    yield "causal weights of 5 tokens", causal.softmax(-1)
    so_far = torch.ones(6, 6).tril()
    yield "the same weight on every token so far", so_far / so_far.sum(-1, keepdim=True)
    yield "all weight on one token", torch.eye(4)
    yield "a single token", torch.ones(1, 1)
    yield "two heads", randn(generator, 2, 3, 7).softmax(-1)


def mixed_norms(A):
    return A.square().sum(-1).sqrt()


MIXING = Exercise(reference=mixed_norms, inputs=weights_inputs, misconceptions={
    "These are sums of weights, always 1: that would be the length if all values were "
    "the same vector.":
        lambda A: A.sum(-1),
    "You counted the tokens with any weight at all. That is right only when the "
    "weights are equal.":
        lambda A: (A > 0).sum(-1) ** -0.5,
    "You summed over the queries. An output is a row of A times the values.":
        lambda A: mixed_norms(A.mT),
    "This is the factor that would bring the output back to length 1. Its length is asked for.":
        lambda right: 1 / right,
    "That is right where all S weights are equal; yours does not look at the weights.":
        lambda A: torch.full(A.shape[:-1], A.shape[-1] ** -0.5),
})


# 5.7 Which factors count --------------------------------------------------------------------------

PLACES = ("q", "k", "v", "p", "u", "z", "acf", "d", "residual")


def place_inputs(generator):
    yield "the nine places",


def places(*names):
    """The answer that is True for these of the nine."""
    def changes_output():
        return [place in names for place in PLACES]
    return changes_output


PLACES_ABOUT = {
    0: "q: rope keeps its length's factor, and then comes unit(q).",
    1: "k: rope turns it, and then comes unit(k).",
    2: "v: A (c v) = c A v, W_p (c x) = c W_p x. What comes next?",
    3: "p: W_p's output goes into the residual step. What is the first thing that happens to it there?",
    4: "u: it enters the gated product linearly. Follow the product to the next norm.",
    5: "z: does SiLU(c z) equal c SiLU(z)?",
    6: "acf: it stands in front of the product, W_d is linear. What comes next?",
    7: "d: W_d's output goes into the residual step. What is the first thing that happens to it there?",
    8: "residual: h after the step is read by the next one as it is. Is there a norm on h itself?",
}

COUNTED = Exercise(
    reference=places("z", "residual"), inputs=place_inputs, about=PLACES_ABOUT, misconceptions={
    "q and k: a norm follows at once (Table 1), and g sets their scale. What is left of a factor "
    "before a norm?":
        places("q", "k", "z", "residual"),
    "u: the product u * SiLU(z) is linear in u. Where does the factor go from there?":
        places("u", "z", "residual"),
    "The MLP's output ends in norm(h_m). Which factors can be pulled out in front of the "
    "whole of W_d (...)?":
        places("u", "z", "acf", "d", "residual"),
    "Not all of them: what does a norm leave of a factor in front of it?":
        places(*PLACES),
    "One constant sits inside a function f with f(c z) different from c f(z).":
        places("residual"),
})


# 5.8 Folding --------------------------------------------------------------------------------------

def fold_inputs(generator):
    def weights(d):
        return randn(generator, 3 * d, d), randn(generator, 8 * d, d)

    yield "d = 8, 2 heads", *weights(8), 2 ** 0.5, 0.5, 8 ** 0.5
    yield "d = 6, 3 heads", *weights(6), 3 ** 0.5, 0.5, 6 ** 0.5
    yield "d = 1, one head", *weights(1), 1.0, 0.5, 1.0


def times(w_up, u=1.0, z=1.0):
    """w_up with the rows that make u times u, and those that make z times z."""
    half = len(w_up) // 2
    factors = w_up.new_ones(2 * half, 1)
    factors[:half] = u
    factors[half:] = z
    return w_up * factors


def fold_least(w_qkv, w_up, nu_qkv, nu_uz, sqrt_d):
    return w_qkv, times(w_up, z=nu_uz * sqrt_d)


def qkv_too(w_qkv, w_up, nu_qkv, nu_uz, sqrt_d):
    return w_qkv * nu_qkv, times(w_up, z=nu_uz * sqrt_d)


def qkv_and_u_too(w_qkv, w_up, nu_qkv, nu_uz, sqrt_d):
    return w_qkv * nu_qkv, times(w_up, u=nu_uz, z=nu_uz * sqrt_d)


FOLD = Exercise(reference=fold_least, inputs=fold_inputs, parts=("w_qkv", "w_up"), misconceptions={
    "You divide. The constants are set to 1, so the weights have to take them over: multiply.":
        lambda w_qkv, w_up, nu_uz, sqrt_d: (w_qkv, times(w_up, z=1 / (nu_uz * sqrt_d))),
    "u's rows come first in W_uz, then z's; the gate's argument is z.":
        lambda w_qkv, w_up, nu_uz, sqrt_d: (w_qkv, times(w_up, u=nu_uz * sqrt_d)),
    "The output is right, but u's rows need not change: norm(h_m) undoes a factor on u.":
        lambda w_qkv, w_up, nu_uz, sqrt_d: (w_qkv, times(w_up, u=nu_uz, z=nu_uz * sqrt_d)),
    "You scaled all of W_uz. The rows of u need nothing: norm(h_m) undoes a factor on u.":
        lambda w_qkv, w_up, nu_uz, sqrt_d: (w_qkv, w_up * nu_uz * sqrt_d),
    "The output is right, but w_qkv need not change: which norms follow q, k and v "
    "(exercise 5.7)?":
        qkv_too,
    "The output is right, but q, k, v and u need not change: a norm undoes each of these factors "
    "(exercise 5.7).":
        qkv_and_u_too,
})


# 5.9 Bounds ---------------------------------------------------------------------------------------

def bound_inputs(generator):
    W = randn(generator, 5, 4)
    yield "rows longer than 1", 3 * unit_rows(W)
    yield "rows shorter than 1", 0.3 * unit_rows(W)
    lengths = torch.tensor([5.0, 1.0, 0.2])
    yield "one row of length 5, one of 1, one of 0.2", lengths[:, None] * unit_rows(W[:3])
    yield "a row of zeros", torch.stack((torch.zeros(4), W[0]))
    yield "a single row", torch.tensor([[3.0, -4.0]])


def bound_rows(W):
    length = W.square().sum(-1, keepdim=True).sqrt()
    return W / length.clamp(min=1.0)


BOUND = Exercise(reference=bound_rows, inputs=bound_inputs, misconceptions={
    "This is nGPT's constraint: short rows are stretched. A bound leaves them alone.":
        unit_rows,
    "You bounded the columns. In y = W x a row is one neuron's weights.":
        lambda W: bound_rows(W.T).T,
    "You divide by the squared length: a row of length 5 gets length 0.2.":
        lambda W: W / W.square().sum(-1, keepdim=True).clamp(min=1),
    "You divide by the sum of the entries' sizes. A length is the root of the sum of "
    "their squares.":
        lambda W: W / W.abs().sum(-1, keepdim=True).clamp(min=1),
    "You divide all rows by the length of the longest, and so shorten some that may stay. Each "
    "row has its own.":
        lambda W: W / W.norm(dim=-1).max().clamp(min=1),
    "You bounded the matrix as a whole. Each row has a bound of its own.":
        lambda W: W / W.norm().clamp(min=1),
    "The other way round: long rows stay, short ones are stretched. Which lengths may "
    "be divided by?":
        lambda W: W / W.norm(dim=-1, keepdim=True).clamp(max=1),
    "You bounded each entry. A row of entries below 1 can be much longer than 1.":
        lambda W: W.clamp(-1, 1),
})


# 5.10 The riddle of Table F.1 ---------------------------------------------------------------------

def extra_inputs(generator):
    def table(*models):
        """A column for each of: what was printed, its last digit, what was counted, the layers."""
        return torch.tensor(models, dtype=torch.float64).unbind(1)

    yield "one model, printed to 0.01M", *table(
        (5.24e6, 1e4, 5_234_506, 10))
    yield "two models", *table(
        (62.24e6, 1e4, 62_234_506, 10),
        (247.17e6, 1e4, 247_164_690, 18))
    yield "three models, one printed coarsely", *table(
        (5.05e6, 1e4, 5_048_200, 6),
        (9.40e6, 1e4, 9_396_100, 12),
        (1.073e9, 1e6, 1_072_590_116, 36))
    yield "two models that no number of extras explains", *table(
        (32.11e6, 1e4, 32_114_304, 6),
        (62.33e6, 1e4, 62_318_976, 10))


def interval_of_each(printed, digit, counted, layers):
    lowest = (printed - digit / 2 - counted) / layers
    highest = (printed + digit / 2 - counted) / layers
    return lowest, highest


def extra_per_layer(printed, digit, counted, layers):
    lowest, highest = interval_of_each(printed, digit, counted, layers)
    return lowest.max(), highest.min()


def of_any_model(printed, digit, counted, layers):
    lowest, highest = interval_of_each(printed, digit, counted, layers)
    return lowest.min(), highest.max()


EXTRA = Exercise(
    reference=extra_per_layer, inputs=extra_inputs, parts=("lowest", "highest"), misconceptions={
    "Rounding moves a number by at most half of its last digit, not by a whole one.":
        lambda printed, digit, counted, layers: extra_per_layer(printed, 2 * digit, counted, layers),
    "This is what at least one model allows. The same number of extras has to fit all "
    "models at once.":
        of_any_model,
    "Your sign is reversed: what we did not count is the printed number less ours.":
        lambda printed, digit, counted, layers: extra_per_layer(counted, digit, printed, layers),
    "You cut the interval off at 0. It is asked for as it is, even where it begins below 0.":
        lambda lowest, highest: (lowest.clamp(min=0), highest),
    "You sorted the two. When no e fits, lowest comes out above highest: that is the finding.":
        lambda right: tuple(sorted(right)),
})


# 5.11 The block with what is left -----------------------------------------------------------------

def angpt_inputs(generator):
    def case(n_head, d, length, size=0.3):
        p = {
            "w_qkv": unit_rows(randn(generator, 3 * d, d)),
            "w_o": unit_rows(randn(generator, d, d)),
            "w_up": unit_rows(randn(generator, 8 * d, d)),
            "w_down": unit_rows(randn(generator, d, 4 * d)),
            "alpha_a": size * randn(generator, d),
            "alpha_m": size * randn(generator, d),
            "g": torch.tensor((d / n_head) ** 0.5 + 0.3),
        }
        lengths = torch.linspace(0.8, 1.4, length)
        h = lengths[:, None] * unit_rows(randn(generator, 2, length, d))
        return h, p, n_head, *rope_tables(length, d // n_head)

    yield from block_inputs(case)


def angpt_attention(h, p, n_head, cos, sin, *, scale=lambda g, d_k: g, hidden_from=1,
                    cut=neighbouring_channels, merged=side_by_side):
    """scale: the factor of the scores."""
    q, k, v = [cut(x, n_head) for x in (h @ p["w_qkv"].T).chunk(3, dim=-1)]
    q = unit_rows(turned(q, cos, sin))
    k = unit_rows(turned(k, cos, sin))
    y = attend(q, k, v, scale(p["g"], q.shape[-1]), hidden_from)
    return merged(y) @ p["w_o"].T


def angpt_mlp(h, p, factor, silu_of_u):
    u, z = (h @ p["w_up"].T).chunk(2, dim=-1)
    if silu_of_u:
        u, z = z, u
    return (u * silu(factor * z)) @ p["w_down"].T


def angpt_block(h, p, n_head, cos, sin, *, nu_uz=0.5, sqrt_d=True, silu_of_u=False, norm_h=False,
                norm_h_a=True, norm_h_m=True, absolute=True, nu=nu_residual, norm_after_step=False,
                parallel=False, **of_attention):
    """norm_h: the branches read a normalized h; parallel: the MLP reads the h that attention reads."""
    def read(h):
        return unit_rows(h) if norm_h else h

    def step(h, y, alpha, norm):
        if norm:
            y = unit_rows(y)
        if absolute:
            alpha = alpha.abs()
        h = nu(alpha) * (h + alpha * (y - h))
        return unit_rows(h) if norm_after_step else h

    y = angpt_attention(read(h), p, n_head, cos, sin, **of_attention)
    after = step(h, y, p["alpha_a"], norm_h_a)

    factor = nu_uz
    if sqrt_d:
        factor = factor * h.shape[-1] ** 0.5
    y = angpt_mlp(read(h if parallel else after), p, factor, silu_of_u)
    return step(after, y, p["alpha_m"], norm_h_m)


BLOCK = Exercise(reference=angpt_block, inputs=angpt_inputs, tolerance=1e-4, misconceptions={
    "A token attends to later ones: the mask is missing.":
        partial(angpt_block, hidden_from=NO_TOKEN),
    "The scores are divided by sqrt(d_k) as well: g, which starts at sqrt(d_k), is "
    "the whole factor.":
        partial(angpt_block, scale=lambda g, d_k: g / d_k ** 0.5),
    "g multiplies q and k both, so that it counts twice. q alone has it.":
        partial(angpt_block, scale=lambda g, d_k: g * g),
    "The gate's argument lacks nu_uz: of the constants that one counts (5.7).":
        partial(angpt_block, nu_uz=1.0),
    "The gate's argument lacks sqrt(d).":
        partial(angpt_block, sqrt_d=False),
    "The heads are put side by side in the wrong order: before (B, T, d), H and T have to "
    "change places again.":
        partial(angpt_block, merged=heads_one_by_one),
    "You normalize h before a branch, as Pre-LN does. anGPT's four norms stand on q, "
    "k, h_a and h_m.":
        partial(angpt_block, norm_h=True),
    "The MLP's output goes into its step without its norm.":
        partial(angpt_block, norm_h_m=False),
    "Attention's output goes into its step without its norm.":
        partial(angpt_block, norm_h_a=False),
    "A head has d_k neighbouring channels of q, k and v; yours has every n_head-th one.":
        partial(angpt_block, cut=every_nth_channel),
    "nu(alpha) is missing: h becomes shorter with each step.":
        partial(angpt_block, nu=lambda alpha: 1.0),
    "nu(alpha) is the printed expression, the expected squared norm: see exercise 5.3.":
        partial(angpt_block, nu=printed_nu),
    "You normalize h after a step, as nGPT does. anGPT has nu(alpha) there.":
        partial(angpt_block, norm_after_step=True),
    "A negative alpha walks away: the model takes its absolute value.":
        partial(angpt_block, absolute=False),
    "SiLU is applied to u. The first 4d rows of w_up are u's.":
        partial(angpt_block, silu_of_u=True),
    "The MLP reads the h from before attention's step. It comes after it.":
        partial(angpt_block, parallel=True),
})


# What holds of every right answer: said where none of the known mistakes fits ---------------------


def root_of_equal(y, A):
    last = A[..., -1, :]
    is_equal = near(last.std(correction=0), 0)
    return not is_equal or near(y[..., -1], A.shape[-1] ** -0.5)


PROPERTIES = {
    "5.1": {
        "There is one length for each row of X.":
            lambda y, X: y.shape == X.shape[:1],
        "Each entry of W x is a cosine of unit vectors, so no length is above sqrt(r). "
        "Some of yours are.":
            lambda y, W: (y <= len(W) ** 0.5 + 0.001).all(),
        "With one row in each, the length is the size of one cosine. Yours is another number.":
            lambda y, right, W: len(W) > 1 or near(y, right),
        "With one row in each yours is right: over which axis is the length taken?":
            never},
    "5.2": {
        "With one head, q, k, v and W_p go from d channels to d: nothing is to be "
        "undone in attention.":
            lambda y, n_head: n_head > 1 or near(y[0], 1) and near(y[1], 1),
        "With an MLP as wide as the stream, u, z and the way back have d channels: nothing is to "
        "be undone there.":
            lambda y, mlp_ratio: mlp_ratio > 1 or near(y[2], 1) and near(y[3], 1),
        "nu_qkv and nu_p: one goes to d/H channels a head, the other back from H such vectors. "
        "Together they change nothing; yours do.":
            lambda y: near(y[0] * y[1], 1),
        "nu_uz and nu_d: one widens, the other narrows by as much. Together they change "
        "nothing; yours do.":
            lambda y: near(y[2] * y[3], 1),
        "A map from n to r channels gives the length sqrt(r/n) on average: which n and r here?":
            never},
    "5.3": {
        "Each channel has a nu of its own, as it has an alpha.":
            lambda y, alpha: y.shape == alpha.shape,
        "With no step, or one that goes the whole way, h is a unit vector already: nothing "
        "is to be undone.":
            lambda y, right: not near(right, 1) or near(y, 1),
        "Half the way between two vectors at right angles the length is sqrt(1/2). Yours does not "
        "bring it to 1.":
            lambda y, alpha: not near(alpha, 0.5) or near(y * 0.5 ** 0.5, 1),
        "Two squares add up, that of what is left of h and that of what comes in.":
            never},
    "5.4": {
        "There is a length for the start, and one behind each step.":
            lambda y, steps: y.numel() == steps + 1,
        "The first length is that of the start, 1.":
            lambda y: near(y.flatten()[0], 1),
        "n_1: two sides at right angles, 1 - alpha and alpha long, and then the factor. "
        "Yours is another.":
            lambda y, right: len(right) == 1 or near(y[1], right[1]),
        "n_1 is right. For n_2 the side along h is as long as what n_1 leaves of it.":
            never},
    "5.5": {
        "SiLU(t) is about t / 2 for small t, and t or 0 for large ones: nu times sigma lies "
        "between sqrt(2) and 2. Yours does not. Has your t the deviation sigma, and if it is on a "
        "grid, does that reach several sigma?":
            lambda y, sigma: 1.4 < y * sigma < 2.01,
        "For a small sigma SiLU(t) is nearly t / 2, which makes nu nearly 2 / sigma. "
        "Yours is smaller.":
            lambda y, sigma: sigma > 0.6 or y * sigma > 1.7,
        "Is your grid wide enough, and fine enough, and weighted with the normal's density? Or, "
        "of random numbers, have you a million?":
            never},
    "5.6": {
        "There is one length for each row of A.":
            lambda y, A: y.shape == A.shape[:-1],
        "A mean of unit vectors is not longer than 1. Yours is.":
            lambda y: y.max() < 1.001,
        "With all weight on one token its vector comes out as it is: length 1.":
            lambda y, right: not near(right, 1) or near(y, 1),
        "Equal weights on S tokens give the length 1 / sqrt(S). Yours is another.":
            root_of_equal,
        "Weights that are not equal: the squares of which vectors add up?":
            never},
    "5.8": {
        "w_qkv: which norms follow q, k and v? See what 5.7 says of them.":
            lambda y, w_qkv: near(y[0], w_qkv),
        "The first half of w_up is u's. Is there a factor on u that counts in 5.7?":
            lambda y, w_up: near(y[1].chunk(2)[0], w_up.chunk(2)[0]),
        "The rows of z: all of what stands with z in SiLU's argument, and nothing else.":
            never},
    "5.9": {
        "Some of your rows are longer than 1.":
            lambda y: (y.norm(dim=-1) <= 1.001).all(),
        "Rows shorter than 1 should stay as they are.":
            lambda y, W: W.norm(dim=-1).max() > 1 or near(y, W),
        "What is too long should come out with the length 1, and with the direction it had.":
            never},
    "5.10": {
        "Two numbers are asked for: one interval for all models together.":
            lambda y: y[0].numel() == 1,
        "With one model the interval, over all layers, is as wide as one unit of the last "
        "digit. Yours is not.":
            lambda y, digit, layers: len(layers) > 1 or near((y[1] - y[0]) * layers, digit),
        "With one model the middle of the interval, over all layers, is what was printed less "
        "what was counted.":
            lambda y, right, layers: len(layers) > 1 or near(y[0] + y[1], right[0] + right[1]),
        "With one model yours is right. Which e lie in the intervals of all of them?":
            never},
    "5.11": {
        "With alpha_a of 0, where attention's step goes nowhere, yours is off: look at the MLP, "
        "u, z and its factor, SiLU and w_down, and at its norm and its step.":
            lambda y, right, p: p["alpha_a"].any() or near(y, right, 1e-4),
        "The MLP is right. With alpha_m of 0, where attention is alone, yours is off: look at q, "
        "k and v, rope, the norms and g, the mask, w_o, and at attention's norm and step.":
            lambda y, right, h, p: p["alpha_m"].any() or h.shape[1] == 1 or near(y, right, 1e-4),
        "Attention alone is right, and so is the MLP alone: does each step take its own alpha, "
        "and its own nu(alpha)?":
            never},
}


EXERCISES = {
    "5.1": PROJECTION,
    "5.2": LINEAR,
    "5.3": RESIDUAL,
    "5.4": STREAM,
    "5.5": GATE,
    "5.6": MIXING,
    "5.7": COUNTED,
    "5.8": FOLD,
    "5.9": BOUND,
    "5.10": EXTRA,
    "5.11": BLOCK,
}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
