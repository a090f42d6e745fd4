"""
Measure what normalization costs.

    python bench.py speed                                    # a training step of every arch, at laptop size
    python bench.py speed --compile=false --archs=rmsnorm+qk_norm,ngpt       # two of them; nothing to compile: quicker
    python bench.py speed --size=0.5b --batch_size=8 --block_size=2048       # anGPT's Table 2, where GPT+ comes first
    python bench.py speed --archs=rmsnorm+qk_norm --attention=sdpa-flash,sdpa-cudnn,sdpa-efficient,sdpa-math     # kernels
    python bench.py sample --batch_sizes=1,4,16 --threads=1  # decoding with the KV cache
    python bench.py speed --help                             # the options of one benchmark
    python bench.py sample --fold=false                      # the same without what GPT.fold_ computes beforehand
    python bench.py race                                     # which arch needs fewer tokens: half an hour on two cores
    python bench.py race --size=0.5b --data=data/fineweb10B-gpt2 --tokens=70_000_000_000 --lengths=5     # anGPT's Fig. 3

It prints a table and writes out/bench/<name>.json, raw values included, and <name>.png. All archs live in one process
and take turns, in a new order every round, so that a machine slowing down slows them all. Ratios are taken within a
round, to the baseline, the first of --archs. Brackets and error bars go from the 10th to the 90th percentile of the
rounds: the spread of single rounds, not the uncertainty of their median.

speed   train.py's own optimizer_step with one micro-batch (forward, backward, clipping, AdamW, project_) of random
        tokens that lie on the device, so no loading. MFU: against this machine's own matrix products, the best seen.
        Memory: weights, AdamW's state and the most that one more step has torch allocate, without the program itself
        and the scratch space of libraries. Compiling takes about a quarter of a minute an arch, the first time.
sample  model.generate, greedy, from a random prompt; eager, float32 and with folded constants as in sample.py. The
        first token, which takes the reading of the prompt, is not in it.
race    complete runs of train.py, each with a cosine of its own, several at once. First a learning rate for every arch:
        half, one and two times the recipe's, and on while the best is at an edge, with one seed, at the middle length.
        Then with the best rate every length and seed; a seed also sets the order of the data, the same for all archs.
        Speed-up: the tokens of the longest runs over those with which an arch reaches the baseline's loss there, read
        off straight lines in log loss against log tokens through its lengths (`tokens_to_reach`). Its interval is a
        bootstrap over seeds (2.5% to 97.5%), all archs taking the same ones; with three seeds it holds the true factor
        about three times in four, with more seeds more often. In wall time: that over the median ratio of step times,
        which `speed` measures afterwards on the idle machine, as train.py would run the size (the runs themselves are
        not compiled); the interval leaves out the spread of that ratio.
        A stopped race goes on when called again: what has run is read from out/race.
"""
import contextlib
import functools
import itertools
import json
import math
import os
import platform
import random
import shlex
import subprocess
import sys
import time
import typing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

from model import GPT, KERNELS, ConfigError, GPTConfig, attention_kernel, choose, option
from prepare import DataError, read_meta, write_json
from train import (DEFAULT_DATA, SIZES, Diverged, Interrupts, Machine, TrainConfig, attention, check_attention, compile_,
                   find_corpus, flops_per_token, make_optimizer, matmul_flops, optimizer_step, parse, read_log, resolve,
                   run_script, words)

EVERY_ARCH = "rmsnorm+qk_norm,layernorm,rmsnorm,powernorm,normformer,ngpt,angpt"


@dataclass
class BenchConfig:
    """Options of every benchmark. None stands for what train.py would use."""

    archs: str = option(EVERY_ARCH, "what to compare, the baseline first; +name turns on a switch: bias, tie, qk_norm, "
                        "resid_scale")
    size: str = option("laptop", "preset: " + ", ".join(SIZES))
    block_size: int | None = option(None, "context length in tokens (by size)")
    n_layer: int | None = option(None, "blocks (by size)")
    n_head: int | None = option(None, "attention heads (by size)")
    n_embd: int | None = option(None, "channels of the residual stream (by size)")
    vocab_size: int | None = option(None, "tokens in the vocabulary (by size; laptop: 257)")
    mlp: str = option("swiglu", "swiglu | gelu")
    pos: str = option("rope", "rope | learned | sinusoidal")
    steps: int = option(20, "rounds that are measured")
    warmup: int = option(3, "rounds before those")
    threads: int | None = option(None, "CPU threads (torch's choice)")
    seed: int = option(1337, "of weights, tokens, and the order in a round")
    device: str = option("auto", "auto | cpu | cuda | mps")
    out_dir: str = option("out/bench", "folder for tables and pictures")

    def __post_init__(self):
        for f in fields(self):
            value, least = getattr(self, f.name), {"seed": 0, "new_tokens": 2}.get(f.name, 1)
            if type(value) is int and value < least:
                raise ConfigError(f"{f.name}={value}: expected at least {least}")


