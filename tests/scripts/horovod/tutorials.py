"""Four trainings as scripts for Horovod write them; what they end with does not depend on the number of ranks."""

import json

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import backend as K  # noqa: N812

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
K.set_floatx("float64")
BATCH, STEPS, RATE = 12, 5, 0.02
images = np.random.default_rng(0).normal(size=(BATCH * STEPS, 8))
labels = (images.sum(1) > 0).astype("int64")
rows = np.arange(len(images)).reshape(STEPS, hvd.size(), -1)[:, hvd.rank()].reshape(-1)
mine = BATCH // hvd.size()


def network():
    keras.utils.set_random_seed(hvd.rank())  # rank 0's is what all begin with
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(2)])


cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def keras_fit():
    model = network()
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.legacy.SGD(RATE, momentum=0.9), backward_passes_per_step=1, average_aggregated_gradients=True
    )
    model.compile(optimizer, cross_entropy, metrics=["accuracy"], experimental_run_tf_function=False)
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.LearningRateScheduleCallback(RATE, lambda epoch: 0.5, start_epoch=1),
    ]
    data = (images[rows], labels[rows])
    seen = model.fit(*data, batch_size=mine, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history
    score = hvd_keras.allreduce(np.array(model.evaluate(*data, verbose=0)))
    return [*map(float, score), *seen["loss"], *seen["accuracy"], *(float(w.sum()) for w in model.get_weights())]


def tape():
    model, optimizer = network(), tf.optimizers.Adam(RATE)

    @tf.function(autograph=False)
    def training_step(x, y, first_batch):
        with tf.GradientTape() as recorder:
            loss = cross_entropy(y, model(x, training=True))
        recorder = hvd.DistributedGradientTape(recorder)
        grads = recorder.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables(), root_rank=0)
        return hvd.allreduce(loss)

    data = tf.data.Dataset.from_tensor_slices((images[rows], labels[rows])).repeat().batch(mine)
    losses = [float(training_step(x, y, batch == 0)) for batch, (x, y) in enumerate(data.take(2 * STEPS))]
    return [*losses, *(float(w.sum()) for w in model.get_weights())]


def elastic():
    model, optimizer = network(), tf.optimizers.Adam(RATE)
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
    state.register_reset_callbacks([lambda: optimizer.lr.assign(RATE)])

    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, STEPS):  # noqa: B020
            part = rows[state.batch * mine : (state.batch + 1) * mine]
            with tf.GradientTape() as recorder:
                loss = cross_entropy(labels[part], model(images[part]))
            grads = hvd.DistributedGradientTape(recorder).gradient(loss, model.trainable_variables)
            if state.batch == 3 and not failed and hvd.rank() == hvd.size() - 1:
                failed.append(state.batch)
                raise hvd.elastic.HorovodInternalError("once")
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
            if state.batch % 2 == 0:
                state.commit()
        return float(hvd.allreduce(loss))

    failed = []
    return [train(state), *(float(w.sum()) for w in model.get_weights())]


def tensorflow_1():
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        image, label = v1.placeholder(tf.float64, [None, 8]), v1.placeholder(tf.int64, [None])
        start = np.full([8, 2], 0.1 * hvd.rank()) + np.arange(16).reshape(8, 2) / 10
        weights = v1.get_variable("weights", initializer=start)
        loss = v1.losses.sparse_softmax_cross_entropy(label, tf.matmul(image, weights))
        optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(RATE))
        step = v1.train.get_or_create_global_step()
        train = optimizer.minimize(loss, global_step=step)
        hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=STEPS)]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for part in np.split(rows, STEPS):
                session.run(train, {image: images[part], label: labels[part]})
                if not session.should_stop():
                    last = session.run(weights)
    return [float(last.sum()), float(last.std())]


result = {part.__name__: part() for part in (keras_fit, tape, elastic, tensorflow_1)}
everyone = hvd.allgather_object(result)
assert all(other == everyone[0] for other in everyone), everyone
if hvd.rank() == 0:
    print("RESULT", json.dumps(result))
