"""One seed for the hashes of texts on all ranks, so that a set of texts has the same order on each of them.

Python draws a seed for each process, and reads the variable that sets it only when the interpreter starts. A program
that numbers its classes by `list(set(names))` would number them differently on each rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from mpitrain.runtime import launcher

VARIABLE, SEED = "PYTHONHASHSEED", "0"


def seed(environ: Mapping[str, str]) -> dict[str, str]:
    """Local: the variable to be set for the ranks of a job; none where the user has chosen."""
    return {} if VARIABLE in environ else {VARIABLE: SEED}


def share_seed() -> None:
    """Local: execute this program anew with the one seed, where it is one of several ranks and has another.

    To be called before MPI is loaded: launchers know the process, not how often it begins. Nothing of note is
    loaded by then, so it costs about as long as Python takes to start, 20 ms.
    """
    found = launcher.detect(os.environ)
    if found is None or found.size == 1 or VARIABLE in os.environ or "mpi4py.MPI" in sys.modules:
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **seed(os.environ)})
