"""Progress bars: shown if requested, and not otherwise."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax import random
from numpyro.infer import MCMC
from targets import normal_mean

from numpyro_geom import SGRLD, RiemannianLaplace, run_in_segments
from numpyro_geom.laplace import draw
from numpyro_geom.runs import mesh

Y = jnp.arange(6.0)


@pytest.mark.parametrize("asked", [True, False])
def test_a_run_obeys_its_mcmc(asked: bool, capsys: pytest.CaptureFixture) -> None:
    kernel = SGRLD(normal_mean, step_size=0.01, num_steps=1)
    mcmc = MCMC(kernel, num_warmup=1, num_samples=2, progress_bar=False)
    mcmc.progress_bar = asked  # the constructor turns it off where tests run in parallel
    run_in_segments(mcmc, random.key(0), Y)
    assert ("3/3" in capsys.readouterr().err) is asked


def test_one_process_of_several_shows_the_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    kernel = SGRLD(normal_mean, step_size=0.01, num_steps=1)
    mcmc = MCMC(kernel, num_warmup=1, num_samples=2, progress_bar=False)
    mcmc.progress_bar = True

    class Second(mesh.Processes):
        def __init__(self, several: bool) -> None:
            super().__init__(several)
            self.is_first = False

    monkeypatch.setattr(mesh, "Processes", Second)
    run_in_segments(mcmc, random.key(0), Y)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("asked", [True, False])
def test_predictions_obey_their_argument(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    def bar(pieces: Any, *, disable: bool, **_: Any) -> Any:
        shown.append(not disable)
        return pieces

    monkeypatch.setattr(draw, "tqdm", bar)
    guide = RiemannianLaplace(normal_mean, metric="euclidean")
    params = guide.fit(random.key(0), Y, num_starts=1)
    guide.predictive(random.key(1), params, Y, num_samples=3, progress_bar=asked)
    guide.sample_posterior(random.key(1), params, sample_shape=(3,), progress_bar=asked)
    assert shown == [asked, asked]
