"""The contract of a parallel style, and what all styles do with parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Placement, distribute_tensor
from hyper_parallel.rules import as_layout, as_parameter, replaces_parameters, replicate_rest

__all__ = ["ParallelStyle"]


class ParallelStyle(ABC):
    """How one module is parallelised. :func:`parallelize_module` applies styles; a style can be applied by itself too.

    A style is a value: applying it changes the module and never the style, so one instance serves many modules.

    Attributes:
        src_data_rank: rank along the mesh whose parameters count; None: each rank's own. ``parallelize_module`` applies
            a copy of the style with its own ``src_data_rank``.
    """

    src_data_rank: int | None = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_apply" in vars(cls) and cls.apply is ParallelStyle.apply:
            raise TypeError(
                f"{cls.__name__} defines _apply(module, device_mesh), as PyTorch's styles do; here a style defines "
                "apply(self, module, device_mesh), which is public: rename it"
            )

    @abstractmethod
    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Parallelise ``module`` over a 1-D mesh, in place, and return it."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({shown})"

    def place(self, module: nn.Module, device_mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
        """Spread parameters of the module itself; a name that it has not, or that is None, is passed over.

        Raises:
            ValueError: a parameter is spread already, in another layout.
        """
        for name, placement in placements.items():
            parameter = module._parameters.get(name)
            if parameter is None:
                continue
            layout = as_layout(device_mesh, [placement], parameter.ndim)
            if isinstance(parameter, DTensor):
                if parameter.layout is not layout:
                    raise ValueError(
                        f"{type(self).__name__}: parameter {name!r} of {type(module).__name__} is laid out as "
                        f"{parameter.layout} already, this style wants {layout}. A tied parameter has one layout; "
                        "a style that takes all that is left, such as NoParallel, comes after those of modules inside; "
                        "otherwise the module was parallelised before"
                    )
                continue
            with self._replacing(module):
                spread = distribute_tensor(parameter, layout, src_data_rank=self.src_data_rank)
                module._parameters[name] = as_parameter(spread, parameter)

    def replicate(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Make the parameters of the module and those inside that are still plain Replicate."""
        with self._replacing(module):
            replicate_rest(module, device_mesh, src_data_rank=self.src_data_rank, buffers=False)

    def _replacing(self, module: nn.Module) -> AbstractContextManager[None]:
        return replaces_parameters([module], f"{type(self).__name__}.apply")


def checked_placement(name: str, given: Any) -> Any:
    """The layout of one tensor that a style was given as its argument ``name``; None is one too.

    Raises:
        TypeError: it is no placement.
    """
    if given is not None and not isinstance(given, Placement):
        raise TypeError(f"{name} of a style takes a placement per tensor, as Shard(1) or Replicate(), got {given!r}")
    return given
