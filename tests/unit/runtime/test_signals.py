"""A signal is noticed at once, and handlers are put back."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from mpitrain.runtime.signals import STOPPING, SignalSocket, StopSignals


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_becomes_a_request_and_then_an_end(number: int) -> None:
    before = [signal.getsignal(other) for other in STOPPING]
    seen: queue.Queue[int] = queue.Queue()
    late: queue.Queue[int] = queue.Queue()
    signals = StopSignals(0.3, seen.put, late.put)
    assert signals.install()
    assert not signals.install()
    try:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert seen.get(timeout=10) == number
        assert late.empty()
    finally:
        signals.remove()
    assert [signal.getsignal(other) for other in STOPPING] == before
    assert late.get(timeout=10) == number
    assert seen.empty()


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_that_woke_another_reader_is_not_lost(number: int) -> None:
    seen: queue.Queue[int] = queue.Queue()
    signals = StopSignals(60, seen.put, lambda number: None)
    signals.install()
    signal.set_wakeup_fd(-1)  # as when the signal comes just before, and its handler is called just after
    try:
        os.kill(os.getpid(), number)
        assert seen.get(timeout=10) == number
    finally:
        signals.remove()


def test_a_second_interrupt_a_second_later_does_not_wait() -> None:
    signals = StopSignals(60, lambda number: None, lambda number: None)
    signals.install()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signals.remove()


def test_other_threads_cannot_listen() -> None:
    answers = list[bool]()
    thread = threading.Thread(target=lambda: answers.append(StopSignals(1, print, print).install()))
    thread.start()
    thread.join()
    assert answers == [False]


BUSY = """
import hashlib, os, signal
from mpitrain.runtime.signals import StopSignals
def request(number):
    print("request", flush=True)
def late(number):
    os._exit(7)
signals = StopSignals(0.5, request, late)
signals.install()
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # a long call of C, during which no Python handler runs
"""


def test_is_noticed_in_the_middle_of_a_long_call() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.stdout.readline() == "request\n"
            assert process.wait(30) == 7
        finally:
            process.kill()


def test_only_this_process_wakes_itself() -> None:
    woken = SignalSocket()
    with woken.reading, woken.writing:
        child = os.fork()
        if child == 0:
            woken.send(bytes([signal.SIGTERM]))
            os._exit(0)
        os.waitpid(child, 0)
        woken.send(bytes([signal.SIGINT]))
        assert woken.receive() == b""
        assert woken.receive() == bytes([signal.SIGINT])


FORKS = """
import multiprocessing, os, time
from mpitrain.runtime.signals import StopSignals
os.register_at_fork(after_in_child=lambda: time.sleep(0.1))  # the child gets the signal before its first line
signals = StopSignals(60, lambda number: print("request", flush=True), print)
signals.install()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
child.start()
child.terminate()
child.join(10)
print(child.exitcode)
"""


def test_a_child_forked_during_a_training_that_can_be_stopped_gets_its_own_signals() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "-15\n"), ended.stderr
