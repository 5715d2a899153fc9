"""Adasum: a sum of gradients that does not add up what they have in common.

Two gradients a and b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum where they are orthogonal, their
mean where they are equal; many are combined in pairs, then in pairs of pairs (Maleki et al., "Scaling distributed
training with adaptive summation", MLSys 2021). Halves of the vector travel, of double distance at each level
("vector halving, distance doubling"), and the products of whole vectors are summed over the ranks that hold parts.
"""

from __future__ import annotations

import numpy as np

from mpitrain.comm.communicator import Buffer, Communicator

SMALLEST_SQUARE = float(np.sqrt(np.finfo(np.float64).tiny))  # below it a vector counts as zero, as in Horovod


def combine(a: Buffer, b: Buffer, dot: float, square_a: float, square_b: float) -> Buffer:
    """Local: parts of two vectors, with the products of the whole vectors."""
    factor_a = 1.0 - dot / square_a / 2 if square_a >= SMALLEST_SQUARE else 1.0
    factor_b = 1.0 - dot / square_b / 2 if square_b >= SMALLEST_SQUARE else 1.0
    return (factor_a * a.astype(np.float64) + factor_b * b.astype(np.float64)).astype(a.dtype)


def all_reduce(communicator: Communicator, buffer: Buffer) -> None:
    """Collective: replace `buffer`, one-dimensional and floating-point, by the Adasum of all ranks' buffers.

    Raises:
        ValueError: the number of ranks is no power of two.
    """
    rank, size = communicator.rank, communicator.size
    # At each level every rank needs a partner at that distance.
    if size & (size - 1):
        raise ValueError(f"Adasum needs a number of ranks that is a power of two, not {size}")
    low, high = 0, buffer.size
    bounds: list[tuple[int, int]] = []
    level = 1
    while level < size:
        bounds.append((low, high))
        middle = (low + high) // 2
        mine, theirs = (
            (slice(middle, high), slice(low, middle)) if rank & level else (slice(low, middle), slice(middle, high))
        )
        received = np.empty(mine.stop - mine.start, buffer.dtype)
        _swap(communicator, buffer[theirs], received, rank ^ level)
        # The vector of the lower half of the ranks comes first, on both sides.
        a, b = (received, buffer[mine]) if rank & level else (buffer[mine], received)
        products = _sum_over(communicator, _products(a, b), level)
        buffer[mine] = combine(a, b, *products.tolist())
        low, high = mine.start, mine.stop
        level *= 2
    while level > 1:
        level //= 2
        first, last = bounds.pop()
        rest = slice(first, low) if rank & level else slice(high, last)
        received = np.empty(rest.stop - rest.start, buffer.dtype)
        _swap(communicator, buffer[low:high], received, rank ^ level)
        buffer[rest] = received
        low, high = first, last


def _products(a: Buffer, b: Buffer) -> Buffer:
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    return np.array([wide_a @ wide_b, wide_a @ wide_a, wide_b @ wide_b])


def _sum_over(communicator: Communicator, products: Buffer, level: int) -> Buffer:
    """Collective: the sum over the 2 * `level` ranks that hold parts of these two vectors, the same bits on all."""
    received = np.empty_like(products)
    step = 1
    while step <= level:
        # Each pair adds the same two numbers, and a + b has the bits of b + a: so all end with the same ones.
        _swap(communicator, products, received, communicator.rank ^ step)
        products = products + received
        step *= 2
    return products


def _swap(communicator: Communicator, send: Buffer, receive: Buffer, other: int) -> None:
    arrived = communicator.irecv(receive, other)
    sent = communicator.isend(np.ascontiguousarray(send), other)
    arrived.wait()
    sent.wait()
