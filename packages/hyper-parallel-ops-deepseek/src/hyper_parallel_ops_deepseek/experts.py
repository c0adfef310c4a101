"""``npu_grouped_matmul``, ``npu_moe_token_permute`` and ``npu_moe_token_unpermute``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, PackedShard, Placement, Strategy, StrategyOp
from hyper_parallel.rules import (
    NOT_VARYING,
    Call,
    ExchangePlan,
    OpSummary,
    P,
    R,
    Ref,
    S,
    contraction_shape,
    contraction_strategies,
    transition,
)
from hyper_parallel_ops_basic.moe.grouped_mm import LABELS, ends_among, held_of_label, with_own_groups
from hyper_parallel_ops_deepseek.reference import group_ends, sorted_by_expert, weighted_sum

__all__ = ["GroupedMatmul", "TokenPermute", "TokenUnpermute"]


class GroupedMatmul(StrategyOp):
    """``npu_grouped_matmul`` with ``group_type`` 0 and 2: the rule of ``torch._grouped_mm``, with lists of one tensor.

    With -1 the lists pair up; pairs of one shape are sharded alike, others are taken whole.
    """

    summary = OpSummary(
        "rows (tokens), features, groups (experts); sharded groups and contracted features leave a pending sum",
        pending="passes through one factor, together with the bias",
        whole="quantised forms, and lists of tensors of unlike shapes",
    )

    signature = (
        "x, weight, *, bias=None, scale=None, offset=None, antiquant_scale=None, antiquant_offset=None, "
        "per_token_scale=None, group_list=None, activation_input=None, activation_quant_scale=None, "
        "activation_quant_offset=None, split_item=0, group_type=None, group_list_type=0, act_type=0, "
        "tuning_config=None, output_dtype=None, x_dtype=None, weight_dtype=None, scale_dtype=None, "
        "per_token_scale_dtype=None"
    )

    def _operands(self, call: Call) -> tuple[list[int], list[int], list[int]]:
        """Which inputs are x, weight and bias."""
        x, weight, bias = ([ref.index for ref in call.arg(name) or ()] for name in ("x", "weight", "bias"))
        return x, weight, bias

    def _labels(self, call: Call) -> tuple[str, str, str] | None:
        """Labels of x, of weight and of the result; None for a form of which only whole tensors are taken."""
        x, weight, _ = self._operands(call)
        quantised = any(isinstance(r, Ref) for n in ("scale", "per_token_scale") for r in call.arg(n) or ())
        if quantised or len(x) != len(weight) or not x:
            return None
        ranks = tuple(len(call.inputs[i].shape) for i in (x[0], weight[0]))
        if call.arg("group_type") in (-1, None):
            alike = len({call.inputs[i].shape for i in x}) == len({call.inputs[i].shape for i in weight}) == 1
            return ("mk", "kn", "mn") if alike and ranks == (2, 2) and call.arg("split_item", 0) in (0, 1) else None
        return LABELS.get(ranks) if len(x) == 1 and ranks in ((2, 3), (2, 2)) else None

    def num_outputs(self, call: Call) -> int:
        return 1 if call.arg("split_item", 0) in (2, 3) else len(self._operands(call)[1])

    def output_shapes(self, call: Call) -> list[tuple[int, ...]] | None:
        labels = self._labels(call)
        if labels is None or "s" not in labels[0]:
            return None
        x, weight, _ = self._operands(call)
        operands, shapes = [*labels[:2]], [tuple(call.inputs[i].shape) for i in (x[0], weight[0])]
        if "e" not in labels[1]:
            listed = call.arg("group_list")
            operands, shapes = (
                [*operands, "e"],
                [*shapes, (listed.shape[0] if isinstance(listed, Ref) else len(listed),)],
            )
        shape = contraction_shape(shapes, operands, labels[2])
        return None if shape is None else [shape]

    def strategies(self, call: Call) -> Iterable[Strategy]:
        labels = self._labels(call)
        if labels is None:
            return
        x, weight, bias = self._operands(call)
        shapes = [tuple(call.inputs[i].shape) for i in (x[0], weight[0])]
        for row in contraction_strategies(shapes, labels[:2], labels[2]):
            assert isinstance(row.inputs, list)
            inputs: list[Placement] = [R] * len(call.inputs)
            for i, placement in [(i, row.inputs[0]) for i in x] + [(i, row.inputs[1]) for i in weight]:
                inputs[i] = placement
            added = self._bias(row, labels)
            if bias and added is None:
                continue
            for i in bias:
                inputs[i] = added or R
            yield Strategy(inputs, row.outputs)

    @staticmethod
    def _bias(row: Strategy, labels: tuple[str, str, str]) -> Placement | None:
        """Placement of the biases ``[n]`` or ``[groups, n]``; None where a rank cannot tell which rows get one."""
        assert isinstance(row.inputs, list)
        weight = row.inputs[1]
        if row.outputs == P:
            return None if "e" in labels[1] and weight == S(labels[1].find("e")) else P
        features = weight == S(labels[1].find("n"))
        return S(1 if "e" in labels[1] else 0) if features else R

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        labels = self._labels(call)
        if labels is None or "s" not in labels[0]:
            return None
        x, weight, _ = self._operands(call)
        rows = held_of_label(call, targets, [x[0], weight[0]], labels, "s")
        groups = held_of_label(call, targets, [x[0], weight[0]], labels, "e") if "e" not in labels[2] else None
        if rows is None and groups is None:
            return None
        func, arguments = call.func, self.arguments

        def local(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            given = arguments.bind(args, kwargs)
            (a,), (b,) = given.pop("x"), given.pop("weight")
            listed = given.pop("group_list")
            ends = group_ends(listed, given.pop("group_list_type", 0), a.device)
            dtype = listed.dtype if isinstance(listed, torch.Tensor) else torch.int64
            if rows is not None:
                ends = ends_among(ends, rows)

            def product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
                return func([a], [b], group_list=ends.to(dtype), group_list_type=0, **given)[0]

            return [product(a, b, ends) if groups is None else with_own_groups(product, a, b, ends, groups)]

        return local


def _rows_travel(call: Call) -> bool:
    """Whether tokens may be sharded: in plain shards, as a packed dim of tokens says nothing about one of rows."""
    packed = (isinstance(p, PackedShard) and p.dim == 0 for spec in call.inputs for p in spec.layout.placements)
    return not call.arg("padded_mode") and not any(packed)


class TokenPermute(StrategyOp):
    """``npu_moe_token_permute``: tokens move by the experts of all of them; the hidden dim is sharded freely.

    Sharded tokens travel to the ranks of the rows that they become, without the kernel, which sorts what it has.
    """

    summary = OpSummary(
        "tokens and their indices, features; the rows come out sharded like the tokens, where they went whole",
        pending="passes",
        communicates="sharded tokens: 1 all-to-all; sharded indices: 1 all-gather | 1 all-to-all",
        whole="indices of whole tokens, and packed tokens: where one goes depends on the experts of all of them",
    )

    signature = "tokens, indices, num_out_tokens=None, padded_mode=False"

    def num_outputs(self, call: Call) -> int:
        return 2

    def strategies(self, call: Call) -> Iterable[Strategy]:
        yield Strategy({"tokens": S(1)}, [S(1), R])
        yield Strategy({"tokens": P}, [P, R])
        if _rows_travel(call):
            yield Strategy({"tokens": S(0)}, [S(0), R])
            yield Strategy({"tokens": S(0), "indices": S(0)}, [S(0), R])

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        tokens, indices = (targets[call.position(name)] for name in ("tokens", "indices"))
        if not tokens.shard_order[0]:
            return None
        count, shape, arguments = call.spec("tokens").shape[0], tuple(call.spec("indices").shape), self.arguments
        given, whole = (indices, NOT_VARYING), (indices.replicated(), NOT_VARYING)

        def local(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            bound = arguments.bind(args, kwargs)
            experts = transition(bound["indices"], given, whole, shape)
            rows, where = sorted_by_expert(experts, bound.get("num_out_tokens"))
            return ExchangePlan.between(tokens, count, 0, outputs[0], 0, rows.cpu())(bound["tokens"], 0), where

        return local


class TokenUnpermute(StrategyOp):
    """``npu_moe_token_unpermute``: the hidden dim is sharded freely; linear in the rows and in the weights.

    Sharded rows travel back to the ranks of their tokens, without the kernel.
    """

    summary = OpSummary(
        "rows and their weights, features; tokens come out sharded like the rows",
        pending="passes through the tokens or the weights",
        communicates="sharded rows: 1 all-to-all | the same",
        whole="the indices, and packed rows: where a token comes from depends on the experts of all of them",
    )

    signature = "permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None"

    def strategies(self, call: Call) -> Iterable[Strategy]:
        yield Strategy({"permuted_tokens": S(1)}, S(1))
        yield Strategy({"permuted_tokens": P}, P)
        weights = ["probs"] if call.index("probs") is not None else []
        if weights:
            yield Strategy({"probs": P}, P)
        if _rows_travel(call):
            yield Strategy(dict.fromkeys(["permuted_tokens", *weights], S(0)), S(0))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        rows = targets[call.position("permuted_tokens")]
        if not rows.shard_order[0]:
            return None
        count, arguments, output = call.spec("permuted_tokens").shape[0], self.arguments, outputs[0]

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            bound = arguments.bind(args, kwargs)
            held, weights, where = bound["permuted_tokens"], bound.get("probs"), bound["sorted_indices"].cpu().long()
            copies = 1 if weights is None else weights.shape[1]
            mine = ExchangePlan.between(rows, count, 0, output, 0, where.view(-1, copies))(held, 0)
            return mine if weights is None else weighted_sum(mine, weights)

        return local
