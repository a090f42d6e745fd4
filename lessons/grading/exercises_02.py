"""
Lesson 2, PowerNorm: its statistics, who sees the future, its backward pass and how it runs away.

x is (B, T, d): B sequences, T tokens, d channels. A statistic of PowerNorm has d numbers, one a
channel. See grader.py for the form. A keyword of a reference is something that can go wrong with
it: functools.partial makes the wrong answer. The references use nothing of model.py; the notebook
compares the two.
"""
import math
from functools import partial

import torch

from answers import near
from grader import AUTOGRAD, Exercise
from pieces import never, randn

ALL = (0, 1)                                            # the axes of the sequences and of time


def tokens(generator, *shape):
    """Random (B, T, d) with a mean that is not 0 and channels of different sizes."""
    x = randn(generator, *shape) + 0.5
    return x * torch.linspace(0.5, 3, shape[-1])


def over_tokens(x):
    return x.mean(ALL)


def psi_of(square, eps, eps_at="inside", root=torch.sqrt):
    """eps_at: inside the root, behind it or nowhere."""
    if eps_at == "inside":
        return root(square + eps)
    if eps_at == "behind":
        return root(square) + eps
    return root(square)


# 2.1 ----------------------------------------------------------------------------------------------

def moment_inputs(generator):
    yield "2 sequences of 3 tokens, 4 channels", tokens(generator, 2, 3, 4)
    yield "one sequence", tokens(generator, 1, 5, 4)
    yield "one token", tokens(generator, 1, 1, 6)
    yield "as many channels as tokens and sequences", tokens(generator, 3, 3, 3)


def moment(x):
    return (x * x).mean(ALL)


MOMENT = Exercise(reference=moment, inputs=moment_inputs, misconceptions={
    "That is RMSNorm's statistic, one number a token. PowerNorm has one a channel.":
        lambda x: (x * x).mean(-1),
    "You subtract the mean first. PowerNorm does not: no mean anywhere.":
        lambda x: x.var(ALL, correction=0),
    "The mean of the squares is asked for; you take absolute values.":
        lambda x: x.abs().mean(ALL),
    "The mean of the squares, not the square of the mean.":
        lambda x: x.mean(ALL) ** 2,
    "That is torch's variance: it takes the mean off, and divides by one less than there are.":
        lambda x: x.var(ALL),
    "That is the sum over all tokens. Divide by how many there are.":
        lambda x: (x * x).sum(ALL),
})


# 2.2 ----------------------------------------------------------------------------------------------

def forward_inputs(generator):
    x = tokens(generator, 2, 3, 4)
    weight = torch.rand(4, generator=generator) + 0.5
    yield "2 x 3 tokens, 4 channels", x, torch.rand(4, generator=generator) + 0.2, weight, 1e-5
    yield "tokens unlike those before", 10 * x, torch.rand(4, generator=generator), weight, 1e-5
    yield "tiny psi2, where eps counts", x, torch.tensor([0.0, 1e-4, 1e-3, 1e-2]), weight, 1e-2
    yield "one token", x[:1, :1], moment(x), weight, 1e-5


def forward(x, psi2, weight, eps, *, centred=False, own=None, root=torch.sqrt, eps_at="inside"):
    """own: the statistic of this batch that is taken for psi2."""
    if centred:
        x = x - x.mean(ALL)
    if own:
        psi2 = own(x)
    return weight * x / psi_of(psi2, eps, eps_at, root)


def of_each_token(x):
    return x.square().mean(-1, keepdim=True)


FORWARD = Exercise(reference=forward, inputs=forward_inputs, misconceptions={
    "You subtract the batch's mean. BatchNorm does that, and the essay's Figure 9; PowerNorm "
    "leaves the mean alone.":
        partial(forward, centred=True),
    "You normalize with this batch's own mean square. The running one is given: psi2.":
        partial(forward, own=moment),
    "You divide by the mean square itself. What has the size of x is its root.":
        partial(forward, root=lambda square: square),
    "eps stands under the root.":
        partial(forward, eps_at="behind"),
    "eps is missing: a channel that was always 0 gives a division by 0.":
        partial(forward, eps_at="nowhere"),
    "That is RMSNorm: each token by itself. Here each channel is divided by its own psi.":
        partial(forward, own=of_each_token),
    "The gain multiplies; you divide by it.":
        lambda x, psi2, weight, eps: x / (weight * (psi2 + eps).sqrt()),
    "You multiply by psi. A channel that is large is made smaller.":
        partial(forward, root=torch.rsqrt),
}, without=("batch_norm", "BatchNorm1d"))


