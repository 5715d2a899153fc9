"""What the compilers of TensorFlow are told of this package."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.autograph.core import config

from mpitrain.collectives import conversion
from mpitrain.errors import AgreedError


def test_a_package_is_left_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = config.CONVERSION_RULES
    monkeypatch.setattr(config, "CONVERSION_RULES", before)
    conversion.leave_out("some_package")
    conversion.leave_out("some_package")
    conversion.leave_out("mpitrain")  # which the module has done
    assert config.CONVERSION_RULES[1:] == before
    assert config.CONVERSION_RULES[0].matches("some_package.module")


def test_what_is_called_for_a_script_is_converted_where_its_own_calls_are() -> None:
    def larger(x: Any) -> Any:
        if x > 0:
            return x + 1.0
        return x - 1.0

    @tf.function
    def graph(x: Any) -> Any:
        return conversion.of_the_script(larger)(x)

    assert [float(graph(tf.constant(one))) for one in (3.0, -3.0)] == [4.0, -4.0]

    @tf.function(autograph=False)
    def unconverted(x: Any) -> Any:
        return conversion.of_the_script(larger)(x)

    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        unconverted(tf.constant(3.0))


def test_the_function_that_xla_compiles_is_found_and_refused() -> None:
    seen: list[Any] = []

    def inner(x: Any) -> Any:
        seen.append(conversion.compiled_function())
        return x

    tf.function(inner)(1.0)
    whole = tf.function(inner, jit_compile=True)
    whole(1.0)
    assert seen[0] is None
    assert seen[1].python_function is inner
    conversion.refuse_compiled()  # nothing is compiled here

    @tf.function(jit_compile=True)
    def exchanging(x: Any) -> Any:
        conversion.refuse_compiled()
        return x

    with pytest.raises(AgreedError, match=r"exchanging \(test_conversion\.py:\d+\) has jit_compile=True"):
        exchanging(1.0)
