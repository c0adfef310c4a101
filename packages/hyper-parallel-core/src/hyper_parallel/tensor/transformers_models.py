"""Methods of ``transformers`` models that cannot work on parameters which are spread: refused before they change or
write anything, with what to do instead. (Read in transformers 5.)
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

from hyper_parallel.utils.import_hooks import when_imported

__all__ = ["install"]

_RESIZE = (
    "resize_token_embeddings after the model was spread would make embeddings that lie on one device: resize first, "
    "then call parallelize_module, shard_module or fully_shard"
)
_SAVE = (
    "save_pretrained writes the memory of tensors, of which a model that is spread has a piece on each rank: on all "
    "ranks call hyper_parallel.checkpoint.save_safetensors(model, folder), which writes the same files, and "
    "model.config.save_pretrained(folder); or give it whole tensors, save_pretrained(folder, state_dict=...)"
)


def install(tensor_class: type) -> None:
    """For models with parameters of this class."""
    when_imported("transformers.modeling_utils", functools.partial(_refuse, tensor_class))


def _refuse(tensor_class: type, module: types.ModuleType) -> None:
    def is_spread(tensors: Iterable[Any]) -> bool:
        return any(isinstance(tensor, tensor_class) for tensor in tensors)

    model: Any = module.PreTrainedModel
    resize: Callable[..., Any] = model.resize_token_embeddings
    save: Callable[..., Any] = model.save_pretrained

    @functools.wraps(resize)
    def resize_token_embeddings(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_spread(self.parameters()):
            raise RuntimeError(_RESIZE)
        return resize(self, *args, **kwargs)

    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict", args[2] if len(args) > 2 else None)
        if is_spread(self.parameters() if given is None else given.values()):
            raise RuntimeError(_SAVE)
        return save(self, *args, **kwargs)

    model.resize_token_embeddings, model.save_pretrained = resize_token_embeddings, save_pretrained
