"""Stochastic-gradient Riemannian Langevin dynamics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro.infer import init_to_uniform

from .._checks import check_choice, check_flag, check_int, check_number
from .._util import lazy_cond, tree_vdot, tree_where
from ..gamma import (
    GAMMA_ESTIMATORS,
    GAMMA_MODES,
    divergence,
    divergence_from_probe,
    has_divergence,
    mode_factor,
    probe,
)
from ..kernel import PyTree, SGKernel, StepReport, Walker
from ..potential import Potential

SOFTNESS = 1.5
"""Standard deviation of the auxiliary gradient, in root mean squares of the minibatch g."""
SCALE_DECAY = 0.99


class AuxiliaryState(NamedTuple):
    """The auxiliary gradient V and what warm-up has learned about its scale.

    Attributes:
        gradient: V, like the position; given theta it is N(m(theta), s^2 I), m = grad U / N.
        second_moment: running mean of the squared entries of the minibatch g, times ``weight``.
        curvature: running mean of tau tr(H) / (N^2 D), times ``weight``: what the squared entries
            of the full g come to in the target itself, wherever the chain starts.
        noise_variance: running mean of the variance of g from one part of the batch, per entry,
            times ``weight``.
        weight: weight of the two running means, which start at zero.
        num_steps: steps so far.
    """

    gradient: PyTree
    second_moment: jax.Array
    curvature: jax.Array
    noise_variance: PyTree
    weight: jax.Array
    num_steps: jax.Array


class SGRLD(SGKernel):
    """Langevin dynamics with minibatch gradients in a Riemannian metric.

    One step from theta, with A = G^-1 the inverse metric and xi standard normal::

        theta' = theta - h A grad Uhat(theta) + tau h Gamma(theta) + sqrt(2 h tau) A^{1/2} xi

    Invariant distribution as h -> 0, by ``gamma``:

    - ``"frozen"``: exp(-U / tau). The metric adapts in warm-up only, then A is constant.
    - ``"auxiliary"``: exp(-U / tau), at any decay. A is a function of an auxiliary gradient V
      that is part of the chain, so that no Gamma is needed. Needs a second-order term.
    - ``"corrected"``: exp(-U / tau). Gamma is the divergence of A, which moves with theta; needs
      h so small that the running statistics follow theta.
    - ``"published"``: Gamma scaled by 1 - decay, as most papers have it. Biased: in one dimension
      the law is p A^{-decay}, for reproducing the literature.
    - ``"none"``: no Gamma. Biased: in one dimension the law is p / A, likewise.

    At the step size in use, discretisation and minibatch noise inflate variances by about
    ``bias_tolerance`` where ``step_size="auto"`` chose it. With ``adjusted=True`` (all rows at
    every step, and ``gamma`` ``"frozen"`` or ``"auxiliary"``) a Metropolis test makes the law
    exact at any h.

    Choose it for models with more rows than a full gradient can take, or as the baseline that
    every other kernel is measured against. Cost a step: one minibatch gradient; with
    ``"corrected"`` and ``"published"`` and with ``"auxiliary"`` a Hessian-vector product more.

    Args:
        model: a NumPyro model with continuous latent sites.
        potential_fn: in the model's place, ``potential_fn(z)`` or ``potential_fn(z, rng_key)``.
        metric: ``"identity"``, ``"rmsprop"``, ``"wenzel"``, ``"monge"``, ``"shampoo"``, or an
            object, see `numpyro_geom.metrics`.
        gamma: the treatment of Gamma, above.
        step_size: ``"auto"``, a number h, or a schedule.
        batch_size: rows a step, an int, a dict plate -> int, or None for all rows.
        num_steps: steps between two draws, or ``"auto"`` for half a relaxation time.
        temperature: tau, at least 0.
        batching: ``"replacement"`` or ``"epoch"``.
        gamma_estimator: ``"hutchinson"`` (random probes) or ``"exact"`` (all unit vectors, for
            few dimensions).
        gamma_probes: probes that are averaged.
        adjusted: add the Metropolis test.
        bias_tolerance: relative error of the variances that ``"auto"`` may cause.
        control_variate: correct minibatch gradients by those at an anchor, where the gradient of
            all rows is known. Two minibatch gradients a step, and far less noise.
        anchor_interval: steps between two moves of the anchor to the chain's own position, each a
            pass over all rows, for targets with several modes; None leaves the anchor where
            warm-up found the middle of the target.
        max_norm: where the preconditioned gradient is longer than this, take the step in the
            identity metric scaled to this length instead (a safeguard, not exact).
        init_strategy: NumPyro's, where the chains start.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range and combinations that have no invariant law.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_geom import SGRLD
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> y = 3 + jax.random.normal(jax.random.key(0), (1000,))
        >>> mcmc = MCMC(SGRLD(model, batch_size=100), num_warmup=200, num_samples=200,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> bool(abs(mcmc.get_samples()["mu"].mean() - 3) < 0.2)
        True

    References:
        Yu, Hartmann, Williams, Klami, "Scalable Stochastic Gradient Riemannian Langevin Dynamics
        in Non-Diagonal Metrics", TMLR 2023, Eq. 3 (the step; they leave Gamma out).
        Rensmeyer, Niggemann, "On the Convergence of Locally Adaptive and Scalable Diffusion-Based
        Sampling Methods for Deep Bayesian Neural Network Posteriors", AISTATS 2025 (the
        corrected Gamma, Algorithm 1). The auxiliary metric is ours, see the page on Gamma.
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        potential_fn: Callable | None = None,
        metric: Any = "identity",
        gamma: str = "frozen",
        step_size: Any = "auto",
        batch_size: int | Mapping[str, int] | None = None,
        num_steps: int | str = "auto",
        temperature: float = 1.0,
        batching: str = "replacement",
        gamma_estimator: str = "hutchinson",
        gamma_probes: int = 1,
        adjusted: bool = False,
        bias_tolerance: float = 0.1,
        control_variate: bool = False,
        anchor_interval: int | None = None,
        max_norm: float | None = None,
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
            bias_tolerance=bias_tolerance,
            control_variate=control_variate,
            anchor_interval=anchor_interval,
            init_strategy=init_strategy,
        )
        self._gamma = check_choice("gamma", gamma, GAMMA_MODES)
        self._gamma_estimator = check_choice("gamma_estimator", gamma_estimator, GAMMA_ESTIMATORS)
        self._gamma_probes = check_int("gamma_probes", gamma_probes)
        self._adjusted = check_flag("adjusted", adjusted)
        self._max_norm = None if max_norm is None else check_number("max_norm", max_norm, above=0.0)
        if gamma == "auxiliary" and not hasattr(self._metric, "from_gradient"):
            raise TypeError(
                f"gamma='auxiliary' needs a metric with a method from_gradient, and {metric!r} has "
                "none: add it, or use gamma='frozen'"
            )
        if self._adjusted:
            self._check_adjusted()

    def _check_adjusted(self) -> None:
        if self._gamma not in ("frozen", "auxiliary"):
            raise ValueError(
                "adjusted=True needs a metric that is constant within a step: expected gamma "
                f"'frozen' or 'auxiliary', got {self._gamma!r}"
            )
        if self._batch_size is not None:
            raise ValueError(
                "adjusted=True needs the full-data energy: drop batch_size, or drop adjusted"
            )
        if self._temperature == 0:
            raise ValueError("adjusted=True needs temperature > 0, got 0: nothing to test against")
        if self._schedule is not None and getattr(self._schedule, "explore", 0.0) > 0:
            raise ValueError(
                "adjusted=True needs noise at every step, and the explore phase has none: "
                "use explore=0, or drop adjusted"
            )
        if self._max_norm is not None:
            raise ValueError("adjusted=True makes max_norm unnecessary: pass only one of the two")

    @property
    def settings(self) -> dict[str, Any]:
        """Constructor arguments by name, for records."""
        return {
            **super().settings,
            "gamma": self._gamma,
            "gamma_estimator": self._gamma_estimator,
            "gamma_probes": self._gamma_probes,
            "adjusted": self._adjusted,
            "max_norm": "none" if self._max_norm is None else self._max_norm,
        }

    @property
    def _noise_factor(self) -> float:
        # the drift of "auxiliary" uses two of three parts of the batch
        return 1.5 if self._gamma == "auxiliary" else 1.0

    def _second_order(self, dynamics: PyTree, potential: Potential) -> jax.Array | float:
        if self._gamma != "auxiliary":
            return 0.0
        # the pull of V on theta has the Hessian (H / N)^2 tau / s^2
        s = _auxiliary_scale(dynamics, getattr(self._metric, "decay", 0.0))
        return self._temperature / (potential.num_data * s) ** 2

    def _check_potential(self, potential: Potential) -> None:
        if self._adjusted and not potential.deterministic:
            raise ValueError(
                "adjusted=True needs the full-data energy, and the model subsamples its rows (or "
                "potential_fn takes a key): use all rows, or drop adjusted"
            )
        if self._gamma == "auxiliary" and self._plan is not None:
            small = {p: b for p, b in self._plan.batch_sizes.items() if b < 3}
            if small:
                raise ValueError(
                    f"gamma='auxiliary' splits a batch in three, and these are smaller: {small}. "
                    "Expected batch_size of at least 3"
                )

    def _init_dynamics(self, position: PyTree) -> PyTree:
        if self._gamma != "auxiliary":
            return ()
        zeros = jax.tree.map(jnp.zeros_like, position)
        zero = jnp.zeros((), jnp.result_type(*jax.tree.leaves(position)))
        return AuxiliaryState(zeros, zero, zero, zeros, zero, jnp.zeros((), jnp.int32))

    def _step(
        self,
        rng_key: jax.Array,
        potential: Potential,
        batch: Any,
        walker: Walker,
        step_size: jax.Array,
        temperature: jax.Array | float,
        learning: jax.Array,
    ) -> tuple[Walker, StepReport]:
        if self._gamma == "auxiliary":
            step = _auxiliary_step
        elif self._adjusted:
            step = _adjusted_step
        else:
            step = _langevin_step
        return step(self, rng_key, potential, batch, walker, step_size, temperature, learning)


