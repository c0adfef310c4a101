"""The conformance kit finds wrong rules: each operator here is wrong in one way that the kit promises to see."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from hyper_parallel import Partial, Shard, Strategy, all_reduce
from hyper_parallel._rules.call import Solution
from hyper_parallel._rules.families.elementwise import Elementwise
from hyper_parallel._rules.op import DistributedOp, FunctionOp
from hyper_parallel._rules.strategy import LayoutOp, P, R, S
from hyper_parallel.tensor.dtensor import wrap
from hyper_parallel.testing import (
    ConformanceError,
    OpConformance,
    OpUnderTest,
    RanksFailed,
    at_most,
    check_op,
    sample,
    tensor,
)
from hyper_parallel.testing.function_operators import StrategyFunctionOp, distributed
from hyper_parallel.testing.one_device import wrong_alone

ONE = ((2,),)


@distributed(Elementwise)
def right_exp(x, out=None):
    return torch.exp(x, out=out)


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], S(0)), Strategy([S(1)], S(1))])
def softmax_over_shards(x):
    return torch.softmax(x, 0)


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([P], P)])
def exp_of_partial(x):
    return torch.exp(x)


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], R)])
def sum_without_reduction(x):
    return x.sum(0)


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0), R], S(0), invariant=[1])])
def wrong_gradient(x, y):
    return x * y


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], R), Strategy([S(0)], P)])
def shadowed_strategy(x):
    return x.detach().abs().amax() * 0 + x.new_ones(())


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], S(0))])
def keyed_by_object(x, key):
    return x * 2


@distributed(Elementwise)
def not_in_place_(x):
    return x.exp()


class WrongInPlace(OpConformance):
    """Not collected by pytest, as its name does not start with Test."""

    op = right_exp
    samples = (sample(tensor(4)),)
    inplace = not_in_place_


class Refusing(LayoutOp):
    """Refuses everything but whole tensors, with an error of its own, also where ``auto`` allows to redistribute."""

    def solve(self, call):
        if not call.inputs[0].layout.is_replicated():
            raise ValueError("no")
        return Solution([call.inputs[0].layout], [call.inputs[0].layout])


@distributed(Refusing)
def refusing(x):
    return x * 2


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], S(0))])
def changes_its_input(x):
    with torch.no_grad():
        x.mul_(2)
    return x * 1


def in_a_copy(x):
    return x.detach() * 2


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (softmax_over_shards, (tensor(4, 6),), "values differ"),
        (exp_of_partial, (tensor(4),), "values differ"),
        (sum_without_reduction, (tensor(4, 3),), "values differ"),
        (shadowed_strategy, (tensor(4),), "another strategy with the same inputs comes first"),
        (
            changes_its_input,
            (tensor(4, grad=False),),
            "a second identical call: .* changes its inputs, on one device too",
        ),
        (refusing, (tensor(4),), "refused, although redistribution is allowed"),
        (refusing, (tensor(4),), "must be the standard RedistributionError"),
    ],
)
def test_wrong_rule_is_found(ranks, function, args, message):
    with pytest.raises(ConformanceError, match=message) as caught:
        check_op(ranks, function, *args, meshes=ONE)
    assert f"import {function.__name__}" in str(caught.value)


def missing_gradient(x, y):
    return x * y.detach()


def test_wrong_gradient_is_found(ranks):
    """The replica of a sharded product is not varying, so that its gradient is one rank's term only."""
    with pytest.raises(ConformanceError, match=r"gradient of input 1 .*values differ"):
        check_op(ranks, wrong_gradient, tensor(2, 3), tensor(1, 3), meshes=ONE)


def with_new_key(x):
    return keyed_by_object(x, object())


def test_growing_cache_is_found(ranks):
    with pytest.raises(ConformanceError, match="second time made 1 new plans"):
        check_op(ranks, with_new_key, tensor(4), meshes=ONE)


