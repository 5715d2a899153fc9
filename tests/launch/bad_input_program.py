"""Runs the command with one wrong input after the other, in one job: TensorFlow is loaded once.

Arguments: a JSON file with a list of [name, arguments of rank 0, arguments of the other ranks, environment variables],
and a directory where each rank writes what it printed and returned.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

from mpitrain.cli.main import main
from mpitrain.world.start import init


def run(cases: Path, results: Path) -> None:
    """Run all cases, and write one JSON file a rank."""
    rank = init(non_finite="stop").rank  # as the command has it
    found = {}
    before = dict(os.environ)
    for name, of_root, of_others, variables in json.loads(cases.read_text()):
        out, err = io.StringIO(), io.StringIO()
        os.environ.update(variables)
        began = time.monotonic()
        code: int | str
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(of_others if rank else of_root)
            except Exception as error:
                code = repr(error)
        for variable in variables:
            os.environ.pop(variable)
        os.environ.update(before)
        found[name] = [code, out.getvalue(), err.getvalue(), time.monotonic() - began]
        (results / f"{rank}.json").write_text(json.dumps(found))  # where it hangs, the last one tells


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
