"""The numbers in saved models."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import h5py


def weights(path: Path) -> dict[str, bytes]:
    """All numbers in a file of Keras: weights, optimizer, random states."""
    found: dict[str, bytes] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item[()].tobytes()

    with zipfile.ZipFile(path) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
        file.visititems(visit)
    return found
