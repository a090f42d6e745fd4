"""
Lesson 8, write the seventh: Dynamic Tanh, LayerNorm scaling, Post-LN, and the tests that a new norm
has to pass.

Sources: anGPT section 3.2 and Appendix A, NormFormer section 1. grader.py explains the form. The
references use elementary operations only and import nothing from model.py.
"""
import math
from functools import partial

import torch

from answers import near
from grader import AUTOGRAD, Exercise
from pieces import never, randn, silu


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


# 8.1 ----------------------------------------------------------------------------------------------

def dyt_inputs(generator):
    yield "a batch (2, 3, 5)", randn(generator, 2, 3, 5), torch.tensor(0.7), randn(generator, 5)
    yield "as many tokens as channels", randn(generator, 4, 4), torch.ones(()), randn(generator, 4)
    yield "large inputs", 1e3 * randn(generator, 3, 6), torch.tensor(0.5), randn(generator, 6)
    yield "a negative alpha", randn(generator, 3, 6), torch.tensor(-2.0), randn(generator, 6)
    yield "one token of zeros", torch.zeros(1, 4), torch.tensor(1.5), torch.ones(4)


def tanh(x):
    return 1 - 2 / ((2 * x).exp() + 1)


def dyt(x, alpha, gamma):
    return gamma * tanh(alpha * x)


DYT = Exercise(reference=dyt, inputs=dyt_inputs, trains=("x", "alpha", "gamma"), misconceptions={
    "Your outputs never leave (-1, 1): a gain inside the tanh cannot make a channel larger.":
        lambda x, alpha, gamma: torch.tanh(gamma * alpha * x),
    "alpha should decide how steeply the curve rises, not how far. In your function it only "
    "multiplies the result.":
        lambda x, alpha, gamma: alpha * gamma * tanh(x),
    "alpha and gamma are exchanged: which of them scales the input, and which the output?":
        lambda x, alpha, gamma: alpha * torch.tanh(gamma * x),
    "gamma is a gain: it does not shift the curve.":
        lambda x, alpha, gamma: torch.tanh(alpha * x) + gamma,
    "You subtract a mean, which is a statistic over the channels: DyT has none.":
        lambda x, alpha, gamma: dyt(x - x.mean(-1, keepdim=True), alpha, gamma),
    "You normalize first. The tanh replaces the norm, so nothing has to be averaged.":
        lambda x, alpha, gamma: dyt(rms(x), alpha, gamma),
    "Your curve is S-shaped, too, but it is not a hyperbolic tangent.":
        lambda x, alpha, gamma: gamma * torch.nn.functional.softsign(alpha * x),
    "Your curve is a straight line between two flat ends. A hyperbolic tangent bends everywhere.":
        lambda x, alpha, gamma: gamma * (alpha * x).clamp(-1, 1),
})


# 8.2 ----------------------------------------------------------------------------------------------

def jacobian_inputs(generator):
    yield "five channels", randn(generator, 5), torch.tensor(0.7), randn(generator, 5)
    yield "alpha 1, gamma 1", randn(generator, 4), torch.tensor(1.0), torch.ones(4)
    yield "far out on the curve", 3 * randn(generator, 6), torch.tensor(2.0), randn(generator, 6)
    yield "zeros", torch.zeros(3), torch.tensor(0.5), randn(generator, 3)
    yield "a very steep curve", 1e-7 * randn(generator, 4), torch.tensor(1e7), randn(generator, 4)
    yield "alpha below 0", randn(generator, 4), torch.tensor(-0.8), randn(generator, 4)


def slope(x, alpha, gamma):
    return gamma * alpha / torch.cosh(alpha * x) ** 2


def dyt_jacobian(x, alpha, gamma):
    return torch.eye(len(x)) * slope(x, alpha, gamma)


def by_output(x, alpha, gamma):
    y = gamma * torch.tanh(alpha * x)
    return torch.diag(gamma * alpha * (1 - y ** 2))


JACOBIAN = Exercise(
    reference=dyt_jacobian, inputs=jacobian_inputs, without=AUTOGRAD, misconceptions={
    "You subtract a mean, as LayerNorm's Jacobian does: there each channel acts on all others "
    "through the mean. Which channels of x does output i of DyT depend on?":
        lambda right: right - right.mean(-1, keepdim=True),
    "These are the right slopes, one per channel, but a Jacobian is a matrix (n, n). Where in it "
    "do they belong?":
        slope,
    "The chain rule's inner factor is missing: before the tanh, x is multiplied by something.":
        lambda x, alpha, gamma: torch.diag(gamma / torch.cosh(alpha * x) ** 2),
    "Look up the derivative of tanh again. Yours, 1 - tanh(u), is 1 at u = 0 but nearly 2 for very "
    "negative u, where the curve is flat.":
        lambda x, alpha, gamma: torch.diag(gamma * alpha * (1 - torch.tanh(alpha * x))),
    "You wrote the slope in terms of the output y, which contains gamma. Use tanh(alpha x) alone.":
        by_output,
    "You take the slope of the tanh at x, but the tanh is evaluated at another point.":
        lambda x, alpha, gamma: torch.diag(gamma * alpha / torch.cosh(x) ** 2),
    "Yours is 0 at x = 0, where DyT is steepest, and grows on both sides.":
        lambda x, alpha, gamma: torch.diag(gamma * alpha * torch.tanh(alpha * x) ** 2),
})


# 8.3 ----------------------------------------------------------------------------------------------

