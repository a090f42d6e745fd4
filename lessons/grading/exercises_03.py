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


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator)


def same(x):
    return x


def join(y):
    """(B, H, T, d_k) -> (B, T, H d_k), the heads side by side."""
    return torch.cat(y.unbind(1), dim=-1)


def gelu(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)
    return 0.5 * x * (1 + torch.tanh(inner))


def standard(x, dim=-1, eps=1e-5, correction=0):
    """Mean 0 and variance 1 along dim."""
    mean = x.mean(dim, keepdim=True)
    variance = x.var(dim, keepdim=True, correction=correction)
    return (x - mean) / (variance + eps).sqrt()


# 3.1 ----------------------------------------------------------------------------------------------

def head_inputs(generator):
    def case(batch, heads, length, d_k, gamma=None):
        y = normal(generator, batch, heads, length, d_k)
        if gamma is None:
            gamma = normal(generator, heads)
        d = heads * d_k
        return y, gamma, normal(generator, d, d)

    yield "3 heads of 2 channels", *case(2, 3, 4, 2)
    yield "as many tokens as heads", *case(2, 4, 4, 2)
    yield "a silent head", *case(2, 2, 3, 3, gamma=torch.tensor([0.0, 2.0]))
    yield "all gammas 1", *case(3, 2, 5, 4, gamma=torch.ones(2))


def one_a_head(y, gamma):
    return gamma[:, None, None]


def no_factor(y, gamma):
    return 1.0


def through_rows(x, w_o):
    return x @ w_o.T


def head_scale(y, gamma, w_o, *, factor=one_a_head, joined=join, project=through_rows,
               factor_behind=no_factor):
    scaled = y * factor(y, gamma)
    return project(joined(scaled), w_o) * factor_behind(y, gamma)


def one_a_channel(y, gamma):
    """gamma, once for each of a head's neighbouring channels."""
    return gamma.repeat_interleave(y.shape[-1])


def channels_in_turns(y, gamma):
    heads = y.shape[1]
    d_k = y.shape[-1]
    return gamma.repeat(d_k).reshape(heads, 1, d_k)


def one_a_token(y, gamma):
    return gamma[:, None]


def softmax_factor(y, gamma):
    return gamma.softmax(0)[:, None, None]


def one_plus_gamma(y, gamma):
    return 1 + gamma[:, None, None]


def size_of_gamma(y, gamma):
    return gamma.abs()[:, None, None]


def read_as_it_lies(y):
    batch, heads, length, d_k = y.shape
    return y.reshape(batch, length, heads * d_k)


def heads_in_turns(y):
    return y.permute(0, 2, 3, 1).flatten(2)


HEADS = Exercise(reference=head_scale, inputs=head_inputs, misconceptions={
    "You scale what comes out of W_o: there every channel is a mixture of all heads, and no "
    "head's own any more.":
        partial(head_scale, factor=no_factor, factor_behind=one_a_channel),
    "The gammas are nowhere in your answer: it is plain multi-head attention.":
        partial(head_scale, factor=no_factor),
    "Your gammas go round channel by channel. A head's channels are neighbours and share one "
    "number.":
        partial(head_scale, factor=channels_in_turns),
    "The scaling is right. But (B, H, T, d_k) cannot be read as (B, T, d) without moving an "
    "axis.":
        partial(head_scale, joined=read_as_it_lies),
    "The scaling is right. But in your joined vector the heads take turns, a channel each: which "
    "axis goes last?":
        partial(head_scale, joined=heads_in_turns),
    "torch stores a linear map as (out, in): look at what multiplies w_o, its rows or its "
    "columns.":
        partial(head_scale, project=lambda x, w_o: x @ w_o),
    "The gammas are used as they are: nothing makes them positive or lets them sum to one.":
        partial(head_scale, factor=softmax_factor),
    "Your gammas met the token axis (broadcasting lines up the last axes first). Which axis "
    "counts the heads?":
        partial(head_scale, factor=one_a_token),
    "The output matrix is missing.":
        partial(head_scale, project=lambda x, w_o: x),
    "gamma itself is the factor (it starts at 1), not what is added to 1.":
        partial(head_scale, factor=one_plus_gamma),
    "Why the absolute value? A head may be turned round.":
        partial(head_scale, factor=size_of_gamma),
})


