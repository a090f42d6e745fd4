"""
Lesson 2, PowerNorm: its statistics, who sees the future, its backward pass and how it runs away.

x is (B, T, d): B sequences, T tokens, d channels. A statistic of PowerNorm has d numbers, one per
channel. grader.py describes the form of this file. A keyword argument of a reference is something
that can go wrong in it: functools.partial turns it into a wrong answer. The references use nothing
of model.py; the notebook compares the two.
"""
import math
from functools import partial

import torch

from answers import near
from grader import AUTOGRAD, Exercise
from pieces import never, randn

ALL = (0, 1)                                            # the axes of the sequences and of time

# NormFormer's Table 8: (row, what the model has, steps that it survived)
TABLE_8 = (
    (14, "baseline (Pre-LN)", 94),
    (22, "norm in the MLP, LayerNorm", 128),
    (23, "norm in the MLP, PowerNorm", 135),
    (31, "NormFormer, LayerNorm", 200),
    (0, "NormFormer, PowerNorm", 15))


def tokens(generator, *shape):
    """Random (B, T, d) with a mean that is not 0 and channels of different sizes."""
    x = randn(generator, *shape) + 0.5
    return x * torch.linspace(0.5, 3, shape[-1])


def over_tokens(x):
    return x.mean(ALL)


def psi_of(square, eps, eps_at="inside", root=torch.sqrt):
    """Return the root of `square`. eps is added "inside" the root, "behind" it, or "nowhere"."""
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
    "That is RMSNorm's statistic, one number per token. PowerNorm has one per channel.":
        lambda x: (x * x).mean(-1),
    "That is the variance, from which a mean is subtracted. PowerNorm subtracts none.":
        lambda x: x.var(ALL, correction=0),
    "That is the mean of the absolute values. The task asks for the mean of the squares.":
        lambda x: x.abs().mean(ALL),
    "You square the mean. Take the mean of the squares instead.":
        lambda x: x.mean(ALL) ** 2,
    "That is torch's variance: it subtracts the mean, and divides by one less than the count.":
        lambda x: x.var(ALL),
    "You divide by one less than the number of tokens. A mean divides by the number itself.":
        lambda x: (x * x).sum(ALL) / (x[..., 0].numel() - 1),
    "That is the sum over all tokens. Divide it by the number of tokens.":
        lambda x: (x * x).sum(ALL),
})


# 2.2 ----------------------------------------------------------------------------------------------

def forward_inputs(generator):
    x = tokens(generator, 2, 3, 4)
    weight = torch.rand(4, generator=generator) + 0.5
    yield "2 x 3 tokens, 4 channels", x, torch.rand(4, generator=generator) + 0.2, weight, 1e-5
    yield "tokens unlike those before", 10 * x, torch.rand(4, generator=generator), weight, 1e-5
    yield "tiny psi2, where eps counts", x, torch.tensor([0.0, 1e-4, 1e-3, 1e-2]), weight, 1e-2
    yield "one token, eps of 0.1", x[:1, :1], moment(x), weight, 0.1
    yield "gains below 0", x, torch.rand(4, generator=generator) + 0.2, -weight, 1e-5


def forward(x, psi2, weight, eps, *, centered=False, own=None, root=torch.sqrt, eps_at="inside"):
    """Return the right answer, or a wrong one.

    own(x) is a statistic of this batch, used as psi2.
    """
    if centered:
        x = x - x.mean(ALL)
    if own:
        psi2 = own(x)
    return weight * x / psi_of(psi2, eps, eps_at, root)


def of_each_token(x):
    return x.square().mean(-1, keepdim=True)


