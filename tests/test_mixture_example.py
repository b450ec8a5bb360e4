"""The mixture example: its exact quantities, its samplers' distributions, and its output files.

Scores are deviations in Monte Carlo standard errors, from the spread of independent chains or
draws. At most 5.5 is allowed: a correct sampler fails with probability 4e-8 per comparison, 1e-5
for the file.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer.util import potential_energy
from scripts import load_script

from numpyro_geom import GGMC, SGHMC

ALLOWED = 5.5
NARROW, WIDE = 0.03, 0.2


@pytest.fixture(scope="module")
def mixture() -> ModuleType:
    return load_script("mixture")


# --- exact quantities

MIDPOINTS = np.arange(-6.99, 7.0, 0.02)
"""Of cells of side 0.02, whose edges are those of the bins too; 0.12 standard deviations, so that
the midpoint rule is exact to about 0.12^2 / 24 = 6e-4 of a bin whose edge cuts a mode."""


@pytest.mark.parametrize("variance", [NARROW, WIDE])
def test_density(mixture: ModuleType, variance: float) -> None:
    points = np.stack(np.meshgrid(MIDPOINTS, MIDPOINTS, indexing="ij"), axis=-1)
    density = np.exp(np.asarray(mixture.log_density(points, variance), np.float64)) * 0.02**2
    assert density.sum() == pytest.approx(1.0, abs=1e-5)  # float32, and the tails
    bins, _, _ = np.histogram2d(
        *points.reshape(-1, 2).T, bins=(mixture.EDGES,) * 2, weights=density.ravel()
    )
    exact = mixture.exact_bins(variance)
    np.testing.assert_allclose(bins, exact, rtol=0, atol=1e-3 * exact.max())
    cells = np.bincount(mixture.nearest_mode(points).ravel(), density.ravel())
    np.testing.assert_allclose(cells, mixture.exact_cell_weights(variance), rtol=0, atol=1e-5)


def test_the_model_is_the_density(mixture: ModuleType) -> None:
    x = jnp.asarray([[0.3], [1.7]])
    expected = -float(mixture.log_density(x[:, 0], WIDE))
    found = potential_energy(mixture.mixture, (WIDE,), {}, {"x": x})
    assert found == pytest.approx(expected, rel=1e-6)


def of_chance(exact: np.ndarray, num_draws: int) -> tuple[float, float]:
    """Mean of the total variation of so many exact draws, and what it may be off."""
    errors = np.sqrt(exact * (1 - exact) / num_draws)
    mean = math.sqrt(2 / math.pi) * errors.sum() / 2
    return mean, ALLOWED * math.sqrt(1 - 2 / math.pi) * math.sqrt(np.sum(errors**2)) / 2


@pytest.mark.parametrize("variance", [NARROW, WIDE])
def test_exact_draws_are_at_the_floor(mixture: ModuleType, variance: float) -> None:
    num_draws = 200_000
    draws = mixture.exact_draws(np.random.default_rng(1), num_draws, variance)
    fit = mixture.compare(draws, variance)
    mean, allowed = of_chance(mixture.exact_cell_weights(variance), num_draws)
    assert abs(fit.weights - mean) < allowed
    bins = mixture.exact_bins(variance).ravel()
    # a bin that expects few draws differs by less than its standard error, by less than that
    sparse = bins * num_draws < 10
    mean, allowed = of_chance(bins[~sparse], num_draws)
    rest = np.sqrt(bins[sparse] / num_draws).sum() + (1 - bins.sum())
    assert mean - allowed < fit.bins < mean + allowed + rest
    assert fit.visited == 25
    assert fit.largest < ALLOWED * math.sqrt(0.04 * 0.96 / num_draws) * 1.2
    if variance == NARROW:  # cells cut nothing off: a mean of 400,000 squares of variance 2
        assert abs(fit.spread - 1) < ALLOWED * math.sqrt(2 / (2 * num_draws))


def test_the_law_of_factors(mixture: ModuleType) -> None:
    """Against draws of its prior, weighted by the mixture's density."""
    rng = np.random.default_rng(3)
    size = 400_000
    x = rng.normal(size=(size, 2, 1))
    for _ in range(mixture.NUM_FACTORS):
        x = (math.sqrt(0.5) * rng.normal(size=(size, 2, 2))) @ x
    weight = np.exp(np.asarray(mixture.log_density(x[..., 0], WIDE), np.float64))
    draws = mixture.factors_draws(np.random.default_rng(4), size, WIDE)
    modes = mixture.nearest_mode(x[..., 0]), mixture.nearest_mode(draws)
    radius = np.linalg.norm(x[..., 0], axis=-1), np.linalg.norm(draws, axis=-1)
    for of_prior, of_draws in (
        *((modes[0] == k, modes[1] == k) for k in (12, 13, 18)),
        *((radius[0] < r, radius[1] < r) for r in (0.1, 0.3, 1.0, 2.5)),
    ):
        # a ratio of means, to first order in its noise
        exact = np.average(of_prior, weights=weight)
        error = np.std(weight * (of_prior - exact)) / weight.mean() / math.sqrt(size)
        # a hundred thousand matrices, each with draws of its own
        error = math.hypot(error, np.std(of_draws) / math.sqrt(100_000))
        assert abs(np.mean(of_draws) - exact) < ALLOWED * error


