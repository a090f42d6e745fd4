"""
Analyze the runs of lessons/studies/seeds.py, and how many seeds a comparison takes.

    python lessons/studies/how_sure.py table    # prints where the spread of seeds comes from
    python lessons/studies/how_sure.py trial    # prints how often a comparison of seeds is wrong
    python lessons/studies/how_sure.py draw     # draws assets/seeds.png

Losses are those of all validation tokens, with two exceptions: those of averaged weights are over
the first 262,144 tokens, and those during a run over the first 65,536.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
# Import bench before torch: bench imports train.py, which sets how torch's threads wait.
from bench import label, print_table
import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from scipy.stats import t as student

from lessons.studies.seeds import EVERY, ROOT, USUAL, read
from prepare import check


def groups():
    """Return {(arch, variant): its runs}."""
    found = {}
    for row in read():
        found.setdefault((row["arch"], row["variant"]), []).append(row)
    return found


def show(lines):
    """Print a table. The first of the lines names the columns."""
    names, *rows = lines
    print_table([dict(zip(names, row)) for row in rows])


def column(rows, name="loss_all"):
    """Return one value of every run."""
    return np.array([row[name] for row in rows])


# ---- Weights or order ----------------------------------------------------------------------------

def grid(rows):
    """Return the losses (weights, order) of the largest complete square of seeds."""
    losses = {(row["weights"], row["order"]): row["loss_all"] for row in rows}
    n = 0
    while all((w, o) in losses for w in range(1, n + 2) for o in range(1, n + 2)):
        n += 1
    return np.array([[losses[w, o] for o in range(1, n + 1)] for w in range(1, n + 1)])


def squares(table):
    """Return three mean squares: of weights (rows), of order (columns), and of the rest."""
    n = len(table)
    rows = table.mean(1) - table.mean()
    columns = table.mean(0) - table.mean()
    rest = table - table.mean() - rows[:, None] - columns
    return np.array([n * (rows ** 2).sum() / (n - 1), n * (columns ** 2).sum() / (n - 1),
                     (rest ** 2).sum() / (n - 1) ** 2])


def variances(table, draws=10_000):
    """Do a two-way analysis of variance with one run per cell.

    Return the estimated variances of weights, of order, and of the rest; then p for weights and for
    order, which is the share of shuffled tables whose mean square is as large compared with the
    rest.
    """
    found = squares(table)
    # A factor's mean square is expected to be that of the rest plus len(table) times its variance.
    parts = (found[:2] - found[2]).clip(min=0) / len(table)
    generator = np.random.default_rng(0)
    larger = np.zeros(2)
    for _ in range(draws):
        other = squares(generator.permutation(table.flatten()).reshape(table.shape))
        larger += other[:2] / other[2] >= found[:2] / found[2]
    return [*parts, found[2]], larger / draws


# ---- When and where ------------------------------------------------------------------------------

def rest_of(rows):
    """Return the losses of the validation tokens after the first 262,144."""
    total = column(rows, "tokens_all")
    return (column(rows) * total - column(rows, "loss") * USUAL) / (total - USUAL)


def confirmed(rows):
    """Return by how much the loss of the other validation tokens grows with `loss`.

    This is the slope of a straight line through the runs. It is 1 if the differences between runs
    on the first tokens recur in full on the others, and 0 if they do not recur.
    """
    both = np.cov(column(rows, "loss"), rest_of(rows))
    return both[0, 1] / both[0, 0]


def fate(rows):
    """Return steps, and the correlation of the validation loss at each step with the last one."""
    early = np.array([row["early"] for row in rows])           # (runs, steps, 2)
    last = column(rows)
    return early[0, :, 0], [np.corrcoef(losses, last)[0, 1] for losses in early[:, :, 1].T]


def of_files(rows):
    """Return each file's share of the tokens and of the variance of the mean loss."""
    files = np.array([row["files"] for row in rows])           # (runs, files, 2)
    weight = files[0, :, 0] / files[0, :, 0].sum()
    mean = files[:, :, 1] @ weight
    covariance = [np.cov(losses, mean)[0, 1] for losses in files[:, :, 1].T]
    return weight, weight * covariance / mean.var(ddof=1)


