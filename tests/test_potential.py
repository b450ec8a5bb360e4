"""Potentials and minibatches: unbiased energies, scaling, gathering, noise, and the cost of a step.

In small tables (N rows, batches of B), every batch can be enumerated. So expectations over
minibatches are exact sums, and "rounding" is a few hundred units of 64-bit roundoff.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
from numpyro.infer.util import potential_energy
from targets import SIGMAS, all_batches, local_latents, normal_mean, regression, regression_data
from tiers import short

from numpyro_geom import SGRLD, Shampoo
from numpyro_geom.model import minibatch
from numpyro_geom.model.minibatch import (
    Subsampling,
    _uniform_rows,
    draw,
    gather_local,
    init_stream,
)
from numpyro_geom.model.model import CURVATURE_ROWS, Model
from numpyro_geom.model.plates import read_subsampling
from numpyro_geom.model.potential import (
    CURVATURE_KEYS,
    Potential,
    function_potential,
)

ROUNDING = 1e-12
"""Relative: sums of at most some thousand terms of like size, at 1e-16 each."""

Y = np.random.default_rng(3).normal(size=5) + 1.0
TABLE = np.random.default_rng(4).normal(size=(3, 4))


def two_tables(y1: jax.Array, y2: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    s = numpyro.sample("s", dist.HalfNormal(1))
    with numpyro.plate("first", y1.shape[0]) as i:
        numpyro.sample("y1", dist.Normal(mu, s), obs=y1[i])
    with numpyro.plate("second", y2.shape[0]) as j, handlers.scale(scale=2.0):
        numpyro.sample("y2", dist.Normal(mu**2, 1), obs=y2[j])


def nested(y: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("group", y.shape[0], dim=-2) as j:
        a = numpyro.sample("a", dist.Normal(mu, 1))
        with numpyro.plate("row", y.shape[1], dim=-1) as i:
            numpyro.sample("y", dist.Normal(a, 1), obs=y[j[:, None], i])


def masked(y: jax.Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", y.shape[0]) as i:
        seen = (jnp.arange(y.shape[0]) != 1)[i]
        with handlers.mask(mask=seen), handlers.scale(scale=0.5):
            numpyro.sample("y", dist.StudentT(3, mu, 1), obs=y[i])


def positive_latents(y: jax.Array) -> None:
    """Local latents with a constrained support: their log-Jacobians belong to the rows."""
    rate = numpyro.sample("rate", dist.Gamma(2, 1))
    with numpyro.plate("data", y.shape[0]) as i:
        z = numpyro.sample("z", dist.Gamma(2, rate))
        numpyro.sample("y", dist.Normal(jnp.log(z), 1), obs=y[i])


def subsampling(y: jax.Array) -> None:
    """A model that asks for its own minibatches."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("data", y.shape[0], subsample_size=2):
        rows = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(mu, 1), obs=rows)


def build(model: Any, args: tuple, batch_size: Any) -> tuple[Subsampling, Potential]:
    plan = read_subsampling(model, args, {}, batch_size)
    return plan, Model(model, args, {}, plan).potential()


def batches_of(plan: Subsampling) -> dict[str, jax.Array]:
    """Every joint batch of all subsampled plates, stacked along the first axis."""
    per_plate = [all_batches(plan.sizes[p], b) for p, b in plan.batch_sizes.items()]
    rows = np.meshgrid(*[np.arange(len(b)) for b in per_plate], indexing="ij")
    return {
        p: jnp.asarray(b[r.ravel()])
        for p, b, r in zip(plan.batch_sizes, per_plate, rows, strict=True)
    }


def some_position(model: Any, args: tuple, seed: int = 0) -> dict[str, jax.Array]:
    """An unconstrained position of a model whose unconstrained shapes are the sites' shapes."""
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(*args)
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=np.shape(site["value"])))
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


