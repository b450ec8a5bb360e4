"""How long a run will take: said before hours are spent, and not after.

With a progress bar of one chain, NumPyro's loop returns to the host after each draw. The time of
the draws so far and the steps of the next one then tell how long the rest takes. Otherwise all
draws are one compiled program. The kernel's first measurement and the time of a few gradients tell
in advance how long it will take, if it can be long at all. Nothing here is in a compiled program of
the run, and no draw depends on a time.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro.util import is_prng_key

from ._numpyro import Plan
from ._util import PyTree, are_known
from ._warning import warn_outside
from .bound import Bound
from .model.jaxprs import UNKNOWN_TURNS, work
from .model.potential import Potential
from .model.programs import compiled
from .sampling.algorithm import GRADIENT_COST, MAX_NUM_STEPS, Algorithm, adapts
from .sampling.settings import ANY_DIRECTION
from .sampling.state import SGState
from .warmup.adapt import before_draw, what_is_due
from .warmup.start import GRADIENTS

SHOWN_FROM = 60.0
"""Seconds of a run from which the progress bar says how many are left."""
TOLD_FROM = 600.0
"""Seconds of a run from which a warning says why."""
UNLIKELY = 4.0
"""In scaled coordinates a draw rarely takes a tenth of `MAX_NUM_STEPS`, and measuring compiles for
seconds. So it is left out if so many steps would take less than this times `TOLD_FROM`."""
SETTLED = 10.0
"""Seconds of draws before a progress bar leads to a warning. The first draws of warm-up may be much
longer than the later ones."""
LEAST_STEP = 1e-5
"""Seconds of a step besides its gradient."""
SLOWEST = 4e9
"""Operations per second that any machine reaches. A run that is short at this rate is not timed."""
TIMED = 0.02
"""Seconds for which gradients are repeated to time one."""
MANY_STEPS = 50
"""Steps per draw from which a run is long because of its steps, and not because of a gradient."""


class Clock:
    """How long a run takes. It changes while the run goes on, and no draw depends on it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._last: float | None = None
        self._draws, self._steps, self._seconds, self._told = 0, 0, 0.0, False

    def left(self, bound: Bound, state: SGState) -> str:
        """How long the rest takes, in words for a progress bar; empty if less than a minute.

        Warns:
            UserWarning: once, if the rest takes more than ten minutes.
        """
        now, steps = time.perf_counter(), int(state.num_steps)
        if self._last is not None and self._draws:  # the first draw is compiled
            self._seconds += now - self._last
            self._steps += steps
        self._last = now
        self._draws = (self._draws + 1) % self.plan.draws
        if self._steps == 0:
            return ""
        step = self._seconds / self._steps
        rest = step * steps * (self.plan.draws * self.plan.repeats - self._draws)
        if self._seconds > SETTLED:
            self._tell(bound, state, step, rest)
        return f". about {duration(rest)} left" if rest > SHOWN_FROM else ""

    def foretell(self, bound: Bound, algorithm: Algorithm, state: SGState) -> None:
        """Warn before the first draw if a run without a progress bar takes more than ten minutes.

        Nothing is measured if the values are not known (within a transformation), if rows come from
        the host, or if the run is short at `SLOWEST` operations per second.

        Warns:
            UserWarning: with the expected duration, its reason, and what to do.
        """
        model, plan, settings = bound.model, self.plan, bound.settings
        potential = bound.potential()
        arguments = None if model is None else (model.args, model.kwargs)
        if plan.bar or self._told or potential.on_host or not are_known((state, arguments)):
            return
        single = is_prng_key(state.rng_key)
        one = state if single else jax.tree.map(lambda x: x[0], state)
        most = MAX_NUM_STEPS if settings.given_num_steps is None else settings.given_num_steps
        draws = plan.draws * plan.repeats
        chains, gradients = state.i.size, GRADIENTS[int(settings.control_variate)]
        # gradients of the longest steps, and those that cost as much as the energies on all rows
        longest = draws * most * gradients
        energies = draws * algorithm.trajectory * potential.steps_per_epoch / GRADIENT_COST
        program = jax.make_jaxpr(potential.gradient)(one.z, one.rng_key, one.stream)
        operations = work(program.jaxpr, UNKNOWN_TURNS)  # at most, about
        told_from = TOLD_FROM
        if settings.given_num_steps is None and settings.finds_scale:
            told_from *= UNLIKELY
        shortest = draws * most * LEAST_STEP + (longest + energies) * operations / SLOWEST
        if chains * shortest < told_from:
            return
        gradient = _seconds(potential, state)
        step = chains * LEAST_STEP + gradients * gradient
        if draws * most * step + energies * gradient < told_from:
            return
        if adapts(settings, algorithm) and plan.draws > 1:
            one = _measured(bound, algorithm, one)
        steps = draws * int(one.num_steps)
        self._tell(bound, one, step, steps * step + energies * gradient)

    def _tell(self, bound: Bound, state: SGState, step: float, seconds: float) -> None:
        if seconds > TOLD_FROM and not self._told:
            self._told = True
            warn_outside(in_words(bound, state, self.plan, step, seconds), UserWarning)


