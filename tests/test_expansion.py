"""Parameter expansion: the joint density of W's factors, the law of W, kernels, and errors.

Given the factors, V -> W is linear. So the density can be checked without chains: it must be the
model's density of W, times q of the factors, times the Jacobian of V -> W by autodiff.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.initialization import init_to_value
from numpyro.infer.util import log_density
from targets import SIGMAS, linear_moments, regression_data, vectorized
from tiers import short

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD, Expanded, RiemannianLaplace, to_inference_data
from numpyro_geom.diagnostics import SamplingWarning
from numpyro_geom.model.expansion import Product

ROUNDING = 1e-9
"""Relative, of sums of some hundred terms in float64."""


def model() -> None:
    numpyro.sample("w", dist.Cauchy(0.3, 2).expand([2, 3]))
    numpyro.sample("kernel", dist.Logistic(0, 1).expand([2, 2, 2, 3]).to_event(4))
    numpyro.sample("v", dist.Logistic(0, 1).expand([3]).to_event(1))
    with numpyro.plate("groups", 4):
        numpyro.sample("stack", dist.Cauchy(0, 1).expand([2, 3]).to_event(2))
        numpyro.sample("vectors", dist.Logistic(0, 1).expand([3]).to_event(1))


FORMS: dict[str, tuple[str, Expanded]] = {
    "full": ("w", Expanded()),
    "left": ("w", Expanded(right=0)),
    "several": ("w", Expanded(left=2, right=3)),
    "low rank": ("w", Expanded(rank=1, factor_scale=0.4)),
    "fraction": ("w", Expanded(left=2, rank=0.7)),
    "kernel": ("kernel", Expanded()),
    "kernel, low rank": ("kernel", Expanded(rank=1, right=2)),
    "vector": ("v", Expanded(left=0)),
    "plate": ("stack", Expanded()),
    "plate, low rank": ("stack", Expanded(rank=2)),
    "plate of vectors": ("vectors", Expanded(left=0)),
}
ONE_AXIS_EACH = ("left", "fraction", "vector", "kernel, low rank", "plate, low rank")
"""Forms in the default run: each kind of site, and each way to give sides and ranks, once."""
forms = pytest.mark.parametrize(
    ("site", "expanded"),
    short(FORMS.values(), kept=[FORMS[name] for name in ONE_AXIS_EACH]),
    ids=FORMS.keys(),
)


def drawn(model: Callable, seed: int = 0) -> dict[str, jax.Array]:
    """Values of all sites of a draw from the prior."""
    trace = handlers.trace(handlers.seed(model, random.key(seed))).get_trace()
    return {name: x["value"] for name, x in trace.items() if x["type"] != "plate"}


def gap(site: str, expanded: Expanded) -> tuple[float, float]:
    """The log density of the expanded model minus what it should be, and the log Jacobian."""
    new = handlers.reparam(model, config={site: expanded})
    values = jax.jit(lambda: drawn(new))()
    latent = {name: x for name, x in values.items() if name != site}
    names = jax.eval_shape(lambda: drawn(model))
    found = jax.jit(lambda z: log_density(new, (), {}, z)[0])(latent)
    own = jax.jit(lambda z: log_density(model, (), {}, z)[0])({n: values[n] for n in names})
    factors = [x for n, x in latent.items() if n.startswith(f"{site}_expanded_") and n[-1] != "V"]
    log_q = sum(float(dist.Normal(0, 1).log_prob(x).sum()) for x in factors)

    def product(v: jax.Array) -> jax.Array:
        given = handlers.substitute(new, data={**latent, f"{site}_expanded_V": v})
        return handlers.trace(given).get_trace()[site]["value"]

    v = latent[f"{site}_expanded_V"]
    jacobian = jax.jit(jax.jacobian(product))(v).reshape(v.size, v.size)
    log_det = float(np.linalg.slogdet(jacobian)[1])
    return float(found - own) - log_q - log_det, log_det


@forms
def test_the_density_is_that_of_the_product(x64: None, site: str, expanded: Expanded) -> None:
    off, log_det = gap(site, expanded)
    assert abs(log_det) > 0.01
    assert abs(off) < ROUNDING * 100


@pytest.mark.parametrize("form", ["full", "kernel, low rank", "plate"])
def test_a_determinant_that_is_left_out_is_seen(x64: None, monkeypatch: Any, form: str) -> None:
    whole = Product.log_abs_det_jacobian

    def without_one(self: Product, x: Any, y: Any, intermediates: Any = None) -> Any:
        return whole(Product(self.lefts, (), self.low_rank, self.event_dim), x, y)

    monkeypatch.setattr(Product, "log_abs_det_jacobian", without_one)
    assert abs(gap(*FORMS[form])[0]) > 0.01


@forms
def test_draws_of_the_prior_are_those_of_the_model(
    x64: None, site: str, expanded: Expanded
) -> None:
    """Chi-squared of the quartiles of 4,000 draws: 3 degrees of freedom for each entry."""
    new = handlers.reparam(model, config={site: expanded})

    @jax.jit
    @jax.vmap
    def draw(rng_key: jax.Array) -> jax.Array:
        return handlers.trace(handlers.seed(new, rng_key)).get_trace()[site]["value"]

    law = handlers.trace(handlers.seed(model, random.key(0))).get_trace()[site]["fn"]
    while hasattr(law, "base_dist"):
        law = law.base_dist
    values = np.asarray(draw(random.split(random.key(1), 4000)), float).reshape(4000, -1)
    edges = np.asarray(law.icdf(np.array([0.25, 0.5, 0.75])[:, None] * np.ones(values.shape[1])))
    counts = [np.sum(np.sum(values > edges[:, None], 0) == k, 0) for k in range(4)]
    chi2 = np.sum((np.array(counts) - 1000.0) ** 2 / 1000.0, 0)
    # a false alarm for one of 24 entries in 11 forms: 24 x 11 x 1e-7 and less
    assert chi2.max() < 35, chi2


def test_order_of_the_products(x64: None) -> None:
    new = handlers.reparam(model, config={"w": Expanded(left=2, right=2, factor_scale=0.5)})
    values = drawn(new)

    def factor(name: str) -> np.ndarray:
        x = np.asarray(values[f"w_expanded_{name}"])
        return np.eye(len(x)) + 0.5 / math.sqrt(len(x)) * x

    p1, p2, q1, q2 = map(factor, ("P1", "P2", "Q1", "Q2"))
    np.testing.assert_allclose(values["w"], p2 @ p1 @ values["w_expanded_V"] @ q1 @ q2)


def test_a_low_rank_forms_no_square_matrix() -> None:
    def wide() -> None:
        numpyro.sample("w", dist.Normal(0, 1).expand([50, 3]).to_event(2))

    new = handlers.reparam(wide, config={"w": Expanded(right=0, rank=2)})
    params = {"w_expanded_P1": jnp.zeros((5, 50)), "w_expanded_V": jnp.ones((50, 3))}
    energy = jax.value_and_grad(lambda z: log_density(new, (), {}, z)[0])
    text = str(jax.make_jaxpr(energy)(params))
    assert "f32[50,3]" in text
    assert "f32[50,50]" not in text


def test_a_function_of_names_leaves_the_new_sites_alone() -> None:
    new = handlers.reparam(model, config=lambda site: Expanded(left=0))
    names = [name for name in drawn(new) if "_expanded_" in name]
    assert sorted(names) == sorted(
        f"{site}_expanded_{x}"
        for site in ("w", "kernel", "v", "stack", "vectors")
        for x in ("V", "Q1")
    )


@pytest.mark.slow
def test_law_at_a_temperature_by_quadrature(x64: None) -> None:
    """W = p v q with an energy that is not quadratic: exp(-E / tau) integrated over p and q."""

    def scalar() -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([1, 1]).to_event(2))[0, 0]
        numpyro.factor("rows", -((w**2 - 1) ** 2) - 0.3 * w)

    temperature, expanded = 0.5, handlers.reparam(scalar, config={"w": Expanded()})
    grid = jnp.linspace(-8.0, 8.0, 400)  # p = 1 + grid / 4, which is never 0 here

    @jax.vmap
    def density(w: jax.Array) -> jax.Array:
        def at(p: jax.Array, q: jax.Array) -> jax.Array:
            product = (1 + p / 4) * (1 + q / 4)
            params = {
                "w_expanded_P1": p[None, None],
                "w_expanded_Q1": q[None, None],
                "w_expanded_V": (w / product)[None, None],
            }
            log_joint, _ = log_density(expanded, (), {}, params)
            return jnp.exp(log_joint / temperature) / jnp.abs(product)

        return jnp.sum(jax.vmap(jax.vmap(at, (None, 0)), (0, None))(grid, grid))

    w = jnp.linspace(-1.8, 1.8, 13)
    plain = jax.vmap(lambda w: log_density(scalar, (), {}, {"w": w[None, None]})[0])(w)
    ratio = density(w) / jnp.exp(plain / temperature)
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-6)  # of the trapezoidal rule


def test_the_papers_model_is_a_product_of_gaussians(x64: None) -> None:
    def by_hand() -> None:
        v = numpyro.sample("v", dist.Normal(0, 1.5).expand([2, 3]).to_event(2))
        p = numpyro.sample("p", dist.Normal(0, 0.5**0.5).expand([2, 2]).to_event(2))
        q = numpyro.sample("q", dist.Normal(0, 0.5**0.5).expand([3, 3]).to_event(2))
        numpyro.factor("rows", -jnp.sum((p @ v @ q) ** 4))

    def plain() -> None:
        w = numpyro.sample("w", dist.Cauchy(0, 1).expand([2, 3]))
        numpyro.factor("rows", -jnp.sum(w**4))

    new = handlers.reparam(plain, config={"w": Expanded(factor_scale=0.5**0.5, prior_scale=1.5)})
    values = drawn(new)
    values.pop("w")
    p, q, v = (values[f"w_expanded_{x}"] for x in ("P1", "Q1", "V"))
    exact, _ = log_density(by_hand, (), {}, {"p": p + np.eye(2), "q": q + np.eye(3), "v": v})
    values.pop("rows", None)
    found, _ = log_density(new, (), {}, values)
    np.testing.assert_allclose(found, exact, rtol=ROUNDING)


# --- kernels and guides

X, Y = regression_data(400, 3)


def linear(X: Any, y: Any = None) -> None:
    """`targets.linear`, with its weights as a matrix of one column."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1], 1]).to_event(2))[:, 0]
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 0.5), obs=None if y is None else y[i])


