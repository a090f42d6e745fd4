"""
Lesson 4, nGPT: the sphere, its steps, its scales and its matrices. See grader.py for the form.

Equation and section numbers are those of nGPT (Loshchilov et al. 2024). The references are written without model.py's
functions; where it has the same thing, the notebook compares the two.
"""
import math
from functools import partial

import torch
import torch.nn.functional as F

from answers import near
from grader import Exercise
from model import GPT, GPTConfig


def directions(generator, *shape):
    """Random unit vectors along the last axis."""
    return F.normalize(torch.randn(*shape, generator=generator), dim=-1)


# 4.1 ------------------------------------------------------------------------------------------------------------------

def cosine_inputs(generator):
    a = torch.randn(3, 5, generator=generator)
    yield "three rows and four", a, torch.randn(4, 5, generator=generator)
    yield "one row each", a[:1], torch.randn(1, 5, generator=generator)
    yield "long and short rows", a * torch.tensor([[1e3], [1.0], [1e-3]]), torch.randn(5, 5, generator=generator)
    yield "a row of zeros", torch.cat((a, torch.zeros(1, 5))), a
    yield "a row of zeros in b", a, torch.cat((a[:1], torch.zeros(1, 5)))
    yield "rows shorter than 0.00000001", 5e-9 * directions(generator, 3, 5), a


def cosines(a, b, length=lambda x: x.square().sum(-1, keepdim=True).sqrt(), least=1e-12):
    return (a / length(a).clamp(min=least)) @ (b / length(b).clamp(min=least)).T


def cosines_shifted(a, b, eps):
    def unit(x):
        return x / (x.norm(dim=-1, keepdim=True) + eps)
    return unit(a) @ unit(b).T


COSINE = Exercise(                                          # the tolerance lets 1e-12 be added to a length
    reference=cosines, inputs=cosine_inputs, tolerance=1e-3, misconceptions=[
    (partial(cosines, least=1e-8),
     "Your guard against 0/0 is too large: it changes rows that are merely short. Only a row of zeros is without a "
     "direction."),
    (partial(cosines, least=1e-3), "Your guard against 0/0 changes all rows that are shorter than it."),
    (partial(cosines_shifted, eps=1e-8),
     "What you add to a length against 0/0 is larger than some of the lengths."),
    (partial(cosines_shifted, eps=1e-6), "What you add to a length against 0/0 makes the cosines of short rows small."),
    (lambda a, b: (a @ b.T) / (a.norm(dim=1)[:, None] * b.norm(dim=1)).clamp(min=1e-8),
     "Your guard against 0/0 holds down products of lengths that are merely small."),
    (lambda a, b: (a @ b.T) / (a.norm(dim=1)[:, None] * b.norm(dim=1) + 1e-8),
     "What you add to the product of two lengths against 0/0 is as large as some of these products."),
    (lambda a, b: a @ b.T, "These are dot products, which grow with the rows' lengths: a cosine does not."),
    (lambda a, b: cosines(a, b, lambda x: x.norm(dim=0, keepdim=True)),
     "You divide each column by its norm; the vectors here are the rows."),
    (lambda a, b: cosines(a, b, lambda x: x.norm()),
     "You divide by the norm of the whole matrix; each row has its own."),
    (lambda a, b: (a @ b.T) / (a.norm(dim=1)[:, None] * b.norm(dim=1)),
     "Right but for a row of zeros, which has no direction: 0/0 is NaN. Guard the division."),
    (lambda a, b: cosines(a, b / b.norm(dim=1, keepdim=True)),
     "You guard the rows of a only. b may have a row of zeros as well, and gets NaN from it."),
    (lambda a, b: cosines(a / a.norm(dim=1, keepdim=True), b),
     "You guard the rows of b only. a may have a row of zeros as well, and gets NaN from it."),
    (lambda a, b: cosines(a, b, lambda x: x.square().sum(-1, keepdim=True)),
     "You divide by the squared length: a root is missing."),
    (lambda a, b: cosines(a, torch.ones_like(b)) * 0 + cosines(a, b, lambda x: x.norm(dim=-1, keepdim=True)).acos(),
     "That is the angle. Its cosine is asked for, before the arccos."),
], without=("cosine_similarity", "CosineSimilarity"))


# 4.2 ------------------------------------------------------------------------------------------------------------------

def mean_abs_cosine(d):
    """Exact: the density of a cosine x is proportional to (1 - x^2)^((d - 3) / 2)."""
    return math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2)) / math.sqrt(math.pi)


def whole_density(d):
    """The integral of (1 - x^2)^((d - 3) / 2) from -1 to 1."""
    return math.exp(math.lgamma((d - 1) / 2) - math.lgamma(d / 2)) * math.sqrt(math.pi)


MEAN_ABS = Exercise(
    reference=mean_abs_cosine, tolerance=1e-5,
    inputs=lambda generator: ((f"d = {d}", d) for d in (64, 3, 4, 1024)),
    misconceptions=[
        (lambda d: math.sqrt(2 / math.pi / d),
         "Right in the limit of large d, where a cosine is normal. In 3 dimensions it is not: all values between -1 "
         "and 1 are as likely there."),
        (lambda d: 0.8 / math.sqrt(d), "0.8 is a rounded number, and one for large d. Here it is to be exact."),
        (lambda d: d ** -0.5, "That is the root mean square of the cosine; the mean of its absolute value is smaller."),
        (lambda d: 2 / math.pi / math.sqrt(d),
         "That is the formula as printed in A.1; check it against the number printed right after it."),
        (lambda d: 2 / math.pi, "That is the average for an angle that is uniform in a plane. In d dimensions almost "
                                "all of the sphere is near the equator, so the mean shrinks as d grows."),
        (lambda d: mean_abs_cosine(d) * whole_density(d),
         "Your density is not divided by its own sum. It is only proportional to (1 - x^2)^((d-3)/2)."),
        (lambda d: mean_abs_cosine(d) / 2, "You have half of it: negative cosines count too, with their size."),
        (lambda d: 0.0, "The mean of the cosine itself is 0. Its size is asked for."),
        (lambda d: 1 / d, "That is the variance of the cosine, the mean of its square."),
        (lambda d: math.sqrt(2 / math.pi) / d, "The number is right. But cosines shrink like 1/sqrt(d), not like 1/d."),
    ])


# 4.3 ------------------------------------------------------------------------------------------------------------------

def step_inputs(generator):
    a, b = directions(generator, 4, 3), directions(generator, 4, 3)
    yield "four pairs, alpha 0.3", a, b, 0.3
    yield "alpha 0", a, b, 0.0
    yield "alpha 1", a, b, 1.0
    yield "a batch (2, 5, 16)", directions(generator, 2, 5, 16), directions(generator, 2, 5, 16), 0.1
    yield "a right angle", torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), 0.25


