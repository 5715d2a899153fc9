"""What Python calls for an exception that nobody catches: it always ends the job, whatever a script shows of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_NAME = "excepthook"


class _Sys(ModuleType):
    """`sys`, whose hook a program may set (as packages that show tracebacks in colour do).

    Python looks it up in the dictionary of the module, where it stays; the program gets and sets its own.
    """

    _own: Hook | None = None
    _end: Hook = sys.__excepthook__

    @property
    def excepthook(self) -> Hook:
        """What the program has set; until then what ends the job."""
        return _Sys._own or _Sys._end

    @excepthook.setter
    def excepthook(self, hook: Hook) -> None:
        _Sys._own = hook


def keep(end: Hook) -> None:
    """Local: from now on `end` is called for an exception that nobody catches, after a hook that the program sets.

    Where that hook ends the program itself, or raises SystemExit, that holds.
    """

    def call(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _Sys._own is not None:
            try:
                _Sys._own(kind, error, trace)
            except Exception:  # Python would show both; the one that ends the program says where it is from
                sys.__excepthook__(*sys.exc_info())
        end(kind, error, trace)

    _Sys._own, _Sys._end = None, end
    vars(sys)[_NAME] = call
    sys.__class__ = _Sys


def give_back() -> None:
    """Local: an exception ends this process as it would without `keep`, also by a hook that the program has set."""
    sys.__class__ = ModuleType
    sys.excepthook = _Sys._own or sys.__excepthook__
