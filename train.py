"""
Train a GPT: on a laptop in minutes, on eight GPUs for days, with the same code.

    python train.py --arch=ngpt                      # laptop size; makes the default corpus if it is missing
    python train.py --resume=true                    # go on after an interruption; with a larger --max_steps, further
    python train.py --init_from=out/angpt --data=data/mine       # from weights that exist, a run's or GPT-2's
    torchrun --nproc_per_node=8 train.py --data=data/fineweb --size=0.5b

It writes out/<arch>/ckpt.pt, log.jsonl and loss.png, and ends with a sample. An earlier run in that folder is moved to
out/<arch>.1, .2, ... What is not given comes from the arch's recipe, else from the size, else from the default.
"""
import contextlib
import ctypes
import functools
import json
import math
import os
import platform
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")     # threads that wait in a loop slow down whatever else runs here
if platform.machine() == "x86_64":                   # else GCC 12 may compile bfloat16 to NaN (torch 2.13 heeds it)
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -fno-tree-slp-vectorize")
import numpy as np
import torch
from matplotlib.figure import Figure
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.benchmark import Timer

from model import ARCHS, GPT, GPTConfig, option
from prepare import (atomic, blame, bytes_per_token, check, choose, expect, get_tokenizer, parse, prepare,
                     read_meta, read_shard, run_script)

# anGPT's Table F.1: width, depth, heads; last the batch size, ours. Context from its section 5, rope from Table F.2.
SIZES = {"laptop": dict(n_embd=128, n_layer=4, n_head=4, block_size=256, rope_fraction=1.0,
                        batch_size=8, total_batch_size=2048, max_steps=1600, eval_tokens=2 ** 14)}
for name, width, depth, heads, batch in (("32m", 256, 6, 4, 32), ("62m", 384, 10, 6, 32), ("125m", 512, 18, 8, 16),
                                         ("250m", 768, 18, 12, 16), ("0.5b", 1024, 24, 16, 8), ("1b", 1280, 36, 20, 4)):
    SIZES[name] = dict(n_embd=width, n_layer=depth, n_head=heads, block_size=2048, rope_fraction=0.5, vocab_size=50304,
                       batch_size=batch, total_batch_size=2 ** 19, eval_tokens=10 * 2 ** 20)

# The best of a sweep at laptop size (README). The sphere needs neither weight decay nor warm-up (nGPT 2.6, anGPT F.2).
PRE_NORM = dict(learning_rate=2e-3, weight_decay=0.1, warmup_ratio=0.2, embed_std=0.02)
SPHERE = dict(learning_rate=4e-3, weight_decay=0.0, warmup_ratio=0.0, embed_std=0.02)
RECIPES = {"layernorm": dict(PRE_NORM, learning_rate=4e-3), "rmsnorm": PRE_NORM,                    # and GPT+
           "powernorm": dict(PRE_NORM, learning_rate=4e-3, embed_std=0.1),
           "normformer": dict(PRE_NORM, embed_std=1.0),     # beside its branches' LayerNorms smaller tokens would drown
           "ngpt": dict(SPHERE, learning_rate=8e-3), "angpt": SPHERE}

# What may be given otherwise than in the checkpoint that a run goes on from; what is told of the machine is never taken
FREE = {"data", "dtype", "compile", "learning_rate", "grad_clip", "pn_warmup", "dropout", "eval_tokens", "max_steps"}