# 3.2 ----------------------------------------------------------------------------------------------

def ffn_inputs(generator):
    def case(n, d, f):
        x = normal(generator, n, d)
        w_up = normal(generator, f, d)
        w_down = normal(generator, d, f)
        return x, w_up, w_down, 1 + normal(generator, f), normal(generator, f)

    yield "four tokens, d = 3, f = 12", *case(4, 3, 12)
    yield "f = d", *case(3, 8, 8)
    yield "two tokens", *case(2, 4, 16)
    small = 0.003 * normal(generator, 8, 3)
    x = normal(generator, 4, 3)
    w_down = normal(generator, 3, 8)
    gamma = 1 + normal(generator, 8)
    yield "a small w_up, where eps counts", x, small, w_down, gamma, normal(generator, 8)


def ffn_branch(x, w_up, w_down, gamma, beta, *, act=gelu, norm=standard, gain=True, shift=True,
               residual=False):
    a = norm(act(x @ w_up.T))
    if gain:
        a = a * gamma
    if shift:
        a = a + beta
    m = a @ w_down.T
    if residual:
        return x + m
    return m


def norm_behind_w_down(x, w_up, w_down, gamma, beta):
    return standard(gelu(x @ w_up.T) @ w_down.T)


def all_behind_w_down(x, w_up, w_down, gamma, beta):
    return norm_behind_w_down(x, w_up, w_down, gamma, beta) * gamma + beta


def norm_before_gelu(x, w_up, w_down, gamma, beta):
    return gelu(standard(x @ w_up.T) * gamma + beta) @ w_down.T


