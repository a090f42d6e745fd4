"""
The exercises of lesson 5, from nGPT to anGPT: factors that stand in for norms, and what is left of them.

Numbers and equations are those of the anGPT paper. A mistake is a wrong function and the sentence that helps.
"""
import math
from functools import partial

import torch
import torch.nn.functional as F

from answers import near
from grader import Exercise


def rows(x):
    """x (..., n) with rows of length 1; a row of zeros stays."""
    length = x.square().sum(-1, keepdim=True).sqrt()
    return x / torch.where(length == 0, 1.0, length)


# ---------------------------------------------------------------------------------------------------------------------
# 5.1 Concentration

def projected_norms(W, X):
    return (rows(X) @ rows(W).T).square().sum(-1).sqrt()


def inputs_projected_norms(generator):
    yield "W (16, 8), X (5, 8)", torch.randn(16, 8, generator=generator), torch.randn(5, 8, generator=generator)
    yield "one row in W, one in X", torch.randn(1, 6, generator=generator), torch.randn(1, 6, generator=generator)
    yield "a square W", torch.randn(7, 7, generator=generator), torch.randn(3, 7, generator=generator)
    yield "entries near 1e6", 1e6 * torch.randn(4, 9, generator=generator), 1e6 * torch.randn(2, 9, generator=generator)
    yield "a row of zeros in X", torch.randn(4, 5, generator=generator), torch.eye(3, 5).sub(torch.eye(3, 5)[:1])


# ---------------------------------------------------------------------------------------------------------------------
# 5.2 Linear maps

def linear_factors(d, n_head, mlp_ratio):
    d_h, d_f = d / n_head, mlp_ratio * d
    return [math.sqrt(inside / outside) for inside, outside in ((d, d_h), (d_h, d), (d, d_f), (d_f, d))]


def inputs_linear_factors(generator):
    yield "d = 256, 4 heads, 4-fold MLP", 256, 4, 4
    yield "d = 1024, 16 heads, 4-fold MLP", 1024, 16, 4
    yield "d = 768, one head, 3-fold MLP", 768, 1, 3
    yield "d = 96, 6 heads, an MLP as wide as the stream", 96, 6, 1


# ---------------------------------------------------------------------------------------------------------------------
# 5.3 The residual step

def nu_residual(alpha):
    return ((1 - alpha) ** 2 + alpha ** 2) ** -0.5


def inputs_nu_residual(generator):
    yield "steps of 0.05", torch.full((4,), 0.05)
    yield "a different step for each of 6 channels", torch.rand(6, generator=generator)
    yield "no step, and the whole way", torch.tensor([0.0, 1.0])
    yield "half the way", torch.tensor([0.5])


# ---------------------------------------------------------------------------------------------------------------------
# 5.4 The stream over many steps

def stream_norms(alpha, nu, steps):
    squares = [1.0]
    for _ in range(steps):
        squares.append(nu ** 2 * ((1 - alpha) ** 2 * squares[-1] + alpha ** 2))
    return torch.tensor(squares, dtype=torch.float64).sqrt()


def norms_added(alpha, nu, steps):
    norms = [1.0]
    for _ in range(steps):
        norms.append(nu * ((1 - alpha) * norms[-1] + alpha))
    return torch.tensor(norms, dtype=torch.float64)


def without_the_branch(alpha, nu, steps):
    return (nu * (1 - alpha)) ** torch.arange(steps + 1, dtype=torch.float64)


def as_if_unit(alpha, nu, steps):
    return (nu * math.sqrt(1 - 2 * alpha + 2 * alpha ** 2)) ** torch.arange(steps + 1, dtype=torch.float64)


def inputs_stream_norms(generator):
    yield "24 steps of 0.05 without a factor", 0.05, 1.0, 24
    yield "24 steps of 0.05 with the printed factor", 0.05, 0.905, 24
    yield "8 steps of 0.3 with a factor of 1.3", 0.3, 1.3, 8
    yield "no steps at all", 0.2, 1.1, 0
    yield "a step that goes the whole way", 1.0, 1.0, 3


# ---------------------------------------------------------------------------------------------------------------------
# 5.5 The gate

def mean_of(f, sigma):
    """E f(t), t ~ N(0, sigma^2), by the trapezoid rule."""
    t = torch.linspace(-10, 10, 20001, dtype=torch.float64)
    weight = torch.exp(-t.square() / 2)
    return ((f(sigma * t) * weight).sum() / weight.sum()).item()


