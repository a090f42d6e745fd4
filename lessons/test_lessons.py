"""What holds for every lesson: python -m pytest lessons (without running the notebooks: -k "not notebook")"""
import csv
import importlib
import os
import re
import struct
import subprocess
import sys
import textwrap
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
import torch

import diagram
import grade_class
import grader
from diagnose import diagnose
from train import TrainConfig, train

HERE = Path(__file__).resolve().parent
LESSONS = {path.stem: nbformat.read(path, 4) for path in sorted(HERE.glob("[0-9]*.ipynb"))}
EXERCISES = {number: exercise for name in LESSONS
             for number, exercise in importlib.import_module(f"exercises_{name[:2]}").EXERCISES.items()}
DPI = 80                                                            # of every figure, stored and run

every_lesson = pytest.mark.parametrize("name", LESSONS)
every_exercise = pytest.mark.parametrize("number", EXERCISES)


def lesson_of(number):
    return next(notebook for name, notebook in LESSONS.items() if int(name[:2]) == int(number.split(".")[0]))


def text(notebook, kind):
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == kind)


def folded(notebook, title):
    """number -> what is folded under such a title."""
    pattern = rf"<summary>{title} ?([\d.]*)</summary>(.*?)</details>"
    return re.findall(pattern, text(notebook, "markdown"), re.S)


def graded(notebook):
    """number -> name of the function, in the order of the notebook."""
    found = re.findall(r'^(\w+) = grade\("([\d.]+)", \1\)', text(notebook, "code"), re.M)
    return {number: name for name, number in found}


