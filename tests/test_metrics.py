"""Metrics: algebra against dense formulas in NumPy, memory, intervals, limits, bad arguments.

A tolerance called "rounding" below is a multiple of the unit roundoff times the condition number of
the operation. The factor covers sums over at most a few hundred terms.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_geom._util import tree_vdot
from numpyro_geom.metrics import (
    Identity,
    Metric,
    MetricState,
    Monge,
    RMSprop,
    Shampoo,
    Wenzel,
    get_metric,
)

SHAPES = {"a": (), "b": (3,), "c": (4, 5), "d": (2, 1, 3, 2)}
# eps is large enough to keep matrices well-conditioned: these tests are of algebra.
CASES = {
    "identity": Identity(),
    "rmsprop": RMSprop(decay=0.7, eps=0.1),
    "wenzel": Wenzel(decay=0.7, eps=0.1, interval=1),
    "monge": Monge(alpha2=0.8, decay=0.7),
    "monge-auto": Monge(decay=0.7),
    "shampoo": Shampoo(decay=0.7, eps=0.1, interval=1, block_size=3),
    "shampoo-full": Shampoo(decay=0.7, eps=0.1, interval=1, block_size=6, vector="full"),
}
each_metric = pytest.mark.parametrize("metric", CASES.values(), ids=CASES.keys())


def tree(seed: int, shapes: Any = None, dtype: Any = None, scale: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    shapes = SHAPES if shapes is None else shapes
    return {k: jnp.asarray(scale * rng.normal(size=s), dtype) for k, s in shapes.items()}


# Compiled once for each metric, and again for each structure and dtype.
@functools.cache
def _jit(metric: Any, name: str) -> Any:
    return jax.jit(getattr(metric, name))


@functools.cache
def _jit_run(metric: Any) -> Any:
    def updates(position: Any, grads: Any) -> Any:
        return jax.lax.scan(lambda s, g: (metric.update(s, g), None), metric.init(position), grads)

    return jax.jit(updates)


@functools.cache
def _jit_dense(metric: Any, *names: str) -> Any:
    def columns(state: Any, like: Any) -> list[jax.Array]:
        flat, unravel = ravel_pytree(like)
        units = jnp.eye(flat.size, dtype=flat.dtype)

        def products(unit: jax.Array) -> list[jax.Array]:
            x = unravel(unit)
            return [ravel_pytree(getattr(metric, name)(state, x))[0] for name in names]

        return jax.vmap(products)(units)

    return jax.jit(columns)


def stack(trees: Any) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def run(metric: Any, num: int = 3, **kwargs: Any) -> Any:
    """A state after some gradients."""
    grads = stack(tree(1 + i, **kwargs) for i in range(num))
    return _jit_run(metric)(tree(0, **kwargs), grads)[0]


def dense(metric: Any, names: str, state: Any, like: Any) -> list[np.ndarray]:
    """The matrix of each product, by unit vectors."""
    return [np.array(a).T for a in _jit_dense(metric, *names.split())(state, like)]


PRODUCTS = "apply_inverse apply_inverse_sqrt"


def assert_trees_close(left: Any, right: Any, **kwargs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **kwargs), left, right)


# Algebra


@each_metric
def test_products_are_powers_of_one_positive_definite_matrix(metric: Any, x64: None) -> None:
    state, like = run(metric), tree(0)
    a, root = dense(metric, PRODUCTS, state, like)
    # Roundoff 1e-16 times conditions of at most 1e4 (eps = .1 against gradients of order 1-10).
    close = {"rtol": 0, "atol": 1e-11 * np.abs(a).max()}
    np.testing.assert_allclose(a, a.T, **close)
    np.testing.assert_allclose(root, root.T, **close)
    np.testing.assert_allclose(root @ root, a, **close)
    assert np.linalg.eigvalsh(a).min() > 0
    assert np.linalg.eigvalsh(root).min() > 0


@each_metric
def test_float32_agrees_with_float64(metric: Any, x64: None) -> None:
    x = tree(9)
    wide = [np.asarray(m) @ ravel_pytree(x)[0] for m in dense(metric, PRODUCTS, run(metric), x)]

    @jax.jit
    def products(state: Any, x: Any) -> list[jax.Array]:
        return [ravel_pytree(getattr(metric, name)(state, x))[0] for name in PRODUCTS.split()]

    narrow = products(run(metric, dtype="float32"), tree(9, dtype="float32"))
    for found, exact in zip(narrow, wide, strict=True):
        # Single roundoff 6e-8, times the condition of the statistic (at most 1e3) times a power of
        # at most a half, and the ridge of 1e-6: below 1e-4 of the largest entry.
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4 * np.abs(exact).max())


# Memory: each metric against a plain loop


def test_rmsprop_equals_the_formula(x64: None) -> None:
    metric = RMSprop(decay=0.7, eps=0.1)
    v = 0.0
    for i in range(3):
        v = 0.7 * v + 0.3 * ravel_pytree(tree(1 + i))[0] ** 2
    x = ravel_pytree(tree(9))[0]
    y = ravel_pytree(_jit(metric, "apply_inverse")(run(metric), tree(9)))[0]
    np.testing.assert_allclose(y, x / (np.sqrt(v) + 0.1), rtol=1e-13)


def test_wenzel_equals_the_formula_and_keeps_its_interval(x64: None) -> None:
    metric = Wenzel(decay=0.7, eps=0.1, interval=3)
    state = metric.init(tree(0))
    v = {k: np.ones(s) for k, s in SHAPES.items()}
    used = v
    for step in range(1, 8):
        grad = tree(step)
        state = _jit(metric, "update")(state, grad)
        v = {k: 0.7 * v[k] + 0.3 * np.asarray(grad[k]) ** 2 for k in v}
        if step % 3 == 0:
            used = v
        scale = {k: np.sqrt(0.1 + np.mean(used[k])) for k in v}
        least = min(scale.values())
        expected = {k: np.asarray(grad[k]) * least / scale[k] for k in v}
        assert_trees_close(_jit(metric, "apply_inverse")(state, grad), expected, rtol=1e-13)


def test_monge_equals_the_dense_formula(x64: None) -> None:
    metric = Monge(alpha2=0.8, decay=0.7)
    v = 0.0
    for i in range(3):
        v = 0.7 * v + 0.3 * ravel_pytree(tree(1 + i))[0]
    g = np.eye(len(v)) + 0.8 * np.outer(v, v)
    a, root = dense(metric, "apply_inverse apply_inverse_sqrt", run(metric), tree(0))
    np.testing.assert_allclose(a @ g, np.eye(len(v)), rtol=0, atol=1e-13)
    # Yu et al., Eq. 5, with its division by v'v.
    f = (1 / np.sqrt(1 + 0.8 * v @ v) - 1) / (v @ v)
    np.testing.assert_allclose(root, np.eye(len(v)) + f * np.outer(v, v), rtol=0, atol=1e-13)


def test_monge_without_a_number_is_bounded_and_knows_no_scale(x64: None) -> None:
    metric, grads = Monge(decay=0.7), [tree(1 + i) for i in range(3)]
    v, r = 0.0, 0.0
    for grad in grads:
        g = ravel_pytree(grad)[0]
        v, r = 0.7 * v + 0.3 * g, 0.7 * r + 0.3 * g @ g
    (a,) = dense(metric, "apply_inverse", run(metric), tree(0))
    np.testing.assert_allclose(
        a @ (np.eye(len(v)) + np.outer(v, v) / r), np.eye(len(v)), atol=1e-13
    )
    (scaled,) = dense(metric, "apply_inverse", run(metric, scale=1e-6), tree(0))
    np.testing.assert_allclose(scaled, a, rtol=0, atol=1e-13)
    one = metric.update(metric.init(tree(0)), grads[0])  # v'v is at most r: nearest after one step
    (first,) = dense(metric, "apply_inverse", one, tree(0))
    assert 1 / (1 + 0.3) - 1e-12 < np.linalg.eigvalsh(first).min() < 1
    (start,) = dense(metric, "apply_inverse", metric.init(tree(0)), tree(0))
    np.testing.assert_array_equal(start, np.eye(len(v)))


# By block size and vector mode: the shape of a site, its axes after merging, and the borders of
# blocks along each without padding; or no borders for the identity, "diagonal" for the diagonal.
CUTS: dict[tuple[int, str], list[tuple]] = {
    (3, "diagonal"): [
        ((5, 1, 3, 2), (5, 3, 2), ((0, 3, 5), (0, 3), (0, 2))),
        ((2, 2, 2, 2), (2, 2, 2, 2), ((0, 2),) * 4),
    ],
    (3, "full"): [
        ((8,), (8,), ((0, 2, 4, 6, 8),)),
        ((5,), (5,), ((0, 3, 5),)),
        ((3,), (3,), ((0, 3),)),
    ],
    (4, "identity"): [
        ((), (), ()),
        ((4,), (4,), ()),
        ((2, 3), (2, 3), ((0, 2), (0, 3))),
    ],
    (4, "diagonal"): [
        ((), (1,), "diagonal"),
        ((3,), (3,), "diagonal"),
        ((1,), (1,), "diagonal"),
        ((1, 1), (1,), ((0, 1),)),
        ((4, 6), (4, 6), ((0, 4), (0, 3, 6))),
        ((5, 7), (5, 7), ((0, 3, 5), (0, 4, 7))),
        ((2, 3, 4), (2, 3, 4), ((0, 2), (0, 3), (0, 4))),
    ],
    (9, "diagonal"): [
        ((2, 3), (6,), ((0, 6),)),
        ((5, 1), (5,), ((0, 5),)),
        ((2, 3, 4), (6, 4), ((0, 6), (0, 4))),
        ((2, 2, 2, 2), (8, 2), ((0, 8), (0, 2))),
        ((3, 3, 2, 4), (9, 8), ((0, 9), (0, 8))),
        ((3, 3, 2, 5), (9, 2, 5), ((0, 9), (0, 2), (0, 5))),
    ],
}


def power(h: np.ndarray, exponent: float, ridge: float) -> np.ndarray:
    w, q = np.linalg.eigh(h)
    return (q * (np.maximum(w, 0) + ridge * w.max()) ** exponent) @ q.T


def shampoo_reference(
    grads: list[np.ndarray],
    merged: tuple,
    borders: Any,
    decay: float,
    eps: float,
    ridge: float,
    exponent: float = -0.5,
) -> np.ndarray:
    """Dense A (or another power) of one site, block by block, with loops and Kronecker products."""
    size = grads[0].size
    if not borders:
        return np.eye(size)
    if borders == "diagonal":
        v = np.full(size, eps)
        for g in grads:
            v = decay * v + (1 - decay) * g.ravel() ** 2
        return np.diag((v + ridge * v.max()) ** exponent)
    a = np.zeros((size, size))
    index = np.arange(size).reshape(merged)
    slices = [[slice(*pair) for pair in itertools.pairwise(b)] for b in borders]
    for block in itertools.product(*slices):
        matrix = np.ones((1, 1))
        for axis in range(len(merged)):
            h = eps * np.eye(index[block].shape[axis])
            for g in grads:
                unfolded = np.moveaxis(g.reshape(merged)[block], axis, 0).reshape(len(h), -1)
                h = decay * h + (1 - decay) * unfolded @ unfolded.T
            matrix = np.kron(matrix, power(h, exponent / len(merged), ridge))
        entries = index[block].ravel()
        a[np.ix_(entries, entries)] = matrix
    return a


@pytest.mark.parametrize(("block_size", "vector"), CUTS)
def test_shampoo_equals_a_kronecker_product(block_size: int, vector: str, x64: None) -> None:
    metric = Shampoo(decay=0.6, eps=0.1, interval=1, block_size=block_size, vector=vector)
    cuts = CUTS[block_size, vector]
    shapes = {f"{i}": shape for i, (shape, _, _) in enumerate(cuts)}
    state, like = run(metric, shapes=shapes), tree(0, shapes)
    grads = [jax.tree.map(np.asarray, tree(1 + i, shapes)) for i in range(3)]
    both = dense(metric, "apply_inverse apply_inverse_sqrt", state, like)
    for found, exponent in zip(both, (-0.5, -0.25), strict=True):
        end = 0
        for site, (shape, merged, borders) in zip(shapes, cuts, strict=True):
            own = [g[site] for g in grads]
            expected = shampoo_reference(own, merged, borders, 0.6, 0.1, 1e-12, exponent)
            start, end = end, end + math.prod(shape)
            # Roundoff 1e-16 times conditions of at most 1e4.
            block = found[start:end, start:end]
            np.testing.assert_allclose(block, expected, rtol=0, atol=1e-11)
            found[start:end, start:end] = 0
        assert np.all(found == 0)


def test_shampoo_sites_do_not_see_each_other(x64: None) -> None:
    """Sites of different size and scale, padded into one eigendecomposition."""
    metric = Shampoo(decay=0.6, eps=1e-3, interval=1, block_size=6)
    shapes = {"large": (6, 5), "small": (2,), "tiny": (2, 2)}
    scales = {"large": 1e3, "small": 1.0, "tiny": 1e-3}

    def gradient(names: Any) -> Any:
        return {k: scales[k] * tree(1, shapes)[k] for k in names}

    product = _jit(metric, "apply_inverse")
    together = _jit(metric, "update")(metric.init(gradient(shapes)), gradient(shapes))
    for name in shapes:
        alone = _jit(metric, "update")(metric.init(gradient([name])), gradient([name]))
        np.testing.assert_allclose(
            product(together, tree(2, shapes))[name],
            product(alone, {name: tree(2, shapes)[name]})[name],
            rtol=1e-9,  # roundoff times the square root of the conditions, at most 1e12
        )


def test_shampoo_refreshes_at_the_first_update_and_at_the_interval() -> None:
    metric = Shampoo(decay=0.5, interval=3, block_size=4)
    state, refreshed = metric.init(tree(0)), []
    for step in range(1, 9):
        old, state = state, _jit(metric, "update")(state, tree(step))
        same = jax.tree.map(np.array_equal, old.roots, state.roots)
        if not all(jax.tree.leaves(same)):
            refreshed.append(step)
    assert refreshed == [1, 4, 7]


def test_shampoo_after_an_undone_step_goes_on_as_if_it_had_not_been() -> None:
    metric = Shampoo(decay=0.5, interval=2, block_size=4)
    good = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.arange(3.0)}
    bad = jax.tree.map(lambda x: 1e8 * x + 1, good)
    state = metric.init(good)
    for _ in range(3):  # the bad step recomputes the roots, or does not
        new = metric.update(state, bad)
        undone = metric.keep_if(jnp.array(False), new, state)
        assert_trees_close(metric.update(undone, good), metric.update(state, good), rtol=0)
        assert_trees_close(metric.keep_if(jnp.array(True), new, state), new, rtol=0)
        state = metric.update(state, good)


def test_shampoo_ridge_stays_out_of_the_statistic(x64: None) -> None:
    metric = Shampoo(decay=0.5, eps=1e-8, interval=1, block_size=4)
    g = tree(1, {"x": (4, 3)})["x"]
    state = metric.init(g)
    expected = 1e-8 * np.eye(3)
    for _ in range(20):
        state = _jit(metric, "update")(state, g)
        expected = 0.5 * expected + 0.5 * np.asarray(g).T @ np.asarray(g)
    np.testing.assert_allclose(state.statistic[1][0], expected, rtol=1e-13)


def test_shampoo_float32_survives_singular_statistics() -> None:
    """Rank one and no memory: the ridge alone bounds A, and A^{1/2} still squares to A."""
    metric = Shampoo(decay=0.0, eps=1e-8, interval=1, block_size=40)
    g = jnp.outer(jnp.arange(1.0, 41.0), jnp.arange(1.0, 31.0)) * 1e-3
    state = _jit(metric, "update")(metric.init(g), g)
    x = jax.random.normal(jax.random.key(0), g.shape)
    once, root = _jit(metric, "apply_inverse")(state, x), _jit(metric, "apply_inverse_sqrt")
    twice = root(state, root(state, x))
    scale = float(np.max(np.abs(once)))
    # Largest eigenvalue of H is |g|^2 on either side; a null direction has 1e-6 of it, so A is at
    # most (1e-6 |g|^2)^(-1/2): |x| times that bounds the result.
    assert scale <= 1e3 / np.linalg.norm(g) * np.linalg.norm(x)
    # Both roots come from the same eigenvectors: single roundoff, sums of 40 terms, two axes.
    np.testing.assert_allclose(twice, once, rtol=0, atol=1e-4 * scale)


def test_shampoo_keeps_a_previous_root_where_the_new_is_not_finite() -> None:
    metric = Shampoo(decay=0.0, interval=1, block_size=3)
    shapes = {"hit": (3, 4), "spared": (3, 3), "vector": (3,)}
    old = run(metric, 1, shapes=shapes)
    grad = tree(5, shapes)
    grad["hit"] = grad["hit"].at[0, 0].set(jnp.nan)
    grad["vector"] = grad["vector"].at[1].set(jnp.inf)
    new = _jit(metric, "update")(old, grad)
    before, after = (jax.tree.map(np.asarray, s.roots) for s in (old, new))
    for k in range(2):  # the roots of A, and of A^{1/2}
        for axis in range(2):
            # (3, 4) has two blocks of (3, 2); the entry that is not a number is in the first.
            np.testing.assert_array_equal(after["hit"][axis][k][0], before["hit"][axis][k][0])
            assert not np.array_equal(after["hit"][axis][k][1], before["hit"][axis][k][1])
            assert not np.array_equal(after["spared"][axis][k], before["spared"][axis][k])
        np.testing.assert_array_equal(after["vector"][0][k], before["vector"][0][k])
    product = _jit(metric, "apply_inverse")(new, tree(6, shapes))
    assert all(np.isfinite(y).all() for y in product.values())

    nothing = jax.tree.map(jnp.zeros_like, grad)  # H = 0 has no inverse root
    assert_trees_close(_jit(metric, "update")(old, nothing).roots, old.roots, rtol=0)


# Limits


def test_monge_without_alpha_is_the_identity() -> None:
    metric, x = Monge(alpha2=0.0), tree(9)
    state = run(metric)
    for name in ("apply_inverse", "apply_inverse_sqrt"):
        jax.tree.map(np.testing.assert_array_equal, _jit(metric, name)(state, x), x)


def _apply_at(metric: Any, name: str, x: Any, statistic: Any) -> Any:
    return getattr(metric, name)(MetricState(statistic), x)


def test_monge_and_rmsprop_are_smooth_where_the_statistic_is_zero(x64: None) -> None:
    x, direction = tree(9), tree(8)
    zero = jax.tree.map(jnp.zeros_like, x)
    for metric, diagonal in ((Monge(alpha2=2.0), 1.0), (RMSprop(eps=0.5), 2.0)):
        for name, exponent in (("apply_inverse", 1.0), ("apply_inverse_sqrt", 0.5)):
            product = functools.partial(_apply_at, metric, name, x)
            value, slope = jax.jit(functools.partial(jax.jvp, product))((zero,), (direction,))
            expected = jax.tree.map(functools.partial(jnp.multiply, diagonal**exponent), x)
            assert_trees_close(value, expected, rtol=1e-15)
            assert_trees_close(slope, zero, rtol=0, atol=0)
            back = jax.jit(jax.grad(lambda v, p=product: tree_vdot(p(v), direction)))(zero)
            assert_trees_close(back, zero, rtol=0, atol=0)
    # Second order at v = 0: the factor of A^{1/2} is -a2/2.
    v = jax.tree.map(lambda d: 1e-5 * d, direction)
    (root,) = dense(Monge(alpha2=2.0), "apply_inverse_sqrt", MetricState(v), x)
    flat = ravel_pytree(v)[0]
    # The next term is 3 a2^2 |v|^2 / 8 times v v', and |v|^2 about 4e-9.
    np.testing.assert_allclose(root - np.eye(len(flat)), -np.outer(flat, flat), rtol=0, atol=1e-15)


def test_monge_bears_large_gradients() -> None:
    v = jnp.array([3e15, 4e15])
    metric = Monge(alpha2=1.0)
    along = metric.apply_inverse_sqrt(MetricState(v), v / 5e15)
    # A^{1/2} v = v / sqrt(1 + v'v): the unit vector becomes 2e-16 of itself, lost in roundoff.
    assert np.abs(along).max() <= 1e-6
    across = jnp.array([0.8, -0.6])
    np.testing.assert_allclose(metric.apply_inverse(MetricState(v), across), across, atol=1e-6)


def test_identity_has_no_state() -> None:
    metric = Identity()
    assert jax.tree.leaves(metric.init(tree(0))) == []
    assert _jit(metric, "update")(metric.init(tree(0)), tree(1)) == metric.init(tree(0))


@pytest.mark.parametrize("name", [k for k in CASES if k not in ("identity", "monge", "monge-auto")])
def test_from_gradient_has_the_expected_statistic_under_noise(name: str, x64: None) -> None:
    """E statistic(V + s xi), exactly: a quadratic is its value plus s^2 times that of each axis."""
    metric, v, s = CASES[name], tree(4), 0.7
    flat, unravel = ravel_pytree(v)
    state = _jit(metric, "from_gradient")(run(metric), v, s)
    of_units = jax.jit(jax.vmap(lambda e: metric.statistic(unravel(e))))(np.eye(flat.size))
    expected = jax.tree.map(
        lambda a, u: a + s**2 * np.sum(u, axis=0), _jit(metric, "statistic")(v), of_units
    )
    assert_trees_close(state.statistic, expected, rtol=1e-13, atol=1e-13)
    # A belongs to that statistic: no memory of what was before.
    again = _jit(metric, "from_gradient")(metric.init(v), v, s)
    x, product = tree(9), _jit(metric, "apply_inverse")
    assert_trees_close(product(state, x), product(again, x), rtol=1e-11, atol=1e-11)
    if isinstance(metric, Shampoo):
        (a,) = dense(metric, "apply_inverse", state, v)
        blocks = state.statistic["b"]
        if metric.vector == "full":
            h = np.asarray(blocks[0][0])
            np.testing.assert_allclose(a[1:4, 1:4], power(h, -0.5, 1e-12), rtol=0, atol=1e-12)


def test_from_gradient_of_monge_is_the_vector() -> None:
    v, metric = tree(4), Monge(alpha2=1.0)
    assert_trees_close(metric.from_gradient(run(metric), v, 3.0).statistic, v, rtol=0)
    flat, metric = ravel_pytree(v)[0], Monge()
    found, square = metric.from_gradient(run(metric), v, 3.0).statistic
    assert_trees_close(found, v, rtol=0)
    np.testing.assert_allclose(square, flat @ flat + 9 * flat.size, rtol=1e-6)


# Objects


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("identity", Identity()),
        ("rmsprop", RMSprop()),
        ("wenzel", Wenzel()),
        ("monge", Monge()),
        ("shampoo", Shampoo()),
    ],
)
def test_get_metric_by_name(name: str, expected: Any) -> None:
    assert get_metric(name) == expected
    assert get_metric(expected) is expected


def test_base_class_needs_the_three_methods() -> None:
    class Half(Metric):
        decay = 0.5

        def statistic(self, grad: Any) -> Any:
            return grad

    with pytest.raises(TypeError, match="apply_inverse"):
        Half()


def test_the_declared_defaults() -> None:
    declared = ("interval", "default_divergence", "scales", "has_auxiliary")
    found = {name: [getattr(metric, d) for d in declared] for name, metric in CASES.items()}
    assert found == {
        "identity": [1, "frozen", False, True],
        "rmsprop": [1, "frozen", True, True],
        "wenzel": [1, "frozen", False, True],
        "monge": [1, "auxiliary", False, True],
        "monge-auto": [1, "frozen", False, True],
        "shampoo": [1, "frozen", True, True],
        "shampoo-full": [1, "frozen", True, True],
    }

    class Own(Metric):
        statistic = apply_inverse = apply_inverse_sqrt = lambda self, *args: args[-1]

    metric = Own()
    assert metric.decay == 0.0
    assert [getattr(metric, d) for d in declared] == [1, "frozen", True, False]
    with pytest.raises(NotImplementedError, match="a method from_gradient, and Own has none"):
        metric.from_gradient(metric.init(jnp.ones(2)), jnp.ones(2), 1.0)


BAD = [
    (lambda: RMSprop(decay=1.0), ValueError, "decay must be .* at least 0 and below 1, got 1.0"),
    (lambda: RMSprop(decay=-0.1), ValueError, "decay must be .* at least 0 and below 1, got -0.1"),
    (lambda: RMSprop(decay=float("nan")), ValueError, "decay must be a finite number"),
    (lambda: RMSprop(decay="0.9"), TypeError, "decay must be a number, got '0.9'"),
    (lambda: RMSprop(eps=0.0), ValueError, "eps must be a finite number above 0, got 0.0"),
    (lambda: RMSprop(eps=None), TypeError, "eps must be a number, got None"),
    (lambda: Wenzel(decay=2), ValueError, "decay must be .* at least 0 and below 1, got 2"),
    (lambda: Wenzel(eps=-1.0), ValueError, "eps must be a finite number above 0"),
    (lambda: Wenzel(interval=0), ValueError, "interval must be an integer of at least 1, got 0"),
    (lambda: Wenzel(interval=2.5), TypeError, "interval must be an integer .* got 2.5"),
    (lambda: Monge(alpha2=-1.0), ValueError, "alpha2 must be a finite number at least 0"),
    (lambda: Monge(alpha2=True), TypeError, "alpha2 must be a number, got True"),
    (lambda: Monge(decay=1.5), ValueError, "decay must be .* at least 0 and below 1, got 1.5"),
    (lambda: Shampoo(decay=1), ValueError, "decay must be .* at least 0 and below 1, got 1"),
    (lambda: Shampoo(eps=float("inf")), ValueError, "eps must be a finite number above 0"),
    (lambda: Shampoo(interval=-3), ValueError, "interval must be an integer of at least 1"),
    (lambda: Shampoo(block_size=0), ValueError, "block_size must be an integer of at least 1"),
    (lambda: Shampoo(block_size=None), TypeError, "block_size must be an integer"),
    (lambda: Shampoo(vector="none"), ValueError, "vector must be one of .*'diagonal'.* got 'none'"),
    (lambda: get_metric("adam"), ValueError, "one of .*'identity', 'monge'.* got 'adam'$"),
    (lambda: get_metric("mongee"), ValueError, "one of .*'monge'.*got 'mongee'"),
    (lambda: get_metric(Monge), TypeError, r"object and not a class: write Monge\(\)"),
    (lambda: get_metric(None), TypeError, "a subclass of Metric, got None of type NoneType"),
    (lambda: get_metric(MetricState(())), TypeError, "a subclass of Metric, got MetricState"),
    (
        lambda: Wenzel().update(Wenzel().init(jnp.ones(2)), jnp.ones(2)),
        ValueError,
        r"Wenzel\(interval=None\) means one epoch",
    ),
    (
        lambda: Shampoo(interval=None).update(Shampoo().init(jnp.ones(2)), jnp.ones(2)),
        ValueError,
        r"Shampoo\(interval=None\) means one epoch",
    ),
]


@pytest.mark.parametrize(("build", "error", "message"), BAD)
def test_bad_arguments(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()
