"""What `import hyper_parallel` adds to `import torch`, alone and with 50 dummy plugins installed (aim: at most 60 ms),
and what `hyper-parallel plugins` takes (aim: at most 300 ms)."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import table

RUNS = 9


def install_dummies(folder: Path, count: int) -> None:
    """Plugins that provide one op each, as pip would have put them there."""
    for index in range(count):
        name = f"dummy_plugin_{index}"
        (folder / f"{name}.py").write_text("HYPER_PARALLEL_API = 1\n")
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hyper_parallel.plugins]\ndummy{index} = {name}\n")


def milliseconds(statement: str, path: str) -> float:
    """Median wall time of a statement in a fresh interpreter that has imported torch."""
    code = f"import torch, time; s = time.perf_counter(); {statement}; print((time.perf_counter() - s) * 1e3)"
    environment = dict(os.environ, PYTHONPATH=path)
    runs = [
        float(
            subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
            ).stdout
        )
        for _ in range(RUNS)
    ]
    return statistics.median(runs)


def command_milliseconds(path: str) -> float:
    """Least CPU time of `hyper-parallel plugins`, from the start of the interpreter to its end."""
    environment = dict(os.environ, PYTHONPATH=path)
    runs = []
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "hyper_parallel", "plugins"]
        subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        runs.append((after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) * 1e3)
    return min(runs)


def main() -> None:
    rows: list[list[object]] = []
    for count in (0, 50):
        with tempfile.TemporaryDirectory() as folder:
            install_dummies(Path(folder), count)
            bare = milliseconds("import hyper_parallel", folder)
            filled = milliseconds(
                "import hyper_parallel.registry.registry as r; r.default_registry().entries()", folder
            )
            rows.append([f"{count} dummy plugins", bare, filled, command_milliseconds(folder)])
    header = ["", "import hyper_parallel", "... and read all plugins", "hyper-parallel plugins, CPU"]
    table("After import torch, ms (median); the program, ms (least)", header, rows)


if __name__ == "__main__":
    main()
