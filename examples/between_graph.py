"""Between-graph replication: each worker builds its own graph around the variables that a server holds.

    mpirun -np 3 python examples/between_graph.py

Rank 0 is the server, the others are workers. They train twice: synchronously, with the same numbers as one process that
has all samples, and asynchronously, where each gradient is applied when it comes.
"""

import mpitrain

world = mpitrain.init()  # before TensorFlow looks at the machine

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

v1 = tf.compat.v1
LEARNING_RATE = 0.1


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Points on a plane."""
    points = np.random.default_rng(1).normal(size=(64, 3))
    return points, points @ [1.0, -2.0, 3.0]


def train(server: mpitrain.cluster.Server, synchronous: bool) -> np.ndarray:
    workers, number = len(server.cluster.jobs["worker"]), server.task.index
    x, y = (part[number::workers] for part in samples())  # this worker's samples, as many as of any other
    mode, steps = ("synchronous", 20) if synchronous else ("asynchronous", 200)
    # Variables on the server, the rest on this worker.
    place = mpitrain.placement.device_setter(server.cluster.jobs, compute=server.task.device)
    with tf.Graph().as_default(), v1.device(place):
        weights = v1.get_variable(f"weights_{mode}", [3], tf.float64, v1.zeros_initializer(), use_resource=True)
        step = v1.get_variable(f"step_{mode}", [], tf.int64, v1.zeros_initializer(), use_resource=True)
        loss = tf.reduce_mean((tf.linalg.matvec(tf.constant(x), weights) - y) ** 2)
        (gradient,) = tf.gradients(loss, [weights])
        with v1.device("/job:ps/task:0"):  # shared by all workers, because they have the same names
            sums = v1.ConditionalAccumulator(tf.float64, [3], shared_name="sums")
            turns = [tf.queue.FIFOQueue(1, tf.int64, [], shared_name=f"{mode}_{one}") for one in range(workers)]
            go = tf.group([turn.enqueue(tf.constant(0, tf.int64)) for turn in turns])
            update = weights.assign_sub(LEARNING_RATE * sums.take_grad(workers))  # waits for one of each worker
            with tf.control_dependencies([update]):
                count = step.assign_add(1)
        push = sums.apply_grad(gradient, local_step=step)
        alone = weights.assign_sub(LEARNING_RATE * gradient)
        my_turn = turns[number].dequeue()
        is_chief = number == 0
        with v1.Session(server.target) as session:
            if is_chief:
                session.run(v1.global_variables_initializer())
                session.run(go)
            session.run(my_turn)
            for _ in range(steps):
                if not synchronous:
                    session.run(alone)
                    continue
                session.run(push)
                if is_chief:
                    session.run(count)
                    session.run(go)
                session.run(my_turn)
            return session.run(weights)


def main() -> None:
    server = mpitrain.cluster.start_server("ps=1,worker")
    if server.task.job == "worker":
        for synchronous in (True, False):
            weights = train(server, synchronous)
            print(f"{server.task.device}: {weights.tolist()}", flush=True)
    # A server that comes to its end here goes on serving until all ranks have come to theirs.


if __name__ == "__main__":
    main()
