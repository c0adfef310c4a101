"""Whole recurrent networks, as ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` run them; steps: decompositions/cells.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import Call, OpSummary, S, Solution, draw, is_shard, on_dim

Tensor = torch.Tensor


class Recurrent(StrategyOp):
    """``lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)`` and its like.

    Sequences are independent, and so are their states. Dropout between layers is that of one device with the same seed
    where PyTorch draws it layer by layer (CPU).
    """

    summary = OpSummary(
        "sequences of a batch, their states alike",
        whole="positions, features and weights: a step needs all of the state that the step before left",
    )

    signature = "input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first"

    def solve(self, call: Call) -> Solution:
        if isinstance(call.arg("has_biases"), (list, tuple)):  # the weights come one argument later
            raise NotImplementedError(
                f"{call.name} of a packed sequence has no rule: which rows belong to one step depends on all lengths. "
                "Give the padded batch, and mask the results"
            )
        return super().solve(call)

    def _states(self, call: Call) -> list[Any]:
        states = call.arg("hx")
        return list(states) if isinstance(states, (list, tuple)) else [states]

    def num_outputs(self, call: Call) -> int:
        return 1 + len(self._states(call))

    def output_shapes(self, call: Call) -> list[tuple[int, ...]]:
        states = [tuple(state.shape) for state in self._states(call)]
        directions = 2 if call.arg("bidirectional") else 1
        return [(*call.spec("input").shape[:2], directions * states[0][-1]), *states]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        batch, states = 0 if call.arg("batch_first") else 1, [S(1)] * len(self._states(call))
        yield Strategy([S(batch), *states], [S(batch), *states])

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        layers = call.arg("num_layers")
        if not call.arg("train") or layers == 1:
            return None
        func, arguments, first = call.func, self.arguments, bool(call.arg("batch_first"))
        shape = self.output_shapes(call)[0]
        layout = targets[0]
        if first:
            shape = (shape[1], shape[0], shape[2])
            placements = tuple(on_dim(p, 1) if is_shard(p) else p for p in layout.placements)
            layout = layout.with_order(placements, ((), layout.shard_order[0], ()))

        def local(*args: Any, **kwargs: Any) -> Any:
            given = arguments.bind(args, kwargs)
            chance = given["dropout"]
            if not chance:
                return func(*args, **kwargs)
            x, states = given["input"], given["hx"]
            single = isinstance(states, Tensor)
            directions = 2 if given["bidirectional"] else 1
            count = len(given["params"]) // layers
            ends = []
            for layer in range(layers):
                if layer:
                    # PyTorch drops elements of [steps, batch, features], however the batch is given.
                    ones = x.new_ones(shape)
                    mask = draw(layout, shape, partial(torch.dropout, ones, chance, True))
                    x = x * (mask.transpose(0, 1) if first else mask)
                mine = slice(layer * directions, (layer + 1) * directions)
                x, *end = func(
                    x,
                    states[mine] if single else [state[mine] for state in states],
                    given["params"][layer * count : (layer + 1) * count],
                    given["has_biases"], 1, 0.0, True, given["bidirectional"], first,
                )  # fmt: skip
                ends.append(end)
            return x, *(torch.cat(parts) for parts in zip(*ends, strict=True))

        return local
