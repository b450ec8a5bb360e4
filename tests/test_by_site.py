"""A metric for each group of sites: its products, its updates, its errors, and the draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC

from numpyro_geom import SGHMC, SGRLD, Identity, RMSprop, Shampoo, Wenzel
from numpyro_geom.metrics import get_metric

POSITION = {"in.b": jnp.zeros(3), "in.k": jnp.zeros((4, 3)), "out.k": jnp.zeros((3, 2))}
POSITION["s"] = jnp.zeros(())


def like_position(seed: int) -> dict:
    keys = random.split(random.key(seed), len(POSITION))
    return {
        name: random.normal(key, x.shape)
        for key, (name, x) in zip(keys, POSITION.items(), strict=True)
    }


def test_each_group_is_as_with_its_metric_alone() -> None:
    shampoo, wenzel, rmsprop = Shampoo(interval=3), Wenzel(interval=2), RMSprop(eps=0.1)
    nine = Identity(9.0)
    metric = get_metric({"in.k": shampoo, "in.*": rmsprop, "out*": nine, "s": wenzel})
    groups = [(shampoo, ["in.k"]), (rmsprop, ["in.b"]), (nine, ["out.k"]), (wenzel, ["s"])]
    state = metric.init(POSITION)
    states = [m.init({n: POSITION[n] for n in names}) for m, names in groups]
    for seed in range(5):
        grad = like_position(seed)
        state = metric.update(state, grad)
        states = [
            m.update(s, {n: grad[n] for n in names})
            for s, (m, names) in zip(states, groups, strict=True)
        ]
    vector = like_position(9)
    for method, factor in (("apply_inverse", 9.0), ("apply_inverse_sqrt", 3.0)):
        found = getattr(metric, method)(state, vector)
        assert jax.tree.structure(found) == jax.tree.structure(vector)
        for s, (m, names) in zip(states, groups, strict=True):
            alone = getattr(m, method)(s, {n: vector[n] for n in names})
            for name in names:
                np.testing.assert_allclose(found[name], alone[name], rtol=1e-6)
        np.testing.assert_allclose(found["out.k"], factor * vector["out.k"], rtol=1e-6)


def test_after_an_undone_step_each_metric_keeps_what_it_keeps_alone() -> None:
    metric = get_metric({"in.k": Shampoo(interval=1), "*": "rmsprop"})
    old = metric.init(POSITION)
    new = metric.update(old, like_position(0))
    undone = metric.keep_if(jnp.array(False), new, old)
    roots = jax.tree.leaves(new.rest[0]._replace(steps=()))
    kept = jax.tree.leaves(undone.rest[0]._replace(steps=()))
    assert roots
    assert all(a is b for a, b in zip(roots, kept, strict=True))  # neither read nor written
    vector, after = like_position(2), like_position(1)
    found, expected = (
        metric.apply_inverse(metric.update(state, after), vector) for state in (undone, old)
    )
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)


def test_an_interval_of_an_epoch_is_filled_in() -> None:
    metric = get_metric({"in*": Wenzel(), "*": Wenzel(interval=5)})
    assert metric.interval is None
    filled = metric.with_interval(30)
    assert [m.interval for _, m in filled.metrics] == [30, 5]
    assert filled.interval == 30


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ({"in*": "rmsprop"}, r"sites \['out.k', 's'\] match none"),
        ({"*": "rmsprop", "s": "wenzel"}, r"patterns \['s'\] for which there is no site"),
    ],
)
def test_every_site_has_a_metric_and_every_metric_a_site(metric: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_metric(metric).init(POSITION)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"metric": {}}, ValueError, "at least one pattern"),
        ({"metric": {1: "rmsprop"}}, TypeError, "pattern of site names"),
        ({"metric": {"*": "adam"}}, ValueError, "metric must be one of"),
        ({"metric": {"*": "rmsprop"}, "divergence": "published"}, ValueError, "1 - decay"),
        ({"metric": {"*": "rmsprop"}, "divergence": "auxiliary"}, TypeError, "from_gradient"),
    ],
)
def test_what_it_cannot_do(kwargs: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SGRLD(lambda: None, **kwargs)


def test_a_multiplier_is_above_zero() -> None:
    with pytest.raises(ValueError, match="scale must be"):
        Identity(0.0)


@pytest.mark.parametrize("kernel", [SGRLD, SGHMC])
def test_draws_have_the_law_of_the_target(kernel: type) -> None:
    """Variances of independent normals, in units of 4.5 Monte Carlo errors.

    The step is .2 in coordinates of the site ``a`` and four times that in those of ``b``: with a
    root that does not belong to its A, variances would be off by a factor.
    """

    def model() -> None:
        numpyro.sample("a", dist.Normal(0, 1).expand([40]).to_event(1))
        numpyro.sample("b", dist.Normal(0, 2).expand([40]).to_event(1))

    metric = {"a": Identity(), "b": Identity(4.0)}
    step = 0.05 if kernel is SGRLD else 0.4
    chain = kernel(model, metric=metric, step_size=step, num_steps=40)
    mcmc = MCMC(chain, num_warmup=20, num_samples=1000, progress_bar=False)
    mcmc.run(random.key(0))
    draws = mcmc.get_samples()
    # Euler's variance on a Gaussian of curvature 1 is 1 / (1 - h / 2); BAOAB's is exact
    exact = 1 / (1 - step / 2) if kernel is SGRLD else 1.0
    for name, sd in (("a", 1.0), ("b", 2.0)):
        square = np.mean(np.asarray(draws[name]) ** 2) / sd**2
        # forty entries; successive draws of theta^2 have correlations of exp(-4) and less
        error = np.sqrt(2 / (40 * 1000)) * np.sqrt((1 + np.exp(-4)) / (1 - np.exp(-4)))
        assert abs(square - exact) < 4.5 * error
