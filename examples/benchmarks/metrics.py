"""Gain of metrics over scaled coordinates: effective draws per gradient and per second, and errors.

Every metric in its default settings on small posteriors with all rows, and on one posterior with
minibatches. Prints a Markdown table and writes it to docs/tables/metrics.md. ``--only NAME`` runs
one posterior; ``--cache FILE`` stores results between runs.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import posteriors as P
from common import TABLES, head, logistic
from numpyro.diagnostics import effective_sample_size

from numpyro_geom import SGRLD, Monge

TABLE = TABLES / "metrics.md"
CHAINS, WARMUP, DRAWS = 4, 400, 1000
SCALED: dict[str, Any] = {"dense_mass": "auto"}
"""Arguments of every kernel besides metric and batch size."""


def regression(num_rows: int = 46, num_columns: int = 5) -> P.Posterior:
    """Linear regression with unknown noise, on few rows."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(num_rows, num_columns)) * np.geomspace(1, 10, num_columns)
    y = X @ np.ones(num_columns) + 2 * rng.normal(size=num_rows)

    def model(X: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 10).expand([X.shape[1]]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        with numpyro.plate("data", X.shape[0]) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, sigma), obs=y[i])

    args = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)
    return P.Posterior(f"regression, {num_rows} rows", model, args, None, P.columns("w", "sigma"))


def student() -> P.Posterior:
    """Five independent Student t with 5 degrees of freedom."""

    def model() -> None:
        numpyro.sample("x", dist.StudentT(5, 0, 1).expand([5]).to_event(1))

    moments = np.zeros(5), np.full(5, np.sqrt(5 / 3))
    return P.Posterior("Student t, 5 df", model, (), None, P.columns("x"), moments)


def eight_schools() -> P.Posterior:
    """Eight schools, non-centred."""
    y = jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    error = jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18])

    def model(error: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        x = numpyro.sample("x", dist.Normal(0, 1).expand([8]).to_event(1))
        with numpyro.plate("data", 8) as i:
            numpyro.sample("y", dist.Normal(mu + tau * x[i], error[i]), obs=y[i])

    # the Cauchy prior has no variance: tau is compared on its logarithm
    def scalars(draws: dict[str, Any]) -> Any:
        return jnp.concatenate(
            [draws["mu"][..., None], jnp.log(draws["tau"])[..., None], draws["x"]], -1
        )

    return P.Posterior("eight schools", model, (error, y), None, scalars)


def large() -> P.Posterior:
    """Logistic regression on 20,000 rows with minibatches and a control variate."""
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=(20_000, 9)) * np.geomspace(1, 0.1, 9), np.ones(20_000)])
    y = rng.uniform(size=20_000) < 1 / (1 + np.exp(-X @ rng.normal(size=10)))
    args = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.int32)
    model = partial(logistic, scale=10.0)
    return P.Posterior("logistic, minibatches", model, args, 256, P.columns("w"))


TARGETS = {
    "gaussian": P.gaussian,
    "logistic": lambda: P.logistic(batch_size=None),
    "regression": regression,
    "student": student,
    "banana": P.banana,
    "funnel": P.funnel,
    "schools": eight_schools,
    "hierarchical": lambda: P.hierarchical(batch_size=None),
    "minibatches": large,
}
CASES: dict[str, dict[str, Any]] = {
    "identity": {"metric": "identity"},
    "rmsprop": {"metric": "rmsprop"},
    "wenzel": {"metric": "wenzel"},
    "monge": {"metric": "monge"},
    "shampoo": {"metric": "shampoo"},
    "Monge(decay=0.9), auxiliary": {"metric": Monge(decay=0.9), "divergence": "auxiliary"},
    "Monge(1.0, 0.9), auxiliary": {"metric": Monge(1.0, 0.9), "divergence": "auxiliary"},
}
UNITS = ("gradients", "seconds")
HESSIAN_MODES = ("auxiliary", "corrected", "published")


