"""Loading TensorFlow and Keras in two thirds of the time.

Keras imports scikit-learn and matplotlib, where they are installed, for two modules that few programs use; and while
hundreds of thousands of objects are made that stay, Python looks for garbage among them again and again. Of 7 s of
processor time the first takes 2.5 s, the second 1 s, on every rank.
"""

from __future__ import annotations

import gc
import importlib.abc
import re
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mpitrain.runtime import streams

LARGE = ("tensorflow", "keras")
LATE = tuple(
    f"{package}.{module}"
    for package in ("keras", "keras.src", "keras._tf_keras.keras")
    for module in ("visualization", "wrappers")
)
# TensorFlow says this once a library of its own, whatever TF_CPP_MIN_LOG_LEVEL is.
START = re.compile(rb"WARNING: All log messages before absl::|I0000 .*oneDNN custom operations are on")
Execute = Callable[[ModuleType], None]


class Behind(importlib.abc.MetaPathFinder):
    """Finds what the finders behind it find, and changes how a few modules are executed."""

    def behind(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Local: what they find; many look for a module and do not import it."""
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        return next((spec for spec in specs if spec is not None), None)


class Finder(Behind):
    """Changes when, or how, modules are executed that take long.

    Attributes:
        quiet: TensorFlow's first lines come to nothing.
    """

    quiet = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Local: the module with another way to execute it, or None for all that are left as they are."""
        if fullname not in LARGE and fullname not in LATE:
            return None
        spec = self.behind(fullname, path, target)
        if spec is not None and spec.loader is not None:
            change = without_collection if fullname in LARGE else when_used
            execute = change(spec.loader.exec_module)
            spec.loader.exec_module = without_first_lines(execute) if self.quiet else execute  # type: ignore[method-assign, assignment]
        return spec


def install(quiet: bool = False) -> None:
    """Local: load TensorFlow and Keras so from now on; what has been loaded stays as it is.

    `quiet`: without the first lines of TensorFlow, which another rank of this host shows.
    """
    finder = next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)
    if finder is None:
        finder = Finder()
        sys.meta_path.insert(0, finder)
    finder.quiet = finder.quiet or quiet


def without_collection(execute: Execute) -> Execute:
    """Execute a module, and all that it imports, without looking for garbage meanwhile."""

    def run(module: ModuleType) -> None:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            execute(module)
        finally:
            if was_enabled:
                gc.enable()

    return run


def without_first_lines(execute: Execute) -> Execute:
    """Execute a module, and hold back meanwhile what this process writes: `START` comes to nothing."""

    def run(module: ModuleType) -> None:
        with streams.held_back(START):
            execute(module)

    return run


def when_used(execute: Execute) -> Execute:
    """Execute a module when the first name in it is asked for, which is not one that every module has.

    Standard library modules look at `__file__` and the like of all modules, and so `importlib.util.LazyLoader`, which
    executes a module at these too, would do so in the middle of a training.
    """

    def run(module: ModuleType) -> None:
        lock = threading.RLock()
        begun: list[ModuleType] = []  # set before it is executed: that may ask for names of it

        def load() -> None:
            with lock:
                if not begun:
                    begun.append(module)
                    try:
                        execute(module)
                    except BaseException:
                        begun.clear()
                        raise

        def missing(name: str) -> Any:
            if name == "__all__" or not name.startswith("__"):
                load()
            try:
                return vars(module)[name]
            except KeyError:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}") from None

        def names() -> list[str]:
            load()
            return sorted(vars(module))

        module.__getattr__, module.__dir__ = missing, names  # type: ignore[method-assign]

    return run


class after_import(Behind):  # noqa: N801 (used as a function)
    """Local: call `action` with the module of that name once it is imported, or now if it has been."""

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
        spec = self.behind(fullname, path, target) if fullname == self._name else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._action(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
