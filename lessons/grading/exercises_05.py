"""
Lesson 5, from nGPT to anGPT: factors that replace norms, and what is left of them.

Numbers and equations are those of the anGPT paper. grader.py describes the form of this file.
"""
import math
from functools import partial

import torch

from answers import near
from grader import Exercise
from pieces import (
    NO_TOKEN, attend, block_inputs, every_nth_channel, heads_one_by_one, neighboring_channels,
    never, randn, rope_tables, side_by_side, silu, turned, unit_rows)


# 5.1 Concentration --------------------------------------------------------------------------------

def projection_inputs(generator):
    yield "W (16, 8), X (5, 8)", randn(generator, 16, 8), randn(generator, 5, 8)
    yield "one row in W, one in X", randn(generator, 1, 6), randn(generator, 1, 6)
    yield "a square W", randn(generator, 7, 7), randn(generator, 3, 7)
    yield "entries near 1e6", 1e6 * randn(generator, 4, 9), 1e6 * randn(generator, 2, 9)
    differences = torch.eye(3, 5) - torch.eye(3, 5)[0]
    yield "a row of zeros in X", randn(generator, 4, 5), differences
    yield "short rows in X", randn(generator, 4, 6), 0.1 * randn(generator, 3, 6)


def projected_norms(W, X):
    return (unit_rows(X) @ unit_rows(W).T).square().sum(-1).sqrt()


