"""Cost of compiling and running a model of many scalar sites, compared with NUTS.

    python examples/benchmarks/many_sites.py [--sites 10 50 200]

A linear regression whose coefficients are one site each. A run has 20 draws of warm-up and 20
draws, so nearly all of its time is compilation. Each run is a separate process. CPU seconds are for
``MCMC.run``; memory is the peak of the process minus its memory before the run. Prints a Markdown
table and writes it to docs/tables/many_sites.md.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "many_sites.md"
NUM_ROWS, BATCH, DRAWS = 1000, 100, 20
KERNELS = {
    "NUTS": "NUTS(model)",
    "SGRLD": f"SGRLD(model, batch_size={BATCH})",
    "SGHMC": f"SGHMC(model, batch_size={BATCH})",
    "SGRLD, manual": f"SGRLD(model, batch_size={BATCH}, step_size=1e-4, num_steps=4)",
}


def measure(name: str, sites: int) -> None:
    """Print CPU seconds and megabytes of one run."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from jax import random
    from numpyro.infer import MCMC, NUTS

    import numpyro_geom

    def model(X: jax.Array, y: jax.Array) -> None:
        w = [numpyro.sample(f"w{k}", dist.Normal(0, 1)) for k in range(sites)]
        with numpyro.plate("data", X.shape[0]) as i:
            numpyro.sample("y", dist.Normal(X[i] @ jnp.stack(w), 1.0), obs=y[i])

    X = random.normal(random.key(0), (NUM_ROWS, sites))
    y = random.normal(random.key(1), (NUM_ROWS,)) + X.sum(1) / sites**0.5
    kernel = eval(KERNELS[name], {"model": model, "NUTS": NUTS, **vars(numpyro_geom)})
    mcmc = MCMC(kernel, num_warmup=DRAWS, num_samples=DRAWS, progress_bar=False)
    before, start = _peak(), time.process_time()
    mcmc.run(random.key(2), X, y)
    jax.block_until_ready(mcmc.last_state)
    print(time.process_time() - start, _peak() - before)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--no-table", action="store_true", help="print only")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        warnings.simplefilter("ignore")  # so short a run has not settled
        measure(options.measure[0], int(options.measure[1]))
        return
    rows = []
    for sites in options.sites:
        base = None
        for name in KERNELS:
            command = [sys.executable, __file__, "--measure", name, str(sites)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds, megabytes = map(float, printed.split()[-2:])
            base = base or (seconds, megabytes)
            rows.append(
                f"| {sites} | {name} | {seconds:.1f} | {seconds / base[0]:.2f} | {megabytes:,.0f} "
                f"| {megabytes / base[1]:.2f} |"
            )
            print(rows[-1], flush=True)
    head = (
        f"Linear regression, {NUM_ROWS:,} rows, one site per coefficient, {DRAWS} draws of warm-up "
        f"and {DRAWS} draws, one chain. Ratios are to NUTS.\n\n"
        "| sites | kernel | CPU seconds | ratio | megabytes | ratio |\n|---|---|---|---|---|---|\n"
    )
    if not options.no_table:
        TABLE.write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
