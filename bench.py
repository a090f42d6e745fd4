"""
Measure what normalization costs, and what it gains.

    python bench.py speed                                       # a training step of every arch, at laptop size
    python bench.py speed --size=0.5b --batch_size=8 --archs=rmsnorm+qk_norm,ngpt,angpt       # anGPT's Table 2
    OMP_NUM_THREADS=1 python bench.py sample                    # decoding with the KV cache
    python bench.py race                                        # which arch learns most from its tokens: hours
    python bench.py curves out/angpt out/ngpt --follow          # runs of train.py in one picture, as they go on
    python bench.py hellaswag --out_dir=out/angpt,out/ngpt      # questions about everyday life, for larger models

Results go to out/bench. Ratios are to the first of --archs; GPT+ is rmsnorm+qk_norm. In speed and sample archs take
turns in one process, in a new order every round; ratios are taken within a round, so that what slows a whole round
cancels. Brackets go from the 10th to the 90th percentile of the rounds.

speed   train.py's optimizer_step (forward, backward, clipping, AdamW, project_) on one batch of random tokens, compiled
        unless --compile=false; compiling takes a quarter of a minute an arch. MFU is against this machine's own matrix
        products. Memory, on CUDA alone: weights, AdamW's state, what a step adds.
sample  model.generate, greedy, float32, not compiled; the first token, with the reading of the prompt, is left out.
race    complete runs of train.py, each with a cosine of its own. First a search for every arch's learning rate and, in
        pre-norm families, embed_std, with one seed at the middle length: half, one and two times the recipe's rate, on
        while the best is at an edge; other stds near the best rate; a second seed for all within 0.01 nats of the best.
        Then every length and seed; a seed sets weights and order of the data. Speed-up: tokens of the longest runs over
        those with which an arch reaches the baseline's loss there, with a bootstrap over seeds, 2.5% to 97.5%; of three
        seeds it holds the true factor about three times in four. A race that was stopped goes on when called again.
hellaswag  how often the right one of four endings is the likeliest, by log-likelihood and by that per character. Text
        and tokens as in lm-evaluation-harness 0.4 (task hellaswag 1.0), which gives GPT-2 124M 0.2892 and 0.3114 (not
        run here). Chance: 0.25; +-: a standard error. Rows of --file: ctx_a, ctx_b, activity_label, endings, label.
"""
import functools
import hashlib
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from tqdm import tqdm

from model import ARCHS, GPT, GPTConfig, option
from prepare import blame, check, choose, encode, expect, parse, read_meta, run_script
from train import (Diverged, flops_per_token, load_model, Machine, make_optimizer, optimizer_step, read_log, resolve,
                   TrainConfig)

# Okabe and Ito's colours, which the colour-blind tell apart
COLORS = {"rmsnorm+qk_norm": "#000000", "layernorm": "#E69F00", "rmsnorm": "#56B4E9", "powernorm": "#009E73",
          "normformer": "#CC79A7", "ngpt": "#0072B2", "angpt": "#D55E00"}
STARTS = [0.02, 0.1, 0.3, 1.0]                           # values of embed_std that a race tries
own = functools.partial(option, group="benchmark")

@dataclass
class BenchConfig(TrainConfig):
    """train.py's options, which hold for every arch, and those of all benchmarks."""
    archs: str = own(",".join(COLORS), "what to compare, the baseline first; +name turns on a switch")
    out_dir: str = own("out/bench", "folder for tables and pictures")
    rounds: int = own(20, "of speed and sample, measured after three more")

    def __post_init__(self):
        super().__post_init__()
        numbers = [name for name, value in vars(self).items() if type(value) is int and not hasattr(TrainConfig, name)]
        check(self, " ".join(numbers), lambda x: x >= 1, "at least 1")
        for name in "arch", "resume", "max_steps", "eval_interval":
            check(self, name, lambda x: x == getattr(TrainConfig, name), "no such option in a benchmark")

@dataclass
class SampleConfig(BenchConfig):
    batch_sizes: str = own("1,4,16", "sequences decoded side by side, with commas between")
    new_tokens: int = own(65, "tokens generated after 16 of a prompt; the first is not measured")

