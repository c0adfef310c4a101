"""Functions that somebody else compiled: on DTensors they give one device's numbers at every call, or say at the first
what to do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hyper_parallel import DTensor, Replicate, Shard, custom_shard, distribute_tensor, zeros
from hyper_parallel.testing import mesh_of

SIZES = [(4, 3), (7, 3), (1, 2), (4, 3)]  # divided evenly, unevenly, with an empty shard; and the first again


class Gate(nn.Module):
    """An activation without parameters."""

    def forward(self, x):
        return F.silu(x) * x.sigmoid()


def written(x):
    y = x * 1
    y.mul_(3)
    y[0] += 1
    return y.add_(x, alpha=2)


def branching(x):
    if x.shape[0] % 2 and x.requires_grad:
        return x.softmax(-1).sum(0) + x.shape[0]
    return torch.zeros_like(x) + x.numel()


PROGRAMS = {
    "methods": lambda x: (x * 2).relu() + 1,
    "functions": lambda x: torch.add(F.gelu(torch.relu(x)), x),
    "gate": Gate(),
    "in place": written,
    "branches": branching,
    "views": lambda x: x.unsqueeze(0).transpose(1, 2).reshape(x.shape[1], -1).t() - x.mean(),
    "reductions": lambda x: x.norm() + x.std() + x.amax(0).sum(),
}


def compile(function, **options):
    """Not as compiled before: functions without a graph are skipped from then on."""
    torch._dynamo.reset()
    return torch.compile(function, **{"backend": "eager", **options})


def spread(value, placement=None):
    tensor = distribute_tensor(value, mesh_of((2,)), [placement or Shard(0)])
    return tensor.requires_grad_() if value.requires_grad else tensor


def check(compiled, plain, sizes=SIZES):
    """Each call against one device, and the gradient."""
    generator = torch.Generator().manual_seed(0)
    for placement in (Shard(0), Replicate()):
        for size in sizes:
            value = torch.randn(*size, dtype=torch.float64, generator=generator).requires_grad_()
            x = spread(value.detach().requires_grad_(), placement)
            out, want = compiled(x), plain(value)
            assert type(out) is DTensor
            torch.testing.assert_close(out.full_tensor(), want)
            if want.requires_grad:
                out.sum().backward()
                want.sum().backward()
                torch.testing.assert_close(x.grad.full_tensor(), value.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_gives_the_numbers_of_one_device(name):
    program = PROGRAMS[name]
    check(compile(program), program)


@pytest.mark.ranks(2)
def test_the_default_backend():
    program = PROGRAMS["methods"]
    check(compile(program, backend="inductor"), program)


@pytest.mark.ranks(2)
def test_a_module_compiled_in_place():
    gate = Gate()
    gate.compile(backend="eager")
    check(gate, Gate())


@pytest.mark.ranks(2)
def test_operators_called_before_are_no_other_case():
    """What is remembered of them, too, is Python that a compiler could trace."""
    program = PROGRAMS["methods"]
    for _ in range(2):
        program(spread(torch.ones(4, 3)))
    check(compile(program), program)


@pytest.mark.ranks(2)
def test_plain_tensors_and_dtensors_in_turn():
    program = PROGRAMS["gate"]
    compiled = compile(program)
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(compiled(x), program(x))
        torch.testing.assert_close(compiled(spread(x)).full_tensor(), program(x))


@pytest.mark.ranks(2)
def test_what_makes_dtensors_inside():
    """Factories, redistribution, local tensors and functions of local tensors."""
    double = custom_shard(lambda t: (t * 2).relu(), out_layouts=[Shard(0)], device_mesh=mesh_of((2,)))

    def program(x):
        local = x.redistribute(placements=[Shard(1)]).to_local() * 2
        again = DTensor.from_local(local, x.device_mesh, [Shard(1)], shape=x.shape).redistribute(placements=[Shard(0)])
        return double(again + zeros(*x.shape, device_mesh=x.device_mesh, placements=[Shard(0)]))

    compiled = compile(program)
    for size in SIZES:
        value = torch.randn(*size)
        torch.testing.assert_close(compiled(spread(value)).full_tensor(), (value * 4).relu())


@pytest.mark.ranks(2)
def test_no_frame_of_ours_is_compiled():
    """Only the user's functions of plain tensors are: nothing of the dispatcher is guarded on, so nothing is stale."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    def scale(plain):
        return plain.sum() + 1

    def program(x, plain):
        return F.layer_norm((x * 2).relu(), [3]) + scale(plain)

    compiled = compile(program, backend=backend)
    for _ in range(2):
        compiled(spread(torch.ones(4, 3)), torch.ones(2))
    assert [len(graph) for graph in graphs] == [2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"backend": "aot_eager"}], ids=str)
