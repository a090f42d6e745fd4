"""
Lesson 6, the race: what a speed-up is, what it is worth, how sure it is, and what a scaling law says of it.

Sources: anGPT sections 5.1-5.3, Table 2, Appendices G, H and I; nGPT section 3.1 and A.5. See grader.py for the form.
The references use elementary operations only and nothing of bench.py.
"""
import math
from functools import partial

import torch

from answers import near
from grader import Exercise


def randn(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


# 6.1 ------------------------------------------------------------------------------------------------------------------

def budget_inputs(generator):
    yield "0.5B, 20 tokens a parameter", 505.73e6, 20.0
    yield "0.5B, seven times as many", 505.73e6, 140.0
    yield "32M, 10 tokens a parameter", 32.05e6, 10.0
    yield "a laptop's million, a tenth of a token each", 1.1e6, 0.1


def budget(n, ratio, *, each=6.0, tokens=lambda n, ratio: n * ratio, flops=lambda each, n, d: each * n * d):
    d = tokens(n, ratio)
    return d, flops(each, n, d)


BUDGET = Exercise(reference=budget, inputs=budget_inputs, parts=("tokens", "FLOPs"), misconceptions=[
    (partial(budget, flops=lambda each, n, d: each * n), "That is what one token costs; a run has D of them."),
    (partial(budget, each=2.0), "Two FLOPs a weight and token is the forward pass alone."),
    (partial(budget, each=4.0), "That is the backward pass alone."),
    (partial(budget, flops=lambda each, n, d: each * n * n), "The number of tokens does not enter your FLOPs."),
    (partial(budget, flops=lambda each, n, d: each * d), "The number of weights does not enter your FLOPs."),
    (partial(budget, tokens=lambda n, ratio: 20 * n), "Your runs are as long whatever `ratio` is."),
    (partial(budget, tokens=lambda n, ratio: n / ratio), "`ratio` is tokens for each parameter, not the other way."),
    (partial(budget, tokens=lambda n, ratio: ratio), "`ratio` is for one parameter; the run is for all of them."),
])


# 6.2 ------------------------------------------------------------------------------------------------------------------

def reach_inputs(generator):
    tokens, losses = numbers(1e6, 2e6, 4e6, 8e6), numbers(2.0, 1.7, 1.5, 1.4)
    yield "between two runs", 1.6, tokens, losses
    yield "the loss of a run", 1.7, tokens, losses
    yield "below all of them", 1.3, tokens, losses
    yield "above all of them", 2.4, tokens, losses
    yield "two runs", 3.0, numbers(5e9, 7e10), numbers(3.2, 2.8)


def tokens_for(target, tokens, losses, *, x=math.log, y=math.log, back=math.exp):
    tokens, losses, i = [float(n) for n in tokens], [float(loss) for loss in losses], 0
    while i < len(tokens) - 2 and losses[i + 1] > target:
        i += 1
    share = (y(losses[i]) - y(target)) / (y(losses[i]) - y(losses[i + 1]))
    return back(x(tokens[i]) + share * (x(tokens[i + 1]) - x(tokens[i])))


def plain(value):
    return value


def first_below(target, tokens, losses):
    return next((n for n, loss in zip(tokens, losses) if loss <= target), tokens[-1])


def np_interp(target, tokens, losses, descending=False):
    import numpy as np
    order = slice(None) if descending else slice(None, None, -1)
    return np.exp(np.interp(math.log(target), losses.log().numpy()[order], tokens.log().numpy()[order]))


def least_squares(x, y):
    """Slope and intercept of the straight line through the points."""
    dx, dy = x - x.mean(), y - y.mean()
    slope = (dx * dy).sum() / (dx * dx).sum()
    return slope, y.mean() - slope * x.mean()


def by_one_law(target, tokens, losses):
    slope, level = least_squares(tokens.log(), losses.log())
    return ((math.log(target) - level) / slope).exp()


REACH = Exercise(reference=tokens_for, inputs=reach_inputs, misconceptions=[
    (partial(tokens_for, x=plain, y=plain, back=plain),
     "You draw straight lines on plain axes. Budgets that double are equally far apart on other ones."),
    (partial(tokens_for, y=plain), "Your axis of losses is plain; a power law is straight where both are logarithmic."),
    (partial(tokens_for, x=plain, back=plain), "Your axis of tokens is plain; both are logarithmic."),
    (first_below, "You take a budget at which somebody ran. What is wanted lies between two."),
    (lambda target, tokens, losses: tokens[(losses - target).abs().argmin()],
     "That is the budget of the run whose loss is nearest; the target's own lies beside it."),
    (lambda target, tokens, losses: tokens_for(target, tokens[-2:], losses[-2:]),
     "You go by the last two runs, wherever the loss lies."),
    (np_interp, "Right between the runs. Beyond them np.interp stays where the last one is; the line goes on."),
    (partial(np_interp, descending=True), "np.interp wants its first list ascending, and losses fall."),
    (lambda target, tokens, losses: tokens_for(target, tokens[[0, -1]], losses[[0, -1]]),
     "You draw one line from the first run to the last, past those between."),
    (by_one_law, "You fit one law through all runs; here the two that the loss lies between decide."),
    (lambda target, tokens, losses: tokens[-1] * losses[-1] / target,
     "You compare losses: the gap on the vertical axis. How many tokens apart are they?"),
    (partial(tokens_for, back=plain), "You have the logarithm of the tokens."),
])


# 6.3 ------------------------------------------------------------------------------------------------------------------

def records(generator, plans, rise=0.0):
    """Rows (run, planned, tokens so far, loss) in any order; plans: (planned, stopped after, steps between rows)."""
    rows = []
    for run, (planned, end, every) in enumerate(plans):
        for done in range(every, end + 1, every):
            wobble = 0.05 * randn(generator, 1).item()
            loss = 5 * done ** -0.2 * (1 + 0.3 * (1 - done / planned)) + wobble + rise * (done == planned)
            rows.append((run, planned, done, loss))
    order = torch.randperm(len(rows), generator=generator)
    return torch.tensor(rows, dtype=torch.float64)[order]


def run_inputs(generator):
    yield "three runs", records(generator, [(800, 800, 100), (200, 200, 100), (400, 400, 100)])
    yield "two seeds each", records(generator, [(400, 400, 50), (100, 100, 50), (400, 400, 50), (100, 100, 50)])
    yield "one that was stopped", records(generator, [(100, 100, 50), (400, 200, 50), (400, 400, 50), (200, 200, 50)])
    yield "losses that rise at the end", records(generator, [(400, 400, 100), (200, 200, 100), (200, 200, 100)], 2.0)
    yield "a budget at which nothing ended", records(generator, [(200, 200, 50), (400, 150, 50), (100, 100, 50)])
    yield "one that was stopped shortly before its end", records(generator, [(100, 95, 5), (200, 200, 10), (100, 100, 5)])


def gather(rows, *, keep=lambda rows: rows[rows[:, 1] == rows[:, 2]], by=1, of=lambda losses: sum(losses) / len(losses),
           order=sorted):
    found = {}
    for row in keep(rows).tolist():
        found.setdefault(row[by], []).append(row[3])
    budgets = order(found)
    return numbers(*budgets), numbers(*(of(found[n]) for n in budgets))


def last_rows(rows):
    return torch.stack([max((row for row in rows if row[0] == run), key=lambda row: row[2])
                        for run in rows[:, 0].unique()])


def passing(rows):
    ended = rows[rows[:, 1] == rows[:, 2]][:, 1]
    return rows[(rows[:, 2, None] == ended).any(1)]


def nearly_ended(rows):
    return rows[rows[:, 2] >= 0.9 * rows[:, 1]]


def lowest_rows(rows):
    kept = rows[[any(r[0] == row[0] and r[2] == r[1] for r in rows) for row in rows]]
    return torch.stack([min((row for row in kept if row[0] == run), key=lambda row: row[3])
                        for run in kept[:, 0].unique()])


RUNS = Exercise(reference=gather, inputs=run_inputs, parts=("budgets", "losses"), misconceptions=[
    (lambda rows: gather(rows, keep=lambda rows: passing(rows)[passing(rows)[:, 1] == rows[:, 1].max()], by=2),
     "You read all budgets off the longest runs: at the shorter ones their rate is still high."),
    (partial(gather, keep=passing, by=2), "You mix runs that end at a budget with such as only come past it."),
    (partial(gather, keep=last_rows), "A run that was stopped before its end counts in yours."),
    (partial(gather, keep=last_rows, by=2),
     "You take every run's last row, at the tokens it has got to. Was it meant to end there?"),
    (partial(gather, keep=nearly_ended), "Rows shortly before a run's end count in yours. Only the end itself is one."),
    (partial(gather, keep=lowest_rows), "You take the lowest loss on the way, not the last one."),
    (partial(gather, of=min), "The better of two seeds is luck: all of them count."),
    (partial(gather, of=lambda losses: losses[0]), "One seed of several is left in yours."),
    (partial(gather, order=list), "The budgets are to ascend; the rows come in any order."),
    (partial(gather, order=lambda found: sorted(found)[::-1]), "The budgets are to ascend, yours descend."),
    (partial(gather, keep=lambda rows: rows), "You average over a whole run, from its beginning."),
])


# 6.4 ------------------------------------------------------------------------------------------------------------------

def time_inputs(generator):
    for factor, percent in ((1.4, 2.75), (1.29, 9.6), (10.0, 80.0), (20.0, 60.0), (1.05, 9.6), (1.3, 0.0)):
        yield f"{factor:g} times fewer tokens, {percent:g}% more a step", factor, percent


def in_time(factor, percent, *, each=lambda percent: 1 + percent / 100, both=lambda factor, each: factor / each,
            saved=lambda speed, factor: 100 * (1 - 1 / speed)):
    speed = both(factor, each(percent))
    return speed, saved(speed, factor)


IN_TIME = Exercise(reference=in_time, inputs=time_inputs, parts=("factor", "saved"), misconceptions=[
    (partial(in_time, both=lambda factor, each: factor - (each - 1)),
     "You subtract percents of two different things: tokens, and the time of each."),
    (partial(in_time, each=lambda percent: 1 / (1 - percent / 100) if percent < 100 else math.inf),
     "A step that takes a quarter longer is not one of which a quarter is lost: with 100% nothing would be left."),
    (partial(in_time, both=lambda factor, each: factor * each), "A dearer step makes yours faster."),
    (partial(in_time, each=lambda percent: 1 + percent), "Percents are hundredths."),
    (partial(in_time, saved=lambda speed, factor: 100 * (speed - 1)),
     "The factor is right. But who is twice as fast does not save 100% of the time."),
    (partial(in_time, saved=lambda speed, factor: 100 * (1 - 1 / factor)),
     "You have the share of the tokens that is saved. The time is asked for."),
    (lambda factor, percent: (in_time(factor, percent)[0], 100 * (1 - 1 / factor) - percent),
     "The factor is right. From the tokens saved you took the step's percents: those are percents of what is left."),
    (partial(in_time, saved=lambda speed, factor: 1 - 1 / speed), "What is saved should be in percent."),
    (partial(in_time, saved=lambda speed, factor: 100 / speed), "That is the time that is left, not what is saved."),
    (partial(in_time, both=lambda factor, each: factor), "What a step costs does not enter."),
])


# 6.5 ------------------------------------------------------------------------------------------------------------------

def share_inputs(generator):
    for weak, strong in ((2.0, 1.4), (1.8, 1.29), (4.0, 1.0), (1.5, 1.5), (1.2, 0.9), (10.0, 3.0)):
        yield f"{weak:g} against the weak, {strong:g} against the strong", weak, strong


def baseline_share(weak, strong, *, worth=lambda weak, strong: weak / strong,
                   share=lambda weak, strong: math.log(weak / strong) / math.log(weak)):
    return worth(weak, strong), share(weak, strong)


SHARE = Exercise(reference=baseline_share, inputs=share_inputs, parts=("worth", "share"), misconceptions=[
    (partial(baseline_share, worth=lambda weak, strong: weak - strong),
     "Factors follow one another: they multiply. You take one from the other."),
    (partial(baseline_share, worth=lambda weak, strong: strong / weak),
     "Yours says that the better baseline needs more tokens than the weak one."),
    (lambda weak, strong: (strong / weak, math.log(strong / weak) / math.log(weak)),
     "Your first factor is upside down, and with it the share gets the other sign."),
    (partial(baseline_share, share=lambda weak, strong: (weak - strong) / (weak - 1)),
     "A share of the excess over 1 adds up only where factors add. What turns a product into a sum?"),
    (partial(baseline_share, share=lambda weak, strong: (weak / strong - 1) / (weak - 1)),
     "Your shares, that of the baseline and that of the architecture, would not add up to 1."),
    (partial(baseline_share, share=lambda weak, strong: (weak - strong) / weak),
     "You divide a difference by `weak`: where the architecture adds nothing your share is not 1."),
    (partial(baseline_share, share=lambda weak, strong: math.log(strong) / math.log(weak)),
     "That is the architecture's own share; the baseline's is asked for."),
    (partial(baseline_share, share=lambda weak, strong: 1 / strong),
     "You divide the two factors as they are: where nothing comes from the baseline yours is not 0."),
    (partial(baseline_share, share=lambda weak, strong: math.log(weak / strong) / math.log(strong) if strong != 1 else
             math.inf), "A share of which whole? You divide by the architecture's part."),
    (partial(baseline_share, share=lambda weak, strong: math.log(weak / strong)),
     "The logarithm is a good idea; now its share of the whole one's."),
])


# 6.6 ------------------------------------------------------------------------------------------------------------------

def rate_inputs(generator):
    rates = numbers(5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    yield "five rates", rates, numbers(1.50, 1.43, 1.40, 1.41, 1.47)
    yield "three rates, unevenly spaced", numbers(1e-3, 2e-3, 1e-2), numbers(1.42, 1.40, 1.60)
    yield "the lowest loss at the highest rate", rates[:3], numbers(1.50, 1.43, 1.40)
    yield "the lowest loss at the lowest rate", rates[2:], numbers(1.40, 1.41, 1.47)
    yield "a steep end", rates, numbers(2.60, 1.70, 1.41, 1.40, 1.44)
    yield "a run that diverged, not beside the best", rates, numbers(1.45, 1.40, 1.41, 1.70, math.inf)
    yield "the rate above the best diverged", rates[:4], numbers(1.50, 1.43, 1.40, math.inf)
    yield "the same, but the next did not", rates, numbers(1.50, 1.43, 1.40, math.inf, 1.90)


def vertex(x, y):
    """The lowest point of the parabola through three points."""
    (x0, x1, x2), (y0, y1, y2) = x, y
    first, second = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (second - first) / (x2 - x0)
    low = (x0 + x1) / 2 - first / (2 * bend)
    return low, y0 + first * (low - x0) + bend * (low - x0) * (low - x1)


def best_rate(rates, losses, *, to=math.log, back=math.exp, edges=False, finite=False, level=True, moved=True):
    points = [(float(r), float(y)) for r, y in zip(rates, losses) if not finite or math.isfinite(y)]
    i = min(range(len(points)), key=lambda j: points[j][1])
    if edges:
        i = min(max(i, 1), len(points) - 2)
    near = points[max(i - 1, 0):i + 2]
    if len(near) < 3 or not all(math.isfinite(y) for _, y in near):
        return math.nan, math.nan
    low, loss = vertex([to(r) for r, _ in near], [y for _, y in near])
    return back(low) if moved else points[i][0], loss if level else points[i][1]


def on_the_grid(rates, losses):
    return rates[losses.argmin()], losses.min()


def through_all(rates, losses):
    if math.isnan(best_rate(rates, losses)[0]):
        return math.nan, math.nan
    x, y = rates.log()[losses.isfinite()], losses[losses.isfinite()]
    a = torch.stack((torch.ones_like(x), x, x * x), dim=1)
    c, b, a2 = torch.linalg.lstsq(a, y[:, None]).solution.flatten()
    return (-b / (2 * a2)).exp(), c - b * b / (4 * a2)


RATE = Exercise(reference=best_rate, inputs=rate_inputs, parts=("rate", "loss"), misconceptions=[
    (on_the_grid, "You give the best rate that was tried, even at an edge, where nobody knows what is beyond."),
    (partial(best_rate, level=False, moved=False),
     "You see the edges. But between the rates that were tried there may be a better one."),
    (partial(best_rate, to=plain, back=plain),
     "Your parabola stands over the plain rate; rates that double are equally far apart in the logarithm."),
    (through_all, "Your parabola goes near all points: steep ends pull it away from the lowest three."),
    (partial(best_rate, edges=True),
     "At an edge you go on with the parabola of the last three. It may open downwards, or end far from any run."),
    (partial(best_rate, finite=True), "You leave out what diverged; beside the best rate it is an edge, too."),
    (partial(best_rate, level=False), "The rate is right. The loss should be the parabola's there, not a run's."),
    (partial(best_rate, back=plain), "You have the logarithm of the rate."),
])


# 6.7 ------------------------------------------------------------------------------------------------------------------

def law_inputs(generator):
    def noisy(c, level, power, spread):
        return c, level * c ** -power * (spread * randn(generator, len(c))).exp()

    yield "a law without noise", *noisy(numbers(1e6, 2e6, 4e6), 20.0, 0.2, 0.0)
    yield "five runs with noise", *noisy(numbers(1e6, 2e6, 4e6, 8e6, 1.6e7), 20.0, 0.2, 0.05)
    yield "FLOPs of a laptop", *noisy(1e12 * numbers(1.0, 2.0, 4.0), 300.0, 0.18, 0.03)
    yield "FLOPs of a cluster", *noisy(10.0 ** numbers(17, 18, 19, 20, 21), 25.0, 0.05, 0.02)


def power_law(c, losses):
    slope, level = least_squares(c.log(), losses.log())
    return level.exp(), -slope


def in_linear_space(c, losses):
    """The least sum of (L - A C^-a)^2, by Gauss and Newton."""
    x = c.log() - c.log().mean()
    level, power = power_law(x.exp(), losses)
    level = level.log()
    for _ in range(100):
        f = (level - power * x).exp()
        step = torch.linalg.lstsq(torch.stack((f, -x * f), dim=1), (losses - f)[:, None]).solution.flatten()
        level, power = level + step[0], power + step[1]
    return (level + power * c.log().mean()).exp(), power


def straight(c, losses, *, x=plain, y=plain, level=plain):
    slope, start = least_squares(x(c), y(losses))
    return level(start), -slope


LAW = Exercise(reference=power_law, inputs=law_inputs, parts=("A", "a"), misconceptions=[
    (in_linear_space, "You let the errors of the losses themselves decide: the short runs, with large ones, then weigh "
                      "most. Least squares in the logarithm were asked for."),
    (straight, "That is a straight line through the losses as they are."),
    (partial(straight, x=torch.log), "You took the logarithm of C, not of L."),
    (partial(straight, y=torch.log, level=torch.exp), "You took the logarithm of L, not of C."),
    (partial(straight, x=torch.log, y=torch.log), "A is a loss; you have its logarithm."),
    (lambda c, losses: (power_law(c, losses)[0], -power_law(c, losses)[1]),
     "With your sign, the law as it is written would rise with C."),
    (lambda c, losses: power_law(c[[0, -1]], losses[[0, -1]]), "You use the first and the last run only."),
    (partial(straight, x=torch.log10, y=torch.log10, level=torch.exp),
     "Two kinds of logarithm: one on the way in, another one on the way out."),
    (lambda c, losses: (power_law(losses, c)[0] ** (1 / power_law(losses, c)[1]), 1 / power_law(losses, c)[1]),
     "You fit C by L; the errors are those of L."),
    (partial(straight, x=torch.log10, y=torch.log, level=torch.exp),
     "One axis has the natural logarithm, the other that to the base 10."),
    (lambda c, losses: (losses[0], power_law(c, losses)[1]), "A is the loss of the law at C = 1, not that of a run."),
])


# 6.8 ------------------------------------------------------------------------------------------------------------------

def worth_inputs(generator):
    for percent, power in ((2.6, 0.05), (1.3, 0.05), (0.2, 0.07), (-2.5, 0.07), (2.1, 0.2), (0.0, 0.1), (10.0, 1.0)):
        yield f"{percent:g}% lower, a = {power:g}", percent, power


def worth(percent, a):
    return (1 - percent / 100) ** (-1 / a)


WORTH = Exercise(reference=worth, inputs=worth_inputs, misconceptions=[
    (lambda percent, a: 1 + percent / 100 / a, "Close for small percents. But that is the tangent, not the law."),
    (lambda percent, a: 1 / (1 - percent / 100), "That is the factor between the losses. How many tokens is it worth?"),
    (lambda percent, a: (1 - percent / 100) ** -a, "You go from tokens to losses; the way back has another power."),
    (lambda percent, a: (1 - percent / 100) ** (1 / a), "With your factor, a lower loss is worth fewer tokens."),
    (lambda percent, a: (1 + percent / 100) ** (1 / a),
     "Lower by p percent leaves 1 - p/100; your base is another, though near it."),
    (lambda percent, a: math.exp(percent / 100 / a), "Close: you take p/100 for the logarithm of the losses' ratio."),
    (lambda percent, a: 100 * ((1 - percent / 100) ** (-1 / a) - 1), "A factor is asked for, not percents."),
    (lambda percent, a: 1 + percent / 100, "The law's exponent does not enter."),
    (lambda percent, a: (1 - percent / 100) ** -1 / a, "Python takes ** before /: yours is a power, divided by a."),
    (lambda percent, a: (complex(1 - percent) ** (-1 / a)).real,
     "A percent is a hundredth: by 2.6% yours takes away more than the whole loss."),
])


# 6.9 ------------------------------------------------------------------------------------------------------------------

def table_inputs(generator):
    yield "GPT+ at 1e21 FLOPs", 13.408079, 0.466271, 0.336617, 0.465600, 1e21
    yield "anGPT at 1e21 FLOPs", 9.727337, 0.473190, 0.650506, 0.451378, 1e21
    yield "GPT+ at 1e17 FLOPs", 13.408079, 0.466271, 0.336617, 0.465600, 1e17
    yield "a pair of laws that fits", 1.8257418583505538, 0.5, 0.09128709291752769, 0.5, 1e19


def table(d0, a_d, n0, a_n, c, *, each=6.0, total=lambda a_d, a_n: a_d + a_n, per=lambda d, n: d / n, start=True):
    d, n = (d0 if start else 1) * c ** a_d, (n0 if start else 1) * c ** a_n
    return total(a_d, a_n), each * n * d / c, per(d, n)


TABLE = Exercise(reference=table, inputs=table_inputs, parts=("sum", "6ND/C", "D/N"), misconceptions=[
    (partial(table, total=lambda a_d, a_n: 1.0), "The sum should be 1 if all fits. Is it? Add up what is printed."),
    (partial(table, each=2.0), "Training takes more than the forward pass: see exercise 6.1."),
    (partial(table, each=1.0), "How many FLOPs for each weight and token?"),
    (partial(table, per=lambda d, n: n / d), "Tokens a parameter; yours is parameters a token."),
    (partial(table, per=lambda d, n: 20.0), "20 is Hoffmann's; these fits say something else."),
    (partial(table, start=False), "The laws' first numbers, D0 and N0, do not enter."),
    (lambda d0, a_d, n0, a_n, c: table(d0, a_n, n0, a_d, c), "You gave D the exponent of N."),
    (lambda d0, a_d, n0, a_n, c: (a_d + a_n, 1.0, c / 6 / (n0 * c ** a_n) ** 2),
     "You take D from C = 6ND, so that your check cannot fail: D has a law of its own."),
    (partial(table, total=lambda a_d, a_n: a_d * a_n), "Multiplying powers of C does something else to exponents."),
    (lambda d0, a_d, n0, a_n, c: (a_d + a_n, 6 * n0 * d0, d0 / n0), "Your second and third number are those at C = 1."),
    (lambda d0, a_d, n0, a_n, c: (a_d + a_n, 6 * d0 * n0 * c ** (a_d + a_n), table(d0, a_d, n0, a_n, c)[2]),
     "Your second number is 6ND; by what is it to be divided?"),
])


# 6.10 -----------------------------------------------------------------------------------------------------------------

def exponent_inputs(generator):
    yield "Table I.1's for D", 0.466271, 0.473190, 1.08e-6, 1.11e-6, 0.01
    yield "a difference with p = 0.073", 0.050, 0.0526532, 1.08e-6, 1.11e-6, 0.002
    yield "the same, and a wide margin", 0.0526532, 0.050, 1.08e-6, 1.11e-6, 0.01
    yield "three seeds each: wide errors", 0.21, 0.18, 4e-4, 9e-4, 0.02
    yield "clearly different, and all the same close", 0.2, 0.201, 1e-8, 4e-8, 0.005
    yield "equal, as far as one can see", 0.2, 0.2, 1e-4, 1e-5, 0.005
    yield "clearly lower, and not close", 0.21, 0.18, 1e-6, 4e-6, 0.01


def compare(a, b, var_a, var_b, margin, *, width=1.96, middle=lambda a, b: b - a, sign=plain,
            error=lambda v, w: math.sqrt(v + w), p=lambda z: math.erfc(abs(z) / 2 ** 0.5),
            equal=lambda low, high, p, difference, margin: -margin <= low and high <= margin):
    s = error(var_a, var_b)
    z = sign((b - a) / s)
    low, high = middle(a, b) - width * s, middle(a, b) + width * s
    return z, p(z), low, high, float(equal(low, high, p(z), b - a, margin))


COMPARE = Exercise(reference=compare, inputs=exponent_inputs, parts=("z", "p", "low", "high", "equal"), misconceptions=[
    (partial(compare, equal=lambda low, high, p, difference, margin: p > 0.05),
     "Not rejected is not equal: few or noisy runs reject nothing. What does the interval leave open?"),
    (partial(compare, equal=lambda low, high, p, difference, margin: -margin <= high and low <= margin),
     "Your interval only has to touch the margins. When is all of it between them?"),
    (partial(compare, equal=lambda low, high, p, difference, margin: p < 0.05),
     "A p-value asks whether 0 is possible. Whether the two are close enough is another question."),
    (partial(compare, equal=lambda low, high, p, difference, margin: abs(difference) <= margin),
     "The best guess of the difference is small; how sure is it?"),
    (partial(compare, p=lambda z: math.erfc(abs(z) / 2 ** 0.5) / 2), "You look at one side; the test has two."),
    (partial(compare, p=lambda z: 1 - math.erfc(abs(z) / 2 ** 0.5)),
     "Yours is near 1 where the difference is clear: it is the other part of the bell."),
    (partial(compare, error=lambda v, w: v + w), "Variances are squares of errors."),
    (partial(compare, error=lambda v, w: v ** 0.5 + w ** 0.5),
     "You add the errors, as if both always erred to opposite sides. What adds up for independent numbers?"),
    (partial(compare, error=lambda v, w: v ** 0.5), "Both are uncertain; you use the first one's variance only."),
    (partial(compare, error=lambda v, w: ((v + w) / 2) ** 0.5), "You average the variances; a difference has more."),
    (partial(compare, width=1.0), "One standard error to each side holds 68%, not 95%."),
    (partial(compare, middle=lambda a, b: b), "The interval is to be that of the difference."),
    (partial(compare, sign=abs), "z has a sign: which exponent is the larger?"),
    (lambda a, b, var_a, var_b, margin: compare(b, a, var_a, var_b, margin),
     "Yours is a - b all the way. It is b - a which is asked for, in z and in the interval."),
    (partial(compare, sign=lambda z: -z), "Your z is that of a - b; the interval is the one of b - a."),
    (partial(compare, middle=lambda a, b: a - b), "Your interval is the one of a - b; z is that of b - a."),
])


# 6.11 -----------------------------------------------------------------------------------------------------------------

def draw_inputs(generator):
    def case(runs, seeds, windows, gain):
        tokens = 2.0 ** torch.arange(runs) * 1e6
        hard = 0.1 * randn(generator, seeds, 1) + 0.2 * randn(generator, windows)
        losses = (3 * (tokens / 1e6) ** -0.2)[:, None, None] + hard + 0.03 * randn(generator, runs, seeds, windows)
        baseline = losses[-1] + gain + 0.05 * randn(generator, seeds, windows)
        return tokens, baseline, losses, torch.randint(seeds, (6, seeds), generator=generator)

    yield "three seeds", *case(3, 3, 5, 0.2)
    yield "three seeds, slower than the baseline", *case(3, 3, 4, -0.1)
    yield "five seeds, four lengths", *case(4, 5, 8, 0.3)


def bootstrap(tokens, baseline, losses, draws, *, axis=1, of=torch.mean, redrawn=True,
              base=lambda x, draw, axis: x.index_select(axis - 1, draw).mean()):
    def factor(draw):
        taken = [of(run.index_select(axis - 1, draw) if redrawn else run) for run in losses]
        return float(tokens[-1]) / tokens_for(float(base(baseline, draw, axis)), tokens, taken)
    return numbers(*(factor(draw) for draw in draws))


def factors_of_seeds(tokens, baseline, losses, draws, power=1):
    single = [bootstrap(tokens, baseline, losses, torch.full((1, 1), i))[0] for i in range(len(baseline))]
    return torch.stack(single).pow(power)[draws].mean(1).pow(power)             # -1: the mean is one of tokens


BOOTSTRAP = Exercise(reference=bootstrap, inputs=draw_inputs, misconceptions=[
    (partial(bootstrap, axis=2),
     "You draw windows of the held-out text: how well a finished model's loss is known. What differs from run to run?"),
    (partial(bootstrap, base=lambda x, draw, axis: x.mean()),
     "The baseline has seeds, too; in yours it is known exactly."),
    (partial(bootstrap, redrawn=False),
     "Only the baseline's seeds are drawn in yours; the other architecture has as many that might have come out "
     "differently."),
    (factors_of_seeds, "You draw factors that each rest on one seed. Average the losses first, then one factor."),
    (partial(factors_of_seeds, power=-1),
     "You average tokens that each rest on one seed. Average the losses first, then go to tokens once."),
    (partial(bootstrap, base=lambda x, draw, axis: x[:, draw].mean()),
     "`losses` has its seeds in the middle, `baseline` in front: you draw windows of the baseline."),
    (partial(bootstrap, of=torch.median), "The middle one of so few losses jumps: take their mean."),
    (lambda tokens, baseline, losses, draws: bootstrap(tokens, baseline, losses, draws[:, :1]),
     "You use the first seed of each draw only."),
    (lambda tokens, baseline, losses, draws: bootstrap(tokens, baseline, losses, torch.arange(len(baseline)).expand_as(
        draws)), "The draws do not enter: all of your factors are the same."),
    (lambda tokens, baseline, losses, draws: torch.cat([bootstrap(
        tokens, baseline, losses, draw.unique()[None]) for draw in draws]),
     "A seed that was drawn twice counts twice."),
    (lambda tokens, baseline, losses, draws: float(tokens[-1]) / bootstrap(tokens, baseline, losses, draws),
     "Those are tokens; the factor compares them with the longest runs'."),
    (lambda tokens, baseline, losses, draws: bootstrap(tokens, baseline, losses, draws).sort().values,
     "The numbers are right, their order is not: one for each draw, in the draws' order."),
    (lambda tokens, baseline, losses, draws: 1 / bootstrap(tokens, baseline, losses, draws),
     "A faster architecture gets a factor below 1 in yours."),
])


# What holds of every right answer: said where none of the known mistakes fits ----------------------------------------

def share_of(weak, strong, wanted):
    """Whether this is the case in which the share is known: all (1) or nothing (0)."""
    return strong == 1 if wanted == 1 else weak == strong


PROPERTIES = {
    "6.1": [
        (lambda y, n, ratio: near(y[0] / n, ratio, 1e-6), "Your tokens over the parameters are not `ratio`."),
        (lambda y, n, ratio: near(y[1] / y[0] / n, 6, 1e-6),
         "Your FLOPs over tokens and parameters are not 6: see the formula in the text.")],
    "6.2": [
        (lambda y, target, x, loss: target != 1.7 or near(y, 2e6),
         "At a loss that a run has, the answer is that run's tokens. Yours is not."),
        (lambda y, target, x, loss: target != 1.6 or 2e6 < y < 4e6, "A loss between two runs lies between their tokens."),
        (lambda y, target, x, loss: target != 1.3 or y > 8e6, "A loss below all needs more tokens than all."),
        (lambda y, target, x, loss: target != 2.4 or y < 1e6, "A loss above all needs fewer tokens than all."),
        (lambda y, *_: False, "Which axes are logarithmic, and between which two runs is your line?")],
    "6.3": [
        (lambda y, rows: (y[0].diff() > 0).all(), "Each budget should come once, and ascend. Yours do not."),
        (lambda y, rows: y[0].shape == y[1].shape, "There should be as many losses as budgets."),
        (lambda y, rows: near(y[0], gather(rows)[0]), "Your budgets are not those at which a run ended as planned."),
        (lambda y, rows: False, "The budgets are right. Which rows belong to each, and what is taken of them?")],
    "6.4": [
        (lambda y, factor, percent: percent != 0 or near(y[0], factor),
         "Where a step costs as much, the factor in time is the one in tokens."),
        (lambda y, factor, percent: near(y[0] * (1 + percent / 100), factor),
         "The factor: time is tokens times the time of each. In yours it is something else."),
        (lambda y, factor, percent: near(y[1], 100 - 100 / y[0]),
         "What is saved does not fit your factor: who is twice as fast needs half the time, and saves 50%.")],
    "6.5": [
        (lambda y, weak, strong: near(y[0] * strong, weak),
         "The two steps, from the weak baseline to the strong one and on to the architecture, multiply to `weak`. Yours "
         "do not."),
        (lambda y, weak, strong: not share_of(weak, strong, 1) or near(y[1], 1),
         "Where the architecture gains nothing on the strong baseline, all is the baseline's. Your share is not 1."),
        (lambda y, weak, strong: not share_of(weak, strong, 0) or near(y[1], 0),
         "Where both baselines are as good, nothing is the baseline's. Your share is not 0."),
        (lambda y, *_: False, "The two ends, 0 and 1, are right. But your share and that of the other step do not add up "
                              "to 1 where factors multiply.")],
    "6.6": [
        (lambda y, rates, losses: not losses.argmin() in (0, len(losses) - 1) or y[0].isnan(),
         "The lowest loss at an edge: the search is not finished, so nan."),
        (lambda y, rates, losses: y[0].isnan() or y[1] <= losses.min() + 1e-9,
         "The lowest point of the parabola is not above the lowest run. Yours is."),
        (lambda y, rates, losses: y[0].isnan() or rates[losses.argmin() - 1] < y[0] < rates[losses.argmin() + 1],
         "The lowest point lies between the two neighbours. Your rate does not."),
        (lambda y, rates, losses: y[0].isnan() or y[1] < losses.min() - 1e-9 or len(losses) < 3,
         "Three points that are not alike: the parabola goes a little below the lowest of them. Yours does not."),
        (lambda y, *_: False, "Over which axis does the parabola stand, and through which points does it go?")],
    "6.7": [
        (lambda y, c, losses: y[1] > 0, "Losses fall with C, so a is positive in L = A C^-a."),
        (lambda y, c, losses: c[0] != 1e6 or len(c) > 3 or near(y[1], 0.2),
         "Even of a law without noise you do not find the exponent."),
        (lambda y, c, losses: c[0] != 1e6 or len(c) > 3 or near(y[0], 20.0),
         "Even of a law without noise you do not find A, its loss at C = 1."),
        (lambda y, *_: False, "A law without noise you find. With noise, what is it whose squares are to be least?")],
    "6.8": [
        (lambda y, percent, a: percent != 0 or near(y, 1), "Where the losses are equal the factor is 1."),
        (lambda y, percent, a: percent <= 0 or y > 1, "A lower loss is worth more tokens: a factor above 1."),
        (lambda y, percent, a: near(abs(y) ** a * (1 - percent / 100), 1, 1e-6),
         "With so many times the tokens, and the exponent a, the loss does not fall by `percent`.")],
    "6.9": [
        (lambda y, d0, a_d, n0, a_n, c: near(y[0], a_d + a_n, 1e-6), "The first: the sum of the two exponents."),
        (lambda y, d0, a_d, n0, a_n, c: a_d != 0.5 or near(y[1], 1),
         "The second: there is a pair of laws that fits; there it should be 1. Yours is not."),
        (lambda y, d0, a_d, n0, a_n, c: a_d != 0.5 or near(y[2], d0 / n0),
         "The third: where both exponents are alike D / N does not depend on C. Yours does, or is no ratio of the two."),
        (lambda y, *_: False, "Where the laws fit yours is right: does C stand with the exponents that were given?")],
    "6.10": [
        (lambda y, a, b, va, vb, margin: near(y[0], (b - a) / (va + vb) ** 0.5),
         "z: how many of its own standard errors is b - a? Yours is another number."),
        (lambda y, *_: 0 <= y[1] <= 1.0001, "A p is a probability: between 0 and 1."),
        (lambda y, *_: near(y[1], math.erfc(abs(float(y[0])) / 2 ** 0.5)), "Your p is not the two-sided one of your z."),
        (lambda y, a, b, *_: near((y[2] + y[3]) / 2, b - a, 1e-6), "Your interval's middle is not b - a."),
        (lambda y, a, b, va, vb, margin: near((y[3] - y[2]) / 2, 1.96 * (va + vb) ** 0.5, 1e-6),
         "Your interval reaches another number of standard errors to each side than 1.96."),
        (lambda y, *_: False, "The last: is all of your interval between the two margins?")],
    "6.11": [
        (lambda y, tokens, baseline, losses, draws: y.shape == (len(draws),), "There is one factor for each draw."),
        (lambda y, *_: False,
         "Take the first draw by hand: the seeds of both, two means (over seeds and windows), then tokens_for once.")],
}


EXERCISES = {"6.1": BUDGET, "6.2": REACH, "6.3": RUNS, "6.4": IN_TIME, "6.5": SHARE, "6.6": RATE, "6.7": LAW,
             "6.8": WORTH, "6.9": TABLE, "6.10": COMPARE, "6.11": BOOTSTRAP}

for number, known in PROPERTIES.items():
    EXERCISES[number].properties = known
