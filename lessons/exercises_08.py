"""
Lesson 8, write the seventh: Dynamic Tanh, LayerNorm scaling, Post-LN, and what a norm of one's own has to pass.

Sources: anGPT sections 3.2 and Appendix A, NormFormer section 1. See grader.py for the form. The references use
elementary operations only and nothing of model.py.
"""
import itertools
import math
from functools import partial

import torch

from answers import near
from grader import AUTOGRAD, Exercise


def randn(generator, *shape):
    return torch.randn(*shape, generator=generator)


# 8.1 ------------------------------------------------------------------------------------------------------------------

def dyt_inputs(generator):
    yield "a batch (2, 3, 5)", randn(generator, 2, 3, 5), torch.tensor(0.7), randn(generator, 5)
    yield "as many tokens as channels", randn(generator, 4, 4), torch.tensor(1.0), randn(generator, 4)
    yield "large inputs", 1e3 * randn(generator, 3, 6), torch.tensor(0.5), randn(generator, 6)
    yield "a negative alpha", randn(generator, 3, 6), torch.tensor(-2.0), randn(generator, 6)
    yield "one token of zeros", torch.zeros(1, 4), torch.tensor(1.5), torch.ones(4)


def dyt(x, alpha, gamma, *, slope=True, outside=False, gain=True, center=False, divide=False, curve=None):
    x = x - x.mean(-1, keepdim=True) if center else x
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() if divide else x
    y = alpha * x if slope else x
    y = curve(y) if curve else 1 - 2 / ((2 * y).exp() + 1)                            # tanh
    return (gamma * y if gain else y) * (alpha if outside else 1)


DYT = Exercise(reference=dyt, inputs=dyt_inputs, misconceptions=[
    (lambda x, alpha, gamma: torch.tanh(gamma * alpha * x),
     "Your outputs never leave (-1, 1): the gain has no way to make a channel larger where it stands."),
    (partial(dyt, slope=False, outside=True),
     "alpha should decide where the curve bends. Where yours stands, it only makes the result larger."),
    (partial(dyt, slope=False), "alpha does not enter."),
    (lambda x, alpha, gamma: alpha * torch.tanh(gamma * x), "alpha and gamma have changed places."),
    (partial(dyt, gain=False), "gamma does not enter."),
    (lambda x, alpha, gamma: torch.tanh(alpha * x) + gamma, "gamma is a gain: it does not shift the curve."),
    (partial(dyt, center=True), "You subtract a mean, which is a statistic over the channels: DyT has none."),
    (partial(dyt, divide=True), "You normalize first. tanh is there so that nothing has to be averaged."),
    (partial(dyt, curve=torch.sigmoid),
     "The right kind of curve, but yours goes from 0 to 1: at x = 0 the output should be 0."),
    (partial(dyt, curve=lambda x: x / (1 + x.abs())), "Another S: Dynamic Tanh has the hyperbolic tangent in it."),
])


# 8.2 ------------------------------------------------------------------------------------------------------------------

def jacobian_inputs(generator):
    yield "five channels", randn(generator, 5), torch.tensor(0.7), randn(generator, 5)
    yield "alpha 1, gamma 1", randn(generator, 4), torch.tensor(1.0), torch.ones(4)
    yield "far out on the curve", 3 * randn(generator, 6), torch.tensor(2.0), randn(generator, 6)
    yield "zeros", torch.zeros(3), torch.tensor(0.5), randn(generator, 3)
    yield "a very steep curve", 1e-7 * randn(generator, 4), torch.tensor(1e7), randn(generator, 4)


def slope(x, alpha, gamma):
    return gamma * alpha / torch.cosh(alpha * x) ** 2


def centered(x, alpha, gamma):
    n = len(x)
    return slope(x, alpha, gamma).diag() @ (torch.eye(n) - torch.ones(n, n) / n)


JACOBIAN = Exercise(
    reference=lambda x, alpha, gamma: torch.eye(len(x)) * slope(x, alpha, gamma), inputs=jacobian_inputs,
    misconceptions=[
        (centered, "You have LayerNorm's projection in it: there, each channel acts on all through the mean. "
                   "Which channels of x does output i of DyT look at?"),
        (lambda x, alpha, gamma: slope(x, alpha, gamma), "These are the numbers, but a Jacobian is a matrix (n, n)."),
        (lambda x, alpha, gamma: (gamma / torch.cosh(alpha * x) ** 2).diag(),
         "The chain rule's inner factor is missing: x is multiplied by something before the tanh."),
        (lambda x, alpha, gamma: (gamma * alpha * (1 - torch.tanh(alpha * x))).diag(),
         "The derivative of tanh is not that: at x = 0 and far to the left it gives 1 and 2."),
        (lambda x, alpha, gamma: (gamma * alpha * (1 - (gamma * torch.tanh(alpha * x)) ** 2)).diag(),
         "You wrote the slope by the output y, which has gamma in it. Use tanh(alpha x) alone there."),
        (lambda x, alpha, gamma: (gamma * alpha / torch.cosh(x) ** 2).diag(),
         "You take the slope at x. The tanh is evaluated elsewhere."),
        (lambda x, alpha, gamma: (alpha / torch.cosh(alpha * x) ** 2).diag(), "gamma does not enter."),
        (lambda x, alpha, gamma: (gamma * alpha * torch.tanh(alpha * x) ** 2).diag(),
         "Yours is 0 at x = 0, where DyT is steepest, and grows to both sides."),
    ], without=AUTOGRAD)


