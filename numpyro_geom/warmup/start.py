"""Before a chain's first draw: where it starts, its anchor and scale, and open choices.

`find_typical_set` finds the normal law that is nearest to the target (`numpyro_geom.warmup.law`).
`choose` chooses rows per step, and the order of the control variate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.flatten_util import ravel_pytree as ravel

from .._util import PyTree, are_known, key_word, scattered_floats, tree_size
from ..model.arrowhead import Layout
from ..model.bad_rows import farthest
from ..model.control_variate import replace_anchor, with_control_variate
from ..model.jaxprs import UNKNOWN_TURNS, compiled, work
from ..model.potential import Potential
from ..sampling.algorithm import MAX_NUM_STEPS, Algorithm, rule_temperature
from ..sampling.settings import DENSE_LIMIT, LOW_RANK, Settings
from ..sampling.state import SGState, Target
from .curvature import noise_at
from .law import find_law, number_of_searches, search_often
from .scale import given_scale, scale_of_law

FEW_ROWS = 2048
"""Up to this many rows ``batch_size="auto"`` takes all: gathering fewer rows costs as much."""
FEW_OPERATIONS = 2e10
"""It also takes all rows if the gradients of a run then take at most this many operations, times
the gradients of a step on fewer rows. The measurements for fewer rows compile for a second and
more, in which such a run is done."""
USUAL_STEPS = 8
"""Steps of a draw, where their number is not known."""
FIRST_ROWS = 256
"""Rows per step from which the noise is measured, and rows per step if no measurement is possible.
"""
STEP_OPERATIONS = 1e5
"""Cost of a step besides its gradient: some ten microseconds on one core."""
GATHERED = 2.0
"""Cost of a drawn row, relative to a row in a pass over all rows in their order."""
MARGIN = 2.0
"""The final noise of a run (the largest of several measurements), relative to the first one."""
LEAST_NOISE = 0.01
"""A step takes all rows if the noise is less than this share of the noise of a model that is right,
whose scores have the covariance H / N. Then a few rows, such as rare events, carry the information,
and the measured rows miss them. A trajectory is exact with any rows."""
PARAMETER_OPERATIONS = 400.0
"""Cost of a step per parameter, beside its gradient: noise, momentum, the guard."""
REJECTED = 60.0
"""The error of a trajectory of length T has the variance h T tr C, and an acceptance of 0.95 allows
0.016. A noise tr C of the inverse of this number halves the step, by measurements."""


def find_typical_set(
    target: Target,
    settings: Settings,
    position: PyTree,
    control: Any,
    rng_key: jax.Array,
    searching: bool,
    often: bool = False,
) -> tuple[PyTree, jax.Array | None, Any, Any]:
    """Move near the typical set, and place the scale and the control variate's anchor there.

    ``control`` is empty without a control variate. With ``often`` it also searches from other
    positions, if that is cheap.

    Returns:
        A position, U there if it is known, the control variate's state, and the scale.
    """
    sites = position
    scale: Any = ()
    if not settings.finds_scale and not searching:
        scale = given_scale(settings, sites) if settings.scales else ()
        control = replace_anchor(target.potential, control, position) if control else control
        return sites, None, control, scale
    position, to_sites = ravel(sites)  # a vector compiles faster than many leaves
    target = target.in_coordinates(to_sites)
    layout: Any = settings.layout
    if layout is None and (position.size <= DENSE_LIMIT or settings.dense_scale):
        layout = Layout.without_groups(position.size)
    number = 1
    if searching and often and layout is not None and not layout.num_groups:
        number = number_of_searches(target, position, rng_key)
    if number > 1:
        law = search_often(target, layout, position, rng_key, number)
    else:
        law = find_law(
            target, layout, position, rng_key, searching, low_rank=settings.dense_mass == LOW_RANK
        )
    if target.controlled:
        control = replace_anchor(target.potential, control, law.centre, law.root)
        control = control.of_order(settings.control_variate)
    if settings.finds_scale:
        scale = scale_of_law(law, settings, sites)
    elif settings.scales:
        scale = given_scale(settings, to_sites(law.centre))
    usable = searching & target.is_usable(law.draw)
    # at the anchor a control variate leaves no noise, and the first steps would be too long
    position = jnp.where(usable, law.draw, law.centre if searching else position)
    return to_sites(position), law.energy, control, scale


FAR_ABOVE = 20.0
"""Difference of energies that is too much for two positions in a target, in units of tau D. In the
target, energies spread by (D / 2)^1/2 tau, and their mean is tau D / 2 above the lowest energy of a
normal law."""
SUSPICIOUS, SUSPICIOUS_REAL = 10.0, 1e6
"""Distance from 0 in the unconstrained space from which a search may have run away: exp(10) is
22,000. A site that is real there as here may be in small units."""


def check_arrival(model: Any, potential: Potential, settings: Settings, state: SGState) -> None:
    """Raise a ValueError if a search has run away: twice as far out, the energy is much lower."""
    if model is None or model.on_host or not are_known((state, model.args, model.kwargs)):
        return
    several = np.ndim(state.i) > 0
    states = {n: np.asarray(x) if several else np.asarray(x)[None] for n, x in state.z.items()}
    far = [np.any(np.abs(x) > SUSPICIOUS, tuple(range(1, x.ndim))) for x in states.values()]
    for chain in np.flatnonzero(np.any(far, 0)):
        z = {name: x[chain] for name, x in states.items()}
        out = {n: np.abs(x) > SUSPICIOUS for n, x in z.items()}
        values = model.constrain(z)
        for name, x in z.items():
            if np.array_equal(x, values.get(name)):
                out[name] = np.abs(x) > SUSPICIOUS_REAL
        size = sum(x.size for x in z.values())
        fall = FAR_ABOVE * rule_temperature(settings.temperature) * size
        for name in (n for n, x in out.items() if x.any()):
            where = [z | {name: np.where(out[name], k * z[name], z[name])} for k in (1, 2, -2)]
            batch = potential.curvature_batch(random.key(0))
            here, *further = (compiled(potential.energy, x, batch) for x in where)
            if any(float(energy) < float(here) - fall for energy in further):
                raise ValueError(
                    f"the search for a start ran away with site {name!r}, to "
                    f"{farthest(z[name])} in its unconstrained space: the energy falls further the "
                    "farther out it is, so the posterior is not proper, or has no typical set. "
                    "Expected a proper posterior: give the site a prior with lighter tails (no "
                    "ImproperUniform), or check the signs of `numpyro.factor`"
                )


# 3. Open choices
#
# In one step the slowest direction relaxes by h times its rate. h follows from curvature and noise.
# These are measured at the start of the chain, with and without the control variate. More rows mean
# less noise and a higher cost. This predicts the relaxation per operation of each choice.
# Operations are counted and not timed, so the choice is the same on any machine.


class Choice(NamedTuple):
    """The choice and its reasons.

    Attributes:
        batch_size: rows per step; None for all.
        order: order of the control variate, 0 for none.
        noise: lam_C (of a trajectory tr C) in the chain's coordinates, without control variate and
            with it (of the order that was chosen, or else of the highest order): for these rows per
            step, or for the rows that were measured if a step takes all.
    """

    batch_size: int | None
    order: int
    noise: tuple[float, float]


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

    ``target`` takes ``batch_size`` of ``num_rows`` rows per step, and has a control variate with
    its anchor where the search ended. ``open_rows`` and ``open_control`` tell which of the two is
    to be chosen.
    """
    sizes = [batch_size]
    if open_rows:
        sizes = [2**k for k in range(5, 20) if 2 * 2**k < num_rows]
    costs = _costs(target, state, sizes, num_rows)
    rows = jnp.asarray([*sizes, np.inf], state.potential_energy.dtype)
    found = compiled(
        lambda state, rows: _speeds(target, algorithm, settings, state, batch_size / rows),
        state,
        rows,
    )
    speeds, steps, noise = map(np.array, found)
    if open_rows:  # draws of the most steps are correlated, however many steps a second there are
        speeds[:, :-1][steps[:, :-1] >= MAX_NUM_STEPS] = 0.0
    gains = speeds / costs
    gains[~np.isfinite(gains)] = 0.0
    if not open_rows:
        gains[:, -1] = 0.0
    if not open_control:
        gains[np.arange(len(gains)) != settings.control_variate] = 0.0
    order, best = map(int, np.unravel_index(gains.argmax(), gains.shape))
    rare = noise[0] < LEAST_NOISE * num_rows / batch_size
    if open_rows and rare and not algorithm.trajectory:
        best = len(sizes)
    chosen = None if best == len(sizes) else sizes[best]
    order = 0 if chosen is None else order
    plain, corrected = (
        float(noise[k]) * batch_size / (chosen or batch_size) for k in (0, order or -1)
    )
    return Choice(chosen, order, (plain, corrected))


