"""
Lesson 3, NormFormer: three more norms, what they do to gradients, and how large an embedding is.

Section, table and figure numbers are those of NormFormer (Shleifer, Weston and Ott 2021). See
grader.py for the form. A keyword of a reference is a step of it, or something that can go wrong
with it: functools.partial makes the wrong answer. The references use nothing of model.py; where it
has the same thing, the notebook compares the two.
"""
import math
from functools import partial

import torch

from answers import near
from grader import AUTOGRAD, Exercise
from pieces import heads_one_by_one, never, randn, same, side_by_side


gelu = partial(torch.nn.functional.gelu, approximate="tanh")


def standard(x, dim=-1, eps=1e-5, correction=0):
    """Mean 0 and variance 1 along dim."""
    mean = x.mean(dim, keepdim=True)
    variance = x.var(dim, keepdim=True, correction=correction)
    return (x - mean) / (variance + eps).sqrt()


# 3.1 ----------------------------------------------------------------------------------------------

def head_inputs(generator):
    def case(batch, heads, length, d_k, gamma=None):
        y = randn(generator, batch, heads, length, d_k)
        if gamma is None:
            gamma = randn(generator, heads)
        d = heads * d_k
        return y, gamma, randn(generator, d, d)

    yield "3 heads of 2 channels", *case(2, 3, 4, 2)
    yield "as many tokens as heads", *case(2, 4, 4, 2)
    yield "a silent head", *case(2, 2, 3, 3, gamma=torch.tensor([0.0, 2.0]))
    yield "all gammas 1", *case(3, 2, 5, 4, gamma=torch.ones(2))


def head_scale(y, gamma, w_o, *, joined=side_by_side):
    return joined(y * gamma[:, None, None]) @ w_o.T


def heads_in_turns(y):
    return y.permute(0, 2, 3, 1).flatten(2)


def channels_in_turns(y, gamma, w_o):
    factors = gamma.repeat(y.shape[-1])
    return side_by_side(y) * factors @ w_o.T


def behind_w_o(y, gamma, w_o):
    factors = gamma.repeat_interleave(y.shape[-1])
    return side_by_side(y) @ w_o.T * factors


HEADS = Exercise(reference=head_scale, inputs=head_inputs, misconceptions={
    "You scale what comes out of W_o: there every channel is a mixture of all heads, and no "
    "head's own any more.":
        behind_w_o,
    "Your gammas go round channel by channel. A head's channels are neighbours and share one "
    "number.":
        channels_in_turns,
    "The scaling is right. But (B, H, T, d_k) cannot be read as (B, T, d) without moving an "
    "axis.":
        partial(head_scale, joined=heads_one_by_one),
    "The scaling is right. But in your joined vector the heads take turns, a channel each: which "
    "axis goes last?":
        partial(head_scale, joined=heads_in_turns),
    "torch stores a linear map as (out, in): look at what multiplies w_o, its rows or its "
    "columns.":
        lambda y, gamma, w_o: head_scale(y, gamma, w_o.T),
    "Your gammas met the token axis (broadcasting lines up the last axes first). Which axis "
    "counts the heads?":
        lambda y, gamma, w_o: side_by_side(y * gamma[:, None]) @ w_o.T,
})


# 3.2 ----------------------------------------------------------------------------------------------

def ffn_inputs(generator):
    def case(n, d, f):
        x = randn(generator, n, d)
        w_up = randn(generator, f, d)
        w_down = randn(generator, d, f)
        return x, w_up, w_down, 1 + randn(generator, f), randn(generator, f)

    yield "four tokens, d = 3, f = 12", *case(4, 3, 12)
    yield "f = d", *case(3, 8, 8)
    yield "two tokens", *case(2, 4, 16)
    small = 0.003 * randn(generator, 8, 3)
    x = randn(generator, 4, 3)
    w_down = randn(generator, 3, 8)
    gamma = 1 + randn(generator, 8)
    yield "a small w_up, where eps counts", x, small, w_down, gamma, randn(generator, 8)


def ffn_branch(x, w_up, w_down, gamma, beta, *, act=gelu, norm=standard):
    a = norm(act(x @ w_up.T)) * gamma + beta
    return a @ w_down.T


def all_behind_w_down(x, w_up, w_down, gamma, beta):
    m = gelu(x @ w_up.T) @ w_down.T
    return standard(m) * gamma + beta


def norm_before_gelu(x, w_up, w_down, gamma, beta):
    z = standard(x @ w_up.T) * gamma + beta
    return gelu(z) @ w_down.T


