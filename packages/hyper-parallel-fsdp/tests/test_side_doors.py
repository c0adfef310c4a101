"""Gradients that leave a module otherwise than by its output, and outputs that are not what modules usually return."""

import collections
import types
from typing import ClassVar

import pytest
import torch
from fsdp_nets import Net, batch, descend, mine, pair, same_gradients, wrap
from torch import nn

from hyper_parallel import CommTrace, DTensor
from hyper_parallel_fsdp import fully_shard

SEEN = []
LAST = None


class Router(nn.Module):
    """Leaves an auxiliary loss where ``place`` says."""

    seen: ClassVar = []

    def __init__(self, place):
        super().__init__()
        self.place, self.gate, self.expert = place, nn.Linear(6, 5), nn.Linear(6, 6)
        self.held = types.SimpleNamespace(losses=[])
        collected = []

        def collect(value):
            collected.append(value)

        self.collect, self.collected = collect, lambda: collected
        self.hook = self.gate.register_forward_hook(lambda mod, args, out: collect(out.square().mean()))
        if place != "hook":
            self.hook.remove()
        self.register_buffer("kept", None)

    def forward(self, x, given=None):
        out = x + torch.tanh(self.expert(torch.tanh(self.expert(x))))
        loss = self.gate(torch.tanh(self.gate(x) @ self.gate.weight)).square().mean()  # its backward reads the weight
        self.leave(loss, given)
        return out

    def leave(self, loss, given):
        global LAST
        place = self.place
        if place == "attribute":
            self.loss = loss
        elif place == "view":
            self.loss = loss.expand(3)[1:]
        elif place == "buffer":
            self.kept = loss
        elif place == "object":
            self.held.losses.append({"aux": (loss,)})
        elif place == "closure":
            self.collect(loss)
        elif place == "class":
            Router.seen.append(loss)
        elif place == "global list":
            SEEN.append(loss)
        elif place == "global":
            LAST = loss if LAST is None else LAST + loss
        elif place == "argument":
            given.append(loss)


class Routed(Net):
    place = "attribute"

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Router(self.place) for _ in range(2))

    def forward(self, ids):
        x, self.given = self.embed(ids), []
        for block in self.blocks:
            x = block(x, self.given) if self.place == "argument" else block(x)
        return self.head(x)

    def losses(self):
        """What the last forward left; forgotten here."""
        global LAST
        found = [b.loss if self.place == "attribute" else b.loss[0] for b in self.blocks if hasattr(b, "loss")]
        found += [b.kept for b in self.blocks if b.kept is not None]
        found += [v["aux"][0] for b in self.blocks for v in b.held.losses]
        found += [v for b in self.blocks for v in b.collected()] + Router.seen + SEEN + self.given
        found += [LAST / 2] * 2 if LAST is not None else []
        for block in self.blocks:
            block.held.losses.clear()
            block.collected().clear()
        Router.seen.clear()
        SEEN.clear()
        LAST = None
        assert len(found) == (4 if self.place == "hook" else 2)
        return sum(found)


