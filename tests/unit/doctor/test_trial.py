"""The small MPI job: what it measures, how it is ended, what is said of it."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from mpitrain.doctor import probe
from mpitrain.doctor.trial import BEGUN, MARK, STARTED, Pair, Trial, check, check_link, link_rate, read, run, slowest
from tests.simulated import run as run_ranks
from tests.unit.doctor.hosts import host, interface

NAMES = ("node0", "node1")
PAIR = Pair("node0", "node1", 50e-6, 940e6)
GOOD = Trial(code=0, ranks=2, hosts=2, thread_level="multiple", pairs=(PAIR,))


@pytest.mark.parametrize(("size", "pairs"), [(2, ["ab"]), (3, ["ab", "bc", "ca"])])
def test_each_rank_is_measured_against_the_next(size: int, pairs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LONGEST_PAIR_SECONDS", 0.02)
    results = run_ranks(size, lambda communicator: probe.measure(communicator, ("a", "b", "c")[:size]))
    assert all(result == results[0] for result in results)
    assert [pair["source"] + pair["target"] for pair in results[0]] == pairs
    assert all(pair["latency_seconds"] > 0 and pair["bits_per_second"] > 0 for pair in results[0])


def test_what_a_job_prints_is_read() -> None:
    told = {"library": "x", "thread_level": "multiple", "ranks": 2, "hosts": 2, "pairs": [vars(PAIR)]}
    output = f"node0: {BEGUN}\n{MARK}{json.dumps(told)}\nbye\n"
    assert read(0, output) == replace(GOOD, words=output)
    assert read(1, "sorry\n") == Trial(code=1, words="sorry\n")


def test_a_job_that_hangs_is_ended_with_what_it_started() -> None:
    child = "import time; time.sleep(100)"
    code = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    outcome = run([sys.executable, "-c", code], {}, 3)
    assert time.monotonic() - began < 30
    assert outcome.seconds == 3
    assert "begun" in outcome.words


def test_no_mpirun() -> None:
    assert run(["/no/such/mpirun"], {}, 3).code == 127


def test_a_job_as_it_should_be() -> None:
    found = list(check(GOOD, NAMES))
    assert [(f.check, f.colour) for f in found] == [("MPI job", "green"), ("threads", "green")]
    assert found[0].sentence == "2 ranks on 2 hosts found each other"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"code": 3, "words": "one\ntwo\n---\nthree\nfour\n", "ranks": 0}, "exit code 3; it said: two / three / four"),
        ({"code": 0, "words": "", "ranks": 0}, "failed with exit code 0"),
        (
            {"code": 14, "words": "a\nUnable to connect\nb\nUnable to connect\nAn error\nc\nd", "ranks": 0},
            "it said: Unable to connect / An error",
        ),
        (
            {"seconds": 20.0, "words": "x\0y"},
            "rank had begun: mpirun does not get through to its daemons, and was ended after 20 s; it said: xy",
        ),
        ({"seconds": 20.0, "words": f"node1: {BEGUN}"}, "while MPI was starting (not begun on node0), and"),
        (
            {"seconds": 20.0, "words": f"node0: {BEGUN}\nnode1: {BEGUN}\nnode0: {STARTED}"},
            "after MPI had started on node0, but not on node1, and",
        ),
        ({"seconds": 20.0, "words": f"node0: {STARTED}\nnode1: {STARTED}"}, "after MPI had started, and"),
    ],
)
def test_a_job_that_went_wrong(changes: dict[str, Any], sentence: str) -> None:
    (found,) = check(replace(GOOD, **changes), NAMES)
    assert (found.check, found.colour) == ("MPI job", "red")
    assert sentence in found.sentence
    assert "mpitrain run -np 2 -H node0:1,node1:1 --map-by node hostname" in found.remedy


@pytest.mark.parametrize(
    ("level", "colour"), [("multiple", "green"), ("serialized", "yellow"), ("funneled", "red"), ("single", "red")]
)
def test_thread_levels(level: str, colour: str) -> None:
    found = [f for f in check(replace(GOOD, thread_level=level), NAMES) if f.check == "threads"]
    assert [f.colour for f in found] == [colour]


@pytest.mark.parametrize(
    ("bits", "latency", "rate", "tcp", "colour", "sentence"),
    [
        (940e6, 50e-6, None, None, "green", "slowest: node0 to node1, 940 Mbit/s, latency 50 us"),
        (940e6, 50e-6, 1e9, 945e6, "green", "50 us; the link has 1 Gbit/s; TCP alone gets 945 Mbit/s"),
        (940e6, 50e-6, 10e9, None, "yellow", "slow: slowest: node0 to node1, 940 Mbit/s"),
        (300e6, 50e-6, None, 900e6, "yellow", "slow: "),
        (600e6, 50e-6, None, 9e9, "green", "TCP alone gets 9 Gbit/s"),
        (94e6, 50e-6, 100e6, 95e6, "yellow", "slow: "),
        (940e6, 8e-3, None, None, "yellow", "far: "),
    ],
)
def test_links(bits: float, latency: float, rate: float | None, tcp: float | None, colour: str, sentence: str) -> None:
    found = check_link(Pair("node0", "node1", latency, bits), rate, tcp)
    assert found.colour == colour
    assert sentence in found.sentence


def test_the_slowest_pair_is_shown() -> None:
    fast = Pair("node1", "node0", 1e-6, 1e12)
    assert slowest(replace(GOOD, pairs=(fast, PAIR, fast))) == PAIR
    assert slowest(replace(GOOD, pairs=())) is None


def test_the_rate_of_a_link_is_that_of_the_slower_end() -> None:
    def card(number: int, *speeds: int | None) -> Any:
        return host(number, interfaces=tuple(interface("e", f"10.0.{n}.1", speed_mbit=s) for n, s in enumerate(speeds)))

    assert link_rate({"a": card(0, 1000, 10000), "b": card(1, 25000)}) == 10e9
    assert link_rate({"a": card(0, 1000, None), "b": card(1, 1000)}) is None
