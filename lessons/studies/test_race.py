"""Test the race: its search, its results file, and its statistics against numbers by hand."""
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import numpy as np
import pytest

from lessons.studies import race
from model import ARCHS, ConfigError
from prepare import DataError, write_json, write_shard
from train import TrainConfig, train

TINY_RUN = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4, total_batch_size=64,
                device="cpu", dtype="float32", compile="false")
RESULTS = sorted((ROOT / "assets").glob("race_[!v]*.json"))


@pytest.fixture
def dataset(tmp_path):
    """Make a tiny dataset of bytes; return its folder."""
    folder = tmp_path / "data/tiny"
    folder.mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(97, 123, 5000)
    write_shard(folder / "tiny_val_000000.bin", tokens[:1000])
    write_shard(folder / "tiny_train_000001.bin", tokens[1000:])
    write_json(folder / "meta.json", dict(tokenizer="bytes", vocab_size=257, train_tokens=4000,
                                          val_tokens=1000, fingerprint="f"))
    return str(folder)


def run_race(**options):
    race.main([f"--{name}={value}" for name, value in options.items()])


# ---- Search and results --------------------------------------------------------------------------

def test_search_walks_beyond_the_edge_of_its_first_points():
    def loss(point):
        return 2 * (point[0] - 5) ** 2 + abs(point[1] + 3)
    directions = [(-1, 0), (1, 0), (0, -1), (0, 1)]
    assert race.climb(loss, [(0, 0)], directions) == (5, -3)
    # It stays where the neighbors are as good, as where all runs diverge.
    assert race.climb({(0, 0): 1, (-1, 0): 1, (1, 0): 1}.get, [(0, 0)], directions[:2]) == (0, 0)


def test_a_search_also_starts_at_the_recipe_s_point_and_other_seeds_follow(monkeypatch):
    # After one step the best learning rate is 4. After two steps it is 1, but all between are bad.
    losses = {1: {1: 3, 2: 2, 4: 1}, 2: {1: 0, 4: 1}}
    made = []

    def loss_of(run, config, path):
        made.append((run["steps"], run["learning_rate"], run["seed"]))
        return losses[run["steps"]].get(run["learning_rate"], 9)

    monkeypatch.setattr(race, "loss_of", loss_of)
    options = race.RaceOptions(seed=3, seeds=2)
    race.make_runs([1, 2], options, dict(learning_rate=1.0), "angpt")
    assert made[-2:] == [(2, 1.0, 3), (2, 1.0, 4)]
    assert [run for run in made if run[2] == 4] == [(1, 4.0, 4), (2, 1.0, 4)]
    assert {seed for _, _, seed in made} == {3, 4}


def test_a_run_has_at_least_one_step():
    assert race.steps_of(20, 1000, 300) == 67
    assert race.steps_of(0.001, 1000, 300) == 1


def test_what_decides_a_loss_must_be_the_same_in_all_runs(tmp_path):
    dataset = SimpleNamespace(train_tokens=9, val_tokens=5, fingerprint="f")
    process = SimpleNamespace(dtype=race.torch.float32)
    by_recipe = race.common_options(TrainConfig(), dataset, process, "all tokens")
    given = race.common_options(TrainConfig(weight_decay=0.1), dataset, process, "all tokens")
    assert given == by_recipe | {"weight_decay": 0.1} and "weight_decay" not in by_recipe
    assert by_recipe["dtype"] == "float32" and by_recipe["fingerprint"] == "f"
    results = tmp_path / "race.json"
    race.open_results(results, given)
    with pytest.raises(DataError, match="made with other weight_decay; give another --results"):
        race.open_results(results, by_recipe)


@pytest.mark.parametrize("exitcode", [0, 1])
def test_a_process_that_fails_is_noticed(exitcode, monkeypatch):
    process = SimpleNamespace(start=lambda: None, join=lambda: None, exitcode=exitcode)
    monkeypatch.setattr(race.multiprocessing, "get_context",
                        lambda kind: SimpleNamespace(Process=lambda **given: process))
    assert race.in_a_process() == (exitcode == 0)


@pytest.fixture
def fake_race(dataset, tmp_path, monkeypatch):
    """Return a function that runs a race and returns its rows, and the list of the runs it made.

    No model is trained: losses are as if for rmsnorm twice the recipe's learning rate and a third
    of its embed_std were best.
    """
    best_rate = {"rmsnorm": 0.0113, "angpt": 0.0226}
    made = []

    def train_once(options):
        made.append(options)
        rate = math.log2(options["learning_rate"] / best_rate[options["arch"]])
        std = math.log(options["embed_std"] / 0.007, 3)
        loss = 3 + rate ** 2 + std ** 2 - options["max_steps"] / 100 + options["seed"]
        return (None, None) if rate > 0.5 else (loss, 0.1)

    def run(**changes):
        options = dict(TINY_RUN, data=dataset, out_dir=tmp_path, results=tmp_path / "race.json",
                       archs="rmsnorm,angpt", seeds=2, tokens_per_parameter="0.02,0.05", workers=1)
        run_race(**options | changes)
        return race.read_race(tmp_path / "race.json")["runs"]

    monkeypatch.setattr(race, "train_once", train_once)
    monkeypatch.setattr(race, "in_a_process", lambda *given: race.make_runs(*given) is None)
    return run, made


