"""Plots of draws and of the results of the other diagnostics; each function returns its axes.

All functions take ``ax=``, the axes to draw on; the default is new axes. They use Matplotlib alone,
so they look the same under ArviZ 0.2x and 1.x. Without Matplotlib, an ImportError says how to
install it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import norm

from .comparison import ScalarDifference, common, scalar_differences
from .draws import Arrays, chosen, group_of
from .monte_carlo import effective_size, estimate_moments
from .predictive import stream_of
from .step_size_bias import BiasCurve

__all__ = ["plot_bias", "plot_calibration", "plot_comparison", "plot_energy", "plot_temperatures"]

MOST_PANELS = 16
MOST_LINES = 6
RANK_BINS = 20
BAND = 0.99
"""Probability that a rank bar is in its band by chance."""
DRAWS, REFERENCE = "tab:blue", "0.75"


def plot_comparison(
    draws: Any, reference: Any, var_names: str | Sequence[str] | None = None, *, ax: Any = None
) -> Any:
    """Histograms of draws and reference, one panel per scalar, with rank bars below.

    Rank bars are the shares of the draws between neighbouring 5% quantiles of the reference. They
    are level if both agree, have a hump in the middle if the draws are too narrow, and have a slope
    if the draws are shifted. By chance, a bar is in the grey band with probability 99%, given the
    effective sample sizes of both sides.

    Args:
        draws: as for `numpyro_geom.diagnostics.compare`.
        reference: as for `numpyro_geom.diagnostics.compare`.
        var_names: variable or variables to draw; None for all that both have, up to 16 scalars.
        ax: axes for one scalar, or an array with one axes object per scalar.

    Returns:
        An array of the panels' axes, without the axes of the bars.

    Raises:
        TypeError, ValueError: as `compare`; also for more than 16 scalars, or a wrong number of
            axes.
    """
    plt = _pyplot()
    x, y, _, _ = common(draws, reference, var_names)
    number = len(x.names)
    if number > MOST_PANELS:
        raise ValueError(
            f"expected at most {MOST_PANELS} scalars to draw, got {number}: choose var_names"
        )
    if ax is None:
        rows = -(-number // 4)
        columns = -(-number // rows)
        size = (3.4 * columns, 3.2 * rows)
        figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
        figure.subplots_adjust(0.5 / size[0], 0.45 / size[1], 1 - 0.15 / size[0], 1, 0.2, 0.28)
        figure.subplots_adjust(top=1 - 0.5 / size[1])
        panels = grid.ravel()
        for extra in panels[number:]:
            extra.remove()
    else:
        panels = np.atleast_1d(np.asarray(ax, object)).ravel()
        if panels.size != number:
            raise ValueError(f"ax must be {number} axes, one per scalar, got {panels.size}")
    found = scalar_differences(x, y, estimate_moments(x.values), estimate_moments(y.values))
    for k, row in enumerate(found):
        _panel(panels[k], x.values[..., k], y.values[..., k], row, legend=k == 0)
    return panels[:number]


def _panel(ax: Any, x: np.ndarray, y: np.ndarray, row: ScalarDifference, *, legend: bool) -> None:
    from mpl_toolkits.axes_grid1 import make_axes_locatable

    low, high = np.quantile(np.concatenate([x.ravel(), y.ravel()]), [0.001, 0.999])
    edges = np.linspace(low, high, 41)
    for values, style in (
        (y, {"color": REFERENCE, "fill": True, "label": "reference"}),
        (x, {"color": DRAWS, "linewidth": 1.4, "label": "draws"}),
    ):
        heights = np.histogram(values, edges)[0] / values.size / np.diff(edges)
        ax.stairs(heights, edges, **style)
    ax.set_yticks([])
    ax.tick_params(labelsize="small")
    ax.set_title(
        f"{row.name}\nmean off {row.mean_error:+.2f} $\\pm$ {row.mean_noise:.2f} sd, "
        f"sd $\\times$ {row.sd_ratio:.2f} $\\pm$ {row.sd_noise:.2f}",
        fontsize="small",
    )
    if legend:
        ax.legend(fontsize="x-small", frameon=False, loc="upper right")
    bars = make_axes_locatable(ax).append_axes("bottom", size="28%", pad=0.32)
    cuts = np.quantile(y, np.linspace(0, 1, RANK_BINS + 1)[1:-1])
    bins = np.searchsorted(cuts, x)
    shares = RANK_BINS * np.bincount(bins.ravel(), minlength=RANK_BINS) / x.size
    # the standard error of the share of a bin, from both sides
    p = 1 / RANK_BINS
    sizes = [
        effective_size((np.searchsorted(cuts, z) == RANK_BINS // 2).astype(float)[..., None])[0]
        for z in (x, y)
    ]
    sd = np.sqrt(p * (1 - p) * sum(1 / n for n in sizes)) / p
    half = norm.isf((1 - BAND) / 2) * sd
    bars.axhspan(max(0, 1 - half), 1 + half, color="0.9")
    bars.axhline(1, color="0.5", linewidth=0.8)
    bars.bar(np.arange(RANK_BINS) + 0.5, shares, width=0.85, color=DRAWS, alpha=0.8)
    bars.set(xlim=(0, RANK_BINS), yticks=[], xticks=[], ylim=(0, max(2.2, 1.3 * shares.max())))
    # labels are inside, because layouts ignore these axes and would cut off labels below them
    style = {"fontsize": "x-small", "va": "top", "color": "0.3", "transform": bars.transAxes}
    bars.text(0.01, 0.95, "rank in reference", **style)


def plot_energy(idata: Any, *, ax: Any = None) -> Any:
    """Trace of the energy U, one line per chain; draws with failed steps are marked.

    A trend means that warm-up was too short. The energy of a minibatch kernel is an estimate and
    noisier than U.

    Args:
        idata: an InferenceData or DataTree from `numpyro_geom.to_inference_data`.
        ax: axes to draw on.

    Raises:
        TypeError: for an object without ``sample_stats``.
        ValueError: if ``sample_stats`` has neither ``energy`` nor ``lp``.
    """
    stats = _stats(idata)
    if "energy" not in stats and "lp" not in stats:
        raise ValueError(f"sample_stats must have 'energy' or 'lp', got {sorted(stats)}")
    energy = stats["energy"] if "energy" in stats else -stats["lp"]
    ax = _axes_or_new(ax, (7, 3))
    colors = _pyplot().get_cmap("viridis")(np.linspace(0.1, 0.85, len(energy)))
    for chain, color in zip(energy, colors, strict=True):
        ax.plot(chain, color=color, linewidth=0.7, alpha=0.8)
    undone = np.argwhere(stats.get("diverging", np.zeros(energy.shape, bool)))
    if len(undone):
        at, across = undone[:, 1], ax.get_xaxis_transform()
        ax.plot(at, 0.03 + 0 * at, "|", color="tab:red", transform=across, label="failed steps")
        ax.legend(fontsize="small", loc="upper right")
    ax.set(xlabel="draw", ylabel="energy U (nats)")
    return ax


def plot_temperatures(idata: Any, *, ax: Any = None) -> Any:
    """Configurational and kinetic temperature, smoothed over a twentieth of a run, against tau.

    Both estimate the temperature of the target. If one stays above or below tau, the chain has not
    reached the target, or the step size is too large.

    Args:
        idata: an InferenceData or DataTree from `numpyro_geom.to_inference_data`.
        ax: axes to draw on.

    Raises:
        TypeError: for an object without ``sample_stats``.
        ValueError: if ``sample_stats`` has no temperature.
    """
    stats = _stats(idata)
    names = [n for n in ("configurational_temperature", "kinetic_temperature") if n in stats]
    if not names:
        raise ValueError(
            f"sample_stats must have 'configurational_temperature', got {sorted(stats)}: runs "
            "of this package's kernels have it"
        )
    ax = _axes_or_new(ax, (7, 3))
    for name, color in zip(names, ("tab:blue", "tab:orange"), strict=False):
        values = stats[name]
        width = max(1, values.shape[1] // 20)
        kernel = np.ones(width) / width
        for k, chain in enumerate(values):
            smooth = np.convolve(chain, kernel, mode="valid")
            at = np.arange(smooth.size) + (width - 1) / 2
            label = f"{name.removesuffix('_temperature')}, mean {values.mean():.3g}"
            ax.plot(at, smooth, color=color, linewidth=0.9, alpha=0.7, label=None if k else label)
    tau = getattr(idata["posterior"], "attrs", {}).get("temperature", 1.0)
    ax.axhline(tau, color="black", linestyle="--", linewidth=1, label=f"target, {tau:g}")
    ax.set(xlabel="draw", ylabel="temperature")
    ax.legend(fontsize="small", frameon=False, ncols=3, loc="upper left")
    ax.margins(y=0.25)
    return ax


def _stats(idata: Any) -> Arrays:
    if not hasattr(idata, "sample_stats"):
        raise TypeError(
            "expected an InferenceData or DataTree with sample_stats, got "
            f"{type(idata).__name__}: use `to_inference_data(mcmc)`"
        )
    return group_of(idata, "sample_stats")


def plot_bias(curve: BiasCurve, names: str | Sequence[str] | None = None, *, ax: Any = None) -> Any:
    """Bias of means and sds against the step size, with the fitted lines.

    The vertical axis is the distance from the fitted value at h = 0, over the sd at the smallest h.
    Bars are one Monte Carlo error to either side; the bar at h = 0 is the error of the extrapolated
    value. An sd whose fitted line is negative at h = 0 has "no verdict" in the legend.

    Args:
        curve: the result of `numpyro_geom.diagnostics.bias_vs_step`.
        names: scalar or scalars to draw; None for the six means and sds whose bias is the largest
            relative to its error.
        ax: axes to draw on.

    Raises:
        TypeError: for an object that is not a BiasCurve.
        ValueError: for unknown names.
    """
    if not isinstance(curve, BiasCurve):
        raise TypeError(f"expected a BiasCurve, got {type(curve).__name__}")
    if names is None:
        shown = list(curve.ranked(MOST_LINES))
    else:
        names = chosen(names, {s.name for s in curve.scalars}, "the curve")
        shown = [s for s in curve.scalars if s.name in names]
    ax = _axes_or_new(ax, (6, 4))
    sds = {s.name: s.values[-1] for s in curve.scalars if s.moment == "sd"}
    h = np.array(curve.step_sizes)
    ends = np.array([0.0, 1.03 * h.max()])
    for k, s in enumerate(shown):
        is_sd, sd, color = s.moment == "sd", sds[s.name], f"C{k}"
        # shifted a little, so that the bars of different scalars do not overlap
        at = np.append(h, 0.0) + 0.004 * h.max() * (k - len(shown) / 2)
        values = np.append((np.array(s.values) - s.limit) / sd, 0.0)
        errors = np.append(np.array(s.errors), s.limit_error) / sd
        style = {"color": color, "marker": "o" if is_sd else "s", "capsize": 2, "markersize": 4}
        style |= {"linestyle": "none", "markerfacecolor": color if is_sd else "white"}
        label = f"{s.moment} of {s.name}" + (", no verdict" if s.is_negative else "")
        ax.errorbar(at, values, errors, label=label, **style)
        dashes = "-" if is_sd else "--"
        ax.plot(ends, s.slope * ends / sd, color=color, linestyle=dashes, linewidth=1)
    ax.axhline(0, color="0.5", linewidth=0.8)
    own = {"color": "0.5", "linewidth": 0.8, "linestyle": ":", "label": "kernel's own h"}
    ax.axvline(curve.step_size, **own)
    ax.set(xlabel="step size h", ylabel="bias, in sd at the smallest h")
    ax.legend(fontsize="small", frameon=False)
    return ax


def plot_calibration(probs: Any, labels: Any, bins: int = 15, *, ax: Any = None) -> Any:
    """Share of correct predictions against their confidence, with the number in each bin below.

    Confidence is the largest class probability, in bins of equal width. On the diagonal, the share
    of correct predictions equals the confidence. Below the diagonal, predictions are overconfident.
    Bars are standard errors of the share. The title has the expected calibration error: the mean
    distance from the diagonal, weighted by the number of predictions.

    Args:
        probs: class probabilities, shape (rows, classes), or of class 1, shape (rows,).
        labels: class indices, shape (rows,).
        bins: number of bins of confidence.
        ax: axes to draw on.

    Raises:
        TypeError: for labels that are not integers.
        ValueError: for shapes that do not fit; for probabilities that are out of range or do not
            sum to 1; for labels that are not a class; for less than one bin.

    Source: Guo, Pleiss, Sun and Weinberger, "On Calibration of Modern Neural Networks", ICML 2017.
    """
    if np.ndim(probs) > 2:
        raise ValueError(
            "expected probs of shape (rows, classes) or (rows,), got "
            f"{np.shape(probs)}: average over draws first"
        )
    stream = stream_of(np.asarray(probs)[None], labels, bins=bins)
    counts, sure, right = stream.by_confidence
    used = counts > 0
    n = counts[used]
    mean, share = sure[used] / n, right[used] / n
    error = np.sqrt(np.maximum(share * (1 - share), 0.25 / (n + 1)) / n)

    ax = _axes_or_new(ax, (4.5, 4.5))
    ax.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--")
    ax.errorbar(mean, share, error, fmt="o-", color=DRAWS, markersize=4, capsize=2, linewidth=1)
    middle = (np.arange(bins) + 0.5) / bins
    ax.bar(middle, 0.18 * counts / counts.max(), width=0.9 / bins, color=REFERENCE, zorder=0)
    low = np.floor(10 * stream.probabilities.max(axis=1).min()) / 10
    ax.set(xlim=(low, 1.01), ylim=(0, 1.02), xlabel="confidence", ylabel="share correct")
    ax.set_title(
        f"expected calibration error {stream.calibration_error:.3f}, {n.sum():,.0f} predictions",
        fontsize="small",
    )
    return ax


def _pyplot() -> Any:
    """Matplotlib's pyplot, or an ImportError that says how to install it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need Matplotlib: pip install 'numpyro_geom[examples]'") from error
    return plt


def _axes_or_new(ax: Any, size: tuple[float, float]) -> Any:
    """The given axes, or new axes in a figure of this size in inches."""
    return _pyplot().subplots(figsize=size, layout="constrained")[1] if ax is None else ax
