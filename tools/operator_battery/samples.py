"""PyTorch's own operator samples: which functions of its database are taken, and which of their sample inputs."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

EXCLUDED = {
    r"(new_)?empty(_like|_permuted|_strided)?": "the values are whatever the memory holds",
    r"new_empty_strided": "the values are whatever the memory holds",
    r"jiterator_.*": "compiles for CUDA",
    r"to_sparse|sparse\..*": "sparse tensors",
    r"resize_|resize_as_": "give a tensor other memory, which a DTensor refuses",
    r"torch\._scaled_mm.*": "has no samples for CPUs",
    r"masked\..*": "ask whether tensor.layout is torch.strided; that of a DTensor is its Layout",
    r"nn\.functional\.rrelu": "draws for negative elements only, so that no rank knows how many came before its own",
}
"""Pattern of the name to the reason why a function of the database is left out."""

LARGEST = 4096
"""Elements of the largest tensor of a sample that is taken."""


def title_of(op: Any) -> str:
    """The name of a function of the database, with its variant: ``linalg.norm.subgradients_at_zero``."""
    return ".".join(filter(None, (op.name, op.variant_test_name)))


def reason_to_exclude(op: Any) -> str | None:
    """Why a function is left out; None for those that are taken."""
    if not op.supported_dtypes("cpu"):
        return "not for CPUs"
    return next((reason for pattern, reason in EXCLUDED.items() if re.fullmatch(pattern, op.name)), None)


def operators(only: str) -> list[Any]:
    """The functions of the database whose title fits a pattern."""
    return [op for op in op_db if re.search(only, title_of(op)) and reason_to_exclude(op) is None]


def samples_of(op: Any, limit: int, dtype: torch.dtype | None = None) -> dict[int, Any]:
    """Up to ``limit`` small samples of a function, spread evenly over those in the database, by their place in it.

    They are the same on every call and on every rank.

    Args:
        dtype: that of the samples; none where the function does not take it. Otherwise that of :func:`dtype_for`.
    """
    if dtype is not None and dtype not in op.supported_dtypes("cpu"):
        return {}
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    dtype = dtype or dtype_for(op)
    wants_grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    small = {
        place: sample
        for place, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=wants_grad))
        if (tensors := tensors_in(sample)) and max(t.numel() for t in tensors) <= LARGEST
    }
    step = max(1, -(-len(small) // limit))
    return dict(list(small.items())[::step])


def dtype_for(op: Any) -> torch.dtype:
    """float64, so that a wrong term is not lost in rounding, or the first dtype that the function takes."""
    order = (torch.float64, torch.float32, torch.int64, torch.complex128, torch.bool)
    taken = op.supported_dtypes("cpu")
    return next(d for d in (*order, *taken) if d in taken)


def tensors_in(sample: Any) -> list[torch.Tensor]:
    """The tensor arguments of a sample, in the order written."""
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
