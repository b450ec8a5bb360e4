"""Discrete latent sites: they are summed out of the density as in NumPyro's NUTS."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def check_discrete(trace: Mapping[str, Any], batch_sizes: Mapping[str, int], sums: bool) -> None:
    """Raise if a model has discrete latent sites that cannot be summed out.

    ``sums`` tells whether the caller can sum out discrete sites at all.

    Raises:
        ValueError: for discrete sites with infinite support; if there is no continuous site; with
            subsampled plates; for unmarked discrete sites if there is no observed site, because
            the data are then probably missing.
        ImportError: without the package funsor.
    """
    sites = [s for s in trace.values() if s["type"] == "sample"]
    latent = [s for s in sites if not s["is_observed"]]
    discrete = [s for s in latent if s["fn"].support.is_discrete]
    if not discrete:
        return
    names = [s["name"] for s in discrete]
    marked = all(s["infer"].get("enumerate") is not None for s in discrete)
    if (
        not sums
        or len(discrete) == len(latent)
        or not all(s["fn"].has_enumerate_support for s in discrete)
        or (len(sites) == len(latent) and not marked)
    ):
        raise ValueError(
            f"discrete latent sites {names}: gradients need continuous ones. Pass the data if "
            "a site should be observed, sum the site out of the model, or sample it with "
            "numpyro.infer.DiscreteGibbs in a numpyro.infer.Gibbs kernel"
        )
    if batch_sizes:
        raise ValueError(
            f"plates {sorted(batch_sizes)} cannot be subsampled, because the discrete latent sites "
            f"{names} are summed out on all rows: drop batch_size and subsample_size, or sum the "
            "sites out of the model, for instance by `dist.MixtureSameFamily`"
        )
    if importlib.util.find_spec("funsor") is None:
        raise ImportError(
            f"the discrete latent sites {names} are summed out by the package funsor: expected "
            "`pip install funsor`, or a model that sums them out itself, for instance by "
            "`dist.MixtureSameFamily`"
        )


def enumerating(model: Callable, sites: Iterable[Any]) -> Callable:
    """The model with one axis for the values of each discrete latent site, left of all plates.

    ``model`` is on all rows. Each of its sites has ``plates``: pairs of a name and a negative
    dimension.
    """
    from numpyro.contrib.funsor import config_enumerate, enum

    depth = max((-dim for s in sites for _, dim in s.plates), default=0)
    return enum(config_enumerate(model), -depth - 1)
