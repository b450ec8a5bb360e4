"""Posteriors with groups: the arrowhead Hessian, its root, the law found at the start, and chains.

The Hessian and its root are compared with dense matrices, the law with exact moments, and a chain
with quadrature over the two parameters that all groups share.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from jax import random
from jax.flatten_util import ravel_pytree as ravel
from numpyro import distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, SVI, Predictive, Trace_ELBO
from targets import count_compilations, vectorized

from numpyro_geom import (
    GGMC,
    SGHMC,
    SGNHT,
    SGRLD,
    RiemannianLaplace,
)
from numpyro_geom._linalg import MatrixRoot
from numpyro_geom.bound import bind
from numpyro_geom.model.arrowhead import (
    Arrowhead,
    Layout,
    accepted,
    derivatives_at,
    find_layouts,
    find_parents,
    root_of,
    unit_root,
)
from numpyro_geom.model.control_variate import Curvature, anchor_at, with_control_variate
from numpyro_geom.model.potential import function_potential
from numpyro_geom.sampling.state import Target
from numpyro_geom.warmup.adapt import what_is_due
from numpyro_geom.warmup.curvature import noise_at
from numpyro_geom.warmup.law import find_law
from numpyro_geom.warmup.scale import renew_scale

ROUNDING = 1e-11
GROUPS = 9
SHAPES = {"a": (GROUPS,), "b": (2, GROUPS), "m": (3,), "s": ()}
PLATES = {"a": [("p", 0)], "b": [("p", 1)]}
INNER = 23
PARENTS = np.random.default_rng(0).integers(0, GROUPS, INNER)
NESTED = {**SHAPES, "c": (INNER, 2)}, {**PLATES, "c": [("q", 0)]}


@pytest.fixture(params=["groups", "nested", "series"])
def layout(request: Any) -> Layout:
    found = find_layouts(*(NESTED if request.param == "nested" else (SHAPES, PLATES)))[0]
    return replace(found, is_series=request.param == "series")


def size_of(layout: Layout) -> int:
    return sum(int(np.prod(shape)) for shape in layout.shapes)


def coupled(layout: Layout, strength: float = 0.0, parents: Any = PARENTS) -> Any:
    """A convex energy whose groups depend on what contains them, and on each other if asked."""

    def of_groups(key: int, local: jax.Array, *others: jax.Array) -> jax.Array:
        both = jnp.concatenate([local, *others], 1)
        matrix = 0.3 * random.normal(random.key(key), (len(both), 20, both.shape[1]))
        return jnp.sum(jnp.cosh(jnp.einsum("gij,gj->gi", matrix, both)))

    def energy(vector: jax.Array) -> jax.Array:
        shared, groups, *inner = layout.parts(vector)
        own = of_groups(1, groups, jnp.broadcast_to(shared, (len(groups), shared.size)))
        for local in inner:
            own += of_groups(
                2, local, groups[parents], jnp.broadcast_to(shared, (len(local), shared.size))
            )
        if layout.is_series:
            own += of_groups(3, groups[1:], groups[:-1])
        last = [groups, *inner][-1]
        return own + strength * jnp.sum(last[2:] * last[:-2])

    return energy


@pytest.mark.parametrize(
    ("shapes", "plates", "expected"),
    [
        (SHAPES, PLATES, "9 groups of 3 (a, b) and 4 shared"),
        # an event dimension as long as the plate
        ({**SHAPES, "e": (GROUPS, 4)}, PLATES, "9 groups of 7 (a, b, e) and 4 shared"),
        # two plates that cross: the longer one has the groups
        (
            {"person": (50,), "item": (9,), "mean": ()},
            {"person": [("persons", 0)], "item": [("items", 0)]},
            "50 groups of 1 (person), 9 groups of 1 (item) and 1 shared"
            " or 50 groups of 1 (person) and 10 shared",
        ),
        # the inner one of two nested plates
        (
            {"school": (20, 10), "district": (10,)},
            {"school": [("schools", 0), ("districts", 1)], "district": [("districts", 0)]},
            "200 groups of 1 (school), 10 groups of 1 (district) and 0 shared"
            " or 200 groups of 1 (school) and 10 shared",
        ),
        ({"w": (300,), "s": ()}, {}, "300 groups of 1 (w) and 1 shared"),
        ({"w": (7,)}, {"w": [("p", 0)]}, ""),  # too few groups
        (
            {"u": (300,), "v": (310,)},
            {"u": [("p", 0)], "v": [("q", 0)]},
            "310 groups of 1 (v), 300 groups of 1 (u) and 0 shared",
        ),
    ],
)
def test_layout(shapes: dict, plates: dict, expected: str) -> None:
    found = find_layouts(shapes, plates)
    assert " or ".join(map(str, found)) == expected
    for layout in found:
        vector = jnp.arange(size_of(layout), dtype=float)
        np.testing.assert_array_equal(layout.whole(layout.parts(vector)), vector)


def test_derivatives_and_root(x64: None, layout: Layout) -> None:
    energy = coupled(layout)
    size = size_of(layout)
    vector, unit = random.normal(random.key(0), (size,)), jnp.eye(size)
    potential = function_potential(energy)
    parents = find_parents(potential, vector, layout)
    start = unit_root(layout, vector.dtype, parents)
    np.testing.assert_array_equal(jax.vmap(start.times)(unit), unit)
    corner = random.normal(random.key(3), (4, 4))
    width = jnp.exp(random.normal(random.key(4), (size,)))

    @jax.jit  # one by one, the operations of all this compile for ten seconds
    def everything(vector: jax.Array) -> tuple:
        value, gradient, found, misfit = derivatives_at(potential, vector, layout, start)
        root = root_of(found)
        new = root.then(MatrixRoot(corner, jnp.linalg.inv(corner)), width)
        shared_first = jax.vmap(lambda x: corner @ layout.parts(x)[0])(unit)
        each = jax.vmap(layout.parts)(jnp.diag(width))[1:]
        further = jax.vmap(lambda *parts: layout.whole(parts))(shared_first, *each).T
        of_root = (jax.vmap(f)(unit) for f in (root.times, root.transposed_times, root.solve))
        of_new = (jax.vmap(f)(unit) for f in (new.times, new.solve))
        expected = energy(vector), jax.grad(energy)(vector), jax.hessian(energy)(vector)
        of_found = value, gradient, jax.vmap(found.times)(unit), found.diagonal(), misfit
        return expected, of_found, (*of_root, root.variances()), (*of_new, further)

    expected, of_found, of_root, of_new = everything(vector)
    value, gradient, product, diagonal, misfit = of_found
    hessian = expected[2]
    np.testing.assert_allclose(value, expected[0], rtol=ROUNDING)
    np.testing.assert_allclose(gradient, expected[1], rtol=ROUNDING, atol=1e-9)
    np.testing.assert_allclose(product, hessian, atol=ROUNDING)
    np.testing.assert_allclose(diagonal, jnp.diag(hessian), atol=ROUNDING)
    assert misfit < ROUNDING
    columns, transposed, solved, variances = of_root
    matrix = columns.T
    np.testing.assert_allclose(matrix.T @ hessian @ matrix, unit, atol=1e-9)
    np.testing.assert_allclose(transposed, matrix, atol=ROUNDING)
    np.testing.assert_allclose(solved.T @ matrix, unit, atol=ROUNDING)
    np.testing.assert_allclose(variances, jnp.diag(matrix @ matrix.T), rtol=ROUNDING)
    columns, solved, further = of_new
    again = columns.T
    np.testing.assert_allclose(again, matrix @ further, atol=1e-9)
    np.testing.assert_allclose(solved.T @ again, unit, atol=1e-9)


def test_the_trial_of_groups_is_one_program(layout: Layout) -> None:
    """And a second one for the outer groups. One by one, its operations compile for seconds."""
    potential = function_potential(coupled(layout))
    with count_compilations() as compiled:
        found = accepted(potential, replace(layout, is_series=False), jnp.float32)
    assert found == (None if layout.is_series else layout)
    assert compiled() <= 4  # one of them tries the options of the compiler


def test_misfit_tells_of_groups_that_depend_on_each_other(x64: None, layout: Layout) -> None:
    vector = jnp.zeros(size_of(layout))
    for strength, low, high in ((0.0, 0, ROUNDING), (0.1, 0.01, 1)):
        energy = function_potential(coupled(layout, strength))
        unit = unit_root(layout, vector.dtype, find_parents(energy, 1 + vector, layout))
        assert low <= derivatives_at(energy, vector, layout, unit)[3] <= high


def test_a_hessian_that_is_not_exact_is_not_used(x64: None, layout: Layout) -> None:
    potential = function_potential(coupled(layout))
    size = size_of(layout)
    first, second = random.normal(random.key(0), (2, size))
    anchor = anchor_at(potential, first, layout)
    curvature: Any = anchor.curvature
    wrong: Arrowhead = jax.tree.map(lambda x: 2 * x, curvature.hessian)
    exact = jax.grad(potential.energy)(second, {})
    for misfit, unbiased in ((0.0, False), (1.0, True)):
        tried = anchor._replace(curvature=Curvature(wrong, jnp.asarray(misfit)))
        gradient = jax.grad(with_control_variate(potential, tried).energy)(second, {})
        assert np.allclose(gradient, exact, atol=ROUNDING) == unbiased


# --- a series


def walk(y: Any) -> None:
    step = numpyro.sample("step", dist.LogNormal(-1, 1))
    level = numpyro.sample("level", dist.GaussianRandomWalk(step, num_steps=len(y)))
    numpyro.sample("y", dist.Normal(level, 1), obs=y)


def walk_moments(y: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Means and sds by quadrature over the log of the step, given which all is Gaussian."""
    log_step = np.linspace(-2.5, 0.5, 161)
    log_p, means, squares = [], [], []
    times = np.arange(len(y)) + 1.0
    for x in np.exp(log_step):
        prior = x**2 * np.minimum(times, times[:, None])
        total = np.linalg.inv(prior + np.eye(len(y)))
        log_p.append(0.5 * np.linalg.slogdet(total)[1] - 0.5 * y @ total @ y)
        means.append(prior @ total @ y)
        squares.append(np.diag(prior - prior @ total @ prior) + means[-1] ** 2)
    weights = np.array(log_p) - (log_step + 1) ** 2 / 2
    weights = np.exp(weights - weights.max())
    weights /= weights.sum()
    mean, level = weights @ log_step, weights @ np.array(means)
    return {
        "log_step": (mean, (weights @ log_step**2 - mean**2) ** 0.5),
        "level": (level, (weights @ np.array(squares) - level**2) ** 0.5),
    }


