"""
Test the notebooks, the exercises, the grader and the grading of a class.

    python -m pytest lessons                        # everything
    python -m pytest lessons -k "not notebook"      # without running the notebooks
"""

import ast
import csv
import importlib
import math
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import statistics
import sys
import textwrap
import time
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations, zip_longest
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
import torch
from PIL import Image
from matplotlib.backends.backend_agg import FigureCanvasAgg

import diagram
import grade_class
import grader
import mistakes
import run_cells
from answers import aligned, arguments
from lessons import begin
from lessons.extras import variants
from model import ARCHS

HERE = Path(__file__).resolve().parents[1]
LESSONS = {path.stem: nbformat.read(path, 4) for path in sorted(HERE.glob("[0-9]*.ipynb"))}
EXERCISES = {
    number: exercise
    for name in LESSONS
    for number, exercise in importlib.import_module(f"exercises_{name[:2]}").EXERCISES.items()
}
DPI = 80  # dots per inch of every figure

every_lesson = pytest.mark.parametrize("name", LESSONS)
every_exercise = pytest.mark.parametrize("number", EXERCISES)


def lesson_of(number):
    """Return the notebook that has this exercise."""
    return next(
        notebook for name, notebook in LESSONS.items() if int(name[:2]) == int(number.split(".")[0])
    )


def text(notebook, kind):
    """Return the sources of all cells of one kind in one string."""
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == kind)


def folded(notebook, title):
    """Return (number, body) for everything that is folded under this title."""
    pattern = rf"<summary>{title} ?([\d.]*)</summary>(.*?)</details>"
    return re.findall(pattern, text(notebook, "markdown"), re.S)


def graded(notebook):
    """Return a dict in the order of the notebook: exercise number -> name of its function."""
    found = re.findall(r'^(\w+) = grade\("([\d.]+)", \1\)', text(notebook, "code"), re.M)
    return {number: name for name, number in found}


def a_class_graded(folder):
    """Grade the notebooks of CLASS in a folder.

    Return what grade_class.py printed, the rows of grades.csv by notebook, and the folder.
    """
    for name, cells in CLASS.items():
        notebook(folder / name, *cells)
    (folder / "broken.ipynb").write_text('not a notebook, grade("1.1", f)')
    names = [*CLASS, "broken.ipynb"]
    command = [
        sys.executable,
        str(HERE / "grading/grade_class.py"),
        "*/01.ipynb",  # not replaced by a shell, as on Windows
        *names[2:],
        "--seconds=60",
        "--cell_seconds=6",
    ]
    done = subprocess.run(
        [*command, "--json=out", "--jobs=3"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        # This console lacks a character of a name. The table has to be printed all the same.
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    with open(folder / "grades.csv", newline="", encoding="utf-8") as file:
        rows = {row["notebook"]: row for row in csv.DictReader(file)}
    assert list(rows) == names
    return done.stdout, rows, folder


# Work that only makes a figure or a printed number more exact is cut in tests.
SHORTER = {
    r"rounds=\d+\)": "rounds=2)",
    r"\bsteps=(39|100),": "steps=6,",
    r"(train_small\(.*), 100, ": r"\1, 12, ",
    r"for seed in range\(4\)\]": "for seed in (1,)]",
    r"\(160,\), generator": "(40,), generator",
    r"zip\(\(1, 2, 3\), \\\"s\^o": r"zip((1,), \"s",
    r"\b(count=512|windows=128)": r"\1 // 8",
    r"spaced_windows\(1024\)": "spaced_windows(64)",
    r"\[:128\]": "[:32]",
    r"\[128:\]": "[32:]",
    r"range\(0, 96 \* 9, 9\)": "range(0, 24 * 9, 9)",
    r"MODELS\.items\(\)(?=:\\n\",\s+\"    large)": "[*MODELS.items()][::6]",
}


@pytest.fixture(scope="session", autouse=True)
def runs(request, tmp_path_factory):
    """Start running all notebooks, one at a time, beside the other tests.

    Return a dict of futures: a lesson's name -> the row of its notebook, and "class" -> what
    a_class_graded returns. Training runs are cut to LESSONS_STEPS steps, and loops as SHORTER says.
    """
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if "untouched_notebook" in item.name
    ]
    steps = int(os.environ.get("LESSONS_STEPS", 2))
    if not (HERE.parent / "data/stdlib/meta.json").exists():
        subprocess.run(
            [sys.executable, "prepare.py"], cwd=HERE.parent, check=True, stdout=subprocess.DEVNULL
        )
    # Of two cores the notebooks take one and the tests the other, so a second thread would only be
    # waited for.
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(1)
    other = ThreadPoolExecutor(1)
    graded = [
        other.submit(a_class_graded, tmp_path_factory.mktemp("class"))
        for item in request.session.items
        if item.name == "test_a_class_of_notebooks_is_graded"
    ]
    folder = tmp_path_factory.mktemp("lessons")
    for name in names:
        source = (HERE / f"{name}.ipynb").read_text(encoding="utf-8")
        for long, short in SHORTER.items():
            source = re.sub(long, short, source)
        (folder / f"{name}.ipynb").write_text(source, encoding="utf-8")
    found = {
        name: pool.submit(grade_class.run_notebook, folder / f"{name}.ipynb", 300, steps)
        for name in names[::-1]
    }
    yield found | dict(zip(["class"], graded))
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("long", SHORTER)
def test_what_is_cut_in_tests_is_in_some_lesson(long):
    """Each pattern of SHORTER still finds something, although the lessons have been edited."""
    sources = [(HERE / f"{name}.ipynb").read_text(encoding="utf-8") for name in LESSONS]
    assert any(re.search(long, source) for source in sources)


@every_exercise
def test_reference_passes_and_is_refused_when_it_is_handed_in(number, capsys):
    """The reference is graded as right; the grader's own function handed back is not an answer."""
    reference = EXERCISES[number].reference
    own = lambda *arguments: reference(*arguments)
    assert grader.grade(number, own) is own
    assert capsys.readouterr().out.startswith(f"{number}  pass: ")
    assert grader.grade(number, reference) is reference
    assert "run the cell with your function first" in capsys.readouterr().out
    assert grader.results[number][0] == "unsolved"


@every_exercise
def test_each_known_mistake_gets_its_own_sentence_and_no_other(number, capsys):
    """Each wrong answer in an exercise's misconceptions prints its sentence, and no other's."""
    sentences = [sentence for _, sentence in EXERCISES[number].misconceptions]
    assert len(sentences) >= 5 and len(set(sentences)) == len(
        sentences
    ), "at least five, each with its own sentence"
    for wrong, sentence in EXERCISES[number].misconceptions:
        assert grader.grade(number, wrong) is EXERCISES[number].reference
        out = capsys.readouterr().out
        assert out.startswith(f"{number}  not yet: ") and [s for s in sentences if s in out] == [
            sentence
        ]


def in_form(x, change):
    if isinstance(x, torch.Tensor):
        return x if x.dtype.itemsize == 2 and x.is_floating_point() else change(x.detach().numpy())
    return type(x)(in_form(y, change) for y in x) if isinstance(x, (tuple, list)) else x


@every_exercise
def test_right_answers_pass_as_arrays_lists_and_generators(number, capsys):
    """The form of a right answer does not matter."""
    reference = EXERCISES[number].reference
    forms = {
        "arrays": lambda x: in_form(x, lambda y: y),
        "negative strides": lambda x: in_form(x, lambda y: np.flip(np.flip(y).copy())),
        "lists": lambda x: in_form(x, lambda y: y.tolist()),
        "a generator": lambda x: (y for y in x) if isinstance(x, (tuple, list)) else x,
    }
    for name, change in forms.items():
        grader.grade(number, lambda *arguments: change(reference(*arguments)))
        assert "pass" in (out := capsys.readouterr().out), f"{name}: {out}"


@every_exercise
def test_the_folded_solution_passes(number, capsys, monkeypatch):
    """The solution printed in the lesson is right, given the exercises before it."""
    notebook = lesson_of(number)
    monkeypatch.chdir(HERE)  # the set-up moves to the folder above
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
def test_a_lesson_makes_the_dataset_before_it_reads_it(name):
    """On a fresh clone there is none, and both prepare() and train() make it."""
    makers = ["prepare", "train"]
    for statement in ast.parse(text(LESSONS[name], "code")).body:
        source = ast.unparse(statement)
        makes_it = re.search(rf"\b({'|'.join(makers)})\(", source)
        if isinstance(statement, ast.FunctionDef):
            # The dataset is made where this function is called.
            if makes_it:
                makers.append(statement.name)
        elif makes_it:
            return
        else:
            assert "data/stdlib" not in source


def in_order(what, found, numbers):
    for here, expected in zip_longest(found, numbers, fillvalue="nothing"):
        assert here == expected, (
            f"{what} are in the order {' '.join(found)}, EXERCISES in the order "
            f"{' '.join(numbers)}: where EXERCISES has {expected}, there is {here}. Give both the "
            "same order; a new number comes last in both"
        )


@every_lesson
def test_the_lesson_has_exercises_hints_solutions_and_outputs_in_order(name):
    """Each exercise has its heading, cells, hint and solution; the notebook is stored as run."""
    notebook, path = LESSONS[name], HERE / f"{name}.ipynb"
    numbers = [n for n in EXERCISES if int(n.split(".")[0]) == int(name[:2])]
    prose = text(notebook, "markdown")
    solutions = [n for n, _ in folded(notebook, "Solution")]
    for number in numbers:
        assert number in graded(notebook), f'{number}: no cell NAME = grade("{number}", NAME)'
        assert number in solutions, f"{number}: no folded Solution {number}"
        heading = rf"Exercise {number}\*\* [●○]{{3}} · \d+ minutes"
        assert re.search(
            heading, prose
        ), f"its heading should read **Exercise {number}** ●○○ · 5 minutes"
    in_order("its grade cells", list(graded(notebook)), numbers)
    in_order("its folded solutions", solutions, numbers)
    assert len(numbers) >= 8
    assert len(folded(notebook, "Hint")) == len(numbers), "every exercise has a folded Hint"
    assert (
        prose.count("**Predict") >= 2
        and "uestions" in prose
        and re.search("minutes|hours", prose[:1500])
    )
    size = path.stat().st_size // 1000
    assert size < 400, (
        f"{size} KB, under 400 expected. Restart and Run All: begin() saves few colors. "
        "If that is not enough: a smaller figsize, fewer figures, or a shorter printout"
    )
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    ran = [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert ran, "not run once from top to bottom: Restart and Run All, then save"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 4
    assert "not solved yet" in str(outputs)  # the stubs are committed unsolved
    assert "torch.set_num_threads(1)" in cells[0].source and "block_diagram(" in "".join(
        c.source for c in cells[:3]
    )
    long = [
        line
        for cell in notebook.cells
        for line in cell.source.split("\n")
        if len(line) > 120 and line[0] != "|"
    ]
    assert not long, "lines of at most 120 characters"


@every_lesson
def test_an_exercise_refuses_autograd_if_its_text_says_so(name):
    """No other exercise mentions autograd, so that this test needs no list of phrases."""
    for cell in LESSONS[name].cells:
        if heading := re.search(r"\*\*Exercise (\d+\.\d+)", cell.source):
            number = heading[1]
            refused = set(grader.AUTOGRAD) <= set(EXERCISES[number].without)
            assert ("autograd" in cell.source) == refused, number


def test_readme_and_diagram_name_every_lesson():
    """Each notebook is on the README's map and on the diagram's."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    for name, notebook in LESSONS.items():
        assert (
            f"]({name}.ipynb)" in text and int(name[:2]) in diagram.LESSONS
        ), f"{name} is not on the map"


@every_lesson
def test_the_output_below_a_prediction_is_stored_folded(name):
    """No output that answers a prediction is stored open."""
    cells, asked = LESSONS[name].cells, False
    for cell in cells:
        if cell.cell_type == "markdown":
            asked = asked or re.search(r"^\*\*Predict(?!\*\*,)", cell.source, re.M)
        elif asked and cell.outputs and "= grade(" not in cell.source:
            hidden = cell.metadata.get("collapsed") and cell.metadata.get("jupyter", {}).get(
                "outputs_hidden"
            )
            assert hidden, f"open under a prediction: {cell.source[:200]}"
            asked = False
    guesses = [
        cell
        for cell in cells
        if cell.cell_type == "code" and re.search(r"^guess\w* = ", cell.source, re.M)
    ]
    assert len(guesses) >= 2, "two predictions ask for a number: guess = ..."


@every_lesson
def test_no_stored_results_stand_in_the_source_of_a_folded_cell(name):
    """A folded output does not help if the source above it has a table of losses by seed."""
    for cell in LESSONS[name].cells:
        if cell.metadata.get("jupyter", {}).get("outputs_hidden"):
            table = re.search(r"^ *\d+: [\[(]*-?\d+\.\d+, ", cell.source, re.M)
            assert not table, f"move it to exercises_0N.py or assets: {table and table.group()}"


@every_lesson
def test_stored_figures_have_the_size_that_the_code_asks_for(name):
    """A stored figure has the dots per inch and the figsize of its cell."""
    start = next(cell.source for cell in LESSONS[name].cells if cell.cell_type == "code")
    assert re.search(
        rf'"figure.dpi"[\]:] *=? *{DPI}\b', start
    ), f"the first cell sets figure.dpi to {DPI}"
    for cell in LESSONS[name].cells:
        for output in cell.get("outputs", []):
            if "image/png" not in output.get("data", {}):
                continue
            wide, high = struct.unpack(">II", b64decode(output.data["image/png"])[16:24])
            named = [
                int(x)
                for x in re.findall(r"Figure size (\d+)[\d.]*x(\d+)", output.data["text/plain"])[0]
            ]
            assert wide >= 350 and 0.7 < wide / named[0] < 1.35 and 0.7 < high / named[1] < 1.35
            for size in re.findall(r"figsize=\(([\d.]+), ([\d.]+)\)", cell.source)[:1]:
                assert named == [
                    int(DPI * float(x) + 0.01) for x in size
                ], "stored with other dots per inch"


def test_begin_saves_small_pictures_that_look_alike(tmp_path, monkeypatch):
    """begin() reduces the colors of pictures: smaller files, no visible change."""
    figure = plt.figure(figsize=(3, 2), dpi=DPI)
    for line in range(5):
        figure.text(0.1, line / 5, "Antialiased", color=f"C{line}", size=20)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    whole = Image.fromarray(np.asarray(canvas.buffer_rgba()))
    whole.save(tmp_path / "whole.png")
    monkeypatch.setattr(FigureCanvasAgg, "print_png", None)  # put back after the test
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "ipykernel", begin)  # as in a notebook
    monkeypatch.chdir(HERE)
    begin.begin()
    figure.savefig(tmp_path / "small.png")
    small = Image.open(tmp_path / "small.png").convert("RGBA")
    assert (
        small.size == whole.size and np.abs(np.asarray(small, float) - np.asarray(whole)).max() < 50
    )
    assert (tmp_path / "small.png").stat().st_size < 0.6 * (tmp_path / "whole.png").stat().st_size


@pytest.mark.parametrize("mark", [*diagram.LESSONS, *diagram.PARTS])
def test_block_diagram_marks_the_parts_it_is_asked_for(mark, monkeypatch):
    """block_diagram fills the boxes of a lesson or part, and refuses unknown parts."""
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    diagram.block_diagram(mark)
    color = plt.matplotlib.colors.to_rgb(diagram.MARK)
    marked = [patch for patch in shown[0].axes[0].patches if patch.get_facecolor()[:3] == color]
    parts = (
        len(diagram.LESSONS[mark][1]) + 1 if mark in diagram.LESSONS else 1
    )  # and its place on the map
    assert len(marked) == parts + 1  # and the legend's
    with pytest.raises(ValueError, match="no part norm3; there are norm1"):
        diagram.block_diagram("norm3")


def test_placements_names_every_arch_and_no_text_overlaps():
    """The map of placements names each architecture, readably."""
    fig = diagram.placements()
    fig.set_dpi(80)
    assert fig.bbox.width == 900  # a notebook's
    texts = [text for text in fig.axes[0].texts if text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    for a, b in combinations(boxes, 2):
        assert not a.overlaps(b)
    assert all(fig.bbox.contains(x.x0, x.y0) and fig.bbox.contains(x.x1, x.y1) for x in boxes)
    assert min(text.get_fontsize() for text in texts) >= 9
    said = " ".join(text.get_text() for text in texts)
    for arch in [
        arch for arch, block in ARCHS.items() if block.__module__ in ("model", variants.__name__)
    ]:
        assert (arch in said) == ("_" not in arch), arch  # ngpt_slerp's stand where ngpt's do


def square(x):
    return x * x


@pytest.fixture
def one(monkeypatch):
    """Replace exercise 1.1 by a simple one, the square of a vector, to test the grader itself."""

    def inputs(generator):
        yield "three numbers", torch.randn(3, generator=generator)
        yield "zeros", torch.zeros(2)

    exercise = grader.Exercise(
        square, inputs, [(lambda x: 2 * x, "That doubles."), (lambda x: x**3, "Too often.")]
    )
    monkeypatch.setitem(importlib.import_module("exercises_01").EXERCISES, "1.1", exercise)


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda x: 2 * x, ["with three numbers, off by", "right with: zeros", "That doubles."]),
        (lambda x: x**3, ["Too often."]),
        (lambda x: 3 * square(x), ["everywhere 3 times what is expected"]),
        (lambda x: square(x) + 0.5, ["everywhere 0.5 too large"]),
        (lambda x: square(x) / 0, ["inf at [0]"]),
        (lambda x: square(x)[:1], ["expected shape (3,), got shape (1,)"]),
        (
            lambda x: square(x).sum(),
            ["expected shape (3,), got a number", "reduce over everything"],
        ),
        (lambda x: (x, x), ["expected shape (3,), got 2 values (shape (3,), shape (3,))"]),
        (lambda x: [], ["expected shape (3,), got 0 values ()"]),
        (lambda x: square(x).bfloat16(), ["expected torch.float32, got torch.bfloat16"]),
        (lambda x: None, ["the function returned None", "ends without a `return`"]),
        (lambda x: (x, None), ["the function returned 2 values, and value 2 is None"]),
        (lambda x: "x * x", ["the function returned 'x * x'; expected a number or a tensor"]),
        (lambda x: x.squared(), ["AttributeError", "x.squared()"]),
        (lambda x: 0 * x, ["Yours is 0 for every input.", "right with: zeros"]),
        (lambda x: x.zero_(), ["You changed x in place", "right with: zeros"]),
    ],
)
def test_grade_describes_a_wrong_answer(one, answer, words, capsys):
    """grade prints where a wrong answer differs and a sentence about it."""
    assert grader.grade("1.1", answer) is square
    out = capsys.readouterr().out
    assert out.startswith("1.1  not yet: ") and out.endswith(grader.CONTINUES + "\n"), out
    assert not [word for word in words if word not in out], out
    assert ("That doubles." in out) == ("That doubles." in words), out


@pytest.mark.parametrize(
    "reference, right, wrong, words",
    [
        (
            lambda x: [0.5, x.sum()],
            lambda x: 0.5 * torch.eye(2)[0],
            lambda x: (0.5, 1.0),
            "off by 1 at [1]",
        ),
        (
            lambda x: torch.tensor([1.0, 2.0]),
            lambda x: (1, 2.0),
            lambda x: [1, 2, 3],
            "expected shape (2,), got shape (3,)",
        ),
        (lambda x: True, lambda x: 1, lambda x: False, "1 of 1 answers are wrong"),
        (
            lambda x: [True, False],
            lambda x: x.new_tensor([1, 0]),
            lambda x: [True, True],
            "1 of 2 answers are wrong",
        ),
        (
            lambda x: (x, x.half()),
            lambda x: (x.double(), x.half()),
            lambda x: (x, x),
            "value 2: expected torch.float16",
        ),
    ],
)
def test_grade_compares_numbers_booleans_and_dtypes(
    reference, right, wrong, words, monkeypatch, capsys
):
    """Answers in another form are accepted; half precision where it is not asked for is not."""
    exercise = grader.Exercise(reference, lambda generator: [("two zeros", torch.zeros(2))], [])
    monkeypatch.setitem(importlib.import_module("exercises_01").EXERCISES, "1.1", exercise)
    assert grader.grade("1.1", right) is right
    assert grader.grade("1.1", wrong) is reference and words in capsys.readouterr().out


def test_the_example_in_the_grader_docstring_works(monkeypatch, capsys):
    """An exercise written as grader.py's docstring shows can be graded."""
    example = grader.__doc__[
        grader.__doc__.index("    def unit_rows") : grader.__doc__.index("Mistakes that are")
    ]
    exercises = importlib.import_module("exercises_01").EXERCISES
    monkeypatch.setattr(importlib.import_module("exercises_01"), "EXERCISES", dict(exercises))
    new = {}
    exec(
        textwrap.dedent(example),
        {"torch": torch, "partial": partial, "Exercise": grader.Exercise, "EXERCISES": new},
    )
    ((number, exercise),) = new.items()
    importlib.import_module("exercises_01").EXERCISES[number] = exercise
    solved = lambda x: torch.nn.functional.normalize(x, dim=-1)
    assert grader.grade(number, solved) is solved
    assert grader.grade(number, exercise.misconceptions[0][0]) is exercise.reference
    assert exercise.misconceptions[0][1] in capsys.readouterr().out


def test_grade_returns_the_reference_for_an_unsolved_exercise(one, capsys):
    """A stub, and wrong arguments of grade, get a clear message."""

    def stub(x):
        raise NotImplementedError

    assert grader.grade("1.1", stub) is square
    assert capsys.readouterr().out.startswith("1.1  not solved yet: the notebook continues")
    # torch raises NotImplementedError here, too.
    grader.grade("1.1", lambda x: x.long().softmax(-1))
    assert "not solved yet" not in capsys.readouterr().out
    close = lambda x: square(x) + 1e-7
    assert (
        grader.grade("1.1", close) is close
        and "largest difference 1e-07" in capsys.readouterr().out
    )
    for number, words in (
        ("1.99", "no exercise '1.99'; there are 1.1, "),
        ("9.1", "there is no lesson 9"),
        ("x.1", "there is no lesson x"),
    ):
        with pytest.raises(KeyError, match=words):
            grader.grade(number, square)
    for number, function in ((1.2, close), (close, "1.2"), ("1.2", torch.ones(2))):
        with pytest.raises(TypeError, match="takes the number in quotes"):
            grader.grade(number, function)


def test_the_largest_difference_is_that_of_all_inputs(monkeypatch, capsys):
    said = ask(monkeypatch, lambda x: x, (0 * M,), (M,))
    assert "largest difference 1e-06" in said(lambda x: x + 1e-6 * (x == 0), capsys)


def test_a_missing_package_is_not_called_a_missing_lesson(monkeypatch):
    monkeypatch.delitem(sys.modules, "exercises_01")
    monkeypatch.setitem(sys.modules, "pieces", None)
    with pytest.raises(ModuleNotFoundError, match="pieces"):
        grader.find("1.1")


def test_a_long_list_of_inputs_is_cut():
    assert grader.some_of("abcd") == "a; b; c; d"
    assert grader.some_of("abcdef") == "a; b; c; d; and 2 more"


def ask(monkeypatch, reference, *given, mistakes=(), **options):
    """Make an exercise of these inputs.

    Return a function that takes an answer and capsys and returns what the grader prints, without
    the line of the answer in which an error was raised. That line is often one of a table below,
    which has the expected words, too.
    """
    exercise = grader.Exercise(
        reference,
        lambda generator: ((f"input {i}", *x) for i, x in enumerate(given)),
        list(mistakes),
        **options,
    )
    monkeypatch.setitem(importlib.import_module("exercises_01").EXERCISES, "1.1", exercise)

    def said(answer, capsys):
        grader.grade("1.1", answer)
        return re.sub(r", line \d+: .*", "", capsys.readouterr().out)

    return said


M = torch.tensor([[1.0, 2.0, -3.0], [0.5, 4.0, 2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: x.numpy()[::-1][::-1],
        lambda x: np.flip(np.flip(x.numpy())),
        lambda x: x.tolist(),
        lambda x: list(x),
        lambda x: (row.numpy() for row in x),
        lambda x: [row.tolist() for row in x],
        lambda x: map(list, x.numpy()),
        lambda x: np.array(x.tolist(), dtype=object).astype(np.float32),
        lambda x: x.to_sparse(),
    ],
)
def test_a_right_answer_passes_in_an_unusual_form(monkeypatch, capsys, answer):
    """Arrays, lists, generators and maps of a right answer pass."""
    assert "pass" in ask(monkeypatch, lambda x: x, (M,))(answer, capsys)
    assert "pass" in ask(monkeypatch, lambda x: tuple(x), (M,))(answer, capsys)


def test_a_factor_is_everywhere_only_if_it_holds_for_small_inputs_too(monkeypatch, capsys):
    """Inputs with large numbers do not hide those with small ones."""
    said = ask(monkeypatch, lambda x: x, (M,), (1e8 * M,), (0 * M,))
    assert "Yours is everywhere 2 times" in said(lambda x: 2 * x, capsys)
    assert "Yours is" not in said(lambda x: (2 if x.abs().max() > 99 else 3) * x, capsys)


def test_what_an_answer_raised_is_in_the_results(monkeypatch):
    """A teacher's table says that a library was missing."""
    ask(monkeypatch, lambda x: x, (torch.ones(2),), (torch.ones(3),))

    def answer(x):
        import not_there

    grader.grade("1.1", answer)
    said = grader.results["1.1"][1]
    assert said[-1] == "ModuleNotFoundError: No module named 'not_there'"
    assert said.count(said[-1]) == 1
    grader.grade("1.1", no_return)
    assert not any("NothingReturned" in sentence for sentence in grader.results["1.1"][1])


def test_several_values_pass_stacked_or_generated(monkeypatch, capsys):
    """A list of values may be one stacked tensor, and numbers may come from a generator."""
    said = ask(monkeypatch, lambda x: [x, 2 * x], (M,))
    for answer in (
        lambda x: torch.stack([x, x + x]),
        lambda x: (k * x for k in (1, 2)),
        lambda x: np.stack((x, 2 * x)),
    ):
        assert "pass" in said(answer, capsys)
    assert "pass" in ask(monkeypatch, lambda x: (1.0, 2), (M,))(
        lambda x: (k for k in np.arange(1, 3)), capsys
    )


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda x: 1 / x, "upside down"),
        (lambda x: -x, "has the wrong sign"),
        (lambda x: x * x, "the square of"),
        (lambda x: x.flip(-1), "in reverse order"),
        (lambda x: 4 * x, "everywhere 4 times"),
        (lambda x: x.exp(), "expone"),
        (lambda x: x + 0.25, "everywhere 0.25 too large"),
        (lambda x: x - 0.25, "everywhere 0.25 too small"),
        (lambda x: x + torch.tensor([[1.0], [-1.0]]), "row by row, off by -1 to +1"),
        (lambda x: x.mT, "got shape (3, 2); transposed"),
        (lambda x: x * torch.tensor([[2.0], [3.0]]), "row by row, 2 to 3 times"),
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), "column by column, 1 to 3 too large"),
        (lambda x: x.reshape(6), "; the numbers are right, the shape is not"),
        (lambda x: 0 * x, "is 0 for every input"),
        (lambda x: x + x.abs().sqrt(), "6 of 6 entries, all too large"),
        (lambda x: x * (1 - 0.01 * x**2), "6 of 6 entries, all too small in size"),
        (lambda x: x * (1 + 0.1 * x**2), "6 of 6 entries, all too large in size"),
    ],
)
def test_the_relation_to_the_right_answer_is_named(monkeypatch, capsys, answer, words):
    """A factor, a sign, an order and other relations to the right answer are recognized."""
    assert words in ask(monkeypatch, lambda x: x, (M,), (M[:, :2] + 5,))(
        answer, capsys
    ) or words in ask(monkeypatch, lambda x: x, (M,))(answer, capsys)