# 8.3 ------------------------------------------------------------------------------------------------------------------

def matching_inputs(generator):
    spread = torch.tensor([0.5, 1.0, 4.0])[:, None]
    yield "tokens of different spread", spread * randn(generator, 2, 3, 8)
    yield "tokens with a mean", randn(generator, 2, 5, 4) + 2
    yield "embeddings, std 0.02", 0.02 * randn(generator, 4, 8, 16)
    yield "one token", 3 * randn(generator, 1, 1, 6)


def slopes(x, *, center=True, least=0, eps=1e-5, late=0, power=-0.5, mean=torch.mean):
    """LayerNorm's slope for each token, (variance + eps) ** power; least = 1 divides by n - 1. -> their mean"""
    off = x - x.mean(-1, keepdim=True) if center else x
    variance = off.square().sum(-1) / (x.shape[-1] - least)
    return mean(((variance + eps).sqrt() + late) ** (2 * power))


MATCHING = Exercise(reference=slopes, inputs=matching_inputs, tolerance=1e-4, misconceptions=[
    (lambda x: 1.0,
     "That is the start in anGPT's Appendix A. It fits inputs of standard deviation 1; these have others."),
    (partial(slopes, power=0.5), "Upside down: the larger the inputs, the flatter LayerNorm's line."),
    (partial(slopes, mean=lambda s: 1 / (1 / s).mean()),
     "The mean of the slopes is asked for. You have the slope of the mean deviation, which is smaller."),
    (partial(slopes, mean=lambda s: 1 / (1 / s ** 2).mean().sqrt()),
     "You average the variances and take one slope of that. Each token has its slope first; then they are averaged."),
    (lambda x: 1 / ((x - x.mean()).square().mean() + 1e-5).sqrt(),
     "You pool all tokens into one deviation. LayerNorm gives each token a slope of its own."),
    (partial(slopes, power=-1), "LayerNorm divides by the root of the variance."),
    (partial(slopes, center=False),
     "That is RMSNorm's slope. LayerNorm measures the spread around the token's mean."),
    (partial(slopes, least=1),
     "Your variance divides by n - 1, as torch's std does by itself; LayerNorm divides by n."),
    (partial(slopes, eps=0), "Right for inputs of usual size. For the small ones of fresh embeddings epsilon counts."),
    (partial(slopes, eps=1e-6), "Your epsilon is 1e-6, where 1e-5 was asked for."),
    (partial(slopes, eps=0, late=1e-5), "Epsilon is added to the variance, before the root is taken."),
    (partial(slopes, mean=lambda s: s.max()), "That is the steepest of the slopes; their mean is asked for."),
])


# 8.4 ------------------------------------------------------------------------------------------------------------------

def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def silu_branch(generator, d):
    """A branch that is not linear, as a block's are not."""
    up, down = randn(generator, d, 2 * d) / d ** 0.5, randn(generator, 2 * d, d)
    return lambda x: (x @ up) * torch.sigmoid(x @ up) @ down


def scaling_inputs(generator):
    yield "layer 3", randn(generator, 2, 3, 4), rms, silu_branch(generator, 4), 3
    yield "the first layer", randn(generator, 2, 3, 4), rms, silu_branch(generator, 4), 1
    yield "layer 24", 5 * randn(generator, 2, 3, 8), rms, silu_branch(generator, 8), 24
    gain = randn(generator, 4)
    yield "a norm with a gain", randn(generator, 3, 4), lambda x: gain * rms(x), silu_branch(generator, 4), 2


def scaled(h, norm, branch, layer, *, power=-0.5, first=0, at="norm", residual=lambda h, norm, factor: h):
    factor = (layer + first) ** power
    before, after, end = (factor if at == place else 1 for place in ("input", "norm", "output"))
    return residual(h, norm, factor) + branch(norm(h * before) * after) * end


