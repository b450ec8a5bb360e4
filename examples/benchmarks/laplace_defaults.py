"""Modes and metrics of `RiemannianLaplace` on ordinary models, against NUTS and NumPyro's guides.

The first table has the largest error of a mean, in posterior sd, for each model and method, the
second the errors of weighted means by the tail shape k of the weights. Positive sites are compared
in their logarithm, a network by its function values. All is in float64. NumPyro's guides are fitted
by Adam with a decreasing rate.

    python examples/benchmarks/laplace_defaults.py --references FOLDER [--write]

NUTS's draws are stored in `FOLDER/<model>.npy`, and a second call takes them from there.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import chains, head
from jax import random
from numpyro.infer import NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation, AutoMultivariateNormal

from numpyro_geom import RiemannianLaplace
from numpyro_geom.diagnostics import SamplingWarning
from numpyro_geom.laplace.draw import largest_shape, pareto_shape

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "laplace_defaults.md"
METHODS: dict[str, dict[str, Any]] = {
    "fisher, mean": {"mode": "mean"},
    "fisher, hausdorff": {"mode": "hausdorff"},
    "fisher, euclidean, hessian": {"mode": "euclidean", "prior_metric": "hessian"},
}
"""Metric, mode and prior part; the default prior part is the expected one."""
HOST = {
    "AutoLaplaceApproximation": AutoLaplaceApproximation,
    "AutoMultivariateNormal": AutoMultivariateNormal,
}
"""NumPyro's guides."""
COLUMNS = (*METHODS, *HOST)
SVI_STEPS = 50_000
RATES = (1e-2, 1e-5)
"""Adam's first and last rate."""
PARTS = 10
"""Number of parts of the draws, to see the weights of fewer draws."""
SETTINGS = (
    "2,000 draws against 20,000 of NUTS, float64. Columns are metric, mode\n"
    "and prior part (expected unless named); `fisher, mean` is the default. The largest error of\n"
    "2,000 exact draws would be about 0.05, of 200 about 0.15."
)
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
        sites: sites to compare, the scale last.
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
    data = (
        jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18]),
        jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12]),
    )
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
    """The quantities to compare, shape (draws, quantities)."""
    parts = []
    for name in case.sites:
        x = np.asarray(samples[name])
        x = np.log(x) if name in POSITIVE else x
        parts.append(x.reshape(len(x), -1))
    return np.concatenate(parts, axis=1)


