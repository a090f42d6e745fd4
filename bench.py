"""
Measure what normalization costs, and what it gains.

    python bench.py speed                       # a training step of every arch, at laptop size
    python bench.py memory --size=0.5b          # what a step keeps on a GPU, counted without one
    python bench.py sample --batch_size=4       # decoding with the KV cache
    python bench.py race --n_layer=3 --n_embd=64 --block_size=128       # who learns most: hours
    python bench.py curves out/angpt out/ngpt   # runs of train.py in one picture

`python bench.py race --help` lists its options. Ratios are to the first of --archs, within a round;
GPT+ is rmsnorm+qk_norm. memory's largest batch leaves a tenth of a card free. A race makes complete
runs of so many tokens for each parameter of the first arch. At every length it searches with one seed
for each arch's best: half and twice the rate, in pre-norm families a third and three times the
embed_std, on from there while that is better; then all seeds run there. Its "fewer tokens" come with
the ends of Welch's 95% t interval. The same command goes on from --results, a row for every run.
"""
import json
import math
import multiprocessing
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Thread
from unittest.mock import patch

from train import (Diverged, TrainConfig, compile_blocks, join_machine, make_model, make_optimizer,
                   open_corpus, optimizer_step, read_log, resolve, train)     # before torch
import numpy as np
import pandas as pd
import torch
from filelock import FileLock
from matplotlib.figure import Figure
from scipy.stats import ttest_ind
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from model import ARCHS, GPT, ConfigError
from prepare import at_least, atomic, blame, choose, expect, run_script, typed

# Okabe and Ito's colours, which the colour-blind tell apart
COLORS = {"rmsnorm+qk_norm": "#000000", "layernorm": "#E69F00", "rmsnorm": "#56B4E9", "powernorm": "#009E73",
          "normformer": "#CC79A7", "ngpt": "#0072B2", "angpt": "#D55E00"}
EVERY_ARCH = ",".join(COLORS)

@dataclass
class SpeedConfig:
    """The benchmark."""
    archs: str = EVERY_ARCH              # what to compare, the baseline first; +qk_norm is a switch
    out_dir: str = "out/bench"           # folder for the results
    rounds: int = 20                     # measured after three more

@dataclass
class MemoryConfig:
    """The benchmark."""
    archs: str = EVERY_ARCH              # what to count; +qk_norm is a switch
    out_dir: str = "out/bench"           # folder for the results

@dataclass
class SampleConfig:
    """The benchmark."""
    archs: str = EVERY_ARCH              # what to compare, the baseline first; +qk_norm is a switch
    out_dir: str = "out/bench"           # folder for the results
    rounds: int = 20                     # measured after three more
    batch_size: int = 1                  # sequences decoded side by side
    new_tokens: int = 65                 # generated after 16 of a prompt; the first is not measured

@dataclass
class RaceConfig:
    """The race."""
    archs: str = EVERY_ARCH              # what to compare, the baseline first; +qk_norm is a switch
    out_dir: str = "out/bench"           # folder for the picture
    results: str = "out/bench/race.json"  # all runs that have ended, added to those that are there
    tokens_per_parameter: str = "1,5,20"  # of the runs of each length
    sweep: bool = True                   # search for rates and embed_stds; false: the recipes'
    seed: int = 1                        # the first, with which the search is made
    seeds: int = 3                       # runs at the best point
    workers: int | None = None           # archs at a time, a thread each (one a core; on a GPU one)

@dataclass
class CurvesConfig:
    """Options, before, between or behind the folders, as --name=value."""
    key: str = "val_loss"                # what to draw, as log.jsonl calls it
    usual: bool = False                  # in grey, other seeds of out/<arch> with default options
    out_dir: str = "out/bench"           # folder for the picture

def train_config(name, given, **changes):
    """The TrainConfig of one of --archs, with `changes` of what was typed. Raises ConfigError."""
    arch, _, switch = name.partition("+")
    choose(f"archs={name}: switch", switch, ("", "qk_norm"))
    return TrainConfig(**{"arch": arch, "qk_norm": switch == "qk_norm", **given, **changes})

