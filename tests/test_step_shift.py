"""The shift of means by the step size, against the invariant distribution of the steps."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from tiers import short

from numpyro_geom import GGMC, SGHMC, SGRLD, diagnose, to_inference_data
from numpyro_geom.diagnostics.report import Report

NAME = "shift of the means by the step, in sd"


def log_gamma() -> None:
    """The logarithm of a Gamma(2) variable: U = exp(x) - 2 x, up to a wide prior."""
    x = numpyro.sample("x", dist.Normal(0, 20))
    numpyro.factor("rest", 2 * x - jnp.exp(x))


def invariant_shift(h: float) -> float:
    """How far the law that steps of h leave has its mean from that of the density, in sd."""
    x = np.linspace(-7, 3, 1501)
    slope = np.exp(x) - 2 + x / 400
    centre, spread = x - h * slope, (2 * h) ** 0.5
    kernel = np.exp(-(((x[:, None] - centre[None]) / spread) ** 2) / 2)
    kernel /= kernel.sum(0)
    law = np.ones(x.size) / x.size
    for _ in range(2000):
        law = kernel @ law
    density = np.exp(2 * x - np.exp(x) - x**2 / 800)
    density /= density.sum()
    mean = float(density @ x)
    sd = float(density @ (x - mean) ** 2) ** 0.5
    return (float(law @ x) - mean) / sd


def run(kernel: object, num_samples: int = 2000) -> MCMC:
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0))
    return mcmc


def shift_in(report: Report) -> tuple[float, float, bool | None]:
    check = next(c for c in report.checks if c.name == NAME)
    return check.value, check.error, check.ok


def test_shift_is_that_of_the_steps() -> None:
    mcmc = run(SGRLD(log_gamma, gamma="none", step_size=0.1, num_steps=10))
    value, error, ok = shift_in(diagnose(mcmc))
    exact = invariant_shift(0.1)
    assert value == pytest.approx(exact, abs=4 * error + exact**2)
    assert ok
    exported = to_inference_data(mcmc, gradients=True)
    assert shift_in(diagnose(exported)) == pytest.approx((value, error, ok))


def test_a_shift_is_flagged() -> None:
    report = diagnose(run(SGRLD(log_gamma, gamma="none", step_size=0.3, num_steps=10)))
    assert invariant_shift(0.3) < -0.15
    value, _, ok = shift_in(report)
    assert value < -0.15
    assert ok is False


def test_averaged_noise_shifts_no_mean() -> None:
    draws = run(SGRLD(log_gamma, step_size=0.3, num_steps=10)).get_samples()["x"]
    mean, sd = 1 - np.euler_gamma, (np.pi**2 / 6 - 1) ** 0.5
    # 8,000 draws whose correlation is about exp(-10 h / 2 var) = .1; a plain step is .15 off
    assert abs(np.mean(draws) - mean) / sd < 5 * (1.2 / 8000) ** 0.5


EXACT: dict[str, Callable[[], object]] = {
    "GGMC": lambda: GGMC(log_gamma),
    "SGHMC": lambda: SGHMC(log_gamma),
    "SGRLD": lambda: SGRLD(log_gamma),
    "SGRLD adjusted": lambda: SGRLD(log_gamma, adjusted=True),
}


@pytest.mark.parametrize("name", short(EXACT, kept=["SGHMC"]))
def test_kernels_with_another_law_have_no_such_figure(name: str) -> None:
    mcmc = run(EXACT[name](), num_samples=20)
    assert NAME not in [check.name for check in diagnose(mcmc).checks]
