"""
Measure what normalization costs, and what it gains.

    python bench.py speed                                       # a training step of every arch, at laptop size
    python bench.py speed --size=0.5b --batch_size=8 --archs=rmsnorm+qk_norm,ngpt,angpt       # anGPT's Table 2
    python bench.py memory --size=0.5b --batch_size=8           # what a step keeps on a GPU, without one
    OMP_NUM_THREADS=1 python bench.py sample                    # decoding with the KV cache
    python bench.py race --n_layer=3 --n_embd=64 --block_size=128 --batch_size=16             # who learns most: hours
    python bench.py law small.json middle.json large.json       # of races at several sizes: loss against parameters
    python bench.py curves out/angpt out/ngpt --follow          # runs of train.py in one picture, as they go on
    python bench.py hellaswag --out_dir=out/angpt,out/ngpt      # questions about everyday life, for larger models

Results go to out/bench. Ratios are to the first of --archs; GPT+ is rmsnorm+qk_norm. In speed and sample archs take
turns in one process, in a new order every round; ratios are taken within a round, so that what slows a whole round
cancels. Brackets go from the 10th to the 90th percentile of the rounds.

speed   train.py's optimizer_step (forward, backward, clipping, AdamW, project_) on one batch of random tokens, compiled
        unless --compile=false; compiling takes a quarter of a minute an arch. Memory, on CUDA alone: weights, AdamW's
        state, what a step adds.
memory  the most that a training step holds: weights, gradients of an earlier micro-step, AdamW's moments, activations,
        head. Counted with torch's fake tensors in models of one and two layers and sequences, all else by straight
        lines. Compiled (unless --compile=false): what the compiler's partitioner keeps of a block for its backward. GB
        are 10^9 bytes; the largest batch_size, a power of two, leaves a tenth of the card free.
sample  model.generate, greedy, float32, not compiled; the first token, with the reading of the prompt, is left out.
race    complete runs, each with a cosine of its own, of so many tokens for each parameter of the first arch. At every
        length a search with the first seed, separately for each arch: on a grid of rates, a factor 2 apart, and in
        pre-norm families of embed_stds, a factor 3 apart, it goes to the best neighbour until none is better; it starts
        from the shorter length's best, at first from the recipe's. Then all seeds there; a seed sets weights and order
        of the data. Fewer tokens: those of the longest runs over those with which an arch reaches the baseline's loss
        there, by straight lines in loss against log tokens; in brackets a bootstrap over seeds, 2.5% to 97.5%, which of
        three seeds holds the true factor about three times in four. Every run that has ended is in --results, a JSON,
        from which the same command goes on, elsewhere too: no run is made twice.
law     a N^-b + c, N parameters, through the losses of races at several sizes with the same tokens a parameter.
        Brackets: a bootstrap over seeds, 2.5% to 97.5%; with two seeds a size it holds the truth about three times in
        four. It knows nothing of errors in the law's form; how large these are, the same law without the smallest size
        may tell (dashed).
hellaswag  how often the right one of four endings is the likeliest, by log-likelihood and by that per character. Text
        and tokens as in lm-evaluation-harness 0.4 (task hellaswag 1.0), which gives GPT-2 124M 0.2892 and 0.3114 (not
        run here). Chance: 0.25; +-: a standard error. Rows of --file: ctx_a, ctx_b, activity_label, endings, label.
"""
import copy
import functools
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import re
import signal
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from unittest.mock import patch

from train import (RECIPES, Diverged, TrainConfig, find_device, find_dtype, flops_per_token, for_training, join_machine,
                   load_model, lock_folder, make_model, make_optimizer, open_corpus, optimizer_step, peak_flops,
                   read_ahead, read_log, resolve, validate)          # before torch: it sets how torch's threads wait
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from model import ARCHS, GPT, ConfigError
from prepare import (Count, DataError, Device, Limit, Positive, WholeNumber, atomic, blame, check, choose, encode,
                     expect, run_script, typed)

# Okabe and Ito's colours, which the colour-blind tell apart
COLORS = {"rmsnorm+qk_norm": "#000000", "layernorm": "#E69F00", "rmsnorm": "#56B4E9", "powernorm": "#009E73",
          "normformer": "#CC79A7", "ngpt": "#0072B2", "angpt": "#D55E00"}

# Options of train.py that a benchmark sets itself, or that have no meaning in one
NOT_HERE = ("arch", "qk_norm", "resume", "init_from", "eval_only", "max_steps", "eval_interval", "checkpoint_interval",
            "log_interval", "keep_best", "learning_rate", "embed_std")

def are_counts(text):
    return all(word.isdecimal() and int(word) > 0 for word in text.split(","))

def are_positive(text):
    try:
        return all(0 < float(word) < math.inf for word in text.split(","))
    except ValueError:
        return False

Counts = Annotated[str, Limit(are_counts, "whole numbers from 1, with commas between")]
Ratios = Annotated[str, Limit(are_positive, "numbers above 0, with commas between")]

class Checked:
    def __post_init__(self):
        check(self)

@dataclass
class SpeedConfig(Checked):
    """The benchmark."""
    archs: str = ",".join(COLORS)        # what to compare, the baseline first; +qk_norm turns that on
    out_dir: str = "out/bench"           # folder for tables and pictures
    rounds: Count = 20                   # measured after three more

@dataclass
class DecodeConfig(SpeedConfig):
    """The benchmark."""
    batch_sizes: Counts = "1,4,16"       # sequences decoded side by side
    new_tokens: Count = 65               # tokens generated after 16 of a prompt; the first is not measured

