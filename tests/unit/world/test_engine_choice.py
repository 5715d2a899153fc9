"""What MPITRAIN_ENGINE may say, and what is told where machine code is insisted on but cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpitrain.comm.local import LocalCommunicator
from mpitrain.errors import AgreedError, UsageError
from mpitrain.native import library
from mpitrain.world.consensus import run_on_all
from mpitrain.world.engine_choice import WAYS, asked, check
from tests.simulated import run


def test_what_may_be_asked_for() -> None:
    assert asked({}) == "auto"
    assert [asked({"MPITRAIN_ENGINE": way}) for way in WAYS] == ["auto", "native", "python"]
    for wrong in ("", "Python", "c"):
        with pytest.raises(UsageError, match=f"^MPITRAIN_ENGINE is '{wrong}': choose one of auto, native, python$"):
            asked({"MPITRAIN_ENGINE": wrong})


@pytest.mark.parametrize("one", ["native", "fast"])
def test_all_ranks_hear_what_one_cannot(one: str) -> None:
    def start(communicator: Any) -> str:
        environ = {"MPITRAIN_ENGINE": one} if communicator.rank == 1 else {}
        with pytest.raises(AgreedError) as raised:
            run_on_all(communicator, ("a", "b"), lambda: check(communicator, environ))
        return str(raised.value)

    found = run(2, start)
    assert found[0] == found[1]
    why = "gradients cannot be exchanged by machine code: no MPI connects these ranks"
    reason = {
        "native": f"MPITRAIN_ENGINE=native, but {why}",
        "fast": "MPITRAIN_ENGINE is 'fast': choose one of auto, native, python",
    }[one]
    assert found[0] == f"on rank 1 (b) only: {reason}"


def test_one_rank_exchanges_nothing_in_any_way() -> None:
    for way in WAYS:
        check(LocalCommunicator(), {"MPITRAIN_ENGINE": way})


def test_why_there_is_no_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "exchange.so"
    monkeypatch.setattr(library, "FILE", file)
    assert library.loadable("") == "it was not built when mpitrain was installed (there is no exchange.so)"
    file.write_bytes(b"of another machine")
    assert str(library.loadable("")).startswith("it cannot be loaded here: OSError(")
