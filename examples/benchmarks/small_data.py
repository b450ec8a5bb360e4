"""Our kernels on small data: all rows, default settings, compared with NUTS, on many models.

Each run has 4 vectorised chains of 1,000 draws after 1,000 of warm-up, in float32. The table has:
effective draws of the worst scalar per gradient, relative to NUTS with a dense mass matrix; errors
of means and standard deviations against exact ones or a long NUTS run in float64; and whether
`diagnose` flags the run. Prints a Markdown table and writes it to docs/tables/small_data.md.
``--models`` runs some of the models. ``--cache`` stores finished runs in a file; the table has all
of them.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import posteriors as P
from common import TABLES, chains, head, logistic, versions
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

from numpyro_geom import GGMC, SGHMC, diagnose

TABLE = TABLES / "small_data.md"
CHAINS, DRAWS = 4, 1000
REFERENCE_DRAWS = 5000
WRONG = 0.25, 0.15
"""Error of a mean in standard deviations, and of a standard deviation, that should be flagged."""
RIGHT = 0.1, 0.06
"""Errors up to which a run with enough effective draws should not be flagged."""
ENOUGH = 400
SIGMAS = 3.0

KERNELS: dict[str, Callable[[Callable], Any]] = {
    "NUTS": lambda model: NUTS(model, dense_mass=True),
    "SGHMC": lambda model: SGHMC(model),
    "GGMC": lambda model: GGMC(model),
}


# --- models that the other tables do not have


def scalars_of(*names: str) -> Callable[[dict[str, Any]], Any]:
    """Entries of these sites side by side, shape (chains, draws, scalars)."""

    def scalars(draws: dict[str, Any]) -> Any:
        return jnp.concatenate([draws[n].reshape(*draws[n].shape[:2], -1) for n in names], -1)

    return scalars


def eight_schools(centred: bool) -> P.Posterior:
    """Eight schools, centred or not; the reference is a non-centred run."""
    y = jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    sd = jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18])

    def model(y: Any, sd: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", len(y)) as i:
            if centred:
                effect = numpyro.sample("effect", dist.Normal(mu, tau))
            else:
                z = numpyro.sample("z", dist.Normal(0, 1))
                effect = numpyro.deterministic("effect", mu + tau * z)
            numpyro.sample("y", dist.Normal(effect, sd[i]), obs=y[i])

    def scalars(draws: dict[str, Any]) -> Any:
        mu, tau = draws["mu"][..., None], draws["tau"][..., None]
        return jnp.concatenate([mu, jnp.log(tau), draws["effect"]], -1)

    name = "eight schools, " + ("centred" if centred else "not centred")
    return P.Posterior(name, model, (y, sd), None, scalars)


def radon() -> P.Posterior:
    """Like the radon data: 40 counties of 1 to 40 houses, floor, uranium of a county; generated."""
    rng = np.random.default_rng(3)
    sizes = np.clip(rng.geometric(0.1, 40), 1, 40)
    county = np.repeat(np.arange(40), sizes)
    floor, uranium = rng.uniform(size=len(county)) < 0.2, rng.normal(0, 0.4, 40)
    level = 1.5 + 0.7 * uranium + 0.3 * rng.normal(size=40)
    y = level[county] - 0.6 * floor + 0.75 * rng.normal(size=len(county))

    def model(county: Any, floor: Any, uranium: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        slope = numpyro.sample("slope", dist.Normal(0, 2))
        basement = numpyro.sample("basement", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with numpyro.plate("counties", len(uranium)):
            level = numpyro.sample("level", dist.Normal(mu + slope * uranium, tau))
        with numpyro.plate("data", len(y)) as i:
            mean = level[county[i]] + basement * floor[i]
            numpyro.sample("y", dist.Normal(mean, sigma), obs=y[i])

    args = (*(jnp.asarray(x, jnp.float32) for x in (floor, uranium, y)),)
    scalars = scalars_of("mu", "slope", "basement", "tau", "sigma", "level")
    return P.Posterior(
        "radon-like, 40 counties", model, (jnp.asarray(county), *args), None, scalars
    )


def kidney() -> P.Posterior:
    """Like the kidney data: two Weibull times of 38 patients with a frailty each; generated."""
    rng = np.random.default_rng(4)
    patient = np.repeat(np.arange(38), 2)
    age, female = rng.normal(size=38)[patient], (rng.uniform(size=38) < 0.7)[patient]
    scale = 4.5 + 0.8 * female - 0.1 * age + 0.5 * rng.normal(size=38)[patient]
    y = np.exp(scale) * rng.weibull(1.2, 76)

    def model(patient: Any, age: Any, female: Any, y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
        shape = numpyro.sample("shape", dist.Gamma(2, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("patients", 38):
            frailty = numpyro.sample("frailty", dist.Normal(0, 1))
        with numpyro.plate("data", len(y)) as i:
            scale = a + b[0] * age[i] + b[1] * female[i] + tau * frailty[patient[i]]
            numpyro.sample("y", dist.Weibull(jnp.exp(scale), shape), obs=y[i])

    args = (*(jnp.asarray(x, jnp.float32) for x in (age, female, y)),)
    scalars = scalars_of("a", "b", "shape", "tau", "frailty")
    return P.Posterior(
        "kidney-like, 38 patients", model, (jnp.asarray(patient), *args), None, scalars
    )


def breast_cancer() -> P.Posterior:
    """Logistic regression on all 30 columns and an intercept, 569 rows."""
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    X = np.column_stack([(X - X.mean(0)) / X.std(0), np.ones(len(X))])
    args = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.int32)
    return P.Posterior("logistic, breast cancer", logistic, args, None, scalars_of("w"))


def _linear(X: Any, y: Any, scale: float, noise: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(scale))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", noise(X[i] @ w, s), obs=y[i])


def diabetes() -> P.Posterior:
    """Linear regression on scikit-learn's diabetes data, 442 rows, with the raw response."""
    from sklearn.datasets import load_diabetes

    X, y = load_diabetes(return_X_y=True)
    X = np.column_stack([X / X.std(0), np.ones(len(X))])
    args = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)
    model = partial(_linear, scale=100.0, noise=dist.Normal)
    return P.Posterior("linear, diabetes", model, args, None, scalars_of("w", "s"))


