"""
Prepare a notebook. When the setup cell of a lesson has found this repository, it runs:

    from begin import begin
    ROOT = begin()

This is a folder and not begin.py, because setup cells look for a folder of this name beside the
notebook.
"""
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Notebooks import modules from these folders.
FOLDERS = [ROOT, ROOT / "lessons/grading", ROOT / "lessons/studies"]


def missing(requirements):
    """Return the lines of a requirements.txt whose package is not installed in any version."""
    lines = [line.split("#")[0].strip() for line in requirements.splitlines()]
    return [line for line in lines
            if line and not importlib.util.find_spec(re.match(r"\w+", line)[0])]


def install(requirements):
    """Install packages. Raises ImportError, which says what to do, if pip is missing or fails."""
    names = ", ".join(requirements)
    print(f"installing {names}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", *requirements]
    if subprocess.run(command).returncode:
        raise ImportError(
            f"pip could not install {names}. Install them yourself, for instance by "
            f"`uv pip install -r {ROOT}/requirements.txt`, and restart the kernel.")
    importlib.invalidate_caches()


def forget_foreign_modules():
    """Forget imported modules that have the name of one of ours, such as another model.py.

    They would otherwise be used in place of ours.
    """
    for path in [path for folder in FOLDERS for path in folder.glob("*.py")]:
        file = getattr(sys.modules.get(path.stem), "__file__", None)
        if file and Path(file).resolve().parent not in FOLDERS:
            del sys.modules[path.stem]


def save_in_few_colors():
    """Make matplotlib save pictures with at most 256 colors, which takes a quarter of the bytes."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    def print_png(canvas, file, **options):
        canvas.draw()
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba()))
        picture.quantize(256).save(file, "png", optimize=True)
    FigureCanvasAgg.print_png = print_png


def changed_programs():
    """Return the names of those programs of this repository that differ from the last commit."""
    # A file's permissions do not count. --relative: this repository may be a folder of another one.
    command = ["git", "-c", "core.fileMode=false", "diff", "--name-only", "--relative", "HEAD",
               "--", "model.py", "train.py", "prepare.py"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        # git is not installed.
        return []
    # Outside of a git repository git prints only an error.
    return found.stdout.splitlines()


def begin():
    """Go to this repository's folder and return it.

    Also make its modules importable, install the packages that are missing, and name the programs
    that somebody has changed.
    """
    os.chdir(ROOT)
    sys.path[:0] = map(str, FOLDERS)
    forget_foreign_modules()
    import lessons
    # Older notebooks say `import lessons.variants`: variants.py was in lessons/ then.
    lessons.__path__ = [str(ROOT / "lessons"), str(ROOT / "lessons/extras")]
    needed = missing((ROOT / "requirements.txt").read_text(encoding="utf-8"))
    if needed:
        install(needed)
    # A forgotten change of model.py would change what a lesson shows.
    for name in changed_programs():
        print(f"{name} has been changed since the last commit, and this lesson uses your version. "
              f"(`git checkout HEAD -- {name}` discards your changes. Then restart the kernel.)")
    # A notebook keeps its pictures in its file.
    if "ipykernel" in sys.modules:
        save_in_few_colors()
    return ROOT