# --- the energy


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_rows_are_scaled_by_n_over_b(x64: None, batch_size: int) -> None:
    y, mu = jnp.asarray(Y), 0.7
    _, potential = build(normal_mean, (y,), batch_size)
    batch = {"data": jnp.arange(batch_size)}
    rows = Y[:batch_size]
    prior = mu**2 / 50 + np.log(5) + np.log(2 * np.pi) / 2
    terms = (rows - mu) ** 2 / 2 + np.log(2 * np.pi) / 2
    expected = prior + 5 / batch_size * terms.sum()
    np.testing.assert_allclose(
        potential.energy({"mu": jnp.asarray(mu)}, batch), expected, rtol=ROUNDING
    )


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_energy_and_gradient_are_unbiased(x64: None, batch_size: int) -> None:
    args = (jnp.asarray(Y),)
    plan, potential = build(positive_latents, args, batch_size)
    position = some_position(positive_latents, args)
    evaluate = jax.jit(jax.vmap(jax.value_and_grad(potential.energy), (None, 0)))
    energies, grads = evaluate(position, batches_of(plan))
    assert energies.shape == (5**batch_size,)

    def full(position: dict) -> jax.Array:
        return potential_energy(positive_latents, args, {}, position)

    energy, grad = jax.value_and_grad(full)(position)
    np.testing.assert_allclose(energies.mean(), energy, rtol=ROUNDING)
    for name, values in grads.items():
        np.testing.assert_allclose(
            values.mean(0), grad[name], rtol=ROUNDING, atol=ROUNDING, err_msg=name
        )


def test_all_rows_in_any_order_are_the_full_energy(x64: None) -> None:
    args = (jnp.asarray(Y),)
    _, potential = build(positive_latents, args, None)
    position = some_position(positive_latents, args)
    full = potential_energy(positive_latents, args, {}, position)
    np.testing.assert_allclose(potential.energy(position, {}), full, rtol=ROUNDING)
    shuffled = {"data": jnp.array([3, 1, 4, 0, 2])}
    assert potential.deterministic
    _, potential = build(positive_latents, args, 2)
    assert not potential.deterministic
    # no plate is gathered in full, so local latents follow the order of the rows
    np.testing.assert_allclose(potential.energy(position, shuffled), full, rtol=ROUNDING)


@pytest.mark.parametrize(
    ("num_rows", "measured"),
    short([(100_000, 0.004), (1_000_000, 0.1)], kept=[(100_000, 0.004)]),
)
def test_rounding_of_the_energy_on_all_rows(num_rows: int, measured: float) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(num_rows, 3)).astype(np.float32), np.array([0.5, -0.3, 0.2])
    y = (rng.uniform(size=num_rows) < 1 / (1 + np.exp(-x @ w))).astype(np.float32)

    def model(x: jax.Array, y: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("data", num_rows) as i:
            numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])

    _, potential = build(model, (jnp.asarray(x), jnp.asarray(y)), 1000)
    total = jax.jit(lambda w: potential.on_all_rows(lambda rows: potential.energy({"w": w}, rows)))
    errors = []
    # about as far from one another as draws are
    for near in (w + 2 / np.sqrt(num_rows) * rng.normal(size=(15, 3))).astype(np.float32):
        odds = x.astype(float) @ near.astype(float)
        exact = np.sum(np.logaddexp(0, odds) - y * odds)
        exact += np.sum(near.astype(float) ** 2) / 2 + 1.5 * np.log(2 * np.pi)
        errors.append(float(total(near)) - exact)
    # the root mean square of 15 errors is known to a factor of 1.2, and their bias depends on
    # the order of the sum
    assert measured / 4 < np.sqrt(np.mean(np.square(errors))) < 4 * measured


def test_local_latents_are_gathered_and_their_gradients_scattered(x64: None) -> None:
    args = (jnp.asarray(Y),)
    plan, potential = build(local_latents, args, 2)
    assert dict(plan.local_axes) == {"z": (("data", 0),)}
    position = some_position(local_latents, args)
    batch = {"data": jnp.array([3, 1])}
    gathered = gather_local(plan, position, batch)
    np.testing.assert_array_equal(gathered["z"], position["z"][np.array([3, 1])])
    np.testing.assert_array_equal(gathered["mu"], position["mu"])
    grad = jax.grad(potential.energy)(position, batch)["z"]
    expected = 5 / 2 * ((position["z"] - position["mu"]) + (position["z"] - args[0]))
    expected = np.where(np.isin(np.arange(5), [1, 3]), expected, 0.0)
    np.testing.assert_allclose(grad, expected, rtol=ROUNDING)
    # a row that is drawn twice counts twice
    grad = jax.grad(potential.energy)(position, {"data": jnp.array([1, 1])})["z"]
    np.testing.assert_allclose(grad[1], 2 * expected[1], rtol=ROUNDING)


