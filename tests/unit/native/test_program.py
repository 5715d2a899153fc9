"""The structs of XLA that machine code declares for itself have the layout of those in TensorFlow's header."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import tensorflow as tf

from mpitrain.native import program

SOURCES = Path(__file__).parents[3] / "mpitrain/native/src"
HEADER = "xla/ffi/api/c_api.h"
STRUCTS = {  # own name and fields: XLA's
    "extension": ("Extension_Base", {"struct_size": "struct_size", "type": "type", "next": "next"}),
    "version": ("Api_Version", {"major": "major_version", "minor": "minor_version"}),
    "metadata": ("Metadata", {"struct_size": "struct_size", "version": "api_version", "traits": "traits"}),
    "metadata_extension": ("Metadata_Extension", {"base": "extension_base", "metadata": "metadata"}),
    "span": ("ByteSpan", {"bytes": "ptr", "size": "len"}),
    "buffer": ("Buffer", {"type": "dtype", "data": "data", "rank": "rank", "dimensions": "dims"}),
    "scalar": ("Scalar", {"type": "dtype", "value": "value"}),
    "list": ("Args", {"size": "size", "types": "types", "items": "args"}),
    "attributes": ("Attrs", {"size": "size", "types": "types", "names": "names", "items": "attrs"}),
    "frame": (
        "CallFrame",
        {"api": "api", "stage": "stage", "arguments": "args", "results": "rets", "attributes": "attrs"},
    ),
    "create_error": ("Error_Create_Args", {"message": "message", "code": "errc"}),
    "message_of_error": ("Error_GetMessage_Args", {"error": "error", "message": "message"}),
    "destroy_error": ("Error_Destroy_Args", {"error": "error"}),
    "register": (
        "Handler_Register_Args",
        {"name": "name", "platform": "platform", "execute": "bundle.execute", "traits": "traits"},
    ),
    "api": (
        "Api",
        {
            "version": "api_version",
            "create_error": "XLA_FFI_Error_Create",
            "message_of_error": "XLA_FFI_Error_GetMessage",
            "destroy_error": "XLA_FFI_Error_Destroy",
            "register_handler": "XLA_FFI_Handler_Register",
        },
    ),
}
NUMBERS = {
    "XLA_METADATA": "Extension_Metadata",
    "XLA_BUFFER": "ArgType_BUFFER",
    "XLA_SCALAR": "AttrType_SCALAR",
    "XLA_EXECUTE": "ExecutionStage_EXECUTE",
    **{f"XLA_{name}": f"DataType_{name}" for name in ("S32", "S64", "F16", "F32", "F64", "BF16")},
}


def test_the_layout_is_that_of_the_header(tmp_path: Path) -> None:
    include = Path(tf.sysconfig.get_include())
    if not (include / HEADER).exists():
        pytest.skip("a TensorFlow without this header")
    # That of TensorFlow 2.18 is C++ only.
    is_c = "typedef struct XLA_FFI_ByteSpan" in (include / HEADER).read_text()
    compiler, *options = ["cc", "-xc", "-std=c11"] if is_c else ["c++", "-xc++", "-std=c++11"]
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    lines = [f'#include "{HEADER}"', '#include "xla.h"', "#include <assert.h>", "#include <stddef.h>"]
    for own, (theirs, fields) in STRUCTS.items():
        for field, other in fields.items():
            one, two = f"struct xla_{own}, {field}", f"struct XLA_FFI_{theirs}, {other}"
            lines.append(f'static_assert(offsetof({one}) == offsetof({two}), "{own}.{field}");')
    same = [("list", "Args"), ("list", "Rets"), ("attributes", "Attrs"), ("buffer", "Buffer"), ("span", "ByteSpan")]
    for own, theirs in same:
        lines.append(f'static_assert(sizeof(struct xla_{own}) == sizeof(struct XLA_FFI_{theirs}), "{own}");')
    lines += [f'static_assert({own} == XLA_FFI_{theirs}, "{own}");' for own, theirs in NUMBERS.items()]
    program = tmp_path / "layout"
    program.write_text("\n".join(lines) + "\n")
    command = [compiler, *options, "-fsyntax-only", f"-I{include}", f"-I{SOURCES}", str(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_a_program_for_a_gpu_cannot_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [f"/physical_device:{kind}:0"])
    assert program.refused.__wrapped__(None) == "what XLA compiles for a GPU cannot call machine code of the host"
