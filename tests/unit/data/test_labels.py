"""Whether labels are classes or quantities, and whether they are sound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.data.labels import as_labels, class_numbers
from mpitrain.errors import DataError


@pytest.mark.parametrize(
    ("values", "task", "classes", "expected", "count"),
    [
        ([0, 2, 1], "auto", None, [0, 2, 1], 3),
        ([0.0, 2.0, 1.0], "auto", None, [0, 2, 1], 3),
        ([[0], [1], [1]], "auto", None, [0, 1, 1], 2),
        ([[0, 1], [1, 0], [0, 1]], "auto", None, [1, 0, 1], 2),
        ([0, 1], "classification", 5, [0, 1], 5),
        ([0.5, 2.0], "auto", None, [0.5, 2.0], None),
        ([0, 2, 1], "regression", None, [0.0, 2.0, 1.0], None),
        ([[0.5, 1.0], [1.0, 3.0]], "auto", None, [[0.5, 1.0], [1.0, 3.0]], None),
        ([True, False], "auto", None, [1, 0], 2),
        (["b", "a", "b"], "auto", None, [1, 0, 1], 2),
        ([b"b", b"a", b"b"], "auto", None, [1, 0, 1], 2),
    ],
)
def test_what_labels_are(values: Any, task: Any, classes: int | None, expected: Any, count: int | None) -> None:
    found = as_labels(np.array(values), "it", task, classes)
    assert found.values.tolist() == expected
    assert found.num_classes == count
    assert found.values.dtype == (np.float32 if count is None else np.int64)
    assert found.class_names == (("a", "b") if isinstance(values[0], str | bytes) else None)


def test_names_of_the_training_samples_count() -> None:
    found = as_labels(np.array(["c", "a"]), "it", "auto", None, names=("a", "b", "c"))
    assert (found.values.tolist(), found.num_classes, found.class_names) == ([2, 0], 3, ("a", "b", "c"))


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        ([0, -1], {}, "the label of sample 1 is -1"),
        ([0, 1], {"num_classes": 1}, "sample 1 is 1"),
        ([0.0, np.nan], {}, "sample 1"),
        ([0.5, 1.0], {"task": "classification"}, "sample 0 is 0.5"),
        (["a", "b"], {"task": "regression"}, "labels are texts such as 'a', no quantities"),
        (["a", "a"], {}, "all labels are 'a'"),
        (["a", "b", "c"], {}, "3 different texts in 3 labels are no classes"),
        (["a", "d"], {"names": ("a", "b")}, "the label of row 1 is 'd', a class that the training samples lack"),
        ([0, 1], {"names": ("a", "b")}, "labels are numbers, but those of the training samples are texts"),
        (["a", "b", "a"], {"num_classes": 3}, "the labels are of 2 classes, but --classes is 3"),
    ],
)
def test_what_labels_cannot_be(values: Any, options: dict[str, Any], words: str) -> None:
    place = "row {}" if "names" in options else "sample {}"
    given = {"task": "auto", "num_classes": None, **options}
    with pytest.raises(DataError, match=f"it: .*{words}"):
        as_labels(np.array(values), "it", given.pop("task"), given.pop("num_classes"), place=place.format, **given)


def test_class_numbers_are_whole() -> None:
    assert class_numbers(np.array([1.0, 0.0]), "it").dtype == np.int64
    with pytest.raises(DataError, match="sample 0"):
        class_numbers(np.array([0.1, 0.0]), "it")
