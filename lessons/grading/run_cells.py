"""
Run the cells of a student's notebook in a process of its own, in a copy of this repository, within
time limits.

run_cells starts `python run_cells.py FOLDER` in that copy. FOLDER/task.json has the cells and the
limits. After each step the process writes FOLDER/report.json: the results of grade so far, the
cells that failed, and the place that it has reached. So nothing is lost if it ends early.
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import grader

ROOT = grader.ROOT
# A call of grade, in a cell or in a notebook's file, where \" stands for a quote.
CALL = re.compile(r'\bgrade\(\s*\\?["\']((\d+)\.\d+)')
# name = grade("1.1", answer), or without "name =".
GRADED = re.compile(
    r'^ *(?:(?P<name>\w+) *= *)?grade\(\s*["\'](?P<number>[\d.]+)["\']\s*,\s*(?P<answer>\w+)', re.M)
# These magics do nothing here: they are for windows and pictures, or need extensions that may be
# missing.
ON_SCREEN = (
    "matplotlib", "pylab", "gui", "config", "load_ext", "reload_ext", "autoreload", "tensorboard")


def plain(text, most=100):
    """Return the text in one line, because a line break in it could forge a row of the table."""
    printable = "".join(char if char.isprintable() else " " for char in str(text))
    return " ".join(printable.split())[:most]


def in_words(error):
    """Describe an exception in one line."""
    name = type(error).__name__
    try:
        # The str of a SyntaxError names IPython's file.
        if isinstance(error, SyntaxError) and error.lineno:
            return plain(f"{name}: {error.msg}, line {error.lineno}: {plain(error.text)}")
        # An error without a message would leave a colon at the end.
        return plain(f"{name}: {error}", 80).removesuffix(":")
    except Exception:
        # A student's own __str__ may fail.
        return name


# ---- In the process ------------------------------------------------------------------------------

class TooLong(BaseException):
    """The time of a cell is over. It is a BaseException, so that few loops swallow it."""


def set_alarm(seconds):
    """Raise TooLong after this many seconds (0: never), repeatedly if the cell swallows it."""
    late = TooLong(f"no end within {seconds:g} s")
    raised = []

    def ring(number, frame):
        # After the first time, interrupt only the cell itself and not IPython or grade, which
        # handle the exception.
        in_cell = frame.f_code.co_filename.startswith("<ipython")
        if in_cell or not raised:
            raised.append(late)
            raise late

    # Windows has no setitimer. There only the limit of the whole notebook ends an endless loop.
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)         # cancel the previous alarm
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, seconds, 0.0001)


def limit_grade(seconds, tell):
    """Make grade count a function that does not end in time as wrong."""
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
            set_alarm(seconds)                          # the rest of the cell gets its own time
            tell()
    grader.grade = grade


def shorten_training(steps):
    """Make train take about this many steps and draw no picture.

    The picture takes a fifth of the time of a short run.
    """
    import train
    whole = train.train

    def short(config, *arguments, **options):
        wanted = config.max_steps or 1000
        length = min(wanted, steps + wanted // 50)      # lesson 6 compares two lengths
        limits = {
            "max_steps": length,
            "eval_interval": config.eval_interval or length,
            "checkpoint_interval": config.checkpoint_interval or length,
            "eval_tokens": 1024,
            "final_eval_tokens": 1024,
        }
        short_config = train.TrainConfig(**config.options | limits)
        return whole(short_config, *arguments, **options)

    train.train = short
    train.draw_losses = lambda folder: None


def leave():
    """Raise SystemExit, in place of quit() in a cell."""
    raise SystemExit("the notebook calls quit()")


def new_shell():
    """Return an IPython shell in which quit() ends one cell and magics for windows do nothing."""
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    for name in ON_SCREEN:
        shell.magics_manager.magics["line"][name] = lambda line: None
    shell.ask_exit = leave
    return shell


def run_cell(shell, source, seconds):
    """Run a cell. Return the error that ended it, or None."""
    set_alarm(seconds)
    try:
        done = shell.run_cell(source)
        return done.error_before_exec or done.error_in_exec
    except TooLong as late:                             # raised in IPython's own code
        return late
    finally:
        set_alarm(0)


def exercise_of(cells, place):
    """Return the exercise that a cell belongs to: the first that is graded there or later."""
    for source in cells[place:]:
        if call := CALL.search(source):
            return call[1]
    return "the end"


def cause_of(error, source, at, failed, unreadable):
    """Return what ended the earlier cell that would have defined a missing name, or None."""
    if type(error) is not NameError or not error.name:
        return None
    for earlier, words in failed.items():
        if re.search(rf"\b{re.escape(str(error.name))}\b", earlier):
            return words
    of_answers = [call["answer"] for call in GRADED.finditer(source)]
    return unreadable.get(at) if error.name in of_answers else None


def was_tried(error, cause, answer):
    """Return False if the error only says that the answer itself was never defined."""
    return cause is not None or type(error) is not NameError or error.name != answer


def replace_answers(shell, source, error, cause):
    """Count the exercises of a failed cell as wrong, if the student tried them.

    As after grade, the name of the answer then stands for the reference.
    """
    for call in GRADED.finditer(source):
        number, answer = call["number"], call["answer"]
        if number in grader.results:
            continue
        try:
            shell.user_ns[call["name"] or answer] = grader.find(number).reference
        except KeyError:                                # no such exercise
            continue
        if was_tried(error, cause, answer):
            grader.results[number] = "wrong", [cause or in_words(error)]


def run_task(folder):
    """Do what FOLDER/task.json says, and write FOLDER/report.json after each step."""
    task = json.loads(Path(folder, "task.json").read_text())
    cells, seconds = task["cells"], task["cell_seconds"]
    report = dict(results=grader.results, errors=[], done=0, at="the start")

    def write_report(**news):
        report.update(news)
        # Replace the file in one step, so that it is always complete.
        Path(folder, "new.json").write_text(json.dumps(report))
        os.replace(Path(folder, "new.json"), Path(folder, "report.json"))

    shorten_training(task["steps"])
    limit_grade(seconds, write_report)
    shell = new_shell()
    # First run the lesson's own setup cells, because the student's may fail.
    for source in task["setups"]:
        shell.run_cell(source)
    failed = {}                     # source of a cell -> what ended it, in words
    unreadable = {}                 # exercise -> the syntax error in its cell, in words
    for place, source in enumerate(cells):
        write_report(done=place, at=exercise_of(cells, place))
        if error := run_cell(shell, source, seconds):
            cause = cause_of(error, source, report["at"], failed, unreadable)
            if cause is None:
                report["errors"].append(f"at {report['at']} (cell {place + 1}) {in_words(error)}")
            failed[source] = cause or in_words(error)
            if isinstance(error, SyntaxError):
                unreadable[report["at"]] = in_words(error)
            replace_answers(shell, source, error, cause)
    write_report(done=len(cells), at="the end")


# ---- Outside the process -------------------------------------------------------------------------

def copy_repository(folder):
    """Copy what a notebook needs, so that it cannot change this repository."""
    for file in [*ROOT.glob("*.py"), ROOT / "requirements.txt", *ROOT.glob("lessons/*/*.py"),
                 *ROOT.glob("assets/*.json*")]:
        target = Path(folder, file.relative_to(ROOT))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    # A notebook that finds no data would prepare it again. The folders are new, and what is in them
    # is a link. So a notebook that deletes its data deletes the links. (Names with a dot in front
    # are locks, which the notebook makes for itself.)
    for path in (ROOT / "data").rglob("*"):
        target = Path(folder, path.relative_to(ROOT))
        if path.is_dir() and not path.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
        elif not path.name.startswith("."):
            target.parent.mkdir(parents=True, exist_ok=True)
            # Windows allows only some users to make links.
            try:
                target.symlink_to(os.path.realpath(path))
            except OSError:
                shutil.copy(path, target)


def run_process(folder, seconds):
    """Run FOLDER's task for at most this many seconds. Return in words how it ended."""
    log = Path(folder, "log.txt")
    # In Jupyter a cell can print any character. With UTF-8 it can do so here, too.
    settings = dict(MPLBACKEND="Agg", IPYTHONDIR=folder, OMP_NUM_THREADS="1",
                    PYTHONIOENCODING="utf-8")
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
                os.killpg(process.pid, signal.SIGKILL)  # the process and its children
            except ProcessLookupError:
                pass
        process.kill()
        process.wait()
    if not Path(folder, "report.json").exists():
        lines = log.read_text("utf-8", errors="replace").split("\n")
        return "did not start: " + plain(next(filter(str.strip, reversed(lines)), "no message"))
    return f"ended early with exit code {process.returncode}"


def run_cells(cells, setups, seconds, cell_seconds, steps):
    """Run a notebook's cells. Return the results of grade, and notes on what stopped the cells."""
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
    # A student's threads may still run, and would keep sys.exit waiting.
    os._exit(0)
