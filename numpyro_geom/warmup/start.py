"""Before a chain's first draw: a search for the typical set, anchor and scale, and open choices.

1. `search`: Adam, from minibatch gradients. NumPyro starts chains uniformly in (-2, 2) on the
   unconstrained space. Gradients there can be many orders of magnitude larger than in the
   posterior. A chain with a step size for such gradients never leaves. Adam's steps do not depend
   on the gradient's magnitude.
2. `law_with_most_mass`: up to 256 dimensions, Newton's steps follow. Adam's steps are equal in all
   coordinates. If scales differ strongly, Adam ends many standard deviations off the mode. The
   scale and the noise that are measured there do not fit the posterior. Newton's steps do not
   depend on scales. The scale and the control variate's anchor are set there (`find_typical_set`).
   A search can end in a mode without mass. So if it is cheap, `search_often` repeats it from other
   positions.
3. `find_arrow`: with groups in more dimensions, the normal law that is nearest in Kullback-Leibler
   divergence takes the place of Newton's steps.
4. `choose`: rows per step, and the order of the control variate.

The mode can be far from the mass of a target: towards zero scale, the density of a centred
hierarchical model grows without bound. So if Hessians are formed, both searches are for the middle
of a normal law with the covariance tau L L', L L' = |H|^-1. They minimise U - tau log |det L|,
because the law's mass is exp(-U / tau) |det L|. Adam's gradients are then means over this law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random
from jax.flatten_util import ravel_pytree as ravel

from .._linalg import log_abs_det
from .._util import (
    PyTree,
    all_finite,
    are_known,
    key_word,
    lazy_cond,
    scattered_floats,
    tree_size,
    tree_where,
)
from ..model.arrowhead import (
    ArrowRoot,
    Layout,
    derivatives_at,
    find_parents,
    no_arrowhead,
    root_of,
    unit_root,
)
from ..model.bad_rows import farthest
from ..model.control_variate import (
    Anchor,
    Curvature,
    anchor_at,
    replace_anchor,
    with_control_variate,
)
from ..model.jaxprs import UNKNOWN_TURNS, compiled, work
from ..model.model import CURVATURE_ROWS
from ..model.potential import Potential
from ..model.scale import LowRankRoot, Scale, scale_about, times
from ..sampling.algorithm import MAX_NUM_STEPS, Algorithm, rule_temperature
from ..sampling.settings import DENSE_LIMIT, LOW_RANK, Settings
from ..sampling.state import SGState, Target
from .curvature import largest_noise, look_around, total_noise
from .scale import (
    LOW_RANK_PRODUCTS,
    block_mask,
    given_scale,
    low_rank_root,
    scale_of_diagonal,
    scale_of_law,
    share_in_trust_region,
)

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
_ADAM = optax.scale_by_adam(b2=0.95)
"""With little memory of squared gradients: a start with large gradients is soon forgotten."""
HUGE = 1e6
"""Entries of a gradient over N above this grow only as a logarithm. Their squares would overflow,
and Adam would take long to forget them."""

MOST_NEWTON_STEPS = 8
NEAR = 0.02
"""The approach ends if the next step promises a smaller fall of U than this, in units of tau. This
is 0.2 of a standard deviation."""

MOST_SEARCHES = 8
"""Number of searches of a chain, if they are cheap."""
SEARCH_OPERATIONS = 3e9
"""Operations that the searches after the first one may take together: about half a second."""
USUAL_ROUNDS = 40
"""Rounds of a search, for its cost."""
WIDTH = 2.0
"""Starts are uniform within this distance of 0 in the unconstrained space, as NumPyro's are."""

