"""Predictive measures against scikit-learn, hand calculations, and identities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC, NUTS
from scipy import stats
from scipy.special import log_softmax, softmax
from targets import as_if_run

from numpyro_geom.diagnostics.network_measures import _curvatures
from numpyro_geom.diagnostics.predictive import (
    classification,
    confidence,
    draw_distances,
    expected_calibration_error,
    input_curvature,
    out_of_distribution,
    predictive_entropy,
    regression,
)

metrics = pytest.importorskip("sklearn.metrics", reason="the examples extra is not installed")


def generated(classes: int, draws: int = 5, rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Logits of members that agree a little, and labels that agree with them a little."""
    rng = np.random.default_rng(classes)
    shared = 2 * rng.normal(size=(rows, classes))
    labels = (shared + rng.gumbel(size=shared.shape)).argmax(-1)
    return shared + rng.normal(size=(draws, rows, classes)), labels


# --- classification


@pytest.mark.parametrize("classes", [2, 4])
def test_measures_agree_with_scikit_learn(classes: int) -> None:
    logits, y = generated(classes)
    p = softmax(logits, axis=-1)
    mean, names = p.mean(0), list(range(classes))
    found = classification(p, y)
    assert found.accuracy == pytest.approx(metrics.accuracy_score(y, mean.argmax(1)))
    assert found.error == pytest.approx(metrics.zero_one_loss(y, mean.argmax(1)))
    assert found.nll == pytest.approx(metrics.log_loss(y, mean, labels=names))
    alone = [metrics.log_loss(y, member, labels=names) for member in p]
    np.testing.assert_allclose(found.nll_draws, alone, rtol=1e-12)
    brier = metrics.brier_score_loss(y, mean if classes > 2 else mean[:, 1], labels=names)
    assert found.brier == pytest.approx(brier)
    assert found.confidence == pytest.approx(mean.max(1).mean())
    assert found.entropy == pytest.approx(stats.entropy(mean, axis=1).mean())
    np.testing.assert_allclose(confidence(p), mean.max(1), rtol=1e-12)
    np.testing.assert_allclose(predictive_entropy(p), stats.entropy(mean, axis=1), rtol=1e-12)


@pytest.mark.parametrize("classes", [2, 4])
def test_diversity_is_what_averaging_gains(classes: int) -> None:
    logits, y = generated(classes)
    found = classification(logits, y, logits=True)
    assert found.ambiguity == pytest.approx(found.nll_draws.mean() - found.nll)
    assert found.ambiguity > 0.01
    averaged = log_softmax(logits.mean(0), axis=-1)[np.arange(len(y)), y]
    expected = found.nll_draws.mean() + averaged.mean()
    assert found.ambiguity_geometric == pytest.approx(expected)
    members = [classification(member[None], y, logits=True) for member in logits]
    assert np.mean([m.brier for m in members]) == pytest.approx(found.brier + found.variance)
    for one in members[:1]:
        assert one.ambiguity == pytest.approx(0, abs=1e-14)
        assert one.ambiguity_geometric == pytest.approx(0, abs=1e-14)
        assert one.variance == 0


@pytest.mark.parametrize("classes", [2, 4])
def test_logits_and_probabilities_are_the_same(classes: int) -> None:
    logits, y = generated(classes)
    of_logits = classification(logits, y, logits=True)
    for p in (softmax(logits, axis=-1), jax.nn.softmax(jnp.asarray(logits), axis=-1)):
        found = classification(p, y)
        for name, value in of_logits._asdict().items():
            np.testing.assert_allclose(getattr(found, name), value, rtol=1e-5, err_msg=name)


def test_probability_of_class_one_is_enough_for_two() -> None:
    logits, y = generated(2)
    full = classification(logits, y, logits=True)
    p = softmax(logits, axis=-1)[..., 1]
    others = classification(p, y), classification(logits[..., 1] - logits[..., 0], y, logits=True)
    for found in others:
        for name, value in full._asdict().items():
            np.testing.assert_allclose(getattr(found, name), value, rtol=1e-9, err_msg=name)
    # the first of equally probable classes
    assert classification([[0.5, 0.5]], [0, 1]).accuracy == 0.5


