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

from bench import COLORS, draw_lines
from diagnose import diagnose
from prepare import prepare
from train import Tokens, TrainConfig, train

ARCHS = ["layernorm", "rmsnorm", "powernorm", "normformer", "ngpt", "angpt"]
SEEDS, STEPS, LAYERS = [1337, 1338], 320, 12


def run(arch, seed):
    """The log of one run."""
    config = TrainConfig(arch=arch, seed=seed, n_layer=LAYERS, n_embd=96, n_head=4, max_steps=STEPS, resume="auto",
                         eval_tokens=2 ** 15, eval_interval=STEPS // 8, out_dir=f"out/depth/{arch}-{seed}")
    return train(config, watch=diagnose(Tokens(config.data, "val", 256, 257).batch(range(8), torch.device("cpu"))))


def draw(found, path):
    """Losses against tokens, and the norms of the residual stream against depth."""
    figure = Figure(figsize=(9, 4), dpi=200, layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_lines(left, {arch: (f["tokens"][3:], [losses[3:] for losses in f["val_loss"]], COLORS[arch])
                      for arch, f in found.items()})
    left.set(xlabel="tokens (millions)", ylabel="held-out loss (nats/token)")
    right.set_yscale("log")
    draw_lines(right, {arch: (range(LAYERS + 1), f["residual_norm"], COLORS[arch]) for arch, f in found.items()})
    right.set(xlabel="blocks passed", ylabel="mean norm of the residual stream")
    right.set_xticks(range(0, LAYERS + 1, 2))
    figure.savefig(path)


if __name__ == "__main__":
    prepare()
    found = {}
    for arch in ARCHS:
        logs = [[r for r in run(arch, seed) if "val_loss" in r] for seed in SEEDS]
        found[arch] = {"tokens": [r["tokens"] / 1e6 for r in logs[0]],
                       "val_loss": [[r["val_loss"] for r in log] for log in logs],
                       "residual_norm": [log[-1]["residual_norm"] for log in logs],
                       "seconds": sum(log[-1]["seconds"] for log in logs)}
        print(arch, *(f"{losses[-1]:.4f}" for losses in found[arch]["val_loss"]))
    Path("assets/depth.json").write_text(json.dumps(found))
    draw(found, "assets/depth.png")
