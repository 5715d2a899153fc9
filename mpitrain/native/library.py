"""The machine code of this package: where it is, and whether it can be used here."""

from __future__ import annotations

import ctypes
import functools
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("exchange.so")  # built by setup.py, where there is a compiler
TENSORFLOW = (
    *("TF_NewStatus", "TF_DeleteStatus", "TF_SetStatus", "TF_GetCode", "TF_NumInputs", "TF_GetInput"),
    *("TF_ForwardInputOrAllocateOutput", "TF_AllocateOutput", "TF_DeleteTensor", "TF_NumDims", "TF_Dim"),
    *("TF_TensorData", "TF_TensorByteSize", "TF_TensorType", "TF_OpKernelContext_Failure"),
    "TF_OpKernelConstruction_GetAttrInt64",
)
XLA = "_ZN3xla3ffi12GetXlaFfiApiEv"  # xla::ffi::GetXlaFfiApi(): the table of its functions
MPI = ("MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Iallgather", "MPI_Allreduce", "MPI_Iallreduce")
PYTHON = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p)),
    *(ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
)


def _structure(name: str, **kinds: str) -> type[ctypes.Structure]:
    """A struct of `native.h`: the names of its fields by kind, in order; `name:3` is an array."""
    types: dict[str, Any] = {"int": ctypes.c_int64, "double": ctypes.c_double, "pointer": ctypes.c_void_p}
    fields: list[tuple[str, Any]] = []
    for kind, names in kinds.items():
        for field in names.split():
            field_name, _, count = field.partition(":")
            one = types[kind.rstrip("_0123456789")]
            fields.append((field_name, one * int(count) if count else one))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


SessionStruct = _structure(
    "SessionStruct",
    pointer="comm byte float32 float64 sum in_place",
    int="rank size ranks crowded looks pairs survives",
    int_1="small_bytes largest_bytes looked_at_bytes whole_every header_bytes",
    pointer_2="mine all seen waiting statistics activity turn how python",
    int_2="pending fresh",
    pointer_3="under_way",
    int_3="next",
    double="before after",
    pointer_4="scratch:3",
    int_4="scratch_bytes:3 failed",
)
UpdateStruct = _structure("UpdateStruct", pointer="session", int="signature added_up buckets is_small counts ready")
BucketStruct = _structure(
    "BucketStruct", pointer="update", int="index id type size members", pointer_2="offsets sizes types"
)


class Library:
    """The loaded machine code, which knows the functions of TensorFlow and of MPI."""

    def __init__(self, code: ctypes.CDLL) -> None:
        self._code = code
        self.compute, self.create, self.delete = (
            _address(code, f"mpitrain_{name}") for name in ("compute", "create", "delete")
        )

    def take(self, turn: Any) -> bool:
        """Local: take the turn (`world.agreement.Turn.words`), if it is free."""
        return bool(self._code.mpitrain_take_turn(ctypes.c_void_p(turn.ctypes.data)))

    def give(self, turn: Any) -> None:
        """Local: give it back."""
        self._code.mpitrain_give_turn(ctypes.c_void_p(turn.ctypes.data))

    def setup_xla(self, name: str) -> str | None:
        """Local: make the exchange known to XLA.

        Args:
            name: by which programs call it.

        Returns:
            Why it cannot be; else None.
        """
        from tensorflow import sysconfig

        file = next(Path(sysconfig.get_lib()).glob("libtensorflow_cc.so*"))
        functions = ctypes.c_void_p(_address(ctypes.CDLL(str(file)), XLA))
        message = ctypes.create_string_buffer(1000)
        size = ctypes.c_int64(len(message))
        if self._code.mpitrain_setup_xla(functions, ctypes.c_char_p(name.encode()), message, size):
            return None
        return f"XLA does not take the exchange: {message.value.decode()}"


@functools.cache
def process() -> int:
    """Local: a number that no other process has. Operations tell it, whose addresses are those of one process."""
    return secrets.randbits(62) + 1


def loadable(mpi_file: str) -> str | None:
    """Local: why there is no machine code for this MPI; None if there is, as far as is known without TensorFlow.

    Args:
        mpi_file: a loaded library through which functions of MPI are found.
    """
    if not FILE.exists():
        return f"it was not built when mpitrain was installed (there is no {FILE.name})"
    try:
        ctypes.CDLL(str(FILE))
        _table(ctypes.CDLL(mpi_file), MPI)
    except (OSError, AttributeError) as error:
        return f"it cannot be loaded here: {error!r}"
    return None


@functools.cache
def library(mpi_file: str) -> Library | str:
    """Local: the machine code, or why there is none. Loads TensorFlow.

    Args:
        mpi_file: a loaded library through which functions of MPI are found.
    """
    reason = loadable(mpi_file)
    if reason is not None:
        return reason
    try:
        code = ctypes.CDLL(str(FILE))
        tensorflow, mpi = _table(tensorflow_framework(), TENSORFLOW), _table(ctypes.CDLL(mpi_file), MPI)
    except (OSError, AttributeError, StopIteration) as error:
        return f"it cannot be loaded here: {error!r}"
    sizes = [ctypes.c_int64(ctypes.sizeof(one)) for one in (mpi, SessionStruct, UpdateStruct, BucketStruct)]
    own = ctypes.c_int64(ctypes.sizeof(tensorflow))
    if not code.mpitrain_setup(tensorflow, own, mpi, *sizes, ctypes.c_int64(process())):
        return f"{FILE.name} belongs to another version of mpitrain: install it again"
    return Library(code)


def tensorflow_framework() -> ctypes.CDLL:
    """Local: the library of TensorFlow with its C API."""
    from tensorflow import sysconfig

    return ctypes.CDLL(str(next(Path(sysconfig.get_lib()).glob("libtensorflow_framework.so*"))))


def _table(library: ctypes.CDLL, names: Sequence[str]) -> Any:
    return (ctypes.c_void_p * len(names))(*[_address(library, name) for name in names])


def _address(library: ctypes.CDLL, name: str) -> int:
    return int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)
