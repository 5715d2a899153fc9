"""Makes `import horovod.tensorflow` in a script find this package where Horovod is not installed."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

HERE = "mpitrain.horovod"
ELSEWHERE = {
    ".tensorflow.compression": ".compression",
    ".tensorflow.functions": ".variables",
    ".tensorflow.sync_batch_norm": ".normalization",
}
SUPPORTED = (
    *("", ".common", ".common.basics", ".common.elastic", ".common.exceptions", ".common.process_sets", ".common.util"),
    *(".tensorflow", ".tensorflow.elastic", ".tensorflow.mpi_ops", ".tensorflow.util", *ELSEWHERE),
    *(".tensorflow.keras", ".tensorflow.keras.callbacks", ".tensorflow.keras.elastic"),
    *(".keras", ".keras.callbacks", ".keras.elastic", ".data", ".data.data_loader_base"),
    *(".runner", ".runner.common", ".runner.common.util", ".runner.common.util.host_hash", ".runner.common.util.hosts"),
)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Local: refuse what is not there.

        Raises:
            ImportError: a part of Horovod that this package has not.
        """
        if fullname.partition(".")[0] == "horovod":
            raise ImportError(
                f"{fullname} is not provided by mpitrain, which has horovod.tensorflow, horovod.tensorflow.keras and "
                "horovod.keras; PyTorch, MXNet, Spark and Ray are outside of what it does",
                name=fullname,
            )


def install() -> bool:
    """Local: `horovod` becomes this package, unless Horovod itself is installed.

    Returns:
        True if it did.
    """
    if _is_installed():
        return False
    for suffix in SUPPORTED:
        # All at once: Python looks into this table before it asks any finder.
        sys.modules[f"horovod{suffix}"] = importlib.import_module(f"{HERE}{ELSEWHERE.get(suffix, suffix)}")
    # First, so that what is absent is told in this sentence and not as a module that is not installed.
    sys.meta_path.insert(0, _Finder())
    return True


def _is_installed() -> bool:
    """Local: Horovod itself is found, and not only a script `horovod.py` or a folder `horovod` of the user's."""
    spec = importlib.util.find_spec("horovod")
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / "tensorflow" / "__init__.py").is_file() for place in places or ())