SCALING = Exercise(reference=scaled, inputs=scaling_inputs, misconceptions=[
    (partial(scaled, at="residual", residual=lambda h, norm, factor: h * factor),
     "You shrink the residual stream itself: what early layers wrote would be gone after a few blocks."),
    (partial(scaled, at="output"),
     "You shrink what the branch gives. The paper shrinks what it gets, and a branch is not linear."),
    (partial(scaled, at="input"),
     "A norm undoes every factor in front of it (but for epsilon): yours changes nothing."),
    (partial(scaled, power=-1), "Too strong from layer 2 on: have another look at the power of the layer's number."),
    (lambda h, norm, branch, layer: h + branch(norm(h) / layer ** 1 / 2),
     "In Python a power comes before a division: ** 1/2 is ** 1, and then half of that. Brackets help."),
    (partial(scaled, first=1), "Layers count from 1 here; the first one is left as it is."),
    (partial(scaled, power=0.5), "Your branches grow with depth; this was meant to tame them."),
    (partial(scaled, residual=lambda h, norm, factor: norm(h) * factor),
     "The residual takes h itself, whatever the branch is given."),
    (partial(scaled, residual=lambda h, norm, factor: 0), "The residual is missing."),
])


# 8.5 ------------------------------------------------------------------------------------------------------------------

def harmonic(layers, power=1.0):
    return sum(layer ** -power for layer in range(1, layers + 1))


GROWTH = Exercise(
    reference=lambda layers: math.sqrt(harmonic(layers)), tolerance=1e-4,
    inputs=lambda generator: ((f"{layers} layer{'s' * (layers > 1)}", layers) for layers in (1, 2, 6, 24, 1000)),
    misconceptions=[
        (lambda layers: math.sqrt(layers),
         "That is section 3.2's stream, without the factors: every contribution has norm 1 there."),
        (lambda layers: harmonic(layers), "That is the mean of the squared norm; its root is asked for."),
        (lambda layers: harmonic(layers, 0.5), "You add the norms, as if all contributions pointed the same way. "
                                               "What adds up for independent vectors?"),
        (lambda layers: math.sqrt(harmonic(layers, 0.5)),
         "There is a root at the end, but what you add under it are the lengths themselves, not yet squared."),
        (lambda layers: math.sqrt(harmonic(layers, 2)), "You squared the factors once too often."),
        (lambda layers: math.sqrt(math.log(layers)), "Close for very many layers only; with one layer it is 0."),
        (lambda layers: math.sqrt(math.log(layers) + 0.5772156649),
         "A good formula for many layers, where it belongs; for few it is off. Add up the terms themselves."),
        (lambda layers: math.sqrt(harmonic(layers - 1)), "The last layer is missing, as range leaves out its end."),
        (lambda layers: 1.0, "Only the last contribution shrinks to nothing; their sum still grows."),
    ])


# 8.6 ------------------------------------------------------------------------------------------------------------------

def gained(generator, d):
    gain = 1 + 0.5 * randn(generator, d)
    return lambda x: gain * (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()


def post_inputs(generator):
    def case(d, n, size=1.0):
        return (size * randn(generator, 2, 3, d), [silu_branch(generator, d) for _ in range(n)],
                [gained(generator, d) for _ in range(n + 1)])

    yield "one block: two branches", *case(4, 2)
    yield "three blocks: six branches", *case(6, 6)
    yield "a large input", *case(4, 4, size=100.0)
    yield "one branch", *case(8, 1)


def post(h, branches, norms):
    for i, branch in enumerate(branches):
        h = norms[i](h + branch(h))
    return h


def pre(h, branches, norms):
    for branch, norm in zip(branches, norms):
        h = h + branch(norm(h))
    return h


def chain(step):
    def run(h, branches, norms):
        for branch, norm in zip(branches, norms):
            h = step(h, branch, norm)
        return h
    return run


POST = Exercise(reference=post, inputs=post_inputs, misconceptions=[
    (lambda h, branches, norms: norms[-1](post(h, branches, norms)),
     "Your blocks are right. But the last of them ends in a norm already: what is the extra one for?"),
    (lambda h, branches, norms: norms[-1](pre(h, branches, norms)), "That is a Pre-LN model."),
    (pre, "That is a Pre-LN model, and one without its norm at the end."),
    (chain(lambda h, branch, norm: h + norm(branch(h))),
     "You norm what the branch gives, and the stream grows on. In Post-LN the sum goes through the norm."),
    (chain(lambda h, branch, norm: norm(h) + branch(norm(h))),
     "You norm before the branch and give the residual the normed h, too. The norm comes after the sum."),
    (lambda h, branches, norms: post(h, branches, norms[1:]),
     "Your norms are shifted by one: the first branch's sum goes through the first norm."),
    (lambda h, branches, norms: post(norms[0](h), branches, norms[1:]),
     "Before the first branch nothing was added: h goes in as it is. Which norm is left over then?"),
    (chain(lambda h, branch, norm: norm(branch(h))),
     "The residual is missing: norm the sum of the branch and what went into it."),
    (lambda h, branches, norms: norms[len(branches) - 1](
        chain(lambda h, branch, norm: h + branch(h))(h, branches, norms)),
     "One norm at the end is not enough: there is one after every branch."),
])


# 8.7 ------------------------------------------------------------------------------------------------------------------

def ahead(x, steps=1):
    return torch.cat((x[:, steps:], torch.zeros_like(x[:, :steps])), dim=1)


def glimpse_in(sequence, channel, size=0.1):
    """Each token of one sequence sees one channel of the next one."""
    def mix(x):
        y = x.clone()
        y[sequence, :, channel] += size * ahead(x)[sequence, :, channel]
        return y
    return mix


def there_and_back(x):
    """Nothing but rounding, and that depends on all tokens."""
    size = 1 + x.square().mean().sqrt()
    return x / size * size


MIXERS = {                                         # (B, T, d) -> (B, T, d)
    "RMSNorm, token by token": rms,
    "a mean over the tokens so far": lambda x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None],
    "the mean square of the whole batch": lambda x: x / x.square().mean((0, 1)).sqrt(),
    "the same, detached as in PowerNorm": lambda x: x / x.detach().square().mean((0, 1)).sqrt(),
    "the mean square of each sequence": lambda x: x / x.square().mean((1, 2), keepdim=True).sqrt(),
    "a glimpse of the next token's direction": lambda x: x + 0.1 * ahead(rms(x)),
    "a glimpse, in the last sequence alone": glimpse_in(-1, 0),
    "a glimpse of the last channel, in the first sequence alone": glimpse_in(0, -1),
    "a faint glimpse, in the first sequence alone": glimpse_in(0, 0, 0.001),
    "a mean over the sequences, place by place": lambda x: x - x.mean(0),
    "the neighbour's first token": lambda x: x + 0.1 * x.roll(1, 0)[:, :1],
    "the neighbour's last token": lambda x: x + 0.1 * x.roll(1, 0)[:, -1:],
    "a division by the number of tokens": lambda x: x / x.shape[1],
    "a division and a multiplication by the same number": there_and_back,
}


