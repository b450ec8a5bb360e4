"""I-SGD: its stationary distribution in closed form, its rates, and the kernel contract.

On U = k |z|^2 / 2 with gradient noise N(0, c I) in groups of D entries and constant lam, the
variance is v = tau / k + E max(b - tau lam, 0) / (k lam), and lam = D (k^2 v + c) / 2 in the mean.
If c is much larger than k^2 v, successive gradients are independent normals of variance 2 beta,
beta = (k^2 v + c) / 2, and b / beta is w = sum_i (1 - mu) mu^i chi^2_i. With lam = D beta, then

    v = tau / k (1 + E max(w - tau D, 0) / (tau D)).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chains
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from targets import (
    SIGMAS,
    RowQuadratics,
    all_batches,
    assert_moments,
    assert_trees_equal,
    columns,
    covariance_scores,
    half_square,
    logistic,
    regression,
    regression_data,
    vectorized,
)
from tiers import short

from numpyro_geom.baselines.isgd import (
    ISGD,
    RATE_STEPS,
    STILL_STEPS,
    GroupRate,
    RateState,
)

X, Y = regression_data(24, 2)


def noisy_normal(k: float, c: float) -> Callable:
    """The energy of N(0, I / k) with gradient noise of covariance c I."""

    def potential_fn(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        return k * z @ z / 2 + np.sqrt(c) * z @ random.normal(rng_key, z.shape)

    return potential_fn


def silent(z: Any, rng_key: jax.Array) -> jax.Array:
    """Formally stochastic, and always the energy of N(0, I)."""
    return half_square(z)


def frozen(state: Any, lam: Any, statistic: Any) -> Any:
    """Chains past warm-up, with rates 1 / lam and a b to start from."""
    rates = RateState(statistic, jnp.asarray(lam), jnp.ones(()))
    return chains.past_warmup(state, metric_state=rates)


# --- stationary distributions


@functools.cache
def scaled_statistic() -> np.ndarray:
    """Draws of w at decay 1/2."""
    rng = np.random.default_rng(0)
    return sum(0.5 ** (i + 1) * rng.standard_normal(1_000_000) ** 2 for i in range(20))


def clipped_excess(level: float) -> float:
    """E max(w - level, 0) by simulation, with an error of 7e-4 or less."""
    return float(np.maximum(scaled_statistic() - level, 0).mean())


# dimension, k, c, temperature. The first has no clipping to speak of (1e-4) and a step so large
# that an injected noise without the squared mean gradient in b would give 1.067 tau / k.
LAWS = {
    "large group, large step": (8, 1.0, 1.0, 1.0),
    "cold": (8, 2.0, 30.0, 0.25),
    "hot": (3, 1.0, 30.0, 2.0),
    "single entry": (1, 1.0, 200.0, 1.0),
}


@pytest.mark.parametrize("name", short(LAWS, kept=["hot"]))
def test_stationary_variance_is_the_closed_form(name: str) -> None:
    dim, k, c, tau = LAWS[name]
    variance = tau / k * (1 + clipped_excess(tau * dim) / (tau * dim))
    beta = (k**2 * variance + c) / 2
    lam = dim * beta
    kernel = ISGD(potential_fn=noisy_normal(k, c), num_steps=int(lam / k) + 1, temperature=tau)
    # from a tenth too wide: a chain that stood still would fail
    start = np.sqrt(1.1 * variance) * random.normal(random.key(0), (4000, dim))
    state = frozen(chains.start(kernel, start, seed=1), [lam], jnp.full(dim, beta))
    # each draw is a relaxation time: after five the start has left exp(-10) of a tenth
    state, draws = chains.run(kernel, state, 13)
    squares = np.square(draws.z[5:]).mean(-1, keepdims=True)
    # the standard error is .3 percent of the variance with 8 entries, .9 with one
    assert abs(chains.scores(squares, np.array([variance]))[0]) < SIGMAS
    assert not draws.diverging.any()


def two_sites(Z: jax.Array, y: jax.Array) -> None:
    """Linear regression with its coefficients in two sites, columns "a" and then "b"."""
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", Z.shape[0]) as i:
        numpyro.sample("y", dist.Normal(Z[i, 0] * a + Z[i, 1:] @ b, 0.5), obs=y[i])


def isgd_law(energy: RowQuadratics, batch_size: int, lam: np.ndarray) -> tuple[Any, Any, float]:
    """Stationary mean and covariance without clipping, and the largest mean b, of constant lam.

    With J = I - P H_b over all batches b and gradients g = H_b (theta - mean) + s_b,
    S = E[J S J'] + P Cov(s) P + 2 P - P diag(E g g') P, P = 1 / lam.
    """
    num_rows, dim = energy.rows[1].shape
    batches = all_batches(num_rows, batch_size)
    factor = num_rows / batch_size
    hessians = energy.prior[0] + factor * energy.rows[0][batches].sum(axis=1)
    slopes = energy.prior[1] + factor * energy.rows[1][batches].sum(axis=1)
    mean, _ = energy.moments()
    gradients = hessians @ mean - slopes
    noise = gradients.T @ gradients / len(batches)
    P = np.diag(1 / lam)
    J = np.eye(dim) - P @ hessians

    def without_clipping(S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        square = np.einsum("nij,jk,nlk->il", hessians, S, hessians) / len(batches) + noise
        moved = np.einsum("nij,jk,nlk->il", J, S, J) / len(batches)
        return moved + P @ (noise - np.diag(np.diag(square))) @ P + 2 * P, square

    # affine in S: its matrix column by column
    constant = without_clipping(np.zeros((dim, dim)))[0].ravel()
    units = np.eye(dim**2).reshape(-1, dim, dim)
    matrix = np.stack([without_clipping(u)[0].ravel() - constant for u in units], axis=1)
    S = np.linalg.solve(np.eye(dim**2) - matrix, constant).reshape(dim, dim)
    return mean, S, without_clipping(S)[1].diagonal().max() / 2


@pytest.mark.slow
def test_covariance_of_a_minibatched_regression_is_the_closed_form() -> None:
    """Correlated inputs, minibatches of real rows, two groups: bias of the law included."""
    raw, y = regression_data(24, 3)
    Z = raw + 0.7 * raw[:, :1]  # three correlated columns
    rows = np.asarray(Z, np.float64)
    energy = RowQuadratics(
        (np.eye(3), np.zeros(3)),
        (np.einsum("ni,nj->nij", rows, rows) / 0.25, rows * np.asarray(y, float)[:, None] / 0.25),
    )
    lam = np.array([1e4, 7e3])
    mean, covariance, b = isgd_law(energy, 2, lam[[0, 1, 1]])

    kernel = ISGD(two_sites, batch_size=2, num_steps=900)
    root = np.linalg.cholesky(1.2 * covariance)
    start = mean + np.random.default_rng(0).normal(size=(4000, 3)) @ root.T
    start = {"a": jnp.asarray(start[:, 0]), "b": jnp.asarray(start[:, 1:])}
    state = chains.start(kernel, start, seed=1, args=(Z, y))
    state = frozen(state, lam, {"a": jnp.full((), b), "b": jnp.full(2, b)})
    state, draws = chains.run(kernel, state, 1, args=(Z, y))
    # what is clipped: about 0.3 percent of the steps, by less than lam; the draws resolve 2 percent
    share = np.mean(np.asarray(state.metric_state.statistic["b"]) > lam[1])
    assert share < 0.01
    assert_moments(
        columns({name: x[0] for name, x in draws.z.items()}, ("a", "b")), mean, covariance
    )
    # and they tell the law from the posterior
    posterior = energy.moments()[1]
    draws = columns({name: x[0] for name, x in draws.z.items()}, ("a", "b"))
    assert np.abs(covariance_scores(draws, mean, posterior)).max() > SIGMAS


def test_one_step_is_algorithm_2() -> None:
    """The step given the state: its drift, and noise of variance 2 (tau lam - b)."""
    tau, lam = 0.8, np.array([40.0, 3.0])
    kernel = ISGD(potential_fn=silent, num_steps=1, temperature=tau)
    num_chains = 20_000
    start = {"a": jnp.full((num_chains, 2), 3.0), "b": jnp.full((num_chains,), 2.0)}
    b = {"a": jnp.array([1.0, 60.0]), "b": jnp.array(1.0)}
    state = frozen(chains.start(kernel, start, seed=0), lam, b)
    state, draws = chains.run(kernel, state, 1)
    # b <- b / 2 + g^2 / 4 with g = z: 2.75 and 32.25 of 32 in a, and 1.5 of 2.4 in b
    statistic = {"a": [2.75, 32.25], "b": 1.5}
    for name, value in statistic.items():
        np.testing.assert_allclose(state.metric_state.statistic[name][0], value, rtol=1e-6)
    np.testing.assert_array_equal(state.metric_state.lam, np.tile(lam, (num_chains, 1)))
    moved = columns({name: x[0] for name, x in draws.z.items()}, ("a", "b"))
    rate = 1 / lam[[0, 0, 1]]
    mean = np.array([3.0, 3.0, 2.0]) * (1 - rate)
    # exactly no noise where b is above tau lam
    np.testing.assert_allclose(moved[:, 1], mean[1], rtol=1e-6)
    variance = rate**2 * 2 * (tau * lam[[0, 0, 1]] - np.array([2.75, 32.0, 1.5]))
    assert_moments(moved[:, ::2], mean[::2], np.diag(variance[::2]))


def test_temperature_zero_is_gradient_descent() -> None:
    lam, num_steps = jnp.array([8.0]), 3
    kernel = ISGD(potential_fn=silent, num_steps=num_steps, temperature=0.0)
    start = jnp.array([[1.0, -2.0]])
    state = frozen(chains.start(kernel, start, seed=0), lam, jnp.zeros(2))
    _, draws = chains.run(kernel, state, 1)
    np.testing.assert_allclose(draws.z[0], start * (1 - 1 / 8) ** num_steps, rtol=1e-6)


# --- rates


def slopes(z: dict[str, jax.Array], rng_key: jax.Array) -> jax.Array:
    """A gradient that is the same everywhere."""
    return jnp.sum(z["a"] * jnp.array([1.0, 2.0])) + jnp.sum(3 * z["b"]) + 4 * z["c"]


SQUARES = {"a": 2.5, "b": 13.5, "c": 8.0}  # half the squared gradients: (1 + 4), 3 * 9, 16
PLACE = {"a": jnp.zeros(2), "b": jnp.zeros(3), "c": jnp.zeros(())}


@pytest.mark.parametrize(
    ("groups", "lam"),
    [
        (None, [2.5, 13.5, 8.0]),
        ({"a": "x", "b": "y", "c": "x"}, [10.5, 13.5]),
        ({"c": "one", "b": "one", "a": "one"}, [24.0]),
    ],
    ids=["sites", "two groups", "one group"],
)
def test_a_group_has_one_rate_from_the_sum_of_its_entries(groups: Any, lam: list) -> None:
    metric = ISGD(potential_fn=slopes, groups=groups).settings.metric
    update = jax.jit(lambda s: metric.update(s, jax.grad(slopes)(PLACE, random.key(0))))
    state = update(update(metric.init(PLACE)))
    np.testing.assert_allclose(state.lam, lam, rtol=1e-5)
    if groups is None:
        expected = SQUARES
    else:
        names = sorted(set(groups.values()))
        expected = {site: lam[names.index(group)] for site, group in groups.items()}
    ones = jax.tree.map(jnp.ones_like, PLACE)
    inverse = metric.apply_inverse(state, ones)
    roots = metric.apply_inverse_sqrt(state, ones)
    for name, value in expected.items():
        np.testing.assert_allclose(inverse[name], jnp.full_like(PLACE[name], 1 / value), rtol=1e-5)
        np.testing.assert_allclose(roots[name] ** 2, inverse[name], rtol=1e-5)


def test_the_first_draw_stands_still_and_settles() -> None:
    kernel = ISGD(potential_fn=slopes, groups={"a": "x", "b": "y", "c": "x"})
    state = kernel.init(random.key(0), 10, PLACE, (), {})
    state = jax.jit(lambda s: kernel.sample(s, (), {}))(state)
    assert int(state.steps_taken) == 2 * RATE_STEPS
    assert_trees_equal(state.z, PLACE)
    np.testing.assert_allclose(state.metric_state.lam, [10.5, 13.5], rtol=1e-5)
    np.testing.assert_allclose(state.metric_state.statistic["a"], [0.5, 2.0], rtol=1e-6)


def test_rates_forget_the_start_and_are_free_of_it() -> None:
    metric = GroupRate(decay=0.5)
    update = jax.jit(metric.update)
    state = metric.init(jnp.zeros(2))
    for n in range(1, 4):
        state = update(state, jnp.array([1.0, 3.0]))
        np.testing.assert_allclose(state.lam, [5.0], rtol=1e-6)  # at once
        np.testing.assert_allclose(state.statistic, np.array([0.5, 4.5]) * (1 - 0.5**n), rtol=1e-6)
    state = update(metric.init(jnp.zeros(2)), jnp.full(2, 1e4))
    state = jax.lax.fori_loop(0, 20 * RATE_STEPS, lambda _, s: update(s, jnp.ones(2)), state)
    # exp(-20) of 1e8, over the weight of a single step, 1 / RATE_STEPS
    np.testing.assert_allclose(state.lam, [1 + 1e8 * np.exp(-20.05) / RATE_STEPS], rtol=1e-4)


@pytest.mark.slow
def test_warm_up_finds_the_rate_and_then_freezes_it() -> None:
    dim, k, c = 8, 1.0, 15.0
    kernel = ISGD(potential_fn=noisy_normal(k, c), num_steps=64)
    state = chains.start(kernel, jnp.full((500, dim), 5.0), seed=0, num_warmup=32)
    sample = jax.jit(lambda s: kernel.sample(s, (), {}))
    states = [state := sample(state) for _ in range(34)]
    lams = np.stack([s.metric_state.lam[:, 0] for s in states]).astype(float)
    b = np.stack([s.metric_state.statistic for s in states])
    # from draw 28 on, and b goes on
    assert np.all(lams[26] != lams[27])
    np.testing.assert_array_equal(lams[27:], np.broadcast_to(lams[27], lams[27:].shape))
    assert np.all(b[-1] != b[-2])
    # successive |g|^2 are correlated by (k^2 v / 2 beta)^2 < .004: neglected
    expected, lam = dim * (k + c) / 2, lams[-1]
    assert abs(lam.mean() - expected) < SIGMAS * lam.std() / np.sqrt(lam.size)
    # the spread of an average over a memory of RATE_STEPS of a sum of `dim` squared normals
    np.testing.assert_allclose(lam.std() / expected, np.sqrt(2 / dim / (2 * RATE_STEPS)), rtol=0.2)
    # at any such rate, v = tau / k
    square = np.square(state.z, dtype=float)
    assert abs(square.mean() - 1 / k) < SIGMAS * square.std() / np.sqrt(square.size)


def test_without_warm_up_the_position_holds_still_until_there_is_a_rate() -> None:
    kernel = ISGD(potential_fn=noisy_normal(1.0, 9.0), num_steps=1)
    state = chains.start(kernel, jnp.ones((2, 3)), seed=0)
    state, draws = chains.run(kernel, state, STILL_STEPS + 10)
    moved = np.any(np.diff(draws.z, axis=0) != 0, axis=-1)
    assert not moved[: STILL_STEPS - 1].any()
    assert moved[STILL_STEPS:].all()
    # 50 sums of three squared normals: within a factor of 2, eight standard deviations below
    assert np.all((state.metric_state.lam > 7.5) & (state.metric_state.lam < 30))


# --- under MCMC


def logistic_moments(Z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Posterior mean and standard deviation by importance sampling from the Laplace fit.

    50,000 draws from twice the covariance, in four dimensions: errors of half a percent.
    """

    def slope(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p = 1 / (1 + np.exp(-Z @ theta))
        return theta + Z.T @ (p - y), np.eye(4) + (Z.T * (p * (1 - p))) @ Z

    mode = np.zeros(4)
    for _ in range(20):
        grad, hessian = slope(mode)
        mode = mode - np.linalg.solve(hessian, grad)
    draws = np.random.default_rng(1).standard_normal((50_000, 4))
    theta = mode + np.sqrt(2) * draws @ np.linalg.inv(np.linalg.cholesky(hessian))
    logits = theta @ Z.T
    energy = (theta**2).sum(1) / 2 + np.logaddexp(0, logits).sum(1) - logits @ y
    log_weights = -energy + (draws**2).sum(1) / 2
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    mean = weights @ theta
    return mean, np.sqrt(weights @ (theta - mean) ** 2)


@pytest.mark.slow
def test_minibatched_logistic_regression_against_its_posterior() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(500, 3))
    labels = rng.random(500) < 1 / (1 + np.exp(-(inputs @ [1.0, -0.5, 0.0] + 0.5)))
    Z, y = np.concatenate([inputs, np.ones((500, 1))], axis=1), labels.astype(float)
    mean, sd = logistic_moments(Z, y)
    kernel = ISGD(logistic, batch_size=50)
    mcmc = vectorized(kernel, 200, 1000, 2)
    mcmc.run(random.key(0), jnp.asarray(Z), jnp.asarray(labels, int))
    assert not mcmc.get_extra_fields()["diverging"].any()
    draws = columns(mcmc.get_samples(), ("w",))
    # about 700 effective draws: standard errors of .04 in the mean, in standard deviations, and of
    # 3 percent in these; 5 of them each. For nearly uncorrelated inputs the bias is 3 percent.
    np.testing.assert_array_less(np.abs(draws.mean(0) - mean) / sd, 0.2)
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.03 + 0.15)
    # trace of the Hessian times 10 = N / B, and once more for the mean gradient; all over 2
    p = 1 / (1 + np.exp(-Z @ mean))
    trace = np.sum(p * (1 - p) * np.sum(Z**2, axis=1))
    np.testing.assert_allclose(mcmc.last_state.metric_state.lam, 11 * trace / 2, rtol=0.25)


