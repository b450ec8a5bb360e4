"""Supports and reparametrisations (test_reparam, test_infer_util)"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from methods import KEY, LAPLACE, Posterior
from numpyro import handlers
from numpyro.distributions import constraints, transforms
from numpyro.infer import SVI, Trace_ELBO, autoguide
from numpyro.infer.reparam import (
    CircularReparam,
    DiscreteCosineReparam,
    ExplicitReparam,
    HaarReparam,
    LocScaleReparam,
    NeuTraReparam,
    ProjectedNormalReparam,
    TransformReparam,
)
from scipy import special

pytestmark = pytest.mark.numpyro_situations

# --- every support


def improper(support: Any, *shape: int) -> dist.Distribution:
    return dist.ImproperUniform(support, (), shape)


SUPPORTS = {
    "real": dist.Normal(0, 1),
    "real vector": dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)),
    "real matrix": dist.MatrixNormal(jnp.zeros((2, 2)), jnp.eye(2), jnp.eye(2)),
    "positive": dist.LogNormal(0, 1),
    "nonnegative": dist.HalfNormal(1),
    "softplus positive": improper(constraints.softplus_positive),
    "above a number": dist.Pareto(2.0, 3.0),
    "below a number": dist.RightTruncatedDistribution(dist.Normal(0, 1), high=0.5),
    "interval": dist.Uniform(-1, 3),
    "open interval": improper(constraints.open_interval(-1.0, 3.0)),
    "unit interval": dist.Beta(2, 3),
    "circle": dist.VonMises(0.5, 2.0),
    "simplex": dist.Dirichlet(2 * jnp.ones(3)),
    "ordered vector": dist.TransformedDistribution(
        dist.Normal(0, 1).expand([3]).to_event(1), transforms.OrderedTransform()
    ),
    "positive ordered vector": improper(constraints.positive_ordered_vector, 3),
    "zero sum": dist.ZeroSumNormal(1.0, (3,)),
    "l1 ball": improper(constraints.l1_ball, 3),
    "correlation, Cholesky factor": dist.LKJCholesky(3, 2.0),
    "correlation matrix": dist.LKJ(3, 2.0),
    "lower Cholesky": dist.WishartCholesky(4.0, jnp.eye(2)),
    "softplus lower Cholesky": improper(constraints.softplus_lower_cholesky, 2, 2),
    "scaled unit lower Cholesky": improper(constraints.scaled_unit_lower_cholesky, 2, 2),
    "positive definite": dist.Wishart(4.0, jnp.eye(2)),
    "independent intervals": dist.Uniform(jnp.zeros(2), jnp.arange(1.0, 3.0)).to_event(1),
}


def every_support() -> None:
    for name, prior in SUPPORTS.items():
        value = jnp.ravel(numpyro.sample(name, prior))
        # of every entry, so that improper priors have proper posteriors
        numpyro.sample(f"y {name}", dist.Normal(value, 1).to_event(1), obs=0.5 + 0 * value)


@cache
def of_every_support(method: Any) -> dict:
    # the Fisher information of 60 dimensions compiles for minutes, and supports need none;
    # steps that are short enough for the steepest of all starts, and longer with a momentum, whose
    # first draws would be the same in 32 bits
    short = {"step_size": 1e-5 if method.name in ("SGHMC", "GGMC") else 1e-6}
    settings = {"metric": "euclidean"} if method is LAPLACE else short
    return method.draws(every_support, settings=settings)


@pytest.mark.filterwarnings("ignore:Continuous inference poorly handles circular")
# of the guide on all supports at once in 32 bits: a draw's support does not depend on the mode
@pytest.mark.filterwarnings("ignore:the search for a mode has not converged")
@pytest.mark.parametrize("support", SUPPORTS)
def test_support(method: Any, support: str) -> None:
    """Support: {support}"""
    draws = of_every_support(method)[support]
    assert len(np.unique(np.asarray(draws).reshape(5, -1), axis=0)) > 1
    assert np.all(SUPPORTS[support].support(draws))


# --- laws that are known: the prior's, whatever the coordinates

SERIES = dist.Normal(0, 1).expand([4]).to_event(1)
AFFINE = transforms.AffineTransform(1.0, 2.0)
REPARAMS = {
    "non-centred": LocScaleReparam(0.0),
    "half centred": LocScaleReparam(0.6),
    "learned centring": LocScaleReparam(),
    "Student's t": LocScaleReparam(0.0, shape_params=["df"]),
    "transform": TransformReparam(),
    "explicit": ExplicitReparam(transforms.SoftplusTransform().inv),
    "Haar": HaarReparam(),
    "cosine": DiscreteCosineReparam(smooth=1.0),
}
PRIORS = {
    "Student's t": dist.StudentT(8.0, 1.0, 2.0),
    "transform": dist.TransformedDistribution(dist.Normal(0, 1), AFFINE),
    "explicit": dist.Gamma(4.0, 4.0),
    "Haar": SERIES,
    "cosine": SERIES,
}
LAWS = {"Student's t": (1.0, 2 * np.sqrt(8 / 6)), "explicit": (1.0, 0.5)}
LAWS |= {"Haar": (0.0, 1.0), "cosine": (0.0, 1.0)}


def reparametrised(names: tuple[str, ...]) -> None:
    loc = numpyro.sample("loc", dist.Normal(0, 1))
    numpyro.sample("obs", dist.Normal(loc, 1), obs=1.0)
    for name in names:
        numpyro.sample(name, PRIORS.get(name, dist.Normal(1.0, 2.0)))


@cache
def of_reparametrised(method: Any, *names: str, **settings: Any) -> Posterior:
    return method.posterior(handlers.reparam(reparametrised, config=REPARAMS), names, **settings)


@pytest.mark.parametrize("reparam", REPARAMS)
def test_reparam(method: Any, reparam: str) -> None:
    """Reparametrisation: {reparam}"""
    names, settings = tuple(REPARAMS), {}
    if method is LAPLACE:  # XLA's FFT on CPUs cannot be in a Hessian, which straight draws take
        apart = reparam == "cosine"
        names = ("cosine",) if apart else tuple(n for n in REPARAMS if n != "cosine")
        settings = {"metric": "fisher"} if apart else {}
    found = of_reparametrised(method, *names, **settings)
    found.check(reparam, *LAWS.get(reparam, (1.0, 2.0)))


def circular(concentration: Any) -> None:
    numpyro.sample("x", dist.VonMises(0.5, concentration))
    centre = numpyro.sample("centre", dist.Normal(0, 1))
    numpyro.sample("obs", dist.Normal(centre, 1), obs=1.0)


def test_circular(method: Any) -> None:
    """Reparametrisation: an angle with `CircularReparam`"""
    model = handlers.reparam(circular, config={"x": CircularReparam()})
    found = method.posterior(model, 2.0)
    resultant = special.i1(2.0) / special.i0(2.0)
    spread = 1 - resultant / 2.0 - resultant**2
    cosine = Posterior({"x": jnp.cos(found.draws["x"] - 0.5)}, found.weights)
    cosine.check("x", resultant, np.sqrt(spread))


def sphere() -> None:
    x = numpyro.sample("x", dist.ProjectedNormal(jnp.array([1.0, 0.5])))
    numpyro.sample("obs", dist.Normal(x, 1).to_event(1), obs=jnp.array([1.0, 0.0]))


def test_sphere(method: Any) -> None:
    """A site on the sphere: NumPyro's error names `ProjectedNormalReparam`"""
    with pytest.raises(ValueError, match="ProjectedNormalReparam"):
        method.draws(sphere)


