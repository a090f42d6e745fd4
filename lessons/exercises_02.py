"""
Lesson 2, PowerNorm: its statistics, who sees the future, its backward pass and how it runs away. See grader.py.

x is (B, T, d): B sequences, T tokens, d channels. A statistic of PowerNorm has d numbers, one a channel. The references
are written without model.py's functions; the notebook compares the two.
"""
import math
from functools import partial

import torch

from answers import near
from grader import AUTOGRAD, Exercise

ALL = (0, 1)                                               # the axes of batch and time


def tokens(generator, *shape, spread=True):
    """Random (B, T, d) with a mean that is not 0 and channels of different sizes."""
    x = torch.randn(*shape, generator=generator) + 0.5
    return x * torch.linspace(0.5, 3, shape[-1]) if spread else x


# 2.1 ------------------------------------------------------------------------------------------------------------------

def moment_inputs(generator):
    yield "2 sequences of 3 tokens, 4 channels", tokens(generator, 2, 3, 4)
    yield "one sequence", tokens(generator, 1, 5, 4)
    yield "one token", tokens(generator, 1, 1, 6)
    yield "as many channels as tokens and sequences", tokens(generator, 3, 3, 3)


def moment(x, *, over=ALL, center=False, root=False, total=False):
    x = x - x.mean(over, keepdim=True) if center else x
    found = (x * x).sum(over) if total else (x * x).sum(over) / (x.numel() / x.sum(over).numel())
    return found.sqrt() if root else found


MOMENT = Exercise(reference=moment, inputs=moment_inputs, misconceptions=[
    (partial(moment, over=-1), "That is RMSNorm's statistic, one number a token. PowerNorm has one a channel."),
    (partial(moment, over=0), "You average over the sequences only, and keep a number for each position."),
    (partial(moment, over=1), "You average over time only, and keep a number for each sequence."),
    (partial(moment, center=True), "You subtract the mean first. PowerNorm does not: no mean anywhere."),
    (partial(moment, root=True), "That is its root. The square itself is kept, and averaged over steps."),
    (lambda x: x.abs().mean(ALL), "The mean of the squares is asked for; you take absolute values."),
    (lambda x: x.mean(ALL) ** 2, "The mean of the squares, not the square of the mean."),
    (partial(moment, over=(0, 1, 2)), "One number for everything: each channel has its own."),
    (lambda x: x.var(ALL), "That is torch's variance: it takes the mean off, and divides by one less than there are."),
    (partial(moment, total=True), "That is the sum over all tokens. Divide by how many there are."),
])


# 2.2 ------------------------------------------------------------------------------------------------------------------

def forward_inputs(generator):
    x, weight = tokens(generator, 2, 3, 4), torch.rand(4, generator=generator) + 0.5
    yield "2 x 3 tokens, 4 channels", x, torch.rand(4, generator=generator) + 0.2, weight, 1e-5
    yield "tokens unlike those before", 10 * x, torch.rand(4, generator=generator), weight, 1e-5
    yield "tiny psi2, where eps counts", x, torch.tensor([0.0, 1e-4, 1e-3, 1e-2]), weight, 1e-2
    yield "one token", x[:1, :1], moment(x), weight, 1e-5


def forward(x, psi2, weight, eps, *, center=False, own=None, root=torch.sqrt, inside=True, gain=True):
    x = x - x.mean(ALL) if center else x
    psi2 = psi2 if own is None else own(x)
    psi = root(psi2 + eps) if inside is True else root(psi2) + (eps if inside is False else 0)
    return (weight if gain else 1) * x / psi


FORWARD = Exercise(reference=forward, inputs=forward_inputs, misconceptions=[
    (partial(forward, center=True),
     "You subtract the batch's mean. BatchNorm does that, and the essay's Figure 9; PowerNorm leaves the mean alone."),
    (partial(forward, own=moment), "You normalize with this batch's own mean square. The running one is given: psi2."),
    (partial(forward, center=True, own=moment), "That is all of BatchNorm: this batch's mean and variance. Neither "
                                                "belongs here."),
    (partial(forward, root=lambda square: square),
     "You divide by the mean square itself. What has the size of x is its root."),
    (partial(forward, inside=False), "eps stands under the root."),
    (partial(forward, inside=None), "eps is missing: a channel that was always 0 gives a division by 0."),
    (partial(forward, own=lambda x: x.square().mean(-1, keepdim=True)),
     "That is RMSNorm: each token by itself. Here each channel is divided by its own psi."),
    (lambda x, psi2, weight, eps: x / (weight * (psi2 + eps).sqrt()), "The gain multiplies; you divide by it."),
    (partial(forward, gain=False), "The learned gain, weight, is missing."),
    (partial(forward, root=lambda square: 1 / square.sqrt()), "You multiply by psi. A channel that is large is made "
                                                              "smaller."),
], without=("batch_norm", "BatchNorm1d"))


