"""The way to the agent of each host: one process, requests and answers by line, each with a time limit."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mpitrain.doctor import agent
from mpitrain.doctor.facts import Clock
from mpitrain.doctor.ssh_faults import Unanswered
from mpitrain.launch.request import FORWARDED, forwarded

CLOCK_EXCHANGES = 7
CLOCK_SECONDS = 5.0
Result = TypeVar("Result")
Way = Callable[[str, Sequence[str]], list[str]]


class Agent:
    """Local: an agent that runs."""

    def __init__(self, command: Sequence[str], source: bytes) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        self._pending = b""
        self._turn = threading.Lock()
        try:
            # Without a terminal nothing can ask the user anything.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
            )
        except OSError as error:
            self._errors.close()
            raise Unanswered(f"{command[0]} cannot be run: {error}") from error
        self._send(source)

    def ask(self, do: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Local: one request.

        Raises:
            Unanswered: the agent is not there any more, or took longer than `seconds`.
        """
        end, line = time.monotonic() + seconds, b""
        with self._turn:
            self._send(json.dumps({"do": do, **arguments}).encode() + b"\n")
            while not line.startswith(agent.MARK):  # what else comes was printed by a file such as ~/.bashrc
                line = self._line(end, seconds)
        answer: dict[str, Any] = json.loads(line[len(agent.MARK) :])
        return answer

    def clock(self) -> Clock:
        """Local: the difference of the clocks, from the exchange that was over soonest (Cristian, 1989)."""
        best = Clock(0.0, float("inf"))
        for _ in range(CLOCK_EXCHANGES):
            before, started = time.time(), time.perf_counter()
            there = self.ask("clock", CLOCK_SECONDS)["time"]
            half = (time.perf_counter() - started) / 2
            if half < best.error_seconds:
                best = Clock(there - (before + half), half)
        return best

    def close(self) -> None:
        """Local: let the agent end, and see that it does."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        self._errors.close()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    @property
    def _stdout(self) -> Any:
        return self._process.stdout

    def _send(self, text: bytes) -> None:
        try:
            self._stdin.write(text)
            self._stdin.flush()
        except OSError:  # it has ended: reading tells why
            pass

    def _line(self, end: float, seconds: float) -> bytes:
        while b"\n" not in self._pending:
            left = max(0.0, end - time.monotonic())
            if not select.select([self._stdout], [], [], left)[0]:
                raise Unanswered(self._words(), seconds)
            read = os.read(self._stdout.fileno(), 1 << 16)
            if not read:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(2)
                raise Unanswered(self._words())
            self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")


def start(host: str | None, way: Way, environ: Mapping[str, str]) -> Agent:
    """Local: start the agent on a host.

    Without a host, on this one, which needs no way.

    Raises:
        Unanswered: the command cannot be run.
    """
    source = inspect.getsource(agent).encode()
    code = f"import sys; exec(compile(sys.stdin.buffer.read({len(source)}), 'agent', 'exec'))"
    if host is None:
        return Agent([sys.executable, "-c", code], source)
    # The interpreter that ranks would be started with, else any: it tells that the other is not there.
    script = (
        'cd "$1" 2>/dev/null; python=$2; code=$3; shift 3; [ -x "$python" ] || python=python3; '
        'exec env "$@" "$python" -c "$code"'
    )
    # What ranks are given. PATH is that of the host, for what it would find.
    given = forwarded(environ, (), FORWARDED).items()
    variables = [f"{name}={value}" for name, value in given if name != "PATH"]
    return Agent(way(host, ["sh", "-c", script, "sh", str(Path.cwd()), sys.executable, code, *variables]), source)


def by_srun(srun: str) -> Way:
    """Slurm's way to a host of the allocation that this process is in, beside what runs there."""
    options = ("--overlap", "--quiet", "--mpi=none", "--nodes=1", "--ntasks=1")
    return lambda host, words: [srun, *options, f"--nodelist={host}", *words]


def ask_all(task: Callable[[str], Result], names: Iterable[str], seconds: float) -> dict[str, Result | Unanswered]:
    """Local: the task for every name, each in a thread of its own.

    What has not ended after so many seconds is left alone (a name server may take minutes).

    Returns:
        By name, the result, or that it did not answer.
    """
    results: dict[str, Result | Unanswered] = {}
    end = time.monotonic() + seconds

    def run(name: str) -> None:
        try:
            results[name] = task(name)
        except Unanswered as failure:
            results[name] = failure

    threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in names}
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, end - time.monotonic()))
    return {name: results.get(name, Unanswered("", seconds)) for name in threads}
