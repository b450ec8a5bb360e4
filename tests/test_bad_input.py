"""Bad input: each row a typed error whose message says what was expected, what was got, what to do."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC

from numpyro_geom import SGRLD, Monge, RMSprop, Shampoo, Wenzel, constant, cyclical, polynomial

X = random.normal(random.key(0), (40, 2))
Y = X @ jnp.array([1.0, -1.0]) + random.normal(random.key(1), (40,))


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 1.0), obs=None if y is None else y[i])


def counts(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(X[i] @ w)), obs=None if y is None else y[i])


def unindexed_mean(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y[i])


def unindexed_observation(X, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def two_plates(X, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    for name in ("a", "b"):
        with numpyro.plate(name, X.shape[0]) as i:
            numpyro.sample("y_" + name, dist.Normal(mu, 1.0), obs=y[i])


def no_plate(X, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def no_latent(X, y):
    numpyro.sample("y", dist.Normal(0, 1), obs=y)


def discrete(X, y):
    k = numpyro.sample("k", dist.Categorical(jnp.array([0.5, 0.5])))
    w = numpyro.sample("w", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(w + k, 1.0), obs=y)


class NoFromGradient:
    decay = 0.0

    def init(self, position):
        return ()

    def update(self, state, grad):
        return state

    def statistic(self, grad):
        return ()

    def apply_inverse(self, state, vector):
        return vector

    def apply_inverse_sqrt(self, state, vector):
        return vector


def energy(z):
    return 0.5 * jnp.sum(z**2)


CONSTRUCTION = [
    (lambda: SGRLD(), ValueError, "exactly one of `model` and `potential_fn`, got neither"),
    (lambda: SGRLD(model, potential_fn=energy), ValueError, "exactly one of .* got both"),
    (lambda: SGRLD("model"), TypeError, "model must be callable, got str"),
    (lambda: SGRLD(potential_fn=1.0), TypeError, "potential_fn must be callable"),
    (lambda: SGRLD(model, step_size="fast"), ValueError, "'auto', a positive number or a schedule"),
    (lambda: SGRLD(model, step_size=-0.1), ValueError, "-0.1"),
    (lambda: SGRLD(model, step_size=0.0), ValueError, "step"),
    (lambda: SGRLD(model, step_size=float("nan")), ValueError, "nan"),
    (lambda: SGRLD(model, step_size=None), TypeError, "None"),
    (lambda: SGRLD(model, num_steps=0), ValueError, "num_steps must be an integer of at least 1"),
    (lambda: SGRLD(model, num_steps=-3), ValueError, "num_steps .* got -3"),
    (lambda: SGRLD(model, num_steps=2.5), TypeError, "num_steps must be an integer"),
    (lambda: SGRLD(model, num_steps="all"), ValueError, "num_steps must be 'auto' or an integer"),
    (lambda: SGRLD(model, batch_size=0), ValueError, "batch_size must be an integer of at least 1"),
    (lambda: SGRLD(model, batch_size=2.0), TypeError, "batch_size must be an integer"),
    (lambda: SGRLD(model, batch_size=True), TypeError, "batch_size must be an integer"),
    (lambda: SGRLD(model, batch_size={}), TypeError, "maps plate names to rows"),
    (lambda: SGRLD(model, batch_size={"data": -1}), ValueError, r"batch_size\['data'\]"),
    (lambda: SGRLD(potential_fn=energy, batch_size=2), ValueError, "batch_size needs a model"),
    (lambda: SGRLD(model, metric="newton"), ValueError, "newton"),
    (lambda: SGRLD(model, metric=object()), TypeError, "apply_inverse"),
    (lambda: SGRLD(model, metric=Monge), TypeError, "Monge"),
    (lambda: SGRLD(model, gamma="exact"), ValueError, "gamma must be one of"),
    (lambda: SGRLD(model, gamma_estimator="mean"), ValueError, "gamma_estimator must be one of"),
    (lambda: SGRLD(model, gamma_probes=0), ValueError, "gamma_probes .* at least 1"),
    (lambda: SGRLD(model, temperature=-1.0), ValueError, "temperature .* at least 0, got -1"),
    (lambda: SGRLD(model, temperature=float("inf")), ValueError, "temperature must be a finite"),
    (lambda: SGRLD(model, temperature="hot"), TypeError, "temperature must be a number"),
    (lambda: SGRLD(model, batching="shuffle"), ValueError, "batching must be one of"),
    (lambda: SGRLD(model, bias_tolerance=0), ValueError, "bias_tolerance .* above 0"),
    (lambda: SGRLD(model, max_norm=-1), ValueError, "max_norm .* above 0"),
    (lambda: SGRLD(model, init_strategy="median"), TypeError, "init_strategy must be one of"),
    (lambda: SGRLD(model, adjusted=1), TypeError, "adjusted must be True or False"),
    (lambda: SGRLD(model, adjusted=True, gamma="corrected"), ValueError, "constant within a step"),
    (lambda: SGRLD(model, adjusted=True, batch_size=9), ValueError, "needs the full-data energy"),
    (lambda: SGRLD(model, adjusted=True, temperature=0), ValueError, "needs temperature > 0"),
    (lambda: SGRLD(model, adjusted=True, max_norm=9), ValueError, "makes max_norm unnecessary"),
    (
        lambda: SGRLD(model, metric=NoFromGradient(), gamma="auxiliary"),
        TypeError,
        "needs a metric with a method from_gradient",
    ),
    (lambda: RMSprop(decay=1.0), ValueError, "decay"),
    (lambda: RMSprop(decay=-0.1), ValueError, "decay"),
    (lambda: Monge(alpha2=-1.0), ValueError, "alpha2"),
    (lambda: Wenzel(interval=0), ValueError, "interval"),
    (lambda: Shampoo(block_size=0), ValueError, "block_size"),
    (lambda: Shampoo(vector="half"), ValueError, "vector"),
    (lambda: constant(-1.0), ValueError, "-1"),
    (lambda: polynomial(0.1, 0.2, 1.0), ValueError, "0.2"),
    (lambda: cyclical(0.1, 0), ValueError, "period"),
]


@pytest.mark.parametrize(("build", "error", "message"), CONSTRUCTION)
def test_construction(build, error, message):
    with pytest.raises(error, match=message):
        build()


def run(kernel, *args, init_params=None):
    mcmc = MCMC(kernel, num_warmup=2, num_samples=2, progress_bar=False)
    mcmc.run(random.key(0), *args, init_params=init_params)


W = jnp.zeros(2)
STARTS = [
    ({"model": model, "batch_size": 41}, (X, Y), None, ValueError, "larger than plate 'data'"),
    ({"model": model, "batch_size": {"rows": 4}}, (X, Y), None, ValueError, r"unknown .*\['rows'\]"),
    ({"model": two_plates, "batch_size": 4}, (X, Y), None, ValueError, r"exactly one plate.*2"),
    ({"model": no_plate, "batch_size": 4}, (X, Y), None, ValueError, "put the observed site under"),
    ({"model": no_latent}, (X, Y), None, ValueError, "no latent site"),
    ({"model": discrete}, (X, Y), None, ValueError, r"discrete latent sites \['k'\]"),
    ({"model": counts}, (X,), None, ValueError, r"\['y'\].*Pass the data"),
    ({"model": model}, (X[:0], Y[:0]), None, ValueError, "the data are empty"),
    ({"model": model}, (X, Y), {"v": W}, ValueError, r"missing \['w'\], unknown \['v'\]"),
    ({"model": model}, (X, Y), {"w": jnp.zeros(3)}, ValueError, r"shape \(3,\), expected .*\(2,\)"),
    ({"model": model}, (X, Y), [W], TypeError, "must be a dict of unconstrained site values"),
    ({"model": model}, (X, Y), {"w": W * jnp.nan}, ValueError, r"init_params\['w'\] is not finite"),
    ({"potential_fn": lambda z: jnp.sum(jnp.log(z))}, (), W - 1, ValueError, "energy is not finite"),
    ({"potential_fn": energy}, (), None, ValueError, "init_params is needed with potential_fn"),
    ({"potential_fn": energy}, (), jnp.zeros(2, int), TypeError, "floating point, got dtype int"),
    ({"potential_fn": energy}, (), {}, ValueError, "holds no array"),
    ({"potential_fn": lambda z: z}, (), W, ValueError, r"scalar, got shape \(2,\)"),
    ({"potential_fn": lambda z: jnp.sum(z > 0)}, (), W, ValueError, "floating point scalar"),
    (
        {"potential_fn": lambda z, rng_key: energy(z), "adjusted": True},
        (),
        W,
        ValueError,
        "potential_fn takes a key",
    ),
    (
        {"model": model, "batch_size": 2, "gamma": "auxiliary"},
        (X, Y),
        None,
        ValueError,
        "splits a batch in three",
    ),
    *[
        (
            {"model": unindexed, "batch_size": rows},
            (X, Y),
            None,
            ValueError,
            r"site 'y' is not indexed by plate 'data'.* 40 .*Index every array",
        )
        for unindexed in (unindexed_mean, unindexed_observation)
        for rows in (1, 2, 10)
    ],
]


@pytest.mark.parametrize(("settings", "args", "init_params", "error", "message"), STARTS)
def test_start(settings, args, init_params, error, message):
    settings = dict(settings)
    kernel = SGRLD(settings.pop("model", None), step_size=0.01, num_steps=1, **settings)
    with pytest.raises(error, match=message):
        run(kernel, *args, init_params=init_params)


def test_sample_before_init():
    with pytest.raises(RuntimeError, match="`init` must run before `sample`"):
        SGRLD(model).sample(None, (), {})


def test_wrap_model_needs_a_model():
    with pytest.raises(ValueError, match="wrap_model needs a kernel with a model"):
        SGRLD(potential_fn=energy).wrap_model(lambda m: m)


def test_double_precision_data_in_a_single_precision_run():
    # not an error: NumPy data of another precision and 64-bit starts are converted
    kernel = SGRLD(model, step_size=0.001, num_steps=1, batch_size=8)
    run(kernel, np.asarray(X, np.float64), np.asarray(Y, np.float64), init_params={"w": np.zeros(2)})
