"""Draws: a Gaussian velocity at the mode, and the end of its geodesic after unit time.

First the draws with their status and weights, as the user gets them. Then the work in chunks, and
the pure functions that a guide compiles for one chunk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.linalg import solve_triangular
from scipy.special import logsumexp, softmax
from tqdm import tqdm

from .._checks import warn_outside
from .._linalg import one_by_one
from .._util import LANES, num_at_once
from ..model.arrowhead import ArrowRoot
from .fit import AtMode, half_log_det
from .geodesic import EVALUATIONS_PER_STEP, Geodesic, exponential_map, log_map, shoot
from .information.form import HIGHEST, Flat
from .metrics import acceleration_fn, choose_solver, fisher_metric, fisher_of
from .predictive import FlatPosterior
from .settings import MATRIX_LIMIT, LaplaceSettings, check_dense, is_wide

EQUAL_WEIGHTS = 0.01
"""Range of log weights, in nats, below which the weights have no tail to describe."""
MOST_AT_ONCE = 256
FIRST_STEPS = 32
"""Steps after which a geodesic leaves its chunk. It is then followed again with other long ones."""


class LaplaceDraws(NamedTuple):
    """Draws of a guide and the status of each; leading dimensions are ``sample_shape``.

    Attributes:
        samples: site name -> values in the site's support, deterministic sites included; NaN if
            the geodesic failed.
        unconstrained: flat unconstrained positions, last dimension D; NaN if the geodesic failed.
        success: whether the geodesic was followed to its end.
        num_evaluations: evaluations of the geodesic's acceleration.
        log_weight: log joint density of the model at the draw, minus log density of the draw.
            None unless requested, NaN if the geodesic failed. Up to a constant if D is above 2,000
            and the precision is ``"fisher"``.
        pareto_k: shape of the generalised Pareto tail of the weights (k-hat). Below
            `largest_shape` the draws can be reweighted to the posterior. Infinite if a geodesic
            failed, because its weight is not known. None without weights.
        seconds: wall time per draw, compilation included.
        model: the model, its `param` sites at the values of the draws.
        args: the model's arguments, the training data.
        kwargs: the model's keyword arguments.
        settings: the guide's settings, by name.
    """

    samples: dict[str, jax.Array]
    unconstrained: jax.Array
    success: jax.Array
    num_evaluations: jax.Array
    log_weight: jax.Array | None
    pareto_k: float | None
    seconds: float
    model: Callable
    args: tuple
    kwargs: dict
    settings: dict[str, Any]

    def log_evidence(self) -> tuple[float, float]:
        """The log marginal likelihood log p(data), in nats, and its standard error.

        It is the log of the mean weight, so priors and factors need their constants. The error is
        too small where `pareto_k` is near 0.7. Weights that cannot correct the draws, or are known
        up to a constant, are an error.
        """
        if self.log_weight is None:
            raise ValueError("expected draws with weights: use draw(..., log_weight=True)")
        logs, size = np.asarray(self.log_weight, float), self.unconstrained.shape[-1]
        unknown = self.settings.get("precision") == "fisher" and is_wide(size)
        if unknown or self.pareto_k is None or not can_correct(logs, self.pareto_k):
            raise ValueError(
                "the weights do not tell the evidence: expected a pareto_k below "
                f"{largest_shape(logs.size):.2g}, got {self.pareto_k:.2g} (and with "
                f"precision='fisher' at most {MATRIX_LIMIT} dimensions, got {size}). Draw more, "
                "reparametrise the model, or use nested sampling"
            )
        error = np.sqrt(max(np.sum(normalized(logs) ** 2) - 1 / logs.size, 0.0))
        return float(logsumexp(logs) - np.log(logs.size)), float(error)

    def resample(self, rng_key: jax.Array) -> dict[str, jax.Array]:
        """Resample the same number of draws by their importance weights, as posterior draws.

        This is systematic resampling, in random order. A draw with n times the mean weight is taken
        n times, rounded up or down. Failed draws are never taken. With `pareto_k` above
        `largest_shape` the result is not the posterior.

        Args:
            rng_key: for the choice.

        Returns:
            Site name -> values, with the shapes in `samples`.

        Raises:
            ValueError: without weights, for a single draw, and if no weight is finite.
        """
        if self.log_weight is None:
            raise ValueError("expected draws with weights: use draw(..., log_weight=True)")
        weights = normalized(self.log_weight)
        count = weights.size
        if count < 2:
            raise ValueError(
                "expected several draws to choose from, got 1: use sample_shape=(1000,)"
            )
        if not np.any(weights):
            raise ValueError(
                f"expected a finite weight, got none among {count} draws: every geodesic failed, "
                "see `success`"
            )
        key_start, key_order = random.split(rng_key)
        marks = (np.arange(count) + float(random.uniform(key_start))) / count
        ends = np.cumsum(weights)
        last = np.argmax(ends)  # rounding can leave a mark beyond the end
        taken = np.minimum(np.searchsorted(ends, marks, side="right"), last)
        chosen = random.permutation(key_order, jnp.asarray(taken))
        flat = {n: x.reshape(count, -1)[chosen] for n, x in self.samples.items()}
        return {n: flat[n].reshape(x.shape) for n, x in self.samples.items()}


# --- weights


def normalized(log_weights: jax.Array | np.ndarray) -> np.ndarray:
    """Flat weights that sum to 1; 0 for failed draws, and all 0 if all draws failed."""
    logs = np.ravel(np.asarray(log_weights, float))
    finite = np.isfinite(logs)
    return softmax(np.where(finite, logs, -np.inf)) if finite.any() else np.zeros(logs.size)


def largest_shape(num_draws: int) -> float:
    """Pareto shape above which the weights of this many draws correct nothing.

    Vehtari, Simpson, Gelman, Yao and Gabry, "Pareto smoothed importance sampling", JMLR 25(72),
    2024: min(1 - 1 / log10(S), 0.7).
    """
    return min(1 - 1 / math.log10(max(num_draws, 2)), 0.7)


def can_correct(log_weights: np.ndarray, shape: float) -> bool:
    """Whether weights of this Pareto shape turn the draws into draws of the posterior.

    They do if the shape is below `largest_shape`. They also do if all weights are equal, because
    then the draws are right as they are.
    """
    logs = np.asarray(log_weights)
    equal = bool(np.ptp(logs) < EQUAL_WEIGHTS)  # False if a weight is NaN
    return not np.isnan(logs).any() and (equal or shape < largest_shape(logs.size))


def pareto_shape(log_weights: np.ndarray) -> float:
    """Shape k of the generalised Pareto tail of importance weights, by ArviZ.

    Infinite if there is no tail, or if a weight is NaN (unknown).
    """
    import arviz as az

    weights = np.reshape(log_weights, -1).astype(float)
    if weights.size < 2 or np.isnan(weights).any() or not np.isfinite(weights).any():
        return np.inf
    with np.errstate(divide="ignore", invalid="ignore"):  # equal weights have no tail
        if hasattr(az, "psislw"):
            k = float(az.psislw(weights)[1])
        else:  # ArviZ 1.x expects log likelihoods, with the other sign
            from arviz_stats.base import array_stats

            try:
                k = float(array_stats.psislw(-weights)[1])
            except ValueError:  # too few weights for a tail
                k = np.inf
    return np.inf if np.isnan(k) else k


# --- chunks


def follow_in_chunks(
    follow: Callable[[Flat, jax.Array, int], tuple],
    draws: Flat,
    squares: jax.Array,
    chunk: int,
    max_steps: int,
    *,
    progress_bar: bool,
) -> tuple[Geodesic, jax.Array]:
    """The geodesic of each draw, from a compiled function for one chunk.

    The function is `follow` of draws, squares and the largest number of steps. Work of more than
    five seconds shows a progress bar.
    """

    def follow_all(which: np.ndarray, chunk: int, limit: int) -> tuple[Geodesic, jax.Array]:
        bar = tqdm(pieces(which.size, chunk), delay=5, disable=not progress_bar, desc="geodesics")
        indices = (which[piece] for piece in bar)
        parts = [jax.block_until_ready(follow(draws[i], squares[i], limit)) for i in indices]
        return jax.tree.map(lambda *x: jnp.concatenate(x)[: which.size], *parts)

    # a chunk takes as long as its longest geodesic, so short and long ones are separated
    order = np.argsort(np.asarray(squares), kind="stable")
    limit = min(FIRST_STEPS, max_steps)
    ends = follow_all(order, chunk, limit)
    spent = np.asarray(ends[0].num_evaluations) >= EVALUATIONS_PER_STEP * limit
    late = np.flatnonzero(~np.asarray(ends[0].success) & spent)  # else more steps do not help
    if late.size and limit < max_steps:
        width = 1 << (late.size - 1).bit_length()  # few widths, because each is compiled
        begin, longest = time.perf_counter(), order[-chunk:]
        jax.block_until_ready(follow(draws[longest], squares[longest], limit))
        each = (time.perf_counter() - begin) / chunk * max_steps / limit
        if late.size * each > 60:
            warn_outside(
                f"{late.size} of {order.size} geodesics take more than {limit} steps, and with up "
                f"to max_steps={max_steps} each may take {each:.2g} s, {late.size * each:,.0f} s "
                "in all: use a smaller max_steps, metric='euclidean', or MCMC",
                UserWarning,
            )
        more = follow_all(order[late], min(width, chunk), max_steps)
        ends = jax.tree.map(lambda x, y: x.at[late].set(y), ends, more)
    back = np.argsort(order, kind="stable")
    return jax.tree.map(lambda x: x[back], ends)


def pieces(count: int, chunk: int) -> list[np.ndarray]:
    """Indices of chunks of equal size; the last chunk wraps around."""
    return [np.arange(i, i + chunk) % count for i in range(0, count, chunk)]


def chunk_size(posterior: FlatPosterior, *, log_weight: bool) -> int:
    """Number of draws whose numbers fit together in a bounded memory."""
    settings = posterior.settings
    straight = settings.metric == "euclidean"
    rows = 0 if straight and not log_weight else posterior.num_outputs
    if settings.batch_size is not None or posterior.model.plan.batch_sizes:
        rows = min(rows, num_at_once(32 * LANES))
    entries = 20 * (posterior.size + rows)
    if settings.metric == "fisher" and choose_solver(posterior) != "cg":
        entries += rows * posterior.size + posterior.size**2
    if settings.metric == "monge-log" or (log_weight and not straight):
        entries *= posterior.size + 1
    return min(num_at_once(entries), MOST_AT_ONCE if posterior.lanes > 1 else 1)


# --- one chunk


def gaussian(
    posterior: FlatPosterior, loc: Flat, at: AtMode, keys: jax.Array
) -> tuple[Flat, jax.Array]:
    """Draws s ~ N(m, P^-1), one for each key, and (s - m)'P(s - m); m is zero or `AtMode.mean`."""
    if isinstance(at.factor, ArrowRoot) or at.factor.size:

        def from_factor(key: jax.Array) -> tuple[Flat, jax.Array]:
            noise = random.normal(key, loc.shape, loc.dtype)
            if isinstance(at.factor, ArrowRoot):
                draw = at.factor.times(noise)
            else:
                draw = solve_triangular(at.factor, noise, trans=1, lower=True) + at.mean
            return draw, jnp.vdot(noise, noise)

        return jax.vmap(from_factor)(keys)

    metric = fisher_of(posterior)
    solve = fisher_metric(posterior, loc).solver(loc)

    def perturb_and_solve(key: jax.Array) -> tuple[Flat, jax.Array]:
        draw = solve(metric.perturb(loc, key))
        return draw, jnp.vdot(draw, metric.product(loc, draw))

    return jax.vmap(perturb_and_solve)(keys)


