"""
Grade the notebooks of a class:

    python lessons/grading/grade_class.py submissions/*/*.ipynb

THIS RUNS THE STUDENTS' CODE with all your permissions: use a machine or an account that holds
nothing else. A student who wants to can forge the results. Each notebook runs in a process of its
own (run_cells.py), for at most --seconds, and each of its cells for at most --cell_seconds. A
broken or endless notebook gives a row like any other. --csv writes the rows to a file, --json=DIR
writes them for Gradescope.

    python lessons/grading/grade_class.py --student=DIR

writes copies of the lessons without their folded solutions, to hand out.
"""
import argparse
import csv
import importlib
import json
import os
import re
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import nbformat

import grader
from run_cells import CALL, in_words, plain, run_cells

ROOT = grader.ROOT
STATES = "solved", "wrong", "unsolved"
SOLUTION = re.compile(r"<details>\s*<summary>Solution.*?</details>\s*", re.S)


# ---- One notebook --------------------------------------------------------------------------------

def without_outputs(text):
    """Return a notebook's text without what its cells have printed, or that of a broken one as is.

    The grader's own messages contain calls of grade.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about cells without ids
            notebook = nbformat.reads(text, 4)
        for cell in notebook.cells:
            cell.pop("outputs", None)
        return json.dumps(notebook)
    except Exception:
        return text


def lessons_of(name, text):
    """Return the numbers of the lessons in a notebook.

    They are read from its calls of grade, else from its heading, else from its file name.
    """
    called = {call[2] for call in CALL.finditer(text)}
    heading = re.findall(r"# Lesson (\d+)\b", text)[:1]
    in_name = re.findall(r"(?<!\d)0?(\d)(?!\d)", name)[:1]
    return {int(number) for number in called or heading or in_name}


def exercises():
    """Return a dict: lesson -> the numbers of its exercises."""
    names = sorted(path.stem for path in ROOT.glob("lessons/grading/exercises_*.py"))
    return {int(name[-2:]): list(importlib.import_module(name).EXERCISES) for name in names}


def all_exercises():
    return sum(exercises().values(), [])


class NotGradable(Exception):
    """A file cannot be graded; the message says why."""


def sort_results(results, lessons):
    """Sort the exercises into solved, wrong and unsolved.

    All exercises of `lessons` count, and those of any other lesson of which one was graded.
    """
    found = dict(solved=[], wrong=[], unsolved=[], mistakes={})
    for lesson, numbers in exercises().items():
        if lesson not in lessons and not results.keys() & numbers:
            continue
        for number in numbers:
            result = results.get(number, ("unsolved", []))
            if len(result) != 2 or result[0] not in STATES:
                raise NotGradable(f"the result for {number} does not come from the grader")
            state, sentences = result
            found[state].append(number)
            if state == "wrong":
                found["mistakes"][number] = [plain(sentence, 500) for sentence in sentences]
    return found


def code_cells(path):
    """Return the sources of a notebook's code cells."""
    if not Path(path).is_file():
        raise NotGradable("no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about cells without ids
            # Some editors begin a file with a byte-order mark, which utf-8-sig drops.
            text = Path(path).read_text(encoding="utf-8-sig")
            notebook = nbformat.reads(text, 4)
        cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    except Exception:
        beginning = plain(Path(path).read_text(encoding="utf-8-sig", errors="replace"), 30)
        what = f"begins with {beginning!r}" if beginning else "is empty"
        raise NotGradable(f"not a notebook: the file {what}") from None
    if not cells:
        raise NotGradable("no code cells")
    return cells


def setup_of(lesson):
    """Return the first code cell of a lesson as it is in this repository."""
    for path in ROOT.glob(f"lessons/{lesson:02d}_*.ipynb"):
        return code_cells(path)[0]
    return ""


def run_notebook(path, seconds=600, steps=20, cell_seconds=120, name=None):
    """Return a row: the solved, wrong and unsolved exercises of a notebook, and what stopped it."""
    start = time.monotonic()
    path = Path(path)
    lessons = lessons_of(path.name, "")
    try:
        if path.is_file():
            text = path.read_text(encoding="utf-8-sig", errors="replace")
            lessons = lessons_of(path.name, without_outputs(text))
        cells = code_cells(path)
        setups = ["from grader import grade, inputs", *map(setup_of, lessons)]
        results, notes = run_cells(cells, setups, seconds, cell_seconds, steps)
        if not results:
            notes.append("no exercise was graded")
        found = sort_results(results, lessons)
    except Exception as error:
        found = sort_results({}, lessons)
        notes = [f"cannot be graded: {in_words(error)}"]
        if isinstance(error, NotGradable):
            notes = [str(error)]
    if not any(found.values()):
        notes.append("its lesson cannot be recognized")
    row = dict(notebook=plain(name or path, 1000), **found)
    return {**row, "seconds": round(time.monotonic() - start), "note": "; ".join(notes)}


# ---- The class -----------------------------------------------------------------------------------

def names_of(paths):
    """Return a name for each notebook: its path from the folder that all have in common."""
    whole = [Path(path).absolute() for path in paths]
    common = os.path.commonpath([path.parent for path in whole])
    return [path.relative_to(common).as_posix() for path in whole]


def row_in_text(row):
    """Return the row with text in place of lists, for the table in --csv."""
    words = {key: " ".join(row[key]) for key in STATES}
    mistakes = [f"{number}: {' '.join(said)}" for number, said in row["mistakes"].items() if said]
    return {**row, **words, "mistakes": "\n".join(mistakes)}


def print_row(row, width):
    """Print one row."""
    words = row_in_text(row)
    print(f"{row['notebook']:{width}}  {len(row['solved']):2} solved, "
          f"{len(row['wrong'])} wrong ({words['wrong'] or '-'}), "
          f"{len(row['unsolved'])} unsolved ({words['unsolved'] or '-'}), {row['seconds']} s",
          end="")
    print(f"; {row['note']}" if row["note"] else "", flush=True)
    for line in words["mistakes"].splitlines():
        print(f"{'':{width}}  {line}")


def write_json(row, folder):
    """Write what Gradescope reads as results.json."""
    state = {number: state for state in STATES for number in row[state]}
    tests = []
    for number in filter(state.get, all_exercises()):
        output = " ".join(row["mistakes"].get(number, [])) or state[number]
        score = int(state[number] == "solved")
        tests.append(dict(name=f"Exercise {number}", score=score, max_score=1, output=output))
    # Notebooks of the same name lie in different folders, so keep these.
    target = Path(folder, row["notebook"] + ".json")
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = dict(score=len(row["solved"]), output=row["note"], tests=tests)
    target.write_text(json.dumps(whole, indent=1))


def print_exercises(rows):
    """Print a table by exercise: how many solved it, and the most common mistake."""
    print("\nexercise  solved  wrong  unsolved  most common mistake")
    for number in all_exercises():
        counts = [sum(number in row[state] for row in rows) for state in STATES]
        if not any(counts):
            continue
        said = Counter()
        for row in rows:
            said.update(row["mistakes"].get(number, []))
        line = "{:8}  {:6}  {:5}  {:8}".format(number, *counts)
        for sentence, count in said.most_common(1):
            line += f"  {count} x {sentence}"
        print(line)


def write_student_copies(folder, repository):
    """Write copies of the lessons without their folded solutions.

    Their setup cell clones `repository` if they lie outside of this one.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path in sorted(ROOT.glob("lessons/[0-9]*.ipynb")):
        notebook = nbformat.read(path, 4)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = SOLUTION.sub("", cell.source).rstrip()
            else:
                cell.source = cell.source.replace('REPOSITORY = ""', f'REPOSITORY = "{repository}"')
        # Mode "x" never overwrites a file.
        with open(Path(folder, path.name), "x", encoding="utf-8") as file:
            nbformat.write(notebook, file)
        print(f"written: {Path(folder, path.name)}")


def grade_all(options):
    """Grade options.notebooks. Print and write each row as soon as those before it are done."""
    paths = []
    for path in options.notebooks:
        # The shells of Windows do not replace a pattern by the files that it names.
        # (Path.exists() would raise an error for a file in a folder that cannot be entered.)
        found = [path] if os.path.exists(path) else sorted(glob(path))
        paths.extend(found or [path])  # a path that names no file gets a row, too
    paths = list(dict.fromkeys(paths))
    names = names_of(paths)
    width = max(map(len, names))
    columns = ["notebook", *STATES, "mistakes", "seconds", "note"]
    rows = []

    def grade_one(path, name):
        return run_notebook(path, options.seconds, options.steps, options.cell_seconds, name)
    pool = ThreadPoolExecutor(options.jobs)
    with open(options.csv, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        for row in pool.map(grade_one, paths, names):
            rows.append(row)
            print_row(row, width)
            table.writerow(row_in_text(row))
            file.flush()
            if options.json:
                write_json(row, options.json)
    print_exercises(rows)
    print(f"written: {options.csv}")


def main():
    parser = argparse.ArgumentParser(description="Grade notebooks. THIS RUNS THE STUDENTS' CODE.")
    add = parser.add_argument
    add("notebooks", nargs="*")
    add("--seconds", type=float, default=600, help="time limit per notebook (default: 600)")
    add("--cell_seconds", type=float, default=120, help="time limit per cell (default: 120)")
    add("--steps", type=int, default=20,
        help="cut training runs to about this many steps (default: 20)")
    add("--jobs", type=int, default=os.cpu_count(),
        help="notebooks that run at the same time (default: one per core)")
    add("--csv", default="grades.csv", help="file for the rows (default: grades.csv)")
    add("--json", metavar="DIR", help="also write a results.json for Gradescope per notebook")
    add("--student", metavar="DIR", help="write copies of the lessons without solutions")
    add("--repository", default="",
        help="for these copies: the address that git clones if they lie outside the repository")
    options = parser.parse_args()
    # A name may have characters that the console does not have.
    sys.stdout.reconfigure(errors="replace")
    if not options.student and not options.notebooks:
        parser.error("no notebooks given: type their paths, or --student=DIR")
    if options.student:
        try:
            write_student_copies(options.student, options.repository)
        except FileExistsError as error:
            parser.error(f"{error.filename} exists already; choose another folder")
    if options.notebooks:
        grade_all(options)


if __name__ == "__main__":
    main()
