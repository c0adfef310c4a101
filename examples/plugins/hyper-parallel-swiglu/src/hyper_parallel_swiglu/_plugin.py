"""What HyperParallel asks of this plugin: its op table and its public names. Imports no torch."""

from hyper_parallel.plugins import OpTable, hookimpl

HYPER_PARALLEL_API = 1


@hookimpl
def hyper_parallel_op_tables() -> list[OpTable]:
    return [OpTable.from_package(__package__, "ops.yaml")]


@hookimpl
def hyper_parallel_public_names() -> dict[str, str]:
    return {"SwiGLU": "hyper_parallel_swiglu.module"}