# 2.3 ------------------------------------------------------------------------------------------------------------------

def running_inputs(generator):
    moments = torch.rand(5, 3, generator=generator)
    yield "five steps", moments, 0.9
    yield "fifty steps at 0.04", torch.full((50, 2), 0.04), 0.9
    yield "one step", moments[:1], 0.9
    yield "decay 0.5", moments, 0.5


def running(moments, decay, *, start=1.0, late=True, old=lambda decay: decay, power=1.0, corrected=False,
            share=lambda decay, n: decay ** n):
    used, psi2 = [], torch.full_like(moments[0], start)
    for n, m in enumerate(moments):
        new = old(decay) * psi2 + (1 - old(decay)) * m ** power
        found = psi2 if late else new
        used.append((found / max(1 - decay ** n, 1e-9) if corrected else found) ** (1 / power))
        psi2 = new
    return torch.stack(used), share(decay, len(moments))


def cumulative(moments, decay):
    used = [torch.ones_like(moments[0])] + [moments[:n].mean(0) for n in range(1, len(moments))]
    return torch.stack(used), decay ** len(moments)


def in_place(moments, decay):
    used = running(moments, decay, late=False)[0][-1:].repeat(len(moments), 1)
    return used, decay ** len(moments)


RUNNING = Exercise(reference=running, inputs=running_inputs, parts=("the statistics", "the share"), misconceptions=[
    (partial(running, late=False),
     "You update before use: step t then normalizes with its own tokens too. It uses what the steps before it left."),
    (partial(running, old=lambda decay: 1 - decay), "The weights are exchanged: decay is the old value's."),
    (lambda moments, decay: running(moments, 1 - decay),
     "The weights are exchanged, in the update and in the share: decay is the old value's."),
    (partial(running, start=0.0), "You start at 0. psi2 starts at 1."),
    (partial(running, start=0.0, corrected=True), "That is Adam's correction of the start. PowerNorm has none."),
    (cumulative, "That is the plain mean of all steps so far; here older steps fade."),
    (in_place, "All your rows are one tensor, changed in place by each update (*=, +=, lerp_): keep copies, or make a "
               "new psi2."),
    (partial(running, power=0.5), "You average the roots. It is the squares that are averaged."),
    (partial(running, share=lambda decay, n: decay ** (n - 1)),
     "The share that you give is that in what the last step used; asked is the share after its update."),
    (partial(running, share=lambda decay, n: 1 - decay ** n),
     "The share that you give is all the batches' together, not the start's."),
    (partial(running, share=lambda decay, n: decay),
     "The start's share shrinks with every step, not with the first one only."),
])


# 2.4 ------------------------------------------------------------------------------------------------------------------

def statistic_inputs(generator):
    x, psi2 = tokens(generator, 2, 3, 4), torch.rand(4, generator=generator) + 3
    for training, step, warmup in ((True, 0, 2), (True, 1, 2), (True, 2, 2), (True, 3, 2), (False, 0, 2), (False, 2, 2),
                                   (True, 0, 0), (False, 0, 0)):
        mode = "training" if training else "evaluation"
        yield f"{mode}, {step} steps done, warm-up of {warmup}", x, psi2, training, step, warmup


def statistic(x, psi2, training, step, warmup):
    return moment(x) if training and step < warmup else psi2


STATISTIC = Exercise(reference=statistic, inputs=statistic_inputs, misconceptions=[
    (lambda x, psi2, training, step, warmup: moment(x) if training else psi2,
     "That is BatchNorm's rule: any step of training. PowerNorm stops looking at the batch when the warm-up is over."),
    (lambda x, psi2, training, step, warmup: moment(x) if training and step <= warmup else psi2,
     "One step too long: `step` counts the updates that are done, so the first step has 0."),
    (lambda x, psi2, training, step, warmup: moment(x) if step < warmup else psi2,
     "Evaluation never looks at the batch, in the warm-up neither: an answer would depend on its neighbours."),
    (lambda x, psi2, training, step, warmup: psi2,
     "Never the batch's own? The first steps of training have nothing else."),
    (lambda x, psi2, training, step, warmup: moment(x) if training and step >= warmup else psi2,
     "The wrong way round: it is at the beginning that psi2 cannot be trusted yet."),
    (lambda x, psi2, training, step, warmup: psi2 if training else moment(x),
     "You look at the batch in all of evaluation, and never in training."),
    (lambda x, psi2, training, step, warmup: moment(x) if not training and step < warmup else psi2,
     "The warm-up is one of training; you look for it in evaluation: a `not` too many?"),
    (lambda x, psi2, training, step, warmup: psi2 if training and step < warmup else moment(x),
     "The condition is right, the two answers are exchanged: in the warm-up there is no memory yet to be used."),
    (lambda x, psi2, training, step, warmup: moment(x) if training or step < warmup else psi2,
     "One of two conditions is enough for you (`or`). The batch is looked at only when both hold."),
    (lambda x, psi2, training, step, warmup: moment(x) if training and step < warmup else
     0.9 * psi2 + 0.1 * moment(x) if training else psi2,
     "Right in warm-up and evaluation. After warm-up you update psi2 before its use, and so still look at the batch."),
    (lambda x, psi2, training, step, warmup: moment(x),
     "Always the batch's own? Then the running mean would serve nothing."),
])