SEARCH_WIDTH = 0.3
"""Standard deviation of the law over which the search for a target with groups takes means."""
MOVES_ON = 0.7
"""Mean of a shared parameter's last steps, in longest steps, from which it moves on. Steps that are
noise go back and forth."""
LEAST_SHARE = 0.3
"""Share of the newest Hessian in the mean Hessian, at least; 1 / k in round k."""
STEP = 0.6
"""Share of Newton's step in a round."""

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
GRADIENTS = np.array([1.0, 2.0, 4.0])
"""Minibatch gradients per step by order of the control variate."""
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
LEAST_GAIN = 1.1
"""Smallest predicted gain that makes a control variate worth its anchor."""


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
        A position, U where a search began if it was needed, the control variate's state, and the
        scale.
    """
    sites = position
    position, to_sites = ravel(sites)  # a vector compiles faster than many leaves
    target = target.in_coordinates(to_sites)
    key_scale = random.fold_in(rng_key, 0)
    energy: Any = None
    scale: Any = ()
    if settings.finds_scale and settings.layout is None and position.size <= DENSE_LIMIT:
        number = _number_of_searches(target, position, rng_key) if searching and often else 1
        law, energy, typical = search_often(target, position, rng_key, searching, number)
        if target.controlled:
            anchor = Anchor(law.position, law.energy, law.gradient)
            if control.anchor.curvature:
                layout = control.anchor.curvature.hessian.layout
                anchor = anchor_at(target.potential, law.position, layout)
            control = control._replace(anchor=anchor)
        blocks = block_mask(settings.blocks, sites) if settings.blocks else None
        scale = scale_of_law(law, settings, blocks)
        position = jnp.where(target.is_usable(typical), typical, law.position)
    elif settings.finds_scale and settings.layout is not None:
        anchor, root = find_arrow(target, settings.layout, position, rng_key, searching)
        centre = anchor.position
        scale = scale_about(centre, root)
        if target.controlled:
            control = control._replace(anchor=anchor).of_order(settings.control_variate)
        position = _typical(target, centre, root, key_scale) if searching else position
    elif settings.finds_scale and settings.dense_mass == LOW_RANK:
        centre, scale = find_low_rank(target, position, control, rng_key, searching)
        if target.controlled:
            control = replace_anchor(target.potential, control, centre)
        # at the anchor a control variate leaves no noise, and the first steps would be too long
        typical = _typical(target, centre, scale.root, key_scale)
        position = typical if searching else centre
    else:
        position, control = _with_anchors(target, position, control, rng_key, searching)
        if settings.finds_scale:
            scale = scale_of_diagonal(target, settings, position, key_scale)
        elif settings.scales:
            scale = given_scale(settings, to_sites(position))
    return to_sites(position), energy, control, scale


def _typical(target: Target, centre: jax.Array, root: Any, rng_key: jax.Array) -> jax.Array:
    """A draw of a normal law, or its centre if values overflow there."""
    noise = random.normal(rng_key, centre.shape, centre.dtype)
    found = centre + rule_temperature(target.temperature) ** 0.5 * root.times(noise)
    return jnp.where(target.is_usable(found), found, centre)


def _with_anchors(
    target: Target, position: jax.Array, control: Any, rng_key: jax.Array, searching: bool
) -> tuple[jax.Array, Any]:
    """Search without a control variate first, then more exactly, with anchors on the way."""
    potential = target.potential
    if not searching:
        return position, replace_anchor(potential, control, position) if control else control
    if not control:
        mode = search(potential, position, rng_key, target.temperature, target.near)
        return jnp.where(target.is_usable(mode), mode, position), control

    def closer(k: jax.Array, found: tuple) -> tuple:
        mode, control = found
        corrected = with_control_variate(potential, control.anchor, jnp.minimum(k, 1))
        key = random.fold_in(rng_key, k)
        mode = search(corrected, mode, key, target.temperature, target.near)
        mode = jnp.where(target.is_usable(mode), mode, position)
        return mode, replace_anchor(potential, control, mode)

    return lax.fori_loop(0, 3, closer, (position, control))


# 1. Adam


class _Search(NamedTuple):
    """State of the search between two rounds.

    Attributes:
        optimiser: Adam's moments.
        stream: position in the stream of rows.
        num_rounds: rounds so far.
        num_reductions: number of reductions of the learning rate.
    """

    optimiser: PyTree
    stream: Any
    num_rounds: jax.Array
    num_reductions: jax.Array

    @property
    def unfinished(self) -> jax.Array:
        return (self.num_rounds < MAX_ROUNDS) & (self.num_reductions < MAX_REDUCTIONS)


def search(
    potential: Potential,
    position: PyTree,
    rng_key: jax.Array,
    temperature: float,
    near: jax.Array | bool = False,
) -> PyTree:
    """Minimise U with Adam from ``position``, until it falls no more than noise would.

    The unit of its fall is ``temperature * D``, the spread of U in the target. A round with a fall
    below a share of this unit reduces the learning rate. A round that raises the energy is also
    undone. Five reductions end the search. So it stops near the typical set. This need not be near
    the mode. Where the energy is not finite, it starts again elsewhere. If the search is ``near``
    already, the result is ``position`` itself.
    """
    size, num_data = ravel(position)[0].size, potential.num_data
    if num_data > 1:  # otherwise N is not known
        size = min(size, num_data)  # rows determine at most as many directions as rows
    enough = LEAST_FALL * max(temperature, 1e-2) * size

    def one_round(carry: tuple) -> tuple:
        position, now = carry
        new, key_rows, now = _adam(potential, position, now, rng_key)
        rows = potential.curvature_batch(key_rows)  # both on the same rows, so the noise cancels
        two = jax.tree.map(lambda *x: jnp.stack(x), position, new)
        before, after = lax.map(lambda x: potential.energy(x, rows), two)
        fall = before - after
        position = jnp.where(fall > 0, new, position)
        position = _or_elsewhere(position, jnp.where(fall > 0, after, before), key_rows)
        return position, _judged(now, position, fall, fall > enough)

    start = position, _first(potential, position, rng_key, near)
    return lax.while_loop(lambda carry: carry[1].unfinished, one_round, start)[0]


def _or_elsewhere(position: jax.Array, energy: jax.Array, rng_key: jax.Array) -> jax.Array:
    """``position``, or another start as NumPyro's if the energy there is not finite."""
    other = random.uniform(random.fold_in(rng_key, 1), position.shape, position.dtype)
    return jnp.where(jnp.isfinite(energy), position, WIDTH * (2 * other - 1))


