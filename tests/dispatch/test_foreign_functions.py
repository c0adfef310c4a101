"""The ``apply`` of another library's autograd function, served by a rule that names it."""

import importlib
import subprocess
import sys
import types
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from hyper_parallel import DTensor, Shard, Strategy, StrategyOp, distribute_tensor
from hyper_parallel._rules.op import DistributedOp
from hyper_parallel._rules.strategy import S
from hyper_parallel.errors import MissingOpError
from hyper_parallel.registry import Registry, use_registry
from hyper_parallel.testing import mesh_of
from hyper_parallel.utils.import_hooks import when_imported


class Elementwise(DistributedOp):
    """Laid out as its first input."""

    def infer_layout(self, cache_values):
        return (cache_values[0],), None


@contextmanager
def registered(*names):
    """A registry of its own with rules for these functions, and the library not imported yet."""
    with (
        patch.object(sys, "path", [str(Path(__file__).parents[1] / "stand_ins"), *sys.path]),
        use_registry(Registry()) as own,
    ):
        sys.modules.pop("acme_kernels", None)
        for name in names:
            own.register(f"acme_kernels.{name}", Elementwise(name))
        yield own
    sys.modules.pop("acme_kernels", None)


def check(function, *more):
    x = torch.arange(6.0)
    spread = distribute_tensor(x, mesh_of((2,)), [Shard(0)]).requires_grad_()
    out = function(spread, *more)
    plain = x.clone().requires_grad_()
    want = function(plain, *more)
    want.sum().backward()
    out.sum().backward()
    torch.testing.assert_close(out.full_tensor(), want)
    torch.testing.assert_close(spread.grad.full_tensor(), plain.grad)


def library():
    return importlib.import_module("acme_kernels")


@pytest.mark.ranks(2)
def test_a_library_that_is_imported_later():
    with registered("Scale.apply"):
        module = library()
        check(module.scaled, 3.0)
        assert module.seen[0] == (torch.Tensor, (3,))
        assert DTensor not in dict(module.seen)


@pytest.mark.ranks(2)
def test_a_library_that_was_imported_before():
    with registered() as registry:
        module = library()
        registry.register("acme_kernels.Scale.apply", Elementwise("scale"))
        check(module.scaled, 3.0)
        assert module.seen[0] == (torch.Tensor, (3,))
        assert DTensor not in dict(module.seen)


def test_a_class_is_changed_once():
    with registered("Scale.apply") as registry:
        served = library().Scale.apply
        registry.register("acme_kernels.Scale.apply", Elementwise("another"), override=True)
        assert library().Scale.apply == served


@pytest.mark.ranks(2)
def test_a_library_that_is_imported_again():
    with registered("Scale.apply"):
        module = library()
        assert module.__spec__.origin == module.__file__
        before = module.Scale
        assert importlib.reload(module) is module
        assert module.Scale is not before
        sys.modules.pop("acme_kernels")
        for function in (module.scaled, library().scaled, before.apply):  # of who imported it before, too
            check(function, 2.0)
            assert (module.seen + library().seen)[0][0] is torch.Tensor


def test_a_loader_of_several_modules():
    """As that of a zip file, or of pytest's assertions: what comes after one module comes after no other."""

    class Loader:
        create_module = staticmethod(lambda spec: None)
        exec_module = staticmethod(lambda module: None)

    loader, seen = Loader(), []
    finder = types.SimpleNamespace(
        find_spec=lambda name, *_: ModuleSpec(name, loader) if name.startswith("acme_of_") else None
    )
    when_imported("acme_of_one", seen.append)
    with patch.object(sys, "meta_path", [*sys.meta_path, finder]):
        modules = [importlib.import_module(f"acme_of_{name}") for name in ("one", "two")]
    assert seen == modules[:1]
    assert "exec_module" not in vars(loader)


@pytest.mark.ranks(2)
def test_functions_whose_forward_has_no_context():
    with registered("NewForm.apply"):
        check(library().NewForm.apply, 2.0)


class ByName(StrategyOp):
    """The names in an order of its own."""

    signature = "factor, bias, x, out"

    def strategies(self, call):
        yield Strategy({"x": S(0)}, S(0))

    def output_shapes(self, call):
        return [call.spec("x").shape]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", [Elementwise, ByName])
@pytest.mark.parametrize("given", [(None, 3.0, 1.0), (None, 3.0), ()], ids=str)
def test_all_arguments_arrive(op, given):
    """One is called ``out``, which writes nothing here; and the function asserts that it is on a device."""
    with registered() as registry:
        registry.register("acme_kernels.OnDevice.apply", op("on_device"))
        module = library()
        check(module.OnDevice.apply, *given)
        assert DTensor not in dict(module.seen)


@pytest.mark.ranks(2)
def test_a_name_for_the_apply():
    with registered("OnDevice.apply"):
        module = library()
        check(module.on_device, None, 3.0)
        assert DTensor not in dict(module.seen)


@pytest.mark.ranks(2)
def test_an_apply_of_its_own():
    with registered("OwnApply.apply"):
        check(library().OwnApply.apply)


