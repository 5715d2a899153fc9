"""The exact mean of gradients in host memory, bucket by bucket."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.collectives.bucket import Bucket
from mpitrain.collectives.native_session import Counted, NativePlan, NativeSession
from mpitrain.comm.all_reduce import AllReduce
from mpitrain.comm.communicator import Buffer, Communicator
from mpitrain.comm.mpi import MpiCommunicator
from mpitrain.errors import MismatchError, MpitrainError
from mpitrain.faults.activity import LOOKED_AT_BATCHES
from mpitrain.native.library import Library
from mpitrain.reduction.buckets import BucketPlan
from mpitrain.reduction.finite import LOOKED_AT_BYTES, WHOLE_EVERY, FiniteCheck
from mpitrain.reduction.pool import BufferPool
from mpitrain.reduction.sparse import exchange_rows
from mpitrain.reduction.statistics import Statistics
from mpitrain.world.agreement import Agreed, Agreement


@dataclass(frozen=True)
class _Weights:
    """How the contributions of one update are weighted."""

    before: float | None  # factor on this rank's own gradients before the sum; None for 1, 0 for no contribution
    after: float  # factor on the sum

    @property
    def share(self) -> float:
        """Both: the factor on this rank's own where the sum is left as it is."""
        return self.after if self.before is None else self.before


def weights_of(agreed: Agreed, rank: int, added_up: bool = False) -> _Weights:
    """Local: weights so that the sum over ranks is the mean over samples, or the sum where there are any."""
    samples = agreed.samples.tolist()  # a list: numpy takes longer for a few numbers
    if added_up:
        return _Weights(None if samples[rank] > 0 else 0.0, 1.0)
    if samples[0] > 0 and samples.count(samples[0]) == len(samples):
        # The usual case: the factor on the sum, so that gradients are handed over where they are, without a copy.
        return _Weights(None, 1.0 / len(samples))
    # Rounded once, at the end, and so the same on all ranks.
    total = math.fsum(samples)
    return _Weights(samples[rank] / total if total else 0.0, 1.0)


def zeros(plan: BucketPlan, bucket: Bucket) -> list[Buffer]:
    """Local: what a rank without gradients puts into a bucket."""
    specs = [plan.specs[position] for position in bucket.members]
    if bucket.sparse:
        return [np.zeros((0, *specs[0].shape[1:]), bucket.dtype), np.zeros(0, np.int64)]
    return [np.zeros(spec.shape, bucket.dtype) for spec in specs]


