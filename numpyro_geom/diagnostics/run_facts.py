"""Facts that the checks need about a run, besides its draws and sample statistics.

They are numbers (one per chain or one for all) and texts, which netCDF can store as attributes. So
a run and its export are judged by the same facts.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import xarray as xr
from numpyro.infer import MCMC

from ..kernel import SGKernel


def is_measured(mcmc: MCMC) -> bool:
    """Whether warm-up has measured curvature and noise; False if nothing was automatic."""
    kernel = mcmc.sampler
    # the first measurement happens before the second draw
    return isinstance(kernel, SGKernel) and kernel.measures and int(np.min(mcmc.last_state.i)) > 1


def facts_as_attributes(mcmc: MCMC) -> dict[str, Any]:
    """Facts of a run with one of this package's kernels.

    Returns:
        A dict with these entries, each only if it applies:

        - ``gradients`` and ``passes``: gradients, and passes over the data, of a chain;
        - ``target_accept``;
        - ``clamped``: share of entries with more minibatch noise than injected noise;
        - ``relaxation_steps``: steps in which the slowest direction relaxes; ``relaxations``: how
          many such times a chain spans;
        - ``scale_condition``: condition number of the covariance of the scaled coordinates;
        - ``noise_without_control_variate`` and ``noise_with_control_variate``: largest eigenvalues
          of the minibatch noise, if the control variate was chosen automatically;
        - ``curvature_ratio``: largest over smallest curvature in the second half of warm-up;
        - ``warmup_shrink``: factor on the step size from failed steps in warm-up;
        - ``bias_discretisation`` and ``bias_noise``: relative errors of variances; ``bias_terms``:
          their formulas; or ``bias_note``: why there are none.
    """
    kernel, state = mcmc.sampler, mcmc.last_state
    fields = jax.device_get(mcmc.get_extra_fields(group_by_chain=True))
    adaptation, dynamics = jax.device_get((state.adaptation, state.dynamics))
    h, steps = (np.asarray(fields[name], float) for name in ("step_size", "num_steps"))
    taken = mcmc.thinning * steps.sum(1)
    epoch = 1 if kernel.plan is None else kernel.plan.steps_per_epoch
    found: dict[str, Any] = {"gradients": taken, "passes": taken / epoch}
    if kernel.facts.trajectory:  # one gradient more than steps, and an energy of all rows
        trajectories = taken / steps.mean(1)
        found["gradients"] = taken + trajectories
        found["passes"] = (taken + trajectories) / epoch + trajectories
    if kernel.facts.adjusted:
        found["target_accept"] = kernel.facts.target_accept
    clamped = getattr(getattr(dynamics, "extra", dynamics), "clamped", None)
    if clamped is not None:
        found["clamped"] = np.mean(clamped)
    if (scale := learned_scale(mcmc)) is not None:
        spread = np.asarray(scale, float)
        if scale.ndim == 3:
            spread = np.linalg.eigvalsh(spread)
        found["scale_condition"] = spread.max(1) / spread.min(1)
    if (choice := kernel.bound.choice) is not None:
        found["noise_without_control_variate"], found["noise_with_control_variate"] = choice.noise
    text = {"bias_note": _without_bias(kernel)}
    if is_measured(mcmc):
        rate = _by_chain(kernel.facts.rate(adaptation.slowest, dynamics))
        curvature, noise = _by_chain(adaptation.curvature), _by_chain(adaptation.noise)
        found["relaxation_steps"] = 1 / (h.mean(1) * rate)
        found["relaxations"] = mcmc.thinning * (h * steps).sum(1) * rate
        smallest = np.maximum(_by_chain(adaptation.curvature_low), 1e-30)
        found["curvature_ratio"] = curvature / smallest
        found["warmup_shrink"] = _by_chain(adaptation.shrink)
        if not text["bias_note"]:
            parts = kernel.facts.bias(curvature, noise, h.mean(1), dynamics)
            found["bias_discretisation"], found["bias_noise"], terms = parts
            text = {"bias_terms": terms}
    elif not text["bias_note"]:
        text["bias_note"] = (
            "not measured, because step_size and num_steps are both given (num_steps='auto' "
            "measures it, and the relaxation time)"
        )
    # for a single chain, a number
    numbers = {name: np.squeeze(np.asarray(x, float)).tolist() for name, x in found.items()}
    return {**numbers, **text}


def learned_scale(mcmc: MCMC) -> xr.DataArray | None:
    """The covariance of each chain's scaled coordinates, with named entries, or None."""
    scale = getattr(mcmc.last_state, "scale", ())
    if not scale:
        return None
    matrix, position = jax.device_get((scale.inverse_mass_matrix, mcmc.last_state.z))
    if mcmc.num_chains == 1 and np.ndim(mcmc.last_state.i) == 0:
        matrix = matrix[None]
    else:
        position = jax.tree.map(lambda x: x[0], position)
    names = [
        f"{jax.tree_util.keystr(path, simple=True, separator='.')}{list(i) or ''}"
        for path, x in jax.tree_util.tree_leaves_with_path(position)
        for i in np.ndindex(np.shape(x))
    ]
    dims = ("parameter", "other_parameter")[: matrix.ndim - 1]
    return xr.DataArray(
        matrix,
        dims=("chain", *dims),
        coords={dim: names for dim in dims},
        attrs={"description": "covariance of the unconstrained parameters that warm-up learned"},
    )


def _by_chain(x: Any) -> np.ndarray:
    return np.atleast_1d(np.asarray(x, float))


def _without_bias(kernel: SGKernel) -> str:
    """Why the step size of a kernel has no such bias; empty if it has one."""
    if kernel.facts.adjusted:
        return "none, steps are Metropolis-adjusted"
    if kernel.settings.temperature == 0:
        return "temperature 0: the draws are the path of an optimiser, not of a posterior"
    if kernel.facts.bias is None:
        return f"not that of a step size, see the docstring of {type(kernel).__name__}"
    return ""