@dataclass
class TrainConfig(GPTConfig):
    """Every option of a run. None stands for a value that `resolve` finds: by arch, by size, or as the help says."""
    size: str = option("laptop", "preset: " + " | ".join(SIZES))
    vocab_size: int | None = option(None, "tokens in the vocabulary (by size, or the corpus's)")
    block_size: int | None = option(None, "context length in tokens (by size)")
    n_layer: int | None = option(None, "blocks (by size)")
    n_head: int | None = option(None, "attention heads (by size)")
    n_embd: int | None = option(None, "channels of the residual stream (by size)")
    rope_fraction: float | None = option(None, "share of each head's channels that rope turns (by size)")
    embed_std: float | None = option(None, "embeddings' standard deviation at the start (by arch; not ngpt, angpt)")
    pn_warmup: int | None = option(None, "powernorm: steps with the batch's own statistics (the warm-up's)", "training")
    data: str = option("data/stdlib", "corpus: a folder made by prepare.py", "training")
    max_steps: int | None = option(None, "optimizer steps (by size; the paper's: 20 tokens a parameter)", "training")
    total_batch_size: int | None = option(None, "tokens in an optimizer step of all processes (by size)", "training")
    learning_rate: float | None = option(None, "peak learning rate (by arch)", "training")
    min_lr_ratio: float = option(0.01, "last learning rate over the peak; a cosine leads there", "training")
    warmup_ratio: float | None = option(None, "share of the steps in which the rate rises (by arch)", "training")
    weight_decay: float | None = option(None, "of matrices and embeddings (by arch)", "training")
    beta1: float = option(0.9, "of Adam", "training")
    beta2: float = option(0.95, "of Adam", "training")
    eps: float = option(1e-9, "of Adam", "training")
    grad_clip: float = option(1.0, "largest norm of the gradient; 0 for no limit", "training")
    seed: int = option(1337, "of weights, order of the data, and dropout", "training")
    dtype: str = option("auto", "auto | float32 | bfloat16 (autocast; weights stay float32)", "training")
    compile: str = option("auto", "auto | true | false: torch.compile, block by block; auto: in long runs", "training")
    eval_tokens: int | None = option(None, "held-out tokens in a validation (by size; fewer in short runs)", "training")
    eval_interval: int | None = option(None, "steps between validations (ten a run, or more)", "machine")
    checkpoint_interval: int | None = option(None, "steps between checkpoints (eval_interval, or 100)", "machine")
    log_interval: int = option(10, "steps between lines of log.jsonl", "machine")
    keep_best: bool = option(False, "keep the weights of the best validation, too, as best.pt", "machine")
    eval_only: bool = option(False, "validate the weights in init_from or out_dir, print that as JSON", "machine")
    out_dir: str | None = option(None, "folder for results (out/<arch>; with init_from out/tuned)", "machine")
    init_from: str | None = option(None, "weights to start from: a run's folder, or GPT-2 (lessons/gpt2.py)", "machine")
    resume: str = option("false", "true | false | auto: go on from out_dir/ckpt.pt; auto: if there is one", "machine")
    batch_size: int | None = option(None, "sequences in a micro-step of one process (by size)", "machine")
    device: str = option("auto", "auto | cpu | cuda | mps", "machine")

    def __post_init__(self):
        self.compile, self.resume = str(self.compile).lower(), str(self.resume).lower()      # True, False from Python
        self.out_dir = self.out_dir or ("out/tuned" if self.init_from else f"out/{self.arch}")
        choose("arch", self.arch, ARCHS, "; GPT+ is --arch=rmsnorm --qk_norm=true; lessons/variants.py registers more")
        for name, valid in dict(size=SIZES, dtype=("auto", "float32", "bfloat16"), compile=("auto", "true", "false"),
                                resume=("auto", "true", "false"), device=("auto", "cpu", "cuda", "mps")).items():
            choose(name, getattr(self, name), valid)
        check(self, "vocab_size block_size n_layer n_head n_embd max_steps batch_size total_batch_size eval_interval "
                    "eval_tokens checkpoint_interval log_interval", lambda x: x >= 1, "at least 1")
        check(self, "learning_rate eps embed_std", lambda x: 0 < x < math.inf, "more than 0")
        check(self, "weight_decay grad_clip pn_warmup seed", lambda x: 0 <= x < 2 ** 32, "at least 0, below 2 ** 32")
        check(self, "min_lr_ratio warmup_ratio rope_fraction dropout", lambda x: 0 <= x <= 1, "from 0 to 1")
        check(self, "beta1 beta2", lambda x: 0 <= x < 1, "from 0 to below 1")

    def model_config(self):
        return GPTConfig(**{f.name: getattr(self, f.name) for f in fields(GPTConfig)})

