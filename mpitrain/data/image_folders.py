"""Samples that are image files in one folder a class. Files are read when a sample is wanted, not before."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorflow as tf

from mpitrain.data.image_decoding import FORMATS, JPEG, PNG, Form, Header, decode, form, header, undecodable
from mpitrain.data.labels import some
from mpitrain.data.sharding import Indices
from mpitrain.data.source import DataSource, Meaning, Preprocessing, Samples, Share, assemble
from mpitrain.errors import DataError
from mpitrain.runtime.counted import counted

SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp")
# What file managers leave behind, beside what begins with a dot.
LEFT_BEHIND = ("thumbs.db", "desktop.ini", "icon\r", "__macosx")
TRAINING_NAMES = ("train", "training")
VALIDATION_NAMES = ("validation", "val", "valid", "dev")
TEST_NAMES = ("test", "testing")
DECODED_BYTES = 64 << 20  # so much of its files each rank decodes once before training
READERS = 4


def load_images(directory: Path, share: Share, image_size: tuple[int, int] | None) -> DataSource:
    """Local: `directory/CLASS/*.png` (jpeg, gif, bmp); classes are numbered in alphabetical order.

    `directory/train/CLASS/...` does as well, beside `validation/` and `test/` with the same classes.
    Images are brought to `image_size` (height, width), or else to the size of the first one. They are grey if all
    are, and have 16 bits if all have. Their orientation is that of the stored rows; EXIF is not heeded.

    Raises:
        DataError: there are no class folders, no images in one, or files that are no images.
    """
    folders = _parts(directory)
    classes = [folder.name for folder in _folders(folders["train"])]
    _check_classes(folders["train"], classes)
    found = {part: _Pictures.in_folders(folder, classes) for part, folder in folders.items()}
    common = form([one for pictures in found.values() for one in pictures.headers], image_size)
    for pictures in found.values():
        pictures.check(common, share)
    samples = {part: pictures.samples(common) for part, pictures in found.items()}
    left_out = [name for pictures in found.values() for name in pictures.left_out]
    resized = "" if not common.resized else "; brought to that size" + ("" if image_size else ", which the first has")
    preprocessing = Preprocessing(2.0**common.bits - 1, common.shape[:2] if common.resized else None)
    return assemble(
        samples["train"],
        share,
        validation=samples.get("validation"),
        test=samples.get("test"),
        num_classes=len(classes),
        description=f"{directory}, {counted(len(classes), 'class')}, {'x'.join(map(str, common.shape))}",
        meaning=Meaning(
            f"{common}{resized}" + (f"; left out: {some(left_out)}" if left_out else ""),
            f"folders {some(classes)}",
            tuple(classes),
            preprocessing,
        ),
    )


def _parts(directory: Path) -> dict[str, Path]:
    """The folders of training, validation and test images; or the directory itself for training."""
    inner = _folders(directory)
    names = {"train": TRAINING_NAMES, "validation": VALIDATION_NAMES, "test": TEST_NAMES}
    parts: dict[str, Path] = {}
    for part, known in names.items():
        folders = [folder for folder in inner if folder.name.lower() in known]
        if len(folders) > 1:
            raise DataError(f"{folders[0]} and {folders[1]} may both hold {part} images: leave one of them")
        if folders:
            parts[part] = folders[0]
    others = [folder for folder in inner if folder not in parts.values()]
    if "train" in parts and _folders(parts["train"]):
        if others:
            raise DataError(f"{others[0]} lies beside {parts['train']}: move it into that, or elsewhere")
        return parts
    if parts and not others:
        lack = (
            f"none of the classes in {parts['train']}" if "train" in parts else "none for training, to be called train"
        )
        raise DataError(
            f"{directory} has folders for {' and '.join(parts)}, but {lack}: make them, {directory}/train/CLASS"
        )
    return {"train": directory}


def _check_classes(root: Path, classes: Sequence[str]) -> None:
    if not classes:
        raise DataError(
            f"{root} has no class folders: put the images of each class in a folder of its own, {root}/CLASS/*.png"
        )
    stray = next((path for path in _listed(root) if path.suffix.lower() in SUFFIXES and path.is_file()), None)
    if stray is not None and not _is_left_behind(stray.name):
        raise DataError(f"{stray} lies beside the class folders: move it into the folder of its class")
    if len(classes) == 1:
        only = root / classes[0]
        deeper = _folders(only)
        raise DataError(
            f"{root} has one class folder only, {classes[0]}"
            + (f": if its folders are the classes, give {only}" if deeper else ": give images of at least two classes")
        )


def _is_left_behind(name: str) -> bool:
    return name.startswith(".") or name.lower() in LEFT_BEHIND


def _folders(directory: Path) -> list[Path]:
    return [path for path in _listed(directory) if path.is_dir() and not _is_left_behind(path.name)]


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise DataError(
            f"{directory} cannot be listed ({error.strerror}): check that it is a directory you may read"
        ) from error


def _walk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """All files of a folder and the folders in it, and whether they are to be left out, in order."""
    for path in _listed(folder):
        if not path.is_dir() or path.is_symlink():  # which may lead round in a circle
            yield path, path.is_dir() or _is_left_behind(path.name)
        elif not _is_left_behind(path.name):
            yield from _walk(path)


class _Pictures:
    """The images of one part of the data."""

    def __init__(self) -> None:
        self.files: list[Path] = []  # their paths
        self.labels: list[int] = []  # class number of each
        self.headers: list[Header] = []  # what each begins with
        self.left_out: list[str] = []  # names of files that are no images of the user's
        self._bytes = 0

    @classmethod
    def in_folders(cls, root: Path, classes: list[str]) -> _Pictures:
        """Local: those in the folders of the classes.

        Raises:
            DataError: a folder is of no class or holds no images, or a file is no image.
        """
        unknown = [folder.name for folder in _folders(root) if folder.name not in classes]
        if unknown:
            raise DataError(
                f"{root / unknown[0]} is a class that the training images lack: add it there, or remove the folder"
            )
        found = cls()
        for label, name in enumerate(classes):
            before = len(found.files)
            for path, left_behind in _walk(root / name) if (root / name).is_dir() else ():
                if not left_behind:
                    found._add(path, label)
                elif not path.name.startswith("."):
                    found.left_out.append(f"{name}/{path.name}")
            if len(found.files) == before and (root / name).is_dir():
                raise DataError(f"{root / name} holds no images: add some, or remove the folder")
        return found

    def _add(self, path: Path, label: int) -> None:
        """Look at both ends of a file: cheap, and finds empty, mistaken and cut-off ones before training."""
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path} is no image this reads ({FORMATS}): convert it, or move it elsewhere")
        try:
            with path.open("rb") as file:
                one = header(file, str(path))
                self._bytes += file.seek(0, os.SEEK_END)
                file.seek(max(file.tell() - 4096, 0))
                end = file.read()
                file.seek(0)
                start = file.read(8)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
        if (start == PNG and b"IEND" not in end) or (start.startswith(JPEG) and b"\xff\xd9" not in end):
            raise DataError(f"{path} is cut off: copy it again, or remove it")
        self.files.append(path)
        self.labels.append(label)
        self.headers.append(one)

    def check(self, common: Form, share: Share) -> None:
        """Local: decode this rank's share of the files, unless these are too many to do it twice.

        Raises:
            DataError: one of them cannot be decoded.
        """
        if self._bytes <= DECODED_BYTES * max(share.size, 1):
            wrong = self.damaged(np.arange(share.rank, len(self.files), max(share.size, 1)), common)
            if wrong is not None:
                raise DataError(wrong)

    def damaged(self, positions: Indices, common: Form) -> str | None:
        """Local: the first of some images that cannot be decoded, and why."""

        def look(position: int) -> str | None:
            path = self.files[position]
            try:
                return undecodable(path.read_bytes(), str(path), common)
            except OSError as error:
                return f"{path} cannot be read ({error.strerror}): put it back, or train anew without it"

        with ThreadPoolExecutor(READERS) as pool:
            for first in range(0, len(positions), 1024):
                for wrong in pool.map(look, positions[first : first + 1024].tolist()):
                    if wrong is not None:
                        return wrong
        return None

    def samples(self, common: Form) -> Samples:
        """Local: images and class numbers, by position."""
        with tf.device("CPU:0"):
            names = tf.constant([str(file) for file in self.files])
            classes = tf.constant(np.asarray(self.labels, np.int64))

        def fetch(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return decode(tf.io.read_file(tf.gather(names, index)), common), tf.gather(classes, index)

        return Samples(
            len(self.files),
            # Else samples would come in the order in which they are read, another one at each run.
            lambda positions: positions.map(fetch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True),
            lambda positions: self.damaged(positions, common),
        )
