"""Signals that ask a job to stop: noticed at once, answered at a moment the job chooses."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

# Slurm and Kubernetes send SIGTERM before they kill; Slurm sends what `--signal` says, by custom SIGUSR1.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ECHO_SECONDS = 1.0  # a terminal and a launcher may both hand on one Ctrl-C


class StopSignals:
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
        self._grace_seconds, self._on_request, self._on_late = grace_seconds, on_request, on_late
        self._previous: dict[int, Any] = {}
        self._previous_descriptor = -1
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._first_seconds: float | None = None

    def install(self) -> bool:
        """Local: begin to listen; False where that cannot be done, on a thread other than the main one."""
        if threading.current_thread() is not threading.main_thread() or self._sockets is not None:
            return False
        reading, writing = self._sockets = socket.socketpair()
        writing.setblocking(False)
        self._previous_descriptor = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._handle) for number in STOPPING}
        threading.Thread(target=self._listen, args=(reading,), name="mpitrain signals", daemon=True).start()
        return True

    def remove(self) -> None:
        """Local: signals do what they did before; the time that a request still has runs on."""
        if self._sockets is None:
            return
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        signal.set_wakeup_fd(self._previous_descriptor)
        _, writing = self._sockets
        self._sockets = None
        writing.close()  # ends the thread, if it still listens

    def _handle(self, number: int, frame: Any) -> None:
        """Local: a second Ctrl-C does not wait for the end of a step.

        The first signal may have come just before `install`, and have been written to another descriptor.
        """
        if self._sockets is not None:
            with contextlib.suppress(OSError):
                self._sockets[1].send(bytes([number]))
        now = time.monotonic()
        if self._first_seconds is None:
            self._first_seconds = now
        elif number == signal.SIGINT and now - self._first_seconds > ECHO_SECONDS:
            raise KeyboardInterrupt

    def _listen(self, reading: socket.socket) -> None:
        with reading, contextlib.suppress(OSError):
            while received := reading.recv(64):
                number = next((byte for byte in received if byte in STOPPING), None)
                if number is not None:
                    self._on_request(number)
                    time.sleep(self._grace_seconds)
                    self._on_late(number)
                    return
