"""How this process ends: whatever ends it ends the job, instead of leaving the others waiting for ever."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from mpitrain.errors import AgreedError, MpitrainError, UsageError, own_lines
from mpitrain.faults import report
from mpitrain.faults.activity import Activity
from mpitrain.faults.exit_status import ExitStatus, end_now
from mpitrain.faults.report import Culprit, Fault
from mpitrain.faults.watchdog import Watchdog
from mpitrain.runtime import excepthook, streams
from mpitrain.runtime.exit_codes import INTERRUPTED, TERMINATED
from mpitrain.runtime.signals import SignalOwner
from mpitrain.runtime.topology import Topology

HEARD_SECONDS = 2.0
TOLD_SECONDS = 1.0  # in which the hub tells of a signal; Open MPI kills a second after SIGTERM
INTERRUPT_SECONDS = 5.0  # in which the main thread comes to its KeyboardInterrupt


class Exits(SignalOwner):
    """Uncaught exceptions, SystemExit, SIGTERM and SIGINT of this process.

    Args:
        topology: this rank's place.
        abort: ends all ranks with an exit code.
    """

    def __init__(self, topology: Topology, abort: Callable[[int], None], activity: Activity) -> None:
        super().__init__()
        self._topology, self._abort, self._activity = topology, abort, activity
        self._once = threading.Lock()
        self._watchdog: Watchdog | None = None
        self._status = ExitStatus()
        self._pid = os.getpid()
        self.finish: Callable[[], object] = lambda: None  # collective, ends this rank together with all the others
        self._interrupted = self._is_terminated = False

    def install(self) -> None:
        """Local: take over what Python calls for exceptions that nobody catches, in any thread."""
        excepthook.keep(self._end)
        threading.excepthook = self._end_by_thread

    def watch(self, watchdog: Watchdog) -> None:
        """Local: let the hub tell what ends this rank; notice `sys.exit` and signals that nobody else handles."""
        self._watchdog = watchdog
        self._status.watch()
        os._exit = self._exit_at_once
        if not faulthandler.is_enabled():
            faulthandler.enable(all_threads=False)  # a crash in native code shows where Python was
        with contextlib.suppress(ValueError):  # not the main thread: signals stay what they are
            self._watch_signals(watchdog)
        os.register_at_fork(after_in_child=self._forked)

    @property
    def status(self) -> ExitStatus:
        """What this process ends with, at its end."""
        return self._status

    def _exit_at_once(self, status: int) -> NoReturn:
        """Local: `os._exit`. Collective where this is the end of the program, and all the others come to theirs."""
        if os.getpid() != self._pid or self._watchdog is None or not self._watchdog.is_alive:
            end_now(status)
        self._status.at_once(status)
        if threading.current_thread() is threading.main_thread() and self._activity.inside is None:
            # The end of a program that leaves so: it waits for the others, as at any other end. Within a collective it
            # could not.
            self.finish()
        elif self._once.acquire(blocking=False):
            text = f"{self._status.text} in the middle of a collective, or on another thread"
            self._watchdog.report(Fault("exit", text, self._status.code, self._culprit()))
            self._abort(self._status.code)
        end_now(status)

    # Exceptions.

    def _end(self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        """Local: tell an uncaught exception once, then end all ranks."""
        if not self._once.acquire(blocking=False):
            return
        # `end_now` leaves without the rest of Python's end, and what was printed would be lost.
        streams.flush()
        fault = self._fault(kind, error)
        if self._watchdog is None or not self._watchdog.report(fault):
            if isinstance(error, AgreedError) and not self._topology.is_root:
                time.sleep(HEARD_SECONDS)  # rank 0 has the same error, tells it, and ends the job meanwhile
                self._abort(fault.exit_code)
            streams.write_stderr(report.message(fault))  # a script's own may lead into a file
            report.record(fault, None, self._activity)
        self._abort(fault.exit_code)
        end_now(fault.exit_code)

    def _end_by_thread(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            self._end(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    def _fault(self, kind: type[BaseException], error: BaseException | None) -> Fault:
        culprit, step = self._culprit(), self._activity.progress
        inner = self._activity.error
        if inner is not None and error is not None and str(inner) in str(error):
            kind, error = type(inner), inner
        if issubclass(kind, KeyboardInterrupt):
            return Fault("interrupted", "interrupted", INTERRUPTED, culprit)
        if isinstance(error, UsageError):
            text = str(error)
        elif isinstance(error, MpitrainError):
            text = f"{kind.__name__}: {error}"
        else:
            text = kind.__name__ if error is None else own_lines(error, keep=not isinstance(error, SyntaxError))
        return Fault("exception", text, int(getattr(error, "exit_code", 1) or 1), culprit, step=step)

    def _culprit(self) -> tuple[Culprit, ...]:
        return (Culprit(self._topology.rank, self._topology.host, os.getpid()),)

    # Signals: Python runs handlers on the main thread, which may be inside MPI for ever. So the watchdog's thread is
    # woken by the signal itself; and by the handler, for a signal that came while runtime/signals.py took turns with
    # this, and woke the other.

    def _watch_signals(self, watchdog: Watchdog) -> None:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self.take(signal.SIGTERM, self._terminated)
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            self.take(signal.SIGINT, self._interrupt)
        # Python writes the number there when the signal comes, in C, whatever the main thread does.
        before = signal.set_wakeup_fd(watchdog.waker.writing.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        watchdog.on_signal = self._on_signal

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """The watchdog's thread ends the process, wherever this thread is."""
        self._is_terminated = True
        if self._watchdog is not None:
            self._watchdog.waker.send(bytes([number]))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        signal.default_int_handler(number, frame)

    def _on_signal(self, number: int) -> None:
        """Local, on the watchdog's thread, which must not wait."""
        if number == signal.SIGTERM and (self._is_terminated or signal.getsignal(number) == self._terminated):
            if self._watchdog is not None:
                self._watchdog.leaving()
            fault = Fault("signal", "got SIGTERM", TERMINATED, self._culprit(), "SIGTERM")
            threading.Thread(target=self._end_by_signal, args=(fault, 0.0), daemon=True).start()
        elif number == signal.SIGINT and signal.getsignal(number) == self._interrupt:
            fault = Fault("interrupted", "interrupted", INTERRUPTED, self._culprit())
            threading.Thread(target=self._end_by_signal, args=(fault, INTERRUPT_SECONDS), daemon=True).start()

    def _end_by_signal(self, fault: Fault, patience_seconds: float) -> None:
        time.sleep(patience_seconds)
        if (patience_seconds and self._interrupted) or not self._once.acquire(blocking=False):
            return
        if self._watchdog is not None:
            self._watchdog.report(fault, TOLD_SECONDS)
        end_now(fault.exit_code)

    def _forked(self) -> None:
        """Local: a forked child ends by itself, and as it would without mpitrain."""
        excepthook.give_back()
        threading.excepthook = threading.__excepthook__
