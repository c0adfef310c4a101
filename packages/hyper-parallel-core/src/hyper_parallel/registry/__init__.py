"""Which rule serves which function, from the installed plugins' tables and the user's registrations."""

from hyper_parallel.registry.registry import (
    Registry,
    default_registry,
    get_distributed_op,
    load_op_table,
    prefer,
    register_distributed_op,
    use_registry,
)

__all__ = [
    "Registry",
    "default_registry",
    "get_distributed_op",
    "load_op_table",
    "prefer",
    "register_distributed_op",
    "use_registry",
]