def test_relations_of_single_numbers_need_all_inputs(monkeypatch, capsys):
    """A relation of single numbers is only named if it holds for all inputs."""
    said = ask(monkeypatch, lambda n: n**0.5, (2.0,), (3.0,), (10.0,))
    assert "upside down" in said(lambda n: n**-0.5, capsys) and "2 times" in said(
        lambda n: 2 * n**0.5, capsys
    )
    assert "too small" in said(lambda n: n**0.4, capsys)
    uneven = lambda x: x + 5e-5 * torch.tensor([1.0, 2.0, -1.0])
    assert "everywhere" not in ask(monkeypatch, lambda x: x, (M,))(uneven, capsys)


def test_an_answer_along_the_other_axis_is_recognized(monkeypatch, capsys):
    """The right answer for the transposed input is recognized."""
    said = ask(monkeypatch, lambda x: x / x.norm(dim=-1, keepdim=True), (M,))
    assert "the other axis" in said(lambda x: x / x.norm(dim=0, keepdim=True), capsys)
    assert "the other axis" in ask(monkeypatch, lambda x: x.sum(-1), (M,))(
        lambda x: x.sum(0), capsys
    )


def test_the_values_of_a_tuple_are_named(monkeypatch, capsys):
    """The wrong ones and the right ones of several values are named."""
    said = ask(
        monkeypatch, lambda x: (x, x.sum(0), x.sum(1)), (M,), parts=("dx", "dweight", "dbias")
    )
    out = said(lambda x: (x, 2 * x.sum(0), x.sum(1)), capsys)
    assert "dweight: off by" in out and "right: dx, dbias" in out
    out = ask(monkeypatch, lambda x: (1.0, 2.0), (M,), parts=("mean", "variance"))(
        lambda x: (1.0, 3.0), capsys
    )
    assert "variance: off by 1, too large" in out and "right: mean" in out
    said = ask(
        monkeypatch,
        lambda x: (x.sum(), x.max(), x.max() > 3),
        (M,),
        (M - 2,),
        (M - 4,),
        parts=("sum", "max", "large"),
        mistakes=[(lambda x: (x.sum(), x.max(), True), "always")],
    )
    assert "the values are right, in another order" in said(
        lambda x: (x.max(), x.sum(), x.max() > 3), capsys
    )
    assert (
        "always" in (out := said(lambda x: (x.sum(), x.max(), True), capsys)) and "order" not in out
    )
    assert "always" not in said(
        lambda x: (x.sum(), x.max(), x.max() > 1), capsys
    )  # yes, but for one of two only


def test_a_value_is_called_right_only_if_it_is_right_with_every_input(monkeypatch, capsys):
    said = ask(monkeypatch, lambda x: (x, x + 1, x + 2, x + 3), (M,), (0 * M,))
    out = said(lambda x: (x, 2 * x + 1, x + 5, x + 6), capsys)
    assert "\n     also wrong: value 4\n     right: value 1\n" in out


