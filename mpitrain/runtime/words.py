"""Numbers in memory that machine code shares with an object: see `native/src/native.h`."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

import numpy as np

Number = TypeVar("Number", int, float, bool)


class Word(Generic[Number]):
    """An attribute that is an element of the array `words` of its object.

    Args:
        index: of the element.
        kind: what it is read as.
    """

    def __init__(self, index: int, kind: type[Number]) -> None:
        self._index = index
        self._kind: type[Number] = kind

    @overload
    def __get__(self, owner: None, kind: type) -> Word[Number]: ...

    @overload
    def __get__(self, owner: Any, kind: type) -> Number: ...

    def __get__(self, owner: Any, kind: type) -> Word[Number] | Number:
        """Local: the number, at an object."""
        return self if owner is None else self._kind(owner.words.item(self._index))

    def __set__(self, owner: Any, value: Number) -> None:
        """Local: the number."""
        owner.words[self._index] = value


def address(array: np.ndarray[Any, Any]) -> int:
    """Local: where the memory of an array begins, for as long as there is the array."""
    return int(array.ctypes.data)
