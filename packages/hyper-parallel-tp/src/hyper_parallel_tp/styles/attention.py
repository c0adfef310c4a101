"""AttentionParallel: an attention block split by heads, with any number of key and value heads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hyper_parallel import DeviceMesh, Placement, Replicate, Shard
from hyper_parallel.rules import replicate_plain_inside
from hyper_parallel_tp.styles.colwise_rowwise import ColwiseParallel, RowwiseParallel, base_layer
from hyper_parallel_tp.styles.prepare import PrepareModuleInput
from hyper_parallel_tp.styles.style import ParallelStyle, checked_placement

__all__ = ["AttentionParallel"]


class AttentionParallel(ParallelStyle):
    """Split the heads of an attention block whose code is written for one device.

    Query heads are split over the ranks. Key and value heads are split alike where their number allows it; otherwise
    (fewer than ranks, or not divided by them) their projections stay whole on every rank, each query head uses the one
    that it belongs to, and their gradients are summed. Norms of single heads and other parameters of the block are
    Replicate. Inside the block tensors are DTensors of global shape, so head counts that the code keeps stay true.

    Args:
        query, key, value, output: names of the projections in the block.
        per_head: names of parameters of the block with one entry per query head along their first dim (attention
            sinks), which are split with them.
        head_dim: features per head of queries and keys; by default the block's attribute ``head_dim``.
        input_layouts: what the block's first input is when it is plain; default Replicate. ``Shard(1)`` for sequence
            parallel: the whole sequence is gathered once for all projections.
        output_layouts: what the output projection's result becomes; default Replicate, ``Shard(1)`` for sequence
            parallel.
        use_local_output: let the output projection return this rank's piece as a plain tensor.
    """

    def __init__(
        self,
        *,
        query: str = "q_proj",
        key: str = "k_proj",
        value: str = "v_proj",
        output: str = "o_proj",
        per_head: Sequence[str] = (),
        head_dim: int | None = None,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.query, self.key, self.value, self.output = query, key, value, output
        self.per_head, self.head_dim = tuple(per_head), head_dim
        self.input_layouts = checked_placement("input_layouts", input_layouts) or Replicate()
        self.output_layouts = checked_placement("output_layouts", output_layouts) or Replicate()
        self.use_local_output = use_local_output

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`.

        Raises:
            ValueError: the block has no such projections; the ranks do not divide the query heads; the features of a
                head are unknown.
        """
        self._check_names(module)
        ranks = device_mesh.size()
        heads = self._heads(module, self.query)
        if heads % ranks:
            raise ValueError(
                f"AttentionParallel: {ranks} ranks do not divide the {heads} query heads of {type(module).__name__}; "
                "use a number of ranks that does, or NoParallel() for this block"
            )
        split = ColwiseParallel(use_local_output=False)
        join = RowwiseParallel(output_layouts=self.output_layouts, use_local_output=self.use_local_output)
        self._apply(split, getattr(module, self.query), device_mesh)
        self.place(module, device_mesh, dict.fromkeys(self.per_head, Shard(0)))
        if self._heads(module, self.key) % ranks == 0:  # there are as many value heads, which may have another size
            for name in (self.key, self.value):
                self._apply(split, getattr(module, name), device_mesh)
        self._apply(join, getattr(module, self.output), device_mesh)
        self.replicate(module, device_mesh)
        replicate_plain_inside(module)
        gather = PrepareModuleInput(input_layouts=self.input_layouts, desired_input_layouts=Replicate())
        return gather.apply(module, device_mesh)

    def _apply(self, style: ParallelStyle, module: nn.Module, device_mesh: DeviceMesh) -> None:
        style.src_data_rank = self.src_data_rank
        style.apply(module, device_mesh)

    def _check_names(self, module: nn.Module) -> None:
        names = {role: getattr(self, role) for role in ("query", "key", "value", "output")}
        unknown = [name for name in self.per_head if module._parameters.get(name) is None]
        if unknown:
            raise ValueError(
                f"AttentionParallel(per_head={self.per_head}): {type(module).__name__} has no parameters {unknown}; it "
                f"has {', '.join(name for name, _ in module.named_parameters(recurse=False)) or 'none of its own'}"
            )
        missing = {role: name for role, name in names.items() if not isinstance(getattr(module, name, None), nn.Module)}
        if missing:
            given = ", ".join(f"{role}={name!r}" for role, name in missing.items())
            raise ValueError(
                f"AttentionParallel({given}): {type(module).__name__} has no such projections; it has "
                f"{', '.join(name for name, _ in module.named_children()) or 'none'}"
            )

    def _heads(self, module: nn.Module, name: str) -> int:
        features = getattr(base_layer(getattr(module, name)), "out_features")  # noqa: B009 - any Module, for mypy
        head_dim = self.head_dim or getattr(module, "head_dim", None)
        if not isinstance(head_dim, int) or features % head_dim:
            raise ValueError(
                f"AttentionParallel: {name!r} of {type(module).__name__} has {features} output features; head_dim is "
                f"{head_dim}. Pass head_dim=, the features of one head"
            )
        return features // head_dim
