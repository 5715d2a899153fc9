"""Peak resident memory of a training job: one rank without exchange against all ranks with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpitrain.bench.interleave import interleave
from mpitrain.bench.processes import Mpirun
from mpitrain.bench.report import Row, median, ratio

ALLOWANCE_BYTES = 64 << 20
MIB = 1 << 20
STEPS = 4


def measure(mpirun: Mpirun, models: Sequence[str], ranks: int, batch_size: int, repeat: int) -> Iterator[Row]:
    """Local: one row for each model, from jobs of 1 and of `ranks` ranks in alternation.

    The allowance is the largest bucket and 64 MiB.
    """
    for name in models:
        yield _case(mpirun, name, ranks, batch_size, repeat)


def _case(mpirun: Mpirun, name: str, ranks: int, batch_size: int, repeat: int) -> Row:
    buckets: list[float] = []

    def peak(size: int) -> list[float]:
        code = f"from mpitrain.bench.memory import print_peak; print_peak({name!r}, {batch_size}, {STEPS})"
        # A process of its own each time: the peak of a process never falls.
        found = mpirun.run(size, code)
        buckets.append(found["largest_bucket_bytes"])
        return [max(found["peak_bytes"])]

    raw = interleave({"alone_bytes": lambda: peak(1), "exchanged_bytes": lambda: peak(ranks)}, repeat)
    raw["largest_bucket_bytes"] = (max(buckets),)
    return Row({"model": name, "ranks": ranks, "batch": batch_size}, raw, _figures(raw))


def print_peak(name: str, batch_size: int, steps: int) -> None:
    """Collective, in a job of its own: train some steps; rank 0 prints every rank's peak as JSON."""
    from mpitrain.world.start import init

    world = init()
    from mpitrain.bench.workload import optimizer, train_step, workload
    from mpitrain.training.optimizer import DistributedOptimizer

    load = workload(name, batch_size, seed=world.rank)
    step = train_step(load, DistributedOptimizer(optimizer(), world=world))
    for _ in range(steps):
        step()
    peaks = world.communicator.all_gather_obj(peak_bytes())
    if world.is_root:
        largest = largest_bucket_bytes(load.model.trainable_variables)
        print(json.dumps({"peak_bytes": peaks, "largest_bucket_bytes": largest}), flush=True)


def peak_bytes() -> int:
    """Local: the most memory this process has ever had resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def largest_bucket_bytes(variables: Sequence[object]) -> int:
    """Local: of the gradients of Keras variables, all dense."""
    from mpitrain.reduction.buckets import TensorSpec, itemsize, plan_buckets

    specs = [TensorSpec(v.path, tuple(v.shape), str(v.dtype)) for v in variables]  # type: ignore[attr-defined]
    return max(bucket.size * itemsize(bucket.dtype) for bucket in plan_buckets(specs).buckets)


def _figures(raw: dict[str, tuple[float, ...]]) -> dict[str, float | None]:
    alone, exchanged = median(raw["alone_bytes"]), median(raw["exchanged_bytes"])
    bucket = raw["largest_bucket_bytes"][0]
    allowed = bucket + ALLOWANCE_BYTES
    return {
        "alone MiB": alone / MIB,
        "exchanged MiB": exchanged / MIB,
        "above MiB": (exchanged - alone) / MIB,
        "largest bucket MiB": bucket / MIB,
        "allowed MiB": allowed / MIB,
        "above / allowed": ratio(exchanged - alone, allowed),
    }
