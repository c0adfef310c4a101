"""Code that is written for any tensor: operators with strangers, comparisons, copies, factories by example, swaps."""

import operator

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor
from hyper_parallel.testing import mesh_of


def spread(value, *placements):
    return distribute_tensor(value, mesh_of((2,)), placements or [Shard(0)])


# -- operators with what is no tensor ----------------------------------------------------------------------------------


class Stranger:
    """Takes over where the tensor gives up."""

    def __radd__(self, other):
        return "added"

    __rpow__ = __rsub__ = __radd__

    def __eq__(self, other):
        return "equal"

    __hash__ = object.__hash__


OPERATORS = (
    "eq ne lt le gt ge add sub mul truediv floordiv mod pow matmul and_ xor lshift iadd isub imul itruediv ifloordiv "
    "ipow iand ilshift"
).split()
OTHERS = [None, "s", (1, 2), {}, object, Stranger(), ...]


def outcome(function, *args):
    try:
        result = function(*args)
    except Exception as error:
        return type(error)
    return type(result) if isinstance(result, torch.Tensor) else result


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()], ids=str)
def test_operators_with_strangers(placement):
    """As on a plain tensor, at the first call and at later ones; on either side."""
    wrong = []
    for name in OPERATORS:
        function = getattr(operator, name)
        for other in OTHERS:
            for swapped in (False, True):
                for _ in range(2):
                    x, plain = spread(torch.ones(3, 2), placement), torch.ones(3, 2)
                    values = [outcome(function, *((other, t) if swapped else (t, other))) for t in (x, plain)]
                    if values[0] is not values[1] and values != [DTensor, torch.Tensor] and values[0] != values[1]:
                        wrong.append((name, str(other), swapped, values))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.ranks(2)
def test_a_dtype_that_cannot_hold_the_result():
    """Also where the value is computed out of place and written as terms."""
    for placement in (Shard(0), Partial()):
        for function, value, other in ((operator.ipow, torch.ones(2), 1j), (operator.imul, torch.arange(2), 0.5)):
            x = spread(value, placement)
            with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
                function(x, other)
            assert torch.equal(x.full_tensor(), value)


@pytest.mark.ranks(2)
def test_membership_and_lookup_of_strangers():
    x = spread(torch.ones(3, 2))
    assert None not in [x]
    assert [None, "s", x].index("s") == 1
    assert x != "s"
    assert (x == None) is False  # noqa: E711 - what is tested
