"""Thousands of vectorised short chains, and the deviation of their draws from a distribution.

Chains that start from the distribution that they should leave invariant keep it from the first step
if the sampler is right, whatever their relaxation time. If the sampler is wrong, they leave it
within a few relaxation times. So short chains are enough, and no draws are dropped. A sampler that
does not move would pass too, so every such test also checks that its chains move.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from numpyro_geom import SGKernel
from numpyro_geom.algorithms.auxiliary import SOFTNESS
from numpyro_geom.algorithms.momentum import Momentum
from numpyro_geom.kernel import SGState

PyTree = Any
CHAIN_STEPS = 1 << 24
"""Number of schedule steps for one group of chains in :func:`several_step_sizes`."""


def start(
    kernel: SGKernel,
    positions: PyTree,
    *,
    seed: int,
    num_warmup: int = 0,
    args: tuple = (),
) -> SGState:
    """States of chains at ``positions``, leaves of shape (chains, ...); each with its own key."""
    num_chains = jax.tree.leaves(positions)[0].shape[0]
    keys = random.split(random.key(seed), num_chains)
    return kernel.init(keys, num_warmup, positions, args, {})


def past_warmup(
    state: SGState,
    *,
    metric_state: PyTree | None = None,
    scale: float | None = None,
    noise_variance: float = 0.0,
) -> SGState:
    """The same chains after warm-up, with fixed values for everything that warm-up learns.

    Args:
        state: from :func:`start`.
        metric_state: state of the metric, the same for all chains.
        scale: standard deviation s of the auxiliary gradient.
        noise_variance: the variance per entry that the auxiliary gradient assumes for its own
            minibatch noise.
    """
    if metric_state is not None:
        num_chains = state.i.shape[0]
        state = state._replace(
            metric_state=jax.tree.map(
                lambda x: jnp.broadcast_to(x, (num_chains, *jnp.shape(x))), metric_state
            )
        )
    if scale is not None:
        with_momentum = isinstance(state.dynamics, Momentum)
        known = state.dynamics.extra if with_momentum else state.dynamics
        one = jnp.ones_like(known.weight)
        known = known._replace(
            second_moment=one * (scale / SOFTNESS) ** 2,
            noise_variance=jax.tree.map(
                lambda x: jnp.full_like(x, noise_variance), known.noise_variance
            ),
            weight=one,
        )
        known = state.dynamics._replace(extra=known) if with_momentum else known
        state = state._replace(dynamics=known)
    return state._replace(i=state.i + 1)


def several_step_sizes(state: SGState, num_sizes: int) -> SGState:
    """Split the chains into groups, each with its own part of a step-size schedule.

    With ``step_size=lambda t: sizes[t // CHAIN_STEPS]``, group k has the step size ``sizes[k]``.
    All groups share one compilation.
    """
    group = np.repeat(np.arange(num_sizes), state.i.shape[0] // num_sizes)
    return state._replace(steps_taken=jnp.asarray(group * CHAIN_STEPS, jnp.int32))


def run(
    kernel: SGKernel, state: SGState, num_draws: int, *, args: tuple = ()
) -> tuple[SGState, SGState]:
    """Draw from every chain with the kernel's own compiled loop.

    Returns:
        The last state, and the states of all draws: leaves of shape (draws, chains, ...) on the
        host, without keys and without fields that are not positions.
    """
    sample = jax.jit(lambda state, args: kernel.sample(state, args, {}))
    draws = []
    for _ in range(num_draws):
        state = sample(state, args)
        bare = state._replace(metric_state=(), dynamics=(), stream=(), rng_key=())
        draws.append(jax.tree.map(np.asarray, bare))
    return state, jax.tree.map(lambda *x: np.stack(x), *draws)


def scores(values: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Deviations of means from their expectations, in Monte Carlo standard errors.

    Chains are independent, but the draws of one chain are not. So the error comes from the spread
    of the chains' own means.

    Args:
        values: functions of the draws, shape (draws, chains, functions).
        exact: their expectations, shape (functions,).
    """
    of_chain = values.mean(axis=0, dtype=np.float64)
    error = of_chain.std(axis=0, ddof=1) / np.sqrt(of_chain.shape[0])
    return (of_chain.mean(axis=0) - exact) / error
