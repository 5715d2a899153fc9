"""Training loops that a script writes itself: what they read of `tf.data`, divided among the ranks.

Only on demand, for a loop may do with a batch what is right for whole batches alone. What it makes of Keras is
right for divided ones too: gradients are weighted by rows, and metrics give the result over all ranks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from mpitrain.collectives.conversion import of_the_script
from mpitrain.data.portions import Portion, count_rows
from mpitrain.errors import DataError
from mpitrain.scripts.data_comparison import DataComparison
from mpitrain.strategies.weighting import keep_added_up, keep_sample_count
from mpitrain.training.gradient_use import GradientUses, keep_watching
from mpitrain.training.logs import global_metrics
from mpitrain.training.loss_patches import keep_batch_norm_synchronized, keep_share
from mpitrain.training.loss_shares import LossIs
from mpitrain.training.loss_terms import taken_for_a_mean
from mpitrain.training.metric_states import observe
from mpitrain.world.world import World

OWN = "a loop of its own"
Note = Callable[[str, str], None]


class DividedLoops:
    """Divides the data sets that a script iterates over eagerly, outside of Keras' own methods.

    Args:
        portion: how batches are divided.
        note: told what is changed, as (part, text).
        training: whether a `fit` is under way. What its callbacks read stays whole, and the results they ask for
            stay this rank's: ranks may stand at different batches.
        comparison: compares what ranks have read.
        loss_is: what the loss of a loop is: a `mean` over the rows of its batch, a `sum` over them, or `whole`: nobody
            has said, and it is taken for a mean.
        sync_batch_norm: batch normalization uses the moments of all ranks' rows.
    """

    def __init__(
        self,
        world: World,
        portion: Portion,
        note: Note,
        training: Callable[[], bool],
        comparison: DataComparison,
        loss_is: LossIs = "mean",
        sync_batch_norm: bool = False,
    ) -> None:
        self._world, self._portion, self._note, self._training = world, portion, note, training
        self._comparison, self._loss_is, self._sync_batch_norm = comparison, loss_is, sync_batch_norm
        self._told: set[str] = set()
        # Of a batch that all ranks take, the loss is not to be added up.
        self._counts = CountsFor(world.is_root or loss_is != "sum")

    def install(self) -> None:
        """Local: patch `tf.data` and Keras' metrics."""
        keep_sample_count(self._counts.rows)
        keep_watching(GradientUses("a loop of the script's own", self._tell))
        if self._loss_is == "sum":
            keep_added_up(True)
            keep_share(self._counts.share)
        if self._sync_batch_norm:
            keep_batch_norm_synchronized(self._world)
        iterate, initialize, loops = tf.data.Dataset.__iter__, keras.Metric.__init__, self

        def divided(dataset: tf.data.Dataset) -> Iterator[Any]:
            batches: Iterator[Any] = iterate(dataset)
            if not loops._divides(sys._getframe(1)):
                return batches
            loops._note("data", f"{OWN}: batches of tf.data are divided, other data is not")
            loops._tell_once()
            return DividedBatches(loops._compared(batches), loops._portion, loops._counts)

        def initialized(metric: keras.Metric, *args: Any, **kwargs: Any) -> None:
            initialize(metric, *args, **kwargs)
            observe([metric])
            # object.__setattr__: Keras tracks what is assigned to a metric; this is none of its state.
            object.__setattr__(metric, "result", loops._result_of(metric, metric.result))

        # On the class, since a script makes data sets by any of its methods.
        tf.data.Dataset.__iter__ = divided
        keras.Metric.__init__ = initialized

    def _compared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Collective at the first batch: all ranks have read the same."""
        for number, batch in enumerate(batches):
            if not number and threading.current_thread() is threading.main_thread():
                self._comparison.note_batch(OWN, batch)
            yield batch

    def _tell_once(self) -> None:
        if self._loss_is == "whole":
            self._tell(taken_for_a_mean("the loss of a loop of the script"))

    def _tell(self, text: str) -> None:
        if self._world.is_root and text not in self._told:
            sys.stderr.write(f"mpitrain: {text}\n")
        self._told.add(text)

    def _divides(self, caller: FrameType) -> bool:
        return tf.executing_eagerly() and not self._training() and _of_the_script(caller)

    def _result_of(self, metric: keras.Metric, result: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            """Collective where a script calls it eagerly: the result over the samples of all ranks."""
            if not self._divides(sys._getframe(1)):
                return of_the_script(result)()
            found = global_metrics([metric], lambda: {"result": result()}, self._world)["result"]
            return tf.convert_to_tensor(found)

        return call


class CountsFor:
    """What a loop's steps on this rank count for. Variables: a step that was traced once reads them each time it runs.

    Args:
        whole: whether this rank counts where all ranks take the same.
    """

    def __init__(self, whole: bool) -> None:
        self._whole = float(whole)
        self.rows = tf.Variable(self._whole, dtype=tf.float64, trainable=False, name="rows_of_this_rank")
        # of the rows of all ranks: of what all have, such as losses of weights, that part makes the sum of ranks right
        self.share = tf.Variable(1.0, dtype=tf.float64, trainable=False, name="share_of_this_rank")

    def set(self, rows: int = 1, total: int = 0) -> None:
        """Local: of the next step.

        Args:
            rows: of this rank.
            total: of all ranks; 0 where each has all of them.
        """
        self.rows.assign(float(rows) if total else rows * self._whole)
        self.share.assign(rows / total if total else 1.0)


class DividedBatches:
    """Iterates over this rank's part of batches that all ranks read alike; all ranks take as many steps.

    Where batches are global, it is this rank's rows of each. Where they are each rank's, it is every Nth
    batch, and of those left over at the end, fewer than ranks, this rank's rows of each.

    Args:
        batches: of which all ranks read the same.
        portion: which part of them.
        counts: set to what the latest batch counts for.
    """

    def __init__(self, batches: Iterator[Any], portion: Portion, counts: CountsFor) -> None:
        self._portion, self._counts, self._total = portion, counts, 0
        self._batches = self._by_rows(batches) if portion.batch_is_global else self._dealt(batches)

    def __iter__(self) -> DividedBatches:
        return self

    def __next__(self) -> Any:
        """Local: the next batch of this rank.

        Raises:
            DataError: it is asked for while a `tf.function` is traced, which would use one batch for ever.
        """
        if not tf.executing_eagerly():
            raise DataError(
                "--divide-loops cannot divide an iterator that a tf.function reads from: read the batch outside of "
                "it, or leave the option out"
            )
        try:
            batch = next(self._batches)
        except StopIteration:
            self._counts.set()
            raise
        self._counts.set(_rows(batch), self._total)
        return batch

    get_next = __next__

    def _by_rows(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            # What cannot be divided, as fewer rows than ranks, every rank takes: the mean is the same.
            divided = bool(self._portion.divides(batch))
            self._total = _rows(batch) if divided else 0
            yield self._portion.rows_of_batch(batch) if divided else batch

    def _dealt(self, batches: Iterator[Any]) -> Iterator[Any]:
        while round_of_all := list(islice(batches, self._portion.size)):
            if len(round_of_all) == self._portion.size:
                self._total = sum(map(_rows, round_of_all))
                yield round_of_all[self._portion.rank]
            else:
                yield from self._by_rows(iter(round_of_all))


def _rows(batch: Any) -> int:
    return int(count_rows(batch)) or 1


def _of_the_script(frame: FrameType | None) -> bool:
    """Local: whether it is not Keras that called, through TensorFlow or directly."""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "tensorflow":
            return package not in ("keras", "mpitrain")
        frame = frame.f_back
    return True