@dataclass
class MemoryConfig:
    """The benchmark."""
    archs: str = ",".join(COLORS)        # what to count; +qk_norm turns that on
    out_dir: str = "out/bench"           # folder for the table

@dataclass
class RaceConfig(Checked):
    """The race."""
    archs: str = ",".join(COLORS)        # what to compare, the baseline first; +qk_norm turns that on
    out_dir: str = "out/bench"           # folder for the picture
    results: str = "out/bench/race.json" # all runs that have ended, added to those that are there
    tokens_per_parameter: Ratios = "1,5,20"        # of the runs of each length
    sweep: bool = True                   # search for learning rates and embed_stds; false: the recipes'
    like: str | None = None              # results of another size, whose best multiples take the recipes' place
    seed: WholeNumber = 1                # the first, with which the search is made
    seeds: Count = 3                     # runs at the best point
    eval_tokens: Count = 2 ** 18         # held-out tokens that give a loss
    compile: Literal["true", "false"] = "false"    # torch.compile of blocks and loss
    workers: Count | None = None         # runs at a time, one thread each (one a core; on a GPU one)

@dataclass
class LawConfig(Checked):
    """Options."""
    tokens_per_parameter: Positive = 20.0          # which runs of the races
    at: Count = 100_000_000              # parameters for which the law is asked
    out_dir: str = "out/bench"           # folder for the picture

@dataclass
class CurvesConfig:
    """Options."""
    key: str = "val_loss"                # what to draw, as log.jsonl calls it
    follow: bool = False                 # draw anew every few seconds, until Ctrl-C
    out_dir: str = "out/bench"           # folder for the picture

@dataclass
class HellaswagConfig(Checked):
    """Options."""
    out_dir: str = "out/angpt"           # runs to score, or gpt2 and its like (lessons/gpt2.py), with commas between
    file: str | None = None              # questions, a .jsonl in HellaSwag's form (its validation set, fetched)
    batch_size: Count = 4                # questions at a time
    device: Device = "auto"              # auto: cuda if torch sees it, else cpu
    results_dir: str = "out/bench"       # folder for the table

def train_config(name, given, **changes):
    """The TrainConfig of one of --archs with what was typed, which `changes` go before. Raises
    ConfigError."""
    arch, _, switch = name.partition("+")
    choose(f"archs={name}: switch", switch, ("", "qk_norm"))
    return TrainConfig(**{"arch": arch, "qk_norm": switch == "qk_norm", **given, **changes})

def color_of(name, i):
    return COLORS.get(name, f"C{i}")

def label(name):
    return name.replace("rmsnorm+qk_norm", "GPT+")

# ---- Speed -----------------------------------------------------------------------------------------------------------

def now(device):
    """Milliseconds; a GPU, which runs behind the program, is waited for."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return 1e3 * time.perf_counter()

def bytes_kept(model, optimizer):
    """Bytes of weights, buffers and AdamW's state."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += state.values()
    return sum(x.nbytes for x in tensors)

class Training:
    """A model in training; a call takes a step on random tokens and returns what it took. The step
    is of one micro-batch unless --total_batch_size is given."""

    def __init__(self, config, machine):
        if "total_batch_size" not in config.given:
            config.total_batch_size = config.batch_size * config.block_size
        self.config, self.machine = config, machine
        self.model = make_model(config, machine, None)
        self.optimizer = make_optimizer(self.model, config)
        self.forward = for_training(self.model, config, machine)
        self.peak = peak_flops(machine)[0]
        rows = torch.randint(config.vocab_size, (config.batch_size, config.block_size + 1)).to(machine.device)
        self.batches = itertools.repeat((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))

    def __call__(self):
        device = self.machine.device
        on_cuda = device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = now(device)
        optimizer_step(0, self.forward, self.model, self.optimizer, self.batches, self.config, self.machine)
        ms = now(device) - start
        rate = 1e3 * self.config.total_batch_size / ms
        took = {"ms/step": ms, "tokens/s": rate, "MFU": rate * flops_per_token(self.model) / self.peak}
        if on_cuda:
            added = torch.cuda.max_memory_allocated() - before
            took["memory GB"] = (bytes_kept(self.model, self.optimizer) + added) / 1e9
        return took

def spread(values, baseline=1.0):
    """Median and 10th and 90th percentile of values or, round by round, of their ratios to a
    baseline's."""
    p10, median, p90 = np.quantile(np.divide(values, baseline), (0.1, 0.5, 0.9)).tolist()
    return {"median": median, "p10": p10, "p90": p90}

def in_turns(jobs, rounds, warmup=3):
    """name -> what its job returned, a dict a round, of jobs (name -> function) that are called
    once a round each."""
    order = random.Random(1337)
    found = {name: [] for name in jobs}
    for i in tqdm(range(warmup + rounds), leave=False, disable=None):
        # Compiling while the clock runs would make a wrong number: after the warm-up it is an error
        with torch.compiler.set_stance("default" if i < warmup else "fail_on_recompile"):
            for name in order.sample(list(jobs), len(jobs)):
                took = jobs[name]()
                if i >= warmup:
                    found[name].append(took)
    return found

def compare(found):
    """Of what in_turns returns: of the first number spread, and ratio to the first job's; of others
    the median. Prints a table of these; returns name -> all."""
    results = {}
    baseline = None
    for name, rounds in found.items():
        values = {key: [took[key] for took in rounds] for key in rounds[0]}
        first, *others = values
        baseline = baseline or values[first]
        results[name] = {"values": values, "spread": spread(values[first]), "ratio": spread(values[first], baseline)}
    lines = [["", f"{first} (10%-90%)", "ratio (10%-90%)", *others]]
    for name, r in results.items():
        cells = ["{median:,.3f} ({p10:,.3f}-{p90:,.3f})".format(**r[key]) for key in ("spread", "ratio")]
        cells += [f"{np.median(r['values'][key]):,.3f}" for key in others]
        lines.append([name, *cells])
    print_table(lines)
    return results

