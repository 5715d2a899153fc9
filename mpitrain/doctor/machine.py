"""Memory, clock and GPUs of each host. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from mpitrain.doctor.facts import Facts, Graphics
from mpitrain.doctor.finding import Colour, Finding
from mpitrain.doctor.job import PlannedJob
from mpitrain.doctor.software import TENSORFLOWS, numbers
from mpitrain.runtime.counted import counted

MIB, GIB = 1 << 20, 1 << 30
# What ranks of one host exchange through; containers have 64 MiB unless they are told otherwise.
LITTLE_SHARED_BYTES = 256 * MIB
LEAST_SHARED_BYTES_PER_RANK = 16 * MIB
# A rank with TensorFlow loaded takes about half a GiB before there is any model.
LITTLE_BYTES_PER_RANK, LEAST_BYTES_PER_RANK = GIB, GIB // 2
# Logs and checkpoints cannot be put in order; then credentials (munge, Kerberos) are refused.
CLOCK_YELLOW_SECONDS, CLOCK_RED_SECONDS = 1.0, 30.0
# The oldest driver that runs programs of a CUDA release: NVIDIA, CUDA Compatibility, table of minor versions.
LEAST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


def check(job: PlannedJob, facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Each host by itself, and the clocks against each other."""
    for name, host in facts.items():
        yield from _graphics(name, host)
        ranks = job.ranks_on.get(name, 0)
        if ranks:
            yield _memory(name, host.memory_bytes, ranks)
            yield _shared_memory(name, host.shared_memory_bytes, ranks)
    yield from _clocks(facts)


def size(nbytes: float) -> str:
    """Bytes in words: `64 MiB`, `1.5 GiB`."""
    return f"{nbytes / GIB:.3g} GiB" if nbytes >= GIB else f"{nbytes / MIB:.3g} MiB"


def _memory(name: str, free: int, ranks: int) -> Finding:
    each = free / ranks
    if each >= LITTLE_BYTES_PER_RANK:
        return Finding("memory", (name,), "green", "1 GiB or more is free for each rank")
    sentence = (
        f"{size(free)} free for {counted(ranks, 'rank')}: {size(each)} each, and TensorFlow alone takes half a GiB"
    )
    colour: Colour = "red" if each < LEAST_BYTES_PER_RANK else "yellow"
    return Finding("memory", (name,), colour, sentence, f"at most {counted(max(1, free // GIB), 'rank')} on {name}")


def _shared_memory(name: str, nbytes: int, ranks: int) -> Finding:
    if nbytes >= LITTLE_SHARED_BYTES:
        return Finding("shared memory", (name,), "green", "/dev/shm is large enough")
    sentence = f"/dev/shm has {size(nbytes)}, which containers have by default: ranks of one host may die in it"
    colour: Colour = "red" if nbytes < LEAST_SHARED_BYTES_PER_RANK * ranks else "yellow"
    remedy = (
        "docker run --shm-size=2g; Kubernetes: an emptyDir of medium Memory; else: mount -o remount,size=2g /dev/shm"
    )
    return Finding("shared memory", (name,), colour, sentence, remedy)


def _clocks(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """The middle of all clocks is taken for right, so that of many hosts the one that is wrong is named."""
    clocks = {name: host.clock for name, host in facts.items() if host.clock is not None}
    if len(clocks) < 2:
        return
    middle = statistics.median_low(sorted(clock.ahead_seconds for clock in clocks.values()))
    if len(clocks) == 2:
        middle = 0.0  # of two, this host's is as good as any
    for name, clock in clocks.items():
        off = clock.ahead_seconds - middle
        sure = max(0.0, abs(off) - clock.error_seconds)
        if sure < CLOCK_YELLOW_SECONDS:
            yield Finding("clock", (name,), "green", f"within {CLOCK_YELLOW_SECONDS:.0f} s of the others")
            continue
        way = "ahead of" if off > 0 else "behind"
        sentence = f"the clock is {abs(off):.1f} s {way} the others (measured within {clock.error_seconds:.1g} s)"
        colour: Colour = "red" if sure >= CLOCK_RED_SECONDS else "yellow"
        remedy = f"ssh {name} 'sudo timedatectl set-ntp true', or: sudo chronyc makestep"
        yield Finding("clock", (name,), colour, sentence, remedy)


def _graphics(name: str, host: Facts) -> Iterator[Finding]:
    """GPUs and driver against what the installed TensorFlow was built for."""
    cards = host.graphics
    if not cards.cards and not cards.driver and not cards.devices:
        yield Finding("GPU", (name,), "green", "none: TensorFlow uses the CPU")
        return
    if not cards.devices:
        sentence = f"NVIDIA's driver {cards.driver} is loaded, but no GPU may be opened here"
        remedy = "docker run --gpus all (or --device), or ask the scheduler for GPUs: --gres=gpu:1"
        yield Finding("GPU", (name,), "yellow", sentence, remedy)
        return
    if cards.visible is not None and not cards.usable:
        sentence = f"{counted(cards.devices, 'GPU')}, all hidden by CUDA_VISIBLE_DEVICES={cards.visible}"
        yield Finding("GPU", (name,), "yellow", sentence, "unset CUDA_VISIBLE_DEVICES")
        return
    yield _driver(name, host, cards)


def _driver(name: str, host: Facts, cards: Graphics) -> Finding:
    pip = f"{host.python.executable} -m pip"
    build = cards.build.get("cuda_version", "")
    if cards.build.get("is_cuda_build") != "True" or not numbers(build):
        installed = " ".join(wheel for wheel in TENSORFLOWS if wheel in host.packages)
        sentence = (
            f"{counted(cards.devices, 'GPU')}, but the installed TensorFlow is built without CUDA: it uses the CPU"
        )
        remedy = f"{pip} uninstall -y {installed}; {pip} install 'tensorflow[and-cuda]'"
        return Finding("GPU", (name,), "yellow", sentence, remedy)
    driver = cards.driver or next((card.split(",")[1].strip() for card in cards.cards), "")
    least = LEAST_DRIVER.get(numbers(build)[0], (0,))
    if numbers(driver) and numbers(driver) < least:
        sentence = f"driver {driver} is too old for TensorFlow's CUDA {build}: it needs {'.'.join(map(str, least))}"
        remedy = "a newer driver (Ubuntu: sudo ubuntu-drivers install), or a TensorFlow built for an older CUDA"
        return Finding("GPU", (name,), "red", sentence, remedy)
    if not cards.cudnn and not any(wheel.startswith("nvidia-cudnn") for wheel in host.packages):
        sentence = f"{counted(cards.devices, 'GPU')}, but cuDNN is not installed: TensorFlow would use the CPU"
        return Finding("GPU", (name,), "yellow", sentence, f"{pip} install 'tensorflow[and-cuda]'")
    return Finding("GPU", (name,), "green", f"{cards.usable} usable; driver {driver}, TensorFlow's CUDA {build}")