def badly_scaled() -> P.Posterior:
    """Linear regression whose Gaussian posterior has the condition number 1e7."""
    rng = np.random.default_rng(5)
    turn = np.linalg.qr(rng.normal(size=(10, 10)))[0]
    X = (rng.normal(size=(300, 10)) * np.geomspace(1, 10**-3.5, 10)) @ turn
    y = X @ rng.normal(size=10) + 0.5 * rng.normal(size=300)
    X32 = np.asarray(X, np.float32).astype(float)
    covariance = np.linalg.inv(X32.T @ X32 / 0.25 + np.eye(10) / 1e8)
    mean = covariance @ (X32.T @ np.asarray(y, np.float32)) / 0.25

    def model(X: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1e4).expand([10]).to_event(1))
        with numpyro.plate("data", X.shape[0]) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 0.5), obs=y[i])

    args = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)
    exact = mean, np.sqrt(np.diag(covariance))
    return P.Posterior("linear, condition 1e7", model, args, None, scalars_of("w"), exact)


def robust() -> P.Posterior:
    """Regression with Student t noise of 4 degrees of freedom and outliers, 100 rows."""
    rng = np.random.default_rng(6)
    X = np.column_stack([rng.normal(size=(100, 4)), np.ones(100)])
    y = X @ np.array([1.0, -2, 0.5, 0, 3]) + rng.standard_t(2, size=100)
    args = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)
    model = partial(_linear, scale=10.0, noise=lambda m, s: dist.StudentT(4.0, m, s))
    return P.Posterior("robust regression", model, args, None, scalars_of("w", "s"))


