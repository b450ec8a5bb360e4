"""Directional derivatives, for functions without some of JAX's derivatives too.

`jvp` and `linearize` are JAX's where forward mode exists. A solver of differential equations
(``jax.experimental.ode.odeint``, diffrax with its default adjoint) or a ``jax.custom_vjp`` has no
forward mode. There the product J t is taken in reverse mode twice: J't is linear in t, and J is the
transpose of that map. Where neither exists, as for the gradient of an incomplete gamma function in
its parameter or of a callback, central differences are used. Their relative error is about
eps^(2/3), which is 2e-5 in float32, where the function has no other rounding error.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from .._util import PyTree
from .jaxprs import inner


def linearize(fn: Callable[[PyTree], PyTree], position: PyTree) -> tuple[PyTree, Callable]:
    """``fn(position)``, and the map from a direction t to J t, as `jax.linearize`."""
    try:
        value, push = jax.linearize(fn, position)
    except Exception:  # a rule that is missing can raise anything
        return _by_differences(fn, position)
    jaxpr = jax.make_jaxpr(push)(position).jaxpr
    if _has_placeholder(jaxpr):
        return _by_reverse_mode(fn, position)
    if _has(jaxpr, "scan"):
        # in a linearised loop XLA does not see which arrays are zero, and adds all of their entries
        # in each turn: 100 times slower for a series of 2,000 times
        return value, lambda t: jvp(fn, position, t)[1]
    return value, push


def jvp(fn: Callable[[PyTree], PyTree], position: PyTree, direction: PyTree) -> tuple:
    """``fn(position)`` and J t for one direction t, as `jax.jvp`."""

    def both(x: PyTree, t: PyTree) -> tuple:
        return jax.jvp(fn, (x,), (t,))

    try:
        traced, shape = jax.make_jaxpr(both, return_shape=True)(position, direction)
    except Exception:  # a rule that is missing can raise anything
        value, push = _by_differences(fn, position)
        return value, push(direction)
    if _has_placeholder(traced.jaxpr):
        value, push = _by_reverse_mode(fn, position)
        return value, push(direction)
    leaves = jax.tree.leaves((position, direction))
    found = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *leaves)
    return jax.tree.unflatten(jax.tree.structure(shape), found)


def has_forward_mode(fn: Callable[[PyTree], PyTree], position: PyTree) -> bool:
    """Whether JAX can compile forward-mode derivatives of ``fn``; nothing is computed."""
    try:
        traced = jax.make_jaxpr(lambda x: jax.jvp(fn, (x,), (x,)))(position)
    except Exception:  # a rule that is missing can raise anything
        return False
    return not _has_placeholder(traced.jaxpr)


def _has_placeholder(jaxpr: Jaxpr) -> bool:
    """Whether there is JAX's equation for the missing forward rule of a ``custom_vjp``.

    JAX complains of it when the program is lowered, and not when it is traced.
    """
    return _has(jaxpr, "custom_lin")


def _has(jaxpr: Jaxpr, name: str) -> bool:
    """Whether an operation occurs in a program."""
    return any(e.primitive.name == name or any(_has(x, name) for x in inner(e)) for e in jaxpr.eqns)


def _by_reverse_mode(fn: Callable, position: PyTree) -> tuple[PyTree, Callable]:
    value, pull = jax.vjp(fn, position)
    zeros = jax.tree.map(jnp.zeros_like, value)

    def twice(t: PyTree) -> PyTree:
        return jax.vjp(lambda u: pull(u)[0], zeros)[1](t)[0]

    try:
        jax.eval_shape(twice, position)
        product = twice
    except Exception:  # a rule of the user's can raise anything
        product = lambda t: _central_difference(fn, position, t)  # noqa: E731

    @jax.custom_vjp
    def push(t: PyTree) -> PyTree:
        return product(t)

    push.defvjp(lambda t: (product(t), None), lambda _, u: pull(u))
    return value, push


def _by_differences(fn: Callable, position: PyTree) -> tuple[PyTree, Callable]:
    """If ``fn`` itself is wrong, this raises its own error."""
    return fn(position), lambda t: _central_difference(fn, position, t)


def _central_difference(fn: Callable, position: PyTree, t: PyTree) -> PyTree:
    """No entry x moves by more than eps^(1/3) max(1, |x|)."""
    leaves = jax.tree.leaves((position, t))
    eps = jnp.finfo(jnp.result_type(*leaves)).eps
    ratios = jax.tree.map(
        lambda x, v: jnp.min(
            jnp.where(v == 0, jnp.inf, jnp.maximum(jnp.abs(x), 1) / jnp.abs(v)), initial=jnp.inf
        ),
        position,
        t,
    )
    nearest = jnp.min(jnp.stack(jax.tree.leaves(ratios)))
    step = jnp.where(jnp.isfinite(nearest), eps ** (1 / 3) * nearest, 1)
    ahead, behind = (
        fn(jax.tree.map(lambda x, v, h=h: x + (h * v).astype(x.dtype), position, t))
        for h in (step, -step)
    )
    return jax.tree.map(lambda a, b: ((a - b) / (2 * step)).astype(a.dtype), ahead, behind)