def matching_inputs(generator):
    spreads = torch.tensor([0.5, 1.0, 4.0])
    yield "tokens of different spread", spreads[:, None] * randn(generator, 2, 3, 8)
    yield "tokens with a mean", randn(generator, 2, 5, 4) + 2
    yield "embeddings, std 0.02", 0.02 * randn(generator, 4, 8, 16)
    yield "one token", 3 * randn(generator, 1, 1, 6)


def matching_alpha(x, *, centered=True, less=0, eps=1e-5, eps_behind_root=0.0, power=-1,
                   mean=torch.mean):
    """Return the mean of deviation ** power over all tokens; the variance divides by n - less."""
    off = x
    if centered:
        off = x - x.mean(-1, keepdim=True)
    variance = off.square().sum(-1) / (x.shape[-1] - less)
    deviation = (variance + eps).sqrt() + eps_behind_root
    return mean(deviation ** power)


def of_mean_deviation(slopes):
    return 1 / (1 / slopes).mean()


def of_mean_variance(slopes):
    return 1 / (1 / slopes ** 2).mean().sqrt()


MATCHING = Exercise(
    reference=matching_alpha, inputs=matching_inputs, tolerance=1e-4, misconceptions={
    "Upside down: the more a token's entries spread, the smaller LayerNorm's factor.":
        partial(matching_alpha, power=1),
    "The mean of the factors is asked for. You have one over the mean standard deviation, "
    "which is smaller.":
        partial(matching_alpha, mean=of_mean_deviation),
    "Yours is a single factor, from the mean variance of all tokens. Compute each token's factor "
    "first, then average the factors.":
        partial(matching_alpha, mean=of_mean_variance),
    "That is RMSNorm's factor. LayerNorm measures the spread around the token's mean.":
        partial(matching_alpha, centered=False),
    "LayerNorm's factor multiplies x - mean. You divide the output by x itself.":
        lambda x: (torch.nn.functional.layer_norm(x, x.shape[-1:]) / x).mean(),
    "Your variance divides by n - 1, which is torch's default; LayerNorm divides by n.":
        partial(matching_alpha, less=1),
    "For small inputs, such as untrained embeddings, epsilon matters. Is yours 1e-5, and do you "
    "add it to the variance?":
        partial(matching_alpha, eps=0),
    "Your epsilon is 1e-6; the exercise asks for 1e-5.":
        partial(matching_alpha, eps=1e-6),
    "LayerNorm adds epsilon to the variance, before the root is taken. You add it to the root.":
        partial(matching_alpha, eps=0, eps_behind_root=1e-5),
})


# 8.4 ----------------------------------------------------------------------------------------------

def silu_branch(generator, d):
    """Return a branch that is not linear, like those of a block."""
    up = randn(generator, d, 2 * d) / d ** 0.5
    down = randn(generator, 2 * d, d)

    def branch(x):
        return silu(x @ up) @ down
    return branch


def rms_or_itself(x):
    y = rms(x)
    return x if torch.allclose(x, y) else y


def scaling_inputs(generator):
    yield "layer 3", randn(generator, 2, 3, 4), rms, silu_branch(generator, 4), 3
    yield "the first layer", randn(generator, 2, 3, 4), rms, silu_branch(generator, 4), 1
    yield "layer 24", 5 * randn(generator, 2, 3, 8), rms, silu_branch(generator, 8), 24
    gain = randn(generator, 4)

    def norm(x):
        return gain * rms(x)
    yield "a norm with a gain", randn(generator, 3, 4), norm, silu_branch(generator, 4), 2
    h = rms(randn(generator, 3, 4))
    yield "a normalized h that norm returns itself", h, rms_or_itself, silu_branch(generator, 4), 2


def scaled_step(h, norm, branch, layer):
    return h + branch(norm(h) / math.sqrt(layer))


SCALING = Exercise(reference=scaled_step, inputs=scaling_inputs, trains=("h",), misconceptions={
    "You shrink the residual stream itself: what the first layers wrote would be gone "
    "after a few blocks.":
        lambda h, norm, branch, layer: h / math.sqrt(layer) + branch(norm(h)),
    "You scale the branch's output. The paper scales its input, and a branch is not linear.":
        lambda h, norm, branch, layer: h + branch(norm(h)) / math.sqrt(layer),
    "In every layer your step is a plain Pre-LN step. Is the factor missing, is it always 1, or "
    "does it stand in front of the norm, which undoes it?":
        lambda h, norm, branch, layer: h + branch(norm(h / math.sqrt(layer))),
    "From layer 2 on your factor is too small: look again at the power of the layer's number.":
        lambda h, norm, branch, layer: h + branch(norm(h) / layer),
    "Your factor is 1 / (2 layer). If you meant a root: in Python x ** 1/2 is (x ** 1) / 2, "
    "because a power is taken before a division. Write x ** 0.5, or x ** -0.5.":
        lambda h, norm, branch, layer: h + branch(norm(h) / layer ** 1 / 2),
    "Layers count from 1 here, and the first layer is not scaled.":
        lambda h, norm, branch, layer: scaled_step(h, norm, branch, layer + 1),
    "Layers count from 1 here, so that layer - 1 is 0 in the first one.":
        lambda h, norm, branch, layer: scaled_step(h, norm, branch, layer - 1),
    "You apply the norm twice in front of the branch. If it has a gain, that differs from once.":
        lambda h, norm, branch, layer: scaled_step(h, lambda x: norm(norm(x)), branch, layer),
    "The residual is h itself, whatever the branch is given.":
        lambda h, norm, layer, right: right - h + norm(h) / math.sqrt(layer),
    "The residual is missing.":
        lambda h, right: right - h,
})


