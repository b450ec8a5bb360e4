"""A mixture of 25 Gaussians: which samplers leave a mode, and at what cost.

The target is that of Zhang, Li, Zhang, Chen and Wilson, "Cyclical Stochastic Gradient MCMC for
Bayesian Deep Learning" (ICLR 2020): weights 1/25, means on the grid {-4, -2, 0, 2, 4}^2, covariance
0.03 I. Half-way between two modes, the density is 1e-7 of that at the modes. Every chain starts
in the mode in the middle. A sampler with a small error stays there, and a sampler that travels does
so because of its error. So the table shows the weights of the modes as well as their widths.

Parameter expansion is that of Kim, Nam, Yun, Yang and Lee, "Parameter Expanded Stochastic Gradient
Markov Chain Monte Carlo" (ICLR 2025, section 5.1): x = W3 W2 W1 v with three 2 x 2 matrices. Here
x is a site of shape (2, 1) with three factors on the left. This script uses gradients of the exact
energy and 50,000 gradient evaluations per chain for every sampler. Of each chain it keeps 500
draws, and it prints a table. The paper has HMC with 10,000 draws, 10 leapfrog steps of 0.05, and a
picture.

Not counted are the warm-up of NUTS, the search for the other samplers' settings (`--tune`), and the
energies of GGMC's Metropolis test, one per trajectory. The large steps of a cycle are unstable on
purpose. The kernel undoes steps that diverge, and the table shows the share of draws with such
steps. The second table is for samplers with small errors: on modes of variance 0.2, between which
they travel, and from exact draws, whose distribution they must preserve.

The density is a `numpyro.factor` with a flat prior. If the mixture were the prior itself
(`MixtureSameFamily`), `Expanded` with a ``prior_scale`` would replace the whole target.

    python examples/mixture.py [--out TABLE.md] [--figure HISTOGRAMS.png]
    python examples/mixture.py --quick
    python examples/mixture.py --tune [--methods SGLD GGMC]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS
from scipy.stats import norm

from numpyro_geom import GGMC, SGHMC, SGRLD, Expanded, cyclical

LEVELS = np.arange(-4.0, 5.0, 2.0)
"""Coordinates of the means."""
MEANS = np.stack(np.meshgrid(LEVELS, LEVELS, indexing="ij"), axis=-1).reshape(-1, 2)
VARIANCE = 0.03
"""Variance of each mode in each direction."""
WIDE_VARIANCE = 0.2
"""Variance for an easier mixture; samplers with small errors travel between its modes too."""
NUM_FACTORS = 3
EXPLORE = 0.25
FLOOR = 0.05
"""Step size at the end of a cycle."""
EXPANDED_FLOOR = 0.01
"""The same with factors, whose curvature is up to a hundred times larger."""
EDGES = np.arange(-5.0, 5.2, 0.4)
"""Edges of the bins, 25 per side. Each mode's mean is in the middle of a bin. One more bin is
outside."""
VISITED_WITHIN = 3.0
"""A draw visits a mode if it is within this many standard deviations of the mean."""


# --- the target and its measures


def log_density(x: Any, variance: float = VARIANCE) -> jax.Array:
    """Normalised log density of the mixture; x has shape (..., 2)."""
    # equal weights on a product of levels: the coordinates are independent
    squares = jnp.square(jnp.asarray(x)[..., None] - LEVELS) / (2 * variance)
    parts = jax.nn.logsumexp(-squares, axis=-1) - math.log(5)
    return jnp.sum(parts - 0.5 * jnp.log(2 * math.pi * variance), axis=-1)


def mixture(variance: float = VARIANCE) -> None:
    """The model: a column of two numbers, so that factors can stand on its left."""
    flat = dist.ImproperUniform(constraints.independent(constraints.real, 2), (), (2, 1))
    x = numpyro.sample("x", flat)
    numpyro.factor("mixture", log_density(x[..., 0], variance))


def exact_draws(rng: np.random.Generator, num_draws: int, variance: float = VARIANCE) -> np.ndarray:
    """Independent draws, shape (draws, 2)."""
    means = MEANS[rng.integers(len(MEANS), size=num_draws)]
    return means + math.sqrt(variance) * rng.normal(size=means.shape)


def factors_draws(
    rng: np.random.Generator,
    num_draws: int,
    variance: float = VARIANCE,
    num_factors: int = NUM_FACTORS,
    num_matrices: int = 100_000,
) -> np.ndarray:
    """Draws from the target of ``prior_scale=1``, shape (draws, 2).

    It is the mixture times a prior of x = P v. P is a product of ``num_factors`` matrices with
    entries N(0, 1/2), and v is N(0, I). Given P, this prior is N(0, P P'), and the product is again
    a mixture. The matrices are weighted by their evidence: the draws use ``num_matrices`` random
    matrices and are independent given these.
    """
    factors = rng.normal(size=(num_factors, num_matrices, 2, 2)) * 0.5**0.5
    product = functools.reduce(np.matmul, factors)
    prior = product @ product.mT
    total = prior + variance * np.eye(2)
    fit = np.einsum("ki,jil,kl->jk", MEANS, np.linalg.inv(total), MEANS)
    log_evidence = -0.5 * (fit + np.log(np.linalg.det(total))[:, None])
    evidence = np.exp(log_evidence - log_evidence.max()).ravel()
    chosen = rng.choice(evidence.size, size=num_draws, p=evidence / evidence.sum())
    matrix, mode = np.divmod(chosen, len(MEANS))
    gain = prior[matrix] @ np.linalg.inv(total[matrix])
    centre = (gain @ MEANS[mode][..., None])[..., 0]
    # the covariance, variance * gain; symmetrised, because rounding makes it asymmetric
    values, vectors = np.linalg.eigh(variance * (gain + gain.mT) / 2)
    noise = np.sqrt(np.maximum(values, 0.0)) * rng.normal(size=centre.shape)
    return centre + (vectors @ noise[..., None])[..., 0]


def nearest_mode(draws: np.ndarray) -> np.ndarray:
    """Number of the nearest mean of each draw, shape (...,) for draws of shape (..., 2)."""
    levels = np.clip(np.rint((draws - LEVELS[0]) / 2), 0, 4).astype(int)
    return 5 * levels[..., 0] + levels[..., 1]


def cell_weights(draws: np.ndarray) -> np.ndarray:
    """Shares of the draws by their nearest mean, shape (25,)."""
    return np.bincount(nearest_mode(draws), minlength=len(MEANS)) / len(draws)


def exact_cell_weights(variance: float) -> np.ndarray:
    """Expectations of `cell_weights`: 1/25, except for mass beyond the middle between two means."""
    return _products(np.concatenate([[-np.inf], LEVELS[1:] - 1, [np.inf]]), variance).ravel()


def exact_bins(variance: float = VARIANCE) -> np.ndarray:
    """Probabilities of the bins, shape (25, 25)."""
    return _products(EDGES, variance)


def _products(edges: np.ndarray, variance: float) -> np.ndarray:
    """Probabilities of rectangles, as products over the independent coordinates."""
    cdf = norm.cdf(edges[:, None], LEVELS, math.sqrt(variance)).mean(axis=1)
    return np.outer(np.diff(cdf), np.diff(cdf))


def total_variation(shares: np.ndarray, exact: np.ndarray) -> float:
    """Total variation of two distributions on the same bins, with one bin for the rest."""
    rest = abs(shares.sum() - exact.sum())
    return float((np.abs(shares - exact).sum() + rest) / 2)


class Fit(NamedTuple):
    """How draws compare with the mixture.

    Attributes:
        visited: number of modes with a draw within `VISITED_WITHIN` standard deviations.
        weights: total variation between the shares of the nearest means and the exact shares.
        largest: largest difference between such a share and the exact share.
        bins: total variation on the bins of `EDGES`.
        spread: mean square distance from the nearest mean, relative to 2 * variance.
    """

    visited: float
    weights: float
    largest: float
    bins: float
    spread: float


def compare(draws: np.ndarray, variance: float = VARIANCE) -> Fit:
    """Compare draws of shape (draws, 2) with the mixture."""
    mode = nearest_mode(draws)
    squares = np.sum((draws - MEANS[mode]) ** 2, axis=-1)
    near = squares < VISITED_WITHIN**2 * variance
    off = cell_weights(draws) - exact_cell_weights(variance)
    counts, _, _ = np.histogram2d(*draws.T, bins=(EDGES, EDGES))
    return Fit(
        visited=len(np.unique(mode[near])),
        weights=float(np.abs(off).sum() / 2),
        largest=float(np.abs(off).max()),
        bins=total_variation(counts / len(draws), exact_bins(variance)),
        spread=float(squares.mean() / (2 * variance)),
    )


# --- methods


@dataclasses.dataclass(frozen=True)
class Effort:
    """The cost of a chain.

    Attributes:
        num_draws: number of draws that are kept.
        num_gradients: number of gradients between two of them.
        num_chains: number of independent, vectorised chains.
        num_seeds: number of groups of chains, for the spread.
        num_warmup: warm-up of NUTS, the only method that adapts; its gradients are not counted.
    """

    num_draws: int = 500
    num_gradients: int = 100
    num_chains: int = 16
    num_seeds: int = 3
    num_warmup: int = 500


QUICK = Effort(num_draws=50, num_gradients=20, num_chains=4, num_seeds=2, num_warmup=50)
QUICK_METHODS = ("SGHMC, cyclical", "GGMC")
TUNING = Effort(num_draws=150, num_chains=8, num_seeds=1)


class Method(NamedTuple):
    """A sampler with its settings.

    Attributes:
        make: settings -> kernel that uses ``num_gradients`` per draw, or a part of them.
        grid: settings that `--tune` tries.
        settings: the best of these settings, see `tune`.
    """

    make: Callable[..., Any]
    grid: Mapping[str, Sequence[float]]
    settings: Mapping[str, float]


def make_sgld(effort: Effort, step_size: float) -> Any:
    """SGRLD with the identity metric."""
    return SGRLD(mixture, step_size=step_size, num_steps=effort.num_gradients)


def make_sghmc(effort: Effort, step_size: float, friction: float) -> Any:
    """SGHMC with a constant step size."""
    return SGHMC(mixture, step_size=step_size, friction=friction, num_steps=effort.num_gradients)


def make_cyclical(effort: Effort, peak: float, friction: float, explore: float = 0.0) -> Any:
    """Cyclical steps with one cycle per draw, so a draw is the end of a cycle."""
    schedule = cyclical(peak, effort.num_gradients, floor=FLOOR, explore=explore)
    return SGHMC(mixture, step_size=schedule, friction=friction, num_steps=effort.num_gradients)


def expanded(target: str) -> Any:
    """The mixture with x = P3 P2 P1 v; ``"factors"`` is the papers' model."""
    factors = Expanded(left=NUM_FACTORS, right=0)
    if target == "factors":
        factors = Expanded(left=NUM_FACTORS, right=0, factor_scale=0.5**0.5, prior_scale=1.0)
    return handlers.reparam(mixture, config={"x": factors})


def make_expanded(effort: Effort, friction: float, target: str, **step: float) -> Any:
    """Three factors on the left, as in the paper; ``step_size``, or ``peak`` for cycles."""
    step_size: Any = step.get("step_size")
    if step_size is None:
        step_size = cyclical(step["peak"], effort.num_gradients, floor=EXPANDED_FLOOR)
    return SGHMC(
        expanded(target),
        step_size=step_size,
        friction=friction,
        num_steps=effort.num_gradients,
    )


def make_ggmc(effort: Effort, step_size: float, friction: float, num_gradients: int) -> Any:
    """Trajectories of ``num_gradients`` gradients, with one step less."""
    num_gradients = min(num_gradients, effort.num_gradients)
    return GGMC(mixture, step_size=step_size, friction=friction, num_steps=num_gradients - 1)


def make_nuts(effort: Effort) -> Any:
    """NumPyro's NUTS with its defaults."""
    return NUTS(mixture)


FRICTIONS = (0.3, 3.0, 10.0)
CYCLES = {"peak": (0.4, 0.5, 0.8, 1.2), "friction": (3.0, 10.0, 30.0)}

# The settings are the best that `--tune` found, by the smallest distance on the bins for one chain.
# Ties (within 0.001) are broken by the most modes and then the smallest step. Ties are frequent
# without cycles, because no chain leaves the first mode.
METHODS = {
    "SGLD": Method(
        make_sgld,
        {"step_size": (0.03, 0.035, 0.04, 0.045, 0.05, 0.055)},
        {"step_size": 0.045},
    ),
    "SGHMC": Method(
        make_sghmc,
        {"step_size": (0.2, 0.3, 0.34, 0.36, 0.4), "friction": FRICTIONS},
        {"step_size": 0.34, "friction": 3.0},
    ),
    "SGHMC, cyclical": Method(make_cyclical, CYCLES, {"peak": 0.8, "friction": 30.0}),
    "SGHMC, cyclical, explore": Method(
        functools.partial(make_cyclical, explore=EXPLORE), CYCLES, {"peak": 1.2, "friction": 10.0}
    ),
    "PX-SGHMC, posterior": Method(
        functools.partial(make_expanded, target="posterior"),
        {"step_size": (0.05, 0.1, 0.15, 0.2, 0.3), "friction": FRICTIONS},
        {"step_size": 0.05, "friction": 3.0},
    ),
    "PX-SGHMC, factors": Method(
        functools.partial(make_expanded, target="factors"),
        {"step_size": (0.01, 0.05, 0.1, 0.2, 0.3), "friction": FRICTIONS[:2]},
        {"step_size": 0.01, "friction": 3.0},
    ),
    "PX-SGHMC, posterior, cyclical": Method(
        functools.partial(make_expanded, target="posterior"),
        {"peak": (0.1, 0.3, 0.5), "friction": FRICTIONS},
        {"peak": 0.5, "friction": 10.0},
    ),
    "GGMC": Method(
        make_ggmc,
        {
            "step_size": (0.1, 0.2, 0.3, 0.34),
            "friction": (1.0,),
            "num_gradients": (2, 10, 50),
        },
        {"step_size": 0.3, "friction": 1.0, "num_gradients": 50},
    ),
    "NUTS": Method(make_nuts, {}, {}),
}


def in_the_middle(num_chains: int, seed: int) -> np.ndarray:
    """Starts in the middle mode, shape (chains, 2)."""
    rng = np.random.default_rng(seed)
    return math.sqrt(VARIANCE) * rng.normal(size=(num_chains, 2))


class Run(NamedTuple):
    """The chains of one method.

    Attributes:
        draws: shape (seeds, chains, draws, 2).
        diverging: share of the draws with an undone step or a rejected divergent trajectory.
        seconds: time of all chains together, with compilation.
    """

    draws: np.ndarray
    diverging: float
    seconds: float


def run(
    name: str,
    effort: Effort,
    settings: Mapping[str, float] | None = None,
    start: Callable[[int, int], np.ndarray] = in_the_middle,
    variance: float = VARIANCE,
) -> Run:
    """Draws of one method, ``effort.num_gradients`` gradients apart."""
    method = METHODS[name]
    if settings is None:
        settings = method.settings
    kernel = method.make(effort, **settings)
    nuts = isinstance(kernel, NUTS)
    thinning = 1
    if nuts:  # as many as the gradients allow for trees of two on average, the rest cut off below
        thinning = effort.num_gradients // 2
    elif "num_gradients" in settings:  # GGMC's trajectories are shorter than what a draw may cost
        thinning = effort.num_gradients // min(settings["num_gradients"], effort.num_gradients)
    mcmc = MCMC(
        kernel,
        num_warmup=effort.num_warmup if nuts else 0,
        num_samples=effort.num_draws * thinning,
        thinning=1 if nuts else thinning,
        num_chains=effort.num_chains * effort.num_seeds,  # one compilation for all
        chain_method="vectorized",
        progress_bar=False,
    )
    init = np.concatenate([start(effort.num_chains, seed) for seed in range(effort.num_seeds)])
    x = jnp.asarray(init, float)[..., None]
    init_params = {"x": x}
    if name.startswith("PX"):
        factors = Expanded(left=NUM_FACTORS, right=0)
        init_params = jax.vmap(functools.partial(factors.start, "x"))(x)
    begin = time.perf_counter()
    mcmc.run(
        random.key(0),
        variance,
        init_params=init_params,
        extra_fields=("num_steps",) if nuts else (),
    )
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["x"], np.float64)[..., 0]
    seconds = time.perf_counter() - begin
    fields = mcmc.get_extra_fields(group_by_chain=True)
    if nuts:
        draws = cut_off(draws, np.asarray(fields["num_steps"]), effort)
    shape = (effort.num_seeds, effort.num_chains, effort.num_draws, 2)
    return Run(draws.reshape(shape), float(np.mean(fields["diverging"])), seconds)


