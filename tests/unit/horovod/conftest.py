"""Each thread is a rank of Horovod's, and Keras stays what it is.

Horovod's names are imported here, before the modules that test them: what they change in Keras and TensorFlow for
scripts would else be there in all tests of this process.
"""

from __future__ import annotations

import pytest

from mpitrain.horovod import keras2, session_threads
from tests.unit.horovod.job import TableOfThread

with pytest.MonkeyPatch.context() as unpatched:
    unpatched.setattr(keras2, "install", lambda: None)
    unpatched.setattr(session_threads, "install", lambda: None)
    from mpitrain.horovod import basics, gradients, normalization, process_sets


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TableOfThread()
    for module in (basics, gradients, normalization, process_sets):
        monkeypatch.setattr(module, "table", table)