def negative_binomial() -> P.Posterior:
    """Counts with exposure and overdispersion, 200 rows."""
    rng = np.random.default_rng(7)
    X = np.column_stack([rng.normal(size=(200, 3)), np.ones(200)])
    exposure = rng.uniform(0.5, 5, 200)
    rate = exposure * np.exp(X @ np.array([0.5, -0.4, 0.0, 1.0]))
    y = rng.poisson(rate * rng.gamma(1.5, 1 / 1.5, 200))

    def model(X: Any, exposure: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 2).expand([4]).to_event(1))
        concentration = numpyro.sample("concentration", dist.Gamma(2, 0.5))
        with numpyro.plate("data", len(y)) as i:
            mean = exposure[i] * jnp.exp(X[i] @ w)
            numpyro.sample("y", dist.NegativeBinomial2(mean, concentration), obs=y[i])

    args = *(jnp.asarray(x, jnp.float32) for x in (X, exposure)), jnp.asarray(y, jnp.int32)
    scalars = scalars_of("w", "concentration")
    return P.Posterior("negative binomial", model, args, None, scalars)


def student() -> P.Posterior:
    """Five independent Student t with 3 degrees of freedom: sd 3^1/2, infinite kurtosis."""

    def model() -> None:
        numpyro.sample("x", dist.StudentT(3.0).expand([5]).to_event(1))

    exact = np.zeros(5), np.full(5, 3**0.5)
    return P.Posterior("Student t, 3 degrees", model, (), None, scalars_of("x"), exact)


