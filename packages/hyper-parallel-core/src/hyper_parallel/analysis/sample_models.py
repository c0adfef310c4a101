"""A small model to look at, from a name: a ``transformers`` model id, a config, or a function of the user's.

No weights are loaded. A ``transformers`` model is built as small as still shows every function: with few layers, heads
and experts on the CPU, or, where its configuration does not stand that, with few layers on the meta device.
"""

from __future__ import annotations

import difflib
import importlib
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from hyper_parallel.analysis.user_traceback import user_traceback
from hyper_parallel.torch_compat import pytree

__all__ = ["ModelNotUsable", "SampleModel", "load_function", "sample_models"]

BATCH, LENGTH = 2, 16
MAX_PARAMETERS = 200_000_000
"""Size beyond which a model is not built with real memory."""
HUB_TIMEOUT = 3.0
"""Seconds within which the hub of models must answer."""


class ModelNotUsable(Exception):
    """A model cannot be found or built; the text says what to give instead."""


@dataclass
class SampleModel:
    """A model and one batch for it.

    Attributes:
        model: the module.
        args, kwargs: what it is called with.
        how: how it was built, for people.
    """

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    how: str = "as its function builds it"

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the batch."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    def loss(self) -> torch.Tensor:
        """Call the model; its loss, or else the sum of its outputs that have a gradient."""
        output = self.model(*self.args, **self.kwargs)
        if isinstance(loss := getattr(output, "loss", None), torch.Tensor):
            return loss
        leaves = output.values() if isinstance(output, Mapping) else pytree.tree_leaves(output)
        found = [leaf.sum() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not found:
            raise ModelNotUsable(
                "the model returns no tensor that needs a gradient, so there is no training step to look at"
            )
        return sum(found[1:], start=found[0])


def sample_models(name: str) -> Iterator[SampleModel]:
    """Ways to build the model of this name, best first; the next one is for when the last one fails in use.

    Args:
        name: ``package:function`` that returns a module, or a module and its batch (a dict of keyword arguments, or a
            tuple); a folder with ``config.json`` or such a file; a model id, or a model type such as ``qwen3``.

    Raises:
        ModelNotUsable: when there is none.
    """
    if ":" in name and not Path(name).exists():
        yield _from_function(load_function(name), name)
        return
    config = _config(name)
    small = _smaller(config, wide=False)
    try:
        model = _build(small, "meta")
        if sum(p.numel() for p in model.parameters()) <= MAX_PARAMETERS:
            yield _with_tokens(_build(small, "cpu"), small, "cpu", "small, on the CPU, random weights")
    except ModelNotUsable:
        raise
    except Exception as error:  # a size that does not go with another one
        note = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"hyper-parallel: the model cannot be built small ({note}); using the meta device", file=sys.stderr)
    few = _smaller(config, wide=True)
    yield _with_tokens(_build(few, "meta"), few, "meta", "with few layers, on the meta device")


def load_function(name: str) -> Callable[..., Any]:
    """The function ``package.module:function``; modules in the working directory are found too.

    Raises:
        ModelNotUsable: when there is no such module or function.
    """
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ModelNotUsable(f"{name}: there is no module {error.name!r}, here or among the installed ones") from None
    except Exception as error:
        raise ModelNotUsable(f"{name}: the import of {module_name} failed:\n{user_traceback(error)}") from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ModelNotUsable(f"{name}: module {module_name!r} has no function {attribute!r}")
    return found


def _from_function(function: Callable[..., Any], name: str) -> SampleModel:
    try:
        made = function()
    except Exception as error:
        raise ModelNotUsable(f"{name} failed:\n{user_traceback(error)}") from error
    model, batch = made if isinstance(made, tuple) else (made, ())
    if not isinstance(model, torch.nn.Module):
        raise ModelNotUsable(
            f"{name} returned a {type(model).__name__}; it must return a module, or a module and its batch"
        )
    if isinstance(batch, Mapping):
        return SampleModel(model, kwargs=dict(batch))
    return SampleModel(model, batch if isinstance(batch, tuple) else (batch,))


# -- transformers -------------------------------------------------------------------------------------------------


