"""
Grades a class: python lessons/grading/grade_class.py submissions/*/*.ipynb

THIS RUNS THE STUDENTS' CODE, with all that you may do yourself: use a machine or an account that
holds nothing else. What it finds can be forged by who wants to. Each notebook runs apart
(run_cells.py), for at most --seconds, each of its cells for at most --cell_seconds; a broken or
endless one is a row like any other. --csv has the rows too, --json=DIR the same for Gradescope.

    python lessons/grading/grade_class.py --student=DIR

writes copies of the lessons without their folded solutions, for handing out.
"""
import argparse
import csv
import importlib
import json
import os
import re
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat

import grader
from run_cells import CALL, in_words, plain, run_cells

ROOT = grader.ROOT
STATES = "solved", "wrong", "unsolved"
SOLUTION = re.compile(r"<details>\s*<summary>Solution.*?</details>\s*", re.S)


# ---- One notebook ----------------------------------------------------------------------------------------------------

def lessons_of(name, text):
    """Numbers of the lessons in a notebook: by its calls of grade, else its heading, else its name."""
    called = {call[2] for call in CALL.finditer(text)}
    heading = re.findall(r"# Lesson (\d+)\b", text)[:1]
    in_name = re.findall(r"(?<!\d)0?(\d)(?!\d)", name)[:1]
    return {int(number) for number in called or heading or in_name}


def exercises():
    """lesson -> numbers of its exercises"""
    names = sorted(path.stem for path in ROOT.glob("lessons/grading/exercises_*.py"))
    return {int(name[-2:]): list(importlib.import_module(name).EXERCISES) for name in names}


def all_exercises():
    return sum(exercises().values(), [])


class NotGradable(Exception):
    pass


def sorted_out(results, lessons):
    """The exercises of these lessons, and of others that were graded, by what they came to."""
    found = dict(solved=[], wrong=[], unsolved=[], mistakes={})
    for lesson, numbers in exercises().items():
        if lesson not in lessons and not results.keys() & numbers:
            continue
        for number in numbers:
            result = results.get(number, ("unsolved", []))
            if len(result) != 2 or result[0] not in STATES:
                raise NotGradable(f"what it says of {number} is not the grader's word")
            state, sentences = result
            found[state].append(number)
            if state == "wrong":
                found["mistakes"][number] = [plain(sentence, 500) for sentence in sentences]
    return found


def code_cells(path):
    """The sources of a notebook's code cells."""
    if not Path(path).is_file():
        raise NotGradable("no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")             # of cells without ids
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
    """The first code cell of a lesson as it stands in this repository."""
    for path in ROOT.glob(f"lessons/{lesson:02d}_*.ipynb"):
        return code_cells(path)[0]
    return ""


def run_notebook(path, seconds=600, steps=20, cell_seconds=60, name=None):
    """A row for a notebook: what its exercises came to, and what stopped it."""
    start = time.monotonic()
    path = Path(path)
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    lessons = lessons_of(path.name, text)
    try:
        cells = code_cells(path)
        setups = ["from grader import grade, inputs", *map(setup_of, lessons)]
        results, notes = run_cells(cells, setups, seconds, cell_seconds, steps)
        if not results:
            notes.append("the lessons' grade was not called")
        found = sorted_out(results, lessons)
    except Exception as error:
        found = sorted_out({}, lessons)
        notes = [str(error) if isinstance(error, NotGradable) else f"not gradable: {in_words(error)}"]
    if not any(found.values()):
        notes.append("which lesson it is cannot be told")
    row = dict(notebook=plain(name or path, 1000), **found)
    return {**row, "seconds": round(time.monotonic() - start), "note": "; ".join(notes)}


# ---- The class -------------------------------------------------------------------------------------------------------

def names_of(paths):
    """A name for each: its path from the folder that all have in common."""
    whole = [Path(path).absolute() for path in paths]
    common = os.path.commonpath([path.parent for path in whole])
    return [path.relative_to(common).as_posix() for path in whole]


def in_text(row):
    """The row for the table in --csv."""
    words = {key: " ".join(row[key]) for key in STATES}
    mistakes = [f"{number}: {' '.join(said)}" for number, said in row["mistakes"].items() if said]
    return {**row, **words, "mistakes": "\n".join(mistakes)}


def show(row, width):
    words = in_text(row)
    print(f"{row['notebook']:{width}}  {len(row['solved']):2} solved, "
          f"{len(row['wrong'])} wrong ({words['wrong'] or '-'}), "
          f"{len(row['unsolved'])} unsolved ({words['unsolved'] or '-'}), {row['seconds']} s", end="")
    print(f"; {row['note']}" if row["note"] else "", flush=True)
    for line in words["mistakes"].splitlines():
        print(f"{'':{width}}  {line}")


def write_json(row, folder):
    """What Gradescope reads as results.json."""
    state = {number: state for state in STATES for number in row[state]}
    tests = []
    for number in filter(state.get, all_exercises()):
        output = " ".join(row["mistakes"].get(number, [])) or state[number]
        score = int(state[number] == "solved")
        tests.append(dict(name=f"Exercise {number}", score=score, max_score=1, output=output))
    target = Path(folder, row["notebook"] + ".json")            # folders stay: no two get one name
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = dict(score=len(row["solved"]), output=row["note"], tests=tests)
    target.write_text(json.dumps(whole, indent=1))


def show_exercises(rows):
    """A table of what the class did, by exercise."""
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
    """The lessons as they are, without what lies folded under Solution. repository: for their setup, to clone."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path in sorted(ROOT.glob("lessons/[0-9]*.ipynb")):
        notebook = nbformat.read(path, 4)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = SOLUTION.sub("", cell.source).rstrip()
            else:
                cell.source = cell.source.replace('REPOSITORY = ""', f'REPOSITORY = "{repository}"')
        with open(Path(folder, path.name), "x", encoding="utf-8") as file:      # never over one that is there
            nbformat.write(notebook, file)
        print(f"written: {Path(folder, path.name)}")


def grade_all(options):
    """Grades options.notebooks, prints and writes a row for each as soon as those before it are done."""
    paths = list(dict.fromkeys(options.notebooks))
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
            show(row, width)
            table.writerow(in_text(row))
            file.flush()
            if options.json:
                write_json(row, options.json)
    show_exercises(rows)
    print(f"written: {options.csv}")


def main():
    parser = argparse.ArgumentParser(description="Grades notebooks. THIS RUNS THE STUDENTS' CODE.")
    add = parser.add_argument
    add("notebooks", nargs="*")
    add("--seconds", type=float, default=600, help="time limit a notebook (600)")
    add("--cell_seconds", type=float, default=60, help="time limit a cell (60)")
    add("--steps", type=int, default=20, help="cuts training runs to about so many steps (20)")
    add("--jobs", type=int, default=os.cpu_count(), help="notebooks at a time (one a core)")
    add("--csv", default="grades.csv", help="where the rows go (grades.csv)")
    add("--json", metavar="DIR", help="also writes a results.json for Gradescope for each notebook")
    add("--student", metavar="DIR", help="writes copies of the lessons without solutions")
    add("--repository", default="", help="for these copies: what git clones where they stand alone")
    options = parser.parse_args()
    if not options.student and not options.notebooks:
        parser.error("which notebooks? Give their paths, or --student=DIR")
    if options.student:
        write_student_copies(options.student, options.repository)
    if options.notebooks:
        grade_all(options)


if __name__ == "__main__":
    main()