def _langevin_step(
    kernel: SGRLD,
    rng_key: jax.Array,
    potential: Potential,
    batch: Any,
    walker: Walker,
    h: jax.Array,
    tau: jax.Array | float,
    learning: jax.Array,
) -> tuple[Walker, StepReport]:
    """The plain step; Gamma with the probe's Hessian product from the gradient's own pass."""
    metric, position = kernel._metric, walker.position
    factor = mode_factor(kernel._gamma, getattr(metric, "decay", 0.0))
    with_gamma = factor > 0 and has_divergence(metric, position)

    def value_and_grad(p: PyTree) -> tuple[jax.Array, PyTree]:
        return jax.value_and_grad(potential.energy)(p, batch)

    if with_gamma:
        rng_key, key_probe = random.split(rng_key)
        (energy, grad), gamma_of = _with_hessian(value_and_grad, position, kernel, key_probe)
    else:
        energy, grad = value_and_grad(position)
    g = _scale(1 / potential.num_data, grad)
    metric_state = _learn_metric(kernel, walker.metric_state, g, learning)
    drift = metric.apply_inverse(metric_state, grad)
    noise = metric.apply_inverse_sqrt(metric_state, _normal(rng_key, position))
    if with_gamma:
        gamma = gamma_of(metric_state, g, 1 / potential.num_data)
        drift = jax.tree.map(lambda d, c: d - factor * tau * c, drift, gamma)
    if kernel._max_norm is not None:
        raw = _normal(rng_key, position)
        length = jnp.sqrt(tree_vdot(drift, drift))
        shrink = kernel._max_norm / jnp.sqrt(tree_vdot(grad, grad))
        too_long = ~(length <= kernel._max_norm)
        drift = tree_where(too_long, _scale(shrink, grad), drift)
        noise = tree_where(too_long, _scale(jnp.sqrt(shrink), raw), noise)
    position = _langevin(position, drift, noise, h, tau)
    return Walker(position, metric_state, ()), StepReport(
        energy, grad, drift, jnp.ones_like(energy)
    )


