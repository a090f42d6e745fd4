"""
Lesson 3, NormFormer: three more norms, what they do to gradients, and how large an embedding is. See grader.py.

Section, table and figure numbers are those of NormFormer (Shleifer, Weston and Ott 2021). The references are written
without model.py's functions; where it has the same thing, the notebook compares the two.
"""
import math
from functools import partial

import torch

from answers import near
from grader import AUTOGRAD, Exercise


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator)


def join(y):
    """(B, H, T, d_k) -> (B, T, H d_k), the heads side by side."""
    return torch.cat(y.unbind(1), dim=-1)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def standard(x, dim=-1, eps=1e-5, correction=0):
    """Mean 0 and variance 1 along dim."""
    return (x - x.mean(dim, keepdim=True)) / (x.var(dim, keepdim=True, correction=correction) + eps).sqrt()


# 3.1 ------------------------------------------------------------------------------------------------------------------

def head_inputs(generator):
    yield "3 heads of 2 channels", normal(generator, 2, 3, 4, 2), normal(generator, 3), normal(generator, 6, 6)
    yield "as many tokens as heads", normal(generator, 2, 4, 4, 2), normal(generator, 4), normal(generator, 8, 8)
    yield "a silent head", normal(generator, 2, 2, 3, 3), torch.tensor([0.0, 2.0]), normal(generator, 6, 6)
    yield "all gammas 1", normal(generator, 3, 2, 5, 4), torch.ones(2), normal(generator, 8, 8)


def head_scale(y, gamma, w_o, *, scaled=lambda y, gamma: join(y * gamma.reshape(-1, 1, 1)),
               after=lambda y, gamma: 1, joined=lambda y: y, project=lambda y, w_o: y @ w_o.T):
    return project(joined(scaled(y, gamma)), w_o) * after(y, gamma)


HEADS = Exercise(reference=head_scale, inputs=head_inputs, misconceptions=[
    (partial(head_scale, scaled=lambda y, gamma: join(y),
             after=lambda y, gamma: gamma.repeat_interleave(y.shape[-1])),
     "You scale what comes out of W_o: there every channel is a mixture of all heads, and no head's own any more."),
    (partial(head_scale, scaled=lambda y, gamma: join(y)),
     "The gammas are nowhere in your answer: it is plain multi-head attention."),
    (partial(head_scale, scaled=lambda y, gamma: join(y) * gamma.repeat(y.shape[-1])),
     "Your gammas go round channel by channel. A head's channels are neighbours and share one number."),
    (partial(head_scale, scaled=lambda y, gamma: (y * gamma.reshape(-1, 1, 1)).reshape(len(y), y.shape[2], -1)),
     "The scaling is right. But (B, H, T, d_k) cannot be read as (B, T, d) without moving an axis."),
    (partial(head_scale, scaled=lambda y, gamma: (y * gamma.reshape(-1, 1, 1)).permute(0, 2, 3, 1).flatten(2)),
     "The scaling is right. But in your joined vector the heads take turns, a channel each: which axis goes last?"),
    (partial(head_scale, project=lambda y, w_o: y @ w_o),
     "torch stores a linear map as (out, in): look at what multiplies w_o, its rows or its columns."),
    (partial(head_scale, scaled=lambda y, gamma: join(y * gamma.softmax(0).reshape(-1, 1, 1))),
     "The gammas are used as they are: nothing makes them positive or lets them sum to one."),
    (partial(head_scale, scaled=lambda y, gamma: join(y * gamma[:, None])),
     "Your gammas met the token axis (broadcasting lines up the last axes first). Which axis counts the heads?"),
    (partial(head_scale, joined=lambda y: y / y.shape[-1] ** 0.5),
     "A factor too many: the division by sqrt(d_k) is inside attention and already done."),
    (partial(head_scale, project=lambda y, w_o: y), "The output matrix is missing."),
    (partial(head_scale, scaled=lambda y, gamma: join(y * (1 + gamma).reshape(-1, 1, 1))),
     "gamma itself is the factor (it starts at 1), not what is added to 1."),
    (partial(head_scale, scaled=lambda y, gamma: join(y * gamma.abs().reshape(-1, 1, 1))),
     "Why the absolute value? A head may be turned round."),
])


# 3.2 ------------------------------------------------------------------------------------------------------------------

def ffn_inputs(generator):
    for label, n, d, f in (("four tokens, d = 3, f = 12", 4, 3, 12), ("f = d", 3, 8, 8), ("two tokens", 2, 4, 16)):
        yield (label, normal(generator, n, d), normal(generator, f, d), normal(generator, d, f),
               1 + normal(generator, f), normal(generator, f))
    small = 0.003 * normal(generator, 8, 3)
    yield ("a small w_up, where eps counts", normal(generator, 4, 3), small, normal(generator, 3, 8),
           1 + normal(generator, 8), normal(generator, 8))


def ffn_branch(x, w_up, w_down, gamma, beta, *, act=gelu, norm=standard, gain=lambda a, gamma: a * gamma,
               shift=lambda a, beta: a + beta, end=lambda x, m: m):
    return end(x, shift(gain(norm(act(x @ w_up.T)), gamma), beta) @ w_down.T)


