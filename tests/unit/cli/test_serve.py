"""Which tasks of a cluster see a GPU, before the ranks meet."""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest

from mpitrain.cli import rank_options, serve
from mpitrain.cli.parser import Parser


def arguments_of(*words: str) -> argparse.Namespace:
    parser = Parser(prog="mpitrain")
    serve.add_parser(parser.add_subparsers(parser_class=Parser))
    return parser.parse_args(["serve", *words])


@pytest.mark.parametrize(
    ("words", "rank", "seen", "device"),
    [
        (["--jobs", "ps=1,worker", "--device", "gpu"], 0, "-1", "auto"),
        (["--jobs", "ps=1,worker", "--device", "gpu"], 1, "4,5", "gpu"),
        (["--jobs", "worker,evaluator=1", "--cpu-jobs", "ps,evaluator"], 2, "-1", "auto"),
        (["--jobs", "ps=1,worker", "--cpu-jobs", "none"], 0, "4,5", "auto"),
        (["--jobs", "ps=9"], 0, "4,5", "auto"),  # refused once the ranks have met
    ],
)
def test_servers_leave_gpus_to_workers(
    monkeypatch: pytest.MonkeyPatch, words: list[str], rank: int, seen: str, device: str
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    given: dict[str, Any] = {}
    monkeypatch.setattr(rank_options, "init", given.update)  # from there on ranks have to meet
    serve._start(arguments_of(*words))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
    assert given["device"] == device
