"""Where the threads of this process stand, and what that says about its phase."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from mpitrain.faults.activity import Phase

DEEPEST = 12
INTERNAL = ("/tensorflow/python/", "/keras/src/utils/traceback_utils.py")
IDLE = ("threading.py", "queue.py", "selectors.py", "concurrent/futures/thread.py", "multiprocessing/pool.py")


@dataclass(frozen=True)
class Stack:
    """One thread."""

    thread: str  # its name
    frames: tuple[str, ...]  # `file:line function`, the outermost first


@dataclass(frozen=True)
class _Mark:
    """A frame that tells the phase: a part of its file's path, and its functions; () for any."""

    phase: Phase
    path: str
    functions: tuple[str, ...] = ()

    def is_in(self, stack: Stack) -> bool:
        """Whether a thread stands inside such a frame."""
        for frame in stack.frames:
            place, _, function = frame.rpartition(" ")
            if self.path in place and (not self.functions or function in self.functions):
                return True
        return False


# Of the main thread. What is more special stands first: a checkpoint within a callback is a checkpoint.
_MARKS = (
    _Mark("checkpoint", "keras/src/saving/"),
    _Mark("checkpoint", "callbacks/model_checkpoint.py"),
    _Mark("checkpoint", "callbacks/backup_and_restore.py"),
    _Mark("checkpoint", "tensorflow/python/checkpoint/"),
    _Mark("checkpoint", "tensorflow/python/saved_model/"),
    _Mark("evaluation", "trainer.py", ("evaluate", "predict", "test_on_batch", "predict_on_batch")),
    _Mark("start", "polymorphic_function/tracing_compilation.py", ("trace_function", "_create_concrete_function")),
    _Mark("callback", "keras/src/callbacks/callback_list.py"),
    _Mark("callback", "keras/src/callbacks/callback.py"),
)
# Of any thread.
_DATA_MARKS = (_Mark("data", "data/ops/from_generator_op.py"), _Mark("data", "trainers/data_adapters/"))


def python_stacks(skip: Sequence[int] = ()) -> list[Stack]:
    """Local: the Python stacks of all threads but the idle ones, the main thread first."""
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
    for mark in _MARKS:
        if stacks and mark.is_in(stacks[0]):
            return mark.phase
    reading = phase != "start" and any(mark.is_in(stack) for stack in stacks for mark in _DATA_MARKS)
    return "data" if reading else phase


def shortened(stack: Stack) -> list[str]:
    """Local: the innermost frames of a stack, as lines, without those that are inside TensorFlow or Keras alone."""
    told = [frame for frame in stack.frames if not any(path in frame for path in INTERNAL)] or list(stack.frames)
    left_out = len(told) - DEEPEST
    return [*([f"... {left_out} more"] if left_out > 0 else []), *told[-DEEPEST:]]


def _frames(frame: FrameType | None) -> list[str]:
    frames = []
    while frame is not None:
        frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return frames[::-1]


def _place(frame: str) -> str:
    return frame.rpartition(":")[0]
