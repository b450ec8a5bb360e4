"""The kernel contract: NumPyro's protocol, exact limits, schedules, and the divergence guard.

Requirements for every kernel and metric are tested in `test_conformance`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, DiscreteGibbs, Gibbs, init_to_value
from numpyro.infer.gibbs import discrete_latent_sites
from numpyro.infer.util import constrain_fn, potential_energy
from targets import (
    SIGMAS,
    assert_moments,
    assert_trees_equal,
    columns,
    count_compilations,
    half_square,
    last_draws,
    linear,
    linear_moments,
    normal_mean,
    regression,
    regression_data,
    replayed,
    run,
)
from tiers import short

from numpyro_geom import SGHMC, SGRLD, Monge, RMSprop, SGKernel, cyclical
from numpyro_geom.diagnostics import SamplingWarning
from numpyro_geom.kernel import SGState
from numpyro_geom.model import minibatch
from numpyro_geom.model.plates import read_subsampling

# One shape for all models with data: NumPyro starts a chain by many small programs, each compiled
# once for a shape.
X, Y = regression_data(24, 2)
BATCH = 6
CHAIN_METHODS: dict[str, Any] = {
    "parallel": "parallel",
    "sequential": "sequential",
    "vectorized": "vectorized",
    "vmap": jax.vmap,
}


def one_step(model: Callable = regression, **settings: Any) -> SGRLD:
    """A kernel with one step of fixed size per draw, on minibatches by default."""
    settings = {"batch_size": BATCH, "step_size": 1e-3, "num_steps": 1, **settings}
    return SGRLD(model, **settings)


# --- compilations


def compiled_sample(kernel: SGKernel) -> tuple[Callable[[SGState], SGState], list[None]]:
    """A compiled `sample`, and a list that grows by one whenever it is traced anew."""
    traces: list[None] = []

    def sample(state: SGState) -> SGState:
        traces.append(None)
        return kernel.sample(state, (X, Y), {})

    return jax.jit(sample), traces


@pytest.mark.slow
def test_a_second_run_compiles_no_more_than_with_nuts() -> None:
    counts = {}
    for name, kernel in {"sgrld": one_step(), "nuts": NUTS(regression)}.items():
        mcmc = run(kernel, X, Y, num_warmup=2, num_samples=2)
        with count_compilations() as compiled:
            mcmc.run(random.key(1), X, Y)
            counts[name] = compiled()
    assert counts["sgrld"] <= counts["nuts"]


# --- chain methods and resuming

SHORT = 5


@pytest.fixture(scope="module")
def long_runs() -> dict[tuple[str, str], tuple[MCMC, MCMC]]:
    """Cache over tests: (chain method, batching) -> a run of SHORT draws and one of twice that."""
    return {}


def runs_of(cache: dict, method: str, batching: str) -> tuple[MCMC, MCMC]:
    if (method, batching) not in cache:
        pair = [
            run(
                one_step(metric="rmsprop", batching=batching, num_steps=2),
                X,
                Y,
                num_samples=num,
                num_chains=2,
                chain_method=CHAIN_METHODS[method],
            )
            for num in (SHORT, 2 * SHORT)
        ]
        cache[method, batching] = tuple(pair)
    return cache[method, batching]


# compiled quickly, the program of a part rounds one sum in another order than that of the whole
@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("method", "batching"),
    # an epoch's permutation is what has to be carried over
    short(
        [("sequential", "replacement"), *((method, "epoch") for method in CHAIN_METHODS)],
        kept=[("vectorized", "epoch")],
    ),
)
def test_resuming_is_one_long_run_bit_for_bit(long_runs: dict, method: str, batching: str) -> None:
    short, long = runs_of(long_runs, method, batching)
    first = short.get_samples(group_by_chain=True)
    short.post_warmup_state = short.last_state
    short.run(short.post_warmup_state.rng_key, X, Y)
    second = short.get_samples(group_by_chain=True)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)
    assert_trees_equal(both, long.get_samples(group_by_chain=True))
    assert_trees_equal(short.last_state, long.last_state)


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("method", short(CHAIN_METHODS, kept=["vectorized"]))
def test_chain_methods_give_the_same_draws(long_runs: dict, method: str) -> None:
    expected = runs_of(long_runs, "sequential", "epoch")[1].get_samples(group_by_chain=True)
    draws = runs_of(long_runs, method, "epoch")[1].get_samples(group_by_chain=True)
    for name, value in expected.items():
        # 24 float32 steps, each a sum over a few rows, in another order
        np.testing.assert_allclose(draws[name], value, rtol=2e-5, atol=2e-6)
        assert not np.allclose(value[0], value[1])  # chains of their own


def test_supports_with_array_bounds_outlive_the_chain_method() -> None:
    """What `init` keeps of the supports must not be traced values: "parallel" traces it."""

    def model(y: jax.Array) -> None:
        s = numpyro.sample("s", dist.Uniform(jnp.zeros(2), jnp.ones(2)).to_event(1))
        with numpyro.plate("data", y.shape[0]) as i:
            numpyro.sample("y", dist.Normal(s.sum(), 1), obs=y[i])

    kernel = one_step(model)
    mcmc = run(kernel, Y, num_chains=2, chain_method="parallel")
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, Y)
    draws = mcmc.get_samples()["s"]
    assert np.all((draws > 0) & (draws < 1))


def test_legacy_keys_give_the_draws_of_typed_ones() -> None:
    kernel = one_step()
    sample = jax.jit(lambda s: kernel.sample(s, (X, Y), {}))
    states = [
        sample(kernel.init(key, 0, None, (X, Y), {})) for key in (random.key(3), random.PRNGKey(3))
    ]
    assert_trees_equal(states[0].z, states[1].z)
    assert_trees_equal(states[0].seed, states[1].seed)


# --- pickling, arguments, composition


@pytest.mark.slow
def test_a_pickled_run_resumes_where_it_was() -> None:
    mcmc = run(one_step(replayed, metric="monge"), X, Y, num_warmup=2)
    mcmc.post_warmup_state = mcmc.last_state
    copy = pickle.loads(pickle.dumps(mcmc))
    for resumed in (mcmc, copy):
        resumed.run(resumed.post_warmup_state.rng_key, X, Y)
    assert_trees_equal(copy.get_samples(), mcmc.get_samples())


def test_a_pickled_kernel_works_before_and_after_init() -> None:
    kernel = one_step(metric="wenzel", step_size=cyclical(1e-3, 10))
    fresh = pickle.loads(pickle.dumps(kernel))
    state = kernel.init(random.key(0), 0, None, (X, Y), {})
    assert pickle.loads(pickle.dumps(kernel)).settings == kernel.settings
    assert_trees_equal(fresh.init(random.key(0), 0, None, (X, Y), {}).z, state.z)


def test_a_pickled_run_on_a_function_resumes_without_init_params() -> None:
    kernel = SGRLD(potential_fn=half_square, step_size=0.1, num_steps=1)
    mcmc = run(kernel, init_params=jnp.ones(2))
    mcmc.post_warmup_state = mcmc.last_state
    copy = pickle.loads(pickle.dumps(mcmc))
    for resumed in (mcmc, copy):
        resumed.run(resumed.post_warmup_state.rng_key)
    np.testing.assert_array_equal(copy.get_samples(), mcmc.get_samples())


def test_an_epoch_goes_on_from_draw_to_draw() -> None:
    """Four draws of one batch each see every row once: their gradients average to the full one."""
    kernel = one_step(normal_mean, batching="epoch", step_size=1e-30)
    start = {"mu": jnp.array(-9.0)}
    state = kernel.init(random.key(0), 0, start, (Y,), {})
    sample = jax.jit(lambda s: kernel.sample(s, (Y,), {}))
    slopes = np.array([float((state := sample(state)).grad_norm) for _ in range(12)])
    full = -jax.grad(lambda z: potential_energy(normal_mean, (Y,), {}, z))(start)["mu"]
    np.testing.assert_allclose(slopes.reshape(3, 4).mean(1), full, rtol=1e-5)  # float32
    assert np.ptp(slopes[:4]) > 0.01 * float(full)


@pytest.mark.slow
def test_jit_model_args() -> None:
    kernel, other = one_step(), 3 * Y
    sample = jax.jit(lambda s, y: kernel.sample(s, (X, y), {}))

    def draws(y: jax.Array) -> np.ndarray:
        state = kernel.init(random.key(0), 0, None, (X, y), {})
        return np.stack([(state := sample(state, y)).z["w"] for _ in range(4)])

    mcmc = run(one_step(), X, Y, jit_model_args=True)
    np.testing.assert_allclose(mcmc.get_samples()["w"], draws(Y), rtol=2e-5)
    with count_compilations() as compiled:
        mcmc.run(random.key(0), X, other)
        assert compiled() <= 2  # none of the loop; NUTS has one or two as well
    np.testing.assert_allclose(mcmc.get_samples()["w"], draws(other), rtol=2e-5)
    assert not np.allclose(draws(other), draws(Y))


def test_refresh_evaluates_the_new_arguments_and_moves_nothing() -> None:
    kernel = one_step(batch_size=None)
    state = kernel.init(random.key(0), 0, None, (X, Y), {})
    new = kernel.refresh(state, (X, 2 * Y), {})

    def energy(z: Any) -> jax.Array:
        return potential_energy(regression, (X, 2 * Y), {}, z)

    value, grad = jax.value_and_grad(energy)(state.z)
    # float32 sums over 24 rows
    np.testing.assert_allclose(new.potential_energy, value, rtol=1e-5)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in grad.values()))
    np.testing.assert_allclose(new.grad_norm, norm, rtol=1e-5)
    same = {"potential_energy": (), "grad_norm": ()}
    assert_trees_equal(new._replace(**same), state._replace(**same))


def test_wrap_model_leaves_the_kernel_alone() -> None:
    kernel = one_step(metric="wenzel")
    kernel.init(random.key(0), 0, None, (X, Y), {})

    def wrapper(model: Callable) -> Callable:
        return lambda *args: model(*args)

    wrapped = kernel.wrap_model(wrapper)
    assert kernel.model == regression
    assert wrapped.model != regression
    assert wrapped.bound.plan is None
    assert kernel.bound.plan is not None
    wrapped.init(random.key(0), 0, None, (X[:12], Y[:12]), {})
    assert dict(kernel.bound.plan.sizes) == {"data": 24}
    assert dict(wrapped.bound.plan.sizes) == {"data": 12}


def test_an_interval_of_one_epoch_follows_the_data() -> None:
    """`interval=None` is an epoch of the data at hand, at every `init`."""
    kernel = one_step(metric="wenzel")
    kernel.init(random.key(0), 0, None, (X, Y), {})
    assert kernel.settings.metric.interval == 4
    kernel.init(random.key(0), 0, None, (X[:12], Y[:12]), {})
    assert kernel.settings.metric.interval == 2


@pytest.mark.parametrize("model", [regression, replayed], ids=lambda m: m.__name__)
def test_constrain_fn_is_numpyros(model: Callable) -> None:
    kernel = one_step(model)
    position = kernel.init(random.key(0), 0, None, (X, Y), {}).z
    expected = constrain_fn(model, (X, Y), {}, position, return_deterministic=True)
    for maker in (kernel.get_constrain_fn, kernel.postprocess_fn):
        values = maker((X, Y), {})(position)
        assert set(values) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(values[name], value, rtol=1e-6)


def test_constrain_fn_follows_its_arguments() -> None:
    def model(a: Any = 0.0, b: Any = 0.0) -> None:
        s = numpyro.sample("s", dist.Normal(0, 1))
        numpyro.deterministic("value", s + a - b)

    kernel = one_step(model, batch_size=None)
    one, position = jnp.ones(()), {"s": jnp.zeros(())}
    kernel.init(random.key(0), 0, None, (), {"a": one})
    assert float(kernel.get_constrain_fn((), {"a": one})(position)["value"]) == 1
    assert float(kernel.get_constrain_fn((), {"b": one})(position)["value"]) == -1


def gibbs_model(y: jax.Array) -> None:
    c = numpyro.sample("c", dist.Categorical(jnp.array([0.3, 0.7])))
    x = numpyro.sample("x", dist.LogNormal(0, 0.5))
    z = numpyro.sample("z", dist.Normal(0, 1))
    with numpyro.plate("data", y.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.array([-1.0, 1.0])[c] + x + z, 1), obs=y)


def gibbs_kernel() -> Gibbs:
    # with the Metropolis test the block is exact at any step, and so is the sweep
    block = SGRLD(gibbs_model, adjusted=True, step_size=0.15, num_steps=5)
    return Gibbs(
        [
            (DiscreteGibbs(gibbs_model), discrete_latent_sites),
            (block, ["x"]),
            (NUTS(gibbs_model), ["z"]),
        ]
    )


@pytest.mark.slow
def test_gibbs_with_discrete_and_nuts_blocks_against_quadrature() -> None:
    y = np.array([0.5, 1.5, 2.0])
    mcmc = run(gibbs_kernel(), jnp.asarray(y), num_warmup=300, num_samples=6000)
    draws = mcmc.get_samples()
    log_x, z = np.meshgrid(np.linspace(-3, 3, 601), np.linspace(-6, 6, 601))
    log_density = np.stack(
        [
            np.log(p)
            - log_x**2 / 0.5
            - z**2 / 2
            - ((y[:, None, None] - shift - np.exp(log_x) - z) ** 2).sum(0) / 2
            for p, shift in ((0.3, -1), (0.7, 1))
        ]
    )
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    functions = {
        "c": (np.array([0.0, 1.0])[:, None, None], lambda d: d["c"]),
        "x": (np.exp(log_x), lambda d: d["x"]),
        "z": (z, lambda d: d["z"]),
        "x^2": (np.exp(2 * log_x), lambda d: d["x"] ** 2),
        "xz": (np.exp(log_x) * z, lambda d: d["x"] * d["z"]),
    }
    for name, (grid, of_draws) in functions.items():
        exact = (weights * grid).sum()
        values = np.asarray(of_draws(draws), np.float64)
        error = values.std() / np.sqrt(effective_sample_size(values[None]))
        assert abs(values.mean() - exact) < SIGMAS * error, (name, values.mean(), exact, error)


def test_gibbs_hands_the_block_constrained_init_params() -> None:
    kernel = gibbs_kernel()
    y = jnp.array([0.5, 1.5, 2.0])
    state = kernel.init(random.key(0), 10, {"x": jnp.array(2.0)}, (y,), {})
    np.testing.assert_allclose(state.block_states[1].z["x"], np.log(2.0), rtol=1e-6)
    np.testing.assert_allclose(kernel.get_constrain_fn((y,), {})(state.z)["x"], 2.0, rtol=1e-6)


# --- what a user sees while it runs


def test_progress_bar_shows_step_size_and_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in ("CI", "PYTEST_XDIST_WORKER"):  # NumPyro switches the bar off under either
        monkeypatch.delenv(name, raising=False)
    mcmc = run(one_step(num_steps=3), X, Y, progress_bar=True)
    assert mcmc.progress_bar
    assert "3 steps of size 1.00e-03" in capsys.readouterr().err


def test_diagnostics_string() -> None:
    kernel = one_step(batch_size=None, adjusted=True)
    state = kernel.init(random.key(0), 0, None, (X, Y), {})
    assert kernel.get_diagnostics_str(state) == "1 steps of size 1.00e-03. acc. prob=1.00"
    state = state._replace(num_diverging=jnp.array(2), accept_prob=jnp.array(0.5))
    assert kernel.get_diagnostics_str(state).endswith("acc. prob=0.50. 2 failed")


def test_extra_fields_and_num_steps() -> None:
    fields = (
        "metric_state.statistic",
        "adaptation.curvature",
        "i",
        "steps_taken",
        "num_diverging",
        "dynamics",
    )
    mcmc = run(one_step(metric="rmsprop", num_steps=3), X, Y, num_warmup=2, extra_fields=fields)
    extra = mcmc.get_extra_fields()
    np.testing.assert_array_equal(extra["i"], [3, 4, 5, 6])
    np.testing.assert_array_equal(extra["steps_taken"], [9, 12, 15, 18])
    np.testing.assert_array_equal(extra["num_steps"], [3] * 4)
    np.testing.assert_array_equal(extra["num_diverging"], [0] * 4)
    np.testing.assert_allclose(extra["step_size"], [1e-3] * 4, rtol=1e-6)
    assert extra["metric_state.statistic"]["w"].shape == (4, 2)
    assert extra["adaptation.curvature"].shape == (4,)
    assert extra["dynamics"]["w"].shape == (4, 2)
    assert not extra["diverging"].any()


@pytest.mark.slow
def test_automatic_number_of_steps_spans_half_a_relaxation_time() -> None:
    kernel = SGRLD(regression, metric="rmsprop", batch_size=BATCH)
    sample, traces = compiled_sample(kernel)
    state = kernel.init(random.key(0), 20, None, (X, Y), {})
    for _ in range(22):
        before = int(state.steps_taken)
        state = sample(state)
        assert int(state.steps_taken) - before == int(state.num_steps)
    wanted = 0.5 / (float(state.step_size) * float(state.adaptation.slowest))
    assert int(state.num_steps) == np.clip(np.ceil(wanted), 1, 1000)
    assert float(state.step_size) > 0
    assert len(traces) == 1


def test_a_start_at_values_of_32_bits_is_a_position_of_64_bits() -> None:
    def model() -> None:
        numpyro.sample("scale", dist.HalfNormal(1.0))

    at = init_to_value(values={"scale": jnp.float32(2)})
    with jax.enable_x64(True):
        state = SGRLD(model, step_size=0.1, init_strategy=at).init(random.key(0), 0, None, (), {})
        assert state.z["scale"].dtype == state.potential_energy.dtype == jnp.float64
    np.testing.assert_allclose(np.exp(state.z["scale"]), 2, rtol=1e-6)


def test_init_params_of_one_chain_and_of_several() -> None:
    # the constrained site too is given by its unconstrained value
    start = {"w": jnp.array([1.0, 2.0]), "s": jnp.array(-0.5)}
    state = one_step().init(random.key(0), 0, start, (X, Y), {})
    assert_trees_equal(state.z, start)
    starts = {"w": 1 + jnp.arange(4.0).reshape(2, 2), "s": jnp.array([0.1, 0.2])}
    state = one_step().init(random.split(random.key(0), 2), 0, starts, (X, Y), {})
    assert_trees_equal(state.z, starts)
    # a step so small that float32 does not see it
    mcmc = run(
        one_step(step_size=1e-30),
        X,
        Y,
        num_chains=2,
        chain_method="sequential",
        init_params=starts,
        num_samples=1,
    )
    np.testing.assert_array_equal(mcmc.get_samples()["w"], starts["w"])


# --- exact limits


def energy_of(batch: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """The minibatch energy of `linear`, by hand and without constants."""

    def energy(w: jax.Array) -> jax.Array:
        residual = Y[batch] - X[batch] @ w
        return w @ w / 2 + len(Y) / BATCH * residual @ residual / (2 * 0.25)

    return energy


def keys_of(state: SGState, num_steps: int) -> tuple[list, jax.Array]:
    """Keys of the batches and of the noise of the next draw, and the key of the draw after it."""
    next_key, key_draw, _, _ = random.split(state.rng_key, 4)
    key, _ = random.split(key_draw)
    keys = []
    for _ in range(num_steps):
        key, key_batch, key_step = random.split(key, 3)
        keys.append((key_batch, key_step))
    return keys, next_key


def rows_of(key_batch: jax.Array) -> jax.Array:
    """The rows of a step, from its key."""
    return minibatch.draw(read_subsampling(linear, (X, Y), {}, BATCH), key_batch, ())[0]["data"]


@pytest.mark.parametrize("divergence", ["frozen", "none"])
def test_identity_metric_is_sgld(divergence: str) -> None:
    """With averaged noise, and without."""
    h, num_steps = 2e-3, 5
    kernel = one_step(linear, step_size=h, num_steps=num_steps, divergence=divergence)
    state = kernel.init(random.key(0), 0, {"w": jnp.array([0.3, -0.4])}, (X, Y), {})
    w, last = state.z["w"], state.dynamics["w"] if divergence == "frozen" else None
    keys, next_key = keys_of(state, num_steps)
    for key_batch, key_step in keys:
        batch = rows_of(key_batch)
        noise = new = random.normal(key_step, w.shape)
        if last is not None:
            noise, last = (last + new) / 2, new
        w = w - h * jax.grad(energy_of(batch))(w) + jnp.sqrt(2 * h) * noise
    state = kernel.sample(state, (X, Y), {})
    # float32: five steps of a gradient of order 100, h times that of order 0.1
    np.testing.assert_allclose(state.z["w"], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(random.key_data(state.rng_key), random.key_data(next_key))


def test_temperature_zero_is_the_preconditioned_gradient_step() -> None:
    h, num_steps, metric = 1e-2, 3, RMSprop(decay=0.5, eps=0.1)
    kernel = one_step(
        linear,
        step_size=h,
        num_steps=num_steps,
        metric=metric,
        divergence="corrected",
        temperature=0.0,
    )
    state = kernel.init(random.key(0), 0, {"w": jnp.array([0.3, -0.4])}, (X, Y), {})
    w, statistic = state.z["w"], jnp.zeros(2)
    for key_batch, _ in keys_of(state, num_steps)[0]:
        batch = rows_of(key_batch)
        grad = jax.grad(energy_of(batch))(w)
        statistic = 0.5 * statistic + 0.5 * (grad / len(Y)) ** 2
        w = w - h * grad / (jnp.sqrt(statistic) + 0.1)
    state = kernel.sample(state, (X, Y), {})
    assert int(state.num_diverging) == 0
    np.testing.assert_allclose(state.z["w"], w, rtol=1e-5, atol=1e-6)


def test_temperature_zero_keeps_noisy_gradient_steps() -> None:
    """Stochastic gradient descent is no divergence, however its minibatch gradients vary."""

    def potential_fn(z: jax.Array, rng_key: jax.Array) -> jax.Array:
        return z @ z / 2 + 30 * z @ random.normal(rng_key, z.shape)

    kernel = SGRLD(potential_fn=potential_fn, step_size=0.01, num_steps=200, temperature=0.0)
    state = kernel.init(random.key(0), 0, jnp.ones(1), (), {})
    state = jax.jit(lambda s: kernel.sample(s, (), {}))(state)
    assert int(state.num_diverging) == 0


def test_monge_with_alpha_zero_is_the_identity() -> None:
    draws = []
    for metric in ("identity", Monge(alpha2=0.0)):
        kernel = one_step(metric=metric, divergence="frozen", num_steps=4)
        state = kernel.init(random.key(0), 0, None, (X, Y), {})
        draws.append(kernel.sample(state, (X, Y), {}).z)
    for name, value in draws[0].items():
        np.testing.assert_allclose(draws[1][name], value, rtol=1e-6)


@pytest.mark.parametrize("divergence", ["corrected", "published"])
def test_gamma_of_monge_with_alpha_zero_vanishes(divergence: str) -> None:
    """At temperature 1 with the noise's own key: the step's key is split once for the probe."""
    h = 1e-3
    kernel = one_step(linear, metric=Monge(alpha2=0.0), divergence=divergence, step_size=h)
    state = kernel.init(random.key(0), 0, {"w": jnp.array([0.3, -0.4])}, (X, Y), {})
    w = state.z["w"]
    ((key_batch, key_step),), _ = keys_of(state, 1)
    batch = rows_of(key_batch)
    key_noise, _ = random.split(key_step)
    expected = w - h * jax.grad(energy_of(batch))(w)
    expected += jnp.sqrt(2 * h) * random.normal(key_noise, w.shape)
    state = kernel.sample(state, (X, Y), {})
    np.testing.assert_allclose(state.z["w"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("divergence", "share"), [("corrected", 1.0), ("published", 0.25)])
def test_divergence_is_scaled_by_the_temperature(divergence: str, share: float) -> None:
    """With one key a step is a + b tau + c sqrt(tau), b = h Gamma: three of them tell b.

    In one dimension, with U = 2 x^2 and A = 1 / (1 + V^2), Gamma is dA/dV U'' = -8 V / (1 + V^2)^2
    at the first average V of the gradient, times 1 - decay if published; one probe is exact.
    """
    h, x, decay = 1e-2, 0.3, 0.75 if divergence == "published" else 0.0
    steps = []
    for tau in (1.0, 4.0, 9.0):
        kernel = SGRLD(
            potential_fn=lambda z: 2 * jnp.sum(z**2),
            metric=Monge(alpha2=1.0, decay=decay),
            divergence=divergence,
            step_size=h,
            num_steps=1,
            temperature=tau,
        )
        state = kernel.init(random.key(0), 0, jnp.full(1, x), (), {})
        steps.append(float(kernel.sample(state, (), {}).z[0]))
    design = np.array([[1, tau, np.sqrt(tau)] for tau in (1.0, 4.0, 9.0)])
    _, found, _ = np.linalg.solve(design, steps)
    v = 4 * x * (1 - decay)
    # differences of float32 numbers of order 1, of which this is 5e-3 or more
    assert found == pytest.approx(share * h * -8 * v / (1 + v**2) ** 2, abs=2e-6)


@pytest.mark.parametrize("temperature", short([0.25, 3.0], kept=[3.0]))
def test_temperature_scales_the_stationary_law(temperature: float) -> None:
    """N(0, 1) in steps of h: with averaged noise the variance is tau exactly."""
    h = 0.4
    kernel = SGRLD(potential_fn=half_square, step_size=h, num_steps=60, temperature=temperature)
    _, draws = last_draws(kernel, (), num_chains=20_000, init_params=jnp.zeros(2))
    assert_moments(np.asarray(draws, np.float64), np.zeros(2), temperature * np.eye(2))


@pytest.mark.slow
def test_adjusted_steps_are_exact_at_a_large_step() -> None:
    kernel = SGRLD(linear, adjusted=True, metric="monge", step_size=0.01, num_steps=300)
    state, draws = last_draws(kernel, (X, Y), num_chains=4000)
    assert float(state.accept_prob.mean()) < 0.98
    assert_moments(columns(draws, ("w",)), *linear_moments(X, Y))


# --- schedules and warm-up


def step_sizes(step_size: Any, num_steps: int = 1, num_draws: int = 6) -> np.ndarray:
    kernel = SGRLD(potential_fn=half_square, step_size=step_size, num_steps=num_steps)
    mcmc = run(kernel, init_params=jnp.ones(1), num_samples=num_draws)
    return np.asarray(mcmc.get_extra_fields()["step_size"])


def test_schedules_reach_the_state() -> None:
    t = np.arange(6)
    found = step_sizes(lambda t: 0.1 / jnp.sqrt(1 + t))
    np.testing.assert_allclose(found, 0.1 / np.sqrt(1 + t), 1e-6)
    peak, period = 0.2, 4
    cosine = peak / 2 * (1 + np.cos(np.pi * (t % period) / period))
    np.testing.assert_allclose(step_sizes(cyclical(peak, period)), cosine, rtol=1e-5)
    # with several steps per draw, the last of them
    several = step_sizes(cyclical(peak, period), num_steps=3, num_draws=2)
    np.testing.assert_allclose(several, cosine[[2, 5]], rtol=1e-5)


def test_an_optax_schedule_works() -> None:
    optax = pytest.importorskip("optax")
    schedule = optax.exponential_decay(0.1, 2, 0.5)
    expected = [float(schedule(t)) for t in range(6)]
    np.testing.assert_allclose(step_sizes(schedule), expected, rtol=1e-6)


def test_a_constant_function_is_the_number() -> None:
    draws = []
    for step_size in (1e-3, lambda t: 1e-3):
        kernel = one_step(step_size=step_size)
        state = kernel.init(random.key(0), 0, None, (X, Y), {})
        draws.append(kernel.sample(state, (X, Y), {}).z)
    assert_trees_equal(*draws)


def test_exploration_injects_no_noise() -> None:
    schedule = cyclical(0.1, 4, explore=0.5)
    kernel = SGRLD(potential_fn=half_square, step_size=schedule, num_steps=1)
    state = kernel.init(random.key(0), 0, jnp.array([2.0]), (), {})
    sample = jax.jit(lambda s: kernel.sample(s, (), {}))
    for t in range(8):
        before = float(state.z[0])
        state = sample(state)
        plain = before * (1 - float(schedule(t)))
        if t % 4 < 2:
            np.testing.assert_allclose(state.z[0], plain, rtol=1e-6)
        else:
            assert abs(float(state.z[0]) - plain) > 1e-5


def test_frozen_metrics_stop_learning_before_warm_up_ends() -> None:
    num_warmup = 16
    kernel = one_step(metric="rmsprop", divergence="frozen")
    moving = one_step(metric="rmsprop", divergence="none")
    for each, stops in ((kernel, True), (moving, False)):
        state = each.init(random.key(0), num_warmup, None, (X, Y), {})
        sample = jax.jit(lambda s, k=each: k.sample(s, (X, Y), {}))
        states = [state := sample(state) for _ in range(num_warmup + 2)]
        learned = np.stack([s.metric_state.statistic["w"] for s in states])
        changes = np.any(np.diff(learned, axis=0) != 0, axis=1)
        assert changes[: num_warmup * 7 // 8 - 1].all()
        assert changes[num_warmup * 7 // 8 :].any() == (not stops)


# --- the divergence guard


def wall(z: jax.Array) -> jax.Array:
    """A standard normal left of 1."""
    return jnp.sum(z**2) / 2


GUARDED: dict[str, Callable] = {
    "energy nan": lambda z: wall(z) - 0.1 * jnp.sum(jnp.log(1 - z)),
    "energy inf": lambda z: wall(z) + jnp.sum(jnp.where(z > 1, jnp.inf, 0.0)),
    "gradient nan": lambda z: wall(z) + jnp.sum(jnp.where(z > 1, jnp.sqrt(z - 1) * 0, 0.0)),
    "gradient overflows": lambda z: wall(z) + jnp.sum(jnp.where(z > 1, 1e30 * (z - 1), 0.0)),
    "energy to minus infinity": lambda z: -jnp.sum(jnp.exp(jnp.exp(z + 2))),
    "quartic, far too large a step": lambda z: 1e3 * jnp.sum(z**4),
}


@pytest.mark.parametrize(
    "name", short(GUARDED, kept=["energy nan", "gradient overflows", "energy to minus infinity"])
)
def test_nothing_that_is_not_finite_reaches_the_draws(name: str) -> None:
    kernel = SGRLD(potential_fn=GUARDED[name], step_size=0.3, num_steps=8, metric="rmsprop")
    warned = pytest.warns(SamplingWarning, match="chains that do not move")  # most steps are undone
    # where only U is not finite, draws are undone as a whole, and these are fewer
    with nullcontext() if name in ("energy nan", "energy inf") else warned:
        mcmc = run(kernel, init_params=jnp.array([0.2]), num_samples=200, extra_fields=EXTRA)
    draws, extra = np.asarray(mcmc.get_samples()), mcmc.get_extra_fields()
    assert np.all(np.isfinite(draws))
    for field in ("potential_energy", "grad_norm", "step_size"):
        assert np.all(np.isfinite(extra[field])), field
    assert extra["diverging"].any()
    np.testing.assert_array_equal(extra["diverging"], extra["num_diverging"] > 0)
    assert extra["num_diverging"].max() <= 8 + 1  # the steps of a draw, and its check
    assert np.all(np.isfinite(extra["metric_state.statistic"]))


EXTRA = ("num_diverging", "metric_state.statistic")


@pytest.mark.parametrize("name", ["energy nan", "energy inf"])
def test_the_guard_keeps_the_chain_inside_and_moving(name: str) -> None:
    kernel = SGRLD(potential_fn=GUARDED[name], step_size=0.3, num_steps=4)
    draws = np.asarray(run(kernel, init_params=jnp.array([0.2]), num_samples=300).get_samples())
    assert draws.max() < 1
    assert len(np.unique(draws)) > 150


@pytest.mark.parametrize("name", ["energy nan", "energy inf"])
def test_a_wall_hardly_bends_the_law(name: str) -> None:
    """A step is undone with its draw, not by itself, which would take away mass near the wall."""
    kwargs: dict = {"num_chains": 4, "chain_method": "vectorized", "init_params": jnp.full(4, 0.2)}
    mcmc = run(SGHMC(potential_fn=GUARDED[name]), num_warmup=300, num_samples=2000, **kwargs)
    draws = np.asarray(mcmc.get_samples())
    assert draws.max() < 1
    z = np.linspace(-9, 1, 100_000, endpoint=False)
    weight = np.exp(-(z**2) / 2) * ((1 - z) ** 0.1 if name == "energy nan" else 1)
    # a Monte Carlo error of 0.01, and a bias of 0.05 at the wall; undone one by one it is 0.19
    np.testing.assert_allclose(draws.mean(), np.average(z, weights=weight), atol=0.1)


def test_rows_that_are_not_finite_are_undone_where_they_are_hit() -> None:
    y = Y.at[3].set(jnp.nan)

    def model() -> None:  # of an argument the row would be named
        normal_mean(y)

    kernel = one_step(model, batch_size=2, step_size=1e-3, num_steps=5)
    mcmc = run(kernel, num_samples=60, extra_fields=("num_diverging",))
    extra = mcmc.get_extra_fields()
    assert np.all(np.isfinite(mcmc.get_samples()["mu"]))
    # a step is hit with probability 1 - (23/24)^2, and so is the check of a draw; 6 per draw
    hit = 1 - (23 / 24) ** 2
    error = np.sqrt(360 * hit * (1 - hit))
    assert abs(extra["num_diverging"].sum() - 360 * hit) < SIGMAS * error


@pytest.mark.parametrize(
    ("make", "landing"),
    [
        (partial(SGRLD, step_size=0.5), 3 - 0.5 * 27),
        # from rest, half of the way before friction and half after it
        (partial(SGHMC, step_size=1.0, friction=1.0), 3 - (1 + np.exp(-1)) / 2 * 27),
    ],
    ids=["sgrld", "sghmc"],
)
@pytest.mark.filterwarnings("ignore:energy above the start")  # in every second draw
def test_the_guard_remembers_from_draw_to_draw(make: Callable, landing: float) -> None:
    """One step a draw, twice as long as it may be: it leads out, the next is undone, and so on."""
    kernel = make(potential_fn=lambda z: jnp.sum(z**4) / 4, num_steps=1)
    mcmc = run(kernel, init_params=jnp.array([3.0]), num_samples=400)
    draws = np.asarray(mcmc.get_samples())[10:, 0]
    undone = np.asarray(mcmc.get_extra_fields()["diverging"])[10:]
    # the push of the step out is known a draw later: none is taken from there
    np.testing.assert_array_equal(undone[1:], ~undone[:-1])
    # and so is the last position that could be trusted
    np.testing.assert_array_equal(draws[undone], 3.0)
    # the noise of a step is 1 here at most; one of 200 exceeds 6 with a probability below 4e-7
    assert np.abs(draws[~undone] - landing).max() < 6


@pytest.mark.parametrize(
    "kernel",
    [partial(SGRLD, step_size=2.2), partial(SGHMC, step_size=2.1, friction=0.5)],
    ids=["sgrld", "sghmc"],
)
def test_a_step_that_is_barely_unstable_does_not_run_away(kernel: Callable) -> None:
    """Each drift is longer than the one before, by less than a factor of 2."""
    kernel = kernel(potential_fn=lambda z: z @ z / 2, num_steps=1)
    with pytest.warns(SamplingWarning, match="energy above the start"):
        mcmc = run(kernel, init_params=jnp.zeros(5), num_samples=400)
    # h |z|^2 / 2 D of SGRLD and h^2 |z|^2 / D of SGHMC are at most 2,000: |z| up to 95 and 48, and
    # a step from there leads less than twice as far
    assert np.linalg.norm(np.asarray(mcmc.get_samples()), axis=1).max() < 190
    assert np.asarray(mcmc.get_extra_fields()["diverging"]).any()


def test_rows_of_the_start_are_those_of_the_draws() -> None:
    """Of other rows, its energy would be off by 2,000 nats, and a warning would say so."""
    y = jnp.asarray(np.random.default_rng(0).normal(size=10_000), jnp.float32)
    kernel = one_step(normal_mean, step_size=1e-7)  # 0.005 in all, in a slope of 4,000
    mcmc = run(kernel, y, num_samples=100, init_params={"mu": jnp.zeros(())})
    start = mcmc.last_state.adaptation.start_energy
    assert np.ptp([start, *mcmc.get_extra_fields()["potential_energy"]]) < 100


def test_undone_steps_of_warm_up_shorten_no_later_draw() -> None:
    kernel = SGRLD(potential_fn=GUARDED["energy nan"], num_steps=4, dense_mass=None)
    state = kernel.init(random.key(0), 40, jnp.array([0.2]), (), {})
    sample = jax.jit(lambda s: kernel.sample(s, (), {}))
    shorter, undone = [], 0
    for i in range(60):
        state = sample(state)
        undone += bool(state.diverging)
        shorter.append(abs(float(state.retry_factor)))
        assert np.all(np.isfinite(state.z))
        # the curvature alone bounds the step of a draw
        assert i == 0 or float(state.step_size * state.adaptation.curvature) > 0.1
    assert undone > 0
    assert min(shorter) < 1
    assert shorter[-1] == 1


@pytest.mark.slow
def test_improper_models_stay_finite() -> None:
    def free() -> None:
        numpyro.sample("s", dist.ImproperUniform(dist.constraints.real, (), ()))

    def positive() -> None:
        numpyro.sample("s", dist.ImproperUniform(dist.constraints.positive, (), ()))

    mcmc = run(SGRLD(free), num_warmup=50, num_samples=50)
    assert np.all(np.isfinite(mcmc.get_samples()["s"]))
    assert np.all(np.isfinite(mcmc.last_state.z["s"]))
    with pytest.raises(ValueError, match="ran away with site 's'"):  # its Jacobian grows forever
        run(SGRLD(positive), num_warmup=50, num_samples=50)


def test_each_metric_has_its_own_treatment_of_gamma() -> None:
    assert SGRLD(linear, metric="monge").settings.divergence == "frozen"
    assert SGRLD(linear, metric=Monge(alpha2=1.0)).settings.divergence == "auxiliary"
    assert SGRLD(linear, metric=Monge(), divergence="frozen").settings.divergence == "frozen"
    for metric in ("identity", "rmsprop", "wenzel", "shampoo"):
        assert SGRLD(linear, metric=metric).settings.divergence == "frozen"


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_a_run_does_not_go_on_after_64_bit_mode_was_switched_off() -> None:
    """As with NUTS, to which JAX says it in a paragraph."""
    with jax.enable_x64(True):
        kernel = SGRLD(potential_fn=lambda z: z**2 / 2, step_size=0.1, num_steps=1)
        mcmc = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
        mcmc.run(random.key(0), init_params=jnp.ones(()))
    mcmc.post_warmup_state = mcmc.last_state
    with pytest.raises(TypeError, match="switch x64 on"):
        mcmc.run(random.key(0))


@pytest.mark.parametrize("kernel", [SGHMC, SGRLD])
def test_a_chain_gets_out_of_a_place_too_narrow_for_its_steps(kernel: Any) -> None:
    """Its own step size is 30 times as wide as the interval where the energy is finite."""

    def energy(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.abs(x) < 0.01, x**2 / 2, jnp.nan)

    mcmc = MCMC(kernel(potential_fn=energy), num_warmup=0, num_samples=300, progress_bar=False)
    with (
        pytest.warns(SamplingWarning, match="num_warmup=0 and step_size='auto'"),
        pytest.warns(SamplingWarning, match="chains that do not move"),  # most steps are undone
    ):
        mcmc.run(random.key(0), init_params=jnp.zeros(()))
    assert len(np.unique(mcmc.get_samples())) > 100
