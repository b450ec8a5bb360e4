"""The Shampoo metric: a Kronecker product of small matrices for each tensor.

The file has four parts: the metric, how it cuts a tensor into blocks (`Blocks`), the inverse roots
of its statistics, and products of blocks with one matrix per axis.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import check_choice, check_int, check_number, check_share
from .._linalg import eigenpairs
from .._util import PyTree, lazy_cond, tree_where
from .base import Metric

Roots = tuple[jax.Array, jax.Array]
"""Of an axis: (H + r I)^-p and (H + r I)^(-p / 2)."""

HIGHEST = lax.Precision.HIGHEST
VECTORS = ("diagonal", "full", "identity")
"""The choices of ``vector``, the metric of one-dimensional sites."""


class ShampooState(NamedTuple):
    """State of `Shampoo`.

    ``statistic`` and ``roots`` have for each site a tuple with one entry for each of its d axes. An
    array has the shape (blocks, n, n) unless stated otherwise. A site with a diagonal metric has
    one array (n,). A site with the identity has an empty tuple.

    Attributes:
        statistic: the moving average H.
        roots: pairs of factors, with H at the last refresh: of A, (H + r I)^(-1/2d), and of
            A^{1/2}, (H + r I)^(-1/4d).
        steps: steps since the last refresh, int32.
    """

    statistic: PyTree
    roots: PyTree
    steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Shampoo(Metric):
    """The Kronecker-factored metric: correlations within every axis of every tensor.

    A site's gradient g = grad Uhat / N is a tensor with d axes. For each axis i let g_(i) be the
    unfolding with axis i in its rows. H_i = eps I at the start::

        H_i <- decay H_i + (1 - decay) g_(i) g_(i)'
        A = kron_i (H_i + r_i I)^(-1/2d),    A^{1/2} = kron_i (H_i + r_i I)^(-1/4d)

    The roots are recomputed at the first update and at every ``interval``-th update after it. The
    ridge r_i is the largest eigenvalue of H_i times 1e-6 (1e-12 in 64 bits). It is in the roots
    and never in H_i. A root that is not finite is replaced by the previous root.

    The axes of a site become the axes of blocks as follows. A 0-D site counts as a 1-D site with
    one entry. Axes of size 1 are dropped (one stays if all have size 1). From the left, an axis is
    merged into the one before it while the product of their sizes is at most ``block_size``. So a
    small matrix becomes one vector with a full matrix. An axis longer than ``block_size`` is split
    into equal blocks: into the least number of them that divides it evenly. If this number is over
    twice the least possible number, the latter is used, with padding. Every block is a tensor of
    its own, and d counts axes after merging. 1-D sites are neither merged nor counted as matrices,
    unless ``vector="full"``:

    - ``"diagonal"``: H is a vector of mean g^2, A = (H + r)^(-1/2): RMSprop;
    - ``"full"``: one full matrix per block, A = (H + r I)^(-1/2) with d = 1;
    - ``"identity"``: A = I.

    When: networks and other tensor-valued sites with correlated gradients; Yu et al. recommend it.
    A is unbounded where gradients vanish, so no Gamma term is right there: A has no derivative,
    and its Gamma is refused.
    Cost per step for a matrix of D entries in blocks of n x n: 2 n D multiply-adds for the
    statistic, and the same for each of A x and A^{1/2} x (the gradient of a network costs 3 D for
    each row of the batch). Memory: 6 D. A refresh takes one batched eigendecomposition of all
    blocks, padded to the largest block. On a CPU, LAPACK uses several threads for blocks of 64 and
    more. This is slower by one to two orders of magnitude where other work competes for the cores,
    so the default is below 64. For larger blocks set the environment variable
    OPENBLAS_NUM_THREADS=1.

    Args:
        decay: memory of H, in [0, 1).
        eps: H at the start, in squared nats per row and unit of the position; above 0.
        interval: steps between recomputations of the roots. None is one epoch; a kernel replaces
            None by the number of steps.
        block_size: longest side of a block, at least 1. Cost and memory grow with it.
        vector: the metric of 1-D sites.

    Raises:
        TypeError: for an argument of the wrong type.
        ValueError: for an argument out of range, and from ``update`` while ``interval`` is None.

    Source: Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization" (ICML
    2018); Anil et al., "Scalable Second Order Optimization for Deep Learning" (2021) for blocks and
    merging; Yu et al. (TMLR 2023), section 3.2, for the sampler. Deviations: that paper prints G
    with the exponent -1/(2d), which belongs to A; G has +1/(2d). For 1-D sites its text has
    full-matrix RMSprop and its code the identity; here ``vector`` chooses. The ridge is relative.

    >>> metric = Shampoo(decay=0.0, interval=1, block_size=2)
    >>> grad = jnp.diag(jnp.array([4.0, 16.0]))
    >>> state = metric.update(metric.init(grad), grad)
    >>> metric.apply_inverse(state, grad).round(3)  # H = g g' on both sides, d = 2
    Array([[1., 0.],
           [0., 1.]], dtype=float32)
    """

    has_derivative: ClassVar[bool] = False
    decay: float = 0.99
    eps: float = 1e-8
    interval: int | None = 100
    block_size: int = 60
    vector: Literal["diagonal", "full", "identity"] = "diagonal"

    def __post_init__(self) -> None:
        check_share("decay", self.decay)
        check_number("eps", self.eps, above=0.0)
        if self.interval is not None:
            check_int("interval", self.interval)
        check_int("block_size", self.block_size, least=1)
        check_choice("vector", self.vector, VECTORS)

    def statistic(self, grad: PyTree) -> PyTree:
        """Per site and axis g_(i) g_(i)' of each block; g * g for diagonal sites."""

        def of_site(g: jax.Array) -> tuple[jax.Array, ...]:
            cut = self._cut(g)
            if cut.diagonal:
                return (jnp.square(g).reshape(cut.sizes),)
            blocks = cut.split(g) if cut.sizes else g
            return tuple(_gram(blocks, axis + 1) for axis in range(len(cut.sizes)))

        return jax.tree.map(of_site, grad)

    def init(self, position: PyTree) -> ShampooState:
        """The state before any gradient: H = eps I."""
        shapes, treedef = jax.tree.flatten(jax.eval_shape(self.statistic, position))
        ones = [jnp.ones(a.shape, a.dtype) for a in shapes]
        ones = [x if x.ndim == 1 else x * jnp.eye(x.shape[-1], dtype=x.dtype) for x in ones]
        roots = []
        for one, p in zip(ones, self._powers(position), strict=True):
            w = self.eps * (1 + _ridge(one.dtype))
            roots.append((w**-p * one, w ** (-p / 2) * one))
        statistic = [self.eps * one for one in ones]
        unflatten = functools.partial(jax.tree.unflatten, treedef)
        return ShampooState(unflatten(statistic), unflatten(roots), jnp.zeros((), jnp.int32))

    def update(self, state: ShampooState, grad: PyTree) -> ShampooState:
        """The state after a gradient; the first and each ``interval``-th update renew the roots."""
        statistic = self.average(state.statistic, grad)
        powers = self._powers(grad)
        axes, treedef = jax.tree.flatten(statistic)
        old = _pairs(state.roots)
        roots = lazy_cond(
            state.steps == 0, lambda old, axes: _renewed(axes, powers, old), old, axes
        )
        steps = (state.steps + 1) % self.steps_between_updates()
        return ShampooState(statistic, jax.tree.unflatten(treedef, roots), steps)

    def keep_if(self, good: jax.Array, new: ShampooState, old: ShampooState) -> ShampooState:
        """The state after a step; if it is undone, with H and the step count of ``old``.

        If the undone step recomputed the roots, the next step recomputes them again.
        """
        kept = tree_where(good, (new.statistic, new.steps), (old.statistic, old.steps))
        return new._replace(statistic=kept[0], steps=kept[1])

    def from_gradient(self, state: ShampooState, grad: PyTree, floor: Any) -> ShampooState:
        """The state whose H is the expectation of ``statistic(grad + floor xi)``, at once.

        Per axis that is g_(i) g_(i)' + floor^2 m I, with m the size of the other axes. Roots that
        would not be finite do not change.
        """
        powers = self._powers(grad)
        axes, treedef = jax.tree.flatten(self.statistic(grad))
        weights = [w for x in jax.tree.leaves(grad) for w in self._cut(x).weights()]
        noise = [floor**2 * w for w in weights]
        axes = [
            (a + (n if n.ndim == 1 else jnp.eye(n.shape[-1]) * n[..., None])).astype(a.dtype)
            for a, n in zip(axes, noise, strict=True)
        ]
        roots = _renewed(axes, powers, _pairs(state.roots))
        unflatten = functools.partial(jax.tree.unflatten, treedef)
        return ShampooState(unflatten(axes), unflatten(roots), state.steps)

    def apply_inverse(self, state: ShampooState, vector: PyTree) -> PyTree:
        """A x, one product with a small matrix for each axis."""
        return self._multiply(state, vector, 0)

    def apply_inverse_sqrt(self, state: ShampooState, vector: PyTree) -> PyTree:
        """A^{1/2} x, one product with a small matrix for each axis."""
        return self._multiply(state, vector, 1)

    def _cut(self, x: Any) -> Blocks:
        return _blocks_of(tuple(x.shape), self.block_size, self.vector)

    def _powers(self, tree: PyTree) -> list[float]:
        """1/(2d) for each axis of each site."""
        cuts = [self._cut(x) for x in jax.tree.leaves(tree)]
        return [0.5 / len(cut.sizes) for cut in cuts for _ in cut.sizes]

    def _multiply(self, state: ShampooState, vector: PyTree, which: int) -> PyTree:
        """The product with Kronecker factors, the first or second of each pair of roots."""

        def of_site(x: jax.Array, roots: tuple[Roots, ...]) -> jax.Array:
            cut = self._cut(x)
            if cut.diagonal:
                return x * roots[0][which].reshape(cut.shape)
            if not cut.sizes:
                return x
            blocks = cut.split(x)
            for axis, root in enumerate(roots, 1):
                blocks = _product(root[which], blocks, axis)
            return cut.join(blocks)

        return jax.tree.map(of_site, vector, state.roots)


