"""Train a GPT: on a laptop in minutes, on eight GPUs for days, with the same code.

    python train.py --arch=ngpt                      # laptop size; makes data/stdlib if missing
    python train.py --arch=ngpt --resume=true        # go on; with a larger --max_steps, further
    python train.py --init_from=out/angpt --data=data/mine       # from weights, a run's or GPT-2's
    torchrun --nproc_per_node=8 train.py --data=data/fineweb --size=0.5b

Results go to out/<arch>: ckpt.pt, log.jsonl, loss.png; an earlier run there moves to out/<arch>.1.
What is not given comes from the run that goes on, the arch's recipe, the size, or the default.
"""
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
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # spinning threads slow down what else runs
if platform.machine() == "x86_64":                # else GCC 12 may compile bfloat16 to NaN
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -fno-tree-slp-vectorize")
import numpy as np
import torch
from matplotlib.figure import Figure

from model import ARCHS, GPT, ConfigError, GPTConfig
from prepare import (DataError, at_least, atomic, blame, choose, expect, get_tokenizer,
                     only_one_in, prepare, read_meta, read_shard, run_script, token_lengths, typed)
# ---- Options -------------------------------------------------------------------------------------
SIZES = {"laptop": {}}  # anGPT's Table F.1, context: section 5, rope: F.2; the batches are ours
for name, width, depth, batch, steps in (
        ("32m", 256, 6, 32, 1223), ("62m", 384, 10, 32, 2375), ("125m", 512, 18, 16, 4846),
        ("250m", 768, 18, 16, 9429), ("0.5b", 1024, 24, 8, 19292), ("1b", 1280, 36, 4, 40917)):
    SIZES[name] = dict(n_embd=width, n_layer=depth, n_head=width // 64, block_size=2048,
                       rope_fraction=0.5, vocab_size=50304, max_steps=steps, batch_size=batch,
                       total_batch_size=524_288)

PRE_NORM = dict(learning_rate=2e-3, weight_decay=0.1, warmup_ratio=0.2)
RECIPES = {                                       # a sweep's best at laptop size (lessons/studies)
    "layernorm": dict(PRE_NORM, learning_rate=4e-3),
    "rmsnorm": PRE_NORM,                          # and GPT+
    "powernorm": dict(PRE_NORM, learning_rate=4e-3, embed_std=0.1),
    "normformer": dict(PRE_NORM, embed_std=1.0),  # as large as its branches, LayerNorms' outputs
    "ngpt": dict(learning_rate=8e-3),             # without decay and warm-up: nGPT 2.6, anGPT F.2
    "angpt": dict(learning_rate=4e-3),
}

def recipe(config):
    """What the arch's family trains with, unless told otherwise."""
    found = dict(RECIPES.get(ARCHS[config.arch].family, PRE_NORM))
    found["learning_rate"] *= (128 / config.n_embd) ** 0.5  # roughly: lessons/studies
    if config.init_from:
        found["learning_rate"] /= 10
    if config.tie:
        found["embed_std"] = 0.02                 # the embedding is the head, too
    return found

def load_arch(arch):
    """The name of an arch; the file in "mine.py:scalenorm", which adds it to ARCHS, is run."""
    file, _, name = arch.rpartition(":")
    if file:
        with blame(f"arch={arch}: {file} cannot be run"):
            spec = importlib.util.spec_from_file_location(file, file)
            module = importlib.util.module_from_spec(spec)
            sys.modules[file] = module            # where torch.compile looks for a class's source
            spec.loader.exec_module(module)
    return name

