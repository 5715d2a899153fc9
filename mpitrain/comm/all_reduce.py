"""All-reduce of a host buffer: MPI's own, or a swap by two ranks, where latency counts, a ring where bandwidth does.

Which ring setting is fastest differs between MPI libraries, links and numbers of hosts, so it is measured once, on the
first buffer large enough to matter, and kept in a file for the next run. Bits: segment and window do not change a sum,
but MPI and ring order it differently. The choice is a function of (size, cached choice), so runs with the same cache
give the same bits; `MPITRAIN_ALL_REDUCE` (`mpi`, or `ring:SEGMENT_BYTES:WINDOW`) fixes it by hand.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mpitrain.comm.communicator import Buffer, Communicator
from mpitrain.comm.communicator import scale as multiply
from mpitrain.comm.ring import Ring, RingSetting
from mpitrain.errors import UsageError
from mpitrain.runtime import cache
from mpitrain.runtime.topology import Topology
from mpitrain.runtime.words import Word

VARIABLE = "MPITRAIN_ALL_REDUCE"
SMALL_BYTES = 256 << 10
PROBE_BYTES = 8 << 20
PROBE_SECONDS = 4.0
ALL_IN_FLIGHT = 1 << 12
EAGER_BYTES = 60 << 10  # below the 64 KiB up to which Open MPI sends over TCP without asking the receiver first
CANDIDATES: tuple[RingSetting | None, ...] = (
    RingSetting(EAGER_BYTES, 8),
    RingSetting(EAGER_BYTES, 32),
    RingSetting(256 << 10, 8),
    RingSetting(512 << 10, ALL_IN_FLIGHT),
    RingSetting(1 << 20, 4),
    RingSetting(2 << 20, ALL_IN_FLIGHT),
    None,
)


def parse(text: str) -> RingSetting | None:
    """Local: read `mpi` (None) or `ring:SEGMENT_BYTES:WINDOW`.

    Raises:
        UsageError: for anything else.
    """
    if text == "mpi":
        return None
    parts = text.split(":")
    if len(parts) == 3 and parts[0] == "ring" and parts[1].isdigit() and parts[2].isdigit():
        segment_bytes, window = int(parts[1]), int(parts[2])
        if segment_bytes > 0 and segment_bytes % 16 == 0 and window > 0:
            return RingSetting(segment_bytes, window)
    raise UsageError(
        f"{VARIABLE}={text!r} is not understood; give `mpi`, or `ring:SEGMENT_BYTES:WINDOW` "
        "with a segment that is a multiple of 16 bytes, as in ring:1048576:4."
    )


def layout_of(library: str, place: Topology) -> str:
    """Local: what the choice of an all-reduce depends on: the MPI, and how many ranks each host has."""
    per_host = ",".join(str(place.nodes.count(node)) for node in range(place.node_count))
    return f"{library}; ranks of each host {per_host}; {' '.join(sorted(set(place.hosts)))}"


class AllReduce:
    """All-reduce on one communicator, with the choice of algorithm.

    Args:
        layout: what the choice is cached for, as one string (MPI library, ranks of each host).
        environ: where `MPITRAIN_ALL_REDUCE` and the cache directory are looked up.
    """

    _chosen = Word(0, bool)
    _segment_bytes = Word(1, int)  # 0: by MPI
    _window = Word(2, int)

    def __init__(self, communicator: Communicator, layout: str, environ: Mapping[str, str]) -> None:
        self.words = np.zeros(3, np.int64)  # the choice
        self._communicator, self._environ = communicator, environ
        self._setting = parse(environ[VARIABLE]) if VARIABLE in environ else None
        self.measurements: dict[str, float] = {}
        self._left_behind: list[object] = []
        self.renew(layout, VARIABLE in environ)

    def renew(self, layout: str, chosen: bool) -> None:
        """Local: from now on sum over the ranks that the communicator has now.

        Args:
            layout: of these ranks.
            chosen: the choice of algorithm is made, and the same on all of them; else it will be made anew.
        """
        self._layout = layout
        self._cache = _cache_file(layout, self._environ)
        self._chosen = chosen
        size = self._communicator.size
        # `mpi` by hand means MPI's own for small buffers, too.
        self._pairs = size == 2 and not (VARIABLE in self._environ and self._setting is None)
        self._received = np.empty(SMALL_BYTES if self._pairs else 0, np.uint8)
        self._ring = Ring(self._communicator)
        # What was under way when a rank was lost may still arrive in this memory.
        self._left_behind += [self._ring, self._received]

    def sum(self, source: Buffer, target: Buffer, scale: float = 1.0) -> None:
        """Collective: `target` becomes `scale` times the sum of all ranks' `source`.

        Both are one-dimensional and C-contiguous, of equal dtype and size on all ranks; `source` is
        read only and may be `target`.
        """
        self._communicator.activity.position += 1
        if self._communicator.size == 1 or source.nbytes < SMALL_BYTES:
            self._by_pair(source, target, scale) if self._pairs else self._by_mpi(source, target, scale)
            return
        setting = self.setting()
        if setting is None:
            self._by_mpi(source, target, scale)
        else:
            self._ring.all_reduce(source, target, setting, scale)

    def setting(self) -> RingSetting | None:
        """Collective: the ring setting for large buffers, measured when it is not known yet.

        None stands for MPI_Allreduce.
        """
        if not self._chosen:
            # Each host has a file of its own, and may have chosen otherwise: rank 0's decides, for the bits depend on
            # it.
            known = self._communicator.broadcast_obj(self._read() if self._communicator.rank == 0 else None)
            self._setting = parse(known) if known else self._measure()
            self._chosen = True
        return self._setting

    @property
    def _setting(self) -> RingSetting | None:
        return RingSetting(self._segment_bytes, self._window) if self._segment_bytes else None

    @_setting.setter
    def _setting(self, setting: RingSetting | None) -> None:
        self._segment_bytes, self._window = (0, 0) if setting is None else (setting.segment_bytes, setting.window)

    @property
    def pairs(self) -> bool:
        """Whether two ranks swap what is small."""
        return self._pairs

    @property
    def chosen(self) -> str | None:
        """How large buffers are summed, as `parse` reads it; None when that is not decided yet."""
        return describe(self._setting) if self._chosen else None

    def choose(self, text: str) -> None:
        """Local: sum large buffers in the order of an earlier run; all ranks give the same `text`."""
        self._setting, self._chosen = parse(text), True

    def _by_pair(self, source: Buffer, target: Buffer, scale: float) -> None:
        """Collective: two ranks swap what they have, and both add it up: one message, no second phase."""
        rank, received = self._communicator.rank, self._received[: source.nbytes].view(source.dtype)
        receive = self._communicator.irecv(received, 1 - rank)
        send = self._communicator.isend(source, 1 - rank)
        receive.wait()
        send.wait()
        # In rank order: of two NaNs the first one's bits are kept.
        np.add(source, received, out=target) if rank == 0 else np.add(received, source, out=target)
        if scale != 1.0:
            multiply(target, scale)

    def _by_mpi(self, source: Buffer, target: Buffer, scale: float) -> None:
        if source is not target:
            np.copyto(target, source)
        self._communicator.all_reduce(target)
        if scale != 1.0:
            multiply(target, scale)

    def _measure(self) -> RingSetting | None:
        """Collective: time the candidates on a buffer of our own; all ranks take the same one."""
        source = np.ones(PROBE_BYTES // 4, np.float32)
        target = np.zeros_like(source)
        best: dict[str, float] = {}
        start = time.perf_counter()
        for _ in range(3):
            for setting in CANDIDATES:
                self._communicator.barrier()
                began = time.perf_counter()
                if setting is None:
                    self._by_mpi(source, target, 1.0)
                else:
                    self._ring.all_reduce(source, target, setting)
                slowest = np.array([time.perf_counter() - began, time.perf_counter() - start])
                # All ranks compare the same numbers, so they choose alike, and stop after the same round.
                self._communicator.all_reduce(slowest, "max")
                name = describe(setting)
                best[name] = min(best.get(name, np.inf), float(slowest[0]))
            # Another round would take as long as the first: on a slow link one is enough.
            if slowest[1] > PROBE_SECONDS / 2:
                break
        self.measurements = best
        winner = min(best, key=lambda name: best[name])
        if self._communicator.rank == 0:
            self._write(winner)
        return parse(winner)

    def _read(self) -> str | None:
        try:
            entry = json.loads(self._cache.read_text())
            setting = str(entry["setting"]) if entry["layout"] == self._layout else None
            if setting is not None:
                parse(setting)
            return setting
        except (OSError, ValueError, KeyError, TypeError, UsageError):
            return None

    def _write(self, setting: str) -> None:
        entry = {"layout": self._layout, "setting": setting, "seconds": self.measurements}
        try:
            self._cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._cache.parent, delete=False) as file:
                json.dump(entry, file, indent=1)
            # Several jobs may write it: who reads sees one of them whole.
            Path(file.name).replace(self._cache)
        except OSError:
            return  # a cache that cannot be written costs the measurement again, nothing else


def describe(setting: RingSetting | None) -> str:
    """Local: the text `parse` reads."""
    return "mpi" if setting is None else f"ring:{setting.segment_bytes}:{setting.window}"


def _cache_file(layout: str, environ: Mapping[str, str]) -> Path:
    name = hashlib.blake2b(layout.encode(), digest_size=8).hexdigest()
    return cache.directory(environ) / f"all_reduce-{name}.json"
