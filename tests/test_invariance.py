"""Every mode that promises the target leaves it invariant, also with a metric that varies.

Targets are diffeomorphic images of independent standard normals r, or a posterior of two
coefficients on a grid, so exact draws and exact expectations are available. Chains start from
exact draws. Under "auxiliary", they also start from an exact draw of the auxiliary gradient, which
a first step makes. So a sampler without a step-size bias (``adjusted=True``) has the exact
distribution after every single step. A sampler with a bias of order h has at most that bias.

Every comparison is of a mean over independent chains with its expectation, in standard errors
from the spread of the chains. More than 5 fails: 6e-7 per comparison for a normal mean, and below
1e-3 for the about 1,000 comparisons of this file, with fixed seeds.
"""

from __future__ import annotations

import itertools
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
from targets import half_square
from tiers import short

from numpyro_geom import SGRLD, Identity, Monge, RMSprop, Shampoo, Wenzel
from numpyro_geom.kernel import SGState

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


def make_banana(copies: int = 1) -> Target:
    """Bananas, a ~ N(0, 1) and b given a ~ N(a^2, 1/4), as (a, a', ..., b, b', ...)."""

    def energy(x: jax.Array) -> jax.Array:
        a, b = x[:copies], x[copies:]
        return jnp.sum(a**2) / 2 + 2 * jnp.sum((b - a**2) ** 2)

    def draw(temperature: float, number: int, rng: np.random.Generator) -> np.ndarray:
        a, r = math.sqrt(temperature) * rng.standard_normal((2, number, copies))
        return np.concatenate([a, a**2 + r / 2], axis=1)

    def functions(x: np.ndarray) -> np.ndarray:
        a, b = x[..., :copies], x[..., copies:]
        r = 2 * (b - a**2)
        f = [a, b, a**2, b**2, a * b, r, r**2, a * r, (a * r) ** 2]
        return np.stack([v.mean(axis=-1) for v in f], axis=-1)

    def expectations(t: float) -> np.ndarray:
        # E a^4 = 3 t^2
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


TARGETS = {
    "banana": make_banana(),
    "two bananas": make_banana(copies=2),
    "funnel": make_funnel(),
    "logistic": make_logistic(),
}


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
    "monge-auto": (Monge(decay=0.9), SITES),
    "shampoo": (Shampoo(decay=0.9, interval=3, block_size=2, vector="full"), MATRIX),
}


class Setup(NamedTuple):
    """A sampler on a target, with its chains in the invariant distribution."""

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
    state = chains.start(kernel, packing.pack(x), seed=seed + 1)
    state = chains.several_step_sizes(state, len(sizes))
    if settings["divergence"] == "auxiliary":
        state = chains.past_warmup(state, scale=1.5 * it.scale if scale is None else scale)
    else:  # what warm-up would have learned, from draws of its own
        others = packing.pack(jnp.asarray(it.draw(temperature, 30, rng), jnp.float32))

        @jax.jit
        def learn(others: PyTree) -> PyTree:
            first = kernel.settings.metric.init(jax.tree.map(lambda v: v[0], others))
            update = kernel.settings.metric.update
            return jax.lax.scan(lambda m, z: (update(m, jax.grad(energy)(z)), ()), first, others)[0]

        state = chains.past_warmup(state, metric_state=learn(others))
    return Setup(it, packing, kernel, state)


class Result(NamedTuple):
    """What chains have shown, per step size.

    Attributes:
        scores: of the test functions, (sizes, functions), in standard errors.
        errors: means less expectations, likewise.
        acceptance: mean acceptance probability, (sizes,).
        memory: the largest correlation of first and last position, over coordinates, (sizes,).
        pooled: scores over the chains of all sizes, (functions,).
    """

    scores: np.ndarray
    errors: np.ndarray
    acceptance: np.ndarray
    memory: np.ndarray
    pooled: np.ndarray


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
    pooled = chains.scores(it.target.functions(x.astype(np.float64)), exact)
    return Result(*(np.stack(column) for column in zip(*rows, strict=True)), pooled)


