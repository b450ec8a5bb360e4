"""Integrators without a Metropolis test: bias of mean and variance against gradients.

Without a momentum: Euler and Maruyama's step, and the step with averaged noise of Leimkuhler and
Matthews. With one: BAOAB, and UBU of Sanz-Serna and Zapatero. Rows of minibatches are drawn with
replacement, by epochs, or by epochs that are run forward and then backward (with UBU: SMS-UBU,
arXiv 2410.19780). Targets have one or two dimensions, so that grids give their moments, and the
steps are written out here. Prints two Markdown tables and writes them to docs/tables/schemes.md and
docs/tables/schemes_rows.md; about four minutes of CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from scipy.linalg import solve_discrete_lyapunov

TABLES = Path(__file__).parents[2] / "docs" / "tables"
NUM_CHAINS = 2048
EFFECTIVE = 64
"""About the independent draws of each chain."""
NUM_ROWS, BATCH_SIZE = 128, 8
NUM_BATCHES = NUM_ROWS // BATCH_SIZE
SHARES = (0.05, 0.1, 0.2, 0.3)
"""Values of h lam / 2, and of h^2 lam / 4 with a momentum."""
SCHEMES = {"Euler": False, "averaged noise": False, "BAOAB": True, "UBU": True}
"""The schemes, and whether they have a momentum."""
SWEEPS = ("replacement", "epoch", "forward, backward")


class Target(NamedTuple):
    """A target with its moments.

    Attributes:
        energy: U of a position, shape (D,).
        mean: exact mean.
        variance: exact variances.
        curvature: largest eigenvalue of the Hessian, the largest over seven draws, as in warm-up.
        flattest: curvature of the widest direction, from its variance.
    """

    energy: Callable
    mean: np.ndarray
    variance: np.ndarray
    curvature: float
    flattest: float


def target(energy: Callable, box: list[tuple[float, float]], size: int) -> Target:
    """A target with moments by sums over a grid of ``size`` points along each axis."""
    axes = [jnp.linspace(*ends, size) for ends in box]
    points = jnp.stack(jnp.meshgrid(*axes), -1).reshape(-1, len(box))
    values = np.asarray(lax.map(energy, points, batch_size=4096), float)
    weights = np.exp(values.min() - values)
    weights /= weights.sum()
    points = np.asarray(points, float)
    mean = weights @ points
    variance = weights @ (points - mean) ** 2
    places = points[np.random.default_rng(0).choice(len(points), (200, 7), p=weights)]
    hessian = jax.jit(jax.vmap(jax.vmap(jax.hessian(energy))))(places)
    largest = np.abs(np.linalg.eigvalsh(hessian)).max(-1)
    return Target(energy, mean, variance, largest.max(1).mean(), 1 / variance.max())


# --- the steps: (position, memory, gradient, keys) -> (position, memory)


def half_free(h: float, friction: float) -> tuple[float, float, np.ndarray]:
    """Free motion with friction over h: decay of p, its share in x, root of the noise of (p, x)."""
    decay = np.exp(-friction * h)
    cross = (1 - decay) ** 2 / friction
    own = 2 / friction * (h - 2 * (1 - decay) / friction + (1 - decay**2) / (2 * friction))
    root = np.linalg.cholesky(np.array([[1 - decay**2, cross], [cross, own]]))
    return decay, (1 - decay) / friction, root


def step_of(scheme: str, h: float, friction: float) -> Callable:
    """The step of a scheme; the gradient is taken at the position that it gets."""
    if scheme == "Euler":
        return lambda x, _, g, n: (x - h * g + np.sqrt(2 * h) * n[0], n[0])
    if scheme == "averaged noise":
        return lambda x, old, g, n: (x - h * g + np.sqrt(h / 2) * (old + n[0]), n[0])
    if scheme == "BAOAB":
        decay = np.exp(-friction * h)

        def baoab(x, p, g, n):
            kicked = p - h * g
            p = decay * kicked + np.sqrt(1 - decay**2) * n[0]
            return x + h / 2 * (kicked + p), p

        return baoab
    decay, share, root = half_free(h, friction)  # both free half-steps at once, read at the kick

    def ubu(x, p, g, n):
        p = p - h * g
        x = x + share * p + root[1, 0] * n[0] + root[1, 1] * n[1]
        return x, decay * p + root[0, 0] * n[0]

    return ubu


def batches_of(sweep: str, key: jax.Array, length: int) -> jax.Array:
    """Numbers of the batches of two passes, shape (2 NUM_BATCHES, chains)."""
    if sweep == "replacement":  # also for all rows, which ask for no batch
        return random.randint(key, (length, NUM_CHAINS), 0, NUM_BATCHES)
    order = random.uniform(key, (2, NUM_CHAINS, NUM_BATCHES)).argsort(-1).transpose(0, 2, 1)
    return jnp.concatenate([order[0], order[1] if sweep == "epoch" else order[0, ::-1]])


def run(
    of: Target, gradient: Callable, scheme: str, h: float, friction: float, sweep: str, cost: float
) -> tuple[np.ndarray, ...]:
    """Bias of means in sd and of variances, their Monte Carlo errors, gradients per draw."""
    length = 2 * NUM_BATCHES
    passes = max(16, round(EFFECTIVE * cost / length))
    step, dim = step_of(scheme, h, friction), of.mean.size
    centre = jnp.asarray(of.mean, jnp.float32)

    def one(carry, given):
        (x, memory), first, second = carry
        key, batch = given
        noise = random.normal(key, (1 + (scheme == "UBU"), *x.shape))
        x, memory = step(x, memory, gradient(x, batch), noise)
        away = x - centre
        return ((x, memory), first + away, second + away**2), None

    def sweeps(carry, key):
        key_batch, key_steps = random.split(key)
        batches = batches_of(sweep, key_batch, length)
        return lax.scan(one, carry, (random.split(key_steps, length), batches))

    @jax.jit
    def chains(key):
        key_x, key_p, key_burn, key = random.split(key, 4)
        shape = NUM_CHAINS, dim
        x = centre + random.normal(key_x, shape) * np.sqrt(of.variance)
        zero = jnp.zeros(shape)
        start = (x, random.normal(key_p, shape)), zero, zero
        state, *_ = lax.scan(sweeps, start, random.split(key_burn, 1 + passes // 8))[0]
        _, first, second = lax.scan(sweeps, (state, zero, zero), random.split(key, passes))[0]
        return first / (passes * length), second / (passes * length)

    first, second = (np.asarray(x, float) for x in chains(random.key(0)))
    sd = np.sqrt(of.variance)
    mean, variance = first.mean(0) / sd, second.mean(0) / of.variance - 1
    errors = [
        x.std(0) / np.sqrt(NUM_CHAINS) / scale for x, scale in ((first, sd), (second, of.variance))
    ]
    draws = passes * length * first.var(0) / of.variance
    return mean, variance - mean**2, *errors, draws.max()


def cell(found: tuple[np.ndarray, ...]) -> str:
    """Bias of mean and variance of the worst coordinate, per cent, and gradients per draw."""
    mean, variance, _, error, cost = found
    if not np.isfinite(variance).all() or np.abs(variance).max() > 1:
        return "unstable"
    worst = np.abs(variance).argmax()
    shift = mean[np.abs(mean).argmax()]
    return (
        f"{100 * shift:+.1f}, {100 * variance[worst]:+.1f} ± {100 * error[worst]:.1f} ({cost:.1f})"
    )


# --- all rows: the error of discretisation


def full_targets() -> dict[str, Target]:
    """Targets without rows."""
    return {
        "x^4/4 + x^2/2": target(lambda x: jnp.sum(x**4 / 4 + x**2 / 2), [(-6, 6)], 2001),
        "log of a Gamma(2)": target(lambda x: jnp.sum(jnp.exp(x) - 2 * x), [(-14, 5)], 4001),
        "banana": target(
            lambda x: x[0] ** 2 / 2 + 2 * (x[1] - x[0] ** 2 / 2) ** 2, [(-7, 7), (-4, 24)], 1401
        ),
    }


def discretisation() -> str:
    """The table of targets and schemes."""
    lines = ["| target | scheme | " + " | ".join(f"{x:g}" for x in SHARES) + " |"]
    lines.append("|---" * (2 + len(SHARES)) + "|")
    for name, of in full_targets().items():
        each = jax.vmap(jax.grad(of.energy))
        gradient = lambda x, _, each=each: each(x)  # noqa: E731
        for scheme, momentum in SCHEMES.items():
            cells = []
            for share in SHARES:
                h = 2 * share / of.curvature
                friction, cost = 0.0, 2 / (h * of.flattest)
                if momentum:
                    h, friction = 2 * np.sqrt(share / of.curvature), np.sqrt(of.flattest)
                    cost = 2 / (h * friction)
                found = run(of, gradient, scheme, h, friction, "replacement", cost)
                cells.append(cell(found))
            lines.append(f"| {name} | {scheme} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


# --- minibatches


class Regression(NamedTuple):
    """Logistic regression with two coefficients, in coordinates scaled at the mode.

    Attributes:
        target: the posterior.
        rows: rows with their signs, shape (NUM_ROWS, 2), in these coordinates.
        prior: Hessian of the prior's energy there.
        anchor: the mode.
    """

    target: Target
    rows: jax.Array
    prior: jax.Array
    anchor: jax.Array


def regression() -> Regression:
    """A prior N(0, 1) and rows drawn from the model."""
    rng = np.random.default_rng(0)
    rows = np.column_stack([np.ones(NUM_ROWS), 2 * rng.normal(size=NUM_ROWS)])
    signs = np.where(rng.random(NUM_ROWS) < 1 / (1 + np.exp(-rows @ [-1.0, 1.0])), 1, -1)
    rows, prior, anchor = rows * signs[:, None], np.eye(2), np.zeros(2)
    for _ in range(20):  # Newton's steps; then coordinates in which the Hessian is 1
        share = 1 / (1 + np.exp(rows @ anchor))
        hessian = (rows * (share * (1 - share))[:, None]).T @ rows + prior
        anchor -= np.linalg.solve(hessian, prior @ anchor - share @ rows)
    root = np.linalg.inv(np.linalg.cholesky(hessian)).T
    rows, prior = jnp.asarray(rows @ root), jnp.asarray(root.T @ prior @ root)
    anchor = jnp.asarray(np.linalg.solve(root, anchor))

    def energy(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softplus(-rows @ x)) + x @ prior @ x / 2

    box = [(float(a) - 8, float(a) + 8) for a in anchor]
    return Regression(target(energy, box, 401), rows, prior, anchor)


def batch_gradient(of: Regression, controlled: bool) -> Callable:
    """The gradient of a batch, without control variate or with that of first order at the mode."""
    # the batches of each chain: a random partition of the rows
    partition = random.uniform(random.key(1), (NUM_CHAINS, NUM_ROWS)).argsort(-1)
    partition = partition.reshape(NUM_CHAINS, NUM_BATCHES, BATCH_SIZE)
    chains = jnp.arange(NUM_CHAINS)

    def sums(x: jax.Array, rows: jax.Array) -> jax.Array:
        away = jax.nn.sigmoid(-jnp.einsum("...bd,...d->...b", rows, x))
        return -jnp.einsum("...b,...bd->...d", away, rows)

    at_anchor = sums(of.anchor, of.rows)

    def gradient(x: jax.Array, batch: jax.Array) -> jax.Array:
        rows = of.rows[partition[chains, batch]]
        likelihood = NUM_BATCHES * sums(x, rows)
        if controlled:
            likelihood += at_anchor - NUM_BATCHES * sums(jnp.broadcast_to(of.anchor, x.shape), rows)
        return likelihood + x @ of.prior

    return gradient


def gaussian_bias(scheme: str, h: float, friction: float, sweep: str) -> tuple[float, float]:
    """Bias of the variance of N(0, 1) in closed form, and gradients per draw.

    The gradient of a batch is x plus a constant of the batch. These constants have the variance
    NUM_BATCHES and the sum 0, as in regressions.
    """
    step = step_of(scheme, h, friction)

    def linear(place: int) -> np.ndarray:
        """The step's answer to a unit of x, memory, gradient noise, and of two normal numbers."""
        x, memory, noise, *n = np.eye(5)[place]
        return np.array(step(x, memory, x + noise, n))

    moves = np.column_stack([linear(0), linear(1)])
    kick, noise = linear(2), np.column_stack([linear(3), linear(4)])
    law = solve_discrete_lyapunov(moves, noise @ noise.T)
    later = np.linalg.solve(np.eye(2) - moves, moves) @ law
    cost = 1 + 2 * later[0, 0] / law[0, 0]
    slowest = np.abs(np.linalg.eigvals(moves)).max()
    length = 2 * NUM_BATCHES
    weights = []
    for _ in range(length * int(np.ceil(20 / (1 - slowest) / length))):
        weights.append(kick[0])
        kick = moves @ kick
    added = np.sum(np.square(weights))
    if sweep != "replacement":
        added = 0.0
        for phase in range(length):  # the mean over the places of a draw in two passes
            padded = np.concatenate([np.zeros(phase), weights, np.zeros(length - phase)])
            passes = padded.reshape(-1, 2, NUM_BATCHES)
            sets = passes.reshape(-1, NUM_BATCHES)
            if sweep != "epoch":
                sets = passes[:, 0] + passes[:, 1, ::-1]
            left = np.sum(sets**2) - np.sum(sets.sum(1) ** 2) / NUM_BATCHES
            added += left / (1 - 1 / NUM_BATCHES) / length
    return law[0, 0] - 1 + NUM_BATCHES * added, cost


