"""
Train a GPT: on a laptop in minutes, on eight GPUs for days, with the same code.

    python train.py                                  # laptop size; makes the default corpus if it is missing
    python train.py --arch=ngpt --max_steps=500      # another architecture, shorter
    python train.py --data=data/fineweb --size=125m  # a size of the anGPT paper's Table F.1
    python train.py --resume=true                    # go on after an interruption
    torchrun --nproc_per_node=8 train.py --data=data/fineweb --size=0.5b
    python train.py --diagnose=true                  # norms, gradients, scales by layer into log.jsonl: `diagnose`
    python train.py --warmup_ratio=1 --learning_rate=0.1 --max_steps=2000 --grad_clip=0 --pn_warmup=200 --log_interval=1

It writes out/<arch>/ckpt.pt, log.jsonl and loss.png, and ends with a sample. From Python: train(TrainConfig(...)).
An option that is not given comes from the arch's recipe (RECIPES), else from the size (SIZES), else from its default.

The last command is NormFormer's stability test (Fig. 5): the learning rate rises by 0.1 / 2000 a step, and what counts is
the step after which the loss never comes back (loss.png), or stops being a number (exit code 3). The paper trains in
float16, which overflows sooner. --pn_warmup is for powernorm, which otherwise warms up as long as the learning rate.
"""
import argparse
import contextlib
import contextvars
import ctypes
import difflib
import filecmp
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import typing
import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

# Threads wait for each other in a loop; beside other work on the same cores a long one costs ten times the time.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")             # read when torch loads

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

try:
    import resource
except ImportError:             # Windows
    resource = None

import model as model_py
from model import (ANGPTBlock, ARCHS, GPT, KERNELS, ConfigError, GPTConfig, PowerNorm, Scale, attend, attention_kernel,
                   check, choose, option)
from prepare import DataError, atomic, blame, bytes_per_token, expect, get_tokenizer, prepare, read_meta, read_shard

DEFAULT_DATA = "data/stdlib"


def paper_size(n_embd, n_layer, n_head, batch_size):
    """A column of anGPT's Table F.1; context from section 5, rope_fraction from Table F.2, batch sizes ours."""
    return dict(n_embd=n_embd, n_layer=n_layer, n_head=n_head, vocab_size=50304, block_size=2048, rope_fraction=0.5,
                batch_size=batch_size, total_batch_size=2 ** 19, eval_tokens=10 * 2 ** 20)


SIZES = {
    "laptop": dict(n_embd=128, n_layer=4, n_head=4, block_size=256, rope_fraction=1.0,
                   batch_size=8, total_batch_size=2048, max_steps=1600, eval_tokens=2 ** 14),
    "32m": paper_size(256, 6, 4, 32),
    "62m": paper_size(384, 10, 6, 32),
    "125m": paper_size(512, 18, 8, 16),
    "250m": paper_size(768, 18, 12, 16),
    "0.5b": paper_size(1024, 24, 16, 8),
    "1b": paper_size(1280, 36, 20, 4),
}

# Learning rates: the best of a sweep at laptop size (README); at other widths times sqrt(128 / n_embd), a guess of ours.
# ngpt and angpt need neither weight decay nor warm-up (nGPT section 2.6, anGPT Table F.2).
PRE_NORM = dict(learning_rate=4e-3, weight_decay=0.1, warmup_ratio=0.2)
RECIPES = {
    "layernorm": PRE_NORM,
    "rmsnorm": PRE_NORM,
    "rmsnorm+qk_norm": dict(PRE_NORM, learning_rate=2e-3),                            # GPT+
    "powernorm": PRE_NORM,
    "normformer": PRE_NORM,
    "ngpt": dict(learning_rate=8e-3, weight_decay=0.0, warmup_ratio=0.0),
    "angpt": dict(learning_rate=4e-3, weight_decay=0.0, warmup_ratio=0.0),
}