def test_projected_normal(method: Any) -> None:
    """Reparametrisation: the sphere with `ProjectedNormalReparam`"""
    model = handlers.reparam(sphere, config={"x": ProjectedNormalReparam()})
    np.testing.assert_allclose(jnp.linalg.norm(method.draws(model)["x"], axis=-1), 1, rtol=1e-5)


def funnel() -> None:
    y = numpyro.sample("y", dist.Normal(0, 1))
    with numpyro.plate("D", 3):
        x = numpyro.sample("x", dist.Normal(0, jnp.exp(y / 2)))
    numpyro.sample("obs", dist.Normal(x.sum(), 1), obs=1.0)


def test_neutra(method: Any) -> None:
    """Reparametrisation: `NeuTraReparam` of a guide that SVI has trained"""
    guide = autoguide.AutoDiagonalNormal(funnel)
    svi = SVI(funnel, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
    trained = svi.run(KEY, 20, progress_bar=False)
    neutra = NeuTraReparam(guide, trained.params)
    draws = method.draws(neutra.reparam(funnel))
    assert set(neutra.transform_sample(draws["auto_shared_latent"])) == {"x", "y"}


def single() -> None:
    x = numpyro.sample("x", dist.Normal(1.0, 2.0))
    numpyro.sample("obs", dist.Normal(x, 1), obs=1.0)


def test_syntax(method: Any) -> None:
    """`handlers.reparam` as a function, as a decorator and as a context manager in the model"""
    config = {"x": LocScaleReparam(0.0)}

    @handlers.reparam(config=config)
    def decorated() -> None:
        single()

    def inside() -> None:
        with handlers.reparam(config=config):
            single()

    found = [method.draws(m) for m in (handlers.reparam(single, config=config), decorated)]
    found.append(method.draws(inside))
    for draws in found:
        assert set(draws) == {"x", "x_decentered"}
        np.testing.assert_allclose(draws["x"], found[0]["x"], rtol=1e-5)