def slerp_inputs(generator):
    yield from step_inputs(generator)
    yield "b equal to a", torch.eye(3), torch.eye(3), 0.5
    a = torch.eye(3)
    yield "b equal to a in one pair of three", a, torch.stack((a[0], a[2], a[0])), 0.3


def slerp(a, b, alpha):
    """The same arc as eq. 6, made from the tangent at a: no division by sin(theta)."""
    cosine = (a * b).sum(-1, keepdim=True).clamp(-1, 1)
    tangent = b - cosine * a
    sine = tangent.norm(dim=-1, keepdim=True)
    theta = torch.atan2(sine, cosine)
    return (alpha * theta).cos() * a + (alpha * theta).sin() * tangent / sine.clamp(min=1e-12)


def angle(a, b):
    return torch.where((a == b).all(-1, keepdim=True), 0.0, (a * b).sum(-1, keepdim=True).clamp(-1, 1).arccos())


def slerp_by(theta, a, b, alpha, over=torch.sin):
    return (((1 - alpha) * theta).sin() * a + (alpha * theta).sin() * b) / over(theta)


SLERP = Exercise(reference=slerp, inputs=slerp_inputs, tolerance=1e-3, misconceptions=[   # clamped angles pass too
    (lambda a, b, alpha: slerp(b, a, alpha), "The weights are the wrong way round: alpha = 0 has to give a."),
    (lambda a, b, alpha: slerp_by(angle(a, b), a, b, alpha, over=torch.ones_like),
     "The division by sin(theta) is missing."),
    (lambda a, b, alpha: slerp_by(180 / math.pi * angle(a, b), a, b, alpha),
     "Your theta is in degrees. torch's sine takes radians."),
    (lambda a, b, alpha: a + alpha * (b - a),
     "That is the chord itself, LERP: it runs inside the ball. SLERP stays on the sphere, with sines for weights."),
    (lambda a, b, alpha: F.normalize(a + alpha * (b - a), dim=-1),
     "That is the chord put back on the sphere: it ends on the arc, but not alpha of the angle along it."),
    (lambda a, b, alpha: slerp_by(angle(a, b), a, b, alpha),
     "Right but where b = a: there both sines are 0 and the quotient is NaN. Clamp the cosine."),
    (lambda a, b, alpha: ((1 - alpha * angle(a, b)).sin() * a + (alpha * angle(a, b)).sin() * b) / angle(a, b).sin(),
     "Mind the brackets: the first weight is the sine of (1 - alpha) times theta."),
    (lambda a, b, alpha: slerp_by((a * b).sum().clamp(-0.99999, 0.99999).arccos(), a, b, alpha),
     "You have one theta for the whole batch. Every pair has its own: sum over the last axis only."),
    (lambda a, b, alpha: slerp_by((a * b).sum().clamp(-1, 1).arccos(), a, b, alpha),
     "You have one theta for the whole batch, and its cosine is often cut off at 1. Sum over the last axis only."),
    (lambda a, b, alpha: slerp_by(angle(a, b), a, b, alpha).nan_to_num(),
     "Right but where b = a: 0 is no point of the sphere. What should come out between a and a itself?"),
    (lambda a, b, alpha: a if (a == b).all(-1).any() else slerp_by(angle(a, b), a, b, alpha),
     "Once one pair of a batch is equal you return a for all of them. Decide for each pair by itself."),
])


# 4.4 ------------------------------------------------------------------------------------------------------------------

def riemann_inputs(generator):
    yield next(step_inputs(generator))
    h, y = directions(generator, 2, 3, 8), directions(generator, 2, 3, 8)
    yield "a batch (2, 3, 8)", h, y, 0.05
    yield "alpha a vector of 8", h, y, torch.rand(8, generator=generator)
    yield "opposite directions", h, F.normalize(y - 3 * h, dim=-1), 0.5
    yield "y equal to h", h, h, 0.5


def moved(h, step):
    return F.normalize(h + step, dim=-1)


def along(h, y):
    return (h * y).sum(-1, keepdim=True)


def riemann_step(h, y, alpha):
    return moved(h, alpha * (y - along(h, y) * h))


def along_the_arc(h, y, alpha):
    step = alpha * (y - along(h, y) * h)
    length = step.norm(dim=-1, keepdim=True)
    return length.cos() * h + length.sin() * step / length.clamp(min=1e-9)


def strict_step(h, y, alpha):
    """Projected on the tangent space after alpha, too."""
    step = alpha * (y - along(h, y) * h)
    return moved(h, step - along(h, step) * h)


RIEMANN = Exercise(reference=riemann_step, inputs=riemann_inputs, misconceptions=[
    (lambda h, y, alpha: moved(h, alpha * (y - h)), "You step along y - h (eq. 10); take out its part along h first."),
    (lambda h, y, alpha: riemann_step(h, y, -alpha), "You walk away from y: a step goes against the gradient."),
    (lambda h, y, alpha: h + alpha * (y - along(h, y) * h),
     "The tangent step leaves the sphere: the retraction, Norm, is missing."),
    (lambda h, y, alpha: moved(h, alpha * (along(h, y) * y - h)),
     "You project on the plane perpendicular to y; the tangent space is the one at h."),
    (lambda h, y, alpha: moved(h, alpha * (h - along(h, y) * y)),
     "You exchanged h and y in the projection: eq. 28 has h (h . y) - y."),
    (along_the_arc,
     "You walk along the arc, by the length of the step. Eq. 29 walks straight, and then Norm brings it back."),
    (strict_step, "You project once more, after alpha. That would be strict; eq. 29 does without."),
    (lambda h, y, alpha: moved(h, alpha * F.normalize(y - along(h, y) * h, dim=-1)),
     "You made the projected gradient a unit vector: its length, the sine of the angle, belongs to the step."),
    (lambda h, y, alpha: moved(h, alpha * (y - (h * y).sum() * h)),
     "You have one dot product for the whole batch. Every pair has its own: sum over the last axis only."),
    (lambda h, y, alpha: moved(h, alpha * y), "The part of y along h is still in your step: project it out."),
    (lambda h, y, alpha: moved(h, -alpha * along(h, y) * h), "Only what is taken out is in your step; y is missing."),
])


# 4.5 ------------------------------------------------------------------------------------------------------------------

def rate_inputs(generator):
    yield "lr 0.001, init 1, scale 1", 1e-3, 1.0, 1.0
    yield "lr 0.001, init 1, scale 1/32", 1e-3, 1.0, 1 / 32
    yield "lr 0.01, init 0.05, scale 1/8", 1e-2, 0.05, 1 / 8
    yield "lr 0.001, init 0.1, scale 0.01", 1e-3, 0.1, 0.01
    yield "lr 0.01, init 2, scale 0.004: less than a step", 1e-2, 2.0, 0.004


