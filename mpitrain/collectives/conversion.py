"""What AutoGraph makes of this package: nothing. It would look for graphs in the code of MPI, and warn of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.autograph.core import config

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


leave_out(__name__.partition(".")[0])
