"""
Train a GPT: on a laptop in minutes, on eight GPUs for days, with the same code.

    python train.py --arch=ngpt                      # laptop size; makes the default corpus if it is missing
    python train.py --resume=true                    # go on after an interruption; with a larger --max_steps, further
    python train.py --init_from=out/angpt --data=data/mine       # from weights that exist, a run's or GPT-2's
    torchrun --nproc_per_node=8 train.py --data=data/fineweb --size=0.5b

It writes out/<arch>/ckpt.pt, log.jsonl and loss.png, and ends with a sample. An earlier run in that folder is moved to
out/<arch>.1, .2, ... What is not given comes from the arch's recipe, else from the size, else from the default; in a
run that goes on, from its checkpoint.
"""
import ast
import contextlib
import copy
import ctypes
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # threads that wait in a loop slow down whatever else runs here
if platform.machine() == "x86_64":                # else GCC 12 may compile bfloat16 to NaN; torch 2.13 reads this
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -fno-tree-slp-vectorize")
import numpy as np
import torch
from filelock import FileLock, Timeout
from matplotlib.figure import Figure
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.benchmark import Timer

import model as model_py
from model import ARCHS, GPT, ConfigError, GPTConfig
from prepare import (Beta, Count, DataError, Device, NotNegative, Positive, Share, WholeNumber, atomic, blame, check,
                     choose, expect, get_tokenizer, prepare, read_meta, read_shard, run_script, token_lengths, typed)

# anGPT's Table F.1: width, depth, heads; last the batch size, ours. Context from its section 5, rope from Table F.2.
SIZES = {"laptop": dict(n_embd=128, n_layer=4, n_head=4, block_size=256, rope_fraction=1.0, max_steps=1600,
                        batch_size=8, total_batch_size=2048, eval_tokens=2 ** 14)}
for name, width, depth, heads, batch in (("32m", 256, 6, 4, 32), ("62m", 384, 10, 6, 32), ("125m", 512, 18, 8, 16),
                                         ("250m", 768, 18, 12, 16), ("0.5b", 1024, 24, 16, 8), ("1b", 1280, 36, 20, 4)):
    SIZES[name] = dict(n_embd=width, n_layer=depth, n_head=heads, block_size=2048, rope_fraction=0.5, vocab_size=50304,
                       batch_size=batch, total_batch_size=2 ** 19, eval_tokens=10 * 2 ** 20)

# By a block's family: the best of a sweep at laptop size (README). The sphere needs neither weight decay nor warm-up
# (nGPT 2.6, anGPT F.2).
PRE_NORM = dict(learning_rate=2e-3, weight_decay=0.1, warmup_ratio=0.2, embed_std=0.02)
SPHERE = dict(learning_rate=4e-3, weight_decay=0.0, warmup_ratio=0.0, embed_std=0.02)
RECIPES = {
    "layernorm": dict(PRE_NORM, learning_rate=4e-3),
    "rmsnorm": PRE_NORM,                          # and GPT+
    "powernorm": dict(PRE_NORM, learning_rate=4e-3, embed_std=0.1),
    "normformer": dict(PRE_NORM, embed_std=1.0),  # beside its branches' LayerNorms smaller tokens would drown
    "ngpt": dict(SPHERE, learning_rate=8e-3),
    "angpt": SPHERE,
}

def recipe(arch, n_embd, tie):
    """What the arch's family trains with, unless told otherwise."""
    found = dict(RECIPES.get(ARCHS[arch].family, PRE_NORM))
    # From width 64 to 256 the best rate of GPT+, nGPT and anGPT was 0.7 to 3.8 times this, NormFormer's at 64 3 to 7.
    found["learning_rate"] *= (128 / n_embd) ** 0.5
    if tie:
        found["embed_std"] = 0.02                    # README, choice 8
    return found

