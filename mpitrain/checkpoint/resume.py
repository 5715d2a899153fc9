"""Which checkpoint a run goes on from: rank 0 looks, all ranks hear of it and get its content."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.checkpoint.files import Array, Snapshot
from mpitrain.checkpoint.options import AUTO, NEVER, CheckpointOptions, Dealt, Position
from mpitrain.checkpoint.store import Store, read_one
from mpitrain.comm.communicator import Communicator
from mpitrain.errors import UsageError
from mpitrain.runtime.counted import counted
from mpitrain.runtime.marks import reporter
from mpitrain.world.consensus import run_on_root

Tell = Callable[[str], None]
REMEMBERED: dict[str, Any] = {
    "position": dict,
    "ranks": int,
    "stopped": bool,
    "history": dict,
    "counters": list,
    "names": dict,
    "order": dict | None,
    "learning rate": float | int | None,
    "all_reduce": str | None,
}
NONE_HERE = (
    "THE CHECKPOINTS of the attempts before are not in {directory} on {host}: training begins anew. Rank 0 reads and "
    "writes there, so give a --checkpoint-dir that all hosts share"
)


def tell(text: str) -> None:
    """Local: one line for the user, from rank 0."""
    sys.stdout.flush()
    sys.stderr.write(f"mpitrain: {text}\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class Resumption:
    """What a run goes on from, the same on all ranks."""

    source: str  # path of the checkpoint, for messages
    arrays: dict[str, Array]  # its arrays
    info: dict[str, Any]  # what the earlier run remembered

    @property
    def position(self) -> Position:
        """How far the earlier run had come."""
        return Position(**self.info["position"])

    @property
    def ranks(self) -> int:
        """How many there were."""
        return int(self.info["ranks"])


def resumption(options: CheckpointOptions, store: Store, communicator: Communicator) -> Resumption | None:
    """Collective: the checkpoint to go on from, read by rank 0 and sent to all; None to begin anew.

    A job that `mpitrain run` starts again goes on from the checkpoints it has written, whatever it was told at first.

    Raises:
        AgreedError: on all ranks: the directory cannot be written to, the checkpoint that was named is damaged, or
            all that are there are.
    """
    teller = reporter()
    resumes = teller is not None and teller.resumes
    wanted = AUTO if resumes else options.resume
    found: list[tuple[Path, Snapshot]] = []

    def look() -> None:
        store.prepare()
        if wanted == AUTO:
            newest = store.newest(tell)
            found.extend([newest] if newest is not None else [])
            if newest is None and resumes:
                tell(NONE_HERE.format(directory=store.directory, host=os.uname().nodename))
        elif wanted != NEVER:
            path = Path(wanted)
            found.append((path, read_one(path)))
        for path, snapshot in found:
            _check(path, snapshot.info)

    run_on_root(communicator, look)
    source, snapshot = found[0] if found else ("", Snapshot({}))
    shapes = {name: (array.dtype, array.shape) for name, array in snapshot.arrays.items()}
    head = communicator.broadcast_obj((str(source), dict(snapshot.info), shapes) if found else None)
    if head is None:
        return None
    text, info, shapes = head
    arrays = (
        dict(snapshot.arrays) if found else {name: np.empty(shape, dtype) for name, (dtype, shape) in shapes.items()}
    )
    # Each array by itself, into memory of its size: as one object all would be there twice.
    for name in shapes:
        communicator.broadcast(arrays[name].reshape(-1).view(np.uint8))
    return Resumption(text, arrays, info)


def _check(path: Path, info: Mapping[str, Any]) -> None:
    """Local: whether a run remembered there what this one needs; whole it is."""
    odd = [name for name, kind in REMEMBERED.items() if not isinstance(info.get(name), kind)]
    names = {name for name in info.get("position", {}) if "position" not in odd}
    if odd or names != set(asdict(Position())):
        raise UsageError(
            f"{path} cannot be resumed from: it is not of this version of mpitrain ({', '.join(odd) or 'position'} is "
            "missing or of another kind): give another --checkpoint-dir, or --resume never"
        )


def differences(run: Mapping[str, Any], info: Mapping[str, Any]) -> list[str]:
    """Local: in what a run is another one than that which remembered `info`, in words."""
    before = info.get("run") or {}  # older checkpoints have none
    return [
        f"{name} {_shown(value)} (then {_shown(before[name])})"
        for name, value in run.items()
        if name in before and before[name] != value
    ]


def _shown(value: Any) -> str:
    return "by default" if value is None else str(value)


def position_among(resumed: Resumption, dealt: Dealt | None, ranks: int, warn: Tell) -> Position:
    """Local: where `ranks` ranks go on, with the data that they have.

    Raises:
        UsageError: the middle of an epoch whose order is another one with these data.
    """
    position, order = resumed.position, resumed.info["order"]
    if not position.step or (dealt is None and resumed.ranks == ranks):
        return position
    if dealt is not None and order is not None:
        here = {"samples": dealt.samples, "seed": dealt.seed}
        if order != here:
            raise UsageError(
                f"{resumed.source} was written in the middle of an epoch of "
                f"{counted(order['samples'], 'sample')} with seed "
                f"{order['seed']}, but now there are {here['samples']} with seed {here['seed']}, in another order: "
                "give the same data and seed, or --resume never"
            )
        step = position.samples // dealt.per_step
        return Position(position.epoch, step, position.samples, position.steps)
    step, left = divmod(position.step * resumed.ranks, ranks)
    if left:
        warn(
            f"{resumed.source} was written after {counted(position.step, 'step')} by "
            f"{counted(resumed.ranks, 'rank')}, which is no whole number of "
            f"steps of {ranks}: it sees up to {counted(left, 'batch')} of this epoch twice"
        )
    return Position(position.epoch, step, 0, position.steps)
