"""Checks of the draws of a guide: geodesics that failed, and what their weights are good for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .checks import EQUAL_WEIGHTS, FEWEST_WEIGHTS, LARGEST_SHAPE, Check, none_of
from .run_record import RunRecord


def guide_checks(run: RunRecord) -> Iterator[Check]:
    """Failed geodesics and the Pareto shape of weights, where there are such."""
    stats, attributes = run.sample_stats, run.attributes
    is_fisher = attributes.get("metric") == "fisher"
    if "success" in stats:
        failed = int((~stats["success"].astype(bool)).sum())
        yield none_of(
            "failed geodesics",
            failed,
            where=f"{failed} of {stats['success'].size} geodesics failed",
            advice="these draws, which `success` in sample_stats marks, are where the solver "
            "stopped, and leaving them out biases what is left. Draw again from a guide with a "
            "larger max_steps or rtol, standardise the inputs, or "
            + ("reparametrise the model" if is_fisher else "use metric='fisher'"),
        )
    if "pareto_k" in attributes:
        yield _shape_of_weights(float(attributes["pareto_k"]), stats.get("log_weight"), is_fisher)


def _shape_of_weights(shape: float, log_weight: np.ndarray | None, is_fisher: bool) -> Check:
    name, threshold = "Pareto shape of weights", f"below {LARGEST_SHAPE:g}"
    if shape < LARGEST_SHAPE:
        return Check(name, shape, threshold=threshold, ok=True)
    if log_weight is not None:
        weights = log_weight[np.isfinite(log_weight)].astype(float)
        enough = weights.size >= FEWEST_WEIGHTS
        if enough and np.ptp(weights) < EQUAL_WEIGHTS:
            return Check(name, shape, ok=True, where="all weights are equal")
        if not enough or not np.isfinite(shape):
            return Check(
                name,
                shape,
                threshold=threshold,
                ok=False,
                where=f"it could not be estimated from {weights.size} draws with a weight",
                advice="how near they are to the posterior is not known: draw hundreds or more",
            )
    other = "mode='hausdorff'" if is_fisher else "metric='fisher'"
    return Check(
        name,
        shape,
        threshold=threshold,
        ok=False,
        where=f"from {LARGEST_SHAPE:g} on weights cannot make them draws of the posterior",
        advice="leave log_weight alone, and take means and intervals for rough ones. Run MCMC, "
        f"reparametrise the model, or try {other}",
    )
