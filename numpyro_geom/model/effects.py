"""Effects of a model besides its density: it asks for random keys, or changes a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from jax.extend.core import Jaxpr
from numpyro.infer.util import log_density
from numpyro.primitives import Messenger

from .jaxprs import followed, needed
from .minibatch import RNG_KEY, SubsamplePlates


class Effects(NamedTuple):
    """Effects of a model.

    Attributes:
        is_random: whether its energy depends on keys that it asks for (``numpyro.prng_key``).
        changed: names of ``mutable`` sites that it changes, such as batch statistics.
        idle: names of ``param`` sites whose values affect neither the energy nor a deterministic
            site: for example initial weights of a module, when sampled weights replace them.
    """

    is_random: bool = False
    changed: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()


class States(Messenger):
    """Records the ``mutable`` sites of a run: name -> the value, and its leaves before the run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[Any, list]] = {}

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Store the value of a state when the model gets it."""
        if msg["type"] == "mutable":
            self.found[msg["name"]] = msg["value"], jax.tree.leaves(msg["value"])


def effects_of(model: Callable, args: tuple, kwargs: dict, trace: Mapping[str, Any]) -> Effects:
    """Find the effects in the model's program, without computing anything.

    A key counts only if the energy depends on it: modules draw initial weights with a key.

    ``trace`` is the model's, with values or their shapes.
    """
    kept = ("param", "mutable")
    values = {
        name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), value)
        for name, site in trace.items()
        if (value := site["value"]) is not None
        and (site["type"] in kept or (site["type"] == "sample" and not site["is_observed"]))
    }
    names: list[str] = []

    def run(key: jax.Array, values: dict[str, Any]) -> tuple:
        states = States()
        with states:
            seen = SubsamplePlates(model, {RNG_KEY: key})
            density, sites = log_density(seen, args, kwargs, values)
        names.extend(states.found)
        told = [s["value"] for s in sites.values() if s["type"] == "deterministic"]
        told = [x for x in jax.tree.leaves(told) if isinstance(x, jax.Array)]
        pairs = [(old, jax.tree.leaves(new)) for new, old in states.found.values()]
        return density, pairs, told

    program, shapes = jax.make_jaxpr(run, return_shape=True)(random.key(0), values)
    jaxpr = program.jaxpr
    structure = jax.tree.structure(shapes)
    on_key = [True] + [False] * (len(jaxpr.invars) - 1)
    on_key = followed(jaxpr, on_key, lambda e, _: [True] * len(e.outvars), False)
    density, states, told = jax.tree.unflatten(structure, jaxpr.outvars)
    sources = _sources(jaxpr)
    changed = tuple(
        name
        for name, (old, new) in zip(names, states, strict=True)
        if [sources.get(id(x), x) for x in new] != old
    )
    _, used = needed(jaxpr, (density, *told, *jax.tree.leaves(states)))
    inputs = jax.tree.unflatten(jax.tree.structure(values), jaxpr.invars[1:])
    idle = tuple(
        name
        for name, leaves in inputs.items()
        if trace[name]["type"] == "param" and used.isdisjoint(jax.tree.leaves(leaves))
    )
    return Effects(jax.tree.unflatten(structure, on_key)[0], changed, idle)


def _sources(jaxpr: Jaxpr) -> dict[int, Any]:
    """For variables that are only other names of a source, that source, by identity."""
    found: dict[int, Any] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "stop_gradient":
            (x,), (y,) = equation.invars, equation.outvars
            found[id(y)] = found.get(id(x), x)
    return found
