"""The model behind draws: its observed values and likelihoods, on all rows.

They are computed for some draws at a time, so that the device holds a bounded number of values.
The results are collected on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC

from .._numpyro import arguments_of
from .._util import LANES, num_at_once
from ..laplace.draw import LaplaceDraws
from ..model.abstract import abstract_trace, with_start
from ..model.arguments import on_device
from ..model.model import Model
from ..model.plates import on_all_rows
from ..model.start import wrong_lane
from .draws import Arrays, host


def model_of(source: MCMC | LaplaceDraws) -> Model | None:
    """The model behind draws, with the arguments of the run; None with a ``potential_fn``."""
    if isinstance(source, LaplaceDraws):
        return unchecked(source.model, source.args, source.kwargs)
    kernel, (args, kwargs) = source.sampler, arguments_of(source)
    if hasattr(kernel, "bound"):
        return kernel.bound.on(*on_device(args, kwargs)).model
    fn = getattr(kernel, "model", None)
    return None if fn is None else unchecked(fn, args, kwargs)


def unchecked(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Model:
    """A model that NumPyro can run. Its rows need no check, because none are drawn."""
    args, kwargs = on_device(args, kwargs)
    return Model(fn, args, kwargs, on_all_rows(*abstract_trace(fn, args, kwargs, {})))


def summed_out(model: Model, posterior: Mapping[str, Any]) -> list[str]:
    """Discrete latent sites without draws."""
    return [name for name, site in model.sites.items() if site.discrete and name not in posterior]


def latent_draws(
    model: Model, posterior: Mapping[str, np.ndarray], summed: Sequence[str] = ()
) -> Arrays:
    """Draws of the latent sites except the ``summed`` ones, with chains concatenated."""
    latent = [name for name in model.of_kind("latent") if name not in summed]
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


def observed_values(model: Model) -> Arrays:
    """Values of the observed sites on all rows; nothing else of the model is computed."""
    names = model.of_kind("observed")
    if not names:
        return {}

    @jax.jit
    def values(arrays: list) -> dict[str, jax.Array]:
        known = model.with_arrays(arrays).replace(fn=with_start(model.runnable), fixed={})
        trace = known.trace({})
        return {name: trace[name]["value"] for name in names}

    return {name: host(x) for name, x in values(model.arrays).items()}


def pointwise_log_prob(
    model: Model, draws: Arrays, names: list[str], rows: Mapping[str, Any] | None = None
) -> Arrays:
    """Pointwise log likelihood of sites, on all rows or some, for some draws at a time."""

    def of_one(arrays: list, draw: Arrays) -> dict[str, jax.Array]:
        return model.with_arrays(arrays).log_prob(draw, rows or {}, names)

    log_prob = jax.jit(jax.vmap(of_one, (None, 0)))
    num_draws = next(iter(draws.values())).shape[0]
    whole = jax.eval_shape(log_prob, model.arrays, draws)
    values = sum(x.size for x in whole.values()) // num_draws
    chunk = min(num_draws, LANES, num_at_once(32 * values))
    some, one = {name: x[:chunk] for name, x in draws.items()}, partial(of_one, model.arrays)
    if wrong_lane((one,), some, [values]):
        chunk = 1
    found = {name: np.empty(x.shape, x.dtype) for name, x in whole.items()}
    for first in range(0, num_draws, chunk):
        # the last chunk repeats its last entry: all chunks have one shape and one compilation
        numbers = np.minimum(np.arange(first, first + chunk), num_draws - 1)
        some = {name: x[numbers] for name, x in draws.items()}
        for name, value in jax.device_get(log_prob(model.arrays, some)).items():
            target = found[name][first : first + chunk]
            target[...] = value[: len(target)]
    return found
