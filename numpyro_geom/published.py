"""Samplers as papers run them: their updates and constants, in this library's units.

To reproduce a paper, and to compare with it. Every function returns a kernel for NumPyro's `MCMC`;
further arguments of the kernel may be given and go before those of the paper. What a paper calls a
step size or a learning rate goes in as the paper has it. Read in each docstring what the law of the
chain is: several are not the posterior, whatever the step. This library's own choices are the
kernels without these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ._checks import check_choice, check_int, check_number
from .algorithms import PXSGHMC, SGHMC, SGNHT, SGRLD
from .baselines.isgd import ISGD
from .kernel import SGKernel
from .metrics import METRICS, Monge, RMSprop, Shampoo
from .metrics.base import MetricLike
from .schedules import cyclical
from .target.expansion import Expansion

KIM_PEAKS = {"SGLD": 1e-5, "pSGLD": 3e-4, "SGHMC": 3e-4, "SGNHT": 3e-4, "PXSGHMC": 1e-4}
"""Peak step sizes of Kim et al., Table 11, for 40,960 rows of CIFAR; that of SGNHT is SGHMC's."""


def yu_2023(
    model: Callable,
    metric: MetricLike = "identity",
    *,
    learning_rate: float,
    num_rows: int,
    alpha2: float = 1.0,
    **settings: Any,
) -> SGRLD:
    """Langevin dynamics of Yu et al. in one of their metrics, without the divergence term.

    Law as the step goes to 0: with a metric that follows the gradient (all but the identity) not
    the posterior; in one dimension the posterior over A. With the decays here A follows an average
    over 100 steps (Monge: 10), so at their steps the law is between that and the posterior.

    Args:
        model: a NumPyro model.
        metric: ``"identity"``, ``"rmsprop"``, ``"wenzel"``, ``"monge"`` or ``"shampoo"`` with their
            constants, or a metric.
        learning_rate: their l, the factor of the gradient of the mean energy: h = l / N.
        num_rows: N, rows in all.
        alpha2: of Monge; theirs is tuned for each network.
        **settings: arguments of `SGRLD`, in place of those here: ``batch_size=100``,
            ``batching="epoch"``, ``num_steps=100``, ``gamma="none"``.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.

    Source: Yu, Hartmann, Williams, Klami, "Scalable Stochastic Gradient Riemannian Langevin
    Dynamics in Non-Diagonal Metrics", TMLR 2023, section 4.1 and appendix A.5. Deviations:
    Shampoo's 1-D sites have the diagonal metric, see `Shampoo`.

    >>> yu_2023(lambda: None, learning_rate=0.05, num_rows=60_000).settings.step_size(0).round(9)
    Array(8.33e-07, dtype=float32)
    """
    check_number("learning_rate", learning_rate, above=0.0)
    check_int("num_rows", num_rows, least=1)
    if isinstance(metric, str) and metric in METRICS:
        special = {"monge": Monge(alpha2=alpha2, decay=0.9), "shampoo": Shampoo(interval=100)}
        metric = special.get(metric, metric)
    arguments: dict[str, Any] = {
        "metric": metric,
        "gamma": "none",
        "step_size": learning_rate / num_rows,
        "batch_size": 100,
        "batching": "epoch",
        "num_steps": 100,
    }
    return SGRLD(model, **arguments | settings)


def rensmeyer_2025(
    model: Callable, *, epsilon: float, decay: float = 0.9, eps: float = 0.1, **settings: Any
) -> SGRLD:
    """Langevin dynamics with the RMSprop metric and the corrected divergence term.

    Law as the step goes to 0: the posterior. With ``gamma="published"`` that of the literature
    before: in one dimension the posterior times A^-decay.

    Args:
        model: a NumPyro model.
        epsilon: their step, h = epsilon / 2.
        decay: their alpha, the memory of the mean squared gradient.
        eps: their lambda, added to its root, in nats per row and unit of the position.
        **settings: arguments of `SGRLD`, in place of those here.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.

    Source: Rensmeyer, Niggemann, "On the Convergence of Locally Adaptive and Scalable
    Diffusion-Based Sampling Methods for Deep Bayesian Neural Network Posteriors", AISTATS 2025,
    section 3.1.
    """
    arguments: dict[str, Any] = {
        "metric": RMSprop(decay=decay, eps=eps),
        "gamma": "corrected",
        "step_size": check_number("epsilon", epsilon, above=0.0) / 2,
    }
    return SGRLD(model, **arguments | settings)