# (target, metric, divergence)
ADJUSTED = [
    *(
        (target, metric, "auxiliary")
        for target in ("banana", "funnel", "logistic")
        for metric in ("rmsprop", "wenzel", "monge", "shampoo")
    ),
    ("banana", "identity", "auxiliary"),
    ("two bananas", "shampoo", "auxiliary"),
    ("two bananas", "shampoo", "frozen"),
    ("banana", "monge", "frozen"),
    ("banana", "monge-auto", "frozen"),
    ("banana", "monge-auto", "auxiliary"),
    ("funnel", "rmsprop", "frozen"),
    ("logistic", "wenzel", "frozen"),
]
ADJUSTED_SHORT = [
    ("banana", "identity", "auxiliary"),
    ("banana", "monge-auto", "frozen"),
    ("funnel", "rmsprop", "frozen"),
]


@pytest.mark.parametrize(("target", "metric", "divergence"), short(ADJUSTED, kept=ADJUSTED_SHORT))
def test_adjusted_is_exact_at_any_step_size(target: str, metric: str, divergence: str) -> None:
    sizes = (0.03, 0.1, 0.4)
    it = setup(
        target,
        metric,
        sizes=sizes,
        chains_a_size=1000,
        num_steps=80,
        divergence=divergence,
        adjusted=True,
    )
    result = simulate(it, len(sizes), num_draws=3)
    assert np.abs(result.scores).max() < NUM_ERRORS
    assert np.abs(result.pooled).max() < NUM_ERRORS
    # chains move, and at the largest step the Metropolis test has work to do
    assert result.memory.min() < 0.75
    assert result.acceptance[-1] < 0.95
    assert np.all(np.diff(result.acceptance) < 0)