def resolve(config, corpus_vocab=257, world_size=1):
    """A copy of config with every None replaced: by arch, size, and what follows from those. Raises ConfigError."""
    parents = getattr(getattr(ARCHS[config.arch], "func", ARCHS[config.arch]), "__mro__", ())        # of its block
    family = next((x for x in ("normformer", "ngpt", "angpt") if ARCHS[x] in parents), "rmsnorm")      # a seventh's
    recipe = RECIPES.get(config.arch, RECIPES[family]) | ({"embed_std": 0.02} if config.tie else {})  # see README 8
    c = replace(config, **{k: v for k, v in (SIZES[config.size] | recipe).items() if getattr(config, k) is None})
    c.vocab_size = c.vocab_size or corpus_vocab
    check(c, "vocab_size", lambda x: x >= corpus_vocab, f"at least the corpus's {corpus_vocab}")
    c.learning_rate = config.learning_rate or c.learning_rate * (128 / c.n_embd) ** 0.5      # a guess at other widths
    share = max(1, round(c.total_batch_size / (c.block_size * world_size)))                  # sequences of a process
    c.batch_size = config.batch_size or max(n for n in range(1, min(share, c.batch_size) + 1) if share % n == 0)
    micro_step = c.batch_size * c.block_size * world_size
    nearest = max(1, round(c.total_batch_size / micro_step)) * micro_step
    c.total_batch_size = config.total_batch_size or nearest
    check(c, "total_batch_size", lambda x: x == nearest, f"a multiple of batch_size x block_size x processes = "
          f"{c.batch_size} x {c.block_size} x {world_size} = {micro_step}, the nearest is {nearest}")
    with torch.device("meta"):
        parameters = sum(map(torch.numel, GPT(c.model_config()).parameters()))
    c.max_steps = c.max_steps or math.ceil(20 * parameters / c.total_batch_size)
    c.eval_tokens = config.eval_tokens or min(c.eval_tokens, max(4096, c.max_steps * c.total_batch_size // 200))
    c.eval_interval = c.eval_interval or min(math.ceil(c.max_steps / 10), 500)      # ten take some 2% of the time
    c.checkpoint_interval = c.checkpoint_interval or max(100, c.eval_interval)
    c.pn_warmup = round(c.warmup_ratio * c.max_steps) if c.pn_warmup is None else c.pn_warmup
    return c

class Tokens:
    """One split of a corpus as one long sequence, cut into windows of `length` tokens, each followed by its target."""
    def __init__(self, folder, split, length, vocab_size):
        self.paths = sorted(Path(folder).glob(f"*_{split}_[0-9]*.bin"))
        self.shards = [read_shard(path) for path in self.paths]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])
        self.length, self.vocab_size, self.windows = length, vocab_size, (int(self.starts[-1]) - 1) // length
        expect(self.windows > 0, f"{folder}: {self.starts[-1]} {split} tokens, expected more than block_size={length}")

    def window(self, i):
        """Tokens i * length to (i + 1) * length, and one more, which may lie in the next shard."""
        start, stop = i * self.length, (i + 1) * self.length + 1
        first, last = np.searchsorted(self.starts, (start, stop - 1), side="right") - 1
        pieces = [self.shards[n][max(0, start - self.starts[n]):stop - self.starts[n]] for n in range(first, last + 1)]
        window = np.concatenate(pieces).astype(np.int64)
        expect(window.max() < self.vocab_size, f"{self.paths[first]}: token {window.max()} in {self.vocab_size} tokens")
        return window

    def batch(self, indices, device):
        """Windows -> inputs and targets, each (len(indices), length)."""
        rows = torch.from_numpy(np.stack([self.window(i) for i in indices]))
        rows = rows.pin_memory() if device.type == "cuda" else rows
        return tuple(x.to(device, non_blocking=True).contiguous() for x in (rows[:, :-1], rows[:, 1:]))

@functools.lru_cache(2)
def epoch_order(seed, epoch, windows):               # an epoch visits every window once
    return np.random.default_rng((seed, epoch)).permutation(windows)

def batches(tokens, step, config, machine):
    """This rank's micro-batches (x, y), each (batch_size, block_size), of a step: a function of (seed, step) alone."""
    per_step = config.total_batch_size // config.block_size
    places = (divmod(i, tokens.windows) for i in range(step * per_step, (step + 1) * per_step))
    mine = [epoch_order(config.seed, epoch, tokens.windows)[i] for epoch, i in places][machine.rank::machine.world_size]
    for i in range(0, len(mine), config.batch_size):
        yield tokens.batch(mine[i:i + config.batch_size], machine.device)