# 8.5 ----------------------------------------------------------------------------------------------

def depth_inputs(generator):
    yield "1 layer", 1
    for layers in (2, 6, 24, 1000):
        yield f"{layers} layers", layers


def harmonic(layers, power=1.0):
    """Return 1 + 1 / 2 ** power + ... + 1 / layers ** power."""
    return sum(layer ** -power for layer in range(1, layers + 1))


def stream_after(layers):
    return math.sqrt(harmonic(layers))


GROWTH = Exercise(reference=stream_after, inputs=depth_inputs, tolerance=1e-4, misconceptions={
    "That is the stream without the factors, where every contribution has length 1.":
        lambda layers: math.sqrt(layers),
    "You add the lengths, as if all contributions pointed the same way. What adds up for "
    "independent vectors?":
        lambda layers: harmonic(layers, 0.5),
    "Under your root is the sum of the lengths 1/sqrt(l) themselves. They are not squared yet.":
        lambda layers: math.sqrt(harmonic(layers, 0.5)),
    "Under your root is the sum of 1/l^2. The length of contribution l is 1/sqrt(l): what is its "
    "square?":
        lambda layers: math.sqrt(harmonic(layers, 2)),
    "Yours comes close only for very many layers; for one layer it gives 0.":
        lambda layers: math.sqrt(math.log(layers)),
    "A good approximation for many layers, but not for few. Add up the terms themselves.":
        lambda layers: math.sqrt(math.log(layers) + 0.5772156649),
    "The last layer is missing. Does your loop stop before `layers`, as range(1, layers) does?":
        lambda layers: stream_after(layers - 1),
})


# 8.6 ----------------------------------------------------------------------------------------------

def layer_norm(generator, d):
    gain = 1 + 0.5 * randn(generator, d)

    def norm(x):
        off = x - x.mean(-1, keepdim=True)
        return gain * off / (off.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return norm


def post_inputs(generator):
    def case(d, n, size=1.0):
        h = size * randn(generator, 2, 3, d)
        branches = [silu_branch(generator, d) for _ in range(n)]
        norms = [layer_norm(generator, d) for _ in range(n + 1)]
        return h, branches, norms

    yield "one block: two branches", *case(4, 2)
    yield "three blocks: six branches", *case(6, 6)
    yield "a large input", *case(4, 4, size=100.0)
    yield "one branch", *case(8, 1)


def chain(step):
    """Return a model that takes step(h, branch, norm) for each branch; the last norm is unused."""
    def run(h, branches, norms):
        for branch, norm in zip(branches, norms):
            h = step(h, branch, norm)
        return h
    return run


post_ln = chain(lambda h, branch, norm: norm(h + branch(h)))
pre_ln = chain(lambda h, branch, norm: h + branch(norm(h)))


def one_norm_at_end(h, branches, norms):
    for branch in branches:
        h = h + branch(h)
    return norms[len(branches) - 1](h)


POST = Exercise(reference=post_ln, inputs=post_inputs, trains=("h",), misconceptions={
    "Your blocks are right. But the last of them already ends in a norm, so what is one more "
    "for?":
        lambda right, norms: norms[-1](right),
    "That is a Pre-LN model.":
        lambda h, branches, norms: norms[-1](pre_ln(h, branches, norms)),
    "That is a Pre-LN model without its final norm.":
        pre_ln,
    "You normalize the branch's output, and the stream keeps growing. In Post-LN the sum is "
    "normalized.":
        chain(lambda h, branch, norm: h + norm(branch(h))),
    "You normalize before the branch and use the normalized h as the residual, too. In Post-LN "
    "the norm comes after the sum.":
        chain(lambda h, branch, norm: norm(h) + branch(norm(h))),
    "Your norms are shifted by one: the first branch's sum belongs to the first norm.":
        lambda h, branches, norms: post_ln(h, branches, norms[1:]),
    "You normalize h before the first branch, where nothing has been added yet. If you do not, "
    "which norm is left over?":
        lambda h, branches, norms: post_ln(norms[0](h), branches, norms[1:]),
    "The residual is missing: normalize the sum of the branch's output and its input.":
        chain(lambda h, branch, norm: norm(branch(h))),
    "One norm at the end is not enough: Post-LN has one after every branch.":
        one_norm_at_end,
})


# 8.7 ----------------------------------------------------------------------------------------------

def mean_so_far(x):
    count = torch.arange(1, x.shape[1] + 1)
    return x.cumsum(1) / count[:, None]


def by_batch(x):
    return x / x.square().mean((0, 1)).sqrt()


def by_batch_detached(x):
    return x / x.detach().square().mean((0, 1)).sqrt()


def by_sequence(x):
    return x / x.square().mean((1, 2), keepdim=True).sqrt()


def ahead(x):
    """Return x with each token replaced by the next one."""
    return torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), dim=1)


def faint_leak(x):
    """Change outputs by less than 0.001 with the next token's channel 0, in sequence 0 only."""
    y = x.clone()
    y[0, :, 0] += 0.0005 * ahead(x)[0, :, 0].tanh()
    return y


def lowered_by_a_change(x, start):
    """Lower an output if the last sequence's second token differs from `start` in channel 0."""
    y = x.clone()
    y[-1, 0, 0] -= 0.1 * (x - start[:, :x.shape[1]])[-1, 1:2, 0].abs().sum()    # nothing if T is 1
    return y