def speed(options, given):
    """A training step of every arch."""
    machine = join_machine(given.get("device", "auto"))
    machine.dtype = find_dtype(given.get("dtype", "auto"), machine)
    given = {"compile": "true", **given}
    torch._dynamo.config.recompile_limit = 64            # archs of one family share their code
    torch._dynamo.config.specialize_float = True         # but not their constants
    names = options.archs.split(",")
    jobs = {name: Training(resolve(train_config(name, given)), machine) for name in names}
    results = compare(in_turns(jobs, options.rounds))
    flops, source = peak_flops(machine)
    print(f"MFU is of {flops / 1e12:.3g} TFLOP/s, {source}")
    save("speed", options, given, machine, peak_flops=flops, archs=results)

# ---- Memory ----------------------------------------------------------------------------------------------------------

class AsCompiled(torch.nn.Module):
    """A block that keeps for its backward what it would if it were compiled."""
    def __init__(self, block):
        from functorch.compile import aot_function, min_cut_rematerialization_partition, nop  # they take two seconds
        from torch._inductor.decomposition import select_decomp_table
        super().__init__()
        self.block = block
        self.traced = aot_function(self.call, fw_compiler=nop, partition_fn=min_cut_rematerialization_partition,
                                   decompositions=select_decomp_table())

    def call(self, tensors, *inputs):
        return torch.func.functional_call(self.block, tensors, inputs)

    def forward(self, h, cos, sin, cache):
        tensors = dict(self.block.named_parameters()) | dict(self.block.named_buffers())
        return self.traced(tensors, h, cos, sin)

def peak_bytes(config):
    """The most that a training step holds at once, the last of several micro-steps. Nothing is
    computed, no memory taken: the tensors have shapes alone."""
    from torch.distributed._tools.mem_tracker import MemTracker
    dtype = getattr(torch, config.dtype)
    # attend goes a GPU's way then, at any length: the formula, which is for CPUs, keeps all attention weights
    with FakeTensorMode(), patch.object(torch.Tensor, "is_cpu", False):
        model = GPT(config.model_config())
        optimizer = make_optimizer(model, config)
        if config.compile == "true":
            model.blocks = torch.nn.ModuleList([AsCompiled(block) for block in model.blocks])
        idx = torch.zeros(config.batch_size, config.block_size, dtype=torch.long)

        def micro_step():
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False):
                loss = model(idx, idx, loss_only=True)[1]
            loss.backward()

        micro_step()
        optimizer.step()  # AdamW's moments are there from now on, and gradients
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            micro_step()
            optimizer.step()
    [parts] = tracker.get_tracker_snapshot("peak").values()
    return parts["Total"]

def memory_of(config):
    """(bytes that a step holds whatever its batch, bytes for each sequence of a micro-step)"""
    by_batch = []
    for batch_size in (1, 2):
        by_layers = []
        for layers in (1, 2):
            small = copy.copy(config)
            small.n_layer = layers
            small.batch_size = batch_size
            by_layers.append(peak_bytes(small))
        one, two = by_layers
        by_batch.append(one + (config.n_layer - 1) * (two - one))
    one, two = by_batch
    return one - (two - one), two - one

CARDS = (24, 40, 80, 141)  # GB

def memory(options, given):
    """The peak memory of a training step of every arch, and the batch that fits a GPU, without a
    GPU."""
    given = {"compile": "true", "dtype": "bfloat16", **given}
    found = {}
    for name in tqdm(options.archs.split(","), leave=False, disable=None):
        config = resolve(train_config(name, given))
        fixed, sequence = memory_of(config)
        largest = {}
        for card in CARDS:
            fitting = (0.9e9 * card - fixed) / sequence
            largest[card] = 2 ** int(math.log2(fitting)) if fitting >= 1 else 0
        found[name] = {"fixed": fixed, "sequence": sequence, "batch_size": config.batch_size,
                       "peak": fixed + config.batch_size * sequence, "largest": largest}
    lines = [["GB", "fixed", "a sequence", f"batch_size={config.batch_size}", *(f"{card} GB" for card in CARDS)]]
    for name, parts in found.items():
        sizes = [f"{parts[key] / 1e9:.2f}" for key in ("fixed", "sequence", "peak")]
        lines.append([label(name), *sizes, *(str(size) for size in parts["largest"].values())])
    print_table(lines)
    write_text(Path(options.out_dir, "memory.json"),
               json.dumps({"options": asdict(options) | given, "torch": str(torch.__version__), "archs": found}))

# ---- Decoding --------------------------------------------------------------------------------------------------------

def decoding(model, prompt, new_tokens):
    """The rate of one greedy continuation of `prompt` (B, T), from the first new token to the
    last."""
    tokens = model.generate(prompt, new_tokens, temperature=0)
    next(tokens)
    start = now(prompt.device)
    for _ in tokens:
        pass
    ms = now(prompt.device) - start
    return {"tokens/s": 1e3 * len(prompt) * (new_tokens - 1) / ms}