def facts(values: np.ndarray, reference: tuple, steps: float, seconds: float) -> dict[str, float]:
    """Effective draws of the worst scalar, of means and of second moments, and errors."""
    mean, sd = reference
    centred = (values - mean) / sd
    sizes = np.minimum(effective_sample_size(centred), effective_sample_size(centred**2))
    error, ratio = centred.mean((0, 1)), centred.std((0, 1))
    return {
        "ess": float(np.nan_to_num(sizes).min()),
        "gradients": steps,
        "seconds": seconds,
        "mean": float(np.abs(error).max()),
        "low": float(ratio.min()),
        "high": float(ratio.max()),
    }


def measure(posterior: P.Posterior, reference: tuple, **settings: Any) -> dict:
    """A kernel with these settings on one posterior."""
    if posterior.batch_size is not None:
        settings = {"batch_size": posterior.batch_size, "control_variate": True, **settings}
    kernel = SGRLD(posterior.model, **SCALED, **settings)
    lengths = {"num_chains": CHAINS, "num_warmup": WARMUP, "num_samples": DRAWS}
    values, state, seconds = P.run_chains(kernel, posterior, **lengths)
    values = values.swapaxes(0, 1)
    num_steps = np.asarray(state.num_steps)
    # a product with the Hessian counts as a gradient; minibatches are split among them
    a_step = 1 + (kernel.settings.divergence in HESSIAN_MODES and posterior.batch_size is None)
    row = facts(values, reference, float(num_steps.sum()) * values.shape[1] * a_step, seconds)
    row["step_size"] = float(np.median(state.step_size))
    row["num_steps"] = int(np.median(num_steps))
    row["most_steps"] = int(num_steps.max())
    row["curvature"] = float(np.median(state.adaptation.curvature))
    row["slowest"] = float(np.median(state.adaptation.slowest))
    row["undone"] = int(state.num_diverging)
    return row


def write(results: dict) -> str:
    """The Markdown table: a row for each posterior; for each metric, two columns of facts."""
    lines = [
        "Each cell has two ratios to the identity metric: effective draws of the worst scalar per "
        "gradient, and per second; lost is a mean off by more than a posterior sd, or an sd by a "
        f"factor of 2. `SGRLD`, {CHAINS} vectorized chains of {WARMUP} + "
        f"{DRAWS} draws in scaled coordinates, automatic step size, one run each. A product with "
        "the Hessian counts as a gradient; seconds are of sampling, on a shared machine, jax "
        f"{jax.__version__}.",
        "",
        *head("posterior", *CASES),
    ]
    for column in results.values():
        base = column["identity"]
        cells = []
        for case in CASES:
            r = column.get(case)
            if r is None:
                cells.append("")
                continue
            rates = (r["ess"] / r[unit] / (base["ess"] / base[unit]) for unit in UNITS)
            wrong = r["mean"] > 1 or r["high"] > 2
            told = ", ".join(f"{x:.0f}" if x > 10 else f"{x:.2g}" for x in rates)
            cells.append("lost" if wrong else told)
        lines.append(f"| {column['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=TARGETS, action="append")
    parser.add_argument("--cache", type=Path, help="JSON file to resume from and to write to")
    options = parser.parse_args()
    results: dict = {}
    if options.cache and options.cache.exists():
        results = json.loads(options.cache.read_text())
    for name in options.only or TARGETS:
        posterior = TARGETS[name]()
        reference = posterior.reference()
        column = results.setdefault(name, {"name": posterior.name})
        for case in CASES:
            if case in column:
                continue
            start = time.perf_counter()
            column[case] = row = measure(posterior, reference, **CASES[case])
            print(
                f"{name:12s} {case:16s} ESS {row['ess']:.0f}, per gradient "
                f"{row['ess'] / row['gradients']:.1e}, per second "
                f"{row['ess'] / row['seconds']:.0f}; mean {row['mean']:.2f}, "
                f"sd {row['low']:.2f} to {row['high']:.2f}; steps "
                f"{row.get('num_steps', 0)}, undone {row.get('undone', 0)} "
                f"({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
            if options.cache:
                options.cache.write_text(json.dumps(results))
    table = write({name: results[name] for name in TARGETS if name in results})
    print(table)
    if set(results) >= set(TARGETS):
        TABLE.write_text(table)


if __name__ == "__main__":
    main()
