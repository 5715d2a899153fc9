"""The models that are measured."""

from __future__ import annotations

import pytest

from mpitrain.bench.workload import MODELS, PARAMETERS, workload


@pytest.mark.parametrize("name", MODELS)
def test_the_models_have_their_parameters(name: str) -> None:
    assert workload(name, 1, 0).model.count_params() == PARAMETERS[name]
