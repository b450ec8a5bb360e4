"""One model, two samplers: NUTS and SGRLD in five metrics and with a control variate.

Bayesian logistic regression on scikit-learn's breast cancer data (569 rows, 30 columns) and on a
generated table of 200,000 rows and 20 columns. Prints how fast each kernel is and how far its
posterior is from that of NUTS, and writes the draws (netCDF, for ArviZ) and a figure.

    python examples/quickstart.py [--metrics NAME ...] [--out FOLDER] [--small]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpyro

numpyro.set_host_device_count(2)  # before JAX starts: one device for each chain

import arviz as az  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import matplotlib as mpl  # noqa: E402
import numpy as np  # noqa: E402
import numpyro.distributions as dist  # noqa: E402
from numpyro.infer import MCMC, NUTS  # noqa: E402
from sklearn.datasets import load_breast_cancer  # noqa: E402

from numpyro_geom import SGRLD, print_summary, to_inference_data  # noqa: E402

mpl.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

METRICS = ("identity", "rmsprop", "wenzel", "monge", "shampoo")
CORRECTED = "control variate"


def model(X, y=None):
    """Logistic regression; the plate says which rows are exchangeable."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=None if y is None else y[i])


def breast_cancer():
    """Standardised columns and an intercept."""
    X, y = load_breast_cancer(return_X_y=True)
    X = np.column_stack([(X - X.mean(0)) / X.std(0), np.ones(len(X))])
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.int32)


def generated(num_rows: int, num_columns: int = 20):
    """Independent normal columns, labels from the model."""
    key_x, key_w, key_y = jax.random.split(jax.random.key(0), 3)
    X = jax.random.normal(key_x, (num_rows, num_columns))
    w = jax.random.normal(key_w, (num_columns,)) / num_columns**0.5
    return X, jax.random.bernoulli(key_y, jax.nn.sigmoid(X @ w)).astype(jnp.int32)


def run(kernel, X, y, num_warmup: int, num_samples: int):
    """Two chains side by side; the time includes compilation."""
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=2,
        progress_bar=False,
    )
    start = time.perf_counter()
    mcmc.run(jax.random.key(1), X, y)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"])
    return mcmc, draws, time.perf_counter() - start


def effective_sample_size(draws: np.ndarray) -> float:
    """Smallest over the coefficients; draws has shape (chains, draws, coefficients)."""
    return min(float(az.ess(np.ascontiguousarray(draws[..., k]))) for k in range(draws.shape[-1]))


def compare(
    title: str,
    X,
    y,
    batch_size: int,
    sizes: tuple[int, int],
    nuts_sizes: tuple[int, int],
    metrics: tuple[str, ...] = METRICS,
):
    """Print the table for one data set; return the draws of every kernel and one MCMC."""
    print(f"\n{title}: {X.shape[0]:,} rows, {X.shape[1]} columns, batch size {batch_size}")
    print(f"{'kernel':24s}{'time':>8s}{'ESS':>8s}{'ESS/s':>8s}{'mean error':>12s}{'sd ratio':>16s}")
    _, reference, seconds = run(NUTS(model), X, y, *nuts_sizes)
    mean, sd = reference.mean((0, 1)), reference.std((0, 1))
    ess = effective_sample_size(reference)
    print(f"{'NUTS':24s}{seconds:7.1f}s{ess:8.0f}{ess / seconds:8.1f}{'(reference)':>12s}")
    results = {"NUTS": reference}
    kept = None
    kernels = {m: SGRLD(model, metric=m, batch_size=batch_size) for m in metrics}
    kernels[CORRECTED] = SGRLD(model, batch_size=batch_size, control_variate=True)
    for name, kernel in kernels.items():
        mcmc, draws, seconds = run(kernel, X, y, *sizes)
        ess = effective_sample_size(draws)
        error = np.abs((draws.mean((0, 1)) - mean) / sd).max()
        ratio = draws.std((0, 1)) / sd
        print(
            f"{'SGRLD ' + name:24s}{seconds:7.1f}s{ess:8.0f}{ess / seconds:8.1f}"
            f"{error:12.2f}{ratio.min():9.2f}-{ratio.max():.2f}"
        )
        results[name] = draws
        kept = mcmc
    print("mean error: worst |mean - NUTS mean| / NUTS sd; its Monte Carlo error is ESS^-1/2")
    return results, kept


def draw_figure(results: dict[str, np.ndarray], path: Path) -> None:
    """Marginal posteriors of six coefficients: SGRLD over NUTS."""
    figure, axes = plt.subplots(2, 3, figsize=(9, 5), constrained_layout=True)
    for k, ax in enumerate(axes.flat):
        nuts = results["NUTS"][..., k].ravel()
        bins = np.linspace(nuts.min(), nuts.max(), 30)
        ax.hist(nuts, bins, density=True, color="0.8", label="NUTS")
        for name in [n for n in results if n != "NUTS"]:
            values = results[name][..., k].ravel()
            ax.hist(values, bins, density=True, histtype="step", label=f"SGRLD {name}")
        ax.set(xlabel=f"w[{k}]", yticks=[])
    axes[0, 0].legend(fontsize=6)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run both data sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("quickstart"))
    parser.add_argument("--metrics", nargs="+", choices=METRICS, default=METRICS)
    parser.add_argument("--small", action="store_true", help="few rows and draws: a smoke test")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    small, metrics = options.small, tuple(options.metrics)

    X, y = breast_cancer()
    sizes = (40, 40) if small else (80, 250)
    nuts_sizes = (50, 50) if small else (500, 1000)
    compare("Breast cancer", X, y, 256, sizes, nuts_sizes, metrics[-1:] if small else metrics)

    X, y = generated(5_000 if small else 200_000)
    nuts_sizes = (50, 50) if small else (150, 400)
    results, mcmc = compare("Generated table", X, y, 1024, sizes, nuts_sizes, metrics)

    print()
    print_summary(mcmc)
    idata = to_inference_data(mcmc)
    idata.to_netcdf(options.out / "generated_sgrld.nc")
    draw_figure(results, options.out / "generated_sgrld.png")
    print(f"\nWrote the draws and a figure to {options.out}/")


if __name__ == "__main__":
    main()
