"""What diagnose.py measures changes nothing; what cost.py counts, counted by hand."""
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure
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


def test_a_diagnosis_measures_what_it_says():
    torch.manual_seed(0)
    model = GPT(GPTConfig(arch="layernorm", n_layer=2, n_head=2, n_embd=16, block_size=8, bias=True,
                          dropout=0.5))
    x, y = torch.randint(257, (2, 2, 8))
    with torch.no_grad():
        model.blocks[1].norm2.weight.copy_(torch.linspace(-1, 3, 16))
        model.blocks[1].w_up.weight[3] *= 5
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    model(x, y)[1].backward()
    optimizer.step()
    found = diagnose((x, y))(model, optimizer, 1)
    assert model.training

    given = []                              # to the norm after the last block
    model.norm_f.register_forward_pre_hook(lambda norm, inputs: given.append(inputs[0]))
    optimizer.zero_grad()
    model.eval()(x, y)[1].backward()
    w_up, norm2 = model.blocks[1].w_up.weight, model.blocks[1].norm2.weight
    norms = w_up.norm(dim=1)
    got = [found["residual_norm"][2], found["grad_l1"]["w_up"][1], found["scale"]["norm2"][1],
           found["row_norm"]["w_up"][1], found["row_norm_max"]["w_up"][1],
           found["momentum_var"]["w_up"][1]]
    wanted = [given[0].norm(dim=-1).mean(), w_up.grad.abs().mean(), norm2.abs().mean(),
              norms.mean(), norms.max(), optimizer.state[w_up]["exp_avg"].var(correction=0)]
    assert got == pytest.approx([value.item() for value in wanted], rel=1e-5)
    assert set(found["scale"]) == {"norm1", "norm2", "norm_f"}


def test_depth_trains_at_the_searched_values_for_its_width(monkeypatch):
    log = [dict(step=0), dict(tokens=1e6, val_loss=3.0, residual_norm=[1, 1], seconds=5),
           dict(tokens=2e6, val_loss=2.0, residual_norm=[1, 2], seconds=9)]
    configs = []
    monkeypatch.setattr(depth, "Tokens", lambda *given: SimpleNamespace(batch=lambda *_: (0, 0)))
    monkeypatch.setattr(depth, "train", lambda config, watch: configs.append(config) or log)
    assert depth.measure("rmsnorm+qk_norm") == dict(
        tokens=[1, 2], val_loss=[[3.0, 2.0]] * 2, residual_norm=[[1, 2]] * 2, seconds=18)
    assert [config.seed for config in configs] == depth.SEEDS
    best = min((row for row in depth.SEARCH if row["arch"] == "rmsnorm+qk_norm" and row["loss"]),
               key=lambda row: row["loss"])
    assert configs[0].arch == "rmsnorm" and configs[0].qk_norm
    assert configs[0].embed_std == best["embed_std"]
    # Narrower models train at higher learning rates.
    assert configs[0].learning_rate == pytest.approx(best["learning_rate"] * (64 / 48) ** 0.5)


def test_depth_draws_the_mean_and_the_range_of_the_seeds():
    axes = Figure().subplots()
    depth.draw_line(axes, [0, 1], [[1.0, 4.0], [3.0, 8.0]], "ngpt")
    assert axes.lines[0].get_ydata().tolist() == [2, 6]
    extents = axes.collections[0].get_paths()[0].get_extents()
    assert (extents.y0, extents.y1) == (1, 8)


