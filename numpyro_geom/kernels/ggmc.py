"""Generalised Hamiltonian Monte Carlo with minibatch gradients and an exact acceptance test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro.infer import init_to_uniform
from numpyro.infer.hmc_util import dual_averaging

from .._checks import check_int, check_number
from .._start import check_always_noisy, check_energy
from .._util import lazy_cond, tree_axpy, tree_normal, tree_vdot, tree_where
from ..expansion import Expansion
from ..kernel import PyTree, SGKernel, SGState, StepReport, Walker
from ..potential import Potential, function_potential, takes_rng_key
from ..rows.loop import loop_over_batches
from ..state import is_by_site, virials
from ..step_size import MAX_NUM_STEPS, Adaptation, is_checkpoint
from .momentum import (
    Momentum,
    check_friction,
    friction_scale,
    init_momentum,
    kinetic_temperature,
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
            on all rows, otherwise half a relaxation time.
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

    _adjusted = True
    _has_momentum = True

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
        super().__init__(
            model,
            potential_fn=potential_fn,
            metric=metric,
            step_size=step_size,
            batch_size=batch_size,
            num_steps=num_steps,
            temperature=temperature,
            batching=batching,
            control_variate=control_variate,
            expansion=expansion,
            init_strategy=init_strategy,
        )
        self._friction = check_friction(friction)
        self._measures = self._friction is None
        self._target_accept = check_number("target_accept", target_accept, above=0.0)
        if self._target_accept >= 1:
            raise ValueError(f"target_accept must be below 1, got {target_accept!r}")
        if self._temperature == 0:
            raise ValueError(
                "temperature must be above 0 with GGMC, got 0: there is nothing to test against. "
                "Use SGHMC(temperature=0) for a damped descent"
            )
        if batching == "epoch":
            raise ValueError(
                "GGMC needs batching='replacement', got 'epoch': the batches of a trajectory must "
                "be as likely in reverse order, or the test is not exact"
            )
        check_always_noisy(self._schedule, "GGMC")
        self._check_functions(full_potential_fn, num_data)

    def _check_functions(self, full_potential_fn: Any, num_data: Any) -> None:
        stochastic = self._potential_fn is not None and takes_rng_key(self._potential_fn)
        given = {"full_potential_fn": full_potential_fn, "num_data": num_data}
        if not stochastic:
            for name, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"{name} goes with a stochastic potential_fn(z, rng_key), and there is "
                        f"none: drop {name}"
                    )
        else:
            for name, value in given.items():
                if value is None:
                    raise ValueError(
                        f"a stochastic potential_fn needs {name}: pass the energy itself as "
                        "full_potential_fn(z), and the number of observations as num_data"
                    )
            if not callable(full_potential_fn):
                raise TypeError(
                    "full_potential_fn must be callable, got " + type(full_potential_fn).__name__
                )
            if takes_rng_key(full_potential_fn):
                raise TypeError(
                    "full_potential_fn must be the energy itself, f(z), and this one takes a key: "
                    "pass the function that potential_fn estimates"
                )
            num_data = check_int("num_data", num_data)
        self._full_potential_fn, self._num_data = full_potential_fn, num_data

    @property
    def settings(self) -> dict[str, Any]:
        """Constructor arguments by name, for records."""
        settings = super().settings
        for name in ("bias_tolerance", "anchor_interval"):
            del settings[name]
        return {
            **settings,
            "friction": "auto" if self._friction is None else self._friction,
            "target_accept": self._target_accept,
            "num_data": "none" if self._num_data is None else self._num_data,
        }

    def refresh(self, state: SGState, model_args: tuple, model_kwargs: dict | None) -> SGState:
        """Forget the energy of the old model arguments."""
        state = super().refresh(state, model_args, model_kwargs)
        old: GGMCState = state.dynamics.extra
        extra = old._replace(known=jnp.zeros_like(old.known))
        return state._replace(dynamics=state.dynamics._replace(extra=extra))

    def _potential(self, args: tuple, kwargs: dict) -> Potential:
        if self._potential_fn is None or self._full_potential_fn is None:
            return super()._potential(args, kwargs)
        return function_potential(self._potential_fn, self._full_potential_fn, self._num_data)

    def _init_dynamics(self, position: PyTree, rng_key: jax.Array) -> Momentum:
        dtype = jnp.result_type(*jax.tree.leaves(position))
        zero, one = jnp.zeros((), dtype), jnp.ones((), dtype)
        averaging = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.int32 if jnp.result_type(x).kind == "i" else dtype),
            _averaging_init(zero),
        )
        extra = GGMCState(zero, jnp.zeros((), bool), one, averaging)
        return init_momentum(position, rng_key, self._temperature, self._friction, extra)

    def _init_chain(
        self, rng_key: jax.Array, num_warmup: int, position: PyTree, args: tuple, kwargs: dict
    ) -> SGState:
        state = super()._init_chain(rng_key, num_warmup, position, args, kwargs)
        if self._full_potential_fn is None:
            return state
        energy = self._full_potential_fn(state.z)
        check_energy("full_potential_fn", energy)
        # `init` refuses what is not finite
        return state._replace(potential_energy=jnp.asarray(energy, state.potential_energy.dtype))

    def _rule(
        self, adaptation: Adaptation, state: SGState, potential: Potential
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        """Step size from dual averaging, about a scale that late measurements leave alone."""
        old: Momentum = state.dynamics
        extra: GGMCState = old.extra
        num_warmup = adaptation.num_warmup
        renew = is_checkpoint(state.i, num_warmup) & (state.i <= num_warmup * 7 // 8)
        tiny = jnp.finfo(extra.scale.dtype).tiny
        scale = jnp.where(renew, jnp.maximum(adaptation.curvature, tiny) ** -0.5, extra.scale)
        latest, average = extra.averaging[0], extra.averaging[1]
        h = state.step_size
        if self._schedule is None:
            h = scale * jnp.exp(jnp.where(state.i >= num_warmup - 1, average, latest))
        critical = 2 * jnp.sqrt(adaptation.slowest)
        friction = critical if self._friction is None else old.friction
        rate = relaxation_rate(adaptation.slowest, friction)
        extra = extra._replace(scale=scale.astype(extra.scale.dtype))
        return h, rate, old._replace(friction=friction.astype(old.friction.dtype), extra=extra)

    def _num_steps_from(
        self, adaptation: Adaptation, rate: jax.Array, step_size: jax.Array, warming: jax.Array
    ) -> jax.Array:
        if self._plan is None or not self._plan.batch_sizes:
            return super()._num_steps_from(adaptation, rate, step_size, warming)
        steps = -(-self._plan.steps_per_epoch // GRADIENT_COST)
        return jnp.asarray(min(steps, MAX_NUM_STEPS), jnp.int32)

    def _relaxation_rate(self, slowest: Any, dynamics: Momentum) -> Any:
        return relaxation_rate(slowest, dynamics.friction)

    def _update_shrink(self, adaptation: Adaptation, state: SGState) -> Adaptation:
        return adaptation

    def _step(self, *args: Any) -> tuple[Walker, StepReport]:
        raise NotImplementedError("GGMC moves by whole trajectories")

    def _draw(
        self,
        state: SGState,
        potential: Potential,
        rng_key: jax.Array,
        moving: jax.Array | bool,
        learning: jax.Array,
    ) -> SGState:
        """One trajectory and its acceptance test."""
        key_steps, key_accept = random.split(rng_key)
        metric, metric_state = self._metric, state.metric_state
        start, dynamics = self._walker(state).position, state.dynamics
        extra: GGMCState = dynamics.extra
        dtype, tau = state.potential_energy.dtype, self._temperature
        noisy = self._target(potential, state.control)
        exact = self._expanded(potential)
        h = state.step_size
        if self._schedule is not None:
            h = jnp.asarray(self._schedule(state.steps_taken), dtype)
        stride = jnp.where(moving, h, 0.0)
        last = jnp.asarray(state.num_steps if self._num_steps is None else self._num_steps)
        scale = friction_scale(self._expansion, start)

        def energy_on_all_rows(_: jax.Array, position: PyTree) -> jax.Array:
            energy = exact.on_all_rows(lambda rows: exact.energy(position, rows))  # type: ignore
            return energy.astype(dtype)

        def half_squared(p: PyTree) -> jax.Array:
            return (tree_vdot(p, p) / 2).astype(dtype)

        def gradient(k: jax.Array, key_noise: jax.Array, batch: Any, carry: tuple) -> tuple:
            """The k-th of L + 1 gradients: the end of one step and the beginning of the next."""
            position, momentum, learned, work, first = carry
            grad = jax.grad(noisy.energy)(position, batch)
            learned = self._learn_metric(learned, grad, potential.num_data, learning)
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
            potential, self._merge(start), key_steps, state.stream, last + 1, gradient, carry
        )
        position, momentum, learned, work, first = carry
        old_energy = lazy_cond(~extra.known, energy_on_all_rows, extra.energy, start)
        new_energy = energy_on_all_rows(zero, position)
        error = (new_energy - old_energy + work) / tau
        if self._transforms is not None:
            usable = jnp.all(jnp.isfinite(_flat(self._transforms(self._merge(position)))))
            error = jnp.where(usable, error, jnp.inf)
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
        averaging = _averaging_update(self._target_accept - accept_prob, extra.averaging)
        averaging = jax.tree.map(lambda x, y: x.astype(y.dtype), averaging, extra.averaging)
        extra = extra._replace(
            energy=energy,
            known=jnp.ones_like(extra.known),
            averaging=tree_where(adapting, averaging, extra.averaging),
        )
        diverging = ~(error < HOPELESS)
        state = self._with_temperatures(state, first[1:], start)
        return state._replace(
            z=self._merge(kept),
            potential_energy=energy,
            grad_norm=jnp.sqrt(first[0]),
            kinetic_temperature=kinetic_temperature(momentum).astype(dtype),
            step_size=h,
            diverging=diverging,
            num_diverging=diverging.astype(jnp.int32),
            accept_prob=accept_prob,
            metric_state=tree_where(finite, learned, metric_state),
            dynamics=Momentum(momentum, dynamics.friction, extra),
            expanded=() if self._expansion is None else kept,
            trusted=kept,
            stream=stream,
            steps_taken=state.steps_taken + last.astype(jnp.int32),
        )


def _flat(tree: PyTree) -> jax.Array:
    """A vector that is finite where every entry of every leaf is."""
    return jnp.stack([jnp.sum(x * 0) for x in jax.tree.leaves(tree)])
