"""Bucket plans: every gradient once, last layers first, small ones fused, large ones alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.reduction.buckets import TensorSpec, itemsize, plan_buckets

SPECS = st.lists(
    st.builds(
        TensorSpec,
        name=st.text("abc", max_size=3),
        shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
        dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
        sparse=st.just(False),
    ),
    max_size=40,
)


@given(SPECS, st.sampled_from([1, 100, 4096, 1 << 20]), st.sampled_from([1, 200, 1 << 20]))
def test_each_gradient_once_and_no_overlap(specs: list[TensorSpec], bucket_bytes: int, alone_bytes: int) -> None:
    plan = plan_buckets(specs, bucket_bytes, alone_bytes)
    assert sorted(p for b in plan.buckets for p in b.members) == list(range(len(specs)))
    for bucket in plan.buckets:
        assert {specs[p].travel_dtype for p in bucket.members} == {bucket.dtype}
        spans = sorted(
            (offset, offset + specs[p].size) for p, offset in zip(bucket.members, bucket.offsets, strict=True)
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= bucket.size
        assert bucket.flat or all(offset * itemsize(bucket.dtype) % 64 == 0 for offset in bucket.offsets)
        assert not bucket.flat or bucket.size == sum(specs[p].size for p in bucket.members)
        if len(bucket.members) > 1:
            assert sum(specs[p].nbytes for p in bucket.members) <= max(bucket_bytes, alone_bytes)
            assert all(specs[p].nbytes < alone_bytes for p in bucket.members)


def test_backward_order() -> None:
    specs = [
        TensorSpec("first", (1000,), "float32"),
        TensorSpec("big", (1000, 1000), "float32"),
        TensorSpec("small", (10,), "float32"),
        TensorSpec("bigger", (2000, 1000), "float32"),
        TensorSpec("last", (10,), "float32"),
    ]
    plan = plan_buckets(specs, bucket_bytes=1 << 20, alone_bytes=1 << 20)
    assert [bucket.members for bucket in plan.buckets] == [(3,), (1,), (4, 2, 0)]


def test_dtypes_do_not_mix_and_sparse_is_alone() -> None:
    specs = [
        TensorSpec("a", (3,), "float32"),
        TensorSpec("b", (3,), "float64"),
        TensorSpec("table", (9, 2), "float32", sparse=True),
        TensorSpec("c", (3,), "bfloat16"),
    ]
    plan = plan_buckets(specs)
    assert [(b.members, b.dtype, b.sparse) for b in plan.buckets] == [
        ((2,), "float32", True),
        ((1,), "float64", False),
        ((3, 0), "float32", False),
    ]


@pytest.mark.parametrize("change", [{"shape": (4,)}, {"dtype": "float64"}, {"name": "z"}, {"sparse": True}])
def test_description_tells_every_difference(change: dict[str, object]) -> None:
    base = {"name": "a", "shape": (3,), "dtype": "float32", "sparse": False}
    one = plan_buckets([TensorSpec(**base)])  # type: ignore[arg-type]
    other = plan_buckets([TensorSpec(**{**base, **change})])  # type: ignore[arg-type]
    assert str(one.call) != str(other.call)