def _first(
    potential: Potential, position: PyTree, rng_key: jax.Array, near: jax.Array | bool
) -> _Search:
    zero, stream = jnp.zeros((), jnp.int32), potential.init_stream(random.fold_in(rng_key, 0))
    return _Search(_ADAM.init(position), stream, zero, zero + MAX_REDUCTIONS * jnp.asarray(near))


def _adam(
    potential: Potential,
    position: PyTree,
    now: _Search,
    rng_key: jax.Array,
    off: Callable[[PyTree, jax.Array], PyTree] = lambda position, rng_key: position,
    num_steps: Any = ROUND_STEPS,
) -> tuple[PyTree, jax.Array, _Search]:
    """Steps of one round: the new position, a key for the rows of its judgement, and the state."""
    key_steps, key_rows = random.split(random.fold_in(rng_key, 1 + now.num_rounds))
    rate = LEARNING_RATE * REDUCTION ** now.num_reductions.astype(jnp.float32)

    def step(k: jax.Array, carry: tuple) -> tuple:
        current, optimiser, stream = carry
        key_step = random.fold_in(key_steps, k)
        batch, stream = potential.draw(key_step, stream)
        grad = jax.grad(potential.energy)(off(current, key_step), batch)
        grad = jax.tree.map(lambda x: x / potential.num_data, grad)
        largest = jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in jax.tree.leaves(grad)])
        much = jnp.maximum(largest.max() / HUGE, 1.0)
        grad = jax.tree.map(lambda x: (x / much * (1 + jnp.log(much))).astype(x.dtype), grad)
        direction, optimiser = _ADAM.update(grad, optimiser)
        current = jax.tree.map(lambda x, d: (x - rate * d).astype(x.dtype), current, direction)
        return current, optimiser, stream

    carry = position, now.optimiser, now.stream
    new, optimiser, stream = lax.fori_loop(0, num_steps, step, carry)
    return new, key_rows, now._replace(optimiser=optimiser, stream=stream)


