"""Random numbers of a script: the same on all ranks, unless it sets seeds that are not. No TensorFlow."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np


def share_seed(seed: int) -> Callable[[int], int]:
    """Local: what Python and NumPy draw depends on `seed` from now on, also in generators that are made without one.

    Returns:
        A function that draws so many random bits.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (that of scripts)
    draw = random.Random(seed).getrandbits
    np.random.bit_generator.randbits = draw  # type: ignore[attr-defined] # by which NumPy asks the system for a seed
    return draw


@contextlib.contextmanager
def preserve_random_state() -> Iterator[None]:
    """Local: what the script draws after this context, Python's numbers and NumPy's, is not changed by it."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (that of scripts)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