@dataclass
class TrainConfig(GPTConfig):
    """Every option of a run. None stands for a value that `resolve` finds: by arch, by size, or as the help says."""

    size: str = option("laptop", "preset: " + ", ".join(SIZES))
    data: str = option(DEFAULT_DATA, "corpus: a folder made by prepare.py")
    out_dir: str | None = option(None, "folder for results (by default out/<arch>)")
    max_steps: int | None = option(None, "optimizer steps (by size; the paper's sizes: 20 tokens a parameter)")
    batch_size: int | None = option(None, "sequences in a micro-step of one process (by size)")
    total_batch_size: int | None = option(None, "tokens in an optimizer step of all processes (by size)")
    learning_rate: float | None = option(None, "peak learning rate (by arch)")
    min_lr_ratio: float = option(0.01, "last learning rate over the peak; a cosine leads there")
    warmup_ratio: float | None = option(None, "share of the steps in which the learning rate rises (by arch)")
    weight_decay: float | None = option(None, "of matrices and embeddings (by arch)")
    beta1: float = option(0.9, "of Adam")
    beta2: float = option(0.95, "of Adam")
    eps: float = option(1e-9, "of Adam")
    grad_clip: float = option(1.0, "largest norm of the gradient; 0 for no limit")
    eval_interval: int | None = option(None, "steps between validations (100, or more where they would take "
                                             "over 1% of the time)")
    eval_tokens: int | None = option(None, "held-out tokens in a validation (by size)")
    checkpoint_interval: int | None = option(None, "steps between checkpoints (eval_interval, or if less a fifth of all, "
                                                   "at least 100)")
    log_interval: int = option(10, "steps between lines of log.jsonl")
    diagnose: bool = option(False, "with every validation norms, gradients, scales and moments by layer in log.jsonl")
    seed: int = option(1337, "of weights, order of the data, and dropout")
    device: str = option("auto", "auto | cpu | cuda | mps")
    dtype: str = option("auto", "auto | float32 | bfloat16 (autocast; weights stay float32)")
    compile: str = option("auto", "auto | true | false | whole: torch.compile; auto: true where it pays back within the run; "
                          "true: block by block; whole: one graph, steps some 3% shorter, twice as long to compile")
    attention: str = option("auto", "auto | " + " | ".join(KERNELS[1:]) + "; sdpa is torch's own, with its back ends; auto: "
                            "plain on CPUs up to 512 positions, else flash_attn on GPUs that have the package, else sdpa")
    resume: str = option("false", "true | false | auto: go on from out_dir/ckpt.pt; auto: if there is one")
    # Options of the model that a size sets
    vocab_size: int | None = option(None, "tokens in the vocabulary (by size, or the corpus's)")
    block_size: int | None = option(None, "context length in tokens (by size)")
    n_layer: int | None = option(None, "blocks (by size)")
    n_head: int | None = option(None, "attention heads (by size)")
    n_embd: int | None = option(None, "channels of the residual stream (by size)")
    rope_fraction: float | None = option(None, "share of each head's channels that rope turns (by size)")
    pn_warmup: int | None = option(None, "powernorm: steps with the batch's own statistics (those of the warm-up)")

    def __post_init__(self):
        for name in ("compile", "resume"):
            setattr(self, name, str(getattr(self, name)).lower())                    # True and False from Python
        base, *switches = self.arch.split("+")                                        # bench.py's way to write it
        if switches and self.arch not in ARCHS:
            raise ConfigError(f"arch={self.arch}: expected --arch={base} --{'=true --'.join(switches)}=true")
        for name, valid in dict(arch=ARCHS, size=SIZES, dtype=("auto", "float32", "bfloat16"), attention=KERNELS,
                                compile=("auto", "true", "false", "whole"), resume=("auto", "true", "false"),
                                device=("auto", "cpu", "cuda", "mps")).items():
            choose(name, getattr(self, name), valid)
        if self.resid_scale and self.arch != "normformer":
            raise ConfigError(f"resid_scale=True belongs to arch=normformer, given arch={self.arch}")
        check(self, "block_size n_embd n_layer n_head max_steps batch_size total_batch_size learning_rate eps eval_interval "
                    "eval_tokens checkpoint_interval log_interval", lambda x: 0 < x < math.inf, "more than 0")
        check(self, "weight_decay grad_clip pn_warmup", lambda x: 0 <= x < math.inf, "at least 0")
        check(self, "seed", lambda x: 0 <= x < 2 ** 32, "0 to 2 ** 32 - 1")
        check(self, "min_lr_ratio warmup_ratio", lambda x: 0 <= x <= 1, "a number from 0 to 1")
        check(self, "beta1 beta2", lambda x: 0 <= x < 1, "a number from 0 to below 1")

    def model_config(self):
        return GPTConfig(**{f.name: getattr(self, f.name) for f in fields(GPTConfig)})


