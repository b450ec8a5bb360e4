"""The contents of plots, read back from their axes; no figure is left open."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from jax import random
from numpyro.infer import MCMC

from numpyro_geom import SGHMC, to_inference_data
from numpyro_geom.diagnostics import BiasCurve, plots
from numpyro_geom.diagnostics.monte_carlo import MomentEstimates
from numpyro_geom.diagnostics.step_size_bias import fit_biases

pytestmark = pytest.mark.arviz


@pytest.fixture(autouse=True)
def no_figure_left_open() -> Iterator[None]:
    yield
    for number in plt.get_fignums():
        plt.figure(number).canvas.draw()  # what cannot be drawn fails here
    plt.close("all")


def pair(scale: float = 1.0) -> tuple[dict, dict]:
    x, y = np.random.default_rng(0).normal(size=(2, 2, 500, 3))
    return {"w": scale * x}, {"w": y}


def test_comparison_has_a_panel_and_rank_bars_for_each_scalar() -> None:
    panels = plots.plot_comparison(*pair(scale=0.5))
    assert [ax.get_title().split("\n")[0] for ax in panels] == ["w[0]", "w[1]", "w[2]"]
    assert r"$\pm$" in panels[0].get_title()
    figure = panels[0].figure
    assert len(figure.axes) == 6
    for bars in figure.axes[3:]:
        heights = np.array([p.get_height() for p in bars.patches if p.get_width() < 1])
        assert heights.sum() == pytest.approx(20)
        # draws too narrow: N(0, 1/4) has 14 times the mass per rank in the middle of the tails'
        assert heights[9:11].mean() > 1.5 > 0.5 > heights[[0, -1]].mean()


def test_comparison_on_axes_of_the_user() -> None:
    x, y = pair()
    _, own = plt.subplots()
    one = [{**z, "v": z["w"][..., 0]} for z in (x, y)]
    (panel,) = plots.plot_comparison(*one, "v", ax=own)
    assert panel is own
    with pytest.raises(ValueError, match="ax must be 3 axes, one per scalar, got 1"):
        plots.plot_comparison(x, y, ax=own)
    wide = {"w": np.random.default_rng(1).normal(size=(2, 20, 17))}
    with pytest.raises(ValueError, match="at most 16 scalars to draw, got 17"):
        plots.plot_comparison(wide, wide)


def test_traces_of_energy_and_temperature() -> None:
    kernel = SGHMC(
        potential_fn=lambda z: jnp.sum(z**2) / 4, step_size=0.1, num_steps=2, friction=1.0,
        temperature=0.5,
    )  # fmt: skip
    options = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=5, num_samples=60, **options)
    mcmc.run(random.key(0), init_params=jnp.ones((2, 3)))
    idata = to_inference_data(mcmc)
    energy = np.asarray(idata.sample_stats["energy"])
    ax = plots.plot_energy(idata)
    assert len(ax.lines) == 2
    np.testing.assert_array_equal([line.get_ydata() for line in ax.lines], energy)
    assert ax.get_ylabel() == "energy U (nats)"

    _, own = plt.subplots()
    ax = plots.plot_temperatures(idata, ax=own)
    assert ax is own
    *traces, target = ax.lines
    assert len(traces) == 4
    np.testing.assert_array_equal(target.get_ydata(), 0.5)
    raw = np.asarray(idata.sample_stats["configurational_temperature"])
    # a mean over 60 / 20 = 3 draws, in their middle
    assert traces[0].get_ydata()[0] == pytest.approx(raw[0, :3].mean(), rel=1e-6)
    assert traces[0].get_xdata()[0] == 1.0


class Stats:
    """As much of an InferenceData as a trace needs."""

    def __init__(self, **stats: np.ndarray) -> None:
        import xarray as xr

        self.sample_stats = xr.Dataset({n: (("chain", "draw"), x) for n, x in stats.items()})

    def __getitem__(self, group: str) -> Any:
        return getattr(self, group)


def test_energy_of_other_kernels_and_undone_steps() -> None:
    lp = np.arange(8.0).reshape(2, 4)
    undone = np.zeros((2, 4), bool)
    undone[1, 2] = True
    ax = plots.plot_energy(Stats(lp=lp, diverging=undone))
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), -lp[1])
    np.testing.assert_array_equal(ax.lines[2].get_xdata(), [2])
    with pytest.raises(ValueError, match="must have 'energy' or 'lp'"):
        plots.plot_energy(Stats(n_steps=lp))
    with pytest.raises(ValueError, match="must have 'configurational_temperature'"):
        plots.plot_temperatures(Stats(lp=lp))
    with pytest.raises(TypeError, match="InferenceData or DataTree with sample_stats"):
        plots.plot_energy({"lp": lp})


def curve() -> BiasCurve:
    h = np.array([0.4, 0.2, 0.1])
    error = np.array([0.01, 0.02])
    found = [
        MomentEstimates(0 * error, error, np.array([1 + s, 2.0]), error, error, error) for s in h
    ]
    return BiasCurve(
        fit_biases(("a", "b"), 0.2, h, found), 0.2, (0.4, 0.2, 0.1), (1, 2, 4), (0, 0, 0)
    )


def test_bias_has_points_and_lines_through_zero() -> None:
    ax = plots.plot_bias(curve(), ["a"])
    containers = {c.get_label(): c for c in ax.containers}
    assert set(containers) == {"mean of a", "sd of a"}
    points = containers["sd of a"].lines[0]
    # sd 1 + h, so that the bias over the sd at the smallest h is h / 1.1
    np.testing.assert_allclose(points.get_ydata(), np.array([4, 2, 1, 0]) / 11, atol=1e-12)
    fitted = [line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_xdata()[0] == 0]
    ends = [line.get_ydata() for line in fitted if line.get_ydata()[1] > 0.1]
    np.testing.assert_allclose(ends, [[0.0, 0.412 / 1.1]], atol=1e-12)
    assert len(plots.plot_bias(curve(), "a").containers) == 2
    assert len(plots.plot_bias(curve()).containers) == 4
    with pytest.raises(ValueError, match=r"curve has no variables \['c'\]"):
        plots.plot_bias(curve(), ["c"])
    with pytest.raises(TypeError, match="expected a BiasCurve, got dict"):
        plots.plot_bias({})


def test_an_sd_without_a_limit_is_drawn_upright() -> None:
    h, error = np.array([0.4, 0.2, 0.1]), np.array([0.01])
    found = [
        MomentEstimates(0 * error, error, np.array([s]), error, error, error) for s in (5, 2, 0.5)
    ]
    steep = BiasCurve(fit_biases(("a",), 0.4, h, found), 0.4, tuple(h), (1, 2, 4), (0, 0, 0))
    assert steep.scalars[1].limit < 0
    containers = {c.get_label(): c for c in plots.plot_bias(steep).containers}
    assert set(containers) == {"mean of a", "sd of a, no verdict"}
    heights = containers["sd of a, no verdict"].lines[0].get_ydata()
    np.testing.assert_allclose(np.diff(heights[:3]), [-3 / 0.5, -1.5 / 0.5])


def test_calibration_of_known_predictions() -> None:
    # 10 predictions of 0.65, 8 of them right; 10 of 0.95, 9 right; ECE = (0.15 + 0.05) / 2
    probs = np.repeat([0.65, 0.95], 10)
    labels = np.array([1] * 8 + [0] * 2 + [1] * 9 + [0])
    ax = plots.plot_calibration(probs, labels, bins=10)
    points = ax.containers[0].lines[0]
    np.testing.assert_allclose(points.get_xdata(), [0.65, 0.95])
    np.testing.assert_allclose(points.get_ydata(), [0.8, 0.9])
    assert "error 0.100, 20 predictions" in ax.get_title()
    twice = plots.plot_calibration(np.stack([1 - probs, probs], 1), labels, bins=10)
    assert twice.get_title() == ax.get_title()
    with pytest.raises(ValueError, match="average over draws first"):
        plots.plot_calibration(np.zeros((3, 4, 2)), labels)
    with pytest.raises(ValueError, match="pass logits=True"):
        plots.plot_calibration(3 * probs, labels)
    with pytest.raises(ValueError, match="sums from 0.8 to 0.8"):
        plots.plot_calibration(np.full((20, 2), 0.4), labels)
    with pytest.raises(ValueError, match="labels must lie between 0 and 1, got some from 1 to 2"):
        plots.plot_calibration(probs, labels + 1)
    with pytest.raises(ValueError, match="bins must be an integer of at least 1, got 0"):
        plots.plot_calibration(probs, labels, bins=0)


def test_matplotlib_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'numpyro_geom\[examples\]'"):
        plots.plot_comparison(*pair())
    with pytest.raises(ImportError, match=r"pip install 'numpyro_geom\[examples\]'"):
        plots.plot_bias(curve())
