"""What a `Reducer` shares with machine code, and how machine code calls it."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mpitrain.collectives.bucket import Bucket
from mpitrain.comm.all_reduce import SMALL_BYTES, AllReduce
from mpitrain.comm.mpi import MpiCommunicator
from mpitrain.native.library import PYTHON, BucketStruct, Library, SessionStruct, UpdateStruct
from mpitrain.reduction.buckets import BucketPlan, itemsize
from mpitrain.reduction.finite import LOOKED_AT_BYTES, WHOLE_EVERY, FiniteCheck
from mpitrain.reduction.statistics import Statistics
from mpitrain.runtime.words import address
from mpitrain.world.agreement import Agreed, Agreement

Buffer = np.ndarray[Any, Any]
EXCHANGE, GATHERED, NOT_FINITE, CONTENDED, FAILED = range(5)  # why Python is called
# What is summed, and of what: halves travel in single precision. The numbers are those of TF_DataType.
TRAVELS = {"float32": ("float32", "float16", "bfloat16"), "float64": ("float64",)}
NUMBERS = {"float32": 1, "float64": 2, "bfloat16": 14, "float16": 19}
MOST_UPDATES = 256
_ids = itertools.count(1)  # of buckets
_by_bucket: weakref.WeakValueDictionary[int, NativeUpdate] = weakref.WeakValueDictionary()


class Python(Protocol):
    """The twin of the machine code: `Reducer.exchange` of one plan."""

    def __call__(self, index: int, arrays: Sequence[Buffer], samples: float, gathered: bool = False) -> list[Buffer]:
        """Collective: the means of a bucket."""
        ...


class NativeUpdate:
    """A plan as machine code knows it.

    Attributes:
        plan: what is exchanged.
        python: does it where machine code leaves it to Python.
        addresses: of each bucket, for the operation; None where Python exchanges it.
    """

    def __init__(self, reducer: NativeReducer, session: Any, plan: BucketPlan, python: Python) -> None:
        self.plan, self.python = plan, python
        sizes = [bucket.size * itemsize(bucket.dtype) for bucket in plan.buckets]
        self.struct: Any = UpdateStruct(
            ctypes.addressof(session),
            plan.call.signature,
            plan.call.added_up,
            len(plan.buckets),
            max(sizes) < SMALL_BYTES,
            0,
        )
        self._kept: list[Any] = [reducer]  # memory that machine code looks at
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


class NativeReducer:
    """One communicator.

    Args:
        library: the machine code.
        finite: asked where a mean is not finite.

    Attributes:
        left_to_python: buckets of which machine code has made nothing.
    """

    def __init__(
        self,
        library: Library,
        communicator: MpiCommunicator,
        agreement: Agreement,
        all_reduce: AllReduce,
        statistics: Statistics,
        finite: FiniteCheck,
    ) -> None:
        self.library = library
        self._communicator, self._agreement, self._finite, self._statistics = (
            communicator,
            agreement,
            finite,
            statistics,
        )
        self._all_reduce = all_reduce
        self._seen = np.zeros_like(agreement.headers)
        self._callback = PYTHON(self._called)
        handles, words = communicator.handles(), communicator.activity.words
        memory = [agreement.own, agreement.headers, self._seen, agreement.words, statistics.words, words]
        memory += [agreement.turn.words, all_reduce.words]
        self._kept = memory
        self._session: Any = SessionStruct(
            *handles,
            *(communicator.rank, communicator.size, communicator.crowded, finite.action != "ignore", all_reduce.pairs),
            *(SMALL_BYTES, communicator.largest_bytes, LOOKED_AT_BYTES, WHOLE_EVERY, agreement.own.nbytes),
            *map(address, memory),
            ctypes.cast(self._callback, ctypes.c_void_p),
        )
        self.left_to_python = 0
        self._updates: dict[int, NativeUpdate] = {}  # by the identity of their plan, which they keep
        agreement.turn.native = library
        communicator.activity.bucket_of = _bucket_of

    def update(self, plan: BucketPlan, python: Python) -> NativeUpdate:
        """Local: the record of a plan; `python` replaces the one that it was given before."""
        known = self._updates.get(id(plan))
        if known is not None:
            known.python = python
            return known
        if len(self._updates) >= MOST_UPDATES:
            self._updates.clear()  # graphs keep theirs
        own = self._updates[id(plan)] = NativeUpdate(self, self._session, plan, python)
        _by_bucket.update(dict.fromkeys(own.ids, own))
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

    def take(self, plan: BucketPlan) -> tuple[int, float, float] | None:
        """Local: Python goes on with an update that is under way; the next bucket, and the weights before and after.

        None if none is under way. The bucket is -1 where it is one of another plan.
        """
        session = self._session
        if not session.under_way:
            return None
        known = self._updates.get(id(plan))
        is_own = known is not None and ctypes.addressof(known.struct) == session.under_way
        session.under_way = None
        return (session.next if is_own else -1, session.before, session.after)

    def give(self, plan: BucketPlan, index: int, before: float | None, after: float) -> bool:
        """Local: bucket `index` of an update under way is next; False where machine code does not know the plan."""
        known = self._updates.get(id(plan))
        if known is None:
            return False
        session = self._session
        session.next, session.before, session.after = index, -1.0 if before is None else before, after
        session.under_way = ctypes.addressof(known.struct)
        return True

    def make_ready(self, plan: BucketPlan) -> None:
        """Local: Python has begun such an update, and has nothing to do in those to come."""
        known = self._updates.get(id(plan))
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
        try:
            own = BucketStruct.from_address(bucket)
            update = _by_bucket[own.id]
            if why in (EXCHANGE, GATHERED):
                self._exchange(update, own.index, gradients, means, samples, why == GATHERED)
            elif why == NOT_FINITE:
                self._look(update, own.index, gradients, detail, mean)
            elif why == CONTENDED:
                with self._agreement.turn:
                    pass  # which raises
            else:
                raise self._communicator.error(detail)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".encode()[: message_bytes - 1] + b"\0"
            ctypes.memmove(message, text, len(text))
            return 1
        return 0

    def _exchange(
        self, update: NativeUpdate, index: int, gradients: Any, means: Any, samples: float, gathered: bool
    ) -> None:
        self.left_to_python += 1
        specs = [update.plan.specs[position] for position in update.plan.buckets[index].members]
        arrays = [_array(gradients[i], spec.size, spec.dtype, spec.shape) for i, spec in enumerate(specs)]
        results = update.python(index, arrays, samples, gathered)
        for i, (spec, result) in enumerate(zip(specs, results, strict=True)):
            _array(means[i], spec.size, spec.dtype, spec.shape)[...] = result

    def _look(self, update: NativeUpdate, index: int, gradients: Any, kept: int, mean: int | None) -> None:
        bucket = update.plan.buckets[index]
        own: list[Buffer] = []
        if self._session.before != 0:
            specs = [update.plan.specs[position] for position in bucket.members]
            own = [_array(gradients[i], kept or spec.size, spec.dtype) for i, spec in enumerate(specs)]
        whole = _array(mean, bucket.size, bucket.dtype)
        with np.errstate(all="ignore"):
            self._finite.look(update.plan, bucket, whole, own, self._statistics.updates)


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
