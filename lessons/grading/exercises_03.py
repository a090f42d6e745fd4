"""
Lesson 3, NormFormer: three more norms, what they do to gradients, and how large an embedding is.

Section, table and figure numbers are those of NormFormer (Shleifer, Weston and Ott 2021).
grader.py explains the form of an exercise. A keyword argument of a reference is one of its steps,
or something that can go wrong in it, so that functools.partial makes the wrong answer. The
references use nothing of model.py; the notebook compares the two where model.py has the same thing.
"""
import math
from functools import partial

import torch

from answers import near
from grader import AUTOGRAD, Exercise
from pieces import heads_one_by_one, never, randn, same, side_by_side, silu


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
    "Your outputs have mean 0 and variance 1: the LayerNorm after W_o is not asked for here.":
        lambda right: standard(right),
    "Your gammas multiply the outputs of W_o (or its rows). There every channel is a mixture of "
    "all heads; none belongs to one head any more.":
        behind_w_o,
    "In your joined vector the gammas stand in the order 0, 1, ..., H - 1, 0, 1, .... The channels "
    "of one head are neighbors and share one gamma.":
        channels_in_turns,
    "The scaling is right. But reshaping (B, H, T, d_k) to (B, T, d) directly mixes up heads and "
    "tokens: move an axis first.":
        partial(head_scale, joined=heads_one_by_one),
    "The scaling is right. But in your joined vector the heads are interleaved channel by channel. "
    "Which axis has to come last before you merge?":
        partial(head_scale, joined=heads_in_turns),
    "torch stores a linear map as (out, in). Should your vectors meet the rows of w_o or its "
    "columns?":
        lambda y, gamma, w_o: head_scale(y, gamma, w_o.T),
    "Your gammas multiply along the axis of tokens. Broadcasting lines up the last axes first: "
    "which axis counts the heads where you multiply?":
        lambda y, gamma, w_o: side_by_side(y * gamma[:, None]) @ w_o.T,
    "You divide by gamma; the outputs of the heads should be multiplied by it.":
        lambda y, gamma, w_o: head_scale(y, 1 / gamma, w_o),
    "The heads are joined and multiplied by w_o, but not scaled: gamma has no effect on your "
    "result.":
        lambda y, w_o: side_by_side(y) @ w_o.T,
    "The heads are scaled and joined, but not multiplied by w_o.":
        lambda y, gamma: side_by_side(y * gamma[:, None, None]),
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
    x, w_up, *_ = case(4, 8, 8)
    yield "nothing behind the norm", x, w_up, torch.eye(8), torch.ones(8), torch.zeros(8)


def ffn_branch(x, w_up, w_down, gamma, beta, *, act=gelu, norm=standard):
    a = norm(act(x @ w_up.T)) * gamma + beta
    return a @ w_down.T


def is_standardized(y):
    return near(y.mean(-1), 0, 1e-3) and near(y.var(-1, correction=0), 1, 1e-2)


def all_behind_w_down(x, w_up, w_down, gamma, beta):
    m = gelu(x @ w_up.T) @ w_down.T
    return standard(m) * gamma + beta


def norm_before_gelu(x, w_up, w_down, gamma, beta):
    z = standard(x @ w_up.T) * gamma + beta
    return gelu(z) @ w_down.T


def gain_and_shift_first(x, w_up, w_down, gamma, beta):
    hidden = gelu(x @ w_up.T)
    return standard(gamma * hidden + beta) @ w_down.T


def gain_first(x, w_up, w_down, gamma, beta):
    hidden = gelu(x @ w_up.T)
    return (standard(gamma * hidden) + beta) @ w_down.T