def load_arch(arch):
    """Runs the file of an arch like "mine.py:scalenorm", which registers scalenorm in ARCHS. Raises
    DataError."""
    file, _, name = arch.rpartition(":")
    if not file or arch in ARCHS:
        return
    expect(Path(file).is_file(), f"arch={arch}: no file {file}")
    spec = importlib.util.spec_from_file_location(file, file)
    expect(spec, f"arch={arch}: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file] = module  # where inspect and the compiler look for a class's source
    with blame(f"arch={arch}: {file} cannot be run"):
        spec.loader.exec_module(module)
    choose(f"arch={arch}: what {file} registers", name, ARCHS)
    ARCHS[arch] = ARCHS[name]   # so a checkpoint's arch tells the file, too

@dataclass
class RunConfig:
    """This run, here: never taken from a checkpoint. The comment behind a field is its --help; what
    it may be stands in its type (prepare.py)."""
    out_dir: str | None = None        # folder for results (out/<arch>, of GPT+ out/rmsnorm+qk_norm, or out/tuned)
    init_from: str | None = None      # weights to start from: a run's folder, or GPT-2 (lessons/gpt2.py)
    resume: Literal["true", "false", "auto"] = "false"  # go on from out_dir/ckpt.pt; auto: if there is one
    eval_only: bool = False           # validate the weights in init_from or out_dir, print that as JSON
    batch_size: Count = 8             # sequences in a micro-step of one process (by size)
    device: Device = "auto"           # auto: cuda if torch sees it, else cpu

@dataclass(init=False)
class TrainConfig(RunConfig, GPTConfig):
    """Training. None stands for a value that `resolve` finds."""
    size: str = "laptop"              # preset: laptop | 32m | 62m | 125m | 250m | 0.5b | 1b
    vocab_size: Count | None = None   # tokens in the vocabulary (by size, or the corpus's)
    pn_warmup: WholeNumber | None = None     # powernorm: steps that use the batch's own statistics (warm-up's)
    data: str = "data/stdlib"         # corpus: a folder made by prepare.py
    max_steps: Count | None = None    # optimizer steps (by size; the paper's: 20 tokens a parameter)
    total_batch_size: Count = 2048    # tokens in an optimizer step of all processes (by size)
    learning_rate: Positive = 4e-3    # peak learning rate (by arch; here angpt's)
    min_lr_ratio: Share = 0.01        # last learning rate over the peak; a cosine leads there
    warmup_ratio: Share = 0.0         # share of the steps in which the rate rises (by arch; here angpt's)
    weight_decay: NotNegative = 0.0   # of matrices and embeddings (by arch; here angpt's)
    beta1: Beta = 0.9                 # of Adam
    beta2: Beta = 0.95                # of Adam
    eps: Positive = 1e-9              # of Adam
    grad_clip: NotNegative = 1.0      # largest norm of the gradient; 0 for no limit
    seed: WholeNumber = 1337                 # of weights, order of the data, and dropout
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # autocast; weights stay float32
    compile: Literal["auto", "true", "false"] = "auto"      # torch.compile of blocks and loss; auto: in long runs
    eval_tokens: Count = 2 ** 14      # held-out tokens in a validation (by size; fewer in short runs)
    eval_interval: Count | None = None           # steps between validations (ten a run, or more)
    checkpoint_interval: Count | None = None     # steps between checkpoints (eval_interval, or 100)
    log_interval: Count = 10          # steps between lines of log.jsonl
    keep_best: bool = False           # keep the weights of the best validation, too, as best.pt

    def __init__(self, **given):
        """What is given, else the arch's recipe, else what the size says, else the defaults
        above."""
        defaults = {f.name: f.default for f in fields(self)}
        for name in given:
            choose("option", name, defaults)
        self.given = {name: value for name, value in given.items() if value is not None}
        typed_or_default = defaults | self.given
        arch = typed_or_default["arch"]
        size = typed_or_default["size"]
        load_arch(arch)
        choose("size", size, SIZES)
        choose("arch", arch, ARCHS, "; GPT+ is --arch=rmsnorm --qk_norm=true, a file's own --arch=file.py:name")
        sized = defaults | SIZES[size] | self.given
        vars(self).update(sized | recipe(arch, sized["n_embd"], sized["tie"]) | self.given)
        self.resume = str(self.resume).lower()  # True and False from Python
        self.compile = str(self.compile).lower()
        name = arch.split(":")[-1] + ("+qk_norm" if self.qk_norm else "")
        self.out_dir = self.out_dir or ("out/tuned" if self.init_from else f"out/{name}")
        check(self)
        if source_of(self) is None:  # else most options are the checkpoint's, and `resolve` looks at them
            self.model_config()      # raises where options do not fit
        if self.init_from and self.resume == "true":
            raise ConfigError(f"init_from={self.init_from} starts a run, resume=true goes on with one: choose")

    def model_config(self):
        options = {f.name: getattr(self, f.name) for f in fields(GPTConfig)}
        return GPTConfig(**{name: value for name, value in options.items() if value is not None})

def resolve(config, corpus_vocab=257, world_size=1):
    """A copy of config that fits corpus and processes, every None replaced. Raises ConfigError."""
    c = copy.copy(config)
    c.vocab_size = c.vocab_size or corpus_vocab
    if c.vocab_size < corpus_vocab:
        raise ConfigError(f"vocab_size={c.vocab_size}: expected at least the corpus's {corpus_vocab}")
    sequences = max(1, round(c.total_batch_size / (c.block_size * world_size)))  # of a process, a step
    if "batch_size" not in c.given:
        largest = min(sequences, c.batch_size)
        c.batch_size = max(n for n in range(1, largest + 1) if sequences % n == 0)
    micro_step = c.batch_size * c.block_size * world_size
    nearest = max(1, round(c.total_batch_size / micro_step)) * micro_step
    if "total_batch_size" not in c.given:
        c.total_batch_size = nearest
    if c.total_batch_size != nearest:
        raise ConfigError(f"total_batch_size={c.total_batch_size}: expected a multiple of batch_size x block_size x "
                          f"processes = {c.batch_size} x {c.block_size} x {world_size} = {micro_step}, the nearest is "
                          f"{nearest}")
    with torch.device("meta"):  # shapes alone: takes no memory
        parameters = sum(p.numel() for p in GPT(c.model_config()).parameters())
    c.max_steps = c.max_steps or math.ceil(20 * parameters / c.total_batch_size)
    if "eval_tokens" not in c.given:
        trained = c.max_steps * c.total_batch_size
        c.eval_tokens = min(c.eval_tokens, max(4096, trained // 200))
    c.eval_interval = c.eval_interval or min(math.ceil(c.max_steps / 10), 500)  # ten take some 2% of the time
    c.checkpoint_interval = c.checkpoint_interval or max(100, c.eval_interval)
    if c.pn_warmup is None:
        c.pn_warmup = round(c.warmup_ratio * c.max_steps)
    return c

# ---- Data ------------------------------------------------------------------------------------------------------------

class Tokens:
    """One split of a corpus as one long sequence, cut into windows of `length` tokens, each
    followed by its target."""
    def __init__(self, folder, split, length, vocab_size):
        shard = re.compile(rf".*_{split}_\d+\.bin")  # a corpus's own name may end in _train_1
        self.paths = sorted(path for path in Path(folder).glob("*.bin") if shard.fullmatch(path.name))
        self.shards = [read_shard(path) for path in self.paths]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])
        self.length = length
        self.vocab_size = vocab_size
        self.windows = (int(self.starts[-1]) - 1) // length
        expect(self.windows > 0, f"{folder}: {self.starts[-1]} {split} tokens, expected more than block_size={length}")

    def window(self, i):
        """Tokens i * length to (i + 1) * length, and one more, which may lie in the next shard."""
        start = i * self.length
        stop = start + self.length + 1
        first, last = np.searchsorted(self.starts, (start, stop - 1), side="right") - 1  # shards of both ends
        pieces = []
        for n in range(first, last + 1):
            pieces.append(self.shards[n][max(0, start - self.starts[n]):stop - self.starts[n]])
        window = np.concatenate(pieces).astype(np.int64)
        expect(window.max() < self.vocab_size, f"{self.paths[first]}: token {window.max()} in {self.vocab_size} tokens")
        return window

    def batch(self, indices, device):
        """Windows -> inputs and targets, each (len(indices), length)."""
        rows = torch.from_numpy(np.stack([self.window(i) for i in indices]))  # (len(indices), length + 1)
        if device.type == "cuda":
            rows = rows.pin_memory()
        rows = rows.to(device, non_blocking=True)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

class Corpus:
    """What prepare.py made: tokens to train on and held out, and the bytes that each stands for."""
    def __init__(self, folder, block_size):
        meta = read_meta(folder)
        self.tokenizer = meta["tokenizer"]
        self.token_bytes = torch.from_numpy(token_lengths(meta).astype(np.int64))  # (vocab_size,)
        self.vocab_size = len(self.token_bytes)
        self.train = Tokens(folder, "train", block_size, self.vocab_size)
        self.val = Tokens(folder, "val", block_size, self.vocab_size)

@functools.lru_cache(2)  # every step of an epoch asks for it
def epoch_order(seed, epoch, windows):
    """All windows of an epoch, each once, in the order in which they are trained on."""
    return np.random.default_rng((seed, epoch)).permutation(windows)

def batches(tokens, step, config, machine):
    """This rank's micro-batches (x, y), each (batch_size, block_size), of a step: a function of
    (seed, step) alone."""
    sequences = config.total_batch_size // config.block_size
    mine = []
    for place in range(step * sequences + machine.rank, (step + 1) * sequences, machine.world_size):
        epoch, i = divmod(place, tokens.windows)
        mine.append(epoch_order(config.seed, epoch, tokens.windows)[i])
    for i in range(0, len(mine), config.batch_size):
        yield tokens.batch(mine[i:i + config.batch_size], machine.device)

def all_batches(tokens, begun, config, machine):
    for step in range(begun, config.max_steps):
        yield from batches(tokens, step, config, machine)

def read_ahead(tokens, begun, config, machine):
    """The micro-batches of all steps from `begun` on; a thread reads the next one while this one is
    computed."""
    coming = all_batches(tokens, begun, config, machine)
    with ThreadPoolExecutor(1) as reader:
        if machine.device.type == "cuda":
            reader.submit(torch.cuda.set_device, machine.device)  # a new thread's is the first GPU
        next_one = reader.submit(next, coming, None)
        while True:
            batch = next_one.result()
            if batch is None:
                return
            next_one = reader.submit(next, coming, None)
            yield batch

@torch.no_grad()
def evaluate(model, corpus, config, machine, received=()):
    """Held-out loss in nats per token and bits per byte, over the same tokens whatever the ranks or
    the arch."""
    model.eval()
    held_out = corpus.val
    windows = max(1, min(held_out.windows, config.eval_tokens // config.block_size))
    total = torch.zeros(3, dtype=torch.float64)                             # nats, tokens, bytes
    for first in range(machine.rank * config.batch_size, windows, machine.world_size * config.batch_size):
        if received:  # a signal: whoever asked will drop what is found so far
            break
        last = min(first + config.batch_size, windows)
        x, y = held_out.batch(range(first, last), machine.device)
        with machine.autocast(), torch.compiler.set_stance("force_eager"):  # compiled for training only
            loss = model(x, y, loss_only=True)[1].item()
        total += torch.tensor([loss * y.numel(), y.numel(), corpus.token_bytes[y.cpu()].sum()])
    model.train()
    nats, tokens, n_bytes = machine.sum(total).tolist()  # no tokens where a signal came before the first batch
    return {"val_loss": nats / max(tokens, 1), "val_bpb": nats / math.log(2) / max(n_bytes, 1)}

# ---- The machine -----------------------------------------------------------------------------------------------------

def find_device(name="auto"):
    """The torch.device that --device means. Raises ConfigError where torch does not see it."""
    there = ["cpu"]
    if torch.backends.mps.is_available():
        there.append("mps")
    if torch.cuda.is_available():
        there.insert(0, "cuda")
    if name == "auto":
        name = there[0]
    if name not in there:
        raise ConfigError(f"device={name}: torch {torch.__version__} sees none here, only {' and '.join(there)}")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # torchrun: a GPU for each process
    return torch.device(name)

@dataclass
class Machine:
    """This process's place among those that train together, its device and the dtype that it
    computes in."""
    device: torch.device
    dtype: torch.dtype = torch.float32
    rank: int = 0
    world_size: int = 1

    def autocast(self):
        """Without autocast's cache of weights: through it a loss in pieces would sum the head's
        gradient in bfloat16."""
        lowers = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=lowers, cache_enabled=False)

    def sum(self, x):
        """The sum of a tensor over all processes."""
        if self.world_size == 1:
            return x
        return all_reduce(x.to(self.device), "sum", torch.distributed.group.WORLD)  # a new tensor; x stays

    def any(self, flag):
        """Whether the flag is set in any process; all wait for each other."""
        return self.sum(torch.tensor(float(bool(flag)))).item() > 0

    def wait(self):
        self.any(False)

def join_machine(device):
    """This process's Machine, as torchrun's environment has it; sets up what training on it is
    faster with."""
    machine = Machine(find_device(device), rank=int(os.environ.get("RANK", 0)),
                      world_size=int(os.environ.get("WORLD_SIZE", 1)))
    if machine.device.type == "cuda":
        torch.cuda.set_device(machine.device)
        torch.set_float32_matmul_precision("high")  # TF32
    elif sys.platform == "linux":                   # malloc keeps freed memory: 20 to 40% of a CPU's step
        libc = ctypes.CDLL(None)
        if not libc.mallopt(-3, 2 ** 30):           # M_MMAP_THRESHOLD; 0 says that it is refused
            libc.mallopt(-3, 2 ** 25)               # an old glibc takes no more
        libc.mallopt(-1, 2 ** 31 - 1)               # M_TRIM_THRESHOLD
    if machine.world_size > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if machine.device.type == "cuda" else "gloo")
    return machine

@functools.cache
def matmul_flops(device, dtype):
    """Floating-point operations a second of a large square matrix product, the best of many."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return 2 * n ** 3 / min(timer.blocked_autorange(min_run_time=0.1).times)

def find_dtype(name, machine):
    """The torch.dtype that --dtype means; auto: bfloat16 where that is much faster."""
    if name != "auto":
        return getattr(torch, name)
    if machine.device.type == "cuda":
        prefers_float32 = not torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        gain = matmul_flops(machine.device, torch.bfloat16) / matmul_flops(machine.device, torch.float32)
        prefers_float32 = gain < 1.5
    return torch.float32 if machine.any(prefers_float32) else torch.bfloat16  # all ranks agree

# Dense bfloat16 operations a second, from the data sheets; the first name that fits the GPU's counts
DATA_SHEET = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12,
              "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12,
              "RTX 3090": 71e12}

def peak_flops(machine):
    """(operations a second that MFU is a share of, where that figure is from)"""
    if machine.device.type == "cuda" and machine.dtype == torch.bfloat16:
        gpu = torch.cuda.get_device_name(machine.device)
        for name, flops in DATA_SHEET.items():
            if re.search(rf"\b{name}\b", gpu):     # an A10G is no A10, an RTX A1000 no A100
                return flops, f"the {name}'s data sheet"
    return matmul_flops(machine.device, machine.dtype), "this machine's own matrix product"

# ---- Training --------------------------------------------------------------------------------------------------------

def make_optimizer(model, config):
    """AdamW over two groups: matrices and embeddings, which decay, and vectors and scalars, which
    do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        dict(params=matrices, weight_decay=config.weight_decay),
        dict(params=others, weight_decay=0.0),
    ]
    betas = config.beta1, config.beta2
    return torch.optim.AdamW(groups, config.learning_rate, betas, config.eps, fused=True)

