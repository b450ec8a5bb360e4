"""Stein discrepancies: how far draws are from their target, from the scores of the target alone.

`ksd` measures the discrepancy, `ksd_test` tests it, and `thin` selects draws. `scores` computes the
scores of a NumPyro model, on all data or on a separate minibatch for each draw (a stochastic Stein
discrepancy). No normalising constant and no reference draws are needed.

The kernel is an inverse multiquadric in whitened coordinates z = L^-1 x with t = L' s, where
S = L L' is the preconditioner and s is the score of x. With r = z - z', q = 1 + |r|^2 and
k = q^(-1/2), the Stein kernel is::

    k0(z, z') = D q^(-3/2) - 3 |r|^2 q^(-5/2) + r . (t - t') q^(-3/2) + t . t' q^(-1/2)

Under the target, k0 has expectation 0 in either argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.infer import MCMC, init_to_uniform
from scipy.spatial.distance import pdist

from .._checks import check_batch_size, check_choice, check_int, check_key, check_model
from .._numpyro import arguments_of
from ..model.minibatch import SubsamplePlates
from ..model.model import Model, read
from .draws import as_array, check_run, draws_of, evenly, real_numbers, stored_name

__all__ = ["ScoredDraws", "SteinTest", "ksd", "ksd_test", "scores", "thin"]

BLOCK_SIZE = 512
"""Size of a square block of the kernel matrix in memory; such a block fits a processor's cache."""
MEDIAN_DRAWS = 1000
"""Number of draws, evenly spaced, for the median distance."""
SCALINGS = ("scale", "covariance", "median", "identity")
ROWS_AT_ONCE = 2**18
"""Rows times draws whose gradients are computed at once."""


def ksd(
    draws: Any,
    scores: Any,
    *,
    statistic: Literal["V", "U"] = "V",
    precondition: Literal["scale", "covariance", "median", "identity"] | ArrayLike = "scale",
    chunk_size: int = BLOCK_SIZE,
) -> float:
    """Squared kernel Stein discrepancy of draws from their target, with an inverse multiquadric.

    With k0 the Stein kernel of k(x, y) = (1 + (x - y)' S^-1 (x - y))^(-1/2)::

        V = 1/n^2 sum over i, j of k0(i, j)        U = 1/(n (n - 1)) sum over i != j of k0(i, j)

    Both estimate KSD^2. It is 0 if and only if the draws are from the target. V is never
    negative. On n exact draws, V is about E[k0(x, x)] / n. U is unbiased, and on exact draws it is
    negative about half of the time. If the draws depend on each other, U is biased, usually
    upwards.

    The Stein operator is div(L g) + s' L g, with S = L L' and g in the kernel's space. It is the
    usual operator on z = L^-1 x. So the result has no units. With ``precondition="covariance"``,
    the result is invariant under affine transformations of theta. By default S comes from the
    draws. To compare samplers, give the same array S to all of them.

    A small value is no proof that the draws are right. Scores do not determine the weights of
    separate modes, so KSD does not detect wrong weights. KSD also hardly detects a bias in a few
    of many dimensions.

    With one minibatch of scores per draw, this is the stochastic Stein discrepancy. The noise of
    the scores adds E|L' noise|^2 / n to V and nothing to the expectation of U, so use U in this
    case.

    The cost is n^2 (4 D + 20) multiplications and memory of n D.

    Args:
        draws: unconstrained draws, shape (n, D), or (chains, draws, D).
        scores: grad log target at the draws, or unbiased estimates of it, of the same shape.
        statistic: ``"V"`` or ``"U"``.
        precondition: S. ``"scale"`` for the variances of the draws; ``"covariance"`` for their
            covariance, if n is much larger than D; ``"median"`` for the identity times the square
            of the median distance of draws; ``"identity"``; or an array: variances of shape (D,) or
            a matrix of shape (D, D).
        chunk_size: number of rows and of columns of the kernel matrix that are in memory at once.

    Returns:
        KSD^2, a number.

    Raises:
        TypeError: for arrays that are not of real numbers, or a ``chunk_size`` that is not an
            integer.
        ValueError: for shapes that do not fit, values that are not finite, a single draw with
            ``"U"``, an S that is not positive definite, or an unknown name.

    Examples:
        >>> import numpy as np
        >>> from numpyro_geom.diagnostics.stein import ksd
        >>> x = np.random.default_rng(0).normal(size=(1000, 2))
        >>> round(ksd(x, -x), 4)  # the score of N(0, I) is -x; an exact V is about 2 D / n
        0.0025
        >>> round(ksd(x + 0.3, -(x + 0.3)), 3)
        0.084

    References:
        Gorham and Mackey, "Measuring Sample Quality with Kernels" (ICML 2017), for the kernel and
        its exponent. Liu, Lee and Jordan, "A Kernelized Stein Discrepancy for Goodness-of-fit
        Tests" (ICML 2016), for U and V. Gorham, Raj and Mackey, "Stochastic Stein Discrepancies"
        (NeurIPS 2020). Deviation: Riabiz et al. (2022) use S in k alone; here S is also in the
        operator.
    """
    check_choice("statistic", statistic, ("V", "U"))
    chunk_size = check_int("chunk_size", chunk_size)
    at = whiten(draws, scores, precondition)
    num_draws = at.z.shape[0]
    total = float(off_diagonal(at, jnp.ones((num_draws, 1), at.z.dtype), chunk_size)[0])
    if statistic == "U":
        _check_pair(num_draws)
        return total / (num_draws * (num_draws - 1))
    return (total + float(np.asarray(diagonal(at)).sum(dtype=np.float64))) / num_draws**2


