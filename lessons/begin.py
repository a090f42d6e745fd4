"""
What every lesson's setup cell begins with:

    from begin import begin
    ROOT = begin()
"""
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def missing(requirements):
    """Of the lines of a requirements.txt, those whose package is not installed. Any version counts."""
    lines = [line.split("#")[0].strip() for line in requirements.splitlines()]
    return [line for line in lines if line and not importlib.util.find_spec(re.match(r"\w+", line)[0])]


def begin():
    """Goes to this repository's folder, makes its modules importable, installs what is missing, returns the folder."""
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "lessons")]
    needed = missing((ROOT / "requirements.txt").read_text())
    if needed:
        print(f"installing {', '.join(needed)}", flush=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *needed])
        importlib.invalidate_caches()
    return ROOT
