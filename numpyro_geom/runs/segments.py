"""What to run, how it is cut into segments, and the one compiled program of all segments.

Warm-up, full segments and a shorter last segment differ in two counts that are inputs of the
program, so it is compiled once. The chain does not depend on where a segment ends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct, lax, random
from jax.extend.core import ClosedJaxpr
from numpyro.infer import MCMC
from numpyro.util import is_prng_key, nested_attrgetter

from .._numpyro import fields_of, traces_arguments
from .._util import PyTree, is_key, num_at_once, tree_size
from ..model.arguments import split_arrays
from ..model.jaxprs import lean_options
from ..model.start import check_batch
from .mesh import DeviceLayout


class Job(NamedTuple):
    """What to run, with the arguments of ``mcmc.run``.

    Attributes:
        mcmc: kernel, lengths and chains.
        rng_key: a key, or one for each chain.
        args: the model's arguments.
        kwargs: its keyword arguments.
        extra_fields: further fields of the state to keep, besides the fields that the kernel names.
        init_params: where the chains start, or None.
    """

    mcmc: MCMC
    rng_key: jax.Array
    args: tuple = ()
    kwargs: dict[str, Any] = {}
    extra_fields: tuple[str, ...] = ()
    init_params: PyTree = None

    @property
    def num_draws(self) -> int:
        """Number of draws to keep of each chain."""
        return self.mcmc.num_samples // self.mcmc.thinning


class Lengths(NamedTuple):
    """How a run is cut into segments; warm-up comes first.

    Attributes:
        num_warmup: steps of warm-up, calls of ``kernel.sample``.
        num_draws: number of draws to keep of each chain.
        thinning: steps per draw.
        length: draws per segment, at most.
    """

    num_warmup: int
    num_draws: int
    thinning: int
    length: int

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return self.num_warmup + self.num_draws * self.thinning

    def draws(self, step: int) -> int:
        """Number of draws of each chain after so many steps."""
        return max(0, step - self.num_warmup) // self.thinning

    def end(self, step: int) -> int:
        """Where the segment ends that begins after so many steps."""
        last = self.num_warmup if step < self.num_warmup else self.steps
        return min(step + self.length * self.thinning, last)


class Segments:
    """The chains of an MCMC at their start, and the program that advances them.

    The MCMC is not changed, except for what ``init`` sets in its kernel. A segment has ``length``
    draws; None for up to 1,000 draws and 8 million numbers.

    Attributes:
        job: what to run.
        layout: the placement of arrays.
        start: the state before the first step, with a leading axis of chains if there are
            several.
        shapes: shapes of a segment's draws, by field of the state: (chains, length, ...).
        lengths: how the run is cut into segments.
        program: function of ``(state, draws, steps, arrays)`` that returns the state after
            ``draws`` draws, and the draws.
        arrays: the model's arguments that are inputs of the program.
    """

    def __init__(self, job: Job, length: int | None, layout: DeviceLayout | None = None) -> None:
        self.job, mcmc = job, job.mcmc
        self.layout = layout = DeviceLayout() if layout is None else layout
        data = layout.arguments(getattr(mcmc.sampler, "model", None), (job.args, job.kwargs))
        self._given = data
        self.arrays: Any = ()
        self._data: Callable[[Any], tuple] = lambda _: data
        if layout.mesh is not None or layout.abstract:
            self.arrays, self._data = split_arrays(data)
        elif traces_arguments(mcmc):  # otherwise they are part of the program, as in MCMC
            self.arrays, self._data = data, lambda arrays: arrays
        self.fields, self._removed = fields_of(mcmc, job.extra_fields)
        self.together = mcmc.num_chains == 1 or mcmc.chain_method == "vectorized"
        self.start = layout.start(mcmc.sampler, self._init, job.rng_key, job.init_params, data)
        one = self.start if self.together else _take(self.start, 0)
        # a kernel keeps values derived from arrays, and these should not outlive the run
        draw = jax.eval_shape(
            lambda x, arrays: self._collect(x, self._data(arrays)), one, self.arrays
        )
        chains = 1 if self.together else mcmc.num_chains
        here = layout.mesh is None and not layout.abstract
        if here and self.together and mcmc.num_chains > 1 and mcmc.postprocess_fn is not None:
            sizes = [tree_size(draw[self.fields[0]]) // mcmc.num_chains]
            z = nested_attrgetter(self.fields[0])(self.start)
            check_batch("postprocess_fn", (mcmc.postprocess_fn,), z, sizes)
        if length is None:
            size = chains * tree_size(draw)
            length = min(1000, job.num_draws, num_at_once(size))
        self.lengths = Lengths(mcmc.num_warmup, job.num_draws, mcmc.thinning, length)
        shapes = jax.eval_shape(self._by_chain, self._on_axis(draw))
        if not self.together:
            shapes = jax.tree.map(lambda x: ShapeDtypeStruct((chains, *x.shape), x.dtype), shapes)
        # JAX sorts the entries of a dict
        self.shapes = {name: shapes[name] for name in self.fields}
        options: dict[str, Any] = {"compiler_options": lean_options()}
        if layout.mesh is not None:  # the states of the chains, and the draws
            options["out_shardings"] = layout.shardings(self.start), layout.at()
        self.program = jax.jit(self._segment, **options)
        self._parallel = jax.pmap(self._segment, in_axes=(0, None, None, None))
        self._mapped: dict[tuple[int, int], Callable] = {}

    @property
    def no_draws(self) -> dict[str, PyTree]:
        """The draws of a run that has none yet."""
        return jax.tree.map(lambda x: np.zeros((x.shape[0], 0, *x.shape[2:]), x.dtype), self.shapes)

    def traced(self) -> ClosedJaxpr:
        """The program of one or all chains; without a mesh, `advance` does not trace it again."""
        one = self.start if self.together else _take(self.start, 0)
        count = ShapeDtypeStruct((), jnp.int32)
        # JAX's debugging options add operations to a program
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            return self.program.trace(one, count, count, self.arrays).jaxpr

    def do(self, step: int, state: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
        """`advance` by the segment that begins after so many steps; only its draws are left."""
        end, (_, _, thinning, _) = self.lengths.end(step), self.lengths
        draws = self.lengths.draws(end) - self.lengths.draws(step)
        if draws:
            state, values = self.advance(state, draws, thinning)
        else:  # warm-up
            state, values = self.advance(state, 1, end - step)
        return state, jax.tree.map(lambda x: x[:, :draws], values)

    def advance(self, state: PyTree, draws: int, steps: int) -> tuple[PyTree, dict[str, PyTree]]:
        """Advance the chains by ``draws`` draws of ``steps`` calls of ``kernel.sample`` each.

        Returns:
            The state after them; and by field of the state NumPy arrays of shape
            (chains, length, ...), zero beyond the last draw.
        """
        method, num_chains = self.job.mcmc.chain_method, self.job.mcmc.num_chains
        given = jnp.asarray(draws, jnp.int32), jnp.asarray(steps, jnp.int32), self.arrays
        if self.together:
            state, values = self.program(self.layout.place(state), *given)
            state = self.layout.visible(state)
        elif method == "sequential":
            found = []
            for chain in range(num_chains):
                one, values = self.program(_take(state, chain), *given)
                found.append((one, jax.device_get(values)))
            state = _stack(*(one for one, _ in found))
            values = jax.tree.map(lambda *x: np.stack(x), *(values for _, values in found))
        elif method == "parallel":
            state, values = self._parallel(state, *given)
        else:
            if (draws, steps) not in self._mapped:
                self._mapped[draws, steps] = method(lambda one: self.program(one, *given))
            state, values = self._mapped[draws, steps](state)
        values = jax.device_get(values)
        self.layout.check_read(self._given)
        return state, self._by_chain(values)

    def _init(self, rng_key: jax.Array, init_params: PyTree, data: tuple) -> PyTree:
        """The start of all chains, with the same keys as in ``mcmc.run``."""
        mcmc, (args, kwargs) = self.job.mcmc, data
        init_params = jax.tree.map(
            lambda x: lax.convert_element_type(x, jnp.result_type(x)), init_params
        )
        if mcmc.num_chains > 1 and is_prng_key(rng_key):
            rng_key = random.split(rng_key, mcmc.num_chains)
        init = partial(mcmc.sampler.init, model_args=args, model_kwargs=kwargs)
        if self.together:
            return _strong(init(rng_key, mcmc.num_warmup, init_params))
        starts = [
            None if init_params is None else _take(init_params, k) for k in range(mcmc.num_chains)
        ]
        states = [init(rng_key[k], mcmc.num_warmup, start) for k, start in enumerate(starts)]
        return _strong(_stack(*states))

    def _collect(self, state: PyTree, data: tuple) -> dict[str, PyTree]:
        """The fields of a state to keep; the draw is in the model's own space."""
        mcmc = self.job.mcmc
        found = nested_attrgetter(*self.fields)(state)
        found = (found,) if len(self.fields) == 1 else found
        values = dict(zip(self.fields, found, strict=True))
        transform = mcmc.postprocess_fn
        if transform is None:
            transform = mcmc.sampler.postprocess_fn(*data)
        if self.together and mcmc.num_chains > 1:
            transform = jax.vmap(transform, axis_size=mcmc.num_chains)
        draw = transform(values[self.fields[0]])
        if self._removed:
            draw = {name: x for name, x in draw.items() if name not in self._removed}
        values[self.fields[0]] = draw
        return values

    def _segment(self, state: PyTree, draws: jax.Array, steps: jax.Array, arrays: Any) -> PyTree:
        args, kwargs = data = self._data(arrays)
        sample = self.job.mcmc.sampler.sample

        def draw(k: jax.Array, carry: tuple) -> tuple:
            state, kept = carry
            state = lax.fori_loop(0, steps, lambda _, state: sample(state, args, kwargs), state)
            put = partial(lax.dynamic_update_index_in_dim, index=k, axis=0)
            return state, jax.tree.map(put, kept, self._collect(state, data))

        shapes = self._on_axis(jax.eval_shape(partial(self._collect, data=data), state))
        kept = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.fori_loop(0, draws, draw, (state, self.layout.draws(kept)))

    def _on_axis(self, draw: PyTree) -> PyTree:
        """Shapes of a segment, from the shapes of one draw."""
        return jax.tree.map(
            lambda x: ShapeDtypeStruct((self.lengths.length, *x.shape), x.dtype), draw
        )

    def _by_chain(self, values: PyTree) -> PyTree:
        """Arrays with chains on the first axis and draws on the second."""
        if not self.together:
            return values
        if self.job.mcmc.num_chains == 1:
            return jax.tree.map(lambda x: x[np.newaxis], values)
        return jax.tree.map(lambda x: x.swapaxes(0, 1), values)


def without_mesh(job: Job, length: int | None) -> Segments:
    """The segments of a run on a mesh, as on one device; nothing is computed."""
    mcmc = copy.copy(job.mcmc)
    mcmc.sampler = copy.copy(mcmc.sampler)  # init changes the kernel
    return Segments(job._replace(mcmc=mcmc), length, DeviceLayout(abstract=True))


def _strong(state: PyTree) -> PyTree:
    """The state without weak types, which a checkpoint would lose, so that nothing recompiles."""
    return jax.tree.map(
        lambda x: (
            x if is_key(jnp.asarray(x)) else lax.convert_element_type(x, jnp.asarray(x).dtype)
        ),
        state,
    )


@jax.jit
def _stack(*states: PyTree) -> PyTree:
    return jax.tree.map(lambda *x: jnp.stack(x), *states)


@jax.jit
def _take(states: PyTree, chain: int) -> PyTree:
    return jax.tree.map(lambda x: x[chain], states)
