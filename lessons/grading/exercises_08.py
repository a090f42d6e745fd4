"""
Lesson 8, write the seventh: Dynamic Tanh, LayerNorm scaling, Post-LN, and what a norm of one's own
has to pass.

Sources: anGPT sections 3.2 and Appendix A, NormFormer section 1. See grader.py for the form. The
references use elementary operations only and nothing of model.py.
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


DYT = Exercise(reference=dyt, inputs=dyt_inputs, misconceptions={
    "Your outputs never leave (-1, 1): the gain has no way to make a channel larger "
    "where it stands.":
        lambda x, alpha, gamma: torch.tanh(gamma * alpha * x),
    "alpha should decide where the curve bends. Where yours stands, it only makes the "
    "result larger.":
        lambda x, alpha, gamma: alpha * gamma * tanh(x),
    "alpha and gamma have changed places.":
        lambda x, alpha, gamma: alpha * torch.tanh(gamma * x),
    "gamma is a gain: it does not shift the curve.":
        lambda x, alpha, gamma: torch.tanh(alpha * x) + gamma,
    "You subtract a mean, which is a statistic over the channels: DyT has none.":
        lambda x, alpha, gamma: dyt(x - x.mean(-1, keepdim=True), alpha, gamma),
    "You normalize first. tanh is there so that nothing has to be averaged.":
        lambda x, alpha, gamma: dyt(rms(x), alpha, gamma),
    "Another S: Dynamic Tanh has the hyperbolic tangent in it.":
        lambda x, alpha, gamma: gamma * torch.nn.functional.softsign(alpha * x),
})


# 8.2 ----------------------------------------------------------------------------------------------

def jacobian_inputs(generator):
    yield "five channels", randn(generator, 5), torch.tensor(0.7), randn(generator, 5)
    yield "alpha 1, gamma 1", randn(generator, 4), torch.tensor(1.0), torch.ones(4)
    yield "far out on the curve", 3 * randn(generator, 6), torch.tensor(2.0), randn(generator, 6)
    yield "zeros", torch.zeros(3), torch.tensor(0.5), randn(generator, 3)
    yield "a very steep curve", 1e-7 * randn(generator, 4), torch.tensor(1e7), randn(generator, 4)


def slope(x, alpha, gamma):
    return gamma * alpha / torch.cosh(alpha * x) ** 2


def dyt_jacobian(x, alpha, gamma):
    return torch.eye(len(x)) * slope(x, alpha, gamma)


def by_output(x, alpha, gamma):
    y = gamma * torch.tanh(alpha * x)
    return torch.diag(gamma * alpha * (1 - y ** 2))


JACOBIAN = Exercise(
    reference=dyt_jacobian, inputs=jacobian_inputs, without=AUTOGRAD, misconceptions={
    "You have LayerNorm's projection in it: there, each channel acts on all through the mean. "
    "Which channels of x does output i of DyT look at?":
        lambda right: right - right.mean(-1, keepdim=True),
    "These are the numbers, but a Jacobian is a matrix (n, n).":
        slope,
    "The chain rule's inner factor is missing: x is multiplied by something before the tanh.":
        lambda x, alpha, gamma: torch.diag(gamma / torch.cosh(alpha * x) ** 2),
    "The derivative of tanh is not that: at x = 0 and far to the left it gives 1 and 2.":
        lambda x, alpha, gamma: torch.diag(gamma * alpha * (1 - torch.tanh(alpha * x))),
    "You wrote the slope by the output y, which has gamma in it. Use tanh(alpha x) alone there.":
        by_output,
    "You take the slope at x. The tanh is evaluated elsewhere.":
        lambda x, alpha, gamma: torch.diag(gamma * alpha / torch.cosh(x) ** 2),
    "Yours is 0 at x = 0, where DyT is steepest, and grows to both sides.":
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
    """less: the variance divides by n - less; power: a token's slope is deviation ** power."""
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
    "Upside down: the larger the inputs, the flatter LayerNorm's line.":
        partial(matching_alpha, power=1),
    "The mean of the slopes is asked for. You have the slope of the mean deviation, "
    "which is smaller.":
        partial(matching_alpha, mean=of_mean_deviation),
    "You average the variances and take one slope of that. Each token has its slope first; then "
    "they are averaged.":
        partial(matching_alpha, mean=of_mean_variance),
    "That is RMSNorm's slope. LayerNorm measures the spread around the token's mean.":
        partial(matching_alpha, centered=False),
    "Your variance divides by n - 1, as torch's std does by itself; LayerNorm divides by n.":
        partial(matching_alpha, less=1),
    "Right for inputs of usual size. For the small ones of fresh embeddings epsilon counts.":
        partial(matching_alpha, eps=0),
    "Your epsilon is 1e-6, where 1e-5 was asked for.":
        partial(matching_alpha, eps=1e-6),
    "Epsilon is added to the variance, before the root is taken.":
        partial(matching_alpha, eps=0, eps_behind_root=1e-5),
})


