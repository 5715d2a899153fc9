"""A job that Horovod's elastic.run runs, of which rank 1 kills itself: the others go on from their last commit."""

from __future__ import annotations

import os
import signal
from typing import Any

import mpitrain.horovod.tensorflow as hvd

hvd.init()
started_as = hvd.rank()


@hvd.elastic.run
def train(state: Any) -> None:
    while state.batch < 30:
        if started_as == 1 and state.batch == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        state.total += float(hvd.allreduce(float(hvd.size()), op=hvd.Sum))
        state.batch += 1
        if state.batch % 5 == 0:
            state.commit()


state: Any = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0, total=0.0)
resets: list[int] = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
# Ten batches of three ranks were committed.
assert (state.total, resets) == (10 * 9.0 + 20 * 4.0, [2]), (state.total, resets)
print(f"rank {started_as} is {hvd.rank()} of {hvd.size()}", flush=True)