RATES = Exercise(
    reference=lambda lr, init, scale: (lr * init / scale, lr / scale, scale / lr), inputs=rate_inputs, misconceptions=[
        (lambda lr, init, scale: (lr, lr / init, init / lr),
         "That is a parameter stored as it is used. Here Adam moves the stored number, which starts at scale."),
        (lambda lr, init, scale: (lr * scale / init, lr * scale / init ** 2, init ** 2 / (lr * scale)),
         "The forward pass multiplies the stored number by init / scale; you have the inverse."),
        (lambda lr, init, scale: (lr / scale, lr / scale, scale / lr),
         "The value moves by init / scale for every unit that the stored number moves; the init is missing."),
        (lambda lr, init, scale: (lr * init / scale, lr * init / scale, scale / (lr * init)),
         "Relative to what? The share is the value's step over the value's start, init; doubling follows from it."),
        (lambda lr, init, scale: (lr * init / scale, lr / scale, 2 * scale / lr),
         "That is the time to treble. To double, the stored number has to move by its start once."),
        (lambda lr, init, scale: (lr * init / scale, lr / init, init / lr),
         "The step is right. Share and doubling are those of a number that starts at init and moves by lr; the stored "
         "one starts elsewhere."),
        (lambda lr, init, scale: (lr * init / scale, lr / init, scale / lr),
         "The share: the value's step over the value's start. Yours has the stored number's step over it."),
        (lambda lr, init, scale: (lr * init / scale, lr / scale, round(scale / lr)),
         "The last number is rounded; it is asked for as it is."),
    ], parts=("the value's step", "its share of the start", "steps to double"))


# 4.6 ------------------------------------------------------------------------------------------------------------------

SCALES = Exercise(
    reference=lambda d_k: (d_k ** -0.5, d_k ** 0.5, d_k ** 0.25),
    inputs=lambda generator: ((f"d_k = {d_k}", d_k) for d_k in (16, 64, 128, 1)), misconceptions=[
        (lambda d_k: (d_k ** 0.5, d_k ** -0.5, d_k ** -0.25),
         "The wrong way round: a sum of d_k products is too large, a cosine is too small."),
        (lambda d_k: (d_k ** -0.5, d_k ** 0.5, d_k ** 0.5),
         "s_qk multiplies q and k both, so that it enters the product twice."),
        (lambda d_k: (1 / d_k, d_k, d_k ** 0.5),
         "You divide by the variance; a factor acts on it squared, so divide by the standard deviation."),
        (lambda d_k: (d_k ** -0.5, d_k ** -0.5, d_k ** -0.25),
         "The Transformer's 1/sqrt(d_k) is for entries of variance 1. Unit vectors have entries of variance 1/d_k."),
        (lambda d_k: (d_k ** -0.5, 1.0, 1.0),
         "You leave cosines as they are. The dot product of unit vectors has variance 1/d_k, and is to get "
         "variance 1."),
        (lambda d_k: (d_k ** -0.5, d_k, d_k ** 0.25),
         "The cosine's variance is 1/d_k; a factor acts on it squared, so the second is too large."),
        (lambda d_k: (d_k ** -0.5, d_k, d_k ** 0.5),
         "The third follows from your second, but the second undoes the cosine's variance: undo its deviation."),
        (lambda d_k: (d_k ** -0.5, d_k ** 0.5, d_k ** -0.25),
         "The third is upside down: it has to make a cosine larger, not smaller."),
    ], parts=("factor for entries of variance 1", "factor for unit vectors", "start of s_qk"))


# 4.7 ------------------------------------------------------------------------------------------------------------------

def matrix_inputs(generator):
    for d in (8, 3):
        yield (f"the matrices of d = {d}",
               *(torch.randn(n * d, m * d, generator=generator) for n, m in ((3, 1), (1, 1), (8, 1), (1, 4))))


def scaled(norm_of):
    return lambda *weights: tuple(w / norm_of(i, w) for i, w in enumerate(weights))


MATRICES = Exercise(
    reference=scaled(lambda i, w: w.square().sum((1, 0, 1, 0)[i], keepdim=True).sqrt()),
    inputs=matrix_inputs, misconceptions=[
        (scaled(lambda i, w: w.norm(dim=1, keepdim=True)),
         "You normalize rows everywhere, as anGPT does. w_o and w_down write into h: which axis has h's length?"),
        (scaled(lambda i, w: w.norm(dim=0, keepdim=True)),
         "You normalize columns everywhere. w_qkv and w_up read from h: which axis has h's length?"),
        (scaled(lambda i, w: w.norm(dim=(0, 1, 0, 1)[i], keepdim=True)),
         "Exactly the other axis each time: torch stores a linear map as (out, in), the transpose of the paper's."),
        (scaled(lambda i, w: w.norm(dim=(1, 1, 1, 0)[i], keepdim=True)),
         "w_o is square, so its shape does not tell; it writes into h, as w_down does."),
        (scaled(lambda i, w: w.norm(dim=(1, 0, 1, 1)[i], keepdim=True)),
         "w_down writes into h, as w_o does: the axis of length d is its first one."),
        (lambda *weights: tuple(w / w.norm() for w in weights),
         "You divide each matrix by one number. It is vectors along one axis, each by itself, that get length 1."),
    ], parts=("w_qkv", "w_o", "w_up", "w_down"))


# 4.8 ------------------------------------------------------------------------------------------------------------------

def update_inputs(generator):
    w = directions(generator, 3, 16)
    yield "one large step", w, torch.randn(1, 3, 16, generator=generator), 0.1
    yield "fifty steps", w, torch.randn(50, 3, 16, generator=generator), 0.05
    yield "two hundred tiny steps", w, torch.randn(3, 16, generator=generator).expand(200, 3, 16), 1e-4
    yield "no step", w, torch.zeros(0, 3, 16), 0.1


def same(w):
    return w


def rows(w):
    return w / w.norm(dim=-1, keepdim=True)


def rounded(w):
    return w.bfloat16().float()


def sphere_steps(w, gradients, lr, before=same, after=rows, view=same):
    for gradient in gradients:
        w = after(before(w) - lr * gradient)
    return w, view(w).bfloat16()


def all_in_bfloat16(w, gradients, lr):
    """Each step and each norm in bfloat16."""
    def after(w):
        return rows(w.float()).bfloat16()
    master, copy = sphere_steps(w.bfloat16(), gradients.bfloat16(), lr, after=after)
    return master.float(), copy