def raised_by_a_change(x, start):
    """Raise outputs two tokens before one whose last channel differs from `start`."""
    y = x.clone()
    y[0, :-2, -1] += 0.1 * (x - start[:, :x.shape[1]])[0, 2:, -1].abs()
    return y


def first_to_next_sequence(x):
    """Add a tenth of each sequence's first token to all later tokens of the next sequence."""
    y = x.clone()
    y[1:, 1:] += 0.1 * x[:-1, :1]
    return y


def last_to_earlier_sequence(x):
    """Add a tenth of each sequence's last token to all tokens of the sequence before it."""
    y = x.clone()
    y[:-1] += 0.1 * x[1:, -1:]
    return y


def ahead_through_layer_norm(x):
    """Add a tenth of the next token's LayerNorm, which is the same for x, 2 x and x + 1."""
    return x + 0.1 * ahead(rms(x - x.mean(-1, keepdim=True)))


def there_and_back(x):
    """Return x, except for rounding errors that depend on all tokens."""
    size = 1 + x.square().mean().sqrt()
    return x / size * size


# Label, function to be judged, and the sentence for a wrong answer about it.
MIXERS = [
    ("RMSNorm, token by token", rms,
     "You reject RMSNorm, which looks at one token at a time."),
    ("a mean over the tokens so far", mean_so_far,
     "You reject a mean over the tokens so far. Looking back is allowed."),
    ("the mean square of the whole batch", by_batch,
     "You accept a norm that divides by the mean square of the whole batch."),
    ("the same, detached as in PowerNorm", by_batch_detached,
     "You accept statistics of the whole batch where they are detached, as in PowerNorm. Gradients "
     "do not see those, and a mean square sees neither a change of sign nor another order."),
    ("the mean square of each sequence", by_sequence,
     "You accept a norm over all tokens of a sequence, later ones included."),
    ("a tenth of the next token's LayerNorm", ahead_through_layer_norm,
     "You accept a leak from the next token that passes through a LayerNorm. A LayerNorm does not "
     "see a longer token, nor a number added to all channels, and its outputs sum to 0. It makes "
     "NaN of infinity, and NaN > 1e-6 is False."),
    ("a leak, in the last sequence only", lowered_by_a_change,
     "You accept a leak of the second token's first channel into the first token that happens in "
     "the last sequence only and can only lower an output. Do you change every token of every "
     "sequence, and take the absolute value of the difference?"),
    ("a leak of the last channel, two tokens ahead, in the first sequence only",
     raised_by_a_change,
     "You accept a leak of a token's last channel to the token two places earlier that happens in "
     "the first sequence only and can only raise an output. Do you change all channels, look at "
     "all earlier places, and take the absolute value of the difference?"),
    ("a faint leak, in the first sequence only", faint_leak,
     "You accept a faint leak of the next token's first channel that happens in the first sequence "
     "only and changes outputs by less than 0.001."),
    ("a mean over the sequences, position by position", lambda x: x - x.mean(0),
     "You accept a mean over the sequences of the batch. If one sequence alone gets other values, "
     "the others change at the same position, up or down. If sequences only change places, the "
     "mean stays the same."),
    ("the neighbor's first token", first_to_next_sequence,
     "You accept a leak from the first token of each sequence into the later tokens of the next "
     "sequence."),
    ("the last token of the sequence behind", last_to_earlier_sequence,
     "You accept a leak from the last token of each sequence into the sequence before it."),
    ("the neighbor's last token", lambda x: x + 0.1 * x.roll(1, 0)[:, -1:],
     "You accept a leak from the last token of another sequence."),
    ("a division by the number of tokens", lambda x: x / x.shape[1],
     "You reject a division by T. It depends on the number of tokens, but not on their values."),
    ("a division and a multiplication by the same number", there_and_back,
     "You reject a function that divides by a number and multiplies by it again: with finite "
     "numbers only rounding errors change."),
]


def mixer_inputs(generator):
    for label, mixer, _ in MIXERS:
        x = randn(generator, 3, 5, 4)
        if mixer in (lowered_by_a_change, raised_by_a_change):
            mixer = partial(mixer, start=x.clone())
        yield label, mixer, x


def moved(f, x, b, t):
    """Return (B, T): where f changes when token t of sequence b does. b may be a slice."""
    other = x.clone()
    other[b, t] += torch.randn(x.shape[-1])     # a single number would vanish in a LayerNorm
    return (f(other) - f(x)).abs().amax(-1) > 1e-6


def is_causal(f, x):
    B, T, _ = x.shape
    for b in range(B):
        for t in range(T):
            changed = moved(f, x, b, t)
            changed[b, t:] = False                          # these may change
            if changed.any():
                return False
    return True


def changing_all_sequences(f, x, looking_at):
    for t in range(x.shape[1]):
        changed = moved(f, x, slice(None), t)
        if looking_at(changed, t).any():
            return False
    return True


def last_token_to_first_place(f, x):
    changed = moved(f, x, slice(None), -1)
    return not changed[:, 0].any()


def by_one_token(f, x, b, t):
    changed = moved(f, x, b, t)
    changed[b, t:] = False
    return not changed.any()


def cutting(f, x):
    for t in range(1, x.shape[1]):
        if not torch.allclose(f(x[:, :t]), f(x)[:, :t], atol=1e-6):
            return False
    return True


