"""The plugin is found and loaded, without importing torch."""

import subprocess
import sys

SCRIPT = """
import sys
from hyper_parallel.plugins import default_manager
records = {record.name: record for record in default_manager().records()}
assert records["ops-qwen"].status == "ok", records["ops-qwen"]
assert "torch" not in sys.modules
"""


def test_plugin_loads_without_torch():
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT], check=True, timeout=60)