# 2.3 ----------------------------------------------------------------------------------------------

def running_inputs(generator):
    moments = torch.rand(5, 3, generator=generator)
    yield "five steps", moments, 0.9
    yield "fifty steps at 0.04", torch.full((50, 2), 0.04), 0.9
    yield "one step", moments[:1], 0.9
    yield "decay 0.5", moments, 0.5


def running(moments, decay, *, update_first=False, exchanged=False, of_roots=False):
    """What each step uses, (steps, d), and the start's share in what the last one leaves."""
    if of_roots:
        moments = moments.sqrt()
    old = decay
    if exchanged:
        old = 1 - decay
    psi2 = torch.ones_like(moments[0])
    rows = []
    for m in moments:
        new = old * psi2 + (1 - old) * m
        if update_first:
            rows.append(new)
        else:
            rows.append(psi2)
        psi2 = new
    used = torch.stack(rows)
    if of_roots:
        used = used.square()
    return used, decay ** len(moments)


def plain_mean(moments, right):
    rows = [torch.ones_like(moments[0])]
    for n in range(1, len(moments)):
        rows.append(moments[:n].mean(0))
    return torch.stack(rows), right[1]


def one_tensor(moments, decay):
    used, share = running(moments, decay, update_first=True)
    return used[-1].expand_as(used), share


RUNNING = Exercise(reference=running, inputs=running_inputs, parts=("the statistics", "the share"),
                   misconceptions={
    "You update before use: step t then normalizes with its own tokens too. It uses what the "
    "steps before it left.":
        partial(running, update_first=True),
    "The weights are exchanged: decay is the old value's.":
        partial(running, exchanged=True),
    "That is the plain mean of all steps so far; here older steps fade.":
        plain_mean,
    "All your rows are one tensor, changed in place by each update (*=, +=, lerp_): keep copies, "
    "or make a new psi2.":
        one_tensor,
    "You average the roots. It is the squares that are averaged.":
        partial(running, of_roots=True),
})


# 2.4 ----------------------------------------------------------------------------------------------

def statistic_inputs(generator):
    x = tokens(generator, 2, 3, 4)
    psi2 = torch.rand(4, generator=generator) + 3
    cases = (
        (True, 0, 2),
        (True, 1, 2),
        (True, 2, 2),
        (True, 3, 2),
        (False, 0, 2),
        (False, 2, 2),
        (True, 0, 0),
        (False, 0, 0))
    for training, step, warmup in cases:
        mode = "training" if training else "evaluation"
        label = f"{mode}, {step} steps done, warm-up of {warmup}"
        yield label, x, psi2, training, step, warmup


def statistic(x, psi2, training, step, warmup):
    if training and step < warmup:
        return moment(x)
    return psi2


def own_when(condition):
    """A rule: the batch's own moment where condition(training, step, warmup) holds, else psi2."""
    def rule(x, psi2, training, step, warmup):
        if condition(training, step, warmup):
            return moment(x)
        return psi2
    return rule


def psi2_moves_first(x, psi2, training, step, warmup):
    if training and step >= warmup:
        return 0.9 * psi2 + 0.1 * moment(x)
    return statistic(x, psi2, training, step, warmup)


STATISTIC = Exercise(reference=statistic, inputs=statistic_inputs, misconceptions={
    "One step too long: `step` counts the updates that are done, so the first step has 0.":
        own_when(lambda training, step, warmup: training and step <= warmup),
    "The wrong way round: it is at the beginning that psi2 cannot be trusted yet.":
        own_when(lambda training, step, warmup: training and step >= warmup),
    "The warm-up is one of training; you look for it in evaluation: a `not` too many?":
        own_when(lambda training, step, warmup: not training and step < warmup),
    "The condition is right, the two answers are exchanged: in the warm-up there is no memory yet "
    "to be used.":
        own_when(lambda training, step, warmup: not (training and step < warmup)),
    "One of two conditions is enough for you (`or`). The batch is looked at only when both hold.":
        own_when(lambda training, step, warmup: training or step < warmup),
    "Right in warm-up and evaluation. After warm-up you update psi2 before its use, and so still "
    "look at the batch.":
        psi2_moves_first,
})


