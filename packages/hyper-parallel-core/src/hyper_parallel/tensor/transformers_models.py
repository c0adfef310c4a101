"""Methods of ``transformers`` models that cannot work on parameters which are spread: done by all ranks together, or
refused before they change anything, with what to do instead. (Read in transformers 5.)
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

from hyper_parallel import _wiring
from hyper_parallel.utils.import_hooks import when_imported

__all__ = ["install"]

_RESIZE = (
    "resize_token_embeddings after the model was spread would make embeddings that lie on one device: resize first, "
    "then call parallelize_module, shard_module or fully_shard"
)

_STATE = (
    "save_pretrained writes the model's own state; leave state_dict out, on all ranks, or give it whole tensors, of "
    "hyper_parallel.checkpoint.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
)


def install(tensor_class: type) -> None:
    """For models with parameters of this class."""
    when_imported("transformers.modeling_utils", functools.partial(_change, tensor_class))


def _change(tensor_class: type, module: types.ModuleType) -> None:
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

    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        state = given.get("state_dict")
        if not is_spread(self.parameters() if state is None else state.values()):
            return save(self, *args, **kwargs)
        if state is not None:
            raise RuntimeError(_STATE)
        options = {name: value for name, value in given.items() if name not in ("save_directory", "max_shard_size")}
        return _wiring.save_spread_model(self, given["save_directory"], given.get("max_shard_size", "50GB"), options)

    model.resize_token_embeddings, model.save_pretrained = resize_token_embeddings, save_pretrained
