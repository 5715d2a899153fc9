"""Numbers that Keras reports, over the samples of all ranks: sums and counts, not means of means."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from mpitrain.errors import AgreedError
from mpitrain.strategies.replicas import describe
from mpitrain.training.derived import Number, derived
from mpitrain.training.metric_states import Numbers, Result, over_ranks
from mpitrain.world.calls import Call
from mpitrain.world.world import World

Path = tuple[str | int, ...]  # of a value: its name in the logs, then its places in lists and dictionaries
Leaves = dict[Path, Any]
ABSENT, SCALAR, ELSE = 0.0, 1.0, 2.0
CLOSE = 1e-6  # a graph may compute a float32 number with other instructions than an eager call


@dataclass(frozen=True)
class LogsCall(Call):
    """What ranks must have in common to reduce values of logs."""

    paths: tuple[Path, ...]  # of the values
    results: tuple[str, ...]  # names of the metrics' results
    variables: str  # of the metrics, see `replicas.describe`

    def __str__(self) -> str:
        """Local: the paths and names in the first line."""
        return f"logs {json.dumps(self.paths)} of {[*self.results]}, {self.variables}"


def global_metrics(metrics: Sequence[Any], result: Result, world: World) -> Numbers:
    """Collective: Keras metrics over the samples of all ranks."""
    variables = [variable for metric in metrics for variable in metric.variables]
    with world.agreement.turn:
        world.agreement.call(f"metrics of {describe(variables)}")
        return over_ranks(metrics, result, world)


class Logs:
    """The numbers of one model's steps, which Keras calls logs.

    Most are results of metrics, which may go by other names in the logs. So a number that equals the result of a
    metric on every rank that has it becomes that metric's result over all ranks. One that the step makes of metrics,
    such as a ratio of two, is made anew of their states over all ranks. What is left, such as the loss of one batch,
    is averaged, weighted by samples.

    Args:
        metrics: gives the metrics of the model.
        result: gives their results on this rank, by name.
        has_rows: whether arrays in the logs may have a row for each sample.
    """

    def __init__(
        self,
        metrics: Callable[[], Sequence[Any]],
        result: Result,
        world: World,
        has_rows: Callable[[], bool] = lambda: False,
    ) -> None:
        self._metrics, self._result, self._world, self._has_rows = metrics, result, world, has_rows
        self._derived: dict[tuple[str, Path], Number] = {}
        self._told: set[Path] = set()

    def noted(self, kind: str, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Local: a step of the model, of which it is noted, when it is traced, what it makes of metrics.

        Args:
            kind: `train` or `test`.
            step: returns logs.
        """

        def call(data: Any) -> Any:
            logs = step(data)
            if not tf.executing_eagerly() and isinstance(logs, dict):
                found = derived(_places(logs), self._metrics())
                self._derived |= {(kind, path): number for path, number in found.items()}
            return logs

        return call

    def call(self, paths: Iterable[Path]) -> LogsCall:
        """Local: to be agreed on before the values at these paths are reduced."""
        variables = [variable for metric in self._metrics() for variable in metric.variables]
        return LogsCall((*paths,), (*sorted(self._result()),), describe(variables))

    def reduce(self, paths: Sequence[Path], own: Leaves, samples: float) -> Numbers:
        """Collective: logs of the values at those paths over all ranks. To be agreed on before.

        Args:
            paths: the same on all ranks.
            own: what this rank has of them.
            samples: of this rank, behind its numbers.

        Raises:
            AgreedError: on all ranks: a value cannot be combined.
        """
        results = dict(sorted(_flat(self._result()).items()))
        told_by_this = [_told(own.get(path), samples, results.values()) for path in paths]
        unknown = [path for path, told in zip(paths, told_by_this, strict=True) if not any(told[4:])]
        made = self._made({path: own[path] for path in unknown if path in own})
        for path, told in zip(paths, told_by_this, strict=True):
            told[3] = path in made
        rows = np.array(told_by_this, np.float64).reshape(len(paths), 4 + len(results))
        everyone = np.zeros((self._world.size, *rows.shape))
        # One exchange for all values; from here on every rank decides from the same table.
        self._world.communicator.all_gather(rows, everyone)
        metrics, derived = self._over_ranks(made, bool(everyone[:, :, 3].any()))
        found, unlike = Leaves(), set[Path]()
        for position, path in enumerate(paths):
            ranks = np.flatnonzero(everyone[:, position, 0])
            counted = ranks[everyone[ranks, position, 1] > 0]
            # Where nobody has samples, as before the first batch, whatever there is.
            counted = counted if counted.size else ranks
            told = everyone[counted, position]
            same = [metric for metric, equal in zip(results, told[:, 4:].T, strict=True) if len(told) and equal.all()]
            if same:
                # Several metrics may have the same result by chance: the one of that name is meant, if it is among
                # them.
                value = metrics[path[0] if path[0] in same else same[0]]
                found[path] = float(value) if value.ndim == 0 else value
            elif len(told) and told[:, 3].all():
                found[path] = derived[counted[0]][path]
            elif len(told) and (told[:, 0] == SCALAR).all():
                found[path] = float(_mean(told[:, 2], told[:, 1]))
                # Of ranks whose part of the latest batch counts nothing, too: it may say something of those before.
                unlike |= {path} if np.ptp(everyone[ranks, position, 2]) else set()
        self._tell(unlike)
        left = [path for path in paths if path not in found]
        if left:
            mine = {path: own[path] for path in left if path in own}
            found |= combined(mine, samples, self._world, self._has_rows())
        logs: Numbers = nested({path: found[path] for path in paths if path in found})
        return logs

    def _made(self, own: Leaves) -> dict[Path, Number]:
        """Local: which of these values are made of the states that metrics have now, and what computes them."""
        return {
            path: number
            for (_, path), number in self._derived.items()
            if isinstance(own.get(path), float | int | np.ndarray) and _equal(np.asarray(own[path]), number())
        }

    def _over_ranks(self, made: Mapping[Path, Number], some: bool) -> tuple[Numbers, list[Leaves]]:
        """Collective: results of metrics, and what each rank makes of them, with the states of all ranks.

        Args:
            made: what this rank computes of them.
            some: some rank does.
        """
        numbers: Leaves = {}

        def result() -> Mapping[str, Any]:
            numbers.update({path: _plain(_number(number())) for path, number in made.items()})
            return self._result()

        metrics = _flat(over_ranks(self._metrics(), result, self._world))
        return metrics, self._world.communicator.all_gather_obj(numbers) if some else []

    def _tell(self, paths: set[Path]) -> None:
        """Local: of numbers of which nothing is known, once, by rank 0."""
        names = sorted("/".join(map(str, path)) for path in paths - self._told)
        self._told |= paths
        if names and self._world.is_root:
            sys.stderr.write(
                f"mpitrain: of {', '.join(map(repr, names))} in the logs of a step, no result of a metric, the mean "
                "over the ranks is shown, weighted by rows: the whole batch's number, if it is a mean over rows\n"
            )