def test_a_missing_row_is_not_named_if_another_may_be_missing(monkeypatch, capsys):
    """Where neighbors are equal, or answers are True or False, nobody knows which one it is."""
    for reference, x in ((lambda x: x, [1.0, 2.0, 2.0]), (lambda x: x > 0, [-1.0, -2.0, 3.0])):
        said = ask(monkeypatch, reference, (torch.tensor(x),))
        out = said(lambda x: reference(x[:-1]), capsys)
        assert "; one is missing" in out and "the last one" not in out


def test_two_known_mistakes_in_one_answer_are_both_named(monkeypatch, capsys):
    """Two mistakes made together, or in different values, both get their sentence."""

    def rms(x, *, root=0.5, eps=0.1, dim=-1):
        return x / ((x * x).mean(dim, keepdim=True) + eps) ** root

    said = ask(
        monkeypatch,
        rms,
        (M,),
        (M + 1,),
        mistakes=[
            (partial(rms, root=1), "no root"),
            (partial(rms, eps=0), "no eps"),
            (partial(rms, dim=0), "dim"),
        ],
    )
    out = said(lambda x: x / (x * x).mean(-1, keepdim=True), capsys)
    assert "no root" in out and "no eps" in out and "dim" not in out
    said = ask(
        monkeypatch,
        lambda x: (x, x + 1),
        (M,),
        mistakes=[
            (lambda x: (2 * x, x + 1), "twice"),
            (lambda x: (x, x - 1), "minus"),
            (lambda x: (x + 3, x + 4), "three"),
        ],
    )
    out = said(lambda x: (2 * x, x - 1), capsys)  # one for each part
    assert "twice" in out and "minus" in out and "three" not in out


def test_misconceptions_and_properties_get_the_arguments_that_they_name(monkeypatch, capsys):
    """They may name arguments, `right` and single values."""
    known = [
        (lambda right, b: right + b, "b twice"),
        (lambda difference, total: (total + 1, difference), "one more"),
    ]
    checks = [
        (lambda y, right, a: a.sum() != 0 or (y[1] == right[1]).all(), "a is 0, and yet"),
        (lambda y: False, "last"),
    ]
    said = ask(
        monkeypatch,
        lambda a, b: (a + b, a - b),
        (M, 2 * M),
        (0 * M, M),
        mistakes=known,
        properties=checks,
        parts=("total", "difference"),
    )
    assert "one more" in said(lambda a, b: (a + b + 1, a - b), capsys)
    assert "a is 0, and yet" in said(lambda a, b: (a + b, a + b**3 + 1), capsys)
    assert "last" in said(lambda a, b: (a + b, a * a - b), capsys)
    said = ask(monkeypatch, lambda a, b: a + b, (M, 2 * M), mistakes=known[:1])
    assert "b twice" in said(lambda a, b: a + 2 * b, capsys)


def test_inputs_returns_the_input_that_went_wrong(monkeypatch, capsys):
    """inputs() returns the first wrong input."""
    said = ask(monkeypatch, lambda x: x.abs(), (M.abs(),), (M,))
    assert 'inputs("1.1")' in said(lambda x: x, capsys) and torch.equal(grader.inputs("1.1")[0], M)


def test_at_most_two_wrong_yes_or_no_answers_are_explained(monkeypatch, capsys):
    """The number of wrong answers is printed, and a sentence for the first two of them."""
    about = {"input 0": "zero is even", "input 3": "three is odd"}
    said = ask(monkeypatch, lambda n: n % 2 == 0, *((n,) for n in range(5)), about=about)
    out = said(lambda n: True, capsys)
    assert "2 of 5 answers are wrong\n     three is odd\n     1 more to find.\n" in out
    out = said(lambda n: n == 1, capsys)
    assert "4 of 5 answers are wrong\n     zero is even\n     3 more to find.\n" in out
    out = said(lambda n: n % 2 == 0 or n == 1, capsys)
    assert "Look again at input 1." in out and "odd" not in out and "even" not in out
    said = ask(monkeypatch, lambda: [True, False, True], (), about={1: "the second"})
    assert "2 of 3 answers are wrong\n     the second\n     1 more to find." in said(
        lambda: [True, True, False], capsys
    )
    said = ask(monkeypatch, lambda: [True, False], ())
    assert "Look again at number 2." in said(lambda: [True, True], capsys)
    assert "Look again at number 1." in said(lambda: [False, True], capsys)


def test_a_forbidden_function_does_not_pass(monkeypatch, capsys):
    """A right answer that uses what the exercise rules out is refused."""
    said = ask(monkeypatch, lambda x: x.norm(), (M,), without=("norm", "normalize"))
    assert "without norm" in said(lambda x: x.norm(), capsys) and "pass" in said(
        lambda x: (x * x).sum() ** 0.5, capsys
    )
    assert "without norm" in said(lambda x: (lambda y: torch.linalg.norm(y))(x), capsys)
    assert grader.results["1.1"] == ("wrong", ["solved with norm"])


def from_a_notebook(source, name):
    """The function of that name, as a notebook that runs `source` has it."""
    names = {"torch": torch, "F": torch.nn.functional, "math": math}
    exec(textwrap.dedent(source), names)
    return names[name]


def stepping(h, norm, branch, layer):
    h += branch(norm(h) / layer**0.5)
    return h


def in_place(x, eps):
    x -= x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def nu_in_place(nu, x, g, psi2, eps, decay):
    xhat = x / (psi2 + eps).sqrt()
    nu *= 1 - (1 - decay) * xhat.square().mean((0, 1))
    return nu + (1 - decay) * (g * xhat).mean((0, 1))


def stream_in_place(h0, branches, lambdas):
    for branch, scale in zip(branches, lambdas):
        h0 *= scale
        h0 += branch
    return h0


def spheres_in_place(w, gradients, lr):
    for gradient in gradients:
        w -= lr * gradient
        w /= w.norm(dim=-1, keepdim=True)
    return w, w.bfloat16()


def least_in_place(w_qkv, w_up, nu_qkv, nu_uz, sqrt_d):
    w_up[len(w_up) // 2 :] *= nu_uz * sqrt_d
    return w_qkv, w_up


def fold_in_place(w_up, w_down, gain, f_u, f_z, c):
    w_up *= torch.cat((f_u, f_z))[:, None] * gain
    return w_up, w_down * c


def norm_taken_away(h, branches, norms):
    norms.pop()
    return EXERCISES["8.6"].reference(h, branches, norms + [None])


def output_matrix_in_place(h, attention, p):
    p["w_o"].mul_(1.5)
    return EXERCISES["3.11"].reference(h, attention, p)


@pytest.mark.parametrize(
    "number, answer, name",
    [
        ("1.2", in_place, "x"),
        ("2.8", nu_in_place, "nu"),
        ("3.6", stream_in_place, "h0"),
        ("8.4", stepping, "h"),
        ("4.8", spheres_in_place, "w"),
        ("5.8", least_in_place, "w_up"),
        ("7.10", fold_in_place, "w_up"),
        ("8.6", norm_taken_away, "norms"),
        ("3.11", output_matrix_in_place, "p"),
    ],
)
def test_an_argument_changed_in_place_is_named(number, answer, name, capsys):
    """A function that changes its argument is told so, and no known mistake is blamed."""
    assert grader.grade(number, answer) is EXERCISES[number].reference
    out = capsys.readouterr().out
    assert f"You changed {name} in place" in out and "pass" not in out
    assert not [sentence for _, sentence in EXERCISES[number].misconceptions if sentence in out]


def test_an_argument_that_is_restored_counts_as_unchanged(monkeypatch, capsys):
    """Rounding left by += and -= is no change."""

    def there_and_back(x):
        x += 0.1
        y = (x - 0.1).abs()
        x -= 0.1
        return y

    assert "pass" in ask(monkeypatch, lambda x: x.abs(), (M,))(there_and_back, capsys)


def test_an_argument_that_loses_an_entry_counts_as_changed(monkeypatch, capsys):
    said = ask(monkeypatch, lambda tensors: tensors[-1], ([M, 2 * M],))
    assert "You changed tensors in place" in said(lambda tensors: tensors.pop(), capsys)
    said = ask(monkeypatch, lambda p: p["w"], ({"w": M},))
    assert "You changed p in place" in said(lambda p: p.pop("w"), capsys)


def test_the_random_numbers_of_an_answer_are_the_same_each_time(monkeypatch, capsys):
    said = ask(monkeypatch, lambda x: x + torch.rand(3), (M,))
    assert "pass" in said(lambda x: x + torch.rand(3), capsys)


HELPER = """
def helper(x, eps):
    return F.layer_norm(x, x.shape[-1:], eps=eps)
def answer(x, eps):
    return [helper(row, eps) for row in x]
"""
RENAMED = """
from torch.nn.functional import layer_norm as mine
def answer(x, eps):
    return mine(x, x.shape[-1:], None, None, eps)
"""
BACKWARD = """
def differentiate(f, x):
    x = x.clone().requires_grad_()
    f(x).backward()
    return x.grad
def answer(x, g, eps):
    return differentiate(lambda x: (g * x / (x.square().mean((0, 1)) + eps).sqrt()).sum(), x)
"""
JACOBIAN = """
def answer(x, alpha, gamma):
    return torch.autograd.functional.jacobian(lambda x: gamma * torch.tanh(alpha * x), x)
"""
GRADIENTS = """
def answer(xhat, gamma, w_down, g):
    leaves = [x.clone().requires_grad_() for x in (w_down, gamma, xhat)]
    (((leaves[2] * leaves[1]) @ leaves[0].T) * g).sum().backward()
    return [x.grad for x in leaves]
"""


@pytest.mark.parametrize(
    "number, source, word",
    [
        ("1.2", HELPER, "layer_norm"),
        ("1.2", RENAMED, "layer_norm"),
        ("2.6", BACKWARD, "backward"),
        ("8.2", JACOBIAN, "autograd"),
        ("3.5", GRADIENTS, "backward"),
    ],
)
def test_a_forbidden_function_in_a_helper_does_not_pass(number, source, word, capsys):
    """The functions of the notebook that an answer calls are searched, too."""
    grader.grade(number, from_a_notebook(source, "answer"))
    assert re.search(rf"solved without .*{word}", capsys.readouterr().out)


def test_a_students_own_function_may_have_a_forbidden_name(capsys):
    """Only the library's function is forbidden, not its name."""
    source = """
    def grad(x, eps):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + eps).sqrt()
    def layer_norm(x, eps):
        return grad(x, eps)
    def answer(x, eps):
        return layer_norm(x, eps)
    """
    grader.grade("1.2", from_a_notebook(source, "answer"))
    assert "pass" in capsys.readouterr().out


def test_a_stub_with_the_forbidden_name_is_no_way_round_it(capsys):
    source = """
    def layer_norm(x, eps):
        return F.layer_norm(x, x.shape[-1:], eps=eps)
    """
    grader.grade("1.2", from_a_notebook(source, "layer_norm"))
    assert "solved without" in capsys.readouterr().out


def changing(sequences=slice(None), channels=slice(None), over="any"):
    """An answer to 2.5 that changes, or looks at, a part only."""

    def reach(norm, x):
        y, columns = norm(x), []
        for t in range(x.shape[1]):
            other = x.clone()
            other[sequences, t, channels] += torch.randn(x.shape[-1])[channels]
            moved = (norm(other) - y).abs() > 1e-9
            columns.append(moved.all(-1).all(0) if over == "all" else moved.any(-1).any(0))
        return torch.stack(columns, dim=1)

    return reach


def of_first_sequence(f, x):
    for t in range(x.shape[1]):
        other = x.clone()
        other[0, t] += 1
        moved = (f(other) - f(x)).abs().amax(-1) > 1e-6
        if moved[0, :t].any() or moved[1:].any():
            return False
    return True


def one_split(sizes):
    def cache_is_right(full, step, x):
        state, found = None, []
        for piece in x.split(sizes, dim=1):
            y, state = step(piece, state)
            found.append(y)
        return torch.allclose(torch.cat(found, dim=1), full(x), atol=1e-5)

    return cache_is_right


def of_nearly_complete_runs(rows):
    found = []
    for arch in (0, 1):
        late = rows[(rows[:, 0] == arch) & (rows[:, 2] >= 0.9 * rows[:, 1])]
        budgets = late[:, 1].unique()
        found.append((budgets, torch.stack([late[late[:, 1] == n, 3].mean() for n in budgets])))
    (tokens, losses), (other, reached) = found
    return float(tokens[-1]) / EXERCISES["6.2"].reference(float(losses[-1]), other, reached)


def of_the_mean_at_any_rate(baseline, other, built_in):
    rows = [int(losses.nanmean(1).argmin()) for losses in (baseline, other)]
    searched = baseline[rows[0]].nanmean() - other[rows[1]].nanmean()
    return baseline[built_in].nanmean() - other[built_in].nanmean(), searched


def slerp_or_a(a, b, alpha):
    theta = (a * b).sum(-1, keepdim=True).clamp(-1, 1).arccos()
    if (theta == 0).any():
        return a
    return (((1 - alpha) * theta).sin() * a + (alpha * theta).sin() * b) / theta.sin()


def norm_by_squares(x, eps):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x * x).mean(-1, keepdim=True) - mean**2 + eps).sqrt()


def ffn_with(eps):
    def ffn_branch(x, w_up, w_down, gamma, beta):
        a = torch.nn.functional.gelu(x @ w_up.T)
        return torch.nn.functional.layer_norm(a, gamma.shape, gamma, beta, eps) @ w_down.T

    return ffn_branch


def clamped(least):
    def cosine_matrix(a, b):
        unit = partial(torch.nn.functional.normalize, dim=-1, eps=least)
        return unit(a) @ unit(b).T

    return cosine_matrix


def guarded_in_a_only(a, b):
    lengths = a.norm(dim=1, keepdim=True)
    lengths[lengths == 0] = 1
    return (a / lengths) @ (b / b.norm(dim=1, keepdim=True)).T


def sums_in_pieces(full, step, x):
    for size in (1, 2, 3, 6):
        state, total = None, 0.0
        for piece in x.split(size, dim=1):
            y, state = step(piece, state)
            total = total + y.sum()
        if not torch.allclose(total, full(x).sum(), atol=1e-5):
            return False
    return True


def of_last_tokens_and_first_outputs(f, x):
    other = x.clone()
    other[:, -1] += torch.randn(x.shape[-1])
    leaks = (f(other) - f(x))[:, :-1].abs().max() > 1e-6
    other = x.clone()
    other[1:] += torch.randn(x[1:].shape)
    return not leaks and not (f(other) - f(x))[0].abs().max() > 1e-6


