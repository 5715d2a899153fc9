"""Losses that divide by something else than rows: N ranks with rows of one batch are one rank with that batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain
from mpitrain.training.callbacks import DataParallel
from mpitrain.training.model_hook import train_on_rows
from mpitrain.training.step_collectives import StepCollectives
from tests.spmd.truth import WORLD, check_history, check_same

pytestmark = pytest.mark.usefixtures("double_precision")
two_ranks = pytest.mark.ranks(2)
several = pytest.mark.skipif(WORLD.size == 1, reason="there is nobody to differ from")
FEATURES, STEPS, CLASSES = 4, 3, 5
SIZES = (7, 4)  # rows of the batches of all ranks
REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight", None)
Batch = tuple[Any, ...]


def values(random: Any, n: int) -> Any:
    return random.uniform(0.1, 2.0, (n, CLASSES))


def signs(random: Any, n: int) -> Any:
    return random.choice([-1.0, 1.0], (n, CLASSES))


def bits(random: Any, n: int) -> Any:
    return random.integers(0, 2, (n, CLASSES)).astype("float64")


def distributions(random: Any, n: int) -> Any:
    return random.dirichlet(np.ones(CLASSES), n)


def classes(random: Any, n: int) -> Any:
    return random.integers(0, CLASSES, n)


def one_hot(random: Any, n: int) -> Any:
    return np.eye(CLASSES)[classes(random, n)]


def sequences(random: Any, n: int) -> Any:
    return random.integers(1, CLASSES, (n, 2))


# Of each loss of Keras: its labels, and the activation of its output. A new one has to be added here.
LOSSES: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "BinaryCrossentropy": (bits, "sigmoid"),
    "BinaryFocalCrossentropy": (bits, "sigmoid"),
    "CTC": (sequences, "softmax"),
    "CategoricalCrossentropy": (one_hot, "softmax"),
    "CategoricalFocalCrossentropy": (one_hot, "softmax"),
    "CategoricalGeneralizedCrossEntropy": (classes, "softmax"),
    "CategoricalHinge": (one_hot, "linear"),
    "Circle": (classes, "tanh"),
    "CosineSimilarity": (values, "linear"),
    "Dice": (bits, "sigmoid"),
    "Hinge": (signs, "linear"),
    "Huber": (values, "linear"),
    "KLDivergence": (distributions, "softmax"),
    "LogCosh": (values, "linear"),
    "MeanAbsoluteError": (values, "linear"),
    "MeanAbsolutePercentageError": (values, "linear"),
    "MeanSquaredError": (values, "linear"),
    "MeanSquaredLogarithmicError": (values, "softplus"),
    "Poisson": (values, "softplus"),
    "SparseCategoricalCrossentropy": (classes, "softmax"),
    "SquaredHinge": (signs, "linear"),
    "Tversky": (bits, "sigmoid"),
}


class Batches(keras.utils.PyDataset):
    """Batches of any sizes."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        super().__init__()
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index]


def own_rows(batches: Sequence[Batch]) -> list[Batch]:
    """Those of this rank."""
    return [keras.tree.map_structure(lambda leaf: leaf[WORLD.rank :: WORLD.size], batch) for batch in batches]


def check_fit(
    maker: Callable[[], Any],
    batches: Sequence[Batch],
    loss_is: Any = "whole",
    tolerance: float = 1e-12,
    own: Sequence[Batch] | None = None,
    **options: Any,
) -> Any:
    """Train and evaluate on this rank's rows, and locally on whole batches; compare all numbers and weights."""
    model, reference = maker(), maker()
    parallel = DataParallel(loss_is=loss_is, **options)
    own = own_rows(batches) if own is None else own
    data, whole = Batches(own), Batches(batches)
    history = model.fit(data, shuffle=False, verbose=0, callbacks=[parallel], validation_data=data).history
    expected = reference.fit(whole, shuffle=False, verbose=0, validation_data=whole).history
    check_history(history, expected, tolerance)
    check_same(model, reference, tolerance)
    return model


def test_every_loss_of_keras_is_here() -> None:
    found = {name for name, thing in vars(keras.losses).items() if inspect.isclass(thing)}
    assert found - {"Loss"} == set(LOSSES)