@dataclass
class SpeedConfig(BenchConfig):
    batch_size: int | None = option(None, "sequences in a step (by size)")
    attention: str = option("auto", "attention kernels to compare, with commas between: " + ", ".join(KERNELS))
    dtype: str = option("auto", "auto | float32 | bfloat16 (autocast; weights stay float32)")
    compile: str = option("auto", "auto | true | false | whole: torch.compile; auto: true if train.py would at this size")


@dataclass
class DecodeConfig(BenchConfig):
    batch_sizes: str = option("1,4,16", "sequences decoded side by side, with commas between")
    prompt_tokens: int = option(16, "length of the prompt")
    new_tokens: int = option(65, "tokens generated, of which the first is not measured")
    fold: bool = option(True, "compute beforehand what depends on the weights alone (GPT.fold_)")
    dtype, attention = "float32", "sdpa"                 # no options: sample.py has none either

    def sizes(self):
        words = self.batch_sizes.split(",")
        if not all(word.isdecimal() and int(word) for word in words):
            raise ConfigError(f"batch_sizes={self.batch_sizes}: expected whole numbers from 1, with commas between")
        return list(dict.fromkeys(map(int, words)))


@dataclass
class RaceConfig(BenchConfig):
    archs: str = option("rmsnorm+qk_norm,ngpt,angpt", "who runs, the baseline first; +name turns on a switch, such as qk_norm")
    tokens: int = option(2 ** 21, "of the longest runs")
    lengths: int = option(3, "how many: all of --tokens, half, a quarter, ...")
    seeds: int = option(3, "runs of each length: with --seed, --seed + 1, ...")
    sweep_tokens: int | None = option(None, "of the runs that find the learning rate (the middle length)")
    data: str = option(DEFAULT_DATA, "corpus: a folder made by prepare.py")
    batch_size: int | None = option(None, "sequences in a micro-step (by size)")
    total_batch_size: int | None = option(None, "tokens in an optimizer step (by size)")
    eval_tokens: int = option(65536, "held-out tokens that give the final loss")
    checkpoint_interval: int = option(100, "steps between checkpoints, from which a stopped run goes on")
    dtype: str = option("auto", "auto | float32 | bfloat16 (autocast; weights stay float32)")
    workers: int | None = option(None, "runs at a time, each with its share of the cores (one a core, or one a GPU)")
    timing: bool = option(True, "measure step times afterwards, as speed does")
    keep: bool = option(False, "keep the checkpoints of finished runs")
    runs_dir: str = option("out/race", "folder for the runs")
    threads: int | None = option(None, "CPU threads while step times are measured (torch's choice)")
    steps: int = option(20, "rounds in which step times are measured")


# ---------------------------------------------------------------------------------------------------------------------
# Measuring

def spread(values):
    """Median and 10th and 90th percentile."""
    low, median, high = np.quantile(np.asarray(values, dtype=float), (0.1, 0.5, 0.9)).tolist()
    return {"median": median, "p10": low, "p90": high}


def paired_ratio(values, baseline):
    """Spread of value over baseline, taken round by round: what slows a whole round down cancels."""
    return spread(np.asarray(values, dtype=float) / np.asarray(baseline, dtype=float))