def _learn_metric(kernel: SGRLD, state: PyTree, g: PyTree, learning: jax.Array) -> PyTree:
    """The metric's update; with ``"frozen"`` in warm-up only, and no work after it."""
    if kernel._gamma != "frozen":
        return kernel._metric.update(state, g)
    return lax.cond(learning, kernel._metric.update, lambda old, _: old, state, g)


def _adjusted_step(
    kernel: SGRLD,
    rng_key: jax.Array,
    potential: Potential,
    batch: Any,
    walker: Walker,
    h: jax.Array,
    tau: jax.Array | float,
    learning: jax.Array,
) -> tuple[Walker, StepReport]:
    """Langevin proposal with constant A and a Metropolis test on U."""
    metric = kernel._metric

    def value_and_grad(p: PyTree) -> tuple[jax.Array, PyTree]:
        return jax.value_and_grad(potential.energy)(p, batch)

    energy, grad = value_and_grad(walker.position)
    g = _scale(1 / potential.num_data, grad)
    metric_state = _learn_metric(kernel, walker.metric_state, g, learning)
    position, accept_prob = _metropolis(
        rng_key,
        value_and_grad,
        (energy, grad),
        walker.position,
        lambda x: metric.apply_inverse(metric_state, x),
        lambda x: metric.apply_inverse_sqrt(metric_state, x),
        h,
        tau,
    )
    return Walker(position, metric_state, ()), StepReport(energy, grad, grad, accept_prob)


