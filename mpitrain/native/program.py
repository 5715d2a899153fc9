"""The exchange in what XLA compiles: a call of `xla.c`, which TensorFlow's operation `XlaCallModule` makes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mpitrain.native.library import Library, process
from mpitrain.native.operation import Record, keep

NAME = "mpitrain_exchange"
VERSION = 5  # of XlaCallModule: the first in which a module may call such functions
TYPES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int32": "i32"}
Shaped = tuple[str, Sequence[int]]  # dtype and shape


@functools.cache
def refused(library: Library) -> str | None:
    """Local: why XLA cannot call the exchange here; None where it can. Tried out once a process, in half a second."""
    if tf.config.get_visible_devices("GPU"):
        return "what XLA compiles for a GPU cannot call machine code of the host"
    try:
        reason = library.setup_xla(NAME)
        if reason is None:
            with tf.init_scope(), tf.device("CPU:0"):
                found = int(_tried()(tf.constant(1)))
            reason = None if found == 3 else f"of two calls out of a program came {found}"
    except Exception as error:  # names, arguments or formats of another version
        return f"XLA cannot call out of what it compiles: {type(error).__name__}: {error}"
    return reason


def exchange(
    record: Record,
    index: int,
    turn: tf.Tensor,
    samples: tf.Tensor,
    tensors: Sequence[tf.Tensor],
    shaped: Sequence[Shaped],
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Collective, when it runs: the means of the tensors of one bucket, as a node of a graph that XLA compiles.

    Args:
        record: of a plan.
        index: of the bucket.
        turn: a scalar int32, which orders the calls.
        samples: a scalar float64.
        tensors: the gradients.
        shaped: dtype and shape of each.

    Returns:
        The turn of the next call, and the means.
    """
    keep(tf.compat.v1.get_default_graph(), record)
    turn, *means = _call(record.addresses[index], [turn, samples, *tensors], [("int32", ()), ("float64", ()), *shaped])
    return turn, means


def _tried() -> Any:
    @tf.function(jit_compile=True, autograph=False)
    def two_calls(turn: tf.Tensor) -> tf.Tensor:
        for _ in range(2):
            (turn,) = _call(0, [turn], [("int32", ())])
        return turn

    return two_calls


def _call(bucket: int | None, tensors: Sequence[tf.Tensor], shaped: Sequence[Shaped]) -> list[tf.Tensor]:
    """Collective, when it runs: the first argument is the turn, the second this rank's samples, if there are two."""
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    results = [*shaped[:1], *shaped[2:]]
    found: list[tf.Tensor] = gen_xla_ops.xla_call_module(
        args=list(tensors),
        version=VERSION,
        module=_module(bucket, [*map(_type, shaped)]).encode(),
        Sout=[list(shape) for _, shape in results],
        Tout=[dtype for dtype, _ in results],
        platforms=["CPU"],
        function_list=[],
        has_token_input_output=False,
        disabled_checks=[],
    )
    return list(found)


def _type(shaped: Shaped) -> str:
    dtype, shape = shaped
    return f"tensor<{''.join(f'{size}x' for size in shape)}{TYPES[dtype]}>"


def _module(bucket: int | None, types: Sequence[str]) -> str:
    """Local: the program of one call. Each result takes the memory of its argument."""
    given = [f"%arg{number}" for number in range(len(types))]
    places = [number for number in range(len(types)) if number != 1]
    wanted = ", ".join(types[number] for number in places)
    made = [f"%0#{number}" for number in range(len(places))] if len(places) > 1 else ["%0"]
    aliases = ", ".join(
        f"#stablehlo.output_operand_alias<output_tuple_indices = [{number if len(places) > 1 else ''}], "
        f"operand_index = {place}, operand_tuple_indices = []>"
        for number, place in enumerate(places)
    )
    attributes = (
        "api_version = 4 : i32, has_side_effect = true, "
        f"backend_config = {{bucket = {bucket} : i64, process = {process()} : i64}}, "
        f"output_operand_aliases = [{aliases}]"
    )
    arguments = ", ".join(f"{name}: {kind}" for name, kind in zip(given, types, strict=True))
    return (
        "module @mpitrain attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {\n"
        f"func.func public @main({arguments}) -> ({wanted}) {{\n"
        f"%0{f':{len(places)}' if len(places) > 1 else ''} = stablehlo.custom_call @{NAME}({', '.join(given)}) "
        f"{{{attributes}}} : ({', '.join(types)}) -> ({wanted})\n"
        f"return {', '.join(made)} : {wanted}\n}}\n}}"
    )