EXPANDED = handlers.reparam(linear, config={"w": Expanded()})
KERNELS: dict[str, Callable] = {
    "NUTS": partial(NUTS, EXPANDED),
    "GGMC": partial(GGMC, EXPANDED),
    "SGHMC": partial(SGHMC, EXPANDED, batch_size=100),
    "SGNHT": partial(SGNHT, EXPANDED),
    "SGRLD": partial(SGRLD, EXPANDED),
}


def moments_of_w(draws: Any, effective: float) -> None:
    """Means and variances of W are those of the model without factors."""
    mean, covariance = linear_moments(X, Y)
    sd = np.sqrt(np.diag(covariance))
    scores = (np.asarray(draws, float).reshape(-1, 3) - mean) / sd
    assert np.abs(scores.mean(0)).max() < SIGMAS / math.sqrt(effective)
    # a tenth is the bias tolerance of automatic steps
    assert np.abs(scores.var(0) - 1).max() < 0.1 + SIGMAS * math.sqrt(2 / effective)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_draw_w_from_the_models_law(name: str) -> None:
    mcmc = vectorized(KERNELS[name](), 500, 1000, 4)
    mcmc.run(random.key(0), X, Y)
    draws = mcmc.get_samples(group_by_chain=True)
    assert draws["w"].shape == (4, 1000, 3, 1)
    effective = numpyro.diagnostics.effective_sample_size(np.asarray(draws["w"]))
    assert effective.min() > 400
    moments_of_w(draws["w"], effective.min())
    # the factors have the law q, apart from W
    q = np.asarray(draws["w_expanded_P1"]).reshape(-1, 9)
    effective = numpyro.diagnostics.effective_sample_size(np.asarray(draws["w_expanded_P1"])).min()
    assert np.abs(q.mean(0)).max() < SIGMAS / math.sqrt(effective)
    if name != "NUTS":
        assert "w" in to_inference_data(mcmc)["posterior"]


