"""Import path of the RFC for the names of ``hyper-parallel-tp``: each is looked up in ``hyper_parallel`` when used."""

from typing import Any

import hyper_parallel
from hyper_parallel._public_names import FIRST_PARTY_DIST_OF

_NAMES = frozenset(name for name, dist in FIRST_PARTY_DIST_OF.items() if dist == "hyper-parallel-tp")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(hyper_parallel, name)


def __dir__() -> list[str]:
    return sorted(_NAMES.intersection(dir(hyper_parallel)))
