"""Scaled coordinates: the learned scale, the distribution, and matrices that cannot be a scale."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro.diagnostics import effective_sample_size
from targets import SIGMAS, assert_trees_equal, linear, linear_moments, run, vectorized
from tiers import short

from numpyro_geom import (
    GGMC,
    SGHMC,
    SGNHT,
    SGRLD,
    Monge,
    RMSprop,
    Shampoo,
    Wenzel,
)
from numpyro_geom._linalg import MatrixRoot
from numpyro_geom.bound import bind
from numpyro_geom.model.arrowhead import Layout
from numpyro_geom.model.model import CURVATURE_ROWS, Model
from numpyro_geom.model.plates import read_subsampling
from numpyro_geom.model.potential import function_potential, in_coordinates
from numpyro_geom.model.scale import LowRankRoot, scale_about
from numpyro_geom.sampling.state import Target, init_adaptation
from numpyro_geom.warmup.curvature import chance, diagonal_curvature, hessian_at, measure
from numpyro_geom.warmup.law import find_law
from numpyro_geom.warmup.scale import diagonal_root

PyTree = Any


def skewed_rows(num_rows: int, num_columns: int, spread: float) -> tuple[jax.Array, jax.Array]:
    """Columns whose scales lie ``spread`` apart, in directions that are none of the parameters'.

    The largest is 20, so that with 500 rows a response of sd .5 leaves an sd of .001 along it.
    """
    rng = np.random.default_rng(0)
    directions = np.linalg.qr(rng.normal(size=(num_columns, num_columns)))[0]
    X = rng.normal(size=(num_rows, num_columns)) * np.geomspace(1, 1 / spread, num_columns)
    X = 20 * X @ directions.T
    return jnp.asarray(X), jnp.asarray(X.sum(1) + 0.5 * rng.normal(size=num_rows))


def quadratic(scales: np.ndarray, correlation: float = 0.9) -> tuple[np.ndarray, Any]:
    """The covariance of a Gaussian with these sds and its potential, computed without rounding."""
    size = len(scales)
    unit = (1 - correlation) * np.eye(size) + correlation
    precision = jnp.asarray(np.linalg.inv(unit))
    return unit * scales * scales[:, None], lambda z: (z / scales) @ precision @ (z / scales) / 2


KERNELS = {
    "langevin": lambda: SGRLD(linear, dense_mass=True),
    "adjusted": lambda: SGRLD(linear, adjusted=True, dense_mass=True),
    "monge": lambda: SGRLD(linear, metric="monge", dense_mass=True),
    "sghmc": lambda: SGHMC(linear, dense_mass=True),
    "sgnht": lambda: SGNHT(linear, dense_mass=True),
    "ggmc": lambda: GGMC(linear, dense_mass=True),
}


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("name", short(KERNELS, kept=["sghmc"]))
def test_law_of_a_posterior_of_condition_1e6(name: str) -> None:
    """Every kernel; without the scale they would be some sds off, or stand still."""
    X, y = skewed_rows(500, 4, 1e4)
    mean, covariance = linear_moments(X, y)
    kernel = KERNELS[name]()
    chains = {"num_chains": 4, "chain_method": "vectorized"}
    mcmc = run(kernel, X, y, num_warmup=500, num_samples=1000, **chains)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], np.float64)
    # in the posterior's own directions, where each is N(0, 1)
    values, vectors = np.linalg.eigh(covariance)
    assert values.max() / values.min() > 7e5
    draws = (draws - mean) @ (vectors / np.sqrt(values))
    num = effective_sizes(draws)
    assert num.min() > 400, num
    scores = draws.mean((0, 1)) * np.sqrt(num)
    assert np.abs(scores).max() < SIGMAS, scores
    squares = (draws**2).mean((0, 1))
    # variances are within the tolerance of .1, and their Monte Carlo error is sqrt(2 / ESS)
    assert np.abs(squares - 1).max() < 0.1 + SIGMAS * np.sqrt(2 / num.min()), squares
    assert int(mcmc.last_state.num_steps.max()) < 40


def effective_sizes(draws: np.ndarray) -> np.ndarray:
    """Of means and of variances, in the worst of which draws are counted."""
    return np.minimum(effective_sample_size(draws), effective_sample_size(draws**2))


def test_start_is_the_inverse_hessian_though_scales_lie_1e6_apart() -> None:
    covariance, potential = quadratic(np.geomspace(1e-3, 1e3, 5))
    kernel = SGHMC(potential_fn=potential, dense_mass=True)
    state = kernel.init(random.key(0), 100, jnp.zeros(5), (), {})
    found = np.asarray(state.scale.inverse_mass_matrix, np.float64)
    spread = np.sqrt(np.diag(covariance))
    # float32, of a matrix of condition 46 once the scales are taken out
    np.testing.assert_allclose(found / spread / spread[:, None], 0.1 * np.eye(5) + 0.9, atol=1e-4)
    product = np.asarray(state.scale.root.matrix) @ np.asarray(state.scale.root.inverse)
    np.testing.assert_allclose(product / spread[:, None] * spread, np.eye(5), atol=1e-4)


def test_diagonal_start_has_the_marginal_variances() -> None:
    covariance, potential = quadratic(np.geomspace(1e-3, 1e3, 5))
    state = SGRLD(potential_fn=potential, dense_mass=False).init(
        random.key(0), 100, jnp.zeros(5), (), {}
    )
    np.testing.assert_allclose(state.scale.inverse_mass_matrix, np.diag(covariance), rtol=1e-3)


@pytest.mark.parametrize("dense", short([True, False], kept=[True]))
def test_a_step_is_that_of_the_scaled_potential(dense: bool) -> None:
    """Theta = L phi: the same numbers as a kernel without scale on U(L phi)."""
    matrix = np.array([[4.0, 1.0], [1.0, 9.0]]) if dense else np.array([4.0, 9.0])
    potential = lambda z: jnp.sum(z**4) / 4 + z[0] * z[1]  # noqa: E731
    given = {"inverse_mass_matrix": matrix}
    common = {"step_size": 1e-2, "num_steps": 3, "friction": 1.0, "metric": Monge(0.5)}
    scaled = SGHMC(potential_fn=potential, **given, **common)
    start = jnp.array([0.3, -0.2])
    state = scaled.init(random.key(1), 0, start, (), {})
    root = state.scale.root
    to_theta = lambda phi: start + root.times(phi)  # noqa: E731
    plain = SGHMC(potential_fn=lambda phi: potential(to_theta(phi)), dense_mass=None, **common)
    other = plain.init(random.key(1), 0, jnp.zeros(2), (), {})
    np.testing.assert_allclose(state.scale.inverse_mass_matrix, matrix, rtol=1e-5)
    for _ in range(3):
        state, other = scaled.sample(state, (), {}), plain.sample(other, (), {})
        np.testing.assert_allclose(state.z, to_theta(other.z), rtol=2e-5, atol=2e-6)
    assert_trees_equal(state.scale.root, root)


def test_warmup_learns_what_the_start_got_wrong() -> None:
    covariance, potential = quadratic(np.array([1.0, 30.0]), 0.5)
    kernel = SGHMC(potential_fn=potential, inverse_mass_matrix=np.ones(2), dense_mass=True)
    state = kernel.init(random.key(0), 400, jnp.zeros(2), (), {})
    state = jax.jit(lambda s: lax.fori_loop(0, 400, lambda _, s: kernel.sample(s, (), {}), s))(
        state
    )
    found = np.asarray(state.scale.inverse_mass_matrix)
    np.testing.assert_allclose(
        state.scale.root.matrix @ state.scale.root.inverse, np.eye(2), atol=1e-5
    )
    np.testing.assert_allclose(
        state.scale.to_sites(state.scaled, state.z), state.z, rtol=1e-5, atol=1e-4
    )
    # three windows, the last of 100 draws: a variance is known to some 20%
    assert 0.4 < found[1, 1] / covariance[1, 1] < 2
    assert 0.4 < found[0, 0] / covariance[0, 0] < 2


@pytest.mark.parametrize("seed", [1, 3])
def test_heavy_tails_do_not_carry_a_chain_away(seed: int) -> None:
    """A step too long for the core heats a chain, and its scale grows with what the chain sees."""

    def model() -> None:
        numpyro.sample("x", dist.StudentT(3.0).expand([5]).to_event(1))

    mcmc = vectorized(SGHMC(model), 1000, 1000, 4)
    mcmc.run(random.key(seed))
    x = np.asarray(mcmc.get_samples(group_by_chain=True)["x"])
    inside = np.abs(x) < 0.7649  # the median of |x|
    errors = 0.5 / np.sqrt(
        [[effective_sample_size(y[None, :, i]) for i in range(5)] for y in inside * 1.0]
    )
    # of 40 chains and coordinates; a variance that is off by a tenth moves .02 across the median
    assert np.all(np.abs(inside.mean(1) - 0.5) < 4 * errors + 0.02)


@pytest.mark.slow
def test_chains_of_one_call_have_scales_of_their_own() -> None:
    X, y = skewed_rows(300, 3, 10.0)
    kernel = SGRLD(linear, batch_size=50, dense_mass=True)
    mcmc = run(
        kernel, X, y, num_warmup=100, num_samples=50, num_chains=2, chain_method="vectorized"
    )
    root = np.asarray(mcmc.last_state.scale.root.matrix)
    assert root.shape == (2, 3, 3)
    assert not np.allclose(root[0], root[1], rtol=1e-3)
    again = run(
        kernel.replace(inverse_mass_matrix=mcmc.last_state.scale.inverse_mass_matrix[0]),
        *(X, y),
        num_warmup=50,
        num_samples=10,
    )
    assert np.isfinite(np.asarray(again.get_samples()["w"])).all()


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({}, "scaled"),
        ({"dense_mass": None}, None),
        ({"dense_mass": "auto", "step_size": 1e-3}, None),
        pytest.param({"dense_mass": "auto", "num_steps": 3}, "scaled", marks=pytest.mark.slow),
        ({"inverse_mass_matrix": np.ones(3), "step_size": 1e-3}, "scaled"),
    ],
)
def test_when_coordinates_are_scaled(settings: dict, start: str | None) -> None:
    X, y = skewed_rows(300, 3, 10.0)
    state = SGRLD(linear, **settings).init(random.key(0), 50, None, (X, y), {})
    assert (state.scale == ()) == (start is None)


def test_bad_matrices_are_refused() -> None:
    potential = {"potential_fn": lambda z: z @ z / 2}
    for matrix in (np.ones((2, 3)), "wide", np.ones((2, 2, 2)), {}, np.zeros(0)):
        with pytest.raises(TypeError, match="array of variances, shape"):
            SGRLD(**potential, inverse_mass_matrix=matrix)
    for matrix in (
        -np.ones(2),
        np.array([1.0, np.nan]),
        np.zeros(2),
        np.ones((2, 2)),
        np.array([[1.0, 2.0], [2.0, 1.0]]),
        np.array([[1.0, 0.5], [0.1, 1.0]]),
    ):
        with pytest.raises(ValueError, match="symmetric and positive definite"):
            SGRLD(**potential, inverse_mass_matrix=matrix)
    with pytest.raises(ValueError, match=r"has the shape \(2,\), and the model has 3"):
        SGRLD(**potential, inverse_mass_matrix=np.ones(2)).init(
            random.key(0), 10, jnp.zeros(3), (), {}
        )
    with pytest.raises(
        ValueError, match="dense_mass must be 'auto', 'structured', 'low_rank', True, False, None"
    ):
        SGRLD(**potential, dense_mass="yes")
    with pytest.raises(ValueError, match="pass its diagonal, or dense_mass=True"):
        SGRLD(**potential, dense_mass=False, inverse_mass_matrix=np.eye(2))


@pytest.mark.parametrize(
    "potential",
    [
        pytest.param(lambda z: jnp.sum(z**4), marks=pytest.mark.slow),  # no curvature at the start
        pytest.param(lambda z: z[0] ** 2 / 2 + jnp.abs(z[1]), marks=pytest.mark.slow),
        lambda z: z[0] ** 2 / 2 - jnp.cos(z[1] + 2.5) + z[1] ** 2 / 50,  # indefinite
        pytest.param(lambda z: z[0] ** 2 * 1e12 + z[1] ** 2 * 1e-12, marks=pytest.mark.slow),
    ],
    ids=["flat", "singular", "indefinite", "condition 1e24"],
)
def test_curvatures_that_give_no_covariance_give_a_finite_scale(potential: Any) -> None:
    kernel = SGHMC(potential_fn=potential, dense_mass=True)
    state = kernel.init(random.key(0), 40, jnp.zeros(2), (), {})
    state = jax.jit(lambda s: lax.fori_loop(0, 50, lambda _, s: kernel.sample(s, (), {}), s))(state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.scale))
    assert np.isfinite(state.z).all()


@pytest.mark.slow
def test_a_position_may_be_a_tuple() -> None:
    def potential(z: tuple) -> jax.Array:
        return (z[0] - 3) ** 2 / 0.02 + (z[1] + 5) ** 2 / 200

    kernel = GGMC(potential_fn=potential, dense_mass=True)
    start = (jnp.zeros(()), jnp.zeros(()))
    mcmc = run(kernel, num_warmup=300, num_samples=1000, init_params=start)
    first, second = (np.asarray(x, np.float64) for x in mcmc.get_samples())
    # effective sizes of some hundred at least: errors of means below .07 sd
    assert abs(first.mean() - 3) < 0.35 * 0.1
    assert abs(second.mean() + 5) < 0.35 * 10
    assert 0.8 < first.std() / 0.1 < 1.25
    assert 0.8 < second.std() / 10 < 1.25


def test_a_matrix_is_a_value() -> None:
    kernel = SGHMC(linear, inverse_mass_matrix=np.array([1.0, 2.0]))
    assert "inverse_mass_matrix=array([1., 2.])" in repr(kernel)
    assert kernel.settings == kernel.replace().settings
    assert kernel.settings != kernel.replace(inverse_mass_matrix=np.ones(2)).settings
    assert kernel.settings.record()["inverse_mass_matrix"] == "(1.0, 2.0)"


def two_sites(X: jax.Array, y: jax.Array) -> None:
    """Three sites: the first and the last are correlated."""
    a = numpyro.sample("a", dist.Normal(0, 1).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    c = numpyro.sample("c", dist.Normal(0, 1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i, :2] @ a + X[i, 2] * b + X[i, 3] * c, 0.5), obs=y[i])


def test_blocks_of_sites() -> None:
    """Entries between blocks are 0 and the others are learned, in the order of the sites' names."""
    X, y = skewed_rows(300, 4, 3.0)
    within = np.array([[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 1, 0], [1, 1, 0, 1]], bool)
    kernel = SGHMC(two_sites, dense_mass=[("c", "a")])
    mcmc = run(kernel, X, y, num_warmup=2000, num_samples=2000)
    found = mcmc.last_state.scale.inverse_mass_matrix
    np.testing.assert_array_equal(found[~within], 0)
    covariance = linear_moments(X, y)[1]
    sd = np.sqrt(np.diag(covariance))
    error = (found - covariance) / sd / sd[:, None]
    # some 250 draws that count, and a Hessian that counts as 4
    assert np.abs(error[within]).max() < SIGMAS * np.sqrt(2 / 250)
    draws = np.concatenate([np.atleast_2d(x.T).T for _, x in sorted(mcmc.get_samples().items())], 1)
    assert np.abs(draws.std(0) / sd - 1).max() < 0.05 + SIGMAS / np.sqrt(2 * 500)


