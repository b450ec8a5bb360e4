"""Every mode that promises the target leaves it invariant, also where the metric bends.

Targets are diffeomorphic images of independent standard normals r, or a posterior of two
coefficients on a grid, so that exact draws and exact expectations are at hand. Chains start from
exact draws and, under "auxiliary", from an exact draw of the auxiliary gradient too, which a first
step makes. So a sampler without a step-size bias (``adjusted=True``) has the exact law after every
single step, and one with a bias of order h has at most that bias.

Every comparison is of a mean over independent chains with its expectation, in standard errors
from the spread of the chains. More than 5 fails: 6e-7 a comparison for a normal mean, and below
1e-3 for the some 1,000 comparisons of this file, seeds being fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chains
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from chains import CHAIN_STEPS

from numpyro_geom import SGRLD, Identity, Monge, RMSprop, SGState, Shampoo, Wenzel

NUM_ERRORS = 5.0
PyTree = Any


class Target(NamedTuple):
    """A target on vectors x of length D, with everything known.

    Attributes:
        energy: U(x), x of shape (D,).
        draw: (temperature, number, rng) -> exact draws of exp(-U / temperature), (number, D).
        functions: draws (..., D) -> test functions (..., F).
        expectations: temperature -> their expectations, (F,).
        scale: root mean square of the gradient's entries, about.
    """

    energy: Callable[[jax.Array], jax.Array]
    draw: Callable[[float, int, np.random.Generator], np.ndarray]
    functions: Callable[[np.ndarray], np.ndarray]
    expectations: Callable[[float], np.ndarray]
    scale: float


def make_banana() -> Target:
    """Two bananas: x_1 ~ N(0, 1), x_2 given x_1 ~ N(x_1^2, 1/4), as (x_1, x_1', x_2, x_2')."""

    def energy(x: jax.Array) -> jax.Array:
        return jnp.sum(x[:2] ** 2) / 2 + 2 * jnp.sum((x[2:] - x[:2] ** 2) ** 2)

    def draw(temperature: float, number: int, rng: np.random.Generator) -> np.ndarray:
        r = math.sqrt(temperature) * rng.standard_normal((number, 4))
        return np.concatenate([r[:, :2], r[:, :2] ** 2 + r[:, 2:] / 2], axis=1)

    def functions(x: np.ndarray) -> np.ndarray:
        a, b = x[..., :2], x[..., 2:]
        r = 2 * (b - a**2)
        f = [a, b, a**2, b**2, a * b, r, r**2, a * r, (a * r) ** 2]
        return np.stack([v.mean(axis=-1) for v in f], axis=-1)

    def expectations(t: float) -> np.ndarray:
        # b = a^2 + r / 2: E b^2 = 3 t^2 + t / 4
        return np.array([0, t, t, 3 * t**2 + t / 4, 0, 0, t, 0, t**2])

    return Target(energy, draw, functions, expectations, 2.5)


def make_funnel() -> Target:
    """A mild funnel: v ~ N(0, 1), x given v ~ N(0, e^v), as (v, x)."""

    def energy(x: jax.Array) -> jax.Array:
        return x[0] ** 2 / 2 + x[1] ** 2 * jnp.exp(-x[0]) / 2 + x[0] / 2

    def draw(temperature: float, number: int, rng: np.random.Generator) -> np.ndarray:
        # tempered: x given v ~ N(0, t e^v), and v has e^{v/2} e^{-(v^2 + v) / 2t}: N((t - 1)/2, t)
        v = (temperature - 1) / 2 + math.sqrt(temperature) * rng.standard_normal(number)
        x = np.exp(v / 2) * math.sqrt(temperature) * rng.standard_normal(number)
        return np.stack([v, x], axis=1)

    def functions(x: np.ndarray) -> np.ndarray:
        v, x = x[..., 0], x[..., 1]
        r = x * np.exp(-v / 2)
        return np.stack([v, x, v**2, x**2, v * x, r**2, v * r**2], axis=-1)

    def expectations(t: float) -> np.ndarray:
        m = (t - 1) / 2
        return np.array([m, 0, m**2 + t, t * math.exp(m + t / 2), 0, t, m * t])

    return Target(energy, draw, functions, expectations, 1.0)


def make_logistic() -> Target:
    """Logistic regression with intercept and slope, on 20 rows, by quadrature."""
    rng = np.random.default_rng(20)
    covariate = rng.normal(0.5, 1.0, 20)
    label = rng.uniform(size=20) < 1 / (1 + np.exp(-2 * covariate))
    sign = np.where(label, 1.0, -1.0)

    def energy_of(x: Any, xp: Any) -> Any:
        logits = x[..., 0:1] + x[..., 1:2] * covariate
        fit = xp.sum(xp.logaddexp(0.0, -sign * logits), axis=-1)
        return fit + xp.sum(x**2, axis=-1) / 8

    def energy(x: jax.Array) -> jax.Array:
        return energy_of(x, jnp)

    def grid(temperature: float) -> tuple[np.ndarray, np.ndarray]:
        # The integrand is smooth and negligible at the edges: equal weights converge faster than
        # any power of the spacing.
        axis = np.linspace(-9.0, 9.0, 301)
        points = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
        weights = -energy_of(points, np) / temperature
        weights = np.exp(weights - weights.max())
        return points, weights / weights.sum()

    def draw(temperature: float, number: int, rng: np.random.Generator) -> np.ndarray:
        # Rejection from the prior: the likelihood is at most its largest value on the grid.
        points, _ = grid(temperature)
        sup = np.min(energy_of(points, np) - np.sum(points**2, axis=-1) / 8) - 1e-3
        kept = np.zeros((0, 2))
        while len(kept) < number:
            x = rng.normal(0.0, 2.0 * math.sqrt(temperature), (100_000, 2))
            fit = energy_of(x, np) - np.sum(x**2, axis=-1) / 8
            ok = np.log(rng.uniform(size=len(x))) < (sup - fit) / temperature
            kept = np.concatenate([kept, x[ok]])
        return kept[:number]

    def functions(x: np.ndarray) -> np.ndarray:
        a, b = x[..., 0], x[..., 1]
        return np.stack([a, b, a**2, b**2, a * b, energy_of(x, np)], axis=-1)

    def expectations(t: float) -> np.ndarray:
        points, weights = grid(t)
        return weights @ functions(points)

    return Target(energy, draw, functions, expectations, 1.5)


TARGETS = {"banana": make_banana(), "funnel": make_funnel(), "logistic": make_logistic()}


class Packing(NamedTuple):
    """The vector x as a position: how many sites there are decides what a metric can do."""

    pack: Callable[[Any], PyTree]
    unpack: Callable[[PyTree], Any]


def concatenated(tree: PyTree) -> Any:
    leaves = jax.tree.leaves(tree)
    xp = np if isinstance(leaves[0], np.ndarray) else jnp
    return xp.concatenate(leaves, axis=-1)


VECTOR = Packing(lambda x: {"x": x}, lambda z: z["x"])
SITES = Packing(lambda x: {"a": x[..., :1], "b": x[..., 1:]}, concatenated)
MATRIX = Packing(
    lambda x: {"x": x.reshape(*x.shape[:-1], 2, -1)},
    lambda z: z["x"].reshape(*z["x"].shape[:-2], -1),
)
# Sites of 2 x 2 (banana) are matrices at block size 2, those of 2 x 1 vectors with a full matrix.
METRICS: dict[str, tuple[Any, Packing]] = {
    "identity": (Identity(), VECTOR),
    "rmsprop": (RMSprop(decay=0.9, eps=0.1), SITES),
    "wenzel": (Wenzel(decay=0.9, interval=3), SITES),
    "monge": (Monge(alpha2=0.1, decay=0.9), SITES),
    "shampoo": (Shampoo(decay=0.9, interval=3, block_size=2, vector="full"), MATRIX),
}


class Setup(NamedTuple):
    """A sampler on a target, with its chains in the invariant law."""

    target: Target
    packing: Packing
    kernel: SGRLD
    state: SGState


def setup(
    target: str,
    metric: str,
    *,
    sizes: tuple[float, ...],
    chains_a_size: int,
    num_steps: int,
    scale: float | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    **settings: Any,
) -> Setup:
    it, (object_, packing) = TARGETS[target], METRICS[metric]
    table = jnp.array(sizes)

    def energy(z: PyTree) -> jax.Array:
        return it.energy(packing.unpack(z))

    kernel = SGRLD(
        potential_fn=energy,
        metric=object_,
        step_size=lambda t: table[t // CHAIN_STEPS],
        num_steps=num_steps,
        temperature=temperature,
        **settings,
    )
    rng = np.random.default_rng(seed)
    x = jnp.asarray(it.draw(temperature, chains_a_size * len(sizes), rng), jnp.float32)
    # what "frozen" would have learned in warm-up, from draws of its own
    learned = kernel.metric.init(jax.tree.map(lambda v: v[0], packing.pack(x)))
    for y in jnp.asarray(it.draw(temperature, 30, rng), jnp.float32):
        learned = kernel.metric.update(learned, jax.grad(energy)(packing.pack(y)))
    state = chains.start(kernel, packing.pack(x), seed=seed + 1)
    auxiliary = settings["gamma"] == "auxiliary"
    state = chains.past_warmup(
        chains.several_step_sizes(state, len(sizes)),
        metric_state=None if auxiliary else learned,
        scale=(1.5 * it.scale if scale is None else scale) if auxiliary else None,
    )
    return Setup(it, packing, kernel, state)


class Result(NamedTuple):
    """What chains have shown, per step size.

    Attributes:
        scores: of the test functions, (sizes, functions), in standard errors.
        errors: means less expectations, likewise.
        acceptance: mean acceptance probability, (sizes,).
        moved: correlation of first and last position is below this, (sizes,).
    """

    scores: np.ndarray
    errors: np.ndarray
    acceptance: np.ndarray
    memory: np.ndarray


def simulate(it: Setup, num_sizes: int, num_draws: int, temperature: float = 1.0) -> Result:
    first = np.asarray(it.packing.unpack(it.state.z))
    _, draws = chains.run(it.kernel, it.state, num_draws)
    assert not draws.diverging.any()
    x = it.packing.unpack(draws.z)
    exact = it.target.expectations(temperature)
    rows: list[tuple] = []
    for group in np.array_split(np.arange(x.shape[1]), num_sizes):
        f = it.target.functions(x[:, group].astype(np.float64))
        start, end = first[group], x[-1, group]
        memory = max(np.corrcoef(a, b)[0, 1] for a, b in zip(start.T, end.T, strict=True))
        rows.append(
            (
                chains.scores(f, exact),
                f.mean(axis=(0, 1)) - exact,
                draws.accept_prob[:, group].mean(),
                memory,
            )
        )
    return Result(*(np.stack(column) for column in zip(*rows, strict=True)))
