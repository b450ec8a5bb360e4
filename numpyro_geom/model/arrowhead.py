"""Arrowhead matrices: a few parameters that all rows share, and many that belong to one group each.

A plate of G groups has k parameters in each group, such as an intercept and a slope per school. The
rows of one group do not depend on the parameters of another. So the Hessian is an arrowhead: a
corner of the d shared parameters, G blocks of k x k, and G edges of k x d between them. It follows
from d + k products with vectors, because one vector can set the same parameter in every group.
Its root costs O(G k (k + d) + d^3) operations and O(G k (k + d) + d^2) numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from .._linalg import balanced_roots
from .._util import is_traced, scattered_floats
from .derivatives import jvp, linearize
from .potential import Potential
from .programs import compiled

MOST_SHARED = 256
"""Most shared parameters: the corner is a matrix of them."""
MOST_LOCAL = 32
"""Most parameters of one group."""
FEWEST_GROUPS = 8
PRODUCTS_AT_ONCE = 8

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


# On a CPU a batch of small products is slow. One long product and sums of products are fast.


def _spread(edges: jax.Array, shared: jax.Array) -> jax.Array:
    """C p, shape (G, k)."""
    return _matmul(edges.reshape(-1, shared.size), shared).reshape(edges.shape[:2])


def _gathered(edges: jax.Array, local: jax.Array) -> jax.Array:
    """C' q, shape (d,)."""
    return _matmul(local.ravel(), edges.reshape(local.size, edges.shape[2]))


def _by_group(blocks: jax.Array, local: jax.Array) -> jax.Array:
    """N q, shape (G, k)."""
    return jnp.sum(blocks * local[:, None, :], axis=2)


@dataclass(frozen=True)
class Layout:
    """The parameters that belong to groups, in a vector of all sites in the order of their names.

    Attributes:
        names: names of the sites.
        shapes: shape of each site.
        axes: the axes of each site that run over the groups; empty for a shared site.
        num_groups: G.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[tuple[int, ...], ...]
    num_groups: int

    @property
    def num_local(self) -> int:
        """K, parameters of one group."""
        sizes = (prod(x) for x, axes in zip(self.shapes, self.axes, strict=True) if axes)
        return sum(sizes) // max(self.num_groups, 1)

    @property
    def num_shared(self) -> int:
        """D, parameters that belong to no group."""
        return sum(prod(x) for x, axes in zip(self.shapes, self.axes, strict=True) if not axes)

    def split(self, vector: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The shared parameters, shape (d,), and those of the groups, shape (G, k)."""
        ends = np.cumsum([prod(shape) for shape in self.shapes])
        shared, local = [], []
        for part, shape, axes in zip(
            jnp.split(vector, ends[:-1]), self.shapes, self.axes, strict=True
        ):
            if not axes:
                shared.append(part)
                continue
            moved = jnp.moveaxis(part.reshape(shape), axes, range(len(axes)))
            local.append(moved.reshape(self.num_groups, -1))
        nothing = vector[:0]
        return (
            jnp.concatenate([nothing, *shared]),
            jnp.concatenate([nothing.reshape(self.num_groups, 0), *local], axis=1),
        )

    def join(self, shared: jax.Array, local: jax.Array) -> jax.Array:
        """The inverse of `split`."""
        parts, used, column = [], 0, 0
        for shape, axes in zip(self.shapes, self.axes, strict=True):
            size = prod(shape)
            if not axes:
                parts.append(shared[used : used + size])
                used += size
                continue
            width = size // self.num_groups
            others = [n for a, n in enumerate(shape) if a not in axes]
            part = local[:, column : column + width]
            part = part.reshape(*(shape[a] for a in axes), *others)
            parts.append(jnp.moveaxis(part, range(len(axes)), axes).ravel())
            column += width
        return jnp.concatenate(parts)

    @classmethod
    def without_groups(cls, size: int) -> Layout:
        """The layout in which all parameters are shared."""
        return cls(("",), ((size,),), ((),), 0)

    def __repr__(self) -> str:
        sites = [n for n, axes in zip(self.names, self.axes, strict=True) if axes]
        return (
            f"{self.num_groups} groups of {self.num_local} ({', '.join(sites)}) and "
            f"{self.num_shared} shared"
        )


def find_layout(
    shapes: Mapping[str, tuple[int, ...]], plates: Mapping[str, Sequence[tuple[str, int]]]
) -> Layout | None:
    """The layout with the fewest products for its Hessian, from shapes alone; None without groups.

    Shapes do not tell whether groups are separate: see `are_separate`.

    Args:
        shapes: shapes of the unconstrained sites.
        plates: for each site, its plates with the axes of its value. A site without a plate
            belongs to groups if one axis is as long as the plate of another site, or as any axis
            of the model if no site has a plate.
    """
    names = tuple(sorted(shapes))
    shapes_of = tuple(tuple(shapes[n]) for n in names)
    candidates: set[tuple[tuple[str, ...], int]] = set()
    for name in names:
        of_site = dict(plates.get(name, ()))
        sizes = {plate: shapes[name][axis] for plate, axis in of_site.items()}
        candidates |= {((plate,), size) for plate, size in sizes.items()}
        if of_site:
            candidates.add((tuple(sorted(of_site)), prod(sizes.values())))
    if not candidates:
        candidates = {((), size) for shape in shapes.values() for size in shape}
    found = [
        Layout(
            names,
            shapes_of,
            tuple(_axes(shapes[n], dict(plates.get(n, ())), key, size) for n in names),
            size,
        )
        for key, size in candidates
        if size >= FEWEST_GROUPS
    ]
    found = [
        layout
        for layout in found
        if 0 < layout.num_local <= MOST_LOCAL and layout.num_shared <= MOST_SHARED
    ]
    return min(found, key=lambda x: (x.num_shared + x.num_local, str(x)), default=None)