# 2.5 ------------------------------------------------------------------------------------------------------------------

def by_token(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def by_batch(x):
    return x / moment(x).sqrt()


def by_batch_detached(x):
    return x / moment(x.detach()).sqrt()


def by_past(x):
    """Each token divided by the root mean square of all up to it."""
    count = torch.arange(1, x.shape[1] + 1)[:, None]
    return x / (x.square().mean(0).cumsum(0) / count).sqrt()


def by_running(x):
    return x / torch.linspace(0.5, 3, x.shape[-1])


def by_one_entry(x):
    """To one number of the next token a number of each token is added, of another channel and sequence each time."""
    y = x.clone()
    for t in range(x.shape[1] - 1):
        place = (t % x.shape[0], t + 1, t % x.shape[2])
        y[place] = x[place] + x[t % x.shape[0], t, t % x.shape[2]]
    return y


def reach_inputs(generator):
    x = tokens(generator, 2, 4, 6).double()
    yield "RMSNorm", by_token, x
    yield "the batch's own mean square", by_batch, x
    yield "the same, detached", by_batch_detached, x
    yield "a fixed psi", by_running, x
    yield "the mean square of all tokens so far", by_past, x
    yield "LayerNorm", lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), x
    yield "the next token added", lambda x: x + torch.cat((x[:, 1:], x[:, :1] * 0), dim=1), x
    yield "one entry of the token before added", by_one_entry, x


def another(token):
    return token + torch.linspace(1, 2, token.shape[-1])


def reach(norm, x, change=another, upto=lambda t: t + 1, sequences=slice(None), over=torch.amax):
    y, columns = norm(x), []
    for t in range(x.shape[1]):
        other = x.clone()
        other[sequences, t:upto(t)] = change(x[sequences, t:upto(t)])
        columns.append(over((norm(other) - y).abs(), (0, 2)) > 1e-9)
    return torch.stack(columns, dim=1)


def one_channel(token):
    return token + torch.eye(token.shape[-1])[0]


def derivative(norm, x):
    x = x.requires_grad_()
    y, generator = norm(x), torch.Generator().manual_seed(0)
    weights = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    rows = [torch.autograd.grad((weights * y)[:, s].sum(), x, retain_graph=True)[0] for s in range(x.shape[1])]
    return torch.stack([row.abs().amax((0, 2)) > 1e-9 for row in rows])


def looking_elsewhere(norm, x):
    """One sequence changed, and another looked at."""
    y, columns = norm(x), []
    for t in range(x.shape[1]):
        other = x.clone()
        other[0, t] = another(x[0, t])
        columns.append((norm(other) - y)[-1].abs().amax(-1) > 1e-9)
    return torch.stack(columns, dim=1)


def piling(norm, x):
    """The same tensor changed for each t, so that what was changed before stays so."""
    y, columns = norm(x), []
    for t in range(x.shape[1]):
        x[:, t] += torch.linspace(1, 2, x.shape[-1])
        columns.append((norm(x) - y).abs().amax((0, 2)) > 1e-9)
    return torch.stack(columns, dim=1)


REACH = Exercise(reference=reach, inputs=reach_inputs, misconceptions=[
    (lambda norm, x: reach(norm, x).T, "Transposed: the row is the output's position, the column the token's."),
    (derivative, "You look at derivatives. A detached statistic has none and is still made of all tokens: "
                 "change a token and look."),
    (lambda norm, x: reach(norm, x, change=lambda token: -token),
     "You change a token's sign, which no mean of squares can notice. Change it in another way."),
    (lambda norm, x: reach(norm, x, change=lambda token: 2 * token),
     "You make a token longer without turning it, which RMSNorm does not notice; or 0, of which it makes NaN, and no "
     "comparison with NaN is true. Change it in another way."),
    (lambda norm, x: reach(norm, x, change=lambda token: token + 1),
     "You shift all channels alike, which LayerNorm does not notice. Change the token in another way."),
    (lambda norm, x: reach(norm, x).triu(1),
     "Only the future? The whole matrix is asked for, the past and the diagonal too."),
    (lambda norm, x: reach(norm, x, upto=lambda t: x.shape[1]),
     "You change token t and all that follow it. Only token t is to change."),
    (piling, "Your changes pile up: when you come to token t, those before it are still changed. Does each t have a "
             "copy of its own?"),
    (lambda norm, x: torch.ones(x.shape[1], x.shape[1]).tril().bool(),
     "That is how it should be. Find out how it is: change a token, and compare the outputs."),
    (partial(reach, over=torch.amin),
     "You ask whether all numbers of a position change (`all`). One of them is enough."),
    (partial(reach, change=one_channel), "You change one channel of a token. What if another one matters?"),
    (partial(reach, sequences=0), "You change the token of one sequence. It is that of all sequences which is asked."),
    (looking_elsewhere,
     "You change a token of one sequence and look at another one. Change and look at all of them."),
])


