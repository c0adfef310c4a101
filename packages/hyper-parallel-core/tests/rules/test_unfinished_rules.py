"""What the author of a rule reads who has left out what its base class asks for."""

import pytest

from hyper_parallel._rules.families.exchange import Moving
from hyper_parallel._rules.families.whole_dims import WholeDims
from hyper_parallel._rules.op import DistributedOp, FunctionOp
from hyper_parallel._rules.strategy import LayoutOp, StrategyOp


@pytest.mark.parametrize(
    ("base", "method", "arguments"),
    [
        (DistributedOp, "infer_layout", 1),
        (FunctionOp, "run", 3),
        (LayoutOp, "solve", 1),
        (LayoutOp, "carry_write", 5),
        (StrategyOp, "strategies", 1),
        (Moving, "maps", 1),
        (WholeDims, "whole_dims", 1),
        (WholeDims, "on_lines", 1),
    ],
)
def test_a_missing_method_is_named_with_class_and_op(base, method, arguments):
    class Unfinished(base):
        signature = "input"
        __init__ = DistributedOp.__init__

    with pytest.raises(NotImplementedError, match=rf"^Unfinished of op 'acme' must define {method}$"):
        getattr(Unfinished("acme"), method)(*[None] * arguments)
