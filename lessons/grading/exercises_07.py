"""
Lesson 7, what a norm costs: FLOPs, bytes, rooflines, the papers' timings, folding, the backward
pass of attention.

Some inputs are numbers of anGPT (Table 2), nGPT (A.5, A.9, Tables 2 and 6) and the essay (5.2, 6.1,
6.3). See grader.py for the form of an exercise.
"""
import math
from functools import partial

import torch

from answers import near
from grader import AUTOGRAD, Exercise
from pieces import never, randn


# 7.1 ----------------------------------------------------------------------------------------------

def flop_inputs(generator):
    yield "this repository's laptop size", 4, 128, 256, 257
    yield "the 0.5B model of the papers", 24, 1024, 2048, 50304
    yield "one small layer", 1, 8, 5, 3
    yield "wide and short", 2, 4096, 16, 100


def average_keys(T):
    """Return the average of 1, 2, ..., T."""
    return (T + 1) / 2


def count_flops(n_layer, d, T, V, *, each_channel=4, squares=16, heads=lambda n_layer: 1,
                keys=average_keys):
    """squares: d x d matrices in a layer; heads: d x V matrices."""
    matrices = 2 * (n_layer * squares * d * d + heads(n_layer) * d * V)
    attention = 4 * n_layer * keys(T) * d
    norms = each_channel * d * (2 * n_layer + 1)
    return matrices, attention, norms, 100 * norms / (matrices + attention + norms)


FLOP_PARTS = ("the matrices'", "attention's", "the norms'", "the share")
FLOPS = Exercise(reference=count_flops, inputs=flop_inputs, parts=FLOP_PARTS, misconceptions={
    "The model has one output head, not one per layer.":
        partial(count_flops, heads=lambda n_layer: n_layer),
    "A layer has four d x d squares more than you count. Is one of its matrices missing, or do you "
    "take the w_up of GPT-2, which is half as tall because it makes u alone?":
        partial(count_flops, squares=12),
    "Under the causal mask the first position sees one key and the last all of them: "
    "take the average.":
        partial(count_flops, keys=lambda T: T),
    "Your attention is that of T/2 keys per token. Is the position itself among the keys that it "
    "sees? (If you take T keys: do you count keys and values, and two FLOPs for each entry?)":
        partial(count_flops, keys=lambda T: T / 2),
    "The output head is missing. It is a product with a d x V matrix too.":
        partial(count_flops, heads=lambda n_layer: 0),
    "Your matrices cost 2 V d FLOPs too many, as much as a second head. Do you count the token "
    "embedding, where looking up a row multiplies nothing, or is there a factor of two too many in "
    "the head?":
        partial(count_flops, heads=lambda n_layer: 2),
    "A norm does several operations on each channel. Count all that the text lists.":
        partial(count_flops, each_channel=1),
})


# 7.2 ----------------------------------------------------------------------------------------------

def traffic_inputs(generator):
    yield "2,048 tokens of 1,024 channels, float32", 2048, 1024, 4
    yield "the same in bfloat16", 2048, 1024, 2
    yield "one token", 1, 64, 4


def rmsnorm_traffic(n, d, size, *, arrays_in_steps=7, arrays_in_pass=2):
    array = n * d * size
    one_pass = arrays_in_pass * array
    return arrays_in_steps * array, one_pass, 4 * n * d / one_pass


