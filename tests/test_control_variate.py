"""Control variates: the same energy on average, exact at the anchor, and the right distribution.

With few rows, every minibatch can be enumerated, so that expectations are exact sums. For
quadratic energies, the stationary distribution of a chain with minibatches is known at any step
size.
"""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC
from targets import (
    RowQuadratics,
    assert_moments,
    langevin_law,
    last_draws,
    linear,
    linear_moments,
    linear_quadratics,
    local_latents,
    regression_data,
    run,
)
from test_potential import (
    TABLE,
    Y,
    batches_of,
    build,
    covariance_of_batches,
    covariance_of_rows,
    nested,
    positive_latents,
    some_position,
    two_tables,
)
from tiers import short

from numpyro_geom import SGRLD
from numpyro_geom.model.arrowhead import Layout
from numpyro_geom.model.control_variate import (
    anchor_at,
    with_control_variate,
)
from numpyro_geom.model.model import Model

ROUNDING = 1e-11
"""Relative: sums of some thousand terms, differences of which are taken, at 1e-16 each."""

MODELS = [
    (positive_latents, (Y,), 2),
    (local_latents, (Y,), 3),
    (two_tables, (Y, TABLE[0]), {"first": 2, "second": 1}),
    (two_tables, (Y, TABLE[0]), {"second": 2}),
    (nested, (TABLE,), {"row": 2}),
    (nested, (TABLE,), {"row": 2, "group": 1}),
]


def few(cases: list[tuple]) -> list[Any]:
    """The cases in both orders. By default the first order runs without crossed plates, the second
    with them."""
    kept = {1: MODELS[0], 2: MODELS[2]}
    return [
        pytest.param(*case, order, marks=() if case is kept[order] else pytest.mark.slow)
        for case in cases
        for order in kept
    ]


def names(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)[:20]


