"""
Lesson 7, what a norm costs: FLOPs, bytes, rooflines, the papers' timings, folding, attention's backward. See grader.py.

Numbers of anGPT (Table 2), nGPT (A.5, A.9, Tables 2 and 6) and the essay (5.2, 6.1, 6.3) are among the inputs.
"""
from functools import partial

import torch

from answers import near
from grader import Exercise


# 7.1 ------------------------------------------------------------------------------------------------------------------

def flop_inputs(generator):
    yield "this repository's laptop size", 4, 128, 256, 257
    yield "the 0.5B model of the papers", 24, 1024, 2048, 50304
    yield "one small layer", 1, 8, 5, 3
    yield "wide and short", 2, 4096, 16, 100


def flops(n_layer, d, T, V, layer=32, keys=lambda T: (T + 1) / 2, head=2, norms=lambda L: 2 * L + 1, pair=1.0,
          channel=4, percent=100, of=lambda *parts: sum(parts), in_matrices=1.0, in_attention=1.0, heads=lambda L: 1):
    matrices = pair * in_matrices * (n_layer * layer * d * d + head * d * V * heads(n_layer))
    attention = pair * in_attention * n_layer * 4 * keys(T) * d
    norm = channel * d * norms(n_layer)
    return matrices, attention, norm, percent * norm / of(matrices, attention, norm)


FLOP_PARTS = "the matrices'", "attention's", "the norms'", "the share"
FLOPS = Exercise(reference=flops, inputs=flop_inputs, parts=FLOP_PARTS, misconceptions=[
    (partial(flops, pair=0.5), "A multiplication and the addition that goes with it are two FLOPs."),
    (partial(flops, in_matrices=0.5), "The matrices: a multiplication and an addition for each entry are two FLOPs."),
    (partial(flops, in_attention=0.5),
     "Attention: one product is missing, or one FLOP of two. A query meets keys, and then weights meet values."),
    (partial(flops, in_attention=0.25),
     "Attention: both are missing, a second product (with the values) and the addition beside each multiplication."),
    (partial(flops, heads=lambda L: L), "The output head stands once in the model, not once a layer."),
    (partial(flops, layer=24), "That is the MLP of GPT-2. SwiGLU's w_up has twice the rows: a u and a z for each."),
    (partial(flops, keys=lambda T: T),
     "Under the causal mask the first position sees one key and the last all of them: take the average."),
    (partial(flops, keys=lambda T: T / 2), "The position itself is among the keys that it sees: average 1, 2, ..., T."),
    (partial(flops, head=0), "The output head is a product with a d x V matrix too."),
    (partial(flops, head=4), "Looking up a row of the token embedding multiplies nothing."),
    (partial(flops, norms=lambda L: 2 * L), "The model ends with a norm as well."),
    (partial(flops, norms=lambda L: L + 1), "Each layer has a norm in front of both of its branches."),
    (partial(flops, channel=1), "A norm does several things with each channel: count all that the text lists."),
    (partial(flops, percent=1), "The counts are right. The last number is to be in percent."),
    (partial(flops, of=lambda matrices, *rest: matrices),
     "The counts are right. The share is one of everything counted, attention and the norms themselves included."),
])


# 7.2 ------------------------------------------------------------------------------------------------------------------

def traffic_inputs(generator):
    yield "2,048 tokens of 1,024 channels, float32", 2048, 1024, 4
    yield "the same in bfloat16", 2048, 1024, 2
    yield "one token", 1, 64, 4


def traffic(n, d, size, *, steps=7, once=2, per=lambda passes, size: 4 / (passes * size), number=lambda size: size):
    return steps * n * d * number(size), once * n * d * number(size), per(once, number(size))


TRAFFIC = Exercise(
    reference=traffic, inputs=traffic_inputs, parts=("four steps", "one pass", "FLOPs a byte"), misconceptions=[
        (partial(traffic, steps=4, once=1), "You count what is read; what is written has to travel too."),
        (partial(traffic, once=1), "The single pass has a result to write, too."),
        (partial(traffic, once=3), "You read x twice in the single pass. One row is small: it is still in the nearest "
                                   "cache when its mean is known."),
        (partial(traffic, number=lambda size: 1), "You count numbers; a number has `size` bytes."),
        (partial(traffic, steps=8), "The mean writes one number for each row, not a whole array."),
        (partial(traffic, steps=6), "One array too few for the four steps: list for each what it reads and what it "
                                    "writes."),
        (partial(traffic, per=lambda passes, size: 4 / (7 * size)),
         "That is the intensity of the four steps; the third number is that of the single pass."),
        (partial(traffic, per=lambda passes, size: passes * size / 4), "Intensity is FLOPs a byte, not bytes a FLOP."),
        (lambda n, d, size: (*traffic(n, d, size)[:2], 4 / traffic(n, d, size)[1]),
         "You set the FLOPs of one entry against the bytes of all."),
        (partial(traffic, per=lambda passes, size: 4 / size),
         "The intensity counts every byte that travels, on the way in and on the way out."),
    ])


