"""Temporary stand-in for `numpyro_geom.model.model`."""

import dataclasses
from functools import cached_property, partial
from typing import Any

import jax
from jax import random
from numpyro import handlers
from numpyro.infer.util import _unconstrain_reparam, constrain_fn

from ..model import minibatch
from ..model.abstract import abstract_trace
from ..model.arguments import HostArray, on_device, reads_values, split_arrays, without_host
from ..model.plates import read_subsampling
from ..model.potential import model_potential


def read(fn, args=(), kwargs=None, *, batch_size=None, batching="replacement", sums=True):
    args, kwargs = on_device(args, kwargs)
    plan = read_subsampling(fn, args, kwargs, batch_size, batching, sums=sums)
    return Model(fn, args, kwargs, plan)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    fn: Any
    args: tuple
    kwargs: dict
    plan: Any
    fixed: Any = dataclasses.field(default_factory=dict)

    @property
    def runnable(self):
        return handlers.substitute(self.fn, data=self.fixed) if self.fixed else self.fn

    def of_kind(self, *kinds):
        kind = lambda s: "latent" if not s.observed else "factor" if s.factor else "observed"
        return [s.name for s in self.plan.sites if kind(s) in kinds]

    def replace(self, **values):
        return dataclasses.replace(self, **values)

    @cached_property
    def _inputs(self):
        given = self.args, self.kwargs
        run = lambda args, kwargs: abstract_trace(self.runnable, args, kwargs, {})
        return split_arrays(given if reads_values(run, *given) else without_host(given))

    @property
    def arrays(self):
        return self._inputs[0]

    def with_arrays(self, arrays):
        args, kwargs = self._inputs[1](arrays)
        return self.replace(args=args, kwargs=kwargs)

    @cached_property
    def signature(self):
        leaves, treedef = jax.tree.flatten(self._inputs[1](self.arrays))
        told = [
            (x.shape, str(x.dtype), isinstance(x, HostArray) and x.tobytes())
            if isinstance(x, (jax.Array, HostArray))
            else repr(x)
            for x in leaves
        ]
        return f"{treedef}{told}{self.plan}"

    def trace(self, values, rows=None, *, unconstrained=False, rng_key=None, redraw=False):
        rows = {} if rows is None else rows
        fn = self.runnable if rng_key is None else handlers.seed(self.runnable, rng_key)
        values = minibatch.gather_local(self.plan, dict(values), rows)
        fn = handlers.substitute(fn, substitute_fn=partial(_unconstrain_reparam, values))
        run = minibatch.SubsamplePlates(fn, rows, self.plan.sizes)
        return handlers.trace(run).get_trace(*self.args, **self.kwargs)

    @property
    def _potential(self):
        return model_potential(self.runnable, self.plan, self.args, self.kwargs)

    def energy(self, position, rows=None):
        return self._potential.energy(position, {} if rows is None else rows)

    def sum_over_rows(self, fn):
        return self._potential.on_all_rows(fn)

    @cached_property
    def replay(self):
        seeded = handlers.seed(minibatch.SubsamplePlates(self.runnable), random.key(0))
        return lambda x: constrain_fn(seeded, self.args, self.kwargs, x, return_deterministic=True)
