"""Files that a script has Keras and TensorFlow write and read: written once, and found by all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from mpitrain.errors import MismatchError
from mpitrain.scripts import keras_files
from mpitrain.scripts.delegation import delegate
from mpitrain.scripts.file_names import Names
from mpitrain.scripts.keras_files import WRITING_CALLBACKS, Files
from mpitrain.scripts.shared_files import SharedFiles
from mpitrain.world.world import World
from tests.unit.job import run

HOSTS = ["a", "a", "b"]
NO_FILES = {"load_img", "save_own_variables", "load_own_variables"}  # or each rank may read them


class Acted:
    """A function that notes who calls it, and files of one rank, with what is noted of them."""

    def __init__(self, world: World, training: bool = False) -> None:
        self.calls: list[Any] = []
        self.notes: list[str] = []
        shared: Any = None  # which only `install` needs
        self.names = Names(world.communicator)
        self.files = Files(
            world, lambda part, text: self.notes.append(f"{part}: {text}"), lambda: training, self.names, shared
        )

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args)
        return args[-1]


def test_what_is_written_is_written_by_rank_0() -> None:
    def rank(world: World) -> Any:
        acted = Acted(world)
        write = acted.files._writing("save", acted)
        assert write("model", "a.keras") == "a.keras", "scripts go on with the path"
        assert write("model", object()) is None, "what else comes back need not be fit to travel"
        assert acted.notes == ["files: save: written by rank 0"] * 2
        return len(acted.calls)

    assert run(3, rank, HOSTS) == [2, 0, 0]


def test_where_ranks_name_a_file_differently_each_name_is_written() -> None:
    def rank(world: World) -> int:
        acted = Acted(world)
        acted.files._writing("save", acted)(f"run {max(world.rank, 1)}.keras")
        return len(acted.calls)

    assert run(3, rank, HOSTS) == [1, 0, 1]


def test_within_a_fit_nobody_waits() -> None:
    """Ranks may stand at different batches, so only one of them comes here at all."""

    def rank(world: World) -> Any:
        acted = Acted(world, training=True)
        acted.names.compare([(f"run {max(world.rank, 1)}/best.keras",)])
        found = []
        if world.rank != 1:
            write = acted.files._writing("save", acted)
            found = [write("best.keras"), write("run 2/best.keras"), acted.files._reading("load", acted)("x")]
        return found

    # Rank 2 writes what it names by itself.
    assert run(3, rank, HOSTS) == [["best.keras", "run 2/best.keras", "x"], [], [None, "run 2/best.keras", "x"]]


@pytest.mark.parametrize("training", [True, False])
def test_moments_are_averaged_before_a_model_is_saved(training: bool) -> None:
    def rank(world: World) -> Any:
        model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization()])
        mean = model.layers[0].moving_mean
        mean.assign([float(world.rank)])
        acted = Acted(world, training)
        acted.files._writing_model("save", acted)(model, "a.keras")
        return len(acted.calls), float(mean.numpy()[0])

    assert run(2, rank) == [(1, 0.0 if training else 0.5), (0, 1.0 if training else 0.5)]


def test_figures_in_memory_are_each_rank_s_own(tmp_path: Path) -> None:
    def rank(world: World) -> Any:
        acted = Acted(world)
        draw = acted.files._drawing("savefig", acted)
        memory = object()
        assert draw("figure", memory) is memory
        draw("figure", tmp_path / "a.png")
        draw("figure", "a.png")
        return len(acted.calls)

    assert run(2, rank) == [3, 1]


def test_what_is_fetched_is_fetched_once_on_each_host() -> None:
    def rank(world: World) -> Any:
        acted = Acted(world)
        assert acted.files._fetching("get_file", acted)("data.npz") == "data.npz"
        assert acted.notes == ["files: get_file: by one rank of each host, rank 0 first"]
        apart = Acted(world, training=True)
        apart.files._fetching("get_file", apart)("data.npz")
        return len(acted.calls), len(apart.calls)

    assert run(3, rank, HOSTS) == [(1, 1), (0, 1), (1, 1)]


def test_nobody_reads_before_all_have_come() -> None:
    def rank(world: World) -> None:
        acted = Acted(world)
        assert acted.files._reading("load_model", acted)("a") == "a"
        with pytest.raises(MismatchError, match="to be read: load_weights"):
            acted.files._reading("load_weights" if world.rank else "load_model", acted)("a")

    run(2, rank)


def test_callbacks_write_where_their_file_is_theirs() -> None:
    def rank(world: World) -> list[str]:
        acted = Acted(world)
        shared, own = (keras.callbacks.CSVLogger(name) for name in ("all.csv", f"own {world.rank}.csv"))
        acted.names.compare([("all.csv",), (f"own {world.rank}.csv",)])
        write = acted.files._by_a_callback("on_epoch_end", acted)
        return [name for name, callback in (("shared", shared), ("own", own)) if write(callback, 3) == 3]

    assert run(3, rank) == [["shared", "own"], ["own"], ["own"]]


def test_a_directory_that_another_rank_has_made(tmp_path: Path) -> None:
    make = keras_files._making("makedirs", lambda path: Path(path).mkdir())
    make(tmp_path / "new")
    make(tmp_path / "new")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make(tmp_path / "file")


def test_a_manager_that_has_written_nothing_finds_what_another_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = tf.Variable(1.0)
    writer, reader = (
        tf.train.CheckpointManager(tf.train.Checkpoint(v=variable), str(tmp_path), max_to_keep=2) for _ in range(2)
    )
    assert (keras_files._checkpoints(reader), keras_files._latest_checkpoint(reader)) == ([], None)
    paths = [writer.save() for _ in range(3)][1:]
    assert reader.checkpoints == [], "of itself it does not"
    assert keras_files._checkpoints(reader) == paths
    assert keras_files._latest_checkpoint(reader) == paths[-1]
    variable.assign(5.0)
    writer.save()
    variable.assign(0.0)
    look = keras_files._looking_first("restore_or_initialize", tf.train.CheckpointManager.restore_or_initialize)
    assert look(reader) == writer.latest_checkpoint
    assert float(variable) == 5.0
    monkeypatch.setattr(
        tf.train.CheckpointManager, "checkpoints", keras_files._unless_acting("checkpoints", keras_files._checkpoints)
    )
    assert len(reader.checkpoints) == 2
    assert run(1, lambda world: delegate(world, "save", lambda: reader.checkpoints)) == [[]], "while it writes itself"


@pytest.mark.parametrize("root", [0, 1])
def test_all_that_writes_and_reads_is_patched(root: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Keras has of such names, where scripts find it, and its callbacks that write."""
    replaced: dict[int, set[Any]] = {}

    class Noted(Files):
        def _replace(self, owner: Any, name: str, make: Any) -> None:
            assert callable(getattr(owner, name)), "a new Keras or TensorFlow names it otherwise"
            replaced.setdefault(self._world.rank, set()).add((owner, name))

        def _replace_downloads(self) -> None:
            self._replace(keras.utils, "get_file", None)

    for name in ("checkpoints", "latest_checkpoint"):
        monkeypatch.setattr(tf.train.CheckpointManager, name, vars(tf.train.CheckpointManager)[name])
    monkeypatch.setattr(tf.summary, "create_file_writer", tf.summary.create_file_writer)

    def rank(world: World) -> None:
        shared: Any = SharedFiles.__new__(SharedFiles)
        shared.install_of_tensorflow = lambda gfile: None
        Noted(world, lambda part, text: None, lambda: False, Names(world.communicator), shared).install()

    run(2, rank)
    found = replaced[root]
    for place in (keras.models, keras.saving, keras.utils, tf.keras.models, tf.keras.utils, keras.Model):
        names = [
            name for name in vars(place) if name.startswith(("save", "load", "plot")) and "own_variables" not in name
        ]
        names = [name for name in names if name not in ("load_img", "save_own_variables", "load_own_variables")]
        assert {name for owner, name in found if owner is place} >= set(names), place
    kinds = {owner for owner, _ in found if isinstance(owner, type) and issubclass(owner, keras.callbacks.Callback)}
    assert kinds == ({getattr(keras.callbacks, name, None) for name in WRITING_CALLBACKS} - {None} if root else set())