def learning_rate(config, step):
    """A line up over the warm-up, then a cosine down to min_lr_ratio of the peak at the last
    step."""
    warmup = round(config.warmup_ratio * config.max_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, config.max_steps - 1 - warmup)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)

def flops_per_token(model):
    """6 for each weight of a matrix product; in each layer 12 n_embd for each position that a token
    looks at, on average half of block_size."""
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    attention = 12 * model.config.n_layer * model.config.n_embd * model.config.block_size // 2
    return 6 * weights + attention

class Diverged(Exception):
    exit_code = 3  # after a loss that is no longer finite, or worse than guessing

def optimizer_step(step, forward, model, optimizer, micro_batches, config, machine):
    """A step on this rank's next micro-batches: (mean loss, norm of the gradient). Raises Diverged
    before the update."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    torch.manual_seed(config.seed + 1_000_003 * (1 + step * machine.world_size + machine.rank))  # dropout
    micro_steps = config.total_batch_size // (config.batch_size * config.block_size * machine.world_size)
    loss = 0.0
    for i, (x, y) in zip(range(1, micro_steps + 1), micro_batches):  # range first: no batch is taken in vain
        forward.require_backward_grad_sync = i == micro_steps  # for DistributedDataParallel
        with machine.autocast():
            part = forward(x, y, loss_only=True)[1] / micro_steps
        part.backward()
        loss += part.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf).item()
    if not math.isfinite(norm):
        raise Diverged(f"step {step + 1}: loss {float(loss)}, gradient's norm {norm}; a lower --learning_rate may help")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.project_()
    return loss, norm

def find_compile(config, model, machine):
    """What --compile means: auto is true in long runs. It saves a third of the time, and costs a
    quarter of a minute."""
    if config.compile != "auto":
        return config.compile
    flops = flops_per_token(model) * config.max_steps * config.total_batch_size
    seconds_at_peak = flops / (peak_flops(machine)[0] * machine.world_size)
    is_short = seconds_at_peak < 15
    is_able = machine.device.type == "cuda" or (machine.device.type == "cpu" and shutil.which("g++"))
    return "false" if machine.any(is_short or not is_able) else "true"

def for_training(model, config, machine):
    """What to call in place of the model: blocks and loss may be compiled, gradients are averaged
    over all processes."""
    torch.compiler.reset()                     # earlier models would count towards torch's limit of compilations
    torch._dynamo.config.optimize_ddp = False  # it would cut blocks where DistributedDataParallel's buckets end
    if config.compile == "true":
        for block in model.blocks:
            block.compile()
        model.nats = torch.compile(model.nats)  # head and loss: half of a step if the vocabulary is large
    if machine.world_size == 1:
        return model
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        no_sync_of_buffers = {"forward_sync_buffers": False}
    else:  # torch before 2.13
        no_sync_of_buffers = {"broadcast_buffers": False}
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **no_sync_of_buffers)

# ---- Checkpoints -----------------------------------------------------------------------------------------------------

class Checkpoints:
    """A run's ckpt.pt and best.pt. They are copied while the run waits, and written by a thread
    while it goes on; the end of `with` waits for the last, and raises DataError if it could not be
    written."""
    def __init__(self, model, optimizer, config, tokenizer):
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.tokenizer = tokenizer
        self.thread = ThreadPoolExecutor(1)
        self.last = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.thread.shutdown()
        self.wait()

    def wait(self):
        if self.last:
            self.last.result()

    def save_if_due(self, progress, record, stops):
        """ckpt.pt at its interval and wherever a run ends; best.pt at the best validation."""
        step, names = progress["step"], []
        if stops or step == self.config.max_steps or step % self.config.checkpoint_interval == 0:
            names.append("ckpt.pt")
        if self.config.keep_best and record.get("val_loss") == progress["best_val_loss"]:
            names.append("best.pt")
        if names:
            self.wait()                              # memory for one copy is enough
            self.last = self.thread.submit(self.write, names, self.copy(progress))

    def copy(self, progress):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state = tree_map_only(torch.Tensor, lambda x: x.to("cpu", copy=True), state)
        return {**state, "config": asdict(self.config), "source": source_digest(self.config.arch),
                "tokenizer": self.tokenizer, **progress}

    def write(self, names, state):
        """Replaces each file in one step: a crash leaves the old or the new one."""
        for name in names:
            path = Path(self.config.out_dir, name)
            with blame(f"{path}: cannot be written"), atomic(path) as file:
                torch.save(state, file)

def read_checkpoint(source, device="cpu"):
    """The dict that a run's `Checkpoints` wrote to its folder or a .pt file; of GPT-2 one like it.
    Raises DataError."""
    path = Path(source)
    if (path / "config.json").exists() or str(source) in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        from lessons.gpt2 import read_gpt2
        return read_gpt2(source)
    if path.suffix != ".pt":
        path = path / "ckpt.pt"
    expect(path.is_file(), f"{path}: no such checkpoint; train.py writes one to its --out_dir")
    with blame(f"{path}: cannot be read as a checkpoint of train.py"):
        state = torch.load(path, map_location=device, weights_only=True, mmap=True)
        expect({"model", "config", "step", "tokenizer"} <= set(state), f"{path}: expected a checkpoint of train.py")
        return state

def load_weights(model, state, source):
    """A checkpoint's weights into a model; of learned positions as many as it has. Raises
    DataError."""
    weights = dict(state["model"])
    if "wpe.weight" in weights:
        weights["wpe.weight"] = weights["wpe.weight"][:model.config.block_size]
    with blame(f"{source}: weights and config do not fit this model.py"):
        model.load_state_dict(weights)

def load_model(source, device="cpu", arch=None):
    """(model in eval mode, tokenizer, checkpoint dict) of what read_checkpoint reads; arch, if it
    is one of a file, says where that file is now. Raises DataError."""
    state = read_checkpoint(source, device)
    names = {f.name for f in fields(GPTConfig)}
    options = {name: value for name, value in state["config"].items() if name in names}
    options["arch"] = arch_of(state, source, arch)
    load_arch(options["arch"])
    with blame(f"{source}: weights and config do not fit this model.py"):
        model = GPT(GPTConfig(**options)).to(device)
    load_weights(model, state, source)
    warn_of_other_source(state, source, options["arch"])
    return model.eval(), get_tokenizer(state["tokenizer"]), state

def arch_of(state, source, given=None):
    """A checkpoint's arch or, if its file has moved, the one given. Code outside this folder runs
    only if the caller names it: a checkpoint alone cannot make it run. Raises DataError."""
    saved = state["config"]["arch"]
    if given:
        expect(given.split(":")[-1] == saved.split(":")[-1], f"{source}: made with arch={saved}, now arch={given}")
        return given
    file = Path(saved.rpartition(":")[0]).resolve()
    is_ours = file.is_relative_to(Path(__file__).resolve().parent)
    expect(is_ours or saved in ARCHS, f"{source}: made with code that is not of this folder; to run it: --arch={saved}")
    return saved

MODEL_SOURCE = inspect.getsource(model_py)  # as imported: who waits for a run may edit the file

def source_digest(arch):
    """A digest of the code that an arch computes with: GPT, its block, and the classes and functions
    that these name, in model.py and in the arch's own file. Comments do not count."""
    block = ARCHS[arch]
    source = MODEL_SOURCE
    if block.__module__ != model_py.__name__:
        with contextlib.suppress(OSError, TypeError):  # a class in a notebook has no file
            source += "\n" + Path(inspect.getfile(block)).read_text()
    definitions = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            definitions[node.name] = node
    code = {}
    to_read = ["GPT"] + [base.__name__ for base in block.__mro__]
    while to_read:
        name = to_read.pop()
        if name in definitions and name not in code:
            code[name] = ast.unparse(definitions[name])
            to_read += [part.id for part in ast.walk(definitions[name]) if isinstance(part, ast.Name)]
    in_order = [code[name] for name in sorted(code)]
    return hashlib.sha256("\n".join(in_order).encode()).hexdigest()[:16]