UPDATES = Exercise(                                                      # the tolerance is bfloat16's rounding
    reference=sphere_steps, inputs=update_inputs, tolerance=4e-3, parts=("master", "copy"), misconceptions=[
    (lambda w, g, lr: sphere_steps(w, g, lr, after=same, view=rows),
     "You normalize the copy alone. The master keeps its length, and the next step starts from it."),
    (lambda w, g, lr: sphere_steps(w, g, lr, after=lambda w: rounded(rows(w))),
     "The master went through bfloat16: steps below its resolution are lost. Only the copy is rounded."),
    (lambda w, g, lr: sphere_steps(w, g, lr, before=rows, after=same),
     "You normalize before the step; after the last one the rows are off the sphere."),
    (lambda w, g, lr: (rows(w - lr * g.sum(0)), rows(w - lr * g.sum(0)).bfloat16()),
     "You normalize once, at the end. Every step has to start on the sphere."),
    (lambda w, g, lr: sphere_steps(w.bfloat16(), g.bfloat16(), lr),
     "Your master is bfloat16. It stays float32, and so does the arithmetic; the copy is made at the end."),
    (lambda w, g, lr: sphere_steps(w, g, lr, after=lambda w: rows(w).bfloat16()),
     "Your master is made bfloat16 after every step. It stays float32; the copy is made at the end."),
    (partial(sphere_steps, after=lambda w: w / w.norm(dim=0, keepdim=True)),
     "You normalize columns. Here it is the rows that are unit vectors."),
    (partial(sphere_steps, after=lambda w: w / w.norm()),
     "You divide the matrix by one number. Each row is a unit vector of its own."),
    (partial(sphere_steps, after=same), "Nothing is normalized: after the first step the rows are off the sphere."),
    (lambda w, g, lr: (sphere_steps(w.bfloat16(), g.bfloat16(), lr)[0].float(), sphere_steps(w, g, lr)[1]),
     "You do the arithmetic of the steps in bfloat16: small steps are lost in the sum. Only the copy is rounded."),
    (all_in_bfloat16,
     "You do the steps on the bfloat16 copy, where small ones are lost. The float32 master takes the steps."),
])


# 4.9 ------------------------------------------------------------------------------------------------------------------

def condition_inputs(generator):
    yield "3 heads of 4", torch.randn(36, 12, generator=generator), 3       # odd: then there is one median only
    yield "5 heads of 2", torch.randn(30, 10, generator=generator), 5
    yield "one head", torch.randn(24, 8, generator=generator), 1
    yield "tiny weights", 1e-3 * torch.randn(45, 15, generator=generator), 5


def extremes_ratio(eigenvalues):
    return eigenvalues[:, -1] / eigenvalues[:, 0]


def head_conditions(w_qkv, n_head, split=lambda w, n: w.unflatten(0, (n, -1)), power=0.5, middle=torch.median,
                    of=extremes_ratio):
    found = []
    for w in w_qkv.double().chunk(3):                                                     # (d, d) for q, k, v
        w = split(w, n_head)                                                              # (n_head, d_k, d)
        eigenvalues = torch.linalg.eigvalsh(w @ w.transpose(1, 2))                        # ascending
        found.append(middle(of(eigenvalues) ** power))
    return torch.stack(found)


CONDITION = Exercise(reference=head_conditions, inputs=condition_inputs, tolerance=1e-3, parts=("q", "k", "v"),
                     misconceptions=[
    (lambda w, n: 1 / head_conditions(w, n), "Largest over smallest singular value: yours is upside down."),
    (lambda w, n: head_conditions(w, 1), "That is the whole matrix: rows of different heads can be alike. Take each "
                                         "head's d_k rows by themselves, then the median."),
    (lambda w, n: head_conditions(w, n, power=1),
     "Eigenvalues of W W^T are squared singular values: a root is missing."),
    (lambda w, n: head_conditions(w, n, split=lambda w, n: w.unflatten(0, (-1, n)).transpose(0, 1)),
     "A head has d_k neighbouring rows; you took every n_head-th row."),
    (lambda w, n: head_conditions(w, n, middle=torch.mean), "The mean of the heads; nGPT's Figure 5 has the median, "
                                                           "which one bad head does not move much."),
    (lambda w, n: head_conditions(w, n, split=lambda w, n: w.reshape(n, w.shape[1], -1).transpose(1, 2)),
     "Your shape (3, n_head, d, d_k) tears the rows apart: the last axis is d, and a head has d_k rows."),
    (partial(head_conditions, middle=torch.argmax), "That is a head's number, not a condition number."),
    (partial(head_conditions, middle=lambda x: x.median(0)[1]),
     "median(dim) gives two things, the medians and where they stand. You took the second."),
    (partial(head_conditions, of=lambda x: x[:, -1]),
     "That is the largest singular value alone. Over which one is it to be divided?"),
    (partial(head_conditions, of=lambda x: x[:, 0]),
     "That is the smallest singular value alone. A condition number is a ratio."),
    (partial(head_conditions, middle=torch.max), "That is the worst head; the median is asked for."),
    (lambda w, n: head_conditions(w.unflatten(0, (n, 3, -1)).transpose(0, 1).flatten(0, 2), n),
     "You split by heads first. All of W_q comes first, then W_k, then W_v; each of them has n_head heads."),
])


# 4.10 -----------------------------------------------------------------------------------------------------------------

def context_inputs(generator):
    model = GPT(GPTConfig(arch="ngpt", vocab_size=7, block_size=16, n_layer=1, n_head=2, n_embd=8))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    tokens = torch.randint(7, (3, 17), generator=generator)
    yield "all 16 tokens as context", model, tokens, 16, 4
    yield "8 tokens of context", model, tokens, 8, 4
    yield "as much context as targets", model, tokens, 4, 4
    yield "one target", model, tokens, 12, 1


def mean_loss(model, x, y, part=slice(None)):
    logits, _ = model(x, y)
    return F.cross_entropy(logits[:, part].flatten(0, 1), y[:, part].flatten())


def late_loss(model, tokens, context, last):
    window = tokens[:, tokens.shape[1] - context - 1:]
    with torch.no_grad():
        return -model(window[:, :-1], window[:, 1:])[0].log_softmax(-1).gather(
            2, window[:, 1:, None])[:, -last:].mean()


def mean_probability(model, tokens, context, last):
    window = tokens[:, tokens.shape[1] - context - 1:]
    p = model(window[:, :-1], window[:, 1:])[0].softmax(-1).gather(2, window[:, 1:, None])
    return -p[:, -last:].mean()


def share_right(model, tokens, context, last):
    window = tokens[:, tokens.shape[1] - context - 1:]
    likeliest = model(window[:, :-1], window[:, 1:])[0].argmax(-1)
    return (likeliest == window[:, 1:])[:, -last:].double().mean()


