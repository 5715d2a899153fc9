"""Variables that must be the same on all ranks: making them so, and checking that they are."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import mpitrain.collectives.conversion  # noqa: F401 (before AutoGraph sees a function of this package)
from mpitrain.errors import ReplicaError
from mpitrain.runtime.counted import counted
from mpitrain.world.world import World


def name_of(variable: Any) -> str:
    """Local: the path of a Keras variable, the name of a TensorFlow one."""
    return str(getattr(variable, "path", None) or variable.name)


def describe(variables: Sequence[Any]) -> str:
    """Local: one line a variable, for comparison across ranks."""
    lines = [f"{name_of(v)} {np.dtype(_dtype(v)).name}{list(v.shape)}" for v in variables]
    return "\n".join([counted(len(lines), "variable"), *lines])


def broadcast_variables(variables: Sequence[Any], root: int = 0, *, world: World) -> None:
    """Collective: every rank's variables become those of rank `root`.

    See `training.functional`.

    Raises:
        MismatchError: ranks have different variables.
    """
    variables = list(variables)
    values = [variable.numpy() if world.rank == root else None for variable in variables]  # what has none raises now
    with world.agreement.turn:
        world.agreement.call(f"broadcast_variables from rank {root} of {describe(variables)}")
        for variable, value in zip(variables, values, strict=True):
            shape = tuple(variable.shape)
            buffer = np.empty(shape, _dtype(variable)) if value is None else np.array(value, order="C")
            world.communicator.broadcast(buffer, root)
            if value is None:
                variable.assign(buffer)


def differing(variables: Sequence[Any], root: int = 0, *, world: World) -> list[tuple[int, list[int]]]:
    """Collective: positions of variables that differ between ranks; each with those that differ from rank `root`."""
    variables = list(variables)
    own = np.array(
        [zlib.crc32(np.ascontiguousarray(v.numpy()).reshape(-1).view(np.uint8).data) for v in variables], np.int64
    )
    sums = np.zeros((world.size, len(own)), np.int64)
    with world.agreement.turn:
        world.agreement.call(f"checksums of {describe(variables)}")
        world.communicator.all_gather(own, sums)
    return [
        (int(position), [int(rank) for rank in np.flatnonzero(sums[:, position] != sums[root, position])])
        for position in np.flatnonzero((sums != sums[0]).any(axis=0))
    ]


def verify_replicas(variables: Sequence[Any], when: str, *, world: World) -> None:
    """Collective: check that variables are bit-identical on all ranks.

    See `training.functional`.

    Raises:
        ReplicaError: on every rank, naming the first variable that differs and the ranks.
    """
    variables = list(variables)
    found = differing(variables, world=world)
    if found:
        position, ranks = found[0]
        places = ", ".join(f"{rank} ({world.hosts[rank]})" for rank in ranks)
        raise ReplicaError(
            f"{when}, ranks differ in {len(found)} of {counted(len(variables), 'variable')}; the first is "
            f"{name_of(variables[position])}, where rank {places} differs from rank 0. Something changed it on some "
            "ranks only: an assignment outside the optimizer, or a random or time dependent branch."
        )


def synchronize(variables: Sequence[Any], *, world: World) -> bool:
    """Collective: make variables those of rank 0, if they are not already.

    Returns:
        True when some rank had other values.
    """
    variables = list(variables)
    found = differing(variables, world=world)
    if found:
        broadcast_variables([variables[position] for position, _ in found], world=world)
    return bool(found)


def adopt(variables: Sequence[Any], root: int, *, world: World) -> None:
    """Collective: make variables those of rank `root`, on all ranks or, if one is lost meanwhile, on none.

    Raises:
        RankLostError: on all ranks: one was lost.
    """
    found = differing(variables, root, world=world)
    # All are received before the first is assigned: if a rank is lost in between, no variable was changed.
    values = {position: np.array(variables[position].numpy(), order="C", ndmin=1) for position, _ in found}
    for value in values.values():
        world.communicator.broadcast(value, root)
    # A broadcast may have ended on some ranks though another was lost: after this all have everything, or all raise.
    world.communicator.agree(True)
    for position, value in values.items():
        if world.rank != root:
            variables[position].assign(value.reshape(tuple(variables[position].shape)))


def part_streams(variables: Sequence[Any], *, world: World) -> None:
    """Local: random streams (of dropout, augmentation) go on at another place on each rank.

    To be called when the states are those of rank 0. Keras draws from a seed and a counter; ranks begin their counters
    2**20 draws apart. Of the variables the states of Keras' seed generators, uint32[2], are changed.
    """
    for variable in variables:
        if name_of(variable).endswith("seed_generator_state") and has_value(variable):
            seed, counter = (int(number) for number in variable.numpy())
            variable.assign(np.array([seed, (counter + (world.rank << 20)) % (1 << 32)], np.uint32))


def average_statistics(variables: Sequence[Any], *, world: World) -> None:
    """Collective: the mean over ranks of non-trainable statistics, such as the moments of batch normalization.

    Variables that are equal everywhere are left as they are, to the bit.
    """
    variables = list(variables)
    with world.agreement.turn:
        found = differing(variables, world=world)
        # Added up in double precision, and rounded once.
        values = [np.array(variables[position].numpy(), np.float64, order="C", ndmin=1) for position, _ in found]
        for value in values:
            world.communicator.all_reduce(value)
    for (position, _), value in zip(found, values, strict=True):
        variable = variables[position]
        variable.assign((value / world.size).reshape(tuple(variable.shape)).astype(_dtype(variable)))


def has_value(variable: Any) -> bool:
    """Local: whether a variable can be read now; some exist only while a graph is traced."""
    try:
        with tf.init_scope():
            return tuple(np.shape(variable.numpy())) == tuple(variable.shape)
    except (tf.errors.FailedPreconditionError, NotImplementedError, AttributeError, ValueError):
        return False


def _dtype(variable: Any) -> Any:
    return tf.as_dtype(variable.dtype).as_numpy_dtype
