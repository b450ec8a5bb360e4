"""Models of `rivals.py`: regressions of five families, and one of two levels with exact moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from numpyro.infer.util import potential_energy

COLUMNS = 15
GROUPS = 1000
PRIOR_SD = 2.5

# Models. ``other`` is the logarithm of a row's exposure, or its group.


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


def two_level_rows(num_rows: int) -> tuple[np.ndarray, ...]:
    """X, y and the groups. Each measurement moves the predictor by about 0.2."""
    rng = np.random.default_rng(0)
    X = columns(rng, num_rows)
    w = 0.2 * rng.normal(size=COLUMNS) / np.maximum(X.std(0), 0.2)
    # groups have the constant; a standard column, with a slope per group, replaces it
    X[:, -1] = rng.normal(size=num_rows)
    group = rng.integers(0, GROUPS, num_rows)
    intercept, slope = np.array([[1.0], [0.5]]) + 0.3 * rng.normal(size=(2, GROUPS))
    mean = X[:, :-1] @ w[:-1] + intercept[group] + slope[group] * X[:, -1]
    return X, (mean + rng.normal(size=num_rows)).astype("f4"), group.astype("i4")


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
