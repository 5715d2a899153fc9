"""`.npz` files and the bundled digits: what is read, and what is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.data import digits
from mpitrain.data.load import load
from mpitrain.data.source import DataSource, Preprocessing
from mpitrain.errors import DataError

X = np.arange(60, dtype=np.float32).reshape(20, 3)
Y = np.arange(20) % 4


def read(spec: Path | str, rank: int = 0, size: int = 1, **options: Any) -> DataSource:
    options = {"validation_split": 0.0, "seed": 0, **options}
    return load(str(spec), rank=rank, size=size, **options)


def refused(spec: Path | str, **options: Any) -> str:
    """The sentence that a bad input gets."""
    with pytest.raises(DataError) as caught:
        read(spec, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert ": " in message or "," in message
    return message


def elements(dataset: tf.data.Dataset) -> list[tuple[Any, Any]]:
    return list(dataset.as_numpy_iterator())


def saved(path: Path, **arrays: Any) -> Path:
    file = path / "data.npz"
    np.savez(file, **arrays)
    return file


@pytest.mark.parametrize("size", [1, 3, 7])
def test_every_sample_once_an_epoch_on_any_number_of_ranks(tmp_path: Path, size: int) -> None:
    file = saved(tmp_path, x=X, y=Y)
    sources = [read(file, rank, size, validation_split=0.25, seed=2) for rank in range(size)]
    held: set[float] = set()
    for part in ("validation", "train", "train"):
        found = [x[0] for source in sources for x, _ in elements(getattr(source, part))]
        assert len(found) == len(set(found)) == (5 if part == "validation" else 15)
        if part == "validation":
            held = set(found)
        else:
            assert set(found) == set(X[:, 0]) - held
    assert {(source.train_count, source.validation_count) for source in sources} == {(15, 5)}


def test_what_is_left_of_an_epoch_is_dealt_out_to_other_ranks(tmp_path: Path) -> None:
    file = saved(tmp_path, x=X, y=Y)
    first = [read(file, rank, 4, validation_split=0.25, seed=2) for rank in range(4)]
    done = [x[0] for source in first for x, _ in elements(source.train.take(1))]  # of epoch 0, by four ranks
    assert all(source.deal is not None for source in first)
    again = [source.deal(rank, 3) for rank, source in enumerate(first[:3]) if source.deal is not None]
    rest = [x[0] for source in again if source.rest is not None for x, _ in elements(source.rest(0, 4))]
    whole = [x[0] for x, _ in elements(read(file, 0, 1, validation_split=0.25, seed=2).train)]
    assert sorted(done + rest) == sorted(whole)
    assert len(again[0].train) == 5
    held = [x[0] for source in again for x, _ in elements(source.validation)]
    assert set(held) == set(X[:, 0]) - set(whole)


def test_samples_keep_their_labels(tmp_path: Path) -> None:
    source = read(saved(tmp_path, x=X, y=Y))
    assert all(y == Y[int(x[0]) // 3] for x, y in elements(source.train))
    x, y = source.train.element_spec
    assert (x.dtype, y.dtype, source.input_shape, source.label_shape) == (tf.float32, tf.int64, (3,), ())
    assert (source.num_classes, source.test, source.validation) == (4, None, None)


def test_bytes_stay_what_they_are_and_become_images(tmp_path: Path) -> None:
    images = np.full((4, 5, 6), 255, np.uint8)
    source = read(saved(tmp_path, x_train=images, y_train=[0, 1, 0, 1], x_test=images, y_test=[1, 1, 1, 1]))
    x, _ = elements(source.train)[0]
    assert x.shape == (5, 6, 1)
    assert x.dtype == np.float32
    assert x.max() == 255.0
    assert source.meaning.preprocessing == Preprocessing(255.0)
    assert source.test is not None
    assert source.test_count == len(elements(source.test)) == 4


def test_other_names_do_where_the_label_is_plain(tmp_path: Path) -> None:
    assert read(saved(tmp_path, answers=Y, images=X)).num_classes == 4
    assert read(saved(tmp_path, a=np.ones(20, np.float32), b=Y)).num_classes == 4


@pytest.mark.parametrize(
    ("labels", "classes", "shape"),
    [
        (np.eye(4)[Y], 4, ()),
        (Y[:, None], 4, ()),
        (Y.astype(float), 4, ()),
        (np.array(["cat", "dog"])[Y % 2], 2, ()),
        (np.array(["\u00e9t\u00e9".encode(), b"dog"])[Y % 2], 2, ()),
        (np.eye(5)[Y], 5, ()),
        (Y / 3, None, ()),
        (np.stack([Y / 3, Y / 5], 1), None, (2,)),
    ],
)
def test_kinds_of_labels(tmp_path: Path, labels: Any, classes: int | None, shape: tuple[int, ...]) -> None:
    source = read(saved(tmp_path, x=X, y=labels))
    assert (source.num_classes, source.label_shape) == (classes, shape)
    assert source.train.element_spec[1].dtype == (tf.float32 if classes is None else tf.int64)


def test_the_user_says_what_the_labels_are(tmp_path: Path) -> None:
    file = saved(tmp_path, x=X, y=Y)
    assert read(file, task="regression").num_classes is None
    assert read(file, num_classes=9).num_classes == 9


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"x": X, "y": Y - 1}, {}, "sample 0 is -1"),
        ({"x": X, "y": Y + 90}, {}, "labels go up to 93"),
        ({"x": X, "y": Y}, {"num_classes": 3}, "sample 3 is 3, but there are 3 classes"),
        ({"x": X, "y": Y / 2}, {"task": "classification"}, "sample 1 is 0.5"),
        ({"x": X, "y": Y / 2}, {"num_classes": 4}, "sample 1 is 0.5"),
        ({"x": X, "y": np.where(Y == 2, np.nan, Y)}, {}, "label of sample 2 is not a finite number"),
        ({"x": np.where(X == 9, np.nan, X), "y": Y}, {}, "sample 3 has values that are not finite"),
        ({"x": X, "y": Y[:-1]}, {}, "20 samples, but y has 19 labels"),
        ({"x": X, "y": 3}, {}, "y has 0 labels"),
        ({"x": np.array(["a"] * 20), "y": Y}, {}, "not numbers"),
        ({"x": X, "y": np.array(["cat"] * 20)}, {}, "all labels are 'cat'"),
        ({"x": X, "y": np.arange(20).astype(str)}, {}, "20 different texts in 20 labels are no classes"),
        ({"x": X, "y": np.array(["cat", "dog"])[Y % 2]}, {"task": "regression"}, "leave out --task regression"),
        ({"x": X, "y": np.array(["cat", "dog"])[Y % 2]}, {"num_classes": 3}, "but --classes is 3"),
        ({"x": X, "y": np.zeros(20, int)}, {}, "all labels are 0"),
        ({"x": X, "y": Y * 5}, {}, "labels go up to 15, but there are only 4 classes in 20 samples"),
        ({"x": np.zeros((20, 3, 8, 8)), "y": Y}, {}, "images with the channels first"),
        ({"x": X.astype(complex), "y": Y}, {}, "not numbers"),
        ({"x": X * 1e38, "y": Y}, {}, "beyond float32"),
        ({"x": X, "y": Y, "x_val": X}, {}, "x_val without the labels that belong to it"),
        ({"x": X, "y": Y, "y_test": Y}, {}, "y_test without the samples that belong to it"),
        ({"x": X, "y": Y, "x_train": X}, {}, "x and x_train, of which either may be meant"),
        ({"x": X, "y": Y, "target": Y}, {}, "y and target, of which either may be meant"),
        ({"x": X, "y": np.zeros((20, 2, 2))}, {}, "shape"),
        ({"x": X[:0], "y": Y[:0]}, {}, "no samples"),
        ({"x": X[:2], "y": Y[:2]}, {"size": 3}, "2 training samples, too few for 3 ranks"),
        ({"x": X, "y": Y}, {"size": 12, "validation_split": 0.5}, "10 training samples, too few"),
        ({"x": X, "y": Y}, {"validation_split": 1.5}, "validation split is 1.5"),
        ({"images": X}, {}, "name its arrays x and y"),
        ({"a": X, "b": X}, {}, "name its arrays x and y"),
        (
            {"x": np.array([[1], [1, 2]], dtype=object), "y": [0, 1]},
            {},
            "x holds Python objects, which are never",
        ),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :2], "y_test": Y}, {}, "make them equal"),
        ({"x_train": X, "y_train": Y, "x_test": X, "y_test": Y + 1}, {}, "but there are 4 classes"),
    ],
)
def test_npz_refused(tmp_path: Path, arrays: dict[str, Any], options: dict[str, Any], message: str) -> None:
    assert message in refused(saved(tmp_path, **arrays), **options)


@pytest.mark.parametrize(
    ("names", "counts", "unused"),
    [
        (("X", "Y"), (20, 0, 0), ""),
        (("images", "labels"), (20, 0, 0), ""),
        (("features", "target", "feature_names"), (20, 0, 0), "; not used: feature_names"),
        (("X_train", "y_train", "X_test", "y_test"), (20, 0, 10), ""),
        (("train_images", "train_labels", "test_images", "test_labels"), (20, 0, 10), ""),
        (("x_train", "y_train", "x_val", "y_val", "x_test", "y_test"), (20, 10, 5), ""),
        (("x", "y", "x_valid", "y_valid"), (20, 10, 0), ""),
    ],
)
def test_every_array_acts_or_is_named(tmp_path: Path, names: Any, counts: Any, unused: str) -> None:
    arrays = {}
    for place, name in enumerate(names):
        arrays[name] = (X, Y)[place % 2][: 20 >> place // 2]
    source = read(saved(tmp_path, **arrays), validation_split=0.0)
    assert (source.train_count, source.validation_count, source.test_count) == counts
    assert source.meaning.inputs == f"{names[0]}, 3 float32, from 0 to 59{unused}"
    if source.validation is not None:
        assert [x[0] for x, _ in elements(source.validation)] == X[:10, 0].tolist()


@pytest.mark.parametrize(
    ("x", "scale"),
    [
        (np.arange(256, dtype=np.uint8).reshape(16, 4, 4), 255),
        (np.arange(256, dtype=np.uint8).reshape(64, 4), 255),
        (np.arange(160, dtype=np.uint8).reshape(10, 16) % 2, 1),
        (np.arange(1024, dtype=np.uint16).reshape(16, 8, 8), 1023),
        (np.arange(65536, dtype=">u2").reshape(64, 32, 32), 65535),
        (np.arange(256).reshape(16, 4, 4), 255),
        (np.arange(256).reshape(64, 4), 1),
        (np.arange(256).reshape(16, 4, 4) - 1, 1),
        (np.arange(256.0).reshape(16, 4, 4), 1),
    ],
)
def test_grey_values_are_scaled_in_the_model_and_not_before(tmp_path: Path, x: Any, scale: float) -> None:
    source = read(saved(tmp_path, x=x, y=np.arange(len(x)) % 2))
    assert source.meaning.preprocessing.scale == scale
    assert f"from {x.min():g} to {x.max():g}" in source.meaning.inputs
    found = sorted((x.ravel()[0], x.ravel()[-1]) for x, _ in elements(source.train))
    assert found == sorted((float(a.ravel()[0]), float(a.ravel()[-1])) for a in x)


def test_texts_are_numbered_alike_in_all_parts(tmp_path: Path) -> None:
    texts = np.array(["dog", "cat", "eel"])
    arrays = {"x": X, "y": texts[Y % 3], "x_test": X[:2], "y_test": texts[[0, 0]]}
    source = read(saved(tmp_path, **arrays))
    assert source.as_info()["class_names"] == ["cat", "dog", "eel"]
    assert [y for _, y in elements(source.test)] == [1, 1]
    arrays["y_test"] = np.array(["dog", "cow"])
    assert "sample 1 is 'cow', a class that the training samples lack" in refused(saved(tmp_path, **arrays))


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:200], lambda data: b"x" * 50])
def test_damaged_npz_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = saved(tmp_path, x=X, y=Y)
    file.write_bytes(damage(file.read_bytes()))
    assert "save it again" in refused(file)


def test_npz_with_a_damaged_member_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, x=X, y=Y)
    data = bytearray(file.read_bytes())
    data[200] ^= 0xFF
    file.write_bytes(data)
    assert "save it again" in refused(file)


def test_npy_under_another_name_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    assert "single array" in refused((tmp_path / "a.npy").rename(tmp_path / "a.npz"))


@pytest.mark.parametrize("spec", ["https://example.org/a.csv", "s3://bucket/train", "GS://a/b"])
def test_addresses_refused(spec: str) -> None:
    assert "are not on this host: download them" in refused(spec)


@pytest.mark.parametrize("spec", ["nowhere.npz", "nowhere/*.tfrecord", "nothing"])
def test_missing_data_refused(tmp_path: Path, spec: str) -> None:
    assert "do not exist" in refused(tmp_path / spec)


def test_unknown_kind_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("words")
    assert "no kind that can be read" in refused(tmp_path / "notes.txt")


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    values, classes = load_digits(return_X_y=True)
    expected = np.column_stack([values, classes])
    np.testing.assert_array_equal(digits.read(), expected)
    monkeypatch.setattr(digits, "FILE", "elsewhere.csv.gz")
    np.testing.assert_array_equal(digits.read(), expected)


def test_digits_hold_out_the_same_fifth_for_every_seed() -> None:
    one, two = (read("digits", seed=seed, validation_split=0.1) for seed in (1, 2))
    assert (one.train_count, one.validation_count, one.test_count) == (1293, 144, 360)
    assert (one.num_classes, one.input_shape) == (10, (8, 8, 1))
    assert one.test is not None
    assert two.test is not None
    tests = [elements(source.test) for source in (one, two) if source.test is not None]
    assert all(np.array_equal(a, b) and k == m for (a, k), (b, m) in zip(*tests, strict=True))
    assert np.bincount([y for _, y in tests[0]]).min() >= 34
    x, _ = elements(one.train)[0]
    assert x.dtype == np.float32
    assert (x.min(), x.max()) == (0, 16)
    assert one.meaning.preprocessing.scale == 16
