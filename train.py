"""
Train a GPT: on a laptop in minutes or on eight GPUs in hours, with the same code.

    python train.py --arch=ngpt                   # laptop size; makes data/stdlib if it is missing
    python train.py --arch=ngpt --resume=true     # resume; with a larger --max_steps, train further
    python train.py --init_from=out/angpt --data=data/mine   # start from the weights of another run
    torchrun --nproc_per_node=8 train.py --size=0.5b --data=data/fineweb10B-gpt2

Results go to --out_dir: ckpt.pt, log.jsonl and loss.png. By default it is a folder in out/ with the
arch's name (and +qk_norm, if that is set), or out/tuned with --init_from. Before training, a new
run moves an earlier one in its folder to <folder>.1 (.2, .3 ... if that exists). Options come from
these sources, and later ones win: the defaults below, the size preset, the arch's recipe, the
checkpoint, the command line.
"""
# How to read this file:
# 1. run(), near the end. It reads the checkpoint, sets up the ranks, the dataset, the model and the
#    optimizer, and then loops: evaluate, log, save, stop, and take one optimizer step. (main()
#    calls train(), which locks the run's folder and calls run().)
# 2. The training itself: Tokens, batches(), learning_rate(), optimizer_step(), read_measurements()
#    and evaluate(). For several GPUs, Process.gather() and distribute(), too.
# 3. What the set-up uses: TrainConfig's options (those of the model are in GPTConfig in model.py),
#    SIZES, RECIPES, read_start(), resolve(), make_model(), make_optimizer() and compile_model().
# 4. Later, what a first reading can do without: the environment variables below,
#    TrainConfig.__init__(), set_up_process(), open_dataset(), block_code(), sum_bucket() (for
#    PowerNorm on several GPUs), read_checkpoint(), with_checkpoint() (the options of a resumed
#    run), open_folder(), draw_curve() and noted_signals().
# Read every other function where it is called.
import ast
import contextlib
import copy
import ctypes
import functools
import importlib.util
import inspect
import json
import math
import os
import platform
import signal
import sys
import textwrap
import threading
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

# torch reads two environment variables, one when it is imported and the other when it first
# compiles. So set them before the import. This is why sample.py, bench.py and every study that
# trains a model import train.py before torch.
# Without this one, OpenMP's threads stay busy while they wait, which slows down other programs.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# On a CPU torch.compile calls GCC. The code that GCC 12 generates for bfloat16 may return NaN, and
# the flag -fno-tree-slp-vectorize prevents this. torch has no option for compiler flags, but it
# puts the text of this variable after -march=, where a second flag can follow. (torch 2.11 does not
# read this variable.)
if platform.machine() == "x86_64":
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -fno-tree-slp-vectorize")

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.nn.parallel import DistributedDataParallel

from model import ARCHS, GPT, ConfigError, GPTConfig
from prepare import (DataError, atomic_write, check, check_at_least, check_choice, clean_options,
                     explain_errors, get_tokenizer, lock_folder, parse_options, prepare, read_meta,
                     read_shard, run_script, token_lengths)

# ---- Options -------------------------------------------------------------------------------------

# Width, depth and heads are those of Table F.1 of the anGPT paper (Franke et al. 2025). In all
# presets but "laptop" max_steps gives 20 tokens per parameter. The batch sizes are ours. With 16
# sequences `python bench.py memory` estimates at most 70 GB for a compiled step in all presets but
# 1b, which therefore has 8. With 32, GPT.mean_loss would take chunks to save memory, and compute
# each of them a second time in the backward pass.
LARGE = dict(
    block_size=2048,     # anGPT section 5
    rope_fraction=0.5,   # anGPT Table F.2
    vocab_size=50304,    # GPT-2's 50257, padded to a multiple of 128
    batch_size=16,
    total_batch_size=524_288,
)
SIZES = {
    # The laptop's model has the defaults of GPTConfig in model.py.
    "laptop": dict(max_steps=1600, batch_size=8, total_batch_size=2048),
    "32m": dict(LARGE, n_embd=256, n_layer=6, n_head=4, max_steps=1223),
    "62m": dict(LARGE, n_embd=384, n_layer=10, n_head=6, max_steps=2375),
    "125m": dict(LARGE, n_embd=512, n_layer=18, n_head=8, max_steps=4846),
    "250m": dict(LARGE, n_embd=768, n_layer=18, n_head=12, max_steps=9429),
    "0.5b": dict(LARGE, n_embd=1024, n_layer=24, n_head=16, max_steps=19292),
    "1b": dict(LARGE, n_embd=1280, n_layer=36, n_head=20, max_steps=40917, batch_size=8),
}

# The training options of each family of archs. The learning rates and embed_std are the best of an
# early search at laptop size (width 128, 1.1 million parameters), whose runs are not kept. At other
# sizes others may be better: at width 64 NormFormer's best learning rate was 3 to 7 times what
# recipe() gives (lessons/studies). The family is an attribute of the block class in model.py, and
# an arch of your own inherits it.
PRE_NORM = dict(learning_rate=2e-3, weight_decay=0.1, warmup_ratio=0.2)
# Weight decay keeps weights small. nGPT's have norms of 1 and anGPT's at most 1 anyway, and both
# papers train without weight decay and without a warmup (nGPT section 2.6, anGPT Table F.2).
SPHERE = dict(weight_decay=0.0, warmup_ratio=0.0)
RECIPES = {
    "layernorm": dict(PRE_NORM, learning_rate=4e-3),
    "rmsnorm": PRE_NORM,
    "powernorm": dict(PRE_NORM, learning_rate=4e-3, embed_std=0.1),
    "normformer": dict(PRE_NORM, embed_std=1.0),
    "ngpt": dict(SPHERE, learning_rate=8e-3),
    "angpt": dict(SPHERE, learning_rate=4e-3),
}


def recipe(values):
    """Return the options that follow from the arch, n_embd, tie and init_from in `values`."""
    # A recipe of your own may leave options out. The values are then those of PRE_NORM, or the
    # defaults. The recipe's names and types are checked like those of options that are set.
    of_family = clean_options(TrainConfig, RECIPES.get(ARCHS[values["arch"]].family, {}))
    options = {**PRE_NORM, **of_family}
    # Wider models need lower learning rates. This rule is only a start for a search of your own:
    # at widths 64 to 256 the best learning rates of GPT+ (rmsnorm with qk_norm), nGPT and anGPT
    # were 0.7 to 3.8 times what it gives (lessons/studies). (Do not divide by a width of 0, which
    # check_model() reports later.)
    options["learning_rate"] *= math.sqrt(128 / max(1, values["n_embd"]))
    if values["init_from"]:
        # A tenth is a precaution, so that trained weights are not damaged. A small model did better
        # with the whole learning rate (lessons/studies). We have not tried larger ones.
        options["learning_rate"] /= 10
    if values["tie"]:
        # The embedding is the output head as well, and 0.02 suits the head.
        options["embed_std"] = 0.02
    return options


