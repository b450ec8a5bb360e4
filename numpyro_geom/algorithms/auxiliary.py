"""The steps of ``divergence="auxiliary"``: the metric is a function of a gradient V in the chain.

The law of theta, V and a momentum p is exp(-U(theta) / tau) N(V; m(theta), s^2 I) N(p; 0, tau I),
with m = grad U / N. A step draws V given theta, and then moves theta (and p) given V. The metric
A(V) is constant in this part. The pages on Gamma and on momentum have the derivations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _random
from .._util import PyTree, lazy_cond, tree_scale, tree_size, tree_vdot, tree_where
from ..model.derivatives import linearize
from ..model.potential import Potential
from ..sampling.algorithm import Step
from ..sampling.settings import Settings
from ..sampling.state import Chain, StepReport
from .langevin import langevin_move, metropolis, probe

SOFTNESS = 1.5
"""Standard deviation of the auxiliary gradient, relative to the root mean square of minibatch g."""
SCALE_DECAY = 0.99


class AuxiliaryState(NamedTuple):
    """The auxiliary gradient V and what warm-up has learned about its scale.

    Attributes:
        gradient: V, like the position; given theta it is N(m(theta), s^2 I), m = grad U / N.
        second_moment: running mean of the squared entries of the minibatch g, times ``weight``.
        curvature: running mean of tau tr(H) / (N^2 D), times ``weight``. This estimates the mean
            squared entry of the full g in the target, wherever the chain starts.
        noise_variance: running mean of the variance of g from one part of the batch, per entry,
            times ``weight``.
        weight: weight of the three running means; they start at zero.
        num_steps: steps since V was last drawn independently of the past.
    """

    gradient: PyTree
    second_moment: jax.Array
    curvature: jax.Array
    noise_variance: PyTree
    weight: jax.Array
    num_steps: jax.Array


class Renewed(NamedTuple):
    """What a step knows after it has drawn V: `renew_auxiliary`.

    Attributes:
        grad: grad U at the position, from the whole batch or two of its parts.
        state: the state with the new V.
        metric_state: the metric's state as a function of the new V.
        due: whether V has been drawn; between the metric's intervals it stays.
        s: standard deviation of V given theta.
        force_of: V -> grad U - tau H_N (V - m) / s^2, minus the force on theta given V.
    """

    grad: PyTree
    state: AuxiliaryState
    metric_state: Any
    due: jax.Array | bool
    s: jax.Array
    force_of: Callable[[PyTree], PyTree]


def renew_auxiliary(
    metric: Any,
    rng_key: jax.Array,
    potential: Potential,
    batch: Any,
    chain: Chain,
    old: AuxiliaryState,
    tau: jax.Array | float,
    learning: jax.Array,
) -> Renewed:
    """Draw V given theta; this leaves the law of V given theta invariant.

    With minibatches three disjoint parts of the batch give V, m = grad U / N, and the Hessian. So
    given theta and any earlier or new V the force is unbiased, and V carries a known noise.
    """
    position, metric_state, scale = chain.position, chain.metric_state, 1 / potential.num_data
    key_v, key_scale = _random.split(rng_key)

    gradient_on = jax.grad(potential.energy)

    if potential.deterministic:
        grad, hvp = linearize(lambda p: gradient_on(p, batch), position)
        mean_v = mean = tree_scale(scale, grad)
        part_variance = jax.tree.map(jnp.zeros_like, mean)
    else:
        rows_v, rows_m, rows_h = potential.split(batch, 3)
        grad_v, grad_m = gradient_on(position, rows_v), gradient_on(position, rows_m)
        grad_h, hvp = linearize(lambda p: gradient_on(p, rows_h), position)
        grad = jax.tree.map(lambda a, b: (a + b) / 2, grad_m, grad_h)
        mean_v, mean = tree_scale(scale, grad_v), tree_scale(scale, grad_m)
        part_variance = jax.tree.map(lambda a, b: jnp.square(scale * (a - b)) / 2, grad_m, grad_h)
    z = probe(key_scale, position)
    trace = lazy_cond(
        learning,
        lambda zero, z: zero + (tau * scale**2 * tree_vdot(z, hvp(z))).astype(zero.dtype),
        jnp.zeros_like(old.weight),
        z,
    )
    state = _learn_scale(old, tree_scale(scale, grad), trace, part_variance, learning)
    s = auxiliary_scale(state, metric.decay)

    interval = metric.interval
    decay = jnp.where(state.num_steps == 0, 0.0, metric.decay).astype(s.dtype)

    def renew(pair: tuple[PyTree, PyTree], key: jax.Array) -> tuple[PyTree, PyTree]:
        gradient = _draw_auxiliary(key, pair[0], mean_v, state, decay, s)
        return gradient, metric.from_gradient(pair[1], gradient, s)

    pair, due = (old.gradient, metric_state), True
    if interval == 1:
        gradient, metric_state = renew(pair, key_v)
    else:
        due = state.num_steps % interval == 0
        gradient, metric_state = lazy_cond(due, renew, pair, key_v)

    def force_of(gradient: PyTree) -> PyTree:
        pull = jax.tree.map(lambda v, m: (v - m) * scale / s**2, gradient, mean)
        return jax.tree.map(lambda a, b: a - tau * b, grad, hvp(pull))

    state = state._replace(gradient=gradient, num_steps=state.num_steps + 1)
    return Renewed(grad, state, metric_state, due, s, force_of)


def auxiliary_step(metric: Any, adjusted: bool) -> Step:
    """Draw V given theta, then move theta given V in the constant metric A(V)."""

    def step(
        rng_key: jax.Array,
        potential: Potential,
        batch: Any,
        chain: Chain,
        h: jax.Array,
        tau: jax.Array | float,
        learning: jax.Array,
    ) -> tuple[Chain, StepReport]:
        position = chain.position
        scale = 1 / potential.num_data
        key_v, key_move = _random.split(rng_key)
        old = chain.dynamics
        new = renew_auxiliary(metric, key_v, potential, batch, chain, old, tau, learning)
        state, metric_state = new.state, new.metric_state
        accept_prob, squared_drift = jnp.ones_like(new.s), jnp.zeros_like(new.s)
        if adjusted:

            def conditional(p: PyTree) -> tuple[jax.Array, PyTree]:
                """Energy U + tau |V - m|^2 / 2 s^2 of theta given V, and its gradient."""
                (u, du), product = linearize(
                    lambda q: jax.value_and_grad(potential.energy)(q, batch), p
                )
                gap = jax.tree.map(lambda v, m: v - scale * m, state.gradient, du)
                _, force = product(tree_scale(scale / new.s**2, gap))
                return u + tau * tree_vdot(gap, gap) / (2 * new.s**2), jax.tree.map(
                    lambda a, b: a - tau * b, du, force
                )

            here = conditional(position)
            position, accept_prob = metropolis(
                key_move, conditional, here, position, metric, metric_state, h, tau
            )
        else:
            xi = _random.tree_normal(key_move, position)
            noise = metric.apply_inverse_sqrt(metric_state, xi)
            drift = metric.apply_inverse(metric_state, new.force_of(state.gradient))
            position = langevin_move(position, drift, noise, h, tau)
            squared_drift = h * tree_vdot(new.grad, drift) / 2
        return Chain(position, metric_state, state), StepReport(
            new.grad, squared_drift, accept_prob
        )

    return step


def auxiliary_kick(
    metric: Any,
    rng_key: jax.Array,
    potential: Potential,
    batch: Any,
    chain: Chain,
    old: AuxiliaryState,
    tau: jax.Array | float,
    learning: jax.Array,
) -> tuple[Renewed, PyTree]:
    """Draw V, and the mean of two whitened forces at one position: of the old V and of the new.

    One half of a kick closes a step in the metric of the old V, the other half opens a step in that
    of the new V. A whole kick in one of both would be a bias of first order in the step size.
    """
    new = renew_auxiliary(metric, rng_key, potential, batch, chain, old, tau, learning)

    def whitened(gradient: PyTree, metric_state: Any) -> PyTree:
        return metric.apply_inverse_sqrt(metric_state, new.force_of(gradient))

    opening = closing = whitened(old.gradient, chain.metric_state)
    present = new.state.gradient, new.metric_state
    if metric.interval == 1:
        opening = whitened(*present)
    else:
        opening = lazy_cond(new.due, lambda _, *present: whitened(*present), closing, *present)
    # before the first step there is no V
    closing = tree_where(old.num_steps == 0, opening, closing)
    return new, jax.tree.map(lambda a, b: (a + b) / 2, closing, opening)


def _draw_auxiliary(
    key: jax.Array,
    gradient: PyTree,
    mean: PyTree,
    state: AuxiliaryState,
    decay: jax.Array,
    s: jax.Array,
) -> PyTree:
    """V <- m + decay (V - m) + noise; it leaves N(m, s^2 I) invariant.

    The minibatch noise of m reaches V times 1 - decay. The injected variance is reduced by it.
    """

    def one(v: jax.Array, m: jax.Array, xi: jax.Array, total: jax.Array) -> jax.Array:
        known = total / jnp.maximum(state.weight, 1e-30)
        variance = (1 - decay**2) * s**2 - (1 - decay) ** 2 * known
        return m + decay * (v - m) + jnp.sqrt(jnp.maximum(variance, 0.0)) * xi

    return jax.tree.map(one, gradient, mean, _random.tree_normal(key, mean), state.noise_variance)


def auxiliary_scale(state: AuxiliaryState, decay: float) -> jax.Array:
    """s, the standard deviation of V given theta.

    In the target the mean square of grad U is tau tr(H) / D. A chain that starts near a mode does
    not see this in its gradients. The minibatch noise that reaches V must also fit into s.
    """
    square = SOFTNESS**2 * jnp.maximum(state.second_moment, jnp.abs(state.curvature))
    known = jnp.stack([jnp.max(c) for c in jax.tree.leaves(state.noise_variance)])
    square = jnp.maximum(square, jnp.max(known).astype(square.dtype) * (1 - decay) / (1 + decay))
    s = jnp.sqrt(square / jnp.maximum(state.weight, 1e-30))
    return jnp.maximum(s, jnp.finfo(s.dtype).tiny ** 0.5)


def _learn_scale(
    state: AuxiliaryState, g: PyTree, trace: jax.Array, part_variance: PyTree, learning: jax.Array
) -> AuxiliaryState:
    """Running means that give s and the noise of m; they stop changing after ``learning``."""
    size = tree_size(g)
    rate = 1 - SCALE_DECAY

    def mix(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(learning, old + rate * (new - old), old)

    return state._replace(
        second_moment=mix(state.second_moment, tree_vdot(g, g) / size),
        curvature=mix(state.curvature, trace / size),
        noise_variance=jax.tree.map(mix, state.noise_variance, part_variance),
        weight=mix(state.weight, jnp.ones_like(state.weight)),
    )


def init_auxiliary(position: PyTree) -> AuxiliaryState:
    """The state before any step."""
    zeros = jax.tree.map(jnp.zeros_like, position)
    zero = jnp.zeros((), jnp.result_type(*jax.tree.leaves(position)))
    return AuxiliaryState(zeros, zero, zero, zeros, zero, jnp.zeros((), jnp.int32))


def renewed_next(state: AuxiliaryState) -> AuxiliaryState:
    """The state after a step that was undone: the next step draws V independently of the past."""
    return state._replace(num_steps=jnp.zeros_like(state.num_steps))


def auxiliary_curvature(state: AuxiliaryState, settings: Settings, num_data: Any) -> jax.Array:
    """The factor of H^2 in (H / N)^2 tau / s^2, the Hessian of the force of V on theta."""
    s = auxiliary_scale(state, settings.metric.decay)
    return settings.temperature / (num_data * s) ** 2


def check_auxiliary(settings: Settings) -> None:
    """Raise for a metric or for batches of which V cannot be made."""
    if not settings.metric.has_auxiliary:
        raise TypeError(
            "divergence='auxiliary' needs a metric with a method from_gradient, and "
            f"{settings.metric!r} has none: add it, or use divergence='frozen'"
        )
    if settings.batching == "stratified":
        raise ValueError(
            "divergence='auxiliary' splits a batch in three, and a part of a stratified batch does "
            "not represent all rows: expected batching='replacement' or 'epoch'"
        )


def check_thirds(plan: Any) -> None:
    """Raise if batches cannot be split in three."""
    small = {} if plan is None else {p: b for p, b in plan.batch_sizes.items() if b < 3}
    if small:
        raise ValueError(
            f"divergence='auxiliary' splits a batch in three, and these are smaller: {small}. "
            "Expected batch_size of at least 3"
        )