def test_variants_are_tried_at_other_learning_rates_and_repeated_at_the_best(tmp_path, monkeypatch):
    best = {"rmsnorm": 1, "angpt": 2, "derf": None}      # None: all runs diverge
    made = []

    def train_once(options):
        made.append(options)
        times = options["learning_rate"] / recipe[options["arch"]]
        if best[options["arch"]] is None:
            return None, None
        return 2 + abs(times - best[options["arch"]]), 0.1

    names = ["rmsnorm+qk_norm", "angpt", "derf embed_std=1"]
    recipe = {name.split("+")[0].split()[0]: race_variants.train_config(
        name.partition(" ")[0], race_variants.OPTIONS).learning_rate for name in names}
    for name, value in dict(NAMES=names, train_once=train_once,
                            RESULTS=tmp_path / "runs.json").items():
        monkeypatch.setattr(race_variants, name, value)
    race_variants.main([])
    rows = json.loads((tmp_path / "runs.json").read_text())["runs"]
    found = [(row["arch"], row["times"], row["seed"]) for row in rows]
    assert found == [*((name, times, 1) for times in (2, 1) for name in names),
                     (names[0], 0.5, 1), (names[2], 0.5, 1),
                     (names[0], 1, 2), (names[1], 2, 2), (names[2], 0.5, 2)]
    assert [options["embed_std"] for options in made if options["arch"] == "derf"] == [1.0] * 4
    assert made[-1]["seed"] == 2 and made[0]["qk_norm"]
    made.clear()
    race_variants.main([])
    assert not made


@pytest.mark.parametrize("dtype, bytes_each", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_are_counted_once_between_two_products(dtype, bytes_each):
    def function(x, w, v):
        h = x.relu() @ w.t()                # reads and writes 4 x 8; h has 4 x 16, as all below
        s = h.relu().square()               # reads h, writes s
        y = s @ v
        return h + 2 * y + s                # reads h, y and s, writes one array

    tensors = [torch.ones(shape, dtype=dtype) for shape in ((4, 8), (16, 8), (16, 16))]
    work = cost.count(make_fx(function, tracing_mode="fake")(*tensors).graph)
    assert work.flops == 2 * 4 * 8 * 16 + 2 * 4 * 16 * 16
    assert work.moved == (2 * 4 * 8 + 6 * 4 * 16) * bytes_each


@pytest.mark.filterwarnings("ignore::DeprecationWarning")           # in torch's compiler
def test_products_of_a_block_in_training_are_six_a_weight_and_attention_s():
    B, T, d = 2, 1024, 64                   # up to 512 tokens a CPU's attention is the formula
    with FakeTensorMode(allow_non_fake_inputs=True):
        gpt = GPT(GPTConfig(n_embd=d, n_layer=1, block_size=T))
        work = cost.training_work(cost.Layer(gpt), B, T, d)
    attention = (2 + 5) * 2 * d * T / 2     # products in forward and backward, half the keys
    assert work.flops == B * T * (6 * 16 * d ** 2 + attention)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")           # in torch's compiler
def test_bytes_of_casts_in_forward_and_backward_are_counted():
    with FakeTensorMode(allow_non_fake_inputs=True):
        work = cost.training_work(torch.nn.Linear(16, 16, bias=False), 8, 16)
    # The input and the weights are read in float32 and written in bfloat16, and their gradients
    # the other way round.
    assert work.moved == (8 * 16 + 16 * 16) * (4 + 2 + 2 + 4)
    assert work.flops == 6 * 8 * 16 * 16


@pytest.mark.parametrize("arch, passes", [("rmsnorm", 7), ("ngpt", 10)])
def test_a_step_is_all_layers_the_head_and_the_optimizer(arch, passes, monkeypatch):
    def training_work(module, *shape):
        assert shape == (2, 8, 16)
        return cost.Work(100.0, 10.0) if isinstance(module, cost.Layer) else cost.Work(7.0, 3.0)

    monkeypatch.setattr(cost, "training_work", training_work)
    config = GPTConfig(arch=arch, n_layer=3, n_head=2, n_embd=16, block_size=8)
    weights = sum(p.numel() for p in GPT(config).parameters())
    assert cost.predicted_step(config, 2, peak=1e3, bandwidth=1e2) == pytest.approx(
        (307, 330, 10 * passes * 4 * weights))


@pytest.mark.parametrize("arch", ["rmsnorm", "ngpt"])
def test_a_layer_and_the_head_are_a_gpt(arch):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(arch=arch, n_layer=1, n_head=2, n_embd=16, block_size=8))
    x, y = torch.randint(257, (2, 2, 8))
    found = cost.Head(gpt, y)(cost.Layer(gpt)(gpt.wte(x)))
    assert found.item() == pytest.approx(gpt(x, y)[1].item() * y.numel())
