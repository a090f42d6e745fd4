"""
Does depth change the order? The six, twelve layers of width 96, two seeds, each at its recipe: hours on a laptop.

    python lessons/depth.py            # runs in out/depth, then assets/depth.json and depth.png; goes on when stopped

Beside the losses it keeps how long the vectors of the residual stream are in front of and behind each block, as anGPT's
Figure 1 does for 0.5B parameters.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
from matplotlib.figure import Figure

from bench import COLORS
from diagnose import diagnose
from prepare import prepare
from train import Tokens, TrainConfig, train

ARCHS = ["layernorm", "rmsnorm", "powernorm", "normformer", "ngpt", "angpt"]
SEEDS = [1337, 1338]
STEPS = 320
LAYERS = 12


def run(arch, seed):
    """The records of one run that have a validation."""
    config = TrainConfig(arch=arch, seed=seed, n_layer=LAYERS, n_embd=96, n_head=4, max_steps=STEPS, resume="auto",
                         eval_tokens=2 ** 15, eval_interval=STEPS // 8, out_dir=f"out/depth/{arch}-{seed}")
    batch = Tokens(config.data, "val", 256, 257).batch(range(8), torch.device("cpu"))
    return [record for record in train(config, watch=diagnose(batch)) if "val_loss" in record]


def measure(arch):
    """What is kept of an arch: a list a seed of losses and of norms, the seconds of all seeds."""
    logs = [run(arch, seed) for seed in SEEDS]
    return {"tokens": [record["tokens"] / 1e6 for record in logs[0]],
            "val_loss": [[record["val_loss"] for record in log] for log in logs],
            "residual_norm": [log[-1]["residual_norm"] for log in logs],
            "seconds": sum(log[-1]["seconds"] for log in logs)}


def draw_line(axes, x, ys, arch):
    """The mean of the seeds' ys and their range."""
    ys = torch.tensor(ys)                          # (seeds, points)
    axes.plot(x, ys.mean(0), color=COLORS[arch], marker="o", ms=3, label=arch)
    axes.fill_between(x, ys.amin(0), ys.amax(0), color=COLORS[arch], alpha=0.2, lw=0)


def draw(found, path):
    """Losses against tokens, and the norms of the residual stream against depth."""
    figure = Figure(figsize=(9, 4), dpi=200, layout="constrained")
    left, right = figure.subplots(1, 2)
    for arch, one in found.items():
        late = [losses[3:] for losses in one["val_loss"]]                         # before, all fall alike
        draw_line(left, one["tokens"][3:], late, arch)
        draw_line(right, range(LAYERS + 1), one["residual_norm"], arch)
    left.set(xlabel="tokens (millions)", ylabel="held-out loss (nats/token)")
    right.set(xlabel="blocks passed", ylabel="mean norm of the residual stream", yscale="log")
    right.set_xticks(range(0, LAYERS + 1, 2))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path)


if __name__ == "__main__":
    prepare()
    found = {}
    for arch in ARCHS:
        found[arch] = measure(arch)
        print(arch, *(f"{losses[-1]:.4f}" for losses in found[arch]["val_loss"]))
    Path("assets/depth.json").write_text(json.dumps(found))
    draw(found, "assets/depth.png")