def rms(a):
    return a / (a.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def eps_behind_root(a):
    deviation = a.std(-1, keepdim=True, correction=0)
    return (a - a.mean(-1, keepdim=True)) / (deviation + 1e-5)


FFN = Exercise(                                             # both forms of GELU pass
    reference=ffn_branch, inputs=ffn_inputs, tolerance=5e-3, misconceptions={
    "Your LayerNorm stands behind W_2 (CogView, 9.1), where gamma fits only if f = d.":
        all_behind_w_down,
    "You normalize what goes into the activation; section 2.1 writes LN around sigma.":
        norm_before_gelu,
    "That is RMSNorm: after GELU the mean is far from 0, and LayerNorm takes it off.":
        partial(ffn_branch, norm=rms),
    "Nearly: LayerNorm's variance divides by f, not by f - 1.":
        partial(ffn_branch, norm=partial(standard, correction=1)),
    "You take statistics over the tokens: that is BatchNorm. Every token has its own here.":
        partial(ffn_branch, norm=partial(standard, dim=0)),
    "The branch alone is asked for; x is LN(h) already, and what the residual adds is h.":
        lambda x, right: x + right,
    "eps is missing: it counts where the hidden layer is small.":
        partial(ffn_branch, norm=partial(standard, eps=0)),
    "Your eps is smaller than the one that is asked for.":
        partial(ffn_branch, norm=partial(standard, eps=1e-6)),
    "Your eps stands behind the root. It belongs to the variance.":
        partial(ffn_branch, norm=eps_behind_root),
    "That is ReLU; the paper's sigma is GELU.":
        partial(ffn_branch, act=torch.relu),
    "The activation is missing.":
        partial(ffn_branch, act=same),
})


# 3.3 ----------------------------------------------------------------------------------------------

def size_inputs(generator):
    yield "12 layers of 768, 12 heads, with bias", 12, 768, 12, True
    yield "the same without bias", 12, 768, 12, False
    yield "24 layers of 1024, 16 heads, with bias", 24, 1024, 16, True
    yield "one layer of 64, 4 heads, without bias", 1, 64, 4, False


def added(layers, d, heads, bias, *, norms=(1, 4)):
    """norms: the widths of the LayerNorms that are added, in units of d."""
    vectors = 1 + bias                                      # gain and shift
    return layers * (heads + vectors * sum(norms) * d)


ADDED = Exercise(reference=added, inputs=size_inputs, tolerance=1e-9, misconceptions={
    "A LayerNorm with bias has two vectors, not one: beta is forgotten.":
        lambda layers, d, heads: added(layers, d, heads, False),
    "You count beta always; without bias a LayerNorm has only its gain.":
        lambda layers, d, heads: added(layers, d, heads, True),
    "The second LayerNorm stands in the hidden layer. How wide is it there?":
        partial(added, norms=(1, 1)),
    "Two of the three operations are there; HeadScale has parameters too.":
        lambda layers, d, bias: added(layers, d, 0, bias),
    "HeadScale has one number for a head, not one for a channel.":
        lambda layers, d, bias: added(layers, d, d, bias),
    "d / H is how many channels a head has. How many numbers does HeadScale need?":
        lambda layers, d, heads, bias: added(layers, d, d // heads, bias),
    "norm1 and norm2 are in Pre-LN already: count only what NormFormer adds.":
        partial(added, norms=(1, 4, 1, 1)),
    "You give HeadScale a shift too. It only multiplies; `bias` is about the LayerNorms.":
        lambda layers, d, heads, bias: added(layers, d, heads * (1 + bias), bias),
    "You count ResScale's d numbers a layer as well; it is an option, none of the three "
    "operations.":
        lambda layers, d, heads, bias: added(layers, d, heads + d, bias),
    "One LayerNorm of the two is missing, the one of width d.":
        partial(added, norms=(4,)),
    "8d would be what SwiGLU's first matrix gives; here the hidden layer has 4d.":
        partial(added, norms=(1, 8)),
    "HeadScale has one number for each head, not d for each.":
        lambda layers, d, heads, bias: added(layers, d, heads * d, bias),
})


# 3.4 ----------------------------------------------------------------------------------------------

def undone_inputs(generator):
    yield "gelu", "gelu", False
    yield "relu", "relu", False
    yield "relu2", "relu2", False
    yield "swiglu", "swiglu", False
    yield "gelu, unit q and k", "gelu", True
    yield "relu, unit q and k", "relu", True


def undone(activation, qk_norm, **other):
    """Nine answers, in the order of a block's parts. other: wrong ones, by their names."""
    straight = activation in ("relu", "relu2")              # f(c x) = c^n f(x) for c > 0
    answers = {
        "norm1": qk_norm,
        "W_v": True,
        "head_scale": True,
        "W_o": True,
        "norm_attn": False,
        "norm2": straight,
        "W_up": straight,
        "norm_ffn": False,
        "W_down": False,
    }
    answers.update(other)
    return list(answers.values())


def relu_alone(activation, qk_norm):
    is_relu = activation == "relu"
    return undone(activation, qk_norm, norm2=is_relu, W_up=is_relu)


ABOUT = {
    "norm1": "norm1's gain reaches q and k too, not only v. What do larger scores do to a softmax, "
             "and what if q and k are made unit vectors?",
    "W_v": "W_v: attention's output is linear in v. Follow the factor on from there.",
    "head_scale": "HeadScale: ratios between heads stay, but here *all* its entries are doubled.",
    "W_o": "W_o: what comes right behind it?",
    "norm_attn": "norm_attn: its gain acts after its own division. What follows it?",
    "norm2": "norm2: a factor passes through the activation only if f(c x) is a power of c times "
             "f(x), for c > 0.",
    "W_up": "W_up: a factor in front of the activation is to come out of it as a factor. Does it, "
            "with this one?",
    "norm_ffn": "norm_ffn: its gain acts after its own division. What follows it?",
    "W_down": "W_down: you may have CogView's block in mind. What follows W_2 in NormFormer's?",
}
BY_PLACE = dict(enumerate(ABOUT.values()))
UNDONE = Exercise(reference=undone, inputs=undone_inputs, about=BY_PLACE, misconceptions={
    "You say that no scale is undone. Follow W_o's: where does its output go next?":
        lambda: [False] * 9,
    "You say that all are undone. Some stand after the last norm of their branch.":
        lambda: [True] * 9,
    "norm2 and W_up: you let a factor through every activation. Try GELU at 1 and at 2.":
        partial(undone, norm2=True, W_up=True),
    "norm2 and W_up: there are activations through which a positive factor passes. Is one of them "
    "here?":
        partial(undone, norm2=False, W_up=False),
    "relu2: twice the input makes four times the output. Is a factor of four harder to undo than "
    "one of two?":
        relu_alone,
})


# 3.5 ----------------------------------------------------------------------------------------------

def gradient_inputs(generator):
    def case(n, d, f):
        xhat = randn(generator, n, f)
        gamma = 0.5 + torch.rand(f, generator=generator)
        return xhat, gamma, randn(generator, d, f), randn(generator, n, d)

    yield "five tokens, d = 2, f = 6", *case(5, 2, 6)
    yield "f = d", *case(4, 3, 3)
    yield "one token", *case(1, 2, 8)
    xhat = randn(generator, 4, 8)
    eighths = torch.full((8,), 0.125)
    w_down = randn(generator, 2, 8)
    yield "gamma an eighth everywhere", xhat, eighths, w_down, randn(generator, 4, 2)


def ffn_gradients(xhat, gamma, w_down, g):
    above = g @ w_down                                      # the gradient at gamma xhat, (N, f)
    return g.T @ (xhat * gamma), (xhat * above).sum(0), above * gamma


GRADIENTS = Exercise(reference=ffn_gradients, inputs=gradient_inputs,
                     parts=("dw_down", "dgamma", "dxhat"), misconceptions={
    "dw_down: what does w_down multiply, xhat, or what the norm gives out?":
        lambda xhat, g, dgamma, dxhat: (g.T @ xhat, dgamma, dxhat),
    "dgamma: the gradient that comes from above, g, is not in it.":
        lambda dw_down, xhat, dxhat: (dw_down, xhat.sum(0), dxhat),
    "dgamma: gamma's derivative has no gamma in it, since the output is linear in gamma.":
        lambda dw_down, gamma, dgamma, dxhat: (dw_down, gamma * dgamma, dxhat),
    "dgamma: that is beta's gradient. gamma multiplies something; where is it?":
        lambda dw_down, g, w_down, dxhat: (dw_down, (g @ w_down).sum(0), dxhat),
    "dxhat: between xhat and w_down stands gamma.":
        lambda dw_down, dgamma, g, w_down: (dw_down, dgamma, g @ w_down),
}, without=AUTOGRAD)


# 3.6 ----------------------------------------------------------------------------------------------

def stream_inputs(generator):
    def case(layers):
        h = randn(generator, 2, 4, 5)
        branches = randn(generator, layers, 2, 4, 5)
        return h, branches, 0.5 + torch.rand(layers, 5, generator=generator)

    yield "three layers", *case(3)
    yield "one layer", *case(1)
    yield "six layers", *case(6)
    h = randn(generator, 2, 2, 3)
    yield "lambda 1: Pre-LN's sum", h, randn(generator, 4, 2, 2, 3), torch.ones(4, 3)
    h = randn(generator, 2, 3, 2)
    last_of_zeros = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    yield "lambda 0 in the last layer", h, randn(generator, 2, 2, 3, 2), last_of_zeros


def res_scale(h, branch, scale):
    return scale * h + branch


def stream(h, branches, lambdas, *, step=res_scale):
    for branch, scale in zip(branches, lambdas):
        h = step(h, branch, scale)
    return h


def last_lambda_alone(h, branches, lambdas):
    before = h + branches[:-1].sum(0)
    return lambdas[-1] * before + branches[-1]


STREAM = Exercise(reference=stream, inputs=stream_inputs, misconceptions={
    "You scale what the layer adds: that is LayerScale (9.1). ResScale's lambda stands at the "
    "residual's input.":
        partial(stream, step=lambda h, branch, scale: h + scale * branch),
    "Your lambda scales the whole sum; the branch is added as it is.":
        partial(stream, step=lambda h, branch, scale: scale * (h + branch)),
    "You scale only the embedding. A branch's output is in the residual of all later layers, and "
    "is scaled there.":
        lambda h, branches, lambdas: lambdas.prod(0) * h + branches.sum(0),
    "lambda multiplies the residual; you divide by it.":
        partial(stream, step=lambda h, branch, scale: h / scale + branch),
    "The lambdas are applied in the opposite order of the layers.":
        lambda h, branches, lambdas: stream(h, branches, lambdas.flip(0)),
    "One number for all channels: section 6.1 tried a scalar. lambda_resid has one for each "
    "channel.":
        partial(stream, step=lambda h, branch, scale: scale.mean() * h + branch),
    "Each layer of yours starts from h0 again, so only the last one counts. It is to read what "
    "the one before left.":
        lambda h, branches, lambdas: lambdas[-1] * h + branches[-1],
    "You apply the last layer's lambda alone; each layer has its own.":
        last_lambda_alone,
})


# 3.7 ----------------------------------------------------------------------------------------------

def time_inputs(generator):
    yield "572,000 steps, 6% slower", 572_000, 0.06
    yield "286,000 steps, 4% slower", 286_000, 0.04
    yield "230,000 steps, 2% slower", 230_000, 0.02
    yield "1,000 steps, twice as long", 1000, 1.0
    yield "no slower", 1000, 0.0
    yield "ten steps, 6% slower", 10, 0.06
    yield "ten steps, 4% slower", 10, 0.04


def equal_time(n, slow):
    return n / (1 + slow), slow / (1 + slow)


TIME = Exercise(reference=equal_time, inputs=time_inputs, parts=("steps", "fewer"), misconceptions={
    "That gives both the same steps, so NormFormer more time. The paper compares at equal time.":
        lambda n: (n, 0.0),
    "6% longer a step is not 6% fewer steps: try the case in which a step takes twice as long.":
        lambda n, slow: (n * (1 - slow), slow),
    "Slower steps, and more of them in the same time?":
        lambda n, slow: (n * (1 + slow), slow),
    "The steps are right. The second number is how many fewer they are, as a share of the "
    "baseline's.":
        lambda slow, steps: (steps, slow),
    "slowdown is a share already: 0.06 stands for 6%.":
        lambda n, slow: equal_time(n, slow / 100),
})


# 3.8 ----------------------------------------------------------------------------------------------

def table_inputs(generator):
    yield "Table 6", 279.893, 223.904, 288.0, 237.0
    yield "half the steps, half the time", 100.0, 50.0, 10.0, 5.0
    yield "half the steps, no time saved", 100.0, 50.0, 10.0, 10.0
    yield "no step saved, 5% slower", 100.0, 100.0, 20.0, 21.0


def read_table(base_steps, steps, base_hours, hours):
    longer = (hours / steps) / (base_hours / base_steps) - 1
    return steps / base_steps, hours / base_hours, longer


TABLE = Exercise(reference=read_table, inputs=table_inputs,
                 parts=("share of the steps", "share of the time", "longer"), misconceptions={
    "The third: hours over hours compares runs of different lengths. How long does one step "
    "take?":
        lambda right: (right[0], right[1], right[1] - 1),
    "The third has baseline and NormFormer exchanged: its sign says that a step got shorter.":
        lambda right: (right[0], right[1], 1 / (1 + right[2]) - 1),
    "A step of NormFormer's takes longer: the share of the time is another one.":
        lambda right: (right[0], right[0], 0.0),
    "The third: longer than what? You divide by NormFormer's own step; the baseline's is the "
    "measure.":
        lambda right: (right[0], right[1], 1 - 1 / (1 + right[2])),
    "Those are gains in speed, in how much more is done per step or hour; a share is what is "
    "needed over what was.":
        lambda right: (1 / right[0] - 1, 1 / right[1] - 1, right[2]),
})


# 3.9 ----------------------------------------------------------------------------------------------

SLOPES = {"Fig. 5": 5e-5, "9.1": 0.1 / 1000}            # how much each step adds to the rate
OTHER = {"Fig. 5": "9.1", "9.1": "Fig. 5"}
NUMBERS = {"Fig. 5": 5e-5, "9.1": 0.1}                 # in the texts


def rate_inputs(generator):
    yield "Table 8's baseline", "9.1", 94
    yield "Table 8's NormFormer", "9.1", 200
    yield "200 steps in Figure 5's test", "Fig. 5", 200
    yield "1,000 steps in Figure 5's test", "Fig. 5", 1000
    yield "201 steps in Figure 5's test", "Fig. 5", 201


def death(test, step, *, first=0):
    """first: the step at rate 0."""
    rate = (step - first) * SLOPES[test]
    return rate, rate / SLOPES[OTHER[test]] + first


DEATH = Exercise(reference=death, inputs=rate_inputs, tolerance=1e-6,
                 parts=("rate", "step in the other test"), misconceptions={
    "The rate is right. The steeper test gets there in fewer steps; yours takes more.":
        lambda step, right: (right[0], step * step / right[1]),
    "That number describes the test, not the step at which it ended. What is the rate at that "
    "step?":
        lambda test, right: (NUMBERS[test], right[1]),
    "You have the two tests' slopes exchanged.":
        lambda test, step: death(OTHER[test], step),
    "You count the steps from 1, at rate 0. At step n the rate has grown n times, in both tests.":
        partial(death, first=1),
    "The second number is to be a step of the other test, not a rate.":
        lambda rate: (rate, rate),
})


# 3.10 ---------------------------------------------------------------------------------------------

def embedding_inputs(generator):
    yield "the default, 4 layers of 128", 0.02, 4, 128
    yield "std 1, 4 layers of 128", 1.0, 4, 128
    yield "0.02, 12 layers of 768", 0.02, 12, 768
    yield "one layer", 0.5, 1, 64


def ffn_variance(layers, d):
    """W_2 starts with a deviation of 0.02 / sqrt(2 layers) and sums over 4d entries."""
    return 4 * d * 0.02 ** 2 / (2 * layers)


def stream_share(s, layers, d, *, ffn=ffn_variance, times=1):
    """ffn: the variance that a feed-forward branch adds, where attention's adds 1."""
    std = math.sqrt(s ** 2 + times * layers * (1 + ffn(layers, d)))
    return std, s / std


def without_embedding(s, size):
    std = math.sqrt(size ** 2 - s ** 2)
    return std, s / std


def summed(s, layers, d):
    std = s + layers * (1 + math.sqrt(ffn_variance(layers, d)))
    return std, s / std


EMBEDDING = Exercise(reference=stream_share, inputs=embedding_inputs, tolerance=1e-4,
                     parts=("size", "cosine"), misconceptions={
    "The feed-forward branch ends in W_2, not in a norm. How large is W_2 times a vector of f "
    "entries of variance 1?":
        partial(stream_share, ffn=lambda layers, d: 1.0),
    "Only attention's branches are counted, or W_2 as if it read one entry. The feed-forward ones "
    "are small here, but not nothing.":
        partial(stream_share, ffn=lambda layers, d: 0.0),
    "The embedding itself is missing in your whole: its variance, s^2, counts as well.":
        without_embedding,
    "You add standard deviations. For independent vectors it is the variances that add up.":
        summed,
    "W_2 sums over the hidden layer's entries. How many are they?":
        partial(stream_share, ffn=lambda layers, d: ffn_variance(layers, d) / 4),
    "The feed-forward branch: 0.02 / sqrt(2L) is a standard deviation; you add variances.":
        partial(stream_share, ffn=lambda layers, d: 4 * d * 0.02 / math.sqrt(2 * layers)),
    "Every layer has two branches, but you count each of them twice.":
        partial(stream_share, times=2),
})


# 3.11 ---------------------------------------------------------------------------------------------

def block_tensors(generator, d, heads):
    def vector(n):
        return 1 + 0.5 * randn(generator, n)

    def matrix(outputs, inputs):
        return randn(generator, outputs, inputs) / d ** 0.5

    return {
        "norm1": vector(d),
        "head_scale": vector(heads),
        "w_o": matrix(d, d),
        "norm_attn": vector(d),
        "norm2": vector(d),
        "w_up": matrix(4 * d, d),
        "norm_ffn": vector(4 * d),
        "w_down": matrix(d, 4 * d),
        "resid_scale": vector(d),
    }


def mean_so_far(w_v, heads):
    """In place of attention: v's mean over all tokens so far, cut into heads (B, H, T, d_k)."""
    def attention(x):
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        v = (x @ w_v).cumsum(1) / count
        return torch.stack(v.chunk(heads, dim=-1), dim=1)
    return attention


def block_inputs(generator):
    p = block_tensors(generator, 6, heads=2)
    attention = mean_so_far(randn(generator, 6, 6), heads=2)
    yield "2 heads of 3", randn(generator, 2, 5, 6), attention, p
    p = block_tensors(generator, 8, heads=4)
    attention = mean_so_far(randn(generator, 8, 8), heads=4)
    yield "4 heads of 2", randn(generator, 2, 5, 8), attention, p
    p = block_tensors(generator, 4, heads=2)
    p["resid_scale"] = torch.ones(4)
    attention = mean_so_far(randn(generator, 4, 4), heads=2)
    yield "lambda_resid 1", randn(generator, 2, 5, 4), attention, p

    h = randn(generator, 2, 5, 4)
    without_attention = {**p, "w_o": torch.zeros(4, 4)}
    yield "w_o of zeros: the feed-forward branch alone", h, attention, without_attention
    h = randn(generator, 2, 5, 4)
    without_ffn = {**p, "w_down": torch.zeros(4, 16)}
    yield "w_down of zeros: attention alone", h, attention, without_ffn
    h = 0.01 * randn(generator, 2, 5, 4)
    small = {**p, "w_o": 0.01 * p["w_o"], "w_up": 0.01 * p["w_up"]}
    yield "small matrices, where eps counts", h, attention, small


def norm1(h, p):
    return standard(h) * p["norm1"]


def behind_attention(y, p):
    return standard(y @ p["w_o"].T) * p["norm_attn"]


def norm2(a, p):
    return standard(a) * p["norm2"]


def hidden_layer(u, p):
    return standard(gelu(u)) * p["norm_ffn"]


def scaled_residual(a, m, p):
    return p["resid_scale"] * a + m


def block(h, attention, p, *, first=norm1, attn=behind_attention, around=lambda h, x, p: h,
          second=norm2, hidden=hidden_layer, norm_behind=same, last=scaled_residual, **instead):
    """instead: what is taken for tensors of p."""
    p = {**p, **instead}
    x = first(h, p)
    y = side_by_side(attention(x) * p["head_scale"][:, None, None])
    a = around(h, x, p) + attn(y, p)
    u = second(a, p) @ p["w_up"].T
    m = norm_behind(hidden(u, p) @ p["w_down"].T)
    return last(a, m, p)


ONE = torch.ones(1)                                         # for a gain that is missing


def norm_before_activation(u, p):
    return gelu(standard(u) * p["norm_ffn"])


def norm_before_w_o(y, p):
    return (standard(y) * p["norm_attn"]) @ p["w_o"].T


def residual_of_norm2(a, m, p):
    return p["resid_scale"] * norm2(a, p) + m


def scaled_stream(h, x, p):
    return p["resid_scale"] * h


def plain_sum(a, m, p):
    return a + m


def layer_scale(a, m, p):
    return a + p["resid_scale"] * m


def scaled_sum(a, m, p):
    return p["resid_scale"] * (a + m)


def post_ln(h, attention, p):
    y = side_by_side(attention(norm1(h, p)) * p["head_scale"][:, None, None])
    a = standard(h + y @ p["w_o"].T) * p["norm_attn"]
    return block(a, attention, p, attn=lambda y, p: 0.0)


def parallel(h, attention, p):
    a = block(h, attention, p, last=lambda a, m, p: a)
    m = block(h, attention, p, attn=lambda y, p: 0.0, last=lambda a, m, p: m)
    return scaled_residual(a, m, p)


BLOCK = Exercise(reference=block, inputs=block_inputs, tolerance=5e-3, misconceptions={
    "HeadScale is missing.":
        partial(block, head_scale=ONE),
    "The LayerNorm behind attention is missing.":
        partial(block, attn=lambda y, p: y @ p["w_o"].T),
    "The LayerNorm in the feed-forward branch is missing.":
        partial(block, hidden=lambda u, p: gelu(u)),
    "The feed-forward norm stands behind w_down (CogView).":
        partial(block, hidden=lambda u, p: gelu(u), norm_behind=standard),
    "lambda_resid is missing.":
        partial(block, resid_scale=ONE),
    "norm_ffn stands in front of the activation in your block; section 2.1 writes LN around "
    "sigma.":
        partial(block, hidden=norm_before_activation),
    "Your second residual adds to what norm2 gives out; norm2 is for the branch alone.":
        partial(block, last=residual_of_norm2),
    "lambda_resid scales the branch in your block (LayerScale).":
        partial(block, last=layer_scale),
    "lambda_resid scales the whole output of your block.":
        partial(block, last=scaled_sum),
    "Your first residual adds to the normalized h; the stream itself goes round the branch.":
        partial(block, around=lambda h, x, p: x),
    "lambda_resid stands at the first residual; section 3 puts it at the second.":
        partial(block, around=scaled_stream, last=plain_sum),
    "Your attention norm stands before w_o. Section 2.1 puts LN around all of HeadScaleMHA, W_o "
    "included.":
        partial(block, attn=norm_before_w_o),
    "norm_attn's gain is missing.":
        partial(block, norm_attn=ONE),
    "The first residual is missing.":
        partial(block, around=lambda h, x, p: 0.0),
    "norm1 and norm2 are exchanged: norm1 stands before attention, norm2 before the feed-forward "
    "part.":
        lambda h, attention, p: block(h, attention, p, norm1=p["norm2"], norm2=p["norm1"]),
    "norm_attn stands behind the sum in your block, as in Post-LN; it belongs to the branch.":
        post_ln,
    "That is ReLU; use gelu.":
        partial(block, hidden=lambda u, p: standard(torch.relu(u)) * p["norm_ffn"]),
    "norm_ffn's gain is missing.":
        partial(block, norm_ffn=ONE),
    "norm1 is missing: attention reads the stream as it is.":
        partial(block, first=lambda h, p: h),
    "norm1's gain is missing.":
        partial(block, norm1=ONE),
    "norm2 is missing: w_up reads the stream as it is.":
        partial(block, second=lambda a, p: a),
    "norm2's gain is missing.":
        partial(block, norm2=ONE),
    "lambda_resid stands at both residuals in your block; section 3 has it at the second alone.":
        partial(block, around=scaled_stream),
    "Both your branches read the block's input; the second one reads what the first has changed.":
        parallel,
})


# What holds of every right answer: said where none of the known mistakes fits ---------------------


def multiple_of_layers(y, layers):
    of_each = y / layers
    return near(of_each, round(float(of_each)), 1e-9)


PROPERTIES = {
    "3.1": {
        "Even with all gammas 1, where nothing is scaled, yours is off: look at how the heads "
        "are joined, at w_o, and whether gamma, as it is, is the factor.":
            lambda y, right, gamma: not (gamma == 1).all() or near(y, right),
        "With all gammas 1 yours is right. Which channels, and where, does each gamma meet, and "
        "as it is?":
            never},
    "3.2": {
        "Look at your hidden layer between norm and gamma: has each token mean 0 and mean square "
        "1 there? Then gamma multiplies, beta is added, and w_down comes last.":
            never},
    "3.3": {
        "Yours is no multiple of the number of layers: what stands only once in the model?":
            multiple_of_layers,
        "Even without bias yours is off: for one layer, write down how many numbers each of the "
        "three has.":
            lambda y, right, bias: bias or near(y, right),
        "Without bias yours is right. Which of the three get a shift, and how wide?":
            never},
    "3.5": {
        "dw_down has to have w_down's shape.":
            lambda y, w_down: y[0].shape == w_down.shape,
        "dgamma has to have gamma's shape: which axis is summed?":
            lambda y, gamma: y[1].shape == gamma.shape,
        "dw_down: the output is linear in w_down, so dw_down * w_down should have the same sum "
        "as g * output. It does not: where does gamma stand, and how often?":
            lambda y, right, w_down: near((y[0] * w_down).sum(), (right[0] * w_down).sum()),
        "dgamma: the output is linear in gamma, so dgamma * gamma should have the same sum as g * "
        "output. It does not.":
            lambda y, right, gamma: near((y[1] * gamma).sum(), (right[1] * gamma).sum()),
        "dxhat: the output is linear in xhat, so dxhat * xhat should have the same sum as g * "
        "output. It does not: where does gamma stand?":
            lambda y, right, xhat: near((y[2] * xhat).sum(), (right[2] * xhat).sum())},
    "3.6": {
        "With lambda 0 in the last layer only that layer's branch is left. In yours there is "
        "something else.":
            lambda y, branches, lambdas: lambdas[-1].any() or near(y, branches[-1]),
        "With all lambdas 1 the stream is a plain sum of its start and all branches. Yours is "
        "not.":
            lambda y, right, lambdas: not (lambdas == 1).all() or near(y, right),
        "Even with one layer yours is off.":
            lambda y, right, lambdas: len(lambdas) > 1 or near(y, right),
        "With one layer yours is right. What does the second one read?":
            never},
    "3.7": {
        "Your steps, each so much longer, do not take as long as the baseline's.":
            lambda y, n, slow: near(y[0] * (1 + slow), n, 1e-5),
        "Your second number does not fit your first: how many of the baseline's steps are "
        "missing, as a share?":
            lambda y, n: near(y[1], 1 - y[0] / n, 1e-5)},
    "3.8": {
        "Half the steps are a share of 0.5.":
            lambda y, right: not near(right[0], 0.5) or near(y[0], 0.5),
        "Half the time is a share of 0.5.":
            lambda y, right: not near(right[1], 0.5) or near(y[1], 0.5),
        "The third: half the steps in half the time, so a step takes as long as before.":
            lambda y, right: not near(right[2], 0) or near(y[2], 0),
        "The third: half the steps in the same time. How much longer does one take?":
            lambda y, right: not near(right[2], 1) or near(y[2], 1)},
    "3.9": {
        "9.1: the rate goes from 0 to 0.1 in 1,000 steps. Yours is another.":
            lambda y, right, test: test != "9.1" or near(y[0], right[0], 1e-6),
        "Fig. 5: each step adds what its caption says. Yours adds something else.":
            lambda y, right, test: test != "Fig. 5" or near(y[0], right[0], 1e-6),
        "At your second number, the other test has another rate than this one at `step`.":
            lambda y, right: near(y[1], right[1], 1e-6)},
    "3.10": {
        "Your two numbers do not fit: the cosine is the embedding's deviation over the whole "
        "one's.":
            lambda y, s: near(y[0] * y[1], s, 1e-4),
        "Attention's branch alone adds a variance of 1 in each layer. Yours has less in all.":
            lambda y, s, layers: y[0] ** 2 >= s ** 2 + layers,
        "The feed-forward branches add something too. In yours they add nothing.":
            lambda y, s, layers: y[0] ** 2 > s ** 2 + layers * (1 + 1e-4),
        "Attention's part is there, and too much or too little from the feed-forward branch: its "
        "width, the start of W_2, and how often it is added.":
            never},
    "3.11": {
        "With w_o of zeros, where attention adds nothing, yours is off: look at norm2, the "
        "feed-forward branch and resid_scale.":
            lambda y, right, p: p["w_o"].any() or near(y, right, 5e-3),
        "With w_down of zeros, where the feed-forward branch adds nothing, yours is off: look at "
        "norm1, HeadScale, w_o, norm_attn and resid_scale.":
            lambda y, right, p: p["w_down"].any() or near(y, right, 5e-3),
        "Each of the two branches alone is right. Does the second one read what the first has "
        "made of the stream?":
            never},
}


EXERCISES = {
    "3.1": HEADS,
    "3.2": FFN,
    "3.3": ADDED,
    "3.4": UNDONE,
    "3.5": GRADIENTS,
    "3.6": STREAM,
    "3.7": TIME,
    "3.8": TABLE,
    "3.9": DEATH,
    "3.10": EMBEDDING,
    "3.11": BLOCK,
}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
