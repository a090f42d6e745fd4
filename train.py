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
import contextlib
import copy
import ctypes
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # threads that wait in a loop slow down whatever else runs here
if platform.machine() == "x86_64":                # else GCC 12 may compile bfloat16 to NaN; torch 2.13 reads this
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -fno-tree-slp-vectorize")
import numpy as np
import torch
from matplotlib.figure import Figure
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel

from model import ARCHS, GPT, ConfigError, GPTConfig
from prepare import (DataError, at_least, atomic, blame, choose, expect, get_tokenizer, only_one_in, prepare, read_meta,
                     read_shard, run_script, token_lengths, typed)

# anGPT's Table F.1: width, depth, heads; last the batch size, ours. Context from its section 5, rope from Table F.2.
SIZES = {"laptop": dict(n_embd=128, n_layer=4, n_head=4, block_size=256, rope_fraction=1.0, max_steps=1600,
                        batch_size=8, total_batch_size=2048)}
for name, width, depth, heads, batch in (("32m", 256, 6, 4, 32), ("62m", 384, 10, 6, 32), ("125m", 512, 18, 8, 16),
                                         ("250m", 768, 18, 12, 16), ("0.5b", 1024, 24, 16, 8), ("1b", 1280, 36, 20, 4)):
    SIZES[name] = dict(n_embd=width, n_layer=depth, n_head=heads, block_size=2048, rope_fraction=0.5, vocab_size=50304,
                       batch_size=batch, total_batch_size=2 ** 19)

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

def recipe(config):
    """What the arch's family trains with, unless told otherwise."""
    found = dict(RECIPES.get(ARCHS[config.arch].family, PRE_NORM))
    # From width 64 to 256 the best rate of GPT+, nGPT and anGPT was 0.7 to 3.8 times this, NormFormer's at 64 3 to 7.
    found["learning_rate"] *= (128 / config.n_embd) ** 0.5
    if config.init_from:
        found["learning_rate"] /= 10
    if config.tie:
        found["embed_std"] = 0.02                 # README, choice 8
    return found

def load_arch(arch):
    """Runs the file of an arch like "mine.py:scalenorm", which registers scalenorm in ARCHS. Raises
    DataError."""
    file, _, name = arch.rpartition(":")
    if file:
        with blame(f"arch={arch}: {file} cannot be run"):
            spec = importlib.util.spec_from_file_location(file, file)
            module = importlib.util.module_from_spec(spec)
            sys.modules[file] = module  # where inspect and the compiler look for a class's source
            spec.loader.exec_module(module)
        choose(f"arch={arch}: what {file} registers", name, ARCHS)
        ARCHS[arch] = ARCHS[name]       # so a checkpoint's arch tells the file, too

