"""Operations that use the network, all at once against one after the other by control dependencies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitrain.bench.interleave import interleave, on_root
from mpitrain.bench.report import Row, median, ratio
from mpitrain.cluster.server import Server, start_server
from mpitrain.comm.world import World
from mpitrain.errors import AgreedError

MEBIBYTES, TENSORS, WINDOWS = 2.0, 8, (1, 2)
WORK_SIDE = 192  # of the matrices whose products are the work on each tensor


@dataclass(frozen=True)
class Load:
    """What one step fetches and computes.

    Attributes:
        mebibytes: of each tensor.
        tensors: how many there are.
        work_seconds: of computing with each, one after the other.
        rate: bits per second of the link, for the limit; None if it is not known.
    """

    mebibytes: float
    tensors: int
    work_seconds: float
    rate: float | None = None


def measure(
    world: World, load: Load, windows: Sequence[int], repeat: int, bind: str | None = None, insecure: bool = False
) -> Iterator[Row]:
    """Collective: one row for each number of tensors that may travel at the same time, all of them first.

    The last rank holds the tensors, as a TensorFlow server. A step on rank 0 fetches each and computes with each, in
    their order, as a forward pass does with the weights of its layers. With a window of k, a tensor is not read before
    the k-th before it has arrived: a control dependency.

    Args:
        world: the job, of two ranks or more; those between rank 0 and the last only sleep.
        load: of a step.
        windows: to be compared with all at once.
        repeat: rounds, in which they take turns.
        bind: see `start_server`.
        insecure: see `start_server`.

    Raises:
        AgreedError: there is only one rank.
    """
    if world.size < 2:
        raise AgreedError("bench ordering needs two ranks or more: mpirun -np 2 python -m mpitrain bench ordering")
    server = start_server("worker,ps=1", bind=bind, insecure_network=insecure, world=world)
    cases = [window for window in dict.fromkeys((load.tensors, *windows)) if window <= load.tensors]
    found: dict[int, _Case] = {}

    def all_turns() -> list[float]:
        found.update(_run(server, load, cases, repeat))
        return []

    on_root(world, all_turns)
    for window in cases if world.is_root else ():
        yield _row(load, window, found[window], found[cases[0]])


@dataclass
class _Case:
    """Seconds since the beginning of the step, of each step."""

    first: list[float] = field(default_factory=list)  # first tensor there
    last: list[float] = field(default_factory=list)  # last tensor there
    step: list[float] = field(default_factory=list)  # last work done


def _run(server: Server, load: Load, cases: Sequence[int], repeat: int) -> dict[int, _Case]:
    """Local, on rank 0: measure all cases in turn."""
    import tensorflow as tf

    found = {window: _Case() for window in cases}
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session(server.target) as session:
        variables = _variables(load)
        repetitions = v1.placeholder(tf.int32, [], name="repetitions")
        steps = {window: _step(variables, window, repetitions) for window in cases}
        session.run(v1.global_variables_initializer())
        count = _calibrate(session, repetitions, load.work_seconds)

        def turn(window: int) -> list[float]:
            begin, arrivals, ends = session.run(steps[window], {repetitions: count})
            case = found[window]
            case.first.append(float(min(arrivals) - begin))
            case.last.append(float(max(arrivals) - begin))
            case.step.append(float(ends[-1] - begin))
            return case.step[-1:]

        for window in cases:
            turn(window)  # connects, and fills caches
            found[window] = _Case()
        turns: dict[str, Callable[[], list[float]]] = {str(w): (lambda w=w: turn(w)) for w in cases}  # type: ignore[misc]
        interleave(turns, repeat)
    return found


def _variables(load: Load) -> list[Any]:
    """The tensors, on their server; they are made there, so that nothing travels before it is measured."""
    import tensorflow as tf

    v1 = tf.compat.v1
    elements = max(1, int(load.mebibytes * (1 << 20)) // 4)
    with v1.device("/job:ps/task:0"):
        return [
            v1.get_variable(f"tensor_{i}", initializer=lambda: tf.ones([elements]), use_resource=True)
            for i in range(load.tensors)
        ]


def _step(variables: Sequence[Any], window: int, repetitions: Any) -> tuple[Any, list[Any], list[Any]]:
    """When the step began, when each tensor was there, and when the work with each was done."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with v1.device("/job:worker/task:0"):
        begin = tf.timestamp()
        arrived: list[Any] = []
        arrivals: list[Any] = []
        ends: list[Any] = []
        for index, variable in enumerate(variables):
            waits_for = arrived[index - window] if index >= window else begin
            with v1.device("/job:ps/task:0"), tf.control_dependencies([waits_for]):
                value = tf.identity(variable.read_value())
            with tf.control_dependencies([value]):
                arrived.append(tf.identity(value[:1]))
            with tf.control_dependencies([arrived[-1]]):
                arrivals.append(tf.timestamp())
            with tf.control_dependencies([arrived[-1], *ends[-1:]]), tf.control_dependencies([_work(repetitions)]):
                ends.append(tf.timestamp())
    return begin, arrivals, ends


def _work(repetitions: Any) -> Any:
    """Products of matrices, so many times."""
    import tensorflow as tf

    start = tf.fill([WORK_SIDE, WORK_SIDE], 1.0 / WORK_SIDE)
    _, result = tf.while_loop(
        lambda i, _: i < repetitions,
        lambda i, matrix: (i + 1, tf.matmul(matrix, matrix)),
        (tf.constant(0), start),
        parallel_iterations=1,
    )
    return result


def _calibrate(session: Any, repetitions: Any, seconds: float) -> int:
    """How many products take so long on rank 0, while nothing travels."""
    import tensorflow as tf

    with tf.compat.v1.device("/job:worker/task:0"):
        begin = tf.timestamp()
        with tf.control_dependencies([begin]), tf.control_dependencies([_work(repetitions)]):
            end = tf.timestamp()
    count = 1
    while count < 1 << 20:
        took = float(np.subtract(*session.run([end, begin], {repetitions: count})))
        if took > seconds / 4:
            return max(1, round(count * seconds / took))
        count *= 2
    return count


def _row(load: Load, window: int, case: _Case, at_once: _Case) -> Row:
    nbytes = load.mebibytes * (1 << 20) * load.tensors
    figures: dict[str, float | None] = {
        "first tensor s": median(case.first),
        "last tensor s": median(case.last),
        "step s": median(case.step),
        "step / at once": ratio(median(case.step), median(at_once.step)),
    }
    if load.rate is not None:
        figures["limit s"] = nbytes * 8 / load.rate
    raw = {"first_seconds": tuple(case.first), "last_seconds": tuple(case.last), "step_seconds": tuple(case.step)}
    at_a_time = "all" if window == load.tensors else str(window)
    what: dict[str, str | int] = {"MiB": f"{load.mebibytes:g}", "tensors": load.tensors, "at a time": at_a_time}
    return Row(what, raw, figures)
