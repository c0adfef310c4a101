"""Casts, factories, reading values and overwriting, against plain torch on all layouts."""

import pytest
import torch

from hyper_parallel import CommTrace, Partial, Replicate, Shard, distribute_tensor, redistribute_policy
from hyper_parallel.context import module_call
from hyper_parallel.testing import OpConformance, at_most, sample, tensor
from hyper_parallel.testing.checking import mesh_of

MATRIX = tensor(5, 6)


class Quick(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 15


class TestTo(Quick):
    op = torch.Tensor.to
    max_collectives = at_most()
    rtol = atol = 1e-4
    samples = (
        sample(MATRIX, torch.float32),
        sample(MATRIX, "cpu", torch.float32),
        sample(MATRIX, torch.float64, copy=True).options(name="copy"),
        sample(MATRIX, torch.int64),
        sample(MATRIX, tensor(3, dtype=torch.float32, grad=False)).options(name="other"),
    )


class TestTypeAs(Quick):
    op = torch.Tensor.type_as
    max_collectives = at_most()
    samples = (sample(MATRIX, tensor(3, dtype=torch.int32)),)


class TestBool(Quick):
    op = torch.Tensor.bool
    max_collectives = at_most()
    samples = (sample(MATRIX),)


class TestZerosLike(Quick):
    op = torch.zeros_like
    max_collectives = at_most()
    samples = (sample(MATRIX), sample(MATRIX, dtype=torch.int64))


class TestFullLike(Quick):
    op = torch.full_like
    max_collectives = at_most()
    samples = (sample(MATRIX, 3.0),)


class TestNewZeros(Quick):
    op = torch.Tensor.new_zeros
    max_collectives = at_most()
    samples = (sample(MATRIX, 5, 6), sample(MATRIX, (2, 3)), sample(MATRIX, (5, 6), dtype=torch.int32))


class TestNewFull(Quick):
    op = torch.Tensor.new_full
    max_collectives = at_most()
    samples = (sample(MATRIX, (5, 6), 2.0), sample(MATRIX, size=(4,), fill_value=1))


class TestNewTensor(Quick):
    op = torch.Tensor.new_tensor
    max_collectives = at_most()
    samples = (sample(MATRIX, [1.0, 2.0]),)


def filled(x):
    return x.clone().fill_(3.0)


class TestFill(Quick):
    op = filled
    max_collectives = at_most()
    samples = (sample(MATRIX),)


def overwritten(x, source):
    return x.clone().copy_(source)


class TestCopy(Quick):
    op = overwritten
    max_collectives = at_most()
    samples = (sample(MATRIX, MATRIX), sample(MATRIX, tensor(6)))


def spread(value, *placements):
    return distribute_tensor(value, mesh_of((4,)), placements)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", [Replicate(), Partial()])
def test_numbers_are_global(placement):
    x = spread(torch.tensor([3.0]), Replicate()).redistribute(placements=[placement])
    with redistribute_policy("strict"):
        assert (x.item(), float(x), int(x), bool(x)) == (3.0, 3.0, 3, True)
    assert list(range(5))[x.long()] == 3
    assert f"{x.reshape(()):.1f}" == "3.0"


@pytest.mark.ranks(4)
def test_terms_are_not_rounded_one_by_one_into_a_pending_target():
    half = spread(torch.full((4,), 2.0), Partial()) / 4  # of 0.5 each rank has less
    target = spread(torch.zeros(4, dtype=torch.int64), Partial())
    for write in (lambda x: x.copy_(half * 3), lambda x: x.__setitem__(slice(1, 3), (half * 3)[1:3])):
        with pytest.raises(ValueError, match=r"copy_|__setitem__"):
            write(target)
        assert target.tolist() == [0] * 4
    assert target.copy_((half * 3).long()).tolist() == [1] * 4


NEEDS_THE_VALUE = {
    "exp": lambda x: x.exp(),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "masked_scatter": lambda x: x.masked_scatter(x > 1, x),
    "view": lambda x: x.view(torch.int32),
    "softmax": lambda x: x.softmax(0),
    "long": lambda x: x.long(),
    "sort": lambda x: x.sort(),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", NEEDS_THE_VALUE)
def test_a_pending_sum_is_reduced_by_default_and_refused_under_strict(name):
    function = NEEDS_THE_VALUE[name]
    pending = spread(torch.tensor([1.0, 0.0, 3.0, 1.0]), Partial())
    with redistribute_policy("strict"), CommTrace() as trace:
        with pytest.raises(ValueError, match=r"fix: |reduce_partial\(\)"):
            function(pending)
    assert trace.counts == {}
    with CommTrace() as trace, module_call():
        function(pending)
        function(pending)
    assert trace.counts["all_reduce"] == 1, "what was reduced once is used again by the same call"


@pytest.mark.ranks(4)
def test_contents_are_global():
    value = torch.arange(5.0)
    x = spread(value, Shard(0))
    assert x.tolist() == value.tolist()
    assert x.numpy().tolist() == value.tolist()
    assert 4 in x
    assert 5 not in x
    assert torch.equal(x, spread(value, Replicate()))
    assert not x.allclose(spread(value + 1, Replicate()))
    with pytest.raises(RuntimeError, match="requires grad"):
        spread(value, Shard(0)).requires_grad_().numpy()


@pytest.mark.ranks(4)
def test_factories_do_not_follow_the_gradient():
    x = spread(torch.ones(4), Replicate()).requires_grad_()
    varying = x.redistribute(placements=[Replicate()], grad_placements=[Partial()])
    assert torch.zeros_like(varying).grad_placements == (Replicate(),)
    assert torch.zeros_like(x.redistribute(placements=[Partial()])).placements == (Replicate(),)


@pytest.mark.ranks(4)
def test_a_cast_that_changes_nothing_is_the_tensor_itself():
    x = spread(torch.ones(4), Shard(0))
    assert x.to(torch.float32) is x
    assert x.float() is x


@pytest.mark.ranks(2)
def test_a_function_that_takes_numbers_reads_them():
    count = distribute_tensor(torch.tensor([2, 3]), mesh_of((2,)), [Shard(0)]).sum()
    assert torch.arange(count).tolist() == [0, 1, 2, 3, 4]
    assert torch.tensor([count, 1]).tolist() == [5, 1]


@pytest.mark.ranks(4)
def test_a_new_tensor_with_a_wider_dim_keeps_the_shards_of_the_others():
    """As latent attention joins its parts: room for both, then a copy into each part."""
    torch.manual_seed(0)
    first, second = torch.randn(4, 6, 3), torch.randn(4, 6, 2)

    def joined(first, second):
        whole = first.new_empty(*first.shape[:-1], 5)
        whole[..., :3].copy_(first)
        whole[..., 3:].copy_(second)
        return whole

    parts = [distribute_tensor(x, mesh_of((2, 2)), [Shard(0), Shard(1)]).requires_grad_() for x in (first, second)]
    with CommTrace() as trace:
        out = joined(*parts)
    assert trace.counts == {}
    assert out.placements == (Shard(0), Shard(1))
    torch.testing.assert_close(out.full_tensor(), joined(first, second))
    out.square().sum().backward()
    torch.testing.assert_close(parts[1].grad.full_tensor(), 2 * second)