# 2.6 ------------------------------------------------------------------------------------------------------------------

def exact_inputs(generator):
    x, g = tokens(generator, 2, 3, 4), torch.randn(2, 3, 4, generator=generator)
    yield "2 x 3 tokens, 4 channels", x, g + 0.5, 1e-5
    yield "as many channels as tokens and sequences", tokens(generator, 3, 3, 3), tokens(generator, 3, 3, 3), 1e-5
    yield "a gradient along xhat", x, x / moment(x).sqrt(), 1e-5
    yield "small x, where eps counts", 0.1 * x, g, 1e-1
    yield "one token", x[:1, :1], g[:1, :1] + 1, 1e-1


def exact(x, g, eps, *, mean=lambda p: p.mean(ALL), part=1.0, scale=True, small=True, mean_too=False, hat=True):
    psi = (moment(x) + (eps if small else 0)).sqrt()
    xhat = x / psi if hat else x
    dx = g - part * xhat * mean(g * xhat) - (g.mean(ALL) if mean_too else 0)
    return dx / psi if scale else dx


def product_of_means(x, g, eps):
    psi = (moment(x) + eps).sqrt()
    xhat = x / psi
    return (g - xhat * g.mean(ALL) * xhat.mean(ALL)) / psi


EXACT = Exercise(reference=exact, inputs=exact_inputs, misconceptions=[
    (partial(exact, part=0.0),
     "You take the statistic for a constant. Each entry of x moves it too, and with it the outputs of all tokens."),
    (partial(exact, mean=lambda p: p.mean(-1, keepdim=True)),
     "You average over the row, as RMSNorm's backward does. Average over what the statistic averages."),
    (partial(exact, mean=lambda p: p.mean(0)), "You average over the sequences only: time belongs to it."),
    (partial(exact, mean=lambda p: p.sum(ALL)), "A mean over the tokens, not their sum."),
    (partial(exact, mean=lambda p: p / (p.shape[0] * p.shape[1])),
     "You take only what an entry does to its own output (i = j). It moves those of the other tokens too: sum over j."),
    (partial(exact, mean=lambda p: p.sum(ALL) / p.shape[0]),
     "You divide the sum by the number of sequences. It is a mean over all N = B T tokens."),
    (partial(exact, mean=lambda p: p.sum(ALL) / p.shape[1]),
     "You divide the sum by the length of a sequence. It is a mean over all N = B T tokens."),
    (product_of_means,
     "You multiply the mean of g by the mean of xhat. It is the mean of their product that is taken."),
    (partial(exact, part=-1.0), "The sign: what x does to the statistic *reduces* the gradient along xhat."),
    (partial(exact, part=2.0),
     "Twice too much is taken away: the 2 of the square goes with the 1/2 of the root."),
    (partial(exact, scale=False), "The last division by psi is missing: x is larger than xhat by it."),
    (partial(exact, mean_too=True),
     "You take away mean(g) too: that is the backward of a mean that was subtracted, BatchNorm's."),
    (lambda x, g, eps: (g - x * (g * x).mean(ALL) / (moment(x) + eps).sqrt()) / (moment(x) + eps).sqrt(),
     "In the second term one of the two xhat is still x, or it is not divided by psi."),
    (partial(exact, hat=False), "It is xhat that stands in both places of the second term; you have x."),
    (partial(exact, small=False), "The forward had eps under the root, so psi and xhat have it here."),
], without=AUTOGRAD)


# 2.7 ------------------------------------------------------------------------------------------------------------------

def published_inputs(generator):
    x, dy = tokens(generator, 2, 3, 4), torch.randn(2, 3, 4, generator=generator) + 0.3
    weight, psi2, nu = (torch.rand(4, generator=generator) + 0.5 for _ in range(3))
    yield "2 x 3 tokens, 4 channels", x, dy, weight, psi2, nu, 1e-5
    yield "nu of 0, as at the start", x, dy, weight, psi2, torch.zeros(4), 1e-5
    square = [y[..., :3].repeat(2, 1, 1)[:3] for y in (x, dy)]
    yield "as many channels as tokens and sequences", *square, weight[:3], psi2[:3], nu[:3], 1e-5
    yield "a small psi2, where eps counts", x, dy, weight, 0.1 * psi2, nu, 0.1


