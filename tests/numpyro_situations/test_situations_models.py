"""Models and their arguments (test_mcmc, test_infer_util)"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from methods import LAPLACE, Posterior
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
from numpyro.distributions import constraints
from numpyro.infer.reparam import TransformReparam
from scipy import integrate

pytestmark = pytest.mark.numpyro_situations

Y = np.linspace(-1.0, 2.0, 12).astype(np.float32)
ROWS = np.linspace(-1.0, 2.0, 60).astype(np.float32)
GROUPS = np.arange(12) % 3


# --- laws that are known: one model of independent parts, one run of each method

HEADS = np.array([1] * 21 + [0] * 9)
TRIALS, SUCCESSES = 5_000_000, 3849


def improper() -> None:
    mean = numpyro.sample("mean", dist.Normal(0, 1).mask(False))
    sd = numpyro.sample("sd", dist.ImproperUniform(constraints.positive, (), ()))
    numpyro.sample("obs_sd", dist.Normal(mean, sd), obs=ROWS)


def weighted() -> None:
    masked = numpyro.sample("masked", dist.Normal(0, 1))
    with handlers.mask(mask=False):
        numpyro.sample("obs_masked", dist.Normal(masked, 0.1), obs=5.0)
    scaled = numpyro.sample("scaled", dist.Normal(0, 1))
    with handlers.scale(scale=3.0):
        numpyro.sample("obs_scaled", dist.Normal(scaled, 1), obs=2.0)
    factor = numpyro.sample("factor", dist.Normal(0, 1))
    numpyro.factor("weight", -((factor - 1.0) ** 2) / 2)


def moving() -> None:
    low = numpyro.sample("low", dist.Uniform(0, 1))
    above = numpyro.sample("above", dist.Uniform(low, low + 1.0))
    numpyro.sample("obs_low", dist.Normal(low, 0.1), obs=0.5)
    numpyro.sample("obs_above", dist.Normal(above, 0.1), obs=1.0)


def to_lift() -> None:
    c = numpyro.param("lifted", jnp.array(1.0), constraint=constraints.positive)
    numpyro.sample("obs_lifted", dist.LogNormal(c, 1.0), obs=np.exp(Y))


def conjugate() -> None:
    for part in (improper, weighted, moving, to_lift):
        part()


@cache
def posterior(method: Any) -> Posterior:
    """Of all parts in one run."""
    return method.posterior(handlers.lift(conjugate, prior={"lifted": dist.Gamma(2.0, 2.0)}))


def beta_moments(a: Any, b: Any) -> tuple[Any, Any]:
    a, b = np.asarray(a), np.asarray(b)
    return a / (a + b), np.sqrt(a * b / (a + b + 1)) / (a + b)


@pytest.mark.one_run
def test_improper(method: Any) -> None:
    """Improper priors, by `.mask(False)` and `ImproperUniform`"""
    found, n = posterior(method), len(ROWS)
    scale = np.sqrt(((ROWS - ROWS.mean()) ** 2).sum() / (n * (n - 2)))
    found.check("mean", ROWS.mean(), scale * np.sqrt((n - 2) / (n - 4)))  # Student's t, n - 2
    assert (found.draws["sd"] > 0).all()


def binomial() -> None:
    for name in ("probs", "logits"):
        p = numpyro.sample(name, dist.Beta(1.0, 1.0))
        value = p if name == "probs" else jnp.log(p) - jnp.log1p(-p)
        numpyro.sample(f"obs_{name}", dist.Binomial(TRIALS, **{name: value}), obs=SUCCESSES)


def test_binomial(method: Any) -> None:
    """3,849 successes of 5,000,000, by `probs` and by `logits`, in 64 bits"""
    with jax.enable_x64(True):
        found = method.posterior(binomial)
    for name in ("probs", "logits"):
        found.check(name, *beta_moments(SUCCESSES + 1.0, TRIALS - SUCCESSES + 1.0))


@pytest.mark.one_run
def test_mask_and_scale(method: Any) -> None:
    """`handlers.mask(mask=False)` and `handlers.scale` around an observation; `numpyro.factor`"""
    found = posterior(method)
    found.check("masked", 0.0, 1.0)
    found.check("scaled", 1.5, 0.5)
    found.check("factor", 0.5, np.sqrt(0.5))


@pytest.mark.one_run
def test_dynamic_support(method: Any) -> None:
    """A support that depends on another site"""
    low, above = np.meshgrid(np.linspace(0, 1, 201), np.linspace(0, 2, 401), indexing="ij")
    weights = np.exp(-50 * ((low - 0.5) ** 2 + (above - 1) ** 2))
    weights *= (above > low) & (above < low + 1)
    found = posterior(method)
    found.check("above", 1.0, np.sqrt((weights * (above - 1) ** 2).sum() / weights.sum()))
    assert (found.draws["above"] >= found.draws["low"]).all()


@pytest.mark.one_run
def test_lift(method: Any) -> None:
    """`handlers.lift` makes a param a latent site"""

    def moment(k: int) -> float:
        def weighted_power(c: float) -> float:
            return c**k * c * np.exp(-2 * c - ((Y - c) ** 2).sum() / 2)

        return integrate.quad(weighted_power, 0, 5)[0]

    mean = moment(1) / moment(0)
    posterior(method).check("lifted", mean, np.sqrt(moment(2) / moment(0) - mean**2))


# --- the rest: a few draws with the right sites, shapes and supports


def defaults(method: Any) -> dict:
    """The guide's own settings, where a scale of 0 would be the Euclidean mode."""
    return {"settings": {}} if method is LAPLACE else {}


