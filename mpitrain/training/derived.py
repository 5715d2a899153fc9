"""Numbers that a step makes of metrics, such as a ratio of two: found in its graph, as functions of their states.

So they can be computed anew from the states of all ranks, where the mean over ranks would be something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

Number = Callable[[], Any]


def derived(tensors: Mapping[Any, Any], metrics: Sequence[Any]) -> dict[Any, Number]:
    """Local: of tensors in the graph that is being traced, what computes those made of nothing but metrics' states.

    Args:
        tensors: by any keys.
        metrics: `keras.Metric` objects.
    """
    graph = tf.compat.v1.get_default_graph()
    states = {id(graph.capture(v.value.handle)): v for metric in metrics for v in metric.variables}
    found = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, tf.Tensor) and tensor.graph is graph:
            operations, reads = _origin(tensor, states)
            if reads:
                found[key] = _function(tensor.name, operations, reads)
    return found


def _origin(tensor: tf.Tensor, states: Mapping[int, Any]) -> tuple[list[tf.Operation], dict[str, Any]]:
    """Local: what computes a tensor, down to the states that it reads; none where something else comes in."""
    operations, reads = [], {}
    waiting, known = [tensor.op], set()
    while waiting:
        operation = waiting.pop()
        if operation in known:
            continue
        known.add(operation)
        if operation.type == "ReadVariableOp" and id(operation.inputs[0]) in states:
            reads[operation.outputs[0].name] = states[id(operation.inputs[0])]
            continue
        if operation.op_def.is_stateful or not (operation.inputs or operation.type == "Const"):
            return [], {}
        operations.append(operation)
        waiting += [one.op for one in operation.inputs]
    return operations, reads


def _function(name: str, operations: Sequence[tf.Operation], reads: Mapping[str, Any]) -> Number:
    """Local: computes what the tensor so named would be with the states as they are then."""
    if name in reads:
        return lambda: reads[name].value
    definition = tf.compat.v1.GraphDef()
    for operation in operations:
        node = definition.node.add()
        node.CopyFrom(operation.node_def)
        # Control dependencies are on operations that are not taken along; nor are those that `_class` says it stands
        # beside.
        inputs = [one for one in node.input if not one.startswith("^")]
        del node.input[:]
        node.input.extend(inputs)
        node.attr.pop("_class", None)

    def imported(*values: Any) -> Any:
        return tf.graph_util.import_graph_def(definition, dict(zip(reads, values, strict=True)), [name])[0]

    @functools.cache
    def traced() -> Callable[..., Any]:
        specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in reads.values()]
        function: Callable[..., Any] = tf.compat.v1.wrap_function(imported, specs)
        return function

    return lambda: traced()(*[tf.convert_to_tensor(variable.value) for variable in reads.values()])
