"""Test the study of seeds: its variants and runs, and its statistics against numbers by hand."""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import numpy as np
import pytest
import torch
from scipy.stats import ttest_ind

from lessons.studies import how_sure, seeds
from model import GPT, GPTConfig
from prepare import write_json, write_shard
from train import TrainConfig, train


# ---- seeds.py ------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, pairs", [
    ("2x2", {(1, 1), (1, 2), (2, 1), (2, 2)}),
    ("2-4", {(2, 2), (3, 3), (4, 4)}),
    ("2/3,3/2", {(2, 3), (3, 2)})])
def test_pairs_of_seeds_are_read(text, pairs):
    found = seeds.pairs_of(text)
    assert set(found) == pairs and len(found) == len(pairs)


@pytest.mark.parametrize("arch, variant, wanted, starts", [
    ("ngpt", "built-in", dict(learning_rate=0.0113, max_steps=2246, warmup_ratio=0), {}),
    ("rmsnorm+qk_norm", "half rate",
     dict(arch="rmsnorm", qk_norm=True, learning_rate=0.00283), {}),
    ("normformer", "built-in", dict(qk_norm=False, embed_std=1.0), {}),
    ("ngpt", "5 tokens warm-up 10%",
     dict(max_steps=561, learning_rate=0.0226, warmup_ratio=0.1), {}),
    ("ngpt", "s_qk from 2", dict(learning_rate=0.0113), {"s_qk": {"init": 2.0}})])
def test_a_variant_changes_the_options_that_it_names(arch, variant, wanted, starts):
    config, changes = seeds.config_of(arch, variant)
    assert {name: getattr(config, name) for name in wanted} == pytest.approx(wanted)
    assert changes == starts


def test_a_variant_changes_the_new_model():
    config = GPTConfig(arch="ngpt", n_layer=2, n_head=2, n_embd=16, block_size=8)
    model, before = GPT(config), GPT(config)
    before.load_state_dict(model.state_dict())
    seeds.change_model(model, {"alpha": {"init": 0.2}, "s_qk": {"scale": 1.0}})
    for block in model.blocks:
        assert block.alpha_a().tolist() == block.alpha_m().tolist() == pytest.approx(16 * [0.2])
        # s_qk still starts at 1, but Adam moves it more slowly.
        assert block.s_qk.weight.tolist() == block.s_qk().tolist() == [1.0] * 16
        assert block.s_u().tolist() == pytest.approx([1.0] * 64)
    assert torch.equal(model.wte.weight, before.wte.weight)
    seeds.change_model(model, {"nudge": 1e-3})
    ratio = model.wte.weight / before.wte.weight - 1
    assert ratio.std().item() == pytest.approx(1e-3, rel=0.1)
    model = GPT(GPTConfig(arch="angpt", n_layer=1, n_head=2, n_embd=16, block_size=8))
    seeds.change_model(model, {"g": 16.0})
    assert model.blocks[0].g.item() == 16


@pytest.fixture
def tiny_study(tmp_path, monkeypatch):
    """Make the runs of the study tiny, and let them write to an empty folder."""
    tokens = np.random.default_rng(0).integers(97, 123, 7000)
    tokens[::900] = 256
    write_shard(tmp_path / "tiny_val_000000.bin", tokens[:3000])
    write_shard(tmp_path / "tiny_train_000001.bin", tokens[3000:])
    write_json(tmp_path / "meta.json", dict(tokenizer="bytes", vocab_size=257, train_tokens=4000,
                                            val_tokens=3000, fingerprint="f"))
    point = dict(seeds.POINT, n_layer=1, n_head=2, n_embd=16, batch_size=2, total_batch_size=256,
                 compile="false", max_steps=20, data=str(tmp_path))
    for name, value in dict(POINT=point, ROOT=tmp_path, RESULTS=tmp_path / "seeds.jsonl",
                            EVERY=10, USUAL=512, EARLY=512).items():
        monkeypatch.setattr(seeds, name, value)
    return tmp_path