def _auxiliary_step(
    kernel: SGRLD,
    rng_key: jax.Array,
    potential: Potential,
    batch: Any,
    walker: Walker,
    h: jax.Array,
    tau: jax.Array | float,
    learning: jax.Array,
) -> tuple[Walker, StepReport]:
    """Draw V given theta, then move theta given V in the constant metric A(V).

    With minibatches three disjoint parts of the batch serve V, m = grad U / N, and the Hessian:
    conditionally on theta and V the drift is then unbiased, and V carries a known noise.
    """
    metric, position, old = kernel._metric, walker.position, walker.dynamics
    scale = 1 / potential.num_data
    key_v, key_move, key_scale = random.split(rng_key, 3)

    def value_and_grad(p: PyTree, rows: Any) -> tuple[jax.Array, PyTree]:
        return jax.value_and_grad(potential.energy)(p, rows)

    if potential.deterministic:
        (energy, grad), hvp = _linearize(lambda p: value_and_grad(p, batch), position)
        mean_v = mean = _scale(scale, grad)
        part_variance = jax.tree.map(jnp.zeros_like, mean)
    else:
        rows_v, rows_m, rows_h = potential.split(batch, 3)
        _, grad_v = value_and_grad(position, rows_v)
        energy_m, grad_m = value_and_grad(position, rows_m)
        (energy_h, grad_h), hvp = _linearize(lambda p: value_and_grad(p, rows_h), position)
        energy = (energy_m + energy_h) / 2
        grad = jax.tree.map(lambda a, b: (a + b) / 2, grad_m, grad_h)
        mean_v, mean = _scale(scale, grad_v), _scale(scale, grad_m)
        part_variance = jax.tree.map(lambda a, b: jnp.square(scale * (a - b)) / 2, grad_m, grad_h)
    z = probe(key_scale, position)
    trace = lazy_cond(
        learning,
        lambda zero, z: zero + (tau * scale**2 * tree_vdot(z, hvp(z))).astype(zero.dtype),
        jnp.zeros_like(old.weight),
        z,
    )
    state = _learn_scale(old, _scale(scale, grad), trace, part_variance, learning)
    s = _auxiliary_scale(state, getattr(metric, "decay", 0.0))

    interval = getattr(metric, "interval", 1)
    decay = jnp.where(state.num_steps == 0, 0.0, getattr(metric, "decay", 0.0)).astype(s.dtype)

    def renew(pair: tuple[PyTree, PyTree], key: jax.Array) -> tuple[PyTree, PyTree]:
        gradient = _draw_auxiliary(key, pair[0], mean_v, state, decay, s)
        return gradient, metric.from_gradient(pair[1], gradient, s)

    pair = (old.gradient, walker.metric_state)
    if interval == 1:
        gradient, metric_state = renew(pair, key_v)
    else:
        gradient, metric_state = lazy_cond(state.num_steps % interval == 0, renew, pair, key_v)

    pull = jax.tree.map(lambda v, m: (v - m) * scale / s**2, gradient, mean)
    apply_inverse = lambda x: metric.apply_inverse(metric_state, x)  # noqa: E731
    apply_root = lambda x: metric.apply_inverse_sqrt(metric_state, x)  # noqa: E731
    accept_prob, drift = jnp.ones_like(energy), grad
    if kernel._adjusted:

        def conditional(p: PyTree) -> tuple[jax.Array, PyTree]:
            """Energy U + tau |V - m|^2 / 2 s^2 of theta given V, and its gradient."""
            (u, du), product = _linearize(lambda q: value_and_grad(q, batch), p)
            gap = jax.tree.map(lambda v, m: v - scale * m, gradient, du)
            force = product(_scale(scale / s**2, gap))
            return u + tau * tree_vdot(gap, gap) / (2 * s**2), jax.tree.map(
                lambda a, b: a - tau * b, du, force
            )

        position, accept_prob = _metropolis(
            key_move,
            conditional,
            conditional(position),
            position,
            apply_inverse,
            apply_root,
            h,
            tau,
        )
    else:
        force = jax.tree.map(lambda a, b: a - tau * b, grad, hvp(pull))
        noise = apply_root(_normal(key_move, position))
        drift = apply_inverse(force)
        position = _langevin(position, drift, noise, h, tau)
    state = state._replace(gradient=gradient, num_steps=state.num_steps + 1)
    return Walker(position, metric_state, state), StepReport(energy, grad, drift, accept_prob)