@dataclass(init=False)
class TrainConfig(GPTConfig):
    """Training. Give options when you make it: others follow from them; `resolve` replaces None."""
    size: str = "laptop"              # preset: laptop | 32m | 62m | 125m | 250m | 0.5b | 1b
    out_dir: str | None = None        # folder for results (out/<arch>, out/<arch>+qk_norm, out/tuned)
    init_from: str | None = None      # weights: a run's folder, or GPT-2 (lessons/extras/gpt2.py)
    resume: Literal["true", "false", "auto"] = "false"  # go on from out_dir; auto: if it has a run
    eval_only: bool = False           # print the held-out loss of init_from or out_dir, as JSON
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if torch sees it, else cpu
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where it is fast
    compile: Literal["auto", "true", "false"] = "auto"      # auto: on a GPU or in long runs
    data: str = "data/stdlib"         # corpus: a folder made by prepare.py
    seed: int = 1337                  # of weights, order of the data, and dropout
    vocab_size: int | None = None     # tokens in the vocabulary (by size, or the corpus's)
    pn_warmup: int | None = None      # powernorm: steps that use the batch's moment (warm-up's)
    max_steps: int = 1600             # optimizer steps (by size; there 20 tokens a parameter)
    batch_size: int | None = None     # sequences in a process's micro-step (by size, or up to 8)
    total_batch_size: int = 2048      # tokens in an optimizer step of all processes (by size)
    learning_rate: float = 4e-3       # peak (by arch and width; a tenth with --init_from)
    min_lr_ratio: float = 0.01        # last learning rate over the peak; a cosine leads there
    warmup_ratio: float = 0.0         # share of the steps in which the rate rises (by arch)
    weight_decay: float = 0.0         # of matrices and embeddings (by arch)
    beta1: float = 0.9                # of Adam
    beta2: float = 0.95               # of Adam
    eps: float = 1e-9                 # of Adam
    grad_clip: float = 1.0            # largest norm of the gradient; 0 for no limit
    eval_tokens: int | None = None    # held out, in a validation (0.5% of training; eval_only: 1M)
    eval_interval: int | None = None  # steps between validations (ten a run, or more)
    log_interval: int = 10            # steps between records of log.jsonl
    checkpoint_interval: int | None = None  # steps between checkpoints (eval_interval)

    def __init__(self, **given):
        for name in given:
            choose("option", name, self.__dataclass_fields__)
        self.given = given = {name: str(value) if isinstance(value, Path) else value
                              for name, value in given.items() if value is not None}
        if "arch" in given:
            given["arch"] = load_arch(given["arch"])
        vars(self).update(SIZES.get(given.get("size"), {}) | given)  # given wins
        choose("arch", self.arch, ARCHS,
               "; GPT+ is --arch=rmsnorm --qk_norm=true, a file's own --arch=file.py:name")
        choose("size", self.size, SIZES)
        at_least(1, self, "block_size", "n_layer", "n_head", "n_embd", "max_steps", "batch_size",
                 "total_batch_size", "eval_tokens", "eval_interval", "log_interval", "checkpoint_interval")
        at_least(0, self, *self.__dataclass_fields__)
        for name in "rope_fraction", "dropout", "min_lr_ratio", "warmup_ratio":
            self.expect(name, getattr(self, name) <= 1, "from 0 to 1")
        for name in "beta1", "beta2":
            self.expect(name, getattr(self, name) < 1, "less than 1")
        vars(self).update(recipe(self) | given)
        new = f"out/{self.arch}{'+qk_norm' * self.qk_norm}"
        self.out_dir = self.out_dir or ("out/tuned" if self.init_from else new)
        self.own = (self.resume in ("true", True)            # True from Python
                    or self.resume == "auto" and Path(self.out_dir, "ckpt.pt").exists()
                    or self.eval_only and not self.init_from)
        self.source = self.out_dir if self.own else self.init_from  # None: new weights
        if "arch" in given or not self.source:    # else the checkpoint knows its arch
            self.__post_init__()