def relative(value: Any, exact: Any) -> float:
    """Largest difference, over the largest entry."""
    value, exact = np.asarray(value), np.asarray(exact)
    return float(np.abs(value - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize(
    ("model", "args", "batch_size", "chunk"),
    [(*MODELS[0], 1), (*MODELS[0], 100), *((*case, 2) for case in MODELS[1:])],
    ids=names,
)
def test_chunks_add_up_to_all_rows(
    x64: None, monkeypatch: Any, model: Any, args: tuple, batch_size: Any, chunk: int
) -> None:
    monkeypatch.setattr("numpyro_geom.model.model.num_at_once", lambda _: chunk)
    args = tuple(jnp.asarray(a) for a in args)
    _, all_rows = build(model, args, None)
    _, batched = build(model, args, batch_size)
    position = some_position(model, args)
    energy, grad = jax.jit(jax.value_and_grad(all_rows.energy))(position, {})
    in_chunks = jax.jit(lambda z: anchor_at(batched, z))(position)
    np.testing.assert_allclose(in_chunks.energy, energy, rtol=ROUNDING)
    assert relative(in_chunks.grad, ravel_pytree(grad)[0]) < ROUNDING


@pytest.mark.parametrize(("rows", "lengths"), [(12, {4}), (7, {5, 2}), (3, {3})])
def test_chunks_are_equal_where_the_rows_allow_it(
    monkeypatch: Any, rows: int, lengths: set[int]
) -> None:
    monkeypatch.setattr("numpyro_geom.model.model.num_at_once", lambda _: 5)
    _, potential = build(positive_latents, (jnp.ones(rows),), 2)
    seen = set()

    def count(batch: Any) -> Any:
        seen.add(batch["data"].size)
        return jnp.zeros(())

    assert potential.on_all_rows is not None
    potential.on_all_rows(count)
    assert seen == lengths


def layout_of(order: int, position: Any) -> Layout | None:
    return None if order == 1 else Layout.without_groups(ravel_pytree(position)[0].size)


@pytest.mark.parametrize(("model", "args", "batch_size", "order"), few(MODELS), ids=names)
def test_unbiased_and_exact_at_the_anchor(
    x64: None, model: Any, args: tuple, batch_size: Any, order: int
) -> None:
    args = tuple(jnp.asarray(a) for a in args)
    plan, plain = build(model, args, batch_size)
    _, all_rows = build(model, args, None)
    anchor, position = some_position(model, args), some_position(model, args, seed=1)
    at = jax.jit(lambda z: anchor_at(plain, z, layout_of(order, anchor)))(anchor)
    corrected = with_control_variate(plain, at)
    evaluate = jax.jit(jax.vmap(jax.value_and_grad(corrected.energy), (None, 0)))

    def flat(grads: Any) -> np.ndarray:
        return np.asarray(jax.vmap(lambda g: ravel_pytree(g)[0])(grads))

    on_all_rows = jax.jit(jax.value_and_grad(all_rows.energy))
    energies, grads = evaluate(position, batches_of(plan))
    energy, grad = on_all_rows(position, {})
    np.testing.assert_allclose(energies.mean(), energy, rtol=ROUNDING)
    assert relative(flat(grads).mean(0), ravel_pytree(grad)[0]) < ROUNDING

    energies, grads = evaluate(anchor, batches_of(plan))
    energy, grad = on_all_rows(anchor, {})
    np.testing.assert_allclose(energies, np.full(len(energies), energy), rtol=ROUNDING)
    exact = np.broadcast_to(ravel_pytree(grad)[0], flat(grads).shape)
    assert relative(flat(grads), exact) < ROUNDING


@pytest.mark.parametrize(("model", "args", "batch_size", "order"), few(MODELS[:-1]), ids=names)
def test_score_noise_is_that_of_the_corrected_gradient(
    x64: None, model: Any, args: tuple, batch_size: Any, order: int
) -> None:
    args = tuple(jnp.asarray(a) for a in args)
    plan, plain = build(model, args, batch_size)
    anchor, position = some_position(model, args), some_position(model, args, seed=1)
    at = jax.jit(lambda z: anchor_at(plain, z, layout_of(order, anchor)))(anchor)
    corrected = with_control_variate(plain, at)
    exact = covariance_of_batches(plan, corrected, position)
    # rows that are quadratic with the same curvature have no noise left: errors are those of what
    # cancels
    scale = np.abs(covariance_of_batches(plan, plain, position)).max()
    np.testing.assert_allclose(
        covariance_of_rows(corrected, position), exact, atol=ROUNDING * scale
    )


# --- the distribution


SMALL = regression_data(5, 2)


def corrected_quadratics(X: Any, y: Any, anchor: np.ndarray) -> RowQuadratics:
    """The energy of `linear` with a control variate, which changes only the slope of each row."""
    prior, (hessians, slopes) = linear_quadratics(X, y)
    mean_slope = hessians.mean(0) @ anchor - slopes.mean(0)
    return RowQuadratics(prior, (hessians, hessians @ anchor - mean_slope))


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(("distance", "rate"), short([(0.0, 0.5), (3.0, 0.25)], kept=[(3.0, 0.25)]))
def test_law_of_a_gaussian(distance: float, rate: float) -> None:
    """At a step size for which minibatch noise matters: it adds 8% and 110% to variances."""
    X, y = SMALL
    mean, covariance = linear_moments(X, y)
    anchor = mean + distance * np.sqrt(np.diag(covariance))
    h = rate / np.linalg.eigvalsh(np.linalg.inv(covariance))[-1]
    law = langevin_law(corrected_quadratics(X, y, anchor), 2, h)
    plain = langevin_law(linear_quadratics(X, y), 2, h)
    kernel = SGRLD(linear, batch_size=2, step_size=h, num_steps=300, control_variate=True)
    # without warm-up the anchor stays where the chain starts
    _, draws = last_draws(
        kernel,
        (X, y),
        num_chains=40_000,
        init_params={"w": jnp.asarray(anchor)},
    )
    assert_moments(np.asarray(draws["w"], np.float64), *law)
    with pytest.raises(AssertionError, match="covariance off"):  # it is not another law's sample
        assert_moments(np.asarray(draws["w"], np.float64), *plain)
    with pytest.raises(AssertionError, match="covariance off"):
        assert_moments(np.asarray(draws["w"], np.float64), mean, covariance)


# --- warm-up


ROWS = regression_data(2000, 3)


FOUR = {"num_warmup": 64, "num_chains": 4, "chain_method": "vectorized"}


@pytest.fixture(scope="module")
def corrected() -> MCMC:
    return run(SGRLD(linear, batch_size=100, control_variate=True), *ROWS, num_samples=100, **FOUR)


@pytest.mark.slow
def test_automatic_step_sees_the_smaller_noise(corrected: MCMC) -> None:
    plain = SGRLD(linear, batch_size=100, control_variate=False)
    plain = run(plain, *ROWS, num_samples=1, **FOUR)
    learned = corrected.last_state.adaptation
    # C = N / B Var(score) against H = N Var(x) / s^2: their ratio is N s^2 / B s^2 = 20 times
    # the residual's variance over its own; with the anchor it is D / B times a kurtosis of 3
    assert (learned.noise < 0.5 * learned.curvature).all()
    assert (plain.last_state.adaptation.noise > 5 * plain.last_state.adaptation.curvature).all()
    assert (corrected.last_state.step_size > 5 * plain.last_state.step_size).all()


def test_anchor_ends_in_the_middle_of_the_posterior(corrected: MCMC) -> None:
    mean, covariance = linear_moments(*ROWS)
    anchor = corrected.last_state.control.anchor
    off = (np.asarray(anchor.position) - mean) / np.sqrt(np.diag(covariance))
    # the mean of at least 16 draws, half a relaxation time apart, so of about 4 independent ones
    assert np.abs(off).max() < 4 * 0.5
    exact = jax.vmap(lambda w: anchor_at(build(linear, ROWS, 100)[1], {"w": w}))(anchor.position)
    np.testing.assert_allclose(exact.energy, anchor.energy, rtol=1e-5)  # float32, 2000 terms
    np.testing.assert_allclose(exact.grad, anchor.grad, rtol=1e-3, atol=0.1)


def test_moments_of_a_run(corrected: MCMC) -> None:
    mean, covariance = linear_moments(*ROWS)
    z = np.asarray(corrected.get_samples(group_by_chain=True)["w"], np.float64)
    sd = np.sqrt(np.diag(covariance))
    means = ((z - mean) / sd).mean(1)
    error = means.std(0, ddof=1) / 2  # four chains
    # draws are half a relaxation time apart: 400 of them have a standard error of about 0.1
    assert np.abs(means.mean(0)).max() < 5 * max(0.1, error.max())
    ratio = z.reshape(-1, 3).std(0) / sd
    assert (np.abs(ratio - 1) < 0.05 + 5 * 0.07).all()


def test_anchor_stands_still_after_warmup(corrected: MCMC) -> None:
    before = corrected.last_state.control
    corrected.post_warmup_state = corrected.last_state
    corrected.run(random.key(1), *ROWS)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, corrected.last_state.control))


