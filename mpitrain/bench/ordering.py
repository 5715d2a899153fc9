"""Operations that use the network, all at once against one after the other by control dependencies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitrain.bench.interleave import interleave, on_root
from mpitrain.bench.report import Row, median, ratio
from mpitrain.cluster.server import Server, start_server
from mpitrain.world.world import World

MEBIBYTES, TENSORS, WINDOWS = 2.0, 8, (1, 2)
WORK_SECONDS = 0.1  # with each tensor, where the rate of the link does not tell how long one travels


@dataclass(frozen=True)
class Load:
    """What one step fetches and computes."""

    mebibytes: float  # of each tensor
    tensors: int  # how many there are
    work_seconds: float  # of working with each, one after the other; by default about as long as it travels
    rate: float | None = None  # bits per second of the link, for the limit; None if it is not known

    @classmethod
    def of(cls, mebibytes: float, tensors: int, work_seconds: float | None, rate: float | None) -> Load:
        """Local: with the default."""
        if work_seconds is None:
            work_seconds = WORK_SECONDS if rate is None else mebibytes * (1 << 20) * 8 / rate
        return cls(mebibytes, tensors, work_seconds, rate)


def measure(
    world: World,
    load: Load,
    windows: Sequence[int],
    repeat: int,
    bind: str | None = None,
    insecure_network: bool = False,
) -> Iterator[Row]:
    """Collective: one row for each number of tensors that may travel at the same time, all of them first.

    The ranks behind rank 0 hold the tensors in turn, as TensorFlow servers. A step on rank 0 fetches each and computes
    with each, in their order, as a forward pass does with the weights of its layers. With a window of k, a tensor is
    not read before the k-th before it has arrived: a control dependency. The limit is the time in which all travel, and
    of the work with the last. `bind` and `insecure_network` are those of `start_server`.
    """
    server = start_server("worker=1,ps", bind=bind, insecure_network=insecure_network, world=world)
    cases = [window for window in dict.fromkeys((load.tensors, *windows)) if window <= load.tensors]
    found: dict[int, _Case] = {}

    def all_turns() -> list[float]:
        found.update(_run(server, load, cases, repeat))
        return []

    on_root(world.communicator, all_turns)
    for window in cases if world.is_root else ():
        yield _row(load, window, found[window], found[cases[0]])


@dataclass
class _Case:
    """Seconds since the beginning of the step, of each step."""

    first: list[float] = field(default_factory=list)  # the tensor there that is needed first
    last: list[float] = field(default_factory=list)  # all tensors there
    step: list[float] = field(default_factory=list)  # last work done


def _run(server: Server, load: Load, cases: Sequence[int], repeat: int) -> dict[int, _Case]:
    """Local, on rank 0: measure all cases in turn."""
    import tensorflow as tf

    found = {window: _Case() for window in cases}
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session(server.target) as session:
        variables = _variables(load, len(server.cluster.jobs["ps"]))
        steps = {window: _step(variables, window, load.work_seconds) for window in cases}
        session.run(v1.global_variables_initializer())

        def turn(window: int) -> list[float]:
            begin, arrivals, ends, _ = session.run(steps[window])
            case = found[window]
            case.first.append(float(arrivals[0] - begin))
            case.last.append(float(max(arrivals) - begin))
            case.step.append(float(ends[-1] - begin))
            return case.step[-1:]

        for window in cases:
            turn(window)  # connects, and fills caches
            found[window] = _Case()
        turns: dict[str, Callable[[], list[float]]] = {str(w): (lambda w=w: turn(w)) for w in cases}  # type: ignore[misc]
        interleave(turns, repeat)
    return found


def _variables(load: Load, servers: int) -> list[Any]:
    """The tensors, on their servers; they are made there, so that nothing travels before it is measured."""
    import tensorflow as tf

    v1 = tf.compat.v1
    elements = max(1, int(load.mebibytes * (1 << 20)) // 4)
    found = []
    for number in range(load.tensors):
        with v1.device(f"/job:ps/task:{number % servers}"):
            initial = tf.ones([elements])
            found.append(v1.get_variable(f"tensor_{number}", initializer=initial, use_resource=True))
    return found


def _step(variables: Sequence[Any], window: int, work_seconds: float) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """When the step began, when each tensor was there, when the work with each was done, and a part of all results.

    A result that nobody asks for TensorFlow does not compute, nor does a tensor travel that nobody uses, although
    others wait for it by a control dependency.
    """
    import tensorflow as tf

    v1 = tf.compat.v1
    arrived: list[Any] = []
    arrivals: list[Any] = []
    worked: list[Any] = []
    ends: list[Any] = []
    with v1.device("/job:worker/task:0"):
        begin = tf.timestamp()
        for index, variable in enumerate(variables):
            waits_for = arrived[index - window] if index >= window else begin
            with v1.device(variable.device), tf.control_dependencies([waits_for]):
                value = tf.identity(variable.read_value())
            arrived.append(value[-1])
            with tf.control_dependencies([arrived[-1]]):
                arrivals.append(tf.timestamp())
            with tf.control_dependencies([arrived[-1], *worked[-1:]]):
                worked.append(_work(work_seconds))
            with tf.control_dependencies([worked[-1]]):
                ends.append(tf.timestamp())
    return begin, arrivals, ends, [*arrived, *worked]


def _work(seconds: float) -> Any:
    """What an accelerator would do meanwhile: it takes its time, but no processor that the network needs."""
    import numpy as np
    import tensorflow as tf

    def wait() -> Any:
        time.sleep(seconds)
        return np.float32(seconds)

    return tf.numpy_function(wait, [], tf.float32)


def _row(load: Load, window: int, case: _Case, at_once: _Case) -> Row:
    nbytes = load.mebibytes * (1 << 20) * load.tensors
    figures: dict[str, float | None] = {
        "first needed there s": median(case.first),
        "all there s": median(case.last),
        "step s": median(case.step),
        "step / at once": ratio(median(case.step), median(at_once.step)),
    }
    if load.rate is not None:
        figures["limit s"] = nbytes * 8 / load.rate + load.work_seconds
    raw = {"first_seconds": tuple(case.first), "last_seconds": tuple(case.last), "step_seconds": tuple(case.step)}
    at_a_time = "all" if window == load.tensors else str(window)
    what: dict[str, str | int] = {"MiB": f"{load.mebibytes:g}", "tensors": load.tensors, "at a time": at_a_time}
    return Row(what, raw, figures)