def mixer_inputs(generator):
    for label, mixer in MIXERS.items():
        yield label, mixer, randn(generator, 3, 5, 4)


def moved(f, x, sequences, t, channels=slice(None), change=lambda token: token + 1, least=1e-6):
    """Where f changes when token t of these sequences does: (B, T), True or False."""
    other = x.clone()
    other[sequences, t, channels] = change(x[sequences, t, channels])
    return (f(other) - f(x)).abs().amax(-1) > least


def causal(f, x, sequences=None, **others):
    sequences = range(x.shape[0]) if sequences is None else sequences
    for b, t in itertools.product(sequences, range(x.shape[1])):
        found = moved(f, x, b, t, **others)
        found[b, t:] = False                                                           # these may
        if found.any():
            return False
    return True


def by_autograd(f, x):
    jacobian = torch.autograd.functional.jacobian(f, x).abs().amax((2, 5))            # (B, T, B, T)
    return all((jacobian[b, t, c, s] < 1e-9) or (b == c and s <= t) for b, t, c, s in itertools.product(
        *(range(n) for n in jacobian.shape)))


def everywhere(f, x, seen):
    return all(not seen(moved(f, x, slice(None), t), t).any() for t in range(x.shape[1]))


CAUSAL_ABOUT = {
    "RMSNorm, token by token": "You reject RMSNorm, which looks at one token at a time.",
    "a mean over the tokens so far": "You reject a mean over the tokens so far. Looking back is allowed.",
    "the mean square of the whole batch": "A norm with the whole batch's mean square gets through.",
    "the same, detached as in PowerNorm": "Statistics of the whole batch, detached as in PowerNorm, get through.",
    "the mean square of each sequence": "A norm over all tokens of a sequence, later ones too, gets through.",
    "a glimpse of the next token's direction":
        "A glimpse of just the next token gets through, one that sees its direction and not its length.",
    "a glimpse, in the last sequence alone":
        "A glimpse of the next token gets through where it happens in the last sequence alone.",
    "a glimpse of the last channel, in the first sequence alone":
        "A glimpse of the next token's last channel gets through where it happens in the first sequence alone.",
    "a faint glimpse, in the first sequence alone":
        "A glimpse of a thousandth of the next token gets through where it happens in the first sequence alone.",
    "a mean over the sequences, place by place": "A mean over the batch's sequences, place by place, gets through.",
    "the neighbour's first token": "What takes something from another sequence's first token gets through.",
    "the neighbour's last token": "What takes something from another sequence's last token gets through.",
    "a division by the number of tokens": "You reject a division by T, which depends on no token's content.",
    "a division and a multiplication by the same number":
        "You reject what divides by a number and multiplies by it again: only its rounding changes.",
}

