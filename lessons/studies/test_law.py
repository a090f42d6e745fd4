import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np
import pytest

from lessons.studies import law
from prepare import DataError

SIZES = [10_000, 40_000, 160_000, 640_000]


def write_races(folder, sizes=SIZES, val_tokens=1000, smallest_is_off=0, last=None, ratio=20,
                vocab_size=257, seeds=2):
    """Write races whose losses are 2 (N / 10,000)^-0.3 + 1.5, except for the smallest; return
    their paths."""
    paths = []
    for size in sizes:
        loss = 2 * (size / 10_000) ** -0.3 + 1.5 + smallest_is_off * (size == sizes[0])
        row = dict(arch="angpt", steps=ratio * size, learning_rate=1.0, embed_std=1.0,
                   parameters=size)
        rows = [row | dict(seed=1, loss=loss),
                row | dict(seed=2, loss=loss if size != sizes[0] else last or loss)][:seeds]
        # Runs of another length do not count.
        rows += [run | dict(steps=3 * run["steps"], loss=0.1) for run in rows]
        common = dict(total_batch_size=1, val_tokens=val_tokens, eval_tokens=128,
                      vocab_size=vocab_size)
        paths.append(str(folder / f"{size}.json"))
        Path(paths[-1]).write_text(json.dumps(dict(torch="", common=common, runs=rows)))
    return paths


@pytest.mark.parametrize("end", [1.5, 0, -0.5])
def test_a_law_is_recovered_and_does_not_end_below_0(end):
    sizes = np.array(SIZES)
    losses = 2 * (sizes / 10_000) ** -0.3 + end
    a, b, c = law.fit_law(sizes, losses)
    if end >= 0:
        assert (a, b, c) == pytest.approx((2, 0.3, end), rel=0.02, abs=0.02)

    def error(a, b):
        return ((a * (sizes / 10_000) ** -b + c - losses) ** 2).sum()
    assert c >= 0
    for other in (error(a + 0.02, b), error(a - 0.02, b), error(a, b + 0.01), error(a, b - 0.01)):
        assert error(a, b) < other


def test_a_law_is_printed_and_drawn(tmp_path, capsys):
    law.main([*write_races(tmp_path), f"--out_dir={tmp_path}"])
    name, *numbers = capsys.readouterr().out.splitlines()[1].split()
    there = 2 * 10_000 ** -0.3 + 1.5
    assert name == "angpt"
    assert ([float(number) for number in numbers[::2]]
            == pytest.approx([0.3, 1.5, there, there], rel=0.02))
    assert (tmp_path / "law.png").stat().st_size > 5000
    races = write_races(tmp_path, smallest_is_off=0.3, ratio=5)
    law.main([f"--out_dir={tmp_path}", "--tokens_per_parameter=5", *races[::-1]])
    *_, of_all, _, of_larger = capsys.readouterr().out.splitlines()[1].split()
    assert float(of_larger) == pytest.approx(there, rel=0.02) and abs(float(of_all) - there) > 0.05


@pytest.mark.parametrize("races, says", [
    (dict(sizes=SIZES[:3]), "no arch has four sizes"),
    (dict(seeds=1), "no arch has four sizes"),
    (dict(last=float("inf")), "no arch has four sizes")])
def test_a_law_takes_four_sizes_none_of_which_diverged(tmp_path, races, says):
    with pytest.raises(DataError, match=says):
        law.main([*write_races(tmp_path, **races), f"--out_dir={tmp_path}"])


def test_an_interval_is_the_middle_of_fits_to_seeds_drawn_with_replacement():
    assert law.with_interval(np.array([5, *range(101)])) == "5.000 (2.500-97.500)"
    sizes = np.array(SIZES)
    seeds = [[loss - 0.1, loss + 0.1] for loss in 2 * (sizes / 10_000) ** -0.3 + 1.5]
    a, b, c = law.fits_of(sizes, seeds, draws=20)
    assert a.shape == b.shape == c.shape == (21, 1)
    assert b[0, 0] == pytest.approx(0.3, rel=0.02) and b[1:].std() > 0.01


def test_losses_of_other_validation_tokens_do_not_compare(tmp_path):
    with pytest.raises(DataError, match="5000.json: .*vocabulary of 99, .* do not compare"):
        law.main(write_races(tmp_path) + write_races(tmp_path, [5000], vocab_size=99))
    paths = write_races(tmp_path) + write_races(tmp_path, [5000], val_tokens=999)
    with pytest.raises(DataError, match="5000.json: .* of 999 .* do not compare"):
        law.main(paths)
    saved = json.loads(Path(paths[1]).read_text())
    saved["common"]["validation"] = "all tokens"
    Path(paths[1]).write_text(json.dumps(saved))
    with pytest.raises(DataError, match="40000.json: all tokens of .* the first 128 tokens of .* "
                                        "do not compare"):
        law.main(paths[:4])