def outputs_of(names: Sequence[str], reductions: Sequence[Any], weights: bool = True) -> tuple[Any, list[Batch]]:
    """A maker of models with one output for each loss, each with weights of its own; and batches."""

    def maker(**options: Any) -> Any:
        keras.utils.set_random_seed(3)
        inputs = keras.Input((FEATURES,), dtype="float64")
        outputs, losses = {}, {}
        for name, reduction in zip(names, reductions, strict=True):
            head = keras.layers.Dense(CLASSES, activation=LOSSES[name][1], name=f"head_{name}")
            outputs[name] = head(inputs)
            if name == "CTC":
                outputs[name] = keras.layers.Dense(STEPS * CLASSES, name=name)(inputs)
                outputs[name] = keras.layers.Reshape((STEPS, CLASSES))(outputs[name])
            if name == "Circle":
                outputs[name] = keras.layers.UnitNormalization()(outputs[name])
            arguments = {"q": 0.7} if name == "CategoricalGeneralizedCrossEntropy" else {}
            arguments |= {"gamma": 2.0} if name == "Circle" else {}
            losses[name] = getattr(keras.losses, name)(reduction=reduction, **arguments)
        model = keras.Model(inputs, outputs)
        loss_weights = {name: 0.5 + 0.1 * number for number, name in enumerate(names)}
        model.compile(keras.optimizers.SGD(0.01), losses, loss_weights=loss_weights, jit_compile=False, **options)
        return model

    random = np.random.default_rng(5)
    batches: list[Batch] = []
    for n in SIZES:
        labels = {name: LOSSES[name][0](random, n) for name in names}
        batch: Batch = (random.normal(size=(n, FEATURES)), labels)
        if weights:
            batch += ({name: random.choice([0.0, 0.5, 1.0, 3.0], n) for name in names},)
        batches.append(batch)
    return maker, batches


@pytest.mark.parametrize(
    "reduction", [one if one == "sum" else pytest.param(one, marks=two_ranks) for one in REDUCTIONS]
)
def test_every_loss_with_every_reduction(reduction: Any) -> None:
    names = [name for name in LOSSES if name != "CTC"]
    maker, batches = outputs_of(names, [reduction] * len(names))
    check_fit(lambda: maker(run_eagerly=True), batches)


@two_ranks
@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_ctc(reduction: Any) -> None:
    maker, batches = outputs_of(["CTC"], [reduction])
    check_fit(maker, batches, tolerance=1e-6)  # TensorFlow computes it in single precision


@two_ranks
@pytest.mark.parametrize("name", ["Dice", "MeanSquaredError", "Circle"])
def test_one_output_without_reduction(name: str) -> None:
    maker, batches = outputs_of([name], [None], weights=name != "Dice")
    check_fit(lambda: maker(run_eagerly=True), batches)


@two_ranks
@pytest.mark.parametrize(
    "kinds",
    [
        {"MeanSquaredError": "sum", "Dice": "sum", "Huber": "mean_with_sample_weight", "Circle": "mean"},
        {"MeanSquaredError": None, "Huber": "sum"},
    ],
    ids=len,
)
def test_outputs_with_different_denominators_in_a_graph(kinds: dict[str, Any]) -> None:
    maker, batches = outputs_of([*kinds], [*kinds.values()])
    check_fit(maker, batches)


def masked(optimizer: Any = None, layer: Any = None, loss: Any = None, **options: Any) -> Any:
    """A model of sequences, of which only steps that are not 0 count."""
    keras.utils.set_random_seed(4)
    inputs = keras.Input((STEPS, FEATURES), dtype="float64")
    hidden = keras.layers.Masking(dtype="float64")(inputs)
    hidden = keras.layers.Dense(3, activation="tanh", dtype="float64", activity_regularizer="l2")(hidden)
    hidden = hidden if layer is None else layer()(hidden)
    outputs = keras.layers.Dense(2, dtype="float64", kernel_regularizer=keras.regularizers.L2(0.1))(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer or keras.optimizers.SGD(0.1), loss or "mse", metrics=["mae"], **{"jit_compile": False, **options}
    )
    return model


def padded(weighted: bool = False, sizes: Sequence[int] = SIZES) -> list[Batch]:
    """Sequences of lengths that follow from the row, so that ranks have very different numbers of steps."""
    random = np.random.default_rng(6)
    found: list[Batch] = []
    for n in sizes:
        x = random.normal(size=(n, STEPS, FEATURES))
        x[::2, 1:] = 0.0
        batch: Batch = (x, random.normal(size=(n, STEPS, 2)))
        found.append((*batch, random.choice([0.0, 1.0, 2.0], (n, STEPS))) if weighted else batch)
    return found


@pytest.mark.parametrize("loss", ["mse", pytest.param("dice", marks=two_ranks)])
def test_masks_count_what_they_leave(loss: str) -> None:
    check_fit(lambda: masked(loss=loss if loss == "mse" else keras.losses.Dice()), padded())


