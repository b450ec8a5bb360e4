"""Modes and metrics of `RiemannianLaplace` on ordinary models, against NUTS.

For each model and method: the largest error of a mean, in posterior sd, and the sd that is furthest
from NUTS's, as a ratio, plain and by importance weights; the tail shape k of the weights; failed
draws; and the same for the model's scale alone. Positive sites are compared in their logarithm,
a network by its function. float64.

    python examples/benchmarks/laplace_defaults.py --references FOLDER [--rows FILE] [--write]

NUTS's draws are kept in `FOLDER/<model>.npy` and finished rows in FILE, so that a second call goes
on where the first one ended.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import MCMC, NUTS

from numpyro_geom import RiemannianLaplace
from numpyro_geom.diagnostics import SamplingWarning

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "laplace_defaults.md"
METHODS: dict[str, dict[str, Any]] = {
    "fisher, euclidean, hessian": {"mode": "euclidean", "prior_metric": "hessian"},
    "fisher, euclidean, expected": {"mode": "euclidean", "prior_metric": "expected"},
    "fisher, hausdorff, hessian": {"mode": "hausdorff", "prior_metric": "hessian"},
    "fisher, hausdorff, expected": {"mode": "hausdorff", "prior_metric": "expected"},
    "fisher, hausdorff, softabs": {"mode": "hausdorff", "prior_metric": "softabs"},
    "straight, euclidean": {"metric": "euclidean", "mode": "euclidean"},
    "straight, hausdorff": {
        "metric": "euclidean",
        "mode": "hausdorff",
        "prior_metric": "expected",
    },
    "monge, euclidean": {"metric": "monge", "mode": "euclidean"},
    "monge, hausdorff": {"metric": "monge", "mode": "hausdorff", "prior_metric": "expected"},
}
POSITIVE = {"sigma", "tau", "nu", "shape", "concentration", "length", "amplitude"}


# --- models


def normal(name: str, size: int, scale: float = 1.0) -> jax.Array:
    return numpyro.sample(name, dist.Normal(0, scale).expand([size]).to_event(1))


def linear(X, y):
    b = normal("b", X.shape[1], 10)
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Normal(X[i] @ b, sigma), obs=y[i])


def logistic(X, y):
    b = normal("b", X.shape[1], 3)
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ b), obs=y[i])


def poisson(X, y):
    b = normal("b", X.shape[1], 3)
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(X[i] @ b)), obs=y[i])


def negative_binomial(X, y):
    b = normal("b", X.shape[1], 3)
    concentration = numpyro.sample("concentration", dist.Gamma(2, 0.5))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X[i] @ b), concentration), obs=y[i])


def gamma(X, y):
    b = normal("b", X.shape[1], 3)
    shape = numpyro.sample("shape", dist.Exponential(0.2))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Gamma(shape, shape * jnp.exp(-X[i] @ b)), obs=y[i])


def student(X, y):
    b = normal("b", X.shape[1], 10)
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    nu = numpyro.sample("nu", dist.Gamma(2, 0.1))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.StudentT(nu, X[i] @ b, sigma), obs=y[i])


def autoregression(y):
    b = normal("b", 3)
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2))
    mean = b[0] + b[1] * y[1:-1] + b[2] * y[:-2]
    numpyro.sample("y", dist.Normal(mean, sigma).to_event(1), obs=y[2:])


def process(x, y):
    amplitude = numpyro.sample("amplitude", dist.LogNormal(0, 1))
    length = numpyro.sample("length", dist.LogNormal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    kernel = amplitude**2 * jnp.exp(-(((x[:, None] - x) / length) ** 2) / 2)
    covariance = kernel + (sigma**2 + 1e-6) * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(0, covariance), obs=y)


def schools(errors, y, centred):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    if centred:
        theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([len(y)]).to_event(1))
    else:
        theta = numpyro.deterministic("theta", mu + tau * normal("z", len(y)))
    numpyro.sample("y", dist.Normal(theta, errors).to_event(1), obs=y)


def radon(group, x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    slope = numpyro.sample("slope", dist.Normal(0, 5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("groups", 20):
        level = numpyro.sample("level", dist.Normal(mu, tau))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Normal(level[group[i]] + slope * x[i], sigma), obs=y[i])


def network(x, y):
    hidden = 5
    w1, b1, w2 = normal("w1", hidden, 2), normal("b1", hidden, 2), normal("w2", hidden, 1)
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))

    def f(x):
        return jnp.tanh(x[:, None] * w1 + b1) @ w2

    numpyro.deterministic("f", f(jnp.linspace(-2, 2, 9)))
    numpyro.sample("y", dist.Normal(f(x), sigma).to_event(1), obs=y)


class Case(NamedTuple):
    """A model with its data.

    Attributes:
        model: a NumPyro model.
        args: its arguments.
        sites: what is compared, the scale last.
        nuts_args: arguments with which NUTS samples the same posterior; None for ``args``.
    """

    model: Callable
    args: tuple
    sites: tuple[str, ...]
    nuts_args: tuple | None = None


def regression(seed: int, rows: int, columns: int) -> tuple:
    """A design with an intercept, and its linear predictor."""
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(rows), rng.normal(size=(rows, columns - 1))])
    return rng, jnp.asarray(X), X @ rng.normal(size=columns)


def make_cases() -> dict[str, Case]:
    """Thirteen posteriors with data drawn from their models (eight schools: Rubin's)."""
    cases = {}
    for rows, columns in ((46, 8), (434, 6)):
        rng, X, eta = regression(rows, rows, columns)
        y = jnp.asarray(eta + 1.5 * rng.normal(size=rows))
        cases[f"linear, {rows} rows"] = Case(linear, (X, y), ("b", "sigma"))
    rng, X, eta = regression(0, 100, 6)
    y = rng.uniform(size=100) < 1 / (1 + np.exp(-eta))
    cases["logistic"] = Case(logistic, (X, jnp.asarray(y * 1.0)), ("b",))
    rng, X, eta = regression(1, 60, 4)
    cases["Poisson"] = Case(poisson, (X, jnp.asarray(rng.poisson(np.exp(eta / 2)))), ("b",))
    rng, X, eta = regression(2, 80, 4)
    y = rng.poisson(np.exp(eta / 2 + 1) * rng.gamma(2, 0.5, size=80))
    cases["negative binomial"] = Case(
        negative_binomial, (X, jnp.asarray(y)), ("b", "concentration")
    )
    rng, X, eta = regression(3, 60, 5)
    y = np.exp(eta / 2) * rng.gamma(3, 1 / 3, size=60)
    cases["gamma"] = Case(gamma, (X, jnp.asarray(y)), ("b", "shape"))
    rng, X, eta = regression(4, 80, 5)
    y = eta + rng.standard_t(4, size=80)
    cases["Student t"] = Case(student, (X, jnp.asarray(y)), ("b", "nu", "sigma"))
    rng, y = np.random.default_rng(5), np.zeros(60)
    for t in range(2, 60):
        y[t] = 0.3 + 0.5 * y[t - 1] + 0.2 * y[t - 2] + 0.7 * rng.normal()
    cases["AR(2)"] = Case(autoregression, (jnp.asarray(y),), ("b", "sigma"))
    rng, x = np.random.default_rng(6), np.linspace(-3, 3, 40)
    y = np.sin(1.5 * x) + 0.3 * rng.normal(size=40)
    sites = ("amplitude", "length", "sigma")
    cases["Gaussian process"] = Case(process, (jnp.asarray(x), jnp.asarray(y)), sites)
    data = (jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18]), jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12]))
    cases["eight schools"] = Case(schools, (*data, False), ("mu", "z", "tau"))
    sites = ("mu", "theta", "tau")
    cases["eight schools, centred"] = Case(schools, (*data, True), sites, (*data, False))
    rng = np.random.default_rng(7)
    group, x = np.repeat(np.arange(20), 6), rng.normal(size=120)
    y = 1 + 0.5 * rng.normal(size=20)[group] - 0.6 * x + 0.8 * rng.normal(size=120)
    sites = ("mu", "slope", "level", "sigma", "tau")
    cases["levels of 20 groups"] = Case(radon, tuple(map(jnp.asarray, (group, x, y))), sites)
    rng, x = np.random.default_rng(8), np.linspace(-2, 2, 40)
    y = np.sin(2 * x) + 0.3 * rng.normal(size=40)
    cases["network"] = Case(network, (jnp.asarray(x), jnp.asarray(y)), ("f", "sigma"))
    return cases