def test_changed_input_is_found(ranks):
    declared = OpUnderTest(changes_its_input, reference=in_a_copy)
    with pytest.raises(ConformanceError, match="input 0 after the call, this rank's piece: 2 of 2 values differ"):
        check_op(ranks, changes_its_input, tensor(4, grad=False), meshes=ONE, declared=declared)


def test_form_that_does_not_write_is_found(ranks):
    with pytest.raises(pytest.fail.Exception, match="values differ"):
        WrongInPlace().test_inplace(ranks, (0, (2,), True), None)


# -- one mutation per promise -----------------------------------------------------------------------------------------


class Locally(LayoutOp):
    """Keeps the first input's layout and runs another function on the pieces.

    Args:
        local: that function.
        refuses: which placements it refuses.
        meta: what says the global shape and stride, when it is not the function itself.
    """

    def __init__(self, op_name, *, local=None, refuses=lambda p: isinstance(p, Partial), meta=None):
        super().__init__(op_name)
        self.local, self.refuses, self.meta = local, refuses, meta

    def solve(self, call):
        targets = [
            spec.layout.with_placements({a: R for a, p in enumerate(spec.layout.placements) if self.refuses(p)})
            for spec in call.inputs
        ]
        return Solution(targets, [targets[0]], self.local, meta=self.meta)


def sums_of_shards(call):
    """Right for the first dim only."""
    return [Strategy([S(0)], S(0)), Strategy([S(1)], S(1))]


@distributed(StrategyFunctionOp, rows=sums_of_shards)
def cumsum_along_the_last_dim(x):
    return x.cumsum(1)


def all_but_dim(call):
    """A negative ``dim`` is none of these."""
    return [Strategy([S(d)], S(d)) for d in range(2) if d != call.args[1]]


@distributed(StrategyFunctionOp, rows=all_but_dim)
def cumsum_along(x, dim):
    return x.cumsum(dim)


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], Partial("avg"))])
def mean_of_means(x):
    return x.mean(0)


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], S(0))])
def needs_a_row(x):
    return x - x[0] * 0


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], S(0))])
def needs_a_dim(x):
    return x * 2


@distributed(Locally, refuses=lambda p: isinstance(p, Partial) or type(p) is Shard)
def flip_of_packed(x):
    return x.flip(0)


@distributed(Locally, local=lambda x: torch.as_strided(x, x.shape, (x.shape[1], 1)) * 2)
def assumes_contiguous(x):
    return x * 2


@distributed(Locally, local=lambda x, y: (x + y).to(x.dtype), refuses=lambda p: p != R)
def in_the_first_dtype(x, y):
    return x + y


class _OneGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None
        return grad * y, grad * x


@distributed(Locally, local=_OneGradient.apply, refuses=lambda p: p != R)
def forgets_the_second_gradient(x, y):
    return x * y


@distributed(Locally, local=lambda x: x + torch.distributed.get_rank())
def adds_the_rank(x):
    return x * 1


@distributed(Locally, meta=lambda x: torch.empty(x.shape, device="meta"))
def says_contiguous(x):
    return (x * 2).t().contiguous().t()


class SaysContiguous(FunctionOp):
    def run(self, func, args, kwargs):
        x = args[0]
        return wrap((x._resolve() * 2).mT.contiguous().mT, x._spec)


@distributed(SaysContiguous)
def lies_transposed(x):
    return x * 2


class LeavesAGap(FunctionOp):
    def run(self, func, args, kwargs):
        local = args[0]._resolve() * 2
        return wrap(torch.cat([local, local], 1)[:, : local.shape[1]], args[0]._spec)


@distributed(LeavesAGap)
def lies_with_gaps(x):
    return x * 2


@distributed(Locally, local=lambda x: x)
def gives_the_piece_itself(x):
    return x * 1


@distributed(Locally, local=lambda x: x * 2)
def copies_where_one_device_has_a_view(x):
    return x[:]


@distributed(Locally, local=lambda x: (x * 2).detach())
def drops_the_gradient(x):
    return x * 2


