"""The supervisor around launchers that are shell scripts: codes, signals, output, and what is left behind.

Each runs in a process of its own: a supervisor adopts and ends every process below it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SECRET = "00ff"
DRIVER = """
import contextlib, json, os, sys
from pathlib import Path
from mpitrain.launch.ssh_program import SshProgram
from mpitrain.launch.ssh import Ssh
from mpitrain.launch.supervisor import Plan, Supervisor
options = json.loads(sys.argv[1])
script, ssh, output = options.pop("script"), options.pop("ssh", None), options.pop("output", None)
with contextlib.ExitStack() as stack:
    agent = stack.enter_context(SshProgram(Ssh((ssh,)))) if ssh else None
    environ = {**os.environ, "AGENT": str(agent.path) if agent else ""}
    plan = Plan(("/bin/sh", "-c", script), environ, "00ff", output=output and Path(output), **options)
    outcome = Supervisor(plan, agent).run()
print(json.dumps({
    "code": outcome.code, "marks": [mark.event for mark in outcome.listener.marks], "signals": outcome.signals,
    "lost": sorted(outcome.lost), "ssh": outcome.ssh_codes, "late": outcome.timed_out,
    "agent": str(agent.path.parent) if agent else None,
}), file=sys.stderr)
"""


def start(script: str, **options: Any) -> subprocess.Popen[str]:
    settings = {"launcher": "Hydra", "ranks": 1, "is_ours": False, "start_timeout_seconds": 60, "grace_seconds": 60}
    arguments = json.dumps({**settings, "script": script, **options})
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
    )


def finish(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str, str]:
    """What became of it, and what it showed on its two streams."""
    stdout, stderr = process.communicate(timeout=60)
    *shown, last = stderr.splitlines()
    outcome = json.loads(last)
    assert isinstance(outcome, dict), stderr
    return outcome, stdout, "\n".join(shown)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text().strip():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.01)
    return path.read_text().strip()


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pid: str, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137), ("nosuch", 127)])
def test_exit_codes(script: str, code: int) -> None:
    outcome, _, _ = finish(start(script))
    assert outcome["code"] == code


def test_output_and_marks(tmp_path: Path) -> None:
    script = "echo out; printf 'err\\n\\036%s met 0 node0\\nmore\\n' 00ff >&2"
    outcome, stdout, stderr = finish(start(script, output=str(tmp_path / "logs")))
    assert (stdout, stderr, outcome["marks"]) == ("out\n", "err\nmore", ["met"])
    files = {path.name: path.read_text() for path in (tmp_path / "logs" / "rank.0").iterdir()}
    assert files == {"stdout": "out\n", "stderr": "err\nmore\n"}
    outcome, stdout, stderr = finish(start(script))
    assert (stdout, stderr, outcome["marks"]) == ("out\n", "err\nmore", ["met"])


@pytest.mark.parametrize(
    ("launcher", "sent", "received"),
    [
        ("Hydra", "TERM", "TERM"),
        ("Hydra", "INT", "INT"),
        ("Hydra", "HUP", "TERM"),
        ("Hydra", "USR1", "USR1"),
        ("Open MPI", "TERM", "TERM"),
        ("Open MPI", "USR2", "USR2"),
        ("srun", "INT", "TERM"),
    ],
)
def test_signals(tmp_path: Path, launcher: str, sent: str, received: str) -> None:
    traps = "".join(f"trap 'echo {name}; exit 9' {name}; " for name in ("TERM", "INT", "HUP", "USR1", "USR2"))
    process = start(f"{traps} echo up >{tmp_path}/up; while :; do sleep 0.05; done", launcher=launcher)
    wait_for(tmp_path / "up")
    process.send_signal(getattr(signal, f"SIG{sent}"))
    outcome, stdout, _ = finish(process)
    assert (stdout, outcome["code"], outcome["signals"]) == (f"{received}\n", 9, [getattr(signal, f"SIG{sent}")])


def test_ranks_that_end_by_themselves_are_asked_to_by_open_mpi(tmp_path: Path) -> None:
    script = (
        f"trap 'echo USR1; exit 0' USR1; printf '\\036%s graceful 0 a\\n' 00ff >&2; sleep 0.5; echo up >{tmp_path}/up; "
        "while :; do sleep 0.05; done"
    )
    process = start(script, launcher="Open MPI")
    wait_for(tmp_path / "up")
    process.send_signal(signal.SIGTERM)
    outcome, stdout, _ = finish(process)
    assert (stdout, outcome["code"]) == ("USR1\n", 0)


def test_a_launcher_that_does_not_end_is_killed_after_the_grace(tmp_path: Path) -> None:
    process = start(f"trap '' TERM; echo up >{tmp_path}/up; while :; do sleep 0.05; done", grace_seconds=0.2)
    wait_for(tmp_path / "up")
    process.send_signal(signal.SIGTERM)
    outcome, _, _ = finish(process)
    assert outcome["code"] == 128 + signal.SIGKILL


def test_a_launcher_that_stays_when_ranks_have_told_what_ends_the_job_is_ended() -> None:
    told = "printf '\\036%s fault 0 a error 7 3 rank~0 why\\n' 00ff >&2"
    outcome, _, _ = finish(start(f"{told}; sleep 50", fault_seconds=0.3))
    assert (outcome["code"], outcome["marks"]) == (3, ["fault"])


def test_nothing_is_left_of_a_launcher_that_leaves_ranks_behind(tmp_path: Path) -> None:
    rank = f"trap '' TERM HUP; echo $$ >{tmp_path}/rank; while :; do sleep 0.05; done"
    process = start(f'setsid sh -c "{rank.replace("$$", chr(92) + "$" + chr(92) + "$")}" & sleep 0.5; exit 3')
    pid = wait_for(tmp_path / "rank")
    outcome, _, _ = finish(process)
    assert outcome["code"] == 3
    assert not is_alive(pid)


@pytest.mark.parametrize("launcher", ["Hydra", "Open MPI"])
def test_the_launcher_ends_when_mpitrain_run_is_killed(tmp_path: Path, launcher: str) -> None:
    process = start(f"echo $$ >{tmp_path}/pid; while :; do sleep 0.05; done", launcher=launcher)
    pid = wait_for(tmp_path / "pid")
    process.kill()
    process.communicate(timeout=30)
    assert wait_until_gone(pid)


def test_ranks_that_do_not_meet() -> None:
    wait = "while :; do sleep 0.05; done"
    outcome, _, _ = finish(start(wait, is_ours=True, start_timeout_seconds=0.3))
    assert outcome["late"]
    outcome, _, _ = finish(start("sleep 1", start_timeout_seconds=0.3))
    assert not outcome["late"]  # a program that does not tell
    outcome, _, _ = finish(start(f"printf '\\036%s begun 0 a\\n' 00ff >&2; {wait}", start_timeout_seconds=0.3))
    assert (outcome["late"], outcome["marks"]) == (True, ["begun"])


def fake_ssh(directory: Path, lines: str) -> str:
    path = directory / "ssh"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


def test_a_host_that_falls_silent_ends_the_job(tmp_path: Path) -> None:
    ssh = fake_ssh(tmp_path, "exit 255")
    outcome, _, _ = finish(start('"$AGENT" -x node1 prog & while :; do sleep 0.05; done', ssh=ssh))
    assert (outcome["lost"], outcome["ssh"], outcome["code"]) == (["node1"], {"node1": 255}, 143)
    assert not Path(outcome["agent"]).exists()


def test_no_file_is_left_when_mpitrain_run_is_killed(tmp_path: Path) -> None:
    ssh = fake_ssh(tmp_path, f'echo "$AGENT" >{tmp_path}/up; sleep 2')
    process = start('trap "" TERM; "$AGENT" node1 prog', ssh=ssh, launcher="Open MPI")
    directory = Path(wait_for(tmp_path / "up")).parent
    assert directory.exists()
    process.kill()
    process.wait(30)
    process.communicate(timeout=30)
    deadline = time.monotonic() + 20
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not directory.exists()


def test_the_agent_hands_on_options_input_and_signals(tmp_path: Path) -> None:
    ssh = fake_ssh(tmp_path, f'echo "$@" >{tmp_path}/args; cat >{tmp_path}/input; exit 4')
    outcome, _, _ = finish(start('echo in | "$AGENT" -x node1 "a b"; exit $?', ssh=ssh))
    assert (outcome["code"], outcome["ssh"]) == (4, {"node1": 4})
    assert (tmp_path / "args").read_text().endswith("ServerAliveCountMax=3 -x node1 a b\n")
    assert (tmp_path / "input").read_text() == "in\n"
    ssh = fake_ssh(tmp_path, f"trap 'exit 6' TERM; echo up >{tmp_path}/up; while :; do sleep 0.05; done")
    script = f'"$AGENT" node2 x & while [ ! -s {tmp_path}/up ]; do sleep 0.05; done; kill $!; wait $!; exit $?'
    outcome, _, _ = finish(start(script, ssh=ssh))
    assert (outcome["code"], outcome["ssh"]) == (6, {"node2": 6})
