"""A model on all rows, even if the sampler subsamples: sites, plates, values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro import handlers
from numpyro.distributions import Unit
from numpyro.infer import init_to_uniform

from ..model.abstract import abstract_trace
from ..model.arguments import split_arrays
from ..model.minibatch import SubsamplePlates
from .draws import Arrays, host

LARGE_ARRAY = 10**4
"""Number of entries from which an array argument of the model is an input of compiled code."""


class SiteLayout(NamedTuple):
    """A sample or deterministic site on all rows: its kind and the meaning of its axes."""

    kind: str  # latent, observed, factor or deterministic
    shape: tuple[int, ...]
    plates: tuple[tuple[str, int], ...]  # name and (negative) batch dimension
    batch_shape: tuple[int, ...]
    event_dim: int
    event_names: tuple[str, ...]
    discrete: bool = False  # of a latent site


class FullDataModel(NamedTuple):
    """A model with its arguments and its sites; `param` sites have fixed values.

    Compiled code copies the arrays that it closes over. So large arrays are passed as inputs.
    """

    fn: Callable
    arrays: list[jax.Array]  # the large arrays among the arguments
    fill: Callable[[list], tuple[tuple, dict[str, Any]]]  # arguments with ``arrays`` replaced
    sites: dict[str, SiteLayout]
    sizes: dict[str, int]

    def of_kind(self, *kinds: str) -> list[str]:
        """Names of the sites of these kinds."""
        return [name for name, site in self.sites.items() if site.kind in kinds]

    def summed_out(self, posterior: Mapping[str, Any]) -> list[str]:
        """Discrete latent sites without draws."""
        return [n for n, site in self.sites.items() if site.discrete and n not in posterior]

    def trace(
        self, fn: Callable, arrays: list[jax.Array], indices: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run ``fn``, the model within handlers, on these large arrays and rows."""
        args, kwargs = self.fill(arrays)
        return handlers.trace(SubsamplePlates(fn, indices)).get_trace(*args, **kwargs)


def read_model(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> FullDataModel:
    """The model's sites and plates, without numerical computation."""
    trace, declared = abstract_trace(fn, args, kwargs, {})
    sites = {
        name: _site(site)
        for name, site in trace.items()
        if site["type"] in ("sample", "deterministic")
    }
    sizes = {name: size for name, (size, _) in declared.items()}
    arrays, fill = split_arrays((args, kwargs), LARGE_ARRAY)
    model = FullDataModel(fn, arrays, fill, sites, sizes)
    if arrays:
        try:
            jax.eval_shape(_values_fn(model, []), arrays)
        except Exception:  # the model needs concrete values, such as the largest of an index
            return model._replace(arrays=[], fill=lambda _: (args, kwargs))
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
    batch_shape = tuple(fn.batch_shape)
    discrete = kind == "latent" and bool(fn.support.is_discrete)
    return SiteLayout(kind, shape, plates, batch_shape, fn.event_dim, event_names, discrete)


def latent_draws(model: FullDataModel, posterior: Arrays) -> Arrays:
    """Draws of the latent sites, with chains concatenated."""
    latent = model.of_kind("latent")
    missing = [name for name in latent if name not in posterior]
    if missing:
        raise ValueError(
            f"the run holds no draws of the latent sites {missing}, and the model cannot be "
            "replayed without them: keep them in `extra_fields`, or do not ask for gradients, "
            "log_likelihood and posterior_predictive. Draws of discrete sites that were summed out "
            "come from `numpyro.infer.Predictive(model, samples, infer_discrete=True)`"
        )
    values = {name: posterior[name] for name in latent}
    return {n: x.reshape((x.shape[0] * x.shape[1], *x.shape[2:])) for n, x in values.items()}


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