def sample(options, given):
    """Decoding with every arch, at every batch size."""
    machine = join_machine(given.get("device", "auto"))
    configs = {name: resolve(train_config(name, given)) for name in options.archs.split(",")}
    first = next(iter(configs.values()))
    most = first.block_size - 16                         # beyond it half is read anew
    if not 2 <= options.new_tokens <= most:
        raise ConfigError(f"new_tokens={options.new_tokens}: expected 2 to block_size - 16 = {most}")
    models = {name: make_model(config, machine, None) for name, config in configs.items()}
    results = {}
    for size in options.batch_sizes.split(","):
        prompt = torch.randint(first.vocab_size, (int(size), 16)).to(machine.device)
        print(f"batch size {size}")
        jobs = {}
        for name, model in models.items():
            jobs[name] = functools.partial(decoding, model, prompt, options.new_tokens)
        results[size] = compare(in_turns(jobs, options.rounds))
    save("sample", options, given, machine, batch_sizes=results)

def print_table(lines):
    widths = [max(len(cell) for cell in column) for column in zip(*lines)]
    for first, *cells in lines:
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
        print("  ".join(padded))

def save(name, options, given, machine, **found):
    """Prints what the numbers depend on; writes out_dir/name.json."""
    here = {"device": str(machine.device), "threads": torch.get_num_threads(),
            "dtype": str(machine.dtype).removeprefix("torch."), "torch": str(torch.__version__)}
    print(", ".join(f"{key} {value}" for key, value in here.items()))
    write_text(Path(options.out_dir, f"{name}.json"),
               json.dumps({"machine": here, "options": asdict(options) | given, **found}))

def write_text(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as file:
        file.write(text.encode())

# ---- Race ------------------------------------------------------------------------------------------------------------

def climb(loss_at, starts, directions):
    """Hill climbing over what is known, from the best of `starts`: (the top of the hill, places
    whose losses decide where it goes next). One of the two is None or empty. loss_at(place) is None
    where no run has ended yet; of equal places the centre is the best."""
    centre, around = None, starts
    while True:
        losses = [loss_at(place) for place in around]
        unknown = [place for place, loss in zip(around, losses) if loss is None]
        if unknown:
            return None, unknown
        best = around[losses.index(min(losses))]
        if best == centre:
            return centre, []
        centre = best
        around = [centre]
        for i, j in directions:
            around.append((centre[0] + i, centre[1] + j))

# What differs between the runs of a race, or decides no loss; recipes and data are told in other words
NOT_COMMON = {"arch", "qk_norm", "learning_rate", "embed_std", "max_steps", "seed", "weight_decay", "warmup_ratio",
              "pn_warmup", "checkpoint_blocks", "size", "data", "out_dir", "init_from", "resume", "eval_only", "device",
              "eval_interval", "checkpoint_interval", "log_interval", "keep_best"}

def common_options(config, corpus):
    """What decides the losses of a race beside what tells its runs apart."""
    common = {name: value for name, value in asdict(config).items() if name not in NOT_COMMON}
    for name in ("weight_decay", "warmup_ratio", "pn_warmup"):
        common[name] = config.given.get(name, {family: r.get(name) for family, r in RECIPES.items()})
    tokens = {"train_tokens": int(corpus.train.starts[-1]), "val_tokens": int(corpus.val.starts[-1])}
    return {**common, "data": Path(config.data).name, **tokens}

def difference(saved, ours):
    """What differs between two dicts of options, in words."""
    return [f"{name}={saved.get(name)}, now {value}" for name, value in ours.items() if saved.get(name) != value]

def finite(loss):
    return loss if math.isfinite(loss) else None         # JSON knows no inf

def best_places(path):
    """arch -> where the longest runs of a race were best. Raises DataError."""
    with blame(f"like={path}: expected a race's JSON"):
        archs = json.loads(Path(path).read_text())["archs"]
        return {name: tuple(arch["lengths"][-1]["place"]) for name, arch in archs.items()}

class Run(NamedTuple):
    arch: str
    steps: int
    learning_rate: float
    embed_std: float
    seed: int

class Race:
    """Which runs there are to make, and (loss, seconds) of those that have ended; the loss is inf
    where one diverged."""

    def __init__(self, options, given):
        self.options = options
        self.given = {**given, "eval_tokens": options.eval_tokens, "compile": options.compile}
        self.names = options.archs.split(",")
        self.seeds = range(options.seed, options.seed + options.seeds)
        self.machine = join_machine(given.get("device", "auto"))
        first = train_config(self.names[0], self.given)
        corpus = open_corpus(first, self.machine, None)
        first = resolve(first, corpus.vocab_size)
        first.dtype = str(find_dtype(first.dtype, self.machine)).removeprefix("torch.")
        self.given["dtype"] = first.dtype
        self.batch = first.total_batch_size
        self.common = common_options(first, corpus)
        self.ended = {}                                  # Run -> (loss, seconds)
        self.archs = {}                                  # what the JSON says of each arch
        self.configs = {name: resolve(train_config(name, self.given), corpus.vocab_size) for name in self.names}
        self.starts = dict.fromkeys(self.names, (0, 0))  # the recipes
        if options.like:
            self.starts |= best_places(options.like)
        self.steps = {}                                  # tokens a parameter -> steps, shortest first
        for ratio in sorted(float(word) for word in options.tokens_per_parameter.split(",")):
            self.steps[ratio] = max(1, round(ratio * self.parameters(self.names[0]) / self.batch))

    def parameters(self, name):
        with torch.device("meta"):
            model = GPT(self.configs[name].model_config())
        return sum(p.numel() for p in model.parameters())

    def searches_std(self, name):
        return not ARCHS[self.configs[name].arch].sphere

    def run_at(self, name, steps, place):
        """The first seed's run at a place (i, j) of the search's grid: the recipe's rate x 2^i,
        embed_std x 3^j."""
        rate = self.configs[name].learning_rate * 2.0 ** place[0]
        std = self.configs[name].embed_std * 3.0 ** place[1]
        return Run(name, steps, float(f"{rate:.3g}"), float(f"{std:.1g}"), self.options.seed)

    def place_of(self, run):
        rate = run.learning_rate / self.configs[run.arch].learning_rate
        std = run.embed_std / self.configs[run.arch].embed_std
        return round(math.log(rate, 2)), round(math.log(std, 3))

    def loss_at(self, name, steps, place):
        """The loss of that run; None where it has not ended."""
        return self.ended.get(self.run_at(name, steps, place), (None, None))[0]

    def follow(self, name):
        """(at each length, shortest first, the best run as far as it is known; runs to make now)"""
        directions = [(-1, 0), (1, 0)]
        if self.searches_std(name):
            directions += [(0, -1), (0, 1)]
        place = self.starts[name]
        best, wanted = [], []
        for steps in self.steps.values():
            if self.options.sweep:
                starts = [place, self.starts[name]]      # a shorter run's best alone can mislead
                place, unknown = climb(functools.partial(self.loss_at, name, steps), starts, directions)
                wanted += [self.run_at(name, steps, near) for near in unknown]
                if unknown:
                    break
            best.append(self.run_at(name, steps, place))
            wanted += [run for run in self.seeds_of(best[-1]) if run not in self.ended]
        return best, wanted

    def wanted(self):
        return [run for name in self.names for run in self.follow(name)[1]]

    def options_of(self, run):
        """train.py's options for a run."""
        name, steps, rate, std, seed = run
        config = train_config(name, self.given, max_steps=steps, learning_rate=rate, embed_std=std, seed=seed)
        return config.given

    def seeds_of(self, run):
        return [run._replace(seed=seed) for seed in self.seeds]

    def losses(self, name):
        """Of an arch's best runs: (lengths, seeds)."""
        return np.array([[self.ended[run][0] for run in self.seeds_of(best)] for best in self.follow(name)[0]])

    def read(self):
        """Takes up what --results holds. Raises DataError if that was made with other options."""
        path = Path(self.options.results)
        if not path.exists():
            return
        with blame(f"results={path}: expected a race's JSON"):
            saved = json.loads(path.read_text())
            others = difference(saved["common"], self.common)
            for row in saved["runs"]:
                loss, seconds = row.pop("loss"), row.pop("seconds")
                self.ended[Run(**row)] = (math.inf if loss is None else loss, seconds)
            self.archs = saved["archs"]
        expect(not others, f"results={path}: made with {'; '.join(others)}; give the same, or another --results")

    def write(self):
        """--results, a run a line."""
        for name in self.names:
            lengths = []
            for ratio, best in zip(self.steps, self.follow(name)[0]):
                losses = [finite(self.ended[run][0]) for run in self.seeds_of(best) if run in self.ended]
                lengths.append({"tokens_per_parameter": ratio, "steps": best.steps, "losses": losses,
                                "learning_rate": best.learning_rate, "embed_std": best.embed_std,
                                "place": self.place_of(best)})
            self.archs[name] = {"parameters": self.parameters(name), "lengths": lengths}
        rows = []
        for run, (loss, seconds) in sorted(self.ended.items()):
            rows.append(json.dumps(run._asdict() | {"loss": finite(loss), "seconds": seconds}))
        parts = {"torch": str(torch.__version__), "common": self.common, "archs": self.archs}
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in parts.items()]
        lines.append('"runs": [\n' + ",\n".join(rows) + "]")
        write_text(Path(self.options.results), "{" + ",\n".join(lines) + "}\n")

