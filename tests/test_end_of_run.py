"""Chains that are off are told once, at the end of a run; starts that end nowhere are refused."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import MCMC
from targets import normal_mean
from tiers import short

from numpyro_geom import GGMC, SGHMC, SGRLD, RMSprop, run_in_segments
from numpyro_geom._numpyro import holding
from numpyro_geom.diagnostics import SamplingWarning
from numpyro_geom.diagnostics.checks import LEAST_DRAWS, warn_of_run
from numpyro_geom.diagnostics.facts import Run, facts_of
from numpyro_geom.diagnostics.inference_data import after_run

METHODS = ["sequential", "vectorized", "parallel"]
DRAWS = 2 * LEAST_DRAWS


def narrow() -> None:
    numpyro.sample("x", dist.Normal(0, 1e-3))


def wide() -> None:
    numpyro.sample("x", dist.Normal(0, 1e9))


def well() -> None:
    """A deep well in a wide plain: a long step leaves the well and never finds it again."""
    x = numpyro.sample("x", dist.Normal(0, 100))
    numpyro.factor("depth", 1000 * jnp.exp(-(x**2) / 2))


def modes() -> None:
    x = numpyro.sample("x", dist.Normal(0, 100))
    far = jnp.logaddexp(-(x**2) / 2, -50 - (x - 100) ** 2 / 2)
    numpyro.factor("modes", far + x**2 / (2 * 100**2))


OFF: dict[str, tuple[Any, list[float], str]] = {
    "undone": (
        SGRLD(narrow, step_size=1.0, num_steps=2),
        [1.0, 1.5],
        r"chains that do not move: 2, expected 0; chain 0, .*: do not use its draws: .*"
        r"step_size='auto' or a smaller step_size",
    ),
    # the positions of chain 1 have no digits for its steps
    "still": (
        SGRLD(wide, step_size=0.01, num_steps=1),
        [0.0, 1e8],
        r"chains that do not move: 1, expected 0; chain 1: .*step_size='auto'",
    ),
    "rejected": (
        GGMC(narrow, metric="wenzel", step_size=1.0, num_steps=2),
        [1.0, 1.5],
        r"chains that do not move: 2, .*step_size='auto'",
    ),
    "far": (
        SGRLD(well, step_size=8.0, num_steps=2),
        [0.0, 0.0],
        r"energy above the start: 1,?0\d\d, expected at most 20; in nats, .*step_size='auto'",
    ),
    "mode": (
        SGRLD(modes, step_size=0.3, num_steps=5),
        [0.0, 100.0],
        r"energy above the best chain: (49|50|51)(\.\d)?, .*; in nats, chain 1: it is in another "
        "mode than chain 0",
    ),
}


def run(kernel: Any, starts: Any = None, *, args: tuple = (), **settings: Any) -> MCMC:
    chains = 1 if starts is None else len(starts)
    settings = {"num_warmup": 0, "num_samples": DRAWS, "progress_bar": False, **settings}
    mcmc = MCMC(kernel, num_chains=chains, **settings)
    mcmc.run(random.key(0), *args, init_params=starts and {"x": jnp.array(starts)})
    return mcmc


@pytest.mark.parametrize("method", short(METHODS, kept=["vectorized"]))
@pytest.mark.parametrize(("kernel", "starts", "match"), OFF.values(), ids=OFF.keys())
def test_a_chain_that_is_off_is_told_once(
    kernel: Any, starts: list, match: str, method: str
) -> None:
    with pytest.warns(SamplingWarning, match=match) as told:
        run(kernel, starts, chain_method=method)
    assert [w.filename for w in told] == [__file__]


@pytest.mark.parametrize("bar", [True, False])
def test_after_warmup_and_with_a_progress_bar(bar: bool) -> None:
    mcmc = MCMC(
        OFF["undone"][0], num_warmup=DRAWS, num_samples=DRAWS, thinning=2, progress_bar=False
    )
    mcmc.progress_bar = bar  # the constructor turns it off where tests run in parallel
    mcmc.warmup(random.key(0), collect_warmup=True)
    for _ in range(2):  # the second run needs no initialisation
        with pytest.warns(SamplingWarning, match="do not move") as told:
            mcmc.run(random.key(1))
        assert len(told) == 1
        mcmc.post_warmup_state = mcmc.last_state


@pytest.mark.parametrize("name", short(["undone", "lags"], kept=["undone"]))
def test_few_draws_are_no_evidence(name: str) -> None:
    lags = SGHMC(narrow, step_size=1e-7, num_steps=2, metric=RMSprop(), divergence="corrected")
    kernel = {"undone": OFF["undone"][0], "lags": lags}[name]
    run(kernel, [1.0, 1.5], num_samples=LEAST_DRAWS - 1, chain_method="vectorized")
    with pytest.warns(SamplingWarning):
        run(kernel, [1.0, 1.5], num_samples=LEAST_DRAWS, chain_method="vectorized")


def test_a_long_run_tells_once_when_its_draws_are_read() -> None:
    kernel, starts, match = OFF["mode"]
    settings: Any = {"num_samples": DRAWS, "num_chains": 2, "chain_method": "vectorized"}
    mcmc = MCMC(kernel, num_warmup=0, progress_bar=False, **settings)
    result = run_in_segments(mcmc, random.key(0), init_params={"x": jnp.array(starts)})
    with pytest.warns(SamplingWarning, match=match) as told:
        assert result.mcmc is result.mcmc
    assert [w.filename for w in told] == [__file__]


class Large:
    """Draws of which only a slice can be copied to the host."""

    ndim, is_fully_addressable = 2, True

    def __init__(self, values: Any) -> None:
        self.values, self.shape, self.size = values, values.shape, values.size

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self.values[index])

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("copied")


def test_the_draws_are_not_copied(after: Any) -> None:
    kernel, states, last = after
    still = Large(np.zeros((3, DRAWS)))
    mcmc = MCMC(kernel, num_warmup=0, num_samples=DRAWS, progress_bar=False)
    mcmc = holding(mcmc, ((), {}), states | {"z": {"mu": still}}, last)
    with pytest.warns(SamplingWarning, match="do not move: 3"):
        after_run(mcmc)
    still.is_fully_addressable = False  # other processes have some of them
    after_run(mcmc)


# Right runs


def funnel() -> None:
    v = numpyro.sample("v", dist.Normal(0, 3))
    numpyro.sample("x", dist.Normal(0, jnp.exp(v / 2)).expand([9]).to_event(1))


def eight_schools() -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        y = jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12])
        numpyro.sample("y", dist.Normal(theta, jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18])), obs=y)


def logistic(X: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


X = random.normal(random.key(1), (100, 3))
FAR_OUT = 3e9 + 1e9 * X[:, 0]


def incomes(y: Any) -> None:
    """A typical set at 3 billion is no start that has run away."""
    mean = numpyro.sample("mean", dist.Normal(0, 1e12))
    width = numpyro.sample("width", dist.LogNormal(0, 30))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("y", dist.Normal(mean, width), obs=y[i])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "args"),
    [
        (SGHMC(funnel), ()),
        (SGRLD(eight_schools), ()),
        (SGRLD(logistic, batch_size=10), (X, (X[:, 0] > 0) * 1.0)),
        (SGRLD(incomes), (FAR_OUT,)),
    ],
    ids=["funnel", "eight schools", "logistic", "incomes"],
)
def test_right_runs_are_silent(kernel: Any, args: tuple) -> None:
    run(kernel, args=args, num_warmup=100)  # warnings are errors


# The rule


@pytest.fixture(scope="module")
def after() -> Any:
    """States and last states of three chains that are right."""
    kernel = SGRLD(normal_mean, step_size=0.01, num_steps=1)
    last = kernel.init(random.split(random.key(0), 3), 0, None, (jnp.zeros(6),), {})
    noise = np.random.default_rng(0).normal(size=(3, DRAWS))
    adaptation = last.adaptation._replace(start_energy=jnp.zeros(3))
    last = last._replace(i=last.i + DRAWS, adaptation=adaptation)
    states = {"z": {"mu": noise}, "potential_energy": noise, "diverging": noise > 9}
    states |= {"step_size": 0.01 + 0 * noise, "num_steps": 1 + 0 * noise}
    return kernel, states, last


def told(kernel: Any, states: dict, last: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stats = {"energy": states["potential_energy"], "diverging": states["diverging"]}
        warn_of_run(Run(states["z"], stats, facts_of(kernel, states, last)))
    return [str(w.message) for w in caught]


def test_what_is_enough(after: Any) -> None:
    kernel, states, last = after
    assert told(*after) == []
    most = np.arange(DRAWS) < DRAWS / 2
    undone = np.stack([~most, most, most])
    assert told(kernel, states | {"diverging": undone}, last) == []
    undone[1, -1] = True
    assert "chain 1" in told(kernel, states | {"diverging": undone}, last)[0]
    still = states["z"]["mu"] * np.array([[1], [1], [0]])
    assert "chain 2" in told(kernel, states | {"z": {"mu": still}}, last)[0]
    still[2, DRAWS // 2 :] = 1  # it has moved once
    assert told(kernel, states | {"z": {"mu": still}}, last) == []


def test_chains_that_hardly_move_are_told() -> None:
    steps = np.random.default_rng(1).normal(size=(2, 400, 3))
    walk = {"x": steps.cumsum(1), "y": steps[..., 0]}

    def told(draws: dict, **facts: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_run(Run(draws, {}, facts))
        return [str(w.message) for w in caught]

    (text,) = told(walk)
    assert re.match(r"effective sample size: \d\.\d+, expected at least 400; x: ", text)
    # chains in different modes, a short run, a network, and a descent
    assert told({"x": steps + 99 * np.arange(2)[:, None, None]}) == []
    assert told({"x": walk["x"][:, :20]}) == []
    assert told(walk, network="yes") == told(walk, temperature=0.0) == []


def test_a_run_with_a_step_that_is_far_too_short_is_told() -> None:
    with pytest.warns(SamplingWarning, match="effective sample size: .* 400; x: ") as told:
        run(SGRLD(narrow, step_size=1e-9, num_steps=1), num_samples=400)
    assert [w.filename for w in told] == [__file__]


def test_a_descent_may_end_at_rest(after: Any) -> None:
    _, states, last = after
    kernel = SGRLD(normal_mean, step_size=0.01, num_steps=1, temperature=0.0)
    kernel.init(random.key(0), 0, None, (jnp.zeros(6),), {})
    assert told(kernel, states | {"z": {"mu": np.zeros((3, DRAWS))}}, last) == []


def test_energies_are_compared_beyond_their_noise(after: Any) -> None:
    kernel, states, last = after
    noise = states["potential_energy"]
    high = states | {"potential_energy": 100 + noise}
    assert told(kernel, high, last)[0].startswith("energy above the start: ")
    assert told(kernel, states | {"potential_energy": 100 + 50 * noise}, last) == []
    unknown = last.adaptation._replace(start_energy=jnp.full(3, jnp.inf))
    assert told(kernel, high, last._replace(adaptation=unknown)) == []


@pytest.mark.parametrize("given", [{}, {"step_size": 0.01, "num_steps": 3}])
def test_the_energy_of_a_start(given: dict) -> None:
    """It is U where the search has ended. U where it began would hide a chain that is far off."""
    kernel, args = SGRLD(normal_mean, **given), (100.0 + jnp.arange(6.0),)
    first = kernel.init(random.key(0), 5, None, args, {})
    state = kernel.sample(first, args, {})
    energy = kernel.bound.on(args, {}).model.energy(first.z)
    np.testing.assert_allclose(state.adaptation.start_energy, energy, rtol=1e-5)
    if given:
        assert kernel.sample(state, args, {}).adaptation.start_energy == energy
        other = kernel.refresh(state, (args[0] + 1,), {})
        assert other.adaptation.start_energy == jnp.inf


def test_a_chain_that_still_falls_is_in_no_other_mode(after: Any) -> None:
    kernel, states, last = after
    unknown = last._replace(adaptation=last.adaptation._replace(start_energy=jnp.full(3, jnp.inf)))
    for fall, match in ((0, "it is in another mode than chain 0"), (1, "its energy still falls")):
        energy = states["potential_energy"] / 9 + np.array([[0], [0], [100]])
        energy[2] -= fall * np.arange(DRAWS)
        (text,) = told(kernel, states | {"potential_energy": energy}, unknown)
        assert match in text


# Starts that end nowhere


def scale(y: Any) -> None:
    s = numpyro.sample("s", dist.HalfNormal(1))
    with numpyro.plate("data", len(y)) as i:
        numpyro.sample("y", dist.Normal(0, s), obs=y[i])


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize(
    ("model", "start", "match"),
    [
        (scale, {"s": 1e6}, r"site 's' has the value inf, for 1e\+06 in its unconstrained space"),
        (scale, {"s": -1e6}, r"log density of site 'y' is not finite"),
    ],
)
def test_a_start_without_energy_names_its_site(
    chains: int, model: Any, start: dict, match: str
) -> None:
    good = {name: 0.0 for name in start}
    rng_key: Any = random.key(0)
    params = {n: jnp.array(x) for n, x in start.items()}
    if chains > 1:
        rng_key = random.split(rng_key, chains)
        params = {n: jnp.array([good[n], x]) for n, x in start.items()}
    kernel = SGRLD(model, step_size=0.01, num_steps=1)
    with pytest.raises(ValueError, match=rf"energy is not finite where .*init_params.*; .*{match}"):
        kernel.init(rng_key, 5, params, (jnp.ones(6),), {})


@pytest.mark.parametrize(
    "support", short([constraints.positive, constraints.real], kept=[constraints.positive])
)
def test_a_search_that_runs_away_names_its_site(support: Any) -> None:
    def falling() -> None:
        x = numpyro.sample("x", dist.ImproperUniform(support, (), ()))
        numpyro.sample("other", dist.Normal(0, 1))
        numpyro.factor("f", 20 * (x if support is constraints.real else jnp.log(x)))

    keys = random.split(random.key(1), 2)
    with pytest.raises(ValueError, match=r"ran away with site 'x', to .*ImproperUniform"):
        SGRLD(falling).init(keys, 20, None, (), {})
