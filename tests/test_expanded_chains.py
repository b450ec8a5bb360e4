"""Chains on factors: users see the merged matrix alone, and its law is the model's.

Chains that start from the law that they should leave invariant hold it from the first draw on,
see `chains`. The law of the factors is checked with that of the matrix: a determinant that is
missing from the energy leaves the matrix's law as it is and drives the factors into a singular one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import chains
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro.diagnostics import gelman_rubin
from numpyro.infer import MCMC, NUTS
from targets import SIGMAS

from numpyro_geom import (
    GGMC,
    PXSGHMC,
    SGHMC,
    SGNHT,
    SGRLD,
    Expansion,
    Factors,
    SGKernel,
    SGState,
    to_inference_data,
)
from numpyro_geom.control_variate import full_value_and_grad

ROWS, INPUTS, OUTPUTS = 12, 3, 2
_rng = np.random.default_rng(0)
X = jnp.asarray(_rng.normal(size=(ROWS, INPUTS)), jnp.float32)
W = jnp.asarray(_rng.normal(size=(INPUTS, OUTPUTS)), jnp.float32)
Y = X @ W + jnp.asarray(_rng.normal(size=(ROWS, OUTPUTS)), jnp.float32)
FIXED: dict[str, Any] = {"step_size": 0.05, "num_steps": 3, "friction": 5.0}


def layer(X: Any, y: Any) -> None:
    """A matrix of coefficients with known noise: Gaussian, its columns independent."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([INPUTS, OUTPUTS]).to_event(2))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, 1).to_event(1), obs=y[i])


def layer_moments() -> tuple[np.ndarray, np.ndarray]:
    """Mean (3, 2), and the covariance (3, 3) of each column, of ``w`` in :func:`layer`."""
    x, y = np.asarray(X, np.float64), np.asarray(Y, np.float64)
    covariance = np.linalg.inv(np.eye(INPUTS) + x.T @ x)
    return covariance @ x.T @ y, covariance


# --- what users see


def run(kernel: SGKernel, *, num_samples: int = 6, **settings: Any) -> MCMC:
    arguments = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=0, num_samples=num_samples, **arguments)
    mcmc.run(random.key(0), X, Y, **settings)
    return mcmc


def test_draws_are_of_the_merged_matrix() -> None:
    expansion = Expansion(left=2, rank=1)
    mcmc = run(SGHMC(layer, expansion=expansion, **FIXED), extra_fields=("expanded", "num_steps"))
    draws = mcmc.get_samples(group_by_chain=True)
    assert {name: x.shape for name, x in draws.items()} == {"w": (2, 6, INPUTS, OUTPUTS)}
    assert mcmc.get_samples()["w"].shape == (12, INPUTS, OUTPUTS)
    extra = mcmc.get_extra_fields(group_by_chain=True)
    expanded = extra["expanded"]
    assert expanded["sites"].keys() == {"w"}
    assert expanded["factors"]["w"]["left"][1].first.shape == (2, 6, 1, INPUTS)
    # the factors have moved, and every draw is their product, to the last bit
    assert np.ptp(expanded["factors"]["w"]["right"][0].diagonal) > 0.01
    merged = jax.jit(jax.vmap(jax.vmap(expansion.merge)))(expanded)["w"]
    np.testing.assert_array_equal(merged, draws["w"])
    state = mcmc.last_state
    np.testing.assert_array_equal(state.z["w"], draws["w"][:, -1])
    np.testing.assert_array_equal(jax.vmap(expansion.merge)(state.expanded)["w"], state.z["w"])


def test_exports_have_no_factors() -> None:
    mcmc = run(PXSGHMC(layer, **FIXED), num_samples=10)
    assert "expanded" not in mcmc.get_extra_fields()
    data = to_inference_data(mcmc)
    assert set(data.posterior.data_vars) == {"w"}
    assert data.posterior["w"].shape == (2, 10, INPUTS, OUTPUTS)
    names = " ".join(str(name) for name in data.sample_stats.data_vars)
    assert "expanded" not in names
    assert "factors" not in names
    assert "kinetic_temperature" in names


def test_starts_at_merged_values_and_goes_on() -> None:
    kernel = PXSGHMC(layer, **{**FIXED, "step_size": 1e-4})
    start = {"w": jnp.stack([W, -W])}
    mcmc = run(kernel, init_params=start, num_samples=1)
    # three steps of 1e-4 with a momentum of unit size
    np.testing.assert_allclose(mcmc.get_samples()["w"], start["w"], atol=3e-3)

    kernel = PXSGHMC(layer, **FIXED)
    long = run(kernel, init_params=start, num_samples=12).get_samples(group_by_chain=True)["w"]
    mcmc = run(kernel, init_params=start, num_samples=6)
    np.testing.assert_array_equal(mcmc.get_samples(group_by_chain=True)["w"], long[:, :6])
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(random.key(5), X, Y)  # a key that is not looked at: the state has its own
    np.testing.assert_array_equal(mcmc.get_samples(group_by_chain=True)["w"], long[:, 6:])
    assert int(mcmc.last_state.i[0]) == 12


# --- the law of the product


NUM_CHAINS, NUM_DRAWS, TEMPERATURE = 2000, 25, 0.5