CAUSAL_ABOUT = {label: sentence for label, _, sentence in MIXERS}
CAUSAL = Exercise(reference=is_causal, inputs=mixer_inputs, about=CAUSAL_ABOUT, misconceptions={
    "You accept all of them. Is something changed in a copy of x, by a finite number far above "
    "1e-6, and do you look at the outputs that may not change?":
        lambda f, x: f(x).shape == x.shape,
    "You see leaks to earlier positions, but not those from one sequence to another at the same or "
    "a later position. In the other sequences nothing may change, at any position.":
        lambda f, x: changing_all_sequences(f, x, lambda changed, t: changed[:, :t]),
    "You count the changed token's own output as a leak, but it may change.":
        lambda f, x: changing_all_sequences(f, x, lambda changed, t: changed[:, :t + 1]),
    "You notice leaks over a long distance only, and not one from the next token: try every token, "
    "and look at all earlier outputs.":
        last_token_to_first_place,
    "You seem to judge by one token, the first. Is there a return inside your loop?":
        partial(by_one_token, b=0, t=0),
    "You seem to judge by one token, the last one of the last sequence. Is an earlier result "
    "overwritten?":
        partial(by_one_token, b=-1, t=-1),
    "Cutting tokens off, or adding some, also changes T, so you reject a function that only "
    "depends on T; and leaks between sequences stay unseen.":
        cutting,
    "You reject all of them. The output of the changed token may change, and so may later ones. "
    "Does every try begin with a new copy of x, so that nothing else is changed?":
        lambda: False,
})


# 8.8 ----------------------------------------------------------------------------------------------

def attend(x, keys, hidden):
    scores = (x @ keys.mT).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ keys


class Mixer:
    """Causal attention without matrices, all at once (full) or chunk by chunk (step).

    `fault` names an error, or is None. Even then step's outputs differ from full's by rounding: by
    a factor of 1 + 2^-22.
    """

    def __init__(self, generator, fault):
        self.places = randn(generator, 16, 4)
        self.fault = fault

    def full(self, x):
        n = x.shape[1]
        x = x + self.places[:n]
        later = torch.ones(n, n).triu(1) > 0
        if self.fault == "full looks ahead":
            later[:] = False
        return attend(x, x, later)

    def step(self, x, state):
        """Take x (B, n, 4) and the previous state or None; return outputs (B, n, 4) and a state."""
        if state is None:
            state = x[:, :0], 0, 0
        cache, start, chunks = state                        # `start` tokens in `chunks` came before
        n = x.shape[1]
        x = x + self.places[self.places_of(n, start, chunks)]
        old = self.read(cache)
        seen = torch.cat((old, x), dim=1)
        y = attend(x, seen, self.hidden(n, old.shape[1])) * (1 + 2 ** -22)
        if self.fault == "reverses long chunks" and n > 3:
            y = y.flip(1)
        if self.fault == "one output too large" and start + n == 6:
            y[-1, -1, -1] += 2e-4
        if self.fault == "one output too small" and start + n == 6:
            y[-1, -1, -1] -= 2e-4
        return y, (self.kept(cache, seen, n), start + n, chunks + 1)

    def places_of(self, n, start, chunks):
        if self.fault == "positions from 0 again":
            return torch.arange(n)
        if self.fault == "all chunks as long as this one":
            return torch.arange(n) + chunks * n
        if self.fault == "one position for a chunk" and start > 0:
            return torch.full((n,), start)
        return torch.arange(n) + start

    def read(self, cache):
        if self.fault == "one sequence's cache for all":
            return cache[:1].expand_as(cache)
        return cache

    def hidden(self, n, before):
        """Return (n, before + n): which keys are hidden from which query."""
        query = torch.arange(n)[:, None]
        key = torch.arange(before + n)
        none = torch.zeros(n, before + n, dtype=torch.bool)
        if self.fault == "no mask behind a cache" and before > 0:
            return none
        if self.fault == "no mask without a cache" and before == 0:
            return none
        if self.fault == "full looks ahead":
            return none
        if self.fault == "mask at the wrong corner":
            return key > query
        return key > query + before

    def kept(self, cache, seen, n):
        if self.fault == "adds to the cache once" and cache.shape[1] > 0:
            return cache
        if self.fault == "keeps no single token" and n == 1:
            return cache
        return seen


# The error in step, and the sentence for a wrong answer about it.
FAULTS = {
    None:
        "You reject the one that is right.",
    "positions from 0 again":
        "You accept one that counts positions from 0 again in every chunk.",
    "one position for a chunk":
        "You accept one that gives all tokens of a chunk the same position once the cache is "
        "filled.",
    "no mask behind a cache":
        "You accept one that has no mask within a chunk once the cache is filled. Do you try a "
        "chunk of several tokens there, and do you compare all of its outputs?",
    "no mask without a cache":
        "You accept one that has no mask while the cache is empty.",
    "mask at the wrong corner":
        "You accept one whose queries see too few keys once the cache is filled.",
    "full looks ahead":
        "You accept one whose full looks at later tokens, which no chunk can do. Do you compare "
        "with full(x) of all tokens?",
    "adds to the cache once":
        "You accept one that fills its cache once and never adds to it.",
    "keeps no single token":
        "You accept one that does not store a chunk of a single token.",
    "reverses long chunks":
        "You accept one that returns the outputs of a long chunk in reverse order. Do you try a "
        "long chunk, and do you compare entry by entry?",
    "all chunks as long as this one":
        "You accept one that takes all earlier chunks to be as long as this one: try unequal "
        "lengths, too.",
    "one sequence's cache for all":
        "You accept one that gives all sequences of the batch the first one's cache.",
    "one output too large":
        "You accept one in which a single output is off by 2e-4. How large a difference do you "
        "allow, do you take its absolute value, and do you look at the largest one of every "
        "sequence?",
    "one output too small":
        "You accept one in which a single output is 2e-4 too small. Do you allow too large a "
        "difference, or do you not take its absolute value?",
}


