"""`horovod.run`, which starts ranks from a program that is running already: here they are started by a command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from mpitrain.errors import UsageError


def run(func: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
    """Local: refuse.

    Raises:
        UsageError: always, with what to do instead.
    """
    name = getattr(func, "__name__", "the function")
    raise UsageError(
        f"horovod.run({name}, np=N) starts no ranks here: put the call of {name} into a script of its own and start it "
        "with `mpitrain run -np N --as-horovod script.py`, or horovodrun; hvd.allgather_object collects the results"
    )
