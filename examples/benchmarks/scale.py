"""Gain of scaled coordinates on a posterior of condition 1e6, compared with NUTS in one run.

Prints a Markdown table and writes it to docs/tables/scale.md. Bayesian logistic regression with
20 columns. Times include compilation, warm-up and sampling.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import TABLES, head
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from regression import laplace, rows
from regression import logistic as model

from numpyro_geom import GGMC, SGHMC, SGRLD

TABLE = TABLES / "scale.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    arguments = parser.parse_args()
    X, y = rows(arguments.rows)
    mean, precision = laplace(X, y)
    sd, condition = np.sqrt(np.diag(np.linalg.inv(precision))), np.linalg.cond(precision)
    X, y = jnp.asarray(X), jnp.asarray(y)
    plain = {"batch_size": 256, "control_variate": True, "dense_mass": None}
    kernels = {
        "NUTS(model, dense_mass=True)": (lambda: NUTS(model, dense_mass=True), 500),
        "SGHMC(model, dense_mass=None, ...)": (lambda: SGHMC(model, **plain), 1000),
        "SGHMC(model)": (lambda: SGHMC(model), 1000),
        "SGRLD(model)": (lambda: SGRLD(model), 1000),
        'SGRLD(model, metric="monge")': (lambda: SGRLD(model, metric="monge"), 1000),
        "GGMC(model)": (lambda: GGMC(model), 1000),
    }
    costs = "ESS, worst coordinate", "seconds, all included", "ESS per second over NUTS"
    right = "largest error of a mean (sd)", "sd over Laplace's"
    lines, base = head("kernel", "warm-up + draws", *costs, *right), None
    for name, (make, draws) in kernels.items():
        start = time.perf_counter()
        mcmc = MCMC(make(), num_warmup=draws, num_samples=draws, progress_bar=False)
        mcmc.run(random.key(1), X, y)
        found = np.asarray(mcmc.get_samples()["w"], np.float64)
        seconds = time.perf_counter() - start
        size = float(np.min(effective_sample_size(found[None])))
        base = base or size / seconds
        error, ratio = np.abs((found.mean(0) - mean) / sd).max(), found.std(0) / sd
        lines.append(
            f"| `{name}` | {draws} + {draws} | {size:.0f} | {seconds:.0f} | "
            f"{size / seconds / base:.3g} | {error:.2f} | {ratio.min():.2f} to {ratio.max():.2f} |"
        )
        print(lines[-1], flush=True)
    about = (
        f"{arguments.rows:,} rows, condition {condition:.1e}, `...` for `batch_size=256, "
        f"control_variate=True`, jax {jax.__version__}; times of one run, shared machine.\n"
    )
    text = "\n".join([about, *lines, ""])
    print(text)
    TABLE.write_text(text)


if __name__ == "__main__":
    main()