@dataclass
class RaceConfig(BenchConfig):
    compile: str = own("false", "true | false: compile the blocks in every run")
    eval_tokens: int = own(65536, "held-out tokens that give a loss")
    tokens: int = own(2 ** 21, "of the longest runs")
    lengths: int = own(3, "how many: all of --tokens, half, a quarter, ...")
    seeds: int = own(3, "runs of each length, from --seed on")
    sweep: bool = own(True, "search for learning rates and embed_stds; false: the recipes'")
    sweep_tokens: int | None = own(None, "of the runs of this search (the middle length)")
    workers: int | None = own(None, "runs at a time, each with its share of the cores (one a core; on a GPU one)")
    runs_dir: str = own("out/race", "folder for the runs")

@dataclass
class CurvesConfig:
    key: str = own("val_loss", "what to draw, as log.jsonl calls it")
    follow: bool = own(False, "draw anew every few seconds, until Ctrl-C")
    out_dir: str = own("out/bench", "folder for the picture")

@dataclass
class HellaswagConfig:
    out_dir: str = own("out/angpt", "runs to score, or gpt2 and its like (lessons/gpt2.py), with commas between")
    file: str | None = own(None, "questions, a .jsonl in HellaSwag's form (its validation set, fetched)")
    batch_size: int = own(4, "questions at a time")
    device: str = own("auto", "auto | cpu | cuda | mps")
    results_dir: str = own("out/bench", "folder for the table")

    def __post_init__(self):
        check(self, "batch_size", lambda x: x >= 1, "at least 1")

def train_configs(config, corpus_vocab=257, **changes):
    """arch -> the TrainConfig that train.py would have with these options. Raises ConfigError."""
    given, found = {f.name: getattr(config, f.name) for f in fields(TrainConfig)} | changes, {}
    for name in changes.get("arch", config.archs).split(","):
        given["arch"], *extras = name.split("+")
        for extra in extras:
            choose(f"archs={name}: switch", extra, [f.name for f in fields(GPTConfig) if f.type is bool])
        found[name] = resolve(TrainConfig(**{**given, **dict.fromkeys(extras, True)}), corpus_vocab)
    return found

def now(device):
    """Milliseconds; a GPU, which runs behind the program, is waited for."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return 1e3 * time.perf_counter()

def training(config, machine):
    """A function that takes a step of training a model and returns what it took."""
    config, device = replace(config, total_batch_size=config.batch_size * config.block_size), machine.device
    torch.manual_seed(config.seed)
    model = GPT(config.model_config()).to(device)
    optimizer, project_, times = make_optimizer(model, config), model.project_, []
    rows = torch.randint(config.vocab_size, (config.batch_size, config.block_size + 1)).to(device)
    pair = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    for block in model.blocks if config.compile != "false" else ():
        block.compile()

    def step():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), now(device)
        optimizer_step(0, model, model, optimizer, [pair], config, machine)
        ms, (before_project_, _, after_project_) = now(device) - start, times[-3:]
        rate = 1e3 * config.total_batch_size / ms
        took = {"ms/step": ms, "project_ ms": after_project_ - before_project_, "tokens/s": rate,
                "MFU": rate * flops_per_token(model) / machine.peak}
        if device.type == "cuda":
            state = (x for values in optimizer.state.values() for x in values.values())
            kept = sum(x.nbytes for x in itertools.chain(model.parameters(), model.buffers(), state))
            took["memory GB"] = (kept + torch.cuda.max_memory_allocated() - before) / 1e9
        return took

    model.project_ = lambda: times.extend((now(device), project_(), now(device)))
    return step

def decoding(model, prompt, new_tokens):
    """The rate of one greedy continuation of `prompt` (B, T), from the first new token to the last."""
    tokens = model.generate(prompt, new_tokens, temperature=0)
    next(tokens)
    start = now(prompt.device)
    for _ in tokens:
        pass
    return {"tokens/s": 1e3 * len(prompt) * (new_tokens - 1) / (now(prompt.device) - start)}

def spread(values, baseline=1.0):
    """Median and 10th and 90th percentile of values or, round by round, of their ratios to a baseline's."""
    p10, median, p90 = np.quantile(np.divide(values, baseline), (0.1, 0.5, 0.9)).tolist()
    return {"median": median, "p10": p10, "p90": p90}

