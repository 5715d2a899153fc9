"""Python that is busy all the time, as where a generator makes the data."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def busy_python() -> Iterator[None]:
    """Local: meanwhile a thread runs Python without an end.

    It has the lowest priority, so that it takes Python's lock and little else from who computes.
    """
    over = threading.Event()

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of Linux: of this thread
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=run, name="mpitrain busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