def test_a_run_trains_as_train_py_does_and_is_made_once(tiny_study, capsys):
    seeds.run("ngpt", "built-in", "3/3,3/4")
    first, second = seeds.read()
    config, _ = seeds.config_of("ngpt", "built-in")
    config = TrainConfig(**config.options | dict(seed=3, eval_interval=20, final_eval_tokens=3000,
                                                 out_dir=str(tiny_study / "run")))
    assert first["loss_all"] == pytest.approx(train(config, say=None)[-1]["val_loss"], rel=1e-6)
    assert first["tokens_all"] == 2944                   # 23 windows of 128
    assert (second["weights"], second["order"]) == (3, 4)
    assert first["loss_all"] != second["loss_all"]

    assert sum(tokens for tokens, _ in first["files"]) == 2944
    mean = sum(tokens * loss for tokens, loss in first["files"]) / 2944
    assert mean == pytest.approx(first["loss_all"], rel=1e-4)
    assert first["path"]["step"] == [10, 20]

    # The stored weights are the last ones, and their loss over the first tokens is `loss`.
    model = GPT(seeds.resolve(config))
    model.load_state_dict(torch.load(tiny_study / "out/seeds/ngpt-built-in-3-3.pt"))
    validation = seeds.open_dataset(config, seeds.set_up_process(config)).val
    losses, _ = seeds.token_losses(model, validation, 512)
    assert len(losses) == 512 and losses.mean() == pytest.approx(first["loss"])
    assert model.training
    seeds.run("ngpt", "built-in", "3/3,3/4")
    assert len(seeds.read()) == 2


def test_the_averaged_weights_are_those_of_the_last_tenth_of_the_steps(tiny_study):
    config, _ = seeds.config_of("rmsnorm", "built-in")
    validation = seeds.open_dataset(config, seeds.set_up_process(config)).val
    watch = seeds.Watch(validation, 20)
    model = GPT(GPTConfig(arch="rmsnorm", n_layer=1, n_head=2, n_embd=16, block_size=128))
    with torch.no_grad():
        for step in range(21):
            for p in model.parameters():
                p.fill_(step)
            watch(step, 2.0 + step, 0.05 * step, model)
        watch.average(model)
    assert model.wte.weight.unique().tolist() == [19.5]
    assert watch.rows["loss"] == [7.5, 17.5] and watch.rows["worst"] == [12, 22]
    assert watch.rows["norm"] == [0.275, 0.775] and watch.rows["clipped"] == [0, 0]


def test_losses_by_file_begin_at_an_end_of_text():
    losses, begins = np.array([1.0, 2, 3, 4, 5]), np.array([False, True, False, False, True])
    assert seeds.by_file(losses, begins) == [[1, 1.0], [3, 3.0], [1, 5.0]]


# ---- how_sure.py ---------------------------------------------------------------------------------

def rows_of(losses, **more):
    """Return rows with the losses (weights, order)."""
    return [dict(more, weights=i + 1, order=j + 1, loss_all=loss)
            for i, line in enumerate(losses) for j, loss in enumerate(line)]


def test_the_largest_square_of_seeds_is_analyzed_by_weights_and_order():
    weights, order = np.array([-2, 0, 2]), np.array([-1, 0, 1])
    both = np.array([[1, -1, 0], [-1, 1, 0], [0, 0, 0]])
    table = 5 + weights[:, None] + order + both
    rows = rows_of(table) + [dict(weights=4, order=4, loss_all=0)]
    assert (how_sure.grid(rows) == table).all()
    # Sums of squares over degrees of freedom: 3 * 8 / 2, 3 * 2 / 2, and 4 / 4.
    assert how_sure.squares(table) == pytest.approx([12, 3, 1])
    found, p = how_sure.variances(table, draws=100)
    assert found == pytest.approx([11 / 3, 2 / 3, 1])
    assert p[0] < 0.05 and p[0] < p[1] < 0.5


def test_the_rest_of_the_tokens_confirms_what_varies_there_too():
    # Of 3 * USUAL tokens, the others have 1.75 and 2.25 nats.
    rows = [dict(loss=1.0, loss_all=1.5, tokens_all=3 * how_sure.USUAL),
            dict(loss=2.0, loss_all=6.5 / 3, tokens_all=3 * how_sure.USUAL)]
    assert how_sure.rest_of(rows) == pytest.approx([1.75, 2.25])
    assert how_sure.confirmed(rows) == pytest.approx(0.5)