@two_ranks
@pytest.mark.parametrize(
    "way",
    [
        {"loss": keras.losses.Huber(reduction="mean_with_sample_weight", dtype="float64")},
        {"loss": keras.losses.Huber(reduction="sum", dtype="float64")},
        {"run_eagerly": True},
        {"steps_per_execution": 2},
        {"jit_compile": True},  # a step that cannot be compiled as it is
    ],
    ids=lambda way: next(iter(way)),
)
def test_masks_with_weights_and_in_other_ways(way: dict[str, Any]) -> None:
    check_fit(lambda: masked(**way), padded(weighted=True), "mean")


@several
@two_ranks
def test_a_rank_out_of_data_takes_part_in_the_denominators() -> None:
    batches = padded(sizes=(6, 6, 3))
    own = own_rows(batches[:2])
    if WORLD.rank == 0:
        own.append(batches[2])
    check_fit(masked, batches, "mean", own=own)


@two_ranks
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_accumulated_gradients(reduction: str) -> None:
    def maker() -> Any:
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        return masked(optimizer, loss=keras.losses.MeanSquaredError(reduction=reduction))

    check_fit(maker, padded(sizes=(6, 6, 6, 6)))


def plain(loss: Any, kind: Any = keras.Model, layers: Sequence[Any] = (), **options: Any) -> Any:
    """A model of rows."""
    keras.utils.set_random_seed(4)
    inputs = hidden = keras.Input((FEATURES,), dtype="float64")
    for layer in (keras.layers.Dense(3, activation="tanh", dtype="float64"), *layers):
        hidden = layer(hidden)
    model = kind(inputs, keras.layers.Dense(2, dtype="float64")(hidden))
    model.compile(keras.optimizers.SGD(0.05), loss, **{"jit_compile": False, **options})
    return model


def rows(sizes: Sequence[int] = SIZES) -> list[Batch]:
    random = np.random.default_rng(7)
    return [(random.normal(3.0, 1.0, (n, FEATURES)), random.normal(size=(n, 2))) for n in sizes]


@several
def test_the_scale_of_a_loss_is_that_of_one_process() -> None:
    """Gradients of half precision overflow until the scale is small enough; such steps are skipped."""

    def maker() -> Any:
        inputs = keras.Input((FEATURES,), dtype="float32")
        outputs = keras.layers.Dense(1, kernel_initializer="zeros", dtype="mixed_float16")(inputs)
        model = keras.Model(inputs, outputs)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3), dynamic_growth_steps=4)
        model.compile(optimizer, "mse", jit_compile=False)
        return model

    random = np.random.default_rng(8)
    n = 4 * WORLD.size
    batches = [(random.uniform(0.5, 1.0, (n, FEATURES)).astype("float32"), np.full((n, 1), 100.0))] * 12
    model, reference = maker(), maker()
    for one, data, callbacks in ((model, own_rows(batches), [DataParallel()]), (reference, batches, [])):
        one.fit(Batches(data), shuffle=False, verbose=0, callbacks=callbacks)
    check_same(model, reference, 1e-2)
    found, expected = model.optimizer, reference.optimizer
    assert int(found.iterations) == int(expected.iterations) < 12
    assert float(found.dynamic_scale) == float(expected.dynamic_scale)


def sum_of_batch(y: Any, p: Any) -> Any:
    return tf.reduce_sum((y - p) ** 2) / 16


def neighbours(y: Any, p: Any) -> Any:
    """It depends on the order of the rows."""
    return tf.reduce_mean((p[1:] - y[:-1]) ** 2)


def positive_only(y: Any, p: Any) -> Any:
    """As many numbers as there are positive labels."""
    return tf.boolean_mask((y - p) ** 2, y > 0)


def of_losses(y: Any, p: Any) -> Any:
    return keras.losses.MeanSquaredError(reduction="sum")(y, p) + keras.losses.Dice()(y, tf.sigmoid(p))


@pytest.mark.parametrize(
    "loss",
    [
        sum_of_batch,
        *[pytest.param(one, marks=two_ranks) for one in (neighbours, positive_only, of_losses)],
    ],
)
def test_own_losses_of_the_whole_batch(loss: Any) -> None:
    check_fit(lambda: plain(loss), rows())


