"""Rules for tests of the registry, in a module that op tables can name."""

from hyper_parallel._rules.op import DistributedOp


class Rule(DistributedOp):
    """An op for tests; two of them differ by their colour."""

    def __init__(self, op_name, colour="grey"):
        self.colour = colour
        super().__init__(op_name)


class OtherRule(Rule):
    pass


NotAnOp = int
