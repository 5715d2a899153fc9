"""What ranks have in common of a model, and what they must have in common."""

from __future__ import annotations

import keras
import pytest

from mpitrain.errors import AgreedError
from mpitrain.training.model_state import verify_vocabularies
from mpitrain.world.world import World
from tests.unit.job import run

WORDS = ["a", "b", "c"]


@pytest.mark.parametrize("unlike", [[], [1], [1, 2]])
def test_vocabularies_are_compared(unlike: list[int]) -> None:
    def body(world: World) -> str:
        words = WORDS[::-1] if world.rank in unlike else WORDS
        layer = keras.layers.StringLookup(vocabulary=words, name="words")
        try:
            verify_vocabularies(keras.Sequential([keras.Input((1,), dtype="string"), layer]), world)
        except AgreedError as error:
            return str(error)
        return ""

    names = {(): "", (1,): "rank 1 (host)", (1, 2): "ranks 1, 2 (host)"}[tuple(unlike)]
    found = set(run(3, body))
    assert len(found) == 1
    assert found.pop().startswith(f"fit: the vocabulary of words is not the same on {names}" if unlike else "")