def similarities(y: Any, p: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(tf.range(tf.shape(p)[0]), p @ tf.transpose(y), True)


def of_noise(y: Any, p: Any) -> Any:
    return tf.reduce_sum((y - p + tf.random.normal(tf.shape(p), dtype=p.dtype)) ** 2, axis=-1)


def of_rows(y: Any, p: Any) -> Any:
    return tf.reduce_sum(tf.abs(y - p), axis=-1)


@two_ranks
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("loss", [similarities, of_noise, of_rows])
def test_rows_that_depend_on_others_are_told(loss: Any, run_eagerly: bool, capfd: pytest.CaptureFixture[str]) -> None:
    model = plain(loss, run_eagerly=run_eagerly)
    model.fit(Batches(own_rows(rows())), verbose=0, callbacks=[DataParallel()])
    told = capfd.readouterr().err.count(f"the loss {loss.__name__} gives a number for each row that depends on")
    assert told == (loss is similarities and WORLD.rank == 0)


@two_ranks
def test_a_loss_that_counts_is_computed_once_a_step() -> None:
    calls = tf.Variable(0.0, dtype=tf.float64)

    def annealed(y: Any, p: Any) -> Any:
        calls.assign_add(1.0)
        return tf.reduce_sum((y - p) ** 2, axis=-1) * tf.cast(calls, p.dtype)

    batches = Batches(own_rows(rows()))
    plain(annealed).fit(batches, verbose=0, callbacks=[DataParallel()])
    assert float(calls.numpy()) == len(batches)


def test_own_metrics_of_the_whole_batch() -> None:
    def explained(y: Any, p: Any) -> Any:
        return 1 - tf.reduce_sum((y - p) ** 2) / tf.reduce_sum((y - tf.reduce_mean(y, axis=0)) ** 2)

    check_fit(lambda: plain("mse", metrics=[explained, "mae"]), rows())


class Adds(keras.layers.Layer):
    """Its loss is a sum over the batch."""

    def call(self, x: Any) -> Any:
        self.add_loss(tf.reduce_sum(x**2) / 16)
        return x


class OwnStep(keras.Model):
    """Computes its loss itself."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = sum_of_batch(y, self(x, training=True))
            loss += keras.losses.MeanSquaredError()(y, self(x)) + keras.losses.Huber(reduction="sum")(y, self(x))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"rows": tf.shape(x)[0]}


@two_ranks
@pytest.mark.parametrize(("kind", "layers"), [(keras.Model, [Adds]), (OwnStep, [])])
def test_sums_of_the_script(kind: Any, layers: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    def maker() -> Any:
        return plain("mse", kind, [layer(dtype="float64", name="adds") for layer in layers])

    model, reference = maker(), maker()
    model.fit(Batches(own_rows(rows())), shuffle=False, verbose=0, callbacks=[DataParallel(loss_is="sum")])
    reference.fit(Batches(rows()), shuffle=False, verbose=0)
    check_same(model, reference)
    assert "--loss-is" not in capfd.readouterr().err
    maker().fit(Batches(own_rows(rows())), verbose=0, callbacks=[DataParallel(loss_is="whole")])
    said = capfd.readouterr().err
    assert said.count("give --loss-is sum") == (WORLD.rank == 0), said


@two_ranks
@pytest.mark.parametrize("loss_is", ["mean", "whole"])
def test_a_mean_over_rows_needs_nothing_more(loss_is: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*arguments: Any) -> None:
        raise AssertionError("ranks tell each other something in a step")

    monkeypatch.setattr(StepCollectives, "_call", called)
    check_fit(lambda: plain(keras.losses.Huber(dtype="float64"), metrics=["mae"]), rows(), loss_is)


@two_ranks
@pytest.mark.parametrize("loss", ["sum", "whole"])
def test_single_batches(loss: str) -> None:
    """As `Model.train_on_batch` gives them, on rows of each rank."""
    reduced = keras.losses.MeanSquaredError(reduction="sum") if loss == "sum" else sum_of_batch
    model, reference = (plain(reduced, layers=[NORMALIZING["plain"]()]) for _ in range(2))
    for (x, y), (own_x, own_y) in zip(rows(), own_rows(rows()), strict=True):
        found = train_on_rows(model, keras.Model.train_on_batch, {"x": own_x, "y": own_y}, WORLD, "whole", True)
        np.testing.assert_allclose(found, reference.train_on_batch(x, y), rtol=1e-12)
    check_same(model, reference)


@two_ranks
def test_evaluation_of_one_rank_after_training() -> None:
    """What was traced while all ranks took part is run by one of them."""
    model = masked()
    data = Batches(own_rows(padded()))
    model.fit(data, verbose=0, callbacks=[DataParallel()], validation_data=data)
    if WORLD.rank == 0:
        x, y = padded()[0]
        found = model.evaluate(x, y, batch_size=len(x), verbose=0)
        assert found[0] == pytest.approx(float(model.compute_loss(y=y, y_pred=model(x))), rel=1e-12)
    mpitrain.barrier()


@pytest.mark.parametrize(
    "way", ["context", pytest.param("optimizer", marks=two_ranks), pytest.param("tape", marks=two_ranks)]
)
@pytest.mark.parametrize("in_graph", [False, pytest.param(True, marks=two_ranks)])
def test_gradients_are_added_up(way: str, in_graph: bool) -> None:
    def trained(batches: list[Batch], distributed: bool) -> Any:
        variable = tf.Variable(np.ones((FEATURES, 2)))
        optimizer = keras.optimizers.SGD(0.01, clipnorm=0.5)
        if distributed and way != "tape":
            mpitrain.DistributedOptimizer(optimizer, loss_is="sum" if way == "optimizer" else "mean")

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = sum_of_batch(y, x @ variable)
            if distributed and way == "tape":
                tape = mpitrain.DistributedGradientTape(tape, loss_is="sum")
            optimizer.apply([tape.gradient(loss, variable)], [variable])

        step = tf.function(step, reduce_retracing=True) if in_graph else step
        for x, y in batches:
            with mpitrain.sample_count(len(x), "sum" if way == "context" else None):
                step(tf.constant(x), tf.constant(y))
        return variable.numpy()

    np.testing.assert_allclose(trained(own_rows(rows()), True), trained(rows(), False), rtol=1e-12)


class Counts(keras.layers.Layer):
    """Counts steps, as every rank does, and what is each rank's."""

    def build(self, shape: Any) -> None:
        for name, dtype in {"steps": "int64", "rows": "int64", "total": "float64"}.items():
            setattr(self, name, self.add_weight(initializer="zeros", trainable=False, dtype=dtype, name=name))

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps.assign_add(1)
            self.rows.assign_add(tf.shape(x, tf.int64)[0])
            self.total.assign_add(tf.reduce_sum(x))
        return x


@two_ranks
def test_what_layers_count_is_told_where_ranks_differ(capfd: pytest.CaptureFixture[str]) -> None:
    model = plain("mse", layers=[Counts(dtype="float64", name="counts")])
    model.fit(Batches(own_rows(rows())), epochs=2, verbose=0, callbacks=[DataParallel()], validation_data=rows()[0])
    layer = model.layers[2]
    assert int(layer.steps) == 4
    assert int(layer.rows) == 2 * sum(len(x) for x, _ in own_rows(rows()))
    assert mpitrain.all_gather_obj(float(layer.total)) == [float(layer.total)] * WORLD.size
    said = capfd.readouterr().err
    assert said.count("came out otherwise on each rank") == (WORLD.rank == 0 and WORLD.size > 1), said
    assert ("counts/rows, " in said and "counts/total" in said) == ("came out" in said)
    assert "counts/steps" not in said


NORMALIZING: dict[str, Callable[[], Any]] = {
    "plain": lambda: keras.layers.BatchNormalization(momentum=0.5, dtype="float64"),
    "renorm": lambda: keras.layers.BatchNormalization(momentum=0.5, dtype="float64", renorm=True),
    "axis": lambda: keras.layers.BatchNormalization(axis=1, momentum=0.5, dtype="float64"),
    "synchronized": lambda: keras.layers.BatchNormalization(synchronized=True, momentum=0.5, dtype="float64"),
}


@pytest.mark.parametrize(
    "kind", [kind if kind == "plain" else pytest.param(kind, marks=two_ranks) for kind in NORMALIZING]
)
def test_batch_normalization_over_all_ranks(kind: str) -> None:
    model = check_fit(
        lambda: plain("mse", layers=[NORMALIZING[kind]()]), rows(), sync_batch_norm=kind != "synchronized"
    )
    assert type(model.layers[2]) is keras.layers.BatchNormalization


@two_ranks
def test_masked_batch_normalization_over_all_ranks() -> None:
    check_fit(lambda: masked(layer=NORMALIZING["plain"]), padded(), sync_batch_norm=True)


@several
@two_ranks
@pytest.mark.parametrize("way", [{}, {"jit_compile": True}], ids=str)
def test_batch_normalization_where_a_rank_is_out_of_data(way: dict[str, Any]) -> None:
    batches = rows((6, 6, 3))
    own = own_rows(batches[:2])
    if WORLD.rank == 1:
        own.append(batches[2])
    model, reference = (plain("mse", layers=[NORMALIZING["plain"]()], **way) for _ in range(2))
    model.fit(Batches(own), shuffle=False, verbose=0, callbacks=[DataParallel(sync_batch_norm=True)])
    reference.fit(Batches(batches), shuffle=False, verbose=0)
    check_same(model, reference, 1e-11)
