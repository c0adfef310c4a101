"""``F.ctc_loss``: each sample's loss where the sample is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import Call, OpSummary, P, S, Solution, zeros_from

__all__ = ["CTCLoss"]


class CTCLoss(StrategyOp):
    """``ctc_loss(log_probs [time, batch, classes], targets [batch, length], ...)`` with lengths in tensors."""

    summary = OpSummary(
        "samples; a mean or sum leaves a pending sum",
        whole="time and classes: each step's states need all of the one before; targets that are joined to one vector",
    )

    signature = "log_probs, targets, input_lengths, target_lengths, blank=0, reduction='mean', zero_infinity=False"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        names = ("targets", "input_lengths", "target_lengths")
        if len(call.spec("log_probs").shape) == 3 and all(call.index(name) is not None for name in names):
            if len(call.spec("targets").shape) == 2:
                out = S(0) if call.arg("reduction", "mean") == "none" else P
                yield Strategy({"log_probs": S(1), **dict.fromkeys(names, S(0))}, out)

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        samples = call.spec("log_probs").shape[1:-1]
        none = call.arg("reduction", "mean") == "none"
        # PyTorch has no meta kernel for it.
        solution.meta = lambda log_probs, *args, **kwargs: log_probs.new_empty(samples if none else ())
        return solution

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if not any(targets[0].shard_order):
            return None
        func, parsed, reduction = call.func, self.arguments, call.arg("reduction", "mean")
        samples = call.spec("log_probs").shape[1]

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = parsed.bind(args, kwargs) | {"reduction": "none"}
            x = given["log_probs"]
            losses = func(**given) if x.numel() else zeros_from((x.shape[1],), x)
            if reduction == "mean":
                losses = losses / given["target_lengths"].clamp_min(1) / samples
            return losses if reduction == "none" else losses.sum()

        return local
