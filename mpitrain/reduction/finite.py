"""Mean gradients that are infinite or not a number: noticed where the mean is, then traced to rank and variable.

The mean has the same bits on all ranks, so all of them notice in the same update, and can then ask each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpitrain.collectives.bucket import Bucket
from mpitrain.comm.communicator import Buffer, Communicator
from mpitrain.errors import NonFiniteError
from mpitrain.reduction.buckets import BucketPlan
from mpitrain.runtime import streams
from mpitrain.runtime.counted import counted
from mpitrain.world.agreement import Agreement

# Of each bucket this much is looked at in every update, all of it in each WHOLE_EVERY-th. A value that is not finite
# on its way back through the model enters whole columns of a kernel's gradient, so its first rows show it.
LOOKED_AT_BYTES = 1 << 20
WHOLE_EVERY = 16
NAMED = 3
LOSS = "loss"
REMEDY = (
    "Look at that rank's samples, lower the learning rate, or clip gradients; --non-finite (MPITRAIN_NON_FINITE) "
    "warn or ignore goes on."
)


@dataclass(frozen=True)
class _Found:
    """What one rank has in its own gradient of one variable."""

    name: str
    nans: int
    infinite: int


class FiniteCheck:
    """Looks at the means of one job.

    Args:
        agreement: knows the hosts.
    """

    def __init__(self, communicator: Communicator, agreement: Agreement) -> None:
        self._communicator, self._agreement = communicator, agreement
        self.action = "warn"  # `stop`, `warn` or `ignore`
        # owners of updates whose gradients are scaled until they overflow; they are not looked at
        self.may_overflow: set[str] = set()
        self._told: set[str] = set()

    def look(self, plan: BucketPlan, bucket: Bucket, mean: Buffer, own: Sequence[Buffer], update: int) -> None:
        """Collective where `mean` is not finite, else local.

        Args:
            plan: of the update.
            bucket: of the plan.
            mean: of all ranks, the same bits everywhere.
            own: what this rank put into the bucket; nothing, if that is not in the mean.
            update: its number.

        Raises:
            NonFiniteError: on all ranks, if that is the action.
        """
        if self.action == "ignore":
            return
        flat = mean if mean.ndim == 1 else mean.reshape(-1)
        if flat.nbytes > LOOKED_AT_BYTES and update % WHOLE_EVERY:  # also below: machine code on another rank does so
            flat = flat[: LOOKED_AT_BYTES // flat.itemsize]
        total = np.add.reduce(flat)
        # A sum is finite only if all its terms are, and only then less itself 0. One that overflows is looked at again.
        if total - total == 0 or plan.call.owner in self.may_overflow or _is_finite(plan, bucket, flat):
            return
        # The same on all ranks, like the mean: none traces while the others go on.
        if self.action == "warn" and plan.call.title in self._told:
            return
        self._told.add(plan.call.title)
        text = self._trace(plan, bucket, own, update)
        if self.action == "stop":
            raise NonFiniteError(text)
        if self._communicator.rank == 0:
            streams.write_stderr(f"mpitrain: warning: {text}\n")

    def note_loss(self, loss: float, updates: int, hosts: Sequence[str]) -> None:
        """Local: this rank's loss is not finite.

        Raises:
            NonFiniteError: on this rank, which ends the job, if that is the action.
        """
        rank = self._communicator.rank
        if self.action == "ignore" or (self.action == "warn" and LOSS in self._told):
            return
        self._told.add(LOSS)
        text = f"the loss is {loss} on rank {rank} ({hosts[rank]}) after update {updates}. {REMEDY}"
        if self.action == "stop":
            raise NonFiniteError(text)
        streams.write_stderr(f"mpitrain: warning: {text}\n")

    def _trace(self, plan: BucketPlan, bucket: Bucket, own: Sequence[Buffer], update: int) -> str:
        """Collective: on which rank the value came up, and in the gradient of which variable."""
        everyone: list[list[_Found]] = self._communicator.all_gather_obj(list(_found(plan, bucket, own)))
        places = [(rank, one) for rank, found in enumerate(everyone) for one in found]
        what = f"the mean gradient is not finite in update {update} ({plan.call.title})"
        if not places:
            return f"{what}: each rank's own is finite, so their sum is too large. Lower the learning rate, or clip"
        texts = [
            f"{one.name} on {self._agreement.name([rank])} "
            f"({one.nans:,} NaN, {counted(one.infinite, 'infinite value')})"
            for rank, one in places[:NAMED]
        ]
        more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
        return f"{what}: first in {', '.join(texts)}{more}. {REMEDY}"


def _is_finite(plan: BucketPlan, bucket: Bucket, flat: Buffer) -> bool:
    """Local: whether all members are; what lies between them says nothing."""
    if bucket.sparse:
        return bool(np.isfinite(flat).all())
    sizes = [plan.specs[position].size for position in bucket.members]
    return all(
        np.isfinite(flat[offset : offset + size]).all() for offset, size in zip(bucket.offsets, sizes, strict=True)
    )


def _found(plan: BucketPlan, bucket: Bucket, own: Sequence[Buffer]) -> list[_Found]:
    """Local: variables whose own gradient is not finite."""
    names = [plan.specs[position].name for position in bucket.members]
    if bucket.sparse:
        parts: Sequence[Buffer] = own[:1]
    elif len(own) == 1 and len(names) > 1:  # TensorFlow has joined them
        parts = np.split(own[0].reshape(-1), bucket.offsets[1:])
    else:
        parts = own
    found = []
    for name, part in zip(names, parts, strict=False):
        nans, infinite = int(np.isnan(part).sum()), int(np.isinf(part).sum())
        if nans or infinite:
            found.append(_Found(name, nans, infinite))
    return found