def cut_off(draws: np.ndarray, costs: np.ndarray, effort: Effort) -> np.ndarray:
    """As many draws of each chain as the gradients allow, thinned to the number that is kept.

    Args:
        draws: shape (chains, draws, 2).
        costs: gradients of each draw, shape (chains, draws).
        effort: the allowed cost.
    """
    budget = effort.num_draws * effort.num_gradients
    allowed = np.sum(np.cumsum(costs, axis=1) <= budget, axis=1)
    kept = [np.linspace(0, n - 1, effort.num_draws).astype(int) for n in allowed]
    return np.stack([chain[rows] for chain, rows in zip(draws, kept, strict=True)])


# --- experiment


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        name: of the method.
        settings: in words.
        single: `Fit` of one chain's draws, the mean over chains; one row a seed.
        pooled: `Fit` of all chains' draws; one row a seed.
        diverging: see `Run`; nan for exact draws.
        seconds: see `Run`; nan for exact draws.
    """

    name: str
    settings: str
    single: np.ndarray
    pooled: np.ndarray
    diverging: float
    seconds: float


def summarise(name: str, settings: str, done: Run) -> Row:
    """One line of the table."""
    single = [np.mean([compare(chain) for chain in group], axis=0) for group in done.draws]
    pooled = [compare(group.reshape(-1, 2)) for group in done.draws]
    return Row(name, settings, np.array(single), np.array(pooled), done.diverging, done.seconds)


def exact_rows(effort: Effort) -> list[Row]:
    """The same number of exact draws, of the mixture and of the target of ``"factors"``."""
    shape = (effort.num_seeds, effort.num_chains, effort.num_draws, 2)
    rng = np.random.default_rng(0)
    laws = {"exact draws": exact_draws, 'exact draws of "factors"': factors_draws}
    return [
        summarise(name, "", Run(law(rng, math.prod(shape[:3])).reshape(shape), math.nan, math.nan))
        for name, law in laws.items()
    ]


def in_words(settings: Mapping[str, float]) -> str:
    """Settings for a cell of the table."""
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in settings.items())


def table(rows: Sequence[Row]) -> str:
    """Markdown: means over the seeds, with their standard deviations where they matter."""
    heads = (
        "sampler",
        "settings",
        "modes: one chain",
        "all",
        "TV of weights: one chain",
        "all",
        "variance in a mode / exact",
        "draws with failed steps",
        "seconds",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        one, every = (Fit(*np.moveaxis(fits, 1, 0)) for fits in (row.single, row.pooled))
        cells = [
            row.name,
            row.settings or "–",
            _cell(one.visited, 1),
            _cell(every.visited, 1),
            _cell(one.weights),
            _cell(every.weights),
            _cell(every.spread),
            "–" if math.isnan(row.diverging) else f"{row.diverging:.0%}",
            "–" if math.isnan(row.seconds) else f"{row.seconds:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: np.ndarray, digits: int = 2) -> str:
    return f"{np.mean(values):.{digits}f} ± {np.std(values):.{digits}f}"


def tune(names: Sequence[str], effort: Effort) -> None:
    """Try the grids, and print every setting; the best of each method comes last."""
    for name in names:
        method = METHODS[name]
        found = []
        for values in itertools.product(*method.grid.values()):
            settings = dict(zip(method.grid, values, strict=True))
            row = summarise(name, "", run(name, effort, settings))
            fit, pooled = Fit(*row.single[0]), Fit(*row.pooled[0])
            found.append((fit.bins, in_words(settings)))
            print(
                f"{name}: {in_words(settings)}: modes {fit.visited:.1f} and {pooled.visited:.0f}, "
                f"TV of weights {fit.weights:.3f} and {pooled.weights:.3f}, on bins {fit.bins:.3f} "
                f"and {pooled.bins:.3f}, variance {fit.spread:.2f}",
                flush=True,
            )
        print(f"best of {name}: {min(found)[1]}\n")


# --- check of the sampled distributions


class Check(NamedTuple):
    """A sampler, a mixture and a start, for `check_law`.

    Attributes:
        method: one of `METHODS`.
        settings: settings with small errors, which are not those of the first table.
        variance: variance of the modes.
        exact_start: whether chains start from exact draws, or in the middle mode.
    """

    method: str
    settings: Mapping[str, float]
    variance: float
    exact_start: bool


SMALL_STEP = {"step_size": 0.1, "friction": 1.0}
SMALL_EXPANDED_STEP = {"step_size": 0.02, "friction": 1.0}
TRAJECTORY = {"step_size": 0.3, "friction": 1.0, "num_gradients": 10}
CHECKS = (
    Check("SGHMC", SMALL_STEP, WIDE_VARIANCE, False),
    Check("GGMC", TRAJECTORY, WIDE_VARIANCE, False),
    Check("PX-SGHMC, posterior", SMALL_EXPANDED_STEP, WIDE_VARIANCE, False),
    Check("PX-SGHMC, factors", SMALL_EXPANDED_STEP, WIDE_VARIANCE, False),
    Check("GGMC", {**TRAJECTORY, "step_size": 0.1}, VARIANCE, True),
    Check("PX-SGHMC, posterior", {**SMALL_EXPANDED_STEP, "step_size": 0.003}, VARIANCE, True),
    Check("PX-SGHMC, factors", {**SMALL_EXPANDED_STEP, "step_size": 0.003}, VARIANCE, True),
)
CHECKING = Effort(num_draws=100, num_gradients=800, num_chains=200, num_seeds=1)
QUICK_CHECKING = Effort(num_draws=4, num_gradients=20, num_chains=20, num_seeds=1)


class Law(NamedTuple):
    """How the distribution of many chains differs from the mixture.

    Attributes:
        weights: total variation between the chains' shares of the nearest means and the exact ones.
        by_chance: its expectation from Monte Carlo error alone.
        largest: the largest difference of a share, in its standard errors.
        width: mean of cos(pi x) minus the exact mean, in standard errors. The mean falls as a
            mode's variance grows.
        shift: the same for x sin(pi x), whose mean falls if modes are nearer to the origin.
    """

    weights: float
    by_chance: float
    largest: float
    width: float
    shift: float


def law_of(draws: np.ndarray, variance: float) -> Law:
    """Compare draws of shape (chains, draws, 2) with the mixture.

    Standard errors are those of independent chains, from the spread of their own means.
    """
    mode = nearest_mode(draws)
    shares = np.stack([np.mean(mode == k, axis=1) for k in range(len(MEANS))], axis=1)
    root = math.sqrt(len(draws))
    errors = shares.std(axis=0, ddof=1) / root
    off = shares.mean(axis=0) - exact_cell_weights(variance)
    # both have period 2, that of the means; the second's expectation is by Stein's identity
    width = np.cos(math.pi * draws).mean(axis=(1, 2))
    shift = (draws * np.sin(math.pi * draws)).mean(axis=(1, 2))
    exact_width = math.exp(-(math.pi**2) * variance / 2)
    exact_shift = math.pi * variance * exact_width
    return Law(
        weights=float(np.abs(off).sum() / 2),
        by_chance=float(math.sqrt(2 / math.pi) * errors.sum() / 2),
        # a mode that no chain visits has no error estimate
        largest=float(np.max(np.abs(off) / np.where(errors > 0, errors, errors.max()))),
        width=float((width.mean() - exact_width) / (width.std(ddof=1) / root)),
        shift=float((shift.mean() - exact_shift) / (shift.std(ddof=1) / root)),
    )


def check_law(check: Check, effort: Effort) -> Law:
    """The distribution of the second half of the chains' draws."""

    def from_exact(num_chains: int, seed: int) -> np.ndarray:
        return exact_draws(np.random.default_rng(seed), num_chains, check.variance)

    start = from_exact if check.exact_start else in_the_middle
    done = run(check.method, effort, check.settings, start, check.variance)
    return law_of(done.draws[0][:, effort.num_draws // 2 :], check.variance)


def check_table(effort: Effort, checks: Sequence[Check] = CHECKS) -> str:
    """Markdown: samplers with small errors, on an easy mixture and from exact draws."""
    lines = [
        "| sampler | settings | variance | start | TV of weights | by chance | largest error of a "
        "weight, in standard errors | of the width | of the shift |",
        "|---" * 9 + "|",
    ]
    for check in checks:
        law = check_law(check, effort)
        cells = [
            check.method,
            in_words(check.settings),
            f"{check.variance:g}",
            "exact" if check.exact_start else "middle",
            f"{law.weights:.3f}",
            f"{law.by_chance:.3f}",
            f"{law.largest:.1f}",
            f"{law.width:+.1f}",
            f"{law.shift:+.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# --- output


def save_figure(path: Path, draws: Mapping[str, np.ndarray]) -> None:
    """Histograms of draws of shape (draws, 2), by name.

    Raises:
        ImportError: without Matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the figure needs Matplotlib: pip install 'numpyro_geom[examples]', or leave out "
            "--figure"
        ) from error
    columns = 4
    figure = Figure(figsize=(10, 2.6 * -(-len(draws) // columns)), layout="constrained")
    for place, (name, values) in enumerate(draws.items(), start=1):
        axes = figure.add_subplot(-(-len(draws) // columns), columns, place)
        counts, _, _ = np.histogram2d(*values.T, bins=(np.linspace(-5.5, 5.5, 89),) * 2)
        # the root shows modes of little weight
        axes.imshow(np.sqrt(counts.T), extent=(-5.5, 5.5) * 2, origin="lower", cmap="magma_r")
        axes.set_title(name, fontsize=9)
        axes.set_xticks(LEVELS)
        axes.set_yticks(LEVELS)
        axes.tick_params(labelsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=75)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run the samplers, print both tables, and write the requested files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS))
    parser.add_argument("--out", type=Path, help="file for the first table")
    parser.add_argument("--figure", type=Path, help="file for the histograms, such as mixture.png")
    parser.add_argument("--quick", action="store_true", help="very short chains")
    parser.add_argument("--tune", action="store_true", help="try the grids of settings only")
    options = parser.parse_args(arguments)
    methods = options.methods
    if methods is None:
        methods = QUICK_METHODS if options.quick and not options.tune else list(METHODS)
    if options.tune:
        tune(methods, QUICK if options.quick else TUNING)
        return []
    effort = QUICK if options.quick else Effort()
    rows = exact_rows(effort)
    shown = {"exact draws": exact_draws(np.random.default_rng(0), 8000)}
    for name in methods:
        done = run(name, effort)
        rows.append(summarise(name, in_words(METHODS[name].settings), done))
        shown[name] = done.draws[0].reshape(-1, 2)
        print(f"{name}: {done.seconds:.0f} s", file=sys.stderr, flush=True)
    checks = CHECKS[:1] if options.quick else CHECKS
    text = table(rows) + "\n"
    print(f"{text}\n{check_table(QUICK_CHECKING if options.quick else CHECKING, checks)}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    if options.figure is not None:
        save_figure(options.figure, shown)
    return rows


if __name__ == "__main__":
    main()
