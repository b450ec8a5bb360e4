"""The normal law N(m, tau L L') that is nearest to a target: where a chain starts, and its scale.

The law with the least Kullback-Leibler divergence to the target has the mean gradient 0, and its
precision is the mean Hessian; both means are over its draws (Opper and Archambeau 2009, The
variational Gaussian approximation revisited). Its mean m is the control variate's anchor, L is the
scale, and a chain starts at one of its draws. The mode is another matter: towards zero scale, the
density of a centred hierarchical model grows without bound, far from the mass.

1. `search`: Adam, whose steps do not depend on the size of gradients. Those at NumPyro's starts can
   be many orders of magnitude larger than in the posterior.
2. `find_law`: Adam's steps are equal in all coordinates. If scales differ strongly, Adam ends many
   standard deviations off. So rounds follow that do not depend on scales.
3. `search_often`: a search can end in a mode without mass. So if it is cheap, it is repeated from
   other positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax, random

from .._linalg import MatrixRoot, log_abs_det
from .._util import PyTree, all_finite, key_word, scattered_floats, tree_where
from ..model.arrowhead import (
    Layout,
    derivatives_at,
    find_parents,
    no_arrowhead,
    root_of,
    unit_root,
)
from ..model.jaxprs import work
from ..model.model import CURVATURE_ROWS
from ..model.potential import Potential
from ..sampling.algorithm import rule_temperature
from ..sampling.state import Target
from .curvature import diagonal_curvature
from .scale import LOW_RANK_PRODUCTS, diagonal_root, low_rank_root

LEARNING_RATE = 0.05
"""Adam's first learning rate: about the largest step of an unconstrained coordinate."""
ROUND_STEPS = 25
"""Steps between two evaluations of the energy."""
MAX_ROUNDS = 60
"""Rounds of Adam at most, and of the law."""
LEAST_FALL = 0.2
"""A smaller fall of the energy per round, in units of the smaller of tau D and tau N, reduces the
learning rate."""
REDUCTION = 1 / 3
"""Factor on the learning rate after a round that did not lower the energy enough."""
MAX_REDUCTIONS = 5
MEMORY = 0.95
"""Adam's memory of squared gradients: short, so that large ones at a start are soon forgotten."""
HUGE = 1e6
"""Entries of a gradient over N above this grow only as a logarithm. Their squares would overflow,
and Adam would take long to forget them."""
SEARCH_WIDTH = 0.3
"""The largest sd of the law over which Adam's gradients are means. Starts have the sd 1.2."""
GROWTH = 20.0
"""A new estimate of a curvature counts as at most this many times the mean of the earlier ones."""

MOST_SEARCHES = 8
"""Number of searches of a chain, if they are cheap."""
SEARCH_OPERATIONS = 3e9
"""Operations that the searches after the first one may take together: about half a second."""
WIDTH = 2.0
"""Starts are uniform within this distance of 0 in the unconstrained space, as NumPyro's are."""

FEWEST = 10
"""Rounds after Adam's, at least."""
MOVES_ON = 0.5
"""Mean of a shared parameter's last steps, in sds, from which it moves on. Noise goes both ways."""
LEAST_SHARE = 0.3
"""Share of the newest Hessian in the mean Hessian, at least, while m moves; then means are of all
rounds. Newton's steps are shortened to twice this share."""


# 1. Adam


class _Search(NamedTuple):
    """State of the search between two rounds.

    Attributes:
        optimiser: Adam's moments.
        stream: position in the stream of rows.
        curvature: mean of the last estimates of the Hessian's diagonal.
        num_rounds: rounds so far.
        num_reductions: number of reductions of the learning rate.
    """

    optimiser: PyTree
    stream: Any
    curvature: jax.Array
    num_rounds: jax.Array
    num_reductions: jax.Array

    @property
    def unfinished(self) -> jax.Array:
        return (self.num_rounds < MAX_ROUNDS) & (self.num_reductions < MAX_REDUCTIONS)


