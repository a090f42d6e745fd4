"""
Write a run in the form of GPT-2 that HuggingFace uses: config.json and model.safetensors.

    python train.py --arch=layernorm --pos=learned --mlp=gelu --tie=true
    python lessons/extras/export_gpt2.py out/layernorm FOLDER
    python sample.py --init_from=FOLDER

This is not a part of gpt2.py, because it needs train.py, which itself imports gpt2.py.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lessons.extras.gpt2 import write_gpt2
from prepare import check, run_script
from train import load_model


def main(words):
    check(len(words) == 2,
          "expected two folders, that of a run and one to write to: out/layernorm FOLDER")
    source, folder = words
    model, tokenizer, _ = load_model(source)
    write_gpt2(model, tokenizer, folder)
    print(f"{folder}: config.json, model.safetensors")


if __name__ == "__main__":
    run_script(main)