def test_logits_do_not_underflow() -> None:
    logits = np.array([[[0.0, 2000.0]], [[0.0, 3000.0]]])
    found = classification(logits, [0], logits=True)
    assert found.nll == pytest.approx(2000 + np.log(2))
    np.testing.assert_allclose(found.nll_draws, [2000, 3000])
    assert found.ambiguity_geometric == pytest.approx(0, abs=1e-12)
    # a draw alone may rule a label out
    found = classification([[[0.0, 1.0]], [[0.5, 0.5]]], [0])
    assert found.nll == pytest.approx(-np.log(0.25))
    assert found.nll_draws.tolist() == [np.inf, pytest.approx(np.log(2))]
    assert found.ambiguity == np.inf
    assert found.ambiguity_geometric == pytest.approx(-np.log(np.sqrt(0.5)))
    # two that have no class in common
    assert classification([[[0.0, 1.0]], [[1.0, 0.0]]], [0]).ambiguity_geometric == np.inf
    assert predictive_entropy([[[0.0, 1.0]]]).tolist() == [0.0]


def test_calibration_error_by_hand() -> None:
    # confidences .6 .6 .8 1; right yes no yes yes; bins (.5, .75] and (.75, 1]
    p = [[0.4, 0.4, 0.2, 1.0]]
    y = [0, 1, 0, 1]
    assert expected_calibration_error(p, y, bins=4) == pytest.approx((0.2 + 0.2) / 4)
    # each alone in its bin, and the two of .6 together
    expected = (abs(1 - 2 * 0.6) + 0.2 + 0.0) / 4
    assert expected_calibration_error(p, y, bins=10) == pytest.approx(expected)
    assert expected_calibration_error(p, y, bins=1) == pytest.approx(abs(0.75 - 0.75))
    assert classification(p, y, bins=10).calibration_error == pytest.approx(expected)


def test_bins_are_open_at_their_left_end_and_closed_at_the_right() -> None:
    # .75 is the right end of (.5, .75]: alone with .7 there, and not with .8
    p, y = [[0.75, 0.7, 0.8]], [1, 1, 0]
    assert expected_calibration_error(p, y, bins=4) == pytest.approx(
        (abs(2 - 1.45) + abs(0 - 0.8)) / 3
    )
    # fifteen bins by default
    rng = np.random.default_rng(0)
    p = rng.uniform(0.5, 1, size=(1, 500))
    y = rng.binomial(1, 0.8, size=500)
    total = 0.0
    for k in range(15):
        inside = (p[0] > k / 15) & (p[0] <= (k + 1) / 15)
        total += abs((y[inside] == 1).sum() - p[0][inside].sum())
    assert expected_calibration_error(p, y) == pytest.approx(total / 500)


# --- out of distribution


def test_area_under_the_curve_agrees_with_scikit_learn_also_with_ties() -> None:
    rng = np.random.default_rng(1)
    for digits in (0, 1, 8):
        inside = np.round(rng.normal(0.7, 1, size=83), digits)
        outside = np.round(rng.normal(size=61), digits)
        truth = np.r_[np.ones(83), np.zeros(61)]
        found = out_of_distribution(inside, outside)
        assert found.auroc == pytest.approx(metrics.roc_auc_score(truth, np.r_[inside, outside]))
        fpr, tpr, _ = metrics.roc_curve(truth, np.r_[inside, outside], drop_intermediate=False)
        assert found.tnr95 == pytest.approx(1 - fpr[np.argmax(tpr >= 0.95)])
        assert found.tnr99 == pytest.approx(1 - fpr[np.argmax(tpr >= 0.99)])


def test_true_negative_rates_by_hand() -> None:
    inside = np.arange(1, 101)  # 95 are at or above 6, 99 at or above 2
    outside = [0, 1, 2, 5, 6, 7, 200, 3.5]
    found = out_of_distribution(inside, outside)
    assert found.tnr95 == 5 / 8
    assert found.tnr99 == 2 / 8
    # 95% of 20 are 19, and not 20 by rounding; 99% of 20 are all
    found = out_of_distribution(np.arange(20), [0, 0.5, 1])
    assert (found.tnr95, found.tnr99) == (2 / 3, 0)
    assert out_of_distribution([2, 3], [0, 1]) == (1, 1, 1)
    assert out_of_distribution([0, 1], [2, 3]) == (0, 0, 0)
    assert out_of_distribution([1, 1], [1, 1, 1]) == (0.5, 0, 0)


