"""Plots of an energy: along lines between draws, and in the plane with metric and geodesics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_int
from ..laplace.geodesic import exponential_map
from ..laplace.metrics import dense_metric

PyTree = Any
LEVELS = (0.99, 0.95, 0.8, 0.6, 0.4, 0.2)
"""Probability masses inside the contours of a density."""
ELLIPSE_LEVEL = 0.8
"""Probability mass of the region in which metric ellipses are drawn."""


def pyplot() -> Any:
    """Matplotlib's pyplot, or an ImportError that says how to install it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need Matplotlib: pip install 'numpyro_geom[examples]'") from error
    return plt


def axes_or_new(ax: Any, size: tuple[float, float]) -> Any:
    """The given axes, or those of a new figure of this size in inches."""
    plt = pyplot()
    return plt.subplots(figsize=size, layout="constrained")[1] if ax is None else ax


def plot_connectivity(
    energy: Callable[[PyTree], Any],
    draws: PyTree,
    pairs: Sequence[tuple[int, int]] | None = None,
    *,
    num_points: int = 51,
    ax: Any = None,
) -> Any:
    """Energy along straight lines between draws, to see whether they are in one mode.

    Lines are straight in unconstrained space. Between draws of one convex mode in D dimensions, U
    falls by about D / 4 in the middle, because typical draws are far from the mode. A hump is a
    barrier between modes.

    Args:
        energy: U, a function of one position. It is compiled, and evaluated at one point at a time.
        draws: positions, a pytree whose leaves have a leading axis of draws.
        pairs: indices of the two ends of each line; None for each draw and the next, up to 8 lines.
        num_points: number of points on a line, ends included.
        ax: axes to draw on.

    Raises:
        ValueError: for fewer than two draws, and for pairs out of range.
    """
    num_points = check_int("num_points", num_points, least=2)
    draws = jax.tree.map(jnp.asarray, draws)
    leaves = jax.tree.leaves(draws)
    number = len(leaves[0]) if leaves and jnp.ndim(leaves[0]) else 0
    if number < 2:
        raise ValueError(f"expected at least 2 draws along the leading axis, got {number}")
    if pairs is None:
        pairs = [(k, k + 1) for k in range(min(number - 1, 8))]
    ends = np.asarray(pairs)
    if ends.ndim != 2 or ends.shape[1] != 2 or np.any((ends < 0) | (ends >= number)):
        raise ValueError(f"pairs must be of indices from 0 to {number - 1}, got {pairs!r}")
    t = jnp.linspace(0.0, 1.0, num_points)

    def along(pair: jax.Array) -> jax.Array:
        def between(s: jax.Array) -> PyTree:
            return jax.tree.map(lambda x: (1 - s) * x[pair[0]] + s * x[pair[1]], draws)

        return lax.map(lambda s: energy(between(s)), t)

    heights = np.asarray(jax.jit(lambda pairs: lax.map(along, pairs))(jnp.asarray(ends)))
    ax = axes_or_new(ax, (6, 3.6))
    for (a, b), line in zip(ends, heights, strict=True):
        ax.plot(t, line, linewidth=1.2, label=f"{a} to {b}")
        ax.plot([0, 1], line[[0, -1]], "o", color="black", markersize=3)
    barrier = (heights.max(1) - heights[:, [0, -1]].max(1)).max()
    ax.set(xlabel="fraction of the way", ylabel="energy U (nats)", xlim=(-0.02, 1.02))
    ax.set_title(f"highest barrier {barrier:.3g} nats above the ends", fontsize="small")
    small = {"fontsize": "x-small", "title_fontsize": "x-small", "frameon": False}
    ax.legend(title="draws", loc="center left", bbox_to_anchor=(1.0, 0.5), **small)
    return ax


