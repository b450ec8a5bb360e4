"""Parameter expansion: a matrix of the model as a product W = P V Q of sites of its own.

A chain on the factors moves W along other paths than a chain on W itself. With G the gradient of
the energy in W, the gradient in V is P' G Q'. So the factors are a metric that the chain learns.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer.reparam import Reparam

from .. import _linalg
from .._checks import check_int, check_number
from .centring import support_of

MARK = "_expanded_"
"""In the names of the sites that take the place of W."""


@dataclasses.dataclass(frozen=True)
class Expanded(Reparam):
    """A site W as the product P_c ... P_1 V Q_1 ... Q_e, whose factors are sampled as well.

    Use it as any other reparametrisation of NumPyro, ``handlers.reparam(model, config=...)``, with
    a dict from names to reparametrisations, or a function of the site for patterns of names. The
    new model is for any kernel and any guide. Its draws have W, now a deterministic site, and the
    sites ``W_expanded_V``, ``W_expanded_P1``, ``W_expanded_Q1``, and so on.

    For W of shape (m, n), P has shape (m, m) and Q has shape (n, n). A convolution kernel
    (k, k, in, out) is multiplied on its channels, and any other site of more than two axes on its
    last two axes. Each matrix of such a stack has the same factors. Within a plate each element has
    factors of its own. A vector v is v Q, so it needs ``left=0``.

    The law of W is the model's: given the factors, V has the law of P^-1 W Q^-1, with the
    determinants that belong to it. So W is independent of (P, Q), whose law q is normal about the
    identity, with standard deviation ``factor_scale`` / sqrt(side) for each entry. The sites are
    the factors' differences from the identity in units of this standard deviation; 0 is the
    identity. At a ``temperature`` tau other than 1 the whole joint law is tempered. W then has the
    model's law at tau, and is independent of (P, Q) as before. The law of the factors becomes
    q^(1 / tau) |det P|^(n / tau - n) |det Q|^(m / tau - m). With tau > 1 this is infinite at
    singular factors, and for tau >= n / (n - 1) it has no finite integral: expand at tau <= 1.

    A ``prior_scale`` makes it the papers' expansion, which CHANGES THE MODEL: the prior of W is
    dropped, and V is N(0, prior_scale^2). The factors' entries are N(0, factor_scale^2), and their
    sites the differences from the identity. W then has the prior of a product of Gaussian matrices,
    with heavier tails.

    Choose it for networks whose chains explore too little; for these the papers report more diverse
    draws. On a Gaussian, expansion only costs. Cost per gradient: the products, and without
    ``prior_scale`` one LU decomposition of each factor: O(m^3), or O(m rank^2 + rank^3) for a low
    rank, which forms no m by m matrix.

    Args:
        left: number of factors on the left, at least 0: the input side of W in ``x @ W``.
        right: number of factors on the right, at least 0: the output side.
        rank: None for full factors. For factors D + L1' L2, the number of rows of L1 and L2, at
            most the smaller side, or a fraction of the side below 1 (rounded down, at least 1).
        factor_scale: c in the standard deviation c / sqrt(side) of the factors' entries about the
            identity (of L1's and L2's entries about 0), above 0. From about 0.5 on, factors come
            close to singular. With a ``prior_scale`` it is the entries' standard deviation; the
            papers have sqrt(1/2).
        prior_scale: standard deviation of V in the papers' model; None leaves the model as it is.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range; when the model runs, for a site that is observed, has
            bounds, or has too few axes.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro import handlers
        >>> from numpyro_geom import Expanded
        >>> def model():
        ...     numpyro.sample("net/a.kernel", dist.Normal(0, 1).expand([2, 3]).to_event(2))
        ...     numpyro.sample("net/b.kernel", dist.Normal(0, 1).expand([3, 1]).to_event(2))
        >>> def config(site):
        ...     return Expanded(left=0) if site["name"].endswith("kernel") else None
        >>> expanded = handlers.reparam(model, config=config)
        >>> trace = handlers.trace(handlers.seed(expanded, jax.random.key(0))).get_trace()
        >>> [name for name, site in trace.items() if site["type"] == "sample"][:2]
        ['net/a.kernel_expanded_Q1', 'net/a.kernel_expanded_V']

    References:
        Kim, Nam, Yun, Yang, Lee, "Parameter Expanded Stochastic Gradient Markov Chain Monte
        Carlo", ICLR 2025, Eq. 9 (layers), Eq. 16 (kernels), appendix B.6 (low rank). The law that
        leaves the model as it is is ours. Other deviations: factors are square, and multiply no
        bias; their friction is that of V (the paper's is a hundredth of it); the paper's
        N(0, 0.5) is read as a variance.
    """

    left: int = 1
    right: int = 1
    rank: int | float | None = None
    factor_scale: float = 0.25
    prior_scale: float | None = None

    def __post_init__(self) -> None:
        if check_int("left", self.left, least=0) + check_int("right", self.right, least=0) == 0:
            raise ValueError("left and right are both 0: expected at least one factor on a side")
        if self.rank is not None and not (isinstance(self.rank, float) and 0 < self.rank < 1):
            check_int("rank, unless it is None or a fraction below 1,", self.rank)
        check_number("factor_scale", self.factor_scale, above=0.0)
        if self.prior_scale is not None:
            check_number("prior_scale", self.prior_scale, above=0.0)

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[Any, Any]:
        """The value P V Q of the site, after its factors and V have been sampled."""
        if MARK in name:  # a site of ours, by a function for all names that begin in some way
            return fn, obs
        if obs is not None:
            raise ValueError(f"site {name!r} is observed: expected a latent site to expand")
        _check_real(name, fn)
        shape = fn.shape()
        if len(shape) < 1 + (self.left > 0):
            raise ValueError(
                f"site {name!r} has the shape {shape}: expected a matrix, or a vector with left=0"
            )
        lefts = [self._factor(f"{name}{MARK}P{k + 1}", shape[-2]) for k in range(self.left)]
        rights = [self._factor(f"{name}{MARK}Q{k + 1}", shape[-1]) for k in range(self.right)]
        plates = (lefts + rights)[0].ndim - 2
        if plates and fn.event_dim < 1 + (self.left > 0):
            raise ValueError(
                f"site {name!r} has axes of a plate among those to expand: expected a distribution "
                "with to_event(2) for a matrix in each element of the plate"
            )
        fn = fn.to_event(0 if plates else len(fn.batch_shape))
        product = Product(tuple(lefts), tuple(rights), self.rank is not None, fn.event_dim)
        if self.prior_scale is None:
            law = dist.TransformedDistribution(fn, product.inv)
        else:
            law = dist.Normal(jnp.zeros(shape), self.prior_scale).to_event(fn.event_dim)
        return None, product(numpyro.sample(f"{name}{MARK}V", law))

    def _factor(self, name: str, side: int) -> jax.Array:
        """A factor of its law."""
        identity = self._identity(name, side)
        if self.prior_scale is None:
            law = dist.Normal(jnp.zeros_like(identity), 1)
            unit = self.factor_scale / math.sqrt(side)
        else:
            law, unit = dist.Normal(-identity, self.factor_scale), 1.0
        return identity + unit * numpyro.sample(name, law.to_event(2))

    def _identity(self, name: str, side: int) -> jax.Array:
        """The identity as a factor; of a low rank the rows are D, L1 and L2."""
        if self.rank is None:
            return jnp.eye(side)
        rank = max(1, int(self.rank * side)) if isinstance(self.rank, float) else self.rank
        if rank > side:
            raise ValueError(
                f"rank is {rank}, and the side of {name!r} has dimension {side}: expected at most "
                "this dimension, or a fraction of the side such as rank=0.25"
            )
        return jnp.zeros((2 * rank + 1, side)).at[0].set(1)


class Product(dist.transforms.Transform):
    """V -> P_c ... P_1 V Q_1 ... Q_e, on the last two axes of V.

    Args:
        lefts: P_1, ..., P_c.
        rights: Q_1, ..., Q_e.
        low_rank: whether the rows of a factor are D, L1 and L2.
        event_dim: number of axes of V without those of plates.
    """

    def __init__(self, lefts: tuple, rights: tuple, low_rank: bool, event_dim: int) -> None:
        self.lefts, self.rights, self.low_rank, self.event_dim = lefts, rights, low_rank, event_dim

    @property
    def domain(self) -> Any:  # noqa: D102
        return constraints.independent(constraints.real, self.event_dim)

    codomain = domain

    def __call__(self, x: jax.Array) -> jax.Array:
        """The product."""
        x = x[..., None, :] if self.event_dim == 1 else x
        for factor in self.rights:
            x = self._times(x, self._spread(factor))
        for factor in self.lefts:
            x = self._times(x.mT, self._spread(factor), transposed=True).mT
        return x[..., 0, :] if self.event_dim == 1 else x

    def _inverse(self, y: jax.Array) -> jax.Array:
        """The V of a product, for draws from the prior; it forms full matrices at any rank."""
        inverse = jnp.vectorize(_linalg.inverse, signature="(m,m)->(m,m)")
        y = y[..., None, :] if self.event_dim == 1 else y
        for factor in reversed(self.lefts):
            y = _linalg.matmul(inverse(self._matrix(factor)), y)
        for factor in reversed(self.rights):
            y = _linalg.matmul(y, inverse(self._matrix(factor)))
        return y[..., 0, :] if self.event_dim == 1 else y

    def log_abs_det_jacobian(self, x: jax.Array, y: jax.Array, intermediates: Any = None) -> Any:
        """Each determinant counts once for each row of V on its side."""
        size = math.prod(x.shape[x.ndim - self.event_dim :])
        total: Any = 0.0
        for factor in self.lefts + self.rights:
            total += size // factor.shape[-1] * self._log_abs_det(factor)
        return total

    def tree_flatten(self) -> Any:  # noqa: D102
        static = {"low_rank": self.low_rank, "event_dim": self.event_dim}
        return (self.lefts, self.rights), (("lefts", "rights"), static)

    def _spread(self, factor: jax.Array) -> jax.Array:
        """The factor with axes for those of V between the plates' and the last two."""
        plates, own = factor.shape[:-2], factor.shape[-2:]
        return factor.reshape(*plates, *(1,) * max(self.event_dim - 2, 0), *own)

    def _parts(self, factor: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """D as a row, L1 and L2."""
        rank = factor.shape[-2] // 2
        return factor[..., :1, :], factor[..., 1 : rank + 1, :], factor[..., rank + 1 :, :]

    def _times(self, x: jax.Array, factor: jax.Array, transposed: bool = False) -> jax.Array:
        """The product of x and a factor, exact to the dtype on every device."""
        if not self.low_rank:
            return _linalg.matmul(x, factor.mT if transposed else factor)
        diagonal, first, second = self._parts(factor)
        first, second = (second, first) if transposed else (first, second)
        return x * diagonal + _linalg.matmul(_linalg.matmul(x, first.mT), second)

    def _matrix(self, factor: jax.Array) -> jax.Array:
        """The factor as a full matrix."""
        factor = self._spread(factor)
        return self._times(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor)

    def _log_abs_det(self, factor: jax.Array) -> jax.Array:
        """Log of the absolute determinant; for a low rank by the matrix determinant lemma."""
        log_abs_det = jnp.vectorize(_linalg.log_abs_det, signature="(m,m)->()")
        if not self.low_rank:
            return log_abs_det(factor)
        diagonal, first, second = self._parts(factor)
        small = _linalg.matmul(second / diagonal, first.mT)
        small = log_abs_det(jnp.eye(small.shape[-1], dtype=small.dtype) + small)
        return jnp.sum(jnp.log(jnp.abs(diagonal[..., 0, :])), -1) + small


def _check_real(name: str, fn: Any) -> None:
    """Raise unless a site's values are any numbers."""
    support = support_of(fn)
    if support is not constraints.real:
        raise ValueError(
            f"site {name!r} is on {support}: expected a site whose values are any real numbers"
        )
