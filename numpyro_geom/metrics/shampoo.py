"""The Shampoo metric: a Kronecker product of small matrices for each tensor."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._checks import check_choice, check_int, check_number
from .._util import lazy_cond
from .base import Metric, check_decay, check_interval

PyTree = Any

VECTORS = ("diagonal", "full", "identity")
"""What a one-dimensional site may get."""

HIGHEST = lax.Precision.HIGHEST


class ShampooState(NamedTuple):
    """State of `Shampoo`.

    Every field but ``steps`` is a pytree of one structure: per site a tuple with one array for each
    of its d axes. The array has shape (blocks, n, n) unless said otherwise; a site with a diagonal
    metric has one array (n,), a site with the identity an empty tuple.

    Attributes:
        statistic: H at the last refresh, from which A is computed.
        running: the moving average H.
        basis: eigenvectors of ``statistic``, in columns; (0,) for diagonal sites.
        eigenvalues: eigenvalues of ``statistic`` plus the ridge, (blocks, n) or (n,).
        inverse: factors of A, (H + r I)^(-1/2d).
        inverse_sqrt: factors of A^{1/2}, (H + r I)^(-1/4d).
        weights: what the diagonal of log(H + r I) counts in log det G, (blocks, n) or (n,).
        steps: steps since the last refresh, int32.
    """

    statistic: PyTree
    running: PyTree
    basis: PyTree
    eigenvalues: PyTree
    inverse: PyTree
    inverse_sqrt: PyTree
    weights: PyTree
    steps: jax.Array


class _Roots(NamedTuple):
    """The fields of the state that a refresh renews, as lists over all axes of all sites."""

    statistic: list[jax.Array]
    basis: list[jax.Array]
    eigenvalues: list[jax.Array]
    inverse: list[jax.Array]
    inverse_sqrt: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Shampoo(Metric):
    """The Kronecker-factored metric: correlations within every axis of every tensor.

    For a site whose gradient g = grad Uhat / N is a tensor with d axes, and for each axis i with
    g_(i) the unfolding that has axis i in its rows (H_i = eps I at the start)::

        H_i <- decay H_i + (1 - decay) g_(i) g_(i)'
        A = kron_i (H_i + r_i I)^(-1/2d),    A^{1/2} = kron_i (H_i + r_i I)^(-1/4d)

    The roots are recomputed at the first update and at every ``interval``-th after it. The ridge
    r_i is the largest eigenvalue of H_i times 1e-6 (1e-12 in 64 bits); it is in the roots and never
    in the running H_i, and derivatives of A take it as constant. A root that is not finite keeps
    the previous one.

    What becomes of a site's axes: 0-D sites keep the identity. Axes of size 1 are dropped (one
    stays where all are). From the left, an axis is merged into the one before it while the product
    of their sizes is at most ``block_size``; a small matrix thus becomes one vector with a full
    matrix. An axis longer than ``block_size`` is split into equal blocks, the least number of them
    that divides it evenly or, where that is over twice the least possible number, the latter with
    padding. Every block is a tensor of its own; d counts axes after merging.
    1-D sites are neither merged nor counted as matrices, unless ``vector="full"``:

    - ``"diagonal"``: H is a vector of mean g^2, A = (H + r)^(-1/2): RMSprop;
    - ``"full"``: one full matrix a block, A = (H + r I)^(-1/2) with d = 1;
    - ``"identity"``: A = I.

    When: networks and other tensor-valued sites with correlated gradients; the recommendation of
    Yu et al. A is unbounded where gradients vanish, so no Gamma term is right there: prefer
    gamma="frozen" or "auxiliary".
    Cost per step for a matrix of D entries in blocks of n x n: 2 n D multiply-adds for the
    statistic and as many for each of A x and A^{1/2} x (the gradient of a network costs 3 D for
    each row of the batch). Memory: 10 D. A refresh takes one batched eigendecomposition of all
    blocks, padded to the largest. On a CPU, LAPACK runs blocks of 64 and more on several threads,
    which is slower by one to two orders of magnitude where other work competes for the cores: the
    default stays below that. For larger blocks set the environment variable OPENBLAS_NUM_THREADS=1.

    Args:
        decay: memory of H, in [0, 1).
        eps: H at the start, in squared nats per row and unit of the position; above 0.
        interval: steps between recomputations of the roots; None is one epoch, which a kernel
            fills in.
        block_size: longest side of a block, at least 1. Cost and memory grow with it.
        vector: what 1-D sites get.

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: for one out of range, and from ``update`` while ``interval`` is None.

    Source: Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization" (ICML
    2018); Anil et al., "Scalable Second Order Optimization for Deep Learning" (2021) for blocks and
    merging; Yu et al. (TMLR 2023), section 3.2, for the sampler. Deviations: that paper prints G
    with the exponent -1/(2d), which is A's, where G has +1/(2d). Its text has full-matrix RMSprop
    for 1-D sites and its code the identity; here ``vector`` chooses. The ridge is relative.

    >>> metric = Shampoo(decay=0.0, interval=1, block_size=2)
    >>> grad = jnp.diag(jnp.array([4.0, 16.0]))
    >>> state = metric.update(metric.init(grad), grad)
    >>> metric.apply_inverse(state, grad).round(3)  # H = g g' on both sides, d = 2
    Array([[1., 0.],
           [0., 1.]], dtype=float32)
    """

    decay: float = 0.99
    eps: float = 1e-8
    interval: int | None = 100
    block_size: int = 60
    vector: str = "diagonal"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_decay(self.decay)
        check_number("eps", self.eps, above=0.0)
        check_interval(self.interval)
        check_int("block_size", self.block_size, least=1)
        check_choice("vector", self.vector, VECTORS)

    def statistic(self, grad: PyTree) -> PyTree:
        """Per site and axis g_(i) g_(i)' of each block; g * g for diagonal sites."""

        def of_site(g: jax.Array) -> tuple[jax.Array, ...]:
            plan = self._plan(g)
            if plan.diagonal:
                return (jnp.square(g),)
            blocks = plan.split(g) if plan.sizes else g
            return tuple(_gram(blocks, axis + 1) for axis in range(len(plan.sizes)))

        return jax.tree.map(of_site, grad)

    def init(self, position: PyTree) -> ShampooState:
        """The state before any gradient: H = eps I."""
        axes, treedef = jax.tree.flatten(jax.eval_shape(self.statistic, position))
        plans = [self._plan(x) for x in jax.tree.leaves(position)]
        statistic = [_diagonal_like(a, self.eps) for a in axes]
        counts = itertools.chain.from_iterable(plan.weights() for plan in plans)
        weights = [jnp.asarray(w, a.dtype) for w, a in zip(counts, axes, strict=True)]
        return ShampooState(
            running=jax.tree.unflatten(treedef, statistic),
            weights=jax.tree.unflatten(treedef, weights),
            steps=jnp.zeros((), jnp.int32),
            **_as_fields(treedef, _roots_at_start(statistic, self.eps, _powers(plans))),
        )

    def update(self, state: ShampooState, grad: PyTree) -> ShampooState:
        """The state after a gradient; the roots change at the first and every ``interval``-th."""
        if self.interval is None:
            raise ValueError(
                "Shampoo(interval=None) means one epoch, and outside a kernel nothing says how "
                "many steps that is: give a number of steps, Shampoo(interval=...)"
            )
        running = self.average(state.running, grad)
        powers = self._site_powers(grad)
        axes, treedef = jax.tree.flatten(running)
        roots = lazy_cond(
            state.steps == 0,
            lambda old, axes: _refresh(axes, powers, old),
            _as_roots(state),
            axes,
        )
        return state._replace(
            running=running,
            steps=(state.steps + 1) % self.interval,
            **_as_fields(treedef, roots),
        )

    def from_gradient(self, state: ShampooState, grad: PyTree, floor: Any) -> ShampooState:
        """The state whose H is the expectation of ``statistic(grad + floor xi)``, at once.

        Per axis that is g_(i) g_(i)' + floor^2 m I with m the size of the other axes.

        Args:
            state: a state of this metric; its step count is kept, and its roots where the new
                ones are not finite.
            grad: a vector like g.
            floor: standard deviation of the vector's noise, a scalar in its units.
        """
        powers = self._site_powers(grad)
        axes, treedef = jax.tree.flatten(self.statistic(grad))
        weights = jax.tree.leaves(state.weights)
        noise = [(floor**2 / p) * w for w, p in zip(weights, powers, strict=True)]
        axes = [
            (a + (n if n.ndim == 1 else jnp.eye(n.shape[-1]) * n[..., None])).astype(a.dtype)
            for a, n in zip(axes, noise, strict=True)
        ]
        fields = _as_fields(treedef, _refresh(axes, powers, _as_roots(state)))
        return state._replace(running=jax.tree.unflatten(treedef, axes), **fields)

    def apply_inverse(self, state: ShampooState, vector: PyTree) -> PyTree:
        """A x, one product with a small matrix for each axis."""
        return self._multiply(state, state.inverse, vector, -1.0)

    def apply_inverse_sqrt(self, state: ShampooState, vector: PyTree) -> PyTree:
        """A^{1/2} x, one product with a small matrix for each axis."""
        return self._multiply(state, state.inverse_sqrt, vector, -0.5)

    def apply_sqrt(self, state: ShampooState, vector: PyTree) -> PyTree:
        """G^{1/2} x; composes its factors at every call."""
        powers = self._site_powers(vector)
        basis, treedef = jax.tree.flatten(state.basis)
        spectra = jax.tree.leaves(state.eigenvalues)
        roots = [_compose(q, w ** (p / 2)) for q, w, p in zip(basis, spectra, powers, strict=True)]
        return self._multiply(state, jax.tree.unflatten(treedef, roots), vector, 0.5)

    def log_det(self, state: ShampooState) -> jax.Array:
        """Log det G; its derivative takes the ridge as constant."""
        total = jnp.zeros(())
        fields = (state.statistic, state.basis, state.eigenvalues, state.weights)
        for h, q, w, weights in zip(*map(jax.tree.leaves, fields), strict=True):
            change = h - lax.stop_gradient(h)  # zero, and gives the derivative
            if h.ndim == 1:
                log = jnp.log(w) + change / w
            else:
                log = jnp.diagonal(_compose(q, jnp.log(w)), axis1=-2, axis2=-1)
                log = log + jnp.sum(_compose(q, 1 / w) * change, axis=-1)
            total = total + jnp.sum(weights * log)
        return total

    def _plan(self, x: Any) -> _Plan:
        return _plan(tuple(x.shape), self.block_size, self.vector)

    def _site_powers(self, tree: PyTree) -> list[float]:
        return _powers([self._plan(x) for x in jax.tree.leaves(tree)])

    def _multiply(
        self, state: ShampooState, factors: PyTree, vector: PyTree, power: float
    ) -> PyTree:
        """The product with the Kronecker factors of G^power."""

        def of_site(x: jax.Array, *axes: tuple[jax.Array, ...]) -> jax.Array:
            plan = self._plan(x)
            if not plan.sizes:
                return x
            exponent = power / (2 * len(plan.sizes))
            if not plan.diagonal:
                return plan.join(_kronecker(exponent, *axes, plan.split(x)))
            (h,), _, (w,), (root,) = axes
            # The second term is zero and gives the derivative, which takes the ridge as constant.
            return x * (root + exponent * root / w * (h - lax.stop_gradient(h)))

        return jax.tree.map(
            of_site, vector, state.statistic, state.basis, state.eigenvalues, factors
        )


