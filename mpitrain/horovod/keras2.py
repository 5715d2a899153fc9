"""What scripts of Keras 2 say and Keras 3 says otherwise, taken as it is meant."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

UNUSED = "experimental_run_tf_function"  # an argument of `compile` that chose how Keras 2 ran a step


class CallableList(list[Any]):
    """A list that gives itself where it is called: what was a method of Keras 2 is an attribute of Keras 3."""

    def __call__(self) -> list[Any]:
        """Local: the list."""
        return self


@functools.cache
def install() -> None:
    """Local: `optimizer.variables()`, `.lr`, `optimizers.legacy`, `backend.set_value` and an argument of `compile`."""
    _let_variables_be_called(_owner(keras.optimizers.Optimizer, "variables"))
    _let_variables_be_called(keras.optimizers.LossScaleOptimizer)
    rate = property(lambda self: self.learning_rate, lambda self, value: setattr(self, "learning_rate", value))
    keras.optimizers.Optimizer.lr = rate
    _drop_unused_argument(_owner(keras.Model, "compile"))
    for optimizers in (keras.optimizers, tf.keras.optimizers):
        for name in ("Adagrad", "Adam", "Ftrl", "Optimizer", "RMSprop", "SGD"):  # which Keras 3 has only to refuse them
            setattr(optimizers.legacy, name, getattr(keras.optimizers, name))
    for backend in (keras.backend, tf.keras.backend):
        backend.get_value, backend.set_value = get_value, set_value


def get_value(x: Any) -> Any:
    """Local: of a variable or tensor its numbers, else what was given."""
    return x.numpy() if hasattr(x, "numpy") else x


def set_value(x: Any, value: Any) -> None:
    """Local: of a variable."""
    x.assign(value)


def _owner(kind: type, name: str) -> type:
    """Local: the class that has this attribute itself: Keras compares what others inherit with it."""
    return next(base for base in kind.__mro__ if name in vars(base))


def _let_variables_be_called(kind: Any) -> None:
    get = vars(kind)["variables"].fget
    kind.variables = property(lambda self: CallableList(get(self)))


def _drop_unused_argument(kind: Any) -> None:
    compile_model = kind.compile

    @functools.wraps(compile_model)
    def compile_without(self: Any, *args: Any, **options: Any) -> Any:
        options.pop(UNUSED, None)
        return compile_model(self, *args, **options)

    kind.compile = compile_without
