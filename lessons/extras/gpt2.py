"""
Read GPT-2's published weights from HuggingFace's files, and write a model as such files.

train.py and sample.py read them with --init_from:

    python sample.py --init_from=gpt2 --prompt="The capital of France is"
    python train.py --init_from=gpt2-medium --data=data/mine --learning_rate=3e-5
    python train.py --init_from=FOLDER --data=data/mine

FOLDER has HuggingFace's config.json and model.safetensors. GPT-2 is arch=layernorm with learned
positions, GELU, biases, and one matrix for both embedding and head. export_gpt2.py writes a run
from the command line.
"""
from pathlib import Path

import torch

from prepare import check, did_you_mean, explain_errors, read_json, write_json

PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
# HuggingFace's names of the weights, and ours.
NAMES = {
    "h.": "blocks.",
    "ln_1": "norm1",
    "attn.c_attn": "w_qkv",
    "attn.c_proj": "w_o",
    "ln_2": "norm2",
    "mlp.c_fc": "w_up",
    "mlp.c_proj": "w_down",
    "ln_f": "norm_f",
}

# The entries of HuggingFace's config.json that decide what GPT-2 computes. An entry that is missing
# counts as the value given here. n_inner also matters, but depends on n_embd: read_gpt2 checks it.
THEIRS = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
# The options with which our GPT computes what GPT-2 does.
OURS = {"arch": "layernorm", "pos": "learned", "mlp": "gelu", "tie": True, "qk_norm": False}


def read_gpt2(source):
    """Return GPT-2's weights and config like a run's checkpoint, but without Adam's moments.

    `source` is a folder, or one of the PUBLISHED names, which is downloaded. Raises DataError.
    """
    folder = Path(source)
    is_known = str(source) in PUBLISHED or (folder / "config.json").exists()
    # The source may be a run that train.py has moved to <source>.1, a misspelled name, or what
    # nanoGPT's users write.
    runs = [str(path.parent) for path in Path("out").glob("*/ckpt.pt")]
    moved = [run for run in runs if run.startswith(f"{source}.")]
    hint = did_you_mean(source, runs)
    if moved:
        hint = f"; did you mean {' or '.join(sorted(moved))}?"
    elif source == "resume":
        hint = "; to resume a run, set --resume=true instead"
    elif source == "scratch":
        hint = "; without --init_from a run starts from random weights"
    check(is_known, f"{source}: no such checkpoint; expected a run's folder, a .pt file, "
          f"{', '.join(PUBLISHED)}, or a folder with the config.json of GPT-2{hint}")
    from safetensors.torch import load_file

    with explain_errors(f"init_from={source}: expected GPT-2's config.json and model.safetensors"):
        if not folder.exists():
            from huggingface_hub import snapshot_download
            files = ["config.json", "model.safetensors"]
            folder = Path(snapshot_download(f"openai-community/{source}", allow_patterns=files))

        c = read_json(folder / "config.json")
        for name, value in THEIRS.items():
            found = c.get(name, value)
            check(found == value,
                  f"{folder}/config.json: expected GPT-2's {name}={value}, found {found}")
        inner = 4 * c["n_embd"]
        found = c.get("n_inner") or inner
        check(found == inner,
              f"{folder}/config.json: expected GPT-2's n_inner={inner}, found {found}")

        weights = {}
        for name, x in load_file(folder / "model.safetensors").items():
            name = name.removeprefix("transformer.")
            for theirs, ours in NAMES.items():
                name = name.replace(theirs, ours)
            # What is still called "attn." is a causal mask. A stored head is the embedding again.
            if "attn." in name or name == "lm_head.weight":
                continue
            # HuggingFace stores GPT-2's matrices as (in, out), torch's Linear as (out, in).
            weights[name] = x.t() if ".w_" in name else x
        weights["lm_head.weight"] = weights["wte.weight"]

        sizes = {name: c[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
        config = {**sizes, **OURS, "block_size": c["n_positions"], "bias": True}
        tokenizer = c.get("tokenizer", "gpt2")
        return {"model": weights, "step": 0, "tokenizer": tokenizer, "config": config}


def write_gpt2(model, tokenizer, folder):
    """Write a model as HuggingFace's config.json and model.safetensors into a folder.

    Raises DataError if it does not have the form of GPT-2.
    """
    from safetensors.torch import save_file
    c = model.config
    for name, value in OURS.items():
        found = getattr(c, name)
        check(found == value, f"{name}={found}: GPT-2's files can only hold {name}={value}")

    weights = {}
    for name, x in model.state_dict().items():
        for theirs, ours in NAMES.items():
            name = name.replace(ours, theirs)
        weights[name] = x.t().contiguous() if ".c_" in name and x.dim() == 2 else x
        # Every linear map and norm of GPT-2 has a bias. Where the model has none, it is zero. (If
        # the model has one, it comes after its weight and replaces these zeros.)
        if ".c_" in name or "ln_" in name:
            weights.setdefault(name.replace("weight", "bias"), torch.zeros(len(x)))
    del weights["lm_head.weight"]
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})

    sizes = {name: getattr(c, name) for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
    dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), c.dropout)
    write_json(Path(folder, "config.json"), {
        **THEIRS, **sizes, **dropout, "n_positions": c.block_size,
        "architectures": ["GPT2LMHeadModel"], "bos_token_id": tokenizer.eot_token,
        "eos_token_id": tokenizer.eot_token, "tokenizer": tokenizer.name})
