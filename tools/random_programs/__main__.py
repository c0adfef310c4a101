"""Runs random programs on DTensors and on plain tensors, and compares them (``nox -s random_programs``).

Each seed gives a program: leaves in random layouts (uneven, packed, pending sums; a mesh of 4 ranks or of 2 x 2), and
operators that fit them, writes and redistributions among them. Values and gradients must be those of plain PyTorch,
under the default policy of redistribution and under ``auto``; on no rank may there be an error that others do not have.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator

from hyper_parallel.testing import RanksFailed, WorkerPool

from ..operator_battery.on_ranks import VERDICTS, Verdict
from .on_ranks import Choice, run_seeds

RANKS = 4
CHUNK = 25
TIMEOUT = 180.0
"""Seconds for the programs of one chunk of seeds."""
KINDS = ("no program", *VERDICTS)


def main() -> int:
    """Run programs; the exit status is 1 when one is wrong, hangs or raises what is no refusal of ours."""
    parser = argparse.ArgumentParser(prog="nox -s random_programs --", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=5000, help="number of seeds; each is run once per policy")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--length", type=int, default=8, help="steps of a program")
    parser.add_argument("--policies", default="partial,auto")
    options = parser.parse_args()
    choice = Choice(tuple(options.policies.split(",")), options.length)
    counts: Counter[str] = Counter()
    faults = 0
    with WorkerPool(RANKS, timeout=20) as pool:
        for start in range(options.first, options.first + options.count, CHUNK):
            end = min(start + CHUNK, options.first + options.count)
            for verdict in _verdicts(pool, range(start, end), choice):
                counts[verdict.kind] += 1
                if verdict.kind in ("wrong", "raw error", "hang"):
                    faults += 1
                    print(f"--- {verdict.case}: {verdict.kind}\n{verdict.text}", flush=True)
            print(f"{end - options.first} seeds: {dict(counts)}", file=sys.stderr, flush=True)
    print(", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]))
    return int(faults > 0)


def _verdicts(pool: WorkerPool, seeds: range, choice: Choice) -> Iterator[Verdict]:
    """Of each program the worst of the ranks' verdicts; one that ranks do not come back from is left out, and told."""
    lost: dict[str, Verdict] = {}
    while True:
        try:
            by_rank = pool.run(run_seeds, seeds, choice, set(lost), timeout=TIMEOUT)
        except RanksFailed as error:
            case, *text = "\n".join(error.texts()).split("\n")
            if case in lost or not case[:1].isdigit():  # no matter of one program
                yield Verdict(f"{seeds[0]} ...", "hang", str(error))
                return
            lost[case] = Verdict(case, "hang", "\n".join(text))
            continue
        yield from lost.values()
        for same in zip(*by_rank, strict=True):
            yield max(same, key=lambda verdict: KINDS.index(verdict.kind))
        return


if __name__ == "__main__":
    sys.exit(main())