def _draw_auxiliary(
    key: jax.Array,
    gradient: PyTree,
    mean: PyTree,
    state: AuxiliaryState,
    decay: jax.Array,
    s: jax.Array,
) -> PyTree:
    """V <- m + decay (V - m) + noise, which leaves N(m, s^2 I) invariant.

    The minibatch noise of m reaches V times 1 - decay; the injected variance is smaller by that.
    """

    def one(v: jax.Array, m: jax.Array, xi: jax.Array, total: jax.Array) -> jax.Array:
        known = total / jnp.maximum(state.weight, 1e-30)
        variance = (1 - decay**2) * s**2 - (1 - decay) ** 2 * known
        return m + decay * (v - m) + jnp.sqrt(jnp.maximum(variance, 0.0)) * xi

    return jax.tree.map(one, gradient, mean, _normal(key, mean), state.noise_variance)


def _auxiliary_scale(state: AuxiliaryState, decay: float) -> jax.Array:
    """s, the standard deviation of V given theta.

    In the target the mean square of grad U is tau tr(H) / D, which a chain that starts near a mode
    does not see in its gradients. And the minibatch noise that reaches V must fit into s.
    """
    square = SOFTNESS**2 * jnp.maximum(state.second_moment, jnp.abs(state.curvature))
    known = jnp.stack([jnp.max(c) for c in jax.tree.leaves(state.noise_variance)])
    square = jnp.maximum(square, jnp.max(known).astype(square.dtype) * (1 - decay) / (1 + decay))
    s = jnp.sqrt(square / jnp.maximum(state.weight, 1e-30))
    return jnp.maximum(s, jnp.finfo(s.dtype).tiny ** 0.5)