@distributed(Locally, local=lambda x: (x * 2).detach() + x * 0)
def drops_the_gradient_in_secret(x):
    return x * 2


class KeepsResults(FunctionOp):
    """What was computed for a tensor comes again, whatever was written to it meanwhile."""

    def run(self, func, args, kwargs):
        (x,) = args
        if not hasattr(x, "_twice"):
            x._twice = wrap(x._resolve() * 2, x._spec)
        return x._twice


@distributed(KeepsResults)
def remembers_too_long(x):
    return x * 2


class KeepsShapes(FunctionOp):
    """The first columns; how many there were in the first call is taken for all."""

    known: ClassVar[dict] = {}

    def run(self, func, args, kwargs):
        x, count = args[0].redistribute(args[0].layout.replicated()), args[1]
        columns = self.known.setdefault("columns", count)
        spec = x.spec.replace(shape=(x.shape[0], columns), stride=(columns, 1))
        return wrap(x._resolve()[:, :count].clone(memory_format=torch.contiguous_format), spec)


@distributed(KeepsShapes)
def first_columns(x, count):
    return x[:, :count].clone(memory_format=torch.contiguous_format)


class CachedShape(OpConformance):
    op = first_columns
    samples = (sample(tensor(4, 6, grad=False), 2), sample(tensor(4, 6, grad=False), 4))


@distributed(Locally, local=lambda x: x * 2 if x.shape[0] != 3 else x * 3)
def wrong_on_three_rows(x):
    return x * 2


