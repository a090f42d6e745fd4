"""
What the norms of today are worth at this size: all of lessons/extras/variants.py beside the six, 5 tokens a parameter.

    python lessons/studies/race_variants.py    # hours on one core, into assets/race_variants.json; goes on when stopped

Complete runs of 0.23M parameters, as in assets/race_small.json, with seed 1 at once and twice the recipe's rate, and at
half of it where twice is no better than once; then the best of these with seed 2. One thread a run.
"""
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import torch

from bench import train_config, train_once
from lessons.extras import variants  # registers them
from model import ARCHS
from prepare import atomic

RESULTS = ROOT / "assets" / "race_variants.json"
OPTIONS = dict(n_layer=3, n_embd=64, n_head=4, block_size=128, batch_size=16, total_batch_size=2048, max_steps=561,
               dtype="float32", compile="true", eval_tokens=2 ** 18)
# An arch, and behind it an embed_std that is not its recipe's: without a norm small tokens stay small
NAMES = ["rmsnorm+qk_norm", *ARCHS, "dyt embed_std=1", "derf embed_std=1"]


class Runs:
    """Those that have ended: (name, times the recipe's rate, seed) -> loss, None where it diverged."""
    def __init__(self):
        self.rows = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []

    def loss(self, name, times, seed=1):
        for row in self.rows:
            if (row["arch"], row["times"], row["seed"]) == (name, times, seed):
                return row["loss"] or float("inf")

    def make(self, name, times, seed=1):
        if self.loss(name, times, seed) is not None:
            return
        arch, _, embed_std = name.partition(" embed_std=")
        options = OPTIONS | ({"embed_std": float(embed_std)} if embed_std else {})
        rate = float(f"{times * train_config(arch, options).learning_rate:.3g}")
        config = train_config(arch, options, seed=seed, learning_rate=rate)
        loss, seconds = train_once(config.given)
        print(f"{name}, {times} times the recipe's rate, seed {seed}: {loss}, {seconds} s", flush=True)
        self.rows.append({"arch": name, "times": times, "learning_rate": rate, "embed_std": config.embed_std,
                          "seed": seed, "loss": loss, "seconds": seconds})
        rows = ",\n".join(json.dumps(row) for row in self.rows)
        head = f'"options": {json.dumps(OPTIONS)},\n"torch": "{torch.__version__}"'
        with atomic(RESULTS) as file:
            file.write(f'{{{head},\n"runs": [\n{rows}]}}\n'.encode())


def main():
    torch.set_num_threads(1)
    runs = Runs()
    for times in (2, 1):
        for name in NAMES:
            runs.make(name, times)
    for name in NAMES:
        if runs.loss(name, 1) <= runs.loss(name, 2):
            runs.make(name, 0.5)
    for name in NAMES:
        tried = [times for times in (0.5, 1, 2) if runs.loss(name, times) is not None]
        runs.make(name, min(tried, key=lambda times: runs.loss(name, times)), seed=2)


if __name__ == "__main__":
    main()
