"""Each rank's share of a batch, and of all that Keras reads: together all of it, in the steps of one process."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.data.portions import Portion, Share, count_rows
from mpitrain.errors import AgreedError
from mpitrain.scripts import adapters
from mpitrain.scripts.adapters import DividedAdapter, Way, adapter_of, tell_of_parts

ROWS, BATCH = 21, 5  # the last batch has fewer rows than there are ranks
X = np.arange(ROWS * 2.0, dtype="float32").reshape(ROWS, 2)


def rows_of(leaf: Any) -> list[list[float]]:
    """The rows of an array, a tensor of any kind, or a table, as lists."""
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.to_dense(tf.sparse.reorder(leaf))
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.to_list()  # type: ignore[no-any-return]
    return np.asarray(leaf.toarray() if hasattr(leaf, "toarray") else leaf).tolist()  # type: ignore[no-any-return]


PARTS: dict[str, Callable[[np.ndarray], Any]] = {
    "array": lambda x: x,
    "tensor": tf.constant,
    "sparse tensor": tf.sparse.from_dense,
    "ragged tensor": tf.RaggedTensor.from_tensor,
    "sparse matrix": scipy.sparse.coo_matrix,
}


@pytest.mark.parametrize("kind", PARTS)
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_shares_are_the_whole_batch(kind: str, count: int, size: int, whole: bool) -> None:
    batch = {"x": PARTS[kind](X[1 : count + 1]), "scale": 2.0, "none": None}
    shares = [Portion(rank, size).share(batch, whole=whole) for rank in range(size)]
    assert [share.total for share in shares] == [count] * size
    assert all(share.data["scale"] == 2.0 and share.data["none"] is None for share in shares)
    rows = [rows_of(share.data["x"]) for share in shares]
    if count >= size and not whole:
        assert [share.counted for share in shares] == [()] * size
        assert [row for step in range(count) for own in rows for row in own[step : step + 1]] == X[
            1 : count + 1
        ].tolist()
    else:
        assert rows == [X[1 : count + 1].tolist()] * size
        assert [bool(share.counted) for share in shares] == [rank == 0 for rank in range(size)]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("rows", "others"), [(6, 3), (6, 1), (3, 6), (5, 0)])
def test_a_batch_whose_parts_have_other_numbers_of_rows_is_not_divided(rows: int, others: int, known: bool) -> None:
    batch = (X[:rows], np.arange(float(others)))
    shares = [Portion(rank, 2).share(batch) for rank in range(2)]
    if not known:
        data = tf.data.Dataset.from_generator(
            lambda: iter([batch] * 2), output_signature=(tf.TensorSpec([None, 2]), tf.TensorSpec([None]))
        )
        divided = [DividedAdapter(adapter_of(x=data), Portion(rank, 2, True), "rows") for rank in range(2)]
        shares = [next(iter(one.get_tf_dataset())) for one in divided]
    for rank, share in enumerate(shares):
        assert [rows_of(part) for part in share.data] == [rows_of(part) for part in batch]
        assert bool(share.counted) == (rank == 0)


def test_parts_with_other_numbers_of_rows_are_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    adapters._say_unlike.cache_clear()  # once in a process
    tell_of_parts((X[:7], X[:7], 1.0))
    assert not capfd.readouterr().err
    for others in (4, 5):
        tell_of_parts((X[:7], X[:others]))
    assert capfd.readouterr().err.count("the parts of a batch have different numbers of rows") == 1


def test_rows_are_counted() -> None:
    assert count_rows((2.0, tf.ones((3, 1)))) == 3
    assert count_rows((2.0, None)) == 0

    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec([None, 2])])
    def counts(unknown: Any, known: Any) -> Any:
        return count_rows(unknown), count_rows({"first": 1.0, "second": known})

    assert [int(count) for count in counts(tf.ones((4, 1)), tf.ones((5, 2)))] == [4, 5]


class Whole(keras.utils.PyDataset):
    """Batches of X."""

    def __len__(self) -> int:
        return math.ceil(ROWS / BATCH)

    def __getitem__(self, index: int) -> Any:
        return X[index * BATCH : (index + 1) * BATCH], X[index * BATCH : (index + 1) * BATCH] * 2


def generator() -> Iterator[Any]:
    for index in range(len(Whole())):
        yield Whole()[index]


def sparse() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X), X * 2)).batch(BATCH)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {"x": X, "y": X * 2, "batch_size": BATCH, "shuffle": True},
    "arrays in batches": lambda: {"x": X, "y": X * 2, "batch_size": BATCH, "shuffle": "batch"},
    "sparse tensors": lambda: {"x": tf.sparse.from_dense(X), "y": X * 2, "batch_size": BATCH},
    "sparse matrices": lambda: {"x": scipy.sparse.csr_matrix(X), "y": X * 2, "batch_size": BATCH, "shuffle": True},
    "ragged tensors": lambda: {"x": tf.RaggedTensor.from_tensor(X), "y": X * 2, "batch_size": BATCH},
    "dataset": lambda: {"x": tf.data.Dataset.from_tensor_slices((X, X * 2)).shuffle(9, seed=2).batch(BATCH)},
    "dataset of sparse tensors": lambda: {"x": sparse()},
    "PyDataset": lambda: {"x": Whole(), "shuffle": True},
    "PyDataset with workers": lambda: {"x": Whole(workers=2), "shuffle": True},
    "generator": lambda: {"x": generator()},
}


def read(adapter: Any, epochs: int) -> list[list[Any]]:
    """The batches of some epochs, as `fit` reads them."""
    dataset, found = adapter.get_tf_dataset(), []
    for _ in range(epochs):
        adapter.on_epoch_begin()
        found += [list(dataset)]
        adapter.on_epoch_end()
    return found


def seeded(make: Callable[[], Any], epochs: int) -> tuple[Any, Any]:
    keras.utils.set_random_seed(4)
    return read(make(), epochs), random.getstate()


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_one_process_in_its_order(kind: str) -> None:
    size = 3
    epochs = 1 if kind == "generator" else 2
    expected, state = seeded(lambda: adapter_of(**KINDS[kind]()), epochs)
    ways: tuple[Way, ...] = ("rows", "batches", "whole")
    for way, rank in itertools.product(ways, range(size)):
        make = functools.partial(DividedAdapter, portion=Portion(rank, size), way=way)
        found, after = seeded(lambda make=make: make(adapter_of(**KINDS[kind]())), epochs)  # type: ignore[misc]
        assert after == state, "Python's own random numbers are drawn alike"
        for own, all_of_them in zip(found, expected, strict=True):
            check(own, all_of_them, way, rank, size)


def check(own: list[Any], expected: list[Any], way: Way, rank: int, size: int) -> None:
    if way == "batches":
        expected = expected[rank::size]
    assert len(own) == len(expected)
    for found, (x, y) in zip(own, expected, strict=True):
        divides = way == "rows" and len(y) >= size
        rows = slice(rank, None, size) if divides else slice(None)
        if way != "batches":
            assert isinstance(found, Share)
            assert int(found.total) == len(y)
            assert (found.counted == () or bool(found.counted)) == (divides or rank == 0)
        data = found.data if isinstance(found, Share) else found
        assert rows_of(data[0]) == rows_of(x)[rows]
        assert rows_of(data[1]) == rows_of(y)[rows]


@pytest.mark.parametrize(("way", "counts"), [("rows", [5, 5]), ("whole", [5, 5]), ("batches", [3, 2])])
def test_the_number_of_batches_is_known(way: Way, counts: list[int]) -> None:
    for kind in ("arrays", "dataset", "PyDataset"):
        divided = [DividedAdapter(adapter_of(**KINDS[kind]()), Portion(rank, 2), way) for rank in range(2)]
        assert [one.num_batches for one in divided] == counts
    assert DividedAdapter(adapter_of(**KINDS["generator"]()), Portion(0, 2), way).num_batches is None


def test_an_element_of_one_part_stays_one() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(((X, X),)).batch(4)
    share = next(iter(DividedAdapter(adapter_of(x=dataset), Portion(0, 2), "rows").get_tf_dataset()))
    assert len(share.data) == 1
    assert len(share.data[0]) == 2


def test_what_keras_does_not_take_it_refuses_itself() -> None:
    with pytest.raises(ValueError, match="Unrecognized data type"):
        adapter_of(x=3)
    with pytest.raises(ValueError, match="cardinality"):
        adapter_of(x=X, y=X[1:])


def test_what_cannot_be_divided_is_refused() -> None:
    dataset = tf.data.Dataset.range(4).batch(2)
    distributed = tf.distribute.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(dataset)
    with pytest.raises(AgreedError, match="DistributedDataset cannot be divided among ranks: give arrays"):
        adapter_of(x=distributed)
