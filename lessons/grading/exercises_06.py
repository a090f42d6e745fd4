"""
The exercises of lesson 6, the race: what a speed-up is, what it is worth, how sure it is, and what
a scaling law says about it.

Sources: anGPT sections 5.1-5.3, Table 2, Appendices G, H and I; nGPT section 3.1 and A.5. grader.py
explains the form of an exercise. The references use elementary operations only.
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
    yield "0.5B, 20 tokens per parameter", 505.73e6, 20.0
    yield "0.5B, 140 tokens per parameter", 505.73e6, 140.0
    yield "32M, 10 tokens per parameter", 32.05e6, 10.0
    yield "1.1M, 0.1 tokens per parameter", 1.1e6, 0.1


def budget(n, ratio):
    d = n * ratio
    return d, 6.0 * n * d


BUDGET = Exercise(
    reference=budget, inputs=budget_inputs,
    parts=("tokens", "FLOPs"),
    misconceptions={
    "Your FLOPs are those of one token; a run has D of them.":
        lambda n, tokens: (tokens, 6.0 * n),
    "Two FLOPs per weight and token is the forward pass alone.":
        lambda tokens, FLOPs: (tokens, FLOPs / 3),
    "Yours is what 4 FLOPs per weight and token give. The backward pass alone has that many: it "
    "makes two products for each product of the forward pass.":
        lambda tokens, FLOPs: (tokens, FLOPs * 2 / 3),
    "`ratio` is the number of tokens per parameter. You use it as parameters per token.":
        lambda n, ratio: budget(n, 1 / ratio),
    "You return `ratio` as the tokens. It is per parameter, and the run is for all of them.":
        lambda n, ratio: (ratio, 6.0 * n * ratio),
})


# 6.2 --------------------------------------------------------------------------------------------

def reach_inputs(generator):
    tokens = numbers(1e6, 2e6, 4e6, 8e6)
    losses = numbers(2.0, 1.7, 1.5, 1.4)
    yield "between two runs", 1.6, tokens, losses
    yield "the loss of a run", 1.7, tokens, losses
    yield "the loss of a later run", 1.5, tokens, losses
    yield "below all of them", 1.3, tokens, losses
    yield "above all of them", 2.4, tokens, losses
    yield "two runs", 3.0, numbers(5e9, 7e10), numbers(3.2, 2.8)
    yield "below both of two runs", 2.6, numbers(5e9, 7e10), numbers(3.2, 2.8)
    yield "a curve that flattens", 2.5, numbers(1e6, 1e7, 1e8), numbers(4.0, 2.0, 1.9)


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


def nan_beyond(target, tokens, losses):
    if losses[-1] <= target <= losses[0]:
        return tokens_for(target, tokens, losses)
    return math.nan


def inf_below_all(target, tokens, losses):
    if target < losses[-1]:
        return math.inf
    return tokens_for(target, tokens, losses)


def last_two_above_all(target, tokens, losses):
    if target > losses[0]:
        return tokens_for(target, tokens[-2:], losses[-2:])
    return tokens_for(target, tokens, losses)


def by_one_law(target, tokens, losses):
    slope, level = least_squares(tokens.log(), losses.log())
    return ((math.log(target) - level) / slope).exp()


REACH = Exercise(reference=tokens_for, inputs=reach_inputs, misconceptions={
    "Your axis of losses is linear. A power law is a straight line where both axes are "
    "logarithmic.":
        partial(tokens_for, y=same),
    "Your axis of tokens is linear. Both axes are logarithmic.":
        partial(tokens_for, x=same, back=same),
    "Right but for a loss above those of all runs. There, take the line through the first two "
    "runs.":
        last_two_above_all,
    "Your line always goes through the last two runs, wherever the loss lies. (If you search in a "
    "loop: does it stop at the first pair that fits?)":
        lambda target, tokens, losses: tokens_for(target, tokens[-2:], losses[-2:]),
    "Your line always goes through the first two runs, wherever the loss lies. (If you search in a "
    "loop: does it go on to the other pairs?)":
        lambda target, tokens, losses: tokens_for(target, tokens[:2], losses[:2]),
    "Right between the runs. Beyond them yours stays at the nearest run's tokens, as np.interp "
    "does; the line continues.":
        np_interp,
    "Right between the runs. Beyond them you return NaN, as scipy's interp1d does with "
    "bounds_error=False. The line continues there.":
        nan_beyond,
    "Right but for a loss below those of all runs, where you return infinity. There, take the line "
    "through the last two runs.":
        inf_below_all,
    "np.interp needs its points in ascending order, and losses fall.":
        lambda target, tokens, losses: np_interp(target, tokens.flip(0), losses.flip(0)),
    "You draw one line from the first run to the last and skip those between.":
        lambda target, tokens, losses: tokens_for(target, tokens[[0, -1]], losses[[0, -1]]),
    "You fit one law through all runs. Only the two runs around the loss count.":
        by_one_law,
})


# 6.3 --------------------------------------------------------------------------------------------

ARCH, PLANNED, DONE, LOSS = range(4)                    # the columns


def log_rows(generator, plans, gain=1.05, wave=0.1, early=False):
    """Return rows (arch, planned, so far, loss) in random order.

    plans has a tuple for each run: (arch, planned tokens, tokens at which it stopped, tokens
    between two rows). Architecture 1's losses are lower by the factor `gain`. Before its end, a
    run's loss lies above its final curve by up to the share `wave`. With `early`, each run has its
    lowest loss shortly before its end.
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
    yield "two or three seeds", log_rows(generator, [*one, *one, one[1], one[2]])
    yield "long runs below shorter ones at equal tokens", log_rows(generator, one, wave=-0.1)
    worse_end = log_rows(generator, one)
    longest_baseline = (worse_end[:, ARCH] == 0) & (worse_end[:, PLANNED] == 500)
    worse_end[longest_baseline, LOSS] *= 1.3
    yield "a longest baseline run that ends above the shorter one", worse_end
    stopped = [(1, 1000, 400, 50), (0, 1000, 900, 50)]
    yield "two stopped runs", log_rows(generator, [*one, *one, *stopped])
    yield "runs stopped shortly before their end", log_rows(
        generator, [*one, (0, 500, 480, 20), (1, 500, 480, 20), (1, 100, 95, 5)])
    unlike = [
        (0, 200, 200, 50),
        (0, 400, 400, 50),
        (1, 100, 100, 50),
        (1, 200, 200, 50),
        (1, 300, 300, 50),
        (1, 400, 400, 50),
    ]
    yield "two budgets against four", log_rows(generator, unlike)
    yield "longer runs of architecture 1", log_rows(generator, [*one, (1, 2000, 2000, 100)])
    yield "a longer run of the baseline", log_rows(generator, [*one, (0, 1000, 1000, 50)])
    yield "lowest losses before the end", log_rows(generator, one, early=True)
    yield "a slower architecture 1", log_rows(generator, one, gain=0.97)
    longer = [*one, (1, 1000, 1000, 50)]
    yield "a slower architecture 1 with a longer run", log_rows(generator, longer, gain=0.95)


