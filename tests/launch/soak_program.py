"""The training job, and beside it a file for each rank that says how far it is: DIRECTORY [its options].

The file `phases-RANK-PID` gets a line, phase and finished steps, whenever that changes. Whoever reads it may kill the
rank in a phase, at any moment of it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from mpitrain.cli.main import main
from mpitrain.faults import stacks
from mpitrain.world import start

LOOK_SECONDS = 0.003


def place(rank: int) -> str:
    """Where this rank is; rank 0 writes checkpoints beside all else."""
    if not start._current:
        return "start 0"
    activity = start._current[0].activity
    if rank == 0 and any(thread.name == "mpitrain checkpoint" for thread in threading.enumerate()):
        return f"checkpoint {activity.progress}"
    phase = stacks.phase_of(activity.phase, stacks.python_stacks([threading.get_ident()]))
    return f"{phase} {activity.progress}"


def note_places(path: Path, rank: int) -> None:
    """For ever: add a line whenever it is another place."""
    last = ""
    with path.open("w", buffering=1) as file:
        while True:
            now = place(rank)
            if now != last:
                file.write(f"{now}\n")
                last = now
            time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    own = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    file = Path(sys.argv[1]) / f"phases-{own}-{os.getpid()}"
    threading.Thread(target=note_places, args=(file, own), daemon=True).start()
    sys.exit(main(sys.argv[2:]))
