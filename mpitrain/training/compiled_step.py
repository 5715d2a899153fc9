"""Training steps with XLA: one program with the exchange in it, where XLA can call machine code.

It cannot call Python. Where the exchange is Python's the step is cut at the optimizer: forward and backward are one
program, the update is another, and the exchange stands between them. A step in which ranks have to tell each other
something before is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from mpitrain.errors import AgreedError
from mpitrain.runtime import streams
from mpitrain.strategies.replicas import has_value
from mpitrain.training.optimizer import Hook
from mpitrain.world.world import World

TrainStep = Callable[[Any], Any]
WAYS = {
    1: "not compiled",
    2: "compiled in two parts, cut at the exchange",
    3: "compiled whole, with the exchange in it",
}


def compiled_train_step(train_step: TrainStep, hook: Hook, variables: Callable[[], Sequence[Any]]) -> TrainStep:
    """Local: a training step of which XLA compiles what it can.

    Args:
        train_step: of Keras.
        hook: of the optimizer.
        variables: of the model without its metrics, as far as they are made.
    """

    def whole(data: Any) -> Any:
        # Made anew in each graph: what the step takes from around it, such as samples, is of that graph.
        return tf.function(train_step, jit_compile=True, autograph=False)(data)

    split, update = _split(train_step, hook)
    ways: list[tuple[TrainStep, Any]] = [(whole, None), (split, update), (train_step, None)]

    reasons: list[str] = []
    told: list[int] = []

    def step(data: Any) -> Any:
        known = variables()
        if len(ways) == 3 and (tf.executing_eagerly() or not known or not all(map(has_value, known))):
            del ways[0]  # a program of XLA cannot give variables the values of rank 0
            reasons.append("variables have no values yet, which are to be those of rank 0")
        while True:
            way, hook.compiled = ways[0]
            try:
                found = way(data)
            except AgreedError as error:  # all ranks trace the same
                if len(ways) == 1:
                    raise
                del ways[0]
                reasons.append(error.reason or str(error))
            else:
                if len(ways) not in told:
                    told.append(len(ways))
                    _tell(hook.exchange.world, WAYS[len(ways)], reasons)
                return found

    return step


def _tell(world: World, way: str, reasons: Sequence[str]) -> None:
    """Local: how XLA compiles the step, and why not more of it, where that is wanted."""
    if world.verbose and world.is_root:
        why = f": {'; '.join(reasons)}" if reasons else ""
        streams.write_stderr(f"mpitrain: the training step is {way}{why}\n")


def _split(train_step: TrainStep, hook: Hook) -> tuple[TrainStep, Any]:
    """Local: a training step of two compiled parts with the exchange between them, and the update that it makes."""
    variables: list[Any] = []

    # The last batch of an epoch may have fewer rows: no program of its own for each number.
    @tf.function(jit_compile=True, reduce_retracing=True)
    def forward_backward(data: Any) -> tuple[Any, list[Any]]:
        hook.captured = []
        try:
            logs = train_step(data)
            gradients, found = hook.captured[0] if hook.captured else ([], [])  # nothing to train
        finally:
            hook.captured = None
        # Variables cannot leave a compiled function: which they are is noted when it is traced.
        present = [(g, v) for g, v in zip(gradients, found, strict=True) if g is not None]
        variables[:] = [v for _, v in present]
        return logs, [tf.convert_to_tensor(g) for g, _ in present]

    @tf.function(jit_compile=True)
    def update(means: list[Any]) -> None:
        hook.update.apply(means, variables)

    compiled = replace(hook.update, apply=lambda means, _: update(means))

    def step(data: Any) -> Any:
        logs, gradients = forward_backward(data)
        hook.make(gradients, variables, compiled)
        return logs

    return step, compiled
