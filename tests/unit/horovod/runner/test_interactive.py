"""`horovod.run` starts no ranks here."""

from __future__ import annotations

import functools

import pytest

from mpitrain.errors import UsageError
from mpitrain.horovod.runner.interactive import run


def train() -> None:
    """What would be run."""


def test_it_says_what_to_do_instead() -> None:
    with pytest.raises(UsageError, match=r"horovod\.run\(train, np=N\) starts no ranks here"):
        run(train, np=2)
    with pytest.raises(UsageError, match=r"horovod\.run\(the function, np=N\)"):
        run(functools.partial(train))
