"""Thousands of vectorised short chains, and how far what they visit is from a law.

Chains that start from the law that they should leave invariant hold it from the first step on,
whatever their relaxation time, if the sampler is right; and leave it within a few relaxation times
if it is wrong. So short chains are enough, and none is thrown away. A sampler that stands still
would pass as well: every such test also makes sure that its chains move.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from numpyro_geom import SGKernel, SGState
from numpyro_geom.algorithms.auxiliary import SOFTNESS

PyTree = Any
CHAIN_STEPS = 1 << 24
"""Room for the steps of one group of chains in the count of :func:`several_step_sizes`."""


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
    """The same chains after warm-up: nothing learns any more, and what it learned is given.

    Args:
        state: from :func:`start`.
        metric_state: of the metric, the same for all chains.
        scale: standard deviation s of the auxiliary gradient.
        noise_variance: what the auxiliary gradient takes its own minibatch noise for, per entry.
    """
    if metric_state is not None:
        num_chains = state.i.shape[0]
        state = state._replace(
            metric_state=jax.tree.map(
                lambda x: jnp.broadcast_to(x, (num_chains, *jnp.shape(x))), metric_state
            )
        )
    if scale is not None:
        known = state.dynamics
        one = jnp.ones_like(known.weight)
        known = known._replace(
            second_moment=one * (scale / SOFTNESS) ** 2,
            noise_variance=jax.tree.map(
                lambda x: jnp.full_like(x, noise_variance), known.noise_variance
            ),
            weight=one,
        )
        state = state._replace(dynamics=known)
    return state._replace(i=state.i + 1)


def several_step_sizes(state: SGState, num_sizes: int) -> SGState:
    """Deal the chains into groups, each with its own stretch of a step-size schedule.

    With ``step_size=lambda t: sizes[t // CHAIN_STEPS]`` group k has the step size ``sizes[k]``:
    one compilation serves them all.
    """
    group = np.repeat(np.arange(num_sizes), state.i.shape[0] // num_sizes)
    return state._replace(steps_taken=jnp.asarray(group * CHAIN_STEPS, jnp.int32))


def run(
    kernel: SGKernel, state: SGState, num_draws: int, *, args: tuple = ()
) -> tuple[SGState, SGState]:
    """Draw from every chain with the kernel's own compiled loop.

    Returns:
        The last state, and the states of all draws: leaves of shape (draws, chains, ...) on the
        host, without keys and without what is not of the position.
    """
    sample = jax.jit(lambda state, args: kernel.sample(state, args, {}))
    draws = []
    for _ in range(num_draws):
        state = sample(state, args)
        bare = state._replace(metric_state=(), dynamics=(), stream=(), rng_key=())
        draws.append(jax.tree.map(np.asarray, bare))
    return state, jax.tree.map(lambda *x: np.stack(x), *draws)


def scores(values: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Deviations of means from what they should be, in Monte Carlo standard errors.

    Chains are independent and the draws of one are not: the error is from the spread of the
    chains' own means.

    Args:
        values: functions of the draws, shape (draws, chains, functions).
        exact: their expectations, shape (functions,).
    """
    of_chain = values.mean(axis=0, dtype=np.float64)
    error = of_chain.std(axis=0, ddof=1) / np.sqrt(of_chain.shape[0])
    return (of_chain.mean(axis=0) - exact) / error