def resolve(config, corpus_vocab=257, world_size=1):
    """A copy of config with every None replaced: the arch's recipe over the size, derived values last.

    Raises ConfigError where options do not fit together.
    """
    made = getattr(ARCHS[config.arch], "func", ARCHS[config.arch])                    # a class, or a partial of one
    bounded = isinstance(made, type) and issubclass(made, ANGPTBlock)
    family = "angpt" if bounded else "ngpt" if getattr(made, "axes", None) else "rmsnorm"         # without a recipe
    presets = {**SIZES[config.size], **RECIPES.get(config.arch, RECIPES[family]),
               **RECIPES.get(config.arch + "+qk_norm" * config.qk_norm, {})}
    c = replace(config, **{k: v for k, v in presets.items() if getattr(config, k) is None})
    if c.vocab_size is None:
        c.vocab_size = corpus_vocab
    if c.vocab_size < corpus_vocab:
        raise ConfigError(f"vocab_size={c.vocab_size}: the corpus needs at least {corpus_vocab}")
    if config.learning_rate is None:
        c.learning_rate *= (128 / c.n_embd) ** 0.5
    if config.batch_size is None:                                    # more processes: smaller shares of the same step
        share = max(1, round(c.total_batch_size / (c.block_size * world_size)))
        fits = [n for n in range(1, c.batch_size + 1) if config.total_batch_size is None or share % n == 0]
        c.batch_size = min(share, max(fits))
    micro_step = c.batch_size * c.block_size * world_size
    nearest = max(1, round(c.total_batch_size / micro_step)) * micro_step
    if config.total_batch_size is None:
        c.total_batch_size = nearest
    if c.total_batch_size % micro_step:
        raise ConfigError(f"total_batch_size={c.total_batch_size} is no multiple of batch_size x block_size x processes = "
                          f"{c.batch_size} x {c.block_size} x {world_size} = {micro_step}; the nearest is {nearest}")
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(c.model_config()).parameters())
    c.max_steps = c.max_steps or math.ceil(20 * parameters / c.total_batch_size)
    if config.eval_tokens is None:                                   # in short runs not more than a fiftieth of training's
        c.eval_tokens = min(c.eval_tokens, max(2 ** 14, c.max_steps * c.total_batch_size // 50))
    # A held-out token takes half the time of one to train on: validation then takes 1% of the time.
    c.eval_interval = c.eval_interval or max(100, math.ceil(50 * c.eval_tokens / c.total_batch_size))
    c.checkpoint_interval = c.checkpoint_interval or min(c.eval_interval, max(100, c.max_steps // 5))
    c.pn_warmup = warmup_steps(c) if c.pn_warmup is None else c.pn_warmup
    c.out_dir = c.out_dir or f"out/{c.arch}"
    return c


# ---------------------------------------------------------------------------------------------------------------------
# Command line

READERS = {bool: (lambda text: {"true": True, "false": False}[text.lower()], "true or false"),
           int: (int, "a whole number"), float: (float, "a number"), str: (str, "text")}


def parse(cls, argv, description):
    """An instance of the dataclass cls from --key=value words. Raises ConfigError, one line, for what it can't take."""
    def fail(message):
        raise ConfigError(message)

    def reader(kind):
        read, expected = READERS[kind]

        def checked(text):
            try:
                return read(text)
            except (ValueError, KeyError):
                raise argparse.ArgumentTypeError(f"expected {expected}, given {text!r}") from None
        return checked

    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    types, names = typing.get_type_hints(cls), [f.name for f in fields(cls)]
    for f in fields(cls):
        kind = next(t for t in READERS if t in (types[f.name], *typing.get_args(types[f.name])))
        default = "" if f.default is None else f" [{f.default}]"
        about = f.metadata["help"]
        # --resume alone is --resume=true, and so with whatever may be true.
        alone = dict(nargs="?", const="true") if kind is bool or "true" in about.split(" | ") else {}
        parser.add_argument(f"--{f.name}", type=reader(kind), metavar=kind.__name__.upper(), default=argparse.SUPPRESS,
                            help=about.replace("%", "%%") + default, **alone)
    given, unknown = parser.parse_known_args(argv)
    for word in unknown:
        key = word.split("=")[0].lstrip("-")
        near = ([name for name in names if "".join(part[0] for part in name.split("_")) == key]         # lr: learning_rate
                or [name for name in names if key in name.split("_")]                                   # steps: max_steps
                or difflib.get_close_matches(key, names, 1, 0.7))
        fail(f"unknown option {word}; " + (f"did you mean --{' or --'.join(near)}?" if near else "--help lists the options"))
    return cls(**vars(given))


def words(config):
    """The options of a config that are not its class's defaults, as on a command line."""
    return [f"--{f.name}={getattr(config, f.name)}" for f in fields(config) if getattr(config, f.name) != f.default]


def run_script(main, less="a smaller --batch_size takes less"):
    """Calls main with the command line. What a user can mend ends in one line and an exit code in place of a traceback."""
    try:
        return main(sys.argv[1:])
    except (ConfigError, DataError, OSError, UnicodeError) as error:
        code, said = 2, error
    except Diverged as error:
        code, said = 3, error
    except KeyboardInterrupt:
        print(file=sys.stderr)                                       # behind ^C, or a text that was being written
        code, said = 130, "stopped at once; what was saved before is intact"
    except (RuntimeError, MemoryError) as error:
        # torch's class for lack of memory is for GPUs alone.
        if not isinstance(error, MemoryError) and not any(x in str(error) for x in ("tried to allocate", "out of memory")):
            raise
        code, said = 2, f"out of memory; {less} ({' '.join(str(error).split()):.200})"
    sys.exit(print(f"{Path(sys.argv[0]).name}: {said}", file=sys.stderr) or code)


# ---------------------------------------------------------------------------------------------------------------------
# Data

class Tokens:
    """One split of a corpus as one long sequence, cut into windows of `length` tokens, each followed by its target."""

    def __init__(self, folder, split, length, vocab_size):
        paths = sorted(path for path in Path(folder).glob("*.bin") if re.fullmatch(rf".*_{split}_\d+\.bin", path.name))
        expect(paths, f"{folder}: no {split} shards (*_{split}_*.bin); prepare.py makes them")
        self.paths, self.shards = paths, [read_shard(path) for path in paths]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])
        self.length, self.vocab_size = length, vocab_size
        self.windows = (int(self.starts[-1]) - 1) // length
        expect(self.windows, f"{paths[0]}: {self.starts[-1]} tokens, expected more than block_size={length}; give it more "
                             "text, or a smaller --block_size")

    def window(self, i):
        """Tokens i * length to (i + 1) * length, and one more, which may lie in the next shard."""
        start, stop, pieces = i * self.length, (i + 1) * self.length + 1, []
        while start < stop:
            n = int(np.searchsorted(self.starts, start, side="right")) - 1
            piece = self.shards[n][start - self.starts[n]:stop - self.starts[n]].astype(np.int64)
            expect(piece.max() < self.vocab_size,
                   f"{self.paths[n]}: token {piece.max()}, expected less than vocab_size={self.vocab_size}")
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces)

    def batch(self, indices, device):
        """Windows -> inputs and targets, each (len(indices), length)."""
        rows = torch.from_numpy(np.stack([self.window(i) for i in indices]))
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if device.type == "cuda":
            return tuple(t.pin_memory().to(device, non_blocking=True) for t in (x, y))
        return x.to(device), y.to(device)


class Loader:
    """The batch of a step as a function of (seed, step) alone, whatever the processes and micro-batches.

    An epoch visits every window once, in an order drawn from (seed, epoch). Step s takes the windows that follow
    those of step s - 1; every rank and micro-step takes its own part of them.
    """

    def __init__(self, tokens, config):
        self.tokens, self.seed = tokens, config.seed
        self.per_step = config.total_batch_size // config.block_size
        self.epoch, self.order = None, None

    def window_at(self, position):
        epoch, place = divmod(position, self.tokens.windows)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.tokens.windows)
        return int(self.order[place])

    def indices(self, step):
        return [self.window_at(p) for p in range(step * self.per_step, (step + 1) * self.per_step)]

    def batches(self, step, config, machine):
        """This rank's micro-batches of one step: (x, y), each (batch_size, block_size)."""
        mine = self.indices(step)[machine.rank::machine.world_size]
        for i in range(0, len(mine), config.batch_size):
            yield self.tokens.batch(mine[i:i + config.batch_size], machine.device)


@torch.no_grad()
def evaluate(model, tokens, config, machine, token_bytes):
    """Held-out loss in nats per token and bits per byte, over the same tokens whatever the ranks or the arch."""
    model.eval()
    count = max(1, min(tokens.windows, config.eval_tokens // config.block_size))
    total = torch.zeros(3, dtype=torch.float64)                                       # nats, tokens, bytes
    for i in range(machine.rank * config.batch_size, count, machine.world_size * config.batch_size):
        x, y = tokens.batch(range(i, min(i + config.batch_size, count)), machine.device)
        with machine.autocast(), torch.compiler.set_stance("force_eager"):           # compiled for training only
            loss = model(x, y, loss_only=True)[1].item()
        total += torch.tensor([loss * y.numel(), y.numel(), token_bytes[y.cpu()].sum()], dtype=torch.float64)
    model.train()
    nats, n, size = machine.sum(total).tolist()
    return nats / n, nats / math.log(2) / size if size else math.nan


# ---------------------------------------------------------------------------------------------------------------------
# Machine

def matmul_flops(device, dtype, seconds=0.2):
    """Floating-point operations a second of a large square matrix product, the best within so many seconds."""
    n = 8192 if device.type == "cuda" else 1024
    a, best = torch.randn(n, n, device=device).to(dtype), math.inf
    (a @ a)[0, 0].item()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        (a @ a)[0, 0].item()                                                          # .item() waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * n ** 3 / best


def keep_freed_memory():
    """Has Linux's malloc keep what is freed: new pages at every step would take a sixth of its time, small pages 3%."""
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):      # somebody's choice
        with contextlib.suppress(OSError, AttributeError, RuntimeError):
            libc = ctypes.CDLL(None)
            if any(libc.mallopt(-3, size) for size in (2 ** 30, 2 ** 25)):   # M_MMAP_THRESHOLD; old ones take the less
                libc.mallopt(-1, 2 ** 31 - 1)                                # M_TRIM_THRESHOLD
                torch.empty(2 ** 29, dtype=torch.uint8)                      # the heap grows; nothing is written yet
                for line in Path("/proc/self/maps").read_text().splitlines():
                    if line.endswith("[heap]"):
                        start, end = (int(address, 16) for address in line.split()[0].split("-"))
                        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 14)      # MADV_HUGEPAGE


