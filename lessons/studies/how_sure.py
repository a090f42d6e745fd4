"""
What the runs of lessons/studies/seeds.py say: tables, a picture, and how many seeds a comparison takes.

    python lessons/studies/how_sure.py table           # spread, weights or order, when it shows, in which files
    python lessons/studies/how_sure.py trial           # how often intervals hold the truth; chance of a wrong winner
    python lessons/studies/how_sure.py draw            # assets/seeds.png
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench import label, print_table           # before torch: it sets how torch's threads wait
import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from scipy.stats import t as student

from prepare import expect
from seeds import EVERY, ROOT, USUAL, read

def groups():
    """(arch, variant) -> its runs."""
    found = {}
    for row in read():
        found.setdefault((row["arch"], row["variant"]), []).append(row)
    return found

def show(lines):
    """Prints rows of words, the first of which names the columns."""
    names, *rows = lines
    print_table([dict(zip(names, row)) for row in rows])

def column(rows, name):
    return np.array([row[name] for row in rows])

# ---- Weights or order ------------------------------------------------------------------------------------------------

def grid(rows):
    """Losses (weights, order) of the largest square of seeds that is complete."""
    losses = {(row["weights"], row["order"]): row["loss"] for row in rows}
    n = 0
    while all((w, o) in losses for w in range(1, n + 2) for o in range(1, n + 2)):
        n += 1
    return np.array([[losses[w, o] for o in range(1, n + 1)] for w in range(1, n + 1)])

def squares(table):
    """Mean squares of weights (rows), order (columns), and what neither explains alone: (3,)"""
    n = len(table)
    rows = table.mean(1) - table.mean()
    columns = table.mean(0) - table.mean()
    rest = table - table.mean() - rows[:, None] - columns
    return np.array([n * (rows ** 2).sum() / (n - 1), n * (columns ** 2).sum() / (n - 1),
                     (rest ** 2).sum() / (n - 1) ** 2])

def variances(table, draws=10_000):
    """Analysis of variance, two ways, one run a cell: estimated variances of weights, of order, of the rest; then p of
    weights and of order, the share of shuffled tables with a mean square as large beside the rest."""
    found = squares(table)
    parts = (found[:2] - found[2]).clip(min=0) / len(table)
    generator = np.random.default_rng(0)
    larger = np.zeros(2)
    for _ in range(draws):
        other = squares(generator.permutation(table.flatten()).reshape(table.shape))
        larger += other[:2] / other[2] >= found[:2] / found[2]
    return [*parts, found[2]], larger / draws

# ---- When and where --------------------------------------------------------------------------------------------------

def rest_of(rows):
    """Losses on the held-out tokens behind the usual ones."""
    total = column(rows, "tokens_all")
    return (column(rows, "loss_all") * total - column(rows, "loss") * USUAL) / (total - USUAL)

def confirmed(rows):
    """The share of the variance of losses that other held-out tokens confirm."""
    both = np.cov(column(rows, "loss"), rest_of(rows))
    return both[0, 1] / both[0, 0]

def fate(rows):
    """(steps, correlation of the held-out loss there with the last one)"""
    early = np.array([row["early"] for row in rows])           # (runs, looks, 2)
    last = column(rows, "loss")
    return early[0, :, 0], [np.corrcoef(losses, last)[0, 1] for losses in early[:, :, 1].T]

def of_files(rows):
    """The share of each file in the tokens and in the variance of the mean loss."""
    files = np.array([row["files"] for row in rows])           # (runs, files, 2)
    weight = files[0, :, 0] / files[0, :, 0].sum()
    mean = files[:, :, 1] @ weight
    covariance = [np.cov(losses, mean)[0, 1] for losses in files[:, :, 1].T]
    return weight, weight * covariance / mean.var(ddof=1)

def overview(found):
    lines = [["arch", "variant", "runs", "mean", "sd", "lowest", "highest", "sd, all tokens",
              "averaged weights", "its sd"]]
    for (arch, variant), rows in found.items():
        loss = column(rows, "loss")
        averaged = column(rows, "loss_averaged")
        several = len(rows) > 1                          # one run has no spread
        numbers = [loss.mean(), several and loss.std(ddof=1), loss.min(), loss.max(),
                   several and column(rows, "loss_all").std(ddof=1), averaged.mean(), several and averaged.std(ddof=1)]
        lines.append([label(arch), variant, str(len(rows)), *(f"{x:.4f}" if x else "-" for x in numbers)])
    show(lines)

def paired(found):
    """Variants less the built-in recipe of their length and size with the same two seeds, and a 95% t interval."""
    lines = [["arch", "variant less built-in", "pairs", "mean", "95%", "sd of the differences"]]
    for (arch, variant), rows in found.items():
        recipe = "built-in"
        for other in ("5 tokens", "0.64M"):
            if variant.startswith(other):
                recipe = other
        base = {(row["weights"], row["order"]): row["loss"] for row in found.get((arch, recipe), [])}
        differences = [row["loss"] - base[row["weights"], row["order"]] for row in rows
                       if (row["weights"], row["order"]) in base]
        n = len(differences)
        if variant != recipe and n:
            sd = np.std(differences, ddof=1) if n > 1 else np.nan
            mean = np.mean(differences)
            half = sd * student.ppf(0.975, n - 1) / n ** 0.5 if n > 1 else np.nan
            lines.append([label(arch), variant, str(n), f"{mean:.4f}", f"{mean - half:.4f} to {mean + half:.4f}",
                          f"{sd:.4f}"])
    show(lines)

def table():
    found = groups()
    overview(found)
    print()
    paired(found)
    for (arch, variant), rows in found.items():
        losses = grid(rows)
        if len(losses) > 1:
            (weights, order, rest), p = variances(losses)
            total = weights + order + rest
            print(f"\n{label(arch)}, {variant}, {len(losses)} x {len(losses)}: weights {weights / total:.0%} "
                  f"(p {p[0]:.2f}), order {order / total:.0%} (p {p[1]:.2f}), neither alone {rest / total:.0%}")
            print(losses.round(4))
        if variant == "built-in" and len(rows) > 4:
            details(f"{label(arch)}, {variant}", rows)

def details(name, rows):
    """When a run's fate shows, and in which files."""
    print(f"\n{name}: correlation with the last loss, of")
    steps, r = fate(rows)
    print("  losses on the way:", ", ".join(f"{step:.0f}: {x:.2f}" for step, x in zip(steps, r)))
    last = column(rows, "loss")
    for kind in ("s_qk", "alpha_a", "alpha_m"):
        for layer in range(3):
            values = np.array([row.get("path", {}).get(f"{layer}.{kind}", [0]) for row in rows])     # (runs, looks)
            if values.any():
                steps = 100, 200, 500, 1000, 2200
                looks = {step: np.corrcoef(values[:, step // EVERY - 1], last)[0, 1] for step in steps}
                print(f"  {kind} of block {layer}:", ", ".join(f"{step}: {x:.2f}" for step, x in looks.items()))
    print(f"  losses on other held-out tokens: their covariance is {confirmed(rows):.2f} of the variance")
    weight, share = of_files(rows)
    largest = share.argsort()[::-1][:4]
    print(f"  {(share > 0).sum()} of {len(share)} files vary along; most of the variance (of the tokens) has",
          ", ".join(f"file {i} {share[i]:.0%} ({weight[i]:.0%})" for i in largest))

# ---- How sure --------------------------------------------------------------------------------------------------------

def halves(a, b):
    """Half of Welch's 95% t interval for the difference of means of a and b, each (trials, seeds)."""
    n = a.shape[1]
    of_a = a.var(1, ddof=1) / n
    of_b = b.var(1, ddof=1) / n
    freedom = (of_a + of_b) ** 2 * (n - 1) / (of_a ** 2 + of_b ** 2).clip(min=1e-30)   # a run drawn n times: spread 0
    return np.sqrt(of_a + of_b) * student.ppf(0.975, freedom)

def holds(a, b, truth, kind, generator, draws=400):
    """How often an interval of that kind holds the difference of means."""
    difference = a.mean(1) - b.mean(1)
    if kind == "t":
        return (abs(difference - truth) <= halves(a, b)).mean()
    n = a.shape[1]
    again = []
    for _ in range(draws):
        picked = [np.take_along_axis(x, generator.integers(n, size=x.shape), axis=1) for x in (a, b)]
        again.append(picked[0].mean(1) - picked[1].mean(1))
    low, high = np.quantile(again, (0.025, 0.975), axis=0)
    return ((low <= truth) & (truth <= high)).mean()

def drawn(values, trials, n, generator, normal):
    if normal:
        return generator.normal(values.mean(), values.std(ddof=1), (trials, n))
    return generator.choice(values, (trials, n))

def wrong(a, b, seeds, true, generator, trials=20_000):
    """Chance that the arch whose true mean is lower by `true` has the higher mean of so many seeds."""
    a = generator.choice(a - a.mean(), (trials, seeds)).mean(1)
    b = generator.choice(b - b.mean(), (trials, seeds)).mean(1)
    return (a > b + true).mean()

def two(archs=("ngpt", "angpt")):
    found = [column(groups().get((arch, "built-in"), []), "loss") for arch in archs]
    for arch, losses in zip(archs, found):
        expect(len(losses) > 2, f"{arch}: {len(losses)} runs of the built-in recipe have ended, expected three or more")
    return found

def trial(trials=4000):
    """Draws seeds of two archs again and again from the stored runs, or from a normal law of their spread."""
    generator = np.random.default_rng(0)
    a, b = two()
    lines = [["seeds", "drawn from", "t holds the truth", "bootstrap of seeds holds it"]]
    for n in (3, 4, 8):
        for normal in (False, True):
            samples = [drawn(x, trials, n, generator, normal) for x in (a, b)]
            shares = [holds(*samples, a.mean() - b.mean(), kind, generator) for kind in ("t", "bootstrap")]
            lines.append([str(n), "normal law" if normal else "stored runs", *(f"{x:.3f}" for x in shares)])
    show(lines)
    lines = [["true difference", *(f"{n} seeds" for n in (1, 2, 3, 4, 8, 16))]]
    for true in (0.005, 0.01, 0.02):
        lines.append([str(true), *(f"{wrong(a, b, n, true, generator):.2f}" for n in (1, 2, 3, 4, 8, 16))])
    show(lines)

def draw_runs(axes, rows, of_row, title):
    """Each of nGPT's runs along the steps, blue the lowest loss at the end, red the highest."""
    order = column(rows, "loss").argsort().argsort() / (len(rows) - 1)
    for row, place in zip(rows, order):
        axes.plot(*of_row(row), color=colormaps["coolwarm"](place), lw=1)
    axes.set(title=title, xlabel="step")

def on_the_way(name):
    """What draws a column of the trajectories."""
    return lambda row: (row["path"]["step"], row["path"][name])

def draw_spread(axes, found):
    """Each run's last loss: archs at their best rates, and nGPT's variants."""
    shown = [key for key, rows in found.items() if len(rows) > 7 and not key[1].startswith("5 tokens")]
    for place, key in enumerate(shown):
        losses = column(found[key], "loss")
        axes.plot(losses, [place] * len(losses), "o", alpha=0.5, ms=5)
        axes.plot(losses.mean(), place, "k|", ms=16)
    names = [label(arch) + (f", {variant}" if variant != "built-in" else "") for arch, variant in shown]
    axes.set_yticks(range(len(shown)), names)
    axes.set(title="last losses, and their means", xlabel="nats/byte")
    axes.invert_yaxis()

def draw():
    """How nGPT's runs go apart, what goes with it, and the chance of naming the wrong winner."""
    found = groups()
    rows = found["ngpt", "built-in"]
    figure = Figure(figsize=(13, 7), dpi=100, layout="constrained")
    early, norm, alpha, wake, spread, chance = figure.subplots(2, 3).flat
    looks = np.array([row["early"] for row in rows])                         # (runs, looks, 2)
    mean = looks[:, :, 1].mean(0)
    draw_runs(early, rows, lambda row: (looks[0, :, 0], np.array(row["early"])[:, 1] - mean),
              "nGPT: held-out loss less the runs' mean")
    draw_runs(norm, rows, on_the_way("norm"), "gradient's norm, medians")
    draw_runs(alpha, rows, on_the_way("1.alpha_m"), "mean alpha of the middle block's MLP")
    for variant in ("built-in", "warm-up 10%"):
        runs = found["ngpt", variant]
        alphas = [row["path"]["1.alpha_m"][500 // EVERY - 1] for row in runs]
        wake.plot(alphas, column(runs, "loss"), "o", label=variant)
    wake.legend()
    wake.set(title="that alpha at step 500, and the last loss", xlabel="alpha", ylabel="nats/byte")
    draw_spread(spread, found)
    generator = np.random.default_rng(0)
    seeds = range(1, 17)
    a, b = two()
    for true in (0.005, 0.01, 0.02):
        chance.plot(seeds, [wrong(a, b, n, true, generator) for n in seeds], label=f"{true} nats apart")
    chance.legend()
    chance.set(title="chance of a wrong winner", xlabel="seeds of each", ylim=0)
    figure.savefig(ROOT / "assets/seeds.png")

if __name__ == "__main__":
    {"table": table, "trial": trial, "draw": draw}[sys.argv[1]]()