def _flat(numbers: Mapping[str, Any]) -> Numbers:
    """Local: results of metrics by the names that Keras' logs have: those in a dictionary have their own."""
    found: Numbers = {}
    for name, value in numbers.items():
        found |= _flat(value) if isinstance(value, dict) else {name: value}
    return found


def leaves_of(logs: Any) -> Leaves:
    """Local: the single values in logs: numbers, arrays, and what else there is; dictionaries in them as Keras does."""
    return {path: _plain(value) for path, value in _places(logs or {}).items()}


def _places(logs: Mapping[str, Any]) -> Leaves:
    """Local: as `leaves_of`, whatever they are."""
    found: Leaves = {}
    for name, value in sorted(logs.items()):
        found |= _places(value) if isinstance(value, dict) else _inner_places(_number(value), (name,))
    return found


def _number(value: Any) -> Any:
    """Local: what Keras makes of a value."""
    with contextlib.suppress(Exception):  # whatever is no number says so in its own way
        return float(value)
    return value


def _inner_places(value: Any, path: tuple[Any, ...]) -> Leaves:
    if not isinstance(value, (dict, list, tuple)):
        return {path: value}
    found: Leaves = {}
    for name, inner in sorted(value.items()) if isinstance(value, dict) else enumerate(value):
        found |= _inner_places(inner, (*path, name))
    return found


