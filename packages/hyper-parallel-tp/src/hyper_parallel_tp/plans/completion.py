"""A plan for a model of ``transformers`` without a recipe: what it carries, completed by layers that are recognised.

Recognised are layers by their names and sizes, where both leave no doubt: embedding and head, attention with a
projection each for queries, keys, values and output, and MLPs. What they compute goes on as DTensors of global shape,
so whatever the model's code does between them stays right. The rest is whole on every rank, and the reason is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hyper_parallel import Placement, Replicate
from hyper_parallel_tp.plans.transformers import transformers_plan
from hyper_parallel_tp.styles.attention import AttentionParallel
from hyper_parallel_tp.styles.colwise_rowwise import ColwiseParallel, RowwiseParallel, base_layer
from hyper_parallel_tp.styles.sequence_parallel import NoParallel
from hyper_parallel_tp.styles.style import ParallelStyle

__all__ = ["completed_plan"]

OUTPUTS = ("o_proj", "out_proj", "dense")
"""Names of the projection after attention, beside ``q_proj``, ``k_proj`` and ``v_proj``."""

PACKED = ("query_key_value", "dense")
"""Names of a projection that gives, head by head, queries, keys and values side by side, and of the one after."""

MLPS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
    (("linear_fc1",), "linear_fc2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
"""Names of projections into the features of an MLP, and of the one out of them."""


def completed_plan(model: nn.Module, ranks: int) -> tuple[str, dict[str, ParallelStyle], dict[str, str]] | None:
    """The plan of a model without a recipe.

    Args:
        model: of ``transformers``; layers of others are not guessed.
        ranks: over how many tp is.

    Returns:
        Where the plan is from, in words; names of modules to styles; and for parameters that stay whole, the reason.
        None where nothing is recognised.
    """
    carried = transformers_plan(model)
    if carried is None and not hasattr(model, "get_input_embeddings"):
        return None
    plan = _Completion(model, ranks, carried or {"": NoParallel()})
    plan.add_embeddings()
    for name, module in model.named_modules():
        plan.add_attention(name, module)
        plan.add_packed_attention(name, module)
        plan.add_mlp(name, module)
    if not plan.added and carried is None:
        return None
    kind = type(model).__name__
    source = f"the tp_plan of {kind}" if carried is not None else f"the layers of {kind} that are recognised"
    if carried is not None and plan.added:
        source += f", completed by {', '.join(sorted(plan.added))}"
    return source, plan.ordered(), plan.reasons()


class _Completion:
    """A plan that grows by what is recognised and that no style has yet.

    Attributes:
        added: kinds of layers that were added.
    """

    def __init__(self, model: Any, ranks: int, styles: Mapping[str, ParallelStyle]) -> None:
        self.model, self.ranks = model, ranks
        self.styles = dict(styles)
        self.added: set[str] = set()
        self.refused: dict[str, str] = {}
        self.names = {module: name for name, module in model.named_modules()}

    def add_embeddings(self) -> None:
        """Embedding and head by vocabulary; tied ones alike."""
        embedding, head = self._asked("get_input_embeddings"), self._asked("get_output_embeddings")
        tied = head is not None and embedding is not None and _weight(head) is _weight(embedding)
        taken = any(isinstance(layer, nn.Module) and self._has_style(self.names[layer]) for layer in (embedding, head))
        if tied and taken:  # by a style of the model's own, which the other follows
            return
        if isinstance(embedding, nn.Embedding) and not self._has_style(self.names[embedding]):
            style = RowwiseParallel(input_layouts=Replicate(), use_local_output=False)
            self._add("the embedding", {self.names[embedding]: style})
        if isinstance(head, nn.Linear) and not self._has_style(self.names[head]):
            style = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)  # type: ignore[assignment]
            self._add("the head", {self.names[head]: style})

    def add_attention(self, name: str, module: nn.Module) -> None:
        """A block with the projections of attention, by heads."""
        output = next((out for out in OUTPUTS if isinstance(getattr(module, out, None), nn.Module)), None)
        projections = [getattr(module, part, None) for part in ("q_proj", "k_proj", "v_proj", output or "")]
        if output is None or not _are_linear(projections) or self._has_style_within(name, projections):
            return
        sizes = _heads(module, *map(base_layer, projections))  # type: ignore[arg-type]
        if sizes is None:
            self.refused[name] = "its heads are not recognised"
            return
        heads, head_dim = sizes
        if heads % self.ranks:
            self.refused[name] = f"tp={self.ranks} does not divide its {heads} heads"
            return
        self._add("attention by heads", {name: AttentionParallel(output=output, head_dim=head_dim)})

    def add_packed_attention(self, name: str, module: nn.Module) -> None:
        """A block with one projection for the queries, keys and values of each head, by heads."""
        projections = [getattr(module, part, None) for part in PACKED]
        if not _are_linear(projections) or self._has_style_within(name, projections):
            return
        packed, output = map(base_layer, projections)  # type: ignore[arg-type]
        heads = next((getattr(module, at) for at in ("num_heads", "num_attention_heads") if hasattr(module, at)), 0)
        if not heads or packed.out_features != 3 * output.in_features:  # type: ignore[operator]
            self.refused[name] = "its heads are not recognised"
        elif heads % self.ranks:
            self.refused[name] = f"tp={self.ranks} does not divide its {heads} heads"
        else:
            split, join = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
            names = (f"{name}.{part}" for part in PACKED)
            self._add("attention by heads", dict(zip(names, (split, join), strict=True)))

    def add_mlp(self, name: str, module: nn.Module) -> None:
        """An MLP, by features."""
        for into, out_of in MLPS:
            layers = [getattr(module, part, None) for part in (*into, out_of)]
            if not _are_linear(layers) or self._has_style_within(name, layers):
                continue
            *first, last = (base_layer(layer) for layer in layers)  # type: ignore[arg-type]
            if any(layer.out_features != last.in_features for layer in first):
                self.refused[name] = "the sizes of its projections do not follow from each other"
                return
            split, join = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
            self._add("MLPs by features", {**{f"{name}.{part}": split for part in into}, f"{name}.{out_of}": join})
            return

    def ordered(self) -> dict[str, ParallelStyle]:
        """The styles; those that take all that is left come last."""
        return {name: self.styles[name] for name in sorted(self.styles, key=lambda name: not name)}

    def reasons(self) -> dict[str, str]:
        """Why parameters with several dims stay whole, by the name of the parameter or of a module around it."""
        found = {}
        for name, parameter in self.model.named_parameters():
            if parameter.ndim > 1 and not self._is_sharded(name):
                around = next((module for module in _upwards(name) if module in self.refused), None)
                found[name] = self.refused[around] if around is not None else self._why(name)
        return found

    def _why(self, name: str) -> str:
        owner_name = name.rpartition(".")[0]
        owner = self.model.get_submodule(owner_name)
        style = next((self.styles[at] for at in _upwards(name) if at in self.styles and at), None)
        if isinstance(style, AttentionParallel):
            return f"tp={self.ranks} does not divide its key and value heads"
        if style is not None and not isinstance(style, NoParallel):
            return "the model's plan shards only other parameters of its module"
        if isinstance(style, NoParallel):
            return "the model's plan keeps it whole"
        if not isinstance(base_layer(owner), (nn.Linear, nn.Embedding)):
            return f"{type(owner).__name__} is neither nn.Linear nor nn.Embedding, and no plan names it"
        return "no plan names it, and its part of the model is not recognised"

    def _is_sharded(self, name: str) -> bool:
        """Whether a style shards a parameter, said before it is applied."""
        owner_name, _, leaf = name.rpartition(".")
        for at in _upwards(name):
            style = self.styles.get(at)
            if style is None or not at:
                continue
            if isinstance(style, (ColwiseParallel, RowwiseParallel)):
                return True
            if isinstance(style, AttentionParallel):
                return self._is_sharded_head(at, style, owner_name)
            placements: Mapping[str, Placement] = getattr(style, "parameters", None) or getattr(style, "placements", {})
            inside = name.removeprefix(f"{at}.")
            return not isinstance(placements.get(inside, placements.get(leaf, Replicate())), Replicate)
        return self._is_tied_to_sharded(name)

    def _is_sharded_head(self, block: str, style: AttentionParallel, owner: str) -> bool:
        projections = {f"{block}.{part}" for part in (style.query, style.output)}
        module: Any = self.model.get_submodule(block)
        key = base_layer(getattr(module, style.key))
        head_dim = style.head_dim or module.head_dim
        if (key.out_features // head_dim) % self.ranks == 0:  # type: ignore[operator]
            projections |= {f"{block}.{part}" for part in (style.key, style.value)}
        return any(owner == part or owner.startswith(f"{part}.") for part in projections)

    def _is_tied_to_sharded(self, name: str) -> bool:
        parameter = self.model.get_parameter(name)
        return any(
            other is parameter and alias != name and any(at in self.styles for at in _upwards(alias) if at)
            for alias, other in self.model.named_parameters(remove_duplicate=False)
        )

    def _add(self, what: str, styles: Mapping[str, ParallelStyle]) -> None:
        self.styles.update(styles)
        self.added.add(what)

    def _asked(self, getter: str) -> nn.Module | None:
        """What the model says of itself, where it says so."""
        try:
            found = getattr(self.model, getter)()
        except (AttributeError, NotImplementedError):
            return None
        return found if found in self.names else None

    def _has_style(self, name: str) -> bool:
        """Whether a module, or one around it, has a style."""
        return any(at in self.styles and at for at in (name, *_upwards(name)))

    def _has_style_within(self, name: str, layers: list[Any]) -> bool:
        """Whether one of the layers of a module has a style, or a module around."""
        return self._has_style(name) or any(self._has_style(self.names[layer]) for layer in layers)


def _upwards(name: str) -> Iterator[str]:
    """The names of the modules around, from inside."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _weight(layer: Any) -> Any:
    return getattr(base_layer(layer), "weight", None)


def _are_linear(layers: list[Any]) -> bool:
    return all(isinstance(layer, nn.Module) and isinstance(base_layer(layer), nn.Linear) for layer in layers)


def _heads(module: Any, query: Any, key: Any, value: Any, output: Any) -> tuple[int, int] | None:
    """Number of query heads and their size, where the sizes of all projections agree with it."""
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int) or not head_dim or query.out_features % head_dim:
        return None
    heads, fewer = query.out_features // head_dim, key.out_features // head_dim
    fits = fewer and key.out_features % head_dim == 0 and heads % fewer == 0 and value.out_features % fewer == 0
    if not fits or output.in_features != heads * (value.out_features // fewer):
        return None
    return heads, head_dim
