"""The Fisher metric of NumPyro models against dense formulas, and its derivatives by autodiff."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.util import initialize_model
from tiers import short

from numpyro_geom import RiemannianLaplace
from numpyro_geom.laplace.information import form as forms
from numpyro_geom.laplace.information.form import (
    Structure,
    dependence,
    learn_structure,
    likelihood_form,
)
from numpyro_geom.laplace.metrics import (
    conjugate_gradients,
    dense_metric,
    expected_prior,
    fisher_form,
    fisher_metric,
    hessian_prior,
)
from numpyro_geom.laplace.predictive import FlatPosterior
from numpyro_geom.model.model import read

pytestmark = pytest.mark.usefixtures("x64")

ROWS, COLUMNS = 12, 3


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """A posterior and a position on it."""

    posterior: FlatPosterior
    theta: jax.Array

    @property
    def structure(self) -> Structure:
        return self.posterior.structure


def setting(model: Callable, *args: Any, batch_size: Any = None, learn: bool = True) -> Setting:
    data = read(model, args, batch_size=batch_size)
    with handlers.seed(rng_seed=0):
        info = initialize_model(random.key(0), model, model_args=args)
    position = info.param_info.z
    start, unravel = ravel_pytree(position)
    structure = learn_structure(data, position) if learn else Structure()
    settings = RiemannianLaplace(model, prior_metric="hessian", rtol=1e-9).settings
    posterior = FlatPosterior(data, unravel, start.size, settings, structure)
    theta = start + 0.3 * random.normal(random.key(1), start.shape)
    return Setting(posterior, theta)


def inputs() -> jax.Array:
    return random.normal(random.key(5), (ROWS, COLUMNS))


def logistic(X: jax.Array, y: jax.Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 2).expand([COLUMNS]).to_event(1))
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


def poisson(X: jax.Array, y: jax.Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 2).expand([COLUMNS]).to_event(1))
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(X[i] @ w)), obs=y[i])


def network(X: jax.Array, y: jax.Array) -> None:
    """A network with two hidden units and its own noise scale."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([COLUMNS, 2]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.LogNormal(0, 1))
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(jnp.tanh(X[i] @ w) @ v, s), obs=y[i])


def softmax(X: jax.Array, y: jax.Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([COLUMNS, 4]).to_event(2))
    with numpyro.plate("rows", X.shape[0]) as i:
        numpyro.sample("y", dist.Categorical(logits=jnp.tanh(X[i] @ w)), obs=y[i])


def hierarchy(y: jax.Array) -> None:
    """Group means with a common mean and spread; the spread is a HalfNormal, in log space."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1.5))
    with numpyro.plate("groups", y.shape[0], dim=-2):
        m = numpyro.sample("m", dist.Normal(mu, tau))
        with numpyro.plate("members", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(m, 0.5), obs=y)


def two_sites(X: jax.Array, y: jax.Array) -> None:
    """Masks, scales, two observed sites, a simplex and a factor."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([COLUMNS]).to_event(1))
    p = numpyro.sample("p", dist.Dirichlet(jnp.array([2.0, 3.0, 4.0])))
    numpyro.factor("push", -0.1 * jnp.sum(w**4))
    with numpyro.plate("rows", X.shape[0]) as i, handlers.scale(scale=3.0):
        with handlers.mask(mask=jnp.arange(X.shape[0])[i] % 2 == 0):
            numpyro.sample("y", dist.Poisson(jnp.exp(X[i] @ w)), obs=y[i])
    numpyro.sample("z", dist.Categorical(probs=p), obs=1)


def counts() -> jax.Array:
    return random.poisson(random.key(6), 1.5, (ROWS,))


def binary() -> jax.Array:
    return random.bernoulli(random.key(6), 0.4, (ROWS,)).astype(float)


def classes() -> jax.Array:
    return random.randint(random.key(6), (ROWS,), 0, 4)


def groups() -> jax.Array:
    return random.normal(random.key(7), (4, 3))


MODELS: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "logistic": (logistic, lambda: (inputs(), binary())),
    "poisson": (poisson, lambda: (inputs(), counts())),
    "network": (network, lambda: (inputs(), inputs()[:, 0])),
    "softmax": (softmax, lambda: (inputs(), classes())),
    "hierarchy": (hierarchy, lambda: (groups(),)),
    "two sites": (two_sites, lambda: (inputs(), counts())),
}