def nested(leaves: Leaves) -> Any:
    """Local: logs of these values, which are in the order of their paths; what were tuples are lists."""
    if () in leaves:
        return leaves[()]
    inner: dict[str | int, Leaves] = {}
    for path, leaf in leaves.items():
        inner.setdefault(path[0], {})[path[1:]] = leaf
    values = {name: nested(rest) for name, rest in inner.items()}
    return [*values.values()] if any(isinstance(name, int) for name in values) else values


def epoch_logs(logs: Numbers, samples: float, world: World) -> Numbers:
    """Collective: the logs of an epoch over all ranks, whichever of them have which; most are the same there."""
    world.agreement.call("logs of an epoch")
    found: Numbers = nested(combined(leaves_of(logs), samples, world))
    return found


def combined(own: Leaves, samples: float, world: World, has_rows: bool = False) -> Leaves:
    """Collective: values over all ranks, whichever of them have which.

    Numbers, and arrays of them, become their mean, weighted by samples. What is no number is that of the first rank
    that has it.

    Args:
        own: of this rank.
        samples: of this rank, behind its numbers.
        world: the job.
        has_rows: arrays with as many rows as there are samples may have one for each.

    Raises:
        AgreedError: on all ranks: arrays have a row for each sample, or other shapes on other ranks.
    """
    everyone = world.communicator.all_gather_obj((own, samples, has_rows))
    found: Leaves = {}
    for path in dict.fromkeys(path for leaves, _, _ in everyone for path in leaves):
        values = [leaves[path] for leaves, _, _ in everyone if path in leaves]
        counts = [count for leaves, count, _ in everyone if path in leaves]
        rows = any(has_rows for leaves, _, has_rows in everyone if path in leaves)
        arrays = [np.asarray(value) for value in values]
        if any(array.dtype.kind not in "fiubc" for array in arrays):
            found[path] = values[0]
            continue
        if any(array.shape != arrays[0].shape for array in arrays) or (rows and _by_rows(arrays, counts)):
            raise AgreedError(
                f"the logs have an array {'/'.join(map(str, path))!r} of shape {_shapes(arrays)} that is no result of "
                "a metric: it seems to have a row for each sample, and samples are divided among the ranks. Return "
                "its mean, or a metric's result, from the model's step."
            )
        mean = _mean(np.stack(arrays), np.array(counts, np.float64))
        found[path] = mean if mean.ndim else mean.item()
    return found


def _plain(leaf: Any) -> Any:
    """Local: a value as it can be sent to other ranks: a number, an array, or what else it is."""
    array = np.asarray(leaf.numpy() if hasattr(leaf, "numpy") else leaf)
    if array.dtype.kind == "V":  # half precisions that numpy lacks
        array = array.astype(np.float32)
    return array.item() if array.ndim == 0 else array


def _told(value: Any, samples: float, results: Iterable[Any]) -> list[float]:
    """Local: of one value what it is, its samples, the number, a place, and of which results it is the same."""
    if isinstance(value, float | int):
        return [SCALAR, samples, float(value), 0.0, *[_equal(np.asarray(value), result) for result in results]]
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return [ELSE, samples, 0.0, 0.0, *[_equal(value, result) for result in results]]
    return [ABSENT if value is None else ELSE, samples, 0.0, 0.0, *[0.0 for _ in results]]


def _equal(value: Any, result: Any) -> bool:
    result = np.asarray(result)
    return value.shape == result.shape and bool(np.allclose(value, result, CLOSE, 0.0, equal_nan=True))


def _mean(values: Any, samples: Any) -> Any:
    """Local: of the ranks with samples, or of all if nobody has any; what is the same on all keeps its bits."""
    if (values == values[0]).all():
        return values[0]
    counted = samples > 0 if samples.any() else samples == 0
    return np.average(values[counted], axis=0, weights=samples[counted] if samples.any() else None)


def _by_rows(arrays: Sequence[Any], samples: Sequence[float]) -> bool:
    """Local: whether arrays that differ have as many rows as there are samples."""
    rows = all(array.ndim and len(array) == count for array, count in zip(arrays, samples, strict=True) if count)
    return rows and any(samples) and any((array != arrays[0]).any() for array in arrays)


def _shapes(arrays: Sequence[Any]) -> str:
    return " and ".join(dict.fromkeys(str(array.shape) for array in arrays))
