"""
Find out why two seeds of one arch differ: because of the initial weights, or the order of the data?

    export OMP_NUM_THREADS=1
    python lessons/studies/seeds.py run ngpt,angpt built-in 4x4   # all pairs of four and four seeds
    python lessons/studies/seeds.py run ngpt "half rate" 1-8      # weights 1, order 1; 2 and 2; ...

A run has one seed for the weights and another for the order. It has 0.23 million parameters and 20
tokens per parameter, and takes three minutes on one thread.

Archs train at the learning rate and embed_std that a search found best for seed 1
(assets/race_small.json), with the changes of a variant. Each run that ends becomes a line of
assets/seeds.jsonl. The same command resumes the study, and a second process beside it takes other
runs. A run also measures the mean of its weights over the last tenth of its steps.

A line has two losses: loss_all, of all validation tokens, and loss, of the first 262,144 of them.
The latter are easier. Races of earlier versions were validated on these.
"""
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
# train is imported before torch: it sets how torch's threads wait.
from train import (TrainConfig, batches, compile_model, make_model, make_optimizer, open_dataset,
                   optimizer_step, resolve, set_up_process)
import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout

from model import Scale

# Options that all runs share, unless a variant changes them.
POINT = dict(n_layer=3, n_embd=64, n_head=4, block_size=128, batch_size=16, total_batch_size=2048,
             compile="true", dtype="float32", max_steps=2246, device="cpu")
# The best learning rate and embed_std of each arch.
BEST = {"ngpt": (0.0113, 0.02), "angpt": (0.00566, 0.02), "rmsnorm+qk_norm": (0.00566, 0.02),
        "normformer": (0.0113, 1.0), "layernorm": (0.00566, 0.0007), "rmsnorm": (0.00566, 0.2),
        "powernorm": (0.00566, 0.1)}
RESULTS = ROOT / "assets/seeds.jsonl"
EVERY = 100            # steps between two points of a trajectory
USUAL = 2 ** 18        # validation tokens of `loss`, a third of all
EARLY = 2 ** 16        # validation tokens of the losses during a run, every 200 steps

# A variant changes options of train.py, or one of these:
#   rate                multiplies the learning rate by this factor
#   alpha, s_z, s_qk    set the initial value (init) of the learned scales of this name, and how
#                       they are stored (scale): Adam moves one by learning rate * init / scale
#   g                   sets the initial value of the gain of q and k
#   nudge               changes all weights by random relative amounts of this size
VARIANTS = {
    "built-in": {},
    "half rate": {"rate": 0.5},
    "warm-up 2%": {"warmup_ratio": 0.02},
    "warm-up 5%": {"warmup_ratio": 0.05},
    "warm-up 10%": {"warmup_ratio": 0.1},
    "warm-up 20%": {"warmup_ratio": 0.2},
    "clip 0.3": {"grad_clip": 0.3},
    "no clip": {"grad_clip": 0.0},
    "beta2 0.99": {"beta2": 0.99},
    "alpha 0.2/layers": {"alpha": {"init": 0.2 / 3}},
    "s_z slower": {"s_z": {"scale": 1.0}},
    "s_qk slower": {"s_qk": {"scale": 1.0}},
    "s_qk from 2": {"s_qk": {"init": 2.0}},
    # This is for angpt and GPT+. In the place of g, ngpt has s_qk^2 d_k^(1/2): 16 if s_qk is 2.
    "g from 16": {"g": 16.0},
    "nudged": {"nudge": 1e-5},
    # These have five tokens per parameter and the best learning rate for that length.
    "5 tokens": {"max_steps": 561, "rate": 2},
    "5 tokens warm-up 10%": {"max_steps": 561, "rate": 2, "warmup_ratio": 0.1},
    "0.64M": {"n_layer": 4, "n_embd": 96, "max_steps": 6250, "rate": (64 / 96) ** 0.5},
    "0.64M warm-up 10%": {"n_layer": 4, "n_embd": 96, "max_steps": 6250, "rate": (64 / 96) ** 0.5,
                          "warmup_ratio": 0.1},
}