def resolve(config, corpus_vocab=257, world_size=1):
    """A copy of config that fits corpus and processes, every None replaced."""
    c = copy.copy(config)
    c.vocab_size = c.vocab_size or corpus_vocab
    at_least(corpus_vocab, c, "vocab_size")
    sequences, rest = divmod(c.total_batch_size, c.block_size * world_size)
    c.batch_size = c.batch_size or math.gcd(sequences, 8)
    if rest or sequences % c.batch_size:
        raise ConfigError(f"total_batch_size={c.total_batch_size}: expected a multiple of batch_size x "
                          f"block_size x processes = {c.batch_size} x {c.block_size} x {world_size}")
    in_training = min(10_485_760, max(4096, c.max_steps * c.total_batch_size // 200))
    c.eval_tokens = c.eval_tokens or (1_048_576 if c.eval_only else in_training)
    c.eval_interval = c.eval_interval or min(math.ceil(c.max_steps / 10), 500)
    c.checkpoint_interval = c.checkpoint_interval or c.eval_interval
    if c.pn_warmup is None:
        c.pn_warmup = round(c.warmup_ratio * c.max_steps)
    return c
# ---- Data ----------------------------------------------------------------------------------------
class Tokens:
    """A split of a corpus in windows of `length` tokens; a rest at a shard's end is not read."""
    def __init__(self, folder, split, length, vocab_size=None):  # the last: old notebooks'
        paths = sorted(Path(folder).glob(f"*_{split}_??????.bin"))
        self.shards = [read_shard(path) for path in paths]
        self.length = length
        counts = [(len(tokens) - 1) // length for tokens in self.shards]
        self.starts = np.cumsum([0, *counts])     # the number of each shard's first window
        self.windows = self.starts[-1]
        expect(self.windows > 0,
               f"{folder}: too few {split} tokens, expected more than block_size={length}")

    def window(self, i):
        """Window i of all shards, and a token more: (length + 1,)"""
        n = np.searchsorted(self.starts, i, side="right") - 1  # its shard
        start = (i - self.starts[n]) * self.length
        return self.shards[n][start:start + self.length + 1].astype(np.int64)

    def batch(self, indices, device):
        """Windows -> inputs and targets, each (len(indices), length)."""
        rows = torch.from_numpy(np.stack([self.window(i) for i in indices])).to(device)
        return rows[:, :-1], rows[:, 1:]          # rows: (len(indices), length + 1)

def open_corpus(config, machine):
    """What prepare.py made in config.data; the default corpus is made if it is missing."""
    path = Path(config.data, "meta.json")
    if config.data == TrainConfig.data and machine.rank == 0 and not path.exists():
        prepare()
    machine.any(False)                             # all wait for it
    corpus = SimpleNamespace(**read_meta(config.data))    # its tokenizer, and more
    corpus.token_bytes = token_lengths(vars(corpus))      # (vocab_size,), of each token's text
    corpus.vocab_size = len(corpus.token_bytes)
    corpus.train = Tokens(config.data, "train", config.block_size)
    corpus.val = Tokens(config.data, "val", config.block_size)
    return corpus

@functools.lru_cache                               # every step of an epoch asks for it
def epoch_order(seed, epoch, windows):
    """All windows of an epoch, each once, in the order in which they are trained on."""
    return np.random.default_rng((seed, epoch)).permutation(windows)

def batches(tokens, step, config, machine):
    """This rank's micro-batches (x, y), each (batch_size, block_size), by seed and step alone."""
    n = tokens.windows
    sequences = config.total_batch_size // config.block_size
    places = range(step * sequences + machine.rank, (step + 1) * sequences, machine.world_size)
    mine = [epoch_order(config.seed, place // n, n)[place % n] for place in places]
    micro_batches = np.reshape(mine, (-1, config.batch_size))
    return [tokens.batch(windows, machine.device) for windows in micro_batches]

@torch.no_grad()
def evaluate(model, corpus, config, machine):
    """Nats per held-out token, their standard error by how micro-batches differ, bits per byte."""
    model.eval()
    windows = range(corpus.val.windows)[:max(1, config.eval_tokens // config.block_size)]
    sums = np.zeros(5)
    for i in windows[::config.batch_size][machine.rank::machine.world_size]:  # i: a batch's first
        x, y = corpus.val.batch(windows[i:i + config.batch_size], machine.device)
        with machine.autocast(), torch.compiler.set_stance("force_eager"):  # else compiled anew
            loss = model(x, y, loss_only=True)[1].item()
        n = y.numel()
        sums += 1, n, loss * n, loss ** 2 * n, corpus.token_bytes[y.cpu()].sum()
    model.train()
    parts, tokens, nats, squares, n_bytes = machine.sum(torch.from_numpy(sums)).tolist()
    variance = abs(squares / tokens - (nats / tokens) ** 2)
    return {"val_loss": nats / tokens,
            "val_error": (variance / (parts - 1)) ** 0.5 if parts > 1 else None,
            "val_bpb": nats / math.log(2) / n_bytes}
# ---- The machine ---------------------------------------------------------------------------------
def find_device(name):
    """The torch.device that --device means. Raises DataError where torch does not see it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # torchrun: a GPU for each process
    with blame(f"device={name}: torch cannot use it here"):
        return torch.empty(0, device=name).device

@dataclass
class Machine:
    """This process's place among those that train together, its device, its dtype."""
    device: torch.device
    dtype: torch.dtype = torch.float32
    rank: int = 0
    world_size: int = 1

    def autocast(self):
        """In dtype; a bfloat16 head in the cache would sum its pieces' gradients in bfloat16."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32,
                              cache_enabled=False)

    def sum(self, x):
        if self.world_size > 1:
            x = x.to(self.device)
            torch.distributed.all_reduce(x)
        return x

    def any(self, flag):
        """Whether the flag is set in any process; all wait for each other."""
        return bool(self.sum(torch.tensor(1.0 if flag else 0.0)))

def join_machine(config):
    """This process's Machine, as torchrun's environment has it; sets up what makes it faster."""
    device = find_device(config.device)
    on_gpu = device.type == "cuda"
    dtype = config.dtype
    if dtype == "auto":                             # bfloat16 where it is much faster
        fast = (torch.cuda.is_bf16_supported(False) if on_gpu
                else torch.cpu._is_avx512_bf16_supported())
        dtype = "bfloat16" if fast else "float32"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32
    elif sys.platform == "linux":                   # malloc keeps freed memory: 20 to 40% of a step
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2 ** 25)                   # M_MMAP_THRESHOLD, the most that glibc takes
        libc.mallopt(-1, 2 ** 31 - 1)               # M_TRIM_THRESHOLD
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    return Machine(device, getattr(torch, dtype), int(os.environ.get("RANK", 0)), world_size)
# ---- Model and step ------------------------------------------------------------------------------
def make_model(config, device, state=None):
    """A GPT with new weights, or a checkpoint's. Raises DataError."""
    torch.manual_seed(config.seed)                  # the same weights in all processes
    model = GPT(config)
    model.code = None                               # its arch's file; a notebook's has none
    with contextlib.suppress(Exception):
        model.code = inspect.getsource(inspect.getmodule(model.blocks[0]))
    if state:
        with blame("the checkpoint's weights do not fit this model"):
            model.load_state_dict(state["model"])
        if state.get("code") not in (None, model.code):
            print(f"The file of {config.arch} has changed since this checkpoint", file=sys.stderr)
    return model.to(device)

def make_optimizer(model, config):
    """AdamW over two groups: matrices and embeddings decay, vectors and scalars do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, config.learning_rate, (config.beta1, config.beta2), config.eps,
                             config.weight_decay, fused=True)

def compile_blocks(model, config, machine):
    """Has the first step compile where --compile says so: 15 seconds, for a third of each step."""
    work = sum(p.numel() for p in model.parameters()) * config.max_steps * config.total_batch_size
    pays = machine.device.type == "cuda" or work > 2e12 and shutil.which("g++")
    torch.compiler.reset()                     # earlier models would count towards torch's limit
    if config.compile in ("true", True) or config.compile == "auto" and pays:
        for block in model.blocks:
            block.compile()
        model.nats = torch.compile(model.nats)  # head and loss: half of a step for many tokens

def learning_rate(config, step):
    """A line up over the warm-up, then a cosine down to min_lr_ratio of the peak."""
    warmup = round(config.warmup_ratio * config.max_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, config.max_steps - 1 - warmup)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)

class Diverged(DataError):
    exit_code = 3  # after a gradient that is not finite, or a held-out loss far above guessing's

def optimizer_step(step, model, optimizer, micro_batches, config, machine):
    """A step by these and all other ranks' micro-batches; returns what it measured. Or Diverged."""
    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    torch.manual_seed(hash((config.seed, step, machine.rank)))  # of dropout
    loss = 0.0
    for x, y in micro_batches:
        with machine.autocast():
            part = model(x, y, loss_only=True)[1] / (len(micro_batches) * machine.world_size)
        part.backward()
        loss += part.detach()
    for p in model.parameters():
        p.grad = machine.sum(p.grad)                # once a step, where DDP would hook in
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf).item()
    loss = machine.sum(loss).item()
    if not math.isfinite(norm):
        raise Diverged(f"step {step + 1}: loss {loss}, gradient's norm {norm}; "
                       "a lower --learning_rate may help")
    optimizer.step()
    optimizer.zero_grad()
    model.project_()                                # nGPT's and anGPT's constraint on the weights
    return {"loss": loss, "grad_norm": norm, "lr": rate}
# ---- Checkpoints ---------------------------------------------------------------------------------
def read_checkpoint(source):
    """The dict that a run saved, in a folder or a .pt file; or GPT-2's. Raises DataError."""
    path = Path(source)
    if path.is_dir():
        path /= "ckpt.pt"
    if not path.exists():
        from lessons.extras.gpt2 import read_gpt2
        return read_gpt2(source)
    with blame(f"{path}: not a whole checkpoint"):
        state = torch.load(path, map_location="cpu", mmap=True)  # which runs no code
        state["config"]["arch"] = state["config"]["arch"].split(":")[-1]  # nor an arch's file
        return state

def with_checkpoint(config, state):
    """config, filled up with what its own run was given, or with another's options of the model.
    Raises DataError where what is given changes the model, or its own run's order of data."""
    saved = state["config"]
    kept = {name: saved[name] for name in saved if hasattr(GPTConfig, name)}
    fixed = kept.keys() - {"block_size", "dropout", "checkpoint_blocks"}
    if config.own:
        fixed |= {"block_size", "seed", "total_batch_size"}
        earlier = state.get("given", saved)       # what was not given is derived anew
        kept = {name: earlier[name] for name in earlier if hasattr(config, name)} | kept
    joined = TrainConfig(**kept | config.given | {"out_dir": config.out_dir})
    if config.own and "warmup_ratio" not in config.given:    # a longer run has no second warm-up
        joined.warmup_ratio = saved["warmup_ratio"] * saved["max_steps"] / joined.max_steps
    for name in sorted(fixed):
        expect(getattr(joined, name) == saved[name], f"{config.source}: made with {name}="
               f"{saved[name]}, now {name}={getattr(joined, name)}")
    return joined

def load_model(source, device="cpu", arch=None):
    """(model in eval mode, tokenizer, checkpoint). arch: "file.py:name", a file's. Or DataError."""
    state = read_checkpoint(source)
    config = with_checkpoint(TrainConfig(init_from=source, arch=arch), state)
    model = make_model(config, device, state)
    return model.eval(), get_tokenizer(state["tokenizer"]), state
# ---- A run ---------------------------------------------------------------------------------------
def read_log(folder):
    """The records of folder/log.jsonl, up to one that a kill has cut."""
    records = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path(folder, "log.jsonl").open("rb"):
            records.append(json.loads(line))
    return records

def draw_losses(folder):
    import pandas                                  # a third of a second that few scripts need
    axes = Figure().subplots()
    losses = pandas.DataFrame(read_log(folder), columns=["tokens", "loss", "val_loss"])
    losses.set_index("tokens").interpolate("index").plot(ax=axes, ylabel="nats/token")
    axes.figure.savefig(folder / "loss.png")

@contextlib.contextmanager
def signals_noted():
    """Yields a list of the signals received: after a first SIGINT or SIGTERM the step ends and is
    saved. A second one acts as usual, except under torchrun, which repeats them."""
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

def open_log(folder, step, goes_on):
    """Moves another run aside, drops records after `step`; returns the last step left, or -1."""
    if not goes_on and (folder / "log.jsonl").exists():
        n = 1
        while Path(f"{folder}.{n}").exists():
            n += 1
        folder.rename(f"{folder}.{n}")
    folder.mkdir(parents=True, exist_ok=True)
    records = [record for record in read_log(folder) if record["step"] <= step]
    with atomic(folder / "log.jsonl") as file:
        file.writelines(json.dumps(record).encode() + b"\n" for record in records)
    return records[-1]["step"] if records else -1

def log(record, folder, say):
    with open(folder / "log.jsonl", "a") as file:
        file.write(json.dumps(record, default=float) + "\n")
    line = f"step {record['step']}"
    if "tokens_per_s" in record:
        line += f"   loss {record['loss']:.3f}   {record['tokens_per_s']:,.0f} tokens/s"
    if "val_loss" in record:
        line += f"   held out: {record['val_loss']:.3f} nats, {record['val_bpb']:.3f} bits/byte"
        draw_losses(folder)
    say(line)

def tell(text):
    with contextlib.suppress(OSError):  # Ctrl-C has ended `| tee`, or the terminal is gone: go on
        print(text, flush=True)

def train(config, watch=None, say=tell):
    """Runs a TrainConfig; returns log.jsonl's records. watch(model, optimizer, step) is called at
    each validation; a dict that it returns joins the record. say=None is quiet. Raises ConfigError,
    DataError, Diverged; stopped, it saves and raises KeyboardInterrupt or SystemExit (SIGTERM)."""
    with (only_one_in(config.out_dir, "another run is writing here; give another --out_dir")
          if os.environ.get("RANK", "0") == "0" and not config.eval_only else contextlib.nullcontext()):
        state = read_checkpoint(config.source) if config.source else {}
        config = with_checkpoint(config, state) if state else config
        machine = join_machine(config)
        if say is None or machine.rank > 0:
            say = lambda text: None
        corpus = open_corpus(config, machine)
        expect(state.get("tokenizer", corpus.tokenizer) == corpus.tokenizer, f"{config.source}: made "
               f"with tokenizer={state.get('tokenizer')}, now {config.data} has {corpus.tokenizer}")
        config = resolve(config, corpus.vocab_size, machine.world_size)
        model = make_model(config, machine.device, state)
        if config.eval_only:
            found = evaluate(model, corpus, config, machine)
            say(json.dumps(found))
            return [found]
        optimizer = make_optimizer(model, config)
        if config.own:                             # its moments, with the options of now
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state["optimizer"]["state"]})
        else:
            state = {"step": 0, "seconds": 0.0}
        say(f"{config.out_dir}: {config.arch}, {sum(p.numel() for p in model.parameters()):,} parameters, "
            f"{machine.device}, {machine.dtype}; peak learning rate {config.learning_rate:.2g}; "
            f"steps {state['step']} to {config.max_steps}")
        compile_blocks(model, config, machine)
        with signals_noted() as signals:
            return take_steps(config, corpus, model, optimizer, state, machine, watch, say, signals)

def take_steps(config, corpus, model, optimizer, state, machine, watch, say, signals):
    """The loop: what is due at a step, then the next one."""
    folder = Path(config.out_dir)
    step = state["step"]
    seconds = state["seconds"]                     # in steps alone
    measured = {}                                  # by the step before this one
    logged = open_log(folder, step, config.own) if machine.rank == 0 else math.inf  # others: no log
    while True:
        is_last = step >= config.max_steps
        validates = is_last or step % config.eval_interval == 0
        record = measured | {"step": step, "tokens": step * config.total_batch_size, "seconds": seconds}
        if validates:
            record |= evaluate(model, corpus, config, machine)
            if step and not record["val_loss"] < 2 * math.log(config.vocab_size):  # or NaN
                raise Diverged(f"step {step}: held out {record['val_loss']:.4g} nats/token, far "
                               "above guessing's; a lower --learning_rate may help")
            if watch:
                record = (watch(model, optimizer, step) or {}) | record
        stops = machine.any(signals)
        is_new = step > logged                     # never in other processes
        if is_new and (validates or step % config.log_interval == 0):
            log(record, folder, say)
        if is_new and (stops or is_last or step % config.checkpoint_interval == 0):
            with atomic(folder / "ckpt.pt") as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                            "step": step, "seconds": seconds, "config": asdict(config),
                            "given": config.given, "code": model.code,
                            "tokenizer": corpus.tokenizer}, file)
        if stops:                    # any(), below, waits until it is saved; 143 is 128 + SIGTERM
            say(f"\nStopped and saved at step {step}. To go on: the same command with --resume=true")
            raise SystemExit(143) if machine.any(signal.SIGTERM in signals) else KeyboardInterrupt
        if is_last:
            return read_log(folder)
        began = time.perf_counter()
        micro_batches = batches(corpus.train, step, config, machine)
        measured = optimizer_step(step, model, optimizer, micro_batches, config, machine)
        took = time.perf_counter() - began
        measured["tokens_per_s"] = config.total_batch_size / took
        seconds += took
        step += 1

def main(argv):
    config = TrainConfig(**typed(argv, __doc__, TrainConfig))
    train(config)
    if "RANK" in os.environ:
        os._exit(0)  # a thread of torch's that still runs may abort the usual way out
    if not config.eval_only:
        tell(f"\nA sample of {config.out_dir} (sample.py writes more):\n")
        with contextlib.suppress(DataError):  # where its tokenizer is not at hand
            model, tokenizer, _ = load_model(config.out_dir)
            start = torch.tensor([[tokenizer.eot_token]])
            tokens = torch.cat(list(model.generate(start, 400, temperature=0.8)))
            tell(tokenizer.decode(tokens[tokens < tokenizer.n_vocab].tolist()))  # it may be padded

if __name__ == "__main__":
    run_script(main)