def kim_2025(
    model: Callable,
    sampler: Literal["SGLD", "pSGLD", "SGHMC", "SGNHT", "PXSGHMC"] = "SGHMC",
    *,
    num_rows: int,
    peak: float | None = None,
    friction: float = 100.0,
    steps_per_cycle: int = 5000,
    **settings: Any,
) -> SGKernel:
    """The samplers of Kim et al., with a cosine cycle of steps and a draw at the end of each.

    ======================= ======================================================================
    sampler                 update, with g = grad Uhat, e the step and z standard normal
    ======================= ======================================================================
    ``"SGLD"``              theta - e g + sqrt(2 e) z
    ``"pSGLD"``             theta - e g / s + sqrt(2 e / s) z, with s = sqrt(mean of g^2)
    ``"SGHMC"``             r <- (1 - e c) r - e g + sqrt(2 c e) z, theta + e r
    ``"SGNHT"``             the same with a thermostat that starts at c, of mass 1
    ``"PXSGHMC"``           SGHMC in factors P V Q, with friction 1 on P and Q
    ======================= ======================================================================

    Law: none, as steps vary for ever; at the end of a long cycle about the posterior, that of pSGLD
    like `yu_2023`'s. PXSGHMC changes the prior, see `Expansion` with ``target="factors"``.

    Args:
        model: a NumPyro model.
        sampler: which, above.
        num_rows: N, rows in all.
        peak: their epsilon_0, in the units of the update above; None for that of their Table 11.
        friction: c.
        steps_per_cycle: steps of a cycle and of a draw.
        **settings: arguments of the kernel, in place of those here: ``batch_size=256``,
            ``num_steps=steps_per_cycle``, for PXSGHMC an `Expansion` with a full factor on each
            side and the prior variance 0.02 of all of them.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.

    Source: Kim, Nam, Yun, Yang, Lee, "Parameter Expanded Stochastic Gradient Markov Chain Monte
    Carlo", ICLR 2025, appendix C and Table 11. Deviations: the momentum starts at a draw from its
    law and not at 0; the momentum that moves the thermostat is the new one.

    >>> kim_2025(lambda: None, "SGLD", num_rows=40_960).settings.schedule(0)
    Array(1.e-05, dtype=float32)
    """
    check_choice("sampler", sampler, tuple(KIM_PEAKS))
    check_int("num_rows", num_rows, least=1)
    peak = check_number("peak", KIM_PEAKS[sampler] if peak is None else peak, above=0.0)
    check_int("steps_per_cycle", steps_per_cycle, least=1)
    # of pSGLD: A here is of the gradient per row
    units = num_rows if sampler == "pSGLD" else 1
    arguments: dict[str, Any] = {
        "step_size": cyclical(peak / units, steps_per_cycle),
        "num_steps": steps_per_cycle,
        "batch_size": 256,
    }
    if sampler in ("SGLD", "pSGLD"):
        if sampler == "pSGLD":
            arguments |= {"metric": RMSprop(decay=0.99), "gamma": "none"}
        return SGRLD(model, **arguments | settings)
    arguments |= {"integrator": "euler", "friction": friction}
    if sampler == "SGHMC":
        return SGHMC(model, **arguments | settings)
    if sampler == "SGNHT":
        return SGNHT(model, **arguments | {"thermostat_mass": 1.0} | settings)
    scale = 0.02**0.5
    expansion = Expansion(
        target="factors",
        biases=("kernel", "bias"),
        factor_friction=1 / friction,
        prior_scale=scale,
        factor_prior_scale=scale,
    )
    return PXSGHMC(model, **arguments | {"expansion": expansion} | settings)


def franzese_2021(model: Callable, **settings: Any) -> ISGD:
    """I-SGD with the settings of the regression experiments.

    Law: about the posterior at the temperature 0.01 where gradient noise is as `ISGD` describes.

    Args:
        model: a NumPyro model.
        **settings: arguments of `ISGD`, in place of those here: ``batch_size=64``,
            ``num_steps=1000``, ``temperature=0.01``. Their chains start from 20,000 steps of Adam
            with the rate 0.01: `train`.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.

    Source: Franzese, Milios, Filippone, Michiardi, "A Scalable Bayesian Sampling Method Based on
    Stochastic Gradient Descent Isotropization", Entropy 2021, appendix C.1.
    """
    arguments: dict[str, Any] = {"batch_size": 64, "num_steps": 1000, "temperature": 0.01}
    return ISGD(model, **arguments | settings)
