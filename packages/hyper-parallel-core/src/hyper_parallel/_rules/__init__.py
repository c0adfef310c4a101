"""What a rule is and how its strategies are matched. Plugin authors import :mod:`hyper_parallel.rules` instead."""
