"""What HyperParallel's public names have in common with PyTorch's: one row per name and argument, each with its test.

``nox -s torch_parity`` writes docs/torch-parity.md from it; a test compares the rows with the installed torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SAME = "the same"


@dataclass(frozen=True)
class Row:
    """One name or argument.

    Attributes:
        test: a test that shows it.
        here: what it is here, where that is not what it is for PyTorch.
        missing: whether the signature here does not have it.
    """

    test: str
    here: str = SAME
    missing: bool = False


@dataclass(frozen=True)
class Name:
    """A public name and its arguments."""

    row: Row
    arguments: Mapping[str, Row] = field(default_factory=dict)


def name(test: str, arguments: str = "", here: str = SAME, **others: Row) -> Name:
    """A name whose ``arguments`` are as PyTorch's and are shown by its own test; ``others`` have rows of their own."""
    return Name(Row(test, here), dict.fromkeys(arguments.split(), Row(test)) | others)


def own(test: str = "test_classes_that_are_pytorchs_own") -> Name:
    """A class or function that is PyTorch's own object."""
    return Name(Row(test, "PyTorch's own"))


_WHERE = Row("test_factories_take_the_layout_of_memory_and_the_mesh_of_the_block", f"{SAME}; a `Layout` too")
_FACTORY = {
    "dtype": Row("test_factory_arguments"),
    "layout": Row("test_factories_take_the_layout_of_memory_and_the_mesh_of_the_block"),
    "requires_grad": Row("test_factory_arguments"),
    "device_mesh": _WHERE,
    "placements": Row("test_factory_arguments", "`Partial` is a pending sum of the value, not the value on each rank"),
}
_DRAWN = _FACTORY | {"placements": Row("test_factory_arguments")}
_MESH = Row("test_what_is_distributed_lies_whole_on_the_mesh_of_the_block_by_default", f"{SAME}; a `Layout` too")
_PLACEMENTS = Row("test_what_is_distributed_lies_whole_on_the_mesh_of_the_block_by_default")
_STYLE = "input_layouts output_layouts use_local_output"
_INPUTS = "input_layouts desired_input_layouts input_kwarg_layouts desired_input_kwarg_layouts"
_NO_SUBMODULES = Row(
    "test_by_default_the_models_own_tensors",
    "no such argument (deprecated by PyTorch): get the submodule's",
    missing=True,
)
_STATE = "test_without_sharding_they_are_those_of_pytorch"

