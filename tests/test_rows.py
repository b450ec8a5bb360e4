"""Rows of minibatches: rows that lean on each other are refused, and separate rows never are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from tiers import short

from numpyro_geom import SGHMC, SGRLD, HostRows
from numpyro_geom.model import read, trial

N, D = 3000, 3
X = random.normal(random.key(0), (N, D))
W = jnp.array([1.0, -1.0, 0.5])
Y = X @ W + random.normal(random.key(1), (N,))
GROUP = random.randint(random.key(2), (N,), 0, 20)


def in_plate(body: Callable) -> Callable:
    """A regression whose plate holds ``body(X, y, w, s, i)``."""

    def model(X: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        s = numpyro.sample("s", dist.HalfNormal(1))
        with numpyro.plate("data", X.shape[0]) as i:
            body(X, y, w, s, i)

    return model


def normal(mean: Any, s: Any, y: Any) -> None:
    numpyro.sample("y", dist.Normal(mean, s), obs=y)


def cox(X: Any, y: Any, w: Any, s: Any, i: Any) -> None:
    risk = X[i] @ w
    numpyro.factor("cox", risk - lax.cumlogsumexp(risk, reverse=True))


def standardised(X: Any, y: Any, w: Any, s: Any, i: Any) -> None:
    x = X[i]
    normal((x - x.mean(0)) / x.std(0) @ w, s, y[i])


def group_means(X: Any, y: Any, w: Any, s: Any, i: Any) -> None:
    count = jnp.maximum(jax.ops.segment_sum(jnp.ones(len(i)), GROUP[i], 20), 1)
    normal(X[i] @ w + (jax.ops.segment_sum(y[i], GROUP[i], 20) / count)[GROUP[i]], s, y[i])


def largest(X: Any, y: Any, w: Any, s: Any, i: Any) -> None:
    mean = X[i] @ w
    normal(mean / jnp.abs(mean).max(), s, y[i])


def ranks(X: Any, y: Any, w: Any, s: Any, i: Any) -> None:
    normal(jnp.argsort(jnp.argsort(X[i, 0])) * w[0] / 100, s, y[i])


def sorted_rows(X: Any, y: Any, w: Any, s: Any, i: Any) -> None:
    normal(jnp.sort(X[i] @ w), s, jnp.sort(y[i]))


def softmax(X: Any, y: Any, w: Any, s: Any, i: Any) -> None:
    numpyro.factor("softmax", jax.nn.log_softmax(X[i] @ w))


def mean_in_a_factor(X: Any, y: Any, w: Any, s: Any, i: Any) -> None:
    numpyro.factor("mean", dist.Normal(X[i] @ w, s).log_prob(y[i]).mean())


def residuals_in_time(X: Any, y: Any, w: Any, s: Any, i: Any) -> None:
    normal(w[0] * jnp.append(0.0, y[i][:-1]), s, y[i])


def pairs(X: Any, y: Any, w: Any, s: Any, i: Any) -> None:
    mean = X[i] @ w
    numpyro.factor("pairs", -jnp.abs(mean[:, None] - mean).mean(1))


def gaussian_process(X: Any, y: Any, w: Any, s: Any, i: Any) -> None:
    gap = X[i, 0][:, None] - X[i, 0]
    cov = jnp.exp(-(gap**2)) + (s**2 + 0.1) * jnp.eye(len(i))
    log_prob = dist.MultivariateNormal(0.0, cov).log_prob(y[i])
    numpyro.factor("process", log_prob / len(i) * jnp.ones(len(i)))


def weights_of_places(X: Any, y: Any, w: Any, s: Any, i: Any) -> None:
    normal(X[i] @ w * jnp.linspace(0, 1, len(i)), s, y[i])


LEANING = (
    cox, standardised, group_means, largest, ranks, sorted_rows, softmax, mean_in_a_factor,
    residuals_in_time, pairs, gaussian_process, weights_of_places,
)  # fmt: skip


@pytest.mark.parametrize("body", LEANING, ids=lambda body: body.__name__)
def test_rows_that_lean_on_each_other_are_refused(body: Callable) -> None:
    match = (
        "rows of plate 'data' lean on each other.*at site '.*'.*depends on which other rows come "
        "along.*outside of the plate.*batch_size=None"
    )
    with pytest.raises(ValueError, match=match):
        read(in_plate(body), (X, Y), batch_size=32)


def test_the_models_own_subsample_size_counts_as_given() -> None:
    def model(X: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with numpyro.plate("data", N, subsample_size=50) as i:
            standardised(X, y, w, 1.0, i)

    with pytest.raises(ValueError, match="lean on each other"):
        read(model, (X, Y))


def test_a_factor_outside_of_the_plate_must_not_see_the_rows_drawn() -> None:
    def model(X: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with numpyro.plate("data", N) as i:
            mean = X[i] @ w
            normal(mean, 1.0, y[i])
        numpyro.factor("ridge", -jnp.sum(mean**2))

    with pytest.raises(ValueError, match="site 'ridge' is outside of plate 'data'.*move the site"):
        read(model, (X, Y), batch_size=32)


@pytest.mark.parametrize(
    "body",
    short([cox, mean_in_a_factor], kept=[mean_in_a_factor]),
    ids=lambda body: body.__name__,
)
def test_automatic_batches_take_all_rows_and_say_why(body: Callable) -> None:
    kernel = SGRLD(in_plate(body))
    with pytest.warns(UserWarning, match="takes all 3000 rows.*lean on each other"):
        kernel.init(random.key(0), 10, None, (X, Y), {})
    assert kernel.bound.plan is not None
    assert dict(kernel.bound.plan.batch_sizes) == {}


@pytest.mark.slow
def test_on_all_rows_the_posterior_is_right(optimised: None) -> None:
    model = in_plate(cox)

    def means(kernel: Any, num_samples: int) -> np.ndarray:
        mcmc = MCMC(kernel, num_warmup=300, num_samples=num_samples, progress_bar=False)
        mcmc.run(random.key(3), X[:200], Y[:200])
        draws = np.asarray(mcmc.get_samples()["w"])
        return np.stack([draws.mean(0), draws.std(0)])

    (found, spread), (expected, scale) = means(SGHMC(model), 4000), means(NUTS(model), 4000)
    # the Monte Carlo error of a mean of 1,000 effective draws is .03 sd
    np.testing.assert_allclose(found / scale, expected / scale, atol=0.15)
    np.testing.assert_allclose(spread, scale, rtol=0.15)


# Rows that are separate terms

FAMILIES: dict[str, Callable[[Any, Any, Any], tuple[Any, Any]]] = {
    "normal": lambda m, s, y: (dist.Normal(m, s), y),
    "student": lambda m, s, y: (dist.StudentT(4.0, m, s), y),
    "bernoulli": lambda m, s, y: (dist.Bernoulli(logits=m), (y > 0).astype(int)),
    "poisson": lambda m, s, y: (dist.Poisson(jnp.exp(m)), jnp.abs(y).astype(int)),
    "negative binomial": lambda m, s, y: (
        dist.NegativeBinomial2(jnp.exp(m), s), jnp.abs(y).astype(int)
    ),
    "gamma": lambda m, s, y: (dist.Gamma(s + 1, jnp.exp(-m)), jnp.abs(y) + 0.1),
    "categorical": lambda m, s, y: (
        dist.Categorical(logits=m[:, None] * jnp.arange(7.0)), (jnp.abs(y) * 2).astype(int) % 7
    ),
    "truncated": lambda m, s, y: (dist.TruncatedNormal(m, s, low=-20.0), y),
    "inflated": lambda m, s, y: (
        dist.ZeroInflatedPoisson(0.3, jnp.exp(m)), jnp.abs(y).astype(int)
    ),
    "mixture": lambda m, s, y: (
        dist.MixtureSameFamily(
            dist.Categorical(jnp.ones(2) / 2),
            dist.Normal(jnp.stack([m, -m], -1), jnp.stack([s, 2 * s], -1)[..., None, :]),
        ),
        y,
    ),
    "vector": lambda m, s, y: (dist.Normal(m[:, None], s).expand([len(m), 2]).to_event(1),
        jnp.stack([y, -y], -1)),
}  # fmt: skip


def features(x: jax.Array, w: jax.Array, form: str) -> jax.Array:
    if form == "bfloat16":
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
    if form == "network":
        return jnp.tanh(x[:, :, None] * w).sum((1, 2))
    return x @ w / 3


FORMS = ("linear", "bfloat16", "network", "mask", "scale", "large", "narrow", "nested", "local")


def separate(family: str, form: str) -> Callable:
    """A model of independent rows."""
    unit = 1e6 if form == "large" else 1.0

    def model(X: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        s = numpyro.sample("s", dist.HalfNormal(1)) * (1e-4 if form == "narrow" else 1.0)
        inner = numpyro.plate("inner", 4, dim=-2) if form == "nested" else handlers.block()
        with numpyro.plate("data", X.shape[0], dim=-1) as i:
            mean = features(X[i], w, form)
            if form == "local":
                mean = mean + numpyro.sample("z", dist.Normal(0, 1))
            fn, value = FAMILIES[family](mean, s, y[i])
            if form == "large" and family in ("normal", "student"):
                fn, value = FAMILIES[family](unit * mean, unit * s, unit * y[i])
            if form == "mask":
                fn = fn.mask(y[i] > 0)
            with handlers.scale(scale=0.5 if form == "scale" else 1.0):
                if form != "nested":
                    numpyro.sample("y", fn, obs=value)
                    return
                with inner:
                    numpyro.sample("y", fn, obs=jnp.broadcast_to(value, (4, *value.shape)))

    return model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_separate_rows_are_never_refused(
    family: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    original = trial.check_separate
    monkeypatch.setattr(
        "numpyro_geom.model.plates.check_separate",
        lambda *args: (original(*args), tried.append(args[4])),
    )
    found = read(separate(family, form), (X, Y), batch_size={"data": 32})
    assert tried == ["data"]
    assert dict(found.plan.batch_sizes) == {"data": 32}


def test_there_are_almost_a_hundred_models_of_separate_rows() -> None:
    assert len([*itertools.product(FAMILIES, FORMS)]) == 99


def test_rows_on_the_host_are_tried() -> None:
    host = HostRows(np.asarray(X)), HostRows(np.asarray(Y))
    read(in_plate(lambda X, y, w, s, i: normal(X[i] @ w, s, y[i])), host, batch_size=32)
    with pytest.raises(ValueError, match="lean on each other"):
        read(in_plate(standardised), host, batch_size=32)


# Shapes


def shaped(y: Any, dim: int = -1) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", y.shape[0], dim=dim) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


@pytest.mark.parametrize("num_rows", [5, 400, 3000])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_values_with_an_axis_more_or_fewer_than_their_plate(
    num_rows: int, batch_size: int | None
) -> None:
    match = rf"site 'y' have .*{num_rows}, 1\).*ask for \({num_rows},\).*pass `y\[:, 0\]` in place"
    with pytest.raises(ValueError, match=match):
        read(shaped, (jnp.ones((num_rows, 1)),), batch_size=batch_size)
    with pytest.raises(ValueError, match=r"\.\.\., None"):
        read(shaped, (jnp.ones(num_rows), -2), batch_size=batch_size)
    read(shaped, (jnp.ones((num_rows, 1)), -2), batch_size=batch_size)
    read(shaped, (jnp.ones(num_rows),), batch_size=batch_size)


def test_labels_outside_of_the_support_are_told_by_row() -> None:
    def model(X: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with numpyro.plate("data", X.shape[0]) as i:
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])

    labels = (Y > 0).astype(int)
    match = "values of site 'y' are outside of the support.*in rows? {}.*count from 0"
    with pytest.raises(ValueError, match=match.format("0, 2")):
        SGRLD(model).init(random.key(0), 10, None, (X[:50], jnp.arange(50) % 2 * -1 + 2), {})
    one = labels.at[1234].set(2)  # the first minibatch need not have this row
    with pytest.raises(ValueError, match=match.format("1234")):
        SGRLD(model).init(random.key(0), 10, None, (X, one), {})


@pytest.mark.parametrize(
    ("args", "kwargs", "what"),
    [((Y,), {"batch_size": 9}, "an unexpected keyword argument 'batch_size'.* settings in SGHMC"),
     ((), {}, "missing a required argument: 'y'"), ((Y, -1, Y), {}, "too many positional")],
)  # fmt: skip
def test_arguments_that_do_not_fit_the_model(args: tuple, kwargs: dict, what: str) -> None:
    with pytest.raises(TypeError, match=f"the arguments do not fit the model: .*{what}"):
        SGRLD(shaped).init(random.key(0), 10, None, args, kwargs)


def test_many_rows_without_a_plate_are_told_what_a_plate_gains() -> None:
    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    with pytest.warns(UserWarning, match="all 3000 entries of site 'y'.*numpyro.plate"):
        SGRLD(model).init(random.key(0), 10, None, (Y,), {})
    SGRLD(model, batch_size=None).init(random.key(0), 10, None, (Y,), {})
    SGRLD(model).init(random.key(0), 10, None, (Y[:500],), {})
