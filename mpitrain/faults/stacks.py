"""Where the threads of this process stand, and what that says about its phase."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from mpitrain.faults.activity import Phase

DEEPEST = 12
IDLE = ("threading.py", "queue.py", "selectors.py", "concurrent/futures/thread.py", "multiprocessing/pool.py")


@dataclass(frozen=True)
class Stack:
    """One thread.

    Attributes:
        thread: its name.
        frames: `file:line function`, the outermost first.
    """

    thread: str
    frames: tuple[str, ...]


# The first mark that is found in a frame tells the phase. What is more special stands first: a checkpoint within a
# callback is a checkpoint.
_MARKS: tuple[tuple[Phase, tuple[str, ...]], ...] = (
    (
        "checkpoint",
        (
            "keras/src/saving/",
            "callbacks/model_checkpoint.py",
            "backup_and_restore.py",
            "tensorflow/python/checkpoint/",
        ),
    ),
    ("checkpoint", ("tensorflow/python/saved_model/",)),
    ("evaluation", ("trainer.py evaluate", "trainer.py predict", "trainer.py test_on_batch", "predict_on_batch")),
    ("start", ("polymorphic_function/tracing_compilation.py", "tensorflow/python/autograph/")),
    ("callback", ("keras/src/callbacks/callback_list.py",)),
)
_DATA_MARKS = ("data/ops/from_generator_op.py", "trainers/data_adapters/", "data/ops/iterator_ops.py")


def python_stacks(skip: Sequence[int] = ()) -> list[Stack]:
    """Local: the Python stacks of all threads but the idle ones, the main thread first.

    Args:
        skip: identifiers of threads that are left out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        frames = _frames(frame)
        if ident in skip or (ident != main and frames and _place(frames[-1]).endswith(IDLE)):
            continue
        stacks.append(Stack(names.get(ident, "a thread of TensorFlow"), tuple(frames)))
    return stacks


def phase_of(phase: Phase, stacks: Sequence[Stack]) -> Phase:
    """Local: the phase that was noted, made more exact by where the threads stand.

    Keras calls the reading of data, tracing, saving and callbacks from inside one call, so that nothing can be
    noted there without a cost at every step.
    """
    if phase in ("checkpoint", "evaluation", "end"):
        return phase
    for found, marks in _MARKS:
        if stacks and any(mark in frame for frame in stacks[0].frames for mark in marks):
            return found
    if phase != "start" and any(mark in frame for stack in stacks for frame in stack.frames for mark in _DATA_MARKS):
        return "data"
    return phase


def shortened(stack: Stack) -> list[str]:
    """Local: the innermost frames of a stack, as lines."""
    left_out = len(stack.frames) - DEEPEST
    return [*([f"... {left_out} more"] if left_out > 0 else []), *stack.frames[-DEEPEST:]]


def _frames(frame: FrameType | None) -> list[str]:
    frames = []
    while frame is not None:
        frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return frames[::-1]


def _place(frame: str) -> str:
    return frame.rpartition(":")[0]
