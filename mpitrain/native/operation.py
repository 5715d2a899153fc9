"""The operation `MpitrainExchange` of TensorFlow, whose kernel is machine code; through TensorFlow's C API."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import op_def_library

from mpitrain.native.library import Library, tensorflow_framework

NAME = "MpitrainExchange"
KEPT = "_mpitrain_kept"  # attribute of a graph: what its operations refer to by address


def exchange(library: Library, bucket: int, keep: Any, samples: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[Any]:
    """Collective, when it runs: the means of the tensors of one bucket, at once or as a node of the graph being traced.

    Args:
        library: the machine code.
        bucket: address of a `BucketStruct`.
        keep: the object that has its memory.
        samples: a scalar float64.
        tensors: the gradients, of the sizes and dtypes of the bucket.
    """
    _register(library)
    with tf.device("CPU:0"):
        if tf.executing_eagerly():
            dtypes = [tensor.dtype.as_datatype_enum for tensor in tensors]
            attributes = ("T", dtypes, "bucket", bucket)
            means = execute.execute(
                NAME.encode(), len(tensors), [samples, *tensors], attributes, ctx=context.context(), name=None
            )
        else:
            means = op_def_library.apply_op(NAME, samples=samples, gradients=list(tensors), bucket=bucket)
            _keep(tf.compat.v1.get_default_graph(), keep)
    for mean, tensor in zip(means, tensors, strict=True):
        mean.set_shape(tensor.shape)
    return list(means)


def _keep(graph: Any, one: Any) -> None:
    """Local: for as long as the graph, or one around it, can run."""
    while graph.building_function:
        if not hasattr(graph, KEPT):
            setattr(graph, KEPT, [])
        getattr(graph, KEPT).append(one)
        graph = graph.outer_graph


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


def _check(framework: Any, status: int) -> None:
    framework.TF_Message.restype = ctypes.c_char_p
    if framework.TF_GetCode(ctypes.c_void_p(status)):
        message = framework.TF_Message(ctypes.c_void_p(status)).decode()
        raise RuntimeError(f"TensorFlow refused the operation {NAME}: {message}")
