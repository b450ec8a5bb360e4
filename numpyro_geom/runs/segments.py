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

from .mesh import Layout

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
        layout: where arrays are, on a mesh of devices; None for one device.

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
        layout: Layout | None = None,
    ) -> None:
        self.mcmc = mcmc
        self.layout = layout
        self.data: tuple = (args, kwargs)
        if layout is not None:
            self.data = layout.arguments(getattr(mcmc.sampler, "model", None), self.data)
            arrays, fill = _arrays(self.data)
        self.fields, self.removed = _fields(mcmc, extra_fields)
        self.together = mcmc.num_chains == 1 or mcmc.chain_method == "vectorized"
        if layout is None:
            self.start = _strong(self._init(rng_key, init_params, self.data))
        else:
            self.start = self._init_on_mesh(layout, rng_key, init_params, arrays, fill)
        one = self.start if self.together else _take(self.start, 0)
        if layout is None:
            draw = jax.eval_shape(partial(self._collect, data=self.data), one)
        else:  # a kernel keeps what it derives from arrays, and these should not outlive the run
            draw = jax.eval_shape(lambda x, arrays: self._collect(x, fill(arrays)), one, arrays)
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
        self._traced: Any = self.data if mcmc._jit_model_args else None
        self._run = jax.jit(self._segment)
        if layout is not None:
            self._traced = arrays
            self._run = jax.jit(
                lambda state, draws, steps, arrays: self._segment(
                    state, draws, steps, fill(arrays)
                ),
                out_shardings=(layout.shardings(self.start), layout.replicated),
            )
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
        if self.layout is not None:
            state, values = self._run(self.layout.place(state), *counts, self._traced)
            state = self.layout.visible(state)
        elif self.together:
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

    def _init(self, rng_key: jax.Array, init_params: PyTree, data: tuple) -> PyTree:
        """The start of all chains, with the keys that ``mcmc.run`` would use."""
        mcmc, (args, kwargs) = self.mcmc, data
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

    def _init_on_mesh(
        self,
        layout: Layout,
        rng_key: jax.Array,
        init_params: PyTree,
        arrays: list,
        fill: Callable[[list], tuple],
    ) -> PyTree:
        """The same, compiled: several processes can only do together what is one program."""
        init = jax.jit(
            lambda rng_key, init_params, arrays: self._init(rng_key, init_params, fill(arrays)),
            out_shardings=layout.replicated,
        )
        state = layout.visible(_strong(init(rng_key, init_params, arrays)))
        kept = jax.tree.leaves(getattr(self.mcmc.sampler, "fixed", None))
        if any(isinstance(x, jax.core.Tracer) for x in kept):
            raise ValueError(
                "`param` or `mutable` sites of the model begin with values that depend on the "
                "data, which a mesh cannot do: expected values that do not, or a run without mesh"
            )
        energy = getattr(state, "potential_energy", 0.0)
        if not np.all(np.isfinite(energy)):
            raise ValueError(
                f"the energy is not finite where the chain starts (potential energy {energy}): "
                "pass other `init_params` or another `init_strategy`"
            )
        return state

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
        if self.layout is not None:
            kept = self.layout.draws(kept, axis=1)
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


def _arrays(data: tuple) -> tuple[list, Callable[[list], tuple]]:
    """The arrays among the arguments, and a function that puts others in their places."""
    leaves, structure = jax.tree.flatten(data)
    places = [k for k, x in enumerate(leaves) if isinstance(x, jax.Array)]

    def fill(arrays: list) -> tuple:
        filled = list(leaves)
        for k, x in zip(places, arrays, strict=True):
            filled[k] = x
        return jax.tree.unflatten(structure, filled)

    return [leaves[k] for k in places], fill


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