def ends(rows):
    return rows[rows[:, PLANNED] == rows[:, DONE]]


def means(rows, by, of=torch.mean):
    """Return the budgets (K,), ascending, and the mean loss of each."""
    budgets = rows[:, by].unique()
    losses = [of(rows[rows[:, by] == n, LOSS]) for n in budgets]
    return budgets, torch.stack(losses)


def as_met(rows, by, budgets, losses):
    """Return budgets and losses in the order in which the rows have these budgets."""
    met = torch.tensor(list(dict.fromkeys(rows[:, by].tolist())), dtype=budgets.dtype)
    order = [int((budgets == n).nonzero()) for n in met]
    return budgets[order], losses[order]


def last_rows(rows):
    """Return the last row of each budget's runs, also of runs that were stopped."""
    found = []
    for n in rows[:, PLANNED].unique():
        run = rows[rows[:, PLANNED] == n]
        found.append(run[run[:, DONE] == run[:, DONE].max()])
    return torch.cat(found)


def reproduced(rows, *, keep=ends, by=PLANNED, of=torch.mean, reach=tokens_for, goal=-1,
               lowest=False, budget_of=0, by_budget=True):
    """Return the factor in tokens.

    keep chooses the rows that count, by is the column of their budgets, of averages over seeds, and
    reach finds the tokens for a loss. goal is the position of the baseline's budget and of the loss
    to reach; with lowest it is the baseline's lowest loss instead. budget_of is the architecture
    whose budget is divided. Without by_budget, budgets stand in the order of the rows.
    """
    base = keep(rows[rows[:, ARCH] == 0])
    other = keep(rows[rows[:, ARCH] == 1])
    budgets, targets = means(base, by, of)
    tokens, losses = means(other, by, of)
    if not by_budget:
        budgets, targets = as_met(base, by, budgets, targets)
        tokens, losses = as_met(other, by, tokens, losses)
    target = targets.min() if lowest else targets[goal]
    budget = tokens[goal] if budget_of else budgets[goal]
    return float(budget) / float(reach(float(target), tokens, losses))


def longest(rows):
    """Return all rows of the longest runs, those before their end included."""
    return rows[rows[:, PLANNED] == ends(rows)[:, PLANNED].max()]


def rows_with_a_budget(rows):
    return rows[torch.isin(rows[:, DONE], ends(rows)[:, PLANNED])]


def best_seed_as_target(rows):
    base = ends(rows[rows[:, ARCH] == 0])
    longest_ones = base[base[:, PLANNED] == base[:, PLANNED].max()]
    tokens, losses = means(ends(rows[rows[:, ARCH] == 1]), PLANNED)
    reached = tokens_for(float(longest_ones[:, LOSS].min()), tokens, losses)
    return float(base[:, PLANNED].max()) / float(reached)


def longest_planned(rows):
    base = rows[rows[:, ARCH] == 0]
    return reproduced(rows) * float(base[:, PLANNED].max() / ends(base)[:, PLANNED].max())


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


def mean_of_all_ends(rows):
    base = ends(rows[rows[:, ARCH] == 0])
    tokens, losses = means(ends(rows[rows[:, ARCH] == 1]), PLANNED)
    reached = tokens_for(float(base[:, LOSS].mean()), tokens, losses)
    return float(base[:, PLANNED].max()) / float(reached)


def without_longer_runs(rows):
    longest_of_baseline = ends(rows[rows[:, ARCH] == 0])[:, PLANNED].max()
    return reproduced(rows[rows[:, PLANNED] <= longest_of_baseline])


def exchanged(rows):
    swapped = rows.clone()
    swapped[:, ARCH] = 1 - rows[:, ARCH]
    return reproduced(swapped)