def overview(found):
    """Print the spread of all groups of runs."""
    lines = [["arch", "variant", "runs", "mean", "median", "sd", "lowest", "highest",
              "mean of the first tokens", "averaged weights", "their sd"]]
    for (arch, variant), rows in found.items():
        loss = column(rows)
        averaged = column(rows, "loss_averaged")
        spread = averaged_spread = None                  # one run has no spread
        if len(rows) > 1:
            spread = loss.std(ddof=1)
            averaged_spread = averaged.std(ddof=1)
        numbers = [loss.mean(), np.median(loss), spread, loss.min(), loss.max(),
                   column(rows, "loss").mean(), averaged.mean(), averaged_spread]
        words = ["-" if x is None else f"{x:.4f}" for x in numbers]
        lines.append([label(arch), variant, str(len(rows)), *words])
    show(lines)


def paired(found):
    """Print how much the loss of each variant differs from that of the built-in recipe.

    The two runs of a pair have the same length, size and seeds. The intervals are 95% t intervals
    over pairs.
    """
    lines = [["arch", "variant minus built-in", "pairs", "mean", "95%", "sd of the differences"]]
    for (arch, variant), rows in found.items():
        recipe = "built-in"
        for other in ("5 tokens", "0.64M"):
            if variant.startswith(other):
                recipe = other
        base = {(row["weights"], row["order"]): row["loss_all"]
                for row in found.get((arch, recipe), [])}
        differences = [row["loss_all"] - base[row["weights"], row["order"]] for row in rows
                       if (row["weights"], row["order"]) in base]
        n = len(differences)
        if variant != recipe and n:
            sd = np.std(differences, ddof=1) if n > 1 else np.nan
            mean = np.mean(differences)
            half = sd * student.ppf(0.975, n - 1) / n ** 0.5 if n > 1 else np.nan
            lines.append([label(arch), variant, str(n), f"{mean:.4f}",
                          f"{mean - half:.4f} to {mean + half:.4f}", f"{sd:.4f}"])
    show(lines)


def table():
    """Print everything about the spread of seeds."""
    found = groups()
    overview(found)
    print()
    paired(found)
    for (arch, variant), rows in found.items():
        losses = grid(rows)
        if len(losses) > 1:
            (weights, order, rest), p = variances(losses)
            total = weights + order + rest
            print(f"\n{label(arch)}, {variant}, {len(losses)} x {len(losses)}: "
                  f"weights {weights / total:.0%} (p {p[0]:.2f}), "
                  f"order {order / total:.0%} (p {p[1]:.2f}), "
                  f"neither alone {rest / total:.0%}")
            print(losses.round(4))
        if variant == "built-in" and len(rows) > 4:
            details(f"{label(arch)}, {variant}", rows)


