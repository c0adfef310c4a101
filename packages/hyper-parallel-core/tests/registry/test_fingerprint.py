"""Ranks with different plugins: an error on every rank when a mesh is first used, which shows the difference."""

import types

import torch
import torch.distributed as dist

import hyper_parallel.sharding.mesh as mesh_module
from hyper_parallel import DistributedOp, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.errors import PluginError
from hyper_parallel.plugins import PluginManager, hookimpl
from hyper_parallel.registry import Registry, use_registry


class Rule(DistributedOp):
    """A rule without a meaning; ``colour`` is a parameter that ranks can disagree on."""

    def __init__(self, op_name, colour="red"):
        super().__init__(op_name)
        self.colour = colour


def plugin(*names):
    """A plugin that registers these ops."""
    module = types.ModuleType("plugin_of_a_test")
    module.HYPER_PARALLEL_API = 1

    @hookimpl
    def hyper_parallel_register_ops(registry):
        for name in names:
            registry.register(name, lambda name=name: Rule(name))

    module.hyper_parallel_register_ops = hyper_parallel_register_ops
    return module


def registry_of(environ=None, **plugins):
    manager = PluginManager([], environ or {})
    for name, ops in plugins.items():
        manager.register(plugin(*ops), name)
    return Registry(manager, environ or {})


def use_a_mesh(registries, sizes):
    """On a rank: use a mesh with this rank's registry; the text of the error."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
    mesh_module._INFOS.clear()  # an earlier test may have used an equal mesh, and each is compared once
    with use_registry(registry_of(**registries[dist.get_rank()])):
        try:
            distribute_tensor(torch.ones(4), mesh, [Shard(0)] * len(sizes))
        except PluginError as error:
            return str(error)
    return None


def test_extra_plugin_on_one_of_two_ranks_is_told_on_both(ranks):
    both = {"acme": ["cumsum", "cumprod"]}
    texts = ranks(2, use_a_mesh, [both, {**both, "extra": ["flip"]}], (2,))
    assert texts[0] == texts[1] is not None
    head, first, second = texts[0].splitlines()
    assert head == "the ranks of this mesh have different operators registered; install the same packages everywhere"
    assert first == "  rank 0: nothing beyond the common ones"
    assert second.startswith("  rank 1: flip: extra ")


def test_difference_is_told_across_both_axes_of_a_mesh(ranks):
    sets = [{"acme": ["flip"]}, {"acme": ["flip"]}, {"acme": ["flip"]}, {"acme": ["roll"]}]
    found = ranks(4, use_a_mesh, sets, (2, 2))
    for text in found:
        assert text is not None
        assert "rank 0: flip: acme" in text
        assert "rank 3: roll: acme" in text


def test_same_plugins_are_no_error_and_a_mesh_works_after_a_difference_was_repaired(ranks):
    same = {"acme": ["flip"]}
    assert ranks(2, use_a_mesh, [same, {"acme": []}], (2,)) != [None, None]
    assert ranks(2, use_a_mesh, [same, same], (2,)) == [None, None]


def test_rank_whose_plugins_cannot_be_loaded_does_not_leave_the_others_waiting(ranks):
    fault = {"environ": {"HYPER_PARALLEL_OPS_YAML_DIR": "/no/such/folder"}}
    found = ranks(2, use_a_mesh, [{}, fault], (2,))
    for text in found:
        head, line = text.splitlines()
        assert head == "the plugins of some ranks of this mesh cannot be used"
        assert line == "  rank 1: cannot be loaded: HYPER_PARALLEL_OPS_YAML_DIR=/no/such/folder is not a folder"


def test_many_differences_are_cut_short(ranks):
    many = {"acme": [f"op_of_a_test_{i}" for i in range(20)]}
    for text in ranks(2, use_a_mesh, [{}, many], (2,)):
        assert text.endswith("and 8 more")


def test_one_rank_compares_nothing(ranks):
    assert ranks(1, use_a_mesh, [{}], (1,)) == [None]
