"""
Text from checkpoints.

    python sample.py                                              # out/angpt, from nothing
    python sample.py --out_dir=out/ngpt --prompt="def "
    python sample.py --init_from=gpt2 --prompt="The capital of France is"
    python sample.py --out_dir=out/ngpt,out/angpt --prompt=FILE:story.txt --num_samples=3 --temperature=0.7 --top_k=50
"""
import codecs
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from model import option
from prepare import blame, check, encode, parse, run_script
from train import Machine, load_model

@dataclass
class SampleConfig:
    out_dir: str = option("out/angpt", "run to sample from; several with commas between", "options")
    init_from: str | None = option(None, "instead: a .pt file, or GPT-2 (lessons/gpt2.py)", "options")
    prompt: str = option("", "text to continue; FILE:path reads it from a file", "options")
    num_samples: int = option(1, "samples of each run", "options")
    max_new_tokens: int = option(500, "tokens at most", "options")
    temperature: float = option(0.8, "0 takes the likeliest token; 1 samples as the model learnt", "options")
    top_k: int | None = option(None, "sample among the k likeliest tokens (all)", "options")
    seed: int = option(1337, "of the sampling", "options")
    device: str = option("auto", "auto | cpu | cuda | mps", "options")

    def __post_init__(self):
        check(self, "num_samples max_new_tokens top_k", lambda x: x >= 1, "at least 1")
        check(self, "temperature", lambda x: x == 0 or 1e-3 <= x < math.inf, "0, or at least 0.001")
        check(self, "seed", lambda x: 0 <= x < 2 ** 32, "at least 0, below 2 ** 32")

def stream(model, tokenizer, prompt="", max_new_tokens=500, temperature=0.8, top_k=None, seed=1337):
    """Yields the text that follows `prompt` (str or bytes), piece by piece, until end-of-text or max_new_tokens."""
    data = prompt.encode() if isinstance(prompt, str) else prompt
    device = next(model.parameters()).device
    idx = torch.from_numpy(encode(tokenizer, data).astype("int64"))[None].to(device)      # (1, T), end-of-text first
    generator = torch.Generator(device).manual_seed(seed)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")         # a character may be cut by a token's end
    for token in model.generate(idx, max_new_tokens, temperature, top_k, generator):
        if token.item() == tokenizer.eot_token:
            break
        if token.item() < tokenizer.n_vocab:                           # the vocabulary may be padded
            yield decoder.decode(tokenizer.decode_single_token_bytes(token.item()))
    yield decoder.decode(b"", final=True)

def write(model, tokenizer, prompt="", **options):
    """Prints prompt and continuation as they come."""
    print(prompt, end="", flush=True)
    for piece in stream(model, tokenizer, prompt, **options):
        print(piece, end="", flush=True)
    print()

def main(argv):
    config = parse(SampleConfig, argv, __doc__)
    prompt, device = config.prompt, Machine(config.device).device
    if prompt.startswith("FILE:"):
        with blame(f"{prompt[5:]}: cannot be read as text"):
            prompt = Path(prompt[5:]).read_bytes().decode()
    folders = [config.out_dir] if Path(config.out_dir).exists() else config.out_dir.split(",")
    folders = [config.init_from] if config.init_from else folders
    for folder in folders:
        model, tokenizer, state = load_model(folder, device)
        if len(folders) > 1:
            best = state.get("best_val_loss", math.inf)                # inf where it was never validated
            told = f", best held-out loss {best:.3f}" * math.isfinite(best)
            print(f"--- {folder}: {model.config.arch}, step {state['step']}{told}")
        for i in range(config.num_samples):
            print("---\n" * (i > 0), end="")
            write(model, tokenizer, prompt, max_new_tokens=config.max_new_tokens, temperature=config.temperature,
                  top_k=config.top_k, seed=config.seed + i)

if __name__ == "__main__":
    run_script(main)
