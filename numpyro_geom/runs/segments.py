"""One compiled program that takes a chain through any number of draws.

Warm-up, full segments and a shorter last one differ in two counts that the program is given at
run time, so it is compiled once. What it does to a chain does not depend on where a segment ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro.infer import MCMC
from numpyro.util import is_prng_key, nested_attrgetter

PyTree = Any
MAX_SEGMENT_BYTES = 2**25
"""Draws of a segment, all chains, when its length is not given."""
MAX_SEGMENT_DRAWS = 1000


class Segments:
    """The chains of an MCMC at their start, and how they move.

    Args:
        mcmc: kernel, number of chains, warm-up, how chains are run. It is not changed, apart
            from what ``init`` sets in its kernel.
        rng_key: as for ``mcmc.run``.
        args: the model's arguments.
        kwargs: its keyword arguments.
        extra_fields: as for ``mcmc.run``.
        init_params: as for ``mcmc.run``.
        length: draws a segment; None for up to 1,000 and 32 MiB.

    Attributes:
        start: the state before the first step, with a leading axis of chains if there are
            several.
        shapes: of a segment's draws, by field of the state: (chains, length, ...).
        length: draws a segment.
    """

    def __init__(
        self,
        mcmc: MCMC,
        rng_key: jax.Array,
        args: tuple,
        kwargs: dict[str, Any],
        extra_fields: tuple[str, ...],
        init_params: PyTree,
        length: int | None,
    ) -> None:
        self.mcmc = mcmc
        self.data = (args, kwargs)
        self.fields, self.removed = _fields(mcmc, extra_fields)
        self.together = mcmc.num_chains == 1 or mcmc.chain_method == "vectorized"
        self.start = _strong(self._init(rng_key, init_params))
        one = self.start if self.together else _take(self.start, 0)
        draw = jax.eval_shape(partial(self._collect, data=self.data), one)
        chains = 1 if self.together else mcmc.num_chains
        size = chains * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(draw))
        if length is None:
            num_draws = mcmc.num_samples // mcmc.thinning
            length = min(MAX_SEGMENT_DRAWS, num_draws, max(1, MAX_SEGMENT_BYTES // max(1, size)))
        self.length = length
        self.shapes = jax.eval_shape(self._by_chain, self._on_axis(draw))
        if not self.together:
            self.shapes = _widened(self.shapes, chains)
        # JAX sorts the entries of a dict
        self.shapes = {name: self.shapes[name] for name in self.fields}
        # arguments are part of the program unless asked otherwise, as in MCMC
        self._traced = self.data if mcmc._jit_model_args else None
        self._run = jax.jit(self._segment)
        self._parallel = jax.pmap(self._segment, in_axes=(0, None, None, None))
        self._mapped: dict[tuple[int, int], Callable] = {}

    def advance(self, state: PyTree, draws: int, steps: int) -> tuple[PyTree, dict[str, PyTree]]:
        """Take the chains through so many draws of so many calls of ``kernel.sample`` each.

        Returns:
            The state after them; and by field of the state NumPy arrays of shape
            (chains, length, ...), zero beyond the last draw.
        """
        method = self.mcmc.chain_method
        counts = jnp.asarray(draws, jnp.int32), jnp.asarray(steps, jnp.int32)
        if self.together:
            state, values = self._run(state, *counts, self._traced)
        elif method == "sequential":
            found = []
            for chain in range(self.mcmc.num_chains):
                one, values = self._run(_take(state, chain), *counts, self._traced)
                found.append((one, jax.device_get(values)))
            state = _stack(*(one for one, _ in found))
            values = jax.tree.map(lambda *x: np.stack(x), *(values for _, values in found))
        elif method == "parallel":
            state, values = self._parallel(state, *counts, self._traced)
        else:
            if (draws, steps) not in self._mapped:
                self._mapped[draws, steps] = method(
                    lambda one: self._run(one, *counts, self._traced)
                )
            state, values = self._mapped[draws, steps](state)
        return state, self._by_chain(jax.device_get(values))

    def _init(self, rng_key: jax.Array, init_params: PyTree) -> PyTree:
        """The start of all chains, with the keys that ``mcmc.run`` would use."""
        mcmc, (args, kwargs) = self.mcmc, self.data
        init_params = jax.tree.map(
            lambda x: lax.convert_element_type(x, jnp.result_type(x)), init_params
        )
        if mcmc.num_chains > 1 and is_prng_key(rng_key):
            rng_key = random.split(rng_key, mcmc.num_chains)
        init = partial(mcmc.sampler.init, model_args=args, model_kwargs=kwargs)
        if self.together:
            return init(rng_key, mcmc.num_warmup, init_params)
        states = [
            init(
                rng_key[k], mcmc.num_warmup, None if init_params is None else _take(init_params, k)
            )
            for k in range(mcmc.num_chains)
        ]
        return _stack(*states)

    def _collect(self, state: PyTree, data: tuple) -> dict[str, PyTree]:
        """What is kept of a state, by field; the draw in the model's own space."""
        mcmc = self.mcmc
        values = dict(zip(self.fields, _attributes(state, self.fields), strict=True))
        transform = mcmc.postprocess_fn
        if transform is None:
            transform = mcmc.sampler.postprocess_fn(*data)
        draw = values[self.fields[0]]
        if self.together and mcmc.num_chains > 1:
            mapped = jax.vmap(transform, axis_size=mcmc.num_chains)
            draw = (
                mapped(draw)
                if jax.tree.leaves(draw)
                else jax.vmap(lambda _: transform(draw))(jnp.arange(mcmc.num_chains))
            )
        else:
            draw = transform(draw)
        if self.removed:
            draw = {name: x for name, x in draw.items() if name not in self.removed}
        values[self.fields[0]] = draw
        return values

    def _segment(self, state: PyTree, draws: jax.Array, steps: jax.Array, data: Any) -> PyTree:
        args, kwargs = data = self.data if data is None else data
        sample = self.mcmc.sampler.sample

        def draw(k: jax.Array, carry: tuple) -> tuple:
            state, kept = carry
            state = lax.fori_loop(0, steps, lambda _, state: sample(state, args, kwargs), state)
            put = partial(lax.dynamic_update_index_in_dim, index=k, axis=0)
            return state, jax.tree.map(put, kept, self._collect(state, data))

        shapes = self._on_axis(jax.eval_shape(partial(self._collect, data=data), state))
        kept = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.fori_loop(0, draws, draw, (state, kept))

    def _on_axis(self, draw: PyTree) -> PyTree:
        """Shapes of a segment given those of a draw."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.length, *x.shape), x.dtype), draw)

    def _by_chain(self, values: PyTree) -> PyTree:
        """Chains on the first axis, draws on the second."""
        if not self.together:
            return values
        if self.mcmc.num_chains == 1:
            return jax.tree.map(lambda x: x[np.newaxis], values)
        return jax.tree.map(lambda x: x.swapaxes(0, 1), values)


def _widened(shapes: PyTree, chains: int) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((chains, *x.shape), x.dtype), shapes)


def _fields(mcmc: MCMC, extra_fields: tuple[str, ...]) -> tuple[tuple[str, ...], set[str]]:
    """Fields of the state to keep, the draw first; and sites of the draw to leave out."""
    field = mcmc._sample_field
    asked = (field, *mcmc._default_fields, *extra_fields)
    removed = {name.removeprefix(f"~{field}.") for name in asked if name.startswith(f"~{field}.")}
    return tuple(dict.fromkeys(name for name in asked if not name.startswith("~"))), removed


def _attributes(state: PyTree, fields: tuple[str, ...]) -> tuple:
    found = nested_attrgetter(*fields)(state)
    return (found,) if len(fields) == 1 else tuple(found)


def _strong(state: PyTree) -> PyTree:
    """Without weak types, which a checkpoint would lose and the program be compiled anew for."""
    return jax.tree.map(
        lambda x: (
            x
            if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.extended)
            else lax.convert_element_type(x, jnp.asarray(x).dtype)
        ),
        state,
    )


@jax.jit
def _stack(*states: PyTree) -> PyTree:
    return jax.tree.map(lambda *x: jnp.stack(x), *states)


@jax.jit
def _take(states: PyTree, chain: int) -> PyTree:
    return jax.tree.map(lambda x: x[chain], states)
