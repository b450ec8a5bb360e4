"""What is known of a run: its draws, figures of each draw, settings, and what warm-up has measured.

Facts are numbers (one for each chain or one for all) and texts, which netCDF can store. So a run
and its export are judged by the same facts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .._util import PyTree, tree_size
from ..model.jaxprs import compiled
from ..sampling.algorithm import Algorithm, adapts
from ..sampling.settings import Settings
from ..sampling.state import SGState
from .draws import Arrays, Mixing


class Run(NamedTuple):
    """What the checks of a run know.

    Attributes:
        draws: draws by name, shaped (chains, draws, ...).
        stats: figures of each draw by the names of ArviZ, shaped (chains, draws).
        facts: settings and facts of the sampler, see `facts_of`.
        mixing: what draws say of themselves; None if nobody has looked.
        moments: errors of the draws' moments, from gradients (`numpyro_geom.diagnostics.moments`).
        seconds: sampling time, if it is known.
    """

    draws: Mapping[str, Any]
    stats: Arrays
    facts: Mapping[str, Any]
    mixing: Mixing | None = None
    moments: Any = None
    seconds: float | None = None

    @property
    def temperature(self) -> float:
        """The temperature tau of the target."""
        return float(self.facts.get("temperature", 1.0))

    @property
    def of_this_package(self) -> bool:
        """Whether the draws come from a stochastic-gradient kernel."""
        return "final_step_size" in self.facts


def storable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in types that netCDF can store."""
    return {n: int(value) if isinstance(value, bool) else value for n, value in settings.items()}


def is_measured(kernel: Any, last: SGState) -> bool:
    """Whether warm-up has measured curvature and noise; False if nothing was automatic."""
    # the first measurement happens before the second draw
    return adapts(kernel.settings, kernel.facts) and np.asarray(last.i).min() > 1


