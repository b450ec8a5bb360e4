"""SGHMC and SGNHT against the stationary distributions of their steps, and their step-size rule.

On a Gaussian target with constant gradient noise, a step is linear. So the stationary covariance
of (theta, p) is the solution of a linear equation, at any step size: `law` solves it
from the matrices of the step. Chains are many and independent. Unless stated otherwise, a
threshold is 5.5 Monte Carlo standard errors, which a correct sampler exceeds once in 3e7.
"""

from __future__ import annotations

from math import gamma as gamma_function
from typing import Any

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from targets import SIGMAS, assert_moments, half_square, vectorized
from tiers import short

from numpyro_geom import SGHMC, Identity, Monge, RMSprop, cyclical
from numpyro_geom.algorithms.momentum import MOST_FRICTION, momentum_rule
from numpyro_geom.algorithms.sgnht import SGNHT, Thermostat, _shortfall
from numpyro_geom.kernel import SGState
from numpyro_geom.metrics import MetricState
from numpyro_geom.sampling.state import init_adaptation


def start(kernel: SGHMC | SGNHT, positions: jax.Array) -> SGState:
    """States of chains there; one program, where `chains.start` compiles many small ones."""
    keys = random.split(random.key(0), positions.shape[0])
    return jax.jit(lambda z: kernel.init(keys, 0, z, (), {}))(positions)


# --- exact distributions


def law(
    h: float,
    lam: float,
    noise: float,
    friction: float,
    injected: float,
) -> tuple[np.ndarray, float]:
    """Stationary covariance of (theta, p) after a step, and the variance of p after its kick.

    Args:
        h: step size.
        lam: curvature.
        noise: variance c of the gradient.
        friction: gamma of the dissipation.
        injected: gamma tau of the injected noise.
    """
    kept = np.exp(-friction * h)
    variance = injected * (1 - kept**2) / friction
    kick = np.array([[1.0, 0.0], [-h * lam, 1.0]])
    move = np.array([[1.0, h * (1 + kept) / 2], [0.0, kept]])
    from_kick, from_normal = move @ [0.0, h], np.array([h / 2, 1.0])
    transfer = move @ kick
    source = noise * np.outer(from_kick, from_kick) + variance * np.outer(from_normal, from_normal)
    flat = np.linalg.solve(np.eye(4) - np.kron(transfer, transfer), source.ravel())
    covariance = flat.reshape(2, 2)
    kicked = (kick @ covariance @ kick.T)[1, 1] + h**2 * noise
    return covariance, kicked


def bias(h: Any, lam: Any, noise: Any, friction: Any, tau: Any) -> Any:
    """The closed form of the relative error of the variance of theta."""
    return h**2 * noise / (4 * tau * np.tanh(friction * h / 2)) / (1 - h**2 * lam / 4)


def test_closed_forms() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        h, lam, noise = rng.uniform(0.01, 0.5), rng.uniform(0.1, 5), rng.uniform(0, 10)
        friction, tau = rng.uniform(0.1, 2), rng.uniform(0.3, 3)
        covariance, kicked = law(h, lam, noise, friction, friction * tau)
        exact = tau / lam * (1 + bias(h, lam, noise, friction, tau))
        assert covariance[0, 0] == pytest.approx(exact, rel=1e-9)
    covariance, kicked = law(0.3, 40.0, 0.0, 0.7, 0.7 * 1.5)
    np.testing.assert_allclose([covariance[0, 0] * 40, covariance[1, 1], kicked], 1.5, rtol=1e-9)


# --- SGHMC on Gaussians