@functools.cache
def known(name: str, **options: Any) -> Setting:
    """The setting of one of `MODELS`, made once for all tests."""
    model, data = MODELS[name]
    return setting(model, *data(), **options)


@functools.cache
def metric_of(s: Setting, prior: str = "hessian") -> Any:
    make = {"hessian": hessian_prior, "expected": expected_prior}[prior]
    metric = fisher_form(s.posterior, make(s.posterior))
    # one program each: operation by operation, most of the time would be compilation
    return metric._replace(
        product=jax.jit(metric.product), force=jax.jit(metric.force), dense=jax.jit(metric.dense)
    )


# --- whole metrics against formulas written by hand


def test_logistic_and_poisson_have_the_metric_of_generalised_linear_models() -> None:
    X = inputs()
    s = known("logistic")
    p = jax.nn.sigmoid(X @ s.theta)
    expected = X.T @ (X * (p * (1 - p))[:, None]) + jnp.eye(COLUMNS) / 4
    np.testing.assert_allclose(metric_of(s).dense(s.theta), expected, rtol=1e-12)
    s = known("poisson")
    expected = X.T @ (X * jnp.exp(X @ s.theta)[:, None]) + jnp.eye(COLUMNS) / 4
    np.testing.assert_allclose(metric_of(s).dense(s.theta), expected, rtol=1e-12)


