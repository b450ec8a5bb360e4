"""Arrowhead matrices: a few parameters that all rows share, and many that belong to one group each.

A plate of G groups has k parameters in each group, such as an intercept and a slope per school. The
rows of one group do not depend on the parameters of another. So the Hessian is an arrowhead: a
corner of the d shared parameters, G blocks of k x k, and G edges of k x d between them. It follows
from d + k products with vectors, because one vector can set the same parameter in every group.
Its root costs O(G k (k + d) + d^3) operations and O(G k (k + d) + d^2) numbers.

Groups may be the times of a series, each of which depends on the times before and after it. Then
the blocks are those of a block tridiagonal matrix, with links between neighbours, which follow from
d + 3 k products. The recursions over time of its root take log G steps, and on a CPU G short ones,
which compile faster.

Plates may be nested, such as schools in districts. Then the parameters of no school are themselves
an arrowhead of the districts, and a school has an edge to its own district only. Which district
that is follows from products as well, one for each binary digit of the districts' numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from .._linalg import MatrixRoot, balanced_roots, matmul
from .._util import LANES, at_once, is_traced, scattered_floats
from .derivatives import linearize
from .jaxprs import compiled
from .potential import Potential

MOST_SHARED = 256
"""Most shared parameters: the corner is a matrix of them."""
MOST_LOCAL = 32
"""Most parameters of one group."""
FEWEST_GROUPS = 8
FEWEST_TIMES = 32
COLOURS = 3
"""Two times with a distance of at least three have no neighbour in common."""
TRIED = 0.3
"""Share of the groups in the trial of a layout."""
LEAST_NESTED = 0.9
"""Share of groups that must lie within one outer group each, for the groups to count as nested."""
MOST_MIXED = 0.01
"""Largest relative error of a digit of a group that counts as within one outer group."""

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _times(matrix: Any, vector: jax.Array) -> jax.Array:
    """A product with an array, or with an object that has ``times``."""
    return matmul(matrix, vector) if isinstance(matrix, jax.Array) else matrix.times(vector)


def _by_group(blocks: jax.Array, local: jax.Array) -> jax.Array:
    """N q, shape (G, k). On a CPU, sums of products are faster than a batch of small products."""
    return jnp.sum(blocks * local[:, None, :], axis=2)


@dataclass(frozen=True)
class Layout:
    """The parameters that belong to groups, in a vector of all sites.

    Attributes:
        names: names of the sites, in their order in the vector.
        shapes: shape of each site.
        axes: the axes of each site that run over the groups; empty for other sites.
        num_groups: G.
        rest: the layout of all sites that belong to no group, if they belong to outer groups.
        is_series: whether groups are times, each with links to its neighbours.
        is_summed: whether the values of a time are sums of the sites' values up to it.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[tuple[int, ...], ...]
    num_groups: int
    rest: Layout | None = None
    is_series: bool = False
    is_summed: bool = False

    @property
    def local_names(self) -> list[str]:
        """The sites that belong to groups."""
        return [n for n, axes in zip(self.names, self.axes, strict=True) if axes]

    @property
    def num_local(self) -> int:
        """K, parameters of one group."""
        sizes = (prod(x) for x, axes in zip(self.shapes, self.axes, strict=True) if axes)
        return sum(sizes) // max(self.num_groups, 1)

    @property
    def num_shared(self) -> int:
        """D, parameters that belong to no group, nor to an outer one."""
        if self.rest is not None:
            return self.rest.num_shared
        return sum(prod(x) for x, axes in zip(self.shapes, self.axes, strict=True) if not axes)

    @property
    def num_products(self) -> int:
        """Products with vectors that give the Hessian."""
        rest = self.num_shared if self.rest is None else self.rest.num_products
        return self.num_local * self.num_colours + rest

    @property
    def num_colours(self) -> int:
        """Groups with a common product have numbers that are equal modulo this one."""
        return COLOURS if self.is_series else 1

    def parts(self, vector: jax.Array) -> list[jax.Array]:
        """The shared parameters, those of outer groups if there are any, and those of groups."""
        rest, local = self.split(vector)
        return [*([rest] if self.rest is None else self.rest.parts(rest)), local]

    def whole(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The inverse of `parts`."""
        *others, local = parts
        return self.join(others[0] if self.rest is None else self.rest.whole(others), local)

    def split(self, vector: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The parameters of no group, in one vector, and those of the groups, shape (G, k)."""
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
        of_what = "times" if self.is_series else "groups"
        groups = f"{self.num_groups} {of_what} of {self.num_local} ({', '.join(self.local_names)})"
        rest = f"{self.num_shared} shared" if self.rest is None else repr(self.rest)
        return f"{groups}{' and ' if self.rest is None else ', '}{rest}"


def find_layout(
    potential: Potential, sites: Sequence[Any], shapes: Mapping[str, tuple[int, ...]], dtype: Any
) -> Layout | None:
    """The groups of a model, found by its plates or by equal lengths, and tried; None without.

    ``shapes`` are those of the unconstrained sites, in their order in a vector.
    """
    if potential.on_all_rows is None:
        return None
    plates = {
        site.name: [(plate, len(site.batch_shape) + dim) for plate, dim in site.plates]
        for site in sites
        if site.name in shapes
    }
    found = (accepted(potential, layout, dtype) for layout in find_layouts(shapes, plates))
    return next((layout for layout in found if layout is not None), None)


def find_layouts(
    shapes: Mapping[str, tuple[int, ...]], plates: Mapping[str, Sequence[tuple[str, int]]]
) -> list[Layout]:
    """At most one layout with outer groups and one without, from shapes alone.

    Each is the one with the fewest products for its Hessian. Shapes do not tell whether groups are
    separate, nor whether the outer groups contain the others: see `accepted`.

    ``plates`` are those of each site, with the axes of its value. A site without a plate belongs to
    groups if one axis is as long as the plate of another site, or as any axis of the model if no
    site has a plate.
    """
    both: tuple[list, list] = [], []
    for layout in _layouts(shapes, plates):
        both[1].append(layout)
        others = [n for n, axes in zip(layout.names, layout.axes, strict=True) if not axes]
        if any(plates.get(n) for n in others):
            outer = _layouts({n: shapes[n] for n in others}, plates)
            both[0].extend(replace(layout, rest=rest) for rest in outer)
    found = [[x for x in layouts if x.num_shared <= MOST_SHARED] for layouts in both]
    return [
        min(layouts, key=lambda x: (x.num_products, -x.num_groups, str(x)))
        for layouts in found
        if layouts
    ]


def _layouts(
    shapes: Mapping[str, tuple[int, ...]], plates: Mapping[str, Sequence[tuple[str, int]]]
) -> list[Layout]:
    names = tuple(shapes)
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
    return [layout for layout in found if 0 < layout.num_local <= MOST_LOCAL]


def _axes(
    shape: tuple[int, ...], of_site: Mapping[str, int], key: tuple[str, ...], size: int
) -> tuple[int, ...]:
    if key and all(plate in of_site for plate in key):
        return tuple(of_site[plate] % len(shape) for plate in key)
    if of_site:
        return ()
    return next(((axis,) for axis, length in enumerate(shape) if length == size), ())


def accepted(potential: Potential, layout: Layout, dtype: Any) -> Layout | None:
    """The layout; None if its groups are no groups, or its outer groups do not contain the others.

    If only neighbours depend on each other it is a series.

    A plate may as well hold the coefficients of a regression, which all rows have in common. So the
    groups are tried: the Hessian has no entry between two of them, or only between neighbours. The
    product with a random vector on some of the groups must vanish on all others. It is taken on
    some rows, at a random place. Within a transformation of JAX that hides the data there is no
    trial, and the answer is None.
    """
    rng, size = np.random.default_rng(0), sum(map(prod, layout.shapes))
    empty = jax.eval_shape(layout.parts, jax.ShapeDtypeStruct((size,), dtype))
    some = [rng.uniform(size=(len(x), 1)) < TRIED for x in empty]
    levels = range(1, len(some))

    def vector(word: int) -> jax.Array:
        return scattered_floats(jnp.uint32(word), size, dtype)

    def sizes_at(position: jax.Array) -> list[jax.Array]:
        rows = potential.curvature_batch(random.key(0))
        push = linearize(jax.grad(lambda x: potential.energy(x, rows)), position)[1]
        shared, *groups = layout.parts(vector(1))
        chosen = jnp.stack(
            [
                layout.whole(
                    [0 * shared, *(jnp.where(some[k] & (k == j), groups[k - 1], 0) for k in levels)]
                )
                for j in levels
            ]
        )
        products = lax.map(push, chosen)
        return [jnp.abs(layout.parts(x)[k]) for k, x in zip(levels, products, strict=True)]

    with at_once():
        found = compiled(lambda: sizes_at(vector(0)))
        if is_traced(found):
            return None
        sizes = list(map(np.asarray, found))
        near = some[-1] | np.roll(some[-1], 1, axis=0) | np.roll(some[-1], -1, axis=0)

        def apart(sizes: np.ndarray, inside: np.ndarray) -> bool:
            within, outside = np.max(sizes * inside), np.max(sizes * ~inside)
            # the values of times may be sums, with log2 of their number rounding errors
            return bool(outside <= 8 * np.log2(size) * jnp.finfo(dtype).eps * within)

        if layout.rest is None:
            if apart(sizes[0], some[-1]):
                return layout
            is_series = layout.num_groups >= FEWEST_TIMES and apart(sizes[0], near)
            return replace(layout, is_series=True) if is_series else None
        if not all(map(apart, sizes, some[1:])):
            return None
        parents = compiled(lambda: find_parents(potential, vector(0), layout))
        nested = np.mean(np.asarray(parents) < layout.rest.num_groups) > LEAST_NESTED
        return layout if nested else None


def find_parents(potential: Potential, position: jax.Array, layout: Layout) -> jax.Array | None:
    """The outer group that contains each group, shape (G,); their number where there is none.

    It follows from a product of the Hessian with each binary digit of the outer groups' numbers. A
    group that depends on several outer groups has none. Without outer groups the answer is None.
    """
    if layout.rest is None:
        return None
    count = layout.rest.num_groups
    digits = np.arange(count) >> np.arange((count - 1).bit_length())[:, None] & 1
    patterns = jnp.asarray(np.stack([np.ones(count), *digits]), position.dtype)
    weights = jnp.linspace(1, 2, layout.rest.num_local, dtype=position.dtype)

    shared, _, inner = (jnp.zeros_like(x) for x in layout.parts(position))

    def on_rows(rows: Any) -> jax.Array:
        push = linearize(jax.grad(lambda x: potential.energy(x, rows)), position)[1]

        def product(pattern: jax.Array) -> jax.Array:
            direction = layout.whole([shared, pattern[:, None] * weights, inner])
            return layout.split(push(direction))[1]

        return lax.map(product, patterns)

    found = potential.on_all_rows(on_rows)  # type: ignore[misc]
    largest = jnp.argmax(jnp.abs(found[0]), axis=1)
    whole, *ones = jnp.take_along_axis(found, largest[None, :, None], axis=2)[..., 0]
    ones = [x / jnp.where(whole == 0, 1, whole) for x in ones]
    number = sum((x > 0.5).astype(jnp.int32) << k for k, x in enumerate(ones))
    mixed = [jnp.minimum(jnp.abs(x), jnp.abs(x - 1)) > MOST_MIXED for x in ones]
    none = sum(mixed, whole == 0) | (number >= count)
    return jnp.where(none, count, number)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["shared", "outer", "parents"],
    meta_fields=["layout"],
)
@dataclass(frozen=True)
class Edges:
    """The entries of an arrowhead between the groups and all other parameters.

    Attributes:
        shared: C, entries with the shared parameters, shape (G, k, d).
        outer: entries with the j parameters of the outer group, shape (G, k, j); None without.
        parents: the outer group of each group, shape (G,); their number for a group without.
        layout: the parameters that belong to groups.
    """

    shared: jax.Array
    outer: Any
    parents: Any
    layout: Layout

    def times(self, rest: jax.Array) -> jax.Array:
        """C p, shape (G, k)."""
        if self.layout.rest is None:
            return self._of_shared(rest)
        shared, outer = self.layout.rest.split(rest)
        near = jnp.sum(self.outer * self.of_parents(outer)[:, None, :], axis=2)
        return self._of_shared(shared) + near

    def _of_shared(self, shared: jax.Array) -> jax.Array:
        # on a CPU one long product is fast, and a batch of small products is slow
        found = matmul(self.shared.reshape(-1, shared.size), shared)
        return found.reshape(self.shared.shape[:2])

    def transposed_times(self, local: jax.Array) -> jax.Array:
        """C' q, a vector of the parameters of no group."""
        shared = matmul(local.ravel(), self.shared.reshape(local.size, self.shared.shape[2]))
        if self.layout.rest is None:
            return shared
        outer = self.by_parents(jnp.sum(self.outer * local[:, :, None], axis=1))
        return self.layout.rest.join(shared, outer)

    def from_left(self, product: Callable) -> Edges:
        """A linear function of all groups' parameters, shape (G, k), of each column."""
        return self._each(lambda x: jax.vmap(product, -1, -1)(x) if x.size else x)

    def over(self, width: jax.Array) -> Edges:
        """The entries of each parameter of the groups over its width, shape (G, k)."""
        return self._each(lambda x: x / width[:, :, None])

    def _each(self, fn: Callable) -> Edges:
        outer = None if self.outer is None else fn(self.outer)
        return replace(self, shared=fn(self.shared), outer=outer)

    def explained(self, corner: Any) -> Any:
        """The corner without C' C."""
        shared = _einsum("gkd,gke->de", self.shared, self.shared)
        if self.outer is None:
            return corner - shared
        across = self.by_parents(_einsum("gkj,gkd->gjd", self.outer, self.shared))
        within = self.by_parents(_einsum("gkj,gki->gji", self.outer, self.outer))
        edges = replace(corner.edges, shared=corner.edges.shared - across)
        return replace(
            corner, corner=corner.corner - shared, edges=edges, blocks=corner.blocks - within
        )

    def of_parents(self, outer: jax.Array) -> jax.Array:
        """The values of each group's outer group, 0 without one."""
        return outer.at[self.parents].get(mode="fill", fill_value=0)

    def by_parents(self, values: jax.Array) -> jax.Array:
        """The sum over the groups within each outer group."""
        rest: Any = self.layout.rest
        return jax.ops.segment_sum(values, self.parents, rest.num_groups)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["corner", "edges", "blocks", "links"],
    meta_fields=["layout"],
)
@dataclass(frozen=True)
class Arrowhead:
    """A symmetric matrix with a corner, and with a block and an edge for each group.

    Attributes:
        corner: the entries of the parameters of no group: shape (d, d), or an arrowhead of the
            outer groups.
        edges: the entries between them and the groups.
        blocks: shape (G, k, k).
        links: entries between each time, its rows, and the time before it, shape (G, k, k), 0 for
            the first time; None for groups.
        layout: the parameters that belong to groups.
    """

    corner: Any
    edges: Edges
    blocks: jax.Array
    links: Any
    layout: Layout

    def diagonal(self) -> jax.Array:
        """The diagonal, shape (D,)."""
        nested = isinstance(self.corner, Arrowhead)
        rest = self.corner.diagonal() if nested else jnp.diagonal(self.corner)
        return self.layout.join(rest, jnp.diagonal(self.blocks, axis1=1, axis2=2))

    def with_diagonal(self, values: jax.Array) -> Arrowhead:
        """The same with another diagonal, shape (D,)."""
        rest, local = self.layout.split(values)
        if isinstance(self.corner, Arrowhead):
            corner: Any = self.corner.with_diagonal(rest)
        else:
            corner = jnp.fill_diagonal(self.corner, rest, inplace=False)
        each = jnp.arange(local.shape[1])
        return replace(self, corner=corner, blocks=self.blocks.at[:, each, each].set(local))

    def times(self, vector: jax.Array) -> jax.Array:
        """The product with a vector, shape (D,)."""
        rest, local = self.layout.split(vector)
        return self.layout.join(
            _times(self.corner, rest) + self.edges.transposed_times(local),
            self.edges.times(rest) + self._within(local),
        )

    def _within(self, local: jax.Array) -> jax.Array:
        own = _by_group(self.blocks, local)
        if self.links is None:
            return own
        before = jnp.roll(local, 1, axis=0)
        after = _by_group(jnp.swapaxes(self.links, 1, 2), local)
        return own + _by_group(self.links, before) + jnp.roll(after, -1, axis=0)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["corner", "edges", "blocks", "blocks_inverse", "links"],
    meta_fields=["layout"],
)
@dataclass(frozen=True)
class ArrowRoot:
    """L with L L' = |H|^-1 for an `Arrowhead` H, a map of vectors.

    With phi = (p, q) it gives the parameters of no group M p, and N (q - C M p) for those of
    groups. N' is the inverse of R, where R R' is H within the groups: its blocks are R_g, and for
    times S_g stands to the left of R_g.

    Attributes:
        corner: M, a `MatrixRoot`, or the root of the outer groups.
        edges: C.
        blocks: R_g^-1 transposed, shape (G, k, k).
        blocks_inverse: R_g transposed.
        links: S_g, shape (G, k, k), 0 for the first time; None for groups.
        layout: the parameters that belong to groups.
    """

    corner: Any
    edges: Edges
    blocks: jax.Array
    blocks_inverse: jax.Array
    links: Any
    layout: Layout

    def times(self, vector: jax.Array) -> jax.Array:
        """L phi."""
        rest, local = self.layout.split(vector)
        rest = self.corner.times(rest)
        return self.layout.join(rest, self._within(local - self.edges.times(rest)))

    def transposed_times(self, vector: jax.Array) -> jax.Array:
        """L' v."""
        rest, local = self.layout.split(vector)
        local = _transposed_within(self.blocks, self.links, local)
        rest = rest - self.edges.transposed_times(local)
        return self.layout.join(self.corner.transposed_times(rest), local)

    def solve(self, vector: jax.Array) -> jax.Array:
        """L^-1 theta."""
        rest, local = self.layout.split(vector)
        own = _by_group(self.blocks_inverse, local)
        if self.links is not None:
            own += jnp.roll(_by_group(jnp.swapaxes(self.links, 1, 2), local), -1, axis=0)
        return self.layout.join(self.corner.solve(rest), own + self.edges.times(rest))

    def _within(self, local: jax.Array) -> jax.Array:
        """N q, shape (G, k)."""
        own = _by_group(self.blocks, local)
        if self.links is None:
            return own
        links = jnp.roll(jnp.swapaxes(self.links, 1, 2), -1, axis=0)
        return _recursion(-_einsum("gkj,gji->gki", self.blocks, links), own, reverse=True)

    def variances(self) -> jax.Array:
        """The diagonal of L L', shape (D,); for a batch of chains one each."""
        if self.blocks.ndim > 3:
            return jax.vmap(ArrowRoot.variances)(self)
        return self.layout.whole([jnp.diagonal(x, 0, -2, -1) for x in self._covariances()[::2]])

    def variances_given_shared(self) -> jax.Array:
        """Variances of the groups' parameters given all others; of shared ones in L L'."""
        own = jnp.diagonal(self._own_covariances(), 0, 1, 2)
        if isinstance(self.corner, ArrowRoot):
            return self.layout.join(self.corner.variances_given_shared(), own)
        return self.layout.join(self.corner.variances(), own)

    def _covariances(self) -> list[jax.Array]:
        """Blocks of L L': shared parameters, shape (d, d), then those of groups, outer ones first.

        Groups have a block with the shared parameters, shape (G, k, d), and one within each group.
        """
        edges = self.edges.from_left(self._within)
        own = self._own_covariances()
        if isinstance(self.corner, ArrowRoot):
            before = self.corner._covariances()
        else:
            before = [self.corner.covariance()]
        shared = before[0]
        across = _einsum("gkd,de->gke", edges.shared, shared)
        within = own + _einsum("gkd,gjd->gkj", across, edges.shared)
        if len(before) > 1:
            outer_shared, outer = map(edges.of_parents, before[1:])
            both = _einsum("gkj,gjd->gkd", edges.outer, outer_shared)
            across += both
            mixed = _einsum("gkd,gjd->gkj", both, edges.shared)
            within += mixed + jnp.swapaxes(mixed, 1, 2)
            within += _einsum("gkj,gji,gli->gkl", edges.outer, outer, edges.outer)
        return [*before, -across, within]

    def _own_covariances(self) -> jax.Array:
        """Blocks of N N', shape (G, k, k)."""
        if self.links is None:
            return _einsum("gkj,gij->gki", self.blocks, self.blocks)

        def step(after: jax.Array, given: tuple) -> tuple[jax.Array, jax.Array]:
            block, link = given  # the link is that of the time after
            middle = jnp.eye(len(block), dtype=block.dtype) + matmul(link.T, matmul(after, link))
            found = matmul(block, matmul(middle, block.T))
            return found, found

        links = jnp.roll(self.links, -1, axis=0)
        return lax.scan(step, 0 * self.blocks[0], (self.blocks, links), reverse=True)[1]

    def then(self, corner: MatrixRoot, width: jax.Array) -> ArrowRoot:
        """L R, where R scales the shared parameters by a matrix and the others one by one.

        ``width`` holds the factors of the parameters of groups, in a vector of all, shape (D,).
        """
        rest, local = self.layout.split(width)
        nested = isinstance(self.corner, ArrowRoot)
        return ArrowRoot(
            self.corner.then(corner, rest) if nested else self.corner.then(corner),
            self.edges.over(local),
            self.blocks * local[:, None, :],
            self.blocks_inverse / local[:, :, None],
            None if self.links is None else self.links / jnp.roll(local, 1, axis=0)[:, None, :],
            self.layout,
        )

    def products(self, vector: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the shared phi with themselves, shape (d, d), and the squares of all."""
        shared = self.layout.parts(vector)[0]
        return shared[:, None] * shared, vector**2


def unit_root(layout: Layout, dtype: Any, parents: jax.Array | None = None) -> ArrowRoot:
    """The identity. `parents` are the outer groups' numbers, by default none."""
    unit = _diagonal(layout, jnp.ones((), dtype), parents)
    if layout.rest is None:
        corner: Any = MatrixRoot(unit.corner, unit.corner)
    else:
        corner = unit_root(layout.rest, dtype)
    return ArrowRoot(corner, unit.edges, unit.blocks, unit.blocks, unit.links, layout)


def _recursion(matrices: jax.Array, vectors: jax.Array, reverse: bool = False) -> jax.Array:
    """X_g = A_g x_{g-1} + b_g for all g, or from the last with x_{g+1}; shapes (G, k)."""

    def both(first: tuple, second: tuple) -> tuple:
        (a, b), (c, d) = first, second
        # sums of products, since batches of small products are slow on a CPU
        product = jnp.sum(c[..., :, :, None] * a[..., None, :, :], axis=-2)
        return product, jnp.sum(c * b[..., None, :], axis=-1) + d

    if jax.default_backend() == "cpu":

        def turn(before: jax.Array, given: tuple) -> tuple[jax.Array, jax.Array]:
            after = jnp.sum(given[0] * before, axis=-1) + given[1]
            return after, after

        return lax.scan(turn, jnp.zeros_like(vectors[0]), (matrices, vectors), reverse=reverse)[1]
    return lax.associative_scan(both, (matrices, vectors), reverse=reverse)[1]


def _transposed_within(blocks: jax.Array, links: Any, local: jax.Array) -> jax.Array:
    """N' q of an `ArrowRoot`, shape (G, k)."""
    inverses = jnp.swapaxes(blocks, 1, 2)
    own = _by_group(inverses, local)
    if links is None:
        return own
    return _recursion(-_einsum("gkj,gji->gki", inverses, links), own)


def root_of(matrix: Arrowhead) -> ArrowRoot:
    """L with L L' = H^-1. Blocks, and the corner without what they explain, count as positive."""
    if matrix.links is None:
        block, block_inverse = jax.vmap(balanced_roots)(matrix.blocks)
        links = None
    else:

        def step(before: jax.Array, given: tuple) -> tuple[jax.Array, tuple]:
            block, link = given
            link = matmul(link, before.T)
            root, inverse = balanced_roots(block - matmul(link, link.T))
            return inverse, (root, inverse, link)

        given = matrix.blocks, matrix.links
        block, block_inverse, links = lax.scan(step, 0 * matrix.blocks[0], given)[1]
    blocks, blocks_inverse = jnp.swapaxes(block_inverse, 1, 2), jnp.swapaxes(block, 1, 2)
    edges = matrix.edges.from_left(partial(_transposed_within, blocks, links))
    rest = edges.explained(matrix.corner)
    if isinstance(rest, Arrowhead):
        corner: Any = root_of(rest)
    else:
        root, inverse = balanced_roots((rest + rest.T) / 2)
        corner = MatrixRoot(inverse.T, root.T)
    return ArrowRoot(corner, edges, blocks, blocks_inverse, links, matrix.layout)


def no_arrowhead(layout: Layout, dtype: Any, parents: jax.Array | None = None) -> Arrowhead:
    """The matrix of zeros. `parents` are the outer groups' numbers, by default none."""
    return _diagonal(layout, jnp.zeros((), dtype), parents)


def _diagonal(layout: Layout, value: jax.Array, parents: jax.Array | None) -> Arrowhead:
    groups, local, shared = layout.num_groups, layout.num_local, layout.num_shared
    edges = Edges(jnp.zeros((groups, local, shared), value.dtype), None, None, layout)
    corner: Any = value * jnp.eye(shared, dtype=value.dtype)
    if layout.rest is not None:
        corner = _diagonal(layout.rest, value, None)
        if parents is None:
            parents = jnp.full(groups, layout.rest.num_groups, jnp.int32)
        outer = jnp.zeros((groups, local, layout.rest.num_local), value.dtype)
        edges = replace(edges, outer=outer, parents=parents)
    blocks = jnp.broadcast_to(value * jnp.eye(local, dtype=value.dtype), (groups, local, local))
    links = jnp.zeros_like(blocks) if layout.is_series else None
    return Arrowhead(corner, edges, blocks, links, layout)


def derivatives_at(
    potential: Potential, position: jax.Array, layout: Layout, root: ArrowRoot | None = None
) -> tuple[jax.Array, jax.Array, Arrowhead, jax.Array]:
    """U, its gradient and its Hessian at a vector, on all rows, with the Hessian's misfit.

    The pass over all rows evaluates d + k products with vectors, d + 3 k for a series, j more for
    outer groups, and one more for the misfit. The Hessian H counts as an arrowhead A. Its misfit is
    the relative error in a random direction v of the posterior, |L'(H - A) v| / |L'A v|. Without
    groups it is 0.

    ``root`` is L, about a root of the inverse Hessian, for the misfit and the outer groups'
    numbers; by default the identity, without outer groups' numbers.
    """
    dtype = position.dtype
    root = unit_root(layout, dtype) if root is None else root
    zeros = [jnp.zeros_like(x) for x in layout.parts(position)]

    def direction(level: int, first: int, colours: int, k: int) -> jax.Array:
        groups = (slice(first, None, colours),) if level else ()
        parts = [x.at[*groups, k].set(1) if i == level else x for i, x in enumerate(zeros)]
        return layout.whole(parts)

    trial = root.times(scattered_floats(jnp.zeros((), jnp.uint32), position.size, dtype))
    colours = [1] * (len(zeros) - 1) + [layout.num_colours]
    names = [
        (level, first, colours[level], k)
        for level, x in enumerate(zeros)
        for first in range(colours[level])
        for k in range(x.shape[-1])
    ]
    directions = jnp.stack([*(direction(*x) for x in names), *[trial] * bool(layout.num_groups)])

    def on_rows(rows: Any) -> tuple:
        value_and_grad = jax.value_and_grad(lambda x: potential.energy(x, rows))
        found, push = linearize(value_and_grad, position)
        products = lax.map(lambda v: push(v)[1], directions, batch_size=LANES)
        return *found, products

    energy, gradient, products = potential.on_all_rows(on_rows)  # type: ignore[misc]
    found = _from_products(products[: len(names)], layout, root.edges.parents)
    if not layout.num_groups:
        return energy, gradient, found, jnp.zeros((), dtype)
    expected = found.times(trial)
    away, whole = map(root.transposed_times, (products[-1] - expected, expected))
    return energy, gradient, found, jnp.linalg.norm(away) / jnp.linalg.norm(whole)


def _from_products(products: jax.Array, layout: Layout, parents: Any = None) -> Arrowhead:
    """The matrix whose products with the unit vectors of each part of the layout are given."""
    colours, times = layout.num_colours, np.arange(layout.num_groups)
    num_rest = len(products) - layout.num_local * colours
    rest, local = jax.vmap(layout.split)(products)
    columns = local[num_rest:].reshape(colours, layout.num_local, *local.shape[1:])
    columns = columns.transpose(0, 2, 3, 1)  # of each colour, shape (G, k, k)
    blocks = columns[times % colours, times]
    blocks = (blocks + jnp.swapaxes(blocks, 1, 2)) / 2
    links = None
    if layout.is_series:
        links = columns[(times - 1) % colours, times].at[0].set(0)
    near = local[:num_rest].transpose(1, 2, 0)
    edges = Edges(near[..., : layout.num_shared], None, parents, layout)
    if layout.rest is None:
        return Arrowhead(rest[:num_rest], edges, blocks, links, layout)
    within = (parents < layout.rest.num_groups)[:, None, None]
    edges = replace(edges, outer=jnp.where(within, near[..., layout.num_shared :], 0))
    return Arrowhead(_from_products(rest[:num_rest], layout.rest), edges, blocks, links, layout)