SIZES, FRICTIONS = np.array([0.1, 0.3, 0.3]), np.array([4.0, 1.0, 3.0])
NOISE = np.array([2.0, 10.0, 0.0])
CURVATURES = np.array([1.0, 5.0, 40.0])  # h^2 lam = 3.6 without noise: exact still
GROUP = 12_000
METRICS = {
    "identity": (Identity(), None),
    "rmsprop": (RMSprop(eps=1e-12), MetricState(jnp.array([1.0, 1 / 4, 16.0]))),
    "monge": (Monge(alpha2=2.0), MetricState(jnp.array([0.3, -0.8, 0.6]))),
}


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("name", "tau"),
    short(
        [("identity", 1.0), ("monge", 2.0), ("rmsprop", 0.5)],
        kept=[("monge", 2.0), ("rmsprop", 0.5)],
    ),
)
def test_stationary_law(name: str, tau: float) -> None:
    """All of the covariance of y = G^{1/2} theta and p, where U = y' diag(lam) y / 2."""
    metric, metric_state = METRICS[name]
    lam = CURVATURES
    fixed = metric.init(jnp.zeros(3)) if metric_state is None else metric_state
    root = jnp.linalg.inv(jax.vmap(lambda e: metric.apply_inverse_sqrt(fixed, e))(jnp.eye(3)))

    def energy(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        y = root @ z
        normal = random.normal(rng_key, z.shape, z.dtype)
        return jnp.sum(lam * y * y) / 2 + jnp.sum(jnp.sqrt(NOISE) * normal * y)

    kernel = SGHMC(
        potential_fn=energy,
        metric=metric,
        divergence="frozen",
        temperature=tau,
        step_size=lambda t: jnp.asarray(SIZES)[t // chains.CHAIN_STEPS],
        friction=1.0,
        num_steps=80,
    )
    exact = np.zeros((3, 6, 6))
    after_noise = np.zeros(3)
    for k, (h, friction) in enumerate(zip(SIZES, FRICTIONS, strict=True)):
        for j in range(3):
            found, _ = law(h, lam[j], NOISE[j], friction, friction * tau)
            exact[k][np.ix_([j, j + 3], [j, j + 3])] = found
            after_noise[k] += found[1, 1] / 3

    spread = np.repeat(np.sqrt(np.diagonal(exact, axis1=1, axis2=2)[:, :3]), GROUP, axis=0)
    y = jnp.asarray(spread, jnp.float32) * random.normal(random.key(1), spread.shape)
    state = start(kernel, jax.vmap(lambda y: metric.apply_inverse_sqrt(fixed, y))(y))
    state = chains.past_warmup(state, metric_state=metric_state)
    state = chains.several_step_sizes(state, 3)
    frictions = jnp.asarray(np.repeat(FRICTIONS, GROUP), jnp.float32)
    state = state._replace(dynamics=state.dynamics._replace(friction=frictions))

    # 160 steps: 4 relaxation times at the slowest, from an exact variance of theta
    state, draws = chains.run(kernel, state, 2)
    assert {x.dtype for x in jax.tree.leaves((state.z, state.dynamics))} == {jnp.dtype("float32")}
    y = state.z @ root
    both = np.concatenate([y, state.dynamics.momentum], axis=1).astype(np.float64)
    for k in range(3):
        assert_moments(both[k * GROUP : (k + 1) * GROUP], np.zeros(6), exact[k])
    kinetic = draws.kinetic_temperature[1:].reshape(1, 3, GROUP).swapaxes(1, 2)
    scores = chains.scores(kinetic, after_noise)
    assert np.abs(scores).max() < SIGMAS, (scores, kinetic.mean((0, 1)), after_noise)


# --- the rule


def adaptation(slowest: Any, curvature: Any, noise: Any) -> Any:
    return init_adaptation(100, jnp.float32)._replace(
        slowest=jnp.float32(slowest), curvature=jnp.float32(curvature), noise=jnp.float32(noise)
    )


def rule(cases: np.ndarray, given_step: bool, given_friction: float | None) -> np.ndarray:
    """(h, friction, rate) for rows of (slowest, curvature, noise, step), tau = 2, tolerance .1."""

    def one(case: jax.Array) -> tuple:
        step = case[3] if given_step else None
        return momentum_rule(adaptation(*case[:3]), 0.1, 2.0, step, given_friction)

    return np.stack(jax.jit(jax.vmap(one))(jnp.asarray(cases, jnp.float32)), 1).astype(float)


def test_correlated_draws_make_draws_longer_and_not_the_friction_lower() -> None:
    learned = adaptation(0.05, 4.0, 0.0)._replace(rate_factor=jnp.float32(0.1))
    _, friction, rate = map(float, momentum_rule(learned, 0.1, 1.0, None, None))
    assert friction == pytest.approx(0.5**0.5)
    # the slower root of s^2 + friction s + 0.05
    assert rate == pytest.approx((friction - (friction**2 - 4 * 0.05) ** 0.5) / 2, rel=1e-5)


def cases(num: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    slowest = 10 ** rng.uniform(-2, 4, num)
    curvature = slowest * 10 ** rng.uniform(0, 5, num)
    # h c / tau = h lam and more, or less: either can decide
    noise = curvature * 10 ** rng.uniform(-6, 4, num)
    step = 10 ** rng.uniform(-2, 0, num) * 2 * np.sqrt(0.05 / curvature)
    return np.stack([slowest, curvature, noise, step], 1)


@pytest.mark.parametrize("given_friction", [None, 3.0])
@pytest.mark.parametrize("given_step", [False, True])
def test_rule_keeps_the_bias_in_bounds(given_friction: float | None, given_step: bool) -> None:
    given = cases(2000)
    slowest, curvature, noise, step = given.T
    h, friction, rate = rule(given, given_step, given_friction).T
    if given_step:
        np.testing.assert_allclose(h, step, rtol=1e-6)
    if given_friction is not None:
        np.testing.assert_allclose(friction, given_friction)
    else:
        assert (friction * h < MOST_FRICTION * 1.00001).all()
        assert (friction >= np.minimum(np.sqrt(slowest), MOST_FRICTION / h) * (1 - 1e-5)).all()
    error = bias(h, curvature, noise, friction, 2.0)
    free = np.ones(len(h), bool)
    if given_step:
        # only friction is left to choose, up to a bound
        free = (friction * h < 0.999 * MOST_FRICTION) if given_friction is None else ~free
    assert free.any() or (given_step and given_friction is not None)
    assert (error[free] >= 0).all()
    assert (error[free] < 0.1 * 1.001).all(), error[free].max()
    # no direction is worse than the one with the largest curvature and noise
    for lam in (slowest, np.sqrt(slowest * curvature)):
        assert (bias(h, lam, noise, friction, 2.0)[free] <= error[free] + 1e-9).all()

    # the slowest root of s^2 + gamma s + lam, over the curvatures at both ends
    roots = [
        np.roots([1.0, f, lam]).real
        for f, *lams in zip(friction, slowest, curvature, strict=True)
        for lam in lams
    ]
    slowest_root = -np.reshape(roots, (len(h), 4)).max(axis=1)
    np.testing.assert_allclose(rate, slowest_root, rtol=2e-3)


def test_rule_uses_the_tolerance_where_noise_decides() -> None:
    """Noise far above curvature: h as large as the bound on the friction allows, and no larger."""
    h, friction, _ = rule(np.array([[1.0, 10.0, 1e5, 0.0]]), False, None)[0]
    assert friction * h == pytest.approx(MOST_FRICTION, rel=1e-5)
    assert bias(h, 10.0, 1e5, friction, 2.0) == pytest.approx(0.1 / 1.1, rel=0.01)
    h, friction, _ = rule(np.array([[1.0, 10.0, 1e5, 0.0]]), False, 3.0)[0]
    assert bias(h, 10.0, 1e5, friction, 2.0) == pytest.approx(0.1 / 1.1, rel=0.01)


# --- SGNHT

MANY = np.linspace(0.5, 4.0, 16)
"""Curvatures of a target in 16 dimensions."""


def thermostatted(h: float, noise: float, gamma: float, tau: float) -> tuple:
    """The friction that holds the kinetic temperature in `MANY`, and the variances of theta."""
    low, high = gamma / 2, 10 * gamma
    while high - low > 1e-9:
        middle = (low + high) / 2
        found = [law(h, lam, noise, middle, gamma * tau) for lam in MANY]
        # BADODAB reads the momentum before and after the noise
        kinetic = np.mean([(f[0][1, 1] + f[1]) / 2 for f in found])
        low, high = (middle, high) if kinetic > tau else (low, middle)
    return middle, np.array([f[0][0, 0] for f in found])


def noisy(noise: float) -> Any:
    def energy(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        normal = random.normal(rng_key, z.shape, z.dtype)
        return jnp.sum(jnp.asarray(MANY, z.dtype) * z * z) / 2 + np.sqrt(noise) * z @ normal

    return energy


def variance_ratios(kernel: Any, tau: float, num_chains: int, num_draws: int = 8) -> Any:
    """Squares over tau / lam, averaged over coordinates, and the thermostat: (draws, chains)."""
    first = np.sqrt(tau / MANY) * random.normal(random.key(1), (num_chains, MANY.size))
    state = start(kernel, first.astype(jnp.float32))
    sample = jax.jit(lambda state: kernel.sample(state, (), {}))
    state = sample(state)
    squares, thermostat = [], []
    for _ in range(num_draws):
        state = sample(state)
        squares.append(np.mean(np.asarray(state.z, np.float64) ** 2 * MANY / tau, -1))
        if isinstance(kernel, SGNHT):
            thermostat.append(np.asarray(state.dynamics.extra.friction, np.float64))
    return np.stack(squares), np.stack(thermostat) if thermostat else None


@pytest.mark.usefixtures("optimised")
def test_thermostat_takes_isotropic_noise() -> None:
    gamma, h, noise, tau = 1.0, 0.1, 12.0, 2.0
    kernel = SGNHT(
        potential_fn=noisy(noise),
        temperature=tau,
        step_size=h,
        friction=gamma,
        num_steps=int(6 / h),
    )
    squares, thermostat = variance_ratios(kernel, tau, 1500)
    # friction alone leaves it, see `test_stationary_law`
    assert bias(h, MANY, noise, gamma, tau).min() > 0.25
    friction, variances = thermostatted(h, noise, gamma, tau)
    expected = np.mean(variances * MANY / tau)
    assert abs(expected - 1) < 0.002
    # gamma + h c / (2 tau), up to second order
    assert abs(friction - 1.3) < 0.004
    error = squares.mean(0).std() / np.sqrt(squares.shape[1])
    assert SIGMAS * error < 0.02
    # the thermostat's own motion, which `thermostatted` leaves out, adds less than .5%
    assert abs(squares.mean() - expected) < 0.005 + SIGMAS * error, (squares.mean(), expected)

    error = thermostat.mean(0).std() / np.sqrt(thermostat.shape[1])
    assert abs(thermostat.mean() - friction) < 0.005 + SIGMAS * error, thermostat.mean()
    inertia = 2 * tau / gamma**2
    spread = np.sqrt(tau / (MANY.size * inertia))
    # sd of a standard deviation from 1500 chains and some draws of each: .7%
    assert thermostat.std() == pytest.approx(spread, rel=0.05)


@pytest.mark.usefixtures("optimised")
@pytest.mark.slow
def test_noise_that_differs_between_directions() -> None:
    """What the docstring says is left: h (c_j - c) / (2 tau xi)."""
    h, gamma, noise = 0.02, 1.0, np.repeat([0.0, 60.0], 8)

    def energy(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        normal = random.normal(rng_key, z.shape)
        return z @ z / 2 + jnp.sum(jnp.sqrt(jnp.asarray(noise, z.dtype)) * z * normal)

    kernel = SGNHT(potential_fn=energy, step_size=h, friction=gamma, num_steps=300)
    friction = gamma + h * noise.mean() / 2
    exact = 1 + h * (noise - noise.mean()) / (2 * friction)
    first = np.sqrt(exact) * random.normal(random.key(1), (1000, 16))
    _, draws = chains.run(kernel, start(kernel, first), 4)
    squares = draws.z[1:].astype(np.float64) ** 2
    found = squares.reshape(3, 1000, 2, 8).mean((0, 3))
    error = found.std(0) / np.sqrt(1000)
    assert (np.abs(found.mean(0) - exact[[0, 8]]) < 0.01 + SIGMAS * error).all(), found.mean(0)


@pytest.mark.usefixtures("optimised")
def test_quartic() -> None:
    tau, h = 2.0, 0.1
    kernel = SGNHT(
        potential_fn=lambda z: jnp.sum(z**4) / 4,
        temperature=tau,
        step_size=h,
        friction=1.0,
        num_steps=int(5 / h),
    )
    rng = np.random.default_rng(0)
    size = (4 * tau * rng.gamma(0.25, size=(2000, 8))) ** 0.25
    first = jnp.asarray(size * rng.choice([-1.0, 1.0], size=size.shape), jnp.float32)
    _, draws = chains.run(kernel, start(kernel, first), 5)
    z = draws.z[1:].astype(np.float64)
    assert abs(np.mean(z[0] * np.asarray(first))) < 0.1  # they have moved
    exact = np.array([2 * np.sqrt(tau) * gamma_function(0.75) / gamma_function(0.25), tau])
    found = np.stack([np.mean(z**2, -1), np.mean(z**4, -1)], -1)
    error = found.mean(0).std(0) / np.sqrt(2000)
    # Euler's own bias: xi h / 2 = .5% of tau; BADODAB's is of second order and below .2%
    assert (np.abs(found.mean((0, 1)) - exact) < 0.006 * exact + SIGMAS * error).all(), (
        found.mean((0, 1)) / exact
    )
    assert (SIGMAS * error < 0.045 * exact).all()


def test_far_start_does_not_freeze_the_chain() -> None:
    """On the way down p'p / D is 100s of tau, which would leave xi large for 100s of 1 / gamma."""
    kernel = SGNHT(
        potential_fn=lambda z: jnp.sum(z**4) / 4, step_size=0.05, friction=1.0, num_steps=20
    )
    state = start(kernel, 6 * jnp.ones((500, 4)))
    sample = jax.jit(lambda state: kernel.sample(state, (), {}))
    state = sample(state)
    assert (state.dynamics.extra.friction < 15).all()
    for _ in range(40):
        state = sample(state)
    # 2000 entries of sd .74 about .676
    assert np.mean(np.asarray(state.z) ** 2) == pytest.approx(0.676, abs=0.1)


def test_injected_variance_for_any_thermostat() -> None:
    x = np.array([0.0, 1e-30, -1e-30, 1e-8, -1e-5, 1e-5, 1e-3, -1e-3, 0.5, -0.5, 3.0, -3.0, 40.0])
    safe = np.where(x == 0, 1.0, x)
    exact = np.where(x == 0, 1.0, -np.expm1(-2 * safe) / (2 * safe))
    np.testing.assert_allclose(jax.jit(_shortfall)(jnp.float32(x)), exact, rtol=1e-6)


def test_thermostat_follows_the_friction_of_warmup() -> None:
    kernel = SGNHT(potential_fn=lambda z: z @ z / 2)
    state = kernel.init(random.key(0), 10, jnp.zeros(2), (), {})
    assert float(state.dynamics.extra.friction) == float(state.dynamics.friction)
    state = state._replace(
        dynamics=state.dynamics._replace(friction=jnp.float32(1), extra=Thermostat(jnp.float32(3)))
    )
    _, _, dynamics = kernel.facts.propose(adaptation(4.0, 400.0, 0.0), state, None)
    assert float(dynamics.friction) == pytest.approx(2.0)
    assert float(dynamics.extra.friction) == pytest.approx(6.0)
    # but not where 5 standard deviations, 2 / sqrt(2 D) each, would not be enough
    state = state._replace(dynamics=dynamics._replace(extra=Thermostat(jnp.float32(1000))))
    _, _, cooled = kernel.facts.propose(adaptation(4.0, 400.0, 0.0), state, None)
    assert float(cooled.extra.friction) == pytest.approx(2 * 1.2 + 5 * 2 / np.sqrt(2 * 2))


def test_an_undone_step_keeps_a_thermostat_that_is_finite() -> None:
    kernel = SGNHT(potential_fn=lambda z: z @ z / 2, step_size=0.1, friction=4.0, num_steps=1)
    state = kernel.init(random.key(0), 0, jnp.zeros(2), (), {})
    sample = jax.jit(lambda s: kernel.sample(s, (), {}))
    for place, xi, left in ((jnp.inf, 6.0, 6.0), (0.0, jnp.nan, 4.0)):
        dynamics = state.dynamics._replace(extra=Thermostat(jnp.float32(xi)))
        after = sample(state._replace(z=jnp.full(2, place, jnp.float32), dynamics=dynamics))
        assert after.diverging
        assert not after.dynamics.momentum.any()
        assert float(after.dynamics.extra.friction) == left


# --- automatic runs


@pytest.mark.parametrize("kernel_class", short([SGHMC, SGNHT], kept=[SGHMC]))
def test_automatic_run(kernel_class: Any) -> None:
    lam = jnp.array([1.0, 10.0, 100.0])

    def energy(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        return jnp.sum(lam * z * z) / 2 + 1.5 * z @ random.normal(rng_key, z.shape)

    mcmc = vectorized(kernel_class(potential_fn=energy, dense_mass=None), 40, 60, 400)
    mcmc.run(random.key(0), init_params=random.normal(random.key(1), (400, 3)))
    z = np.asarray(mcmc.get_samples(group_by_chain=True), np.float64)
    squares = z**2 * np.asarray(lam)
    ratio, error = squares.mean((0, 1)), squares.mean(1).std(0) / np.sqrt(400)
    assert (SIGMAS * error < 0.12).all(), error
    # a tolerance of .1 for the noise in the stiffest direction; all of the noise is
    # isotropic here, and the thermostat takes it
    highest = 0.1 if kernel_class is SGHMC else 0.01
    assert (ratio > 0.99 - SIGMAS * error).all(), (ratio, error)
    assert (ratio < 1 + highest + SIGMAS * error).all(), (ratio, error)
    last = mcmc.last_state
    # curvature decides the step, half of the critical damping the friction unless noise needs more
    np.testing.assert_allclose(last.step_size, 2 * np.sqrt(0.1 / 1.1 / 100), rtol=1e-4)
    h, share = last.step_size, 0.1 / 1.1
    needed = 2 * np.arctanh(h**2 * last.adaptation.noise / (4 * share)) / h
    np.testing.assert_allclose(last.dynamics.friction, np.maximum(needed, 1.0), rtol=1e-3)
    assert not np.asarray(mcmc.get_extra_fields()["diverging"]).any()


# --- edges


def test_without_temperature_a_damped_descent() -> None:
    lam, mode = jnp.array([1.0, 4.0]), jnp.array([3.0, -2.0])

    def energy(z: jax.Array) -> jax.Array:
        return jnp.sum(lam * (z - mode) ** 2) / 2

    kernel = SGHMC(
        potential_fn=energy,
        temperature=0.0,
        step_size=0.2,
        friction=2.0,
        num_steps=40,
    )
    state = start(kernel, jnp.zeros((2, 2)))
    assert not state.dynamics.momentum.any()
    _, draws = chains.run(kernel, state, 3)
    np.testing.assert_array_equal(draws.z[:, 0], draws.z[:, 1])  # whatever the key
    np.testing.assert_allclose(draws.z[-1, 0], mode, atol=1e-5)
    energies = [float(energy(z)) for z in draws.z[:, 0]]
    assert energies == sorted(energies, reverse=True)


@pytest.mark.parametrize("kernel_class", [SGHMC, SGNHT])
def test_undone_steps_put_the_momentum_at_rest(kernel_class: Any) -> None:
    def energy(z: jax.Array) -> jax.Array:
        return jnp.where(jnp.max(z) < 1.0, z @ z / 2, jnp.nan)

    kernel = kernel_class(potential_fn=energy, step_size=0.3, friction=1.0, num_steps=1)
    state = start(kernel, jnp.zeros((200, 2)))
    sample = jax.jit(lambda s: kernel.sample(s, (), {}))
    undone, moved = 0, np.zeros(200)
    for _ in range(60):
        old, state = state, sample(state)
        back = np.asarray(state.diverging)
        z, p = np.asarray(state.z), np.asarray(state.dynamics.momentum)
        assert np.isfinite(z).all()
        assert z.max() < 1.0
        assert not p[back].any()
        assert p[~back].any(axis=1).all()
        np.testing.assert_array_equal(z[back], np.asarray(old.z)[back])
        if kernel_class is SGNHT:  # the thermostat goes on
            assert np.isfinite(state.dynamics.extra.friction).all()
            assert (state.dynamics.extra.friction != old.dynamics.extra.friction).all()
        undone += back.sum()
        moved += np.abs(z - np.asarray(old.z)).sum(1)
    assert undone > 100
    assert (moved > 1).all()


@pytest.mark.parametrize("kernel_class", [SGHMC, SGNHT])
@pytest.mark.parametrize(
    ("settings", "kind", "match"),
    [
        ({"friction": 0.0}, ValueError, "friction must be a finite number above 0, got 0.0"),
        ({"friction": "automatic"}, ValueError, "friction must be 'auto' or a positive number"),
        ({"friction": None}, TypeError, "friction must be a number, got None"),
    ],
)
def test_bad_settings(kernel_class: Any, settings: dict, kind: type, match: str) -> None:
    with pytest.raises(kind, match=match):
        kernel_class(potential_fn=half_square, **settings)


@pytest.mark.parametrize(
    ("settings", "kind", "match"),
    [
        ({"temperature": 0.0}, ValueError, "temperature must be above 0 with SGNHT"),
        ({"temperature": -1.0}, ValueError, "temperature must be a finite number at least 0"),
        ({"thermostat_mass": 0.0}, ValueError, "thermostat_mass must be a finite number above 0"),
        ({"thermostat_mass": "unit"}, ValueError, "thermostat_mass must be 'auto' or a positive"),
        ({"thermostat_mass": None}, TypeError, "thermostat_mass must be a number, got None"),
        ({"step_size": cyclical(0.1, 10, explore=0.5)}, ValueError, "SGNHT needs noise at every"),
    ],
)
def test_bad_settings_of_the_thermostat(settings: dict, kind: type, match: str) -> None:
    with pytest.raises(kind, match=match):
        SGNHT(potential_fn=half_square, **settings)
