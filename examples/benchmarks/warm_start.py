"""A run that starts from an earlier one, when 1% more rows have come, against a first run.

    python examples/benchmarks/warm_start.py [--repeats 5]

A logistic regression of 100,000 rows and 20 columns. Each run is a process of its own, cold and
warm ones in turn, and seconds are CPU seconds of ``MCMC.run``, with compilation. A warm process
then runs once more on as many rows. The medians are put into docs/tables/warm_start.md.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from pathlib import Path
from statistics import median

import jax
from common import TABLES, head, in_process, logistic, versions
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from speed import logistic_rows

from numpyro_geom import SGHMC, init_to_draws

ROWS, NEW, COLUMNS, DRAWS = 100_000, 1_000, 20, 1_100


def run(num_rows: int, seed: int, earlier: MCMC | None = None) -> tuple[MCMC, float, float]:
    """A run, its seconds, and the effective draws of the worst coefficient."""
    X, y = logistic_rows(ROWS + NEW, COLUMNS)
    start = {} if earlier is None else {"init_strategy": init_to_draws(earlier)}
    warmup = 500 if earlier is None else 0
    mcmc = MCMC(SGHMC(logistic, **start), num_warmup=warmup, num_samples=DRAWS, progress_bar=False)
    began = time.process_time()
    mcmc.run(jax.random.key(seed), X[:num_rows], y[:num_rows])
    draws = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    return mcmc, time.process_time() - began, min(effective_sample_size(draws["w"]))


def main() -> None:
    """Print the table, or measure one process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", nargs=2)
    given = parser.parse_args()
    if given.one:
        kind, file = given.one[0], Path(given.one[1])
        earlier = None if kind == "cold" else pickle.loads(file.read_bytes())
        mcmc, *found = run(ROWS if kind == "cold" else ROWS + NEW, 0, earlier)
        if kind == "cold":
            file.write_bytes(pickle.dumps(mcmc))
        else:
            found += run(ROWS + NEW, 1, mcmc)[1:]
        print(json.dumps([float(x) for x in found]))
        return
    found: dict[str, list] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.repeats):
            for kind, runs in found.items():
                runs.append(in_process(__file__, "--one", kind, f"{folder}/run"))
    cold, warm, later = (
        [median(x[k] for x in runs) for k in which]
        for runs, which in (
            (found["cold"], (0, 1)),
            (found["warm"], (0, 1)),
            (found["warm"], (2, 3)),
        )
    )
    names = "first run", "from an earlier run, new process", "the next one in that process"
    lines = head("run", "CPU s", "effective draws", "of a first run")
    for name, (seconds, draws) in zip(names, (cold, warm, later), strict=True):
        lines.append(f"| {name} | {seconds:.2f} | {draws:,.0f} | {seconds / cold[0]:.2f} |")
    print("\n".join(lines))
    (TABLES / "warm_start.md").write_text("\n".join([*lines, "", versions(), ""]))


if __name__ == "__main__":
    main()
