"""Test that GPT-2's weights, as HuggingFace stores them, give GPT-2's logits."""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from model import ConfigError
from prepare import DataError, get_tokenizer, prepare, write_json
from train import TrainConfig, load_model, train


def bytes_corpus(folder):
    (folder / "text.txt").write_text("some text\n" * 1000)
    return str(prepare(f"{folder}/text.txt", data_dir=str(folder)))


def write_gpt2(folder, prefix="", **changes):
    """Write a tiny GPT-2 with random weights as HuggingFace does; return the weights in float64."""
    config = dict(model_type="gpt2", activation_function="gelu_new", layer_norm_epsilon=1e-5,
                  n_positions=16, n_embd=16, n_layer=2, n_head=2, vocab_size=262)
    write_json(folder / "config.json", config | changes)
    shapes = {"ln_f": [16]}
    for layer in ("h.0", "h.1"):
        shapes |= {f"{layer}.ln_1": [16], f"{layer}.attn.c_attn": [16, 48],
                   f"{layer}.attn.c_proj": [16, 16], f"{layer}.ln_2": [16],
                   f"{layer}.mlp.c_fc": [16, 64], f"{layer}.mlp.c_proj": [64, 16]}
    torch.manual_seed(0)
    w = {"wte.weight": torch.randn(262, 16) / 3, "wpe.weight": torch.randn(16, 16) / 3}
    for name, shape in shapes.items():
        w[f"{name}.weight"] = torch.randn(shape) / 3
        w[f"{name}.bias"] = torch.randn(shape[-1]) / 3
    stored = {prefix + name: x for name, x in w.items()}
    # HuggingFace's names for the causal mask and its masked value, which are no weights.
    stored[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    stored[f"{prefix}h.0.attn.masked_bias"] = torch.tensor(-1e4)
    stored["lm_head.weight"] = w["wte.weight"].clone()
    save_file(stored, folder / "model.safetensors")
    return {name: x.double() for name, x in w.items()}


def ref_gpt2(w, idx):
    """Return GPT-2's logits, computed with torch's own functions and the published names."""
    def norm(name, h):
        return F.layer_norm(h, [16], w[f"{name}.weight"], w[f"{name}.bias"])
    def linear(name, x):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]
    h = w["wte.weight"][idx] + w["wpe.weight"][:idx.shape[1]]
    for layer in ("h.0", "h.1"):
        qkv = linear(f"{layer}.attn.c_attn", norm(f"{layer}.ln_1", h))
        q, k, v = qkv.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)    # (B, H, T, d_k) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + linear(f"{layer}.attn.c_proj", y.transpose(1, 2).flatten(2))
        u = F.gelu(linear(f"{layer}.mlp.c_fc", norm(f"{layer}.ln_2", h)), approximate="tanh")
        h = h + linear(f"{layer}.mlp.c_proj", u)
    return norm("ln_f", h) @ w["wte.weight"].T


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_s_weights_give_gpt2_s_logits(tmp_path, monkeypatch, prefix):
    w = write_gpt2(tmp_path, prefix)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: get_tokenizer("bytes"))
    asked = []
    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    idx = torch.arange(32).view(2, 16)
    for source in (tmp_path, "gpt2-medium"):
        logits = load_model(source)[0].double()(idx, idx)[0]
        assert torch.allclose(logits, ref_gpt2(w, idx), rtol=1e-11, atol=1e-11)
    assert asked == [("openai-community/gpt2-medium", ["config.json", "model.safetensors"])]
    with pytest.raises(DataError, match="trained with tokenizer=gpt2, but .* has tokenizer=bytes"):
        train(TrainConfig(init_from=str(tmp_path), data=bytes_corpus(tmp_path)), say=None)


@pytest.mark.parametrize("changes, says", [
    (dict(activation_function="relu"), "found .*relu"), (dict(model_type="llama"), "found .*llama"),
    (dict(n_layer=3), "do not fit.*blocks.2"), (dict(n_embd=32), "do not fit.*mismatch"),
    (dict(n_head=3), "n_head=3")])
def test_weights_that_are_not_gpt2_s_are_one_line(tmp_path, changes, says):
    write_gpt2(tmp_path, **changes)
    with pytest.raises((DataError, ConfigError), match=f"^.*{says}.*$"):
        load_model(tmp_path)


def test_gpt2_s_files_that_are_not_whole_are_one_line(tmp_path):
    write_gpt2(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 999)
    with pytest.raises(DataError,
                       match="^.*expected GPT-2's config.json and model.safetensors .*Error.*$"):
        load_model(tmp_path)