def published(x, dy, weight, psi2, nu, eps, *, own=False, mean=lambda p: p.mean(ALL), gain=True, sign=1.0, scale=True,
              hat=True, rest=False, small=True, weighted=True):
    eps = eps if small else 0.0
    psi = (psi2 + eps).sqrt()
    xhat, g = x / psi, dy * weight if gain else dy
    rest_of_g = g - sign * nu * xhat
    of = rest_of_g if rest else g if weighted else dy
    lam = mean(of * (xhat if hat else x))
    return rest_of_g / (((moment(x) + eps).sqrt() if own else psi) if scale else 1), lam


PUBLISHED = Exercise(reference=published, inputs=published_inputs, parts=("dx", "Lambda"), misconceptions=[
    (partial(published, mean=lambda p: p.mean(-1)),
     "Lambda is to be a number for each channel; you average over the row."),
    (partial(published, mean=lambda p: p.sum(ALL)), "Lambda is a mean over the tokens, not their sum."),
    (lambda x, dy, w, psi2, nu, eps: (exact(x, dy * w, eps), published(x, dy, w, psi2, nu, eps)[1]),
     "Your dx is the exact one of 2.6, of the batch's own moment. Here psi2 and nu are given numbers."),
    (lambda x, dy, w, psi2, nu, eps: (published(x, dy, w, psi2, published(x, dy, w, psi2, nu, eps)[1], eps)[0],
                                      published(x, dy, w, psi2, nu, eps)[1]),
     "In dx you use this batch's Lambda, where the rule has the remembered number. Lambda is for nu's update only."),
    (lambda x, dy, w, psi2, nu, eps: (published(x, dy, w, psi2, nu * w, eps)[0], published(x, dy, w, psi2, nu, eps)[1]),
     "Your gain multiplies nu's part as well. nu belongs to g, and the gain is in g already."),
    (partial(published, own=True),
     "You divide the gradient by this batch's root mean square, as the public code does. The forward divided by psi."),
    (partial(published, gain=False),
     "The gradient comes from behind the gain: what arrives at xhat is dy times weight."),
    (partial(published, weighted=False), "Lambda is the mean of g xhat; you took dy, which has not passed the gain."),
    (partial(published, sign=-1.0), "The sign of nu: its part is taken away."),
    (partial(published, hat=False), "In Lambda too it is xhat, not x."),
    (partial(published, rest=True), "Lambda is the mean of g xhat itself; you took it after nu's part was removed."),
    (partial(published, sign=0.0), "nu is missing in dx: you take psi for a constant and stop there."),
    (lambda x, dy, w, psi2, nu, eps: ((dy * w - nu) / (psi2 + eps).sqrt(), published(x, dy, w, psi2, nu, eps)[1]),
     "In dx, nu says how much of xhat is taken away; you take nu away."),
    (lambda x, dy, w, psi2, nu, eps: ((dy * w - nu * x) / (psi2 + eps).sqrt(), published(x, dy, w, psi2, nu, eps)[1]),
     "In dx it is nu times xhat that is taken away, not nu times x."),
    (partial(published, scale=False), "dx still has to be divided by psi: x is larger than xhat by it."),
    (partial(published, small=False), "The forward had eps under the root, so psi and xhat have it here."),
])


# 2.8 ------------------------------------------------------------------------------------------------------------------

def nu_inputs(generator):
    x, g = tokens(generator, 2, 3, 4), torch.randn(2, 3, 4, generator=generator) + 0.3
    nu, psi2 = torch.randn(4, generator=generator), torch.rand(4, generator=generator) + 0.5
    yield "2 x 3 tokens, 4 channels", nu, x, g, psi2, 1e-5, 0.9
    yield "nu of 0, as at the start", torch.zeros(4), x, g, psi2, 1e-5, 0.9
    yield "no gradient, large x", nu, 10 * x, 0 * g, psi2, 1e-5, 0.9
    yield "decay 0.5", nu, x, g, psi2, 1e-5, 0.5
    yield "a small psi2, where eps counts", nu, x, g, 0.1 * psi2, 0.1, 0.9


def next_nu(nu, x, g, psi2, eps, decay, *, gamma=lambda x, psi2, eps: moment(x) / (psi2 + eps), early=False, hat=True,
            fade=lambda decay: 1 - decay, share=lambda decay: 1 - decay):
    psi2 = decay * psi2 + (1 - decay) * moment(x) if early else psi2
    xhat = x / (psi2 + eps).sqrt()
    return nu * (1 - fade(decay) * gamma(x, psi2, eps)) + share(decay) * (g * (xhat if hat else x)).mean(ALL)