class Reducer:
    """Averages gradients over all ranks.

    Args:
        agreement: header exchange on the same communicator.
        all_reduce: how a flat buffer is summed.
    """

    def __init__(self, communicator: Communicator, agreement: Agreement, all_reduce: AllReduce) -> None:
        self.communicator = communicator
        self.agreement = agreement
        self.statistics = Statistics()
        self.native: NativeSession | None = None
        self._agreed: Agreed | None = None
        self.finite = FiniteCheck(communicator, agreement)
        self._all_reduce = all_reduce
        self._pool = BufferPool()
        self._left_behind: list[BufferPool] = []
        self._weights = _Weights(None, 1.0)
        self._pending: Agreed | None = None
        self._next: tuple[BucketPlan, int] | None = None  # bucket of an update that is under way

    def begin_anew(self) -> None:
        """Local: ranks were lost, perhaps in the middle of an update."""
        self._left_behind.append(self._pool)  # messages may still arrive in it
        self._pool = BufferPool()
        self._pending = self._agreed = self._next = None
        if self.native is not None:
            self.native.begin_anew()

    @property
    def agreed(self) -> Agreed | None:
        """What the headers of the latest update said, if there was one."""
        if self.native is not None:
            self._agreed = self.native.agreed() or self._agreed
        return self._agreed

    def use(self, library: Library) -> None:
        """Local: from now on machine code exchanges, where it can; see `host_side`."""
        communicator = self.communicator
        if self.native is None and isinstance(communicator, MpiCommunicator):
            look = None if self.finite.action == "ignore" else self._look
            counted = Counted(self.statistics.words, look, LOOKED_AT_BYTES, WHOLE_EVERY)
            self.native = NativeSession(library, communicator, self.agreement, self._all_reduce, counted)

    def host_side(self, plan: BucketPlan, synchronize: Callable[[], bool] | None = None) -> HostUpdate:
        """Local: what an engine calls to exchange the buckets of `plan`."""
        return HostUpdate(self, plan, synchronize)

    def contribute_nothing(self, agreed: Agreed) -> None:
        """Local: the next update is one of other ranks, whose header was received already."""
        self._pending = agreed
        if self.native is not None:
            self.native.pending = True

    def exchange(
        self,
        plan: BucketPlan,
        index: int,
        arrays: Sequence[Buffer],
        samples: float,
        synchronize: Callable[[], bool] | None = None,
        gathered: bool = False,
    ) -> list[Buffer]:
        """Collective: replace bucket `index` of `plan` by its mean over all samples, or the sum over ranks.

        The first bucket of an update brings the header with it.

        Args:
            plan: the same on all ranks; a difference is found by the header.
            index: of the bucket; buckets are exchanged in order.
            arrays: the bucket's gradients, or one flat array of them all in the dtype of the bucket; (values,
                indices) for a sparse one. Only read. None, where the caller sums the bucket itself.
            samples: this rank's samples behind the gradients, equal at all calls of one update.
            synchronize: collective, called after the header of an update; makes replicas identical. If it
                returns True, they were not, and the gradients of ranks other than 0, taken at other
                weights, do not count in this update.
            gathered: the headers of this update are there; machine code that has the turn calls.

        Returns:
            One array for each of `arrays`, in memory that stays valid while it is referred to; for none of them the
            factor on each rank's own with which their sum is the mean.

        Raises:
            MismatchError: ranks have different plans, or another update is under way on this one.
        """
        try:
            with self.agreement.turn.handed_over() if gathered else self.agreement.turn:
                under_way = self._under_way(plan)
                if under_way != (None if index == 0 else (plan, index)):
                    raise MismatchError(
                        f"{plan.call.title}: another update of this rank is not finished: two threads exchange "
                        "gradients at the same time, or an error ended the other one. Exchange from one thread."
                    )
                result = self._exchange(plan, index, arrays, samples, synchronize, gathered)
                if index + 1 < len(plan.buckets):
                    self._go_on_with(plan, index + 1)
                return result
        except MpitrainError as error:
            self.communicator.activity.error = error
            raise

    def _exchange(
        self,
        plan: BucketPlan,
        index: int,
        arrays: Sequence[Buffer],
        samples: float,
        synchronize: Callable[[], bool] | None,
        gathered: bool,
    ) -> list[Buffer]:
        """Collective: `exchange`, in turn."""
        activity = self.communicator.activity
        activity.inside = plan, index
        try:
            if index == 0:
                self._begin(plan, samples, synchronize, gathered)
                updates = self.statistics.updates
                # The first update is not looked at: ranks may have begun it from other weights.
                if updates > 1 + LOOKED_AT_BATCHES:
                    if self.native is not None:
                        self.native.make_ready(plan)
                elif samples:
                    activity.note_gradients(updates, arrays)
                if updates > 1 and activity.phase == "start":  # machine code may have ended the first one
                    activity.phase = "compute"
            start = time.perf_counter()
            # What is not finite is told by `FiniteCheck`, with rank and variable, and not by numpy.
            with np.errstate(all="ignore"):
                bucket = plan.buckets[index]
                if not arrays:
                    result = [np.asarray(self._weights.share)]
                elif bucket.sparse:
                    result = self._sparse(plan, bucket, arrays)
                else:
                    result = self._dense(plan, bucket, arrays)
            self.statistics.exchange += time.perf_counter() - start
            if self.agreement.observer is not None:
                self.agreement.observer.ended()
        finally:
            activity.inside = None
        if index == len(plan.buckets) - 1:
            activity.updates = self.statistics.updates
            if activity.phase == "start":
                activity.phase = "compute"
        return result

    def _look(self, plan: Any, bucket: Bucket, mean: Buffer, own: Sequence[Buffer]) -> None:
        self.finite.look(plan, bucket, mean, own, self.statistics.updates)

    def _under_way(self, plan: BucketPlan) -> tuple[BucketPlan, int] | None:
        """Local: the bucket with which an update goes on that has begun here or in machine code."""
        # None while it runs: an update that an error ends is not gone on with, and the next one may begin.
        under_way, self._next = self._next, None
        taken = None if self.native is None else self.native.take(plan)
        if taken is None:
            return under_way
        index, before, after = taken
        self._weights = _Weights(None if before < 0 else before, after)
        return plan, index

    def _go_on_with(self, plan: BucketPlan, index: int) -> None:
        weights = self._weights
        if self.native is None or not self.native.give(plan, index, weights.before, weights.after):
            self._next = plan, index

    def _begin(self, plan: BucketPlan, samples: float, synchronize: Callable[[], bool] | None, gathered: bool) -> None:
        if self._pending is not None:
            agreed, self._pending = self._pending, None
            if self.native is not None:
                self.native.pending = False
        else:
            agreed = self.agreement.call(plan.call, samples=samples, idle_ok=True, gathered=gathered)
        if self.native is not None:
            self.native.agreed()  # of an update before
        self._agreed = agreed
        self._weights = weights_of(agreed, self.communicator.rank, plan.call.added_up)
        if synchronize is not None and synchronize():
            self._weights = _Weights(1.0 if self.communicator.rank == 0 else 0.0, 1.0)
        self.statistics.updates += 1
        self.statistics.waiting = self.agreement.waiting_seconds
        self.statistics.samples_global += math.fsum(agreed.samples.tolist())

    def _dense(self, plan: BucketPlan, bucket: Bucket, arrays: Sequence[Buffer]) -> list[Buffer]:
        before = self._weights.before
        offsets = bucket.offsets if len(arrays) > 1 else (0,)
        target = self._pool.take(bucket.size, bucket.dtype)
        source = target
        if len(arrays) == 1 and before is None and arrays[0].dtype == target.dtype:
            source = arrays[0].reshape(-1)
        elif before == 0.0:
            # Not by a factor: 0 times NaN is NaN, and this rank's values are not to count.
            target.fill(0)
        else:
            for array, offset in zip(arrays, offsets, strict=True):
                part = target[offset : offset + array.size]
                if before is None:
                    part[:] = array.reshape(-1)
                else:
                    # Of an array and a number NumPy 1 would multiply in the precision of the array.
                    np.multiply(array.reshape(-1), before, out=part, dtype=target.dtype, casting="unsafe")
        self._all_reduce.sum(source, target, self._weights.after)
        self._look(plan, bucket, target, arrays if before != 0.0 else ())
        return [
            target[offset : offset + array.size].reshape(array.shape).astype(array.dtype, copy=False)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def _sparse(self, plan: BucketPlan, bucket: Bucket, arrays: Sequence[Buffer]) -> list[Buffer]:
        values, indices = arrays
        factor = self._weights.share
        # No rows instead of rows times 0, as above.
        if factor == 0.0:
            values, indices = values[:0], indices[:0]
        rows = plan.specs[bucket.members[0]].shape[0]
        own = (values,)
        values, indices = exchange_rows(self.communicator, self._all_reduce, values, indices, rows, factor)
        self._look(plan, bucket, values, own)
        return [values, indices]


class HostUpdate:
    """The host's side of the updates of one plan, see `collectives.engine.HostSide`.

    Attributes:
        native: the same for machine code; None where there is none.
    """

    def __init__(self, reducer: Reducer, plan: BucketPlan, synchronize: Callable[[], bool] | None) -> None:
        self._reducer, self._plan, self._synchronize = reducer, plan, synchronize
        self.native: NativePlan | None = None if reducer.native is None else reducer.native.of(plan, self)

    def __call__(self, index: int, arrays: Sequence[Buffer], samples: float, gathered: bool = False) -> list[Buffer]:
        """Collective: see `Reducer.exchange`."""
        return self._reducer.exchange(self._plan, index, arrays, samples, self._synchronize, gathered)
