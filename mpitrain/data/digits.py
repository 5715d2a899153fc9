"""The bundled data: 1797 scans of handwritten digits, 8 x 8 grey values, which come with scikit-learn.

UCI Machine Learning Repository, "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from mpitrain.data.arrays import array_samples
from mpitrain.data.source import DataSource, Meaning, Preprocessing, Share, assemble
from mpitrain.errors import DataError

FILE = "datasets/data/digits.csv.gz"
EVERY = 5  # of so many samples of a class one is a test sample


def load_digits(share: Share) -> DataSource:
    """Local: the digits, one fifth of each class held out as test samples: the same ones for every seed.

    Raises:
        DataError: scikit-learn is not installed.
    """
    table = read()
    images = table[:, :-1].astype(np.float32).reshape(-1, 8, 8, 1)
    classes = table[:, -1].astype(np.int64)
    test = np.zeros(len(classes), bool)
    test[np.argsort(classes, kind="stable")[::EVERY]] = True
    return assemble(
        array_samples(images[~test], classes[~test]),
        share,
        test=array_samples(images[test], classes[test]),
        num_classes=10,
        description="handwritten digits, 8x8 (scikit-learn)",
        meaning=Meaning("8x8x1, grey values from 0 to 16", "the digit", preprocessing=Preprocessing(16.0)),
    )


def read() -> np.ndarray:
    """Local: a row a digit: 64 grey values from 0 to 16, and the class.

    Read from scikit-learn's own file: to import that package takes ranks 2 s of processor time each.

    Raises:
        DataError: scikit-learn is not installed.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError(
            "the bundled digits come with scikit-learn, which is not installed: pip install scikit-learn, "
            "or give your own data"
        )
    path = Path(spec.origin).parent / FILE
    if path.exists():
        return np.loadtxt(path, delimiter=",")
    from sklearn import datasets  # another release, which keeps them elsewhere

    values, classes = datasets.load_digits(return_X_y=True)
    return np.column_stack([values, classes])