def nu_gate(sigma):
    return mean_of(lambda t: (t * torch.sigmoid(t)) ** 2, sigma) ** -0.5


def inputs_nu_gate(generator):
    for sigma in (0.5, 1.0, 0.7, 3.0):
        yield f"sigma = {sigma}", sigma


# ---------------------------------------------------------------------------------------------------------------------
# 5.6 Averaging in attention

def mixed_norms(A):
    return A.square().sum(-1).sqrt()


def inputs_mixed_norms(generator):
    causal = torch.randn(5, 5, generator=generator).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    yield "causal weights of 5 tokens", causal.softmax(-1)
    yield "the same weight on every token so far", torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
    yield "all weight on one token", torch.eye(4)
    yield "a single token", torch.ones(1, 1)
    yield "two heads", torch.randn(2, 3, 7, generator=generator).softmax(-1)


# ---------------------------------------------------------------------------------------------------------------------
# 5.7 Which factors count

PLACES = ("q", "k", "v", "p", "u", "z", "acf", "d", "residual")


def places(*names):
    return lambda: [name in names for name in PLACES]


def inputs_places(generator):
    yield "the nine places",


# ---------------------------------------------------------------------------------------------------------------------
# 5.8 Folding

def fold_least(w_qkv, w_up, nu_qkv, nu_uz, sqrt_d):
    half = w_up.shape[0] // 2
    factors = torch.ones(2 * half, 1, dtype=w_up.dtype)
    factors[half:] = nu_uz * sqrt_d
    return w_qkv, w_up * factors


def fold_up(u, z, qkv=lambda nu: 1.0):
    """A wrong fold: u(nu_uz, sqrt_d) and z(nu_uz, sqrt_d) are what it multiplies the rows of u and z by."""
    def fold(w_qkv, w_up, nu_qkv, nu_uz, sqrt_d):
        U, Z = w_up.chunk(2)
        return w_qkv * qkv(nu_qkv), torch.cat((U * u(nu_uz, sqrt_d), Z * z(nu_uz, sqrt_d)))
    return fold


def inputs_fold(generator):
    for d, n_head in ((8, 2), (6, 3)):
        w_qkv, w_up = torch.randn(3 * d, d, generator=generator), torch.randn(8 * d, d, generator=generator)
        yield f"d = {d}, {n_head} heads", w_qkv, w_up, n_head ** 0.5, 0.5, d ** 0.5
    w_qkv, w_up = torch.randn(3, 1, generator=generator), torch.randn(8, 1, generator=generator)
    yield "d = 1, one head", w_qkv, w_up, 1.0, 0.5, 1.0


# ---------------------------------------------------------------------------------------------------------------------
# 5.9 Bounds

def bound_rows(W):
    return W / W.square().sum(-1, keepdim=True).sqrt().clamp(min=1.0)


def inputs_bound_rows(generator):
    W = torch.randn(5, 4, generator=generator)
    yield "rows longer than 1", 3 * rows(W)
    yield "rows shorter than 1", 0.3 * rows(W)
    yield "one row of length 5, one of 1, one of 0.2", torch.tensor([5.0, 1.0, 0.2])[:, None] * rows(W[:3])
    yield "a row of zeros", torch.stack((torch.zeros(4), W[0]))
    yield "a single row", torch.tensor([[3.0, -4.0]])


# ---------------------------------------------------------------------------------------------------------------------
# 5.10 The riddle of Table F.1

def extra_per_layer(printed, digit, counted, layers):
    return ((printed - digit / 2 - counted) / layers).max(), ((printed + digit / 2 - counted) / layers).min()


def none_below_0(printed, digit, counted, layers):
    lowest, highest = extra_per_layer(printed, digit, counted, layers)
    return lowest.clamp(min=0), highest


def inputs_extra_per_layer(generator):
    def table(*columns):
        return tuple(torch.tensor(column, dtype=torch.float64) for column in zip(*columns))
    yield "one model, printed to 0.01M", *table((5.24e6, 1e4, 5_234_506, 10))
    yield "two models", *table((62.24e6, 1e4, 62_234_506, 10), (247.17e6, 1e4, 247_164_690, 18))
    yield "three models, one printed coarsely", *table((5.05e6, 1e4, 5_048_200, 6), (9.40e6, 1e4, 9_396_100, 12),
                                                       (1.073e9, 1e6, 1_072_590_116, 36))
    yield "two models that no number of extras explains", *table((32.11e6, 1e4, 32_114_304, 6),
                                                                 (62.33e6, 1e4, 62_318_976, 10))