def test_a_gaussian_network_has_jacobians_over_the_variance_and_two_per_row_for_the_scale() -> None:
    X = inputs()
    s = known("network")

    def mean(theta: jax.Array) -> jax.Array:
        z = s.posterior.unravel(theta)
        return jnp.tanh(X @ z["w"]) @ z["v"]

    jacobian = jax.jit(jax.jacobian(mean))(s.theta)
    noise = jnp.exp(s.posterior.unravel(s.theta)["s"])
    of_scale = s.posterior.unravel(jnp.arange(s.theta.size))["s"] == jnp.arange(s.theta.size)
    # u = log s: F = 2 / s^2 (ds/du)^2 = 2 per row; all priors are standard normal in u
    expected = jacobian.T @ jacobian / noise**2 + jnp.diag(1.0 + 2 * ROWS * of_scale)
    np.testing.assert_allclose(metric_of(s).dense(s.theta), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_a_softmax_network_has_the_covariance_of_its_classes_between_jacobians() -> None:
    X = inputs()
    s = known("softmax")

    def logits(theta: jax.Array) -> jax.Array:
        return jnp.tanh(X @ s.posterior.unravel(theta)["w"])

    @jax.jit
    def by_hand(theta: jax.Array) -> jax.Array:
        jacobian, p = jax.jacobian(logits)(theta), jax.nn.softmax(logits(theta))
        middle = jax.vmap(jnp.diag)(p) - p[:, :, None] * p[:, None, :]
        return jnp.einsum("nki,nkl,nlj->ij", jacobian, middle, jacobian) + jnp.eye(theta.size)

    expected = by_hand(s.theta)
    np.testing.assert_allclose(metric_of(s).dense(s.theta), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_the_expected_prior_of_a_hierarchy_couples_values_with_their_location_alone() -> None:
    s = known("hierarchy")
    names = list(s.posterior.unravel(s.theta))
    assert names == ["m", "mu", "tau"]
    tau = jnp.exp(s.posterior.unravel(s.theta)["tau"])
    # m: 1/tau^2 of its own and 3/.25 of the data; mu: 1/4 and 4/tau^2 of the groups; u = log tau:
    # 2 of the HalfNormal and 2 per group; m and mu together: -1/tau^2, as in the Hessian
    expected = jnp.diag(jnp.array([*[1 / tau**2 + 3 / 0.25] * 4, 1 / 4 + 4 / tau**2, 2.0 + 2 * 4]))
    expected = expected.at[:4, 4].set(-1 / tau**2).at[4, :4].set(-1 / tau**2)
    found = metric_of(s, "expected").dense(s.theta)
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)
    hessian = metric_of(s).dense(s.theta)
    assert np.max(np.abs(hessian[:5, 5])) > 0.1  # and the Hessian couples them with tau


def test_masks_scales_factors_and_several_sites_are_counted() -> None:
    X = inputs()
    s = known("two sites")

    def split(theta: jax.Array) -> tuple[jax.Array, jax.Array]:
        z = s.posterior.unravel(theta)
        return z["w"], dist.biject_to(dist.constraints.simplex)(z["p"])

    w, p = map(np.asarray, jax.jit(split)(s.theta))
    kept = 3.0 * (np.arange(ROWS) % 2 == 0)
    to_w, to_p = map(np.asarray, jax.jit(jax.jacobian(split))(s.theta))
    X = np.asarray(X)
    rate = np.exp(X @ w) * kept
    data = to_w.T @ (X.T @ (X * rate[:, None])) @ to_w + to_p.T @ np.diag(1 / p) @ to_p
    prior = jax.jit(hessian_prior(s.posterior).dense)(s.theta)
    np.testing.assert_allclose(metric_of(s).dense(s.theta) - prior, data, rtol=1e-9, atol=1e-10)
    # the factor is part of the prior: 1.2 w^2 on the diagonal beside the 1 of the normal
    np.testing.assert_allclose(to_w @ prior @ to_w.T, jnp.diag(1 + 1.2 * w**2), atol=1e-10)


# --- products, forces and solves agree with the dense matrix and with autodiff of it


@pytest.mark.parametrize(
    ("name", "prior"),
    short(
        [(name, "hessian") for name in MODELS]
        + [("hierarchy", "expected"), ("two sites", "expected")],
        kept=[
            ("logistic", "hessian"),
            ("network", "hessian"),
            ("softmax", "hessian"),
            ("two sites", "expected"),
        ],
    ),
)
def test_product_and_force_are_those_of_the_dense_metric(name: str, prior: str) -> None:
    s = known(name)
    metric = metric_of(s, prior)
    v = random.normal(random.key(3), s.theta.shape)
    by_autodiff = dense_metric(metric.dense)

    @jax.jit
    def both(theta: jax.Array, v: jax.Array) -> tuple:
        forces = metric.force(theta, v), by_autodiff.force(theta, v)
        return metric.product(theta, v), metric.dense(theta) @ v, *forces

    product, dense_product, force, dense_force = both(s.theta, v)
    np.testing.assert_allclose(product, dense_product, atol=1e-10 * np.max(np.abs(dense_product)))
    np.testing.assert_allclose(force, dense_force, atol=1e-8 * np.max(np.abs(dense_force)))


@pytest.mark.parametrize(
    "name", short(["logistic", "network", "two sites"], kept=["logistic", "network"])
)
def test_what_is_learned_of_a_model_changes_no_result(name: str) -> None:
    plain, learned = known(name, learn=False), known(name)
    v = random.normal(random.key(3), plain.theta.shape)
    for function in ("product", "force"):
        np.testing.assert_allclose(
            getattr(metric_of(learned), function)(plain.theta, v),
            getattr(metric_of(plain), function)(plain.theta, v),
            rtol=1e-9,
            atol=1e-9,
        )
    np.testing.assert_allclose(
        metric_of(learned).dense(plain.theta), metric_of(plain).dense(plain.theta), atol=1e-11
    )
    assert learned.posterior.num_outputs <= plain.posterior.num_outputs


def test_the_structure_of_a_linear_model_with_a_known_scale_is_found() -> None:
    def linear(X: jax.Array, y: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([COLUMNS]).to_event(1))
        with numpyro.plate("rows", X.shape[0]) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 0.3), obs=y[i])

    s = setting(linear, inputs(), binary())
    # of mean and scale only the mean varies: one component of two is left
    assert sorted(s.structure.constant) == [False, True]  # in an order that NumPyro does not fix
    assert s.structure.diagonal
    assert s.structure.affine
    assert s.posterior.num_outputs == ROWS
    s = known("network")
    assert not any(s.structure.constant)
    assert not s.structure.affine
    assert not s.structure.diagonal
    assert not known("softmax").structure.diagonal


