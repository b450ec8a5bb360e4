"""Effective draws per second on growing tables: `SGHMC` of this package beside NUTS.

Bayesian logistic regression with 20 columns and 1,000 to 1,000,000 rows. Both samplers have 500
draws after 500 of warm-up. For each size and sampler, the script prints the seconds of the run,
with compiling, and the effective draws of the worst coefficient. It writes a figure of the seconds
for 100 effective draws, and the last draws as a netCDF file for ArviZ. It takes some four minutes.

    python examples/quickstart.py [--out FOLDER] [--rows N ...]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from numpyro_geom import SGHMC, diagnose, to_inference_data

mpl.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLUMNS = 20
ROWS = (1_000, 10_000, 100_000, 1_000_000)
KERNELS = {"NUTS": NUTS, "SGHMC": SGHMC}


def model(X, y=None):
    """Logistic regression; the plate marks the rows as exchangeable."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=None if y is None else y[i])


def table(num_rows: int):
    """Normal columns, and labels from the model."""
    key_x, key_w, key_y = jax.random.split(jax.random.key(0), 3)
    X = jax.random.normal(key_x, (num_rows, COLUMNS))
    w = jax.random.normal(key_w, (COLUMNS,)) / COLUMNS**0.5
    return X, jax.random.bernoulli(key_y, jax.nn.sigmoid(X @ w)).astype(jnp.int32)


class Run(NamedTuple):
    """One sampler on one table.

    Attributes:
        mcmc: the MCMC, which has run.
        draws: shape (draws, columns).
        seconds: of compilation, warm-up and sampling.
        size: effective sample size of the worst coefficient.
    """

    mcmc: MCMC
    draws: np.ndarray
    seconds: float
    size: float


def run(name: str, X, y) -> Run:
    """500 draws after 500 of warm-up."""
    mcmc = MCMC(KERNELS[name](model), num_warmup=500, num_samples=500, progress_bar=False)
    start = time.perf_counter()
    mcmc.run(jax.random.key(1), X, y)
    draws = np.asarray(mcmc.get_samples()["w"])
    seconds = time.perf_counter() - start
    columns = (np.ascontiguousarray(draws[None, :, k]) for k in range(COLUMNS))
    return Run(mcmc, draws, seconds, min(float(az.ess(x, method="mean")) for x in columns))


def draw_figure(rows: list[int], seconds: dict[str, list[float]], path: Path) -> None:
    """Plot seconds against rows."""
    figure, ax = plt.subplots(figsize=(6, 4), constrained_layout=True)
    for name, values in seconds.items():
        ax.loglog(rows, values, marker="o", label=name)
    ax.set(xlabel="rows", ylabel="seconds for 100 effective draws")
    ax.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("quickstart"))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    seconds: dict[str, list[float]] = {name: [] for name in KERNELS}
    title = f"{'rows':>10s}  {'kernel':8s}{'seconds':>8s}{'draws':>8s}{'ESS':>6s}"
    print(title + f"{'ESS/s':>8s}{'mean apart':>12s}")
    for num_rows in options.rows:
        X, y = table(num_rows)
        runs = {name: run(name, X, y) for name in KERNELS}
        reference = runs["NUTS"].draws
        for name, r in runs.items():
            seconds[name].append(100 * r.seconds / r.size)
            line = f"{num_rows:10,d}  {name:8s}{r.seconds:8.1f}{len(r.draws):8d}{r.size:6.0f}"
            line += f"{r.size / r.seconds:8.1f}"
            if name != "NUTS":
                apart = np.abs(r.draws.mean(0) - reference.mean(0)) / reference.std(0)
                line += f"{apart.max():12.2f}"
            print(line, flush=True)
    print("seconds: compiling, warm-up and draws. ESS: effective sample size of the worst mean.")
    print("mean apart: the largest distance of a mean from the mean of NUTS, in sds of NUTS.")
    print("Both means have a Monte Carlo error of about ESS^-1/2.")
    print()
    idata = to_inference_data(runs["SGHMC"].mcmc)
    print(az.summary(idata, round_to=4).to_string())
    print(diagnose(runs["SGHMC"].mcmc))
    idata.to_netcdf(options.out / "sghmc.nc")
    draw_figure(options.rows, seconds, options.out / "seconds.png")
    print(f"\nWrote the draws and a figure to {options.out}/")


if __name__ == "__main__":
    main()
