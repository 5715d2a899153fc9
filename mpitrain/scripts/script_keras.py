"""When a script loads Keras, it gets one that is data-parallel; until then it is alone with Python. No TensorFlow.

So what a script sets before it imports TensorFlow (variables, logging) acts as in one process.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from mpitrain.errors import AgreedError
from mpitrain.runtime.imports import after_import
from mpitrain.scripts.changes import Changes
from mpitrain.scripts.file_names import Names
from mpitrain.scripts.seeds import preserve_random_state, share_seed
from mpitrain.scripts.shared_files import SharedFiles
from mpitrain.scripts.work_division import WorkDivision
from mpitrain.world import start
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpitrain.scripts.keras_patches import KerasPatches


class ScriptKeras:
    """The Keras of a script that knows nothing of ranks. To be made by all ranks.

    Args:
        division: how the work is divided.
        changes: told what is changed.
    """

    def __init__(self, world: World, division: WorkDivision, changes: Changes) -> None:
        self._world, self._division, self._note = world, division, changes.note
        # Another one in each run, as without mpitrain, and the same on all ranks.
        self._seed: int = world.communicator.broadcast_obj(int.from_bytes(os.urandom(4), "little"))
        self._names = Names(world.communicator)
        self._unmodified: KerasPatches | None = None
        # what is done to them without Keras
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
        draw = share_seed(self._seed)
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
        from mpitrain.scripts.keras_files import Files
        from mpitrain.scripts.keras_patches import KerasPatches

        with preserve_random_state():  # the script may have set these seeds
            keras.utils.set_random_seed(self._seed)
        generator = tf.random.Generator
        generator.from_non_deterministic_state = lambda alg=None: generator.from_seed(draw(63), alg)
        self._unmodified = KerasPatches(self._world, self._division, self._note, self._names)
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
        from mpitrain.scripts.keras_patches import DryRunEnded

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