def _judged(now: _Search, position: PyTree, fall: jax.Array, much: jax.Array) -> _Search:
    """The state after a round in which the energy fell."""
    finite = jnp.isfinite(fall)  # otherwise Adam's moments may be not finite either
    return now._replace(
        optimiser=tree_where(finite, now.optimiser, _ADAM.init(position)),
        num_rounds=now.num_rounds + 1,
        num_reductions=now.num_reductions + ~much,
    )


# 2. The normal law about the mass


class LawFacts(NamedTuple):
    """What is known about a place besides its energy.

    Attributes:
        share: the share of L that is within the reach of the curvature; 0 if nothing is known.
        log_det: log |det L|; NaN if nothing is known.
    """

    share: jax.Array
    log_det: jax.Array


def law_with_most_mass(
    target: Target, position: jax.Array, rng_key: jax.Array, searching: bool
) -> tuple[Iterate, jax.Array, jax.Array]:
    """The normal law with the most mass: with Adam from ``position``, then with Newton's steps.

    Adam's steps stop near the mass, as in `search`. Newton's steps have a gradient on all rows and
    a Hessian on some rows. The energy occurs in the program at three places: in Adam's gradient, in
    `look_around`, and in the gradient on all rows.

    Returns:
        The last iterate, with `LawFacts`; with I if nothing is finite. U at the first position of
        the search where it is finite. And where a chain starts: at a draw of the law, in its trust
        region, since the middle of D dimensions is not typical (U is tau D / 2 below its mean
        there).
    """
    potential, tau = target.potential, rule_temperature(target.temperature)
    exact = potential.on_all_rows is not None
    most_steps = MOST_NEWTON_STEPS if searching and exact else 1
    key_rows, key_noise, key_adam = (random.fold_in(rng_key, k) for k in range(3))
    noise = random.normal(key_noise, position.shape, position.dtype)

    def off(place: Iterate) -> Callable:
        """A draw of the normal law about the position."""
        width = tau**0.5 * place.extra.share

        def moved(position: jax.Array, rng_key: jax.Array) -> jax.Array:
            direction = scattered_floats(key_word(rng_key), position.size, position.dtype)
            return position + width * times(place.root, direction)

        return moved

    def one_round(carry: tuple) -> tuple:
        place, now, first, length, steps = carry
        closing = ~now.unfinished  # by Newton's steps
        new, key_round, now = _adam(
            potential, place.position, now, key_adam, off(place), jnp.where(closing, 0, ROUND_STEPS)
        )
        new = jnp.where(closing, place.ahead(length), new)
        # Newton's steps are all on the same rows
        rows = potential.curvature_batch(jnp.where(closing, key_rows, key_round))
        view = look_around(
            lambda x: potential.energy(x, rows), new, place.position, noise, target.temperature
        )
        log_det = log_abs_det(view.root)
        known = view.energy, view.gradient
        if exact and not potential.deterministic:
            known = lazy_cond(closing, lambda _, x: anchor_at(potential, x)[1:3], known, new)
        loss = known[0] - tau * log_det
        gain = tau * jnp.nan_to_num(log_det - place.extra.log_det)
        fall = jnp.where(closing, place.loss - loss, view.before - view.energy + gain)
        fall = jnp.where(target.is_usable(new), fall, jnp.nan)
        taken = (fall > 0) & (~closing | jnp.all(jnp.isfinite(known[1])))
        found = Iterate(new, *known, view.root, view.inverse, loss, LawFacts(view.share, log_det))
        # until Newton's first step, which stays at the place
        fresh = found._replace(gradient=jnp.zeros_like(new), loss=place.loss)
        found = tree_where(closing, found, fresh)
        judged = _judged(now, place.position, fall, fall > LEAST_FALL * tau * new.size)
        there = jnp.where(taken, view.energy, view.before)
        place = tree_where(taken, found, place)
        place = place._replace(position=_or_elsewhere(place.position, there, key_round))
        return (
            place,
            tree_where(closing, now, judged),
            jnp.where(jnp.isfinite(first), first, view.before),
            jnp.where(closing & ~taken, SHRINKAGE * length, 1),
            steps + closing,
        )

    def unfinished(carry: tuple) -> jax.Array:
        place, now, _, length, steps = carry
        far = ~(place.promise() <= NEAR * tau)
        more = (steps == 0) | (far & (length >= LEAST_LENGTH) & (steps < most_steps))
        return now.unfinished | more

    one, nan = jnp.ones((), position.dtype), jnp.full((), jnp.nan, position.dtype)
    now = _first(potential, position, key_adam, target.near if searching else True)
    start = first_iterate(position, LawFacts(0 * one, nan)), now, nan, one, now.num_rounds
    place, _, first, *_ = lax.while_loop(unfinished, one_round, start)
    share = jnp.where(place.extra.share > 0, place.extra.share, 1)
    place = place._replace(extra=place.extra._replace(share=share))
    typical = place.position
    if searching:
        typical += share * tau**0.5 * times(place.root, noise)
    return place, first, typical


