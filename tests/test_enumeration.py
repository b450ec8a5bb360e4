"""Discrete latent sites that are summed out, against densities without them and exact moments."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.special import logsumexp
from numpyro.contrib.control_flow import scan
from numpyro.contrib.funsor import config_enumerate
from numpyro.infer import MCMC, Predictive
from numpyro.infer.util import potential_energy
from targets import SIGMAS, vectorized

from numpyro_geom import SGRLD, bound, diagnose, to_inference_data
from numpyro_geom.model.model import read
from numpyro_geom.model.plates import read_subsampling

ROUNDING = 1e-10
"""Relative, in 64 bits: sums of some dozen terms in another order."""
Y = np.array([-1.2, -0.7, -1.4, 0.4, 1.3, 0.9, 1.1, 1.6])
TABLE = np.array([[0.3, -0.5, 1.2], [0.1, 0.8, -0.9]])
LEAST = 200
"""Effective draws without which a comparison says nothing."""


def marked() -> dict[str, str]:
    """Settings to sum a site out; a new dict for each site, because funsor writes into it."""
    return {"enumerate": "parallel"}


def mixture(y: Any, *, sums: bool = True) -> None:
    """Two components with unknown weights and means; an assignment for each row."""
    w = numpyro.sample("w", dist.Dirichlet(jnp.ones(2)))
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
    with numpyro.plate("data", y.shape[0]) as i:
        if sums:
            k = numpyro.sample("k", dist.Categorical(w), infer=marked())
            numpyro.sample("y", dist.Normal(mu[k], 0.5), obs=y[i])
        else:
            parts = dist.MixtureSameFamily(dist.Categorical(w), dist.Normal(mu, 0.5))
            numpyro.sample("y", parts, obs=y[i])


def nested(y: Any, *, sums: bool = True) -> None:
    """A class for each group of rows, in a plate of groups around the plate of rows."""
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
    s = numpyro.sample("s", dist.LogNormal(0, 0.5))
    if sums:
        with numpyro.plate("groups", y.shape[0], dim=-2):
            k = numpyro.sample("k", dist.Bernoulli(0.3), infer=marked())
            with numpyro.plate("rows", y.shape[1], dim=-1):
                numpyro.sample("y", dist.Normal(mu[k], s), obs=y)
    else:
        found = dist.Normal(mu[:, None, None], s).log_prob(y).sum(-1)
        numpyro.factor("y", logsumexp(found + jnp.log(jnp.array([0.7, 0.3]))[:, None], 0).sum())


STAY = np.array([[0.8, 0.2], [0.4, 0.6]])


def chain(y: Any, *, sums: bool = True) -> None:
    """Two discrete sites, the second given the first."""
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
    if sums:
        a = numpyro.sample("a", dist.Categorical(jnp.array([0.3, 0.7])), infer=marked())
        numpyro.sample("y_a", dist.Normal(mu[a], 1), obs=y[0])
        b = numpyro.sample("b", dist.Categorical(jnp.asarray(STAY)[a]), infer=marked())
        numpyro.sample("y_b", dist.Normal(mu[b], 1), obs=y[1])
    else:
        first, second = (dist.Normal(mu, 1).log_prob(v) for v in (y[0], y[1]))
        joint = jnp.log(jnp.array([0.3, 0.7]))[:, None] + first[:, None] + jnp.log(STAY) + second
        numpyro.factor("y", logsumexp(joint))


def hidden_markov(y: Any, *, sums: bool = True) -> None:
    """A hidden Markov model by `scan`, and by the forward algorithm."""
    mu = numpyro.sample("mu", dist.Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
    if sums:

        def step(k: Any, value: Any) -> tuple:
            k = numpyro.sample("k", dist.Categorical(jnp.asarray(STAY)[k]), infer=marked())
            numpyro.sample("y", dist.Normal(mu[k], 1), obs=value)
            return k, None

        scan(step, 0, y)
    else:
        state = jnp.log(jnp.array([1.0, 0.0]))
        for value in y:
            state = logsumexp(state[:, None] + jnp.log(STAY), 0)
            state = state + dist.Normal(mu, 1).log_prob(value)
        numpyro.factor("y", logsumexp(state))


@pytest.mark.parametrize(
    ("model", "y"),
    [(mixture, Y), (nested, TABLE), (chain, Y), (hidden_markov, Y)],
    ids=["plate", "nested plates", "chain", "scan"],
)
def test_the_energy_is_that_of_the_model_without_discrete_sites(
    x64: None, model: Callable, y: np.ndarray
) -> None:
    args = (jnp.asarray(y),)
    potential = read(model, args).potential()
    assert potential.deterministic
    shapes = {"w": (1,), "mu": (2,), "s": ()}
    rng = np.random.default_rng(0)

    @jax.jit
    def both(position: dict) -> tuple:
        expected = jax.value_and_grad(lambda z: potential_energy(model, args, {"sums": False}, z))
        return jax.value_and_grad(potential.energy)(position, {}), expected(position)

    names = [s.name for s in read_subsampling(model, args, {"sums": False}).sites]
    for _ in range(3):
        z = {n: jnp.asarray(rng.normal(size=shapes[n])) for n in names if n in shapes}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=ROUNDING), *both(z))


def switch(y: Any) -> None:
    """The mean is that of one of two groups: a posterior of one parameter, with two modes."""
    k = numpyro.sample("k", dist.Bernoulli(0.7), infer=marked())
    mu = numpyro.sample("mu", dist.Normal(jnp.where(k == 1, 1.0, -1.0), 0.7))
    numpyro.deterministic("double", 2 * mu)
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(mu, 3.0), obs=y[i])


@pytest.fixture(scope="module")
def run() -> MCMC:
    made = vectorized(SGRLD(switch), 300, 500, 4)
    made.run(random.key(0), jnp.asarray(Y, jnp.float32))
    return made


def test_draws_have_the_law_of_the_model_without_discrete_sites(run: MCMC) -> None:
    grid = np.linspace(-6.0, 6.0, 4001)
    prior = 0.7 * np.exp(-(((grid - 1) / 0.7) ** 2) / 2)
    prior += 0.3 * np.exp(-(((grid + 1) / 0.7) ** 2) / 2)
    weights = prior * np.exp(-(((grid[:, None] - Y) / 3.0) ** 2).sum(1) / 2)
    weights /= weights.sum()
    draws = np.asarray(run.get_samples(group_by_chain=True)["mu"], np.float64)
    np.testing.assert_allclose(run.get_samples()["double"].reshape(4, -1), 2 * draws, atol=1e-5)
    for moment in (lambda x: x, lambda x: x**2):
        values = moment(draws)
        size = numpyro.diagnostics.effective_sample_size(values)
        assert size > LEAST
        exact = (weights * moment(grid)).sum()
        sd = np.sqrt((weights * (moment(grid) - exact) ** 2).sum())
        # the step size may cost a variance `bias_tolerance`, a tenth, beside the Monte Carlo error
        assert abs(values.mean() - exact) < SIGMAS * sd / np.sqrt(size) + 0.1 * sd


@pytest.mark.slow
def test_what_is_read_off_a_run(run: MCMC) -> None:
    assert set(run.get_samples()) == {"mu", "double"}
    assert "error of the means, in sd" in {check.name for check in diagnose(run).checks}
    assert set(to_inference_data(run).posterior) == {"mu", "double"}
    found = to_inference_data(run, gradients=True).unconstrained_posterior
    energy = read(switch, (jnp.asarray(Y, jnp.float32),)).potential().energy
    expected = jax.vmap(jax.grad(lambda mu: energy({"mu": mu}, {})))(run.get_samples()["mu"])
    np.testing.assert_allclose(found["grad_U.mu"].values.ravel(), expected, atol=1e-4)
    with pytest.raises(ValueError, match=r"no draws of the latent sites \['k'\].*infer_discrete"):
        to_inference_data(run, log_likelihood=True)
    y = jnp.asarray(Y, jnp.float32)
    drawn = Predictive(run.sampler.model, run.get_samples(), infer_discrete=True)
    share = np.asarray(drawn(random.key(1), y)["k"])
    assert 0.5 < share.mean() < 1.0  # 0.7 in the prior, and the mean of the data is above 0


def unmarked(y: Any) -> None:
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    mu = numpyro.sample("mu", dist.Normal(k, 1))
    with numpyro.plate("data", 8) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=None if y is None else y[i])


def start(model: Callable, y: Any = Y, **settings: Any) -> Any:
    settings = {"step_size": 0.1, "num_steps": 1, **settings}
    kernel = SGRLD(model, **settings)
    kernel.init(random.key(0), 0, None, (None if y is None else jnp.asarray(y, jnp.float32),), {})
    return kernel


def test_an_unmarked_site_is_summed_out_with_a_warning_unless_data_are_missing() -> None:
    with pytest.warns(FutureWarning, match="automatically enumerate the discrete latent site k"):
        start(unmarked)
    start(config_enumerate(unmarked))
    with pytest.raises(ValueError, match=r"discrete latent sites \['k'\].*Pass the data"):
        start(unmarked, None)
    with pytest.warns(UserWarning, match="those of the prior"):
        start(config_enumerate(unmarked), None)


def derived(y: Any) -> None:
    switch(y)
    k = numpyro.sample("other", dist.Bernoulli(0.5), infer=marked())
    numpyro.deterministic("wrong", jnp.where(k == 1, 2.0, y.sum()))


def test_deterministic_sites_that_depend_on_discrete_ones_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"sites \['wrong'\] depend on .*infer_discrete=True"):
        start(derived)


def test_many_rows_of_a_model_that_is_summed_out_need_no_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bound, "FEW_ROWS", 3)  # warnings are errors
    bound.bind(SGRLD(mixture).settings, random.key(0), 10, None, (Y,), {})


def test_minibatches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'data'.*cannot be subsampled.*\['k'\] are summed out"):
        start(mixture, batch_size=2)
    assert start(mixture, batch_size=8).bound.plan.batch_sizes == {}


def test_without_funsor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"\['k'\].*`pip install funsor`.*MixtureSameFamily"):
        start(mixture)