def whitened(
    expansion: Expansion, temperature: float, w: jax.Array, factors: dict
) -> tuple[jax.Array, jax.Array]:
    """W and the entries of P and Q, each standard normal and independent in the law to hold."""
    mean, covariance = layer_moments()
    root = np.linalg.inv(np.linalg.cholesky(covariance * temperature))
    entries = [
        ((x - jnp.eye(len(x))) * math.sqrt(len(x)) / expansion.factor_scale).ravel()
        for x in jax.tree.leaves(factors)
    ]
    return (root @ (w - mean)).ravel(), jnp.concatenate(entries)


def held_law() -> dict[str, np.ndarray]:
    """Scores of moments of W, of the factors and of V, acceptance, and how far chains have moved.

    W and (P, Q) start from their exact laws, and independently of one another.
    """
    expansion = Expansion()
    kernel = GGMC(
        layer,
        expansion=expansion,
        batch_size=6,
        temperature=TEMPERATURE,
        step_size=0.07,
        num_steps=4,
        friction=1.0,
    )
    rng = np.random.default_rng(1)
    mean, covariance = layer_moments()
    normal = rng.normal(size=(NUM_CHAINS, INPUTS, OUTPUTS))
    root = np.linalg.cholesky(covariance * TEMPERATURE)
    positions = {"w": jnp.asarray(mean + root @ normal, jnp.float32)}
    state = chains.start(kernel, positions, seed=2, args=(X, Y))
    factors = jax.tree.map(
        lambda x: x + np.float32(0.25 / x.shape[-1] ** 0.5) * rng.normal(size=x.shape),
        state.expanded["factors"],
    )
    factors = jax.tree.map(lambda x: x.astype(jnp.float32), factors)
    expanded = jax.jit(jax.vmap(expansion.contract))(positions, {"factors": factors})
    state = state._replace(expanded=expanded, trusted=expanded)

    def functions(state: SGState) -> dict[str, jax.Array]:
        sites, factors = state.expanded["sites"], state.expanded["factors"]
        w, f = whitened(expansion, TEMPERATURE, state.z["w"], factors)
        v, _ = whitened(expansion, TEMPERATURE, sites["w"], factors)
        upper = jnp.triu_indices(w.size)
        return {
            "w": jnp.concatenate([w, jnp.outer(w, w)[upper]]),
            "v": jnp.concatenate([v, jnp.outer(v, v)[upper]]),
            "factors": jnp.concatenate([f, f**2]),
            "both": jnp.outer(w, f).ravel(),
            "accept": state.accept_prob[None],
        }

    @jax.jit
    def draw(state: SGState) -> tuple[SGState, dict]:
        def one(state: SGState, _: Any) -> tuple:
            state = kernel.sample(state, (X, Y), {})
            return state, jax.vmap(functions)(state)

        return lax.scan(one, state, None, length=NUM_DRAWS)

    values = jax.tree.map(np.asarray, draw(state)[1])
    size = INPUTS * OUTPUTS
    exact = np.concatenate([np.zeros(size), np.eye(size)[np.triu_indices(size)]])
    of_factors = np.repeat([0.0, 1.0], INPUTS**2 + OUTPUTS**2)
    first, last = values["w"][0, :, :size], values["w"][-1, :, :size]
    return {
        "w": chains.scores(values["w"], exact),
        "v": chains.scores(values["v"], exact),
        "factors": chains.scores(values["factors"], of_factors),
        "both": chains.scores(values["both"], np.zeros(values["both"].shape[-1])),
        "accept": values["accept"].mean(),
        "memory": np.mean(first * last),
    }


@pytest.mark.slow
def test_exact_chains_hold_the_law_of_matrix_and_factors() -> None:
    # scores of independent chains' means: one of these 131 exceeds 5.5 with probability 5e-6
    law = held_law()
    assert 0.3 < law["accept"] < 0.99
    assert law["memory"] < 0.3  # of 1: chains that stood still would hold any law
    for name in ("w", "factors", "both"):
        assert np.abs(law[name]).max() < SIGMAS, (name, law[name])
    # V in the place of W would not do: its law is another
    assert np.abs(law["v"]).max() > 2 * SIGMAS


@pytest.mark.slow
def test_without_the_determinant_the_factors_lose_their_law(monkeypatch: Any) -> None:
    # exp(-U(P V Q) / tau) q(P, Q) is as a law of (W, P, Q) exp(-U / tau) q / (|P|^2 |Q|^3): W has
    # its own law, and the factors come close to singular ones
    correction = Expansion.correction

    def without(self: Expansion, expanded: dict, temperature: Any) -> jax.Array:
        (p,), (q,) = (expanded["factors"]["w"][side] for side in ("left", "right"))
        log_det = OUTPUTS * jnp.linalg.slogdet(p)[1] + INPUTS * jnp.linalg.slogdet(q)[1]
        return correction(self, expanded, temperature) + temperature * log_det

    monkeypatch.setattr(Expansion, "correction", without)
    law = held_law()
    assert np.abs(law["factors"]).max() > 2 * SIGMAS
    assert np.abs(law["w"]).max() < SIGMAS
