"""Turns of what is measured against each other."""

from __future__ import annotations

from functools import partial

from mpitrain.bench.interleave import interleave


def test_turns_alternate() -> None:
    order: list[str] = []

    def turn(name: str) -> list[float]:
        order.append(name)
        return [float(len(order))]

    turns = {name: partial(turn, name) for name in "abc"}
    assert interleave(turns, 2) == {"a": (1.0, 6.0), "b": (2.0, 4.0), "c": (3.0, 5.0)}
    assert order == list("abcbca")
