"""What TensorFlow's compilers make of this package: nothing.

AutoGraph would look for graphs in the code of MPI, and warn of it. XLA cannot compile calls of Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.autograph.core import config

from mpitrain.errors import AgreedError

Function = TypeVar("Function", bound=Callable[..., Any])


def leave_out(package: str) -> None:
    """Local: from now on AutoGraph converts nothing of a package, nor what that calls."""
    rule = config.DoNotConvert(package)
    if str(rule) not in map(str, config.CONVERSION_RULES):
        config.CONVERSION_RULES = (rule, *config.CONVERSION_RULES)


def of_the_script(function: Function) -> Function:
    """Local: a function that this package calls for a script, converted where the script's own calls are."""
    autograph = tf.__internal__.autograph
    converted: Function = autograph.tf_convert(function, autograph.control_status_ctx())
    return converted


def compiled_function() -> Any:
    """Local: the `tf.function` with `jit_compile=True` that is being traced; None if XLA compiles nothing of this."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        function = frame.f_locals.get("self") if "polymorphic_function" in frame.f_code.co_filename else None
        if getattr(function, "_jit_compile", None):
            return function
        frame = frame.f_back
    return None


def refuse_compiled(reason: str = "it calls Python") -> None:
    """Local, where a collective is traced: XLA is not to compile it. All ranks trace the same.

    Args:
        reason: why it cannot.

    Raises:
        AgreedError: it stands in a `tf.function` with `jit_compile=True`.
    """
    function = compiled_function()
    if function is None:
        return
    python = function.python_function
    code = getattr(python, "__code__", None)
    place = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    error = AgreedError(
        f"the tf.function {getattr(python, '__name__', 'of this program')}{place} has jit_compile=True, and "
        f"XLA cannot compile the exchange between ranks in it ({reason}): leave jit_compile=True out there, or compile "
        "a function that returns the gradients, and apply them outside of it."
    )
    error.reason = reason
    raise error


leave_out(__name__.partition(".")[0])