def test_a_matrix_by_blocks_is_that_matrix() -> None:
    X, y = skewed_rows(300, 4, 3.0)
    covariance = linear_moments(X, y)[1]
    c_first = np.array([3, 0, 1])
    given = {("c", "a"): covariance[np.ix_(c_first, c_first)], ("b",): covariance[2, 2][None]}
    kernel = SGHMC(two_sites, inverse_mass_matrix=given)
    state = kernel.init(random.key(0), 8, None, (X, y), {})
    found = state.scale.inverse_mass_matrix
    expected = covariance.copy()
    expected[2, [0, 1, 3]] = expected[[0, 1, 3], 2] = 0
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6 * covariance.max())


@pytest.mark.parametrize(
    ("settings", "kind", "match"),
    [
        ({"dense_mass": [("a", "a")]}, ValueError, "each site in one block"),
        ({"dense_mass": [("a", 1)]}, TypeError, "names of sites"),
        ({"dense_mass": [("a", "z")]}, ValueError, r"does not have: \['z'\]"),
        ({"inverse_mass_matrix": {("a",): np.ones(3)}}, ValueError, "which have 2 uncons"),
        ({"inverse_mass_matrix": {("a",): -np.ones(2)}}, ValueError, "positive definite"),
        (
            {"inverse_mass_matrix": {("a",): np.eye(2)}, "dense_mass": False},
            ValueError,
            "dense_mass=False scales each parameter alone",
        ),
    ],
    ids=str,
)
def test_bad_blocks_are_refused(settings: dict, kind: type, match: str) -> None:
    X, y = skewed_rows(300, 4, 3.0)
    with pytest.raises(kind, match=match):
        SGHMC(two_sites, **settings).init(random.key(0), 8, None, (X, y), {})


