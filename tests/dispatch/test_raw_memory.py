"""What asks a DTensor for its memory is refused, with the function that asked and what to do; nothing else is."""

import importlib
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils import dlpack

from hyper_parallel import DTensor, Replicate, Shard, SkipDTensorDispatch, distribute_tensor
from hyper_parallel.errors import MissingOpError
from hyper_parallel.registry.kernel_packages import KERNEL_PACKAGES
from hyper_parallel.registry.registry import Registry, use_registry
from hyper_parallel.rules import Listed
from hyper_parallel.testing import mesh_of


def spread(value, *placements):
    return distribute_tensor(value, mesh_of((2,)), placements or [Shard(0)])


QUESTIONS = {
    "data_ptr": lambda x: x.data_ptr(),
    "torch.Tensor.data_ptr": torch.Tensor.data_ptr,
    "untyped_storage": lambda x: x.untyped_storage(),
    "storage": lambda x: x.storage(),
    "typed_storage": lambda x: x._typed_storage(),
    "__dlpack__": lambda x: x.__dlpack__(),
    "to_dlpack": lambda x: dlpack.to_dlpack(x),
    "from_dlpack": torch.from_dlpack,
    "__cuda_array_interface__": lambda x: x.__cuda_array_interface__,
    "share_memory_": lambda x: x.share_memory_(),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_memory_is_refused_with_what_to_ask_instead(name, placement):
    x = spread(torch.ones(3, 2), placement)
    for _ in range(2):
        with pytest.raises(MissingOpError, match=r"DTensor has no memory of its own.*x\.to_local\(\)\.\w+") as caught:
            QUESTIONS[name](x)
        assert "autograd.Function" not in str(caught.value)


@pytest.mark.ranks(2)
def test_code_below_python_gets_no_null_pointer():
    """As extensions do that are bound by pybind: by the C++ tensor."""
    x = spread(torch.ones(3, 2), Shard(1))
    swapped = x.clone()
    swapped.data = spread(torch.ones(3, 2, dtype=torch.float64), Shard(1))
    tensors = [x, x * 2, x.t(), nn.Parameter(x), x.detach(), x.sum(), x.redistribute(placements=[Replicate()]), swapped]
    for tensor in [*tensors, *x.split(1), (x * nn.Parameter(x)).sum()]:
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch._C._to_dlpack(tensor)


def kernel(x, out):
    """What Triton's launcher and ctypes do: by the address."""
    return x.data_ptr() + out.data_ptr()


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps=1e-5):
        kernel(x, torch.empty_like(x))

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class KernelInBackward(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        grad.untyped_storage()


class Below(torch.autograd.Function):
    """Reaches C++ that asks no torch function, as code bound by pybind does."""

    @staticmethod
    def forward(ctx, x):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.relu(x)


@pytest.mark.ranks(2)
def test_the_function_that_asked_is_named_with_two_lines_for_a_rule():
    x = spread(torch.ones(3, 2)).requires_grad_()
    name = f"{__name__}.Kernel.apply"
    with pytest.raises(MissingOpError) as caught:
        Kernel.apply(x, x)
    assert caught.value.op_name == name
    assert f'Listed("{name}", signature="x, weight, eps=1e-05", rows=[{{"x": 0, "out": 0}}])' in str(caught.value)
    assert "from hyper_parallel.rules import Listed" in str(caught.value)
    with pytest.raises(MissingOpError, match=r'Listed\(".*KernelInBackward.apply", signature="x"'):
        KernelInBackward.apply(x).sum().backward()
    with pytest.raises(RuntimeError, match=r'(?s)below PyTorch.*Listed\(".*Below.apply", signature="x"'):
        Below.apply(x)


@pytest.mark.ranks(2)
def test_the_two_lines_do():
    module = kernels("acme_fused")
    x, weight = spread(torch.arange(6.0).reshape(3, 2)).requires_grad_(), spread(torch.ones(2) * 3, Replicate())
    with use_registry(Registry()):
        for _ in range(2):
            with pytest.raises(MissingOpError) as caught:
                module.Fused.apply(x, weight)
        exec("\n".join(line.strip() for line in str(caught.value).splitlines()[2:4]))
        out = module.Fused.apply(x, weight)
        assert out.placements == (Shard(0),)
        torch.testing.assert_close(out.full_tensor(), torch.arange(6.0).reshape(3, 2) * 3)
        out.sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), torch.full((3, 2), 3.0))


