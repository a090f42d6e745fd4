"""
Find out which arch learns most from its tokens, each at its own best learning rate and embed_std.

    python lessons/studies/race.py --n_layer=3 --n_embd=64 --block_size=128    # takes hours
    python lessons/studies/race.py --report=true --seeds=8 --results=assets/race_small_all.json

A race makes complete runs, since a run that is stopped halfway is no shorter run: its learning rate
has not come down. --tokens_per_parameter says how long they are. At each length the race first
searches each arch's best point with one seed. It starts at the recipe's learning rate and embed_std
or, if that is better, at the best point of the previous length. It tries half and twice that
learning rate, for pre-norm archs a third and three times the embed_std too, moves to the best of
these, and repeats that until no neighbor is better. Then it runs all seeds at the best point.
--vocab_size defaults to the dataset's.

Every run that ends is added to the JSON file --results, and the same command resumes the race. (It
warns if the code of a block's classes has changed since, but does not notice changes of functions,
constants or train.py. After such a change, give another --results.) The loss of a run is that of
all validation tokens, or of --eval_tokens that are evenly spread over them. Races of earlier
versions were validated on the first 262,144 validation tokens, which are easier than the rest. Such
files can be read and reported, but no run is added to them.

The report compares archs at their best points. An arch's speed-up is how many times fewer tokens it
needs than the first of --archs: the tokens of the longest runs over the tokens with which the arch
reaches the loss that the baseline has there. Below 1 the arch needs more tokens.
"""
import hashlib
import json
import math
import multiprocessing
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Thread

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
# bench and train are imported before torch: train sets how torch's threads wait.
from bench import (COLORS, EVERY_ARCH, NOT_HERE, count_parameters, label, parse, print_table,
                   train_config)
from train import (Diverged, TrainConfig, block_code, open_dataset, resolve, set_up_process,
                   train)
import numpy as np
import pandas as pd
import torch
from filelock import FileLock
from matplotlib.figure import Figure
from scipy.stats import ttest_ind

from model import ARCHS, GPT
from prepare import atomic_write, check, check_at_least, explain_errors, run_script


# ---- Options -------------------------------------------------------------------------------------

@dataclass
class RaceOptions:
    # Race
    archs: str = EVERY_ARCH  # archs to compare, baseline first; ARCH+qk_norm adds QK norm
    out_dir: str = "out/bench"            # folder for the picture
    results: str = "out/bench/race.json"  # all runs that have ended; new ones are added
    report: bool = False                  # only report the runs that have ended
    tokens_per_parameter: str = "1,5,20"  # lengths of the runs, by the first arch's parameters
    sweep: bool = True                    # search learning rate and embed_std; false: the recipe's
    seed: int = 1                         # the first seed, with which the search is made
    seeds: int = 3                        # runs at the best point
    eval_tokens: int | None = None        # validation tokens of each run (all)
    workers: int | None = None            # archs trained at a time (one per CPU core; on a GPU one)


# Options of train.py that differ between the runs of a race, or that decide no loss
VARIES = NOT_HERE | {"learning_rate", "embed_std", "seed", "checkpoint_blocks", "size", "data",
                     "out_dir", "device", "log_interval", "eval_tokens"}
# Options that each arch's recipe sets, unless they are set on the command line
BY_RECIPE = {"weight_decay", "warmup_ratio", "pn_warmup"}


def read_ratios(text):
    """Return the numbers of --tokens_per_parameter, the smallest first."""
    with explain_errors(f"tokens_per_parameter={text}: expected numbers like 1,5,20"):
        return sorted(map(float, text.split(",")))


def steps_of(ratio, parameters, total_batch_size):
    """Return the optimizer steps of a run with so many tokens per parameter."""
    return max(1, round(ratio * parameters / total_batch_size))


# ---- Results -------------------------------------------------------------------------------------

def validation_of(common):
    """Return in words on which tokens the runs of a results file were validated."""
    earlier = f"the first {common.get('eval_tokens', 0):,} tokens"
    return common.get("validation", earlier)


def common_options(config, dataset, process, validation):
    """Return what all runs of a race share and what decides their losses."""
    varies = VARIES | (BY_RECIPE - config.options.keys())
    common = {name: value for name, value in asdict(config).items() if name not in varies}
    common["dtype"] = str(process.dtype).removeprefix("torch.")
    return common | {"train_tokens": dataset.train_tokens, "val_tokens": dataset.val_tokens,
                     "fingerprint": dataset.fingerprint, "validation": validation}