def _costs(target: Target, state: SGState, sizes: list[int], num_rows: int) -> np.ndarray:
    """Operations per step by order of the control variate; the last column is for all rows.

    Those of a gradient are counted in the chain's coordinates, for two numbers of rows: what does
    not grow with the rows, such as a prior and a scale of many parameters, is paid in any case.
    """
    potential, position = target.potential, state.chain.position
    seen = target.scaled(state).in_chain(potential)

    def counted(rows: Any) -> tuple[int, float]:
        jaxpr = jax.make_jaxpr(jax.grad(seen.energy))(position, rows).jaxpr
        return max(x.size for x in jax.tree.leaves(rows)), work(jaxpr, UNKNOWN_TURNS)

    few, cost = counted(jax.eval_shape(potential.draw, state.rng_key, state.stream)[0])
    more, higher = counted(jax.eval_shape(potential.curvature_batch, state.rng_key))
    row = cost / few if more == few else max((higher - cost) / (more - few), 0.0)
    fixed = max(cost - few * row, 0.0)
    drawn = fixed + GATHERED * row * np.asarray(sizes, float)
    orders = [[*(2**k * drawn), np.inf] for k in range(1, 1 + _highest(state))]
    rest = STEP_OPERATIONS + PARAMETER_OPERATIONS * tree_size(position)
    return rest + np.array([[*drawn, fixed + row * num_rows], *orders])


