"""What `init` chose, as sessions and servers take it."""

from __future__ import annotations

import pytest

from mpitrain.cluster import session_config
from mpitrain.errors import UsageError
from mpitrain.runtime.devices import DevicePlan
from mpitrain.runtime.threads import ThreadPlan


@pytest.mark.parametrize(
    ("devices", "cpu_devices", "expected"),
    [
        (DevicePlan(), None, "gpu_options { }"),
        (DevicePlan(growth=True), None, "gpu_options { allow_growth: true }"),
        (DevicePlan(fraction=0.5), None, "gpu_options { per_process_gpu_memory_fraction: 0.5 }"),
        (
            DevicePlan(memory_limit_mib=512),
            None,
            "gpu_options { experimental { virtual_devices { memory_limit_mb: 512 } } }",
        ),
        (DevicePlan(hide=True), None, 'device_count { key: "GPU" value: 0 } gpu_options { }'),
        (DevicePlan(), 3, 'device_count { key: "CPU" value: 3 } gpu_options { }'),
    ],
)
def test_session_config(devices: DevicePlan, cpu_devices: int | None, expected: str) -> None:
    config = session_config(ThreadPlan(3, 4), devices, cpu_devices)
    count, _, options = expected.rpartition("gpu_options")
    threads = "intra_op_parallelism_threads: 3 inter_op_parallelism_threads: 4"
    assert " ".join(str(config).split()) == f"{count}{threads} gpu_options{options}"


def test_no_cpu_at_all() -> None:
    with pytest.raises(UsageError, match="0 CPU devices asked for"):
        session_config(ThreadPlan(1, 2), DevicePlan(), 0)
