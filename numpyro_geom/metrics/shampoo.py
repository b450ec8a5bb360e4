"""The Shampoo metric: a Kronecker product of small matrices for each tensor."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._checks import check_choice, check_int, check_number
from .._util import lazy_cond, tree_where
from .base import Metric, check_decay, check_interval
from .blocks import Blocks, blocks_of
from .kronecker import gram, kronecker
from .roots import Roots, compose, diagonal_like, refresh, roots_at_start

PyTree = Any

VECTORS = ("diagonal", "full", "identity")
"""The choices of ``vector``, the metric of one-dimensional sites."""


class ShampooState(NamedTuple):
    """State of `Shampoo`.

    Every field except ``steps`` is a pytree of one structure: for each site a tuple with one array
    for each of its d axes. An array has the shape (blocks, n, n) unless stated otherwise. A site
    with a diagonal metric has one array (n,). A site with the identity has an empty tuple.

    Attributes:
        statistic: H at the last refresh, from which A is computed.
        running: the moving average H.
        basis: eigenvectors of ``statistic``, in columns; (0,) for diagonal sites.
        eigenvalues: eigenvalues of ``statistic`` plus the ridge, (blocks, n) or (n,).
        inverse: factors of A, (H + r I)^(-1/2d).
        inverse_sqrt: factors of A^{1/2}, (H + r I)^(-1/4d).
        weights: weights of the diagonal of log(H + r I) in log det G, (blocks, n) or (n,).
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