@dataclass(init=False)
class TrainConfig(GPTConfig):
    """Training. None stands for a value that `resolve` finds; the comment behind a field is its
    --help."""
    size: str = "laptop"              # preset: laptop | 32m | 62m | 125m | 250m | 0.5b | 1b
    out_dir: str | None = None        # folder for results (out/<arch>, of GPT+ out/rmsnorm+qk_norm, or out/tuned)
    init_from: str | None = None      # weights to start from: a run's folder, or GPT-2 (lessons/extras/gpt2.py)
    resume: Literal["true", "false", "auto"] = "false"  # go on from out_dir/ckpt.pt; auto: if there is one
    eval_only: bool = False           # validate the weights in init_from or out_dir, print that as JSON
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if torch sees it, else cpu
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # autocast; auto: bfloat16 on GPUs, and CPUs with AMX
    compile: Literal["auto", "true", "false"] = "auto"      # torch.compile; auto: on a GPU, on a CPU in long runs
    data: str = "data/stdlib"         # corpus: a folder made by prepare.py
    seed: int = 1337                  # of weights, order of the data, and dropout
    vocab_size: int | None = None     # tokens in the vocabulary (by size, or the corpus's)
    pn_warmup: int | None = None      # powernorm: steps that use the batch's own statistics (warm-up's)
    max_steps: int | None = None      # optimizer steps (by size; the paper's: 20 tokens a parameter)
    batch_size: int = 8               # sequences in a micro-step of one process (by size, or as many as fit a step)
    total_batch_size: int = 2048      # tokens in an optimizer step of all processes (by size)
    learning_rate: float = 4e-3       # peak (by arch, here angpt's; a tenth of it with --init_from)
    min_lr_ratio: float = 0.01        # last learning rate over the peak; a cosine leads there
    warmup_ratio: float = 0.0         # share of the steps in which the rate rises (by arch; here angpt's)
    weight_decay: float = 0.0         # of matrices and embeddings (by arch; here angpt's)
    beta1: float = 0.9                # of Adam
    beta2: float = 0.95               # of Adam
    eps: float = 1e-9                 # of Adam
    grad_clip: float = 1.0            # largest norm of the gradient; 0 for no limit
    eval_tokens: int | None = None    # held-out tokens in a validation (0.5% of those trained on, at least 4,096)
    eval_interval: int | None = None  # steps between validations (ten a run, or more)
    log_interval: int = 10            # steps between records of log.jsonl
    checkpoint_interval: int | None = None  # steps between checkpoints (eval_interval, or 100)

    def __init__(self, **given):
        """What is given, else the arch's recipe, else what the size says, else the defaults
        above."""
        defaults = {f.name: f.default for f in fields(self)}
        for name in given:
            choose("option", name, defaults)
        self.given = {name: value for name, value in given.items() if value is not None}
        vars(self).update(defaults | self.given)
        load_arch(self.arch)
        choose("arch", self.arch, ARCHS, "; GPT+ is --arch=rmsnorm --qk_norm=true, a file's own --arch=file.py:name")
        choose("size", self.size, SIZES)
        vars(self).update(SIZES[self.size] | self.given)
        vars(self).update(recipe(self) | self.given)
        self.asked = asdict(self)                 # before anything is derived; a checkpoint keeps it
        for name in ("resume", "compile"):
            setattr(self, name, str(getattr(self, name)).lower())  # True and False from Python
        name = self.arch.split(":")[-1] + ("+qk_norm" if self.qk_norm else "")
        self.out_dir = self.out_dir or ("out/tuned" if self.init_from else f"out/{name}")
        at_least(1, self, "max_steps", "batch_size", "total_batch_size", "eval_tokens", "eval_interval",
                 "log_interval", "checkpoint_interval")
        at_least(0, self, "seed", "pn_warmup", "weight_decay", "grad_clip", "learning_rate", "min_lr_ratio",
                 "warmup_ratio", "beta1", "beta2", "eps", "embed_std")
        for name in ("min_lr_ratio", "warmup_ratio", "beta1", "beta2"):
            self.expect(name, getattr(self, name) <= 1, "at most 1")
        if source_of(self) is None:               # else the model is the checkpoint's
            GPTConfig.__post_init__(self)         # raises where options do not fit

