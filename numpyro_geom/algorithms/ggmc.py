"""Generalised Hamiltonian Monte Carlo with minibatch gradients and an exact acceptance test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro.infer import init_to_uniform
from numpyro.infer.hmc_util import dual_averaging

from .. import _random
from .._checks import check_int, check_model, check_number
from .._util import lazy_cond, tree_axpy, tree_size, tree_vdot, tree_where
from ..kernel import PyTree, SGKernel
from ..metrics.base import MetricLike
from ..model.potential import Potential, takes_rng_key
from ..sampling.algorithm import (
    GRADIENT_COST,
    NEWTON,
    Algorithm,
    Draw,
    Motion,
    metric_learner,
    num_steps_from,
    settling_steps,
)
from ..sampling.loop import loop_over_batches
from ..sampling.schedules import check_always_noisy
from ..sampling.settings import Settings, auto_or, optional
from ..sampling.state import Adaptation, SGState, Target, virial
from ..warmup.adapt import what_is_due
from .momentum import (
    Momentum,
    init_momentum,
    kinetic_temperature,
    least_damping,
    num_steps,
    relaxation_rate,
)

MINIBATCH_DRAW_LENGTH = 3.0
"""Relaxation times per trajectory, if the energy on all rows costs more than the gradients."""
TARGETS = (0.8, 0.95)
"""Acceptance that ``"auto"`` aims at, the second if gradients have hardly any noise. Then shorter
steps cost little, and trajectories that start in a curved tail are accepted, too."""
HOPELESS = 1000.0
"""An energy error (over tau) beyond which a trajectory counts as divergent."""

_averaging_init, _averaging_update = dual_averaging()


class GGMCState(NamedTuple):
    """State of the acceptance test and its step size between draws.

    Attributes:
        energy: energy on all rows at the position that was kept, minus ``level``, in nats.
        level: energy at the anchor; 0 without one. Each chunk of rows has its share subtracted
            before chunks are added, so that a sum over many rows keeps its last digits.
        known: whether ``energy`` is valid: False at the start and after `refresh`.
        scale: step size that curvature suggests, from which dual averaging starts.
        averaging: state of the dual averaging of log(step_size / scale).
    """

    energy: jax.Array
    level: jax.Array
    known: jax.Array
    scale: jax.Array
    averaging: PyTree


class GGMC(SGKernel):
    """Hamiltonian dynamics with friction, minibatch gradients and an exact Metropolis test.

    A draw is one trajectory of L = ``num_steps`` steps from theta and p. The k-th position of the
    trajectory uses minibatch k. With r = M^{1/2} p, A = M^-1, c = exp(-gamma h / 2) and n standard
    normal::

        p <- c p + sqrt((1 - c^2) tau) n            O
        p <- p - (h / 2) A^{1/2} grad Uhat_k        B
        theta <- theta + h A^{1/2} p                A
        p <- p - (h / 2) A^{1/2} grad Uhat_k+1      B
        p <- c p + sqrt((1 - c^2) tau) n            O

        log alpha = -[U(theta_L) - U(theta_0) + sum over steps of (K after the second B
                      - K before the first)] / tau,    K = p . p / 2

    where U is the energy on all rows. On rejection theta_0 is restored and the momentum negated.

    Invariant distribution: exp(-U / tau) exactly, at any step size, friction and batch size. The
    minibatches of a trajectory are drawn independently, so a sequence of them is as likely as its
    reverse. Therefore the acceptance test corrects noise as well as discretisation.

    A run of finite length can still have too little of a narrow part, see the page on momentum.

    Choose `GGMC` where no bias is acceptable. Minibatch noise lowers the acceptance rate: the error
    of a trajectory grows like h^2 L tr(A C) / tau. So with plain minibatches many dimensions need
    tiny steps. A control variate of second order leaves nearly no noise. Cost per draw: L + 1
    minibatch gradients and one energy on all rows, computed in chunks of bounded memory.

    Args:
        full_potential_fn: the energy ``f(z)`` that a stochastic ``potential_fn`` estimates.
        num_data: N of a stochastic ``potential_fn``, for the metric's units.
        friction: gamma in units of 1 / h, or ``"auto"``: half of the critical friction of the
            slowest direction.
        step_size: ``"auto"`` (dual averaging in warm-up), a number h, or a schedule, whose value
            at the start of a trajectory holds for the whole trajectory.
        target_accept: mean acceptance probability that ``step_size="auto"`` aims at. ``"auto"`` is
            0.95 on all rows and with a control variate of second order, and else 0.8.
        batch_size: rows per gradient: an int, a dict plate -> int, or None for all rows. ``"auto"``
            takes all rows up to 2,048, where a choice costs more than it gains, and where the noise
            is not measured: with a ``step_size``, without warm-up, with a metric that is a scale,
            or with ``dense_mass=None``. Otherwise it takes the most promising number, see
            `numpyro_geom.warmup.start.choose`. Under `jax.jit` it takes 256 rows.
        num_steps: L, or ``"auto"`` for one relaxation time. With minibatches ``"auto"`` means three
            relaxation times, but no more steps than cost about as much as the energy on all rows.
        temperature: tau, above 0.
        control_variate: whether to correct minibatch gradients by those at an anchor that warm-up
            finds, or the order of the correction. ``"auto"`` uses the order, 0, 1 or (up to 256
            parameters, or with groups) 2, that the measured noise favours.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range and combinations that would not be exact.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_geom import GGMC
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> y = 3 + jax.random.normal(jax.random.key(0), (1000,))
        >>> mcmc = MCMC(GGMC(model, batch_size=100), num_warmup=200, num_samples=200,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> bool(abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.05)
        True

    References:
        Garriga-Alonso, Fortuin, "Exact Langevin Dynamics with Stochastic Gradients", AABI 2021
        (the OBABO step and its acceptance test). Horowitz, "A generalized guided Monte Carlo
        algorithm", 1991 (the negated momentum, without which the law is wrong). Deviations:
        friction acts on M^{-1/2} r; the exact energy is cached for the position that is kept.
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        potential_fn: Callable | None = None,
        full_potential_fn: Callable | None = None,
        num_data: int | None = None,
        metric: MetricLike = "identity",
        friction: float | Literal["auto"] = "auto",
        step_size: float | Callable | Literal["auto"] = "auto",
        target_accept: float | Literal["auto"] = "auto",
        batch_size: int | Mapping[str, int] | Literal["auto"] | None = "auto",
        num_steps: int | Literal["auto"] = "auto",
        temperature: float = 1.0,
        control_variate: bool | int | Literal["auto"] = "auto",
        dense_mass: bool | Sequence | Literal["auto", "structured", "low_rank"] | None = "auto",
        inverse_mass_matrix: Any = None,
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        super().__init__(
            locals(),
            {
                "num_data": optional(check_int),
                "target_accept": auto_or(
                    partial(check_number, above=0, below=1), "a number below 1"
                ),
            },
        )
        _check(self.settings)

    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings."""
        return trajectory_algorithm(settings, settings.target_accept)


def trajectory_algorithm(
    settings: Settings, target_accept: float | str = "auto", motion: Motion = NEWTON
) -> Algorithm:
    """Trajectories with an acceptance test, for a momentum of any kind."""
    if isinstance(target_accept, str):
        noisy = settings.batch_size is not None or getattr(settings, "full_potential_fn", None)
        target_accept = TARGETS[not noisy or settings.control_variate == 2]
    return Algorithm(
        propose=lambda *args: _propose(settings, *args),
        draw=_trajectory(settings, target_accept, motion),
        init=lambda position, rng_key: _init(settings, position, rng_key, motion),
        forget=lambda x: x._replace(extra=x.extra._replace(known=jnp.zeros_like(x.extra.known))),
        rate=lambda slowest, dynamics: relaxation_rate(slowest, dynamics.friction),
        num_steps=_num_steps,
        observe=lambda adaptation, _: adaptation,
        adjusted=True,
        momentum=True,
        trajectory=True,
        target_accept=target_accept,
        settling_steps=settling_steps(settings.metric),
        measures=settings.given_friction is None,
        motion=motion,
    )


def _init(settings: Settings, position: PyTree, rng_key: jax.Array, motion: Motion) -> Momentum:
    """A momentum drawn from its law, and an energy that is not yet known."""
    dtype = jnp.result_type(*jax.tree.leaves(position))
    zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
    averaging = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.int32 if jnp.result_type(x).kind == "i" else dtype),
        _averaging_init(zero),
    )
    extra = GGMCState(zero, zero, jnp.zeros((), bool), one, averaging)
    return init_momentum(settings, position, rng_key, extra, motion)


def _propose(
    settings: Settings, adaptation: Adaptation, state: SGState, _: Potential
) -> tuple[jax.Array, jax.Array, PyTree]:
    """Step size from dual averaging, relative to a scale that late measurements do not change."""
    old: Momentum = state.dynamics
    extra: GGMCState = old.extra
    due = what_is_due(state.i, adaptation.num_warmup, True)
    tiny = jnp.finfo(extra.scale.dtype).tiny
    scale = jnp.maximum(adaptation.curvature, tiny) ** -0.5
    scale = jnp.where(due.measuring & due.learning, scale, extra.scale)
    latest, average = extra.averaging[0], extra.averaging[1]
    h = state.step_size
    if settings.schedule is None:
        h = scale * jnp.exp(jnp.where(due.closing, average, latest))
    given = settings.given_friction is not None
    friction = old.friction if given else least_damping(adaptation)
    rate = relaxation_rate(adaptation.slowest, friction)
    extra = extra._replace(scale=scale.astype(extra.scale.dtype))
    return h, rate, old._replace(friction=friction.astype(old.friction.dtype), extra=extra)


def _num_steps(rate: jax.Array, step_size: jax.Array, potential: Potential) -> jax.Array:
    """One relaxation time; with minibatches several, as cheap as the energy."""
    if potential.steps_per_epoch == 1:
        return num_steps(rate, step_size)
    steps = num_steps_from(rate, step_size, draw_length=MINIBATCH_DRAW_LENGTH)
    return jnp.minimum(steps, -(-potential.steps_per_epoch // GRADIENT_COST))


def _trajectory(settings: Settings, target_accept: float, motion: Motion) -> Draw:
    """A draw: one trajectory and its acceptance test."""
    metric = settings.metric
    learn = metric_learner(metric)

    def draw(
        rng_key: jax.Array,
        target: Target,
        state: SGState,
        moving: jax.Array | bool,
        learning: jax.Array,
    ) -> SGState:
        key_steps, key_accept = _random.split(rng_key)
        potential, given = target.potential, settings.given_num_steps
        metric_state = state.metric_state
        start, dynamics = state.chain.position, state.dynamics
        extra: GGMCState = dynamics.extra
        dtype, tau = state.potential_energy.dtype, settings.temperature
        noisy = target.seen(state.control)
        exact = target.in_chain(potential)
        h = state.step_size
        if settings.schedule is not None:
            h = jnp.asarray(settings.schedule(state.steps_taken), dtype)
        stride = jnp.where(moving, h, 0.0)
        last = jnp.asarray(state.num_steps if given is None else given)
        size = tree_size(start)

        zero = jnp.zeros((), dtype)
        level = state.control.anchor.energy.astype(dtype) if target.controlled else zero

        def above_level(_: jax.Array, position: PyTree) -> jax.Array:
            energy = exact.on_all_rows(  # type: ignore[misc]
                lambda rows: exact.energy(position, rows) - level
            )
            return energy.astype(dtype)

        def gradient(k: jax.Array, key_noise: jax.Array, batch: Any, carry: tuple) -> tuple:
            """Apply gradient k of L + 1: it ends one step and begins the next step."""
            position, momentum, learned, work, first = carry
            grad = jax.grad(noisy.energy)(position, batch)
            learned = learn(learned, grad, potential.num_data, learning)
            of_position = virial(position, state.centre, grad) / size
            figures = jnp.stack([tree_vdot(grad, grad), of_position]).astype(dtype)
            first = jnp.where(k == 0, figures, first)
            force = metric.apply_inverse_sqrt(metric_state, grad)
            ends, begins = k > 0, k < last
            momentum, gained = motion.kick(momentum, force, jnp.where(ends, stride / 2, 0.0), tau)
            # one O for the O at the end of a step and the O at the beginning of the next step
            duration = dynamics.friction * stride * jnp.where(ends & begins, 1.0, 0.5)
            normal = _random.tree_normal(key_noise, momentum)
            momentum = motion.refresh(momentum, normal, duration, tau)
            begun = jnp.where(begins, stride / 2, 0.0)
            momentum, more = motion.kick(momentum, force, begun, tau)
            work = work + (gained + more).astype(dtype)
            velocity = metric.apply_inverse_sqrt(metric_state, momentum)
            position = tree_axpy(jnp.where(begins, stride, 0.0), velocity, position)
            return position, momentum, learned, work, first

        carry = (
            start,
            dynamics.momentum,
            metric_state,
            zero,
            jnp.zeros(2, dtype),
        )
        stream, carry = loop_over_batches(
            potential, target.to_sites(start), key_steps, state.stream, last + 1, gradient, carry
        )
        position, momentum, learned, work, first = carry
        stale = ~extra.known | (level != extra.level)
        old_energy = lazy_cond(stale, above_level, extra.energy, start)
        new_energy = above_level(zero, position)
        error = (new_energy - old_energy + work) / tau
        if target.transforms is not None:
            error = jnp.where(target.is_usable(target.to_sites(position)), error, jnp.inf)
        error = jnp.where(jnp.isfinite(error), error, jnp.inf)  # no place has infinite density
        accept_prob = jnp.exp(-jnp.maximum(error, 0.0))
        accepted = random.uniform(key_accept, (), dtype) < accept_prob
        kept, momentum, energy = tree_where(
            accepted,
            (position, momentum, new_energy),
            (start, jax.tree.map(jnp.negative, dynamics.momentum), old_energy),
        )
        # a gradient that is not finite must not reach the metric
        finite = jnp.isfinite(error)
        adapting = moving & (state.i < state.adaptation.num_warmup)
        averaging = _averaging_update(target_accept - accept_prob, extra.averaging)
        averaging = jax.tree.map(lambda x, y: x.astype(y.dtype), averaging, extra.averaging)
        extra = extra._replace(
            energy=energy,
            level=level,
            known=jnp.ones_like(extra.known),
            averaging=tree_where(adapting, averaging, extra.averaging),
        )
        diverging = ~(error < HOPELESS)
        return state._replace(
            z=target.to_sites(kept),
            potential_energy=energy + level,
            grad_norm=jnp.sqrt(first[0]),
            configurational_temperature=first[1],
            kinetic_temperature=kinetic_temperature(momentum).astype(dtype),
            step_size=h,
            diverging=diverging,
            num_diverging=diverging.astype(jnp.int32),
            accept_prob=accept_prob,
            metric_state=tree_where(finite, learned, metric_state),
            dynamics=Momentum(momentum, dynamics.friction, extra),
            scaled=kept if jax.tree.leaves(state.scaled) else (),
            trusted=kept,
            stream=stream,
            steps_taken=state.steps_taken + last.astype(jnp.int32),
        )

    return draw


def _check(settings: Settings) -> None:
    """Raise for combinations that would not be exact."""
    if settings.temperature == 0:
        raise ValueError(
            "temperature must be above 0 with GGMC, got 0: there is nothing to test against. "
            "Use SGHMC(temperature=0) for a damped descent"
        )
    check_always_noisy(settings.step_size, "GGMC")
    full = settings.full_potential_fn
    given = {"full_potential_fn": full, "num_data": settings.num_data}
    if settings.potential_fn is None or not takes_rng_key(settings.potential_fn):
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} goes with a stochastic potential_fn(z, rng_key), and there is "
                    f"none: drop {name}"
                )
        return
    for name, value in given.items():
        if value is None:
            raise ValueError(
                f"a stochastic potential_fn needs {name}: pass the energy itself as "
                "full_potential_fn(z), and the number of observations as num_data"
            )
    check_model("full_potential_fn", full)
    if takes_rng_key(full):
        raise TypeError(
            "full_potential_fn must be the energy itself, f(z), and this one takes a key: "
            "pass the function that potential_fn estimates"
        )