def warn_of_other_source(state, source, arch):
    """Says so where a checkpoint was written by other code than that which would go on from it."""
    now = source_digest(arch)
    if state.get("source", now) != now:
        print(f"{source}: the code of {arch} has changed since; it may now be another function", file=sys.stderr)

# Options of training that may differ from those in the checkpoint that a run goes on from. RunConfig's always may.
MAY_CHANGE = {"data", "dtype", "compile", "learning_rate", "grad_clip", "pn_warmup", "dropout", "checkpoint_blocks",
              "eval_tokens", "max_steps", "eval_interval", "checkpoint_interval", "log_interval", "keep_best"}

def with_checkpoint(config, state, source):
    """config, in which the checkpoint's options stand for those that were not given: all options of
    training where the checkpoint is this run's own, only the model's where it is another's."""
    if source == config.init_from:
        names = {f.name for f in fields(GPTConfig)}
        may_change = MAY_CHANGE | {"block_size"}
    else:
        names = {f.name for f in fields(TrainConfig)} - {f.name for f in fields(RunConfig)}
        may_change = MAY_CHANGE
    saved = {name: value for name, value in state["config"].items() if name in names}
    saved["arch"] = arch_of(state, source, config.given.get("arch"))
    refused = []
    for name, value in config.given.items():
        if name in saved and name not in may_change and value != saved[name]:
            refused.append(f"{name}={saved[name]}, now {name}={value}")
    if config.resume == "true" and config.given.get("max_steps", math.inf) < saved["max_steps"]:
        refused.append(f"max_steps={saved['max_steps']}, now max_steps={config.max_steps}")
    expect(not refused, f"{source}: made with {'; '.join(refused)}")
    here = {"resume": config.resume, "out_dir": config.out_dir}
    if config.resume == "true":
        here["init_from"] = None  # with resume=auto: its checkpoint stands for them
    options = saved | config.given | here
    return TrainConfig(**options)

