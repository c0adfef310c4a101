"""Functions that no rule serves, and C++ code that meets the wrapper: they raise, and name themselves."""

import pytest
import torch

from hyper_parallel import DTensor, MissingOpError, Shard
from hyper_parallel.testing import make, mesh_of

VALUE = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.ranks(4)
def test_functions_without_a_rule_raise_and_name_themselves():
    x = make(VALUE[:3], mesh_of((4,)), [Shard(0)])
    for call in (
        lambda: torch.geqrf(x),
        lambda: torch._C._nn.adaptive_max_pool2d(x, (2, 2)),
        lambda: torch.ops.aten._linalg_eigh.default(x),
        lambda: torch.ops.aten.stft.default(x, 4, normalized=True),  # whose namesake takes other arguments
        lambda: torch.lobpcg(x),
        lambda: torch._pack_padded_sequence(x, torch.tensor([3, 2, 1]), False),
        lambda: torch.nested.as_nested_tensor([x, x]),
    ):
        with pytest.raises(MissingOpError, match="no distributed rule"):
            call()


@pytest.mark.ranks(4)
def test_custom_operators_without_a_rule_raise():
    @torch.library.custom_op("hyper_parallel_test::scaled", mutates_args=())
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    with pytest.raises(MissingOpError, match=r"hyper_parallel_test\.scaled has no distributed rule"):
        torch.ops.hyper_parallel_test.scaled(make(VALUE, mesh_of((4,)), [Shard(0)]), 2.0)
    with pytest.raises((MissingOpError, RuntimeError)):
        scaled(make(VALUE, mesh_of((4,)), [Shard(0)]), 2.0)


@pytest.mark.ranks(4)
def test_operators_of_torch_ops_have_the_rules_of_their_namesakes():
    x = make(VALUE, mesh_of((4,)), [Shard(0)])
    for y in (torch.ops.aten.add(x, x), torch.ops.aten.add.Tensor(x, x), torch.ops.aten.mul.Scalar(x, 2)):
        assert isinstance(y, DTensor)
        torch.testing.assert_close(y.full_tensor(), 2 * VALUE)
    matrices = make(VALUE[:3].expand(3, 3, 3) + torch.eye(3), mesh_of((4,)), [Shard(0)])
    for det in (torch.ops.aten.linalg_det(matrices), torch.ops.aten.det.default(matrices)):
        torch.testing.assert_close(det.full_tensor(), matrices.full_tensor().det())


@pytest.mark.ranks(4)
def test_below_the_python_layer_the_wrapper_raises():
    x = make(VALUE, mesh_of((4,)), [Shard(0)])
    with torch._C.DisableTorchFunctionSubclass():
        for call in (
            lambda: x + 1,
            lambda: x.sum(),
            lambda: torch.matmul(x, x.t()),
            lambda: x.add_(1),
            lambda: x.clone(),
        ):
            with pytest.raises(RuntimeError, match="below PyTorch's Python layer"):
                call()
        with pytest.raises(RuntimeError):
            x.numpy()
    with pytest.raises(RuntimeError, match="below PyTorch's Python layer"):
        torch.nested.nested_tensor([x, x])
    for call in (x.untyped_storage, x.storage, x.pin_memory, lambda: torch.from_dlpack(x), lambda: x.resize_(3)):
        with pytest.raises(MissingOpError):
            call()
