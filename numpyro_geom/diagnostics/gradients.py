"""Gradients of U on all rows at the draws of a model, on the unconstrained space."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro import handlers
from numpyro.infer.util import potential_energy, unconstrain_fn

from ..target.minibatch import SubsamplePlates
from .arrays import Arrays, host
from .full_data import FullDataModel, latent_draws

POSITION, GRADIENT = "z.", "grad_U."
"""What the names of a site's arrays begin with."""
MAX_WORK = 2**28
"""Observed values times draws for which gradients are evaluated; beyond, draws are left out."""
LARGEST_ROUNDING = 0.1
"""Change of an unconstrained coordinate, in sd, from one floating-point number to the next in the
constrained draw, above which the draw does not tell the coordinate."""


def gradients_at_draws(model: FullDataModel, posterior: Mapping[str, np.ndarray]) -> Arrays:
    """Unconstrained positions and gradients of U on all rows, at evenly spaced draws.

    For each latent site ``w`` the arrays ``z.w`` and ``grad_U.w``, in nats, shaped (chains, draws,
    ...). All draws, unless that takes more than `MAX_WORK` rows in total. The gradient is NaN in
    coordinates that the constrained draws, as floating-point numbers, do not tell (the small
    entries of a sparse simplex in float32).
    """
    discrete = [n for n in model.of_kind("latent") if n in posterior and not is_real(posterior[n])]
    if discrete:
        raise ValueError(
            f"the sites {discrete} are discrete, and U has no gradient there: leave gradients out"
        )
    chains, draws = next(iter(posterior.values())).shape[:2]
    rows = 1 + sum(int(np.prod(model.sites[n].shape)) for n in model.of_kind("observed"))
    every = -(-chains * draws * rows // MAX_WORK)
    kept = {name: x[:, ::every] for name, x in posterior.items()}

    def at(arrays: list[jax.Array], draw: dict[str, jax.Array]) -> tuple[dict, dict, dict]:
        args, kwargs = model.arguments(arrays)
        fn = SubsamplePlates(handlers.seed(model.fn, random.key(0)))
        z = unconstrain_fn(fn, args, kwargs, draw)
        following = jax.tree.map(lambda x: jnp.nextafter(x, jnp.inf), draw)
        moved = unconstrain_fn(fn, args, kwargs, following)
        rounding = jax.tree.map(jnp.subtract, moved, z)
        return z, jax.grad(lambda z: potential_energy(fn, args, kwargs, z))(z), rounding

    @jax.jit
    def over_draws(arrays: list[jax.Array], draws: dict[str, jax.Array]) -> tuple:
        at_once = max(1, min(64, MAX_WORK // (256 * rows)))
        return lax.map(lambda draw: at(arrays, draw), draws, batch_size=at_once)

    places = {name: jnp.asarray(x) for name, x in latent_draws(model, kept).items()}
    z, grad, rounding = (jax.tree.map(host, x) for x in over_draws(model.arrays, places))
    found: Arrays = {}
    for name, x in z.items():
        finite = np.isfinite(x) & np.isfinite(rounding[name])
        changes = np.mean(np.where(finite, rounding[name], 0.0) ** 2, 0) ** 0.5
        hidden = changes > LARGEST_ROUNDING * np.std(np.where(finite, x, 0.0), 0)
        shape = (chains, -(-draws // every), *x.shape[1:])
        found[POSITION + name] = x.reshape(shape)
        found[GRADIENT + name] = np.where(hidden, np.nan, grad[name]).reshape(shape)
    return found


def is_real(x: np.ndarray) -> bool:
    """Whether an array holds real numbers."""
    return x.dtype.kind == "f"
