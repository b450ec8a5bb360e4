"""Random arguments, models and settings: each ends in a right answer or in a typed error.

Half of the time goes to arguments, most of them bad, of every public name (`fuzz_arguments`). The
other half goes to models with known posteriors under random settings (`fuzz_models`).

    python examples/benchmarks/fuzz.py --budget 1500 --seeds 0 1 --table docs/tables/fuzz.md
    python examples/benchmarks/fuzz.py --case "Arguments(call='Monge', changes=(('decay', '-1'),))"
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_arguments
import fuzz_models
import jax
import numpy as np
from fuzz_outcomes import FAILURES, KINDS, WARNED, Outcome, outcome_of

CASES_PER_CLEARING = 100
"""Cases after which compiled programs are dropped; a process cannot keep any number of them."""
PARTS: dict[str, Callable[[np.random.Generator], Any]] = {
    "arguments": fuzz_arguments.random_case,
    "models": fuzz_models.random_case,
}
"""What draws a case of each part."""


def show(case: Any, outcome: Outcome) -> None:
    """Print a failure, or what a warning is about, and the command that repeats it."""
    print(f"{outcome.kind}: {outcome.told[:600]}", flush=True)
    print(f"  python examples/benchmarks/fuzz.py --case {str(case)!r}", flush=True)


def fuzz(seed: int, seconds: float, parts: list[str]) -> Counter:
    """Number of cases by part and kind of outcome."""
    counts: Counter = Counter()
    for part in parts:
        rng, until = np.random.default_rng(seed), time.process_time() + seconds / len(parts)
        for number in range(10**9):
            if time.process_time() >= until:
                break
            case = PARTS[part](rng)
            outcome = outcome_of(case)
            counts[part, outcome.kind] += 1
            if outcome.kind in (*FAILURES, WARNED):
                show(case, outcome)
            if number % CASES_PER_CLEARING == 0:
                jax.clear_caches()
    return counts


def table_of(counts: Counter) -> str:
    """The numbers of outcomes of each part."""
    rows = {part: [counts[part, kind] for kind in KINDS] for part in sorted({n for n, _ in counts})}
    lines = [f"| cases | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|"]
    lines += [f"| {n} | {' | '.join(map(str, row))} |" for n, row in rows.items()]
    return "\n".join(lines) + "\n"


def counts_in(table: Path) -> Counter:
    """The numbers in a table."""
    rows = [line.strip("| ").split(" | ") for line in table.read_text().splitlines()[2:]]
    return Counter(
        {
            (name, kind): int(number)
            for name, *numbers in rows
            for kind, number in zip(KINDS, numbers, strict=True)
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=1500.0, help="processor seconds a seed")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--case", help="repeat one case")
    parser.add_argument("--parts", nargs="*", default=[*PARTS], choices=PARTS)
    parser.add_argument("--table", type=Path, help="file whose numbers these are added to")
    options = parser.parse_args()
    if options.case:
        case = eval(options.case, {**vars(fuzz_arguments), **vars(fuzz_models)})
        outcome = outcome_of(case)
        print(f"{outcome.kind}: {outcome.told}")
        raise SystemExit(int(outcome.kind in FAILURES))
    failed = False
    for seed in options.seeds:
        counts = fuzz(seed, options.budget, options.parts)
        failed |= any(kind in FAILURES for _, kind in counts)
        if options.table and options.table.exists():
            counts += counts_in(options.table)
        print(table_of(counts), flush=True)
        if options.table:
            options.table.write_text(table_of(counts))
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