FORWARD = Exercise(reference=forward, inputs=forward_inputs, misconceptions={
    "A mean over the batch is subtracted. BatchNorm does that, and the essay's Figure 9; "
    "PowerNorm leaves the mean alone.":
        partial(forward, centered=True),
    "You divide by a statistic of this batch. The running one is given: psi2.":
        partial(forward, own=moment),
    "In effect you divide by psi2 + eps itself. It is its root that has the size of x: is the root "
    "missing, or undone?":
        partial(forward, root=lambda square: square),
    "Add eps under the root, not after it.":
        partial(forward, eps_at="behind"),
    "Your eps is added to the quotient (/ is computed before +). It belongs under the root, to "
    "psi2.":
        lambda x, psi2, weight, eps: weight * x / psi2.sqrt() + eps,
    "eps is missing: a channel that was always 0 gives a division by 0.":
        partial(forward, eps_at="nowhere"),
    "That is RMSNorm: it divides each token by a number of its own. Here each channel has one.":
        partial(forward, own=of_each_token),
    "You divide all channels by one number. psi2 has one for each channel: do not average them.":
        lambda x, psi2, weight, eps: weight * x / (psi2.mean() + eps).sqrt(),
    "The gain multiplies; you divide by it.":
        lambda x, psi2, weight, eps: x / (weight * (psi2 + eps).sqrt()),
    "You multiply by psi (as a division by rsqrt does). A large channel should become smaller.":
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
    """Return what each step uses, (steps, d), and the start's share in what the last one leaves."""
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
    "Your row t is what the update of step t leaves, so that step t would use its own tokens, too. "
    "It should use what the earlier steps have left.":
        partial(running, update_first=True),
    "The two weights are exchanged: decay multiplies the old value (lerp's weight, the new one).":
        partial(running, exchanged=True),
    "That is the plain mean of all steps so far. In a running mean the older steps fade.":
        plain_mean,
    "All your rows are the last psi2. Do you append one tensor that each update changes in place "
    "(*=, +=, lerp_), or return the last one, repeated?":
        one_tensor,
    "You average the roots. Average the squares.":
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
        (False, 0, 0),
        (True, 1, 1),
        (True, 3, 5))
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
    "Your warm-up is one step too long: `step` is 0 in the first step.":
        own_when(lambda training, step, warmup: training and step <= warmup),
    "You have it the wrong way round: it is at the beginning that psi2 cannot be trusted.":
        own_when(lambda training, step, warmup: training and step >= warmup),
    "The warm-up is one of training, and yours takes place in evaluation. Is there a `not` too "
    "many?":
        own_when(lambda training, step, warmup: not training and step < warmup),
    "You always return the other one of the two: in the warm-up psi2 cannot be trusted yet. Is the "
    "condition turned round, or are the answers?":
        own_when(lambda training, step, warmup: not (training and step < warmup)),
    "For you one of the two conditions is enough (as with `or`). The batch counts only where both "
    "hold.":
        own_when(lambda training, step, warmup: training or step < warmup),
    "Yours is right in the warm-up and in evaluation. After the warm-up you update psi2 before you "
    "use it, so you still look at the batch.":
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


def by_past_masked(x):
    """The same as by_past, but the mean is a product with a triangular matrix."""
    length = x.shape[1]
    shares = torch.ones(length, length, dtype=x.dtype).tril()
    shares = shares / shares.sum(1, keepdim=True)
    so_far = shares @ x.square().mean(0)
    return x / so_far.sqrt()


def layer_norm(x):
    return torch.layer_norm(x, x.shape[-1:])


def next_added(x):
    nothing = torch.zeros_like(x[:, :1])
    following = torch.cat((x[:, 1:], nothing), dim=1)
    return x + following


def by_one_entry(x):
    """A number of each token is added to one of the next, each time of another channel and
    sequence."""
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
    yield "the mean square so far, by a product with a mask", by_past_masked, x


REACH_ABOUT = {
    "RMSNorm":
        "RMSNorm looks at each token by itself. Do you change every token, one at a time, so that "
        "the ratios of its channels change, and compare all outputs with norm(x), each by its "
        "absolute difference and to many digits?",
    "the batch's own mean square":
        "The batch's mean square: every token contributes to it, and so reaches all outputs, "
        "earlier ones, too. Can you see it, or is your change too small for your tolerance, or do "
        "you add up differences that cancel?",
    "the same, detached":
        "`detach` changes gradients only. The outputs are the same as without it, and your answer "
        "should be, too.",
    "a fixed psi":
        "A fixed psi: no token contributes to the number that another one is divided by.",
    "the mean square of all tokens so far":
        "The mean square so far: which outputs come at or after a token's position?",
    "LayerNorm":
        "LayerNorm looks at each token by itself, and subtracts its mean. Is anything left of your "
        "change after that, and do you compare absolute values?",
    "the next token added":
        "The next token added: the output at s contains the token at s + 1.",
    "one entry of the token before added":
        "One entry of the token before: do you change all channels in all sequences, and do you "
        "compare all of them, in absolute value?",
    "the mean square so far, by a product with a mask":
        "The mean square so far, as a product with a matrix that has zeros for later tokens: which "
        "outputs come at or after a token's position? Do not change a token to NaN or infinity, "
        "because 0 times these is NaN.",
}


def another(token):
    return token + torch.linspace(1, 2, token.shape[-1])


def reach(norm, x, *, change=another, sequences=slice(None), and_later=False, and_earlier=False,
          over=torch.amax, looked_at=slice(None), with_x=False):
    """Return (T, T): does the output at s (the row) change with the token at t (the column)?"""
    y = norm(x)
    if with_x:
        y = x
    columns = []
    for t in range(x.shape[1]):
        changed = slice(t, t + 1)
        if and_later:
            changed = slice(t, None)
        if and_earlier:
            changed = slice(0, t + 1)
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


def some_number_stays(norm, x):
    return ~reach(norm, x, over=torch.amin)


def derivative(norm, x):
    jacobian = torch.autograd.functional.jacobian(norm, x)              # (B, T, d, B, T, d)
    return jacobian.abs().amax((0, 2, 3, 5)) > 1e-9


REACH = Exercise(reference=reach, inputs=reach_inputs, about=REACH_ABOUT, misconceptions={
    "Transposed: the row is the output's position, the column the token's.":
        lambda right: right.T,
    "All your entries on the diagonal are False. A token reaches its own output, too.":
        lambda right: right & ~torch.eye(len(right), dtype=torch.bool),
    "You look at derivatives. A detached statistic has none, and is still made of all tokens: "
    "change a token and compare the outputs.":
        derivative,
    "In yours no token reaches another one through the batch's mean square. Do you compare with "
    "norm(x), and does your change alter that mean? (A changed sign does not, and neither do "
    "tokens exchanged between the sequences.)":
        partial(reach, change=turned_round),
    "RMSNorm does not notice your change: it makes a token longer or shorter without turning it, "
    "or sets it to 0 (then RMSNorm gives NaN, which is not larger than anything). Change it in "
    "another way.":
        partial(reach, change=twice),
    "You see no change behind LayerNorm. Do you shift all channels alike, which it does not "
    "notice, or do you add up signed differences, which cancel because its outputs have mean 0?":
        partial(reach, change=plus_one),
    "You report the future only. The task asks for the whole matrix, with past and diagonal.":
        lambda right: right.triu(1),
    "You change token t and all that follow it. Change token t only.":
        partial(reach, and_later=True),
    "In each round you change all tokens up to t, or those of earlier rounds are still changed. "
    "Begin each round with a new copy of x, and change token t only.":
        partial(reach, and_earlier=True),
    "That is how it should be. Find out how it is: change a token, and compare the outputs.":
        lambda right: torch.ones_like(right).tril(),
    "You return False everywhere, but a token's own output must change with it. Do you compare the "
    "outputs before and after the change, is it large enough, and do you change a copy of x?":
        lambda right: torch.zeros_like(right),
    "You return True everywhere, but some of these norms look at each token by itself. Do you "
    "change one token only (x[:, t]; x[:, :, t] is a channel of all tokens), and is it outputs "
    "that you compare?":
        lambda right: torch.ones_like(right),
    "You miss each change that reaches a single number. Do you ask for `all` in place of `any`, or "
    "change or compare only some of the channels?":
        partial(reach, over=torch.amin),
    "You see a change of one number in the first channel, but not in others. Do you change, or "
    "compare, one channel only, or look for large or for positive differences?":
        partial(reach, change=one_channel),
    "You miss a change of one number in the second sequence. Do you change, or compare, the first "
    "sequence only, or look for large or for positive differences?":
        partial(reach, sequences=0),
    "You see a token reach its own output, and no other. Is it outputs that you compare, and those "
    "of all positions?":
        lambda right: torch.eye(len(right)),
    "Nearly all your answers are True. Do you compare the outputs of the changed x with x itself? "
    "Compare them with norm(x).":
        partial(reach, with_x=True),
    "You change a token of one sequence and look at another one. Change and look at all of them.":
        partial(reach, sequences=0, looked_at=slice(-1, None)),
    "All rows of your matrix are its last row. [[False] * T] * T is one list T times, so that a "
    "change of one row changes all: make T lists, or torch.zeros(T, T).":
        lambda right: right[-1:].expand(len(right), -1),
    "Your entry is True where at least one number of the outputs stays the same. True should stand "
    "for a change of at least one number: which comparison do you need?":
        some_number_stays,
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


def exact(x, g, eps, *, mean=over_tokens, part=1.0, centered=False):
    """Return dx.

    part: how much of the term in xhat is subtracted; centered: subtract mean(g), too.
    """
    psi = (moment(x) + eps).sqrt()
    xhat = x / psi
    dx = g - part * xhat * mean(g * xhat)
    if centered:
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
    "That is g / psi, as if the statistic were a constant. But each entry of x changes it, and "
    "with it the outputs of all tokens.":
        partial(exact, part=0.0),
    "You average over the channels of a token, as RMSNorm's backward does. Average over the axes "
    "that the statistic averages over.":
        partial(exact, mean=lambda p: p.mean(-1, keepdim=True)),
    "You sum over the tokens. The statistic is a mean, so a mean appears here, too.":
        partial(exact, mean=lambda p: p.sum(ALL)),
    "You take only what an entry does to its own output (i = j). It changes the outputs of the "
    "other tokens, too: sum over j.":
        partial(exact, mean=lambda p: p / p[..., 0].numel()),
    "You multiply the mean of g by the mean of xhat. Take the mean of their product.":
        product_of_means,
    "You subtract mean(g), too. BatchNorm needs that, because it subtracts a mean; PowerNorm does "
    "not.":
        partial(exact, centered=True),
    "Your second term is divided by psi once too few. Is one of its two xhat still x, or does the "
    "last division by psi apply to g alone?":
        one_hat,
    "The forward pass has eps under the root, so psi and xhat need it here, too.":
        lambda x, g: exact(x, g, 0.0),
}, without=AUTOGRAD)


# 2.7 ----------------------------------------------------------------------------------------------

def published_inputs(generator):
    def case(*shape):
        x = tokens(generator, *shape)
        dy = randn(generator, *shape) + 0.3
        return x, dy, *(0.5 + torch.rand(3, shape[-1], generator=generator))

    x, dy, weight, psi2, nu = case(3, 2, 4)
    yield "3 x 2 tokens, 4 channels", x, dy, weight, psi2, nu, 1e-5
    yield "nu of 0, as at the start", x, dy, weight, psi2, torch.zeros(4), 1e-5
    yield "as many channels as tokens and sequences", *case(3, 3, 3), 1e-5
    yield "a small psi2, where eps counts", x, dy, weight, 0.1 * psi2, nu, 0.1
    yield "gains below 0", x, dy, -weight, psi2, nu, 1e-5


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
    "Your dx is the exact one of 2.6, with the batch's own moment. Here psi2 and nu are given.":
        lambda x, dy, weight, eps, Lambda: (exact(x, dy * weight, eps), Lambda),
    "In dx you use this batch's Lambda. The rule has the remembered nu there; Lambda serves for "
    "nu's update only.":
        lambda x, dy, weight, psi2, eps, Lambda: published(x, dy, weight, psi2, Lambda, eps),
    "You divide the gradient by this batch's root mean square, as the public code does. The "
    "forward pass divided by psi.":
        by_own_moment,
    "dy is the gradient after the gain. What arrives at xhat is dy times weight.":
        lambda x, dy, psi2, nu, eps: published(x, dy, 1.0, psi2, nu, eps),
    "Lambda is made with g. You took dy, which has not passed through the gain.":
        lambda dx, weight, Lambda: (dx, Lambda / weight),
    "Yours has xhat times the gain where it should have xhat. Is the gain in your xhat, or do you "
    "multiply dy by it twice, or the term with nu, too?":
        lambda x, dy, weight, psi2, nu, eps, Lambda: (
            (dy * weight - nu * weight * x / (psi2 + eps).sqrt()) / (psi2 + eps).sqrt(),
            weight * Lambda),
    "In dx your term with nu has one division by psi too few.":
        nu_times_x,
    "The forward pass has eps under the root, so psi and xhat need it here, too.":
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
    # Here a sum divided by T is right. So this mistake differs from a step twice as large.
    yield "one sequence, decay 0.5", nu, x[:1], g[:1], psi2, 1e-5, 0.5
    yield "a small psi2, where eps counts", nu, x, g, 0.1 * psi2, 0.1, 0.9


def next_nu(nu, x, g, psi2, eps, decay, *, growth=lambda x, psi2, eps: moment(x) / (psi2 + eps),
            fade=lambda decay: 1 - decay, hat=True, psi2_first=False):
    """Return the next nu. growth(...) is G, the mean square of xhat; fade(decay) is its weight."""
    if psi2_first:
        psi2 = decay * psi2 + (1 - decay) * moment(x)
    xhat = x / (psi2 + eps).sqrt()
    if not hat:
        xhat = x
    lam = over_tokens(g * xhat)
    left = 1 - fade(decay) * growth(x, psi2, eps)
    return left * nu + (1 - decay) * lam


def one_step_for_each_token(nu, x, g, psi2, eps, decay):
    xhat = x / (psi2 + eps).sqrt()
    for one_hat, one_g in zip(xhat.flatten(0, 1), g.flatten(0, 1)):
        nu = nu + (1 - decay) * (one_g - nu * one_hat) * one_hat
    return nu


NEXT_NU = Exercise(reference=next_nu, inputs=nu_inputs, misconceptions={
    "You use the mean square of x. Use that of xhat: it says how much larger this batch is than "
    "the memory.":
        partial(next_nu, growth=lambda x, psi2, eps: moment(x)),
    "That is an ordinary running mean. How much the old nu shrinks depends on the size of xhat, "
    "too.":
        partial(next_nu, growth=lambda x, psi2, eps: 1.0),
    "You take decay for the learning rate, which is 1 - decay.":
        lambda nu, x, g, psi2, eps, decay: next_nu(nu, x, g, psi2, eps, 1 - decay),
    "Your new part is right. In the factor of the old nu, the mean square of xhat has the wrong "
    "weight: what is the learning rate?":
        partial(next_nu, fade=lambda decay: decay),
    "You multiply g by x. The regression is on xhat.":
        partial(next_nu, hat=False),
    "You update psi2 first, so your xhat is not that of the forward pass.":
        partial(next_nu, psi2_first=True),
    "Nearly right: xhat was made with eps under the root, and so its mean square needs eps, too.":
        partial(next_nu, growth=lambda x, psi2, eps: moment(x) / psi2),
    "You only add to nu. The old nu must shrink, too: look at the second term of the derivative.":
        partial(next_nu, growth=lambda x, psi2, eps: 0.0),
    "Your step is twice as large as it should be: what becomes of the 1/2 in the loss when you "
    "differentiate?":
        lambda nu, right: 2 * right - nu,
    "You divide a sum over all tokens by T, the length of a sequence (or you add up the means of "
    "the sequences). A mean over the tokens of the batch divides by their number, B T.":
        lambda nu, x, right: nu + len(x) * (right - nu),
    "You take one step for each token. Take one step for the batch, with means over all its "
    "tokens.":
        one_step_for_each_token,
    "You multiply the old nu by decay. A gradient step keeps it whole, and subtracts only the "
    "learning rate times the derivative.":
        lambda nu, right, decay: right - (1 - decay) * nu,
})


# 2.9 ----------------------------------------------------------------------------------------------

def decay_inputs(generator):
    yield "decay 0.9", 0.9
    yield "decay 0.99", 0.99
    yield "decay 0.5", 0.5
    yield "decay 0.7", 0.7


def largest_stable(decay):
    return 2 / (1 - decay)


STABLE = Exercise(reference=largest_stable, inputs=decay_inputs, tolerance=1e-4, misconceptions={
    "At this G the factor is 0, and above it nu changes its sign at each step. But it still "
    "shrinks: look at the factor's absolute value.":
        lambda decay: 1 / (1 - decay),
    "That would be right for a factor of 1 - decay G. By which of the two weights does nu learn?":
        lambda decay: 2 / decay,
    "At this G the factor is 1 - decay, small and harmless. How large may its absolute value be?":
        lambda decay: decay / (1 - decay),
    "At this G the factor is 1 - 2 decay, with an absolute value below 1: nu still shrinks.":
        lambda decay: 2 * decay / (1 - decay),
    "At this G the factor is -decay: nu still shrinks, so a larger G is possible.":
        lambda decay: (1 + decay) / (1 - decay),
    "That is 1 - decay, nu's learning rate. The question is how large G may be. (1 / 1 - decay is "
    "1 - decay, too: put what you divide by into brackets.)":
        lambda decay: 1 - decay,
    "Yours becomes smaller with 1 - decay. But the smaller 1 - decay is, the larger G may be.":
        lambda decay: 2 * (1 - decay),
})


# 2.10 ---------------------------------------------------------------------------------------------

def group_inputs(generator):
    x = tokens(generator, 3, 2, 8)
    zeros = torch.zeros(1, 2, 8)
    yield "8 channels in 4 groups", x, 4, 1e-5
    yield "8 channels in 2 groups, eps of 0.1", x, 2, 0.1
    yield "one group", x, 1, 1e-5
    yield "small x, where eps counts", 0.1 * x, 4, 0.1
    yield "a token of zeros", torch.cat((x[:1], zeros)), 4, 1e-5
    yield "one large entry", torch.eye(8).expand(1, 8, 8) * 1e3, 2, 1e-5


def neighbors(x, groups):
    """(B, T, groups, d / groups)"""
    return x.unflatten(-1, (groups, -1))


def mean_square(grouped):
    return grouped.square().mean(-1, keepdim=True)


def group_scale(x, groups, eps, *, centered=False, eps_at="inside"):
    grouped = neighbors(x, groups)
    if centered:
        grouped = grouped - grouped.mean(-1, keepdim=True)
    psi = psi_of(mean_square(grouped), eps, eps_at)
    return (grouped / psi).flatten(-2), math.sqrt(x.shape[-1] / groups)


def in_turns(x, groups):
    """Return the channels in another order: first every groups-th one, then their neighbors."""
    return x.unflatten(-1, (-1, groups)).mT.flatten(-2)


def every_nth_channel(x, groups, eps):
    scaled, bound = group_scale(in_turns(x, groups), groups, eps)
    return in_turns(scaled, x.shape[-1] // groups), bound


GROUPS = Exercise(reference=group_scale, inputs=group_inputs, parts=("the scaled x", "the bound"),
                  misconceptions={
    "sqrt(d) would be the bound for one group. A group has only d/groups entries.":
        lambda x, right: (right[0], math.sqrt(x.shape[-1])),
    "For n channels sqrt(n - 1) is LayerNorm's bound, because it subtracts a mean. Here nothing is "
    "subtracted: what if all entries of a group but one are 0?":
        lambda x, groups, right: (right[0], math.sqrt(x.shape[-1] / groups - 1)),
    "1 would be the bound if each group got the length 1. It should get the root mean square 1, "
    "and then a single entry can be larger.":
        lambda right: (right[0], 1.0),
    "There is a finite bound: however large x is, it is divided by the root mean square of its own "
    "group. How large can one entry be if the squares of its group have the mean 1?":
        lambda right: (right[0], math.inf),
    "The bound depends on how many entries a group has, not on how many groups there are.":
        lambda groups, right: (right[0], math.sqrt(groups)),
    "You divide the whole token by one number. Each group has its own root mean square.":
        lambda x, eps, right: (group_scale(x, 1, eps)[0], right[1]),
    "`groups` is the number of groups. You use it as the number of channels in a group.":
        lambda x, groups, eps, right: (group_scale(x, x.shape[-1] // groups, eps)[0], right[1]),
    "A group consists of neighboring channels. Yours has every groups-th channel.":
        every_nth_channel,
    "You subtract a mean. GroupScaling1D only divides.":
        partial(group_scale, centered=True),
    "Add eps under the root, not after it.":
        partial(group_scale, eps_at="behind"),
    "eps is missing: a group of zeros gives 0/0.":
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
    """Return, for each channel, the root mean square of its half of the channels."""
    halves = psi2.unflatten(0, (2, -1))
    return halves.mean(-1).sqrt().repeat_interleave(len(psi2) // 2)


FOLD = Exercise(reference=fold, inputs=fold_inputs, parts=("the matrix", "the bias"),
                misconceptions={
    "You scale rows, which belong to outputs. The norm scales inputs, and in torch's layout (out, "
    "in) these are columns.":
        scaled_rows,
    "The matrix should keep its shape: multiply each of its columns by a number, and do not add "
    "them up, as `@` does.":
        lambda weight, psi2, eps, w, right: (w @ (weight / (psi2 + eps).sqrt()), right[1]),
    "You multiply by psi. The norm divides by it, so the matrix must be divided by it, too.":
        partial(fold, factor=torch.sqrt),
    "You divide by the square. The norm divides by its root.":
        partial(fold, factor=torch.reciprocal),
    "You add eps to the root of psi2. Add it to psi2 itself, under the root.":
        lambda weight, psi2, eps, w, right: (w * (weight / (psi2.sqrt() + eps)), right[1]),
    "You lost c, the linear map's own bias.":
        lambda c, right: (right[0], right[1] - c),
    "You lost the norm's bias. It passes through the matrix and adds to c.":
        lambda c, right: (right[0], c),
    "You lost both biases: that of the norm and that of the linear map.":
        lambda c, right: (right[0], 0 * c),
    "The norm adds its bias after it has divided. So the bias is multiplied by the old matrix, not "
    "the folded one.":
        lambda bias, c, right: (right[0], c + right[0] @ bias),
    "You fold the group scaling, too. It depends on the token, so no constant can replace it: it "
    "stays.":
        lambda psi2, right: (right[0] / group_roots(psi2), right[1]),
})


# Properties of every right answer. The grader uses them where no known mistake fits. --------------


def one_number_a_channel(y, x):
    ratios = (y / x).flatten(0, 1)                      # a row for each token
    return near(ratios.std(0, correction=0), 0)


def batch_in_warmup(y, x, training, step, warmup):
    return not training or step >= warmup or near(y, moment(x))


def groups_of_size_one(y, x, groups, eps):
    has_zeros = x.square().min() == 0
    return eps > 1e-3 or has_zeros or near(mean_square(neighbors(y[0], groups)), 1)


PROPERTIES = {
    "2.1": {
        "There is one number for each channel: of the three axes only the last one stays.":
            lambda y, x: y.shape == x.shape[-1:],
        "The mean of your d numbers should be the mean square of all of x. It is not.":
            lambda y, x: near(y.mean(), x.square().mean()),
        "Take one channel c, x[:, :, c]: the mean of its squares should be your number c.":
            never},
    "2.2": {
        "Divide your output by the input: all tokens of a channel should leave the same number. In "
        "yours it differs from token to token.":
            one_number_a_channel,
        "Divide your output by x and by weight: each channel should leave one number, "
        "1/sqrt(psi2 + eps).":
            lambda y, right: near(y, right),
        "Nearly right. Is eps added to psi2 itself, under the root?":
            never},
    "2.3": {
        "The statistics have a row for each step, and in it a number for each channel. Do you "
        "return the last step's only, or take a mean over the channels?":
            lambda y, moments: y[0].dim() == 2 and y[0].shape[1] == moments.shape[1],
        "The first step uses the start, which is 1. Yours does not.":
            lambda y: near(y[0][0], 1),
        "The second step uses the result of one update, made of the start, 1, and the first "
        "moment. Look at your second row.":
            lambda y, right, moments: len(moments) < 2 or near(y[0][1], right[0][1]),
        "The share: yours is off after one update already. What fraction of the start does it "
        "leave? (The moments have no part in it.)":
            lambda y, moments, decay: len(moments) > 1 or near(y[1], decay),
        "The share: each update leaves the same fraction of what was there.":
            lambda y, moments, decay: near(y[1], decay ** len(moments)),
        "Look at your third row and those after it: each should be made of the row before it and "
        "of the moment of the step before.":
            never},
    "2.4": {
        "The answer is either psi2 or the batch's moment. Yours is something else.":
            lambda y, x, psi2: near(y, psi2) or near(y, moment(x)),
        "In evaluation yours looks at the batch.":
            lambda y, psi2, training: training or near(y, psi2),
        "There is a step of the warm-up in which yours does not look at the batch.":
            batch_in_warmup,
        "There is a step after the warm-up in which yours looks at the batch.":
            lambda y, psi2, training, step, warmup: not training or step < warmup or near(y, psi2)},
    "2.5": {
        "The answer has one entry per pair of positions: a row per output, a column per changed "
        "token.":
            lambda y, x: y.shape == (x.shape[1], x.shape[1]),
        "Each entry is True or False.":
            lambda y: ((y == 0) | (y == 1)).all()},
    "2.6": {
        "Doubling a channel everywhere changes no output (but for eps), so x dx should sum to 0 "
        "over a channel's tokens. Yours does not: look at psi (its root, its axes), and at what "
        "you subtract from g (its sign, its size, its powers of psi, and its mean: of which "
        "product, over which axes, and does every token count in it?).":
            lambda y, x, eps: eps > 1e-3 or near(over_tokens(x * y), 0),
        "Your x dx sums to 0 over a channel's tokens, as it should. Are both means over the tokens "
        "of all sequences, and is no mean subtracted from x? Count the powers of psi: xhat is "
        "divided by it once, and dx once more. Does g stand in your mean, too?":
            lambda y, right, eps: eps > 1e-3 or near(y, right),
        "With a tiny eps yours is right, or nearly so. Is eps under the root wherever you divide "
        "by psi? Do you divide by the mean of xhat^2, which is not quite 1?":
            never},
    "2.7": {
        "With nu = 0, dx is that of a constant psi. Yours is not: look at the gain, at what you "
        "divide by, and how often. Or is something still subtracted there?":
            lambda y, right, nu: nu.any() or near(y[0], right[0]),
        "Lambda: do you multiply g (not dy, and before nu's term is subtracted) by xhat (x / psi), "
        "and return the mean over each channel's tokens, divided by nothing else?":
            lambda y, right, weight, eps: y[1].dim() == 1
            and (eps > 1e-3 or (weight < 0).any() or near(y[1], right[1])),
        "With nu = 0 your dx is right. What does nu multiply, with which sign, and is that "
        "independent of the gain?":
            lambda y, right, weight, eps: eps > 1e-3 or (weight < 0).any() or near(y[0], right[0]),
        "With a tiny eps yours is right, or nearly so. Is eps under the root wherever you divide "
        "by psi?":
            lambda y, right, weight: (weight < 0).any()
            or near(y[0], right[0]) and near(y[1], right[1]),
        "Yours is wrong only with gains below 0. A gain multiplies as it is, with its sign, and "
        "nu's term has no gain.":
            never},
    "2.8": {
        "With nu = 0 only the part with g should be left, after one step. Yours is off there: is "
        "its mean, its sign or a factor wrong, or is something else left, or a second step taken?":
            lambda y, right, nu: nu.any() or near(y, right),
        "With nu = 0 yours is right. Look at the factor of the old nu: where does it start, and "
        "what is subtracted from it, with which weight?":
            lambda y, right, eps: eps > 1e-3 or near(y, right),
        "With a tiny eps yours is right, or nearly so. Is eps added to psi2, under the root, in "
        "each xhat?":
            never},
    "2.9": {
        "At your G the factor of nu, 1 - (1 - decay) G, does not have the absolute value 1: nu "
        "still shrinks, or already grows.":
            lambda y, decay: near(abs(1 - (1 - decay) * y), 1),
        "At G = 0 nu does not change at all, but there is a larger G at which it does not grow.":
            lambda y: y > 0.001},
    "2.10": {
        "The mean square of each group of a token should come out as 1 (but for eps). Yours does "
        "not: do you divide each group by the root of its own mean square, and is each channel "
        "still in its place?":
            groups_of_size_one,
        "The scaled x: with a tiny eps each group has the mean square 1, as it should. Is eps "
        "under the root, added to the mean square, and are the channels in their old order?":
            lambda y, right: near(y[0], right[0]),
        "Your bound is too small: you return an entry that is larger.":
            lambda y: y[0].abs().max() <= y[1] + 0.01,
        "Your bound is too large: where one entry is all there is in its group, it should reach "
        "the bound.":
            lambda y, x: x.abs().max() < 999 or y[0].abs().max() > y[1] - 0.01,
        "The bound must hold for any x: what if only one entry of a group is not 0, and eps is 0?":
            never},
    "2.11": {
        "c2: put z = 0 into the two layers and into your folded map. They should give the same.":
            lambda y, right: near(y[1], right[1]),
        "w2: feed a z that is 1 in one channel and 0 elsewhere to the two layers and to your "
        "folded map, and subtract c2 from what they give. The results should be equal.":
            never},
}


# Measurements that the notebook shows. They were run once, with the code that stands there. -------

# Median spread of a channel's mean square from batch to batch: as the tokens come, and one by one
SPREAD_IN_DIGITS = ((0.177, 0.091), (0.159, 0.090), (0.165, 0.087))     # seeds 0 to 2
SPREAD_IN_TEXT_400 = ((0.119, 0.083), (0.127, 0.084))                   # seeds 0 and 1

# seed -> kind of run -> what `summary` returns
STORED_RUNS = {
    0: {
        "no groups": dict(before=3.03, end=math.nan, G=math.inf, lost=True, first=[1, 1, 1, None],
            grad_norms=[0.37, math.inf]),
        "no groups, G at most 10 in nu's update": dict(before=3.03, end=math.nan, G=math.inf,
            lost=True, grad_norms=[0.37, math.inf]),
        "no groups, always in warm-up": dict(before=3.03, end=5.49, G=1.0, lost=False,
            grad_norms=[0.36, 29, 33, 5, 23, 100, 7.1, 7.8, 11, 48, 7.4, 5.1, 14, 7.3, 6.8, 4.1,
            2.4, 2.4, 3, 1.5]),
        "4 groups": dict(before=2.63, end=3.35, G=71.0, lost=False, grad_norms=[0.57, 12, 6.4, 3.9,
            3.9, 8.5, 5.5, 2.2, 1.5, 1.1, 1, 0.83, 0.45, 0.94, 0.61, 0.32, 0.55, 0.54, 0.69, 0.22]),
    },
    1: {
        "no groups": dict(before=3.08, end=math.nan, G=math.inf, lost=True, first=[5, 3, 3, 4],
            grad_norms=[0.4, 0.12, 0.71, 7.6, 1.6, 6.3e+09, math.inf]),
        "no groups, G at most 10 in nu's update": dict(before=3.08, end=math.nan, G=math.inf,
            lost=True, grad_norms=[0.4, 0.12, 0.71, 7.6, 1.7, 1.2e+15, math.inf]),
        "no groups, always in warm-up": dict(before=3.08, end=4.48, G=1.0, lost=False,
            grad_norms=[0.39, 4.4, 8.8, 13, 17, 8.6, 5.6, 9, 2.9, 2.6, 3.4, 2, 1.1, 1.7, 0.62, 0.66,
            1.1, 1.2, 0.51, 0.78]),
        "4 groups": dict(before=2.65, end=3.24, G=13.0, lost=False, grad_norms=[0.47, 6.4, 3.6, 3.1,
            4.7, 1.5, 1.3, 1.2, 1.1, 2.1, 1.1, 1.3, 0.72, 0.46, 0.86, 0.61, 0.37, 0.3, 0.52, 0.31]),
    },
    2: {
        "no groups": dict(before=3.08, end=math.nan, G=math.inf, lost=True, first=[1, 1, 1, None],
            grad_norms=[0.62, math.inf]),
        "no groups, G at most 10 in nu's update": dict(before=3.08, end=math.nan, G=math.inf,
            lost=True, grad_norms=[0.62, math.inf]),
        "no groups, always in warm-up": dict(before=3.08, end=5.06, G=1.0, lost=False,
            grad_norms=[0.41, 2.6, 4.8, 4.3, 340, 20, 21, 16, 8.5, 5.1, 12, 3.9, 3.2, 2.6, 3.2, 2.2,
            2.4, 2.3, 2.2, 1.9]),
        "4 groups": dict(before=2.6, end=3.24, G=61.0, lost=False, grad_norms=[1.5, 7, 11, 3.2, 2.4,
            4.8, 3.5, 5.1, 4.6, 1.7, 1.1, 0.79, 0.44, 0.55, 0.59, 0.37, 0.57, 0.75, 0.37, 0.42]),
    },
    3: {
        "no groups": dict(before=3.04, end=math.inf, G=math.inf, lost=True, first=[6, 6, 6, None],
            grad_norms=[0.89, 0.11, 0.11, 0.27, 1.9, 0.64, math.inf]),
        "no groups, G at most 10 in nu's update": dict(before=3.04, end=math.inf, G=math.inf,
            lost=True, grad_norms=[0.89, 0.11, 0.11, 0.27, 1.9, 0.64, math.inf]),
        "no groups, always in warm-up": dict(before=3.04, end=5.59, G=1.0, lost=False,
            grad_norms=[1.2, 8, 14, 4.6, 3.1, 1.9, 2, 2.1, 3.5, 8.1, 1000, 270, 34, 55, 150, 130,
            130, 97, 250, 180]),
        "4 groups": dict(before=2.56, end=3.2, G=120.0, lost=False, grad_norms=[0.74, 13, 12, 7,
            3.3, 3.3, 2.7, 3.2, 11, 4.7, 2, 1.2, 0.78, 0.82, 0.77, 0.51, 0.52, 0.42, 0.83, 0.71]),
    },
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