def config_of(arch, variant):
    """Return a variant's TrainConfig, and a dict of its changes to the new model."""
    changes = dict(VARIANTS[variant])
    best_rate, std = BEST[arch]
    rate = best_rate * changes.pop("rate", 1)
    of_model = ("alpha", "s_z", "s_qk", "g", "nudge")
    starts = {name: changes.pop(name) for name in of_model if name in changes}
    name, _, switch = arch.partition("+")
    given = POINT | {"arch": name, "qk_norm": bool(switch), "learning_rate": rate, "embed_std": std}
    return TrainConfig(**given | changes), starts


@torch.no_grad()
def change_model(model, starts):
    """Apply a variant's changes to a new model."""
    for name, module in model.named_modules():
        kind = name.split(".")[-1].removesuffix("_a").removesuffix("_m")
        if isinstance(module, Scale) and kind in starts:
            for key, value in starts[kind].items():
                setattr(module, key, value)
            module.weight.fill_(module.scale)
    for name, p in model.named_parameters():
        if name.endswith(".g") and "g" in starts:
            p.fill_(starts["g"])
        p.mul_(1 + starts.get("nudge", 0) * torch.randn_like(p))


def train_run(arch, variant, weights, order, watch):
    """Train as train.py does, with two seeds; return the model.

    watch(step, loss, norm, model) is called before the first step and after each.
    """
    config, starts = config_of(arch, variant)
    process = set_up_process(config)
    dataset = open_dataset(config, process)
    config = resolve(config, dataset.vocab_size, process.world_size)
    config.seed = weights
    model = make_model(config, process.device)
    change_model(model, starts)
    config.seed = order
    optimizer = make_optimizer(model, config)
    compile_model(model, config, process)
    watch(0, None, None, model)
    for step in range(config.max_steps):
        micro_batches = batches(dataset.train, step, config, process)
        measured = optimizer_step(step, model, optimizer, micro_batches, config, process)
        watch(step + 1, measured["loss"].item(), measured["grad_norm"].item(), model)
    return model


