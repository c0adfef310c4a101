"""Global shapes of the outputs of operators that say only their layouts: from meta tensors, or from even shards."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import DFunction, DistributedOp, Layout, Shard, distribute_tensor, init_device_mesh


class ScaleByFirst(DFunction):
    """Needs the values, which meta tensors do not have."""

    _op_name = "scale_by_first_of_the_tests"

    @staticmethod
    def forward(ctx, x):
        return x * (2.0 if x.sum().item() > -1e9 else 1.0)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Rows(DFunction):
    """Works on meta tensors."""

    _op_name = "rows_of_the_tests"

    @staticmethod
    def forward(ctx, x):
        return x[:, 0] * 1, None, x * 1

    @staticmethod
    def backward(ctx, grad, _, other):
        return other + torch.nn.functional.pad(grad[:, None], (0, other.shape[1] - 1))


class MisplacedRows(Rows):
    """The same under a rule that is wrong."""

    _op_name = "misplaced_rows_of_the_tests"


class SameLayout(DistributedOp):
    allow_partial_inputs = True

    def infer_layout(self, cache_values):
        return (cache_values[0],), None


class FirstColumn(DistributedOp):
    """The second output is a plain tensor on every rank."""

    def infer_layout(self, cache_values):
        return (Layout.from_placements(cache_values[0].mesh, cache_values[0].placements, ndim=1), None), None


class ImpossibleDim(DistributedOp):
    def infer_layout(self, cache_values):
        return (Layout.from_placements(cache_values[0].mesh, [Shard(2)], ndim=3), None), None


def spread(rows):
    return distribute_tensor(torch.randn(rows, 3), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)


@pytest.mark.ranks(2)
def test_without_meta_support_even_shards_tell_the_shape():
    SameLayout("scale_by_first_of_the_tests")
    out = ScaleByFirst.apply(spread(4))
    assert (tuple(out.shape), out.stride()) == ((4, 3), (3, 1))


@pytest.mark.ranks(2)
def test_without_meta_support_uneven_shards_tell_the_shape_too():
    SameLayout("scale_by_first_of_the_tests")
    out = ScaleByFirst.apply(spread(5))
    assert (tuple(out.shape), out.stride(), out.placements) == ((5, 3), (3, 1), (Shard(0),))


@pytest.mark.ranks(2)
def test_meta_tensors_tell_the_shape_of_uneven_shards():
    FirstColumn("rows_of_the_tests")
    column, nothing, plain = Rows.apply(spread(5))
    assert (tuple(column.shape), nothing) == ((5,), None)
    assert type(plain) is torch.Tensor


@pytest.mark.ranks(2)
def test_error_of_the_rule_is_not_taken_for_missing_meta_support():
    ImpossibleDim("misplaced_rows_of_the_tests")
    with pytest.raises(ValueError, match="a rule shards dim 2 of its result, which has 1 dimensions"):
        MisplacedRows.apply(spread(4))
