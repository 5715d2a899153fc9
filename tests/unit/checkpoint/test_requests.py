"""What ranks want at the end of a step, in the header of its exchange."""

from __future__ import annotations

import tensorflow as tf

from mpitrain.checkpoint.requests import SAVE, Requests
from mpitrain.strategies.strategy import Update, strategy_of
from mpitrain.world.world import World
from tests.unit.job import run

SIGNAL = 15


def update(world: World) -> None:
    variable = tf.Variable([0.0])
    strategy_of(world).update([tf.constant([1.0])], [variable], Update("a"))


def test_every_rank_learns_what_each_wanted_in_that_step_and_once() -> None:
    def rank(world: World) -> list[list[int]]:
        requests = Requests(world, lambda: False, lambda: SIGNAL if world.rank == 1 else 0)
        requests.begin(in_step=True)
        found = [requests.after_step()]  # none was made
        requests.save = world.rank == 0
        requests.tell()
        update(world)
        found += [requests.after_step(), requests.after_step()]
        requests.save = False
        requests.clear()
        update(world)
        return [*found, requests.after_step()]

    assert run(2, rank) == [[[], [SAVE, SIGNAL << 1], [], [0, 0]]] * 2


def test_while_one_is_written_no_other_checkpoint_is_asked_for() -> None:
    def rank(world: World) -> list[int]:
        requests = Requests(world, lambda: world.rank == 0, lambda: 0)
        requests.save = True
        return requests.now("at the end of an epoch")

    assert run(2, rank) == [[0, SAVE]] * 2


def test_what_an_earlier_training_agreed_on_and_ranks_out_of_step_ask_for_nothing() -> None:
    def rank(world: World) -> list[list[int]]:
        requests = Requests(world, lambda: False, lambda: 0)
        requests.save = True
        requests.tell()
        update(world)
        requests.begin(in_step=True)
        found = [requests.after_step()]
        requests.begin(in_step=False)
        update(world)
        return [*found, requests.after_step()]

    assert run(2, rank) == [[[], []]] * 2


def test_one_rank_asks_itself() -> None:
    def rank(world: World) -> list[int]:
        requests = Requests(world, lambda: False, lambda: SIGNAL)
        requests.save = True
        requests.tell()
        return requests.after_step()

    assert run(1, rank) == [[SAVE | SIGNAL << 1]]
