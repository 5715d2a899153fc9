"""What Python shares with machine code that exchanges on one communicator, and how machine code calls Python."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpitrain.collectives.bucket import Bucket
from mpitrain.comm.all_reduce import SMALL_BYTES, AllReduce
from mpitrain.comm.communicator import Buffer
from mpitrain.comm.mpi import MpiCommunicator
from mpitrain.errors import CollectiveError, MpitrainError
from mpitrain.native.library import PYTHON, BucketStruct, Library, SessionStruct, UpdateStruct
from mpitrain.runtime.words import address
from mpitrain.world.agreement import Agreed, Agreement
from mpitrain.world.calls import Call

EXCHANGE, GATHERED, NOT_FINITE, CONTENDED, FAILED = range(5)  # why Python is called
# What is summed, and of what: halves travel in single precision. The numbers are those of TF_DataType.
TRAVELS = {"float32": ("float32", "float16", "bfloat16"), "float64": ("float64",)}
NUMBERS = {"float32": 1, "float64": 2, "bfloat16": 14, "float16": 19}
ITEM_BYTES = {"float32": 4, "float64": 8}
UNKNOWN, FAILED_PRECONDITION = 2, 9  # of TF_Code
MOST_PLANS = 256
_ids = itertools.count(1)  # of buckets
_by_bucket: weakref.WeakValueDictionary[int, NativePlan] = weakref.WeakValueDictionary()


class Spec(Protocol):
    """One tensor of a plan."""

    @property
    def size(self) -> int:
        """Elements."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, all of it known."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        ...


class Plan(Protocol):
    """What ranks agree on, and the tensors that travel together."""

    @property
    def call(self) -> Call:
        """What all ranks have in common."""
        ...

    @property
    def added_up(self) -> bool:
        """It is the sum over ranks, not the mean over samples."""
        ...

    @property
    def specs(self) -> Sequence[Spec]:
        """All tensors."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Those that travel together."""
        ...


class Python(Protocol):
    """The twin of the machine code for one plan, which does what is not usual."""

    def __call__(self, index: int, arrays: Sequence[Buffer], samples: float, gathered: bool = False) -> list[Buffer]:
        """Collective: the means of bucket `index`; with `gathered` the headers are there, and the turn is taken."""
        ...


@dataclass(frozen=True)
class Counted:
    """What is kept of updates of variables, and not of other collectives.

    Attributes:
        statistics: float64, see `reduction.statistics`.
        look: collective, where a mean is not finite: plan, bucket, mean, what this rank put in; None where it may be.
        looked_at_bytes: of each bucket, which are looked at in every update; all of them in each `whole_every`-th.
    """

    statistics: Buffer
    look: Callable[[Any, Bucket, Buffer, Sequence[Buffer]], None] | None
    looked_at_bytes: int
    whole_every: int


class NativePlan:
    """A plan as machine code knows it.

    Attributes:
        plan: what is exchanged.
        python: does it where machine code leaves it to Python.
        addresses: of each bucket, for the operation; None where Python exchanges it.
        error: raised by Python in the latest call.
    """

    def __init__(self, session: NativeSession, struct: Any, plan: Plan, python: Python, counts: bool) -> None:
        self.plan, self.python = plan, python
        self.error: BaseException | None = None
        self.is_counted = counts
        sizes = [bucket.size * ITEM_BYTES.get(bucket.dtype, SMALL_BYTES) for bucket in plan.buckets]
        self.struct: Any = UpdateStruct(
            *(ctypes.addressof(struct), plan.call.signature, plan.added_up, len(plan.buckets)),
            *(max(sizes) < SMALL_BYTES, counts, False),
        )
        self._kept: list[Any] = [session]  # memory that machine code looks at
        self.ids: list[int] = []
        self.addresses: list[int | None] = []
        for index, bucket in enumerate(plan.buckets):
            self.ids.append(next(_ids))
            self.addresses.append(self._bucket(index, bucket) if self._is_native(bucket) else None)

    def _is_native(self, bucket: Bucket) -> bool:
        dtypes = {self.plan.specs[position].dtype for position in bucket.members}
        return not bucket.sparse and dtypes <= set(TRAVELS.get(bucket.dtype, ()))

    def _bucket(self, index: int, bucket: Bucket) -> int:
        specs = [self.plan.specs[position] for position in bucket.members]
        lists = (bucket.offsets, [spec.size for spec in specs], [NUMBERS[spec.dtype] for spec in specs])
        arrays = [np.array(numbers, np.int64) for numbers in lists]
        one = BucketStruct(
            ctypes.addressof(self.struct),
            *(index, self.ids[index], NUMBERS[bucket.dtype], bucket.size, len(specs)),
            *map(address, arrays),
        )
        self._kept += [one, *arrays]
        return ctypes.addressof(one)