# ---------------------------------------------------------------------------------------------------------------------
# 5.11 The block with what is left

def inputs_block(generator):
    for label, n_head, d, tokens, size in (("2 heads of 4", 2, 8, 5, 0.3), ("3 heads of 2", 3, 6, 4, 0.3),
                                           ("one head and one token", 1, 4, 1, 0.3), ("alphas near 1", 2, 4, 3, 1.0),
                                           ("3 heads and one token", 3, 6, 1, 0.3)):
        shapes = dict(w_qkv=(3 * d, d), w_o=(d, d), w_up=(8 * d, d), w_down=(d, 4 * d))
        p = {name: rows(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
        p |= {name: size * torch.randn(d, generator=generator) for name in ("alpha_a", "alpha_m")}
        p["g"] = torch.tensor((d / n_head) ** 0.5 + 0.3)
        angle = torch.arange(tokens)[:, None] * 10000 ** -(torch.arange(d // n_head // 2) / (d // n_head // 2))
        h = torch.linspace(0.8, 1.4, tokens)[:, None] * rows(torch.randn(2, tokens, d, generator=generator))
        yield label, h, p, n_head, angle.cos(), angle.sin()
        if n_head == 2 and size < 1:
            for name, alone in (("alpha_a", "the MLP"), ("alpha_m", "attention")):
                still = {**p, name: torch.zeros(d)}
                yield f"{name} of 0: {alone} alone", h, still, n_head, angle.cos(), angle.sin()


BOTH = ("alpha_a", "alpha_m")                               # attention's step and the MLP's


def angpt_block(h, p, n_head, cos, sin, *, scale=0.0, causal=True, g_twice=False, nu_uz=True, sqrt_d=True,
                swapped=False, branch_norm=BOTH, residual=nu_residual, retract=False, absolute=True, parallel=False,
                pre_norm=False, heads_back=True, neighbours=True):
    (B, T, d), d_k = h.shape, h.shape[-1] // n_head

    def step(h, y, which):
        alpha = p[which].abs() if absolute else p[which]
        y = rows(y) if which in branch_norm else y
        y = (h + alpha * (y - h)) * residual(alpha)
        return rows(y) if retract else y

    def cut(x):
        if neighbours:
            return x.view(B, T, n_head, d_k).transpose(1, 2)
        return x.view(B, T, d_k, n_head).permute(0, 3, 1, 2)

    def read(h):
        return rows(h) if pre_norm else h

    def turned(x):
        a, b = x.chunk(2, dim=-1)
        return rows(torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1))

    q, k, v = map(cut, (read(h) @ p["w_qkv"].T).chunk(3, dim=-1))
    scores = turned(q) @ turned(k).transpose(2, 3) * p["g"] ** (2 if g_twice else 1) * d_k ** scale
    if causal:
        scores = scores + torch.full((T, T), -torch.inf).triu(1)
    y = scores.softmax(-1) @ v
    y = (y.transpose(1, 2) if heads_back else y).reshape(B, T, d)
    start = h
    h = step(h, y @ p["w_o"].T, "alpha_a")
    u, z = (read(start if parallel else h) @ p["w_up"].T).chunk(2, dim=-1)
    u, z = (z, u) if swapped else (u, z)
    z = z * (0.5 if nu_uz else 1) * (d ** 0.5 if sqrt_d else 1)
    return step(h, (u * z * torch.sigmoid(z)) @ p["w_down"].T, "alpha_m")


# What holds of every right answer: said where none of the known mistakes fits ----------------------------------------

PROPERTIES = {
    "5.1": [
        (lambda y, W, X: y.shape == X.shape[:1], "There is one length for each row of X."),
        (lambda y, W, X: (y <= len(W) ** 0.5 + 0.001).all(),
         "Each entry of W x is a cosine of unit vectors, so no length is above sqrt(r). Some of yours are."),
        (lambda y, W, X: len(W) > 1 or near(y, (rows(W) * rows(X)).sum().abs()),
         "With one row in each, the length is the size of one cosine. Yours is another number."),
        (lambda y, *_: False, "With one row in each yours is right: over which axis is the length taken?")],
    "5.2": [
        (lambda y, d, heads, ratio: heads > 1 or near(y[0], 1) and near(y[1], 1),
         "With one head, q, k, v and W_p go from d channels to d: nothing is to be undone in attention."),
        (lambda y, d, heads, ratio: ratio > 1 or near(y[2], 1) and near(y[3], 1),
         "With an MLP as wide as the stream, u, z and the way back have d channels: nothing is to be undone there."),
        (lambda y, *_: near(y[0] * y[1], 1), "nu_qkv and nu_p: one goes to d/H channels a head, the other back from H "
                                             "such vectors. Together they change nothing; yours do."),
        (lambda y, *_: near(y[2] * y[3], 1), "nu_uz and nu_d: one widens, the other narrows by as much. Together they "
                                             "change nothing; yours do."),
        (lambda y, *_: False, "A map from n to r channels gives the length sqrt(r/n) on average: which n and r here?")],
    "5.3": [
        (lambda y, a: y.shape == a.shape, "Each channel has a nu of its own, as it has an alpha."),
        (lambda y, a: not near(a.min(), 0) or not near(a.max(), 1) or near(y, 1),
         "With no step, or one that goes the whole way, h is a unit vector already: nothing is to be undone."),
        (lambda y, a: not near(a, 0.5) or near(y * 0.5 ** 0.5, 1),
         "Half the way between two vectors at right angles the length is sqrt(1/2). Yours does not bring it to 1."),
        (lambda y, a: False, "Two squares add up, that of what is left of h and that of what comes in.")],
    "5.4": [
        (lambda y, a, nu, n: y.numel() == n + 1, "There is a length for the start, and one behind each step."),
        (lambda y, a, nu, n: near(y.flatten()[0], 1), "The first length is that of the start, 1."),
        (lambda y, a, nu, n: n == 0 or near(y[1] ** 2, nu ** 2 * ((1 - a) ** 2 + a ** 2)),
         "n_1: two sides at right angles, 1 - alpha and alpha long, and then the factor. Yours is another."),
        (lambda y, *_: False, "n_1 is right. For n_2 the side along h is as long as what n_1 leaves of it.")],
    "5.5": [
        (lambda y, s: 1.4 < y * s < 2.01,
         "SiLU(t) is about t / 2 for small t, and t or 0 for large ones: nu times sigma lies between sqrt(2) and 2. "
         "Yours does not. Has your t the deviation sigma, and if it is on a grid, does that reach several sigma?"),
        (lambda y, s: s > 0.6 or y * s > 1.7,
         "For a small sigma SiLU(t) is nearly t / 2, which makes nu nearly 2 / sigma. Yours is smaller."),
        (lambda y, s: False,
         "Is your grid wide enough, and fine enough, and weighted with the normal's density? Or, of random "
         "numbers, have you a million?")],
    "5.6": [
        (lambda y, A: y.shape == A.shape[:-1], "There is one length for each row of A."),
        (lambda y, A: y.max() < 1.001, "A mean of unit vectors is not longer than 1. Yours is."),
        (lambda y, A: not near(A.max(-1).values, 1) or near(y, 1),
         "With all weight on one token its vector comes out as it is: length 1."),
        (lambda y, A: not near(A[..., -1, :].std(correction=0), 0) or near(y[..., -1], A.shape[-1] ** -0.5),
         "Equal weights on S tokens give the length 1 / sqrt(S). Yours is another."),
        (lambda y, A: False, "Weights that are not equal: the squares of which vectors add up?")],
    "5.8": [
        (lambda y, w_qkv, *_: near(y[0], w_qkv), "w_qkv: which norms follow q, k and v? See what 5.7 says of them."),
        (lambda y, w_qkv, w_up, *_: near(y[1].chunk(2)[0], w_up.chunk(2)[0]),
         "The first half of w_up is u's. Is there a factor on u that counts in 5.7?"),
        (lambda y, *_: False, "The rows of z: all of what stands with z in SiLU's argument, and nothing else.")],
    "5.9": [
        (lambda y, W: (y.norm(dim=-1) <= 1.001).all(), "Some of your rows are longer than 1."),
        (lambda y, W: W.norm(dim=-1).max() > 1 or near(y, W), "Rows shorter than 1 should stay as they are."),
        (lambda y, W: False, "What is too long should come out with the length 1, and with the direction it had.")],
    "5.10": [
        (lambda y, p, digit, c, n: y[0].numel() == 1, "Two numbers are asked for: one interval for all models together."),
        (lambda y, p, digit, c, n: len(p) > 1 or near((y[1] - y[0]) * n, digit),
         "With one model the interval, over all layers, is as wide as one unit of the last digit. Yours is not."),
        (lambda y, p, digit, c, n: len(p) > 1 or near((y[1] + y[0]) * n / 2, p - c),
         "With one model the middle of the interval, over all layers, is what was printed less what was counted."),
        (lambda y, *_: False, "With one model yours is right. Which e lie in the intervals of all of them?")],
    "5.11": [
        (lambda y, h, p, *rope: p["alpha_a"].any() or near(y, angpt_block(h, p, *rope), 1e-4),
         "With alpha_a of 0, where attention's step goes nowhere, yours is off: look at the MLP, u, z and its "
         "factor, SiLU and w_down, and at its norm and its step."),
        (lambda y, h, p, *rope: p["alpha_m"].any() or h.shape[1] == 1 or near(y, angpt_block(h, p, *rope), 1e-4),
         "The MLP is right. With alpha_m of 0, where attention is alone, yours is off: look at q, k and v, "
         "rope, the norms and g, the mask, w_o, and at attention's norm and step."),
        (lambda y, *_: False,
         "Attention alone is right, and so is the MLP alone: does each step take its own alpha, and its own "
         "nu(alpha)?")],
}


EXERCISES = {
    "5.1": Exercise(projected_norms, inputs_projected_norms, [
        (lambda W, X: (rows(X) @ rows(W.T)).norm(dim=-1),
         "You normalized the columns of W. A row is what one output takes its inner product with."),
        (lambda W, X: (rows(X) @ rows(W).T).square().sum(-1),
         "This is the squared norm; the root is missing."),
        (lambda W, X: (X @ rows(W).T).norm(dim=-1),
         "The rows of X keep the lengths they came with: they are to be unit vectors too."),
        (lambda W, X: (rows(X) @ W.T).norm(dim=-1),
         "X is normalized, W is not: its rows are to be unit vectors as well."),
        (lambda W, X: (rows(X) @ (W / W.norm()).T).norm(dim=-1),
         "You divided W by one number, its norm as a whole. Each row has a length of its own."),
        (lambda W, X: (X @ W.T).norm(dim=-1), "Nothing is normalized: both have rows that are to be unit vectors."),
        (lambda W, X: ((X / X.norm(dim=-1, keepdim=True)) @ rows(W).T).norm(dim=-1),
         "Right but for a row of zeros in X, which you divide by its length 0. It has length 0, before and after."),
        (lambda W, X: (rows(X) @ rows(W).T).norm(dim=0),
         "You took the lengths along the wrong axis: for each row of X the vector W x runs over the rows of W."),
    ]),
    "5.2": Exercise(linear_factors, inputs_linear_factors, [
        (lambda *a: [1 / x for x in linear_factors(*a)],
         "All four are upside down: these are the expected norms, nu is what brings them back to 1."),
        (lambda d, n_head, ratio: [1.0, 1.0, *linear_factors(d, n_head, ratio)[2:]],
         "For attention you took a map from d to d. q, k and v belong to one head each: count the entries of one."),
        (lambda d, n_head, ratio: [n_head ** 0.5, 1.0, *linear_factors(d, n_head, ratio)[2:]],
         "W_p keeps lengths, but its input is not a unit vector: how long are n_head unit vectors side by side?"),
        (lambda d, n_head, ratio: [*linear_factors(d, n_head, ratio)[:2], (2 * ratio) ** -0.5, ratio ** 0.5],
         "W_uz has twice as many rows as u has entries: u and z are two vectors, each of unit length."),
        (lambda *a: [x ** 2 for x in linear_factors(*a)],
         "E||Wx||^2 = r/d is the expected square. nu belongs to the length: the roots are missing."),
        (lambda d, n_head, ratio: [n_head ** 0.5, n_head ** 0.5, *linear_factors(d, n_head, ratio)[2:]],
         "nu_p is upside down: n_head unit vectors side by side are longer than 1, and nu_p has to shorten them."),
    ], parts=("nu_qkv", "nu_p", "nu_uz", "nu_d")),
    "5.3": Exercise(nu_residual, inputs_nu_residual, [
        (lambda a: 1 - 2 * a + 2 * a ** 2,
         "This is the paper's printed line, the expected squared norm. What has to stand before a vector to undo it?"),
        (torch.ones_like,
         "1 - alpha and alpha add up to 1, but h and y stand at right angles: the sum is shorter than 1."),
        (lambda a: (1 - 2 * a + 2 * a ** 2) ** 0.5,
         "This is the expected norm. nu is what brings it back to 1."),
        (lambda a: 1 / (1 - 2 * a + 2 * a ** 2),
         "You divide by the expected squared norm; a vector is divided by its norm."),
        (lambda a: (1 - 2 * a + a ** 2) ** -0.5,
         "This undoes the factor 1 - alpha on h. The other part, alpha y, has a length too."),
        (lambda a: (1 + a ** 2) ** -0.5,
         "This belongs to h + alpha y. The step is h + alpha (y - h): h keeps 1 - alpha of itself."),
    ]),
    "5.4": Exercise(stream_norms, inputs_stream_norms, [
        (norms_added, "You added lengths. Independent directions are orthogonal: their squares add."),
        (without_the_branch, "Only what is left of the old h is counted; the branch adds alpha of a unit vector."),
        (lambda a, nu, n: stream_norms(a, nu, n).square(), "These are squared norms: the root at the end is missing."),
        (lambda a, nu, n: torch.cat((torch.ones(1, dtype=torch.float64), stream_norms(a, nu, n)[1:] / nu)),
         "The factor nu stands around the whole sum, the last step's too: h is measured after it."),
        (as_if_unit, "1 - 2a + 2a^2 is for an h of length 1. Here h has the length n_k that the step before left."),
        (lambda a, nu, n: stream_norms(a, nu ** 0.5, n),
         "You multiply the square by nu: a factor nu on h is nu^2 on its square."),
        (lambda a, nu, n: stream_norms(a, nu, n)[1:],
         "One length too few: n_0, that of the start, belongs to them."),
        (lambda a, nu, n: stream_norms(a, nu, n)[:-1], "One length too few: the last step's is missing."),
        (lambda a, nu, n: stream_norms(a, nu, n)[-1], "That is the last length; all of them are asked for."),
    ]),
    "5.5": Exercise(nu_gate, inputs_nu_gate, [
        (lambda s: mean_of(lambda t: F.silu(t) ** 2, s ** 0.5) ** -0.5,
         "sigma is the standard deviation; you used it as the variance."),
        (lambda s: mean_of(lambda t: F.silu(t) ** 2, s ** 2) ** -0.5,
         "You stretched t by sigma^2, which is its variance. By what does one stretch a normal number?"),
        (lambda s: 1 / mean_of(lambda t: F.silu(t) ** 2, s),
         "1 / E[f^2] undoes a squared norm; the root is missing."),
        (lambda s: 1 / abs(mean_of(F.silu, s)),
         "You squared the mean: what is wanted is the mean of the square, which is larger."),
        (lambda s: mean_of(lambda t: torch.sigmoid(t) ** 2, s) ** -0.5,
         "This is the factor of the sigmoid; SiLU(t) = t sigmoid(t)."),
        (lambda s: (mean_of(lambda t: F.silu(t) ** 2, s) - mean_of(F.silu, s) ** 2) ** -0.5,
         "You took the standard deviation, which leaves the mean out. A length counts the mean too."),
        (lambda s: 1 / mean_of(lambda t: F.silu(t).abs(), s),
         "You average sizes, E|f|. A length is made of squares: the root of E[f^2], which is larger."),
        (lambda s: 2 / s, "2 / sigma is for small sigma, where SiLU is the straight line t / 2. It bends."),
        (lambda s: mean_of(lambda t: F.silu(t) ** 2, s) ** 0.5, "This is the expected norm; nu is what undoes it."),
    ], tolerance=3e-3),
    "5.6": Exercise(mixed_norms, inputs_mixed_norms, [
        (lambda A: A.sum(-1),
         "These are sums of weights, always 1: that would be the length if all values were the same vector."),
        (lambda A: (A > 0).sum(-1) ** -0.5,
         "You counted the tokens with any weight at all. That is right only when the weights are equal."),
        (lambda A: A.square().sum(-1), "These are expected squared norms; the root is missing."),
        (lambda A: A.square().sum(-2).sqrt(), "You summed over the queries. An output is a row of A times the values."),
        (lambda A: A.square().sum(-1).rsqrt(),
         "This is the factor that would bring the output back to length 1. Its length is asked for."),
        (lambda A: torch.full(A.shape[:-1], A.shape[-1] ** -0.5),
         "That is right where all S weights are equal; yours does not look at the weights."),
    ]),
    "5.7": Exercise(places("z", "residual"), inputs_places, [
        (places("q", "k", "z", "residual"),
         "q and k: a norm follows at once (Table 1), and g sets their scale. What is left of a factor before a norm?"),
        (places("v", "z", "residual"),
         "v: follow the factor through A v, which is a weighted sum, and through W_p, to the next norm."),
        (places("u", "z", "residual"),
         "u: the product u * SiLU(z) is linear in u. Where does the factor go from there?"),
        (places("u", "z", "acf", "d", "residual"),
         "The MLP's output ends in norm(h_m). Which factors can be pulled out in front of the whole of W_d (...)?"),
        (places("z"),
         "h after the residual step meets no norm: it goes on into the next step, and at the end into the head."),
        (places("z", "acf", "residual"),
         "acf: it multiplies the product after SiLU, so it can be pulled out through W_d. What comes after W_d?"),
        (places(*PLACES), "Not all of them: what does a norm leave of a factor in front of it?"),
        (places("q", "k", "v", "p", "u", "acf", "d"),
         "You have it the other way round: True is for a factor that changes the output."),
        (places("residual"), "One constant sits inside a function f with f(c z) different from c f(z)."),
    ], about={
        0: "q: rope keeps its length's factor, and then comes unit(q).",
        1: "k: rope turns it, and then comes unit(k).",
        2: "v: A (c v) = c A v, W_p (c x) = c W_p x. What comes next?",
        3: "p: W_p's output goes into the residual step. What is the first thing that happens to it there?",
        4: "u: it enters the gated product linearly. Follow the product to the next norm.",
        5: "z: does SiLU(c z) equal c SiLU(z)?",
        6: "acf: it stands in front of the product, W_d is linear. What comes next?",
        7: "d: W_d's output goes into the residual step. What is the first thing that happens to it there?",
        8: "residual: h after the step is read by the next one as it is. Is there a norm on h itself?",
    }),
    "5.8": Exercise(fold_least, inputs_fold, [
        (fold_up(lambda nu, s: 1, lambda nu, s: 1),
         "You leave w_up as it is. Not every factor is undone by a norm: which of the constants counted in 5.7?"),
        (fold_up(lambda nu, s: 1, lambda nu, s: nu),
         "The gate's argument is z * nu_uz * sqrt(d): two factors, one of which you left behind."),
        (fold_up(lambda nu, s: 1, lambda nu, s: s), "Besides sqrt(d) there is nu_uz, on z as well as on u."),
        (fold_up(lambda nu, s: 1, lambda nu, s: 1 / (nu * s)),
         "You divide. The constants are set to 1, so the weights have to take them over: multiply."),
        (fold_up(lambda nu, s: nu * s, lambda nu, s: 1),
         "u's rows come first in W_uz, then z's; the gate's argument is z."),
        (fold_up(lambda nu, s: nu, lambda nu, s: nu * s),
         "The output is right, but u's rows need not change: norm(h_m) undoes a factor on u."),
        (fold_up(lambda nu, s: nu * s, lambda nu, s: nu * s),
         "You scaled all of W_uz. The rows of u need nothing: norm(h_m) undoes a factor on u."),
        (fold_up(lambda nu, s: 1, lambda nu, s: nu * s, lambda nu: nu),
         "The output is right, but w_qkv need not change: which norms follow q, k and v (exercise 5.7)?"),
        (fold_up(lambda nu, s: nu, lambda nu, s: nu * s, lambda nu: nu),
         "The output is right, but q, k, v and u need not change: a norm undoes each of these factors (exercise 5.7)."),
    ], parts=("w_qkv", "w_up")),
    "5.9": Exercise(bound_rows, inputs_bound_rows, [
        (lambda W: W / W.norm(dim=-1, keepdim=True),
         "This is nGPT's constraint: short rows are stretched, and a row of zeros is 0/0. A bound leaves both alone."),
        (rows, "This is nGPT's constraint: short rows are stretched. A bound leaves them alone."),
        (lambda W: W / W.norm(dim=0, keepdim=True).clamp(min=1),
         "You bounded the columns. In y = W x a row is one neuron's weights."),
        (lambda W: W / W.square().sum(-1, keepdim=True).clamp(min=1),
         "You divide by the squared length: a row of length 5 gets length 0.2."),
        (lambda W: W / W.abs().sum(-1, keepdim=True).clamp(min=1),
         "You divide by the sum of the entries' sizes. A length is the root of the sum of their squares."),
        (lambda W: W / W.norm(dim=-1).max().clamp(min=1),
         "You divide all rows by the length of the longest, and so shorten some that may stay. Each row has "
         "its own."),
        (lambda W: W / W.norm().clamp(min=1),
         "You bounded the matrix as a whole. Each row has a bound of its own."),
        (lambda W: W / W.norm(dim=-1, keepdim=True).clamp(max=1),
         "The other way round: long rows stay, short ones are stretched. Which lengths may be divided by?"),
        (lambda W: W.clamp(-1, 1), "You bounded each entry. A row of entries below 1 can be much longer than 1."),
    ]),
    "5.10": Exercise(extra_per_layer, inputs_extra_per_layer, [
        (lambda p, digit, c, n: (((p - c) / n).min(), ((p - c) / n).max()),
         "A printed number is rounded: the true one lies up to half a digit away on either side."),
        (lambda p, digit, c, n: (((p - digit - c) / n).max(), ((p + digit - c) / n).min()),
         "Rounding moves a number by at most half of its last digit, not by a whole one."),
        (lambda p, digit, c, n: (((p - digit / 2 - c) / n).min(), ((p + digit / 2 - c) / n).max()),
         "This is what at least one model allows. The same number of extras has to fit all models at once."),
        (lambda p, digit, c, n: ((p - digit / 2 - c).max(), (p + digit / 2 - c).min()),
         "These are extras in the whole model; a deeper model has more layers to put them in."),
        (lambda p, digit, c, n: (((c - digit / 2 - p) / n).max(), ((c + digit / 2 - p) / n).min()),
         "Your sign is reversed: what we did not count is the printed number less ours."),
        (none_below_0, "You cut the interval off at 0. It is asked for as it is, even where it begins below 0."),
        (lambda *a: tuple(sorted(extra_per_layer(*a))),
         "You sorted the two. When no e fits, lowest comes out above highest: that is the finding."),
    ], parts=("lowest", "highest")),
    "5.11": Exercise(angpt_block, inputs_block, tolerance=1e-4, misconceptions=[
        (partial(angpt_block, causal=False), "A token attends to later ones: the mask is missing."),
        (partial(angpt_block, scale=-0.5),
         "The scores are divided by sqrt(d_k) as well: g, which starts at sqrt(d_k), is the whole factor."),
        (partial(angpt_block, g_twice=True), "g multiplies q and k both, so that it counts twice. q alone has it."),
        (partial(angpt_block, nu_uz=False), "The gate's argument lacks nu_uz: of the constants that one counts (5.7)."),
        (partial(angpt_block, sqrt_d=False), "The gate's argument lacks sqrt(d)."),
        (partial(angpt_block, heads_back=False),
         "The heads are put side by side in the wrong order: before (B, T, d), H and T have to change places again."),
        (partial(angpt_block, pre_norm=True),
         "You normalize h before a branch, as Pre-LN does. anGPT's four norms stand on q, k, h_a and h_m."),
        (partial(angpt_block, branch_norm=()),
         "A branch's output is no unit vector: Table 1 keeps the exact norms of h_a and h_m."),
        (partial(angpt_block, branch_norm=("alpha_a",)), "The MLP's output goes into its step without its norm."),
        (partial(angpt_block, branch_norm=("alpha_m",)), "Attention's output goes into its step without its norm."),
        (partial(angpt_block, neighbours=False),
         "A head has d_k neighbouring channels of q, k and v; yours has every n_head-th one."),
        (partial(angpt_block, residual=lambda a: 1.0), "nu(alpha) is missing: h becomes shorter with each step."),
        (partial(angpt_block, residual=lambda a: 1 - 2 * a + 2 * a ** 2),
         "nu(alpha) is the printed expression, the expected squared norm: see exercise 5.3."),
        (partial(angpt_block, retract=True), "You normalize h after a step, as nGPT does. anGPT has nu(alpha) there."),
        (partial(angpt_block, absolute=False), "A negative alpha walks away: the model takes its absolute value."),
        (partial(angpt_block, swapped=True), "SiLU is applied to u. The first 4d rows of w_up are u's."),
        (partial(angpt_block, parallel=True), "The MLP reads the h from before attention's step. It comes after it."),
    ]),
}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