@pytest.mark.slow
def test_resumes_bit_for_bit_and_pickles(corrected: MCMC) -> None:
    kernel = SGRLD(linear, batch_size=100, control_variate=True)
    state = kernel.init(random.key(0), 10, None, ROWS, {})
    step = jax.jit(lambda s: kernel.sample(s, ROWS, {}))
    for _ in range(12):
        state = step(state)
    copy = pickle.loads(pickle.dumps(kernel))
    assert copy.settings == kernel.settings
    copy.init(random.key(3), 10, None, ROWS, {})
    restored = jax.tree.map(lambda x: x, state)
    again = jax.jit(lambda s: copy.sample(s, ROWS, {}))(restored)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, step(state).z, again.z))


@pytest.mark.slow
def test_changed_data_move_what_is_known_at_the_anchor() -> None:
    """As in a Gibbs sampler, whose other blocks change the arguments."""
    kernel = SGRLD(linear, batch_size=100, control_variate=True)
    state = kernel.init(random.key(0), 10, None, ROWS, {})
    state = kernel.sample(state, ROWS, {})
    other = ROWS[0], ROWS[1] + 1.0
    state = kernel.refresh(state, other, {})
    exact = anchor_at(
        Model(linear, other, {}, kernel.bound.plan).potential(),
        {"w": state.control.anchor.position},
    )
    np.testing.assert_allclose(state.control.anchor.grad, exact.grad, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "divergence"),
    short(
        [("shampoo", "frozen"), ("monge", "corrected"), ("rmsprop", "auxiliary")],
        kept=[("monge", "corrected")],
    ),
)
def test_metrics_and_treatments_of_gamma_take_it(metric: str, divergence: str) -> None:
    kernel = SGRLD(
        linear, metric=metric, divergence=divergence, batch_size=99, control_variate=True
    )
    state = kernel.init(random.split(random.key(0), 2), 4, None, ROWS, {})

    @jax.jit
    def draws(state: Any) -> Any:
        return jax.lax.fori_loop(0, 6, lambda _, s: kernel.sample(s, ROWS, {}), state)

    state = draws(state)
    assert np.isfinite(state.z["w"]).all()
    mean, _ = linear_moments(*ROWS)
    assert np.abs(state.z["w"] - mean).max() < 0.2  # standard deviations are 0.011


# --- bad input


def noisy(z: Any, rng_key: jax.Array) -> jax.Array:
    return jnp.sum(z**2)


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda: SGRLD(linear, control_variate=3), TypeError, "control_variate must be True, F"),
        (
            lambda: SGRLD(linear, control_variate=True).init(random.key(0), 1, None, ROWS, {}),
            ValueError,
            "control_variate=True .* needs a model whose rows are subsampled",
        ),
        (
            lambda: SGRLD(potential_fn=noisy, control_variate=True).init(
                random.key(0), 1, jnp.zeros(2), (), {}
            ),
            ValueError,
            "control_variate=True .* needs a model whose rows are subsampled",
        ),
    ],
)
def test_bad_input(make: Any, kind: type, match: str) -> None:
    with pytest.raises(kind, match=match):
        make()


@pytest.mark.slow
def test_a_schedule_of_ones_own_still_finds_an_anchor() -> None:
    kernel = SGRLD(
        linear,
        batch_size=100,
        step_size=lambda t: 1e-5 / (1 + t / 100),
        num_steps=5,
        control_variate=True,
    )
    state = kernel.init(random.key(0), 10, None, ROWS, {})
    state = kernel.sample(state, ROWS, {})
    mean, _ = linear_moments(*ROWS)
    assert np.abs(state.control.anchor.position - mean).max() < 0.1
