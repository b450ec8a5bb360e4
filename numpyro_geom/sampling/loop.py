"""The loop over minibatches of every kernel: choose the batch and the key, then take a step.

If model arguments are `HostRows`, the rows of several steps travel at once. While the device takes
these steps, the host gathers the rows of the next steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _random
from .._util import PyTree
from ..model.minibatch import RNG_KEY
from ..model.potential import Potential
from ..rows.host_rows import HostRows, batches_at_once, fetch
from ..rows.reader import NO_ROW, Hint, hints


def loop_over_batches(
    potential: Potential,
    position: PyTree,
    rng_key: jax.Array,
    stream: Any,
    num_steps: int | jax.Array,
    body: Callable[[jax.Array, jax.Array, Any, PyTree], PyTree],
    carry: PyTree,
) -> tuple[Any, PyTree]:
    """``carry = body(k, rng_key, batch, carry)`` for each of the next minibatches.

    ``position`` is one of the model, for its shapes. ``num_steps`` may be traced.

    Returns:
        The advanced stream, and the last carry.
    """
    start = rng_key, stream
    used = _used(potential, position, *start) if potential.on_host else {}
    if used:
        return _in_blocks(potential, used, start, num_steps, body, carry)

    def step(k: jax.Array, old: tuple) -> tuple:
        state, carry = old
        state, (key_step, batch, _) = _next(potential, state)
        return state, body(k, key_step, batch, carry)

    (_, stream), carry = lax.fori_loop(0, num_steps, step, (start, carry))
    return stream, carry


def _next(potential: Potential, state: tuple) -> tuple:
    key, stream = state
    key, key_batch, key_step = _random.split(key, 3)
    batch, stream = potential.draw(key_batch, stream)
    return (key, stream), (key_step, batch, stream)


def _used(potential: Potential, position: PyTree, key: Any, stream: Any) -> dict:
    """The arrays whose rows the model requests, by plate."""
    found: dict[str, list[HostRows]] = {}

    def probe(position: PyTree, key: jax.Array, stream: Any) -> jax.Array:
        _, (_, batch, _) = _next(potential, (key, stream))
        found.update({plate: [] for plate in batch if plate != RNG_KEY})
        known = [Hint(batch[plate], used=used) for plate, used in found.items()]
        with hints(*known):
            return potential.energy(position, batch)

    jax.eval_shape(probe, position, key, stream)
    return {plate: used for plate, used in found.items() if used}


def _in_blocks(
    potential: Potential,
    used: dict[str, list[HostRows]],
    start: tuple,
    num_steps: int | jax.Array,
    body: Callable,
    carry: PyTree,
) -> tuple[Any, PyTree]:
    """The loop, with one call to the host for the rows of several steps."""
    plates = list(used)
    wanted = tuple((x, k) for k, plate in enumerate(plates) for x in used[plate])
    batch = jax.eval_shape(lambda s: _next(potential, s)[1][1], start)
    sizes = {x: batch[plate].size for plate, found in used.items() for x in found}
    length = batches_at_once(sizes)
    if isinstance(num_steps, int):
        length = min(length, num_steps)
    single = isinstance(num_steps, int) and num_steps == length

    def ahead(state: tuple) -> tuple:
        return lax.scan(lambda s, _: _next(potential, s), state, None, length=length)

    def indices(batches: dict, steps: Any) -> tuple:
        """Indices of the block's steps; after the last step, no rows."""
        taken = (jnp.arange(length) < steps)[:, None]
        return tuple(jnp.where(taken, batches[plate], NO_ROW) for plate in plates)

    def block(_: jax.Array, old: tuple) -> tuple:
        done, state, (keys, batches, streams), stream, carry = old
        steps = jnp.minimum(length, num_steps - done)
        coming: Any = (keys, batches, streams)
        then: tuple = ()
        if not single:
            state, coming = ahead(state)
            then = indices(coming[1], num_steps - done - length)
        rows = fetch(wanted, indices(batches, steps), then)

        def step(k: jax.Array, old: tuple) -> tuple:
            key, batch, stream = jax.tree.map(lambda x: x[k], (keys, batches, streams))
            known = [
                Hint(batch[p], {x: r[k] for (x, j), r in zip(wanted, rows, strict=True) if j == n})
                for n, p in enumerate(plates)
            ]
            with hints(*known):
                return stream, body(done + k, key, batch, old[1])

        stream, carry = lax.fori_loop(0, steps, step, (stream, carry))
        return done + steps, state, coming, stream, carry

    state, first = ahead(start)
    old = jnp.zeros((), jnp.int32), state, first, start[1], carry
    *_, stream, carry = lax.fori_loop(0, -(-num_steps // length), block, old)
    return stream, carry
