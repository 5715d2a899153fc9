"""Horovod's timeline: what was exchanged when, in Chrome's trace format, a file for each rank.

The format is an array of events ("Trace Event Format", Google, 2016). Times are microseconds of the host's clock, so
that files of several ranks may be put into one array.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from mpitrain.collectives.host import CollectiveCall
from mpitrain.reduction.buckets import UpdateCall
from mpitrain.world.calls import Call
from mpitrain.world.world import World

VARIABLE, MARK_VARIABLE = "HOROVOD_TIMELINE", "HOROVOD_TIMELINE_MARK_CYCLES"


class Timeline:
    """Writes the events of one rank."""

    def __init__(self, path: Path, rank: int, mark_cycles: bool) -> None:
        self._file: TextIO = path.open("w")
        self._rank, self._mark_cycles = rank, mark_cycles
        self._rows: dict[str, int] = {}
        self._open: tuple[str, str, float] | None = None
        self._lock = threading.Lock()
        self._clock = time.time() - time.perf_counter()
        self._file.write("[")
        self._first = True
        start = {"start_time_since_epoch_in_micros": int(time.time() * 1e6)}
        self._write(name="process_name", ph="M", args={"name": f"rank {rank}", **start})

    def agreed(self, call: Call, start: float, end: float) -> None:
        """Local: as for `world.agreement.Observer`."""
        kind, name = _titled(call)
        with self._lock:
            self._write_span(f"NEGOTIATE_{kind}", name, start, end, {"what": str(call).split("\n")[0]})
            self._open = kind, name, end
            if self._mark_cycles:
                self._write(name="CYCLE_START", ph="i", ts=self._microseconds(end), s="p")

    def ended(self) -> None:
        """Local: as for `world.agreement.Observer`."""
        with self._lock:
            now = time.perf_counter()
            if self._open is not None:
                kind, name, start = self._open
                self._write_span(kind, name, start, now, {})
                self._open = kind, name, now  # of an update the next bucket begins

    def close(self) -> None:
        """Local: end the array."""
        with self._lock:
            self._file.write("\n]\n")
            self._file.close()

    def _write_span(self, kind: str, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows)
            self._write(name="thread_name", ph="M", tid=row, args={"name": name})
        span = {"ts": self._microseconds(start), "dur": max(0, int((end - start) * 1e6))}
        self._write(name=kind, ph="X", tid=row, args=args, **span)

    def _write(self, **event: Any) -> None:
        if self._file.closed:
            return
        self._file.write(("\n" if self._first else ",\n") + json.dumps({"pid": self._rank, "tid": 0, **event}))
        self._first = False
        # The format lets an array be without its end: what a rank that is killed has written can be looked at.
        self._file.flush()

    def _microseconds(self, moment: float) -> int:
        return int((self._clock + moment) * 1e6)


def _titled(call: Call) -> tuple[str, str]:
    """Local: Horovod's name of an operation, and the row it stands in."""
    if isinstance(call, UpdateCall):
        return "ALLREDUCE", call.owner
    line = str(call).split("\n")[0]
    if not isinstance(call, CollectiveCall):
        return re.split(r"\W", line, maxsplit=1)[0].upper(), line
    kind = call.kind.replace("_", "")
    return kind.upper(), f"{kind}.{call.name}" if call.name else line


_running: list[tuple[Timeline, World]] = []


def start_from_environment(world: World) -> None:
    """Local: what HOROVOD_TIMELINE asks for; with DYNAMIC a script starts it itself."""
    path = os.environ.get(VARIABLE, "")
    if path and path.upper() != "DYNAMIC":
        start(world, path, os.environ.get(MARK_VARIABLE, "0") not in ("", "0"))


def start(world: World, path: str, mark_cycles: bool) -> None:
    """Local: begin a file; one that is being written ends."""
    stop()
    own = Path(path) if world.rank == 0 else Path(path).with_suffix(f".rank-{world.rank}{Path(path).suffix}")
    timeline = Timeline(own, world.rank, mark_cycles)
    _running.append((timeline, world))
    atexit.register(stop)
    world.agreement.observer = timeline


def stop() -> None:
    """Local: end the file, if there is one."""
    while _running:
        timeline, world = _running.pop()
        world.agreement.observer = None
        timeline.close()
