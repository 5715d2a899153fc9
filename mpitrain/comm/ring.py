"""Ring all-reduce over point-to-point messages, pipelined in segments.

Reduce-scatter, then all-gather, around a ring of N ranks: each rank sends 2(N-1)/N of the
buffer, which is the least possible (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69, 2009).
Segments of a chunk follow one another, so that a segment travels while the one before is added.

Each element is summed along one chain of ranks and handed on by its owner: all ranks get the
same bits, and segment size and window do not change them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from mpitrain.comm.communicator import Buffer, Communicator, Request
from mpitrain.comm.communicator import scale as multiply


@dataclass(frozen=True)
class RingSetting:
    """How a ring is pipelined."""

    segment_bytes: int = 1 << 20  # size of one message
    window: int = 4  # how many messages may be in flight in each direction


class Ring:
    """A ring on one communicator, with its scratch memory.

    Scratch is needed for sums in place only: at most `segment_bytes * window`, and no more than one
    rank's part of the buffer. It is allocated once, and grown when more is needed.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._scratch = np.empty(0, np.uint8)

    def all_reduce(self, source: Buffer, target: Buffer, setting: RingSetting, scale: float = 1.0) -> None:
        """Collective: `target` becomes `scale` times the sum of all ranks' `source`.

        `source` is only read; it may be `target` itself, else the two must not overlap. Both are
        one-dimensional, of the same dtype and size on all ranks, and of any dtype numpy can add.
        """
        if self._communicator.size == 1:
            np.copyto(target, source)
            if scale != 1.0:
                multiply(target, scale)
            return
        once = _Pass(self._communicator, source, target, setting, scale)
        if source is target:
            wanted = once.scratch_bytes
            if self._scratch.nbytes < wanted:
                self._scratch = np.empty(wanted, np.uint8)
            once.scratch = self._scratch[:wanted].view(source.dtype)
        once.run()


class _Pass:
    """One all-reduce around the ring: a stream of `messages` segments in, as many out.

    Message i belongs to step i // segments. What arrives as message i leaves as message
    i + segments, after it was added (first N-1 steps) or stored (last N-1 steps).
    """

    def __init__(
        self, communicator: Communicator, source: Buffer, target: Buffer, setting: RingSetting, scale: float
    ) -> None:
        self._communicator = communicator
        self._rank, self._size = communicator.rank, communicator.size
        self._left, self._right = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        self._source, self._target = source, target
        self._scale = scale if scale != 1.0 else None
        # Rounded up, so that the last chunks may be shorter or empty. Their messages travel all the same, with nothing
        # in them: all ranks count alike.
        self._chunk = -(-source.size // self._size)
        self._segment = min(max(1, setting.segment_bytes // source.itemsize), max(1, self._chunk))
        self._segments = max(1, -(-self._chunk // self._segment))
        self._window = min(setting.window, self._segments)
        self._messages = 2 * (self._size - 1) * self._segments
        self._sends: deque[Request] = deque()
        self._receives: deque[Request] = deque()
        self._sent = self._posted = 0
        self.scratch: Buffer | None = None
        self.scratch_bytes = self._window * self._segment * source.itemsize

    def run(self) -> None:
        for message in range(self._messages):
            self._post(message)
            self._send(message)
            self._receives.popleft().wait()
            self._communicator.activity.moved += 1
            if message < self._messages // 2:
                self._add(message)
            while self._sends and self._sends[0].test():
                self._sends.popleft()
        while self._sent < self._messages:
            self._send(self._messages)
            self._sends.popleft().wait()
        for request in self._sends:
            request.wait()

    def _bounds(self, message: int, back: int) -> tuple[int, int]:
        """Elements of `message`, whose chunk is `step + back` places behind this rank."""
        step, segment = divmod(message, self._segments)
        start = (self._rank - step - back) % self._size * self._chunk
        end = min(start + self._chunk, self._source.size)
        low = min(start + segment * self._segment, end) if start < end else end
        return low, max(low, min(low + self._segment, end))

    def _post(self, done: int) -> None:
        while self._posted < min(self._messages, done + self._window):
            low, high = self._bounds(self._posted, 1)
            buffer = self._arrived(self._posted, low, high)
            self._receives.append(self._communicator.irecv(buffer, self._left))
            self._posted += 1

    def _arrived(self, message: int, low: int, high: int) -> Buffer:
        """Where `message` arrives: in its place, unless what is there must still be added to it."""
        # In place, too, a total may arrive where this rank's own part stood: it is made of that part, which has
        # therefore been sent and read.
        if self.scratch is None or message >= self._messages // 2:
            return self._target[low:high]
        start = message % self._window * self._segment
        return self.scratch[start : start + high - low]

    def _send(self, done: int) -> None:
        available = min(self._messages, done + self._segments)
        while self._sent < available and len(self._sends) < self._window:
            low, high = self._bounds(self._sent, 0)
            # The first chunk is this rank's own part; what it sends later was added up, or has arrived, in `target`.
            array = self._source if self._sent < self._segments else self._target
            self._sends.append(self._communicator.isend(array[low:high], self._right))
            self._sent += 1

    def _add(self, message: int) -> None:
        low, high = self._bounds(message, 1)
        total = self._target[low:high]
        np.add(self._source[low:high], self._arrived(message, low, high), out=total)
        # Only the last step makes a total, and only its owner multiplies: the others get the product's bits.
        if self._scale is not None and message >= self._messages // 2 - self._segments:
            multiply(total, self._scale)
