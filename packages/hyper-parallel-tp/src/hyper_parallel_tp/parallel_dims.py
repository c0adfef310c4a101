"""ParallelDims: how many ranks share each kind of work, and the meshes that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from hyper_parallel import DeviceMesh, init_device_mesh
from hyper_parallel.rules import device_type_of_backend

__all__ = ["ParallelDims"]


@dataclass
class ParallelDims:
    """Degrees of parallelism with TorchTitan's names, and the device meshes for them.

    ::

        dims = ParallelDims(dp_shard=2, tp=4)           # 8 ranks
        parallelize_module(model, dims.get_mesh("tp"))
        fully_shard(model, mesh=dims.get_mesh("fsdp"))  # ("dp_replicate", "fsdp") for hybrid sharding

    Neighbouring ranks differ in tp, then cp, dp_shard, dp_replicate, pp. An axis of size 1 is a mesh like any other.

    Args:
        dp_replicate: ranks that hold copies of the model for different data.
        dp_shard: ranks that share the parameters, for different data; -1: all that are left.
        cp: ranks that share a sequence (context parallel).
        tp: ranks that share every layer.
        pp: ranks that share the layers (pipeline).
        ep: ranks that share the experts; taken from those of dp_shard, cp and tp.
        world_size: ranks in all; None: those of torch.distributed.

    Raises:
        ValueError: the degrees do not multiply to the number of ranks, or ep does not divide its ranks.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    world_size: int | None = None
    _views: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.world_size is None:
            self.world_size = dist.get_world_size()
        given = {name: getattr(self, name) for name in ("pp", "dp_replicate", "cp", "tp", "ep")}
        wrong = {name: degree for name, degree in given.items() if degree < 1}
        if wrong or (self.dp_shard < 1 and self.dp_shard != -1):
            raise ValueError(f"degrees are at least 1, dp_shard also -1 for what is left; got {self!r}")
        others = self.pp * self.dp_replicate * self.cp * self.tp
        if self.dp_shard == -1 and self.world_size % others == 0:
            self.dp_shard = self.world_size // others
        if others * self.dp_shard != self.world_size:
            raise self._no_fit(others, self.world_size)
        if (self.dp_shard * self.cp * self.tp) % self.ep:
            raise ValueError(f"ep={self.ep} does not divide dp_shard * cp * tp, the ranks it is taken from: {self!r}")

    def _no_fit(self, others: int, world: int) -> ValueError:
        """The degrees do not give the ranks there are.

        Args:
            others: the product of those other than dp_shard.
            world: number of ranks.
        """
        names = [name for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if getattr(self, name) not in (1, -1)]
        given = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        ranks, left = others * abs(self.dp_shard), world // others
        need = f"a multiple of {ranks} ranks" if self.dp_shard == -1 else f"{ranks} ranks"
        fits = others * left == world
        return ValueError(
            f"ParallelDims({given}) needs {need}, and there are {world}: start as many (torchrun "
            f"--nproc-per-node={ranks}), or give "
            + (f"dp_shard={left}" if fits else f"degrees whose product divides {world}")
        )

    def sizes(self) -> dict[str, int]:
        """Number of ranks along every axis that :meth:`get_mesh` knows."""
        return {name: size for view in self._shapes() for name, size in view.items()}

    def _shapes(self) -> list[dict[str, int]]:
        """The ways in which the ranks are cut up. The first that has the axes asked for is used."""
        fsdp = self.dp_shard * self.cp
        outer = {"pp": self.pp, "dp_replicate": self.dp_replicate}
        return [
            {**outer, "fsdp": fsdp, "tp": self.tp},
            {**outer, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp},
            {"pp": self.pp, "batch": self.dp_replicate * self.dp_shard, "cp": self.cp, "tp": self.tp},
            {"pp": self.pp, "loss": self.dp_replicate * fsdp, "tp": self.tp},
            {**outer, "efsdp": fsdp * self.tp // self.ep, "ep": self.ep},
        ]

    def build_mesh(self, device_type: str | None = None) -> None:
        """Make all meshes now; otherwise :meth:`get_mesh` makes them when they are asked for. For programs whose ranks
        ask for different ones, such as the stages of a pipeline. Every rank of the world takes part.

        Args:
            device_type: None: that of the process group's backend.
        """
        for shape in self._shapes():
            self._view(shape, device_type)

    def _view(self, shape: dict[str, int], device_type: str | None = None) -> DeviceMesh:
        names = tuple(shape)
        if names not in self._views:
            kind = device_type or device_type_of_backend()
            self._views[names] = init_device_mesh(kind, tuple(shape.values()), mesh_dim_names=names)
        return self._views[names]

    def get_mesh(self, axes: str | Sequence[str]) -> DeviceMesh:
        """The mesh over some axes, outermost first. All ranks ask for the same meshes in the same order, or call
        :meth:`build_mesh` before.

        ``"fsdp"`` is dp_shard and cp together, ``"batch"`` the ranks with different data, ``"loss"`` those whose losses
        are averaged, ``"efsdp"`` the ranks that share the parameters of one expert.

        Raises:
            ValueError: an axis is unknown, or the axes overlap.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for shape in self._shapes():
            if set(names) <= set(shape) and [n for n in shape if n in names] == list(names):
                return self._view(shape)[names]
        unknown = [name for name in names if name not in self.sizes()]
        problem = f"unknown axes {unknown}" if unknown else f"{names} overlap, or are not in the order of the ranks"
        raise ValueError(f"get_mesh: {problem}; the axes go together as {[tuple(s) for s in self._shapes()]}")

    @property
    def seq_len_divisor(self) -> int:
        """What the length of a sequence must be a multiple of, for tensor parallel with plain pieces and for context
        parallel, which gives every rank two chunks of it."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    @property
    def non_data_parallel_size(self) -> int:
        """Ranks that work on the same data."""
        return math.prod((self.pp, self.cp, self.tp))