def rms(a):
    return a / (a.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def centered_over_rms(a):
    return (a - a.mean(-1, keepdim=True)) / (a.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def over_everything(a):
    variance = a.var(correction=0)
    return (a - a.mean()) / (variance + 1e-5).sqrt()


def without_root(a):
    variance = a.var(-1, keepdim=True, correction=0)
    return (a - a.mean(-1, keepdim=True)) / (variance + 1e-5)


def quick_gelu(u):
    return u * torch.sigmoid(1.702 * u)


def sample_deviation_plus_eps(a):
    return (a - a.mean(-1, keepdim=True)) / (a.std(-1, keepdim=True) + 1e-5)


def eps_behind_root(a):
    deviation = a.std(-1, keepdim=True, correction=0)
    return (a - a.mean(-1, keepdim=True)) / (deviation + 1e-5)


FFN = Exercise(                                             # both forms of GELU pass
    reference=ffn_branch, inputs=ffn_inputs, tolerance=5e-3, misconceptions={
    "Your LayerNorm stands after W_2, as in CogView (9.1). There gamma fits only if f = d.":
        all_behind_w_down,
    "You normalize the input of the activation. The task puts the LayerNorm after GELU.":
        norm_before_gelu,
    "Your shift is multiplied by gamma, too. gamma multiplies the normalized values only, and beta "
    "is added after that.":
        lambda x, w_up, w_down, gamma, beta: ffn_branch(x, w_up, w_down, gamma, gamma * beta),
    "Your gamma and beta act before the division by the standard deviation. They come after it.":
        gain_and_shift_first,
    "Your gamma multiplies what goes into the normalization, which undoes a part of it. gamma "
    "multiplies the normalized values.":
        gain_first,
    "You subtract the mean, but divide by the root of a mean of squares from which it is not "
    "subtracted. The variance is the mean of (a - mean)^2.":
        partial(ffn_branch, norm=centered_over_rms),
    "You do not subtract the mean: that is RMSNorm. After GELU the mean is far from 0.":
        partial(ffn_branch, norm=rms),
    "Almost: the variance of a LayerNorm divides by f, not by f - 1.":
        partial(ffn_branch, norm=partial(standard, correction=1)),
    "You take mean and variance over the tokens, as BatchNorm does. In a LayerNorm every token has "
    "its own mean and variance.":
        partial(ffn_branch, norm=partial(standard, dim=0)),
    "You add x. The task asks for the branch alone; the residual sum comes later (and adds h, not "
    "the normalized x).":
        lambda x, right: x + right,
    "Where the hidden layer is small, your eps has no effect. Is it missing or far too small, or "
    "is it somewhere else than in the variance, inside the root?":
        partial(ffn_branch, norm=partial(standard, eps=0)),
    "Your eps is smaller than 1e-5.":
        partial(ffn_branch, norm=partial(standard, eps=1e-6)),
    "Where the hidden layer is small, your eps has hardly any effect. Is it far smaller than 1e-5, "
    "or do you add it to the standard deviation? It belongs to the variance, inside the root.":
        partial(ffn_branch, norm=eps_behind_root),
    "You take one mean and one variance over all tokens. In a LayerNorm every token has its own.":
        partial(ffn_branch, norm=over_everything),
    "You divide by the variance. A LayerNorm divides by its root.":
        partial(ffn_branch, norm=without_root),
    "You have exchanged gamma and beta: gamma multiplies, beta is added.":
        lambda x, w_up, w_down, gamma, beta: ffn_branch(x, w_up, w_down, beta, gamma),
    "You normalize x once more. It has been normalized already.":
        lambda x, w_up, w_down, gamma, beta: ffn_branch(standard(x), w_up, w_down, gamma, beta),
    "You use ReLU; the task asks for GELU.":
        partial(ffn_branch, act=torch.relu),
    "You use SiLU; the task asks for GELU.":
        partial(ffn_branch, act=silu),
    "You use z sigmoid(1.702 z), a rough approximation of GELU. Take `gelu` from the setup cell, "
    "or torch's.":
        partial(ffn_branch, act=quick_gelu),
    "The activation is missing.":
        partial(ffn_branch, act=same),
    "The LayerNorm is missing: gamma and beta act on the output of GELU directly.":
        partial(ffn_branch, norm=same),
    "gamma is missing.":
        lambda x, w_up, w_down, beta: ffn_branch(x, w_up, w_down, torch.ones(len(beta)), beta),
    "beta is missing.":
        lambda x, w_up, w_down, gamma: ffn_branch(x, w_up, w_down, gamma, torch.zeros(len(gamma))),
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
    "With bias, a LayerNorm has two vectors. Your numbers contain no shift.":
        lambda layers, d, heads: added(layers, d, heads, False),
    "You always count the shift. Without bias a LayerNorm has only its gain.":
        lambda layers, d, heads: added(layers, d, heads, True),
    "You count the shift without bias and leave it out with bias: the two cases are exchanged.":
        lambda layers, d, heads, bias: added(layers, d, heads, not bias),
    "With bias yours is right. Without bias you return one number per layer: how much of your sum "
    "belongs to the `else`? Put the choice in brackets.":
        lambda layers, d, heads, bias: added(layers, d, heads, True) if bias else layers,
    "The second LayerNorm stands in the hidden layer. How wide is the hidden layer?":
        partial(added, norms=(1, 1)),
    "You count both LayerNorms correctly, but HeadScale has parameters, too.":
        lambda layers, d, bias: added(layers, d, 0, bias),
    "You count HeadScale once for the model. Every layer has its own.":
        lambda layers, d, heads, bias: heads + added(layers, d, 0, bias),
    "In place of HeadScale's numbers yours has d per layer. HeadScale has one number per head, not "
    "one per channel.":
        lambda layers, d, bias: added(layers, d, d, bias),
    "d / H is the number of channels of one head. How many numbers does HeadScale have?":
        lambda layers, d, heads, bias: added(layers, d, d // heads, bias),
    "The widths of your LayerNorms sum to 7d. Do you count norm1 and norm2, which Pre-LN has "
    "already? Count only what NormFormer adds.":
        partial(added, norms=(1, 4, 1, 1)),
    "With bias, HeadScale counts twice in yours. Do you give it a shift, or does a factor 2 stand "
    "before too much? HeadScale only multiplies; `bias` concerns the LayerNorms.":
        lambda layers, d, heads, bias: added(layers, d, heads * (1 + bias), bias),
    "With and without bias, you count d too many per layer. Are they ResScale's? ResScale is "
    "optional and not one of the three operations.":
        lambda layers, d, heads, bias: added(layers, d, heads + d, bias),
    "The widths of your two added LayerNorms sum to 4d (or one is missing). How wide is the one "
    "after attention, and how wide the one in the hidden layer?":
        partial(added, norms=(4,)),
    "With bias you count 5d too many per layer. Are these the FFN's own two biases, which Pre-LN "
    "has already, or does each shift count twice?":
        lambda layers, d, heads, bias: added(layers, d, heads + 5 * d * bias, bias),
    "The widths of your added LayerNorms sum to 9d. Is the hidden layer 8d wide in yours (as "
    "SwiGLU's first matrix is), or do you count its norm twice?":
        partial(added, norms=(1, 8)),
    "HeadScale has one number for each head, not d numbers for each head.":
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
    "norm1": "norm1: its gain acts on q, k and v. What do larger scores do to a softmax, and what "
             "if q and k are made unit vectors? What becomes of the factor in v after W_o?",
    "W_v": "W_v: the output of attention is linear in v. Follow the factor from there.",
    "head_scale": "HeadScale: *all* its entries are doubled, so the ratios between heads stay the "
                  "same. What comes after W_o?",
    "W_o": "W_o: what comes directly after it?",
    "norm_attn": "norm_attn: its gain acts after its own division. Is there another norm before "
                 "the sum?",
    "norm2": "norm2: its gain acts after its own division, and only W_up reads its output. A "
             "factor c passes through an activation f only if f(c x) is a multiple of f(x), the "
             "same one for all x. What follows?",
    "W_up": "W_up: it stands in front of the activation. Does a factor in front of this activation "
            "come out as a factor, and if it does, what comes next?",
    "norm_ffn": "norm_ffn: its gain acts after its own division. Is there another norm before the "
                "sum?",
    "W_down": "W_down: is there a norm between W_2 and the sum? (There is one in CogView's block.)",
}
BY_PLACE = dict(enumerate(ABOUT.values()))
UNDONE = Exercise(reference=undone, inputs=undone_inputs, about=BY_PLACE, misconceptions={
    "You say that every doubling changes the output. Follow W_o: where does its output go next?":
        lambda: [False] * 9,
    "You say that no doubling changes the output. But some scales stand after the last norm of "
    "their branch.":
        lambda: [True] * 9,
    "norm2 and W_up: you answer True for every activation. norm_ffn removes a factor, but does one "
    "come out of each activation? Compare GELU(1) and GELU(2).":
        partial(undone, norm2=True, W_up=True),
    "norm2 and W_up: you answer False for every activation. Is there one among the four with "
    "f(2 x) a multiple of f(x), and what comes after it? (Do you spell them as the task does?)":
        partial(undone, norm2=False, W_up=False),
    "relu2: only there your answers for norm2 and W_up are wrong. Twice the input makes four times "
    "the output. Does a norm remove a factor of four as well as one of two?":
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
    xhat, gamma, w_down, g = case(4, 3, 6)
    yield "gammas below 0", xhat, -gamma, w_down, g


def ffn_gradients(xhat, gamma, w_down, g):
    above = g @ w_down                                      # the gradient at gamma xhat, (N, f)
    return g.T @ (xhat * gamma), (xhat * above).sum(0), above * gamma


GRADIENTS = Exercise(reference=ffn_gradients, inputs=gradient_inputs,
                     parts=("dw_down", "dgamma", "dxhat"), misconceptions={
    "dw_down: what does w_down multiply, xhat or the output of the norm, gain included?":
        lambda xhat, g, dgamma, dxhat: (g.T @ xhat, dgamma, dxhat),
    "dgamma: your result does not depend on g, the gradient that backpropagation passes in.":
        lambda dw_down, xhat, dxhat: (dw_down, xhat.sum(0), dxhat),
    "dgamma: the output is linear in gamma, so its derivative does not contain gamma. Does yours, "
    "or has a line such as dxhat *= gamma changed in place what you use for it?":
        lambda dw_down, gamma, dgamma, dxhat: (dw_down, gamma * dgamma, dxhat),
    "dgamma: that is the gradient of a shift. gamma multiplies xhat, and your result does not "
    "contain xhat.":
        lambda dw_down, g, w_down, dxhat: (dw_down, (g @ w_down).sum(0), dxhat),
    "dgamma: you multiply two sums over the tokens. Multiply for each token, and then add up.":
        lambda dw_down, xhat, w_down, g, dxhat: (dw_down, xhat.sum(0) * (g @ w_down).sum(0), dxhat),
    "dxhat: you also go back through the norm. The gradient at its output xhat is asked for, so "
    "leave out the two means.":
        lambda dw_down, dgamma, dxhat, xhat: (
            dw_down, dgamma, dxhat - dxhat.mean(-1, keepdim=True)
            - xhat * (dxhat * xhat).mean(-1, keepdim=True)),
    "dxhat: gamma stands between xhat and w_down, so it has to be in the gradient.":
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
    yield "two layers", *case(2)
    h = randn(generator, 2, 2, 3)
    yield "lambda 1: Pre-LN's sum", h, randn(generator, 4, 2, 2, 3), torch.ones(4, 3)
    h = randn(generator, 2, 3, 2)
    last_of_zeros = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    yield "lambda 0 in the last layer", h, randn(generator, 2, 2, 3, 2), last_of_zeros
    h, branches, lambdas = case(3)
    yield "lambdas below 0", h, branches, -lambdas


def res_scale(h, branch, scale):
    return scale * h + branch


def stream(h, branches, lambdas, *, step=res_scale):
    for branch, scale in zip(branches, lambdas):
        h = step(h, branch, scale)
    return h


def last_lambda_alone(h, branches, lambdas):
    before = h + branches[:-1].sum(0)
    return lambdas[-1] * before + branches[-1]


def stream_of_each_layer(h, branches, lambdas):
    layers = range(1, len(branches) + 1)
    return torch.stack([stream(h, branches[:layer], lambdas[:layer]) for layer in layers])


def h0_and_stream_of_each_layer(h, branches, lambdas):
    return torch.cat((h[None], stream_of_each_layer(h, branches, lambdas)))


STREAM = Exercise(reference=stream, inputs=stream_inputs, misconceptions={
    "You scale the branch: that is LayerScale (9.1). ResScale's lambda multiplies the residual "
    "stream instead.":
        partial(stream, step=lambda h, branch, scale: h + scale * branch),
    "In yours a layer's lambda acts on its own branch, too. Only those of later layers should.":
        partial(stream, step=lambda h, branch, scale: scale * (h + branch)),
    "You scale only h0. The output of a branch is part of the stream in all later layers, and is "
    "scaled there.":
        lambda h, branches, lambdas: lambdas.prod(0) * h + branches.sum(0),
    "You divide the stream by lambda; it should be multiplied.":
        partial(stream, step=lambda h, branch, scale: h / scale + branch),
    "You use the lambdas in the wrong order: the last layer's in the first layer, and so on.":
        lambda h, branches, lambdas: stream(h, branches, lambdas.flip(0)),
    "You use one number for all channels of a layer. lambda_resid has one number per channel.":
        partial(stream, step=lambda h, branch, scale: scale.mean() * h + branch),
    "Your result contains h0 and the last layer alone. Does each of your layers start from h0 "
    "again? A layer should continue with the stream that the previous layer left.":
        lambda h, branches, lambdas: lambdas[-1] * h + branches[-1],
    "You apply only the last layer's lambda. Each layer has its own.":
        last_lambda_alone,
    "You return the stream after every layer. The task asks only for the one after the last layer.":
        stream_of_each_layer,
    "You return h0 and the stream after every layer. The task asks only for the one after the last "
    "layer.":
        h0_and_stream_of_each_layer,
    "Your result is h0 plus all branches: the lambdas have no effect.":
        lambda h, branches: h + branches.sum(0),
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
    "With your answer both make equally many steps, so the slower model gets more time. Compare at "
    "equal time.":
        lambda n: (n, 0.0),
    "Steps that take 6% longer are not 6% fewer steps. Try the case in which a step takes twice as "
    "long.":
        lambda n, slow: (n * (1 - slow), slow),
    "You return more steps than the baseline makes, although each step is slower.":
        lambda n, slow: (n * (1 + slow), slow),
    "The steps are right. The second number is how many fewer they are, as a fraction of the "
    "baseline's.":
        lambda slow, steps: (steps, slow),
    "slowdown is a fraction already: 0.06 means 6%. Do not divide it by 100.":
        lambda n, slow: equal_time(n, slow / 100),
})


# 3.8 ----------------------------------------------------------------------------------------------

def table_inputs(generator):
    yield "Table 6", 279.893, 223.904, 288.0, 237.0
    yield "half the steps, half the time", 100.0, 50.0, 10.0, 5.0
    yield "half the steps, no time saved", 100.0, 50.0, 10.0, 10.0
    yield "no step saved, 5% slower", 100.0, 100.0, 20.0, 21.0
    yield "no step saved, 5% faster", 100.0, 100.0, 20.0, 19.0


def read_table(base_steps, steps, base_hours, hours):
    longer = (hours / steps) / (base_hours / base_steps) - 1
    return steps / base_steps, longer


TABLE = Exercise(reference=read_table, inputs=table_inputs,
                 parts=("fraction of the steps", "longer"), misconceptions={
    "The second: yours is how much longer or shorter the whole run takes. The two runs have "
    "different numbers of steps: how long does one step of each take?":
        lambda right, base_hours, hours: (right[0], hours / base_hours - 1),
    "The second: you have exchanged baseline and NormFormer, or you compare steps per hour. How "
    "many hours does a step take?":
        lambda right: (right[0], 1 / (1 + right[1]) - 1),
    "The second: you take the difference of the hours per step. \"By what fraction longer\" asks "
    "for that difference as a fraction of the baseline's hours per step.":
        lambda right, base_hours, base_steps: (right[0], right[1] * base_hours / base_steps),
    "The second: yours is a fraction of NormFormer's hours per step, or you compare steps per "
    "hour. \"Longer than the baseline's\" means a fraction of the baseline's hours per step.":
        lambda right: (right[0], 1 - 1 / (1 + right[1])),
    "The second: you return the ratio of the two steps. A step that takes 3% longer has the ratio "
    "1.03; the task asks for 0.03.":
        lambda right: (right[0], 1 + right[1]),
    "The first: you return the fraction of the steps that NormFormer saves. The paper's 70% is "
    "what it needs.":
        lambda right: (1 - right[0], right[1]),
    "The first: you say how much faster NormFormer is. The task asks for what it needs, divided by "
    "what the baseline needs.":
        lambda right: (1 / right[0] - 1, right[1]),
    "You return percentages. The task asks for fractions: 0.7 for 70%.":
        lambda right: (100 * right[0], 100 * right[1]),
})


# 3.9 ----------------------------------------------------------------------------------------------

SLOPES = {"Fig. 5": 5e-5, "9.1": 0.1 / 1000}            # how much the learning rate grows per step
OTHER = {"Fig. 5": "9.1", "9.1": "Fig. 5"}
NUMBERS = {"Fig. 5": 5e-5, "9.1": 0.1}                 # as the paper's text has them


def rate_inputs(generator):
    yield "Table 8's baseline", "9.1", 94
    yield "Table 8's NormFormer", "9.1", 200
    yield "200 steps in Figure 5's test", "Fig. 5", 200
    yield "1,000 steps in Figure 5's test", "Fig. 5", 1000
    yield "201 steps in Figure 5's test", "Fig. 5", 201


def death(test, step, *, first=0):
    """first: the step at which the learning rate is 0."""
    rate = (step - first) * SLOPES[test]
    return rate, rate / SLOPES[OTHER[test]] + first


DEATH = Exercise(reference=death, inputs=rate_inputs, tolerance=1e-6,
                 parts=("learning rate", "step in the other test"), misconceptions={
    "The learning rate is right. In which of the two tests does it grow faster? That test needs "
    "fewer steps.":
        lambda step, right: (right[0], step * step / right[1]),
    "Your first number describes the test and does not depend on the step. What is the learning "
    "rate at that step?":
        lambda test, right: (NUMBERS[test], right[1]),
    "You treat both tests alike, with the slope of Figure 5's. Which two texts can `test` be?":
        lambda step: death("Fig. 5", step),
    "You treat both tests alike, with the slope of section 9.1's. Which two texts can `test` be?":
        lambda step: death("9.1", step),
    "You have exchanged the slopes of the two tests.":
        lambda test, step: death(OTHER[test], step),
    "Your learning rate is the step divided by the slope. It grows by the slope at each step, so "
    "multiply.":
        lambda test, step: (step / SLOPES[test], step / SLOPES[test] * SLOPES[OTHER[test]]),
    "Your learning rate is that of the step before. Do you count the steps from 1 (it is 0 at step "
    "0), or return the last one that the model survives? That of `step` itself is asked for.":
        partial(death, first=1),
    "Your second number is a learning rate. The task asks for a step of the other test.":
        lambda right: (right[0], right[0]),
})


# 3.10 ---------------------------------------------------------------------------------------------

def embedding_inputs(generator):
    yield "the default, 4 layers of 128", 0.02, 4, 128
    yield "std 1, 4 layers of 128", 1.0, 4, 128
    yield "0.02, 12 layers of 768", 0.02, 12, 768
    yield "one layer", 0.5, 1, 64


def ffn_variance(layers, d):
    """W_2's entries have standard deviation 0.02 / sqrt(2 layers), and it sums over 4d of them."""
    return 4 * d * 0.02 ** 2 / (2 * layers)


def stream_share(s, layers, d, *, ffn=ffn_variance, times=1):
    """ffn: the variance that a feed-forward branch adds; an attention branch adds 1."""
    std = math.sqrt(s ** 2 + times * layers * (1 + ffn(layers, d)))
    return std, s / std


def without_embedding(s, right):
    std = math.sqrt(right[0] ** 2 - s ** 2)
    return std, s / std


def with_std_as_variance(s, layers, d):
    std = stream_share(math.sqrt(s), layers, d)[0]
    return std, s / std


def with_embedding_in_w_2(s, layers, d):
    return stream_share(s, layers, d, ffn=lambda layers, d: 4 * d * s ** 2 / (2 * layers))


def summed(s, layers, d):
    std = s + layers * (1 + math.sqrt(ffn_variance(layers, d)))
    return std, s / std


EMBEDDING = Exercise(reference=stream_share, inputs=embedding_inputs, tolerance=1e-4,
                     parts=("standard deviation", "cosine"), misconceptions={
    "You let the FFN branch add a variance of 1. It ends in W_2, not in a norm: how large is W_2 "
    "times a vector of f entries of variance 1?":
        partial(stream_share, ffn=lambda layers, d: 1.0),
    "In yours the FFN branches add nothing, or hardly anything. Are they missing, or has W_2 too "
    "few entries in a sum, or too small ones? What they add is small here, but not zero.":
        partial(stream_share, ffn=lambda layers, d: 0.0),
    "Your embedding always has GPT-2's standard deviation, 0.02. It should be the argument.":
        lambda layers, d: stream_share(0.02, layers, d),
    "Your embedding is sqrt(d) times as large as it should be: do you multiply it by sqrt(d)? The "
    "argument is already the standard deviation with which it enters h.":
        lambda s, layers, d: stream_share(s * math.sqrt(d), layers, d),
    "The embedding itself is part of h: its variance, s^2, is missing in your sum, or another "
    "number stands for it.":
        without_embedding,
    "The embedding's part of your variance is s. But s is a standard deviation; variances add up.":
        with_std_as_variance,
    "You add standard deviations. For independent vectors the variances add up.":
        summed,
    "Your FFN branch adds a quarter of what it should. Over how many entries does W_2 sum in "
    "yours, and how many has the hidden layer?":
        partial(stream_share, ffn=lambda layers, d: ffn_variance(layers, d) / 4),
    "In the FFN branch you use 0.02 / sqrt(2L) as a variance. It is a standard deviation.":
        partial(stream_share, ffn=lambda layers, d: 4 * d * 0.02 / math.sqrt(2 * layers)),
    "In the variance of W_2's entries you square only the 0.02. Square 0.02 / sqrt(2L) as a "
    "whole.":
        partial(stream_share, ffn=lambda layers, d: 4 * d * 0.02 ** 2 / math.sqrt(2 * layers)),
    "You count each of a layer's two branches twice.":
        partial(stream_share, times=2),
    "Your FFN branch fits a w_down with standard deviation 0.02, but w_down is initialized with a "
    "smaller one than the other matrices.":
        partial(stream_share, ffn=lambda layers, d: 4 * d * 0.02 ** 2),
    "Your W_2 gets larger with the embedding's standard deviation. Its entries have a fixed one at "
    "initialization.":
        with_embedding_in_w_2,
    "The standard deviation is right. The cosine is a ratio of standard deviations, not of "
    "variances.":
        lambda s, right: (right[0], (s / right[0]) ** 2),
    "The cosine is right. The first number should be a standard deviation, and yours is the "
    "variance.":
        lambda right: (right[0] ** 2, right[1]),
    "You count one layer only. Each of the layers adds its two branches.":
        lambda s, layers, d: stream_share(s, 1, d, ffn=lambda _, d: ffn_variance(layers, d)),
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
    """A stand-in for attention: the mean of v over all tokens so far, as heads (B, H, T, d_k)."""
    def attention(x):
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        v = (x @ w_v).cumsum(1) / count
        return torch.stack(v.chunk(heads, dim=-1), dim=1)
    return attention


def first_negative(gain):
    """Return a gain whose first entry is negative, as one may become in training."""
    signs = torch.ones_like(gain)
    signs[0] = -1
    return gain.abs() * signs


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

    gains = {name: first_negative(x) for name, x in p.items() if x.dim() == 1}
    h = randn(generator, 2, 5, 4)
    gains["resid_scale"] = first_negative(1 + 0.5 * randn(generator, 4))
    without_attention = {**p, **gains, "w_o": torch.zeros(4, 4)}
    yield "w_o of zeros: the feed-forward branch alone", h, attention, without_attention
    h = randn(generator, 2, 5, 4)
    without_ffn = {**p, **gains, "w_down": torch.zeros(4, 16)}
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


def block(h, attention, p, *, first=norm1, joined=side_by_side, attn=behind_attention,
          around=lambda h, x, p: h, second=norm2, hidden=hidden_layer, norm_behind=same,
          last=scaled_residual, **instead):
    """instead: tensors that replace those of p."""
    p = {**p, **instead}
    x = first(h, p)
    y = joined(attention(x) * p["head_scale"][:, None, None])
    a = around(h, x, p) + attn(y, p)
    u = second(a, p) @ p["w_up"].T
    m = norm_behind(hidden(u, p) @ p["w_down"].T)
    return last(a, m, p)


ONE = torch.ones(1)                                         # in place of a missing gain


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


def second_sum_from_input(h, attention, p):
    return block(h, attention, p, last=lambda a, m, p: p["resid_scale"] * h + m)


def only_the_input_scaled(h, attention, p):
    return block(h, attention, p, last=lambda a, m, p: p["resid_scale"] * h + (a - h) + m)


def parallel(h, attention, p):
    a = block(h, attention, p, last=lambda a, m, p: a)
    m = block(h, attention, p, attn=lambda y, p: 0.0, last=lambda a, m, p: m)
    return scaled_residual(a, m, p)


def block_with(h, attention, p, *, norm):
    def with_gain(x, name):
        return norm(x) * p[name]

    return block(h, attention, p, first=lambda h, p: with_gain(h, "norm1"),
                 attn=lambda y, p: with_gain(y @ p["w_o"].T, "norm_attn"),
                 second=lambda a, p: with_gain(a, "norm2"),
                 hidden=lambda u, p: with_gain(gelu(u), "norm_ffn"))


BLOCK = Exercise(reference=block, inputs=block_inputs, tolerance=5e-3, trains=("h", "p"),
                 misconceptions={
    "HeadScale has no effect in your block. Is it missing, or the same for all heads?":
        partial(block, head_scale=ONE),
    "The LayerNorm after attention is missing.":
        partial(block, attn=lambda y, p: y @ p["w_o"].T),
    "The LayerNorm in the FFN branch is missing.":
        partial(block, hidden=lambda u, p: gelu(u)),
    "Your FFN has its LayerNorm after w_down, as in CogView. It belongs between GELU and w_down, "
    "and its gain with it.":
        partial(block, hidden=lambda u, p: gelu(u), norm_behind=standard),
    "resid_scale is missing.":
        partial(block, resid_scale=ONE),
    "In your block norm_ffn stands before GELU. It belongs after it.":
        partial(block, hidden=norm_before_activation),
    "Your second sum adds to the output of norm2. norm2 is for the branch alone; the stream goes "
    "around it.":
        partial(block, last=residual_of_norm2),
    "In your block resid_scale multiplies the branch (LayerScale). It should multiply the stream.":
        partial(block, last=layer_scale),
    "In your block resid_scale multiplies the whole output. It should multiply only the stream "
    "that enters the second sum.":
        partial(block, last=scaled_sum),
    "Your first sum adds to the normalized h. The stream itself goes around the branch.":
        partial(block, around=lambda h, x, p: x),
    "In your block resid_scale acts at the first sum. It belongs to the second one.":
        partial(block, around=scaled_stream, last=plain_sum),
    "In your block norm_attn stands before w_o. It belongs after it.":
        partial(block, attn=norm_before_w_o),
    "The gain of norm_attn is missing.":
        partial(block, norm_attn=ONE),
    "The first sum is missing: nothing adds h to what attention returns.":
        partial(block, around=lambda h, x, p: 0.0),
    "You have exchanged the gains of norm1 and norm2. norm1 comes before attention, norm2 before "
    "the FFN.":
        lambda h, attention, p: block(h, attention, p, norm1=p["norm2"], norm2=p["norm1"]),
    "In your block norm_attn comes after the sum, as in Post-LN. It belongs to the branch.":
        post_ln,
    "You use ReLU; use gelu.":
        partial(block, hidden=lambda u, p: standard(torch.relu(u)) * p["norm_ffn"]),
    "You use SiLU; use gelu.":
        partial(block, hidden=lambda u, p: standard(silu(u)) * p["norm_ffn"]),
    "The activation is missing.":
        partial(block, hidden=lambda u, p: standard(u) * p["norm_ffn"]),
    "The gain of norm_ffn is missing.":
        partial(block, norm_ffn=ONE),
    "norm1 is missing: attention reads the stream without any norm.":
        partial(block, first=lambda h, p: h),
    "The gain of norm1 is missing.":
        partial(block, norm1=ONE),
    "norm2 is missing: w_up reads the stream without any norm.":
        partial(block, second=lambda a, p: a),
    "The gain of norm2 is missing.":
        partial(block, norm2=ONE),
    "In your block resid_scale acts at both sums. It belongs only to the second one.":
        partial(block, around=scaled_stream),
    "Both your branches read the block's input. The second branch should read the stream after the "
    "first sum.":
        parallel,
    "You join the heads by reshaping (B, H, T, d_k) directly, which mixes up heads and tokens. "
    "Swap these two axes first.":
        partial(block, joined=heads_one_by_one),
    "In your joined vector the heads are interleaved channel by channel. They should stand side by "
    "side.":
        partial(block, joined=heads_in_turns),
    "In yours w_o is transposed once too often, or once too little: it is stored as (out, in).":
        partial(block, attn=lambda y, p: standard(y @ p["w_o"]) * p["norm_attn"]),
    "eps is missing in your LayerNorms. It matters where the matrices are small.":
        partial(block_with, norm=partial(standard, eps=0)),
    "Where the matrices are small, the eps of your LayerNorms has no effect. Is it far smaller "
    "than 1e-5, or is it somewhere else than in the variance, inside the root?":
        partial(block_with, norm=partial(standard, eps=1e-10)),
    "Where the matrices are small, eps has hardly any effect in yours. Do you add it to the "
    "standard deviation? It belongs to the variance, inside the root.":
        partial(block_with, norm=eps_behind_root),
    "Almost: the variance of a LayerNorm divides by the number of channels, not by one less.":
        partial(block_with, norm=partial(standard, correction=1)),
    "Your LayerNorms divide by torch's std plus eps. That is the root of the sample variance; take "
    "correction=0. And eps belongs to the variance, inside the root.":
        partial(block_with, norm=sample_deviation_plus_eps),
    "You take mean and variance of your LayerNorms along axis 1, which counts the tokens. Every "
    "token has its own, along the last axis.":
        partial(block_with, norm=partial(standard, dim=1)),
    "Where the matrices are small, your LayerNorms are off as if eps were larger than 1e-5.":
        partial(block_with, norm=partial(standard, eps=1e-4)),
    "The eps of your LayerNorms is smaller than 1e-5. It matters where the matrices are small.":
        partial(block_with, norm=partial(standard, eps=1e-6)),
    "The eps of your LayerNorms is larger than 1e-5.":
        partial(block_with, norm=partial(standard, eps=1e-3)),
    "The second sum adds to the block's input h. It should add to the result of the first sum.":
        second_sum_from_input,
    "resid_scale multiplies only h in your second sum. It should multiply the whole result of the "
    "first sum, with what attention added.":
        only_the_input_scaled,
    "The LayerNorm in your FFN has a shift, too. The norms of this block have gains only.":
        partial(block, hidden=lambda u, p: hidden_layer(u, p) + 1),
    "Attention's output is not multiplied by w_o.":
        partial(block, attn=lambda y, p: standard(y) * p["norm_attn"]),
})


# What holds for every right answer: said if no known mistake fits -------------------------------


def multiple_of_layers(y, layers):
    of_each = y / layers
    return near(of_each, round(float(of_each)), 1e-9)


PROPERTIES = {
    "3.1": {
        "Even with all gammas 1, where nothing is scaled, yours is wrong. Check how you join the "
        "heads and how you multiply by w_o. Or do you do anything else with y or gamma (a norm, a "
        "sum, 1 + gamma or the like)?":
            lambda y, right, gamma: not (gamma == 1).all() or near(y, right),
        "With all gammas 1 yours is right. Which channels should each gamma multiply, and do you "
        "use it unchanged?":
            never},
    "3.2": {
        "With gamma 1, beta 0 and the identity for w_down, each row of the result should have mean "
        "0 and variance 1. Yours does not: of which vector, over which axis and with which divisor "
        "(its width) do you take the mean and the variance? Do you normalize that same vector, "
        "which GELU gives, by the root of its variance, and use gamma as it is?":
            lambda y, gamma, beta: beta.any() or is_standardized(y),
        "Check the four steps one at a time, and their order: w_up, GELU, LayerNorm over the "
        "hidden layer (gain gamma, shift beta, eps 1e-5), w_down.":
            lambda y, right, w_up: w_up.abs().max() < 0.1 or near(y, right, 5e-3),
        "Only with a small w_up is yours wrong. There eps counts: which eps do you use, and where? "
        "(A factor in front of the LayerNorm also shows only there.)":
            never},
    "3.3": {
        "Your number is not a multiple of the number of layers, but every layer adds equally many "
        "parameters, and nothing is added outside of the layers.":
            multiple_of_layers,
        "Without bias, yours is not right for every model. Write down how many numbers each of the "
        "three operations has in one layer then (how many entries has the vector that each norm "
        "normalizes?), and multiply all of them by the number of layers.":
            lambda y, right, bias: bias or near(y, right),
        "Without bias yours is right. Which of the three operations have a shift, and how wide is "
        "it?":
            never},
    "3.5": {
        "dw_down must have the shape of w_down.":
            lambda y, w_down: y[0].shape == w_down.shape,
        "dgamma must have the shape of gamma: over which axis do you have to sum?":
            lambda y, gamma: y[1].shape == gamma.shape,
        "dxhat must have the shape of xhat, with a gradient for each token.":
            lambda y, xhat: y[2].shape == xhat.shape,
        "dw_down: the output is linear in w_down, so dw_down * w_down should have the same sum as "
        "g * output. Yours does not: for each token, which vector does w_down read, which gradient "
        "meets it, and does yours contain anything else?":
            lambda y, right, w_down: near((y[0] * w_down).sum(), (right[0] * w_down).sum()),
        "dgamma: the output is linear in gamma, so dgamma * gamma should have the same sum as "
        "g * output. Yours does not: which factors does it need, and do you add up the tokens only "
        "after you have multiplied?":
            lambda y, right, gamma: near((y[1] * gamma).sum(), (right[1] * gamma).sum()),
        "dxhat: the output is linear in xhat, so dxhat * xhat should have the same sum as "
        "g * output. Yours does not: what stands between xhat and the output, and does yours "
        "contain anything else, or go back further than to xhat?":
            lambda y, right, xhat: near((y[2] * xhat).sum(), (right[2] * xhat).sum())},
    "3.6": {
        "If lambda is 0 in the last layer, that layer's branch alone is the result. Yours is not. "
        "A layer multiplies all that enters it by its lambda, and then adds its branch: by which "
        "lambdas are h0 and each branch multiplied in the end, and does anything follow?":
            lambda y, branches, lambdas: lambdas[-1].any() or near(y, branches[-1]),
        "If all lambdas are 1, the result is the sum of h0 and all branches. Yours is not: is one "
        "missing, counted twice, or multiplied by something else than a lambda?":
            lambda y, right, lambdas: not (lambdas == 1).all() or near(y, right),
        "Even with one layer yours is wrong. Which of h0 and the branch does lambda multiply, "
        "entry by entry, and does it stand there as it is?":
            lambda y, right, lambdas: len(lambdas) > 1 or near(y, right),
        "With one layer yours is right. In the second layer, which stream do you read, which "
        "lambda multiplies it, and which branch do you add?":
            lambda y, right, lambdas: len(lambdas) != 2 or near(y, right),
        "With two layers yours is right. By which lambdas is the first branch multiplied in your "
        "result of three? Every later layer scales the whole stream.":
            lambda y, right, lambdas: (lambdas < 0).any() or near(y, right),
        "Yours is wrong only with lambdas below 0. A lambda multiplies as it is, with its sign.":
            never},
    "3.7": {
        "Your number of steps, each longer by the fraction slowdown, does not take the same time "
        "as the baseline's steps.":
            lambda y, n, slow: near(y[0] * (1 + slow), n, 1e-5),
        "Your second number does not fit your first one: what fraction of the baseline's steps is "
        "missing?":
            lambda y, n: near(y[1], 1 - y[0] / n, 1e-5)},
    "3.8": {
        "First number: half the steps are a fraction of 0.5, and in yours they are not.":
            lambda y, right: not near(right[0], 0.5) or near(y[0], 0.5),
        "Second number: with half the steps in half the time, a step takes as long as before. By "
        "what fraction is it longer then?":
            lambda y, right: not near(right[1], 0) or near(y[1], 0),
        "Second number: with half the steps in the same time, a step takes 100% longer.":
            lambda y, right: not near(right[1], 1) or near(y[1], 1),
        "Second number: it should be the difference between the hours of one step of each run, as "
        "a fraction of the baseline's.":
            lambda y, right: near(y[1], right[1], 1e-5)},
    "3.9": {
        "9.1: there the learning rate grows from 0, at step 0, to 0.1 in 1,000 steps. Your "
        "learning rate does not fit that: look at its slope, and at the step where it is 0.":
            lambda y, right, test: test != "9.1" or near(y[0], right[0], 1e-6),
        "Fig. 5: there the learning rate grows by 5e-5 per step. Your learning rate does not fit "
        "that: look at its slope, and at the step where it is 0.":
            lambda y, right, test: test != "Fig. 5" or near(y[0], right[0], 1e-6),
        "Your second number is not the step at which the other test reaches this learning rate. "
        "Which slope belongs to the other test, and do you round?":
            lambda y, right: near(y[1], right[1], 1e-6)},
    "3.10": {
        "Your two numbers do not fit each other: the cosine is the embedding's standard deviation "
        "divided by that of h.":
            lambda y, s: near(y[0] * y[1], s, 1e-4),
        "The embedding and the attention branches alone have a larger variance than yours: each "
        "attention branch adds 1. Is one of them missing or too small, or are layers missing?":
            lambda y, s, layers: y[0] ** 2 >= s ** 2 + layers,
        "The FFN branches add something, too. In yours they add nothing.":
            lambda y, s, layers: y[0] ** 2 > s ** 2 + layers * (1 + 1e-4),
        "Your variance is too large: besides the embedding's, each layer adds 1 by attention and "
        "less than 1 by the FFN here. Which of them is too large, or do you miscount the layers? "
        "And does the embedding count once, with its variance?":
            lambda y, s, layers: y[0] ** 2 < s ** 2 + 2 * layers,
        "Your variance exceeds that of the embedding and the attention branches, as it should, but "
        "by the wrong amount. Does an attention branch add 1, what its last norm gives, and no "
        "more? If so, check the variance of the FFN branch: which variance a norm gives to the "
        "input of W_2, how many products W_2 adds up, how its entries are initialized, and how "
        "often the branch is added. The embedding should count with its variance.":
            lambda y, right, s: s > 0.1 or near(y[0], right[0]),
        "With a small embedding your variance is about right. How much does a larger one add to "
        "it, and how often?":
            never},
    "3.11": {
        "With w_o of zeros, where attention should add nothing, yours is wrong: check the formula "
        "of your LayerNorm, norm2, the FFN branch, resid_scale and both sums, and whether a norm "
        "acts on a sum.":
            lambda y, right, p: p["w_o"].any() or near(y, right, 5e-3),
        "With w_down of zeros, where the FFN branch should add nothing, yours is wrong: check "
        "norm1, HeadScale, how the heads are joined, w_o, norm_attn, resid_scale and both sums.":
            lambda y, right, p: p["w_down"].any() or near(y, right, 5e-3),
        "Each of the two branches alone is right. Does the second one read the result of the first "
        "sum, and is its output added to that?":
            lambda y, right, h: h.abs().max() < 0.1 or near(y, right, 5e-3),
        "Only with small matrices is yours wrong. There eps counts: which norm has another one, or "
        "has it in another place? (A factor in front of a norm also shows only there.)":
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
