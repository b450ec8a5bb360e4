"""Generalised Hamiltonian Monte Carlo with minibatch gradients and an exact acceptance test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro.infer import init_to_uniform
from numpyro.infer.hmc_util import dual_averaging

from .._checks import check_int
from .._start import check_always_noisy
from .._util import lazy_cond, tree_axpy, tree_normal, tree_vdot, tree_where
from ..algorithm import Algorithm, Draw, Facts, Rule, metric_learner
from ..kernel import PyTree, SGKernel
from ..rows.loop import loop_over_batches
from ..settings import Settings
from ..state import SGState, is_by_site, virials
from ..target.expansion import Expansion
from ..target.potential import Potential, takes_rng_key
from ..target.target import Target
from ..warmup.step_size import MAX_NUM_STEPS, Adaptation
from ..warmup.timetable import settling_steps, what_is_due
from .momentum import (
    Momentum,
    friction_scale,
    given_friction,
    init_momentum,
    kinetic_temperature,
    num_steps,
    relaxation_rate,
)

GRADIENT_COST = 3
"""Cost of a gradient in evaluations of the energy: under ``num_steps="auto"`` a trajectory's
minibatch gradients cost about as much as its one energy on all rows."""
HOPELESS = 1000.0
"""An energy error (over tau) beyond which a trajectory counts as divergent."""

_averaging_init, _averaging_update = dual_averaging()


class GGMCState(NamedTuple):
    """What the acceptance test and its step size need from draw to draw.

    Attributes:
        energy: energy on all rows at the position that was kept, in nats.
        known: whether ``energy`` is that; not at the start and after `refresh`.
        scale: step size that curvature suggests, from which dual averaging starts.
        averaging: state of the dual averaging of log(step_size / scale).
    """

    energy: jax.Array
    known: jax.Array
    scale: jax.Array
    averaging: PyTree


class GGMC(SGKernel):
    """Hamiltonian dynamics with friction and minibatch gradients, Metropolis-corrected: exact.

    A draw is one trajectory of L = ``num_steps`` steps from theta and p (r = M^{1/2} p, A = M^-1,
    c = exp(-gamma h / 2), n standard normal), with minibatch k at its k-th position::

        p <- c p + sqrt((1 - c^2) tau) n            O
        p <- p - (h / 2) A^{1/2} grad Uhat_k        B
        theta <- theta + h A^{1/2} p                A
        p <- p - (h / 2) A^{1/2} grad Uhat_k+1      B
        p <- c p + sqrt((1 - c^2) tau) n            O

        log alpha = -[U(theta_L) - U(theta_0) + sum over steps of (K after the second B
                      - K before the first)] / tau,    K = p . p / 2

    with U on all rows. On rejection theta_0 is restored and the momentum negated.

    Invariant distribution: exp(-U / tau) exactly, at any step size, friction and batch size. The
    minibatches of a trajectory are drawn independently, so that their sequence is as likely as its
    reverse, and noise as well as discretisation end up in the acceptance test.

    Choose it where a bias is not acceptable and a gradient on all rows at every step is too much.
    Minibatch noise costs acceptance: the error of a trajectory grows like h^2 L tr(A C) / tau, so
    that with plain minibatches many dimensions force tiny steps; with ``control_variate=True`` much
    less. Cost a draw: L + 1 minibatch gradients and one energy on all rows, in chunks of bounded
    memory. That energy is a sum over all rows: of a logistic regression with a million of them
    32-bit rounding has a standard deviation of about 0.1 nats (0.004 with 100,000); switch x64 on
    where that matters.

    Args:
        model: a NumPyro model with continuous latent sites.
        potential_fn: in the model's place, ``potential_fn(z)`` or ``potential_fn(z, rng_key)``.
        full_potential_fn: the energy that a stochastic ``potential_fn`` estimates, ``f(z)``.
        num_data: N of a stochastic ``potential_fn``, for the metric's units.
        metric: the mass matrix, a name or an object; adapts in warm-up only.
        friction: gamma in units of 1 / h, or ``"auto"``: critical for the slowest direction.
        step_size: ``"auto"`` (dual averaging in warm-up), a number h, or a schedule, whose value
            at the start of a trajectory holds for all of it.
        target_accept: mean acceptance probability that ``step_size="auto"`` aims at.
        batch_size: rows a gradient, an int, a dict plate -> int, or None for all rows.
        num_steps: L, or ``"auto"``: with minibatches as many as cost about as much as the energy
            on all rows, otherwise a relaxation time.
        temperature: tau, above 0.
        batching: ``"replacement"``; with ``"epoch"`` the reverse of a sequence of batches is not
            as likely as the sequence.
        control_variate: correct minibatch gradients by those at an anchor that warm-up finds.
        expansion: expand matrices W = P V Q, see `numpyro_geom.Expansion`.
        init_strategy: NumPyro's, where the chains start.

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
        metric: Any = "identity",
        friction: float | str = "auto",
        step_size: Any = "auto",
        target_accept: float = 0.8,
        batch_size: int | Mapping[str, int] | None = None,
        num_steps: int | str = "auto",
        temperature: float = 1.0,
        batching: str = "replacement",
        control_variate: bool = False,
        expansion: Expansion | None = None,
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        super().__init__(locals())
        _check(self.settings)

    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings."""
        facts = Facts(
            adjusted=True,
            momentum=True,
            trajectory=True,
            target_accept=settings.target_accept,
            settling_steps=settling_steps(settings.metric),
            measures=given_friction(settings) is None,
        )
        rule = Rule(
            propose=lambda *args: _propose(settings, *args),
            rate=lambda slowest, dynamics: relaxation_rate(slowest, dynamics.friction),
            bias=None,
            num_steps=_num_steps,
            observe=lambda adaptation, _: adaptation,
        )
        return Algorithm(
            init=lambda position, rng_key: _init(settings, position, rng_key),
            draw=_trajectory(settings),
            rule=rule,
            facts=facts,
            forget=_forget,
        )


def _init(settings: Settings, position: PyTree, rng_key: jax.Array) -> Momentum:
    dtype = jnp.result_type(*jax.tree.leaves(position))
    zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
    averaging = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.int32 if jnp.result_type(x).kind == "i" else dtype),
        _averaging_init(zero),
    )
    extra = GGMCState(zero, jnp.zeros((), bool), one, averaging)
    return init_momentum(position, rng_key, settings.temperature, given_friction(settings), extra)


def _forget(dynamics: Momentum) -> Momentum:
    """Without the energy of the old model arguments."""
    extra: GGMCState = dynamics.extra
    return dynamics._replace(extra=extra._replace(known=jnp.zeros_like(extra.known)))


def _propose(
    settings: Settings, adaptation: Adaptation, state: SGState, _: Potential
) -> tuple[jax.Array, jax.Array, PyTree]:
    """Step size from dual averaging, about a scale that late measurements leave alone."""
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
    critical = 2 * jnp.sqrt(adaptation.slowest)
    friction = critical if given_friction(settings) is None else old.friction
    rate = relaxation_rate(adaptation.slowest, friction)
    extra = extra._replace(scale=scale.astype(extra.scale.dtype))
    return h, rate, old._replace(friction=friction.astype(old.friction.dtype), extra=extra)


def _num_steps(
    adaptation: Adaptation,
    rate: jax.Array,
    step_size: jax.Array,
    warming: jax.Array,
    potential: Potential,
) -> jax.Array:
    """With minibatches, as many as cost about as much as the energy on all rows."""
    if potential.steps_per_epoch == 1:
        return num_steps(adaptation, rate, step_size, warming)
    steps = -(-potential.steps_per_epoch // GRADIENT_COST)
    return jnp.asarray(min(steps, MAX_NUM_STEPS), jnp.int32)


def _trajectory(settings: Settings) -> Draw:
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
        key_steps, key_accept = random.split(rng_key)
        potential, given = target.potential, settings.given_num_steps
        metric_state = state.metric_state
        start, dynamics = state.chain.position, state.dynamics
        extra: GGMCState = dynamics.extra
        dtype, tau = state.potential_energy.dtype, settings.temperature
        noisy = target.seen(state.control)
        exact = target.expanded(potential)
        h = state.step_size
        if settings.schedule is not None:
            h = jnp.asarray(settings.schedule(state.steps_taken), dtype)
        stride = jnp.where(moving, h, 0.0)
        last = jnp.asarray(state.num_steps if given is None else given)
        scale = friction_scale(target.expansion, start)

        def energy_on_all_rows(_: jax.Array, position: PyTree) -> jax.Array:
            energy = exact.on_all_rows(lambda rows: exact.energy(position, rows))  # type: ignore
            return energy.astype(dtype)

        def half_squared(p: PyTree) -> jax.Array:
            return (tree_vdot(p, p) / 2).astype(dtype)

        def gradient(k: jax.Array, key_noise: jax.Array, batch: Any, carry: tuple) -> tuple:
            """The k-th of L + 1 gradients: the end of one step and the beginning of the next."""
            position, momentum, learned, work, first = carry
            grad = jax.grad(noisy.energy)(position, batch)
            learned = learn(learned, grad, potential.num_data, learning)
            virial = virials(position, state.centre, grad)
            facts = jnp.concatenate([tree_vdot(grad, grad)[None], virial]).astype(dtype)
            first = jnp.where(k == 0, facts, first)
            force = metric.apply_inverse_sqrt(metric_state, grad)
            ends, begins = k > 0, k < last
            momentum = tree_axpy(jnp.where(ends, -stride / 2, 0.0), force, momentum)
            work = work + jnp.where(ends, half_squared(momentum), 0.0)
            # the O of a step's end and that of the next one's beginning in one
            duration = dynamics.friction * stride * jnp.where(ends & begins, 1.0, 0.5)
            momentum = jax.tree.map(
                lambda p, n, s: (
                    jnp.exp(-s * duration).astype(p.dtype) * p
                    + jnp.sqrt(-jnp.expm1(-2 * s * duration) * tau).astype(p.dtype) * n
                ),
                momentum,
                tree_normal(key_noise, momentum),
                scale,
            )
            work = work - jnp.where(begins, half_squared(momentum), 0.0)
            momentum = tree_axpy(jnp.where(begins, -stride / 2, 0.0), force, momentum)
            velocity = metric.apply_inverse_sqrt(metric_state, momentum)
            position = tree_axpy(jnp.where(begins, stride, 0.0), velocity, position)
            return position, momentum, learned, work, first

        zero = jnp.zeros((), dtype)
        carry = (
            start,
            dynamics.momentum,
            metric_state,
            zero,
            jnp.zeros(1 + (len(start) if is_by_site(start) else 1), dtype),
        )
        stream, carry = loop_over_batches(
            potential, target.merge(start), key_steps, state.stream, last + 1, gradient, carry
        )
        position, momentum, learned, work, first = carry
        old_energy = lazy_cond(~extra.known, energy_on_all_rows, extra.energy, start)
        new_energy = energy_on_all_rows(zero, position)
        error = (new_energy - old_energy + work) / tau
        if target.transforms is not None:
            error = jnp.where(target.is_usable(target.merge(position)), error, jnp.inf)
        error = jnp.where(jnp.isnan(error), jnp.inf, error)
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
        averaging = _averaging_update(settings.target_accept - accept_prob, extra.averaging)
        averaging = jax.tree.map(lambda x, y: x.astype(y.dtype), averaging, extra.averaging)
        extra = extra._replace(
            energy=energy,
            known=jnp.ones_like(extra.known),
            averaging=tree_where(adapting, averaging, extra.averaging),
        )
        diverging = ~(error < HOPELESS)
        state = state.with_temperatures(first[1:])
        return state._replace(
            z=target.merge(kept),
            potential_energy=energy,
            grad_norm=jnp.sqrt(first[0]),
            kinetic_temperature=kinetic_temperature(momentum).astype(dtype),
            step_size=h,
            diverging=diverging,
            num_diverging=diverging.astype(jnp.int32),
            accept_prob=accept_prob,
            metric_state=tree_where(finite, learned, metric_state),
            dynamics=Momentum(momentum, dynamics.friction, extra),
            expanded=() if target.expansion is None else kept,
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
    if settings.batching == "epoch":
        raise ValueError(
            "GGMC needs batching='replacement', got 'epoch': the batches of a trajectory must "
            "be as likely in reverse order, or the test is not exact"
        )
    check_always_noisy(settings.schedule, "GGMC")
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
    if not callable(full):
        raise TypeError("full_potential_fn must be callable, got " + type(full).__name__)
    if takes_rng_key(full):
        raise TypeError(
            "full_potential_fn must be the energy itself, f(z), and this one takes a key: "
            "pass the function that potential_fn estimates"
        )
    check_int("num_data", settings.num_data)
