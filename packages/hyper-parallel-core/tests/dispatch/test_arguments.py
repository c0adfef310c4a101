"""The arguments of a call: as rules see them, and with plain tensors among them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hyper_parallel import Replicate, Shard, distribute_tensor, implicit_replication
from hyper_parallel._rules.call import Ref
from hyper_parallel._rules.families.elementwise import Elementwise
from hyper_parallel.dispatch.arguments import counts_as_replica, lifted, local_arguments, make_call, with_value
from hyper_parallel.dispatch.entry import DispatchEntry


@pytest.fixture
def x(mesh):
    return distribute_tensor(torch.randn(4, 6), mesh["b"], [Shard(0)], src_data_rank=None)


def test_rules_see_specs_in_the_place_of_tensors(x):
    rule = DispatchEntry(torch.cat, object.__new__(Elementwise), "cat")
    rule.op.one_mesh, rule.op.signature = True, None
    call = make_call(rule.op, rule, ([x, torch.tensor(1.0)], 0), {"like": x})
    assert [spec.shape for spec in call.inputs] == [(4, 6), (), (4, 6)]
    assert call.inputs[0] is x.spec
    assert call.inputs[1].layout.placements == (Replicate(),)
    (first, second), dim = call.args
    assert isinstance(first, Ref)
    assert (first.index, second.index, call.kwargs["like"].index, dim) == (0, 1, 2, 0)
    assert call.needs_grad == [False] * 3


def test_local_arguments(x):
    args, kwargs = local_arguments((x, [x, 2]), {"out": (x,)})
    assert args[0] is args[1][0] is kwargs["out"][0] is x._local


def test_a_value_takes_the_place_of_its_tensor(x):
    args, kwargs = with_value((x, torch.tensor([1, 2])), {"other": torch.tensor(3)}, 1)
    assert args[0] is x
    assert args[1] == [1, 2]
    assert isinstance(kwargs["other"], torch.Tensor)
    assert with_value((x, torch.tensor([1, 2])), {"other": torch.tensor(3)}, 2)[1] == {"other": 3}


def test_when_a_plain_tensor_counts_as_a_replica():
    number, vector = torch.tensor(1.0), torch.ones(3)
    assert counts_as_replica(number, True)
    assert not counts_as_replica(vector, True)
    with implicit_replication():
        assert counts_as_replica(vector, True)
    assert not counts_as_replica(number.requires_grad_(), True)
    assert counts_as_replica(number, False)


def test_lifted_tensors_join_the_mesh_and_others_are_refused(x):
    plain = torch.ones(3)
    (same, number), _ = lifted("f", SimpleNamespace(), (x, torch.tensor(1.0)), {})
    assert same is x
    assert number.layout == x.layout.replicated(0)
    with pytest.raises(RuntimeError, match=r"f: a plain tensor of shape \(3,\)"):
        lifted("f", SimpleNamespace(), (x, plain), {})
    (_, unread), _ = lifted("f", SimpleNamespace(uncounted=[1]), (x, plain), {})
    assert unread.placements == (Replicate(),)