#: Module of PyTorch -> its public names; those of classes are written ``Class.method``.
TABLE: dict[str, dict[str, Name]] = {
    "torch.distributed.tensor": {
        "DTensor": name(
            "test_from_local_says_what_is_wrong_with_its_arguments", here="has no constructor: `from_local`"
        ),
        "DTensor.from_local": name(
            "test_from_local_takes_every_rank_to_hold_as_much",
            "local_tensor",
            device_mesh=_MESH,
            placements=_PLACEMENTS,
            run_check=Row(
                "test_run_check_finds_replicas_that_differ",
                "values that differ are an error on every rank; PyTorch broadcasts over them",
            ),
            shape=Row("test_from_local_of_uneven_shards_needs_the_global_shape", f"{SAME}; also without `stride`"),
            stride=Row("test_from_local_keeps_the_dim_order_in_memory"),
            grad_placements=Row("test_grad_placements_that_cannot_be_are_refused"),
        ),
        "DTensor.to_local": name(
            "test_to_local_takes_the_local_gradient_as_its_grad_placements_say", "grad_placements"
        ),
        "DTensor.full_tensor": name(
            "test_full_tensor_is_plain_and_equal_on_every_rank",
            grad_placements=Row("test_full_tensor_sums_the_ranks_gradients_when_told_so"),
        ),
        "DTensor.redistribute": name(
            "test_gradients_pass_every_transition",
            here=f"{SAME}; also to `Partial`, and with `grad_placements` and `wire_dtype`",
            device_mesh=Row("test_another_mesh_and_wrong_placements_are_refused", f"{SAME}; a `Layout` too"),
            placements=Row("test_the_target_is_given_in_any_of_five_forms", f"{SAME}; a `Layout` too"),
            async_op=Row("test_async_results_and_gradients_are_those_of_the_synchronous_call"),
            forward_dtype=Row("test_values_and_gradients_are_those_of_torch"),
            backward_dtype=Row("test_values_and_gradients_are_those_of_torch"),
        ),
        "DTensor.device_mesh": name("test_layout_properties"),
        "DTensor.placements": name("test_layout_properties"),
        "distribute_tensor": name(
            "test_the_whole_tensor_is_sent_once",
            "tensor",
            device_mesh=_MESH,
            placements=Row(_PLACEMENTS.test, f"{SAME}; `Partial` too"),
            src_data_rank=Row("test_the_data_of_the_source_rank_counts"),
        ),
        "distribute_module": name(
            "test_the_three_stages",
            "module partition_fn input_fn output_fn",
            device_mesh=_PLACEMENTS,
        ),
        **dict.fromkeys(("Shard", "Replicate", "Partial", "Placement"), own()),
        **{n: name("test_factories_make_the_tensors_of_torch", "size", **_FACTORY) for n in ("zeros", "ones", "empty")},
        "full": name("test_factories_make_the_tensors_of_torch", "size fill_value", **_FACTORY),
        **{
            n: name(
                "test_factories_make_the_tensors_of_torch",
                "size",
                here="the numbers of one device, in any layout",
                **_DRAWN,
            )
            for n in ("rand", "randn")
        },
    },
    "torch.distributed.device_mesh": {
        "init_device_mesh": own(),
        "DeviceMesh": own(),
    },
    "torch.distributed.tensor.parallel": {
        "ColwiseParallel": name("test_same_numbers", _STYLE, here=f"{SAME}; also `sections`, `overlap_pieces`"),
        "RowwiseParallel": name("test_same_numbers", _STYLE, here=f"{SAME}; also `sections`, `overlap_pieces`"),
        "SequenceParallel": name(
            "test_same_numbers",
            "sequence_dim use_local_output",
            here="parameters come from `src_data_rank`; gradients of their terms are summed",
        ),
        "PrepareModuleInput": name(
            "test_inputs_are_laid_out_and_all_are_kept",
            f"{_INPUTS} use_local_output",
            here=f"{SAME}; inputs beyond the layouts stay",
        ),
        "PrepareModuleOutput": name(
            "test_outputs_are_laid_out_and_all_are_kept",
            "output_layouts desired_output_layouts use_local_output",
            here=f"{SAME}; the kind of what holds the outputs stays",
        ),
        "PrepareModuleInputOutput": name(
            "test_inputs_and_outputs_of_a_module_of_plain_code",
            f"{_INPUTS} use_local_input output_layouts desired_output_layouts use_local_output",
        ),
        "ParallelStyle": name("test_applying_changes_no_style", here="`_apply` is public: `apply`"),
        "parallelize_module": name(
            "test_a_plan_of_names_globs_and_nested_plans",
            "module",
            device_mesh=Row("test_the_mesh_of_the_with_block_is_the_default"),
            parallelize_plan=Row(
                "test_without_a_plan_the_model_has_its_own", "by default the plan that is known for the model"
            ),
            src_data_rank=Row("test_parameters_come_from_the_source_rank"),
        ),
        "loss_parallel": name(
            "test_the_numbers_are_those_of_torchs_loss_parallel", here=f"{SAME}; also `mesh`, `strict`, and a decorator"
        ),
    },
    "torch.distributed.checkpoint": {
        "save": name(
            "test_stateful_objects_and_asynchronous_saving",
            "state_dict checkpoint_id storage_writer planner process_group no_dist",
            here=f"{SAME}; complete or not there",
            use_collectives=Row(
                "test_an_error_of_one_rank_is_raised_on_all", "no such argument: all ranks save together", missing=True
            ),
        ),
        "async_save": name(
            "test_stateful_objects_and_asynchronous_saving",
            "state_dict checkpoint_id storage_writer planner process_group",
            here=f"{SAME}; complete or not there",
            **dict.fromkeys(
                ("async_checkpointer_type", "async_stager", "no_dist", "use_collectives"),
                Row(
                    "test_a_save_waits_for_one_that_runs_into_the_same_folder",
                    "handed on to PyTorch as it is",
                    missing=True,
                ),
            ),
        ),
        "load": name(
            "test_training_resumed_on_other_meshes_has_the_losses_of_one_device",
            "state_dict checkpoint_id storage_reader planner process_group no_dist",
            here=f"{SAME}; also `strict`",
        ),
    },
    "torch.distributed.checkpoint.state_dict": {
        "StateDictOptions": own(),
        "get_model_state_dict": name(_STATE, "model options", submodules=_NO_SUBMODULES),
        "get_optimizer_state_dict": name(_STATE, "model optimizers options", submodules=_NO_SUBMODULES),
        "get_state_dict": name(_STATE, "model optimizers options", submodules=_NO_SUBMODULES),
        "set_model_state_dict": name(_STATE, "model model_state_dict options"),
        "set_optimizer_state_dict": name(_STATE, "model optimizers optim_state_dict options"),
        "set_state_dict": name(_STATE, "model optimizers model_state_dict optim_state_dict options"),
    },
}

#: Modules of PyTorch without ``__all__``, of which these are the names that users call.
_CHOSEN = ("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict")


def public_names(module: str) -> list[str]:
    """The public names of a module of PyTorch, with the methods and properties of DTensor."""
    if module in _CHOSEN:
        return list(TABLE[module])
    names = list(importlib.import_module(module).__all__)
    if "DTensor" in names:
        tensor = importlib.import_module(module).DTensor
        names += [f"DTensor.{n}" for n in vars(tensor) if not n.startswith("_")]
    return names


def theirs(module: str, dotted: str) -> Any:
    """What PyTorch has under a name."""
    return _found(importlib.import_module(module), dotted)


def ours(module: str, dotted: str) -> Any:
    """What HyperParallel has under a name."""
    where = "hyper_parallel.checkpoint" if module.startswith("torch.distributed.checkpoint") else "hyper_parallel"
    return _found(importlib.import_module(where), dotted)


def _found(owner: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        owner = getattr(owner, part)
    return owner


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    """The arguments of a function or class by name; none of a property, nor of a constructor that is not called."""
    if isinstance(value, property) or not callable(value) or value.__name__ == "DTensor":
        return {}
    found = inspect.signature(value).parameters
    return {n: p for n, p in found.items() if n != "self" and not n.startswith("_")}


def rows() -> Iterator[tuple[str, str, str | None, Row]]:
    """All rows: module, name, argument (None for the name itself), row."""
    for module, names in TABLE.items():
        for dotted, entry in names.items():
            yield module, dotted, None, entry.row
            for argument, row in entry.arguments.items():
                yield module, dotted, argument, row
