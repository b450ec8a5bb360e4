"""Stochastic-gradient Riemannian Langevin dynamics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from numpyro.infer import init_to_uniform

from .._checks import check_choice
from .._start import check_always_noisy
from ..algorithm import Algorithm, Facts, Noise, Step, langevin_rule, metric_learner
from ..gamma import GAMMA_ESTIMATORS, GAMMA_MODES
from ..kernel import PyTree, SGKernel
from ..metrics.base import MetricLike
from ..metrics.by_site import BySite
from ..repeat import repeat
from ..settings import Settings
from ..target.expansion import Expansion
from ..target.potential import Potential
from ..warmup.timetable import settling_steps
from .auxiliary import auxiliary_scale, auxiliary_step, init_auxiliary
from .langevin import adjusted_step, langevin_step
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
        metric: ``"identity"``, ``"rmsprop"``, ``"wenzel"``, ``"monge"``, ``"shampoo"``, an
            object, or a dict of them by patterns of site names, see `numpyro_geom.metrics`.
        gamma: the treatment of Gamma, above; None for the metric's own choice, ``"auxiliary"`` for
            a Monge metric with a given alpha2 and ``"frozen"`` for all others.
        step_size: ``"auto"``, a number h, or a schedule.
        batch_size: rows a step, an int, a dict plate -> int, or None for all rows. ``"auto"``: all
            rows of up to 2,048, of more the number that promises most, see
            `numpyro_geom.warmup.choice`. All rows also where the model cannot be subsampled and
            where ``step_size`` is given.
        num_steps: steps between two draws, or ``"auto"`` for half a relaxation time.
        temperature: tau, at least 0.
        batching: ``"replacement"``, ``"stratified"`` or ``"epoch"``.
        gamma_estimator: ``"hutchinson"`` (random probes) or ``"exact"`` (all unit vectors, for
            few dimensions).
        gamma_probes: probes that are averaged.
        adjusted: add the Metropolis test.
        bias_tolerance: relative error of the variances that ``"auto"`` may cause.
        control_variate: correct minibatch gradients by those at an anchor, where the gradient of
            all rows is known. Two minibatch gradients a step, and far less noise. ``"auto"``: where
            coordinates are scaled and the noise that is measured with it and without says so.
        anchor_interval: steps between two moves of the anchor to the chain's own position, each a
            pass over all rows, for targets with several modes; None leaves the anchor where
            warm-up found the middle of the target.
        noise_correction: inject less noise where the minibatch gradient brings its own, see
            `numpyro_geom.algorithms.noise_correction`. Needs a diagonal metric, an even batch size,
            a temperature above 0 and ``gamma`` ``"frozen"`` or ``"none"``. What noise is
            correlated between coordinates remains, and the automatic step size then counts that
            alone.
        max_norm: where the preconditioned gradient is longer than this, take the step in the
            identity metric scaled to this length instead (a safeguard, not exact).
        expansion: expand matrices W = P V Q, see `numpyro_geom.Expansion`; draws are of W.
        dense_mass: move in coordinates in which the posterior is about as wide in all directions,
            learned in warm-up: True for any directions, False for those of the parameters, tuples
            of names of sites for any directions of these together, None for the parameters as they
            are (unless a matrix is given). ``"auto"``, under ``step_size="auto"``: True up to 256
            dimensions; beyond, False with the identity metric and None with another. The metric and
            h are those of these coordinates.
        inverse_mass_matrix: the scale to start from, shape (D,) or (D, D), as `numpyro.infer.NUTS`
            has it, sites in the order of their names, or a dict of these by tuples of sites; None
            for the inverse Hessian where the search ended, beyond 256 dimensions its diagonal.
        adapt_mass_matrix: whether warm-up learns the scale from its draws.
        init_strategy: NumPyro's, where the chains start.
        constrained_init: whether ``init_params`` are in the supports of sites, as draws are.

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
        metric: MetricLike = "identity",
        gamma: Literal["corrected", "published", "none", "frozen", "auxiliary"] | None = None,
        step_size: float | Callable | Literal["auto"] = "auto",
        batch_size: int | Mapping[str, int] | Literal["auto"] | None = "auto",
        num_steps: int | Literal["auto"] = "auto",
        temperature: float = 1.0,
        batching: Literal["replacement", "stratified", "epoch"] = "replacement",
        gamma_estimator: Literal["hutchinson", "exact"] = "hutchinson",
        gamma_probes: int = 1,
        adjusted: bool = False,
        bias_tolerance: float = 0.1,
        control_variate: bool | Literal["auto"] = "auto",
        anchor_interval: int | None = None,
        noise_correction: bool = False,
        max_norm: float | None = None,
        expansion: Expansion | None = None,
        dense_mass: bool | Sequence | Literal["auto"] | None = "auto",
        inverse_mass_matrix: Any = None,
        adapt_mass_matrix: bool = True,
        init_strategy: Callable = init_to_uniform,
        constrained_init: bool = False,
    ) -> None:
        super().__init__(locals())
        _check(self.settings)

    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings."""
        metric, auxiliary = settings.metric, settings.gamma == "auxiliary"
        facts = Facts(
            adjusted=settings.adjusted,
            settling_steps=settling_steps(
                metric, SETTLING_STEPS if settings.noise_correction else 1
            ),
        )
        noise = Noise()
        if auxiliary:
            # the drift uses two of three parts of the batch
            noise = Noise(factor=1.5, second_order=_pull(settings))
        elif settings.noise_correction:
            # two evaluations of a stochastic function, where a batch of rows is halved
            factor = 0.5 if settings.model is None else 1.0
            noise = Noise(factor=factor, known=noise_diagonal)

        def init(position: PyTree, _: jax.Array) -> PyTree:
            if settings.noise_correction:
                return init_noise(position)
            return init_auxiliary(position) if auxiliary else ()

        return Algorithm(
            init=init,
            draw=repeat(_step(settings), settings, facts),
            rule=langevin_rule(settings, adjusted=settings.adjusted, noise=noise),
            facts=facts,
            check=lambda potential, plan: _check_potential(settings, potential, plan),
        )


