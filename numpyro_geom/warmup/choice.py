"""What a run chooses before its program is compiled: rows a step, and a control variate or none.

In a step the slowest direction relaxes by h times its rate, and h follows from curvature and noise.
These are measured where the chain starts, with the control variate and without. Noise falls with
the number of rows and cost rises with it, which predicts the relaxation per operation of each
choice. Operations are counted and not timed: the choice is the same on any machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._programs import compiled
from .._util import key_word, ravel, scattered_floats
from ..algorithm import Algorithm
from ..settings import Settings
from ..state import SGState
from ..target.control_variate import with_control_variate
from ..target.target import Target
from .curvature import largest_noise

PyTree = Any

FEW_ROWS = 2048
"""Rows that ``batch_size="auto"`` takes at every step: gathering some costs as much."""
FIRST_ROWS = 256
"""Rows a step from which the noise is measured, and where nothing can be measured."""
STEP_OPERATIONS = 1e5
"""What a step costs besides its gradient: some ten microseconds on one core."""
GATHERED = 2.0
"""Cost of a row that is drawn, relative to one in a pass over all rows in their order."""
MARGIN = 2.0
"""The noise at which a run arrives, the largest of several measurements, over the first one."""
LEAST_GAIN = 1.1
"""Predicted gain that makes a control variate worth its anchor."""


class Choice(NamedTuple):
    """What was chosen, and why.

    Attributes:
        batch_size: rows a step; None for all.
        control_variate: whether gradients are corrected.
        noise: lam_C at ``measured_rows`` rows a step without control variate, in the chain's
            coordinates, and with it.
        measured_rows: rows a step for which the noise is stated.
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
    """Choose by what is measured at the start of a chain.

    Args:
        target: with a control variate.
        algorithm: which samples it.
        settings: the kernel's.
        state: of one chain before its first draw, its anchor where the search ended.
        num_rows: N, rows of the plate that is subsampled.
        batch_size: rows a step that the target takes.
        open_rows: whether their number is left open.
        open_control: whether the control variate is.
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
    """Operations of a step, without and with control variate; in the last column of all rows."""
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
    """Relaxation in a step by share of the noise, and the noise; without correction and with."""
    scaled = target.scaled(state)
    position = state.chain.position
    flat, unravel = ravel(position)
    # at the anchor a control variate leaves no noise: as far off as the chain will be, about the
    # middle of the coordinates, which is 0
    typical = unravel(scattered_floats(key_word(state.rng_key), flat.size, flat.dtype))

    def noise_at(share: jax.Array) -> jax.Array:
        corrected = with_control_variate(target.potential, state.control.anchor, share)
        return largest_noise(scaled.expanded(corrected), typical, state.rng_key)

    def speed(noise: jax.Array) -> jax.Array:
        # curvature is about 1 in scaled coordinates (more in those of a diagonal), as it is of an
        # adaptation that knows nothing yet
        found = state.adaptation._replace(noise=MARGIN * noise)
        step_size, rate, dynamics = algorithm.rule.propose(found, state, scaled.seen(state.control))
        if algorithm.facts.momentum:  # the autocorrelation time of a mean is the friction
            rate = 1 / dynamics.friction
        # where a test corrects for the noise, the step size says nothing of what it rejects
        return step_size * rate / (1 + noise if algorithm.facts.adjusted else 1)

    noise = lax.map(noise_at, jnp.arange(2, dtype=flat.dtype))
    return jax.vmap(jax.vmap(speed))(noise[:, None] * shares), noise