def test_race_finds_each_archs_best_point_and_makes_only_missing_runs(fake_race, tmp_path):
    run, made = fake_race
    rows = run()
    second = [row for row in rows if row["seed"] == 2]
    found = [(row["arch"], row["learning_rate"], row["embed_std"]) for row in second]
    assert found == 2 * [("rmsnorm", 0.0113, 0.007)] + 2 * [("angpt", 0.0226, 0.02)]
    assert {options["final_eval_tokens"] for options in made} == {1000}    # all there are
    assert (tmp_path / "race.png").stat().st_size > 5000

    lucky = dict(rows[0], seed=2, loss=0.0)      # the first seed decides which point is best
    here = race.at_best([*rows, lucky], "rmsnorm", 4, [1, 2])
    assert here.tolist() == pytest.approx([3.96, 4.96])

    results = tmp_path / "race.json"
    race.write_race(results, race.read_race(results) | {"runs": rows[:-1]})
    made.clear()
    assert run() == rows
    assert len(made) == 1


def test_a_race_says_if_the_code_of_an_arch_has_changed_since_its_runs(
        fake_race, tmp_path, monkeypatch, capsys):
    run, _ = fake_race
    rows = run()
    run()
    assert capsys.readouterr().err == ""

    class Changed(ARCHS["angpt"]):
        scale = 0.02

    monkeypatch.setitem(ARCHS, "angpt", Changed)
    assert run() == rows
    assert re.search("^The code of angpt's block has changed .*/race.json", capsys.readouterr().err)
    # Rows of earlier versions do not have it.
    for row in rows:
        del row["code"]
    results = tmp_path / "race.json"
    race.write_race(results, race.read_race(results) | {"runs": rows})
    run()
    assert capsys.readouterr().err == ""


def test_what_is_set_is_not_rounded(fake_race):
    run, made = fake_race
    rows = run(archs="rmsnorm", learning_rate=0.0012345, embed_std=0.0123, sweep="false", seeds=1,
               vocab_size=300)
    assert {options["vocab_size"] for options in made} == {300}
    assert {(row["learning_rate"], row["embed_std"]) for row in rows} == {(0.0012345, 0.0123)}


@pytest.mark.parametrize("change, says", [
    (dict(beta1=0.8), "made with other beta1; give another --results"),
    (dict(eval_tokens=128), "validated on all tokens, new runs would be on 128 tokens, evenly")])
def test_results_refuse_runs_that_do_not_compare(fake_race, change, says):
    run, made = fake_race
    run()
    made.clear()
    with pytest.raises(DataError, match=says):
        run(**change)
    assert not made


def test_results_of_the_first_tokens_are_reported_and_get_no_new_run(fake_race, tmp_path, capsys):
    run, made = fake_race
    rows = run()
    results = tmp_path / "race.json"
    saved = race.read_race(results)
    del saved["common"]["validation"]
    saved["common"]["eval_tokens"] = 256
    race.write_race(results, saved)
    made.clear()
    with pytest.raises(DataError, match="validated on the first 256 tokens, new .* on all tokens"):
        run()
    capsys.readouterr()
    assert run(report="true") == rows
    assert "over the first 256 tokens" in capsys.readouterr().out
    with pytest.raises(DataError, match="ngpt: no runs of"):
        run(report="true", archs="rmsnorm,ngpt")
    assert not made


def test_a_run_has_trains_last_loss_or_none_if_it_diverges(dataset, tmp_path):
    options = dict(TINY_RUN, data=dataset, max_steps=6, final_eval_tokens=1000)
    config = TrainConfig(**options, eval_interval=6, out_dir=str(tmp_path / "run"))
    assert race.train_once(options)[0] == train(config, say=None)[-1]["val_loss"]
    diverging = options | dict(arch="layernorm", learning_rate=100.0, max_steps=9)
    assert race.train_once(diverging) == (None, None)


def test_help_lists_no_option_that_is_refused(capsys):
    with pytest.raises(SystemExit):
        race.main(["--help"])
    told = capsys.readouterr().out
    assert "--n_embd" in told and "--results" in told
    assert not any(f"--{name} " in told for name in race.NOT_HERE)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_races_can_be_read(path):
    saved = race.read_race(path)
    text = race.validation_of(saved["common"])
    assert text in ("the first 262,144 tokens", "all tokens")
    row = saved["runs"][0]
    here = race.at_best(saved["runs"], row["arch"], row["steps"], [row["seed"]])
    losses = [other["loss"] for other in saved["runs"] if other["loss"] is not None
              and (other["arch"], other["steps"], other["seed"])
              == (row["arch"], row["steps"], row["seed"])]
    assert here.tolist() == [min(losses)]


