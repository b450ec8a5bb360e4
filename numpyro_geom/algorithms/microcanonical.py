"""Microcanonical Langevin dynamics: a momentum of constant length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from numpyro.infer import init_to_uniform

from .. import _random
from .._checks import check_flag
from .._util import PyTree, tree_scale, tree_size, tree_vdot
from ..kernel import SGKernel
from ..metrics.base import MetricLike
from ..sampling.algorithm import NEWTON, Algorithm, Motion, settling_steps
from ..sampling.settings import Settings
from .ggmc import trajectory_algorithm
from .momentum import init_momentum, momentum_algorithm
from .sghmc import baoab_step


class Microcanonical(SGKernel):
    """Microcanonical Langevin dynamics with minibatch gradients.

    The momentum has the constant length |p|^2 = tau D, and gradients turn its direction
    u = p / |p|. So a chain moves at constant speed, and a place of large gradients does not throw
    it out. One step, with g = A^{1/2} grad Uhat, e = - g / |g|, z = exp(-q),
    q = h (D / tau)^{1/2} |g| / (D - 1), a = u . e and xi standard normal::

        u <- [e (1 - z) (1 + z + a (1 - z)) + 2 z u] / |...|      (the exact flow for a time h)
        theta <- theta + (h / 2) A^{1/2} p
        p <- c p + sqrt((1 - c^2) tau) xi,  scaled to its length,    c = exp(-gamma h)
        theta <- theta + (h / 2) A^{1/2} p

    Invariant distribution as h -> 0: exp(-U / tau) for theta, and a uniform direction. At a finite
    h it is biased as `SGHMC` is, and ``"auto"`` uses the same rules. For large D its dynamics are
    those of `SGHMC`, except where gradients are large. With ``adjusted=True`` a draw is a
    trajectory with the acceptance test of `GGMC`: it is exact, with minibatches too.

    Choose it for networks and other targets with stiff places. On posteriors that are about normal
    it does what `SGHMC` does. Cost per step: one minibatch gradient.

    Args:
        step_size: ``"auto"``, a number h, or a schedule. The step size of most other programs is
            the length of a step, h (tau D)^{1/2}.
        friction: gamma in units of 1 / h, or ``"auto"``. The chain forgets its direction over the
            length (tau D)^{1/2} / gamma.
        adjusted: whether a draw is a trajectory with an acceptance test.
        temperature: tau, above 0.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range, and for a model with one parameter, where there is no
            direction to turn.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_geom import Microcanonical
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10).expand([2]).to_event(1))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[i])
        >>> y = 3 + jax.random.normal(jax.random.key(0), (1000, 2))
        >>> mcmc = MCMC(Microcanonical(model), num_warmup=200, num_samples=200, progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> bool(abs(mcmc.get_samples()["mu"].mean() - 3) < 0.2)
        True

    References:
        Robnik, De Luca, Silverstein, Seljak, "Microcanonical Hamiltonian Monte Carlo", JMLR 2023;
        Robnik, Seljak, "Fluctuation without dissipation: Microcanonical Langevin Monte Carlo", 2024
        (the dynamics). Robnik, Cohn-Gordon, Seljak, "Metropolis adjusted microcanonical Hamiltonian
        Monte Carlo", 2025 (the acceptance test). Deviations: the momentum is refreshed between two
        half-steps of the position, so that a step needs one gradient; h and gamma are those of
        `SGHMC`; the acceptance test takes a trajectory with partial refreshments and minibatches.
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        potential_fn: Callable | None = None,
        metric: MetricLike = "identity",
        friction: float | Literal["auto"] = "auto",
        step_size: float | Callable | Literal["auto"] = "auto",
        adjusted: bool = False,
        batch_size: int | Mapping[str, int] | Literal["auto"] | None = "auto",
        num_steps: int | Literal["auto"] = "auto",
        temperature: float = 1.0,
        batching: Literal["replacement", "stratified", "epoch"] = "replacement",
        bias_tolerance: float = 0.1,
        control_variate: bool | int | Literal["auto"] = "auto",
        dense_mass: bool | Sequence | Literal["auto", "structured", "low_rank"] | None = "auto",
        inverse_mass_matrix: Any = None,
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        super().__init__(locals(), {"adjusted": check_flag}, divergence="frozen")
        if self.settings.temperature == 0:
            raise ValueError(
                "temperature must be above 0 with Microcanonical, got 0: its momentum would have "
                "no length. Use SGHMC(temperature=0) for a damped descent"
            )

    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings."""
        if settings.adjusted:
            return trajectory_algorithm(settings, motion=CONSTANT_LENGTH)
        return momentum_algorithm(
            settings,
            baoab_step(settings, CONSTANT_LENGTH),
            init=lambda position, key: init_momentum(settings, position, key, (), CONSTANT_LENGTH),
            settling_steps=settling_steps(settings.metric),
            motion=CONSTANT_LENGTH,
        )


def _of_length(p: PyTree, tau: Any) -> PyTree:
    """A momentum with |p|^2 = tau D; zero stays zero."""
    squared = tree_vdot(p, p)
    tiny = jnp.finfo(squared.dtype).tiny
    return tree_scale(jnp.sqrt(tau * tree_size(p) / jnp.maximum(squared, tiny)), p)


def _drawn(rng_key: jax.Array, like: PyTree, tau: Any) -> PyTree:
    if tree_size(like) < 2:
        raise ValueError(
            "Microcanonical turns a direction, and the model has one parameter: expected two or "
            "more. Use SGHMC, or GGMC for exact draws"
        )
    return _of_length(_random.tree_normal(rng_key, like), tau)


def _turned(p: PyTree, force: PyTree, h: Any, tau: Any) -> tuple[PyTree, jax.Array]:
    """The exact flow of the direction under a constant force, and - tau log of its Jacobian."""
    size, info = tree_size(p), jnp.finfo(jnp.result_type(*jax.tree.leaves(p)))
    tiny = info.tiny
    length = jnp.sqrt(jnp.maximum(tree_vdot(p, p), tiny))
    r = jnp.sqrt(jnp.maximum(tree_vdot(force, force), tiny))
    a = -tree_vdot(p, force) / (length * r)
    q = h * (tau * size) ** 0.5 * r / (tau * (size - 1))
    z, lost = jnp.exp(-q), -jnp.expm1(-q)
    towards, kept = -lost * (1 + z + a * lost) / r, 2 * z / length
    new = jax.tree.map(lambda x, f: (kept * x + towards * f).astype(x.dtype), p, force)
    # (1 + a + (1 - a) z^2) / 2, without cancellation
    work = q + jnp.log1p(jnp.maximum((1 - a) / 2 * jnp.expm1(-2 * q), info.eps - 1))
    return _of_length(new, tau), tau * (size - 1) * work


def _refreshed(p: PyTree, normal: PyTree, damping: Any, tau: Any) -> PyTree:
    return _of_length(NEWTON.refresh(p, normal, damping, tau), tau)


CONSTANT_LENGTH = Motion(_drawn, _turned, _refreshed)
"""A momentum with a uniform direction and the length (tau D)^{1/2}."""