REPRODUCED = Exercise(reference=reproduced, inputs=rows_inputs, misconceptions={
    "You read losses in the middle of the longest runs. There the learning rate is still high; at "
    "a run's own end it is not.":
        partial(reproduced, keep=longest, by=DONE),
    "Yours is a ratio of two losses. What is the ratio of tokens at equal loss?":
        at_equal_steps,
    "Yours is how many percent lower a loss is. What is the ratio of tokens at equal loss?":
        partial(at_equal_steps, worth=True),
    "You take the best seed of each budget, which is partly luck. Average over all seeds.":
        partial(reproduced, of=torch.min),
    "You aim at the best of the baseline's seeds at its longest budget. Aim at their mean.":
        best_seed_as_target,
    "You use one seed of several. Average over all seeds of a budget.":
        partial(reproduced, of=lambda losses: losses[0]),
    "You take the median over seeds. They count alike: take the mean.":
        partial(reproduced, of=torch.median),
    "You count rows as ends although the run had not ended there. At a run's end, the tokens so "
    "far equal those planned.":
        partial(reproduced, keep=same, by=DONE),
    "You count runs that were stopped before their end. A row counts only if its tokens so far "
    "equal those planned, and a budget that no run completed does not count at all.":
        partial(reproduced, keep=last_rows),
    "You divide the longest budget that was planned, but that run was stopped. Take the longest "
    "budget of the baseline's complete runs.":
        longest_planned,
    "You average all rows with as many tokens as a budget, those of longer runs included. Only the "
    "ends of complete runs count.":
        partial(reproduced, keep=rows_with_a_budget, by=DONE),
    "Your budgets stand in the order of the rows, and the rows come in any order. Sort them.":
        partial(reproduced, by_budget=False),
    "You average all rows of a run. Only its last row counts, and only if the run is complete.":
        partial(reproduced, keep=same),
    "You take the lowest loss of all rows with a budget. Only the ends of complete runs count, and "
    "seeds are averaged.":
        partial(reproduced, keep=same, of=torch.min),
    "You take the baseline's shortest budget and the loss there. Take its longest.":
        partial(reproduced, goal=0),
    "You aim at the baseline's lowest loss. Aim at the loss of its longest budget.":
        partial(reproduced, lowest=True),
    "You aim at the mean loss of all complete runs of the baseline. Aim at the mean of those with "
    "its longest budget.":
        mean_of_all_ends,
    "If architecture 1 has longer runs, you divide its longest budget. Divide the baseline's.":
        partial(reproduced, budget_of=1),
    "You leave out the runs of architecture 1 that are longer than the baseline's. Its complete "
    "runs all count.":
        without_longer_runs,
    "You take a budget of one of the runs. `tokens_for` also finds what lies between two.":
        partial(reproduced, reach=first_below),
    "Yours is a number of tokens. The factor is the baseline's tokens divided by these.":
        tokens_reached,
    "You aim at architecture 1's last loss. The loss to reach is the baseline's.":
        lambda rows: 1 / exchanged(rows),
    "Yours is the factor of architecture 0 over 1: are the two exchanged? The baseline has a 0 in "
    "column 0, and its loss is the one to reach.":
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
        yield f"{factor:g} times fewer tokens, {percent:g}% longer steps", factor, percent


def of_speed(speed):
    return speed, 100 * (1 - 1 / speed)


def in_time(factor, percent):
    return of_speed(factor / (1 + percent / 100))


IN_TIME = Exercise(
    reference=in_time, inputs=time_inputs,
    parts=("factor", "saved"),
    misconceptions={
    "You subtract a share of a step's time from a factor in tokens. Multiply or divide instead.":
        lambda factor, percent: of_speed(factor - percent / 100),
    "A step that takes 25% longer does not lose 25% of the speed: with 100%, nothing would be "
    "left.":
        lambda factor, percent: of_speed(factor * (1 - percent / 100)),
    "In yours, a more expensive step makes it faster.":
        lambda factor, percent: of_speed(factor * (1 + percent / 100)),
    "`percent` is in percent: divide it by 100.":
        lambda factor, percent: of_speed(factor / (1 + percent)),
    "The factor is right. But twice as fast does not save 100% of the time.":
        lambda right: (right[0], 100 * (right[0] - 1)),
    "You give the percentage of tokens that is saved. The exercise asks for the time.":
        lambda right, factor: (right[0], 100 * (1 - 1 / factor)),
    "The factor is right. You subtract the step's percentage from the tokens saved, but it is a "
    "percentage of the tokens that are left.":
        lambda right, factor, percent: (right[0], 100 * (1 - 1 / factor) - percent),
    "You give the time that is left, not the time that is saved.":
        lambda right: (right[0], 100 / right[0]),
    "Your answer does not depend on the time of a step. Do you use `percent`, or does a "
    "whole-number division make it 0?":
        lambda factor: of_speed(factor),
    "You cut the saving off at 0. A slower architecture has a negative one.":
        lambda right: (right[0], max(0.0, right[1])),
    "You drop the sign of the saving. A slower architecture has a negative one.":
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


SHARE = Exercise(
    reference=baseline_share, inputs=share_inputs,
    parts=("worth", "share"),
    misconceptions={
    "One factor comes after the other, so they multiply. You subtract them.":
        lambda weak, strong, share: (weak - strong, share),
    "Your share equals (weak - strong) / (weak - 1). With weak = 4 and strong = 2 both steps have "
    "the factor 2, but yours gives the first of them 2/3. What turns a product into a sum?":
        lambda weak, strong, worth: (worth, (weak - strong) / (weak - 1)),
    "Your share equals (weak - strong) / weak, so it is not 1 where the architecture adds nothing. "
    "What turns a product into a sum?":
        lambda weak, strong, worth: (worth, (weak - strong) / weak),
    "Your share equals 1 / strong, so it is not 0 where the baselines are equally good. What "
    "turns a product into a sum?":
        lambda strong, worth: (worth, 1 / strong),
    "You divide by the architecture's part. Divide by the whole.":
        lambda strong, worth: (worth, math.log(worth) / math.log(strong)),
    "The logarithm is a good idea. Now divide it by the logarithm of the whole.":
        lambda worth: (worth, math.log(worth)),
    "You drop the sign of the share. It is negative if the strong baseline is worse than the weak "
    "one.":
        lambda worth, share: (worth, abs(share)),
    "You keep the share between 0 and 1. For an architecture ahead of the weak baseline it is "
    "above 1 if the strong one is ahead of both, and below 0 if the strong one is behind the weak "
    "one.":
        lambda worth, share: (worth, min(1.0, max(0.0, share))),
})


# 6.6 --------------------------------------------------------------------------------------------

def rate_inputs(generator):
    rates = numbers(5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    # If the lowest loss were 1.40 in all inputs, it would look like the right loss, rounded.
    yield "five learning rates", rates, numbers(1.50, 1.43, 1.403, 1.41, 1.47)
    uneven = numbers(1e-3, 2e-3, 1e-2)
    yield "three learning rates, unevenly spaced", uneven, numbers(1.42, 1.40, 1.60)
    yield "the lowest loss at the highest learning rate", rates[:3], numbers(1.50, 1.43, 1.40)
    yield "the lowest loss at the lowest learning rate", rates[2:], numbers(1.40, 1.41, 1.47)
    yield "a flat side", rates, numbers(1.50, 1.43, 1.40, 1.404, 1.42)
    yield "a steep end", rates, numbers(2.60, 1.70, 1.41, 1.40, 1.44)
    diverged = numbers(1.45, 1.40, 1.41, 1.70, math.inf)
    yield "a diverged run, not next to the best", rates, diverged
    yield "a diverged run next to the best", rates[:4], numbers(1.50, 1.43, 1.40, math.inf)
    yield ("a diverged run between the best and another", rates,
           numbers(1.50, 1.43, 1.40, math.inf, 1.90))


def vertex(x, y):
    """Return the lowest point of the parabola through three points."""
    first = (y[1] - y[0]) / (x[1] - x[0])
    second = (y[2] - y[1]) / (x[2] - x[1])
    bend = (second - first) / (x[2] - x[0])
    low = (x[0] + x[1]) / 2 - first / (2 * bend)
    level = y[0] + first * (low - x[0]) + bend * (low - x[0]) * (low - x[1])
    return low, level


def vertex_if_even(x, y):
    """Return what would be the lowest point if the three were equally far apart."""
    share = (y[0] - y[2]) / (y[0] - 2 * y[1] + y[2]) / 2
    return x[1] + share * (x[2] - x[1]), y[1] - share * (y[0] - y[2]) / 4


def vertex_with_mean_step(x, y):
    """Do as vertex_if_even, with half the distance of the outer two for both distances."""
    share = (y[0] - y[2]) / (y[0] - 2 * y[1] + y[2]) / 2
    return x[1] + share * (x[2] - x[0]) / 2, y[1] - share * (y[0] - y[2]) / 4


def best_rate(rates, losses, *, to=math.log, back=math.exp, finite=False, through=vertex):
    """Return the best learning rate and its loss. With finite, leave out runs that diverged."""
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
    """Return the best learning rate that was tried and its loss, or nan where `rate` is nan."""
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


def through_all_or_nan(rates, losses, rate):
    if not losses.isfinite().all():
        return math.nan, math.nan
    return through_all(rates, losses, rate)


def three_lowest(rates, losses, rate):
    """Fit the parabola to the three lowest losses; nan where `rate` is nan."""
    if math.isnan(rate):
        return math.nan, math.nan
    order = losses.argsort()[:3].sort().values
    x, y = rates[order].log().tolist(), losses[order].tolist()
    low, loss = vertex(x, y)
    return math.exp(low), loss


RATE = Exercise(
    reference=best_rate, inputs=rate_inputs,
    parts=("rate", "loss"),
    misconceptions={
    "You return the best learning rate that was tried, even at an edge, where the search is not "
    "finished.":
        lambda rates, losses: (rates[losses.argmin()], losses.min()),
    "The unfinished searches are right. But the best learning rate may lie between those that "
    "were tried.":
        tried,
    "Your parabola is one over the learning rate itself. Take its logarithm: learning rates that "
    "double are equally far apart there.":
        partial(best_rate, to=same, back=same),
    "You fit the parabola to all points. Take only the lowest one and its two neighbors.":
        through_all,
    "You fit the parabola to all points, and one that diverged makes it NaN. Take only the lowest "
    "one and its two neighbors.":
        through_all_or_nan,
    "You leave out runs that diverged. Next to the best learning rate, such a run means that the "
    "search is not finished.":
        partial(best_rate, finite=True),
    "The learning rate is right. The loss should be the parabola's there, not a run's.":
        lambda rates, losses, rate: (rate, tried(rates, losses, rate)[1]),
    "Your formula holds for equally spaced points. Not all of these are equally spaced.":
        partial(best_rate, through=vertex_if_even),
    "Your formula takes half the distance of the outer two points for each of the two distances. "
    "Not all of these points are equally spaced.":
        partial(best_rate, through=vertex_with_mean_step),
    "The loss is right. The learning rate lies on the wrong side of the best run: look at a sign.":
        mirrored,
    "You take the logarithm of the losses, too. Only the learning rate needs one.":
        of_log_losses,
    "You take the logarithm of the losses, and return one. Only the learning rate needs it.":
        lambda rates, losses: best_rate(rates, losses.log()),
    "You take the three lowest losses. Take the lowest one and its two neighbors.":
        three_lowest,
    "Your logarithm has base 10, and the way back is exp().":
        partial(best_rate, to=math.log10),
})


# 6.7 --------------------------------------------------------------------------------------------

def table_of(first, **seeds):
    """Return losses (settings, 3): the first seed has all settings, the others those given as
    r1=(.., ..), and nan stands for the rest."""
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
    yield "a lead that the search takes back", base, other, 1
    slower = other + numbers(0.02, 0.01, 0.03, 0.05)[:, None]
    yield "a built-in setting that is best for both", slower, other, 1
    high = table_of(
        (1.19, 1.14, 1.12, 1.10),
        r0=(1.20, 1.18),
        r3=(1.14, 1.15))
    yield "best settings other than the built-in one", base, high, 1
    yield "a search that only helps the baseline", high, other, 1
    one_seed = table_of(
        (1.130, 1.117, 1.128, 1.105),
        r1=(1.122, 1.126))
    yield "a best setting that only one seed ran with", base, one_seed, 1
    lucky = table_of(
        (1.100, 1.099, 1.120),
        r0=(1.103, 1.108),
        r1=(1.125, 1.130),
        r2=(1.121, 1.127))
    steady = table_of(
        (1.110, 1.105, 1.118),
        r0=(1.116, 1.112),
        r1=(1.102, math.nan),
        r2=(1.10, 1.09))
    yield "several seeds at every setting", lucky, steady, 0


def first_seed(losses):
    return int(losses[:, 0].argmin())


def mean_of_seeds(row):
    return row[~row.isnan()].mean()


def leads(baseline, other, built_in, *, best=first_seed, of=mean_of_seeds, first=True,
          second=True):
    """Return both leads. first, second: whether the baseline and the other are searched."""
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


def seed_by_seed(baseline, other, built_in):
    best = baseline[first_seed(baseline)] - other[first_seed(other)]
    return mean_of_seeds(baseline[built_in] - other[built_in]), mean_of_seeds(best)


def best_together(baseline, other, right):
    row = int((baseline[:, 0] + other[:, 0]).argmin())
    return right[0], mean_of_seeds(baseline[row]) - mean_of_seeds(other[row])


def at_one_rate(baseline, other, right):
    row = first_seed(baseline)
    return right[0], mean_of_seeds(baseline[row]) - mean_of_seeds(other[row])


LEADS = Exercise(
    reference=leads, inputs=lead_inputs,
    parts=("built-in", "searched"),
    misconceptions={
    "In your second number the baseline keeps its built-in setting. It has a best one of its own.":
        partial(leads, first=False),
    "In your second number the other architecture keeps its built-in setting. It has a best one of "
    "its own.":
        partial(leads, second=False),
    "You give both sides the same setting, the one that is best for both together. Each has its "
    "own best one.":
        best_together,
    "You give the other architecture the baseline's best setting. It has one of its own.":
        at_one_rate,
    "You take the lowest of all runs, which is partly luck, the more so the more runs there are. "
    "Choose the setting with the first seed, then average over seeds.":
        partial(leads, best=lowest_run, of=lowest_of),
    "You use the first seed only. It chose the setting and was lucky there: average over all "
    "seeds.":
        partial(leads, of=lambda row: row[0]),
    "Your settings are right, but in each of them you take the lowest loss. Take the mean over the "
    "seeds.":
        partial(leads, of=lowest_of),
    "For the best settings you use the first seed only. It chose them and was lucky there: average "
    "over all seeds.":
        lambda baseline, other, right: (right[0], baseline[:, 0].min() - other[:, 0].min()),
    "For the best settings you leave out the first seed. It chose them, but the mean is over all "
    "seeds that ran.":
        lambda baseline, other, right: (
            right[0], leads(baseline, other, 0, of=lambda row: row[1:].nanmean())[1]),
    "nan stands for a run that was not made: average over the others.":
        partial(leads, of=torch.mean),
    "You leave out seeds that only one of the two sides ran with. Average each side over all of "
    "its own seeds that ran, in both numbers, and subtract these means.":
        seed_by_seed,
    "You choose the setting by means, some over one seed and some over three. Choose by the first "
    "seed, which ran at every setting.":
        partial(leads, best=lowest_mean),
    "Your second number is a mean over all settings. Take each side's best one.":
        lambda baseline, other, right: (right[0], baseline.nanmean() - other.nanmean()),
})


# 6.8 --------------------------------------------------------------------------------------------

def law_inputs(generator):
    def noisy(c, level, power, spread):
        noise = spread * randn64(generator, len(c))
        return c, level * c ** -power * noise.exp()

    yield "a law without noise", *noisy(numbers(1e6, 2e6, 4e6), 20.0, 0.2, 0.0)
    yield "five runs with noise", *noisy(numbers(1e6, 2e6, 4e6, 8e6, 1.6e7), 20.0, 0.2, 0.05)
    yield "a laptop's FLOPs", *noisy(1e12 * numbers(1.0, 2.0, 4.0), 300.0, 0.18, 0.03)
    yield "a cluster's FLOPs", *noisy(10.0 ** numbers(17, 18, 19, 20, 21), 25.0, 0.05, 0.02)


def power_law(c, losses):
    slope, level = least_squares(c.log(), losses.log())
    return level.exp(), -slope


def straight(c, losses, *, x=same, y=same, level=same):
    slope, start = least_squares(x(c), y(losses))
    return level(start), -slope


def covariance_by_k(c, losses):
    x, y = c.log(), losses.log()
    slope = least_squares(x, y)[0] * (len(x) - 1) / len(x)
    return (y.mean() - slope * x.mean()).exp(), -slope


def through_origin(c, losses):
    x, y = c.log(), losses.log()
    slope = (x * y).sum() / (x * x).sum()
    return (y.mean() - slope * x.mean()).exp(), -slope


LAW = Exercise(
    reference=power_law, inputs=law_inputs,
    parts=("A", "a"),
    misconceptions={
    "You fit a straight line to C and L themselves. The law is a line in their logarithms.":
        straight,
    "You take the logarithm of C, but not of L.":
        partial(straight, x=torch.log),
    "You take the logarithm of L, but not of C.":
        partial(straight, y=torch.log, level=torch.exp),
    "Your covariance divides by K and your variance by K - 1, as .var() does. Use one of them for "
    "both.":
        covariance_by_k,
    "Your slope is that of a line through C = 1 and L = 1. Before you multiply and sum, subtract "
    "from each logarithm its mean.":
        through_origin,
    "Your line goes through the first and the last run, and those between do not count. (In a mean "
    "of the slopes between neighbors they may cancel.)":
        lambda c, losses: power_law(c[[0, -1]], losses[[0, -1]]),
    "You have slope and intercept exchanged: np.polyfit gives the slope first.":
        lambda A, a: ((-a).exp(), -A.log()),
    "Your logarithms have base 10, and the way back is exp().":
        partial(straight, x=torch.log10, y=torch.log10, level=torch.exp),
    "Your A is the loss of a run. A is the loss of the law at C = 1.":
        lambda losses, a: (losses[0], a),
})


# 6.9 --------------------------------------------------------------------------------------------

def table_inputs(generator):
    yield "GPT+ at 1e21 FLOPs", 13.408079, 0.466271, 0.336617, 0.465600, 1e21
    yield "anGPT at 1e21 FLOPs", 9.727337, 0.473190, 0.650506, 0.451378, 1e21
    yield "GPT+ at 1e17 FLOPs", 13.408079, 0.466271, 0.336617, 0.465600, 1e17
    yield "a pair of laws with 6ND = C", 1.8257418583505538, 0.5, 0.09128709291752769, 0.5, 1e19


def table(d0, a_d, n0, a_n, c):
    d = d0 * c ** a_d
    n = n0 * c ** a_n
    return a_d + a_n, 6 * n * d / c, d / n


TABLE = Exercise(
    reference=table, inputs=table_inputs,
    parts=("power", "6ND/C", "D/N"),
    misconceptions={
    "You do not use D0 and N0, or not as factors.":
        lambda a_d, a_n, c: table(1.0, a_d, 1.0, a_n, c),
    "You raise D0 and N0 to the power, too. The power belongs to C alone.":
        lambda d0, a_d, n0, a_n, c: table(d0 ** a_d, a_d, n0 ** a_n, a_n, c),
    "The power of C in your D / N is that of N / D. Have you exchanged the exponents of D and N, "
    "or is a sign wrong?":
        lambda d0, a_d, n0, a_n, c: table(d0, a_n, n0, a_d, c),
    "Your powers of C have the wrong sign: D and N grow with C.":
        lambda d0, a_d, n0, a_n, c: (a_d + a_n, *table(d0, -a_d, n0, -a_n, c)[1:]),
    "You take D from C = 6ND, so your check cannot fail. D has a law of its own.":
        lambda right, n0, a_n, c: (right[0], 1.0, c / 6 / (n0 * c ** a_n) ** 2),
    "You take N from C = 6ND, so your check cannot fail. N has a law of its own.":
        lambda right, d0, a_d, c: (right[0], 1.0, 6 * (d0 * c ** a_d) ** 2 / c),
    "For D / N you take D from C = 6ND. Take it from its own law.":
        lambda right, n0, a_n, c: (right[0], right[1], c / 6 / (n0 * c ** a_n) ** 2),
    "For D / N you take N from C = 6ND. Take it from its own law.":
        lambda right, d0, a_d, c: (right[0], right[1], 6 * (d0 * c ** a_d) ** 2 / c),
    "Your first number depends on C, D0 and N0. The power with which N D grows depends on the two "
    "exponents alone.":
        lambda right, d0, a_d, n0, a_n, c: (
            math.log(d0 * c ** a_d * n0 * c ** a_n) / math.log(c), *right[1:]),
    "Your first number is 1 too small: it is the power with which N D / C grows, not N D.":
        lambda right: (right[0] - 1, *right[1:]),
    "The arguments are d0, a_d, n0, a_n, c: first the law of D, then that of N.":
        lambda d0, n0, a_d, a_n, c: table(d0, a_d, n0, a_n, c),
})


# 6.10 -------------------------------------------------------------------------------------------

def exponent_inputs(generator):
    yield "the exponents for D in Table I.1", 0.466271, 0.473190, 1.08e-6, 1.11e-6, 0.01
    yield "a difference with p = 0.073", 0.050, 0.0526532, 1.08e-6, 1.11e-6, 0.002
    yield "the same with a wide margin", 0.0526532, 0.050, 1.08e-6, 1.11e-6, 0.01
    yield "three seeds each: wide errors", 0.21, 0.18, 4e-4, 9e-4, 0.02
    yield "clearly different, but close", 0.2, 0.201, 1e-8, 4e-8, 0.005
    yield "no difference measured", 0.2, 0.2, 1e-4, 1e-5, 0.005
    yield "clearly lower, and not close", 0.21, 0.18, 1e-6, 4e-6, 0.01
    yield "lower, perhaps close", 0.21, 0.207, 1.2e-6, 8e-7, 0.005
    yield "higher, perhaps close", 0.2, 0.203, 5e-7, 5e-7, 0.0048


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
    "You call them equal if p is large, or 0 in the interval. But that may also mean few or noisy "
    "runs. Does the whole interval lie within the margin?":
        lambda right, p: (*right[:4], float(p > 0.05)),
    "Yours calls them equal wherever a part of the interval lies between -margin and margin. The "
    "whole interval must lie there.":
        touching,
    "You call them equal if p is small. A p-value tells whether a difference of 0 is "
    "plausible, not whether the two are close.":
        lambda right, p: (*right[:4], float(p < 0.05)),
    "You also ask that the difference is not significant (p at least 0.05, or 0 in the interval). "
    "A difference can be significant and still lie within the margin.":
        lambda right, p: (*right[:4], float(right[4] and p >= 0.05)),
    "Yours calls them equal wherever b - a lies within the margin. The whole interval must.":
        lambda right, a, b, margin: (*right[:4], float(abs(b - a) <= margin)),
    "A standard error is the root of a variance.":
        partial(compare, error=lambda v, w: v + w),
    "var_a and var_b are squares already. Do not square them again.":
        partial(compare, error=lambda v, w: (v ** 2 + w ** 2) ** 0.5),
    "You add the standard errors. For independent numbers, what adds up?":
        partial(compare, error=lambda v, w: v ** 0.5 + w ** 0.5),
    "You use the variance of a only. Both are uncertain.":
        partial(compare, error=lambda v, w: v ** 0.5),
    "Your 1.96 standard errors start from b, not from the difference b - a.":
        lambda z, p, low, high, a: (z, p, low + a, high + a, 0.0),
    "Your 1.96 standard errors start from a, not from the difference b - a.":
        lambda z, p, low, high, a, b: (z, p, low + 2 * a - b, high + 2 * a - b, 0.0),
    "Your interval reaches 1.96 to each side. It should be 1.96 standard errors.":
        lambda z, p, a, b: (z, p, b - a - 1.96, b - a + 1.96, 0.0),
    "Your interval is that of z. Give that of b - a, 1.96 standard errors to each side.":
        lambda z, p: (z, p, z - 1.96, z + 1.96, 0.0),
    "z has a sign: which exponent is larger?":
        lambda z, right: (abs(z), *right[1:]),
    "You compute a - b. The exercise asks for b - a, in z and in the interval.":
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
    """Return a factor per draw. mine, base: whether to draw seeds of `losses` and of `baseline`."""
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


def seeds_as_budgets(tokens, baseline, losses, draws):
    found = []
    for draw in draws:
        target = float(baseline[draw].mean())
        found.append(float(tokens[-1]) / tokens_for(target, tokens, losses[draw].mean(0)))
    return numbers(*found)


def longest_runs_drawn(tokens, baseline, losses, draws):
    found = []
    for draw in draws:
        means = losses.mean(1)
        means[-1] = losses[-1, draw].mean()
        reached = tokens_for(float(baseline[draw].mean()), tokens, means)
        found.append(float(tokens[-1]) / reached)
    return numbers(*found)


def geometric_mean(losses):
    return losses.log().mean().exp()


BOOTSTRAP = Exercise(reference=bootstrap, inputs=draw_inputs, misconceptions={
    "You do not draw the baseline's seeds. It is uncertain, too.":
        partial(bootstrap, base=False),
    "You draw the baseline's seeds only. The other architecture is uncertain, too.":
        partial(bootstrap, mine=False),
    "You draw seeds for the longest runs only. Draw them for the runs of all budgets.":
        longest_runs_drawn,
    "You compute a factor per seed and average the factors. Average the losses first, then "
    "compute one factor.":
        factors_of_seeds,
    "You average the logarithms of the losses. Average the losses themselves.":
        partial(bootstrap, of=geometric_mean),
    "You divide tokens[0], the shortest budget. Divide tokens[-1].":
        lambda right, tokens: right * tokens[0] / tokens[-1],
    "You use the first seed of each draw only.":
        lambda tokens, baseline, losses, draws: bootstrap(tokens, baseline, losses, draws[:, :1]),
    "You do not use the draws, so all of your factors are equal.":
        each_seed_once,
    "losses[row] picks budgets. The seeds are along the second axis.":
        seeds_as_budgets,
    "You drop repeated seeds. A seed that was drawn twice counts twice.":
        repeats_dropped,
    "Yours are numbers of tokens. The factor is tokens[-1] divided by these.":
        lambda right, tokens: tokens[-1] / right,
    "The numbers are right, their order is not. Keep the order of the draws.":
        lambda right: right.sort().values,
})


# ---- Properties of every right answer, for answers that no known mistake explains ----------------

def between_neighbors(y, rates, losses):
    i = losses.argmin()
    return y[0].isnan() or rates[i - 1] < y[0] < rates[i + 1]


def both_nan(y):
    return y[0].isnan() and y[1].isnan()


def same_rate(y, right):
    return near(y[0] / right[0], 1, 1e-3)


def right_if_equally_spaced(y, right, rates):
    steps = rates.log().diff()
    equally_spaced = near(steps, steps[0])
    is_right = same_rate(y, right) and near(y[1], right[1], 1e-5)
    return not equally_spaced or right[0].isnan() or is_right


def without_noise(c):
    return c[0] == 1e6 and len(c) == 3


# 6.12 -------------------------------------------------------------------------------------------

def luck_inputs(generator):
    def case(runs, others, seeds, true, times=200):
        a = 1.12 + 0.01 * randn64(generator, runs)
        b = 1.15 + 0.02 * randn64(generator, others)
        mine = torch.randint(runs, (times, seeds), generator=generator)
        theirs = torch.randint(others, (times, seeds), generator=generator)
        return a, b, mine, theirs, true

    yield "three seeds, nearly alike", *case(16, 16, 3, 0.0005)
    yield "one seed", *case(16, 16, 1, 0.004)
    yield "more runs of one, eight seeds", *case(20, 12, 8, 0.002)
    yield "far apart", *case(16, 16, 3, 0.3)
    # All runs of an architecture have the same loss, and no difference is left between the two.
    pairs = torch.tensor([[0, 1], [2, 3], [1, 1]])
    a, b = torch.full((4,), 1.25).double(), torch.full((4,), 1.5).double()
    yield "no scatter and no difference", a, b, pairs, pairs, 0.0


def wrong_winner(a, b, mine, theirs, true, *, centre=torch.mean, of=torch.mean, apart=1,
                 wins_if=torch.lt):
    """Return the share of comparisons that b wins. apart: how many times `true` b is worse."""
    a = a - centre(a)
    b = b - centre(b) + apart * true
    wins = []
    for own, other in zip(mine, theirs):
        wins.append(wins_if(of(b[other]), of(a[own])))
    return numbers(*wins).mean()


def as_stored_and_apart(a, b, mine, theirs, true):
    return wrong_winner(a, b, mine, theirs, true + float(b.mean() - a.mean()))


def only_b_moved(a, b, mine, theirs, true):
    return wrong_winner(a, b, mine, theirs, true - float(a.mean()))


def run_against_run(a, b, mine, theirs, true):
    return wrong_winner(a, b, mine.reshape(-1, 1), theirs.reshape(-1, 1), true)


def centered_after_drawing(a, b, mine, theirs, true):
    a, b = a[mine], b[theirs]
    wins = (b - b.mean() + true).mean(1) < (a - a.mean()).mean(1)
    return wins.double().mean()


def half_for_a_tie(theirs, ours):
    return ((theirs < ours).double() + (theirs <= ours).double()) / 2


LUCK = Exercise(reference=wrong_winner, inputs=luck_inputs, misconceptions={
    "You add `true` to the difference that the means have already. First subtract its own mean "
    "from each.":
        as_stored_and_apart,
    "Yours is 1 with every input: b always wins. Is a's mean at 0 and b's at `true`, or did you "
    "move only b's?":
        only_b_moved,
    "Yours is 0 with every input: b never wins. Are the means 0 and `true`, and do you compare two "
    "means per row, so that they scatter?":
        lambda right: 0 * right,
    "You give the share that the better architecture wins. The exercise asks for that of the "
    "other.":
        partial(wrong_winner, wins_if=torch.gt),
    "You count ties, too. Where both means are equal, b's is not lower: compare with <.":
        partial(wrong_winner, wins_if=torch.le),
    "You count a tie as half. Where both means are equal, b's is not lower, so it does not count.":
        partial(wrong_winner, wins_if=half_for_a_tie),
    "In yours, b is better by `true`. Its losses should be higher.":
        partial(wrong_winner, apart=-1),
    "In yours, both are equally good. b should be worse by `true`.":
        partial(wrong_winner, apart=0),
    "In yours, b is worse by twice `true`.":
        partial(wrong_winner, apart=2),
    "You have `mine` and `theirs` exchanged: `mine` are runs of a.":
        lambda a, b, mine, theirs, true: wrong_winner(a, b, theirs, mine, true),
    "You compare single runs. Compare two means, each over the runs of a row.":
        run_against_run,
    "You use the first run of each row only. Average over the row.":
        lambda a, b, mine, theirs, true: wrong_winner(a, b, mine[:, :1], theirs[:, :1], true),
    "You use `mine` for b, too. The runs of b are in `theirs`.":
        lambda a, b, mine, true: wrong_winner(a, b, mine, mine, true),
    "You give the number of comparisons. Give their share, from 0 to 1.":
        lambda right, mine: right * len(mine),
    "You compare medians over seeds. Compare means.":
        partial(wrong_winner, of=torch.median),
    "You compare the best seeds. Compare means.":
        partial(wrong_winner, of=torch.min),
    "You move the medians to 0 and `true`. Move the means.":
        partial(wrong_winner, centre=torch.median),
    "You subtract the mean of the runs that were drawn. Subtract that of all runs, `a.mean()`, "
    "before you pick any.":
        centered_after_drawing})


PROPERTIES = {
    "6.1": {
        "Your tokens divided by the parameters are not `ratio`.":
            lambda y, n, ratio: near(y[0] / n, ratio, 1e-6),
        "Your FLOPs, divided once by your tokens and once by the parameters, are not the FLOPs of "
        "one weight for one token. Do you multiply by both, once? In how many products is a "
        "weight, forward and backward, and how many FLOPs is each, with its addition?":
            lambda y, n: near(y[1] / y[0] / n, 6, 1e-6)},
    "6.2": {
        "At a loss that a run has, the answer is that run's tokens. Yours is not, at least for one "
        "run.":
            lambda y, target: target != 1.7 or near(y, 2e6),
        "For a loss between those of two runs, the answer lies between their tokens. Yours does "
        "not.":
            lambda y, target: target != 1.6 or 2e6 < y < 4e6,
        "A loss below those of all runs needs more tokens than all of them. Yours does not.":
            lambda y, target: target != 1.3 or y > 8.001e6,
        "A loss above those of all runs needs fewer tokens than all of them. Yours does not.":
            lambda y, target: target != 2.4 or y < 0.999e6,
        "Between two runs yours is off. Are both axes logarithmic, and is your line between those "
        "two runs?":
            lambda y, target, right: target != 1.6 or near(y, right, 1e-6),
        "Your axes are right, but not everywhere your line. Through which two runs does it go?":
            never},
    "6.3": {
        "A ratio of tokens is positive. Yours is not.":
            lambda y: y > 0,
        "Take the ends of each architecture's complete runs. Average over seeds for each budget, "
        "wherever its rows stand, and sort the budgets. Then take the baseline's longest budget, "
        "even if the other has none as long, and its loss, and call tokens_for once.":
            never},
    "6.4": {
        "Where a step takes equally long, the factor in time is that in tokens. Yours is not.":
            lambda y, factor, percent: percent != 0 or near(y[0], factor),
        "Your factor is wrong. The time is the number of tokens times the time per token.":
            lambda y, right: near(y[0], right[0]),
        "Your saving does not fit your factor: twice as fast needs half the time and saves 50%, "
        "half as fast needs twice the time and saves -100%.":
            lambda y: near(y[1], 100 - 100 / y[0])},
    "6.5": {
        "The factors of the two steps, from the weak baseline to the strong one and from there to "
        "the architecture, multiply to `weak`. Yours do not.":
            lambda y, weak, strong: near(y[0] * strong, weak),
        "Where the architecture gains nothing over the strong baseline, the share is 1. Yours is "
        "not.":
            lambda y, strong: strong != 1 or near(y[1], 1),
        "Where both baselines are equally good, the share is 0. Yours is not.":
            lambda y, weak, strong: weak != strong or near(y[1], 0),
        "Some of your shares between 0 and 1 are wrong. The factors of successive steps multiply. "
        "Which shares add up to 1, into however many steps you divide the way?":
            lambda y, weak, strong, right: not 1 < strong < weak or near(y[1], right[1], 1e-5),
        "Your share is right from 0 to 1, but not everywhere below 0 and above 1. If a step goes "
        "backwards, its logarithm is below 0. Does your formula keep the sign, and is it the same "
        "one there?":
            never},
    "6.6": {
        "If the lowest loss is at an edge, the search is not finished: return nan twice.":
            lambda y, losses: losses.argmin() not in (0, len(losses) - 1) or both_nan(y),
        "If a neighbor of the lowest loss diverged, the search is not finished: return nan twice.":
            lambda y, right: not right[0].isnan() or both_nan(y),
        "Where your learning rate is right, your loss is not. Is it the parabola's, at the "
        "logarithm of this learning rate?":
            lambda y, right: right[0].isnan() or not same_rate(y, right)
            or near(y[1], right[1], 1e-6),
        "The lowest point of the parabola does not lie above the lowest run. Yours does.":
            lambda y, losses: y[0].isnan() or y[1] <= losses.min() + 1e-9,
        "The lowest point lies between the two neighbors. Your learning rate does not.":
            between_neighbors,
        "The parabola's lowest point is a little below the lowest of the three losses. Yours is "
        "not.":
            lambda y, losses: y[0].isnan() or y[1] < losses.min() - 1e-9,
        "Where your loss is right, your learning rate is not. At which point of the axis is the "
        "parabola lowest, and how do you get from there to a learning rate?":
            lambda y, right: right[0].isnan() or same_rate(y, right)
            or not near(y[1], right[1], 1e-6),
        "What is on the parabola's axis, and through which points does it go? If that is right: is "
        "there a sign or a factor wrong in the formula of its lowest point?":
            right_if_equally_spaced,
        "Yours is right where the three learning rates are equally far apart on a logarithmic "
        "axis. Does your formula hold for other distances?":
            never},
    "6.7": {
        "Your first number is wrong. It is the baseline's mean minus the other's, in nats, both "
        "in row `built_in` and over the seeds that ran.":
            lambda y, right: near(y[0], right[0]),
        "Where the built-in setting is best for both, the search changes nothing. Your two numbers "
        "differ there.":
            lambda y, right: not near(right[0], right[1], 1e-9) or near(y[0], y[1]),
        "Your first number is right. For the second: which row has the first seed's lowest loss, "
        "for each side? Is yours the baseline's mean minus the other's, each over all the runs of "
        "its own row?":
            never},
    "6.8": {
        "Losses fall with C, so a is positive in L = A C^-a. Yours is not. Is it only the sign? If "
        "you divide two sums, do both contain differences from the means?":
            lambda y: y[1] > 0,
        "Even without noise, your exponent is wrong. There log L over log C has the slope -a "
        "everywhere. If you divide two sums, are both sums or both means, over the same runs, and "
        "do both contain differences from the means?":
            lambda y, c: not without_noise(c) or near(y[1], 0.2, 1e-5),
        "A is the law's loss at C = 1. Even without noise, yours is another number.":
            lambda y, c: not without_noise(c) or near(y[0], 20.0, 1e-5),
        "Your exponent is right, and so is A without noise. With noise, the line of least squares "
        "goes through the means of log C and log L. Yours does not: does it go through a run, or "
        "do you average before you take the logarithm?":
            lambda y, c, right: len(c) < 5 or not near(y[1], right[1], 1e-7)
            or near(y[0], right[0], 1e-5),
        "Yours is right without noise. With noise: the squares of which differences should be "
        "least?":
            never},
    "6.9": {
        "Your first number is wrong. With which power of C does the product of two powers of C "
        "grow?":
            lambda y, right: near(y[0], right[0], 1e-6),
        "For the pair of laws with 6ND = C, your second number should be 1. It is not.":
            lambda y, a_d: a_d != 0.5 or near(y[1], 1, 1e-5),
        "For the pair of laws with 6ND = C, your third number is not D / N, which is D0 / N0 "
        "there, because both exponents are equal.":
            lambda y, right, a_d: a_d != 0.5 or near(y[2], right[2], 1e-5),
        "For the pair of laws with 6ND = C yours is right. Elsewhere it is not: do D and N both "
        "come from their own laws, each with its own factor and power of C?":
            never},
    "6.10": {
        "Your z is wrong. It is b - a, divided by the standard error of b - a.":
            lambda y, right: near(y[0], right[0]),
        "A p-value is a probability, from 0 to 1. Yours is not.":
            lambda y: 0 <= y[1] <= 1.0001,
        "Your p is not the two-sided p of your z.":
            lambda y: near(y[1], two_sided(float(y[0]))),
        "The middle of low and high is not b - a. (Return five numbers, with no pair inside.)":
            lambda y, a, b: near((y[2] + y[3]) / 2, b - a, 1e-6),
        "Your interval is not 1.96 standard errors wide to each side.":
            lambda y, right: near(y[3] - y[2], right[3] - right[2], 1e-6),
        "Your last number is wrong. Does the whole interval from your low to your high lie between "
        "-margin and margin?":
            never},
    "6.11": {
        "Return one factor for each draw. Yours has another number of them.":
            lambda y, draws: y.shape == (len(draws),),
        "Do the first draw by hand: pick its seeds from the baseline and from the other "
        "architecture, average for each budget, and divide tokens[-1] by what tokens_for gives.":
            lambda y, right: near(y[0], right[0], 1e-5),
        "The factor of the first draw is right. Does your loop do the same for the others?":
            never},
    "6.12": {
        "A share lies between 0 and 1. Yours does not.":
            lambda y: 0 <= y <= 1,
        "Shift all runs of a by one number and all runs of b by another, so that they scatter as "
        "before, and the mean of all runs of a becomes 0 and that of b `true`. Then compare two "
        "means per row, and count.":
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