# 8.4 ----------------------------------------------------------------------------------------------

def silu_branch(generator, d):
    """A branch that is not linear, as a block's are not."""
    up = randn(generator, d, 2 * d) / d ** 0.5
    down = randn(generator, 2 * d, d)

    def branch(x):
        return silu(x @ up) @ down
    return branch


def scaling_inputs(generator):
    yield "layer 3", randn(generator, 2, 3, 4), rms, silu_branch(generator, 4), 3
    yield "the first layer", randn(generator, 2, 3, 4), rms, silu_branch(generator, 4), 1
    yield "layer 24", 5 * randn(generator, 2, 3, 8), rms, silu_branch(generator, 8), 24
    gain = randn(generator, 4)

    def norm(x):
        return gain * rms(x)
    yield "a norm with a gain", randn(generator, 3, 4), norm, silu_branch(generator, 4), 2


def scaled_step(h, norm, branch, layer):
    return h + branch(norm(h) / math.sqrt(layer))


SCALING = Exercise(reference=scaled_step, inputs=scaling_inputs, misconceptions={
    "You shrink the residual stream itself: what early layers wrote would be gone "
    "after a few blocks.":
        lambda h, norm, branch, layer: h / math.sqrt(layer) + branch(norm(h)),
    "You shrink what the branch gives. The paper shrinks what it gets, and a branch "
    "is not linear.":
        lambda h, norm, branch, layer: h + branch(norm(h)) / math.sqrt(layer),
    "A norm undoes every factor in front of it (but for epsilon): yours changes nothing.":
        lambda h, norm, branch, layer: h + branch(norm(h / math.sqrt(layer))),
    "Too strong from layer 2 on: have another look at the power of the layer's number.":
        lambda h, norm, branch, layer: h + branch(norm(h) / layer),
    "In Python a power comes before a division: ** 1/2 is ** 1, and then half of that. "
    "Brackets help.":
        lambda h, norm, branch, layer: h + branch(norm(h) / layer ** 1 / 2),
    "Layers count from 1 here; the first one is left as it is.":
        lambda h, norm, branch, layer: scaled_step(h, norm, branch, layer + 1),
    "The residual takes h itself, whatever the branch is given.":
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
    """1 + 1 / 2 ** power + ... + 1 / layers ** power"""
    return sum(layer ** -power for layer in range(1, layers + 1))


def stream_after(layers):
    return math.sqrt(harmonic(layers))


GROWTH = Exercise(reference=stream_after, inputs=depth_inputs, tolerance=1e-4, misconceptions={
    "That is section 3.2's stream, without the factors: every contribution has norm 1 there.":
        lambda layers: math.sqrt(layers),
    "You add the norms, as if all contributions pointed the same way. What adds up for "
    "independent vectors?":
        lambda layers: harmonic(layers, 0.5),
    "There is a root at the end, but what you add under it are the lengths themselves, "
    "not yet squared.":
        lambda layers: math.sqrt(harmonic(layers, 0.5)),
    "You squared the factors once too often.":
        lambda layers: math.sqrt(harmonic(layers, 2)),
    "Close for very many layers only; with one layer it is 0.":
        lambda layers: math.sqrt(math.log(layers)),
    "A good formula for many layers, where it belongs; for few it is off. Add up the "
    "terms themselves.":
        lambda layers: math.sqrt(math.log(layers) + 0.5772156649),
    "The last layer is missing, as range leaves out its end.":
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
    """A model of steps (h, branch, norm) -> h; the last norm is left over."""
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


POST = Exercise(reference=post_ln, inputs=post_inputs, misconceptions={
    "Your blocks are right. But the last of them ends in a norm already: what is the "
    "extra one for?":
        lambda right, norms: norms[-1](right),
    "That is a Pre-LN model.":
        lambda h, branches, norms: norms[-1](pre_ln(h, branches, norms)),
    "That is a Pre-LN model, and one without its norm at the end.":
        pre_ln,
    "You norm what the branch gives, and the stream grows on. In Post-LN the sum goes "
    "through the norm.":
        chain(lambda h, branch, norm: h + norm(branch(h))),
    "You norm before the branch and give the residual the normed h, too. The norm comes "
    "after the sum.":
        chain(lambda h, branch, norm: norm(h) + branch(norm(h))),
    "Your norms are shifted by one: the first branch's sum goes through the first norm.":
        lambda h, branches, norms: post_ln(h, branches, norms[1:]),
    "Before the first branch nothing was added: h goes in as it is. Which norm is "
    "left over then?":
        lambda h, branches, norms: post_ln(norms[0](h), branches, norms[1:]),
    "The residual is missing: norm the sum of the branch and what went into it.":
        chain(lambda h, branch, norm: norm(branch(h))),
    "One norm at the end is not enough: there is one after every branch.":
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
    """The next token in each token's place."""
    return torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), dim=1)


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


# What is to be judged, and what is said to a wrong answer about it.
MIXERS = [
    ("RMSNorm, token by token", rms,
     "You reject RMSNorm, which looks at one token at a time."),
    ("a mean over the tokens so far", mean_so_far,
     "You reject a mean over the tokens so far. Looking back is allowed."),
    ("the mean square of the whole batch", by_batch,
     "A norm with the whole batch's mean square gets through."),
    ("the same, detached as in PowerNorm", by_batch_detached,
     "Statistics of the whole batch, detached as in PowerNorm, get through: gradients do not see "
     "them. Change the numbers themselves."),
    ("the mean square of each sequence", by_sequence,
     "A norm over all tokens of a sequence, later ones too, gets through."),
    ("a glimpse of the next token's direction", lambda x: x + 0.1 * ahead(rms(x)),
     "A glimpse of just the next token gets through, one that sees its direction and "
     "not its length."),
    ("a glimpse, in the last sequence alone", glimpse_in(-1, 0),
     "A glimpse of the next token gets through where it happens in the last sequence alone."),
    ("a glimpse of the last channel, in the first sequence alone", glimpse_in(0, -1),
     "A glimpse of the next token's last channel gets through where it happens in the first "
     "sequence alone."),
    ("a faint glimpse, in the first sequence alone", glimpse_in(0, 0, size=0.001),
     "A glimpse of a thousandth of the next token gets through where it happens in the first "
     "sequence alone."),
    ("a mean over the sequences, place by place", lambda x: x - x.mean(0),
     "A mean over the batch's sequences, place by place, gets through: look at the other "
     "sequences, too."),
    ("the neighbour's first token", lambda x: x + 0.1 * x.roll(1, 0)[:, :1],
     "What takes something from another sequence's first token gets through."),
    ("the neighbour's last token", lambda x: x + 0.1 * x.roll(1, 0)[:, -1:],
     "What takes something from another sequence's last token gets through."),
    ("a division by the number of tokens", lambda x: x / x.shape[1],
     "You reject a division by T, which depends on no token's content."),
    ("a division and a multiplication by the same number", there_and_back,
     "You reject what divides by a number and multiplies by it again: only its rounding changes."),
]


def mixer_inputs(generator):
    for label, mixer, _ in MIXERS:
        yield label, mixer, randn(generator, 3, 5, 4)


def moved(f, x, b, t):
    """(B, T), True or False: where f changes when token t of sequence b does, or of a slice of them."""
    other = x.clone()
    other[b, t] += 1
    return (f(other) - f(x)).abs().amax(-1) > 1e-6


def is_causal(f, x):
    B, T, _ = x.shape
    for b in range(B):
        for t in range(T):
            changed = moved(f, x, b, t)
            changed[b, t:] = False                          # these may
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


def return_in_loop(f, x):
    changed = moved(f, x, 0, 0)
    return not changed[1:].any()


def cutting(f, x):
    for t in range(1, x.shape[1]):
        if not torch.allclose(f(x[:, :t]), f(x)[:, :t], atol=1e-6):
            return False
    return True


CAUSAL_ABOUT = {label: sentence for label, _, sentence in MIXERS}
CAUSAL = Exercise(reference=is_causal, inputs=mixer_inputs, about=CAUSAL_ABOUT, misconceptions={
    "You find nothing wrong with any of them: something has to be changed, and its "
    "effect looked for.":
        lambda f, x: f(x).shape == x.shape,
    "You change all sequences at once and look at earlier places: what leaks from one sequence to "
    "another at the same or a later place stays unseen.":
        lambda f, x: changing_all_sequences(f, x, lambda changed, t: changed[:, :t]),
    "You count the token's own place as a leak; its output has to change.":
        lambda f, x: changing_all_sequences(f, x, lambda changed, t: changed[:, :t + 1]),
    "You change the last token and look at the first place. Who peeks one token "
    "ahead gets through.":
        last_token_to_first_place,
    "You judge by a sequence's first token alone. Does a return stand inside your loop?":
        return_in_loop,
    "Cutting tokens off is not changing them: you reject what only counts tokens, and other "
    "sequences go unseen.":
        cutting,
    "You reject all of them. The output of the token that changed may move, and later ones, too.":
        lambda: False,
})


# 8.8 ----------------------------------------------------------------------------------------------

def attend(x, keys, hidden):
    scores = (x @ keys.mT).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ keys


class Mixer:
    """A causal mean with weights, in one go (full) or piece by piece (step, which may be broken)."""

    def __init__(self, generator, fault):
        self.places = randn(generator, 16, 4)
        self.fault = fault

    def full(self, x):
        n = x.shape[1]
        x = x + self.places[:n]
        later = torch.ones(n, n).triu(1) > 0
        return attend(x, x, later)

    def step(self, x, state):
        """x (B, n, 4), what the step before gave or None -> (B, n, 4), state."""
        if state is None:
            state = x[:, :0], 0, 0
        cache, start, pieces = state                        # so many tokens and pieces came before
        n = x.shape[1]
        x = x + self.places[self.places_of(n, start, pieces)]
        old = self.read(cache)
        seen = torch.cat((old, x), dim=1)
        y = attend(x, seen, self.hidden(n, old.shape[1]))
        if self.fault == "turns long pieces round" and n > 3:
            y = y.flip(1)
        return y, (self.kept(cache, seen, n), start + n, pieces + 1)

    def places_of(self, n, start, pieces):
        if self.fault == "places from 0 again":
            return torch.arange(n)
        if self.fault == "all pieces as long as this one":
            return torch.arange(n) + pieces * n
        if self.fault == "one place for a piece" and start > 0:
            return torch.full((n,), start)
        return torch.arange(n) + start

    def read(self, cache):
        if self.fault == "forgets all pieces before":
            return cache[:, :0]
        if self.fault == "one sequence's cache for all":
            return cache[:1].expand_as(cache)
        return cache

    def hidden(self, n, before):
        """(n, before + n): which keys come after a query."""
        query = torch.arange(n)[:, None]
        key = torch.arange(before + n)
        none = torch.zeros(n, before + n, dtype=torch.bool)
        if self.fault == "no mask behind a cache" and before > 0:
            return none
        if self.fault == "no mask without a cache" and before == 0:
            return none
        if self.fault == "mask at the wrong corner":
            return key > query
        return key > query + before

    def kept(self, cache, seen, n):
        if self.fault == "adds to the cache once" and cache.shape[1] > 0:
            return cache
        if self.fault == "keeps no single token" and n == 1:
            return cache
        if self.fault == "keeps half precision":
            return seen.half().type_as(seen)
        return seen


# What is wrong with a cache, and what is said to a wrong answer about it.
FAULTS = {
    None:
        "You reject the one that is right.",
    "places from 0 again":
        "One that counts every piece's places from 0 again gets through.",
    "one place for a piece":
        "One that gives all tokens of a piece behind a filled cache the same place gets through.",
    "no mask behind a cache":
        "One that has no mask within a piece behind a filled cache gets through. Is there such a "
        "piece among yours, and do you compare all of its outputs?",
    "no mask without a cache":
        "One that has no mask as long as the cache is empty gets through.",
    "mask at the wrong corner":
        "One whose queries see too few keys once the cache is filled gets through.",
    "forgets all pieces before":
        "One that forgets all pieces before gets through.",
    "adds to the cache once":
        "One that fills its cache once and never adds to it gets through.",
    "keeps no single token":
        "One that does not keep what comes as a single token gets through.",
    "turns long pieces round":
        "One that gives the outputs of a long piece in reverse order gets through. Is there a long "
        "piece among yours, and do you compare entry by entry?",
    "all pieces as long as this one":
        "One that takes all pieces before to be as long as this one gets through: cut into "
        "unequal pieces, too.",
    "one sequence's cache for all":
        "One that gives all sequences of the batch the first one's cache gets through.",
    "keeps half precision":
        "One that keeps its cache in half precision gets through: how much "
        "difference do you allow?",
}


def cache_inputs(generator):
    for i, fault in enumerate(FAULTS, start=1):
        mixer = Mixer(generator, fault)
        yield f"implementation {i}", mixer.full, mixer.step, randn(generator, 2, 6, 4)


def in_pieces(step, x, sizes):
    """sizes: the lengths of the pieces, or the one that all have."""
    state = None
    found = []
    for piece in x.split(sizes, dim=1):
        y, state = step(piece, state)
        found.append(y)
    return torch.cat(found, dim=1)


def agrees(full, step, x, sizes):
    return torch.allclose(in_pieces(step, x, sizes), full(x), atol=1e-5)


def cache_is_right(full, step, x):
    for sizes in ([1, 1, 1, 1, 1, 1], [6], [2, 3, 1], [3, 1, 2]):
        if not agrees(full, step, x, sizes):
            return False
    return True


def without_state(full, step, x):
    def forgetful(piece, state):
        y, _ = step(piece, None)
        return y, None
    return agrees(full, forgetful, x, 1) and agrees(full, forgetful, x[:, :3], 3)


CACHE_ABOUT = {f"implementation {i}": words for i, words in enumerate(FAULTS.values(), start=1)}
CACHE = Exercise(reference=cache_is_right, inputs=cache_inputs, about=CACHE_ABOUT, misconceptions={
    "All tokens in one piece never read the cache.":
        partial(agrees, sizes=[6]),
    "One token at a time passes where several at once fail: a prompt that goes on "
    "comes in pieces.":
        partial(agrees, sizes=1),
    "A prompt and one token: the cache is read once. Whether it was filled right then, the "
    "third piece shows.":
        partial(agrees, sizes=[5, 1]),
    "Two pieces read the cache once. Whether reading also extends it, only a third one shows.":
        partial(agrees, sizes=[2, 4]),
    "One token at a time and all at once: between them lies a piece of several tokens behind "
    "a filled cache.":
        lambda full, step, x: agrees(full, step, x, 1) and agrees(full, step, x, 6),
    "You find nothing wrong with any of them. Compare numbers, and let every way of "
    "cutting count.":
        lambda full, step, x: step(x, None)[0].shape == full(x).shape,
    "One way of cutting, such as 2 + 3 + 1, reads no single token again, and has no long piece. "
    "Try several ways.":
        partial(agrees, sizes=[2, 3, 1]),
    "You reject the right one, too. Each step has to get the state that the one before gave, the "
    "first piece None; and its outputs are those of its own places in full(x).":
        without_state,
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


def fold_dyt(w, alpha, gamma, beta):
    return w * gamma, (w * beta).sum(1)


def rows_if_square(w, gamma, matrix, bias):
    if w.shape[0] == w.shape[1]:
        return gamma[:, None] * w, bias
    return matrix, bias


FOLDING = Exercise(
    reference=fold_dyt, inputs=fold_inputs, parts=("matrix", "bias"), misconceptions={
    "alpha stands inside the tanh: tanh(alpha x) is not alpha tanh(x). It has to "
    "stay where it is.":
        lambda alpha, matrix, bias: (alpha * matrix, bias),
    "beta is added behind the gain: gamma does not multiply it.":
        lambda matrix, beta: (matrix, matrix @ beta),
    "beta has the matrix's inputs; a bias has its outputs.":
        lambda matrix, beta: (matrix, beta),
    "For a square matrix you scale the rows. The gain belongs to the inputs.":
        rows_if_square,
    "gamma[:, None] gives each row of w a number, and rows are outputs. Along which axis do "
    "the inputs lie?":
        lambda w, gamma, bias: (w * gamma[:, None], bias),
    "You divide by the gain; the folded matrix has to do its work.":
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


def spread(x, less=1):
    """Standard deviation, with n - less; where that is 0 it is not known."""
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


def spreads_subtracted(mine, other, mean, error):
    if len(mine) > 1:
        error = (spread(mine) - spread(other)).abs() / len(mine) ** 0.5
    return mean, error


def as_if_independent(mine, other, mean):
    variance = spread(mine) ** 2 + spread(other) ** 2
    return mean, (variance / len(mine)) ** 0.5


COMPARE = Exercise(reference=compare, inputs=seed_inputs, parts=("mean", "error"), misconceptions={
    "One seed decides nothing: average over all.":
        lambda mine, other, error: (mine[0] - other[0], error),
    "The best seed of each: that rewards luck, and more of it with more seeds.":
        lambda mine, other, error: (mine.min() - other.min(), error),
    "A ratio was not asked for: subtract, in nats per byte.":
        lambda mine, other: compare(mine / other, torch.ones_like(mine)),
    "You sort the losses, and pairs with one seed are torn apart.":
        lambda mine, other: compare(mine.sort().values, other.sort().values),
    "You take the differences' sizes. Mine may be ahead with one seed and behind with another.":
        lambda mine, other: compare((mine - other).abs(), torch.zeros_like(mine)),
    "A difference of two spreads is not the spread of the differences.":
        spreads_subtracted,
    "That is the spread of one seed's difference. The mean of n of them is known better.":
        partial(compare, error=spread),
    "You divide by n; the error of a mean shrinks more slowly.":
        partial(compare, error=lambda differences: spread(differences) / len(differences)),
    "With n in the variance, one seed has an error of 0, and two too small a one: n - 1.":
        partial(compare, error=by_n),
    "Right for one seed. For more, your variance divides by n, as NumPy's std does by itself.":
        partial(compare, error=by_n_but_for_one),
    "You treat the two as independent. Both had the same seeds, easy or hard for both: "
    "differences first.":
        as_if_independent,
})


# What holds of every right answer: said where none of the known mistakes fits ---------------------


PROPERTIES = {
    "8.1": {
        "DyT gives one number for each that it gets.":
            lambda y, x: y.shape == x.shape,
        "No output is larger than the channel's gamma, as no tanh is above 1. Some of yours are.":
            lambda y, gamma: (y.abs() <= gamma.abs() + 0.001).all(),
        "At x = 0 the output is 0. Yours is not.":
            lambda y, x: x.any() or near(y, 0),
        "The output has the sign of x, turned by a negative alpha or gamma. Yours has not.":
            lambda y, x, alpha, gamma: (y * x * alpha * gamma >= -1e-6).all(),
        "Far out the curve is flat, at the channel's gamma. Yours is not.":
            lambda y, x, gamma: x.abs().max() < 100 or near(y.abs().amax(0), gamma.abs(), 0.01),
        "Far out and at 0 yours is right. How steep is the curve at 0?":
            never},
    "8.2": {
        "Output i looks at x_i alone, so all off the diagonal is 0. In yours it is not.":
            lambda y: near(y - torch.diag(y.diag()), 0),
        "At x = 0 a tanh has slope 1, and only gain and inner factor are left. Yours has "
        "another slope there.":
            lambda y, x, alpha, gamma: x.any() or near(y.diag(), gamma * alpha),
        "At x = 0 yours is right. How does tanh's slope fall away from there?":
            never},
    "8.3": {
        "One number is asked for, the mean over all tokens.":
            lambda y: y.numel() == 1,
        "Even with one token, where nothing is averaged, yours is not its slope: look at its "
        "variance, eps and root.":
            lambda y, right, x: x[..., 0].numel() > 1 or near(y, right),
        "With one token yours is right. Over which axis is a token's variance, and what is "
        "averaged last?":
            never},
    "8.4": {
        "Even in layer 1, where nothing is scaled, yours is off: that is a plain Pre-LN step.":
            lambda y, h, norm, branch, layer: layer > 1 or near(y, h + branch(norm(h))),
        "In layer 1 yours is right. In the others: which one thing is divided, and by which power "
        "of the layer's number?":
            never},
    "8.5": {
        "After one contribution, of length 1, the stream has length 1.":
            lambda y, layers: layers > 1 or near(y, 1),
        "With two, the squares of their lengths, 1 and 1/sqrt(2), add up. The square of yours is "
        "something else.":
            lambda y, layers: layers != 2 or near(y * y, 1.5),
        "With two contributions yours is right. And the third?":
            never},
    "8.6": {
        "Even with one branch yours is off: the branch, the sum, the first of the norms, "
        "and nothing else.":
            lambda y, right, branches: len(branches) > 1 or near(y, right),
        "With one branch yours is right. Which norm does the second one have, and "
        "what is it given?":
            never},
    "8.9": {
        "The bias: put in an x of zeros, where tanh gives 0. The two ways do not give the same.":
            lambda y, right: near(y[1], right[1]),
        "The matrix: of a tanh(alpha x) with a single 1, the two ways do not give the same. Which "
        "column answers?":
            never},
    "8.10": {
        "The mean of the differences, mine - other, is another.":
            lambda y, right: near(y[0], right[0]),
        "With one seed the error is unknown: infinity.":
            lambda y, mine: len(mine) > 1 or y[1] == math.inf,
        "With two seeds the error is half of what the two differences are apart. Yours is not.":
            lambda y, right, mine: len(mine) != 2 or near(y[1], right[1], 1e-5),
        "With two seeds yours is right. Of n differences, what is divided by n - 1, and what by "
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