@torch.no_grad()
def token_losses(model, validation, tokens):
    """Return the losses of the first validation tokens, in float64, and where a file begins."""
    losses, begins = [], []
    windows = min(validation.windows, tokens // validation.length)
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        for i in range(0, windows, 16):
            x, y = validation.batch(range(i, min(i + 16, windows)), torch.device("cpu"))
            logits = model(x, y)[0]
            losses.append(
                F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").double())
            # Token 256 is the end of a text. It stands in front of each file.
            begins.append(x.flatten() == 256)
    model.train()
    return torch.cat(losses).numpy(), torch.cat(begins).numpy()


def short(x):
    """Return a number with five digits."""
    return float(f"{x:.5g}")


class Watch:
    """Record a run's trajectory, and the mean of its weights over the last tenth of its steps."""

    def __init__(self, validation, last_step):
        self.validation, self.last_step = validation, last_step
        self.rows, self.early, self.since = defaultdict(list), [], []
        self.sums, self.count = None, 0
        spread = range(0, validation.windows, validation.windows // 16)
        x, y = validation.batch(spread, torch.device("cpu"))
        # In these sequences the second half can be copied from the first.
        self.twice = torch.cat((x[:, :64], x[:, :64]), dim=1)
        self.x, self.y = x, y

    def __call__(self, step, loss, norm, model):
        if step:
            self.since.append((loss, norm))
        if step and step % EVERY == 0:
            self.measure(step, model)
        if step and (step % 200 == 0 or step in (50, 100)):
            self.early.append([step, short(token_losses(model, self.validation, EARLY)[0].mean())])
        if step > 0.9 * self.last_step:
            values = [p.detach().double() for p in model.parameters()]
            self.sums = torch._foreach_add(self.sums, values) if self.sums else values
            self.count += 1

    @torch.no_grad()
    def measure(self, step, model):
        """Add a point to the trajectory."""
        losses, norms = np.array(self.since).T
        self.since = []
        found = {"step": step, "loss": losses.mean(), "worst": losses.max(),
                 "norm": np.median(norms), "largest_norm": norms.max(),
                 "clipped": (norms > 1).mean()}
        with torch.compiler.set_stance("force_eager"):
            found["largest_logit"] = model(self.x, self.y)[0].abs().max().item()
            logits = model(self.twice, self.twice)[0][:, 64:-1]
        found["copying"] = F.cross_entropy(
            logits.flatten(0, 1), self.twice[:, 65:].flatten()).item()
        for name, module in model.named_modules():
            if isinstance(module, Scale) and not name.endswith(("s_u", "s_v")):
                found[name.removeprefix("blocks.")] = module().abs().mean().item()
            elif isinstance(getattr(module, "g", None), torch.Tensor):
                found[name.removeprefix("blocks.") + ".g"] = module.g.item()
        for name, value in found.items():
            self.rows[name].append(short(value))

    @torch.no_grad()
    def average(self, model):
        """Replace the weights of a model by their means."""
        for p, total in zip(model.parameters(), self.sums):
            p.copy_(total / self.count)
        if model.sphere:
            model.project_()


def by_file(losses, begins):
    """Return [tokens, mean loss] for each validation file."""
    file = np.cumsum(begins)
    counts, sums = np.bincount(file), np.bincount(file, losses)
    return [[int(n), short(total / n)] for n, total in zip(counts, sums) if n]


def one_run(arch, variant, weights, order):
    """Train one run; return its row of the results, and save its weights in out/seeds."""
    started = time.perf_counter()
    config, _ = config_of(arch, variant)
    validation = open_dataset(config, set_up_process(config)).val
    watch = Watch(validation, config.max_steps)
    model = train_run(arch, variant, weights, order, watch)
    # There are fewer validation tokens than 10 * USUAL, so that this takes all of them.
    losses, begins = token_losses(model, validation, 10 * USUAL)
    name = "-".join(map(str, (arch, variant, weights, order))).replace("/", " by ")
    torch.save(model.state_dict(), ROOT / "out/seeds" / f"{name}.pt")
    watch.average(model)
    averaged, _ = token_losses(model, validation, USUAL)
    row = {"arch": arch, "variant": variant, "weights": weights, "order": order,
           "learning_rate": config.learning_rate, "embed_std": config.embed_std,
           "loss": losses[:USUAL].mean(), "loss_all": losses.mean(), "tokens_all": len(losses),
           "loss_averaged": averaged.mean(), "early": watch.early,
           "seconds": round(time.perf_counter() - started)}
    # The analysis reads the trajectories and files of these variants only.
    if variant in ("built-in", "warm-up 10%"):
        row |= {"files": by_file(losses, begins), "path": watch.rows}
    return row


def read():
    """Return the rows of all runs that have ended."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def key(row):
    """Return what identifies a row's run."""
    return row["arch"], row["variant"], row["weights"], row["order"]


def pairs_of(text):
    """Return a list of pairs of seeds (weights, order).

    "4x4" gives all pairs of four and four, "1-8" the same seed for both, and "2/3,3/2" two pairs.
    """
    if "/" in text:
        return [tuple(map(int, pair.split("/"))) for pair in text.split(",")]
    if "x" in text:
        n = int(text.split("x")[0])
        # The pairs (1, 1), (2, 2), ... come first.
        return [(w + 1, (w + shift) % n + 1) for shift in range(n) for w in range(n)]
    first, last = map(int, text.split("-"))
    return [(seed, seed) for seed in range(first, last + 1)]


def run(archs, variants, seeds):
    """Make all these runs, except those that have ended or that another process is making."""
    torch.set_num_threads(1)
    folder = ROOT / "out/seeds"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(arch, variant, *pair) for pair in pairs_of(seeds) for variant in variants.split(",")
              for arch in archs.split(",")]
    for one in wanted:
        lock = FileLock(folder / f"{'-'.join(map(str, one)).replace('/', ' by ')}.lock")
        try:
            with lock.acquire(blocking=False):
                if one in map(key, read()):
                    continue
                row = one_run(*one)
                with open(RESULTS, "a") as file:
                    file.write(json.dumps(row) + "\n")
        except Timeout:
            continue
        print(*one, f"{row['loss_all']:.4f} over all validation tokens, {row['seconds']} s",
              flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    if len(sys.argv) == 5 and sys.argv[1] == "run":
        run(*sys.argv[2:])
    else:
        print(__doc__)
