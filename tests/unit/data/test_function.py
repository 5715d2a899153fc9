"""Datasets that come from a function of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from mpitrain.data.load import load
from mpitrain.data.source import DataSource
from mpitrain.errors import DataError

MODULE = """
import numpy as np
import tensorflow as tf

X = np.arange(33, dtype=np.float32).reshape(11, 3)
Y = np.arange(11) % 2

def plain():
    return tf.data.Dataset.from_tensor_slices((X, Y))

def images():
    return tf.data.Dataset.from_tensor_slices((np.full((4, 5, 6), 255, np.uint8), [0, 1, 2, 0]))

def uncounted():
    return plain().filter(lambda x, y: x[0] < 15)

def batched():
    return plain().batch(4)

def evenly_batched():
    return plain().batch(4, drop_remainder=True)

def shuffled():
    return plain().repeat(3).shuffle(33)  # the same labels twice in 1 of 10**9 cases

def endless():
    return plain().repeat()

def empty():
    return plain().take(0)

def array():
    return X

def lone():
    return tf.data.Dataset.from_tensor_slices(X)

def words():
    return tf.data.Dataset.from_tensor_slices((["a", "b"], [0, 1]))

def negative():
    return plain().map(lambda x, y: (x, y - 1))

def nan():
    return plain().map(lambda x, y: (tf.where(x == 6, np.nan, x), y))

def breaks_late():
    return plain().map(lambda x, y: (tf.ensure_shape(tf.reshape(x, [tf.cast(y + 1, tf.int32), -1]), [1, 3]), y))

def breaks():
    raise KeyError("no such key")

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "data_of_" + "".join(c if c.isalnum() else "_" for c in tmp_path.name)
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    return name


def read(spec: str, rank: int = 0, size: int = 1, **options: Any) -> DataSource:
    return load(spec, rank=rank, size=size, **{"validation_split": 0.0, "seed": 0, **options})


@pytest.mark.parametrize("size", [1, 3, 7])
def test_every_sample_once_an_epoch(module: str, size: int) -> None:
    sources = [read(f"{module}:plain", rank, size, validation_split=0.25) for rank in range(size)]
    held: set[int] = set()
    for part in ("validation", "train", "train"):
        found = [int(x[0]) for source in sources for x, _ in getattr(source, part).as_numpy_iterator()]
        assert len(found) == len(set(found)) == sum(len(getattr(source, part)) for source in sources)
        held = held or set(found)
        assert set(found) == (held if part == "validation" else set(range(0, 33, 3)) - held)


def test_each_epoch_has_its_order(module: str) -> None:
    source = read(f"{module}:plain")
    first, second = ([int(x[0]) for x, _ in source.train.as_numpy_iterator()] for _ in range(2))
    assert first != second
    assert [int(x[0]) for x, _ in read(f"{module}:plain").train.as_numpy_iterator()] == first
    assert all(y == x[0] % 2 for x, y in source.train.as_numpy_iterator())


def test_elements_are_brought_to_our_types(module: str) -> None:
    source = read(f"{module}:images")
    assert (source.input_shape, source.num_classes, source.train_count) == ((5, 6, 1), 3, 4)
    x, y = next(source.train.as_numpy_iterator())
    assert (x.dtype, x.max(), y.dtype) == (tf.float32, 255.0, tf.int64)
    assert source.meaning.preprocessing.scale == 255


def test_datasets_of_unknown_length_are_counted(module: str) -> None:
    source = read(f"{module}:uncounted")
    assert len(source.train) == source.train_count == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("batched", "no .batch()"),
        ("evenly_batched", "no .batch()"),
        ("shuffled", "leave out .shuffle()"),
        ("endless", "leave out .repeat()"),
        ("empty", "no samples"),
        ("array", "returns a ndarray: return a tf.data.Dataset"),
        ("lone", "not pairs of tensors"),
        ("words", "must be numbers"),
        ("negative", "sample 0 is -1"),
        ("nan", "sample 2 has values that are not finite"),
        ("breaks_late", "cannot be read"),
        ("breaks", "KeyError: 'no such key'"),
        ("missing", "has no function 'missing'"),
        ("number", "has no function 'number'"),
    ],
)
def test_functions_refused(module: str, name: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read(f"{module}:{name}")
    sentence, *trace = str(caught.value).splitlines()
    assert message in sentence
    assert trace[:1] in ([], ["Traceback (most recent call last):"])  # where the function itself has raised


@pytest.mark.parametrize("spec", ["broken_module:plain", "no_such_module:plain"])
def test_modules_refused(module: str, spec: str) -> None:
    with pytest.raises(DataError, match="cannot be imported"):
        read(spec)


def test_fewer_samples_than_ranks_refused(module: str) -> None:
    with pytest.raises(DataError, match="11 training samples, too few for 12 ranks"):
        read(f"{module}:plain", size=12)
