"""These tests compute with the rules of ops-basic, without which no layer can be parallelised."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("hyper_parallel_ops_basic")
sys.path.insert(0, str(Path(__file__).parent))  # tp_models, here and on the ranks
