"""
Lesson 6, the race: what a speed-up is, what it is worth, how sure it is, and what a scaling law
says of it.

Sources: anGPT sections 5.1-5.3, Table 2, Appendices G, H and I; nGPT section 3.1 and A.5. See
grader.py for the form. The references use elementary operations only and nothing of bench.py.
"""
import math
from functools import partial

import numpy as np
import torch

from answers import near
from grader import Exercise
from pieces import never, randn64, same


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


# 6.1 --------------------------------------------------------------------------------------------

def budget_inputs(generator):
    yield "0.5B, 20 tokens a parameter", 505.73e6, 20.0
    yield "0.5B, seven times as many", 505.73e6, 140.0
    yield "32M, 10 tokens a parameter", 32.05e6, 10.0
    yield "a laptop's million, a tenth of a token each", 1.1e6, 0.1


def budget(n, ratio):
    d = n * ratio
    return d, 6.0 * n * d


BUDGET = Exercise(
    reference=budget, inputs=budget_inputs,
    parts=("tokens", "FLOPs"),
    misconceptions={
    "That is what one token costs; a run has D of them.":
        lambda n, tokens: (tokens, 6.0 * n),
    "Two FLOPs a weight and token is the forward pass alone.":
        lambda tokens, FLOPs: (tokens, FLOPs / 3),
    "That is the backward pass alone.":
        lambda tokens, FLOPs: (tokens, FLOPs * 2 / 3),
    "`ratio` is tokens for each parameter, not the other way.":
        lambda n, ratio: budget(n, 1 / ratio),
    "`ratio` is for one parameter; the run is for all of them.":
        lambda n, ratio: (ratio, 6.0 * n * ratio),
})


# 6.2 --------------------------------------------------------------------------------------------

def reach_inputs(generator):
    tokens = numbers(1e6, 2e6, 4e6, 8e6)
    losses = numbers(2.0, 1.7, 1.5, 1.4)
    yield "between two runs", 1.6, tokens, losses
    yield "the loss of a run", 1.7, tokens, losses
    yield "below all of them", 1.3, tokens, losses
    yield "above all of them", 2.4, tokens, losses
    yield "two runs", 3.0, numbers(5e9, 7e10), numbers(3.2, 2.8)


def tokens_for(target, tokens, losses, *, x=math.log, y=math.log, back=math.exp):
    tokens = [float(n) for n in tokens]
    losses = [float(loss) for loss in losses]
    i = 0
    while i < len(tokens) - 2 and losses[i + 1] > target:
        i += 1
    share = (y(losses[i]) - y(target)) / (y(losses[i]) - y(losses[i + 1]))
    start = x(tokens[i])
    return back(start + share * (x(tokens[i + 1]) - start))


def first_below(target, tokens, losses):
    for n, loss in zip(tokens, losses):
        if loss <= target:
            return n
    return tokens[-1]


def np_interp(target, tokens, losses):
    x = losses.log().numpy()
    y = tokens.log().numpy()
    return np.exp(np.interp(math.log(target), x[::-1], y[::-1]))


def least_squares(x, y):
    """Slope and intercept of the straight line through the points."""
    dx = x - x.mean()
    dy = y - y.mean()
    slope = (dx * dy).sum() / (dx * dx).sum()
    return slope, y.mean() - slope * x.mean()


def by_one_law(target, tokens, losses):
    slope, level = least_squares(tokens.log(), losses.log())
    return ((math.log(target) - level) / slope).exp()


REACH = Exercise(reference=tokens_for, inputs=reach_inputs, misconceptions={
    "Your axis of losses is plain; a power law is straight where both are logarithmic.":
        partial(tokens_for, y=same),
    "Your axis of tokens is plain; both are logarithmic.":
        partial(tokens_for, x=same, back=same),
    "You go by the last two runs, wherever the loss lies.":
        lambda target, tokens, losses: tokens_for(target, tokens[-2:], losses[-2:]),
    "You go by the first two runs, wherever the loss lies.":
        lambda target, tokens, losses: tokens_for(target, tokens[:2], losses[:2]),
    "Right between the runs. Beyond them np.interp stays where the last one is; the line goes "
    "on.":
        np_interp,
    "np.interp wants its first list ascending, and losses fall.":
        lambda target, tokens, losses: np_interp(target, tokens.flip(0), losses.flip(0)),
    "You draw one line from the first run to the last, past those between.":
        lambda target, tokens, losses: tokens_for(target, tokens[[0, -1]], losses[[0, -1]]),
    "You fit one law through all runs; here the two that the loss lies between decide.":
        by_one_law,
})


# 6.3 --------------------------------------------------------------------------------------------

ARCH, PLANNED, DONE, LOSS = range(4)                    # the columns


