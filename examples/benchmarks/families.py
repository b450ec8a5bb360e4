"""NUTS and this package on regressions of four families at 200,000 rows.

The families are a Poisson and a negative binomial regression with exposures, a robust regression
with Student's t, and a two-level regression: 1,000 groups, each with its own intercept and slope.
The methods have their default arguments. They are timed in the four parts of `large_tables.py`. One
call measures one or several models and puts their lines in docs/tables/families.md:

    python examples/benchmarks/families.py [--models NAME ...] [--methods NAME ...]

With ``--methods``, the other lines of a table stay, and ratios are to NUTS's line in the table.
Mean errors and sd ratios are the worst over unconstrained parameters. The reference is the mode and
inverse Hessian in float64; for the two-level model it is draws from the exact posterior.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from large_tables import BASE, HEAD, Entrant, line, made_with, measure, of_kernel
from numpyro.infer import NUTS
from numpyro.infer.util import potential_energy

from numpyro_geom import SGHMC, SGNHT, SGRLD

TABLE = Path(__file__).parents[2] / "docs" / "tables" / "families.md"
COLUMNS = 15
GROUPS = 1000
PRIOR_SD = 2.5

# Models. ``other`` is the logarithm of a row's exposure, or its group. The first two are in the
# tables of `rivals.py` only.


def coefficients(X: Any, prior_sd: float) -> Any:
    """A coefficient for each column."""
    return numpyro.sample("w", dist.Normal(0, prior_sd).expand([X.shape[1]]).to_event(1))


def normal(X: Any, y: Any, other: Any, prior_sd: float = PRIOR_SD) -> None:
    """Measurements of unknown scale."""
    w = coefficients(X, prior_sd)
    scale = numpyro.sample("scale", dist.HalfNormal(PRIOR_SD))
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, scale), obs=y[i])


def bernoulli(X: Any, y: Any, other: Any, prior_sd: float = PRIOR_SD) -> None:
    """Labels of two kinds."""
    w = coefficients(X, prior_sd)
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


def poisson(X: Any, y: Any, other: Any, prior_sd: float = PRIOR_SD) -> None:
    """Counts."""
    w = coefficients(X, prior_sd)
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(other[i] + X[i] @ w)), obs=y[i])


def negative_binomial(X: Any, y: Any, other: Any, prior_sd: float = PRIOR_SD) -> None:
    """Counts with an unknown dispersion."""
    w = coefficients(X, prior_sd)
    concentration = numpyro.sample("concentration", dist.Gamma(2, 0.5))
    with numpyro.plate("rows", X.shape[0]) as i:
        mean = jnp.exp(other[i] + X[i] @ w)
        numpyro.sample("y", dist.NegativeBinomial2(mean, concentration), obs=y[i])


def robust(X: Any, y: Any, other: Any, prior_sd: float = PRIOR_SD) -> None:
    """Measurements with outliers, of unknown scale and degrees of freedom."""
    w = coefficients(X, prior_sd)
    degrees = numpyro.sample("degrees", dist.Gamma(2, 0.1))
    scale = numpyro.sample("scale", dist.HalfNormal(PRIOR_SD))
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.StudentT(degrees, X[i] @ w, scale), obs=y[i])


def two_level(X: Any, y: Any, other: Any) -> None:
    """An intercept and a slope for each group, centred.

    200 rows determine an intercept to within a fourth of the spread between groups. So the rows
    carry more information about a group than the other groups do. Given the rows, centred
    parameters hardly depend on ``tau``.
    """
    w = numpyro.sample("w", dist.Normal(0, PRIOR_SD).expand([COLUMNS - 1]).to_event(1))
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SD).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(PRIOR_SD).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(PRIOR_SD))
    with numpyro.plate("groups", GROUPS):
        intercept = numpyro.sample("intercept", dist.Normal(mu[0], tau[0]))
        slope = numpyro.sample("slope", dist.Normal(mu[1], tau[1]))
    with numpyro.plate("rows", X.shape[0]) as i:
        g, x = other[i], X[i]
        mean = x[:, :-1] @ w + intercept[g] + slope[g] * x[:, -1]
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y[i])


MODELS: dict[str, Callable] = {
    f.__name__: f for f in (poisson, negative_binomial, robust, two_level)
}


def columns(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """Ten correlated measurements, four indicators and a constant, in that order.

    Neighbours have correlation 0.9, standard deviations are from 0.2 to 5, and an indicator is 1 in
    a half to a fiftieth of the rows.
    """
    near = 0.9 ** np.abs(np.subtract.outer(np.arange(10), np.arange(10)))
    measured = rng.normal(size=(num_rows, 10)) @ np.linalg.cholesky(near).T
    indicators = rng.uniform(size=(num_rows, 4)) < [0.5, 0.2, 0.05, 0.02]
    measured = measured * rng.permutation(np.geomspace(0.2, 5, 10))
    return np.column_stack([measured, indicators, np.ones(num_rows)]).astype("f4")


def rows(name: str, num_rows: int) -> tuple[np.ndarray, ...]:
    """X, y and the exposures or groups. Each measurement moves the predictor by about 0.2."""
    rng = np.random.default_rng(0)
    X = columns(rng, num_rows)
    w = 0.2 * rng.normal(size=COLUMNS) / np.maximum(X.std(0), 0.2)
    if name == "two_level":
        # groups have the constant; a standard column, with a slope per group, replaces it
        X[:, -1] = rng.normal(size=num_rows)
        group = rng.integers(0, GROUPS, num_rows)
        intercept, slope = np.array([[1.0], [0.5]]) + 0.3 * rng.normal(size=(2, GROUPS))
        mean = X[:, :-1] @ w[:-1] + intercept[group] + slope[group] * X[:, -1]
        return X, (mean + rng.normal(size=num_rows)).astype("f4"), group.astype("i4")
    w[-1] = -1.0
    return X, *outcomes(name, rng, X @ w)


def outcomes(name: str, rng: np.random.Generator, predictor: np.ndarray) -> tuple:
    """Outcomes and logarithms of the exposures, given the linear predictor of each row."""
    other = rng.normal(size=len(predictor)).astype("f4")
    if name == "normal":
        return (predictor + rng.normal(size=len(predictor))).astype("f4"), other
    if name == "robust":
        return (predictor + rng.standard_t(4, size=len(predictor))).astype("f4"), other
    if name == "bernoulli":
        return (rng.uniform(size=len(predictor)) < 1 / (1 + np.exp(-predictor))).astype("i4"), other
    rate = np.exp(other + predictor)
    if name == "negative_binomial":
        rate = rate * rng.gamma(2.0, size=len(predictor)) / 2.0
    return rng.poisson(rate).astype("i4"), other


def unconstrained_zeros(model: Callable, args: tuple) -> tuple[jax.Array, Callable]:
    """A vector of zeros for the unconstrained sites, and how to take one apart."""

    def latent(*args: Any) -> dict:
        sites = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(*args)
        kept = {n: s for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}
        return {n: s["value"] for n, s in kept.items()}

    shapes = jax.eval_shape(latent, *args)
    return ravel_pytree({n: np.zeros(x.shape, x.dtype) for n, x in shapes.items()})


def laplace(model: Callable, data: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Mode and inverse Hessian in float64, by Newton's method with downhill steps."""
    with jax.enable_x64(True):
        args = tuple(jnp.asarray(x, np.float64 if x.dtype.kind == "f" else None) for x in data)
        flat, unravel = unconstrained_zeros(model, args)

        def of(x: Any, args: tuple) -> Any:
            return potential_energy(model, args, {}, unravel(x))

        energy, both = jax.jit(of), jax.jit(lambda *x: (jax.grad(of)(*x), jax.hessian(of)(*x)))
        position = np.asarray(flat)
        for _ in range(50):
            gradient, precision = map(np.asarray, both(position, args))
            values, vectors = np.linalg.eigh(precision)
            step = vectors @ ((vectors.T @ gradient) / np.abs(values))
            here, size = energy(position, args), 1.0
            while not energy(position - size * step, args) <= here + 1e-9 * abs(here):
                size /= 2
            position = position - size * step
            if gradient @ step < 1e-10:
                break
    return position, np.linalg.inv(precision)


