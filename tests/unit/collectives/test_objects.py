"""Collectives on objects, on ranks that are threads."""

from __future__ import annotations

import operator
from typing import Any

import pytest

from mpitrain.collectives import objects
from mpitrain.errors import MismatchError
from mpitrain.world.world import World
from tests.unit.job import run


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_objects(ranks: int) -> None:
    def rank(world: World) -> list[Any]:
        own, size = world.rank, world.size
        objects.barrier(world=world)
        return [
            objects.all_gather_obj({"rank": own}, world=world),
            objects.broadcast_obj(("from", own), size - 1, world=world),
            objects.all_reduce_obj([own], operator.add, world=world),
            objects.all_to_all_obj([(own, other) for other in range(size)], world=world),
            objects.reduce_scatter_obj([f"{other}" for other in range(size)], operator.add, world=world),
            objects.all_found(lambda: own * 10, "looking", world=world),
        ]

    for own, found in enumerate(run(ranks, rank)):
        assert found == [
            [{"rank": other} for other in range(ranks)],
            ("from", ranks - 1),
            list(range(ranks)),
            [(other, own) for other in range(ranks)],
            f"{own}" * ranks,
            [other * 10 for other in range(ranks)],
        ]


def test_what_one_rank_raises_all_raise() -> None:
    def rank(world: World) -> str:
        def find() -> None:
            if world.rank == 1:
                raise KeyError("lost")

        with pytest.raises((KeyError, ValueError)) as caught:
            objects.all_found(find, "looking", world=world)
        assert isinstance(caught.value, KeyError) == (world.rank == 1)
        return str(caught.value)

    assert run(3, rank) == ["on rank 1 (host): 'lost'", "'lost'", "on rank 1 (host): 'lost'"]


def test_what_does_not_fit_is_told_on_all_ranks() -> None:
    def rank(world: World) -> tuple[str, str]:
        with pytest.raises(ValueError, match="all_to_all_obj needs 3 objects") as number:
            objects.all_to_all_obj([0] * (2 if world.rank else 3), world=world)
        with pytest.raises(MismatchError) as kind:
            (objects.all_gather_obj if world.rank else objects.broadcast_obj)(0, world=world)
        with pytest.raises(ValueError, match="root must be a rank from 0 to 2, not -1"):
            objects.broadcast_obj(0, -1, world=world)
        return str(number.value), str(kind.value)

    found = run(3, rank)
    assert found == found[:1] * 3
    assert found[0][0].endswith("ranks [1, 2] gave another number")
    assert "rank 0 (host): broadcast_obj from rank 0" in found[0][1]
    assert "ranks 1, 2 (host): all_gather_obj" in found[0][1] or "rank 1 (host): all_gather_obj" in found[0][1]
