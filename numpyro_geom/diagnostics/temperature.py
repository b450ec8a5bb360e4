r"""Errors of means and standard deviations that gradients at the draws reveal.

For a target exp(-U / tau) and a vector field phi, integration by parts gives

    E[phi . grad U] = tau E[div phi].

Two fields a coordinate j turn it into errors of moments, whatever the kernel and however the draws
came about. With the draws' mean m, covariance S and standard deviations s, and those of the
target with a star,

    phi = S e_j:                  mean[(S grad U)_j] / (tau s_j)       is about (m_j - m*_j) / s_j
    phi = S e_j (theta_j - m_j):  mean[(theta_j - m_j) (S grad U)_j] / (tau s_j^2)
                                                                       is about (s_j / s*_j)^2

In expectation draws of any target give 0 and 1. For a Gaussian one the first is the error of the
mean, and the second that of the variance to first order, Monte Carlo error of these draws included.
S makes them errors of coordinate j: with phi = e_j (theta_j - m_j), the configurational temperature
of a coordinate, stiff directions that hardly contribute to its variance would dominate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer.util import potential_energy, unconstrain_fn

from ..minibatch import SubsamplePlates
from .replay import Arrays, Model, host, latent_draws

POSITION, GRADIENT = "z.", "grad_U."
"""What the names of a site's arrays begin with."""
MAX_WORK = 2**28
"""Observed values times draws for which gradients are evaluated; beyond, draws are left out."""
MAX_FULL_COVARIANCE = 200
"""Coordinates above which S is diagonal."""
DRAWS_A_COORDINATE = 10
"""Draws for each coordinate below which S is diagonal: its noise would be the result."""


class MomentErrors(NamedTuple):
    """Errors of the draws' moments in each unconstrained coordinate; arrays of shape (D,).

    Attributes:
        names: of the coordinates, such as ``w[3]``.
        mean: error of the mean, in standard deviations.
        mean_error: its Monte Carlo standard error.
        sd: relative error of the standard deviation.
        sd_error: its Monte Carlo standard error.
        left_out: draws whose position or gradient is not finite.
    """

    names: list[str]
    mean: np.ndarray
    mean_error: np.ndarray
    sd: np.ndarray
    sd_error: np.ndarray
    left_out: int


def gradients_at_draws(model: Model, posterior: Mapping[str, np.ndarray]) -> Arrays:
    """Unconstrained positions and gradients of U on all rows, at evenly spaced draws.

    Args:
        model: from `numpyro_geom.diagnostics.replay.read_model`.
        posterior: draws of all latent sites, shaped (chains, draws, ...).

    Returns:
        For each latent site ``w`` the arrays ``z.w`` and ``grad_U.w``, in nats, shaped (chains,
        draws, ...). All draws, unless that takes more than `MAX_WORK` rows in total.

    Raises:
        ValueError: if the draws of a latent site are missing or discrete.
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
    number = len(range(0, draws, every))
    flat = latent_draws(model, kept)

    def at(arrays: list[jax.Array], draw: dict[str, jax.Array]) -> tuple[dict, dict]:
        leaves = list(model.leaves)
        for k, x in zip(model.passed, arrays, strict=True):
            leaves[k] = x
        args, kwargs = jax.tree.unflatten(model.structure, leaves)
        fn = SubsamplePlates(handlers.seed(model.fn, random.key(0)))
        z = unconstrain_fn(fn, args, kwargs, draw)
        return z, jax.grad(lambda z: potential_energy(fn, args, kwargs, z))(z)

    @jax.jit
    def over_draws(arrays: list[jax.Array], draws: dict[str, jax.Array]) -> tuple[dict, dict]:
        at_once = max(1, min(64, MAX_WORK // (256 * rows)))
        return lax.map(lambda draw: at(arrays, draw), draws, batch_size=at_once)

    z, grad = over_draws(model.arrays, {name: jnp.asarray(x) for name, x in flat.items()})
    found: Arrays = {}
    for prefix, tree in ((POSITION, z), (GRADIENT, grad)):
        for name, x in tree.items():
            found[prefix + name] = host(x).reshape((chains, number, *x.shape[1:]))
    return found


def is_real(x: np.ndarray) -> bool:
    """Whether an array holds real numbers."""
    return x.dtype.kind == "f"


def moment_errors(arrays: Mapping[str, np.ndarray], temperature: float) -> MomentErrors:
    """Errors of means and standard deviations, from positions and gradients.

    S comes from the other half of each chain, so that its noise does not add up.

    Args:
        arrays: what `gradients_at_draws` returns, at least four draws.
        temperature: tau of the target, above 0.
    """
    names, z, grad = _columns(arrays)
    finite = np.isfinite(z).all(-1) & np.isfinite(grad).all(-1)
    half = z.shape[1] // 2
    parts = [(slice(half, None), slice(None, half)), (slice(None, half), slice(half, None))]
    middle = np.mean(z[finite], 0)
    mean, ratio = np.full((2, *z.shape), np.nan)
    for here, there in parts:
        others = z[:, there][finite[:, there]] - middle
        pulled, variance = _times_covariance(grad[:, here], others)
        scale = np.where(variance > 0, variance, np.nan)
        mean[:, here] = pulled / (temperature * np.sqrt(scale))
        ratio[:, here] = (z[:, here] - middle) * pulled / (temperature * scale)
    (mean, mean_error), (ratio, error) = (_mean_and_error(x, finite) for x in (mean, ratio))
    sd = np.sqrt(np.maximum(ratio, 0.0))
    return MomentErrors(
        names, mean, mean_error, sd - 1, error / (2 * np.maximum(sd, 0.5)), int((~finite).sum())
    )


def _times_covariance(grad: np.ndarray, centred: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """S times the gradients, and the diagonal of S."""
    size = grad.shape[-1]
    variance = np.mean(centred**2, 0)
    if size > min(MAX_FULL_COVARIANCE, len(centred) // DRAWS_A_COORDINATE):
        return grad * variance, variance
    return grad @ (centred.T @ centred / len(centred)), variance


def _mean_and_error(values: np.ndarray, finite: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over draws of (chains, draws, D) and their Monte Carlo errors."""
    mean = values[finite].mean(0)
    filled = np.where(finite[..., None], values, mean)
    spread = filled.std((0, 1))
    moving = spread > 0
    error = np.zeros(len(mean))
    if moving.any():
        effective = effective_sample_size(filled[..., moving])
        error[moving] = spread[moving] / np.sqrt(effective)
    return mean, error


def _columns(arrays: Mapping[str, np.ndarray]) -> tuple[list[str], np.ndarray, np.ndarray]:
    names: list[str] = []
    z: list[Any] = []
    grad: list[Any] = []
    for key, x in arrays.items():
        if not key.startswith(POSITION):
            continue
        site = key.removeprefix(POSITION)
        names += [entry_name(site, k) for k in np.ndindex(x.shape[2:])]
        z.append(x.reshape((*x.shape[:2], -1)).astype(float))
        grad.append(arrays[GRADIENT + site].reshape((*x.shape[:2], -1)).astype(float))
    return names, np.concatenate(z, -1), np.concatenate(grad, -1)


def entry_name(name: str, index: tuple[int, ...]) -> str:
    """``w[0, 1]``, or ``w`` for a scalar."""
    return f"{name}[{', '.join(map(str, index))}]" if index else name
