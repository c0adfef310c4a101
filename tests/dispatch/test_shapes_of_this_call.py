"""Shapes and layouts of outputs come from the call, whatever was called before with the same inputs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import (
    CommTrace,
    DFunction,
    DistributedOp,
    Replicate,
    Shard,
    custom_shard,
    distribute_tensor,
    init_device_mesh,
)

R = Replicate()


def mesh(size=2):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def rows(*shape, dtype=torch.float64):
    return torch.arange(float(torch.Size(shape).numel()), dtype=dtype).view(shape)


def spread(tensor, size=2):
    return distribute_tensor(tensor, mesh(size), [Shard(0)])


@pytest.mark.ranks(2)
def test_numbers_flags_and_slices_of_a_custom_function():
    x, dx = rows(8, 6).requires_grad_(), spread(rows(8, 6)).requires_grad_()

    def part(t, n, flipped=False, where=slice(None), like=None):
        t = t[:, :n][:, where]
        t = t.flip(1) if flipped else t
        return t if like is None else t.to(like)

    sharded = custom_shard(part, mesh(), out_layouts=[Shard(0)])
    calls = [
        ((2,), {}), ((4,), {}), ((4, True), {}), ((4,), {"where": slice(1, 3)}), ((4,), {"where": slice(0, 4, 2)}),
        ((4,), {"like": torch.float32}), ((6,), {}), ((0,), {}), ((2,), {}),
    ]  # fmt: skip
    for args, options in calls:
        want, got = part(x, *args, **options), sharded(dx, *args, **options)
        assert got.shape == want.shape
        torch.testing.assert_close(got.full_tensor(), want)
        if want.numel():
            x.grad = dx.grad = None
            want.mean().backward()
            got.mean().backward()
            torch.testing.assert_close(dx.grad.full_tensor(), x.grad)


@pytest.mark.ranks(3)
def test_sizes_that_differ_by_rank_are_found_on_every_rank():
    """Whether a call before went well or not."""
    x = spread(rows(6, 2), size=3)
    chosen = custom_shard(lambda t, mask: t[mask[: len(t)]], mesh(3), out_layouts=[Shard(0)])
    everything, first = torch.tensor([True, True]), torch.tensor([True, False])
    mine = everything if dist.get_rank() < 2 else first
    none = torch.tensor([False, False])
    for _ in range(2):
        torch.testing.assert_close(chosen(x, everything).full_tensor(), rows(6, 2))
        torch.testing.assert_close(chosen(x, mine).full_tensor(), rows(6, 2)[:5])
        assert chosen(x, none).shape == (0, 2)
        with pytest.raises(ValueError, match=r"output 0 .*\n.*wanted"):
            chosen(x, first if dist.get_rank() == 1 else everything)
    doubled = custom_shard(lambda t: torch.cat([t, t]), mesh(3), out_layouts=[Shard(0)])
    with pytest.raises(ValueError, match=r"\(6, 2\), wanted \(5, 2\)"):
        doubled(spread(rows(7, 2), size=3))
    torch.testing.assert_close(doubled(x).full_tensor().sum(), rows(6, 2).sum() * 2)


@pytest.mark.ranks(2)
def test_what_a_custom_function_costs():
    x = spread(rows(8, 6))
    for placement, count in ((Shard(0), {"all_gather": 1}), (R, {})):
        function = custom_shard(lambda t: (t * 1, t + 1), mesh(), out_layouts=([placement], [placement]))
        given = x.redistribute(placements=[placement])
        for _ in range(2):
            with CommTrace() as trace:
                function(given)
            assert trace.counts == count


class Chosen(DFunction):
    """The rows that begin with a positive number."""

    _op_name = "first_layout_of_this_call"

    @staticmethod
    def forward(ctx, x):
        return x[x[:, 0] > 0]

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


class Part(DFunction):
    _op_name = "first_layout_of_this_call"

    @staticmethod
    def forward(ctx, x, n, flipped=False):
        ctx.shape, ctx.n, ctx.flipped = x.shape, n, flipped
        return x[:, :n].flip(1) if flipped else x[:, :n].clone()

    @staticmethod
    def backward(ctx, grad):
        back = grad.new_zeros(ctx.shape)
        back[:, : ctx.n] = grad.flip(1) if ctx.flipped else grad
        return back, None, None


class Doubled(DFunction):
    _op_name = "first_layout_of_this_call"

    @staticmethod
    def forward(ctx, x):
        return torch.cat([x, x])

    @staticmethod
    def backward(ctx, grad):
        return grad[: len(grad) // 2] + grad[len(grad) // 2 :]


class FirstLayout(DistributedOp):
    def infer_layout(self, cache_values):
        return (cache_values[0],), None


def registered():
    FirstLayout("first_layout_of_this_call")


@pytest.mark.ranks(3)
def test_results_of_a_dfunction():
    registered()
    x, dx = rows(6, 4).requires_grad_(), spread(rows(6, 4), size=3).requires_grad_()
    for n in (2, 3, 4, 2):
        for flag in (False, True):
            x.grad = dx.grad = None
            got, want = Part.apply(dx, n, flag), Part.apply(x, n, flag)
            assert got.shape == want.shape
            got.mean().backward()
            want.mean().backward()
            torch.testing.assert_close(dx.grad.full_tensor(), x.grad)
    assert Doubled.apply(dx).shape == (12, 4)
    with pytest.raises(Exception, match="On some rank"):
        Doubled.apply(spread(rows(7, 4), size=3))


@pytest.mark.ranks(3)
def test_results_of_a_dfunction_that_depend_on_the_values():
    registered()
    for _ in range(2):
        for dropped, right in ((None, True), (5, True), (2, False), (0, False)):
            x = rows(6, 4) + 1
            if dropped is not None:
                x[dropped, 0] = -1
            dx = spread(x, size=3)
            if right:
                torch.testing.assert_close(Chosen.apply(dx).full_tensor(), x[x[:, 0] > 0])
            else:
                with pytest.raises(ValueError, match="output 0"):
                    Chosen.apply(dx)
