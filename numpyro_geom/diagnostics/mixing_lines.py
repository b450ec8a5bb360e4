"""Lines of a report on the draws themselves: how well the chains mix."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import xarray as xr

from .lines import LEAST_DRAWS, Line, Run
from .replay import Arrays
from .temperature import entry_name

LEAST_ESS = 400
"""Effective draws in all chains together (Vehtari et al., Bayesian Analysis 16(2), 2021)."""
LARGEST_RHAT = 1.01
"""Of up to four chains (the same source); see `_largest_rhat`."""
MAX_ENTRIES = 500
"""Entries of a variable that R-hat and effective sample sizes look at, evenly spaced."""


def draw_lines(posterior: Arrays, run: Run, seconds: float | None) -> Iterator[Line]:
    """R-hat and effective sample sizes of these draws, or why there are none."""
    names, values = _entries(posterior)
    if not names:
        return
    draws = values.shape[1]
    finite = np.isfinite(values).all((0, 1))
    if not finite.all():
        yield Line(
            "entries that are not finite",
            float((~finite).sum()),
            threshold="0",
            ok=False,
            where=f"{names[int(np.argmin(finite))]}, for instance",
            advice="check that the model is proper there; the lines below leave them out",
        )
    if "guide" in run.attrs:  # independent draws, to which none of this applies
        return
    moving = finite & (np.ptp(np.nan_to_num(values), (0, 1)) > 0)
    if draws < LEAST_DRAWS:
        yield Line(
            "draws a chain",
            float(draws),
            threshold=f"at least {LEAST_DRAWS}",
            ok=False,
            advice="nothing can be said of so few: increase num_samples",
        )
    elif not moving.any():
        yield Line(
            "entries that change from draw to draw",
            0.0,
            threshold="at least 1",
            ok=False,
            advice="the chain does not move: look at undone steps, acceptance and step size",
        )
    else:
        kept = [name for name, x in zip(names, moving, strict=True) if x]
        yield from _mixing_lines(kept, values[..., moving], run, seconds)


def _mixing_lines(
    names: list[str], values: np.ndarray, run: Run, seconds: float | None
) -> Iterator[Line]:
    found = _arviz_figures(values)
    longer = "run longer (num_samples or num_steps), or let a metric or a reparametrisation mix it"
    if "rhat" in found:
        largest = _largest_rhat(values.shape[0])
        worst = int(np.argmax(found["rhat"]))
        yield Line(
            "R-hat",
            float(found["rhat"][worst]),
            threshold=f"at most {largest:.3g}",
            ok=bool(found["rhat"][worst] <= largest),
            where=names[worst],
            advice=f"chains disagree; {longer}",
        )
    for kind in ("bulk", "tail"):
        worst = int(np.argmin(found[kind]))
        yield Line(
            f"effective sample size, {kind}",
            float(found[kind][worst]),
            threshold=f"at least {LEAST_ESS}",
            ok=bool(found[kind][worst] >= LEAST_ESS),
            where=names[worst],
            advice=longer,
        )
    bulk, gradients = float(found["bulk"].min()), _gradients(run)
    if gradients is not None:
        yield Line("effective draws a gradient", bulk / gradients, where=_batches(run))
    if seconds is not None:
        yield Line("effective draws a second", bulk / seconds)


def _largest_rhat(chains: int) -> float:
    """What R-hat is at 400 effective draws, which spread the means of the half chains.

    Of four chains it is the usual 1.01. More chains share the draws, and each says less.
    """
    return max(LARGEST_RHAT, (1 + 2 * chains / LEAST_ESS) ** 0.5)


def _entries(posterior: Arrays) -> tuple[list[str], np.ndarray]:
    """Names and values of the scalars to look at, shaped (chains, draws, scalars)."""
    names: list[str] = []
    columns = []
    for name, x in posterior.items():
        size = int(np.prod(x.shape[2:]))
        if size == 0:
            continue
        chosen = np.unique(np.linspace(0, size - 1, min(size, MAX_ENTRIES)).astype(int))
        names += [entry_name(name, np.unravel_index(k, x.shape[2:])) for k in chosen]
        columns.append(x.reshape((*x.shape[:2], -1))[..., chosen].astype(float))
    return names, np.concatenate(columns, -1) if columns else np.zeros((0, 0, 0))


def _arviz_figures(values: np.ndarray) -> dict[str, np.ndarray]:
    """Effective sample sizes of each entry, 0 for none, and R-hat of several chains."""
    import arviz  # slow to import, and only needed here

    # a dataset is what both lines of ArviZ take
    data = xr.Dataset({"x": (["chain", "draw", "entry"], values)})
    found = {}
    with np.errstate(divide="ignore", invalid="ignore"):  # chains that do not move
        for kind in ("bulk", "tail"):
            found[kind] = np.nan_to_num(arviz.ess(data, method=kind)["x"].values, nan=0.0)
        if values.shape[0] > 1:
            found["rhat"] = arviz.rhat(data)["x"].values
    return found


def _gradients(run: Run) -> float | None:
    chains = next(iter(run.posterior.values())).shape[0]
    if "gradients" in run.attrs:
        return float(np.sum(np.broadcast_to(run.attrs["gradients"], chains)))
    steps = run.stats.get("n_steps")
    if steps is None:
        return None
    return float(steps.sum()) * int(run.attrs.get("thinning", 1))


def _batches(run: Run) -> str:
    rows = json.loads(run.attrs.get("batch_sizes", "{}"))
    return f"each on {', '.join(f'{n} rows of {k}' for k, n in rows.items())}" if rows else ""
