"""Stochastic-gradient Riemannian Langevin dynamics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from numpyro.infer import init_to_uniform

from .._checks import check_choice
from .._start import check_always_noisy
from ..kernel import PyTree, SGKernel
from ..metrics.base import MetricLike
from ..metrics.by_site import BySite
from ..model.expansion import Expansion
from ..model.potential import Potential
from ..sampling.algorithm import Algorithm, Facts, Noise, Step, langevin_rule, metric_learner
from ..sampling.gamma import GAMMA_ESTIMATORS, GAMMA_MODES
from ..sampling.repeat import repeat
from ..sampling.settings import Settings
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

    The invariant distribution as h -> 0 depends on ``gamma``:

    - ``"frozen"``: exp(-U / tau). The metric adapts in warm-up only. Then A is constant.
    - ``"auxiliary"``: exp(-U / tau), at any decay. A is a function of an auxiliary gradient V
      that is part of the chain, so no Gamma is needed. The step needs second derivatives of U.
    - ``"corrected"``: exp(-U / tau). A moves with theta, and Gamma is the divergence of A. h must
      be so small that the running statistics follow theta.
    - ``"published"``: Gamma is scaled by 1 - decay, as in most papers. This is biased: in one
      dimension the law is p A^{-decay}. Use it only to reproduce the literature.
    - ``"none"``: no Gamma. This is biased: in one dimension the law is p / A. Use it only to
      reproduce the literature.

    At a finite h, discretisation and minibatch noise inflate the variances. With
    ``step_size="auto"`` the inflation is about ``bias_tolerance``. With ``adjusted=True`` a
    Metropolis test makes the law exact at any h. This test needs all rows at every step, and
    ``gamma`` ``"frozen"`` or ``"auxiliary"``.

    Choose `SGRLD` for models with more rows than a full gradient can take, or as the baseline for
    comparisons with other kernels. Cost per step: one minibatch gradient. ``"corrected"``,
    ``"published"`` and ``"auxiliary"`` add one Hessian-vector product.

    Args:
        model: a NumPyro model with continuous latent sites.
        potential_fn: replaces the model: ``potential_fn(z)`` or ``potential_fn(z, rng_key)``.
        metric: ``"identity"``, ``"rmsprop"``, ``"wenzel"``, ``"monge"``, ``"shampoo"``, a metric
            object, or a dict from patterns of site names to metrics, see `numpyro_geom.metrics`.
        gamma: the treatment of Gamma, see above. None takes the metric's own choice:
            ``"auxiliary"`` for a Monge metric with a given alpha2, ``"frozen"`` for all others.
        step_size: ``"auto"``, a number h, or a schedule.
        batch_size: rows per step: an int, a dict plate -> int, or None for all rows. ``"auto"``
            takes all rows up to 2,048 rows. Above 2,048 rows it takes the most promising number,
            see `numpyro_geom.warmup.choice`. ``"auto"`` also takes all rows if the model cannot
            be subsampled or if ``step_size`` is given.
        num_steps: steps between two draws, or ``"auto"`` for half a relaxation time.
        temperature: tau, at least 0.
        batching: ``"replacement"``, ``"stratified"`` or ``"epoch"``.
        gamma_estimator: ``"hutchinson"`` (random probes) or ``"exact"`` (all unit vectors, for
            few dimensions).
        gamma_probes: number of probes whose results are averaged.
        adjusted: whether to add the Metropolis test.
        bias_tolerance: relative error of the variances that ``"auto"`` may cause.
        control_variate: whether to correct minibatch gradients by those at an anchor, where the
            gradient of all rows is known. This takes two minibatch gradients per step and gives
            far less noise. ``"auto"`` uses it if coordinates are scaled and the noise, measured
            with and without the control variate, favours it.
        anchor_interval: steps between two moves of the anchor to the chain's own position, for
            targets with several modes. Each move is a pass over all rows. None leaves the anchor
            where warm-up found the middle of the target.
        noise_correction: whether to inject less noise where the minibatch gradient brings its
            own, see `numpyro_geom.algorithms.noise_correction`. This needs a diagonal metric, an
            even batch size, a temperature above 0 and ``gamma`` ``"frozen"`` or ``"none"``. Noise
            that is correlated between coordinates remains. The automatic step size then counts
            only this remaining noise.
        max_norm: longest preconditioned gradient. If it is longer, the step uses the identity
            metric, scaled to this length. This is a safeguard and not exact.
        expansion: expand matrices W = P V Q, see `numpyro_geom.Expansion`. Draws are of W.
        dense_mass: how warm-up learns scaled coordinates, in which the posterior is about equally
            wide in all directions. The metric and h refer to the scaled coordinates. True scales
            any directions. False scales each parameter by itself. Tuples of site names scale any
            directions of the sites of a tuple together. None leaves the parameters as they are
            (unless a matrix is given). ``"auto"`` applies under ``step_size="auto"``: it means
            True up to 256 dimensions; beyond, False with the identity metric and None with
            another metric.
        inverse_mass_matrix: the scale to start from, shape (D,) or (D, D), as in
            `numpyro.infer.NUTS`, with sites in the order of their names; or a dict from tuples of
            sites to such arrays. None takes the inverse Hessian where the search ended; beyond
            256 dimensions it takes the inverse Hessian's diagonal.
        adapt_mass_matrix: whether warm-up learns the scale from its draws.
        init_strategy: NumPyro's strategy for where the chains start.
        constrained_init: whether ``init_params`` are in the supports of the sites, as draws are.

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
        in Non-Diagonal Metrics", TMLR 2023, Eq. 3 (the step; the paper leaves Gamma out).
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
            # two evaluations of a stochastic function, but two halves of a batch of rows
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
    """The step that the settings ask for: a gradient, a metric and a move."""
    learn = metric_learner(settings.metric, frozen=settings.gamma == "frozen")
    if settings.gamma == "auxiliary":
        return auxiliary_step(settings.metric, settings.adjusted)
    if settings.noise_correction:
        return corrected_step(settings.metric, learn)
    if settings.adjusted:
        return adjusted_step(settings.metric, learn)
    return langevin_step(settings, learn)


def _pull(settings: Settings) -> Callable:
    """Return the factor of H^2 in (H / N)^2 tau / s^2, the Hessian of V's pull on theta."""

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
            "gamma='published' multiplies Gamma by 1 - decay, and each metric by site has a decay "
            "of its own: use gamma='corrected', or one metric for all sites"
        )
    if gamma == "auxiliary" and settings.batching == "stratified":
        raise ValueError(
            "gamma='auxiliary' splits a batch in three, and a part of a stratified batch does "
            "not represent all rows: expected batching='replacement' or 'epoch'"
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
