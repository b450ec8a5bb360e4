"""Before a chain's first draw: a search for the bulk, the first anchor and scale, and open choices.

1. `search`: Adam, from minibatch gradients. NumPyro starts chains uniformly in (-2, 2) on the
   unconstrained space. Gradients there can be many orders of magnitude larger than in the
   posterior. A chain with a step size for such gradients never leaves. Adam's steps do not depend
   on the gradient's magnitude.
2. `approach`: Newton's steps, up to 256 dimensions. Adam's steps are equal in all coordinates. If
   scales differ strongly, Adam ends many standard deviations off the mode. The scale and the noise
   that are measured there do not fit the posterior. Newton's steps do not depend on scales.
3. The scale and the control variate's anchor are placed there (`find_bulk`).
4. `choose`: rows per step, and whether to use the control variate.

The mode can be far from the mass of a target: towards zero scale, the density of a centred
hierarchical model grows without bound. So if Hessians are formed, both searches are for the middle
of a normal law with the covariance tau L L', L L' = |H|^-1. They minimise U - tau log |det L|,
because the law's mass is exp(-U / tau) |det L|. Adam's gradients are then means over this law.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random

from .._linalg import log_abs_det
from .._util import key_word, ravel, scattered_floats, settled, tree_where
from ..model.control_variate import Anchor, anchor_at, replace_anchor, with_control_variate
from ..model.newton import Place, newton
from ..model.potential import Potential
from ..model.programs import compiled
from ..model.scale import Scale, times
from ..sampling.algorithm import Algorithm, rule_temperature
from ..sampling.settings import DENSE_LIMIT, Settings
from ..sampling.state import SGState
from ..sampling.target import Target
from .curvature import largest_noise
from .scale import (
    block_mask,
    given_scale,
    roots_at,
    scale_of_curvature,
    scale_of_diagonal,
    share_along,
    share_within_reach,
)

PyTree = Any

REFINEMENTS = 2
"""Number of searches with a control variate, after the search without one."""

LEARNING_RATE = 0.05
"""Adam's first learning rate: about the largest step of an unconstrained coordinate."""
ROUND_STEPS = 25
"""Steps between two evaluations of the energy."""
MAX_ROUNDS = 60
LEAST_FALL = 0.2
"""A smaller fall of the energy per round, in units of tau * D, reduces the learning rate. Without
Hessians the smaller of D and N replaces D."""
REDUCTION = 1 / 3
"""Factor on the learning rate after a round that did not lower the energy enough."""
MAX_REDUCTIONS = 5
MEMORY = 0.95
"""Adam's memory of squared gradients: a start with large gradients is soon forgotten."""
HUGE = 1e6
"""Entries of a gradient over N above this grow only as a logarithm. Their squares would overflow,
and Adam would take long to forget them."""

MOST_NEWTON_STEPS = 8
NEAR = 0.02
"""The approach ends if the next step promises a smaller fall of U than this, in units of tau. This
is 0.2 of a standard deviation."""

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


def find_bulk(
    target: Target,
    settings: Settings,
    position: PyTree,
    control: Any,
    rng_key: jax.Array,
    searching: bool,
) -> tuple[PyTree, Any, Any]:
    """Move near the bulk, and place the scale and the control variate's anchor there.

    Args:
        target: the target to sample, in the model's coordinates.
        settings: the kernel's settings.
        position: position of the model's sites where NumPyro's strategy or the user starts.
        control: the control variate's state, empty without one.
        rng_key: for the rows.
        searching: whether to search at all.

    Returns:
        The position, the control variate's state, and the scale, empty without one.
    """
    sites = position
    position, to_sites = ravel(sites)  # a vector compiles faster than many leaves
    target = target.in_coordinates(to_sites)
    potential, temperature = target.potential, target.temperature
    curved = settings.finds_scale and position.size <= DENSE_LIMIT
    key_scale = random.fold_in(rng_key, 0)
    if curved or not target.controlled:
        if searching:
            mode = search(potential, position, rng_key, temperature, of_mass=curved)
            # an improper model can have its mode where values overflow
            position = jnp.where(target.is_usable(mode), mode, position)
        if curved and potential.on_all_rows is not None:
            anchor, roots = approach(
                target, position, key_scale, MOST_NEWTON_STEPS if searching else 1
            )
            position = anchor.position
            if target.controlled:
                control = control._replace(anchor=anchor)
        elif curved:
            roots = roots_at(potential, position, potential.curvature_batch(key_scale))
    else:
        position, control = _with_anchors(target, position, control, rng_key, searching)
    scale: Any = ()
    if curved:
        blocks = block_mask(settings.blocks, sites) if settings.blocks else None
        scale = scale_of_curvature(target, settings, position, roots, key_scale, blocks)
        if searching:
            position = typical_place(target, scale, position, random.fold_in(rng_key, 1))
    elif settings.finds_scale:
        scale = scale_of_diagonal(target, settings, position, key_scale)
    elif settings.scales:
        scale = given_scale(settings, to_sites(position))
    return to_sites(position), control, scale


