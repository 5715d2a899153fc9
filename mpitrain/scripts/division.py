"""How the data of one `fit` or `evaluate` of a script that knows nothing of ranks is divided among them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from mpitrain.data.portions import Portion, count_rows
from mpitrain.errors import AgreedError
from mpitrain.runtime import keras_private
from mpitrain.runtime.keras_private import ArrayDataAdapter, TFDatasetAdapter, class_weight_to_sample_weights
from mpitrain.scripts.adapters import DividedAdapter, Way, adapter_of, tell_of_parts

Arguments = dict[str, Any]
Note = Callable[[str, str], None]
OF_SAMPLES = ("x", "y", "sample_weight")


@dataclass
class DataDivision:
    """Replaces, in the arguments of Keras' methods, the data by this rank's part of it."""

    portion: Portion
    note: Note

    def __post_init__(self) -> None:
        self._told: set[str] = set()

    def divide_training(self, model: Any, arguments: Arguments) -> None:
        """Local: the data of a `fit` becomes this rank's; what Keras would hold out of it is held out before.

        Raises:
            AgreedError: on all ranks: it cannot be divided.
            Exception: Keras does not take it.
        """
        if arguments.get("validation_split") and arguments.get("validation_data") is None:
            data = tuple(arguments.get(name) for name in OF_SAMPLES)
            # Of the whole, as in one process: each rank's part would hold out other samples.
            kept, held = keras_private.hold_out(data, validation_split=arguments.pop("validation_split"))
            arguments |= dict(zip(OF_SAMPLES, kept, strict=True)) | {"validation_data": held}
        batch_size = arguments.get("batch_size")
        self._divide(model, arguments, "steps_per_epoch", "fit")
        if arguments.get("validation_data") is not None:
            parts = keras.utils.unpack_x_y_sample_weight(arguments["validation_data"])
            validation = dict(zip(OF_SAMPLES, parts, strict=True))
            validation["batch_size"] = arguments.pop("validation_batch_size", None) or batch_size
            validation["steps"] = arguments.get("validation_steps")
            self._divide(model, validation, "steps", "validation")
            arguments |= {"validation_data": (validation["x"],), "validation_steps": validation["steps"]}

    def divide_evaluation(self, model: Any, arguments: Arguments) -> None:
        """Local: the data of an `evaluate` becomes this rank's.

        Raises:
            AgreedError: on all ranks: it cannot be divided.
            Exception: Keras does not take it.
        """
        self._divide(model, arguments, "steps", "evaluate")

    def divide_batch(self, model: Any, arguments: Arguments) -> bool:
        """Local: the batch of a `train_on_batch` becomes this rank's share of it; False where it is left as it is.

        Raises:
            Exception: Keras does not take it.
        """
        weights = arguments.get("class_weight")
        if weights is not None and arguments.get("sample_weight") is None:
            arguments["sample_weight"] = class_weight_to_sample_weights(arguments["y"], arguments.pop("class_weight"))
        batch = tuple(arguments.get(name) for name in OF_SAMPLES)
        if arguments.get("class_weight") is not None or not count_rows(batch):
            return False  # Keras refuses the first; the second is no batch
        whole = self._keeps_whole(model)
        if self.portion.rank == 0 and not whole:
            tell_of_parts(batch)
        share = self.portion.share(batch, whole=whole)
        arguments |= {"x": share, "y": None, "sample_weight": None}
        return True

    def _keeps_whole(self, model: Any) -> bool:
        """Local: whether a batch of `model` cannot be divided by its rows."""
        return bool(_stateful(model)) or _has_fixed_batch(model)

    def _divide(self, model: Any, arguments: Arguments, steps: str, call: str) -> None:
        given = {name: arguments.pop(name, None) for name in (*OF_SAMPLES, "batch_size", "class_weight")}
        given |= {"steps_per_epoch": arguments.get(steps), "shuffle": call == "fit" and arguments.get("shuffle", True)}
        adapter = adapter_of(**given)
        way = self._way(model, adapter, arguments.get(steps), call)
        # Batch sizes are each rank's: one N times as large is divided among the ranks, or each takes every Nth.
        if not self.portion.batch_is_global and call == "fit":
            if isinstance(adapter, ArrayDataAdapter) and way == "rows":
                adapter = adapter_of(**given | {"batch_size": adapter.batch_size * self.portion.size})
                arguments[steps] = self._shared_steps(arguments.get(steps))
            elif way == "batches" and adapter.num_batches is not None:
                arguments[steps] = self._shared_steps(arguments.get(steps))
        arguments["x"] = DividedAdapter(adapter, self.portion, way)
        self._note(given, adapter, way, call)

    def _shared_steps(self, steps: int | None) -> int | None:
        return math.ceil(steps / self.portion.size) if steps else steps

    def _way(self, model: Any, adapter: Any, steps: int | None, call: str) -> Way:
        """Local: what gives the numbers of one process; of batches that are each rank's, what leaves none idle."""
        if self._keeps_whole(model) and (self.portion.batch_is_global or call != "fit" or _stateful(model)):
            self._say_whole(model, call)
            return "whole"
        if self.portion.batch_is_global:
            return "rows"
        count = adapter.num_batches
        if count is not None and count < self.portion.size:
            return "whole" if _has_fixed_batch(model) else "rows"
        if call == "fit":
            return "rows" if isinstance(adapter, ArrayDataAdapter) and not _has_fixed_batch(model) else "batches"
        exact = steps or type(model).test_step is not keras.Model.test_step
        return "rows" if exact or (count is None and isinstance(adapter, TFDatasetAdapter)) else "batches"

    def _say_whole(self, model: Any, call: str) -> None:
        """Local, by rank 0: that there is nothing to gain.

        Raises:
            AgreedError: on all ranks: batches are each rank's, and follow one another.
        """
        layer = _stateful(model)
        if layer and call == "fit" and not self.portion.batch_is_global:
            raise AgreedError(
                f"the layer {layer} of {model.name} is stateful: each batch goes on where the one before has ended, so "
                f"batches cannot be dealt out to {self.portion.size} ranks. Give --batch-size-is global"
            )
        why = f"the layer {layer} is stateful" if layer else "its inputs have a fixed batch size"
        text = f"{model.name}: {why}, so every rank computes whole batches: with the numbers of one rank, and no faster"
        if self.portion.rank == 0 and text not in self._told:
            sys.stderr.write(f"mpitrain: {text}\n")
        self._told.add(text)

    def _note(self, given: Arguments, adapter: Any, way: Way, call: str) -> None:
        portion = self.portion
        if way == "whole":
            self.note("data", f"{call}: every rank computes all of each batch, which rank 0 counts")
        elif isinstance(adapter, ArrayDataAdapter):
            unit = "rows" if way == "rows" else "batches"
            text = f"{call}: arrays are divided by {unit}"
            if call == "fit":
                size = adapter.batch_size
                each = size // portion.size if way == "rows" and not portion.batch_is_global else size
                whose = "of all ranks" if portion.batch_is_global else f"per rank, {portion.size} times as much in all"
                text += f"; batch size {each} is {whose}"
            self.note("data", text)
        else:
            kind = "tf.data.Dataset" if isinstance(adapter, TFDatasetAdapter) else type(given["x"]).__name__
            part = "its rows of each batch" if way == "rows" else f"one batch of every {portion.size}"
            self.note("data", f"{call}: every rank reads all of the {kind}, and takes {part}")


def _stateful(model: Any) -> str:
    """Local: the name of a layer whose state goes on from one batch to the next, row by row; "" if there is none."""
    return next((layer.name for layer in keras_private.layers_within(model) if getattr(layer, "stateful", False)), "")


def _has_fixed_batch(model: Any) -> bool:
    """Local: whether the model takes batches of one size only."""
    try:
        inputs = keras.tree.flatten(model.inputs or [])
    except AttributeError:  # no functional model, or not built yet
        return False
    return any(one.shape[0] is not None for one in inputs)
