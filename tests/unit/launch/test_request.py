"""How many ranks, where, and what they are given: what is refused before anything is started."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import LauncherError, UsageError
from mpitrain.launch import allocation
from mpitrain.launch.request import count_ranks, forwarded
from mpitrain.runtime.hostfile import Host, HostfileError

A, B = Host("a", 4), Host("b", 2)


@pytest.mark.parametrize(
    ("asked", "hosts", "cores", "oversubscribe", "expected"),
    [
        (2, (), 2, False, (2, False)),
        (3, (), 2, True, (3, True)),
        (None, (A, B), 2, False, (6, False)),
        (None, (A, B), 2, True, (6, False)),
        (6, (A, B), 2, True, (6, False)),
        (7, (A, B), 2, True, (7, True)),
        (7, (A, Host("b", 2, 3)), 2, True, (7, True)),
        (7, (Host("a", 4, 4), Host("b", 2, 3)), 2, True, (7, True)),
    ],
)
def test_ranks(
    asked: int | None, hosts: tuple[Host, ...], cores: int, oversubscribe: bool, expected: tuple[int, bool]
) -> None:
    assert count_ranks(asked, hosts, cores, oversubscribe) == expected


@pytest.mark.parametrize(
    ("asked", "hosts", "oversubscribe", "complaint"),
    [
        (None, (), False, "how many ranks"),
        (0, (), False, "-np is 0"),
        (-1, (A,), True, "-np is -1"),
        (3, (), False, r"3 ranks are more than there are slots, 2 \(this host has 2 cores\).*--oversubscribe"),
        (7, (A, B), False, r"7 ranks are more than there are slots, 6 \(a 4, b 2\)"),
        (8, (Host("a", 4, 4), Host("b", 2, 3)), True, "8 ranks are more than the hosts' max_slots allow, 7"),
        (99, tuple(Host(f"h{n}") for n in range(9)), False, r"h7 1, \.\.\.\)"),
    ],
)
def test_ranks_that_do_not_fit(asked: int | None, hosts: tuple[Host, ...], oversubscribe: bool, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        count_ranks(asked, hosts, 2, oversubscribe)


HERE = {
    "PATH": "/bin",
    "PYTHONPATH": "/p",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "AWS_SECRET_ACCESS_KEY": "s",
    "CUDA_VISIBLE_DEVICES": "4,5",
    "MY_A": "1",
    "MY_B": "2",
    "BASH_FUNC_x%%": "() { :; }",
}


@pytest.mark.parametrize(
    ("named", "more"),
    [
        ((), {}),
        (("MY_A",), {"MY_A": "1"}),
        (("MY_*",), {"MY_A": "1", "MY_B": "2"}),
        (("NEW=a=b c",), {"NEW": "a=b c"}),
        (("PATH=/other",), {"PATH": "/other"}),
        (("EMPTY=",), {"EMPTY": ""}),
        (("NOBODY_*",), {}),
        (("CUDA_VISIBLE_DEVICES",), {"CUDA_VISIBLE_DEVICES": "4,5"}),
    ],
)
def test_variables(named: tuple[str, ...], more: dict[str, str]) -> None:
    base = {"PATH": "/bin", "PYTHONPATH": "/p", "TF_CPP_MIN_LOG_LEVEL": "2"}
    assert forwarded(HERE, named) == {**base, **more}
    assert forwarded(HERE, named, ()) == more


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("ABSENT", "-x ABSENT: the variable is not set here"),
        ("A B", "names no environment variable"),
        ("1A=2", "names no environment variable"),
        ("=x", "names no environment variable"),
        ("", "names no environment variable"),
        ("A;B=1", "names no environment variable"),
        ("A*=1", "names no environment variable"),
        ("A=x\0y", "NUL"),
    ],
)
def test_variables_that_cannot_be(name: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        forwarded(HERE, (name,))


@given(st.text())
def test_any_name_is_understood_or_refused(name: str) -> None:
    with contextlib.suppress(UsageError):
        assert all(key.isascii() for key in forwarded(HERE, (name,)))


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3],x", "SLURM_JOB_CPUS_PER_NODE": "8(x4)"}


@pytest.mark.parametrize(
    ("environ", "system", "hosts", "ranks"),
    [
        (SLURM, "Slurm", [("n1", 8), ("n2", 8), ("n3", 8), ("x", 8)], None),
        (
            {**SLURM, "SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_NTASKS": "7"},
            "Slurm",
            [("n1", 2), ("n2", 2), ("n3", 2), ("x", 1)],
            7,
        ),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 4 b 2"}, "LSF", [("a", 4), ("b", 2)], None),
    ],
)
def test_allocations(environ: dict[str, str], system: str, hosts: list[tuple[str, int]], ranks: int | None) -> None:
    found = allocation.find(environ)
    assert found is not None
    assert (found.system, [(host.name, host.slots) for host in found.hosts], found.ranks) == (system, hosts, ranks)


@pytest.mark.parametrize(
    ("variables", "text", "system"),
    [
        ({"PBS_JOBID": "1", "PBS_NODEFILE": ""}, "a\na\na\na\nb\nb\n", "PBS"),
        ({"PE_HOSTFILE": ""}, "a 4 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\n", "Grid Engine"),
        ({"OMPI_MCA_orte_default_hostfile": ""}, "a slots=4\nb slots=2\n", "hostfile"),
        ({"HYDRA_HOST_FILE": ""}, "a:4\nb:2\n", "hostfile"),
    ],
)
def test_allocations_in_files(tmp_path: Path, variables: dict[str, str], text: str, system: str) -> None:
    path = tmp_path / "hosts"
    environ = {name: value or str(path) for name, value in variables.items()}
    with pytest.raises(LauncherError, match="cannot be read"):
        allocation.find(environ)
    path.write_text(text)
    found = allocation.find(environ)
    assert found is not None
    assert (found.system, found.hosts) == (system, (A, B))


@pytest.mark.parametrize("environ", [{}, {"PBS_NODEFILE": "/x"}, {"LSB_MCPU_HOSTS": "a 1"}, {"SLURM_NTASKS": "2"}])
def test_no_allocation(environ: dict[str, str]) -> None:
    assert allocation.find(environ) is None


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "8(x2)"}, LauncherError),
        ({"SLURM_JOB_CPUS_PER_NODE": ""}, LauncherError),
        ({"SLURM_JOB_NODELIST": "n[1-"}, HostfileError),
    ],
)
def test_allocations_that_cannot_be(changes: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        allocation.find({**SLURM, **changes})