def _learn_scale(
    state: AuxiliaryState, g: PyTree, trace: jax.Array, part_variance: PyTree, learning: jax.Array
) -> AuxiliaryState:
    """Running means that give s and the noise of m; constant once ``learning`` is over."""
    size = sum(x.size for x in jax.tree.leaves(g))
    rate = 1 - SCALE_DECAY

    def mix(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(learning, old + rate * (new - old), old)

    return state._replace(
        second_moment=mix(state.second_moment, tree_vdot(g, g) / size),
        curvature=mix(state.curvature, trace / size),
        noise_variance=jax.tree.map(mix, state.noise_variance, part_variance),
        weight=mix(state.weight, jnp.ones_like(state.weight)),
    )


def _metropolis(
    rng_key: jax.Array,
    value_and_grad: Callable,
    here: tuple[jax.Array, PyTree],
    position: PyTree,
    apply_inverse: Callable,
    apply_root: Callable,
    h: jax.Array,
    tau: jax.Array | float,
) -> tuple[PyTree, jax.Array]:
    """Langevin proposal in a constant metric, accepted so that exp(-value / tau) is invariant.

    With b the gradient, the noise that would lead back is sqrt(h / 2 tau) A^{1/2} (b + b') - xi:
    neither a determinant nor A^{-1/2} is needed.
    """
    key_move, key_accept = random.split(rng_key)
    value, grad = here
    xi = _normal(key_move, position)
    proposal = _langevin(position, apply_inverse(grad), apply_root(xi), h, tau)
    new_value, new_grad = value_and_grad(proposal)
    both = apply_root(jax.tree.map(jnp.add, grad, new_grad))
    back = jax.tree.map(lambda b, x: jnp.sqrt(h / (2 * tau)) * b - x, both, xi)
    log_ratio = (value - new_value) / tau + (tree_vdot(xi, xi) - tree_vdot(back, back)) / 2
    log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)
    accept_prob = jnp.exp(jnp.minimum(log_ratio, 0.0))
    accepted = random.uniform(key_accept, (), log_ratio.dtype) < accept_prob
    return tree_where(accepted, proposal, position), accept_prob


def _langevin(
    position: PyTree, drift: PyTree, noise: PyTree, h: jax.Array, tau: jax.Array | float
) -> PyTree:
    spread = jnp.sqrt(2 * h * tau)
    return jax.tree.map(
        lambda x, d, w: x - (h * d).astype(x.dtype) + (spread * w).astype(x.dtype),
        position,
        drift,
        noise,
    )


def _linearize(value_and_grad: Callable, position: PyTree) -> tuple[tuple, Callable]:
    """Value and gradient, and the Hessian-vector product, from one pass."""
    pair, tangent = jax.linearize(value_and_grad, position)
    return pair, lambda v: tangent(v)[1]


def _with_hessian(
    value_and_grad: Callable, position: PyTree, kernel: SGRLD, key_probe: jax.Array
) -> tuple[tuple, Callable]:
    """Value and gradient, and ``(metric_state, g, scale) -> Gamma`` on the same minibatch.

    A single probe goes by forward mode, which stores nothing.
    """
    metric = kernel._metric
    if kernel._gamma_estimator == "hutchinson" and kernel._gamma_probes == 1:
        z = probe(key_probe, position)
        pair, (_, hz) = jax.jvp(value_and_grad, (position,), (z,))
        return pair, lambda state, g, scale: divergence_from_probe(
            metric, state, g, z, _scale(scale, hz)
        )
    pair, hvp = _linearize(value_and_grad, position)
    return pair, lambda state, g, scale: divergence(
        metric,
        state,
        g,
        lambda z: _scale(scale, hvp(z)),
        key_probe,
        position,
        num_probes=kernel._gamma_probes,
        estimator=kernel._gamma_estimator,
    )


def _normal(rng_key: jax.Array, like: PyTree) -> PyTree:
    leaves, treedef = jax.tree.flatten(like)
    keys = [rng_key] if len(leaves) == 1 else random.split(rng_key, len(leaves))
    draws = [random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, draws)


def _scale(factor: Any, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: (factor * x).astype(x.dtype), tree)