def _pairs(roots: PyTree) -> list[Roots]:
    found = jax.tree.leaves(roots)
    return list(zip(found[::2], found[1::2], strict=True))


# --- blocks


class Blocks(NamedTuple):
    """How a site is cut into blocks, each a tensor of its own. All fields are static.

    Attributes:
        shape: shape of the site.
        merged: axes after dropping and merging.
        counts: number of blocks along each merged axis.
        sizes: side of a block along each merged axis; empty for a site with the identity.
        diagonal: whether the site has a diagonal metric and is not cut.
    """

    shape: tuple[int, ...]
    merged: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    diagonal: bool = False

    @property
    def padded(self) -> tuple[int, ...]:
        """The merged axes, with padding."""
        return tuple(count * size for count, size in zip(self.counts, self.sizes, strict=True))

    def split(self, x: jax.Array) -> jax.Array:
        """The site's blocks, (blocks, n_1, ..., n_d), padded with zeros."""
        d = len(self.sizes)
        padding = [(0, n - m) for n, m in zip(self.padded, self.merged, strict=True)]
        interleaved = itertools.chain.from_iterable(zip(self.counts, self.sizes, strict=True))
        x = jnp.pad(x.reshape(self.merged), padding).reshape(*interleaved)
        order = (*range(0, 2 * d, 2), *range(1, 2 * d, 2))
        return x.transpose(order).reshape(-1, *self.sizes)

    def join(self, blocks: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        d = len(self.sizes)
        order = tuple(itertools.chain.from_iterable((i, d + i) for i in range(d)))
        x = blocks.reshape(*self.counts, *self.sizes).transpose(order).reshape(self.padded)
        return x[tuple(slice(axis) for axis in self.merged)].reshape(self.shape)

    def weights(self) -> list[jax.Array]:
        """For each axis and index: the number of block entries with it; 0 for padding."""
        if self.diagonal or not self.sizes:
            return [jnp.ones(n) for n in self.sizes]
        ones = self.split(jnp.ones(self.shape))
        axes = range(1, ones.ndim)
        return [jnp.sum(ones, tuple(i for i in axes if i != axis)) for axis in axes]


@functools.cache
def _blocks_of(shape: tuple[int, ...], block_size: int, vector: str) -> Blocks:
    """The cut of a site with this shape; see `Shampoo` for the rules and the arguments."""
    if 0 in shape or (len(shape) <= 1 and vector == "identity"):
        return Blocks(shape)
    if len(shape) == 0 or (len(shape) == 1 and vector == "diagonal"):
        size = shape or (1,)
        return Blocks(shape, size, (1,), size, diagonal=True)
    axes = [n for n in shape if n > 1] or [1]
    merged = axes[:1]
    for n in axes[1:]:
        if merged[-1] * n <= block_size:
            merged[-1] *= n
        else:
            merged.append(n)
    least = [math.ceil(n / block_size) for n in merged]
    # A divisor near the least number: XLA computes padded arrays entry by entry.
    counts = tuple(
        next((k for k in range(m, 2 * m + 1) if n % k == 0), m)
        for n, m in zip(merged, least, strict=True)
    )
    sizes = tuple(math.ceil(n / count) for n, count in zip(merged, counts, strict=True))
    return Blocks(shape, tuple(merged), counts, sizes)


# --- inverse roots


def _ridge(dtype: Any) -> float:
    """Ridge relative to the largest eigenvalue: several times the error of the eigenvalues."""
    return 1e-12 if jnp.dtype(dtype) == jnp.float64 else 1e-6


def _compose(basis: jax.Array, spectrum: jax.Array) -> jax.Array:
    """The matrices with these eigenvectors and eigenvalues."""
    return jnp.matmul(basis * spectrum[..., None, :], basis.mT, precision=HIGHEST)


def _renewed(statistic: list[jax.Array], powers: list[float], old: list[Roots]) -> list[Roots]:
    """Roots of ``statistic``; each block keeps its old roots if the new ones are not finite."""
    renewed = []
    for h, p, before in zip(statistic, powers, old, strict=True):
        finite, new = _roots(h, p)
        renewed.append(jax.tree.map(lambda x, y, k=finite: jnp.where(k, x, y), new, before))
    return renewed


def _roots(h: jax.Array, p: float) -> tuple[jax.Array, Roots]:
    """Whether the roots of a diagonal's entries or of each block are finite, and the roots."""
    if h.ndim < 3:
        w = h + _ridge(h.dtype) * jnp.max(h)
        return jnp.isfinite(w) & jnp.isfinite(w**-p), (w**-p, w ** (-p / 2))
    w, basis = jax.vmap(eigenpairs)(h)
    w = jnp.maximum(w, 0)  # rounding makes some zeros of a singular matrix negative
    w += _ridge(h.dtype) * jnp.max(w, axis=-1, keepdims=True)
    inverse, inverse_sqrt = _compose(basis, w**-p), _compose(basis, w ** (-p / 2))
    finite = jnp.isfinite(inverse) & jnp.isfinite(inverse_sqrt)
    return jnp.all(finite, axis=(-2, -1), keepdims=True), (inverse, inverse_sqrt)


# --- products


def _gram(x: jax.Array, axis: int) -> jax.Array:
    """x_(axis) x_(axis)' of each block: the sum over all other axes."""
    others = tuple(i for i in range(1, x.ndim) if i != axis)
    return lax.dot_general(x, x, ((others, others), ((0,), (0,))), precision=HIGHEST)


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
