"""GPT-2's published weights, as HuggingFace keeps them, in this project's model: --init_from of train.py and sample.py.

    python sample.py --init_from=gpt2 --prompt="The capital of France is"
    python train.py --init_from=gpt2-medium --data=data/mine --learning_rate=3e-5
    python train.py --init_from=FOLDER --data=data/mine         # a folder with config.json and model.safetensors

GPT-2 is arch layernorm with learned positions, gelu, biases and one matrix for embedding and head.
"""
from pathlib import Path

from prepare import blame, expect, read_json

NAMES = {"transformer.": "", "h.": "blocks.", "ln_1": "norm1", "attn.c_attn": "w_qkv", "attn.c_proj": "w_o",
         "ln_2": "norm2", "mlp.c_fc": "w_up", "mlp.c_proj": "w_down", "ln_f": "norm_f"}

def read_gpt2(source):
    """A dict as train.read_checkpoint's, without an optimizer, of a folder, or of gpt2, gpt2-medium, gpt2-large or
    gpt2-xl, which are fetched. Raises DataError."""
    from safetensors.torch import load_file
    folder = Path(source)
    with blame(f"init_from={source}: expected GPT-2's config.json and model.safetensors"):
        if not folder.exists():
            from huggingface_hub import snapshot_download
            folder = Path(snapshot_download(f"openai-community/{source}",
                                            allow_patterns=["config.json", "model.safetensors"]))
        c, weights = read_json(folder / "config.json"), {}
        form = [c.get(name) for name in ("model_type", "activation_function", "layer_norm_epsilon")]
        expect(form == ["gpt2", "gelu_new", 1e-5], f"{folder}/config.json: expected GPT-2's form, found {form}")
        for name, x in load_file(folder / "model.safetensors").items():
            for theirs, ours in NAMES.items():
                name = name.replace(theirs, ours)
            if "attn." not in name and name != "lm_head.weight":           # causal masks; the same matrix as wte
                weights[name] = x.t() if ".w_" in name else x              # theirs are (in, out)
        weights["lm_head.weight"] = weights["wte.weight"]
        sizes = {name: c[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
        return {"model": weights, "step": 0, "tokenizer": "gpt2", "config": dict(
            sizes, arch="layernorm", block_size=c["n_positions"], pos="learned", mlp="gelu", bias=True, tie=True)}
