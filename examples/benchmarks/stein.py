"""Time and peak memory of the Stein diagnostics, each in a separate process.

Standard normal draws, float32. The first call compiles, the second does not. The peak is that of
the whole process. It includes the import of the libraries, which the first row shows.

    python examples/benchmarks/stein.py [--draws 10000] [--dimensions 50] [--work "ksd V"]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

WORK = ("import", "ksd V", "ksd U, covariance", "ksd_test, 1000 bootstrap", "thin to 1000")
"""In the order of the table. The parent imports nothing heavy, because its peak is inherited."""


def measure(work: str, num_draws: int, dim: int) -> dict[str, float]:
    """Seconds of two calls and peak megabytes of one kind of work, in a fresh process."""
    command = [sys.executable, __file__, "--measure", work]
    command += ["--draws", str(num_draws), "--dimensions", str(dim)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def work_here(work: str, num_draws: int, dim: int) -> dict[str, float]:
    """The same as `measure`, in this process."""
    import jax
    import numpy as np

    from numpyro_geom.diagnostics.stein import ksd, ksd_test, thin

    x = np.random.default_rng(0).normal(size=(num_draws, dim)).astype(np.float32)
    calls: dict[str, Any] = {
        "import": lambda: None,
        "ksd V": lambda: ksd(x, -x),
        "ksd U, covariance": lambda: ksd(x, -x, statistic="U", precondition="covariance"),
        "ksd_test, 1000 bootstrap": lambda: ksd_test(x, -x, jax.random.key(0)),
        "thin to 1000": lambda: thin(x, -x, min(num_draws, 1000)),
    }
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        calls[work]()
        seconds.append(time.perf_counter() - start)
    unit = 1e6 if sys.platform == "darwin" else 1e3  # bytes there, kilobytes elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return {"first": seconds[0], "second": seconds[1], "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--dimensions", type=int, default=50)
    parser.add_argument("--work", nargs="+", choices=WORK, default=WORK)
    parser.add_argument("--measure", choices=WORK, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(work_here(options.measure, options.draws, options.dimensions)))
        return
    print(f"{options.draws:,} draws in {options.dimensions} dimensions.\n")
    print("| work | first call, s | second call, s | peak of the process, MB |")
    print("|---|---|---|---|")
    for work in options.work:
        found = measure(work, options.draws, options.dimensions)
        print(f"| {work} | {found['first']:.2f} | {found['second']:.2f} | {found['peak']:.0f} |")


if __name__ == "__main__":
    main()
