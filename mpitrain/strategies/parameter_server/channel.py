"""The messages between a worker and its servers, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from mpitrain.comm.communicator import Buffer, Communicator, Request
from mpitrain.errors import CollectiveError, UsageError
from mpitrain.strategies.parameter_server.messages import Answer, Message, Status, from_text
from mpitrain.strategies.parameter_server.roles import Roles


class Channel:
    """Messages of one worker to servers, and from them, who are named by their positions among the servers.

    Args:
        there: all ranks of the job, on the way to the servers.
        back: the same on the way from them.

    Attributes:
        roles: as they are now.
        worker: this rank's position among the workers.
    """

    def __init__(self, there: Communicator, back: Communicator, roles: Roles, hosts: Sequence[str]) -> None:
        self._there, self._back = there, back
        self.renew(roles, hosts)

    def renew(self, roles: Roles, hosts: Sequence[str]) -> None:
        """Local: from now on messages go between these ranks, which the communicators have now."""
        self.roles, self._hosts = roles, tuple(hosts)
        self.worker = roles.workers.index(self._there.rank)

    def start(self, server: int, *buffers: Buffer) -> list[Request]:
        """Local: begin to send; the memory is free once what is returned has been waited for."""
        rank = self.roles.servers[server]
        return [self._there.isend(_flat(buffer), rank) for buffer in buffers if buffer.nbytes]

    def send(self, server: int, *buffers: Buffer) -> None:
        """Local: send arrays; returns when their memory is free."""
        for buffer in buffers:
            flat = _flat(buffer)
            if flat.nbytes:
                self._there.isend(flat, self.roles.servers[server]).wait()

    def expect(self, server: int, buffer: Buffer) -> Request:
        """Local: an array will come to be put here."""
        return self._back.irecv(buffer.reshape(-1), self.roles.servers[server])

    def new_header(self) -> Buffer:
        """Local: room for an answer."""
        return np.zeros(Answer.words(len(self.roles.workers)))

    def say(self, server: int, message: Message, *buffers: Buffer) -> None:
        """Local: send a message, and arrays behind it."""
        self.send(server, message.pack(), *buffers)

    def receive(self, server: int, *buffers: Buffer) -> None:
        """Local: wait for arrays, and put them here."""
        for buffer in buffers:
            if buffer.nbytes:
                self.expect(server, buffer).wait()

    def hear(self, server: int) -> Answer:
        """Local: wait for an answer."""
        header = self.new_header()
        self.receive(server, header)
        return Answer.unpack(header)

    def hear_text(self, server: int) -> Any:
        """Local: wait for an answer, and what it holds.

        Raises:
            UsageError: the server refuses, on the first worker.
            CollectiveError: likewise, on others.
        """
        answer = self.hear(server)
        if answer.status is Status.REFUSED:
            self.refuse(server, answer)
        text = np.empty(answer.count, np.uint8)
        self.receive(server, text)
        return from_text(text)

    def refuse(self, server: int, answer: Answer) -> NoReturn:
        """Local: raise why a server refuses.

        Raises:
            UsageError: on the first worker.
            CollectiveError: on others.
        """
        text = np.empty(answer.count, np.uint8)
        self.receive(server, text)
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