def test_a_file_s_share_of_the_variance_and_the_fate_of_a_run():
    rows = [dict(files=[[3, 1.0], [1, 5.0]], early=[[50, 3.0], [100, 1.0]], loss_all=2.0),
            dict(files=[[3, 2.0], [1, 4.0]], early=[[50, 2.0], [100, 2.0]], loss_all=2.5)]
    weight, share = how_sure.of_files(rows)
    assert weight.tolist() == [0.75, 0.25]
    assert share == pytest.approx([1.5, -0.5])
    steps, r = how_sure.fate(rows)
    assert steps.tolist() == [50, 100] and r == pytest.approx([-1, 1])


def test_variants_are_compared_with_the_same_recipe_at_the_same_seeds(capsys):
    found = {("ngpt", "built-in"): rows_of([[1.0, 9], [9, 2.0]]),
             ("ngpt", "half rate"): rows_of([[1.3, 8], [7, 2.1]])[::3] + rows_of(3 * [[5] * 3])[8:],
             ("ngpt", "5 tokens"): rows_of([[4.0]]),
             ("ngpt", "5 tokens warm-up 10%"): rows_of([[3.75]])}
    how_sure.paired(found)
    half, warm = capsys.readouterr().out.splitlines()[1:]
    # The differences are 0.3 and 0.1, their standard error is 0.1, and t is 12.7062.
    assert half.split()[1:] == "half rate 2 0.2000 -1.0706 to 1.4706 0.1414".split()
    assert warm.split()[1:] == "5 tokens warm-up 10% 1 -0.2500 nan to nan nan".split()


def test_the_readme_has_the_numbers_of_the_stored_runs(capsys):
    readme = (ROOT / "lessons/studies/README.md").read_text(encoding="utf-8")
    found = how_sure.groups()
    how_sure.overview(found)
    printed = capsys.readouterr().out
    for arch in ("GPT+", "anGPT", "NormFormer", "LayerNorm", "RMSNorm", "PowerNorm", "nGPT"):
        told = re.search(rf"^\| {re.escape(arch)} \| (\d+ \| .*) \|$", readme, re.M)[1]
        line = re.search(rf"^{re.escape(arch)} +built-in +(.*)$", printed, re.M | re.I)[1]
        wanted = [float(word) for word in re.split(" [|] |, ", told)]
        assert [float(word) for word in line.split()[:6]] == pytest.approx(wanted, abs=6e-4)
    (weights, order, rest), _ = how_sure.variances(how_sure.grid(found["angpt", "built-in"]), 1)
    shares = np.array([weights, order]) / (weights + order + rest)
    assert "explain {:.0%} (p = 0.01) and the order {:.0%}".format(*shares) in readme


def test_intervals_are_welchs():
    a, b = np.array([[1.0, 2, 4, 8]]), np.array([[0.0, 0.5, 0.25, 1]])
    low, high = ttest_ind(a[0], b[0], equal_var=False).confidence_interval()
    assert how_sure.halves(a, b) == pytest.approx([(high - low) / 2])
    generator = np.random.default_rng(0)
    inside, outside = a.mean() - b.mean() + 0.99 * (high - low) / 2 * np.array([1, 1.02])
    assert how_sure.coverage(a, b, inside, "t", generator) == 1
    assert how_sure.coverage(a, b, outside, "t", generator) == 0


def test_t_contains_the_truth_of_normal_samples_and_a_bootstrap_less_often():
    generator = np.random.default_rng(0)
    values = np.array([1.0, 2, 3])
    a, b = (how_sure.drawn(values, 1000, 4, generator, normal=True) for _ in range(2))
    assert a.shape == (1000, 4)
    assert abs(a.mean() - 2) < 0.1 and abs(a.std() - 1) < 0.1
    assert 0.93 < how_sure.coverage(a, b, 0, "t", generator) < 0.98
    assert 0.8 < how_sure.coverage(a, b, 0, "bootstrap", generator, draws=100) < 0.9
    assert set(how_sure.drawn(values, 9, 4, generator, normal=False).flat) == {1, 2, 3}


@pytest.mark.parametrize("n, true, chance", [(1, 1.5, 1 / 4), (2, 1.5, 1 / 16), (1, 2.5, 0)])
def test_the_chance_of_a_wrong_winner_is_counted(n, true, chance):
    # Each loss is 1 above its arch's mean or 1 below it.
    a, b = np.array([4.0, 6.0]), np.array([7.0, 9.0])
    found = how_sure.wrong(a, b, n, true, np.random.default_rng(0))
    assert found == pytest.approx(chance, abs=0.01)
