"""Hostfiles in every dialect, and what is wrong with one, by line."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.runtime.hostfile import Host, HostfileError, parse, render, same_hosts

EXAMPLES = Path(__file__).resolve().parents[3] / "hostfiles"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", [Host("node1")]),
        ("node1 slots=4\nnode2 slots=2 max_slots=3 # spare\n", [Host("node1", 4), Host("node2", 2, 3)]),
        ("node1 max-slots=8 slots = 2", [Host("node1", 2, 8)]),
        ("# all\n\nnode1:4\n10.0.0.7:2\n", [Host("node1", 4), Host("10.0.0.7", 2)]),
        ("a:4,b:2, c", [Host("a", 4), Host("b", 2), Host("c", 1)]),
        ("node[01-03,20]", [Host(f"node{n}") for n in ("01", "02", "03", "20")]),
        ("gpu[1-2]:4 cpu-[9-10].rack", [Host("gpu1", 4), Host("gpu2", 4), Host("cpu-9.rack"), Host("cpu-10.rack")]),
        ("r[1-2]n[1-2]", [Host("r1n1"), Host("r1n2"), Host("r2n1"), Host("r2n2")]),
        ("a\nb\na\na\n", [Host("a", 3), Host("b", 1)]),
        ("a:2\na:3\n", [Host("a", 5)]),
        ("a slots=3 max_slots=4\na\n", [Host("a", 4, 4)]),
        ("a max_slots=4\na max-slots=4\n", [Host("a", 2, 4)]),
        ("a b c", [Host("a"), Host("b"), Host("c")]),
        ("\ufeffnode1 slots=2\r\nnode2\r\n", [Host("node1", 2), Host("node2")]),
        ("node1\tslots=2\tmax_slots=4\n\tnode2", [Host("node1", 2, 4), Host("node2")]),
        ("a slots= 4\nb slots =3\nc\tslots\t=\t2", [Host("a", 4), Host("b", 3), Host("c", 2)]),
        ("a slots=04", [Host("a", 4)]),
        (
            "worker.1.example.net:2,worker.2.example.net",
            [Host("worker.1.example.net", 2), Host("worker.2.example.net")],
        ),
        ("localhost,localhost,localhost", [Host("localhost", 3)]),
    ],
)
def test_dialects(text: str, expected: list[Host]) -> None:
    assert list(parse(text)) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "file names no host"),
        ("# nobody\n", "file names no host"),
        ("a\nb slots=0", "file:2: slots must be a whole number above 0, not '0'"),
        ("a:x", "file:1: slots must be a whole number above 0, not 'x'"),
        ("a:", "file:1: slots must be a whole number above 0, not ''"),
        ("a slots=²", "file:1: slots must be"),
        ("slots=3", "file:1: 'slots=3' stands before any host"),
        ("a cores=3", "file:1: 'cores=3' is not understood"),
        ("a\n\nno/de", "file:3: 'no/de' is no name of a host"),
        ("-oProxyCommand", "file:1: '-oProxyCommand' is no name of a host"),
        ("node[1-", r"file:1: 'node\[1-' has a \[ without a \]"),
        ("node1]", r"file:1: 'node1\]' has a \] without a \["),
        ("node[3-1]", r"file:1: '3-1' in 'node\[3-1\]' is no range"),
        ("node[a]", "file:1: 'a' in"),
        ("a\nnode1 2", "file:2: '2' is no host: the slots of a host are written node1 slots=2, or node1:2"),
        ("node1 slots 4", "file:1: 'slots' is no host: the slots of a host are written"),
        ("node1 slot=4", "file:1: 'slot=4' is not understood: hosts have slots=N and max_slots=N"),
        ("node1 slots=", "file:1: slots must be a whole number above 0, not ''"),
        ("node1 slots=" + "9" * 5000, "file:1: slots must be a whole number above 0, not '99999999999999999999'$"),
        ("node[1-" + "9" * 5000 + "]", "file:1: '1-9999"),
        ("2001:db8::1", "file:1: '2001:db8::1' is an IPv6 address, in which"),
        ("a\n[fe80::1%eth0]:4", r"file:2: '\[fe80::1%eth0\]:4' is an IPv6 address"),
        ("::1 slots=2", "file:1: '::1' is an IPv6 address"),
        ("a:1:2", "file:1: slots must be a whole number above 0, not '1:2'"),
        ("alice@node1:4", r"file:1: 'alice@node1:4' names a user.* ~/.ssh/config \(Host node1, then User alice\)"),
        ("n[1-99999]x[1-99999]", "file:1: these are more than 100,000 hosts"),
        ("a slots=1 slots=2", "file:1: a has slots twice: give it once"),
        ("b\na slots=2 slots=2", "file:2: a has slots twice"),
        ("a:2 slots=2", "file:1: a has slots twice"),
        ("a max_slots=2 slots=1 max-slots=3", "file:1: a has max_slots twice"),
        ("a slots=2\na slots=3", "file:2: a was named before, with 2 slots, and here with 3: name it once, with all"),
        ("a\na slots=3", "file:2: a was named before, with 1 slot, and here with 3"),
        ("a slots=2\na:3", "file:2: a was named before, with 2 slots, and here with 3"),
        ("n[1-3]:2 n2 slots=3", "file:1: n2 was named before, with 2 slots, and here with 3"),
        ("a max_slots=2\na max_slots=3", "file:2: a was named before, with max_slots=2, and here with max_slots=3"),
        ("a slots=3 max_slots=2", "file: a has 3 slots, more than its max_slots=2"),
    ],
)
def test_errors_name_file_and_line(text: str, complaint: str) -> None:
    with pytest.raises(HostfileError, match=complaint):
        parse(text, "file")


def test_which_of_some_names_are_a_host_s() -> None:
    names = ["node1", "node2.example.net", "worker.1.example.net", "worker.2.example.net"]
    assert same_hosts("node1.example.net", names) == ["node1"]
    assert same_hosts("node2", names) == ["node2.example.net"]
    assert same_hosts("worker.2.example.net", names) == ["worker.2.example.net"]
    assert same_hosts("node1", ["node1", "node1.example.net"]) == ["node1"]
    assert same_hosts("node3", names) == []


@given(st.text() | st.text(alphabet="ab1[]:-,=. \t#@slot"))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(HostfileError):
        parse(text)


names = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z0-9]", fullmatch=True)
hosts = st.lists(st.builds(Host, names, st.integers(1, 99)), min_size=1, unique_by=lambda host: host.name)


@given(hosts, st.sampled_from(["openmpi", "mpich", "list"]))
def test_what_is_rendered_is_read_again(given_hosts: list[Host], dialect: str) -> None:
    assert list(parse(render(given_hosts, dialect))) == given_hosts


def test_slurm_has_names_only() -> None:
    assert render([Host("a", 4), Host("b")], "slurm") == "a,b\n"
    with pytest.raises(HostfileError, match="no dialect 'pbs'"):
        render([Host("a")], "pbs")


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_examples_are_read(path: Path) -> None:
    assert len(parse(path.read_text(), path.name)) >= 2
