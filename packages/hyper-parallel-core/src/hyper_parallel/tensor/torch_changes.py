"""What is changed in torch for DTensors, all at once: when the first mesh is used, before which there is none.

:data:`hyper_parallel.torch_compat.CHANGES` lists it.
"""

from __future__ import annotations

from hyper_parallel.tensor import raw_memory, swapping, torch_state_dicts, torch_testing, transformers_models, untraced
from hyper_parallel.tensor.dtensor import DTensor

_done: list[bool] = []


def install() -> None:
    """Make the changes; once in a process."""
    if _done:
        return
    _done.append(True)
    torch_state_dicts.install()
    torch_testing.install()
    for change in (raw_memory, swapping, transformers_models, untraced):
        change.install(DTensor)
