"""
Lesson 4, nGPT: the sphere, its steps, its scales and its matrices.

Equation and section numbers are those of nGPT (Loshchilov et al. 2024). See grader.py for the form.
A keyword of a reference stands for one step of it, or for something that can go wrong:
functools.partial makes the wrong answer from it. The references use nothing of model.py. Where
model.py has the same thing, the notebook compares the two.
"""
import math
from functools import partial

import torch

from answers import near
from grader import Exercise
from model import GPT, GPTConfig
from pieces import (
    NO_TOKEN, attend, block_inputs, every_nth_channel, heads_one_by_one, neighboring_channels,
    never, randn, rope_tables, same, side_by_side, silu, turned, unit_rows)


def directions(generator, *shape):
    """Random unit vectors along the last axis."""
    return unit_rows(randn(generator, *shape))


def along(a, b):
    """The dot product of each pair, (..., 1)."""
    return (a * b).sum(-1, keepdim=True)


# 4.1 ----------------------------------------------------------------------------------------------

def cosine_inputs(generator):
    a = randn(generator, 3, 5)
    zeros = torch.zeros(1, 5)
    lengths = torch.tensor([[1e3], [1.0], [1e-3]])
    yield "three rows and four", a, randn(generator, 4, 5)
    yield "one row each", a[:1], randn(generator, 1, 5)
    yield "long and short rows", a * lengths, randn(generator, 5, 5)
    yield "a row of zeros", torch.cat((a, zeros)), a
    yield "a row of zeros in b", a, torch.cat((a[:1], zeros))
    yield "rows shorter than 0.00000001", 5e-9 * directions(generator, 3, 5), a
    unusual = torch.tensor([[0.0, 1, 2, 3, -4.5], [1, -1, 2, 1, -3], [-1, -2, 0, -3, -4]])
    yield "rows with an entry of 0 or a sum of 0", unusual, torch.cat((a, unusual))


def length_of_rows(x):
    return x.square().sum(-1, keepdim=True).sqrt()


def cosines(a, b, *, length=length_of_rows):
    unit_a = a / length(a).clamp(min=1e-12)
    unit_b = b / length(b).clamp(min=1e-12)
    return unit_a @ unit_b.T


COSINE = Exercise(                                  # the tolerance lets 1e-12 be added to a length
    reference=cosines, inputs=cosine_inputs, tolerance=1e-3, misconceptions={
    "These are dot products, which grow with the rows' lengths: a cosine does not.":
        lambda a, b: a @ b.T,
    "You divide each column by its norm. The vectors here are the rows.":
        partial(cosines, length=lambda x: x.norm(dim=0, keepdim=True)),
    "You divide by the norm of the whole matrix. Each row has a norm of its own.":
        partial(cosines, length=torch.norm),
    "You divide by the squared lengths. Is a root missing, or do you divide twice?":
        partial(cosines, length=lambda x: x.square().sum(-1, keepdim=True)),
    "That is the angle. The exercise asks for its cosine, before the arccos.":
        lambda right: right.clamp(-1, 1).acos(),
    "You subtract each row's mean, which turns a cosine into a correlation.":
        lambda a, b: cosines(a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)),
    "You return 0 where a row has one entry of 0. Only a row of zeros has no direction.":
        lambda right, a, b: right * (a != 0).all(1)[:, None] * (b != 0).all(1),
    "You return 0 where the entries of a row add up to 0. Only a row of zeros has no direction.":
        lambda right, a, b: right * (a.sum(1) != 0)[:, None] * (b.sum(1) != 0),
}, without=("cosine_similarity", "CosineSimilarity"))


# 4.2 ----------------------------------------------------------------------------------------------

def dimension_inputs(generator):
    yield "d = 64", 64
    yield "d = 3", 3
    yield "d = 4", 4
    yield "d = 400", 400        # the normal distribution's value is off by 2.5e-5
    yield "d = 1024", 1024


def mean_abs_cosine(d):
    """Exact: the density of a cosine x is proportional to (1 - x^2)^((d - 3) / 2)."""
    log_ratio = math.lgamma(d / 2) - math.lgamma((d + 1) / 2)
    return math.exp(log_ratio) / math.sqrt(math.pi)


def not_divided(d):
    """The mean, times the integral of (1 - x^2)^((d - 3) / 2) from -1 to 1."""
    log_ratio = math.lgamma((d - 1) / 2) - math.lgamma(d / 2)
    whole = math.exp(log_ratio) * math.sqrt(math.pi)
    return mean_abs_cosine(d) * whole


