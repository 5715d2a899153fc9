"""Runs the command with one wrong input after the other, in one job: TensorFlow is loaded once.

Arguments: a JSON file with a list of [name, arguments of rank 0, arguments of the other ranks], and a
directory where each rank writes what it printed and returned.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from pathlib import Path

from mpitrain.cli.main import main
from mpitrain.comm.world import init


def run(cases: Path, results: Path) -> None:
    """Run all cases, and write one JSON file a rank."""
    rank = init(non_finite="stop").rank  # as the command has it
    found = {}
    for name, of_root, of_others in json.loads(cases.read_text()):
        out, err = io.StringIO(), io.StringIO()
        began = time.monotonic()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(of_others if rank else of_root)
        found[name] = [code, out.getvalue(), err.getvalue(), time.monotonic() - began]
    (results / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
