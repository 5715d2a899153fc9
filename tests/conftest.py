"""Settings of all tests, made before TensorFlow is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mpitrain.runtime import imports

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

try:
    from hypothesis import settings
except ImportError:  # the property tests then fail by themselves; the others need it not
    pass
else:
    # Derandomized: the same examples in every run, and on every rank of one.
    settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50, database=None)
    settings.load_profile("repeatable")

imports.install()  # before test modules import Keras; in a job `mpitrain.init` does it


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Losses and metrics follow floatx, layers the policy, which stays what it was when it was first asked for."""
    import keras

    for dtype in ("float64", "float32"):
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
        if dtype == "float64":
            yield
