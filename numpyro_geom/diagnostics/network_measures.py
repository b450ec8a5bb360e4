"""Measures of a network's draws: distances between them, and curvature in the inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from .._checks import check_flag, check_int, check_key
from .._util import LANES
from .draws import as_array, chosen, draws_of, real_numbers

MANY = 10
"""If the second axis is this many times longer than the first, the first is probably one of
chains."""
EPSILON = 1e-6
"""Added to the norm of the gradient, as in Srinivas et al."""


def input_curvature(
    fn: Callable[[Any, jax.Array], jax.Array],
    draws: Any,
    X: Any,
    *,
    num_iterations: int = 20,
    rng_key: jax.Array | None = None,
) -> np.ndarray:
    """Curvature of a network with respect to its inputs, C(theta) at each row for each draw.

    ``C = |lambda| / (|grad f| + 1e-6)``, where lambda is the eigenvalue of largest modulus of the
    Hessian of f in its input. lambda is computed by power iteration on Hessian-vector products. The
    mean of C over rows and draws is the measure of a posterior. The iteration converges from below,
    slowly if the two largest moduli are close. Two eigenvalues of opposite sign are handled
    correctly.

    The cost is about 4 ``num_iterations`` gradient evaluations per row and draw.

    Args:
        fn: ``(parameters of one draw, input of one row) -> scalar``, a loss or a logit, twice
            differentiable in the input.
        draws: a pytree of parameters with a leading axis of draws.
        X: inputs, shape (rows, ...).
        num_iterations: number of power iterations.
        rng_key: a key for the start of the iteration; None for a fixed one.

    Returns:
        Array of shape (draws, rows).

    Raises:
        TypeError: if ``fn`` is not a function or does not return a real scalar.
        ValueError: without draws or rows, for draws of unequal number, or if C is not finite.

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
    key = random.key(0) if rng_key is None else check_key("rng_key", rng_key)
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
    """C of all draws at all rows, shape (draws, rows), in memory that does not grow with either."""

    def unit(v: jax.Array) -> jax.Array:
        norm = jnp.linalg.norm(v.ravel())
        return v / jnp.where(norm > 0, norm, 1.0)

    def curvature(params: Any, x: jax.Array) -> jax.Array:
        gradient, product = jax.linearize(jax.grad(partial(fn, params)), x)
        start = unit(random.normal(rng_key, x.shape, x.dtype))
        v = lax.fori_loop(0, num_iterations - 1, lambda _, v: unit(product(v)), start)
        # |H v| is also right if v alternates between eigenvectors of opposite eigenvalues
        largest = jnp.linalg.norm(product(v).ravel())
        return largest / (jnp.linalg.norm(gradient.ravel()) + EPSILON)

    def of_draw(params: Any) -> jax.Array:
        return lax.map(partial(curvature, params), X, batch_size=LANES)

    return lax.map(of_draw, draws)


def draw_distances(
    draws: Any, *, normalised: bool = False, var_names: str | Sequence[str] | None = None
) -> np.ndarray:
    """Euclidean distances between successive draws, |theta' - theta| or |theta' - theta| / |theta|.

    Args:
        draws: an MCMC that has run; an ArviZ object with a ``posterior``; an array, shape (draws,
            D) or (chains, draws, D); or a dict of arrays by site (which may be nested) of one
            chain, each shaped (draws, ...). The result of ``get_samples(group_by_chain=True)`` has
            another shape: pass the MCMC instead. A distance is over all sites together.
        normalised: divide by the norm of the earlier draw. This removes the scale that
            normalisation layers leave free.
        var_names: for an ArviZ object, the variable or variables to use; None for all, including
            deterministic sites.

    Returns:
        Array of shape (draws - 1,), or (chains, draws - 1) with chains.

    Raises:
        TypeError: for values that are not real numbers.
        ValueError: for shapes that do not fit; for fewer than two draws; for values that are not
            finite; for unknown variables; for a dict whose leading axis seems to be one of chains;
            for an MCMC that has not run; with ``normalised``, for a draw of norm 0.

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


def _parts(draws: Any, var_names: str | Sequence[str] | None) -> list[np.ndarray]:
    """Finite float64 arrays, all of shape (draws, k) or all of (chains, draws, k)."""
    if var_names is not None and not hasattr(draws, "posterior"):
        raise ValueError("var_names is for ArviZ objects: pick entries of a dict before the call")
    known = draws_of(draws)
    if known is not None:
        names = known if var_names is None else chosen(var_names, known, "the posterior")
        values, leading = [known[name] for name in names], 2
    elif isinstance(draws, Mapping):
        values, leading = [as_array("draws", x) for x in jax.tree.leaves(dict(draws))], 1
        leads = {x.shape[:2] for x in values}
        if len(leads) == 1 and len(lead := leads.pop()) == 2 and lead[1] > MANY * lead[0]:
            raise ValueError(
                f"arrays in a dict must have shape (draws, ...), and all begin with {lead}, which "
                "looks like (chains, draws): pass the MCMC itself or one chain; if these are "
                "draws, then as one array (draws, D)"
            )
    else:
        values = [as_array("draws", draws)]
        leading = values[0].ndim - 1
    shapes = {x.shape[:leading] for x in values}
    shape = shapes.pop() if len(shapes) == 1 else ()
    if leading not in (1, 2) or len(shape) < leading or 0 in shape or shape[-1] < 2:
        raise ValueError(
            "draws must be an array of shape (draws, D) or (chains, draws, D), or a dict of arrays "
            "that all have the same number of draws, at least two; got "
            f"{[x.shape for x in values]}"
        )
    return [real_numbers("draws", x).reshape((*shape, -1)) for x in values]