def _config(name: str) -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        why = "is not installed" if absent else f"cannot be imported ({error})"
        raise ModelNotUsable(
            f"{name!r} is looked up by transformers, which {why}:\n"
            f"  {sys.executable} -m pip install {'' if absent else '-U '}transformers, or give package:function"
        ) from (None if absent else error)
    if Path(name).exists():
        return _from_pretrained(transformers, name, "it has no usable config.json")
    if name in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(name)
    try:  # what was downloaded before needs no network
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        unreachable = _hub_failure()
    if unreachable:
        raise ModelNotUsable(
            f"{name!r} is no model type of transformers, nor a file or folder here, nor a model id that was downloaded "
            f"before, and {unreachable}\n{_alternatives(transformers, name)}"
        )
    return _from_pretrained(transformers, name, "it is no model type, and no model id of the hub either")


def _from_pretrained(transformers: Any, name: str, what: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ModelNotUsable(
            f"transformers finds no configuration for {name!r}: {what} ({str(error).splitlines()[0]})\n"
            f"{_alternatives(transformers, name)}"
        ) from error


def _alternatives(transformers: Any, name: str) -> str:
    near = [] if Path(name).exists() else difflib.get_close_matches(name, list(transformers.CONFIG_MAPPING), n=3)
    asked = f"  did you mean {' or '.join(near)}?\n" if near else ""
    return f"{asked}  give a model id, a model type such as qwen3, a config.json or its folder, or package:function"


def _hub_failure() -> str:
    """Why the hub of models cannot be asked; empty when it can. Asked once: its client tries for most of a minute."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if getproxies().get("https"):
        return ""  # the proxy knows
    host = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((host.hostname or "", host.port or 443), timeout=HUB_TIMEOUT).close()
    except OSError as error:
        return f"{host.hostname} cannot be reached ({error})"
    return ""


def _build(config: Any, device: str) -> torch.nn.Module:
    transformers: Any = importlib.import_module("transformers")
    # On the meta device some kernels exist for training's usual dtype only; there it costs nothing.
    dtype = torch.bfloat16 if device == "meta" else torch.float32
    with torch.device(device), _default_dtype(dtype):
        if type(config) in transformers.AutoModelForCausalLM._model_mapping:
            return transformers.AutoModelForCausalLM.from_config(config)
        for architecture in config.architectures or ():
            if hasattr(transformers, architecture):
                return getattr(transformers, architecture)(config)
        return transformers.AutoModel.from_config(config)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _with_tokens(model: torch.nn.Module, config: Any, device: str, how: str) -> SampleModel:
    vocabulary = _text(config).vocab_size
    tokens = torch.randint(0, vocabulary, (BATCH, LENGTH), device=device)
    return SampleModel(model, kwargs={"input_ids": tokens, "labels": tokens.clone()}, how=how)


def _text(config: Any) -> Any:
    """The part of a configuration that is about the language model."""
    return config.get_text_config()


# Names of sizes in configurations, and the largest value that they keep.
_LIMITS = {
    "vocab_size": 256, "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "index_n_heads": 4, "index_topk": 8,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
_KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type")
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def _smaller(config: Any, *, wide: bool) -> Any:
    """A copy with as many layers as it takes to have each kind, and, unless ``wide``, with small sizes."""
    small = type(config).from_dict(config.to_dict())
    text = _text(small)
    lists = {name: list(getattr(text, name, None) or ()) for name in _KINDS_OF_LAYERS}
    dense = getattr(text, "first_k_dense_replace", None)
    layers = max([2, *(1 + kinds.index(kind) for kinds in lists.values() for kind in kinds)])
    if isinstance(dense, int):
        text.first_k_dense_replace = min(dense, 1)
    if getattr(text, "num_hidden_layers", 0) > layers:
        text.num_hidden_layers = layers
        for name, kinds in lists.items():
            if kinds:
                setattr(text, name, kinds[:layers])
    if not wide:
        _limit_sizes(text)
    return small


def _limit_sizes(text: Any) -> None:
    """Make the sizes of a language model's configuration small; what has to divide something still does."""
    heads = getattr(text, "num_attention_heads", None)
    explicit = getattr(text, "head_dim", None) is not None
    one_kind = getattr(text, "num_key_value_heads", None) == heads
    for name, limit in _LIMITS.items():
        _limit(text, name, limit)
    if one_kind and heads is not None:
        text.num_key_value_heads = text.num_attention_heads
    if isinstance(heads, int) and isinstance(getattr(text, "hidden_size", None), int):
        text.hidden_size = 128 if explicit else text.hidden_size // heads * text.num_attention_heads
    for name in _TOKEN_IDS if hasattr(text, "vocab_size") else ():
        _limit(text, name, text.vocab_size - 1)


def _limit(config: Any, name: str, limit: int) -> None:
    value = getattr(config, name, None)
    if isinstance(value, int):
        setattr(config, name, min(value, limit))
