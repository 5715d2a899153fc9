"""The operation `MpitrainExchange` of TensorFlow, whose kernel is machine code; through TensorFlow's C API."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import op_def_library

from mpitrain.native.library import Library, process, tensorflow_framework

NAME = "MpitrainExchange"
KEPT = "_mpitrain_kept"  # attribute of a graph: what its operations refer to by address


class Record(Protocol):
    """What an operation refers to: its memory must stay for as long as it can run."""

    addresses: list[int | None]  # of a `BucketStruct` for each bucket
    error: BaseException | None  # what Python has raised when it was called, if that was in the latest call


def exchange(
    library: Library, record: Record, index: int, samples: tf.Tensor, tensors: Sequence[tf.Tensor]
) -> list[Any]:
    """Collective: the means of the tensors of one bucket; in a graph when it runs.

    Args:
        library: the machine code.
        record: of a plan.
        index: of the bucket.
        samples: a scalar float64.
        tensors: the gradients, of the sizes and dtypes of the bucket.

    Raises:
        Exception: eagerly, what Python raised.
    """
    _register(library)
    bucket = record.addresses[index]
    if tf.executing_eagerly():
        return _execute(bucket, record, samples, tensors)
    with tf.device("CPU:0"):
        inputs = {"samples": samples, "gradients": list(tensors)}
        means = op_def_library.apply_op(NAME, **inputs, bucket=bucket, process=process())
    keep(tf.compat.v1.get_default_graph(), record)
    for mean, tensor in zip(means, tensors, strict=True):
        mean.set_shape(tensor.shape)
    return list(means)


def _execute(bucket: int | None, record: Record, samples: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[Any]:
    dtypes = [tensor.dtype.as_datatype_enum for tensor in tensors]
    attributes = ("T", dtypes, "bucket", bucket, "process", process())
    inputs = [tf.convert_to_tensor(one) for one in (samples, *tensors)]  # a variable, for one, is none
    try:
        return list(execute.execute(NAME.encode(), len(tensors), inputs, attributes, ctx=context.context()))
    except tf.errors.OpError:
        if record.error is not None:
            raise record.error from None
        raise


def keep(graph: Any, one: Any) -> None:
    """Local: for as long as the graph, or one around it, can run."""
    graphs = [graph]
    while graphs[-1].building_function:
        graphs.append(graphs[-1].outer_graph)
    for holder in graphs[: len(graphs) - 1 or 1]:  # around functions stands one that never goes
        if not hasattr(holder, KEPT):
            setattr(holder, KEPT, [])
        getattr(holder, KEPT).append(one)


@functools.cache
def _register(library: Library) -> None:
    """Local: tell TensorFlow of the operation and its kernel, once a process."""
    framework = tensorflow_framework()

    def call(name: str, *arguments: Any, result: Any = None) -> Any:
        function = getattr(framework, name)
        function.restype = result
        return function(*[ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments])

    status = call("TF_NewStatus", result=ctypes.c_void_p)
    builder = call("TF_NewOpDefinitionBuilder", NAME.encode(), result=ctypes.c_void_p)
    call("TF_OpDefinitionBuilderAddAttr", builder, b"T: list({half,bfloat16,float,double}) >= 1")
    call("TF_OpDefinitionBuilderAddAttr", builder, b"bucket: int")
    call("TF_OpDefinitionBuilderAddAttr", builder, b"process: int")
    call("TF_OpDefinitionBuilderAddInput", builder, b"samples: double")
    call("TF_OpDefinitionBuilderAddInput", builder, b"gradients: T")
    call("TF_OpDefinitionBuilderAddOutput", builder, b"means: T")
    call("TF_OpDefinitionBuilderSetIsStateful", builder, ctypes.c_bool(True))
    unknown = ctypes.cast(framework.TF_ShapeInferenceContextSetUnknownShape, ctypes.c_void_p)
    call("TF_OpDefinitionBuilderSetShapeInferenceFunction", builder, unknown)
    call("TF_RegisterOpDefinition", builder, status)
    _check(framework, status)
    functions = [ctypes.c_void_p(one) for one in (library.create, library.compute, library.delete)]
    kernel = call("TF_NewKernelBuilder", NAME.encode(), b"CPU", *functions, result=ctypes.c_void_p)
    call("TF_RegisterKernelBuilder", NAME.encode(), kernel, status)
    _check(framework, status)
    call("TF_DeleteStatus", status)
    tf.no_gradient(NAME)  # as calls of Python have none


def _check(framework: Any, status: int) -> None:
    framework.TF_Message.restype = ctypes.c_char_p
    if framework.TF_GetCode(ctypes.c_void_p(status)):
        message = framework.TF_Message(ctypes.c_void_p(status)).decode()
        raise RuntimeError(f"TensorFlow refused the operation {NAME}: {message}")
