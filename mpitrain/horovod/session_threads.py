"""Threads for sessions of TensorFlow 1, in which collectives wait for their turn.

Each that waits occupies one of the threads that all sessions of a process share. They are made with the first session,
which may come before `init`, as many as a variable of the environment says. What does not run in sessions keeps the
number that was planned.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import tensorflow as tf

from mpitrain.runtime.threads import INTER_VARIABLE

THREADS = 64
_planned = os.environ.get(INTER_VARIABLE)
os.environ[INTER_VARIABLE] = str(THREADS)


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Local: the environment is as the user set it, while the threads of this rank are planned."""
    os.environ.pop(INTER_VARIABLE)
    if _planned is not None:
        os.environ[INTER_VARIABLE] = _planned
    try:
        yield
        if os.environ.get(INTER_VARIABLE, "").isdecimal():
            with contextlib.suppress(RuntimeError):  # TensorFlow has started
                tf.config.threading.set_inter_op_parallelism_threads(int(os.environ[INTER_VARIABLE]))
    finally:
        os.environ[INTER_VARIABLE] = str(THREADS)
