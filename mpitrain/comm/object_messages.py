"""Objects as buffers: what cannot be pickled on one rank, all ranks are told of, instead of waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mpitrain.comm.communicator import Buffer, Communicator


class Pickle(Protocol):
    """Makes bytes of objects, and objects of bytes."""

    def dumps(self, obj: Any) -> bytes:
        """Local: the object as bytes."""
        ...

    def loads(self, data: Any) -> Any:
        """Local: the object again."""
        ...


def broadcast_obj(communicator: Communicator, pickle: Pickle, obj: Any, root: int) -> Any:
    """Collective: as `Communicator.broadcast_obj`.

    Raises:
        ValueError: on every rank: it cannot be pickled.
    """
    mine, size = _packed(pickle, obj) if communicator.rank == root else (None, np.zeros(1, np.int64))
    communicator.broadcast(size, root)
    data = np.empty(abs(int(size[0])), np.uint8) if mine is None else mine
    communicator.broadcast(data, root)
    # Not before: all ranks have made both collectives now, and raise the same.
    _check([data], size)
    return obj if communicator.rank == root else pickle.loads(data)


def all_gather_obj(communicator: Communicator, pickle: Pickle, obj: Any) -> list[Any]:
    """Collective: as `Communicator.all_gather_obj`.

    Raises:
        ValueError: on every rank: some rank's object cannot be pickled.
    """
    mine, size = _packed(pickle, obj)
    sizes = np.zeros(communicator.size, np.int64)
    communicator.all_gather(size, sizes)
    counts = [abs(int(number)) for number in sizes]
    everything = np.empty(sum(counts), np.uint8)
    communicator.all_gather_v(mine, everything, counts)
    parts = np.split(everything, np.cumsum(counts)[:-1])
    _check(parts, sizes)
    return [pickle.loads(part) for part in parts]


def _packed(pickle: Pickle, obj: Any) -> tuple[Buffer, Buffer]:
    """Local: the bytes and their number, or an error's text and minus its length."""
    try:
        data = np.frombuffer(bytearray(pickle.dumps(obj)), np.uint8)
    except Exception as error:  # whatever an object's own methods raise
        text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")
        return np.frombuffer(bytearray(text), np.uint8), np.array([-len(text)], np.int64)
    return data, np.array([len(data)], np.int64)


def _check(parts: Sequence[Buffer], sizes: Buffer) -> None:
    for rank, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if size < 0:
            whose = "the object to broadcast" if len(parts) == 1 else f"the object of rank {rank}"
            raise ValueError(
                f"{whose} cannot be sent to other ranks, for it cannot be pickled: {part.tobytes().decode()}"
            )