class _Plan(NamedTuple):
    """How a site is cut: static.

    Attributes:
        shape: of the site.
        merged: axes after dropping and merging.
        counts: blocks along each merged axis.
        sizes: side of a block along each; empty for a site with the identity.
        diagonal: whether the site has a diagonal metric and is not cut.
    """

    shape: tuple[int, ...]
    merged: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    diagonal: bool = False

    @property
    def _interleaved(self) -> tuple[int, ...]:
        return tuple(itertools.chain.from_iterable(zip(self.counts, self.sizes, strict=True)))

    @property
    def _padding(self) -> list[tuple[int, int]]:
        sides = zip(self.counts, self.sizes, self.merged, strict=True)
        return [(0, count * size - axis) for count, size, axis in sides]

    def split(self, x: jax.Array) -> jax.Array:
        """The site's blocks, (blocks, n_1, ..., n_d), padded with zeros."""
        d = len(self.sizes)
        x = jnp.pad(x.reshape(self.merged), self._padding).reshape(self._interleaved)
        order = (*range(0, 2 * d, 2), *range(1, 2 * d, 2))
        return x.transpose(order).reshape(-1, *self.sizes)

    def join(self, blocks: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        d = len(self.sizes)
        order = tuple(itertools.chain.from_iterable((i, d + i) for i in range(d)))
        x = blocks.reshape(*self.counts, *self.sizes).transpose(order)
        x = x.reshape([c * n for c, n in zip(self.counts, self.sizes, strict=True)])
        return x[tuple(slice(axis) for axis in self.merged)].reshape(self.shape)

    def weights(self) -> list[np.ndarray]:
        """Per axis, entries of a block that share an index of it, over 2d; 0 for padding."""
        d = len(self.sizes)
        if self.diagonal:
            return [np.full(self.sizes, 0.5)]
        if d == 0:
            return []
        # lengths[i][k]: entries of block k along axis i that are not padding.
        lengths = [
            np.minimum(n, m - n * np.arange(c))
            for m, c, n in zip(self.merged, self.counts, self.sizes, strict=True)
        ]
        lengths = [block.ravel() for block in np.meshgrid(*lengths, indexing="ij")]
        volume = np.prod(lengths, axis=0)
        return [
            (np.arange(n) < length[:, None]) * (volume / length)[:, None] / (2 * d)
            for n, length in zip(self.sizes, lengths, strict=True)
        ]


@functools.cache
def _plan(shape: tuple[int, ...], block_size: int, vector: str) -> _Plan:
    if len(shape) == 0 or 0 in shape or (len(shape) == 1 and vector == "identity"):
        return _Plan(shape)
    if len(shape) == 1 and vector == "diagonal":
        return _Plan(shape, shape, (1,), shape, diagonal=True)
    axes = [n for n in shape if n > 1] or [1]
    merged = axes[:1]
    for n in axes[1:]:
        if merged[-1] * n <= block_size:
            merged[-1] *= n
        else:
            merged.append(n)
    counts = tuple(_num_blocks(n, block_size) for n in merged)
    sizes = tuple(math.ceil(n / count) for n, count in zip(merged, counts, strict=True))
    return _Plan(shape, tuple(merged), counts, sizes)


def _num_blocks(size: int, block_size: int) -> int:
    """Blocks along an axis: a number that divides it where there is one near the least."""
    least = math.ceil(size / block_size)
    # Padding costs more than a few blocks: XLA computes what it pads one entry at a time.
    return next((n for n in range(least, 2 * least + 1) if size % n == 0), least)


def _powers(plans: list[_Plan]) -> list[float]:
    """1/(2d) for each axis of each site."""
    return [0.5 / len(plan.sizes) for plan in plans for _ in plan.sizes]


def _as_roots(state: ShampooState) -> _Roots:
    return _Roots(*(jax.tree.leaves(getattr(state, name)) for name in _Roots._fields))


def _as_fields(treedef: Any, roots: _Roots) -> dict[str, PyTree]:
    return {name: jax.tree.unflatten(treedef, axes) for name, axes in roots._asdict().items()}


def _ridge(dtype: Any) -> float:
    """Ridge relative to the largest eigenvalue, some times the error of the eigenvalues."""
    return 1e-12 if jnp.dtype(dtype) == jnp.float64 else 1e-6


def _diagonal_like(axis: Any, value: float) -> jax.Array:
    if len(axis.shape) == 1:
        return jnp.full(axis.shape, value, axis.dtype)
    return jnp.broadcast_to(value * jnp.eye(axis.shape[-1], dtype=axis.dtype), axis.shape)


def _compose(basis: jax.Array, spectrum: jax.Array) -> jax.Array:
    """The matrices with these eigenvectors and eigenvalues; a diagonal one as a vector."""
    if spectrum.ndim == 1:
        return spectrum
    return jnp.matmul(basis * spectrum[..., None, :], basis.mT, precision=HIGHEST)


def _roots_at_start(statistic: list[jax.Array], eps: float, powers: list[float]) -> _Roots:
    """Roots of eps I."""
    top = [eps * (1 + _ridge(h.dtype)) for h in statistic]
    return _Roots(
        statistic=statistic,
        basis=[
            _diagonal_like(h, 1.0) if h.ndim == 3 else jnp.zeros((0,), h.dtype) for h in statistic
        ],
        eigenvalues=[
            jnp.full(h.shape[:2], w, h.dtype) for h, w in zip(statistic, top, strict=True)
        ],
        inverse=[_diagonal_like(h, w**-p) for h, w, p in zip(statistic, top, powers, strict=True)],
        inverse_sqrt=[
            _diagonal_like(h, w ** (-p / 2)) for h, w, p in zip(statistic, top, powers, strict=True)
        ],
    )


def _refresh(statistic: list[jax.Array], powers: list[float], old: _Roots) -> _Roots:
    """Roots of ``statistic``; block by block the old ones where the new are not finite."""
    new = _diagonal_roots(statistic, powers) | _matrix_roots(statistic, powers)
    fields = zip(*(new[i] for i in range(len(statistic))), strict=True)
    finite, *roots = [list(field) for field in fields] if statistic else [[]] * 6

    def keep(ok: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        if a.size == 0:
            return a
        return jnp.where(ok.reshape(ok.shape + (1,) * (a.ndim - ok.ndim)), a, b)

    return _Roots(*(list(map(keep, finite, a, b)) for a, b in zip(roots, old, strict=True)))


def _diagonal_roots(statistic: list[jax.Array], powers: list[float]) -> dict[int, tuple]:
    """Whether they are finite, and the fields of `_Roots`, for each diagonal axis."""
    found = {}
    for i, (h, p) in enumerate(zip(statistic, powers, strict=True)):
        if h.ndim == 1:
            w = h + _ridge(h.dtype) * jnp.max(h)
            finite = jnp.isfinite(w) & jnp.isfinite(w**-p)
            found[i] = (finite, h, jnp.zeros((0,), h.dtype), w, w**-p, w ** (-p / 2))
    return found


def _matrix_roots(statistic: list[jax.Array], powers: list[float]) -> dict[int, tuple]:
    """Whether each block's are finite, and the fields of `_Roots`, for each matrix axis.

    All blocks go through one batched eigendecomposition: several independent ones in a program can
    deadlock on two cores. Smaller blocks are padded with an eigenvalue above their own, so that
    their own come first.
    """
    chosen = [i for i, h in enumerate(statistic) if h.ndim == 3]
    if not chosen:
        return {}
    matrices = [statistic[i] for i in chosen]
    counts, sides = [h.shape[0] for h in matrices], [h.shape[-1] for h in matrices]
    side = max(sides)
    margins = [((0, 0), (0, side - n), (0, side - n)) for n in sides]
    batch = jnp.concatenate([jnp.pad(h, m) for h, m in zip(matrices, margins, strict=True)])
    own = jnp.arange(side) < np.repeat(sides, counts)[:, None]
    row_sums = jnp.sum(jnp.abs(batch), axis=-1, keepdims=True)
    above = 2 * jnp.max(row_sums, axis=-2, keepdims=True)
    batch = jnp.where(jnp.eye(side, dtype=bool) & ~own[..., None], above, batch)

    w, basis = _eigh(batch)
    w = jnp.maximum(w, 0)  # rounding puts the zeros of a singular matrix on either side
    ridge = np.repeat([_ridge(h.dtype) for h in matrices], counts)[:, None]
    w = w + ridge.astype(w.dtype) * jnp.max(jnp.where(own, w, 0), axis=-1, keepdims=True)
    p = np.repeat([powers[i] for i in chosen], counts)[:, None].astype(w.dtype)
    inverse, inverse_sqrt = _compose(basis, w**-p), _compose(basis, w ** (-p / 2))
    finite = jnp.all(jnp.isfinite(inverse) & jnp.isfinite(inverse_sqrt), axis=(-2, -1))

    found, start = {}, 0
    for i, h, count, n in zip(chosen, matrices, counts, sides, strict=True):
        rows = slice(start, start + count)
        fields = (
            basis[rows, :n, :n],
            w[rows, :n],
            inverse[rows, :n, :n],
            inverse_sqrt[rows, :n, :n],
        )
        found[i] = (finite[rows], h, *(field.astype(h.dtype) for field in fields))
        start += count
    return found


def _eigh(batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.linalg.eigh(batch)


def _contract(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """Sum over all axes but the first, which both share, and ``axis``."""
    others = tuple(i for i in range(1, left.ndim) if i != axis)
    return lax.dot_general(left, right, ((others, others), ((0,), (0,))), precision=HIGHEST)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _gram(x: jax.Array, axis: int) -> jax.Array:
    """x_(axis) x_(axis)' of each block."""
    return _contract(x, x, axis)


@_gram.defjvp
def _gram_jvp(axis: int, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    half = _contract(dx, x, axis)  # the other half is its transpose: one product in place of two
    return _gram(x, axis), half + half.mT


def _product(matrix: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """Product of each block's matrix with its axis ``axis``."""
    blocks, n = x.shape[0], x.shape[axis]
    if axis == x.ndim - 1 and axis > 1:
        y = jnp.matmul(x.reshape(blocks, -1, n), matrix.mT, precision=HIGHEST)
    elif axis == 1:
        y = jnp.matmul(matrix, x.reshape(blocks, n, -1), precision=HIGHEST)
    else:
        before = math.prod(x.shape[1:axis])
        y = jnp.matmul(matrix[:, None], x.reshape(blocks, before, n, -1), precision=HIGHEST)
    return y.reshape(x.shape)


def _products(matrices: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    return functools.reduce(
        lambda y, pair: _product(pair[1], y, pair[0]), enumerate(matrices, 1), x
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _kronecker(
    exponent: float,
    statistic: tuple[jax.Array, ...],
    basis: tuple[jax.Array, ...],
    eigenvalues: tuple[jax.Array, ...],
    roots: tuple[jax.Array, ...],
    x: jax.Array,
) -> jax.Array:
    """Products with ``roots``, which are (statistic + r I)^exponent, along every axis.

    The derivative in ``statistic`` needs its eigendecomposition and makes none; it takes the ridge
    r as constant.
    """
    return _products(roots, x)


@functools.partial(_kronecker.defjvp, symbolic_zeros=True)
def _kronecker_jvp(exponent: float, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    _, basis, eigenvalues, roots, x = primals
    changes, dx = tangents[0], tangents[-1]
    total = jnp.zeros_like(x) if _is_zero(dx) else _products(roots, dx)
    if not all(_is_zero(change) for change in changes):
        total = total + _change(exponent, changes, basis, eigenvalues, x)
    return _products(roots, x), total


def _change(
    exponent: float,
    changes: tuple[jax.Array, ...],
    basis: tuple[jax.Array, ...],
    eigenvalues: tuple[jax.Array, ...],
    x: jax.Array,
) -> jax.Array:
    """Derivative of the products with (H + r I)^exponent along changes of H, in H's eigenbasis."""
    x = _products(tuple(q.mT for q in basis), x)
    scales = [
        (w**exponent).reshape(w.shape[:1] + (1,) * i + w.shape[1:] + (1,) * (x.ndim - 2 - i))
        for i, w in enumerate(eigenvalues)
    ]
    total = jnp.zeros_like(x)
    for i, (change, q, w) in enumerate(zip(changes, basis, eigenvalues, strict=True)):
        if not _is_zero(change):
            others = math.prod(scales[:i] + scales[i + 1 :], start=x)
            total = total + _product(_rotated_change(exponent, change, q, w), others, i + 1)
    return _products(basis, total)


def _rotated_change(exponent: float, change: jax.Array, q: jax.Array, w: jax.Array) -> jax.Array:
    """Derivative of (H + r I)^exponent along ``change`` of H, in H's eigenbasis."""
    rotated = jnp.matmul(jnp.matmul(q.mT, change, precision=HIGHEST), q, precision=HIGHEST)
    return rotated * _divided_difference(w[..., :, None], w[..., None, :], exponent)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _divided_difference(a: jax.Array, b: jax.Array, p: float) -> jax.Array:
    """(a^p - b^p) / (a - b), and p a^(p-1) where a = b.

    As b^(p-1) expm1(p t) / expm1(t) with t = log a - log b it is stable for all a, b > 0.
    """
    t = jnp.log(a) - jnp.log(b)
    equal = t == 0
    t = jnp.where(equal, 1.0, t)
    return b ** (p - 1) * jnp.where(equal, p, jnp.expm1(p * t) / jnp.expm1(t))