def find_device(name):
    """The device that --device asks for. Raises ConfigError when it is not there."""
    choose("device", name, ("auto", "cpu", "cuda", "mps"))
    name = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available() or name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={name} is not available here; cpu is")
    return name


@contextlib.contextmanager
def attention(name):
    """Within it `attend` uses the kernel `name`, one of KERNELS."""
    back_end = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
                "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-math": SDPBackend.MATH}.get(name)
    outer, tag = model_py.ATTENTION, torch.compiler.config.cache_key_tag
    try:
        with sdpa_kernel(back_end) if back_end else contextlib.nullcontext():         # CPUs obey it too
            model_py.ATTENTION = name
            torch.compiler.config.cache_key_tag += name if back_end else ""           # other back ends' code is cached too
            yield
    finally:
        model_py.ATTENTION, torch.compiler.config.cache_key_tag = outer, tag


def check_attention(config, machine):
    """Raises ConfigError unless config.attention can train such a model on this machine."""
    shape = 1, config.n_head, 64, config.n_embd // config.n_head

    def works(name):
        q = torch.zeros(shape, device=machine.device, dtype=machine.dtype, requires_grad=True)
        try:
            with attention(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")                                       # why torch's back ends do not work
                attend(q, q, q, 1.0, dropout=config.dropout).sum().backward()
        except (RuntimeError, TypeError):                                             # TypeError: no flash_attn
            return False
        return True

    if config.attention != "auto" and not works(config.attention):
        raise ConfigError(f"attention={config.attention} does not train this model here, on {machine.device.type} in "
                          f"{str(machine.dtype).removeprefix('torch.')}: expected one of auto, "
                          f"{', '.join(filter(works, KERNELS[1:]))}")


class Machine:
    """The process's place among all, its device, and what is fast there."""

    def __init__(self, device):
        self.world_size, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
        name = find_device(device)
        self.device = torch.device(f"cuda:{local}" if name == "cuda" else name)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")                                # TF32
        else:
            keep_freed_memory()
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.rank = dist.get_rank() if self.world_size > 1 else 0

    def fast_dtype(self):
        """bfloat16 where GPUs have it, and on CPUs where it multiplies matrices much faster; else float32."""
        if self.device.type == "cpu":
            tries = [[matmul_flops(self.device, dtype, 0.05) for dtype in (torch.bfloat16, torch.float32)]
                     for _ in range(4)]                                              # other work disturbs both alike
            half, single = map(max, zip(*tries))
            return "float32" if self.any(half < 1.5 * single) else "bfloat16"
        return "bfloat16" if self.device.type == "cuda" and torch.cuda.get_device_capability()[0] >= 8 else "float32"

    def use(self, dtype):
        self.dtype = getattr(torch, dtype)
        self.peak = matmul_flops(self.device, self.dtype)

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def sum(self, x):
        """x summed over ranks."""
        if self.world_size > 1:
            x = x.to(self.device)
            dist.all_reduce(x)
        return x

    def memory(self):
        """Peak memory of this process in GB: the device's, or the program's on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e9
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9 if resource else None

    def any(self, flag):
        """Whether flag holds on any rank."""
        return flag if self.world_size == 1 else bool(self.sum(torch.tensor(float(flag))) > 0)

    def compiling_pays(self, flops):
        """Whether to compile for a run of so many floating-point operations, where there is a compiler.

        Compiling takes about fifteen seconds and saves a third of the time; training without it reaches about a
        quarter of the peak, so a minute of that pays for it.
        """
        able = any(map(shutil.which, ("g++", "clang++"))) and (
            self.device.type == "cpu" or self.device.type == "cuda" and importlib.util.find_spec("triton"))
        return bool(able) and self.any(flops / (0.25 * self.peak) > 60)


def trust_compiler():
    """Spares torch five seconds of trying which of the processor's instructions the compiler knows: g++ 12 knows all."""
    from torch._inductor import config
    if sys.platform == "linux" and config.cpp.vec_isa_ok is None:
        with contextlib.suppress(OSError, ValueError):
            asked = subprocess.run([os.environ.get("CXX", "g++"), "-dumpversion"], capture_output=True, text=True)
            if int(asked.stdout.split(".")[0]) >= 12:
                config.cpp.vec_isa_ok = True


@contextlib.contextmanager
def spared():
    """Compilers started within it do not get a terminal's Ctrl-C: the step would fail, and leave half-written files."""
    if not hasattr(signal, "pthread_sigmask"):                                        # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})                # they inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_compiling():
    """Compiles torch's headers for CPUs, where that was never done, while Python still reads the model. Returns the thread."""
    def least():
        with spared(), contextlib.suppress(Exception):                      # what is wrong, the model's own code will tell
            from torch._inductor.codecache import CppPythonBindingsCodeCache
            CppPythonBindingsCodeCache.load_pybinding(["float*"], 'extern "C" void kernel(float* x) {}')
    thread = threading.Thread(target=contextvars.copy_context().run, args=[least], daemon=True)     # with torch's settings
    thread.start()
    return thread


def compile_(model, whole=False):
    """Compiles the blocks, at the first call in training; all share one machine code.

    On GPUs loss and `project_` too, where vocabulary and matrices are large. whole: everything behind the embedding as one
    graph. That takes twice as long to compile, and with several processes no gradient is sent before all are known.
    """
    from torch._functorch import config
    trust_compiler()
    config.autograd_cache_allow_custom_autograd_functions = True     # CompiledAttention's graphs too are kept for later runs
    if whole:
        model.after_embedding = torch.compile(model.after_embedding)
    else:
        for block in model.blocks:
            block.compile()
    weight = next(model.parameters())
    if weight.is_cuda:
        model.loss_sum, model.project_ = torch.compile(model.loss_sum), torch.compile(model.project_)
        # Compiled, the loss makes no float32 copy of the logits: in bfloat16 they may take a 64th of the memory. Uncompiled,
        # as in validation, which keeps little else, they take five times that.
        memory = torch.cuda.get_device_properties(weight.device).total_memory
        model.logits_at_once = max(model.logits_at_once, memory // 128)
    elif weight.device.type == "cpu":
        begin_compiling()


# ---------------------------------------------------------------------------------------------------------------------
# Optimizer

def make_optimizer(model, config):
    """AdamW over two groups: matrices and embeddings, which decay, and vectors and scalars, which do not."""
    parameters = list(model.parameters())
    groups = [dict(params=[p for p in parameters if p.dim() >= 2], weight_decay=config.weight_decay),
              dict(params=[p for p in parameters if p.dim() < 2], weight_decay=0.0)]
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in parameters)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps,
                             fused=parameters[0].device.type in ("cpu", "cuda"))