class SteinTest(NamedTuple):
    """Result of a test of whether draws are from their target.

    Attributes:
        statistic: the U-statistic of KSD^2.
        p_value: share of bootstrap values at or above the statistic,
            (1 + count) / (1 + num_bootstrap).
        bootstrap: bootstrap values of U under the null hypothesis, shape (num_bootstrap,).
    """

    statistic: float
    p_value: float
    bootstrap: np.ndarray


def ksd_test(
    draws: Any,
    scores: Any,
    rng_key: jax.Array,
    *,
    num_bootstrap: int = 1000,
    precondition: Literal["scale", "covariance", "median", "identity"] | ArrayLike = "scale",
    chunk_size: int = BLOCK_SIZE,
) -> SteinTest:
    """Bootstrap test of the hypothesis that independent draws are from the target.

    The U-statistic is compared with its values under multinomial weights w ~ Mult(n, 1/n) / n::

        U* = sum over i != j of (w_i - 1/n) (w_j - 1/n) k0(i, j)

    The draws must be INDEPENDENT. The draws of a chain are not independent, and the test then
    rejects good chains. Thin a chain to its effective sample size first:
    ``x[:: math.ceil(n / ess)]`` with the smallest ess of all coordinates. With one minibatch of
    scores per draw, the level still holds, but the noise of the scores reduces the power. With
    enough draws the test rejects every biased sampler. The statistic then shows whether the bias
    matters.

    The power is modest. The table has the share of rejections in 200 tests at level 0.05, for draws
    of N(0, sd^2 I) against the target N(0, I)::

        D, n        sd 0.8: "scale"  "median"  "covariance"    sd 1.2: "scale"  "median"
        1, 100               0.47     0.46       0.47                    0.25     0.25
        20, 100              0.63     0.31       0.10                    0.14     0.10
        50, 200              0.86     0.46       0.07                    0.22     0.12

    ``"covariance"`` hardly ever rejects, not even exact draws, unless n is much larger than D.

    It costs as much as `ksd`, plus n^2 ``num_bootstrap`` multiplications and n ``num_bootstrap``
    numbers in memory.

    Args:
        draws: unconstrained draws, shape (n, D), or (chains, draws, D).
        scores: grad log target at the draws, or unbiased estimates of it, of the same shape.
        rng_key: a key for the weights.
        num_bootstrap: number of bootstrap values.
        precondition: S, see `ksd`.
        chunk_size: see `ksd`.

    Returns:
        A `SteinTest`.

    Raises:
        TypeError, ValueError: as `ksd`, and for an ``rng_key`` that is not a single key.

    Examples:
        >>> import jax, numpy as np
        >>> from numpyro_geom.diagnostics.stein import ksd_test
        >>> x = np.random.default_rng(0).normal(size=(500, 1))
        >>> ksd_test(x, -x, jax.random.key(1)).p_value > 0.05
        True
        >>> ksd_test(1.3 * x, -1.3 * x, jax.random.key(1)).p_value < 0.01
        True

    References:
        Liu, Lee and Jordan (ICML 2016), section 4 and algorithm 1.
    """
    num_bootstrap = check_int("num_bootstrap", num_bootstrap)
    chunk_size = check_int("chunk_size", chunk_size)
    check_key("rng_key", rng_key)
    at = whiten(draws, scores, precondition)
    num_draws = at.z.shape[0]
    _check_pair(num_draws)
    weights = _weights(rng_key, num_draws, num_bootstrap).astype(at.z.dtype)
    sums = off_diagonal(at, weights, chunk_size)
    statistic = float(sums[0]) / (num_draws * (num_draws - 1))
    null = sums[1:] / num_draws**2
    p_value = (1 + np.sum(null >= statistic)) / (1 + num_bootstrap)
    return SteinTest(statistic, float(p_value), null)