def schools() -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    theta = numpyro.sample("theta", dist.Normal(mu, tau), sample_shape=(12,))
    numpyro.sample("obs", dist.Normal(theta, 3.0), obs=10 * Y)


def test_sample_shape(method: Any) -> None:
    """`sample_shape=` of a site, a model without arguments"""
    draws = method.draws(schools)
    assert draws["theta"].shape[1:] == (12,)
    assert (draws["tau"] > 0).all()


def dictionary(data: dict) -> None:
    w = numpyro.sample("w", dist.Normal(1, 1))
    sigma = numpyro.sample("sigma", dist.Gamma(1, 2))
    with numpyro.plate("size", np.size(data["y"])):
        numpyro.sample("obs", dist.Normal(w * data["x"], sigma), obs=data["y"])


def test_dictionary(method: Any) -> None:
    """One argument, a dict of NumPy arrays, whose sizes the model reads"""
    assert set(method.draws(dictionary, {"x": Y + 1, "y": Y})) == {"w", "sigma"}


def trivial() -> None:
    x = numpyro.sample("x", dist.Dirichlet(jnp.ones(1)).expand((4,)))
    numpyro.sample("y", dist.Normal(x, 1), obs=2.0)


def with_trivial() -> None:
    trivial()
    numpyro.sample("free", dist.Normal(0, 1))


def test_trivial_among_others(method: Any) -> None:
    """A simplex of one entry, whose unconstrained position has size zero, beside a free site"""
    draws = method.draws(with_trivial)
    np.testing.assert_array_equal(draws["x"], np.ones((5, 4, 1)))
    assert len(np.unique(draws["free"])) > 1


def zero_sized() -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("J", 12):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("scores", dist.Normal(theta, 1), sample_shape=(0,))
        numpyro.sample("obs", dist.Normal(theta, 1), obs=Y)


def test_zero_sized(method: Any) -> None:
    """A latent site of size zero among others"""
    draws = method.draws(zero_sized, **defaults(method))
    assert draws["scores"].shape[1:] == (0, 12)
    assert np.isfinite(draws["theta"]).all()


def two_sites() -> None:
    x = numpyro.sample("x", dist.Normal(0, 1))
    y = numpyro.sample("y", dist.Normal(0, 1))
    numpyro.sample("obs", dist.Normal(x + y, 1), obs=jnp.asarray(Y))


def test_substitute(method: Any) -> None:
    """`handlers.substitute` of a latent site: NumPyro's warning, and a run that starts there"""
    model = handlers.substitute(two_sites, data={"x": 10.0})
    with pytest.warns(UserWarning, match="skipping initialization"):
        draws = method.draws(model)
    assert np.isfinite(draws["y"]).all()


def test_condition(method: Any) -> None:
    """`handlers.condition` makes a site an observed one; after `handlers.do` it keeps its prior"""
    for handler, sites in ((handlers.condition, {"y"}), (handlers.do, {"x", "y"})):
        draws = method.draws(handler(two_sites, data={"x": 10.0}))
        assert np.isfinite(draws["y"]).all()
        assert set(draws) == sites


