"""Signals that ask a job to stop: noticed at once, answered at a moment the job chooses."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# Slurm and Kubernetes send SIGTERM before they kill; Slurm sends what `--signal` says, by custom SIGUSR1.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ECHO_SECONDS = 1.0  # a terminal and a launcher may both hand on one Ctrl-C
CREDENTIALS = struct.Struct("3i")  # process, user, group: unix(7)


class SignalSocket:
    """Where Python's C handler writes the number of a signal at once (`signal.set_wakeup_fd`), and others may write.

    A process that was just forked has it too, and writes there the signals that it gets before it has closed it. So
    the kernel is asked who wrote.
    """

    def __init__(self) -> None:
        self.reading, self.writing = socket.socketpair()
        self.writing.setblocking(False)
        self.reading.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._pid = os.getpid()

    def send(self, data: bytes) -> None:
        """Local: write; where nothing more goes in, the reader has enough to read."""
        with contextlib.suppress(OSError):
            self.writing.send(data)

    def receive(self) -> bytes | None:
        """Local: what this process has written; None at the end.

        Raises:
            BlockingIOError: there is nothing, and reading does not block.
        """
        data, ancillary, *_ = self.reading.recvmsg(4096, socket.CMSG_SPACE(CREDENTIALS.size))
        senders = [CREDENTIALS.unpack(content)[0] for _, _, content in ancillary]
        return None if not data else data if senders == [self._pid] else b""


class SignalOwner:
    """Handles signals by its methods, in place of what handled them before."""

    def __init__(self) -> None:
        self.previous: dict[int, Any] = {}  # what did, by signal

    def take(self, number: int, handler: Callable[[int, FrameType | None], object]) -> None:
        """Local: from now on `handler`, a method of this object.

        Raises:
            ValueError: this is not the main thread.
        """
        keep_from_children()
        self.previous[number] = signal.signal(number, handler)


@functools.cache
def keep_from_children() -> None:
    """Local: a forked child gets signals as if there were no `SignalOwner`, from the first one on.

    Until Python runs its first line there, the child has the handlers of this process, and forgets what they have
    noted. Signals wait for that long.
    """
    masks = threading.local()

    def before() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def after_in_child() -> None:
        signal.set_wakeup_fd(-1)
        for number in STOPPING:
            handler = first = signal.getsignal(number)
            while isinstance(owner := getattr(handler, "__self__", None), SignalOwner):
                handler = owner.previous[number]
            if handler is not first:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


class StopSignals(SignalOwner):
    """Turns a signal into a request, and a request that is not met in time into an end.

    Python runs its signal handlers on the main thread, which may be in the middle of a long step. So a thread of
    our own reads the number of the signal from Python's wakeup file descriptor (`signal.set_wakeup_fd`), to which
    the C handler writes it at once.

    Args:
        grace_seconds: from the signal to `on_late`.
        on_request: called once, on another thread, with the first signal.
        on_late: called on that thread, with that signal, unless the process has ended before.
    """

    def __init__(self, grace_seconds: float, on_request: Callable[[int], None], on_late: Callable[[int], None]) -> None:
        super().__init__()
        self._grace_seconds, self._on_request, self._on_late = grace_seconds, on_request, on_late
        self._previous_descriptor = -1
        self._socket: SignalSocket | None = None
        self._first_seconds: float | None = None

    def install(self) -> bool:
        """Local: begin to listen; False where that cannot be done, on a thread other than the main one."""
        if threading.current_thread() is not threading.main_thread() or self._socket is not None:
            return False
        self._socket = SignalSocket()
        self._previous_descriptor = signal.set_wakeup_fd(self._socket.writing.fileno(), warn_on_full_buffer=False)
        for number in STOPPING:
            self.take(number, self._handle)
        threading.Thread(target=self._listen, args=(self._socket,), name="mpitrain signals", daemon=True).start()
        return True

    def remove(self) -> None:
        """Local: signals do what they did before; the time that a request still has runs on."""
        if self._socket is None:
            return
        for number, previous in self.previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        signal.set_wakeup_fd(self._previous_descriptor)
        self._socket.writing.close()  # ends the thread, if it still listens
        self._socket = None

    def _handle(self, number: int, frame: Any) -> None:
        """Local: a second Ctrl-C does not wait for the end of a step.

        The first signal may have come just before `install`, and have been written to another descriptor.
        """
        if self._socket is not None:
            self._socket.send(bytes([number]))
        now = time.monotonic()
        if self._first_seconds is None:
            self._first_seconds = now
        elif number == signal.SIGINT and now - self._first_seconds > ECHO_SECONDS:
            raise KeyboardInterrupt

    def _listen(self, own: SignalSocket) -> None:
        with own.reading, contextlib.suppress(OSError):
            while (received := own.receive()) is not None:
                number = next((byte for byte in received if byte in STOPPING), None)
                if number is not None:
                    self._on_request(number)
                    time.sleep(self._grace_seconds)
                    self._on_late(number)
                    return