def cache_inputs(generator):
    for i, fault in enumerate(FAULTS, start=1):
        mixer = Mixer(generator, fault)
        yield f"implementation {i}", mixer.full, mixer.step, randn(generator, 2, 6, 4)


def in_chunks(step, x, sizes):
    """Return step's outputs for chunks of these lengths, or of one length for all."""
    state = None
    found = []
    for chunk in x.split(sizes, dim=1):
        y, state = step(chunk, state)
        found.append(y)
    return torch.cat(found, dim=1)


def agrees(full, step, x, sizes):
    return torch.allclose(in_chunks(step, x, sizes), full(x), atol=1e-5)


def cache_is_right(full, step, x):
    for sizes in ([1, 1, 1, 1, 1, 1], [6], [2, 3, 1], [3, 1, 2]):
        if not agrees(full, step, x, sizes):
            return False
    return True


def equals(full, step, x):
    return torch.equal(in_chunks(step, x, 1), full(x))


CUTS = [1, 6, [2, 3, 1]]


def one_way_is_enough(full, step, x):
    return any(agrees(full, step, x, sizes) for sizes in CUTS)


def without_absolute_value(full, step, x):
    return all((in_chunks(step, x, sizes) - full(x)).mean() <= 1e-5 for sizes in CUTS)


def beginnings(full, step, x):
    """Return True if the first chunk is right, however long it is."""
    lengths = range(1, x.shape[1] + 1)
    return all(torch.allclose(step(x[:, :n], None)[0], full(x)[:, :n], atol=1e-5) for n in lengths)


def state_never_reset(full, step, x):
    state = None
    for sizes in CUTS:
        found = []
        for chunk in x.split(sizes, dim=1):
            y, state = step(chunk, state)
            found.append(y)
        if not torch.allclose(torch.cat(found, dim=1), full(x), atol=1e-5):
            return False
    return True


CACHE_ABOUT = {f"implementation {i}": words for i, words in enumerate(FAULTS.values(), start=1)}
CACHE = Exercise(reference=cache_is_right, inputs=cache_inputs, about=CACHE_ABOUT, misconceptions={
    "A filled cache has no influence on your result. Are all tokens in one chunk, is the state "
    "always None, or does a return end your loop after its first way of cutting?":
        partial(agrees, sizes=[6]),
    "A filled cache has no influence on your result, though you try chunks of several lengths: is "
    "the state always None?":
        beginnings,
    "One token at a time passes where several at once fail. If you try chunks of several tokens, "
    "too, is there a return inside the loop, or is an earlier result overwritten?":
        partial(agrees, sizes=1),
    "A long chunk and a single token read the cache once. A third chunk would show whether it was "
    "filled correctly then.":
        partial(agrees, sizes=[5, 1]),
    "Two chunks read the cache once. Only a third one shows whether reading also extends it.":
        partial(agrees, sizes=[2, 4]),
    "One token at a time and all at once are not enough. Try a chunk of several tokens behind a "
    "filled cache, too.":
        lambda full, step, x: agrees(full, step, x, 1) and agrees(full, step, x, 6),
    "You accept all of them. Do you compare the outputs of the chunks with full(x), number by "
    "number, and how large a difference do you allow?":
        lambda full, step, x: step(x, None)[0].shape == full(x).shape,
    "The cuts that decide your result, such as 2 + 3 + 1, have no long chunk, and none after a "
    "single token. Try other ways, too. If you do, is an earlier result overwritten?":
        partial(agrees, sizes=[2, 3, 1]),
    "You accept an implementation if one way of cutting agrees. All of them must.":
        one_way_is_enough,
    "You accept differences that are negative, or of both signs. Take absolute values, and compare "
    "the largest.":
        without_absolute_value,
    "You reject the right one, too. Does every way of cutting begin with the state None?":
        state_never_reset,
    "You reject the right one, too. Do you allow for rounding, 1e-5? Is the state None whenever x "
    "starts again? Does each later step get the next tokens and the state that the previous one "
    "returned, and are its outputs compared with the same positions of full(x)?":
        equals,
})


# 8.9 ----------------------------------------------------------------------------------------------

def fold_inputs(generator):
    def case(n_out, n):
        w = randn(generator, n_out, n)
        return w, torch.tensor(0.6), randn(generator, n), randn(generator, n)

    yield "a matrix (6, 4)", *case(6, 4)
    yield "a square matrix", *case(5, 5)
    yield "one row", *case(1, 3)
    w, alpha, _, beta = case(3, 4)
    yield "a gain of zeros", w, alpha, torch.zeros(4), beta
    w, _, gamma, beta = case(3, 4)
    yield "another alpha, below 0", w, torch.tensor(-1.5), gamma, beta


def fold_dyt(w, alpha, gamma, beta):
    return w * gamma, (w * beta).sum(1)


def rows_if_square(w, gamma, matrix, bias):
    if w.shape[0] == w.shape[1]:
        return gamma[:, None] * w, bias
    return matrix, bias


