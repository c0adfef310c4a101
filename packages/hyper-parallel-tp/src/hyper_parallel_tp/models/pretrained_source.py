"""What ``load_pretrained`` is given, a folder or a configuration; and the class and dtype that it means, as
``transformers`` chooses them."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.checkpoint import stored_dtype

__all__ = ["PretrainedSource", "pretrained_source"]

_READ = ("fp8", "mxfp4")
"""Ways of quantising of which ``load_safetensors`` gives back the numbers."""

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")


@dataclass(frozen=True)
class PretrainedSource:
    """What is to be built and read.

    Attributes:
        make: builds the model.
        folder: of its files; None when there is only a configuration.
        has_weights: whether the folder holds values.
    """

    make: Callable[[], nn.Module]
    folder: Path | None
    has_weights: bool


def pretrained_source(
    given: Any, model_class: type[nn.Module] | None, dtype: torch.dtype | str | None, trust_remote_code: bool
) -> PretrainedSource:
    """Understand the first argument of :func:`load_pretrained`.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: weights of a kind that is not read, quantised in a way that is not known, code of its own that was
            not asked for, or an unknown dtype.
        TypeError: something else was given.
    """
    library = _transformers()
    config, folder = _config(library, given, trust_remote_code)
    has_weights = folder is not None and _has_weights(folder)
    _forget_quantization(config, folder)
    kind = _dtype(dtype, config, folder if has_weights else None)
    options = {} if kind is None else {"dtype": kind}

    def make() -> nn.Module:
        built: nn.Module
        chosen: Any = model_class or _class_of(library, config, folder, trust_remote_code)
        if chosen is not None:
            part = copy.deepcopy(_config_of_class(config, chosen))
            built = chosen._from_config(part, **options)  # noqa: SLF001 - what from_config of the auto classes calls
        else:
            auto = _auto_class(library, config)
            built = auto.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code, **options)
        return built

    return PretrainedSource(make, folder, has_weights)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "load_pretrained needs transformers: pip install transformers", name="transformers"
        ) from error


def _config(library: Any, given: Any, trust_remote_code: bool) -> tuple[Any, Path | None]:
    if isinstance(given, library.PreTrainedConfig):
        return copy.deepcopy(given), None
    if isinstance(given, Mapping):
        settings = dict(given)
        if "model_type" not in settings:
            raise ValueError("load_pretrained: a configuration has a 'model_type', such as 'qwen3'; the dict has none")
        return library.AutoConfig.for_model(settings.pop("model_type"), **settings), None
    if not isinstance(given, (str, Path)):
        raise TypeError(f"load_pretrained takes a folder, a configuration or a dict, got {type(given).__name__}")
    folder = Path(given)
    if not (folder / "config.json").is_file():
        hint = "" if folder.exists() else f"; if that is a name on the hub: hf download {given} --local-dir FOLDER"
        raise FileNotFoundError(f"load_pretrained: there is no {folder / 'config.json'}{hint}")
    try:
        config = library.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if trust_remote_code or "auto_map" not in json.loads((folder / "config.json").read_text(encoding="utf-8")):
            raise
        raise _code_of_its_own(folder) from error
    return config, folder


def _has_weights(folder: Path) -> bool:
    """Whether there are safetensors files.

    Raises:
        ValueError: there are weights of another kind only, which would be drawn anew without a word.
    """
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file():
        return True
    others = sorted(file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern))
    if others:
        raise ValueError(
            f"load_pretrained reads safetensors files, and {folder} has {', '.join(others[:3])}; convert it once: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
        )
    return False


def _forget_quantization(config: Any, folder: Path | None) -> None:
    """Take the quantisation out of a configuration, as weights are given back in full.

    Raises:
        ValueError: it is of a kind that is not known.
    """
    for part in [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]:
        stated = getattr(part, "quantization_config", None)
        if stated is None:
            continue
        method = stated.get("quant_method") if isinstance(stated, Mapping) else getattr(stated, "quant_method", None)
        method = str(getattr(method, "value", method))
        if method not in _READ:
            raise ValueError(
                f"load_pretrained: {folder or 'the configuration'} is quantised by {method!r}, which cannot be trained "
                f"shard by shard; known are {' and '.join(_READ)}, whose weights are given back in full. Use the "
                "weights that it was made from, or dequantise it once: model = AutoModelForCausalLM.from_pretrained("
                "folder); model.dequantize(); model.save_pretrained(other_folder)"
            )
        del part.quantization_config


def _dtype(given: torch.dtype | str | None, config: Any, folder: Path | None) -> torch.dtype | None:
    """The dtype to build in, as ``from_pretrained`` has it; None: that of a model without weights."""
    if isinstance(given, str) and given != "auto":
        named = getattr(torch, given, None)
        if not isinstance(named, torch.dtype):
            raise ValueError(f"load_pretrained: dtype is 'auto' or the name of one, such as 'bfloat16', got {given!r}")
        return named
    if isinstance(given, torch.dtype):
        return given
    if given not in (None, "auto"):
        raise TypeError(f"load_pretrained: dtype is a torch.dtype, its name, or 'auto', got {given!r}")
    stated = getattr(config, "dtype", None)
    if stated is not None or folder is None:
        return getattr(torch, stated) if isinstance(stated, str) else stated
    return stored_dtype(folder)


def _class_of(library: Any, config: Any, folder: Path | None, trust_remote_code: bool) -> type[nn.Module] | None:
    """The class that a configuration names; None: the one that ``transformers`` has for its type."""
    if trust_remote_code and getattr(config, "auto_map", None):
        return None
    for name in getattr(config, "architectures", None) or ():
        found: type[nn.Module] | None = getattr(library, name, None)
        if found is not None:
            return found
        if folder is not None and not trust_remote_code and _has_its_own_code(library, config):
            raise _code_of_its_own(folder)
    return None


def _config_of_class(config: Any, model_class: Any) -> Any:
    """The part of a configuration that is for a class: that of text, for one that leaves out the images."""
    kind = getattr(model_class, "config_class", None)
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return config if kind is None else next((part for part in (config, *parts) if type(part) is kind), config)


def _has_its_own_code(library: Any, config: Any) -> bool:
    return bool(getattr(config, "auto_map", None)) and type(config) not in library.AutoModelForCausalLM._model_mapping


def _auto_class(library: Any, config: Any) -> Any:
    """The first that knows a configuration, code in its folder before the library's."""
    autos = (library.AutoModelForCausalLM, library.AutoModelForImageTextToText)
    by_folder = [auto for auto in autos if auto.__name__ in (getattr(config, "auto_map", None) or {})]
    by_library = [auto for auto in autos if type(config) in auto._model_mapping]
    return (by_folder + by_library + [autos[0]])[0]  # whose error lists what there is


def _code_of_its_own(folder: Path) -> ValueError:
    return ValueError(
        f"load_pretrained: the model in {folder} is code in that folder, which would be run; read it, and pass "
        "trust_remote_code=True"
    )
