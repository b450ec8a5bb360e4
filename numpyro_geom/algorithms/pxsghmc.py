"""Parameter-expanded stochastic-gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from numpyro.infer import init_to_uniform

from ..kernel import SGKernel
from ..metrics.base import MetricLike
from ..model.expansion import Expansion
from ..sampling.algorithm import Algorithm
from ..sampling.settings import Settings
from .momentum import check_frozen
from .sghmc import check, sghmc


class PXSGHMC(SGKernel):
    """Parameter-expanded `SGHMC`: the same kernel with matrices expanded by default.

    With the default ``Expansion(target="posterior")`` its invariant law is that of `SGHMC`.

    Args:
        model: a NumPyro model with a matrix among its latent sites.
        potential_fn: replaces the model: ``potential_fn(z)`` or ``potential_fn(z, rng_key)``.
        expansion: what to expand, see `numpyro_geom.Expansion`. None takes its defaults: one full
            factor on each side of every matrix and convolution kernel.
        metric: see `SGHMC`.
        friction: see `SGHMC`.
        integrator: see `SGHMC`.
        gamma: ``"frozen"``, the only choice.
        step_size: see `SGHMC`.
        batch_size: see `SGHMC`.
        num_steps: see `SGHMC`.
        temperature: see `SGHMC`.
        batching: see `SGHMC`.
        bias_tolerance: see `SGHMC`.
        control_variate: see `SGHMC`.
        anchor_interval: see `SGHMC`.
        noise_correction: see `SGHMC`.
        max_norm: see `SGHMC`.
        init_strategy: see `SGHMC`.
        constrained_init: see `SGHMC`.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.

    Examples:
        >>> from numpyro_geom import PXSGHMC
        >>> PXSGHMC(lambda: None, step_size=0.1).settings.integrator
        'baoab'

    References:
        Kim, Nam, Yun, Yang, Lee, "Parameter Expanded Stochastic Gradient Markov Chain Monte
        Carlo", ICLR 2025. Deviations: see `numpyro_geom.Expansion`.
    """

    def __init__(
        self,
        model: Callable | None = None,
        *,
        potential_fn: Callable | None = None,
        metric: MetricLike = "identity",
        friction: float | Literal["auto"] = "auto",
        integrator: Literal["baoab", "euler"] = "baoab",
        gamma: Literal["frozen"] = "frozen",
        step_size: float | Callable | Literal["auto"] = "auto",
        batch_size: int | Mapping[str, int] | None = None,
        num_steps: int | Literal["auto"] = "auto",
        temperature: float = 1.0,
        batching: Literal["replacement", "stratified", "epoch"] = "replacement",
        bias_tolerance: float = 0.1,
        control_variate: bool = False,
        anchor_interval: int | None = None,
        noise_correction: bool = False,
        max_norm: float | None = None,
        expansion: Expansion | None = None,
        init_strategy: Callable = init_to_uniform,
        constrained_init: bool = False,
    ) -> None:
        expansion = Expansion() if expansion is None else expansion
        check_frozen("PXSGHMC", gamma)
        super().__init__(locals())
        check(self.settings)

    def algorithm(self, settings: Settings) -> Algorithm:
        """The algorithm for these settings: the algorithm of `SGHMC`."""
        return sghmc(settings)
