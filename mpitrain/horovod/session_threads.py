"""Threads for sessions of TensorFlow 1, in which collectives wait for their turn.

Each that waits occupies one of the threads that all sessions of a process share. They are made with the first session,
which may come before `init`; so from the import of this package on sessions ask for enough, unless the script says how
many it wants. What does not run in sessions keeps the number that was planned.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context  # what TensorFlow itself takes where no configuration is given

THREADS = 64


@functools.cache
def install() -> None:
    """Local: sessions made from now on ask for threads."""
    session = tf.compat.v1.Session
    make = session.__init__

    @functools.wraps(make)
    def made(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        wanted = tf.compat.v1.ConfigProto()
        wanted.CopyFrom(context.context().config if config is None else config)
        if config is None or not config.inter_op_parallelism_threads:
            wanted.inter_op_parallelism_threads = THREADS
        make(self, target, graph, wanted)

    session.__init__ = made