def compare(config, jobs, warmup=3):
    """Runs every job (name -> function) once a round. Of the first number that a job returns: spread, and ratio to the
    first job's; of the others: median. Prints a table of these; returns name -> all."""
    order, found, results, lines = random.Random(config.seed), {name: [] for name in jobs}, {}, []
    for i in tqdm(range(warmup + config.rounds), leave=False, disable=None):
        # Compiling while the clock runs would make a wrong number: after the warm-up it is an error
        with torch.compiler.set_stance("default" if i < warmup else "fail_on_recompile"):
            for name in order.sample(list(jobs), len(jobs)):
                found[name].append(jobs[name]())
    for name, took in found.items():
        values = {key: [one[key] for one in took[warmup:]] for key in took[0]}
        first, *others = values
        baseline = next(iter(results.values()))["values"][first] if results else values[first]
        both = {"spread": spread(values[first]), "ratio": spread(values[first], baseline)}
        results[name] = {"values": values, **both}
        lines.append([name, *("{median:,.3f} ({p10:,.3f}-{p90:,.3f})".format(**x) for x in both.values()),
                      *(f"{np.median(values[key]):,.3f}" for key in others)])
    print_table([["", f"{first} (10%-90%)", "ratio (10%-90%)", *others], *lines])
    return results

def speed(config):
    """A training step of every arch."""
    machine = Machine(config.device, config.dtype)
    torch._dynamo.config.recompile_limit = 64            # archs of one family share their code
    torch._dynamo.config.specialize_float = True         # but not their constants
    results = compare(config, {name: training(c, machine) for name, c in train_configs(config).items()})
    save("speed", config, machine, archs=results)

def sample(config):
    """Decoding with every arch, at every batch size."""
    check(config, "batch_sizes", lambda x: all(n.isdecimal() and int(n) for n in x.split(",")), "numbers from 1")
    configs, machine, results = train_configs(config), Machine(config.device, "float32"), {}
    first = next(iter(configs.values()))
    most = first.block_size - 16                         # beyond it half is read anew
    check(config, "new_tokens", lambda x: 2 <= x <= most, f"2 to block_size - 16 = {most}")
    torch.manual_seed(config.seed)
    models = {name: GPT(c.model_config()).to(machine.device) for name, c in configs.items()}
    for size in config.batch_sizes.split(","):
        prompt = torch.randint(first.vocab_size, (int(size), 16)).to(machine.device)
        print(f"batch size {size}")
        results[size] = compare(config, {name: functools.partial(decoding, model, prompt, config.new_tokens)
                                         for name, model in models.items()})
    save("sample", config, machine, batch_sizes=results)

def print_table(lines):
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]))

def save(name, config, machine, **found):
    """Prints what the numbers depend on; writes name.json, null for inf and nan, and returns what it holds."""
    here = {"device": str(machine.device), "threads": torch.get_num_threads(), "dtype": str(machine.dtype)[6:],
            "matmul_gflops": round(machine.peak / 1e9), "torch": str(torch.__version__)}
    print(", ".join(f"{key} {value}" for key, value in here.items()))
    tree = json.loads(json.dumps({"machine": here, "options": vars(config), **found}), parse_constant=lambda _: None)
    os.makedirs(config.out_dir, exist_ok=True)
    Path(config.out_dir, f"{name}.json").write_text(json.dumps(tree))
    return tree

def search(rate, std, starts, measure):
    """The best (rate, std): rates at the recipe's std first, then the other starts with rates near the best.

    measure(points, turn) gives losses of points (rate, std); turn 1, with another seed, decides between close ones."""
    losses = {}

    def near(middle, starts):
        new = [(x, std) for std in starts for x in (middle / 2, middle, 2 * middle)]
        while new := [point for point in new if point not in losses and rate / 64 < point[0] < rate * 64]:
            losses.update(zip(new, measure(new, 0)))
            best = min(losses, key=lambda point: (losses[point], point))         # where all diverge, the lowest rate
            new = [(best[0] / 2, best[1]), (2 * best[0], best[1])]
        return min(losses, key=lambda point: (losses[point], point))

    best = near(near(rate, [std])[0], starts)
    while len(starts) > 1 and best[1] in (min(starts), max(starts)) and 1e-3 < best[1] < 10:
        starts = [*starts, float(f"{best[1] / 3 if best[1] == min(starts) else best[1] * 3:.1g}")]
        best = near(best[0], starts[-1:])
    close = [point for point in losses if losses[point] - losses[best] <= 0.01] or [best]      # inf - inf is nan
    again = dict(zip(close, measure(close, 1))) if len(close) > 1 else {}
    return min(close, key=lambda point: losses[point] + again.get(point, 0))