MEAN_ABS = Exercise(reference=mean_abs_cosine, inputs=dimension_inputs, misconceptions={
    "That is right in the limit of large d, where a cosine is normal. In 3 dimensions it is not: "
    "there all values between -1 and 1 are equally likely.":
        lambda d: math.sqrt(2 / math.pi / d),
    "That is the root mean square of the cosine; the mean of its absolute value is smaller.":
        lambda d: 1 / math.sqrt(d),
    "That is the formula as it is printed in A.1. Check it against the number printed right after "
    "it.":
        lambda d: 2 / math.pi / math.sqrt(d),
    "Your density is not divided by its own integral: it is only proportional to "
    "(1 - x^2)^((d-3)/2).":
        not_divided,
    "That is the variance of the cosine, the mean of its square.":
        lambda d: 1 / d,
    "The factor 0.7979 is right for large d, but cosines shrink like 1/sqrt(d), not like 1/d.":
        lambda d: math.sqrt(2 / math.pi) / d,
    "Your exponent is d - 3, twice what it should be. Is the / 2 missing, or does it stand outside "
    "of the power, as in (1 - x^2) ** (d - 3) / 2?":
        lambda d: mean_abs_cosine(2 * d - 3),
    "Where d is even yours is the value of d - 1, as if the exponent (d - 3) / 2 were rounded "
    "down. Do you use // or int()?":
        lambda d: mean_abs_cosine(2 * ((d - 3) // 2) + 3),
})


# 4.3 ----------------------------------------------------------------------------------------------

def step_inputs(generator):
    a = directions(generator, 4, 3)
    b = directions(generator, 4, 3)
    yield "four pairs, alpha 0.3", a, b, 0.3
    yield "alpha 0", a, b, 0.0
    yield "alpha 1", a, b, 1.0
    a = directions(generator, 2, 5, 16)
    yield "a batch (2, 5, 16)", a, directions(generator, 2, 5, 16), 0.1
    yield "a right angle", torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), 0.25


def slerp_inputs(generator):
    yield from step_inputs(generator)
    a = torch.eye(3)
    yield "b equal to a", a, a.clone(), 0.5
    yield "b equal to a in one pair of three", a, torch.stack((a[0], a[2], a[0])), 0.3
    a = directions(generator, 400, 3)
    b = a.clone()
    b[:, 0] = torch.nextafter(b[:, 0], torch.tensor(2.0))   # the next float32
    above_1 = along(a, b)[:, 0] > 1
    yield "b next to a, where a cosine rounds to more than 1", a[above_1], b[above_1], 0.3
    a = directions(generator, 40, 3)
    yield "small angles", a, unit_rows(a + 0.05 * directions(generator, 40, 3)), 0.3
    yield "angles below 0.01", a, unit_rows(a + 0.009 * directions(generator, 40, 3)), 0.5
    yield "angles up to 0.3", a, unit_rows(a + 0.3 * directions(generator, 40, 3)), 0.5


def slerp(a, b, alpha):
    """The same arc as eq. 6, made from the tangent at a: no division by sin(theta)."""
    cosine = along(a, b).clamp(-1, 1)
    tangent = b - cosine * a
    sine = tangent.norm(dim=-1, keepdim=True)
    theta = torch.atan2(sine, cosine)
    unit_tangent = tangent / sine.clamp(min=1e-12)
    return (alpha * theta).cos() * a + (alpha * theta).sin() * unit_tangent


def equal_pairs(a, b):
    return (a == b).all(-1, keepdim=True)


def angle(a, b):
    theta = along(a, b).clamp(-1, 1).arccos()
    return torch.where(equal_pairs(a, b), 0.0, theta)


def eq_6(a, b, alpha, *, theta=angle, divisor=torch.sin):
    """As eq. 6 is printed: 0/0 where b = a."""
    t = theta(a, b)
    first = ((1 - alpha) * t).sin()
    second = (alpha * t).sin()
    return (first * a + second * b) / divisor(t)


def chord(a, b, alpha):
    return a + alpha * (b - a)


def in_degrees(a, b):
    return 180 / math.pi * angle(a, b)


def one_angle(a, b):
    return (a * b).sum().clamp(-1, 1).arccos()


def one_angle_never_0(a, b):
    return (a * b).sum().clamp(-0.99999, 0.99999).arccos()


def arccos_of_more_than_1(a, b, alpha):
    """Equal pairs are treated apart, but a cosine may round to more than 1 elsewhere."""
    theta = along(a, b).arccos()
    there = (((1 - alpha) * theta).sin() * a + (alpha * theta).sin() * b) / theta.sin()
    return torch.where(equal_pairs(a, b), a, there)


def brackets_forgotten(a, b, alpha):
    t = angle(a, b)
    return ((1 - alpha * t).sin() * a + (alpha * t).sin() * b) / t.sin()


def a_if_any_is_equal(a, b, alpha):
    if equal_pairs(a, b).any():
        return a
    return eq_6(a, b, alpha)


def chord_if_any_is_equal(a, b, alpha):
    if (angle(a, b) < 1e-3).any():
        return chord(a, b, alpha)
    return eq_6(a, b, alpha)


SLERP = Exercise(                                   # the tolerance lets clamped angles pass, too
    reference=slerp, inputs=slerp_inputs, tolerance=1e-3, misconceptions={
    "Where b is nearly a, the rounded cosine can be above 1, and its arccos is NaN. If you limit "
    "it to 1, theta is 0 there although b is not a: do you treat only b = a apart?":
        arccos_of_more_than_1,
    "The division by sin(theta) is missing.":
        partial(eq_6, divisor=torch.ones_like),
    "Your theta is in degrees. torch's sine takes radians.":
        partial(eq_6, theta=in_degrees),
    "That is the chord itself, LERP: it runs inside the ball. SLERP stays on the sphere, with "
    "sines for weights.":
        chord,
    "That is the chord put back on the sphere: it ends on the arc, but not at alpha times the "
    "angle between a and b.":
        lambda a, b, alpha: unit_rows(chord(a, b, alpha)),
    "Check the brackets: the first weight is the sine of (1 - alpha) times theta.":
        brackets_forgotten,
    "You have one theta for the whole batch. Every pair has its own: sum over the last axis "
    "only.":
        partial(eq_6, theta=one_angle_never_0),
    "You have one theta for the whole batch, from a sum over all pairs, which can be above 1. Sum "
    "over the last axis only, so that every pair has its own.":
        partial(eq_6, theta=one_angle),
    "Yours is right except where b = a, or nearly so: there you return 0, which is not on the "
    "sphere. What should come out between a and a itself?":
        lambda a, b, alpha: eq_6(a, b, alpha).nan_to_num(),
    "As soon as one pair of a batch is equal you return a for all of them. Decide for each pair "
    "by itself.":
        a_if_any_is_equal,
    "As soon as one pair of a batch is equal you return points on the chord for all of them. "
    "Decide for each pair by itself.":
        chord_if_any_is_equal,
    "You limit the cosine at 0 from below. But it is negative where the angle exceeds 90 degrees.":
        partial(eq_6, theta=lambda a, b: along(a, b).clamp(0, 0.99999).arccos()),
    "You return b itself where the angle is small. Only where sin(theta) is 0 does eq. 6 need "
    "another answer.":
        lambda a, b, alpha: torch.where(angle(a, b) < 0.1, b, eq_6(a, b, alpha)),
    "You return a itself where the angle is small. Only where sin(theta) is 0 does eq. 6 need "
    "another answer.":
        lambda a, b, alpha: torch.where(along(a, b) > 0.99, a, eq_6(a, b, alpha)),
    "You limit the cosine at a number below 1, so small angles become larger. Limit it at 1, and "
    "treat equal pairs apart.":
        partial(eq_6, theta=lambda a, b: along(a, b).clamp(-0.99, 0.99).arccos()),
})


# 4.4 ----------------------------------------------------------------------------------------------

def riemann_inputs(generator):
    yield next(step_inputs(generator))
    h = directions(generator, 2, 3, 8)
    y = directions(generator, 2, 3, 8)
    yield "a batch (2, 3, 8)", h, y, 0.05
    yield "alpha a vector of 8", h, y, torch.rand(8, generator=generator)
    yield "opposite directions", h, unit_rows(y - 3 * h), 0.5
    yield "y equal to h", h, h, 0.5


def moved(h, step):
    return unit_rows(h + step)


def tangent_at(h, y):
    """y without its part along h."""
    return y - along(h, y) * h


def riemann_step(h, y, alpha):
    return moved(h, alpha * tangent_at(h, y))


def along_the_arc(h, y, alpha):
    step = alpha * tangent_at(h, y)
    length = step.norm(dim=-1, keepdim=True)
    return length.cos() * h + length.sin() * step / length.clamp(min=1e-9)


def projected_twice(h, y, alpha):
    step = alpha * tangent_at(h, y)
    return moved(h, tangent_at(h, step))


def unit_tangent(h, y, alpha):
    return moved(h, alpha * unit_rows(tangent_at(h, y)))


def one_dot_product(h, y, alpha):
    of_all = (h * y).sum()
    return moved(h, alpha * (y - of_all * h))


RIEMANN = Exercise(reference=riemann_step, inputs=riemann_inputs, misconceptions={
    "You step along y - h (eq. 10); take out its part along h first.":
        lambda h, y, alpha: moved(h, alpha * (y - h)),
    "You project on the plane perpendicular to y. The tangent space is the one at h.":
        lambda h, y, alpha: moved(h, -alpha * tangent_at(y, h)),
    "You exchanged h and y in the projection: the part of y along h is to be removed, not the part "
    "of h along y.":
        lambda h, y, alpha: moved(h, alpha * tangent_at(y, h)),
    "You walk along the arc, by the length of the step. Eq. 29 walks straight, and then Norm "
    "brings h back.":
        along_the_arc,
    "You walk along the arc before Norm acts. Eq. 29 takes a straight step.":
        lambda h, y, alpha: unit_rows(along_the_arc(h, y, alpha)),
    "Your step still has a part along h: do you add that part once more instead of subtracting it?":
        lambda h, y, alpha: moved(h, alpha * (y - h - (1 - along(h, y)) * h)),
    "You project once more, after alpha. That would be a strict Riemannian step, but eq. 29 does "
    "not do it.":
        projected_twice,
    "You made the projected gradient a unit vector. Keep its length, the sine of the angle between "
    "h and y.":
        unit_tangent,
    "You have one dot product for the whole batch. Every pair has its own: sum over the last axis "
    "only.":
        one_dot_product,
    "You subtract the number h . y from every entry of y. Subtract the vector (h . y) h.":
        lambda h, y, alpha: moved(h, alpha * (y - along(h, y))),
    "You subtract a number from every entry of y - h. Subtract a vector along h.":
        lambda h, y, alpha: moved(h, alpha * (y - h - along(h, y - h))),
    "The part of y along h is still in your step. Subtract it.":
        lambda h, y, alpha: moved(h, alpha * y),
    "Your step has only the part along h, with a minus. y itself is missing.":
        lambda h, y, alpha: moved(h, -alpha * along(h, y) * h),
})


# 4.5 ----------------------------------------------------------------------------------------------

def rate_inputs(generator):
    yield "lr 0.001, init 1, scale 1", 1e-3, 1.0, 1.0
    yield "lr 0.001, init 1, scale 1/32", 1e-3, 1.0, 1 / 32
    yield "lr 0.01, init 0.05, scale 1/8", 1e-2, 0.05, 1 / 8
    yield "lr 0.001, init 0.1, scale 0.01", 1e-3, 0.1, 0.01
    yield "lr 0.01, init 2, scale 0.004: less than a step", 1e-2, 2.0, 0.004


def of_a_step(step, start):
    """The step, its share of the start, and how many make the start once more."""
    return step, step / start, start / step


def rates(lr, init, scale):
    return of_a_step(lr * init / scale, init)


RATES = Exercise(reference=rates, inputs=rate_inputs,
                 parts=("the value's step", "its share of the start", "steps to double"),
                 misconceptions={
    "That would hold for a parameter that is stored as it is used. Here Adam moves the stored "
    "number, which starts at scale.":
        lambda lr, init: of_a_step(lr, init),
    "The forward pass multiplies the stored number by init / scale. You have the inverse.":
        lambda lr, init, scale: of_a_step(lr * scale / init, init),
    "The share is relative to the value's start, which is init. The number of steps to double "
    "follows from the share.":
        lambda lr, init, scale: of_a_step(lr * init / scale, 1.0),
    "After so many steps the value has trebled. To double, the stored number has to move by its "
    "start once.":
        lambda right: (right[0], right[1], 2 * right[2]),
    "The step is right. Share and doubling are those of a number that starts at init and moves by "
    "lr, but the stored number starts at scale.":
        lambda lr, init, right: (right[0], lr / init, init / lr),
    "Step and share are right. The doubling would be that of a value that grows by this share of "
    "itself. Adam adds the same amount in each step.":
        lambda right: (right[0], right[1], math.log(2) / math.log1p(right[1])),
    "Step and share are right, and the number of steps is rounded. It is asked for unrounded.":
        lambda right: (right[0], right[1], float(math.ceil(right[2] - 1e-9))),
})


# 4.6 ----------------------------------------------------------------------------------------------

def width_inputs(generator):
    yield "d_k = 16", 16
    yield "d_k = 64", 64
    yield "d_k = 128", 128
    yield "d_k = 1", 1


def softmax_scales(d_k):
    return d_k ** -0.5, d_k ** 0.5, d_k ** 0.25


PARTS = ("factor for entries of variance 1", "factor for unit vectors", "start of s_qk")
SCALES = Exercise(reference=softmax_scales, inputs=width_inputs, parts=PARTS, misconceptions={
    "Your factors are the wrong way round: a sum of d_k products is too large, a cosine is too "
    "small.":
        lambda d_k: (d_k ** 0.5, d_k ** -0.5, d_k ** -0.25),
    "s_qk multiplies both q and k, so it enters the product twice.":
        lambda d_k: (d_k ** -0.5, d_k ** 0.5, d_k ** 0.5),
    "Your third number is a quarter of d_k. Should it be a root? (d_k ** 1 / 4 is a quarter, too, "
    "because ** comes before /.)":
        lambda d_k: (d_k ** -0.5, d_k ** 0.5, d_k / 4),
    "You divide by the variance. A factor changes the variance by its square, so divide by the "
    "standard deviation.":
        lambda d_k: (1 / d_k, d_k, d_k ** 0.5),
    "The Transformer's 1/sqrt(d_k) is for entries of variance 1. Unit vectors have entries of "
    "variance 1/d_k.":
        lambda d_k: (d_k ** -0.5, d_k ** -0.5, d_k ** -0.25),
    "Your first two are one over what is expected, so that each is the other one's value. Are they "
    "factors to multiply by, and not standard deviations to divide by? Or are the two exchanged?":
        lambda d_k: (d_k ** 0.5, d_k ** -0.5, d_k ** 0.25),
    "A 1 leaves cosines as they are. The dot product of unit vectors has variance 1/d_k, and it "
    "should be brought to 1.":
        lambda d_k: (d_k ** -0.5, 1.0, 1.0),
    "Your second factor is one over the cosine's variance. It should be one over its standard "
    "deviation, and the cosine is a sum of d_k products. The third follows from the second.":
        lambda d_k: (d_k ** -0.5, d_k, d_k ** 0.5),
})


# 4.7 ----------------------------------------------------------------------------------------------

def random_matrices(generator, d):
    w_qkv = randn(generator, 3 * d, d)
    w_o = randn(generator, d, d)
    w_up = randn(generator, 8 * d, d)
    w_down = randn(generator, d, 4 * d)
    return w_qkv, w_o, w_up, w_down


def matrix_inputs(generator):
    yield "the matrices of d = 8", *random_matrices(generator, 8)
    yield "the matrices of d = 3", *random_matrices(generator, 3)


def unit_matrices(w_qkv, w_o, w_up, w_down, *, axes=(1, 0, 1, 0), power=0.5):
    """axes: of each matrix the axis of h's channels."""
    found = []
    for w, axis in zip((w_qkv, w_o, w_up, w_down), axes):
        length = w.square().sum(axis, keepdim=True) ** power
        found.append(w / length)
    return tuple(found)


MATRICES = Exercise(reference=unit_matrices, inputs=matrix_inputs,
                    parts=("w_qkv", "w_o", "w_up", "w_down"), misconceptions={
    "You normalize rows, as anGPT does. w_o and w_down write into h: which of their "
    "axes is indexed by h's channels?":
        partial(unit_matrices, axes=(1, 1, 1, 1)),
    "You normalize columns. w_qkv and w_up read from h: which of their axes is indexed "
    "by h's channels?":
        partial(unit_matrices, axes=(0, 0, 0, 0)),
    "You took exactly the other axis each time. torch stores a linear map as (out, in), the "
    "transpose of the paper's layout.":
        partial(unit_matrices, axes=(0, 1, 0, 1)),
    "w_o is square, so its shape does not tell which axis it is. It writes into h, as w_down "
    "does.":
        partial(unit_matrices, axes=(1, 1, 1, 0)),
    "You divide each matrix by one number. Each vector along the axis should get length 1 by "
    "itself.":
        lambda *weights: tuple(w / w.norm() for w in weights),
    "You divide by the squared lengths. Is a root missing, or do you divide twice?":
        partial(unit_matrices, power=1.0),
})


# 4.8 ----------------------------------------------------------------------------------------------

def update_inputs(generator):
    w = directions(generator, 3, 16)
    yield "one large step", w, randn(generator, 1, 3, 16), 0.1
    yield "fifty steps", w, randn(generator, 50, 3, 16), 0.05
    same_each_time = randn(generator, 3, 16).expand(200, 3, 16)
    yield "two hundred tiny steps", w, same_each_time, 1e-4
    yield "no step", w, torch.zeros(0, 3, 16), 0.1


def sphere_steps(w, gradients, lr, *, before=same, after=unit_rows, view=same):
    """before, after: what is done to the master at each step; view: to what is copied."""
    for gradient in gradients:
        w = after(before(w) - lr * gradient)
    return w, view(w).bfloat16()


def rows_through_bfloat16(w):
    return unit_rows(w).bfloat16().float()


def one_norm_at_the_end(w, gradients, lr):
    master = unit_rows(w - lr * gradients.sum(0))
    return master, master.bfloat16()


def bfloat16_master(w, gradients, lr):
    return sphere_steps(w.bfloat16(), gradients.bfloat16(), lr)


def arithmetic_in_bfloat16(w, gradients, lr, copy):
    master, _ = bfloat16_master(w, gradients, lr)
    return master.float(), copy


def steps_on_the_copy(w, gradients, lr):
    def after(w):
        return unit_rows(w.float()).bfloat16()

    master, copy = sphere_steps(w.bfloat16(), gradients.bfloat16(), lr, after=after)
    return master.float(), copy


def steps_rounded(w, gradients, lr):
    return sphere_steps(w, (lr * gradients.bfloat16()).float(), 1.0)


UPDATES = Exercise(
    reference=sphere_steps, inputs=update_inputs, tolerance=1e-4, parts=("master", "copy"),
    misconceptions={
    "You round your steps to bfloat16. Round only the copy.":
        steps_rounded,
    "Your master is the bfloat16 copy. Return the float32 master, and round only the copy.":
        lambda copy: (copy, copy),
    "Your copy is the master itself, not rounded. Make it bfloat16.":
        lambda master: (master, master),
    "Your copy is float16. Make it bfloat16.":
        lambda master: (master, master.half()),
    "Your master is rounded to bfloat16 at the end. Return the float32 master, and round only the "
    "copy.":
        lambda copy: (copy.float(), copy),
    "Your master is rounded to bfloat16 and then normalized once more. Return the float32 master, "
    "and round only the copy.":
        lambda copy: (unit_rows(copy.float()), copy),
    # Before the next one, whose copy is the same: this sentence is true of that copy, too.
    "You normalize once, at the end. Every step has to start on the sphere.":
        one_norm_at_the_end,
    "Your master keeps the length that each step gives it, and the next step starts from there. "
    "It is not enough to normalize the copy.":
        partial(sphere_steps, after=same, view=unit_rows),
    "Your master passes through bfloat16, so steps below its resolution are lost. Round only the "
    "copy.":
        partial(sphere_steps, after=rows_through_bfloat16),
    "After the last step your rows are off the sphere. Do you normalize before each step instead "
    "of after it, or return w from before its norm?":
        partial(sphere_steps, before=unit_rows, after=same),
    "Your master is bfloat16. Keep the master and its arithmetic in float32, and make the copy at "
    "the end.":
        bfloat16_master,
    "You normalize nothing, so after the first step the rows are off the sphere.":
        partial(sphere_steps, after=same),
    "You do the arithmetic of the steps in bfloat16, where small steps are lost. Round only the "
    "copy.":
        arithmetic_in_bfloat16,
    "You make the steps on the bfloat16 copy, where small ones are lost. Make them on the float32 "
    "master.":
        steps_on_the_copy,
})


# 4.9 ----------------------------------------------------------------------------------------------

def condition_inputs(generator):                    # odd numbers of heads: they have one median
    yield "3 heads of 4", randn(generator, 36, 12), 3
    yield "5 heads of 2", randn(generator, 30, 10), 5
    yield "one head", randn(generator, 24, 8), 1
    yield "tiny weights", 1e-3 * randn(generator, 45, 15), 5
    u, _, v = torch.linalg.svd(randn(generator, 3, 8, 8))
    weights = u * torch.linspace(1, 1 / 120, 8) @ v
    yield "one head with a condition number of 120", weights.flatten(0, 1), 1
    # In float64, so that the third head's number does not depend on how it is computed.
    u, _, v = torch.linalg.svd(randn(generator, 3, 3, 3, 9).double(), full_matrices=False)
    singular_values = torch.tensor([[1, 0.5, 1 / 3], [1, 0.2, 1 / 40], [1, 1, 1e-6]]).double()
    weights = u * singular_values[:, None] @ v      # (q, k or v, head, d_k, d)
    yield "heads with condition numbers of 3, 40 and a million", weights.flatten(0, 2), 3


def neighboring_rows(w, n_head):
    """(d, d) -> (n_head, d_k, d)"""
    return w.unflatten(0, (n_head, -1))


def head_conditions(w_qkv, n_head, *, split=neighboring_rows, middle=torch.median):
    found = []
    for w in w_qkv.double().chunk(3):
        heads = split(w, n_head)
        eigenvalues = torch.linalg.eigvalsh(heads @ heads.mT)           # (n_head, d_k), ascending
        largest_over_smallest = eigenvalues[:, -1] / eigenvalues[:, 0]
        found.append(middle(largest_over_smallest.sqrt()))
    return torch.stack(found)


def every_nth_row(w, n_head):
    return w.unflatten(0, (-1, n_head)).transpose(0, 1)


def rows_torn_apart(w, n_head):
    return w.reshape(n_head, w.shape[1], -1).mT


def place_of_median(conditions):
    return conditions.median(0).indices


def heads_first(w_qkv, n_head):
    by_head = w_qkv.unflatten(0, (n_head, 3, -1))
    return head_conditions(by_head.transpose(0, 1).flatten(0, 2), n_head)


CONDITION = Exercise(reference=head_conditions, inputs=condition_inputs, tolerance=1e-3,
                     parts=("q", "k", "v"), misconceptions={
    "That is the condition number of the whole matrix. Take each head's d_k rows by themselves, "
    "then the median over heads.":
        lambda w_qkv: head_conditions(w_qkv, 1),
    "A head has d_k neighboring rows. You took every n_head-th row.":
        partial(head_conditions, split=every_nth_row),
    "That is the mean over the heads. The median is asked for, as in nGPT's Figure 5: one bad head "
    "does not move it much.":
        partial(head_conditions, middle=torch.mean),
    "Your shape (3, n_head, d, d_k) tears the rows apart: the last axis is d, and a head has d_k "
    "rows.":
        partial(head_conditions, split=rows_torn_apart),
    "median(dim) returns two things, the medians and their positions. You took the positions.":
        partial(head_conditions, middle=place_of_median),
    "That is the largest over the heads. The median is asked for.":
        partial(head_conditions, middle=torch.max),
    "You split by heads first. In w_qkv all of W_q comes first, then W_k, then W_v, and each of "
    "them has n_head heads.":
        heads_first,
})


# 4.10 ---------------------------------------------------------------------------------------------

def context_inputs(generator):
    config = GPTConfig(arch="ngpt", vocab_size=7, block_size=16, n_layer=1, n_head=2, n_embd=8)
    model = GPT(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(randn(generator, weight.shape))
    tokens = torch.randint(7, (3, 17), generator=generator)
    yield "all 16 tokens as context", model, tokens, 16, 4
    yield "8 tokens of context", model, tokens, 8, 4
    yield "as much context as targets", model, tokens, 4, 4
    yield "one target", model, tokens, 12, 1


def log_loss(logits, y):
    return -logits.log_softmax(-1).gather(2, y[..., None])


def late_loss(model, tokens, context, last, *, of=log_loss):
    x = tokens[:, -context - 1:-1]
    y = tokens[:, -context:]
    logits, _ = model(x, y)
    return of(logits, y)[:, -last:].mean()


def start_of_window(model, tokens, context, last):
    return late_loss(model, tokens[:, :context + 1], context, last)


def own_input(model, tokens, context, last):
    return late_loss(lambda x, y: model(y, y), tokens, context, last)


def input_as_target(model, tokens, context, last):
    return late_loss(model, tokens, context, last, of=lambda logits, y: log_loss(
        logits, tokens[:, -context - 1:-1]))


def shifted_twice(model, tokens, context, last):
    return late_loss(model, tokens, context, last, of=lambda logits, y: log_loss(
        logits[:, :-1], y[:, 1:]))


def window_for_each(model, tokens, context, last):
    found = []
    for end in range(tokens.shape[1] - last + 1, tokens.shape[1] + 1):
        found.append(late_loss(model, tokens[:, :end], min(end - 1, context), 1))
    return torch.stack(found).mean()


def context_before_the_first(model, tokens, context, last):
    longest = tokens.shape[1] - 1
    return late_loss(model, tokens, min(context + last - 1, longest), last)


def logits_of_the_last_position(model, tokens, context, last):
    def of(x, y):
        return model(x)[0].expand(-1, y.shape[1], -1), None
    return late_loss(of, tokens, context, last)


CONTEXT = Exercise(reference=late_loss, inputs=context_inputs, misconceptions={
    "You keep the start of each row, so each context length has other targets. Keep its end.":
        start_of_window,
    "The target of a token is the next token. You ask the model to predict its own input.":
        own_input,
    "Your targets are the inputs themselves. The target of a token is the next token.":
        input_as_target,
    "You shift twice. The targets are one place later than the inputs already, so the logits of "
    "position t belong to target t.":
        shifted_twice,
    "You always give the model the whole row. Give it only `context` tokens.":
        lambda model, tokens, last: late_loss(model, tokens, tokens.shape[1] - 1, last),
    "Your loss is the one with only context - 1 tokens before the last token. `context` inputs and "
    "the last target make context + 1 tokens: which ones do you take from the end of the row?":
        lambda model, tokens, context, last: late_loss(model, tokens, context - 1, last),
    "That is the sum of the losses. Their mean is asked for.":
        lambda tokens, last, right: right * len(tokens) * last,
    "You use the last row only. Do you flatten rows and positions before you keep the last ones?":
        lambda model, tokens, context, last: late_loss(model, tokens[-1:], context, last),
    "You use only the logits of the last position. Do you call model(x) without y?":
        logits_of_the_last_position,
    "You use the first row only.":
        lambda model, tokens, context, last: late_loss(model, tokens[:1], context, last),
    "In yours each target has a window of its own. Here all targets of a row share one window: the "
    "`context` tokens before the last token.":
        window_for_each,
    "Your windows begin `context` tokens before the first of the targets. They should begin "
    "`context` tokens before the row's last token.":
        context_before_the_first,
    "You average over all positions of the window. Only the last `last` of them count.":
        lambda model, tokens, context: late_loss(model, tokens, context, context),
    "You take the softmax twice: cross_entropy and log_softmax take logits, not probabilities.":
        partial(late_loss, of=lambda logits, y: log_loss(logits.softmax(-1), y)),
    "Those are probabilities. The loss is the mean of -log p.":
        partial(late_loss, of=lambda logits, y: -logits.softmax(-1).gather(2, y[..., None])),
    "You take the logarithm of the mean probability. The loss is the mean of -log p.":
        lambda model, tokens, context, last: -(-late_loss(
            model, tokens, context, last,
            of=lambda logits, y: -logits.softmax(-1).gather(2, y[..., None]))).log(),
    "That is the share of targets that the model's likeliest token hits. The loss is the mean of "
    "-log p.":
        partial(late_loss, of=lambda logits, y: (logits.argmax(-1) == y).double()),
})


# 4.11 ---------------------------------------------------------------------------------------------

def ngpt_inputs(generator):
    def scales(n):
        return 1 + 0.3 * randn(generator, n)

    def case(n_head, d, length, size=0.3):
        w_qkv, w_o, w_up, w_down = unit_matrices(*random_matrices(generator, d))
        p = {
            "w_qkv": w_qkv,
            "w_o": w_o,
            "w_up": w_up,
            "w_down": w_down,
            "s_qk": scales(d),
            "s_u": scales(4 * d),
            "s_v": scales(4 * d),
            "alpha_a": size * randn(generator, d),
            "alpha_m": size * randn(generator, d),
        }
        return directions(generator, 2, length, d), p, n_head, *rope_tables(length, d // n_head)

    yield from block_inputs(case)


def turned_normed_scaled(x, s, cos, sin):
    return unit_rows(turned(x, cos, sin)) * s


def attention(h, p, n_head, cos, sin, *, cut=neighboring_channels, prepared=turned_normed_scaled,
              k_scaled=True, s_qk_by_channel=False, v_normed=False, power=0.5, hidden_from=1,
              hidden_score=-math.inf, mask_after_softmax=False, nan=math.nan, merged=side_by_side):
    """power: of d_k in the scores' factor; nan: what a softmax over nothing gives."""
    q, k, v = [cut(x, n_head) for x in (h @ p["w_qkv"].T).chunk(3, dim=-1)]
    if v_normed:
        v = unit_rows(v)
    d_k = q.shape[-1]
    s_q = p["s_qk"].view(n_head, 1, d_k)
    if s_qk_by_channel:
        s_q = p["s_qk"].view(d_k, n_head).T[:, None]
    s_k = s_q
    if not k_scaled:
        s_k = torch.ones_like(s_q)
    q = prepared(q, s_q, cos, sin)
    k = prepared(k, s_k, cos, sin)
    if mask_after_softmax:
        weights = (d_k ** power * q @ k.mT).softmax(-1).tril()
        y = weights @ v
    else:
        y = attend(q, k, v, d_k ** power, hidden_from, hidden_score).nan_to_num(nan)
    return merged(y) @ p["w_o"].T


BOTH = ("alpha_a", "alpha_m")                       # attention's step and the MLP's


def ngpt_block(h, p, n_head, cos, sin, *, normed=BOTH, retracted=BOTH, absolute=True,
               parallel=False, second_from="after", halves_exchanged=False, gate_width=1,
               silu_of_u=False, scales=("s_u", "s_v"), without=None, **of_attention):
    """normed: the steps whose branch is normed; retracted: those that end in a norm; second_from:
    where the MLP's step starts, "after" attention's or at "h"; gate_width: of the vector whose
    width's root is the gate's factor, in units of d (None: no factor); scales: of u and of the
    gate; without: a scale that does not enter; of_attention: keywords of attention."""
    if without:
        p = {**p, without: torch.ones_like(p[without])}

    def step(h, branch, which):
        alpha = p[which]
        if absolute:
            alpha = alpha.abs()
        if which in normed:
            branch = unit_rows(branch)
        there = h + alpha * (branch - h)
        if which in retracted:
            return unit_rows(there)
        return there

    after = step(h, attention(h, p, n_head, cos, sin, **of_attention), "alpha_a")
    read = after
    if parallel:
        read = h
    u, z = (read @ p["w_up"].T).chunk(2, dim=-1)
    if halves_exchanged:
        u, z = z, u
    u = u * p[scales[0]]
    z = z * p[scales[1]]
    if gate_width:
        z = z * math.sqrt(gate_width * h.shape[-1])
    if silu_of_u:
        u, z = z, u
    start = after
    if second_from == "h":
        start = h
    return step(start, (u * silu(z)) @ p["w_down"].T, "alpha_m")


def not_normed(x, s, cos, sin):
    return turned(x, cos, sin) * s


def scaled_first(x, s, cos, sin):
    return unit_rows(turned(x * s, cos, sin))


def rope_last(x, s, cos, sin):
    return turned(unit_rows(x) * s, cos, sin)


BLOCK = Exercise(reference=ngpt_block, inputs=ngpt_inputs, tolerance=1e-4, misconceptions={
    "Your softmax factor is the Transformer's. Here q and k are unit vectors: see exercise 4.6.":
        partial(ngpt_block, power=-0.5),
    "In yours a token attends to all later ones. Is there a mask, and do you use its result?":
        partial(ngpt_block, hidden_from=NO_TOKEN),
    "Your mask hides each token from itself, too. A token sees itself and those before it.":
        partial(ngpt_block, hidden_from=0, nan=0.0),
    "Your mask hides each token from itself, so the first token sees nothing, and a softmax of "
    "nothing is NaN.":
        partial(ngpt_block, hidden_from=0),
    "A head has d_k neighboring channels of q, k and v. Yours has every n_head-th one.":
        partial(ngpt_block, cut=every_nth_channel),
    "q and k are not normalized (eq. 15, 16).":
        partial(ngpt_block, prepared=not_normed),
    "You apply s_qk before the norm (or before rope). It comes last.":
        partial(ngpt_block, prepared=scaled_first),
    "You multiply only one of q and k by s_qk. In eq. 15 and 16 it multiplies both.":
        partial(ngpt_block, k_scaled=False),
    "You put the heads' outputs together wrongly. Exchange the axes H and T first, so that the "
    "heads of one token stand side by side.":
        partial(ngpt_block, merged=heads_one_by_one),
    "You use the branches' outputs as they are. They have to become unit vectors before the step "
    "(the Norm in eq. 14 and 19).":
        partial(ngpt_block, normed=()),
    "The Norm after a step is missing (eq. 10, 11).":
        partial(ngpt_block, retracted=()),
    "Attention's output goes into its step without its Norm.":
        partial(ngpt_block, normed=("alpha_m",)),
    "The MLP's output goes into its step without its Norm.":
        partial(ngpt_block, normed=("alpha_a",)),
    "The Norm after attention's step is missing (eq. 10).":
        partial(ngpt_block, retracted=("alpha_m",)),
    "rope comes first. You apply it to what was normalized and scaled already.":
        partial(ngpt_block, prepared=rope_last),
    # This stands before the next two: pairs are tried in this order, and some pairs agree.
    "Your gate's argument is still a cosine: see eq. 21.":
        partial(ngpt_block, gate_width=None),
    "s_u and s_v are exchanged: s_u belongs to u (eq. 20) and s_v to the gate (eq. 21).":
        partial(ngpt_block, scales=("s_v", "s_u")),
    "u and the gate are exchanged: the first 4d rows of w_up are u's.":
        partial(ngpt_block, halves_exchanged=True),
    "s_u does not enter (eq. 20).":
        partial(ngpt_block, without="s_u"),
    "s_qk does not enter (eq. 15, 16).":
        partial(ngpt_block, without="s_qk"),
    "Your scores have no factor, or one that is 1 in all: see exercise 4.6. (By default "
    "scaled_dot_product_attention divides by sqrt(d_k).)":
        partial(ngpt_block, power=0.0),
    "With a negative alpha your step walks away from the proposal. Take the absolute value.":
        partial(ngpt_block, absolute=False),
    "The factor of your gate is sqrt(4d). It should be sqrt(d), where d is the number of h's "
    "channels (eq. 21).":
        partial(ngpt_block, gate_width=4),
    "You set weights to 0 after the softmax, so those that are left do not add up to 1. Mask the "
    "scores, before the softmax.":
        partial(ngpt_block, mask_after_softmax=True),
    "s_qk is given head by head: the first d_k numbers are for the first head.":
        partial(ngpt_block, s_qk_by_channel=True),
    "You normalize v as well. In nGPT only q and k are normalized.":
        partial(ngpt_block, v_normed=True),
    "The scores that your mask hides are 0, and a score of 0 still gets some weight. They should "
    "be -inf.":
        partial(ngpt_block, hidden_score=0.0),
    "SiLU is applied to u. The first 4d rows of w_up are u's, then the gate's.":
        partial(ngpt_block, silu_of_u=True),
    "Your MLP reads the h from before attention's step. It should read the h after it.":
        partial(ngpt_block, parallel=True),
    "Your MLP reads the right h, but its step starts from the h before attention's step, so "
    "attention's step is lost.":
        partial(ngpt_block, second_from="h"),
    "Your MLP reads, and its step starts from, the h before attention's step. Both should use the "
    "h after it.":
        partial(ngpt_block, parallel=True, second_from="h"),
    "Attention's step goes all the way to its output: alpha_a is missing.":
        partial(ngpt_block, without="alpha_a"),
    "The MLP's step goes all the way to its output: alpha_m is missing.":
        partial(ngpt_block, without="alpha_m"),
})


# 4.12  Norms of q and k, before rope or behind it -------------------------------------------------

def query_inputs(generator):
    q = 3 * randn(generator, 2, 3, 5, 8)                      # (B, H, T, d_k)
    of_head = 0.5 + torch.rand(8, generator=generator)
    of_all = 0.5 + torch.rand(3, 8, generator=generator)
    of_head[1] = -1.0                                         # a gain may be below 0
    of_all[1, 2] = -1.0
    angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    cos = angles.cos()
    sin = angles.sin()
    with_zeros = q.clone()
    with_zeros[0, :, 2] = 0
    for where, before_rope in (("before", True), ("behind", False)):
        yield f"a gain for a head's channels, {where} rope", q, of_head, cos, sin, before_rope
        yield f"a gain for all heads' channels, {where} rope", q, of_all, cos, sin, before_rope
    yield "a token of zeros", with_zeros, of_all, cos, sin, True
    yield "two of four pairs turned", q, of_all, cos[:, :2], sin[:, :2], True
    yield "one head", q[:, :1], of_all[:1], cos, sin, False
    yield "a small q", 0.001 * q, of_head, cos, sin, True
    square = 3 * randn(generator, 2, 4, 5, 4)                 # as many heads as channels of a head
    yield "four heads of four channels", square, of_head[:4], cos[:, :2], sin[:, :2], True


def normed_and_turned(q, gain, cos, sin, before_rope, *, axes=None, centered=False, of=torch.mean,
                      eps=1e-6, turned_only=False, of_variance=False):
    """axes: those of the mean square. turned_only: it covers only channels that rope turns."""
    if axes is None:
        axes = (-1,)
        if gain.dim() == 2:
            axes = (1, -1)                          # heads and their channels
    if gain.dim() == 2:
        gain = gain[:, None]                        # (H, 1, d_k)

    def norm(x):
        if centered:
            x = x - x.mean(axes, keepdim=True)
        squares = x * x
        if of_variance:
            squares = (x - x.mean(axes, keepdim=True)).square()
        if turned_only:
            squares = squares[..., :2 * cos.shape[-1]]
        square = of(squares, axes, keepdim=True)
        return x / (square + eps).sqrt() * gain

    if before_rope:
        return turned(norm(q), cos, sin)
    return norm(turned(q, cos, sin))


def other_order(q, gain, cos, sin, before_rope):
    return normed_and_turned(q, gain, cos, sin, not before_rope)


def not_exchanged_back(q, gain, cos, sin, before_rope):
    if gain.dim() == 1:
        return normed_and_turned(q, gain, cos, sin, before_rope)

    def norm(x):
        square = (x * x).mean((1, -1), keepdim=True)
        y = x / (square + 1e-6).sqrt() * gain[:, None]
        return y.transpose(1, 2).reshape(x.shape)

    if before_rope:
        return turned(norm(q), cos, sin)
    return norm(turned(q, cos, sin))


def over_tokens_too(q, gain, cos, sin, before_rope):
    axes = (1, 2, 3) if gain.dim() == 2 else (-1,)
    return normed_and_turned(q, gain, cos, sin, before_rope, axes=axes)


def told_by_size(q, gain, cos, sin, before_rope):
    axes = (-1,)
    if gain.shape[0] == q.shape[1]:
        axes = (1, -1)
        gain = gain.view(q.shape[1], -1)
    return normed_and_turned(q, gain, cos, sin, before_rope, axes=axes)


def without_gain(q, gain, cos, sin, before_rope):
    return normed_and_turned(q, torch.ones_like(gain), cos, sin, before_rope)


NORMED_QUERIES = Exercise(reference=normed_and_turned, inputs=query_inputs, misconceptions={
    "Your gain is always before rope, whatever before_rope says. (Only the division could stand on "
    "either side.)":
        lambda q, gain, cos, sin: normed_and_turned(q, gain, cos, sin, True),
    "Your gain is always after rope, whatever before_rope says. (Only the division could stand on "
    "either side.)":
        lambda q, gain, cos, sin: normed_and_turned(q, gain, cos, sin, False),
    "You have the two orders exchanged: before_rope is True where the norm comes first, then "
    "rope.":
        other_order,
    "A gain (H, d_k) belongs to a norm over all heads: there is one mean square per token, over "
    "H d_k channels, not one per head.":
        partial(normed_and_turned, axes=(-1,)),
    "A gain (d_k,) belongs to a norm of each head by itself: every head has a mean square of its "
    "own.":
        partial(normed_and_turned, axes=(1, -1)),
    "Your mean square runs over the tokens as well, so later tokens change earlier ones. Keep the "
    "axis T.":
        partial(normed_and_turned, axes=(2, -1)),
    "With a gain (H, d_k) your mean square runs over the tokens, too. Keep the axis T.":
        over_tokens_too,
    "Your mean square covers only the channels that rope turns. The norm covers all of them.":
        partial(normed_and_turned, turned_only=True),
    "You divide by the standard deviation, from which the mean is left out. RMSNorm takes the mean "
    "of the squares.":
        partial(normed_and_turned, of_variance=True),
    "After joining the heads you cut them apart without exchanging the axes of heads and tokens "
    "back.":
        not_exchanged_back,
    "You subtract a mean, as LayerNorm does. RMSNorm does not.":
        partial(normed_and_turned, centered=True),
    "You divide by the length. RMSNorm divides by the root of the mean square, which is smaller "
    "by sqrt(channels).":
        partial(normed_and_turned, of=torch.sum),
    "With four heads of four channels you take a gain (4,) for one that belongs to all heads. Its "
    "number of axes tells the two kinds apart, its first size does not.":
        told_by_size,
    "The gain is missing.":
        without_gain,
    "Without eps a token of zeros gives 0/0, which is NaN, and a small q comes out too large. "
    "Add eps inside the root.":
        partial(normed_and_turned, eps=0.0),
}, without=("rms_norm", "RMSNorm"))


# 4.13  Which gains let rope through ---------------------------------------------------------------

PAIRS = {0: "no pair", 1: "one pair", 2: "two pairs", 4: "four pairs"}


def gain_inputs(generator):
    values = {"2": 2.0}
    for letter, value in zip("abcd", (0.5 + torch.rand(4, generator=generator)).tolist()):
        values[letter] = value
        values["-" + letter] = -value
    values["nearly-d"] = values["d"] + 0.01

    def case(letters, pairs):
        gain = [values[letter] for letter in letters.split()]
        return f"{letters}, {PAIRS[pairs]}", torch.tensor(gain), pairs

    yield "eight ones, four pairs", torch.ones(8), 4
    yield "eight times 0.3, four pairs", torch.full((8,), 0.3), 4
    yield case("a b c d a b c d", 4)
    yield case("a a b b c c d d", 4)
    yield case("a b c d -a -b -c -d", 4)
    yield case("a b c d a b c 2", 4)
    yield case("a b c d a b c nearly-d", 4)
    yield case("a b a b a b c d", 2)
    yield case("a b c d a b c d", 2)
    yield case("a a a a a b c d", 1)
    yield case("a 2 c d a b c d", 4)
    yield case("2 b c d a b c d", 4)
    yield case("a b b a a b c d", 2)
    yield case("a b c d", 0)


def commutes(gain, pairs):
    return all(gain[i] == gain[i + pairs] for i in range(pairs))


def halves_equal(gain):
    first, second = gain.chunk(2)
    return torch.equal(first, second)


def rest_equal_too(gain, pairs):
    rest = gain[2 * pairs:]
    return commutes(gain, pairs) and bool((rest == gain[-1]).all())


GAIN_ABOUT = {
    "eight ones, four pairs":
        "There are gains that commute with rope. What does a rotation make of a vector times one "
        "number?",
    "eight times 0.3, four pairs":
        "The factor need not be 1: a rotation commutes with any factor that all channels share.",
    "a b c d a b c d, four pairs":
        "a b c d a b c d: each pair, channel i with channel i + pairs, turns in a plane of its "
        "own. What do its two gains have to fulfil?",
    "a b c d -a -b -c -d, four pairs":
        "Signs count: a reflection and a rotation do not commute.",
    "a b c d a b c 2, four pairs":
        "a b c d a b c 2: look at the last pair, which turns too.",
    "2 b c d a b c d, four pairs":
        "2 b c d a b c d: look at the first pair, which turns too.",
    "a b b a a b c d, two pairs":
        "a b b a a b c d, two pairs: rope turns channel 0 with 2 and 1 with 3. Which channels do "
        "you compare? The same values, or the same sum, are not enough.",
    "a a b b c c d d, four pairs":
        "a a b b ...: which channel is turned together with channel 0?",
    "a b c d a b c nearly-d, four pairs":
        "a b c d a b c nearly-d: nearly equal is not equal. Do you compare the last pair, and do "
        "you allow a difference?",
    "a b c d, no pair":
        "Without a pair rope turns nothing. Can the order matter then?",
    "a a a a a b c d, one pair":
        "One pair: only channels 0 and 1 are turned.",
}

COMMUTES = Exercise(reference=commutes, inputs=gain_inputs, about=GAIN_ABOUT, misconceptions={
    "You always answer True. Rope keeps the length, so the order does not matter for the division. "
    "But a gain may stretch the two axes of a plane differently. Do you try more than position 0, "
    "which is not turned?":
        lambda: True,
    "You ask for the same gain in all channels. That is sufficient but not necessary: every pair "
    "turns in a plane of its own.":
        lambda gain: bool((gain == gain[0]).all()),
    "You pair neighbors, 2i and 2i + 1. Here channel i turns with channel i + pairs: see rope in "
    "model.py.":
        lambda gain, pairs: torch.equal(gain[0:2 * pairs:2], gain[1:2 * pairs:2]),
    "You pair the two halves of the head. With fewer pairs than that, channel i turns with i + "
    "pairs, and the rest does not turn at all.":
        halves_equal,
    "You also compare channels that rope does not turn. They may have any gain.":
        rest_equal_too,
    "One equal pair is enough in yours (any). Every pair must have equal gains.":
        lambda gain, pairs: pairs == 0 or bool((gain[:pairs] == gain[pairs:2 * pairs]).any()),
    "One equal pair is enough in yours (any), and without a pair it says False. Every pair must "
    "have equal gains.":
        lambda gain, pairs: bool((gain[:pairs] == gain[pairs:2 * pairs]).any()),
    "You compare only the first pair. Does a `return` stand inside the loop?":
        lambda gain, pairs: bool(pairs == 0 or gain[0] == gain[pairs]),
})


# What holds of every right answer: said where none of the known mistakes fits ---------------------


def has_a_zero_row(a, b):
    return not (a.any(dim=-1).all() and b.any(dim=-1).all())


def right_for_long_rows(y, right, a, b):
    long_a = a.norm(dim=-1) >= 1
    long_b = b.norm(dim=-1) >= 1
    return near(y[long_a][:, long_b], right[long_a][:, long_b])


def exact_in_3(y, d):
    """Does not hold of what is nearly right only."""
    return d != 3 or near(y, 0.5, 1e-5) or not near(y, 0.5, 0.02)


def on_the_sphere(there):
    return near(there.norm(dim=-1), 1)


def share_of_the_angle(y, a, b, alpha):
    theta = (a * b).sum(-1).clamp(-1, 1).acos()
    # The cosines of small angles differ too little to be compared.
    ours = torch.atan2((y - along(a, y) * a).norm(dim=-1), (y * a).sum(-1))
    return near(ours, alpha * theta, 0.01)


def right_for_large_angles(y, right, a, b):
    is_large = along(a, b)[..., 0] < 0.9
    return near(y[is_large], right[is_large])


def leads_towards(there, h, y, alpha):
    closer = along(there, y) >= along(h, y) - 1e-3
    return closer.all() or torch.is_tensor(alpha)


def as_far_as_the_tangent_step(there, h, y, alpha):
    if torch.is_tensor(alpha):
        return True
    squared_tangent = along(there, h) ** -2 - 1         # of the angle between h and y
    squared_sine = 1 - along(h, y) ** 2
    return near(squared_tangent, alpha ** 2 * squared_sine, 1e-4)


def same_numbers(y, right):
    return near(torch.stack(y), torch.stack(right))


def is_small(q):
    return q.abs().max() < 0.1


PROPERTIES = {
    "4.1": {
        "There should be one cosine for each row of a with each row of b: shape (n, m).":
            lambda y, a, b: y.shape == (len(a), len(b)),
        "A cosine lies between -1 and 1. Some of yours do not.":
            lambda y: y.abs().max() < 1.001,
        "Even with one row each, what you return is not the cosine. Do you divide by the lengths "
        "of the two rows, and is each length the root of a sum of squares, with nothing added?":
            lambda y, right, a: len(a) != 1 or near(y, right),
        "A row of zeros has no direction. The exercise asks for 0 there.":
            lambda y, a: a[-1].any() or near(y[-1], 0),
        "Where the dot product of two rows is below 0, their cosine is below 0 too. Yours is not.":
            lambda y, a, b: (y * (a @ b.T) >= 0).all(),
        "With one row each yours is right, with several it is not. By which two lengths do you "
        "divide the dot product of row i and row j? Do you return 0 where neither row is zero?":
            lambda y, right, a, b: has_a_zero_row(a, b) or right_for_long_rows(y, right, a, b),
        "Without a row of zeros yours is right. With one, the cosines of the other rows should be "
        "what they are without it.":
            right_for_long_rows,
        "Your guard against 0/0 also changes rows that are merely short. If you add a number to a "
        "length, or allow no length below some minimum, that number is too large: only a row of "
        "zeros has no direction.":
            never},
    "4.2": {
        "Yours is nearly right in 3 dimensions, but five digits are asked for. A sum over a grid "
        "needs a finer grid; random numbers will not do; a formula must be exact for small d too.":
            exact_in_3,
        "In 3 dimensions all cosines from -1 to 1 are equally likely. What is the mean absolute "
        "value of such a number? Your function gives another one for d = 3.":
            lambda y, d: d != 3 or near(y, 0.5, 1e-4),
        "For large d a cosine is normal, with standard deviation 1/sqrt(d). What is the mean "
        "absolute value of such a number? Your function gives another one for d = 1024. (If you "
        "add up over a grid: do enough of its points lie within 1/sqrt(d) of 0, and do you divide "
        "by the sum of the density itself?)":
            lambda y, d: d != 1024 or near(32 * y, math.sqrt(2 / math.pi), 0.002),
        "Yours is right for d = 3, and right or nearly so for d = 1024, but not for every d. Is it "
        "an approximation, is a grid too coarse, or is something rounded?":
            never},
    "4.3": {
        "Not all of your points lie on the sphere: some have a length other than 1.":
            on_the_sphere,
        "With alpha 0 you do not stay at a.":
            lambda y, a, alpha: alpha != 0 or near(y, a),
        "With alpha 1 you do not arrive at b.":
            lambda y, b, alpha: alpha != 1 or near(y, b),
        "The angle from a to your point is not alpha times the angle from a to b.":
            share_of_the_angle,
        "The angle from a is right. Does your point lie between a and b, in their plane?":
            right_for_large_angles,
        "Yours is right except where the angle is small. Do you treat small angles apart, or allow "
        "no sine below some minimum?":
            never},
    "4.4": {
        "Not all of your points lie on the sphere: some have a length other than 1.":
            on_the_sphere,
        "Where y = h there is nowhere to go, but your step leaves h.":
            lambda there, h, y: not near(h, y) or near(there, h),
        "A step towards y should not lead away from y. For some pairs yours does.":
            leads_towards,
        "Your step does not have the tangent step's length, which is alpha times the sine of the "
        "angle between h and y.":
            as_far_as_the_tangent_step,
        "With a number for alpha your step has the right length. What does a vector alpha "
        "multiply?":
            never},
    "4.5": {
        "The step: the used value is the stored number times a constant, so both move by the same "
        "share of their start. In yours the value's step over init is not that share.":
            lambda y, lr, init, scale: near(y[0] / init, lr / scale),
        "Your step is right. The share should be this step over the value's start, init.":
            lambda y, init: near(y[1], y[0] / init),
        "Step and share are right. To double, a value has to move by its start once: your number "
        "of steps, not rounded, times your share should be 1.":
            lambda y: near(y[1] * y[2], 1)},
    "4.6": {
        "The first: a sum of d_k products has variance d_k. Your factor squared, times this "
        "variance, is not 1.":
            lambda y, d_k: near(y[0] ** 2 * d_k, 1),
        "The second: a cosine in d_k dimensions has variance 1 / d_k. Your factor squared, times "
        "this variance, is not 1.":
            lambda y, d_k: near(y[1] ** 2 / d_k, 1),
        "The first two are right. s_qk multiplies both q and k, so the square of the third should "
        "be the second. Yours is not.":
            lambda y: near(y[2] ** 2, y[1])},
    "4.7": {
        "w_qkv reads h: each vector along the axis of h's channels should get length 1. "
        "Not all of yours do.":
            lambda y: near(y[0].norm(dim=1), 1),
        "w_o writes into h: each vector along the axis of h's channels should get length 1. "
        "Not all of yours do.":
            lambda y: near(y[1].norm(dim=0), 1),
        "w_up reads h: each vector along the axis of h's channels should get length 1. "
        "Not all of yours do.":
            lambda y: near(y[2].norm(dim=1), 1),
        "w_down writes into h: each vector along the axis of h's channels should get length 1. "
        "Not all of yours do.":
            lambda y: near(y[3].norm(dim=0), 1),
        "Your vectors have length 1, but some of them have another direction than the given ones. "
        "Is each matrix normalized only once, and along one axis?":
            never},
    "4.8": {
        "Not every row of your master has length 1, to many digits.":
            lambda y: near(y[0].norm(dim=-1), 1),
        "Without any step the master should stay as it is.":
            lambda y, w, gradients: len(gradients) or near(y[0], w),
        "With a single gradient your master does not move against it. Does the loop use every "
        "gradient, and is the sign right?":
            lambda y, w, gradients: len(gradients) != 1 or ((y[0] - w) * gradients[0]).sum() < 0,
        "Your copy is not your master rounded to bfloat16.":
            lambda y: near(y[0], y[1], 0.01),
        "Even after a single step your master is elsewhere. Is your step lr times the gradient as "
        "it is given, and what is normalized after it?":
            lambda y, right, gradients: len(gradients) != 1 or near(y[0], right[0], 0.01),
        "Your master is nearly right. Is something rounded to bfloat16 on the way to it (round "
        "only the copy), is a small number added somewhere, or is there a weight decay in your "
        "step?":
            lambda y, right: near(y[0], right[0], 1e-4) or not near(y[0], right[0], 0.01),
        "A single large step of yours is right. With many, does each step take the next gradient, "
        "start where the previous one ended, and use the same lr?":
            never},
    "4.9": {
        "Three numbers are asked for: one for q, one for k and one for v.":
            lambda y: len(y) == 3,
        "The largest singular value over the smallest is at least 1. Some of yours are smaller.":
            lambda y: min(y) >= 0.999,
        "With one head q is right, but k or v is not: which rows of w_qkv are theirs?":
            lambda y, right, n_head: n_head > 1 or same_numbers(y, right)
            or not near(y[0], right[0]),
        "Even with one head yours is off. There W_q, W_k and W_v are one head each: do you take "
        "all of its rows, no others, and as they are given? Is its number what torch.linalg.cond "
        "gives for them?":
            lambda y, right, n_head: n_head > 1 or same_numbers(y, right),
        "With one head yours is right. Look at how the heads are cut, at what you compute for each "
        "(it has d_k singular values), and at what you take over the heads.":
            lambda y, right, w_qkv: w_qkv.dtype == torch.float64 or same_numbers(y, right),
        "Yours is off only where a head has nearly lost a direction. Its number is large, and it "
        "counts in the median as it is. Do you leave out or limit small singular values?":
            never},
    "4.10": {
        "Even where all positions of the context count, yours is off. Which tokens go in? Which "
        "are their targets? What becomes of the logits? Do you average over all positions of all "
        "rows?":
            lambda y, right, context, last: last != context or near(y, right),
        "Where all positions count yours is right. Where only some count: is the window still the "
        "`context` tokens before the last token, and do you keep, and average over, the last "
        "positions of both the logits and the targets?":
            never},
    "4.11": {
        "What leaves the block should lie on the sphere: length 1. Yours does not.":
            on_the_sphere,
        "With alpha_a of 0, where attention's step should leave h as it is, yours is off. If your "
        "step leaves h so, look at the MLP: what it reads, u and z with their scales, SiLU, "
        "w_down, its Norm and its step.":
            lambda y, right, p: p["alpha_a"].any() or near(y, right, 1e-4),
        "With alpha_a of 0 yours is right. With one head and one token, where the softmax gives 1 "
        "and so attention gives v, yours is off: do the MLP and its step both use the h that "
        "attention left? Otherwise look at the softmax, v, w_o, and attention's Norm and step.":
            lambda y, right, h, n_head: h.shape[1] > 1 or n_head > 1 or near(y, right, 1e-4),
        "With one head and one token yours is right. With several heads and one token, where each "
        "head gives its v, yours is off: which rows are v's, how are they cut into heads, is "
        "anything done to each head's output, and how are the heads joined?":
            lambda y, right, h: h.shape[1] > 1 or near(y, right, 1e-4),
        "With one token yours is right. Look at what matters only with several tokens: which rows "
        "are q's and k's, how the heads are split, rope, the norms and s_qk in each head, the "
        "scores with their factors, the mask, and the softmax's axis.":
            never},
    "4.12": {
        "With a gain for a head's channels yours is off even at the first token, which rope does "
        "not turn (cos is 1, sin 0). Look at the mean, the root, the gain, how often the norm acts "
        "and the order of rope's arguments.":
            lambda y, right, q, gain: gain.dim() == 2 or is_small(q) or q.shape[1] == q.shape[3]
            or near(y[:, :, 0], right[:, :, 0]),
        "For a small q yours is off. How large is eps, and do you add it inside the root?":
            lambda y, right, q: not is_small(q) or near(y[:, :, 0], right[:, :, 0]),
        "With a gain for all heads' channels yours is off even at the first token, which rope does "
        "not turn. There one mean is taken over the channels of all heads of a token. Over which "
        "axes is yours, by how many do you divide, and when do you take the root? If you join the "
        "heads, how do you join them and cut them apart, and is the gain cut in the same way?":
            lambda y, right, q, gain: gain.dim() == 1 or is_small(q)
            or near(y[:, :, 0], right[:, :, 0]),
        "With as many heads as channels of a head yours is off even at the first token. Do you "
        "tell a gain for a head's channels from one for all heads by its number of axes, not by a "
        "size, and do the mean and the gain belong to the channels' axis, not to that of the "
        "heads?":
            lambda y, right, q: is_small(q) or near(y[:, :, 0], right[:, :, 0]),
        "The first token, which rope does not turn, is right. For the others: how do you call "
        "rope, and what comes first?":
            never},
}


EXERCISES = {
    "4.1": COSINE,
    "4.2": MEAN_ABS,
    "4.3": SLERP,
    "4.4": RIEMANN,
    "4.5": RATES,
    "4.6": SCALES,
    "4.7": MATRICES,
    "4.8": UPDATES,
    "4.9": CONDITION,
    "4.10": CONTEXT,
    "4.11": BLOCK,
    "4.12": NORMED_QUERIES,
    "4.13": COMMUTES,
}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known


# Measurements that the notebook shows. They were run once, with the code that stands there. -------

# seed -> smallest and largest mean |alpha|, smallest and largest angle in degrees, and how many
# percent the tangent step, the arc, and the arc with alpha times 2/pi add to the loss
INSIDE = {
    1337: (0.12, 0.18, 66, 120, 0.73, 2.59, 1.12),
    1: (0.13, 0.19, 59, 122, 1.11, 2.59, 0.86),
    2: (0.10, 0.21, 71, 98, 0.83, 0.90, 0.62),
}

# seed -> for GPT, GPT+, nGPT without QK norm, nGPT, and GPT+ normalized afterwards
CONDITION_OF_W_Q = {
    1337: (9.5, 6.0, 4.8, 3.5, 4.6),
    1: (10.9, 5.4, 4.8, 3.9, 4.6),
    2: (10.6, 5.7, 4.6, 3.8, 4.7),
}

# seed -> nGPT's loss at 64 and at 256 tokens of context, then that of nGPT without QK norm
LOSS_AT_64_AND_256 = {
    1337: (2.157, 2.549, 2.145, 2.596),
    1: (2.121, 2.387, 2.128, 2.556),
    2: (2.076, 2.532, 2.121, 2.613),
}