FFN = Exercise(reference=ffn_branch, inputs=ffn_inputs, tolerance=5e-3, misconceptions=[      # both forms of GELU pass
    (lambda x, w_up, w_down, gamma, beta: standard(gelu(x @ w_up.T) @ w_down.T),
     "Your LayerNorm stands behind W_2: that is CogView's place for it (9.1). Count gamma's entries."),
    (lambda x, w_up, w_down, gamma, beta: standard(gelu(x @ w_up.T) @ w_down.T) * gamma + beta,
     "Your LayerNorm stands behind W_2 (CogView, 9.1), where gamma fits only if f = d."),
    (lambda x, w_up, w_down, gamma, beta: gelu(standard(x @ w_up.T) * gamma + beta) @ w_down.T,
     "You normalize what goes into the activation; section 2.1 writes LN around sigma."),
    (partial(ffn_branch, norm=lambda a: a),
     "Gain and shift, but no normalization: close to what 9.1 calls FFNGeglu."),
    (partial(ffn_branch, norm=lambda a: a / (a.square().mean(-1, keepdim=True) + 1e-5).sqrt()),
     "That is RMSNorm: after GELU the mean is far from 0, and LayerNorm takes it off."),
    (partial(ffn_branch, norm=partial(standard, correction=1)),
     "Nearly: LayerNorm's variance divides by f, not by f - 1."),
    (partial(ffn_branch, norm=partial(standard, dim=0)),
     "You take statistics over the tokens: that is BatchNorm. Every token has its own here."),
    (partial(ffn_branch, norm=partial(standard, dim=(0, 1))),
     "You take one mean and one variance of everything: say along which axis."),
    (partial(ffn_branch, end=lambda x, m: x + m),
     "The branch alone is asked for; x is LN(h) already, and what the residual adds is h."),
    (partial(ffn_branch, norm=partial(standard, eps=0)), "eps is missing: it counts where the hidden layer is small."),
    (partial(ffn_branch, norm=partial(standard, eps=1e-6)), "Your eps is smaller than the one that is asked for."),
    (partial(ffn_branch, norm=lambda a: (a - a.mean(-1, keepdim=True)) / (
        a.std(-1, keepdim=True, correction=0) + 1e-5)), "Your eps stands behind the root. It belongs to the variance."),
    (partial(ffn_branch, act=torch.relu), "That is ReLU; the paper's sigma is GELU."),
    (partial(ffn_branch, act=lambda a: a), "The activation is missing."),
    (partial(ffn_branch, shift=lambda a, beta: a), "The shift beta is missing."),
    (partial(ffn_branch, gain=lambda a, gamma: a), "The gain gamma is missing."),
])


# 3.3 ------------------------------------------------------------------------------------------------------------------

def size_inputs(generator):
    yield "12 layers of 768, 12 heads, with bias", 12, 768, 12, True
    yield "the same without bias", 12, 768, 12, False
    yield "24 layers of 1024, 16 heads, with bias", 24, 1024, 16, True
    yield "one layer of 64, 4 heads, without bias", 1, 64, 4, False


def added(layers, d, heads, bias):
    return layers * (heads + (d + 4 * d) * (1 + bias))