def resolve_each(archs, given):
    """name -> resolved TrainConfig of --archs."""
    return {name: resolve(train_config(name, given)) for name in archs.split(",")}

def label(name):
    return name.replace("rmsnorm+qk_norm", "GPT+")

def print_table(lines):
    """Prints dicts, the first of whose values names the line."""
    table = pd.DataFrame(lines)
    table = table.set_index(table.columns[0]).rename_axis(None)
    print(table.to_string(float_format="{:,.2f}".format))

# ---- Speed and sample ----------------------------------------------------------------------------

# Dense bfloat16 operations a second, from the data sheets
PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100-SXM4-40GB": 312e12,
              "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA GeForce RTX 4090": 165e12}

def flops_per_token(model):
    """6 for a weight; in a layer 12 n_embd a position looked at, on average half of block_size."""
    c = model.config
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return 6 * weights + 12 * c.n_layer * c.n_embd * c.block_size // 2

def now(device):
    """Seconds; a GPU, which runs behind the program, is waited for."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()

def make_step(config, machine):
    """A function that takes a step, of one micro-batch by default, and returns what that took."""
    micro_step = config.batch_size * config.block_size
    if "total_batch_size" not in config.given:
        config.total_batch_size = micro_step
    tokens = config.total_batch_size
    model = make_model(config, machine.device)
    optimizer = make_optimizer(model, config)
    compile_blocks(model, config, machine)
    size = config.batch_size, config.block_size + 1
    rows = torch.randint(config.vocab_size, size, device=machine.device)
    micro_batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())] * (tokens // micro_step)
    gpu = torch.cuda.get_device_name() if machine.device.type == "cuda" else None

    def step():
        start = now(machine.device)
        optimizer_step(0, model, optimizer, micro_batches, config, machine)
        seconds = now(machine.device) - start
        took = {"ms/step": 1e3 * seconds, "tokens/s": tokens / seconds}
        if gpu in PEAK_FLOPS and machine.dtype == torch.bfloat16:
            took["MFU"] = tokens / seconds * flops_per_token(model) / PEAK_FLOPS[gpu]
        return took
    return step

def in_turns(jobs, rounds, warmup=3):
    """name -> what its job, a function, returned: a dict a round."""
    order = random.Random(1337)
    found = {name: [] for name in jobs}
    for i in tqdm(range(warmup + rounds), leave=False, disable=None):
        # Compiling while the clock runs would make a wrong number: after the warm-up it is an error
        with torch.compiler.set_stance("default" if i < warmup else "fail_on_recompile"):
            for name in order.sample(list(jobs), len(jobs)):
                found[name].append(jobs[name]())
    return {name: took[warmup:] for name, took in found.items()}

def spread(values):
    p10, median, p90 = values.quantile([0.1, 0.5, 0.9])
    return f"{median:,.3f} ({p10:,.3f}-{p90:,.3f})"

def compare(name, jobs, options, given, machine):
    """Prints what jobs measure, of the first number the ratio to the first job's; writes all."""
    found = in_turns(jobs, options.rounds)
    lines = []
    for arch, rounds in found.items():
        values = pd.DataFrame(rounds)
        key, *others = values
        if not lines:
            baseline = values[key]
        line = {"arch": label(arch), f"{key} (10%-90%)": spread(values[key]),
                "ratio (10%-90%)": spread(values[key] / baseline)}
        lines.append(line | {other: f"{values[other].median():,.3f}" for other in others})
    print_table(lines)
    found = {"machine": f"{machine.device}, {torch.get_num_threads()} threads, {machine.dtype}",
             "torch": torch.__version__, "options": vars(options) | given, "found": found}
    print(found["machine"])
    Path(options.out_dir, f"{name}.json").write_text(json.dumps(found))

def speed(options, given):
    """A training step of every arch."""
    given = {"compile": "true", **given}
    torch._dynamo.config.recompile_limit = 64            # archs of one family share their code
    torch._dynamo.config.specialize_float = True         # but not their constants
    configs = resolve_each(options.archs, given)
    machine = join_machine(next(iter(configs.values())))
    jobs = {name: make_step(config, machine) for name, config in configs.items()}
    compare("speed", jobs, options, given, machine)

