"""Choices before a run's program is compiled: rows per step, and whether to use a control variate.

In one step the slowest direction relaxes by h times its rate. h follows from curvature and noise.
These are measured at the start of the chain, with and without the control variate. More rows mean
less noise and a higher cost. This predicts the relaxation per operation of each choice. Operations
are counted and not timed, so the choice is the same on any machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._util import key_word, ravel, scattered_floats
from ..model.control_variate import with_control_variate
from ..model.programs import compiled
from ..model.target import Target
from ..sampling.algorithm import Algorithm
from ..sampling.settings import Settings
from ..sampling.state import SGState
from .curvature import largest_noise

PyTree = Any

FEW_ROWS = 2048
"""Up to this many rows ``batch_size="auto"`` takes all: gathering fewer rows costs as much."""
FIRST_ROWS = 256
"""Rows per step from which the noise is measured, and rows per step if no measurement is possible.
"""
STEP_OPERATIONS = 1e5
"""Cost of a step besides its gradient: some ten microseconds on one core."""
GATHERED = 2.0
"""Cost of a drawn row, relative to a row in a pass over all rows in their order."""
MARGIN = 2.0
"""The final noise of a run (the largest of several measurements), relative to the first one."""
LEAST_GAIN = 1.1
"""Smallest predicted gain that makes a control variate worth its anchor."""


class Choice(NamedTuple):
    """The choice and its reasons.

    Attributes:
        batch_size: rows per step; None for all.
        control_variate: whether gradients are corrected.
        noise: lam_C at ``measured_rows`` rows per step in the chain's coordinates, without control
            variate and with it.
        measured_rows: rows per step for which the noise is stated.
    """

    batch_size: int | None
    control_variate: bool
    noise: tuple[float, float]
    measured_rows: int


def choose(
    target: Target,
    algorithm: Algorithm,
    settings: Settings,
    state: SGState,
    *,
    num_rows: int,
    batch_size: int,
    open_rows: bool,
    open_control: bool,
) -> Choice:
    """Choose from measurements at the start of a chain.

    Args:
        target: the target with a control variate.
        algorithm: the algorithm that samples it.
        settings: the kernel's settings.
        state: state of one chain before its first draw, with its anchor where the search ended.
        num_rows: N, rows of the plate that is subsampled.
        batch_size: rows per step that the target takes.
        open_rows: whether the number of rows is to be chosen.
        open_control: whether the use of the control variate is to be chosen.
    """
    sizes = [batch_size]
    if open_rows:
        sizes = [2**k for k in range(5, 20) if 2 * 2**k < num_rows]
    costs = _costs(target, state, batch_size, sizes, num_rows)
    rows = jnp.asarray([*sizes, np.inf], state.potential_energy.dtype)
    found = compiled(
        lambda state, rows: _speeds(target, algorithm, settings, state, batch_size / rows),
        state,
        rows,
    )
    speeds, noise = map(np.asarray, found)
    gains = speeds / costs
    gains[~np.isfinite(gains)] = 0.0
    if not open_rows:
        gains[:, -1] = 0.0
    if not open_control:
        gains[int(not settings.control_variate)] = 0.0
    elif gains[1].max() < LEAST_GAIN * gains[0].max():
        gains[1] = 0.0
    controlled, best = np.unravel_index(gains.argmax(), gains.shape)
    chosen = None if best == len(sizes) else sizes[best]
    measured = chosen or batch_size
    plain, corrected = (float(x) * batch_size / measured for x in noise)
    return Choice(chosen, bool(controlled) and chosen is not None, (plain, corrected), measured)


def _costs(
    target: Target, state: SGState, batch_size: int, sizes: list[int], num_rows: int
) -> np.ndarray:
    """Operations per step, without and with control variate; the last column is for all rows."""
    potential, position = target.potential, state.z

    def gradient(position: PyTree, rng_key: jax.Array, stream: Any) -> PyTree:
        return jax.grad(potential.energy)(position, potential.draw(rng_key, stream)[0])

    counted = jax.jit(gradient).lower(position, state.rng_key, state.stream).cost_analysis()
    row = float((counted or {}).get("flops", 0.0)) / batch_size
    drawn = GATHERED * row * np.asarray(sizes, float)
    return STEP_OPERATIONS + np.array([[*drawn, row * num_rows], [*(2 * drawn), np.inf]])


def _speeds(
    target: Target, algorithm: Algorithm, settings: Settings, state: SGState, shares: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Relaxation per step by share of the noise, and the noise; without and with correction."""
    scaled = target.scaled(state)
    position = state.chain.position
    flat, unravel = ravel(position)
    # at the anchor a control variate leaves no noise. So measure at a typical distance of the chain
    # from the middle of the coordinates, which is 0
    typical = unravel(scattered_floats(key_word(state.rng_key), flat.size, flat.dtype))

    def noise_at(share: jax.Array) -> jax.Array:
        corrected = with_control_variate(target.potential, state.control.anchor, share)
        return largest_noise(scaled.expanded(corrected), typical, state.rng_key)

    def speed(noise: jax.Array) -> jax.Array:
        # curvature is about 1 in scaled coordinates (more with a diagonal scale), like the initial
        # value of an adaptation
        found = state.adaptation._replace(noise=MARGIN * noise)
        step_size, rate, dynamics = algorithm.rule.propose(found, state, scaled.seen(state.control))
        if algorithm.facts.momentum:  # the friction sets the autocorrelation time of a mean
            rate = 1 / dynamics.friction
        # with an acceptance test the step size does not show how much the noise gets rejected
        return step_size * rate / (1 + noise if algorithm.facts.adjusted else 1)

    noise = lax.map(noise_at, jnp.arange(2, dtype=flat.dtype))
    return jax.vmap(jax.vmap(speed))(noise[:, None] * shares), noise
