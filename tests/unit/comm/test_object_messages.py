"""Objects that cannot travel."""

from __future__ import annotations

import pickle
from typing import NoReturn

import pytest

from mpitrain.comm import object_messages
from mpitrain.comm.local import LocalCommunicator


class Unpicklable:
    def __reduce__(self) -> NoReturn:
        raise OSError("caf\udce9.csv is gone")  # a name that is no UTF-8


def test_what_cannot_be_sent_is_told_whatever_its_letters() -> None:
    with pytest.raises(ValueError, match=r"cannot be pickled: OSError: caf\\udce9\.csv is gone"):
        object_messages.all_gather_obj(LocalCommunicator(), pickle, Unpicklable())
