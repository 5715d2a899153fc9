"""Programs in processes of their own, in which TensorFlow and Keras are loaded and nothing of them has been used.

To load them takes longer than what such a program does: one process loads them, and forks for each program.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OWN = ("CUDA_VISIBLE_DEVICES",)  # not handed on: programs set it


def printed(code: str, environ: Mapping[str, str] | None = None) -> str:
    """What a program prints.

    Raises:
        AssertionError: it failed, with its traceback.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([code, dict(environ or {})]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, f"the process that loads TensorFlow ended with exit code {server.wait()}"
    status, output = json.loads(answer)
    assert status == 0, output
    return str(output)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, whose end of the pipe is then closed."""
    kept = {name: value for name, value in os.environ.items() if name not in OWN}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.fresh"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=kept,
    )


def _serve() -> None:
    from mpitrain.runtime import imports

    imports.install()
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        code, environ = json.loads(line)
        answers.write(json.dumps(_forked(code, environ)) + "\n")


def _forked(code: str, environ: dict[str, str]) -> tuple[int, str]:
    """The status and the output of a program; of one that failed, what it said on standard error, too."""
    files = [os.memfd_create(name) for name in ("stdout", "stderr")]
    child = os.fork()
    if child == 0:
        _run(code, environ, files)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = [os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace") for file in files]
    for file in files:
        os.close(file)
    return status, "".join(texts) if status else texts[0]


def _run(code: str, environ: dict[str, str], files: list[int]) -> None:
    os.environ.update(environ)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    status = 1
    try:
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(code, "<program>", "exec"), scope)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