def _highest(state: SGState) -> int:
    """The highest order of a control variate for which there is an anchor."""
    if not state.control:
        return 0
    return 2 if state.control.anchor.curvature else 1


def _speeds(
    target: Target, algorithm: Algorithm, settings: Settings, state: SGState, shares: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Relaxation per step and steps per draw by share of the noise, and the noise; by order."""
    scaled = target.scaled(state)
    plain = None if algorithm.adjusted else scaled.in_chain(target.potential)
    position = state.chain.position
    flat, unravel = ravel(position)
    # at the anchor a control variate leaves no noise. So measure at a typical distance of the chain
    # from the middle of the coordinates, which is 0
    typical = unravel(scattered_floats(key_word(state.rng_key), flat.size, flat.dtype))
    how: dict = {"layout": settings.layout, "plain": plain, "temperature": target.temperature}

    def noise_of(order: jax.Array) -> jax.Array:
        corrected = target.potential
        if state.control:
            corrected = with_control_variate(corrected, state.control.anchor, order)
        seen = scaled.in_chain(corrected)
        largest, total = noise_at(seen, typical, state.rng_key, **how)
        return total if algorithm.trajectory else largest

    def speed(noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        # curvature is about 1 in scaled coordinates (more with a diagonal scale), like the initial
        # value of an adaptation
        found = state.adaptation._replace(noise=MARGIN * noise)
        step_size, rate, dynamics = algorithm.propose(found, state, scaled.seen(state.control))
        steps = algorithm.num_steps(rate, step_size, scaled.seen(state.control))
        if algorithm.momentum:  # the friction sets the autocorrelation time of a mean
            rate = 1 / dynamics.friction
        # with an acceptance test the step size does not show how much the noise gets rejected
        lost = REJECTED * noise / rule_temperature(settings.temperature)
        return step_size * rate / (1 + lost if algorithm.trajectory else 1), steps

    noise = lax.map(noise_of, jnp.arange(1 + _highest(state)))
    return *jax.vmap(jax.vmap(speed))(noise[:, None] * shares), noise
