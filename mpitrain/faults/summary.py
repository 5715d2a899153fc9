"""What ended a job, in one line: ranks tell it to `mpitrain run`, which compares it with what ended the job before."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FaultSummary:
    """What ended a job, as ranks told it."""

    kind: str  # as in `faults.report.Fault`
    step: int  # that were done before, of the whole training where that is known, else in this process
    exit_code: int  # of the job
    place: str  # such as `rank 1 on hosta`
    reason: str  # the same for two faults of the same cause

    @property
    def detail(self) -> str:
        """For a mark, where the place is one word. What is too long is cut off, in the same way each time."""
        place, reason = self.place.replace(" ", "~")[:120], self.reason.encode(errors="backslashreplace")
        return f"{self.kind} {self.step} {self.exit_code} {place} {reason[:200].decode(errors='ignore')}"

    @classmethod
    def of(cls, detail: str) -> FaultSummary | None:
        """What `detail` says; None if it is no such text."""
        words = detail.split(" ", 4)
        if len(words) != 5 or not (words[1].isdecimal() and words[2].lstrip("-").isdecimal()):
            return None
        return cls(words[0], int(words[1]), int(words[2]), words[3].replace("~", " "), words[4])
