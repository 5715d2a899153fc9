"""An exception on one rank ends the job, instead of leaving the others waiting for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from types import TracebackType

from mpitrain.comm.communicator import Communicator
from mpitrain.errors import AgreedError, MpitrainError, UsageError
from mpitrain.runtime.topology import Topology

HEARD_SECONDS = 2.0


def install(communicator: Communicator, topology: Topology) -> None:
    """Local: print the traceback of an uncaught exception once, then end all ranks.

    Covers the main thread and other threads. `KeyboardInterrupt` ends the job without a traceback.
    """
    once = threading.Lock()

    def end(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        if not once.acquire(blocking=False):
            return
        code = getattr(error, "exit_code", 1)
        if isinstance(error, AgreedError) and not topology.is_root:
            time.sleep(HEARD_SECONDS)  # rank 0 has the same error, tells it, and ends the job meanwhile
            communicator.abort(code)
        if issubclass(kind, KeyboardInterrupt):
            text, code = "interrupted\n", 130
        elif isinstance(error, UsageError):
            text = f"{error}\n"
        elif isinstance(error, MpitrainError):
            text = f"{kind.__name__}: {error}\n"
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
        sys.stdout.flush()
        sys.stderr.write(f"mpitrain: rank {topology.rank} on {topology.host} failed; the job ends\n{text}")
        sys.stderr.flush()
        communicator.abort(code)
        os._exit(code)

    def in_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            end(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    sys.excepthook = end
    threading.excepthook = in_thread
