"""Numbers that Keras reports, over the samples of all ranks: sums and counts, not means of means."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.comm.world import World
from mpitrain.training.replicas import describe

Numbers = dict[str, Any]
Result = Callable[[], Mapping[str, Any]]
CLOSE = 1e-6  # a graph may compute a float32 number with other instructions than an eager call


def global_metrics(metrics: Sequence[Any], result: Result, world: World) -> Numbers:
    """Collective: Keras metrics over the samples of all ranks.

    The state of Keras metrics is made of sums and counts; those are added, and the result is
    computed from the totals. This rank's own state is put back.

    Args:
        metrics: `keras.Metric` objects, the same on all ranks.
        result: computes the numbers from the metrics' state.
        world: the job.
    """
    variables = [variable for metric in metrics for variable in metric.variables]
    world.agreement.call(f"metrics of {describe(variables)}")
    own = _values(variables)
    total = _flat(own)
    world.communicator.all_reduce(total)
    return _result_of(variables, own, total, result)


class Logs:
    """The numbers of one model's steps, which Keras calls logs.

    Most are results of metrics, which may go by other names in the logs. So a number that equals the result of a
    metric on every rank that has it becomes that metric's result over all ranks. What is left, such as the loss of
    one batch, is averaged, weighted by samples.

    Args:
        metrics: gives the metrics of the model.
        result: gives their results on this rank, by name.
        world: the job.
    """

    def __init__(self, metrics: Callable[[], Sequence[Any]], result: Result, world: World) -> None:
        self._metrics, self._result, self._world = metrics, result, world

    def description(self, names: Sequence[str]) -> str:
        """Local: what ranks must have in common to reduce the numbers of these names; `names_in` reads it.

        Args:
            names: in the logs.
        """
        return f"logs {json.dumps([*names])} of {sorted(self._result())}, {describe(self._variables())}"

    def reduce(self, names: Sequence[str], own: Mapping[str, Any], samples: float) -> Numbers:
        """Collective: the numbers of those names over all ranks. To be agreed on before.

        Args:
            names: the same on all ranks.
            own: what this rank has of them: scalars or arrays.
            samples: of this rank, behind its numbers.

        Returns:
            The numbers, without arrays that are no result of a metric.
        """
        variables, results = self._variables(), dict(sorted(self._result().items()))
        told_by_this = [_told(own.get(name), samples, results.values()) for name in names]
        rows = np.array(told_by_this, np.float64).reshape(len(names), 3 + len(results))
        everyone = np.zeros((self._world.size, *rows.shape))
        self._world.communicator.all_gather(rows, everyone)
        values = _values(variables)
        total = _flat(values)
        self._world.communicator.all_reduce(total)
        metrics = _result_of(variables, values, total, self._result)
        found: Numbers = {}
        for position, name in enumerate(names):
            told = everyone[everyone[:, position, 0] > 0, position]
            same = [metric for metric, equal in zip(results, told[:, 3:].T, strict=True) if len(told) and equal.all()]
            if same:
                value = metrics[name if name in same else same[0]]
                found[name] = float(value) if value.ndim == 0 else value
            elif len(told) and not np.isnan(told[:, 2]).all():
                found[name] = _mean(told[:, 2], told[:, 1])
        return found

    def _variables(self) -> list[Any]:
        return [variable for metric in self._metrics() for variable in metric.variables]


def numbers_of(logs: Any) -> Numbers:
    """Local: what is a number, or an array of them, in logs; Keras leaves other values in them as they are."""
    arrays = {name: np.asarray(value) for name, value in dict(logs or {}).items()}
    return {name: array for name, array in arrays.items() if array.dtype.kind in "fiub"}


def names_in(description: str) -> list[str]:
    """Local: the names that `Logs.description` was given."""
    names: list[str] = json.JSONDecoder().raw_decode(description, description.index("["))[0]
    return names


def _told(value: Any, samples: float, results: Iterable[Any]) -> list[float]:
    """Local: of one number whether this rank has it, its samples, the number, and of which results it is the same."""
    if value is None:
        return [0.0, 0.0, 0.0, *[0.0 for _ in results]]
    value = np.asarray(value)
    return [1.0, samples, float(value) if value.ndim == 0 else np.nan, *[_equal(value, result) for result in results]]


def _equal(value: Any, result: Any) -> bool:
    result = np.asarray(result)
    return value.shape == result.shape and bool(np.allclose(value, result, CLOSE, 0.0, equal_nan=True))


def _mean(values: Any, samples: Any) -> float:
    """Local: of the ranks with samples, or of all if nobody has any; what is the same on all keeps its bits."""
    if (values == values[0]).all():
        return float(values[0])
    counted = samples > 0 if samples.any() else samples == 0
    return float(np.average(values[counted], weights=samples[counted] if samples.any() else None))


def _values(variables: Sequence[Any]) -> list[Any]:
    return [np.array(variable.numpy()) for variable in variables]


def _flat(values: Sequence[Any]) -> Any:
    return np.concatenate([np.zeros(0), *[value.astype(np.float64).reshape(-1) for value in values]])


def _result_of(variables: Sequence[Any], own: Sequence[Any], total: Any, result: Result) -> Numbers:
    """Local: the result from the state `total` of `variables`, which get `own` back."""
    start = 0
    for variable, value in zip(variables, own, strict=True):
        part = total[start : start + value.size]
        variable.assign(part.reshape(value.shape).astype(value.dtype))
        start += value.size
    numbers = {name: np.asarray(value) for name, value in result().items()}
    for variable, value in zip(variables, own, strict=True):
        variable.assign(value)
    return numbers