@pytest.mark.slow  # three compilations of geodesics; `tests/test_laplace.py` has their laws
def test_default_metric(guide: Any) -> None:
    """The guide's default metric: hierarchies and nested plates"""
    bits = np.stack([HEADS, 1 - HEADS], -1)
    for model, args in ((schools, ()), (plates, (bits,)), (zero_sized, ())):
        for values in guide.draws(model, *args, settings={}).values():
            assert np.isfinite(values).all()


def while_loop() -> None:
    x = numpyro.sample("x", dist.Normal(0, 1))
    y = lax.while_loop(lambda x: x < 10, lambda x: x + 1, x)
    numpyro.sample("obs", dist.Normal(y, 1), obs=10.5)


def fori_loop(y: Any, length: Any = None) -> None:
    x = numpyro.sample("x", dist.Normal(0, 1))
    length = jnp.sum(y > 0) if length is None else length
    x = lax.fori_loop(0, length, lambda _, x: x / 2, x)
    numpyro.sample("obs", dist.Normal(x, 1), obs=y)


def test_dynamic_loops(method: Any) -> None:
    """A `while_loop`, and a `fori_loop` whose length is computed"""
    for model, args in ((while_loop, ()), (fori_loop, (Y,))):
        with pytest.raises(ValueError, match="forward_mode_differentiation"):
            method.draws(model, *args)


def test_fixed_loop(method: Any) -> None:
    """A `fori_loop` whose length is a Python number"""
    assert np.isfinite(method.draws(fori_loop, Y, 3)["x"]).all()


def series(y: Any) -> None:
    start = numpyro.sample("start", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))

    def step(x: jax.Array, row: jax.Array) -> tuple:
        x = numpyro.sample("x", dist.Normal(x, sigma))
        numpyro.sample("y", dist.Normal(x, 0.5), obs=row)
        return x, x

    _, xs = scan(step, start, y)
    numpyro.deterministic("last", xs[-1])


def test_scan(method: Any) -> None:
    """Latent sites inside of `scan`"""
    draws = method.draws(series, Y, **defaults(method))
    assert draws["x"].shape[1:] == (12,)
    np.testing.assert_allclose(draws["last"], draws["x"][:, -1], rtol=1e-5)


def branches(y: Any, flag: Any = True) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))

    def near(y: Any) -> None:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    def far(y: Any) -> None:
        numpyro.sample("y", dist.Normal(mu, 10), obs=y)

    cond(flag, near, far, y)


def test_cond(method: Any) -> None:
    """Observed sites inside of `cond`"""
    assert np.isfinite(method.draws(branches, Y)["mu"]).all()


def host_side(y: Any, group: Any) -> None:
    seen = ~np.isnan(y)
    with numpyro.plate("groups", len(np.unique(group))):
        a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([int(group.max()) + 1]).to_event(1))
    numpyro.sample("y", dist.Normal((a + b)[group[seen]], 1), obs=y[seen])


def test_host_side(method: Any) -> None:
    """NumPy on NumPy arguments: `len(np.unique(g))`, `int(g.max()) + 1`, a mask of missing rows"""
    draws = method.draws(host_side, np.where(GROUPS == 1, np.nan, Y), GROUPS)
    assert draws["a"].shape[1:] == draws["b"].shape[1:] == (3,)


def structured(data: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu + data["x"], 1), obs=data["y"])


def test_structured(method: Any) -> None:
    """A NumPy array with named fields"""
    data = np.array(list(zip(Y, Y, strict=True)), dtype=[("x", "f4"), ("y", "f4")])
    assert np.isfinite(method.draws(structured, data)["mu"]).all()


def unusual(y: Any, link: Any, *, name: str, priors: dict, flag: bool, none: Any = None) -> None:
    loc = numpyro.sample(name, priors["loc"])
    assert isinstance(flag, bool)
    assert none is None
    numpyro.sample("y", dist.Normal(link(loc), 1.0), obs=y if flag else None)


def test_unusual_arguments(method: Any) -> None:
    """Callables, strings, booleans, None and distributions as arguments, by position and name"""
    priors = {"loc": dist.Normal(0.0, 1.0)}
    draws = method.draws(unusual, Y, jnp.tanh, name="theta", priors=priors, flag=True)
    assert set(draws) == {"theta"}


