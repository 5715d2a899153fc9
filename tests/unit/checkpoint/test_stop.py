"""What a job ends with that a signal has stopped. No TensorFlow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from mpitrain.checkpoint.stop import exit_code, where_from

# A rank that never comes to the end of its step.
LATE = """
    import os, signal, sys, time
    from mpitrain.checkpoint.stop import StopRequest
    from mpitrain.comm.local import LocalCommunicator
    from mpitrain.runtime.devices import DevicePlan
    from mpitrain.runtime.threads import ThreadPlan
    from mpitrain.runtime.topology import topology
    from mpitrain.world.world import world_of

    world = world_of(LocalCommunicator(), topology(0, ["a"], ["a"]), DevicePlan(), ThreadPlan(1, 1))
    StopRequest(world, 0.2, lambda: None).begin()
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "saved", "code"),
    [
        (signal.SIGTERM, True, 85),
        (signal.SIGUSR1, True, 85),
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGUSR1, False, 138),
    ],
)
def test_exit_codes(number: int, saved: bool, code: int) -> None:
    assert exit_code(number, saved) == code


def test_where_signals_came_from() -> None:
    numbers = [0, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]
    hosts = ["a", "a", "b", "b"]
    assert where_from(numbers, hosts) == "SIGUSR1 came to rank 2 (b), SIGTERM came to ranks 1, 3 (a, b)"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 138), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_rank_that_is_late_tells_of_the_signal(number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-c", textwrap.dedent(LATE), str(int(number))]
    environ = {**os.environ, "MPITRAIN_RUN": "secret"}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environ, timeout=50)
    assert ended.returncode == code, ended.stderr
    assert f"rank 0 on a got {number.name}, but the ranks did not come to the end of a step" in ended.stderr
    told = next(line for line in ended.stderr.split("\n") if " fault " in line)
    assert f" signal 0 {code} rank~0~on~a got {number.name}" in told  # so that `mpitrain run` does not start it again
