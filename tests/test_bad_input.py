"""Bad input: each row of one table has a mistake, the type of its error, and its message.

The message must say what was expected, what was got and what to do.
"""

from __future__ import annotations

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
from numpyro.infer import init_to_value
from targets import half_square, linear, logistic, normal_mean

from numpyro_geom import GGMC, SGHMC, SGNHT, SGRLD, Metric, Monge, RMSprop, Shampoo, cyclical
from numpyro_geom._checks import check_int, check_number
from numpyro_geom.baselines import ISGD, AdamSGLD

Y = np.random.default_rng(0).normal(size=12)
X = np.random.default_rng(1).normal(size=(12, 2))


# --- models with a mistake in them


def maybe_observed(y: Any = None) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", 12) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=None if y is None else y[i])


def two_tables(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("first", 12) as i:
        numpyro.sample("y1", dist.Normal(mu, 1), obs=y[i])
    with numpyro.plate("second", 12) as i:
        numpyro.sample("y2", dist.Normal(mu, 1), obs=y[i])


def discrete_latent(y: Any) -> None:
    k = numpyro.sample("k", dist.Poisson(2.0))
    numpyro.sample("mu", dist.Normal(k, 1))
    with numpyro.plate("data", 12) as i:
        numpyro.sample("y", dist.Normal(k, 1), obs=y[i])


def unindexed_inputs(X: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", 12) as i:
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y[i])


def unindexed_response(X: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", 12) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=y)


def unindexed_both(X: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", 12):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def unindexed_mask(X: Any, y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", 12) as i, handlers.mask(mask=X[:, 0] > 0):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def unindexed_scale(X: Any, y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", 12) as i, handlers.scale(scale=X[:, 0] ** 2):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def unindexed_prior(X: Any, y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", 12) as i:
        z = numpyro.sample("z", dist.Normal(mu + X[:, 0], 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])


def plate_at_minus_two(columns: Callable) -> Callable:
    """A model whose values are ``columns`` of the rows."""

    def of_columns(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        with numpyro.plate("data", 12, dim=-2) as i:
            numpyro.sample("y", dist.Normal(mu, 1).expand([1, 1]), obs=columns(y[i]))

    return of_columns


def row_of_inputs(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", 12, dim=-2) as i:
        numpyro.sample("y", dist.Normal(mu + y[i], 1), obs=y[i][:, None])


def column_of_means(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", 12) as i:
        numpyro.sample("y", dist.Normal(mu + 0 * y[i][:, None], 1), obs=y[i])


def column_of_factors(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", 12) as i:
        numpyro.factor("y", -((mu - y[i][:, None]) ** 2))


def outside_plate(y: Any) -> None:
    """The observed rows use the plate's indices outside the plate, so they are never scaled."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", 12) as i:
        loc = numpyro.deterministic("loc", mu * jnp.ones(i.shape[0]))
    numpyro.sample("y", dist.Normal(loc, 1).to_event(1), obs=y[i])


def group_latents(y: Any) -> None:
    """Latents of one plate are indexed by the rows of another."""
    with numpyro.plate("group", 4):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("data", 12) as i:
        numpyro.sample("y", dist.Normal(a[i % 4], 1), obs=y[i])


def latents_leave_plate(y: Any) -> None:
    """A function of all local latents outside their plate: rows cannot estimate it without bias."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", 12) as i:
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y[i])
    numpyro.sample("total", dist.Normal(jnp.mean(z) ** 2, 1), obs=1.0)


def subsamples_two(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", 12, subsample_size=2) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def matrix(X: Any, y: Any) -> None:
    """A matrix that an expansion can multiply."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    with numpyro.plate("data", 12) as i:
        numpyro.sample("y", dist.Normal((X[i] @ w).sum(-1), 1), obs=y[i])


def positive_matrix(X: Any, y: Any) -> None:
    w = numpyro.sample("w", dist.HalfNormal(1).expand([2, 3]).to_event(2))
    with numpyro.plate("data", 12) as i:
        numpyro.sample("y", dist.Normal((X[i] @ w).sum(-1), 1), obs=y[i])


def rows_of_a_matrix(X: Any, y: Any) -> None:
    """A local latent whose rows, together, have two axes like a matrix."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    with numpyro.plate("data", 12) as i:
        z = numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal((X[i] @ w * z).sum(-1), 1), obs=y[i])


class Bare(Metric):
    """A metric with the required methods and none of the options."""

    def __init__(self, interval: int | None = 1) -> None:
        self.interval = interval

    def statistic(self, grad: Any) -> Any:
        return grad

    def update(self, state: Any, grad: Any) -> Any:
        return state

    def apply_inverse(self, state: Any, vector: Any) -> Any:
        return vector

    def apply_inverse_sqrt(self, state: Any, vector: Any) -> Any:
        return vector


# --- how a mistake is made


def make(*args: Any, **settings: Any) -> Callable[[], Any]:
    """Construct a kernel."""
    return lambda: SGRLD(*args, **settings)


def model(**settings: Any) -> Callable[[], Any]:
    """Construct a kernel on a valid model."""
    return make(normal_mean, **settings)


def start(
    kernel_model: Callable,
    *args: Any,
    init_params: Any = None,
    key: Any = None,
    kernel: Callable = SGRLD,
    **settings: Any,
) -> Callable[[], Any]:
    """Start a chain: arrays in `args` are the model's arguments."""
    arrays = tuple(jnp.asarray(a, jnp.float32) for a in args)

    def run() -> Any:
        rng_key = random.key(0) if key is None else key
        return kernel(kernel_model, **settings).init(rng_key, 5, init_params, arrays, {})

    return run


def energy(
    potential_fn: Any,
    init_params: Any = (1.0, 2.0),
    *,
    key: Any = None,
    kernel: Callable = SGRLD,
    **settings: Any,
) -> Callable[[], Any]:
    """Start a chain on a function."""

    def run() -> Any:
        position = jnp.array(init_params) if isinstance(init_params, tuple) else init_params
        rng_key = random.key(0) if key is None else key
        chain = kernel(potential_fn=potential_fn, **settings)
        return chain.init(rng_key, 5, position, (), {})

    return run


def resume(num_rows: int) -> Callable[[], Any]:
    """A chain continues with another number of rows than at its start."""

    def run() -> Any:
        kernel = SGRLD(normal_mean, batch_size=3, step_size=0.01, num_steps=1)
        state = kernel.init(random.key(0), 0, None, (jnp.zeros(12),), {})
        return kernel.sample(state, (jnp.zeros(num_rows),), {})

    return run


def leave_x64() -> Any:
    """A chain that started in 64 bits continues in 32 bits."""
    kernel = SGRLD(normal_mean, step_size=0.01, num_steps=1)
    with jax.enable_x64(True):
        state = kernel.init(random.key(0), 0, None, (jnp.zeros(12),), {})
    return kernel.sample(state, (jnp.zeros(12),), {})


def noisy(z: Any, rng_key: jax.Array) -> jax.Array:
    """A stochastic energy."""
    return half_square(z) + jnp.sum(z) * random.normal(rng_key)


def make_with(kernel: Callable, **settings: Any) -> Callable[[], Any]:
    """Construct a kernel on a valid model."""
    return lambda: kernel(matrix, **settings)


def make_on(kernel: Callable, **settings: Any) -> Callable[[], Any]:
    """Construct a kernel on a valid function."""
    return lambda: kernel(potential_fn=half_square, **settings)


NOT_INDEXED = r"site '(y|z)' is not indexed by plate 'data'.*Index every array"
TWO_KEYS = random.split(random.key(0), 2)

TABLE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # model and potential_fn
    "neither": (make(), ValueError, "exactly one of `model` and `potential_fn`, got neither"),
    "both": (make(linear, potential_fn=half_square), ValueError, "exactly one of .* got both"),
    "model not callable": (make(3), TypeError, "model must be callable, got int"),
    "potential_fn not callable": (
        make(potential_fn="U"),
        TypeError,
        "potential_fn must be callable, got str",
    ),
    "positional metric": (make(linear, "monge"), TypeError, "positional argument"),
    "batch_size with potential_fn": (
        make(potential_fn=half_square, batch_size=3),
        ValueError,
        "batch_size needs a model.*potential_fn",
    ),
    # metric
    "unknown metric": (model(metric="euclid"), ValueError, "metric must be one of .*'euclid'"),
    "metric class": (model(metric=Monge), TypeError, r"write Monge\(\) in place of Monge"),
    "metric None": (model(metric=None), TypeError, "metric must be one of .*NoneType"),
    "metric of object": (
        model(metric=object()),
        TypeError,
        "a subclass of Metric, got <obj",
    ),
    "decay 1": (lambda: RMSprop(decay=1.0), ValueError, "decay must be .* below 1"),
    "eps 0": (lambda: RMSprop(eps=0.0), ValueError, "eps must be a finite number above 0"),
    "alpha2 negative": (lambda: Monge(alpha2=-1.0), ValueError, "alpha2 must be .*at least 0"),
    "interval 0": (lambda: Shampoo(interval=0), ValueError, "interval must be .*at least 1"),
    "block_size 0": (lambda: Shampoo(block_size=0), ValueError, "block_size must be .*at least 1"),
    "vector": (lambda: Shampoo(vector="rows"), ValueError, "vector must be one of .*'rows'"),
    "interval None": (
        start(normal_mean, Y, metric=Bare(interval=None)),
        TypeError,
        "interval=None.*dataclass",
    ),
    # divergence
    "unknown divergence": (
        model(divergence="exact"),
        ValueError,
        "divergence must be one of .*'exact'",
    ),
    "divergence flag": (model(divergence=True), ValueError, "divergence must be one of .*True"),
    "auxiliary without from_gradient": (
        model(divergence="auxiliary", metric=Bare()),
        TypeError,
        "needs a metric with a method from_gradient",
    ),
    "auxiliary, batch of 2": (
        start(normal_mean, Y, divergence="auxiliary", batch_size=2),
        ValueError,
        "splits a batch in three.*'data': 2.*at least 3",
    ),
    "auxiliary with a momentum, batch of 2": (
        lambda: SGHMC(normal_mean, divergence="auxiliary", batch_size=2).init(
            random.key(0), 1, None, (Y,), {}
        ),
        ValueError,
        "splits a batch in three.*'data': 2.*at least 3",
    ),
    "auxiliary, stratified": (
        model(divergence="auxiliary", metric="rmsprop", batching="stratified"),
        ValueError,
        "part of a stratified batch.*'replacement' or 'epoch'",
    ),
    "auxiliary, model's batch of 2": (
        start(subsamples_two, Y, divergence="auxiliary"),
        ValueError,
        "splits a batch in three.*'data': 2.*at least 3",
    ),
    # adjusted
    "adjusted text": (model(adjusted="yes"), TypeError, "adjusted must be True or False"),
    "adjusted batch_size": (model(adjusted=True, batch_size=3), ValueError, "drop batch_size"),
    "adjusted corrected": (
        model(adjusted=True, divergence="corrected"),
        ValueError,
        "expected divergence 'frozen' or 'auxiliary', got 'corrected'",
    ),
    "adjusted temperature 0": (
        model(adjusted=True, temperature=0.0),
        ValueError,
        "adjusted=True needs temperature > 0",
    ),
    "adjusted without noise": (
        model(adjusted=True, step_size=cyclical(0.1, 10, explore=0.5)),
        ValueError,
        "adjusted=True.*explore",
    ),
    "adjusted stochastic": (
        energy(lambda z, rng_key: half_square(z), adjusted=True),
        ValueError,
        "adjusted=True needs the full-data energy.*takes a key",
    ),
    "adjusted, model's batch": (
        start(subsamples_two, Y, adjusted=True),
        ValueError,
        "adjusted=True needs the full-data energy.*subsamples its rows",
    ),
    # step_size
    "step_size 0": (model(step_size=0.0), ValueError, "step_size must be a finite number above 0"),
    "step_size text": (model(step_size="fast"), ValueError, "step_size must be 'auto'.*'fast'"),
    "step_size list": (model(step_size=[0.1]), TypeError, "step_size must be 'auto'.*list"),
    "step_size vector": (
        model(step_size=lambda t: jnp.ones(2)),
        TypeError,
        "must map the step count.*to a real scalar",
    ),
    "period 0": (lambda: cyclical(0.1, 0), ValueError, "period must be .*at least 1"),
    "explore all": (
        lambda: cyclical(0.1, 10, explore=1.0),
        ValueError,
        "explore must be .* below 1",
    ),
    "bias_tolerance 0": (model(bias_tolerance=0.0), ValueError, "bias_tolerance .*above 0"),
    # num_steps
    "num_steps 0": (model(num_steps=0), ValueError, "num_steps must be .*at least 1, got 0"),
    "num_steps float": (model(num_steps=1.0), TypeError, "num_steps must be an integer"),
    "num_steps text": (model(num_steps="many"), ValueError, "num_steps must be 'auto'.*'many'"),
    # batch_size
    "batch_size 0": (model(batch_size=0), ValueError, "batch_size must be .*at least 1, got 0"),
    "batch_size float": (model(batch_size=2.5), TypeError, "batch_size must be an integer"),
    "batch_size text": (model(batch_size="10"), ValueError, "batch_size must be 'auto' or rows"),
    "batch_size empty": (model(batch_size={}), TypeError, "maps plate names to rows"),
    "batch_size key": (model(batch_size={1: 2}), TypeError, "maps plate names to rows"),
    "batch_size value": (model(batch_size={"data": 0}), ValueError, r"batch_size\['data'\]"),
    "batch larger than N": (
        start(normal_mean, Y, batch_size=13),
        ValueError,
        "batch_size=13 is larger than plate 'data', which has 12 rows",
    ),
    "unknown plate": (
        start(normal_mean, Y, batch_size={"rows": 3}),
        ValueError,
        r"unknown plates \['rows'\]: the model's plates are \['data'\]",
    ),
    "ambiguous batch_size": (
        start(two_tables, Y, batch_size=3),
        ValueError,
        "exactly one plate that holds observed rows.*2 .*pass a dict",
    ),
    "no rows to subsample": (
        start(maybe_observed, batch_size=3),
        ValueError,
        "exactly one plate that holds observed rows.*none",
    ),
    # control_variate
    "control_variate text": (
        model(control_variate="yes"),
        ValueError,
        "control_variate must be 'auto' or True, False or an order 0, 1 or 2, got 'yes'",
    ),
    "control variate, batch of all rows": (
        start(normal_mean, Y, control_variate=True, batch_size=12),
        ValueError,
        "control_variate=True corrects minibatch gradients.*batch_size, or drop control_variate",
    ),
    "control variate, exact potential": (
        energy(half_square, control_variate=True),
        ValueError,
        "needs a model whose rows are subsampled: pass a model and batch_size",
    ),
    "control variate, adjusted": (
        start(normal_mean, Y, control_variate=True, adjusted=True),
        ValueError,
        "control_variate=True corrects minibatch gradients",
    ),
    # the other kernels
    "ISGD without a batch": (
        start(normal_mean, Y, kernel=ISGD, batch_size=12),
        ValueError,
        "ISGD takes its rate from minibatch noise.*pass batch_size.*or use SGRLD",
    ),
    "ISGD groups text": (
        lambda: ISGD(normal_mean, groups="layer"),
        TypeError,
        "groups must map names of sites to names of groups.*got 'layer'",
    ),
    "ISGD groups of another model": (
        start(normal_mean, Y, kernel=ISGD, batch_size=3, groups={"w": "one"}),
        ValueError,
        r"latent sites \['mu'\]: missing \['mu'\], unknown \['w'\]. Expected a group for each",
    ),
    "ISGD metric": (lambda: ISGD(normal_mean, metric="rmsprop"), TypeError, "metric"),
    "AdamSGLD drift inf": (
        lambda: AdamSGLD(normal_mean, drift=float("inf")),
        ValueError,
        "drift must be a finite number at least 0, got inf",
    ),
    "AdamSGLD mean_decay text": (
        lambda: AdamSGLD(normal_mean, mean_decay="0.9"),
        TypeError,
        "mean_decay must be a number, got '0.9'",
    ),
    "AdamSGLD square_decay nan": (
        lambda: AdamSGLD(normal_mean, square_decay=float("nan")),
        ValueError,
        "square_decay must be a finite number .*, got nan",
    ),
    # temperature, batching, init_strategy
    "temperature negative": (model(temperature=-1), ValueError, "temperature .*at least 0"),
    "temperature text": (model(temperature="hot"), TypeError, "temperature must be a number"),
    "batching": (model(batching="shuffle"), ValueError, "batching must be one of .*'shuffle'"),
    "init_strategy": (model(init_strategy=3), TypeError, "init_strategy must be one of .*got 3"),
    "init_to_value unknown site": (
        start(normal_mean, Y, init_strategy=init_to_value(values={"mu": 1.0, "sigma": 1.0})),
        ValueError,
        r"values of \['sigma'\].*no such sites: expected some of \['mu'\]",
    ),
    # models
    "discrete latent": (
        start(discrete_latent, Y),
        ValueError,
        r"discrete latent sites \['k'\].*DiscreteGibbs",
    ),
    "y not passed": (start(logistic, X), ValueError, r"discrete latent sites \['y'\].*Pass the d"),
    "empty data": (start(normal_mean, np.zeros(0)), ValueError, "the data are empty"),
    "group latents subsampled": (
        start(group_latents, Y, batch_size={"group": 2}),
        ValueError,
        "plate 'group'.*(no observed|'a'.*outside)",
    ),
    "local latents leave their plate": (
        start(latents_leave_plate, Y, batch_size={"data": 3}),
        ValueError,
        "'z'.*plate 'data'.*'total'",
    ),
    "observed rows outside the plate": (
        start(outside_plate, Y, batch_size={"data": 3}),
        ValueError,
        "plate 'data'.*no observed",
    ),
    **{
        f"{name} at batch size {rows}": (
            start(bad, X, Y, batch_size=rows),
            ValueError,
            NOT_INDEXED,
        )
        for name, bad in {
            "unindexed inputs": unindexed_inputs,
            "unindexed response": unindexed_response,
            "unindexed inputs and response": unindexed_both,
            "unindexed mask": unindexed_mask,
            "unindexed scale": unindexed_scale,
            "unindexed prior": unindexed_prior,
        }.items()
        for rows in (1, 10)
    },
    "rows on two axes: response": (
        start(plate_at_minus_two(lambda y: y), Y),
        ValueError,
        r"site 'y' have rows of .*ask for \(12, 1\).*pass `y\[\.\.\., None\]` in place",
    ),
    "rows on two axes: inputs": (
        start(row_of_inputs, Y, batch_size=3),
        ValueError,
        "rows of plate 'data' are on two axes of site 'y', .* and on axis -1",
    ),
    **{
        f"rows on two axes: {name}": (
            start(bad, Y),
            ValueError,
            "rows of plate 'data' are on two axes of site 'y', .* and on axis -2",
        )
        for name, bad in {"means": column_of_means, "factors": column_of_factors}.items()
    },
    # init_params
    "init_params missing site": (
        start(linear, X, Y, init_params={}),
        ValueError,
        r"missing \['w'\], unknown \[\]",
    ),
    "init_params unknown site": (
        start(normal_mean, Y, init_params={"mu": jnp.zeros(()), "nu": jnp.zeros(())}),
        ValueError,
        r"missing \[\], unknown \['nu'\]",
    ),
    "init_params shape": (
        start(linear, X, Y, init_params={"w": jnp.zeros(3)}),
        ValueError,
        r"init_params\['w'\] has shape \(3,\), expected the unconstrained shape \(2,\)",
    ),
    "init_params without chains": (
        start(linear, X, Y, init_params={"w": jnp.zeros(2)}, key=TWO_KEYS),
        ValueError,
        r"expected the unconstrained shape \(2, 2\) \(chains first\)",
    ),
    "init_params array": (
        start(normal_mean, Y, init_params=jnp.zeros(())),
        TypeError,
        "init_params must be a dict of site values, got ArrayImpl: pass one with the sites",
    ),
    "init_params integers": (
        start(normal_mean, Y, init_params={"mu": jnp.array(1)}),
        TypeError,
        "floating point, got dtype int32",
    ),
    "init_params bfloat16": (
        start(normal_mean, Y, init_params={"mu": jnp.array(1.0, jnp.bfloat16)}),
        TypeError,
        "'mu'. must have 32 bits or 64, got dtype bfloat16.*cast inside the model",
    ),
    "init_params None in dict": (
        start(normal_mean, Y, init_params={"mu": None}),
        TypeError,
        "init_params.*'mu'.*None",
    ),
    "init_params not finite": (
        start(normal_mean, Y, init_params={"mu": jnp.array(jnp.nan)}),
        ValueError,
        "init_params.*'mu'.*not finite",
    ),
    # potential_fn
    "potential without init_params": (
        energy(half_square, None),
        ValueError,
        "init_params is needed with potential_fn",
    ),
    "potential at integers": (energy(half_square, (1, 2)), TypeError, "positions must be floating"),
    "potential at nothing": (energy(half_square, {}), ValueError, "init_params is needed with pot"),
    "vector potential": (
        energy(lambda z: z),
        ValueError,
        r"must be a floating point scalar, got .*shape \(2,\).*over rows",
    ),
    "potential returns None": (energy(lambda z: None), ValueError, "floating point scalar.*None"),
    "potential of three arguments": (
        energy(lambda z, a, b: z.sum()),
        TypeError,
        "missing 2 required positional arguments",
    ),
    "energy nan at the start": (
        energy(lambda z: jnp.log(-z).sum()),
        ValueError,
        "energy is not finite where the chain starts.*init_params",
    ),
    # the host's protocol
    "rng_key number": (start(normal_mean, Y, key=0), TypeError, "rng_key must be.*random.key"),
    "sample before init": (
        lambda: SGRLD(normal_mean).sample(None, (), {}),
        RuntimeError,
        "`init` must run before `sample`",
    ),
    "wrap a function": (
        lambda: SGRLD(potential_fn=half_square).wrap_model(lambda m: m),
        ValueError,
        "wrap_model needs a kernel with a model",
    ),
    "resume with more rows": (resume(24), ValueError, "plate 'data'.*24.*12"),
    "resume with fewer rows": (resume(6), ValueError, "plate 'data'.*6.*12"),
    "x64 left": (leave_x64, TypeError, "float64.*x64"),
}


# --- kernels with a momentum, and expansion

MOMENTUM: dict[str, Callable] = {"SGHMC": SGHMC, "SGNHT": SGNHT, "GGMC": GGMC}
CORRECTED: dict[str, Callable] = {
    "SGHMC": SGHMC,
    "SGNHT": SGNHT,
    "GGMC": GGMC,
    "SGRLD": SGRLD,
}
NAN = float("nan")
EXPLORING = cyclical(0.1, 10, explore=0.5)
A_POSITIVE = "must be a finite number above 0, got "
AN_INTEGER = "must be an integer of at least 1, got "

# settings of every kernel with a momentum: what each must say
SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"friction": "fast"}, ValueError, "friction must be 'auto' or a positive number, got 'fast'"),
    ({"friction": -1.5}, ValueError, f"friction {A_POSITIVE}-1.5"),
    ({"adjusted": True}, TypeError, "unexpected keyword argument 'adjusted'"),
]
# settings that some of them do not have
OWN: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "SGHMC": [
        ({"divergence": "published"}, ValueError, "divergence must be .*'frozen'.*got 'published'"),
        (
            {"divergence": "auxiliary", "metric": Bare()},
            TypeError,
            "needs a metric with a method from_gradient",
        ),
        (
            {"divergence": "auxiliary", "batching": "stratified"},
            ValueError,
            "part of a stratified batch.*'replacement' or 'epoch'",
        ),
        ({"thermostat_mass": 1.0}, TypeError, "unexpected keyword argument 'thermostat_mass'"),
    ],
    "SGNHT": [
        ({"thermostat_mass": -2.0}, ValueError, f"thermostat_mass {A_POSITIVE}-2.0"),
        ({"thermostat_mass": "unit"}, ValueError, "'auto' or a positive number, got 'unit'"),
        (
            {"temperature": 0},
            ValueError,
            r"must be above 0 with SGNHT, got 0.*Use SGHMC\(temperature=0\)",
        ),
        ({"step_size": EXPLORING}, ValueError, "SGNHT needs noise at.*use explore=0, or SGHMC"),
        ({"divergence": "frozen"}, TypeError, "argument 'divergence'"),
    ],
    "GGMC": [
        ({"target_accept": 1}, ValueError, "target_accept must be .* below 1, got 1"),
        ({"target_accept": "x"}, ValueError, "target_accept must be 'auto' or a number below 1"),
        ({"temperature": 0.0}, ValueError, "temperature must be above 0.*got 0.*nothing to test"),
        ({"step_size": EXPLORING}, ValueError, "GGMC needs noise at every step.*use explore=0"),
        ({"batching": "epoch"}, TypeError, "unexpected keyword argument 'batching'"),
        (
            {"full_potential_fn": half_square},
            ValueError,
            "full_potential_fn goes with a stochastic.*there is none: drop full_potential_fn",
        ),
        ({"num_data": 12}, ValueError, "num_data goes with a stochastic.*none: drop num_data"),
        ({"divergence": "frozen"}, TypeError, "unexpected keyword argument 'divergence'"),
        ({"bias_tolerance": 0.1}, TypeError, "unexpected keyword argument 'bias_tolerance'"),
    ],
}
# of GGMC on functions
NEEDS_BOTH = r"pass the energy itself as full_potential_fn\(z\), and the number of obs.*as num_data"
FUNCTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"potential_fn": noisy}, ValueError, f"needs full_potential_fn: {NEEDS_BOTH}"),
    ({"potential_fn": noisy, "num_data": 3}, ValueError, f"needs full_potential_fn: {NEEDS_BOTH}"),
    (
        {"potential_fn": noisy, "full_potential_fn": half_square},
        ValueError,
        f"needs num_data: {NEEDS_BOTH}",
    ),
    (
        {"potential_fn": half_square, "full_potential_fn": half_square},
        ValueError,
        "full_potential_fn goes with a stochastic.*there is none: drop full_potential_fn",
    ),
    (
        {"potential_fn": half_square, "num_data": 3},
        ValueError,
        "num_data goes with a stochastic.*there is none: drop num_data",
    ),
    (
        {"potential_fn": noisy, "full_potential_fn": "U", "num_data": 3},
        TypeError,
        "full_potential_fn must be callable, got str",
    ),
    (
        {"potential_fn": noisy, "full_potential_fn": noisy, "num_data": 3},
        TypeError,
        "must be the energy itself, f.z., and this one takes a key: pass the function that",
    ),
    *(
        (
            {"potential_fn": noisy, "full_potential_fn": half_square, "num_data": value},
            error,
            f"num_data {AN_INTEGER}{value}",
        )
        for value, error in ((0, ValueError), (1.5, TypeError))
    ),
]
TABLE |= {
    **{
        f"{name} {k}, {' and '.join(settings)}": (make_with(kernel, **settings), error, match)
        for name, kernel in MOMENTUM.items()
        for k, (settings, error, match) in enumerate(SETTINGS + OWN[name])
    },
    **{
        f"GGMC {k}, function": (partial(GGMC, **settings), error, match)
        for k, (settings, error, match) in enumerate(FUNCTIONS)
    },
    **{
        f"{name} control variate, batch of all rows": (
            start(normal_mean, Y, kernel=kernel, control_variate=True, batch_size=12),
            ValueError,
            "control_variate=True corrects minibatch gradients.*batch_size, or drop control_var",
        )
        for name, kernel in CORRECTED.items()
    },
    **{
        f"{name} neither": (kernel, ValueError, "exactly one of `model` and .* got neither")
        for name, kernel in MOMENTUM.items()
    },
    **{
        f"{name} positional": (partial(kernel, matrix, "rmsprop"), TypeError, "positional argument")
        for name, kernel in MOMENTUM.items()
    },
}


