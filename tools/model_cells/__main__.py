"""Trains every model over meshes and options, pairwise, and compares with one device (``nox -s models``).

Each cell is three steps of SGD and one of AdamW of a small model of ``transformers``, as ``parallelize`` makes it, on
gloo ranks. Results are kept, one a line; a run that was stopped goes on where it was, and parts that ran elsewhere
(``--shard``) are put together by copying their files into the same folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.testing import RanksFailed
from hyper_parallel.testing.pool_set import PoolSet

from .cells import Cell, pairwise, simpler
from .on_ranks import reference, run_cell
from .report import headline, report
from .results import Results, tree_digest

ROOT = Path(__file__).parents[2]
TIMEOUT = 300.0
"""Seconds for one cell."""


def main() -> int:
    """Run the cells; the exit status is 1 when one fails."""
    parser = argparse.ArgumentParser(prog="nox -s models --", description=__doc__.split("\n")[0])
    parser.add_argument("cells", nargs="?", default="", help="words that a cell's title has, 'qwen3 tp2 float64'")
    parser.add_argument("--shard", default="1/1", help="2/4: the second of four parts, for several machines")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "models", help="where results are kept")
    parser.add_argument("--again", action="store_true", help="run cells that have a result, too")
    parser.add_argument("--failed", action="store_true", help="of those that have one, run those that failed")
    parser.add_argument("--simplify", action="store_true", help="of each that fails, find the fewest options that do")
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "models.md", help="the page to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(options.folder, tree_digest(ROOT), "-of-".join(options.shard.split("/")))
    cells = pairwise()
    part, parts = map(int, options.shard.split("/"))
    words = options.cells.split()
    chosen = [cell for cell in cells[part - 1 :: parts] if all(word in cell.values() for word in words)]
    pools, wrong = PoolSet(), 0
    try:
        for number, cell in enumerate(chosen, start=1):
            known = results.of(cell)
            if known is not None and not options.again and not (options.failed and known["problems"]):
                continue
            result = run(pools, cell)
            results.add(cell, result)
            wrong += bool(result["problems"])
            _say(f"{number}/{len(chosen)} {cell.title}: {_short(result)}")
            if result["problems"] and options.simplify:
                fewest, result = simplify(pools, cell, result)
                _say(f"    fewest options: {fewest.title}: {_short(result)}")
    finally:
        pools.close()
    if words:
        return int(wrong > 0)
    known_results = {cell: found for cell in cells if (found := results.of(cell)) is not None}
    options.report.write_text(report(cells, known_results))
    return int(any(result["problems"] for result in known_results.values()))


def run(pools: PoolSet, cell: Cell) -> dict[str, Any]:
    """The result of a cell: the fields of a `Verdict`; what is raised is a problem like any other."""
    start = time.monotonic()
    want = reference(cell)
    try:
        found: dict[str, Any] = pools.call(cell.ranks, run_cell, (cell, want), {}, timeout=TIMEOUT)[0]
        return found
    except RanksFailed as error:
        text = str(error).strip()
    return {"problems": [text[-6000:]], "raised": True, "seconds": round(time.monotonic() - start, 2)}


def simplify(pools: PoolSet, cell: Cell, result: dict[str, Any]) -> tuple[Cell, dict[str, Any]]:
    """Put one option after the other to its default, as long as the cell fails in the same way."""
    tried = {cell}
    while True:
        for candidate in simpler(cell):
            if candidate in tried:
                continue
            tried.add(candidate)
            found = run(pools, candidate)
            if found["problems"] and _kind(found) == _kind(result):
                cell, result = candidate, found
                break
        else:
            return cell, result


def _kind(result: dict[str, Any]) -> str:
    """What was raised, without what follows the first colon; of a wrong number, nothing."""
    return headline(result["problems"][0]).split(":")[0] if result.get("raised") else ""


def _short(result: dict[str, Any]) -> str:
    if not result["problems"]:
        return f"ok, gradients {result['gradient']:.1e}, {result['seconds']} s"
    return f"FAILED ({len(result['problems'])}): {headline(result['problems'][0])}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
