"""Marks of ranks in what they write to standard error, and what is concluded from them."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.faults.summary import FaultSummary
from mpitrain.launch.first_end import End
from mpitrain.launch.listener import Listener
from mpitrain.launch.request import Request
from mpitrain.launch.supervisor import Outcome
from mpitrain.launch.verdict import judge, lost_hosts
from mpitrain.runtime import marks
from mpitrain.runtime.hostfile import Host
from mpitrain.runtime.marks import LONGEST_MARK, Mark, Reporter

SECRET = "0123456789abcdef"
MARK = f"\x1e{SECRET} met 0 node0\n".encode()


def heard(*parts: bytes) -> tuple[bytes, list[Mark]]:
    listener = Listener(SECRET)
    shown = b"".join([*(listener.feed(part) for part in parts if part), listener.feed(b"")])
    return shown, listener.marks


@pytest.mark.parametrize(
    ("text", "shown", "count"),
    [
        (b"", b"", 0),
        (MARK, b"", 1),
        (b"a\n" + MARK + b"b\n", b"a\nb\n", 1),
        (b"10% done" + MARK + b"\r20% done", b"10% done\r20% done", 1),
        (MARK + MARK, b"", 2),
        (b"[1,0]<stderr>: " + MARK + b"x", b"x", 1),
        (b"[1,0]<stderr>: a\n[0] " + MARK, b"[1,0]<stderr>: a\n", 1),
        (b"0: " + MARK, b"", 1),
        (b"\x1e other\n", b"\x1e other\n", 0),
        (b"\x1e" + SECRET.encode() + b" nonsense\n", b"", 0),
        (MARK.replace(b"0123", b"3210"), MARK.replace(b"0123", b"3210"), 0),
        (MARK[:-1], MARK[:-1], 0),
        (MARK[:-1] + b"x" * LONGEST_MARK, MARK[:-1] + b"x" * LONGEST_MARK, 0),
    ],
)
def test_marks_are_taken_out(text: bytes, shown: bytes, count: int) -> None:
    found, marks = heard(text)
    assert found == shown
    assert marks == [Mark("met", 0, "node0")] * count


@given(st.lists(st.sampled_from([b"a", b"line\n", MARK, b"\x1e", b"\r", "ü\n".encode()]), max_size=8), st.data())
def test_wherever_output_is_cut(pieces: list[bytes], data: st.DataObject) -> None:
    text = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert heard(*parts) == heard(text)
    assert heard(text)[0] == b"".join(piece for piece in pieces if piece != MARK)


def test_a_reporter_is_heard() -> None:
    read, write = os.pipe()
    reporter = Reporter(SECRET, write)
    reporter.tell("begun", 3)
    reporter.tell("finished", 0)
    os.close(write)
    reporter.tell("finished", 1)  # nobody listens any more
    with os.fdopen(read, "rb") as file:
        shown, marks = heard(file.read())
    host = os.uname().nodename
    assert (shown, marks) == (b"", [Mark("begun", 3, host), Mark("finished", 0, host)])


@pytest.mark.parametrize(
    "told",
    [
        FaultSummary("exception", 511, 1, "ranks 0, 1 on node0, node1", "ValueError: 3 of 4 a~b"),
        FaultSummary("death", 0, 137, "rank 1 on node1", "was killed by SIGKILL"),
    ],
)
def test_a_fault_that_is_told(told: FaultSummary) -> None:
    assert FaultSummary.of(told.detail) == told
    assert FaultSummary.of(told.detail.replace(" ", "", 1)) is None
    listener = Listener(SECRET, [Mark("fault", 0, "node0", "nonsense"), Mark("fault", 0, "node0", told.detail)])
    assert listener.fault == told


def test_a_reason_that_is_no_utf_8_is_heard() -> None:
    read, write = os.pipe()
    told = FaultSummary("exception", 0, 1, "rank 1 on a", "OSError: caf\udce9.csv")
    Reporter(SECRET, write).tell("fault", 0, told.detail)
    Reporter(SECRET, write).tell("step", 0, "caf\udce9")
    os.close(write)
    with os.fdopen(read, "rb") as file:
        _, marks = heard(file.read())
    fault, step = marks
    assert FaultSummary.of(fault.detail) == FaultSummary("exception", 0, 1, "rank 1 on a", "OSError: caf\\udce9.csv")
    assert step.detail == "caf\\udce9"


def test_what_is_too_long_is_cut_and_still_heard() -> None:
    read, write = os.pipe()
    told = FaultSummary("exception", 511, 1, f"ranks {', '.join(map(str, range(99)))} on a", "ü\n" * 500)
    Reporter(SECRET, write).tell("fault", 0, told.detail)
    Reporter(SECRET, write).tell("step", 0, "9" * 2 * LONGEST_MARK)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read()
    shown, marks = heard(text)
    assert (shown, [mark.event for mark in marks], len(text.splitlines()[1]) + 1) == (
        b"",
        ["fault", "step"],
        LONGEST_MARK,
    )
    heard_of = FaultSummary.of(marks[0].detail)
    assert heard_of is not None
    assert (heard_of.step, heard_of.reason[:5]) == (511, "ü ü ü")


def test_nobody_waits_for_a_launcher_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "PATIENCE_SECONDS", 0.01)
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    Reporter(SECRET, write).tell("step", 0, 1)
    os.close(read)
    os.close(write)


REQUEST = Request(("true",), 3)
HERE = os.uname().nodename
EXITED_ITSELF = End(2, "ended with exit code 0")
SILENT = (
    "a rank ended without a word; the launcher, whose exit code is 9, then ended the others before they could tell why"
)
BEGUN = [Mark("begun", rank, f"node{rank}") for rank in range(3)]
MET = [*BEGUN, Mark("met", 0, "node0")]
DONE = [*MET, Mark("finished", 0, "node0")]
ENDED = [*MET, Mark("finished", 0, "node0", "0")]
PRRTE = b"""PRTE has lost communication with a remote daemon.
  HNP daemon   : [prterun-node0-495@0,0] on node node0
  Remote daemon: [prterun-node0-495@0,1] on node node1
