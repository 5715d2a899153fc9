"""The table of ranks: every one of a few, folded when they are many."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.observe.ranks import GIB, Place, memory_bytes, table


def grid(hosts: int, each: int, cyclic: bool = False) -> list[Place]:
    ranks = range(hosts * each)
    node = [rank % hosts if cyclic else rank // each for rank in ranks]
    return [
        Place(rank, node[rank], f"h{node[rank]}", node[:rank].count(node[rank]), f"GPU {rank % each}", 8, 4 * GIB)
        for rank in ranks
    ]


def test_a_line_for_each_rank() -> None:
    places = [Place(0, 0, "alpha", 0, "CPU", 2, 3 * GIB), Place(1, 1, "b", 0, "GPU 4", 16, None)]
    assert table(places).splitlines() == [
        "rank  node  host   local rank  device  cores  memory",
        "0     0     alpha  0           CPU     2      3.0 GiB",
        "1     1     b      0           GPU 4   16     ?",
    ]
    assert len(table(grid(2, 8)).splitlines()) == 17


def test_a_line_for_each_host_above_16_ranks() -> None:
    lines = table(grid(3, 8)).splitlines()
    assert lines[1].split("  ")[0] == "0-7"
    assert lines[3].replace(" ", "") == "16-232h20-7GPU0,GPU1,GPU2,GPU3,GPU4,GPU5,GPU6,GPU784.0GiB"
    assert len(lines) == 4
    assert table(grid(3, 8, cyclic=True)).splitlines()[2].startswith("1, 4, 7, 10, ... 22  1     h1    0-7")


def test_many_hosts_are_folded_too() -> None:
    lines = table(grid(100, 1)).splitlines()
    assert len(lines) == 18
    assert "84 more hosts" in lines[9]
    assert lines[-1].startswith("99    99    h99")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal:        2048 kB\nMemFree: 1 kB\n"}, 2 << 20),
        ({"proc/meminfo": "MemTotal: 2048 kB\n", "sys/fs/cgroup/memory.max": "max\n"}, 2 << 20),
        ({"proc/meminfo": "MemTotal: 2048 kB\n", "sys/fs/cgroup/memory.max": "1048576\n"}, 1 << 20),
        ({"proc/meminfo": "MemTotal: 2 kB\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9999999"}, 2 << 10),
    ],
)
def test_memory(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_bytes(tmp_path) == expected