def search_often(
    target: Target, position: jax.Array, rng_key: jax.Array, searching: bool, number: int
) -> tuple[Iterate, jax.Array, jax.Array]:
    """`law_with_most_mass` from several positions, and the choice of one end, in one loop.

    An end is chosen with the probability of its normal law, exp(-loss / tau). So a mode without
    mass is not chosen if another search has found the mass, and chains start in different modes if
    these have about the same mass, as in Pathfinder (Zhang et al. 2022, JMLR 23(306), section 2.4).
    The first search starts at ``position``, the others start at uniform positions.

    Returns:
        What `law_with_most_mass` returns.
    """
    if number == 1:
        return law_with_most_mass(target, position, rng_key, searching)

    tau, dtype = rule_temperature(target.temperature), position.dtype

    def one(carry: tuple) -> tuple:
        k, kept, best = carry
        key = random.fold_in(rng_key, k)
        other = random.uniform(random.fold_in(key, 3), position.shape, dtype)
        start = jnp.where(k == 0, position, WIDTH * (2 * other - 1))
        found = law_with_most_mass(target, start, key, True)
        loss = jnp.where(jnp.isfinite(found[0].loss), found[0].loss, jnp.inf)
        chance = random.uniform(random.fold_in(key, 4), (), dtype)
        rare = -jnp.log(-jnp.log(jnp.maximum(chance, jnp.finfo(dtype).tiny)))
        score = rare - loss / tau  # the largest one has the probability of its normal law
        better = (k == 0) | (score > best)
        first = jnp.where(k == 0, found[1], kept[1])
        law, _, typical = tree_where(better, found, kept)
        return k + 1, (law, first, typical), jnp.where(better, score, best)

    law = first_iterate(position, LawFacts(jnp.zeros((), dtype), jnp.zeros((), dtype)))
    none = jnp.full((), -jnp.inf, dtype)
    start = jnp.zeros((), jnp.int32), (law, none, position), none
    # a loop of unknown length: programs with much work take longer to compile
    most = jnp.where(target.near, 1, number)
    return lax.while_loop(lambda carry: carry[0] < most, one, start)[1]