def basin(losses, within=0.02):
    """The rates within so many nats of the best, by straight lines in loss against log rate; losses: rate -> loss.
    at_least: it may be wider, an end lies at the edge of the grid or beside a rate that diverged."""
    rates, limit = sorted(losses), min(losses.values()) + within
    best = rates.index(min(rates, key=losses.get))

    def end(side):
        for a, b in itertools.pairwise(side):
            if losses[b] > limit:                        # where b diverged the exponent is 0
                return a * (b / a) ** ((limit - losses[a]) / (losses[b] - losses[a]))
        return side[-1]

    low, high = end(rates[best::-1]), end(rates[best:])
    return {"low": low, "high": high, "factor": high / low, "at_least": bool({low, high} & losses.keys())}

def tokens_to_reach(target, tokens, losses):
    """With how many tokens the runs would end at the loss `target`: straight lines in log loss against log tokens. The
    first that falls through the target counts; below all losses the last goes on, above all the first. inf where that
    line does not fall, or a run diverged; nan where there is no line."""
    if len(tokens) < 2 or not np.isfinite(losses).all():
        return math.nan if len(tokens) < 2 else math.inf
    x, y, goal = np.log(tokens), np.log(losses), math.log(target)
    crossed = [i for i in range(len(x) - 1) if y[i] >= goal >= y[i + 1] and y[i] > y[i + 1]]
    i = crossed[0] if crossed else 0 if goal > y.max() else len(x) - 2
    return math.exp(x[i] + (goal - y[i]) * (x[i + 1] - x[i]) / (y[i + 1] - y[i])) if y[i] > y[i + 1] else math.inf

def speedup(tokens, baseline, losses, seed, draws=5000):
    """Longest tokens over those with which an arch reaches the baseline's loss there; losses are (lengths, seeds).
    From low to high: 95% of the factors of means over seeds drawn with replacement, the same for both; nan below 3."""
    def factor(columns):
        target = baseline[-1, columns].mean()
        needed = tokens_to_reach(target, tokens, losses[:, columns].mean(1)) if np.isfinite(target) else math.nan
        return tokens[-1] / needed

    count, generator, (low, high) = losses.shape[1], np.random.default_rng(seed), (math.nan, math.nan)
    if count >= 3:
        low, high = np.quantile([factor(generator.choice(count, count)) for _ in range(draws)], (0.025, 0.975)).tolist()
    middle = factor(np.arange(count))
    return {"factor": middle, "low": low, "high": high, "tokens": tokens[-1] / middle if middle else math.inf}