def of_the_next_position_only(f, x):
    before = f(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            other = x.clone()
            other[b, t] += torch.randn(x.shape[-1])
            moved = (f(other) - before).abs().amax(-1) > 1e-6
            others = torch.cat((moved[:b], moved[b + 1 :]))
            if others.any() or t > 0 and moved[b, t - 1]:
                return False
    return True


def compared_with_full_of_the_beginning(full, step, x):
    """What full gives for the first tokens is right only if it does not look ahead."""
    for sizes in ([1] * 6, [6], [2, 3, 1], [3, 1, 2]):
        state = None
        stop = 0
        for chunk in x.split(sizes, dim=1):
            y, state = step(chunk, state)
            stop += chunk.shape[1]
            expected = full(x[:, :stop])[:, -chunk.shape[1] :]
            if not torch.allclose(y, expected, atol=1e-5):
                return False
    return True


def of_common_budgets(rows):
    """The runs of the baseline for which architecture 1 has no complete run are left out."""
    complete = rows[rows[:, 1] == rows[:, 2]]
    common = set(complete[complete[:, 0] == 0, 1].tolist())
    common &= set(complete[complete[:, 0] == 1, 1].tolist())
    kept = [row for row in rows if row[0] == 1 or row[1].item() in common]
    return EXERCISES["6.3"].reference(torch.stack(kept))


def of_longer_tokens(f, x):
    before = f(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            other = x.clone()
            other[b, t] *= 2
            moved = (f(other) - before).abs().amax(-1) > 1e-6
            moved[b, t:] = False
            if moved.any():
                return False
    return True


def causal_test(copied_once=False, flipped=False, absolute=True, change=torch.rand, sign=1):
    """An answer to 8.7 with a fault, or, by default, none."""

    def is_causal(f, x):
        y, other = f(x), x.clone()
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                if not copied_once:
                    other = x.clone()
                other[b, t] = -other[b, t] if flipped else other[b, t] + change(x.shape[-1])
                difference = sign * (f(other) - y)
                moved = (difference.abs() if absolute else difference).amax(-1) > 1e-6
                moved[b, t:] = False
                if moved.any():
                    return False
        return True

    return is_causal


@pytest.mark.parametrize(
    "number, answer",
    [
        ("4.1", guarded_in_a_only),
        ("8.7", of_last_tokens_and_first_outputs),
        ("8.7", of_longer_tokens),
        ("8.8", sums_in_pieces),
        ("1.2", norm_by_squares),
        ("2.5", changing(over="all")),
        ("2.5", changing(sequences=0)),
        ("2.5", changing(sequences=-1)),
        ("2.5", changing(channels=0)),
        ("2.5", changing(channels=-1)),
        ("3.2", ffn_with(1e-6)),
        ("3.2", ffn_with(0.0)),
        ("4.1", clamped(1e-8)),
        ("4.1", clamped(1e-3)),
        *(
            ("3.7", lambda n, slow, cut=cut: (cut(n / (1 + slow)), slow / (1 + slow)))
            for cut in (round, int, math.ceil)
        ),
        (
            "3.9",
            lambda test, step: (
                (step * 5e-5, step // 2) if test == "Fig. 5" else (step * 1e-4, step * 2)
            ),
        ),
        ("4.2", lambda d: 0.8 / d**0.5),
        ("4.2", lambda d: (2 / math.pi / d) ** 0.5),
        ("4.3", slerp_or_a),
        ("6.3", of_nearly_complete_runs),
        ("6.3", of_common_budgets),
        ("6.7", of_the_mean_at_any_rate),
        ("8.7", of_first_sequence),
        ("8.7", causal_test(absolute=False, change=torch.randn)),
        ("8.7", causal_test(absolute=False, change=torch.randn, sign=-1)),
        ("8.7", of_the_next_position_only),
        *(
            ("8.8", one_split(sizes))
            for sizes in ([1] * 6, [6], [2, 3, 1], [3, 1, 2], [1, 2, 3], [2, 4], [4, 1, 1])
        ),
        ("8.8", compared_with_full_of_the_beginning),
    ],
)
def test_a_half_right_answer_does_not_pass(number, answer, capsys):
    """The inputs tell these answers from right ones."""
    assert grader.grade(number, answer) is EXERCISES[number].reference
    assert "not yet" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["3.11", "8.1", "8.4", "8.6"])
def test_right_values_without_gradients_do_not_pass(number, capsys):
    """The notebooks train with these functions. One that hides an argument is told which."""
    exercise = EXERCISES[number]
    names = mistakes.parameter_names(exercise.reference)

    def detached(x):
        if isinstance(x, dict):
            last = list(x)[-1]
            return {**x, last: x[last].detach()}
        return x.detach()

    for hidden in exercise.trains:
        def answer(*inputs):
            kept = [detached(x) if name == hidden else x for name, x in zip(names, inputs)]
            return exercise.reference(*kept)

        assert grader.grade(number, answer) is exercise.reference
        printed = capsys.readouterr().out
        assert "not yet: the values are right, but not all gradients are" in printed
        assert re.search(rf'or missing: {hidden}(\["\w+"\])?\. Do you hide something', printed)


def test_gradients_are_judged_where_they_are_switched_off_and_in_place_is_named(capsys):
    def own_tensor_in_place(x, alpha, gamma):
        y = alpha * x
        y.tanh_()
        y *= gamma
        return y

    def through_numpy(x, alpha, gamma):
        return np.asarray(gamma) * np.tanh(alpha.item() * np.asarray(x))

    def right(x, alpha, gamma):
        return gamma * torch.tanh(alpha * x)

    def a_tenth_detached(x, alpha, gamma):
        return right(0.9 * x + 0.1 * x.detach(), alpha, gamma)

    for gradients_off in (torch.no_grad, torch.inference_mode):
        with gradients_off():
            assert grader.grade("8.1", right) is right
    assert grader.grade("8.1", a_tenth_detached) is not a_tenth_detached
    assert grader.grade("8.1", own_tensor_in_place) is not own_tensor_in_place
    assert "modified by an inplace operation" in capsys.readouterr().out
    assert grader.grade("8.1", through_numpy) is not through_numpy
    assert "would fail: RuntimeError: Can't call numpy()" in capsys.readouterr().out


def test_exercises_8_7_and_8_8_have_the_stated_number_of_right_cases():
    """Their statements say how many functions are judged."""
    right = {
        number: grader.answers(EXERCISES[number].reference, EXERCISES[number])[0]
        for number in ("8.7", "8.8")
    }
    counts = {
        number: (sum(bool(x[0]) for x in found.values()), len(found))
        for number, found in right.items()
    }
    assert counts == {"8.7": (4, 15), "8.8": (1, 14)}


def inverted(number):
    return lambda *given: not EXERCISES[number].reference(*given)


def slerp_guarded(a, b, alpha):
    theta = (a * b).sum(-1, keepdim=True).clamp(-1, 1).arccos()
    return (((1 - alpha) * theta).sin() * a + (alpha * theta).sin() * b) / (theta.sin() + 1e-8)


def gain_in_place(weight, bias, psi2, eps, w, c):
    w *= weight / (psi2 + eps).sqrt()
    return w, c + w @ bias


def dyt_in_place(w, alpha, gamma, beta):
    w *= gamma
    return w, w @ beta


def jacobian_by_differences(x, eps):
    def norm(x):
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()

    steps = 1e-3 * torch.eye(len(x), dtype=x.dtype)
    return ((norm(x + steps) - norm(x)) / 1e-3).T


def scalings_of_a_layer(gpt_plus, angpt, ngpt, n_layer):
    return 1e3 * (angpt - gpt_plus) / n_layer, 1e3 * (ngpt - angpt) / (2 * n_layer)


def project_reads_twice_and_never_writes(params, tokens, peak, bandwidth):
    compute, adamw, project, _ = EXERCISES["7.12"].reference(params, tokens, peak, bandwidth)
    project *= 2 / 3
    return compute, adamw, project, 100 * project / (compute + adamw + project)


def trimmed_mean_first(a, b):
    ratio = b / a
    low = ratio.quantile(0.1)
    high = ratio.quantile(0.9)
    return ratio[(ratio >= low) & (ratio <= high)].mean(), low, high


def scaled_twice(q, k, v, p, y, g):
    dq, dk, dv = EXERCISES["7.11"].reference(q, k, v, p, y, g)
    scale = q.shape[-1] ** -0.5
    return scale * dq, scale * dk, dv


def ones_on_the_diagonal(x, eps):
    jacobian = EXERCISES["1.7"].reference(x, eps)
    s = (x.var(correction=0) + eps).sqrt()
    return jacobian - torch.diag(jacobian.diagonal()) + torch.eye(len(x), dtype=x.dtype) / s


def without_eps_in_the_derivative(x, eps):
    """The derivative of s is taken for s without eps, which gives 0/0 if all entries are equal."""
    n = len(x)
    centered = x - x.mean()
    s = (centered.square().mean() + eps).sqrt()
    ds = centered / (n * centered.square().mean().sqrt())
    return (torch.eye(n, dtype=x.dtype) - 1 / n) / s - torch.outer(centered, ds) / s**2


def of_an_impulse(norm, x):
    """All tokens but one are 0, and the outputs that are not 0 count."""
    columns = []
    for t in range(x.shape[1]):
        impulse = torch.zeros_like(x)
        impulse[:, t] = x[:, t]
        columns.append(norm(impulse).abs().amax((0, 2)) > 1e-6)
    return torch.stack(columns, dim=1)


def next_lambda_only(h0, branches, lambdas):
    result = h0 * lambdas.prod(0) + branches[-1]
    for branch, following in zip(branches, lambdas[1:]):
        result = result + branch * following
    return result


def summed_over_heads(q, gain, cos, sin, before_rope):
    """The heads' mean squares are added, not averaged, if one norm is taken over all heads."""
    if gain.dim() == 2:
        gain = gain / math.sqrt(q.shape[1])
    return EXERCISES["4.12"].reference(q, gain, cos, sin, before_rope)


def mean_of_dp_without_weights(q, k, v, p, y, g):
    dp = g @ v.mT
    ds = p * (dp - dp.mean(-1, keepdim=True))
    return ds @ k, ds.mT @ q, p.mT @ g


def largest_power_below(n, multiple):
    size = math.ceil(n / multiple) * multiple
    power = 2 ** int(math.log2(size))
    return size, power, size / power


def removed_three_norms(step, without_qk, overhead, n_layer):
    _, gpt, share = EXERCISES["7.7"].reference(step, without_qk, overhead, n_layer)
    return (step - without_qk) / (3 * n_layer), gpt, share * 2 / 3


def f_u_and_c_forgotten(w_up, w_down, gain, f_u, f_z, c):
    return torch.cat((0 * f_u + 1, f_z))[:, None] * w_up * gain, w_down


def blind_to_itself(h, p, n_head, cos, sin):
    return EXERCISES["4.11"].reference(h, p, n_head, cos, sin, hidden_from=0, nan=0.0)


def mlp_with_another_scale(h, p, n_head, cos, sin):
    return EXERCISES["4.11"].reference(h, {**p, "s_v": 3 * p["s_v"]}, n_head, cos, sin)


def attention_with_another_scale(h, p, n_head, cos, sin):
    return EXERCISES["4.11"].reference(h, {**p, "s_qk": 2 * p["s_qk"]}, n_head, cos, sin)


def both_read_the_stream_scaled(h, attention, p):
    scaled = {**p, "resid_scale": torch.ones_like(p["resid_scale"])}
    return EXERCISES["3.11"].reference(h, attention, scaled) + 1


def norm_attn_without_eps(h, attention, p):
    def after_attention(y, p):
        y = y @ p["w_o"].T
        return torch.nn.functional.layer_norm(y, y.shape[-1:], p["norm_attn"], eps=1e-12)

    return EXERCISES["3.11"].reference(h, attention, p, attn=after_attention)


def eps_in_the_deviation(h, attention, p):
    def norm(x, name):
        centered = x - x.mean(-1, keepdim=True)
        return centered / (x.std(-1, keepdim=True, correction=0) + 1e-5) * p[name]

    y = attention(norm(h, "norm1")) * p["head_scale"][:, None, None]
    h = h + norm(y.transpose(1, 2).flatten(2) @ p["w_o"].T, "norm_attn")
    u = torch.nn.functional.gelu(norm(h, "norm2") @ p["w_up"].T)
    return p["resid_scale"] * h + norm(u, "norm_ffn") @ p["w_down"].T


def embedding_in_every_layer(s, layers, d):
    std = math.sqrt(layers * (s**2 + 1) + 0.0008 * d)
    return std, s / std


def divided_by_s_twice(x, eps):
    return EXERCISES["1.7"].reference(x, eps) / (x.var(correction=0) + eps).sqrt()


def last_of_the_steps(moments, decay):
    psi2 = torch.ones_like(moments[0])
    for m in moments:
        psi2 = decay * psi2 + (1 - decay) * m
    return psi2, decay ** len(moments)


def of_the_input(norm, x):
    columns = []
    for t in range(x.shape[1]):
        other = x.clone()
        other[:, t] += torch.randn(x.shape[-1])
        columns.append(((norm(other) - x).abs() > 1e-9).any(-1).any(0))
    return torch.stack(columns, dim=1)


def eps_behind_the_root(x, g, eps):
    psi = x.square().mean((0, 1)).sqrt() + eps
    xhat = x / psi
    return (g - xhat * (g * xhat).mean((0, 1))) / psi


def gain_twice(x, dy, weight, psi2, nu, eps):
    return EXERCISES["2.7"].reference(x, dy * weight, weight, psi2, nu, eps)


def two_steps(nu, x, g, psi2, eps, decay):
    for _ in range(2):
        nu = EXERCISES["2.8"].reference(nu, x, g, psi2, eps, decay)
    return nu


def groups_apart(x, groups, eps):
    scaled, bound = EXERCISES["2.10"].reference(x, groups, eps)
    return scaled.unflatten(-1, (groups, -1)), bound


def writers_second(*given):
    w_qkv, w_o, w_up, w_down = EXERCISES["4.7"].reference(*given)
    return w_qkv, w_up, w_o, w_down


def shift_second(blocks, scale, shift, mean, variance):
    return mean + blocks * shift, variance * scale**blocks


def gate_of_random_numbers(sigma):
    t = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    return 1 / torch.nn.functional.silu(sigma * t).square().mean()  # without the root


def zeros_become_ones(W, X):
    unit_rows = (X / X.norm(dim=-1, keepdim=True)).nan_to_num(1.0)
    return EXERCISES["5.1"].reference(W, unit_rows)


def nu_of_the_first_channel(alpha):
    return EXERCISES["5.3"].reference(alpha[0]).expand(alpha.shape)


def squares_with_a_cross_term(alpha, nu, steps):
    lengths = [1.0]
    for _ in range(steps):
        old, new = (1 - alpha) * lengths[-1], alpha
        lengths.append(nu * math.sqrt(old**2 + new**2 + 2 * old * new))
    return lengths


def halves_exchanged(w_qkv, w_up, nu_qkv, nu_uz, sqrt_d):
    z, u = w_up.chunk(2)
    return w_qkv, torch.cat((u, z * nu_uz * sqrt_d))


def root_of_the_width_of_the_mlp(*given):
    return EXERCISES["5.11"].reference(*given, gate_width=lambda d, d_k: 4 * d)


def width_of_the_first_input(*given):
    return EXERCISES["5.11"].reference(*given, gate_width=lambda d, d_k: 8)


def one_norm1(activation, qk_norm):
    return [True, *EXERCISES["3.4"].reference(activation, qk_norm)[1:]]


def first_way_only(full, step, x):
    for sizes in ([1] * 6, [6], [2, 3, 1]):
        return one_split(sizes)(full, step, x)


def beginnings_without_a_state(full, step, x):
    return all(torch.allclose(step(x[:, :t], None)[0], full(x)[:, :t]) for t in range(1, 7))


def fails_for_all_heads(q, gain, cos, sin, before_rope):
    heads_and_tokens = q[..., 0] * gain[..., 0]  # (B, H, T) by (H,), or by a number
    return EXERCISES["4.12"].reference(
        q + 0 * heads_and_tokens[..., None], gain, cos, sin, before_rope
    )


def nan_without_a_step(h, p, *others):
    y = EXERCISES["5.11"].reference(h, p, *others)
    return y + 0.1 * h * h if p["alpha_a"].any() and p["alpha_m"].any() else y * math.nan


def nan_and_the_lowest_loss(rates, losses):
    rate, loss = EXERCISES["6.6"].reference(rates, losses)
    return rate, float(losses.min()) if math.isnan(rate) else loss


def with_loss_for_rate(rates, losses):
    rate, loss = EXERCISES["6.6"].reference(rates, losses)
    return rate if math.isnan(rate) else float(rates[losses.argmin()]), loss


def leads_of_best_seeds(baseline, other, built_in):
    rows = [losses[losses[:, 0].argmin()] for losses in (baseline, other)]
    best = [row[~row.isnan()].min() for row in rows]
    return EXERCISES["6.7"].reference(baseline, other, built_in)[0], best[0] - best[1]


def n_from_6nd(d0, a_d, n0, a_n, c):
    d = d0 * c**a_d
    n = c / (6 * d)
    return a_d + a_n, 6 * n * d / c, d / n


def share_up_to_1(weak, strong):
    worth, share = EXERCISES["6.5"].reference(weak, strong)
    return worth, min(1.0, share)


def equal_if_the_difference_is_or_p_is_large(a, b, var_a, var_b, margin):
    z, p, low, high, _ = EXERCISES["6.10"].reference(a, b, var_a, var_b, margin)
    return z, p, low, high, float(abs(b - a) <= margin or p > 0.05)


def smaller_true(a, b, mine, theirs, true):
    apart = true / mine.shape[1] ** 0.5
    return EXERCISES["6.12"].reference(a, b, mine, theirs, apart)


def no_search(baseline, other, built_in):
    lead = EXERCISES["6.7"].reference(baseline, other, built_in)[0]
    return lead, lead


def mean_subtracted_twice(x, eps):
    mean = x.mean(-1, keepdim=True)
    x = x - mean
    return x / ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt()


def divided_by_the_root_twice(x, eps):
    root = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x / root / root


def layer_norm_after_each_block(blocks, shift, scale, mean, variance):
    return (0.0, 1.0) if blocks else (mean, variance)


def norm_of_a_shift_only(blocks, shift, scale, mean, variance):
    return EXERCISES["1.5"].reference(blocks, shift, scale - scale + 1, mean, variance)


def first_terms_not_divided_by_s(x, eps):
    s = (x.var(correction=0) + eps).sqrt()
    y = (x - x.mean()) / s
    return torch.eye(len(x)) - 1 / len(x) - torch.outer(y, y) / (len(x) * s)


def product_of_the_means(g, x, weight, eps):
    _, dweight, dbias = EXERCISES["1.8"].reference(g, x, weight, eps)
    centered, u = x - x.mean(-1, keepdim=True), g * weight
    s = (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    mean = u.mean(-1, keepdim=True)
    from_s = centered / s * mean * (centered / s).mean(-1, keepdim=True)
    return (u - mean - from_s) / s, dweight, dbias


def published_with_unsigned_gain(x, dy, weight, psi2, nu, eps):
    psi = (psi2 + eps).sqrt()
    g = dy * weight.abs()
    return (g - nu * x / psi) / psi, (g * x / psi).mean((0, 1))


def stream_of_unsigned_lambdas(h0, branches, lambdas):
    return EXERCISES["3.6"].reference(h0, branches, lambdas.abs())


def slope_of_unsigned_alpha(x, alpha, gamma):
    return torch.diag(gamma * alpha.abs() / torch.cosh(alpha * x) ** 2)


def conditions_without_lost_directions(w_qkv, n_head):
    d = w_qkv.shape[1]
    found = torch.linalg.svdvals(w_qkv.reshape(3, n_head, d // n_head, d))
    largest = found[..., :1]
    smallest = torch.where(found > 1e-5 * largest, found, largest).min(-1).values
    return (largest[..., 0] / smallest).median(1).values


def equal_partners(gain, pairs):
    """Return an answer for each pair. Without pairs there is none."""
    return [bool(gain[i] == gain[i + pairs]) for i in range(pairs)]


def largest_difference(gain, pairs):
    """Return a size instead of True or False. Without pairs there is an error."""
    return (gain[:pairs] - gain[pairs : 2 * pairs]).abs().max()


def slerp_of_acute_angles(a, b, alpha):
    """A needless abs is the mistake; the numbers near 0 do no harm."""
    theta = (a * b).sum(-1, keepdim=True).abs().clamp(max=0.99999).arccos()
    return (((1 - alpha) * theta).sin() * a + (alpha * theta).sin() * b) / (theta.sin() + 1e-6)


def counted_in_float32(printed, digit, counted, layers):
    p, g, c, n = torch.stack((printed, digit, counted, layers)).float()
    return ((p - g / 2 - c) / n).max(), ((p + g / 2 - c) / n).min()


def slerp_of_unequal(a, b, alpha):
    theta = (a * b).sum(-1, keepdim=True).clamp(-1, 1).arccos()
    arc = ((1 - alpha) * theta).sin() * a + (alpha * theta).sin() * b
    return torch.where((a == b).all(-1, keepdim=True), a, arc / theta.sin())


def slerp_of_large_angles(a, b, alpha):
    is_small = (a * b).sum(-1, keepdim=True) > 0.9995
    return torch.where(is_small, a, EXERCISES["4.3"].reference(a, b, alpha))


def master_twice(w, gradients, lr):
    master, _ = EXERCISES["4.8"].reference(w, gradients, lr)
    return master, master


def first_gradient_skipped(w, gradients, lr):
    return EXERCISES["4.8"].reference(w, gradients[1:], lr)


def alpha_m_twice(h, p, n_head, cos, sin):
    return EXERCISES["4.11"].reference(h, {**p, "alpha_a": p["alpha_m"]}, n_head, cos, sin)


def one_factor_s_qk(h, p, n_head, cos, sin):
    return EXERCISES["4.11"].reference(h, p, n_head, cos, sin, k_scaled=False)


def cos_and_sin_exchanged(q, gain, cos, sin, before_rope):
    return EXERCISES["4.12"].reference(q, gain, sin, cos, before_rope)


def copy_as_int16(w, gradients, lr):
    master, copy = EXERCISES["4.8"].reference(w, gradients, lr)
    return master, copy.view(torch.int16)


@pytest.mark.parametrize(
    "number, answer, said, unsaid",
    [
        ("4.11", mlp_with_another_scale, "look at the MLP", "With one token"),
        ("4.11", attention_with_another_scale, "With one token yours is right", "look at the MLP"),
        ("3.11", both_read_the_stream_scaled, "With w_o of zeros", "Each of the two branches"),
        ("1.2", mean_subtracted_twice, "do you subtract the mean twice", "is the mean of x^2."),
        (
            "1.3",
            lambda n: math.sqrt(n) - 1 / math.sqrt(n),
            "without the mean subtracted",
            "You used",
        ),
        ("1.4", divided_by_the_root_twice, "or by its root twice", "divides by its root."),
        ("1.5", layer_norm_after_each_block, "is what LayerNorm gives", "root of the variance"),
        (
            "1.5",
            lambda blocks, shift, scale, mean, variance: EXERCISES["1.5"].reference(
                blocks, shift, 1.0, mean, variance),
            "never uses scale",
            "second block",
        ),
        ("1.5", norm_of_a_shift_only, "One block is wrong already", "second block"),
        ("1.7", first_terms_not_divided_by_s, "the other terms as often", "and its sign."),
        ("1.8", product_of_the_means, "the product of the means", "You treat s"),
        ("1.10", lambda L: EXERCISES["1.10"].reference(L)[::-1], "exchanged", "have length 1"),
        ("3.2", ffn_with(1e-8), "far smaller than 1e-5", "You add eps"),
        (
            "3.3",
            lambda layers, d, heads, bias: layers * (heads + 5 * d) * (1 + bias),
            "does a factor 2 stand",
            "You give HeadScale a shift",
        ),
        (
            "3.6",
            lambda h0, branches, lambdas: lambdas[0] * h0 + branches[0],
            "that layer's branch alone is the result",
            "something else remains",
        ),
        (
            "3.6",
            lambda h0, branches, lambdas: EXERCISES["3.6"].reference(
                h0, branches, lambdas[-1:].expand(len(lambdas), -1)
            ),
            "which lambda multiplies it",
            "What does the second layer read",
        ),
        ("3.10", embedding_in_every_layer, "With a small embedding", "Check the variance of"),
        ("3.11", norm_attn_without_eps, "Only with small matrices", "Each of the two branches"),
        ("3.11", eps_in_the_deviation, "add it to the standard deviation", "do you approximate"),
        (
            "3.11",
            lambda h, attention, p: EXERCISES["3.11"].reference(
                h, attention, p, around=lambda h, x, p: 2 * h
            ),
            "both sums",
            "HeadScale",
        ),
        ("1.7", jacobian_by_differences, "a quotient of differences", "sums to 0"),
        ("1.7", ones_on_the_diagonal, "only your diagonal is wrong", "sums to 0"),
        ("1.7", without_eps_in_the_derivative, "there is NaN in yours", "0.5 times"),
        ("2.5", of_an_impulse, "Do you compare with norm(x)", "Your change leaves"),
        ("3.6", next_lambda_only, "With two layers yours is right", "In the second layer"),
        (
            "4.1",
            lambda a, b: EXERCISES["4.1"].reference(a, b).abs(),
            "below 0",
            "ten times as long",
        ),
        ("4.11", blind_to_itself, "hides each token from itself", "Even with one token"),
        ("4.12", summed_over_heads, "over the channels of all heads", "a head's channels yours is"),
        ("7.6", scalings_of_a_layer, "1/n_layer times", "which two of the three models"),
        (
            "8.5",
            lambda layers: EXERCISES["8.5"].reference(layers) / math.log(10),
            "to base 10",
            "bits",
        ),
        ("4.3", slerp_guarded, "where b = a", "division by sin"),
        ("4.3", lambda *given: slerp_guarded(*given).nan_to_num(), "where b = a", "0 for every"),
        ("4.13", equal_partners, ".all() over yours gives it", "One number"),
        ("4.13", largest_difference, "not the size of something", "There are gains"),
        ("2.7", published_with_unsigned_gain, "only with gains below 0", "With nu = 0"),
        ("3.6", stream_of_unsigned_lambdas, "only with lambdas below 0", "With two layers"),
        ("8.2", slope_of_unsigned_alpha, "only with an alpha below 0", "right at x = 0"),
        ("4.9", conditions_without_lost_directions, "nearly lost a direction", "With one head"),
        ("4.3", slerp_of_unequal, "theta is 0 there", "Limit the cosine first"),
        ("4.3", slerp_of_acute_angles, "lie on the sphere", "Nearly right"),
        ("4.3", slerp_of_large_angles, "except where the angle is small", "The angle from a"),
        ("4.8", master_twice, "Make it bfloat16", "Nearly right"),
        ("4.8", first_gradient_skipped, "Does the loop use every", "first step"),
        (
            "4.9",
            lambda w_qkv, n_head: EXERCISES["4.9"].reference(w_qkv, n_head)[:1].expand(3),
            "k or v is not",
            "torch.linalg.cond",
        ),
        ("4.11", alpha_m_twice, "If your step leaves h so", "yours is off: look at the MLP"),
        ("4.11", one_factor_s_qk, "only one of q and k", "only q by"),
        ("4.12", cos_and_sin_exchanged, "the order of rope's arguments", "In this order"),
        ("1.6", inverted("1.6"), "the opposite of the right one", "wte gives"),
        ("8.7", inverted("8.7"), "the opposite of the right one", "You reject"),
        (
            "2.4",
            lambda x, psi2, training, step, warmup: (
                x.square().mean((0, 1)) if not training and step < warmup else psi2
            ),
            "The warm-up is one of training",
            "You look at the batch in all of evaluation",
        ),
        ("2.11", gain_in_place, "You changed w in place", "the old matrix, not the folded one"),
        (
            "2.2",
            lambda x, psi2, weight, eps: weight * x / psi2.clamp(min=eps).sqrt(),
            "1/sqrt(psi2 + eps)",
            "a quotient of differences",
        ),
        ("2.3", last_of_the_steps, "return the last step's only", "Yours does not"),
        ("2.5", changing(channels=-1), "only some of the channels", "You ask whether all"),
        ("2.5", of_the_input, "x with x itself", "ratios of its channels"),
        ("2.6", eps_behind_the_root, "Is eps under the root", "Count the powers"),
        ("2.7", gain_twice, "do you multiply dy by it twice", "the gain comes after it"),
        ("2.8", two_steps, "a second step", "only the part with g is left"),
        (
            "2.10",
            lambda *given: EXERCISES["2.10"].reference(*given)[0],
            "the scaled x and the bound. Yours has 1",
            "got 2 values",
        ),
        ("8.9", dyt_in_place, "You changed w in place", "gamma does not multiply it"),
        (
            "1.10",
            lambda L: (L, 2 ** (L - 1)),
            "is the root at the end missing?",
            "lengths do not add",
        ),
        ("1.11", lambda r: 1 / (1 + r), "", "the square"),
        (
            "6.2",
            lambda *given: [EXERCISES["6.2"].reference(*given)],
            "the shape is not",
            "which two runs",
        ),
        (
            "6.5",
            lambda weak, strong: (weak / strong, 2 * math.log(weak / strong) / math.log(strong)),
            "Some of your shares between 0 and 1 are wrong",
            "right from 0 to 1",
        ),
        (
            "6.6",
            lambda *given: [np.nan_to_num(x, nan=0.5) for x in EXERCISES["6.6"].reference(*given)],
            "where nan is expected",
            "off by nan",
        ),
        ("6.5", share_up_to_1, "right from 0 to 1", "Which shares add up"),
        ("6.6", lambda *given: (math.nan, math.nan), "", "All numbers in your answer are right"),
        (
            "6.6",
            lambda rates, losses: [rates[0] * losses[0] * math.nan] * 2,
            "when is there none?",
            "0/0",
        ),
        ("6.6", nan_and_the_lowest_loss, "return nan twice", "equally far apart"),
        ("6.6", with_loss_for_rate, "Where your loss is right", "equally far apart"),
        (
            "6.7",
            leads_of_best_seeds,
            "each over all the runs of its own row",
            "the first seed only",
        ),
        ("6.7", no_search, "the baseline keeps its built-in setting", "You search"),
        ("6.9", n_from_6nd, "You take N from C = 6ND", "You take D"),
        (
            "6.10",
            equal_if_the_difference_is_or_p_is_large,
            "wherever a part of the interval",
            "touches",
        ),
        ("6.12", smaller_true, "Shift all runs", "You use `mine` for b"),
        ("1.7", divided_by_s_twice, "", "sums to 0"),
        ("2.10", groups_apart, "the shape is not", "its own mean square"),
        ("4.7", writers_second, "in this order: w_qkv, w_o", "should get length 1"),
        ("8.9", lambda *given: EXERCISES["8.9"].reference(*given)[::-1], "order", "Check the bias"),
        ("1.1", shift_second, "Yours takes blocks, scale, shift", "one shift per block"),
        (
            "5.2",
            lambda *given: [EXERCISES["5.2"].reference(*given)[i] for i in (1, 2, 0, 3)],
            "in another order than",
            "upside down",
        ),
        ("5.1", zeros_become_ones, "A row of zeros in X", "over which axis"),
        ("5.10", counted_in_float32, "Is something float32?", "which e lie in all"),
        ("5.3", nu_of_the_first_channel, "its own nu", "squares add up"),
        ("5.4", squares_with_a_cross_term, "as if h and y had the same direction", "You added"),
        ("5.5", gate_of_random_numbers, "Do you take the root?", "upside down"),
        ("5.6", lambda A: torch.ones(A.shape[:-1]), "Yours is always 1", "You add the weights"),
        ("5.8", halves_exchanged, "Or are the halves exchanged", "and nothing else"),
        ("5.9", lambda W: W.norm(dim=-1).clamp(max=1), "the shape of W", "longer than 1."),
        ("5.11", root_of_the_width_of_the_mlp, "is the root that of d", "lacks nu_uz"),
        ("5.11", nan_without_a_step, "", "yours is right"),
        ("5.11", width_of_the_first_input, "take all sizes from h", "its own alpha"),
        ("3.4", one_norm1, "norm1: its gain acts", "more to find"),
        ("5.7", lambda: [True] * 8, "9 answers are expected", "the loop"),
        ("4.12", fails_for_all_heads, "Two shapes do not fit", "dtype"),
        (
            "8.6",
            lambda h, branches, norms: EXERCISES["8.6"].reference(h, branches, norms[::-1]),
            "the first of the norms",
            "a norm, and nothing else",
        ),
        ("8.7", lambda f, x: False, "You reject all", "the last sequence only"),
        ("8.3", lambda x: (1 / x.std(-1)).mean(), "divides by n - 1", "Right for"),
        (
            "8.3",
            lambda x: (x.var(-1, correction=0) + 1e-3).rsqrt().mean(),
            "is epsilon 1e-5",
            "even for a single token",
        ),
        (
            "8.4",
            lambda h, norm, branch, layer: h + branch(norm(h) * layer ** -(1 // 2)),
            "is it always 1",
            "Either the factor",
        ),
        ("8.7", causal_test(copied_once=True), "a new copy of x", "more to find"),
        ("8.7", causal_test(absolute=False), "up or down", "more to find"),
        ("8.7", causal_test(flipped=True), "a change of sign", "change the numbers themselves"),
        ("8.8", first_way_only, "a return inside the loop", "A prompt can come"),
        ("8.8", beginnings_without_a_state, "is the state always None", "You give all tokens"),
        (
            "8.8",
            lambda full, step, x: step(x, (x[:, :0], 99, 0)),
            "inside a function that you were given",
            "the last of n entries",
        ),
        (
            "7.3",
            lambda flops, moved, peak, bandwidth: (
                1e6 * max(flops / peak, moved / bandwidth),
                1 / flops,
            ),
            "there is an error: ZeroDivisionError",
            "right: the time",
        ),
        (
            "7.2",
            lambda n, d, size: (7 * n * d * size, 3 * n * d * size, 4 / (3 * size)),
            "count the gain, which is small?",
            "You read x twice",
        ),
        (
            "7.5",
            lambda before, after: (100 * (before / after - 1), 100 * (before / after - 1)),
            "Your second number is right",
            "Both of yours",
        ),
        ("7.7", removed_three_norms, "The time that was saved should come out", "four norms"),
        ("7.8", largest_power_below, "not a whole number", "can still be divided by 2"),
        ("7.10", f_u_and_c_forgotten, "c belongs in w_down", "You moved f_u"),
        ("7.9", trimmed_mean_first, "your 10% and 90% are right", "the outer two"),
        (
            "7.9",
            lambda a, b: (b[:, None] / a).flatten().quantile(torch.tensor([0.5, 0.1, 0.9])),
            "the times of a in all rounds",
            "your 10% and 90% are right",
        ),
        (
            "8.1",
            lambda x, alpha, gamma: (gamma * torch.tanh(alpha * x)).half(),
            "apart from being rounded to torch.float16",
            "an eps of another size",
        ),
        (
            "8.5",
            lambda layers: torch.tensor(EXERCISES["8.5"].reference(layers) + 3j),
            "a complex number",
            "pass",
        ),
        ("4.8", copy_as_int16, "Your copy is not your master rounded to bfloat16", "pass"),
        ("7.11", mean_of_dp_without_weights, "the first query sees one key", "never uses y"),
        ("7.11", scaled_twice, "1/sqrt(q.shape[-1]) times", "Check dS first"),
        ("7.12", project_reads_twice_and_never_writes, "what does it write?", "reads each weight"),
        (
            "5.2",
            lambda *given: [1 / x for x in EXERCISES["5.2"].reference(*given)],
            "upside down",
            "in another order",
        ),
    ],
)
def test_no_sentence_misleads(number, answer, said, unsaid, capsys):
    """These wrong answers get the first sentence and not the second."""
    grader.grade(number, answer)
    out = capsys.readouterr().out
    assert "not yet" in out and said in out and unsaid not in out, out


def test_one_wrong_number_is_not_called_rounded(monkeypatch, capsys):
    """A value that is 1 wherever it is wrong may have been set to 1."""
    inputs = (torch.tensor([0.2, 0.6]),), (torch.tensor([0.7, 3.0]),)
    said = ask(monkeypatch, lambda x: x, *inputs)
    assert "rounded" not in said(lambda x: x.ceil(), capsys)


def test_a_known_mistake_is_not_named_if_a_right_value_contradicts_it(monkeypatch, capsys):
    """A mistake that makes a value wrong was not made if that value is right."""
    mistakes = [
        (lambda x: (2 * x, x - 1), "doubled"),
        (lambda x: (-x, x + 1), "turned. The second is right"),
    ]
    said = ask(
        monkeypatch,
        lambda x: (x, x + 1),
        (M,),
        (0 * M,),
        mistakes=mistakes,
        parts=("first", "second"),
    )
    assert "doubled" not in said(lambda x: (2 * x, x + 1), capsys)
    assert "first: doubled" in said(lambda x: (2 * x, x - 7), capsys)
    assert "turned" not in said(lambda x: (-x, x - 7), capsys)


def test_an_error_shows_the_students_line(capsys):
    """An exception is printed with the last line of the student's code before it."""

    def answer(model, tokens, context, last):
        return model(tokens, "no tensor")

    grader.grade("4.10", answer)
    assert 'return model(tokens, "no tensor")' in capsys.readouterr().out
    grader.grade("4.10", lambda model, tokens, context, last: tuple_of_a_model(tokens))
    assert ": return logits.mean(0)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "reference, answer, words",
    [
        (lambda x: x - x.mean(-1, keepdim=True), lambda x: x - x.mean(-1), "keepdim=True"),
        (lambda x: x + 1, lambda x: x @ x, "the same k in both"),
        (
            lambda x: (x, x + 1),
            lambda x: (x + 1, x),
            "first and second are exchanged: the values are right",
        ),
        (
            lambda x: (x, x + 1),
            lambda x: (x, x.double() * 100 + 100),
            "second: Yours is everywhere 100 times",
        ),
        (lambda x: x.abs(), lambda x: 0.01 * x.abs(), "a share instead of percent"),
        (
            lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-9),
            lambda x: x / x.norm(dim=-1, keepdim=True),
            "All numbers in your answer are right, but with input 1",
        ),
        (lambda x: x, lambda x: x[:-1], "one is missing, the last one"),
        (lambda x: x, lambda x: x[1:], "the first one"),
        (lambda x: x, lambda x: torch.cat((x, x[:1])), "one too many, the last one"),
        (lambda x: 1.3 * x, lambda x: (1.3 * x).round(), "rounded to whole numbers"),
        (lambda x: 1.3 * x, lambda x: (1.3 * x).floor(), "rounded down to whole numbers"),
        (lambda x: 1.3 * x, lambda x: (1.3 * x).ceil(), "rounded up to whole numbers"),
        (lambda x: 1.377 * x, lambda x: (1.377 * x).round(decimals=1), "rounded to one decimal"),
        (lambda x: 1.377 * x, lambda x: (1.377 * x).round(decimals=2), "rounded to 2 decimals"),
        (lambda x: 1.3777 * x, lambda x: (1.3777 * x).round(decimals=3), "rounded to 3 decimals"),
        (lambda x: x.abs(), lambda x: x.abs().sqrt(), "is the root of"),
        (lambda x: x.abs() + 1, lambda x: (x.abs() + 1).rsqrt(), "is one over the root of"),
        (lambda x: x.abs() + 1, lambda x: (x.abs() + 1) ** -2, "is one over the square of"),
        (lambda x: x.abs() + 1, lambda x: (x.abs() + 1).log(), "is the logarithm of"),
        (lambda x: x.sum(), lambda x: 7, "Yours is 7 for every input. The right answer depends on"),
        (lambda x: x.abs(), lambda x: 1 - x.abs(), "1 minus"),
        (lambda x: x, lambda x: x + 1e-3 * x.cos(), "Nearly right: "),
        (lambda x: x, lambda x: x / math.log(2), "bits instead of nats"),
        (lambda x: x, lambda x: x * math.log(2), "which is ln 2"),
        (lambda x: x, lambda x: x / 1000, "a power of ten"),
        (
            lambda x: x.where(x > 0, math.nan),
            lambda x: x.where(x > 0.5, math.nan),
            "where there is an answer",
        ),
        (lambda x: x, lambda x: x.half(), "their dtype is not"),
        (lambda x: x.sum(), lambda x: torch.ones(()), "Your function never uses x."),
        (lambda x: x.abs().sum(), lambda x: 1 / 0, "divided by 0"),
        (lambda x: x.sum(), lambda x: statistics.stdev([1.0]), "has too few numbers"),
        (lambda x: (x.sum(), x.mean()), lambda x: x.mean(), "2 values are expected"),
        (lambda x: (x, x + 1, x + 2), lambda x: (x + 2, x, x + 1), "right, but in another order"),
        (lambda x: (x, x.half()), lambda x: (x.half(), x), "are exchanged, as their dtypes show"),
        (lambda x: x, lambda x: [x, x + 1, x + 2], "you return 3: which of them is the answer"),
        (lambda x: 100 * x.abs(), lambda x: 100 - 100 * x.abs(), "100 minus what is expected"),
        (lambda x: x > 0, lambda x: x, "Return True or False, not the size of something"),
        (lambda x: x, lambda x: x.mean, "x.mean() calls it"),
        (lambda x: x, lambda x: lambda y: y, "norm(x) calls a function"),
    ],
)
def test_general_sentences(reference, answer, words, monkeypatch, capsys):
    """An answer that no known mistake explains gets a sentence all the same."""
    right = reference(M)
    parts = ("first", "second", "third")[:len(right)] if isinstance(right, tuple) else ()
    said = ask(monkeypatch, reference, (M,), (torch.cat((2 * M, 0 * M[:1])),), parts=parts)
    assert words in said(answer, capsys)


def test_a_mean_over_other_axes_is_named(monkeypatch, capsys):
    said = ask(monkeypatch, lambda x: x.mean((0, 1)), (torch.rand(2, 3, 5),))
    assert "runs over other axes than it should" in said(lambda x: x.mean(-1), capsys)


def test_a_property_that_only_a_later_input_breaks_names_this_input(monkeypatch, capsys):
    properties = {"Yours is not positive.": lambda y: (y > 0).all()}
    said = ask(monkeypatch, lambda x: x.exp(), (M,), (M - 9,), properties=properties)
    assert "Yours is not positive. (See the input: input 1.)" in said(lambda x: x + 4, capsys)
    assert "Yours is not positive.\n" in said(lambda x: x - 4, capsys)


def no_return(x):
    if len(x) < 3:
        return x


def tuple_of_a_model(x):
    logits = (x, None)
    return logits.mean(0)


def without_end(x):
    return without_end(x)


def without_a_first_value(x):
    total += x  # noqa: F821, F841
    return total


def without_flatten(x):
    return torch.nn.functional.cross_entropy(x[None].float(), torch.zeros(1, 2).long())


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda x: torch.sqrt(len(x)), "torch's sqrt takes a tensor"),
        (lambda x: math.sqrt(x.abs()), "math.sqrt takes one number"),
        (lambda x: (len(x) - 1).sqrt(), "so it has no .sqrt: use math.sqrt(x)"),
        (lambda x: float(x.abs()), "One number is needed"),
        (lambda x: x if x > 0 else -x, "need a single True or False"),
        (lambda x: x / x.max(-1), "returns two things, the values and their indices"),
        (lambda x: x.abs().median(-1), "With an axis, .median() returns two things"),
        (lambda x: math.sqrt(x.abs().max(-1)), "With an axis, .max() returns two things"),
        (no_return, "With input 1 your function returns nothing"),
        (lambda x: [].append(x), "ends without a `return`"),
        (tuple_of_a_model, "logits = model(x, y)[0]"),
        (without_flatten, "flatten batch and time"),
        (lambda x: (x > 0).mean(), "need .double()"),
        (lambda x: x.mean * 2, "without its parentheses"),
        (lambda x: [1.0, 2.0].mean(), "torch.tensor makes a tensor of a list"),
        (lambda x: [y for y in x.sum()], "A single number stands where several are needed"),
        (lambda x: x[::-1], "x.flip(0) reverses"),
        (lambda x: x[9], "the last of n entries"),
        (lambda x: x[None].expand(3, -1, -1).mT.view(-1), ".reshape(...) copies them"),
        (lambda x: x.reshape(5, -1), "another number of entries"),
        (lambda x: x.squre(), "A tensor has no .squre; did you mean .square?"),
        (lambda x: torch.max(1.0, 2.0), "its first argument is a Python number"),
        (lambda x: undefined_name, "That name is not defined"),  # noqa: F821
        (lambda x, y: x, "with the arguments of the stub"),
        (lambda x: len(x) ^ 2.5, "A power is x ** y"),
        (lambda x: x.sum() ^ 2.5, "A power is x ** y"),
        (lambda x: x ^ 2, "A power is x ** y"),
        (lambda x: {"y": x}["z"], "no such key"),
        (lambda x: x.mean, "x.mean() calls it"),
        (lambda x: f"{x.sum()}", "returns text"),
        (without_end, "calls itself without end"),
        (without_a_first_value, "before it has a value"),
        (lambda x: x.sum(5), "There is no such axis"),
        (lambda x: math.sqrt(x.max(-1).values), "math.sqrt takes one number"),
        (lambda x: x + x.mean(0, keepdim=True)[:, :2], "write down the shape of each part"),
        (lambda x: torch.stack([x, x[0]]), "torch.stack needs tensors of one shape"),
        (lambda x: torch.stack([1, 2]), "For a list of numbers use torch.tensor"),
        (lambda x: math.sqrt(-1.0), "a root or a logarithm gets a number that it is not defined"),
        (lambda x: torch.bmm(x[None], x[None].mT.float()), "different dtypes"),
        (lambda x: no_return(x, x), "too many or too few arguments in that line"),
        (lambda x: torch.squre(x), "There is no torch.squre; did you mean .square?"),
        (lambda x: torch.nn.functional.cross_entropy(x, x[0].long()), "one target for each row"),
        (lambda x: None + x, "Something in that line is None"),
        (lambda x: (x, None), "One of the values that your function returns is None"),
        (lambda x: {1.0, 2.0}, "in braces"),
        (lambda x: {"y": 1.0}, "in braces"),
        (lambda x: (x - 9).log(), "a logarithm of a negative number"),
    ],
)
def test_common_errors_get_a_sentence(answer, words, monkeypatch, capsys):
    """PyTorch's messages that beginners find hard to read are explained."""
    said = ask(monkeypatch, lambda x: x.abs(), (M,), (torch.cat((M, M)),))
    assert words in said(answer, capsys)


@pytest.mark.parametrize(
    "reference, answer, words",
    [
        (lambda x: x.abs().mean(), lambda x: x.abs(), "One number is expected, and .mean() over"),
        (lambda x: (x > 0).all(), lambda x: x > 0, "expected, and .all() over yours gives it"),
        (lambda x: (x > 0).all(), lambda x: x > 9, "is .all() or .any() missing at the end?"),
        (lambda x: x.abs().sum(0), lambda x: x.abs().sum(), "reduce over everything"),
        (
            lambda x: (x.sum(), x.max()),
            lambda x: x.sum(),
            "2 values are expected: first and second",
        ),
        (lambda x: x.cumsum(0), lambda x: 7 * torch.cat((x, x[:1])), "has one row too many"),
        (lambda x: x.cumsum(0), lambda x: 7 * x[1:], "has one row too few"),
    ],
)
def test_a_wrong_number_of_values_or_rows_gets_a_sentence(
    reference, answer, words, monkeypatch, capsys
):
    """A forgotten mean() or .all(), one too many, and a missing value are recognized."""
    said = ask(monkeypatch, reference, (M,), (torch.cat((M, M)) + 4,), parts=("first", "second"))
    assert words in said(answer, capsys)


def test_tiny_answers_are_not_called_constant_or_nearly_right(monkeypatch, capsys):
    """Numbers are compared by their ratio, not by a difference that all tiny numbers pass."""
    said = ask(monkeypatch, lambda n: 20.0 * n, (1,), (2,), (3,))
    out = said(lambda n: 1e-16 * n**3, capsys)
    assert "for every input" not in out and "times what is expected" not in out
    said = ask(monkeypatch, lambda n: 1e-3 * n, (1,), (2,), (3,))
    assert "Nearly" not in said(lambda n: 5e-3 + 1e-3 * n**2, capsys)


def test_a_factor_that_is_an_argument_is_named(monkeypatch, capsys):
    """If an answer is too large by an argument, that argument is named."""
    said = ask(monkeypatch, lambda n, gpus: 5.0 * n / gpus, (2, 3), (7, 4), (3, 8))
    assert "gpus times what is expected" in said(lambda n, gpus: 5.0 * n + 0 * gpus, capsys)
    assert "sqrt(gpus) times" in said(lambda n, gpus: 5.0 * n / gpus**0.5, capsys)
    assert "is gpus^2 times" in said(lambda n, gpus: 5.0 * n * gpus, capsys)
    assert "is 1/gpus times" in said(lambda n, gpus: 5.0 * n / gpus**2, capsys)
    assert "is 1/gpus^2 times" in said(lambda n, gpus: 5.0 * n / gpus**3, capsys)


def test_a_factor_that_is_a_size_is_named(monkeypatch, capsys):
    """If an answer is too large by a size of an argument, that size is named."""
    said = ask(monkeypatch, lambda x: x.norm(), (M,), (M[:, :2],), (M[:1],))
    assert "1/sqrt(x.shape[-1]) times" not in said(lambda x: x.norm() / x.numel() ** 0.5, capsys)
    assert "1/sqrt(x.shape[-1]) times" in said(lambda x: x.norm() / x.shape[-1] ** 0.5, capsys)


def test_a_plain_factor_is_followed_by_the_broken_property(monkeypatch, capsys):
    """A factor that is only a number does not replace a more helpful sentence."""
    smaller = (lambda y, x: y.max() <= x.max(), "Yours is larger than x.")
    said = ask(monkeypatch, lambda x: x, (M,), properties=[smaller])
    out = said(lambda x: 1.3 * x, capsys)
    assert "everywhere 1.3 times what is expected." in out and "Yours is larger than x." in out


def test_an_argument_returned_unchanged_is_named(monkeypatch, capsys):
    """A value that is an argument is recognized."""
    said = ask(
        monkeypatch,
        lambda x, y: (2 * x, 3 * y),
        (M, M + 1),
        (M.T, M.T - 1),
        parts=("double", "triple"),
    )
    out = said(lambda x, y: (2 * x, y), capsys)
    assert "triple: Yours is y, unchanged." in out and "is x," not in out


def test_a_constant_answer_is_told_what_it_should_depend_on(monkeypatch, capsys):
    """A value that is the same for all inputs is recognized."""
    said = ask(
        monkeypatch, lambda n, width: (n + 1, width + 1), (1, 2), (3, 4), parts=("first", "second")
    )
    out = said(lambda n, width: (n + 1, 7 + 0 * width), capsys)
    assert "second: Yours is 7 for every input. The right answer depends on width." in out


def test_a_transposed_value_is_named(monkeypatch, capsys):
    """The transposed one of several values is named."""
    said = ask(monkeypatch, lambda x: (x, x.sum(0)), (M,), parts=("dx", "dweight"))
    assert "dx is transposed." in said(lambda x: (x.T, x.sum(0)), capsys)


def holds(check, answers, number):
    """Return True if a property holds for the answers to all inputs."""
    exercise, given = EXERCISES[number], arguments(EXERCISES[number])
    expected = grader.answers(exercise.reference, exercise)[0]
    for label, found in answers.items():
        if not isinstance(found, Exception):
            parts, wanted = map(mistakes.doubles, aligned(found, expected[label], exercise.parts))
            if False is mistakes.property_holds(check, parts, wanted, given[label], exercise):
                return False
    return True


@pytest.mark.parametrize("number", [number for number in EXERCISES if EXERCISES[number].properties])
def test_properties_hold_for_the_right_answer_and_can_fail(number):
    """Each property holds for the reference and fails for some wrong answer."""
    exercise = EXERCISES[number]
    right = grader.answers(exercise.reference, exercise)[0]
    changes = (
        lambda x: 3 * x + 1,
        lambda x: 0.5 * x,
        lambda x: -x,
        lambda x: 0 * x,
        lambda x: 1.2 * x,
        lambda x: 9 * x,
        lambda x: x.flip(-1) if x.dim() else x + 9,
        lambda x: x + 1.5,
        lambda x: x.flatten()[:1].expand(3),
        lambda x: 1.005 * x,
    )
    wrong = [
        {label: [change(x.double()) for x in parts] for label, parts in right.items()}
        for change in changes
    ]
    sums = {}
    for label, parts in right.items():
        sums[label] = [x.double().flatten()[: 2 + i].sum(-1) for i, x in enumerate(parts)]
    wrong.append(sums)
    wrong += [
        {
            label: [*parts[:-1], parts[-1].double().expand(2, *parts[-1].shape)]
            for label, parts in right.items()
        }
    ]
    wrong += [grader.answers(mistake, exercise)[0] for mistake, _ in exercise.misconceptions]
    assert len({sentence for _, sentence in exercise.properties}) == len(exercise.properties)
    for place, (check, sentence) in enumerate(exercise.properties):
        is_last = place == len(exercise.properties) - 1
        assert holds(check, right, number) or is_last and not holds(check, right, number), sentence
        assert any(
            not holds(check, answers, number) for answers in wrong
        ), f"cannot fail: {sentence}"
        if not is_last:
            assert holds(check, right, number), sentence


def test_inputs_prints_the_result_of_the_students_function(monkeypatch, capsys):
    """inputs() prints a result or an error, and nothing if nothing went wrong."""
    said = ask(monkeypatch, lambda x: x.abs(), (M.abs(),), (M,))
    said(lambda x: 7 * x, capsys)
    grader.inputs("1.1")
    out = capsys.readouterr().out
    assert (
        "with input 0, your function returned" in out
        and "28" in out
        and "run its cell again" in out
    )
    said(lambda x: x.neg_(), capsys)
    assert torch.equal(grader.inputs("1.1")[0], M.abs())
    said(lambda x: x.undefined, capsys)
    grader.inputs("1.1")
    assert "your function raised AttributeError" in capsys.readouterr().out
    grader.grade("1.1", lambda x: "\n".join(map(str, range(99))))
    grader.inputs("1.1")
    out = capsys.readouterr().out
    assert "17\n18\n... (80 more lines)\n" in out and "\n19\n" not in out
    said(lambda x: x.abs(), capsys)
    assert grader.inputs("1.1") and not capsys.readouterr().out


@every_lesson
def test_untouched_notebook_runs(name, runs):
    """The committed notebook runs from top to bottom with nothing solved."""
    row = runs[name].result()
    print(f"{name}: {row['seconds']} s")
    assert row["note"] == "" and row["unsolved"] == list(graded(LESSONS[name])), row


# ---- Grading a class -----------------------------------------------------------------------------


def notebook(path, *cells, text=""):
    """Write a notebook with these code cells, and with a cell of text before them."""
    path.parent.mkdir(exist_ok=True)
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    if text:
        made.cells.insert(0, nbformat.v4.new_markdown_cell(text))
    nbformat.write(made, path)
    return path


DRIFT = "drift = grade('1.1', lambda n, a, b, m, v: (m + n * a, v * b ** n))"
SAMPLE_VARIANCE = """def f(x, eps):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + eps) ** 0.5
layer_norm = grade('1.2', f)"""
SWALLOWS = """import time
def f(n):
    while True:
        try:
            while True:
                time.sleep(0.01)
        except:
            pass
largest = grade('1.3', f)
assert f is not largest"""
CLASS = {
    "alice/01.ipynb": [
        "%matplotlib inline\n%config InlineBackend.figure_format = 'svg'\n"
        "import a_package_that_is_not_here",
        DRIFT,
        "raise ValueError('x\\nmallory.ipynb  11 solved, 0 wrong (-), 0 unsolved (-), 3 s')",
        "quit()",
        SAMPLE_VARIANCE + "\n1 / 0",
        "def largest(n):\n    raise NotImplementedError\nlargest = grade('1.3', largest)",
    ],
    "bob/01.ipynb": [
        "from grader import grade",
        SWALLOWS,
        DRIFT,
        "def layer norm(x, eps):\n    return x\nhelper = 1",
        "layer_norm = grade('1.2', layer_norm)",
        "assert callable(globals().get('layer_norm'))",
        "while True:\n    time.sleep(0.01)",
        "helper + 1",
        "import os\nos._exit(0)",
        "geometry = grade('1.4', lambda x: x)",
    ],
    "Żaneta.ipynb": [
        "print('σ')",
        DRIFT,
        "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ntime.sleep(100)",
    ],
}


def test_a_class_of_notebooks_is_graded(runs):
    """Broken, endless and cheating notebooks each give one row; table and JSON are right."""
    out, rows, folder = runs["class"].result()
    alice, bob, zaneta, broken = rows.values()
    assert (
        alice["solved"] == "1.1"
        and alice["wrong"] == "1.2"
        and alice["unsolved"].startswith("1.3 1.4 ")
    )
    assert "sample variance" in alice["mistakes"] and "matplotlib" not in alice["note"]
    assert alice["note"].startswith(
        "at 1.1 (cell 1) ModuleNotFoundError: No module named 'a_package_that_is_not"
    )
    assert "at 1.2 (cell 4) SystemExit" in alice["note"] and alice["note"].endswith(
        "; 4 errors in all"
    )
    assert len(alice["note"]) < 400 and "mallory" in alice["note"] and "\nmallory" not in out
    syntax = "SyntaxError: expected '(', line 1: def layer norm(x, eps):"
    assert bob["solved"] == "1.1" and bob["wrong"] == "1.2 1.3"
    assert bob["mistakes"] == f"1.2: {syntax}\n1.3: no end within 6 s"
    assert bob["note"] == (
        "ended early with exit code 0, at 1.4 (cell 9 of 10); "
        f"at 1.2 (cell 4) {syntax}; at 1.4 (cell 7) TooLong: no end within 6 s"
    )
    assert (
        zaneta["solved"] == "1.1"
        and zaneta["note"] == "stopped after 60 s, at the end (cell 3 of 3)"
    )
    assert "not a notebook" in broken["note"] and broken["unsolved"].startswith("1.1 1.2")
    table = out[out.index("exercise  solved  wrong  unsolved  ") :]
    assert re.search(r"1\.1 +3 +0 +1\n1\.2 +0 +2 +2  1 x .*sample variance", table)
    found = json.loads((folder / "out/alice/01.ipynb.json").read_text())
    assert found["score"] == sum(test["score"] for test in found["tests"]) == 1
    assert [test["name"] for test in found["tests"][:3]] == [
        "Exercise 1.1",
        "Exercise 1.2",
        "Exercise 1.3",
    ]
    assert {test["max_score"] for test in found["tests"]} == {1} and "sample" in found["tests"][1][
        "output"
    ]
    found = json.loads((folder / "out/bob/01.ipynb.json").read_text())
    outputs = [test["output"] for test in found["tests"]]
    assert (
        outputs[:4] == ["solved", syntax, "no end within 6 s", "unsolved"]
        and found["output"] == bob["note"]
    )
    assert sorted(path.name for path in (folder / "out").glob("*/*")) == ["01.ipynb.json"] * 2


def missing(name):
    return NameError(f"name '{name}' is not defined", name=name)


@pytest.mark.parametrize(
    "call",
    [
        "drift = grade('1.1', drift)",
        "grade('1.1', drift)",
        "def drift(n):\n    return n\ndrift = grade('1.1', drift)",
    ],
)
def test_an_unwritten_answer_is_unsolved_and_one_whose_cell_failed_is_wrong(monkeypatch, call):
    """A missing name counts as tried only if something of it was written."""
    monkeypatch.setattr(grader, "results", {})
    shell = SimpleNamespace(user_ns={})
    run_cells.replace_answers(shell, call, missing("drift"), None)
    assert not grader.results and shell.user_ns["drift"] is EXERCISES["1.1"].reference
    run_cells.replace_answers(shell, call, missing("drift"), "SyntaxError: invalid syntax")
    assert grader.results == {"1.1": ("wrong", ["SyntaxError: invalid syntax"])}
    run_cells.replace_answers(shell, call.replace("1.1", "1.2"), missing("another"), None)
    assert grader.results["1.2"] == ("wrong", ["NameError: name 'another' is not defined"])
    run_cells.replace_answers(shell, call.replace("1.1", "1.99"), missing("another"), None)
    assert "1.99" not in grader.results  # there is no such exercise


def test_a_missing_name_is_blamed_on_the_cell_that_would_define_it():
    """Only a failed cell that mentions the name is its cause."""
    words = "SyntaxError: invalid syntax"
    failed = {"x = = 3": words, "drifts = (": words}
    cause = partial(run_cells.cause_of, at="1.1", failed=failed, unreadable={"1.1": words})
    assert cause(missing("x"), "x + 1") == words
    assert cause(missing("drift"), "drift = grade('1.1', drift)") == words
    assert cause(missing("never_defined"), "y = never_defined") is None
    assert cause(missing("drift"), "y = drift") is None
    assert cause(ValueError("x"), "x + 1") is None


def test_an_exception_that_cannot_be_printed_is_named_by_its_type():
    class WithoutWords(Exception):
        def __str__(self):
            return None

    assert run_cells.in_words(WithoutWords()) == "WithoutWords"
    assert run_cells.in_words(AssertionError()) == "AssertionError"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_process_that_a_notebook_has_started_ends_with_it(tmp_path):
    """Only a process that is still running could write into the pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    program = f"""
        import subprocess
        subprocess.Popen("sleep 2; echo running", shell=True, stdout=open({str(pipe)!r}, "w"))
        raise ValueError("nothing reported")"""
    (tmp_path / "lessons/grading").mkdir(parents=True)
    (tmp_path / "lessons/grading/run_cells.py").write_text(textwrap.dedent(program))
    end = run_cells.run_process(str(tmp_path), 60)
    assert end == "did not start: ValueError: nothing reported"
    os.set_blocking(reader, True)
    assert os.read(reader, 9) == b""
    os.close(reader)


@pytest.fixture
def results_of_cells(monkeypatch):
    """Set what is found in a notebook's cells, in place of running them.

    A lesson's whole notebook may just be starting in another thread (see runs). It is still run.
    """

    def set_results(results):
        def instead(cells, *others):
            if len(cells) > 9:
                return run_cells.run_cells(cells, *others)
            return results, []

        monkeypatch.setattr(grade_class, "run_cells", instead)

    return set_results


@pytest.fixture
def not_run(results_of_cells):
    """grade_class without the process: nothing is found in a notebook's cells."""
    results_of_cells({})


@pytest.mark.parametrize(
    "name, content, lesson, note",
    [
        ("01.ipynb", None, 1, "no such file"),
        ("hw2.ipynb", "", 2, "not a notebook: the file is empty"),
        ("student12.ipynb", None, 0, "no such file; its lesson"),
        ("x.ipynb", "{}", 0, "not a notebook: the file begins with '{}'"),
        ("a_04_nGPT (1).ipynb", "%PDF-1.5 ä", 4, "not a notebook: the file begins with '%PDF-1.5"),
        ("5.ipynb", (), 5, "no code cells"),
        ("x.ipynb", ("# Lesson 6: The race", "1"), 6, "no exercise was graded"),
        ("x.ipynb", ("", "1"), 0, "no exercise was graded; its lesson"),
        ("99.ipynb", ("", "grade('7.1', f)"), 7, "no exercise"),
        ("3.ipynb", ("## Lesson 3", 'f = grade( "8.2",\n f)'), 8, "no exercise"),
    ],
)
def test_the_lesson_is_recognized_though_nothing_runs(
    not_run, tmp_path, name, content, lesson, note
):
    """A file that cannot be run gets a note and its lesson's exercises as unsolved."""
    path = tmp_path / name
    if isinstance(content, tuple):
        notebook(path, *content[1:], text="".join(content[:1]))
    elif content is not None:
        path.write_text(content, encoding="latin-1")
    row = grade_class.run_notebook(path)
    expected = [number for number in EXERCISES if int(number.split(".")[0]) == lesson]
    assert row["unsolved"] == expected and row["solved"] == row["wrong"] == []
    assert row["note"].startswith(note)


@pytest.mark.parametrize("text", ['{"cells": [1]}', "{}", "[]", 'grade("1.2", f)', ""])
def test_the_text_of_a_broken_notebook_is_kept(text):
    assert grade_class.without_outputs(text) == text


@pytest.mark.parametrize("version, encoding", [(4, "utf-8"), (4, "utf-8-sig"), (3, "utf-8")])
def test_a_call_that_a_cell_has_printed_is_not_a_call(not_run, tmp_path, version, encoding):
    """The grader's own messages name exercises of lesson 1."""
    path = notebook(tmp_path / "x.ipynb", "grade(4.1, f)", "grade('4.1', f)")
    made = nbformat.read(path, 4)
    printed = 'grade("1.2", layer_norm) takes the number in quotes'
    made.cells[0].outputs = [nbformat.v4.new_output("stream", text=printed)]
    path.write_text(nbformat.writes(made, version), encoding=encoding)
    assert {number.split(".")[0] for number in grade_class.run_notebook(path)["unsolved"]} == {"4"}


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_a_file_that_cannot_be_read_gives_a_row(tmp_path):
    (tmp_path / "hw2.ipynb").symlink_to("/proc/self/mem")
    row = grade_class.run_notebook(tmp_path / "hw2.ipynb")
    assert row["note"].startswith("cannot be graded: OSError") and row["unsolved"][0] == "2.1"


def test_a_path_that_cannot_be_looked_up_gives_a_row(tmp_path):
    options = SimpleNamespace(notebooks=["a" * 300], seconds=9, cell_seconds=9, steps=1, jobs=1,
                              csv=tmp_path / "grades.csv", json=None)
    grade_class.grade_all(options)
    assert "cannot be graded: OSError" in options.csv.read_text()


def test_data_is_copied_where_links_are_forbidden(tmp_path, monkeypatch):
    """On Windows, links need a privilege."""
    def forbid(*_):
        raise OSError("A required privilege is not held by the client")

    (tmp_path / "root/data/stdlib").mkdir(parents=True)
    (tmp_path / "root/data/stdlib/x.bin").write_text("tokens")
    (tmp_path / "root/requirements.txt").touch()
    monkeypatch.setattr(Path, "symlink_to", forbid)
    monkeypatch.setattr(run_cells, "ROOT", tmp_path / "root")
    run_cells.copy_repository(tmp_path / "copy")
    assert (tmp_path / "copy/data/stdlib/x.bin").read_text() == "tokens"


def test_a_notebook_cannot_change_the_data(tmp_path, monkeypatch):
    """Its folders are its own, and the files in them are copies, or links to shards."""
    root = tmp_path / "root"
    for folder in ("disk/far", "root/data/stdlib", "root/assets"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.bin").write_text("tokens")
    (root / "assets/lesson.json").write_text("stored")
    for file in ("requirements.txt", "data/.stdlib.lock"):
        (root / file).touch()
    (root / "data/far").symlink_to("../../disk/far")
    (root / "data/circle").symlink_to(root / "data")
    (root / "data/itself").symlink_to(root / "data/itself")
    monkeypatch.setattr(run_cells, "ROOT", root)
    run_cells.copy_repository(tmp_path / "deep/copy")
    data = tmp_path / "deep/copy/data"
    assert not (data / ".stdlib.lock").exists()        # a notebook's lock is its own
    for name in ("stdlib", "far"):
        assert (data / name / "x.bin").read_text() == "tokens"
        shutil.rmtree(data / name, ignore_errors=True)
    assert not (data / "stdlib").exists()
    (tmp_path / "deep/copy/assets/lesson.json").write_text("changed")
    assert (root / "assets/lesson.json").read_text() == "stored"
    for kept in (root / "data/stdlib", root / "data/far"):
        assert (kept / "x.bin").read_text() == "tokens"


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.update(nbformat_minor=4),
        lambda made: [cell.pop("id") for cell in made["cells"]],
        lambda made: made["metadata"].update(colab={"provenance": []}, accelerator="GPU"),
        lambda made: [
            cell["metadata"].update(vscode={"languageId": "python"}, id="x")
            for cell in made["cells"]
        ],
        lambda made: made["cells"].insert(0, dict(cell_type="raw", metadata={}, source=["x"])),
        lambda made: made.update(begins_with="\ufeff"),
    ],
)
def test_files_saved_by_other_programs_are_read(tmp_path, change):
    """Other metadata, cells and a byte-order mark do no harm."""
    made = json.loads(notebook(tmp_path / "x.ipynb", "a = 1", "b = 2").read_text())
    change(made)
    beginning = made.pop("begins_with", "")
    (tmp_path / "x.ipynb").write_text(beginning + json.dumps(made), encoding="utf-8")
    assert grade_class.code_cells(tmp_path / "x.ipynb") == ["a = 1", "b = 2"]


def test_a_file_of_format_version_3_is_read(tmp_path):
    """Old notebooks are converted."""
    cell = dict(
        cell_type="code",
        language="python",
        collapsed=False,
        input=["a = 1"],
        outputs=[],
        metadata={},
    )
    made = dict(
        nbformat=3, nbformat_minor=0, metadata={}, worksheets=[dict(cells=[cell], metadata={})]
    )
    (tmp_path / "x.ipynb").write_text(json.dumps(made))
    assert grade_class.code_cells(tmp_path / "x.ipynb") == ["a = 1"]


def test_forged_results_are_not_counted(tmp_path, results_of_cells):
    """Results that are not the grader's are refused, and names are printed in one line."""
    forged = {"1.1": "all solved", "9.9": ["solved", []]}
    results_of_cells(forged)
    row = grade_class.run_notebook(notebook(tmp_path / "x.ipynb", DRIFT))
    assert row["solved"] == [] and row["note"] == "the result for 1.1 does not come from the grader"
    name = "x\nmallory\x1b[31m\u2028.ipynb"
    assert (
        grade_class.run_notebook(tmp_path / "x", name=name)["notebook"] == "x mallory [31m .ipynb"
    )


def test_a_result_of_a_lesson_that_no_call_names_is_counted(tmp_path, results_of_cells):
    """Its number may be in a variable. Its sentence may be longer than a note."""
    sentence = " ".join(["word"] * 60)
    results_of_cells({"1.1": ["solved", []], "2.1": ["wrong", [sentence]]})
    row = grade_class.run_notebook(notebook(tmp_path / "x.ipynb", DRIFT))
    assert row["solved"] == ["1.1"] and row["wrong"] == ["2.1"]
    assert row["mistakes"] == {"2.1": [sentence]}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no alarm on this system")
@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "while True:\n try: n = 1\n except (Exception, KeyboardInterrupt): pass",
        "while True:\n try:\n  while True: n = 1\n except: pass",
        "for i in range(10**9):\n try: n = sum(range(99))\n except: n = 1",
    ],
)
def test_an_endless_function_costs_one_exercise(one, body, monkeypatch):
    """The time limit ends a function even if it swallows exceptions."""
    told = []
    monkeypatch.setattr(grader, "grade", grader.grade)
    run_cells.limit_grade(0.2, lambda **news: told.append(news))
    names = {}
    exec(compile("def f(n):\n" + textwrap.indent(body, " "), "<ipython-input-1-0>", "exec"), names)
    before = signal.getsignal(signal.SIGALRM)
    start = time.monotonic()
    try:
        assert grader.grade("1.1", names["f"]) is square
        assert grader.results["1.1"] == ("wrong", ["no end within 0.2 s"]) and told == [
            {"at": "1.1"},
            {},
        ]
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0  # for the rest of the cell
        run_cells.set_alarm(0)
        right = lambda x: x * x
        assert grader.grade("1.1", right) is right and time.monotonic() - start < 8
    finally:
        run_cells.set_alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_rows_are_named_by_the_paths_from_the_common_folder(tmp_path, monkeypatch):
    """Names differ although file names do not."""
    monkeypatch.chdir(tmp_path)
    names = grade_class.names_of(["a/01.ipynb", f"{tmp_path}/b/c/01.ipynb", "d.ipynb"])
    assert names == ["a/01.ipynb", "b/c/01.ipynb", "d.ipynb"]
    assert grade_class.names_of(["a/b/01.ipynb", "a/b/02.ipynb"]) == ["01.ipynb", "02.ipynb"]
    assert grade_class.names_of(["a/b/01.ipynb"]) == ["01.ipynb"]