# 7.3 ------------------------------------------------------------------------------------------------------------------

def roof_inputs(generator):
    yield "a matrix product on an A100", 2 * 4096 * 1024 * 1024, 2 * (2 * 4096 * 1024 + 1024 * 1024), 312e12, 1.555e12
    yield "RMSNorm there", 4 * 4096 * 1024, 2 * 2 * 4096 * 1024, 312e12, 1.555e12
    yield "where the two lines meet", 4e9, 2e8, 1e11, 5e9
    yield "a copy, on a laptop", 0.0, 6.4e7, 1e11, 1e10


def roof(flops, moved, peak, bandwidth, *, time=max, unit=1e6, percent=100):
    seconds = time(flops / peak, moved / bandwidth)
    return unit * seconds, percent * flops / (seconds * peak)


ROOF = Exercise(reference=roof, inputs=roof_inputs, parts=("the time", "percent of peak"), misconceptions=[
    (partial(roof, time=lambda x, y: x + y),
     "You add the two times. Data can travel while the processor computes: how long must it take at the least?"),
    (partial(roof, time=lambda x, y: (x + y) / 2), "Both limits hold at once; an average would break one of them."),
    (partial(roof, time=min), "That breaks one of the two limits: the work is done when the slower part is."),
    (partial(roof, time=lambda x, y: x), "You forget the memory: the data has to arrive."),
    (partial(roof, time=lambda x, y: y), "You forget the arithmetic: a large product takes longer than its bytes."),
    (partial(roof, unit=1e3), "Those are milliseconds; a microsecond is 1e-6 s."),
    (partial(roof, unit=1.0), "Those are seconds; microseconds are asked for."),
    (lambda *a: (roof(*a)[0], 100 * a[0] / a[2]),
     "The time is right. FLOPs over peak are seconds: the share of which time?"),
    (lambda *a: (roof(*a)[0], 100 * a[0] / (roof(*a)[0] * a[2])),
     "The time is right. Put it into the second number in seconds: `peak` is FLOPs a second."),
    (partial(roof, percent=1), "The time is right. The second number is to be in percent."),
    (lambda f, b, p, w: (roof(f, b, p, w)[0], 100 * (b / w) / max(f / p, b / w)),
     "The time is right. The second number is how busy the arithmetic is; you have the memory's share."),
])


# 7.4 ------------------------------------------------------------------------------------------------------------------

def mfu_inputs(generator):
    yield "the essay's GPT-2", 124.4e6, 1.2e6, 4, 989e12
    yield "the same, TF32's peak", 124.4e6, 1.2e6, 4, 494.5e12
    yield "one slow GPU", 1e9, 1e4, 1, 312e12


def mfu(params, tokens_per_s, gpus, peak, *, per=6, of=lambda gpus: gpus, percent=100):
    return percent * per * params * tokens_per_s / (of(gpus) * peak)


MFU = Exercise(reference=mfu, inputs=mfu_inputs, misconceptions=[
    (partial(mfu, per=2), "2N is the forward pass. The backward makes two products for each of the forward's."),
    (partial(mfu, per=4), "The backward costs twice the forward: a gradient for the input and one for the weight."),
    (partial(mfu, per=3), "Three passes' worth, yes; but each multiplies and adds, which is two FLOPs a parameter."),
    (partial(mfu, per=8), "That counts the forward twice, as with activations made anew. MFU counts what the "
                                "model needs, not what is spent."),
    (partial(mfu, of=lambda gpus: 1), "The tokens are those of all GPUs together, and so must the peak be."),
    (partial(mfu, of=lambda gpus: 1 / gpus), "You multiply by the number of GPUs; more of them can do more."),
    (partial(mfu, percent=1), "Right, but asked for in percent."),
])


# 7.5 ------------------------------------------------------------------------------------------------------------------

def slower_inputs(generator):
    yield "the essay's LayerNorm and PowerNorm", 1.2e6, 1.08e6
    yield "half the speed", 100.0, 50.0
    yield "faster: the essay's RMSNorm", 1.2e6, 1.26e6
    yield "no difference", 7.0, 7.0


def slower(before, after):
    return 100 * (1 - after / before), 100 * (before / after - 1)


SLOWER = Exercise(reference=slower, inputs=slower_inputs, parts=("fewer tokens", "more time"), misconceptions=[
    (lambda b, a: (slower(b, a)[0],) * 2,
     "You have one percentage for both. Time for a token is 1 / rate: put in half the speed."),
    (lambda b, a: (slower(b, a)[1],) * 2,
     "Both are relative to the slower one. Fewer tokens than before: what is 100%?"),
    (lambda b, a: slower(b, a)[::-1], "The two are exchanged: at half the speed there are 50% fewer tokens."),
    (lambda b, a: (100 * a / b, 100 * b / a), "That is how much there is; asked is how much less and how much more."),
    (lambda b, a: tuple(-x for x in slower(b, a)), "The signs: fewer tokens and more time are both positive here."),
    (lambda b, a: tuple(x / 100 for x in slower(b, a)), "Right, but asked for in percent."),
    (lambda b, a: (200 * (b - a) / (a + b),) * 2,
     "Relative to the mean of both, a percentage says neither of the two."),
    (lambda b, a: (b - a, 1 / a - 1 / b), "Those are differences with a unit; asked are percentages."),
])