@partial(jax.jit, static_argnums=(1, 2))
def _weights(rng_key: jax.Array, num_draws: int, num_bootstrap: int) -> jax.Array:
    """A column of ones, and n (w - 1/n) for each bootstrap value: shape (n, 1 + num_bootstrap)."""
    picked = random.randint(rng_key, (num_bootstrap, num_draws), 0, num_draws)
    counts = jax.vmap(lambda rows: jnp.bincount(rows, length=num_draws))(picked)
    ones = jnp.ones((1, num_draws), counts.dtype)
    return jnp.concatenate([ones, counts - 1]).T


def thin(
    draws: Any,
    scores: Any,
    num_points: int,
    *,
    precondition: Literal["scale", "covariance", "median", "identity"] | ArrayLike = "scale",
) -> np.ndarray:
    """Greedy Stein thinning: indices of draws that together represent the target best.

    Each step adds the draw that minimises the KSD of all chosen draws::

        argmin over i of k0(i, i) / 2 + sum over chosen j of k0(i, j)

    So burn-in is left out, and over-represented regions are chosen less often. A draw can be chosen
    more than once. Unlike a chain, the result is not a sample: means over it are estimates, but
    effective sample sizes have no meaning.

    The cost is n ``num_points`` (4 D + 20) multiplications and memory of n D.

    Args:
        draws: unconstrained draws, shape (n, D), or (chains, draws, D).
        scores: grad log target at the draws, of the same shape.
        num_points: number of draws to choose, m.
        precondition: S, see `ksd`.

    Returns:
        Integers of shape (m,), in the order in which they were chosen. So the first few of them are
        a thinning too. With several chains, the indices run over the concatenated chains:
        ``idata.posterior.stack(sample=("chain", "draw")).isel(sample=indices)``. Under ArviZ 1.x
        use ``idata.posterior.dataset.stack`` and so on.

    Raises:
        TypeError: for arrays that are not of real numbers, or a ``num_points`` that is not an
            integer.
        ValueError: as `ksd`.

    Examples:
        >>> import numpy as np
        >>> from numpyro_geom.diagnostics.stein import ksd, thin
        >>> x = np.random.default_rng(0).normal(size=(1000, 2))
        >>> rows = thin(x, -x, 20)
        >>> ksd(x[rows], -x[rows], precondition=x.var(0)) < ksd(
        ...     x[:20], -x[:20], precondition=x.var(0)
        ... )
        True

    References:
        Riabiz et al., "Optimal Thinning of MCMC Output" (JRSS B 2022), algorithm 1.
    """
    num_points = check_int("num_points", num_points)
    return np.asarray(_thin(whiten(draws, scores, precondition), num_points))


