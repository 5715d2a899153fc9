"""What ranks agree on: each kind shows every difference, and is the same on the rank that gets it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from mpitrain.collectives.host import CollectiveCall, Reduction
from mpitrain.reduction.buckets import TensorSpec, UpdateCall
from mpitrain.scripts.batch_callbacks import BEGINS, ENDS, _BatchCall
from mpitrain.training.logs import LogsCall
from mpitrain.world.calls import Call, Meeting, meeting

SPEC = TensorSpec("kernel", (3, 2), "float16")
LOGS = LogsCall((("loss",), ("tower", 0)), ("accuracy", "loss"), "1 variables\ntotal float32[]")
# Of each kind one, and for each of its fields another value.
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (Meeting("end of fit"), {"place": "end of an epoch"}),
    (SPEC, {"name": "bias", "shape": (3,), "dtype": "float32", "sparse": True, "half": True}),
    (UpdateCall("update", (SPEC,)), {"owner": "gradients", "specs": (SPEC, SPEC), "added_up": True, "compiled": True}),
    (Reduction("sum", 1 / 3), {"op": "mean", "before": 0.333333, "after": 0.1, "half": True}),
    (
        CollectiveCall("all_reduce", "float32", (2, None), Reduction("sum"), 1, "x"),
        {"kind": "scan", "dtype": "int8", "shape": (2, 3), "how": Reduction("max"), "root": 2, "name": "y"},
    ),
    (LOGS, {"paths": (("loss",), ("tower", 1)), "results": ("loss",), "variables": "0 variables"}),
    (_BatchCall("train", ENDS, LOGS), {"kind": "test", "moment": BEGINS, "logs": replace(LOGS, results=())}),
]


def of(value: Any) -> Call:
    """What is no call itself is a part of one."""
    if isinstance(value, TensorSpec):
        return UpdateCall("update", (value,))
    return CollectiveCall("all_reduce", "int8", (), value) if isinstance(value, Reduction) else value


def changes() -> Iterator[Any]:
    for one, others in KINDS:
        assert set(others) == {field.name for field in fields(one)}
        for name, value in others.items():
            yield pytest.param(of(one), of(replace(one, **{name: value})), id=f"{type(one).__name__}-{name}")


@pytest.mark.parametrize(("one", "other"), [*changes()])
def test_every_difference_is_seen(one: Call, other: Call) -> None:
    assert one != other
    assert str(one) != str(other)
    assert one.signature != other.signature


@pytest.mark.parametrize("call", [of(one) for one, _ in KINDS], ids=lambda call: type(call).__name__)
def test_it_arrives_as_it_was_sent(call: Call) -> None:
    arrived = pickle.loads(pickle.dumps(call))
    assert (arrived, str(arrived), arrived.signature) == (call, str(call), call.signature)
    assert 2 <= call.signature < 1 << 63


def test_every_kind_is_here() -> None:
    assert {*Call.__subclasses__()} == {type(of(one)) for one, _ in KINDS}


def test_a_place_is_made_once() -> None:
    assert meeting("end of fit") is meeting("end of fit") == Meeting("end of fit")