@pytest.mark.parametrize(("mistake", "error", "match"), TABLE.values(), ids=TABLE.keys())
def test_bad_input(mistake: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"(?s){match}"):
        mistake()


@pytest.mark.filterwarnings("ignore:Missing a plate statement:UserWarning")
def test_as_many_columns_as_rows_in_the_check_are_no_second_axis_of_rows() -> None:
    two_columns = plate_at_minus_two(lambda y: jnp.stack([y, y], -1))
    state = start(two_columns, Y, batch_size=3)()
    assert np.isfinite(state.potential_energy)


@pytest.mark.slow
def test_the_same_settings_without_a_mistake_are_accepted() -> None:
    """Close neighbours of the refused inputs work."""
    for settings in (
        {"batch_size": np.int64(3)},
        {"batch_size": {"data": 12}},
        {"batch_size": 3, "divergence": "auxiliary"},
        {"temperature": 0.0},
        {"adjusted": True, "step_size": cyclical(0.1, 10)},
        {"metric": Bare(), "divergence": "corrected"},
        {"step_size": jnp.asarray(0.1), "num_steps": np.int32(2)},
        {"init_params": {"mu": 0.5}},
        {"init_params": {"mu": np.zeros(())}},
    ):
        start(normal_mean, Y, **settings)()
    start(group_latents, Y, batch_size={"data": 3})()
    start(normal_mean, Y, kernel=ISGD, batch_size=3, groups={"mu": "one"})()
    energy(noisy, kernel=ISGD)()
    start(normal_mean, Y, kernel=AdamSGLD, drift=0, mean_decay=0.0)()
    energy(lambda z, scale=2.0: scale * half_square(z))()
    accepted = {"friction": np.float32(2), "step_size": EXPLORING}
    start(normal_mean, Y, kernel=SGHMC, temperature=0, **accepted)()
    start(normal_mean, Y, kernel=SGNHT, friction=2, thermostat_mass=np.float64(0.5))()
    energy(noisy, kernel=GGMC, full_potential_fn=half_square, num_data=np.int64(3))()
    start(normal_mean, Y, kernel=GGMC, target_accept=np.float32(0.65))()


