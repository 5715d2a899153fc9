"""The few lines that touch real devices: find them without TensorFlow, select one, limit its memory."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from mpitrain.errors import DeviceError, TooLateError
from mpitrain.runtime.devices import DevicePlan

MIB = 1 << 20


def installed(package: str) -> bool:
    """Local: whether a Python package is installed, without importing it."""
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def detect(root: Path = Path("/"), installed: Callable[[str], bool] = installed) -> tuple[str, ...]:
    """Local: the GPUs that this process may open and that the installed TensorFlow can use.

    A graphics chip that TensorFlow has no code for is none. Files that a scheduler keeps from this
    process are left out: the system call `access` asks the device control group too.

    Returns:
        `cuda:4` for /dev/nvidia4, `rocm:1` and `level_zero:128` in the same way.
    """
    found: list[str] = []
    if installed("tensorflow") or not installed("tensorflow-cpu"):
        found += _files("cuda", root / "dev", r"nvidia(\d+)")
        # Windows Subsystem for Linux, which has one device file for all GPUs.
        if not found and (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
            found.append("cuda:0")
    if installed("tensorflow-rocm") and os.access(root / "dev/kfd", os.R_OK | os.W_OK):
        found += [name for name in _files("rocm", root / "dev/dri", r"renderD(\d+)") if _vendor(root, name) == "0x1002"]
    if installed("intel-extension-for-tensorflow"):
        cards = _files("level_zero", root / "dev/dri", r"renderD(\d+)")
        found += [name for name in cards if _vendor(root, name) == "0x8086"]  # Intel
    return tuple(found)


def devices_fixed() -> bool:
    """Local: TensorFlow has looked for devices already; what is set now comes too late."""
    if "tensorflow" not in sys.modules:
        return False
    module = sys.modules.get("tensorflow.python.eager.context")
    context = getattr(module, "_context", None)
    # No public name tells: the first is set when TensorFlow lists devices, the second when it opens them.
    fixed = ("_physical_devices", "_context_handle")
    return any(getattr(context, name, None) is not None for name in fixed)


def select(plan: DevicePlan) -> None:
    """Local: set the variables of the plan, for TensorFlow to see one device only.

    Raises:
        TooLateError: TensorFlow has looked for devices already, and found more than the plan allows.
    """
    changes = {name: value for name, value in plan.environment.items() if os.environ.get(name) != value}
    if changes and devices_fixed() and len(_devices(sys.modules["tensorflow"])) > (0 if plan.hide else 1):
        wanted = ", ".join(f"{name}={value}" for name, value in changes.items())
        raise TooLateError(
            f"{wanted} is to be set, but TensorFlow has already looked for devices and would use all: "
            "call mpitrain.init() before the first use of TensorFlow "
            "(a tensor, a variable, tf.config.list_physical_devices)"
        )
    os.environ.update(changes)


def limit_memory(plan: DevicePlan) -> str:
    """Local: apply the memory limit of the plan to TensorFlow, which it imports.

    Returns:
        What TensorFlow really uses, one phrase.

    Raises:
        TooLateError: TensorFlow has opened its devices already.
        DeviceError: the user asked for a GPU, and TensorFlow can use none.
    """
    if plan.device is None and not plan.hide:
        return plan.description
    import tensorflow as tf

    devices = _devices(tf)
    if plan.device is not None and not devices:
        reason = f"TensorFlow cannot use GPU {plan.device}; --verbose shows its reason"
        if plan.required:
            raise DeviceError(f"a GPU was asked for, but {reason}, --device cpu does without")
        return f"CPU ({reason})"
    try:
        for device in devices:
            _limit(tf, device, plan)
    except RuntimeError as error:
        raise TooLateError(
            f"the GPU's memory cannot be limited any more ({error}): call mpitrain.init() before "
            "the first use of TensorFlow"
        ) from error
    return plan.description


def _limit(tf: Any, device: Any, plan: DevicePlan) -> None:
    if plan.hide:
        tf.config.set_visible_devices([], device.device_type)
    elif plan.growth:
        tf.config.experimental.set_memory_growth(device, True)
    elif plan.memory_limit_mib is not None or plan.fraction is not None:
        mib = plan.memory_limit_mib or int((plan.fraction or 1.0) * _total_bytes() / MIB)
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=mib)
        tf.config.set_logical_device_configuration(device, [limit])


def _devices(tf: Any) -> list[Any]:
    return [*tf.config.list_physical_devices("GPU"), *tf.config.list_physical_devices("XPU")]


def _total_bytes() -> int:
    """Memory of the only visible device, from the driver: TensorFlow does not tell."""
    for library, prefix, suffix in (("libcuda.so.1", "cu", "_v2"), ("libamdhip64.so", "hip", "")):
        try:
            driver = ctypes.CDLL(library)
        except OSError:
            continue
        device, total = ctypes.c_int(), ctypes.c_size_t()
        failed = getattr(driver, f"{prefix}Init")(0)
        failed = failed or getattr(driver, f"{prefix}DeviceGet")(ctypes.byref(device), 0)
        failed = failed or getattr(driver, f"{prefix}DeviceTotalMem{suffix}")(ctypes.byref(total), device)
        if not failed:
            return total.value
    raise DeviceError("the size of the GPU's memory is unknown here: give --gpu-memory in MiB, or growth")


def _files(kind: str, folder: Path, pattern: str) -> list[str]:
    """The device files that this process may open, in the order of their numbers."""
    names = [match for path in folder.glob("*") if (match := re.fullmatch(pattern, path.name))]
    usable = [match for match in names if os.access(folder / match[0], os.R_OK | os.W_OK)]
    return [f"{kind}:{number}" for number in sorted(int(match[1]) for match in usable)]


def _vendor(root: Path, name: str) -> str:
    path = root / f"sys/class/drm/renderD{name.rpartition(':')[2]}/device/vendor"
    return path.read_text().strip() if path.exists() else ""
