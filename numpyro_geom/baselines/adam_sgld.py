"""Langevin dynamics with Adam's direction as an additional drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.infer import init_to_uniform

from .. import _random
from .._checks import check_number, check_share
from .._util import tree_vdot
from ..algorithms.langevin import langevin_move
from ..kernel import PyTree, SGKernel
from ..model.potential import Potential
from ..sampling.algorithm import MAX_NUM_STEPS, Algorithm, Step, langevin_algorithm
from ..sampling.settings import Settings, positive
from ..sampling.state import Chain, StepReport


class AdamState(NamedTuple):
    """Adam's two moments. Both start at 0, without Adam's correction for this start.

    Attributes:
        mean: m, the running mean of g, a pytree like the position.
        square: V, the running mean of g * g, a pytree like the position.
    """

    mean: PyTree
    square: PyTree


class AdamSGLD(SGKernel):
    """Langevin dynamics with an adaptive drift towards modes. Biased: for comparison only.

    One step, with g = grad Uhat / N, xi standard normal and a = ``drift``::

        m <- mean_decay m + (1 - mean_decay) g,    V <- square_decay V + (1 - square_decay) g * g
        theta' = theta - h (grad Uhat + a m / (sqrt(V) + eps)) + sqrt(2 h tau) xi

    Invariant distribution: NOT exp(-U / tau), at any step size, but a law that is too narrow: in
    one dimension as h -> 0 the target times the exponential of -(a / tau) times the integral of
    u' / (abs(u') + eps), u = U / N. The added drift is at most about a, in nats per unit. It
    matters where grad U is not much larger than a, for any N.

    Choose `AdamSGLD` to reproduce the literature. To sample the posterior use `SGRLD`. With
    ``drift=0`` both agree if `SGRLD` has the identity metric. Cost per step: one minibatch
    gradient. Memory: two copies of the position.

    Args:
        drift: factor a of the added drift, in nats per unit of the position, at least 0.
        mean_decay: memory of m, in [0, 1).
        square_decay: memory of V, in [0, 1).
        eps: added to sqrt(V), in nats per row and unit of the position; above 0.
        step_size: ``"auto"``, a number h, or a schedule. ``"auto"`` is the step of the identity
            metric and ignores the added drift. At a mode the slope of that drift is up to
            a H / (N eps), so the chain may jump to and fro there in steps of length h a.
        batch_size: rows per step: an int, a dict plate -> int, or None for all rows.
        bias_tolerance: relative error of the variances that ``"auto"`` may cause, in addition to
            the error from the added drift.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from numpyro_geom.baselines import AdamSGLD
        >>> kernel = AdamSGLD(potential_fn=lambda z: z @ z / 2, step_size=0.05, num_steps=50)
        >>> mcmc = MCMC(kernel, num_warmup=10, num_samples=1000, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), init_params=jnp.zeros(5))
        >>> bool(mcmc.get_samples().var() < 0.75)  # the target's is 1
        True

    References:
        Kim, Song, Liang, "Stochastic Gradient Langevin Dynamics with Adaptive Drifts", 2020
        (arXiv 2009.09535): the sampler and the defaults 0.9, 0.999, 1e-8, without corrections for
        the start of the moments. Rensmeyer, Niggemann, "On the Convergence of Locally Adaptive and
        Scalable Diffusion-Based Sampling Methods for Deep Bayesian Neural Network Posteriors",
        AISTATS 2025, Eqs. 28 to 35 (this form, with eps outside the root, and the law; their step
        size is 2h). Deviation: m and V are built from g = grad Uhat / N, like all statistics here,
        so that ``eps`` does not depend on N.
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        potential_fn: Callable | None = None,
        drift: float = 1.0,
        mean_decay: float = 0.9,
        square_decay: float = 0.999,
        eps: float = 1e-8,
        step_size: float | Callable | Literal["auto"] = "auto",
        batch_size: int | Mapping[str, int] | None = None,
        num_steps: int | Literal["auto"] = "auto",
        temperature: float = 1.0,
        batching: Literal["replacement", "stratified", "epoch"] = "replacement",
        bias_tolerance: float = 0.1,
        control_variate: bool = False,
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        super().__init__(
            locals(),
            {
                "drift": partial(check_number, least=0.0),
                "mean_decay": check_share,
                "square_decay": check_share,
                "eps": positive,
            },
        )

    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings."""
        memory = 1 / (1 - max(settings.mean_decay, settings.square_decay))
        settling = min(MAX_NUM_STEPS, round(2 * memory))

        def init(position: PyTree, _: jax.Array) -> AdamState:
            zeros = jax.tree.map(jnp.zeros_like, position)
            return AdamState(zeros, zeros)

        return langevin_algorithm(
            settings,
            _step(settings),
            init=init,
            settling_steps=settling if settings.drift > 0 else 1,
        )


def _step(settings: Settings) -> Step:
    """One step."""

    def step(
        rng_key: jax.Array,
        potential: Potential,
        batch: Any,
        chain: Chain,
        step_size: jax.Array,
        temperature: jax.Array | float,
        learning: jax.Array,
    ) -> tuple[Chain, StepReport]:
        grad = jax.grad(potential.energy)(chain.position, batch)
        g = jax.tree.map(lambda x: x / potential.num_data, grad)
        old = chain.dynamics
        moments = AdamState(
            mean=_average(settings.mean_decay, old.mean, g),
            square=_average(settings.square_decay, old.square, jax.tree.map(jnp.square, g)),
        )
        drift = jax.tree.map(
            lambda x, m, v: x + settings.drift * m / (jnp.sqrt(v) + settings.eps),
            grad,
            moments.mean,
            moments.square,
        )
        noise = _random.tree_normal(rng_key, chain.position)
        position = langevin_move(chain.position, drift, noise, step_size, temperature)
        squared_drift = step_size * tree_vdot(grad, drift) / 2
        return Chain(position, chain.metric_state, moments), StepReport(grad, squared_drift)

    return step


def _average(decay: float, average: PyTree, new: PyTree) -> PyTree:
    return jax.tree.map(lambda v, x: (decay * v + (1 - decay) * x).astype(v.dtype), average, new)
