"""What a server makes of the gradients of its workers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from mpitrain.reduction.buckets import TensorSpec
from mpitrain.strategies.parameter_server.layout import setup_of
from mpitrain.strategies.parameter_server.messages import Kind, Message
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.sessions import Session

RATE = 0.5
SPECS = [TensorSpec("a", (2, 2), "float64"), TensorSpec("b", (4, 2), "float64", sparse=True)]
SETUP = {
    **setup_of("of a test", SPECS, 1 << 20, []),
    "optimizer": keras.optimizers.serialize(keras.optimizers.SGD(RATE)),
    "floatx": "float64",
    "decayed": [False, False],
    "constraints": [None, None],
    "clipnorm": None,
    "global_clipnorm": None,
}
DENSE = [np.array([1.0, 2.0, 3.0, 4.0]), np.array([3.0, 0.0, 1.0, 2.0])]  # of workers 0 and 1
ROWS = [(np.array([[1.0, 1.0]]), np.array([2])), (np.array([[2.0, 4.0], [6.0, 0.0]]), np.array([0, 2]))]
SAMPLES = (1.0, 3.0)


class Server:
    """A session, its answers, and what it was asked to add up."""

    def __init__(self, **changes: Any) -> None:
        self.answers: list[tuple[int, int, bool]] = []
        self.added: list[list[float]] = []
        calls = (lambda session, *one: self.answers.append(one), self.add_up)
        self.session = Session(0, {**SETUP, **changes}, 0, 1, 2, ServerOptions(), False, *calls)
        for part in self.session.own:
            states = self.session.empty_states(part, with_slots=False)
            for state in states:
                state[0][...] = 10.0
            self.session.parts[part].set_state(states, 0)

    def add_up(self, sums: Any, servers: Any) -> Any:
        self.added.append(sums.tolist())
        return sums

    def push(self, worker: int, **changes: Any) -> None:
        for part in self.session.own:
            content = ROWS[worker] if self.session.layout.parts[part].sparse else DENSE[worker].copy()
            message = Message(Kind.PUSH, 0, part, samples=SAMPLES[worker], count=len(content[0:1]), **changes)
            self.session.came(worker, message, content)

    def values(self) -> list[Any]:
        """Of a and b, as they are now."""
        found: dict[int, Any] = {}
        for part in self.session.own:
            for piece, shard in zip(
                self.session.layout.parts[part].pieces, self.session.parts[part].shards, strict=True
            ):
                found[piece.shard.variable] = shard.state()[0]
        return [found[number].reshape(SPECS[number].shape) for number in range(2)]


def means() -> list[Any]:
    """Of the gradients of both workers, over their samples."""
    rows = np.zeros((4, 2))
    for (values, indices), samples in zip(ROWS, SAMPLES, strict=True):
        np.add.at(rows, indices, values * samples / sum(SAMPLES))
    return [(DENSE[0] * SAMPLES[0] + DENSE[1] * SAMPLES[1]).reshape(2, 2) / sum(SAMPLES), rows]


def test_the_mean_over_samples_is_applied_once_all_have_come() -> None:
    server = Server()
    server.push(0)
    assert server.answers == []
    server.push(1)
    for value, mean in zip(server.values(), means(), strict=True):
        np.testing.assert_allclose(value, 10.0 - RATE * mean, rtol=1e-14)
    assert server.session.iterations == 1
    assert sorted(server.answers) == [(worker, part, False) for worker in (0, 1) for part in server.session.own]
    assert server.added == []


@pytest.mark.parametrize("kind", ["clipnorm", "global_clipnorm"])
def test_gradients_are_clipped_by_the_norm_of_their_mean(kind: str) -> None:
    server, limit = Server(**{kind: 2.0}), 2.0
    server.push(0)
    server.push(1)
    squares = [float((mean**2).sum()) for mean in means()]
    assert server.added == [pytest.approx(squares)]
    norms = np.sqrt(squares) if kind == "clipnorm" else np.sqrt([sum(squares)] * 2)
    for value, mean, norm in zip(server.values(), means(), norms, strict=True):
        np.testing.assert_allclose(value, 10.0 - RATE * mean * limit / max(norm, limit), rtol=1e-12)


def test_after_a_loss_nobody_has_got_anything() -> None:
    server = Server()
    server.session.answered, server.session.seen = {0: 3}, {(0, 0): 1}
    server.session.on_shrink([1])
    assert (server.session.answered, server.session.seen) == ({}, {})
    server.push(0)  # who was worker 1, and is alone now
    assert server.session.iterations == 1