def resolve(config, corpus_vocab=257, world_size=1):
    """A copy of config that fits corpus and processes, every None replaced. Raises ConfigError."""
    c = copy.copy(config)
    c.vocab_size = c.vocab_size or corpus_vocab
    if c.vocab_size < corpus_vocab:
        raise ConfigError(f"vocab_size={c.vocab_size}: expected at least the corpus's {corpus_vocab}")
    if "batch_size" not in c.given:  # as many sequences as divide those of a process in a step
        c.batch_size = math.gcd(c.total_batch_size // (c.block_size * world_size), c.batch_size) or 1
    micro_step = c.batch_size * c.block_size * world_size
    if c.total_batch_size % micro_step:
        raise ConfigError(f"total_batch_size={c.total_batch_size}: expected a multiple of batch_size x block_size x "
                          f"processes = {c.batch_size} x {c.block_size} x {world_size} = {micro_step}")
    with torch.device("meta"):  # shapes alone: takes no memory
        parameters = sum(p.numel() for p in GPT(c).parameters())
    c.max_steps = c.max_steps or math.ceil(20 * parameters / c.total_batch_size)
    trained = c.max_steps * c.total_batch_size
    by_default = 2 ** 20 if c.eval_only else min(10 * 2 ** 20, max(4096, trained // 200))
    c.eval_tokens = c.eval_tokens or by_default
    c.eval_interval = c.eval_interval or min(math.ceil(c.max_steps / 10), 500)  # ten take some 2% of the time
    c.checkpoint_interval = c.checkpoint_interval or max(100, c.eval_interval)
    if c.pn_warmup is None:
        c.pn_warmup = round(c.warmup_ratio * c.max_steps)
    return c

# ---- Data ------------------------------------------------------------------------------------------------------------

class Tokens:
    """One split of a corpus, cut into windows of `length` tokens, each followed by its target. What
    is left over at a shard's end is not read."""
    def __init__(self, folder, split, length, vocab_size):
        self.paths = sorted(Path(folder).glob(f"*_{split}_??????.bin"))
        self.shards = [read_shard(path) for path in self.paths]
        self.length = length
        self.vocab_size = vocab_size
        self.ends = np.cumsum([(len(tokens) - 1) // length for tokens in self.shards], dtype=int)  # in windows
        self.windows = int(self.ends[-1]) if self.shards else 0
        expect(self.windows > 0, f"{folder}: too few {split} tokens, expected more than block_size={length}")

    def window(self, i):
        """Window i of all shards' and its last token's target: (length + 1,)"""
        n = int(np.searchsorted(self.ends, i, side="right"))
        before = self.ends[n - 1] if n else 0
        start = (i - before) * self.length
        window = self.shards[n][start:start + self.length + 1].astype(np.int64)
        expect(window.max() < self.vocab_size, f"{self.paths[n]}: token {window.max()} in {self.vocab_size} tokens")
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

def open_corpus(config, machine):
    """The Corpus of config.data; the default one is made if it is missing."""
    if config.data == TrainConfig.data and machine.rank == 0 and not Path(config.data, "meta.json").exists():
        prepare()
    machine.any(False)  # all wait for it
    return Corpus(config.data, config.block_size)

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

@torch.no_grad()
def evaluate(model, corpus, config, machine):
    """Held-out loss in nats per token, its standard error by how micro-batches differ, and bits per
    byte: over the same tokens whatever the ranks or the arch."""
    model.eval()
    held_out = corpus.val
    windows = max(1, min(held_out.windows, config.eval_tokens // config.block_size))
    total = torch.zeros(5, dtype=torch.float64)
    for first in range(machine.rank * config.batch_size, windows, machine.world_size * config.batch_size):
        last = min(first + config.batch_size, windows)
        x, y = held_out.batch(range(first, last), machine.device)
        with machine.autocast(), torch.compiler.set_stance("force_eager"):  # compiled for training only
            loss = model(x, y, loss_only=True)[1].item()
        n_bytes = corpus.token_bytes[y.cpu()].sum()
        total += torch.tensor([loss * y.numel(), y.numel(), n_bytes, loss ** 2, 1], dtype=torch.float64)
    model.train()
    nats, tokens, n_bytes, squares, n = machine.sum(total).tolist()
    mean = nats / tokens
    error = math.sqrt(max(0.0, squares / n - mean ** 2) / max(1, n - 1))
    return {"val_loss": mean, "val_error": error, "val_bpb": nats / math.log(2) / max(n_bytes, 1)}

# ---- The machine -----------------------------------------------------------------------------------------------------

def find_device(name="auto"):
    """The torch.device that --device means. Raises ConfigError where torch does not see it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = ["cpu", accelerator.type] if accelerator else ["cpu"]
    if name == "auto":
        name = "cuda" if "cuda" in there else "cpu"
    choose("device", name, there)
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # torchrun: a GPU for each process
    return torch.device(name)

def find_dtype(name, device):
    """The torch.dtype that --dtype means; auto: bfloat16 where it is much faster."""
    if name == "auto":
        on_gpu = device.type == "cuda"
        is_fast = torch.cuda.is_bf16_supported(False) if on_gpu else torch.cpu._is_amx_tile_supported()
        name = "bfloat16" if is_fast else "float32"
    return getattr(torch, name)

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

def join_machine(config):
    """This process's Machine, as torchrun's environment has it; sets up what training on it is
    faster with."""
    device = find_device(config.device)
    machine = Machine(device, find_dtype(config.dtype, device), int(os.environ.get("RANK", 0)),
                      int(os.environ.get("WORLD_SIZE", 1)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32
    elif sys.platform == "linux":                   # malloc keeps freed memory: 20 to 40% of a CPU's step
        libc = ctypes.CDLL(None)
        if not libc.mallopt(-3, 2 ** 30):           # M_MMAP_THRESHOLD; 0 says that it is refused
            libc.mallopt(-3, 2 ** 25)               # an old glibc takes no more
        libc.mallopt(-1, 2 ** 31 - 1)               # M_TRIM_THRESHOLD
    if machine.world_size > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return machine

# ---- A step ----------------------------------------------------------------------------------------------------------

def make_model(config, machine, state=None):
    """A GPT with new weights or, if there is a checkpoint, with its."""
    torch.manual_seed(config.seed)
    model = GPT(config).to(machine.device)
    if state:
        load_weights(model, state)
    return model

def make_optimizer(model, config):
    """AdamW over two groups: matrices and embeddings, which decay, and vectors and scalars, which
    do not."""
    groups = [
        dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=config.weight_decay),
        dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0),
    ]
    betas = config.beta1, config.beta2
    return torch.optim.AdamW(groups, config.learning_rate, betas, config.eps, fused=True)

def for_training(model, config, machine):
    """What to call in place of the model: blocks and loss may be compiled, gradients are averaged
    over all processes. Compiling takes a quarter of a minute and saves a third of the time after
    it."""
    work = sum(p.numel() for p in model.parameters()) * config.max_steps * config.total_batch_size
    is_long = machine.device.type == "cpu" and work > 2e12 and shutil.which("g++")
    compiles = machine.device.type == "cuda" or is_long if config.compile == "auto" else config.compile == "true"
    torch.compiler.reset()                     # earlier models would count towards torch's limit of compilations
    torch._dynamo.config.optimize_ddp = False  # it would cut blocks where DistributedDataParallel's buckets end
    if compiles:
        for block in model.blocks:
            block.compile()
        model.nats = torch.compile(model.nats)  # head and loss: half of a step if the vocabulary is large
    if machine.world_size == 1:
        return model
    is_new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers" if is_new else "broadcast_buffers"  # the name before torch 2.13
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **{sync_buffers: False})

def learning_rate(config, step):
    """A line up over the warm-up, then a cosine down to min_lr_ratio of the peak at the last
    step."""
    warmup = round(config.warmup_ratio * config.max_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, config.max_steps - 1 - warmup)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)

class Diverged(DataError):
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

# ---- Checkpoints -----------------------------------------------------------------------------------------------------

def code_of(arch):
    """A hash of the source of an arch's block and of the classes that it is made of; "" in a
    notebook."""
    with contextlib.suppress(OSError, TypeError):
        source = "".join(inspect.getsource(owner) for owner in ARCHS[arch].__mro__[:-2])  # up to nn.Module
        return hashlib.sha256(source.encode()).hexdigest()[:16]
    return ""

def read_checkpoint(source, device="cpu"):
    """The dict that `Run.save` wrote to a run's folder or a .pt file; of GPT-2 one like it. Raises
    DataError."""
    path = Path(source)
    if (path / "config.json").exists() or str(source) in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        from lessons.extras.gpt2 import read_gpt2
        return read_gpt2(source)
    if path.suffix != ".pt":
        path = path / "ckpt.pt"
    expect(path.is_file(), f"{path}: no such checkpoint; train.py writes one to its --out_dir")
    with blame(f"{path}: cannot be read as a checkpoint of train.py"):
        state = torch.load(path, map_location=device, weights_only=True, mmap=True)
        expect({"model", "config", "step", "tokenizer"} <= set(state), f"{path}: expected a checkpoint of train.py")
        return state

def load_weights(model, state):
    """A checkpoint's weights into a model; of learned positions as many as it has. Raises
    DataError."""
    weights = dict(state["model"])
    if "wpe.weight" in weights:
        weights["wpe.weight"] = weights["wpe.weight"][:model.config.block_size]
    with blame("the checkpoint's weights do not fit this model.py"):
        model.load_state_dict(weights)

def load_model(source, device="cpu", arch=None):
    """(model in eval mode, tokenizer, checkpoint dict) of what read_checkpoint reads; arch,
    "file.py:name", if it is one of a file. Raises DataError."""
    state = read_checkpoint(source, device)
    config = with_checkpoint(TrainConfig(init_from=str(source), arch=arch), state)
    model = make_model(config, Machine(torch.device(device)), state)
    return model.eval(), get_tokenizer(state["tokenizer"]), state

HERE = {"out_dir", "init_from", "resume", "eval_only", "device", "batch_size"}  # options not to go on with

def source_of(config):
    """The checkpoint that a run begins with: its own, another's, or None for new weights."""
    if config.resume == "true" or (config.eval_only and not config.init_from):
        return config.out_dir
    return config.init_from

def with_checkpoint(config, state):
    """config, in which the checkpoint's options stand for those that were not given: of a run that
    goes on all but those of this machine, of others the model's. What was given wins, but the model
    and the data's order stay."""
    saved = state["config"]
    arch = config.given.get("arch", saved["arch"])
    expect(arch in ARCHS, f"{source_of(config)}: its blocks are in a file; to run that, give --arch={arch}")
    model = {f.name for f in fields(GPTConfig)}
    if config.resume == "true" or not config.init_from:  # its own checkpoint
        derived = {name for name, value in state.get("asked", {}).items() if value is None}
        taken = set(config.asked) - HERE - derived | model
        fixed = model | {"seed", "total_batch_size"}
    else:
        taken = model
        fixed = model - {"block_size", "dropout"}
    joined = {name: value for name, value in saved.items() if name in taken}
    for name, value in config.given.items():
        same = str(value).split(":")[-1] == str(saved.get(name)).split(":")[-1]  # an arch's file may have moved
        expect(name not in fixed or same,
               f"{source_of(config)}: made with {name}={saved.get(name)}, now {name}={value}")
        joined[name] = value
    joined |= {"arch": arch.split(":")[-1], "out_dir": config.out_dir, "resume": config.resume}
    if config.resume == "true":
        joined["init_from"] = None               # its own checkpoint stands for these weights
        joined["warmup_ratio"] *= saved["max_steps"] / joined["max_steps"]  # no second warm-up
    joined = TrainConfig(**joined)
    joined.given = config.given
    joined.arch = joined.asked["arch"] = arch    # whose file has run and may have changed since: not again
    return joined

# ---- A run -----------------------------------------------------------------------------------------------------------

def read_log(folder):
    """The records of folder/log.jsonl up to the first that cannot be read: a killed run's last line
    may be cut."""
    records = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path(folder, "log.jsonl").open("rb"):
            records.append(json.loads(line))
    return records

def draw_losses(records, path):
    axes = Figure(figsize=(8, 5), layout="constrained").subplots()
    for key, marker in (("loss", ""), ("val_loss", "o")):
        shown = [(record["tokens"], record[key]) for record in records if key in record]
        axes.plot(*zip(*shown), label=key, marker=marker)
    axes.set(xlabel="tokens", ylabel="nats/token", title=path.parent.name)
    axes.legend()
    axes.figure.savefig(path)

def progress_line(record, max_steps):
    line = f"step {record['step']}/{max_steps}"
    if "loss" in record:
        line += f"   loss {record['loss']:.3f}   {record['tokens_per_s']:,.0f} tokens/s"
    if "val_loss" in record:
        line += f"   held out: {record['val_loss']:.3f} nats/token, {record['val_bpb']:.3f} bits/byte"
    return line

def silent(text):
    pass

class Run:
    """A model in training: what it is, where it stands, what its log says."""
    step = 0
    seconds = 0.0                                # in steps alone

    def __init__(self, config, machine, say, watch=None):
        source = source_of(config)
        state = read_checkpoint(source) if source else None
        if state:
            config = with_checkpoint(config, state)
        self.say = say
        self.watch = watch
        self.machine = machine
        self.records = []
        self.corpus = open_corpus(config, machine)
        self.config = resolve(config, self.corpus.vocab_size, machine.world_size)
        self.model = make_model(self.config, machine, state)
        self.optimizer = make_optimizer(self.model, config)
        self.code = code_of(config.arch)         # now: who waits for a run may edit the file
        if state:
            made, now = state["tokenizer"], self.corpus.tokenizer
            expect(made == now, f"{source}: made with tokenizer={made}, now {config.data} has {now}")
            if state.get("code", self.code) != self.code:
                say(f"{source}: the code of {config.arch} has changed since; it may now be another function")
        if config.resume == "true":
            expect("optimizer" in state, f"{source}: has weights alone; --init_from starts a run from them")
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
            self.seconds = state["seconds"]

    def open_log(self):
        """Makes the run's folder, with an empty log or, in a run that goes on, the log up to its
        step. What an earlier run left there is moved to folder.1, .2, ..."""
        folder = Path(self.config.out_dir)
        goes_on = self.config.resume == "true"
        if goes_on:
            self.records = [record for record in read_log(folder) if record["step"] <= self.step]
        if self.machine.rank > 0:
            return
        if not goes_on and (folder / "log.jsonl").exists():
            free = next(n for n in itertools.count(1) if not Path(f"{folder}.{n}").exists())
            folder.rename(f"{folder}.{free}")
            self.say(f"{folder}.{free}: the run that was there before")
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(folder / "log.jsonl") as file:
            file.writelines(json.dumps(record).encode() + b"\n" for record in self.records)

    def log(self, measured):
        """Adds a record to the log, tells it, and draws the log if the record has a validation."""
        tokens = self.step * self.config.total_batch_size
        record = measured | {"step": self.step, "tokens": tokens, "seconds": self.seconds}
        if self.step == 0:
            record["config"] = asdict(self.config)
        self.records.append(record)
        if self.machine.rank == 0:
            with Path(self.config.out_dir, "log.jsonl").open("a") as file:
                file.write(json.dumps(record, default=float) + "\n")
            self.say(progress_line(record, self.config.max_steps))
            if "val_loss" in record:
                draw_losses(self.records, Path(self.config.out_dir, "loss.png"))

    def validate(self):
        """evaluate's measurements and watch's. Raises Diverged where they are far worse than
        guessing's."""
        found = evaluate(self.model, self.corpus, self.config, self.machine)
        guessing = math.log(self.config.vocab_size)
        if self.step > 0 and not found["val_loss"] < 2 * guessing:  # so that NaN is caught, too
            raise Diverged(f"step {self.step}: held out {found['val_loss']:.4g} nats/token, far above guessing's "
                           f"{guessing:.3g}; a lower --learning_rate may help")
        seen = self.watch(self.model, self.optimizer, self.step) if self.watch else None
        return (seen or {}) | found

    def save(self):
        """ckpt.pt, replaced in one step: a crash leaves the old one or the new one."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                 "seconds": self.seconds, "config": asdict(self.config), "asked": self.config.asked,
                 "code": self.code, "tokenizer": self.corpus.tokenizer}
        path = Path(self.config.out_dir, "ckpt.pt")
        with blame(f"{path}: cannot be written"), atomic(path) as file:
            torch.save(state, file)

    def command_to_go_on(self):
        options = self.config.given | {"out_dir": self.config.out_dir, "resume": "true"}
        ranks = self.machine.world_size
        launcher = "python" if ranks == 1 else f"torchrun --nproc_per_node={ranks}"
        return f"{launcher} train.py " + shlex.join(f"--{name}={value}" for name, value in options.items())

    def summary(self):
        """What will run, in two lines."""
        c = self.config
        parameters = sum(p.numel() for p in self.model.parameters())
        return (f"{c.out_dir}: {c.arch}, {parameters:,} parameters; steps {self.step} to {c.max_steps} of "
                f"{c.total_batch_size:,} tokens of {c.data}\npeak learning rate {c.learning_rate:.2g}, warm-up "
                f"{c.warmup_ratio:.0%}; {self.machine.device}, {self.machine.dtype}, {torch.get_num_threads()} threads")

@contextlib.contextmanager
def signals_noted():
    """Yields a list that the first SIGINT or SIGTERM joins, so that a step can end and be saved; a
    second one acts as usual, except under torchrun, which repeats them."""
    received = []

    def note(number, frame):
        received.append(number)
        if "RANK" not in os.environ:
            signal.signal(number, before[number])

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

def train(config, watch=None, say=functools.partial(print, flush=True)):
    """Runs what config (a TrainConfig) asks for; returns the log, the list of dicts that log.jsonl
    holds. watch(model, optimizer, step) is called at each validation; the dict that it returns
    joins the record. say=None is quiet. Raises ConfigError for options, DataError for files,
    Diverged for a loss that is not finite or far worse than guessing's; stopped by a signal it
    saves, and raises KeyboardInterrupt or, for SIGTERM, SystemExit."""
    machine = join_machine(config)
    if machine.rank > 0 or say is None:
        say = silent
    config = copy.copy(config)                   # the caller's stays as it is
    if config.resume == "auto":
        is_there = machine.rank == 0 and Path(config.out_dir, "ckpt.pt").exists()  # others may see it later
        config.resume = "true" if machine.any(is_there) else "false"
    if config.eval_only:
        run = Run(config, machine, say)
        found = {"weights": source_of(config), "data": run.config.data, **run.validate()}
        say(json.dumps(found))
        return [found]
    alone = only_one_in(config.out_dir, "another run is writing here; wait for it, or give another --out_dir")
    with alone if machine.rank == 0 else contextlib.nullcontext():
        run = Run(config, machine, say, watch)
        run.open_log()
        say(run.summary())
        with signals_noted() as received:
            take_steps(run, received)
    return run.records

def take_steps(run, received):
    """The loop: a step, then what is due behind it. Before the first step a new run is
    validated."""
    config, machine = run.config, run.machine
    forward = for_training(run.model, config, machine)
    if run.step == 0:
        run.log(run.validate())
    while run.step < config.max_steps:
        began = time.perf_counter()
        micro_batches = batches(run.corpus.train, run.step, config, machine)
        loss, norm = optimizer_step(run.step, forward, run.model, run.optimizer, micro_batches, config, machine)
        took = time.perf_counter() - began
        run.seconds += took
        run.step += 1
        is_last = run.step == config.max_steps
        validates = is_last or run.step % config.eval_interval == 0
        if validates or run.step % config.log_interval == 0:
            measured = {"loss": machine.sum(loss).item() / machine.world_size, "grad_norm": norm,
                        "lr": learning_rate(config, run.step - 1), "tokens_per_s": config.total_batch_size / took}
            if machine.device.type == "cuda":
                measured["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
            run.log(measured | run.validate() if validates else measured)
        stops = machine.any(received)
        if machine.rank == 0 and (stops or is_last or run.step % config.checkpoint_interval == 0):
            run.save()
        if stops:
            run.say(f"\nStopped and saved at step {run.step}. To go on: {run.command_to_go_on()}")
            raise SystemExit(128 + signal.SIGTERM) if machine.any(signal.SIGTERM in received) else KeyboardInterrupt

def main(argv):
    config = TrainConfig(**typed(argv, __doc__, TrainConfig))
    train(config)
    if int(os.environ.get("RANK", 0)) == 0 and not config.eval_only:
        print_sample(config.out_dir)

def print_sample(folder):
    """The end of a run's output: what its model writes, if its tokenizer is at hand."""
    print(f"\n{folder} is written. A sample (more: sample.py --out_dir={folder}):\n")
    try:
        model, tokenizer, _ = load_model(folder)
    except DataError as error:
        print(f"none: {error}")
        return
    tokens = torch.cat(list(model.generate(torch.tensor([[tokenizer.eot_token]]), 400, temperature=0.8)))
    print(tokenizer.decode(tokens[tokens < tokenizer.n_vocab].tolist()))  # the vocabulary may be padded

if __name__ == "__main__":
    run_script(main)
    if "RANK" in os.environ:  # a thread of torch's that still runs would abort the usual way out
        os._exit(0)
