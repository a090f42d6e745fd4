"""
Measure what normalization costs.

    python bench.py speed                                    # a training step of every arch, at laptop size
    python bench.py speed --compile=false --archs=rmsnorm+qk_norm,ngpt       # two of them; nothing to compile: quicker
    python bench.py speed --size=0.5b --batch_size=8 --block_size=2048       # anGPT's Table 2, where GPT+ comes first
    python bench.py sample --batch_sizes=1,4,16 --threads=1  # decoding with the KV cache
    python bench.py sample --fold=true                       # the same with constant factors moved into the weights

It prints a table and writes out/bench/<name>.json, raw values included, and <name>.png. All archs live in one process
and take turns, in a new order every round, so that a machine slowing down slows them all. Ratios are taken within a
round, to the baseline, the first of --archs. Brackets and error bars go from the 10th to the 90th percentile of the
rounds: the spread of single rounds, not the uncertainty of their median.

speed   train.py's own optimizer_step with one micro-batch (forward, backward, clipping, AdamW, project_) of random
        tokens that lie on the device, so no loading. MFU: against this machine's own matrix products, the best seen.
        Memory: weights, AdamW's state and the most that one more step has torch allocate, without the program itself
        and the scratch space of libraries. Compiling takes about half a minute an arch, the first time.
sample  model.generate, greedy, from a random prompt; eager and float32 as in sample.py. The first token, which takes
        the reading of the prompt, is not in it.
"""
import contextlib
import functools
import inspect
import itertools
import os
import platform
import random
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from model import GPT, ConfigError, GPTConfig, attention_kernel, choose, option
from prepare import DataError, write_json
from train import (SIZES, Diverged, Machine, TrainConfig, flops_per_token, make_optimizer, matmul_flops, optimizer_step,
                   parse, resolve)

EVERY_ARCH = "rmsnorm+qk_norm,layernorm,rmsnorm,powernorm,normformer,ngpt,angpt"


@dataclass
class BenchConfig:
    """Options of every benchmark. None stands for what train.py would use."""

    archs: str = option(EVERY_ARCH, "what to compare, the baseline first; +name turns on a switch of the model")
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
    out_dir: str = option("out/bench", "folder for results")

    def __post_init__(self):
        for f in fields(self):
            value, least = getattr(self, f.name), {"seed": 0, "new_tokens": 2}.get(f.name, 1)
            if type(value) is int and value < least:
                raise ConfigError(f"{f.name}={value}: expected at least {least}")


@dataclass
class SpeedConfig(BenchConfig):
    batch_size: int | None = option(None, "sequences in a step (by size)")
    dtype: str = option("auto", "auto | float32 | bfloat16 (autocast; weights stay float32)")
    compile: str = option("auto", "auto | true | false: torch.compile; auto: if train.py would at this size")


@dataclass
class DecodeConfig(BenchConfig):
    batch_sizes: str = option("1,4,16", "sequences decoded side by side, with commas between")
    prompt_tokens: int = option(16, "length of the prompt")
    new_tokens: int = option(65, "tokens generated, of which the first is not measured")
    fold: bool = option(False, "move constant factors into the weights first (GPT.fold_)")
    dtype = "float32"                                    # no option: sample.py has none either

    def sizes(self):
        words = self.batch_sizes.split(",")
        if not all(word.isdecimal() and int(word) for word in words):
            raise ConfigError(f"batch_sizes={self.batch_sizes}: expected whole numbers from 1, with commas between")
        return list(dict.fromkeys(map(int, words)))


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
    for name in config.archs.split(","):
        arch, *extras = name.split("+")
        for extra in extras:
            choose(f"archs={name}: switch", extra, switches)
        wanted = TrainConfig(**given, arch=arch, **dict.fromkeys(extras, True))
        found[name] = resolve(wanted, corpus_vocab=config.vocab_size or 257)
    return found


def machine_for(config):
    machine = Machine(config.device)
    machine.use(machine.fast_dtype() if config.dtype == "auto" else config.dtype)
    return machine