def details(name, rows):
    """Print when it shows how a run will end, and which files its loss depends on."""
    print(f"\n{name}: correlation with the last loss")
    steps, r = fate(rows)
    print("  of losses during the run:",
          ", ".join(f"{step:.0f}: {x:.2f}" for step, x in zip(steps, r)))
    last = column(rows)
    for kind in ("s_qk", "alpha_a", "alpha_m"):
        for layer in range(3):
            values = np.array([row.get("path", {}).get(f"{layer}.{kind}", [0])
                               for row in rows])               # (runs, looks)
            if values.any():
                steps = 100, 200, 500, 1000, 2200
                looks = {step: np.corrcoef(values[:, step // EVERY - 1], last)[0, 1]
                         for step in steps}
                print(f"  of {kind} in block {layer}:",
                      ", ".join(f"{step}: {x:.2f}" for step, x in looks.items()))
    print("  a difference of 1 on the first 262,144 validation tokens goes with one of "
          f"{confirmed(rows):.2f} on the others")
    weight, share = of_files(rows)
    largest = share.argsort()[::-1][:4]
    print(f"  {(share > 0).sum()} of {len(share)} files vary with the mean; "
          "largest shares of the variance (of the tokens):",
          ", ".join(f"file {i} {share[i]:.0%} ({weight[i]:.0%})" for i in largest))


# ---- How sure ------------------------------------------------------------------------------------

def halves(a, b):
    """Return half the width of Welch's 95% t intervals for the difference of two means.

    a and b are samples (trials, seeds).
    """
    n = a.shape[1]
    of_a = a.var(1, ddof=1) / n
    of_b = b.var(1, ddof=1) / n
    # The spread is 0 where one run was drawn n times.
    freedom = (of_a + of_b) ** 2 * (n - 1) / (of_a ** 2 + of_b ** 2).clip(min=1e-30)
    return np.sqrt(of_a + of_b) * student.ppf(0.975, freedom)


def coverage(a, b, truth, kind, generator, draws=400):
    """Return how often an interval contains the true difference of means.

    The kind of the interval is "t" or "bootstrap".
    """
    difference = a.mean(1) - b.mean(1)
    if kind == "t":
        return (abs(difference - truth) <= halves(a, b)).mean()
    n = a.shape[1]
    again = []
    for _ in range(draws):
        picked = [np.take_along_axis(x, generator.integers(n, size=x.shape), axis=1)
                  for x in (a, b)]
        again.append(picked[0].mean(1) - picked[1].mean(1))
    low, high = np.quantile(again, (0.025, 0.975), axis=0)
    return ((low <= truth) & (truth <= high)).mean()


def drawn(values, trials, n, generator, normal):
    """Draw samples (trials, n) from the values, or from a normal distribution like theirs."""
    if normal:
        return generator.normal(values.mean(), values.std(ddof=1), (trials, n))
    return generator.choice(values, (trials, n))


def wrong(a, b, seeds, true, generator, trials=20_000):
    """Return the chance that a comparison of so many seeds names the wrong winner.

    The true mean of a is lower than that of b by `true`.
    """
    a = generator.choice(a - a.mean(), (trials, seeds)).mean(1)
    b = generator.choice(b - b.mean(), (trials, seeds)).mean(1)
    return (a > b + true).mean()


def two(archs=("ngpt", "angpt")):
    """Return the losses of two archs with the built-in recipe."""
    found = [column(groups().get((arch, "built-in"), [])) for arch in archs]
    for arch, losses in zip(archs, found):
        check(len(losses) > 2, f"{arch}: {len(losses)} runs of the built-in recipe have ended, "
              "expected three or more")
    return found


def trial(trials=4000):
    """Print how often intervals contain the truth, and how often a comparison is wrong.

    Seeds of two archs are drawn again and again from the stored runs, or from a normal distribution
    like theirs.
    """
    generator = np.random.default_rng(0)
    a, b = two()
    lines = [["seeds", "drawn from", "t contains the truth", "bootstrap contains it"]]
    for n in (3, 4, 8):
        for normal in (False, True):
            samples = [drawn(x, trials, n, generator, normal) for x in (a, b)]
            shares = [coverage(*samples, a.mean() - b.mean(), kind, generator)
                      for kind in ("t", "bootstrap")]
            lines.append([str(n), "normal" if normal else "stored runs",
                          *(f"{x:.3f}" for x in shares)])
    show(lines)
    lines = [["true difference", *(f"{n} seeds" for n in (1, 2, 3, 4, 8, 16))]]
    for true in (0.005, 0.01, 0.02):
        lines.append([str(true), *(f"{wrong(a, b, n, true, generator):.2f}"
                                   for n in (1, 2, 3, 4, 8, 16))])
    show(lines)


def draw_runs(axes, rows, of_row, title):
    """Draw each of nGPT's runs along the steps.

    The run with the lowest loss at the end is blue, the one with the highest is red.
    """
    order = column(rows).argsort().argsort() / (len(rows) - 1)
    for row, place in zip(rows, order):
        axes.plot(*of_row(row), color=colormaps["coolwarm"](place), lw=1)
    axes.set(title=title, xlabel="step")


def trajectory(name):
    """Return a function: a row -> the steps and one quantity of its trajectory."""
    return lambda row: (row["path"]["step"], row["path"][name])


# How the picture calls the variants of seeds.py.
SHOWN_AS = {
    "half rate": "half the learning rate",
    "clip 0.3": "clipped at 0.3",
    "no clip": "not clipped",
    "s_z slower": "s_z stored at 1",
    "s_qk slower": "s_qk stored at 1",
    "alpha 0.2/layers": "alpha from 0.2 / layers",
}


def draw_spread(axes, found):
    """Draw each run's last loss: archs at their best learning rates, and nGPT's variants."""
    shown = [key for key, rows in found.items()
             if len(rows) > 7 and not key[1].startswith("5 tokens")]
    shown.sort(key=lambda key: column(found[key]).mean())
    for place, key in enumerate(shown):
        losses = column(found[key])
        axes.plot(losses, [place] * len(losses), "o", alpha=0.5, ms=5)
        axes.plot(losses.mean(), place, "k|", ms=16)
    names = []
    for arch, variant in shown:
        name = label(arch)
        if variant != "built-in":
            name += ", " + SHOWN_AS.get(variant, variant).replace("warm-up", "warmup")
        names.append(name)
    axes.set_yticks(range(len(shown)), names)
    axes.set(title="last loss of each run, and the means", xlabel="nats per byte")
    axes.invert_yaxis()


def draw():
    """Draw how nGPT's runs part, what correlates with that, and the chance of a wrong winner."""
    found = groups()
    rows = found["ngpt", "built-in"]
    figure = Figure(figsize=(13, 7), dpi=100, layout="constrained")
    early, norm, alpha, alpha_and_loss, spread, chance = figure.subplots(2, 3).flat
    looks = np.array([row["early"] for row in rows])                         # (runs, steps, 2)
    mean = looks[:, :, 1].mean(0)
    draw_runs(early, rows, lambda row: (looks[0, :, 0], np.array(row["early"])[:, 1] - mean),
              "nGPT: validation loss minus the runs' mean")
    draw_runs(norm, rows, trajectory("norm"), "nGPT: gradient norm, medians")
    draw_runs(alpha, rows, trajectory("1.alpha_m"), "nGPT: mean alpha, middle block's MLP")
    for variant, name in (("built-in", "as searched"), ("warm-up 10%", "10% warmup")):
        runs = found["ngpt", variant]
        alphas = [row["path"]["1.alpha_m"][500 // EVERY - 1] for row in runs]
        alpha_and_loss.plot(alphas, column(runs), "o", label=name)
    alpha_and_loss.legend()
    alpha_and_loss.set(title="nGPT: last loss, and alpha at step 500",
             xlabel="mean alpha, middle block's MLP", ylabel="nats per byte")
    draw_spread(spread, found)
    generator = np.random.default_rng(0)
    seeds = range(1, 17)
    a, b = two()
    for true in (0.005, 0.01, 0.02):
        chance.plot(seeds, [wrong(a, b, n, true, generator) for n in seeds],
                    label=f"{true} nats apart")
    chance.legend()
    chance.set(title="chance of a wrong winner", xlabel="seeds of each arch",
               ylim=0, xticks=range(2, 17, 2))
    figure.savefig(ROOT / "assets/seeds.png")


if __name__ == "__main__":
    commands = {"table": table, "trial": trial, "draw": draw}
    if sys.argv[1:] and sys.argv[1] in commands:
        commands[sys.argv[1]]()
    else:
        print(__doc__)