PLACES = [
    "attribute",
    "view",
    "buffer",
    "object",
    "closure",
    "class",
    "global list",
    "global",
    "argument",
    "hook",
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("freed", [None, True])
@pytest.mark.parametrize("place", PLACES)
def test_losses_left_beside_the_output(place, freed):
    kind = type("Kind", (Routed,), {"place": place})
    plain, net = pair(kind)
    wrap(net, reshard_after_forward=freed)
    for number in range(4):
        with CommTrace() as trace:
            for each, part in ((plain, lambda whole: whole), (net, mine)):
                ids = part(batch(number)[0])
                out = each(ids).square().mean()
                loss = each.losses()
                (loss if number % 2 else out + loss).backward()
        assert trace.counts["reduce_scatter"] == 3
        same_gradients(net, plain)
        descend(net)
        descend(plain)


class Held:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


CARRIERS = {
    "object": (lambda t: types.SimpleNamespace(hidden=t), lambda out: out.hidden),
    "slots": (Held, lambda out: out.value),
    "deque": (lambda t: collections.deque([t, 1]), lambda out: out[0]),
    "set": (lambda t: {t}, lambda out: next(iter(out))),
    "function": (lambda t: lambda: t, lambda out: out()),
    "nested": (lambda t: {"a": [collections.deque([Held((t,))])]}, lambda out: out["a"][0][0].value[0]),
    "distribution": (lambda t: torch.distributions.Normal(t, 1.0), lambda out: out.mean),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", CARRIERS)
def test_outputs_in_all_kinds_of_objects(kind):
    put, get = CARRIERS[kind]

    class Carries(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 6)

        def forward(self, x):
            return put(self.second(torch.tanh(self.first(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Carries() for _ in range(2)), nn.Linear(6, 3)

        def forward(self, x):
            for block in self.blocks:
                x = get(block(x))
            return self.head(x)

    plain, net = pair(Model)
    wrap(net, reshard_after_forward=True)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        plain(x).square().mean().backward()
        net(mine(x)).square().mean().backward()
        same_gradients(net, plain)


@pytest.mark.ranks(2)
def test_iterators_are_refused():
    class Lazy(nn.Linear):
        def forward(self, x):
            return (super(Lazy, self).forward(row) for row in x)

    net = nn.Sequential(fully_shard(Lazy(3, 3)))
    fully_shard(net)
    with pytest.raises(TypeError, match=r"FSDPLazy returned a generator.*return a list or tuple"):
        net(torch.randn(2, 3))


@pytest.mark.ranks(2)
def test_writes_to_views_that_were_returned():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 12)

        def forward(self, x):
            return self.second(torch.sin(self.first(x)))[:, 3:9]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Views() for _ in range(2)), nn.Linear(6, 3)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
                x.mul_(2)
                x[:, :2] += 1
            return self.head(x)

    plain, net = pair(Model)
    wrap(net, reshard_after_forward=True)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        with CommTrace() as trace:
            for each, part in ((plain, x), (net, mine(x))):
                loss = each(part).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
        assert trace.counts["reduce_scatter"] == 6
        same_gradients(net, plain)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.randn(9, 6)), nn.Parameter(torch.ones(6))

    def forward(self, x, kind="slice"):
        if kind == "slice":
            return self.table[: x.shape[0]]
        if kind == "both":
            return {"table": self.table, "scale": (self.scale.view(2, 3), x * self.scale)}
        return self.table if kind == "whole" else types.SimpleNamespace(table=self.table)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("freed", [None, True, False])
def test_modules_that_return_their_own_parameters(freed):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Positions()]), nn.Linear(6, 3)

        def forward(self, x):
            both = self.blocks[0](x, "both")
            first, (second, third) = both["table"], both["scale"]
            x = x + self.blocks[0](x) + first.sum(0) * second.view(6) + third + self.blocks[0](x, "whole")[0]
            return self.head(x), self.head.weight

    plain, net = pair(Model)
    wrap(net, reshard_after_forward=freed)
    for _ in range(2):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))[:4]
        for each in (plain, net):  # the same batch everywhere: rows meet rows of the table
            out, weight = each(x)
            (out.square().mean() + weight.square().sum()).backward()
        assert not isinstance(weight, DTensor)
        same_gradients(net, plain)
        with torch.no_grad():
            torch.testing.assert_close(net.blocks[0](x, "whole"), plain.blocks[0](x, "whole"))
            torch.testing.assert_close(net.blocks[0](x), plain.blocks[0](x))
    with pytest.raises(TypeError, match=r"FSDPPositions returned its own parameter.*SimpleNamespace.*clone"):
        net.blocks[0](x, "object")


@pytest.mark.ranks(2)
def test_hooks_of_parameters_get_the_reduced_gradient():
    plain, net = pair()
    wrap(net)
    called = []

    def halve(gradient):
        called.append(gradient)
        return gradient * 0.5

    names = ["embed.weight", "blocks.0.up.bias", "blocks.2.down.weight"]
    for each in (plain, net):
        for name in names:
            each.get_parameter(name).register_hook(halve)
    for step in range(2):
        ids, _ = batch(step)
        for each, part in ((plain, ids), (net, mine(ids))):
            each(part).square().mean().backward()
        same_gradients(net, plain)
        assert len(called) == (step + 1) * 2 * len(names)
        assert all(isinstance(g, DTensor) for g in called[-len(names) :])
    with net.no_sync():
        net(mine(batch(0)[0])).sum().backward()
    assert len(called) == 4 * len(names)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_from_before_wrapping_are_refused(kind):
    net = nn.Linear(3, 2)
    getattr(net.bias, kind)(lambda gradient: None)
    with pytest.raises(ValueError, match=r"'bias' has hooks .* Register them after fully_shard"):
        fully_shard(net)


@pytest.mark.ranks(2)
def test_not_gathered_in_backward():
    plain, net = pair()
    wrap(net, reshard_after_forward=True)
    for each, part in ((plain, lambda whole: whole), (net, mine)):
        each(part(batch(0)[0])).square().mean().backward()
    same_gradients(net, plain)
    net.blocks[0].set_unshard_in_backward(False)
    with pytest.raises(RuntimeError, match=r"FSDPBlock.*set_unshard_in_backward"):
        net(mine(batch(0)[0])).square().mean().backward()


@pytest.mark.ranks(2)
def test_an_embedding_needs_no_gather_in_backward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Embedding(11, 6)])
            self.head = nn.Linear(6, 11)

        def forward(self, ids):
            return self.head(self.blocks[0](ids))

    plain, net = pair(Model)
    wrap(net, reshard_after_forward=True)
    net.blocks[0].set_unshard_in_backward(False)
    for number in range(3):
        plain(batch(number)[0]).square().mean().backward()
        with CommTrace() as trace:
            net(mine(batch(number)[0])).square().mean().backward()
        assert trace.counts == {"all_gather": 3, "reduce_scatter": 2}
        same_gradients(net, plain)
