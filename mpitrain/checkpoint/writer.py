"""Writes one thing at a time while training goes on. For rank 0 only; no TensorFlow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class BackgroundWriter:
    """Runs a job on a thread of its own.

    Python waits for the thread before it ends, so what was begun is finished.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._thread: threading.Thread | None = None
        self.failed = False

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], object]) -> None:
        """Local: begin `job`, after the one before has ended."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="mpitrain checkpoint")
        self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Local: whether the last job has ended well, once it has ended or the time is over."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return not self.busy and not self.failed

    def _run(self, job: Callable[[], object]) -> None:
        self.failed = True
        began = time.perf_counter()
        try:
            job()
            self.failed = False
        except Exception as error:  # whatever it is, the training is worth more than the checkpoint
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            name = getattr(error, "filename", None)
            place = f" ({name})" if name else ""
            self._tell(
                f"NO CHECKPOINT WAS WRITTEN: {reason}{place}, after {time.perf_counter() - began:.1f} s. Training goes "
                "on, the checkpoints before are untouched, and it is tried again when the next one is due"
            )
