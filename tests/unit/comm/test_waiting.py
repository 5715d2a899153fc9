"""Waiting for what MPI does meanwhile."""

from __future__ import annotations

import threading
from typing import Any

from mpitrain.comm import waiting


class Request:
    """Done when it was asked so often."""

    def __init__(self, tests: int) -> None:
        self.left = tests
        self.inside: list[bool] = []

    def Test(self) -> bool:  # noqa: N802 (MPI's)
        self.inside.append(_is_locked())
        self.left -= 1
        return self.left <= 0


def _is_locked() -> bool:
    """Whether another thread would be kept out of MPI now."""
    found: list[bool] = []

    def attempt() -> None:
        found.append(waiting.INSIDE.acquire(blocking=False))
        if found[0]:
            waiting.INSIDE.release()

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return not found[0]


def test_it_ends_when_the_request_does_and_no_other_thread_is_let_in_meanwhile() -> None:
    for tests in (1, 2, 40):
        request = Request(tests)
        waiting.wait(request)
        assert (request.left, request.inside) == (0, [True] * tests)
        assert not _is_locked()


def test_an_operation_is_begun_and_waited_for() -> None:
    request, begun = Request(3), []

    def start(*arguments: Any) -> Request:
        begun.append((arguments, _is_locked()))
        return request

    waiting.poll(start, 1, "two")
    assert begun == [((1, "two"), True)]
    assert request.left == 0