@torch.no_grad()
def evaluate(model, tokens, config, machine, token_bytes, asked=()):
    """Held-out loss in nats per token and bits per byte, over the same tokens whatever the ranks or the arch."""
    model.eval()
    count = max(1, min(tokens.windows, config.eval_tokens // config.block_size))
    total = torch.zeros(3, dtype=torch.float64)                                       # nats, tokens, bytes
    for i in range(machine.rank * config.batch_size, count, machine.world_size * config.batch_size):
        if asked:
            break
        x, y = tokens.batch(range(i, min(i + config.batch_size, count)), machine.device)
        with machine.autocast(), torch.compiler.set_stance("force_eager"):            # compiled for training only
            loss = model(x, y, loss_only=True)[1].item()
        total += torch.tensor([loss * y.numel(), y.numel(), token_bytes[y.cpu()].sum()], dtype=torch.float64)
    model.train()
    nats, n, size = machine.sum(total).tolist()
    return {"val_loss": nats / max(n, 1), "val_bpb": nats / math.log(2) / max(size, 1)}

@functools.cache
def matmul_flops(device, dtype):
    """Floating-point operations a second of a large square matrix product, the best of many."""
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return 2 * n ** 3 / min(timer.blocked_autorange(min_run_time=0.1).times)

class Machine:
    """This process's place among all (rank, world_size), its device, the dtype to compute in and the speed of that."""
    def __init__(self, device="auto", dtype="float32"):
        there = ["cuda"] * torch.cuda.is_available() + ["cpu"] + ["mps"] * torch.backends.mps.is_available()
        name = there[0] if device == "auto" else device
        choose("device", name, there)
        self.rank, self.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name == "cuda" else name)
        if name == "cuda":
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")                  # TF32
        elif sys.platform == "linux":                # malloc keeps freed memory: 20 to 40% of a CPU's step
            libc = ctypes.CDLL(None)
            libc.mallopt(-3, 2 ** 30) or libc.mallopt(-3, 2 ** 25)      # M_MMAP_THRESHOLD; old ones take 32 MB
            libc.mallopt(-1, 2 ** 31 - 1)                               # M_TRIM_THRESHOLD
        if self.world_size > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl" if name == "cuda" else "gloo")
        self.use(dtype)

    def use(self, dtype):
        if dtype == "auto":                          # bfloat16 where that is much faster
            half, single = (matmul_flops(self.device, x) for x in (torch.bfloat16, torch.float32))
            dtype = "float32" if self.any(half < 1.5 * single) else "bfloat16"        # all ranks agree
        self.dtype = getattr(torch, dtype)
        self.peak = matmul_flops(self.device, self.dtype)

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def sum(self, x):
        return all_reduce(x.to(self.device), "sum", torch.distributed.group.WORLD) if self.world_size > 1 else x

    def any(self, flag):
        return self.sum(torch.tensor(float(bool(flag)))).item() > 0

def make_optimizer(model, config):
    """AdamW over two groups: matrices and embeddings, which decay, and vectors and scalars, which do not."""
    groups = [dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=config.weight_decay),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]
    assert sum(len(group["params"]) for group in groups) == len({*model.parameters()})
    return torch.optim.AdamW(groups, config.learning_rate, (config.beta1, config.beta2), config.eps, fused=True)

def learning_rate(config, step):
    """A line up over the warm-up, then a cosine down to min_lr_ratio of the peak at the last step."""
    warmup = round(config.warmup_ratio * config.max_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, config.max_steps - 1 - warmup)
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)

def flops_per_token(model):
    """6 for each weight of a matrix product; in each layer 12 d for each position looked at, half of block_size."""
    used = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return 6 * (used + model.config.n_layer * model.config.n_embd * model.config.block_size)