def warmup_steps(config):
    return round(config.warmup_ratio * config.max_steps)


def learning_rate(config, step):
    """A line up over the warm-up, then a cosine down to min_lr_ratio of the peak at the last step."""
    warmup = warmup_steps(config)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, config.max_steps - 1 - warmup)
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)


def flops_per_token(model):
    """6 for each weight of a matrix product; in each layer 12 d for each position looked at, half of block_size on average."""
    c = model.config
    used = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return 6 * used + 12 * c.n_layer * c.n_embd * c.block_size // 2


# ---------------------------------------------------------------------------------------------------------------------
# Diagnosis

def by_layer(values):
    """{"blocks.0.w_o.weight": a, "blocks.1.w_o.weight": b, "lm_head.weight": c} -> {"w_o": [a, b], "lm_head": [c]}"""
    found = {}
    for name, value in values.items():
        found.setdefault(re.sub(r"^blocks\.\d+\.|\.weight$", "", name), []).append(float(value))
    return found


def diagnose(model, optimizer, x, y, machine):
    """What happens in each layer, seen on the batch x, y in eval mode. It changes nothing that training will meet.

    residual_norm   mean over tokens of ||h||, before the first block and after each (anGPT Fig. 1)
    grad_l1         mean |gradient| of each matrix, not clipped (NormFormer Fig. 3 has w_down's)
    scale           mean |value| of each gain, alpha and s (NormFormer Fig. 4, nGPT Fig. 6)
    row_norm        mean norm of each matrix's rows, its input dimension (anGPT Fig. E.1); row_norm_max: the largest
    momentum_var    variance of Adam's first moment over each matrix (anGPT Fig. B.1: over the sum of all steps')
    """
    norms = []

    def watch(block, inputs, h):
        for state in (inputs[0], h) if block is model.blocks[0] else (h,):
            norms.append(state.detach().float().norm(dim=-1).mean().item())

    hooks = [block.register_forward_hook(watch) for block in model.blocks]
    model.eval()                                   # no dropout, and PowerNorm's running statistics stay as they are
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    with torch.compiler.set_stance("force_eager"):
        with machine.autocast():
            loss = model(x, y, loss_only=True)[1]
        grads = torch.autograd.grad(loss, list(matrices.values()), allow_unused=True, materialize_grads=True)
    model.train()
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        rows = {name: p.norm(dim=1) for name, p in matrices.items()}
        moments = {name: optimizer.state.get(p, {}).get("exp_avg", torch.zeros(1)) for name, p in matrices.items()}
        scales = {name: p for name, p in model.named_parameters() if p.dim() < 2 and not name.endswith("bias")}
        scales |= {f"{name}.weight": scale() for name, scale in model.named_modules() if isinstance(scale, Scale)}
        return {"residual_norm": norms,
                "grad_l1": by_layer({name: g.abs().mean() for name, g in zip(matrices, grads)}),
                "scale": by_layer({name: value.abs().mean() for name, value in scales.items()}),
                "row_norm": by_layer({name: norm.mean() for name, norm in rows.items()}),
                "row_norm_max": by_layer({name: norm.max() for name, norm in rows.items()}),
                "momentum_var": by_layer({name: m.var(correction=0) for name, m in moments.items()})}


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints

# What may differ between a run and its continuation: the machine, what is reported, and what may help after a divergence
FREE = {"resume", "out_dir", "data", "device", "dtype", "compile", "attention", "batch_size", "log_interval",
        "eval_interval", "eval_tokens", "checkpoint_interval", "learning_rate", "grad_clip", "pn_warmup", "diagnose"}


def save_checkpoint(path, model, optimizer, config, **state):
    """Replaces the file at path in one step, so that a crash leaves the old or the new one.

    Raises DataError when it can't be written.
    """
    try:
        with atomic(path) as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "config": asdict(config),
                        "versions": {"torch": str(torch.__version__), "numpy": np.__version__}, **state}, file)
    except (OSError, RuntimeError) as error:
        if isinstance(error.__context__, KeyboardInterrupt):                          # torch.save goes on to the file's end
            raise KeyboardInterrupt from None
        free = shutil.disk_usage(Path(path).parent).free / 1e6
        raise DataError(f"{path}: cannot be written, {free:,.0f} MB are free there; the one before it is intact "
                        f"({str(error).splitlines()[0]})") from None


def read_checkpoint(path, device="cpu"):
    """The dict that `save_checkpoint` wrote. Raises DataError when there is none, or none that can be read."""
    expect(os.path.isfile(path), f"{path}: no such checkpoint; train.py writes one to its --out_dir")
    with blame(f"{path}: not a whole checkpoint of train.py"):
        state = torch.load(path, map_location=device, weights_only=True)
        kinds = dict(model=dict, optimizer=dict, config=dict, step=int, tokenizer=str, world_size=int)
        wrong = [name for name, kind in kinds.items() if not isinstance(state.get(name), kind)]
    expect(not wrong, f"{path}: {', '.join(wrong)} missing or of the wrong type, expected a checkpoint of train.py")
    return state