@dataclass(init=False)
class TrainConfig(GPTConfig):
    """The options of a training run.

    In the comments behind the options, (...) says how an option gets its value if it is not set.
    The dataclass lists the options, but the constructor is ours, because the value of an option
    that is not set may depend on the size, the arch or a checkpoint. Some options stay None until
    the checkpoint and the dataset are known; then resolve() completes them.

    TrainConfig(arch="ngpt", max_steps=200) sets two options, and the others follow from these. Set
    options only in this way: what is assigned to an attribute later may be lost if the run is
    resumed.

    Raises ConfigError if an option is unknown or has an impossible value, and DataError if the
    file of an arch raises an exception.
    """
    # Run
    size: str = "laptop"            # preset: laptop | 32m | 62m | 125m | 250m | 0.5b | 1b
    out_dir: str | None = None      # folder (out/<arch>, +qk_norm if set; out/tuned with init_from)
    init_from: str | None = None    # start with the weights of another run, or of gpt2
    resume: Literal["true", "false", "auto"] = "false"  # resume out_dir's run; auto: if it has one
    eval_only: bool = False         # print the validation loss of out_dir or init_from as JSON

    # Model
    vocab_size: int | None = None   # tokens in the vocabulary (by size, else by dataset)
    pn_warmup: int | None = None    # powernorm: steps with batch statistics (all of the warmup)

    # Data
    data: str = "data/stdlib"       # dataset: a folder made by prepare.py
    batch_size: int | None = None   # sequences in a process's micro-batch (by size and ranks)
    total_batch_size: int | None = None  # tokens in an optimizer step, over all processes (by size)
    seed: int = 1337                # seed of the weights, the order of the data, and dropout

    # Optimizer
    max_steps: int | None = None    # optimizer steps (by size)
    learning_rate: float | None = None  # peak learning rate (by arch, width and init_from)
    min_lr_ratio: float = 0.01      # final learning rate, as a fraction of learning_rate
    warmup_ratio: float | None = None  # fraction of the steps used for linear warmup (by arch)
    weight_decay: float | None = None  # weight decay of matrices and embeddings (by arch)
    beta1: float = 0.9              # Adam's beta1
    beta2: float = 0.95             # Adam's beta2
    eps: float = 1e-9               # Adam's epsilon
    grad_clip: float = 1.0          # clip the gradient at this norm; 0 turns clipping off

    # Evaluation and logging
    eval_interval: int | None = None  # steps between validations (a tenth of the run, at most 500)
    eval_tokens: int | None = None  # tokens per validation (0.5% of training tokens, 4096 to 10M)
    final_eval_tokens: int | None = None  # for the last one (eval_tokens if set, else 1M to 10M)
    log_interval: int = 10          # steps between records of log.jsonl
    checkpoint_interval: int | None = None  # steps between checkpoints (a tenth of the run)

    # System
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if there is one, else cpu
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where that is fast
    compile: Literal["auto", "true", "false"] = "auto"  # auto: with cuda, and on CPUs in long runs

    def __init__(self, **options):
        # self.options has only what is set: on the command line, in Python, or by
        # with_checkpoint(). Defaults, preset and recipe are not in it. clean_options() checks names
        # and types, and drops options that are None.
        self.options = clean_options(TrainConfig, options)
        if "arch" in self.options:
            self.options["arch"] = load_arch(self.options["arch"])

        defaults = {field.name: field.default for field in fields(TrainConfig)}
        chosen = {**defaults, **self.options}
        check_choice("arch", chosen["arch"], ARCHS, "; GPT+ is --arch=rmsnorm --qk_norm=true, and "
                     "an arch in a file of your own --arch=FILE.py:NAME")
        check_choice("size", chosen["size"], SIZES)
        preset = SIZES[chosen["size"]]
        # The recipe depends on the arch and on the width, which is the preset's if it is not set.
        arch_recipe = recipe({**defaults, **preset, **self.options})

        # The order of precedence: each source of options wins over those to its left.
        values = {**defaults, **preset, **arch_recipe, **self.options}
        for name, value in values.items():
            setattr(self, name, value)

        if self.out_dir is None:
            self.out_dir = self.default_folder()
        self.check_ranges()
        # If a checkpoint is needed, this config may lack options of its model. with_checkpoint()
        # adds and checks them.
        if not (self.uses_own_checkpoint or self.init_from):
            self.check_model()

    @property
    def uses_own_checkpoint(self):
        """True if the checkpoint in out_dir is read, to resume the run or to evaluate it."""
        if self.eval_only:
            return not self.init_from
        if self.resume == "auto":
            return Path(self.out_dir, "ckpt.pt").exists()
        return self.resume == "true"

    def default_folder(self):
        if self.init_from:
            return "out/tuned"
        return f"out/{self.arch}+qk_norm" if self.qk_norm else f"out/{self.arch}"

    def check_ranges(self):
        # check_at_least() skips text, and None, the value of an option that is still open.
        check_at_least(1, self, "vocab_size", "max_steps", "batch_size", "total_batch_size",
                       "eval_tokens", "final_eval_tokens", "eval_interval", "log_interval",
                       "checkpoint_interval")
        check_at_least(0, self, *self.__dataclass_fields__)
        for name in ("rope_fraction", "dropout", "min_lr_ratio", "warmup_ratio"):
            self.check_option(name, getattr(self, name) <= 1, "a number from 0 to 1")
        for name in ("beta1", "beta2"):
            self.check_option(name, getattr(self, name) < 1, "a number less than 1")
        # With an eps of 0 Adam would compute 0 / 0 for a weight whose gradients were all 0.
        self.check_option("eps", self.eps > 0, "a number greater than 0")
        self.check_option("seed", self.seed < 2 ** 63, "a number less than 2**63")
        # On MPS, torch's checkpoint() does not restore the random numbers. So the backward pass
        # would draw other dropout masks than the forward pass, and the gradients would be wrong.
        if self.device == "mps" and self.checkpoint_blocks:
            self.check_option("dropout", self.dropout == 0, "0 with --device=mps and "
                              "--checkpoint_blocks=true")


def load_arch(arch):
    """Return the name of an arch. For "mine.py:scalenorm" run mine.py first, to add it to ARCHS.

    Warns if the file replaces an arch of another file, because a name can have only one block.
    """
    path, _, name = arch.rpartition(":")
    if not path:
        return name
    if not path.endswith(".py"):
        raise ConfigError(f"arch={arch}: expected FILE.py:NAME")
    if not Path(path).exists():
        raise ConfigError(f"arch={arch}: {path} cannot be run, because it does not exist")
    # The file may import train, for example to add a recipe to RECIPES. If train.py is the program
    # that runs, its name is __main__. Then give the file this module, not a second copy of it.
    sys.modules.setdefault("train", sys.modules[__name__])
    earlier = dict(ARCHS)
    with explain_errors(f"arch={arch}: {path} cannot be run"):
        spec = importlib.util.spec_from_file_location(path, path)
        module = importlib.util.module_from_spec(spec)
        # torch.compile and inspect look up a class's module here.
        sys.modules[path] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            # Add the line of the file to the message. (A SyntaxError has it already.)
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                     if frame.filename == module.__file__]
            if lines:
                error.args = (f"{error}, line {lines[-1]}",)
            raise
    for other, block in earlier.items():
        # getfile() raises an error for a class that was typed into an interpreter, and for None,
        # which get() returns if the file has deleted an arch.
        with contextlib.suppress(OSError, TypeError):
            file_before = inspect.getfile(block)
            if not os.path.samefile(file_before, inspect.getfile(ARCHS.get(other))):
                print(f"{path} has replaced the arch {other} of {file_before}; from now on this "
                      "name means the new block", file=sys.stderr)
    if name not in ARCHS:
        raise ConfigError(f"arch={arch}: expected a line ARCHS[{name!r}] = ... in {path}")
    if not hasattr(ARCHS[name], "family"):
        raise ConfigError(f"arch={arch}: expected ARCHS[{name!r}] to be a class that inherits from "
                          "model.py's Block")
    return name


