"""Messages between a worker and its servers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.errors import CollectiveError, UsageError
from mpitrain.strategies.parameter_server.channel import Channel
from mpitrain.strategies.parameter_server.messages import COLUMNS, Answer, Kind, Message, Status, as_text
from mpitrain.strategies.parameter_server.roles import Roles
from tests import simulated

ROLES = Roles((0,), (1, 2))
HOSTS = ["node1", "node2", "node3"]
Communicator = simulated.SimulatedCommunicator


def answer(status: Status, content: Any) -> list[Any]:
    """A server's: its header, and a text."""
    text, workers = as_text(content), np.arange(2.0 * COLUMNS).reshape(2, COLUMNS)
    return [Answer(status, 3, 1, 7, 6, len(text), 2.5, 9, workers).pack(), text]


def send(communicator: Communicator, rank: int, buffers: list[Any]) -> None:
    for buffer in buffers:
        communicator.isend(buffer, rank).wait()


def test_a_question_and_its_answer() -> None:
    asked = Message(Kind.ROWS, 3, 1, 7, 0.5, 0.25, 4, 11, 1, (1.0,) * len(Message(Kind.STOP).report))

    def rank(communicator: Communicator) -> Any:
        if communicator.rank == 0:
            words, numbers = np.zeros(Message.WORDS), np.zeros(4, np.int64)
            for worker in (1, 2):
                for buffer in (words, numbers):
                    communicator.irecv(buffer, worker).wait()
                send(communicator, worker, answer(Status.OK, {"rank": worker}))
            return Message.unpack(words), numbers.tolist()
        channel = Channel(communicator, communicator, ROLES, HOSTS)
        assert channel.worker == communicator.rank - 1
        table = np.arange(8, dtype=np.int64).reshape(2, 4)[:, ::2]  # whose numbers do not lie side by side
        channel.say(0, asked, np.zeros(0), table)  # what is empty does not travel
        return channel.hear_text(0)

    assert simulated.run(3, rank) == [(asked, [0, 2, 4, 6]), {"rank": 1}, {"rank": 2}]


def test_a_refusal_names_the_server() -> None:
    def rank(communicator: Communicator) -> str:
        if communicator.rank == 0:
            for worker in (1, 2):
                send(communicator, worker, answer(Status.REFUSED, "no such optimizer"))
            return ""
        channel = Channel(communicator, communicator, ROLES, HOSTS)
        with pytest.raises(UsageError if communicator.rank == 1 else CollectiveError) as caught:
            channel.hear_text(0)
        return str(caught.value)

    _, first, other = simulated.run(3, rank)
    assert first.startswith("the parameter server on rank 0 (node1) cannot make this optimizer: no such optimizer")
    assert other.startswith("the parameter server on rank 0 (node1) cannot take part in an update")


def test_the_header_of_an_answer() -> None:
    header = answer(Status.DROPPED, "")[0]
    found = Answer.unpack(header)
    assert len(header) == Answer.words(2)
    assert (found.status, found.session, found.part, found.version, found.iterations) == (Status.DROPPED, 3, 1, 7, 6)
    assert (found.samples, found.position, found.workers[1, 0]) == (2.5, 9, COLUMNS)
