"""Imported once by the fork server, so that each rank starts with torch in memory instead of importing it.

Nothing here may fail: an exception would end the fork server. What does not import now is imported, and reported, by
the rank that needs it.
"""

from __future__ import annotations

import contextlib
import importlib

for _name in ("torch", "torch.distributed.tensor", "pytest", "hyper_parallel.tensor.dtensor"):
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