# --- the kernel contract, beyond the table in test_conformance


def test_settings_are_its_own() -> None:
    settings = ISGD(regression, groups={"w": "one", "s": "one"}).settings.record()
    assert settings["groups"] == "{'w': 'one', 's': 'one'}"
    assert settings["decay"] == 0.5
    assert "step_size" not in settings


def test_rates_that_are_too_large_are_undone() -> None:
    """Frozen rates above 2 / k are unstable: the chain stays finite and says so."""
    kernel = ISGD(potential_fn=noisy_normal(100.0, 1.0), num_steps=50)
    state = frozen(chains.start(kernel, jnp.ones((3, 2)), seed=0), [10.0], jnp.zeros(2))
    _, draws = chains.run(kernel, state, 10)
    assert np.all(np.isfinite(draws.z))
    assert draws.diverging.any()


# --- bad input


def start(model: Callable = regression, **settings: Any) -> Callable:
    return lambda: ISGD(model, **settings).init(random.key(0), 10, None, (X, Y), {})


def place(potential_fn: Callable, position: Any, **settings: Any) -> Callable:
    return lambda: ISGD(potential_fn=potential_fn, **settings).init(
        random.key(0), 10, position, (), {}
    )


MISTAKES = {
    "all rows": (start(), ValueError, "ISGD takes its rate from minibatch noise.*batch_size"),
    "exact potential": (place(half_square, jnp.zeros(2)), ValueError, "potential_fn with a key"),
    "missing site": (
        start(batch_size=6, groups={"w": "one"}),
        ValueError,
        r"latent sites \['s', 'w'\]: missing \['s'\], unknown \[\]",
    ),
    "unknown site": (
        start(batch_size=6, groups={"w": "one", "s": "one", "v": "two"}),
        ValueError,
        r"missing \[\], unknown \['v'\]",
    ),
    "no site": (start(batch_size=6, groups={}), ValueError, r"missing \['s', 'w'\]"),
    "groups of an array": (
        place(silent, jnp.zeros(2), groups={"w": "one"}),
        TypeError,
        "groups names sites, and the position has none: expected a dict",
    ),
    "groups list": (
        lambda: ISGD(regression, groups=["w", "s"]),
        TypeError,
        r"groups must map names of sites.*got \['w', 's'\]",
    ),
    "groups of numbers": (
        lambda: ISGD(regression, groups={"w": 0, "s": 1}),
        TypeError,
        "groups must map names of sites to names of groups",
    ),
    "decay one": (lambda: ISGD(regression, decay=1.0), ValueError, "decay must be .* below 1"),
    "decay negative": (lambda: ISGD(regression, decay=-0.1), ValueError, "decay must be"),
    "decay text": (lambda: ISGD(regression, decay="0.5"), TypeError, "decay must be a number"),
    "temperature": (lambda: ISGD(regression, temperature=-1.0), ValueError, "temperature must be"),
    "num_steps": (lambda: ISGD(regression, num_steps=0), ValueError, "num_steps must be"),
    "step_size": (lambda: ISGD(regression, step_size=0.1), TypeError, "step_size"),
    "nothing": (lambda: ISGD(), ValueError, "exactly one of `model` and `potential_fn`"),
}


@pytest.mark.parametrize(("mistake", "error", "match"), MISTAKES.values(), ids=MISTAKES.keys())
def test_bad_input(mistake: Callable, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"(?s){match}"):
        mistake()