# --- ArviZ


def exported(**groups: dict[str, np.ndarray]) -> Any:
    if az.__version__ >= "1":
        return az.from_dict(groups)
    return az.from_dict(**groups)


@pytest.mark.arviz
def test_arviz_objects_give_what_their_arrays_give() -> None:
    logits, y = generated(3, draws=6)
    p = softmax(logits, axis=-1)
    chains = p.reshape(2, 3, *p.shape[1:])
    expected = classification(p, y)
    idata = exported(posterior={"p": chains, "w": np.zeros((2, 3, 4))})
    found = classification(idata, y, var_name="p")
    for name, value in expected._asdict().items():
        np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)
    np.testing.assert_array_equal(confidence(idata, var_name="p"), confidence(p))
    np.testing.assert_array_equal(predictive_entropy(idata, var_name="p"), predictive_entropy(p))
    assert expected_calibration_error(idata, y, var_name="p") == expected.calibration_error
    # posterior_predictive comes first
    both = exported(posterior={"p": chains[:, :2]}, posterior_predictive={"p": chains})
    assert classification(both, y, var_name="p").nll == expected.nll
    with pytest.raises(ValueError, match=r"var_name must name a variable .* got None: .*'p', 'w'"):
        classification(idata, y)
    with pytest.raises(ValueError, match="got 'q'"):
        classification(idata, y, var_name="q")


@pytest.mark.arviz
def test_distances_in_arviz_objects() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 3)), rng.normal(size=(2, 5))
    idata = exported(posterior={"a": a, "b": b})
    flat = np.concatenate([a, b[..., None]], axis=-1)
    np.testing.assert_allclose(draw_distances(idata), draw_distances(flat))
    for names in (["a"], "a"):
        np.testing.assert_allclose(draw_distances(idata, var_names=names), draw_distances(a))
    with pytest.raises(ValueError, match="the posterior has no variables"):
        draw_distances(idata, var_names=["c"])


# --- regression


def test_regression_agrees_with_scikit_learn_and_scipy() -> None:
    rng = np.random.default_rng(2)
    means, y = rng.normal(size=(4, 30)), rng.normal(size=30)
    for sds in (0.7, rng.uniform(0.5, 2, size=4), rng.uniform(0.5, 2, size=(4, 30))):
        found = regression(means, sds, y)
        wide = np.broadcast_to(np.reshape(sds, (4, 1)) if np.ndim(sds) == 1 else sds, (4, 30))
        density = stats.norm.pdf(y, means, wide)
        assert found.rmse == pytest.approx(metrics.root_mean_squared_error(y, means.mean(0)))
        assert found.nll == pytest.approx(-np.log(density.mean(0)).mean())
        np.testing.assert_allclose(found.nll_draws, -np.log(density).mean(1))
        assert found.ambiguity == pytest.approx(found.nll_draws.mean() - found.nll)
        assert found.ambiguity > 0
        # the decomposition of the squared error
        errors = [metrics.mean_squared_error(y, m) for m in means]
        assert np.mean(errors) == pytest.approx(found.rmse**2 + found.variance)
    # far in the tails densities underflow, and their logarithms do not
    assert regression([[0.0]], 1.0, [100.0]).nll == pytest.approx(5000 + np.log(2 * np.pi) / 2)


# --- draws


def test_distances_by_hand() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, 6, 4))
    found, relative = draw_distances(x), draw_distances(x, normalised=True)
    for c in range(2):
        for t in range(5):
            step = np.linalg.norm(x[c, t + 1] - x[c, t])
            assert found[c, t] == pytest.approx(step)
            assert relative[c, t] == pytest.approx(step / np.linalg.norm(x[c, t]))
    np.testing.assert_allclose(draw_distances(x[0]), found[0])
    sites = {"w": x[0, :, :3], "net": {"b": jnp.asarray(x[0, :, 3])}}
    np.testing.assert_allclose(draw_distances(sites), found[0], rtol=1e-5)
    np.testing.assert_allclose(draw_distances(7 * x, normalised=True), relative)