def log_rows(generator, plans, gain=1.05, wave=0.1, early=False):
    """Rows (arch, planned, so far, loss) in any order; plans: (arch, planned, stopped after, row to
    row).

    Arch 1 is lower by the factor `gain`; on its way a run is above its line by up to `wave`; with
    `early` its lowest loss is one before the end.
    """
    rows = []
    for arch, planned, end, every in plans:
        luck = 1 + 0.02 * randn64(generator, 1).item()
        for done in range(every, end + 1, every):
            way = 1 + wave * (1 - done / planned)
            loss = luck * way * 5 * done ** -0.15 / gain ** arch
            if early and planned - every <= done < planned:
                loss = 0.97 * 5 * planned ** -0.15 / gain ** arch
            rows.append((arch, planned, done, loss))
    order = torch.randperm(len(rows), generator=generator)
    return torch.tensor(rows, dtype=torch.float64)[order]


def rows_inputs(generator):
    one = [
        (0, 100, 100, 20),
        (0, 500, 500, 20),
        (1, 100, 100, 20),
        (1, 500, 500, 20),
    ]
    yield "two runs each", log_rows(generator, one)
    yield "two seeds each", log_rows(generator, [*one, *one])
    yield "on the way ahead of a run that ends there", log_rows(generator, one, wave=-0.1)
    stopped = [(1, 1000, 400, 50), (0, 1000, 900, 50)]
    yield "two that were stopped", log_rows(generator, [*one, *one, *stopped])
    yield "two that were stopped shortly before their end", log_rows(
        generator, [*one, (0, 500, 480, 20), (1, 500, 480, 20), (1, 100, 95, 5)])
    three = [
        (0, 200, 200, 50),
        (0, 400, 400, 50),
        (1, 100, 100, 50),
        (1, 200, 200, 50),
        (1, 400, 400, 50),
    ]
    yield "three budgets of one, two of the other", log_rows(generator, three)
    yield "the other ran longer", log_rows(generator, [*one, (1, 2000, 2000, 100)])
    yield "the lowest loss not at the end", log_rows(generator, one, early=True)
    yield "a slower one", log_rows(generator, one, gain=0.97)


def ends(rows):
    return rows[rows[:, PLANNED] == rows[:, DONE]]


def means(rows, by, of=torch.mean):
    """tokens (K,) ascending and for each the mean of the losses."""
    budgets = rows[:, by].unique()
    losses = [of(rows[rows[:, by] == n, LOSS]) for n in budgets]
    return budgets, torch.stack(losses)


def reproduced(rows, *, keep=ends, by=PLANNED, of=torch.mean, reach=tokens_for, goal=-1):
    """goal: the place of the baseline's budget, and of the loss to be reached."""
    base = keep(rows[rows[:, ARCH] == 0])
    other = keep(rows[rows[:, ARCH] == 1])
    budgets, targets = means(base, by, of)
    tokens, losses = means(other, by, of)
    return float(budgets[goal]) / float(reach(float(targets[goal]), tokens, losses))


def longest(rows):
    """All rows of the longest runs: what they had on their way."""
    return rows[rows[:, PLANNED] == ends(rows)[:, PLANNED].max()]


def at_equal_steps(rows, worth=False):
    losses = []
    for arch in (0, 1):
        found = means(ends(rows[rows[:, ARCH] == arch]), PLANNED)
        losses.append(float(found[1][-1]))
    if worth:
        return 100 * (1 - losses[1] / losses[0])
    return losses[0] / losses[1]


def tokens_reached(rows, right):
    base = ends(rows[rows[:, ARCH] == 0])
    return float(base[:, PLANNED].max()) / right


def exchanged(rows):
    swapped = rows.clone()
    swapped[:, ARCH] = 1 - rows[:, ARCH]
    return reproduced(swapped)


REPRODUCED = Exercise(reference=reproduced, inputs=rows_inputs, misconceptions={
    "You read the other architecture in mid-cosine: on its longest run's way the rate is still "
    "high, at a run's own end it is not.":
        partial(reproduced, keep=longest, by=DONE),
    "You compare at equal steps: a ratio of losses. How many tokens apart are equal losses?":
        at_equal_steps,
    "Percents of loss at the same budget are asked nowhere. With how many tokens is the same "
    "loss reached?":
        partial(at_equal_steps, worth=True),
    "The better of two seeds is luck: all of them count.":
        partial(reproduced, of=torch.min),
    "One seed of several is left in yours.":
        partial(reproduced, of=lambda losses: losses[0]),
    "Rows on the way count in yours as if runs had ended there. At a run's end, so far is what "
    "was planned.":
        partial(reproduced, keep=same, by=DONE),
    "You take the baseline's shortest budget, and the loss there. The longest was asked for.":
        partial(reproduced, goal=0),
    "You take a budget at which somebody ran. `tokens_for` finds what lies between two.":
        partial(reproduced, reach=first_below),
    "Those are tokens; the baseline's over these is the factor.":
        tokens_reached,
    "You go to architecture 1's last loss. The one to be reached is the baseline's.":
        lambda rows: 1 / exchanged(rows),
    "In your answer architecture 1 is the baseline: column 0 says 0 for it.":
        exchanged,
})


# 6.4 --------------------------------------------------------------------------------------------

def time_inputs(generator):
    cases = (
        (1.4, 2.75),
        (1.29, 9.6),
        (10.0, 80.0),
        (20.0, 60.0),
        (1.05, 9.6),
        (1.3, 0.0))
    for factor, percent in cases:
        yield f"{factor:g} times fewer tokens, {percent:g}% more a step", factor, percent


