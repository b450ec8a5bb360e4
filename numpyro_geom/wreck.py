"""Wrecks: starts that end nowhere, and chains whose draws are worth nothing.

Starts raise an error before the first draw. Chains are told of when a run is exported or summarised
(`numpyro_geom.diagnostics.warn_if_unreliable`).

A run that is merely biased or too short is for `numpyro_geom.diagnose`. Here are only runs that
nobody should read a summary of, and a metric whose correction cannot be right. The evidence is in
the fields that NumPyro collects with every draw and in the last state, so the check costs nothing
during the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import numpyro
from jax import random

from ._util import PyTree, are_known, is_traced, named, words
from ._warning import warn_outside
from .bound import Bound
from .model.programs import compiled
from .sampling.algorithm import Algorithm, adapts, rule_temperature
from .sampling.settings import Settings
from .sampling.state import SGState

LEAST_DRAWS = 20
"""Draws of a chain from which it can be called a wreck."""
MOST_UNDONE = 0.5
"""Share of a chain's draws with undone steps above which the chain is a wreck."""
LOOKED_AT = 50
"""Number of draws, evenly spaced, that are compared to tell whether a chain has moved."""
FAR_ABOVE = 20.0
"""Rise of the energy since the start that is too much, in units of tau D. In the target, energies
spread by (D / 2)^1/2 tau, and their mean is tau D / 2 above the lowest energy of a normal law."""
NOISE = 5.0
"""Changes of the energy between draws by which the rise must exceed `FAR_ABOVE`: with minibatches,
the energy at the start is as noisy as later energies."""

BRIDGED = 10.0
"""Difference between the energies of chains that sampling can bridge, in units of tau, besides the
spread D / 2 of the energies in a target."""

SUSPICIOUS, SUSPICIOUS_REAL = 10.0, 1e6
"""Distance from 0 in the unconstrained space from which a search may have run away: exp(10) is
22,000. A site that is real there as here may be in small units."""


# Starts


def fault_at(bound: Bound, position: PyTree) -> str:
    """Which site makes the energy not finite at a position of one chain; empty if none is found."""
    model = bound.model
    if model is None or model.on_host or is_traced((position, model.args, model.kwargs)):
        return ""
    with numpyro.validation_enabled(False):
        trace = model.trace(position, unconstrained=True, rng_key=random.key(0))
        for name, site in trace.items():
            if site["type"] != "sample":
                continue
            if not site["is_observed"] and not np.all(np.isfinite(site["value"])):
                return (
                    f"site {name!r} has the value {_one(site['value'])}, for "
                    f"{_one(position.get(name, np.nan))} in its unconstrained space: give it a "
                    "start that is less far out"
                )
            if not np.all(np.isfinite(site["fn"].log_prob(site["value"]))):
                return f"the log density of site {name!r} is not finite there"
    return ""


def check_arrival(bound: Bound, state: SGState) -> None:
    """Raise a ValueError if a search has run away: twice as far out, the energy is much lower."""
    model, several = bound.model, np.ndim(state.i) > 0
    if model is None or bound.point is not None or model.on_host:
        return
    if not are_known((state, model.args, model.kwargs)):
        return
    states = {n: np.asarray(x) if several else np.asarray(x)[None] for n, x in state.z.items()}
    far = [np.any(np.abs(x) > SUSPICIOUS, tuple(range(1, x.ndim))) for x in states.values()]
    potential = bound.potential()
    for chain in np.flatnonzero(np.any(far, 0)):
        z = {name: x[chain] for name, x in states.items()}
        out = {n: np.abs(x) > SUSPICIOUS for n, x in z.items()}
        values = model.constrain(z)
        for name, x in z.items():
            if np.array_equal(x, values.get(name)):
                out[name] = np.abs(x) > SUSPICIOUS_REAL
        size = sum(x.size for x in z.values())
        fall = FAR_ABOVE * rule_temperature(bound.settings.temperature) * size
        for name in (n for n, x in out.items() if x.any()):
            where = [z | {name: np.where(out[name], k * z[name], z[name])} for k in (1, 2, -2)]
            batch = potential.curvature_batch(random.key(0))
            here, *further = (compiled(potential.energy, x, batch) for x in where)
            if any(float(energy) < float(here) - fall for energy in further):
                raise ValueError(
                    f"the search for a start ran away with site {name!r}, to "
                    f"{_one(z[name])} in its unconstrained space: the energy falls further the "
                    "farther out it is, so the posterior is not proper, or has no bulk. Expected "
                    "a proper posterior: give the site a prior with lighter tails (no "
                    "ImproperUniform), or check the signs of `numpyro.factor`"
                )