@pytest.mark.parametrize(
    "metric",
    short(
        [RMSprop(), Wenzel(interval=1), Monge(), Monge(0.5), Shampoo(interval=1)],
        kept=[RMSprop(), Monge(), Shampoo(interval=1)],
    ),
)
def test_statistics_of_a_metric_start_anew_with_the_scale(metric: Any) -> None:
    """They are those of N(0, tau I), and then of gradients in the new coordinates."""
    tau = 2.0
    _, potential = quadratic(np.array([1.0, 30.0]), 0.5)
    kernel = SGRLD(
        potential_fn=potential,
        metric=metric,
        divergence="frozen",
        temperature=tau,
        num_steps=1,
        inverse_mass_matrix=np.eye(2),
    )
    metric = kernel.settings.metric
    state = kernel.init(random.key(0), 80, jnp.ones(2), (), {})
    fresh = metric.from_gradient(metric.init(jnp.zeros(2)), jnp.zeros(2), tau**0.5)
    assert_trees_equal(state.metric_state, fresh)
    sample = jax.jit(lambda s: kernel.sample(s, (), {}))
    for _ in range(80 // 8):  # the first renewal is before the draw that follows
        state = sample(state)
    new = sample(state)
    assert not np.allclose(new.scale.root.matrix, state.scale.root.matrix, rtol=1e-2)
    grad = new.scale.root.matrix.T @ jax.grad(potential)(state.z)
    expected = metric.update(fresh, grad)
    for a, b in zip(
        jax.tree.leaves(new.metric_state.statistic),
        jax.tree.leaves(expected.statistic),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    short(
        [{}, {"batch_size": 50}, {"batch_size": 50, "dense_mass": False}],
        kept=[{"batch_size": 50}],
    ),
)
def test_a_chain_starts_about_the_middle_with_its_scale(settings: dict) -> None:
    """Adam alone ends many standard deviations off where scales lie 300 apart."""
    X, y = skewed_rows(50_000, 20, 300.0)
    mean, covariance = linear_moments(X, y)
    precision = np.linalg.inv(covariance)
    for seed in range(2):
        state = SGHMC(linear, **settings).init(random.key(seed), 8, None, (X, y), {})
        off = np.asarray(state.scale.centre, float) - mean
        assert off @ precision @ off < 0.3
        if not isinstance(state.scale.root, MatrixRoot):
            continue
        off = np.asarray(state.z["w"], float) - mean
        # chi-squared with 20 degrees of freedom, once in 2,000 outside; at the middle 0
        assert 5 < off @ precision @ off < 50
        root = np.asarray(state.scale.root.matrix, float)
        # (1 +- sqrt(20 / 2048))^2 of that many rows; a scale that is halved has .25
        values = np.linalg.eigvalsh(root.T @ precision @ root)
        assert np.abs(np.log(values)).max() < np.log(1.25), values


def test_a_start_that_is_given_stays_and_the_scale_is_of_the_middle() -> None:
    X, y = skewed_rows(500, 4, 10.0)
    far = {"w": jnp.array([30.0, -20.0, 10.0, 5.0])}
    state = SGHMC(linear).init(random.key(0), 8, far, (X, y), {})
    np.testing.assert_array_equal(state.z["w"], far["w"])
    found, covariance = state.scale.inverse_mass_matrix, linear_moments(X, y)[1]
    np.testing.assert_allclose(found, covariance, rtol=0.05, atol=0.02 * covariance.max())


def test_a_law_does_not_run_down_a_neck() -> None:
    """U of ten sites N(0, e^v) falls without bound towards v = -oo, and its mass does not."""

    def funnel(z: dict) -> jax.Array:
        return z["v"] ** 2 / 18 + 5 * z["v"] + jnp.sum(z["x"] ** 2) * jnp.exp(-z["v"]) / 2

    start, to_sites = ravel_pytree({"v": jnp.zeros(()), "x": 0.1 * jnp.ones(10)})
    target = Target(function_potential(funnel, None, None), 1.0).in_coordinates(to_sites)
    law = find_law(target, Layout.without_groups(11), start, random.key(0), True)
    assert to_sites(law.centre)["v"] > -3.0  # its sd; downhill in U alone they end at -4.5


def grouped(rows: jax.Array, groups: jax.Array, y: jax.Array) -> None:
    """300 groups and two slopes whose columns lie a factor of 1,000 apart."""
    w = numpyro.sample("w", dist.Normal(0, 5).expand([2]).to_event(1))
    with numpyro.plate("groups", 300):
        effects = numpyro.sample("effects", dist.Normal(0, 1))
    with numpyro.plate("rows", y.size) as i:
        numpyro.sample("y", dist.Normal(rows[i] @ w + effects[groups[i]], 0.5), obs=y[i])


def grouped_rows() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    rows, groups = rng.normal(size=(6000, 2)) * [0.03, 30], rng.integers(0, 300, 6000)
    y = rows @ [1, 0.1] + rng.normal(size=300)[groups] + 0.5 * rng.normal(size=6000)
    return jnp.asarray(rows), jnp.asarray(groups), jnp.asarray(y)


@pytest.mark.parametrize(
    ("size", "metric"),
    short(
        [(256, "identity"), (257, "identity"), (257, "rmsprop")],
        kept=[(257, "identity"), (257, "rmsprop")],
    ),
)
def test_scale_by_the_number_of_parameters(size: int, metric: str) -> None:
    """A matrix up to 256, a low rank beyond, and nothing with a metric that is a scale itself."""
    kernel = SGHMC(potential_fn=lambda z: 2 * z @ z, metric=metric)
    scale = kernel.init(random.key(0), 10, jnp.ones(size), (), {}).scale
    if metric == "identity":
        assert isinstance(scale.root, LowRankRoot) == (size == 257)
        unit = np.eye(size) if size == 256 else np.ones(size)
        np.testing.assert_allclose(scale.inverse_mass_matrix, 0.25 * unit, atol=1e-5)
    else:
        assert scale == ()


def test_a_law_whose_centre_cannot_be_evaluated_is_found_from_draws() -> None:
    """A search that goes on first looks at its centre alone."""

    def energy(z: jax.Array) -> jax.Array:
        return jnp.where(jnp.all(z == 1), jnp.nan, 2 * z @ z)

    target = Target(function_potential(energy, None, None), 1.0, near=True)
    layout = Layout.without_groups(3)
    law = find_law(target, layout, jnp.ones(3), random.key(0), searching=True)
    np.testing.assert_allclose(law.root.variances(), 0.25, rtol=1e-5)


@pytest.mark.parametrize("batch_size", [None, 50])
def test_many_parameters_have_a_diagonal_from_curvature(batch_size: int | None) -> None:
    data = grouped_rows()
    rows, groups, y = data
    plan = read_subsampling(grouped, data, {}, batch_size)
    unravel = ravel_pytree({"w": jnp.zeros(2), "effects": jnp.zeros(300)})[1]
    potential = in_coordinates(Model(grouped, data, {}, plan).potential(), unravel)
    found, root = jnp.ones(302), diagonal_root(jnp.ones(302))
    for k in range(3):
        found = diagonal_curvature(potential, jnp.zeros(302), random.key(k), found, root)
    sizes = np.bincount(groups, minlength=300)
    exact = np.append(sizes / 0.25 + 1, np.sum(np.square(rows), axis=0) / 0.25 + 1 / 25)
    # 24 probes, each of a share f of the rows: of n rows in a group f n are seen, give or take
    # (f (1 - f) n)^1/2. Slopes and effects are coupled by correlations of up to 0.04
    f = 1.0 if batch_size is None else CURVATURE_ROWS / y.size
    error = np.append(np.sqrt((1 - f) / f / sizes / 24), [0.05, 0.05]) + 0.01
    assert (np.abs(found / exact - 1) < 4 * error).all()


WIDTHS = (0.1, 0.1, 0.12, 0.15, 0.2, 10.0, 20.0, 30.0)


def few_directions(
    widths: tuple[float, ...] = WIDTHS, size: int = 300
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A precision, and linear functions of the parameters with these sds.

    All other directions have sd 1. Two parameters in a row also differ in their units.
    """
    rng = np.random.default_rng(0)
    directions = np.linalg.qr(rng.normal(size=(size, len(widths))))[0].T
    sds = np.array(widths)
    units = np.where(np.arange(size) % 2, 1.0, 30.0)
    precision = np.eye(size) + directions.T @ ((sds**-2 - 1)[:, None] * directions)
    return precision / units / units[:, None], directions / units, sds


def test_a_low_rank_is_its_matrix() -> None:
    rng = np.random.default_rng(0)
    vectors = np.linalg.qr(rng.normal(size=(6, 2)))[0].T
    outer, inner, factors = np.exp(rng.normal(size=6)), np.exp(rng.normal(size=6)), [0.1, 5.0]
    root = LowRankRoot(*map(jnp.asarray, (outer, vectors, np.array(factors), inner)))
    dense = outer[:, None] * (np.eye(6) + vectors.T @ ((np.array(factors) - 1)[:, None] * vectors))
    dense = dense * inner
    vector = rng.normal(size=6)
    near = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(root.times(vector), dense @ vector, **near)
    np.testing.assert_allclose(root.transposed_times(vector), dense.T @ vector, **near)
    np.testing.assert_allclose(root.solve(dense @ vector), vector, **near)
    np.testing.assert_allclose(root.variances(), np.sum(dense**2, axis=1), **near)
    np.testing.assert_allclose(root.then(inner).times(vector), dense @ (inner * vector), **near)


def test_a_low_rank_is_found_far_from_the_mass() -> None:
    """Of a normal law whose middle is 3,000 standard deviations away from the start."""
    precision, _, _ = few_directions()
    matrix, middle = jnp.asarray(precision), 100.0

    def curvatures(dense_mass: Any) -> tuple[np.ndarray, np.ndarray]:
        kernel = SGHMC(
            potential_fn=lambda z: (z - middle) @ matrix @ (z - middle) / 2, dense_mass=dense_mass
        )
        state = kernel.init(random.key(0), 10, jnp.zeros(300), (), {})
        root = jax.vmap(state.scale.root.times)(jnp.eye(300)).T
        away = np.asarray(state.scale.centre) - middle
        return np.linalg.eigvalsh(root.T @ precision @ root), away @ precision @ away

    values, distance = curvatures("auto")
    # the diagonal's estimate has errors of some 15%, and the median of Ritz values is not exact
    assert values[-1] / values[0] < 10
    assert distance < 300  # nearer than the typical set, whose mean is 300
    values, _ = curvatures(False)
    assert values[-1] / values[0] > 1e4


def condition_over_best(root: Any, precision: np.ndarray, stiff: int) -> float:
    """Condition number, over that of a root of the same form with exact values of its parts."""
    size = len(precision)
    root = np.asarray(jax.vmap(root.times)(jnp.eye(size))).T
    diagonal = np.diagonal(precision) ** -0.5
    values, vectors = np.linalg.eigh(diagonal[:, None] * precision * diagonal)
    factors = np.where(np.arange(size) >= size - stiff, np.sqrt(np.median(values) / values), 1)
    exact = diagonal[:, None] * (vectors * factors) @ vectors.T
    found, best = (np.linalg.cond(x.T @ precision @ x) for x in (root, exact))
    return found / best


def test_a_low_rank_has_the_level_of_the_other_directions() -> None:
    """Five stiff directions are most of the diagonal, so that it leaves all others at 1/40.

    A diagonal of the whole Hessian cannot make these others equal. So the condition number is
    compared with that of a root of the same form from the exact diagonal and eigenvectors.
    """
    precision, _, _ = few_directions((0.02,) * 5)
    matrix = jnp.asarray(precision)
    kernel = SGHMC(potential_fn=lambda z: z @ matrix @ z / 2)
    scale = kernel.init(random.key(0), 10, jnp.zeros(300), (), {}).scale
    assert condition_over_best(scale.root, precision, 5) < 1.5


@pytest.mark.slow
def test_chance_is_the_spread_of_few_rows() -> None:
    size, rows = 300, 20_000
    X = jnp.asarray(np.random.default_rng(1).normal(size=(rows, size)), jnp.float32)

    def model(X: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([size]).to_event(1))
        with numpyro.plate("rows", rows) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=jnp.zeros(len(i)))

    kernel = SGHMC(model, batch_size=256)
    bound, _ = bind(kernel.settings, random.key(0), 10, None, (X,), {})
    potential = in_coordinates(bound.potential(), lambda w: {"w": w})
    product = hessian_at(potential, jnp.zeros(size), random.key(3))
    values = np.linalg.eigvalsh(jax.vmap(product)(jnp.eye(size))) / rows
    np.testing.assert_allclose(chance(potential, size), values[[0, -1]], rtol=0.05)
    assert chance(potential._replace(num_data=2000), size) == (1.0, 1.0)  # all rows are measured
    # the flattest direction is not as flat as on these rows, where it is .49 of what it is on all
    exact = np.linalg.eigvalsh(np.asarray(X.T @ X, float) / rows)[0]
    start = init_adaptation(10, jnp.float32)
    found = measure(potential, jnp.zeros(size), lambda v: v / rows**0.5, random.key(3), start)
    assert 0.8 < found.flattest / exact < 1.5


@pytest.mark.slow
def test_twenty_stiff_directions_are_found_and_chance_is_not_scaled() -> None:
    """A regression on twenty common factors. The curvature is measured on a tenth of the rows.

    On these rows the smallest eigenvalue is a half of the smallest on all rows, by chance alone.
    The chain starts at a draw: at the anchor there would be no noise to measure.
    """
    rng = np.random.default_rng(0)
    rows, size, count = 20_000, 300, 20
    factors = rng.normal(size=(rows, count)) @ rng.normal(size=(count, size)) * 2 / count**0.5
    X = (factors + rng.normal(size=(rows, size))).astype("f4")

    def model(X: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([size]).to_event(1))
        with numpyro.plate("rows", rows) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=jnp.zeros(len(i)))

    state = SGHMC(model, batch_size=256).init(random.key(0), 10, None, (jnp.asarray(X),), {})
    scale, precision = state.scale, X.T.astype(float) @ X + np.eye(size)
    assert np.sum(scale.root.factors != 1) == count
    assert condition_over_best(scale.root, precision, count) < 1.5
    away = np.asarray(state.z["w"] - scale.centre, float)
    assert size / 4 < away @ precision @ away < 4 * size


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_law_with_a_low_rank() -> None:
    """Variances along the stiffest, the flattest and other directions."""
    precision, directions, sds = few_directions()
    matrix = jnp.asarray(precision)
    chains = {"num_chains": 4, "chain_method": "vectorized", "init_params": jnp.zeros((4, 300))}
    kernel = SGHMC(potential_fn=lambda z: z @ matrix @ z / 2)
    mcmc = run(kernel, num_warmup=300, num_samples=500, **chains)
    along = np.asarray(mcmc.get_samples(group_by_chain=True)) @ directions.T / sds
    sizes = effective_sizes(along)
    assert sizes.min() > 300
    assert np.abs(along.mean((0, 1)) * np.sqrt(sizes)).max() < SIGMAS + 1
    # the step may raise variances by its tolerance of 10%, in the stiffest direction
    error = np.sqrt(2 / sizes)
    ratios = np.square(along.std((0, 1)))
    assert (ratios < 1.1 + SIGMAS * error).all()
    assert (ratios > 1 - SIGMAS * error).all()


@pytest.mark.parametrize("temperature", short([0.01, 1.0, 100.0], kept=[0.01]))
@pytest.mark.parametrize("size", [3, 300])
def test_a_gaussian_has_its_whole_scale_at_any_temperature(size: int, temperature: float) -> None:
    kernel = SGHMC(potential_fn=lambda z: z @ z / 8, temperature=temperature)
    scale = kernel.init(random.key(0), 10, jnp.zeros(size), (), {}).scale
    found = scale.inverse_mass_matrix
    np.testing.assert_allclose(found if size == 300 else np.diagonal(found), 4.0, rtol=1e-4)


@pytest.mark.usefixtures("optimised")
@pytest.mark.slow
def test_law_with_a_diagonal_for_many_parameters() -> None:
    """The effects and both slopes, against the exact posterior of a linear model."""
    rows, groups, y = grouped_rows()
    design = np.concatenate([np.eye(300)[groups], rows], axis=1)
    prior = np.append(np.ones(300), [1 / 25] * 2)
    covariance = np.linalg.inv(design.T @ design / 0.25 + np.diag(prior))
    mean = covariance @ design.T @ np.asarray(y) / 0.25
    chains = {"num_chains": 4, "chain_method": "vectorized"}
    mcmc = run(SGHMC(grouped), rows, groups, y, num_warmup=300, num_samples=500, **chains)
    found = mcmc.get_samples(group_by_chain=True)
    draws = np.concatenate([found["effects"], found["w"]], axis=2)
    sds = np.sqrt(np.diagonal(covariance))
    sizes = effective_sizes(draws)
    assert sizes.min() > 200
    errors = (draws.mean((0, 1)) - mean) / sds * np.sqrt(sizes)
    assert np.abs(errors).max() < SIGMAS + 1  # the largest of 302
    ratios = np.square(draws.std((0, 1)) / sds) - 1
    # the tolerance of variances is 10% in the stiffest direction. The error of their mean is that
    # of one, at most (2 / 200)^1/2 = .1, over the root of 302 if they were independent
    assert -0.03 < np.mean(ratios) < 0.13


def test_variances_given_all_other_parameters() -> None:
    """Of a matrix, as of any root: by the inverse of the precision's block."""
    half = np.random.default_rng(0).normal(size=(6, 8))
    precision, index = half @ half.T, np.array([1, 2, 4])
    inverse = np.linalg.cholesky(precision).T  # L L' is the inverse of the precision
    scale = scale_about(
        jnp.zeros(6), MatrixRoot(jnp.asarray(np.linalg.inv(inverse)), jnp.asarray(inverse))
    )
    expected = np.diag(np.linalg.inv(precision[np.ix_(index, index)]))
    found = scale.variances_given_others(index)[index]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
