"""What scaled coordinates gain on a posterior of condition 1e6, next to NUTS, in one run.

Prints a Markdown table and writes it to docs/tables/scale.md. Bayesian logistic regression with
20 columns; everything is included in the times: compiling, warm-up and sampling.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

from numpyro_geom import GGMC, SGHMC, SGRLD

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "scale.md"
COLUMNS = 20


def model(X: Any, y: Any) -> None:
    """Logistic regression with a wide prior."""
    w = numpyro.sample("w", dist.Normal(0, 100).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


def rows(num_rows: int) -> tuple[Any, Any]:
    """Columns whose scales lie a factor of 1,000 apart, in directions of no parameter."""
    rng = np.random.default_rng(0)
    scales = np.geomspace(1, 1e-3, COLUMNS)
    directions = np.linalg.qr(rng.normal(size=(COLUMNS, COLUMNS)))[0]
    X = (rng.normal(size=(num_rows, COLUMNS)) * scales) @ directions
    w = directions.T @ (0.3 * rng.normal(size=COLUMNS) / np.sqrt(scales))
    y = rng.uniform(size=num_rows) < 1 / (1 + np.exp(-X @ w))
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.int32)


def laplace(X: Any, y: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Mode, standard deviations and condition number, in float64: what draws are compared with."""
    X, y, w = np.asarray(X, np.float64), np.asarray(y, np.float64), np.zeros(COLUMNS)
    for _ in range(30):
        p = 1 / (1 + np.exp(-X @ w))
        hessian = (X * (p * (1 - p))[:, None]).T @ X + np.eye(COLUMNS) / 1e4
        w = w - np.linalg.solve(hessian, X.T @ (p - y) + w / 1e4)
    covariance = np.linalg.inv(hessian)
    return w, np.sqrt(np.diag(covariance)), float(np.linalg.cond(hessian))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--no-table", action="store_true", help="print only")
    arguments = parser.parse_args()
    X, y = rows(arguments.rows)
    mean, sd, condition = laplace(X, y)
    small: dict[str, Any] = {"batch_size": 256, "control_variate": True}
    scaled = {**small, "dense_mass": True}
    kernels = {
        "NUTS(model, dense_mass=True)": (lambda: NUTS(model, dense_mass=True), 500),
        "SGHMC(model, ...)": (lambda: SGHMC(model, **small), 1000),
        "SGHMC(model, dense_mass=True, ...)": (lambda: SGHMC(model, **scaled), 1000),
        "SGRLD(model, dense_mass=True, ...)": (lambda: SGRLD(model, **scaled), 1000),
        'SGRLD(model, metric="monge", dense_mass=True, ...)': (
            lambda: SGRLD(model, metric="monge", **scaled),
            1000,
        ),
        "GGMC(model, dense_mass=True)": (lambda: GGMC(model, dense_mass=True), 1000),
    }
    lines, base = [], None
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
    text = (
        f"{arguments.rows:,} rows, condition {condition:.1e}, `...` for `batch_size=256, "
        f"control_variate=True`, jax {jax.__version__}; times of one run, shared machine.\n\n"
        "| kernel | warm-up + draws | ESS, worst coordinate | seconds, all included | ESS a second "
        "over NUTS | largest error of a mean (sd) | sd over Laplace's |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )
    print(text)
    if not arguments.no_table:
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