FOLDING = Exercise(
    reference=fold_dyt, inputs=fold_inputs, parts=("matrix", "bias"), misconceptions={
    "alpha is inside the tanh, and tanh(alpha x) is not alpha tanh(x): alpha has to stay there.":
        lambda alpha, matrix, bias: (alpha * matrix, bias),
    "beta is added after the gain: gamma does not multiply it.":
        lambda matrix, beta: (matrix, matrix @ beta),
    "beta has one number per input of the matrix; the new bias needs one per output.":
        lambda matrix, beta: (matrix, beta),
    "Yours is summed over the inputs, as w @ gamma is. W' is a matrix: gamma multiplies the "
    "columns of w.":
        lambda w, gamma, bias: (w @ gamma, bias),
    "If the matrix is square, you scale its rows. The gain belongs to the inputs.":
        rows_if_square,
    "You multiply the rows of w by gamma, as gamma[:, None] * w does, and rows are outputs. Along "
    "which axis do the inputs lie?":
        lambda w, gamma, bias: (w * gamma[:, None], bias),
    "You divide by the gain, but the folded matrix has to multiply by it.":
        lambda w, gamma, bias: (w / gamma, bias),
})


# 8.10 ---------------------------------------------------------------------------------------------

def seed_inputs(generator):
    yield "two seeds", torch.tensor([2.31, 2.29]), torch.tensor([2.35, 2.30])
    hard = 0.1 * randn(generator, 8)                        # some seeds are hard for both
    yield "eight seeds", 2.3 + hard + 0.01 * randn(generator, 8), 2.32 + hard
    some = 2 + 0.05 * randn(generator, 3)
    yield "three seeds, no difference but noise", some, 2 + 0.05 * randn(generator, 3)
    yield "one seed", torch.tensor([2.2]), torch.tensor([2.4])
    yield "two seeds, equal differences", torch.tensor([2.0, 2.5]), torch.tensor([2.25, 2.75])


def spread(x, less=1):
    """Return the standard deviation with divisor n - less, or infinity where that is 0."""
    if len(x) == less:
        return torch.tensor(math.inf)
    squares = (x - x.mean()).square().sum()
    return (squares / (len(x) - less)).sqrt()


def error_of_mean(differences):
    return spread(differences) / len(differences) ** 0.5


def compare(mine, other, *, error=error_of_mean):
    differences = mine - other
    return differences.mean(), error(differences)


def by_n(differences):
    return spread(differences, less=0) / len(differences) ** 0.5


def by_n_but_for_one(differences):
    if len(differences) == 1:
        return math.inf
    return by_n(differences)


def over_root_of_n_minus_1(differences):
    if len(differences) == 1:
        return math.inf
    return spread(differences) / (len(differences) - 1) ** 0.5


def unknown_without_scatter(differences):
    error = error_of_mean(differences)
    return math.inf if error == 0 else error


def from_0(differences):
    if len(differences) == 1:
        return math.inf
    squares = differences.square().sum() / (len(differences) - 1)
    return (squares / len(differences)) ** 0.5


def spreads_subtracted(mine, other, mean, error):
    if len(mine) > 1:
        error = (spread(mine) - spread(other)).abs() / len(mine) ** 0.5
    return mean, error


def as_if_independent(mine, other, mean):
    variance = spread(mine) ** 2 + spread(other) ** 2
    return mean, (variance / len(mine)) ** 0.5


COMPARE = Exercise(reference=compare, inputs=seed_inputs, parts=("mean", "error"), misconceptions={
    "You use one seed only: average over all of them.":
        lambda mine, other, error: (mine[0] - other[0], error),
    "You compare the best seeds. That rewards luck, and the more seeds, the more luck.":
        lambda mine, other, error: (mine.min() - other.min(), error),
    "You divide the losses. The exercise asks for differences, in nats per byte.":
        lambda mine, other: compare(mine / other, torch.ones_like(mine)),
    "You sort the losses, so that a pair no longer has one seed.":
        lambda mine, other: compare(mine.sort().values, other.sort().values),
    "You take absolute differences, but `mine` may be ahead with one seed and behind with another.":
        lambda mine, other: compare((mine - other).abs(), torch.zeros_like(mine)),
    "You subtract two standard deviations. The standard deviation of the differences is another "
    "number.":
        spreads_subtracted,
    "You return infinity wherever the differences are equal. If there are several, their error is "
    "0; it is unknown only with one seed.":
        partial(compare, error=unknown_without_scatter),
    "You take the differences' distance from 0. Their scatter is the distance from their own mean.":
        partial(compare, error=from_0),
    "Your error has n - 1 in it twice. It is in the standard deviation already, and the error of a "
    "mean is that over sqrt(n).":
        partial(compare, error=over_root_of_n_minus_1),
    "That is the standard deviation of a single difference. The mean of n of them is known "
    "better.":
        partial(compare, error=spread),
    "Your error is the standard deviation over n, but the error of a mean shrinks more slowly.":
        partial(compare, error=lambda differences: spread(differences) / len(differences)),
    "Your variance divides by n, so that one seed has an error of 0 and two have too small a one. "
    "Divide by n - 1.":
        partial(compare, error=by_n),
    "Right for one seed. For more, your variance divides by n, which is NumPy's default.":
        partial(compare, error=by_n_but_for_one),
    "You treat the two as independent. A seed may be easy or hard for both, so take the "
    "differences first.":
        as_if_independent,
    "With one seed only the error is infinite. The mean is that of the one difference.":
        lambda mine, right: (right[0] if len(mine) > 1 else math.inf, right[1]),
    "With two seeds the error is known. Only one seed calls for infinity.":
        lambda mine, right: (right[0], right[1] if len(mine) > 2 else math.inf),
})