def decode(model, prompt, new_tokens):
    """The rate of a greedy continuation of `prompt` (B, T) from its first new token to the last."""
    tokens = model.generate(prompt, new_tokens, temperature=0)
    next(tokens)
    start = now(prompt.device)
    for _ in tokens:
        pass
    return {"tokens/s": len(prompt) * (new_tokens - 1) / (now(prompt.device) - start)}

def sample(options, given):
    """Decoding with every arch."""
    configs = resolve_each(options.archs, given)
    first = next(iter(configs.values()))
    machine = join_machine(first)
    prompt = torch.randint(first.vocab_size, (options.batch_size, 16), device=machine.device)
    jobs = {name: partial(decode, make_model(config, machine.device), prompt, options.new_tokens)
            for name, config in configs.items()}
    compare("sample", jobs, options, given, machine)

# ---- Memory --------------------------------------------------------------------------------------

class AsCompiled(torch.nn.Module):
    """A block that keeps for its backward what it would if it were compiled."""
    def __init__(self, block):
        from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
        from torch._inductor.decomposition import select_decomp_table           # two seconds
        super().__init__()
        self.block = block
        call = lambda tensors, *inputs: torch.func.functional_call(block, tensors, inputs)
        self.traced = aot_function(call, nop, partition_fn=min_cut_rematerialization_partition,
                                   decompositions=select_decomp_table())

    def forward(self, h, cos, sin, cache):
        tensors = dict(self.block.named_parameters()) | dict(self.block.named_buffers())
        return self.traced(tensors, h, cos, sin)

def peak_bytes(config, n_layer, batch_size):
    """The most that a training step holds at once, the last of several micro-steps."""
    from torch.distributed._tools.mem_tracker import MemTracker
    dtype = getattr(torch, config.dtype)
    # attend goes a GPU's way then: the formula, which is for CPUs, keeps all attention weights
    with FakeTensorMode(), patch.object(torch.Tensor, "is_cpu", False):
        model = GPT(replace(config, n_layer=n_layer))
        optimizer = make_optimizer(model, config)
        if config.compile == "true":
            model.blocks = torch.nn.ModuleList([AsCompiled(block) for block in model.blocks])
        idx = torch.zeros(batch_size, config.block_size, dtype=torch.long)
        def step():
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False):
                loss = model(idx, idx, loss_only=True)[1]
            loss.backward()
            optimizer.step()
        step()  # AdamW's moments are there from now on, and gradients
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

def memory_of(config):
    """(bytes that a step holds whatever its batch, bytes for each sequence of a micro-step)"""
    by_batch = []
    for batch_size in (1, 2):
        one, two = [peak_bytes(config, n_layer, batch_size) for n_layer in (1, 2)]
        by_batch.append(one + (config.n_layer - 1) * (two - one))
    sequence = by_batch[1] - by_batch[0]
    return by_batch[0] - sequence, sequence

def memory(options, given):
    """The peak memory of a step of every arch, and the batch that fits a GPU, without a GPU."""
    given = {"compile": "true", "dtype": "bfloat16", **given}
    lines = []
    for name, config in tqdm(resolve_each(options.archs, given).items(), leave=False, disable=None):
        fixed, sequence = memory_of(config)
        line = {"GB": label(name), "fixed": fixed / 1e9, "a sequence": sequence / 1e9,
                f"batch_size={config.batch_size}": (fixed + config.batch_size * sequence) / 1e9}
        for card in (24, 40, 80, 141):
            fitting = (0.9e9 * card - fixed) / sequence
            line[f"{card} GB"] = 2 ** int(math.log2(fitting)) if fitting >= 1 else 0
        lines.append(line)
    print_table(lines)
    found = {"options": vars(options) | given, "found": lines}
    Path(options.out_dir, "memory.json").write_text(json.dumps(found))

# ---- Race ----------------------------------------------------------------------------------------