ADDED = Exercise(reference=added, inputs=size_inputs, tolerance=1e-9, misconceptions=[
    (lambda L, d, H, bias: added(L, d, H, False), "A LayerNorm with bias has two vectors, not one: beta is forgotten."),
    (lambda L, d, H, bias: added(L, d, H, True), "You count beta always; without bias a LayerNorm has only its gain."),
    (lambda L, d, H, bias: L * (H + 2 * d * (1 + bias)),
     "The second LayerNorm stands in the hidden layer. How wide is it there?"),
    (lambda L, d, H, bias: L * 5 * d * (1 + bias),
     "Two of the three operations are there; HeadScale has parameters too."),
    (lambda L, d, H, bias: L * (d + 5 * d * (1 + bias)), "HeadScale has one number for a head, not one for a channel."),
    (lambda L, d, H, bias: L * (d // H + 5 * d * (1 + bias)),
     "d / H is how many channels a head has. How many numbers does HeadScale need?"),
    (lambda L, d, H, bias: added(1, d, H, bias),
     "Every layer has these operations, with parameters of its own."),
    (lambda L, d, H, bias: L * (H + 7 * d * (1 + bias)),
     "norm1 and norm2 are in Pre-LN already: count only what NormFormer adds."),
    (lambda L, d, H, bias: L * (H + 5 * d) * (1 + bias),
     "You give HeadScale a shift too. It only multiplies; `bias` is about the LayerNorms."),
    (lambda L, d, H, bias: L * (H + d + 5 * d * (1 + bias)),
     "You count ResScale's d numbers a layer as well; it is an option, none of the three operations."),
    (lambda L, d, H, bias: L * (H + 4 * d * (1 + bias)), "One LayerNorm of the two is missing, the one of width d."),
    (lambda L, d, H, bias: L * (H + 9 * d * (1 + bias)),
     "8d would be what SwiGLU's first matrix gives; here the hidden layer has 4d."),
    (lambda L, d, H, bias: L * (H * d + 5 * d * (1 + bias)), "HeadScale has one number for each head, not d for each."),
])


# 3.4 ------------------------------------------------------------------------------------------------------------------

PLACES = ("norm1", "W_v", "head_scale", "W_o", "norm_attn", "norm2", "W_up", "norm_ffn", "W_down")


def undone_inputs(generator):
    for activation in ("gelu", "relu", "relu2", "swiglu"):
        yield f"{activation}", activation, False
    yield "gelu, unit q and k", "gelu", True
    yield "relu, unit q and k", "relu", True


def undone(activation, qk_norm, **other):
    straight = activation in ("relu", "relu2")            # f(c x) = c^n f(x) for c > 0
    answer = dict(norm1=qk_norm, W_v=True, head_scale=True, W_o=True, norm_attn=False, norm2=straight, W_up=straight,
                  norm_ffn=False, W_down=False)
    return [bool(x) for x in {**answer, **other}.values()]


ABOUT = {
    "norm1": "norm1's gain reaches q and k too, not only v. What do larger scores do to a softmax, and what if q and k "
             "are made unit vectors?",
    "W_v": "W_v: attention's output is linear in v. Follow the factor on from there.",
    "head_scale": "HeadScale: ratios between heads stay, but here *all* its entries are doubled.",
    "W_o": "W_o: what comes right behind it?",
    "norm_attn": "norm_attn: its gain acts after its own division. What follows it?",
    "norm2": "norm2: a factor passes through the activation only if f(c x) is a power of c times f(x), for c > 0.",
    "W_up": "W_up: a factor in front of the activation is to come out of it as a factor. Does it, with this one?",
    "norm_ffn": "norm_ffn: its gain acts after its own division. What follows it?",
    "W_down": "W_down: you may have CogView's block in mind. What follows W_2 in NormFormer's?",
}
UNDONE = Exercise(reference=undone, inputs=undone_inputs, about=dict(enumerate(ABOUT.values())), misconceptions=[
    (lambda f, qk: [False] * 9, "You say that no scale is undone. Follow W_o's: where does its output go next?"),
    (lambda f, qk: [True] * 9, "You say that all are undone. Some stand after the last norm of their branch."),
    (lambda f, qk: [not x for x in undone(f, qk)],
     "Every answer is the opposite of the right one: what does True stand for?"),
    (partial(undone, norm1=True), "norm1 is not undone in all cases: its gain reaches q and k too, not only v."),
    (partial(undone, norm1=False),
     "norm1 is undone in some cases. What is left of its gain where q and k are unit vectors?"),
    (partial(undone, W_v=False), ABOUT["W_v"]),
    (partial(undone, head_scale=False), ABOUT["head_scale"]),
    (partial(undone, W_o=False), ABOUT["W_o"]),
    (partial(undone, norm_attn=True), ABOUT["norm_attn"]),
    (partial(undone, norm_ffn=True), ABOUT["norm_ffn"]),
    (partial(undone, W_down=True), ABOUT["W_down"]),
    (partial(undone, norm2=True, W_up=True),
     "norm2 and W_up: you let a factor through every activation. Try GELU at 1 and at 2."),
    (partial(undone, norm2=False, W_up=False),
     "norm2 and W_up: there are activations through which a positive factor passes. Is one of them here?"),
    (lambda f, qk: undone(f, qk, norm2=f == "relu", W_up=f == "relu"),
     "relu2: twice the input makes four times the output. Is a factor of four harder to undo than one of two?"),
])


# 3.5 ------------------------------------------------------------------------------------------------------------------

def gradient_inputs(generator):
    for label, n, d, f in (("five tokens, d = 2, f = 6", 5, 2, 6), ("f = d", 4, 3, 3), ("one token", 1, 2, 8)):
        yield (label, normal(generator, n, f), 0.5 + torch.rand(f, generator=generator), normal(generator, d, f),
               normal(generator, n, d))
    yield ("gamma an eighth everywhere", normal(generator, 4, 8), torch.full((8,), 0.125), normal(generator, 2, 8),
           normal(generator, 4, 2))


def ffn_gradients(xhat, gamma, w_down, g, *, dw=lambda xhat, gamma, g: torch.einsum("nd,nf->df", g, xhat * gamma),
                  dgamma=lambda xhat, gamma, gw: (xhat * gw).sum(0), dxhat=lambda gw, gamma: gw * gamma):
    return dw(xhat, gamma, g), dgamma(xhat, gamma, g @ w_down), dxhat(g @ w_down, gamma)


GRADIENTS = Exercise(reference=ffn_gradients, inputs=gradient_inputs, parts=("dw_down", "dgamma", "dxhat"),
                     misconceptions=[
    (partial(ffn_gradients, dw=lambda x, gamma, g: g.T @ (x / gamma)),
     "dw_down goes the wrong way with gamma: a smaller input gives the matrix a smaller gradient, not a larger one."),
    (partial(ffn_gradients, dw=lambda x, gamma, g: g.T @ x),
     "dw_down: what does w_down multiply, xhat, or what the norm gives out?"),
    (partial(ffn_gradients, dw=lambda x, gamma, g: (x * gamma).T @ g),
     "dw_down is transposed: a gradient has its parameter's shape, (d, f)."),
    (partial(ffn_gradients, dw=lambda x, gamma, g: g.T @ (x * gamma) / len(x)),
     "dw_down: each token adds its share, no mean is taken; where the loss has one, g has it already."),
    (partial(ffn_gradients, dw=lambda x, gamma, g: g.T @ (x * gamma * gamma)),
     "dw_down: gamma once too often."),
    (partial(ffn_gradients, dgamma=lambda x, gamma, gw: x.sum(0)),
     "dgamma: the gradient that comes from above, g, is not in it."),
    (partial(ffn_gradients, dgamma=lambda x, gamma, gw: (x * gw).mean(0)),
     "dgamma: tokens' shares are summed; where the loss has a mean, g has it already."),
    (partial(ffn_gradients, dgamma=lambda x, gamma, gw: (x * gamma * gw).sum(0)),
     "dgamma: gamma's derivative has no gamma in it, since the output is linear in gamma."),
    (partial(ffn_gradients, dgamma=lambda x, gamma, gw: x * gw),
     "dgamma: all tokens share one gamma, so their shares add up."),
    (partial(ffn_gradients, dgamma=lambda x, gamma, gw: gw.sum(0)),
     "dgamma: that is beta's gradient. gamma multiplies something; where is it?"),
    (partial(ffn_gradients, dxhat=lambda gw, gamma: gw), "dxhat: between xhat and w_down stands gamma."),
    (partial(ffn_gradients, dxhat=lambda gw, gamma: gw / gamma),
     "dxhat: the backward pass multiplies by gamma, as the forward pass does."),
], without=AUTOGRAD)


# 3.6 ------------------------------------------------------------------------------------------------------------------

def stream_inputs(generator):
    for label, layers in (("three layers", 3), ("one layer", 1), ("six layers", 6)):
        yield (label, normal(generator, 2, 4, 5), normal(generator, layers, 2, 4, 5),
               0.5 + torch.rand(layers, 5, generator=generator))
    yield "lambda 1: Pre-LN's sum", normal(generator, 2, 2, 3), normal(generator, 4, 2, 2, 3), torch.ones(4, 3)
    yield ("lambda 0 in the last layer", normal(generator, 2, 3, 2), normal(generator, 2, 2, 3, 2),
           torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def stream(h, branches, lambdas, *, step=lambda h, b, scale: scale * h + b):
    for b, scale in zip(branches, lambdas):
        h = step(h, b, scale)
    return h


STREAM = Exercise(reference=stream, inputs=stream_inputs, misconceptions=[
    (partial(stream, step=lambda h, b, s: h + s * b),
     "You scale what the layer adds: that is LayerScale (9.1). ResScale's lambda stands at the residual's input."),
    (partial(stream, step=lambda h, b, s: s * (h + b)),
     "Your lambda scales the whole sum; the branch is added as it is."),
    (partial(stream, step=lambda h, b, s: s * h + (1 - s) * b),
     "That is an average of both, as nGPT takes it. Here the branch keeps its weight 1."),
    (lambda h, b, scale: scale.prod(0) * h + b.sum(0),
     "You scale only the embedding. A branch's output is in the residual of all later layers, and is scaled there."),
    (partial(stream, step=lambda h, b, s: h / s + b), "lambda multiplies the residual; you divide by it."),
    (lambda h, b, scale: h + b.sum(0), "No lambda in your answer: that is the plain residual stream."),
    (lambda h, b, scale: stream(h, b, scale.flip(0)), "The lambdas are applied in the opposite order of the layers."),
    (partial(stream, step=lambda h, b, s: s.mean() * h + b),
     "One number for all channels: section 6.1 tried a scalar. lambda_resid has one for each channel."),
    (lambda h, b, scale: scale[-1] * h + b[-1],
     "Each layer of yours starts from h0 again, so only the last one counts. It is to read what the one before left."),
    (lambda h, b, scale: scale[-1] * (h + b[:-1].sum(0)) + b[-1],
     "You apply the last layer's lambda alone; each layer has its own."),
])


# 3.7 ------------------------------------------------------------------------------------------------------------------

def time_inputs(generator):
    yield "572,000 steps, 6% slower", 572_000, 0.06
    yield "286,000 steps, 4% slower", 286_000, 0.04
    yield "230,000 steps, 2% slower", 230_000, 0.02
    yield "1,000 steps, twice as long", 1000, 1.0
    yield "no slower", 1000, 0.0
    yield "ten steps, 6% slower", 10, 0.06
    yield "ten steps, 4% slower", 10, 0.04


def whole(rounded):
    """A wrong equal_time, with whole steps."""
    def equal_time(n, slow):
        steps = rounded(n / (1 + slow))
        return steps, 1 - steps / n
    return equal_time


TIME = Exercise(reference=lambda n, slow: (n / (1 + slow), slow / (1 + slow)), inputs=time_inputs,
                parts=("steps", "fewer"), misconceptions=[
    (lambda n, slow: (n, 0.0),
     "That gives both the same steps, so NormFormer more time. The paper compares at equal time."),
    (lambda n, slow: (n * (1 - slow), slow),
     "6% longer a step is not 6% fewer steps: try the case in which a step takes twice as long."),
    (lambda n, slow: (n * (1 + slow), slow), "Slower steps, and more of them in the same time?"),
    (lambda n, slow: (n / (1 + slow), slow),
     "The steps are right. The second number is how many fewer they are, as a share of the baseline's."),
    (lambda n, slow: (n / (1 + slow / 100), slow / 100 / (1 + slow / 100)),
     "slowdown is a share already: 0.06 stands for 6%."),
    (lambda n, slow: (n / (1 + slow), n - n / (1 + slow)),
     "The steps are right. The second number is to be a share of the baseline's steps, not a count."),
    (lambda n, slow: (n / (1 + slow), 1 / (1 + slow)),
     "The steps are right. Your second number is the share that is left; how much is lost?"),
    (lambda n, slow: (n / (1 + slow), -slow / (1 + slow)),
     "The size is right, the sign is not: how many *fewer*, so a positive number."),
    (whole(round), "You round the steps; they are asked for as they are."),
    (whole(math.floor), "You cut the steps down to a whole number. Nothing is to be rounded."),
    (whole(math.ceil), "You round the steps up. Nothing is to be rounded."),
])


# 3.8 ------------------------------------------------------------------------------------------------------------------

def table_inputs(generator):
    yield "Table 6", 279.893, 223.904, 288.0, 237.0
    yield "half the steps, half the time", 100.0, 50.0, 10.0, 5.0
    yield "half the steps, no time saved", 100.0, 50.0, 10.0, 10.0
    yield "no step saved, 5% slower", 100.0, 100.0, 20.0, 21.0


def read_table(base_steps, steps, base_hours, hours):
    return steps / base_steps, hours / base_hours, hours / steps / (base_hours / base_steps) - 1


TABLE = Exercise(reference=read_table, inputs=table_inputs,
                 parts=("share of the steps", "share of the time", "longer"), misconceptions=[
    (lambda n, m, t, u: (n / m, t / u, read_table(n, m, t, u)[2]),
     "Those are speed-ups, how many times as fast. A share is what is needed of the baseline's."),
    (lambda n, m, t, u: (1 - m / n, 1 - u / t, read_table(n, m, t, u)[2]),
     "Those are the shares that are saved; asked for are those that are needed."),
    (lambda n, m, t, u: (100 * m / n, 100 * u / t, 100 * read_table(n, m, t, u)[2]),
     "Shares, please, not percentages: 0.5 for a half."),
    (lambda n, m, t, u: (m / n, u / t, u / t - 1),
     "The third: hours over hours compares runs of different lengths. How long does one step take?"),
    (lambda n, m, t, u: (m / n, u / t, u / m / (t / n)),
     "The third is 1 too large: how much *longer*, not how many times as long."),
    (lambda n, m, t, u: (m / n, u / t, t / n / (u / m) - 1),
     "The third has baseline and NormFormer exchanged: its sign says that a step got shorter."),
    (lambda n, m, t, u: (m / n, m / n, 0.0),
     "A step of NormFormer's takes longer: the share of the time is another one."),
    (lambda n, m, t, u: (m / n, u / t, 1 - t / n / (u / m)),
     "The third: longer than what? You divide by NormFormer's own step; the baseline's is the measure."),
    (lambda n, m, t, u: (n / m - 1, t / u - 1, read_table(n, m, t, u)[2]),
     "Those are gains in speed, in how much more is done per step or hour; a share is what is needed over what was."),
])


# 3.9 ------------------------------------------------------------------------------------------------------------------

SLOPES = {"Fig. 5": 5e-5, "9.1": 0.1 / 1000}


def rate_inputs(generator):
    yield "Table 8's baseline", "9.1", 94
    yield "Table 8's NormFormer", "9.1", 200
    yield "200 steps in Figure 5's test", "Fig. 5", 200
    yield "1,000 steps in Figure 5's test", "Fig. 5", 1000
    yield "201 steps in Figure 5's test", "Fig. 5", 201


def death(test, step):
    other = next(name for name in SLOPES if name != test)
    return step * SLOPES[test], step * SLOPES[test] / SLOPES[other]


def step_before(test, step):
    rate, other_step = death(test, step - 1)
    return rate, other_step + 1


DEATH = Exercise(reference=death, inputs=rate_inputs, tolerance=1e-6,
                 parts=("rate", "step in the other test"), misconceptions=[
    (lambda test, step: (step * 5e-5, step),
     "One slope for both tests: 9.1 goes to 0.1 in 1,000 steps. And steps do not compare between different slopes."),
    (lambda test, step: (step * 1e-4, step), "One slope for both tests: Figure 5's caption has another than 9.1."),
    (lambda test, step: (death(test, step)[0], step),
     "The rate is right. But the same number of steps is another rate in the other test."),
    (lambda test, step: (death(test, step)[0], step * step / death(test, step)[1]),
     "The rate is right. The steeper test gets there in fewer steps; yours takes more."),
    (lambda test, step: (0.1 if test == "9.1" else 5e-5, death(test, step)[1]),
     "That number describes the test, not the step at which it ended. What is the rate at that step?"),
    (lambda test, step: (death(test, step)[1] * SLOPES[test], step / (death(test, step)[1] / step)),
     "You have the two tests' slopes exchanged."),
    (lambda test, step: death(test, step - 1),
     "Your rate is that of the step before: at step n it has grown n times."),
    (step_before, "You count the steps from 1, at rate 0. At step n the rate has grown n times, in both tests."),
    (lambda test, step: (death(test, step)[0],) * 2,
     "The second number is to be a step of the other test, not a rate."),
    (lambda test, step: (step / 1000, death(test, step)[1]),
     "That is how far the run has come as a share of 1,000 steps. The rate at the end of the ramp is not 1."),
    (lambda test, step: (death(test, step)[0], int(death(test, step)[1])),
     "The second number is cut down to a whole one (//, int or round); the rates are then no longer the same."),
])


# 3.10 -----------------------------------------------------------------------------------------------------------------

def embedding_inputs(generator):
    yield "the default, 4 layers of 128", 0.02, 4, 128
    yield "std 1, 4 layers of 128", 1.0, 4, 128
    yield "0.02, 12 layers of 768", 0.02, 12, 768
    yield "one layer", 0.5, 1, 64


def stream_share(s, layers, d, *, attention=1.0, ffn=lambda layers, d: 4 * d * 0.02 ** 2 / (2 * layers),
                 number=lambda n: n, size=math.sqrt, cosine=lambda c: c):
    variance = s ** 2 + number(layers) * (attention + ffn(layers, d))
    return size(variance), cosine(s / math.sqrt(variance))


def without_embedding(s, layers, d):
    whole = math.sqrt(stream_share(s, layers, d)[0] ** 2 - s ** 2)
    return whole, s / whole


def summed(s, layers, d):
    std = s + layers * (1 + math.sqrt(4 * d * 0.02 ** 2 / (2 * layers)))
    return std, s / std


EMBEDDING = Exercise(reference=stream_share, inputs=embedding_inputs, tolerance=1e-4,
                     parts=("size", "cosine"), misconceptions=[
    (partial(stream_share, cosine=lambda c: c * c),
     "The cosine: that is the share of the variance. How does a cosine follow from it?"),
    (lambda s, L, d: (s, 1.0), "Each branch adds something of its own, and the stream grows with it."),
    (partial(stream_share, ffn=lambda L, d: 1.0),
     "The feed-forward branch ends in W_2, not in a norm. How large is W_2 times a vector of f entries of variance 1?"),
    (partial(stream_share, ffn=lambda L, d: 0.0),
     "Only attention's branches are counted, or W_2 as if it read one entry. The feed-forward ones are small here, but "
     "not nothing."),
    (without_embedding, "The embedding itself is missing in your whole: its variance, s^2, counts as well."),
    (summed, "You add standard deviations. For independent vectors it is the variances that add up."),
    (partial(stream_share, ffn=lambda L, d: 4 * d * 0.02 ** 2),
     "W_2 starts smaller than the other matrices: see init_weights in model.py."),
    (partial(stream_share, ffn=lambda L, d: d * 0.02 ** 2 / (2 * L)),
     "W_2 sums over the hidden layer's entries. How many are they?"),
    (partial(stream_share, size=lambda variance: variance),
     "The size: that is the variance; the standard deviation is asked for."),
    (partial(stream_share, attention=0.0),
     "Attention's branch ends in a LayerNorm: what size is that, whatever goes in?"),
    (partial(stream_share, number=lambda layers: 1),
     "That is the stream after the first layer. All of them add to it."),
    (partial(stream_share, ffn=lambda L, d: 4 * d * 0.02 / math.sqrt(2 * L)),
     "The feed-forward branch: 0.02 / sqrt(2L) is a standard deviation; you add variances."),
    (partial(stream_share, number=lambda layers: 2 * layers),
     "Every layer has two branches, but you count each of them twice."),
])


# 3.11 -----------------------------------------------------------------------------------------------------------------

SIZES = dict(norm1=(1,), head_scale=(0,), w_o=(1, 1), norm_attn=(1,), norm2=(1,), w_up=(4, 1), norm_ffn=(4,),
             w_down=(1, 4), resid_scale=(1,))          # sides in units of d; 0 for the number of heads


def block_inputs(generator):
    for label, d, n_head in (("2 heads of 3", 6, 2), ("4 heads of 2", 8, 4), ("lambda_resid 1", 4, 2)):
        p = {}
        for name, sides in SIZES.items():
            p[name] = normal(generator, *(n * d if n else n_head for n in sides))
            p[name] = 1 + 0.5 * p[name] if p[name].dim() == 1 else p[name] / d ** 0.5
        if "lambda" in label:
            p["resid_scale"] = torch.ones(d)
        w_v = normal(generator, d, d)

        def attention(x, w_v=w_v, n_head=n_head):           # the mean over all tokens so far, in place of a softmax
            v = (x @ w_v).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
            return torch.stack(v.chunk(n_head, dim=-1), dim=1)
        yield label, normal(generator, 2, 5, d), attention, p
    for label, name in (("w_o of zeros: the feed-forward branch alone", "w_o"),
                        ("w_down of zeros: attention alone", "w_down")):
        yield label, normal(generator, 2, 5, d), attention, {**p, name: 0 * p[name]}
    small = {name: 0.01 * x if name in ("w_o", "w_up") else x for name, x in p.items()}
    yield "small matrices, where eps counts", 0.01 * normal(generator, 2, 5, d), attention, small


def block(h, attention, p, *, heads=lambda y, p: join(y * p["head_scale"][:, None, None]), around=lambda h, x, p: h,
          attn=lambda y, p: standard(y @ p["w_o"].T) * p["norm_attn"],
          hidden=lambda a, p: standard(gelu(a)) * p["norm_ffn"],
          ffn=lambda a, p: a @ p["w_down"].T, last=lambda h, m, p: p["resid_scale"] * h + m,
          first=lambda h, p: standard(h) * p["norm1"], second=lambda a, p: standard(a) * p["norm2"]):
    x = first(h, p)
    a = around(h, x, p) + attn(heads(attention(x), p), p)
    u = second(a, p) @ p["w_up"].T
    return last(a, ffn(hidden(u, p), p), p)


def parallel(h, attention, p):
    """Both branches read the block's input."""
    attended = block(h, attention, p, ffn=lambda a, p: 0.0, last=lambda h, m, p: h)
    a = standard(gelu(standard(h) * p["norm2"] @ p["w_up"].T)) * p["norm_ffn"]
    return p["resid_scale"] * attended + a @ p["w_down"].T


def postln(h, attention, p):
    a = standard(h + join(attention(standard(h) * p["norm1"]) * p["head_scale"][:, None, None]) @ p["w_o"].T)
    return block(a * p["norm_attn"], attention, p, attn=lambda y, p: 0.0)


def norms_exchanged(h, attention, p):
    return block(h, attention, {**p, "norm1": p["norm2"], "norm2": p["norm1"]})


BLOCK = Exercise(reference=block, inputs=block_inputs, tolerance=5e-3, misconceptions=[
    (partial(block, heads=lambda y, p: join(y)), "HeadScale is missing."),
    (partial(block, attn=lambda y, p: y @ p["w_o"].T), "The LayerNorm behind attention is missing."),
    (partial(block, hidden=lambda a, p: gelu(a)), "The LayerNorm in the feed-forward branch is missing."),
    (partial(block, hidden=lambda a, p: gelu(a), ffn=lambda a, p: standard(a @ p["w_down"].T)),
     "The feed-forward norm stands behind w_down (CogView)."),
    (partial(block, last=lambda h, m, p: h + m), "lambda_resid is missing."),
    (partial(block, hidden=lambda a, p: gelu(standard(a) * p["norm_ffn"])),
     "norm_ffn stands in front of the activation in your block; section 2.1 writes LN around sigma."),
    (partial(block, last=lambda a, m, p: p["resid_scale"] * standard(a) * p["norm2"] + m),
     "Your second residual adds to what norm2 gives out; norm2 is for the branch alone."),
    (partial(block, last=lambda h, m, p: h + p["resid_scale"] * m),
     "lambda_resid scales the branch in your block (LayerScale)."),
    (partial(block, last=lambda h, m, p: p["resid_scale"] * (h + m)),
     "lambda_resid scales the whole output of your block."),
    (partial(block, around=lambda h, x, p: x),
     "Your first residual adds to the normalized h; the stream itself goes round the branch."),
    (partial(block, around=lambda h, x, p: p["resid_scale"] * h, last=lambda h, m, p: h + m),
     "lambda_resid stands at the first residual; section 3 puts it at the second."),
    (partial(block, attn=lambda y, p: standard(y) * p["norm_attn"] @ p["w_o"].T),
     "Your attention norm stands before w_o. Section 2.1 puts LN around all of HeadScaleMHA, W_o included."),
    (partial(block, attn=lambda y, p: standard(y @ p["w_o"].T)), "norm_attn's gain is missing."),
    (partial(block, around=lambda h, x, p: 0.0), "The first residual is missing."),
    (norms_exchanged,
     "norm1 and norm2 are exchanged: norm1 stands before attention, norm2 before the feed-forward part."),
    (postln, "norm_attn stands behind the sum in your block, as in Post-LN; it belongs to the branch."),
    (partial(block, hidden=lambda a, p: standard(torch.relu(a)) * p["norm_ffn"]), "That is ReLU; use gelu."),
    (partial(block, hidden=lambda a, p: standard(gelu(a))), "norm_ffn's gain is missing."),
    (partial(block, first=lambda h, p: h), "norm1 is missing: attention reads the stream as it is."),
    (partial(block, first=lambda h, p: standard(h)), "norm1's gain is missing."),
    (partial(block, second=lambda a, p: a), "norm2 is missing: w_up reads the stream as it is."),
    (partial(block, second=lambda a, p: standard(a)), "norm2's gain is missing."),
    (partial(block, around=lambda h, x, p: p["resid_scale"] * h),
     "lambda_resid stands at both residuals in your block; section 3 has it at the second alone."),
    (parallel, "Both your branches read the block's input; the second one reads what the first has changed."),
])


# What holds of every right answer: said where none of the known mistakes fits ----------------------------------------

PROPERTIES = {
    "3.1": [
        (lambda y, heads, gamma, w_o: not (gamma == 1).all() or near(y, join(heads) @ w_o.T),
         "Even with all gammas 1, where nothing is scaled, yours is off: look at how the heads are joined, at w_o, and "
         "at what you add."),
        (lambda y, heads, gamma, w_o: False,
         "With all gammas 1 yours is right. Which channels, and where, does each gamma meet?")],
    "3.2": [
        (lambda y, x, w_up, w_down, gamma, beta: False,
         "Look at your hidden layer between norm and gamma: has each token mean 0 and mean square 1 there? Then gamma "
         "multiplies, beta is added, and w_down comes last.")],
    "3.3": [
        (lambda y, L, d, H, bias: near(y / L, round(float(y) / L), 1e-9),
         "Yours is no multiple of the number of layers: what stands only once in the model?"),
        (lambda y, L, d, H, bias: bias or near(y, added(L, d, H, False)),
         "Even without bias yours is off: for one layer, write down how many numbers each of the three has."),
        (lambda y, L, d, H, bias: False, "Without bias yours is right. Which of the three get a shift, and how wide?")],
    "3.5": [
        (lambda y, xhat, gamma, w, g: y[0].shape == w.shape, "dw_down has to have w_down's shape."),
        (lambda y, xhat, gamma, w, g: y[1].shape == gamma.shape, "dgamma has to have gamma's shape: which axis is summed?"),
        (lambda y, xhat, gamma, w, g: near((y[0] * w).sum(), (g * ((gamma * xhat) @ w.T)).sum()),
         "dw_down: the output is linear in w_down, so dw_down * w_down should have the same sum as g * output. It does "
         "not."),
        (lambda y, xhat, gamma, w, g: near((y[1] * gamma).sum(), (g * ((gamma * xhat) @ w.T)).sum()),
         "dgamma: the output is linear in gamma, so dgamma * gamma should have the same sum as g * output. It does "
         "not."),
        (lambda y, xhat, gamma, w, g: near((y[2] * xhat).sum(), (g * ((gamma * xhat) @ w.T)).sum()),
         "dxhat: the output is linear in xhat, so dxhat * xhat should have the same sum as g * output. It does not.")],
    "3.6": [
        (lambda y, h, b, s: s[-1].any() or near(y, b[-1]),
         "With lambda 0 in the last layer only that layer's branch is left. In yours there is something else."),
        (lambda y, h, b, s: not (s == 1).all() or near(y, h + b.sum(0)),
         "With all lambdas 1 the stream is a plain sum of its start and all branches. Yours is not."),
        (lambda y, h, b, s: len(s) > 1 or near(y, s[0] * h + b[0]), "Even with one layer yours is off."),
        (lambda y, h, b, s: False, "With one layer yours is right. What does the second one read?")],
    "3.7": [
        (lambda y, n, slow: near(y[0] * (1 + slow), n, 1e-5),
         "Your steps, each so much longer, do not take as long as the baseline's."),
        (lambda y, n, slow: near(y[1], 1 - y[0] / n, 1e-5),
         "Your second number does not fit your first: how many of the baseline's steps are missing, as a share?")],
    "3.8": [
        (lambda y, n, m, t, u: (n, m) != (100, 50) or near(y[0], 0.5), "Half the steps are a share of 0.5."),
        (lambda y, n, m, t, u: (t, u) != (10, 5) or near(y[1], 0.5), "Half the time is a share of 0.5."),
        (lambda y, n, m, t, u: (m / n, u / t) != (0.5, 0.5) or near(y[2], 0),
         "The third: half the steps in half the time, so a step takes as long as before."),
        (lambda y, n, m, t, u: (m / n, u / t) != (0.5, 1.0) or near(y[2], 1),
         "The third: half the steps in the same time. How much longer does one take?")],
    "3.9": [
        (lambda y, test, step: test != "9.1" or near(y[0], step * 1e-4, 1e-6), "9.1: the rate goes from 0 to 0.1 in "
                                                                              "1,000 steps. Yours is another."),
        (lambda y, test, step: test == "9.1" or near(y[0], step * 5e-5, 1e-6),
         "Fig. 5: each step adds what its caption says. Yours adds something else."),
        (lambda y, test, step: near(y[1] * (5e-5 if test == "9.1" else 1e-4), step * SLOPES[test], 1e-6),
         "At your second number, the other test has another rate than this one at `step`.")],
    "3.10": [
        (lambda y, s, L, d: near(y[0] * y[1], s, 1e-4),
         "Your two numbers do not fit: the cosine is the embedding's deviation over the whole one's."),
        (lambda y, s, L, d: y[0] ** 2 >= s ** 2 + L, "Attention's branch alone adds a variance of 1 in each layer. Yours "
                                                    "has less in all."),
        (lambda y, s, L, d: y[0] ** 2 > s ** 2 + L * (1 + 1e-4),
         "The feed-forward branches add something too. In yours they add nothing."),
        (lambda y, *_: False, "Attention's part is there, and too much or too little from the feed-forward branch: its "
                              "width, the start of W_2, and how often it is added.")],
    "3.11": [
        (lambda y, h, attention, p: p["w_o"].any() or near(y, block(h, attention, p), 5e-3),
         "With w_o of zeros, where attention adds nothing, yours is off: look at norm2, the feed-forward "
         "branch and resid_scale."),
        (lambda y, h, attention, p: p["w_down"].any() or near(y, block(h, attention, p), 5e-3),
         "With w_down of zeros, where the feed-forward branch adds nothing, yours is off: look at norm1, "
         "HeadScale, w_o, norm_attn and resid_scale."),
        (lambda y, h, attention, p: False,
         "Each of the two branches alone is right. Does the second one read what the first has made of the "
         "stream?")],
}


EXERCISES = {"3.1": HEADS, "3.2": FFN, "3.3": ADDED, "3.4": UNDONE, "3.5": GRADIENTS, "3.6": STREAM, "3.7": TIME,
             "3.8": TABLE, "3.9": DEATH, "3.10": EMBEDDING, "3.11": BLOCK}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