def minibatches() -> str:
    """The table of schemes and ways to draw rows."""
    posterior = regression()
    costs = {"Gaussian": (1, 2, 4, 8), "no control variate": (1, 2, 4, 8)}
    costs["control variate"] = (0.25, 0.5, 1, 2)
    lines = [
        "| gradient | scheme | rows | " + " | ".join("1234") + " |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, passes in costs.items():
        gradient = batch_gradient(posterior, name == "control variate")
        for scheme, momentum in SCHEMES.items():
            for sweep in SWEEPS if scheme != "UBU" else SWEEPS[2:]:  # else as BAOAB
                cells = []
                for cost in NUM_BATCHES * np.array(passes):
                    h, friction = (2 / cost, 1.0) if momentum else (2 / (cost + 1), 0.0)
                    if name == "Gaussian":
                        bias, cost = gaussian_bias(scheme, h, friction, sweep)
                        cells.append(f"{100 * bias:+.1f} ({cost:.1f})")
                        continue
                    found = run(posterior.target, gradient, scheme, h, friction, sweep, cost)
                    cells.append(cell(found))
                row = f"| {name} | {scheme} | {sweep} | {' | '.join(cells)} |"
                print(row, flush=True)
                if name != "Gaussian" and (momentum or sweep != SWEEPS[2]):
                    lines.append(row)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-table", action="store_true", help="print only")
    arguments = parser.parse_args()
    tables = {"schemes.md": discretisation, "schemes_rows.md": minibatches}
    for name, make in tables.items():
        text = make()
        if not arguments.no_table:
            (TABLES / name).write_text(text)


if __name__ == "__main__":
    main()