def read_race(path):
    """Return {"torch": version, "common": options of all runs, "runs": rows}. Raises DataError."""
    with explain_errors(f"{path}: expected a race's JSON"):
        saved = json.loads(Path(path).read_text())
        return {"torch": saved["torch"], "common": saved["common"], "runs": saved["runs"]}


def write_race(path, saved):
    """Write a results file with one run per line."""
    with atomic_write(path) as file:
        # The row of a run begins with its arch. A line break goes in front of each.
        file.write(json.dumps(saved).replace(' {"arch"', '\n{"arch"').encode())


def code_of(config):
    """Return a hash of the source of an arch's block, which changes if the block's classes do."""
    with torch.device("meta"):
        code = block_code(GPT(config))
    return hashlib.sha256(str(code).encode()).hexdigest()[:16]


def warn_of_other_code(path, name, code):
    """Say if the results have runs of an arch from before its block's code was changed."""
    # Rows of earlier versions have no code.
    codes = {row.get("code", code) for row in read_race(path)["runs"] if row["arch"] == name}
    if codes - {code}:
        print(f"The code of {name}'s block has changed since some of its runs in {path} were made. "
              "They are not made again: undo the change, or give another --results.",
              file=sys.stderr)


def open_results(path, common):
    """Make the results file if it is missing. Raises DataError if its runs do not compare."""
    if not Path(path).exists():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_race(path, {"torch": torch.__version__, "common": common, "runs": []})
    saved = read_race(path)["common"]
    check(validation_of(saved) == common["validation"],
          f"results={path}: validated on {validation_of(saved)}, new runs would be on "
          f"{common['validation']}; give another --results, or --report=true to see what it has")
    others = [name for name in saved | common if saved.get(name) != common.get(name)]
    check(not others,
          f"results={path}: made with other {', '.join(others)}; give another --results")


# ---- Runs ----------------------------------------------------------------------------------------

def train_once(options):
    """Train with these options; return (validation loss, seconds), twice None if it diverged."""
    last_step = options["max_steps"]
    with tempfile.TemporaryDirectory() as folder:
        rest = dict(eval_interval=last_step, checkpoint_interval=last_step,
                    out_dir=f"{folder}/run")
        try:
            record = train(TrainConfig(**options | rest), say=None)[-1]
        except Diverged:
            return None, None
    return record["val_loss"], round(record["seconds"], 1)


def loss_of(run, config, path):
    """Return the loss of a run, inf if it diverged. Train it unless the results have its row."""
    for row in read_race(path)["runs"]:
        # A row has all that identifies its run, and more.
        if run.items() <= row.items():
            return math.inf if row["loss"] is None else row["loss"]

    loss, seconds = train_once(config.options)
    config = resolve(config)
    row = {**run, "parameters": count_parameters(config), "code": code_of(config), "loss": loss,
           "seconds": seconds}
    print(row, flush=True)
    # Other processes add their runs to the same file.
    with FileLock(Path(path).with_name(f".{Path(path).name}.lock")):
        saved = read_race(path)
        saved["runs"].append(row)
        write_race(path, saved)
    return loss_of(run, config, path)


def climb(loss_at, starts, directions):
    """Walk on a grid from the best of `starts` to the best neighbor until none is better.

    loss_at takes a point (i, j) of the grid; directions are the steps to its neighbors.
    """
    center, best = None, min(starts, key=loss_at)
    while best != center:
        center = best
        neighbors = [(center[0] + i, center[1] + j) for i, j in directions]
        best = min([center, *neighbors], key=loss_at)
    return best