def constrained() -> P.Posterior:
    """Gamma, Beta and simplex sites with few observations each."""
    waits, hits = jnp.array([0.3, 1.2, 2.5, 0.7]), jnp.array([1, 0, 0, 0, 0, 1])
    kinds = jnp.array([0, 0, 0, 1, 1, 3, 2, 0])

    def model(waits: Any, hits: Any, kinds: Any) -> None:
        rate = numpyro.sample("rate", dist.Gamma(2, 1))
        share = numpyro.sample("share", dist.Beta(2, 2))
        simplex = numpyro.sample("simplex", dist.Dirichlet(jnp.ones(4)))
        numpyro.sample("waits", dist.Exponential(rate).expand([4]).to_event(1), obs=waits)
        numpyro.sample("hits", dist.Bernoulli(share).expand([6]).to_event(1), obs=hits)
        numpyro.sample("kinds", dist.Categorical(simplex).expand([8]).to_event(1), obs=kinds)

    def beta(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
        a, b = np.atleast_1d(a), np.atleast_1d(b)
        return a / (a + b), np.sqrt(a * b / (a + b + 1)) / (a + b)

    rate = 6 / (1 + np.sum(np.asarray(waits, float)))
    counts = 1 + np.bincount(np.asarray(kinds), minlength=4).astype(float)
    parts = [
        (np.array([rate]), np.array([rate / 6**0.5])),
        beta(4.0, 6.0),
        beta(counts, counts.sum() - counts),
    ]
    exact = tuple(np.concatenate(x) for x in zip(*parts, strict=True))
    scalars = scalars_of("rate", "share", "simplex")
    return P.Posterior("Gamma, Beta, simplex", model, (waits, hits, kinds), None, scalars, exact)


MODELS: dict[str, Callable[[], P.Posterior]] = {
    "schools-centred": lambda: eight_schools(True),
    "schools": lambda: eight_schools(False),
    "radon": radon,
    "kidney": kidney,
    "hierarchical": P.hierarchical,
    "cancer": breast_cancer,
    "raw": lambda: P.logistic(raw=True),
    "diabetes": diabetes,
    "scaled": badly_scaled,
    "robust": robust,
    "poisson": P.poisson,
    "negative": negative_binomial,
    "network": P.network,
    "constrained": constrained,
    "gaussian": P.gaussian,
    "banana": P.banana,
    "funnel": P.funnel,
    "student": student,
}


# --- runs


def run(kernel: Any, args: tuple, seed: int, num_draws: int = DRAWS) -> MCMC:
    """Run vectorised chains."""
    mcmc = chains(kernel, DRAWS, num_draws, CHAINS)
    mcmc.run(random.key(seed), *args, extra_fields=("num_steps",))
    return mcmc


def reference(name: str, posterior: P.Posterior) -> dict[str, list[float]]:
    """Means, standard deviations, and the Monte Carlo errors of both, in standard deviations."""
    if posterior.exact is not None:
        mean, sd = posterior.exact
        return {"mean": list(mean), "sd": list(sd), "mean_error": [0.0], "sd_error": [0.0]}
    return moments(posterior.scalars(reference_run(name, posterior)))


def moments(draws: Any) -> dict[str, list[float]]:
    """Moments of scalars, shape (chains, draws, scalars), in the form of `reference`."""
    draws = np.asarray(draws, float)
    mean, sd = draws.mean((0, 1)), draws.std((0, 1))
    errors = monte_carlo_errors((draws - mean) / sd)
    found = (mean, sd, *errors)
    return dict(
        zip(("mean", "sd", "mean_error", "sd_error"), map(np.ndarray.tolist, found), strict=True)
    )


def reference_run(name: str, posterior: P.Posterior) -> dict[str, Any]:
    """Draws of NUTS in float64 by site, shape (chains, draws, ...)."""
    if name == "schools-centred":
        posterior = eight_schools(False)
    with jax.enable_x64(True):
        args = jax.tree.map(
            lambda x: jnp.asarray(x, float) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            posterior.args,
        )
        kernel = NUTS(posterior.model, dense_mass=True, target_accept_prob=0.95)
        mcmc = run(kernel, args, 123, REFERENCE_DRAWS)
        return jax.device_get(mcmc.get_samples(group_by_chain=True))


def monte_carlo_errors(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Errors of means, and relative errors of standard deviations, of centred and scaled draws."""
    squares = draws**2
    of_mean = draws.std((0, 1)) / np.sqrt(effective_sample_size(draws))
    of_sd = squares.std((0, 1)) / np.sqrt(effective_sample_size(squares))
    return of_mean, of_sd / (2 * squares.mean((0, 1)))


def judge(posterior: P.Posterior, kernel: Any, truth: dict[str, list[float]], seed: int) -> dict:
    """One run: its effective draws per gradient, its errors, and the verdict of `diagnose`."""
    start = time.perf_counter()
    mcmc = run(kernel, posterior.args, seed)
    seconds = time.perf_counter() - start
    steps = np.asarray(mcmc.get_extra_fields()["num_steps"], float)
    gradients = steps.sum() + (steps.size if isinstance(kernel, GGMC) else 0)
    draws = np.asarray(posterior.scalars(mcmc.get_samples(group_by_chain=True)), float)
    mean, sd = np.asarray(truth["mean"]), np.asarray(truth["sd"])
    draws = (draws - mean) / sd
    size = float(np.min(effective_sample_size(draws)))
    of_squares = float(np.min(effective_sample_size((draws - draws.mean((0, 1))) ** 2)))
    shift, ratio = draws.mean((0, 1)), draws.std((0, 1))
    known = [np.asarray(truth[name]) for name in ("mean_error", "sd_error")]
    of_mean, of_sd = monte_carlo_errors(draws - shift)
    of_mean, of_sd = np.hypot(of_mean, known[0]), np.hypot(of_sd, known[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = diagnose(mcmc)
    worst = int(np.argmax(np.abs(ratio - 1)))
    return {
        "ess": size,
        "ess_squares": of_squares,
        "gradients": float(gradients),
        "seconds": seconds,
        "mean": float(np.abs(shift).max()),
        "mean_error": float(of_mean[np.argmax(np.abs(shift))]),
        "ratio": [float(ratio.min()), float(ratio.max())],
        "beyond_reference": [
            float(np.max(np.abs(error) - SIGMAS * of))
            for error, of in zip((shift, ratio - 1), known, strict=True)
        ],
        "ratio_error": float(of_sd[worst]),
        "wrong": bool(
            np.any(np.abs(shift) - SIGMAS * of_mean > WRONG[0])
            or np.any(np.abs(ratio - 1) - SIGMAS * of_sd > WRONG[1])
        ),
        "right": bool(
            size >= ENOUGH
            and np.all(np.abs(shift) <= np.maximum(RIGHT[0], SIGMAS * of_mean))
            and np.all(np.abs(ratio - 1) <= np.maximum(RIGHT[1], SIGMAS * of_sd))
        ),
        "flags": {check.name: check.figure for check in report.flagged},
        "figures": [list(check[:3]) for check in report.checks],
        "learned": learned(mcmc),
    }


def learned(mcmc: MCMC) -> dict[str, list[float]]:
    """What warm-up found, one figure per chain."""
    state = mcmc.last_state
    if not hasattr(state, "adaptation"):
        fields = {"step_size": state.adapt_state.step_size}
    else:
        fields = {
            "step_size": state.step_size,
            "num_steps": state.num_steps,
            "curvature": state.adaptation.curvature,
            "slowest": state.adaptation.slowest,
        }
    return {name: np.round(np.asarray(x, float), 4).tolist() for name, x in fields.items()}


def cell(found: dict[str, Any], base: dict[str, Any]) -> str:
    """A cell of the table: ESS, ESS per gradient over that of NUTS, and the verdict."""
    efficiency, other = (x["ess"] / x["gradients"] for x in (found, base))
    verdict = "wrong" if found["wrong"] else "right" if found["right"] else "between"
    ratio = "" if found is base else f" ({efficiency / other:.2f})"
    return f"{found['ess']:.0f}{ratio}: {verdict}{', flagged' * bool(found['flags'])}"


HEADER = """\
4 vectorized chains of 1,000 draws after 1,000 of warm-up, all rows, float32, default settings;
NUTS has `dense_mass=True`. A cell has ESS, that of the worst scalar in all chains together, in
brackets ESS per gradient over that of NUTS, and the verdict, against exact moments or 20,000 draws
of NUTS in float64. A run is "wrong" where a mean is off by more than 0.25 sd or an sd by more than
15%, "right" where ESS is above 400 and errors are below 0.1 sd and 6%, both up to three Monte Carlo
errors. "Flagged" is by `diagnose`; NUTS is flagged by the same rules, so far as they apply.
"""


def table(done: dict[str, Any]) -> str:
    """All finished runs, as Markdown."""
    lines = head("model", *KERNELS)
    ours = []
    for name in MODELS:
        if name not in done:
            continue
        entry = done[name]
        runs = entry["runs"]
        cells = [cell(runs[x], runs["NUTS"]) if x in runs else "–" for x in KERNELS]
        lines.append(f"| {entry['title']} | {' | '.join(cells)} |")
        ours += [(x, runs[x], runs["NUTS"]) for x in KERNELS if x in runs and x != "NUTS"]
    lines.append("")
    for label in KERNELS:
        runs = [(found, base) for kernel, found, base in ours if kernel == label]
        if runs:
            ratios = [f["ess"] / f["gradients"] * b["gradients"] / b["ess"] for f, b in runs]
            missed = sum(f["wrong"] and not f["flags"] for f, _ in runs)
            needless = sum(f["right"] and bool(f["flags"]) for f, _ in runs)
            lines.append(
                f"- {label}: ESS per gradient over NUTS {np.median(ratios):.2f} in the median, "
                f"{min(ratios):.2f} to {max(ratios):.2f}; at least 0.5 on "
                f"{sum(r >= 0.5 for r in ratios)} of {len(runs)} models; wrong without a flag "
                f"{missed}; right and flagged {needless}."
            )
    return "\n".join(lines) + f"\n\n{versions()}\n"


def main() -> None:
    """Run what is requested, or what is missing in the cache."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help=f"some of {','.join(MODELS)}")
    parser.add_argument("--kernels", help="some of " + ",".join(KERNELS))
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--again", action="store_true", help="run also what the cache has")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    done: dict[str, Any] = {}
    if options.cache is not None and options.cache.exists():
        done = json.loads(options.cache.read_text())
    names = list(MODELS) if options.models is None else options.models.split(",")
    labels = list(KERNELS) if options.kernels is None else options.kernels.split(",")
    for name in names:
        posterior = MODELS[name]()
        if name not in done:
            truth = reference(name, posterior)
            done[name] = {"title": posterior.name, "truth": truth, "runs": {}}
        entry = done[name]
        for label in labels:
            if label in entry["runs"] and not options.again:
                continue
            found = judge(posterior, KERNELS[label](posterior.model), entry["truth"], options.seed)
            entry["runs"][label] = found
            print(posterior.name, label, cell(found, entry["runs"]["NUTS"]), found["flags"])
            print("    ", f"{found['seconds']:.1f} s", found["learned"], flush=True)
            if options.cache is not None:
                options.cache.write_text(json.dumps(done))
    text = HEADER + "\n" + table(done)
    print(text)
    TABLE.write_text(text)


if __name__ == "__main__":
    main()