NEXT_NU = Exercise(reference=next_nu, inputs=nu_inputs, misconceptions=[
    (partial(next_nu, gamma=lambda x, psi2, eps: moment(x)),
     "Your G is the mean square of x. It is that of xhat: how much larger this batch is than the memory says."),
    (partial(next_nu, gamma=lambda x, psi2, eps: 1.0),
     "That is an ordinary running mean, 0.9 and 0.1. The old nu also shrinks by how large xhat is."),
    (partial(next_nu, fade=lambda decay: 1.0),
     "G too is multiplied by 1 - decay; all of it would forget nu at once."),
    (partial(next_nu, share=lambda decay: 1.0), "The new part is multiplied by 1 - decay; yours comes in whole."),
    (partial(next_nu, share=lambda decay: decay, fade=lambda decay: decay),
     "The weights are exchanged: what is new counts 1 - decay."),
    (partial(next_nu, fade=lambda decay: decay),
     "The new part is right. In the old one's factor, G has another weight: how fast is nu to forget?"),
    (partial(next_nu, fade=lambda decay: decay - 1), "The sign: a large xhat makes the old nu smaller, not larger."),
    (partial(next_nu, hat=False), "Lambda is the mean of g xhat; yours is that of g x."),
    (partial(next_nu, early=True), "You update psi2 first, so that xhat is not the one of the forward pass."),
    (partial(next_nu, gamma=lambda x, psi2, eps: moment(x) / psi2),
     "Nearly: xhat was made with eps under the root, and so is G."),
    (partial(next_nu, gamma=lambda x, psi2, eps: x.mean(ALL) ** 2 / (psi2 + eps)),
     "G is the mean of the squares of xhat, not the square of its mean."),
    (partial(next_nu, gamma=lambda x, psi2, eps: (moment(x) / (psi2 + eps)).sqrt()),
     "That is the root of G. The mean of the squares enters as it is."),
    (partial(next_nu, gamma=lambda x, psi2, eps: 0.0),
     "That only adds: without a G the old nu is never forgotten."),
])


# 2.9 ------------------------------------------------------------------------------------------------------------------

STABLE = Exercise(
    reference=lambda decay: 2 / (1 - decay), tolerance=1e-4,
    inputs=lambda generator: ((f"decay {decay}", decay) for decay in (0.9, 0.99, 0.5)), misconceptions=[
        (lambda decay: 1 / (1 - decay), "There the factor is 0, and beyond it nu changes its sign at each step. "
                                        "But it still shrinks: look at the factor's size."),
        (lambda decay: 2.0 / decay, "You have the weights exchanged: the factor is 1 - (1 - decay) G."),
        (lambda decay: 20.0, "Right for 0.9. The answer depends on the decay."),
        (lambda decay: decay / (1 - decay),
         "That factor is 1 - decay, small and harmless. How large may its size become?"),
        (lambda decay: 2 * decay / (1 - decay),
         "There the factor is 1 - 2 decay, of a size below 1: nu shrinks still."),
        (lambda decay: (1 + decay) / (1 - decay), "There the factor is -decay: nu shrinks still. Go on."),
        (lambda decay: 1 - decay, "That is the rate at which nu learns. The question is how large G may be for it."),
        (lambda decay: 2 * (1 - decay), "Upside down: the smaller 1 - decay, the more may G be."),
        (lambda decay: 1.0,
         "A G of 1 is the normal case: the batch is as large as the memory says. Much more is harmless."),
    ])


# 2.10 -----------------------------------------------------------------------------------------------------------------

def group_inputs(generator):
    x = tokens(generator, 2, 3, 8)
    yield "8 channels in 4 groups", x, 4, 1e-5
    yield "8 channels in 2 groups", x, 2, 1e-5
    yield "one group", x, 1, 1e-5
    yield "small x, where eps counts", 0.1 * x, 4, 0.1
    yield "a token of zeros", torch.cat((x[:1], 0 * x[:1])), 4, 1e-5
    yield "one large entry", torch.eye(8).expand(1, 8, 8) * 1e3, 2, 1e-5


def group_scale(x, groups, eps, *, size=lambda square: square.mean(-1, keepdim=True), center=False, inside=True,
                strided=False, whole=False, sized=False, bound=lambda d, n: math.sqrt(d / n)):
    d = x.shape[-1]
    count = 1 if whole else d // groups if sized else groups
    x = x.unflatten(-1, (-1, groups)).mT if strided else x.unflatten(-1, (count, -1))
    x = x - x.mean(-1, keepdim=True) if center else x
    psi = (size(x * x) + eps).sqrt() if inside is True else size(x * x).sqrt() + (eps if inside is False else 0)
    return ((x / psi).mT if strided else x / psi).flatten(-2), bound(d, groups)


