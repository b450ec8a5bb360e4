"""Model arguments keep their types: host code can read them, and plates can index them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
import scipy.sparse
from jax import random
from numpyro.infer import MCMC

from numpyro_geom import GGMC, SGHMC, SGRLD, RiemannianLaplace
from numpyro_geom.model.arguments import HostArray, on_device
from numpyro_geom.model.plates import read_subsampling

GROUP = np.arange(60) % 3
Y = np.where(np.arange(60) % 7 == 0, np.nan, GROUP + np.random.default_rng(0).normal(size=60))
MEANS = [np.nansum(Y[GROUP == k]) / (np.sum(~np.isnan(Y[GROUP == k])) + 1) for k in range(3)]
SDS = [(np.sum(~np.isnan(Y[GROUP == k])) + 1) ** -0.5 for k in range(3)]


def run(kernel, *data, num_warmup=20, num_samples=20):
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    mcmc.run(random.key(0), *data)
    return mcmc


def reads_values(group, y):
    """Code for the host counts groups and finds missing values."""
    num_groups = len(np.unique(group))
    assert num_groups == int(group.max()) + 1
    seen, y = ~np.isnan(y), np.nan_to_num(y)
    a = numpyro.sample("a", dist.Normal(0, 1).expand([num_groups]).to_event(1))
    with numpyro.plate("rows", len(y)) as i:
        numpyro.sample("y", dist.Normal(a[group[i]], 1).mask(seen[i]), obs=y[i])


KERNELS = [
    lambda: SGHMC(reads_values),
    lambda: GGMC(reads_values, step_size=0.05, batch_size=20),
    lambda: SGRLD(reads_values, metric="monge", step_size=0.01, num_steps=20),
]


@pytest.mark.parametrize("make", KERNELS)
def test_host_code_reads_numpy_arguments(make):
    mcmc = run(make(), GROUP, Y, num_warmup=200, num_samples=500)
    a = np.asarray(mcmc.get_samples()["a"])
    # 500 draws are at least 100 independent ones
    np.testing.assert_array_less(np.abs(a.mean(0) - MEANS), 5 * np.array(SDS) / 10)


def test_guide_reads_numpy_arguments_and_new_values_of_them():
    guide = RiemannianLaplace(reads_values)
    params = guide.fit(random.key(0), GROUP, Y)
    np.testing.assert_allclose(params["auto_loc"], MEANS, atol=1e-3)
    fewer = np.minimum(GROUP, 1)  # of the same shape
    params = guide.fit(random.key(0), fewer, Y)
    assert params["auto_loc"].shape == (2,)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, i, w: x[i] @ w,
        lambda x, i, w: x[:, 0][i] * w[0],
        lambda x, i, w: (x - x.mean(0))[i] @ w,
        lambda x, i, w: x @ w,
        lambda x, i, w: w @ x.T,
        lambda x, i, w: jnp.take(x, i, axis=0) @ w,
        lambda x, i, w: jax.vmap(lambda row: row @ w)(x),
        lambda x, i, w: jax.lax.scan(lambda c, row: (c + row @ w, c), 0.0, x)[1],
        lambda x, i, w: jnp.where(x > 0, x, w),
    ],
)
def test_an_argument_is_a_numpy_array_to_numpy_and_a_jax_array_to_jax(use):
    x = np.random.default_rng(1).normal(size=(6, 2)).astype(np.float32)
    (argument,), _ = on_device((x,), None)
    assert isinstance(argument, np.ndarray)
    i, w = jnp.array([3, 1]), jnp.array([1.0, -2.0])
    expected = use(jnp.asarray(x), i, w)
    np.testing.assert_allclose(jax.jit(lambda i, w: use(argument, i, w))(i, w), expected, rtol=1e-5)
    np.testing.assert_allclose(use(argument, i, w), expected, rtol=1e-5)


def test_arguments_cannot_be_changed_by_the_model():
    (argument,), _ = on_device((np.zeros(3),), None)
    with pytest.raises(ValueError, match="read-only"):
        argument[0] = 1.0
    assert isinstance(argument, HostArray)
    assert (argument + 1)[0] == 1.0


def regression(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", 6) as i:
        numpyro.sample("y", dist.Normal(x[i] * w, 1), obs=y[i])


COLUMN = np.arange(6.0)


@pytest.mark.parametrize(
    ("argument", "kind"),
    [
        (pd.Series(COLUMN), "pandas.Series"),
        (list(COLUMN), "list"),
        (np.ma.masked_less(COLUMN, 1), "numpy.MaskedArray"),
        (COLUMN.astype(object), "numpy.ndarray"),
        (scipy.sparse.csr_array(COLUMN), "scipy.csr_array"),
    ],
)
def test_an_argument_that_jax_cannot_use_is_named(argument, kind):
    def model(x, y):
        regression(x, y) if kind != "scipy.csr_array" else numpyro.sample(
            "y", dist.Normal(x @ numpyro.sample("w", dist.Normal(jnp.zeros(6), 1)), 1), obs=y[0]
        )

    with pytest.raises(TypeError, match=f"its argument 'x' is a {kind}: pass .*filled.value"):
        run(SGHMC(model), argument, COLUMN)


def test_an_array_that_the_model_closes_over_is_told_of():
    def model():
        regression(COLUMN, jnp.asarray(COLUMN))

    with pytest.raises(TypeError, match="pass the array as an argument of the model"):
        run(SGHMC(model))


def test_an_error_of_the_model_is_not_blamed_on_an_argument():
    def model(x, y):
        regression(jnp.asarray(x), y)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(SGHMC(model), list(COLUMN), COLUMN)


def rows_of(x, y, group):
    """Six rows; groups are indexed by values, of which there are fewer than rows."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", 6) as i:
        mean = x[i] * jnp.take(w, jnp.take(group, i)) + w[group[i]]
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("short", ["x", "y", "group"])
def test_an_argument_with_too_few_rows_is_named(short, kind):
    given = {"x": COLUMN, "y": COLUMN, "group": np.arange(6) % 2}
    read_subsampling(rows_of, *on_device((), {name: kind(x) for name, x in given.items()}))
    given[short] = given[short][:4]
    data = on_device((), {name: kind(x) for name, x in given.items()})
    with pytest.raises(ValueError, match=rf"plate 'rows' .* shape \(4,\), such .* '{short}', .* 6"):
        read_subsampling(rows_of, *data)
