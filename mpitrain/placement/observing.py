"""What ran where: sessions, functions and eager operations, as TensorFlow itself reports it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from mpitrain.placement.table import Row, Table

ARGUMENTS = ("_Arg", "_DeviceArg", "_Retval", "_DeviceRetval")  # of functions, and their results


@contextlib.contextmanager
def log() -> Iterator[Table]:
    """Local: look where operations run that are executed in this context, and fill a table.

    Seen are runs of `tf.compat.v1.Session`, also of a server's; the first call of each `tf.function`; and eager
    operations of this thread. It costs time: not for a whole training.

    Yields:
        The table, for `print`; it can be read while it grows.

    Example:
        >>> with mpitrain.placement.log() as table:
        ...     sums = tf.add([1.0], [2.0])
        >>> [row.kind for row in table]
        ['AddV2']
    """
    table = Table()
    with _sessions(table), _functions(table), _eager_operations(table):
        yield table


@contextlib.contextmanager
def _sessions(table: Table) -> Iterator[None]:
    """Ask each run for its graph, as divided among the devices."""
    import tensorflow as tf

    # Where it is defined: sessions of all kinds inherit it.
    base: Any = next(one for one in tf.compat.v1.Session.__mro__ if "run" in vars(one))
    original = base.run

    def run(self: Any, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        asked = tf.compat.v1.RunOptions()
        if options is not None:
            asked.CopyFrom(options)
        asked.output_partition_graphs = True
        metadata = tf.compat.v1.RunMetadata() if run_metadata is None else run_metadata
        results = original(self, fetches, feed_dict, asked, metadata)
        _add(table, (operation.node_def for operation in self.graph.get_operations()), metadata.partition_graphs)
        return results

    base.run = run
    try:
        yield
    finally:
        base.run = original


@contextlib.contextmanager
def _functions(table: Table) -> Iterator[None]:
    """Collect the graphs of functions, before and after they were divided among the devices."""
    from tensorflow.python.eager import context

    found = context.context()
    found.enable_graph_collection()
    try:
        yield
        for graphs in found.export_run_metadata().function_graphs:
            _add(table, graphs.pre_optimization_graph.node, graphs.partition_graphs)
    finally:
        found.disable_graph_collection()


@contextlib.contextmanager
def _eager_operations(table: Table) -> Iterator[None]:
    """Be called after each operation that is executed at once."""
    from tensorflow.python.eager import context

    found = context.context()

    def executed(kind: str, inputs: Any, attributes: Any, outputs: Any, name: Any = None, **_: Any) -> None:
        if not kind.startswith("__"):  # a function, whose graph is collected
            devices = {output.backing_device for output in outputs if hasattr(output, "backing_device")}
            for device in sorted(devices):
                table.add(Row((name or _written(kind)).rstrip("/"), _written(kind), found.device_name or "", device))

    found.add_op_callback(executed)
    try:
        yield
    finally:
        found.remove_op_callback(executed)


def _add(table: Table, program: Iterable[Any], partitions: Iterable[Any]) -> None:
    """The operations of the program; those that TensorFlow has put between them are left out."""
    written = {node.name: node for node in program if node.op not in ARGUMENTS}
    ran = {node.name: node for graph in partitions for node in graph.node if node.name in written}
    for node in ran.values():
        parts = [node.name]
        for name in parts:
            one = written[name]
            table.add(Row(_written(name), _written(one.op), one.device, node.device))
            # What was fused into an operation ran with it, though no node of its name is left.
            if "Fused" in node.op:
                inputs = (each.split(":")[0] for each in one.input)
                parts += [each for each in inputs if each in written and each not in ran and each not in parts]


def _written(kind: str) -> str:
    """As the program calls it: where oneDNN is on, TensorFlow runs a `MatMul` as `_MklMatMul`."""
    return re.sub("^_Mkl(Native)?", "", kind)
