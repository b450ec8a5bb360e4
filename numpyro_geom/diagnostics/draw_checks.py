"""Checks of the draws: mixing of the chains, and weights and geodesics of a guide."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np
import xarray as xr

from ..laplace.draw import EQUAL_WEIGHTS, largest_shape
from . import checks
from .arrays import Arrays, Scalars, entries
from .checks import Check, at_least, at_most, none_of
from .run_checks import advice_on_length
from .run_record import RunRecord

MAX_ENTRIES = 500
"""Number of entries of a variable, evenly spaced, for R-hat, sample sizes and the shift."""


def draw_checks(posterior: Arrays, run: RunRecord, seconds: float | None) -> Iterator[Check]:
    """R-hat and effective sample sizes of the draws, or the reason why there are none."""
    posterior = {name: x for name, x in posterior.items() if x.size}
    if not posterior:
        return
    names, values = entries(posterior, MAX_ENTRIES)
    finite = np.isfinite(values).all((0, 1))
    if not finite.all():
        where = f"{names[int(np.argmin(finite))]}, for instance"
        advice = "check that the model is proper there; other figures leave them out"
        yield none_of("entries that are not finite", np.sum(~finite), where, advice)
    if "guide" in run.attributes:  # independent draws need no check of mixing
        return
    moving = finite & (np.ptp(np.nan_to_num(values), (0, 1)) > 0)
    if values.shape[1] < checks.LEAST_DRAWS:
        advice = "nothing can be said about so few draws: increase num_samples"
        yield at_least("draws per chain", values.shape[1], checks.LEAST_DRAWS, "", advice)
    elif not moving.any():
        advice = "the chain does not move: use step_size='auto', or a smaller step_size"
        yield at_least("entries that change from draw to draw", 0, 1, "", advice)
    else:
        yield from _mixing(Scalars(names, values).keep(moving), run, seconds)


def _mixing(scalars: Scalars, run: RunRecord, seconds: float | None) -> Iterator[Check]:
    names, values = scalars
    found = _arviz_figures(values)
    longer = advice_on_length(run)
    if "rhat" in found:
        worst, advice = int(np.argmax(found["rhat"])), f"chains disagree; {longer}"
        bound = checks.largest_rhat(values.shape[0])
        yield at_most("R-hat", found["rhat"][worst], bound, names[worst], advice)
    for kind in ("bulk", "tail"):
        worst, name = int(np.argmin(found[kind])), f"effective sample size, {kind}"
        yield at_least(name, found[kind][worst], checks.LEAST_ESS, names[worst], longer)
    bulk, gradients = float(found["bulk"].min()), _gradients(run)
    if gradients is not None:
        yield Check("effective draws per gradient", bulk / gradients, where=_batches(run))
    if seconds is not None:
        yield Check("effective draws per second", bulk / seconds)


def _arviz_figures(values: np.ndarray) -> Arrays:
    """Effective sample sizes of each entry (0 if undefined), and R-hat of several chains."""
    import arviz  # slow to import, and only needed here

    # ArviZ 0.2x and 1.x both accept a dataset
    data = xr.Dataset({"x": (["chain", "draw", "entry"], values)})
    found = {}
    with np.errstate(divide="ignore", invalid="ignore"):  # chains that do not move
        for kind in ("bulk", "tail"):
            found[kind] = np.nan_to_num(arviz.ess(data, method=kind)["x"].values, nan=0.0)
        if values.shape[0] > 1:
            found["rhat"] = arviz.rhat(data)["x"].values
    return found


def _gradients(run: RunRecord) -> float | None:
    chains = next(iter(run.posterior.values())).shape[0]
    if "gradients" in run.attributes:
        return float(np.sum(np.broadcast_to(run.attributes["gradients"], chains)))
    if "n_steps" in run.sample_stats:
        return float(run.sample_stats["n_steps"].sum()) * int(run.attributes.get("thinning", 1))
    return None


def _batches(run: RunRecord) -> str:
    rows = json.loads(run.attributes.get("batch_sizes", "{}"))
    return f"each on {', '.join(f'{n} rows of {k}' for k, n in rows.items())}" if rows else ""


def guide_checks(run: RunRecord) -> Iterator[Check]:
    """Failed geodesics and the Pareto shape of weights, if a guide has them."""
    stats, attributes = run.sample_stats, run.attributes
    is_fisher = attributes.get("metric") == "fisher"
    if "success" in stats:
        failed = np.sum(~stats["success"].astype(bool))
        where = f"{failed} of {stats['success'].size} geodesics failed"
        advice = (
            "these draws are NaN (`success` in sample_stats marks them), and leaving them out "
            "biases the other draws. Draw again from a guide with a larger max_steps "
            "or rtol, standardise the inputs, or "
        )
        other = "reparametrise the model" if is_fisher else "use metric='fisher'"
        yield none_of("failed geodesics", failed, where, advice + other)
    if "pareto_k" in attributes:
        shape, weights = float(attributes["pareto_k"]), stats.get("log_weight")
        num_draws = math.prod(next(iter(run.posterior.values())).shape[:2])
        yield _shape_of_weights(shape, weights, num_draws, is_fisher)


def _shape_of_weights(
    shape: float, log_weight: np.ndarray | None, num_draws: int, is_fisher: bool
) -> Check:
    largest = largest_shape(num_draws)
    name, threshold = "Pareto shape of weights", f"below {largest:.2g}"
    if shape < largest:
        return Check(name, shape, None, threshold, True)
    where = f"from {largest:.2g} on, weights cannot correct {num_draws} draws to the posterior"
    other = "draw more" if is_fisher else "try metric='fisher'"
    advice = (
        "do not use log_weight, and take means and intervals as rough ones. Run MCMC, "
        f"reparametrise the model, or {other}"
    )
    if log_weight is not None:
        weights = log_weight[np.isfinite(log_weight)].astype(float)
        enough = weights.size >= checks.FEWEST_WEIGHTS
        if enough and np.ptp(weights) < EQUAL_WEIGHTS:
            return Check(name, shape, ok=True, where="all weights are equal")
        if not enough or not np.isfinite(shape):
            where = f"it could not be estimated from {weights.size} draws with a weight"
            advice = "how near the draws are to the posterior is not known: draw hundreds or more"
    return Check(name, shape, None, threshold, False, where, advice)
