"""What the stacks of a process tell of what it does."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mpitrain.faults import stacks
from mpitrain.faults.stacks import Stack


@pytest.mark.parametrize(
    ("phase", "frame", "expected"),
    [
        ("compute", "/x/keras/src/callbacks/callback_list.py:1 on_epoch_end", "callback"),
        ("compute", "/x/keras/src/backend/tensorflow/trainer.py:400 fit", "compute"),
        ("compute", "/x/keras/src/backend/tensorflow/trainer.py:400 evaluate", "evaluation"),
        ("compute", "/x/keras/src/saving/saving_lib.py:10 save_model", "checkpoint"),
        ("compute", "/x/polymorphic_function/tracing_compilation.py:10 trace_function", "start"),
        ("compute", "/x/polymorphic_function/tracing_compilation.py:10 call_function", "compute"),
        ("compute", "/x/keras/src/trainers/data_adapters/py_dataset_adapter.py:3 get", "data"),
        ("start", "/x/keras/src/trainers/data_adapters/py_dataset_adapter.py:3 get", "start"),
        ("end", "/x/keras/src/callbacks/callback_list.py:1 on_epoch_end", "end"),
    ],
)
def test_phase_from_where_the_main_thread_stands(phase: Any, frame: str, expected: str) -> None:
    assert stacks.phase_of(phase, [Stack("MainThread", ("/s/train.py:1 <module>", frame))]) == expected


def test_stacks_show_this_function_and_no_idle_thread() -> None:
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait, name="idle")
    thread.start()
    try:
        found = stacks.python_stacks()
    finally:
        idle.set()
        thread.join()
    assert found[0].thread == "MainThread"
    assert any(frame.endswith("test_stacks_show_this_function_and_no_idle_thread") for frame in found[0].frames)
    assert "idle" not in [stack.thread for stack in found]