def search(
    potential: Potential,
    position: jax.Array,
    rng_key: jax.Array,
    temperature: float,
    near: jax.Array | bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Minimise a mean of U with Adam from ``position``, until it falls no more than noise would.

    The mean is over a law of independent parameters about the position. The law's sds follow from
    differences of gradients at opposite sides. A round whose fall is below a share of
    ``temperature * D``, the spread of U in the target, reduces the learning rate; one that raises
    the energy is undone. Five reductions end the search, near the typical set and not the mode.
    Where the energy is not finite, it starts again elsewhere. If the search is ``near`` already,
    the result is ``position`` itself.

    Returns:
        The position, and the law's sds, shape (D,).
    """
    size, num_data, tau = position.size, potential.num_data, max(temperature, 1e-2)
    if num_data > 1:  # otherwise N is not known
        size = min(size, num_data)  # rows determine at most as many directions as rows
    enough, adam = LEAST_FALL * tau * size, optax.scale_by_adam(b2=MEMORY)

    def width(curvature: jax.Array) -> jax.Array:
        return jnp.minimum(SEARCH_WIDTH, jnp.sqrt(tau / jnp.abs(curvature)))

    def around(position: jax.Array, now: _Search, word: jax.Array) -> tuple:
        """Positions over which a mean is taken, and their distance from ``position``."""
        signs = jnp.sign(scattered_floats(word, position.size, position.dtype))
        away = signs * width(now.curvature)
        return jnp.stack([position + away, position - away]), away

    def step(rate: jax.Array, key_steps: jax.Array, k: jax.Array, carry: tuple) -> tuple:
        current, now = carry
        key_step = random.fold_in(key_steps, k)
        batch, stream = potential.draw(key_step, now.stream)
        places, away = around(current, now, key_word(key_step))
        slopes = lax.map(lambda x: jax.grad(potential.energy)(x, batch), places)
        most = GROWTH * jnp.abs(now.curvature)
        seen = jnp.clip((slopes[0] - slopes[1]) / (2 * away), -most, most)
        seen = MEMORY * now.curvature + (1 - MEMORY) * seen
        curvature = jnp.where(jnp.isfinite(seen), seen, 4 * now.curvature)
        grad = jnp.mean(slopes, axis=0) / potential.num_data
        grad = jnp.where(all_finite(grad), grad, 0)
        much = jnp.maximum(jnp.max(jnp.abs(grad)) / HUGE, 1.0)
        grad = (grad / much * (1 + jnp.log(much))).astype(grad.dtype)
        direction, optimiser = adam.update(grad, now.optimiser)
        current = (current - rate * direction).astype(current.dtype)
        return current, now._replace(optimiser=optimiser, stream=stream, curvature=curvature)

    def one_round(carry: tuple) -> tuple:
        position, now = carry
        key_steps, key_rows = random.split(random.fold_in(rng_key, 1 + now.num_rounds))
        rate = LEARNING_RATE * REDUCTION ** now.num_reductions.astype(jnp.float32)
        turn = partial(step, rate, key_steps)
        new, now = lax.fori_loop(0, ROUND_STEPS, turn, (position, now))
        rows = potential.curvature_batch(key_rows)  # both on the same rows, so the noise cancels
        both = jnp.concatenate([around(x, now, key_word(key_rows))[0] for x in (position, new)])
        energies = lax.map(lambda x: potential.energy(x, rows), both)
        before, after = jnp.mean(energies.reshape(2, -1), axis=1)
        fall = before - after
        position = jnp.where(fall > 0, new, position)
        there = jnp.where(fall > 0, after, before)
        # another start as NumPyro's if the energy is not finite
        other = random.uniform(random.fold_in(key_rows, 1), position.shape, position.dtype)
        position = jnp.where(jnp.isfinite(there), position, WIDTH * (2 * other - 1))
        finite = jnp.isfinite(fall)  # otherwise Adam's moments may be not finite either
        fresh = adam.init(position), jnp.full_like(position, first)
        optimiser, curvature = tree_where(finite, (now.optimiser, now.curvature), fresh)
        return position, now._replace(
            optimiser=optimiser,
            curvature=curvature,
            num_rounds=now.num_rounds + 1,
            num_reductions=now.num_reductions + ~(fall > enough),
        )

    first = tau / SEARCH_WIDTH**2
    zero, stream = jnp.zeros((), jnp.int32), potential.init_stream(random.fold_in(rng_key, 0))
    done = zero + MAX_REDUCTIONS * jnp.asarray(near)
    now = _Search(adam.init(position), stream, jnp.full_like(position, first), zero, done)
    position, now = lax.while_loop(lambda x: x[1].unfinished, one_round, (position, now))
    return position, width(now.curvature)


# 2. The nearest normal law


class Law(NamedTuple):
    """N(m, tau L L').

    Attributes:
        centre: m, shape (D,).
        root: L, an `ArrowRoot` or a `LowRankRoot`.
        draw: a draw of about this law, shape (D,).
        energy: mean of U over such draws, in nats.
    """

    centre: jax.Array
    root: Any
    draw: jax.Array
    energy: jax.Array


class _Rounds(NamedTuple):
    """State of the rounds.

    Attributes:
        number: of rounds so far.
        finished: whether it was the last one.
        centre: m.
        mean: the mean Hessian; with a layout also the variances of its diagonal by chance.
        root: L.
        width: share of L for the next draws; at first 0 where L is not known yet.
        share: of the next Hessian in the mean Hessian.
        moves: mean of the last steps, in units of L.
        back: the last centre where the energy had not risen.
        level: the mean energy of the draws there.
        draw: one of these draws.
    """

    number: jax.Array
    finished: jax.Array
    centre: jax.Array
    mean: Any
    root: Any
    width: jax.Array
    share: jax.Array
    moves: jax.Array
    back: jax.Array
    level: jax.Array
    draw: jax.Array


def find_law(
    target: Target,
    layout: Layout | None,
    position: jax.Array,
    rng_key: jax.Array,
    searching: bool,
    num_pairs: int = 1,
    low_rank: bool = True,
) -> Law:
    """The normal law that is nearest to a target.

    After a search with Adam, each round of ``num_pairs`` pairs of draws moves m by a share of
    Newton's step. The kind of L follows from the ``layout``: groups, one matrix if there are none,
    or for None a diagonal, or a ``low_rank`` besides. The draws of a round are all at the usual
    distance from m, which leaves least to chance.
    """
    potential, tau = target.potential, rule_temperature(target.temperature)
    size, dtype = position.size, position.dtype
    moving = searching and potential.on_all_rows is not None
    width = jnp.ones_like(position)
    if searching:
        found, width = search(potential, position, rng_key, target.temperature, target.near)
        position = jnp.where(target.is_usable(found), found, position)
    look, mean, root = _kind(potential, layout, position, width, low_rank)
    fewest, most = (FEWEST, MAX_ROUNDS) if searching else (1, 1)
    usual, near = jnp.asarray(tau**0.5, dtype), jnp.asarray(target.near)

    def one_round(now: _Rounds) -> _Rounds:
        key = random.fold_in(rng_key, 2 + now.number)
        noise = random.normal(key, (num_pairs, size), dtype)
        noise *= size**0.5 / jnp.linalg.norm(noise, axis=1, keepdims=True)
        away = now.width * tau**0.5 * jax.vmap(now.root.times)(noise)
        places = now.centre + jnp.concatenate([away, -away])
        energy, gradient, mean, root, mover = look(places, now.root, (now.mean, now.share), key)
        longest = jnp.maximum(usual, 4 * jnp.abs(now.moves))  # longer where it moves on
        step = jnp.clip(mover.transposed_times(gradient), -longest, longest)
        moves = _between(jnp.asarray(LEAST_SHARE, dtype), now.moves, step)
        onward = jnp.where(moves * step > 0, jnp.minimum(jnp.abs(moves), jnp.abs(step)), 0)
        shared = onward if layout is None else layout.parts(onward)[0]
        centre = now.centre
        if moving:  # not before L is known
            share = 2 * (now.width > 0) * jnp.minimum(now.share, LEAST_SHARE)
            centre = centre - share * mover.times(step)
        good = all_finite((centre, root)) & target.is_usable(centre)
        risen = ~(good & (energy <= now.level + tau * size))
        far = jnp.any(shared >= MOVES_ON * usual) | risen
        begins = now.number == 0  # L was not known yet
        wider = jnp.where(now.width > 0, jnp.minimum(2 * now.width, 1), 1)
        fallen = now._replace(
            centre=centre,
            mean=mean,
            root=root,
            moves=moves,
            back=now.centre,
            level=energy.astype(dtype),
            draw=now.centre + away[0],
        )
        number, share = now.number + 1, now.share / jnp.where(begins, 1, 1 + now.share)
        level = jnp.where(begins & jnp.isfinite(energy), energy, now.level).astype(dtype)
        undone = now._replace(centre=(now.back + now.centre) / 2, level=level)
        return tree_where(risen, undone, fallen)._replace(
            number=number,
            finished=(number >= fewest) & (~far | (number >= most)),
            width=jnp.where(risen & (now.width > 0), now.width / 2, wider),
            share=jnp.where(far, jnp.maximum(share, LEAST_SHARE), share),
        )

    zero, law = jnp.zeros((), dtype), (position, mean, root)
    others = zero + (searching & ~near), zero + 1, 0 * position, position, zero + jnp.inf, position
    begun = _Rounds(jnp.int32(0), jnp.asarray(False), *law, *others)
    end = lax.while_loop(lambda now: ~now.finished, one_round, begun)
    return Law(end.centre, end.root, end.draw, end.level)


def _mean_over(fn: Callable, places: jax.Array) -> Any:
    """The mean of a function's results, one by one: jaxlib 0.10.2 can sum a batch wrongly."""
    found = lax.map(fn, places)
    return jax.tree.map(lambda x: jnp.mean(x, axis=0).astype(x.dtype), found)


def _on_all_rows(potential: Potential, places: jax.Array, rng_key: jax.Array) -> tuple:
    """The means of U and of its gradient; on some rows if all are not known."""

    def on_rows(rows: Any) -> tuple:
        return _mean_over(lambda x: jax.value_and_grad(potential.energy)(x, rows), places)

    if potential.on_all_rows is not None:
        return potential.on_all_rows(on_rows)
    return on_rows(potential.curvature_batch(rng_key))


def _between(share: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return (1 - share) * x + share * y if jnp.issubdtype(x.dtype, jnp.floating) else y


def _kind(
    potential: Potential,
    layout: Layout | None,
    position: jax.Array,
    width: jax.Array,
    low_rank: bool = True,
) -> tuple[Callable, Any, Any]:
    """What a round computes for a kind of L; mean Hessian and L before any round.

    A round gives energy, gradient, mean Hessian, L, and the map of Newton's steps.
    """
    groups: Any = layout
    some = layout is not None and not layout.num_groups and not potential.deterministic

    def of_rank(places: jax.Array, root: Any, before: tuple, rng_key: jax.Array) -> tuple:
        energy, gradient = _on_all_rows(potential, places, rng_key)
        mean, share = before
        centre = jnp.mean(places, axis=0)

        def around(x: jax.Array, rows: Any) -> jax.Array:
            return jnp.mean(jnp.stack([potential.energy(x + y - centre, rows) for y in places]))

        middle = potential._replace(energy=around)
        root = mover = diagonal_root(mean**-0.5)
        if low_rank:
            mover, known = low_rank_root(middle, centre, root.outer, gradient, rng_key)
            root = replace(mover, factors=jnp.where(known, mover.factors, 1))
        found = diagonal_curvature(middle, centre, rng_key, mean, mover)
        return energy, gradient, _between(share, mean, found), root, mover

    def of_arrow(places: jax.Array, root: Any, before: tuple, rng_key: jax.Array) -> tuple:
        asked = potential
        if some:
            rows = potential.curvature_batch(rng_key)
            asked = potential._replace(on_all_rows=lambda fn: fn(rows))
        energy, gradient, hessian, _ = _mean_over(
            lambda x: derivatives_at(asked, x, groups, root), places
        )
        if some:
            energy, gradient = _on_all_rows(potential, places, rng_key)
        (mean, noise), share = before
        # of groups a curvature below its noise counts as that noise: by chance it may be 0
        shared, *away = groups.parts(jnp.where(share < 1, hessian.diagonal() - mean.diagonal(), 0))
        away = groups.whole([0 * shared, *away])
        noise = (1 - share) ** 2 * noise + (share * away) ** 2
        mean = jax.tree.map(partial(_between, share), mean, hessian)
        known = mean.diagonal()
        root = root_of(mean.with_diagonal(jnp.copysign(jnp.sqrt(known**2 + noise), known)))
        return energy, gradient, (mean, noise), root, root

    if layout is None:
        rank = min(LOW_RANK_PRODUCTS, position.size) if low_rank else 0
        return of_rank, width**-2, diagonal_root(width, rank)
    parents = find_parents(potential, position, layout)
    unit, shared = unit_root(layout, width.dtype, parents), layout.parts(width)[0]
    root = unit.then(MatrixRoot(jnp.diag(shared), jnp.diag(1 / shared)), width)
    return of_arrow, (no_arrowhead(layout, width.dtype, parents), 0 * width), root


# 3. The law with the most mass


def search_often(
    target: Target, layout: Layout, position: jax.Array, rng_key: jax.Array, number: int
) -> Law:
    """`find_law` from several positions, and the choice of one end, in one loop.

    An end is chosen with about the probability of its mode, exp(-E U / tau) |det L|: the bound on
    the evidence of its normal law. So chains start in different modes if these have about the same
    mass. The first search starts at ``position``.
    """
    tau, dtype = rule_temperature(target.temperature), position.dtype

    def one(carry: tuple) -> tuple:
        k, kept, best = carry
        key = random.fold_in(rng_key, k)
        other = random.uniform(random.fold_in(key, 3), position.shape, dtype)
        start = jnp.where(k == 0, position, WIDTH * (2 * other - 1))
        found = find_law(target, layout, start, key, True)
        mass = log_abs_det(found.root.corner.matrix) - found.energy / tau
        chance = random.uniform(random.fold_in(key, 4), (), dtype)
        rare = -jnp.log(-jnp.log(jnp.maximum(chance, jnp.finfo(dtype).tiny)))
        # the largest one has the probability of its mode
        score = rare + jnp.where(jnp.isfinite(mass), mass, -jnp.inf)
        better = (k == 0) | (score > best)
        return k + 1, tree_where(better, found, kept), jnp.where(better, score, best)

    *_, root = _kind(target.potential, layout, position, jnp.ones_like(position))
    none = Law(position, root, position, jnp.zeros((), dtype))
    start = jnp.zeros((), jnp.int32), none, jnp.full((), -jnp.inf, dtype)
    # a loop of unknown length: programs with much work take longer to compile
    most = jnp.where(target.near, 1, number)
    return lax.while_loop(lambda carry: carry[0] < most, one, start)[1]


def number_of_searches(target: Target, position: jax.Array, rng_key: jax.Array) -> int:
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
    all_rows = look * max(1.0, potential.num_data / CURVATURE_ROWS)
    one = 2 * (MAX_ROUNDS * ROUND_STEPS * step + FEWEST * (2 * position.size * look + all_rows))
    return min(MOST_SEARCHES, 1 + int(SEARCH_OPERATIONS / one))