@pytest.mark.slow  # `test_derivatives_and_root` shows a wrong root of a series at once
def test_a_random_walk_has_the_exact_moments() -> None:
    rng = np.random.default_rng(0)
    y = (np.cumsum(0.5 * rng.normal(size=300)) + rng.normal(size=300)).astype("f4")
    kernel = SGHMC(walk, bias_tolerance=0.02)
    mcmc = MCMC(kernel, num_warmup=400, num_samples=2000, progress_bar=False)
    mcmc.run(random.key(0), y)
    assert str(kernel.settings.layout) == "300 times of 1 (level) and 1 shared"
    assert kernel.bound.shares["level"].share < 0.5
    draws = {k: np.asarray(x, np.float64)[None] for k, x in mcmc.get_samples().items()}
    draws["log_step"] = np.log(draws["step"])
    for name, (mean, sd) in walk_moments(y).items():
        ess = effective_sample_size(draws[name])
        assert np.min(ess) > 100, name
        z = (draws[name].mean((0, 1)) - mean) / sd * np.sqrt(ess)
        ratio = draws[name].std((0, 1)) / sd
        # 301 numbers: 4.5 standard errors is one false alarm in 500 runs
        assert np.abs(z).max() < 4.5, name
        assert np.abs(np.log(ratio) * np.sqrt(2 * ess)).max() < 4.5 + 0.01 * np.sqrt(2 * 2000), name


