"""Device functions: variables on parameter servers, everything else on workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpitrain.placement.spreading import By, choice

Jobs = Mapping[str, Sequence[str]]


def device_setter(
    jobs: Jobs, *, by: By = "bytes", servers: str = "ps", compute: str = "/job:worker"
) -> Callable[[Any], str]:
    """Local: a function for `tf.compat.v1.device` in a graph: each variable goes to one of the servers.

    It is `tf.compat.v1.train.replica_device_setter` with a choice by bytes, too. What an operation says of its own
    device, or a `tf.device` inside, wins; what is left open there is filled in from here.

    Args:
        jobs: addresses of each job, as `Cluster.jobs`.
        by: `bytes`, or `round_robin`.
        servers: the job that holds the variables.
        compute: the device of everything else.

    Example:
        >>> setter = mpitrain.placement.device_setter({"ps": ["h:1", "h:2"], "worker": ["h:3"]})
        >>> with tf.Graph().as_default(), tf.compat.v1.device(setter):
        ...     tf.compat.v1.get_variable("v", [3], use_resource=True).device
        '/job:ps/task:0'
    """
    import tensorflow as tf

    rule = choice(len(jobs[servers]), by)
    return tf.compat.v1.train.replica_device_setter(  # type: ignore[no-any-return]
        ps_device=f"/job:{servers}",
        worker_device=compute,
        cluster={job: list(addresses) for job, addresses in jobs.items()},
        ps_strategy=lambda operation: rule(_bytes_of(operation)),
    )


@contextlib.contextmanager
def variables_on(devices: Sequence[str], *, by: By = "bytes") -> Iterator[None]:
    """Local: variables that are made within go to one of these devices; for eager programs and Keras models.

    Args:
        devices: such as `["/job:ps/task:0", "/job:ps/task:1"]`, or two GPUs.
        by: `bytes`, or `round_robin`.

    Example:
        >>> with mpitrain.placement.variables_on(["/CPU:0"]):
        ...     weight = tf.Variable([1.0])
    """
    import tensorflow as tf

    rule = choice(len(devices), by)

    def create(next_creator: Callable[..., Any], **options: Any) -> Any:
        value, shape = options.get("initial_value"), options.get("shape")
        if callable(value) and (shape is None or tf.TensorShape(shape).num_elements() is None):
            with tf.init_scope():
                options["initial_value"] = value = value()  # once: it may draw random numbers
        with tf.device(devices[rule(_bytes_of_value(value, shape, options.get("dtype")))]):
            return next_creator(**options)

    with tf.variable_creator_scope(create):
        yield


def _bytes_of(operation: Any) -> int:
    """Of the variable that an operation makes; 0 where its shape is not known."""
    import tensorflow as tf

    attributes = getattr(operation, "node_def", operation).attr
    shape = tf.TensorShape(attributes["shape"].shape) if "shape" in attributes else tf.TensorShape(None)
    elements = shape.num_elements()
    return (elements or 0) * int(tf.as_dtype(attributes["dtype"].type).size) if elements else 0


def _bytes_of_value(value: Any, shape: Any, dtype: Any) -> int:
    """Of a variable of a certain shape, else with a certain value."""
    import numpy as np
    import tensorflow as tf

    elements = None if shape is None else tf.TensorShape(shape).num_elements()
    if elements is None:
        elements = tf.TensorShape(np.shape(value)).num_elements()
    dtype = dtype or getattr(value, "dtype", tf.float32)
    return int(elements or 0) * int(tf.as_dtype(dtype).size)
