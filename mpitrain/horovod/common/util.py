"""Small functions that scripts and tests import from `horovod.common.util`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpitrain.horovod.basics import absent, operation
from mpitrain.horovod.basics import gpu_available as gpu_available


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Local: environment variables for the time being; None leaves one as it is."""
    wanted = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Local: consecutive parts whose lengths differ by one at most, longer ones first."""
    base, extra = divmod(len(items), parts)
    ends = [base * (index + 1) + min(index + 1, extra) for index in range(parts)]
    return [items[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Local: whether a number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(value: Any) -> bool:
    """Local: whether one can loop over it."""
    return isinstance(value, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Local: compare version numbers.

    Raises:
        ValueError: `target` has not three parts.
    """
    from packaging import version

    if not isinstance(ver, str) or not isinstance(target, str) or len(target.split(".")) != 3:
        raise ValueError(f"versions are text, and the second has three parts: not {ver!r} and {target!r}")
    return version.parse(ver) >= version.parse(target)


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Local: a function that chooses the reduction from `op` and the older `average`."""
    return operation


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Local: whether there is a module for this framework."""
    return ext_base_name == "tensorflow"


def mpi_built(verbose: bool = False) -> bool:
    """Local: MPI carries the messages."""
    return True


def gloo_built(verbose: bool = False) -> bool:
    """Local: Gloo does not."""
    return absent()


nccl_built = ddl_built = ccl_built = gloo_built
