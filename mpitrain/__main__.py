"""`python -m mpitrain` is the command `mpitrain`."""

from __future__ import annotations

import sys

from mpitrain.cli.main import main

if __name__ == "__main__" and (code := main()):
    sys.exit(code)