def resolve(config, dataset_vocab_size=GPTConfig.vocab_size, world_size=1):
    """Return a copy of config in which the options that the constructor left open have values.

    vocab_size depends on the dataset. The preset's batch_size shrinks until it fits the number of
    processes. The intervals, the numbers of validation tokens and pn_warmup follow from other
    options.

    Raises ConfigError if the processes cannot share the batch, or the vocabulary is too small.
    """
    c = copy.copy(config)
    c.vocab_size = c.vocab_size or dataset_vocab_size
    check_at_least(dataset_vocab_size, c, "vocab_size")

    if "batch_size" not in c.options:  # it was not set, so it is the preset's
        # The more processes share a step, the fewer sequences each of them has. Take the largest
        # batch size that divides both this number of sequences and the preset's batch size.
        sequences = c.total_batch_size // (c.block_size * world_size)
        c.batch_size = math.gcd(sequences, c.batch_size)
    tokens_at_once = c.batch_size * c.block_size * world_size  # a micro-batch of every rank
    # With eval_only no optimizer step is taken, so how its batch is divided does not matter.
    if c.total_batch_size % tokens_at_once != 0 and not c.eval_only:
        raise ConfigError(
            f"total_batch_size={c.total_batch_size}: expected a multiple of batch_size x "
            f"block_size x processes = {c.batch_size} x {c.block_size} x {world_size}")

    training_tokens = c.max_steps * c.total_batch_size
    usual_eval_tokens = min(10_485_760, max(4096, training_tokens // 200))
    c.final_eval_tokens = (c.final_eval_tokens or c.eval_tokens
                           or max(1_048_576, usual_eval_tokens))
    c.eval_tokens = c.eval_tokens or usual_eval_tokens
    tenth_of_run = math.ceil(c.max_steps / 10)
    c.eval_interval = c.eval_interval or min(tenth_of_run, 500)
    # A checkpoint has 12 bytes per parameter, and all ranks have to wait. So a run saves about ten
    # times, not more often.
    c.checkpoint_interval = c.checkpoint_interval or tenth_of_run
    if c.pn_warmup is None:
        c.pn_warmup = round(c.warmup_ratio * c.max_steps)
    return c


# ---- Device and ranks ----------------------------------------------------------------------------

def find_device(name):
    """Return the torch.device that --device names. Raises DataError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        # torchrun numbers its processes on each machine. Each takes the GPU of its own number.
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        # This fails if the device is missing.
        return torch.empty(0, device=name).device
    except Exception:
        raise DataError(f"device={name}: torch cannot use it on this machine; --device=auto takes "
                        "a GPU if there is one, else the CPU, and torchrun needs a GPU for each "
                        "process") from None


@dataclass
class Process:
    """This process: its device and dtype, and its rank among the processes that train together."""
    device: torch.device
    dtype: torch.dtype = torch.float32
    rank: int = 0
    world_size: int = 1

    def autocast(self):
        # By default, autocast caches its bfloat16 copies of the weights during a forward pass.
        # GPT.mean_loss may use lm_head once for each chunk of positions. All chunks would share one
        # copy of its weight, and the chunks' gradients would be added up in bfloat16. So use no
        # cache.
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32,
                              cache_enabled=False)

    def gather(self, value):
        """Return a list of the values that the ranks give, in the order of the ranks."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)  # replaces the values of the other ranks
        return values

    def barrier(self):
        """Wait until all ranks are here."""
        # gather() returns only after every rank has called it.
        self.gather(None)

    def check_agreement(self, config, **facts):
        """Raise DataError unless all ranks have the same options and the same `facts`."""
        own = asdict(config) | facts
        # Each machine may have its own paths, and "auto" and another word may name the same device.
        # Instead of `resume`, run() compares its effect.
        for name in ("data", "out_dir", "init_from", "resume", "device"):
            del own[name]
        # With dtype=auto one machine may use bfloat16, and another, with an older chip, float32. So
        # compare the dtypes in use.
        own["dtype"] = self.dtype
        of_ranks = self.gather(own)
        differing = [name for name in own if any(other[name] != own[name] for other in of_ranks)]
        check(not differing, f"the processes differ in {', '.join(differing)}; start all of them "
              "with the same command and the same code (and set --dtype if their chips differ); "
              "several machines need a shared folder for --out_dir and --data")


def set_up_process(config):
    """Return the Process that torchrun's environment describes, and set its device up for speed."""
    device = find_device(config.device)
    on_gpu = device.type == "cuda"

    dtype = config.dtype
    if dtype == "auto":
        # Does this chip have instructions for bfloat16?
        if on_gpu:
            is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            is_fast = torch.cpu._is_avx512_bf16_supported()  # false on Apple's chips
        dtype = "bfloat16" if is_fast else "float32"

    if on_gpu:
        torch.cuda.set_device(device)
        # Matrix products of float32 numbers become much faster if these are rounded to TF32, which
        # keeps 10 bits of the mantissa. torch calls this precision "high", and the default
        # "highest".
        torch.set_float32_matmul_precision("high")
    elif sys.platform == "linux":
        # Let malloc keep freed memory instead of returning it to the system after every tensor,
        # which saves some 5 to 20% of a step in the default run. With the first limit malloc's heap
        # shrinks only when 2 GB of it are free. Blocks above the second limit bypass the heap. Once
        # the first limit is set, glibc no longer adapts the second to the program. So set both.
        libc = ctypes.CDLL(None)
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # the numbers that glibc gives these options
        libc.mallopt(M_TRIM_THRESHOLD, 2 ** 31 - 1)
        libc.mallopt(M_MMAP_THRESHOLD, 2 ** 25)  # the highest that every glibc accepts

    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    check(rank < world_size, f"RANK={rank} is set, but WORLD_SIZE is {world_size}; unset RANK, or "
          "start with torchrun")
    # The group of processes lasts until this process ends. So a script that calls train() again has
    # it already.
    if world_size > 1 and not dist.is_initialized():
        # While rank 0 saves to a slow disk, the others may have to wait a long time.
        timeout = timedelta(hours=1)
        # The ranks find each other's addresses in a store, which torchrun keeps when it restarts
        # them (--max-restarts). After a restart, torch would also find the addresses of the ranks
        # that have ended. If all ranks are on one machine, a prefix keeps the restarts apart.
        # (Several machines may count their restarts differently. The README says what these need.)
        with explain_errors("the processes cannot find each other; start them with torchrun"):
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(restarts, store)
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank,
                                world_size=world_size, timeout=timeout)
    return Process(device, getattr(torch, dtype), rank, world_size)


# ---- Dataset -------------------------------------------------------------------------------------

class Tokens:
    """One split of a dataset, cut into windows of `length` tokens: the sequences of a batch.

    The leftover tokens at the end of each shard are not used.
    """

    def __init__(self, folder, split, length):
        self.length = length
        self.paths = sorted(Path(folder).glob(f"*_{split}_??????.bin"))
        shard_sizes = [len(read_shard(path)) for path in self.paths]  # in tokens
        self.n_tokens = sum(shard_sizes)
        # Targets are shifted by one, so a shard needs one token after its last window.
        counts = [(size - 1) // length for size in shard_sizes]
        # Shard n holds the windows from starts[n] up to, not including, starts[n + 1].
        self.starts = np.cumsum([0, *counts])
        self.windows = int(self.starts[-1])  # how many there are

    def window(self, i):
        """Return window i and the token after it: (length + 1,) int64."""
        n = np.searchsorted(self.starts, i, side="right") - 1  # the last n with starts[n] <= i
        start = (i - self.starts[n]) * self.length
        # A large dataset has more shards than a process may keep open. So map the shard again each
        # time, which takes about 0.1 ms.
        shard = read_shard(self.paths[n])
        return shard[start:start + self.length + 1].astype(np.int64)

    def batch(self, indices, device):
        """Return the inputs and the targets of some windows, each (len(indices), length).

        The target of a token is the token after it.
        """
        rows = np.stack([self.window(i) for i in indices])  # (len(indices), length + 1)
        rows = torch.from_numpy(rows)
        if torch.device(device).type == "cuda":
            # A copy from pinned memory does not make the CPU wait for the GPU.
            rows = rows.pin_memory().to(device, non_blocking=True)
        else:
            rows = rows.to(device)
        return rows[:, :-1], rows[:, 1:]


def open_dataset(config, process):
    """Return the dataset in config.data: its splits `train` and `val`, and the fields of meta.json.

    These are `tokenizer` (a name), `vocab_size`, `train_tokens` and `val_tokens` (counts), a
    `fingerprint` that tells datasets apart, and others. The default dataset is made if it is
    missing. Raises DataError if a file is missing or damaged.
    """
    is_missing = not Path(config.data, "meta.json").exists()
    if is_missing and config.data == TrainConfig.data and process.rank == 0:
        prepare()
    # The other ranks wait here until rank 0 has made it.
    process.barrier()
    meta = read_meta(config.data)
    with explain_errors(f"{config.data}/meta.json: not written by prepare.py"):
        dataset = SimpleNamespace(**meta)
        dataset.token_bytes = token_lengths(meta)  # (vocab_size,) bytes of each token's text
        # A run is resumed only with the dataset that it was started with, as its fingerprint, its
        # sizes and its added tokens, below, tell (check_dataset). In older datasets, which have no
        # fingerprint, the sizes take its place.
        dataset.sizes = f"{dataset.train_tokens}+{dataset.val_tokens} tokens"
        dataset.fingerprint = getattr(dataset, "fingerprint", dataset.sizes)
    for name in ("train", "val"):
        split = Tokens(config.data, name, config.block_size)
        # A shard that the user has added is used as well, so more tokens than counted are fine.
        check(split.n_tokens >= meta[f"{name}_tokens"], f"{config.data}: a shard is missing, since "
              f"the {name} shards have fewer tokens than meta.json counts; remove the folder and "
              "run prepare.py again")
        check(split.windows > 0, f"{config.data}: too few {name} tokens for one window of "
              f"--block_size={config.block_size}; set a smaller --block_size, or prepare more text "
              "or larger shards")
        setattr(dataset, name, split)
    # The shards that the user has added have these tokens, which meta.json does not count.
    dataset.added_tokens = (dataset.train.n_tokens + dataset.val.n_tokens
                            - dataset.train_tokens - dataset.val_tokens)
    return dataset


# A step at the end of an epoch also needs the order of the next one. Keep only two orders, because
# an order takes 8 bytes per window of the dataset.
@functools.lru_cache(maxsize=2)
def epoch_order(seed, epoch, n_windows):
    """Return the numbers of all training windows, each once, in this epoch's random order."""
    return np.random.default_rng((seed, epoch)).permutation(n_windows)


def batches(split, step, config, process):
    """Return this rank's micro-batches (x, y) of a step, each tensor (batch_size, block_size).

    The windows of a step depend on the dataset, the block size, the total batch size, the seed and
    the step, not on earlier steps or on the number of ranks. Each rank takes its share of them.
    """
    n_windows = config.total_batch_size // config.block_size  # the windows of a step
    start = step * n_windows
    stop = start + n_windows
    indices = []
    for position in range(start + process.rank, stop, process.world_size):
        epoch, index_in_epoch = divmod(position, split.windows)
        order = epoch_order(config.seed, epoch, split.windows)
        indices.append(order[index_in_epoch])
    # Many programs read the next batch in another thread. That is not needed here: the CPU only
    # queues the GPU's work, so it reads the next batch while the GPU is still busy. The GPU has
    # to wait for a batch only after the CPU has waited for the GPU, mostly for a record in the log.
    # By our estimate that costs about 1% of the time at --size=32m, and less at larger sizes.
    size = config.batch_size
    return [split.batch(indices[first:first + size], process.device)
            for first in range(0, len(indices), size)]


# ---- Model and optimizer -------------------------------------------------------------------------

def make_model(config, device, checkpoint=None):
    """Return a GPT with random weights, or with those of `checkpoint`.

    Raises DataError if the checkpoint's weights do not fit, and warns if the block's code has
    changed.
    """
    torch.manual_seed(config.seed)
    model = GPT(config)
    if checkpoint:
        with explain_errors("the checkpoint's weights do not fit this model; undo what has changed "
                            "in its code or its options, or set the --arch=FILE.py:NAME that it "
                            "was trained with"):
            model.load_state_dict(checkpoint["model"])
        saved_code = checkpoint.get("block_code")
        code = block_code(model)
        has_changed = saved_code and code and code != saved_code
        if has_changed and os.environ.get("RANK", "0") == "0":
            print(f"The code of {config.arch}'s block has changed since this checkpoint was saved, "
                  "so it may compute something else: go back to the code it was trained with, or "
                  "train again.",
                  file=sys.stderr)
    return model.to(device)


# Finding and parsing the source takes up to 0.1 s. So do it once, and again only if something in
# the class has changed. (A notebook's %autoreload changes classes in place.)
@functools.cache
def class_code(cls, contents):
    """Return the source of a class without comments.

    `contents` differ between two versions of the class, so that the cache tells these apart.
    """
    return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(cls))))