def climb(loss_at, starts, directions):
    """From the best of `starts` on a grid to its best neighbour until none is better."""
    centre, best = None, min(starts, key=loss_at)
    while best != centre:
        centre = best
        around = [(centre[0] + i, centre[1] + j) for i, j in directions]
        best = min([centre, *around], key=loss_at)
    return best

def count_parameters(config):
    with torch.device("meta"):                           # shapes alone
        return sum(p.numel() for p in GPT(config).parameters())

def train_once(options):
    """(held-out loss, seconds) at the end of a run with these options; None where it diverges."""
    with tempfile.TemporaryDirectory() as folder:
        end = options["max_steps"]
        rest = dict(eval_interval=end, checkpoint_interval=end, out_dir=f"{folder}/run")
        try:
            last = train(TrainConfig(**options | rest), say=None)[-1]
        except Diverged:
            return None, None
    return last["val_loss"], round(last["seconds"], 1)

# Options of train.py that a benchmark sets itself, or that have no meaning in one
NOT_HERE = {"arch", "qk_norm", "resume", "init_from", "eval_only", "max_steps", "eval_interval", "checkpoint_interval"}
# What differs between the runs of a race, or decides no loss
VARIES = NOT_HERE | {"learning_rate", "embed_std", "seed", "checkpoint_blocks", "size", "data", "out_dir", "device",
                      "log_interval"}
BY_RECIPE = {"weight_decay", "warmup_ratio", "pn_warmup"}

def common_options(config, corpus, machine):
    """What decides the losses of a race beside what tells its runs apart."""
    varies = VARIES | BY_RECIPE - config.given.keys()
    common = {name: value for name, value in asdict(config).items() if name not in varies}
    common["dtype"] = str(machine.dtype).removeprefix("torch.")
    return common | {"train_tokens": sum(map(len, corpus.train.shards)),
                     "val_tokens": sum(map(len, corpus.val.shards))}

def read_race(path):
    """{"common": options of all runs, "runs": rows}. Raises DataError."""
    with blame(f"{path}: expected a race's JSON"):
        saved = json.loads(Path(path).read_text())
        return {"torch": saved["torch"], "common": saved["common"], "runs": saved["runs"]}

def write_race(path, saved):
    with atomic(path) as file:
        file.write(json.dumps(saved).replace(' {"arch"', '\n{"arch"').encode())   # a run a line

def open_results(path, common):
    """Makes --results. Raises DataError if those there were made with other options."""
    if not Path(path).exists():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_race(path, {"torch": torch.__version__, "common": common, "runs": []})
    saved = read_race(path)["common"]
    others = [name for name in saved | common if saved.get(name) != common.get(name)]
    expect(not others, f"results={path}: made with other {', '.join(others)}; give another --results")

def loss_of(run, config, path):
    """The loss of a run, which has a row in the results or is made; inf where it diverged."""
    for row in read_race(path)["runs"]:
        if run.items() <= row.items():
            return math.inf if row["loss"] is None else row["loss"]
    loss, seconds = train_once(config.given)
    row = {**run, "parameters": count_parameters(resolve(config)), "loss": loss, "seconds": seconds}
    print(row, flush=True)
    with FileLock(Path(path).with_name(f".{Path(path).name}.lock")):
        saved = read_race(path)
        saved["runs"].append(row)
        write_race(path, saved)
    return loss_of(run, config, path)

def make_runs(lengths, options, given, name):
    """An arch's runs: at each length a search with the first seed, then all seeds where it ends."""
    if multiprocessing.parent_process():
        Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    recipe = train_config(name, given)
    directions = [(-1, 0), (1, 0)]
    if not ARCHS[recipe.arch].sphere:
        directions += [(0, -1), (0, 1)]
    best = 0, 0
    for steps in lengths:
        def loss_at(place, seed=options.seed):
            rate = float(f"{recipe.learning_rate * 2.0 ** place[0]:.3g}")
            std = float(f"{recipe.embed_std * 3.0 ** place[1]:.1g}")
            changes = dict(learning_rate=rate, embed_std=std, seed=seed)
            config = train_config(name, given, max_steps=steps, **changes)
            return loss_of(dict(arch=name, steps=steps, **changes), config, options.results)
        if options.sweep:
            best = climb(loss_at, [best, (0, 0)], directions)  # a shorter run's best can mislead
        for seed in range(options.seed, options.seed + options.seeds):
            loss_at(best, seed)

