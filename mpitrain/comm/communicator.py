"""The contract every communicator keeps: host memory only, MPI's names, no TensorFlow.

Buffers are C-contiguous numpy arrays. A method with the suffix `_obj` pickles its argument;
one without moves the buffer's memory. Every method of this protocol but `isend` and `irecv`
is collective: all ranks call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mpitrain.faults.activity import Activity

Buffer = NDArray[Any]
Op = Literal["sum", "min", "max", "product"]

UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}


def scale(array: Buffer, factor: float) -> None:
    """Local: multiply in place; half precisions are multiplied in single precision, and rounded once."""
    if array.dtype.itemsize == 2:
        np.multiply(array, np.float32(factor), out=array, dtype=np.float32, casting="unsafe")
    else:
        np.multiply(array, array.dtype.type(factor), out=array)


class Request(Protocol):
    """A transfer under way."""

    def test(self) -> bool:
        """Local: True once the buffer may be used again; drives progress."""
        ...

    def wait(self) -> None:
        """Local: returns once the buffer may be used again."""
        ...


class Communicator(Protocol):
    """A fixed group of ranks that exchange host memory.

    Buffers are of any dtype but objects, and may be empty. Reductions are those of `UFUNCS`, so that a sum of bool is
    whether any is true. Where ranks are processes that the watchdog looks at, each collective adds one to
    `activity.position` as it is entered, and has its name in `activity.inside` until it is left.

    Attributes:
        activity: what this rank is doing.
        tied: communicators that are revoked together with this one when a rank is lost.
    """

    activity: Activity
    tied: Sequence[Communicator]

    @property
    def rank(self) -> int:
        """This process's place in the group, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    @property
    def library(self) -> str:
        """Name and version of what carries the messages."""
        ...

    def isend(self, buffer: Buffer, destination: int) -> Request:
        """Local: start sending `buffer`, which must not change until that is done.

        Messages to one rank arrive in the order sent. A rank may send to itself, but where it is the only one.
        """
        ...

    def irecv(self, buffer: Buffer, source: int) -> Request:
        """Local: start receiving into `buffer`, which has exactly the size sent; first asked for is first served."""
        ...

    def all_reduce(self, buffer: Buffer, op: Op = "sum") -> None:
        """Collective: replace `buffer` by its reduction over all ranks, the same bits everywhere."""
        ...

    def all_gather(self, send: Buffer, receive: Buffer) -> None:
        """Collective: `receive` (size, *send.shape) holds every rank's `send` in rank order."""
        ...

    def all_gather_v(self, send: Buffer, receive: Buffer, counts: list[int]) -> None:
        """Collective: as `all_gather`, where rank i sends `counts[i]` elements."""
        ...

    def all_to_all_v(self, send: Buffer, send_counts: list[int], receive: Buffer, counts: list[int]) -> None:
        """Collective: rank i receives the i-th run of `send` of every rank, in rank order."""
        ...

    def broadcast(self, buffer: Buffer, root: int = 0) -> None:
        """Collective: `buffer` becomes that of rank `root`."""
        ...

    def barrier(self) -> None:
        """Collective: returns once every rank has called it."""
        ...

    def broadcast_obj(self, obj: Any, root: int = 0) -> Any:
        """Collective: rank `root`'s object, on every rank."""
        ...

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Collective: every rank's object, in rank order."""
        ...

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Collective of all ranks: a communicator of these, in this order; None on ranks that are not among them."""
        ...

    @property
    def can_shrink(self) -> bool:
        """Ranks may go on when others have died: what fails for that reason raises RankLostError on all of them."""
        ...

    def revoke(self) -> None:
        """Local: whatever any rank does here from now on raises RankLostError, until all that are left shrink it."""
        ...

    def shrink(self) -> list[int]:
        """Collective among the ranks that are left: go on without the others.

        Returns:
            For each rank that is left, in the new order, which it was.
        """
        ...

    def agree(self, flag: bool) -> bool:
        """Collective: whether `flag` is true on all ranks; all get the same answer, even if one dies meanwhile.

        Raises:
            RankLostError: on all ranks: one has died.
        """
        ...

    def abort(self, code: int) -> None:
        """Local: end all ranks of the job with exit code `code`; does not return where ranks are processes."""
        ...