class Race:
    """Complete runs of train.py, a few at a time. What has ended is read from its log, what was stopped goes on."""
    def __init__(self, config):
        self.config, self.machine = config, Machine(config.device, config.dtype)
        self.vocab = read_meta(config.data)["vocab_size"]
        self.configs = train_configs(config, self.vocab)
        batch = next(iter(self.configs.values())).total_batch_size
        least = batch * 2 ** (config.lengths - 1)
        check(config, "tokens", lambda x: x >= least, f"at least {least}: {config.lengths} lengths of whole steps")
        self.steps = [round(config.tokens / 2 ** i / batch) for i in reversed(range(config.lengths))]
        self.tokens, self.seeds = [n * batch for n in self.steps], range(config.seed, config.seed + config.seeds)
        self.sweep_steps = max(1, round((config.sweep_tokens or self.tokens[config.lengths // 2]) / batch))
        workers = config.workers or (torch.get_num_threads() if self.machine.device.type == "cpu" else 1)
        self.pool, self.threads = ThreadPoolExecutor(workers), max(1, torch.get_num_threads() // workers)
        self.bar = tqdm(total=sum(self.steps) * config.seeds * len(self.configs), unit="step", smoothing=0)

    def run_config(self, name, rate, std, steps, seed):
        """The TrainConfig of a run, nothing left to resolve; its folder's name tells it from any other."""
        every = math.ceil(steps / 10) if steps == self.steps[-1] else steps      # only the longest are drawn
        c = train_configs(self.config, self.vocab, arch=name, learning_rate=rate, embed_std=std, max_steps=steps,
                          seed=seed, eval_interval=every, checkpoint_interval=100, device=self.machine.device.type,
                          dtype=str(self.machine.dtype)[6:], resume="auto", out_dir="")[name]
        digest = hashlib.sha256(json.dumps(asdict(c)).encode()).hexdigest()[:8]
        return replace(c, out_dir=f"{self.config.runs_dir}/{name}-{rate:g}-{std:g}-{steps}-{seed}-{digest}")

    def loss(self, config):
        """The held-out loss that a run has ended with, inf if it diverged; None if it has not ended."""
        last = (read_log(config.out_dir) or [{}])[-1]
        diverged = Path(config.out_dir, "diverged").exists()
        return math.inf if diverged else last.get("val_loss") if last.get("step") == config.max_steps else None

    def run(self, config):
        """The loss of a run, after train.py has gone through what is missing."""
        ended = self.loss(config) is not None
        if not ended:
            words = [f"--{key}={value}" for key, value in asdict(config).items() if value is not None]
            done = subprocess.run([sys.executable, Path(__file__).with_name("train.py"), *words], text=True,
                                  env={**os.environ, "OMP_NUM_THREADS": str(self.threads)}, capture_output=True)
            if done.returncode == Diverged.exit_code:
                Path(config.out_dir, "diverged").touch()
            expect(self.loss(config) is not None, f"{config.out_dir}: train.py did not reach its end, exit code "
                                                  f"{done.returncode}: {done.stderr.strip()[-300:]}")
            self.bar.write(f"{config.out_dir}: {self.loss(config):.4f}")
        self.bar.initial += config.max_steps * ended                             # cost no time now
        self.bar.update(config.max_steps)
        Path(config.out_dir, "ckpt.pt").unlink(missing_ok=True)                  # all of them would fill a disk
        return self.loss(config)

    def enter(self, name):
        """All about an arch: the search for its best rate and embed_std, then every length and seed."""
        c, trials, seconds = self.configs[name], [], []

        def measure(points, turn):
            seed, self.bar.total = self.config.seed + turn, self.bar.total + self.sweep_steps * len(points)
            configs = [self.run_config(name, *point, self.sweep_steps, seed) for point in points]
            losses = list(self.pool.map(self.run, configs))
            trials.extend([*point, seed, loss] for point, loss in zip(points, losses))
            seconds.extend(read_log(config.out_dir)[-1]["seconds"] for config in configs)
            return losses

        best, starts = (c.learning_rate, c.embed_std), [c.embed_std] if getattr(ARCHS[c.arch], "axes", None) else STARTS
        if self.config.sweep:
            best = search(*best, starts, measure)
        rows = [[self.run_config(name, *best, steps, seed) for seed in self.seeds] for steps in self.steps[::-1]]
        losses = np.array([list(self.pool.map(self.run, row)) for row in rows])[::-1]
        logs = [{r["tokens"]: r["val_loss"] for r in read_log(config.out_dir) if "val_loss" in r} for config in rows[0]]
        tokens = sorted(set().union(*logs))
        trials = trials or [[*best, self.seeds[0], losses[-1, 0]]]
        tried = [trial for trial in trials if trial[2] == self.seeds[0]]
        return {"learning_rate": best[0], "embed_std": best[1], "sweep": trials, "sweep_seconds": sum(seconds),
                "basin": basin({rate: loss for rate, std, _, loss in tried if std == best[1]}),
                "starts": sorted({std for _, std, _, loss in tried if loss <= min(t[3] for t in tried) + 0.02}),
                "tokens": self.tokens, "losses": losses.tolist(), "mean": losses.mean(1).tolist(),
                "std": losses.std(1, ddof=1).tolist() if len(self.seeds) > 1 else [math.nan] * len(self.steps),
                "curve": {"tokens": tokens, "val_loss": [[log.get(n) for n in tokens] for log in logs]}}

def race(config):
    """Tokens with which each arch reaches the baseline's loss, each with its own best learning rate and embed_std."""
    runs = Race(config)
    try:                                                 # Ctrl-C reaches the runs too, which save; no more is begun
        results = dict(zip(runs.configs, ThreadPoolExecutor(len(runs.configs)).map(runs.enter, runs.configs)))
    finally:
        runs.pool.shutdown(cancel_futures=True)
        runs.bar.close()
    lines = [["arch", "rate (within 0.02)", "std [within 0.02]", "search s", *map("{:,} tokens".format, runs.tokens),
              "tokens to the first's", "speed-up (2.5%-97.5%)"]]
    baseline, *_ = [np.array(r["losses"]) for r in results.values()]
    for name, r in results.items():
        s = r["speedup"] = speedup(runs.tokens, baseline, np.array(r["losses"]), config.seed)
        lines.append([name, "{:.3g} ({low:.2g}-{high:.2g})".format(r["learning_rate"], **r["basin"]),
                      f"{r['embed_std']:g} {r['starts']}", f"{r['sweep_seconds']:,.0f}",
                      *(f"{mean:.4f} +- {std:.4f}".removesuffix(" +- nan") for mean, std in zip(r["mean"], r["std"])),
                      f"{s['tokens']:,.0f}", f"{s['factor']:.2f} ({s['low']:.2f}-{s['high']:.2f})"])
    print_table(lines)
    draw_race(save("race", config, runs.machine, archs=results), f"{config.out_dir}/race.png")

def draw_lines(axes, lines):
    """Draws name -> (x, ys, colour): the mean of ys, one or several curves, their range, and the name at the end."""
    ends = {}
    for name, (x, ys, color) in lines.items():
        mean, low, high = (f(np.array(ys, dtype=float), axis=0) for f in (np.mean, np.min, np.max))
        axes.plot(x, mean, color=color, marker="o", ms=3)
        axes.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
        ends |= {name: point for point in zip(x, mean) if math.isfinite(point[1])}               # the last
    axes.autoscale_view()
    to_axes = axes.transData - axes.transAxes
    heights = {name: to_axes.transform(point)[1] for name, point in ends.items()}
    lowest = max(0, np.mean([*heights.values()]) - 0.035 * (len(ends) - 1))
    for i, name in enumerate(sorted(ends, key=heights.get)):
        color, label = lines[name][2], name.replace("rmsnorm+qk_norm", "GPT+")
        axes.annotate(label, ends[name], (1.1, lowest + 0.07 * i), "data", "axes fraction", color=color, va="center",
                      annotation_clip=False, arrowprops=dict(arrowstyle="-", color=color, lw=0.6))
    axes.grid(alpha=0.3)

def draw_race(found, path):
    """Losses of the longest runs against tokens, and losses of the search, at the best embed_std, against the rate."""
    left, right, figure = {}, {}, Figure(figsize=(9, 4), dpi=200, layout="constrained")
    for i, (name, r) in enumerate(found["archs"].items()):
        color, (tokens, losses) = COLORS.get(name, f"C{i}"), [np.array(x, float) for x in r["curve"].values()]
        late = tokens >= 0.45 * tokens[-1]               # before, all fall alike
        left[name] = tokens[late] / 1e6, losses[:, late], color
        tried = {rate: loss for rate, std, _, loss in r["sweep"][::-1] if std == r["embed_std"]}     # the first seed
        right[name] = sorted(tried), [[tried[rate] for rate in sorted(tried)]], color
    for axes, lines, label in zip(figure.subplots(1, 2), (left, right), ("tokens (millions)", "peak learning rate")):
        draw_lines(axes, lines)
        axes.set(xlabel=label, ylabel="held-out loss (nats/token)")
    axes.set_xscale("log")
    figure.savefig(path)

def curves(config, *folders):
    """Runs of train.py in one picture."""
    while True:
        figure, lines = Figure(figsize=(9, 5), dpi=100, layout="constrained"), {}
        for folder, color in zip(folders, itertools.cycle(COLORS.values())):
            log = [r for r in read_log(folder) if r["tokens"] and type(r.get(config.key)) is float]
            expect(log or config.follow, f"{folder}/log.jsonl: no {config.key}")
            if log:
                lines[folder] = [r["tokens"] / 1e6 for r in log], [[r[config.key] for r in log]], color
        expect(lines or config.follow, "no folders of runs are given")
        axes = figure.subplots()
        draw_lines(axes, lines)
        axes.set(xlabel="tokens (millions)", ylabel=config.key)
        os.makedirs(config.out_dir, exist_ok=True)
        figure.savefig(f"{config.out_dir}/curves.png")
        if not config.follow:
            return print(f"{config.out_dir}/curves.png")
        time.sleep(5)

def questions(path):
    """Yields (context, endings, index of the right one) of HellaSwag's rows. Raises DataError."""
    def clean(text):                                     # of WikiHow's marks
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    with blame(f"file={path}: HellaSwag's questions cannot be read"):
        from datasets import load_dataset
        rows = filter(str.strip, open(path)) if path else load_dataset("Rowan/hellaswag", split="validation")
    for number, row in enumerate(rows, 1):
        with blame(f"{path}, row {number}: expected JSON with ctx_a, ctx_b, activity_label, four endings and a label"):
            row = json.loads(row) if path else row
            endings, label = [clean(ending) for ending in row["endings"]], int(row["label"])
            expect(len(endings) == 4 and all(endings) and 0 <= label < 4, f"{path}, row {number}: not four endings")
            yield clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"), endings, label

@torch.no_grad()
def nats(model, tokenizer, pairs):
    """-log p(ending | context) of pairs (context, ending): (len(pairs),). Of what is too long the last part counts."""
    device, size = next(model.parameters()).device, model.config.block_size
    x, y = torch.zeros(len(pairs), size, dtype=torch.long), torch.full((len(pairs), size), -1)
    for i, (context, ending) in enumerate(pairs):
        row = torch.from_numpy(encode(tokenizer, f"{context} {ending}".encode(), new=False).astype(int))
        new = len(row) - len(encode(tokenizer, context.rstrip(" ").encode(), new=False))
        n = min(size, len(row) - 1)
        x[i, :n], y[i, max(0, n - new):n] = row[-n - 1:-1], row[-n:][-new:]
    x, y = (z[:, :(y >= 0).nonzero()[:, 1].max() + 1].to(device) for z in (x, y))
    return F.cross_entropy(model(x, y)[0].float().transpose(1, 2), y, ignore_index=-1, reduction="none").sum(1)

def hellaswag(config):
    """How often a trained model finds the right ending of four likeliest."""
    rows, machine, results = [*questions(config.file)], Machine(config.device), {}
    expect(len(rows) > 1, f"file={config.file}: {len(rows)} questions, expected at least two")
    for source in config.out_dir.split(","):
        (model, tokenizer, _), right = load_model(source, machine.device), []
        for i in tqdm(range(0, len(rows), config.batch_size), desc=source, disable=None):
            contexts, endings, labels = zip(*rows[i:i + config.batch_size])
            pairs = [(context, ending) for context, four in zip(contexts, endings) for ending in four]
            lengths = torch.tensor([len(ending) for _, ending in pairs])
            losses = nats(model, tokenizer, pairs).cpu()
            best = [x.view(-1, 4).argmin(1) for x in (losses, losses / lengths)]
            right.append(torch.stack(best, 1) == torch.tensor(labels)[:, None])
        right = torch.cat(right).double()                                        # (questions, 2)
        (acc, norm), (error, norm_error) = right.mean(0).tolist(), (right.std(0) / len(rows) ** 0.5).tolist()
        results[source] = {"acc": acc, "acc_stderr": error, "acc_norm": norm, "acc_norm_stderr": norm_error}
    print_table([["", "accuracy", "by length"], *([name, f"{r['acc']:.4f} +- {r['acc_stderr']:.4f}",
                  f"{r['acc_norm']:.4f} +- {r['acc_norm_stderr']:.4f}"] for name, r in results.items())])
    save("hellaswag", replace(config, out_dir=config.results_dir), machine, questions=len(rows), runs=results)

BENCHMARKS = {"speed": (BenchConfig, speed), "sample": (SampleConfig, sample), "race": (RaceConfig, race),
              "curves": (CurvesConfig, curves), "hellaswag": (HellaswagConfig, hellaswag)}

def main(argv):
    if not argv or argv[0] in ("-h", "--help"):
        return print(__doc__)
    name, *words = argv
    choose("benchmark", name, BENCHMARKS)
    folders = [word for word in words if name == "curves" and not word.startswith("-")]
    cls, run = BENCHMARKS[name]
    run(parse(cls, [word for word in words if word not in folders], run.__doc__), *folders)

if __name__ == "__main__":
    run_script(main)
