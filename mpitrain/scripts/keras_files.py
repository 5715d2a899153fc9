"""Files of a script that knows nothing of ranks: rank 0 writes them through Keras, all ranks read them.

Where ranks name a file differently, the first rank of each name writes it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from mpitrain.runtime import keras_private
from mpitrain.runtime.imports import after_import
from mpitrain.scripts.delegation import delegate, is_delegate
from mpitrain.scripts.file_names import Names, paths_in
from mpitrain.scripts.shared_files import SharedFiles
from mpitrain.training.model_state import average_batch_statistics
from mpitrain.world.world import World

Note = Callable[[str, str], None]
# Functions, and where in Keras scripts find them.
SAVING = {"save_model": ("models", "saving"), "save_weights": ("saving",)}
LOADING = {"load_model": ("models", "saving"), "load_weights": ("saving",)}
DRAWING = {"plot_model": ("utils",), "save_img": ("utils", "preprocessing.image")}
# Methods that write; the callbacks' other methods run on all ranks.
WRITING_CALLBACKS: dict[str, tuple[str, ...]] = {
    "CSVLogger": ("on_train_begin", "on_epoch_end", "on_train_end"),
    "BackupAndRestore": (keras_private.SAVE_OF_BACKUP, "on_train_end"),
    "OrbaxCheckpoint": (keras_private.SAVE_OF_ORBAX,),
    "RemoteMonitor": ("on_epoch_end",),
    "TensorBoard": (
        *("set_model", "on_train_begin", "on_train_end", "on_test_begin", "on_test_end", "on_epoch_begin"),
        *("on_epoch_end", "on_train_batch_begin", "on_train_batch_end", "on_test_batch_begin", "on_test_batch_end"),
    ),
}


class Files:
    """Lets rank 0 write, and the others wait until the file is there.

    Args:
        note: told what is changed, as (part, text).
        training: whether a `fit` is under way. There ranks may stand at different batches, so nobody waits.
        shared: what is done to files without Keras.
    """

    def __init__(
        self, world: World, note: Note, training: Callable[[], bool], names: Names, shared: SharedFiles
    ) -> None:
        self._world, self._note, self._training = world, note, training
        self._names, self._shared = names, shared

    def install(self) -> None:
        """Local: patch what writes and reads."""
        for make, functions in ((self._writing_model, SAVING), (self._reading, LOADING), (self._writing, DRAWING)):
            for name, places in functions.items():
                for place in (f"{package}.{place}" for package in keras_private.PACKAGES for place in places):
                    self._replace(importlib.import_module(place), name, make)
        self._replace_downloads()
        for name in ("save", "save_weights", "export"):
            self._replace(keras.Model, name, self._writing_model)
        self._replace(keras.Model, "load_weights", self._reading)
        for owner, name in (
            (tf.train.Checkpoint, "save"),
            (tf.train.Checkpoint, "write"),
            (tf.train.CheckpointManager, "save"),
            (tf.saved_model, "save"),
            (keras.export.ExportArchive, "write_out"),
        ):
            self._replace(owner, name, self._writing)
        for owner, name in ((tf.train.Checkpoint, "restore"), (tf.train.Checkpoint, "read"), (tf.saved_model, "load")):
            self._replace(owner, name, self._reading)
        self._shared.install_of_tensorflow(tf.io.gfile)
        self._replace(keras_private.file_utils, "makedirs", _making)
        after_import("matplotlib.figure", lambda module: self._replace(module.Figure, "savefig", self._drawing))
        self._replace(tf.train.CheckpointManager, "restore_or_initialize", self._reading)
        if not self._world.is_root:
            for name, found in (("checkpoints", _checkpoints), ("latest_checkpoint", _latest_checkpoint)):
                setattr(tf.train.CheckpointManager, name, _unless_acting(name, found))
            self._replace(tf.train.CheckpointManager, "restore_or_initialize", _looking_first)
            tf.summary.create_file_writer = lambda *args, **kwargs: tf.summary.create_noop_writer()
            for callback, methods in WRITING_CALLBACKS.items():
                for method in methods if hasattr(keras.callbacks, callback) else ():
                    self._replace(getattr(keras.callbacks, callback), method, self._by_a_callback)

    def _replace(self, owner: Any, name: str, make: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make(name, original)))

    def _replace_downloads(self) -> None:
        """Local: modules of Keras that have imported the function get the other one, too."""
        original = keras_private.file_utils.get_file
        fetch = functools.wraps(original)(self._fetching("get_file", original))
        for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"]:
            if module.__dict__.get("get_file") is original:
                module.get_file = fetch  # type: ignore[attr-defined]

    def _fetching(self, name: str, fetch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._note("files", f"{name}: by one rank of each host, rank 0 first")
            if self._training():
                return fetch(*args, **kwargs)
            return delegate(self._world, name, lambda: fetch(*args, **kwargs), each_host=True)

        return call

    def _writing(self, name: str, write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._note("files", f"{name}: written by rank 0")
            paths = paths_in([*args, *kwargs.values()])
            if self._training():
                return write(*args, **kwargs) if self._names.written_here(paths) else None
            return delegate(self._world, name, lambda: _path(write(*args, **kwargs)), paths)

        return call

    def _writing_model(self, name: str, write: Callable[..., Any]) -> Callable[..., Any]:
        write_once = self._writing(name, write)

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._training():
                # Rank 0 alone writes, and its moving averages are of its own batches.
                average_batch_statistics(model, self._world)
            return write_once(model, *args, **kwargs)

        return call

    def _drawing(self, name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        draw_once = self._writing(name, draw)

        def call(figure: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            to_file = isinstance(target, str | os.PathLike)  # and not to memory, where every rank may read it
            return draw_once(figure, target, *args, **kwargs) if to_file else draw(figure, target, *args, **kwargs)

        return call

    def _by_a_callback(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(callback: Any, *args: Any, **kwargs: Any) -> Any:
            if self._names.written_here(paths_in(vars(callback).values())):
                return method(callback, *args, **kwargs)
            return None

        return call

    def _reading(self, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._training():
                # Rank 0 comes here when it has written: nobody reads a file that is not whole yet.
                self._world.agreement.call(f"to be read: {name}")
            return read(*args, **kwargs)

        return call


def _unless_acting(name: str, found: Callable[[Any], Any]) -> property:
    """Local: what is found on disk, but while this rank writes it."""
    of_manager = getattr(tf.train.CheckpointManager, name)
    return property(lambda manager: of_manager.__get__(manager) if is_delegate() else found(manager))


def _checkpoints(manager: Any) -> list[str]:
    """Local: what is there; the manager of this rank has written nothing, and so knows of nothing."""
    state = tf.train.get_checkpoint_state(manager.directory)
    return list(state.all_model_checkpoint_paths) if state else []


def _latest_checkpoint(manager: Any) -> str | None:
    paths = _checkpoints(manager)
    return paths[-1] if paths else None


def _looking_first(name: str, restore: Callable[..., Any]) -> Callable[..., Any]:
    def call(manager: Any, *args: Any, **kwargs: Any) -> Any:
        manager._latest_checkpoint = _latest_checkpoint(manager)
        return restore(manager, *args, **kwargs)

    return call


def _making(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """Local: Keras' callbacks make directories that they did not find; another rank may have been faster."""

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return make(path, *args, **kwargs)
        except FileExistsError:
            if not Path(path).is_dir():
                raise

    return call


def _path(result: Any) -> Any:
    """Local: what scripts use of a result; the rest need not be fit to travel."""
    return result if isinstance(result, str | bytes) else None