CAUSAL = Exercise(reference=causal, inputs=mixer_inputs, about=CAUSAL_ABOUT, misconceptions=[
    (lambda f, x: f(x).shape == x.shape,
     "You find nothing wrong with any of them: something has to be changed, and its effect looked for."),
    (lambda f, x: everywhere(f, x, lambda change, t: change[:, :t]),
     "You change all sequences at once and look at earlier places: what leaks from one sequence to another at the "
     "same or a later place stays unseen."),
    (lambda f, x: everywhere(f, x, lambda change, t: change[:, t + 1:]),
     "You look behind the token that changed. There a change is welcome: it is attention's purpose."),
    (lambda f, x: everywhere(f, x, lambda change, t: change[:, :t + 1]),
     "You count the token's own place as a leak; its output has to change."),
    (lambda f, x: not moved(f, x, slice(None), -1)[:, 0].any(),
     "You change the last token and look at the first place. Who peeks one token ahead gets through."),
    (lambda f, x: not moved(f, x, 0, 0)[1:].any(),
     "You judge by a sequence's first token alone. Does a return stand inside your loop?"),
    (lambda f, x: all(torch.allclose(f(x[:, :t]), f(x)[:, :t], atol=1e-6) for t in range(1, x.shape[1])),
     "Cutting tokens off is not changing them: you reject what only counts tokens, and other sequences go unseen."),
    (by_autograd,
     "Gradients do not see what was detached, and PowerNorm's statistics are: change the numbers themselves."),
    (lambda f, x: not any((change := moved(f, x, b, t))[b, :t].any() for b in range(len(x)) for t in range(x.shape[1])),
     "You look at the sequence whose token changed. Look at the other sequences of the batch as well."),
    (lambda f, x: causal(f, x, sequences=[0]),
     "You change tokens of the first sequence only. What happens when another one's change?"),
    (lambda f, x: causal(f, x, sequences=[-1]),
     "You change tokens of the last sequence only. What happens when another one's change?"),
    (lambda f, x: False, "You reject all of them. The output of the token that changed may move, and later ones, too."),
    (partial(causal, change=lambda token: 2 * token),
     "You make a token longer and do not turn it: who looks at its direction alone does not notice. Change it "
     "in another way."),
    (partial(causal, least=0.0), "You reject what changes by rounding alone: allow for 1e-6."),
    (partial(causal, least=0.01), "You look for large changes only. A thousandth of a later token is a glimpse, too."),
    (lambda f, x: causal(f, x, channels=0), "You change the first channel of a token only."),
    (lambda f, x: not causal(f, x), "Every answer is the opposite of the right one: True is for those that are causal."),
])


# 8.8 ------------------------------------------------------------------------------------------------------------------

class Mixer:
    """A causal mean with weights, in one go (full) or piece by piece (step), in several broken ways."""

    def __init__(self, generator, fault=None):
        self.places, self.fault = randn(generator, 16, 4), fault

    def attend(self, x, keys, start):
        i, j = torch.arange(x.shape[1])[:, None], torch.arange(keys.shape[1])
        hidden = j > i + start
        if self.fault == ("no mask behind a cache" if start else "no mask without a cache"):
            hidden = torch.zeros_like(hidden)
        if self.fault == "mask at the wrong corner":
            hidden = j > i
        return (x @ keys.mT).masked_fill(hidden, -math.inf).softmax(-1) @ keys

    def full(self, x):
        x = x + self.places[:x.shape[1]]
        return Mixer.attend(type(self).sound, x, x, 0)

    def step(self, x, state):
        y, state = self.step_of_any(x, state)
        if self.fault == "turns long pieces round" and x.shape[1] > 3:
            y = y.flip(1)
        return y, state

    def step_of_any(self, x, state):
        """x (B, n, 4), what the step before gave or None -> (B, n, 4), state."""
        keys, start, pieces = (x[:, :0], 0, 0) if state is None else state
        place = torch.arange(x.shape[1]) + start
        if self.fault == "all pieces as long as this one":
            place = torch.arange(x.shape[1]) + pieces * x.shape[1]
        if start and self.fault == "one place for a piece":
            place[:] = start
        x = x + self.places[place - start if self.fault == "places from 0 again" else place]
        if self.fault == "one sequence's cache for all":
            keys = keys[:1].expand(len(x), -1, -1)
        old = {"forgets all but the last piece": keys[:, :0]}.get(self.fault, keys)
        seen = torch.cat((old, x), dim=1)
        y = self.attend(x, seen, old.shape[1])
        kept = keys if self.fault == "adds to the cache once" and keys.shape[1] else seen
        kept = keys if self.fault == "keeps no single token" and x.shape[1] == 1 else kept
        if self.fault == "keeps half precision":
            kept = kept.half().type_as(x)
        return y, (kept, start + x.shape[1], pieces + 1)


