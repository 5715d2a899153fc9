"""How this process ends: whatever ends it ends the job, instead of leaving the others waiting for ever."""

from __future__ import annotations

import contextlib
import dis
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from mpitrain.errors import AgreedError, MpitrainError, UsageError
from mpitrain.faults import report
from mpitrain.faults.activity import Activity
from mpitrain.faults.report import Culprit, Fault
from mpitrain.faults.watchdog import Watchdog
from mpitrain.runtime.topology import Topology

HEARD_SECONDS = 2.0
TOLD_SECONDS = 1.0  # in which the hub tells of a signal; Open MPI kills a second after SIGTERM
INTERRUPT_SECONDS = 5.0  # in which the main thread comes to its KeyboardInterrupt
INTERRUPTED_CODE, TERMINATED_CODE = 130, 143


class Exits:
    """Uncaught exceptions, `sys.exit`, SIGTERM and SIGINT of this process.

    Args:
        topology: this rank's place.
        abort: ends all ranks with an exit code.
        activity: what this rank is doing.
    """

    def __init__(self, topology: Topology, abort: Callable[[int], None], activity: Activity) -> None:
        self._topology, self._abort, self._activity = topology, abort, activity
        self._once = threading.Lock()
        self._watchdog: Watchdog | None = None
        self._exit: tuple[FrameType, object] | None = None  # the outermost frame when sys.exit was called, its argument
        self._interrupted = self._is_terminated = False

    def install(self) -> None:
        """Local: take over what Python calls for exceptions that nobody catches, in any thread."""
        sys.excepthook = self._end
        threading.excepthook = self._end_by_thread

    def watch(self, watchdog: Watchdog) -> None:
        """Local: let the hub tell what ends this rank; notice `sys.exit` and signals that nobody else handles."""
        self._watchdog = watchdog
        sys.exit = self._sys_exit
        if not faulthandler.is_enabled():
            faulthandler.enable(all_threads=False)  # a crash in native code shows where Python was
        with contextlib.suppress(ValueError):  # not the main thread: signals stay what they are
            self._watch_signals(watchdog)
        os.register_at_fork(after_in_child=self._forked)

    def exit_code(self) -> int:
        """Local: what this process ends with, at its end; 0 where that cannot be seen."""
        if self._exit is None:
            return 0
        frame, status = self._exit
        # Where the program returned from its outermost frame after all, somebody had caught the exception.
        if dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN"):
            return 0
        return 0 if status is None else status if isinstance(status, int) else 1

    def _sys_exit(self, status: object = None, /) -> NoReturn:
        frame = sys._getframe(1)
        while frame.f_back is not None:
            frame = frame.f_back
        self._exit = (frame, status)
        raise SystemExit(status)

    # Exceptions.

    def _end(self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        """Local: tell an uncaught exception once, then end all ranks."""
        if not self._once.acquire(blocking=False):
            return
        sys.stdout.flush()
        fault = self._fault(kind, error, trace)
        if self._watchdog is None or not self._watchdog.report(fault):
            if isinstance(error, AgreedError) and not self._topology.is_root:
                time.sleep(HEARD_SECONDS)  # rank 0 has the same error, tells it, and ends the job meanwhile
                self._abort(fault.exit_code)
            stream = sys.__stderr__ or sys.stderr  # a script's own may lead into a file
            stream.write(report.message(fault))
            stream.flush()
            report.record(fault, None, self._activity)
        self._abort(fault.exit_code)
        os._exit(fault.exit_code)

    def _end_by_thread(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            self._end(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    def _fault(self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> Fault:
        culprit, step = self._culprit(), self._activity.progress
        inner = self._activity.error
        if inner is not None and error is not None and str(inner) in str(error):
            kind, error = type(inner), inner
        if issubclass(kind, KeyboardInterrupt):
            return Fault("interrupted", "interrupted", INTERRUPTED_CODE, culprit)
        if isinstance(error, UsageError):
            text = str(error)
        elif isinstance(error, MpitrainError):
            text = f"{kind.__name__}: {error}"
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
        return Fault("exception", text, int(getattr(error, "exit_code", 1) or 1), culprit, step=step)

    def _culprit(self) -> tuple[Culprit, ...]:
        return (Culprit(self._topology.rank, self._topology.host, os.getpid()),)

    # Signals: Python runs handlers on the main thread, which may be inside MPI for ever. So the watchdog's thread is
    # woken by the signal itself; and by the handler, for a signal that came while runtime/signals.py took turns with
    # this, and woke the other.

    def _watch_signals(self, watchdog: Watchdog) -> None:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
        before = signal.set_wakeup_fd(watchdog.waker.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        watchdog.on_signal = self._on_signal

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """The watchdog's thread ends the process, wherever this thread is."""
        self._is_terminated = True
        if self._watchdog is not None:
            with contextlib.suppress(OSError):  # full: it will look anyway
                self._watchdog.waker.send(bytes([number]))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        signal.default_int_handler(number, frame)

    def _on_signal(self, number: int) -> None:
        """Local, on the watchdog's thread, which must not wait."""
        if number == signal.SIGTERM and (self._is_terminated or signal.getsignal(number) == self._terminated):
            if self._watchdog is not None:
                self._watchdog.leaving()
            fault = Fault("signal", "got SIGTERM", TERMINATED_CODE, self._culprit(), "SIGTERM")
            threading.Thread(target=self._end_by_signal, args=(fault, 0.0), daemon=True).start()
        elif number == signal.SIGINT and signal.getsignal(number) == self._interrupt:
            fault = Fault("interrupted", "interrupted", INTERRUPTED_CODE, self._culprit())
            threading.Thread(target=self._end_by_signal, args=(fault, INTERRUPT_SECONDS), daemon=True).start()

    def _end_by_signal(self, fault: Fault, patience_seconds: float) -> None:
        time.sleep(patience_seconds)
        if (patience_seconds and self._interrupted) or not self._once.acquire(blocking=False):
            return
        if self._watchdog is not None:
            self._watchdog.report(fault, TOLD_SECONDS)
        os._exit(fault.exit_code)

    def _forked(self) -> None:
        """Local: a forked child ends by itself, and as it would without mpitrain."""
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) == self._terminated:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if signal.getsignal(signal.SIGINT) == self._interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
