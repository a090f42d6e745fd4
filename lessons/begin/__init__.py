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


def missing(requirements):
    """Of the lines of a requirements.txt, those whose package is not installed. Any version counts."""
    lines = [line.split("#")[0].strip() for line in requirements.splitlines()]
    return [line for line in lines if line and not importlib.util.find_spec(re.match(r"\w+", line)[0])]


def save_in_few_colors():
    """From now on a picture has at most 256 colors: a quarter of the bytes, in the file of a notebook too."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    def print_png(canvas, file, **options):
        canvas.draw()
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba()))
        picture.quantize(256).save(file, "png", optimize=True)
    FigureCanvasAgg.print_png = print_png


def begin():
    """Goes to this repository's folder, makes its modules importable, installs what is missing, returns the folder."""
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "lessons/grading"), str(ROOT / "lessons/studies")]
    import lessons
    # A notebook handed out when variants.py stood beside it says `import lessons.variants`
    lessons.__path__ = [str(ROOT / "lessons"), str(ROOT / "lessons/extras")]
    needed = missing((ROOT / "requirements.txt").read_text())
    if needed:
        print(f"installing {', '.join(needed)}", flush=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *needed])
        importlib.invalidate_caches()
    if "ipykernel" in sys.modules:          # in a notebook, which keeps its pictures
        save_in_few_colors()
    return ROOT