# 2.5 ----------------------------------------------------------------------------------------------

def by_token(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def by_batch(x):
    return x / moment(x).sqrt()


def by_batch_detached(x):
    return x / moment(x.detach()).sqrt()


def by_fixed(x):
    return x / torch.linspace(0.5, 3, x.shape[-1])


def by_past(x):
    """Each token divided by the root mean square of all up to it."""
    count = torch.arange(1, x.shape[1] + 1)[:, None]
    so_far = x.square().mean(0).cumsum(0) / count
    return x / so_far.sqrt()


def layer_norm(x):
    return torch.layer_norm(x, x.shape[-1:])


def next_added(x):
    nothing = torch.zeros_like(x[:, :1])
    following = torch.cat((x[:, 1:], nothing), dim=1)
    return x + following


def by_one_entry(x):
    """A number of each token is added to one of the next, each time of another channel and sequence."""
    sequences, length, channels = x.shape
    y = x.clone()
    for t in range(length - 1):
        b = t % sequences
        c = t % channels
        y[b, t + 1, c] += x[b, t, c]
    return y


def reach_inputs(generator):
    x = tokens(generator, 2, 4, 6).double()
    yield "RMSNorm", by_token, x
    yield "the batch's own mean square", by_batch, x
    yield "the same, detached", by_batch_detached, x
    yield "a fixed psi", by_fixed, x
    yield "the mean square of all tokens so far", by_past, x
    yield "LayerNorm", layer_norm, x
    yield "the next token added", next_added, x
    yield "one entry of the token before added", by_one_entry, x


REACH_ABOUT = {
    "RMSNorm":
        "RMSNorm looks at each token by itself, and at the ratios of its channels. Does your "
        "change move them?",
    "the batch's own mean square":
        "The batch's mean square: every token has a part in it, also for those before it.",
    "the same, detached":
        "Detached: that is about gradients; the numbers are the same.",
    "a fixed psi":
        "A fixed psi: no token has a part in what another one is divided by.",
    "the mean square of all tokens so far":
        "The mean square so far: which outputs come after a token, itself included?",
    "LayerNorm":
        "LayerNorm looks at each token by itself, and takes its mean away. Does your change "
        "outlive that?",
    "the next token added":
        "The next token added: the output at s has the token at s + 1 in it.",
    "one entry of the token before added":
        "One entry of the token before: does your change touch all channels, in all sequences, and "
        "do you look at all of them?",
}


def another(token):
    return token + torch.linspace(1, 2, token.shape[-1])


def reach(norm, x, *, change=another, sequences=slice(None), and_later=False, over=torch.amax,
          looked_at=slice(None)):
    """(T, T): whether the output at s, the row, moves with the token at t, the column."""
    y = norm(x)
    columns = []
    for t in range(x.shape[1]):
        changed = slice(t, t + 1)
        if and_later:
            changed = slice(t, None)
        other = x.clone()
        other[sequences, changed] = change(x[sequences, changed])
        moved = (norm(other) - y)[looked_at].abs()
        columns.append(over(moved, (0, 2)) > 1e-9)
    return torch.stack(columns, dim=1)


def turned_round(token):
    return -token


def twice(token):
    return 2 * token


def plus_one(token):
    return token + 1


def one_channel(token):
    return token + torch.eye(token.shape[-1])[0]


def derivative(norm, x):
    jacobian = torch.autograd.functional.jacobian(norm, x)              # (B, T, d, B, T, d)
    return jacobian.abs().amax((0, 2, 3, 5)) > 1e-9


REACH = Exercise(reference=reach, inputs=reach_inputs, about=REACH_ABOUT, misconceptions={
    "Transposed: the row is the output's position, the column the token's.":
        lambda right: right.T,
    "You look at derivatives. A detached statistic has none and is still made of all tokens: "
    "change a token and look.":
        derivative,
    "You change a token's sign, which no mean of squares can notice. Change it in another way.":
        partial(reach, change=turned_round),
    "You make a token longer without turning it, which RMSNorm does not notice; or 0, of which it "
    "makes NaN, and no comparison with NaN is true. Change it in another way.":
        partial(reach, change=twice),
    "You shift all channels alike, which LayerNorm does not notice. Change the token in another "
    "way.":
        partial(reach, change=plus_one),
    "Only the future? The whole matrix is asked for, the past and the diagonal too.":
        lambda right: right.triu(1),
    "You change token t and all that follow it. Only token t is to change.":
        partial(reach, and_later=True),
    "That is how it should be. Find out how it is: change a token, and compare the outputs.":
        lambda right: torch.ones_like(right).tril(),
    "You ask whether all numbers of a position change (`all`). One of them is enough.":
        partial(reach, over=torch.amin),
    "You change one channel of a token. What if another one matters?":
        partial(reach, change=one_channel),
    "You change the token of one sequence. It is that of all sequences which is asked.":
        partial(reach, sequences=0),
    "You change a token of one sequence and look at another one. Change and look at all of them.":
        partial(reach, sequences=0, looked_at=slice(-1, None)),
})


# 2.6 ----------------------------------------------------------------------------------------------

def exact_inputs(generator):
    x = tokens(generator, 2, 3, 4)
    g = randn(generator, 2, 3, 4)
    yield "2 x 3 tokens, 4 channels", x, g + 0.5, 1e-5
    cube = tokens(generator, 3, 3, 3)
    yield "as many channels as tokens and sequences", cube, tokens(generator, 3, 3, 3), 1e-5
    yield "a gradient along xhat", x, x / moment(x).sqrt(), 1e-5
    yield "small x, where eps counts", 0.1 * x, g, 1e-1
    yield "one token", x[:1, :1], g[:1, :1] + 1, 1e-1


def exact(x, g, eps, *, mean=over_tokens, part=1.0, centred=False):
    """part: how much of the term in xhat is taken away; centred: whether the mean of g is, too."""
    psi = (moment(x) + eps).sqrt()
    xhat = x / psi
    dx = g - part * xhat * mean(g * xhat)
    if centred:
        dx = dx - over_tokens(g)
    return dx / psi


def product_of_means(x, g, eps):
    psi = (moment(x) + eps).sqrt()
    xhat = x / psi
    return (g - xhat * over_tokens(g) * over_tokens(xhat)) / psi


def one_hat(x, g, eps):
    psi = (moment(x) + eps).sqrt()
    xhat = x / psi
    return (g - xhat * over_tokens(g * x)) / psi


EXACT = Exercise(reference=exact, inputs=exact_inputs, misconceptions={
    "You take the statistic for a constant. Each entry of x moves it too, and with it the outputs "
    "of all tokens.":
        partial(exact, part=0.0),
    "You average over the row, as RMSNorm's backward does. Average over what the statistic "
    "averages.":
        partial(exact, mean=lambda p: p.mean(-1, keepdim=True)),
    "A mean over the tokens, not their sum.":
        partial(exact, mean=lambda p: p.sum(ALL)),
    "You take only what an entry does to its own output (i = j). It moves those of the other "
    "tokens too: sum over j.":
        partial(exact, mean=lambda p: p / p[..., 0].numel()),
    "You multiply the mean of g by the mean of xhat. It is the mean of their product that is "
    "taken.":
        product_of_means,
    "You take away mean(g) too: that is the backward of a mean that was subtracted, BatchNorm's.":
        partial(exact, centred=True),
    "It is xhat that stands in both places of the second term; in yours one is still x, or is "
    "not divided by psi.":
        one_hat,
    "The forward had eps under the root, so psi and xhat have it here.":
        lambda x, g: exact(x, g, 0.0),
}, without=AUTOGRAD)


# 2.7 ----------------------------------------------------------------------------------------------

def published_inputs(generator):
    def case(*shape):
        x = tokens(generator, *shape)
        dy = randn(generator, *shape) + 0.3
        return x, dy, *(0.5 + torch.rand(3, shape[-1], generator=generator))

    x, dy, weight, psi2, nu = case(2, 3, 4)
    yield "2 x 3 tokens, 4 channels", x, dy, weight, psi2, nu, 1e-5
    yield "nu of 0, as at the start", x, dy, weight, psi2, torch.zeros(4), 1e-5
    yield "as many channels as tokens and sequences", *case(3, 3, 3), 1e-5
    yield "a small psi2, where eps counts", x, dy, weight, 0.1 * psi2, nu, 0.1


def published(x, dy, weight, psi2, nu, eps):
    psi = (psi2 + eps).sqrt()
    g = dy * weight
    xhat = x / psi
    return (g - nu * xhat) / psi, over_tokens(g * xhat)


def by_own_moment(dx, Lambda, x, psi2, eps):
    ratio = (psi2 + eps) / (moment(x) + eps)
    return dx * ratio.sqrt(), Lambda


def nu_times_x(dy, weight, nu, x, psi2, eps, Lambda):
    return (dy * weight - nu * x) / (psi2 + eps).sqrt(), Lambda


PUBLISHED = Exercise(reference=published, inputs=published_inputs, parts=("dx", "Lambda"),
                     misconceptions={
    "Your dx is the exact one of 2.6, of the batch's own moment. Here psi2 and nu are given "
    "numbers.":
        lambda x, dy, weight, eps, Lambda: (exact(x, dy * weight, eps), Lambda),
    "In dx you use this batch's Lambda, where the rule has the remembered number. Lambda is for "
    "nu's update only.":
        lambda x, dy, weight, psi2, eps, Lambda: published(x, dy, weight, psi2, Lambda, eps),
    "You divide the gradient by this batch's root mean square, as the public code does. The "
    "forward divided by psi.":
        by_own_moment,
    "The gradient comes from behind the gain: what arrives at xhat is dy times weight.":
        lambda x, dy, psi2, nu, eps: published(x, dy, 1.0, psi2, nu, eps),
    "Lambda is the mean of g xhat; you took dy, which has not passed the gain.":
        lambda dx, weight, Lambda: (dx, Lambda / weight),
    "In dx it is nu times xhat that is taken away, not nu times x.":
        nu_times_x,
    "The forward had eps under the root, so psi and xhat have it here.":
        lambda x, dy, weight, psi2, nu: published(x, dy, weight, psi2, nu, 0.0),
})


# 2.8 ----------------------------------------------------------------------------------------------

def nu_inputs(generator):
    x = tokens(generator, 2, 3, 4)
    g = randn(generator, 2, 3, 4) + 0.3
    nu = randn(generator, 4)
    psi2 = torch.rand(4, generator=generator) + 0.5
    yield "2 x 3 tokens, 4 channels", nu, x, g, psi2, 1e-5, 0.9
    yield "nu of 0, as at the start", torch.zeros(4), x, g, psi2, 1e-5, 0.9
    yield "no gradient, large x", nu, 10 * x, 0 * g, psi2, 1e-5, 0.9
    yield "decay 0.5", nu, x, g, psi2, 1e-5, 0.5
    yield "a small psi2, where eps counts", nu, x, g, 0.1 * psi2, 0.1, 0.9


def next_nu(nu, x, g, psi2, eps, decay, *, gamma=lambda x, psi2, eps: moment(x) / (psi2 + eps),
            fade=lambda decay: 1 - decay, hat=True, psi2_first=False):
    """gamma: the paper's Gamma, the mean square of xhat; fade: its weight."""
    if psi2_first:
        psi2 = decay * psi2 + (1 - decay) * moment(x)
    xhat = x / (psi2 + eps).sqrt()
    if not hat:
        xhat = x
    lam = over_tokens(g * xhat)
    left = 1 - fade(decay) * gamma(x, psi2, eps)
    return left * nu + (1 - decay) * lam


NEXT_NU = Exercise(reference=next_nu, inputs=nu_inputs, misconceptions={
    "Your G is the mean square of x. It is that of xhat: how much larger this batch is than the "
    "memory says.":
        partial(next_nu, gamma=lambda x, psi2, eps: moment(x)),
    "That is an ordinary running mean, 0.9 and 0.1. The old nu also shrinks by how large xhat "
    "is.":
        partial(next_nu, gamma=lambda x, psi2, eps: 1.0),
    "The weights are exchanged: what is new counts 1 - decay.":
        lambda nu, x, g, psi2, eps, decay: next_nu(nu, x, g, psi2, eps, 1 - decay),
    "The new part is right. In the old one's factor, G has another weight: how fast is nu to "
    "forget?":
        partial(next_nu, fade=lambda decay: decay),
    "Lambda is the mean of g xhat; yours is that of g x.":
        partial(next_nu, hat=False),
    "You update psi2 first, so that xhat is not the one of the forward pass.":
        partial(next_nu, psi2_first=True),
    "Nearly: xhat was made with eps under the root, and so is G.":
        partial(next_nu, gamma=lambda x, psi2, eps: moment(x) / psi2),
    "That only adds: without a G the old nu is never forgotten.":
        partial(next_nu, gamma=lambda x, psi2, eps: 0.0),
})


# 2.9 ----------------------------------------------------------------------------------------------

def decay_inputs(generator):
    yield "decay 0.9", 0.9
    yield "decay 0.99", 0.99
    yield "decay 0.5", 0.5


def largest_stable(decay):
    return 2 / (1 - decay)


STABLE = Exercise(reference=largest_stable, inputs=decay_inputs, tolerance=1e-4, misconceptions={
    "There the factor is 0, and beyond it nu changes its sign at each step. But it still shrinks: "
    "look at the factor's size.":
        lambda decay: 1 / (1 - decay),
    "You have the weights exchanged: the factor is 1 - (1 - decay) G.":
        lambda decay: 2 / decay,
    "That factor is 1 - decay, small and harmless. How large may its size become?":
        lambda decay: decay / (1 - decay),
    "There the factor is 1 - 2 decay, of a size below 1: nu shrinks still.":
        lambda decay: 2 * decay / (1 - decay),
    "There the factor is -decay: nu shrinks still. Go on.":
        lambda decay: (1 + decay) / (1 - decay),
    "That is the rate at which nu learns. The question is how large G may be for it.":
        lambda decay: 1 - decay,
    "Upside down: the smaller 1 - decay, the more may G be.":
        lambda decay: 2 * (1 - decay),
})


# 2.10 ---------------------------------------------------------------------------------------------

def group_inputs(generator):
    x = tokens(generator, 2, 3, 8)
    zeros = torch.zeros(1, 3, 8)
    yield "8 channels in 4 groups", x, 4, 1e-5
    yield "8 channels in 2 groups", x, 2, 1e-5
    yield "one group", x, 1, 1e-5
    yield "small x, where eps counts", 0.1 * x, 4, 0.1
    yield "a token of zeros", torch.cat((x[:1], zeros)), 4, 1e-5
    yield "one large entry", torch.eye(8).expand(1, 8, 8) * 1e3, 2, 1e-5


def neighbours(x, groups):
    """(B, T, groups, d / groups)"""
    return x.unflatten(-1, (groups, -1))


def mean_square(grouped):
    return grouped.square().mean(-1, keepdim=True)


def group_scale(x, groups, eps, *, centred=False, eps_at="inside"):
    grouped = neighbours(x, groups)
    if centred:
        grouped = grouped - grouped.mean(-1, keepdim=True)
    psi = psi_of(mean_square(grouped), eps, eps_at)
    return (grouped / psi).flatten(-2), math.sqrt(x.shape[-1] / groups)


def in_turns(x, groups):
    """The channels in another order: every groups-th one, then those behind them."""
    return x.unflatten(-1, (-1, groups)).mT.flatten(-2)


def every_nth_channel(x, groups, eps):
    scaled, bound = group_scale(in_turns(x, groups), groups, eps)
    return in_turns(scaled, x.shape[-1] // groups), bound


GROUPS = Exercise(reference=group_scale, inputs=group_inputs, parts=("the scaled x", "the bound"),
                  misconceptions={
    "sqrt(d) would be the bound for one group; how long is a group of d/groups entries?":
        lambda x, right: (right[0], math.sqrt(x.shape[-1])),
    "1 is the root mean square of a group; a single entry can hold all of it.":
        lambda right: (right[0], 1.0),
    "The bound depends on how many entries a group has, not on how many groups there are.":
        lambda groups, right: (right[0], math.sqrt(groups)),
    "You scale the whole token at once. Each group has its own root mean square.":
        lambda x, eps, right: (group_scale(x, 1, eps)[0], right[1]),
    "`groups` is how many groups there are; you take it for how many channels a group has.":
        lambda x, groups, eps, right: (group_scale(x, x.shape[-1] // groups, eps)[0], right[1]),
    "A group is d/groups neighbouring channels; yours has every groups-th channel.":
        every_nth_channel,
    "You subtract a mean. GroupScaling1D only divides.":
        partial(group_scale, centred=True),
    "eps stands under the root.":
        partial(group_scale, eps_at="behind"),
    "A group of zeros gives 0/0: eps is missing.":
        partial(group_scale, eps_at="nowhere"),
})


# 2.11 ---------------------------------------------------------------------------------------------

def fold_inputs(generator):
    psi2 = torch.rand(4, generator=generator) + 0.2

    def case(psi2, eps, outputs):
        weight = randn(generator, 4) + 1
        bias = randn(generator, 4)
        w = randn(generator, outputs, 4)
        c = randn(generator, outputs)
        return weight, bias, psi2, eps, w, c

    yield "3 x 4", *case(psi2, 1e-5, outputs=3)
    yield "a square matrix", *case(psi2, 1e-5, outputs=4)
    weight = randn(generator, 4) + 1
    w = randn(generator, 3, 4)
    yield "no biases", weight, torch.zeros(4), psi2, 1e-5, w, torch.zeros(3)
    yield "a small psi2, where eps counts", *case(0.01 * psi2, 0.1, outputs=3)


def fold(weight, bias, psi2, eps, w, c, *, factor=torch.rsqrt):
    scale = weight * factor(psi2 + eps)
    return w * scale, c + w @ bias


def scaled_rows(weight, psi2, eps, w, right):
    scale = weight / (psi2 + eps).sqrt()
    return w * scale[:, None], right[1]


def group_roots(psi2):
    """For each channel the root mean square of its half of them."""
    halves = psi2.unflatten(0, (2, -1))
    return halves.mean(-1).sqrt().repeat_interleave(len(psi2) // 2)


FOLD = Exercise(reference=fold, inputs=fold_inputs, parts=("the matrix", "the bias"),
                misconceptions={
    "You scale rows, the outputs. The norm scales what goes in: in torch's layout (out, in) the "
    "columns.":
        scaled_rows,
    "The norm divides by psi, so the matrix is divided by it.":
        partial(fold, factor=torch.sqrt),
    "psi2 is a square: its root is what the norm divides by.":
        partial(fold, factor=torch.reciprocal),
    "c, which the linear map had of its own, is lost.":
        lambda c, right: (right[0], right[1] - c),
    "The norm's bias goes through the matrix, and adds to c.":
        lambda c, right: (right[0], c),
    "Both biases are lost: that of the norm and that of the map.":
        lambda c, right: (right[0], 0 * c),
    "The norm adds its bias after it has divided: the bias meets the old matrix, not the folded "
    "one.":
        lambda bias, c, right: (right[0], c + right[0] @ bias),
    "You fold the group scaling too. It depends on the token, so no constant can take its place: "
    "it stays in front.":
        lambda psi2, right: (right[0] / group_roots(psi2), right[1]),
})


# What holds of every right answer: said where none of the known mistakes fits ---------------------


def one_number_a_channel(y, x):
    ratios = (y / x).flatten(0, 1)                      # a row for each token
    return near(ratios.std(0, correction=0), 0)


def batch_in_warmup(y, x, training, step, warmup):
    return not training or step >= warmup or near(y, moment(x))


def groups_of_size_one(y, x, groups, eps):
    has_zeros = x.square().min() == 0
    return eps > 1e-3 or has_zeros or near(mean_square(neighbours(y[0], groups)), 1)


PROPERTIES = {
    "2.1": {
        "There is one number for each channel: the last axis stays.":
            lambda y, x: y.shape == x.shape[-1:],
        "The mean of your d numbers should be the mean square of all of x. It is not.":
            lambda y, x: near(y.mean(), x.square().mean()),
        "Take one channel, x[:, :, 0]: the mean of its squares is your first number.":
            never},
    "2.2": {
        "Output over input should be one number for all tokens of a channel. In yours it differs "
        "from token to token.":
            one_number_a_channel,
        "Output over input, over the gain: a channel's one number left should be one over the "
        "root of what is given for it.":
            never},
    "2.3": {
        "The first step uses the start, which is 1. Yours does not.":
            lambda y: near(y[0][0], 1),
        "The second step uses what one update has made of the start, 1, and of the first moment. "
        "Look at your second row.":
            lambda y, right, moments: len(moments) < 2 or near(y[0][1], right[0][1]),
        "The share is a weight, the same whatever the moments are: which part of the start does "
        "one update leave?":
            lambda y, moments, decay: len(moments) > 1 or near(y[1], decay),
        "The share: each update leaves the same part of what was there.":
            lambda y, moments, decay: near(y[1], decay ** len(moments)),
        "Look at your third row: it is made of your second and of the second moment.":
            never},
    "2.4": {
        "The answer is either psi2 or the batch's moment. Yours is something else.":
            lambda y, x, psi2: near(y, psi2) or near(y, moment(x)),
        "In evaluation yours looks at the batch.":
            lambda y, psi2, training: training or near(y, psi2),
        "There is a step of the warm-up in which yours does not look at the batch.":
            batch_in_warmup,
        "There is a step behind the warm-up in which yours looks at the batch.":
            lambda y, psi2, training, step, warmup: not training or step < warmup or near(y, psi2)},
    "2.5": {
        "There is one entry for each pair of positions: outputs down, changed tokens across.":
            lambda y, x: y.shape == (x.shape[1], x.shape[1])},
    "2.6": {
        "To make a channel twice as large everywhere changes nothing, eps apart: x dx should sum "
        "to 0 over a channel's tokens. Yours does not: look at what is taken from g, its sign, "
        "its size, and over which axes its mean goes.":
            lambda y, x, eps: eps > 1e-3 or near(over_tokens(x * y), 0),
        "Count powers of psi: xhat has one under it, and dx once more. And each mean is one of a "
        "channel's tokens.":
            never},
    "2.7": {
        "With nu of 0, dx is that of a constant psi. Yours is not: look at the gain, and at what "
        "you divide by, and how often.":
            lambda y, right, nu: nu.any() or near(y[0], right[0]),
        "Lambda: is it g that you multiply with xhat, and a mean over the tokens of each "
        "channel?":
            lambda y, right: near(y[1], right[1]),
        "With nu of 0 your dx is right: what does nu multiply, with which sign, and does the "
        "gain meet it?":
            never},
    "2.8": {
        "With nu of 0 only the new part is left. Yours is off there: look at Lambda, its weight, "
        "1 - decay, and its sign.":
            lambda y, right, nu: nu.any() or near(y, right),
        "With nu of 0 yours is right: look at the factor of the old nu: how is G made, which "
        "weight has it, and which sign?":
            never},
    "2.9": {
        "At the G that you give, the factor of nu, 1 - (1 - decay) G, is not of size 1: nu still "
        "shrinks, or grows already.":
            lambda y, decay: near(abs(1 - (1 - decay) * y), 1),
        "At 0 nu does not move at all; there is a larger G at which it does not grow.":
            lambda y: y > 0.001},
    "2.10": {
        "The mean square of each group of a token should come out as 1, eps apart. Yours does "
        "not: do you divide each by the root of its own mean square?":
            groups_of_size_one,
        "Your bound is too small: an entry that you return is larger.":
            lambda y: y[0].abs().max() <= y[1] + 0.01,
        "Your bound is too large: an entry that has all of its group should reach it.":
            lambda y, x: x.abs().max() < 999 or y[0].abs().max() > y[1] - 0.01,
        "The bound is one for any x: what if all of a group is in one entry, and eps is "
        "nothing?":
            never},
    "2.11": {
        "c2: put z = 0 into both ways. They do not give the same.":
            lambda y, right: near(y[1], right[1]),
        "w2: put a z that has a single 1 into both ways and take c2 away. Which column answers?":
            never},
}


EXERCISES = {
    "2.1": MOMENT,
    "2.2": FORWARD,
    "2.3": RUNNING,
    "2.4": STATISTIC,
    "2.5": REACH,
    "2.6": EXACT,
    "2.7": PUBLISHED,
    "2.8": NEXT_NU,
    "2.9": STABLE,
    "2.10": GROUPS,
    "2.11": FOLD,
}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
