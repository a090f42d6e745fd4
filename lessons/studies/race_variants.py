"""
Find out what today's norms are worth at a small size: race lessons/extras/variants.py and the six.

    python lessons/studies/race_variants.py    # takes hours on one core; the same command resumes

The runs have 0.23M parameters and 5 tokens per parameter, as in assets/race_small.json. Each arch
runs with seed 1 at its recipe's learning rate and at twice that, and also at half of it if twice
was no better. The best of these is repeated with seed 2. A run takes one thread. The results go to
assets/race_variants.json. The file that is there comes from an earlier version, which validated on
other tokens and did not have ngpt_by_depth. Move it away to start again.
"""
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench import train_config
from lessons.studies.race import train_once
import torch

from lessons.extras import variants  # puts them into ARCHS
from model import ARCHS
from prepare import atomic_write, check, parse_options, run_script

RESULTS = ROOT / "assets" / "race_variants.json"
OPTIONS = dict(n_layer=3, n_embd=64, n_head=4, block_size=128, batch_size=16, total_batch_size=2048,
               max_steps=561, dtype="float32", compile="true",
               final_eval_tokens=10 ** 9)  # more than there are: all validation tokens
# dyt and derf also run at a larger embed_std than their recipe's, because they do not normalize and
# small embeddings would stay small.
NAMES = ["rmsnorm+qk_norm", *ARCHS, "dyt embed_std=1", "derf embed_std=1"]


class Runs:
    """The runs that have ended.

    The arch's name, the multiple of its recipe's learning rate, and the seed identify a run.
    """

    def __init__(self):
        saved = {"options": OPTIONS, "runs": []}
        if RESULTS.exists():
            saved = json.loads(RESULTS.read_text())
        self.rows = saved["runs"]
        self.options = saved["options"]

    def loss(self, name, times, seed=1):
        """Return the loss of a run: inf if it diverged, None if it has not ended."""
        for row in self.rows:
            if (row["arch"], row["times"], row["seed"]) == (name, times, seed):
                return row["loss"] or float("inf")

    def make(self, name, times, seed=1):
        """Train a run that has not ended yet and add it to the results."""
        if self.loss(name, times, seed) is not None:
            return
        # Earlier versions validated on the first 262,144 tokens, which are easier than the rest.
        check(self.options == OPTIONS, f"{RESULTS}: made with other options ({self.options}); "
              "move it away to start again")
        arch, _, embed_std = name.partition(" embed_std=")
        options = OPTIONS | ({"embed_std": float(embed_std)} if embed_std else {})
        rate = float(f"{times * train_config(arch, options).learning_rate:.3g}")
        config = train_config(arch, options, seed=seed, learning_rate=rate)
        loss, seconds = train_once(config.options)
        print(f"{name}, {times} times the recipe's learning rate, seed {seed}: {loss}, {seconds} s",
              flush=True)
        self.rows.append({"arch": name, "times": times, "learning_rate": rate,
                          "embed_std": config.embed_std, "seed": seed, "loss": loss,
                          "seconds": seconds})
        rows = ",\n".join(json.dumps(row) for row in self.rows)
        head = f'"options": {json.dumps(OPTIONS)},\n"torch": "{torch.__version__}"'
        with atomic_write(RESULTS) as file:
            file.write(f'{{{head},\n"runs": [\n{rows}]}}\n'.encode())


def main(argv):
    # There are no options but --help.
    parse_options(argv, __doc__)
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
    run_script(main)