@pytest.mark.parametrize(
    ("full", "match"),
    [
        (lambda z: jnp.nan, "the energy is not finite where the chain starts"),
        (lambda z: None, "full_potential_fn must be a floating point scalar, got None"),
        (lambda z: 1j, "full_potential_fn must be a floating point scalar, got .*complex"),
    ],
    ids=["nan", "none", "complex"],
)
def test_full_potential_is_tried_at_the_start(full: Callable, match: str) -> None:
    kernel = GGMC(potential_fn=noisy, full_potential_fn=full, num_data=3)
    with pytest.raises(ValueError, match=match):
        kernel.init(random.key(0), 1, jnp.ones(2), (), {})


@pytest.mark.parametrize("value", [True, None, "1", np.ones(2), 1j])
def test_numbers_of_another_type(value: Any) -> None:
    with pytest.raises(TypeError, match="x must be a number, got"):
        check_number("x", value, above=0.0)
    with pytest.raises(TypeError, match="n must be an integer of at least 1, got"):
        check_int("n", value)


@pytest.mark.parametrize("value", [0, -1.5, NAN, float("inf"), np.array(NAN), 10**400])
def test_numbers_out_of_range(value: Any) -> None:
    with pytest.raises(ValueError, match="x must be a finite number above 0, got"):
        check_number("x", value, above=0.0)


def test_integers_out_of_range() -> None:
    with pytest.raises(TypeError, match="n must be an integer of at least 1, got 1.0"):
        check_int("n", 1.0)
    with pytest.raises(ValueError, match="n must be an integer of at least 1, got 0"):
        check_int("n", 0)
