"""Python is busy, and no longer than it should be."""

from __future__ import annotations

import os
import sys
import threading

from mpitrain.bench.busy import busy_python


def test_a_thread_runs_python_and_ends() -> None:
    before = set(threading.enumerate())
    with busy_python():
        (thread,) = set(threading.enumerate()) - before
        assert thread.native_id is not None
        seen: set[int | None] = set()
        while len(seen) < 2:  # it goes from one call to the next
            frame = sys._current_frames().get(thread.ident or 0)
            seen.add(None if frame is None else frame.f_lasti)
        while os.getpriority(os.PRIO_PROCESS, thread.native_id) != 19:
            pass
    assert not thread.is_alive()
