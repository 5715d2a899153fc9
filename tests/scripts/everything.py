"""Runs the scripts named after the directory for files, one after the other, in this process."""

import runpy
import sys
from pathlib import Path

directory, *names = sys.argv[1:]
for name in names:
    sys.argv = [name, directory]
    print("SCRIPT", name, flush=True)
    runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
