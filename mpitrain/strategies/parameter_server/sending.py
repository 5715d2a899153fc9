"""What a worker knows of one optimizer whose parameters are on servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitrain.comm.communicator import Buffer, Request
from mpitrain.strategies.parameter_server.layout import Layout
from mpitrain.strategies.parameter_server.messages import Answer


@dataclass
class Coming:
    """A part on its way to this worker."""

    header: Buffer  # of the answer
    request: Request  # for it
    values: Buffer | None = None  # of a dense part, where they arrive
    values_request: Request | None = None  # for them


@dataclass
class Sending:
    """One optimizer, as a worker sees it."""

    number: int  # of the session
    setup: Mapping[str, Any]  # what the servers are told
    layout: Layout  # the messages of an update
    versions: dict[int, int] = field(default_factory=dict)  # updates of each server that this worker has seen
    # of each variable the names of the optimizer's slots, once a server has told
    slot_names: dict[int, list[str]] = field(default_factory=dict)
    begun: bool = False  # the servers have it
    discard: bool = False  # the next gradient is of parameters that are not the servers', and does not count
    last: Answer | None = None  # the last answer of an update
    dropped: int = 0  # gradients of this worker that did not count
    coming: dict[int, Coming] = field(default_factory=dict)  # parts under way, by their positions
    # of buckets under way, where their values are put together
    targets: dict[int, Buffer] = field(default_factory=dict)

    def note_slots(self, server: int, names: Sequence[Sequence[list[str]]]) -> None:
        """Local: a server has told the names of slots, by its parts and their pieces."""
        for number, of_part in zip(self.layout.of_server(server), names, strict=True):
            for piece, slots in zip(self.layout.parts[number].pieces, of_part, strict=True):
                self.slot_names[piece.shard.variable] = slots

    def on_shrink(self) -> tuple[object, object]:
        """Local: workers were lost, and the servers have this optimizer; what was under way, and may still arrive."""
        left_behind = self.coming, self.targets
        self.coming, self.targets, self.versions = {}, {}, {}
        self.begun, self.discard = self.last is not None, False
        return left_behind
