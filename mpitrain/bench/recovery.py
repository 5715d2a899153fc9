"""How long a job that loses a rank does without: from the fault to the next step."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from mpitrain.bench.interleave import interleave
from mpitrain.bench.recovery_job import BEGUN, FAULT, STEP, events
from mpitrain.bench.report import Row, median, ratio
from mpitrain.errors import MpitrainError
from mpitrain.launch import dialect
from mpitrain.runtime import launcher

# What `mpitrain run` is told for each way of going on.
RESTART, SHRINK = "restart", "shrink"
WAYS: Mapping[str, tuple[str, ...]] = {RESTART: ("--restarts", "1"), SHRINK: ("--on-failure", "shrink")}
NOTICED = ("the job failed after", "the others go on without it")
TIMEOUT_SECONDS = 600


def measure(
    models: Sequence[str], ranks: int, batch_size: int, repeat: int, options: Sequence[str] = ()
) -> Iterator[Row]:
    """Local: one row for each model, from jobs that go on in each way in alternation.

    The last of the ranks is killed. Options are for `mpitrain run`, such as hosts; these must share the directory for
    temporary files.
    """
    ways = dict(WAYS)
    if not dialect.launcher_mpi(dialect.find_mpirun(os.environ), os.environ).has_prrte:
        del ways[SHRINK]  # only Open MPI 5 can
    for name in models:
        raw: dict[str, list[float]] = {}
        turns: dict[str, Callable[[], list[float]]] = {
            way: partial(_turn, raw, way, [*options, "-np", str(ranks), *words], name, batch_size)
            for way, words in ways.items()
        }
        interleave(turns, repeat)
        medians = {key: median(values) for key, values in raw.items()}
        yield Row(
            {"model": name, "ranks": ranks, "batch": batch_size},
            {key: tuple(values) for key, values in raw.items()},
            {
                "restart: noticed s": medians["restart_noticed_seconds"],
                "restart: begun s": medians["restart_begun_seconds"],
                "restart: next step s": medians["restart_step_seconds"],
                "shrink: next step s": medians.get("shrink_step_seconds"),
                "restart / shrink": ratio(medians["restart_step_seconds"], medians.get("shrink_step_seconds", 0.0)),
            },
        )


def _turn(raw: dict[str, list[float]], way: str, options: Sequence[str], name: str, batch_size: int) -> list[float]:
    """Local: one job; its times are added to `raw`."""
    for key, seconds in _times(options, name, batch_size).items():
        raw.setdefault(f"{way}_{key}_seconds", []).append(seconds)
    return []


def _times(options: Sequence[str], name: str, batch_size: int) -> dict[str, float]:
    """Local: seconds from the fault until it was noticed, ranks had begun again, and a step was done."""
    with tempfile.TemporaryDirectory(prefix="mpitrain-bench-") as directory:
        call = f"main({name!r}, {batch_size}, Path({directory!r}))"
        code = f"from pathlib import Path; from mpitrain.bench.recovery_job import main; {call}"
        command = [sys.executable, "-m", "mpitrain", "run", *options, sys.executable, "-c", code]
        lines = _lines(command)
        happened = events(Path(directory))
    fault = dict(happened).get(FAULT)
    noticed = [moment for moment, line in lines if any(words in line for words in NOTICED)]
    after = [(event, moment) for event, moment in happened if fault is not None and moment > (noticed or [fault])[0]]
    stepped = [moment for event, moment in after if event == STEP]
    if fault is None or not stepped:
        output = "".join(line for _, line in lines)[-2000:]
        raise MpitrainError(f"the job did not lose a rank and go on. Its output ends with:\n{output}")
    begun = [moment for event, moment in after if event == BEGUN]
    found = {"noticed": noticed[:1], "begun": begun[:1], "step": stepped[:1]}
    return {key: moments[0] - fault for key, moments in found.items() if moments}


def _lines(command: Sequence[str]) -> list[tuple[float, str]]:
    """Local: run a command; the lines of its standard error, and when each came."""
    environ = launcher.without_rank(os.environ)
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        timer = threading.Timer(TIMEOUT_SECONDS, process.terminate)
        timer.start()
        lines.extend((time.time(), line) for line in process.stderr or ())
        timer.cancel()
    if process.returncode:
        output = "".join(line for _, line in lines)[-2000:]
        raise MpitrainError(
            f"`mpitrain run` ended with code {process.returncode}; is it right with --run-args? Its output ends with:\n"
            f"{output}"
        )
    return lines
