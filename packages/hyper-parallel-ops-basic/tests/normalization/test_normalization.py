"""softmax and the norms of layers against plain torch, on all layouts."""

import torch
import torch.nn.functional as F

from hyper_parallel.context import module_call
from hyper_parallel.testing import OpConformance, at_most, sample, tensor

MESHES = ((4,), (2, 2))


class TestSoftmax(OpConformance):
    op = F.softmax
    max_collectives = at_most(all_reduce=2)
    meshes = MESHES
    samples = (
        sample(tensor(5, 6), dim=-1),
        sample(tensor(2, 1, 5), 0),
        sample(tensor(5, 6), -1, dtype=torch.float32),
        sample(torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf, 0.5]], dtype=torch.float64), dim=1).options(name="inf"),
    )


class TestLogSoftmax(OpConformance):
    op = torch.log_softmax
    max_collectives = at_most(all_reduce=2)
    meshes = MESHES
    samples = (sample(tensor(5, 6), 0), sample(tensor(2, 1, 5), -1))


class TestSoftmin(OpConformance):
    op = F.softmin
    max_collectives = at_most(all_reduce=2)
    meshes = MESHES
    samples = (sample(tensor(5, 6), dim=1),)


class TestLayerNorm(OpConformance):
    op = F.layer_norm
    max_collectives = at_most(all_reduce=2)
    meshes = MESHES
    samples = (
        sample(tensor(5, 6), (6,), tensor(6), tensor(6)),
        sample(tensor(2, 3, 5), (5,), weight=tensor(5)),
        sample(tensor(2, 3, 5), (3, 5)),
    )


class TestRMSNorm(OpConformance):
    op = F.rms_norm
    max_collectives = at_most(all_reduce=1)
    meshes = MESHES
    samples = (
        sample(tensor(5, 6), (6,), tensor(6)),
        sample(tensor(2, 3, 5), (3, 5), eps=0.1),
        sample(tensor(3, 6, dtype=torch.complex128), (6,), tensor(6, dtype=torch.complex128), 0.1),
    )


class TestGroupNorm(OpConformance):
    op = F.group_norm
    max_collectives = at_most(all_reduce=2)
    meshes = MESHES
    samples = (sample(tensor(5, 8, 2), 4, tensor(8), tensor(8)), sample(tensor(3, 8, 2), 8))


def low_precision(x, weight):
    """Statistics are those of float32, whatever comes in."""
    with module_call():  # so that pending inputs are summed once for all
        return (
            F.softmax(x, -1),
            F.softmax(x, dim=1, dtype=torch.float32),
            F.log_softmax(x, 1),
            F.layer_norm(x, (6,), weight, eps=1e-3),
            F.rms_norm(x, (6,), weight),
        )


class TestLowPrecision(OpConformance):
    op = low_precision
    max_collectives = at_most(all_reduce=9)
    meshes = ((2, 2),)
    rtol = atol = 0.1  # a pending sum in bfloat16 is no closer
    samples = (sample(tensor(3, 6, dtype=torch.bfloat16), tensor(6, dtype=torch.bfloat16)),)