Mixer.sound = Mixer(torch.Generator())
FAULTS = {
    None: "You reject the one that is right.",
    "places from 0 again": "One that counts every piece's places from 0 again gets through.",
    "one place for a piece": "One that gives all tokens of a piece behind a filled cache the same place gets through.",
    "no mask behind a cache":
        "One that has no mask within a piece behind a filled cache gets through. Is there such a piece among "
        "yours, and do you compare all of its outputs?",
    "no mask without a cache": "One that has no mask as long as the cache is empty gets through.",
    "mask at the wrong corner": "One whose queries see too few keys once the cache is filled gets through.",
    "forgets all but the last piece": "One that forgets all but the piece before gets through.",
    "adds to the cache once": "One that fills its cache once and never adds to it gets through.",
    "keeps no single token": "One that does not keep what comes as a single token gets through.",
    "turns long pieces round":
        "One that gives the outputs of a long piece in reverse order gets through. Is there a long piece among "
        "yours, and do you compare entry by entry?",
    "all pieces as long as this one":
        "One that takes all pieces before to be as long as this one gets through: cut into unequal pieces, too.",
    "one sequence's cache for all": "One that gives all sequences of the batch the first one's cache gets through.",
    "keeps half precision":
        "One that keeps its cache in half precision gets through: how much difference do you allow?",
}


def cache_inputs(generator):
    for i, fault in enumerate(FAULTS):
        mixer = Mixer(generator, fault)
        yield f"implementation {i + 1}", mixer.full, mixer.step, randn(generator, 2, 6, 4)


def in_pieces(step, x, sizes):
    state, found = None, []
    for piece in x.split(sizes, dim=1):
        y, state = step(piece, state)
        found.append(y)
    return found


def agrees(full, step, x, sizes, least=1e-5, among=slice(None)):
    found = torch.cat(in_pieces(step, x, sizes), dim=1)
    return torch.allclose(found[among], full(x)[among], atol=least)


def in_many_ways(full, step, x, **how):
    return all(agrees(full, step, x, sizes, **how) for sizes in ([1] * 6, [6], [2, 3, 1], [3, 1, 2]))


