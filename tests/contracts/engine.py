"""What every `CollectiveEngine` must do: tests take one, its World, and a way to call it: at once or in a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.collectives.engine import Averaging, CollectiveEngine
from mpitrain.collectives.host import Reduction
from mpitrain.comm.communicator import Buffer
from mpitrain.reduction.buckets import TensorSpec, plan_buckets
from mpitrain.reduction.graph import mean_gradients
from mpitrain.reduction.reducer import Reducer
from mpitrain.world.world import World

Way = Callable[[Callable[..., Any]], Callable[..., Any]]
Check = Callable[[CollectiveEngine, World, Way], None]
WAYS: dict[str, Way] = {"eager": lambda function: function, "graph": functools.partial(tf.function, autograph=False)}
TOLERANCES = {"float16": 1e-3, "bfloat16": 1e-2}


def value(rank: int, dtype: str, shape: tuple[int, ...]) -> tf.Tensor:
    """Small whole numbers: sums and products are exact in every dtype."""
    numbers = np.random.default_rng(rank).integers(0, 3, shape)
    return tf.cast(tf.constant(numbers > 0 if dtype == "bool" else numbers), dtype)


def reduced(op: str, dtype: str, shape: tuple[int, ...], size: int) -> Any:
    """What the reduction of `value` over ranks is."""
    wide = np.stack([np.asarray(tf.cast(value(rank, dtype, shape), "complex128")) for rank in range(size)])
    if dtype == "bool":
        return wide.any(0) if op in ("sum", "max") else wide.all(0)
    functions: dict[str, Any] = {"sum": np.sum, "mean": np.sum, "product": np.prod, "min": np.min, "max": np.max}
    total = functions[op](wide, axis=0)
    if op != "mean":
        return total
    return total.real // size if tf.as_dtype(dtype).is_integer else total / size


def check_all_reduce(engine: CollectiveEngine, world: World, way: Way) -> None:
    """Every dtype and reduction that it says it has."""
    cases = [
        (dtype, op, shape)
        for dtype in sorted(engine.capabilities.dtypes)
        for op in sorted(engine.capabilities.ops - {"adasum"})
        if "complex" not in dtype or op not in ("min", "max")
        for shape in ((), (0,), (2, 3))
        if way is WAYS["eager"] or len(shape) == 2 or dtype == "float32"  # each is a node, which takes longer
    ]

    def reduce(*tensors: tf.Tensor) -> list[tf.Tensor]:  # all of them in one graph, which is traced once
        return [engine.all_reduce(t, Reduction(op)) for t, (_, op, _) in zip(tensors, cases, strict=True)]

    results = way(reduce)(*[value(world.rank, dtype, shape) for dtype, _, shape in cases])
    for result, (dtype, op, shape) in zip(results, cases, strict=True):
        assert (result.dtype.name, tuple(result.shape)) == (dtype, shape)
        np.testing.assert_allclose(
            np.asarray(tf.cast(result, "complex128")),
            reduced(op, dtype, shape, world.size),
            TOLERANCES.get(dtype, 1e-6),
            err_msg=f"{op} of {dtype}{shape}",
        )


def check_adasum(engine: CollectiveEngine, world: World, way: Way) -> None:
    """Of what is the same on all ranks, it is that."""
    if "adasum" in engine.capabilities.ops and world.size in (1, 2, 4):
        result = way(lambda tensor: engine.all_reduce(tensor, Reduction("adasum")))(tf.constant([1.0, -2.0]))
        np.testing.assert_allclose(result, [1.0, -2.0], rtol=1e-6)


def check_factors(engine: CollectiveEngine, world: World, way: Way) -> None:
    """Before and after; integers are cut."""

    def reduce(tensor: tf.Tensor) -> tf.Tensor:
        return engine.all_reduce(tensor, Reduction("sum", before=0.5, after=3.0))

    for dtype, wanted in (("float32", 10.5), ("float16", 10.5), ("float64", 10.5), ("int32", 9.0)):
        result = way(reduce)(tf.constant([7, 0], dtype))
        assert result.dtype.name == dtype
        assert np.asarray(tf.cast(result, "float64")).tolist() == [wanted * world.size, 0.0]


def check_rows(engine: CollectiveEngine, world: World, way: Way) -> None:
    """Gathering, scattering and sending of rows, and a broadcast."""
    rank, size = world.rank, world.size
    root, ranks = size - 1, range(size)

    def all_of_them(rows: tf.Tensor, scalar: tf.Tensor, sent: tf.Tensor, splits: tf.Tensor) -> tuple[Any, ...]:
        return (
            engine.all_gather(rows, "rows"),
            engine.all_gather(scalar),
            engine.broadcast(scalar, root),
            engine.reduce_scatter(tf.range(2 * size + 1), Reduction("sum")),
            engine.all_to_all(tf.repeat(scalar, size), None)[0],
            *engine.all_to_all(sent, splits),
        )

    sent = [100 * rank + other for other in ranks for _ in range(other + 1)]
    splits = tf.constant([other + 1 for other in ranks], tf.int64)
    gathered, scalars, of_root, part, equal, received, counts = way(all_of_them)(
        value(rank, "float32", (rank, 2)), tf.constant(rank), tf.constant(sent), splits
    )
    np.testing.assert_array_equal(gathered, np.concatenate([value(r, "float32", (r, 2)) for r in ranks]))
    assert scalars.numpy().tolist() == [*ranks]
    assert int(of_root) == root
    base, extra = divmod(2 * size + 1, size)
    start = rank * base + min(rank, extra)
    assert part.numpy().tolist() == [size * row for row in range(start, start + base + (rank < extra))]
    assert equal.numpy().tolist() == [*ranks]
    assert (received.dtype, counts.dtype) == (tf.int32, tf.int32)
    assert received.numpy().tolist() == [100 * r + rank for r in ranks for _ in range(rank + 1)]
    assert counts.numpy().tolist() == [rank + 1] * size


SPECS = (
    TensorSpec("kernel", (3, 2), "float32"),
    TensorSpec("bias", (), "float32"),
    TensorSpec("half", (5,), "bfloat16"),
    TensorSpec("double", (4,), "float64"),
    TensorSpec("nothing", (0, 2), "float32"),
    TensorSpec("large", (300_000,), "float32"),
    TensorSpec("table", (50, 2), "float32", sparse=True),
)


def gradients(rank: int) -> list[Any]:
    """Of SPECS, each an array, or the whole table of a sparse one."""
    random = np.random.default_rng(rank)
    return [np.asarray(random.standard_normal(spec.shape)) * (spec.name != "table") for spec in SPECS]


def reducer_of(world: World) -> Reducer:
    """A new one."""
    return Reducer(world.communicator, world.agreement, world.all_reduce)


def check_average(engine: CollectiveEngine, world: World, way: Way) -> None:
    """Buckets of every kind, weighted by samples, with the same bits on all ranks; some ranks have none."""
    _check_average(engine, world, way, SPECS)


def check_dense_average(engine: CollectiveEngine, world: World, way: Way) -> None:
    """Without rows: what an engine can do that is not `not_in_xla`."""
    _check_average(engine, world, way, SPECS[:-1])


def _check_average(engine: CollectiveEngine, world: World, way: Way, specs: Sequence[TensorSpec]) -> None:
    reducer, plan = reducer_of(world), plan_buckets(specs)
    assert any(bucket.flat for bucket in plan.buckets)
    assert len(plan.buckets) > 2

    def mean(samples: tf.Tensor, *dense: tf.Tensor) -> list[Any]:
        rows = tf.fill([2, 2], 1.0), tf.constant([world.rank, 49], tf.int64)
        slices = [tf.IndexedSlices(*rows, tf.constant([50, 2], tf.int64))][: specs[-1].sparse]
        return [tf.convert_to_tensor(m) for m in mean_gradients(engine, reducer, plan, [*dense, *slices], samples)]

    own = [tf.cast(g, spec.dtype) for g, spec in zip(gradients(world.rank)[:-1], SPECS, strict=False)]
    average = way(mean)
    for weigh in (lambda rank: 4.0, lambda rank: rank + 1.0, lambda rank: float(rank == 0)):
        weights = np.array([weigh(rank) for rank in range(world.size)])
        weights /= weights.sum()
        means = average(tf.constant(weigh(world.rank), tf.float64), *own)
        for index, (spec, found) in enumerate(zip(specs, means, strict=True)):
            wanted: Any = sum(w * gradients(rank)[index] for rank, w in enumerate(weights))
            if spec.sparse:
                for rank, weight in enumerate(weights):
                    wanted[[rank, 49]] += weight
            assert (found.dtype.name, tuple(found.shape)) == (spec.dtype, spec.shape)
            tolerance = {"bfloat16": 2e-2, "float64": 1e-14}.get(spec.dtype, 2e-6)
            np.testing.assert_allclose(tf.cast(found, "float64"), wanted, rtol=0, atol=tolerance)
        bits = b"".join(tf.io.serialize_tensor(found).numpy() for found in means)
        assert len(set(world.communicator.all_gather_obj(bits))) == 1
    assert reducer.statistics.updates == (3 if world.size > 1 else reducer.statistics.updates)


def check_shares(engine: CollectiveEngine, world: World, way: Way) -> None:
    """Who sums a bucket by itself gets the factor for it; other buckets of the update come before and after."""
    reducer = reducer_of(world)
    plan = plan_buckets([TensorSpec(name, (300_000,), "float32") for name in "abc"])

    def exchange(index: int, arrays: Sequence[Buffer], samples: float) -> list[Buffer]:
        return reducer.exchange(plan, index, arrays, samples)

    def update(samples: tf.Tensor, own: tf.Tensor) -> list[tf.Tensor]:
        found: list[tf.Tensor] = []

        def body(averaging: Averaging) -> None:
            found.extend(averaging.mean([own]))
            share = averaging.share()
            found.append(averaging.engine.all_reduce(own * tf.cast(share, own.dtype), Reduction("sum")))
            found.append(averaging.engine.all_reduce(share, Reduction("sum")))
            found.extend(averaging.mean([own]))

        engine.average(exchange, plan.buckets, samples, body)
        return found

    run = way(update)
    for _ in range(2):
        first, second, one, third = run(tf.constant(world.rank + 1.0, tf.float64), tf.fill([300_000], world.rank + 1.0))
        assert float(one) == pytest.approx(1.0)
        wanted = sum((rank + 1.0) ** 2 for rank in range(world.size)) / sum(rank + 1.0 for rank in range(world.size))
        for found in (first, second, third):
            np.testing.assert_allclose(found, np.full(300_000, wanted), rtol=1e-6)


CHECKS: tuple[Check, ...] = (check_all_reduce, check_adasum, check_factors, check_rows, check_average, check_shares)
each_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