def quantities(case: Case, samples: dict) -> np.ndarray:
    """What is compared, shape (draws, quantities)."""
    parts = []
    for name in case.sites:
        x = np.asarray(samples[name])
        x = np.log(x) if name in POSITIVE else x
        parts.append(x.reshape(len(x), -1))
    return np.concatenate(parts, axis=1)


def reference(case: Case, num_draws: int) -> np.ndarray:
    """NUTS's draws of the quantities, four chains."""
    kernel = NUTS(case.model, dense_mass=True, target_accept_prob=0.95)
    mcmc = MCMC(
        kernel,
        num_warmup=1000,
        num_samples=num_draws // 4,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), *(case.args if case.nuts_args is None else case.nuts_args))
    print(f"  NUTS: {int(mcmc.get_extra_fields()['diverging'].sum())} diverging", flush=True)
    return quantities(case, mcmc.get_samples())


# --- rows


class Row(NamedTuple):
    """A model by a method; pairs are plain and weighted.

    Attributes:
        model: its name.
        method: its name.
        shape: k of the weights.
        mean: largest error of a mean, in posterior sd.
        sd: the sd over NUTS's that is furthest from 1.
        scale: error of the mean of the scale, in posterior sd; the sites' last quantity.
        failed: share of draws.
        evaluations: of the acceleration, mean.
        note: why there is nothing.
    """

    model: str
    method: str
    shape: float = np.nan
    mean: tuple[float, float] = (np.nan, np.nan)
    sd: tuple[float, float] = (np.nan, np.nan)
    scale: tuple[float, float] = (np.nan, np.nan)
    failed: float = 0.0
    evaluations: float = np.nan
    note: str = ""


def errors(exact: np.ndarray, x: np.ndarray, weight: np.ndarray) -> tuple[float, float, float]:
    """Of `Row`, from weighted draws."""
    weight = weight / weight.sum()
    mean = weight @ x
    ratio = np.sqrt(weight @ (x - mean) ** 2) / exact.std(axis=0)
    shift = (mean - exact.mean(axis=0)) / exact.std(axis=0)
    furthest = np.argmax(np.abs(np.log(ratio)))
    return float(np.abs(shift).max()), float(ratio[furthest]), float(shift[-1])


def run(name: str, method: str, case: Case, exact: np.ndarray, num_draws: int) -> Row:
    """One row."""
    guide = RiemannianLaplace(case.model, **METHODS[method])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        try:
            params = guide.fit(random.key(0), *case.args)
            draws = guide.draw(
                random.key(1), params, sample_shape=(num_draws,), log_weight=True, progress_bar=False
            )
        except ValueError as error:
            return Row(name, method, note=str(error)[:60])
    keep = np.isfinite(draws.log_weight)
    x = np.nan_to_num(quantities(case, draws.samples), posinf=1e300, neginf=-1e300)
    log_weight = np.where(keep, draws.log_weight, -np.inf)
    weight = np.exp(log_weight - log_weight.max())
    pairs = [errors(exact, x, np.ones(num_draws)), errors(exact, x[keep], weight[keep])]
    return Row(
        *(name, method, float(draws.pareto_k), *zip(*pairs, strict=True)),
        failed=float(np.mean(~np.asarray(draws.success))),
        evaluations=float(np.mean(draws.num_evaluations)),
    )


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--references", type=Path, required=True, help="folder of NUTS's draws")
    parser.add_argument("--rows", type=Path, help="file that keeps finished rows")
    parser.add_argument("--models", nargs="+", default=list(make_cases()))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    options = parser.parse_args(arguments)
    numpyro.enable_x64()
    cases, rows = make_cases(), []
    if options.rows is not None and options.rows.is_file():
        rows = [Row(*json.loads(line)) for line in options.rows.read_text().splitlines()]
    done = {(r.model, r.method) for r in rows}
    for name in options.models:
        path = options.references / f"{name.replace(' ', '_')}.npy"
        if not path.is_file():
            np.save(path, reference(cases[name], 20_000))
        exact = np.load(path)
        for method in options.methods:
            if (name, method) in done:
                continue
            row = run(name, method, cases[name], exact, options.draws)
            print(row, flush=True)
            rows.append(row)
            if options.rows is not None:
                with options.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return rows


if __name__ == "__main__":
    main()