def reference(case: Case, num_draws: int) -> np.ndarray:
    """NUTS's draws of the quantities, four chains."""
    kernel = NUTS(case.model, dense_mass=True, target_accept_prob=0.95)
    mcmc = chains(kernel, 1000, num_draws // 4)
    mcmc.run(random.key(1), *(case.args if case.nuts_args is None else case.nuts_args))
    print(f"  NUTS: {int(mcmc.get_extra_fields()['diverging'].sum())} diverging", flush=True)
    return quantities(case, mcmc.get_samples())


# --- rows


class Row(NamedTuple):
    """A model with a method.

    Attributes:
        model: name of the model.
        method: name of the method.
        mean: largest error of a mean of the draws without weights, in posterior sd.
        failed: share of draws that failed.
        sets: for all draws and for each part of them, their number, k and the largest weighted
            error of a mean.
        refused: whether the guide refused the model.
    """

    model: str
    method: str
    mean: float = np.nan
    failed: float = 0.0
    sets: Sequence[tuple[int, float, float]] = ()
    refused: bool = False


def largest_error(exact: np.ndarray, x: np.ndarray, log_weight: Any) -> float:
    """The largest error of a mean of weighted draws, in sds of exact ones."""
    weight = np.exp(log_weight - np.max(log_weight)) * np.ones(len(x))
    mean = weight / weight.sum() @ x
    return float(np.abs((mean - exact.mean(axis=0)) / exact.std(axis=0)).max())


def run(name: str, method: str, case: Case, exact: np.ndarray, num_draws: int) -> Row:
    """One row."""
    if method in HOST:
        return run_host(name, method, case, exact, num_draws)
    guide = RiemannianLaplace(case.model, **METHODS[method])
    options = {"sample_shape": (num_draws,), "log_weight": True, "progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        try:
            params = guide.fit(random.key(0), *case.args)
            draws = guide.draw(random.key(1), params, **options)
        except ValueError:
            return Row(name, method, refused=True)
    keep = np.asarray(draws.success)
    x = quantities(case, draws.samples)[keep]
    log_weight = np.asarray(draws.log_weight)[keep]
    parts = zip(np.array_split(x, PARTS), np.array_split(log_weight, PARTS), strict=True)
    sets = [
        (count, pareto_shape(w), largest_error(exact, part, w))
        for count, (part, w) in [(num_draws, (x, log_weight))]
        + [(num_draws // PARTS, part) for part in parts]
    ]
    return Row(name, method, largest_error(exact, x, 0.0), float(np.mean(~keep)), sets)


def run_host(name: str, method: str, case: Case, exact: np.ndarray, num_draws: int) -> Row:
    """The row of a guide of NumPyro, which has no weights."""
    guide, (first, last) = HOST[method](case.model), RATES
    rate = optax.exponential_decay(first, SVI_STEPS, last / first)
    svi = SVI(case.model, guide, optax.adam(rate), Trace_ELBO())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Hessian of log posterior")  # the draws are then constant
        found = svi.run(random.key(0), SVI_STEPS, *case.args, progress_bar=False)
        draws = guide.sample_posterior(random.key(1), found.params, sample_shape=(num_draws,))
    return Row(name, method, largest_error(exact, quantities(case, draws), 0.0))


# --- table


def table(rows: Sequence[Row]) -> str:
    """Errors of models by methods, and errors of weighted means by k."""
    by_name = {(r.model, r.method): r for r in rows}
    methods = [m for m in COLUMNS if any(r.method == m for r in rows)]

    def cell(r: Row) -> str:
        failed = f" ({r.failed:.1%} failed)" if r.failed else ""
        return "refused" if r.refused else f"{r.mean:.2f}{failed}"

    lines = head("largest error of a mean, in sd", *methods)
    for model in dict.fromkeys(r.model for r in rows):
        lines.append(f"| {model} | {' | '.join(cell(by_name[model, m]) for m in methods)} |")
    lines += ["", *head("draws", "k", "sets", "weighted error of a mean: median", "largest")]
    sets = [x for r in rows for x in r.sets]
    for count in sorted({n for n, *_ in sets}):
        shape, error = np.array([x[1:] for x in sets if x[0] == count]).T
        bounds = (-np.inf, largest_shape(count), 0.7, np.inf)
        for low, high in itertools.pairwise(bounds):
            inside = error[(shape >= low) & (shape < high)]
            if inside.size:
                cells = (f"{count:,}", f"{low:.2f} to {high:.2f}", str(inside.size))
                figures = (f"{np.median(inside):.2f}", f"{inside.max():.2f}")
                lines.append(f"| {' | '.join((*cells, *figures))} |")
    return "\n".join([SETTINGS, "", *lines]) + "\n"


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run all and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--references", type=Path, required=True, help="folder of NUTS's draws")
    parser.add_argument("--models", nargs="+", default=list(make_cases()))
    parser.add_argument("--methods", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--nuts-draws", type=int, default=20_000)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    options = parser.parse_args(arguments)
    cases, rows = make_cases(), []
    for name in options.models:
        path = options.references / f"{name.replace(' ', '_')}.npy"
        if not path.is_file():
            np.save(path, reference(cases[name], options.nuts_draws))
        for method in options.methods:
            rows.append(run(name, method, cases[name], np.load(path), options.draws))
            print(f"{name}: {method}: {rows[-1].mean:.2f}", flush=True)
    text = table(rows)
    print(f"\n{text}")
    if options.write:
        TABLE.write_text(text)
    return rows


if __name__ == "__main__":
    numpyro.enable_x64()
    main()