# 7.6 ------------------------------------------------------------------------------------------------------------------

def table_inputs(generator):
    yield "anGPT's Table 2, 24 layers", 0.1416, 0.1455, 0.1552, 24
    yield "a dozen layers", 0.2, 0.23, 0.26, 12
    yield "one layer, scalings that cost nothing", 0.01, 0.01, 0.02, 1


def table(gpt_plus, angpt, ngpt, n_layer, *, norms=2, unit=1e3):
    return unit * (angpt - gpt_plus), unit * (ngpt - angpt) / (norms * n_layer)


TABLE = Exercise(reference=table, inputs=table_inputs, parts=("the scalings", "a norm"), misconceptions=[
    (lambda g, a, n, L: (0.0, 1e3 * (n - g) / (2 * L)),
     "You take the scalings to be free. anGPT has as many norms a layer as GPT+, and yet is slower."),
    (lambda g, a, n, L: (1e3 * (a - g), 1e3 * (n - g) / (2 * L)),
     "nGPT has scalings too: GPT+ differs from it by those and by norms. Which other model has scalings?"),
    (partial(table, norms=4), "Six norms against two is A.5's count, for a GPT without norms of q and k. "
                                    "GPT+ and anGPT have those."),
    (partial(table, norms=6), "All six norms are not extra: anGPT has some of them."),
    (partial(table, norms=1), "That is a layer's extra norms together. How many are they?"),
    (lambda g, a, n, L: (1e3 * (a - g), 1e3 * (n - a)),
     "The second is all extra norms of all layers; one norm is asked."),
    (lambda g, a, n, L: (100 * (a / g - 1), 100 * (n / g - 1)),
     "Those are the table's percentages; asked are milliseconds."),
    (partial(table, unit=1), "Those are seconds, as in the table; milliseconds are asked for."),
    (lambda g, a, n, L: (1e3 * (a - g) / (2 * L), 1e3 * (n - a) / (2 * L)),
     "The second is right. The first is what the scalings cost in the whole step; nothing is to be divided."),
    (lambda g, a, n, L: (1e3 * (n - a), 1e3 * (a - g) / (2 * L)),
     "The two differences are exchanged: between which two models are the extra norms?"),
])


# 7.7 ------------------------------------------------------------------------------------------------------------------

def unfused_inputs(generator):
    yield "nGPT's Table 6 and 80%, 24 layers", 657.0, 576.0, 0.8, 24
    yield "the same with 60%", 657.0, 576.0, 0.6, 24
    yield "a toy", 150.0, 130.0, 0.5, 5


def unfused(step, without_qk, overhead, n_layer, *, norms=6, qk=2, percent=100,
            gpt=lambda step, overhead: step / (1 + overhead), of=lambda step, baseline: step - baseline):
    norm, baseline = (step - without_qk) / (qk * n_layer), gpt(step, overhead)
    return norm, baseline, percent * norms * n_layer * norm / of(step, baseline)


UNFUSED_PARTS = "a norm", "GPT's step", "the share"
UNFUSED = Exercise(reference=unfused, inputs=unfused_inputs, parts=UNFUSED_PARTS, misconceptions=[
    (lambda s, w, o, L: ((s - s / (1 + o)) / (6 * L), s / (1 + o), 100.0),
     "You give all of the extra time to the norms: that assumes the answer. What did removing two norms a layer save?"),
    (partial(unfused, qk=1), "Two norms go where those of q and k do."),
    (partial(unfused, gpt=lambda s, o: s * (1 - o)),
     "80% more than GPT's step is GPT's step times 1.8; going back is not taking 80% away."),
    (partial(unfused, gpt=lambda s, o: s / o), "nGPT's step is GPT's plus the overhead, not the overhead times it."),
    (partial(unfused, norms=4), "Four is how many more norms there are. GPT's own two are fused and taken as free, "
                                      "so that all of nGPT's count."),
    (partial(unfused, norms=2), "Those are the norms of q and k alone; a layer of nGPT has more."),
    (partial(unfused, of=lambda step, baseline: step),
     "That is the norms' share of the whole step; asked is their share of what nGPT takes longer than GPT."),
    (lambda s, w, o, L: ((s - w) / 2, s / (1 + o), 600 * (s - w) / 2 / (s - s / (1 + o))),
     "Norms stand in every layer: the time saved is that of all layers together."),
    (lambda s, w, o, L: (*unfused(s, w, o, L)[:2], unfused(s, w, o, L)[2] / L),
     "You set the six norms of one layer against what all layers take longer."),
    (partial(unfused, of=lambda step, baseline: baseline),
     "That is relative to GPT's step; asked is the share of what nGPT takes longer."),
    (partial(unfused, percent=1), "Right, but the last number is to be in percent."),
])


