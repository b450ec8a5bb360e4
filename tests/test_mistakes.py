"""Mistakes of users: each raises a typed error that names the argument and says what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import HMCECS, MCMC, NUTS, DiscreteHMCGibbs, HMCGibbs, MixedHMC
from numpyro.infer.gibbs import CustomGibbs, Gibbs
from scripts import load_script

from numpyro_geom import SGRLD, RiemannianLaplace, SGKernel, run_in_segments
from numpyro_geom._checks import SamplingWarning, warn_outside
from numpyro_geom.diagnostics.moments import gradients_at_draws
from numpyro_geom.diagnostics.replay import pointwise_log_prob
from numpyro_geom.model import read
from numpyro_geom.model.start import check_lanes, sums_wrongly

pytest.importorskip("pandas")
EXAMPLE = load_script("mistakes")
ROWS = [mistake for mistakes in EXAMPLE.MISTAKES.values() for mistake in mistakes]


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return EXAMPLE.names()


@pytest.mark.parametrize("mistake", ROWS, ids=[mistake.code for mistake in ROWS])
def test_a_mistake_gets_a_sentence(mistake: Any, known: dict[str, Any]) -> None:
    error = EXAMPLE.raised(mistake, known)
    assert type(error) is mistake.error
    text = str(error)
    assert mistake.argument in text
    assert mistake.remedy in text
    assert "\n" not in text
    assert not isinstance(error, jax.errors.JAXTypeError)


def test_what_is_accepted_is_an_error(known: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"accepted, and should not be: SGRLD\(model\)"):
        EXAMPLE.raised(EXAMPLE.Mistake("SGRLD(model)", TypeError, "", ""), known)


def test_the_table_has_such_rows_and_a_page_includes_it() -> None:
    shown = re.findall(r"^\| `(.*?)` \| `(\w+)`", EXAMPLE.TABLE.read_text(), re.M)
    assert len(shown) > 20
    known = iter([(mistake.code, mistake.error.__name__) for mistake in ROWS])
    assert all(row in known for row in shown)  # in their order
    pages = Path(EXAMPLE.TABLE).parents[1].glob("*.md")
    assert any("tables/mistakes.md" in page.read_text() for page in pages)


@pytest.mark.parametrize(
    ("make", "args"),
    [(HMCGibbs, (print, ["s"])), (DiscreteHMCGibbs, ()), (MixedHMC, ()), (HMCECS, ())],
)
def test_wrappers_of_numpyro_want_its_own_kernels(make: Any, args: tuple) -> None:
    """As the page says; the remedy on the page is accepted."""
    with pytest.raises(ValueError, match="inner_kernel must be an HMC"):
        make(SGRLD(EXAMPLE.model), *args)


def test_gibbs_takes_the_kernels_in_their_place() -> None:
    kernel = SGRLD(EXAMPLE.model, step_size=0.01, num_steps=1)

    def gibbs_fn(rng_key: Any, gibbs_sites: Any, hmc_sites: Any) -> dict:
        return {"s": 1 + random.uniform(rng_key)}

    both = Gibbs([(CustomGibbs(gibbs_fn), ["s"]), (kernel, None)])
    mcmc = MCMC(both, num_warmup=0, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), *map(jnp.asarray, DATA))
    assert np.all(mcmc.get_samples()["s"] > 1)


# Foreign arguments of kernels that are not ours


class Own(SGKernel):
    """A kernel whose constructor takes anything."""

    def __init__(self, model: Any, **others: Any) -> None:
        super().__init__({"model": model, "step_size": others["rate"]})

    def algorithm(self, settings: Any) -> Any:
        raise NotImplementedError


def test_a_constructor_that_takes_any_name_gets_it() -> None:
    assert Own(EXAMPLE.model, rate=0.5).settings.step_size == 0.5


# init_params


def scaled(X: Any, y: Any) -> None:
    """A scale, a simplex, and a site of two axes."""
    numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
    s = numpyro.sample("s", dist.HalfNormal(1))
    w = numpyro.sample("w", dist.Normal(0, s).expand([2, 1]).to_event(2))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal((X[i] @ w)[:, 0], s), obs=jnp.asarray(y)[i])


DATA = (np.ones((6, 2), np.float32), np.ones(6, np.float32))
VALUES = {"p": jnp.array([0.2, 0.3, 0.5]), "s": jnp.array(0.5), "w": jnp.array([[1.0], [2.0]])}


def test_trees_of_flax_modules() -> None:
    linen = pytest.importorskip("flax.linen")
    from numpyro.contrib.module import random_flax_module

    net = linen.Sequential([linen.Dense(2), linen.Dense(1)])

    def network(X: Any, y: Any) -> None:
        f = random_flax_module("net", net, dist.Normal(0, 1), input_shape=(2,))
        with numpyro.plate("data", X.shape[0]) as i:
            numpyro.sample("y", dist.Normal(f(X[i])[:, 0], 1), obs=jnp.asarray(y)[i])

    variables = net.init(random.key(1), DATA[0])
    for tree in (variables, variables["params"]):
        kernel = SGRLD(network, step_size=1e-4, num_steps=1)
        mcmc = MCMC(kernel, num_warmup=0, num_samples=1, progress_bar=False)
        mcmc.run(random.key(0), *DATA, init_params={"net": tree})
        state = kernel.init(random.key(0), 0, {"net": tree}, DATA, {})
        assert sorted(state.z) == [
            f"net/layers_{k}.{name}" for k in (0, 1) for name in ("bias", "kernel")
        ]
        given = variables["params"]["layers_1"]["kernel"]
        np.testing.assert_array_equal(state.z["net/layers_1.kernel"], given)


def regression(x: np.ndarray, y: np.ndarray | None = None) -> None:
    w = numpyro.sample("w", dist.Normal().expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", x.shape[0]) as i:
        seen = None if y is None else jnp.asarray(y)[i]
        numpyro.sample("y", dist.Normal(jnp.asarray(x)[i] @ w), obs=seen)


def lagged(y: np.ndarray) -> None:
    slope = numpyro.sample("slope", dist.Normal())
    with numpyro.plate("data", len(y) - 1) as i:
        numpyro.sample("y", dist.Normal(slope * jnp.asarray(y)[i]), obs=jnp.asarray(y)[i + 1])


@pytest.mark.parametrize(
    ("shape", "length", "text"),
    [
        ((30, 3), None, "no site of the model is observed, and its argument 'y' is None"),
        ((30, 3), 40, r"the argument 'y' of shape \(40,\) has more rows than the plate 'data'"),
        ((3, 30), 30, r"the argument 'y' of shape \(30,\) has more rows than the plate 'data'"),
    ],
    ids=["y forgotten", "y longer than its plate", "x transposed"],
)
def test_a_call_that_may_be_wrong_is_warned_of(shape: Any, length: Any, text: str) -> None:
    args = np.ones(shape), *([] if length is None else [np.ones(length)])
    with pytest.warns(UserWarning, match=text) as found:
        read(regression, args)
    assert all(x.filename == __file__ for x in found)


def test_a_warning_from_within_numpyro_points_to_the_users_line() -> None:
    with pytest.warns(SamplingWarning, match="off") as found:
        numpyro.handlers.seed(warn_outside, random.key(0))("off")
    assert found[0].filename == __file__


def unindexed(x: np.ndarray, y: np.ndarray) -> None:
    w = numpyro.sample("w", dist.Normal().expand([3]).to_event(1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(x @ w), obs=y)


def test_an_error_about_rows_hides_no_other_traceback() -> None:
    with pytest.raises(ValueError, match="'y' is not indexed by plate 'data'") as caught:
        read(unindexed, (np.ones((30, 3)), np.ones(30)), batch_size=5)
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


def test_rows_and_shifted_rows_are_not_warned_of() -> None:
    read(regression, (np.ones((30, 3)), np.ones(30)))
    read(lagged, (np.ones(30),))


def shares(x: np.ndarray, y: np.ndarray) -> None:
    w = numpyro.sample("w", dist.Normal().expand([x.shape[1], 4]).to_event(2))
    with numpyro.plate("data", len(y)) as i:
        means = jax.nn.softmax(jnp.asarray(x)[i] @ w)
        numpyro.sample("y", dist.Dirichlet(12 * means), obs=jnp.asarray(y)[i])


def test_sums_of_jaxlib() -> None:
    """If this fails, jaxlib has mended its sums, or another version has the error."""
    wrong = jax.default_backend() == "cpu" and jaxlib.__version__ == "0.10.2"
    assert sums_wrongly() == wrong


def test_chains_that_jaxlib_computes_wrongly() -> None:
    keys = random.split(random.key(0), 3)
    x = np.asarray(random.normal(keys[0], (5000, 4)))
    y = np.asarray(random.dirichlet(keys[1], 3 * jnp.ones(4), (5000,)))
    model = read(shares, (x, y))
    position = {"w": 0.3 * random.normal(keys[2], (8, 4, 4))}
    check_lanes(model, {"w": position["w"][:4]})
    if not sums_wrongly():
        check_lanes(model, position)
        return
    with pytest.raises(RuntimeError, match="chain_method='sequential'.*another version"):
        check_lanes(model, position)
    # draws are looked at one by one then
    w = {"w": np.asarray(position["w"])}
    found = pointwise_log_prob(model, w, ["y"])["y"][-1]
    one = jax.jit(lambda draw: model.log_prob(draw, {}, ["y"]))({"w": position["w"][-1]})["y"]
    np.testing.assert_allclose(found, one, rtol=1e-3, atol=1e-3)


def counts(X: np.ndarray, y: np.ndarray) -> None:
    w = numpyro.sample("w", dist.Normal().expand([4]).to_event(1))
    size = numpyro.sample("size", dist.HalfNormal(5))
    with numpyro.plate("data", len(y)) as i:
        mean = jax.nn.sigmoid(jnp.asarray(X)[i] @ w)
        law = dist.BetaBinomial(size * mean, size * (1 - mean), 10)
        numpyro.sample("y", law, obs=jnp.asarray(y)[i])


@pytest.mark.usefixtures("optimised")
def test_gradients_at_draws_that_jaxlib_computes_wrongly() -> None:
    """Those of 8 draws at once are off by as much as they are long."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(20_000, 4)).astype(np.float32), rng.binomial(10, 0.4, 20_000)
    model = read(counts, (X, y.astype(np.float32)))
    draws = {"w": 0.3 * rng.normal(size=(8, 4)), "size": 1 + 0.1 * rng.normal(size=8)}
    draws = {name: x.astype(np.float32) for name, x in draws.items()}
    arrays, _ = gradients_at_draws(model, {name: x[None] for name, x in draws.items()})
    position = {"w": jnp.asarray(draws["w"]), "size": jnp.log(draws["size"])}
    alone = jax.jit(jax.grad(model.energy))({name: x[-1] for name, x in position.items()})
    np.testing.assert_allclose(arrays["grad_U.size"][0, -1], alone["size"], rtol=1e-3)
    if sums_wrongly():
        with pytest.raises(RuntimeError, match="computes the energy, gradient or sites of chain"):
            check_lanes(model, position)


