"""How TensorFlow and Keras are loaded: the same modules, some of them later, and garbage is collected afterwards."""

from __future__ import annotations

import gc
import os
from types import ModuleType

import pytest

from mpitrain.runtime import streams
from mpitrain.runtime.imports import when_used, without_collection, without_first_lines
from tests.unit.fresh import printed


def test_keras_is_whole_and_what_few_use_comes_when_it_is_used() -> None:
    code = """
import gc, inspect, sys
from mpitrain.runtime import imports
imports.install()
imports.install()
assert sum(isinstance(finder, imports.Finder) for finder in sys.meta_path) == 1
import tensorflow as tf, keras
assert gc.isenabled()
inspect.getmodule(gc.collect)  # looks at every module
assert not {"sklearn", "matplotlib"} & set(sys.modules)
from keras.wrappers import SKLearnClassifier
from sklearn.base import ClassifierMixin
assert issubclass(SKLearnClassifier, ClassifierMixin)
assert keras.wrappers.SKLearnClassifier is tf.keras.wrappers.SKLearnClassifier is SKLearnClassifier
assert "matplotlib" not in sys.modules
assert "plot_image_gallery" in dir(keras.visualization)
assert not hasattr(keras.visualization, "plot_sounds")
exec("from keras.src.wrappers import *")
assert SKLearnTransformer is keras.wrappers.SKLearnTransformer
print("whole")
"""
    assert printed(code) == "whole\n"


def test_a_module_is_executed_once_and_again_if_it_failed() -> None:
    module, runs = ModuleType("late"), []

    def execute(executed: ModuleType) -> None:
        runs.append(executed)
        assert not hasattr(executed, "answer")  # asked for while it is executed
        if len(runs) == 1:
            raise ImportError("not there yet")
        vars(executed)["answer"] = 42

    when_used(execute)(module)
    assert not hasattr(module, "__file__")
    assert runs == []
    with pytest.raises(ImportError, match="not there yet"):
        _ = module.answer
    assert module.answer == 42
    assert "answer" in dir(module)
    with pytest.raises(AttributeError, match="module 'late' has no attribute 'question'"):
        _ = module.question
    assert len(runs) == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_it_was_after_a_failure(enabled: bool) -> None:
    seen = []

    def execute(module: ModuleType) -> None:
        seen.append(gc.isenabled())
        raise ImportError

    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ImportError):
            without_collection(execute)(ModuleType("any"))
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        gc.enable()


def test_first_lines_come_to_nothing_and_all_others_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def execute(module: ModuleType) -> None:
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called\n")
        os.write(2, b"I0000 00:00:1.2 3 port.cc:153] oneDNN custom operations are on. To turn them off, ...\n")
        os.write(2, b"E0000 00:00:1.2 3 gpu.cc:1] no driver\nhalf a line")
        os.write(streams.terminal(), b"seen at once\n")
        raise ImportError(module.__name__)

    with pytest.raises(ImportError, match="large"):
        without_first_lines(execute)(ModuleType("large"))
    assert streams.terminal() == 2
    assert capfd.readouterr().err == "seen at once\nE0000 00:00:1.2 3 gpu.cc:1] no driver\nhalf a line"
