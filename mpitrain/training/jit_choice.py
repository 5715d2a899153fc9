"""Whether XLA makes the training step faster, found out in the first steps of a training."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import keras

from mpitrain.runtime import streams
from mpitrain.strategies.strategy import strategy_of
from mpitrain.training.model_hook import compile_step
from mpitrain.world.agreement import Agreed
from mpitrain.world.start import current_world
from mpitrain.world.world import World

WARM_STEPS = 6  # traced, compiled, or the first by another way
TIMED_STEPS = 10


class JitChoice(keras.callbacks.Callback):
    """Compiles the training step with XLA where that makes it faster. Stands behind `DataParallel`.

    The first steps are not compiled, the next ones are. Then all ranks keep what took the slowest of them less time
    (the median of ten steps). All of these are steps of the training; which of them are compiled shows in their last
    bits.

    Args:
        world: the job; the current one by default.

    Attributes:
        is_over: the choice is made.

    Example:
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer="sgd", loss="mse")
        >>> callbacks = [mpitrain.callbacks.DataParallel(), mpitrain.callbacks.JitChoice()]
        >>> history = model.fit(np.eye(3), np.ones((3, 1)), verbose=0, callbacks=callbacks)
        >>> callbacks[1].is_over  # 32 steps are needed
        False
    """

    def __init__(self, world: World | None = None) -> None:
        super().__init__()
        self._world = world or current_world()
        self._strategy = strategy_of(self._world)
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # of steps, by whether they were compiled
        self._is_compiled = self.is_over = False
        self._since = 0  # updates, when the way was changed
        self._seen: Agreed | None = None
        self._began = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Collective: a training begins, or goes on."""
        self._strategy.xla_obstacles()  # asked now, and not in a step, at which ranks without data would be missed
        self._since, self._seen = self._updates, self._strategy.agreed

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Local: a step begins."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Collective once, after some steps: change the way, or decide."""
        if self.is_over:
            return
        if self._updates - self._since > WARM_STEPS:
            self._seconds[self._is_compiled].append(time.perf_counter() - self._began)
        # Ranks that have no more data come to no end of a step, so all others wait until they have.
        if not self._all_are_here() or self._updates - self._since < WARM_STEPS + TIMED_STEPS:
            return
        if not self._is_compiled:
            self._use(compiled=True)
        else:
            self._decide()

    @property
    def _updates(self) -> int:
        return self._world.activity.updates if self._world.exchanges else int(self.model.optimizer.iterations.numpy())

    def _all_are_here(self) -> bool:
        if not self._world.exchanges:
            return True
        agreed, before = self._strategy.agreed, self._seen
        self._seen = agreed
        return agreed is not None and agreed is not before and bool(agreed.active.all())

    def _use(self, compiled: bool) -> None:
        self._is_compiled, self._since = compiled, self._updates
        compile_step(self.model, compiled)

    def _decide(self) -> None:
        own = [statistics.median(self._seconds[way]) if self._seconds[way] else 0.0 for way in (False, True)]
        self._world.agreement.call("whether XLA compiles the step")
        plain, compiled = map(max, zip(*self._world.communicator.all_gather_obj(own), strict=True))
        self.is_over = True
        if compiled >= plain:
            self._use(compiled=False)
        if self._world.is_root:
            ratio = compiled / plain if plain > 0 else math.nan
            kept = "is" if compiled < plain else "is not"
            streams.write_stderr(
                f"mpitrain: a step takes {plain * 1e3:.3g} ms, compiled by XLA {compiled * 1e3:.3g} ms ({ratio:.2f} "
                f"times as long): it {kept} compiled from now on\n"
            )