def test_predictions_of_a_guide_are_those_one_by_one() -> None:
    """The log densities of the last of 32 draws in a batch are off by several nats a row."""
    keys = random.split(random.key(0), 3)
    x = np.asarray(random.normal(keys[0], (1200, 2)))
    y = np.asarray(random.dirichlet(keys[1], 3 * jnp.ones(4), (1200,)))
    guide = RiemannianLaplace(shares, "euclidean", mode="euclidean")
    start = {"w": jnp.zeros((2, 4))}
    with pytest.warns(SamplingWarning, match="has not converged"):
        params = guide.fit(keys[2], x, y, init_params=start, max_steps=0)
    guide._told = True  # that the draws are far off
    assert (guide._learned["lanes"] == 1) == sums_wrongly()  # of the fit
    key, _ = random.split(keys[2])
    w = guide.sample_posterior(key, params, sample_shape=32)["w"]
    found = guide.predictive(keys[2], params, x, y, num_samples=32).log_likelihood["y"]
    law = dist.Dirichlet(12 * jax.nn.softmax(x @ w[-1]))
    np.testing.assert_allclose(found[-1], law.log_prob(y), rtol=1e-3, atol=1e-2)


def test_sites_and_predictions_of_chains_that_jaxlib_computes_wrongly() -> None:
    """A run in segments computes predictions of all chains in one program."""
    x = np.random.default_rng(0).normal(3, 1, (20_000, 2)).astype(np.float32)

    def sums(c: jax.Array) -> jax.Array:
        return (x * c).sum(-1) - c.sum(-1)

    def model() -> None:
        c = numpyro.sample("c", dist.Normal().expand([2]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.deterministic("mean", sums(c))

    c = 1 + random.normal(random.key(0), (2, 2))
    mcmc = MCMC(
        NUTS(lambda: numpyro.sample("c", dist.Normal().expand([2]).to_event(1))),
        num_warmup=1, num_samples=1, num_chains=2, chain_method="vectorized", progress_bar=False,
        postprocess_fn=lambda z: sums(z["c"]),
    )  # fmt: skip
    if not sums_wrongly():
        check_lanes(read(model, ()), {"c": c})
        return
    with pytest.raises(RuntimeError, match="energy, gradient or sites of chain 1"):
        check_lanes(read(model, ()), {"c": c})
    with pytest.raises(RuntimeError, match="postprocess_fn of chain 1"):
        run_in_segments(mcmc, random.key(0))