def source_of(config):
    """The checkpoint that a run begins with: its own, another's, or None for new weights."""
    if config.resume == "true" or (config.eval_only and not config.init_from):
        return str(Path(config.out_dir, "ckpt.pt"))
    return config.init_from

def go_on_from(config, machine):
    """(config, checkpoint's dict): what was not given is as in the checkpoint that the run begins
    with; None without one."""
    config = copy.copy(config)                       # the caller's stays as it is
    if config.resume == "auto":
        is_there = machine.rank == 0 and Path(config.out_dir, "ckpt.pt").exists()  # others may see it later
        config.resume = "true" if machine.any(is_there) else "false"
    source = source_of(config)
    if source is None:
        return config, None
    state = read_checkpoint(source)
    config = with_checkpoint(config, state, source)
    if machine.rank == 0:
        warn_of_other_source(state, source, config.arch)
    return config, state

def open_corpus(config, machine, state):
    """The Corpus of config.data, whose tokens must be the checkpoint's; the default one is made if
    it is missing."""
    if config.data == TrainConfig.data and machine.rank == 0 and not Path(config.data, "meta.json").exists():
        prepare()
    machine.wait()
    corpus = Corpus(config.data, config.block_size)
    if state:
        expect(state["tokenizer"] == corpus.tokenizer,
               f"{source_of(config)}: made with tokenizer={state['tokenizer']}, now {config.data} has "
               f"{corpus.tokenizer}")
    return corpus