PROJECTION = Exercise(reference=projected_norms, inputs=projection_inputs, misconceptions={
    "You normalized the columns of W. Each output is the inner product of x with a row.":
        lambda W, X: (unit_rows(X) @ unit_rows(W.T)).norm(dim=-1),
    "In yours the rows of X keep their lengths. They should become unit vectors, too.":
        lambda W, X: (X @ unit_rows(W).T).norm(dim=-1),
    "Rows of X that are shorter than 1 stay short in yours. They should become unit vectors, too.":
        lambda W, X: projected_norms(W, X) * X.norm(dim=-1).clamp(max=1),
    "In yours the rows of W keep their lengths. They should become unit vectors, too.":
        lambda W, X: (unit_rows(X) @ W.T).norm(dim=-1),
    "You divided W by one number, its norm as a whole. Divide each row by its own length.":
        lambda W, X: (unit_rows(X) @ (W / W.norm()).T).norm(dim=-1),
    "You divided W and X by one number each, their norms as a whole. Divide each row by its own "
    "length.":
        lambda W, X: (X / X.norm() @ (W / W.norm()).T).norm(dim=-1),
    "These are the lengths without any norm: the rows of both should be unit vectors. (unit "
    "returns a new tensor.)":
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
    "All four are upside down: these are the expected norms, and nu brings them back to 1.":
        lambda right: [1 / nu for nu in right],
    "W_p keeps lengths, but its input is not a unit vector: how long are n_head unit "
    "vectors side by side?":
        lambda nu_qkv, nu_uz, nu_d: [nu_qkv, 1.0, nu_uz, nu_d],
    "1 belongs to a map from d to d that gets a unit vector. But each head has its own q, k and v: "
    "count the entries of one of them. And how long is the input of W_p?":
        lambda nu_uz, nu_d: [1.0, 1.0, nu_uz, nu_d],
    "nu_uz is too small by a factor of sqrt(2): do you count u and z as one vector? They are two, "
    "each of unit length.":
        lambda nu_qkv, nu_p, nu_uz, nu_d: [nu_qkv, nu_p, nu_uz / math.sqrt(2), nu_d],
    "E||Wx||^2 = r/d is the expected square. nu belongs to the length, so take the root.":
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
    """Return the expected squared norm, which the paper prints."""
    return 1 - 2 * alpha + 2 * alpha ** 2


RESIDUAL = Exercise(reference=nu_residual, inputs=residual_inputs, misconceptions={
    "This is the paper's printed line, the expected squared norm. Which factor on a vector brings "
    "its length back to 1?":
        printed_nu,
    "Yours is always 1, as if lengths added up. 1 - alpha and alpha do, but h and y are at right "
    "angles: their sum is shorter than 1.":
        torch.ones_like,
    "You divide by the expected squared norm. A vector is divided by its norm.":
        lambda alpha: 1 / printed_nu(alpha),
    "You average over the channels. Each channel has a step of its own, and a nu of its own.":
        lambda alpha: (printed_nu(alpha).mean() ** -0.5).expand(alpha.shape),
    "This only undoes the factor 1 - alpha on h. The other part, alpha y, has a length, too.":
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
    yield "steps that go nowhere", 0.0, 1.0, 4


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
    "In yours lengths add up, as if h and y had the same direction. Independent directions are "
    "orthogonal: their squares add.":
        lengths_added,
    "You count only what is left of the old h. The branch adds alpha times a unit vector.":
        lambda alpha, nu, steps: powers(nu * (1 - alpha), steps),
    "Each of your lengths lacks the nu of the last step before it: h is measured after it.":
        last_nu_missing,
    "In yours every step multiplies the length by nu sqrt(1 - 2a + 2a^2). That holds for an h of "
    "length 1. Here h has the length n_k: which of the two squares does it belong to?":
        lambda alpha, nu, steps: powers(nu * math.sqrt(printed_nu(alpha)), steps),
    "In yours the square is multiplied by nu. A factor nu on h is a factor nu^2 on its square.":
        lambda alpha, nu, steps: stream_norms(alpha, nu ** 0.5, steps),
})


# 5.5 The gate -------------------------------------------------------------------------------------

def gate_inputs(generator):
    for sigma in (0.5, 1.0, 0.7, 3.0):
        yield f"sigma = {sigma}", sigma


def mean_of(f, sigma):
    """Return E f(t) for t ~ N(0, sigma^2), as a weighted mean over a fine grid."""
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
    "The argument of your SiLU has the standard deviation sigma^2: sigma is in it twice.":
        lambda sigma: nu_gate(sigma ** 2),
    "You used sigma as the variance. It is the standard deviation.":
        lambda sigma: nu_gate(sigma ** 0.5),
    "You use the mean of SiLU(t). A length is made of squares: take the mean of the square.":
        lambda sigma: 1 / abs(mean_of(silu, sigma)),
    "This is the factor of the sigmoid; SiLU(t) = t sigmoid(t).":
        lambda sigma: mean_square(torch.sigmoid, sigma) ** -0.5,
    "You took the standard deviation, which ignores the mean. The mean is part of a length, too.":
        by_deviation,
    "You average absolute values. A length is made of squares: take the root of E[f^2].":
        lambda sigma: 1 / mean_of(lambda t: silu(t).abs(), sigma),
    "You divide by the mean square. A vector is divided by its length, the root of it.":
        lambda sigma: 1 / mean_square(silu, sigma),
    "All points count alike in yours. Weight each of them with the normal density.":
        lambda sigma: silu(sigma * torch.linspace(-8, 8, 4001)).square().mean() ** -0.5,
    "2 / sigma holds for small sigma, where SiLU is the straight line t / 2. Here it bends.":
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
    "Yours is always 1, as if all values were the same vector. Do you add the weights, or "
    "normalize a row first?":
        lambda A: A.sum(-1),
    "You counted the tokens that have any weight at all. That is right only where the weights are "
    "equal.":
        lambda A: (A > 0).sum(-1) ** -0.5,
    "You leave out the weights above the diagonal. But A need not be causal, nor square.":
        lambda A: mixed_norms(A.tril()),
    "You summed over the queries. An output is made with one row of A, so sum over a row.":
        lambda A: mixed_norms(A.mT),
    "This is the factor that would bring the output back to length 1. Return its length.":
        lambda right: 1 / right,
    "Yours does not depend on the weights. It is right only where all S weights are equal.":
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
    0: "q: rope only turns q, and then comes unit(q). What does that leave of a factor?",
    1: "k: rope only turns k, and then comes unit(k). What does that leave of a factor?",
    2: "v: A (c v) = c A v and W_p (c x) = c W_p x. Which operation comes next?",
    3: "p: W_p's output enters the residual step. What is the first thing that happens to it "
       "there?",
    4: "u: the gated product is linear in u. Follow the product to the next norm.",
    5: "z: does SiLU(c z) equal c SiLU(z)?",
    6: "acf: it multiplies the whole product, and W_d is linear. Which operation comes next?",
    7: "d: W_d's output enters the residual step. What is the first thing that happens to it "
       "there?",
    8: "residual: the next step reads h as it is. Is there a norm on h itself?",
}

COUNTED = Exercise(
    reference=places("z", "residual"), inputs=place_inputs, about=PLACES_ABOUT, misconceptions={
    "q and k: rope only turns them, then comes a norm (Table 1). What does a norm leave of a "
    "factor in front of it?":
        places("q", "k", "z", "residual"),
    "u: the product u * SiLU(z) is linear in u. Where does the factor go from there?":
        places("u", "z", "residual"),
    "The MLP's output enters norm(h_m). Which factors can be pulled out in front of all of "
    "W_d (...)?":
        places("u", "z", "acf", "d", "residual"),
    "u and acf: the gated product is linear in u, and acf multiplies all of it. W_d is linear, "
    "too. Which operation comes next?":
        places("u", "z", "acf", "residual"),
    "acf and d: follow W_d's input and output. W_d is linear. Which operation comes next?":
        places("z", "acf", "d", "residual"),
    "p and d: both branches end in the residual step. What is the first thing that happens to them "
    "there?":
        places("p", "z", "d", "residual"),
    "v and p: A (c v) = c A v and W_p (c x) = c W_p x. Which operation comes next?":
        places("v", "p", "z", "residual"),
    "z and residual: does SiLU(c z) equal c SiLU(z)? And is there a norm on h itself, after a "
    "step?":
        places(),
    "You say that all of them matter. What does a norm leave of a factor in front of it?":
        places(*PLACES),
    "You found one of two. Another factor is inside a function f for which f(c z) is not c f(z).":
        places("residual"),
})


# 5.8 Folding --------------------------------------------------------------------------------------

def fold_inputs(generator):
    def weights(d):
        return randn(generator, 3 * d, d), randn(generator, 8 * d, d)

    yield "d = 8, 2 heads", *weights(8), 2 ** 0.5, 0.5, 8 ** 0.5
    yield "d = 6, 3 heads", *weights(6), 3 ** 0.5, 0.7, 6 ** 0.5
    yield "d = 1, one head", *weights(1), 1.0, 0.5, 1.0


def times(w_up, u=1.0, z=1.0):
    """Return w_up with its rows for u multiplied by the number u, and those for z by z."""
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
    "sqrt_d is the root of d already. You take the root of it.":
        lambda w_qkv, w_up, nu_uz, sqrt_d: (w_qkv, times(w_up, z=nu_uz * sqrt_d ** 0.5)),
    "You divide. The constants become 1, so the weights must take them over: multiply.":
        lambda w_qkv, w_up, nu_uz, sqrt_d: (w_qkv, times(w_up, z=1 / (nu_uz * sqrt_d))),
    "You changed u's rows. They come first in w_up, then z's, and the gate's argument is z.":
        lambda w_qkv, w_up, nu_uz, sqrt_d: (w_qkv, times(w_up, u=nu_uz * sqrt_d)),
    "You return z's rows before u's. In w_up u's come first.":
        lambda w_qkv, w_up, nu_uz, sqrt_d: (
            w_qkv, times(w_up, z=nu_uz * sqrt_d).roll(len(w_up) // 2, 0)),
    "The block's output is right, but u's rows need no change: norm(h_m) undoes a factor on u.":
        lambda w_qkv, w_up, nu_uz, sqrt_d: (w_qkv, times(w_up, u=nu_uz, z=nu_uz * sqrt_d)),
    "You scaled all of w_up. The rows of u need no change: norm(h_m) undoes a factor on u.":
        lambda w_qkv, w_up, nu_uz, sqrt_d: (w_qkv, w_up * nu_uz * sqrt_d),
    "The block's output is right, but w_qkv needs no change: which norms follow q, k and v "
    "(exercise 5.7)?":
        qkv_too,
    "The block's output is right, but q, k, v and u need no change: a norm undoes each of these "
    "factors (exercise 5.7).":
        qkv_and_u_too,
})


# 5.9 Bounds ---------------------------------------------------------------------------------------

def bound_inputs(generator):
    W = randn(generator, 5, 4)
    lengths = torch.tensor([3.0, 1.5, 4.0, 2.0, 1.2])
    yield "rows longer than 1", lengths[:, None] * unit_rows(W)
    yield "rows shorter than 1", 0.3 * unit_rows(W)
    lengths = torch.tensor([5.0, 1.0, 0.2])
    yield "one row of length 5, one of 1, one of 0.2", lengths[:, None] * unit_rows(W[:3])
    yield "a row of zeros", torch.stack((torch.zeros(4), W[0]))
    yield "a row longer than 1 whose entries are below 1", torch.full((1, 4), 0.8)
    yield "a single row", torch.tensor([[3.0, -4.0]])


def bound_rows(W):
    length = W.square().sum(-1, keepdim=True).sqrt()
    return W / length.clamp(min=1.0)


BOUND = Exercise(reference=bound_rows, inputs=bound_inputs, misconceptions={
    "This is nGPT's constraint, which stretches short rows. A bound leaves them alone.":
        unit_rows,
    "You bounded the columns. In y = W x the weights of one neuron are a row.":
        lambda W: bound_rows(W.T).T,
    "You divide by the squared length: a row of length 5 gets length 0.2.":
        lambda W: W / W.square().sum(-1, keepdim=True).clamp(min=1),
    "You bound the root mean square of each row. Its length is sqrt(d) times as large.":
        lambda W: W / W.square().mean(-1, keepdim=True).sqrt().clamp(min=1),
    "You divide by the sum of absolute values. A length is the root of the sum of squares.":
        lambda W: W / W.abs().sum(-1, keepdim=True).clamp(min=1),
    "You divide all rows by the length of the longest one, and so shorten some that should stay. "
    "Divide only rows longer than 1, each by its own length.":
        lambda W: W / W.norm(dim=-1).max().clamp(min=1),
    "You bounded the matrix as a whole. Each row has a bound of its own.":
        lambda W: W / W.norm().clamp(min=1),
    "It is the other way round: yours leaves long rows alone and stretches short ones.":
        lambda W: W / W.norm(dim=-1, keepdim=True).clamp(max=1),
    "You bounded each entry. A row of entries below 1 can be much longer than 1.":
        lambda W: W.clamp(-1, 1),
})


# 5.10 The riddle of Table F.1 ---------------------------------------------------------------------

def extra_inputs(generator):
    def table(*models):
        """Return four columns: the printed counts, their last digits, our counts, the layers."""
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
    yield "two models, the first printed coarsely", *table(
        (1.073e9, 1e6, 1_072_590_116, 36),
        (9.40e6, 1e4, 9_396_100, 12))
    yield "a deep model with the largest difference", *table(
        (20.00e6, 1e4, 19_988_000, 4),
        (90.00e6, 1e4, 89_930_000, 30))


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


def compared_before_division(printed, digit, counted, layers):
    low = printed - digit / 2 - counted
    high = printed + digit / 2 - counted
    i, j = low.argmax(), high.argmin()
    return low[i] / layers[i], high[j] / layers[j]


EXTRA = Exercise(
    reference=extra_per_layer, inputs=extra_inputs, parts=("lowest", "highest"), misconceptions={
    "Rounding changes a number by at most half a unit of its last digit, up or down.":
        lambda printed, digit, counted, layers: extra_per_layer(
            printed, 2 * digit, counted, layers),
    "You use the last digit of the first model for all of them. Each model has its own.":
        lambda printed, digit, counted, layers: extra_per_layer(printed, digit[0], counted, layers),
    "You compare the models before you divide by their layers. Divide first: e is a number per "
    "layer.":
        compared_before_division,
    "Yours is the range of e that at least one model allows. The same e must fit all models.":
        of_any_model,
    "Your sign is reversed: what we did not count is the printed number minus ours.":
        lambda printed, digit, counted, layers: extra_per_layer(counted, digit, printed, layers),
    "Your interval never begins below 0: do you cut it off, or start a search from 0? Return it as "
    "it is, even where it begins below 0.":
        lambda lowest, highest: (lowest.clamp(min=0), highest),
    "The two are sorted in yours. Where no e fits, lowest comes out above highest: that is the "
    "finding.":
        lambda right: tuple(sorted(right)),
    "Yours is NaN where no e fits. Return the two all the same: lowest above highest is the "
    "finding.":
        lambda right: right if right[0] <= right[1] else (math.nan, math.nan),
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
    h, p, *others = case(2, 4, 3)
    yield "a negative g", h, {**p, "g": -p["g"]}, *others


def angpt_attention(h, p, n_head, cos, sin, *, scale=lambda g, d_k: g, hidden_from=1,
                    cut=neighboring_channels, merged=side_by_side, norm_of_all_heads=False):
    """scale: the factor of the scores. norm_of_all_heads: q and k are unit vectors of d entries."""
    q, k, v = (h @ p["w_qkv"].T).chunk(3, dim=-1)
    if norm_of_all_heads:
        q, k = unit_rows(q), unit_rows(k)
    q, k, v = cut(q, n_head), cut(k, n_head), cut(v, n_head)
    q = turned(q, cos, sin)
    k = turned(k, cos, sin)
    if not norm_of_all_heads:
        q, k = unit_rows(q), unit_rows(k)
    y = attend(q, k, v, scale(p["g"], q.shape[-1]), hidden_from)
    return merged(y) @ p["w_o"].T


def angpt_mlp(h, p, factor, silu_of_u):
    u, z = (h @ p["w_up"].T).chunk(2, dim=-1)
    if silu_of_u:
        u, z = z, u
    return (u * silu(factor * z)) @ p["w_down"].T


def angpt_block(h, p, n_head, cos, sin, *, nu_uz=0.5, gate_width=lambda d, d_k: d, silu_of_u=False,
                norm_h=False, norm_h_a=True, norm_h_m=True, absolute=True, nu=nu_residual,
                nu_of_h_only=False, norm_after_step=False, parallel=False, old_in_step="",
                exchanged=False, nu_of_signed_alpha=False, one_nu=False, **of_attention):
    """Return the next h, or a wrong one.

    gate_width: what the root in the gate's argument is taken of. nu_of_h_only: nu(alpha) multiplies
    h, and not the whole step. one_nu: the MLP's step has the nu of attention's alpha.
    norm_h: the branches read a normalized h. parallel: the MLP reads the h that attention reads.
    old_in_step: where the MLP's step has the h from before attention, "everywhere" or in the
    "difference" h_m - h. exchanged: each step takes the other one's alpha.
    """
    def read(h):
        return unit_rows(h) if norm_h else h

    def step(h, y, alpha, alpha_of_nu, norm, subtracted):
        if norm:
            y = unit_rows(y)
        if absolute:
            alpha = alpha.abs()
        if absolute and not nu_of_signed_alpha:
            alpha_of_nu = alpha_of_nu.abs()
        factor = nu(alpha_of_nu)
        if nu_of_h_only:
            h = factor * h + alpha * (y - subtracted)
        else:
            h = factor * (h + alpha * (y - subtracted))
        return unit_rows(h) if norm_after_step else h

    alpha_a, alpha_m = p["alpha_a"], p["alpha_m"]
    if exchanged:
        alpha_a, alpha_m = alpha_m, alpha_a

    y = angpt_attention(read(h), p, n_head, cos, sin, **of_attention)
    after = step(h, y, alpha_a, alpha_a, norm_h_a, h)

    d = h.shape[-1]
    factor = nu_uz * gate_width(d, d // n_head) ** 0.5
    y = angpt_mlp(read(h if parallel else after), p, factor, silu_of_u)
    start = h if old_in_step == "everywhere" else after
    subtracted = h if old_in_step else after
    return step(start, y, alpha_m, alpha_a if one_nu else alpha_m, norm_h_m, subtracted)


BLOCK = Exercise(reference=angpt_block, inputs=angpt_inputs, tolerance=1e-4, misconceptions={
    "In yours a token attends to all later ones: is there a mask, and do you use its result?":
        partial(angpt_block, hidden_from=NO_TOKEN),
    "The scores are divided by sqrt(d_k) as well, by you or by scaled_dot_product_attention. g, "
    "which starts at sqrt(d_k), is the whole factor.":
        partial(angpt_block, scale=lambda g, d_k: g / d_k ** 0.5),
    "g counts twice in your scores, as if both q and k had it. Multiply q only, and once.":
        partial(angpt_block, scale=lambda g, d_k: g * g),
    "You take the absolute value of g, too. Only the two alphas lose their sign.":
        partial(angpt_block, scale=lambda g, d_k: abs(g)),
    "In the gate's argument a factor of 1/2 is missing. Is nu_uz, the one constant that matters "
    "(5.7), inside of SiLU, and is the root that of d, the channels of h?":
        partial(angpt_block, nu_uz=1.0),
    "In the gate's argument sqrt(d) is missing: is it inside of SiLU?":
        partial(angpt_block, gate_width=lambda d, d_k: 1),
    "The gate's argument has the root of d_k, the channels of one head. It should be that of d, "
    "the channels of h.":
        partial(angpt_block, gate_width=lambda d, d_k: d_k),
    "You normalize q and k over the channels of all heads. Cut them into heads first: each head's "
    "q and k is a unit vector.":
        partial(angpt_block, norm_of_all_heads=True),
    "nu gets alpha with its sign. Give it the absolute value, as the step has it.":
        partial(angpt_block, nu_of_signed_alpha=True),
    "The MLP's step has the nu of attention's alpha. It should have that of its own.":
        partial(angpt_block, one_nu=True),
    "nu(alpha) multiplies only h in yours. It should multiply the whole step, h + alpha (y - h).":
        partial(angpt_block, nu_of_h_only=True),
    "You put the heads side by side in the wrong order: transpose H and T back before you make "
    "(B, T, d).":
        partial(angpt_block, merged=heads_one_by_one),
    "You normalize h before each branch, as Pre-LN does. anGPT normalizes q, k, h_a and h_m.":
        partial(angpt_block, norm_h=True),
    "The MLP's output enters its step without a norm.":
        partial(angpt_block, norm_h_m=False),
    "Attention's output enters its step without a norm.":
        partial(angpt_block, norm_h_a=False),
    "A head takes d_k neighboring channels of q, k and v. Yours takes every n_head-th one.":
        partial(angpt_block, cut=every_nth_channel),
    "nu(alpha) is missing. Without it, or a norm, h would become shorter with each step.":
        partial(angpt_block, nu=lambda alpha: 1.0),
    "nu(alpha) is the printed expression, the expected squared norm: see exercise 5.3.":
        partial(angpt_block, nu=printed_nu),
    "You normalize h after a step, as nGPT does. anGPT only multiplies by nu(alpha).":
        partial(angpt_block, norm_after_step=True),
    "You use alpha with its sign. The model takes its absolute value.":
        partial(angpt_block, absolute=False),
    "You apply SiLU to u. The first 4d rows of w_up belong to u, the others to z.":
        partial(angpt_block, silu_of_u=True),
    "The MLP reads the h from before attention's step. It should read the h after it.":
        partial(angpt_block, parallel=True),
    "The MLP's step starts from the h before attention's step, so attention's result is lost.":
        partial(angpt_block, old_in_step="everywhere"),
    "In the MLP's step, the h that you subtract from h_m is the one from before attention's step.":
        partial(angpt_block, old_in_step="difference"),
    "You exchanged alpha_a and alpha_m.":
        partial(angpt_block, exchanged=True),
})


# Properties of every right answer. The grader uses them where no known mistake fits. --------------


def short_rows_stay(y, W):
    is_short = W.norm(dim=-1) < 1
    return near(y[is_short], W[is_short])


def off_by_more_than_float32(y, right, printed, layers):
    """Return True if y is right, or further off than float32 makes a count."""
    if near(y[0], right[0], 1e-5) and near(y[1], right[1], 1e-5):
        return True
    gap = max((ours - theirs).abs() for ours, theirs in zip(y, right))
    return gap > 2 ** -22 * printed.max() / layers.min()


def root_of_equal(y, A):
    """Return True if y is right in the rows of A whose weights are 0 or all the same."""
    count = (A > 0).sum(-1)
    is_equal = (A.amax(-1) * count - 1).abs() < 1e-5
    return near(y[is_equal], count[is_equal] ** -0.5)


PROPERTIES = {
    "5.1": {
        "The answer has one length for each row of X.":
            lambda y, X: y.shape == X.shape[:1],
        "Each entry of W x is a cosine of unit vectors, so no length is above sqrt(r). "
        "Some of yours are: is each row divided by its own length, and is a length the root of a "
        "sum of squares?":
            lambda y, W: (y <= len(W) ** 0.5 + 0.001).all(),
        "With one row in each, the length is the absolute value of the cosine of these two rows as "
        "given. Yours is another number.":
            lambda y, right, W: len(W) > 1 or near(y, right, 1e-5),
        "A row of zeros in X should give length 0.":
            lambda y, X: near(y[X.norm(dim=-1) == 0], 0),
        "With one row in each, yours is right. Do you divide each row of X and of W by its own "
        "length, and how and over which axis do you take the length of the result?":
            never},
    "5.2": {
        "With one head, q, k, v and W_p map d channels to d, so both factors of attention are 1.":
            lambda y, n_head: n_head > 1 or near(y[0], 1) and near(y[1], 1),
        "With an MLP as wide as the stream, all its maps go from d channels to d, so both its "
        "factors are 1.":
            lambda y, mlp_ratio: mlp_ratio > 1 or near(y[2], 1) and near(y[3], 1),
        "nu_qkv and nu_p: one map goes to d/H channels per head, the other back from H such "
        "vectors. The product of the two factors is 1; yours is not.":
            lambda y: near(y[0] * y[1], 1),
        "nu_uz and nu_d: one map widens, the other narrows by as much. The product of the two "
        "factors is 1; yours is not.":
            lambda y: near(y[2] * y[3], 1),
        "A map from n to r channels gives a length of sqrt(r/n) on average. What are n and r "
        "here?":
            never},
    "5.3": {
        "Each channel has its own nu, as it has its own alpha.":
            lambda y, alpha, right: y.shape == alpha.shape and (
                near(right, right[0]) or not near(y, y[0])),
        "With no step, or one that goes the whole way, h is already a unit vector, so nu is 1. "
        "Yours is not 1 at one of these, or at both. Does the squared length have all its terms, "
        "with their signs and parentheses, not only to first order, and has each channel only its "
        "own alpha in it?":
            lambda y, right: not near(right, 1) or near(y, 1),
        "Half the way between two vectors at right angles the length is sqrt(1/2). Yours does not "
        "bring it to 1.":
            lambda y, alpha: not near(alpha, 0.5) or near(y * 0.5 ** 0.5, 1),
        "Half the way and at both ends yours is right or nearly so, but not everywhere. Which two "
        "squares add up to the square of the length? Do you add a small number, or round?":
            never},
    "5.4": {
        "Return a length for the start, and one after each step.":
            lambda y, steps: y.numel() == steps + 1,
        "The first length is that of the start: it should be 1.":
            lambda y: near(y.flatten()[0], 1),
        "n_1 is the factor times the hypotenuse over two sides, 1 - alpha and alpha long. Yours is "
        "a different number.":
            lambda y, right: len(right) == 1 or near(y[1], right[1], 1e-5),
        "Your n_1 is right. In a later step, how long is the side along h, is the new y at a right "
        "angle to all of it, and what does nu multiply? (If you loop: does the loop reach the last "
        "step?)":
            never},
    "5.5": {
        "Yours is upside down: nu is one over a length.":
            lambda y, right: not near(y * right, 1, 0.02),
        "Yours is far too small. Do you take the root of the mean of the squares, and not of their "
        "sum?":
            lambda y, right: y > right / 30,
        "SiLU(t) is about t / 2 for small t, and nearly t or 0 for large ones. So nu times sigma "
        "lies between sqrt(2) and 2. Yours does not for each sigma. Do you take the root? Has the "
        "argument of SiLU, and nothing else, the standard deviation sigma? Does a grid reach "
        "several sigma to both sides, and do you weight it with the normal density and divide by "
        "the sum of the weights? Are random numbers normal, and a million?":
            lambda y, sigma: 1.4 < y * sigma < 2.01,
        "For a small sigma SiLU(t) is nearly t / 2, which makes nu nearly 2 / sigma. "
        "Yours is smaller: is it SiLU, with sigma in its argument?":
            lambda y, sigma: sigma > 0.6 or y * sigma > 1.7,
        "Yours is not far off. Is a grid wide and fine enough, and weighted with the normal "
        "density? Are there a million random numbers? Is it SiLU? And do you average the squares "
        "first, and take the root only then?":
            never},
    "5.6": {
        "The answer has one length for each row of A.":
            lambda y, A: y.shape == A.shape[:-1],
        "A mean of unit vectors is not longer than 1. Yours is.":
            lambda y: y.max() < 1.001,
        "With all weight on one token, its vector comes out unchanged, with length 1.":
            lambda y, right: not near(right, 1) or near(y, 1),
        "Equal weights on S tokens give the length 1 / sqrt(S). Yours is a different number: what "
        "do you add up, and do you take a root? (No random vectors are needed.)":
            root_of_equal,
        "Where the weights differ: of which vectors do the squared lengths add up?":
            never},
    "5.8": {
        "w_qkv: you change rows of q, k or v. What does 5.7 say about a factor on each of these?":
            lambda y, w_qkv: near(y[0], w_qkv),
        "The first half of w_up's rows belongs to u. In yours these rows are changed: does a "
        "factor on u matter in 5.7? Or are the halves exchanged, or cut in another place?":
            lambda y, w_up: near(y[1].chunk(2)[0], w_up.chunk(2)[0]),
        "Every row of z takes over everything that multiplies z in SiLU's argument, each factor "
        "once, and nothing else.":
            never},
    "5.9": {
        "The answer has the shape of W, with all of its rows.":
            lambda y, W: y.shape == W.shape,
        "Some of your rows are longer than 1.":
            lambda y: (y.norm(dim=-1) <= 1.001).all(),
        "Rows shorter than 1 should stay as they are, also where another row is longer.":
            short_rows_stay,
        "A row longer than 1 should come out with length 1 and with its old direction.":
            never},
    "5.10": {
        "Return two numbers: one interval for all models together.":
            lambda y: y[0].numel() == 1,
        "With one model, the width of the interval times the number of layers is one unit of the "
        "last digit. Yours is not.":
            lambda y, digit, layers: len(layers) > 1 or near((y[1] - y[0]) * layers, digit, 1e-6),
        "With one model, the middle of the interval times the number of layers is what was printed "
        "minus what was counted. Yours is not.":
            lambda y, right, layers: len(layers) > 1 or near(y[0] + y[1], sum(right), 1e-6),
        "Yours is nearly right. Is something float32? That keeps about seven digits, too few for "
        "such counts: stay in float64, as the arguments are.":
            off_by_more_than_float32,
        "With one model yours is right. With several, each has an interval of its own, from its "
        "own digit, its own layers and a difference that may be negative: which e lie in all of "
        "them? (Where none does, return lowest and highest all the same.)":
            never},
    "5.11": {
        "With alpha_a = 0, where attention's step should leave h as it is, yours is off. Does your "
        "step leave it? Then look at the h that the MLP reads, u, z and its factor, SiLU, w_down, "
        "and the MLP's norm and step.":
            lambda y, right, p: p["alpha_a"].any() or near(y, right, 1e-4),
        "With alpha_a = 0 yours is right. With alpha_m = 0, where the MLP's step should change "
        "nothing, yours is off: look at the h that attention reads, q, k and v and their heads, "
        "rope, the norms (is one missing, or one too many?) and g, the mask, softmax, w_o, "
        "attention's step, and at the h from which the MLP's step starts.":
            lambda y, right, h, p: p["alpha_m"].any() or h.shape[1] == 1 or near(y, right, 1e-4),
        "With either alpha = 0 yours is right. Does each step take its own alpha and its own "
        "nu(alpha), and does the MLP use the h after attention's step everywhere?":
            lambda y, right, h: h.shape[-1] != 8 or near(y, right, 1e-4),
        "With 2 heads of 4 yours is right. Do you take all sizes from h and n_head, and allow an "
        "alpha above 1?":
            never},
}


# Validation losses that the notebook shows beside those of seed 1337. They were run once.
LADDER_OF_SEEDS_1_AND_2 = {
    "ngpt": (3.067, 3.053),
    "ngpt_corrected": (2.687, 2.638),
    "ngpt_fast": (2.589, 2.621),
    "ngpt_corrected_fast": (2.607, 2.628),
    "ngpt_bounded_fast": ()}
# Mean lengths of h before the first block and after one, six and twelve blocks, by seed. Below them
# are the mean cosines of h with a branch's output in anGPT. They were measured once, too.
LENGTHS_OF_SEEDS_1_AND_2 = {
    "GPT+": {1: (0.222, 4.272, 8.501, 10.385), 2: (0.214, 1.318, 3.897, 6.067)},
    "anGPT": {1: (0.990, 1.058, 1.527, 2.241), 2: (0.989, 1.066, 1.664, 2.398)}}
MEAN_COSINES_OF_SEEDS_1_AND_2 = (0.325, 0.362)


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
