"""What is watched, and for how long: where it is told, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from mpitrain.errors import UsageError
from mpitrain.faults.options import FaultOptions


@pytest.mark.parametrize(
    ("environ", "given", "expected"),
    [
        ({}, {}, (30.0, 300.0, "warn")),
        ({"MPITRAIN_STALL_WARNING": "5", "MPITRAIN_NON_FINITE": "stop"}, {}, (5.0, 300.0, "stop")),
        ({"MPITRAIN_STALL_WARNING": "5"}, {"stall_warning": 6, "stall_abort": 0}, (6.0, 0.0, "warn")),
        ({"MPITRAIN_STALL_WARNING": "0"}, {"stall_abort": 5}, (0.0, 5.0, "warn")),
        ({"MPITRAIN_STALL_WARNING": "5"}, {"stall_abort": 5}, (5.0, 5.0, "warn")),
        ({"MPITRAIN_STALL_ABORT": ""}, {"non_finite": "ignore"}, (30.0, 300.0, "ignore")),
    ],
)
def test_options(environ: dict[str, str], given: dict[str, Any], expected: tuple[float, float, str]) -> None:
    options = FaultOptions.of(environ, **given)
    assert (options.stall_warning, options.stall_abort, options.non_finite) == expected


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"MPITRAIN_STALL_WARNING": "soon"}, r"--stall-warning \(MPITRAIN_STALL_WARNING\) is 'soon'"),
        ({"MPITRAIN_STALL_ABORT": "-1"}, "MPITRAIN_STALL_ABORT"),
        ({"MPITRAIN_STALL_ABORT": "20"}, "--stall-abort 20 would end the job before --stall-warning 30 tells"),
        ({"MPITRAIN_STALL_WARNING": "400"}, "--stall-abort 300 would end the job before --stall-warning 400 tells"),
        ({"MPITRAIN_STALL_ABORT": "nan"}, "MPITRAIN_STALL_ABORT"),
        ({"MPITRAIN_STALL_ABORT": "inf"}, "MPITRAIN_STALL_ABORT"),
        ({"MPITRAIN_NON_FINITE": "maybe"}, "choose one of stop, warn, ignore"),
        ({"MPITRAIN_SAME_DATA": "stop"}, "choose one of warn, ignore"),
    ],
)
def test_wrong_options(environ: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        FaultOptions.of(environ)


@pytest.mark.parametrize(
    ("environ", "given", "expected"),
    [
        ({}, {}, ("abort", 1)),
        ({"MPITRAIN_ON_FAILURE": "shrink", "MPITRAIN_MIN_NP": "3"}, {}, ("shrink", 3)),
        ({"MPITRAIN_ON_FAILURE": "shrink", "MPITRAIN_MIN_NP": "3"}, {"on_failure": "abort"}, ("abort", 3)),
        ({"MPITRAIN_ON_FAILURE": "shrink"}, {"on_failure": "abort", "min_np": 2}, "--min-np does nothing without"),
        ({"MPITRAIN_ON_FAILURE": "restart"}, {}, "on-failure .* is 'restart': choose one of abort, shrink"),
        ({"MPITRAIN_MIN_NP": "0"}, {}, "min-np .* is 0: it must be at least 1"),
        ({"MPITRAIN_MIN_NP": "few"}, {}, "min-np .* is 'few'"),
    ],
)
def test_options_of_survival(environ: dict[str, str], given: dict[str, Any], expected: tuple[str, int] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            FaultOptions.of(environ, **given)
    else:
        options = FaultOptions.of(environ, **given)
        assert (options.on_failure, options.min_np) == expected