def test_dtensors_that_are_no_arguments(options):
    """In a container, a closure, an attribute and a module's parameters."""
    holder, layer = type("Holder", (), {})(), nn.Linear(3, 2)

    def program(pair):
        return layer(pair["x"].relu() * holder.scale) + pair["x"][:, :2]

    compiled = compile(program, **options)
    plain = [layer.weight, layer.bias]
    parameters = [nn.Parameter(spread(p.detach(), Replicate())) for p in plain]
    for rows in (4, 7, 1, 4):
        value = torch.randn(rows, 3)
        holder.scale, (layer.weight, layer.bias) = torch.ones(rows, 3) * 3, plain
        want = program({"x": value})
        holder.scale, (layer.weight, layer.bias) = spread(holder.scale), parameters
        out = compiled({"x": spread(value)})
        torch.testing.assert_close(out.full_tensor(), want)
        out.sum().backward()
        want.sum().backward()
    torch.testing.assert_close(layer.weight.grad.full_tensor(), plain[0].grad)


REFUSED = r"(?s)DTensors of hyper_parallel.*to_local\(\).*fullgraph=True.*set_stance\(.force_eager.\)"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_is_refused_at_the_first_call(name):
    compiled = compile(PROGRAMS[name], fullgraph=True)
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=REFUSED):
            compiled(spread(torch.ones(4, 3)))


@pytest.mark.ranks(2)
def test_the_way_round_that_is_named():
    program = PROGRAMS["methods"]
    compiled = compile(program, fullgraph=True)
    with torch.compiler.set_stance("force_eager"):
        check(compiled, program)
    local = spread(torch.ones(4, 3)).to_local()
    torch.testing.assert_close(compiled(local), program(local))


def adam_step(parameter, grad, average, square, step, lr):
    """As libraries of quantised optimizers write it: one compiled function for one parameter."""
    average.copy_(average.lerp(grad, 0.1))
    square.copy_(square.lerp(grad.square(), 0.001))
    step_size, correction = lr / (1 - 0.9**step), (1 - 0.999**step).sqrt()
    parameter.copy_(parameter - step_size * average / (square.sqrt() / correction + 1e-8))


def steps(function, make):
    """A parameter after three steps."""
    parameter = make(torch.arange(12.0).reshape(4, 3) / 10)
    average, square = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for count in range(1, 4):
        parameter.requires_grad_()
        parameter.square().sum().backward()
        grad, parameter = parameter.grad, parameter.detach()
        function(parameter, grad, average, square, torch.tensor(float(count)), torch.tensor(0.1))
    return parameter


@pytest.mark.ranks(2)
def test_a_compiled_step_of_one_parameter():
    compiled = compile(adam_step, dynamic=False)
    torch.testing.assert_close(steps(compiled, spread).full_tensor(), steps(adam_step, torch.clone))
    whole = compile(adam_step, fullgraph=True, dynamic=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REFUSED):
        steps(whole, spread)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(steps(whole, spread).full_tensor(), steps(adam_step, torch.clone))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_compiled_optimizer(kind):
    torch.manual_seed(0)
    value = torch.randn(7, 3)
    losses = []
    for parameter in (nn.Parameter(spread(value.clone())), nn.Parameter(value.clone())):
        optimizer = kind([parameter], lr=0.1)
        step, seen = compile(optimizer.step), []
        for _ in range(4):
            loss = (parameter * 2 - 1).square().mean()
            loss.backward()
            step()
            optimizer.zero_grad()
            seen.append(loss.item())
        losses.append(seen)
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.ranks(2)
def test_a_compiled_loss():
    def loss(logits, target):
        return F.cross_entropy(logits.float(), target) + 0.1 * logits.logsumexp(-1).square().mean()

    compiled = compile(loss)
    for rows in (4, 7, 4):
        logits, target = torch.randn(rows, 5, requires_grad=True), torch.arange(rows) % 5
        x = spread(logits.detach().requires_grad_())
        out, want = compiled(x, spread(target)), loss(logits, target)
        torch.testing.assert_close(out.full_tensor(), want)
        out.backward()
        want.backward()
        torch.testing.assert_close(x.grad.full_tensor(), logits.grad)


@pytest.mark.ranks(2)
def test_export_is_refused():
    with pytest.raises(Exception, match="DTensor"):
        torch.export.export(Gate(), (spread(torch.ones(4, 3)),))