def exact_two_level(data: tuple, num_steps: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations in float64.

    Given sigma and tau, everything else is Gaussian. A random walk over the logarithms of sigma and
    tau samples their marginal posterior. Means and variances of the rest are averages of the known
    conditional ones.
    """
    X, y, group = (np.asarray(x, np.float64) for x in data)
    group = group.astype(int)
    # columns of w, then those of mu, which are also those of the groups
    X = np.column_stack([X[:, :-1], np.ones(len(X)), X[:, -1]])
    Z = X[:, -2:]

    def per_group(x: np.ndarray) -> np.ndarray:
        total = np.zeros((GROUPS, *x.shape[1:]))
        np.add.at(total, group, x)
        return total

    A = per_group(Z[:, :, None] * Z[:, None, :])
    B = np.stack([per_group(Z[:, [k]] * X) for k in range(2)], 1)
    d = per_group(Z * y[:, None])
    G, c, squares = X.T @ X, X.T @ y, y @ y

    def known(logs: np.ndarray) -> tuple:
        s, t = np.exp(2 * logs[0]), np.exp(2 * logs[1:])
        K = np.linalg.inv(A + np.diag(s / t))
        KB, Kd = K @ B, np.einsum("gij,gj->gi", K, d)
        P = (G - np.tensordot(B, KB, ((0, 1), (0, 1)))) / s + np.eye(len(c)) / PRIOR_SD**2
        r = (c - np.tensordot(B, Kd, ((0, 1), (0, 1)))) / s
        m = np.linalg.solve(P, r)
        logdet = GROUPS * np.log(t / s).sum() - np.linalg.slogdet(K)[1].sum()
        density = -len(y) * logs[0] - (logdet + (squares - np.sum(d * Kd)) / s) / 2
        density += (r @ m - np.linalg.slogdet(P)[1]) / 2
        density += np.sum(logs - np.exp(2 * logs) / PRIOR_SD**2 / 2)
        return density, s, K, KB, Kd, P, m

    def moments(logs: np.ndarray, s: Any, K: Any, KB: Any, Kd: Any, P: Any, m: Any) -> tuple:
        V = np.linalg.inv(P)
        J = np.eye(2, len(m), len(m) - 2) - KB
        u = m[-2:] + Kd - KB @ m
        v = s * np.einsum("gii->gi", K) + np.einsum("gip,pq,giq->gi", J, V, J)
        v_m, zero = np.diag(V), np.zeros(2)
        mean = [u[:, 0], m[-2:], logs[:1], u[:, 1], logs[1:], m[:-2]]
        return np.concatenate(mean), np.concatenate(
            [v[:, 0], v_m[-2:], zero[:1], v[:, 1], zero, v_m[:-2]]
        )

    rng = np.random.default_rng(1)
    width = 1.4 / np.sqrt([2 * len(y), 2 * GROUPS, 2 * GROUPS])
    logs = np.log([1.0, 0.3, 0.3])
    found, means, variances = known(logs), [], []
    for k in range(num_steps):
        proposal = logs + width * rng.normal(size=3)
        new = known(proposal)
        if np.log(rng.uniform()) < new[0] - found[0]:
            logs, found = proposal, new
        if k >= num_steps // 10 and k % 5 == 0:
            mean, variance = moments(logs, *found[1:])
            means.append(mean)
            variances.append(variance)
    return np.mean(means, 0), np.sqrt(np.mean(variances, 0) + np.var(means, 0))


def entrants(model: Callable) -> dict[str, Entrant]:
    """NUTS with a dense and a diagonal mass matrix, and ours."""

    def nuts(**settings: Any) -> Entrant:
        return of_kernel(lambda _: NUTS(model, **settings), 500, 5)

    def ours(make: Callable) -> Entrant:
        return of_kernel(lambda _: make(model), 1000, 10)

    return {
        BASE: nuts(dense_mass=True),
        "NUTS(model)": nuts(),
        "SGHMC(model)": ours(SGHMC),
        "SGRLD(model)": ours(SGRLD),
        "SGNHT(model)": ours(SGNHT),
    }


class Part(NamedTuple):
    """A model's part of the table: the title, lines by method, and machine and versions."""

    title: str
    lines: dict[str, str]
    made: list[str]


def read() -> dict[str, Part]:
    """The existing tables, by model."""
    old = TABLE.read_text() if TABLE.exists() else ""
    parts = {}
    for text in re.split(r"(?m)^(?=\*\*)", old):
        found = re.match(r"\*\*`(\w+)`", text)
        if found:
            lines = {m[1]: m[0] for m in re.finditer(r"(?m)^\| `(.*?)` \|.*$", text)}
            made = re.findall(r"(?m)^\d{4}-.*$", text)
            parts[found[1]] = Part(text.splitlines()[0], lines, made)
    return parts


def write(parts: dict[str, Part]) -> None:
    """Replace the table."""
    texts = []
    for name in MODELS:
        if name in parts:
            title, lines, made = parts[name]
            texts.append("\n".join([title, "", *HEAD, *lines.values(), "", *made, ""]))
    TABLE.write_text("\n".join(texts))


def rates_of(text: str) -> list[float] | None:
    """The two rates in a line; None if it has none."""
    cells = [x.strip() for x in text.strip("|").split("|")]
    return None if cells[4] in ("", "–") else [float(cells[4]), float(cells[6])]


def run(name: str, arguments: argparse.Namespace) -> None:
    """Measure a model's methods, and write each line to the table when it is done."""
    model, data = MODELS[name], rows(name, arguments.rows)
    if name == "two_level":
        mean, sd = exact_two_level(data)
    else:
        mean, covariance = laplace(model, data)
        sd = np.sqrt(np.diag(covariance))
    parts = read()
    title = f"**`{name}`: {arguments.rows:,} rows, {len(mean):,} parameters**"
    old = parts.get(name, Part(title, {}, []))
    lines, made = dict(old.lines), f"{made_with(arguments.seconds)}."
    base = rates_of(lines[BASE]) if BASE in lines else None
    print(f"{title}\n\n" + "\n".join(HEAD), flush=True)
    methods = entrants(model)
    data = tuple(map(jnp.asarray, data))
    for method, entrant in methods.items():
        if arguments.methods and not any(m in method for m in arguments.methods):
            continue
        result = measure(entrant, data, arguments.seconds, arguments.limit)
        text, rates = line(method, entrant, result, mean, sd, base, arguments.limit)
        base = rates if method == BASE else base
        lines[method] = text
        print(text, flush=True)
        if not arguments.no_table:
            ordered = {m: lines[m] for m in methods if m in lines}
            notes = [x for x in old.made if x != made] + [made]
            write({**read(), name: Part(title, ordered, notes if arguments.methods else [made])})


def main() -> None:
    """Run the models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", help="only those whose name has one of these")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of sampling, each method")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds of warm-up, at most")
    parser.add_argument("--no-table", action="store_true", help="print only")
    arguments = parser.parse_args()
    for name in arguments.models:
        run(name, arguments)


if __name__ == "__main__":
    main()
