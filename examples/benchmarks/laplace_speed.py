"""Draws of a Fisher Laplace guide against the same geodesics with SciPy, one at a time.

Logistic regression with 1,000 rows and 25 columns, float64. Both integrate the same equation from
the same velocities with the Dormand-Prince pair at rtol 1e-3 and atol 1e-6. SciPy uses the
acceleration as a compiled JAX function and, for comparison, as hand-written NumPy code.

    python examples/benchmarks/laplace_speed.py
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from common import head, logistic
from jax import random
from scipy import linalg
from scipy.integrate import solve_ivp

from numpyro_geom import RiemannianLaplace

PRIOR_VARIANCE = 100.0


def acceleration_of(X, numpy, linalg):
    """The hand-written equation, in JAX or in NumPy."""

    def acceleration(w, v):
        p = 1 / (1 + numpy.exp(-X @ w))
        weight, along = p * (1 - p), X @ v
        metric = X.T @ (X * weight[:, None]) + numpy.eye(X.shape[1]) / PRIOR_VARIANCE
        force = X.T @ (weight * (1 - 2 * p) * along**2) / 2
        return -linalg.cho_solve(linalg.cho_factor(metric), force)

    return acceleration


def seconds_by_scipy(acceleration, loc, velocities):
    size = loc.size

    def field(t, state):
        return np.concatenate([state[size:], acceleration(state[:size], state[size:])])

    def follow(velocity):
        return solve_ivp(field, (0, 1), np.concatenate([loc, velocity]), rtol=1e-3, atol=1e-6)

    follow(velocities[0])
    begin = time.perf_counter()
    ends = [follow(v) for v in velocities]
    seconds = (time.perf_counter() - begin) / len(velocities)
    return seconds, np.mean([e.nfev for e in ends]), np.stack([e.y[:size, -1] for e in ends])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--columns", type=int, default=25)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--scipy-draws", type=int, default=200)
    args = parser.parse_args()
    numpyro.enable_x64()
    rng = np.random.default_rng(0)
    X = rng.normal(size=(args.rows, args.columns))
    truth = rng.normal(size=args.columns) / np.sqrt(args.columns)
    y = (rng.uniform(size=args.rows) < 1 / (1 + np.exp(-X @ truth))).astype(float)
    X, y = jnp.asarray(X), jnp.asarray(y)

    model = partial(logistic, scale=PRIOR_VARIANCE**0.5)
    guide = RiemannianLaplace(model, mode="euclidean")  # as SciPy's velocities and start
    guide.fit(random.key(0), X, y)
    begin = time.perf_counter()
    params = guide.fit(random.key(1), X, y)
    fit = time.perf_counter() - begin
    options = {"sample_shape": (args.draws,), "progress_bar": False}
    guide.draw(random.key(2), params, **options)
    begin = time.perf_counter()
    draws = guide.draw(random.key(3), params, **options)
    own = (time.perf_counter() - begin) / args.draws

    loc = np.asarray(params["auto_loc"])
    p = 1 / (1 + np.exp(-np.asarray(X) @ loc))
    precision = np.asarray(X.T @ (X * (p * (1 - p))[:, None])) + np.eye(loc.size) / PRIOR_VARIANCE
    noise = rng.normal(size=(args.scipy_draws, loc.size))
    velocities = np.linalg.solve(np.linalg.cholesky(precision).T, noise.T).T
    print("\n".join(head("who", "ms per draw", "evaluations", "ratio")))
    evaluations_of_guide = float(jnp.mean(draws.num_evaluations))
    print(f"| guide, {args.draws} draws | {1e3 * own:.3f} | {evaluations_of_guide:.1f} | 1 |")
    compiled = jax.jit(acceleration_of(X, jnp, jax.scipy.linalg))
    plain = acceleration_of(np.asarray(X), np, linalg)
    functions = ("JAX", lambda *x: np.asarray(compiled(*x))), ("NumPy", plain)
    for name, acceleration in functions:
        seconds, evaluations, _ = seconds_by_scipy(acceleration, loc, velocities)
        cells = (f"solve_ivp, {name} function", f"{1e3 * seconds:.3f}", f"{evaluations:.1f}")
        print("|", " | ".join((*cells, f"{seconds / own:.1f}")), "|")
    print(f"\nfit, compiled before: {fit:.2f} s; all draws: {own * args.draws:.2f} s")


if __name__ == "__main__":
    main()