def _step(settings: Settings) -> Step:
    """The step that the settings ask for: each is a gradient, a metric and a move."""
    learn = metric_learner(settings.metric, frozen=settings.gamma == "frozen")
    if settings.gamma == "auxiliary":
        return auxiliary_step(settings.metric, settings.adjusted)
    if settings.noise_correction:
        return corrected_step(settings.metric, learn)
    if settings.adjusted:
        return adjusted_step(settings.metric, learn)
    return langevin_step(settings, learn)


def _pull(settings: Settings) -> Callable:
    """The pull of V on theta has the Hessian (H / N)^2 tau / s^2; its factor of H^2."""

    def second_order(dynamics: PyTree, potential: Potential) -> jax.Array:
        s = auxiliary_scale(dynamics, settings.metric.decay)
        return settings.temperature / (potential.num_data * s) ** 2

    return second_order


def _check(settings: Settings) -> None:
    """Raise for combinations that have no invariant law."""
    gamma, metric = settings.gamma, settings.metric
    check_choice("gamma", gamma, GAMMA_MODES)
    check_choice("gamma_estimator", settings.gamma_estimator, GAMMA_ESTIMATORS)
    if gamma == "auxiliary" and not metric.has_auxiliary:
        raise TypeError(
            f"gamma='auxiliary' needs a metric with a method from_gradient, and {metric!r} has "
            "none: add it, or use gamma='frozen'"
        )
    if gamma == "published" and isinstance(metric, BySite):
        raise ValueError(
            "gamma='published' multiplies Gamma by 1 - decay, and metrics by site have one each: "
            "use gamma='corrected', or one metric for all sites"
        )
    if gamma == "auxiliary" and settings.batching == "stratified":
        raise ValueError(
            "gamma='auxiliary' splits a batch in three, and a part of a stratified one is not from "
            "all rows: expected batching='replacement' or 'epoch'"
        )
    if settings.adjusted:
        _check_adjusted(settings)
    if not settings.noise_correction:
        return
    check_noise_correction(settings)
    if gamma not in ("frozen", "none"):
        raise ValueError(
            "noise_correction=True needs gamma 'frozen' or 'none', got "
            f"{gamma!r}: pass gamma='frozen', or drop noise_correction"
        )
    for name in ("adjusted", "max_norm"):
        if getattr(settings, name):
            raise ValueError(
                f"noise_correction=True and {name}={getattr(settings, name)!r} cannot be "
                "combined: drop one"
            )


def _check_adjusted(settings: Settings) -> None:
    if settings.gamma not in ("frozen", "auxiliary"):
        raise ValueError(
            "adjusted=True needs a metric that is constant within a step: expected gamma "
            f"'frozen' or 'auxiliary', got {settings.gamma!r}"
        )
    if settings.batch_size not in (None, "auto"):
        raise ValueError(
            "adjusted=True needs the full-data energy: drop batch_size, or drop adjusted"
        )
    if settings.temperature == 0:
        raise ValueError("adjusted=True needs temperature > 0, got 0: nothing to test against")
    check_always_noisy(settings.schedule, "adjusted=True", ", or drop adjusted")
    if settings.max_norm is not None:
        raise ValueError("adjusted=True makes max_norm unnecessary: pass only one of the two")


def _check_potential(settings: Settings, potential: Potential, plan: Any) -> None:
    if settings.noise_correction:
        check_noisy(potential, plan)
    if settings.adjusted and not potential.deterministic:
        raise ValueError(
            "adjusted=True needs the full-data energy, and the model subsamples its rows (or "
            "potential_fn takes a key): use all rows, or drop adjusted"
        )
    if settings.gamma == "auxiliary" and plan is not None:
        small = {p: b for p, b in plan.batch_sizes.items() if b < 3}
        if small:
            raise ValueError(
                f"gamma='auxiliary' splits a batch in three, and these are smaller: {small}. "
                "Expected batch_size of at least 3"
            )