def of_speed(speed):
    return speed, 100 * (1 - 1 / speed)


def in_time(factor, percent):
    return of_speed(factor / (1 + percent / 100))


IN_TIME = Exercise(
    reference=in_time, inputs=time_inputs,
    parts=("factor", "saved"),
    misconceptions={
    "You subtract percents of two different things: tokens, and the time of each.":
        lambda factor, percent: of_speed(factor - percent / 100),
    "A step that takes a quarter longer is not one of which a quarter is lost: with 100% nothing "
    "would be left.":
        lambda factor, percent: of_speed(factor * (1 - percent / 100)),
    "A dearer step makes yours faster.":
        lambda factor, percent: of_speed(factor * (1 + percent / 100)),
    "Percents are hundredths.":
        lambda factor, percent: of_speed(factor / (1 + percent)),
    "The factor is right. But who is twice as fast does not save 100% of the time.":
        lambda right: (right[0], 100 * (right[0] - 1)),
    "You have the share of the tokens that is saved. The time is asked for.":
        lambda right, factor: (right[0], 100 * (1 - 1 / factor)),
    "The factor is right. From the tokens saved you took the step's percents: those are percents "
    "of what is left.":
        lambda right, factor, percent: (right[0], 100 * (1 - 1 / factor) - percent),
    "That is the time that is left, not what is saved.":
        lambda right: (right[0], 100 / right[0]),
    "What a step costs does not enter.":
        lambda factor: of_speed(factor),
    "You cut what is saved off at 0. Who is slower saves less than nothing: a negative number.":
        lambda right: (right[0], max(0.0, right[1])),
    "You give the size of what is saved. Who is slower saves less than nothing: a negative "
    "number.":
        lambda right: (right[0], abs(right[1])),
})


# 6.5 --------------------------------------------------------------------------------------------

def share_inputs(generator):
    cases = (
        (2.0, 1.4),
        (1.8, 1.29),
        (4.0, 1.0),
        (1.5, 1.5),
        (1.2, 0.9),
        (1.2, 1.5),
        (10.0, 3.0))
    for weak, strong in cases:
        yield f"{weak:g} against the weak, {strong:g} against the strong", weak, strong


def baseline_share(weak, strong):
    worth = weak / strong
    return worth, math.log(worth) / math.log(weak)


                   # divides by 0 where strong is 1


SHARE = Exercise(
    reference=baseline_share, inputs=share_inputs,
    parts=("worth", "share"),
    misconceptions={
    "Factors follow one another: they multiply. You take one from the other.":
        lambda weak, strong, share: (weak - strong, share),
    "A share of the excess over 1 adds up only where factors add. What turns a product into a "
    "sum?":
        lambda weak, strong, worth: (worth, (weak - strong) / (weak - 1)),
    "You divide a difference by `weak`: where the architecture adds nothing your share is not 1.":
        lambda weak, strong, worth: (worth, (weak - strong) / weak),
    "You divide the two factors as they are: where nothing comes from the baseline yours is not "
    "0.":
        lambda strong, worth: (worth, 1 / strong),
    "A share of which whole? You divide by the architecture's part.":
        lambda strong, worth: (worth, math.log(worth) / math.log(strong)),
    "The logarithm is a good idea; now its share of the whole one's.":
        lambda worth: (worth, math.log(worth)),
    "You give the size of the share. A strong baseline that is worth less than the weak one has "
    "a share below 0.":
        lambda worth, share: (worth, abs(share)),
    "You keep the share between 0 and 1. It is above 1 where the architecture is behind the "
    "strong baseline.":
        lambda worth, share: (worth, min(1.0, max(0.0, share))),
})


# 6.6 --------------------------------------------------------------------------------------------