def _one(values: Any) -> str:
    """The entry of an array that is not finite, or is farthest from 0."""
    flat = np.ravel(np.asarray(values, float))
    return f"{flat[np.argmax(np.where(np.isfinite(flat), np.abs(flat), np.inf))]:.3g}"


# Chains


def bridged(temperature: float, parameters: int) -> float:
    """The largest difference in nats between the energies of chains that see the same modes."""
    return rule_temperature(temperature) * (BRIDGED + parameters / 2)


def above_the_best(energies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By how much each chain's median energy exceeds the lowest one, and what noise explains.

    Energies have the shape (chains, draws), and with minibatches their own noise. The results, of
    shape (chains,), are the excesses and `NOISE` standard errors, in nats.
    """
    middles = np.median(energies, 1)
    noise = np.median(np.abs(np.diff(energies, axis=1)), 1) / energies.shape[1] ** 0.5
    return middles - middles.min(), NOISE * (noise + noise[np.argmin(middles)])


def warn_of_run(
    settings: Settings, algorithm: Algorithm, states: Mapping[str, PyTree], last: SGState
) -> None:
    """Warn, once for all chains, if a chain of a run is a wreck, or else if its metric lags.

    ``states`` are the fields of the draws, arrays of shape (chains, draws, ...).

    Warns:
        SamplingWarning: if most draws of a chain have undone steps, if it has not moved, or if its
            energy stays far above the energy where it started, or above that of other chains; or if
            statistics of a metric that moves cannot follow the position.
    """
    if not are_known((states, last)):
        return
    last = jax.tree.map(lambda x: np.asarray(words(x)), last)
    chains, draws = np.shape(states["diverging"])
    if draws < LEAST_DRAWS:
        return
    last = last if np.ndim(last.i) else jax.tree.map(lambda x: x[np.newaxis], last)
    if np.any(np.asarray(last.i) <= np.asarray(last.adaptation.num_warmup)):
        return  # draws of warm-up
    for wrecked, size, text, automatic, by_hand in _findings(settings, states, last):
        if not wrecked.any():
            continue
        worst = int(np.argmax(np.where(wrecked, size, -np.inf)))
        like_it = f" ({wrecked.sum()} of {chains} chains are like it)" if chains > 1 else ""
        warn_outside(
            f"chain {worst} is a wreck, do not use its draws: {text.format(size[worst])}{like_it}. "
            f"{_farthest(last.z, worst)}. Use {_exact_gamma(settings)}"
            f"{by_hand if settings.schedule else automatic}, or "
            "start from init_params of higher density"
        )
        return
    memory, lag = 1 / (1 - settings.metric.decay), _lag(settings, algorithm, last)
    if lag > 1:
        warn_outside(
            f"the draws are biased: with gamma='corrected' the statistic of {settings.metric!r} "
            f"averages {memory:.3g} steps, and the gradient changes within {memory / lag:.2g}. Use "
            f"{_exact_gamma(settings)}a step_size that is more than {lag:.2g} times smaller"
        )


def _exact_gamma(settings: Settings) -> str:
    """A remedy where the correction of a metric that moves needs statistics without memory."""
    if not _is_corrected(settings):
        return ""
    return "gamma='auxiliary', " if settings.metric.has_auxiliary else "gamma='frozen', "


def _is_corrected(settings: Settings) -> bool:
    return getattr(settings, "gamma", None) == "corrected"


def _lag(settings: Settings, algorithm: Algorithm, last: SGState) -> float:
    """Memory of a corrected metric, over the steps in which the gradient changes; 0 for others.

    The gradient in the stiffest direction changes in 1 / (h lam_H) steps, or with a momentum in
    1 / (h lam_H^1/2) steps. Where no curvature was measured, the length of the drift tells of it.
    """
    if not _is_corrected(settings) or not jax.tree.leaves(last.metric_state.statistic):
        return 0.0
    h, drift = np.asarray(last.step_size), np.mean(np.asarray(last.drift_ratio))
    curvature = np.asarray(last.adaptation.curvature)
    if algorithm.momentum:
        squared = h**2 * curvature if adapts(settings, algorithm) else drift
        steps = np.sqrt(squared)
    else:
        steps = h * curvature if adapts(settings, algorithm) else 2 * drift
    return float(np.median(steps)) / (1 - settings.metric.decay)


def _findings(
    settings: Settings, states: Mapping[str, PyTree], last: SGState
) -> Iterator[tuple[np.ndarray, np.ndarray, str, str, str]]:
    """Wrecked chains, by how much, in words; remedies for an automatic step size and another."""
    chains, draws = np.shape(states["diverging"])
    smaller = "step_size='auto' or a step_size that is ten times smaller"
    undone = np.mean(np.asarray(states["diverging"]), 1)
    yield (
        undone > MOST_UNDONE,
        undone,
        "{:.0%} of its draws have steps that were not finite or not stable",
        "a larger num_warmup, or reparametrise the model (a non-centred hierarchy, for instance)",
        smaller,
    )
    if settings.temperature > 0:  # a descent may come to rest
        still = _still(states["z"], last.z, chains)
        yield (
            still,
            np.asarray(last.step_size),
            f"it has not moved in {draws} draws, at the step size {{:.2g}}",
            "a larger num_warmup, another metric",
            "step_size='auto'",
        )
    energies = np.asarray(states["potential_energy"])
    rise = np.median(energies, 1) - np.asarray(last.adaptation.start_energy)
    noise = np.median(np.abs(np.diff(energies, axis=1)), 1)
    parameters = sum(x[0].size for x in jax.tree.leaves(last.z))
    usual = FAR_ABOVE * rule_temperature(settings.temperature) * parameters
    yield (
        rise > usual + NOISE * noise,
        rise,
        "its energy stays {:.3g} nats above the energy where it started",
        "a larger num_warmup, a smaller bias_tolerance",
        smaller,
    )
    above, noise = above_the_best(energies)
    others = "the draws of the other chains"
    yield (
        above > bridged(settings.temperature, parameters) + noise,
        above,
        "its energy stays {:.3g} nats above that of another chain, in a mode with less mass",
        others,
        others,
    )


def _farthest(z: PyTree, chain: int) -> str:
    """The leaf of a position with the largest entry."""
    sizes = {
        named(path): float(np.max(np.abs(np.asarray(x)[chain])))
        for path, x in jax.tree_util.tree_leaves_with_path(z)
        if x.size
    }
    name = max(sizes, key=lambda n: sizes[n])
    return f"Farthest from 0 is {name}, at {sizes[name]:.3g} in its unconstrained space"


def _still(draws: PyTree, z: PyTree, chains: int) -> np.ndarray:
    """Whether a chain has not moved; stops at the first sites that have, the smallest first."""
    if isinstance(draws, dict) and isinstance(z, dict):  # without deterministic sites
        draws = {name: x for name, x in draws.items() if name in z}
    still = np.ones(chains, bool)
    for x in sorted(jax.tree.leaves(draws), key=lambda x: x.size):
        if not still.any():
            break
        some = np.linspace(0, x.shape[1] - 1, LOOKED_AT).astype(int)
        looked = np.asarray(x)[:, some].reshape(chains, LOOKED_AT, -1)
        still &= np.all(looked == looked[:, :1], axis=(1, 2))
    return still