def test_distances_of_a_run_are_within_its_chains() -> None:
    x = np.random.default_rng(3).normal(size=(2, 30, 4))
    mcmc = MCMC(NUTS(lambda: None), num_warmup=0, num_samples=30, progress_bar=False)
    with pytest.raises(ValueError, match="has not run"):
        draw_distances(mcmc)
    draws = {"w": x[..., :3], "b": x[..., 3]}
    mcmc = as_if_run(mcmc, draws)
    np.testing.assert_allclose(draw_distances(mcmc), draw_distances(x))
    with pytest.raises(ValueError, match=r"begin with \(2, 30\), which looks like \(chains, draws"):
        draw_distances(draws)
    # not where it cannot be told, nor where one array is not so
    assert draw_distances({"w": x[:, :20]}).shape == (1,)
    assert draw_distances({"w": x, "b": x[:, 0]}).shape == (1,)


# --- curvature


def test_curvature_of_quadratics_is_exact() -> None:
    rng = np.random.default_rng(4)
    matrices = rng.normal(size=(3, 4, 4))
    matrices = (matrices + matrices.transpose(0, 2, 1)) / 2
    slopes, X = rng.normal(size=(3, 4)), rng.normal(size=(5, 4))

    def fn(params: tuple, x: jax.Array) -> jax.Array:
        return 0.5 * x @ params[0] @ x + params[1] @ x

    found = input_curvature(fn, (matrices, slopes), X, num_iterations=200)
    largest = np.abs(np.linalg.eigvalsh(matrices)).max(-1)
    gradient = np.einsum("dij,nj->dni", matrices, X) + slopes[:, None]
    expected = largest[:, None] / (np.linalg.norm(gradient, axis=-1) + 1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_memory_of_curvature_does_not_grow_with_rows() -> None:
    rows, width = 2048, 64

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w).sum()

    of_all = jax.jit(partial(_curvatures, fn, jax.random.key(0), 2))
    program = of_all.lower(jnp.ones((1, 3, width)), jnp.ones((rows, 3))).compile()
    # one hidden layer of all rows
    assert program.memory_analysis().temp_size_in_bytes < 4 * rows * width


def test_rows_in_several_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = lambda a, x: 0.5 * a * x @ x  # noqa: E731
    draws, X = jnp.array([1.0, 3.0]), jnp.arange(1.0, 6)[:, None]
    monkeypatch.setattr("numpyro_geom.diagnostics.network_measures.LANES", 2)
    # Hessian a, gradient a x
    expected = np.broadcast_to(1 / np.arange(1.0, 6), (2, 5))
    np.testing.assert_allclose(input_curvature(fn, draws, X), expected, rtol=1e-5)


def test_curvature_where_the_iteration_could_go_wrong() -> None:
    # eigenvalues 2 and -2, a straight function, and no gradient at all
    diagonals = jnp.array([[2.0, -2.0], [0.0, 0.0]])

    def fn(d: jax.Array, x: jax.Array) -> jax.Array:
        return 0.5 * jnp.sum(d * x**2) + 3 * x[0]

    found = input_curvature(fn, diagonals, jnp.array([[0.0, 0.0], [-1.5, 0.0]]), num_iterations=5)
    np.testing.assert_allclose(found, [[2 / 3, 2e6], [0.0, 0.0]], rtol=1e-5)


def test_curvature_of_a_network_against_its_hessian() -> None:
    rng = np.random.default_rng(5)
    shapes = {"w": (2, 3, 3, 8), "v": (2, 8)}
    draws = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    X = jnp.asarray(rng.normal(size=(4, 3, 3)), jnp.float32)  # images

    def fn(params: dict, x: jax.Array) -> jax.Array:
        return params["v"] @ jnp.tanh(jnp.einsum("ij,ijk->k", x, params["w"]))

    @jax.jit
    def dense(params: dict, x: jax.Array) -> jax.Array:
        flat = lambda z: fn(params, z.reshape(3, 3))  # noqa: E731
        H, g = jax.hessian(flat)(x.ravel()), jax.grad(flat)(x.ravel())
        return jnp.abs(jnp.linalg.eigvalsh(H)).max() / (jnp.linalg.norm(g) + 1e-6)

    expected = [[dense({n: p[d] for n, p in draws.items()}, x) for x in X] for d in range(2)]
    found = input_curvature(fn, draws, X, num_iterations=300)
    np.testing.assert_allclose(found, np.array(expected), rtol=0.01)
    # fewer iterations come from below
    few = input_curvature(fn, draws, X, num_iterations=2, rng_key=jax.random.key(1))
    assert (few <= found * 1.001).all()
    assert (few < 0.98 * found).any()