def make_model(config, machine, state):
    """A GPT with new weights or, if there is a checkpoint, with its."""
    torch.manual_seed(config.seed)
    model = GPT(config.model_config()).to(machine.device)
    if state:
        load_weights(model, state, source_of(config))
    return model

# ---- A run's folder --------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def lock_folder(folder, option="out_dir"):
    """What that option gives, a folder or a file, belongs to this run alone: a second one is told
    who has it. Raises DataError."""
    folder = Path(folder)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    holder = folder.with_name(f".{folder.name}.holder")
    with blame(f"{option}={folder}: no folder that can be written to"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            expect(Path(lock.lock_file).exists(), f"{option}={folder}: no folder that can be written to")
            owner = holder.read_text() if holder.exists() else "another process"  # which has just come or goes
            raise DataError(f"{folder}: {owner} runs here; wait for it, or give another --{option}") from None
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    try:
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()

def move_earlier_run(folder, say):
    """Makes room for a new run: what an earlier one left in its folder goes to folder.1, .2, ..."""
    if (folder / "ckpt.pt").exists() or (folder / "log.jsonl").exists():
        number = 1
        while Path(f"{folder}.{number}").exists():
            number += 1
        folder.rename(f"{folder}.{number}")
        say(f"{folder}.{number}: the run that was there before")
    with blame(f"out_dir={folder}: no folder that can be written to"):
        folder.mkdir(parents=True, exist_ok=True)

def read_log(folder):
    """The records of folder/log.jsonl up to the first that cannot be read: the last line of a
    killed run may be cut."""
    records = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path(folder, "log.jsonl").open("rb"):
            records.append(json.loads(line))
    return [r for r in records if isinstance(r, dict) and {"step", "tokens", "seconds"} <= r.keys()]

# Options that change nothing of what a run learns, or hardly
HARDLY_MATTER = {f.name for f in fields(RunConfig)} | {
    "seed", "dtype", "compile", "checkpoint_blocks", "eval_tokens", "eval_interval", "checkpoint_interval",
    "log_interval", "keep_best"}

def usual_losses(config):
    """{seed: {tokens: held-out loss}} of runs with nothing but the arch given; empty if config, a
    dict, is not of such a run."""
    file = Path(__file__).with_name("assets") / "usual.json"
    if not file.exists():
        return {}
    name = config["arch"]
    if config["qk_norm"]:
        name += "+qk_norm"
    runs = json.loads(file.read_text())["runs"].get(name)
    if runs is None:
        return {}
    like_it = TrainConfig(arch=config["arch"], qk_norm=config["qk_norm"])
    for option, value in asdict(resolve(like_it, config["vocab_size"])).items():
        if option not in HARDLY_MATTER and config.get(option, value) != value:
            return {}
    return runs

def draw_losses(records, path):
    """Losses against tokens; in grey those of other seeds, if this run is a usual one."""
    axes = Figure(figsize=(8, 5), layout="constrained").subplots()
    if "config" in records[0]:
        for seed, losses in usual_losses(records[0]["config"]).items():
            tokens = [int(n) / 1e6 for n in losses]
            axes.plot(tokens, losses.values(), label=f"held out, seed {seed}", color="0.8", lw=4)
    for key, label, marker in (("loss", "training", None), ("val_loss", "held out", "o")):
        shown = [r for r in records if key in r]
        tokens = [r["tokens"] / 1e6 for r in shown]
        axes.plot(tokens, [r[key] for r in shown], label=label, marker=marker, lw=1)
    axes.set(xlabel="tokens (millions)", ylabel="loss (nats/token)", title=path.parent.name)
    axes.legend()
    axes.figure.savefig(path, dpi=110)

class Log:
    """A run's records, as a list and as log.jsonl; a run that goes on keeps those up to `step`.
    Prints each record with a validation, of the others one in ten seconds; draws loss.png."""
    def __init__(self, config, step, machine, say):
        self.config = config
        self.say = say
        self.folder = Path(config.out_dir)
        self.writes = machine.rank == 0
        self.told = 0.0   # when a record was last printed
        self.drawn = 0.0  # when loss.png was
        if self.writes and config.resume != "true":
            move_earlier_run(self.folder, say)
        self.records = []
        if config.resume == "true":
            self.records = [record for record in read_log(self.folder) if record["step"] <= step]
        if self.writes:
            with atomic(self.folder / "log.jsonl") as file:
                for record in self.records:
                    file.write(json.dumps(record).encode() + b"\n")

    def lacks_validation(self, step):
        """Whether a validation is due and not in the log. A run that goes on begins at a step whose
        record may be there: with the validation, or without where a signal cut that short."""
        is_due = step == self.config.max_steps or step % self.config.eval_interval == 0
        return is_due and not any("val_loss" in r for r in self.records if r["step"] == step)

    def add(self, progress, measurements):
        if not measurements:
            return
        record = {name: progress[name] for name in ("step", "tokens", "seconds")} | measurements
        if record["step"] == 0:
            record["config"] = asdict(self.config)
        self.records.append(record)
        if not self.writes:
            return
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        now = time.monotonic()
        if "val_loss" in record or now > self.told + 10:
            self.say(progress_line(record, self.config))
            self.told = now
        ends = record["step"] == self.config.max_steps
        if "val_loss" in record and (ends or now > self.drawn + 2):  # a picture takes 0.2 s
            draw_losses(self.records, self.folder / "loss.png")
            self.drawn = now

def progress_line(record, config):
    words = [f"step {record['step']}/{config.max_steps}"]
    if "loss" in record:
        left = int((config.max_steps - record["step"]) * config.total_batch_size / record["tokens_per_s"])
        words.append(f"{left // 60}:{left % 60:02d} left")
        words.append(f"loss {record['loss']:.3f}")
        words.append(f"{record['tokens_per_s']:,.0f} tokens/s")
    if "val_loss" in record:
        words.append(f"held out: {record['val_loss']:.3f} nats/token, {record['val_bpb']:.3f} bits/byte")
    return "   ".join(words)

# ---- A run -----------------------------------------------------------------------------------------------------------

class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after which the run was saved."""

class Terminated(SystemExit):
    """SIGTERM, after which the run was saved."""

@contextlib.contextmanager
def interrupts():
    """Yields a dict in which SIGINT and SIGTERM leave their time, so that a step can end and be
    saved."""
    received = {}

    def receive(number, frame):
        is_second = False
        if number == signal.SIGINT and signal.SIGINT in received:
            is_second = time.monotonic() > received[signal.SIGINT] + 0.2  # `timeout` sends one twice at once
        if is_second and "RANK" not in os.environ:                        # torchrun sends more of its own
            raise KeyboardInterrupt
        if not received:
            os.write(2, b"\nStopping after this step; Ctrl-C again: at once, unsaved\n")
        received[number] = time.monotonic()

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

def tell(text):
    with contextlib.suppress(BrokenPipeError):  # somebody's `| head` has read enough; the run goes on
        print(text, flush=True)

def silent(text):
    pass

def evaluate_only(config, say=tell):
    """The held-out loss of the weights in init_from or out_dir; told as JSON."""
    machine = join_machine(config.device)
    config, state = go_on_from(config, machine)
    corpus = open_corpus(config, machine, state)
    config = resolve(config, corpus.vocab_size, machine.world_size)
    machine.dtype = find_dtype(config.dtype, machine)
    model = make_model(config, machine, state)
    found = evaluate(model, corpus, config, machine)
    if say and machine.rank == 0:
        say(json.dumps({"weights": source_of(config), "step": state["step"], "data": config.data, **found}))
    return found

def summary(config, model, corpus, machine, begun):
    """What will run, in a few lines."""
    parameters = sum(p.numel() for p in model.parameters())
    epochs = config.max_steps * config.total_batch_size / (corpus.train.windows * config.block_size)
    source = source_of(config)
    beginning = f" from {source}" if source else ""
    flops, origin = peak_flops(machine)
    lines = [f"{config.out_dir}: {config.arch}{beginning}, {parameters:,} parameters; "
             f"{config.max_steps} steps of {config.total_batch_size:,} tokens, {epochs:.2g} epochs of {config.data}",
             f"peak learning rate {config.learning_rate:.2g}, warm-up {config.warmup_ratio:.0%}; {machine.device}, "
             f"{config.dtype}, compile={config.compile}, {torch.get_num_threads()} threads; "
             f"in the log, mfu is a share of {flops / 1e12:.3g} TFLOP/s, {origin}"]
    if config.qk_norm and model.sphere:
        lines.append(f"qk_norm=true changes nothing: {config.arch} always makes q and k unit")
    if config.resume == "true" and begun < config.max_steps:
        lines.append(f"{config.out_dir}: goes on after step {begun}, to {config.max_steps}, where the cosine ends")
    elif config.resume == "true":
        lines.append(f"{config.out_dir}: had ended, with step {begun}; a larger --max_steps goes on")
    return "\n".join(lines)

def measure(step, loss, norm, durations, model, config, machine):
    """What log.jsonl says of training."""
    rate = config.total_batch_size / float(np.median(durations))  # no mean: the first compiles
    peak = machine.world_size * peak_flops(machine)[0]
    record = {"loss": machine.sum(loss).item() / machine.world_size, "grad_norm": norm, "tokens_per_s": rate,
              "lr": learning_rate(config, step - 1), "mfu": rate * flops_per_token(model) / peak}
    if machine.device.type == "cuda":
        record["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return record

def validate(step, model, corpus, config, machine, received):
    """What log.jsonl says of held-out text: nothing if a signal came. Raises Diverged."""
    found = evaluate(model, corpus, config, machine, received)
    if machine.any(received):
        return {}
    guessing = math.log(config.vocab_size)
    if step > 0 and not found["val_loss"] < 2 * guessing:  # so that NaN is caught, too
        raise Diverged(f"step {step}: held out {found['val_loss']:.4g} nats/token, far above guessing's "
                       f"{guessing:.3g}; a lower --learning_rate may help")
    return found

def take_up(config, state, optimizer):
    """The progress to begin with. A run that goes on has its checkpoint's, and the optimizer's state
    is loaded; a new run has none."""
    if config.resume != "true":
        return {"step": 0, "seconds": 0.0, "best_val_loss": math.inf}
    expect("optimizer" in state, f"{source_of(config)}: has weights alone; --init_from starts a run from them")
    optimizer.load_state_dict(state["optimizer"])
    return {name: state[name] for name in ("step", "seconds", "best_val_loss")}

def stop_exception(step, received, machine):
    """The exception that ends a run after a signal, the same in all processes."""
    kind = Terminated if machine.any(signal.SIGTERM in received) else Interrupted
    return kind(f"Stopped and saved at step {step}.")

def train(config, watch=None, say=tell):
    """Runs what config (a TrainConfig) asks for; returns the log, the list of dicts that log.jsonl
    holds. watch(model, optimizer, step) is called at each validation; the dict that it returns
    joins the record. say=None is quiet. Raises ConfigError for options, DataError for files,
    Diverged for a loss that is not finite or far worse than guessing's; stopped by a signal it
    saves, and raises KeyboardInterrupt or, for SIGTERM, SystemExit."""
    if config.eval_only:
        return [evaluate_only(config, say)]
    machine = join_machine(config.device)
    if machine.rank > 0 or say is None:
        say = silent
    lock = lock_folder(config.out_dir) if machine.rank == 0 else contextlib.nullcontext()
    with lock:
        config, state = go_on_from(config, machine)
        corpus = open_corpus(config, machine, state)
        config = resolve(config, corpus.vocab_size, machine.world_size)
        machine.dtype = find_dtype(config.dtype, machine)
        config.dtype = str(machine.dtype).removeprefix("torch.")
        model = make_model(config, machine, state)
        optimizer = make_optimizer(model, config)
        progress = take_up(config, state, optimizer)
        del state  # gigabytes, of a large model
        config.compile = find_compile(config, model, machine)
        forward = for_training(model, config, machine)
        log = Log(config, progress["step"], machine, say)
        say(summary(config, model, corpus, machine, progress["step"]))
        checkpoints = Checkpoints(model, optimizer, config, corpus.tokenizer)
        with interrupts() as received, checkpoints:
            take_steps(forward, model, optimizer, corpus, config, machine, progress, log, checkpoints, watch, received)
    return log.records

def take_steps(forward, model, optimizer, corpus, config, machine, progress, log, checkpoints, watch, received):
    """The loop of a run: step after step, with what is due then. After round `step` that many steps
    have been taken: the first round takes none, and does what is due before."""
    begun = progress["step"]
    started = time.perf_counter() - progress["seconds"]  # as if the run had never been interrupted
    micro_batches = read_ahead(corpus.train, begun, config, machine)
    durations = deque(maxlen=config.log_interval)
    for step in range(begun, config.max_steps + 1):
        record = {}
        validates = log.lacks_validation(step)
        if step > begun:
            start = time.perf_counter()
            loss, norm = optimizer_step(step - 1, forward, model, optimizer, micro_batches, config, machine)
            durations.append(time.perf_counter() - start)
            if validates or step % config.log_interval == 0:
                record |= measure(step, loss, norm, durations, model, config, machine)
        if validates:
            record |= validate(step, model, corpus, config, machine, received)
        if watch and "val_loss" in record:
            record |= watch(model, optimizer, step) or {}
        best = min(progress["best_val_loss"], record.get("val_loss", math.inf))
        progress = {
            "step": step,
            "tokens": step * config.total_batch_size,
            "seconds": time.perf_counter() - started,
            "best_val_loss": best,
        }
        log.add(progress, record)
        stops = machine.any(received)
        if machine.rank == 0:
            checkpoints.save_if_due(progress, record, stops)
        if stops:
            raise stop_exception(step, received, machine)

def main(argv):
    [given] = typed(argv, __doc__, TrainConfig)
    config = TrainConfig(**given)
    is_first = int(os.environ.get("RANK", 0)) == 0
    try:
        train(config)
    except (Interrupted, Terminated) as stop:
        again = {**given, "out_dir": config.out_dir, "resume": "true"}
        words = [f"--{name}={value}" for name, value in again.items() if name != "init_from"]
        if is_first:
            print(f"\n{stop} To go on: python train.py {shlex.join(words)}")
        return
    if is_first and not config.eval_only:
        print_sample(config)

def print_sample(config):
    """The end of a run's output: what its model writes, if its tokenizer is at hand."""
    print(f"\n{config.out_dir} is written. A sample (more: sample.py --out_dir={config.out_dir}):\n")
    try:
        model, tokenizer, _ = load_model(config.out_dir)
    except DataError as error:
        print(f"none: {error}")
        return
    start = torch.tensor([[tokenizer.eot_token]])
    tokens = [token.item() for token in model.generate(start, 400, temperature=0.8)]
    known = [token for token in tokens if token < tokenizer.n_vocab]  # the vocabulary may be padded
    print(tokenizer.decode(known))

if __name__ == "__main__":
    run_script(main)
    if "RANK" in os.environ:  # a thread of torch's that still runs would abort the usual way out
        os._exit(0)
