"""Walking through what modules take and return."""

import dataclasses
from types import MappingProxyType
from typing import Any

import pytest
import torch

from hyper_parallel.utils.structures import map_structure, tensors_of


@dataclasses.dataclass
class Late:
    hidden: torch.Tensor
    later: Any = dataclasses.field(init=False)


def test_a_field_without_a_value_is_passed_over():
    given = Late(torch.ones(2))
    found = map_structure(given, lambda t: t + 1)
    assert found.hidden.tolist() == [2, 2]
    assert not hasattr(found, "later")
    assert given.hidden.tolist() == [1, 1]


def test_a_mapping_that_cannot_be_written_to():
    given = MappingProxyType({"hidden": torch.ones(2)})
    assert len(list(tensors_of(given))) == 1
    assert map_structure(given, lambda t: t) is given  # nothing changes
    with pytest.raises(TypeError, match=r"tensors in a mappingproxy .* return a dict"):
        map_structure(given, lambda t: t + 1)
