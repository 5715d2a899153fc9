"""The parts of fault handling that are pure: verdicts, tables, records, messages."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mpitrain.errors import UsageError
from mpitrain.faults import comparison as alike
from mpitrain.faults import handshake, processes, report, stacks, stalls, wire
from mpitrain.faults.activity import Activity, checksum
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.processes import Process
from mpitrain.faults.report import Culprit, Fault
from mpitrain.faults.roster import Roster, Seat
from mpitrain.faults.same_data import SameData
from mpitrain.faults.stacks import Stack
from mpitrain.faults.stalls import RankState
from mpitrain.world import watch

INSIDE: dict[str, Any] = {"heard": True, "position": 9, "waiting_seconds": 40.0, "inside": "a bucket"}
BEHIND: dict[str, Any] = {"heard": True, "position": 8}


def states(*kinds: dict[str, Any]) -> list[RankState]:
    return [RankState(rank, "ab"[rank % 2], 100 + rank, **kind) for rank, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("kinds", "kind", "late"),
    [
        ([INSIDE, INSIDE], "network", []),
        ([{**INSIDE, "waiting_seconds": 3.0}, BEHIND], "going on", []),
        ([BEHIND, BEHIND], "going on", []),
        ([INSIDE, {**BEHIND, "phase": "compute"}], "stall", [1]),
        ([INSIDE, {**BEHIND, "phase": "callback"}, {**BEHIND, "phase": "start"}], "stall", [1, 2]),
        ([{**BEHIND, "phase": "evaluation"}, INSIDE], "patient", [0]),
        ([{**BEHIND, "phase": "checkpoint"}, INSIDE, {**BEHIND, "phase": "start"}], "patient", [0, 2]),
        # One that does not answer is never excused; nor is one that waits itself, elsewhere.
        ([{**BEHIND, "phase": "evaluation", "heard": False}, INSIDE], "stall", [0]),
        ([{**BEHIND, "phase": "evaluation", "inside": "metrics", "waiting_seconds": 40.0}, INSIDE], "stall", [0]),
        ([INSIDE, {"heard": False}, INSIDE], "stall", [1]),
        # A rank that waits for the end of the program waits for whatever the others do there.
        ([{**INSIDE, "phase": "end"}, {**BEHIND, "phase": "compute"}], "patient", [1]),
        ([{**INSIDE, "phase": "end"}, {**INSIDE, "phase": "compute"}, {**BEHIND, "phase": "data"}], "stall", [2]),
    ],
)
def test_verdicts(kinds: list[dict[str, Any]], kind: str, late: list[int]) -> None:
    verdict = stalls.judge(states(*kinds), 30.0)
    assert verdict.kind == kind
    assert [state.rank for state in verdict.late] == late


def test_report_of_a_stall() -> None:
    late = {
        **BEHIND,
        "phase": "data",
        "updates": 6,
        "resident_bytes": 3 << 29,
        "stacks": (("MainThread", ("train.py:3 load",)),),
    }
    verdict = stalls.judge(states({**INSIDE, "updates": 7}, late, {"heard": False, "silence": "is silent"}), 30.0)
    assert stalls.report(verdict, 12.0).splitlines() == [
        "mpitrain: stall: 1 rank waited 40 s for rank 1 (b), rank 2 (a)",
        "  waiting    rank 0 (a) in a bucket, after update 7",
        "  not there  rank 1 (b): phase data, last update finished 6, memory 1.50 GiB",
        "    MainThread:",
        "      train.py:3 load",
        "  not there  rank 2 (a): is silent",
        "  If this lasts, the job ends in 12 s.",
    ]


@pytest.mark.parametrize(
    ("phase", "frame", "expected"),
    [
        ("compute", "/x/keras/src/callbacks/callback_list.py:1 on_epoch_end", "callback"),
        ("compute", "/x/keras/src/backend/tensorflow/trainer.py:400 fit", "compute"),
        ("compute", "/x/keras/src/backend/tensorflow/trainer.py:400 evaluate", "evaluation"),
        ("compute", "/x/keras/src/saving/saving_lib.py:10 save_model", "checkpoint"),
        ("compute", "/x/polymorphic_function/tracing_compilation.py:10 trace_function", "start"),
        ("compute", "/x/polymorphic_function/tracing_compilation.py:10 call_function", "compute"),
        ("compute", "/x/keras/src/trainers/data_adapters/py_dataset_adapter.py:3 get", "data"),
        ("start", "/x/keras/src/trainers/data_adapters/py_dataset_adapter.py:3 get", "start"),
        ("end", "/x/keras/src/callbacks/callback_list.py:1 on_epoch_end", "end"),
    ],
)
def test_phase_from_where_the_main_thread_stands(phase: Any, frame: str, expected: str) -> None:
    assert stacks.phase_of(phase, [Stack("MainThread", ("/s/train.py:1 <module>", frame))]) == expected


def test_stacks_show_this_function_and_no_idle_thread() -> None:
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait, name="idle")
    thread.start()
    try:
        found = stacks.python_stacks()
    finally:
        idle.set()
        thread.join()
    assert found[0].thread == "MainThread"
    assert any(frame.endswith("test_stacks_show_this_function_and_no_idle_thread") for frame in found[0].frames)
    assert "idle" not in [stack.thread for stack in found]


def test_phase_ends_with_its_context() -> None:
    activity = Activity()

    def fails() -> None:
        with activity.during("checkpoint"):
            assert activity.phase == "checkpoint"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert activity.phase == "start"


BASE = {"Python": "3.11", "arguments": "--epochs 3", "code of train": "aa"}


def test_ranks_that_are_alike_have_no_table() -> None:
    assert alike.differences([BASE, dict(BASE)], ["a", "b"]) is None


def test_table_of_differences() -> None:
    table = alike.differences(
        [BASE, BASE, {**BASE, "arguments": "--epochs 4", "keras": "3.9"}, {**BASE, "Python": "3.12"}],
        ["a", "a", "b", "c"],
    )
    assert table is not None
    lines = [line.split() for line in table.splitlines()]
    assert lines[1] == ["ranks", "0,", "1", "(a)", "rank", "2", "(b)", "rank", "3", "(c)"]
    assert lines[2:] == [
        ["Python", "3.11", "3.11", "3.12"],
        ["arguments", "--epochs", "3", "--epochs", "4", "--epochs", "3"],
        ["keras", "-", "3.9", "-"],
    ]


def test_long_values_are_shown_from_their_difference_on() -> None:
    one, two = "x" * 300 + "first" + "y" * 300, "x" * 300 + "other" + "y" * 300
    table = alike.differences([{"arguments": one}, {"arguments": two}], ["a", "b"])
    assert table is not None
    assert "...xxxxxxxxxxfirst" in table
    assert "...xxxxxxxxxxother" in table
    assert len(table) < 400


def test_what_this_program_is() -> None:
    found = alike.program({"MPITRAIN_ALL_REDUCE": "mpi", "HOME": "/h", "MPITRAIN_FAILURE_REPORT": "f"}, "MPI 4")
    assert found["MPI"] == "MPI 4"
    assert found["variable MPITRAIN_ALL_REDUCE"] == "mpi"
    assert not any("HOME" in name or "FAILURE_REPORT" in name for name in found)
    assert f"code of {__name__}" in found, "modules of the user"
    assert not any(name.startswith(("code of pytest", "code of json", "code of mpitrain.")) for name in found)
    assert found == alike.program({"MPITRAIN_ALL_REDUCE": "mpi", "KERAS_BACKEND": "tensorflow"}, "MPI 4")


@pytest.mark.parametrize(
    ("environ", "given", "expected"),
    [
        ({}, {}, (30.0, 300.0, "warn")),
        ({"MPITRAIN_STALL_WARNING": "5", "MPITRAIN_NON_FINITE": "stop"}, {}, (5.0, 300.0, "stop")),
        ({"MPITRAIN_STALL_WARNING": "5"}, {"stall_warning": 6, "stall_abort": 0}, (6.0, 0.0, "warn")),
        ({"MPITRAIN_STALL_ABORT": ""}, {"non_finite": "ignore"}, (30.0, 300.0, "ignore")),
    ],
)
def test_options(environ: dict[str, str], given: dict[str, Any], expected: tuple[float, float, str]) -> None:
    options = FaultOptions.of(environ, **given)
    assert (options.stall_warning, options.stall_abort, options.non_finite) == expected


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"MPITRAIN_STALL_WARNING": "soon"}, r"--stall-warning \(MPITRAIN_STALL_WARNING\) is 'soon'"),
        ({"MPITRAIN_STALL_ABORT": "-1"}, "MPITRAIN_STALL_ABORT"),
        ({"MPITRAIN_STALL_ABORT": "nan"}, "MPITRAIN_STALL_ABORT"),
        ({"MPITRAIN_STALL_ABORT": "inf"}, "MPITRAIN_STALL_ABORT"),
        ({"MPITRAIN_NON_FINITE": "maybe"}, "choose one of stop, warn, ignore"),
        ({"MPITRAIN_SAME_DATA": "stop"}, "choose one of warn, ignore"),
    ],
)
def test_wrong_options(environ: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        FaultOptions.of(environ)


@pytest.mark.parametrize(("needed", "codes"), [(0.0, []), (0.5, [75])])
def test_the_start_has_a_limit(needed: float, codes: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    with watch.limit(0.2, ended.append):
        time.sleep(needed)
    assert ended == codes
    assert ("has waited 0 s for the others at the start" in capfd.readouterr().err) == bool(codes)


def fault(rank: int, text: str) -> Fault:
    return Fault("exception", text, 1, (Culprit(rank, "ab"[rank % 2], 7),))


def test_the_same_error_on_several_ranks_is_one() -> None:
    wrapped = "Traceback\n ValueError: x\n\t [[{{node PyFunc}}]] [Op:a]\n"
    found = report.merged(
        [fault(2, "way\nValueError: x"), fault(0, "other way\nValueError: x"), fault(1, "KeyError: 1")]
    )
    assert [report.places(one.culprits) for one in found] == ["ranks 0, 2 on a", "rank 1 on b"]
    assert report.message(found[0]) == "mpitrain: ranks 0, 2 on a failed; the job ends\nway\nValueError: x\n"
    assert len(report.merged([fault(0, wrapped), fault(1, wrapped.replace("Op:a", "Op:b"))])) == 1


def test_a_fault_survives_the_way_to_the_hub_and_to_the_file(tmp_path: Path) -> None:
    one = Fault("death", "was killed", 137, (Culprit(1, "a", 7, 3, "compute", 1 << 20),), "SIGKILL", True)
    report.write(str(tmp_path / "report"), one)
    record = json.loads((tmp_path / "report").read_text())
    assert record.pop("time") > 0
    assert report.from_dict(record) == one
    report.write(str(tmp_path / "absent" / "report"), one)  # no second fault


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (fault(0, "Traceback\nValueError: x\n\t [[{{node PyFunc}}]]\n"), "ValueError: x"),
        (
            Fault("death", "was killed by SIGSEGV after update 3, with 1 GiB", 139, (), "SIGSEGV"),
            "was killed by SIGSEGV",
        ),
        (
            Fault("death", "was killed", 137, (), "SIGKILL", True),
            "was killed by SIGKILL by the kernel, which had no memory left",
        ),
        (Fault("death", "ended with exit code 4 after update 9", 4), "ended with exit code 4"),
        (Fault("stall", "stall: 2 ranks waited 30 s", 75), "did not come to where the others waited"),
        (Fault("exit", "called sys.exit(3) while others went on", 3), "called sys.exit(3) while others went on"),
        (Fault("interrupted", "", 130), "interrupted"),
    ],
)
def test_the_reason_of_a_fault_has_no_figures_of_the_moment(one: Fault, reason: str) -> None:
    assert one.reason == reason


def test_how_far_a_rank_has_come() -> None:
    activity = Activity()
    activity.updates = 7
    assert activity.progress == 7
    activity.steps = 507
    assert activity.progress == 507


def roster(nodes: list[int], own: int) -> Roster:
    seats = tuple(Seat(rank, f"h{node}", node, Process(1, 1), ()) for rank, node in enumerate(nodes))
    return Roster(own, seats, "t")


@pytest.mark.parametrize(
    ("nodes", "own", "candidates"),
    [
        ([0, 0, 0], 0, [0]),
        ([0, 0, 0], 2, [0, 1, 2]),
        ([0] * 8 + [1] * 8, 12, [0, 1, 2, 3, 8, 12]),
        ([0, 1, 2, 3], 3, [0, 1, 2, 3]),
    ],
)
def test_who_may_be_the_hub(nodes: list[int], own: int, candidates: list[int]) -> None:
    assert roster(nodes, own).candidates() == candidates


@pytest.mark.parametrize(
    ("own", "lost", "candidates"),
    [
        (0, [1], [0]),
        (1, [0], [1]),
        (5, [0], [1, 2, 3, 4, 5]),
        (2, [0, 1, 3, 4, 5], [2]),
        (5, [0, 1, 2, 3], [4, 5]),
        (4, [0, 1, 2, 3], [4]),
    ],
)
def test_who_takes_the_places_of_ranks_that_are_lost(own: int, lost: list[int], candidates: list[int]) -> None:
    assert roster([0] * 6, own).candidates(lost) == candidates


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os._exit(3)", ("ended with exit code 3", 3, None)),
        ("import os; os.kill(os.getpid(), 9)", ("was killed by SIGKILL", 137, "SIGKILL")),
    ],
)
def test_how_a_process_ended(code: str, expected: tuple[str, int, str | None]) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"input()\n{code}"], stdin=subprocess.PIPE)
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    process = Process(child.pid, int(fields[19]))
    assert process.state() in ("R", "S", "D")
    assert process.exit_status() is None
    assert Process(child.pid, 1).state() is None, "an earlier process of the same number"
    assert child.stdin
    child.stdin.write(b"\n")
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    status = process.exit_status()
    assert status is not None
    assert processes.how_it_ended(status) == expected
    child.wait()
    assert process.exit_status() is None


def test_kills_for_want_of_memory_are_counted(tmp_path: Path) -> None:
    assert processes.out_of_memory_kills(tmp_path) == 0
    for name, text in {
        "proc/vmstat": "nr_free_pages 5\noom_kill 3\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.events": "low 0\noom 1\noom_kill 2\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert processes.out_of_memory_kills(tmp_path) == 5
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/old\n0::/\n")
    (tmp_path / "sys/fs/cgroup/memory/old").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory/old/memory.oom_control").write_text("oom_kill_disable 0\noom_kill 7\n")
    assert processes.out_of_memory_kills(tmp_path) == 10


def add_all(found: SameData, sums: list[tuple[list[int], list[int]]]) -> str | None:
    verdicts = []
    for rank, (batches, gradients) in enumerate(sums):
        found.add(rank, batches, gradients)
        verdicts.append(found.verdict())
    assert verdicts[:-1] == [None] * (len(sums) - 1)
    return verdicts[-1]


@pytest.mark.parametrize(
    ("sums", "words"),
    [
        ([([1, 2, 3], []), ([1, 2, 3], [])], "ranks 0, 1 had the same first 3 batches"),
        ([([1, 2, 3], [5, 6, 7]), ([1, 2, 4], [5, 6, 7])], None),
        ([([], [5, 6, 7]), ([], [5, 6, 8]), ([], [5, 6, 7])], "ranks 0, 2 had the same first 3 gradients"),
        ([([1, 1, 1], []), ([1, 1, 1], [])], None),  # constant data
        ([([1, 2], []), ([1, 2], [])], None),  # not enough of it
    ],
)
def test_same_data(sums: list[tuple[list[int], list[int]]], words: str | None) -> None:
    text = add_all(SameData(len(sums)), sums)
    assert (text is None) if words is None else (text is not None and words in text)


def test_checksums() -> None:
    import numpy as np

    one, two = np.arange(6.0), np.arange(6.0)
    assert checksum([one]) == checksum([two])
    assert checksum([one]) != checksum([one.reshape(2, 3)])
    assert checksum([one, two]) != checksum([one])
    assert checksum([np.array([b"a", b"b"], object)]) != checksum([np.array([b"a", b"c"], object)])


def pair() -> tuple[wire.Link, wire.Link]:
    left, right = socket.socketpair()
    return wire.Link(left), wire.Link(right)


def test_messages_arrive_whole() -> None:
    left, right = pair()
    messages = [{"is": "state", "text": "x" * 100_000}, {"is": "beat"}]
    received: list[wire.Message] = []
    for message in messages:
        left.send(message)
    while len(received) < 2:
        left.flush()
        received += right.receive()
    assert received == messages
    left.close()
    with pytest.raises(ConnectionError):
        right.receive()


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"is": 3}\n', b"\x80\x04K\x01.\n", b"x" * (2 << 20)]
)
def test_junk_closes_the_connection(junk: bytes) -> None:
    left, right = socket.socketpair()
    link = wire.Link(right)
    left.setblocking(False)
    with pytest.raises(ConnectionError):
        send_and_receive(left, link, junk)
    link.close()
    left.close()


def send_and_receive(left: socket.socket, link: wire.Link, content: bytes) -> None:
    while content:
        content = content[left.send(content) :]
        link.receive()
    left.shutdown(socket.SHUT_WR)
    link.receive()


def test_only_what_is_sealed_with_the_token_for_this_connection_is_believed() -> None:
    nonce = handshake.new_nonce()
    line = handshake.sealed({"is": "hello", "rank": 1}, "secret", nonce)
    assert handshake.opened(line[:-1], "secret", nonce) == {"is": "hello", "rank": 1}
    assert b"secret" not in line
    for token, other, text in (
        ("other", nonce, line[:-1]),
        ("secret", handshake.new_nonce(), line[:-1]),  # overheard, and said again
        ("secret", nonce, line[:-1].replace(b"1}", b"2}")),
        ("secret", nonce, line[65:-1]),
        ("secret", nonce, b""),
    ):
        with pytest.raises(ConnectionError):
            handshake.opened(text, token, other)


def test_a_port_where_nobody_listens_or_answers() -> None:
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    assert handshake.first_that_answers([("127.0.0.1", port)], 1, 0, {}, "t", 0.3) == "silent"
    closed.close()
    assert handshake.first_that_answers([("127.0.0.1", port)], 1, 0, {}, "t", 0.3) == "closed"
    assert handshake.first_that_answers([], 1, 0, {}, "t", 0.3) == "unreachable"