@pytest.mark.ranks(2)
def test_a_local_class_is_told_to_use_custom_shard():
    class Here(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.data_ptr()

    with pytest.raises(MissingOpError, match=r"inside of .*Here\.apply: call that on local tensors.*custom_shard"):
        Here.apply(spread(torch.ones(3)))


# -- libraries of kernels ----------------------------------------------------------------------------------------------

SOURCE = """
import torch

seen = []


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        seen.append(type(x))
        ctx.save_for_backward(weight)
        x.data_ptr()
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad * weight, None


class Child(Fused):
    pass


apply = Fused.apply
"""


def kernels(name, file=None):
    """A library of this name, imported now."""
    module = types.ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    exec(SOURCE, module.__dict__)
    return module


HUB = "/cache/models--kernels-community--norm/snapshots/1f/build/torch29-cxx11-cu128-x86_64-linux/norm/__init__.py"
LIBRARIES = [(f"{package}.ops.fused", None) for package in KERNEL_PACKAGES] + [("norm_7f3a", HUB)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "file"), LIBRARIES, ids=lambda value: str(value).partition(".")[0])
def test_known_kernels_are_refused_before_they_run(name, file):
    module, x = kernels(name, file), spread(torch.ones(3, 2))
    try:
        for function in (module.Fused.apply, module.apply, module.Child.apply, lambda *a: module.Fused.apply(*a)):
            with pytest.raises(MissingOpError, match=rf"(?s){name}\.\w+\.apply \(.*by a kernel.*rules import Listed"):
                function(x, x)
        assert module.seen == []
        assert module.Fused.apply(torch.ones(2), torch.ones(2)).tolist() == [1, 1]  # others go the old way
        with SkipDTensorDispatch():
            assert type(module.Fused.apply(x, x)) is torch.Tensor
        assert module.seen == [torch.Tensor, torch.Tensor]
    finally:
        sys.modules.pop(name)


@pytest.mark.ranks(2)
def test_a_rule_of_a_known_kernel_counts():
    name = "fla.ops.ruled"
    x, weight = spread(torch.ones(3, 2)), spread(torch.ones(2) * 3, Replicate())
    with use_registry(Registry()) as registry:
        module = kernels(name)
        try:
            rule = Listed(f"{name}.Fused.apply", signature="x, weight", rows=[{"x": 0, "out": 0}])
            registry.register(f"{name}.Fused.apply", rule, override=True)
            assert module.Fused.apply(x, weight).full_tensor().tolist() == [[3, 3]] * 3
            assert set(module.seen) == {torch.Tensor}
            with pytest.raises(MissingOpError, match=r"Child\.apply"):
                module.Child.apply(x, weight)
        finally:
            sys.modules.pop(name)


@pytest.mark.ranks(2)
def test_functions_written_in_torch_functions_go_on_working():
    """Of a library that is not known for kernels, and the reentrant checkpoint of PyTorch."""
    from torch.utils.checkpoint import checkpoint

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        def backward(ctx, grad):
            return grad * 3 * ctx.saved_tensors[0] ** 2

    x = spread(torch.arange(3.0)).requires_grad_()
    checkpoint(lambda t: Cube.apply(t).sin(), x, use_reentrant=True).sum().backward()
    plain = torch.arange(3.0).requires_grad_()
    (plain**3).sin().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


# -- what PyTorch asks itself ------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_the_copy_on_the_host_of_async_save():
    staging = importlib.import_module("torch.distributed.checkpoint._state_dict_stager")
    x = spread(torch.arange(5.0))
    staged = staging.StateDictStager(pin_memory=False, share_memory=False).stage(
        {"x": x, "again": [x], "n": torch.ones(2)}
    )
    assert type(staged["x"]) is DTensor
    assert staged["again"][0] is staged["x"]
    assert staged["x"].layout is x.layout
    before = x.full_tensor()
    x.mul_(2)
    assert torch.equal(staged["x"].full_tensor(), before)


@pytest.mark.ranks(2)
def test_recurrent_layers_do_not_flatten_weights_that_are_spread():
    layer = nn.LSTM(2, 3)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(spread(parameter.detach(), Replicate())))
    layer.flatten_parameters()
    layer.to(torch.float64)
    assert layer.weight_hh_l0.dtype is torch.float64
