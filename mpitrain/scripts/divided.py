"""When a script loads Keras, it gets one that is data-parallel; until then it is alone with Python. No TensorFlow.

So what a script sets before it imports TensorFlow (variables, logging) acts as in one process.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from mpitrain.errors import AgreedError
from mpitrain.runtime.imports import after_import
from mpitrain.scripts.names import Names
from mpitrain.scripts.seeds import draw_alike, kept
from mpitrain.scripts.shared_files import SharedFiles
from mpitrain.world import start
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpitrain.scripts.unmodified import Unmodified
    from mpitrain.training.shares import LossIs

PARTS = ("model", "optimizer", "data", "callbacks", "files", "other")


@dataclass(frozen=True)
class Division:
    """How the work of a script is divided among the ranks.

    Attributes:
        batch_is_global: batch sizes in the script are those of all ranks together, not of each.
        divide_loops: divide also what loops of the script's own read of `tf.data`.
        dry_run: stop where the script would train, and print what would be changed.
        loss_is: what a loss is that Keras does not compute: `mean`, `sum` or `whole`, see `shares.Shares`.
        sync_batch_norm: batch normalization uses the moments of all ranks' rows.
    """

    batch_is_global: bool = False
    divide_loops: bool = False
    dry_run: bool = False
    loss_is: LossIs = "mean"
    sync_batch_norm: bool = False


@dataclass
class Changes:
    """The table of what is different from a run under plain Python.

    Attributes:
        rows: (part, text), each once, in the order found.
    """

    rows: list[tuple[str, str]] = field(default_factory=list)

    def note(self, part: str, text: str) -> None:
        """Local: add a row, if it is new."""
        if (part, text) not in self.rows:
            self.rows.append((part, text))

    def __str__(self) -> str:
        """Local: the table as text, by part."""
        width = max(map(len, PARTS))
        ordered = [row for part in PARTS for row in self.rows if row[0] == part]
        return "\n".join(f"{part:<{width}}  {text}" for part, text in ordered) or "nothing is changed"


class DividedKeras:
    """The Keras of a script that knows nothing of ranks. To be made by all ranks.

    Args:
        world: the job, of two ranks or more.
        division: how the work is divided.
        changes: told what is changed.

    Attributes:
        shared_files: what is done to them without Keras.
    """

    def __init__(self, world: World, division: Division, changes: Changes) -> None:
        self._world, self._division, self._note = world, division, changes.note
        self._seed: int = world.communicator.broadcast_obj(int.from_bytes(os.urandom(4), "little"))
        self._names = Names(world)
        self._unmodified: Unmodified | None = None
        self.shared_files = SharedFiles(world, changes.note, lambda: self.training, self._names)

    @property
    def trained(self) -> bool:
        """The script has trained something with it."""
        return self._unmodified is not None and self._unmodified.trained

    @property
    def evaluated(self) -> bool:
        """The script has evaluated something with it."""
        return self._unmodified is not None and self._unmodified.evaluated

    @property
    def training(self) -> bool:
        """A `fit` of the script is under way."""
        return self._unmodified is not None and self._unmodified.training

    def install_when_loaded(self) -> None:
        """Local: all ranks draw the same random numbers; what is loaded of Keras is patched."""
        self._note(
            "other", "Python, NumPy, TensorFlow and Keras draw the same numbers on all ranks unless seeds differ"
        )
        draw = draw_alike(self._seed)
        after_import("tensorflow", lambda module: _begin_keras())
        after_import("keras", lambda module: self._install(draw))
        after_import("tf_keras", _refuse_training)
        self._notice_ranks()

    def _install(self, draw: Callable[[int], int]) -> None:
        import keras
        import tensorflow as tf

        if keras.backend.backend() != "tensorflow":
            raise AgreedError(
                f"Keras runs on {keras.backend.backend()}, and training is divided where it runs on TensorFlow: set "
                "KERAS_BACKEND=tensorflow, or leave the variable out"
            )
        from mpitrain.scripts.files import Files
        from mpitrain.scripts.unmodified import Unmodified

        with kept():  # the script may have set these seeds
            keras.utils.set_random_seed(self._seed)
        generator = tf.random.Generator
        generator.from_non_deterministic_state = lambda alg=None: generator.from_seed(draw(63), alg)
        self._unmodified = Unmodified(self._world, self._division, self._note, self._names)
        self._unmodified.install()
        Files(self._world, self._note, lambda: self.training, self._names, self.shared_files).install()

    def _notice_ranks(self) -> None:
        """Local: a script that asks for its rank may do things on one rank alone."""
        init = start.init

        def asked(**options: Any) -> World:
            self.shared_files.leave_alone()
            return init(**options)

        start.init = asked

    def ended(self, error: BaseException) -> bool:
        """Local: whether that is the end of a dry run."""
        if self._unmodified is None:
            return False
        from mpitrain.scripts.unmodified import DryRunEnded

        return isinstance(error, DryRunEnded)


def _begin_keras() -> None:
    """Local: patch what is TensorFlow's, too, where a script does without Keras, or looks for it in `tf.keras`."""
    if "keras" not in sys.modules:
        importlib.import_module("keras")


def _refuse_training(tf_keras: ModuleType) -> None:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise AgreedError(
            "the script trains with tf_keras (Keras 2), and only Keras 3 is made data-parallel: import keras in place "
            "of tf_keras, and leave TF_USE_LEGACY_KERAS out, or run it in one process"
        )

    for owner, name in (
        (tf_keras.Model, "fit"),
        (tf_keras.Model, "train_on_batch"),
        (tf_keras.optimizers.Optimizer, "apply_gradients"),
        (tf_keras.optimizers.legacy.Optimizer, "apply_gradients"),
    ):
        setattr(owner, name, refuse)