def test_copies_for_students_have_no_solutions(tmp_path, monkeypatch, capsys):
    """Only the folded solutions and REPOSITORY differ from the committed notebooks."""
    grade_class.write_student_copies(tmp_path / "out", "https://example.org/lessons")
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == list(LESSONS)
    for name, whole in LESSONS.items():
        copied = nbformat.read(tmp_path / "out" / f"{name}.ipynb", 4)
        assert not folded(copied, "Solution") and folded(copied, "Hint") == folded(whole, "Hint")
        assert text(copied, "markdown").count("</details>") == text(copied, "markdown").count(
            "<details>"
        )
        assert len(copied.cells) == len(whole.cells) and all(cell.source for cell in copied.cells)
        for new, old in zip(copied.cells, whole.cells):
            assert new.get("outputs") == old.get("outputs") and new.metadata == old.metadata
            old_source = old.source.replace(
                'REPOSITORY = ""', 'REPOSITORY = "https://example.org/lessons"'
            )
            assert new.source == old_source or new.cell_type == "markdown"
        assert '"https://example.org/lessons"' in text(copied, "code")
    with pytest.raises(FileExistsError):
        grade_class.write_student_copies(tmp_path / "out", "")
    monkeypatch.setattr(sys, "argv", ["grade_class.py", f"--student={tmp_path / 'out'}"])
    with pytest.raises(SystemExit):
        grade_class.main()
    assert "01_layernorm_and_rmsnorm.ipynb exists already" in capsys.readouterr().err