def in_a_process(*arguments):
    """Whether make_runs went well in a process of its own."""
    process = multiprocessing.get_context("spawn").Process(target=make_runs, args=arguments)
    process.start()
    process.join()
    return process.exitcode == 0

def end_with_parent():
    """However the race's own process ends, those that it has started end, too."""
    multiprocessing.parent_process().join()
    os._exit(1)

def race(options, given):
    """Which arch learns most from its tokens, each at its own best learning rate and embed_std."""
    with blame(f"tokens_per_parameter={options.tokens_per_parameter}: expected numbers like 1,5,20"):
        ratios = sorted(map(float, options.tokens_per_parameter.split(",")))
    names = options.archs.split(",")
    first = train_config(names[0], given)
    machine = join_machine(first)
    corpus = open_corpus(first, machine)
    given = {"eval_tokens": 2 ** 18, "vocab_size": corpus.vocab_size, **given}
    first = resolve_each(options.archs, given)[names[0]]       # a wrong name is told at once
    open_results(options.results, common_options(first, corpus, machine))
    batch = first.total_batch_size
    lengths = [max(1, round(ratio * count_parameters(first) / batch)) for ratio in ratios]
    workers = options.workers or (os.cpu_count() if machine.device.type == "cpu" else 1)
    with ThreadPool(workers) as threads:
        went_well = threads.map(partial(in_a_process, lengths, options, given), names, chunksize=1)
    expect(all(went_well), f"a process has failed; the same command goes on from {options.results}")
    report(options, names, ratios, lengths, batch)

def at_best(rows, arch, steps, seeds):
    """The seeds' losses at the best setting by the first's, named (learning_rate, embed_std)."""
    runs = pd.DataFrame(rows).astype({"loss": float}).fillna({"loss": math.inf})   # it diverged
    here = runs[(runs["arch"] == arch) & (runs["steps"] == steps)]
    settings = here.pivot_table(index=["learning_rate", "embed_std"], columns="seed", values="loss")
    settings = settings[list(seeds)].dropna()
    return settings.loc[settings.iloc[:, 0].idxmin()]

def fewer_tokens(tokens, baseline, losses):
    """Longest tokens over those with which an arch reaches the baseline's mean loss there, by straight
    lines in loss (lengths, seeds) against log tokens: the first that falls through it counts, below
    all losses the last, above all the first; 0 where that does not fall. nan for a single length."""
    target, last = baseline[-1].mean(), len(tokens) - 1
    if last == 0 or not math.isfinite(target):
        return math.nan
    mean = losses.mean(1)
    crossed = [i for i in range(last) if mean[i] >= target >= mean[i + 1]]
    i = crossed[0] if crossed else 0 if target > max(mean) else last - 1
    if not np.isfinite(mean).all() or mean[i] <= mean[i + 1]:
        return 0.0
    share = (mean[i] - target) / (mean[i] - mean[i + 1])
    return tokens[last] / tokens[i] * (tokens[i] / tokens[i + 1]) ** share

def interval_of_factor(tokens, baseline, losses):
    """The factors at the ends of Welch's 95% t interval of the difference of the longest runs."""
    difference = losses[-1].mean() - baseline[-1].mean()
    ends = ttest_ind(losses[-1], baseline[-1], equal_var=False).confidence_interval()
    return sorted(fewer_tokens(tokens, baseline + difference - end, losses) for end in ends)

