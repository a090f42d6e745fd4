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
from typing import Annotated

from train import find_device, load_model  # before torch: it sets how torch's threads wait
import torch

from prepare import Count, Device, Limit, WholeNumber, blame, check, encode, parse, run_script

Temperature = Annotated[float, Limit(lambda x: x == 0 or 1e-3 <= x < math.inf, "0, or at least 0.001")]

@dataclass
class SampleConfig:
    """Options."""
    prompt: str = ""                # text to continue; FILE:path reads it from a file
    out_dir: str = "out/angpt"      # run to sample from; several with commas between
    init_from: str | None = None    # instead: a .pt file, or GPT-2 (lessons/gpt2.py)
    num_samples: Count = 1          # samples of each run
    max_new_tokens: Count = 500     # tokens at most
    temperature: Temperature = 0.8  # 0 takes the likeliest token; 1 samples as the model learnt
    top_k: Count | None = None      # sample among the k likeliest tokens (all)
    seed: WholeNumber = 1337        # of the sampling
    arch: str | None = None         # file.py:name, where a run's arch is of a file that has moved
    device: Device = "auto"         # auto: cuda if torch sees it, else cpu

    def __post_init__(self):
        check(self)

def stream(model, tokenizer, prompt="", max_new_tokens=500, temperature=0.8, top_k=None, seed=1337):
    """Yields the text that follows `prompt` (str or bytes), piece by piece, until end-of-text or max_new_tokens."""
    data = prompt.encode() if isinstance(prompt, str) else prompt
    device = next(model.parameters()).device
    ids = encode(tokenizer, data).astype("int64")     # end-of-text first
    idx = torch.from_numpy(ids)[None].to(device)      # (1, T)
    generator = torch.Generator(device).manual_seed(seed)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")         # a character may be cut by a token's end
    for token in model.generate(idx, max_new_tokens, temperature, top_k, generator):
        if token.item() == tokenizer.eot_token:
            break
        if token.item() < tokenizer.n_vocab:  # the vocabulary may be padded
            yield decoder.decode(tokenizer.decode_single_token_bytes(token.item()))
    yield decoder.decode(b"", final=True)

def write(model, tokenizer, prompt="", **options):
    """Prints prompt and continuation as they come."""
    print(prompt, end="", flush=True)
    for piece in stream(model, tokenizer, prompt, **options):
        print(piece, end="", flush=True)
    print()

def read_prompt(prompt):
    if not prompt.startswith("FILE:"):
        return prompt
    path = prompt.removeprefix("FILE:")
    with blame(f"{path}: cannot be read as text"):
        return Path(path).read_bytes().decode()

def main(argv):
    config = parse(SampleConfig, argv, __doc__)
    prompt = read_prompt(config.prompt)
    device = find_device(config.device)
    if config.init_from:
        folders = [config.init_from]
    elif Path(config.out_dir).exists():  # its name may hold a comma
        folders = [config.out_dir]
    else:
        folders = config.out_dir.split(",")
    for folder in folders:
        model, tokenizer, state = load_model(folder, device, config.arch)
        if len(folders) > 1:
            best = state.get("best_val_loss", math.inf)  # inf where it was never validated
            loss = f", best held-out loss {best:.3f}" if math.isfinite(best) else ""
            print(f"--- {folder}: {model.config.arch}, step {state['step']}{loss}")
        for i in range(config.num_samples):
            if i > 0:
                print("---")
            write(model, tokenizer, prompt, max_new_tokens=config.max_new_tokens, temperature=config.temperature,
                  top_k=config.top_k, seed=config.seed + i)

if __name__ == "__main__":
    run_script(main)