# --- a hierarchy of normal laws, where everything but two parameters can be integrated out

NOISE = 1.0
PER_GROUP = 5


def heights(y: Any, groups: int) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.LogNormal(0, 1))
    with numpyro.plate("groups", groups):
        level = numpyro.sample("level", dist.Normal(mu, tau))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Normal(level[i // PER_GROUP], NOISE), obs=jnp.asarray(y)[i])


def data_of(groups: int, tau: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(0)
    level = 1.0 + tau * rng.normal(size=groups)
    return (np.repeat(level, PER_GROUP) + NOISE * rng.normal(size=groups * PER_GROUP)).astype("f4")


def exact_moments(y: np.ndarray, groups: int, few: int | None = None) -> dict[str, tuple]:
    """Means and sds by quadrature over mu and log tau, of all levels or of a few."""
    means, within = y.reshape(groups, PER_GROUP).mean(1).astype(float), NOISE**2 / PER_GROUP
    mu = np.linspace(means.mean() - 1, means.mean() + 1, 401)[:, None]
    log_tau = np.linspace(-2.5, 1.5, 801)
    total = np.exp(2 * log_tau) + within
    sums = np.array([groups, means.sum(), (means**2).sum()])
    squares = sums[2] - 2 * mu * sums[1] + mu**2 * sums[0]
    log_p = -0.5 * groups * np.log(total) - squares / (2 * total) - mu**2 / 50 - log_tau**2 / 2
    p = np.exp(log_p - log_p.max())
    p /= p.sum()

    def moments(x: np.ndarray, extra: np.ndarray | float = 0.0) -> tuple:
        mean = (p * x).sum()
        return mean, ((p * (x**2 + extra)).sum() - mean**2) ** 0.5

    share = np.exp(2 * log_tau) / total  # of a group's rows in its level
    levels = [moments(mu + share * (m - mu), share * within) for m in means[:few]]
    return {
        "mu": moments(mu + 0 * log_tau),
        "log_tau": moments(log_tau + 0 * mu),
        "level": tuple(np.array(levels).T),
    }


@pytest.mark.parametrize(("groups", "seed"), [(60, 4), (30, 1)])
def test_the_law_of_the_start_has_the_mean_of_the_posterior(groups: int, seed: int) -> None:
    """The joint mode is towards tau = 0, where the density is infinite.

    Without a limit of the steps log tau ends 14 sd too low in the first case, and without a wide
    first round 6 sd too low in the second.
    """
    y = data_of(groups, tau=0.6)
    exact = exact_moments(y, groups)
    kernel = SGHMC(heights, dense_mass="structured")
    bound, position = bind(kernel.settings, random.key(0), 100, None, (y, groups), {})
    target = bound.target()
    flat, to_sites = ravel(position)
    vector: Target = target.in_coordinates(to_sites)
    layout = bound.settings.layout
    law = jax.jit(lambda x: find_law(vector, layout, x, random.key_data(random.key(seed)), True))(
        flat
    )
    found, width = to_sites(law.centre), to_sites(law.root.variances() ** 0.5)
    for name, site in (("mu", "mu"), ("log_tau", "tau"), ("level", "level")):
        mean, sd = exact[name]
        # a normal law is no more than near: with a pair of draws for each mean, and 60 groups that
        # determine tau to 20%
        assert np.abs((found[site] - mean) / sd).max() < 0.7, name
        assert (0.6 < width[site] / sd).all(), name
        assert (width[site] / sd < 1.5).all(), name


def test_a_search_that_ends_far_away_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows: Adam's steps are hundreds of sds of the shared parameters, and end far away."""
    still = lambda _, position, *__: (position, 0.3 * jnp.ones_like(position))  # noqa: E731
    monkeypatch.setattr("numpyro_geom.warmup.law.search", still)
    layout = find_layouts(SHAPES, PLATES)[0]

    def energy(vector: jax.Array) -> jax.Array:
        shared, groups = layout.parts(vector)
        return 5e4 * jnp.sum((shared - 1) ** 2) + jnp.sum((groups - shared[0]) ** 2) / 2

    target, start = Target(function_potential(energy), 1.0), jnp.zeros(size_of(layout))
    key = random.key_data(random.key(0))
    law = jax.jit(lambda x: find_law(target, layout, x, key, True))(start)
    # 316 sds away; in steps of .6 sd the rounds would not be enough
    assert np.abs(layout.parts(law.centre)[0] - 1).max() < 1e-3


def test_a_curvature_below_its_noise_is_not_a_wide_group() -> None:
    """Curvatures of Cauchy's law have both signs, and a mean over few draws may be near 0.

    For one parameter the nearest normal law has the sd 1.63. As a flat direction, the worst of 200
    groups would have one of 50 to 450, and chains would start 75 away.
    """
    groups = 200
    layout = find_layouts({"x": (groups,), "shared": ()}, {"x": [("groups", 0)]})[0]

    def energy(vector: jax.Array) -> jax.Array:
        shared, local = layout.parts(vector)
        return jnp.sum(jnp.log1p(local**2)) + jnp.sum(shared**2) / 2

    target = Target(function_potential(energy), 1.0)
    start, key = random.normal(random.key(0), (groups + 1,)) / 2, random.key_data(random.key(0))
    law = jax.jit(lambda x: find_law(target, layout, x, key, True))(start)
    sds = layout.parts(law.root.variances() ** 0.5)[1]
    assert sds.min() > 1.63 / 4
    assert sds.max() < 4 * 1.63
    assert np.abs(layout.parts(law.centre)[1]).max() < 1.63


def test_a_search_goes_back_where_the_energy_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix of rank 3, whose factors are far from where the search has ended."""
    still = lambda _, position, *__: (position, 0.3 * jnp.ones_like(position))  # noqa: E731
    monkeypatch.setattr("numpyro_geom.warmup.law.search", still)
    rows, columns, rank = 40, 15, 3
    layout = find_layouts({"u": (rows, rank), "v": (columns, rank)}, {"u": [("rows", 0)]})[0]
    rng = np.random.default_rng(0)
    product = jnp.asarray(rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns)))

    def energy(vector: jax.Array) -> jax.Array:
        shared, local = layout.parts(vector)
        away = local @ shared.reshape(columns, rank).T - product
        return jnp.sum(vector**2) / 2 + 50 * jnp.sum(away**2)

    target = Target(function_potential(energy), 1.0)
    start = 5 * random.normal(random.key(0), (size_of(layout),))
    key = random.key_data(random.key(0))
    law = jax.jit(lambda x: find_law(target, layout, x, key, True))(start)
    # 165 parameters add half a nat each; in steps that never go back it is millions
    assert law.energy < 300 + 165 / 2


def test_a_search_does_not_move_before_it_knows_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hessian at one point may be far from its mean: here it is 2e-4, and 12 one sd away."""
    monkeypatch.setattr("numpyro_geom.warmup.law.FEWEST", 1)
    monkeypatch.setattr("numpyro_geom.warmup.law.MAX_ROUNDS", 1)
    target = Target(function_potential(lambda x: jnp.sum(x**4 - 0.1 * x + 1e-4 * x**2)), 1.0)
    start, key = jnp.zeros(2), random.key_data(random.key(0))
    for near in (True, False):
        law = find_law(replace(target, near=near), Layout.without_groups(2), start, key, True)
        assert bool(jnp.all(law.centre == start)) is near


def test_the_guide_draws_from_the_nearest_normal_law() -> None:
    """Its weights turn the draws into those of the posterior, without a matrix of D x D."""
    groups, count = 300, 4000
    y = data_of(groups)
    exact = exact_moments(y, groups)
    guide = RiemannianLaplace(heights)
    params = guide.fit(random.key(1), y, groups)
    assert (guide.settings.metric, guide.settings.mode) == ("euclidean", "mean")
    assert max(x.size for x in jax.tree.leaves(params)) < 10 * groups
    draws = guide.draw(random.key(2), params, sample_shape=(count,), log_weight=True)
    assert draws.pareto_k is not None
    assert draws.pareto_k < 0.7
    weight = np.exp(draws.log_weight - np.max(draws.log_weight)).astype(float)
    weight /= weight.sum()
    ess = 1 / np.sum(weight**2)
    assert ess > count / 4
    for name, site in (("mu", "mu"), ("log_tau", "tau"), ("level", "level")):
        x = np.asarray(draws.samples[site], float)
        x = np.log(x) if name == "log_tau" else x
        mean, sd = exact[name]
        # the law is near, with four pairs of draws for each mean
        assert np.abs((x.mean(0) - mean) / sd).max() < 0.5, name
        assert np.abs(np.log(x.std(0) / sd)).max() < 0.15, name
        # 302 numbers: 4.5 standard errors is one false alarm in 500 runs
        z = (weight @ x - mean) / sd * np.sqrt(ess)
        assert np.abs(z).max() < 4.5, name
    quantiles = guide.quantiles(params, [0.1, 0.9])
    np.testing.assert_allclose(
        quantiles["tau"], np.quantile(draws.samples["tau"], [0.1, 0.9]), 0.02
    )
    predictions = Predictive(heights, guide=guide, params=params, num_samples=50)
    assert predictions(random.key(3), y, groups)["y"].shape == (50, len(y))
    assert "posterior sd" not in str(guide.fit_report)
    svi = SVI(heights, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    with pytest.raises(RuntimeError, match="mode='euclidean' with SVI"):
        svi.init(random.key(0), y, groups)


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("kind", "batch_size", "tau"),
    [
        (SGHMC, None, 1.0),
        pytest.param(SGHMC, 256, 0.3, marks=pytest.mark.slow),
        pytest.param(GGMC, None, 0.3, marks=pytest.mark.slow),
        pytest.param(GGMC, 256, 1.0, marks=pytest.mark.slow),
        pytest.param(SGNHT, 256, 1.0, marks=pytest.mark.slow),
        pytest.param(SGRLD, 256, 1.0, marks=pytest.mark.slow),
        pytest.param(partial(SGRLD, metric="monge"), None, 1.0, marks=pytest.mark.slow),
    ],
)
def test_chains_have_the_exact_moments(kind: Any, batch_size: int | None, tau: float) -> None:
    """With minibatches the control variate is of second order. With a small tau levels are not
    centred: they follow tau.
    """  # noqa: D205
    groups = 300
    y = data_of(groups, tau)
    exact = exact_moments(y, groups)
    control: dict = {} if batch_size is None else {"control_variate": 2}
    control |= {} if kind is GGMC else {"bias_tolerance": 0.02}
    kernel: Any = kind(heights, batch_size=batch_size, **control)
    mcmc = MCMC(kernel, num_warmup=400, num_samples=2000, progress_bar=False)
    mcmc.run(random.key(2), y, groups)
    assert str(kernel.settings.layout) == "300 groups of 1 (level) and 2 shared"
    draws = {k: np.asarray(x, np.float64)[None] for k, x in mcmc.get_samples().items()}
    draws["log_tau"] = np.log(draws["tau"])
    for name in ("mu", "log_tau", "level"):
        mean, sd = exact[name]
        ess = effective_sample_size(draws[name])
        assert np.min(ess) > (50 if kind is GGMC else 200), name
        z = (draws[name].mean((0, 1)) - mean) / sd * np.sqrt(ess)
        ratio = draws[name].std((0, 1)) / sd
        of_squares = effective_sample_size((draws[name] - mean) ** 2)
        error = np.abs(np.log(ratio)) * np.sqrt(2 * of_squares)
        # 302 numbers: 4.5 standard errors is one false alarm in 500 runs
        assert np.abs(z).max() < 4.5, name
        assert error.max() < 4.5 + 0.01 * np.sqrt(2 * 2000), name
    if batch_size is not None:
        assert mcmc.last_state.control.anchor.curvature.misfit < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_noise_does_not_move_the_scale_of_many_groups() -> None:
    """Every level may be too wide by a few per cent, but the scale of all must not follow.

    A rule for variances alone leaves a shift of 0.58 sd in a longer run, +- 0.06.
    """
    groups = 3000
    y = data_of(groups, 0.6)
    mean, sd = exact_moments(y, groups, 1)["log_tau"]
    kernel = SGHMC(heights, batch_size=groups, control_variate=True)
    mcmc = MCMC(kernel, num_warmup=120, num_samples=400, progress_bar=False)
    mcmc.run(random.key(2), y, groups)
    log_tau = np.log(np.asarray(mcmc.get_samples()["tau"], np.float64))[None]
    error = effective_sample_size(log_tau) ** -0.5
    # 0.1 is the default of bias_tolerance; 2.9 standard errors is one false alarm in 500 runs
    assert abs(log_tau.mean() - mean) / sd < 0.1 + 2.9 * error
    assert error < 0.1


DISTRICTS, SCHOOLS = 40, 300


def schools(y: Any, school: Any, district: Any, crossed: bool = False) -> None:
    """Pupils in schools in districts; or two plates that cross."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("districts", int(district.max()) + 1):
        a = numpyro.sample("a", dist.Normal(mu, 0.7))
    with numpyro.plate("schools", int(school.max()) + 1):
        b = numpyro.sample("b", dist.Normal(0 if crossed else a[district], 0.5))
    with numpyro.plate("rows", len(y)) as i:
        mean = b[school[i]] + (a[district[i]] if crossed else 0)
        numpyro.sample("y", dist.Normal(mean, NOISE), obs=y[i])


@pytest.mark.slow  # `test_derivatives_and_root` shows a wrong root of nested groups at once
def test_schools_in_districts_have_the_exact_moments() -> None:
    """All is normal, so the moments follow from the matrix of second derivatives."""
    rng = np.random.default_rng(0)
    district = rng.integers(0, DISTRICTS, SCHOOLS)
    district[0] = DISTRICTS - 1
    school = rng.permutation(np.repeat(np.arange(SCHOOLS), 10))
    y = (1 + rng.normal(size=SCHOOLS)[school] + rng.normal(size=school.size)).astype("f4")
    size = DISTRICTS + SCHOOLS + 1
    # a row of each factor: the parameters' weights, then the number it is compared with
    eye = np.eye(size)
    a, b, mu = eye[:DISTRICTS], eye[DISTRICTS:-1], eye[-1:]
    weights = np.concatenate([mu / 5, (a - mu) / 0.7, (b - a[district]) / 0.5, b[school] / NOISE])
    sights = np.concatenate([np.zeros(size), y / NOISE])
    covariance = np.linalg.inv(weights.T @ weights)
    mean, sd = covariance @ weights.T @ sights, np.sqrt(np.diag(covariance))
    kernel = SGHMC(schools, batch_size=512, control_variate=2, bias_tolerance=0.02)
    mcmc = MCMC(kernel, num_warmup=200, num_samples=1500, progress_bar=False)
    mcmc.run(random.key(2), jnp.asarray(y), school, district)
    assert str(kernel.settings.layout) == (
        f"{SCHOOLS} groups of 1 (b), {DISTRICTS} groups of 1 (a) and 1 shared"
    )
    assert mcmc.last_state.control.anchor.curvature.misfit < 1e-4
    np.testing.assert_array_equal(mcmc.last_state.scale.root.edges.parents, district)
    draws = mcmc.get_samples()
    found = np.concatenate([draws["a"], draws["b"], draws["mu"][:, None]], 1).astype(float)
    ess = effective_sample_size(found[None])
    assert np.min(ess) > 200
    z = (found.mean(0) - mean) / sd * np.sqrt(ess)
    # 341 numbers: 4.5 standard errors is one false alarm in 400 runs
    assert np.abs(z).max() < 4.5
    spread = np.abs(np.log(found.std(0) / sd)) * np.sqrt(2 * ess)
    assert spread.max() < 4.5 + 0.01 * np.sqrt(2 * 1500)


def test_two_large_plates_that_cross() -> None:
    """They are no groups: a block for each effect would leave out that the two plates trade.

    All is normal, so the Hessian is known. Its condition would be 15.5 with the blocks.
    """
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, [[300], [280]], (2, 4000))
    first[0], second[0] = 299, 279
    kernel = SGHMC(schools)
    args = jnp.asarray(rng.normal(size=4000), jnp.float32), first, second, True
    state = kernel.init(random.key(0), 100, None, args, {})
    assert kernel.settings.layout is None
    rows = (np.eye(280)[second], np.eye(300)[first], np.zeros((4000, 1)))
    a, b, mu = np.split(np.eye(581), [280, 580])
    weights = np.concatenate([np.hstack(rows) / NOISE, (a - mu) / 0.7, b / 0.5, mu / 5])
    root = np.asarray(jax.vmap(state.scale.root.times, 1, 1)(jnp.eye(581)), float)
    curvature = np.linalg.eigvalsh(root.T @ weights.T @ weights @ root)
    assert curvature.max() / curvature.min() < 5


def test_draws_of_warm_up_widen_what_they_find_too_narrow() -> None:
    groups = 12
    y = data_of(groups)
    kernel = SGHMC(heights, dense_mass="structured")
    state = kernel.init(random.key(0), 100, None, (y, groups), {})
    layout, before = kernel.settings.layout, state.scale.root.variances()
    # a million draws with variance 4 of the levels, and 9 of both shared parameters
    count = 10**6
    squares = 9.0 * count * jnp.eye(2), jnp.full(groups + 2, 4.0 * count)
    scale = state.scale._replace(squares=squares, num_draws=jnp.asarray(count))
    due = what_is_due(jnp.asarray(50), jnp.asarray(100), True)
    renewed = renew_scale(
        state._replace(scale=scale, num_steps=jnp.asarray(100)), due, kernel.settings, 1
    )
    root = renewed.scale.root
    shared, local = layout.split(root.variances() / before)
    np.testing.assert_allclose(shared, 9, rtol=1e-3)
    # levels move with mu: between the factors of the levels and of mu
    assert ((local > 3.999) & (local < 9.001)).all()
    phi = random.normal(random.key(1), (groups + 2,))
    np.testing.assert_allclose(root.solve(root.times(phi)), phi, atol=1e-4)  # float32


def test_the_second_order_is_chosen_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a normal law with a known variance are quadratic, so no noise is left.

    The posterior is normal: in its scaled coordinates the curvature is 1. The rows of a
    measurement, about eight of each group, would show a curvature of about 2.
    """
    groups, each = 260, 200
    y = jnp.asarray(np.repeat(data_of(groups)[::PER_GROUP], each))

    def model(y: jax.Array) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        with numpyro.plate("groups", groups):
            level = numpyro.sample("level", dist.Normal(mu, 1))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Normal(level[i // each], NOISE), obs=y[i])

    kernel = SGHMC(model)
    bound, _ = bind(kernel.settings, random.key(0), 100, None, (y,), {})
    assert not bound.plan.batch_sizes  # all rows cost less than a step on some
    monkeypatch.setattr("numpyro_geom.bound.FEW_OPERATIONS", 0)
    state = kernel.init(random.key(0), 100, None, (y,), {})
    choice: Any = kernel.bound.choice
    assert choice.order == kernel.settings.control_variate == 2
    assert choice.batch_size < len(y)
    assert choice.noise[1] < 1e-6 * choice.noise[0]
    step = jax.jit(lambda s: kernel.sample(s, (y,), {}))
    assert 0.9 < step(step(state)).adaptation.curvature < 1.1


def test_other_metrics_take_the_structured_scale() -> None:
    groups = 12
    y = data_of(groups)
    kernel = SGRLD(heights, metric="rmsprop", dense_mass="structured")
    mcmc = vectorized(kernel, 40, 10, 2)
    mcmc.run(random.key(0), y, groups)
    assert np.isfinite(mcmc.get_samples()["level"]).all()


def coefficients(X: Any, y: Any, plate: bool) -> None:
    """A regression, whose rows see every coefficient: they are no groups."""
    size = X.shape[1]
    if plate:
        with numpyro.plate("columns", size):
            w = numpyro.sample("w", dist.Normal())
    else:
        w = numpyro.sample("w", dist.Normal().expand([size]).to_event(1))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=y[i])


def events(y: Any, groups: int) -> None:
    """The same as `heights` without a plate of the groups, the shared sites in between."""
    a = numpyro.sample("a", dist.Normal(0, 1).expand([groups]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    c = numpyro.sample("c", dist.Normal(0, 1).expand([groups, 2]).to_event(2))
    d = numpyro.sample("d", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y)) as i:
        g = i // PER_GROUP
        mean = a[g] + b + c[g, 0] * c[g, 1] + d.sum()
        numpyro.sample("y", dist.Normal(mean, NOISE), obs=jnp.asarray(y)[i])


def bound_layout(kernel: Any, *args: Any, traced: bool = False) -> Layout | None:
    found = []
    read = lambda key: found.append(bind(kernel.settings, key, 10, None, args, {})[0])  # noqa: E731
    (jax.jit(read) if traced else read)(random.key(0))
    return found[0].settings.layout


@pytest.mark.parametrize("plate", [False, True])
def test_coefficients_of_a_regression_are_no_groups(plate: bool) -> None:
    X = jnp.asarray(np.random.default_rng(0).normal(size=(400, 300)), jnp.float32)
    assert bound_layout(SGHMC(coefficients), X, X[:, 0], plate) is None
    with pytest.raises(ValueError, match="of which no row sees two"):
        bound_layout(SGHMC(coefficients, dense_mass="structured"), X, X[:, 0], plate)


@pytest.mark.parametrize("traced", [False, True])
def test_groups_without_a_plate_are_found(traced: bool) -> None:
    found = bound_layout(SGHMC(events), data_of(150), 150, traced=traced)
    assert str(found) == "150 groups of 3 (a, c) and 4 shared"


@pytest.mark.parametrize(
    ("metric", "scaled"),
    [("monge", True), ("wenzel", True), ("rmsprop", False)],
)
def test_metrics_that_are_no_scale_have_one(metric: Any, scaled: bool) -> None:
    found = bound_layout(SGRLD(events, metric=metric), data_of(150), 150)
    assert (found is not None) == scaled


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: bound_layout(SGHMC(heights, dense_mass="structured"), data_of(5), 5), "of at"),
        (
            lambda: bound_layout(
                SGHMC(coefficients, control_variate=2, batch_size=20),
                jnp.ones((400, 300)),
                jnp.ones(400),
                True,
            ),
            "control_variate=2 needs the Hessian.*at most 256",
        ),
        (
            lambda: SGHMC(heights, dense_mass="structured", inverse_mass_matrix=np.ones(12)),
            "expected no inverse_mass_matrix",
        ),
    ],
)
def test_bad_input(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_an_energy_that_is_only_estimated_has_no_groups() -> None:
    def energy(z: Any, rng_key: jax.Array) -> jax.Array:
        return jnp.sum(z["w"] ** 2) / 2 + 0 * random.normal(rng_key)

    kernel = SGHMC(potential_fn=energy)
    state = kernel.init(random.key(0), 10, {"w": jnp.ones(300)}, (), {})
    assert kernel.settings.layout is None
    np.testing.assert_allclose(state.scale.inverse_mass_matrix, np.ones(300), rtol=1e-4)


def test_noise_of_groups_is_the_mean_over_positions(x64: None) -> None:
    """The gradient of x_i t_i^3 / 3 has the variance Var(x_i) t_i^4, which is 3 for normal t."""
    rows, size = 400, 300
    slopes = random.normal(random.key(0), (64, rows, size))

    def score_noise(rng_key: jax.Array) -> tuple:
        mine = slopes[rng_key[-1] % 64]
        return ((2.0, lambda t: mine @ (t**3 / 3)),)

    potential = function_potential(lambda t: jnp.sum(t**2))._replace(score_noise=score_noise)
    key = random.key_data(random.key(1))
    layout = find_layouts({"t": (size,)}, {"t": [("p", 0)]})[0]
    largest, _ = noise_at(potential, jnp.ones(size), key, layout=layout)
    # rows that differ have no direction in common: the far quantile of the entries is the largest.
    # An entry is a mean over 24 positions, each with signs of its own
    t, gradient = np.random.default_rng(0).normal(size=(2, 20_000, 24))
    low, high = np.quantile(np.mean(2 * t**4 * gradient**2, axis=1), (0.95, 0.999))
    assert low < largest < high


def test_noise_of_groups_counts_for_what_it_does_to_a_scale(x64: None) -> None:
    """U = sum(t_i^2) exp(-2 a s) / 2 with a noise c in each t_i: tr(H C) = c exp(-2 a s) G."""
    rows, size, a = 50, 300, 0.02
    slopes = random.normal(random.key(0), (16, rows, size))
    layout = find_layouts({"s": (), "t": (size,)}, {"t": [("p", 0)]})[0]

    def energy(x: jax.Array) -> jax.Array:
        s, t = layout.split(x)
        return jnp.sum(t**2) * jnp.exp(-2 * a * s[0]) / 2

    def score_noise(rng_key: jax.Array) -> tuple:
        mine = slopes[rng_key[-1] % 16]
        return ((2.0, lambda x: mine @ layout.split(x)[1][:, 0]),)

    potential = function_potential(energy)._replace(score_noise=score_noise)
    key = random.key_data(random.key(1))
    how = {"layout": layout, "temperature": 4.0}
    (without, _), (found, _) = (
        noise_at(potential, jnp.ones(size + 1), key, plain=plain, **how)
        for plain in (None, potential)
    )
    assert without < 4
    # the mean over 24 positions s, and over signs
    assert found == pytest.approx(4.0**0.5 * a * 2 * size, rel=0.1)