def follow(
    posterior: FlatPosterior,
    loc: Flat,
    at: AtMode,
    draws: Flat,
    squares: jax.Array,
    *,
    log_weight: bool,
    max_steps: int | None = None,
) -> tuple[Geodesic, jax.Array]:
    """The ends of the geodesics of Gaussian draws, and the logs of their importance weights.

    A log weight is -U(theta) - log N(v; m, P^-1) + log |det d theta / d v|, up to a constant if P
    is too large for its determinant. It is 0 unless requested. Position and weight of a failed
    geodesic are NaN. ``max_steps`` is used in place of the one in the settings.
    """
    settings = posterior.settings
    end = end_fn(posterior, loc, settings.max_steps if max_steps is None else max_steps)
    straight = settings.metric == "euclidean"
    if log_weight and not straight:
        check_dense(posterior.size, "log_weight=True", "log_weight=False")
    constant = _log_normalizer(posterior, loc, at) if log_weight else 0.0

    def one(draw: Flat, square: jax.Array) -> tuple[Geodesic, jax.Array]:
        velocity, found, start_volume = _start(settings, at, draw)
        given = jnp.all(jnp.isfinite(draw))
        found = found & given
        velocity = jnp.where(found, velocity, 0.0)
        if not log_weight:
            geodesic, weight = end(velocity), jnp.zeros((), draw.dtype)
        else:
            # the geodesic waits for the start's volume: two calls of LAPACK must not overlap
            found = found & jnp.isfinite(start_volume)
            velocity = jnp.where(found, velocity, 0.0)
            geodesic, volume = (end(velocity), 0) if straight else _with_log_volume(end, velocity)
            volumes = start_volume + volume + constant
            weight = -posterior.energy(geodesic.position) + square / 2 + volumes
        success = geodesic.success & found
        position = jnp.where(success, geodesic.position, jnp.nan)
        evaluations = jnp.where(given, geodesic.num_evaluations, 0)
        geodesic = Geodesic(position, success, evaluations)
        return geodesic, jnp.where(success, weight, jnp.nan)

    return jax.vmap(one)(draws, squares)


