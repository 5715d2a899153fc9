"""The bundled data: 1797 scans of handwritten digits, 8 x 8 grey values, which come with scikit-learn.

UCI Machine Learning Repository, "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998).
"""

from __future__ import annotations

import numpy as np

from mpitrain.data.arrays import array_samples
from mpitrain.data.source import DataSource, Share, assemble
from mpitrain.errors import DataError

TEST_FRACTION = 0.2
SPLIT_SEED = 0


def load_digits(share: Share) -> DataSource:
    """Local: the digits, one fifth of each class held out as test samples: the same ones for every seed.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise DataError(
            f"the bundled digits come with scikit-learn, which cannot be imported ({error}): pip install "
            "scikit-learn, "
            "or give your own data"
        ) from error
    values, labels = datasets.load_digits(return_X_y=True)
    images = (values / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    classes = labels.astype(np.int64)
    train_x, test_x, train_y, test_y = model_selection.train_test_split(
        images, classes, test_size=TEST_FRACTION, stratify=classes, random_state=SPLIT_SEED
    )
    return assemble(
        array_samples(train_x, train_y),
        share,
        test=array_samples(test_x, test_y),
        num_classes=10,
        description="handwritten digits, 8x8 (scikit-learn)",
    )