def test_conjugate_gradients_solve_as_cholesky_does() -> None:
    s = setting(softmax, inputs()[:2], classes()[:2])  # 12 dimensions, 6 to 8 outputs
    posterior = dataclasses.replace(s.posterior, diagonal_prior=True)
    b = random.normal(random.key(4), s.theta.shape)
    exact = np.linalg.solve(metric_of(s).dense(s.theta), b)

    @functools.partial(jax.jit, static_argnums=0)
    def solve(solver: str, theta: jax.Array, b: jax.Array) -> jax.Array:
        settings = dataclasses.replace(posterior.settings, solver=solver)
        chosen = dataclasses.replace(posterior, settings=settings)
        return fisher_metric(chosen, theta + 0.1).solver(theta)(b)

    for solver in ("cholesky", "cg"):
        np.testing.assert_allclose(solve(solver, s.theta, b), exact, rtol=1e-7, atol=1e-9)


def test_conjugate_gradients_that_do_not_converge_give_nan() -> None:
    eigenvalues = jnp.logspace(-8, 8, 3000)
    b = random.normal(random.key(0), eigenvalues.shape)
    found = jax.jit(lambda b: conjugate_gradients(lambda v: eigenvalues * v, b, 1e-9))(b)
    assert bool(jnp.all(jnp.isnan(found)))


def test_parts_of_the_rows_add_up_to_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numpyro_geom.model.model.num_at_once", lambda _: 5)  # 12 rows: 4 + 4 + 4
    whole, parts = known("logistic"), known("logistic", batch_size=4)
    v = random.normal(random.key(3), whole.theta.shape)
    for function in ("product", "force"):
        np.testing.assert_allclose(
            getattr(metric_of(parts), function)(whole.theta, v),
            getattr(metric_of(whole), function)(whole.theta, v),
            rtol=1e-11,
        )
    np.testing.assert_allclose(
        metric_of(parts).dense(whole.theta), metric_of(whole).dense(whole.theta), rtol=1e-12
    )


@pytest.mark.parametrize("batch_size", [None, 4])
def test_perturbations_have_the_metric_as_covariance(
    batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numpyro_geom.model.model.num_at_once", lambda _: 5)
    s = known("logistic", **({} if batch_size is None else {"batch_size": batch_size}))
    metric = metric_of(s)
    count = 100_000
    draws = jax.jit(jax.vmap(lambda key: metric.perturb(s.theta, key)))(
        random.split(random.key(0), count)
    )
    factor = jnp.linalg.cholesky(metric.dense(s.theta))
    white = jax.scipy.linalg.solve_triangular(factor, draws.T, lower=True)
    covariance = white @ white.T / count
    # entries have standard deviation sqrt(2 / n) on and sqrt(1 / n) off the diagonal
    assert float(jnp.max(jnp.abs(covariance - jnp.eye(COLUMNS)))) < 4.5 * (2 / count) ** 0.5


# --- what a function's outputs depend on


def test_dependence_looks_into_calls_and_is_careful_about_loops() -> None:
    def fn(a: jax.Array, b: jax.Array) -> tuple:
        inner = jax.jit(lambda x, y: (x + 1, y * 2))
        left, right = inner(a, b)
        looped = jax.lax.fori_loop(0, 3, lambda i, c: (c[0] + 1, c[1]), (a, b))[0]
        return left, right, jnp.zeros(2), looped, a * b

    found = dependence(fn, jnp.ones(()), jnp.ones(()))
    assert found[:3] == [frozenset({0}), frozenset({1}), frozenset()]
    assert 0 in found[3]
    assert found[4] == {0, 1}


def test_products_are_exact_for_a_dictionary_of_sites() -> None:
    X = inputs()
    form = likelihood_form(read(network, (X, X[:, 0])))
    position = {"w": jnp.ones((COLUMNS, 2)), "v": jnp.ones(2), "s": jnp.zeros(())}
    out, w = jax.jit(lambda x: (forms.product(form, x, x, {}), forms.root_product(form, x, x, {})))(
        position
    )
    assert jax.tree.map(jnp.shape, out) == jax.tree.map(jnp.shape, position)
    inner = sum(jnp.vdot(out[k], position[k]) for k in position)
    np.testing.assert_allclose(inner, jnp.vdot(w, w), rtol=1e-12)
