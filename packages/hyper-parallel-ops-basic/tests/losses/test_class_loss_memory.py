"""What losses over many classes keep for the backward, and the largest tensor that they make."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh

R = Replicate()
ROWS, FEATURES, CLASSES = 12, 8, 4096  # a row's own numbers are nothing beside its scores


def spread(value, *placements):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = distribute_tensor(value, mesh, placements)
    return made.requires_grad_() if value.is_floating_point() else made


def _address(tensor):
    return tensor.untyped_storage().data_ptr()


class Largest(TorchDispatchMode):
    """The largest tensor made, in bytes; plans are made with meta tensors, which have none."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else (result,)
        given = {_address(t) for t in args if isinstance(t, torch.Tensor)}
        for tensor in made:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and _address(tensor) not in given:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


def kept_bytes(function):
    """The function's result, and the bytes of the storages that are kept for its backward."""
    storages = {}

    def pack(tensor):
        storages[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return result, sum(storages.values())


def local_bytes(*tensors):
    return sum(t.to_local().untyped_storage().nbytes() for t in tensors)


LABELS = torch.arange(ROWS) * 300
OPTIONS = {
    "mean": {},
    "smoothed and weighted": {"label_smoothing": 0.1, "weight": True},
    "none": {"reduction": "none"},
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_cross_entropy_keeps_the_local_scores_once(name, dtype):
    options = dict(OPTIONS[name])
    extra = 0
    if options.pop("weight", False):
        options["weight"] = spread(torch.ones(CLASSES), R, Shard(0)).detach()
        extra = local_bytes(options["weight"])
    scores = spread(torch.randn(ROWS, CLASSES).to(dtype), Shard(0), Shard(1))
    labels = spread(LABELS, Shard(0), R)
    with Largest() as forward:
        loss, kept = kept_bytes(lambda: F.cross_entropy(scores, labels, **options))
    assert kept <= 1.05 * (local_bytes(scores) + extra)
    with Largest() as backward:
        loss.sum().backward()
    wide = ROWS // 2 * CLASSES // 2 * 4
    assert forward.nbytes <= wide, "one buffer of the local scores in float32"
    assert backward.nbytes <= wide


@pytest.mark.ranks(4)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_probabilities_and_scores_are_kept_once(smoothing):
    scores = spread(torch.randn(ROWS, CLASSES), Shard(0), Shard(1))
    target = spread(torch.rand(ROWS, CLASSES), Shard(0), Shard(1))
    loss, kept = kept_bytes(lambda: F.cross_entropy(scores, target, label_smoothing=smoothing))
    assert kept <= 1.05 * local_bytes(scores, target)
    loss.backward()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunked_head_never_holds_all_scores(dtype):
    chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, chunking_method=None)
    hidden = spread(torch.randn(ROWS, FEATURES).to(dtype), Shard(0), R)
    head = spread(torch.randn(CLASSES, FEATURES).to(dtype), R, Shard(0))
    labels = spread(LABELS, Shard(0), R)
    with Largest() as forward:
        loss, kept = kept_bytes(lambda: F.linear_cross_entropy(hidden, head, labels, options=chunks))
    with Largest() as backward:
        loss.backward()
    assert kept <= 1.05 * local_bytes(hidden, head)
    chunk, weight = 2 * CLASSES // 2 * 4, FEATURES * CLASSES // 2 * 4
    assert forward.nbytes <= max(chunk, weight)
    if torch.distributed.get_backend() != "threaded":  # whose collectives make copies of their own
        assert backward.nbytes <= max(chunk, weight)  # the weight's gradient, in float32
