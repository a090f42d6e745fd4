"""
Print text that trained models write.

    python sample.py                                              # out/angpt, without a prompt
    python sample.py --out_dir=out/ngpt --prompt="def "
    python sample.py --init_from=gpt2 --prompt="The capital of France is"
    python sample.py --out_dir=out/ngpt,out/angpt --prompt="$(cat story.txt)" --temperature=0.7
"""
import codecs
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Import train before torch, because train.py sets environment variables that torch reads.
from train import find_device, load_model
import torch

from model import ConfigError
from prepare import check_at_least, encode, parse_options, run_script


# ---- Options -------------------------------------------------------------------------------------

@dataclass
class SampleConfig:
    """Options of sample.py."""
    # Model
    out_dir: str = "out/angpt"    # folder of a run, or several with commas between them
    init_from: str | None = None  # instead of out_dir: a .pt file, gpt2, or a folder of GPT-2 files
    arch: str | None = None       # FILE.py:NAME, if your own file defines the run's arch
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if there is one, else cpu

    # Text
    prompt: str = ""              # text to continue
    num_samples: int = 1          # samples per run
    max_new_tokens: int = 500     # maximum number of tokens per sample
    temperature: float = 0.8      # 0: the likeliest token; 1: the model's own probabilities
    top_k: int | None = None      # sample among the k likeliest tokens (no limit)
    seed: int = 1337              # seed of the first sample

    def __post_init__(self):
        check_at_least(1, self, "num_samples", "max_new_tokens", "top_k")
        check_at_least(0, self, "temperature", "seed")
        # Dividing by a smaller temperature could make the logits infinite.
        if 0 < self.temperature < 1e-3:
            raise ConfigError(f"temperature={self.temperature}: expected 0, or at least 0.001")
        if self.seed + self.num_samples > 2 ** 63:
            raise ConfigError(f"seed={self.seed}: expected less than 2**63, also for the seed of "
                              "the last sample, seed + num_samples - 1")


# ---- Sampling ------------------------------------------------------------------------------------

def stream(model, tokenizer, prompt="", max_new_tokens=500, temperature=0.8, top_k=None, seed=1337):
    """Yield the text that follows a prompt as it is sampled, until an end-of-text token."""
    device = next(model.parameters()).device
    # A shell with a wrong encoding may pass characters that UTF-8 cannot encode. They become
    # question marks.
    ids = encode(tokenizer, prompt.encode(errors="replace")).astype("int64")
    idx = torch.from_numpy(ids)[None].to(device)         # (1, T); the first token is end-of-text
    generator = torch.Generator(device).manual_seed(seed)

    # A token may end in the middle of a character. The decoder keeps the first bytes of such a
    # character until the next token brings the rest.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in model.generate(idx, max_new_tokens, temperature, top_k, generator):
        number = token.item()
        if number == tokenizer.eot_token:
            break
        # A padded vocabulary has ids that stand for no text. Skip them.
        if number < tokenizer.n_vocab:
            yield decoder.decode(tokenizer.decode_single_token_bytes(number))
    yield decoder.decode(b"", final=True)


def write(model, tokenizer, prompt="", **options):
    """Print a prompt, and then the text that follows, token by token."""
    print(prompt, end="", flush=True)
    for text in stream(model, tokenizer, prompt, **options):
        print(text, end="", flush=True)
    print()


def main(argv):
    """Print samples of every run."""
    config = SampleConfig(**parse_options(argv, __doc__, SampleConfig))
    device = find_device(config.device)
    if config.init_from:
        folders = [config.init_from]
    elif Path(config.out_dir).exists():
        folders = [config.out_dir]  # its name may contain a comma
    else:
        folders = [os.path.expanduser(folder.strip()) for folder in config.out_dir.split(",")]
    for folder in folders:
        model, tokenizer, checkpoint = load_model(folder, device, config.arch)
        for seed in range(config.seed, config.seed + config.num_samples):
            if len(folders) * config.num_samples > 1:
                print(f"--- {folder}, step {checkpoint['step']}, seed {seed}")
            write(model, tokenizer, config.prompt, max_new_tokens=config.max_new_tokens,
                  temperature=config.temperature, top_k=config.top_k, seed=seed)


if __name__ == "__main__":
    run_script(main)
