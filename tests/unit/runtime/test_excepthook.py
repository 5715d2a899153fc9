"""A hook of the program's own is called, and does not keep an exception from ending the job."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from mpitrain.runtime import excepthook

def end(kind, error, trace):
    print("ended by", kind.__name__, error, flush=True)
    os._exit(7)

def own(kind, error, trace):
    print("shown", error)

excepthook.keep(end)
"""


@pytest.mark.parametrize(
    ("rest", "told", "code"),
    [
        ("1 / 0", "ended by ZeroDivisionError division by zero", 7),
        ("sys.excepthook = own; 1 / 0", "shown division by zero\nended by ZeroDivisionError division by zero", 7),
        # A hook that hands on to the one before, as most do.
        (
            "first = sys.excepthook\nsys.excepthook = lambda *found: (own(*found), first(*found))\n1 / 0",
            "shown division by zero\nended by ZeroDivisionError division by zero",
            7,
        ),
        ("sys.excepthook = lambda *found: {}[3]\n1 / 0", "ended by ZeroDivisionError division by zero", 7),
        ("sys.excepthook = lambda *found: sys.exit(5)\n1 / 0", "", 5),
        ("sys.excepthook = own\nassert sys.excepthook is own", "", 0),
        ("excepthook.give_back(); assert sys.excepthook is sys.__excepthook__", "", 0),
        ("sys.excepthook = own; excepthook.give_back(); 1 / 0", "shown division by zero", 1),
    ],
)
def test_an_exception_that_nobody_catches(rest: str, told: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM + rest], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == (told, code), done.stderr