def optimizer_step(step, forward, model, optimizer, pairs, config, machine):
    """A step on micro-batches `pairs`: (this rank's mean loss, norm of the gradient). Raises Diverged before it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    torch.manual_seed(config.seed + 1_000_003 * (1 + step * machine.world_size + machine.rank))    # dropout
    micro_steps = config.total_batch_size // (config.batch_size * config.block_size * machine.world_size)
    loss = 0.0
    for i, (x, y) in enumerate(pairs, 1):            # the next is read while a GPU computes
        forward.require_backward_grad_sync = i == micro_steps           # for DistributedDataParallel
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

class Diverged(Exception):
    exit_code = 3                                    # after a loss or gradient that is no longer finite

def save_checkpoint(path, model, optimizer, config, **state):
    """Replaces the file at path in one step: a crash leaves the old or the new one. Raises DataError."""
    with blame(f"{path}: cannot be written"), atomic(path) as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "config": asdict(config),
                    **state}, file)

def read_checkpoint(source, device="cpu"):
    """The dict that `save_checkpoint` wrote to a run's folder or a .pt file; of GPT-2 one like it. Raises DataError."""
    path = Path(source)
    if (path / "config.json").exists() or path.name.startswith("gpt2") and not path.exists():
        from lessons.gpt2 import read_gpt2
        return read_gpt2(source)
    path = path / "ckpt.pt" if path.suffix != ".pt" else path
    expect(path.is_file(), f"{path}: no such checkpoint; train.py writes one to its --out_dir")
    with blame(f"{path}: cannot be read as a checkpoint of train.py"):
        state = torch.load(path, map_location=device, weights_only=True)
        expect({"model", "config", "step", "tokenizer"} <= {*state}, f"{path}: expected a checkpoint of train.py")
        return state

def load_model(source, device="cpu"):
    """(model in eval mode, tokenizer, checkpoint dict) of what read_checkpoint reads. Raises DataError."""
    state, names = read_checkpoint(source, device), {f.name for f in fields(GPTConfig)}
    with blame(f"{source}: weights and config do not fit this model.py"):
        model = GPT(GPTConfig(**{k: v for k, v in state["config"].items() if k in names})).to(device)
        model.load_state_dict(state["model"])
    return model.eval(), get_tokenizer(state["tokenizer"]), state

def as_in(then, config, resumes, source):
    """config with a checkpoint's options, all of a resumed run's or the model's: those in `free` may be given anew."""
    names = {f.name for f in fields(TrainConfig if resumes else GPTConfig) if f.metadata["group"] != "machine"}
    then, free = {k: v for k, v in then.items() if k in names}, FREE if resumes else FREE | {"block_size"}
    given = {k: v for k in then if (v := getattr(config, k)) != getattr(TrainConfig, k)
             or k in free and v not in (None, "auto", TrainConfig.data)}
    other = [f"{k}={then[k]}, now {k}={v}" for k, v in given.items()
             if v != then[k] and (k not in free or k == "max_steps" and v < then[k])]
    expect(not other, f"{source}: made with {'; '.join(other)}")
    return replace(config, **then | given)

@contextlib.contextmanager
def interrupts():
    """Yields a list in which SIGINT and SIGTERM leave their time, so that a step can end and be saved."""
    asked = []
    def ask(number, frame):                          # `timeout` signals twice at once, torchrun again later
        if number == signal.SIGINT and asked and time.monotonic() > asked[0] + 0.2 and "RANK" not in os.environ:
            raise KeyboardInterrupt
        os.write(2, b"" if asked else b"\nStopping after this step; Ctrl-C again: at once, unsaved\n")
        asked.append(time.monotonic())
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        [signal.signal(*pair) for pair in before.items()]

def read_log(folder):
    """The records of folder/log.jsonl up to the first that cannot be read: the last line of a killed run may be cut."""
    records = []
    with contextlib.suppress(OSError, ValueError):
        records.extend(map(json.loads, Path(folder, "log.jsonl").open("rb")))
    return [r for r in records if isinstance(r, dict) and {"step", "tokens", "seconds"} <= r.keys()]