def setup_of(name):
    """Return what all lessons' setup cells share, from REPOSITORY to ROOT."""
    start = next(cell.source for cell in LESSONS[name].cells if cell.cell_type == "code")
    return start[start.index("REPOSITORY") : start.index("\n", start.index("ROOT = ")) + 1]


@pytest.mark.skipif(not shutil.which("git"), reason="no git here")
def test_the_setup_cell_finds_or_clones_the_repository(tmp_path):
    """It works in the notebook's folder, above it, and in an empty one."""
    assert len({setup_of(name) for name in LESSONS}) == 1, "one setup for all"
    home, away = tmp_path / "home", tmp_path / "away"
    shutil.copytree(HERE / "begin", home / "lessons/begin")
    away.mkdir()
    (home / "model.py").touch()
    (home / "requirements.txt").write_text("pytest==1.0\n")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=home, check=True)
    code = setup_of("04_ngpt") + "print(ROOT, Path.cwd(), sys.path[0])"
    away_code = code.replace('REPOSITORY = ""', f"REPOSITORY = {str(home)!r}")
    for folder, source, root in (
        (away, away_code, away / "course"),
        (away, away_code, away / "course"),
        (home / "lessons", code, home),
        (home, code, home),
    ):
        said = subprocess.run(
            [sys.executable, "-c", source], cwd=folder, capture_output=True, text=True
        )
        assert said.stdout == f"{root} {root} {root}\n", said.stderr
    (home / "model.py").write_text("changed = True\n")
    said = subprocess.run([sys.executable, "-c", code], cwd=home, capture_output=True, text=True)
    assert said.stdout.startswith("model.py has been changed since the last commit")
    assert (
        "git"
        in subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
        ).stderr
    )


