"""
Text from checkpoints.

    python sample.py                                              # out/angpt, from nothing
    python sample.py --out_dir=out/ngpt --prompt="def "
    python sample.py --init_from=gpt2 --prompt="The capital of France is"
    python sample.py --out_dir=out/ngpt,out/angpt --prompt="$(cat story.txt)" --temperature=0.7
"""
import codecs
from dataclasses import dataclass
from typing import Literal

from train import find_device, load_model  # before torch: it sets how torch's threads wait
import torch

from prepare import check_at_least, encode, parse_options, run_script

@dataclass
class SampleConfig:
    """Options."""
    prompt: str = ""              # text to continue
    out_dir: str = "out/angpt"    # run to sample from; several with commas between
    init_from: str | None = None  # instead: a .pt file, or GPT-2 (lessons/extras/gpt2.py)
    num_samples: int = 1          # samples of each run
    max_new_tokens: int = 500     # tokens at most
    temperature: float = 0.8      # 0 takes the likeliest token; 1 samples as the model learnt
    top_k: int | None = None      # sample among the k likeliest tokens (all)
    seed: int = 1337              # of the sampling
    arch: str | None = None       # file.py:name, of a run whose arch is a file's
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if torch sees it, else cpu

    def __post_init__(self):
        check_at_least(1, self, "num_samples", "max_new_tokens", "top_k")
        check_at_least(0, self, "temperature", "seed")

def stream(model, tokenizer, prompt="", max_new_tokens=500, temperature=0.8, top_k=None, seed=1337):
    """Yields the text that follows `prompt`, piece by piece, until end-of-text or
    max_new_tokens."""
    device = next(model.parameters()).device
    ids = encode(tokenizer, prompt.encode()).astype("int64")  # end-of-text first
    idx = torch.from_numpy(ids)[None].to(device)      # (1, T)
    generator = torch.Generator(device).manual_seed(seed)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end in a character
    for token in model.generate(idx, max_new_tokens, temperature, top_k, generator):
        if token.item() == tokenizer.eot_token:
            break
        if token.item() < tokenizer.n_vocab:          # the vocabulary may be padded
            yield decoder.decode(tokenizer.decode_single_token_bytes(token.item()))
    yield decoder.decode(b"", final=True)

def write(model, tokenizer, prompt="", **options):
    """Prints prompt and continuation as they come."""
    print(prompt, end="", flush=True)
    for piece in stream(model, tokenizer, prompt, **options):
        print(piece, end="", flush=True)
    print()

def main(argv):
    config = SampleConfig(**parse_options(argv, __doc__, SampleConfig))
    device = find_device(config.device)
    folders = [config.init_from] if config.init_from else config.out_dir.split(",")
    for folder in folders:
        model, tokenizer, state = load_model(folder, device, config.arch)
        for seed in range(config.seed, config.seed + config.num_samples):
            if len(folders) * config.num_samples > 1:
                print(f"--- {folder}, step {state['step']}, seed {seed}")
            write(model, tokenizer, config.prompt, max_new_tokens=config.max_new_tokens,
                  temperature=config.temperature, top_k=config.top_k, seed=seed)

if __name__ == "__main__":
    run_script(main)
