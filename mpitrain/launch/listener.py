"""Takes what ranks tell (see `runtime.marks`) out of their standard error."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mpitrain.faults.summary import FaultSummary
from mpitrain.runtime.marks import EVENTS, LONGEST_MARK, SIGN, Mark

# What taggers of Open MPI, Hydra and srun put before a line.
TAG = re.compile(rb"\s*(?:\[[\d,]+\](?:<stderr>)?:?|\d+:)\s*")


@dataclass
class Listener:
    """Takes the marks out of what ranks write to standard error."""

    secret: str  # of this run
    marks: list[Mark] = field(default_factory=list)  # those found so far
    _rest: bytes = b""

    def feed(self, data: bytes) -> bytes:
        """The same output, without marks; what may be the beginning of one is kept until more comes.

        At the end, when nothing comes, nothing is kept.
        """
        text, self._rest = self._rest + data, b""
        shown = bytearray()
        sign = SIGN + self.secret.encode() + b" "
        while text:
            start = text.find(SIGN)
            if start < 0:
                break
            shown += text[:start]
            text = text[start:]
            head = text[: len(sign)]
            end = text.find(b"\n")
            if sign.startswith(head) and end < 0 and len(text) <= LONGEST_MARK and data:
                self._rest = text
                text = b""
            elif text.startswith(sign) and end >= 0:
                self._take(text[len(sign) : end])
                text = text[end + 1 :]
                shown = shown[: self._untagged(shown)]
            else:
                shown += text[:1]
                text = text[1:]
        return bytes(shown + text)

    def _untagged(self, shown: bytearray) -> int:
        """Where the tag of a line begins that held nothing but a mark."""
        line = shown.rfind(b"\n") + 1
        return line if TAG.fullmatch(shown, line) else len(shown)

    def _take(self, words: bytes) -> None:
        parts = words.decode(errors="replace").split(None, 3)
        if len(parts) >= 3 and parts[0] in EVENTS and parts[1].lstrip("-").isdecimal():
            self.marks.append(Mark(parts[0], int(parts[1]), *parts[2:]))

    @property
    def is_graceful(self) -> bool:
        """Whether the ranks come to an end by themselves when they get a signal."""
        told = [mark.event for mark in self.marks if mark.event in ("graceful", "ordinary")]
        return told[-1:] == ["graceful"]

    @property
    def fault(self) -> FaultSummary | None:
        """What ranks told first that ends the job."""
        told = (FaultSummary.of(mark.detail) for mark in self.marks if mark.event == "fault")
        return next((fault for fault in told if fault is not None), None)

    def connections(self) -> list[tuple[str, int]]:
        """The hosts to which starters of ranks have lost the connection, and ssh's exit codes."""
        told = [mark.detail.partition(" ") for mark in self.marks if mark.event == "lost"]
        return [(host, int(code)) for code, _, host in told if code.lstrip("-").isdecimal()]

    def hosts(self) -> set[str]:
        """The hosts on which ranks have begun, or were started."""
        begun = set(self.ranks("begun").values())
        return begun | {mark.detail for mark in self.marks if mark.event == "started" and mark.detail}

    def numbers(self, event: str) -> list[int]:
        """The numbers that were told with an event."""
        return [int(mark.detail) for mark in self.marks if mark.event == event and mark.detail.isdecimal()]

    def ranks(self, event: str) -> dict[int, str]:
        """The ranks that told an event, and their hosts."""
        return {mark.rank: mark.host for mark in self.marks if mark.event == event}