def window_for_each(model, tokens, context, last):
    found = []
    for place in range(tokens.shape[1] - last, tokens.shape[1]):
        seen = tokens[:, max(0, place - context):place + 1]
        found.append(mean_loss(model, seen[:, :-1], seen[:, 1:], slice(-1, None)))
    return torch.stack(found).mean()


def softmax_twice(model, tokens, context, last):
    def probabilities(x, y):
        logits, loss = model(x, y)
        return logits.softmax(-1), loss

    window = tokens[:, tokens.shape[1] - context - 1:]
    return mean_loss(probabilities, window[:, :-1], window[:, 1:], slice(-last, None))


CONTEXT = Exercise(reference=late_loss, inputs=context_inputs, misconceptions=[
    (lambda model, t, context, last: mean_loss(model, t[:, :context], t[:, 1:context + 1], slice(-last, None)),
     "You keep the start of the window, so that each context length has other targets. Keep its end."),
    (lambda model, t, context, last: mean_loss(model, t[:, -context - 1:-1], t[:, -context:]),
     "You average over all positions: a longer window then has other, and easier, targets. Only the last ones count."),
    (lambda model, t, context, last: mean_loss(model, t[:, -context:], t[:, -context:], slice(-last, None)),
     "The target of a token is the next one; here the model is asked to predict its own input."),
    (lambda model, t, context, last: mean_loss(model, t[:, :-1], t[:, 1:], slice(-last, None)),
     "You always give the whole window: the context is to be cut to its last tokens."),
    (lambda model, t, context, last: mean_loss(model, t[:, -context:-1], t[:, 1 - context:], slice(-last, None)),
     "You give the model one token too few: context inputs and the last target make context + 1 tokens."),
    (lambda model, t, context, last: late_loss(model, t, context, last) * len(t) * last,
     "That is the sum of the losses; their mean is asked for."),
    (lambda model, t, context, last: late_loss(model, t[:1], context, last), "You use the first row only."),
    (window_for_each,
     "Each of your targets has a window of its own. All share one here: the tokens before the very last."),
    (softmax_twice, "cross_entropy takes logits and has the softmax in it. You give it probabilities."),
    (mean_probability, "Those are probabilities. The loss is the mean of -log p."),
    (share_right, "That is the share of tokens whose likeliest guess is right. The loss is the mean of -log p."),
    (lambda model, t, context, last: late_loss(model, t, context, last).exp(),
     "That is the perplexity, the exponential of the loss. The loss itself is asked for, in nats."),
])


# 4.11 -----------------------------------------------------------------------------------------------------------------