def _seconds(potential: Potential, state: SGState) -> float:
    """Seconds of a gradient of one chain, or of all chains together."""

    def repeated(state: SGState, count: jax.Array) -> PyTree:
        def step(k: jax.Array, carry: tuple) -> tuple:
            position, stream = carry
            batch, stream = potential.draw(random.fold_in(state.rng_key, k), stream)
            grad = jax.grad(potential.energy)(position, batch)
            # no compiler knows that this is the position
            return jax.tree.map(lambda x, g: x + (0 * g).astype(x.dtype), position, grad), stream

        return lax.fori_loop(0, count, step, (state.z, state.stream))[0]

    run = jax.jit(repeated if is_prng_key(state.rng_key) else jax.vmap(repeated, (0, None)))
    count, spent = 0, 0.0
    jax.block_until_ready(run(state, jnp.zeros((), jnp.int32)))
    while spent < TIMED:
        count = max(1, 4 * count)
        begin = time.perf_counter()
        jax.block_until_ready(run(state, jnp.asarray(count, jnp.int32)))
        spent = time.perf_counter() - begin
    return spent / count


def _measured(bound: Bound, algorithm: Algorithm, state: SGState) -> SGState:
    """The state before its second draw, after the first measurement."""
    target = bound.target()

    def first(state: SGState) -> tuple:
        state = state._replace(i=jnp.ones_like(state.i))
        due = what_is_due(state.i, state.adaptation.num_warmup, True)
        scaled, rng_key = target.scaled(state), state.rng_key
        now = before_draw(state, due, scaled, algorithm, bound.settings, rng_key)
        return now.num_steps, now.step_size, now.adaptation

    num_steps, step_size, adaptation = compiled(first, state)
    return state._replace(num_steps=num_steps, step_size=step_size, adaptation=adaptation)


def in_words(bound: Bound, state: SGState, plan: Plan, step: float, seconds: float) -> str:
    """The warning about a long run: how long it takes, why, and what to do."""
    settings, found = bound.settings, state.adaptation
    steps, step_size = (int(np.max(state.num_steps)), float(np.max(state.step_size)))
    each = f"{step:.2g} s" if step >= 0.1 else f"{1e3 * step:.2g} ms"
    chains = f" for each of {plan.repeats} chains in turn" if plan.repeats > 1 else ""
    text = (
        f"the run takes about {duration(seconds)}: {plan.draws:,} draws with warm-up{chains}, "
        f"{steps:,} steps per draw, {each} per step. "
    )
    num_data = 1 if bound.plan is None else bound.plan.num_data  # 1 if it is not known
    rows = f" on all {num_data:,} rows" if num_data > 1 else ""
    if bound.plan is not None and bound.plan.batch_sizes:
        rows = f" on {max(bound.plan.batch_sizes.values()):,} rows"
    if plan.draws * plan.repeats * steps * step < seconds / 2:
        return (
            f"{text}The energy on all rows, once per draw, is expensive. Use fewer draws, or SGHMC"
        )
    if steps < MANY_STEPS:
        batch = ", batch_size=... if the model has a plate of rows" if "all" in rows else ""
        return f"{text}A gradient{rows} is expensive. Use fewer draws{batch}, or a faster device"
    if settings.given_num_steps is not None:
        return f"{text}The number of steps was given: use num_steps='auto', or fewer draws"
    curvature, slowest, noise = (
        float(np.max(x)) for x in (found.curvature, found.slowest, found.noise)
    )
    slow = max(slowest, float(np.finfo(np.float32).tiny))
    relaxation = 1 / (slow * step_size)
    if settings.dense_mass is False:
        text += f"The scale is a diagonal: use {ANY_DIRECTION}. "
    text += f"The slowest direction relaxes in about {relaxation:,.0f} steps, because "
    if noise > curvature:
        more = "" if settings.control_variate else "control_variate=True or "
        return (
            f"{text}minibatch noise limits the step size (lam_C = {noise:.3g}, curvature "
            f"lam_H = {curvature:.3g}): use {more}a larger batch_size"
        )
    known = "in the scaled coordinates" if settings.finds_scale else "of the posterior"
    return (
        f"{text}curvatures {known} differ by a factor of {curvature / slow:.3g}: one step size "
        "does not fit them, as in a funnel, or between modes. Reparametrise the model (a "
        "non-centred hierarchy, for instance), standardise the inputs, or start from init_params "
        "in the bulk. With num_steps=... a draw takes fewer steps, and draws are more alike"
    )


def duration(seconds: float) -> str:
    """Seconds in the unit that people would use."""
    for size, unit in ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
