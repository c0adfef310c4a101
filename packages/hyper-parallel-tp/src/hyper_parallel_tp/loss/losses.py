"""Loss modules over a sharded vocabulary that need no context, and the number of tokens that normalises them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Replicate, all_reduce
from hyper_parallel.rules import is_replicate, remembered
from hyper_parallel_tp.loss.loss_parallel import loss_parallel

__all__ = ["FusedLinearCrossEntropyLoss", "ParallelCrossEntropyLoss", "count_tokens"]


class ParallelCrossEntropyLoss(nn.CrossEntropyLoss):
    """``nn.CrossEntropyLoss`` of vocabulary shards, each rank on its own part: :func:`loss_parallel` in a module.

        criterion = ParallelCrossEntropyLoss(class_dim=-1)
        loss = criterion(logits, labels)  # logits (batch, sequence, vocabulary), labels (batch, sequence)

    Args:
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: as in ``nn.CrossEntropyLoss``.
        class_dim: dim of the vocabulary; 1 as in PyTorch (0 for scores of one dim), or -1, for a language model's.
        mesh, strict: as in :func:`loss_parallel`.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        class_dim: int = 1,
        mesh: DeviceMesh | None = None,
        strict: bool = True,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        if class_dim not in (1, -1):
            raise ValueError(f"class_dim is 1, as in nn.CrossEntropyLoss, or -1, the last; got {class_dim}")
        self.class_dim, self.mesh, self.strict = class_dim, mesh, strict

    def forward(
        self, input: torch.Tensor, target: torch.Tensor, num_tokens: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss, float32 for low-precision scores.

        Args:
            input: scores, a DTensor whose classes are sharded.
            target: class indices, or probabilities in the shape of ``input``. A plain one is taken as every rank's.
            num_tokens: what the sum of the losses is divided by, in the place of this call's own number of tokens: see
                :func:`count_tokens`.

        Raises:
            ValueError: scores that are not vocabulary shards (unless ``strict`` is False), on every rank alike.
        """
        if self.class_dim == -1 and input.ndim > 2:
            if target.shape == input.shape:
                target = target.movedim(-1, 1)
            input = input.movedim(-1, 1)
        with loss_parallel(self.mesh, self.strict):
            loss = F.cross_entropy(
                input,
                target,
                self.weight,
                ignore_index=self.ignore_index,
                reduction=_reduction(self.reduction, num_tokens),
                label_smoothing=self.label_smoothing,
            )
        return loss if num_tokens is None else loss / num_tokens


class FusedLinearCrossEntropyLoss(nn.Module):
    """The loss of a language model's last hidden states: the head and its cross entropy in one, in chunks of tokens.

        criterion = FusedLinearCrossEntropyLoss()
        loss = criterion(hidden, model.lm_head.weight, labels)

    The scores of all tokens are never there at once, neither forward nor backward: memory is that of the hidden states,
    of the weight's gradient, and of one chunk. Each rank works on its rows of the weight. Batch and sequence may be
    sharded over other axes; hidden states that are sequence shards over the weight's own axes are gathered (and the
    backward is a reduce-scatter).

    Args:
        weight, ignore_index, reduction, label_smoothing: as in ``nn.CrossEntropyLoss``.
        options: size of the chunks; by default one that makes a chunk's scores about as large as the hidden states.
        mesh, strict: as in :func:`loss_parallel`.
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        options: nn.LinearCrossEntropyOptions | None = None,
        mesh: DeviceMesh | None = None,
        strict: bool = True,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.options = nn.LinearCrossEntropyOptions() if options is None else options
        self.mesh, self.strict = mesh, strict

    def forward(
        self,
        hidden: torch.Tensor,
        linear_weight: torch.Tensor,
        target: torch.Tensor,
        linear_bias: torch.Tensor | None = None,
        num_tokens: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss, float32 for low-precision hidden states.

        Args:
            hidden: ``(..., features)``.
            linear_weight: ``(vocabulary, features)``, a DTensor with ``Shard(0)``.
            target: class indices ``(...)``. A plain one is taken as every rank's.
            linear_bias: ``(vocabulary)``, sharded like the weight.
            num_tokens: as in :class:`ParallelCrossEntropyLoss`.

        Raises:
            ValueError: a weight whose rows are not sharded (unless ``strict`` is False), on every rank alike.
        """
        if isinstance(linear_weight, DTensor):
            hidden, target = (_whole_over(linear_weight, value) for value in (hidden, target))
        else:
            hidden, target = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
        with loss_parallel(self.mesh, self.strict):
            loss = F.linear_cross_entropy(
                hidden,
                linear_weight,
                target,
                linear_bias=linear_bias,
                weight=self.weight,
                ignore_index=self.ignore_index,
                reduction=_reduction(self.reduction, num_tokens),
                label_smoothing=self.label_smoothing,
                options=self.options,
            )
        return loss if num_tokens is None else loss / num_tokens


def count_tokens(
    targets: torch.Tensor | Iterable[torch.Tensor], ignore_index: int = -100, *, mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """Number of targets that count, over all ranks and all micro-batches: one all-reduce of one number.

        tokens = count_tokens(batch["labels"] for batch in micro_batches)
        for batch in micro_batches:
            criterion(model(batch["input"]), batch["labels"], num_tokens=tokens).backward()

    The losses then sum to the mean over all tokens, and so do the gradients, however the tokens are spread over
    micro-batches and ranks. (A mean of means gives a token more weight where others are ignored.)

    Args:
        targets: class indices; of one batch, or of several. DTensors are counted over their own mesh.
        mesh: the 1-D mesh over whose ranks the targets are different parts without saying so, such as ``mesh["dp"]``
            for plain targets of data-parallel ranks. One more all-reduce where the targets are sharded DTensors.

    Returns:
        A plain int64 tensor without dims, equal on all ranks.
    """
    total: torch.Tensor | None = None
    for target in [targets] if isinstance(targets, torch.Tensor) else targets:
        counted = (target != ignore_index).sum()
        total = counted if total is None else total + counted
    if total is None:
        raise ValueError("count_tokens got no targets")
    if isinstance(total, DTensor):
        total = total.full_tensor()
    return total if mesh is None else all_reduce(total, mesh)


def _reduction(given: str, num_tokens: Any) -> str:
    """The reduction to ask for: a mean over a given number is a sum, divided afterwards."""
    if num_tokens is None:
        return given
    if given != "mean":
        raise ValueError(f"num_tokens normalises a mean, but this loss has reduction={given!r}")
    return "sum"


def _whole_over(weight: DTensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` gathered over the axes that shard the weight's rows, where it is sharded there."""
    if not isinstance(value, DTensor) or value.device_mesh != weight.device_mesh:
        return value
    axes = frozenset(a for a in weight.layout.shard_order[0] if not is_replicate(value.placements[a]))
    if not axes:
        return value
    # Each rank goes on with its own classes: the gradient is asked for in terms, and a reduce-scatter adds them.
    return remembered(value, value.layout.with_placements(dict.fromkeys(axes, Replicate())), value.spec.varying | axes)
