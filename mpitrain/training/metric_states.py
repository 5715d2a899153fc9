"""How the states of Keras metrics on all ranks become one: found by looking at what `update_state` does to them.

The states of Keras' own metrics are sums. Of a metric that a script defines, the graph of `update_state` tells: a
variable to which only what does not depend on it is added is a sum, one that becomes the greater of itself and
something else a maximum. What changes in any other way, or outside of variables, cannot be combined.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mpitrain.collectives.conversion import of_the_script
from mpitrain.comm.communicator import Op
from mpitrain.runtime import keras_private
from mpitrain.strategies.replicas import has_value
from mpitrain.training.counting import current_share
from mpitrain.training.shown_metrics import definer, let_show, of_this_rank, show, within
from mpitrain.world.world import World

Numbers = dict[str, Any]
Result = Callable[[], Mapping[str, Any]]
UNSEEN, OWN_RULE = 0, -1
KINDS: dict[int, Op] = {1: "sum", 2: "max", 3: "min"}
SUM, MAX, MIN = KINDS
CLOSE = 1e-6  # ranks may compute a float32 number with other instructions
ATTRIBUTE = "_mpitrain_kinds"
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp")
UPDATES = {"AssignAddVariableOp": SUM, "AssignSubVariableOp": SUM, "ResourceScatterAdd": SUM, "ResourceScatterSub": SUM}
UPDATES |= {"ResourceScatterMax": MAX, "ResourceScatterMin": MIN}
# Of operations that combine a state with something else: what the state is then, and which inputs it may be.
COMBINATIONS = {"AddV2": (SUM, 2), "Add": (SUM, 2), "AddN": (SUM, 9), "Sub": (SUM, 1), "TensorScatterAdd": (SUM, 1)}
COMBINATIONS |= {"Maximum": (MAX, 2), "Minimum": (MIN, 2), "LogicalOr": (MAX, 2), "LogicalAnd": (MIN, 2)}


def over_ranks(metrics: Sequence[Any], result: Result, world: World) -> Numbers:
    """Collective: the result from the states of all ranks. This rank's own state is put back.

    Results of states that cannot be combined are averaged over the ranks, and rank 0 warns of them once.
    """
    variables = [variable for metric in metrics for variable in metric.variables]
    scripts = [metric for metric in within(metrics) if _is_the_scripts(metric)]
    kinds = _agreed(variables, scripts, world) if scripts else [SUM] * len(variables)
    own = [np.array(variable.numpy()) for variable in variables]
    combined = list(own)
    for kind, op in KINDS.items():
        places = [place for place, found in enumerate(kinds) if found == kind]
        # One exchange for all states of a kind, however many metrics there are.
        flat = np.concatenate([np.zeros(0), *[own[place].astype(np.float64).reshape(-1) for place in places]])
        if flat.size:
            world.communicator.all_reduce(flat, op)
        for place in places:
            part, flat = np.split(flat, [own[place].size])
            combined[place] = part.reshape(own[place].shape).astype(own[place].dtype)
    _assign(variables, combined)
    with of_this_rank():
        numbers = _arrays(result())
    _assign(variables, own)
    show(metrics, variables, own, combined)
    return _agree(numbers, any(ATTRIBUTE in vars(metric) for metric in scripts), world) if scripts else numbers


def _arrays(numbers: Mapping[str, Any]) -> Numbers:
    """Local: results as arrays; those of one metric may be a dictionary."""
    return {name: _arrays(value) if isinstance(value, dict) else np.asarray(value) for name, value in numbers.items()}


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _agreed(variables: Sequence[Any], scripts: Sequence[Any], world: World) -> list[int]:
    """Collective: how each variable is combined; ranks without data have not seen what happens to it."""
    kinds = {id(variable): SUM for variable in variables}
    for metric in scripts:
        seen = vars(metric).get(ATTRIBUTE, {})
        states = keras_private.variables_of(metric)
        kinds |= {id(variable): seen.get(place, UNSEEN) for place, variable in enumerate(states)}
    own = np.array([kinds[id(variable)] for variable in variables], np.int64)
    everyone = np.zeros((world.size, len(own)), np.int64)
    world.communicator.all_gather(own, everyone)
    found = [set(column.tolist()) - {UNSEEN} for column in everyone.T]
    return [kinds.pop() if len(kinds) == 1 else OWN_RULE for kinds in found]


def _agree(numbers: Numbers, updated: bool, world: World) -> Numbers:
    """Collective: where results differ still, their mean over the ranks that have updated the metrics."""
    everyone = world.communicator.all_gather_obj((numbers, updated))
    some = any(updated for _, updated in everyone)
    counted = [theirs for theirs, updated in everyone if updated or not some]
    return {name: _one(name, [theirs[name] for theirs in counted], world) for name in numbers}


def _one(name: str, values: Sequence[Any], world: World) -> Any:
    """Local: of a result, or of those in a dictionary of them, what all ranks show."""
    first = values[0]
    if isinstance(first, dict):
        return {inner: _one(f"{name}/{inner}", [value[inner] for value in values], world) for inner in first}
    same_shape = all(value.shape == first.shape for value in values)
    if same_shape and all(_close(value, first) for value in values):
        return first
    if same_shape and all(value.dtype.kind in "fiub" for value in values):
        _warn(f"{name!r}: shown is the mean of the ranks' results", world)
        return np.mean(values, axis=0)
    _warn(f"{name!r}: shown is that of one rank", world)
    return first


def _close(value: Any, other: Any) -> bool:
    if value.dtype.kind not in "fiub":
        return bool((value == other).all())
    return bool(np.allclose(value, other, CLOSE, 0.0, equal_nan=True))


@functools.cache
def _warn(text: str, world: World) -> None:
    """Local: said once, by rank 0."""
    if world.is_root:
        sys.stderr.write(
            f"mpitrain: warning: the state of a metric cannot be combined over ranks, {text}. It is exact where "
            "update_state changes each variable by assign_add(x), or assigns it variable + x, maximum(variable, x) or "
            "minimum(variable, x), with an x that does not depend on the state.\n"
        )


def observe(metrics: Sequence[Any]) -> None:
    """Local: from now on see what happens to the states of metrics that the script defines.

    Their classes are patched, not the metrics, of which a script may make copies.
    """
    for metric in within(metrics):
        let_show(metric.__class__)
        owner = definer(type(metric), "update_state")
        if _is_the_scripts(metric) and not hasattr(owner.update_state, ATTRIBUTE):
            update_state = _observed(owner.update_state)
            setattr(update_state, ATTRIBUTE, True)
            owner.update_state = update_state


def _is_the_scripts(metric: Any) -> bool:
    return not definer(type(metric), "update_state").__module__.startswith("keras.")


def _observed(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def update_state(metric: Any, *args: Any, **kwargs: Any) -> Any:
        begun = _begin(metric, lambda: update(metric, *args, **kwargs))
        result = of_the_script(update)(metric, *args, **kwargs)
        _end(metric, begun)
        return result

    return update_state


def _begin(metric: Any, update: Callable[[], Any]) -> int:
    """Local: how many operations the graph had before; eagerly, at the first update, it is traced for the purpose."""
    if not tf.executing_eagerly():
        return len(tf.compat.v1.get_default_graph().get_operations())
    if ATTRIBUTE not in vars(metric):
        object.__setattr__(metric, ATTRIBUTE, {})  # it is none of the state that Keras tracks
        if metric.variables:
            with contextlib.suppress(Exception), tf.__internal__.FuncGraph("update_state").as_default():
                update()
                _end(metric, 0)
    return 0


def _end(metric: Any, begun: int) -> None:
    """Local: note what has been seen in the graph."""
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    if current_share() is not None and any(map(_adds_of_a_batch, graph.get_operations()[begun:])):
        _tell(metric.name)
    kinds = vars(metric).get(ATTRIBUTE, {})
    # In a graph operations do not refer to a variable but to what stands for it there.
    handles = [graph.capture(variable.value.handle) for variable in metric.variables]
    states = {id(handle) for handle in handles}
    operations = graph.get_operations()[begun:]
    for place, variable in enumerate(keras_private.variables_of(metric)):
        found = {_kind(operation, handles[place], states) for operation in operations} - {UNSEEN}
        if found and place not in kinds and SUM in found and _begins_above_nothing(variable):
            found.add(OWN_RULE)
        if found:
            found |= {kinds.get(place, UNSEEN)} - {UNSEEN}
            kinds[place] = found.pop() if len(found) == 1 else OWN_RULE
    object.__setattr__(metric, ATTRIBUTE, kinds)


def _adds_of_a_batch(operation: Any) -> bool:
    """Local: whether it adds one for each batch to a state, or a mean or ratio: of parts of a batch they are others."""
    if operation.type not in ("AssignAddVariableOp", "AssignVariableOp") or operation.inputs[1].shape.rank:
        return False
    assigned = _plain(operation.inputs[1])
    if operation.type == "AssignAddVariableOp":
        return _is_of_a_batch(assigned)
    return assigned.op.type in ("AddV2", "Add") and any(_is_of_a_batch(_plain(one)) for one in assigned.op.inputs)


def _is_of_a_batch(added: Any) -> bool:
    if added.op.type in ("RealDiv", "DivNoNan"):
        return tf.get_static_value(added.op.inputs[1]) is None
    return added.op.type == "Mean" or (added.op.type == "Const" and float(tf.get_static_value(added)) == 1.0)


def _plain(tensor: Any) -> Any:
    """Local: what is computed, without changes of its type or shape."""
    while tensor.op.type in ("Identity", "Cast", "Reshape"):
        tensor = tensor.op.inputs[0]
    return tensor


@functools.cache
def _tell(name: str) -> None:
    """Local: said once by each rank, of which rank 0's is shown."""
    sys.stderr.write(
        f"mpitrain: update_state of {name!r} adds a mean or ratio of its batch, or counts batches: here of this rank's "
        "part of each, so that it is not the number of whole batches. Add sums over rows and their number; or give a "
        "function as the metric, which gets whole batches under --batch-size-is global\n"
    )


