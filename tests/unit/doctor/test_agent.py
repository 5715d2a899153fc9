"""Real agents on this machine: what they gather, how they answer, and what becomes of those that do not."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpitrain
from mpitrain.doctor import agent as agent_source
from mpitrain.doctor.connection import Agent, ask_all, start
from mpitrain.doctor.diagnosis import is_here
from mpitrain.doctor.facts import read
from mpitrain.doctor.ssh_faults import Unanswered
from mpitrain.launch.ssh import Ssh

SECONDS = 60.0


@pytest.fixture
def agent() -> Iterator[Agent]:
    running = start(None, Ssh().command, {})
    yield running
    running.close()


def speaker(code: str) -> Agent:
    """An agent that does what `code` says instead."""
    return Agent([sys.executable, "-c", code], b"")


def test_facts_of_this_machine(agent: Agent) -> None:
    told = agent.ask("facts", SECONDS, paths=["/", "/no/such/path"], ask_library="print('Open MPI v5.0.1')")
    facts = read(told)
    assert facts.name == os.uname().nodename
    assert facts.root == (os.geteuid() == 0)
    assert facts.python.prefix == sys.prefix
    assert facts.mpitrain is not None
    assert facts.mpitrain.version == mpitrain.__version__
    assert Path(facts.mpitrain.path) == Path(mpitrain.__file__).parent
    assert str(facts.mpi) == "Open MPI 5.0.1"
    assert facts.packages["numpy"] == sys.modules["numpy"].__version__ if "numpy" in sys.modules else True
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.memory_bytes > 0
    assert any(one.loopback and one.address == "127.0.0.1" for one in facts.interfaces)
    assert facts.absent_paths == ("/no/such/path",)


def test_why_no_mpi_can_be_loaded(agent: Agent) -> None:
    told = agent.ask("facts", SECONDS, paths=[], ask_library="raise RuntimeError('no libmpi')")
    assert read(told).mpi is None
    assert read(told).mpi_error == "RuntimeError: no libmpi"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "None"),
        ({"mpitrain/data.txt": "x"}, "None"),
        ({"mpitrain/__init__.py": "__version__ = '9.9'"}, "9.9"),
        ({"mpitrain/__init__.py": "import no_such_module"}, "broken"),
        ({"mpitrain/__init__.py": "1 / 0"}, "broken"),
    ],
)
def test_the_mpitrain_that_is_found(files: dict[str, str], expected: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    source = Path(agent_source.__file__)
    code = (
        f"import sys; sys.path[:] = [{str(tmp_path)!r}] + [p for p in sys.path if 'python3' in p and 'site' not in p]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        f"exec(compile(open({str(source)!r}).read(), 'agent', 'exec'), namespace := {{'__name__': 'agent'}})\n"
        "found = namespace['package'](); print(found and found['version'])"
    )
    finished = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert finished.stdout.strip() == expected


def test_two_clocks_of_one_machine_agree(agent: Agent) -> None:
    clock = agent.clock()
    assert abs(clock.ahead_seconds) <= clock.error_seconds + 0.01


def test_connections_that_succeed_and_fail(agent: Agent) -> None:
    ports = agent.ask("listen", SECONDS, token="secret", ranges=[(0, 0), (1, 0)])["ports"]
    assert ports[1] is None
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, but nobody listens
        free = closed.getsockname()[1]
        targets = [
            ("127.0.0.1", ports[0], "secret"),
            ("127.0.0.1", ports[0], "others"),
            ("127.0.0.1", ports[0], ""),
            ("127.0.0.1", free, "secret"),
            ("255.255.255.255", 9, "secret"),
        ]
        results = agent.ask("connect", SECONDS, targets=targets, wait_seconds=20)["results"]
    assert results == ["ok", "stranger", "ok", "refused", "unreachable"]


def test_a_listener_that_never_answers_is_silent(agent: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = ("127.0.0.1", server.getsockname()[1], "secret")
        assert agent.ask("connect", SECONDS, targets=[target], wait_seconds=0.3)["results"] == ["silent"]


def test_more_connections_than_descriptors_are_no_end(agent: Agent) -> None:
    (port,) = agent.ask("listen", SECONDS, token="secret", ranges=[(0, 0)])["ports"]
    resource.prlimit(agent._process.pid, resource.RLIMIT_NOFILE, (40, 4096))
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        time.sleep(0.2)
    target = ("127.0.0.1", port, "secret")
    assert agent.ask("connect", SECONDS, targets=[target], wait_seconds=20)["results"] == ["ok"]


def test_of_a_range_the_first_free_port_is_taken(agent: Agent) -> None:
    with socket.create_server(("", 0)) as taken:
        first = taken.getsockname()[1]
        (port,) = agent.ask("listen", SECONDS, token="t", ranges=[(first, first + 100)])["ports"]
    assert first < port <= first + 100


def test_what_shells_print_is_passed_over() -> None:
    mark = agent_source.MARK.decode()
    noisy = speaker(f"print('Welcome!'); print('{mark}{{\"time\": 1}}'); input()")
    assert noisy.ask("clock", SECONDS) == {"time": 1}
    noisy.close()


def test_an_agent_that_ends_tells_why() -> None:
    ended = speaker("import sys; sys.exit('ssh: Could not resolve hostname x')")
    with pytest.raises(Unanswered) as caught:
        ended.ask("clock", SECONDS)
    assert "Could not resolve" in caught.value.words
    assert caught.value.seconds is None
    ended.close()


def test_an_agent_that_is_silent_is_given_up() -> None:
    silent = speaker("import time; time.sleep(100)")
    began = time.monotonic()
    with pytest.raises(Unanswered) as caught:
        silent.ask("clock", 0.2)
    assert caught.value.seconds == 0.2
    silent.close()
    assert time.monotonic() - began < 30


def test_no_ssh() -> None:
    with pytest.raises(Unanswered, match="cannot be run"):
        Agent(["/no/such/ssh"], b"")


def test_the_command_for_another_host_starts_the_same_agent(tmp_path: Path) -> None:
    """A program that takes ssh's place runs here what ssh would have run there."""
    shell = tmp_path / "here-ssh"
    shell.write_text('#!/bin/sh\nwhile [ "$1" != there ]; do shift; done\nshift\nexec sh -c "$*"\n')
    shell.chmod(0o755)
    running = start("there", Ssh((str(shell),)).command, {"PYTHONPATH": "/a b:/c'd", "SECRET": "no"})
    told = running.ask("facts", SECONDS, paths=[], ask_library="import os; print(os.environ['PYTHONPATH'])")
    assert told["mpi"]["library"] == "/a b:/c'd"
    assert told["python"]["executable"] == sys.executable
    running.close()


