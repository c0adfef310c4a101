"""Layouts: their forms, what they say about themselves, and that equal ones are one object."""

from __future__ import annotations

import pickle

import pytest
import torch.distributed as dist

from hyper_parallel import Layout, PackedShard, Partial, Replicate, Shard
from hyper_parallel.sharding.layout import as_layout
from hyper_parallel.testing import mesh_of


def mesh():
    return mesh_of((2, 2))


def described():
    return Layout((2, 2), ("dp", "tp"))


class TestAliasForm:
    """Layouts that only describe their mesh need no process group."""

    def test_one_axis_per_dim(self):
        layout = described()("dp", "None", "tp")
        assert layout.placements == (Shard(0), Shard(2))
        assert layout.shard_order == ((0,), (), (1,))
        assert layout.ndim == 3
        assert layout.alias_tensor_map == ("dp", "None", "tp")
        assert layout.tensor_map == (1, -1, 0)

    def test_order_of_axes_on_one_dim(self):
        outer_dp, outer_tp = described()(("dp", "tp"), "None"), described()(("tp", "dp"), "None")
        assert outer_dp.placements == outer_tp.placements == (Shard(0), Shard(0))
        assert outer_dp.shard_order == ((0, 1), ())
        assert outer_tp.shard_order == ((1, 0), ())
        assert outer_dp != outer_tp
        assert outer_tp.alias_tensor_map == (("tp", "dp"), "None")
        assert outer_tp.tensor_map == ((0, 1), -1)
        assert "dim 0 by (tp, dp)" in repr(outer_tp)
        assert "dim 0" not in repr(outer_dp)

    def test_partial_and_whole(self):
        layout = described()("dp", None, partial={"tp": "sum"})
        assert layout.placements == (Shard(0), Partial("sum"))
        assert layout.is_partial()
        assert not layout.is_replicated()
        assert described()("None", ()).is_replicated()
        assert described()().ndim == 0

    def test_map_gives_the_layout_back(self):
        for aliases in (("dp", "None"), (("tp", "dp"),), ("None", "tp", "dp")):
            assert described()(*described()(*aliases).alias_tensor_map) == described()(*aliases)

    def test_mesh_is_not_made_before_it_is_needed(self):
        layout = described()("dp", "None")
        assert not dist.is_initialized()
        assert repr(layout) == "Layout(dp=2xtp=2 | dp: S(0), tp: R)"
        assert layout == described()("dp", "None")
        assert hash(layout) == hash(described()("dp", "None"))
        with pytest.raises(RuntimeError, match="call init_process_group first"):
            layout.bind()

    def test_uncalled_layout_has_no_tensor(self):
        assert repr(described()) == "Layout(dp=2xtp=2)"
        with pytest.raises(ValueError, match="call it with one alias per tensor dim"):
            described().bind()

    @pytest.mark.parametrize(
        ("aliases", "partial", "message"),
        [
            (("pp",), None, "mesh axis 'pp' is unknown"),
            (("dp", "dp"), None, "mesh axis 'dp' is used twice"),
            ((("dp", "dp"),), None, "mesh axis 'dp' is used twice"),
            (("dp",), {"pp": "sum"}, "partial: mesh axis 'pp' is unknown"),
            (("dp",), {"dp": "sum"}, "partial: mesh axis 'dp' already shards"),
        ],
    )
    def test_errors(self, aliases, partial, message):
        with pytest.raises(ValueError, match=message):
            described()(*aliases, partial=partial)

    @pytest.mark.parametrize(
        ("shape", "names", "message"),
        [
            ((2, 2), ("dp",), "needs 2 different axis names"),
            ((2, 2), ("dp", "dp"), "needs 2 different axis names"),
            ((2, 2), ("dp", "None"), '"None" marks a dimension'),
        ],
    )
    def test_errors_of_the_mesh(self, shape, names, message):
        with pytest.raises(ValueError, match=message):
            Layout(shape, names)


@pytest.mark.ranks(4)
def test_equal_layouts_are_one_object():
    first = Layout.from_placements(mesh(), [Shard(0), Replicate()], ndim=2)
    assert Layout.from_placements(mesh(), [Shard(-2), Replicate()], ndim=2) is first
    assert Layout.from_placements(mesh(), [Shard(0), Replicate()], ndim=2, shard_order={0: ["dp"]}) is first
    assert Layout.from_placements(mesh(), [Shard(0), Replicate()], ndim=3) is not first
    assert first.replace("tp", Shard(1)).replace(1, Replicate()) is first
    assert first.with_placements({0: Replicate()}) is first.replicated()
    packed = Layout.from_placements(mesh(), [PackedShard(0, [2, 2]), Replicate()], ndim=2)
    assert packed is Layout.from_placements(mesh(), [PackedShard(0, (2, 2)), Replicate()], ndim=2)
    assert packed is not first
    assert packed != first