def block_code(model):
    """Return the source of the classes in a model's blocks, without comments, or None.

    A checkpoint keeps it, so that a change of these classes does not go unnoticed.
    """
    # These are the classes of all modules in the blocks, and the classes that they inherit from
    # (__mro__), without those of torch and Python.
    classes = {cls for module in model.blocks.modules() for cls in type(module).__mro__
               if cls.__module__.split(".")[0] not in ("torch", "builtins")}
    try:
        sources = []
        for cls in classes:
            # An edit changes the code of a function, or the text of another value.
            contents = [getattr(value, "__code__", repr(value)) for value in vars(cls).values()]
            sources.append(class_code(cls, tuple(contents)))
        return "\n".join(sorted(sources))
    except (OSError, TypeError, SyntaxError):
        # A class that was typed into an interpreter has no file.
        return None


def make_optimizer(model, config):
    """Return AdamW. Matrices and embeddings have weight decay, vectors and scalars do not.

    Each step sets the learning rate of all groups (optimizer_step).
    """
    # An optimizer of your own must keep what changes during training in its state[p], where p is a
    # parameter. A resumed run restores only that, and nothing that is kept in the groups.
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        dict(params=matrices, weight_decay=config.weight_decay),
        dict(params=others, weight_decay=0.0),
    ]
    betas = (config.beta1, config.beta2)
    # fused=True needs only a few kernels for all parameters.
    return torch.optim.AdamW(groups, config.learning_rate, betas, config.eps, fused=True)


def compile_model(model, config, process):
    """Let torch compile the blocks and the loss at their first call, and return True.

    With --compile=false, or if it is "auto" and compiling does not pay or does not work, return
    False. Raises DataError if --compile=true does not work on this machine.
    """
    # torch.compile gives up on a function that it has compiled too often. Forget the models that
    # this process has trained before.
    torch.compiler.reset()
    if config.compile == "false":
        return False
    if config.compile == "auto" and process.device.type != "cuda":
        # Compiling takes about 20 s on a CPU and saves about a quarter of every step, so it pays
        # off in runs of more than about a minute and a half. In these, the number of parameters
        # times the number of training tokens exceeds about 2e12.
        n_parameters = sum(p.numel() for p in model.parameters())
        work = n_parameters * config.max_steps * config.total_batch_size
        if process.device.type == "mps" or work < 2e12:
            return False
    try:
        # Some machines have no compiler, or one that lacks the headers to build anything.
        with explain_errors("torch.compile does not work on this machine"):
            torch.compile(torch.square)(torch.ones(8, device=process.device))
    except DataError as error:
        if config.compile == "true":
            raise DataError(f"compile=true: {error}; set --compile=false") from error
        print(f"{error}; training without it", file=sys.stderr)
        return False

    # Module.compile() works in place: from now on a call of the block runs compiled code.
    for block in model.blocks:
        block.compile()
    # Replace a method of this one model by its compiled form. The method computes the head and the
    # loss, which are half of a step if the model is small and the vocabulary large.
    model.summed_loss = torch.compile(model.summed_loss)
    return True


def sum_bucket(state, bucket):
    """Sum one bucket of gradients over all ranks, and return a future of the sum.

    A bucket is a tensor into which DistributedDataParallel packs the gradients of many parameters.
    By default it averages them over the ranks. Here they are summed, because optimizer_step has
    divided the loss by the number of ranks already. For the parameters the result is the same.

    Only PowerNorm needs this. Its nu is a running mean of gradients from inside the backward pass
    (PowerScale.backward in model.py), where DistributedDataParallel has not reduced anything yet.
    Suppose that a step has 8 micro-batches. With one rank, each of their losses is divided by 8.
    With four ranks, each rank has two of them. As the gradients are summed over the ranks, each
    loss is divided by 8 here, too. If they were averaged, which divides by 4, each loss would be
    divided by only 2. Then the gradients inside the backward pass would be four times larger than
    with one rank, and so would nu. A run that is resumed with another number of ranks would start
    with a wrong nu.

    `state` is an argument that DistributedDataParallel passes on; here it is None.
    """
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    # value() is a list of one tensor.
    return future.then(lambda finished: finished.value()[0])


def distribute(model, process):
    """Return the model, inside DistributedDataParallel if there are several ranks."""
    if process.world_size == 1:
        return model
    # The gradients are sent in groups, called buckets, while the backward pass goes on. But all
    # gradients of a compiled function appear together, when its backward pass ends. So by default
    # torch.compile cuts a function in pieces, wherever a bucket ends. Our blocks are compiled one
    # by one, and a bucket can be sent between two of them. So switch this off.
    torch._dynamo.config.optimize_ddp = False
    # PowerNorm averages its statistics over the ranks itself (mean_over_ranks in model.py), so its
    # buffers need no broadcast. Gradients live in the buckets themselves, so that they are not
    # copied.
    with warnings.catch_warnings():
        # torch 2.13 deprecates broadcast_buffers, but torch 2.11, with which train.py also works,
        # does not have its replacement.
        warnings.simplefilter("ignore", FutureWarning)
        ddp_model = DistributedDataParallel(model, broadcast_buffers=False,
                                            gradient_as_bucket_view=True)
    ddp_model.register_comm_hook(state=None, hook=sum_bucket)
    return ddp_model