class RandomTokens:
    """Stands for train.py's Loader: one micro-batch, the same at every step."""

    def __init__(self, config, device):
        generator = torch.Generator().manual_seed(config.seed)
        rows = torch.randint(config.vocab_size, (config.batch_size, config.block_size + 1), generator=generator)
        self.pair = rows[:, :-1].contiguous().to(device), rows[:, 1:].contiguous().to(device)

    def batches(self, step, config, machine):
        yield self.pair


class Trainee:
    """A model with its optimizer. `step` takes a training step; returns its seconds and those of project_ in it."""

    def __init__(self, config, machine, compiles):
        self.config, self.machine = config, machine
        torch.manual_seed(config.seed)
        self.model = GPT(config.model_config()).to(machine.device)
        self.optimizer, self.loader = make_optimizer(self.model, config), RandomTokens(config, machine.device)
        # The models share the code of GPT.forward: none may pass through the guards of others (newer torch), nor meet
        # the limit of compilations that they add up to (older torch).
        torch._dynamo.config.recompile_limit = 64
        isolated = {"isolate_recompiles"} & inspect.signature(torch.compile).parameters.keys()
        self.forward = torch.compile(self.model, **dict.fromkeys(isolated, True)) if compiles else self.model
        self.project_, self.model.project_ = self.model.project_, self.marked_project_

    def marked_project_(self):
        start = mark(self.machine.device)
        self.project_()
        self.projection = start, mark(self.machine.device)

    def step(self):
        start = mark(self.machine.device)
        optimizer_step(0, self.forward, self.model, self.optimizer, self.loader, self.config, self.machine)
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
    with torch.device("meta"):
        flops = first.max_steps * first.total_batch_size * flops_per_token(GPT(first.model_config()))
    compiles = machine.compiling_pays(flops) if first.compile == "auto" else first.compile == "true"
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
    kernel = attention_kernel(machine.device.type, machine.dtype, first.block_size)
    here = {"processor": processor(machine.device), "device": machine.device.type, "threads": torch.get_num_threads(),
            "dtype": dtype, "compile": compiles, "attention": kernel, "matmul_gflops": round(machine.peak / 1e9),
            "torch": str(torch.__version__), "python": platform.python_version()}
    options = {key: getattr(first, key, None) if value is None else value for key, value in asdict(config).items()}
    return here, {key: value for key, value in options.items() if key not in here}


def report(name, config, given, lines, results, panels):
    """Prints the table `lines`, its titles first, under what was given; writes name.json and name.png into out_dir."""
    hidden = ("archs", "seed", "out_dir")
    head = "\n".join(", ".join(f"{key} {value}" for key, value in part.items() if key not in hidden) for part in given)
    print(f"{head}\n")
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join([line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]))
    path = Path(config.out_dir, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(f"{path}.json", {"benchmark": name, "machine": given[0], "options": given[1],
                                "baseline": next(iter(results)), "archs": results})
    draw(f"{path}.png", head, panels)
    print(f"\n{path}.json\n{path}.png")


def draw(path, title, panels):
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
    figure.savefig(path, dpi=110)


BENCHMARKS = {"speed": (SpeedConfig, speed), "sample": (DecodeConfig, sample)}


def main(argv):
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return
    choose("benchmark", argv[0], BENCHMARKS)
    cls, run = BENCHMARKS[argv[0]]
    config = parse(cls, argv[1:], __doc__)
    if config.threads:
        torch.set_num_threads(config.threads)
    run(config)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ConfigError, DataError) as error:
        sys.exit(print(f"bench.py: {error}", file=sys.stderr) or 2)
    except torch.OutOfMemoryError:
        message = "bench.py: out of memory; all archs are held at once: fewer --archs or a smaller --batch_size may fit"
        sys.exit(print(message, file=sys.stderr) or 2)
    except Diverged as error:
        sys.exit(print(f"bench.py: {error}", file=sys.stderr) or 3)