GROUPS = Exercise(reference=group_scale, inputs=group_inputs, parts=("the scaled x", "the bound"), misconceptions=[
    (partial(group_scale, bound=lambda d, n: math.sqrt(d)),
     "sqrt(d) would be the bound for one group; how long is a group of d/groups entries?"),
    (partial(group_scale, bound=lambda d, n: d / n),
     "The bound on an entry is a root: it is the *squares* of a group that sum to at most d/groups."),
    (partial(group_scale, bound=lambda d, n: 1.0),
     "1 is the root mean square of a group; a single entry can hold all of it."),
    (partial(group_scale, bound=lambda d, n: math.sqrt(n)),
     "The bound depends on how many entries a group has, not on how many groups there are."),
    (partial(group_scale, whole=True), "You scale the whole token at once. Each group has its own root mean square."),
    (partial(group_scale, sized=True),
     "`groups` is how many groups there are; you take it for how many channels a group has."),
    (partial(group_scale, strided=True),
     "A group is d/groups neighbouring channels; yours has every groups-th channel."),
    (partial(group_scale, size=lambda square: square.sum(-1, keepdim=True)),
     "You divide by the length of a group: its root *mean* square is smaller."),
    (partial(group_scale, center=True), "You subtract a mean. GroupScaling1D only divides."),
    (partial(group_scale, inside=False), "eps stands under the root."),
    (partial(group_scale, inside=None), "A group of zeros gives 0/0: eps is missing."),
    (partial(group_scale, size=lambda square: square.mean((0, 1, 3), keepdim=True)),
     "You average over the tokens too. GroupScaling1D looks at one token at a time."),
])


# 2.11 -----------------------------------------------------------------------------------------------------------------

def fold_inputs(generator):
    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    psi2 = torch.rand(4, generator=generator) + 0.2
    yield "3 x 4", numbers(4) + 1, numbers(4), psi2, 1e-5, numbers(3, 4), numbers(3)
    yield "a square matrix", numbers(4) + 1, numbers(4), psi2, 1e-5, numbers(4, 4), numbers(4)
    yield "no biases", numbers(4) + 1, torch.zeros(4), psi2, 1e-5, numbers(3, 4), torch.zeros(3)
    yield "a small psi2, where eps counts", numbers(4) + 1, numbers(4), 0.01 * psi2, 0.1, numbers(3, 4), numbers(3)