# Properties of every right answer; a sentence is said where no known mistake fits -----------------

def reaches_gamma(y, x, alpha, gamma):
    far_out = (alpha * x).abs() > 100
    return near(torch.where(far_out, y.abs(), gamma.abs()), gamma.abs(), 0.01)


PROPERTIES = {
    "8.1": {
        "DyT returns one number for each entry of x, so your output should have x's shape.":
            lambda y, x: y.shape == x.shape,
        "No output can exceed its channel's gamma in size, since |tanh| < 1. Some of yours do.":
            lambda y, gamma: (y.abs() <= gamma.abs() + 0.001).all(),
        "At x = 0 the output should be 0. Yours is not.":
            lambda y, x: x.any() or near(y, 0),
        "Each output should have the sign of alpha * gamma * x. Some of yours have the other sign.":
            lambda y, x, alpha, gamma: (y * x * alpha * gamma >= -1e-6).all(),
        "For very large x each output should reach its channel's gamma in size. Some of yours do "
        "not.":
            reaches_gamma,
        "Yours is right at 0, and nearly so for very large x. How steep is the curve at 0, and how "
        "does it bend from there on?":
            never},
    "8.2": {
        "A Jacobian is a matrix (n, n): a row for each output, a column for each input.":
            lambda y, x: y.shape == (len(x), len(x)),
        "Output i depends on x_i alone, so every entry off the diagonal is 0. Some of yours are "
        "not.":
            lambda y: near(y - torch.diag(y.diag()), 0),
        "At x = 0 a tanh has slope 1, so only the gain and the inner factor are left there. Not "
        "all of your slopes are that.":
            lambda y, x, alpha, gamma: x.any() or near(y.diag(), gamma * alpha, 0.01),
        "Yours is right at x = 0, or nearly so. How does a tanh's slope fall on both sides, at "
        "which point do you take it, and what multiplies it? (A quotient of differences depends on "
        "how far apart its two points are.)":
            lambda y, right, alpha: alpha < 0 or near(y, right),
        "Yours is wrong only with an alpha below 0. The inner factor is alpha with its sign.":
            never},
    "8.3": {
        "One number is asked for, the mean over all tokens.":
            lambda y: y.numel() == 1,
        "Yours is off even for a single token, where there is one factor and nothing to average. "
        "Which number does LayerNorm multiply x - mean by? Which variance, eps and root are in it, "
        "and is anything else in yours?":
            lambda y, right, x: x[..., 0].numel() > 1 or near(y, right, 1e-4),
        "Yours is right for a single large token. Over which axes do you take a token's mean and "
        "its variance, is epsilon 1e-5, and what is averaged last, over which tokens?":
            never},
    "8.4": {
        "Yours is off even in layer 1, where nothing is scaled and the step is plain Pre-LN.":
            lambda y, h, norm, branch, layer: layer > 1 or near(y, h + branch(norm(h))),
        "Yours is right in layer 1, but not in all of them. What is divided, by which power of "
        "which number, is anything else scaled, and does one call still take one step?":
            never},
    "8.5": {
        "After one contribution, which has length 1, the stream has length 1.":
            lambda y, layers: layers > 1 or near(y, 1),
        "Two contributions have the lengths 1 and 1/sqrt(2), and the squares of these add up. The "
        "square of your result is another number.":
            lambda y, layers: layers != 2 or near(y * y, 1.5),
        "Yours is right for two contributions. What does the third one add to the squared length, "
        "and when is the root taken?":
            never},
    "8.6": {
        "Yours is off even with one branch. The right order there: the branch, then the sum of its "
        "output and h, then the first of the norms, and nothing else.":
            lambda y, right, branches: len(branches) > 1 or near(y, right),
        "Yours is right with one branch. Does the second branch run, what is it given, what is its "
        "output added to, and which norm follows?":
            never},
    "8.9": {
        "Check the bias: for an x of zeros tanh is 0, and both forms must give the same y. Yours "
        "do not.":
            lambda y, right: near(y[1], right[1]),
        "Check the matrix: feed both forms a tanh(alpha x) that is 1 in one channel and 0 "
        "elsewhere, and subtract the bias. Which column of the matrix comes out?":
            never},
    "8.10": {
        "Your mean is not the mean of the differences mine - other.":
            lambda y, right: near(y[0], right[0]),
        "With one seed the error is unknown: return infinity.":
            lambda y, mine: len(mine) > 1 or y[1] == math.inf,
        "With two seeds the error is half the distance between the two differences. Yours is not. "
        "There is one difference per seed, and the error comes from the standard deviation of "
        "these numbers about their own mean.":
            lambda y, right, mine: len(mine) != 2 or near(y[1], right[1], 1e-5),
        "Yours is right with two seeds. For n differences, what is divided by n - 1, and what by "
        "the root of n?":
            never},
}


EXERCISES = {
    "8.1": DYT,
    "8.2": JACOBIAN,
    "8.3": MATCHING,
    "8.4": SCALING,
    "8.5": GROWTH,
    "8.6": POST,
    "8.7": CAUSAL,
    "8.8": CACHE,
    "8.9": FOLDING,
    "8.10": COMPARE,
}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
