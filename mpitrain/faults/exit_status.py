"""The status that Python is about to end this process with, before it does, whatever raised SystemExit."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from typing import Any, NoReturn

end_now = os._exit  # that of Python: `Exits` puts another one in its place
CALLED = "_by_sys_exit"
LONGEST_TEXT = 80


class ExitStatus:
    """Notices the end of a program by `sys.exit`, `exit`, `raise SystemExit` and the like.

    Python calls no hook for a SystemExit that nobody catches; but it asks the exception for its `code` then, with no
    frame of Python's left (`_Py_HandleSystemExit`). So it is asked here who asks.
    """

    def __init__(self) -> None:
        self.code = 0  # the exit code; 0 until then
        self.text = "came to its end"  # what the program has done

    def watch(self) -> None:
        """Local: from now on."""
        members = gc.get_referents(SystemExit.__dict__)[0]  # the dictionary behind the read-only view of it
        member = members["code"]

        def code(error: SystemExit) -> Any:
            status = member.__get__(error)
            if _interpreter_asks():
                self._note(error, status)
            return status

        members["code"] = property(code, member.__set__, member.__delete__)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
        # Before Python 3.12 that of C raises no object that could be asked.
        plain, sys.exit = sys.exit, leave
        main = vars(sys.modules["__main__"])
        main.update({name: leave for name, value in main.items() if value is plain})

    def at_once(self, status: int) -> None:
        """Local: it is to end by `os._exit`, which is no success unless all ranks end."""
        self.code, self.text = status & 0xFF or 1, f"ended with exit code {status} (os._exit)"

    def _note(self, error: SystemExit, status: object) -> None:
        self.code = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
        given = "" if status is None else repr(status)[:LONGEST_TEXT]
        self.text = f"called sys.exit({given})" if hasattr(error, CALLED) else f"raised SystemExit({given})"


def leave(status: object = None, /) -> NoReturn:
    """Local: `sys.exit`."""
    error = SystemExit(status)
    setattr(error, CALLED, True)
    raise error


def _interpreter_asks() -> bool:
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False
