"""What core asks of this plugin: the names that users import from ``hyper_parallel``."""

from collections.abc import Mapping

from hyper_parallel.plugins import hookimpl
from hyper_parallel_fsdp import PUBLIC_NAMES

HYPER_PARALLEL_API = 1


@hookimpl
def hyper_parallel_public_names() -> Mapping[str, str]:
    return PUBLIC_NAMES
