"""Whether all ranks hand the same data to Keras. They must, for each takes its part of it.

Ranks that come to other data, or to the same in another order, train on some samples twice, on others never, or with
labels that mean something else on each. So a sample of what they hand over is compared. Numbers need not be the same
to the last bit: hosts may compute, or read pictures, a little differently.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.collectives.ordering import host_call
from mpitrain.data.portions import take
from mpitrain.errors import AgreedError
from mpitrain.scripts.seeds import preserve_random_state
from mpitrain.strategies.strategy import strategy_of
from mpitrain.world.world import World

SAMPLE, FEWEST_ROWS = 1 << 14, 16  # numbers or texts of each array that are looked at, spread over it
TOLERANCE = 1e-3  # of what another order of the numbers would make
BATCHES = 3  # of a pipeline that are looked at
MANY = 50
PARTS = ("x", "y", "sample_weight")
UNCOMPARED = ("callbacks", "verbose", "kwargs", "return_dict", "reset_metrics")
CAUSES = (
    "All ranks must come to the same data, of which mpitrain gives each its part. Look for numbers that depend on the "
    "clock, the system or the process, for classes numbered or files listed in no fixed order (sort them), and for "
    "data that the script divides by rank itself (leave that to mpitrain)"
)
Note = Callable[[str, str], None]


@dataclass(frozen=True)
class Summary:
    """What tells one array from another."""

    kind: str  # shape or type
    texts: int = 0  # checksum of what are no numbers
    sums: tuple[float, float] = (0.0, 0.0)  # of the numbers, with two sets of random weights
    scale: float = 0.0  # what the sums would differ by if the numbers came in another order
    are_labels: bool = False  # whole numbers or texts, one or one row a sample: no augmentation changes such

    def is_like(self, other: Summary) -> bool:
        """Local: whether the two are of the same data."""
        if (self.kind, self.texts) != (other.kind, other.texts):
            return False
        limit = TOLERANCE * max(self.scale, other.scale)
        return all(abs(mine - theirs) <= limit for mine, theirs in zip(self.sums, other.sums, strict=True))


def summary(leaf: Any) -> Summary:
    """Local: of one array, tensor or table; of something else by its text, or its type."""
    shape = getattr(leaf, "shape", None)
    if shape is None or not len(shape):
        plain = leaf is None or isinstance(leaf, int | float | str | bytes | np.generic)
        return Summary(repr(leaf) if plain else f"{type(leaf).__name__} of {_count_of_batches(leaf)}")
    try:
        array = np.asarray(_sample(leaf, int(shape[0]))).reshape(-1)
    except (TypeError, ValueError, IndexError, NotImplementedError, tf.errors.OpError):
        return Summary(f"{type(leaf).__name__} {tuple(shape)}")
    # Evenly, for a difference may be in the order alone, or in the last rows.
    array = array[:: max(1, -(-array.size // SAMPLE))]
    kind = f"array {tuple(shape)}"
    if array.dtype.kind in "OSUV":
        texts = "\0".join(str(one) if isinstance(one, str | bytes | int | float) else "" for one in array)
        return Summary(kind, zlib.crc32(texts.encode("utf-8", "replace")), are_labels=len(shape) <= 2)
    if array.dtype.kind in "Mm":
        array = array.view(np.int64)
    # A sum with one NaN in it would say nothing of the other numbers.
    numbers = np.nan_to_num(array.astype(np.float64), posinf=0.0, neginf=0.0)
    sums = _weights(len(numbers)) @ numbers
    whole = len(shape) <= 2 and bool((numbers == np.rint(numbers)).all())
    return Summary(kind, 0, (float(sums[0]), float(sums[1])), float(np.linalg.norm(numbers)), whole)


def _count_of_batches(data: Any) -> int | None:
    """Local: of an epoch; negative, or None, where it is not known."""
    return int(data.cardinality()) if isinstance(data, tf.data.Dataset) else getattr(data, "num_batches", None)


def _sample(leaf: Any, count: int) -> Any:
    """Local: rows spread over all, as many as are worth looking at."""
    rows = max(FEWEST_ROWS, SAMPLE // max(1, int(np.prod(leaf.shape[1:], dtype=np.int64))))
    return leaf if rows >= count else take(leaf, np.linspace(0, count - 1, rows).astype(np.int64))


@functools.lru_cache(maxsize=8)
def _weights(count: int) -> Any:
    return np.random.Generator(np.random.PCG64(1)).standard_normal((2, count))


def _summaries(data: Any) -> list[Summary]:
    leaves = keras.tree.flatten(data)
    if len(leaves) > MANY and not any(hasattr(leaf, "shape") for leaf in leaves):
        leaves = [np.array(leaves)]  # lists of numbers
    return [summary(leaf) for leaf in leaves]


def _parts(batch: Any) -> dict[str, list[Summary]]:
    """Local: of a batch as Keras takes it."""
    parts = batch if isinstance(batch, tuple) and len(batch) <= len(PARTS) else (batch,)
    return {name: _summaries(part) for name, part in zip(PARTS, parts, strict=False)}


class DataComparison:
    """Compares what ranks hand to Keras.

    Args:
        note: told what was found, as (part, text).
    """

    def __init__(self, world: World, note: Note) -> None:
        self._world, self._note = world, note
        self._streams: dict[str, list[dict[str, list[Summary]]]] = {}  # the first batches of each, not yet compared
        self._warned = False
        self._calls = 0

    def check(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Collective: compare arrays and numbers.

        Args:
            call: the method that gets them.
            arguments: of the script, by their names.

        Raises:
            AgreedError: on all ranks: something is not the same.
        """
        own = {name: _summaries(value) for name, value in arguments.items() if name not in UNCOMPARED}
        self._world.agreement.call(f"what is given to {call}")
        everyone = self._world.communicator.all_gather_obj(own)
        names = dict.fromkeys(name for one in everyone for name in one)
        unlike = {name: ranks for name in names if (ranks := _unlike([one.get(name, []) for one in everyone]))}
        if unlike:
            self._refuse(call, unlike)

    def check_often(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Collective at the first calls, and at some later ones: as `check`, for what is called at each step."""
        self._calls += 1
        if self._calls <= BATCHES or self._calls % 100 == 0:
            self.check(call, arguments)

    def watch(self, call: str, data: Any) -> Any:
        """Local: the same data, of which the first batches are looked at when they are read, if it comes in batches."""
        self._streams.pop(call, None)
        found = self._streams.setdefault(call, [])
        if isinstance(data, tf.data.Dataset):
            return _watched_dataset(data, found)
        if isinstance(data, keras.utils.PyDataset):
            with preserve_random_state():
                found.append(_parts(data[0]))  # as Keras does, too; ranks may read no batch in common
            return data
        return _watched(data, found) if isinstance(data, GeneratorType) else data

    def note_batch(self, call: str, batch: Any) -> None:
        """Collective: compare a batch that all ranks have read."""
        self._streams[call] = [_parts(batch)]
        self.settle(call)

    def settle(self, *ended: str) -> None:
        """Collective: compare what has been read so far of the data that is watched.

        Raises:
            AgreedError: on all ranks: the labels of the same batch are not the same.
        """
        self._world.agreement.call("batches that were read")
        everyone = self._world.communicator.all_gather_obj(self._streams)
        for call in dict.fromkeys(call for one in everyone for call in one):
            self._settle(call, [one.get(call, []) for one in everyone])
        for call in ended:
            self._streams.pop(call, None)

    def _settle(self, call: str, streams: Sequence[Sequence[Mapping[str, list[Summary]]]]) -> None:
        for batches in zip(*streams, strict=False):
            unlike = {part: ranks for part in PARTS if (ranks := _unlike([batch.get(part, []) for batch in batches]))}
            labels = [label for batch in batches for label in batch.get("y", [])]
            if "y" in unlike and all(label.are_labels for label in labels):
                self._refuse(call, {part: ranks for part, ranks in unlike.items() if part == "y"})
            if unlike:
                self._warn(call, unlike)

    def _warn(self, call: str, unlike: Mapping[str, Sequence[int]]) -> None:
        text = f"{call}: {self._named(unlike)} of the same batch"
        self._note("data", f"{text}, as with random augmentation")
        if self._world.is_root and not self._warned and self._world.faults.same_data == "warn":
            sys.stderr.write(
                f"mpitrain: warning: {text}. That is right where it is changed at random, and wrong where samples come "
                f"in another order. {CAUSES} (MPITRAIN_SAME_DATA=ignore silences this)\n"
            )
        self._warned = True

    def _refuse(self, call: str, unlike: Mapping[str, Sequence[int]]) -> None:
        raise AgreedError(f"{call}: {self._named(unlike)}. {CAUSES}")

    def _named(self, unlike: Mapping[str, Sequence[int]]) -> str:
        ranks = sorted({rank for ranks in unlike.values() for rank in ranks})
        are = "is" if len(unlike) == 1 else "are"
        return f"{', '.join(unlike)} {are} not the same on {self._world.agreement.name(ranks)} as on rank 0"


class ComparisonCallback(keras.callbacks.Callback):
    """Compares what was read: after the first step where ranks stand at the same one, and after the first epoch.

    Stands behind `DataParallel`.
    """

    def __init__(self, comparison: DataComparison, world: World) -> None:
        super().__init__()
        self._comparison, self._strategy = comparison, strategy_of(world)
        self._due = {"step", "epoch"}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Collective once."""
        if "step" in self._due and self._strategy.in_step and self.model.steps_per_execution == 1:
            self._due.discard("step")
            self._comparison.settle()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Collective once."""
        if "epoch" in self._due:
            self._due.clear()
            self._comparison.settle("fit", "validation_data")


def _unlike(everyone: Sequence[Sequence[Summary]]) -> list[int]:
    """Local: the ranks that do not have what rank 0 has."""
    first = everyone[0]
    return [
        rank
        for rank, one in enumerate(everyone)
        if len(one) != len(first) or not all(mine.is_like(theirs) for mine, theirs in zip(one, first, strict=True))
    ]


def _watched(batches: Iterator[Any], found: list[dict[str, list[Summary]]]) -> Iterator[Any]:
    for batch in batches:
        if len(found) < BATCHES:
            found.append(_parts(batch))
        yield batch


def _watched_dataset(dataset: tf.data.Dataset, found: list[dict[str, list[Summary]]]) -> tf.data.Dataset:
    """Local: the data set; what is looked at is the whole of a batch, before it is divided."""

    def look(number: Any, batch: Any) -> Any:
        leaves = tf.nest.flatten(batch)

        def note(*leaves: Any) -> np.int32:
            if len(found) < BATCHES:
                found.append(_parts(tf.nest.pack_sequence_as(batch, leaves)))
            return np.int32(0)

        if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
            return batch  # ragged or sparse
        seen = tf.cond(number < BATCHES, lambda: host_call(note, leaves, [tf.int32])[0], lambda: tf.constant(0))
        with tf.control_dependencies([seen]):
            return tf.nest.map_structure(tf.identity, batch)

    return dataset.enumerate().map(look)
