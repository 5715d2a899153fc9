"""The table of who is where: rank, host, device, cores, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path

from mpitrain.runtime.columns import columns
from mpitrain.runtime.counted import counted
from mpitrain.runtime.threads import available_cores
from mpitrain.world.world import World

TITLES = ("rank", "node", "host", "local rank", "device", "cores", "memory")
MOST_ROWS = 16  # more ranks are told by host, and of more hosts the first and the last
GIB = 1 << 30


@dataclass(frozen=True)
class Place:
    """What one rank has."""

    rank: int  # its number
    node: int  # number of its host
    host: str  # its name
    local_rank: int  # the rank's number on its host
    device: str  # what it computes on
    cores: int  # how many it may use; shared with other ranks unless each is bound to its own
    memory_bytes: int | None  # of the host, or less where a container limits it; None if unknown


def places(world: World) -> list[Place]:
    """Collective: the place of each rank."""
    device = "CPU" if world.devices.device is None else f"GPU {world.devices.device}"
    own = Place(
        world.rank,
        world.node_rank,
        world.topology.host,
        world.local_rank,
        device,
        len(available_cores()),
        memory_bytes(),
    )
    return list(world.communicator.all_gather_obj(own))


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Local: memory of this host, or of the container that this process is in."""
    sizes = []
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(root / name).strip()
        sizes += [int(text)] if text.isdecimal() else []
    for line in _read(root / "proc/meminfo").splitlines():
        words = line.split()
        if words[0] == "MemTotal:":
            sizes.append(int(words[1]) << 10)
    return min(sizes, default=None)


def table(places: Sequence[Place]) -> str:
    """The places as text: one line a rank, or above 16 ranks one line a host."""
    if len(places) <= MOST_ROWS:
        rows = [_row(place) for place in places]
    else:
        ordered = sorted(places, key=lambda place: (place.node, place.rank))
        rows = [_host_row(list(group)) for _, group in groupby(ordered, key=lambda place: place.node)]
    if len(rows) > MOST_ROWS:
        half = MOST_ROWS // 2
        between = ("...", "...", counted(len(rows) - 2 * half, "more host"), "...", "...", "...", "...")
        rows = [*rows[:half], between, *rows[-half:]]
    return columns(TITLES, rows)


def _row(place: Place) -> tuple[str, ...]:
    *cells, memory = astuple(place)
    return (*map(str, cells), _gib(memory))


def _host_row(group: Sequence[Place]) -> tuple[str, ...]:
    first = group[0]
    memories = {place.memory_bytes for place in group}
    return (
        _span([place.rank for place in group]),
        str(first.node),
        first.host,
        _span([place.local_rank for place in group]),
        ", ".join(dict.fromkeys(place.device for place in group)),
        ", ".join(map(str, dict.fromkeys(place.cores for place in group))),
        ", ".join(map(_gib, memories)),
    )


def _span(numbers: Sequence[int]) -> str:
    """`0-7`, or `0, 2, 4`, shortened."""
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:4]))
    return f"{shown}, ... {numbers[-1]}" if len(numbers) > 5 else ", ".join(map(str, numbers))


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / GIB:.1f} GiB"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
