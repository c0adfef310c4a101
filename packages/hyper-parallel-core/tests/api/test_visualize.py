"""Pictures of layouts: which rank holds which block."""

import re
import textwrap

import pytest
import torch

from hyper_parallel import (
    CommTrace,
    Layout,
    PackedShard,
    Partial,
    Shard,
    distribute_tensor,
    init_device_mesh,
    visualize,
)

MESH = Layout((2, 2), ("dp", "tp"))


def picture(text):
    return textwrap.dedent(text).strip("\n")


def test_two_axes_on_two_dims_with_uneven_rows():
    assert str(visualize(MESH("dp", "tp"), (5, 4))) == picture(
        """
        tensor[5, 4] on dp=2 x tp=2
          dp: S(0), ranks hold slices of dim 0
          tp: S(1), ranks hold slices of dim 1

                dim 1
                0   2   4
        dim 0 0 +---+---+
                | 0 | 1 |
              3 +---+---+
                | 2 | 3 |
              5 +---+---+
        """
    )


def test_one_dim_is_drawn_across():
    assert str(visualize(MESH("dp"), (3,))).endswith(
        picture(
            """
            dim 0
              0     2     3
              +-----+-----+
              | 0,1 | 2,3 |
              +-----+-----+
            """
        )
    )


@pytest.mark.parametrize(
    ("aliases", "shape", "cells"),
    [
        ((("tp", "dp"), "None"), (5, 4), ["0", "2", "1", "3"]),
        (("None", "None"), (5, 4), ["0-3"]),
        (("dp", "None"), (1, 4), ["0,1"]),
        ((), (), ["0-3"]),
        (("None", "dp", "None", "tp"), (2, 3, 4, 5), ["0", "1", "2", "3"]),
    ],
)
def test_cells_name_the_ranks(aliases, shape, cells):
    text = str(visualize(MESH(*aliases), shape))
    assert re.findall(r"(?<=\| )[\d,-]+", text) == cells


def test_order_of_axes_pending_sums_and_empty_ranks_are_said():
    assert "dim 0 is cut by tp, then dp" in str(visualize(MESH(("tp", "dp"), "None"), (5, 4)))
    assert "ranks hold terms of a pending sum" in str(visualize(MESH("dp", "None", partial={"tp": "sum"}), (5, 4)))
    assert "nothing on rank 2,3" in str(visualize(MESH("dp", "tp"), (1, 4)))


def test_three_sharded_dims_and_no_elements_give_a_table_of_blocks():
    cube = Layout((2, 2, 2), ("a", "b", "c"))("a", "b", "c")
    lines = str(visualize(cube, (3, 3, 3))).splitlines()
    assert lines[5].split("  ")[0] == "RANK"
    assert lines[-1].split() == ["7", "2:3", "2:3", "2:3", "[1,", "1,", "1]"]
    assert "<pre>RANK" in visualize(cube, (3, 3, 3))._repr_html_()
    with pytest.raises(ValueError, match="a picture has two"):
        visualize(cube, (3, 3, 3)).svg()
    assert str(visualize(MESH("dp", "tp"), (0, 4))).splitlines()[-1].split() == ["3", "-", "2:4", "[0,", "2]"]


def test_picture_that_would_be_too_wide_gives_a_table():
    wide = Layout((64,), ("tp",))
    assert "RANK" in str(visualize(wide("None", "tp"), (2, 64)))
    assert "RANK" not in str(visualize(wide("tp", "None"), (64, 2)))


def test_notebook_gets_an_svg_with_one_block_per_cell():
    shown = visualize(MESH("dp", "tp", partial={}), (5, 4))._repr_html_()
    assert shown.count("<g><title>rank ") == 4
    assert "rank 3: dim 0 3:5, dim 1 2:4" in shown
    assert 'fill="url(#pending)"' not in shown
    assert 'fill="url(#pending)"' in visualize(MESH("dp", "None", partial={"tp": "sum"}), (5, 4))._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.zeros(2),), TypeError, "takes a DTensor, or a Layout and a shape; got Tensor"),
        ((MESH("dp"),), TypeError, "needs the global shape"),
        ((MESH("dp"), (2, 2)), ValueError, "is for a tensor of 1 dimensions"),
        ((MESH, (2, 2)), ValueError, "is for a tensor of 0 dimensions"),
    ],
)
def test_wrong_arguments_are_told(arguments, error, text):
    with pytest.raises(error, match=text):
        visualize(*arguments)


@pytest.mark.ranks(4)
def test_dtensor_is_shown_without_communication():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1), PackedShard(0, (4, 2))])
    pending = x.redistribute(placements=[Shard(1), Partial()])
    with CommTrace() as trace:
        text, waiting = str(visualize(x)), repr(visualize(pending))
    assert not trace.events
    assert text.startswith("float32[6, 4] on dp=2 x tp=2")
    # Each of the two sections is cut in two: rows 0:2 and 4:5 are on tp rank 0.
    assert re.findall(r"(?<=\| )[\d,-]+ \| [\d,-]+", text) == ["0 | 2", "1 | 3", "0 | 2", "1 | 3"]
    assert "pending sum" in waiting
    with pytest.raises(TypeError, match="a DTensor has its own"):
        visualize(x, (6, 4))