@pytest.mark.slow
def test_minibatches_and_a_start_at_the_identity() -> None:
    values = {
        "w_expanded_V": np.ones((3, 1)),
        "w_expanded_P1": np.zeros((3, 3)),
        "w_expanded_Q1": np.zeros((1, 1)),
    }
    kernel = SGHMC(
        EXPANDED,
        batch_size=50,
        step_size=1e-6,
        friction=1.0,
        num_steps=2,
        init_strategy=init_to_value(values=values),
    )
    mcmc = MCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), X, Y)
    np.testing.assert_allclose(mcmc.get_samples()["w"], np.ones((2, 3, 1)), atol=1e-4)


@pytest.mark.slow
def test_the_guide_draws_w_from_the_models_law() -> None:
    guide = RiemannianLaplace(EXPANDED)
    with pytest.warns(SamplingWarning, match="the energy curves between"):
        params = guide.fit(random.key(0), X, Y)
    draws = guide.sample_posterior(random.key(1), params, X, Y, sample_shape=(1000,))
    moments_of_w(draws["w"], 1000)


# --- bad input


def test_settings_are_values() -> None:
    expanded = Expanded(left=2, rank=0.5, prior_scale=1.0)
    again = pickle.loads(pickle.dumps(expanded))
    assert again == expanded
    assert hash(again) == hash(expanded)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"left": -1}, ValueError, "left must be an integer of at least 0, got -1"),
        ({"right": 1.5}, TypeError, "right must be an integer"),
        ({"left": 0, "right": 0}, ValueError, "both 0: expected at least one factor"),
        ({"rank": 0}, ValueError, "a fraction below 1, must be an integer of at least 1"),
        ({"rank": 1.5}, TypeError, "a fraction below 1, must be an integer"),
        ({"rank": "low"}, TypeError, "a fraction below 1, must be an integer"),
        ({"factor_scale": 0}, ValueError, "factor_scale must be a finite number above 0"),
        ({"prior_scale": "wide"}, TypeError, "prior_scale must be a number"),
    ],
)
def test_bad_settings(settings: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        Expanded(**settings)


def in_a_plate() -> None:
    with numpyro.plate("rows", 2):
        numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))