@pytest.mark.parametrize(
    ("function", "right", "wrong", "message"),
    [
        (cumsum_along_the_last_dim, None, (tensor(4, 6),), "values differ"),
        (cumsum_along, (tensor(4, 6), 1), (tensor(4, 6), -1), "values differ"),
        (mean_of_means, None, (tensor(5, 3),), "values differ"),
        (flip_of_packed, (tensor(1, 6),), (tensor(6, 4),), r"PS\(0.*\n.*values differ"),
        (assumes_contiguous, None, (tensor(4, 6),), "non-contiguous.*\n.*values differ"),
        (in_the_first_dtype, (tensor(3), tensor(3)), (tensor(3, dtype=torch.float32), tensor(3)), "dtype"),
        (forgets_the_second_gradient, (tensor(4), tensor(4, grad=False)), (tensor(4), tensor(4)), "input 1 is missing"),
        (adds_the_rank, None, (tensor(4),), "rank 1: .*values differ"),
        (says_contiguous, None, (tensor(4, 6),), "global stride is"),
        (lies_transposed, None, (tensor(4, 6),), r"the local tensor has stride \(1, \d\), stated"),
        (lies_with_gaps, None, (tensor(4, 6),), r"the local tensor has stride \(\d+, 1\), stated"),
        (gives_the_piece_itself, None, (tensor(4, 6),), "output 0 shares memory with input 0|output 0 is input 0"),
        (copies_where_one_device_has_a_view, None, (tensor(4, 6),), "on one device it shares memory with it"),
        (drops_the_gradient, (tensor(4, grad=False),), (tensor(4),), "requires_grad is False, expected True"),
        (drops_the_gradient_in_secret, (tensor(4, grad=False),), (tensor(4),), r"gradient of input 0 .*values differ"),
        (remembers_too_long, None, (tensor(4, 6),), "after the inputs were halved in place .*values differ"),
        (wrong_on_three_rows, None, (tensor(6, 2),), "values differ"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mutation_is_found(ranks, function, right, wrong, message):
    """With ``right`` sample inputs, where there are some, the operator passes: it is the kit's cases that tell."""
    if right is not None:
        check_op(ranks, function, *right, meshes=ONE)
    with pytest.raises(ConformanceError, match=message):
        check_op(ranks, function, *wrong, meshes=ONE)


@pytest.mark.parametrize(
    ("function", "right", "wrong", "message"),
    [
        (needs_a_row, (tensor(4, 3),), (tensor(1, 3),), "IndexError"),
        (needs_a_dim, (tensor(4),), (tensor(),), r"mesh 2, policy strict, input 0: S\(0\).*"),
    ],
    ids=["empty", "0-dim"],
)
def test_error_of_an_empty_or_0_dim_piece_is_found(ranks, function, right, wrong, message):
    check_op(ranks, function, *right, meshes=ONE)
    with pytest.raises((RanksFailed, ConformanceError), match=message):
        check_op(ranks, function, *wrong, meshes=ONE)


class ForgetsOut(OpConformance):
    op = lambda x, out=None: right_exp(x)  # noqa: E731
    samples = (sample(tensor(4)),)
    out = True


def test_out_form_that_does_not_write_is_found(ranks):
    with pytest.raises(pytest.fail.Exception, match="not the tensor given as out="):
        ForgetsOut().test_out(ranks, (0, (2,), True), None)


def test_cached_shape_is_found(ranks):
    """By a second sample with another argument: the ranks keep what a rule keeps."""
    CachedShape().test_layouts(ranks, (0, (2,), False), 4)
    with pytest.raises(pytest.fail.Exception, match=r"global shape is \(4, 2\), expected \(4, 4\)"):
        CachedShape().test_layouts(ranks, (1, (2,), False), 4)


@torch.library.custom_op("hp_mutations::twice", mutates_args=())
def twice_with_a_wrong_backward(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice_with_a_wrong_backward.register_fake(lambda x: torch.empty_like(x))
twice_with_a_wrong_backward.register_autograd(lambda ctx, grad: grad * 4)


class _Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@torch.library.custom_op("hp_mutations::writes_its_input", mutates_args=())
def writes_its_input(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2) + 1


writes_its_input.register_fake(lambda x: torch.empty_like(x))


def twice(x):
    return twice_with_a_wrong_backward(x)


def tripled(x):
    return _Tripled.apply(x)


@pytest.mark.parametrize(("function", "text"), [(twice, "gradcheck"), (tripled, "gradcheck")])
def test_gradient_that_is_wrong_on_one_device_is_found(function, text):
    """On a mesh it would be compared with itself. No rank is asked."""
    with pytest.raises(ConformanceError, match=f"on one device, before any layout: .*{text}"):
        check_op(None, function, tensor(4, 3), meshes=ONE)
    assert wrong_alone(function, sample(tensor(4, 3)).options(no_gradcheck="it is not meant to be")) is None


def test_custom_operator_that_breaks_the_rules_of_torch_is_found():
    with pytest.raises(ConformanceError, match=r"torch\.library\.opcheck of hp_mutations\.writes_its_input"):
        check_op(None, writes_its_input, tensor(4, 3, grad=False), meshes=ONE)
    declared = sample(tensor(4, 3, grad=False)).options(no_opcheck="it is meant to")
    assert wrong_alone(writes_its_input, declared) is None


class WrongWhenSharded(DistributedOp):
    """By its three phases; the cut dim is not reduced."""

    def infer_layout(self, layouts, extra_args):
        return layouts[0]


@distributed(WrongWhenSharded)
def minus_the_mean(x):
    return x - x.mean()


def test_three_phase_rule_is_judged_on_a_layout_that_shards_also_with_one_layout(ranks):
    with pytest.raises(ConformanceError, match=r"S\(0\).*\n.*values differ"):
        check_op(ranks, minus_the_mean, tensor(4, 3), meshes=ONE, max_layouts=1)


def reduces_in_secret(x):
    group = torch.distributed.group.WORLD
    all_reduce(torch.zeros(()), group)
    return x * 2


@distributed(Locally, local=reduces_in_secret)
def talks(x):
    return x * 2


def test_undeclared_collective_is_found(ranks):
    with pytest.raises(ConformanceError, match="1 all_reduce in the forward, declared at most 0"):
        check_op(ranks, talks, tensor(4), meshes=ONE, declared=OpUnderTest(talks, max_collectives=at_most()))
