"""
Runs the cells of a student's notebook in a process of their own, in a copy of this repository, within limits.

run_cells starts `python run_cells.py FOLDER` in that copy. FOLDER/task.json has the cells and the limits.
FOLDER/report.json says, after each step, what grade has found so far, which cells failed, and where the process is:
it may break off anywhere.
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import grader

ROOT = grader.ROOT
CALL = re.compile(r'\bgrade\(\s*\\?["\']((\d+)\.\d+)')             # \": as it stands in a notebook's file
# name = grade("1.1", answer), or without "name ="
GRADED = re.compile(r'^ *(?:(?P<name>\w+) *= *)?grade\(\s*["\'](?P<number>[\d.]+)["\']\s*,\s*(?P<answer>\w+)', re.M)
ON_SCREEN = "matplotlib", "pylab", "gui", "config", "load_ext", "reload_ext", "autoreload", "tensorboard"


def plain(text, most=100):
    """The text in one line: a line break in it would print a row that nobody has earned."""
    printable = "".join(char if char.isprintable() else " " for char in str(text))
    return " ".join(printable.split())[:most]


def in_words(error):
    name = type(error).__name__
    try:
        if isinstance(error, SyntaxError) and error.lineno:             # its str names a file of IPython's
            return plain(f"{name}: {error.msg}, line {error.lineno}: {plain(error.text)}")
        return plain(f"{name}: {error}", 80).removesuffix(":")           # of an error without words
    except Exception:                                   # a student's own, with a __str__ that fails
        return name


# ---- In the process --------------------------------------------------------------------------------------------------

class TooLong(BaseException):
    """The time of a cell is over. It is no Exception, so that few loops swallow it."""


def set_alarm(seconds):
    """Raises TooLong after so many seconds; where a cell's code swallows it, again and again. 0: never."""
    late = TooLong(f"no end within {seconds:g} s")
    raised = []

    def ring(number, frame):
        in_cell = frame.f_code.co_filename.startswith("<ipython")
        if in_cell or not raised:                       # but not where IPython or grade deal with the first
            raised.append(late)
            raise late
    if hasattr(signal, "setitimer"):                    # not on Windows: the notebook's limit ends a loop there
        signal.setitimer(signal.ITIMER_REAL, 0)         # an alarm before this one goes off no more
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.0001)


def limit_grade(seconds, tell):
    """From now on, grade takes a function that does not end for a wrong one."""
    without_limit = grader.grade

    def grade(number, function):
        tell(at=str(number))
        set_alarm(seconds)
        try:
            return without_limit(number, function)
        except TooLong as late:
            grader.results[number] = "wrong", [str(late)]
            return grader.find(number).reference
        finally:
            set_alarm(seconds)                          # what follows in the cell has its own time
            tell()
    grader.grade = grade