# ---- Evaluation ----------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(model, dataset, config, process, eval_tokens=None):
    """Return val_loss (nats per token), val_bpb (bits per byte), val_error and val_tokens.

    About eval_tokens tokens are used, by default config.eval_tokens. Their windows are spread
    evenly over the whole validation set, and are the same for every arch and number of ranks.
    val_error is the standard error of val_loss, estimated from the differences between
    micro-batches. It is None if there is only one micro-batch.
    """
    split = dataset.val
    n_windows = (eval_tokens or config.eval_tokens) // config.block_size
    n_windows = min(max(1, n_windows), split.windows)
    chosen = [i * split.windows // n_windows for i in range(n_windows)]

    # In eval mode a compiled model has to be compiled once more. On a CPU this takes about as long
    # as it would save in the default run. So there torch's setting ("stance") is "force_eager",
    # which ignores the compiled code.
    stance = "default" if process.device.type == "cuda" else "force_eager"

    model.eval()
    size = config.batch_size
    own_rows = []  # a row for each micro-batch of this rank: its tokens, their bytes, its loss
    for start in range(process.rank * size, n_windows, process.world_size * size):
        # The bytes are counted and the micro-batch is filled up on the CPU.
        x, y = split.batch(chosen[start:start + size], "cpu")
        batch_tokens = y.numel()
        batch_bytes = dataset.token_bytes[y.numpy()].sum()
        # Fill up the last micro-batch, since another shape would have to be compiled. Targets of -1
        # do not count.
        padding = (0, 0, 0, size - len(x))  # left, right, above, below
        x = torch.nn.functional.pad(x, padding)
        y = torch.nn.functional.pad(y, padding, value=-1)
        with process.autocast(), torch.compiler.set_stance(stance):
            _, loss = model(x.to(process.device), y.to(process.device), loss_only=True)
        own_rows.append((batch_tokens, batch_bytes, loss.item()))
    model.train()

    rows = sum(process.gather(own_rows), [])  # the lists of all ranks, joined
    n_tokens, n_bytes, losses = np.array(rows).T  # (number of micro-batches,) each
    mean = np.average(losses, weights=n_tokens)
    error = None
    if len(rows) > 1:
        variance = np.average((losses - mean) ** 2, weights=n_tokens)
        # The standard error of a mean of n values is their standard deviation over sqrt(n). But on
        # average, `variance` is only (n - 1) / n times the true one, since the mean is estimated
        # from the same n values. Dividing by n - 1 in place of n corrects this.
        error = math.sqrt(variance / (len(rows) - 1))
    total_tokens = int(n_tokens.sum())
    total_bits = mean * total_tokens / math.log(2)
    return {"val_loss": float(mean), "val_error": error, "val_tokens": total_tokens,
            "val_bpb": float(total_bits / max(1, n_bytes.sum()))}


# ---- Checkpoints ---------------------------------------------------------------------------------

def read_checkpoint(source):
    """Return the dict that a run saved in a folder or a .pt file, or one made of GPT-2's weights.

    It is loaded with weights_only=True, so that a checkpoint cannot run code. Raises DataError.
    """
    path = Path(source)
    if path.is_dir():
        path /= "ckpt.pt"
    if not path.exists():
        # This may be the name or the folder of GPT-2's published weights; if it is not, read_gpt2
        # raises an error. read_gpt2 is imported here, because training works without the lessons.
        with explain_errors(f"{source}: no such checkpoint"):
            from lessons.extras.gpt2 import read_gpt2
        return read_gpt2(source)
    with explain_errors(f"{path}: not a whole checkpoint; is it cut off, or another program's?"):
        # With mmap=True a tensor is read from the file only when it is used. But Windows cannot
        # replace a file that is mapped, so there a run could not save while another program has
        # its checkpoint. And torch finds a file to map only if its name is encoded as UTF-8.
        is_utf_8 = os.fsencode(path) == str(path).encode("utf-8", "replace")
        mmap = sys.platform != "win32" and is_utf_8
        checkpoint = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    with explain_errors(f"{path}: a checkpoint of another program than train.py"):
        # Without these, a model cannot be loaded and its run cannot be resumed. If the file holds
        # no dict at all, one of the next lines fails, and explain_errors() reports that.
        missing = {"model", "config", "step", "tokenizer"} - checkpoint.keys()
        check(not missing, f"{path}: a checkpoint of another program than train.py, since it has "
              f"no {' and no '.join(sorted(missing))}")
        saved = checkpoint["config"]
        # Older checkpoints call the options that were set "given". The oldest do not say which were
        # set, so take all their options. Some may no longer exist.
        options = checkpoint.get("options", checkpoint.get("given", saved))
        checkpoint["options"] = {name: value for name, value in options.items()
                                 if name in TrainConfig.__dataclass_fields__}
        # Old checkpoints store the arch as FILE.py:NAME. Keep the name only, since loading a
        # checkpoint must never run a file.
        saved["arch"] = saved["arch"].split(":")[-1]
    return checkpoint


def sum_of_bits(checkpoint):
    """Return a number that almost surely tells different weights apart. Without a checkpoint: 0.

    It adds up the bits of all weights as whole numbers. Unlike a sum of floats, this sum does not
    depend on the order, so every machine gets the same.
    """
    weights = checkpoint["model"].values() if checkpoint else []
    return sum(int(weight.float().view(torch.int32).sum()) for weight in weights)


def save_checkpoint(path, model, code, optimizer, step, config, dataset):
    """Save all that a resumed run needs. `code` is the model's block_code when the run began."""
    with atomic_write(path) as file:
        torch.save({
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "config": asdict(config),
            "options": config.options,
            "block_code": code,
            "tokenizer": dataset.tokenizer,
            "dataset": dataset.fingerprint,
            "dataset_sizes": dataset.sizes,
            "added_tokens": dataset.added_tokens,
        }, file)


def check_dataset(config, checkpoint, dataset, resuming=False):
    """Raise DataError unless a checkpoint fits the dataset.

    It must have the same tokenizer and, if its run is resumed, must come from the same dataset.
    """
    check(checkpoint["tokenizer"] == dataset.tokenizer, "the checkpoint was trained with "
          f"tokenizer={checkpoint['tokenizer']}, but {config.data} has "
          f"tokenizer={dataset.tokenizer}")
    if resuming:
        # The fingerprint is that of all tokens. The sizes tell how many of these are for training,
        # and how many for validation. (In older checkpoints, "dataset" is either the fingerprint or
        # the sizes, and "dataset_sizes" is missing. The oldest have neither, so that any dataset
        # passes.) Neither counts the tokens of shards that the user has added, so these are
        # compared, too, unless the checkpoint is older and does not have "added_tokens".
        known = (dataset.fingerprint, dataset.sizes, None)
        is_same = (checkpoint.get("dataset") in known
                   and checkpoint.get("dataset_sizes") in known
                   and checkpoint.get("added_tokens", dataset.added_tokens) == dataset.added_tokens)
        check(is_same, f"{config.out_dir}: trained on another dataset than the one in "
              f"{config.data}; resume with the same --data, or start a new run with --init_from")


def load_moments(optimizer, saved):
    """Restore Adam's moments, but keep this run's learning rate, betas and weight decay."""
    groups = optimizer.state_dict()["param_groups"]
    # On a CPU the optimizer would keep the tensors of `saved` themselves. They are mapped from the
    # checkpoint's file, which would then stay on the disk after a new checkpoint has replaced it.
    # So give it copies.
    moments = copy.deepcopy(saved["state"])  # index of a parameter -> its moments
    if isinstance(optimizer, torch.optim.AdamW):
        # If make_optimizer() has been edited, a parameter may get another one's moments. The fused
        # AdamW would not notice, and would read beyond the end of a tensor.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        shapes = {index: p.shape for index, p in enumerate(parameters)}
        for index, of_parameter in moments.items():
            fits = "exp_avg" in of_parameter and of_parameter["exp_avg"].shape == shapes.get(index)
            check(fits, "the checkpoint's moments do not fit this optimizer; undo what has changed "
                  "in make_optimizer(), or start a new run with --init_from")
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def with_checkpoint(config, checkpoint, own_checkpoint=False):
    """Return config, completed by the options of a checkpoint.

    A run that starts from another run's weights inherits the options of the model. If
    own_checkpoint is true, the checkpoint is that of the run in out_dir, which is resumed or
    evaluated. Then the run also inherits the options that its recipe gave it, and all others that
    were set when it was started, or when it was resumed before.
    Raises DataError if an option that is set now contradicts the checkpoint: its model, or, if
    own_checkpoint is true, its run.
    """
    source = config.out_dir if own_checkpoint else config.init_from
    saved = checkpoint["config"]
    check(saved["arch"] in ARCHS or "arch" in config.options, f"{source}: its arch is defined in a "
          f"file of the user's; set --arch=FILE.py:{saved['arch']}")

    of_model = {name: saved[name] for name in saved if name in GPTConfig.__dataclass_fields__}
    # The options of the model must match, except those without effect on loaded weights.
    must_match = of_model.keys() - {"dropout", "checkpoint_blocks", "embed_std"}
    if own_checkpoint:
        # The size must match, too, since the batch and the length of the run come from it. The
        # weights that init_from names are not read again, so refuse a new init_from. (Some older
        # checkpoints do not have these options.)
        must_match |= {"seed", "total_batch_size", "size", "init_from"} & saved.keys()
        # Besides the options of the model, inherit those that were set, and three that the recipe
        # may have given, because it may have been edited since. The others, such as the intervals,
        # are derived again, since a longer run has other ones. (of_model stands last, because its
        # arch is only a name: read_checkpoint() has cut off the file. In older checkpoints the arch
        # that was set may still name a file, and loading a checkpoint must never run a file.)
        from_recipe = {name: saved[name]
                       for name in ("learning_rate", "weight_decay", "warmup_ratio")}
        inherited = {**from_recipe, **checkpoint["options"], **of_model}
    else:
        inherited = of_model
        # A run that only starts from the weights may choose these.
        must_match -= {"block_size", "pn_warmup"}
        # The checkpoint's width and depth win over those of --size, so another --size would not
        # give the model of that size. Refuse it.
        if "size" in config.options:
            for name in ("n_embd", "n_layer", "n_head"):
                check(getattr(config, name) == saved[name], f"{source}: made with {name}="
                      f"{saved[name]}, which is not that of --size={config.size}; leave out --size")
    # Keep the folder of `config`. The default folder of the inherited arch may be another one.
    completed = TrainConfig(**{**inherited, **config.options, "out_dir": config.out_dir})

    # Compare the options that must match. Only one that is set now can differ: the others are
    # inherited, or come from the same size and the same defaults.
    for name in sorted(must_match):
        value = getattr(completed, name)
        check(value == saved[name], f"{source}: made with {name}={saved[name]}, now {name}={value}"
              f"; repeat the earlier one or leave out --{name}, or choose another run")
    completed.check_model()

    if own_checkpoint:
        keep_warmup_steps(completed, checkpoint)
    return completed


def keep_warmup_steps(config, checkpoint):
    """Give a resumed run as many warmup steps as its checkpoint's config has.

    With the same warmup_ratio, a larger max_steps would give more of them, and the run would be in
    its warmup again. So config.warmup_ratio is reduced, and with it that of the next checkpoint;
    config.options still has the ratio that was asked for, by a command or else by the recipe. If
    this command asks for another one, it gets it. Suppose the recipe has 0.2:
                                                            asked for   warmup steps   warmup_ratio
        --max_steps=1000                                          0.2            200            0.2
        --resume=true --max_steps=2000                            0.2            200            0.1
        --resume=true --max_steps=4000                            0.2            200           0.05
        --resume=true --max_steps=8000 --warmup_ratio=0.3         0.3           2400            0.3
    The cosine after the warmup does become that of the longer run, so the learning rate rises when
    the run is resumed.
    """
    saved = checkpoint["config"]
    # A resumed run has the ratio that was asked for among its options, because it inherits it. The
    # one in `saved` may have been reduced here. If the options lack it, the run was never resumed,
    # and the one in `saved` is the recipe's.
    asked_before = checkpoint["options"].get("warmup_ratio", saved["warmup_ratio"])
    asked_now = config.warmup_ratio
    if asked_now == asked_before:
        warmup_steps = round(saved["warmup_ratio"] * saved["max_steps"])
        # A run that is now shorter than its warmup has a warmup in all of its steps.
        config.warmup_ratio = min(1.0, warmup_steps / config.max_steps)


def read_start(config):
    """Return (config, checkpoint): the checkpoint that a run starts from, if it starts from one.

    If the run in out_dir is resumed or evaluated, this is its own checkpoint, even if the run began
    with init_from, because its weights are newer. Otherwise it is the one that init_from names, or
    None without init_from. The config is completed by the checkpoint's options. Raises DataError.
    """
    if config.uses_own_checkpoint:
        is_there = Path(config.out_dir, "ckpt.pt").exists()
        hint = "give another --out_dir" if config.eval_only else "leave out --resume to start one"
        check(is_there, f"{config.out_dir}: no run here yet; {hint}")
        checkpoint = read_checkpoint(config.out_dir)
        return with_checkpoint(config, checkpoint, own_checkpoint=True), checkpoint
    if config.init_from:
        checkpoint = read_checkpoint(config.init_from)
        return with_checkpoint(config, checkpoint), checkpoint
    return config, None


def load_model(source, device="cpu", arch=None):
    """Return (model in eval mode, tokenizer, checkpoint) of a run's folder, a .pt file or gpt2.

    `arch` is "FILE.py:NAME" if the model's arch is defined in a file of your own. Raises DataError.
    """
    checkpoint = read_checkpoint(source)
    # Pretend to start a run from these weights: with_checkpoint() then gives it the options of the
    # model. An arch of None counts as not set.
    config = with_checkpoint(TrainConfig(init_from=source, arch=arch), checkpoint)
    model = make_model(config, device, checkpoint)
    return model.eval(), get_tokenizer(checkpoint["tokenizer"]), checkpoint


# ---- A run's folder and its log ------------------------------------------------------------------

RUN_FILES = ("ckpt.pt", "log.jsonl", "loss.png")


def open_folder(folder, say):
    """Make the folder of a new run. An earlier run in it is moved to folder.1, folder.2, ..."""
    with explain_errors(f"out_dir={folder}: cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    # Moving the folder would move everything in it, such as other runs, a dataset or this program.
    # So refuse a folder that holds anything but a run and hidden files. (A run that was killed may
    # leave ckpt.pt.tmp.)
    others = [path.name for path in folder.iterdir() if not path.name.startswith(".")
              and path.name.removesuffix(".tmp") not in RUN_FILES]
    if others:
        raise ConfigError(f"out_dir={folder}: holds other files ({', '.join(sorted(others)[:3])}); "
                          f"give this run its own folder, such as --out_dir={folder}/mine")
    if any((folder / name).exists() for name in RUN_FILES):
        if folder.is_symlink():
            folder = folder.resolve()  # Move what the link names, and leave the link.
        n = 1
        while Path(f"{folder}.{n}").exists():
            n += 1
        with explain_errors(f"{folder}: cannot move the earlier run; give another --out_dir"):
            folder.rename(f"{folder}.{n}")
            folder.mkdir()
        say(f"The earlier run in {folder} has moved to {folder}.{n}")


def read_log(folder):
    """Return the records of a run's log.jsonl. Without a log the list is empty.

    Lines that are not records are skipped. Usually that is only a last line that was cut off when
    the process was killed.
    """
    records = []
    path = Path(folder, "log.jsonl")
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def cut_log(folder, step):
    """Drop the records after a step: the run was killed later, but resumes from this step.

    Returns the training time in the last record that is kept, in seconds.
    """
    seconds = 0.0
    records = [record for record in read_log(folder) if record["step"] <= step]
    with atomic_write(folder / "log.jsonl") as file:
        for record in records:
            file.write(json.dumps(record).encode() + b"\n")
            seconds = record.get("seconds", seconds)
    return seconds


def append_log(folder, record):
    def to_float(number):
        # The numbers that train()'s argument `watch` returns may be tensors. float() would warn of
        # one that requires a gradient.
        if isinstance(number, torch.Tensor):
            number = number.detach()
        return float(number)

    line = json.dumps(record, default=to_float) + "\n"
    path = folder / "log.jsonl"
    with explain_errors(f"{path}: cannot be written; is the disk full?"), open(path, "a") as file:
        file.write(line)


def draw_curve(axes, records, key, star_size=9, **style):
    """Draw an entry of a log's records against their training tokens. Return True if it has a star.

    The last validation of a run usually reads more tokens than the earlier ones, so it cannot be
    compared with them. It is then drawn as a star, which no line connects to them. (A run that was
    resumed with a larger --max_steps may have several.)
    """
    records = [record for record in records if key in record]
    tokens = np.array([record["tokens"] / 1e6 for record in records])
    values = np.array([record[key] for record in records], float)
    is_star = np.full(len(records), False)
    if key.startswith("val") and len(records) > 1:
        # Older logs do not have val_tokens.
        val_tokens = np.array([record.get("val_tokens", 0) for record in records])
        # Compare each number with the one that follows, and the last with the one before it.
        neighbors = np.append(val_tokens[1:], val_tokens[-2])
        is_star = val_tokens > neighbors
    [line] = axes.plot(tokens[~is_star], values[~is_star], **style)
    axes.plot(tokens[is_star], values[is_star], "*", ms=star_size, color=line.get_color(),
              zorder=line.get_zorder())
    return is_star.any()


def draw_losses(folder):
    """Draw loss.png: the training loss and the validation loss against the training tokens."""
    axes = Figure(figsize=(8, 5), layout="constrained").subplots()
    # The validation loss of step 0 is usually so high that it would squeeze all the rest.
    records = [record for record in read_log(folder) if record["step"] > 0]
    draw_curve(axes, records, "loss", label="training")
    has_star = draw_curve(axes, records, "val_loss", marker="o", ms=4, ls="--", label="validation")
    note = "; star: the last validation, on more tokens" if has_star else ""
    axes.set(xlabel=f"training tokens (millions){note}", ylabel="loss (nats per token)",
             title=str(folder))
    axes.grid(alpha=0.3)
    axes.legend()
    axes.figure.savefig(folder / "loss.png")


# Dense bfloat16 operations per second, from NVIDIA's data sheets.
PEAK_FLOPS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}


def flops_per_token(model):
    """Return the operations per token of a training step.

    Each weight of a matrix needs 2 operations in the forward pass and 4 in the backward pass.
    Attention takes two products over n_embd channels (q k^T, and the weights times v) for each
    position that it looks at, so it needs 2 * 6 n_embd per layer and position. On average it looks
    at block_size / 2. (nanoGPT counts all block_size positions, which gives a higher MFU.)
    """
    c = model.config
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return 6 * weights + 12 * c.n_layer * c.n_embd * c.block_size // 2


def utilization(model, tokens_per_s, process):
    """Return {"mfu": ...}, the model FLOPs utilization, or {} if the GPU's peak speed is unknown.

    The utilization is the number of operations per second that the model needs, as a fraction of
    the GPUs' peak speed.
    """
    if process.device.type == "cuda" and process.dtype == torch.bfloat16:
        peak = PEAK_FLOPS.get(torch.cuda.get_device_name(process.device))
        if peak:
            return {"mfu": flops_per_token(model) * tokens_per_s / (peak * process.world_size)}
    return {}


def progress_line(record, config):
    """Return one line for the user, with a record's step, losses, speed and the time left."""
    line = f"step {record['step']}/{config.max_steps}"
    if "tokens_per_s" in record:
        tokens_left = (config.max_steps - record["step"]) * config.total_batch_size
        seconds_left = tokens_left / record["tokens_per_s"]
        line += f"   loss {record['loss']:.3f}   {record['tokens_per_s']:,.0f} tokens/s"
        if "mfu" in record:
            line += f"   {100 * record['mfu']:.1f}% MFU"
        if tokens_left > 0:
            line += f"   {timedelta(seconds=round(seconds_left))} left"
    if "val_loss" in record:
        line += f"   val loss {record['val_loss']:.3f}"
        if record["val_error"] is not None:
            line += f" ± {record['val_error']:.3f}"
        line += f" on {record['val_tokens']:,} tokens ({record['val_bpb']:.3f} bits per byte)"
    return line


# ---- One optimizer step --------------------------------------------------------------------------

class Diverged(DataError):
    """A loss or a gradient is not finite, or the validation loss is far above that of guessing."""
    exit_code = 3  # run_script() exits with it; other errors give 2


def check_val_loss(val_loss, initial_loss, step, config):
    """Raise Diverged if a validation loss is not finite, or far above that of guessing.

    Guessing has a loss of log(vocab_size), and twice that is allowed, which is our choice. The
    initial weights may be even worse, and may take some steps to get better, so their loss is
    allowed, too.
    """
    if not math.isfinite(val_loss):
        cause = "a lower --learning_rate may help" if step > 0 else "no step has been taken yet"
        raise Diverged(f"step {step}: the validation loss is {val_loss}; {cause}")
    largest_sane_loss = max(2 * math.log(config.vocab_size), initial_loss)
    if val_loss > largest_sane_loss:
        raise Diverged(f"step {step}: the validation loss {val_loss:.4g} is far above that of "
                       "guessing; a lower --learning_rate may help")


def learning_rate(config, step):
    """Return the learning rate of a step: a linear warmup, then a cosine decay."""
    warmup_steps = round(config.warmup_ratio * config.max_steps)
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / warmup_steps
    # `progress` rises from 0 at the first step after the warmup to 1 at the last step of the run.
    # (If these are the same step, it is 0.)
    progress = (step - warmup_steps) / max(1, config.max_steps - 1 - warmup_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2  # from 1 down to 0
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def clear_gradients(optimizer, process):
    """Free the gradients or, with several ranks, fill them with zeros."""
    # With several ranks the gradients live in buckets, the tensors in which DistributedDataParallel
    # sends them. Keep them there, because it would have to copy new gradients into its buckets.
    optimizer.zero_grad(set_to_none=process.world_size == 1)


def optimizer_step(step, model, optimizer, micro_batches, config, process):
    """Take one optimizer step, and return what it measured.

    `micro_batches` are this rank's share of the step; all ranks have equally many. `model` is a
    GPT, or a GPT inside DistributedDataParallel. The result has `lr` and two tensors, `grad_norm`
    (before clipping) and `loss`. The sum of `loss` over all ranks is the mean loss of the step.
    Reading a tensor makes the CPU wait for the GPU, so that is left to read_measurements.
    """
    lr = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = lr

    # Reseed every step, so that a resumed run draws the dropout masks of an uninterrupted one. Each
    # rank has masks of its own. (The hash of numbers is always the same; only that of text changes
    # at each start.)
    torch.manual_seed(hash((config.seed, step, process.rank)))

    loss_share = 0.0  # this rank's part of the mean loss
    for number, (x, y) in enumerate(micro_batches, 1):
        # Let DistributedDataParallel sum the gradients over the ranks only in the backward pass of
        # the last micro-batch. Setting this attribute before the forward pass is what its no_sync()
        # does. Without DistributedDataParallel nothing reads it.
        is_last = number == len(micro_batches)
        model.require_backward_grad_sync = is_last
        with process.autocast():
            _, micro_loss = model(x, y, loss_only=True)
            # Divide by the number of ranks, too, since their gradients are summed (sum_bucket).
            scaled_loss = micro_loss / (len(micro_batches) * process.world_size)
        scaled_loss.backward()
        loss_share += scaled_loss.detach()

    # A grad_clip of 0 turns clipping off, but the norm is measured all the same.
    max_norm = config.grad_clip or math.inf
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    clear_gradients(optimizer, process)

    # Constrain nGPT's and anGPT's weights, and update PowerNorm's running means.
    # (DistributedDataParallel keeps the GPT in its attribute `module`.)
    getattr(model, "module", model).project_()
    return {"loss": loss_share, "grad_norm": grad_norm, "lr": lr}


def read_measurements(measured, step, process):
    """Return the loss, gradient norm and learning rate of a step as numbers, the same on all ranks.

    Raises Diverged if the loss or the gradient norm is not finite.
    """
    loss = sum(process.gather(measured["loss"].item()))
    # The norm is that of gradients that are summed already, so it is the same on all ranks.
    grad_norm = measured["grad_norm"].item()
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise Diverged(f"step {step}: loss {loss}, gradient norm {grad_norm}; "
                       "a lower --learning_rate may help")
    return {"loss": loss, "grad_norm": grad_norm, "lr": measured["lr"]}


# ---- Training ------------------------------------------------------------------------------------

@contextlib.contextmanager
def noted_signals():
    """Yield a list that collects the signals to stop: Ctrl-C, kill, and a closed terminal.

    The loop looks at the list between steps. A second signal of the same kind ends the process at
    once, but not under torchrun.

    If a signal has come, KeyboardInterrupt or SystemExit is raised when the `with` block is left,
    so that a loop over several runs ends, too. By then the run has been saved and stopped, or has
    finished. If it has failed, its own exception is raised, unless the compiler has failed, which
    Ctrl-C may have ended.
    """
    received = []
    # This maps a signal's number to its earlier handler. note() puts it back, so that it handles a
    # second signal of this kind. Otherwise it is put back after the run.
    handlers = {}

    def note(number, frame):
        received.append(number)
        # Under torchrun Ctrl-C may arrive twice, once from the terminal and once from torchrun. So
        # there a second signal is only noted.
        if "RANK" not in os.environ:
            signal.signal(number, handlers[number])
        # A step or a validation may last minutes, so say that the signal has been noticed. (print()
        # would fail if the signal came in the middle of another print().)
        with contextlib.suppress(OSError):
            os.write(2, b"\nAs soon as this step or validation has ended (with several processes, "
                        b"within ten steps), the run is saved and stops. Without torchrun, the "
                        b"same signal once more ends it at once, without saving.\n")

    # Only the main thread can handle signals.
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is None:
                continue  # Windows has no SIGHUP
            handler = signal.getsignal(number)
            if handler == signal.SIG_IGN:
                if name == "SIGHUP":
                    continue  # nohup lets a run outlive its terminal
                # In a shell script, a command that ends with & ignores SIGINT. From now on
                # `kill -INT` stops the run, and a second one ends the process.
                handler = signal.SIG_DFL
            handlers[number] = handler
            signal.signal(number, note)
    try:
        yield received
    except torch._dynamo.exc.BackendCompilerFailed:
        # Ctrl-C in a terminal also ends the compilers that torch has started, so that the step
        # fails. Then nothing is saved. On a GPU there may be no checkpoint yet, because the
        # validation of step 0 compiles, too. So recommend "auto", which always works.
        if not received:
            raise
        print("Stopped while compiling. To resume: the same command with --resume=auto",
              file=sys.stderr)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        number = received[0]
        raise KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def any_rank_stops(signals, process):
    """Return True if any rank has noted a signal. If so, note it on every rank."""
    noted = sum(process.gather(signals), [])  # the lists of all ranks, joined
    # A rank may then have its own signals twice. But noted_signals() uses only the first.
    signals.extend(noted)
    return len(noted) > 0


def print_line(text):
    """Print a line at once. Characters that the console does not have become "?"."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        print(text.encode("ascii", "replace").decode(), flush=True)
    except OSError:
        pass  # The terminal, or the program that reads our output, is gone. Keep training.


def train(config, watch=None, say=print_line):
    """Run the training that a TrainConfig describes, and return the records of its log.

    With eval_only the list has one record, that of the validation.

    During training, watch(model, optimizer, step) is called at each validation. If it returns a
    dict of numbers, the record gets its entries. watch may run the model and compute gradients. But
    it has to run PowerNorm in eval mode (model.eval()), because in training mode a forward pass
    changes PowerNorm's running means. With several ranks, every rank must pass the same watch.

    say(line) shows the progress; say=None is quiet, except for warnings and while a missing dataset
    is made. Raises ConfigError, DataError or Diverged. If a signal tells a running loop to stop,
    the run is saved, and then this function raises KeyboardInterrupt (Ctrl-C) or SystemExit.

    All threads of a process share torch's random numbers. So run one training at a time in a
    process. Otherwise the seed does not fix initial weights and dropout.
    """
    # torchrun sets RANK. (torch.distributed may not know it yet.)
    main_process = os.environ.get("RANK", "0") == "0"
    if say is None or not main_process:
        # say=None is quiet, and of several ranks only rank 0 speaks.
        say = lambda line: None
    if config.eval_only:
        return [evaluate_only(config, say)]
    lock = contextlib.nullcontext()
    if main_process:
        # The lock file lies beside the folder, so that open_folder() can move the folder.
        lock = lock_folder(config.out_dir, "another run is writing here; give another --out_dir")
    with lock:
        return run(config, watch, say)


def evaluate_only(config, say):
    """Return the validation record of the run in out_dir, or of init_from's weights."""
    config, checkpoint = read_start(config)
    process = set_up_process(config)
    dataset = open_dataset(config, process)
    check_dataset(config, checkpoint, dataset)
    config = resolve(config, dataset.vocab_size, process.world_size)
    model = make_model(config, process.device, checkpoint)
    process.check_agreement(config, step=checkpoint["step"], weights=sum_of_bits(checkpoint),
                            dataset=dataset.fingerprint, added_tokens=dataset.added_tokens)
    # Use as many tokens as the last validation of a run with these options.
    record = evaluate(model, dataset, config, process, config.final_eval_tokens)
    say(json.dumps(record))
    return record


def run(config, watch, say):
    """Set up a run and train. `watch`, `say` and the result are explained at train()."""
    # Is this run resumed? Ask now: with resume=auto the property looks for ckpt.pt in out_dir, so
    # it becomes true as soon as this run has saved one.
    resuming = config.uses_own_checkpoint

    # Checkpoint. It is None if the run starts with random weights. read_start() also adds the
    # options of the checkpoint to `config`. So it comes first: the device may be one of them.
    config, checkpoint = read_start(config)
    # The number of steps already done, which is also the index of the next one (from 0).
    first_step = checkpoint["step"] if resuming else 0

    # Device and ranks
    process = set_up_process(config)
    main_process = process.rank == 0

    # Dataset
    dataset = open_dataset(config, process)
    if checkpoint:
        check_dataset(config, checkpoint, dataset, resuming)
    # Complete the options that are still open. After this every option has its final value.
    config = resolve(config, dataset.vocab_size, process.world_size)

    # Model
    model = make_model(config, process.device, checkpoint)
    # Each checkpoint keeps the source of the block's classes, so that a later change of them is
    # noticed. Read it now, because their file may be edited while the run lasts.
    code_at_start = block_code(model)

    # Agreement. On several machines the command is given on each of them, and each may read a disk
    # of its own. If something differs, ranks may wait for each other forever, or train with
    # different learning rates. (`resuming` is compared, too: with init_from and resume=auto one
    # rank may find the checkpoint that a run saves at step 0, while another finds none. Both begin
    # at step 0 with the weights of init_from, but only one of them is resuming.)
    process.check_agreement(config, resuming=resuming, step=first_step,
                            weights=sum_of_bits(checkpoint), dataset=dataset.fingerprint,
                            added_tokens=dataset.added_tokens, code=code_at_start)
    folder = Path(config.out_dir)
    if resuming and first_step >= config.max_steps:
        say(f"{folder}: already finished at step {first_step}; a larger --max_steps trains further")
        return read_log(folder)

    # Optimizer
    optimizer = make_optimizer(model, config)
    if resuming:
        load_moments(optimizer, checkpoint["optimizer"])
    # The model and the optimizer have copied the checkpoint's tensors by now. Free them.
    checkpoint = None

    # Compiler. This changes `model` in place.
    will_compile = compile_model(model, config, process)

    # Several ranks. All start with equal weights, because they have the same seed or the same
    # checkpoint. ddp_model is a wrapper around `model` that sums the gradients over the ranks.
    # (It does not average them, for the reason in sum_bucket.) With one rank it is `model` itself.
    # Only the optimizer step uses ddp_model, because nothing else sums gradients over the ranks.
    ddp_model = distribute(model, process)

    # Folder and log. A new run moves an earlier one in its folder away. It does so only now: if the
    # set-up above fails, the earlier run stays where it is. A resumed run drops the records that it
    # logged after its checkpoint, before it was killed. Its training time goes on from the time in
    # the last record that stays. (If a signal stopped it at a later step than that record's, the
    # time of the steps between the two is lost.)
    seconds = 0.0  # the time of all optimizer steps, without evaluating, logging and saving
    if main_process:
        if resuming:
            seconds = cut_log(folder, first_step)
        else:
            open_folder(folder, say)
    # The other ranks wait until this is done. If it fails, torchrun sends them SIGTERM, which ends
    # them here. (The loop, below, would only take note of it.)
    process.barrier()

    # Say what will be trained.
    n_parameters = sum(p.numel() for p in model.parameters())
    new_tokens = (config.max_steps - first_step) * config.total_batch_size
    epochs = new_tokens / (dataset.train.windows * config.block_size)
    say(f"{folder}: {config.arch}, {n_parameters:,} parameters, {process.world_size} x "
        f"{process.device.type}, {str(process.dtype).removeprefix('torch.')}")
    say(f"steps {first_step} to {config.max_steps} of {config.total_batch_size:,} tokens, "
        f"{epochs:,.2f} epochs of {config.data}; peak learning rate {config.learning_rate:.2g}")
    if will_compile:
        say("The model is compiled at the beginning, which takes about 20 seconds on a CPU and one "
            "to two minutes on a GPU, and less if torch still has its code from an earlier run.")
    # The work grows with the number of parameters times the number of tokens. 3e15 is some 800
    # times that of the default run, which takes about three minutes.
    if process.device.type == "cpu" and n_parameters * new_tokens > 3e15:
        say("This run is meant for GPUs. On a CPU the first validation or step may take many "
            "minutes, and the run days or longer.")

    # The loop sets these later.
    measured = None     # what the latest optimizer step has measured
    initial_loss = 0.0  # the validation loss of the initial weights (0 if the run is resumed)
    clock_start = 0.0   # when the clock of the optimizer steps was started
    clock_step = 0      # how many steps had been taken then

    # From here on the first Ctrl-C does not end the process: the loop sees it and saves first.
    with noted_signals() as signals:
        for step in range(first_step, config.max_steps + 1):
            # At this point `step` optimizer steps have been taken. A pass of the loop reads the
            # loss of the latest one, evaluates, asks whether to stop, logs, saves and stops, each
            # if it is due, and then takes the next step. (The last pass takes none.)

            # Decide what is due. Whenever a validation or a checkpoint is due, so is a record in
            # the log. (At step 0 the initial weights are validated and saved, too.)
            finished = step == config.max_steps
            evaluating = finished or step % config.eval_interval == 0
            saving = finished or step % config.checkpoint_interval == 0
            recording = evaluating or saving or step % config.log_interval == 0
            if resuming and step == first_step:
                # What was due at this step was done before the run was saved. Only the optimizer
                # step, below, is due.
                evaluating = saving = recording = False
            # For a record, read what the latest step has measured. Read it after the first step as
            # well: that step may include compiling, and its time must not count in the speed of the
            # next record.
            after_first_step = step == first_step + 1
            reading = after_first_step or (recording and step > first_step)
            record = {"step": step, "tokens": step * config.total_batch_size}

            # Read the loss of the latest step, and the time of all steps since the last reading.
            # (This loss is that of the weights before the latest step. The validation loss, below,
            # is that of the weights after it.)
            if reading:
                # The CPU queues a GPU's work and goes on. But to read the loss it has to wait for
                # the GPU. So all steps have ended when it reads the clock.
                record |= read_measurements(measured, step, process)
                elapsed = time.perf_counter() - clock_start
                seconds += elapsed
                n_tokens = (step - clock_step) * config.total_batch_size
                record["tokens_per_s"] = n_tokens / elapsed
                record |= utilization(model, record["tokens_per_s"], process)
                # If the first step shows that the run will take very long, tell the time left now.
                # (Compiling alone takes less than these 180 seconds. If a record is due, its
                # progress line tells the time left, below.)
                if after_first_step and elapsed > 180 and not recording:
                    say(progress_line(record, config))
            record["seconds"] = seconds

            # Evaluate the weights after the latest step, and let the caller of train() measure what
            # it wants to (`watch`).
            if evaluating:
                eval_tokens = config.final_eval_tokens if finished else config.eval_tokens
                # The time left counts the steps only, so say why the run takes longer.
                if min(eval_tokens, dataset.val.n_tokens) > config.eval_tokens:
                    say("The last validation reads more text than the others, and takes longer.")
                record |= evaluate(model, dataset, config, process, eval_tokens)
                if step == 0:
                    initial_loss = record["val_loss"]
                check_val_loss(record["val_loss"], initial_loss, step, config)
                if watch:
                    extra = watch(model, optimizer, step) or {}
                    # watch may have switched the model to eval mode and left gradients, which must
                    # not reach the next step.
                    model.train()
                    clear_gradients(optimizer, process)
                    record = extra | record  # for equal names, the record's value stays

            # Ask whether any rank has been told to stop. Several ranks exchange their answers, for
            # which the CPU has to wait until the GPU has done all queued work. So they ask only
            # where a record is due, because then the CPU has waited already, and at every tenth
            # step, in case records are rare.
            asking = process.world_size == 1 or recording or step % 10 == 0
            stopping = asking and any_rank_stops(signals, process)
            if stopping:
                # A run that stops saves its state now, even if no checkpoint and no record is due.
                saving = True
                # But a run that has diverged must not be saved. So read the latest loss and
                # gradient first: if they are not finite, this raises Diverged.
                if step > first_step:
                    read_measurements(measured, step, process)

            # Log, save and draw, on the main process. (The other ranks go on, and wait for it where
            # they next exchange something.)
            if main_process:
                if recording:
                    append_log(folder, record)
                    say(progress_line(record, config))
                if saving:
                    save_checkpoint(folder / "ckpt.pt", model, code_at_start, optimizer, step,
                                    config, dataset)
                if evaluating and step > 0:
                    # A run goes on without its picture, for example if matplotlib lacks a font.
                    try:
                        draw_losses(folder)
                    except Exception as error:
                        say(f"{folder}/loss.png: cannot be drawn ({error})")

            # Stop after a signal, or at the end of the run.
            if stopping or finished:
                break

            # Start the clock before the first step, and again whenever it has been read. So it does
            # not count the time of evaluating, logging and saving.
            if reading or step == first_step:
                clock_start = time.perf_counter()
                clock_step = step

            # Take one optimizer step.
            micro_batches = batches(dataset.train, step, config, process)
            measured = optimizer_step(step, ddp_model, optimizer, micro_batches, config, process)

        # Wait for rank 0, which may still be saving. After a signal the ranks exit with an error
        # code (noted_signals), and as soon as one has done so, torchrun kills the others. Without
        # this wait it might kill rank 0 before the checkpoint is whole.
        process.barrier()
        if not finished:
            say(f"\nStopped and saved at step {step}. "
                "To resume: the same command with --resume=true")
        # After a signal, leaving the `with` block raises an exception, so that this function does
        # not return.
        return read_log(folder)


def main(argv):
    config = TrainConfig(**parse_options(argv, __doc__, TrainConfig))
    if config.eval_only:
        # train()'s usual way to print does nothing if the terminal is gone. But if this result
        # cannot be printed, that is an error.
        train(config, say=print)
        return
    train(config)
    # Print a sample, except under torchrun, where every rank would print one.
    if "RANK" not in os.environ:
        # The run is complete without a sample. The sample may fail, because a tokenizer needs a
        # download, or because an arch of your own does not work with the KV cache.
        try:
            device = find_device(config.device)
            model, tokenizer, _ = load_model(config.out_dir, device)
            start = torch.tensor([[tokenizer.eot_token]], device=device)
            # generate() yields one new token at a time, without the start.
            tokens = torch.cat(list(model.generate(start, 400, temperature=0.8)))
            # A padded vocabulary has ids that stand for no text.
            tokens = tokens[tokens < tokenizer.n_vocab]
            text = tokenizer.decode(tokens.tolist())
            print_line(f"\nA sample of {config.out_dir} (sample.py writes more):\n\n{text}")
        except Exception as error:
            print_line(f"\nThe run is complete, but no sample can be made: "
                       f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        run_script(main)
    else:
        # Under torchrun a background thread of torch, such as a communication thread, may still be
        # running, and a normal exit might abort because of it.
        exit_code = 0
        try:
            run_script(main)
        except SystemExit as stop:
            exit_code = stop.code or 0
        sys.stdout.flush()
        os._exit(exit_code)