def test_local_latents_of_two_plates_are_gathered_along_both_axes(x64: None) -> None:
    def model(y: jax.Array) -> None:
        with numpyro.plate("k", 2, dim=-3), numpyro.plate("group", 3, dim=-2) as j:
            with numpyro.plate("row", 4, dim=-1) as i:
                z = numpyro.sample("z", dist.Normal(0, 1).expand([5]).to_event(1))
                numpyro.sample("y", dist.Normal(z.sum(-1), 1), obs=y[j[:, None], i])

    plan = read_subsampling(model, (jnp.asarray(TABLE),), {}, {"row": 2, "group": 2})
    assert set(plan.local_axes["z"]) == {("group", 1), ("row", 2)}
    z = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 5)))
    groups, rows = np.array([2, 0]), np.array([3, 1])
    gathered = gather_local(plan, {"z": z}, {"group": jnp.array(groups), "row": jnp.array(rows)})
    np.testing.assert_array_equal(gathered["z"], np.asarray(z)[:, groups][:, :, rows])


# --- the plan


@pytest.mark.parametrize(
    ("model", "args", "batch_size", "batch_sizes", "num_data", "steps_per_epoch"),
    [
        (normal_mean, (Y,), None, {}, 5, 1),
        (normal_mean, (Y,), 5, {}, 5, 1),
        (normal_mean, (Y,), 2, {"data": 2}, 5, 3),
        (normal_mean, (Y,), {"data": 4}, {"data": 4}, 5, 2),
        (subsampling, (Y,), None, {"data": 2}, 5, 3),
        (subsampling, (Y,), 3, {"data": 3}, 5, 2),
        (subsampling, (Y,), 5, {}, 5, 1),
        (two_tables, (Y, TABLE[0]), {"first": 2}, {"first": 2}, 9, 3),
        (two_tables, (Y, TABLE[0]), {"first": 2, "second": 1}, {"first": 2, "second": 1}, 9, 4),
        (nested, (TABLE,), {"row": 3}, {"row": 3}, 12, 2),
        (nested, (TABLE,), {"row": 3, "group": 1}, {"row": 3, "group": 1}, 12, 3),
    ],
)
def test_plan(
    model: Any,
    args: tuple,
    batch_size: Any,
    batch_sizes: dict[str, int],
    num_data: int,
    steps_per_epoch: int,
) -> None:
    plan = read_subsampling(model, tuple(jnp.asarray(a) for a in args), {}, batch_size)
    assert dict(plan.batch_sizes) == batch_sizes
    assert plan.num_data == num_data
    assert plan.steps_per_epoch == steps_per_epoch


def test_without_a_data_plate_n_is_one() -> None:
    def model(y: jax.Array) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        numpyro.sample("y", dist.Normal(mu, 1).expand([5]).to_event(1), obs=y)

    assert read_subsampling(model, (jnp.asarray(Y),), {}).num_data == 1


# --- the covariance of the minibatch gradient


def covariance_of_batches(plan: Subsampling, potential: Potential, position: dict) -> np.ndarray:
    """Exact covariance of the minibatch gradient, over all equally likely batches."""

    def gradient(batch: dict) -> jax.Array:
        return ravel_pytree(jax.grad(potential.energy)(position, batch))[0]

    gradients = np.asarray(jax.jit(jax.vmap(gradient))(batches_of(plan)))
    centred = gradients - gradients.mean(0)
    return centred.T @ centred / len(centred)