def shorten_training(steps):
    """From now on, train takes about so many steps, and draws no picture: a fifth of a short run."""
    import train
    whole = train.train

    def short(config, *arguments, **options):
        wanted = config.max_steps or 1000
        length = min(wanted, steps + wanted // 50)      # of two lengths, still: lesson 6 compares them
        interval = config.eval_interval or length
        cut = replace(config, max_steps=length, eval_interval=interval, eval_tokens=1024)
        return whole(cut, *arguments, **options)
    train.train = short
    train.draw_losses = lambda folder: None


def leave():
    raise SystemExit("the notebook wants to end here")


def new_shell():
    """An IPython in which magics for windows and pictures do nothing, and quit() ends one cell."""
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    for name in ON_SCREEN:
        shell.magics_manager.magics["line"][name] = lambda line: None
    shell.ask_exit = leave
    return shell


def run_cell(shell, source, seconds):
    """The error that ended a cell, or None."""
    set_alarm(seconds)
    try:
        done = shell.run_cell(source)
        return done.error_before_exec or done.error_in_exec
    except TooLong as late:                             # while IPython was at work
        return late
    finally:
        set_alarm(0)


def exercise_of(cells, place):
    """The exercise that a cell belongs to: the first that is graded there or after it."""
    for source in cells[place:]:
        if call := CALL.search(source):
            return call[1]
    return "the end"


def cause_of(error, source, at, failed, unreadable):
    """Where a name is missing that an earlier cell would have given: what ended that cell, in words."""
    if type(error) is not NameError or not error.name:
        return None
    for earlier, words in failed.items():
        if re.search(rf"\b{re.escape(str(error.name))}\b", earlier):
            return words
    of_answers = [call["answer"] for call in GRADED.finditer(source)]
    return unreadable.get(at) if error.name in of_answers else None


def was_tried(error, cause, answer):
    """Not where nothing of that name was ever written."""
    return cause is not None or type(error) is not NameError or error.name != answer


def go_on(shell, source, error, cause):
    """What a failed cell was to grade and did not counts as wrong, if it was tried; its name stands
    for what is right, as after grade."""
    for call in GRADED.finditer(source):
        number, answer = call["number"], call["answer"]
        if number in grader.results:
            continue
        try:
            shell.user_ns[call["name"] or answer] = grader.find(number).reference
        except KeyError:                                # there is no such exercise
            continue
        if was_tried(error, cause, answer):
            grader.results[number] = "wrong", [cause or in_words(error)]


def run_task(folder):
    """Does what FOLDER/task.json says, and writes FOLDER/report.json after each step."""
    task = json.loads(Path(folder, "task.json").read_text())
    cells, seconds = task["cells"], task["cell_seconds"]
    report = dict(results=grader.results, errors=[], done=0, at="the start")

    def tell(**news):
        report.update(news)
        Path(folder, "new.json").write_text(json.dumps(report))
        os.replace(Path(folder, "new.json"), Path(folder, "report.json"))       # whole, or not at all
    shorten_training(task["steps"])
    limit_grade(seconds, tell)
    shell = new_shell()
    for source in task["setups"]:                       # the lesson's own, as the student's may fail
        shell.run_cell(source)
    failed = {}                                         # a cell's source -> what ended it, in words
    unreadable = {}                                     # exercise -> the same of a cell with a syntax error
    for place, source in enumerate(cells):
        tell(done=place, at=exercise_of(cells, place))
        if error := run_cell(shell, source, seconds):
            cause = cause_of(error, source, report["at"], failed, unreadable)
            if cause is None:
                report["errors"].append(f"at {report['at']} (cell {place + 1}) {in_words(error)}")
            failed[source] = cause or in_words(error)
            if isinstance(error, SyntaxError):
                unreadable[report["at"]] = in_words(error)
            go_on(shell, source, error, cause)
    tell(done=len(cells), at="the end")


# ---- Outside of it ---------------------------------------------------------------------------------------------------

def copy_repository(folder):
    for file in [*ROOT.glob("*.py"), ROOT / "requirements.txt", *ROOT.glob("lessons/*/*.py")]:
        target = Path(folder, file.relative_to(ROOT))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    for name in "data", "assets":                       # without data the notebook makes its corpus
        if (ROOT / name).exists():
            Path(folder, name).symlink_to(ROOT / name)


def run_process(folder, seconds):
    """Runs FOLDER's task for at most so many seconds, and says how it ended."""
    log = Path(folder, "log.txt")
    settings = dict(MPLBACKEND="Agg", IPYTHONDIR=folder, OMP_NUM_THREADS="1")
    with open(log, "w") as stream:
        process = subprocess.Popen(
            [sys.executable, "run_cells.py", folder], cwd=Path(folder, "lessons/grading"),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stream,
            env={**os.environ, **settings}, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:g} s"
    finally:
        if hasattr(os, "killpg"):
            try:
                os.killpg(process.pid, signal.SIGKILL)                  # and what it has started
            except ProcessLookupError:
                pass
        process.kill()
        process.wait()
    if not Path(folder, "report.json").exists():
        lines = log.read_text(errors="replace").split("\n")
        return "not started: " + plain(next(filter(str.strip, reversed(lines)), "no word"))
    return f"ended early with exit code {process.returncode}"


def run_cells(cells, setups, seconds, cell_seconds, steps):
    """(results, notes): what grade has found in a notebook's cells, and what stopped them."""
    task = dict(cells=cells, setups=setups, cell_seconds=cell_seconds, steps=steps)
    report = dict(results={}, errors=[], done=0, at="the start")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy_repository(folder)
        Path(folder, "task.json").write_text(json.dumps(task))
        end = run_process(folder, seconds)
        if Path(folder, "report.json").exists():
            report = json.loads(Path(folder, "report.json").read_text())
    notes = []
    if report["done"] < len(cells):
        notes.append(f"{end}, at {report['at']} (cell {report['done'] + 1} of {len(cells)})")
    errors = report["errors"]
    notes += errors[:3]
    if len(errors) > 3:
        notes.append(f"{len(errors)} errors in all")
    return report["results"], [plain(note, 150) for note in notes]


if __name__ == "__main__":
    run_task(sys.argv[1])
    os._exit(0)                                         # threads that a student's code has left do not end