def _axes(
    shape: tuple[int, ...], of_site: Mapping[str, int], key: tuple[str, ...], size: int
) -> tuple[int, ...]:
    if key and all(plate in of_site for plate in key):
        return tuple(of_site[plate] % len(shape) for plate in key)
    if of_site:
        return ()
    return next(((axis,) for axis, length in enumerate(shape) if length == size), ())


def are_separate(potential: Potential, layout: Layout, dtype: Any) -> bool:
    """Whether the groups of a layout are groups: the Hessian has no entry between two of them.

    A plate may as well hold the coefficients of a regression, which all rows have in common. So the
    groups are tried: the product with a random vector on some of the groups must vanish on all
    others. It is taken on some rows, at a random place. Within a transformation of JAX that hides
    the data there is no trial, and the answer is no.
    """
    groups = np.random.default_rng(0).uniform(size=(layout.num_groups, 1)) < 0.5
    with jax.ensure_compile_time_eval():
        size = layout.num_shared + layout.num_local * layout.num_groups
        position, direction = (scattered_floats(jnp.uint32(k), size, dtype) for k in range(2))
        shared, local = layout.split(direction)
        direction = layout.join(0 * shared, jnp.where(groups, local, 0))

        def product(position: jax.Array, direction: jax.Array) -> jax.Array:
            rows = potential.curvature_batch(random.key(0))
            return jvp(jax.grad(lambda x: potential.energy(x, rows)), position, direction)[1]

        found = layout.split(compiled(product, position, direction))[1]
    if is_traced(found):
        return False
    found = np.abs(np.asarray(found))
    inside, outside = np.max(found * groups), np.max(found * ~groups)
    return bool(outside <= 8 * jnp.finfo(dtype).eps * inside)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["corner", "edges", "blocks"],
    meta_fields=["layout"],
)
@dataclass(frozen=True)
class Arrowhead:
    """A symmetric matrix with a corner, and with a block and an edge for each group.

    Attributes:
        corner: shape (d, d).
        edges: shape (G, k, d).
        blocks: shape (G, k, k).
        layout: the parameters that belong to groups.
    """

    corner: jax.Array
    edges: jax.Array
    blocks: jax.Array
    layout: Layout

    def times(self, vector: jax.Array) -> jax.Array:
        """The product with a vector, shape (D,)."""
        shared, local = self.layout.split(vector)
        return self.layout.join(
            _matmul(self.corner, shared) + _gathered(self.edges, local),
            _spread(self.edges, shared) + _by_group(self.blocks, local),
        )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["corner", "corner_inverse", "edges", "blocks", "blocks_inverse"],
    meta_fields=["layout"],
)
@dataclass(frozen=True)
class ArrowRoot:
    """L with L L' = |H|^-1 for an `Arrowhead` H, a map of vectors.

    With phi = (p, q) it gives the shared parameters M p, and N (q - C M p) in each group.

    Attributes:
        corner: M, shape (d, d).
        corner_inverse: M^-1.
        edges: C, shape (G, k, d).
        blocks: N, shape (G, k, k).
        blocks_inverse: N^-1.
        layout: the parameters that belong to groups.
    """

    corner: jax.Array
    corner_inverse: jax.Array
    edges: jax.Array
    blocks: jax.Array
    blocks_inverse: jax.Array
    layout: Layout

    def times(self, vector: jax.Array) -> jax.Array:
        """L phi."""
        shared, local = self.layout.split(vector)
        shared = _matmul(self.corner, shared)
        local = local - _spread(self.edges, shared)
        return self.layout.join(shared, _by_group(self.blocks, local))

    def transposed_times(self, vector: jax.Array) -> jax.Array:
        """L' v."""
        shared, local = self.layout.split(vector)
        local = _by_group(jnp.swapaxes(self.blocks, 1, 2), local)
        shared = shared - _gathered(self.edges, local)
        return self.layout.join(_matmul(shared, self.corner), local)

    def solve(self, vector: jax.Array) -> jax.Array:
        """L^-1 theta."""
        shared, local = self.layout.split(vector)
        local = _by_group(self.blocks_inverse, local) + _spread(self.edges, shared)
        return self.layout.join(_matmul(self.corner_inverse, shared), local)

    def variances(self) -> jax.Array:
        """The diagonal of L L', shape (D,); for a batch of chains one each."""
        if self.corner.ndim > 2:
            return jax.vmap(ArrowRoot.variances)(self)
        across = _einsum("gkj,gjd,de->gke", self.blocks, self.edges, self.corner)
        local = jnp.sum(self.blocks**2, axis=2) + jnp.sum(across**2, axis=2)
        return self.layout.join(jnp.sum(self.corner**2, axis=1), local)

    def then(self, corner: tuple[jax.Array, jax.Array], width: jax.Array) -> ArrowRoot:
        """L R, where R scales the shared parameters by a matrix and the others one by one.

        Args:
            corner: the matrix and its inverse, shapes (d, d).
            width: factors of the parameters of the groups, shape (G, k).
        """
        return ArrowRoot(
            _matmul(self.corner, corner[0]),
            _matmul(corner[1], self.corner_inverse),
            self.edges / width[:, :, None],
            self.blocks * width[:, None, :],
            self.blocks_inverse / width[:, :, None],
            self.layout,
        )