def test_tasks_run_together_and_are_left_behind_when_late() -> None:
    def task(name: str) -> str:
        if name == "bad":
            raise Unanswered("gone")
        if name == "late":
            time.sleep(60)
        return name.upper()

    began = time.monotonic()
    results = ask_all(task, ("good", "bad", "late"), 0.5)
    assert time.monotonic() - began < 30
    assert results == {"good": "GOOD", "bad": Unanswered("gone"), "late": Unanswered("", 0.5)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("localhost", True),
        ("node3", True),
        ("node3.site", True),
        ("127.0.1.1", True),
        ("10.0.0.3", True),
        ("10.9.9.9", False),
        ("x.invalid", False),
    ],
)
def test_names_of_this_machine(name: str, expected: bool) -> None:
    assert is_here(name, "node3.site", {"10.0.0.3"}) == expected


def test_a_stream_between_agents(agent: Agent) -> None:
    other = start(None, Ssh().command, {})
    (port,) = agent.ask("listen", SECONDS, token="secret", ranges=[(0, 0)])["ports"]
    target = {"address": "127.0.0.1", "port": port, "token_bytes": 6}
    assert other.ask("stream", SECONDS, **target, send_seconds=0.05)["bits_per_second"] > 0
    agent.close()
    assert other.ask("stream", SECONDS, **target, send_seconds=0.05) == {"bits_per_second": None}
    other.close()
