"""Data that a program hands over: each rank gets its share, whatever they are, and all have parts of the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mpitrain
from mpitrain.data.source import DataSource
from mpitrain.errors import AgreedError
from mpitrain.world.world import World
from tests.unit import job

X, Y = np.arange(22.0, dtype=np.float32).reshape(11, 2), np.arange(11) % 3


def rows(source: DataSource) -> list[tuple[tuple[float, ...], int]]:
    return [(tuple(x.tolist()), int(y)) for x, y in source.train.as_numpy_iterator()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_arrays_are_what_a_file_of_them_is(tmp_path: Path, size: int) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y)

    def on_rank(data: Any) -> list[DataSource]:
        return job.run(size, lambda world: mpitrain.load_data(data, validation_split=0.2, seed=3, world=world))

    of_file, of_pair = on_rank(tmp_path / "a.npz"), on_rank((X, Y))
    expected = [rows(source) for source in of_file]  # of the first epoch
    assert [rows(source) for source in of_pair] == expected
    assert {(found.train_count, found.validation_count, found.num_classes) for found in of_pair} == {(9, 2, 3)}
    of_names = on_rank({"x_train": X, "y_train": Y, "x_test": X[:4], "y_test": Y[:4]})
    assert [rows(source) for source in of_names] == expected
    assert {found.test_count for found in of_names} == {4}
    of_dataset = on_rank(tf.data.Dataset.from_tensor_slices((X, Y)))
    everywhere = sorted(row for own in expected for row in own)
    assert sorted(row for source in of_dataset for row in rows(source)) == everywhere
    assert len(everywhere) == 9


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda rank: (X[: 11 - rank], Y[: 11 - rank]), "the number of samples in the data must be the same on all"),
        (lambda rank: (X, Y) if rank else (X, Y[:5]), "arrays: x has 11 samples, but y has 5 labels"),
        (lambda rank: [X, Y], "data are a list: give arrays"),
    ],
)
def test_what_all_ranks_refuse(data: Any, message: str) -> None:
    def on_rank(world: World) -> str:
        with pytest.raises(AgreedError, match=message) as raised:
            mpitrain.load_data(data(world.rank), world=world)
        return str(raised.value)

    assert len(set(job.run(2, on_rank))) == 1