def test_begin_lists_missing_packages():
    """Only packages that cannot be imported are installed."""
    lines = "torch==1.0   # any version will do\n\n# no-line==1\nnot_there==2.0  # but this"
    assert begin.missing(lines) == ["not_there==2.0"]


def test_begin_installs_missing_packages(monkeypatch):
    """It says what to do if pip fails."""
    commands, returncode = [], 0

    def run(command, **options):
        commands.append(command)
        return SimpleNamespace(returncode=returncode, stdout="")

    monkeypatch.setattr(begin.subprocess, "run", run)
    monkeypatch.setattr(begin, "missing", lambda requirements: ["not_there==2.0"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(HERE)
    begin.begin()
    assert commands[0][1:4] == ["-m", "pip", "install"] and commands[0][-1] == "not_there==2.0"
    returncode = 1
    with pytest.raises(ImportError, match="^pip could not install not_there==2.0. Install them"):
        begin.begin()


def test_begin_forgets_modules_of_other_folders(monkeypatch):
    """A model.py of somebody else is imported no longer, and our own modules are kept."""
    monkeypatch.setitem(sys.modules, "model", SimpleNamespace(__file__="/elsewhere/model.py"))
    ours = sys.modules["grader"]
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(HERE)
    begin.begin()
    assert "model" not in sys.modules and sys.modules["grader"] is ours
    assert {HERE.parent, HERE / "grading", HERE / "studies"} <= set(map(Path, sys.path))


def test_begin_needs_no_git(monkeypatch):
    """Without it, nobody is told of changed programs."""
    monkeypatch.setenv("PATH", "")
    assert begin.changed_programs() == []


def test_an_old_setup_cell_still_runs(tmp_path):
    """In older notebooks grader.py, diagram.py and variants.py lie beside the notebooks."""
    old = setup_of("04_ngpt") + textwrap.dedent("""
        from diagram import block_diagram
        from grader import grade, inputs
        import lessons.variants
        print(lessons.variants.StepsBlock.__name__, ROOT)""")
    said = subprocess.run([sys.executable, "-c", old], cwd=HERE, capture_output=True, text=True)
    assert said.stdout.endswith(f"StepsBlock {HERE.parent}\n"), said.stderr
