"""Effective draws per second on growing tables: `SGHMC` of this package beside NUTS.

Bayesian logistic regression with 20 columns in different units and 1,000 to 100,000 rows. Both
samplers have 1,000 draws after 500 of warm-up. For each size and sampler, the script prints the
seconds of the run, with compiling, and the effective draws of the worst coefficient. It writes a
figure of effective draws per second, and the last draws as a netCDF file for ArviZ. It takes some
two minutes.

    python examples/quickstart.py [--out FOLDER] [--rows N ...]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

from numpyro_geom import SGHMC, diagnose, to_inference_data

mpl.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLUMNS = 20
UNITS = np.geomspace(1, 30, COLUMNS)  # as years, metres and kilograms differ
ROWS = (1_000, 10_000, 100_000)
KERNELS = {"NUTS": NUTS, "SGHMC": SGHMC}


def model(X, y=None):
    """Logistic regression; the plate marks the rows as exchangeable."""
    w = numpyro.sample("w", dist.Normal(0, 10).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=None if y is None else y[i])


def table(num_rows: int):
    """Normal columns, and labels from the model."""
    key_x, key_y = jax.random.split(jax.random.key(0))
    X = jnp.asarray(UNITS) * jax.random.normal(key_x, (num_rows, COLUMNS))
    return X, jax.random.bernoulli(key_y, jax.nn.sigmoid(X @ (0.2 / UNITS))).astype(jnp.int32)


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
    """1,000 draws after 500 of warm-up."""
    # jit_model_args: the rows are no constants of the program, which XLA would try to fold
    settings = {"num_warmup": 500, "num_samples": 1000, "progress_bar": False}
    mcmc = MCMC(KERNELS[name](model), jit_model_args=True, **settings)
    start = time.perf_counter()
    mcmc.run(jax.random.key(1), X, y)
    draws = np.asarray(mcmc.get_samples()["w"])
    seconds = time.perf_counter() - start
    return Run(mcmc, draws, seconds, float(effective_sample_size(draws[None]).min()))


def draw_figure(rows: list[int], rates: dict[str, list[float]], path: Path) -> None:
    """Plot effective draws per second against rows."""
    figure, ax = plt.subplots(figsize=(6, 4), constrained_layout=True)
    for name, values in rates.items():
        ax.loglog(rows, values, marker="o", label=name)
    ax.set(xlabel="rows", ylabel="effective draws per second, compiling included")
    ax.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("quickstart"))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    print("seconds: compiling, warm-up and draws. ESS: effective sample size of the worst mean.")
    print(
        "mean apart: the largest distance of a mean from that of NUTS, in its standard deviations;"
    )
    print("both means have a Monte Carlo error of about ESS^-1/2.\n")
    print(f"{'rows':>10s}  {'kernel':8s}{'seconds':>8s}{'draws':>8s}{'ESS':>6s}", end="")
    print(f"{'ESS/s':>8s}{'mean apart':>12s}")
    rates: dict[str, list[float]] = {name: [] for name in KERNELS}
    for num_rows in options.rows:
        X, y = table(num_rows)
        runs: dict[str, Run] = {}
        for name in KERNELS:
            print(f"{num_rows:10,d}  {name:8s}", end="", flush=True)  # what runs now
            r = runs[name] = run(name, X, y)
            rates[name].append(r.size / r.seconds)
            line = f"{r.seconds:8.1f}{len(r.draws):8d}{r.size:6.0f}{rates[name][-1]:8.1f}"
            if name != "NUTS":
                reference = runs["NUTS"].draws
                apart = np.abs(r.draws.mean(0) - reference.mean(0)) / reference.std(0)
                line += f"{apart.max():12.2f}"
            print(line, flush=True)
    mcmc = runs["SGHMC"].mcmc
    print("\nThe last run of SGHMC:")
    mcmc.print_summary()
    print(diagnose(mcmc).verdict)
    to_inference_data(mcmc).to_netcdf(options.out / "sghmc.nc")
    draw_figure(options.rows, rates, options.out / "rates.png")
    print(f"Wrote the draws and a figure to {options.out}/")


if __name__ == "__main__":
    main()
