"""Says where its rank is, and then does as its arguments say: nothing, `exit N` on rank 1, or `wait`."""

from __future__ import annotations

import os
import sys
import time

import mpitrain

if sys.argv[1:] == ["late"] and os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    os.write(1, f"late on {os.uname().nodename}\n".encode())
    time.sleep(300)  # never meets the others
world = mpitrain.init()
line = f"rank {world.rank} of {world.size}: node {world.node_rank}, local {world.local_rank} on {os.uname().nodename}"
os.write(1, f"{line}, SEEN={os.environ.get('SEEN')}, UNSEEN={os.environ.get('UNSEEN')}\n".encode())
if sys.argv[1:] == ["wait"]:
    time.sleep(300)
if sys.argv[1:2] == ["exit"] and world.rank == 1:
    sys.exit(int(sys.argv[2]))
