"""
Grades a class: python lessons/grader.py submissions/*.ipynb

THIS RUNS THE STUDENTS' CODE, with all that you may do yourself: use a machine or an account that holds nothing else.
What it finds can be forged by who wants to. Each notebook runs in a process of its own, in a copy of this repository,
for at most --seconds; a broken or endless one is a row like any other. The rows are written as --csv, too.
"""
import argparse
import csv
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grader

ROOT = grader.ROOT


def run_cells(notebook, report, steps):
    """In a process of its own: runs the code cells, and after each writes what grade has found so far."""
    import nbformat
    import train
    from IPython.core.interactiveshell import InteractiveShell
    whole = train.train
    def short(config, *arguments, **options):
        wanted = config.max_steps or 1000
        length = min(wanted, steps + wanted // 50)          # of two lengths, still: lesson 6 compares them
        return whole(replace(config, max_steps=length, eval_interval=config.eval_interval or length, eval_tokens=1024),
                     *arguments, **options)
    train.train = short
    train.Figure = type("NoPicture", (train.Figure,), {"savefig": lambda *a, **k: None})    # loss.png: a fifth of a run
    shell, errors = InteractiveShell.instance(), []
    cells = [cell.source for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code"]
    for place, source in enumerate(cells, 1):
        done = shell.run_cell(source)
        if error := done.error_before_exec or done.error_in_exec:
            errors.append(f"cell {place}: {type(error).__name__}: {error}"[:200])
        Path(report).write_text(json.dumps(dict(results=grader.results, errors=errors, cells=[place, len(cells)])))


def run_notebook(path, seconds=600, steps=20):
    """A row for a notebook: what its exercises came to and what stopped it. It runs in a copy of this repository, in a
    process of its own, with train's runs cut to so many steps."""
    text = Path(path).read_text(encoding="utf-8", errors="replace") if Path(path).is_file() else ""
    numbers = [number for lesson in sorted(set(re.findall(r'grade\(\\?["\'](\d+)\.', text)), key=int)
               if (ROOT / f"lessons/exercises_{int(lesson):02d}.py").exists()
               for number in importlib.import_module(f"exercises_{int(lesson):02d}").EXERCISES]
    start, note = time.monotonic(), []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for file in (*ROOT.glob("*.py"), *ROOT.glob("lessons/*.py")):
            (Path(folder) / file.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            shutil.copy(file, Path(folder) / file.relative_to(ROOT))
        for name in "data", "assets":                       # without data the notebook makes its corpus
            if (ROOT / name).exists():
                (Path(folder) / name).symlink_to(ROOT / name)
        report, log = Path(folder, "report.json"), Path(folder, "log.txt")
        with open(log, "w") as stream:
            process = subprocess.Popen(
                [sys.executable, "grade_class.py", f"--cells={report}", f"--steps={steps}", str(Path(path).resolve())],
                cwd=Path(folder, "lessons"), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stream,
                env=dict(os.environ, MPLBACKEND="Agg"), start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            note.append(f"stopped after {seconds:g} s")
        finally:
            if hasattr(os, "killpg"):
                try:
                    os.killpg(process.pid, signal.SIGKILL)              # and what it has started
                except ProcessLookupError:
                    pass
            process.kill()
            process.wait()
        found = json.loads(report.read_text()) if report.exists() else dict(results={}, errors=[], cells=[0, 0])
        if not note and (process.returncode or not report.exists()):
            lines = log.read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), process.returncode)
            note.append(f"broken off: {last}"[:200])
    result, done = found["results"], found["cells"]
    note += [f"in cell {done[0] + 1} of {done[1]}"] * (note != [] and done[0] < done[1]) + found["errors"]
    by_state = {state: [n for n in dict.fromkeys([*numbers, *result]) if result.get(n, ["unsolved"])[0] == state]
                for state in ("solved", "unsolved", "wrong")}
    return dict(notebook=Path(path).name, **by_state, seconds=round(time.monotonic() - start), note="; ".join(note),
                mistakes=[f"{n}: {sentence}" for n in by_state["wrong"] for sentence in result[n][1]])


def main():
    parser = argparse.ArgumentParser(description="Grades notebooks, a row each. THIS RUNS THE STUDENTS' CODE.")
    parser.add_argument("notebooks", nargs="+")
    parser.add_argument("--seconds", type=float, default=600, help="time limit a notebook (600)")
    parser.add_argument("--steps", type=int, default=20, help="cuts training runs to about so many steps (20)")
    parser.add_argument("--jobs", type=int, default=1, help="notebooks at a time (1)")
    parser.add_argument("--csv", default="grades.csv", help="where the rows go (grades.csv)")
    parser.add_argument("--cells", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cells:
        return run_cells(options.notebooks[0], options.cells, options.steps)
    counts, width = Counter(), max(len(Path(path).name) for path in options.notebooks)
    with open(options.csv, "w", newline="") as file, ThreadPoolExecutor(options.jobs) as pool:
        table = None
        for row in pool.map(lambda path: run_notebook(path, options.seconds, options.steps), options.notebooks):
            counts.update(row["mistakes"])
            words = {key: " ".join(value) if isinstance(value, list) else value for key, value in row.items()}
            print(f"{row['notebook']:{width}}  {len(row['solved']):2} solved, {len(row['wrong'])} wrong "
                  f"({words['wrong'] or '-'}), {len(row['unsolved'])} unsolved ({words['unsolved'] or '-'}), "
                  f"{row['seconds']} s{'; ' + row['note'] if row['note'] else ''}", flush=True)
            print(*(f"{'':{width}}  {sentence}\n" for sentence in row["mistakes"]), sep="", end="")
            table = table or csv.DictWriter(file, words)
            if not file.tell():
                table.writeheader()
            table.writerow(words | {"mistakes": "\n".join(row["mistakes"])})
            file.flush()
    for sentence, count in counts.most_common():
        if count > 1:
            print(f"{count} x {sentence}")
    print(f"written: {options.csv}")


if __name__ == "__main__":
    main()