def rms(a):
    return a / (a.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def eps_behind_root(a):
    deviation = a.std(-1, keepdim=True, correction=0)
    return (a - a.mean(-1, keepdim=True)) / (deviation + 1e-5)


FFN = Exercise(                                             # both forms of GELU pass
    reference=ffn_branch, inputs=ffn_inputs, tolerance=5e-3, misconceptions={
    "Your LayerNorm stands behind W_2: that is CogView's place for it (9.1). Count gamma's "
    "entries.":
        norm_behind_w_down,
    "Your LayerNorm stands behind W_2 (CogView, 9.1), where gamma fits only if f = d.":
        all_behind_w_down,
    "You normalize what goes into the activation; section 2.1 writes LN around sigma.":
        norm_before_gelu,
    "Gain and shift, but no normalization: close to what 9.1 calls FFNGeglu.":
        partial(ffn_branch, norm=same),
    "That is RMSNorm: after GELU the mean is far from 0, and LayerNorm takes it off.":
        partial(ffn_branch, norm=rms),
    "Nearly: LayerNorm's variance divides by f, not by f - 1.":
        partial(ffn_branch, norm=partial(standard, correction=1)),
    "You take statistics over the tokens: that is BatchNorm. Every token has its own here.":
        partial(ffn_branch, norm=partial(standard, dim=0)),
    "You take one mean and one variance of everything: say along which axis.":
        partial(ffn_branch, norm=partial(standard, dim=(0, 1))),
    "The branch alone is asked for; x is LN(h) already, and what the residual adds is h.":
        partial(ffn_branch, residual=True),
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


def one_number_a_head(d, heads, bias):
    return heads


def gain_and_shift(bias):
    if bias:
        return 2
    return 1


def added(layers, d, heads, bias, *, of_heads=one_number_a_head, vectors=gain_and_shift,
          norms=(1, 4)):
    """norms: the widths of the LayerNorms that are added, in units of d."""
    of_norms = vectors(bias) * sum(norms) * d
    return layers * (of_heads(d, heads, bias) + of_norms)


ADDED = Exercise(reference=added, inputs=size_inputs, tolerance=1e-9, misconceptions={
    "A LayerNorm with bias has two vectors, not one: beta is forgotten.":
        partial(added, vectors=lambda bias: 1),
    "You count beta always; without bias a LayerNorm has only its gain.":
        partial(added, vectors=lambda bias: 2),
    "The second LayerNorm stands in the hidden layer. How wide is it there?":
        partial(added, norms=(1, 1)),
    "Two of the three operations are there; HeadScale has parameters too.":
        partial(added, of_heads=lambda d, heads, bias: 0),
    "HeadScale has one number for a head, not one for a channel.":
        partial(added, of_heads=lambda d, heads, bias: d),
    "d / H is how many channels a head has. How many numbers does HeadScale need?":
        partial(added, of_heads=lambda d, heads, bias: d // heads),
    "norm1 and norm2 are in Pre-LN already: count only what NormFormer adds.":
        partial(added, norms=(1, 4, 1, 1)),
    "You give HeadScale a shift too. It only multiplies; `bias` is about the LayerNorms.":
        partial(added, of_heads=lambda d, heads, bias: heads * gain_and_shift(bias)),
    "You count ResScale's d numbers a layer as well; it is an option, none of the three "
    "operations.":
        partial(added, of_heads=lambda d, heads, bias: heads + d),
    "One LayerNorm of the two is missing, the one of width d.":
        partial(added, norms=(4,)),
    "8d would be what SwiGLU's first matrix gives; here the hidden layer has 4d.":
        partial(added, norms=(1, 8)),
    "HeadScale has one number for each head, not d for each.":
        partial(added, of_heads=lambda d, heads, bias: heads * d),
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
        lambda activation, qk_norm: [False] * 9,
    "You say that all are undone. Some stand after the last norm of their branch.":
        lambda activation, qk_norm: [True] * 9,
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
        xhat = normal(generator, n, f)
        gamma = 0.5 + torch.rand(f, generator=generator)
        return xhat, gamma, normal(generator, d, f), normal(generator, n, d)

    yield "five tokens, d = 2, f = 6", *case(5, 2, 6)
    yield "f = d", *case(4, 3, 3)
    yield "one token", *case(1, 2, 8)
    xhat = normal(generator, 4, 8)
    eighths = torch.full((8,), 0.125)
    w_down = normal(generator, 2, 8)
    yield "gamma an eighth everywhere", xhat, eighths, w_down, normal(generator, 4, 2)


def of_w_down(xhat, gamma, g):
    return g.T @ (xhat * gamma)


def of_gamma(xhat, gamma, above):
    return (xhat * above).sum(0)


def of_xhat(gamma, above):
    return above * gamma


def ffn_gradients(xhat, gamma, w_down, g, *, dw=of_w_down, dgamma=of_gamma, dxhat=of_xhat):
    above = g @ w_down                                      # the gradient at gamma xhat, (N, f)
    return dw(xhat, gamma, g), dgamma(xhat, gamma, above), dxhat(gamma, above)


GRADIENTS = Exercise(reference=ffn_gradients, inputs=gradient_inputs,
                     parts=("dw_down", "dgamma", "dxhat"), misconceptions={
    "dw_down goes the wrong way with gamma: a smaller input gives the matrix a smaller gradient, "
    "not a larger one.":
        partial(ffn_gradients, dw=lambda xhat, gamma, g: g.T @ (xhat / gamma)),
    "dw_down: what does w_down multiply, xhat, or what the norm gives out?":
        partial(ffn_gradients, dw=lambda xhat, gamma, g: g.T @ xhat),
    "dw_down: gamma once too often.":
        partial(ffn_gradients, dw=lambda xhat, gamma, g: of_w_down(xhat, gamma * gamma, g)),
    "dgamma: the gradient that comes from above, g, is not in it.":
        partial(ffn_gradients, dgamma=lambda xhat, gamma, above: xhat.sum(0)),
    "dgamma: gamma's derivative has no gamma in it, since the output is linear in gamma.":
        partial(ffn_gradients, dgamma=lambda xhat, gamma, above: (xhat * gamma * above).sum(0)),
    "dgamma: that is beta's gradient. gamma multiplies something; where is it?":
        partial(ffn_gradients, dgamma=lambda xhat, gamma, above: above.sum(0)),
    "dxhat: between xhat and w_down stands gamma.":
        partial(ffn_gradients, dxhat=lambda gamma, above: above),
    "dxhat: the backward pass multiplies by gamma, as the forward pass does.":
        partial(ffn_gradients, dxhat=lambda gamma, above: above / gamma),
}, without=AUTOGRAD)


# 3.6 ----------------------------------------------------------------------------------------------

def stream_inputs(generator):
    def case(layers):
        h = normal(generator, 2, 4, 5)
        branches = normal(generator, layers, 2, 4, 5)
        return h, branches, 0.5 + torch.rand(layers, 5, generator=generator)

    yield "three layers", *case(3)
    yield "one layer", *case(1)
    yield "six layers", *case(6)
    h = normal(generator, 2, 2, 3)
    yield "lambda 1: Pre-LN's sum", h, normal(generator, 4, 2, 2, 3), torch.ones(4, 3)
    h = normal(generator, 2, 3, 2)
    last_of_zeros = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    yield "lambda 0 in the last layer", h, normal(generator, 2, 2, 3, 2), last_of_zeros


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
    "That is an average of both, as nGPT takes it. Here the branch keeps its weight 1.":
        partial(stream, step=lambda h, branch, scale: scale * h + (1 - scale) * branch),
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


def with_right_steps(fewer):
    """The answer whose second number is fewer(n, slow)."""
    def answer(n, slow):
        return n / (1 + slow), fewer(n, slow)
    return answer


TIME = Exercise(reference=equal_time, inputs=time_inputs, parts=("steps", "fewer"), misconceptions={
    "That gives both the same steps, so NormFormer more time. The paper compares at equal time.":
        lambda n, slow: (n, 0.0),
    "6% longer a step is not 6% fewer steps: try the case in which a step takes twice as long.":
        lambda n, slow: (n * (1 - slow), slow),
    "Slower steps, and more of them in the same time?":
        lambda n, slow: (n * (1 + slow), slow),
    "The steps are right. The second number is how many fewer they are, as a share of the "
    "baseline's.":
        with_right_steps(lambda n, slow: slow),
    "slowdown is a share already: 0.06 stands for 6%.":
        lambda n, slow: equal_time(n, slow / 100),
})


# 3.8 ----------------------------------------------------------------------------------------------

def table_inputs(generator):
    yield "Table 6", 279.893, 223.904, 288.0, 237.0
    yield "half the steps, half the time", 100.0, 50.0, 10.0, 5.0
    yield "half the steps, no time saved", 100.0, 50.0, 10.0, 10.0
    yield "no step saved, 5% slower", 100.0, 100.0, 20.0, 21.0


def share_of(base, new):
    return new / base


def longer_by(base, new):
    return new / base - 1


def read_table(base_steps, steps, base_hours, hours, *, share=share_of, longer=longer_by):
    """longer compares the hours that one step takes."""
    third = longer(base_hours / base_steps, hours / steps)
    return share(base_steps, steps), share(base_hours, hours), third


def hours_for_each(base_steps, steps, base_hours, hours):
    return steps / base_steps, hours / base_hours, hours / base_hours - 1


def steps_as_long(base_steps, steps, base_hours, hours):
    return steps / base_steps, steps / base_steps, 0.0


TABLE = Exercise(reference=read_table, inputs=table_inputs,
                 parts=("share of the steps", "share of the time", "longer"), misconceptions={
    "The third: hours over hours compares runs of different lengths. How long does one step "
    "take?":
        hours_for_each,
    "The third has baseline and NormFormer exchanged: its sign says that a step got shorter.":
        partial(read_table, longer=lambda base, new: base / new - 1),
    "A step of NormFormer's takes longer: the share of the time is another one.":
        steps_as_long,
    "The third: longer than what? You divide by NormFormer's own step; the baseline's is the "
    "measure.":
        partial(read_table, longer=lambda base, new: 1 - base / new),
    "Those are gains in speed, in how much more is done per step or hour; a share is what is "
    "needed over what was.":
        partial(read_table, share=lambda base, new: base / new - 1),
})


# 3.9 ----------------------------------------------------------------------------------------------

SLOPES = {"Fig. 5": 5e-5, "9.1": 0.1 / 1000}            # how much each step adds to the rate
OTHER = {"Fig. 5": "9.1", "9.1": "Fig. 5"}


def rate_inputs(generator):
    yield "Table 8's baseline", "9.1", 94
    yield "Table 8's NormFormer", "9.1", 200
    yield "200 steps in Figure 5's test", "Fig. 5", 200
    yield "1,000 steps in Figure 5's test", "Fig. 5", 1000
    yield "201 steps in Figure 5's test", "Fig. 5", 201


def death(test, step):
    rate = step * SLOPES[test]
    return rate, rate / SLOPES[OTHER[test]]


def other_way(test, step):
    rate, other_step = death(test, step)
    return rate, step * step / other_step


def number_of_the_test(test, step):
    _, other_step = death(test, step)
    if test == "9.1":
        return 0.1, other_step
    return 5e-5, other_step


def step_before(test, step):
    rate, other_step = death(test, step - 1)
    return rate, other_step + 1


def rate_twice(test, step):
    rate, _ = death(test, step)
    return rate, rate


def share_of_the_run(test, step):
    _, other_step = death(test, step)
    return step / 1000, other_step


DEATH = Exercise(reference=death, inputs=rate_inputs, tolerance=1e-6,
                 parts=("rate", "step in the other test"), misconceptions={
    "The rate is right. The steeper test gets there in fewer steps; yours takes more.":
        other_way,
    "That number describes the test, not the step at which it ended. What is the rate at that "
    "step?":
        number_of_the_test,
    "You have the two tests' slopes exchanged.":
        lambda test, step: death(OTHER[test], step),
    "Your rate is that of the step before: at step n it has grown n times.":
        lambda test, step: death(test, step - 1),
    "You count the steps from 1, at rate 0. At step n the rate has grown n times, in both tests.":
        step_before,
    "The second number is to be a step of the other test, not a rate.":
        rate_twice,
    "That is how far the run has come as a share of 1,000 steps. The rate at the end of the ramp "
    "is not 1.":
        share_of_the_run,
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


def stream_share(s, layers, d, *, attention=1.0, ffn=ffn_variance, count=same, size=math.sqrt,
                 cosine=same):
    """attention, ffn: the variance that a branch adds; count: how often."""
    variance = s ** 2 + count(layers) * (attention + ffn(layers, d))
    return size(variance), cosine(s / math.sqrt(variance))


def without_embedding(s, layers, d):
    whole, _ = stream_share(s, layers, d)
    std = math.sqrt(whole ** 2 - s ** 2)
    return std, s / std


def summed(s, layers, d):
    std = s + layers * (1 + math.sqrt(ffn_variance(layers, d)))
    return std, s / std


EMBEDDING = Exercise(reference=stream_share, inputs=embedding_inputs, tolerance=1e-4,
                     parts=("size", "cosine"), misconceptions={
    "Each branch adds something of its own, and the stream grows with it.":
        lambda s, layers, d: (s, 1.0),
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
    "W_2 starts smaller than the other matrices: see init_weights in model.py.":
        partial(stream_share, ffn=lambda layers, d: 4 * d * 0.02 ** 2),
    "W_2 sums over the hidden layer's entries. How many are they?":
        partial(stream_share, ffn=lambda layers, d: ffn_variance(layers, d) / 4),
    "That is the stream after the first layer. All of them add to it.":
        partial(stream_share, count=lambda layers: 1),
    "The feed-forward branch: 0.02 / sqrt(2L) is a standard deviation; you add variances.":
        partial(stream_share, ffn=lambda layers, d: 4 * d * 0.02 / math.sqrt(2 * layers)),
    "Every layer has two branches, but you count each of them twice.":
        partial(stream_share, count=lambda layers: 2 * layers),
})


# 3.11 ---------------------------------------------------------------------------------------------

def block_tensors(generator, d, heads):
    def vector(n):
        return 1 + 0.5 * normal(generator, n)

    def matrix(outputs, inputs):
        return normal(generator, outputs, inputs) / d ** 0.5

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
    attention = mean_so_far(normal(generator, 6, 6), heads=2)
    yield "2 heads of 3", normal(generator, 2, 5, 6), attention, p
    p = block_tensors(generator, 8, heads=4)
    attention = mean_so_far(normal(generator, 8, 8), heads=4)
    yield "4 heads of 2", normal(generator, 2, 5, 8), attention, p
    p = block_tensors(generator, 4, heads=2)
    p["resid_scale"] = torch.ones(4)
    attention = mean_so_far(normal(generator, 4, 4), heads=2)
    yield "lambda_resid 1", normal(generator, 2, 5, 4), attention, p

    h = normal(generator, 2, 5, 4)
    without_attention = {**p, "w_o": torch.zeros(4, 4)}
    yield "w_o of zeros: the feed-forward branch alone", h, attention, without_attention
    h = normal(generator, 2, 5, 4)
    without_ffn = {**p, "w_down": torch.zeros(4, 16)}
    yield "w_down of zeros: attention alone", h, attention, without_ffn
    h = 0.01 * normal(generator, 2, 5, 4)
    small = {**p, "w_o": 0.01 * p["w_o"], "w_up": 0.01 * p["w_up"]}
    yield "small matrices, where eps counts", h, attention, small


def norm1(h, p):
    return standard(h) * p["norm1"]


def scaled_heads(y, p):
    return join(y * p["head_scale"][:, None, None])


def behind_attention(y, p):
    return standard(y @ p["w_o"].T) * p["norm_attn"]


def stream_itself(h, x, p):
    return h


def norm2(a, p):
    return standard(a) * p["norm2"]


def hidden_layer(u, p):
    return standard(gelu(u)) * p["norm_ffn"]


def through_w_down(u, p):
    return u @ p["w_down"].T


def scaled_residual(a, m, p):
    return p["resid_scale"] * a + m


def block(h, attention, p, *, first=norm1, heads=scaled_heads, attn=behind_attention,
          around=stream_itself, second=norm2, hidden=hidden_layer, ffn=through_w_down,
          last=scaled_residual):
    x = first(h, p)
    y = heads(attention(x), p)
    a = around(h, x, p) + attn(y, p)
    u = second(a, p) @ p["w_up"].T
    m = ffn(hidden(u, p), p)
    return last(a, m, p)


def plain_gelu(u, p):
    return gelu(u)


def norm_behind_down(u, p):
    return standard(through_w_down(u, p))


def norm_before_activation(u, p):
    return gelu(standard(u) * p["norm_ffn"])


def hidden_relu(u, p):
    return standard(torch.relu(u)) * p["norm_ffn"]


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


def nothing(y, p):
    return 0.0


def norms_exchanged(h, attention, p):
    exchanged = {**p, "norm1": p["norm2"], "norm2": p["norm1"]}
    return block(h, attention, exchanged)


def post_ln(h, attention, p):
    y = scaled_heads(attention(norm1(h, p)), p)
    a = standard(h + y @ p["w_o"].T) * p["norm_attn"]
    return block(a, attention, p, attn=nothing)


def parallel(h, attention, p):
    a = block(h, attention, p, last=lambda a, m, p: a)
    m = block(h, attention, p, attn=nothing, last=lambda a, m, p: m)
    return scaled_residual(a, m, p)


BLOCK = Exercise(reference=block, inputs=block_inputs, tolerance=5e-3, misconceptions={
    "HeadScale is missing.":
        partial(block, heads=lambda y, p: join(y)),
    "The LayerNorm behind attention is missing.":
        partial(block, attn=lambda y, p: y @ p["w_o"].T),
    "The LayerNorm in the feed-forward branch is missing.":
        partial(block, hidden=plain_gelu),
    "The feed-forward norm stands behind w_down (CogView).":
        partial(block, hidden=plain_gelu, ffn=norm_behind_down),
    "lambda_resid is missing.":
        partial(block, last=plain_sum),
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
        partial(block, attn=lambda y, p: standard(y @ p["w_o"].T)),
    "The first residual is missing.":
        partial(block, around=lambda h, x, p: 0.0),
    "norm1 and norm2 are exchanged: norm1 stands before attention, norm2 before the feed-forward "
    "part.":
        norms_exchanged,
    "norm_attn stands behind the sum in your block, as in Post-LN; it belongs to the branch.":
        post_ln,
    "That is ReLU; use gelu.":
        partial(block, hidden=hidden_relu),
    "norm_ffn's gain is missing.":
        partial(block, hidden=lambda u, p: standard(gelu(u))),
    "norm1 is missing: attention reads the stream as it is.":
        partial(block, first=lambda h, p: h),
    "norm1's gain is missing.":
        partial(block, first=lambda h, p: standard(h)),
    "norm2 is missing: w_up reads the stream as it is.":
        partial(block, second=lambda a, p: a),
    "norm2's gain is missing.":
        partial(block, second=lambda a, p: standard(a)),
    "lambda_resid stands at both residuals in your block; section 3 has it at the second alone.":
        partial(block, around=scaled_stream),
    "Both your branches read the block's input; the second one reads what the first has changed.":
        parallel,
})


# What holds of every right answer: said where none of the known mistakes fits ---------------------

def never(y, *arguments):
    return False


def right_unscaled(y, heads, gamma, w_o):
    return not (gamma == 1).all() or near(y, join(heads) @ w_o.T)


def multiple_of_layers(y, layers, d, heads, bias):
    of_each = y / layers
    return near(of_each, round(float(of_each)), 1e-9)


def right_without_bias(y, layers, d, heads, bias):
    return bias or near(y, added(layers, d, heads, False))


def same_sum(gradient, of, xhat, gamma, w_down, g):
    """What holds where the output is linear in `of`."""
    output = (gamma * xhat) @ w_down.T
    return near((gradient * of).sum(), (g * output).sum())


def dw_sums(y, xhat, gamma, w_down, g):
    return same_sum(y[0], w_down, xhat, gamma, w_down, g)


def plain_where_ones(y, h, branches, lambdas):
    return not (lambdas == 1).all() or near(y, h + branches.sum(0))


def one_layer_is_right(y, h, branches, lambdas):
    return len(lambdas) > 1 or near(y, stream(h, branches, lambdas))


def half_the_steps(y, base_steps, steps, base_hours, hours):
    return (base_steps, steps) != (100, 50) or near(y[0], 0.5)


def half_the_time(y, base_steps, steps, base_hours, hours):
    return (base_hours, hours) != (10, 5) or near(y[1], 0.5)


def half_of_both(y, base_steps, steps, base_hours, hours):
    shares = steps / base_steps, hours / base_hours
    return shares != (0.5, 0.5) or near(y[2], 0)


def twice_as_long(y, base_steps, steps, base_hours, hours):
    shares = steps / base_steps, hours / base_hours
    return shares != (0.5, 1.0) or near(y[2], 1)


def slope_of_figure_5(y, test, step):
    return test != "Fig. 5" or near(y[0], step * SLOPES["Fig. 5"], 1e-6)


def right_without_attention(y, h, attention, p):
    return p["w_o"].any() or near(y, block(h, attention, p), 5e-3)


def right_without_ffn(y, h, attention, p):
    return p["w_down"].any() or near(y, block(h, attention, p), 5e-3)


PROPERTIES = {
    "3.1": {
        "Even with all gammas 1, where nothing is scaled, yours is off: look at how the heads are "
        "joined, at w_o, and at what you add.":
            right_unscaled,
        "With all gammas 1 yours is right. Which channels, and where, does each gamma meet?":
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
            right_without_bias,
        "Without bias yours is right. Which of the three get a shift, and how wide?":
            never},
    "3.5": {
        "dw_down has to have w_down's shape.":
            lambda y, xhat, gamma, w_down, g: y[0].shape == w_down.shape,
        "dgamma has to have gamma's shape: which axis is summed?":
            lambda y, xhat, gamma, w_down, g: y[1].shape == gamma.shape,
        "dw_down: the output is linear in w_down, so dw_down * w_down should have the same sum as "
        "g * output. It does not.":
            dw_sums,
        "dgamma: the output is linear in gamma, so dgamma * gamma should have the same sum as g * "
        "output. It does not.":
            lambda y, xhat, gamma, w_down, g: same_sum(y[1], gamma, xhat, gamma, w_down, g),
        "dxhat: the output is linear in xhat, so dxhat * xhat should have the same sum as g * "
        "output. It does not.":
            lambda y, xhat, gamma, w_down, g: same_sum(y[2], xhat, xhat, gamma, w_down, g)},
    "3.6": {
        "With lambda 0 in the last layer only that layer's branch is left. In yours there is "
        "something else.":
            lambda y, h, branches, lambdas: lambdas[-1].any() or near(y, branches[-1]),
        "With all lambdas 1 the stream is a plain sum of its start and all branches. Yours is "
        "not.":
            plain_where_ones,
        "Even with one layer yours is off.":
            one_layer_is_right,
        "With one layer yours is right. What does the second one read?":
            never},
    "3.7": {
        "Your steps, each so much longer, do not take as long as the baseline's.":
            lambda y, n, slow: near(y[0] * (1 + slow), n, 1e-5),
        "Your second number does not fit your first: how many of the baseline's steps are "
        "missing, as a share?":
            lambda y, n, slow: near(y[1], 1 - y[0] / n, 1e-5)},
    "3.8": {
        "Half the steps are a share of 0.5.":
            half_the_steps,
        "Half the time is a share of 0.5.":
            half_the_time,
        "The third: half the steps in half the time, so a step takes as long as before.":
            half_of_both,
        "The third: half the steps in the same time. How much longer does one take?":
            twice_as_long},
    "3.9": {
        "9.1: the rate goes from 0 to 0.1 in 1,000 steps. Yours is another.":
            lambda y, test, step: test != "9.1" or near(y[0], step * SLOPES["9.1"], 1e-6),
        "Fig. 5: each step adds what its caption says. Yours adds something else.":
            slope_of_figure_5,
        "At your second number, the other test has another rate than this one at `step`.":
            lambda y, test, step: near(y[1] * SLOPES[OTHER[test]], step * SLOPES[test], 1e-6)},
    "3.10": {
        "Your two numbers do not fit: the cosine is the embedding's deviation over the whole "
        "one's.":
            lambda y, s, layers, d: near(y[0] * y[1], s, 1e-4),
        "Attention's branch alone adds a variance of 1 in each layer. Yours has less in all.":
            lambda y, s, layers, d: y[0] ** 2 >= s ** 2 + layers,
        "The feed-forward branches add something too. In yours they add nothing.":
            lambda y, s, layers, d: y[0] ** 2 > s ** 2 + layers * (1 + 1e-4),
        "Attention's part is there, and too much or too little from the feed-forward branch: its "
        "width, the start of W_2, and how often it is added.":
            never},
    "3.11": {
        "With w_o of zeros, where attention adds nothing, yours is off: look at norm2, the "
        "feed-forward branch and resid_scale.":
            right_without_attention,
        "With w_down of zeros, where the feed-forward branch adds nothing, yours is off: look at "
        "norm1, HeadScale, w_o, norm_attn and resid_scale.":
            right_without_ffn,
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
