"""
What every lesson's setup cell begins with:

    from begin import begin
    ROOT = begin()

A folder, as beside the notebooks stand folders only: setup cells look for it there.
"""
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT, ROOT / "lessons/grading", ROOT / "lessons/studies"]     # of this repository's modules


def missing(requirements):
    """Return those lines of a requirements.txt whose package is not installed. Any version counts."""
    lines = [line.split("#")[0].strip() for line in requirements.splitlines()]
    return [line for line in lines if line and not importlib.util.find_spec(re.match(r"\w+", line)[0])]


def install(requirements):
    """Install packages. Raises ImportError with what to do where that fails, as without pip."""
    print(f"installing {', '.join(requirements)}", flush=True)
    if subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *requirements]).returncode:
        raise ImportError(f"pip could not install {', '.join(requirements)}. Install them yourself, for instance by "
                          f"`uv pip install -r {ROOT}/requirements.txt`, and restart the kernel.")
    importlib.invalidate_caches()


def forget_foreign_modules():
    """Forget imported modules that have a name of this repository's, as a model.py beside a notebook."""
    for path in [path for folder in FOLDERS for path in folder.glob("*.py")]:
        file = getattr(sys.modules.get(path.stem), "__file__", None)
        if file and Path(file).resolve().parent not in FOLDERS:
            del sys.modules[path.stem]


def save_in_few_colors():
    """Save pictures with at most 256 colors from now on: a quarter of the bytes, in a notebook's file, too."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    def print_png(canvas, file, **options):
        canvas.draw()
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba()))
        picture.quantize(256).save(file, "png", optimize=True)
    FigureCanvasAgg.print_png = print_png


def begin():
    """Go to this repository's folder, make its modules importable, install what is missing, return the folder."""
    os.chdir(ROOT)
    sys.path[:0] = map(str, FOLDERS)
    forget_foreign_modules()
    import lessons
    # A notebook handed out when variants.py stood beside it says `import lessons.variants`
    lessons.__path__ = [str(ROOT / "lessons"), str(ROOT / "lessons/extras")]
    needed = missing((ROOT / "requirements.txt").read_text())
    if needed:
        install(needed)
    if "ipykernel" in sys.modules:          # in a notebook, which keeps its pictures
        save_in_few_colors()
    return ROOT