def load_model(path, device="cpu"):
    """(model in eval mode, tokenizer, checkpoint dict) of the checkpoint at path. Raises DataError."""
    state = read_checkpoint(path, device)
    names = {f.name for f in fields(GPTConfig)}
    arch = state["config"].get("arch")
    expect(arch in list(ARCHS), f"{path}: arch {arch!r} is not in ARCHS; put its class into model.py, or register it first")
    with blame(f"{path}: weights and config do not fit this model.py"):
        model = GPT(GPTConfig(**{k: v for k, v in state["config"].items() if k in names})).to(device)
        model.load_state_dict(state["model"])
    return model.eval(), get_tokenizer(state["tokenizer"]), state


def resume_from(path, model, optimizer, config, tokenizer, machine):
    """Loads model and optimizer; returns the checkpoint dict. Raises DataError when it is of another run."""
    state = read_checkpoint(path)
    then = state["config"]
    other = [f"{name}={then.get(name)}, now {name}={now}" for name, now in asdict(config).items()
             if name not in FREE and then.get(name) != now]
    expect(not other, f"{path}: made with {'; '.join(other)}; give the options of the first run, or another --out_dir")
    expect(state["tokenizer"] == tokenizer, f"{path}: made with tokenizer {state['tokenizer']}, the corpus has {tokenizer}")
    with blame(f"{path}: weights and config do not fit each other"):
        model.load_state_dict(state.pop("model"))
        optimizer.load_state_dict(state.pop("optimizer"))
    for module in model.modules():
        if isinstance(module, PowerNorm):      # a rank's loss is the mean over its own tokens, and nu grows with that
            module.nu *= machine.world_size / state["world_size"]
    return state


# ---------------------------------------------------------------------------------------------------------------------
# Training

class Diverged(Exception):
    """Loss or gradient are no longer finite."""


class Interrupts:
    """Within it SIGINT and SIGTERM only set `asked`, so that a step can end and be saved; a later Ctrl-C ends it at once."""

    def __enter__(self):
        self.asked, self.since, self.before = False, math.inf, {}
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):                                     # not in the main thread
                self.before[number] = signal.signal(number, self.ask)
        return self

    def ask(self, number, frame):
        # Not within a second: `timeout` signals twice. Nor under torchrun, which does so later.
        if number == signal.SIGINT and time.monotonic() > self.since + 1 and "RANK" not in os.environ:
            raise KeyboardInterrupt
        if int(os.environ.get("RANK", 0)) == 0 and not self.asked:
            again = b" (Ctrl-C again: at once, unsaved)" if number == signal.SIGINT else b""
            os.write(1, b"\nStopping after this step" + again + b"\n")                # print is not safe in a handler
        self.asked, self.since = True, min(self.since, time.monotonic())

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def read_log(folder):
    """The records of folder/log.jsonl up to the first that cannot be read: the last line of a killed run may be cut."""
    records = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path(folder, "log.jsonl").open("rb"):
            record = json.loads(line)
            if not isinstance(record, dict) or not {"step", "tokens"} <= record.keys():
                break
            records.append(record)
    return records


class Log:
    """The run's records: a list of dicts, the file log.jsonl, and lines on the screen."""

    def __init__(self, config, writes, say, step):
        """Takes over the records up to `step` of an interrupted run; later ones will be made again."""
        self.config, self.writes, self.records, self.told = config, writes, [], time.monotonic()
        self.say = say if writes and say else lambda *_, **__: None
        self.path = Path(config.out_dir, "log.jsonl")
        if step:
            self.records = [record for record in read_log(config.out_dir) if record["step"] <= step]
        if writes:
            with atomic(self.path) as file:
                file.write("".join(json.dumps(r) + "\n" for r in self.records).encode())

    def add(self, record, seconds_a_step):
        self.records.append(record)
        if not self.writes:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        left = int((self.config.max_steps - record["step"]) * seconds_a_step)
        line = f"step {record['step']:>{len(str(self.config.max_steps))}}/{self.config.max_steps}"
        line += f"   loss {record['loss']:.3f}" if "loss" in record else ""
        line += f"   {record['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in record else ""
        line += f"   {left // 60}:{left % 60:02d} left" if seconds_a_step else ""
        if "val_loss" in record:
            line += f"   held out: {record['val_loss']:.3f} nats/token, {record['val_bpb']:.3f} bits/byte"
        if sys.stdout.isatty():                          # one line that changes, kept where it tells the held-out loss
            self.say(f"\r{line:<110}", end="\n" if "val_loss" in record else "", flush=True)
        elif "val_loss" in record or time.monotonic() > self.told + 10:
            self.say(line, flush=True)
            self.told = time.monotonic()


def find_corpus(data, machine):
    """The folder of the corpus; makes the default one if it is missing. Raises DataError."""
    if data == DEFAULT_DATA and not Path(data, "meta.json").exists() and machine.rank == 0:
        print(f"Making {data} from the source of Python's standard library", flush=True)
        prepare()
    machine.sum(torch.zeros(1))                                                       # the others wait
    made = sorted(str(path.parent) for path in Path("data").glob("*/meta.json"))
    shards = any(Path(data).glob("*_train_*.bin"))
    expect(shards or Path(data, "meta.json").exists(), f"{data}: no corpus here (no meta.json); make one with prepare.py "
                                             f"--source=...; there is {', '.join(made) or 'none yet'}")
    return data