def _begins_above_nothing(variable: Any) -> bool:
    """Local: the sum over ranks would count more than once what the state is before its first update."""
    with tf.init_scope():
        return has_value(variable) and bool(np.any(variable.numpy()))


def _kind(operation: Any, handle: Any, states: set[int]) -> int:
    """Local: what an operation makes of the state behind `handle`."""
    if not any(one is handle for one in operation.inputs) or operation.type in READS:
        return UNSEEN
    if operation.type in UPDATES:
        return OWN_RULE if any(_depends(one, states) for one in operation.inputs[1:]) else UPDATES[operation.type]
    if operation.type == "AssignVariableOp":
        return _combination(operation.inputs[1], handle, states)
    return OWN_RULE


def _combination(tensor: Any, handle: Any, states: set[int]) -> int:
    """Local: how `tensor` combines the state behind `handle` with what does not depend on any."""
    operation = tensor.op
    if operation.type in ("Identity", "EnsureShape", "Reshape"):
        return _combination(operation.inputs[0], handle, states)
    kind, most = COMBINATIONS.get(operation.type, (OWN_RULE, 0))
    states_at = [place for place, one in enumerate(operation.inputs) if _depends(one, states)]
    if len(states_at) != 1 or states_at[0] >= most:
        return OWN_RULE
    state = operation.inputs[states_at[0]]
    while state.op.type in ("Identity", "EnsureShape", "Reshape"):
        state = state.op.inputs[0]
    if state.op.type == "ReadVariableOp":
        return kind if state.op.inputs[0] is handle else OWN_RULE
    return kind if _combination(state, handle, states) == kind else OWN_RULE


def _depends(tensor: Any, states: set[int]) -> bool:
    """Local: whether a state is used to compute `tensor`."""
    waiting, known = [tensor], set()
    while waiting:
        one = waiting.pop()
        if id(one) in states:
            return True
        if id(one.op) not in known:
            known.add(id(one.op))
            waiting += one.op.inputs
    return False
