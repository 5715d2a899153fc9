"""What a training run leaves behind: a plain Keras model and a summary. For rank 0 only; no TensorFlow."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError

MODEL_NAME = "model.keras"
SUMMARY_NAME = "summary.json"
DIRECTORY_MODE = 0o750  # weights and logs are data: nothing for everyone


def prepare_directory(directory: Path) -> None:
    """Local: make the directory, and find out now, not after the training, whether it can be written to.

    Raises:
        UsageError: it cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
        with tempfile.NamedTemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _unwritable(directory, error) from error


def save_model(model: Any, directory: Path) -> Path:
    """Local: save a Keras model; an older one of that name is replaced once the new one is complete.

    Raises:
        UsageError: the directory cannot be written to.
    """
    return _replace(directory / MODEL_NAME, model.save)


def save_summary(summary: Mapping[str, Any], directory: Path) -> Path:
    """Local: write numbers as JSON.

    Raises:
        UsageError: the directory cannot be written to.
    """
    return _replace(directory / SUMMARY_NAME, lambda path: Path(path).write_text(json.dumps(summary, indent=1) + "\n"))


def _replace(path: Path, write: Callable[[str], object]) -> Path:
    part = path.with_name(f".{os.getpid()}-{path.name}")  # Keras wants the suffix
    try:
        write(str(part))
        part.replace(path)
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    finally:
        part.unlink(missing_ok=True)
    return path


def _unwritable(directory: Path, error: OSError) -> UsageError:
    return UsageError(
        f"nothing can be saved in {directory} ({error.strerror or error}): give another directory with --output"
    )
