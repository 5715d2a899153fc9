"""Each rank's portion of what a script gives to Keras: together all of it, in the steps of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.data.portions import Portion, PyDatasetPortion, is_arrays, length, of_batches, suited, take
from mpitrain.errors import DataError

SIZES = [1, 2, 3, 4, 7]


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_steps_of_all_ranks_are_those_of_one(count: int, batch_size: int, size: int, is_global: bool) -> None:
    if is_global and batch_size < size:
        batch_size += size
    shares = [Portion(rank, size, is_global) for rank in range(size)]
    rows = [portion.rows(count, batch_size) for portion in shares]
    sizes = [portion.batch_size(batch_size) for portion in shares]
    whole = batch_size if is_global else batch_size * size
    assert sum(sizes) == whole
    for step, start in enumerate(range(0, count, whole)):
        own = [rows[rank][step * sizes[rank] : (step + 1) * sizes[rank]] for rank in range(size)]
        assert sorted(np.concatenate(own)) == list(range(start, min(start + whole, count)))


def test_a_global_batch_smaller_than_the_job_is_refused() -> None:
    with pytest.raises(DataError, match="global batch of 2 cannot be divided among 3 ranks"):
        Portion(0, 3, True).batch_size(2)


class Table:
    """Stands for a pandas table as far as it is used."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape

    @property
    def iloc(self) -> Any:
        return self.values


def test_rows_are_taken_of_arrays_tensors_and_tables() -> None:
    x = np.arange(10)
    rows = np.array([1, 4])
    nest = {"a": x, "b": (tf.constant(x), None, Table(x))}
    own = take(nest, rows)
    assert own["a"].tolist() == [1, 4]
    assert own["b"][0].numpy().tolist() == [1, 4]
    assert own["b"][1] is None
    assert own["b"][2].tolist() == [1, 4]
    assert take(tf.constant(x), slice(8, None)).numpy().tolist() == [8, 9]
    assert length(nest) == 10


def test_arrays_are_told_from_batches() -> None:
    assert is_arrays({"a": np.zeros(3), "b": tf.zeros((3, 1))})
    assert not is_arrays(tf.data.Dataset.range(3))
    assert not is_arrays(iter([np.zeros(3)]))
    assert not is_arrays(None)


def batches(count: int = 23, batch: int = 5) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (np.arange(i, min(i + batch, count)), np.arange(i, min(i + batch, count)) * 2) for i in range(0, count, batch)
    ]


class Whole(keras.utils.PyDataset):
    """The batches above."""

    def __len__(self) -> int:
        return len(batches())

    def __getitem__(self, index: int) -> Any:
        return batches()[index]


def dataset() -> tf.data.Dataset:
    x = np.arange(23)
    return tf.data.Dataset.from_tensor_slices((x, x * 2)).batch(5)


def generator() -> Iterator[Any]:
    yield from batches()


KINDS: dict[str, Any] = {"dataset": dataset, "PyDataset": Whole, "generator": generator}


def seen(data: Any) -> list[list[int]]:
    """The first component of each batch."""
    if isinstance(data, PyDatasetPortion):
        found = [data[index] for index in range(data.num_batches or 0)]
    else:
        found = list(data)
    assert all((np.asarray(x) * 2 == np.asarray(y)).all() for x, y in found)
    return [np.asarray(x).tolist() for x, _ in found]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_dealt_out_one_by_one(kind: str, size: int) -> None:
    whole = [x.tolist() for x, _ in batches()]
    for rank in range(size):
        assert seen(of_batches(KINDS[kind](), Portion(rank, size))) == whole[rank::size]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_global_batches_are_divided_by_rows(kind: str, size: int) -> None:
    if kind == "PyDataset" and size == 4:  # the last batch has three rows
        with pytest.raises(DataError, match="batch 4 has fewer rows than the 4 ranks"):
            seen(of_batches(Whole(), Portion(3, 4, True)))
        return
    for rank in range(size):
        expected = [x[rank::size].tolist() for x, _ in batches()]
        assert seen(of_batches(KINDS[kind](), Portion(rank, size, True))) == [rows for rows in expected if rows]


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "generator"])
def test_fewer_batches_than_ranks_are_divided_by_rows(kind: str) -> None:
    five_batches = KINDS[kind]()
    assert suited(Portion(2, 6), five_batches, evaluating=False).batch_is_global
    assert suited(Portion(2, 5), five_batches, evaluating=True) == Portion(2, 5)


def test_data_of_unknown_length_is_evaluated_by_rows() -> None:
    unknown = tf.data.Dataset.range(9).batch(3).filter(lambda batch: True)
    assert suited(Portion(0, 2), unknown, evaluating=True).batch_is_global
    assert not suited(Portion(0, 2), unknown, evaluating=False).batch_is_global


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(DataError, match="int cannot be divided among ranks"):
        of_batches(3, Portion(0, 2))
