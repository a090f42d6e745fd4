"""
Find out whether depth changes which arch learns most.

    python lessons/studies/depth.py    # writes assets/depth.json and assets/depth.png

Four archs train with twelve layers of width 48, five tokens per parameter and two seeds. This takes
40 minutes on a laptop, and the same command resumes it.

Each arch trains at the embed_std and the multiple of its built-in learning rate that a search found
for this depth, with width 64 and one token per parameter:

    python lessons/studies/race.py --n_layer=12 --n_embd=64 --n_head=4 --block_size=128 \
        --batch_size=16 --total_batch_size=2048 --compile=true --dtype=float32 \
        --tokens_per_parameter=1 --seeds=1 --results=assets/race_12x64.json \
        --archs=rmsnorm+qk_norm,ngpt,angpt,normformer

The file with its results comes from an earlier version. With --report=true this command shows them.

Besides the losses it records the length of the residual stream's vectors before and after each
block, as anGPT's Figure 1 does for 0.5B parameters.
"""
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from train import Tokens, TrainConfig, train
import torch
from matplotlib.figure import Figure

from bench import COLORS, label
from lessons.studies.diagnose import diagnose
from lessons.studies.race import at_best, read_race
from prepare import parse_options, prepare, run_script

SEARCH = read_race(ROOT / "assets/race_12x64.json")["runs"]
SEEDS = [1, 2]
LAYERS = 12
WIDTH = 48
STEPS = 1144  # of 2,048 tokens each, which makes five tokens per parameter of GPT+


def run(name, seed):
    """Train one run; return its records that have a validation loss."""
    arch = name.removesuffix("+qk_norm")
    # The runs of 401 steps in the search have one token per parameter.
    rate, std = map(float, at_best(SEARCH, name, 401, seeds=[1]).name)
    # The built-in learning rates depend on the width in this way.
    rate *= (64 / WIDTH) ** 0.5
    config = TrainConfig(
        arch=arch, qk_norm=name.endswith("+qk_norm"), seed=seed, n_layer=LAYERS, n_embd=WIDTH,
        n_head=4, block_size=128, batch_size=16, total_batch_size=2048, max_steps=STEPS,
        learning_rate=rate, embed_std=std, dtype="float32", resume="auto", eval_tokens=2 ** 17,
        eval_interval=STEPS // 8, out_dir=f"out/depth/{name}-{seed}")
    batch = Tokens(config.data, "val", 128).batch(range(16), torch.device("cpu"))
    return [record for record in train(config, watch=diagnose(batch)) if "val_loss" in record]


def measure(name):
    """Train an arch with all seeds; return a list per seed of losses and norms, and the seconds."""
    logs = [run(name, seed) for seed in SEEDS]
    return {"tokens": [record["tokens"] / 1e6 for record in logs[0]],
            "val_loss": [[record["val_loss"] for record in log] for log in logs],
            "residual_norm": [log[-1]["residual_norm"] for log in logs],
            "seconds": sum(log[-1]["seconds"] for log in logs)}


def draw_line(axes, x, ys, name):
    """Draw the mean of the seeds' ys and their range."""
    ys = torch.tensor(ys)                          # (seeds, points)
    axes.plot(x, ys.mean(0), color=COLORS[name], marker="o", ms=3, label=label(name))
    axes.fill_between(x, ys.amin(0), ys.amax(0), color=COLORS[name], alpha=0.2, lw=0)


def draw(found, path):
    """Draw losses against tokens, and the norms of the residual stream against depth."""
    figure = Figure(figsize=(9, 4), dpi=200, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, one in found.items():
        # The first three losses fall alike in all archs.
        late = [losses[3:] for losses in one["val_loss"]]
        draw_line(left, one["tokens"][3:], late, name)
        draw_line(right, range(LAYERS + 1), one["residual_norm"], name)
    left.set(xlabel="tokens (millions)", ylabel="validation loss (nats per token)")
    right.set(xlabel="blocks passed", ylabel="mean norm of the residual stream", yscale="log")
    right.set_xticks(range(0, LAYERS + 1, 2))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  title="mean and range of the seeds")
    figure.savefig(path)


def main(argv):
    # There are no options but --help.
    parse_options(argv, __doc__)
    prepare()
    found = {}
    for name in dict.fromkeys(row["arch"] for row in SEARCH):
        found[name] = measure(name)
        print(label(name), *(f"{losses[-1]:.4f}" for losses in found[name]["val_loss"]))
    Path("assets/depth.json").write_text(json.dumps(found))
    draw(found, "assets/depth.png")


if __name__ == "__main__":
    run_script(main)