def describe(run):
    """What a run is, where its results are, and what was chosen for this machine."""
    config, machine, done = run.config, run.machine, run.begun["step"]
    parameters = sum(p.numel() for p in run.model.parameters())
    micro = config.total_batch_size // (config.batch_size * config.block_size * machine.world_size)
    kernel = attention_kernel(machine.device.type, machine.dtype, config.block_size)
    begins = f"goes on after step {done}" if done else "a new run"
    begins += f"; the last one is in {config.out_dir}/before" * run.replaces
    vocab = run.tokenizer.n_vocab
    padded = f" (of {config.vocab_size} tokens {vocab} can occur: --vocab_size={vocab} makes a smaller model)"
    padded *= config.vocab_size > 2 * vocab and not done
    compiling = "" if config.compile == "false" else " (the first step takes a while)"
    return (f"{config.arch}: {parameters:,} parameters{padded}, {config.max_steps} steps of {config.total_batch_size:,} tokens "
            f"({machine.world_size} process{'es' * (machine.world_size > 1)} x {micro} micro-step{'s' * (micro > 1)} x "
            f"{config.batch_size} sequences x {config.block_size} tokens)\n"
            f"{config.data}: {run.train_tokens.windows * config.block_size:,} tokens to train on; {config.out_dir}: {begins}\n"
            f"{machine.device}: {config.dtype}, {kernel} attention, compile={config.compile}{compiling}, "
            f"threads={torch.get_num_threads()}, matrix products at {machine.peak / 1e9:,.0f} GFLOP/s, "
            f"torch {torch.__version__}")


def optimizer_step(step, forward, model, optimizer, loader, config, machine):
    """Step number `step`: returns (this rank's mean loss, norm of the gradient). Raises Diverged before weights change."""
    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    torch.manual_seed(config.seed + 1_000_003 * (1 + step * machine.world_size + machine.rank))    # dropout
    micro_steps = config.total_batch_size // (config.batch_size * config.block_size * machine.world_size)
    loss = 0.0
    for i, (x, y) in enumerate(loader.batches(step, config, machine), 1):         # the next is read while a GPU computes
        with contextlib.nullcontext() if i == micro_steps or machine.world_size == 1 else forward.no_sync():
            with machine.autocast():
                part = forward(x, y, loss_only=True)[1] / micro_steps
            part.backward()
        loss += part.detach()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if config.grad_clip and norm > config.grad_clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), config.grad_clip, norm)
    norm = norm.item()
    if not math.isfinite(norm):
        raise Diverged(f"step {step + 1}: the loss is {float(loss)}, the gradient's norm {norm} at learning rate "
                       f"{rate:.3g}. A lower --learning_rate, float32 or (powernorm) a longer --pn_warmup may help: "
                       "--resume=true with it goes on from the last checkpoint, if one was written: it is untouched")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.project_()
    return loss, norm


def unsaved(folder):
    """Whether the last start in a folder wrote no checkpoint, so that the one there is still that of the run in `before`."""
    def same(name):
        pair = folder / name, folder / "before" / name
        return all(path.exists() for path in pair) and filecmp.cmp(*pair)
    return same("ckpt.pt") and not same("log.jsonl")             # not where someone copied that run back