def _log_normalizer(posterior: FlatPosterior, loc: Flat, at: AtMode) -> jax.Array:
    """Minus the log density of N(0, P^-1) at 0; without log |det P| where it is not known."""
    volume, root = jnp.zeros(()), at.factor
    while isinstance(root, ArrowRoot):  # L is triangular by blocks, those of groups first
        volume = volume + jnp.sum(jnp.linalg.slogdet(root.blocks)[1])
        root = root.corner
    if isinstance(at.factor, ArrowRoot):
        volume = volume + jnp.linalg.slogdet(root.matrix)[1]
    elif root.size:
        volume = -jnp.sum(jnp.log(jnp.diagonal(root)))
    elif not is_wide(posterior.size):
        volume = -half_log_det(posterior, loc)
    return volume + posterior.size * math.log(2 * math.pi) / 2


def constrain(posterior: FlatPosterior, loc: Flat, flat: Flat) -> dict:
    """Site values at flat positions, deterministic sites included."""
    replay = posterior.model.replay
    return lax.map(lambda x: replay(posterior.unravel(x)), flat, batch_size=posterior.lanes)


def _start(settings: LaplaceSettings, at: AtMode, draw: Flat) -> tuple[Flat, Any, jax.Array]:
    """For a Gaussian draw s the velocity v, whether it was found, and log |det dv/ds|."""
    if settings.metric != "monge-log":
        return draw, jnp.ones((), bool), jnp.zeros((), draw.dtype)
    precision = jnp.matmul(at.factor, at.factor.T, precision=HIGHEST)
    # one after another: a draw that does not converge would hold up all draws of its chunk
    velocity, found = one_by_one(partial(log_map, alpha2=settings.alpha2))(precision, draw)

    def end(v: Flat) -> Geodesic:
        position = shoot(precision, v, settings.alpha2)
        return Geodesic(position, found, jnp.zeros((), jnp.int32))

    return velocity, found, -_with_log_volume(end, velocity)[1]