@pytest.mark.slow
def test_adjusted_acceptance_is_higher_with_monge_on_a_banana() -> None:
    # At s = 8, by an independent implementation: .93 .84 .72 with monge, .86 .71 .54 without; the
    # standard error of a mean over 1,000 chains and 100 steps is below .004.
    expected = {"monge": (0.93, 0.84, 0.72), "identity": (0.86, 0.71, 0.54)}
    for metric, acceptance in expected.items():
        it = setup(
            "banana",
            metric,
            sizes=(0.02, 0.05, 0.1),
            chains_a_size=1000,
            num_steps=100,
            scale=8.0,
            divergence="auxiliary",
            adjusted=True,
        )
        result = simulate(it, 3, num_draws=1)
        np.testing.assert_allclose(result.acceptance, acceptance, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("adjusted_divergence", ["auxiliary", "frozen"])
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_adjusted_is_exact_at_any_temperature(adjusted_divergence: str, temperature: float) -> None:
    it = setup(
        "banana",
        "monge",
        sizes=(0.02, 0.1),
        chains_a_size=1500,
        num_steps=100,
        temperature=temperature,
        divergence=adjusted_divergence,
        adjusted=True,
    )
    result = simulate(it, 2, num_draws=3, temperature=temperature)
    assert np.abs(result.scores).max() < NUM_ERRORS
    assert result.memory.min() < 0.75


# Step size, s, bias in posterior sd of the test function, steps of a draw. The bias
# is what 3,000 or 4,000 chains measured, with its error. On the banana steps explode above h of
# about .01 unless A itself is small there, as with rmsprop and shampoo.
UNADJUSTED = {
    # .034 at .0025 for r^2, .07 at .005; .06 and .13 for (a r)^2
    ("banana", "identity"): (0.0025, 8.0, 0.07, 400),
    # .030 +- .01 at .02, .05 at .04 for r^2
    ("banana", "rmsprop"): (0.02, 8.0, 0.04, 200),
    # .026 +- .01 at .0025, .05 at .005
    ("banana", "wenzel"): (0.0025, 8.0, 0.04, 400),
    # .04 +- .01 at .0025 for r^2, .08 +- .05 for (a r)^2
    ("banana", "monge"): (0.0025, 8.0, 0.09, 400),
    # .036 +- .01 at .02, .06 at .04
    ("banana", "shampoo"): (0.02, 8.0, 0.04, 200),
    # not above the error of .015 at .002, nor at .004
    **{("funnel", m): (0.002, 3.0, 0.015, 500) for m in ("rmsprop", "wenzel", "monge", "shampoo")},
    # below .02 at .01, .07 at .04
    **{("logistic", m): (0.01, None, 0.02, 100) for m in ("rmsprop", "wenzel", "monge", "shampoo")},
}
UNADJUSTED_SHORT = [("logistic", "wenzel")]


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(("target", "metric"), short(UNADJUSTED, kept=UNADJUSTED_SHORT))
def test_auxiliary_has_a_bias_of_order_h_only(target: str, metric: str) -> None:
    step_size, scale, bias, num_steps = UNADJUSTED[target, metric]
    it = setup(
        target,
        metric,
        sizes=(step_size,),
        chains_a_size=1500,
        num_steps=num_steps,
        scale=scale,
        divergence="auxiliary",
    )
    result = simulate(it, 1, num_draws=3)
    spread = it.target.functions(np.asarray(it.packing.unpack(it.state.z))).std(axis=0)
    monte_carlo = NUM_ERRORS * np.abs(result.errors / result.scores)
    assert np.all(np.abs(result.errors) < bias * spread + monte_carlo)
    assert result.memory.max() < 0.75


@pytest.mark.parametrize(
    "metric",
    [
        Monge(alpha2=0.5, decay=0.5),
        pytest.param(Wenzel(decay=0.5, eps=0.3, interval=1), marks=pytest.mark.slow),
        pytest.param(RMSprop(decay=0.5, eps=0.5), marks=pytest.mark.slow),
    ],
    ids=["monge", "wenzel", "rmsprop"],
)
def test_corrected_leaves_the_target_in_two_dimensions(
    metric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS, "metric", (metric, SITES))
    far = {}
    for divergence in ("corrected", "published", "none"):
        it = setup(
            "logistic",
            "metric",
            sizes=(0.01,),
            chains_a_size=1000,
            num_steps=400,
            divergence=divergence,
        )
        result = simulate(it, 1, num_draws=2)
        spread = it.target.functions(np.asarray(it.packing.unpack(it.state.z))).std(axis=0)
        error = np.abs(result.errors / result.scores)
        far[divergence] = np.max((np.abs(result.errors) - NUM_ERRORS * error) / spread)
    # bias measured: rmsprop .033 +- .013 posterior standard deviations, the others less
    assert far["corrected"] < 0.035
    # .17 to .9 and .4 to 2.4, by metric
    assert far["published"] > 0.05
    assert far["none"] > 0.15


class Linear(NamedTuple):
    """A sampler with A = 1 on a Gaussian target of precision ``curvature`` in one dimension.

    Its steps are linear and its noise is Gaussian or of known variance, so that the stationary
    variance is known at every h.

    Attributes:
        curvature: second derivative of U.
        num_data: N.
        step_size: h.
        temperature: tau.
        decay: of the auxiliary gradient.
        scale: s.
        noise: variance of an independent estimate of grad U / N from one part of the batch.
        known_noise: what step (i) takes it for.
    """

    curvature: float
    num_data: int
    step_size: float
    temperature: float
    decay: float
    scale: float
    noise: float = 0.0
    known_noise: float = 0.0

    def variance(self) -> float:
        """Of u = theta - mean. With k = curvature / N, e_i noise of three parts of a batch::

        V' = k u + e_1 + decay (V - k u - e_1) + sqrt(rest) xi_1
        u' = u - h [curvature u + N (e_2 + e_3) / 2 - tau k (V' - k u - e_2) / s^2]
               + sqrt(2 h tau) xi_2
        """
        h, tau, d, s2, n = (
            self.step_size,
            self.temperature,
            self.decay,
            self.scale**2,
            self.num_data,
        )
        k = self.curvature / n
        rest = (1 - d**2) * s2 - (1 - d) ** 2 * self.known_noise
        v_row = np.array([(1 - d) * k, d])  # V' from (u, V)
        v_noise = np.array([(1 - d) * math.sqrt(self.noise), 0, 0, math.sqrt(rest), 0])
        pull = h * tau * k / s2
        u_row = np.array([1 - h * self.curvature - pull * k, 0]) + pull * v_row
        own = np.array([0, -h * n / 2 - pull, -h * n / 2, 0, 0]) * math.sqrt(self.noise)
        u_noise = own + pull * v_noise + np.array([0, 0, 0, 0, math.sqrt(2 * h * tau)])
        step, noise = np.stack([u_row, v_row]), np.stack([u_noise, v_noise])
        covariance = np.linalg.solve(np.eye(4) - np.kron(step, step), (noise @ noise.T).ravel())
        return float(covariance[0])


def variance_score(x: np.ndarray, mean: float, variance: float) -> tuple[float, float]:
    """Scores of mean and variance of draws of shape (draws, chains)."""
    values = np.stack([x - mean, (x - mean) ** 2], axis=-1).astype(np.float64)
    return tuple(chains.scores(values, np.array([0.0, variance])))


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("noise", "temperature"),
    short(itertools.product([0.0, 0.6], [0.25, 1.0, 3.0]), kept=[(0.6, 3.0)]),
)
def test_auxiliary_on_a_gaussian_has_the_variance_of_its_recursion(
    temperature: float, noise: float
) -> None:
    # large steps, so that every coefficient of the recursion shows
    law = Linear(1.0, 1, 0.3, temperature, 0.6, 1.2, noise, noise)

    def noisy_energy(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        return half_square(z) + math.sqrt(noise) * jnp.vdot(z, jax.random.normal(rng_key, (1,)))

    kernel = SGRLD(
        potential_fn=noisy_energy if noise else half_square,
        metric=Monge(alpha2=0.0, decay=law.decay),
        divergence="auxiliary",
        step_size=law.step_size,
        temperature=temperature,
        num_steps=15,
    )
    x = math.sqrt(law.variance()) * jax.random.normal(jax.random.key(6), (20_000, 1))
    state = chains.start(kernel, x, seed=7)
    state = chains.past_warmup(state, scale=law.scale, noise_variance=noise)
    _, draws = chains.run(kernel, state, 6)
    scores = variance_score(draws.z[1:, :, 0], 0.0, law.variance())
    assert np.abs(scores).max() < NUM_ERRORS
    # and as h -> 0 the recursion has the tempered target
    small = law._replace(step_size=1e-5)
    assert small.variance() == pytest.approx(temperature, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", short([0.25, 3.0], kept=[3.0]))
def test_frozen_at_a_temperature_has_its_variance(temperature: float) -> None:
    h = 0.2
    kernel = SGRLD(
        potential_fn=half_square,
        metric=RMSprop(decay=0.9, eps=0.5),
        divergence="frozen",
        step_size=h,
        temperature=temperature,
        num_steps=15,
    )
    x = math.sqrt(temperature) * jax.random.normal(jax.random.key(8), (10_000, 1))
    state = chains.start(kernel, x, seed=9)
    learned = kernel.settings.metric.init(x[0])._replace(statistic=jnp.array([0.49]))
    state = chains.past_warmup(state, metric_state=learned)
    _, draws = chains.run(kernel, state, 6)
    # a step without averaged noise has 1 / (1 - h inverse / 2) times this, which is 9% more
    assert np.abs(variance_score(draws.z[1:, :, 0], 0.0, temperature)).max() < NUM_ERRORS


ROWS = np.random.default_rng(10).normal(1.5, 2.0, 120)
PRIOR = 0.5


def rows_model(y: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0.0, PRIOR))
    with numpyro.plate("rows", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(mu, 2.0), obs=y[i])


# y ~ N(mu, 2^2) and mu ~ N(0, PRIOR^2)
CURVATURE = len(ROWS) / 4 + 1 / PRIOR**2
POSTERIOR_MEAN = ROWS.sum() / 4 / CURVATURE


@pytest.mark.parametrize("temperature", short([1.0, 0.3], kept=[0.3]))
def test_minibatch_frozen_has_the_predicted_variance(temperature: float) -> None:
    batch_size, inverse, h = 12, 0.8, 0.01
    # of the sum over a batch of 12 rows with replacement, times N / B
    noise = len(ROWS) ** 2 / batch_size * np.var(ROWS) / 16
    kernel = SGRLD(
        rows_model,
        metric=RMSprop(decay=0.9, eps=1.0),
        divergence="frozen",
        batch_size=batch_size,
        step_size=h,
        temperature=temperature,
        num_steps=20,
    )
    contraction = 1 - h * inverse * CURVATURE
    # averaged noise alone has the variance temperature / CURVATURE
    exact = temperature / CURVATURE + (h * inverse) ** 2 * noise / (1 - contraction**2)
    # the rule of the automatic step, of first order in h
    terms = h * inverse * np.array([CURVATURE / 2, noise / (2 * temperature)])
    rule = temperature / CURVATURE * (1 + terms[0] ** 2 + terms[1])
    assert exact / rule == pytest.approx(1, abs=2 * terms[0] * terms.sum())

    positions = {"mu": jnp.full((8000,), POSTERIOR_MEAN, jnp.float32)}
    y = jnp.asarray(ROWS, jnp.float32)
    state = chains.start(kernel, positions, seed=11, args=(y,))
    learned = kernel.settings.metric.init({"mu": 0.0})._replace(statistic={"mu": jnp.array(0.0625)})
    state = chains.past_warmup(state, metric_state=learned)
    _, draws = chains.run(kernel, state, 8, args=(y,))
    x = draws.z["mu"][2:]
    assert contraction**40 < 1e-4
    assert np.abs(variance_score(x, POSTERIOR_MEAN, exact)).max() < NUM_ERRORS
    # and the noise is no small part of it
    assert exact > 1.3 * temperature / CURVATURE


def test_stratified_minibatches_have_the_noise_within_their_stretches() -> None:
    batch_size, h, rows = 16, 0.01, np.sort(ROWS)
    # of 7.5 rows each: what of a row is in a stretch, as a probability within it
    ends = np.arange(batch_size + 1)[:, None] * len(rows) / batch_size
    shares = np.diff(np.clip(ends - np.arange(len(rows)), 0, 1), axis=0) * batch_size / len(rows)
    np.testing.assert_allclose(shares.sum(1), 1)
    variances = shares @ rows**2 - (shares @ rows) ** 2
    noise = (len(rows) / batch_size) ** 2 * variances.sum() / 16
    independent = len(rows) ** 2 / batch_size * np.var(rows) / 16
    contraction = 1 - h * CURVATURE
    exact, other = (1 / CURVATURE + h**2 * c / (1 - contraction**2) for c in (noise, independent))

    kernel = SGRLD(
        rows_model, batch_size=batch_size, batching="stratified", step_size=h, num_steps=20
    )
    y = jnp.asarray(rows, jnp.float32)
    positions = {"mu": jnp.full((8000,), POSTERIOR_MEAN, jnp.float32)}
    state = chains.start(kernel, positions, seed=13, args=(y,))
    _, draws = chains.run(kernel, state, 8, args=(y,))
    x = draws.z["mu"][2:]
    assert np.abs(variance_score(x, POSTERIOR_MEAN, exact)).max() < NUM_ERRORS
    assert abs(np.mean(x) - POSTERIOR_MEAN) < NUM_ERRORS * np.sqrt(exact / 8000)
    assert exact < 0.9 * other


def test_minibatch_epochs_cancel_their_noise() -> None:
    # Batches of one epoch have errors e_k that sum to 0: of variance c and correlation
    # -1 / (K - 1). The variance at the ends of epochs is a geometric series over epochs.
    batch_size, h = 12, 0.01
    num_batches = len(ROWS) // batch_size
    c = len(ROWS) ** 2 / batch_size * np.var(ROWS) / 16
    c *= (len(ROWS) - batch_size) / (len(ROWS) - 1)
    contraction = 1 - h * CURVATURE
    weights = contraction ** np.arange(num_batches)
    squares, square = np.sum(weights**2), np.sum(weights) ** 2
    epoch = h**2 * c * (squares - (square - squares) / (num_batches - 1))
    exact = 1 / CURVATURE + epoch / (1 - contraction ** (2 * num_batches))
    independent = 1 / CURVATURE + h**2 * c / (1 - contraction**2)

    kernel = SGRLD(
        rows_model, batch_size=batch_size, batching="epoch", step_size=h, num_steps=num_batches
    )
    y = jnp.asarray(ROWS, jnp.float32)
    positions = {"mu": jnp.full((8000,), POSTERIOR_MEAN, jnp.float32)}
    state = chains.start(kernel, positions, seed=12, args=(y,))
    _, draws = chains.run(kernel, state, 10, args=(y,))
    x = draws.z["mu"][4:]
    assert np.abs(variance_score(x, POSTERIOR_MEAN, exact)).max() < NUM_ERRORS
    assert exact < 0.8 * independent


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("temperature", short([1.0, 0.3], kept=[1.0]))
def test_minibatch_auxiliary_has_the_variance_of_its_recursion(temperature: float) -> None:
    # grad U / N from a third of the batch, four rows
    noise = np.var(ROWS) / 16 / 4
    law = Linear(CURVATURE, len(ROWS), 0.003, temperature, 0.7, 0.1, noise, noise)
    kernel = SGRLD(
        rows_model,
        metric=Monge(alpha2=0.0, decay=law.decay),
        divergence="auxiliary",
        batch_size=12,
        step_size=law.step_size,
        temperature=temperature,
        num_steps=50,
    )
    y = jnp.asarray(ROWS, jnp.float32)
    positions = {"mu": jnp.full((4000,), POSTERIOR_MEAN, jnp.float32)}
    state = chains.start(kernel, positions, seed=13, args=(y,))
    state = chains.past_warmup(state, scale=law.scale, noise_variance=noise)
    _, draws = chains.run(kernel, state, 8, args=(y,))
    x = draws.z["mu"][3:]
    assert np.abs(variance_score(x, POSTERIOR_MEAN, law.variance())).max() < NUM_ERRORS
    # the coupling to V is no small part of it: without, 16 and 8 percent less
    assert law._replace(scale=100.0).variance() < 0.93 * law.variance()


def tilted_variance(inflation: float, alpha2: float, scale: float) -> float:
    """Variance under phi(x) E[A(V)]^d, V ~ N(x, s^2 (1 + d)), A = 1 / (1 + a2 V^2), d inflation.

    That is the law as h -> 0 where V has d times too much variance: V is fast, theta sees the mean
    of A (V - m) / s^2, which is (1 + d) dA/dm by Stein's identity, and so Gamma 1 + d times.
    """
    x = np.linspace(-8, 8, 2001)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    v = x[:, None] + scale * math.sqrt(1 + inflation) * nodes
    mean = (1 / (1 + alpha2 * v**2)) @ weights / weights.sum()
    p = np.exp(-(x**2) / 2) * mean**inflation
    return float(np.sum(p * x**2) / np.sum(p))


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_auxiliary_allows_for_the_minibatch_noise_in_its_metric() -> None:
    # decay 0 and noise .8 s^2: the injected noise is a fifth of that without minibatch noise
    noise, scale, alpha2 = 0.8, 1.0, 4.0

    def energy(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        return half_square(z) + math.sqrt(noise) * jnp.vdot(z, jax.random.normal(rng_key, (1,)))

    kernel = SGRLD(
        potential_fn=energy,
        metric=Monge(alpha2=alpha2, decay=0.0),
        divergence="auxiliary",
        step_size=0.01,
        num_steps=300,
    )
    start = jax.random.normal(jax.random.key(14), (4000, 1))
    # and what happens where the noise is ignored, as theory has it: a variance of .761
    for known in (noise, 0.0):
        exact = tilted_variance((noise - known) / scale**2, alpha2, scale)
        state = chains.start(kernel, start, seed=15)
        state = chains.past_warmup(state, scale=scale, noise_variance=known)
        _, draws = chains.run(kernel, state, 7)
        values = np.mean(draws.z[3:, :, 0] ** 2, axis=0, dtype=np.float64)
        error = np.std(values) / math.sqrt(len(values))
        # bias of order h, measured at .02: .037 and .024
        assert abs(values.mean() - exact) < 0.025 + NUM_ERRORS * error
        assert (exact > 0.99) == (known > 0)
        assert NUM_ERRORS * error < 0.08


def learned(state: SGState) -> tuple[np.ndarray, np.ndarray]:
    """The scale s and the noise variance of a one-dimensional position, by chain."""
    known = state.dynamics
    weight = np.asarray(known.weight)
    noise = np.asarray(jax.tree.leaves(known.noise_variance)[0]).reshape(len(weight))
    return 1.5 * np.sqrt(np.asarray(known.second_moment) / weight), noise / weight


def test_auxiliary_learns_scale_and_noise_in_warmup() -> None:
    noise = 0.5

    def energy(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        return half_square(z) + math.sqrt(noise) * jnp.vdot(z, jax.random.normal(rng_key, (1,)))

    kernel = SGRLD(
        potential_fn=energy,
        metric=RMSprop(decay=0.5),
        divergence="auxiliary",
        step_size=0.05,
        num_steps=100,
    )
    start = 2 * jax.random.normal(jax.random.key(16), (1000, 1))
    state = chains.start(kernel, start, seed=17, num_warmup=8)
    state, _ = chains.run(kernel, state, 8)
    scale, known = learned(state)
    # over about 200 steps: E g^2 = 1 + noise / 2, as two parts of three are averaged for it
    assert np.median(known) == pytest.approx(noise, rel=0.1)
    assert np.median(scale) == pytest.approx(1.5 * math.sqrt(1.25), rel=0.15)
    state, draws = chains.run(kernel, state, 6)
    np.testing.assert_array_equal(learned(state), (scale, known))
    values = np.mean(draws.z[2:, :, 0] ** 2, axis=0, dtype=np.float64)
    error = np.std(values) / math.sqrt(len(values))
    # h (1 + 1 / s^2 + noise ...) A / 2 with A <= 1 / s is at most .04
    assert abs(values.mean() - 1) < 0.04 + NUM_ERRORS * error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "adjusted"),
    short(itertools.product(["monge", "rmsprop"], [False, True]), kept=[("rmsprop", False)]),
    ids=["monge-unadjusted", "monge-adjusted", "rmsprop-unadjusted", "rmsprop-adjusted"],
)
def test_auxiliary_started_at_the_mode(metric: str, adjusted: bool) -> None:
    # The gradient is 0 there, so that it says nothing of s: a scale taken from it alone makes the
    # pull towards V infinitely stiff.
    kernel = SGRLD(
        potential_fn=half_square,
        metric=metric,
        divergence="auxiliary",
        adjusted=adjusted,
        step_size=0.05,
        num_steps=100,
    )
    state = chains.start(kernel, jnp.zeros((500, 1)), seed=18, num_warmup=16)
    state, _ = chains.run(kernel, state, 16)
    scale, _ = learned(state)
    assert 0.5 < np.median(scale) < 3
    assert scale.max() < 10
    state, draws = chains.run(kernel, state, 12)
    assert not draws.diverging.any()
    values = np.mean(draws.z[4:, :, 0] ** 2, axis=0, dtype=np.float64)
    error = np.std(values) / math.sqrt(len(values))
    # bias of order h as above, 0 if adjusted
    assert abs(values.mean() - 1) < (0.0 if adjusted else 0.04) + NUM_ERRORS * error
