"""What holds for every lesson: python -m pytest lessons"""
import importlib
import re
import shutil
import textwrap
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import grader

HERE = Path(__file__).resolve().parent
LESSONS = {path.stem: nbformat.read(path, 4) for path in sorted(HERE.glob("[0-9]*.ipynb"))}
EXERCISES = {number: exercise for name in LESSONS
             for number, exercise in importlib.import_module(f"exercises_{name[:2]}").EXERCISES.items()}

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
    return {number: name for name, number in re.findall(r'^(\w+) = grade\("([\d.]+)", \1\)', text(notebook, "code"), re.M)}


@every_exercise
def test_reference_passes(number, capsys):
    assert grader.grade(number, EXERCISES[number].reference) is EXERCISES[number].reference
    assert capsys.readouterr().out.startswith(f"{number}  pass: ")


@every_exercise
def test_every_mistake_gets_its_own_sentence(number, capsys):
    sentences = [sentence for _, sentence in EXERCISES[number].misconceptions]
    assert len(sentences) >= 2 and len(set(sentences)) == len(sentences), "at least two, each with its own sentence"
    for wrong, sentence in EXERCISES[number].misconceptions:
        assert grader.grade(number, wrong) is EXERCISES[number].reference
        out = capsys.readouterr().out
        assert out.startswith(f"{number}  not yet: ") and [s for s in sentences if s in out] == [sentence]


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
        assert re.search(heading, prose), f"{number}: its heading should read **Exercise {number}** ●○○ · 5 minutes"
    assert list(graded(notebook)) == numbers == solutions and len(numbers) >= 5
    assert len(folded(notebook, "Hint")) == len(numbers), "every exercise has a folded Hint"
    assert prose.count("**Predict") >= 2 and "uestions" in prose and re.search("minutes|hours", prose[:1500])
    assert path.stat().st_size < 400_000, "over 400 KB: a smaller figure.dpi in the first cell helps"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    ran = [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert ran, "not run once from top to bottom: Restart and Run All, then save"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 2
    assert "not solved yet" in str(outputs)                          # the stubs are committed unsolved


@every_lesson
def test_untouched_lesson_runs(name, tmp_path):
    for path in HERE.parent.glob("*.py"):
        shutil.copy(path, tmp_path)
    if (HERE.parent / "data").exists():                              # else the lesson makes its corpus
        (tmp_path / "data").symlink_to(HERE.parent / "data")
    shutil.copytree(HERE, tmp_path / "lessons", ignore=shutil.ignore_patterns("*.ipynb", "__pycache__"))
    notebook = NotebookClient(
        nbformat.from_dict(LESSONS[name]), timeout=300, kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path / "lessons")}},
    ).execute()
    printed = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    assert sum("not solved yet" in line for out in printed for line in out.splitlines()) == len(graded(notebook))


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
    (lambda x: x.zero_(), ["it is 0 everywhere", "right with: zeros"]),
])
def test_grader_says_what_is_wrong(one, answer, words, capsys):
    assert grader.grade("1.1", answer) is square
    out = capsys.readouterr().out
    assert out.startswith("1.1  not yet: ") and not [word for word in words if word not in out], out
    assert ("That doubles." in out) == ("That doubles." in words) and out.endswith("going on with the reference\n")


@pytest.mark.parametrize("reference, right, wrong, words", [
    (lambda x: [0.5, x.sum()], lambda x: 0.5 * torch.eye(2)[0], lambda x: (0.5, 1.0), "off by 1 at [1]"),
    (lambda x: torch.tensor([1.0, 2.0]), lambda x: (1, 2.0), lambda x: [1, 2, 3], "(2,) expected, given shape (3,)"),
    (lambda x: True, lambda x: 1, lambda x: False, "with two zeros, the other answer is expected"),
    (lambda x: [True, False], lambda x: x.new_tensor([1, 0]), lambda x: [True, True], "1 of 2 answers are wrong"),
    (lambda x: (x, x.half()), lambda x: (x.double(), x.half()), lambda x: (x, x), "value 2: torch.float16 expected"),
])
def test_grader_compares_numbers_answers_and_dtypes(reference, right, wrong, words, monkeypatch, capsys):
    exercise = grader.Exercise(reference, lambda generator: [("two zeros", torch.zeros(2))], [])
    monkeypatch.setitem(importlib.import_module("exercises_01").EXERCISES, "1.1", exercise)
    assert grader.grade("1.1", right) is right
    assert grader.grade("1.1", wrong) is reference and words in capsys.readouterr().out


def test_an_exercise_is_added_as_the_grader_says(monkeypatch, capsys):
    example = textwrap.dedent(grader.__doc__[grader.__doc__.index("    def inputs"):])
    exercises = importlib.import_module("exercises_01").EXERCISES
    monkeypatch.setattr(importlib.import_module("exercises_01"), "EXERCISES", dict(exercises))
    new = {}
    exec(example, {"torch": torch, "Exercise": grader.Exercise, "EXERCISES": new})
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