def typical_place(
    target: Target, scale: Scale, position: jax.Array, rng_key: jax.Array
) -> jax.Array:
    """A draw of the normal law about ``position`` that the scale describes, within its reach.

    The middle of D dimensions is not typical: U is tau D / 2 below its mean there.
    """
    tau = rule_temperature(target.temperature)
    noise = times(scale.root, random.normal(rng_key, position.shape, position.dtype))
    rows = target.potential.curvature_batch(rng_key)
    share = share_along(target.potential, noise, position, rows, target.temperature)
    found = position + share * tau**0.5 * noise
    return jnp.where(target.is_usable(found), found, position)


def _with_anchors(
    target: Target, position: jax.Array, control: Any, rng_key: jax.Array, searching: bool
) -> tuple[jax.Array, Any]:
    """Search without a control variate first, then more exactly, with anchors on the way."""
    potential = target.potential
    if not searching:
        return position, replace_anchor(potential, control, position)

    def closer(k: jax.Array, found: tuple) -> tuple:
        mode, control = found
        share = jnp.minimum(k, 1).astype(control.anchor.energy.dtype)
        corrected = with_control_variate(potential, control.anchor, share)
        mode = search(corrected, mode, random.fold_in(rng_key, k), target.temperature)
        mode = jnp.where(target.is_usable(mode), mode, position)
        return mode, replace_anchor(potential, control, mode)

    return lax.fori_loop(0, 1 + REFINEMENTS, closer, (position, control))


# 1. Adam


class _Search(NamedTuple):
    """State of the search between two rounds.

    Attributes:
        position: the best position so far.
        root: L at the position, within its reach; empty in a search for the mode.
        log_det: log |det L|; NaN before it is known; 0 in a search for the mode.
        optimiser: Adam's moments.
        stream: position in the stream of rows.
        num_rounds: rounds so far.
        num_reductions: number of reductions of the learning rate.
    """

    position: PyTree
    root: Any
    log_det: jax.Array
    optimiser: PyTree
    stream: Any
    num_rounds: jax.Array
    num_reductions: jax.Array


def search(
    potential: Potential,
    position: PyTree,
    rng_key: jax.Array,
    temperature: float,
    *,
    of_mass: bool = False,
) -> PyTree:
    """Minimise with Adam from ``position``, until the energy falls no more than noise would.

    The energy is U, or with ``of_mass`` U - tau log |det L|. The unit of its fall is
    ``temperature * D``, the spread of U in the target. A round with a fall below a share of this
    unit reduces the learning rate. A round that raises the energy is also undone. Five reductions
    end the search. So it stops near the typical set. This need not be near the mode.

    Args:
        potential: the target.
        position: where to start, a pytree.
        rng_key: for the rows.
        temperature: tau.
        of_mass: whether to search for the most mass instead of the mode, with Hessians.

    Returns:
        A position like ``position``. If the energy was never finite, ``position`` itself.
    """
    adam = optax.scale_by_adam(b2=MEMORY)
    flat, unravel = ravel(position)
    tau = rule_temperature(temperature)
    size, num_data = flat.size, potential.num_data
    if not of_mass and num_data > 1:  # otherwise N is not known
        size = min(size, num_data)  # rows determine at most as many directions as rows
    enough = LEAST_FALL * (tau if of_mass else max(temperature, 1e-2)) * size
    key_stream, key_rounds = random.split(rng_key)

    def spread_at(position: PyTree, rows: Any) -> tuple[Any, jax.Array]:
        """L within its reach, and log |det L|."""
        if not of_mass:
            return (), jnp.zeros((), flat.dtype)
        root, _ = roots_at(potential, position, rows)
        share = share_within_reach(potential, root, position, rows, key_rounds, temperature)
        return share * root, log_abs_det(root)

    def off(position: PyTree, root: Any, rng_key: jax.Array) -> PyTree:
        """A draw of the normal law."""
        if not of_mass:
            return position
        noise = tau**0.5 * scattered_floats(key_word(rng_key), flat.size, flat.dtype)
        return jax.tree.map(jnp.add, position, unravel(times(root, noise)))

    def one_round(now: _Search) -> _Search:
        key_steps, key_check = random.split(random.fold_in(key_rounds, now.num_rounds))
        rate = LEARNING_RATE * REDUCTION ** now.num_reductions.astype(jnp.float32)

        def step(k: jax.Array, carry: tuple) -> tuple:
            current, optimiser, stream = carry
            key_step = random.fold_in(key_steps, k)
            batch, stream = potential.draw(key_step, stream)
            grad = jax.grad(potential.energy)(off(current, now.root, key_step), batch)
            grad = _damped(jax.tree.map(lambda x: x / potential.num_data, grad))
            direction, optimiser = adam.update(grad, optimiser)
            current = jax.tree.map(lambda x, d: (x - rate * d).astype(x.dtype), current, direction)
            return current, optimiser, stream

        carry = (now.position, now.optimiser, now.stream)
        new, optimiser, stream = lax.fori_loop(0, ROUND_STEPS, step, carry)
        rows = potential.curvature_batch(key_check)  # both on the same rows, so the noise cancels
        fall = potential.energy(now.position, rows) - potential.energy(new, rows)
        root, log_det = spread_at(new, rows)
        fall = settled(fall + tau * jnp.nan_to_num(log_det - now.log_det))
        finite = jnp.isfinite(fall)  # otherwise Adam's moments may be not finite either
        return _Search(
            position=tree_where(fall > 0, new, now.position),
            root=tree_where(fall > 0, root, now.root),
            log_det=jnp.where(fall > 0, log_det, now.log_det),
            optimiser=tree_where(finite, optimiser, adam.init(now.position)),
            stream=stream,
            num_rounds=now.num_rounds + 1,
            num_reductions=now.num_reductions + ~(fall > enough),
        )

    def unfinished(now: _Search) -> jax.Array:
        return (now.num_rounds < MAX_ROUNDS) & (now.num_reductions < MAX_REDUCTIONS)

    zero, stream = jnp.zeros((), jnp.int32), potential.init_stream(key_stream)
    root = jnp.zeros((flat.size, flat.size), flat.dtype) if of_mass else ()
    unknown = jnp.full((), jnp.nan, flat.dtype)
    start = _Search(position, root, unknown, adam.init(position), stream, zero, zero)
    return lax.while_loop(unfinished, one_round, start).position


