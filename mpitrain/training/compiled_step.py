"""Training steps with XLA: forward, backward and update are compiled, the exchange stands between them.

XLA cannot compile a call to the host, so a step with `jit_compile=True` is cut at the optimizer. One in which ranks
have to tell each other something before is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from mpitrain.training.optimizer import Hook
from mpitrain.training.step_collectives import NotCompilableError, compiled

TrainStep = Callable[[Any], Any]


def split_train_step(train_step: TrainStep, hook: Hook) -> TrainStep:
    """Local: a training step of two compiled parts with the exchange between them."""
    variables: list[Any] = []
    plain = False

    @tf.function(jit_compile=True, reduce_retracing=True)
    def forward_backward(data: Any) -> tuple[Any, list[Any]]:
        hook.captured = []
        try:
            with compiled():
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

    hook.compiled = replace(hook.update, apply=lambda means, _: update(means))

    def step(data: Any) -> Any:
        nonlocal plain
        if not plain:
            try:
                logs, gradients = forward_backward(data)
            except NotCompilableError:
                plain, hook.compiled = True, None
            else:
                hook.make(gradients, variables, hook.compiled or hook.update)
                return logs
        return train_step(data)

    return step
