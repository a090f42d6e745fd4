"""
Score models on HellaSwag: how often is the right one of four endings the likeliest?

    python lessons/extras/hellaswag.py --out_dir=out/angpt,out/ngpt

Two accuracies are printed, each with its standard error: by the log-likelihood of an ending, and by
its log-likelihood per character. Guessing gives 0.25.

Texts and tokens are made as in lm-evaluation-harness 0.4 (task hellaswag 1.0). For GPT-2 124M it
reports 0.2892 and 0.3114; we have not repeated this. Each line of --file is a JSON object with
ctx_a, ctx_b, activity_label, endings and label.
"""
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from train import find_device, load_model
from prepare import check, check_at_least, encode, explain_errors, parse_options, run_script

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm


@dataclass
class HellaswagConfig:
    """Options of hellaswag.py."""
    out_dir: str = "out/angpt"  # runs to score, or names like gpt2, with commas between them
    file: str | None = None     # .jsonl file of questions (HellaSwag's validation set, downloaded)
    batch_size: int = 4         # questions at a time
    arch: str | None = None     # FILE.py:NAME, if your own file defines the runs' arch
    device: str = "auto"        # auto: cuda if there is one, else cpu

    def __post_init__(self):
        check_at_least(1, self, "batch_size")


def clean(text):
    """Return the text without WikiHow's marks, such as [step]; " [title]" becomes ". "."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def rows_of(path):
    """Return the rows of a .jsonl file as dicts, or HellaSwag's validation set without a path."""
    if path:
        with explain_errors(f"file={path}: HellaSwag's questions cannot be read"):
            lines = Path(path).read_bytes().splitlines()
            return [json.loads(line) for line in lines if line.strip()]
    from datasets import load_dataset
    message = "Rowan/hellaswag: cannot be downloaded; --file reads questions on this machine"
    with explain_errors(message):
        return list(load_dataset("Rowan/hellaswag", split="validation"))


def questions(path):
    """Return a list of (context, endings, index of the right ending). Raises DataError."""
    found = []
    for number, row in enumerate(rows_of(path), 1):
        message = (f"{path}, row {number}: expected ctx_a, ctx_b, activity_label, four endings, "
                   "a label")
        with explain_errors(message):
            context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
            context = clean(context)
            endings = [clean(ending) for ending in row["endings"]]
            right = int(row["label"])
            check(len(endings) == 4 and all(endings) and 0 <= right < 4, message)
        found.append((context, endings, right))
    check(len(found) > 1, f"file={path}: {len(found)} questions, expected at least two")
    return found


@torch.no_grad()
def nats(model, tokenizer, pairs):
    """Return -log p(ending | context) for pairs (context, ending), as a tensor (len(pairs),).

    A pair that is longer than the model's block_size loses its first tokens.
    """
    inputs, targets = [], []
    for context, ending in pairs:
        # The ending's tokens are those that it adds to the context's. The first of them includes
        # the space. (With new=False, encode() puts no end-of-text token in front.)
        tokens = encode(tokenizer, f"{context} {ending}".encode(), new=False).astype(int)
        context_tokens = encode(tokenizer, context.rstrip(" ").encode(), new=False)
        ending_length = len(tokens) - len(context_tokens)
        tokens = torch.from_numpy(tokens[-model.config.block_size - 1:])
        inputs.append(tokens[:-1])
        # Clone the targets, because they are changed below, and the inputs share their memory.
        targets.append(tokens[1:].clone())
        # The loss leaves out targets of -1: the context's tokens, and the padding below.
        targets[-1][:-ending_length] = -1

    device = next(model.parameters()).device
    x = pad_sequence(inputs, batch_first=True).to(device)
    y = pad_sequence(targets, batch_first=True, padding_value=-1).to(device)
    logits = model(x, y)[0].float().transpose(1, 2)  # (len(pairs), V, tokens)
    return F.cross_entropy(logits, y, ignore_index=-1, reduction="none").sum(1)


def score(model, tokenizer, rows, batch_size):
    """Return 1 where the right ending is the likeliest, else 0, in float64: (questions, 2).

    The second column compares the likelihood per character.
    """
    right = []
    for i in tqdm(range(0, len(rows), batch_size), disable=None):
        contexts, endings, labels = zip(*rows[i:i + batch_size])
        pairs = [(context, ending) for context, four in zip(contexts, endings) for ending in four]
        lengths = torch.tensor([len(ending) for _, ending in pairs])
        losses = nats(model, tokenizer, pairs).cpu()  # four per question
        both = torch.stack((losses, losses / lengths)).view(2, -1, 4)  # (2, questions, 4)
        right.append(both.argmin(2) == torch.tensor(labels))
    return torch.cat(right, dim=1).double().T


def main(argv):
    options = HellaswagConfig(**parse_options(argv, __doc__, HellaswagConfig))
    device = find_device(options.device)
    rows = questions(options.file)
    for source in options.out_dir.split(","):
        model, tokenizer, _ = load_model(source, device, options.arch)
        right = score(model, tokenizer, rows, options.batch_size)
        by_nats, by_length = right.mean(0).tolist()
        error, length_error = (right.std(0) / len(rows) ** 0.5).tolist()
        print(f"{source}: accuracy {by_nats:.4f} +- {error:.4f}, "
              f"by length {by_length:.4f} +- {length_error:.4f}")


if __name__ == "__main__":
    run_script(main)