def leave(number, frame):
    raise SystemExit(128 + number)                       # so that what was started is ended, too

def train_alone(given):
    """(held-out loss with which train.py ends that is given these options, seconds); inf if it
    diverges. These are its steps and no others, without folder, log, checkpoints and validations on
    the way."""
    started = time.perf_counter()
    machine = join_machine(given.get("device", "auto"))
    config = TrainConfig(**given)
    corpus = open_corpus(config, machine, None)
    config = resolve(config, corpus.vocab_size)
    machine.dtype = find_dtype(config.dtype, machine)
    model = make_model(config, machine, None)
    optimizer = make_optimizer(model, config)
    forward = for_training(model, config, machine)
    micro_batches = read_ahead(corpus.train, 0, config, machine)
    try:
        for step in range(config.max_steps):
            optimizer_step(step, forward, model, optimizer, micro_batches, config, machine)
        loss = validate(config.max_steps, model, corpus, config, machine, {})["val_loss"]
    except Diverged:
        loss = math.inf
    return loss, round(time.perf_counter() - started, 1)

def make_runs(race):
    """Makes all runs that the race needs, some at a time, each in a process of one thread."""
    workers = race.options.workers or (os.cpu_count() if race.machine.device.type == "cpu" else 1)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    under_way = {}                                       # future -> Run
    bar = tqdm(unit="step", smoothing=0, disable=None)
    signal.signal(signal.SIGTERM, leave)
    try:
        while True:
            interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)             # workers inherit that
            for run in race.wanted():
                if run not in under_way.values():
                    under_way[pool.submit(train_alone, race.options_of(run))] = run
            signal.signal(signal.SIGINT, interrupts)
            if not under_way:
                break
            bar.total = bar.n + sum(run.steps for run in under_way.values())
            bar.refresh()
            for future in wait(under_way, timeout=1, return_when=FIRST_COMPLETED).done:
                run = under_way.pop(future)
                loss, seconds = future.result()
                race.ended[run] = loss, seconds
                race.write()
                bar.update(run.steps)
                bar.write(f"{run.arch}, {run.steps} steps, rate {run.learning_rate:g}, std {run.embed_std:g}, "
                          f"seed {run.seed}: {loss:.4f}, {seconds:.0f} s")
    except BrokenProcessPool:
        raise DataError("a run's process has died, perhaps for want of memory; what has ended is in "
                        f"{race.options.results}: the same command goes on, with fewer --workers") from None
    finally:
        bar.close()
        pool.shutdown(wait=not under_way, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()

def tokens_to_reach(target, tokens, losses):
    """With how many tokens runs would end at the loss `target`: straight lines in loss against log
    tokens. The first that falls through it counts; below all losses the last line goes on, above
    all the first. inf where that line does not fall, or a run diverged."""
    if not np.isfinite(losses).all():
        return math.inf
    line = 0 if target > max(losses) else len(losses) - 2
    for i in reversed(range(len(losses) - 1)):
        if losses[i] >= target >= losses[i + 1]:
            line = i
    fall = losses[line] - losses[line + 1]
    if fall <= 0:
        return math.inf
    share = (losses[line] - target) / fall
    return float(tokens[line] * np.exp(share * np.log(tokens[line + 1] / tokens[line])))

def fewer_tokens(tokens, baseline, losses):
    """Longest tokens over those with which an arch reaches the baseline's mean loss there; losses
    are (lengths, seeds). nan where there is one length, or the baseline diverged."""
    target = baseline[-1].mean()
    if len(tokens) < 2 or not math.isfinite(target):
        return math.nan
    return tokens[-1] / tokens_to_reach(target, tokens, losses.mean(1))

def interval_of_factor(tokens, baseline, losses, draws=5000):
    """95% of the factors of means over seeds drawn with replacement, the same for both; nan below
    three seeds."""
    count = losses.shape[1]
    if count < 3:
        return math.nan, math.nan
    generator = np.random.default_rng(0)
    factors = []
    for _ in range(draws):
        seeds = generator.choice(count, count)
        factors.append(fewer_tokens(tokens, baseline[:, seeds], losses[:, seeds]))
    low, high = np.quantile(factors, (0.025, 0.975)).tolist()
    return low, high

def race(options, given):
    """Which arch learns most from its tokens, each at its own best learning rate and embed_std."""
    found = Race(options, given)
    with lock_folder(options.results, "results"):
        found.read()
        make_runs(found)
        found.write()
    print_race(found)
    draw_race(found, Path(options.out_dir, "race.png"))

def print_race(race):
    """For each arch and length: best rate (and std), mean of the seeds, lowest to highest; then its
    factor."""
    tokens = np.array(list(race.steps.values())) * race.batch
    baseline = race.losses(race.names[0])
    lines = [["tokens a parameter", *(f"{ratio:g} ({n:,})" for ratio, n in zip(race.steps, tokens)),
              "fewer tokens (2.5%-97.5%)"]]
    for name in race.names:
        losses = race.losses(name)
        cells = [label(name)]
        for best, row in zip(race.follow(name)[0], losses):
            std = f" ({best.embed_std:g})" if race.searches_std(name) else ""
            cells.append(f"{best.learning_rate:g}{std}: {row.mean():.4f} ({row.min():.4f}-{row.max():.4f})")
        low, high = interval_of_factor(tokens, baseline, losses)
        cells.append(f"{fewer_tokens(tokens, baseline, losses):.2f} ({low:.2f}-{high:.2f})")
        lines.append(cells)
    print_table(lines)

# ---- Pictures and laws -----------------------------------------------------------------------------------------------

def draw_lines(axes, lines):
    """Draws name -> (x, ys, colour): the mean of ys, one or several curves, their range, and the
    name at the end."""
    ends = {}
    for name, (x, ys, color) in lines.items():
        ys = np.array(ys, dtype=float)
        mean = ys.mean(0)
        axes.plot(x, mean, color=color, marker="o", ms=3)
        axes.fill_between(x, ys.min(0), ys.max(0), color=color, alpha=0.2, lw=0)
        for point in zip(x, mean):
            if math.isfinite(point[1]):
                ends[name] = point                       # the last stays
    axes.autoscale_view()
    to_axes = axes.transData - axes.transAxes
    heights = {name: to_axes.transform(point)[1] for name, point in ends.items()}
    distance = 0.07
    if not ends:
        return
    lowest = max(0, np.mean(list(heights.values())) - distance * (len(ends) - 1) / 2)
    for i, name in enumerate(sorted(ends, key=heights.get)):
        color = lines[name][2]
        axes.annotate(label(name), ends[name], (1.1, lowest + distance * i), "data", "axes fraction", color=color,
                      va="center", annotation_clip=False,
                      arrowprops=dict(arrowstyle="-", color=color, lw=0.6, relpos=(0, 0.5)))
    axes.grid(alpha=0.3)

def draw_race(race, path):
    """Left each arch's losses over the baseline's at the longest length, right the same at every
    length."""
    baseline = race.losses(race.names[0]).mean(1)
    baseline[np.isinf(baseline)] = math.nan              # nothing is over a loss that diverged
    over = {name: race.losses(name) - baseline[:, None] for name in race.names}
    order = sorted(over, key=lambda name: over[name][-1].mean(), reverse=True)
    figure = Figure(figsize=(9, 4), dpi=200, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    lines = {}
    for i, name in enumerate(race.names):
        color = color_of(name, i)
        lines[name] = list(race.steps), over[name].T, color
        seeds = over[name][-1]
        left.plot(seeds, [order.index(name)] * len(seeds), "o-", color=color, alpha=0.6, mew=0)
        left.plot(seeds.mean(), order.index(name), "|", color=color, ms=16, mew=2)
    left.axvline(0, color="black", lw=0.8)
    left.grid(axis="x", alpha=0.3)
    left.set_yticks(range(len(order)), [label(name) for name in order])
    behind = f"loss over {label(race.names[0])}'s (nats/token)"
    left.set(xlabel=behind, title=f"{max(race.steps):g} tokens a parameter")
    right.set_xscale("log")
    draw_lines(right, lines)
    right.set_xticks(list(race.steps), [f"{ratio:g}" for ratio in race.steps])
    right.minorticks_off()
    right.set(xlabel="tokens a parameter", ylabel=behind)
    save_figure(figure, path)

def save_figure(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

EXPONENTS = np.geomspace(0.02, 2, 1000)

def fit_law(sizes, losses):
    """(a, b, c), c >= 0, of the law a (N / first N)^-b + c nearest to the losses; a and c are a
    straight line's for each of the exponents b, or of a line through 0."""
    x = (sizes / sizes[0]) ** -EXPONENTS[:, None]                 # (exponents, sizes)
    dx = x - x.mean(1, keepdims=True)
    dy = losses - np.mean(losses)
    a = (dx * dy).sum(1) / (dx ** 2).sum(1)
    c = np.mean(losses) - a * x.mean(1)
    a_through_0 = (x * losses).sum(1) / (x ** 2).sum(1)
    a = np.where(c < 0, a_through_0, a)
    c = np.maximum(c, 0)
    error = ((a[:, None] * x + c[:, None] - losses) ** 2).sum(1)
    best = error.argmin()
    return a[best], EXPONENTS[best], c[best]

def read_sizes(paths, ratio):
    """arch -> {parameters: losses of its seeds at the best point} of races' JSONs."""
    sizes = {}
    first = None
    for path in paths:
        with blame(f"{path}: expected a race's JSON"):
            saved = json.loads(Path(path).read_text())
            text = {name: saved["common"][name] for name in ("data", "val_tokens", "eval_tokens", "vocab_size")}
            for name, arch in saved["archs"].items():
                for length in arch["lengths"]:
                    if length["tokens_per_parameter"] == ratio:
                        sizes.setdefault(name, {})[arch["parameters"]] = length["losses"]
        first = first or text
        expect(text == first, f"{path}: held out {text}, in {paths[0]} {first}; these losses do not compare")
    return sizes

def with_interval(values):
    """The first of values, which is no draw, and where 95% of the others lie."""
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return f"{values[0]:.3f} ({low:.3f}-{high:.3f})"

def law(options, *paths):
    """Held-out loss against parameters, of races at several sizes with the same tokens a
    parameter."""
    generator = np.random.default_rng(0)
    axes = Figure(figsize=(9, 5), dpi=200, layout="constrained").subplots()
    table = [["a N^-b + c (2.5%-97.5%)", "b", "c", f"at {options.at:,} parameters", "without the smallest"]]
    for i, (name, found) in enumerate(read_sizes(paths, options.tokens_per_parameter).items()):
        sizes = np.array(sorted(found))
        seeds = [found[size] for size in sizes]
        if len(sizes) < 4 or min(len(losses) for losses in seeds) < 2:
            print(f"{label(name)}: no law without an interval; it takes four sizes with two seeds each")
            continue
        if any(None in losses for losses in seeds):
            print(f"{label(name)}: no law, as one of its best runs diverged")
            continue
        means = [np.mean(losses) for losses in seeds]
        fits = [fit_law(sizes, means)]
        for _ in range(1000):
            fits.append(fit_law(sizes, [generator.choice(losses, len(losses)).mean() for losses in seeds]))
        a, b, c = np.array(fits).T[:, :, None]                    # (1001, 1) each
        x = np.geomspace(sizes[0], options.at, 50)
        lines = a * (x / sizes[0]) ** -b + c                      # (1001, 50)
        a_larger, b_larger, c_larger = fit_law(sizes[1:], means[1:])
        of_larger = a_larger * (x / sizes[1]) ** -b_larger + c_larger
        table.append([label(name), with_interval(b[:, 0]), with_interval(c[:, 0]), with_interval(lines[:, -1]),
                      f"{of_larger[-1]:.3f}"])
        color = color_of(name, i)
        axes.plot(sizes, means, "o", color=color)
        axes.plot(x, lines[0], color=color, label=label(name))
        axes.plot(x, of_larger, "--", color=color, lw=1)
        axes.fill_between(x, *np.quantile(lines[1:], (0.025, 0.975), axis=0), color=color, alpha=0.15, lw=0)
    expect(len(table) > 1, "law: no arch has four sizes with two seeds each, none diverged; give more races' JSONs")
    print_table(table)
    axes.legend()
    axes.set(xscale="log", xlabel="parameters", ylabel=f"loss at {options.tokens_per_parameter:g} tokens a parameter")
    save_figure(axes.figure, Path(options.out_dir, "law.png"))

def curves(options, *folders):
    """Runs of train.py in one picture."""
    expect(folders, "curves: no folders of runs are given")
    path = Path(options.out_dir, "curves.png")
    while True:
        lines = {}
        for folder, color in zip(folders, itertools.cycle(COLORS.values())):
            expect(Path(folder).is_dir() or options.follow, f"{folder}: no such folder; train.py writes out/<arch>")
            log = [r for r in read_log(folder) if r["tokens"] and type(r.get(options.key)) is float]
            expect(log or options.follow, f"{folder}/log.jsonl: no {options.key}")
            if log:
                lines[folder] = [r["tokens"] / 1e6 for r in log], [[r[options.key] for r in log]], color
        figure = Figure(figsize=(9, 5), dpi=100, layout="constrained")
        axes = figure.subplots()
        if lines:
            draw_lines(axes, lines)
        axes.set(xlabel="tokens (millions)", ylabel=options.key)
        save_figure(figure, path)
        if not options.follow:
            print(path)
            return
        time.sleep(5)

# ---- HellaSwag -------------------------------------------------------------------------------------------------------

def clean(text):
    """Without WikiHow's marks."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

def rows_of(path):
    """HellaSwag's rows as dicts, its validation set if there is no path."""
    if path:
        with blame(f"file={path}: HellaSwag's questions cannot be read"):
            return [json.loads(line) for line in Path(path).read_text().splitlines()]
    from datasets import load_dataset
    logging.disable()                                    # of a failure one line is enough
    with blame("Rowan/hellaswag: cannot be fetched from Hugging Face; --file reads questions on this machine"):
        return list(load_dataset("Rowan/hellaswag", split="validation"))

def questions(path):
    """Of HellaSwag's rows (context, endings, index of the right one). Raises DataError."""
    found = []
    for number, row in enumerate(rows_of(path), 1):
        message = f"{path}, row {number}: expected ctx_a, ctx_b, activity_label, four endings and a label from 0 to 3"
        with blame(message):
            context = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
            endings = [clean(ending) for ending in row["endings"]]
            right = int(row["label"])
            expect(len(endings) == 4 and all(endings) and 0 <= right < 4, message)
        found.append((context, endings, right))
    expect(len(found) > 1, f"file={path}: {len(found)} questions, expected at least two")
    return found

@torch.no_grad()
def nats(model, tokenizer, pairs):
    """-log p(ending | context) of pairs (context, ending): (len(pairs),). Of what is too long the
    last part counts."""
    inputs, targets = [], []
    for context, ending in pairs:
        tokens = encode(tokenizer, f"{context} {ending}".encode(), new=False).astype(int)
        new = len(tokens) - len(encode(tokenizer, context.rstrip(" ").encode(), new=False))
        tokens = torch.from_numpy(tokens[-model.config.block_size - 1:])
        inputs.append(tokens[:-1])
        targets.append(tokens[1:].clone())
        targets[-1][:-new] = -1                          # the context's do not count
    device = next(model.parameters()).device
    x = pad_sequence(inputs, batch_first=True).to(device)
    y = pad_sequence(targets, batch_first=True, padding_value=-1).to(device)
    logits = model(x, y)[0].float().transpose(1, 2)      # (len(pairs), V, tokens)
    return F.cross_entropy(logits, y, ignore_index=-1, reduction="none").sum(1)

def score(model, tokenizer, rows, batch_size, name):
    """Whether each question's right ending is the likeliest, and the likeliest a character:
    (questions, 2)."""
    right = []
    for i in tqdm(range(0, len(rows), batch_size), desc=name, disable=None):
        contexts, endings, labels = zip(*rows[i:i + batch_size])
        pairs = [(context, ending) for context, four in zip(contexts, endings) for ending in four]
        lengths = torch.tensor([len(ending) for _, ending in pairs])
        losses = nats(model, tokenizer, pairs).cpu()
        both = torch.stack((losses, losses / lengths)).view(2, -1, 4)             # (2, questions, endings)
        right.append(both.argmin(2) == torch.tensor(labels))
    return torch.cat(right, dim=1).double().T

def hellaswag(options):
    """How often a trained model finds the right ending of four likeliest."""
    device = find_device(options.device)
    rows = questions(options.file)
    results = {}
    lines = [["", "accuracy", "by length"]]
    for source in options.out_dir.split(","):
        model, tokenizer, _ = load_model(source, device)
        right = score(model, tokenizer, rows, options.batch_size, source)
        acc, acc_norm = right.mean(0).tolist()
        error, norm_error = (right.std(0) / len(rows) ** 0.5).tolist()
        results[source] = {"acc": acc, "acc_stderr": error, "acc_norm": acc_norm, "acc_norm_stderr": norm_error}
        lines.append([source, f"{acc:.4f} +- {error:.4f}", f"{acc_norm:.4f} +- {norm_error:.4f}"])
    print_table(lines)
    found = {"options": asdict(options), "torch": str(torch.__version__), "questions": len(rows), "runs": results}
    write_text(Path(options.results_dir, "hellaswag.json"), json.dumps(found))

# ---- Command line ----------------------------------------------------------------------------------------------------

# name -> function, class of its options; the first four take train.py's besides
BENCHMARKS = {
    "speed": (speed, SpeedConfig, TrainConfig),
    "memory": (memory, MemoryConfig, TrainConfig),
    "sample": (sample, DecodeConfig, TrainConfig),
    "race": (race, RaceConfig, TrainConfig),
    "law": (law, LawConfig),
    "curves": (curves, CurvesConfig),
    "hellaswag": (hellaswag, HellaswagConfig),
}

def main(argv):
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return
    name, *words = argv
    choose("benchmark", name, BENCHMARKS)
    benchmark, *classes = BENCHMARKS[name]
    files = []
    if name in ("curves", "law"):
        files = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    own, *training = typed(words[len(files):], benchmark.__doc__, *classes, without=NOT_HERE)
    benchmark(classes[0](**own), *training, *files)

if __name__ == "__main__":
    run_script(main)