class NativeSession:
    """One communicator.

    Args:
        library: the machine code.
        counted: of updates of variables; None for other collectives.

    Attributes:
        left_to_python: buckets of which machine code has made nothing.
    """

    def __init__(
        self,
        library: Library,
        communicator: MpiCommunicator,
        agreement: Agreement,
        all_reduce: AllReduce,
        counted: Counted | None = None,
    ) -> None:
        self.left_to_python = 0
        self._communicator, self._agreement, self._counted = communicator, agreement, counted
        self._all_reduce = all_reduce
        known = counted or Counted(np.zeros(4), None, 0, 1)
        self._callback = PYTHON(self._called)
        words = (known.statistics, communicator.activity.words, agreement.turn.words)
        self._kept: list[Buffer] = [
            agreement.own,
            agreement.words,
            *words,
            all_reduce.words,
        ]  # looked at by machine code
        self._session: Any = SessionStruct(
            looks=known.look is not None,
            survives=communicator.can_shrink,
            small_bytes=SMALL_BYTES,
            looked_at_bytes=known.looked_at_bytes,
            whole_every=known.whole_every,
            header_bytes=agreement.own.nbytes,
            mine=address(agreement.own),
            waiting=address(agreement.words),
            **dict(zip(("statistics", "activity", "turn"), map(address, words), strict=True)),
            how=address(all_reduce.words),
            python=ctypes.cast(self._callback, ctypes.c_void_p),
        )
        self._connect()
        # By the identity of the plan, which they keep; those of graphs are there for as long as these.
        self._plans: weakref.WeakValueDictionary[int, NativePlan] = weakref.WeakValueDictionary()
        self._latest: dict[int, NativePlan] = {}  # in the order of use: what is exchanged eagerly
        agreement.turn.share_with(library)
        communicator.activity.bucket_of = _bucket_of

    def _connect(self) -> None:
        """Local: it exchanges with the ranks that the communicator has now."""
        session, communicator, agreement = self._session, self._communicator, self._agreement
        self._seen = np.zeros_like(agreement.headers)
        self._kept += [agreement.headers, self._seen]  # and those before: messages of lost ranks may still arrive there
        handles = ("comm", "byte", "float32", "float64", "sum", "in_place")
        for name, handle in zip(handles, communicator.handles(), strict=True):
            setattr(session, name, handle)
        session.rank, session.size, session.crowded = communicator.rank, communicator.size, communicator.crowded
        session.pairs, session.largest_bytes = self._all_reduce.pairs, communicator.largest_bytes
        session.all, session.seen = address(agreement.headers), address(self._seen)
        session.scratch[:], session.scratch_bytes[:] = [None] * 3, [0] * 3  # which is left behind as well
        session.ranks, session.failed = agreement.turn.ranks, 0

    def begin_anew(self) -> None:
        """Local: ranks were lost, perhaps in the middle of an update."""
        self._session.pending = self._session.fresh = 0
        self._session.under_way = None

    def of(self, plan: Plan, python: Python) -> NativePlan:
        """Local: the record of a plan; `python` replaces the one that it was given before."""
        own = self._plans.get(id(plan))
        if own is None:
            own = self._plans[id(plan)] = NativePlan(self, self._session, plan, python, self._counted is not None)
            _by_bucket.update(dict.fromkeys(own.ids, own))
        own.python = python
        self._latest.pop(id(plan), None)
        self._latest[id(plan)] = own
        if len(self._latest) > MOST_PLANS:
            del self._latest[next(iter(self._latest))]
        return own

    def agreed(self) -> Agreed | None:
        """Local: what the headers of the latest update said, if machine code has made one since the last call."""
        if not self._session.fresh:
            return None
        self._session.fresh = 0
        return self._agreement.everyone(self._seen.copy())

    @property
    def pending(self) -> bool:
        """Whether the headers of the next update were received already, by Python."""
        return bool(self._session.pending)

    @pending.setter
    def pending(self, pending: bool) -> None:
        self._session.pending = pending

    def take(self, plan: Plan) -> tuple[int, float, float] | None:
        """Local: Python goes on with an update that is under way; the next bucket, and the weights before and after.

        None if none is under way. The bucket is -1 where it is one of another plan.
        """
        session = self._session
        if not session.under_way:
            return None
        known = self._plans.get(id(plan))
        is_own = known is not None and ctypes.addressof(known.struct) == session.under_way
        session.under_way = None
        return (session.next if is_own else -1, session.before, session.after)

    def give(self, plan: Plan, index: int, before: float | None, after: float) -> bool:
        """Local: bucket `index` of an update under way is next; False where machine code does not know the plan."""
        known = self._plans.get(id(plan))
        if known is None:
            return False
        session = self._session
        session.next, session.before, session.after = index, -1.0 if before is None else before, after
        session.under_way = ctypes.addressof(known.struct)
        return True

    def make_ready(self, plan: Plan) -> None:
        """Local: Python has begun such an update, and has nothing to do in those to come."""
        known = self._plans.get(id(plan))
        if known is not None:
            known.struct.ready = 1

    def _called(
        self,
        bucket: int,
        why: int,
        detail: int,
        gradients: Any,
        means: Any,
        samples: float,
        mean: int | None,
        message: int,
        message_bytes: int,
    ) -> int:
        """Collective: see `python_t` in `native.h`."""
        plan: NativePlan | None = None
        try:  # what is raised outside of it would be lost, and the call taken for a good one
            own = BucketStruct.from_address(bucket)
            plan = _by_bucket[own.id]
            plan.error = None
            if why in (EXCHANGE, GATHERED):
                self._exchange(plan, own.index, gradients, means, samples, why == GATHERED)
            elif why == NOT_FINITE:
                self._look(plan, own.index, gradients, detail, mean)
            elif why == CONTENDED:
                with self._agreement.turn:
                    pass  # which raises
            else:
                raise self._communicator.error(detail)
        except BaseException as error:
            is_counted = plan is None or plan.is_counted
            if plan is not None:
                plan.error = error
            if is_counted and isinstance(error, MpitrainError):
                self._communicator.activity.error = error  # else TensorFlow's own is all that is told
            text = f"{type(error).__name__}: {error}".encode()[: message_bytes - 1] + b"\0"
            ctypes.memmove(message, text, len(text))
            return UNKNOWN if is_counted or not isinstance(error, CollectiveError) else FAILED_PRECONDITION
        return 0

    def _exchange(
        self, plan: NativePlan, index: int, gradients: Any, means: Any, samples: float, gathered: bool
    ) -> None:
        self.left_to_python += 1
        if self._session.ranks != self._agreement.turn.ranks:
            self._connect()
        specs = [plan.plan.specs[position] for position in plan.plan.buckets[index].members]
        arrays = [_array(gradients[i], spec.size, spec.dtype, spec.shape) for i, spec in enumerate(specs)]
        results = plan.python(index, arrays, samples, gathered)
        for i, (spec, result) in enumerate(zip(specs, results, strict=True)):
            _array(means[i], spec.size, spec.dtype, spec.shape)[...] = result

    def _look(self, plan: NativePlan, index: int, gradients: Any, kept: int, mean: int | None) -> None:
        bucket = plan.plan.buckets[index]
        own: list[Buffer] = []
        if self._session.before != 0:
            specs = [plan.plan.specs[position] for position in bucket.members]
            own = [_array(gradients[i], kept or spec.size, spec.dtype) for i, spec in enumerate(specs)]
        whole = _array(mean, bucket.size, bucket.dtype)
        assert self._counted is not None
        assert self._counted.look is not None
        with np.errstate(all="ignore"):
            self._counted.look(plan.plan, bucket, whole, own)


def _bucket_of(number: int) -> Any:
    """Local: what `Activity.inside` is while machine code exchanges a bucket."""
    update = _by_bucket.get(number)
    return None if update is None else (update.plan, update.ids.index(number))


def _array(place: int | None, size: int, dtype: str, shape: Sequence[int] | None = None) -> Buffer:
    """Local: memory as an array, which must not outlive it."""
    kind: Any = dtype
    if dtype == "bfloat16":
        import tensorflow as tf

        kind = tf.bfloat16.as_numpy_dtype
    kind = np.dtype(kind)
    flat = np.frombuffer((ctypes.c_char * (size * kind.itemsize)).from_address(place or 0), kind)
    return flat if shape is None else flat.reshape(shape)