FIRST = """
import os, sys
sys.path.insert(0, {stand_ins!r})
import flash_attn, torch
from hyper_parallel import Replicate, distribute_tensor, init_device_mesh
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
q = distribute_tensor(torch.ones(1, 2, 2, 2), init_device_mesh("cpu", (1,)), [Replicate()])
assert type(flash_attn.flash_attn_func(q, q, q)) is type(q)
"""


def test_the_first_operator_of_a_program():
    """On one rank no other is asked for its rules."""
    stand_ins = Path(__file__).parents[2] / "packages/hyper-parallel-ops-basic/tests/stand_ins"
    subprocess.run([sys.executable, "-c", FIRST.format(stand_ins=str(stand_ins))], check=True, timeout=120)


@pytest.mark.ranks(2)
def test_keyword_arguments_are_those_of_forward():
    with registered("Scale.apply", "NewForm.apply"):
        module = library()
        check(lambda x: module.Scale.apply(factor=3.0, x=x))
        check(lambda x: module.NewForm.apply(x, shift=3.0))
        assert module.NewForm.apply(torch.ones(1), shift=3.0).tolist() == [4.0]
        for x in (torch.ones(2), distribute_tensor(torch.ones(2), mesh_of((2,)), [Shard(0)])):
            with pytest.raises(TypeError, match="factor"):  # what is left out is not passed over
                module.Scale.apply(x, bias=2.0)


@pytest.mark.ranks(2)
def test_any_number_of_inputs():
    with registered("ManyInputs.apply"):
        function = library().ManyInputs
        check(lambda x: function.apply(x, x))


@pytest.mark.ranks(2)
def test_only_the_class_that_is_named():
    """A subclass may do something else."""
    with registered("Scale.apply") as registry:
        module = library()
        check(module.Twice.apply, 2.0)
        assert module.seen[0][0] is DTensor, "it met a DTensor, and used the operators of that"
        registry.register("acme_kernels.Twice.apply", Elementwise("twice"))
        module.seen.clear()
        check(module.Twice.apply, 2.0)
        assert module.seen[0][0] is torch.Tensor


@pytest.mark.ranks(2)
def test_without_dtensors_nothing_changes():
    with registered("Scale.apply"):
        function = library().Scale
        x = torch.ones(2, requires_grad=True)
        function.apply(x, 4.0).sum().backward()
        assert x.grad.tolist() == [4.0, 4.0]
        with pytest.raises(TypeError):
            function.apply(x)


@pytest.mark.ranks(2)
def test_a_rule_that_is_gone():
    with registered("Scale.apply"):
        module = library()
        with use_registry(Registry()), pytest.raises(MissingOpError, match=r"acme_kernels\.Scale\.apply"):
            module.scaled(distribute_tensor(torch.ones(2), mesh_of((2,)), [Shard(0)]), 2.0)


def test_names_of_no_autograd_function_are_left_alone():
    with registered("missing.apply", "scaled.apply", "nothing.Function.apply"):
        assert library().scaled(torch.ones(1), 2.0).tolist() == [2.0]


class AlongRows(StrategyOp):
    """``(x, shift)``; rows by themselves."""

    signature = "x, shift=0.0"

    def strategies(self, call):
        yield Strategy({"x": S(0)}, S(0))


@pytest.mark.ranks(2)
def test_a_function_in_plain_python_is_served_where_it_is_called():
    """A rule that names a global of a module sees the calls inside of that module too, once it is imported."""
    x = torch.arange(12.0).view(3, 4)
    with registered() as own:
        own.register("acme_kernels:shifted", AlongRows("shifted"))
        acme = library()
        for function in (acme.shifted, acme.twice_shifted):
            spread = distribute_tensor(x, mesh_of((2,)), [Shard(0)]).requires_grad_()
            plain = x.clone().requires_grad_()
            acme.seen.clear()
            out, want = function(spread), function(plain)
            out.square().sum().backward()
            want.square().sum().backward()
            assert out.placements == (Shard(0),)
            torch.testing.assert_close(out.full_tensor(), want)
            torch.testing.assert_close(spread.grad.full_tensor(), plain.grad)
            rows = 2 - torch.distributed.get_rank()
            assert acme.seen[-2:] == [(torch.Tensor, (rows, 4)), (torch.Tensor, (3, 4))]
        with pytest.raises(ValueError, match="no strategy takes"):
            acme.shifted(distribute_tensor(x, mesh_of((2,)), [Shard(1)]))


def test_tables_name_functions_of_modules(tmp_path):
    table = tmp_path / "acme.yaml"
    table.write_text(
        "acme_kernels:shifted: {distributed_op_module: hyper_parallel.rules, distributed_op_class: Elementwise}\n"
    )
    with registered() as own:
        own.load_table(table)
        acme = library()
        assert own.find(acme.shifted) is own.get("acme_kernels:shifted")
        assert acme.shifted.__name__ == "shifted"
        again = importlib.reload(acme)
        assert own.find(again.shifted) is own.get("acme_kernels:shifted")