@partial(jax.jit, static_argnums=1)
def _thin(at: Whitened, num_points: int) -> jax.Array:
    def choose(objective: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
        best = jnp.argmin(objective)
        chosen = Whitened(at.z[best][None], at.t[best][None])
        return objective + stein_kernel(at, chosen)[:, 0], best

    return lax.scan(choose, diagonal(at) / 2, length=num_points)[1]


def _check_pair(num_draws: int) -> None:
    if num_draws < 2:
        raise ValueError(f"the U-statistic needs at least two draws, got {num_draws}")


class Whitened(NamedTuple):
    """Draws and scores in the whitened coordinates of the kernel, both of shape (n, D)."""

    z: jax.Array  # draws, centred and whitened
    t: jax.Array  # scores there


def whiten(draws: Any, scores: Any, precondition: Any) -> Whitened:
    """Check the arguments of `ksd`, flatten chains, and transform to whitened coordinates."""
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(np.float64))
    x, s = _matrix("draws", draws), _matrix("scores", scores)
    if np.shape(draws) != np.shape(scores):
        raise ValueError(
            f"draws and scores must have one shape, got {np.shape(draws)} and {np.shape(scores)}"
        )
    root = _root(x, precondition)
    # far from the origin, float32 would round away the distances between draws
    x = x - x.mean(axis=0)
    if root.ndim == 1:
        z, t = x / root, s * root
    else:
        z, t = np.linalg.solve(root, x.T).T, s @ root
    with np.errstate(over="ignore"):
        z, t = z.astype(dtype), t.astype(dtype)
    if not (np.isfinite(z).all() and np.isfinite(t).all()):
        raise ValueError(
            f"precondition must be about the variances of the draws, got {precondition!r}: with it "
            f"draws or scores exceed the range of {dtype}"
        )
    return Whitened(jnp.asarray(z), jnp.asarray(t))


