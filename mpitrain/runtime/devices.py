"""Which accelerator each rank of a host uses. Pure: `gpus` finds and touches real ones.

A rank sees one device only: the variable that the driver reads is narrowed before TensorFlow starts,
so that no rank opens a context on, or takes memory of, another's. What the user or the scheduler
narrowed is narrowed further, never widened: with `CUDA_VISIBLE_DEVICES=4,5`, local rank 1 gets 5.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mpitrain.errors import DeviceError
from mpitrain.runtime.launcher import detect as detect_launcher
from mpitrain.runtime.topology import Topology

# For each kind of device the variables that narrow it, the one that is read last first: HIP counts
# within what ROCR leaves, and reads CUDA_VISIBLE_DEVICES where its own is not set. The first is the
# one to set where none is.
VARIABLES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "level_zero": ("ZE_AFFINITY_MASK",),
}
HIDDEN = "-1"
# Of a shared device's memory, what its ranks divide; the rest is for their contexts.
SHARED_MEMORY = 0.9


@dataclass(frozen=True)
class Visible:
    """What one rank may use."""

    variable: str  # the variable that narrows it
    devices: tuple[str, ...]  # the names by which that variable calls them: positions, UUIDs, MIG names
    # the device files this rank may open, as given. Ranks whose files differ (a scheduler that confines each) mean
    # different devices by the same position
    detected: tuple[str, ...] = ()
    own: bool = False  # the scheduler gave these devices to this rank alone


@dataclass(frozen=True)
class DevicePlan:
    """What one rank uses, and what must be set for it before TensorFlow starts."""

    environment: Mapping[str, str] = field(default_factory=dict)  # variables to set
    device: str | None = None  # name of the device in `environment`, None for the CPU
    memory_limit_mib: int | None = None  # take that much device memory at most
    fraction: float | None = None  # take that fraction of the device's memory at most
    growth: bool = False  # take device memory only as it is needed
    required: bool = False  # the user asked for a GPU: to run without is an error
    hide: bool = False  # no GPU may be used although there may be some
    description: str = "CPU"  # one phrase for the user
    unused: tuple[str, ...] = ()  # devices of this host that no rank uses; the same on all its ranks


@dataclass(frozen=True)
class Memory:
    """A limit of device memory; see `DevicePlan`."""

    memory_limit_mib: int | None = None
    fraction: float | None = None
    growth: bool = False


def visible(environ: Mapping[str, str], detected: Sequence[str]) -> Visible:
    """The devices that are left by the user, the scheduler and the machine.

    Args:
        environ: variables of this rank. A list that the user set is believed even where no device was
            detected: not every machine shows its devices in the same way.
        detected: what `gpus.detect` found: `cuda:0`, `rocm:0`, `level_zero:0`; a bare number is CUDA.

    Raises:
        DeviceError: the variable names a position that the machine does not have.
    """
    kind = _kind(environ, detected)
    found = tuple(name for name in detected if (name.rpartition(":")[0] or "cuda") == kind)
    variable = next((name for name in VARIABLES[kind] if name in environ), None)
    if variable is None:
        devices = _from_slurm(environ, len(found)) or tuple(map(str, range(len(found))))
        return Visible(VARIABLES[kind][0], devices, found, _is_own(environ, len(devices)))
    devices = _listed(environ[variable])
    within = variable == "CUDA_VISIBLE_DEVICES" and kind == "cuda"
    beyond = [name for name in devices if name.isdecimal() and int(name) >= len(found)]
    if within and found and beyond:
        raise DeviceError(
            f"{variable}={environ[variable]} names GPU {beyond[0]}, but this machine lets the process use "
            f"{len(found)}, counted from 0: correct the variable, or unset it"
        )
    return Visible(variable, devices, found, _is_own(environ, len(devices)))


def narrowed(visible: Visible, names: str) -> Visible:
    """Some of the devices that a rank sees.

    Raises:
        DeviceError: it does not see all of them, or none is named.
    """
    wanted = _listed(names)
    if not wanted or not set(wanted) <= set(visible.devices) or len(wanted) != len(names.split(",")):
        seen = (
            f"expected some of {','.join(visible.devices)}, with commas" if visible.devices else "this rank sees no GPU"
        )
        mend = "" if visible.devices else ": leave the option out"
        raise DeviceError(f"--visible-devices {names!r}: {seen} ({visible.variable}){mend}")
    return replace(visible, devices=wanted)


def assign(
    visible: Visible,
    topology: Topology,
    device: str = "auto",
    share: bool = False,
    memory: str | float | None = None,
    neighbours: Sequence[Visible] = (),
) -> DevicePlan:
    """The device of one rank.

    Ranks of a host that see the same list take its devices in turn, by local rank; a rank whose list
    is its own takes the first of it.

    Args:
        visible: what this rank sees.
        topology: its place.
        device: `cpu`, `gpu` (an error where there is none), `auto` (a GPU if there is one), or `all`: nothing is
            narrowed, because the program chooses by itself.
        share: let several ranks use one device; each then takes its part of the memory.
        memory: `growth`, a fraction of the device's memory (at most 1), or MiB; see `parse_memory`.
        neighbours: what each rank of this host sees, by local rank, this one included. Without it all
            are taken to see the same list; only with it is it known that a list of one device on each
            of several ranks (a wrapper script that sets `CUDA_VISIBLE_DEVICES`) is not one device for all.

    Raises:
        DeviceError: no device where one is required, several ranks for one device, or a bad argument.
    """
    limit = parse_memory(memory)
    if device not in ("auto", "cpu", "gpu", "all"):
        raise DeviceError(f"device {device!r}: expected auto, cpu, gpu or all")
    if device == "all":
        return DevicePlan(description="what the program chooses")
    if device == "cpu":
        hidden = {} if visible.variable == "ZE_AFFINITY_MASK" else {visible.variable: HIDDEN}
        return DevicePlan(hidden, hide=True, description="CPU (as asked)")
    if not visible.devices:
        if device == "gpu":
            raise DeviceError(f"a GPU was asked for, but {_none(visible)} on {topology.host}: use --device cpu or auto")
        return DevicePlan(description=f"CPU ({_none(visible)})")
    views = tuple(neighbours) or (visible,) * topology.local_size
    choices = [_choice(views, local_rank) for local_rank in range(len(views))]
    load = Counter(choice for choice in choices if choice)
    if max(load.values()) > 1 and not share:
        raise DeviceError(_crowded(visible, views, load, topology))
    mine = choices[topology.local_rank]
    assert mine is not None  # this rank sees at least one
    limit = _divided(limit, load[mine])
    shared = f", shared by {load[mine]} ranks" if load[mine] > 1 else ""
    return DevicePlan(
        {visible.variable: mine[1]},
        mine[1],
        limit.memory_limit_mib,
        limit.fraction,
        limit.growth,
        device == "gpu",
        description=f"GPU {mine[1]} ({visible.variable}){shared}",
        unused=_unused(views, set(load)),
    )


def parse_memory(memory: str | float | None) -> Memory:
    """`growth`, a number up to 1 (a fraction of the device's memory), or a whole number above 1 (MiB).

    Raises:
        DeviceError: it is none of these.
    """
    if memory is None:
        return Memory()
    text = str(memory).strip()
    if text == "growth":
        return Memory(growth=True)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if 0 < number <= 1:
        return Memory(fraction=number)
    if 1 < number < math.inf and number == int(number):
        return Memory(memory_limit_mib=int(number))
    raise DeviceError(
        f"GPU memory {text!r}: expected growth, a fraction such as 0.5, or a whole number of MiB such as 4096"
    )


# A device of a host: what tells the devices of differently confined ranks apart, and its name.
_Device = tuple[object, str]


def _view_key(views: Sequence[Visible], local_rank: int) -> object:
    """Equal for ranks that mean the same device by the same name."""
    view = views[local_rank]
    return ("own", local_rank) if view.own else view.detected


def _choice(views: Sequence[Visible], local_rank: int) -> _Device | None:
    view, key = views[local_rank], _view_key(views, local_rank)
    if not view.devices:
        return None
    before = sum(views[other].devices == view.devices and _view_key(views, other) == key for other in range(local_rank))
    return key, view.devices[before % len(view.devices)]


def _unused(views: Sequence[Visible], used: set[_Device]) -> tuple[str, ...]:
    seen = dict.fromkeys((_view_key(views, rank), name) for rank, view in enumerate(views) for name in view.devices)
    return tuple(device[1] for device in seen if device not in used)


def _divided(limit: Memory, ranks: int) -> Memory:
    if ranks > 1 and limit == Memory():
        return Memory(fraction=SHARED_MEMORY / ranks)
    if limit.fraction is not None and limit.fraction * ranks > 1:
        raise DeviceError(
            f"{ranks} ranks share a GPU and each would take {limit.fraction:g} of its memory: "
            f"expected at most {1 / ranks:.3g} (--gpu-memory)"
        )
    return limit


def _none(visible: Visible) -> str:
    return f"{visible.variable} hides all GPUs" if visible.detected else "no GPU that TensorFlow can use was found"


def _crowded(visible: Visible, views: Sequence[Visible], load: Counter[_Device], topology: Topology) -> str:
    (_, name), ranks = load.most_common(1)[0]
    doubt = "" if visible.detected else " (none was detected: is this a machine without GPU?)"
    if all(view.devices == visible.devices for view in views):
        what = f"{len(views)} ranks, but {len(visible.devices)} visible"
        what += f" ({visible.variable}: {','.join(visible.devices)})"
    else:
        what = f"{ranks} ranks whose lists of visible GPUs ({visible.variable}) lead them all to GPU {name}"
    return (
        f"more ranks than GPUs on {topology.host}: {what}{doubt}. Start one rank per GPU, let ranks share "
        "them with --share-gpus, or use --device cpu"
    )


def _kind(environ: Mapping[str, str], detected: Sequence[str]) -> str:
    """What was detected decides; where nothing was, the variable that is set."""
    found = {name.rpartition(":")[0] or "cuda" for name in detected}
    by_variable = (kind for kind, names in VARIABLES.items() if any(name in environ for name in names))
    return next((kind for kind in VARIABLES if kind in found), None) or next(by_variable, "cuda")


def _listed(text: str) -> tuple[str, ...]:
    """The entries of a list, as drivers read it: the first that is no device (such as -1) ends it."""
    names: dict[str, None] = {}
    for part in text.split(","):
        name = part.strip()
        if not (name.replace(".", "", 1).isdecimal() or name.upper().startswith(("GPU-", "MIG-"))):
            break
        names[name] = None
    return tuple(names)


def _from_slurm(environ: Mapping[str, str], found: int) -> tuple[str, ...]:
    """The devices Slurm gave the step, where its twin for the driver got lost on the way.

    Slurm counts all devices of the machine. Where it confines the step to as many as it gave, the driver
    counts those only.
    """
    names = _listed(environ.get("SLURM_STEP_GPUS", ""))
    return tuple(map(str, range(found))) if len(names) == found else names


def _is_own(environ: Mapping[str, str], devices: int) -> bool:
    """Slurm's srun gave each task this many devices (--gpus-per-task, or --gpu-bind=per_task or single:1)."""
    launcher = detect_launcher(environ)
    if launcher is None or not launcher.name.startswith("Slurm"):
        return False
    bind = environ.get("SLURM_GPU_BIND", "").removeprefix("verbose,").removeprefix("quiet,")
    per_task = [environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2], bind.partition("per_task:")[2]]
    if bind == "single:1" or environ.get("SLURM_NTASKS_PER_GPU") == "1":
        per_task.append("1")
    resources = environ.get("SLURM_TRES_PER_TASK", "").replace("=", ":").split(",")
    per_task += [resource.rpartition(":")[2] for resource in resources if "gpu" in resource]
    return devices > 0 and str(devices) in per_task