# ---- Statistics ----------------------------------------------------------------------------------

def test_the_best_point_has_all_seeds_and_diverged_runs_count(tmp_path):
    def row(learning_rate, seed, loss):
        return dict(arch="ngpt", steps=1, learning_rate=learning_rate, embed_std=1.0, seed=seed,
                    loss=loss)
    rows = [row(1.0, 1, 2.0), row(1.0, 2, None), row(2.0, 1, 1.0)]
    best = race.at_best(rows, "ngpt", 1, [1, 2])
    assert best.name == (1.0, 1.0) and best.tolist() == [2.0, math.inf]


def test_a_report_has_losses_at_the_best_points_and_speed_ups(tmp_path, monkeypatch, capsys):
    losses = {("rmsnorm", 10): (4.1, 3.9), ("rmsnorm", 40): (3.1, 2.9),
              ("angpt", 10): (3.5, 3.7), ("angpt", 40): (2.5, 2.9)}
    rows = [dict(arch=arch, steps=steps, seed=seed, loss=loss, parameters=100, learning_rate=0.5,
                 embed_std=0.02)
            for (arch, steps), both in losses.items() for seed, loss in enumerate(both, 1)]
    race.write_race(tmp_path / "race.json",
                    dict(torch="", common=dict(total_batch_size=10, validation="all tokens"),
                         runs=rows))
    drawn = []
    monkeypatch.setattr(race, "draw_race", lambda *given: drawn.append(given))
    options = dict(report="true", results=tmp_path / "race.json", out_dir=tmp_path,
                   archs="rmsnorm,angpt", tokens_per_parameter="4,1")
    run_race(**options, seeds=2)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # tokens per parameter, tokens, learning rate, embed_std, mean, lowest and highest
    assert "angpt 1 100 0.5 0.02 3.6000 3.5000 3.7000".split() in lines
    assert "angpt 4 400 0.5 0.02 2.7000 2.5000 2.9000".split() in lines
    # From 3.6 to 2.7 the loss passes 3 after two thirds of the way: 4 (1/4)^(2/3) = 1.59.
    *_, baseline, angpt = lines
    assert baseline == ["rmsnorm", "1.00"] and angpt[:2] == ["angpt", "1.59"] and len(angpt) == 4
    assert drawn[0][0] == [1, 4]
    run_race(**options, seeds=1)
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "angpt"


@pytest.mark.parametrize("tokens, losses, target, factor", [
    ([1, 4], [4, 3], 3.5, 2),
    ([1, 4], [4, 3], 2, 1 / 4),
    ([1, 4], [4, 3], 5, 16),
    ([1, 2, 4], [4, 3, 1], 5, 8),
    ([1, 2, 4, 8], [2, 1, 3, 1], 1.5, 8 / 2 ** 0.5),
    ([1, 2, 4], [3, 2, 2], 1, 0),
    ([1, 4], [4, math.inf], 3, 0),
    ([4], [4], 4, math.nan),
    ([1, 4], [4, 3], math.inf, math.nan)])
def test_fewer_tokens_follows_straight_lines(tokens, losses, target, factor):
    tokens, losses = np.array(tokens), np.array(losses)[:, None]
    found = race.fewer_tokens(tokens, np.full(losses.shape, target), losses)
    assert found == pytest.approx(factor, nan_ok=True)


def test_interval_of_a_factor_is_welchs_of_the_longest_runs():
    baseline = np.array([[4, 4, 4], [3.1, 2.9, 3]])  # its last losses vary less
    losses = np.array([[3.5, 3.5, 3.5], [2.9, 2.1, 2.5]])
    half = 3.87686 * (0.17 / 3) ** 0.5         # t for 2.249 degrees of freedom
    found = race.interval_of_factor([1, 4], baseline, losses)
    assert found == pytest.approx((4 ** (0.5 - half), 4 ** (0.5 + half)), rel=1e-4)


@pytest.mark.parametrize("options, says", [
    (dict(tokens_per_parameter="5,x"), "tokens_per_parameter=5,x"),
    (dict(report="true", results="nowhere.json"), "nowhere.json: expected a race's JSON"),
    (dict(arch="ngpt"), "did you mean archs?")])
def test_errors_are_one_line(options, says, tmp_path):
    with pytest.raises((DataError, ConfigError), match=rf"^[^\n]*{says.replace('?', '.')}[^\n]*$"):
        run_race(**options, out_dir=tmp_path)