CACHE = Exercise(
    reference=in_many_ways,
    inputs=cache_inputs, about={f"implementation {i + 1}": words for i, words in enumerate(FAULTS.values())},
    misconceptions=[
        (lambda full, step, x: agrees(full, step, x, [6]), "All tokens in one piece never read the cache."),
        (lambda full, step, x: agrees(full, step, x, [1] * 6),
         "One token at a time passes where several at once fail: a prompt that goes on comes in pieces."),
        (lambda full, step, x: agrees(full, step, x, [5, 1]),
         "A prompt and one token: the cache is read once. Whether it was filled right then, the third piece shows."),
        (lambda full, step, x: agrees(full, step, x, [2, 4]),
         "Two pieces read the cache once. Whether reading also extends it, only a third one shows."),
        (lambda full, step, x: all(torch.allclose(y[:, -1], full(x)[:, end - 1], atol=1e-5) for y, end in zip(
            in_pieces(step, x, [2, 3, 1]), (2, 5, 6))),
         "You look at the last place of each piece, which may see all of it anyway. The others may not."),
        (lambda full, step, x: agrees(full, step, x, [1] * 6) and agrees(full, step, x, [6]),
         "One token at a time and all at once: between them lies a piece of several tokens behind a filled cache."),
        (lambda full, step, x: step(x, None)[0].shape == full(x).shape,
         "You find nothing wrong with any of them. Compare numbers, and let every way of cutting count."),
        (lambda full, step, x: agrees(full, step, x, [2, 3, 1]),
         "One way of cutting, such as 2 + 3 + 1, reads no single token again, and has no long piece. Try "
         "several ways."),
        (lambda full, step, x: agrees(full, step, x, [3, 3]),
         "Two pieces of three: nothing comes singly, nothing longer, and the cache is extended unseen."),
        (lambda full, step, x: all(agrees(full, step, x, [n] * (6 // n)) for n in (1, 2, 3, 6)),
         "Your pieces are all of one length. Cut into unequal ones, too: 2 + 3 + 1."),
        (lambda full, step, x: in_many_ways(full, step, x, among=slice(1)),
         "You compare the first sequence of the batch only."),
        (partial(in_many_ways, least=0.05), "You allow too much: 1e-5 is the most that rounding does here."),
        (lambda full, step, x: agrees(full, step, x, [1, 2, 3]),
         "1 + 2 + 3 only: the first piece is too short to need a mask, and no piece is long."),
        (lambda full, step, x: torch.allclose(step(x[:, :3], None)[0], full(x)[:, :3], atol=1e-5)
            and agrees(full, lambda piece, state: (step(piece, None)[0], None), x, [1] * 6),
         "You reject the right one, too. Each step has to get the state that the one before gave, the first piece "
         "None; and its outputs are those of its own places in full(x)."),
    ])


# 8.9 ------------------------------------------------------------------------------------------------------------------

def fold_inputs(generator):
    def case(n_out, n):
        return randn(generator, n_out, n), torch.tensor(0.6), randn(generator, n), randn(generator, n)

    yield "a matrix (6, 4)", *case(6, 4)
    yield "a square matrix", *case(5, 5)
    yield "one row", *case(1, 3)
    w, alpha, gamma, beta = case(3, 4)
    yield "a gain of zeros", w, alpha, torch.zeros(4), beta


FOLDING = Exercise(
    reference=lambda w, alpha, gamma, beta: ((w.T * gamma[:, None]).T, (w * beta).sum(1)), inputs=fold_inputs,
    parts=("matrix", "bias"), misconceptions=[
        (lambda w, alpha, gamma, beta: (w * gamma * alpha, w @ beta),
         "alpha stands inside the tanh: tanh(alpha x) is not alpha tanh(x). It has to stay where it is."),
        (lambda w, alpha, gamma, beta: (w @ gamma.diag(), torch.zeros(len(w))),
         "beta is lost: the matrix meets it, too."),
        (lambda w, alpha, gamma, beta: (w * gamma, w @ (gamma * beta)),
         "beta is added behind the gain: gamma does not multiply it."),
        (lambda w, alpha, gamma, beta: (w * gamma, beta), "beta has the matrix's inputs; a bias has its outputs."),
        (lambda w, alpha, gamma, beta: (gamma[:, None] * w, w @ beta) if w.shape[0] == w.shape[1] else
            (w * gamma, w @ beta), "For a square matrix you scale the rows. The gain belongs to the inputs."),
        (lambda w, alpha, gamma, beta: (w * gamma[:, None], w @ beta),
         "gamma[:, None] gives each row of w a number, and rows are outputs. Along which axis do the inputs lie?"),
        (lambda w, alpha, gamma, beta: (w / gamma, w @ beta),
         "You divide by the gain; the folded matrix has to do its work."),
        (lambda w, alpha, gamma, beta: (w, w @ beta), "gamma is lost: what takes its place?"),
    ])


# 8.10 -----------------------------------------------------------------------------------------------------------------

def seed_inputs(generator):
    yield "two seeds", torch.tensor([2.31, 2.29]), torch.tensor([2.35, 2.30])
    hard = randn(generator, 8)                                                        # seeds that are hard for both
    yield "eight seeds", 2.3 + 0.1 * hard + 0.01 * randn(generator, 8), 2.32 + 0.1 * hard
    yield "three seeds, no difference but noise", 2 + 0.05 * randn(generator, 3), 2 + 0.05 * randn(generator, 3)
    yield "one seed", torch.tensor([2.2]), torch.tensor([2.4])


def spread(x, less=1):
    """Standard deviation; of one number it is not known."""
    return ((x - x.mean()).square().sum() / (len(x) - less)).sqrt() if len(x) > less else torch.tensor(math.inf)


def compared(mine, other, *, turn=1, mean=lambda a, b: (a - b).mean(), error=lambda d: spread(d) / len(d) ** 0.5):
    return turn * mean(mine, other), error(mine - other)


def spreads_subtracted(mine, other):
    mean, error = compared(mine, other)
    if len(mine) > 1:
        error = (spread(mine) - spread(other)).abs() / len(mine) ** 0.5
    return mean, error


COMPARE = Exercise(reference=compared, inputs=seed_inputs, parts=("mean", "error"), misconceptions=[
    (partial(compared, turn=-1), "Your sign says the opposite: below zero should mean that mine is better."),
    (partial(compared, mean=lambda a, b: a[0] - b[0]), "One seed decides nothing: average over all."),
    (partial(compared, mean=lambda a, b: a.min() - b.min()),
     "The best seed of each: that rewards luck, and more of it with more seeds."),
    (lambda mine, other: compared(mine / other, 1.0), "A ratio was not asked for: subtract, in nats per byte."),
    (lambda mine, other: compared(mine.sort().values, other.sort().values),
     "You sort the losses, and pairs with one seed are torn apart."),
    (lambda mine, other: compared((mine - other).abs(), torch.zeros(())),
     "You take the differences' sizes. Mine may be ahead with one seed and behind with another."),
    (spreads_subtracted,
     "A difference of two spreads is not the spread of the differences."),
    (partial(compared, error=spread),
     "That is the spread of one seed's difference. The mean of n of them is known better."),
    (partial(compared, error=lambda d: spread(d) / len(d)),
     "You divide by n; the error of a mean shrinks more slowly."),
    (partial(compared, error=lambda d: spread(d, 0) / len(d) ** 0.5),
     "With n in the variance, one seed has an error of 0, and two too small a one: n - 1."),
    (partial(compared, error=lambda d: spread(d, len(d) == 1) / len(d) ** 0.5),
     "Right for one seed. For more, your variance divides by n, as NumPy's std does by itself."),
    (partial(compared, error=lambda d: spread(d) / len(d) ** 0.5 if len(d) > 1 else torch.tensor(0.0)),
     "An error of 0 would mean that one seed settles it. What one seed leaves unknown is not small."),
    (lambda mine, other: ((mine - other).mean(), ((spread(mine) ** 2 + spread(other) ** 2) / len(mine)) ** 0.5),
     "You treat the two as independent. Both had the same seeds, easy or hard for both: differences first."),
    (partial(compared, error=lambda d: d.std() / len(d) ** 0.5),
     "Right but for one seed, of which torch makes NaN: there the error is unknown, so say infinite."),
])


# What holds of every right answer: said where none of the known mistakes fits ----------------------------------------

PROPERTIES = {
    "8.1": [
        (lambda y, x, alpha, gamma: y.shape == x.shape, "DyT gives one number for each that it gets."),
        (lambda y, x, alpha, gamma: (y.abs() <= gamma.abs() + 0.001).all(),
         "No output is larger than the channel's gamma, as no tanh is above 1. Some of yours are."),
        (lambda y, x, alpha, gamma: x.any() or near(y, 0), "At x = 0 the output is 0. Yours is not."),
        (lambda y, x, alpha, gamma: (y * x * alpha * gamma >= -1e-6).all(),
         "The output has the sign of x, turned by a negative alpha or gamma. Yours has not."),
        (lambda y, x, alpha, gamma: x.abs().max() < 100 or near(y.abs().amax(0), gamma.abs(), 0.01),
         "Far out the curve is flat, at the channel's gamma. Yours is not."),
        (lambda y, *_: False, "Far out and at 0 yours is right. How steep is the curve at 0?")],
    "8.2": [
        (lambda y, x, alpha, gamma: near(y - y.diag().diag(), 0),
         "Output i looks at x_i alone, so all off the diagonal is 0. In yours it is not."),
        (lambda y, x, alpha, gamma: x.any() or near(y.diag(), gamma * alpha),
         "At x = 0 a tanh has slope 1, and only gain and inner factor are left. Yours has another slope there."),
        (lambda y, *_: False, "At x = 0 yours is right. How does tanh's slope fall away from there?")],
    "8.3": [
        (lambda y, x: y.numel() == 1, "One number is asked for, the mean over all tokens."),
        (lambda y, x: x[..., 0].numel() > 1 or near(y ** -2, x.var(correction=0) + 1e-5),
         "Even with one token, where nothing is averaged, yours is not its slope: look at its variance, eps and root."),
        (lambda y, x: False, "With one token yours is right. Over which axis is a token's variance, and what is averaged "
                             "last?")],
    "8.4": [
        (lambda y, h, norm, branch, layer: layer > 1 or near(y, h + branch(norm(h))),
         "Even in layer 1, where nothing is scaled, yours is off: that is a plain Pre-LN step."),
        (lambda y, h, norm, branch, layer: False,
         "In layer 1 yours is right. In the others: which one thing is divided, and by which power of the layer's "
         "number?")],
    "8.5": [
        (lambda y, L: L > 1 or near(y, 1), "After one contribution, of length 1, the stream has length 1."),
        (lambda y, L: L != 2 or near(y * y, 1.5),
         "With two, the squares of their lengths, 1 and 1/sqrt(2), add up. The square of yours is something else."),
        (lambda y, L: False, "With two contributions yours is right. And the third?")],
    "8.6": [
        (lambda y, h, branches, norms: len(branches) > 1 or near(y, norms[0](h + branches[0](h))),
         "Even with one branch yours is off: the branch, the sum, the first of the norms, and nothing else."),
        (lambda y, *_: False, "With one branch yours is right. Which norm does the second one have, and what is it given?")],
    "8.9": [
        (lambda y, w, alpha, gamma, beta: near(y[1], w @ beta),
         "The bias: put in an x of zeros, where tanh gives 0. The two ways do not give the same."),
        (lambda y, w, alpha, gamma, beta: False,
         "The matrix: of a tanh(alpha x) with a single 1, the two ways do not give the same. Which column answers?")],
    "8.10": [
        (lambda y, mine, other: near(y[0], (mine - other).mean()), "The mean of the differences, mine - other, is another."),
        (lambda y, mine, other: len(mine) > 1 or y[1] == math.inf, "With one seed the error is unknown: infinity."),
        (lambda y, mine, other: len(mine) != 2 or near(y[1], (mine - other).diff().abs().sum() / 2, 1e-5),
         "With two seeds the error is half of what the two differences are apart. Yours is not."),
        (lambda y, *_: False, "With two seeds yours is right. Of n differences, what is divided by n - 1, and what by "
                              "the root of n?")],
}


EXERCISES = {"8.1": DYT, "8.2": JACOBIAN, "8.3": MATCHING, "8.4": SCALING, "8.5": GROWTH, "8.6": POST, "8.7": CAUSAL,
             "8.8": CACHE, "8.9": FOLDING, "8.10": COMPARE}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