def make_runs(lengths, options, training, name):
    """Make the runs of one arch: at each length a search, then all seeds at the best point."""
    if multiprocessing.parent_process():
        Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    recipe = train_config(name, training)
    directions = [(-1, 0), (1, 0)]
    if not ARCHS[recipe.arch].sphere:
        directions += [(0, -1), (0, 1)]

    best = 0, 0                  # the recipe's own learning rate and embed_std
    for steps in lengths:
        def loss_at(point, seed=options.seed):
            rate = recipe.learning_rate * 2.0 ** point[0]
            std = recipe.embed_std * 3.0 ** point[1]
            # Round them, but not what the command line sets.
            if point[0] != 0 or "learning_rate" not in training:
                rate = float(f"{rate:.3g}")
            if point[1] != 0 or "embed_std" not in training:
                std = float(f"{std:.1g}")
            changes = dict(learning_rate=rate, embed_std=std, seed=seed)
            config = train_config(name, training, max_steps=steps, **changes)
            return loss_of(dict(arch=name, steps=steps, **changes), config, options.results)

        if options.sweep:
            # The best point of shorter runs can mislead, so the recipe's is tried again, too.
            best = climb(loss_at, [best, (0, 0)], directions)
        for seed in range(options.seed, options.seed + options.seeds):
            loss_at(best, seed)


def in_a_process(*arguments):
    """Call make_runs in a new process; return whether it ended well."""
    process = multiprocessing.get_context("spawn").Process(target=make_runs, args=arguments)
    process.start()
    process.join()
    return process.exitcode == 0


def end_with_parent():
    """Wait until the process that started this one has ended, however it did; then end, too."""
    multiprocessing.parent_process().join()
    os._exit(1)


def race(options, training):
    """Make all runs that have no row in the results yet."""
    ratios = read_ratios(options.tokens_per_parameter)
    names = options.archs.split(",")
    first = train_config(names[0], training)
    process = set_up_process(first)
    dataset = open_dataset(first, process)
    eval_tokens = options.eval_tokens or dataset.val_tokens
    validation = "all tokens"
    if eval_tokens < dataset.val_tokens:
        validation = f"{eval_tokens:,} tokens, evenly spread"
    training = {"vocab_size": dataset.vocab_size, **training, "final_eval_tokens": eval_tokens}

    # Use each arch before the next is loaded, whose file may have an arch of the same name. This
    # also tells a wrong name before hours of training.
    first = resolve(train_config(names[0], training))
    parameters = count_parameters(first)
    codes = {name: code_of(resolve(train_config(name, training))) for name in names}
    open_results(options.results, common_options(first, dataset, process, validation))
    for name, code in codes.items():
        warn_of_other_code(options.results, name, code)
    lengths = [steps_of(ratio, parameters, first.total_batch_size) for ratio in ratios]
    workers = options.workers or (os.cpu_count() if process.device.type == "cpu" else 1)
    with ThreadPool(workers) as threads:
        make_runs_of = partial(in_a_process, lengths, options, training)
        ended_well = threads.map(make_runs_of, names, chunksize=1)
    check(all(ended_well),
          f"a process has failed; the same command resumes the race from {options.results}")


# ---- Comparing losses ----------------------------------------------------------------------------

def at_best(rows, arch, steps, seeds):
    """Return the losses of all seeds at the point where the first seed's loss is lowest.

    The loss of a run that diverged is inf. Points at which one of the seeds has no run do not
    count. The result is a pandas Series; its name is the point, (learning_rate, embed_std).
    """
    runs = pd.DataFrame(rows).astype({"loss": float}).fillna({"loss": math.inf})
    runs = runs[(runs["arch"] == arch) & (runs["steps"] == steps)]
    points = runs.pivot_table(index=["learning_rate", "embed_std"], columns="seed", values="loss")
    points = points.reindex(columns=list(seeds)).dropna()
    check(len(points), f"{arch}: no runs of {steps} steps with seeds {', '.join(map(str, seeds))}")
    return points.loc[points.iloc[:, 0].idxmin()]


def fewer_tokens(tokens, baseline, losses):
    """Return how many times fewer tokens an arch needs than the baseline for the same loss.

    baseline, losses: (lengths, seeds). The loss in question is the baseline's mean at the longest
    length. Between lengths the arch's mean loss is taken for straight lines against log tokens, and
    the first line that falls through the loss in question counts. If that loss lies below all of
    the arch's, the last line is extended, and if it lies above all of them, the first. Return 0 if
    this line does not fall, and nan for a single length or a baseline that diverged.
    """
    target = baseline[-1].mean()
    last = len(tokens) - 1
    if last == 0 or not math.isfinite(target):
        return math.nan
    mean = losses.mean(1)
    crossed = [i for i in range(last) if mean[i] >= target >= mean[i + 1]]
    if crossed:
        i = crossed[0]
    elif target > max(mean):
        i = 0
    else:
        i = last - 1
    if not np.isfinite(mean).all() or mean[i] <= mean[i + 1]:
        return 0.0
    share = (mean[i] - target) / (mean[i] - mean[i + 1])
    needed = tokens[i] * (tokens[i + 1] / tokens[i]) ** share
    return tokens[last] / needed


