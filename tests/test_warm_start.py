"""A run that starts where an earlier one has ended: `init_to_draws`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS
from scipy import stats
from targets import as_if_run, vectorized
from tiers import short

import numpyro_geom.bound
from numpyro_geom import SGHMC, SGRLD, init_to_draws
from numpyro_geom._util import words

ROWS, NEW = 400, 100


def linear(X: jax.Array, y: jax.Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=y[i])


def hierarchy(groups: int, y: jax.Array) -> None:
    """Rows in the order of their groups, which are far apart."""
    spread = numpyro.sample("spread", dist.HalfNormal(5))
    level = numpyro.sample("level", dist.Normal(0, 10))
    with numpyro.plate("groups", groups):
        of_group = numpyro.sample("of_group", dist.Normal(level, spread))
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(of_group[i * groups // y.shape[0]], 1), obs=y[i])


def linear_data(rows: int, columns: int = 3) -> tuple[jax.Array, jax.Array]:
    X = random.normal(random.key(0), (ROWS + NEW, columns)) * jnp.linspace(0.5, 2, columns)
    y = X[:, 0] + random.normal(random.key(1), (ROWS + NEW,))
    return X[:rows], y[:rows]


def started(kernel: Any, *args: Any, chains: int = 2, num_warmup: int = 100) -> MCMC:
    """As a run leaves it whose chains have not moved; its draws are its starts."""
    state = kernel.init(random.split(random.key(2), chains), num_warmup, None, args, {})
    constrain = jax.vmap(kernel.postprocess_fn(args, {}))
    draws = jax.tree.map(lambda x: np.asarray(x)[:, None], constrain(state.z))
    mcmc = vectorized(kernel, num_warmup, 1, chains)
    return as_if_run(mcmc, draws, *args, last_state=state)


def same(found: Any, expected: Any) -> bool:
    equal = jax.tree.map(lambda x, y: np.array_equal(words(x), words(y)), found, expected)
    return all(jax.tree.leaves(equal))


def test_new_rows_without_any_warmup() -> None:
    mcmc = vectorized(SGHMC(linear), 200, 200, 2)
    mcmc.run(random.key(3), *linear_data(ROWS))
    X, y = linear_data(ROWS + NEW)
    again = vectorized(SGHMC(linear, init_strategy=init_to_draws(mcmc)), 0, 1000, 2)
    again.run(random.key(4), X, y)

    covariance = np.linalg.inv(np.eye(3) + np.asarray(X.T @ X, float))
    mean, sd = covariance @ np.asarray(X.T @ y, float), np.sqrt(np.diag(covariance))
    draws = again.get_samples()["w"]
    # 2,000 draws with some thousand effective ones: five standard errors of each, and the bias
    # of a tenth that the step size may have
    np.testing.assert_allclose((draws.mean(0) - mean) / sd, 0, atol=5 / 1000**0.5)
    np.testing.assert_allclose(draws.std(0) / sd, 1, atol=5 / 2000**0.5 + 0.05)
    old, new = mcmc.last_state, again.last_state
    assert set(np.asarray(new.step_size)) <= set(np.asarray(old.step_size))
    # the earlier data lie a standard deviation and more away
    before = np.linalg.solve(np.eye(3) + X[:ROWS].T @ X[:ROWS], X[:ROWS].T @ y[:ROWS])
    assert np.abs(before - mean).max() > 0.2 * sd.max()


def test_a_model_that_is_known_starts_as_if_it_was_read_again() -> None:
    kernel = SGHMC(linear, batch_size=32)
    mcmc = started(kernel, *linear_data(ROWS))
    again = kernel.replace(init_strategy=init_to_draws(mcmc))
    anew = again.replace(model=lambda X, y: linear(X, y))  # another function
    given = random.split(random.key(5), 2), 0, None
    one, other = (x.init(*given, linear_data(ROWS + NEW), {}) for x in (again, anew))
    assert same(one, other)
    assert again.bound.model.plan == anew.bound.model.plan
    keys = random.split(random.key(6), 2)  # as in chains in parallel
    traced = jax.jit(lambda key: again.init(key, 0, None, linear_data(ROWS + NEW), {}).z)
    assert same(traced(keys[1]), again.init(keys[1], 0, None, linear_data(ROWS + NEW), {}).z)
    X, y = linear_data(ROWS + NEW)
    with pytest.raises(ValueError, match="NaN"):
        again.init(*given, (X, y.at[-1].set(jnp.nan)), {})


SCALES = {
    "any direction": (SGHMC(linear), linear_data(ROWS), linear_data(ROWS + NEW)),
    "each parameter": (
        SGRLD(linear, dense_mass=False),
        linear_data(ROWS),
        linear_data(ROWS + NEW),
    ),
    "low rank": (
        SGHMC(linear, dense_mass="low_rank"),
        linear_data(ROWS, 20),
        linear_data(ROWS + NEW, 20),
    ),
    "groups": (
        SGHMC(hierarchy, dense_mass="structured"),
        (8, 3.0 * jnp.arange(ROWS) / ROWS),
        (8, 3.0 * jnp.arange(ROWS + 8) / ROWS),
    ),
}


@pytest.mark.parametrize("kind", short(SCALES, kept=["low rank", "groups"]))
def test_the_scale_is_handed_on(kind: str) -> None:
    kernel, old, new = SCALES[kind]
    mcmc = started(kernel, *old, chains=1)
    state = mcmc.last_state._replace(step_size=jnp.full(1, 0.123), num_steps=jnp.full(1, 9))
    mcmc._last_state = state
    again = kernel.replace(init_strategy=init_to_draws(mcmc))
    found = again.init(random.split(random.key(5), 3), 20, None, new, {})
    for chain in range(3):
        one = jax.tree.map(lambda x: x[chain], found)  # noqa: B023
        kept = "scale", "step_size", "num_steps"
        for name in kept:
            assert same(getattr(one, name), jax.tree.map(lambda x: x[0], getattr(state, name)))
        assert (one.adaptation.num_warmup, one.i) == (20, 0)
        # the energy is that of the new rows
        energy = again.bound.on(new, {}).model.energy(one.z)
        np.testing.assert_allclose(one.potential_energy, energy, rtol=1e-4)


def test_values_of_groups_in_other_coordinates() -> None:
    old, new = (8, jnp.zeros(16)), (8, jnp.zeros(24))
    kernel = SGHMC(hierarchy)
    mcmc = started(kernel, *old, chains=2)
    assert kernel.bound.shares  # groups of two rows are not written as centred
    again = kernel.replace(init_strategy=init_to_draws(mcmc))
    state = again.init(random.split(random.key(5), 3), 0, None, new, {})
    assert same(again.bound.shares, kernel.bound.shares)
    values = jax.vmap(again.postprocess_fn(new, {}))(state.z)
    draws = mcmc.get_samples()["of_group"]
    for one in values["of_group"]:
        assert np.isclose(draws, one, rtol=1e-3, atol=1e-3).all(1).any()


def test_choices_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEW_ROWS", "FEW_OPERATIONS"):  # as if the rows were many
        monkeypatch.setattr(numpyro_geom.bound, name, 1)
    kernel = SGHMC(linear, control_variate=True)
    mcmc = started(kernel, *linear_data(ROWS), chains=1)
    choice = kernel.bound.choice
    assert choice is not None
    changed = choice._replace(batch_size=64, order=1)  # not what would be measured
    mcmc.sampler._bound = kernel.bound.decided(changed)
    control = mcmc.last_state.control
    again = kernel.replace(init_strategy=init_to_draws(mcmc))
    state = again.init(random.key(5), 0, None, linear_data(ROWS + NEW), {})
    assert again.bound.choice == changed
    later = MCMC(again, num_warmup=0, num_samples=1)  # and the month after
    later._last_state, later._states = state, mcmc._states
    third = kernel.replace(init_strategy=init_to_draws(later))
    third.init(random.key(5), 0, None, linear_data(ROWS + NEW), {})
    assert third.bound.choice == changed
    assert again.bound.plan.batch_sizes == {"data": 64}
    gradient = jax.grad(again.bound.on(linear_data(ROWS + NEW), {}).model.energy)
    position = {"w": state.control.anchor.position}
    np.testing.assert_allclose(state.control.anchor.position, control.anchor.position[0])
    found, expected = state.control.anchor.grad, gradient(position)["w"]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_new_groups_start_from_the_law_of_the_old_ones() -> None:
    draws = {
        "spread": jnp.array([0.5, 2.0]),
        "level": jnp.array([-1.0, 1.0]),
        "of_group": random.normal(random.key(6), (2, 8)),
    }
    kernel = SGHMC(hierarchy, init_strategy=init_to_draws(draws))
    keys = random.split(random.key(7), 2000)
    _, z = numpyro_geom.bound.bind(kernel.settings, keys, 100, None, (12, jnp.zeros(48)), {})
    assert z["of_group"].shape == (2000, 12)
    for k in range(2):
        here = np.isclose(z["level"], draws["level"][k])
        assert 900 < here.sum() < 1100  # binomial: 1 run in 10^5 is outside
        np.testing.assert_allclose(np.exp(z["spread"][here]), draws["spread"][k], rtol=1e-5)
        np.testing.assert_array_equal(
            z["of_group"][here, :8], np.tile(draws["of_group"][k], (here.sum(), 1))
        )
        new = (z["of_group"][here, 8:] - draws["level"][k]) / draws["spread"][k]
        assert stats.kstest(np.ravel(new), "norm").pvalue > 1e-4


def test_draws_of_a_guide_and_of_another_kernel() -> None:
    y = jnp.arange(16.0)
    values = {"spread": jnp.full(3, 2.0), "level": jnp.zeros(3), "of_group": jnp.ones((3, 8))}

    class Draws:
        success = jnp.ones((1, 3), bool)
        samples = {n: x[None] for n, x in values.items()}

    nuts = as_if_run(
        MCMC(NUTS(hierarchy), num_warmup=1, num_samples=3, progress_bar=False),
        {n: np.asarray(x)[None] for n, x in values.items()},
        8,
        y,
    )
    for source in (values, Draws(), nuts):
        kernel = SGRLD(hierarchy, init_strategy=init_to_draws(source))
        _, z = numpyro_geom.bound.bind(kernel.settings, random.key(8), 10, None, (8, y), {})
        np.testing.assert_allclose(z["spread"], np.log(2.0), rtol=1e-6)
        np.testing.assert_array_equal(z["of_group"], np.ones(8))


def test_other_sites_are_an_error() -> None:
    mcmc = started(SGHMC(linear), *linear_data(ROWS), chains=1)
    other = SGHMC(hierarchy, init_strategy=init_to_draws(mcmc))
    with pytest.raises(ValueError, match=r"no draws of the latent sites \['level', .*of \['w'\]"):
        other.init(random.key(0), 10, None, (8, jnp.zeros(16)), {})
    fewer = SGHMC(linear, init_strategy=init_to_draws(mcmc))
    with pytest.raises(ValueError, match=r"site 'w' with shape \(3,\), and the site has shape \(2"):
        fewer.init(random.key(0), 10, None, linear_data(ROWS, 2), {})
    for wrong in (None, MCMC(NUTS(linear), num_warmup=1, num_samples=1), 3.0):
        with pytest.raises(TypeError, match="init_to_draws needs a finished"):
            init_to_draws(wrong)
