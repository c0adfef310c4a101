"""Make ``torch.testing.assert_close`` compare DTensors: attributes as they are, values as those of the whole tensors.

It looks for ``tensor.layout`` in a set of ``torch.layout`` values, where no Layout is found, as its hash is its own;
and what it says of values that differ is computed by functions that would have to redistribute. (Read in PyTorch 2.13.)
"""

from __future__ import annotations

import functools
import types
from typing import Any

from hyper_parallel.sharding.layout import Layout
from hyper_parallel.utils.import_hooks import when_imported


def install() -> None:
    """For ``torch.testing``, now or when it is imported."""
    when_imported("torch.testing._comparison", _compare_dtensors)


def _compare_dtensors(module: types.ModuleType) -> None:
    pair: Any = module.TensorLikePair
    check, compare = pair._check_supported, pair._compare_values

    @functools.wraps(check)
    def check_supported(self: Any, tensor: Any, *, id: Any) -> None:
        if not isinstance(tensor.layout, Layout):
            check(self, tensor, id=id)

    @functools.wraps(compare)
    def compare_values(self: Any, actual: Any, expected: Any) -> None:
        compare(self, _whole(actual), _whole(expected))

    pair._check_supported, pair._compare_values = check_supported, compare_values


def _whole(tensor: Any) -> Any:
    return tensor.detach().full_tensor() if isinstance(tensor.layout, Layout) else tensor