def stein_kernel(a: Whitened, b: Whitened) -> jax.Array:
    """The Stein kernel of all pairs, shape (draws of a, draws of b)."""

    def dot(u: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.matmul(u, v.T, precision=lax.Precision.HIGHEST)

    square = jnp.sum(a.z**2, 1)[:, None] + jnp.sum(b.z**2, 1) - 2 * dot(a.z, b.z)
    square = jnp.maximum(square, 0.0)
    # r . (t - t') without an array of all pairwise differences
    cross = jnp.sum(a.z * a.t, 1)[:, None] + jnp.sum(b.z * b.t, 1)
    cross = cross - dot(a.z, b.t) - dot(a.t, b.z)
    k = lax.rsqrt(1.0 + square)
    k_2 = k * k
    dim = a.z.shape[1]
    return k * (dot(a.t, b.t) + k_2 * (dim + cross - 3.0 * square * k_2))


def diagonal(a: Whitened) -> jax.Array:
    """The Stein kernel of each draw with itself, D + |t|^2."""
    return a.z.shape[1] + jnp.sum(a.t**2, axis=1)


def off_diagonal(a: Whitened, weights: jax.Array, chunk_size: int) -> np.ndarray:
    """``sum over i != j of w_i w_j k0(i, j)`` for each column w of ``weights``.

    A block of ``chunk_size`` squared entries is in memory at once. The final sum is in 64 bits.
    """
    rows = a.z.shape[0]
    chunk = min(chunk_size, rows)
    pad = -rows % chunk
    padded = [jnp.pad(x, ((0, pad), (0, 0))) for x in (*a, weights)]
    parts = [x.reshape((-1, chunk, x.shape[1])) for x in padded]
    return np.asarray(_forms(*parts)).astype(np.float64).sum(axis=0)


@jax.jit
def _forms(z: jax.Array, t: jax.Array, weights: jax.Array) -> jax.Array:
    """Quadratic forms, by chunk of rows. The diagonal counts as 0; padded draws have weight 0."""
    numbers = jnp.arange(z.shape[0])
    same = jnp.eye(z.shape[1], dtype=bool)

    def of_rows(first: tuple) -> jax.Array:
        i, z_i, t_i, w_i = first

        def add(total: jax.Array, second: tuple) -> tuple[jax.Array, None]:
            j, z_j, t_j, w_j = second
            block = stein_kernel(Whitened(z_i, t_i), Whitened(z_j, t_j))
            block = jnp.where((i == j) & same, 0.0, block)
            return total + jnp.matmul(block, w_j, precision=lax.Precision.HIGHEST), None

        total, _ = lax.scan(add, jnp.zeros_like(w_i), (numbers, z, t, weights))
        return jnp.sum(w_i * total, axis=0)

    return lax.map(of_rows, (numbers, z, t, weights))


def _matrix(name: str, value: Any) -> np.ndarray:
    """The array with chains concatenated, in 64 bits; all values must be finite."""
    x = real_numbers(name, value, finite=False)
    if x.ndim not in (2, 3) or 0 in x.shape:
        raise ValueError(
            f"{name} must have shape (n, D) or (chains, draws, D), none of them 0, got {x.shape}: "
            "one number per draw is x[:, None]"
        )
    flat = x.reshape((-1, x.shape[-1]))
    bad = np.flatnonzero(~np.isfinite(flat).all(axis=1))
    if bad.size:
        raise ValueError(
            f"{name} must be finite, and {bad.size} of {len(flat)} draws are not (the first is "
            f"number {bad[0]}): leave these draws out and say so, or find out why they are there"
        )
    return flat


def _root(x: np.ndarray, precondition: Any) -> np.ndarray:
    """L with L L' = S: shape (D,) if S is diagonal, else (D, D)."""
    num_draws, dim = x.shape
    if isinstance(precondition, str):
        kind = check_choice("precondition", precondition, SCALINGS)
        if kind == "identity":
            return np.ones(dim)
        if kind == "covariance":
            return _cholesky(
                np.atleast_2d(np.cov(x, rowvar=False)) if num_draws > 1 else np.zeros((dim, dim)),
                f"more than D = {dim} distinct draws, and there are {num_draws}; or use 'scale'",
            )
        return _spread(x, kind)
    given = as_array("precondition", precondition)
    if given.dtype.kind not in "fiu" or given.shape not in ((), (dim,), (dim, dim)):
        raise ValueError(
            f"precondition must be one of {list(SCALINGS)}, or an array: variances of shape "
            f"({dim},) or a covariance matrix of shape ({dim}, {dim}); got {given.dtype} of shape "
            f"{given.shape}"
        )
    given = given.astype(np.float64)
    if given.ndim < 2:
        if not (np.isfinite(given) & (given > 0)).all():
            raise ValueError("precondition must hold finite positive variances: check its entries")
        return np.sqrt(np.broadcast_to(given, (dim,)))
    return _cholesky(given, "a matrix with finite entries")


def _spread(x: np.ndarray, kind: str) -> np.ndarray:
    num_draws, dim = x.shape
    if kind == "scale":
        root = x.std(axis=0)
    else:
        distances = pdist(x[evenly(num_draws, MEDIAN_DRAWS)])
        root = np.full(dim, np.median(distances) if distances.size else 0.0)
    # the spread of equal draws is a rounding error
    still = np.flatnonzero(root <= 1e-12 * np.abs(x).max(axis=0))
    if still.size:
        raise ValueError(
            f"precondition={kind!r} needs draws that differ, and {still.size} of {dim} coordinates "
            f"have no spread (the first is number {still[0]}): pass more draws, or an array of "
            "variances, or precondition='identity'"
        )
    return root


def _cholesky(matrix: np.ndarray, needs: str) -> np.ndarray:
    finite = np.isfinite(matrix).all()
    if finite and np.abs(matrix - matrix.T).max() <= 1e-4 * np.abs(matrix).max():
        try:
            root = np.linalg.cholesky((matrix + matrix.T) / 2)
        except np.linalg.LinAlgError:
            root = np.full_like(matrix, np.nan)
        # the conditional variance given the earlier coordinates; rounding can make 0 positive
        if (np.diag(root) ** 2 > 1e-12 * np.diag(matrix)).all():
            return root
    raise ValueError(f"precondition must be symmetric and positive definite: pass {needs}")


class ScoredDraws(NamedTuple):
    """Unconstrained draws and their scores.

    Sites are in the order of their sorted names, and the entries of a site are in row-major order
    (the order of `jax.flatten_util.ravel_pytree`). Chains are concatenated.

    Attributes:
        draws: unconstrained positions, shape (n, D).
        scores: grad log posterior there, shape (n, D), in nats per unconstrained unit.
    """

    draws: np.ndarray
    scores: np.ndarray


def scores(
    model: Callable,
    source: Any,
    *args: Any,
    batch_size: int | Mapping[str, int] | None = None,
    rng_key: jax.Array | None = None,
    draws_at_once: int | None = None,
    **kwargs: Any,
) -> ScoredDraws:
    """Scores of a model's posterior at draws: s = -grad U in unconstrained space.

    U includes the log-Jacobians of the constraining transforms. The target has temperature 1. For
    the target exp(-U / tau), divide the scores by tau.

    Args:
        model: a NumPyro model with its `param` sites substituted; or the model of the run, if
            ``source`` is an `MCMC` of this package.
        source: draws in the model's own space: a `numpyro.infer.MCMC` that has run; an ArviZ
            object with a ``posterior``; or a dict of arrays, shaped (n, ...) or
            (chains, draws, ...) for a site of shape (...). Sites that are not latent are ignored.
        args: the model's arguments, with the data. For an `MCMC`, the default is the arguments of
            its run, if both ``args`` and ``kwargs`` are empty.
        batch_size: None for all rows; or the number of rows of a minibatch, drawn with replacement
            for each draw separately. The scores are then unbiased estimates, for a stochastic Stein
            discrepancy. An int for the only plate with observed rows, or a dict plate -> int.
        rng_key: a key for the minibatches.
        draws_at_once: number of draws whose gradients are computed together; None for as many
            draws as have 262,144 rows in total.
        kwargs: the model's keyword arguments.

    Returns:
        `ScoredDraws`, the input of `ksd`, `ksd_test` and `thin`.

    Raises:
        TypeError: for another kind of ``source``.
        ValueError: for an `MCMC` that has not run; for a model without latent sites, with discrete
            latent sites, or with `param` sites; for draws that are missing, of a wrong shape or of
            unequal number; for ``batch_size`` without ``rng_key``; for draws or scores that are not
            finite.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_geom.diagnostics.stein import ksd, scores
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> y = jax.numpy.zeros(3)  # posterior N(0, 1 / 4)
        >>> mu = jax.random.normal(jax.random.key(0), (500,)) / 2
        >>> found = scores(model, {"mu": mu}, y)
        >>> bool(abs(found.scores + 4 * found.draws).max() < 1e-5)
        True
        >>> ksd(found.draws, found.scores) < 0.01
        True
    """
    if isinstance(source, MCMC):
        check_run(source)
        if not args and not kwargs:
            args, kwargs = arguments_of(source)
        bound = getattr(source.sampler, "bound", None)
        if bound is not None and bound.model is not None and source.sampler.model == model:
            model = bound.model.runnable
    check_model("model", model)
    if rng_key is not None:
        check_key("rng_key", rng_key)
    batch_size = check_batch_size(batch_size)
    if draws_at_once is not None:
        draws_at_once = check_int("draws_at_once", draws_at_once)
    if batch_size is not None and rng_key is None:
        raise ValueError(
            "batch_size draws minibatches and needs a single rng_key, such as jax.random.key(0)"
        )
    key: Any = rng_key
    target = read(model, args, kwargs, batch_size=batch_size)
    _check_params(target)
    sites = target.sites.items()
    shapes = {name: s.shape for name, s in sites if s.kind == "latent" and not s.discrete}
    samples = _latent_values(source, shapes)
    num_draws = next(iter(samples.values())).shape[0]
    rows = target.plan.num_data
    if batch_size is not None:
        rows = max(target.plan.batch_sizes.values(), default=rows)
    if draws_at_once is None:
        draws_at_once = max(1, ROWS_AT_ONCE // rows)

    def of_draw(arrays: list, item: tuple) -> tuple[jax.Array, jax.Array]:
        number, sample = item
        known = target.with_arrays(arrays)
        position = known.unconstrain(sample)
        flat, unravel = ravel_pytree({name: position[name] for name in sorted(shapes)})
        batch: Any = {}  # all rows
        if batch_size is not None:
            batch, _ = known.potential().draw(random.fold_in(key, number), ())
        return flat, -jax.grad(lambda x: known.energy(unravel(x), batch))(flat)

    @jax.jit
    def of_all(arrays: list, samples: dict) -> tuple[jax.Array, jax.Array]:
        items = (jnp.arange(num_draws), samples)
        return lax.map(partial(of_draw, arrays), items, batch_size=min(draws_at_once, num_draws))

    draws, found = (np.asarray(x) for x in of_all(target.arrays, samples))
    _check_finite(draws, found, samples)
    return ScoredDraws(draws, found)


def _latent_values(source: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Draws of the latent sites, shaped (n, ...)."""
    given: Any = draws_of(source)
    if given is None:
        if not isinstance(source, Mapping):
            raise TypeError(
                "source must be an MCMC of a model, an ArviZ object with a posterior, or a dict of "
                f"draws by site, got {type(source).__name__}"
            )
        given = source
    keys = {name: name if name in given else stored_name(name) for name in shapes}
    missing = sorted(name for name, key in keys.items() if key not in given)
    if missing:
        raise ValueError(
            f"the draws lack the latent sites {missing}: expected {sorted(shapes)}, in the model's "
            "own (constrained) space"
        )
    found = {}
    for name, shape in shapes.items():
        x = as_array("draws", given[keys[name]])
        leading = x.shape[: max(0, x.ndim - len(shape))]
        if x.shape[len(leading) :] != shape or len(leading) not in (1, 2) or 0 in leading:
            raise ValueError(
                f"draws of site {name!r} must have shape (n, ...) or (chains, draws, ...) with "
                f"{shape} in place of the dots, and at least one draw, got {x.shape}"
            )
        found[name] = jnp.asarray(x.reshape((-1, *shape)), jnp.result_type(float))
    counts = {name: len(x) for name, x in found.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"all sites must have the same number of draws, got {counts}")
    return found


def _check_params(model: Model) -> None:
    """Raise if a `param` site has no value."""
    if not model.plan.has_params:
        return
    free: list[str] = []
    start = init_to_uniform()

    def value_of(site: dict[str, Any]) -> Any:
        if site["type"] in ("param", "mutable") and site["value"] is None:
            free.append(site["name"])
        return start(site)

    seeded = handlers.seed(SubsamplePlates(model.fn), random.key(0))
    run = handlers.substitute(seeded, substitute_fn=value_of)
    jax.eval_shape(lambda: run(*model.args, **model.kwargs))
    if free:
        raise ValueError(
            f"the model has param sites {free}, and the draws do not hold their "
            "values: pass `numpyro.handlers.substitute(model, data=params)` as the model"
        )


def _check_finite(draws: np.ndarray, found: np.ndarray, samples: Mapping[str, Any]) -> None:
    for what, x in (("draws", draws), ("scores", found)):
        bad = np.flatnonzero(~np.isfinite(x).all(axis=1))
        if not bad.size:
            continue
        sizes = {name: samples[name][0].size for name in sorted(samples)}
        ends = np.cumsum(list(sizes.values()))
        columns = np.flatnonzero(~np.isfinite(x[bad]).all(axis=0))
        sites = sorted({list(sizes)[k] for k in np.searchsorted(ends, columns, side="right")})
        raise ValueError(
            f"{bad.size} of {len(x)} {what} are not finite on the unconstrained space, the first "
            f"of them number {bad[0]}, in the sites {sites}: a draw lies on the edge of its "
            "support or outside of it, or the model overflows there. Leave such draws out and say "
            "so, or run in 64 bits"
        )