def only_if_asked(y: Any) -> None:
    x = numpyro.sample("x", dist.Normal(0, 1))
    if numpyro.get_mask() is not False:
        numpyro.factor("f", dist.Normal(x, 1.0).log_prob(y).sum())


def test_get_mask(method: Any) -> None:
    """A likelihood that is computed only `if numpyro.get_mask() is not False`"""
    assert np.isfinite(method.draws(only_if_asked, Y)["x"]).all()


def plates(y: Any) -> None:
    with numpyro.plate("dim", 2):
        p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    with numpyro.plate("rows", y.shape[0], dim=-2):
        numpyro.deterministic("squared", p**2)
        with numpyro.plate("dim", 2):
            numpyro.sample("obs", dist.Bernoulli(p), obs=y)
    with numpyro.plate_stack("stack", (2, 3)):
        numpyro.sample("x", dist.Normal(0, 1))


def test_plates(method: Any) -> None:
    """A plate that is entered twice, nested plates, and `plate_stack`"""
    draws = method.draws(plates, np.stack([HEADS, 1 - HEADS], -1))
    assert draws["p"].shape[1:] == draws["squared"].shape[1:] == (2,)
    assert draws["x"].shape[1:] == (2, 3)


def partly_observed(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(mu, 1), obs=jnp.nan_to_num(y), obs_mask=~jnp.isnan(y))


def test_obs_mask(method: Any) -> None:
    """Missing rows by `obs_mask` become latent sites"""
    data, settings = jnp.where(GROUPS == 1, jnp.nan, Y), {}
    if method is LAPLACE:  # the latent values of rows that are not missing have no density
        plain = {"metric": "euclidean"}
        with pytest.raises(ValueError, match="damping"):
            method.draws(partly_observed, data, settings=plain)
        settings = {"settings": {**plain, "damping": 1.0}}
    draws = method.draws(partly_observed, data, **settings)
    assert draws["y_unobserved"].shape[1:] == (12,)


def expanded() -> None:
    most = jnp.array([1.0, 2.0, 3.0])
    with numpyro.plate("region", 3):
        prior = dist.ImproperUniform(constraints.interval(0, most[:, None]), (3,), (2,))
        share = numpyro.sample("share", prior)
    numpyro.sample("obs", dist.Normal(share.ravel(), 1).to_event(1), obs=jnp.full(6, 0.5))


def test_improper_batch(method: Any) -> None:
    """`ImproperUniform` with a batch and an event shape, and bounds that are arrays"""
    draws = method.draws(expanded)
    assert draws["share"].shape[1:] == (3, 2)
    assert (draws["share"] < jnp.array([1.0, 2.0, 3.0])[:, None]).all()


def unidentified() -> None:
    x = numpyro.sample("x", dist.ImproperUniform(constraints.interval(0, 1), (), (2,)))
    numpyro.sample("obs", dist.Normal(x.sum(), 1), obs=1.0)


def test_unidentified(method: Any) -> None:
    """Improper priors, and a direction that the data say nothing of"""
    if method is LAPLACE:  # its Fisher metric is singular there
        with pytest.raises(RuntimeError, match="mode='euclidean'"):
            method.draws(unidentified, settings={})
        plain = {"metric": "euclidean", "mode": "euclidean"}
        assert np.isfinite(method.draws(unidentified, settings=plain)["x"]).all()
    else:
        assert np.isfinite(method.draws(unidentified)["x"]).all()


def transformed(y: Any) -> None:
    alpha = numpyro.sample("alpha", dist.Uniform(0, 1))
    with handlers.reparam(config={"loc": TransformReparam()}):
        base = dist.Uniform(0, 1).mask(False)
        prior = dist.TransformedDistribution(base, dist.transforms.AffineTransform(0, alpha))
        loc = numpyro.sample("loc", prior)
    numpyro.sample("y", dist.Normal(loc, 0.5), obs=y)


def test_transformed(method: Any) -> None:
    """A reparametrised site whose transform depends on another site, its base improper"""
    # the Fisher information has no part of an improper base
    settings = {"metric": "euclidean"} if method is LAPLACE else {}
    draws = method.draws(transformed, Y, settings=settings)
    np.testing.assert_allclose(draws["loc"], draws["alpha"] * draws["loc_base"], rtol=1e-5)