def report(options, names, ratios, lengths, batch):
    """Prints and draws a race: best rate (embed_std): mean of the seeds (lowest-highest)."""
    rows = read_race(options.results)["runs"]
    tokens = batch * np.array(lengths)
    seeds = range(options.seed, options.seed + options.seeds)
    losses = {}
    lines = []
    for name in names:
        best = [at_best(rows, name, steps, seeds) for steps in lengths]
        losses[name] = np.array(best)
        line = {"tokens a parameter": label(name)}
        for ratio, n, row in zip(ratios, tokens, best):
            rate, std = row.name
            seen = f"{row.mean():.4f} ({row.min():.4f}-{row.max():.4f})"
            line[f"{ratio:g} ({n:,})"] = f"{rate:g} ({std:g}): {seen}"
        both = tokens, losses[names[0]], losses[name]
        line["fewer tokens"] = fewer_tokens(*both)
        if options.seeds > 1 and name != names[0]:
            line["2.5%"], line["97.5%"] = interval_of_factor(*both)
        lines.append(line)
    print_table(lines)
    draw_race(ratios, losses, Path(options.out_dir, "race.png"))

def draw_race(ratios, losses, path):
    """Losses (lengths, seeds) over the mean of the first arch's; bars from lowest to highest."""
    losses = {name: np.where(np.isinf(found), math.nan, found) for name, found in losses.items()}
    first = next(iter(losses))
    axes = Figure(figsize=(9, 4), dpi=200, layout="constrained").subplots()
    for i, (name, found) in enumerate(losses.items()):
        over = found - losses[first].mean(1, keepdims=True)
        mean = over.mean(1)
        bars = mean - over.min(1), over.max(1) - mean
        x = np.array(ratios) * 1.03 ** i                 # side by side, so that bars are seen
        axes.errorbar(x, mean, bars, color=COLORS.get(name, f"C{i}"), fmt="o-", ms=3, label=label(name))
    axes.set(xscale="log", xlabel="tokens a parameter", ylabel=f"loss over {label(first)}'s; bars: all seeds")
    axes.set_xticks(ratios, map("{:g}".format, ratios))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    axes.figure.savefig(path)

# ---- Curves --------------------------------------------------------------------------------------

def curves(options, folders):
    """Runs of train.py in one picture."""
    expect(folders, "curves: no folders of runs are given")
    axes = Figure(figsize=(9, 5), dpi=100, layout="constrained").subplots()
    path = Path(__file__).with_name("assets") / "usual.json"     # arch -> seed -> tokens -> loss
    usual = json.loads(path.read_text())["runs"] if options.usual else {}
    for folder in folders:
        expect(Path(folder).is_dir(), f"{folder}: no such folder; train.py writes out/<arch>")
        shown = [record for record in read_log(folder) if record["step"] and options.key in record]
        expect(shown, f"{folder}/log.jsonl: no {options.key}")
        tokens = [record["tokens"] / 1e6 for record in shown]
        axes.plot(tokens, [record[options.key] for record in shown], "o-", ms=3, label=folder)
        for losses in usual.get(Path(folder).name, {}).values():
            axes.plot([int(n) / 1e6 for n in losses], losses.values(), color="0.85", lw=4, zorder=0)
    axes.set(xlabel="tokens (millions)", ylabel=options.key)
    axes.legend()
    axes.figure.savefig(f"{options.out_dir}/curves.png")
    print(f"{options.out_dir}/curves.png")

COMMANDS = {"speed": (speed, SpeedConfig), "sample": (sample, SampleConfig), "race": (race, RaceConfig),
            "memory": (memory, MemoryConfig), "curves": (curves, CurvesConfig)}

def main(argv):
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return
    name, *words = argv
    choose("benchmark", name, COMMANDS)
    command, kind = COMMANDS[name]
    if command is curves:
        folders = [word for word in words if not word.startswith("-")]
        given = typed([word for word in words if word not in folders], curves.__doc__, kind)
    else:
        given = typed(words, command.__doc__, kind, TrainConfig)
    for option in NOT_HERE & given.keys():
        raise ConfigError(f"{option}={given[option]}: no option of bench.py {name}; archs go to --archs")
    options = kind(**{f.name: given.pop(f.name) for f in fields(kind) if f.name in given})
    at_least(1, options, *{"rounds", "batch_size", "new_tokens", "seeds", "workers"} & vars(options).keys())
    Path(options.out_dir).mkdir(parents=True, exist_ok=True)
    command(options, folders if command is curves else given)

if __name__ == "__main__":
    run_script(main)