def interval_of_factor(tokens, baseline, losses):
    """Return fewer_tokens at the ends of Welch's 95% t interval of the longest runs' difference."""
    difference = losses[-1].mean() - baseline[-1].mean()
    ends = ttest_ind(losses[-1], baseline[-1], equal_var=False).confidence_interval()
    # Shift the baseline so that the longest runs differ by `end`.
    return sorted(fewer_tokens(tokens, baseline + difference - end, losses) for end in ends)


# ---- Report --------------------------------------------------------------------------------------

def report(options):
    """Print and draw what the results have: losses at the best points, then speed-ups."""
    saved = read_race(options.results)
    rows = saved["runs"]
    batch = saved["common"]["total_batch_size"]
    names = options.archs.split(",")
    parameters = [row["parameters"] for row in rows if row["arch"] == names[0]]
    check(parameters, f"results={options.results}: no runs of {names[0]}")
    ratios = read_ratios(options.tokens_per_parameter)
    lengths = [steps_of(ratio, parameters[0], batch) for ratio in ratios]
    seeds = range(options.seed, options.seed + options.seeds)

    losses = {}                  # name -> (lengths, seeds)
    table = []
    for name in names:
        best = [at_best(rows, name, steps, seeds) for steps in lengths]
        losses[name] = np.array(best)
        for ratio, steps, row in zip(ratios, lengths, best):
            learning_rate, embed_std = row.name
            table.append({"arch": label(name), "tokens per parameter": f"{ratio:g}",
                          "tokens": f"{steps * batch:,}", "learning rate": f"{learning_rate:g}",
                          "embed_std": f"{embed_std:g}", "val loss": f"{row.mean():.4f}",
                          "lowest": f"{row.min():.4f}", "highest": f"{row.max():.4f}"})
    print(f"Validation loss (nats per token) over {validation_of(saved['common'])}: mean, lowest "
          f"and highest of seeds {seeds[0]} to {seeds[-1]} at the best point\n")
    print_table(table)

    tokens = batch * np.array(lengths)
    table = []
    for name in names:
        arguments = tokens, losses[names[0]], losses[name]
        row = {"arch": label(name), "speed-up": fewer_tokens(*arguments)}
        if len(seeds) > 1 and name != names[0]:
            row["95% from"], row["to"] = interval_of_factor(*arguments)
        table.append(row)
    print(f"\nSpeed-up: how many times fewer tokens than {label(names[0])} an arch needs for the "
          f"loss that {label(names[0])}\nhas at {ratios[-1]:g} tokens per parameter (below 1: more "
          "tokens), with a 95% t interval\n")
    print_table(table)
    draw_race(ratios, losses, Path(options.out_dir, "race.png"))


def draw_race(ratios, losses, path):
    """Draw losses (lengths, seeds) minus the first arch's mean, with the range over seeds."""
    first = next(iter(losses))
    baseline = losses[first].mean(1, keepdims=True)
    axes = Figure(figsize=(9, 4), dpi=200, layout="constrained").subplots()
    for i, (name, values) in enumerate(losses.items()):
        over = np.where(np.isinf(values), math.nan, values) - baseline
        mean = over.mean(1)
        bars = mean - over.min(1), over.max(1) - mean
        x = np.array(ratios) * 1.03 ** i         # side by side, so that bars do not hide each other
        axes.errorbar(x, mean, bars, color=COLORS.get(name, f"C{i}"), fmt="o-", ms=3,
                      label=label(name))
    axes.set(xscale="log", xlabel="tokens per parameter (archs side by side)",
             ylabel=f"loss minus {label(first)}'s (nats per token)\nbars: range over seeds")
    axes.set_xticks(ratios, map("{:g}".format, ratios))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    axes.figure.savefig(path)


def main(argv):
    options, training = parse(argv, __doc__, RaceOptions)
    check_at_least(1, options, "seeds", "workers", "eval_tokens")
    Path(options.out_dir).mkdir(parents=True, exist_ok=True)
    if not options.report:
        race(options, training)
    report(options)


if __name__ == "__main__":
    run_script(main)
