"""Stochastic-gradient Riemannian Langevin dynamics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import random
from numpyro.infer import init_to_uniform

from .._checks import check_choice, check_flag, check_int, check_number
from .._start import check_always_noisy
from .._util import tree_normal, tree_scale, tree_vdot, tree_where
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
from ..target.expansion import Expansion
from .auxiliary import auxiliary_scale, auxiliary_step, init_auxiliary
from .langevin import langevin_move, linearize, metropolis
from .noise_correction import (
    SETTLING_STEPS,
    check_noise_correction,
    check_noisy,
    corrected_step,
    init_noise,
    noise_diagonal,
)


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
        gamma: the treatment of Gamma, above; None for the metric's own choice, ``"auxiliary"`` for
            Monge and ``"frozen"`` for all others.
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
        noise_correction: inject less noise where the minibatch gradient brings its own, see
            `numpyro_geom.kernels.noise_correction`. Needs a diagonal metric, an even batch size,
            a temperature above 0 and ``gamma`` ``"frozen"`` or ``"none"``. What noise is
            correlated between coordinates remains, and the automatic step size then counts that
            alone.
        max_norm: where the preconditioned gradient is longer than this, take the step in the
            identity metric scaled to this length instead (a safeguard, not exact).
        expansion: expand matrices W = P V Q, see `numpyro_geom.Expansion`; draws are of W.
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
        gamma: str | None = None,
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
        noise_correction: bool = False,
        max_norm: float | None = None,
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
            bias_tolerance=bias_tolerance,
            control_variate=control_variate,
            anchor_interval=anchor_interval,
            expansion=expansion,
            init_strategy=init_strategy,
        )
        if gamma is None:
            gamma = getattr(self._metric, "default_gamma", "frozen")
        self._gamma = check_choice("gamma", gamma, GAMMA_MODES)
        self._gamma_estimator = check_choice("gamma_estimator", gamma_estimator, GAMMA_ESTIMATORS)
        self._gamma_probes = check_int("gamma_probes", gamma_probes)
        self._adjusted = check_flag("adjusted", adjusted)
        self._max_norm = None if max_norm is None else check_number("max_norm", max_norm, above=0.0)
        if gamma == "auxiliary" and not self._metric.has_auxiliary:
            raise TypeError(
                f"gamma='auxiliary' needs a metric with a method from_gradient, and {metric!r} has "
                "none: add it, or use gamma='frozen'"
            )
        self._noise_correction = check_flag("noise_correction", noise_correction)
        if self._adjusted:
            self._check_adjusted()
        if self._noise_correction:
            self._check_noise_correction()

    def _check_noise_correction(self) -> None:
        check_noise_correction(self._metric, self._batching, self._temperature)
        if self._gamma not in ("frozen", "none"):
            raise ValueError(
                "noise_correction=True needs gamma 'frozen' or 'none', got "
                f"{self._gamma!r}: pass gamma='frozen', or drop noise_correction"
            )
        for name, given in (("adjusted", self._adjusted), ("max_norm", self._max_norm)):
            if given:
                raise ValueError(
                    f"noise_correction=True and {name}={given!r} cannot be combined: drop one"
                )

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
        check_always_noisy(self._schedule, "adjusted=True", ", or drop adjusted")
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
            "noise_correction": self._noise_correction,
            "max_norm": "none" if self._max_norm is None else self._max_norm,
        }

    @property
    def _noise_factor(self) -> float:
        # the drift of "auxiliary" uses two of three parts of the batch
        if self._gamma == "auxiliary":
            return 1.5
        # two evaluations of a stochastic function, where a batch of rows is halved
        return 0.5 if self._noise_correction and self._potential_fn is not None else 1.0

    def _second_order(self, dynamics: PyTree, potential: Potential) -> jax.Array | float:
        if self._gamma != "auxiliary":
            return 0.0
        # the pull of V on theta has the Hessian (H / N)^2 tau / s^2
        s = auxiliary_scale(dynamics, getattr(self._metric, "decay", 0.0))
        return self._temperature / (potential.num_data * s) ** 2

    def _known_noise(self, dynamics: PyTree) -> PyTree | None:
        return noise_diagonal(dynamics) if self._noise_correction else None

    def _settling_steps(self) -> int:
        steps = super()._settling_steps()
        return max(steps, SETTLING_STEPS) if self._noise_correction else steps

    def _check_potential(self, potential: Potential) -> None:
        if self._noise_correction:
            check_noisy(potential, self._plan)
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

    def _init_dynamics(self, position: PyTree, rng_key: jax.Array) -> PyTree:
        if self._noise_correction:
            return init_noise(position)
        if self._gamma != "auxiliary":
            return ()
        return init_auxiliary(position)

    def _learn_metric(
        self, metric_state: PyTree, grad: PyTree, num_data: int, learning: jax.Array
    ) -> PyTree:
        if self._gamma == "frozen":
            return super()._learn_metric(metric_state, grad, num_data, learning)
        return self._metric.update(metric_state, tree_scale(1 / num_data, grad))

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
        args = rng_key, potential, batch, walker, step_size, temperature, learning
        if self._gamma == "auxiliary":
            return auxiliary_step(self._metric, self._adjusted, *args)
        if self._noise_correction:
            return corrected_step(self._metric, self._learn_metric, *args)
        return (_adjusted_step if self._adjusted else _langevin_step)(self, *args)


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
    metric_state = kernel._learn_metric(walker.metric_state, grad, potential.num_data, learning)
    drift = metric.apply_inverse(metric_state, grad)
    noise = metric.apply_inverse_sqrt(metric_state, tree_normal(rng_key, position))
    if with_gamma:
        scale = 1 / potential.num_data
        gamma = gamma_of(metric_state, tree_scale(scale, grad), scale)
        drift = jax.tree.map(lambda d, c: d - factor * tau * c, drift, gamma)
    if kernel._max_norm is not None:
        raw = tree_normal(rng_key, position)
        length = jnp.sqrt(tree_vdot(drift, drift))
        shrink = kernel._max_norm / jnp.sqrt(tree_vdot(grad, grad))
        too_long = ~(length <= kernel._max_norm)
        drift = tree_where(too_long, tree_scale(shrink, grad), drift)
        noise = tree_where(too_long, tree_scale(jnp.sqrt(shrink), raw), noise)
    position = langevin_move(position, drift, noise, h, tau)
    push = h * tree_vdot(grad, drift) / 2
    return Walker(position, metric_state, ()), StepReport(energy, grad, push)


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
    metric_state = kernel._learn_metric(walker.metric_state, grad, potential.num_data, learning)
    position, accept_prob = metropolis(
        rng_key,
        value_and_grad,
        (energy, grad),
        walker.position,
        lambda x: metric.apply_inverse(metric_state, x),
        lambda x: metric.apply_inverse_sqrt(metric_state, x),
        h,
        tau,
    )
    return Walker(position, metric_state, ()), StepReport(
        energy, grad, jnp.zeros_like(energy), accept_prob
    )


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
            metric, state, g, z, tree_scale(scale, hz)
        )
    pair, hvp = linearize(value_and_grad, position)
    return pair, lambda state, g, scale: divergence(
        metric,
        state,
        g,
        lambda z: tree_scale(scale, hvp(z)),
        key_probe,
        position,
        num_probes=kernel._gamma_probes,
        estimator=kernel._gamma_estimator,
    )