def mark(device):
    """A moment. CUDA runs behind the program: there it is an event in the device's own queue, and nothing waits."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    if device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def between(start, stop):
    """Seconds from one mark to another."""
    if isinstance(start, float):
        return stop - start
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def train_configs(config):
    """arch -> the TrainConfig that train.py would have with these options. Raises ConfigError."""
    switches = [f.name for f in fields(GPTConfig) if f.type is bool]
    given = {f.name: getattr(config, f.name) for f in fields(TrainConfig) if getattr(config, f.name, None) is not None}
    found = {}
    kernels = given.pop("attention", "auto").split(",")
    for name, kernel in itertools.product(config.archs.split(","), kernels):
        arch, *extras = name.split("+")
        for extra in extras:
            choose(f"archs={name}: switch", extra, switches)
        wanted = TrainConfig(**given, arch=arch, attention=kernel, **dict.fromkeys(extras, True))
        found[name if len(kernels) == 1 else f"{name} {kernel}"] = resolve(wanted, corpus_vocab=config.vocab_size or 257)
    return found


def machine_for(config):
    choose("dtype", config.dtype, ("auto", "float32", "bfloat16"))
    machine = Machine(config.device)
    machine.use(machine.fast_dtype() if config.dtype == "auto" else config.dtype)
    return machine


class Trainee:
    """A model with its optimizer. `step` takes a training step; returns its seconds and those of project_ in it."""

    def __init__(self, config, machine, compiles):
        tokens = config.batch_size * config.block_size * machine.world_size          # one micro-batch
        self.config, self.machine = replace(config, total_batch_size=tokens), machine
        torch.manual_seed(config.seed)
        self.model = GPT(config.model_config()).to(machine.device)
        self.optimizer = make_optimizer(self.model, config)
        rows = torch.randint(config.vocab_size, (config.batch_size, config.block_size + 1),
                             generator=torch.Generator().manual_seed(config.seed)).to(machine.device)
        pair = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        self.loader = SimpleNamespace(batches=lambda *_: [pair])                     # in place of train.py's Loader
        torch._dynamo.config.recompile_limit = 64            # archs of one family share their code
        torch._dynamo.config.specialize_float = True         # but not their constants
        if compiles:
            compile_(self.model, whole=compiles == "whole")
        self.project_, self.model.project_ = self.model.project_, self.marked_project_

    def marked_project_(self):
        start = mark(self.machine.device)
        self.project_()
        self.projection = start, mark(self.machine.device)

    def step(self):
        with attention(self.config.attention):
            start = mark(self.machine.device)
            optimizer_step(0, self.model, self.model, self.optimizer, self.loader, self.config, self.machine)
        return between(start, mark(self.machine.device)), between(*self.projection)

    def memory_gb(self):
        """Weights, AdamW's state, and the most that a step has torch allocate on top; None where torch can't tell."""
        state = itertools.chain(self.model.parameters(), self.model.buffers(),
                                *(entry.values() for entry in self.optimizer.state.values()))
        kept, on = sum(tensor.nbytes for tensor in state), self.machine.device.type
        if on == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step()
            return (kept + torch.cuda.max_memory_allocated() - before) / 1e9
        if on != "cpu":
            return None
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")              # the profiler would tell that it starts and stops
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            self.step()
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        changes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))        # + allocated, - freed
        return (kept + max(itertools.accumulate(changes))) / 1e9


def rounds(jobs, config):
    """Runs every job (name -> function) once a round; returns name -> its results after the warm-up."""
    order, results = random.Random(config.seed), {name: [] for name in jobs}
    with tqdm(total=(config.warmup + config.steps) * len(jobs), leave=False, disable=None) as progress:
        for i in range(config.warmup + config.steps):
            # Compiling while the clock runs would make a wrong number: after the warm-up it is an error.
            with torch.compiler.set_stance("default" if i < config.warmup else "fail_on_recompile"):
                for name in order.sample(list(jobs), len(jobs)):
                    progress.set_description(f"{'warm-up' if i < config.warmup else 'measuring'} {name}")
                    results[name].append(jobs[name]())
                    progress.update()
    return {name: values[config.warmup:] for name, values in results.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The benchmarks

def speed(config):
    """A training step of every arch."""
    configs = train_configs(config)
    baseline, first = next(iter(configs.items()))
    machine = machine_for(first)
    for c in configs.values():
        check_attention(c, machine)
    with torch.device("meta"):
        flops = first.max_steps * first.total_batch_size * flops_per_token(GPT(first.model_config()))
    compiles = {"auto": machine.compiling_pays(flops), "false": False, "true": True}.get(first.compile, first.compile)
    trainees = {name: Trainee(c, machine, compiles) for name, c in configs.items()}
    times = rounds({name: trainee.step for name, trainee in trainees.items()}, config)
    machine.peak = max(machine.peak, matmul_flops(machine.device, machine.dtype))    # a busy machine shows it rarely
    titles = "arch,ms/step,10%-90%,tokens/s,MFU,memory GB,project_ ms,of a step,time ratio,10%-90%"
    results, lines = {}, [titles.split(",")]
    for name, trainee in trainees.items():
        seconds, projecting = zip(*times[name])
        r = results[name] = {"seconds": seconds, "project_seconds": projecting, "step": spread(seconds),
                             "project": spread(projecting), "project_share": spread(np.divide(projecting, seconds)),
                             "ratio": paired_ratio(seconds, [s for s, _ in times[baseline]]),
                             "parameters": sum(p.numel() for p in trainee.model.parameters()),
                             "memory_gb": trainee.memory_gb()}
        r["tokens_per_s"] = first.batch_size * first.block_size / r["step"]["median"]
        r["mfu"] = r["tokens_per_s"] * flops_per_token(trainee.model) / machine.peak
        lines.append([name, *cells(r["step"], 1e3, 2), f"{r['tokens_per_s']:,.0f}", f"{r['mfu']:.1%}",
                      f"{r['memory_gb']:.3f}" if r["memory_gb"] else "unknown", f"{r['project']['median'] * 1e3:.2f}",
                      f"{r['project_share']['median']:.1%}", *cells(r["ratio"], 1, 3)])
    panels = {"milliseconds a step": {name: (r["step"], 1e3, r["ratio"]) for name, r in results.items()}}
    report("speed", config, conditions(config, first, machine, compiles), lines, results, panels)
    return results


def decode(model, prompt, new_tokens):
    """Tokens a second of one greedy continuation of `prompt` (B, T), from the first new token to the last."""
    stream = model.generate(prompt, new_tokens, temperature=0)
    next(stream)
    start = mark(prompt.device)
    for _ in stream:
        pass
    return len(prompt) * (new_tokens - 1) / between(start, mark(prompt.device))


def sample(config):
    """Decoding with every arch, at every batch size."""
    configs, sizes = train_configs(config), config.sizes()
    baseline, first = next(iter(configs.items()))
    if config.prompt_tokens + config.new_tokens > first.block_size:          # generate would read half the window anew
        raise ConfigError(f"prompt_tokens={config.prompt_tokens} and new_tokens={config.new_tokens}: expected together "
                          f"at most block_size={first.block_size}")
    machine, jobs = machine_for(first), {}
    generator = torch.Generator().manual_seed(config.seed)
    prompt = torch.randint(first.vocab_size, (max(sizes), config.prompt_tokens), generator=generator).to(machine.device)
    for name, c in configs.items():
        torch.manual_seed(c.seed)
        model = GPT(c.model_config()).to(machine.device).eval()
        model = model.fold_() if config.fold else model
        jobs |= {(name, n): functools.partial(decode, model, prompt[:n], config.new_tokens) for n in sizes}
    rates = rounds(jobs, config)
    def result(name, n):
        own = rates[name, n]
        return {"tokens_per_s": own, "rate": spread(own), "ratio": paired_ratio(own, rates[baseline, n])}

    results = {name: {n: result(name, n) for n in sizes} for name in configs}
    lines = [["arch", "batch", "tokens/s", "10%-90%", "rate ratio", "10%-90%"]]
    lines += [[name, str(n), *cells(results[name][n]["rate"], 1, 0), *cells(results[name][n]["ratio"], 1, 3)]
              for n in sizes for name in results]
    panels = {f"tokens/s, batch {n}": {name: (r[n]["rate"], 1, r[n]["ratio"]) for name, r in results.items()}
              for n in sizes}
    report("sample", config, conditions(config, first, machine, False), lines, results, panels)


# ---------------------------------------------------------------------------------------------------------------------
# Reports

def cells(values, unit, digits):
    """A spread as two cells of a table: the median, and (low-high)."""
    low, median, high = (f"{values[key] * unit:,.{digits}f}" for key in ("p10", "median", "p90"))
    return median, f"({low}-{high})"


def processor(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):                                               # Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def conditions(config, first, machine, compiles):
    """All that the numbers depend on besides this code: (the machine, the options as train.py resolves them)."""
    dtype = str(machine.dtype).removeprefix("torch.")
    kernel = getattr(config, "attention", "auto")
    if kernel == "auto":
        kernel = attention_kernel(machine.device.type, machine.dtype, first.block_size)
    here = {"processor": processor(machine.device), "device": machine.device.type, "threads": torch.get_num_threads(),
            "dtype": dtype, "compile": compiles, "attention": kernel, "matmul_gflops": round(machine.peak / 1e9),
            "torch": str(torch.__version__), "python": platform.python_version()}
    options = {key: getattr(first, key, None) if value is None else value for key, value in asdict(config).items()}
    return here, {key: value for key, value in options.items() if key not in here}


def print_table(lines):
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join([line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]))


def report(name, config, given, lines, results, panels):
    """Prints the table `lines`, its titles first, under what was given; saves results and picture."""
    hidden = ("archs", "seed", "out_dir")
    head = "\n".join(", ".join(f"{key} {value}" for key, value in part.items() if key not in hidden) for part in given)
    print(f"{head}\n")
    print_table(lines)
    save(name, config, given, {"archs": results}, functools.partial(draw, head, panels))


def save(name, config, given, found, draw):
    """Writes name.json and name.png into out_dir."""
    path = Path(config.out_dir, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {"benchmark": name, "machine": given[0], "options": given[1], "baseline": next(iter(found["archs"])), **found}
    write_json(f"{path}.json", json.loads(json.dumps(tree), parse_constant=lambda _: None))       # null for inf and nan
    draw().savefig(f"{path}.png", dpi=110)
    print(f"\n{path}.json\n{path}.png")


def draw(title, panels):
    """Bars with spreads. panels: title -> arch -> (spread, unit, spread of the ratio to the first arch)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1 + sum(0.6 + 0.3 * len(bars) for bars in panels.values())), layout="constrained")
    figure.suptitle(title, fontsize=7)
    for axes, (label, bars) in zip(np.atleast_1d(figure.subplots(len(panels))), panels.items()):
        for i, (values, unit, ratio) in enumerate(bars.values()):
            low, middle, high = (values[key] * unit for key in ("p10", "median", "p90"))
            axes.barh(i, middle, color="C0" if i else "0.6")
            axes.errorbar(middle, i, xerr=[[middle - low], [high - middle]], color="0.3", capsize=3)
            text = "\u00d7 {} {}".format(*cells(ratio, 1, 3)) if i else "baseline"
            axes.annotate(text, (high, i), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(range(len(bars)), list(bars))
        axes.invert_yaxis()
        axes.set(xlabel=label, xlim=(0, 1.3 * max(values["p90"] * unit for values, unit, _ in bars.values())))
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# The race: arithmetic

MOST_RATES = 9


def rates_to_try(start, losses):
    """Learning rates of a sweep as far as `losses` (rate -> loss) tells: three, then on beyond an edge that is best."""
    rates = [start / 2, start, 2 * start]
    while len(rates) < MOST_RATES and losses.keys() >= set(rates):
        best = min(rates, key=losses.get)
        if best not in (rates[0], rates[-1]):
            break
        rates = [best / 2, *rates] if best == rates[0] else [*rates, 2 * best]
    return rates


def basin(losses, within=0.02):
    """Rates whose loss is within so many nats of the best, by straight lines in loss against log rate.

    losses: rate -> loss. at_least: it may be wider, an end lies at the edge of the grid or beside a rate that diverged.
    """
    rates, at_least, ends = sorted(losses), False, []
    best = min(rates, key=losses.get)
    limit = losses[best] + within
    for side in (rates[:rates.index(best) + 1][::-1], rates[rates.index(best):]):       # from the best outwards
        inside = list(itertools.takewhile(lambda rate: losses[rate] <= limit, side))
        end = inside[-1]
        if len(inside) < len(side) and math.isfinite(losses[side[len(inside)]]):
            beyond = side[len(inside)]
            end *= (beyond / end) ** ((limit - losses[end]) / (losses[beyond] - losses[end]))
        else:
            at_least = True
        ends.append(end)
    return {"low": ends[0], "high": ends[1], "factor": ends[1] / ends[0], "at_least": at_least}


def tokens_to_reach(target, tokens, losses):
    """With how many tokens the runs would end at the loss `target`: straight lines in log loss against log tokens.

    tokens (ascending) and losses of complete runs. The first line that falls through the target counts; below all
    losses the last line goes on, above all the first. inf where that line does not fall, or a run diverged; nan where
    there is no line.
    """
    if len(tokens) < 2 or not np.isfinite(losses).all():
        return math.nan if len(tokens) < 2 else math.inf
    x, y, goal = np.log(tokens), np.log(losses), math.log(target)
    crossed = [i for i in range(len(x) - 1) if y[i] >= goal >= y[i + 1] and y[i] > y[i + 1]]
    i = crossed[0] if crossed else 0 if goal > y.max() else len(x) - 2
    return math.exp(x[i] + (goal - y[i]) * (x[i + 1] - x[i]) / (y[i + 1] - y[i])) if y[i] > y[i + 1] else math.inf


def speedup(tokens, baseline, losses, seed, draws=5000):
    """Longest tokens over those with which an arch reaches the baseline's loss there: {factor, low, high, tokens}.

    baseline, losses: (lengths, seeds). The interval (None with fewer than 3 seeds) takes 95% of the factors of means
    over seeds drawn with replacement, the same ones for both.
    """
    def factor(columns):
        target = baseline[-1, columns].mean()
        needed = tokens_to_reach(target, tokens, losses[:, columns].mean(1)) if np.isfinite(target) else math.nan
        return tokens[-1] / needed

    everyone, interval = np.arange(losses.shape[1]), (None, None)
    if len(everyone) >= 3:
        generator = np.random.default_rng(seed)
        factors = [factor(generator.choice(everyone, len(everyone))) for _ in range(draws)]
        interval = np.quantile(factors, (0.025, 0.975)).tolist()
    middle = factor(everyone)
    return {"factor": middle, "low": interval[0], "high": interval[1],
            "tokens": tokens[-1] / middle if middle else math.inf}


# ---------------------------------------------------------------------------------------------------------------------
# The race: runs

class RaceRun(typing.NamedTuple):
    arch: str
    rate: float
    steps: int
    seed: int


class Race:
    """The runs of train.py that a race needs, a few at a time. What ran before is read from its log, not run again."""

    def __init__(self, config):
        self.config, self.machine = config, machine_for(config)
        vocab = read_meta(find_corpus(config.data, self.machine))["vocab_size"]
        self.dtype = str(self.machine.dtype).removeprefix("torch.")
        choose("size", config.size, SIZES)
        vocab = config.vocab_size or SIZES[config.size].get("vocab_size", vocab)
        self.options = {**vars(config), "dtype": self.dtype, "vocab_size": vocab}
        self.configs = train_configs(SimpleNamespace(**self.options))                # as train.py alone would run them
        batch = next(iter(self.configs.values())).total_batch_size
        self.steps = [round(config.tokens / 2 ** i / batch) for i in reversed(range(config.lengths))]
        if len({0, *self.steps}) <= config.lengths:                                  # two alike, or one of none
            least = batch * 2 ** (config.lengths - 1)
            raise ConfigError(f"tokens={config.tokens}: expected at least {least}, which gives the shortest of "
                              f"{config.lengths} lengths one step of {batch} tokens")
        self.tokens = [steps * batch for steps in self.steps]
        self.sweep_steps = max(1, round((config.sweep_tokens or self.tokens[config.lengths // 2]) / batch))
        self.seeds = range(config.seed, config.seed + config.seeds)
        gpus, on = torch.cuda.device_count(), self.machine.device.type
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        self.workers = config.workers or {"cuda": gpus, "cpu": len(cores)}.get(on, 1)
        share = max(1, len(cores) // self.workers)
        self.cores = [[cores[(i * share + j) % len(cores)] for j in range(share)] for i in range(self.workers)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        self.gpus = visible.split(",") if on == "cuda" else []
        self.losses, self.spent = {}, {}                         # of ended runs: the loss; seconds and steps
        self.running = {}                                        # worker -> run, process, when it began

    def train_config(self, run):
        """The TrainConfig of a run, with nothing left to resolve."""
        passed = {f.name for f in fields(TrainConfig)} - {"data", "dtype", "seed", "out_dir"}
        given = [f"{f.name}{getattr(self.config, f.name)}" for f in fields(RaceConfig)
                 if f.name in passed and getattr(self.config, f.name) != f.default]
        name = "-".join([run.arch, f"lr{run.rate:g}", f"steps{run.steps}", f"seed{run.seed}", self.dtype, *given])
        own = {"archs": run.arch, "learning_rate": run.rate, "max_steps": run.steps, "seed": run.seed,
               "eval_interval": run.steps, "compile": "false", "resume": "auto",
               "out_dir": str(Path(self.config.runs_dir, Path(self.config.data).name, name))}
        return train_configs(SimpleNamespace(**{**self.options, **own}))[run.arch]

    def sweep(self, arch):
        """Rate -> loss, None where the run is still to come."""
        known = {run.rate: loss for run, loss in self.losses.items()
                 if run == (arch, run.rate, self.sweep_steps, self.seeds[0])}
        return {rate: known.get(rate) for rate in rates_to_try(self.configs[arch].learning_rate, known)}

    def best_rate(self, arch):
        """The best of a sweep that is over, else None. Raises Diverged where every rate did."""
        losses = self.sweep(arch)
        if None in losses.values():
            return None
        best = min(losses, key=losses.get)
        if losses[best] == math.inf:
            raise Diverged(f"{arch}: every learning rate from {min(losses):g} to {max(losses):g} diverges")
        return best

    def wanted(self):
        """All runs needed, as far as the losses so far can tell, in their order: the sweeps, then the longest first."""
        runs = [RaceRun(arch, rate, self.sweep_steps, self.seeds[0])
                for arch in self.configs for rate in self.sweep(arch)]
        best = {arch: self.best_rate(arch) for arch in self.configs}
        return list(dict.fromkeys(runs + [RaceRun(arch, rate, steps, seed) for steps in reversed(self.steps)
                                          for seed in self.seeds for arch, rate in best.items() if rate]))

    def look(self, run):
        """Whether a run has ended, by its folder; if so, notes its loss (inf: diverged) and lets its checkpoint go."""
        config = self.train_config(run)
        folder = Path(config.out_dir)
        records = read_log(folder)
        if not records or records[0].get("config") != asdict(config):
            return False
        last, diverged = records[-1], (folder / "diverged.txt").exists()
        if not diverged and last["step"] < run.steps:
            return False
        self.losses[run] = math.inf if diverged or not math.isfinite(last["val_loss"]) else last["val_loss"]
        self.spent[run] = last["seconds"], last["step"]
        if not self.config.keep:
            (folder / "ckpt.pt").unlink(missing_ok=True)
        return True

    def start(self, worker, run):
        config = self.train_config(run)
        folder = Path(config.out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "diverged.txt").unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("train.py")), *words(config)]
        cores = self.cores[worker]
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores))}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[worker % len(self.gpus)]
        with (folder / "errors.txt").open("w") as errors:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        if hasattr(os, "sched_setaffinity") and not self.gpus:
            os.sched_setaffinity(process.pid, cores)               # before it makes threads, which inherit it
        self.running[worker] = run, process, time.perf_counter()

    def collect(self, interrupts):
        """Takes in the runs that have ended. Raises DataError for one that failed, unless it was asked to stop."""
        for worker, (run, process, begun) in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[worker]
            folder = Path(self.train_config(run).out_dir)
            said = (folder / "errors.txt").read_text().strip()
            if process.returncode == 3:
                (folder / "diverged.txt").write_text(said)
            if not self.look(run):
                if interrupts.asked:
                    continue
                last = said.splitlines()[-1:] or ["it said nothing"]
                raise DataError(f"{folder}: train.py ended with exit code {process.returncode}: {last[0]}")
            self.spent[run] = time.perf_counter() - begun, run.steps                 # with the time to start
            self.tell(run)

    def go(self):
        """Runs what is wanted until nothing more is. Returns False if it was asked to stop before."""
        with Interrupts() as interrupts:
            try:
                while not interrupts.asked:
                    self.collect(interrupts)
                    going = [run for run, *_ in self.running.values()]
                    todo = [run for run in self.wanted() if run not in self.losses and run not in going]
                    if not todo and not going:
                        return True
                    idle = [worker for worker in range(self.workers) if worker not in self.running]
                    found = [self.look(run) for run in todo[:len(idle)]]         # their losses may change what is wanted
                    for worker, run in zip(idle, todo if not any(found) else []):
                        self.start(worker, run)
                    self.tell()
                    time.sleep(0 if any(found) else 0.2)
                return False
            finally:
                for _, process, _ in self.running.values():
                    process.terminate()                                              # train.py saves first
                for _, process, _ in self.running.values():
                    process.wait()

    def tell(self, ended=None):
        """A line that changes, where there is a terminal; one that stays for a run that has ended."""
        runs = self.wanted()
        unknown = sum(self.best_rate(arch) is None for arch in self.configs)         # of these the sweeps alone
        steps = sum(run.steps for run in runs if run not in self.losses) + unknown * sum(self.steps) * len(self.seeds)
        seconds, done = map(sum, zip(*self.spent.values())) if self.spent else (0, 0)
        left = int(steps * seconds / done / self.workers) if done else 0
        every = len(runs) + unknown * len(self.steps) * len(self.seeds)
        line = f"{sum(run in self.losses for run in runs)}/{every} runs"
        line += f"   about {left // 60}:{left % 60:02d} left" if done else ""
        if ended:
            result = "diverged" if self.losses[ended] == math.inf else f"{self.losses[ended]:.4f}"
            line += f"   {ended.arch}, rate {ended.rate:g}, {ended.steps} steps, seed {ended.seed}: {result}"
        elif sys.stdout.isatty():
            line += "   now " + ", ".join(f"{run.arch} {run.rate:g}" for run, *_ in self.running.values())
        if sys.stdout.isatty():
            print(f"\r{line:<110}", end="\n" if ended else "", flush=True)
        elif ended:
            print(line, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The race: report

def race(config):
    """Tokens and time that each arch needs for the baseline's loss."""
    running = Race(config)
    lengths = ", ".join(f"{n:,}" for n in running.tokens)
    print(f"{', '.join(running.configs)}: {lengths} tokens of {config.data}, {config.seeds} seeds, "
          f"{running.workers} at a time, {running.dtype}, in {config.runs_dir}", flush=True)
    if not running.go():
        again = shlex.join(["python", "bench.py", "race", *words(config)])
        print(f"\nStopped; what was running is saved. To go on: {again}")
        return
    ratios = step_times(running) if config.timing else {}
    results = race_results(running, ratios)
    given = conditions(config, next(iter(running.configs.values())), running.machine, False)
    given[0]["threads"] = len(running.cores[0])
    race_tables(running, results)
    found = {"tokens": running.tokens, "steps": running.steps, "seeds": list(running.seeds), "archs": results}
    save("race", config, given, found, functools.partial(draw_race, running, results))


def step_times(running):
    """arch -> spread of its step time over the baseline's, by `speed`, which also prints its table."""
    options = {f.name: running.options[f.name] for f in fields(SpeedConfig) if f.name in running.options}
    options["out_dir"] = str(Path(running.config.out_dir, "race"))
    print("\nStep times, one arch at a time on the idle machine")
    return {name: result["ratio"] for name, result in speed(SpeedConfig(**options)).items()}


def race_results(running, ratios):
    """arch -> all that was found out about it."""
    results, baseline = {}, None
    for arch in running.configs:
        rate, sweep = running.best_rate(arch), running.sweep(arch)
        losses = np.array([[running.losses[RaceRun(arch, rate, steps, seed)] for seed in running.seeds]
                           for steps in running.steps])
        baseline = losses if baseline is None else baseline
        factor = speedup(running.tokens, baseline, losses, running.config.seed)
        if losses is baseline:
            factor = {"factor": 1.0, "low": None, "high": None, "tokens": running.tokens[-1]}
        with np.errstate(invalid="ignore"):                                          # nan where one diverged
            deviations = losses.std(1, ddof=1).tolist() if len(running.seeds) > 1 else None
        ratio = ratios.get(arch)
        in_time = ratio and {key: factor[key] and factor[key] / ratio["median"] for key in ("factor", "low", "high")}
        results[arch] = {"learning_rate": rate, "sweep": {"steps": running.sweep_steps, "losses": sweep},
                         "basin": basin(sweep), "at_edge": rate in (min(sweep), max(sweep)), "losses": losses.tolist(),
                         "mean": losses.mean(1).tolist(), "std": deviations,
                         "steps_needed": factor["tokens"] * running.steps[-1] / running.tokens[-1],
                         "speedup": factor, "time_ratio": ratio, "speedup_in_time": in_time}
    return results


def race_tables(running, results):
    def interval(values):
        return f"({values['low']:.2f}-{values['high']:.2f})" if values and values["low"] is not None else ""

    first = running.config.archs.split(",")[0]
    print(f"\nLearning rates, after {running.sweep_steps} steps; the basin is within 0.02 nats/token of the best")
    lines = [["arch", "best", "loss", "tried", "basin", "", "factor"]]
    for arch, r in results.items():
        b, tried = r["basin"], r["sweep"]["losses"]
        lines.append([arch, f"{r['learning_rate']:g}", f"{min(tried.values()):.4f}", f"{min(tried):g}-{max(tried):g}",
                      f"{b['low']:.2g}-{b['high']:.2g}", "at least" if b["at_least"] else "", f"{b['factor']:.1f}"])
    print_table(lines)
    print(f"\nFinal held-out loss, nats/token: mean and standard deviation over {len(running.seeds)} seeds")
    lines = [["arch", *(f"{n:,} tokens" for n in running.tokens)]]
    for arch, r in results.items():
        stds = [f" +- {std:.4f}" for std in r["std"] or ()] or [""] * len(running.tokens)
        lines.append([arch, *(f"{mean:.4f}{std}" for mean, std in zip(r["mean"], stds))])
    print_table(lines)
    print(f"\nTo the loss of {first} after {running.tokens[-1]:,} tokens")
    lines = [["arch", "tokens", "steps", "fewer tokens", "interval", "time ratio", "less time", "interval"]]
    for arch, r in results.items():
        ratio, in_time = r["time_ratio"], r["speedup_in_time"]
        lines.append([arch, f"{r['speedup']['tokens']:,.0f}", f"{r['steps_needed']:,.0f}",
                      f"\u00d7 {r['speedup']['factor']:.2f}", interval(r["speedup"])])
        lines[-1] += [f"{ratio['median']:.3f}", f"\u00d7 {in_time['factor']:.2f}"] if ratio else ["", ""]
        lines[-1] += [interval(in_time)]
    print_table(lines)
    for note in notes(running, results):
        print(note)


def notes(running, results):
    """What the tables alone would hide."""
    if len(running.seeds) < 3:
        yield f"No intervals: {len(running.seeds)} seeds, 3 are the least"
    if len(running.tokens) < 2:
        yield "No speed-up: it takes --lengths=2 or more"
    for run, loss in running.losses.items():
        if loss == math.inf:
            yield f"Diverged: {run.arch} at rate {run.rate:g}, {run.steps} steps, seed {run.seed}"
    for arch, r in results.items():
        if r["at_edge"]:
            yield f"{arch}: the best learning rate is at the edge of {MOST_RATES} that were tried"
        needed = r["speedup"]["tokens"]
        if math.isfinite(needed) and not running.tokens[0] <= needed <= running.tokens[-1]:
            yield f"{arch}: {needed:,.0f} tokens are beyond its runs' lengths, so extrapolated"


def draw_race(running, results):
    """Final loss against tokens, and against the learning rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (arch, r) in enumerate(results.items()):
        style = dict(color=f"C{i}", marker="o", ms=4, label=arch)
        left.errorbar(running.tokens, r["mean"], yerr=r["std"], capsize=3, **style)
        tried = dict(sorted(r["sweep"]["losses"].items()))
        right.plot(tried.keys(), tried.values(), **style)
        right.plot(r["learning_rate"], tried[r["learning_rate"]], "*", ms=14, color=f"C{i}")
    left.axhline(next(iter(results.values()))["mean"][-1], color="0.5", lw=0.8, ls=":")
    left.set(xlabel="tokens of complete runs", ylabel="final held-out loss (nats/token)", xscale="log",
             title=f"mean and standard deviation, {len(running.seeds)} seeds")
    left.set_xticks(running.tokens, [f"{n:,}" for n in running.tokens])
    left.minorticks_off()
    right.set(xlabel="peak learning rate", xscale="log", title=f"{running.sweep_steps} steps, one seed")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


BENCHMARKS = {"speed": (SpeedConfig, speed), "sample": (DecodeConfig, sample), "race": (RaceConfig, race)}


def main(argv):
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return
    choose("benchmark", argv[0], BENCHMARKS)
    cls, run = BENCHMARKS[argv[0]]
    config = parse(cls, argv[1:], f"{run.__doc__} How it is measured: python bench.py --help")
    if config.threads:
        torch.set_num_threads(config.threads)
    run(config)


if __name__ == "__main__":
    run_script(main, less="all archs are held at once: fewer --archs or a smaller --batch_size may fit")
