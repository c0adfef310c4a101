"""The hooks of HyperParallel: everything that a plugin can add, one function each.

A plugin is a pip package with one entry point in group ``hyper_parallel.plugins``, whose value is a module::

    [project.entry-points."hyper_parallel.plugins"]
    acme = "acme_ops._plugin"

That module states the contract's version, ``HYPER_PARALLEL_API = 1``, and defines the hooks it needs, each marked with
``@hookimpl``. It must not import torch, directly or indirectly: it is imported to answer ``hyper-parallel plugins``
too. Whatever is heavy is named by a string and imported when first used.

Hooks run once, to fill tables; none runs while ops are dispatched. An implementation may leave out arguments that it
does not need. An exception in a hook leaves this one plugin out, with a warning that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.plugins.markers import hookspec

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from hyper_parallel.plugins.commands import Command
    from hyper_parallel.plugins.op_table import OpTable
    from hyper_parallel.plugins.platforms import Platform
    from hyper_parallel.plugins.registrar import OpRegistrar
    from hyper_parallel.sharding.sharding_plan import ShardingPlan


@hookspec
def hyper_parallel_op_tables() -> Sequence[OpTable]:  # type: ignore[empty-body]
    """Give the YAML op tables of this plugin. This is the way to add ops that needs the least.

    Returns:
        Tables, usually files next to the plugin module. Classes named in a table are imported when the op is first
        used. Format: :mod:`hyper_parallel.plugins.op_table`.

    Example::

        from hyper_parallel.plugins import OpTable, hookimpl

        HYPER_PARALLEL_API = 1

        @hookimpl
        def hyper_parallel_op_tables():
            return [OpTable.from_package(__package__, "ops.yaml")]
    """


@hookspec
def hyper_parallel_register_ops(registry: OpRegistrar) -> None:
    """Register ops from Python, where a table cannot say it (a name computed at run time, for instance).

    Args:
        registry: records what is registered under this plugin's name.

    Example::

        from hyper_parallel.plugins import hookimpl

        HYPER_PARALLEL_API = 1

        @hookimpl
        def hyper_parallel_register_ops(registry):
            def swiglu():                      # called when the op is first used
                from acme_ops.swiglu import SwigluOp
                return SwigluOp("swiglu")
            registry.register("torch.ops.acme.swiglu", swiglu)
    """


@hookspec
def hyper_parallel_public_names() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Give names that users reach as ``from hyper_parallel import NAME``.

    Returns:
        Public name to the place that defines it: ``"module"`` when it has the same name there, else
        ``"module:attribute"``. The module is imported when the name is first used. Names of core cannot be given.

    Example::

        from hyper_parallel.plugins import hookimpl

        HYPER_PARALLEL_API = 1

        @hookimpl
        def hyper_parallel_public_names():
            return {"acme_shard": "acme_ops.sharding", "AcmePlan": "acme_ops.plans:Plan"}
    """


@hookspec(firstresult=True)
def hyper_parallel_sharding_plan(model: torch.nn.Module, mesh: DeviceMesh) -> ShardingPlan | Mapping[str, Any] | None:
    """Give the sharding plan of a model, if this plugin knows the model. ``parallelize_module`` uses it when it is
    given none.

    Stops at the first plugin that answers; plugins are asked in the order of their names. Answer None for every model
    that you do not know for certain.

    Args:
        model: the model as its user built it, unsharded.
        mesh: the mesh it is to be sharded over; its axis names say what each axis is for.

    Returns:
        The plan: a :class:`ShardingPlan`, or a mapping from module names to styles of ``parallelize_module``. None to
        leave the model to other plugins.

    Example::

        from hyper_parallel.plugins import hookimpl

        HYPER_PARALLEL_API = 1

        @hookimpl
        def hyper_parallel_sharding_plan(model, mesh):
            if type(model).__name__ != "AcmeForCausalLM":
                return None
            from acme_ops.plans import acme_plan
            return acme_plan(model.config, mesh)
    """


@hookspec
def hyper_parallel_model_plans() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Give recipes for whole models, which ``parallelize``, ``load_pretrained`` and ``parallelize_module`` use.

    Two plugins with a recipe for one model are an error when it is asked for. For models that no plugin has one for,
    ``hyper_parallel_sharding_plan`` is asked.

    Returns:
        Full name of a model's class to ``"module:function"``, which is imported when such a model is parallelised. The
        function takes the model's configuration and its :class:`ParallelDims`, and two keywords that say whether the
        sequence and the logits shall be sharded; it returns a mapping from names of modules, with ``*`` for one part of
        a name, to styles, which are applied over the tp axis.

    Example::

        from hyper_parallel.plugins import hookimpl

        HYPER_PARALLEL_API = 1

        @hookimpl
        def hyper_parallel_model_plans():
            return {"acme.modeling.AcmeForCausalLM": "acme_ops.plans:acme_plan"}

        # acme_ops/plans.py
        def acme_plan(config, dims, *, sequence_parallel, loss_parallel):
            return {"layers.*.up": ColwiseParallel(use_local_output=False), "layers.*.down": RowwiseParallel()}
    """


@hookspec
def hyper_parallel_cli_commands() -> Sequence[Command]:  # type: ignore[empty-body]
    """Give subcommands of the ``hyper-parallel`` program.

    Returns:
        Commands. A command that a plugin gives cannot take the name of one of core's.

    Example::

        from hyper_parallel.plugins import Command, hookimpl

        HYPER_PARALLEL_API = 1

        def add_arguments(parser):
            parser.add_argument("model")

        def run(arguments):
            print("checking", arguments.model)
            return 0                           # the exit code

        @hookimpl
        def hyper_parallel_cli_commands():
            return [Command("acme-check", "check a model against Acme's rules", run, add_arguments)]
    """


@hookspec
def hyper_parallel_platforms() -> Sequence[Platform]:  # type: ignore[empty-body]
    """Give kinds of device that core does not know, or a better collective backend for one that it does.

    Returns:
        Platforms. Two plugins that give different platforms for one device type are an error when it is asked for.

    Example::

        from hyper_parallel.plugins import Platform, hookimpl

        HYPER_PARALLEL_API = 1

        @hookimpl
        def hyper_parallel_platforms():
            return [Platform(device_type="acme", backend="accl", module="torch_acme")]
    """
