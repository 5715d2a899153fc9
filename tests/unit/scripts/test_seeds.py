"""What scripts draw at random is the same on all ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mpitrain.scripts.seeds import preserve_random_state, share_seed


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(np.random.bit_generator, "randbits", vars(np.random.bit_generator)["randbits"])
    with preserve_random_state():
        yield


def drawn() -> list[Any]:
    """Also by generators that are made without a seed, and by those that have one."""
    made = np.random.default_rng()
    legacy = np.random.random()  # noqa: NPY002
    return [random.random(), legacy, made.random(), np.random.default_rng().random(), np.random.SeedSequence().entropy]


def test_what_is_drawn_follows_from_the_seed() -> None:
    found = []
    for seed in (1, 1, 2):
        share_seed(seed)
        found.append(drawn())
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])
    assert found[0][2] != found[0][3], "two generators are not the same"


def test_a_seed_of_the_script_wins() -> None:
    share_seed(1)
    np.random.seed(5)  # noqa: NPY002
    own = np.random.random(), np.random.default_rng(5).random()  # noqa: NPY002
    share_seed(2)
    np.random.seed(5)  # noqa: NPY002
    assert own == (np.random.random(), np.random.default_rng(5).random())  # noqa: NPY002


def test_what_is_drawn_meanwhile_changes_nothing() -> None:
    share_seed(3)
    expected = [random.random(), np.random.random()]  # noqa: NPY002
    share_seed(3)
    with preserve_random_state():
        drawn()
    assert [random.random(), np.random.random()] == expected  # noqa: NPY002