@pytest.mark.parametrize(
    ("model", "expanded", "match"),
    [
        (lambda: numpyro.sample("w", dist.Normal(0, 1)), Expanded(left=0), r"shape \(\): expected"),
        (lambda: numpyro.sample("w", dist.Normal(jnp.zeros(3), 1)), Expanded(), "vector with left"),
        (
            lambda: numpyro.sample("w", dist.HalfNormal(jnp.ones((2, 2)))),
            Expanded(),
            "'w' is on .*: expected a site whose values are any real numbers",
        ),
        (
            lambda: numpyro.sample("w", dist.Normal(jnp.zeros((2, 2)), 1), obs=jnp.ones((2, 2))),
            Expanded(),
            "'w' is observed",
        ),
        (
            lambda: numpyro.sample("w", dist.Normal(jnp.zeros((2, 3)), 1)),
            Expanded(rank=3),
            "rank is 3, and the side of 'w_expanded_P1' has dimension 2",
        ),
        (in_a_plate, Expanded(), "axes of a plate among those to expand"),
    ],
    ids=["scalar", "vector", "bounds", "observed", "rank", "plate"],
)
def test_sites_that_cannot_be_expanded(model: Callable, expanded: Expanded, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        handlers.seed(handlers.reparam(model, config={"w": expanded}), random.key(0))()
