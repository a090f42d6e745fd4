"""
Fit the law loss = a N^-b + c for N parameters to races at several sizes.

    python lessons/studies/law.py                 # the races in assets/
    python lessons/studies/law.py out/a.json out/b.json out/c.json out/d.json

All runs have the same number of tokens per parameter. The brackets are a bootstrap over seeds, 2.5%
to 97.5%. With two seeds per size such an interval contains the truth about three times in four. It
does not include errors in the form of the law. How large these may be is shown by the same law
without the smallest size (dashed in out/bench/law.png).
"""
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench import COLORS, label, print_table
from lessons.studies.race import at_best, read_race, validation_of
import numpy as np
from matplotlib.figure import Figure

from prepare import check, parse_options, run_script

EXPONENTS = np.geomspace(0.02, 2, 1000)
AT = 100_000_000                         # parameters for which the law predicts the loss
# The small race has models of 0.23 million parameters.
RACES = [ROOT / f"assets/race_{size}.json" for size in ("0.05m", "0.1m", "small", "0.6m", "1.1m")]


@dataclass
class LawConfig:
    # Law
    tokens_per_parameter: float = 20.0   # which runs of the races to take
    out_dir: str = "out/bench"           # folder for the picture


def fit_law(sizes, losses):
    """Return (a, b, c), c >= 0, of the law a (N / first N)^-b + c that is nearest to the losses.

    For each exponent b, a and c are those of the best straight line, or of the best line through 0
    if c were negative.
    """
    x = (sizes / sizes[0]) ** -EXPONENTS[:, None]                 # (exponents, sizes)
    dx = x - x.mean(1, keepdims=True)
    a = (dx * (losses - np.mean(losses))).sum(1) / (dx ** 2).sum(1)
    c = np.mean(losses) - a * x.mean(1)
    a = np.where(c < 0, (x * losses).sum(1) / (x ** 2).sum(1), a)
    c = np.maximum(c, 0)
    error = ((a[:, None] * x + c[:, None] - losses) ** 2).sum(1)
    best = error.argmin()
    return a[best], EXPONENTS[best], c[best]


def read_sizes(paths, ratio):
    """Return {arch: {parameters: losses of the seeds at the best point}}.

    Only runs with `ratio` tokens per parameter count. Raises DataError if the races were not
    validated on the same tokens.
    """
    sizes = {}
    texts = {}  # path -> what its runs were validated on
    for path in paths:
        race = read_race(path)
        common = race["common"]
        texts[path] = (f"{validation_of(common)} of {common['val_tokens']:,} validation tokens, "
                       f"vocabulary of {common['vocab_size']}")
        first = texts[paths[0]]
        check(texts[path] == first, f"{path}: {texts[path]}, but {paths[0]}: {first}; "
              "such losses do not compare")
        near = {}  # arch -> rows of about this length
        for row in race["runs"]:
            tokens = row["steps"] * common["total_batch_size"]
            # Archs differ in a few parameters, but a race gives all of them the same tokens.
            if abs(tokens / row["parameters"] / ratio - 1) < 0.05:
                near.setdefault(row["arch"], []).append(row)
        for arch, rows in near.items():
            seeds = sorted({row["seed"] for row in rows})
            best = at_best(rows, arch, rows[0]["steps"], seeds)
            sizes.setdefault(arch, {})[rows[0]["parameters"]] = best.tolist()
    return sizes


def fits_of(sizes, losses_by_size, draws=1000):
    """Return a, b and c, each (draws + 1, 1).

    The first fit is to the means over seeds, the others to means over seeds that are drawn with
    replacement.
    """
    generator = np.random.default_rng(0)
    fits = [fit_law(sizes, [np.mean(losses) for losses in losses_by_size])]
    for _ in range(draws):
        means = [generator.choice(losses, len(losses)).mean() for losses in losses_by_size]
        fits.append(fit_law(sizes, means))
    return np.array(fits).T[:, :, None]


def with_interval(values):
    """Return the first value as text, with the range of the middle 95% of the others."""
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return f"{values[0]:.3f} ({low:.3f}-{high:.3f})"


def draw_law(axes, name, sizes, losses_by_size):
    """Draw an arch's losses and laws; return its row of the table."""
    a, b, c = fits_of(sizes, losses_by_size)
    x = np.geomspace(sizes[0], AT, 50)
    lines = a * (x / sizes[0]) ** -b + c                          # (draws + 1, 50)
    means = [np.mean(losses) for losses in losses_by_size]
    a_larger, b_larger, c_larger = fit_law(sizes[1:], means[1:])
    of_larger = a_larger * (x / sizes[1]) ** -b_larger + c_larger
    color = COLORS.get(name)
    axes.plot(sizes, means, "o", color=color)
    axes.plot(x, lines[0], color=color, label=label(name))
    axes.plot(x, of_larger, "--", color=color, lw=1)
    axes.fill_between(x, *np.quantile(lines[1:], (0.025, 0.975), axis=0),
                      color=color, alpha=0.15, lw=0)
    return {"a N^-b + c (2.5%-97.5%)": label(name),
            "b": with_interval(b[:, 0]),
            "c": with_interval(c[:, 0]),
            f"at {AT:,} parameters": with_interval(lines[:, -1]),
            "without the smallest": f"{of_larger[-1]:.3f}"}


def main(argv):
    paths = [word for word in argv if not word.startswith("-")]
    options = LawConfig(
        **parse_options([word for word in argv if word not in paths], __doc__, LawConfig))
    axes = Figure(figsize=(9, 5), dpi=200, layout="constrained").subplots()
    table = []
    for name, found in read_sizes(paths or RACES, options.tokens_per_parameter).items():
        sizes = np.array(sorted(found))
        losses_by_size = [found[size] for size in sizes]
        if (len(sizes) < 4 or min(map(len, losses_by_size)) < 2
                or not np.isfinite(np.concatenate(losses_by_size)).all()):
            print(f"{label(name)}: no law; that takes four sizes with two seeds each, none of "
                  "which diverged")
        else:
            table.append(draw_law(axes, name, sizes, losses_by_size))
    check(table, "no arch has four sizes with two seeds each, none of which diverged; "
          "give the JSON files of more races")
    print_table(table)
    # The legend also says what the dashed lines and the bands are.
    axes.plot([], [], "k--", lw=1, label="without the smallest size")
    axes.fill_between([], [], color="k", alpha=0.15, lw=0, label="95% of the bootstrap over seeds")
    axes.legend()
    axes.set(xscale="log", xlabel="parameters",
             ylabel=f"validation loss at {options.tokens_per_parameter:g} tokens per parameter")
    Path(options.out_dir).mkdir(parents=True, exist_ok=True)
    axes.figure.savefig(f"{options.out_dir}/law.png")


if __name__ == "__main__":
    run_script(main)
