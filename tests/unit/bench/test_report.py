"""Records of measurements, and where they were made."""

from __future__ import annotations

import math

import pytest

from mpitrain.bench import report
from tests.unit.job import run


def test_medians_and_ratios_of_nothing_are_no_errors() -> None:
    assert report.median([3.0, 1.0, 2.0]) == 2.0
    assert math.isnan(report.median([]))  # of ranks that did not measure
    assert report.ratio(3.0, 2.0) == 1.5
    assert report.ratio(3.0, 0.0) is None
    assert report.ratio(3.0, -1.0) is None


def test_a_report_is_plain_numbers_and_texts() -> None:
    row = report.Row({"model": "a"}, {"alone_seconds": (0.1, 0.2)}, {"alone ms": 150.0, "limit": None})
    assert report.Report("step", {"cores": 2}, (row,)).as_json() == {
        "benchmark": "step",
        "setting": {"cores": 2},
        "rows": (
            {
                "case": {"model": "a"},
                "raw": {"alone_seconds": (0.1, 0.2)},
                "figures": {"alone ms": 150.0, "limit": None},
            },
        ),
    }


def test_what_changes_figures_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in report.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPITRAIN_ENGINE", "python")
    found = report.machine({"repeat": 3})
    assert (found["arguments"], found["environment"]) == ({"repeat": 3}, {"MPITRAIN_ENGINE": "python"})
    assert {"numpy", "keras", "mpi4py"} <= set(found["versions"]) <= set(report.PACKAGES)
    assert found["cores"] >= 1
    assert found["processor"] == found["processor"].strip()


@pytest.mark.parametrize(("ranks", "all_reduce"), [(1, ""), (2, "ring:65536:4")])
def test_the_job_is_told(ranks: int, all_reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_ALL_REDUCE", "ring:65536:4")
    for found in run(ranks, report.job):
        assert (found["ranks"], found["hosts"]) == (ranks, ["host"] * ranks)
        assert (len(found["cores_of_each_rank"]), found["all_reduce"]) == (ranks, all_reduce)
        assert found["threads"]["inter"] == 8