def end_fn(posterior: FlatPosterior, loc: Flat, max_steps: int) -> Callable[[Flat], Geodesic]:
    """``velocity -> Geodesic`` from ``loc``."""
    settings = posterior.settings
    if settings.metric == "euclidean":
        return lambda v: Geodesic(loc + v, jnp.all(jnp.isfinite(v)), jnp.zeros((), jnp.int32))
    acceleration = acceleration_fn(posterior, loc)
    options: dict[str, Any] = {"rtol": settings.rtol, "atol": settings.atol, "max_steps": max_steps}
    return lambda v: exponential_map(acceleration, loc, v, **options)


def _with_log_volume(end: Callable[[Flat], Geodesic], x: Flat) -> tuple[Geodesic, jax.Array]:
    """A geodesic and log |det d position / dx|, by derivatives along all directions."""

    def along(u: Flat) -> tuple[Geodesic, Flat]:
        def position(v: Flat) -> tuple[Flat, Geodesic]:
            geodesic = end(v)
            return geodesic.position, geodesic

        _, push, geodesic = jax.jvp(position, (x,), (u,), has_aux=True)
        return geodesic, push

    # the geodesic is the same along all directions and is followed once
    eye = jnp.eye(x.size, dtype=x.dtype)
    geodesic, jacobian = jax.vmap(along, out_axes=(None, 0))(eye)
    return geodesic, jnp.linalg.slogdet(jacobian)[1]
