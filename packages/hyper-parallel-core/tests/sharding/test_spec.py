"""Specs: interned values, and the type of the gradient that belongs to a tensor."""

from __future__ import annotations

import gc

import pytest
import torch

from hyper_parallel import Layout, Partial, Replicate, Shard
from hyper_parallel.sharding.spec import contiguous_stride, dual, make_spec
from hyper_parallel.testing import mesh_of


def mesh():
    return mesh_of((2, 2))


def layout(*placements):
    return Layout.from_placements(mesh(), placements, ndim=2)


@pytest.mark.ranks(4)
def test_equal_specs_are_one_object():
    first = make_spec(layout(Shard(0), Replicate()), (5, 3), (3, 1), torch.float32)
    assert make_spec(layout(Shard(0), Replicate()), torch.Size([5, 3]), (3, 1), torch.float32, frozenset()) is first
    assert first.replace(dtype=torch.float64) is not first
    assert first.replace(dtype=torch.float64).replace(dtype=torch.float32) is first
    assert first.replace(varying=frozenset({1})).varying == {1}
    assert first.local_shape == ((3, 3) if mesh().get_coordinate()[0] == 0 else (2, 3))
    assert first.meta.shape == (5, 3)
    assert first.meta.device.type == "meta"
    assert "varying over [1]" in repr(first.replace(varying=frozenset({1})))


@pytest.mark.ranks(4)
def test_unused_specs_are_forgotten():
    one = layout(Shard(1), Shard(0))
    kept = make_spec(one, (17, 2), (2, 1), torch.float32)
    before = len(one._specs)
    make_spec(one, (17, 3), (3, 1), torch.float32)
    gc.collect()
    assert len(one._specs) == before
    assert kept in one._specs.values()


def test_contiguous_stride():
    for shape in ((), (3,), (2, 3, 4), (2, 1, 3), (2, 0, 3)):
        assert contiguous_stride(shape) == torch.empty(shape).stride()


@pytest.mark.ranks(4)
def test_dual():
    """Slices for slices; a pending sum and a varying replica are each other's dual; an invariant replica is its own."""
    none: frozenset[int] = frozenset()
    assert dual(layout(Shard(0), Replicate()), none) == (layout(Shard(0), Replicate()), none)
    assert dual(layout(Partial(), Replicate()), none) == (layout(Replicate(), Replicate()), frozenset({0}))
    assert dual(layout(Replicate(), Replicate()), frozenset({1})) == (layout(Replicate(), Partial()), none)
    for start in (layout(Shard(0), Partial()), none), (layout(Partial(), Replicate()), frozenset({1})):
        assert dual(*dual(*start)) == start
