"""What a Keras `fit` needs to be data-parallel, as one callback."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.faults.activity import Phase
from mpitrain.strategies.replicas import verify_replicas
from mpitrain.strategies.strategy import strategy_of
from mpitrain.training.logs import epoch_logs
from mpitrain.training.loss_shares import LossIs
from mpitrain.training.model_hook import ModelHook
from mpitrain.training.model_state import (
    replicated,
    settle_statistics,
    step_counters,
    synchronize_start,
    unlike_counts,
    verify_vocabularies,
)
from mpitrain.training.optimizer import DistributedOptimizer, hook_of
from mpitrain.world.start import current_world
from mpitrain.world.world import World

STEPS_OF_SERVERS = (
    "these data do not tell how many batches they have: at the end of an epoch one process counts a step without data "
    "(5 for 4 batches), parameter servers do not, so that schedules and Adam are one step less ahead for each epoch; "
    "with steps_per_epoch they are the same"
)


class DataParallel(keras.callbacks.Callback):
    """Makes `fit` and `evaluate` of one model data-parallel. Stands first in the list of callbacks.

    It averages the gradients (the optimizer is made a DistributedOptimizer if it is none yet), weighted by the samples
    of each rank's batch; gives all ranks rank 0's variables before the first step; lets ranks that run out of data take
    part in the updates of the others; puts the metrics of all ranks' samples into `logs`, as sum and count, so that
    later callbacks decide alike on all ranks; averages the statistics of batch normalization before they are used; and
    checks that replicas are identical.

    Every rank calls `fit` and `evaluate` with it, in the same order.

    Args:
        verify_replicas: check after the first step and after each epoch that is a multiple of this; 0 checks never.
        world: the job; the current one by default.
        loss_is: what a loss is that Keras does not compute, or computes of a whole batch: see `loss_shares.Shares`.
        sync_batch_norm: batch normalization uses the moments of all ranks' rows.

    Example:
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer="sgd", loss="mse")
        >>> samples = tf.data.Dataset.from_tensor_slices((np.eye(3), np.ones((3, 1)))).batch(1)
        >>> history = model.fit(samples, verbose=0, callbacks=[mpitrain.callbacks.DataParallel()])
    """

    def __init__(
        self,
        verify_replicas: int = 1,
        *,
        world: World | None = None,
        loss_is: LossIs | None = "mean",
        sync_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self._steps_are = loss_is, sync_batch_norm
        self._world = world or current_world()
        self._strategy = strategy_of(self._world)
        self._verify_every = verify_replicas
        self._unverified = self._goes_on = False
        self._spare: Any = None
        self._hook: ModelHook | None = None
        self._phases: list[Phase] = []  # before each evaluation under way

    def go_on(self, training: bool) -> None:
        """Local: after the loss of ranks, when variables are the same on all that are left.

        Args:
            training: a `fit` follows, and no evaluation.
        """
        self._phases.clear()
        self._unverified, self._spare, self._goes_on = False, None, True
        self._world.activity.phase = "compute" if training else "start"
        if self._hook is not None:
            self._hook.active, self._hook.synchronized = int(training), True
            optimizer_hook = hook_of(self.model.optimizer)
            if optimizer_hook is not None:
                optimizer_hook.synchronized = True

    def begin_without_data(self, dataset: Any) -> None:
        """Local: the next epoch has fewer samples than there are ranks, and `dataset` may be empty on this one.

        A rank without data takes part in updates that it has traced; so it makes a step without data. All ranks call
        this, since not all will come to the end of a first step.

        Args:
            dataset: what `fit` will read.
        """
        self._spare = dataset

    def set_model(self, model: Any) -> None:
        """Local: hook the optimizer and the model's steps, before Keras traces them."""
        # Keras calls this before it makes the training function, which would have the plain step and optimizer in it.
        super().set_model(model)
        if self._world.exchanges:
            if getattr(model, "optimizer", None) is not None:
                DistributedOptimizer(model.optimizer, world=self._world)
            self._hook = ModelHook.of(model, self._strategy)
            self._hook.share(*self._steps_are)

    def on_train_begin(self, logs: Any = None) -> None:
        """Collective: all ranks start from rank 0's variables, where they exist already."""
        self._world.activity.phase = "start"  # until the first update: tracing takes long
        if self._hook is not None:
            # With several steps a call, a rank's first call may hold fewer updates than another's.
            in_step = self._strategy.in_step and self.model.steps_per_execution == 1
            self._unverified = self._verify_every > 0 and in_step
            self._hook.active += 1
            # Before variables become rank 0's: rows of an embedding would then belong to other words.
            verify_vocabularies(self.model, self._world)
            synchronize_start(self.model, self._world)
            optimizer_hook = hook_of(self.model.optimizer)
            if self._hook.shares.served and self._strategy.in_step and self.params.get("steps") is None:
                self._hook.shares.tell(STEPS_OF_SERVERS)  # see _agree_on_epoch_end
            if optimizer_hook is not None and not self._goes_on:
                optimizer_hook.exchange.begin_anew(optimizer_hook.update)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Collective where ranks may have no data at all: trace the update."""
        if self._spare is not None and self._hook is not None:
            dataset, self._spare, self._unverified = self._spare, None, False
            if not int(dataset.cardinality()):
                counters = [(counter, counter.numpy()) for counter in step_counters(self.model.optimizer)]
                with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                    # Traces the update, and ends where the first batch is asked for.
                    self.model.train_function(iter(dataset))
                for counter, number in counters:  # see _agree_on_epoch_end
                    counter.assign(number)

    def on_train_end(self, logs: Any = None) -> None:
        """Collective where the strategy gathers the optimizer's variables; metrics are this rank's own again."""
        self._world.activity.phase = "start"  # of whatever comes now
        if self._hook is not None:
            self._hook.active -= 1
            optimizer_hook = hook_of(self.model.optimizer)
            if optimizer_hook is not None:
                optimizer_hook.exchange.fetch_state(optimizer_hook.update)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Collective, once after the first step: replicas are identical. Local: the loss is finite.

        Raises:
            NonFiniteError: it is not, and that is to end the job.
        """
        loss = (logs or {}).get("loss")
        if loss is not None and not np.isfinite(loss):
            self._strategy.finite.note_loss(float(loss), self._world.activity.updates, self._world.hosts)
        if self._unverified:
            self._unverified = False
            verify_replicas(replicated(self.model), "after the first step", world=self._world)

    def on_test_begin(self, logs: Any = None) -> None:
        """Collective: statistics become the same before they are used."""
        self._phases.append(self._world.activity.phase)
        self._world.activity.phase = "evaluation"
        if self._hook is not None:
            self._hook.active += 1
            self._hook.latest.begin_test()
            self._settle_statistics(self._hook)

    def on_test_end(self, logs: Any = None) -> None:
        """Local: metrics are this rank's own again, unless this was within a `fit`."""
        if self._phases:
            self._world.activity.phase = self._phases.pop()
        if self._hook is not None:
            self._hook.active -= 1
            self._hook.latest.end_test()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Collective: numbers in `logs` become those of all ranks; replicas are checked."""
        if self._hook is None:
            return
        # Ranks with fewer batches take part in the others' updates first: what follows is the same everywhere.
        self._strategy.join()
        if logs is not None:
            logs.update(epoch_logs(logs, self._hook.latest.samples, self._world))
        self._agree_on_epoch_end()
        self._settle_statistics(self._hook)
        if self._verify_every and (epoch + 1) % self._verify_every == 0:
            verify_replicas(replicated(self.model), f"after epoch {epoch + 1}", world=self._world)

    def _settle_statistics(self, hook: ModelHook) -> None:
        """Collective: statistics become the same before they are used."""
        unlike = [] if hook.told_of_counts else unlike_counts(self.model, self._world)
        if unlike:
            hook.told_of_counts = True
            hook.shares.tell(
                f"{', '.join(unlike)}, which layers of the script keep, came out otherwise on each rank: where these "
                "are no whole numbers the mean is taken, others stay each rank's, and rank 0's are saved"
            )
        settle_statistics(self.model, hook.shares.synchronized_layers, self._strategy)

    def _agree_on_epoch_end(self) -> None:
        """Collective: one rank that stops stops all, and all have counted the same number of steps.

        Where Keras does not know the number of batches, it finds the end by a step without data, and
        TensorFlow counts that step (seen with 2.21 and Keras 3.15, also without mpitrain: 5 steps for 4
        batches). A rank that stops before its end has not counted it.
        """
        optimizer = self.model.optimizer
        hook = hook_of(optimizer)
        counters = []
        if hook is not None and not hook.accumulation_steps:
            counters = step_counters(optimizer)
        self._world.agreement.call("end of an epoch")
        numbers = np.array([self.model.stop_training, *[c.numpy() for c in counters]], np.int64)
        # The greatest: of a flag whether any rank stops, of counters those that have seen all steps.
        self._world.communicator.all_reduce(numbers, "max")
        self.model.stop_training = bool(numbers[0])
        for counter, number in zip(counters, numbers[1:], strict=True):
            counter.assign(number)