def _number_of_searches(target: Target, position: jax.Array, rng_key: jax.Array) -> int:
    """As many searches as take few operations; one if U is not known on all rows."""
    potential = target.potential
    if potential.on_all_rows is None or potential.on_host:
        return 1

    def operations(batch: Any) -> float:
        return work(jax.make_jaxpr(jax.grad(potential.energy))(position, batch).jaxpr)

    stream = jax.eval_shape(potential.init_stream, rng_key)
    step = operations(jax.eval_shape(potential.draw, rng_key, stream)[0])
    look = step
    if not potential.deterministic:
        look = operations(jax.eval_shape(potential.curvature_batch, rng_key))
    all_rows = MOST_NEWTON_STEPS * look * max(1.0, potential.num_data / CURVATURE_ROWS)
    one = USUAL_ROUNDS * (ROUND_STEPS * step + 2 * position.size * look) + all_rows
    return min(MOST_SEARCHES, 1 + int(SEARCH_OPERATIONS / one))


def find_arrow(
    target: Target,
    layout: Layout,
    position: jax.Array,
    rng_key: jax.Array,
    searching: bool,
    num_pairs: int = 1,
) -> tuple[Anchor, ArrowRoot]:
    """The centre and the root of the normal law that is nearest to a target with groups.

    The mode of a centred hierarchy can be far from its mass. The normal law N(m, tau L L') with the
    least Kullback-Leibler divergence to the target has the mean gradient 0, and its precision is
    the mean Hessian (Opper and Archambeau 2009, The variational Gaussian approximation revisited).
    Both means are taken over pairs of draws at opposite sides of m. After a search with Adam, whose
    energies are means over a wide law, each round of ``num_pairs`` pairs moves m by a share of
    Newton's step.

    Returns:
        An anchor of second order at m, and L.
    """
    potential, tau = target.potential, rule_temperature(target.temperature)
    size, dtype = position.size, position.dtype
    if searching:
        wide = SEARCH_WIDTH * random.normal(random.fold_in(rng_key, 1), (size,), dtype)
        sides = jnp.array([1.0, -1.0], dtype)

        def smooth(x: jax.Array, rows: Any) -> jax.Array:
            return jnp.mean(jax.vmap(lambda s: potential.energy(x + s * wide, rows))(sides))

        smoothed = potential._replace(energy=smooth)
        found = search(smoothed, position, rng_key, target.temperature, target.near)
        position = jnp.where(target.is_usable(found), found, position)

    fewest, most = (15, 100) if searching else (1, 1)

    def between(share: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return (1 - share) * x + share * y if jnp.issubdtype(x.dtype, jnp.floating) else y

    def one_round(carry: tuple) -> tuple:
        # the closing round does not move
        k, closing, _, moves, longest, (centre, mean, root, width, _), (back, level) = carry
        width = jnp.where(closing, 0, width)
        noise = random.normal(random.fold_in(rng_key, 2 + k), (num_pairs, size), dtype)
        away = width * tau**0.5 * jax.vmap(root.times)(noise)

        def look(offset: jax.Array) -> tuple:
            return derivatives_at(potential, centre + offset, layout, root)

        both = lax.map(look, jnp.concatenate([away, -away]))
        seen = jax.tree.map(lambda x: jnp.mean(x, axis=0).astype(x.dtype), both)
        energy, gradient, hessian, _ = seen
        share = jnp.maximum(LEAST_SHARE, 1 / (k + 1.0)).astype(dtype)
        hessian = jax.tree.map(partial(between, share), mean, hessian)
        new = root_of(hessian)
        step = jnp.clip(new.transposed_times(gradient), -longest, longest)
        last = layout.parts(step)[0]
        moves = between(jnp.asarray(LEAST_SHARE, dtype), moves, last)
        onward = jnp.where(moves * last > 0, jnp.minimum(jnp.abs(moves), jnp.abs(last)), 0)
        ahead = centre - STEP * new.times(step) if searching else centre
        good = all_finite((ahead, new)) & target.is_usable(ahead)
        risen = ~(good & (energy <= level + tau * size))
        far = jnp.any(onward >= MOVES_ON * shortest) | risen
        longest = jnp.where(jnp.any(onward >= MOVES_ON * longest), 4 * longest, longest)
        longest = jnp.where(far & ~risen, longest, shortest)
        fallen = (ahead, hessian, new), (centre, energy.astype(dtype))
        halfway = ((back + centre) / 2, mean, root), (back, level)
        kept, below = tree_where(risen, halfway, fallen)
        kept = tree_where(closing, (centre, mean, root), kept)
        width = jnp.where(risen, width / 2, jnp.minimum(jnp.where(k == 0, 1, 2 * width), 1))
        k += 1
        near = (k >= fewest) & (~far | (k >= most))
        return k, near, closing, moves, longest, (*kept, width, seen), below

    parents = find_parents(potential, position, layout)
    none, zero = no_arrowhead(layout, dtype, parents), jnp.zeros((), dtype)
    width = jnp.asarray(SEARCH_WIDTH if searching else 0, dtype)
    start = position, none, unit_root(layout, dtype, parents), width, (zero, position, none, zero)
    none_yet = jnp.asarray(False)
    shortest = jnp.asarray(tau**0.5, dtype)
    still = layout.parts(zero * position)[0]
    infinite = jnp.full((), jnp.inf, dtype)
    begun = jnp.int32(0), none_yet, none_yet, still, shortest, start, (position, infinite)
    *_, found, _ = lax.while_loop(lambda carry: ~carry[2], one_round, begun)
    centre, _, root, _, seen = found
    energy, gradient, hessian, misfit = seen
    return Anchor(centre, energy, gradient, Curvature(hessian, misfit)), root


def find_low_rank(
    target: Target, position: jax.Array, control: Any, rng_key: jax.Array, searching: bool
) -> tuple[jax.Array, Scale]:
    """The middle and the coordinates of a normal law in many dimensions.

    Adam's steps are equal in all coordinates, and end far from the mass if parameters are
    correlated. So Newton's steps follow, by conjugate gradients: the Hessian is known by
    `low_rank_root`, and the gradient on all rows. They lower U - tau log |det L|.
    """
    potential, tau = target.potential, rule_temperature(target.temperature)
    exact = potential.on_all_rows is not None
    if searching:
        position, _ = _with_anchors(target, position, control, rng_key, True)

    def evaluate(x: jax.Array) -> Iterate:
        if potential.on_all_rows is not None:
            _, energy, gradient, _ = anchor_at(potential, x)
        else:
            batch = potential.curvature_batch(rng_key)
            energy, gradient = jax.value_and_grad(potential.energy)(x, batch)
        root, known = low_rank_root(potential, x, gradient, rng_key)
        loss = jnp.where(target.is_usable(x), energy - tau * root.log_det(), jnp.inf)
        return Iterate(x, energy, gradient, root, (), loss, known)

    rank = min(LOW_RANK_PRODUCTS, position.size)
    ones = jnp.ones_like(position)
    unit = LowRankRoot(ones, jnp.zeros((rank, position.size), ones.dtype), ones[:rank], ones)
    infinite, none = jnp.full((), jnp.inf, ones.dtype), jnp.zeros(rank, bool)
    place, _ = newton(
        evaluate,
        position,
        most_steps=MOST_NEWTON_STEPS if searching and exact else 1,
        enough=NEAR * tau,
        first=Iterate(position, infinite, 0 * ones, unit, (), infinite, none),
    )
    root: LowRankRoot = place.root
    root = replace(root, factors=jnp.where(place.extra, root.factors, 1))
    share = share_in_trust_region(potential, place.position, root, target.temperature, rng_key)
    return place.position, scale_about(place.position, root.then(share * ones))


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
    for higher in range(1, len(gains)):
        if gains[higher].max() < LEAST_GAIN * gains[:higher].max():
            gains[higher] = 0.0
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
    orders = [[*(cost * drawn), np.inf] for cost in GRADIENTS[1 : 1 + _highest(state)]]
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

    def noise_at(order: jax.Array) -> jax.Array:
        corrected = target.potential
        if state.control:
            corrected = with_control_variate(corrected, state.control.anchor, order)
        seen = scaled.in_chain(corrected)
        if algorithm.trajectory:
            return total_noise(seen, typical, state.rng_key)
        return largest_noise(
            seen, typical, state.rng_key, settings.layout, plain, target.temperature
        )

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

    noise = lax.map(noise_at, jnp.arange(1 + _highest(state)))
    return *jax.vmap(jax.vmap(speed))(noise[:, None] * shares), noise


# Newton's method with the absolute eigenvalues of the Hessian


SHRINKAGE = 1 / 4
"""Factor on the length of the next step after a step that lowered nothing."""
LEAST_LENGTH = SHRINKAGE**8
"""Shortest step, as a share of Newton's step."""


class Iterate(NamedTuple):
    """A position, and the normal law that the energy's curvature there suggests.

    Attributes:
        position: shape (D,).
        energy: U in nats.
        gradient: of U, shape (D,).
        root: L with L L' = |H|^-1, shape (D, D), or an object with products and ``T``.
        inverse: L^-1; empty with such an object.
        loss: what the steps lower, in nats: U, or minus the log mass of the normal law. Infinite
            at a position that must not be taken.
        extra: what else is known about the position.
    """

    position: jax.Array
    energy: jax.Array
    gradient: jax.Array
    root: Any
    inverse: Any
    loss: jax.Array
    extra: Any = ()

    def promise(self) -> jax.Array:
        """By how much U falls in Newton's step, if it is quadratic."""
        slope = times(self.root.T, self.gradient)
        return jnp.vdot(slope, slope) / 2

    def ahead(self, length: jax.Array) -> jax.Array:
        """The position after a share of Newton's step."""
        return self.position - length * times(self.root, times(self.root.T, self.gradient))


def first_iterate(start: jax.Array, extra: Any = ()) -> Iterate:
    """A place of which nothing is known but its position."""
    infinite, unit = jnp.full((), jnp.inf, start.dtype), jnp.eye(start.size, dtype=start.dtype)
    return Iterate(start, infinite, jnp.zeros_like(start), unit, unit, infinite, extra)


def newton(
    evaluate: Callable[[jax.Array], Iterate],
    start: jax.Array,
    *,
    most_steps: int,
    enough: float | jax.Array,
    first: Iterate | None = None,
) -> tuple[Iterate, jax.Array]:
    """Steps theta - h L L' grad U from ``start``, where h is 1, or a quarter after each failure.

    A step with a finite gradient that lowers the loss is taken. ``evaluate`` occurs once in the
    program.

    The search ends after ``most_steps`` evaluations, or if the next step promises a smaller fall of
    U than ``enough``, in nats. ``first`` is the iterate before the first evaluation, by default
    `first_iterate`, with L = I.

    Returns:
        The last position taken, and the number of evaluations. If nothing is finite, the start with
        L = I and an infinite loss.
    """

    def proceed(carry: tuple) -> jax.Array:
        place, length, steps = carry
        far = ~(place.promise() <= enough)
        return (steps == 0) | (far & (length >= LEAST_LENGTH) & (steps < most_steps))

    def step(carry: tuple) -> tuple:
        place, length, steps = carry
        new = evaluate(place.ahead(length))
        taken = new.loss < place.loss
        taken = taken & jnp.all(jnp.isfinite(new.gradient))
        length = jnp.where(taken, jnp.ones_like(length), SHRINKAGE * length)
        return tree_where(taken, new, place), length, steps + 1

    first = first_iterate(start) if first is None else first
    carry = first, jnp.ones((), start.dtype), jnp.zeros((), jnp.int32)
    place, _, steps = lax.while_loop(proceed, step, carry)
    return place, steps