def facts_of(
    kernel: Any, states: Mapping[str, PyTree], last: SGState, thinning: int = 1
) -> dict[str, Any]:
    """Settings and facts of a run with one of this package's kernels.

    ``states`` are the fields of the draws, arrays of shape (chains, draws, ...).

    Returns:
        A dict with the settings by name, the final step size and number of steps, the seed, and
        these entries, each only if it applies:

        - ``num_data``, ``plate_sizes`` and ``batch_sizes`` of a model with plates;
        - ``network``: that the model is a network, whose weights can be exchanged;
        - ``undone``: share of a chain's draws with steps that were undone;
        - ``gradients`` and ``passes``: gradients, and passes over the data, of a chain;
        - ``target_accept``;
        - ``dimensions``: number of unconstrained parameters; ``start_energy``: U where a chain has
          started;
        - ``scaled``: whether warm-up has learned a scale;
        - ``metric_lag``: memory of a metric that moves, over the steps in which the gradient
          changes;
        - ``lam_H``, ``lam_C`` and ``lam_min``: largest curvature and noise, and the curvature of
          the slowest direction;
        - ``relaxation_steps``: steps in which the slowest direction relaxes; ``relaxations``: how
          many such times a chain spans;
        - ``bias_discretisation`` and ``bias_noise``: relative errors of variances; ``bias_terms``:
          their formulas; or ``bias_note``: why there are none.
    """
    algorithm, settings, plan = kernel.facts, kernel.settings, kernel.bound.plan
    adaptation, dynamics = jax.device_get((last.adaptation, last.dynamics))
    h, steps = (np.asarray(states[name], float) for name in ("step_size", "num_steps"))
    taken = thinning * steps.sum(1)
    epoch = 1 if plan is None else plan.steps_per_epoch
    chains, size = np.size(last.i), tree_size(last.z)
    found: dict[str, Any] = {
        "final_step_size": last.step_size,
        "final_num_steps": last.num_steps,
        "steps_taken": last.steps_taken,
        "undone": np.asarray(states["diverging"]).mean(1),
        "gradients": taken,
        "passes": taken / epoch,
        "dimensions": 0 if kernel.bound.point is not None else size // chains,
        "start_energy": adaptation.start_energy,
        "scaled": bool(last.scale),
    }
    text = {"seed": json.dumps(np.asarray(last.seed).tolist()), "bias_note": without_bias(kernel)}
    if plan is not None:
        found["num_data"] = plan.num_data
        text["plate_sizes"] = json.dumps(dict(plan.sizes))
        text["batch_sizes"] = json.dumps(dict(plan.batch_sizes))
    if algorithm.trajectory:  # one gradient more than steps, and an energy of all rows
        trajectories = taken / steps.mean(1)
        found["gradients"] = taken + trajectories
        found["passes"] = (taken + trajectories) / epoch + trajectories
    if algorithm.adjusted:
        found["target_accept"] = algorithm.target_accept
    if (lag := metric_lag(settings, algorithm, last)) is not None:
        found["metric_lag"] = lag
    if settings.deep:
        text["network"] = "judged by its predictions"
    if is_measured(kernel, last) and not settings.by_energy:
        rate = _by_chain(compiled(algorithm.rate, adaptation.slowest, dynamics))
        names = {"lam_H": "curvature", "lam_C": "noise", "lam_min": "slowest"}
        found |= {name: getattr(adaptation, x) for name, x in names.items()}
        found["relaxation_steps"] = 1 / (h.mean(1) * rate)
        found["relaxations"] = thinning * (h * steps).sum(1) * rate
        if not text["bias_note"]:
            measured = _by_chain(adaptation.curvature), _by_chain(adaptation.noise)
            parts = algorithm.bias(*measured, h.mean(1), dynamics)
            found["bias_discretisation"], found["bias_noise"], text["bias_terms"] = parts
            del text["bias_note"]
    elif not text["bias_note"]:
        text["bias_note"] = (
            "not measured, because step_size and num_steps are both given (num_steps='auto' "
            "measures it, and the relaxation time)"
        )
    # for a single chain, a number
    numbers = {name: np.squeeze(np.asarray(x)).tolist() for name, x in found.items()}
    return {**storable(settings.record()), **storable(numbers), **text}


def metric_lag(settings: Settings, algorithm: Algorithm, last: SGState) -> float | None:
    """Memory of a corrected metric, over the steps in which the gradient changes; None for others.

    The gradient in the stiffest direction changes in 1 / (h lam_H) steps, or with a momentum in
    1 / (h lam_H^1/2) steps. Where no curvature was measured, the length of the drift tells of it.
    """
    corrected = getattr(settings, "divergence", None) == "corrected"
    if not corrected or not jax.tree.leaves(last.metric_state.statistic):
        return None
    h, drift = np.asarray(last.step_size), np.mean(np.asarray(last.drift_ratio))
    curvature = np.asarray(last.adaptation.curvature)
    if algorithm.momentum:
        steps = np.sqrt(h**2 * curvature if adapts(settings, algorithm) else drift)
    else:
        steps = h * curvature if adapts(settings, algorithm) else 2 * drift
    return float(np.median(steps)) / (1 - settings.metric.decay)


def _by_chain(x: Any) -> np.ndarray:
    return np.atleast_1d(np.asarray(x, float))


def without_bias(kernel: Any) -> str:
    """Why the step size of a kernel has no such bias; empty if it has one."""
    if kernel.facts.adjusted:
        return "none, steps are Metropolis-adjusted"
    if kernel.settings.by_energy:
        return (
            "not known: the step of a network is the one whose error of the energy has a variance "
            "of bias_tolerance per parameter, and this bounds no single weight"
        )
    if kernel.settings.temperature == 0:
        return "temperature 0: the draws are the path of an optimiser, not of a posterior"
    if kernel.facts.bias is None:
        return f"none from a step size, see the docstring of {type(kernel).__name__}"
    return ""
