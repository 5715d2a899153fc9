"""What a worker says to servers, and hears from them, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from mpitrain.comm.communicator import Buffer, Communicator, Request
from mpitrain.errors import CollectiveError, UsageError
from mpitrain.strategies.parameter_server.messages import Answer, Kind, Message, Status, from_text
from mpitrain.strategies.parameter_server.roles import Roles


class Talk:
    """Messages of one worker.

    Args:
        there: all ranks of the job, on the way to the servers.
        back: the same on the way from them.
        roles: who does what.
        hosts: host name of each rank, for messages.
    """

    def __init__(self, there: Communicator, back: Communicator, roles: Roles, hosts: Sequence[str]) -> None:
        self._there, self._back = there, back
        self.between(roles, hosts)

    def between(self, roles: Roles, hosts: Sequence[str]) -> None:
        """Local: from now on messages go between these ranks, which the communicators have now."""
        self.roles, self._hosts = roles, tuple(hosts)
        self.worker = roles.workers.index(self._there.rank)

    def done(self) -> dict[int, int]:
        """Local: how many gradients of each rank that is or was a worker the servers have applied, or dropped."""
        found: dict[int, int] = {}
        for server in range(len(self.roles.servers)):
            self._say(server, Message(Kind.COUNTS))
            for number, count in self._hear_text(server)["done"].items():
                found[int(number)] = max(count, found.get(int(number), 0))
        return found

    def _start(self, server: int, *buffers: Buffer) -> list[Request]:
        rank = self.roles.servers[server]
        return [self._there.isend(_flat(buffer), rank) for buffer in buffers if buffer.nbytes]

    def _send(self, server: int, *buffers: Buffer) -> None:
        for buffer in buffers:
            flat = _flat(buffer)
            if flat.nbytes:
                self._there.isend(flat, self.roles.servers[server]).wait()

    def _say(self, server: int, message: Message, *buffers: Buffer) -> None:
        self._send(server, message.pack(), *buffers)

    def _receive(self, server: int, *buffers: Buffer) -> None:
        rank = self.roles.servers[server]
        for buffer in buffers:
            if buffer.nbytes:
                self._back.irecv(buffer.reshape(-1), rank).wait()

    def _hear(self, server: int) -> Answer:
        header = np.zeros(Answer.words(len(self.roles.workers)))
        self._receive(server, header)
        return Answer.unpack(header)

    def _hear_text(self, server: int) -> Any:
        answer = self._hear(server)
        if answer.status is Status.REFUSED:
            self._refused(server, answer)
        text = np.empty(answer.count, np.uint8)
        self._receive(server, text)
        return from_text(text)

    def _refused(self, server: int, answer: Answer) -> NoReturn:
        text = np.empty(answer.count, np.uint8)
        self._receive(server, text)
        rank = self.roles.servers[server]
        where = f"the parameter server on rank {rank} ({self._hosts[rank]})"
        if self.worker == 0:
            raise UsageError(
                f"{where} cannot make this optimizer: {from_text(text)}. Servers do not run the script: an optimizer "
                "of your own has to be in a module that is installed on all hosts, and registered with "
                "keras.saving.register_keras_serializable."
            )
        raise CollectiveError(f"{where} cannot take part in an update of this worker: {from_text(text)}")


def _flat(buffer: Buffer) -> Buffer:
    return np.ascontiguousarray(buffer).reshape(-1)
