"""What every `Communicator` must do: tests of these names take one, on each of its ranks.

Values are made from the rank's number, so that what is expected needs no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import pytest

from mpitrain.comm.communicator import UFUNCS, Buffer, Communicator, Op

DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
SHAPES = ((), (0,), (7,), (2, 3))


def values(rank: int, dtype: str, shape: Sequence[int]) -> Buffer:
    """Small whole numbers: sums and products are exact in every dtype."""
    return np.asarray(np.random.default_rng(rank).integers(0, 3, shape)).astype(dtype)


def of_all(communicator: Communicator, dtype: str, shape: Sequence[int]) -> list[Buffer]:
    """What `values` gives on each rank."""
    return [values(rank, dtype, shape) for rank in range(communicator.size)]


def check_place(communicator: Communicator) -> None:
    """Ranks count from 0, and are told apart."""
    assert communicator.all_gather_obj(communicator.rank) == list(range(communicator.size))
    assert communicator.library
    assert communicator.activity is not None
    assert list(communicator.tied) == []


def check_all_reduce(communicator: Communicator) -> None:
    """In place, of every dtype and shape, the same bits on all ranks."""
    for dtype in DTYPES:
        for shape in SHAPES:
            for op in get_args(Op):
                if "complex" in dtype and op in ("min", "max"):
                    continue
                buffer = values(communicator.rank, dtype, shape)
                communicator.all_reduce(buffer, op)
                wanted = UFUNCS[op].reduce(np.stack(of_all(communicator, dtype, shape)), axis=0, dtype=dtype)
                np.testing.assert_array_equal(buffer, wanted, err_msg=f"{op} of {dtype}{shape}")
    odd = np.random.default_rng(communicator.rank).standard_normal(1000)
    communicator.all_reduce(odd)
    assert len(set(communicator.all_gather_obj(odd.tobytes()))) == 1


def check_all_gather(communicator: Communicator) -> None:
    """In rank order."""
    for dtype in DTYPES:
        for shape in SHAPES:
            received = np.empty((communicator.size, *shape), dtype)
            communicator.all_gather(values(communicator.rank, dtype, shape), received)
            np.testing.assert_array_equal(received, of_all(communicator, dtype, shape))


def check_all_gather_v(communicator: Communicator) -> None:
    """Ranks give different numbers of elements, some none."""
    for dtype in DTYPES:
        counts = [2 * rank for rank in range(communicator.size)]
        received = np.empty(sum(counts), dtype)
        communicator.all_gather_v(values(communicator.rank, dtype, (2 * communicator.rank,)), received, counts)
        wanted = [values(rank, dtype, (count,)) for rank, count in enumerate(counts)]
        np.testing.assert_array_equal(received, np.concatenate(wanted))


def check_all_to_all_v(communicator: Communicator) -> None:
    """Rank r sends r + 2 * i elements to rank i, but none to rank 0."""

    def sent(source: int, destination: int) -> int:
        return source + 2 * destination if destination else 0

    rank, size = communicator.rank, communicator.size
    counts = [sent(rank, other) for other in range(size)]
    received_counts = [sent(other, rank) for other in range(size)]
    received = np.empty(sum(received_counts))
    own = [np.full(count, 10.0 * rank + other) for other, count in enumerate(counts)]
    communicator.all_to_all_v(np.concatenate(own), counts, received, received_counts)
    wanted = [np.full(count, 10.0 * other + rank) for other, count in enumerate(received_counts)]
    np.testing.assert_array_equal(received, np.concatenate(wanted))


def check_broadcast(communicator: Communicator) -> None:
    """From each rank; what the root has stays."""
    for root in range(communicator.size):
        for dtype in DTYPES:
            for shape in SHAPES:
                buffer = values(communicator.rank, dtype, shape)
                communicator.broadcast(buffer, root)
                np.testing.assert_array_equal(buffer, values(root, dtype, shape))


def check_objects(communicator: Communicator) -> None:
    """Pickled, of different lengths."""
    rank, size = communicator.rank, communicator.size

    def made(rank: int) -> Any:
        return {"rank": rank, "text": "x" * 1000 * rank, "none": None}

    assert communicator.all_gather_obj(made(rank)) == [made(other) for other in range(size)]
    for root in range(size):
        assert communicator.broadcast_obj(made(rank), root) == made(root)
    communicator.barrier()


def check_messages(communicator: Communicator) -> None:
    """From each rank to the next: they arrive in the order sent, and receives are posted before their sends."""
    rank, size = communicator.rank, communicator.size
    if size == 1:
        return  # to whom nothing is promised
    received = [np.zeros(5 + number) for number in range(3)]
    requests = [communicator.irecv(buffer, (rank - 1) % size) for buffer in received]
    communicator.barrier()
    sent = [np.full(5 + number, 10.0 * rank + number) for number in range(3)]
    sends = [communicator.isend(buffer, (rank + 1) % size) for buffer in sent]
    while not requests[0].test():
        pass
    for request in (*requests, *sends):
        request.wait()
        assert request.test()
    for number, buffer in enumerate(received):
        np.testing.assert_array_equal(buffer, np.full(5 + number, 10.0 * ((rank - 1) % size) + number))
    to_itself, there = np.full(3, 1.0 + rank), np.zeros(3)
    for request in (communicator.isend(to_itself, rank), communicator.irecv(there, rank)):
        request.wait()
    np.testing.assert_array_equal(there, to_itself)


def check_split(communicator: Communicator) -> None:
    """A group in another order, which does not hear the others."""
    ranks = [rank for rank in reversed(range(communicator.size)) if rank != 1]
    part = communicator.split(ranks)
    assert (part is not None) == (communicator.rank in ranks)
    if part is not None:
        assert (part.rank, part.size) == (ranks.index(communicator.rank), len(ranks))
        total = np.array([communicator.rank])
        part.all_reduce(total)
        assert total[0] == sum(ranks)
        assert part.all_gather_obj(communicator.rank) == ranks
    assert communicator.all_gather_obj("after") == ["after"] * communicator.size


def check_agreeing(communicator: Communicator) -> None:
    """Whether all say yes."""
    assert communicator.agree(True) is True
    assert communicator.agree(communicator.rank != communicator.size - 1) is False


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    check_place,
    check_all_reduce,
    check_all_gather,
    check_all_gather_v,
    check_all_to_all_v,
    check_broadcast,
    check_objects,
    check_messages,
    check_split,
    check_agreeing,
)
each_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