def a_class_graded(folder):
    """(what grader.py printed, row of grades.csv by notebook) for four notebooks in folder."""
    def notebook(name, *cells):
        new = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        nbformat.write(new, folder / name)

    start = "from grader import grade\nimport torch\n"
    stub = "def largest(n):\n    raise NotImplementedError\nlargest = grade('1.3', largest)"
    notebook("good.ipynb", start + "drift = grade('1.1', lambda n, a, b, m, v: (m + n * a, v * b ** n))", "1 / 0", stub,
             "def f(x, eps):\n    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + eps) ** 0.5",
             "layer_norm = grade('1.2', f)")
    solved = "largest = grade('1.3', lambda n: (n - 1) ** 0.5)"
    notebook("endless.ipynb", start + solved, "import time\ntime.sleep(100)")
    notebook("gone.ipynb", start + stub, "import os\nos._exit(7)")
    (folder / "broken.ipynb").write_text("no notebook, grade(\"1.1\", f)")
    names = ["good.ipynb", "endless.ipynb", "gone.ipynb", "broken.ipynb"]
    command = [sys.executable, str(HERE / "grader.py"), *names, "--seconds=60", "--jobs=4"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    with open(folder / "grades.csv", newline="") as file:
        rows = {row["notebook"]: row for row in csv.DictReader(file)}
    assert list(rows) == names and done.stdout.count(" solved, ") == 4
    return done.stdout, rows


@pytest.fixture(scope="session", autouse=True)
def runs(request, tmp_path_factory):
    """name -> row of the notebook, run as it is committed, two at a time beside the other tests; train's runs are cut
    to LESSONS_STEPS. And "class" -> a_class_graded."""
    names = [item.callspec.params["name"] for item in request.session.items if "untouched_notebook" in item.name]
    steps = int(os.environ.get("LESSONS_STEPS", 9))
    if not (HERE.parent / "data/stdlib/meta.json").exists():
        subprocess.run([sys.executable, "prepare.py"], cwd=HERE.parent, check=True, stdout=subprocess.DEVNULL)
    torch.set_num_threads(1)                            # two would wait for each other where notebooks take the cores
    pool, other = ThreadPoolExecutor(2, initializer=getattr(os, "nice", int), initargs=(10,)), ThreadPoolExecutor(1)
    graded = [other.submit(a_class_graded, tmp_path_factory.mktemp("class")) for item in request.session.items
              if item.name == "test_a_class_of_notebooks_is_graded"]
    found = {name: pool.submit(grade_class.run_notebook, HERE / f"{name}.ipynb", 300, steps) for name in names[::-1]}
    yield found | dict(zip(["class"], graded))
    pool.shutdown(cancel_futures=True)


@every_exercise
def test_reference_passes_but_not_as_an_answer(number, capsys):
    reference = EXERCISES[number].reference
    own = lambda *arguments: reference(*arguments)
    assert grader.grade(number, own) is own
    assert capsys.readouterr().out.startswith(f"{number}  pass: ")
    assert grader.grade(number, reference) is reference
    assert "run the cell with your function first" in capsys.readouterr().out
    assert grader.results[number][0] == "unsolved"


@every_exercise
def test_every_mistake_gets_its_own_sentence(number, capsys):
    sentences = [sentence for _, sentence in EXERCISES[number].misconceptions]
    assert len(sentences) >= 5 and len(set(sentences)) == len(sentences), "at least five, each with its own sentence"
    for wrong, sentence in EXERCISES[number].misconceptions:
        assert grader.grade(number, wrong) is EXERCISES[number].reference
        out = capsys.readouterr().out
        assert out.startswith(f"{number}  not yet: ") and [s for s in sentences if s in out] == [sentence]


def in_form(x, change):
    if isinstance(x, torch.Tensor):
        return x if x.dtype.itemsize == 2 and x.is_floating_point() else change(x.detach().numpy())
    return type(x)(in_form(y, change) for y in x) if isinstance(x, (tuple, list)) else x


@every_exercise
def test_right_answers_as_arrays_and_lists_pass(number, capsys):
    reference = EXERCISES[number].reference
    forms = {"arrays": lambda x: in_form(x, lambda y: y),
             "negative strides": lambda x: in_form(x, lambda y: np.flip(np.flip(y).copy())),
             "lists": lambda x: in_form(x, lambda y: y.tolist()),
             "a generator": lambda x: (y for y in x) if isinstance(x, (tuple, list)) else x}
    for name, change in forms.items():
        grader.grade(number, lambda *arguments: change(reference(*arguments)))
        assert "pass" in (out := capsys.readouterr().out), f"{name}: {out}"


@every_exercise
def test_folded_solution_passes(number, capsys, monkeypatch):
    notebook = lesson_of(number)
    monkeypatch.chdir(HERE)                                          # the set-up moves to the folder above
    names = {}
    exec(next(cell.source for cell in notebook.cells if cell.cell_type == "code"), names)
    order = graded(notebook)
    for earlier in list(order)[: list(order).index(number)]:
        names[order[earlier]] = EXERCISES[earlier].reference
    (solution,) = [body for n, body in folded(notebook, "Solution") if n == number]
    exec(re.search(r"```python\n(.*?)```", solution, re.S)[1], names)
    capsys.readouterr()
    solved = names[order[number]]
    assert grader.grade(number, solved) is solved, capsys.readouterr().out


@every_lesson
def test_lesson_has_what_a_teacher_expects(name):
    notebook, path = LESSONS[name], HERE / f"{name}.ipynb"
    numbers = [n for n in EXERCISES if int(n.split(".")[0]) == int(name[:2])]
    prose = text(notebook, "markdown")
    solutions = [n for n, _ in folded(notebook, "Solution")]
    for number in numbers:
        assert number in graded(notebook), f'{number}: no cell NAME = grade("{number}", NAME)'
        assert number in solutions, f"{number}: no folded Solution {number}"
        heading = rf"Exercise {number}\*\* [●○]{{3}} · \d+ minutes"
        assert re.search(heading, prose), f"its heading should read **Exercise {number}** ●○○ · 5 minutes"
    assert list(graded(notebook)) == numbers == solutions and len(numbers) >= 8
    assert len(folded(notebook, "Hint")) == len(numbers), "every exercise has a folded Hint"
    assert prose.count("**Predict") >= 2 and "uestions" in prose and re.search("minutes|hours", prose[:1500])
    assert path.stat().st_size < 400_000, "over 400 KB: a smaller figure helps"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    ran = [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert ran, "not run once from top to bottom: Restart and Run All, then save"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 4
    assert "not solved yet" in str(outputs)                          # the stubs are committed unsolved
    assert "torch.set_num_threads(1)" in cells[0].source and "block_diagram(" in "".join(c.source for c in cells[:3])
    long = [line for cell in notebook.cells for line in cell.source.split("\n") if len(line) > 120 and line[0] != "|"]
    assert not long, "lines of at most 120 characters"


def test_the_map_has_every_lesson():
    text = (HERE / "README.md").read_text()
    for name, notebook in LESSONS.items():
        assert f"]({name}.ipynb)" in text and int(name[:2]) in diagram.LESSONS, f"{name} is not on the map"


@every_lesson
def test_no_stored_output_answers_a_prediction(name):
    cells, asked = LESSONS[name].cells, False
    for cell in cells:
        if cell.cell_type == "markdown":
            asked = asked or re.search(r"^\*\*Predict(?!\*\*,)", cell.source, re.M)
        elif asked and cell.outputs and "= grade(" not in cell.source:
            hidden = cell.metadata.get("collapsed") and cell.metadata.get("jupyter", {}).get("outputs_hidden")
            assert hidden, f"open under a prediction: {cell.source[:200]}"
            asked = False
    guesses = [cell for cell in cells if cell.cell_type == "code" and re.search(r"^guess\w* = ", cell.source, re.M)]
    assert len(guesses) >= 2, "two predictions ask for a number: guess = ..."


@every_lesson
def test_stored_figures_have_the_size_of_those_that_are_run(name):
    start = next(cell.source for cell in LESSONS[name].cells if cell.cell_type == "code")
    assert re.search(rf'"figure.dpi"[\]:] *=? *{DPI}\b', start), f"the first cell sets figure.dpi to {DPI}"
    for cell in LESSONS[name].cells:
        for output in cell.get("outputs", []):
            if "image/png" not in output.get("data", {}):
                continue
            wide, high = struct.unpack(">II", b64decode(output.data["image/png"])[16:24])
            named = [int(x) for x in re.findall(r"Figure size (\d+)[\d.]*x(\d+)", output.data["text/plain"])[0]]
            assert wide >= 350 and 0.7 < wide / named[0] < 1.35 and 0.7 < high / named[1] < 1.35
            for size in re.findall(r"figsize=\(([\d.]+), ([\d.]+)\)", cell.source)[:1]:
                assert named == [int(DPI * float(x) + 0.01) for x in size], "stored with other dots per inch"


@pytest.mark.parametrize("arch", ["powernorm", "angpt"])
def test_diagnosis_by_layer_changes_nothing(arch, tmp_path, monkeypatch):
    monkeypatch.chdir(HERE.parent)
    x = torch.arange(64).view(2, 32)
    watches, logs = (diagnose((x, x + 1)), None), []
    for watch in watches:
        config = TrainConfig(arch=arch, n_layer=2, n_head=2, n_embd=16, block_size=32, batch_size=4,
                             total_batch_size=128, max_steps=4, eval_interval=2, eval_tokens=512, log_interval=1,
                             device="cpu", dtype="float32", compile="false", out_dir=str(tmp_path / str(watch is None)))
        logs.append(train(config, watch=watch, say=None))
    assert [r["val_loss"] for r in logs[0] if "val_loss" in r] == [r["val_loss"] for r in logs[1] if "val_loss" in r]
    first, last = logs[0][0], logs[0][-1]
    assert len(last["residual_norm"]) == 3 and len(last["grad_l1"]["w_down"]) == 2 and len(last["grad_l1"]["wte"]) == 1
    assert first["momentum_var"]["w_o"] == [0, 0] and min(last["momentum_var"]["w_o"]) > 0
    assert max(last["row_norm_max"]["w_up"]) >= max(last["row_norm"]["w_up"]) > 0
    if arch == "angpt":
        assert max(last["row_norm_max"]["w_up"]) < 1 + 1e-5 and abs(first["scale"]["alpha_a"][0] - 0.05) < 1e-5
        assert first["residual_norm"][0] == pytest.approx(1, abs=1e-4)
        assert first["scale"]["g"] == pytest.approx([8 ** 0.5] * 2)


@pytest.mark.parametrize("mark", [*diagram.LESSONS, *diagram.PARTS])
def test_the_diagram_marks_each_part(mark, monkeypatch):
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    diagram.block_diagram(mark)
    color = plt.matplotlib.colors.to_rgb(diagram.MARK)
    marked = [patch for patch in shown[0].axes[0].patches if patch.get_facecolor()[:3] == color]
    parts = len(diagram.LESSONS[mark][1]) + 1 if mark in diagram.LESSONS else 1         # and its place on the map
    assert len(marked) == parts + 1                                                     # and the legend's
    with pytest.raises(ValueError, match="no part norm3; there are norm1"):
        diagram.block_diagram("norm3")


def square(x):
    return x * x


@pytest.fixture
def one(monkeypatch):
    """Exercise 1.1 for a test of the grader itself: the square of a vector."""
    def inputs(generator):
        yield "three numbers", torch.randn(3, generator=generator)
        yield "zeros", torch.zeros(2)

    exercise = grader.Exercise(square, inputs, [(lambda x: 2 * x, "That doubles."), (lambda x: x ** 3, "Too often.")])
    monkeypatch.setitem(importlib.import_module("exercises_01").EXERCISES, "1.1", exercise)


@pytest.mark.parametrize("answer, words", [
    (lambda x: 2 * x, ["with three numbers, off by", "right with: zeros", "That doubles."]),
    (lambda x: x ** 3, ["Too often."]),
    (lambda x: 3 * square(x), ["everywhere 3 times what is expected"]),
    (lambda x: square(x) + 0.5, ["everywhere +0.5"]),
    (lambda x: square(x) / 0, ["inf at [0]"]),
    (lambda x: square(x)[:1], ["shape (3,) expected, given shape (1,)"]),
    (lambda x: square(x).sum(), ["shape (3,) expected, given a number"]),
    (lambda x: (x, x), ["shape (3,) expected, given 2 values (shape (3,), shape (3,))"]),
    (lambda x: square(x).bfloat16(), ["torch.float32 expected, given torch.bfloat16"]),
    (lambda x: None, ["nothing was returned"]),
    (lambda x: "x * x", ["'x * x' was returned, expected a number or a tensor"]),
    (lambda x: x.squared(), ["AttributeError", "x.squared()"]),
    (lambda x: 0 * x, ["it is 0 everywhere", "right with: zeros"]),
    (lambda x: x.zero_(), ["You changed x in place", "right with: zeros"]),
])
def test_grader_says_what_is_wrong(one, answer, words, capsys):
    assert grader.grade("1.1", answer) is square
    out = capsys.readouterr().out
    assert out.startswith("1.1  not yet: ") and not [word for word in words if word not in out], out
    assert ("That doubles." in out) == ("That doubles." in words) and out.endswith("going on with the reference\n")


@pytest.mark.parametrize("reference, right, wrong, words", [
    (lambda x: [0.5, x.sum()], lambda x: 0.5 * torch.eye(2)[0], lambda x: (0.5, 1.0), "off by 1 at [1]"),
    (lambda x: torch.tensor([1.0, 2.0]), lambda x: (1, 2.0), lambda x: [1, 2, 3], "(2,) expected, given shape (3,)"),
    (lambda x: True, lambda x: 1, lambda x: False, "1 of 1 answers wrong"),
    (lambda x: [True, False], lambda x: x.new_tensor([1, 0]), lambda x: [True, True], "1 of 2 answers wrong"),
    (lambda x: (x, x.half()), lambda x: (x.double(), x.half()), lambda x: (x, x), "value 2: torch.float16 expected"),
])
def test_grader_compares_numbers_answers_and_dtypes(reference, right, wrong, words, monkeypatch, capsys):
    exercise = grader.Exercise(reference, lambda generator: [("two zeros", torch.zeros(2))], [])
    monkeypatch.setitem(importlib.import_module("exercises_01").EXERCISES, "1.1", exercise)
    assert grader.grade("1.1", right) is right
    assert grader.grade("1.1", wrong) is reference and words in capsys.readouterr().out


def test_an_exercise_is_added_as_the_grader_says(monkeypatch, capsys):
    example = grader.__doc__[grader.__doc__.index("    def unit_rows"): grader.__doc__.index("Mistakes that are")]
    exercises = importlib.import_module("exercises_01").EXERCISES
    monkeypatch.setattr(importlib.import_module("exercises_01"), "EXERCISES", dict(exercises))
    new = {}
    exec(textwrap.dedent(example), {"torch": torch, "partial": partial, "Exercise": grader.Exercise, "EXERCISES": new})
    ((number, exercise),) = new.items()
    importlib.import_module("exercises_01").EXERCISES[number] = exercise
    solved = lambda x: torch.nn.functional.normalize(x, dim=-1)
    assert grader.grade(number, solved) is solved
    assert grader.grade(number, exercise.misconceptions[0][0]) is exercise.reference
    assert exercise.misconceptions[0][1] in capsys.readouterr().out


def test_grader_goes_on_with_an_unsolved_exercise(one, capsys):
    def stub(x):
        raise NotImplementedError

    assert grader.grade("1.1", stub) is square
    assert capsys.readouterr().out == "1.1  not solved yet, going on with the reference\n"
    grader.grade("1.1", lambda x: x.long().softmax(-1))              # of which torch says that it is not implemented
    assert "not solved yet" not in capsys.readouterr().out
    close = lambda x: square(x) + 1e-7
    assert grader.grade("1.1", close) is close and "largest difference 1e-07" in capsys.readouterr().out
    with pytest.raises(KeyError, match="no exercise '1.99'; there are 1.1, "):
        grader.grade("1.99", square)
    for number, function in ((1.2, close), (close, "1.2"), ("1.2", torch.ones(2))):
        with pytest.raises(TypeError, match="takes the number in quotes"):
            grader.grade(number, function)


def ask(monkeypatch, reference, *given, mistakes=(), **options):
    """What the grader says to answers on such inputs: a function for it."""
    exercise = grader.Exercise(reference, lambda generator: ((f"input {i}", *x) for i, x in enumerate(given)),
                               list(mistakes), **options)
    monkeypatch.setitem(importlib.import_module("exercises_01").EXERCISES, "1.1", exercise)

    def said(answer, capsys):
        grader.grade("1.1", answer)
        return capsys.readouterr().out
    return said


M = torch.tensor([[1.0, 2.0, -3.0], [0.5, 4.0, 2.0]], dtype=torch.float64)


@pytest.mark.parametrize("answer", [
    lambda x: x.numpy()[::-1][::-1], lambda x: np.flip(np.flip(x.numpy())), lambda x: x.tolist(), lambda x: list(x),
    lambda x: (row.numpy() for row in x), lambda x: [row.tolist() for row in x], lambda x: map(list, x.numpy()),
    lambda x: np.array(x.tolist(), dtype=object).astype(np.float32)])
def test_right_in_an_unusual_form(monkeypatch, capsys, answer):
    assert "pass" in ask(monkeypatch, lambda x: x, (M,))(answer, capsys)
    assert "pass" in ask(monkeypatch, lambda x: tuple(x), (M,))(answer, capsys)


def test_stacked_lists_generators_and_numbers(monkeypatch, capsys):
    said = ask(monkeypatch, lambda x: [x, 2 * x], (M,))
    for answer in (lambda x: torch.stack([x, x + x]), lambda x: (k * x for k in (1, 2)),
                   lambda x: np.stack((x, 2 * x))):
        assert "pass" in said(answer, capsys)
    assert "pass" in ask(monkeypatch, lambda x: (1.0, 2), (M,))(lambda x: (k for k in np.arange(1, 3)), capsys)


@pytest.mark.parametrize("answer, words", [
    (lambda x: 1 / x, "upside down"), (lambda x: -x, "the sign is the other one"), (lambda x: x * x, "the square of"),
    (lambda x: x.flip(-1), "in reverse order"), (lambda x: 4 * x, "everywhere 4 times"), (lambda x: x.exp(), "expone"),
    (lambda x: x + 0.25, "everywhere +0.25"), (lambda x: x.mT, "expected, given shape (3, 2); transposed"),
    (lambda x: x * torch.tensor([[2.0], [3.0]]), "each row, with a number of its own: 2 to 3 times"),
    (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), "each column, with a number of its own: +1 to +3"),
    (lambda x: x.reshape(6), "; the numbers are right, the shape is not"), (lambda x: 0 * x, "it is 0 everywhere"),
    (lambda x: x + x.abs().sqrt(), "6 of 6 entries, all too large"), (lambda x: x * (1 - 0.1 * x ** 2), "entries"),
    (lambda x: x * (1 + 0.1 * x ** 2), "6 of 6 entries, all too large in size")])
def test_a_relation_to_what_is_right_is_named(monkeypatch, capsys, answer, words):
    assert words in ask(monkeypatch, lambda x: x, (M,), (M[:, :2] + 5,))(answer, capsys) or words in ask(
        monkeypatch, lambda x: x, (M,))(answer, capsys)


def test_single_numbers_are_compared_over_all_inputs(monkeypatch, capsys):
    said = ask(monkeypatch, lambda n: n ** 0.5, (2.0,), (3.0,), (10.0,))
    assert "upside down" in said(lambda n: n ** -0.5, capsys) and "2 times" in said(lambda n: 2 * n ** 0.5, capsys)
    assert "too small" in said(lambda n: n ** 0.4, capsys)
    uneven = lambda x: x + 5e-5 * torch.tensor([1.0, 2.0, -1.0])
    assert "everywhere" not in ask(monkeypatch, lambda x: x, (M,))(uneven, capsys)


def test_the_other_axis_is_named(monkeypatch, capsys):
    said = ask(monkeypatch, lambda x: x / x.norm(dim=-1, keepdim=True), (M,))
    assert "the other axis" in said(lambda x: x / x.norm(dim=0, keepdim=True), capsys)
    assert "the other axis" in ask(monkeypatch, lambda x: x.sum(-1), (M,))(lambda x: x.sum(0), capsys)


def test_parts_of_a_tuple_are_named(monkeypatch, capsys):
    said = ask(monkeypatch, lambda x: (x, x.sum(0), x.sum(1)), (M,), parts=("dx", "dweight", "dbias"))
    out = said(lambda x: (x, 2 * x.sum(0), x.sum(1)), capsys)
    assert "dweight: off by" in out and "right: dx, dbias" in out
    out = ask(monkeypatch, lambda x: (1.0, 2.0), (M,), parts=("mean", "variance"))(lambda x: (1.0, 3.0), capsys)
    assert "variance: off by 1, too large" in out and "right: mean" in out
    said = ask(monkeypatch, lambda x: (x.sum(), x.max(), x.max() > 3), (M,), (M - 2,), (M - 4,),
               parts=("sum", "max", "large"), mistakes=[(lambda x: (x.sum(), x.max(), True), "always")])
    assert "the values are right, in another order" in said(lambda x: (x.max(), x.sum(), x.max() > 3), capsys)
    assert "always" in (out := said(lambda x: (x.sum(), x.max(), True), capsys)) and "order" not in out
    assert "always" not in said(lambda x: (x.sum(), x.max(), x.max() > 1), capsys)       # yes, but for one of two only


def test_two_known_mistakes_at_once(monkeypatch, capsys):
    def rms(x, *, root=0.5, eps=0.1, dim=-1):
        return x / ((x * x).mean(dim, keepdim=True) + eps) ** root
    said = ask(monkeypatch, rms, (M,), (M + 1,), mistakes=[
        (partial(rms, root=1), "no root"), (partial(rms, eps=0), "no eps"), (partial(rms, dim=0), "dim")])
    out = said(lambda x: x / (x * x).mean(-1, keepdim=True), capsys)
    assert "no root" in out and "no eps" in out and "dim" not in out
    said = ask(monkeypatch, lambda x: (x, x + 1), (M,), mistakes=[
        (lambda x: (2 * x, x + 1), "twice"), (lambda x: (x, x - 1), "minus"), (lambda x: (x + 3, x + 4), "three")])
    out = said(lambda x: (2 * x, x - 1), capsys)                     # one for each part
    assert "twice" in out and "minus" in out and "three" not in out


def test_the_input_that_went_wrong_is_handed_out(monkeypatch, capsys):
    said = ask(monkeypatch, lambda x: x.abs(), (M.abs(),), (M,))
    assert 'inputs("1.1")' in said(lambda x: x, capsys) and torch.equal(grader.inputs("1.1")[0], M)


def test_no_key_of_yes_or_no_questions_is_printed(monkeypatch, capsys):
    about = {"input 0": "zero is even", "input 3": "three is odd"}
    said = ask(monkeypatch, lambda n: n % 2 == 0, *((n,) for n in range(5)), about=about)
    out = said(lambda n: True, capsys)
    assert "2 of 5 answers wrong" in out and "Look again at input 1." in out and "input 3" not in out
    out = said(lambda n: n == 1, capsys)
    assert "4 of 5 answers wrong\n     zero is even" in out and "input" not in out
    said = ask(monkeypatch, lambda: [True, False, True], (), about={1: "the second"})
    assert "2 of 3 answers wrong\n     the second" in said(lambda: [True, True, False], capsys)


def test_a_shortcut_does_not_pass(monkeypatch, capsys):
    said = ask(monkeypatch, lambda x: x.norm(), (M,), without=("norm", "normalize"))
    assert "without norm" in said(lambda x: x.norm(), capsys) and "pass" in said(lambda x: (x * x).sum() ** 0.5, capsys)
    assert "without norm" in said(lambda x: (lambda y: torch.linalg.norm(y))(x), capsys)


@every_lesson
def test_untouched_notebook_runs(name, runs):
    row = runs[name].result()
    print(f"{name}: {row['seconds']} s")
    assert row["note"] == "" and row["unsolved"] == list(graded(LESSONS[name])), row


def test_a_class_of_notebooks_is_graded(runs):
    out, rows = runs["class"].result()
    good, endless, gone = rows["good.ipynb"], rows["endless.ipynb"], rows["gone.ipynb"]
    assert good["solved"] == "1.1" and good["wrong"] == "1.2" and good["unsolved"].startswith("1.3 1.4 ")
    assert "cell 2: ZeroDivisionError" in good["note"] and "sample variance" in good["mistakes"]
    assert "sample variance" in out
    assert endless["solved"] == "1.3" and endless["note"] == "stopped after 60 s; in cell 2 of 2"
    assert gone["solved"] == gone["wrong"] == "" and "broken off: 7; in cell 2 of 2" in gone["note"]
    assert "broken off" in rows["broken.ipynb"]["note"] and rows["broken.ipynb"]["unsolved"].startswith("1.1 1.2")
