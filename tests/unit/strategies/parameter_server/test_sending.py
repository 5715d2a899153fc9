"""What a worker knows of one optimizer."""

from __future__ import annotations

from typing import cast

import numpy as np

from mpitrain.comm.communicator import Request
from mpitrain.reduction.buckets import TensorSpec
from mpitrain.strategies.parameter_server.layout import layout, setup_of
from mpitrain.strategies.parameter_server.messages import COLUMNS, Answer, Status
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.sending import Coming, Sending

SETUP = setup_of("of a test", [TensorSpec("a", (4, 2), "float32"), TensorSpec("b", (3,), "float64")], 1 << 20, [])


def sending() -> Sending:
    return Sending(0, SETUP, layout(SETUP, 2, ServerOptions("2")))


def test_names_of_slots_go_to_their_variables() -> None:
    session = sending()
    for server in range(2):
        parts = [session.layout.parts[number] for number in session.layout.of_server(server)]
        session.note_slots(server, [[[f"slot of {piece.shard.variable}"] for piece in part.pieces] for part in parts])
    assert session.slot_names == {0: ["slot of 0"], 1: ["slot of 1"]}


def test_after_a_loss_it_begins_anew_where_servers_had_it() -> None:
    session = sending()
    session.begun, session.discard, session.versions = True, True, {0: 3}
    coming = {0: Coming(np.zeros(1), cast(Request, None))}
    session.coming, session.targets = coming, {0: np.zeros(2)}
    left_behind = session.on_shrink()
    assert left_behind[0] is coming  # kept: something may still arrive in it
    assert (session.coming, session.targets, session.versions) == ({}, {}, {})
    assert (session.begun, session.discard) == (False, False)
    session.last = Answer(Status.OK, 0, 0, 1, 1, 0, 1.0, 0, np.zeros((1, COLUMNS)))
    session.on_shrink()
    assert session.begun