def _damped(grad: PyTree) -> PyTree:
    """The gradient: beyond `HUGE` its largest entry grows as a logarithm."""
    largest = jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in jax.tree.leaves(grad)]).max()
    excess = jnp.maximum(largest / HUGE, 1.0)
    return jax.tree.map(lambda x: (x / excess * (1 + jnp.log(excess))).astype(x.dtype), grad)


# 2. Newton


def approach(
    target: Target, position: jax.Array, rng_key: jax.Array, most_steps: int
) -> tuple[Anchor, tuple[jax.Array, jax.Array]]:
    """Newton steps from ``position``, each with a gradient on all rows and a Hessian on some rows.

    Args:
        target: of a vector in the model's coordinates, with energies on all rows.
        position: where to start, shape (D,).
        rng_key: for the rows of the Hessian.
        most_steps: largest number of steps; 1 to stay at ``position``.

    Returns:
        The last position with U and its gradient; L with L L' = |H|^-1 there, and its inverse. The
        start and I if nothing is finite.
    """
    potential, tau = target.potential, rule_temperature(target.temperature)
    rows = potential.curvature_batch(rng_key)

    def evaluate(position: jax.Array) -> Place:
        anchor = anchor_at(potential, position)
        root, inverse = roots_at(potential, position, rows)
        loss = anchor.energy - tau * log_abs_det(root)
        loss = jnp.where(target.is_usable(position), loss, jnp.inf)
        return Place(position, anchor.energy, anchor.grad, root, inverse, loss)

    found, _ = newton(evaluate, position, most_steps=most_steps, enough=NEAR * tau)
    return Anchor(found.position, found.energy, found.gradient), (found.root, found.inverse)


# 4. Open choices
#
# In one step the slowest direction relaxes by h times its rate. h follows from curvature and noise.
# These are measured at the start of the chain, with and without the control variate. More rows mean
# less noise and a higher cost. This predicts the relaxation per operation of each choice.
# Operations are counted and not timed, so the choice is the same on any machine.


class Choice(NamedTuple):
    """The choice and its reasons.

    Attributes:
        batch_size: rows per step; None for all.
        control_variate: whether gradients are corrected.
        noise: lam_C in the chain's coordinates, without control variate and with it: for these
            rows per step, or for the rows that were measured if a step takes all.
    """

    batch_size: int | None
    control_variate: bool
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
    plain, corrected = (float(x) * batch_size / (chosen or batch_size) for x in noise)
    return Choice(chosen, bool(controlled) and chosen is not None, (plain, corrected))


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
        step_size, rate, dynamics = algorithm.propose(found, state, scaled.seen(state.control))
        if algorithm.momentum:  # the friction sets the autocorrelation time of a mean
            rate = 1 / dynamics.friction
        # with an acceptance test the step size does not show how much the noise gets rejected
        return step_size * rate / (1 + noise if algorithm.adjusted else 1)

    noise = lax.map(noise_at, jnp.arange(2, dtype=flat.dtype))
    return jax.vmap(jax.vmap(speed))(noise[:, None] * shares), noise