def rate_inputs(generator):
    rates = numbers(5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    yield "five rates", rates, numbers(1.50, 1.43, 1.40, 1.41, 1.47)
    yield "three rates, unevenly spaced", numbers(1e-3, 2e-3, 1e-2), numbers(1.42, 1.40, 1.60)
    yield "the lowest loss at the highest rate", rates[:3], numbers(1.50, 1.43, 1.40)
    yield "the lowest loss at the lowest rate", rates[2:], numbers(1.40, 1.41, 1.47)
    yield "a steep end", rates, numbers(2.60, 1.70, 1.41, 1.40, 1.44)
    diverged = numbers(1.45, 1.40, 1.41, 1.70, math.inf)
    yield "a run that diverged, not beside the best", rates, diverged
    yield "the rate above the best diverged", rates[:4], numbers(1.50, 1.43, 1.40, math.inf)
    yield "the same, but the next did not", rates, numbers(1.50, 1.43, 1.40, math.inf, 1.90)


def vertex(x, y):
    """The lowest point of the parabola through three points."""
    first = (y[1] - y[0]) / (x[1] - x[0])
    second = (y[2] - y[1]) / (x[2] - x[1])
    bend = (second - first) / (x[2] - x[0])
    low = (x[0] + x[1]) / 2 - first / (2 * bend)
    level = y[0] + first * (low - x[0]) + bend * (low - x[0]) * (low - x[1])
    return low, level


def vertex_if_even(x, y):
    """The lowest point if the three stood equally far apart."""
    share = (y[0] - y[2]) / (y[0] - 2 * y[1] + y[2]) / 2
    return x[1] + share * (x[2] - x[1]), y[1] - share * (y[0] - y[2]) / 4


def best_rate(rates, losses, *, to=math.log, back=math.exp, finite=False, through=vertex):
    """finite: whether runs that diverged are left out."""
    points = []
    for rate, loss in zip(rates, losses):
        if not finite or math.isfinite(loss):
            points.append((to(float(rate)), float(loss)))
    i = min(range(len(points)), key=lambda j: points[j][1])
    around = points[max(i - 1, 0):i + 2]
    x, y = zip(*around)
    if len(around) < 3 or math.inf in y:
        return math.nan, math.nan
    low, loss = through(x, y)
    return back(low), loss


def tried(rates, losses, rate):
    """The best rate that was tried and its loss; nan where `rate` is."""
    if math.isnan(rate):
        return math.nan, math.nan
    return float(rates[losses.argmin()]), float(losses.min())


def mirrored(rates, losses, rate, loss):
    best, _ = tried(rates, losses, rate)
    return best * best / rate, loss


def of_log_losses(rates, losses):
    rate, level = best_rate(rates, losses.log())
    return rate, math.exp(level)


def through_all(rates, losses, rate):
    if math.isnan(rate):
        return math.nan, math.nan
    ran = losses.isfinite()
    a, b, c = np.polyfit(rates[ran].log().numpy(), losses[ran].numpy(), 2)
    return math.exp(-b / (2 * a)), c - b * b / (4 * a)


RATE = Exercise(
    reference=best_rate, inputs=rate_inputs,
    parts=("rate", "loss"),
    misconceptions={
    "You give the best rate that was tried, even at an edge, where nobody knows what is beyond.":
        lambda rates, losses: (rates[losses.argmin()], losses.min()),
    "You see the edges. But between the rates that were tried there may be a better one.":
        tried,
    "Your parabola stands over the plain rate; rates that double are equally far apart in the "
    "logarithm.":
        partial(best_rate, to=same, back=same),
    "Your parabola goes near all points: steep ends pull it away from the lowest three.":
        through_all,
    "You leave out what diverged; beside the best rate it is an edge, too.":
        partial(best_rate, finite=True),
    "The rate is right. The loss should be the parabola's there, not a run's.":
        lambda rates, losses, rate: (rate, tried(rates, losses, rate)[1]),
    "Your formula is for rates that are equally far apart. Not all are.":
        partial(best_rate, through=vertex_if_even),
    "The loss is right. The rate lies on the other side of the best run: a sign.":
        mirrored,
    "Your parabola goes through the logarithms of the losses. Only the rate has one.":
        of_log_losses,
})


# 6.7 --------------------------------------------------------------------------------------------

def table_of(first, **seeds):
    """Losses (rates, 3): the first seed's at all rates, others' in rows given as r1=(.., ..), else
    nan."""
    losses = torch.full((len(first), 3), math.nan, dtype=torch.float64)
    losses[:, 0] = numbers(*first)
    for name, others in seeds.items():
        losses[int(name[1:]), 1:] = numbers(*others)
    return losses


def lead_inputs(generator):
    base = table_of(
        (1.150, 1.131, 1.109, 1.114),
        r1=(1.125, 1.130),
        r2=(1.116, 1.121))
    other = table_of(
        (1.130, 1.117, 1.128, 1.155),
        r1=(1.122, 1.126))
    yield "a lead that a search takes back", base, other, 1
    slower = other + numbers(0.02, 0.01, 0.03, 0.05)[:, None]
    yield "the built-in rate is the best of both", slower, other, 1
    high = table_of(
        (1.19, 1.14, 1.12, 1.10),
        r0=(1.20, 1.18),
        r3=(1.14, 1.15))
    yield "the best of both at other rates", base, high, 1
    yield "the other alone is searched in vain", high, other, 1
    lucky = table_of(
        (1.100, 1.099, 1.120),
        r0=(1.103, 1.108),
        r1=(1.125, 1.130),
        r2=(1.121, 1.127))
    steady = table_of(
        (1.110, 1.105, 1.118),
        r0=(1.116, 1.112),
        r1=(1.108, 1.112),
        r2=(1.10, 1.09))
    yield "more seeds than one at all rates", lucky, steady, 0


def first_seed(losses):
    return int(losses[:, 0].argmin())


def mean_of_seeds(row):
    return row[~row.isnan()].mean()


def leads(baseline, other, built_in, *, best=first_seed, of=mean_of_seeds, first=True,
          second=True):
    """first, second: whether the baseline and the other are searched."""
    built = of(baseline[built_in]) - of(other[built_in])
    rows = [built_in, built_in]
    if first:
        rows[0] = best(baseline)
    if second:
        rows[1] = best(other)
    return built, of(baseline[rows[0]]) - of(other[rows[1]])


def lowest_mean(losses):
    return int(losses.nanmean(1).argmin())


def lowest_run(losses):
    return int(losses.nan_to_num(math.inf).min(1).values.argmin())


def lowest_of(row):
    return row[~row.isnan()].min()


def at_one_rate(baseline, other, right):
    row = first_seed(baseline)
    return right[0], mean_of_seeds(baseline[row]) - mean_of_seeds(other[row])


LEADS = Exercise(
    reference=leads, inputs=lead_inputs,
    parts=("built-in", "searched"),
    misconceptions={
    "Your search is for the other side only: the baseline keeps the rate that was built in.":
        partial(leads, first=False),
    "Your search is for the baseline only. Each side gets its own best rate.":
        partial(leads, second=False),
    "You give the other architecture the baseline's best rate. It has one of its own.":
        at_one_rate,
    "The lowest of many runs is partly luck, and who ran more has more of it: choose with the "
    "first seed, then average.":
        partial(leads, best=lowest_run, of=lowest_of),
    "The seed that chose the rate is the only one in yours, and it was lucky there: average over "
    "all seeds.":
        partial(leads, of=lambda row: row[0]),
    "nan stands where no run was made: average over those that are there.":
        partial(leads, of=torch.mean),
    "You choose by means, some over one seed and some over three. The first seed ran at every "
    "rate.":
        partial(leads, best=lowest_mean),
    "Your second number is a mean over good rates and bad ones.":
        lambda baseline, other, right: (right[0], baseline.nanmean() - other.nanmean()),
})


# 6.8 --------------------------------------------------------------------------------------------

def law_inputs(generator):
    def noisy(c, level, power, spread):
        noise = spread * randn64(generator, len(c))
        return c, level * c ** -power * noise.exp()

    yield "a law without noise", *noisy(numbers(1e6, 2e6, 4e6), 20.0, 0.2, 0.0)
    yield "five runs with noise", *noisy(numbers(1e6, 2e6, 4e6, 8e6, 1.6e7), 20.0, 0.2, 0.05)
    yield "FLOPs of a laptop", *noisy(1e12 * numbers(1.0, 2.0, 4.0), 300.0, 0.18, 0.03)
    yield "FLOPs of a cluster", *noisy(10.0 ** numbers(17, 18, 19, 20, 21), 25.0, 0.05, 0.02)


def power_law(c, losses):
    slope, level = least_squares(c.log(), losses.log())
    return level.exp(), -slope


def straight(c, losses, *, x=same, y=same, level=same):
    slope, start = least_squares(x(c), y(losses))
    return level(start), -slope


LAW = Exercise(
    reference=power_law, inputs=law_inputs,
    parts=("A", "a"),
    misconceptions={
    "That is a straight line through the losses as they are.":
        straight,
    "You took the logarithm of C, not of L.":
        partial(straight, x=torch.log),
    "You took the logarithm of L, not of C.":
        partial(straight, y=torch.log, level=torch.exp),
    "You use the first and the last run only.":
        lambda c, losses: power_law(c[[0, -1]], losses[[0, -1]]),
    "Two kinds of logarithm: one on the way in, another one on the way out.":
        partial(straight, x=torch.log10, y=torch.log10, level=torch.exp),
    "A is the loss of the law at C = 1, not that of a run.":
        lambda losses, a: (losses[0], a),
})


# 6.9 --------------------------------------------------------------------------------------------

def table_inputs(generator):
    yield "GPT+ at 1e21 FLOPs", 13.408079, 0.466271, 0.336617, 0.465600, 1e21
    yield "anGPT at 1e21 FLOPs", 9.727337, 0.473190, 0.650506, 0.451378, 1e21
    yield "GPT+ at 1e17 FLOPs", 13.408079, 0.466271, 0.336617, 0.465600, 1e17
    yield "a pair of laws that fits", 1.8257418583505538, 0.5, 0.09128709291752769, 0.5, 1e19


def table(d0, a_d, n0, a_n, c):
    d = d0 * c ** a_d
    n = n0 * c ** a_n
    return a_d + a_n, 6 * n * d / c, d / n


TABLE = Exercise(
    reference=table, inputs=table_inputs,
    parts=("sum", "6ND/C", "D/N"),
    misconceptions={
    "The laws' first numbers, D0 and N0, do not enter, or not as factors.":
        lambda a_d, a_n, c: table(1.0, a_d, 1.0, a_n, c),
    "You gave D the exponent of N.":
        lambda d0, a_d, n0, a_n, c: table(d0, a_n, n0, a_d, c),
    "You take D from C = 6ND, so that your check cannot fail: D has a law of its own.":
        lambda right, n0, a_n, c: (right[0], 1.0, c / 6 / (n0 * c ** a_n) ** 2),
    "For D / N you take D from C = 6ND. Its own law says another D.":
        lambda right, n0, a_n, c: (right[0], right[1], c / 6 / (n0 * c ** a_n) ** 2),
    "The arguments come as d0, a_d, n0, a_n, c: first the law of D, then that of N.":
        lambda d0, n0, a_d, a_n, c: table(d0, a_d, n0, a_n, c),
})


# 6.10 -------------------------------------------------------------------------------------------

def exponent_inputs(generator):
    yield "Table I.1's for D", 0.466271, 0.473190, 1.08e-6, 1.11e-6, 0.01
    yield "a difference with p = 0.073", 0.050, 0.0526532, 1.08e-6, 1.11e-6, 0.002
    yield "the same, and a wide margin", 0.0526532, 0.050, 1.08e-6, 1.11e-6, 0.01
    yield "three seeds each: wide errors", 0.21, 0.18, 4e-4, 9e-4, 0.02
    yield "clearly different, and all the same close", 0.2, 0.201, 1e-8, 4e-8, 0.005
    yield "equal, as far as one can see", 0.2, 0.2, 1e-4, 1e-5, 0.005
    yield "clearly lower, and not close", 0.21, 0.18, 1e-6, 4e-6, 0.01


def root_of_sum(v, w):
    return math.sqrt(v + w)


def two_sided(z):
    return math.erfc(abs(z) / 2 ** 0.5)


def compare(a, b, var_a, var_b, margin, *, error=root_of_sum):
    s = error(var_a, var_b)
    z = (b - a) / s
    low = b - a - 1.96 * s
    high = b - a + 1.96 * s
    return z, two_sided(z), low, high, float(-margin <= low and high <= margin)


def touching(right, margin):
    low, high = right[2:4]
    return *right[:4], float(-margin <= high and low <= margin)


PARTS = ("z", "p", "low", "high", "equal")
COMPARE = Exercise(
    reference=compare, inputs=exponent_inputs,
    parts=PARTS,
    misconceptions={
    "Not rejected is not equal: few or noisy runs reject nothing. What does the interval leave "
    "open?":
        lambda right, p: (*right[:4], float(p > 0.05)),
    "Your interval only has to touch the margins. When is all of it between them?":
        touching,
    "A p-value asks whether 0 is possible. Whether the two are close enough is another question.":
        lambda right, p: (*right[:4], float(p < 0.05)),
    "The best guess of the difference is small; how sure is it?":
        lambda right, a, b, margin: (*right[:4], float(abs(b - a) <= margin)),
    "Variances are squares of errors.":
        partial(compare, error=lambda v, w: v + w),
    "You add the errors, as if both always erred to opposite sides. What adds up for independent "
    "numbers?":
        partial(compare, error=lambda v, w: v ** 0.5 + w ** 0.5),
    "Both are uncertain; you use the first one's variance only.":
        partial(compare, error=lambda v, w: v ** 0.5),
    "The interval is to be that of the difference.":
        lambda z, p, low, high, a: (z, p, low + a, high + a, 0.0),
    "Your interval is the one of z. It is to be that of the difference, 1.96 standard errors to "
    "each side.":
        lambda z, p: (z, p, z - 1.96, z + 1.96, 0.0),
    "z has a sign: which exponent is the larger?":
        lambda z, right: (abs(z), *right[1:]),
    "Yours is a - b all the way. It is b - a which is asked for, in z and in the interval.":
        lambda a, b, var_a, var_b, margin: compare(b, a, var_a, var_b, margin),
})


# 6.11 -------------------------------------------------------------------------------------------

def draw_inputs(generator):
    def case(runs, seeds, gain):
        tokens = 2.0 ** torch.arange(runs) * 1e6
        shared = 0.1 * randn64(generator, seeds)
        law = 3 * (tokens / 1e6) ** -0.2
        losses = law[:, None] + shared + 0.03 * randn64(generator, runs, seeds)
        baseline = losses[-1] + gain + 0.05 * randn64(generator, seeds)
        return tokens, baseline, losses, torch.randint(seeds, (6, seeds), generator=generator)

    yield "three seeds", *case(3, 3, 0.2)
    yield "three seeds, slower than the baseline", *case(3, 3, -0.1)
    yield "five seeds, four lengths", *case(4, 5, 0.3)


def bootstrap(tokens, baseline, losses, draws, *, of=torch.mean, mine=True, base=True):
    """mine, base: whether the seeds of the one and the other are drawn."""
    found = []
    for draw in draws:
        target = baseline
        taken = losses
        if base:
            target = baseline[draw]
        if mine:
            taken = losses[:, draw]
        reached = [of(run) for run in taken]
        found.append(float(tokens[-1]) / tokens_for(float(of(target)), tokens, reached))
    return numbers(*found)


def factors_of_seeds(tokens, baseline, losses, draws):
    each = torch.arange(len(baseline))[:, None]
    return bootstrap(tokens, baseline, losses, each)[draws].mean(1)


def each_seed_once(tokens, baseline, losses, draws):
    all_seeds = torch.arange(len(baseline)).expand_as(draws)
    return bootstrap(tokens, baseline, losses, all_seeds)


def repeats_dropped(tokens, baseline, losses, draws):
    found = [bootstrap(tokens, baseline, losses, draw.unique()[None]) for draw in draws]
    return torch.cat(found)


def geometric_mean(losses):
    return losses.log().mean().exp()


BOOTSTRAP = Exercise(reference=bootstrap, inputs=draw_inputs, misconceptions={
    "The baseline has seeds, too; in yours it is known exactly.":
        partial(bootstrap, base=False),
    "Only the baseline's seeds are drawn in yours; the other architecture has as many that might "
    "have come out differently.":
        partial(bootstrap, mine=False),
    "You draw factors that each rest on one seed. Average the losses first, then one factor.":
        factors_of_seeds,
    "You average the logarithms of the losses. The mean is one of the losses themselves.":
        partial(bootstrap, of=geometric_mean),
    "You divide the shortest budget, tokens[0]. The baseline's longest runs had tokens[-1].":
        lambda right, tokens: right * tokens[0] / tokens[-1],
    "You use the first seed of each draw only.":
        lambda tokens, baseline, losses, draws: bootstrap(tokens, baseline, losses, draws[:, :1]),
    "The draws do not enter: all of your factors are the same.":
        each_seed_once,
    "A seed that was drawn twice counts twice.":
        repeats_dropped,
    "Those are tokens; the factor compares them with the longest runs'.":
        lambda right, tokens: tokens[-1] / right,
    "The numbers are right, their order is not: one for each draw, in the draws' order.":
        lambda right: right.sort().values,
})


# What holds of every right answer: said where none of the known mistakes fits -------------------


def between_neighbours(y, rates, losses):
    i = losses.argmin()
    return y[0].isnan() or rates[i - 1] < y[0] < rates[i + 1]


def without_noise(c):
    return c[0] == 1e6 and len(c) == 3


# 6.12 -------------------------------------------------------------------------------------------

def luck_inputs(generator):
    def case(runs, others, seeds, true, times=40):
        a = 1.12 + 0.01 * randn64(generator, runs)
        b = 1.15 + 0.02 * randn64(generator, others)
        mine = torch.randint(runs, (times, seeds), generator=generator)
        theirs = torch.randint(others, (times, seeds), generator=generator)
        return a, b, mine, theirs, true

    yield "three seeds, nearly alike", *case(16, 16, 3, 0.003)
    yield "one seed", *case(16, 16, 1, 0.004)
    yield "more runs of one, eight seeds", *case(20, 12, 8, 0.002)
    yield "far apart", *case(16, 16, 3, 0.3)


def wrong_winner(a, b, mine, theirs, true, *, centre=torch.mean, of=torch.mean, apart=1):
    """apart: of the true difference, with its sign."""
    a = a - centre(a)
    b = b - centre(b) + apart * true
    wins = []
    for own, other in zip(mine, theirs):
        wins.append(of(b[other]) < of(a[own]))
    return numbers(*wins).mean()


def as_stored_and_apart(a, b, mine, theirs, true):
    return wrong_winner(a, b, mine, theirs, true + float(b.mean() - a.mean()))


def run_against_run(a, b, mine, theirs, true):
    return wrong_winner(a, b, mine.reshape(-1, 1), theirs.reshape(-1, 1), true)


LUCK = Exercise(reference=wrong_winner, inputs=luck_inputs, misconceptions={
    "You add `true` to the difference that the stored means have. Take both means away before.":
        as_stored_and_apart,
    "You count the comparisons that the better architecture wins. Asked is how often the other "
    "does.":
        lambda right: 1 - right,
    "In yours b is better by `true`: its losses are to be higher.":
        partial(wrong_winner, apart=-1),
    "Your two are equally good. b is to be worse by `true`.":
        partial(wrong_winner, apart=0),
    "Your two lie twice as far apart as they should: move one of them by `true`.":
        partial(wrong_winner, apart=2),
    "You compare single runs. A comparison is between two means, each over the seeds of a row.":
        run_against_run,
    "You compare the first run of each row only. Average over the row's seeds.":
        lambda a, b, mine, theirs, true: wrong_winner(a, b, mine[:, :1], theirs[:, :1], true),
    "Both draw the same runs in yours: b has a table of its own.":
        lambda a, b, mine, true: wrong_winner(a, b, mine % len(b), mine % len(b), true),
    "You count comparisons. Asked is their share, from 0 to 1.":
        lambda right, mine: right * len(mine),
    "You compare medians of seeds. A race compares means.":
        partial(wrong_winner, of=torch.median),
    "You compare the best seeds. A race compares means.":
        partial(wrong_winner, of=torch.min),
    "You move medians to 0 and `true`. The true difference is one of means.":
        partial(wrong_winner, centre=torch.median)})


PROPERTIES = {
    "6.1": {
        "Your tokens over the parameters are not `ratio`.":
            lambda y, n, ratio: near(y[0] / n, ratio, 1e-6),
        "Your FLOPs over tokens and parameters are not 6: see the formula in the text.":
            lambda y, n: near(y[1] / y[0] / n, 6, 1e-6)},
    "6.2": {
        "At a loss that a run has, the answer is that run's tokens. Yours is not.":
            lambda y, target: target != 1.7 or near(y, 2e6),
        "A loss between two runs lies between their tokens.":
            lambda y, target: target != 1.6 or 2e6 < y < 4e6,
        "A loss below all needs more tokens than all.":
            lambda y, target: target != 1.3 or y > 8e6,
        "A loss above all needs fewer tokens than all.":
            lambda y, target: target != 2.4 or y < 1e6,
        "Which axes are logarithmic, and between which two runs is your line?":
            never},
    "6.3": {
        "A factor of tokens is positive.":
            lambda y: y > 0,
        "Yours says of the slower of the two that it is faster: which loss is to be reached, "
        "with how many tokens, and above 1 for whom?":
            lambda y, rows: (y > 1) == (reproduced(rows) > 1),
        "First the ends of each architecture's complete runs, a mean over seeds for each budget, "
        "budgets ascending; then the baseline's last loss and budget, and tokens_for once.":
            never},
    "6.4": {
        "Where a step costs as much, the factor in time is the one in tokens.":
            lambda y, factor, percent: percent != 0 or near(y[0], factor),
        "The factor: time is tokens times the time of each. In yours it is something else.":
            lambda y, right: near(y[0], right[0]),
        "What is saved does not fit your factor: who is twice as fast needs half the time, and "
        "saves 50%.":
            lambda y: near(y[1], 100 - 100 / y[0])},
    "6.5": {
        "The two steps, from the weak baseline to the strong one and on to the architecture, "
        "multiply to `weak`. Yours do not.":
            lambda y, weak, strong: near(y[0] * strong, weak),
        "Where the architecture gains nothing on the strong baseline, all is the baseline's. "
        "Your share is not 1.":
            lambda y, strong: strong != 1 or near(y[1], 1),
        "Where both baselines are as good, nothing is the baseline's. Your share is not 0.":
            lambda y, weak, strong: weak != strong or near(y[1], 0),
        "The two ends, 0 and 1, are right. But your share and that of the other step do not add "
        "up to 1 where factors multiply.":
            never},
    "6.6": {
        "The lowest loss at an edge: the search is not finished, so nan.":
            lambda y, losses: losses.argmin() not in (0, len(losses) - 1) or y[0].isnan(),
        "The lowest point of the parabola is not above the lowest run. Yours is.":
            lambda y, losses: y[0].isnan() or y[1] <= losses.min() + 1e-9,
        "The lowest point lies between the two neighbours. Your rate does not.":
            between_neighbours,
        "Three points that are not alike: the parabola goes a little below the lowest of them. "
        "Yours does not.":
            lambda y, losses: y[0].isnan() or y[1] < losses.min() - 1e-9,
        "Over which axis does the parabola stand, and through which points does it go?":
            never},
    "6.7": {
        "The first: both at the row `built_in`, a mean over the seeds that ran there, baseline "
        "minus other, in nats.":
            lambda y, right: near(y[0], right[0]),
        "Where the built-in rate is the best of both, the search changes nothing. Your two "
        "numbers differ there.":
            lambda y, right: not near(right[0], right[1], 1e-9) or near(y[0], y[1]),
        "The first number is right. Which row has each side's lowest loss with the first seed, "
        "and which runs are there?":
            never},
    "6.8": {
        "Losses fall with C, so a is positive in L = A C^-a.":
            lambda y: y[1] > 0,
        "Even of a law without noise you do not find the exponent.":
            lambda y, c: not without_noise(c) or near(y[1], 0.2),
        "Even of a law without noise you do not find A, its loss at C = 1.":
            lambda y, c: not without_noise(c) or near(y[0], 20.0),
        "A law without noise you find. With noise, what is it whose squares are to be least?":
            never},
    "6.9": {
        "The first: the sum of the two exponents.":
            lambda y, right: near(y[0], right[0], 1e-6),
        "The second: there is a pair of laws that fits; there it should be 1. Yours is not.":
            lambda y, a_d: a_d != 0.5 or near(y[1], 1),
        "The third: where both exponents are alike D / N does not depend on C. Yours does, or is "
        "no ratio of the two.":
            lambda y, right, a_d: a_d != 0.5 or near(y[2], right[2]),
        "Where the laws fit yours is right: does C stand with the exponents that were given?":
            never},
    "6.10": {
        "z: how many of its own standard errors is b - a? Yours is another number.":
            lambda y, right: near(y[0], right[0]),
        "A p is a probability: between 0 and 1.":
            lambda y: 0 <= y[1] <= 1.0001,
        "Your p is not the two-sided one of your z.":
            lambda y: near(y[1], two_sided(float(y[0]))),
        "Your interval's middle is not b - a.":
            lambda y, a, b: near((y[2] + y[3]) / 2, b - a, 1e-6),
        "Your interval reaches another number of standard errors to each side than 1.96.":
            lambda y, right: near(y[3] - y[2], right[3] - right[2], 1e-6),
        "The last: is all of your interval between the two margins?":
            never},
    "6.11": {
        "There is one factor for each draw.":
            lambda y, draws: y.shape == (len(draws),),
        "Take the first draw by hand: the seeds of both, a mean for each length, then tokens_for "
        "once.":
            never},
}


EXERCISES = {
    "6.1": BUDGET,
    "6.2": REACH,
    "6.3": REPRODUCED,
    "6.4": IN_TIME,
    "6.5": SHARE,
    "6.6": RATE,
    "6.7": LEADS,
    "6.8": LAW,
    "6.9": TABLE,
    "6.10": COMPARE,
    "6.11": BOOTSTRAP,
    "6.12": LUCK,
}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