def plot_density_2d(
    log_density: Callable[[jax.Array], Any],
    draws: Any = None,
    *,
    metric: Callable[[jax.Array], Any] | None = None,
    geodesics: Any = None,
    limits: tuple[tuple[float, float], tuple[float, float]] | None = None,
    num_ellipses: int = 12,
    ax: Any = None,
) -> Any:
    """A density in two dimensions with draws, metric ellipses and geodesics.

    Contours hold 20, 40, 60, 80, 95 and 99% of the mass within the limits. An ellipse at theta
    is theta + r A^{1/2} u over the unit circle, with A = G^{-1}. Steps are long where the ellipse
    is long. All ellipses have the same r, chosen such that they hardly overlap.

    Args:
        log_density: log p up to a constant, a function of one position of shape (2,).
        draws: shape (..., 2), or None.
        metric: ``theta -> G``, shape (2, 2), positive definite.
        geodesics: paths, shape (number, points, 2), see `geodesic_paths`; or a list of arrays
            (points, 2).
        limits: limits of both axes; None for the range of the draws and paths, with a margin.
        num_ellipses: number of ellipses, spread over the region of 80% of the mass.
        ax: axes to draw on.

    Raises:
        ValueError: for draws of another shape; if there are no limits, draws or paths; for a
            density that is nowhere finite, or infinite somewhere.
    """
    points = None if draws is None else np.asarray(draws, float).reshape(-1, np.shape(draws)[-1])
    if points is not None and points.shape[1] != 2:
        raise ValueError(f"draws must have shape (..., 2), got {np.shape(draws)}")
    paths = [] if geodesics is None else [np.asarray(path, float) for path in geodesics]
    if limits is None:
        known = [*paths] if points is None else [points, *paths]
        if not known:
            raise ValueError("expected limits=((low, high), (low, high)), draws or geodesics")
        both = np.concatenate(known)
        low, high = both.min(0), both.max(0)
        margin = 0.08 * (high - low)
        low, high = low - margin, high + margin
        limits = (float(low[0]), float(high[0])), (float(low[1]), float(high[1]))
    axis = [np.linspace(*limit, 161) for limit in limits]
    grid = np.stack(np.meshgrid(*axis), axis=-1)
    value = np.asarray(jax.jit(jax.vmap(jax.vmap(log_density)))(jnp.asarray(grid)), float)
    most = np.max(value, initial=-np.inf, where=~np.isnan(value))
    if not np.isfinite(most):
        raise ValueError(
            f"log_density must be finite somewhere within limits={limits} and nowhere infinite, "
            f"got {np.isnan(value).sum()} NaN of {value.size} values and a largest of {most}"
        )
    mass = np.exp(value - most)
    mass = np.where(np.isfinite(mass), mass, 0.0)
    ranked = np.sort(mass.ravel())[::-1]
    share = np.cumsum(ranked) / ranked.sum()
    levels = np.unique(np.append(ranked[np.searchsorted(share, LEVELS)], 1.0))
    ax = axes_or_new(ax, (5.2, 4.6))
    ax.contourf(*axis, mass, levels, cmap="Blues", extend="neither")
    ax.contour(*axis, mass, levels[:-1], colors="white", linewidths=0.5)
    if points is not None:
        ax.plot(*points.T, ".", color="black", markersize=3.5, alpha=0.45, markeredgewidth=0)
    if metric is not None:
        dense = float(ranked[np.searchsorted(share, ELLIPSE_LEVEL)])
        centres = _spots(axis, mass, dense, num_ellipses)
        for ring in _ellipses(metric, centres, limits):
            ax.plot(*ring.T, color="tab:red", linewidth=0.9)
    for path in paths:
        ax.plot(*path.T, color="tab:orange", linewidth=1.3)
        ax.plot(*path[-1], "o", color="tab:orange", markersize=3)
    ax.set(xlim=limits[0], ylim=limits[1])
    return ax


def geodesic_paths(
    metric: Callable[[jax.Array], Any], start: Any, velocities: Any, num_points: int = 50
) -> np.ndarray:
    """Geodesics of a metric over unit time, for `plot_density_2d`.

    Args:
        metric: ``theta -> G``, shape (D, D), positive definite.
        start: theta(0), shape (D,).
        velocities: theta'(0) of each path, shape (number, D).
        num_points: number of points on each path.

    Returns:
        Paths, shape (number, num_points, D); NaN from the point at which the solver failed.
    """
    acceleration = dense_metric(metric).acceleration
    times = jnp.linspace(0.0, 1.0, check_int("num_points", num_points, least=2))
    position = jnp.asarray(start, float)

    def point(velocity: jax.Array, t: jax.Array) -> jax.Array:
        # geodesics have an affine parameter: theta(t) is the end point for t times the velocity
        end = exponential_map(acceleration, position, t * velocity)
        return jnp.where(end.success, end.position, jnp.nan)

    follow = jax.vmap(jax.vmap(point, (None, 0)), (0, None))
    return np.asarray(jax.jit(follow)(jnp.asarray(velocities, float), times))


def _spots(axis: list[np.ndarray], mass: np.ndarray, level: float, number: int) -> np.ndarray:
    """Centres of ellipses: the mode, then repeatedly the dense point that is farthest from all."""
    j, i = np.nonzero(mass >= level)
    scaled = np.stack([i, j], axis=-1) / len(axis[0])
    chosen = [int(np.argmax(mass[j, i]))]
    gap = np.linalg.norm(scaled - scaled[chosen[0]], axis=1)
    while len(chosen) < number and gap.max() > 0:
        chosen.append(int(np.argmax(gap)))
        gap = np.minimum(gap, np.linalg.norm(scaled - scaled[chosen[-1]], axis=1))
    return np.stack([axis[0][i[chosen]], axis[1][j[chosen]]], axis=-1)


def _ellipses(
    metric: Callable[[jax.Array], Any],
    centres: np.ndarray,
    limits: tuple[tuple[float, float], tuple[float, float]],
) -> list[np.ndarray]:
    """Closed curves theta + r A^{1/2} u."""
    G = np.asarray(jax.jit(jax.vmap(metric))(jnp.asarray(centres)), float)
    values, vectors = np.linalg.eigh(G)
    if not np.all(values > 0):
        raise ValueError(
            f"metric must be positive definite, got an eigenvalue {values.min():.3g} at "
            f"{centres[np.argmin(values.min(1))]}"
        )
    roots = np.einsum("nik,nk,njk->nij", vectors, values**-0.5, vectors)
    # compare half widths of their bounding boxes with the distance to the nearest other ellipse,
    # in widths of the plot, so that most ellipses do not overlap
    span = np.array(limits)[:, 1] - np.array(limits)[:, 0]
    widths = (np.sqrt(np.einsum("nij,nij->ni", roots, roots)) / span).max(1)
    apart = np.linalg.norm((centres[:, None] - centres) / span, axis=-1)
    nearest = np.where(apart > 0, apart, np.inf).min(1)
    radius = float(np.quantile(np.minimum(0.5 * nearest, 0.1) / widths, 0.3))
    angle = np.linspace(0, 2 * np.pi, 65)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    return [c + radius * (root @ circle).T for c, root in zip(centres, roots, strict=True)]
