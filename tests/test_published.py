"""The papers' updates, written by hand, against the kernels of `examples/published.py`."""

from __future__ import annotations

import doctest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scripts import load_script

from numpyro_geom import RMSprop
from numpyro_geom.baselines import ISGD

published = load_script("published")
papers = load_script("benchmarks/papers")

N = 50
Y = random.normal(random.key(0), (N,)) + 2


def model(size: int = 3) -> None:
    theta = numpyro.sample("theta", dist.Normal(jnp.ones(size), 2.0).to_event(1))
    with numpyro.plate("rows", N):
        numpyro.sample("y", dist.Normal(theta.mean(), 1.0), obs=Y)


def gradient(theta: np.ndarray) -> np.ndarray:
    """Of U on all rows."""
    return (theta - 1) / 4 - np.sum(np.asarray(Y) - theta.mean()) / theta.size


def positions(kernel: Any, size: int, draws: int, start: np.ndarray) -> tuple[np.ndarray, Any]:
    state = kernel.init(random.key(0), 0, {"theta": jnp.asarray(start)}, (size,), {})
    sample = jax.jit(lambda s: kernel.sample(s, (size,), {}))
    found = []
    for _ in range(draws):
        state = sample(state)
        found.append(np.asarray(state.z["theta"]))
    return np.stack(found), state


def without_noise(e: np.ndarray, sampler: str, theta: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Positions after each step of Kim et al. without noise, from the momentum r."""
    found, v = [], 0.0
    for step in e:
        g = gradient(theta)
        if sampler == "SGLD":
            theta = theta - step * g
        elif sampler == "pSGLD":
            v = 0.99 * v + 0.01 * g**2
            theta = theta - step * g / np.sqrt(v)
        else:
            r = r - step * g
            theta = theta + step / 2 * r
            r = np.exp(-2.0 * step) * r
            theta = theta + step / 2 * r
        found.append(theta)
    return np.stack(found)


@pytest.mark.parametrize("sampler", ["SGLD", "pSGLD", "SGHMC"])
def test_updates_of_kim_without_noise(sampler: str) -> None:
    kernel = published.kim_2025(
        model,
        sampler,
        num_rows=N,
        peak=0.01,
        friction=2.0,
        steps_per_cycle=4,
        batch_size=None,
        num_steps=1,
        temperature=0.0,
    )
    start = np.array([0.5, 1.0, -1.0])
    found, _ = positions(kernel, 3, 6, start)
    e = 0.005 * (np.cos(np.pi * (np.arange(6) % 4) / 4) + 1)
    expected = without_noise(e, sampler, start, np.zeros(3))
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize("sampler", ["SGLD", "pSGLD", "SGHMC", "SGNHT"])
def test_noise_of_kim(sampler: str) -> None:
    """Variances of one step's noise in many coordinates, in units of 4.5 Monte Carlo errors."""
    size, e, c = 4000, 0.01, 5.0
    kernel = published.kim_2025(
        model, sampler, num_rows=N, peak=e, friction=c, steps_per_cycle=1, batch_size=None
    )
    start = np.linspace(-1, 3, size)
    (first, *_), state = positions(kernel, size, 1, start)
    g = gradient(start)
    moved = first - start
    if sampler == "SGLD":
        z = (moved + e * g) / np.sqrt(2 * e)
    elif sampler == "pSGLD":
        s = 0.1 * np.abs(g)  # after one step of a mean that starts at 0
        z = (moved + e * g / s) / np.sqrt(2 * e / s)
    else:
        # the momentum before is a draw of N(0, 1)
        z = (moved / e + e * g) / np.sqrt((1 - e * c) ** 2 + 2 * c * e)
    assert abs(z.var() - 1) < 4.5 * np.sqrt(2 / size)
    if sampler == "SGNHT":
        r = np.asarray(state.dynamics.momentum["theta"])
        change = float(state.dynamics.extra.friction) - c
        np.testing.assert_allclose(change, e * (np.mean(r**2) - 1), rtol=0.05, atol=1e-5)


def test_settings_of_the_papers() -> None:
    yu = published.yu_2023(model, "monge", learning_rate=0.25, num_rows=N, alpha2=1.25)
    s = yu.settings
    assert (s.metric.alpha2, s.metric.decay, s.divergence, s.num_steps) == (1.25, 0.9, "none", 100)
    assert s.step_size == 0.25 / N
    assert published.yu_2023(model, RMSprop(), learning_rate=1.0, num_rows=N, batch_size=7)
    rensmeyer = published.rensmeyer_2025(model, epsilon=0.02).settings
    assert (rensmeyer.divergence, rensmeyer.step_size) == ("corrected", 0.01)
    assert published.kim_factors({"name": "net/a.kernel"}).prior_scale == 0.02**0.5
    assert published.kim_factors({"name": "net/a.bias"}) is None
    assert isinstance(published.franzese_2021(model), ISGD)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: published.kim_2025(model, "HMC", num_rows=N), "sampler must be one of"),
        (lambda: published.kim_2025(model, num_rows=N, peak=0), "peak must be a finite number"),
        (lambda: published.yu_2023(model, learning_rate=-1, num_rows=N), "step_size must be"),
        (lambda: published.yu_2023(model, "adam", learning_rate=1, num_rows=N), "metric must be"),
        (lambda: published.rensmeyer_2025(model, epsilon=0.0), "step_size must be"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_docstring_examples() -> None:
    assert doctest.testmod(published).failed == 0


# --- tables


def test_tables_of_the_papers_are_those_of_ours() -> None:
    """Whoever measures a table again runs `examples/benchmarks/papers.py` after it."""
    for name, text in papers.tables().items():
        assert (papers.TABLES / name).read_text() == text, name


def test_differences_in_standard_errors() -> None:
    theirs = papers.Figure(1.0, 0.4, 4)
    assert papers.away(theirs, papers.Figure(2.0, 0.3, 9)) == f"{1 / (0.2**2 + 0.1**2) ** 0.5:+.1f}"
    # one run of ours is as uncertain as one of theirs
    assert papers.away(theirs, papers.Figure(2.0)) == f"{1 / (0.4**2 + 0.2**2) ** 0.5:+.1f}"
    assert papers.away(theirs._replace(runs=None), papers.Figure(2.0)) == "+2.5"
    assert papers.away(papers.Figure(1.0), papers.Figure(2.0, 0.3, 9)) == ""
