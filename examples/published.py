"""Samplers with the updates and constants of papers, in this library's units.

Use them to reproduce a paper, and to compare with it. Every function returns a kernel for NumPyro's
`MCMC`. Further arguments of the kernel replace the paper's. A step size or learning rate is given
in the paper's own units. Each docstring states the law of the chain: several laws are not the
posterior at any step size. For this library's own choices use the kernels without these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from numpyro import handlers

from numpyro_geom import (
    SGHMC,
    SGNHT,
    SGRLD,
    Expanded,
    Monge,
    RMSprop,
    SGKernel,
    Shampoo,
    cyclical,
)
from numpyro_geom.baselines import ISGD

KIM_PEAKS = {"SGLD": 1e-5, "pSGLD": 3e-4, "SGHMC": 3e-4, "SGNHT": 3e-4, "PXSGHMC": 1e-4}
"""Peak step sizes of Kim et al., Table 11, for 40,960 rows of CIFAR; for SGNHT as for SGHMC."""


def yu_2023(
    model: Callable,
    metric: Any = "identity",
    *,
    learning_rate: float,
    num_rows: int,
    alpha2: float = 1.0,
    **settings: Any,
) -> SGRLD:
    """Langevin dynamics of Yu et al. in one of their metrics, without the divergence term.

    Law as the step goes to 0: with a metric that follows the gradient (all except the identity) it
    is not the posterior; in one dimension it is the posterior over A. With the decays here A
    follows an average over 100 steps (Monge: 10). So at the paper's steps the law is between this
    law and the posterior.

    Args:
        model: a NumPyro model.
        metric: ``"identity"``, ``"rmsprop"``, ``"wenzel"``, ``"monge"`` or ``"shampoo"`` with the
            paper's constants, or a metric.
        learning_rate: the paper's l, the factor of the gradient of the mean energy: h = l / N.
        num_rows: N, the number of all rows.
        alpha2: alpha2 of Monge; the paper tunes it for each network.
        **settings: arguments of `SGRLD`, which replace those here: ``batch_size=100``,
            ``batching="epoch"``, ``num_steps=100``, ``divergence="none"``.

    Source: Yu, Hartmann, Williams, Klami, "Scalable Stochastic Gradient Riemannian Langevin
    Dynamics in Non-Diagonal Metrics", TMLR 2023, section 4.1 and appendix A.5. Deviations:
    Shampoo's 1-D sites have the diagonal metric, see `Shampoo`.

    >>> yu_2023(lambda: None, learning_rate=0.06, num_rows=60_000).settings.step_size
    1e-06
    """
    if isinstance(metric, str):
        special = {"monge": Monge(alpha2=alpha2, decay=0.9), "shampoo": Shampoo(interval=100)}
        metric = special.get(metric, metric)
    arguments: dict[str, Any] = {
        "metric": metric,
        "divergence": "none",
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

    Law as the step goes to 0: the posterior. With ``divergence="published"`` the law of the earlier
    literature: in one dimension the posterior times A^-decay.

    Args:
        model: a NumPyro model.
        epsilon: the paper's step, h = epsilon / 2.
        decay: the paper's alpha, the memory of the mean squared gradient.
        eps: the paper's lambda, added to the root of the mean squared gradient, in nats per row and
            unit of the position.
        **settings: arguments of `SGRLD`, which replace those here.

    Source: Rensmeyer, Niggemann, "On the Convergence of Locally Adaptive and Scalable
    Diffusion-Based Sampling Methods for Deep Bayesian Neural Network Posteriors", AISTATS 2025,
    section 3.1.
    """
    arguments: dict[str, Any] = {
        "metric": RMSprop(decay=decay, eps=eps),
        "divergence": "corrected",
        "step_size": epsilon / 2,
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
    config: Callable | None = None,
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
    ``"PXSGHMC"``           SGHMC in factors P V Q
    ======================= ======================================================================

    Law: none, because the step size always varies. At the end of a long cycle the law is about the
    posterior; for pSGLD it is biased as in `yu_2023`. PXSGHMC changes the prior, see `Expanded`
    with a ``prior_scale``.

    Args:
        model: a NumPyro model.
        sampler: one of the samplers above.
        num_rows: N, the number of all rows.
        peak: the paper's epsilon_0, in the units of the update above; None for its Table 11.
        friction: c.
        steps_per_cycle: steps per cycle and per draw.
        config: of PXSGHMC, a function from a site to its `Expanded`; None for `kim_factors`.
        **settings: arguments of the kernel, which replace those here: ``batch_size=256``,
            ``num_steps=steps_per_cycle``.

    Source: Kim, Nam, Yun, Yang, Lee, "Parameter Expanded Stochastic Gradient Markov Chain Monte
    Carlo", ICLR 2025, appendix C and Table 11. Deviations: the momentum starts at a draw from its
    law and not at 0; the new momentum moves the thermostat. In PXSGHMC the friction on P and Q is c
    (in the paper 1), and factors do not multiply biases.

    >>> kim_2025(lambda: None, "SGLD", num_rows=40_960).settings.schedule(0)
    Array(1.e-05, dtype=float32)
    """
    if sampler not in KIM_PEAKS:
        raise ValueError(f"sampler must be one of {list(KIM_PEAKS)}, got {sampler!r}")
    peak = KIM_PEAKS[sampler] if peak is None else peak
    # eps of pSGLD: here A is of the gradient per row
    units = num_rows if sampler == "pSGLD" else 1
    arguments: dict[str, Any] = {
        "step_size": cyclical(peak / units, steps_per_cycle),
        "num_steps": steps_per_cycle,
        "batch_size": 256,
    }
    if sampler in ("SGLD", "pSGLD"):
        arguments["divergence"] = "none"  # also SGLD: its noise is not averaged
        if sampler == "pSGLD":
            arguments["metric"] = RMSprop(decay=0.99)
        return SGRLD(model, **arguments | settings)
    arguments["friction"] = friction
    if sampler == "SGHMC":
        return SGHMC(model, **arguments | settings)
    if sampler == "SGNHT":
        return SGNHT(model, **arguments | {"thermostat_mass": 1.0} | settings)
    config = kim_factors if config is None else config
    return SGHMC(handlers.reparam(model, config=config), **arguments | settings)


def kim_factors(site: dict) -> Expanded | None:
    """A full factor on each side of a kernel, and the prior variance 0.02 of all factors and V."""
    if not site["name"].endswith("kernel"):
        return None
    return Expanded(factor_scale=0.02**0.5, prior_scale=0.02**0.5)


def franzese_2021(model: Callable, **settings: Any) -> ISGD:
    """I-SGD with the settings of the paper's regression experiments.

    Law: about the posterior at the temperature 0.01, if gradient noise is as `ISGD` describes.

    Args:
        model: a NumPyro model.
        **settings: arguments of `ISGD`, which replace those here: ``batch_size=64``,
            ``num_steps=1000``, ``temperature=0.01``. The paper's chains start after 20,000 steps
            of Adam with the rate 0.01: see `train`.

    Source: Franzese, Milios, Filippone, Michiardi, "A Scalable Bayesian Sampling Method Based on
    Stochastic Gradient Descent Isotropization", Entropy 2021, appendix C.1.
    """
    arguments: dict[str, Any] = {"batch_size": 64, "num_steps": 1000, "temperature": 0.01}
    return ISGD(model, **arguments | settings)