def covariance_of_rows(potential: Potential, position: dict) -> np.ndarray:
    """The covariance according to `score_noise`."""
    flat, unravel = ravel_pytree(position)
    total = np.zeros((flat.size, flat.size))
    for weight, rows_fn in potential.score_noise(random.key(0)):
        jacobian = np.asarray(jax.jacobian(lambda p, f=rows_fn: f(unravel(p)))(flat))
        centred = jacobian - jacobian.mean(0)
        total += weight * centred.T @ centred / len(centred)
    return total


@pytest.mark.parametrize(
    ("model", "args", "batch_size"),
    [
        (normal_mean, (Y,), 1),
        (local_latents, (Y,), 2),
        pytest.param(positive_latents, (Y,), 2, marks=pytest.mark.slow),
        (masked, (Y,), 3),
        (two_tables, (Y, TABLE[0]), {"first": 2, "second": 1}),
        pytest.param(two_tables, (Y, TABLE[0]), {"second": 2}, marks=pytest.mark.slow),
        (nested, (TABLE,), {"row": 2}),
        pytest.param(nested, (TABLE,), {"group": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:20],
)
def test_score_noise_is_the_covariance_of_the_minibatch_gradient(
    x64: None, model: Any, args: tuple, batch_size: Any
) -> None:
    args = tuple(jnp.asarray(a) for a in args)
    plan, potential = build(model, args, batch_size)
    position = some_position(model, args)
    exact = covariance_of_batches(plan, potential, position)
    np.testing.assert_allclose(
        covariance_of_rows(potential, position), exact, atol=ROUNDING * np.abs(exact).max()
    )


def test_score_noise_of_nested_subsampled_plates_counts_the_interaction_twice(x64: None) -> None:
    """With row scores s_ij = m + a_i + b_j + e_ij a batch of one group and one row has the noise
    (G R)^2 (Var a + Var b + Var e). Each plate's share is measured on one random row of the other
    plate, so that both hold Var e: an upper bound, on average.
    """
    args = (jnp.asarray(TABLE),)
    plan, potential = build(nested, args, {"group": 1, "row": 1})
    position = some_position(nested, args)
    flat, unravel = ravel_pytree(position)

    @jax.jit
    @jax.vmap
    def estimate(key: jax.Array) -> jax.Array:
        total = jnp.zeros((flat.size, flat.size))
        for weight, rows_fn in potential.score_noise(key):
            jacobian = jax.jacobian(lambda p, f=rows_fn: f(unravel(p)))(flat)
            total += weight * jnp.cov(jacobian.T, bias=True)
        return total

    estimates = np.asarray(estimate(random.split(random.key(0), 2000)))
    scores = np.stack(
        [
            np.asarray(ravel_pytree(jax.grad(potential.energy)(position, batch))[0])
            for batch in (
                {"group": jnp.array([g]), "row": jnp.array([r])} for g in range(3) for r in range(4)
            )
        ]
    ).reshape(3, 4, flat.size)
    e = scores - scores.mean(0) - scores.mean(1)[:, None] + scores.mean((0, 1))
    interaction = np.einsum("grd,gre->de", e, e) / 12
    exact = covariance_of_batches(plan, potential, position) + interaction
    error = estimates.std(0) / np.sqrt(len(estimates))
    rounding = ROUNDING * np.abs(exact).max()
    assert np.all(np.abs(estimates.mean(0) - exact) <= SIGMAS * error + rounding)


def test_score_noise_of_a_stochastic_function(x64: None) -> None:
    def potential_fn(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        return z @ z / 2 + z @ (jnp.array([1.0, 3.0]) * random.normal(rng_key, (2,)))

    potential = function_potential(potential_fn)
    ((weight, rows_fn),) = potential.score_noise(random.key(0))
    scores = np.asarray(jax.jacobian(rows_fn)(jnp.array([1.0, 2.0])))
    assert weight == 1.0
    assert scores.shape == (CURVATURE_KEYS, 2)
    # a variance from n normals has the relative standard error sqrt(2 / n); 5 of them
    np.testing.assert_allclose(scores.var(0), [1, 9], rtol=5 * np.sqrt(2 / CURVATURE_KEYS))


# --- curvature batches and splits


def test_curvature_batch_is_all_rows_where_they_are_few(x64: None) -> None:
    args = (jnp.asarray(Y),)
    _, potential = build(positive_latents, args, 2)
    position = some_position(positive_latents, args)
    batch = potential.curvature_batch(random.key(0))
    full = potential_energy(positive_latents, args, {}, position)
    np.testing.assert_allclose(potential.energy(position, batch), full, rtol=ROUNDING)


def test_curvature_batch_is_distinct_random_rows_where_they_are_many() -> None:
    _, potential = build(normal_mean, (jnp.zeros(5000),), 10)
    batches = [np.asarray(potential.curvature_batch(random.key(s))["data"]) for s in range(2)]
    for rows in batches:
        assert len(set(rows.tolist())) == len(rows) == CURVATURE_ROWS
        assert rows.min() >= 0
        assert rows.max() < 5000
    assert set(batches[0].tolist()) != set(batches[1].tolist())


@pytest.mark.parametrize("batch_size", [3, 4, 5, 8])
def test_split_gives_disjoint_thirds(x64: None, batch_size: int) -> None:
    y = jnp.asarray(np.random.default_rng(0).normal(size=9))
    _, potential = build(normal_mean, (y,), batch_size)
    rows = jnp.arange(batch_size)
    parts = [part["data"].tolist() for part in potential.split({"data": rows}, 3)]
    third = batch_size // 3
    assert [len(part) for part in parts] == [third] * 3
    assert len(set(itertools.chain(*parts))) == 3 * third
    # each part is scaled by its own number of rows
    position = {"mu": jnp.asarray(0.3)}
    energy = potential.energy(position, {"data": jnp.array(parts[1])})
    _, direct = build(normal_mean, (y,), third)
    np.testing.assert_allclose(
        energy, direct.energy(position, {"data": jnp.array(parts[1])}), rtol=ROUNDING
    )


def test_split_and_keys_of_a_stochastic_function() -> None:
    potential = function_potential(lambda z, rng_key: z @ random.normal(rng_key, z.shape))
    z = jnp.ones(2)
    for key in (random.key(0), random.PRNGKey(0)):
        batch, _ = potential.draw(key, ())
        parts = potential.split(batch, 3)
        energies = {float(potential.energy(z, part)) for part in (batch, *parts)}
        assert len(energies) == 4
    several = random.split(random.key(1), 7)
    singles = [potential.energy(z, key) for key in several]
    # a mean of 7 float32 numbers of order 1
    np.testing.assert_allclose(potential.energy(z, several), np.mean(singles), rtol=1e-6)


# --- the stream of rows


def epoch_rows(plan: Subsampling, seed: int, num_steps: int) -> dict[str, np.ndarray]:
    """Rows of consecutive batches under ``batching="epoch"``, end to end, for each plate."""
    stream = init_stream(plan, random.key(seed))

    def step(stream: Any, _: None) -> tuple[Any, dict]:
        batch, stream = draw(plan, random.key(99), stream)
        return stream, batch

    _, batches = jax.lax.scan(step, stream, None, length=num_steps)
    return {p: np.asarray(rows).ravel() for p, rows in batches.items()}


@pytest.mark.parametrize(("num_rows", "batch_size"), [(5, 2), (10, 3), (7, 6), (97, 32), (128, 16)])
def test_every_row_comes_once_an_epoch(num_rows: int, batch_size: int) -> None:
    plan = read_subsampling(normal_mean, (jnp.zeros(num_rows),), {}, batch_size, "epoch")
    epochs = 4
    num_steps = -(-epochs * num_rows // batch_size)
    rows = epoch_rows(plan, 0, num_steps)["data"]
    orders = rows[: epochs * num_rows].reshape(epochs, num_rows)
    np.testing.assert_array_equal(np.sort(orders, axis=1), np.tile(np.arange(num_rows), (4, 1)))
    assert len({tuple(order) for order in orders}) > 1
    other = epoch_rows(plan, 1, num_steps)["data"]
    assert not np.array_equal(rows, other)


def test_two_plates_have_streams_of_their_own() -> None:
    args = (jnp.zeros(8), jnp.zeros(8))
    plan = read_subsampling(two_tables, args, {}, {"first": 4, "second": 2}, "epoch")
    rows = epoch_rows(plan, 0, 4)
    first, second = rows["first"], rows["second"]
    np.testing.assert_array_equal(np.sort(first.reshape(2, 8)), np.tile(np.arange(8), (2, 1)))
    np.testing.assert_array_equal(np.sort(second), np.arange(8))
    assert not np.array_equal(first[:8], second)
    replacement = read_subsampling(two_tables, args, {}, {"first": 4, "second": 4})
    batch, stream = draw(replacement, random.key(0), ())
    assert stream == ()
    assert not np.array_equal(batch["first"], batch["second"])


def test_rows_drawn_with_replacement_are_uniform_and_independent() -> None:
    plan = read_subsampling(normal_mean, (jnp.zeros(4),), {}, 2)
    keys = random.split(random.key(0), 40_000)
    rows = np.asarray(jax.vmap(lambda key: draw(plan, key, ())[0]["data"])(keys))
    counts = np.bincount(4 * rows[:, 0] + rows[:, 1], minlength=16)
    # chi-square with 15 degrees of freedom: above 56 with probability 1e-6
    assert ((counts - 2500) ** 2 / 2500).sum() < 56


def test_rows_of_a_plate_whose_size_is_no_power_of_two_are_uniform() -> None:
    """`jax.random.randint` is not, by a chi-square of 12,000."""
    size = 3 * 2**29
    rows = np.asarray(_uniform_rows(random.key(0), 400_000, size))
    assert rows.min() >= 0
    assert rows.max() < size
    counts = np.bincount(rows // 2**29, minlength=3)
    # chi-square with 2 degrees of freedom: above 28 with probability 1e-6
    assert ((counts - 400_000 / 3) ** 2 / (400_000 / 3)).sum() < 28


@pytest.mark.parametrize(("rows", "size"), [(1, 5), (3, 7), (4, 8), (5, 6), (7, 7), (6, 100)])
def test_a_stratified_batch_has_each_row_equally_often(
    rows: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all outcomes of the uniform number behind each index, which are equally likely."""
    every = []
    for number in range(size):
        same = jnp.full(rows, number, jnp.int32)
        monkeypatch.setattr(minibatch, "_uniform_rows", lambda *_, same=same: same)
        every.append(np.asarray(minibatch._stratified_rows(random.key(0), rows, size)))
    assert (np.diff(every, axis=1) >= 0).all()
    np.testing.assert_array_equal(np.bincount(np.ravel(every)), np.full(size, rows))


def test_a_stratified_gradient_is_unbiased_with_less_noise() -> None:
    y = jnp.sort(random.normal(random.key(0), (200,)))
    grads = {}
    for batching in ("replacement", "stratified"):
        plan = read_subsampling(normal_mean, (y,), {}, 7, batching)
        potential = Model(normal_mean, (y,), {}, plan).potential()

        def grad(key: jax.Array, potential: Potential = potential) -> jax.Array:
            batch, _ = potential.draw(key, ())
            return jax.grad(potential.energy)({"mu": jnp.zeros(())}, batch)["mu"]

        found = jax.jit(jax.vmap(grad))(random.split(random.key(1), 20_000))
        grads[batching] = np.asarray(found, np.float64)
    exact = -float(y.sum())
    for found in grads.values():
        assert abs(found.mean() - exact) < 4 * found.std() / 20_000**0.5
    # of sorted rows within a seventh of them: 0.12 of the standard deviation of all
    assert grads["stratified"].std() < 0.3 * grads["replacement"].std()


def test_the_kernel_consumes_one_batch_a_step() -> None:
    """Neither the start, nor the check of a draw, nor `refresh` takes rows from the stream."""
    y = jnp.asarray(np.random.default_rng(0).normal(size=10))
    kernel = SGRLD(normal_mean, batch_size=3, batching="epoch", step_size=1e-3, num_steps=7)
    state = kernel.init(random.key(0), 0, None, (y,), {})
    draw_one = jax.jit(lambda s: kernel.sample(kernel.refresh(s, (y,), {}), (y,), {}))
    for draws in range(1, 4):
        state = draw_one(state)
        _, epoch, offset = state.stream["data"]
        assert int(state.steps_taken) == 7 * draws
        assert (int(epoch), int(offset)) == divmod(3 * 7 * draws, 10)


# --- the cost of a step


def sub_jaxprs(value: Any) -> Iterator[Any]:
    for part in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns")):
        part = getattr(part, "jaxpr", part)
        if hasattr(part, "eqns"):
            yield part


def largest_result(jaxpr: Any) -> int:
    """Entries of the largest array that a program computes, and uses, anywhere within.

    NumPyro's plate makes an array of all its indices before it asks its handlers for others; it
    is not used then, and the compiler drops it.
    """
    used = {v for e in jaxpr.eqns for v in e.invars if not hasattr(v, "val")}
    used |= {v for v in jaxpr.outvars if not hasattr(v, "val")}
    largest = 0
    for equation in jaxpr.eqns:
        for name, value in equation.params.items():
            if name != "mesh":
                for inner in sub_jaxprs(value):
                    largest = max(largest, largest_result(inner))
        for result in equation.outvars:
            if result in used:
                largest = max(largest, int(np.prod(getattr(result.aval, "shape", ()))))
    return largest


MEASURED: dict[str, dict] = {
    "identity": {},
    "wenzel": {"metric": "wenzel", "divergence": "corrected", "step_size": 1e-3, "num_steps": 10},
    "monge": {"metric": "monge", "divergence": "auxiliary"},
    "shampoo": {"metric": Shampoo(interval=3), "num_steps": 10},
}


@pytest.mark.parametrize(
    ("name", "batching"),
    short(
        itertools.product(MEASURED, ["replacement", "epoch"]),
        kept=[("wenzel", "replacement")],
    ),
)
def test_no_array_of_a_step_has_as_many_entries_as_there_are_rows(name: str, batching: str) -> None:
    num_rows = 1_000_000
    X, y = jnp.zeros((num_rows, 3)), jnp.ones(num_rows)
    kernel = SGRLD(regression, batch_size=16, batching=batching, **MEASURED[name])
    state = kernel.init(random.key(0), 100, None, (X, y), {})
    jaxpr = jax.make_jaxpr(kernel.sample)(state, (X, y), {})
    # the largest: rows of X from which curvature and noise are measured
    assert largest_result(jaxpr.jaxpr) <= 4 * CURVATURE_ROWS
    constrain = jax.make_jaxpr(kernel.get_constrain_fn((X, y), {}))(state.z)
    assert largest_result(constrain.jaxpr) <= 10
    # and it would have shown
    full = SGRLD(regression, step_size=1e-3, num_steps=1)
    state = full.init(random.key(0), 0, None, (X, y), {})
    assert largest_result(jax.make_jaxpr(full.sample)(state, (X, y), {}).jaxpr) >= num_rows


@pytest.mark.slow
def test_compiled_cost_grows_neither_with_rows_nor_with_steps() -> None:
    def costs(num_rows: int, num_steps: int) -> tuple[float, int]:
        X, y = regression_data(num_rows, 3)
        kernel = SGRLD(
            regression,
            metric="rmsprop",
            divergence="corrected",
            batch_size=16,
            batching="epoch",
            step_size=1e-6,
            num_steps=num_steps,
        )
        state = kernel.init(random.key(0), 100, None, (X, y), {})
        compiled = jax.jit(kernel.sample).lower(state, (X, y), {}).compile()
        # not "bytes accessed", which counts the whole of a table from which rows are gathered
        return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

    small, large, long = costs(10_000, 10), costs(500_000, 10), costs(10_000, 1000)
    # loops count once, whatever their length; the arithmetic of the row numbers may differ a bit
    np.testing.assert_allclose(large[0], small[0], rtol=0.02)
    assert large[1] <= 1.02 * small[1]
    assert long[1] <= 1.02 * small[1]


def test_a_constant_energy_is_an_array() -> None:
    value, slope = jax.value_and_grad(function_potential(lambda z: 0.5).energy)(jnp.ones(2), {})
    assert isinstance(value, jax.Array)
    np.testing.assert_array_equal(slope, 0)
