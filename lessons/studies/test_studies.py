"""What diagnose.py measures changes nothing; what cost.py counts, counted by hand."""
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lessons.studies import cost, depth, race_variants
from lessons.studies.diagnose import diagnose
from model import GPT, GPTConfig
from train import TrainConfig, train

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("study", [depth, race_variants])
def test_help_starts_no_study(study, capsys):
    with pytest.raises(SystemExit):
        study.main(["--help"])
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("arch", ["powernorm", "angpt"])
def test_diagnosis_by_layer_changes_nothing(arch, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    x = torch.arange(64).view(2, 32)
    watches, logs = (diagnose((x, x + 1)), None), []
    for watch in watches:
        config = TrainConfig(arch=arch, n_layer=2, n_head=2, n_embd=16, block_size=32, batch_size=4,
                             total_batch_size=128, max_steps=4, eval_interval=2, eval_tokens=512,
                             log_interval=1, device="cpu", dtype="float32", compile="false",
                             out_dir=str(tmp_path / str(watch is None)))
        logs.append(train(config, watch=watch, say=None))
    assert ([r["val_loss"] for r in logs[0] if "val_loss" in r]
            == [r["val_loss"] for r in logs[1] if "val_loss" in r])
    first, last = logs[0][0], logs[0][-1]
    assert (len(last["residual_norm"]) == 3 and len(last["grad_l1"]["w_down"]) == 2
            and len(last["grad_l1"]["wte"]) == 1)
    assert first["momentum_var"]["w_o"] == [0, 0] and min(last["momentum_var"]["w_o"]) > 0
    assert max(last["row_norm_max"]["w_up"]) >= max(last["row_norm"]["w_up"]) > 0
    if arch == "angpt":
        assert (max(last["row_norm_max"]["w_up"]) < 1 + 1e-5
                and abs(first["scale"]["alpha_a"][0] - 0.05) < 1e-5)
        assert first["residual_norm"][0] == pytest.approx(1, abs=1e-4)
        assert first["scale"]["g"] == pytest.approx([8 ** 0.5] * 2)


def test_bytes_are_counted_once_between_two_products():
    def function(x, w, v):
        h = x @ w.t()                       # 4 x 16 numbers, as all below
        y = h.relu().square() @ v           # reads h, writes one array
        return h + 2 * y                    # reads h and y, writes one array

    tensors = torch.ones(4, 8), torch.ones(16, 8), torch.ones(16, 16)
    work = cost.count(make_fx(function, tracing_mode="fake")(*tensors).graph)
    assert work.flops == 2 * 4 * 8 * 16 + 2 * 4 * 16 * 16
    assert work.moved == 5 * 4 * 16 * 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")           # in torch's compiler
def test_products_of_a_block_in_training_are_six_a_weight_and_attention_s():
    B, T, d = 2, 1024, 64                   # up to 512 tokens a CPU's attention is the formula
    with FakeTensorMode(allow_non_fake_inputs=True):
        gpt = GPT(GPTConfig(n_embd=d, n_layer=1, block_size=T))
        work = cost.training_work(cost.Layer(gpt), B, T, d)
    attention = (2 + 5) * 2 * d * T / 2     # products in forward and backward, half the keys
    assert work.flops == B * T * (6 * 16 * d ** 2 + attention)
