"""What of a torch function counts, as its name and its parameters tell."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.dispatch.entry import flag_position, is_asked, is_inplace


@pytest.mark.parametrize(
    ("name", "expected"),
    [("add_", True), ("add", False), ("__iadd__", True), ("__add__", False), ("__setitem__", True)]
    + [(name, False) for name in ("__invert__", "__index__", "__int__", "__getitem__")],
)
def test_which_names_write_their_first_argument(name, expected):
    assert is_inplace(name) is expected


def test_where_an_inplace_argument_is():
    at = flag_position(F.relu)
    assert at == 1
    assert flag_position(torch.relu) is None
    assert is_asked((0, True), {}, at)
    assert is_asked((0,), {"inplace": True}, at)
    assert not is_asked((0, False), {}, at)
    assert not is_asked((0,), {}, at)