"""
LISTENER = b"The PMIx server's listener thread failed to start. We cannot\ncontinue.\n"
SRUN = b"""srun: error: node1: task 1: Exited with exit code 5
slurmstepd-node0: error: *** STEP 2.0 ON node0 CANCELLED ***
srun: error: node0: tasks 0,2-3: Exited with exit code 1
srun: error: node0: task 0: Terminated
"""


def outcome(code: int, marks: list[Mark], **more: object) -> Outcome:
    return Outcome(code, Listener(SECRET, list(marks)), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given_", "code", "words"),
    [
        (outcome(0, DONE), 0, ""),
        (outcome(0, []), 0, ""),  # a program that tells nothing
        (outcome(3, DONE), 3, ""),
        (outcome(137, ENDED), 0, "the job is done; its launcher ended with exit code 137"),
        (outcome(9, [*ENDED, Mark("finished", 1, "node1", "0")]), 0, "the job is done"),
        (outcome(3, [*ENDED, Mark("finished", 1, "node1", "3")]), 3, ""),
        (outcome(143, ENDED, signals=[signal.SIGTERM]), 143, ""),
        (outcome(85, [*MET, Mark("finished", 0, "node0", "85")]), 85, ""),
        (outcome(3, MET), 3, ""),
        (outcome(0, MET), 1, "failed, although its launcher ended with exit code 0"),
        (outcome(0, BEGUN), 1, "failed, although"),
        (outcome(0, [Mark("begun", 0, "node0"), MET[-1]]), 1, "A rank may have ended without a word"),  # of one host
        (outcome(0, MET, tail=PRRTE), 1, "connection to node1 was lost while"),
        (
            outcome(255, MET, tail=b"Connection to node2 closed by remote host.\n", ssh_codes={"node2": 255}),
            255,
            "node2",
        ),
        (outcome(15, MET, ssh_codes={"node2": 255}, lost={"node2"}), 15, "connection to node2 was lost"),
        (outcome(255, MET, ssh_codes={"node2": 255}), 255, ""),  # the launcher has ended its ssh
        (outcome(9, MET, silent=True, first=EXITED_ITSELF), 9, f"rank 2 on {HERE} ended with exit code 0, and the l"),
        (
            outcome(9, MET, silent=True, first=End(2, "")),
            9,
            f"{SILENT}. Rank 2 on {HERE} was gone first, but need not be the one",
        ),
        (
            outcome(9, MET, silent=True),
            9,
            SILENT,
        ),
        (
            outcome(0, MET[-2:], silent=True, first=EXITED_ITSELF),
            1,
            f"Rank 2 on {HERE} ended with exit code 0",
        ),
        (outcome(9, MET, silent=True, first=End(2, ""), tail=b"mpitrain: rank 2 on a was killed by SIGKILL\n"), 9, ""),
        (outcome(0, DONE, silent=True, first=End(2, "")), 0, ""),
        (outcome(255, [], ssh_codes={"node2": 255}), 255, "node2 cannot be reached by ssh"),
        (outcome(0, [], ssh_codes={"node2": 255}), 1, "node2 cannot be reached by ssh"),
        (outcome(0, BEGUN[:2], ssh_codes={"node2": 255}), 1, "node2 cannot be reached by ssh"),
        (outcome(0, BEGUN[:2], ssh_codes={"node1": 255}), 1, "connection to node1 was lost before all ranks had met"),
        (
            outcome(0, [Mark("started", 1, "node0", "node2")], ssh_codes={"node2": 255}),
            1,
            "connection to node2 was lost before all ranks had met",
        ),
        (outcome(1, [], ssh_codes={"node2": 127}), 1, "not found on node2"),
        (outcome(213, [], tail=LISTENER), 213, "give each its TMPDIR"),
        (outcome(1, MET, ssh_codes={"node2": 127}), 1, ""),
        (outcome(0, DONE, ssh_codes={"node2": 255}), 0, ""),
        (outcome(0, MET, signals=[signal.SIGTERM]), 143, ""),
        (outcome(143, MET, tail=SRUN), 5, ""),
        (outcome(9, MET, tail=SRUN), 9, ""),
        (outcome(143, MET, tail=SRUN, signals=[signal.SIGTERM]), 143, ""),
        (outcome(0, DONE, signals=[signal.SIGTERM]), 0, ""),
        (outcome(75, MET, signals=[signal.SIGTERM]), 75, ""),
        (outcome(143, [], timed_out=True), 143, "did not meet within 30 s (--start-timeout): none has begun"),
        (outcome(0, BEGUN[:2], timed_out=True), 1, "begun have 2 (node0 1, node1 1), but not rank 2"),
        (outcome(1, BEGUN, timed_out=True), 1, "MPI does not connect them"),
    ],
)
def test_verdicts(given_: Outcome, code: int, words: str) -> None:
    found, said = judge(given_, REQUEST, 30)
    assert found == code
    assert (words in " ".join(said)) if words else (said == [])


@pytest.mark.parametrize(
    ("events", "graceful"),
    [
        ([], False),
        (["met"], False),
        (["graceful"], True),
        (["graceful", "ordinary", "finished"], False),
        (["graceful", "ordinary", "graceful"], True),
    ],
)
def test_whether_ranks_end_by_themselves(events: list[str], graceful: bool) -> None:
    assert Listener(SECRET, [Mark(event, 0, "a") for event in events]).is_graceful == graceful


def test_lost_hosts_are_named_once() -> None:
    assert lost_hosts(outcome(0, MET, tail=PRRTE * 2, ssh_codes={"node1": 255}, lost={"node1"})) == ["node1"]


@pytest.mark.parametrize(("map_by", "told"), [("node", True), ("slot", False)])
def test_two_names_of_one_host(map_by: str, told: bool) -> None:
    request = Request(("true",), 2, (Host("a.x", 2), Host("b.x", 2)), map_by)
    marks = [Mark("begun", rank, "node0") for rank in range(2)]
    _, said = judge(outcome(1, marks, timed_out=True), request, 30)
    assert ("all have begun, on fewer hosts (node0 2) than were named (a.x, b.x)" in said[-1]) is told
