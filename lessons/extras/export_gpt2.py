"""A run in the form of GPT-2, for whatever reads HuggingFace's files: config.json and model.safetensors.

    python train.py --arch=layernorm --pos=learned --mlp=gelu --tie=true
    python lessons/extras/export_gpt2.py out/layernorm FOLDER
    python sample.py --init_from=FOLDER

A file of its own, as it reads checkpoints with train.py, which itself reads GPT-2's weights with gpt2.py.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lessons.extras.gpt2 import write_gpt2
from prepare import check, run_script
from train import load_model


def main(words):
    check(len(words) == 2, "expected two words, a run's folder and one to write to: out/layernorm FOLDER")
    source, folder = words
    model, tokenizer, _ = load_model(source)
    write_gpt2(model, tokenizer, folder)
    print(f"{folder}: config.json, model.safetensors")


if __name__ == "__main__":
    run_script(main)