@pytest.mark.ranks(4)
def test_alias_and_mesh_layouts_are_equal():
    alias, real = described()("dp", "None"), Layout.from_placements(mesh(), [Shard(0), Replicate()], ndim=2)
    assert alias == real
    assert real == alias
    assert hash(alias) == hash(real)
    assert alias.bind() is real
    assert alias.mesh == mesh()
    assert alias != Layout.from_placements(mesh(), [Shard(1), Replicate()], ndim=2)
    assert alias != Layout((2, 2), ("dp", "pp"))("dp", "None").bind()
    with pytest.raises(ValueError, match="needs 8 ranks, there are 4"):
        Layout((4, 2), ("dp", "tp"))("dp").bind()


@pytest.mark.ranks(4)
def test_alias_layout_on_some_ranks():
    layout = Layout((2,), ("tp",), rank_list=(1, 3))("tp")
    assert layout.mesh.mesh.tolist() == [1, 3]
    assert layout.info.coordinate == (None if dist.get_rank() % 2 == 0 else (dist.get_rank() // 2,))


@pytest.mark.ranks(4)
def test_pickled_layout_is_the_same_object():
    for layout in (
        Layout.from_placements(mesh(), [Shard(1), Shard(1)], ndim=2, shard_order={1: ("tp", "dp")}),
        Layout.from_placements(mesh(), [PackedShard(0, (3, 1)), Partial("max")], ndim=1),
    ):
        assert pickle.loads(pickle.dumps(layout)) is layout
    alias = pickle.loads(pickle.dumps(described()))
    assert alias("dp") == described()("dp")


@pytest.mark.ranks(4)
def test_orders():
    def layout(placements, order=None):
        return Layout.from_placements(mesh(), placements, ndim=2, shard_order=order)

    both = layout([Shard(0), Shard(0)])
    assert both.shard_order == ((0, 1), ())
    assert layout([Shard(0), Shard(0)], [("tp", "dp"), ()]) is layout([Shard(0), Shard(0)], {0: (1, 0)})
    # A packed shard is outermost, so it needs no order; any other order is refused.
    packed = layout([Shard(0), PackedShard(0, (2, 2))])
    assert packed.shard_order == ((1, 0), ())
    with pytest.raises(ValueError, match="PackedShard must be the outermost shard of dim 0"):
        layout([Shard(0), PackedShard(0, (2, 2))], {0: ("dp", "tp")})
    with pytest.raises(ValueError, match="PackedShard must be the outermost"):
        layout([PackedShard(0, (2, 2)), PackedShard(0, (2, 2))])
    with pytest.raises(ValueError, match=r"shard_order of dim 0 names axes \('dp',\), but its placements"):
        layout([Shard(0), Shard(0)], {0: ("dp",)})
    with pytest.raises(ValueError, match="mesh axis 'pp' is unknown"):
        layout([Shard(0), Shard(0)], {0: ("pp", "dp")})


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([Shard(0)], "1 placements .* for a mesh of 2 axes .*: give one per axis"),
        ([Shard(2), Replicate()], "out of range for a tensor of 2 dimensions"),
        ([Shard(-3), Replicate()], "out of range"),
        (["dp", Replicate()], "placement 'dp' on mesh axis 'dp' is not supported"),
    ],
)
def test_placement_errors(placements, message):
    with pytest.raises(ValueError, match=message):
        Layout.from_placements(mesh(), placements, ndim=2)


def test_packed_shard_is_a_value():
    packed = PackedShard(1, [4, 2])
    assert packed == PackedShard(1, (4, 2))
    assert hash(packed) == hash(PackedShard(1, (4, 2)))
    assert packed != PackedShard(1, (2, 4))
    assert packed != Shard(1)
    assert Shard(1) != packed
    assert pickle.loads(pickle.dumps(packed)) == packed
    for wrong in ((), (2, -1)):
        with pytest.raises(ValueError, match="one or more non-negative sections"):
            PackedShard(0, wrong)


@pytest.mark.ranks(4)
def test_renaming_dims():
    layout = Layout.from_placements(mesh(), [Shard(1), Shard(1)], ndim=3, shard_order={1: ("tp", "dp")})
    moved = layout.move_dims([1, 0, None], 2)
    assert moved is Layout.from_placements(mesh(), [Shard(0), Shard(0)], ndim=2, shard_order={0: ("tp", "dp")})
    with pytest.raises(ValueError, match=r"dimension 1 is sharded .* cannot be dropped"):
        layout.move_dims([0, None, 1], 2)


@pytest.mark.ranks(4)
def test_layout_in_the_place_of_mesh_or_placements():
    layout = Layout.from_placements(mesh(), [Shard(0), Replicate()], ndim=2)
    assert as_layout(mesh(), [Shard(0), Replicate()], 2) is layout
    assert as_layout(described()("dp", "None"), None, 2) is layout
    assert as_layout(mesh(), layout, 2) is layout
    with pytest.raises(ValueError, match="for a tensor of 2 dimensions, this one has 3"):
        as_layout(layout, None, 3)
    with pytest.raises(ValueError, match="placements are missing"):
        as_layout(mesh(), None, 2)