def unit_root(layout: Layout, dtype: Any) -> ArrowRoot:
    """The identity."""
    groups, local, shared = layout.num_groups, layout.num_local, layout.num_shared
    corner = jnp.eye(shared, dtype=dtype)
    blocks = jnp.broadcast_to(jnp.eye(local, dtype=dtype), (groups, local, local))
    return ArrowRoot(
        corner, corner, jnp.zeros((groups, local, shared), dtype), blocks, blocks, layout
    )


def root_of(matrix: Arrowhead) -> ArrowRoot:
    """L with L L' = H^-1. Blocks, and the corner without what they explain, count as positive."""
    block, block_inverse = jax.vmap(balanced_roots)(matrix.blocks)
    edges = _einsum("gkj,gjd->gkd", block_inverse, matrix.edges)
    corner = matrix.corner - _einsum("gkd,gke->de", edges, edges)
    corner, corner_inverse = balanced_roots((corner + corner.T) / 2)
    return ArrowRoot(
        corner_inverse.T,
        corner.T,
        edges,
        jnp.swapaxes(block_inverse, 1, 2),
        jnp.swapaxes(block, 1, 2),
        matrix.layout,
    )


def no_arrowhead(layout: Layout, dtype: Any) -> Arrowhead:
    """The matrix of zeros."""
    groups, local, shared = layout.num_groups, layout.num_local, layout.num_shared
    return Arrowhead(
        jnp.zeros((shared, shared), dtype),
        jnp.zeros((groups, local, shared), dtype),
        jnp.zeros((groups, local, local), dtype),
        layout,
    )


def derivatives_at(
    potential: Potential, position: jax.Array, layout: Layout, root: ArrowRoot | None = None
) -> tuple[jax.Array, jax.Array, Arrowhead, jax.Array]:
    """U, its gradient and its Hessian at a vector, on all rows, with the Hessian's misfit.

    The pass over all rows evaluates d + k products with vectors, and one more for the misfit. The
    Hessian H counts as an arrowhead A. Its misfit is the relative error in a random direction v of
    the posterior, |L'(H - A) v| / |L'A v|. Without groups it is 0.

    Args:
        potential: of vectors.
        position: shape (D,).
        layout: the parameters that belong to groups.
        root: L, about a root of the inverse Hessian, for the misfit; by default the identity.
    """
    dtype = position.dtype
    groups, local, shared = layout.num_groups, layout.num_local, layout.num_shared
    root = unit_root(layout, dtype) if root is None else root
    each = jnp.eye(local, dtype=dtype)[:, None] * jnp.ones((groups, 1), dtype)
    none = jnp.zeros((shared + local, groups, local), dtype)
    directions = jax.vmap(layout.join)(
        jnp.eye(shared + local, shared, dtype=dtype), none.at[shared:].set(each)
    )
    trial = root.times(scattered_floats(jnp.zeros((), jnp.uint32), position.size, dtype))
    directions = jnp.concatenate([directions, trial[None]]) if groups else directions

    def on_rows(rows: Any) -> tuple:
        value_and_grad = jax.value_and_grad(lambda x: potential.energy(x, rows))
        found, push = linearize(value_and_grad, position)
        products = lax.map(lambda v: push(v)[1], directions, batch_size=PRODUCTS_AT_ONCE)
        return *found, products

    energy, gradient, products = potential.on_all_rows(on_rows)  # type: ignore[misc]
    in_shared, in_local = jax.vmap(layout.split)(products[: shared + local])
    edges, blocks = in_local[:shared].transpose(1, 2, 0), in_local[shared:].transpose(1, 2, 0)
    blocks = (blocks + jnp.swapaxes(blocks, 1, 2)) / 2
    found = Arrowhead(in_shared[:shared], edges, blocks, layout)
    if not groups:
        return energy, gradient, found, jnp.zeros((), dtype)
    expected = found.times(trial)
    away, whole = map(root.transposed_times, (products[-1] - expected, expected))
    return energy, gradient, found, jnp.linalg.norm(away) / jnp.linalg.norm(whole)
