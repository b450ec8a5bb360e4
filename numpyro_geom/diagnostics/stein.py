"""Stein discrepancies: how far draws are from their target, from the scores of the target alone.

`ksd` measures the discrepancy, `ksd_test` tests it, and `thin` selects draws. `scores` computes the
scores of a NumPyro model, on all data or on a separate minibatch for each draw (a stochastic Stein
discrepancy). No normalising constant and no reference draws are needed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.typing import ArrayLike

from .._checks import check_choice, check_int, check_key
from .stein_kernel import Whitened, diagonal, kernel, off_diagonal, whiten
from .stein_scores import ScoredDraws, scores

__all__ = ["ScoredDraws", "SteinTest", "ksd", "ksd_test", "scores", "thin"]

CHUNK_SIZE = 512
"""Size of a square block of the kernel matrix in memory; such a block fits a processor's cache."""


def ksd(
    draws: Any,
    scores: Any,
    *,
    statistic: Literal["V", "U"] = "V",
    precondition: Literal["scale", "covariance", "median", "identity"] | ArrayLike = "scale",
    chunk_size: int = CHUNK_SIZE,
) -> float:
    """Squared kernel Stein discrepancy of draws from their target, with an inverse multiquadric.

    With k0 the Stein kernel of k(x, y) = (1 + (x - y)' S^-1 (x - y))^(-1/2)::

        V = 1/n^2 sum over i, j of k0(i, j)        U = 1/(n (n - 1)) sum over i != j of k0(i, j)

    Both estimate KSD^2, which is 0 if and only if the draws are from the target. V is never
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
    chunk_size: int = CHUNK_SIZE,
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

    The cost is that of `ksd`, plus n^2 ``num_bootstrap`` multiplications and n ``num_bootstrap``
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
        return objective + kernel(at, chosen)[:, 0], best

    return lax.scan(choose, diagonal(at) / 2, length=num_points)[1]


def _check_pair(num_draws: int) -> None:
    if num_draws < 2:
        raise ValueError(f"the U-statistic needs at least two draws, got {num_draws}")