def fold(weight, bias, psi2, eps, w, c, *, root=torch.rsqrt, gain=True, small=True, rows=False, through="w",
         groups=False, keep=True):
    scale = (weight if gain else 1) * root(psi2 + (eps if small else 0))
    scale = scale / psi2.unflatten(0, (2, -1)).mean(-1).sqrt().repeat_interleave(len(psi2) // 2) if groups else scale
    folded = w * scale[:, None] if rows else torch.einsum("md,d->md", w, scale)
    added = {"w": w, "folded": folded, "nothing": 0 * w}[through]
    return folded, (c if keep else 0) + torch.einsum("md,d->m", added, bias)


FOLD = Exercise(reference=fold, inputs=fold_inputs, parts=("the matrix", "the bias"), misconceptions=[
    (partial(fold, rows=True),
     "You scale rows, the outputs. The norm scales what goes in: in torch's layout (out, in) the columns."),
    (partial(fold, gain=False), "The gain is missing: weight is a constant too."),
    (partial(fold, root=torch.sqrt), "The norm divides by psi, so the matrix is divided by it."),
    (partial(fold, root=torch.reciprocal), "psi2 is a square: its root is what the norm divides by."),
    (partial(fold, small=False), "eps is a constant as well: keep it under the root."),
    (partial(fold, keep=False), "c, which the linear map had of its own, is lost."),
    (partial(fold, keep=False, through="nothing"), "Both biases are lost: that of the norm and that of the map."),
    (partial(fold, through="nothing"), "The norm's bias goes through the matrix, and adds to c."),
    (partial(fold, through="folded"),
     "The norm adds its bias after it has divided: the bias meets the old matrix, not the folded one."),
    (partial(fold, groups=True),
     "You fold the group scaling too. It depends on the token, so no constant can take its place: it stays in front."),
])


# What holds of every right answer: said where none of the known mistakes fits ----------------------------------------

def along_tokens(y, x):
    """y / x, one row a token."""
    return (y / x).flatten(0, 1)


REACH_ABOUT = {
    "RMSNorm": "RMSNorm looks at each token by itself, and at the ratios of its channels. Does your change move them?",
    "the batch's own mean square": "The batch's mean square: every token has a part in it, also for those before it.",
    "the same, detached": "Detached: that is about gradients; the numbers are the same.",
    "a fixed psi": "A fixed psi: no token has a part in what another one is divided by.",
    "the mean square of all tokens so far": "The mean square so far: which outputs come after a token, itself included?",
    "LayerNorm": "LayerNorm looks at each token by itself, and takes its mean away. Does your change outlive that?",
    "the next token added": "The next token added: the output at s has the token at s + 1 in it.",
    "one entry of the token before added": "One entry of the token before: does your change touch all channels, in all "
                                           "sequences, and do you look at all of them?",
}
REACH.about.update(REACH_ABOUT)

PROPERTIES = {
    "2.1": [
        (lambda y, x: y.shape == x.shape[-1:], "There is one number for each channel: the last axis stays."),
        (lambda y, x: near(y.mean(), x.square().mean()),
         "The mean of your d numbers should be the mean square of all of x. It is not."),
        (lambda y, x: False, "Take one channel, x[:, :, 0]: the mean of its squares is your first number.")],
    "2.2": [
        (lambda y, x, psi2, weight, eps: near(along_tokens(y, x).std(0, correction=0), 0),
         "Output over input should be one number for all tokens of a channel. In yours it differs from token to token."),
        (lambda y, x, psi2, weight, eps: False,
         "Output over input, over the gain: a channel's one number left should be one over the root of what is given "
         "for it.")],
    "2.3": [
        (lambda y, m, d: near(y[0][0], 1), "The first step uses the start, which is 1. Yours does not."),
        (lambda y, m, d: len(m) < 2 or near(y[0][1], d + (1 - d) * m[0]),
         "The second step uses what one update has made of the start, 1, and of the first moment. Look at your second "
         "row."),
        (lambda y, m, d: len(m) > 1 or near(y[1], d),
         "The share is a weight, the same whatever the moments are: which part of the start does one update "
         "leave?"),
        (lambda y, m, d: near(y[1], d ** len(m)), "The share: each update leaves the same part of what was there."),
        (lambda y, m, d: False, "Look at your third row: it is made of your second and of the second moment.")],
    "2.4": [
        (lambda y, x, psi2, *_: near(y, psi2) or near(y, moment(x)),
         "The answer is either psi2 or the batch's moment. Yours is something else."),
        (lambda y, x, psi2, training, *_: training or near(y, psi2), "In evaluation yours looks at the batch."),
        (lambda y, x, psi2, training, step, warmup: not training or step >= warmup or near(y, moment(x)),
         "There is a step of the warm-up in which yours does not look at the batch."),
        (lambda y, x, psi2, training, step, warmup: not training or step < warmup or near(y, psi2),
         "There is a step behind the warm-up in which yours looks at the batch.")],
    "2.5": [
        (lambda y, norm, x: y.shape == (x.shape[1],) * 2,
         "There is one entry for each pair of positions: outputs down, changed tokens across.")],
    "2.6": [
        (lambda y, x, g, eps: eps > 1e-3 or near((x * y).mean(ALL), 0),
         "To make a channel twice as large everywhere changes nothing, eps apart: x dx should sum to 0 over a channel's "
         "tokens. Yours does not."),
        (lambda y, x, g, eps: False,
         "Count powers of psi: xhat has one under it, and dx once more. And each mean is one of a channel's tokens.")],
    "2.7": [
        (lambda y, x, dy, w, psi2, nu, eps: nu.any() or near(y[0] * (psi2 + eps).sqrt(), dy * w),
         "With nu of 0, dx is that of a constant psi. Yours is not: look at gain and psi."),
        (lambda y, x, dy, w, psi2, nu, eps: near(y[1], (dy * w * x / (psi2 + eps).sqrt()).mean(ALL)),
         "Lambda: is it g that you multiply with xhat, and a mean over the tokens of each channel?"),
        (lambda y, *_: False, "With nu of 0 your dx is right: look at what nu takes away.")],
    "2.8": [
        (lambda y, nu, x, g, psi2, eps, d: nu.any() or near(y, (1 - d) * (g * x).mean(ALL) / (psi2 + eps).sqrt()),
         "With nu of 0 only the new part is left. Yours is off there: look at Lambda, its weight and its sign."),
        (lambda y, *_: False, "With nu of 0 yours is right: look at the factor of the old nu.")],
    "2.9": [
        (lambda y, decay: near(abs(1 - (1 - decay) * y), 1),
         "At the G that you give, the factor of nu, 1 - (1 - decay) G, is not of size 1: nu still shrinks, or grows "
         "already."),
        (lambda y, decay: y > 0.001, "At 0 nu does not move at all; there is a larger G at which it does not grow.")],
    "2.10": [
        (lambda y, x, n, eps: eps > 1e-3 or x.square().min() == 0 or near(
            y[0].unflatten(-1, (n, -1)).square().mean(-1), 1),
         "The mean square of each group should come out as 1, eps apart. Yours does not."),
        (lambda y, x, n, eps: y[0].abs().max() <= y[1] + 0.01,
         "Your bound is too small: an entry that you return is larger."),
        (lambda y, x, n, eps: x.abs().max() < 999 or y[0].abs().max() > y[1] - 0.01,
         "Your bound is too large: an entry that has all of its group should reach it."),
        (lambda y, *_: False, "The bound is one for any x: what if all of a group is in one entry, and eps is nothing?")],
    "2.11": [
        (lambda y, weight, bias, psi2, eps, w, c: near(y[1], c + w @ bias),
         "c2: put z = 0 into both ways. They do not give the same."),
        (lambda y, *_: False, "w2: put a z that has a single 1 into both ways and take c2 away. Which column answers?")],
}


EXERCISES = {"2.1": MOMENT, "2.2": FORWARD, "2.3": RUNNING, "2.4": STATISTIC, "2.5": REACH, "2.6": EXACT,
             "2.7": PUBLISHED, "2.8": NEXT_NU, "2.9": STABLE, "2.10": GROUPS, "2.11": FOLD}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
