"""Which samples of an epoch are left when workers are lost that each take their steps at their own pace."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.data.sharding import EpochOrder, Indices
from mpitrain.trainer.remaining_samples import RemainingSamples

EPOCHS = 4


@given(st.integers(5, 60), st.integers(2, 5), st.integers(1, 7), st.integers(0, 1000))
def test_each_sample_is_seen_once_in_every_epoch_whoever_is_lost(
    samples: int, workers: int, batch_size: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    order = EpochOrder(np.arange(samples), seed)
    numbers, done = list(range(1, workers + 1)), Counter[int]({1: 7})  # 7 of an earlier training
    remaining = RemainingSamples(order.of_epoch, batch_size, 0, order.of_epoch(0), numbers, done)
    deaths = sorted(random.choice(EPOCHS, random.integers(0, workers), replace=True).tolist())
    seen: list[list[int]] = [[] for _ in range(EPOCHS)]

    def take(epoch: int, share: Indices, number: int, steps: int) -> None:
        for step in range(min(steps, -(-len(share) // batch_size))):
            seen[epoch] += share[step * batch_size : (step + 1) * batch_size].tolist()
            done[number] += 1

    for epoch in range(EPOCHS):
        left = order.of_epoch(epoch)
        while deaths and deaths[0] == epoch:
            deaths.pop(0)
            for worker, number in enumerate(numbers):
                take(epoch, left[worker :: len(numbers)], number, int(random.integers(0, 10)))
            numbers.pop(random.integers(0, len(numbers)))
            left = remaining.after(epoch, done)
            remaining.deal(epoch, left, numbers, done)
        for worker, number in enumerate(numbers):
            take(epoch, left[worker :: len(numbers)], number, samples)
    assert [sorted(epoch) for epoch in seen] == [list(range(samples))] * EPOCHS


def test_what_nobody_has_begun_is_left_in_its_order() -> None:
    order = EpochOrder(np.arange(20), 3)
    remaining = RemainingSamples(order.of_epoch, 4, 0, order.of_epoch(0), [1, 2], {})
    assert remaining.after(1, {1: 3, 2: 3}).tolist() == order.of_epoch(1).tolist()
    assert len(remaining.after(1, {1: 5, 2: 3})) == 12
