"""What core asks of this plugin: its op tables."""

from collections.abc import Sequence

from hyper_parallel.plugins import OpTable, hookimpl

HYPER_PARALLEL_API = 1


@hookimpl
def hyper_parallel_op_tables() -> Sequence[OpTable]:
    return OpTable.all_in_package(__package__, "tables")
