"""What a worker asks the servers between updates."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.comm.communicator import Buffer
from mpitrain.strategies.parameter_server.arrays import State, insert
from mpitrain.strategies.parameter_server.channel import Channel
from mpitrain.strategies.parameter_server.messages import Kind, Message
from mpitrain.strategies.parameter_server.sending import Sending


def state(channel: Channel, session: Sending) -> tuple[State, int]:
    """Local: parameters and slots of the servers: of each variable its value and slots; and the updates made."""
    found: State = [[] for _ in session.layout.plan.specs]
    iterations = 0
    for server in range(len(channel.roles.servers)):
        channel.say(server, Message(Kind.STATE, session.number))
        told = channel.hear_text(server)
        iterations = max(iterations, told["iterations"])
        session.note_slots(server, told["slots"])
        arrays = [[np.empty(shape, dtype) for dtype, shape in shapes] for shapes in told["shapes"]]
        channel.receive(server, *[array for state in arrays for array in state])
        pieces = [piece for number in session.layout.of_server(server) for piece in session.layout.parts[number].pieces]
        for piece, own in zip(pieces, arrays, strict=True):
            insert(found, session.layout.plan.specs[piece.shard.variable].shape, piece.shard, own)
    return found, iterations


def rows(channel: Channel, session: Sending, variable: int, indices: Buffer) -> Buffer:
    """Local: some rows of a variable whose gradients are sparse, as the servers have them now."""
    spec = session.layout.plan.specs[variable]
    result = np.empty((len(indices), *spec.shape[1:]), spec.dtype)
    for number, part in enumerate(session.layout.parts):
        shard = part.pieces[0].shard
        if not part.sparse or shard.variable != variable:
            continue
        mine = np.flatnonzero((indices >= shard.begin) & (indices < shard.end))
        if not len(mine):
            continue
        asked = indices[mine].astype(np.int64) - shard.begin
        channel.say(part.server, Message(Kind.ROWS, session.number, number, count=len(mine)), asked)
        values = np.empty((channel.hear(part.server).count, *spec.shape[1:]), spec.dtype)
        channel.receive(part.server, values)
        result[mine] = values
    return result


def counts(channel: Channel, session: Sending) -> dict[str, Any]:
    """Local: what the server of the last part has counted: updates, dropped gradients, staleness."""
    server = session.layout.parts[-1].server
    channel.say(server, Message(Kind.COUNTS, session.number))
    return dict(channel.hear_text(server))


def done(channel: Channel) -> dict[int, int]:
    """Local: how many gradients of each rank that is or was a worker the servers have applied, or dropped."""
    found: dict[int, int] = {}
    for server in range(len(channel.roles.servers)):
        channel.say(server, Message(Kind.COUNTS))
        for number, count in channel.hear_text(server)["done"].items():
            # Of a lost worker some servers may have got the last gradient and others not.
            found[int(number)] = max(count, found.get(int(number), 0))
    return found