# --- bad input

P = np.full((2, 3, 4), 0.25)
Y = np.array([0, 1, 3])
NAN = np.where(np.arange(3) == 1, np.nan, 0.5) * np.ones((2, 3))


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (
            ValueError,
            r"must have shape \(draws, rows, classes\)",
            lambda: classification(P[0, 0], Y),
        ),
        (ValueError, "two classes or more", lambda: classification(P[..., :1], Y)),
        (ValueError, r"got \(0, 3, 4\)", lambda: classification(P[:0], Y)),
        (TypeError, "probabilities must be real", lambda: classification(P > 0, Y)),
        (ValueError, r"2 of 6 are not \(the first at \(0, 1\)\)", lambda: classification(NAN, Y)),
        (ValueError, "logits must be finite", lambda: classification(NAN, Y, logits=True)),
        (ValueError, "must sum to 1", lambda: classification(2 * P, Y)),
        (ValueError, "must not be negative", lambda: classification(P - [0.5, 0, 0, -0.5], Y)),
        (
            ValueError,
            r"looks like \(rows, classes\): pass p\[None\]",
            lambda: classification(P[0], Y),
        ),
        (ValueError, "pass logits=True", lambda: classification([[1.5, 0.0, 0.0]], [0, 1, 1])),
        (TypeError, "labels must be integers", lambda: classification(P, Y + 0.0)),
        (ValueError, r"labels must have shape \(3,\)", lambda: classification(P, Y[:2])),
        (ValueError, "between 0 and 3, got some from 1 to 4", lambda: classification(P, Y + 1)),
        (
            ValueError,
            "probability 0 to the label of 2 rows .the first is 1",
            lambda: classification([[1.0, 1.0, 0.0]], [1, 0, 1]),
        ),
        (TypeError, "logits must be True or False", lambda: classification(P, Y, logits=1)),
        (ValueError, "bins must be an integer", lambda: classification(P, Y, bins=0)),
        (ValueError, "is for ArviZ objects", lambda: classification(P, Y, var_name="p")),
        (TypeError, "inside must be real", lambda: out_of_distribution(["a"], [1])),
        (ValueError, "outside must be a vector", lambda: out_of_distribution([1], [])),
        (ValueError, "inside must be a vector", lambda: out_of_distribution([np.nan], [1])),
        (ValueError, r"means must have shape \(draws, rows\)", lambda: regression(Y, 1.0, Y)),
        (ValueError, r"sds must be a number", lambda: regression(np.ones((2, 3)), Y + 1, Y)),
        (ValueError, "means must be finite, and 2 of 6", lambda: regression(NAN, 1.0, Y)),
        (ValueError, "sds must be positive", lambda: regression(np.ones((2, 3)), 0.0, Y)),
        (ValueError, "draws must be an array", lambda: draw_distances([1.0, 2.0])),
        (ValueError, "at least two", lambda: draw_distances([[1.0, 2.0]])),
        (ValueError, "same number", lambda: draw_distances({"a": np.ones(3), "b": np.ones(4)})),
        (ValueError, "draws must be finite", lambda: draw_distances(NAN)),
        (ValueError, "1 draws are 0", lambda: draw_distances([[0.0], [1.0]], normalised=True)),
        (ValueError, "is for ArviZ objects", lambda: draw_distances(P, var_names=["a"])),
        (TypeError, "fn must be a function", lambda: input_curvature(3, Y, P)),
        (TypeError, "real scalar", lambda: input_curvature(lambda a, x: x, jnp.ones(2), P)),
        (
            ValueError,
            "leading axis",
            lambda: input_curvature(jnp.dot, (jnp.ones(2), jnp.ones(3)), P),
        ),
        (TypeError, "single key", lambda: input_curvature(jnp.dot, jnp.ones(2), P, rng_key=1)),
        (
            ValueError,
            "not finite in 1 of 2 places, the first in draw 1 and row 0",
            lambda: input_curvature(lambda a, x: a * x[0] ** 3, jnp.array([1, jnp.inf]), P[:1, 0]),
        ),
    ],
)
def test_bad_input(error: type[Exception], match: str, call: Callable) -> None:
    with pytest.raises(error, match=match):
        call()
