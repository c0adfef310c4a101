"""The key of a call: what makes two calls alike, and what the local arguments are."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch

from hyper_parallel import Shard, distribute_tensor
from hyper_parallel.dispatch.cache_key import kinds_by_value, scan

NONE, INTS, ALL = kinds_by_value(False, False), kinds_by_value(True, False), kinds_by_value(True, True)
Pair = namedtuple("Pair", "first second")


def key_of(*values, by_value=INTS, grad=True):
    key, local = [], []
    assert not scan(values, key, local, grad, by_value)
    return tuple(key), local


@pytest.mark.parametrize(
    ("one", "other", "differ_by"),
    [(2, 3, [INTS, ALL]), (2.0, 3.0, [ALL]), ((2, 3), (2, 4), [INTS, ALL]), ([2.0], [3.0], [ALL])],
)
def test_numbers_count_by_value_where_they_can_change_a_layout(one, other, differ_by):
    for by_value in (NONE, INTS, ALL):
        differ = key_of(one, by_value=by_value) != key_of(other, by_value=by_value)
        assert (key_of(one, by_value=by_value)[0] != key_of(other, by_value=by_value)[0]) == (by_value in differ_by)
        assert differ  # the local arguments are those of the call


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (True, False),
        (True, 1),
        (1, 1.0),
        ("a", "b"),
        (None, ...),
        (torch.float32, torch.float64),
        (slice(0, 2), slice(0, 3)),
        (slice(0, 2), (0, 2, None)),
        ([2, 3], (2, 3)),
        ((1, (2,)), ((1,), 2)),
        (len, max),
    ],
)
def test_other_values_always_count(one, other):
    assert key_of(one, by_value=NONE)[0] != key_of(other, by_value=NONE)[0]
    assert key_of(one)[0] == key_of(one)[0]


def test_what_cannot_be_hashed_is_like_nothing_else():
    assert key_of({1})[0] != key_of({1})[0]
    hash(key_of({1})[0])


def test_a_tensor_as_bound_of_a_slice_is_read():
    key, local = key_of(slice(torch.tensor(1), None))
    assert local == [slice(1, None)]
    assert key == key_of(slice(1, None))[0]


def test_local_arguments_keep_their_structure(mesh):
    x = distribute_tensor(torch.randn(4, 6), mesh["b"], [Shard(0)], src_data_rank=None)
    _, (local, pair, items) = key_of(x, Pair(x, 2), [x, (x,)])
    assert local is x._local
    assert type(pair) is Pair
    assert pair.first is local
    assert type(items) is list
    assert items[1] == (local,)


def test_dtensors_count_by_layout_and_gradient(mesh):
    def make(*shape):
        return distribute_tensor(torch.randn(shape), mesh["b"], [Shard(0)], src_data_rank=None)

    x, y, needs = make(4, 6), make(4, 6), make(4, 6).requires_grad_()
    assert key_of(x)[0] == key_of(y)[0] != key_of(make(6, 4))[0]
    assert key_of(x)[0] != key_of(needs)[0]
    assert key_of(x, grad=False)[0] == key_of(needs, grad=False)[0]


def test_a_plain_number_tensor_is_a_replica_and_others_are_loose():
    assert key_of(torch.tensor(2.0))[0] == key_of(torch.tensor(3.0))[0]
    for loose in (torch.ones(2), [torch.ones(2)], Pair(1, torch.ones(2)), torch.tensor(1.0, requires_grad=True)):
        assert scan([loose, 2], [], [], True, INTS)
    assert not scan([torch.tensor(1.0, requires_grad=True)], [], [], False, INTS)
