"""
HellaSwag: how often the right one of four endings is the likeliest, by log-likelihood and by that per character.

    python lessons/extras/hellaswag.py --out_dir=out/angpt,out/ngpt      # runs, or gpt2, with commas between

Text and tokens are as in lm-evaluation-harness 0.4 (task hellaswag 1.0), which gives GPT-2 124M 0.2892 and 0.3114 (not
run here). Chance: 0.25; +-: a standard error. Rows of --file: ctx_a, ctx_b, activity_label, endings, label.
"""
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from train import find_device, load_model
from prepare import check, encode, explain_errors, parse_options, run_script

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm


@dataclass
class HellaswagConfig:
    """Options."""
    out_dir: str = "out/angpt"           # runs to score, or gpt2 and its like, with commas between
    file: str | None = None              # questions, a .jsonl (HellaSwag's validation set, fetched)
    batch_size: int = 4                  # questions at a time
    device: str = "auto"                 # auto: cuda if torch sees it, else cpu


def clean(text):
    """Without WikiHow's marks."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def rows_of(path):
    """HellaSwag's rows as dicts, its validation set if there is no path."""
    if path:
        with explain_errors(f"file={path}: HellaSwag's questions cannot be read"):
            return [json.loads(line) for line in Path(path).read_text().splitlines()]
    from datasets import load_dataset
    with explain_errors("Rowan/hellaswag: cannot be fetched; --file reads questions on this machine"):
        return list(load_dataset("Rowan/hellaswag", split="validation"))


def questions(path):
    """Of HellaSwag's rows (context, endings, index of the right one). Raises DataError."""
    found = []
    for number, row in enumerate(rows_of(path), 1):
        message = f"{path}, row {number}: expected ctx_a, ctx_b, activity_label, four endings, a label"
        with explain_errors(message):
            context = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
            endings = [clean(ending) for ending in row["endings"]]
            right = int(row["label"])
            check(len(endings) == 4 and all(endings) and 0 <= right < 4, message)
        found.append((context, endings, right))
    check(len(found) > 1, f"file={path}: {len(found)} questions, expected at least two")
    return found


@torch.no_grad()
def nats(model, tokenizer, pairs):
    """-log p(ending | context) of pairs (context, ending): (len(pairs),). Of what is too long the
    last part counts."""
    inputs, targets = [], []
    for context, ending in pairs:
        tokens = encode(tokenizer, f"{context} {ending}".encode(), new=False).astype(int)
        new = len(tokens) - len(encode(tokenizer, context.rstrip(" ").encode(), new=False))
        tokens = torch.from_numpy(tokens[-model.config.block_size - 1:])
        inputs.append(tokens[:-1])
        targets.append(tokens[1:].clone())
        targets[-1][:-new] = -1                          # the context's do not count
    device = next(model.parameters()).device
    x = pad_sequence(inputs, batch_first=True).to(device)
    y = pad_sequence(targets, batch_first=True, padding_value=-1).to(device)
    logits = model(x, y)[0].float().transpose(1, 2)      # (len(pairs), V, tokens)
    return F.cross_entropy(logits, y, ignore_index=-1, reduction="none").sum(1)


def score(model, tokenizer, rows, batch_size):
    """Whether each question's right ending is the likeliest, and the likeliest a character:
    (questions, 2)."""
    right = []
    for i in tqdm(range(0, len(rows), batch_size), disable=None):
        contexts, endings, labels = zip(*rows[i:i + batch_size])
        pairs = [(context, ending) for context, four in zip(contexts, endings) for ending in four]
        lengths = torch.tensor([len(ending) for _, ending in pairs])
        losses = nats(model, tokenizer, pairs).cpu()
        both = torch.stack((losses, losses / lengths)).view(2, -1, 4)
        right.append(both.argmin(2) == torch.tensor(labels))
    return torch.cat(right, dim=1).double().T


def main(argv):
    options = HellaswagConfig(**parse_options(argv, __doc__, HellaswagConfig))
    device = find_device(options.device)
    rows = questions(options.file)
    for source in options.out_dir.split(","):
        model, tokenizer, _ = load_model(source, device)
        right = score(model, tokenizer, rows, options.batch_size)
        by_nats, by_length = right.mean(0).tolist()
        error, length_error = (right.std(0) / len(rows) ** 0.5).tolist()
        print(f"{source}: accuracy {by_nats:.4f} +- {error:.4f}, "
              f"by length {by_length:.4f} +- {length_error:.4f}")


if __name__ == "__main__":
    run_script(main)
