"""Invariant distributions in one dimension, which are known for every treatment of Gamma.

The target is N(0, 1) with N = 1. With G = 1 / A as a function of the position, a sampler that adds
c times Gamma has the distribution

    p(x) proportional to phi(x) G(x)^(1 - c)    as h -> 0,

with c = 1 for "corrected", 1 - decay for "published", 0 for "none"; "frozen" and "auxiliary" have
phi. Chains start from another distribution and run for five relaxation times of the slowest even
function (all distributions here are even). Then a histogram of all chains is compared with p. The
relaxation rates in the table are those of the diffusion with this A and p, from its discretised
generator.

A distance in total variation may be as large as the sum of two parts.

- The bias of order h. The table has it, measured with 20,000 to 80,000 nearly independent draws, so
  that its Monte Carlo error is at most 0.003. It falls with h (last test).
- Monte Carlo error. With e_b the standard error of the share of bin b, from the spread of
  independent chains, sum_b |noise_b| / 2 has mean sqrt(2 / pi) sum_b e_b / 2 and at most about
  the standard deviation sqrt(1 - 2 / pi) sqrt(sum_b e_b^2) / 2. The mean plus 5 standard deviations
  is allowed: a correct sampler fails with probability 3e-7 per comparison, 1e-5 for the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import short

from numpyro_geom import SGRLD, Identity, Monge, RMSprop, Shampoo, Wenzel
from numpyro_geom.algorithms.langevin import mode_factor

BINS = np.concatenate([[-np.inf], np.linspace(-4.0, 4.0, 17), [np.inf]])
GRID = np.linspace(-9.0, 9.0, 200_001)


def energy(z: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(z)) / 2


class Law:
    """A distribution on the line by quadrature: shares of the bins, and draws by inversion."""

    def __init__(self, density: Callable[[np.ndarray], np.ndarray]) -> None:
        p = density(GRID)
        cdf = np.concatenate([[0.0], np.cumsum((p[1:] + p[:-1]) / 2)])
        self.cdf = cdf / cdf[-1]
        self.shares = np.diff(np.interp(BINS, GRID, self.cdf, left=0.0, right=1.0))

    def draw(self, num_chains: int, seed: int) -> jax.Array:
        """Stratified draws, shape (chains, 1)."""
        u = np.random.default_rng(seed).uniform(size=num_chains)
        x = np.interp((np.arange(num_chains) + u) / num_chains, self.cdf, GRID)
        return jnp.asarray(x[:, None], jnp.float32)

    def distance(self, x: np.ndarray) -> tuple[float, float]:
        """Total variation of draws of shape (draws, chains) and the Monte Carlo error allowed."""
        of_chain = np.stack(
            [np.mean((x >= a) & (x < b), axis=0) for a, b in zip(BINS[:-1], BINS[1:], strict=True)]
        )
        errors = of_chain.std(axis=1, ddof=1) / math.sqrt(x.shape[1])
        mean = math.sqrt(2 / math.pi) * np.sum(errors) / 2
        spread = math.sqrt(1 - 2 / math.pi) * math.sqrt(np.sum(errors**2)) / 2
        return float(np.abs(of_chain.mean(axis=1) - self.shares).sum() / 2), mean + 5 * spread


def tilted(scale: Callable[[np.ndarray], np.ndarray], power: float) -> Law:
    """The distribution phi(x) G(|x|)^power."""
    return Law(lambda x: np.exp(-(x**2) / 2) * scale(np.abs(x)) ** power)


NORMAL = tilted(np.ones_like, 0.0)


class Case(NamedTuple):
    """A metric and mode with a law of its own.

    Attributes:
        metric: the metric.
        divergence: the mode.
        scale: G as a function of |x| once the statistic has caught up with x.
        step_size: h.
        rate: relaxation rate of the slowest even function, in units of 1 / h steps.
        bias: bound on the total variation that is left at this h.
        num_chains: how many.
    """

    metric: Any
    divergence: str
    scale: Callable[[np.ndarray], np.ndarray]
    step_size: float
    rate: float
    bias: float
    num_chains: int = 4000


def monge(x: np.ndarray) -> np.ndarray:
    return 1 + x**2


def rmsprop(x: np.ndarray) -> np.ndarray:
    return 0.1 + x


def shampoo(x: np.ndarray) -> np.ndarray:
    return x


# Measured bias in the comments, "at" its h. Settings of Rensmeyer and Niggemann are decay .9 with
# alpha2 1 and eps .1; a decay of one half sets the three factors c = 1, 1/2, 0 well apart, and its
# short memory makes for less bias. For Shampoo a site of one entry is a vector or, with "full", a
# 1 x 1 matrix: its law is the same.
FULL = Shampoo(decay=0.5, interval=1, vector="full")
VECTOR = Shampoo(decay=0.5, interval=1, vector="diagonal")
CASES = {
    # .0147 at .01, less than .008 at .0025
    "monge-none": Case(Monge(1.0, 0.9), "none", monge, 0.01, 0.23, 0.018),
    # .0050 at .02
    "monge-none-short": Case(Monge(1.0, 0.5), "none", monge, 0.02, 0.23, 0.008),
    # .0030 at .02
    "monge-published-short": Case(Monge(1.0, 0.5), "published", monge, 0.02, 0.25, 0.006),
    # .0055 at .02
    "monge-corrected-short": Case(Monge(1.0, 0.5), "corrected", monge, 0.02, 0.27, 0.008),
    # .0060 at .01
    "monge-corrected": Case(Monge(1.0, 0.9), "corrected", monge, 0.01, 0.27, 0.009),
    # .026 at .001, .013 at .00025 (.084 at .01)
    "rmsprop-published": Case(RMSprop(0.9, 0.1), "published", rmsprop, 0.001, 0.9, 0.03, 1500),
    # .0130 at .004, .007 at .001
    "rmsprop-published-short": Case(RMSprop(0.5, 0.1), "published", rmsprop, 0.004, 0.94, 0.016),
    # .0145 at .004, .006 at .001
    "rmsprop-none-short": Case(RMSprop(0.5, 0.1), "none", rmsprop, 0.004, 0.89, 0.018),
    # .0121 at .01 (with decay .9 it is .160, and .080 at .001)
    "rmsprop-corrected-short": Case(RMSprop(0.5, 0.1), "corrected", rmsprop, 0.01, 1.0, 0.015),
    # .0110 at .0025 (with decay .9 it is .048, and .098 at .01)
    "shampoo-none-full": Case(FULL, "none", shampoo, 0.0025, 0.93, 0.014),
    "shampoo-none-vector": Case(VECTOR, "none", shampoo, 0.0025, 0.93, 0.014),
}
CASES_SHORT = ["rmsprop-corrected-short", "monge-none-short"]


def simulate(case: Case, start: Law, num_draws: int = 3) -> np.ndarray:
    """Draws a relaxation time apart, after five, shape (draws, chains)."""
    relaxation = math.ceil(1 / (case.rate * case.step_size))
    kernel = SGRLD(
        potential_fn=energy,
        metric=case.metric,
        divergence=case.divergence,
        step_size=case.step_size,
        num_steps=relaxation,
    )
    state = chains.start(kernel, start.draw(case.num_chains, seed=0), seed=1)
    _, draws = chains.run(kernel, state, 5 + num_draws)
    return draws.z[5:, :, 0]


@pytest.mark.parametrize(
    "name",
    short(CASES, kept=CASES_SHORT),
)
def test_law_of_each_treatment_of_gamma(name: str) -> None:
    case = CASES[name]
    power = 1 - mode_factor(case.divergence, case.metric.decay)
    law = tilted(case.scale, power)
    # from a law that another factor would have left as it is
    start = NORMAL if power > 0 else tilted(case.scale, 1.0)
    x = simulate(case, start)

    distance, noise = law.distance(x)
    assert distance < case.bias + noise

    # and the draws tell the factor from others: they are not where they started, nor where the
    # other factors lead (powers apart by less than .4 are as good as the same)
    for other in (0.0, 0.5, 1.0):
        if abs(other - power) >= 0.4:
            distance, noise = tilted(case.scale, other).distance(x)
            assert distance > case.bias + noise


@pytest.mark.slow
def test_bias_of_corrected_falls_with_the_step() -> None:
    # the hard case: A varies on a scale of .1 and decay .9 lags behind
    case = CASES["rmsprop-corrected-short"]._replace(metric=RMSprop(0.9, 0.1))
    distances = []
    # measured: .160 and .113
    for step_size, bounds in ((0.01, (0.14, 0.18)), (0.0025, (0.095, 0.13))):
        distance, noise = NORMAL.distance(simulate(case._replace(step_size=step_size), NORMAL))
        assert bounds[0] - noise < distance < bounds[1] + noise
        distances.append(distance)
    assert distances[1] < 0.85 * distances[0]


def frozen_law(step_size: float, inverse: np.ndarray) -> Law:
    """The distribution for constant A in each chain: a mixture of N(0, 1 / (1 - h A / 2))."""
    values, weights = np.histogram(inverse, bins=200)[::-1]
    centers = (values[1:] + values[:-1]) / 2
    variances = 1 / (1 - step_size * centers / 2)

    def density(x: np.ndarray) -> np.ndarray:
        return sum(
            w * np.exp(-(x**2) / (2 * v)) / math.sqrt(v)
            for w, v in zip(weights, variances, strict=True)
            if w > 0
        )

    return Law(density)


METRICS = {
    "identity": Identity(),
    "rmsprop": RMSprop(0.99, 0.1),
    "wenzel": Wenzel(decay=0.99, interval=7),
    "monge": Monge(alpha2=1.0, decay=0.9),
    "monge-auto": Monge(decay=0.9),
    "shampoo": Shampoo(decay=0.99, interval=7, vector="full"),
}


@pytest.mark.parametrize("metric", short(METRICS, kept=["wenzel"]))
def test_frozen_metric_leaves_the_target(metric: str) -> None:
    kernel = SGRLD(
        potential_fn=energy,
        metric=METRICS[metric],
        divergence="frozen",
        step_size=0.05,
        num_steps=60,
    )
    state = chains.start(kernel, tilted(monge, 1.0).draw(4000, seed=2), seed=3, num_warmup=8)
    state, _ = chains.run(kernel, state, 8)
    warm = state.metric_state
    state, draws = chains.run(kernel, state, 8)

    for before, after in zip(
        jax.tree.leaves(warm), jax.tree.leaves(state.metric_state), strict=True
    ):
        np.testing.assert_array_equal(before, after)
    inverse = jax.vmap(kernel.settings.metric.apply_inverse)(warm, jnp.ones((4000, 1)))
    distance, noise = frozen_law(0.05, np.asarray(inverse[:, 0])).distance(draws.z[5:, :, 0])
    assert distance < noise


@pytest.mark.parametrize("metric", short(METRICS, kept=["shampoo"]))
def test_auxiliary_metric_leaves_the_target(metric: str) -> None:
    kernel = SGRLD(
        potential_fn=energy,
        metric=METRICS[metric],
        divergence="auxiliary",
        step_size=0.02,
        num_steps=150,
    )
    state = chains.start(kernel, tilted(monge, 1.0).draw(4000, seed=4), seed=5)
    state = chains.past_warmup(state, scale=1.5)
    _, draws = chains.run(kernel, state, 8)
    distance, noise = NORMAL.distance(draws.z[5:, :, 0])
    # The conditional curvature is 1 + 1 / s^2 = 1.44 and A <= 1 (rmsprop and shampoo: <= 1 / s):
    # at most 1.44 percent too much variance, and d TV / d variance = .242 there.
    assert distance < 0.0144 * 0.242 + noise
    # where they started
    distance, noise = tilted(monge, 1.0).distance(draws.z[5:, :, 0])
    assert distance > noise + 0.1