# --- distributions


def in_one_dimension(variance: float) -> tuple[float, float]:
    """Means of r^2 and r m, with m the nearest level and r = x - m."""
    x = np.linspace(-9, 9, 180_001)
    levels = np.arange(-4.0, 5.0, 2.0)
    density = np.exp(-((x[:, None] - levels) ** 2) / (2 * variance)).sum(axis=1)
    nearest = 2 * np.clip(np.rint(x / 2), -2, 2)
    off = x - nearest
    return tuple(np.average(f, weights=density) for f in (off**2, off * nearest))  # type: ignore


def score(mixture: ModuleType, draws: np.ndarray, variance: float) -> tuple[np.ndarray, float]:
    """Scores of weights, within-mode covariance and shift, and how many chains changed mode.

    Args:
        mixture: the script.
        draws: shape (draws, chains, 2).
        variance: of the modes.
    """
    mode = mixture.nearest_mode(draws)
    means = mixture.MEANS[mode]
    off = draws - means
    values = [
        *(mode == k for k in range(25)),
        off[..., 0] ** 2,
        off[..., 1] ** 2,
        off[..., 0] * off[..., 1],
        np.sum(off * means, axis=-1),
    ]
    square, along = in_one_dimension(variance)
    exact = [*mixture.exact_cell_weights(variance), square, square, 0.0, 2 * along]
    found = chains.scores(np.stack(values, axis=-1), np.array(exact))
    return found, float(np.mean(mode[0] != mode[-1]))


EXPANDED = {"step_size": 0.003, "friction": 1.0, "num_steps": 25}


def run_from_the_law(mixture: ModuleType, name: str, variance: float) -> np.ndarray:
    """Draws, shape (draws, chains, 2), of chains that start from the mixture.

    Factors start from their law: x is independent of them in it, but not on the way to it.
    """
    num_chains = 4000
    x = mixture.exact_draws(np.random.default_rng(5), num_chains, variance)
    position: dict = {"x": jnp.asarray(x[..., None], jnp.float32)}
    kernel: Any = GGMC(mixture.mixture, step_size=0.15, friction=1.0, num_steps=9)
    if name != "GGMC":
        kernel = SGHMC(mixture.expanded(name), **EXPANDED)
        value = position.pop("x")
        sites = [f"x_expanded_P{k + 1}" for k in range(mixture.NUM_FACTORS)]
        position = {site: jnp.zeros((num_chains, 2, 2)) for site in sites}
        if name == "posterior":
            keys = random.split(random.key(7), mixture.NUM_FACTORS)
            position = {
                site: random.normal(key, (num_chains, 2, 2))
                for site, key in zip(sites, keys, strict=True)
            }
            for site in reversed(sites):
                factor = jnp.eye(2) + 0.25 / math.sqrt(2) * position[site]
                value = jnp.linalg.inv(factor) @ value
        position["x_expanded_V"] = value
    state = chains.start(kernel, position, seed=6, args=(variance,))
    _, draws = chains.run(kernel, state, 20, args=(variance,))
    values = jax.vmap(jax.vmap(kernel.postprocess_fn((variance,), {})))(draws.z)
    return np.asarray(values["x"][..., 0], np.float64)


@pytest.mark.parametrize("variance", [NARROW, WIDE])
@pytest.mark.slow
@pytest.mark.parametrize("name", ["posterior", "GGMC"])
def test_chains_keep_the_law(mixture: ModuleType, name: str, variance: float) -> None:
    draws = run_from_the_law(mixture, name, variance)
    found, changed = score(mixture, draws, variance)
    assert np.abs(found).max() < ALLOWED, found
    # they move: within modes, whose draws are correlated with the first ones no more; between them
    off = draws - mixture.MEANS[mixture.nearest_mode(draws)]
    assert abs(np.corrcoef(off[0].ravel(), off[-1].ravel())[0, 1]) < 0.5
    assert changed > 0.05 or variance == NARROW


@pytest.mark.slow
def test_factors_leave_the_law(mixture: ModuleType) -> None:
    found, _ = score(mixture, run_from_the_law(mixture, "factors", NARROW), NARROW)
    assert found[-1] < -4 * ALLOWED  # they pull all modes to the origin


# --- the script


@pytest.mark.slow
def test_main_runs(mixture: ModuleType, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(mixture, "QUICK_METHODS", ("NUTS",))
    out, figure = tmp_path / "new" / "mixture.md", tmp_path / "mixture.png"
    rows = mixture.main(["--quick", "--out", str(out), "--figure", str(figure)])
    assert [row.name for row in rows[2:]] == ["NUTS"]
    assert rows[0].pooled.shape == (mixture.QUICK.num_seeds, len(mixture.Fit._fields))
    text = out.read_text()
    shown = capsys.readouterr().out
    assert text in shown
    assert "| SGHMC | step size 0.1, friction 1 | 0.2 | middle |" in shown
    assert "| NUTS | – |" in text
    assert figure.stat().st_size > 0
