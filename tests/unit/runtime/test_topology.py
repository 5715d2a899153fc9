"""Places of ranks, from the keys of their nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.runtime.topology import Topology, machine, topology


@pytest.mark.parametrize(
    ("keys", "local_ranks", "local_sizes", "nodes"),
    [
        ("a", [0], [1], (0,)),
        ("aabb", [0, 1, 0, 1], [2, 2, 2, 2], (0, 0, 1, 1)),
        ("abab", [0, 0, 1, 1], [2, 2, 2, 2], (0, 1, 0, 1)),
        ("baab", [0, 0, 1, 1], [2, 2, 2, 2], (0, 1, 1, 0)),
        ("aaab", [0, 1, 2, 0], [3, 3, 3, 1], (0, 0, 0, 1)),
        ("cba", [0, 0, 0], [1, 1, 1], (0, 1, 2)),
    ],
)
def test_places(keys: str, local_ranks: list[int], local_sizes: list[int], nodes: tuple[int, ...]) -> None:
    hosts = [f"host-{key}" for key in keys]
    places = [topology(rank, list(keys), hosts) for rank in range(len(keys))]
    assert [place.local_rank for place in places] == local_ranks
    assert [place.local_size for place in places] == local_sizes
    assert [place.node_rank for place in places] == list(nodes)
    assert {place.nodes for place in places} == {nodes}
    assert {place.node_count for place in places} == {len(set(keys))}
    assert [place.host for place in places] == hosts
    assert [place.is_root for place in places] == [True] + [False] * (len(keys) - 1)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_node_and_local_rank_name_each_rank_once(keys: list[int]) -> None:
    places = [topology(rank, keys, ["h"] * len(keys)) for rank in range(len(keys))]
    assert len({(place.node_rank, place.local_rank) for place in places}) == len(keys)
    assert all(place.local_rank < place.local_size for place in places)


def test_nodes_of_one_name_are_told_apart() -> None:
    place = topology(1, [10, 20], ["localhost", "localhost"])
    assert (place.local_rank, place.local_size, place.node_rank) == (0, 1, 1)


def test_single() -> None:
    assert Topology.single("here") == Topology(0, 1, 0, 1, 0, ("here",), (0,))


@pytest.mark.parametrize(("rank", "keys", "hosts"), [(0, [1], []), (1, [1], ["a"]), (-1, [1], ["a"]), (0, [], [])])
def test_bad_lists(rank: int, keys: list[int], hosts: list[str]) -> None:
    with pytest.raises(ValueError, match="expected one of each per rank"):
        topology(rank, keys, hosts)


def test_the_machine_of_this_process(tmp_path: Path) -> None:
    one = machine("a", ["10.0.0.1"])
    assert one == machine("a", ["10.0.0.1"])
    assert len({one, machine("b", ["10.0.0.1"]), machine("a", ["10.0.0.2"]), machine("a", [])}) == 4
    assert machine("a", ["10.0.0.1"], tmp_path) is None