def block_inputs(generator):
    """h on the sphere, a block's tensors as GPT has them, heads, rope's tables: so that every operation counts."""
    for label, n_head, d, tokens, size in (("2 heads of 4", 2, 8, 5, 0.3), ("3 heads of 2", 3, 6, 4, 0.3),
                                           ("one head and one token", 1, 4, 1, 0.3), ("alphas near 1", 2, 4, 3, 1.0),
                                           ("3 heads and one token", 3, 6, 1, 0.3)):
        shapes = dict(w_qkv=(3 * d, d), w_o=(d, d), w_up=(8 * d, d), w_down=(d, 4 * d))
        p = dict(zip(shapes, MATRICES.reference(*(torch.randn(x, generator=generator) for x in shapes.values()))))
        for name, n in (("s_qk", d), ("s_u", 4 * d), ("s_v", 4 * d)):
            p[name] = 1 + 0.3 * torch.randn(n, generator=generator)
        p |= {name: size * torch.randn(d, generator=generator) for name in ("alpha_a", "alpha_m")}
        angle = torch.arange(tokens)[:, None] * 10000 ** -(torch.arange(d // n_head // 2) / (d // n_head // 2))
        yield label, directions(generator, 2, tokens, d), p, n_head, angle.cos(), angle.sin()
        if n_head == 2 and size < 1:
            for name, alone in (("alpha_a", "the MLP"), ("alpha_m", "attention")):
                still = {**p, name: torch.zeros(d)}
                h = directions(generator, 2, tokens, d)
                yield f"{name} of 0: {alone} alone", h, still, n_head, angle.cos(), angle.sin()


def turned(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


BOTH = ("alpha_a", "alpha_m")                               # attention's step and the MLP's


def ngpt_block(h, p, n_head, cos, sin, *, scale=0.5, causal=True, qk_norm=True, s_qk_first=False, k_scaled=True,
               merged=True, branch_norm=BOTH, retract=BOTH, absolute=True, gate_scaled=True, swapped=False,
               parallel=False, halves_swapped=False, rope_last=False, s_u=True, s_qk=True, neighbours=True,
               hidden_from=1, nan=math.nan):
    (B, T, d), d_k = h.shape, h.shape[-1] // n_head

    def cut(x):
        if neighbours:
            return x.view(B, T, n_head, d_k).transpose(1, 2)
        return x.view(B, T, d_k, n_head).permute(0, 3, 1, 2)

    def step(h, y, which):
        alpha = p[which].abs() if absolute else p[which]
        y = F.normalize(y, dim=-1) if which in branch_norm else y       # of zeros it makes zeros
        y = h + alpha * (y - h)
        return rows(y) if which in retract else y

    def prepared(x, s):
        if rope_last:
            return turned(rows(x) * s, cos, sin)
        if not s_qk:
            return rows(turned(x, cos, sin))
        x = turned(x * s if s_qk_first else x, cos, sin)
        x = rows(x) if qk_norm else x
        return x if s_qk_first else x * s

    q, k, v = map(cut, (h @ p["w_qkv"].T).chunk(3, dim=-1))
    s_q = p["s_qk"].view(n_head, 1, d_k)
    s_k = s_q if k_scaled else torch.ones_like(s_q)
    scores = prepared(q, s_q) @ prepared(k, s_k).transpose(2, 3) * d_k ** scale
    if causal:
        scores = scores + torch.full((T, T), -torch.inf).triu(hidden_from)
    y = scores.softmax(-1).nan_to_num(nan) @ v
    y = (y.transpose(1, 2) if merged else y).reshape(B, T, d)
    start = h
    h = step(h, y @ p["w_o"].T, "alpha_a")
    u, z = ((start if parallel else h) @ p["w_up"].T).chunk(2, dim=-1)
    u, z = (z, u) if halves_swapped else (u, z)
    u = u * p["s_u"] if s_u else u
    z = z * p["s_v"] * (d ** 0.5 if gate_scaled else 1)
    u, z = (z, u) if swapped else (u, z)
    return step(h, (u * z * torch.sigmoid(z)) @ p["w_down"].T, "alpha_m")


BLOCK = Exercise(reference=ngpt_block, inputs=block_inputs, tolerance=1e-4, misconceptions=[
    (partial(ngpt_block, scale=-0.5),
     "The softmax factor is the Transformer's. q and k are unit vectors here: see exercise 4.6."),
    (partial(ngpt_block, causal=False), "A token attends to later ones: the mask is missing."),
    (partial(ngpt_block, hidden_from=0, nan=0.0),
     "Your mask hides each token from itself, too. It sees itself and those before it."),
    (partial(ngpt_block, hidden_from=0),
     "Your mask hides each token from itself, so that the first sees nothing: a softmax of nothing is NaN."),
    (partial(ngpt_block, neighbours=False),
     "A head has d_k neighbouring channels of q, k and v; yours has every n_head-th one."),
    (partial(ngpt_block, qk_norm=False), "q and k are not normalized (eq. 15, 16)."),
    (partial(ngpt_block, s_qk_first=True), "s_qk is applied before the norm (or before rope): it comes last."),
    (partial(ngpt_block, k_scaled=False), "s_qk multiplies q only; eq. 16 has it on k too."),
    (partial(ngpt_block, merged=False),
     "The heads' outputs are put together wrongly: side by side, token by token, needs the axes H and T exchanged."),
    (partial(ngpt_block, branch_norm=()),
     "The branch's output goes into the step as it is. It is a point on the sphere first (the line behind eq. 10)."),
    (partial(ngpt_block, retract=()), "The Norm after a step is missing (eq. 10, 11)."),
    (partial(ngpt_block, branch_norm=("alpha_m",)), "Attention's output goes into its step without its Norm."),
    (partial(ngpt_block, branch_norm=("alpha_a",)), "The MLP's output goes into its step without its Norm."),
    (partial(ngpt_block, retract=("alpha_m",)), "The Norm after attention's step is missing (eq. 10)."),
    (partial(ngpt_block, retract=("alpha_a",)), "The Norm after the MLP's step is missing (eq. 11)."),
    (partial(ngpt_block, rope_last=True), "rope comes first; yours turns what was normalized and scaled already."),
    (partial(ngpt_block, halves_swapped=True), "u and the gate are exchanged: the first 4d rows of w_up are u's."),
    (partial(ngpt_block, s_u=False), "s_u does not enter (eq. 20)."),
    (partial(ngpt_block, s_qk=False), "s_qk does not enter (eq. 15, 16)."),
    (partial(ngpt_block, scale=0.0), "The factor in front of the scores is missing: see exercise 4.6."),
    (partial(ngpt_block, absolute=False), "A negative alpha walks away: the model takes its absolute value."),
    (partial(ngpt_block, gate_scaled=False), "The gate's argument is a cosine still: see eq. 21."),
    (partial(ngpt_block, swapped=True), "SiLU is applied to u. The first 4d rows of w_up are u's, then the gate's."),
    (partial(ngpt_block, parallel=True), "The MLP reads the h from before attention's step. It comes after it."),
])


# What holds of every right answer: said where none of the known mistakes fits ----------------------------------------

def unit_along(y, i, dim):
    return near(y[i].norm(dim=dim), 1)


MLP_ALONE = (
 "With alpha_a of 0, where attention's step goes nowhere, yours is off: look at the MLP, u and z with their "
             "scales, SiLU and w_down, and at its Norm and its step.")
ONE_TOKEN = (
 "The MLP is right. With one token, where attention gives v itself, yours is off: look at v, w_o, and at "
             "attention's Norm and step.")
MORE_TOKENS = (
 "With one token yours is right: look at what only several tokens need, rope on q and k, the scores with "
               "their factors, the mask and the softmax's axis.")

# 4.12  Norms of q and k, before rope or behind it ---------------------------------------------------------------------

def query_inputs(generator):
    q = 3 * torch.randn(2, 3, 5, 8, generator=generator)                      # (B, H, T, d_k)
    of_head = 0.5 + torch.rand(8, generator=generator)
    of_all = 0.5 + torch.rand(3, 8, generator=generator)
    angle = torch.arange(5)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    cos = angle.cos()
    sin = angle.sin()
    with_zeros = q.clone()
    with_zeros[0, :, 2] = 0
    yield "a gain for a head's channels, before rope", q, of_head, cos, sin, True
    yield "a gain for a head's channels, behind rope", q, of_head, cos, sin, False
    yield "a gain for all heads' channels, before rope", q, of_all, cos, sin, True
    yield "a gain for all heads' channels, behind rope", q, of_all, cos, sin, False
    yield "a token of zeros", with_zeros, of_all, cos, sin, True
    yield "two of four pairs turned", q, of_all, cos[:, :2], sin[:, :2], True
    yield "one head", q[:, :1], of_all[:1], cos, sin, False
    yield "a small q", 0.001 * q, of_head, cos, sin, True


def turned(x, cos, sin):
    pairs = cos.shape[-1]
    z = torch.complex(x[..., :pairs], x[..., pairs:2 * pairs]) * torch.complex(cos, sin)
    return torch.cat((z.real, z.imag, x[..., 2 * pairs:]), dim=-1)


def normed_and_turned(q, gain, cos, sin, before_rope, order=None, dims=None, eps=1e-6, centred=False, mean=True,
                      gained=True):
    """What is right, and what becomes of it with one thing done otherwise."""
    over = (-1,)
    if gain.dim() == 2:
        over = (1, -1)                               # heads and their channels
        gain = gain[:, None]                         # (H, 1, d_k)
    over = dims or over
    if order is not None:
        before_rope = order

    def norm(x):
        if centred:
            x = x - x.mean(over, keepdim=True)
        square = x.square().sum(over, keepdim=True)
        if mean:
            square = x.square().mean(over, keepdim=True)
        x = x / (square + eps).sqrt()
        return x * gain if gained else x

    if before_rope:
        return turned(norm(q), cos, sin)
    return norm(turned(q, cos, sin))


def other_order(q, gain, cos, sin, before_rope):
    return normed_and_turned(q, gain, cos, sin, not before_rope)


def is_small(q):
    return q.abs().max() < 0.1


def first_token_is_right(y, *arguments):
    return near(y[:, :, 0], normed_and_turned(*arguments)[:, :, 0])


NORMED_QUERIES = Exercise(reference=normed_and_turned, inputs=query_inputs, misconceptions=[
    (partial(normed_and_turned, order=True),
     "Your gain is always before rope, whatever before_rope says. (The division alone could stand on either "
     "side.)"),
    (partial(normed_and_turned, order=False),
     "Your gain is always behind rope, whatever before_rope says. (The division alone could stand on either side.)"),
    (other_order, "The other way round: before_rope is True where the norm comes first, and then rope."),
    (partial(normed_and_turned, dims=(-1,)),
     "A gain (H, d_k) belongs to a norm over all heads: one mean square a token, of H d_k channels, not one a head."),
    (partial(normed_and_turned, dims=(1, -1)),
     "A gain (d_k,) belongs to a norm of each head by itself: heads have mean squares of their own."),
    (partial(normed_and_turned, dims=(2, -1)),
     "Your mean square runs over the tokens as well: later ones change earlier ones. T is the axis to keep."),
    (partial(normed_and_turned, centred=True),
     "That is LayerNorm: RMSNorm subtracts no mean. (A mean over channels is not the same before and behind rope.)"),
    (partial(normed_and_turned, mean=False),
     "You divide by the length. RMSNorm divides by the root of the mean square, which is smaller by sqrt(channels)."),
    (partial(normed_and_turned, gained=False), "The gain is missing."),
    (partial(normed_and_turned, eps=0.0), "Without eps a token of zeros gives 0/0, which is NaN, "
     "and a small q comes out too large. Where does eps stand?"),
], without=("rms_norm", "RMSNorm"))


# 4.13  Which gains let rope through -----------------------------------------------------------------------------------

def gain_inputs(generator):
    a, b, c, d = (0.5 + torch.rand(4, generator=generator)).tolist()
    yield "eight ones, four pairs", torch.ones(8), 4
    yield "eight times 0.3, four pairs", torch.full((8,), 0.3), 4
    yield "a b c d a b c d, four pairs", torch.tensor([a, b, c, d, a, b, c, d]), 4
    yield "a a b b c c d d, four pairs", torch.tensor([a, a, b, b, c, c, d, d]), 4
    yield "a b c d -a -b -c -d, four pairs", torch.tensor([a, b, c, d, -a, -b, -c, -d]), 4
    yield "a b c d a b c 2, four pairs", torch.tensor([a, b, c, d, a, b, c, 2.0]), 4
    yield "a b c d a b c and nearly d, four pairs", torch.tensor([a, b, c, d, a, b, c, d + 0.01]), 4
    yield "a b a b a b c d, two pairs", torch.tensor([a, b, a, b, a, b, c, d]), 2
    yield "a b c d a b c d, two pairs", torch.tensor([a, b, c, d, a, b, c, d]), 2
    yield "a a a a a b c d, one pair", torch.tensor([a, a, a, a, a, b, c, d]), 1
    yield "a 2 c d a b c d, four pairs", torch.tensor([a, 2.0, c, d, a, b, c, d]), 4
    yield "a b b a a b c d, two pairs", torch.tensor([a, b, b, a, a, b, c, d]), 2
    yield "a b c d, no pair", torch.tensor([a, b, c, d]), 0


def commutes(gain, pairs):
    return all(gain[i] == gain[i + pairs] for i in range(pairs))


COMMUTES = Exercise(reference=commutes, inputs=gain_inputs, misconceptions=[
    (lambda gain, pairs: True,
     "Rope keeps the length, so the division does not care. The gain does: it stretches the two axes of a plane."),
    (lambda gain, pairs: False,
     "Some gains let rope through. What does a rotation make of a vector times one number?"),
    (lambda gain, pairs: bool((gain == 1).all()), "It need not be 1: a rotation lets any common factor through."),
    (lambda gain, pairs: bool((gain == gain[0]).all()),
     "One number for all is enough, but more than it takes: every pair turns in a plane of its own."),
    (lambda gain, pairs: torch.equal(gain[0:2 * pairs:2], gain[1:2 * pairs:2]),
     "You pair neighbours, 2i and 2i + 1. Here channel i turns with channel i + pairs: see rope in model.py."),
    (lambda gain, pairs: torch.equal(gain[:len(gain) // 2], gain[len(gain) // 2:]),
     "You pair the halves of the head. With fewer pairs than that, i turns with i + pairs, and the rest not at all."),
    (lambda gain, pairs: torch.equal(gain[:pairs].abs(), gain[pairs:2 * pairs].abs()),
     "Signs count: a mirror and a rotation do not change places."),
    (lambda gain, pairs: torch.equal(gain[:pairs], gain[pairs:2 * pairs].flip(0)),
     "You pair the first channel with the last. Channel i turns with channel i + pairs."),
    (lambda gain, pairs: bool((gain[:2 * pairs] == gain[0]).all()),
     "You ask the same number of all pairs. Each turns by itself: only its own two gains have to be alike."),
    (lambda gain, pairs: bool((gain[:pairs] == gain[pairs:2 * pairs]).any()),
     "One pair with equal gains is enough in yours. All of them turn."),
    (lambda gain, pairs: pairs == 0 or bool(gain[0] == gain[pairs]), "You look at the first pair only."),
    (lambda gain, pairs: all(gain[i] == gain[i + pairs] for i in range(pairs - 1)), "You leave out the last pair."),
    (lambda gain, pairs: near(gain[:pairs].sum(), gain[pairs:2 * pairs].sum(), 1e-5),
     "You compare sums over the channels. Compare channel by channel."),
    (lambda gain, pairs: commutes(gain, pairs) and bool((gain[2 * pairs:] == gain[-1]).all()),
     "Channels that rope does not turn may have any gain."),
    (lambda gain, pairs: not commutes(gain, pairs), "Every answer is the opposite: True is for: may change places."),
], about={
    "a a b b c c d d, four pairs": "a a b b ...: which channel is turned together with channel 0?",
    "a b c d a b c and nearly d, four pairs": "Nearly equal is not equal: how much difference do you allow?",
    "a b c d, no pair": "No pair: rope turns nothing, and nothing can change places with anything.",
    "a a a a a b c d, one pair": "One pair: only channels 0 and 1 are turned.",
})


PROPERTIES = {
    "4.1": [
        (lambda y, a, b: y.shape == (len(a), len(b)), "There is one cosine for each row of a with each row of b."),
        (lambda y, a, b: y.abs().max() < 1.001, "A cosine lies between -1 and 1. Some of yours do not."),
        (lambda y, a, b: len(a) != 1 or near(y, (a * b).sum() / a.norm() / b.norm()),
         "Even with one row each, yours is no cosine."),
        (lambda y, a, b: a[-1].any() or near(y[-1], 0), "A row of zeros has no direction: 0 is asked for."),
        (lambda y, a, b: (y * (a @ b.T) >= 0).all(),
         "Where the dot product of two rows is below 0, so is their cosine. In yours it is not."),
        (lambda y, a, b: False,
         "With one row each yours is right: which lengths is the dot product of two rows divided by?")],
    "4.2": [
        (lambda y, d: d != 3 or near(y, 0.5, 1e-6) or not near(y, 0.5, 0.02),
         "Nearly: a grid that is not fine enough, or not enough random numbers? It is to be exact to five digits."),
        (lambda y, d: d != 3 or near(y, 0.5, 1e-4),
         "In 3 dimensions all cosines from -1 to 1 are as likely. What is the mean size of such a number? Yours is "
         "another."),
        (lambda y, d: d != 1024 or near(y * 32, (2 / math.pi) ** 0.5, 0.002),
         "For large d a cosine is normal, of deviation 1/sqrt(d). The mean size of such a number is another than yours.")],
    "4.3": [
        (lambda y, a, b, alpha: near(y.norm(dim=-1), 1), "Your points do not lie on the sphere: their length is not 1."),
        (lambda y, a, b, alpha: alpha != 0 or near(y, a), "With alpha 0 you do not stay at a."),
        (lambda y, a, b, alpha: alpha != 1 or near(y, b), "With alpha 1 you do not arrive at b."),
        (lambda y, a, b, alpha: near((y * a).sum(-1), (alpha * (a * b).sum(-1).clamp(-1, 1).acos()).cos(), 0.003),
         "The angle from a to your point is not alpha times the angle from a to b."),
        (lambda y, a, b, alpha: False, "The angle from a is right; is your point between a and b, in their plane?")],
    "4.4": [
        (lambda y, h, to, alpha: near(y.norm(dim=-1), 1), "Your points do not lie on the sphere: their length is not 1."),
        (lambda y, h, to, alpha: not near(h, to) or near(y, h), "Where y = h there is nowhere to go. You leave h."),
        (lambda y, h, to, alpha: ((y * to).sum(-1) >= (h * to).sum(-1) - 1e-3).all() or torch.is_tensor(alpha),
         "A step towards y should not lead away from it. Yours does."),
        (lambda y, h, to, alpha: torch.is_tensor(alpha) or near(
            (y * h).sum(-1) ** -2 - 1, (alpha * alpha) * (1 - (h * to).sum(-1) ** 2), 0.01),
         "You do not move as far as the tangent step is long, alpha times the sine of the angle between h and y."),
        (lambda y, *_: False, "With a number for alpha yours goes as far as it should: what does a vector multiply?")],
    "4.5": [
        (lambda y, lr, init, scale: near(y[0] / init, lr / scale),
         "The step: the used value is the stored number times a constant that makes it start at init. Yours moves by "
         "another share."),
        (lambda y, lr, init, scale: near(y[1], y[0] / init), "The share is the value's step over its start, init."),
        (lambda y, lr, init, scale: near(y[1] * y[2], 1),
         "So many steps of your share do not add up to the start once more, which is what doubling takes.")],
    "4.6": [
        (lambda y, d: near(y[0] ** 2 * d, 1),
         "The first: a sum of d_k products has variance d_k. Your factor, squared, does not bring it to 1."),
        (lambda y, d: near(y[1] ** 2 / d, 1),
         "The second: a cosine in d_k dimensions has variance 1 / d_k. Your factor, squared, does not bring it to 1."),
        (lambda y, d: near(y[2] ** 2, y[1]), "The third: s_qk multiplies q and k, so that it enters twice.")],
    "4.7": [
        (lambda y, *_: unit_along(y, 0, 1),
         "w_qkv reads h: each vector along the axis of h's channels gets length 1. Yours do not."),
        (lambda y, *_: unit_along(y, 1, 0),
         "w_o writes into h: each vector along the axis of h's channels gets length 1. Yours do not."),
        (lambda y, *_: unit_along(y, 2, 1),
         "w_up reads h: each vector along the axis of h's channels gets length 1. Yours do not."),
        (lambda y, *_: unit_along(y, 3, 0),
         "w_down writes into h: each vector along the axis of h's channels gets length 1. Yours do not.")],
    "4.8": [
        (lambda y, w, g, lr: near(y[0].norm(dim=-1), 1), "The rows of your master do not have length 1."),
        (lambda y, w, g, lr: len(g) or near(y[0], w), "Without a step the master stays as it is."),
        (lambda y, w, g, lr: len(g) != 1 or ((y[0] - w) * g[0]).sum() < 0, "Your first step does not go against the "
                                                                        "gradient."),
        (lambda y, w, g, lr: near(y[0], y[1], 0.01), "Your copy is not your master, rounded."),
        (lambda y, w, g, lr: len(g) != 1 or near(y[0], sphere_steps(w, g, lr)[0]),
         "Even a single step of yours ends elsewhere: how long is it, and what is normalized after it?"),
        (lambda y, *_: False,
         "One step ends where it should. Is each of fifty made from where the one before ended, and with the "
         "same lr?")],
    "4.9": [
        (lambda y, w, n: len(y) == 3, "Three numbers are asked for, medians over the heads."),
        (lambda y, w, n: min(y) >= 0.999, "Largest over smallest is at least 1. Some of yours are smaller."),
        (lambda y, w, n: n > 1 or near(torch.stack(y), head_conditions(w, 1)),
         "Even with one head, where nothing is split and no median taken, yours is off: torch.linalg.cond tells what a "
         "matrix has."),
        (lambda y, *_: False, "With one head yours is right: look at how heads are cut and what is taken over them.")],
    "4.10": [
        (lambda y, model, t, context, last: last != context or near(y, late_loss(model, t, context, last)),
         "Even where all positions of the context count, yours is off: which tokens go in, which are their targets, "
         "and what becomes of the logits?"),
        (lambda y, *_: False, "Where all positions count yours is right: which of them are the last ones?")],
    "4.11": [
        (lambda y, h, *_: near(y.norm(dim=-1), 1), "What leaves the block lies on the sphere: length 1. Yours does not."),
        (lambda y, h, p, *rope: p["alpha_a"].any() or near(y, ngpt_block(h, p, *rope), 1e-4), MLP_ALONE),
        (lambda y, h, p, *rope: h.shape[1] > 1 or near(y, ngpt_block(h, p, *rope), 1e-4), ONE_TOKEN),
        (lambda y, *_: False, MORE_TOKENS)],
    "4.12": [
        (lambda y, q, *others: is_small(q) or first_token_is_right(y, q, *others),
         "Even at the first token, which rope does not turn, yours is off: look at the mean, the root and the gain."),
        (lambda y, q, *others: not is_small(q) or first_token_is_right(y, q, *others),
         "For a small q yours is off: how large is eps, and does it stand inside the root?"),
        (lambda y, *_: False,
         "The first token, which rope does not turn, is right. The others: how is rope called, and what is done "
         "first?")],
}


EXERCISES = {"4.1": COSINE, "4.2": MEAN_ABS, "4.3": SLERP, "4.4": RIEMANN, "4.5": RATES, "4.6": SCALES,
             "4.7": MATRICES, "4.8": UPDATES, "4.9": CONDITION, "4.10": CONTEXT, "4.11": BLOCK,
             "4.12": NORMED_QUERIES, "4.13": COMMUTES}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
