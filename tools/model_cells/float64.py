"""Compute in float64 throughout, where a model asks for float32 too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Norms, softmax and delta rules of ``transformers`` compute in float32 whatever the model's dtype is. In this
    context they do in float64, so that what is left of a difference is no rounding: the name that they ask for means
    the wider dtype. (A ``TorchFunctionMode`` would not reach what is computed again in backward.)
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    tensor: Any = torch.Tensor
    wider = {"float32": torch.float64, "float": torch.float64}
    try:
        with mock.patch.multiple(torch, **wider), mock.patch.object(tensor, "float", tensor.double):
            yield
    finally:
        torch.set_default_dtype(before)
