"""Parameter servers make the updates that one process makes of the same gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.strategies.parameter_server.served_job import check, run, train

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "global_clipnorm": 0.5}),
    ("Adam", {"clipnorm": 0.1, "amsgrad": True}),
    ("AdamW", {"clipvalue": 0.2, "use_ema": True, "ema_momentum": 0.5}),
    ("Nadam", {"global_clipnorm": 0.5}),
    ("Adafactor", {"clipnorm": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{c[0]}-{len(c[1])}" for c in CASES])
def test_updates_are_those_of_one_process(name: str, options: dict[str, Any]) -> None:
    found = run(4, lambda world: train(world, name, options), servers="2", max_shard_bytes=200)
    assert len(found) == 2
    for one in found:
        check(one, name, options, 2)