@dataclasses.dataclass(frozen=True)
class Shampoo(Metric):
    """The Kronecker-factored metric: correlations within every axis of every tensor.

    A site's gradient g = grad Uhat / N is a tensor with d axes. For each axis i let g_(i) be the
    unfolding with axis i in its rows. H_i = eps I at the start::

        H_i <- decay H_i + (1 - decay) g_(i) g_(i)'
        A = kron_i (H_i + r_i I)^(-1/2d),    A^{1/2} = kron_i (H_i + r_i I)^(-1/4d)

    The roots are recomputed at the first update and at every ``interval``-th update after it. The
    ridge r_i is the largest eigenvalue of H_i times 1e-6 (1e-12 in 64 bits). It is in the roots
    and never in the running H_i. Derivatives of A take it as constant. A root that is not finite
    is replaced by the previous root.

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
    A is unbounded where gradients vanish, so no Gamma term is right there: prefer
    gamma="frozen" or "auxiliary".
    Cost per step for a matrix of D entries in blocks of n x n: 2 n D multiply-adds for the
    statistic, and the same for each of A x and A^{1/2} x (the gradient of a network costs 3 D for
    each row of the batch). Memory: 10 D. A refresh takes one batched eigendecomposition of all
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

    decay: float = 0.99
    eps: float = 1e-8
    interval: int | None = 100
    block_size: int = 60
    vector: Literal["diagonal", "full", "identity"] = "diagonal"

    def __post_init__(self) -> None:
        check_decay(self.decay)
        check_number("eps", self.eps, above=0.0)
        check_interval(self.interval)
        check_int("block_size", self.block_size, least=1)
        check_choice("vector", self.vector, VECTORS)

    def statistic(self, grad: PyTree) -> PyTree:
        """Per site and axis g_(i) g_(i)' of each block; g * g for diagonal sites."""

        def of_site(g: jax.Array) -> tuple[jax.Array, ...]:
            cut = self._cut(g)
            if cut.diagonal:
                return (jnp.square(g).reshape(cut.sizes),)
            blocks = cut.split(g) if cut.sizes else g
            return tuple(gram(blocks, axis + 1) for axis in range(len(cut.sizes)))

        return jax.tree.map(of_site, grad)

    def init(self, position: PyTree) -> ShampooState:
        """The state before any gradient: H = eps I."""
        axes, treedef = jax.tree.flatten(jax.eval_shape(self.statistic, position))
        statistic = [diagonal_like(a, self.eps) for a in axes]
        counts = [w for x in jax.tree.leaves(position) for w in self._cut(x).weights()]
        weights = [jnp.asarray(w, a.dtype) for w, a in zip(counts, axes, strict=True)]
        return ShampooState(
            running=jax.tree.unflatten(treedef, statistic),
            weights=jax.tree.unflatten(treedef, weights),
            steps=jnp.zeros((), jnp.int32),
            **_as_fields(treedef, roots_at_start(statistic, self.eps, self._powers(position))),
        )

    def update(self, state: ShampooState, grad: PyTree) -> ShampooState:
        """The state after a gradient; the first and each ``interval``-th update renew the roots."""
        running = self.average(state.running, grad)
        powers = self._powers(grad)
        axes, treedef = jax.tree.flatten(running)
        roots = lazy_cond(
            state.steps == 0,
            lambda old, axes: refresh(axes, powers, old),
            _as_roots(state),
            axes,
        )
        return state._replace(
            running=running,
            steps=(state.steps + 1) % self.steps_between_updates(),
            **_as_fields(treedef, roots),
        )

    def keep_if(self, good: jax.Array, new: ShampooState, old: ShampooState) -> ShampooState:
        """The state after a step; if it is undone, with H and the step count of ``old``.

        If the undone step recomputed the roots, the next step recomputes them again.
        """
        running, steps = tree_where(good, (new.running, new.steps), (old.running, old.steps))
        return new._replace(running=running, steps=steps)

    def from_gradient(self, state: ShampooState, grad: PyTree, floor: Any) -> ShampooState:
        """The state whose H is the expectation of ``statistic(grad + floor xi)``, at once.

        Per axis that is g_(i) g_(i)' + floor^2 m I, with m the size of the other axes. Roots that
        would not be finite do not change.
        """
        powers = self._powers(grad)
        axes, treedef = jax.tree.flatten(self.statistic(grad))
        weights = jax.tree.leaves(state.weights)
        noise = [(floor**2 / p) * w for w, p in zip(weights, powers, strict=True)]
        axes = [
            (a + (n if n.ndim == 1 else jnp.eye(n.shape[-1]) * n[..., None])).astype(a.dtype)
            for a, n in zip(axes, noise, strict=True)
        ]
        fields = _as_fields(treedef, refresh(axes, powers, _as_roots(state)))
        return state._replace(running=jax.tree.unflatten(treedef, axes), **fields)

    def apply_inverse(self, state: ShampooState, vector: PyTree) -> PyTree:
        """A x, one product with a small matrix for each axis."""
        return self._multiply(state, state.inverse, vector, -1.0)

    def apply_inverse_sqrt(self, state: ShampooState, vector: PyTree) -> PyTree:
        """A^{1/2} x, one product with a small matrix for each axis."""
        return self._multiply(state, state.inverse_sqrt, vector, -0.5)

    def apply_sqrt(self, state: ShampooState, vector: PyTree) -> PyTree:
        """G^{1/2} x; this composes its factors at every call."""
        powers = self._powers(vector)
        basis, treedef = jax.tree.flatten(state.basis)
        spectra = jax.tree.leaves(state.eigenvalues)
        roots = [compose(q, w ** (p / 2)) for q, w, p in zip(basis, spectra, powers, strict=True)]
        return self._multiply(state, jax.tree.unflatten(treedef, roots), vector, 0.5)

    def log_det(self, state: ShampooState) -> jax.Array:
        """Log det G; its derivative takes the ridge as constant."""
        total = jnp.zeros(())
        fields = (state.statistic, state.basis, state.eigenvalues, state.weights)
        for h, q, w, weights in zip(*map(jax.tree.leaves, fields), strict=True):
            change = h - lax.stop_gradient(h)  # zero, but it carries the derivative
            if h.ndim == 1:
                log = jnp.log(w) + change / w
            else:
                log = jnp.diagonal(compose(q, jnp.log(w)), axis1=-2, axis2=-1)
                log = log + jnp.sum(compose(q, 1 / w) * change, axis=-1)
            total = total + jnp.sum(weights * log)
        return total

    def _cut(self, x: Any) -> Blocks:
        return blocks_of(tuple(x.shape), self.block_size, self.vector)

    def _powers(self, tree: PyTree) -> list[float]:
        """1/(2d) for each axis of each site."""
        cuts = [self._cut(x) for x in jax.tree.leaves(tree)]
        return [0.5 / len(cut.sizes) for cut in cuts for _ in cut.sizes]

    def _multiply(
        self, state: ShampooState, factors: PyTree, vector: PyTree, power: float
    ) -> PyTree:
        """The product with the Kronecker factors of G^power."""

        def of_site(x: jax.Array, *axes: tuple[jax.Array, ...]) -> jax.Array:
            cut = self._cut(x)
            if not cut.sizes:
                return x
            exponent = power / (2 * len(cut.sizes))
            if not cut.diagonal:
                return cut.join(kronecker(exponent, *axes, cut.split(x)))
            (h,), _, (w,), (root,) = axes
            # The second term is zero. It carries the derivative, which takes the ridge as constant.
            factor = root + exponent * root / w * (h - lax.stop_gradient(h))
            return x * factor.reshape(cut.shape)

        return jax.tree.map(
            of_site, vector, state.statistic, state.basis, state.eigenvalues, factors
        )


def _as_roots(state: ShampooState) -> Roots:
    return Roots(*(jax.tree.leaves(getattr(state, name)) for name in Roots._fields))


def _as_fields(treedef: Any, roots: Roots) -> dict[str, PyTree]:
    return {name: jax.tree.unflatten(treedef, axes) for name, axes in roots._asdict().items()}