# 7.8 ------------------------------------------------------------------------------------------------------------------

def vocabulary_inputs(generator):
    yield "GPT-2's 50,257, in 128s", 50257, 128
    yield "50,257, in 64s", 50257, 64
    yield "257 bytes, in 128s", 257, 128
    yield "a multiple already", 32000, 64
    yield "300, in 128s", 300, 128


def powers(n):
    two = 1
    while n % (2 * two) == 0:
        two *= 2
    return n, two, n // two


def up(n, multiple):
    return -(-n // multiple) * multiple


def next_power(n):
    two = 1
    while two < n:
        two *= 2
    return two


def pad(n, multiple):
    return powers(up(n, multiple))


VOCABULARY_PARTS = "the padded size", "its power of two", "the rest"
VOCABULARY = Exercise(reference=pad, inputs=vocabulary_inputs, parts=VOCABULARY_PARTS, misconceptions=[
    (lambda n, m: powers(next_power(n)), "That is the next power of two. A multiple of a smaller one is enough."),
    (lambda n, m: powers(n // m * m), "You round down: some tokens would have no row."),
    (lambda n, m: powers(n // m * m + m), "Right unless it is a multiple already: then nothing need be added."),
    (lambda n, m: powers(max(1, round(n / m)) * m),
     "The nearest multiple can lie below: some tokens would have no row."),
    (lambda n, m: (up(n, m), m, up(n, m) // m),
     "The padded size is right. It may hold more twos than `multiple` has: is your last number odd?"),
    (lambda n, m: (up(n, m), next_power(up(n, m) + 1) // 2, 1),
     "The padded size is right. Your power of two is the largest that is no larger than it; does it divide it?"),
    (lambda n, m: (up(n, m), powers(up(n, m))[1].bit_length() - 1, powers(up(n, m))[2]),
     "The middle number is the power of two itself, 2^k, not k."),
    (lambda n, m: (pad(n, m)[0], pad(n, m)[2], pad(n, m)[1]), "The last two are exchanged: first the power of two."),
    (lambda n, m: powers(n), "You split the size as it is; it is to be padded first."),
])


# 7.9 ------------------------------------------------------------------------------------------------------------------

def pair_inputs(generator):
    noise = 1 + 0.02 * torch.rand(21, generator=generator)
    load = torch.linspace(1, 3, 21)                    # a neighbour's work slows both, more and more
    yield "a machine that gets slower", 40 * load, 44 * load * noise
    yield "one hiccup", 10 + torch.rand(11, generator=generator), torch.tensor([11.0] * 10 + [500.0])
    yield "ten rounds", 5 + torch.rand(10, generator=generator), 6 + torch.rand(10, generator=generator)
    yield "equal times", torch.full((5,), 3.0), torch.full((5,), 3.0)


def quantile(x, q):
    x = sorted(x.double().flatten().tolist())
    place = q * (len(x) - 1)
    low = min(int(place), len(x) - 2)
    return x[low] + (place - low) * (x[low + 1] - x[low])


def three(ratios, low=0.1, high=0.9):
    return quantile(ratios, 0.5), quantile(ratios, low), quantile(ratios, high)


def paired(a, b):
    return three(b / a)


PAIRS = Exercise(reference=paired, inputs=pair_inputs, parts=("the median", "10%", "90%"), misconceptions=[
    (lambda a, b: (b.mean() / a.mean(), *three(b / a)[1:]),
     "One hiccup moves a mean as far as it likes: look at your first number where one round took 500."),
    (lambda a, b: (quantile(b, 0.5) / quantile(a, 0.5), *three(b / a)[1:]),
     "The two medians may come from different rounds, under different load. Divide within a round first."),
    (lambda a, b: (b.median() / a.median(), *three(b / a)[1:]),
     "You divide torch's medians of the two: they may come from different rounds. Divide within a round first."),
    (lambda a, b: three(b / quantile(a, 0.5)),
     "You divide by one number for all rounds. Each round has an `a` of its own."),
    (lambda a, b: ((b / a).mean(), *three(b / a)[1:]),
     "The right ratios; but their mean still follows a single hiccup."),
    (lambda a, b: ((b / a).median(), *three(b / a)[1:]),
     "torch's median is the lower of two middle values: of an even number of rounds take the mean of the two."),
    (lambda a, b: three(a / b), "Upside down: asked is how many times as long b takes."),
    (lambda a, b: (b.min() / a.min(), *three(b / a)[1:]),
     "The two best times may come from different rounds, and under steady load there is no undisturbed one."),
    (lambda a, b: tuple(x - 1 for x in three(b / a)), "That is how much longer; asked is how many times as long."),
    (lambda a, b: sorted(three(b / a)), "The right three, in another order: the median comes first."),
    (lambda a, b: three(b[:, None] / a),
     "You compare every round with every other one; only times of one round pair up."),
    (lambda a, b: three(b / a, 0.25, 0.75), "The range is from 10% to 90% of the rounds; yours holds the middle half."),
    (lambda a, b: three(b / a, 0.0, 1.0), "The range is from 10% to 90%; the extremes are what a hiccup makes."),
    (lambda a, b: three(b.sort().values / a.sort().values),
     "You sorted both first, which tears apart times that were measured side by side."),
])


# 7.10 -----------------------------------------------------------------------------------------------------------------

def fold_inputs(generator):
    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    def factors(n):
        return 0.5 + torch.rand(n, generator=generator)

    yield "d = 4", draw(32, 4), draw(4, 16), factors(4), factors(16), factors(16), 3.0
    yield "d = 3, negative factors too", draw(24, 3), draw(3, 12), draw(3), draw(12), draw(12), -0.5
    yield "factors of z alone", draw(16, 2), draw(2, 8), torch.ones(2), torch.ones(8), factors(8), 1.0
    yield "factors of u alone", draw(16, 2), draw(2, 8), torch.ones(2), factors(8), torch.ones(8), 1.0
    yield "the gain alone", draw(16, 2), draw(2, 8), factors(2), torch.ones(8), torch.ones(8), 1.0


def fold(w_up, w_down, gain, f_u, f_z, c):
    return w_up * torch.cat((f_u, f_z))[:, None] * gain, w_down * c


def through(w_up, w_down, gain, f_u, f_z, c):
    return w_up * torch.cat((f_u, torch.ones_like(f_z)))[:, None] * gain, w_down * (c * f_z)


def gain_in_half(u_has_it, z_has_it):
    def half_folded(w_up, w_down, gain, f_u, f_z, c):
        u, z = w_up.chunk(2)
        u = u * gain if u_has_it else u
        z = z * gain if z_has_it else z
        return torch.cat((u * f_u[:, None], z * f_z[:, None])), w_down * c
    return half_folded


FOLD = Exercise(reference=fold, inputs=fold_inputs, parts=("w_up", "w_down"), misconceptions=[
    (through, "You moved z's factors into w_down: SiLU(f z) is not f SiLU(z). Stop in front of the nonlinearity."),
    (lambda w_up, w_down, gain, f_u, f_z, c: (w_up * gain, w_down * (c * f_u * f_z)),
     "You moved both halves' factors into w_down; z's would have to pass through SiLU, which does not let them."),
    (lambda w_up, w_down, gain, f_u, f_z, c: (w_up * torch.cat((f_z, f_u))[:, None] * gain, w_down * c),
     "The halves are exchanged: the first 4d rows make u."),
    (lambda w_up, w_down, gain, f_u, f_z, c: (w_up * torch.cat((f_u, f_z))[:, None], w_down * c * gain[:, None]),
     "The gain multiplies x, which w_up reads; you gave it to what w_down writes."),
    (lambda w_up, w_down, gain, f_u, f_z, c: (w_up * torch.cat((f_u, f_z))[:, None], w_down * c),
     "The gain of the norm in front is missing."),
    (gain_in_half(True, False), "The gain is in u's rows alone; z's rows read the same x."),
    (gain_in_half(False, True), "The gain is in z's rows alone; u's rows read the same x."),
    (lambda w_up, w_down, gain, f_u, f_z, c: (w_up / torch.cat((f_u, f_z))[:, None] / gain, w_down / c),
     "You divide. The new matrices have to do what the factors did, not undo it."),
    (lambda w_up, w_down, gain, f_u, f_z, c: (w_up * torch.cat((f_u, f_z))[:, None] * gain * c, w_down),
     "c stands behind the nonlinearity: through w_up it would change SiLU's argument. It belongs to w_down."),
    (lambda w_up, w_down, gain, f_u, f_z, c: (w_up * torch.cat((torch.ones_like(f_u), f_z))[:, None] * gain,
                                              w_down * c * f_u),
     "The model would give the same, with f_u in w_down. But the exercise wants both halves' factors in w_up."),
    (lambda w_up, w_down, gain, f_u, f_z, c: (w_up * torch.cat((f_u, f_z))[:, None] * gain, w_down * c * f_u),
     "w_up is right, f_u included; now it is in w_down a second time."),
    (lambda w_up, w_down, gain, f_u, f_z, c: (w_up * torch.cat((f_u, f_z))[:, None] / gain, w_down * c),
     "The gain multiplied x; the columns that read x have to do the same, and not divide by it."),
    (lambda w_up, w_down, gain, f_u, f_z, c: (w_up * torch.cat((f_u, f_z))[:, None] * gain, w_down),
     "w_up is right; c, which multiplies the end, is missing."),
    (lambda w_up, w_down, gain, f_u, f_z, c: (w_up * torch.cat((f_u, f_z))[:, None] * gain * gain, w_down * c),
     "The gain is in there twice: u and z are different rows, and each of them reads it once."),
])


# 7.11 -----------------------------------------------------------------------------------------------------------------

def attention_inputs(generator):
    cases = (("2 sequences, 3 heads, 5 tokens", (2, 3, 5, 4), 1), ("one token", (1, 2, 1, 3), 1),
             ("sharp attention", (1, 1, 6, 8), 3), ("as many tokens as channels", (1, 2, 4, 4), 1))
    for label, shape, size in cases:
        q, k, v, g = (torch.randn(*shape, generator=generator) for _ in range(4))
        scores = size * q @ k.transpose(-2, -1)
        p = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf).softmax(-1)
        yield label, size * q, k, v, p, p @ v, g


def score_gradient(v, p, y, g):
    return p * (g @ v.transpose(-2, -1) - (g * y).sum(-1, keepdim=True))


def gradients(ds, q, k, p, g):
    return ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ g


def backward(q, k, v, p, y, g, ds=score_gradient):
    return gradients(ds(v, p, y, g), q, k, p, g)


GRADIENTS = "dq", "dk", "dv"
ATTENTION = Exercise(reference=backward, inputs=attention_inputs, parts=GRADIENTS, tolerance=1e-4, misconceptions=[
    (partial(backward, ds=lambda v, p, y, g: p * (g @ v.transpose(-2, -1)
                                                        - (g @ v.transpose(-2, -1)).sum(-1, keepdim=True))),
     "The sum over the keys is one of dP weighted with P; you took the plain one."),
    (partial(backward, ds=lambda v, p, y, g: p * (g @ v.transpose(-2, -1)
                                                        - (p * (g @ v.transpose(-2, -1))).sum(-2, keepdim=True))),
     "You sum over the queries. A softmax ties together the keys of one query: the last axis."),
    (partial(backward, ds=lambda v, p, y, g: p * (g @ v.transpose(-2, -1))),
     "The probabilities of a row sum to 1: raising one score lowers the others. That term is missing."),
    (partial(backward, ds=lambda v, p, y, g: p * (1 - p) * (g @ v.transpose(-2, -1))),
     "That is the diagonal of the softmax's Jacobian: how a score moves its own probability, but not the others."),
    (partial(backward, ds=lambda v, p, y, g: g @ v.transpose(-2, -1)),
     "That is the gradient of the probabilities; it has to go back through the softmax to the scores."),
    (partial(backward, ds=lambda v, p, y, g: g @ v.transpose(-2, -1) - (g * y).sum(-1, keepdim=True)),
     "The factor P in front is missing: a key that got no weight gets no gradient either."),
    (partial(backward, ds=lambda v, p, y, g: p * (g @ v.transpose(-2, -1)) - (g * y).sum(-1, keepdim=True)),
     "Look at the brackets: in yours a key that got no weight gets the sum all the same."),
    (partial(backward, ds=lambda v, p, y, g: p * (g @ v.transpose(-2, -1) + (g * y).sum(-1, keepdim=True))),
     "A sign: the weighted sum is taken away from dP."),
    (lambda q, k, v, p, y, g: (score_gradient(v, p, y, g) @ k, score_gradient(v, p, y, g) @ q, p.transpose(-2, -1) @ g),
     "dk: entry (i, j) of dS belongs to query i and key j. Key j gathers from all queries: which axis is summed?"),
    (lambda *a: [x / a[0].shape[-1] ** (0.5, 0.5, 0)[i] for i, x in enumerate(backward(*a))],
     "There is no 1 / sqrt(d_k) here: the scale is in q already."),
    (lambda q, k, v, p, y, g: (*backward(q, k, v, p, y, g)[:2], p @ g),
     "dv: value j gathers from every query i that looked at it, with weight P[i, j]. Which axis is summed?"),
    (lambda q, k, v, p, y, g: (lambda dq, dk, dv: (dk, dq, dv))(*backward(q, k, v, p, y, g)),
     "dq and dk are exchanged: dq is a sum of keys, dk one of queries."),
])


# 7.12 -----------------------------------------------------------------------------------------------------------------

def optimizer_inputs(generator):
    yield "0.5B, 4,096 tokens, an A100", 505.7e6, 4096, 312e12, 1.555e12
    yield "the same, 524,288 tokens", 505.7e6, 524288, 312e12, 1.555e12
    yield "laptop size, a core", 1.1e6, 2048, 1e11, 1e10


def optimizer(params, tokens, peak, bandwidth, *, adam=7, project=3, size=4, per=6, unit=1e3, percent=100,
              of=lambda step, adam, project: step + adam + project, share=lambda adam, project: project,
              number=lambda tokens: tokens):
    step = unit * per * params * number(tokens) / peak
    a, p = (unit * passes * size * params / bandwidth for passes in (adam, project))
    return step, a, p, percent * share(a, p) / of(step, a, p)


OPTIMIZER_PARTS = "forward and backward", "AdamW", "project_", "the share"
OPTIMIZER = Exercise(reference=optimizer, inputs=optimizer_inputs, parts=OPTIMIZER_PARTS, misconceptions=[
    (partial(optimizer, adam=6), "One array of AdamW's is missing; did you count the gradient, which it reads?"),
    (partial(optimizer, adam=4), "AdamW reads four arrays, yes. It also writes."),
    (partial(optimizer, adam=8), "One array too many: AdamW does not write the gradient."),
    (partial(optimizer, project=2), "project_ reads a weight twice here: once for the norm, again to divide it."),
    (partial(optimizer, project=1), "project_ reads the weights for the norms, reads them again, and writes them."),
    (partial(optimizer, size=2), "Master weights, gradients and moments are float32 here: four bytes."),
    (partial(optimizer, size=1), "You count numbers; each has four bytes."),
    (partial(optimizer, unit=1), "Those are seconds; milliseconds are asked for."),
    (partial(optimizer, number=lambda tokens: 1), "6N is what one token takes; a step has `tokens` of them."),
    (partial(optimizer, per=2), "Forward and backward together take 6 FLOPs a parameter and token."),
    (partial(optimizer, of=lambda s, a, p: s), "The times are right. The share is one of the whole step, the "
                                                     "optimizer's own time included."),
    (partial(optimizer, of=lambda s, a, p: a + p),
     "The times are right. You take project_'s share of the optimizer; it is one of the whole step, forward "
     "and backward included."),
    (partial(optimizer, share=lambda adam, project: adam + project),
     "The times are right. The share is project_'s alone."),
    (partial(optimizer, percent=1), "The times are right. The share is to be in percent."),
])


# What holds of every right answer: said where none of the known mistakes fits ----------------------------------------

PROPERTIES = {
    "7.1": [
        (lambda y, L, d, T, V: near(y[0], flops(L, d, T, V)[0], 1e-6),
         "The matrices: list how many d x d squares a layer has, add the head, and count two FLOPs for an entry."),
        (lambda y, L, d, T, V: near(y[1], flops(L, d, T, V)[1], 1e-6),
         "Attention: for one token, how many keys does it see on average, and what does one key cost, and one value?"),
        (lambda y, L, d, T, V: near(y[2] / d / 4 % 2, 1),
         "The norms, over 4 d: two a layer and one at the end make an odd number. Yours is none."),
        (lambda y, *_: near(y[3], 100 * y[2] / (y[0] + y[1] + y[2]), 1e-4),
         "The share does not fit your three counts: the norms', over all three together, in percent.")],
    "7.2": [
        (lambda y, n, d, size: near(y[0] / (n * d * size), 7, 1e-6),
         "The four steps: over n d size, yours is the number of arrays that travel. List for each step what it reads and "
         "writes."),
        (lambda y, n, d, size: near(y[1] / (n * d * size), 2, 1e-6),
         "The single pass: over n d size, yours is the number of arrays that travel. Which are they?"),
        (lambda y, n, d, size: near(y[2] * y[1], 4 * n * d, 1e-6),
         "The intensity: 4 FLOPs an entry, over the bytes of the single pass. Yours does not fit your second number.")],
    "7.3": [
        (lambda y, f, moved, peak, width: y[1] < 100.1, "Nothing works faster than its peak: at most 100%."),
        (lambda y, f, moved, peak, width: y[0] >= 0.999e6 * moved / width, "In your time the data cannot have arrived."),
        (lambda y, f, moved, peak, width: y[0] >= 0.999e6 * f / peak, "In your time the work cannot have been done."),
        (lambda y, f, moved, peak, width: near(y[0], 1e6 * max(f / peak, moved / width)),
         "Your time is longer than the longer of the two limits."),
        (lambda y, f, moved, peak, width: False, "The percentage does not fit your time: FLOPs, over that time, over peak.")],
    "7.4": [
        (lambda y, *_: y < 100, "No machine does more than its peak: below 100%. Yours is above."),
        (lambda y, n, rate, gpus, peak: gpus > 1 or near(y, 600 * n * rate / peak),
         "Even with one GPU yours is off: what does a token cost, forward and backward, for each parameter?"),
        (lambda y, *_: False, "With one GPU yours is right. What do several have together?")],
    "7.5": [
        (lambda y, b, a: a != b or near(y[0], 0) and near(y[1], 0), "No difference is 0% of both."),
        (lambda y, b, a: b != 100 or near(y[0], 50), "At half the speed there are 50% fewer tokens."),
        (lambda y, b, a: b != 100 or near(y[1], 100), "At half the speed it takes 100% more time."),
        (lambda y, b, a: a <= b or y[0] < 0 and y[1] < 0, "What is faster has negative numbers. Yours has not."),
        (lambda y, b, a: False, "At half the speed yours is right. Relative to which of the two rates is each?")],
    "7.6": [
        (lambda y, plus, angpt, ngpt, L: near(y[0], 1e3 * (angpt - plus)),
         "The scalings: which two of the three models differ by them alone?"),
        (lambda y, plus, angpt, ngpt, L: L > 1 or near(y[1], 500 * (ngpt - angpt)),
         "Even with one layer the time of a norm is off: which two models differ by norms alone, and by how many a "
         "layer?"),
        (lambda y, *_: False, "With one layer yours is right. How many more norms have L layers?")],
    "7.7": [
        (lambda y, step, without, over, L: near(y[0] * 2 * L, step - without),
         "A norm: so many of them as were taken out, in all layers, should make up what was saved. Yours do not."),
        (lambda y, step, without, over, L: near(y[1] * (1 + over), step), "GPT's step: yours and the overhead on it do not "
                                                                      "make nGPT's."),
        (lambda y, step, without, over, L: near(y[2], 600 * L * y[0] / (step - y[1])),
         "The share does not fit your other two numbers: six norms in each layer, over the extra time, in percent.")],
    "7.8": [
        (lambda y, n, multiple: y[0] >= n, "Yours is smaller than n: some tokens would have no row."),
        (lambda y, n, multiple: y[0] % multiple == 0, "Yours is no multiple of `multiple`."),
        (lambda y, n, multiple: y[0] - n < multiple, "There is a smaller multiple that is enough."),
        (lambda y, *_: y[1] * y[2] == y[0], "Power of two times rest should be the padded size. In yours it is not."),
        (lambda y, *_: y[2] % 2 == 1, "Your rest can still be halved: the power of two is not the largest.")],
    "7.9": [
        (lambda y, a, b: a.std() > 0 or near(torch.stack(y), 1),
         "Where all times are equal, b takes 1 time as long."),
        (lambda y, a, b: y[1] <= y[0] <= y[2], "The median lies between the 10% and the 90% quantile. Yours does not, or "
                                               "the three come in another order."),
        (lambda y, a, b: False,
         "First one ratio for each round, b over a; then three quantiles of these ratios, interpolated where "
         "one falls between two of them.")],
    "7.10": [
        (lambda y, w_up, w_down, gain, f_u, f_z, c: near(y[1], c * w_down),
         "w_down: what is behind the nonlinearity, and has not been moved into w_up?"),
        (lambda y, w_up, w_down, gain, f_u, f_z, c: not near(f_u, 1) or not near(f_z, 1) or near(y[0], w_up * gain),
         "w_up: even with the gain alone yours is off. Which axis of w_up meets x?"),
        (lambda y, *_: False, "w_up: with the gain alone yours is right. Which rows make u, and which make z?")],
    "7.11": [
        (lambda y, q, k, v, p, out, g: near((v * y[2]).sum(), (g * out).sum(), 0.01),
         "dv: y is linear in v, so v dv should have the same sum as g y. Yours has not."),
        (lambda y, q, k, v, p, out, g: near((q * y[0]).sum(), (k * y[1]).sum(), 0.01),
         "dq and dk: q and k enter by their products alone, so q dq and k dk have the same sum. Yours have not."),
        (lambda y, q, k, v, p, out, g: q.shape[2] > 1 or near(y[0], 0) and near(y[1], 0),
         "dq and dk: with one token the softmax gives 1 whatever the score is, so both are 0. Yours are not."),
        (lambda y, q, k, v, p, out, g: near(y[0][:, :, 0], 0),
         "dq: the first query sees one key, so its score changes nothing and its gradient is 0. Yours is not."),
        (lambda y, *_: False, "Check dS first: each of its rows sums to 0, as a softmax does not notice what all scores "
                              "of a query have in common.")],
    "7.12": [
        (lambda y, n, tokens, peak, width: near(y[0], 6e3 * n * tokens / peak, 1e-6),
         "Forward and backward: 6 N FLOPs a token, for all tokens of a step, at `peak`, in milliseconds."),
        (lambda y, n, tokens, peak, width: near(y[1] * width / (4e3 * n), 7, 1e-6),
         "AdamW: how many arrays of N float32 numbers does it read, and how many does it write?"),
        (lambda y, n, tokens, peak, width: near(y[2] * width / (4e3 * n), 3, 1e-6),
         "project_: how many arrays of N float32 numbers does it read, and how many does it write?"),
        (lambda y, *_: near(y[3], 100 * y[2] / (y[0] + y[1] + y[2]), 1e-6),
         "The share does not fit your three times: project_'s over all three together, in percent.")],
}


EXERCISES = {"7.1": FLOPS, "7.2": TRAFFIC, "7.3": ROOF, "7.4": MFU, "7.5": SLOWER, "7.6": TABLE, "7.7": UNFUSED,
             "7.8": VOCABULARY, "7.9": PAIRS, "7.10": FOLD, "7.11": ATTENTION, "7.12": OPTIMIZER}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
