"""Which device each rank of a host gets, over the environments that users and schedulers make."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpitrain.errors import DeviceError, TooLateError
from mpitrain.runtime import gpus
from mpitrain.runtime.devices import DevicePlan, Memory, Visible, assign, narrowed, parse_memory, visible
from mpitrain.runtime.topology import Topology, topology
from tests.unit import fresh

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
ZE = "ZE_AFFINITY_MASK"
UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-0a1b2c3d-0000-0000-0000-000000000000")
MIGS = ("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0", "MIG-3f1f5a4e-0000-5000-8000-000000000000")
SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}


def found(count: int, kind: str = "cuda", first: int = 0) -> tuple[str, ...]:
    return tuple(f"{kind}:{number}" for number in range(first, first + count))


def host(ranks: int) -> list[Topology]:
    """The places of all ranks of one host, which is the second of the job."""
    nodes = [0, *[1] * ranks]
    return [topology(rank, nodes, ["other", *["alpha"] * ranks]) for rank in range(1, ranks + 1)]


def environments(
    environ: dict[str, str], detected: Sequence[str], ranks: int, share: bool = False
) -> list[dict[str, str]]:
    """What each rank would set, all seeing the same."""
    seen = visible(environ, detected)
    return [dict(assign(seen, place, "auto", share, None).environment) for place in host(ranks)]


@pytest.mark.parametrize(
    ("environ", "detected", "variable", "devices"),
    [
        ({}, (), CUDA, ()),
        ({}, found(4), CUDA, ("0", "1", "2", "3")),
        ({}, ("0", "1"), CUDA, ("0", "1")),
        # a container or device group that shows two of eight: the driver counts from 0
        ({}, found(2, first=4), CUDA, ("0", "1")),
        ({CUDA: "4,5"}, found(8), CUDA, ("4", "5")),
        ({CUDA: " 5 , 4 "}, found(8), CUDA, ("5", "4")),
        ({CUDA: "4,5"}, (), CUDA, ("4", "5")),
        ({CUDA: ""}, found(2), CUDA, ()),
        ({CUDA: "-1"}, found(2), CUDA, ()),
        ({CUDA: "0,-1,1"}, found(2), CUDA, ("0",)),
        ({CUDA: "0,0,1"}, found(2), CUDA, ("0", "1")),
        ({CUDA: "NoDevFiles"}, found(2), CUDA, ()),
        ({CUDA: ",".join(UUIDS)}, found(2), CUDA, UUIDS),
        ({CUDA: ",".join(MIGS)}, found(1), CUDA, MIGS),
        # Slurm
        ({"SLURM_STEP_GPUS": "4,5"}, found(8), CUDA, ("4", "5")),
        ({"SLURM_STEP_GPUS": "4,5"}, (), CUDA, ("4", "5")),
        ({"SLURM_STEP_GPUS": "4,5"}, found(2, first=4), CUDA, ("0", "1")),
        ({"SLURM_STEP_GPUS": "4,5", CUDA: "0,1"}, found(2, first=4), CUDA, ("0", "1")),
        ({"SLURM_STEP_GPUS": "4,5", CUDA: "5"}, found(8), CUDA, ("5",)),
        ({"SLURM_STEP_GPUS": ""}, found(2), CUDA, ("0", "1")),
        # ROCm
        ({}, found(2, "rocm", 128), HIP, ("0", "1")),
        ({HIP: "2,3"}, found(4, "rocm"), HIP, ("2", "3")),
        ({ROCR: "2,3"}, found(4, "rocm"), ROCR, ("2", "3")),
        ({ROCR: "GPU-365628c172834d70"}, found(4, "rocm"), ROCR, ("GPU-365628c172834d70",)),
        # HIP counts within what ROCR leaves
        ({ROCR: "2,3", HIP: "1,0"}, found(4, "rocm"), HIP, ("1", "0")),
        ({CUDA: "3,2"}, found(4, "rocm"), CUDA, ("3", "2")),
        ({CUDA: "3,2", HIP: "0"}, found(4, "rocm"), HIP, ("0",)),
        ({HIP: "2,3"}, (), HIP, ("2", "3")),
        ({ROCR: "2,3"}, (), ROCR, ("2", "3")),
        ({HIP: "-1"}, found(4, "rocm"), HIP, ()),
        # oneAPI, whole cards and tiles
        ({}, found(2, "level_zero", 128), ZE, ("0", "1")),
        ({ZE: "1"}, found(2, "level_zero"), ZE, ("1",)),
        ({ZE: "0.0,0.1"}, (), ZE, ("0.0", "0.1")),
        # what is there decides, not what is set for other makers
        ({ZE: "1", HIP: "0"}, found(2), CUDA, ("0", "1")),
    ],
)
def test_visible(environ: dict[str, str], detected: tuple[str, ...], variable: str, devices: tuple[str, ...]) -> None:
    seen = visible(environ, detected)
    assert (seen.variable, seen.devices, seen.own) == (variable, devices, False)


def test_a_position_the_machine_does_not_have() -> None:
    with pytest.raises(DeviceError, match=r"CUDA_VISIBLE_DEVICES=4,5 names GPU 4, but .* use 2, counted from 0"):
        visible({CUDA: "4,5"}, found(2))


@pytest.mark.parametrize(
    ("environ", "detected", "ranks", "variable", "expected"),
    [
        ({}, found(4), 4, CUDA, ["0", "1", "2", "3"]),
        ({}, found(4), 2, CUDA, ["0", "1"]),
        ({CUDA: "4,5"}, found(8), 2, CUDA, ["4", "5"]),
        ({CUDA: "5,4"}, found(8), 2, CUDA, ["5", "4"]),
        ({CUDA: "7"}, found(8), 1, CUDA, ["7"]),
        ({CUDA: ",".join(UUIDS)}, found(8), 2, CUDA, list(UUIDS)),
        ({CUDA: ",".join(MIGS)}, found(1), 2, CUDA, list(MIGS)),
        ({"SLURM_STEP_GPUS": "6,7"}, found(8), 2, CUDA, ["6", "7"]),
        ({ROCR: "2,3"}, found(4, "rocm"), 2, ROCR, ["2", "3"]),
        ({ROCR: "2,3", HIP: "1,0"}, found(4, "rocm"), 2, HIP, ["1", "0"]),
        ({ZE: "0.0,0.1"}, (), 2, ZE, ["0.0", "0.1"]),
    ],
)
def test_one_device_each(
    environ: dict[str, str], detected: tuple[str, ...], ranks: int, variable: str, expected: list[str]
) -> None:
    assert environments(environ, detected, ranks) == [{variable: device} for device in expected]


@pytest.mark.parametrize("environ", [{}, {CUDA: ""}, {CUDA: "-1"}, {HIP: ""}])
def test_no_device_changes_nothing(environ: dict[str, str]) -> None:
    assert environments(environ, (), 3) == [{}] * 3


@pytest.mark.parametrize("environ", [{}, {CUDA: "4,5"}, {"SLURM_STEP_GPUS": "6,7"}])
def test_a_program_that_chooses_sees_all(environ: dict[str, str]) -> None:
    places = host(3)  # more ranks than GPUs: whether that is right is up to the program
    assert [assign(visible(environ, found(8)), place, "all").environment for place in places] == [{}] * 3


@pytest.mark.parametrize(
    ("environ", "detected", "reason"),
    [
        ({}, (), "no GPU that TensorFlow can use was found"),
        ({CUDA: "-1"}, found(2), f"{CUDA} hides all GPUs"),
    ],
)
def test_no_device_is_told(environ: dict[str, str], detected: tuple[str, ...], reason: str) -> None:
    seen, place = visible(environ, detected), host(1)[0]
    assert assign(seen, place).description == f"CPU ({reason})"
    with pytest.raises(DeviceError, match=f"{reason} on alpha"):
        assign(seen, place, "gpu")


@pytest.mark.parametrize(
    ("environ", "detected", "hidden"),
    [
        ({}, (), {CUDA: "-1"}),
        ({CUDA: "4,5"}, found(8), {CUDA: "-1"}),
        ({}, found(2, "rocm"), {HIP: "-1"}),
        ({ROCR: "0"}, found(2, "rocm"), {ROCR: "-1"}),
        ({}, found(2, "level_zero"), {}),
    ],
)
def test_cpu_hides_devices(environ: dict[str, str], detected: tuple[str, ...], hidden: dict[str, str]) -> None:
    plans = [assign(visible(environ, detected), place, "cpu") for place in host(9)]
    assert [(plan.environment, plan.device, plan.hide, plan.unused) for plan in plans] == [(hidden, None, True, ())] * 9


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_more_ranks_than_gpus(ranks: int) -> None:
    for place in host(ranks):
        with pytest.raises(DeviceError) as raised:
            assign(visible({CUDA: "4,5"}, found(8)), place)
        for words in (
            "on alpha",
            f"{ranks} ranks, but 2 visible",
            f"{CUDA}: 4,5",
            "--share-gpus",
            "--device cpu",
        ):
            assert words in str(raised.value)
        assert "none was detected" not in str(raised.value)


def test_a_list_on_a_machine_that_shows_no_gpu() -> None:
    with pytest.raises(DeviceError, match="none was detected"):
        assign(visible({CUDA: "0"}, ()), host(2)[1])


@pytest.mark.parametrize(
    ("devices", "ranks", "expected", "fractions"),
    [
        ("4,5", 4, ["4", "5", "4", "5"], [0.45] * 4),
        ("4,5", 3, ["4", "5", "4"], [0.45, None, 0.45]),
        ("4", 3, ["4"] * 3, [0.3] * 3),
        ("4,5", 2, ["4", "5"], [None, None]),
    ],
)
def test_shared(devices: str, ranks: int, expected: list[str], fractions: list[float | None]) -> None:
    seen = visible({CUDA: devices}, found(8))
    plans = [assign(seen, place, share=True) for place in host(ranks)]
    assert [plan.device for plan in plans] == expected
    assert [plan.fraction for plan in plans] == pytest.approx(fractions)
    shared = [fraction is not None for fraction in fractions]
    assert ["shared by" in plan.description for plan in plans] == shared


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (None, Memory()),
        ("growth", Memory(growth=True)),
        ("0.5", Memory(fraction=0.5)),
        (0.25, Memory(fraction=0.25)),
        ("1", Memory(fraction=1.0)),
        ("4096", Memory(memory_limit_mib=4096)),
        (2048, Memory(memory_limit_mib=2048)),
    ],
)
def test_memory(memory: str | float | None, expected: Memory) -> None:
    assert parse_memory(memory) == expected
    plan = assign(visible({}, found(1)), host(1)[0], memory=memory)
    assert Memory(plan.memory_limit_mib, plan.fraction, plan.growth) == expected


@pytest.mark.parametrize("memory", ["", "0", "-1", "1.5", "nan", "inf", "4GB", "Growth", "half", 0])
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_bad_memory(memory: str | float, device: str) -> None:
    with pytest.raises(DeviceError, match=r"expected growth, a fraction such as 0\.5, or a whole number of MiB"):
        assign(visible({}, found(1)), host(1)[0], device, memory=memory)


def test_memory_of_a_shared_device() -> None:
    seen, place = visible({}, found(1)), host(3)[1]
    assert assign(seen, place, share=True, memory="growth").growth
    assert assign(seen, place, share=True, memory="0.3").fraction == 0.3
    assert assign(seen, place, share=True, memory="1000").memory_limit_mib == 1000
    with pytest.raises(DeviceError, match=r"3 ranks share a GPU and each would take 0.5 .* at most 0.333"):
        assign(seen, place, share=True, memory="0.5")


@pytest.mark.parametrize(
    ("devices", "ranks", "unused"), [("4,5,6", 1, ("5", "6")), ("4,5,6", 2, ("6",)), ("4,5,6", 3, ())]
)
def test_unused_are_told_on_every_rank(devices: str, ranks: int, unused: tuple[str, ...]) -> None:
    seen = visible({CUDA: devices}, found(8))
    assert [assign(seen, place).unused for place in host(ranks)] == [unused] * ranks


def test_unknown_device() -> None:
    with pytest.raises(DeviceError, match="'tpu': expected auto, cpu, gpu or all"):
        assign(visible({}, ()), host(1)[0], "tpu")


PER_TASK = [
    {"SLURM_GPUS_PER_TASK": "1"},
    {"SLURM_GPUS_PER_TASK": "a100:1"},
    {"SLURM_TRES_PER_TASK": "cpu:8,gres/gpu:1"},
    {"SLURM_TRES_PER_TASK": "gres/gpu:a100=1"},
    {"SLURM_GPU_BIND": "per_task:1"},
    {"SLURM_GPU_BIND": "verbose,single:1"},
    {"SLURM_NTASKS_PER_GPU": "1"},
]


@pytest.mark.parametrize("flags", PER_TASK)
@pytest.mark.parametrize("name", ["0", "3"])
def test_slurm_gave_each_task_its_own(flags: dict[str, str], name: str) -> None:
    """Every task may see the same name, 0, where Slurm confines each to its device."""
    assert environments({**SRUN, **flags, CUDA: name}, (), 4) == [{CUDA: name}] * 4


@pytest.mark.parametrize("flags", PER_TASK)
def test_slurm_gave_them_all_to_mpirun(flags: dict[str, str]) -> None:
    """Within sbatch --gpus-per-task=1, mpirun hands Slurm's variables on, but binds nothing."""
    environ = {**SRUN, **flags, **MPIRUN}
    assert environments({**environ, CUDA: "0,1"}, (), 2) == [{CUDA: "0"}, {CUDA: "1"}]
    with pytest.raises(DeviceError, match="2 ranks, but 1 visible"):
        environments({**environ, CUDA: "0"}, (), 2)


