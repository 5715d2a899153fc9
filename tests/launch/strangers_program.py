"""A job that says where its watchdog listens, and exchanges until a file appears. Arguments: the file."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import mpitrain


def main(end: Path) -> None:
    world = mpitrain.init()
    assert world.watchdog is not None
    for address, port in world.watchdog.roster.seat.places:
        print(f"rank {world.rank} listens on {address}:{port}", flush=True)
    exchanges = 0
    while not all(world.communicator.all_gather_obj(end.exists())):
        exchanges += 1
        time.sleep(0.01)
    print(f"rank {world.rank} done after {exchanges > 0}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
