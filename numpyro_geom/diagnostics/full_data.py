"""A model on all rows, whatever the sampler subsampled: its sites, plates and observed values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro import handlers
from numpyro.distributions import Unit
from numpyro.infer import init_to_uniform

from ..target.minibatch import SubsamplePlates
from ..target.plates import abstract_trace
from .arrays import Arrays, host, is_numeric

LARGE_ARRAY = 10**4
"""Entries from which an argument of the model is passed to compiled code."""


class SiteLayout(NamedTuple):
    """A sample or deterministic site, all rows: what it is and what its axes mean."""

    kind: str  # latent, observed, factor or deterministic
    shape: tuple[int, ...]
    plates: tuple[tuple[str, int], ...]  # name and (negative) batch dimension
    batch_shape: tuple[int, ...]
    event_dim: int
    event_names: tuple[str, ...]


class FullDataModel(NamedTuple):
    """A model with its arguments, `param` sites fixed, and its sites.

    Compiled code copies the arrays that it closes over, so large ones are passed to it.
    """

    fn: Callable
    leaves: list[Any]  # of the arguments
    structure: Any
    passed: list[int]  # which of the leaves are large arrays
    sites: dict[str, SiteLayout]
    sizes: dict[str, int]

    @property
    def arrays(self) -> list[jax.Array]:
        """The large arrays among the arguments."""
        return [self.leaves[k] for k in self.passed]

    def arguments(self, arrays: Sequence[jax.Array] | None = None) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments, with these large arrays in place of its own."""
        leaves = list(self.leaves)
        for k, x in zip(self.passed, self.arrays if arrays is None else arrays, strict=True):
            leaves[k] = x
        return jax.tree.unflatten(self.structure, leaves)

    def of_kind(self, *kinds: str) -> list[str]:
        """Names of the sites of these kinds."""
        return [name for name, site in self.sites.items() if site.kind in kinds]

    def trace(
        self, fn: Callable, arrays: Sequence[jax.Array], indices: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run ``fn``, the model within handlers, on these large arrays and rows."""
        args, kwargs = self.arguments(arrays)
        return handlers.trace(SubsamplePlates(fn, indices)).get_trace(*args, **kwargs)


def read_model(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> FullDataModel:
    """The model's sites and plates, without computing anything."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    trace, declared = abstract_trace(fn, args, kwargs, {})
    sites = {
        name: _site(site)
        for name, site in trace.items()
        if site["type"] in ("sample", "deterministic")
    }
    sizes = {name: size for name, (size, _) in declared.items()}
    passed = [k for k, x in enumerate(leaves) if is_numeric(x) and x.size >= LARGE_ARRAY]
    model = FullDataModel(fn, leaves, structure, passed, sites, sizes)
    if passed:
        try:
            jax.eval_shape(_values_fn(model, []), model.arrays)
        except Exception:  # the model wants to know values, for instance the largest of an index
            return model._replace(passed=[])
    return model


def _site(site: dict[str, Any]) -> SiteLayout:
    frames = sorted(site["cond_indep_stack"], key=lambda f: f.dim)
    shape, plates = jnp.shape(site["value"]), tuple((f.name, f.dim) for f in frames)
    event_names = tuple(site.get("infer", {}).get("event_dims", ()))
    if site["type"] == "deterministic":
        return SiteLayout("deterministic", shape, plates, (), 0, event_names)
    fn = base = site["fn"]
    while hasattr(base, "base_dist"):
        base = base.base_dist
    kind = "latent"
    if site["is_observed"]:
        kind = "factor" if isinstance(base, Unit) else "observed"
    return SiteLayout(kind, shape, plates, tuple(fn.batch_shape), fn.event_dim, event_names)


def latent_draws(model: FullDataModel, posterior: Arrays) -> Arrays:
    """Draws of the latent sites, chains one after the other."""
    latent = model.of_kind("latent")
    missing = [name for name in latent if name not in posterior]
    if missing:
        raise ValueError(
            f"the run holds no draws of the latent sites {missing}, and the model cannot be "
            "replayed without them: keep them in `extra_fields`, or do not ask for log_likelihood "
            "and posterior_predictive"
        )
    return {name: posterior[name].reshape((-1, *posterior[name].shape[2:])) for name in latent}


def observed_values(model: FullDataModel) -> Arrays:
    """Values of the observed sites on all rows; nothing else of the model is computed."""
    names = model.of_kind("observed")
    if not names:
        return {}
    values = jax.jit(_values_fn(model, names))(model.arrays)
    return {name: host(x) for name, x in values.items()}


def _values_fn(model: FullDataModel, names: list[str]) -> Callable[[list], dict[str, jax.Array]]:
    def values(arrays: list) -> dict[str, jax.Array]:
        fn = handlers.seed(model.fn, random.key(0))
        trace = model.trace(handlers.substitute(fn, substitute_fn=init_to_uniform()), arrays)
        return {name: trace[name]["value"] for name in names}

    return values