def test_slurm_gave_each_task_two() -> None:
    plan = assign(visible({**SRUN, "SLURM_GPUS_PER_TASK": "2", CUDA: "0,1"}, ()), host(2)[1])
    assert (plan.device, plan.unused) == ("0", ("1", "1"))


@pytest.mark.parametrize("flags", [{}, {"SLURM_GPU_BIND": "none"}, {"SLURM_GPUS_PER_TASK": "2"}])
def test_slurm_shows_all_tasks_one_device(flags: dict[str, str]) -> None:
    with pytest.raises(DeviceError, match="2 ranks, but 1 visible"):
        environments({**SRUN, **flags, CUDA: "0"}, (), 2)


Views = list[tuple[str, tuple[str, ...]]]


def plans(views: Views, share: bool = False) -> list[DevicePlan]:
    """The plan of each rank, when they see different things and know it."""
    seen = [visible({CUDA: devices}, detected) for devices, detected in views]
    return [assign(mine, place, "auto", share, None, seen) for mine, place in zip(seen, host(len(seen)), strict=True)]


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        # a wrapper script sets the variable to the local rank
        ([("0", found(4)), ("1", found(4))], ["0", "1"]),
        ([("3", found(4)), ("0", found(4)), ("1", found(4))], ["3", "0", "1"]),
        # by NUMA domain
        ([("0,1", found(4)), ("0,1", found(4)), ("2,3", found(4)), ("2,3", found(4))], ["0", "1", "2", "3"]),
        # each rank is confined to one device, which it calls 0
        ([("0", ("cuda:0",)), ("0", ("cuda:1",))], ["0", "0"]),
        # one rank does without
        ([("0", found(2)), ("", found(2)), ("1", found(2))], ["0", None, "1"]),
    ],
)
def test_ranks_see_different_devices(views: Views, expected: list[str | None]) -> None:
    assert [plan.device for plan in plans(views)] == expected
    assert [dict(plan.environment) for plan in plans(views)] == [{CUDA: name} if name else {} for name in expected]


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([("0", found(4)), ("0", found(4))], "2 ranks, but 1 visible"),
        ([("0", found(4)), ("0,1", found(4))], "2 ranks whose lists .* all to GPU 0"),
    ],
)
def test_different_lists_that_meet(views: Views, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        plans(views)
    assert [plan.fraction for plan in plans(views, share=True)] == [0.45, 0.45]


def test_unused_of_different_lists() -> None:
    views = [("0,1", found(4)), ("2,3", found(4))]
    assert [plan.unused for plan in plans(views)] == [("1", "3")] * 2


def machine(root: Path, files: Sequence[str], vendors: dict[int, str] | None = None) -> Path:
    """A directory with the files by which a machine shows its devices."""
    contents = {f"sys/class/drm/renderD{n}/device/vendor": f"{v}\n" for n, v in (vendors or {}).items()}
    for name, text in {**dict.fromkeys(files, ""), **contents}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


NVIDIA = [
    "dev/nvidia0",
    "dev/nvidia2",
    "dev/nvidia10",
    "dev/nvidiactl",
    "dev/nvidia-uvm",
    "dev/nvidia-caps/x",
]
RENDER = ["dev/kfd", "dev/dri/renderD128", "dev/dri/renderD129", "dev/dri/card0"]
WSL = ["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"]
MAKERS = {128: "0x1002", 129: "0x8086"}


@pytest.mark.parametrize(
    ("files", "packages", "expected"),
    [
        (NVIDIA, {"tensorflow"}, ("cuda:0", "cuda:2", "cuda:10")),
        (NVIDIA, {"tensorflow-cpu"}, ()),
        (NVIDIA, {"tensorflow", "tensorflow-cpu"}, ("cuda:0", "cuda:2", "cuda:10")),
        (NVIDIA, set(), ("cuda:0", "cuda:2", "cuda:10")),
        (WSL, {"tensorflow"}, ("cuda:0",)),
        (WSL[:1], {"tensorflow"}, ()),
        ([], {"tensorflow"}, ()),
        # a graphics chip that the installed TensorFlow has no code for is no device
        (RENDER, {"tensorflow"}, ()),
        (RENDER, {"tensorflow-rocm"}, ("rocm:128",)),
        (RENDER[1:], {"tensorflow-rocm"}, ()),
        (RENDER, {"tensorflow", "intel-extension-for-tensorflow"}, ("level_zero:129",)),
    ],
)
def test_detect(tmp_path: Path, files: list[str], packages: set[str], expected: tuple[str, ...]) -> None:
    assert gpus.detect(machine(tmp_path, files, MAKERS), packages.__contains__) == expected


def test_installed() -> None:
    assert gpus.installed("pytest")
    assert not gpus.installed("no-such-package-as-this")


START = (
    "import os, sys\nfrom mpitrain.runtime import gpus, imports\nimports.install()\n"
    "from mpitrain.runtime.devices import DevicePlan, visible, assign\n"
)


def before_use(code: str) -> str:
    """What a program prints in a process in which TensorFlow is loaded, but has not been used."""
    return fresh.printed(START + code).strip()


def in_fresh_process(code: str) -> str:
    """What a fresh interpreter prints."""
    environ = {name: value for name, value in os.environ.items() if name != CUDA}
    finished = subprocess.run(
        [sys.executable, "-c", START + code], check=False, capture_output=True, text=True, cwd=fresh.ROOT, env=environ
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_finding_and_selecting_needs_no_tensorflow() -> None:
    code = (
        "gpus.detect(); gpus.select(DevicePlan({'CUDA_VISIBLE_DEVICES': '5'}, '5'))\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'], gpus.devices_fixed(), 'tensorflow' in sys.modules)"
    )
    assert in_fresh_process(code) == "5 False False"


@pytest.mark.parametrize("use", ["tf.constant(1)", "tf.config.list_physical_devices()", "keras.Variable(1.0)"])
def test_too_late_is_seen(use: str) -> None:
    code = (
        "import tensorflow as tf, keras\nbefore = gpus.devices_fixed()\n" + use + "\n"
        "print(before, gpus.devices_fixed())"
    )
    assert before_use(code) == "False True"


def test_too_late_to_select_or_limit() -> None:
    """The CPU stands in for the GPU: TensorFlow hides both in the same way."""
    code = (
        "import tensorflow as tf\nfrom mpitrain.errors import TooLateError\n"
        "gpus._devices = lambda tf: tf.config.list_physical_devices('CPU') * 2\n"
        "tf.constant(1)\n"
        "for call, plan in ((gpus.select, DevicePlan({'CUDA_VISIBLE_DEVICES': '5'}, '5')),\n"
        "                   (gpus.limit_memory, DevicePlan({}, None, hide=True))):\n"
        "    try: call(plan)\n"
        "    except TooLateError as error: print('mpitrain.init() before the first use' in str(error))\n"
        "print('CUDA_VISIBLE_DEVICES' in os.environ)"
    )
    assert before_use(code).split() == ["True"] * 2 + ["False"]


def test_late_but_harmless() -> None:
    """TensorFlow found no GPU: there is nothing to take away from it."""
    code = (
        "import tensorflow as tf\ntf.constant(1)\n"
        "gpus.select(DevicePlan({'CUDA_VISIBLE_DEVICES': '-1'}, hide=True))\n"
        "print(gpus.limit_memory(DevicePlan({}, hide=True, description='CPU (as asked)')))"
    )
    assert before_use(code) == "CPU (as asked)"


def test_tensorflow_cannot_use_the_device() -> None:
    """A list that is believed, on a machine where TensorFlow finds nothing."""
    code = (
        "from mpitrain.errors import DeviceError\n"
        "print(gpus.limit_memory(DevicePlan({}, '5')))\n"
        "try: gpus.limit_memory(DevicePlan({}, '5', required=True))\n"
        "except DeviceError as error: print(error)"
    )
    with_gpu = gpus.detect()
    if with_gpu:
        pytest.skip("this machine has a GPU")
    told, raised = before_use(code).splitlines()
    assert told.startswith("CPU (TensorFlow cannot use GPU 5")
    assert raised.startswith("a GPU was asked for, but TensorFlow cannot use GPU 5")


def test_without_device_no_tensorflow_is_loaded() -> None:
    code = "print(gpus.limit_memory(DevicePlan(description='CPU (why)')), 'tensorflow' in sys.modules)"
    assert in_fresh_process(code) == "CPU (why) False"


def test_errors_are_the_users() -> None:
    assert DeviceError.exit_code == TooLateError.exit_code == 2


def test_visible_can_travel() -> None:
    import pickle

    seen = visible({CUDA: "4,5"}, found(8))
    assert pickle.loads(pickle.dumps(seen)) == seen == Visible(CUDA, ("4", "5"), found(8), False)


@pytest.mark.parametrize(
    ("environ", "detected", "names", "expected"),
    [
        ({}, found(4), "0,2", ("0", "2")),
        ({}, found(4), " 3 ", ("3",)),
        ({CUDA: "2,3"}, found(4), "3", ("3",)),
        ({CUDA: ",".join(UUIDS)}, found(2), UUIDS[1], (UUIDS[1],)),
    ],
)
def test_visible_devices_narrow_further(
    environ: dict[str, str], detected: Sequence[str], names: str, expected: tuple[str, ...]
) -> None:
    some = narrowed(visible(environ, detected), names)
    assert some.devices == expected
    assert [dict(assign(some, place, share=True).environment) for place in host(2)] == [
        {CUDA: expected[0]},
        {CUDA: expected[-1]},
    ]


@pytest.mark.parametrize(
    ("environ", "detected", "names", "complaint"),
    [
        ({CUDA: "2,3"}, found(4), "1,2", r"'1,2': expected some of 2,3, with commas \(CUDA_VISIBLE_DEVICES\)"),
        ({}, found(2), "2", "expected some of 0,1"),
        ({}, found(2), "0,x", "expected some of 0,1"),
        ({}, found(2), "", "expected some of 0,1"),
        ({}, (), "0", r"'0': this rank sees no GPU \(CUDA_VISIBLE_DEVICES\): leave the option out"),
    ],
)
def test_visible_devices_that_are_not(
    environ: dict[str, str], detected: Sequence[str], names: str, complaint: str
) -> None:
    with pytest.raises(DeviceError, match=complaint):
        narrowed(visible(environ, detected), names)


def test_a_rank_that_wants_no_gpu_leaves_them_to_the_others() -> None:
    seen = visible({}, found(2))
    views, kinds = [Visible(CUDA, ()), seen, seen], ("cpu", "auto", "auto")
    plans = [assign(seen, place, device, neighbours=views) for place, device in zip(host(3), kinds, strict=True)]
    assert [plan.device for plan in plans] == [None, "0", "1"]
    assert [dict(plan.environment) for plan in plans] == [{CUDA: "-1"}, {CUDA: "0"}, {CUDA: "1"}]
