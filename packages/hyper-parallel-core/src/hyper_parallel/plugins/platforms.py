"""Kinds of device: for each the collective backend, and the module that teaches torch about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """A kind of device.

    Attributes:
        device_type: torch's name of it, as in ``torch.device("npu")``.
        backend: the ``torch.distributed`` backend for its collectives.
        module: module whose import makes torch know the device, or None when torch knows it already.
    """

    device_type: str
    backend: str
    module: str | None = None


CORE_PLATFORMS = (
    Platform("cpu", "gloo"),
    Platform("cuda", "nccl"),
    Platform("npu", "hccl", module="torch_npu"),
)