TRAFFIC_PARTS = ("four steps", "one pass", "FLOPs per byte")
TRAFFIC = Exercise(
    reference=rmsnorm_traffic, inputs=traffic_inputs, parts=TRAFFIC_PARTS, misconceptions={
    "Your single pass moves one array. What does it read, and what does it write?":
        partial(rmsnorm_traffic, arrays_in_pass=1),
    "Do you count only what is read, or one array per step? All that a step reads and all that it "
    "writes is moved.":
        partial(rmsnorm_traffic, arrays_in_steps=4, arrays_in_pass=1),
    "Do you count only what is written? What is read is moved too.":
        partial(rmsnorm_traffic, arrays_in_steps=3, arrays_in_pass=1),
    "In the single pass you count one array too many. Do you read x twice, although a row is still "
    "in the nearest cache when its mean is known? Or do you count the gain, which is small?":
        partial(rmsnorm_traffic, arrays_in_pass=3),
    "In the four steps you count one array too many. Does a step read an array twice (x^2 needs x "
    "once), or does the mean write a whole array where it writes one number per row? Or do you "
    "count the gain, which is small?":
        partial(rmsnorm_traffic, arrays_in_steps=8),
    "In the four steps you count one array too few. Write down for each step what it reads and "
    "what it writes.":
        partial(rmsnorm_traffic, arrays_in_steps=6),
    "Your intensity is rounded to a whole number. Divide with /, and do not round.":
        lambda right: (right[0], right[1], right[2] // 1),
    "Your intensity is twice what it should be. Do you divide by all bytes that the single pass "
    "moves, those read and those written, and do you count the 4 FLOPs once for each entry of x?":
        lambda right: (right[0], right[1], 2 * right[2]),
})


# 7.3 ----------------------------------------------------------------------------------------------

def roof_inputs(generator):
    n, d = 4096, 1024                                       # tokens, channels
    peak, bandwidth = 312e12, 1.555e12                      # an A100's
    product = 2 * n * d * d
    its_bytes = 2 * (2 * n * d + d * d)
    yield "a matrix product on an A100", product, its_bytes, peak, bandwidth
    yield "RMSNorm there", 4 * n * d, 2 * 2 * n * d, peak, bandwidth
    yield "a longer pass over the same array", 20 * n * d, 2 * 2 * n * d, peak, bandwidth
    yield "where the two lines meet", 4e9, 2e8, 1e11, 5e9
    yield "a copy, on a laptop", 0.0, 6.4e7, 1e11, 1e10
    yield "a matrix product on a laptop", 2 * 256 ** 3, 3 * 4 * 256 ** 2, 1e11, 1e10


def roofline(flops, moved, peak, bandwidth, *, time=max):
    """time: what the two limits, that of the arithmetic and that of the memory, make together."""
    seconds = time(flops / peak, moved / bandwidth)
    return 1e6 * seconds, 100 * flops / (seconds * peak)


def relative_to_the_roof(flops, moved, peak, bandwidth):
    reachable = min(peak, flops / moved * bandwidth)
    return 1e6 * flops / reachable, 100.0


ROOF = Exercise(
    reference=roofline, inputs=roof_inputs, parts=("the time", "percent of peak"), misconceptions={
    "You add the two times. Data can move while the processor computes, so how long must the work "
    "take at least?":
        partial(roofline, time=lambda arithmetic, memory: arithmetic + memory),
    "You take the shorter of the two times, which breaks one of the limits.":
        partial(roofline, time=min),
    "Your time is always that of the arithmetic. The data has to be moved, too.":
        partial(roofline, time=lambda arithmetic, memory: arithmetic),
    "Your time is always that of the memory. A large product takes longer to compute than to move.":
        partial(roofline, time=lambda arithmetic, memory: memory),
    "The percentage is right, but your time leaves out the arithmetic. A large product takes "
    "longer to compute than to move.":
        lambda right, moved, bandwidth: (1e6 * moved / bandwidth, right[1]),
    "On the laptop your product takes the memory's time, but its arithmetic takes longer. Do you "
    "compare with a fixed number? Where the two limits meet depends on peak and bandwidth.":
        lambda flops, moved, peak, bandwidth: roofline(
            flops, moved, peak, bandwidth,
            time=lambda arithmetic, memory: arithmetic if flops >= 200 * moved else memory),
    "The time is right. Your second number says how busy the memory is. It should say how busy the "
    "arithmetic is.":
        lambda right, moved, bandwidth: (right[0], 1e8 * moved / bandwidth / right[0]),
    "Your percentage is always 100. Do you divide by what can be reached at this intensity, or by "
    "the time of the arithmetic alone? And with 0 FLOPs you divide by 0.":
        relative_to_the_roof,
    "The time is right, and your percentage is a millionth of the right one. Do you divide by "
    "microseconds as if they were seconds?":
        lambda right: (right[0], 1e-6 * right[1]),
    "The percentage is right. The time is asked for in microseconds, and yours is in seconds.":
        lambda right: (1e-6 * right[0], right[1]),
    "The percentage is right. The time is asked for in microseconds, and yours is in milliseconds.":
        lambda right: (1e-3 * right[0], right[1]),
})


# 7.4 ----------------------------------------------------------------------------------------------

def mfu_inputs(generator):
    yield "the essay's GPT-2", 124.4e6, 1.2e6, 4, 989e12
    yield "the same, TF32's peak", 124.4e6, 1.2e6, 4, 494.5e12
    yield "one slow GPU", 1e9, 1e4, 1, 312e12
    yield "a wrong peak, ten times too low", 1e9, 4e4, 1, 98.9e12


def mfu(params, tokens_per_s, gpus, peak, *, flops_each=6):
    """flops_each: FLOPs per parameter and token."""
    return 100 * flops_each * params * tokens_per_s / (gpus * peak)


MFU = Exercise(reference=mfu, inputs=mfu_inputs, misconceptions={
    "You cut the MFU off at 100. A higher one shows that a number is wrong, so return it.":
        lambda right: min(right, 100.0),
    "Yours is what 2 FLOPs per parameter give, as many as the forward pass alone has. The backward "
    "pass makes two products for each product of the forward pass.":
        partial(mfu, flops_each=2),
    "Yours is what 4 FLOPs per parameter give. The backward pass alone has that many, because it "
    "computes a gradient for the input and one for the weight. Do you leave out the forward pass, "
    "half of the backward pass, or some of the parameters?":
        partial(mfu, flops_each=4),
    "Yours is what 3 FLOPs per parameter give. The backward pass makes two products for each one "
    "of the forward pass, each product multiplies and adds, and both passes are added up.":
        partial(mfu, flops_each=3),
    "Yours is what 8 FLOPs per parameter give. Is your backward pass more than twice the forward "
    "pass? Or do you count two forward passes, as some runs do to save memory? MFU counts each "
    "pass once.":
        partial(mfu, flops_each=8),
    "In yours the number of GPUs has no effect. tokens_per_s is that of all GPUs together, and "
    "peak is that of one, so gpus belongs to the peak alone.":
        lambda right, gpus: gpus * right,
    "You multiply by peak where you should divide. In x / gpus * peak, for example, only gpus "
    "divides. Are there brackets missing?":
        lambda right, peak: right * peak * peak,
    "In yours more GPUs give a higher MFU. They could compute more together, so should the same "
    "tokens be a larger or a smaller part of that?":
        lambda right, gpus: right * gpus * gpus,
})


# 7.5 ----------------------------------------------------------------------------------------------

def slower_inputs(generator):
    yield "the essay's LayerNorm and PowerNorm", 1.2e6, 1.08e6
    yield "half the speed", 100.0, 50.0
    yield "faster: the essay's RMSNorm", 1.2e6, 1.26e6
    yield "no difference", 7.0, 7.0
    yield "seven tokens and six", 7.0, 6.0


def slower(before, after):
    fewer = 100 * (1 - after / before)
    longer = 100 * (before / after - 1)
    return fewer, longer


SLOWER = Exercise(
    reference=slower, inputs=slower_inputs, parts=("fewer tokens", "more time"), misconceptions={
    "Your two percentages are equal, and only the first is right. The second should be relative to "
    "the time before: at half the speed, how much longer do the same tokens take?":
        lambda right: (right[0], right[0]),
    "Your second number is right, and your first is the same one, relative to `after`. For fewer "
    "tokens than before, what is 100%?":
        lambda right: (right[1], right[1]),
    "Each of your numbers would be right in the place of the other. Are they exchanged, or is each "
    "relative to the wrong one of the two speeds? At half the speed there are 50% fewer tokens.":
        lambda right: (right[1], right[0]),
    "You return the new amounts in percent of the old ones. Return how much less and how much more "
    "that is.":
        lambda right: (100 - right[0], 100 + right[1]),
    "You return differences in tokens per second and in seconds. Return percentages.":
        lambda before, after: (before - after, 1 / after - 1 / before),
})


# 7.6 ----------------------------------------------------------------------------------------------

def table2_inputs(generator):
    yield "anGPT's Table 2, 24 layers", 0.1416, 0.1455, 0.1552, 24
    yield "a dozen layers", 0.2, 0.23017, 0.26034, 12
    yield "one layer", 0.01, 0.012, 0.02, 1


def from_table2(gpt_plus, angpt, ngpt, n_layer):
    scalings = 1e3 * (angpt - gpt_plus)
    return scalings, 1e3 * (ngpt - angpt) / (2 * n_layer)


TABLE2 = Exercise(
    reference=from_table2, inputs=table2_inputs, parts=("the scalings", "a norm"), misconceptions={
    "Your time of a norm comes from nGPT and GPT+, which differ by norms and by scalings. Which "
    "other model has scalings?":
        lambda right, gpt_plus, ngpt, n_layer: (right[0], 1e3 * (ngpt - gpt_plus) / (2 * n_layer)),
    "You take the scalings to be free. anGPT has as many norms per layer as GPT+, and yet it is "
    "slower.":
        lambda gpt_plus, ngpt, n_layer: (0.0, 1e3 * (ngpt - gpt_plus) / (2 * n_layer)),
    "The scalings are right. For a norm you subtract them once more, but anGPT's time contains "
    "them already.":
        lambda right, gpt_plus, angpt, ngpt, n_layer: (
            right[0], (1e3 * (ngpt - angpt) - right[0]) / (2 * n_layer)),
    "You return the table's percentages. Return milliseconds.":
        lambda gpt_plus, angpt, ngpt: (100 * (angpt / gpt_plus - 1), 100 * (ngpt / gpt_plus - 1)),
    "The second is right. The first is what the scalings cost in the whole step, so do not divide "
    "it.":
        lambda right, n_layer: (right[0] / (2 * n_layer), right[1]),
    "You have the two differences exchanged. Which two models differ by the extra norms?":
        lambda right, n_layer: (right[1] * 2 * n_layer, right[0] / (2 * n_layer)),
    "The scalings are right. For a norm, count how many more norms a layer of nGPT has than a "
    "layer of anGPT.":
        lambda right: (right[0], 2 * right[1]),
    "The scalings are right. You return the time of all extra norms in all layers. Return the time "
    "of one.":
        lambda right, n_layer: (right[0], 2 * n_layer * right[1]),
    "The scalings are right. nGPT has six norms per layer and anGPT four: divide by how many more "
    "those are, not by six.":
        lambda right: (right[0], right[1] / 3),
})


# 7.7 ----------------------------------------------------------------------------------------------

def table6_inputs(generator):
    yield "nGPT's Table 6 and 80%, 24 layers", 657.0, 576.0, 0.8, 24
    yield "the same with 60%", 657.0, 576.0, 0.6, 24
    yield "a toy", 150.0, 130.0, 0.5, 5


def from_table6(step, without_qk, overhead, n_layer, *, subtracted=False):
    norm = (step - without_qk) / (2 * n_layer)
    gpt = step / (1 + overhead)
    if subtracted:
        gpt = step * (1 - overhead)
    return norm, gpt, 100 * 6 * n_layer * norm / (step - gpt)


def all_extra_is_norms(step, overhead, n_layer):
    gpt = step / (1 + overhead)
    return (step - gpt) / (6 * n_layer), gpt, 100.0


TABLE6_PARTS = ("a norm", "GPT's step", "the share")
TABLE6 = Exercise(reference=from_table6, inputs=table6_inputs, parts=TABLE6_PARTS, misconceptions={
    "You blame all of the extra time on the norms, which assumes the answer. How much did removing "
    "two norms per layer save?":
        all_extra_is_norms,
    "If the norms of q and k are removed, that is two norms per layer.":
        lambda right: (2 * right[0], right[1], 2 * right[2]),
    "nGPT's step is GPT's step times 1.8. To go back, divide by 1.8; do not subtract 80%.":
        partial(from_table6, subtracted=True),
    "Your first two numbers are right. Your share is that of four norms per layer, as many as nGPT "
    "has more than GPT. GPT's own two are fused and count as free, so all six of nGPT's count.":
        lambda right: (right[0], right[1], right[2] * 4 / 6),
    "Your share is relative to GPT's step. Divide by nGPT's extra time instead.":
        lambda right, overhead: (right[0], right[1], overhead * right[2]),
})


# 7.8 ----------------------------------------------------------------------------------------------

def vocabulary_inputs(generator):
    yield "GPT-2's 50,257, in 128s", 50257, 128
    yield "50,257, in 64s", 50257, 64
    yield "257 bytes, in 128s", 257, 128
    yield "a multiple already", 49152, 64
    yield "300, in 128s", 300, 128
    yield "13, in 5s", 13, 5
    yield "1,000, in 512s", 1000, 512


def split(size):
    """The size itself, the largest power of two in it, and the rest."""
    power = 1
    while size % (2 * power) == 0:
        power = 2 * power
    return size, power, size // power


def pad_vocabulary(n, multiple):
    return split(math.ceil(n / multiple) * multiple)


VOCABULARY_PARTS = ("the padded size", "its power of two", "the odd rest")
VOCABULARY = Exercise(
    reference=pad_vocabulary, inputs=vocabulary_inputs, parts=VOCABULARY_PARTS, misconceptions={
    "You pad to the next power of two. The next multiple of `multiple` is enough.":
        lambda n: split(2 ** math.ceil(math.log2(n))),
    "The padded size is right. A higher power of two than `multiple` may divide it: is your last "
    "number odd?":
        lambda right, multiple: (right[0], multiple, right[0] // multiple),
    "The padded size is right. Your power of two is the largest one below the padded size. Does "
    "it divide the padded size?":
        lambda right: (right[0], 2 ** int(math.log2(right[0])), 1),
    "The middle number should be the power of two itself, 2^k. Yours is k.":
        lambda right: (right[0], int(math.log2(right[1])), right[2]),
    "You split the size as it is. Pad it first.":
        lambda n: split(n),
})


# 7.9 ----------------------------------------------------------------------------------------------

def pair_inputs(generator):
    def around(number, rounds):
        return number + torch.rand(rounds, generator=generator)

    noise = 1 + 0.02 * torch.rand(21, generator=generator)
    load = torch.linspace(1, 3, 21)                         # a neighbor's work slows both down
    yield "a machine that gets slower", 40 * load, 44 * load * noise
    yield "one hiccup", around(10, 11), torch.tensor([11.0] * 10 + [500.0])
    yield "ten rounds", around(5, 10), around(6, 10)
    yield "equal times", torch.full((5,), 3.0), torch.full((5,), 3.0)


def median_and_range(ratios, low=0.1, high=0.9):
    return [ratios.quantile(q) for q in (0.5, low, high)]


def paired(a, b):
    return median_and_range(b / a)


PAIRS = Exercise(
    reference=paired, inputs=pair_inputs, parts=("the median", "10%", "90%"), misconceptions={
    "Your first number is a ratio of means or sums, and one hiccup moves these as far as it likes. "
    "See the input in which one round took 500.":
        lambda a, b, right: (b.mean() / a.mean(), *right[1:]),
    "You divide two medians, which may come from different rounds. Divide within each round "
    "first.":
        lambda a, b, right: (b.median() / a.median(), *right[1:]),
    "Your first number is the median of b over that of a. Divide b by a within each round, and "
    "take the median of these ratios.":
        lambda a, b, right: (b.quantile(0.5) / a.quantile(0.5), *right[1:]),
    "You divide quantiles, which may come from different rounds. Divide within each round first, "
    "then take the three quantiles.":
        lambda a, b: [x / y for x, y in zip(median_and_range(b), median_and_range(a))],
    "Your ratios are right, but you take their mean, which a single hiccup can move.":
        lambda a, b, right: ((b / a).mean(), *right[1:]),
    "With an even number of rounds yours is the lower of the two middle values, as torch's median "
    "is. Interpolate between the two, as torch.quantile does.":
        lambda a, b, right: ((b / a).median(), *right[1:]),
    "You return how much longer b takes. Return how many times as long it takes.":
        lambda right: [ratio - 1 for ratio in right],
    "The range should go from the 10% to the 90% quantile. Yours goes from 25% to 75%.":
        lambda a, b: median_and_range(b / a, low=0.25, high=0.75),
    "You sorted both first, so the times that you divide are not from the same round any more.":
        lambda a, b: median_and_range(b.sort().values / a.sort().values),
    "You divide each time of b by the times of a in all rounds. Divide it by that of its own round "
    "only.":
        lambda a, b: median_and_range((b[:, None] / a).flatten()),
})


# 7.10 ---------------------------------------------------------------------------------------------

def fold_inputs(generator):
    def weights(d):
        return randn(generator, 8 * d, d), randn(generator, d, 4 * d)

    def factors(n):
        return 0.5 + torch.rand(n, generator=generator)

    def any_sign(n):
        return randn(generator, n)

    two, ones = torch.ones(2), torch.ones(8)
    yield "d = 4", *weights(4), factors(4), factors(16), factors(16), 3.0
    yield "d = 3, negative factors too", *weights(3), any_sign(3), any_sign(12), any_sign(12), -0.5
    yield "factors of z alone", *weights(2), two, ones, factors(8), 1.0
    yield "factors of u alone", *weights(2), two, factors(8), ones, 1.0
    yield "the gain alone", *weights(2), factors(2), ones, ones, 1.0


def fold(w_up, w_down, gain, f_u, f_z, c):
    rows = torch.cat((f_u, f_z))
    return rows[:, None] * w_up * gain, c * w_down


def divided(w_up, w_down, gain, f_u, f_z, c):
    return fold(w_up, w_down, 1 / gain, 1 / f_u, 1 / f_z, 1 / c)


FOLD = Exercise(reference=fold, inputs=fold_inputs, parts=("w_up", "w_down"), misconceptions={
    "The gain and c are right, but you moved z's factors into w_down. SiLU(f z) is not f SiLU(z): "
    "they have to be applied before the nonlinearity.":
        lambda w_up, w_down, gain, f_u, f_z, c: fold(w_up, f_z * w_down, gain, f_u, 1 + 0 * f_z, c),
    "You multiply u's rows of w_up by f_z and z's rows by f_u. The first 4d rows make u.":
        lambda w_up, w_down, gain, f_u, f_z, c: fold(w_up, w_down, gain, f_z, f_u, c),
    "You divide by the factors. The new matrices should do what the factors did, not undo it.":
        divided,
    "You divide by the gain. Multiply by it.":
        lambda w_up, w_down, gain, f_u, f_z, c: fold(w_up, w_down, 1 / gain, f_u, f_z, c),
    "You multiply by 1 + gain. The formula has the gain itself.":
        lambda w_up, w_down, gain, f_u, f_z, c: fold(w_up, w_down, 1 + gain, f_u, f_z, c),
    "c is in the right place, but you divide by it.":
        lambda w_up, w_down, gain, f_u, f_z, c: fold(w_up, w_down, gain, f_u, f_z, 1 / c),
    "c belongs in w_down and nowhere else. It is applied after the nonlinearity, and in z's rows "
    "of w_up it would change SiLU's argument.":
        lambda right, w_down, c: (c * right[0], w_down),
    "You moved f_u into w_down. The model's output would be right, but put the factors of both "
    "halves into w_up.":
        lambda w_up, w_down, gain, f_u, f_z, c: fold(w_up, f_u * w_down, gain, 1 + 0 * f_u, f_z, c),
    "w_up is right and has f_u in it, but you multiplied w_down by f_u a second time.":
        lambda right, f_u: (right[0], f_u * right[1]),
})


# 7.11 ---------------------------------------------------------------------------------------------

def attention_inputs(generator):
    def case(shape, sharpness=1):
        q, k, v, g = [randn(generator, *shape) for _ in range(4)]
        q = sharpness * q
        scores = q @ k.mT
        later = torch.ones_like(scores).triu(1) > 0
        p = scores.masked_fill(later, -torch.inf).softmax(-1)
        return q, k, v, p, p @ v, g

    yield "2 sequences, 3 heads, 5 tokens", *case((2, 3, 5, 4))
    yield "one token", *case((1, 2, 1, 3))
    yield "sharp attention", *case((1, 1, 6, 8), sharpness=3)
    yield "as many tokens as channels", *case((1, 2, 4, 4))


def through_softmax(p, dp, mean):
    return p * (dp - mean)


def attention_backward(q, k, v, p, y, g, *, score_gradient=through_softmax):
    """score_gradient(p, dp, mean) -> dS; mean: each query's mean of dP, weighted with P."""
    dp = g @ v.mT
    # This is also (g * y).sum(-1). Without y here, nobody is told to use y, which is not needed.
    mean = (p * dp).sum(-1, keepdim=True)
    ds = score_gradient(p, dp, mean)
    return ds @ k, ds.mT @ q, p.mT @ g


def plain_sum(p, dp, mean):
    return p * (dp - dp.sum(-1, keepdim=True))


def sum_over_queries(p, dp, mean):
    return p * (dp - (p * dp).sum(-2, keepdim=True))


def ds_not_transposed(q, k, v, p, y, g):
    dp = g @ v.mT
    ds = p * (dp - (g * y).sum(-1, keepdim=True))
    return ds @ k, ds @ q, p.mT @ g


def dq_transposed(q, k, v, p, y, g):
    dp = g @ v.mT
    ds = p * (dp - (g * y).sum(-1, keepdim=True))
    return ds.mT @ k, ds.mT @ q, p.mT @ g


def ds_times_the_other(q, k, v, p, y, g):
    return attention_backward(k, q, v, p, y, g)


GRADIENTS = ("dq", "dk", "dv")
ATTENTION = Exercise(
    reference=attention_backward, inputs=attention_inputs, parts=GRADIENTS, tolerance=1e-4,
    without=AUTOGRAD, misconceptions={
    "Your sum over the keys adds up dP. It should add up dP weighted with P.":
        partial(attention_backward, score_gradient=plain_sum),
    "You sum over the queries. A softmax connects the keys of one query: sum over the last axis.":
        partial(attention_backward, score_gradient=sum_over_queries),
    "The probabilities of a row sum to 1, so raising one score lowers the other probabilities. The "
    "term for this is missing.":
        partial(attention_backward, score_gradient=lambda p, dp, mean: p * dp),
    "Your dS is P (1 - P) dP, the diagonal of the softmax's Jacobian alone. A score changes the "
    "other probabilities, too: is a sum over the keys missing?":
        partial(attention_backward, score_gradient=lambda p, dp, mean: p * (1 - p) * dp),
    "You use the gradient of the probabilities as the gradient of the scores. It has to go back "
    "through the softmax first.":
        partial(attention_backward, score_gradient=lambda p, dp, mean: dp),
    "The factor P in front is missing. A key that got no weight should get no gradient.":
        partial(attention_backward, score_gradient=lambda p, dp, mean: dp - mean),
    "In yours a key that got no weight still gets the sum. Is the sum multiplied by P, too, or are "
    "brackets missing?":
        partial(attention_backward, score_gradient=lambda p, dp, mean: p * dp - mean),
    "A sign is wrong: subtract the weighted sum from dP.":
        partial(attention_backward, score_gradient=lambda p, dp, mean: p * (dp + mean)),
    "dk: entry (i, j) of dS belongs to query i and key j. Key j collects from all queries, so "
    "which axis of dS has to be summed?":
        ds_not_transposed,
    "dq: entry (i, j) of dS belongs to query i and key j. Query i collects from all keys, so which "
    "axis of dS has to be summed?":
        dq_transposed,
    "dq is dS times the keys, and dk is dS transposed times the queries. You have q and k "
    "exchanged.":
        ds_times_the_other,
    "dv: value j collects from every query i that looked at it, with weight P[i, j]. Which axis of "
    "P has to be summed?":
        lambda dq, dk, p, g: (dq, dk, p @ g),
})


# 7.12 ---------------------------------------------------------------------------------------------

def optimizer_inputs(generator):
    yield "0.5B, 4,096 tokens, an A100", 505.7e6, 4096, 312e12, 1.555e12
    yield "the same, 524,288 tokens", 505.7e6, 524288, 312e12, 1.555e12
    yield "laptop size, a core", 1.1e6, 2048, 1e11, 1e10


def optimizer_share(params, tokens, peak, bandwidth, *, adamw_arrays=7, project_arrays=3,
                    bytes_of_number=4):
    """adamw_arrays, project_arrays: how many arrays each reads and writes, together."""
    compute = 1e3 * 6 * params * tokens / peak
    array = 1e3 * bytes_of_number * params / bandwidth
    adamw = adamw_arrays * array
    project = project_arrays * array
    return compute, adamw, project, 100 * project / (compute + adamw + project)


OPTIMIZER_PARTS = ("forward and backward", "AdamW", "project_", "the share")
OPTIMIZER = Exercise(
    reference=optimizer_share, inputs=optimizer_inputs, parts=OPTIMIZER_PARTS, misconceptions={
    "In AdamW you count one array too few. Which four arrays does it read, and which of them does "
    "it write again?":
        partial(optimizer_share, adamw_arrays=6),
    "In project_ you count one array too few. How often does it read each weight, for the norm "
    "and to divide it, and what does it write?":
        partial(optimizer_share, project_arrays=2),
    "Weights, gradients and moments are float32 here. Do you count four bytes for each number?":
        partial(optimizer_share, bytes_of_number=2),
    "Do you count numbers instead of bytes? Each number has four bytes.":
        partial(optimizer_share, bytes_of_number=1),
    "The times are right. Your share is project_'s share of the optimizer. It should be its share "
    "of the whole step, including forward and backward.":
        lambda right: (*right[:3], 100 * right[2] / (right[1] + right[2])),
})


# What holds of every right answer: said where none of the known mistakes fits ---------------------


def third_of_all(y):
    return near(y[3], 100 * y[2] / (y[0] + y[1] + y[2]), 1e-6)


def same_ends(y, right):
    return near(y[1], right[1], 1e-5) and near(y[2], right[2], 1e-5)


PROPERTIES = {
    "7.1": {
        "The matrices: count how many d x d squares a layer has, add the head, and take two FLOPs "
        "for each entry.":
            lambda y, right: near(y[0], right[0], 1e-6),
        "Attention: how many keys does one token see on average, and how many values does it add "
        "up? How many FLOPs does one key cost, and one value?":
            lambda y, right: near(y[1], right[1], 1e-6),
        "Divide your norms by 4 d: the number of norms in the model, 2 L + 1, should come out.":
            lambda y, right: near(y[2], right[2], 1e-6),
        "The share does not fit your three counts. It is the norms' FLOPs divided by all three "
        "together, in percent.":
            third_of_all},
    "7.2": {
        "The four steps: divide your bytes by n d size to get a number of arrays. It is not the "
        "number of arrays of x's size that the four steps read and write.":
            lambda y, n, d, size: near(y[0] / (n * d * size), 7, 1e-6),
        "The single pass: divide your bytes by n d size to get a number of arrays. Which arrays "
        "does the pass read and write?":
            lambda y, n, d, size: near(y[1] / (n * d * size), 2, 1e-6),
        "The intensity does not fit your second number. It is 4 FLOPs per entry, divided by the "
        "bytes of the single pass.":
            lambda y, n, d: near(y[2] * y[1], 4 * n * d, 1e-6)},
    "7.3": {
        "Your percentage is above 100. Nothing works faster than its peak.":
            lambda y: y[1] < 100.1,
        "At least once your time is shorter than one of the two limits allows. (Are both in "
        "microseconds, which argument is which, and which of the two times do you take?)":
            lambda y, right: y[0] >= 0.999 * right[0],
        "Your time is longer than the longer of the two limits.":
            lambda y, right: y[0] <= 1.001 * right[0],
        "The time is right. The percentage is FLOPs divided by that time in seconds, divided by "
        "peak, times 100.":
            lambda y, right: near(y[1], right[1])},
    "7.4": {
        "No machine exceeds its peak, but yours is above 100%.":
            lambda y, right: right > 100 or y < 100,
        "Even with one GPU yours is off. How many FLOPs does a token cost per parameter, forward "
        "and backward, do all parameters count, and how many percent of the peak is that per "
        "second?":
            lambda y, right, gpus: gpus > 1 or near(y, right),
        "With one GPU yours is right. What peak do several GPUs have together?":
            never},
    "7.5": {
        "With equal speeds both percentages should be 0.":
            lambda y, before, after: before != after or near(y[0], 0) and near(y[1], 0),
        "At half the speed there are 50% fewer tokens.":
            lambda y, before: before != 100 or near(y[0], 50),
        "At half the speed the same tokens take 100% more time.":
            lambda y, before: before != 100 or near(y[1], 100),
        "If `after` is faster, both numbers should be negative. At least one of yours is not.":
            lambda y, before, after: after <= before or y[0] < 0 and y[1] < 0,
        "At half the speed, 100 and 50, yours is right. Which of the two speeds is each of your "
        "numbers divided by, and does that change if `after` is faster?":
            never},
    "7.6": {
        "The scalings: which two of the three models differ by them alone, and is yours exactly "
        "that difference?":
            lambda y, right: near(y[0], right[0]),
        "Even with one layer the time of a norm is off. Which two models differ by norms alone, by "
        "how many per layer, and do you count one outside of the layers?":
            lambda y, right, n_layer: n_layer > 1 or near(y[1], right[1]),
        "With one layer yours is right. How many extra norms are there in L layers? (Or do you "
        "round?)":
            never},
    "7.7": {
        "A norm: multiply yours by the number of norms that were removed, those of q and k in each "
        "layer. The time that was saved should come out, and it does not.":
            lambda y, right: near(y[0], right[0], 1e-5),
        "GPT's step: yours plus the overhead on it should be nGPT's step. It is not.":
            lambda y, right: near(y[1], right[1], 1e-5),
        "The share does not fit your other two numbers. It is the time of six norms in each layer, "
        "divided by the extra time, in percent.":
            lambda y, step, n_layer: near(y[2], 600 * n_layer * y[0] / (step - y[1]))},
    "7.8": {
        "Your padded size is smaller than n, so some tokens would have no row.":
            lambda y, n: y[0] >= n,
        "Your padded size is not a multiple of `multiple`.":
            lambda y, multiple: y[0] % multiple == 0,
        "Your padded size is too large: a smaller multiple is enough.":
            lambda y, n, multiple: y[0] - n < multiple,
        "The power of two times the odd rest should be the padded size. In yours it is not.":
            lambda y: y[1] * y[2] == y[0],
        "Your rest is not a whole number, so your power of two does not divide the padded size.":
            lambda y: y[2] % 1 == 0,
        "Your rest can still be divided by 2, so your power of two is not the largest.":
            lambda y: y[2] % 2 == 1},
    "7.9": {
        "Where all times are equal, all three numbers should be 1.":
            lambda y, a: a.std() > 0 or near(torch.stack(y), 1),
        "Your 10% quantile is larger than your 90% quantile.":
            lambda y: y[1] <= y[2],
        "The median lies between the 10% and the 90% quantile. Yours does not, or you return the "
        "three in another order.":
            lambda y: y[1] <= y[0] <= y[2],
        "There your 10% and 90% are right, but your first number is not the median of the same "
        "ratios. Is it a mean, or a ratio of two medians or means?":
            lambda y, right: near(y[0], right[0], 1e-5) or not same_ends(y, right),
        "Compute one ratio per round, b over a, and then three quantiles of these ratios, "
        "interpolated linearly where one falls between two of them. Do the outer two leave out "
        "equally much at each end, and 20% together?":
            never},
    "7.10": {
        "w_down: which factor is applied after the nonlinearity and is a number? It should be "
        "there once, and no other factor with it.":
            lambda y, right: near(y[1], right[1]),
        "w_up: even with the gain alone yours is off. Is the gain in all rows, once, along the "
        "axis that meets x? Do u's rows come first, and do factors of 1 change nothing?":
            lambda y, right, f_u, f_z: (f_u != 1).any() or (f_z != 1).any() or near(y[0], right[0]),
        "w_up: with the gain alone yours is right. Are f_u and f_z each multiplied into their own "
        "rows, once, and has a factor come in that belongs in w_down?":
            never},
    "7.11": {
        "dv: y is linear in v, so the entries of v * dv should have the same sum as those of g * "
        "y. Yours do not.":
            lambda y, right, v: near((v * y[2]).sum(), (v * right[2]).sum(), 0.01),
        "dv is not right yet: value j collects g from every query, weighted with P.":
            lambda y, right: near(y[2], right[2], 1e-3),
        "dq: the first query sees one key, so its score changes nothing, and its gradient should "
        "be 0. Yours is not.":
            lambda y: near(y[0][:, :, 0], 0),
        "dk: with one token the softmax gives 1 whatever the score is, so dk should be 0. Yours is "
        "not.":
            lambda y, q: q.shape[2] > 1 or near(y[1], 0),
        "dq is right, so your dS is too. dk collects from the same dS, over queries instead of "
        "keys.":
            lambda y, right: not near(y[0], right[0], 1e-3) or near(y[1], right[1], 1e-3),
        "dk is right, so your dS is too. dq collects from the same dS, over keys instead of "
        "queries, and needs no other factor.":
            lambda y, right: not near(y[1], right[1], 1e-3) or near(y[0], right[0], 1e-3),
        "Check dS first. Each of its rows should sum to 0, because a softmax does not notice a "
        "number that is added to all scores of a query. Does entry (i, j) of dP belong to query i "
        "and key j, as that of P does? If the rows do not sum to 0, what do you subtract from dP? "
        "If they do, by what do you multiply dS?":
            never},
    "7.12": {
        "Forward and backward: take 6 N FLOPs per token, for all tokens of a step, at `peak`, in "
        "milliseconds.":
            lambda y, right: near(y[0], right[0], 1e-6),
        "AdamW: how many arrays of N numbers does it read, and how many does it write? How many "
        "bytes has a float32 number?":
            lambda y, right: near(y[1], right[1], 1e-6),
        "project_: how many arrays of N numbers does it read, and how many does it write? How many "
        "bytes has a float32 number?":
            lambda y, right: near(y[2], right[2], 1e-6),
        "The share does not fit your three times. It is project_'s time divided by all three "
        "together, in percent.":
            third_of_all},
}


EXERCISES = {
    "7.1": FLOPS,
    "7.2": TRAFFIC,
    "7.3": ROOF,
    "7.4": MFU,
    "7.5": SLOWER,
    "7.6": TABLE2,
    "7.7": TABLE6,
    "7.8": VOCABULARY,
    "7.9": PAIRS,
    "7.10": FOLD,
    "7.11": ATTENTION,
    "7.12": OPTIMIZER,
}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