def move(source, target):
    """Moves log and picture from one folder to another, in place of what is there."""
    for name in ("log.jsonl", "loss.png"):
        (target / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(source / name, target / name)


def keep(folder):
    """Puts a run's results into its folder `before`; the checkpoint also stays, until the next."""
    before = folder / "before"
    before.mkdir(exist_ok=True)
    new = before / "ckpt.new"
    new.unlink(missing_ok=True)
    try:
        os.link(folder / "ckpt.pt", new)
    except OSError:                                                                   # some file systems have no links
        shutil.copy2(folder / "ckpt.pt", new)
    os.replace(new, before / "ckpt.pt")
    move(folder, before)


def length(folder):
    """Tokens of the run in a folder, by its log; -1 where there is none."""
    return max((record["tokens"] for record in read_log(folder)), default=-1) if (folder / "ckpt.pt").exists() else -1


def set_aside(folder):
    """Keeps a run's results in `before`, and in `before/before` those of the longest run that it finds there."""
    if unsaved(folder):
        return
    before = folder / "before"
    if length(before) > length(folder) and length(before) >= length(before / "before"):
        keep(before)
    keep(folder)


class Run:
    """What a run needs, set up once: machine, corpus, model, optimizer, and the state that it starts from."""

    def __init__(self, config):
        self.machine = Machine(config.device)
        meta = read_meta(find_corpus(config.data, self.machine))
        self.tokenizer = get_tokenizer(meta["tokenizer"])
        vocab = self.tokenizer.n_vocab
        expect(vocab == meta["vocab_size"], f"{config.data}/meta.json: vocab_size {meta['vocab_size']}, expected {vocab} "
                                            f"for tokenizer {meta['tokenizer']}")
        self.config = config = resolve(config, vocab, self.machine.world_size)
        self.train_tokens, self.val_tokens = (Tokens(config.data, split, config.block_size, vocab)
                                              for split in ("train", "val"))
        self.token_bytes = torch.from_numpy(bytes_per_token(self.tokenizer))
        self.loader = Loader(self.train_tokens, config)
        torch.manual_seed(config.seed)
        self.model = GPT(config.model_config()).to(self.machine.device)
        self.optimizer = make_optimizer(self.model, config)
        self.path = Path(config.out_dir, "ckpt.pt")
        self.begun, self.best_val_loss = {"step": 0, "seconds": 0.0, "config": {}}, math.inf
        # auto: not with the run before, if one begun after it was killed without a checkpoint
        if config.resume == "true" or config.resume == "auto" and self.path.exists() and not unsaved(self.path.parent):
            self.begun = resume_from(self.path, self.model, self.optimizer, config, self.tokenizer.name, self.machine)
            self.best_val_loss = self.begun["best_val_loss"]
            if self.machine.rank == 0 and unsaved(self.path.parent):
                move(self.path.parent / "before", self.path.parent)                   # it is that run which goes on
                (self.path.parent / "before/ckpt.pt").unlink()                              # else its results would pass for kept
        self.replaces = self.begun["step"] == 0 and self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.perf_counter() - self.begun["seconds"]
        self.forward = self.accelerate()
        if self.replaces and self.machine.rank == 0:                                  # nobody asked to lose it
            set_aside(self.path.parent)

    def accelerate(self):
        """Settles dtype and compile, as a continued run began with them; returns what to call in training."""
        config, machine, before = self.config, self.machine, self.begun["config"]
        if config.dtype == "auto":
            config.dtype = before.get("dtype") or machine.fast_dtype()
        machine.use(config.dtype)
        check_attention(config, machine)
        if config.compile == "auto":
            flops = config.max_steps * config.total_batch_size / machine.world_size * flops_per_token(self.model)
            config.compile = before.get("compile") or str(machine.compiling_pays(flops)).lower()
            torch._dynamo.config.suppress_errors = True          # a compiler that fails is no reason not to train
        torch.compiler.reset()                   # models of earlier calls would count towards its limit of recompilations
        if config.compile != "false":
            compile_(self.model, whole=config.compile == "whole")
        if machine.world_size == 1:
            return self.model
        # PowerNorm keeps its buffers equal by itself. Newer torch has another name for the option, with other effects.
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
        return DistributedDataParallel(self.model, broadcast_buffers=False)

    def here(self, step):
        return {"step": step, "tokens": step * self.config.total_batch_size,
                "seconds": time.perf_counter() - self.started}

    def validation(self):
        """What a validation adds to the log; with --diagnose also `diagnose` of the first held-out micro-batch, by rank 0."""
        nats, bits = evaluate(self.model, self.val_tokens, self.config, self.machine, self.token_bytes)
        self.best_val_loss, found = min(nats, self.best_val_loss), {"val_loss": nats, "val_bpb": bits}
        if self.config.diagnose and self.machine.rank == 0:
            x, y = self.val_tokens.batch(range(min(self.val_tokens.windows, self.config.batch_size)), self.machine.device)
            found |= diagnose(self.model, self.optimizer, x, y, self.machine)
        return found

    def speed(self, seconds_a_step):
        rate = self.config.total_batch_size / seconds_a_step
        return {"tokens_per_s": rate, "memory_gb": self.machine.memory(),
                "mfu": rate * flops_per_token(self.model) / self.machine.peak / self.machine.world_size}

    def save(self, step):
        if self.machine.rank == 0:
            save_checkpoint(self.path, self.model, self.optimizer, self.config, **self.here(step),
                            best_val_loss=self.best_val_loss, tokenizer=self.tokenizer.name,
                            world_size=self.machine.world_size)


def train(config, say=print):
    """Runs what config (a TrainConfig) asks for; returns the log, the list of dicts that log.jsonl holds.

    Raises ConfigError for options that do not fit together, DataError for files, Diverged when the loss or the
    gradient is no longer finite. `say` prints; None keeps quiet.
    """
    run = Run(config)
    config, machine = run.config, run.machine
    log = Log(config, machine.rank == 0, say, run.begun["step"])
    busy, steps, seconds_a_step = 0.0, 0, 0.0                # busy: seconds in `steps` steps since a record
    with Interrupts() as interrupts, attention(config.attention), contextlib.ExitStack() as at_the_end:
        log.say(describe(run), flush=True)
        if machine.rank == 0:
            at_the_end.callback(draw, log.records, run.path.parent / "loss.png")
        if run.begun["step"] == 0:
            log.add(run.here(0) | run.validation() | {"config": asdict(config)}, 0)
            run.best_val_loss = math.inf                         # nothing was learnt yet
        for step in range(run.begun["step"] + 1, config.max_steps + 1):
            begin, first = time.perf_counter(), step == run.begun["step"] + 1
            with spared() if first else contextlib.nullcontext():
                loss, norm = optimizer_step(step - 1, run.forward, run.model, run.optimizer, run.loader, config, machine)
            busy, steps, record = busy + time.perf_counter() - begin, steps + 1, run.here(step)
            ends = step == config.max_steps
            if step % config.log_interval == 0 or ends:
                seconds_a_step, busy, steps = busy / steps, 0.0, 0
                record |= {"loss": float(machine.sum(loss)) / machine.world_size, "grad_norm": norm,
                           "lr": learning_rate(config, step - 1), **run.speed(seconds_a_step)}
            if step % config.eval_interval == 0 or ends:
                record |= run.validation()
            if {"loss", "val_loss"} & record.keys():
                log.add(record, seconds_a_step)
            if first:                                            # it may have compiled: no measure of the next
                busy, steps = 0.0, 0
            asked = machine.any(interrupts.asked)
            if step % config.checkpoint_interval == 0 or ends or asked:
                run.save(step)
            if asked:
                break
    return log.records


def draw(records, path):
    """Loss, and the norm of the gradient, against tokens, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for axes, key, style in ((top, "loss", dict(lw=0.8, alpha=0.6, label="training")),
                             (top, "val_loss", dict(marker="o", ms=4, ls="", label="held out")),
                             (bottom, "grad_norm", dict(lw=0.8))):
        points = [(r["tokens"] / 1e6, r[key]) for r in records if key in r]
        axes.plot([x for x, _ in points], [y for _, y in points], **style)
        axes.grid(alpha=0.3)
    top.set(ylabel="loss (nats/token)", title=path.parent.name)
    top.legend()
    bottom.set(xlabel="tokens (millions)", ylabel="gradient norm", yscale="log")
    with contextlib.suppress(OSError):                                                # no reason to lose the run
        figure.savefig(path, dpi=110)


def main(argv):
    config = parse(TrainConfig, argv, __doc__)
    train(config)
    if dist.is_initialized():
        dist.destroy_process_group()
    if int(os.environ.get("RANK", 0)) > 0:
        return
    out = config.out_dir or f"out/{config.arch}"
    model, tokenizer, state = load_model(f"{out}/ckpt.pt", find_device(config.device))
    model.fold_()
    if state["step"] < state["config"]["max_steps"]:
        ranks = os.environ.get("LOCAL_WORLD_SIZE")
        run = f"torchrun --nproc_per_node={ranks}" if ranks else "python"
        again = shlex.join(words(replace(config, resume="true")))
        print(f"\nStopped and saved at step {state['step']}. To go on: {run} train.py {again}")
        return
    print(f"\n{out}/ckpt.pt, log.jsonl and loss.png are written. A sample (python sample.py --out_dir={shlex.quote(out)}):\n")
    from sample import write
    write(model, tokenizer, max_new_tokens=400)


if __name__ == "__main__":
    run_script(main)
    if "RANK" in os.environ:                     # a thread of torch's that still runs would abort the usual way out
        sys.stdout.flush()
        os._exit(0)