def report(records, config, say):
    """Writes the last record to log.jsonl, tells it, at validations or after ten seconds, and draws loss.png."""
    record, out = records[-1], Path(config.out_dir)
    validations = [r["seconds"] for r in records if "val_loss" in r]
    with (out / "log.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    left = int((config.max_steps - record["step"]) * config.total_batch_size / record.get("tokens_per_s", math.inf))
    line = f"step {record['step']}/{config.max_steps}   {left // 60}:{left % 60:02d} left"
    if "loss" in record:
        line += f"   loss {record['loss']:.3f}   {record['tokens_per_s']:,.0f} tokens/s"
    if "val_loss" in record:
        line += f"   held out: {record['val_loss']:.3f} nats/token, {record['val_bpb']:.3f} bits/byte"
        if record["step"] == config.max_steps or validations[-1] // 2 > validations[-2:][0] // 2:     # it takes 0.2 s
            axes = Figure(figsize=(8, 5), layout="constrained").subplots()
            for key, style in ("loss", dict(lw=1, label="training")), ("val_loss", dict(marker="o", label="held out")):
                axes.plot(*zip(*[(r["tokens"] / 1e6, r[key]) for r in records if key in r] or [(0, math.nan)]), **style)
            axes.set(xlabel="tokens (millions)", ylabel="loss (nats/token)", title=out.name)
            axes.legend()
            axes.figure.savefig(out / "loss.png", dpi=110)
    if "val_loss" in record or record["seconds"] // 10 > records[-2:][0]["seconds"] // 10:
        say(line)

def tell(text):
    with contextlib.suppress(BrokenPipeError):       # somebody's `| head` has read enough; the run goes on
        print(text, flush=True)

def train(config, watch=None, say=tell):
    """Runs what config (a TrainConfig) asks for; returns the log, the list of dicts that log.jsonl holds.
    watch(model, optimizer, step) is called at each validation; the dict that it returns joins the record. say=None is
    quiet. Raises ConfigError for options, DataError for files, Diverged when the loss is no longer finite."""
    machine, out = Machine(config.device), Path(config.out_dir)
    say = say if say and machine.rank == 0 else lambda text: None
    resumes = config.resume == "true" or config.resume == "auto" and (out / "ckpt.pt").exists()
    source = out / "ckpt.pt" if resumes or config.eval_only and not config.init_from else config.init_from
    if source:
        state = read_checkpoint(source)
        config = as_in(state["config"], config, resumes, source)
    if config.data == TrainConfig.data and not Path(config.data, "meta.json").exists() and machine.rank == 0:
        prepare()
    machine.any(False)                               # the others wait
    tokenizer = get_tokenizer(read_meta(config.data)["tokenizer"])
    then = state["tokenizer"] if source else tokenizer.name
    expect(then == tokenizer.name, f"{source}: made with tokenizer={then}, now {config.data} has {tokenizer.name}")
    config = resolve(config, tokenizer.n_vocab, machine.world_size)
    train_tokens, val_tokens = (Tokens(config.data, x, config.block_size, tokenizer.n_vocab) for x in ("train", "val"))
    token_bytes = torch.from_numpy(bytes_per_token(tokenizer))

    torch.manual_seed(config.seed)
    model = GPT(config.model_config()).to(machine.device)
    optimizer = make_optimizer(model, config)
    best, begun, before = math.inf, -1, 0.0
    if source:
        weights = {k: x[:config.block_size] if k == "wpe.weight" else x for k, x in state["model"].items()}
        with blame(f"{source}: does not fit"):
            model.load_state_dict(weights)
    machine.use(config.dtype)
    if config.eval_only:
        found = evaluate(model, val_tokens, config, machine, token_bytes)
        say(json.dumps({"weights": str(source), "step": state["step"], "data": config.data} | found))
        return [found]
    if resumes:
        optimizer.load_state_dict(state["optimizer"])
        best, begun, before, end = state["best_val_loss"], state["step"], state["seconds"], state["config"]["max_steps"]
        say(f"{out}: goes on after step {begun} of {end}, to {config.max_steps}, where the cosine ends")
    elif machine.rank == 0:
        if (out / "ckpt.pt").exists() or (out / "log.jsonl").exists():
            free = next(i for i in range(1, 10 ** 6) if not Path(f"{out}.{i}").exists())
            out.rename(f"{out}.{free}")
            say(f"{out}.{free}: the run that was there before")
        with blame(f"out_dir={out}: no folder that can be written to"):
            out.mkdir(parents=True, exist_ok=True)
    records = [record for record in read_log(out) if record["step"] <= begun]
    validated = {record["step"] for record in records if "val_loss" in record}    # not if a signal came in between
    if machine.rank == 0:
        (out / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    config.dtype, flops = str(machine.dtype).removeprefix("torch."), flops_per_token(model)
    if config.compile == "auto":                     # it saves a third of the time, and costs a quarter of a minute
        long = flops * config.max_steps * config.total_batch_size > 15 * machine.peak * machine.world_size
        able = machine.device.type == "cuda" or machine.device.type == "cpu" and shutil.which("g++")
        config.compile = "false" if machine.any(not (long and able)) else "true"
    torch.compiler.reset()                           # models of earlier calls would count towards its limit
    for block in model.blocks if config.compile == "true" else ():
        block.compile()
    forward = DistributedDataParallel(model, broadcast_buffers=False) if machine.world_size > 1 else model

    epochs = config.max_steps * config.total_batch_size / (train_tokens.windows * config.block_size)
    say(f"{out}: {config.arch}{f' from {source}' if source else ''}, {sum(map(torch.numel, model.parameters())):,} "
        f"parameters; {config.max_steps} steps of {config.total_batch_size:,} tokens, {epochs:.2g} epochs of "
        f"{config.data}; peak learning rate {config.learning_rate:.2g}, warm-up {config.warmup_ratio:.0%}; "
        f"{machine.device}, {config.dtype}, compile={config.compile}, {torch.get_num_threads()} threads")
    started, times = time.perf_counter() - before, []
    with interrupts() as asked:
        for step in range(max(begun, 0), config.max_steps + 1):    # step 0 is the model before it is trained
            record, last = {}, step == config.max_steps
            validates = (step % config.eval_interval == 0 or last) and step not in validated
            if step > max(begun, 0):
                start, pairs = time.perf_counter(), batches(train_tokens, step - 1, config, machine)
                loss, norm = optimizer_step(step - 1, forward, model, optimizer, pairs, config, machine)
                times.append(time.perf_counter() - start)
            if step > max(begun, 0) and (step % config.log_interval == 0 or validates):
                rate = config.total_batch_size / float(np.median(times[-config.log_interval:]))   # the first compiles
                record = dict(loss=machine.sum(loss).item() / machine.world_size, grad_norm=norm, tokens_per_s=rate,
                              lr=learning_rate(config, step - 1), mfu=rate * flops / machine.peak / machine.world_size)
                record |= {"memory_gb": gb} if (gb := torch.cuda.max_memory_allocated() / 1e9) else {}
            if validates:
                found = evaluate(model, val_tokens, config, machine, token_bytes, asked)
                if not machine.any(asked):
                    record |= found | (watch and watch(model, optimizer, step) or {})
                    best = min(best, found["val_loss"])
            here = dict(step=step, tokens=step * config.total_batch_size, seconds=time.perf_counter() - started)
            if record:
                records.append(here | record | ({} if step else {"config": asdict(config)}))
                if machine.rank == 0:
                    report(records, config, say)
            stops = machine.any(asked)
            for name, due in (("ckpt", step % config.checkpoint_interval == 0 or last or stops),
                              ("best", config.keep_best and best == record.get("val_loss"))):
                if due and machine.rank == 0:
                    save_checkpoint(out / f"{name}.pt", model, optimizer, config, **here, best_val_loss=best,
                                    tokenizer=tokenizer.name)
            if stops:
                break
    return records

def main(argv):
    config = parse(TrainConfig, argv, __doc__)
    train(config)
    if int(os.environ.get("RANK", 0)) > 0 or config.eval_only:
        return
    model, tokenizer, state = load_model(config.out_dir)
    if state["step"] < state["config"]["max_steps"]:
        print(f"\nStopped and saved at step {state['step']}. To go on: python train.py {' '.join(argv)} --resume=true")
    else:
        tokens = [t.item() for t in model.generate(torch.tensor([[tokenizer.eot_token]]), 400, temperature=0.8)]
        print(f"\n{config.out_dir} is written. A sample (more: sample.py --out_dir={config.out_dir}):\n\n"
              + tokenizer.decode([t for t in tokens if t < tokenizer.n_vocab]))

if __name__ == "__main__":
    run_script(main)
    if "RANK" in os.environ:                         # a thread of torch's that still runs would abort the usual way out
        os._exit(0)
