"""Files of a script that knows nothing of ranks: rank 0 writes them through Keras, all ranks read them."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf
from keras.src.utils import file_utils  # where Keras' own callbacks find it

from mpitrain.comm.world import World
from mpitrain.training.callbacks import average_batch_statistics

Note = Callable[[str, str], None]
# Functions, and where in Keras scripts find them; `tf.keras` has modules of its own.
PACKAGES = ("keras", "keras._tf_keras.keras")
SAVING = {"save_model": ("models", "saving"), "save_weights": ("saving",)}
LOADING = {"load_model": ("models", "saving"), "load_weights": ("saving",)}
DRAWING = {"plot_model": ("utils",), "save_img": ("utils", "preprocessing.image")}
# Methods that write; the callbacks' other methods run on all ranks.
WRITING_CALLBACKS: dict[str, tuple[str, ...]] = {
    "CSVLogger": ("on_train_begin", "on_epoch_end", "on_train_end"),
    "BackupAndRestore": ("_save_model", "on_train_end"),
    "OrbaxCheckpoint": ("_save_checkpoint",),
    "RemoteMonitor": ("on_epoch_end",),
    "TensorBoard": (
        *("set_model", "on_train_begin", "on_train_end", "on_test_begin", "on_test_end", "on_epoch_begin"),
        *("on_epoch_end", "on_train_batch_begin", "on_train_batch_end", "on_test_batch_begin", "on_test_batch_end"),
    ),
}


class Files:
    """Lets rank 0 write, and the others wait until the file is there.

    Args:
        world: the job, of two ranks or more.
        note: told what is changed, as (part, text).
        training: whether a `fit` is under way. There ranks may stand at different batches, so nobody waits.
    """

    def __init__(self, world: World, note: Note, training: Callable[[], bool]) -> None:
        self._world, self._note, self._training = world, note, training

    def install(self) -> None:
        """Local: patch what writes and reads."""
        for make, functions in ((self._writing_model, SAVING), (self._reading, LOADING), (self._writing, DRAWING)):
            for name, places in functions.items():
                for place in (f"{package}.{place}" for package in PACKAGES for place in places):
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
        for owner, name in ((tf.train.Checkpoint, "restore"), (tf.train.Checkpoint, "read")):
            self._replace(owner, name, self._reading)
        self._replace(file_utils, "makedirs", _making)
        after_import("matplotlib.figure", lambda module: self._replace(module.Figure, "savefig", self._drawing))
        self._replace(tf.train.CheckpointManager, "restore_or_initialize", self._reading)
        if not self._world.is_root:
            tf.train.CheckpointManager.checkpoints = property(_checkpoints)
            tf.train.CheckpointManager.latest_checkpoint = property(_latest_checkpoint)
            self._replace(tf.train.CheckpointManager, "restore_or_initialize", _looking_first)
            for callback, methods in WRITING_CALLBACKS.items():
                for method in methods if hasattr(keras.callbacks, callback) else ():
                    setattr(getattr(keras.callbacks, callback), method, _nothing)

    def _replace(self, owner: Any, name: str, make: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make(name, original)))

    def _replace_downloads(self) -> None:
        """Local: modules of Keras that have imported the function get the other one, too."""
        original = file_utils.get_file
        fetch = functools.wraps(original)(self._fetching("get_file", original))
        for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"]:
            if module.__dict__.get("get_file") is original:
                module.get_file = fetch  # type: ignore[attr-defined]

    def _fetching(self, name: str, fetch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._note("files", f"{name}: by one rank of each host, rank 0 first")
            if self._training():
                return fetch(*args, **kwargs)
            return on_each_host(self._world, name, lambda: fetch(*args, **kwargs))

        return call

    def _writing(self, name: str, write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._note("files", f"{name}: written by rank 0")
            if self._training():
                return write(*args, **kwargs) if self._world.is_root else None
            return on_root(self._world, name, lambda: _path(write(*args, **kwargs)))

        return call

    def _writing_model(self, name: str, write: Callable[..., Any]) -> Callable[..., Any]:
        once = self._writing(name, write)

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._training():
                average_batch_statistics(model, self._world)
            return once(model, *args, **kwargs)

        return call

    def _drawing(self, name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        once = self._writing(name, draw)

        def call(figure: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            to_file = isinstance(target, str | os.PathLike)  # and not to memory, where every rank may read it
            return once(figure, target, *args, **kwargs) if to_file else draw(figure, target, *args, **kwargs)

        return call

    def _reading(self, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._training():
                self._world.agreement.call(f"to be read: {name}")
            return read(*args, **kwargs)

        return call


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


class after_import(importlib.abc.MetaPathFinder):  # noqa: N801 (used as a function)
    """Local: call `action` with the module of that name once it is imported, or now if it has been.

    Args:
        name: of the module, in full.
        action: gets the module.
    """

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action
        if name in sys.modules:
            action(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Local: what the other finders find, with the action after it."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                self._action(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def on_root(world: World, name: str, action: Callable[[], Any]) -> Any:
    """Collective: what `action` returns, or raises, on rank 0, on every rank.

    Raises:
        Exception: on rank 0 its own; on the others RuntimeError with its text, or EOFError for one.
    """
    world.agreement.call(f"{name} by rank 0")
    told, error = _attempt(world, action) if world.is_root else (None, None)
    return _outcome(name, 0, world.communicator.broadcast_obj(told), error)


def on_each_host(world: World, name: str, action: Callable[[], Any]) -> Any:
    """Collective: what `action` returns on the first rank of this host.

    Rank 0 does it before the other hosts do, which may find the result on a file system that all share.

    Raises:
        Exception: where it was raised; on the other ranks RuntimeError with its text, or EOFError for one.
    """
    result = on_root(world, name, action)
    told: tuple[Any, str | None, bool] = (result, None, False)
    error: Exception | None = None
    if world.local_rank == 0 and not world.is_root:
        told, error = _attempt(world, action)
    everyone = world.communicator.all_gather_obj(told)
    failed = next((rank for rank, (_, text, _) in enumerate(everyone) if text is not None), None)
    first = world.topology.nodes.index(world.topology.node_rank)
    return _outcome(name, first if failed is None else failed, everyone[first if failed is None else failed], error)


def _attempt(world: World, action: Callable[[], Any]) -> tuple[tuple[Any, str | None, bool], Exception | None]:
    """Local: what the others are told (result, text of the error, whether it is of the end of a file); the error."""
    try:
        with world.activity.during("checkpoint"):
            return (action(), None, False), None
    except Exception as error:
        return (None, repr(error), isinstance(error, EOFError)), error


def _outcome(name: str, rank: int, told: tuple[Any, str | None, bool], error: Exception | None) -> Any:
    result, text, at_end = told
    if error is not None:
        raise error
    if text is not None:
        raise EOFError if at_end else RuntimeError(f"{name} on rank {rank}: {text}")
    return result


def _path(result: Any) -> Any:
    """Local: what scripts use of a result; the rest need not be fit to travel."""
    return result if isinstance(result, str | bytes) else None


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Local: in place of what rank 0 alone does."""
