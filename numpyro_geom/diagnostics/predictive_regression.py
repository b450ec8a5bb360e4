"""Predictive measures of a regressing ensemble, and how far its draws move and bend."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro.infer import MCMC
from numpyro.util import is_prng_key

from .._checks import check_flag, check_int
from .summary import check_run

EPSILON = 1e-6
"""Added to the norm of the gradient, as Srinivas et al. have it."""
MANY = 10
"""Times as long is the second axis of arrays whose first is rather one of chains."""
ROWS_AT_ONCE = 256
"""Rows whose Hessian-vector products are in memory at once."""


class Regression(NamedTuple):
    """Measures of an ensemble of M Gaussian predictions on N rows.

    Attributes:
        rmse: root mean square of y minus the mean over draws of the predicted means.
        nll: mean over rows of - log of the mixture's density, in nats per row, with
            the mixture (1/M) sum over draws of N(y; mean, sd^2).
        nll_draws: of each draw alone, shape (M,).
        ambiguity: mean of ``nll_draws`` minus ``nll``; never negative.
        variance: mean over rows of the variance of the predicted means over draws (divided
            by M), in squared units of y.
    """

    rmse: float
    nll: float
    nll_draws: np.ndarray
    ambiguity: float
    variance: float


def regression(means: Any, sds: Any, y: Any) -> Regression:
    """Root mean square error and the likelihood of the whole Gaussian mixture.

    Args:
        means: predicted means, shape (draws, rows), in units of y.
        sds: predicted standard deviations: a number, shape (draws,) for one a draw, or
            (draws, rows).
        y: observed values, shape (rows,).

    Returns:
        A `Regression`.

    Raises:
        TypeError: for values that are not real numbers.
        ValueError: for shapes that do not fit, values that are not finite, or ``sds`` that are not
            positive.

    Examples:
        >>> from numpyro_geom.diagnostics.predictive import regression
        >>> found = regression([[0.0, 1.0], [2.0, 1.0]], 1.0, [1.0, 0.0])
        >>> round(found.rmse, 4), round(found.nll, 4), found.variance
        (0.7071, 1.4189, 0.5)
    """
    m, s, t = _real("means", means), _real("sds", sds), _real("y", y)
    if m.ndim != 2 or m.size == 0 or t.shape != m.shape[1:]:
        raise ValueError(
            f"means must have shape (draws, rows) and y shape (rows,), got {m.shape} and {t.shape}"
        )
    if s.shape not in ((), m.shape[:1], m.shape):
        raise ValueError(
            f"sds must be a number, or have shape {m.shape[:1]} or {m.shape} as the means have, "
            f"got {s.shape}: for one a row, np.broadcast_to(sds, {m.shape})"
        )
    if not (s > 0).all():
        raise ValueError(f"sds must be positive, got a smallest of {s.min():g}")
    s = s[:, None] if s.ndim == 1 else s
    log_p = -0.5 * ((t - m) / s) ** 2 - np.log(s) - 0.5 * math.log(2 * math.pi)
    most = log_p.max(axis=0)
    nll = -float(np.mean(most + np.log(np.exp(log_p - most).mean(axis=0))))
    nll_draws = -log_p.mean(axis=1)
    return Regression(
        rmse=float(np.sqrt(np.mean((t - m.mean(axis=0)) ** 2))),
        nll=nll,
        nll_draws=nll_draws,
        ambiguity=float(nll_draws.mean()) - nll,
        variance=float(m.var(axis=0).mean()),
    )


def draw_distances(
    draws: Any, *, normalised: bool = False, var_names: str | Sequence[str] | None = None
) -> np.ndarray:
    """Euclidean distances between successive draws, |theta' - theta| or |theta' - theta| / |theta|.

    Args:
        draws: a run MCMC; an ArviZ object with a ``posterior``; an array, shape (draws, D) or
            (chains, draws, D); or a dict of arrays by site (nested ones too) of one chain, each
            shaped (draws, ...), which ``get_samples(group_by_chain=True)`` does not give: pass
            the MCMC. All sites count together.
        normalised: divide by the norm of the earlier draw, which takes out the scale that
            normalisation layers leave free.
        var_names: of an ArviZ object, the variable or variables to take; None for all, and
            deterministic sites are among them.

    Returns:
        Shape (draws - 1,), or (chains, draws - 1) with chains.

    Raises:
        TypeError: for values that are not real numbers.
        ValueError: for shapes that do not fit, fewer than two draws, values that are not finite,
            unknown variables, a dict whose leading axis seems to be one of chains, an MCMC that
            has not run, or a draw of norm 0 that is to be divided by.

    Examples:
        >>> from numpyro_geom.diagnostics.predictive import draw_distances
        >>> draw_distances([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]])
        array([0., 5.])
        >>> draw_distances([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]], normalised=True)
        array([0., 1.])

    References:
        Kim et al., "Parameter Expanded SG-MCMC" (ICLR 2025), section 5.3.
    """
    parts = _parts(draws, var_names)
    square = sum(np.sum(np.diff(x, axis=-2) ** 2, axis=-1) for x in parts)
    distance = np.sqrt(square)
    if not check_flag("normalised", normalised):
        return distance
    norm = np.sqrt(sum(np.sum(x[..., :-1, :] ** 2, axis=-1) for x in parts))
    if (norm == 0).any():
        raise ValueError(
            f"normalised=True divides by the norm of a draw, and {(norm == 0).sum()} draws are 0: "
            "use normalised=False"
        )
    return distance / norm


def input_curvature(
    fn: Callable[[Any, jax.Array], jax.Array],
    draws: Any,
    X: Any,
    *,
    num_iterations: int = 20,
    rng_key: jax.Array | None = None,
) -> np.ndarray:
    """Curvature of a network with respect to its inputs, C(theta) at each row for each draw.

    ``C = |lambda| / (|grad f| + 1e-6)``, with lambda the eigenvalue of largest modulus of the
    Hessian of f in its input, by power iteration on Hessian-vector products. Its mean over rows
    and draws is the measure of a posterior. The iteration comes from below, and slowly where the
    two largest moduli are close; two eigenvalues of opposite sign do no harm.

    Costs about 4 ``num_iterations`` evaluations of the gradient's size for a row and a draw.

    Args:
        fn: ``(parameters of one draw, input of one row) -> scalar``, a loss or a logit, twice
            differentiable in the input.
        draws: a pytree of parameters with a leading axis of draws.
        X: inputs, shape (rows, ...).
        num_iterations: of the power iteration.
        rng_key: for its start; None for a fixed one.

    Returns:
        Shape (draws, rows).

    Raises:
        TypeError: where ``fn`` is not a function or gives no real scalar.
        ValueError: without draws or rows, for draws of unequal number, or where C is not finite.

    Examples:
        >>> import jax.numpy as jnp
        >>> from numpyro_geom.diagnostics.predictive import input_curvature
        >>> fn = lambda a, x: 0.5 * a * x @ x  # Hessian a I, gradient a x
        >>> input_curvature(fn, jnp.array([1.0, 3.0]), jnp.array([[2.0, 0.0]]))
        array([[0.5],
               [0.5]], dtype=float32)

    References:
        Srinivas et al., "Efficient Training of Low-Curvature Neural Networks" (NeurIPS 2022);
        Yu et al., "Scalable SGRLD in Non-Diagonal Metrics" (TMLR 2023), for its mean over draws.
    """
    num_iterations = check_int("num_iterations", num_iterations)
    if not callable(fn):
        raise TypeError(f"fn must be a function (parameters, input) -> scalar, got {fn!r}")
    if rng_key is not None and not is_prng_key(rng_key):
        raise TypeError(f"rng_key must be a single key, such as jax.random.key(0), got {rng_key!r}")
    draws, X = jax.tree.map(jnp.asarray, draws), jnp.asarray(X, jnp.result_type(float))
    counts = sorted({x.shape[0] if x.ndim else 0 for x in jax.tree.leaves(draws)})
    if len(counts) != 1 or counts[0] == 0 or X.ndim == 0 or X.size == 0:
        raise ValueError(
            "draws must be arrays with one leading axis of draws, and X have shape (rows, ...), "
            f"none of them empty: got leading axes {counts} and X of shape {X.shape}"
        )
    one = jax.eval_shape(fn, jax.tree.map(lambda x: x[0], draws), X[0])
    if getattr(one, "shape", None) != () or not jnp.issubdtype(one.dtype, jnp.floating):
        raise TypeError(
            f"fn must return a real scalar for one draw and one row, got {one}: pick a logit, or "
            "sum the loss"
        )
    key = random.key(0) if rng_key is None else rng_key
    found = np.asarray(jax.jit(partial(_curvatures, fn, key, num_iterations))(draws, X))
    bad = np.argwhere(~np.isfinite(found))
    if len(bad):
        raise ValueError(
            f"the curvature is not finite in {len(bad)} of {found.size} places, the first in draw "
            f"{bad[0][0]} and row {bad[0][1]}: check that draws and X are finite and that fn has "
            "two derivatives there"
        )
    return found


def _curvatures(
    fn: Callable, rng_key: jax.Array, num_iterations: int, draws: Any, X: jax.Array
) -> jax.Array:
    """Of all draws at all rows, shape (draws, rows), in memory that does not grow with either."""

    def of_draw(params: Any) -> jax.Array:
        of_row = partial(_curvature, fn, params, rng_key=rng_key, num_iterations=num_iterations)
        return lax.map(of_row, X, batch_size=min(ROWS_AT_ONCE, len(X)))

    return lax.map(of_draw, draws)


def _curvature(
    fn: Callable, params: Any, x: jax.Array, rng_key: jax.Array, num_iterations: int
) -> jax.Array:
    gradient = jax.grad(lambda x: fn(params, x))

    def unit(v: jax.Array) -> jax.Array:
        norm = jnp.linalg.norm(v.ravel())
        return v / jnp.where(norm > 0, norm, 1.0)

    def product(v: jax.Array) -> jax.Array:
        return jax.jvp(gradient, (x,), (v,))[1]

    start = unit(random.normal(rng_key, x.shape, x.dtype))
    v = lax.fori_loop(0, num_iterations - 1, lambda _, v: unit(product(v)), start)
    # |H v| is right also where v swings between eigenvalues of opposite sign
    largest = jnp.linalg.norm(product(v).ravel())
    return largest / (jnp.linalg.norm(gradient(x).ravel()) + EPSILON)


def _parts(draws: Any, var_names: str | Sequence[str] | None) -> list[np.ndarray]:
    """Finite float64 arrays, all of shape (draws, k) or all of (chains, draws, k)."""
    if hasattr(draws, "posterior"):
        posterior = draws.posterior
        chosen = [var_names] if isinstance(var_names, str) else var_names
        names = list(posterior.data_vars) if chosen is None else list(chosen)
        unknown = [name for name in names if name not in posterior]
        if unknown or not names:
            raise ValueError(
                f"var_names must be variables of the posterior, {sorted(posterior.data_vars)}, got "
                f"{names}"
            )
        values = [posterior[name].transpose("chain", "draw", ...).values for name in names]
        leading = 2
    elif var_names is not None:
        raise ValueError("var_names is for ArviZ objects: pick entries of a dict before the call")
    elif isinstance(draws, MCMC):
        check_run(draws)
        samples = draws.get_samples(group_by_chain=True)
        values, leading = [np.asarray(x) for x in jax.tree.leaves(samples)], 2
    elif isinstance(draws, Mapping):
        values, leading = [np.asarray(x) for x in jax.tree.leaves(dict(draws))], 1
        _check_not_chains(values)
    else:
        values = [np.asarray(jax.device_get(draws))]
        leading = values[0].ndim - 1
    shapes = {x.shape[:leading] for x in values}
    if len(shapes) != 1 or leading not in (1, 2) or 0 in (shape := shapes.pop()) or shape[-1] < 2:
        raise ValueError(
            "draws must be an array of shape (draws, D) or (chains, draws, D), or a dict of arrays "
            "that all have the same number of draws, at least two; got "
            f"{[x.shape for x in values]}"
        )
    return [_real("draws", x).reshape((*shape, -1)) for x in values]


def _check_not_chains(values: list[np.ndarray]) -> None:
    """Raise where all arrays begin with (a few, very many), which is rather (chains, draws)."""
    leads = {x.shape[:2] for x in values}
    if len(leads) == 1 and len(lead := leads.pop()) == 2 and lead[1] > MANY * lead[0]:
        raise ValueError(
            f"arrays in a dict must have shape (draws, ...), and all begin with {lead}, which "
            "looks like (chains, draws): pass the MCMC itself or one chain; if these are draws, "
            "then as one array (draws, D)"
        )


def _real(name: str, value: Any) -> np.ndarray:
    x = np.asarray(jax.device_get(value))
    if x.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be real numbers, got dtype {x.dtype}")
    x = x.astype(np.float64)
    if not np.isfinite(x).all():
        raise ValueError(
            f"{name} must be finite, and {(~np.isfinite(x)).sum()} of {x.size} are not"
        )
    return x
