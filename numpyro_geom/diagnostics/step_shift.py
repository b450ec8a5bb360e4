r"""First-order shift of the means of a Langevin kernel's draws by the step size.

A step theta - h grad U + (2 h tau)^1/2 xi leaves exp(-U / tau + h rho) invariant up to h^2, with
rho = |grad U|^2 / (4 tau) - laplacian U / 2. So the mean of a function f has the error
h Cov(f, rho). For a coordinate, integration by parts leaves only the gradient:

    E_h[theta_j] - E[theta_j] is about -Cov(theta_j, h |grad U|^2 / 4 tau).

The same formula holds in coordinates of a constant metric. On a Gaussian, the shift is 0. It is not
0 if one parameter sets the scale of many others, each of which is a little too wide.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import checks
from .arrays import entries
from .checks import Check
from .draw_checks import MAX_ENTRIES
from .gradients import POSITION
from .monte_carlo import effective_size
from .run_record import RunRecord


def shift_checks(run: RunRecord) -> Iterator[Check]:
    """The largest shift of a mean, if the draws have recorded squared drifts."""
    positions = {n: x for n, x in run.unconstrained.items() if n.startswith(POSITION)}
    drift = run.sample_stats.get("squared_drift")
    if drift is None or not positions or int(run.attributes.get("thinning", 1)) > 1:
        return  # with thinning, the recorded drifts are not at the kept draws
    every = int(run.attributes.get("gradients_every", 1))
    drift = np.asarray(drift[:, 1:], float)[:, ::every]  # the next draw has the drift at a draw
    sites = {n.removeprefix(POSITION): x[:, : drift.shape[1]] for n, x in positions.items()}
    names, z = entries(sites, MAX_ENTRIES)
    z = z - z.mean(1, keepdims=True)
    spread = np.sqrt(np.mean(z**2, (0, 1)))
    usable = np.isfinite(spread) & (spread > 0)
    if z.shape[1] < checks.LEAST_DRAWS or not usable.any() or not np.isfinite(drift).all():
        return
    products = z * (drift - drift.mean(1, keepdims=True))[..., None] / np.where(usable, spread, 1)
    shifts = -products.mean((0, 1)) / 2
    sizes = effective_size(products)
    errors = products.std((0, 1)) / 2 / np.sqrt(sizes)
    allowed = checks.by_chance(int(usable.sum()), sizes) * errors
    sure = usable & (np.abs(shifts) > allowed)
    worst = int(np.argmax(np.where(sure if sure.any() else usable, np.abs(shifts), -1.0)))
    size, error = float(np.abs(shifts[worst])), float(errors[worst])
    tolerated = checks.TOLERATED_SHIFT
    wrong = bool(sure.any() and size > tolerated)
    ok = checks.verdict(wrong, float(errors[usable].max()), size, tolerated)
    where = f"{names[worst]}, unconstrained, from discretisation, to first order"
    smaller = _smaller(run, tolerated / size if size > 0 else 1.0)
    advice = f"means move with the step, most where one parameter sets the scale of many: {smaller}"
    threshold = f"within {tolerated:g} of 0"
    name = "shift of the means by the step, in sd"
    yield Check(name, float(shifts[worst]), error, threshold, ok, where, advice)


def _smaller(run: RunRecord, factor: float) -> str:
    if run.attributes.get("step_size") == "auto" and "bias_tolerance" in run.attributes:
        tolerance = factor * float(run.attributes["bias_tolerance"])
        return f"use a bias_tolerance of at most {tolerance:.1g}, or SGHMC or GGMC"
    return f"divide step_size by {1 / factor:.2g}, or use SGHMC or GGMC"
