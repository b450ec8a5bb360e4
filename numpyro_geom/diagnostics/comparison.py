"""Compare draws with reference draws, and with the parameters that have made the data."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, Predictive
from scipy.special import stdtr

from .._checks import check_names
from .._util import evenly
from .draws import (
    Scalars,
    chosen,
    effective_size,
    entries,
    estimate_moments,
    host,
    named,
    read_draws,
    stored_name,
    to_scalars,
)
from .table import FALSE_ALARM, SHOWN, Printed, Row

INTERVAL = 0.9
"""Probability of the reference's central interval in which the shares of draws are compared."""
FEW_EFFECTIVE = 100
"""Number of effective draws below which a verdict means little."""
DIRECTIONS = 32
"""Number of random directions that are compared as the scalars are."""
COLUMNS = {
    "mean_error": ("mean error", "+.3f"),
    "mean_noise": ("+-", ".3f"),
    "sd_ratio": ("sd ratio", ".3f"),
    "sd_noise": ("+-", ".3f"),
    "coverage": ("in 90%", ".3f"),
    "coverage_noise": ("+-", ".3f"),
    "ess": ("ESS", ".0f"),
    "reference_ess": ("ref. ESS", ".0f"),
    "p_value": ("p, corrected", ".2g"),
}
"""Columns of the printed table: title and format of each figure."""


class ScalarDifference(NamedTuple):
    """How the draws of one scalar differ from the reference's; errors are standard errors.

    Attributes:
        name: name of the scalar.
        mean_error: (mean - reference mean) / reference sd.
        mean_noise: Monte Carlo error of ``mean_error``.
        sd_ratio: sd / reference sd.
        sd_noise: Monte Carlo error of ``sd_ratio``.
        coverage: share of the draws in the reference's central 90% interval.
        coverage_noise: Monte Carlo error of ``coverage``.
        ess: effective sample size of the draws, the smaller one of mean and sd.
        reference_ess: the same for the reference.
        p_value: smallest p-value of the three comparisons, corrected for the number of comparisons
            over all scalars.
    """

    name: str
    mean_error: float
    mean_noise: float
    sd_ratio: float
    sd_noise: float
    coverage: float
    coverage_noise: float
    ess: float
    reference_ess: float
    p_value: float


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """What `compare_draws` found; prints as a table and a verdict.

    Attributes:
        scalars: the differences, one per scalar, in the order of the draws.
        directions: the same along random directions of all scalars together; empty for one scalar.
        left_out: variables that only one side has.
        constant: scalars that are the same constant on both sides.
        sizes: (chains, draws) of the draws and of the reference.
    """

    scalars: tuple[ScalarDifference, ...]
    directions: tuple[ScalarDifference, ...]
    left_out: tuple[str, ...]
    constant: tuple[str, ...]
    sizes: tuple[tuple[int, int], tuple[int, int]]

    @property
    def _differing(self) -> tuple[str, ...]:
        """Names of the scalars and directions that differ by more than chance allows."""
        share = FALSE_ALARM / 2  # half for the scalars, half for the directions
        return tuple(s.name for s in (*self.scalars, *self.directions) if s.p_value < share)

    @property
    def within_noise(self) -> bool:
        """Whether no difference is larger than chance allows, at 1% for all together."""
        return not self._differing

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self._differing:
            worst = min(self.scalars, key=lambda s: s.p_value)
            named = ", ".join(self._differing[:5]) + (", ..." if len(self._differing) > 5 else "")
            return (
                f"differs: {len(self._differing)} of {len(self.scalars) + len(self.directions)} "
                f"({named}); the mean of {worst.name} is off by {worst.mean_error:+.2g} +- "
                f"{worst.mean_noise:.1g} sd, and its sd is {worst.sd_ratio:.3g} +- "
                f"{worst.sd_noise:.1g} times the reference's"
            )
        mean = max(s.mean_noise for s in self.scalars)
        sd = max(s.sd_noise for s in self.scalars)
        text = (
            f"within noise: {len(self.scalars)} scalars and {len(self.directions)} directions "
            f"agree as well as two runs on one target; Monte Carlo errors are up to {mean:.1g} sd "
            f"of a mean and {100 * sd:.2g}% of an sd"
        )
        least, name = min((min(s.ess, s.reference_ess), s.name) for s in self.scalars)
        few = f". That says little: {name} has {least:.0f} effective draws"
        return text + few if least < FEW_EFFECTIVE else text

    def _table(self) -> list[Row]:
        shown: Sequence[ScalarDifference] = self.scalars
        if len(shown) > SHOWN:
            shown = sorted(shown, key=lambda s: s.p_value)[:SHOWN]
        if self.directions:
            worst = min(self.directions, key=lambda s: s.p_value)
            shown = [*shown, worst._replace(name=f"worst of {DIRECTIONS} directions")]
        rows = [
            [s.name, *(format(getattr(s, name), spec) for name, (_, spec) in COLUMNS.items())]
            for s in shown
        ]
        return [Row(["scalar", *(title for title, _ in COLUMNS.values())]), *map(Row, rows)]

    def _below(self) -> list[str]:
        own, other = (f"{chains} chains of {draws}" for chains, draws in self.sizes)
        lines = [f"draws: {own}; reference: {other}"]
        if len(self.scalars) > SHOWN:
            lines.append(f"the {SHOWN} of {len(self.scalars)} scalars that differ the most")
        if self.left_out:
            lines.append(f"in one of the two only, left out: {', '.join(self.left_out)}")
        if self.constant:
            lines.append(f"constant, left out: {', '.join(self.constant)}")
        return [*lines, self.verdict]


def compare_draws(
    draws: Any, reference: Any, *, var_names: str | Sequence[str] | None = None
) -> Comparison:
    """Compare draws with reference draws of the same posterior, for instance from NUTS.

    For each scalar, in units of the reference's standard deviation (sd), the table has the error of
    the mean, the ratio of sds, and the share of draws in the reference's central 90% interval
    (coverage). The same is computed along 32 random directions of the standardised scalars, which
    sees wrong correlations. The last line of the table is the worst of these directions. Every
    figure comes with its Monte Carlo noise, from the effective sample sizes (ESS) of both sides:

    - means and sds: standard errors; for an sd by the delta method, with the ESS of the
      squares;
    - coverage: p (1 - p) over the ESS of the indicator, for both sides.

    The verdict is "within noise" unless a difference is larger than chance allows. The level is
    corrected for the number of comparisons (Bonferroni). So two correct runs are said to differ at
    most about once in a hundred times. Draws that are "within noise" may still differ by less than
    the errors in the table, or in few of very many correlations. The error of an sd is too small
    if the tails are so heavy that the square has no variance.

    Args:
        draws: an MCMC that has run, an InferenceData or DataTree, or a dict of arrays of shape
            (chains, draws, ...).
        reference: the reference draws, in one of the same forms.
        var_names: variable or variables to compare; None for all numeric variables of both sides.

    Returns:
        The comparison; ``print`` shows it.

    Raises:
        TypeError: for draws in another form.
        ValueError: for runs without common variables; for shapes that differ; for values that are
            not finite; for fewer than 8 draws per chain; for plain arrays with more than 10 times
            as many chains as draws; for scalars that are constant in the reference and vary in the
            draws.

    Examples:
        >>> import numpy as np
        >>> from numpyro_geom.diagnostics import compare_draws
        >>> rng = np.random.default_rng(0)
        >>> reference = {"mu": rng.normal(size=(4, 1000))}
        >>> compare_draws({"mu": rng.normal(size=(4, 1000))}, reference).within_noise
        True
        >>> compare_draws({"mu": 1.2 * rng.normal(size=(4, 1000))}, reference).within_noise
        False
    """
    x, y, left_out, constant = _common(draws, reference, var_names)
    directions: tuple[ScalarDifference, ...] = ()
    if len(y.names) > 1:
        ways = np.random.default_rng(0).standard_normal((len(y.names), DIRECTIONS))
        ways /= y.values.std(axis=(0, 1))[:, None]
        names = tuple(f"direction {k}" for k in range(DIRECTIONS))
        centre = y.values.mean(axis=(0, 1))
        directions = differences(*(Scalars(names, (s.values - centre) @ ways) for s in (x, y)))
    sizes = x.values.shape[:2], y.values.shape[:2]
    return Comparison(differences(x, y), directions, left_out, constant, sizes)


def _common(
    draws: Any, reference: Any, var_names: str | Sequence[str] | None
) -> tuple[Scalars, Scalars, tuple[str, ...], tuple[str, ...]]:
    """Scalars of both sides, names of variables left out, and names of constant scalars."""
    mine, theirs = read_draws(draws, "draws"), read_draws(reference, "reference")
    if var_names is None:
        names = [name for name in mine if name in theirs]
        left_out = tuple(sorted(set(mine) ^ set(theirs)))
    else:
        asked = check_names("var_names", var_names)
        names, left_out = [stored_name(name) for name in asked], ()
        for what, arrays in (("draws", mine), ("reference", theirs)):
            names = chosen(names, arrays, what)
    if not names:
        raise ValueError(
            f"draws and reference have no variable in common: {sorted(mine)} and {sorted(theirs)}"
        )
    for name in names:
        if mine[name].shape[2:] != theirs[name].shape[2:]:
            raise ValueError(
                f"{name!r} must have one shape after chains and draws, got {mine[name].shape[2:]} "
                f"in the draws and {theirs[name].shape[2:]} in the reference"
            )
    x = to_scalars({n: mine[n] for n in names}, "draws")
    y = to_scalars({n: theirs[n] for n in names}, "reference")
    fixed = np.ptp(y.values, axis=(0, 1)) == 0
    same = fixed & np.all(x.values == y.values[0, 0], axis=(0, 1))
    odd = named(y.names, fixed & ~same)
    if odd:
        raise ValueError(
            f"the scalars {list(odd)} vary in the draws and are constant in the reference, whose "
            "sd is the unit of comparison. Check that both are of one model, or leave these "
            "scalars out by var_names"
        )
    if np.all(same):
        raise ValueError("expected scalars that vary, got draws that are constant and all equal")
    return x.keep(~same), y.keep(~same), left_out, named(y.names, same)


def differences(x: Scalars, y: Scalars) -> tuple[ScalarDifference, ...]:
    """All columns of the table."""
    own, other = estimate_moments(x.values), estimate_moments(y.values)
    sizes = own.least_size, other.least_size
    degrees = [size - 1 for size in sizes]
    mean_error = (own.mean - other.mean) / other.sd
    mean_parts = own.mean_error / other.sd, other.mean_error / other.sd
    ratio = own.sd / other.sd
    # on the log scale, the error of an sd does not depend on the sd
    safe = np.where(own.sd > 0, own.sd, np.finfo(float).tiny)
    sd_parts = own.sd_error / safe, other.sd_error / other.sd
    coverage, share, coverage_parts = _coverage(x.values, y.values, own.mean_size, other.mean_size)
    p_values = np.stack(
        [
            _two_sided(mean_error, mean_parts, degrees),
            _two_sided(np.log(safe / other.sd), sd_parts, degrees),
            _two_sided(coverage - share, coverage_parts, degrees),
        ]
    )
    p_value = np.minimum(1.0, p_values.min(axis=0) * p_values.size)
    p_value = np.where(own.sd > 0, p_value, 0.0)  # constant draws, varying reference
    noise = np.hypot(*mean_parts), ratio * np.hypot(*sd_parts), np.hypot(*coverage_parts)
    columns = (mean_error, noise[0], ratio, noise[1], coverage, noise[2], *sizes, p_value)
    return tuple(
        ScalarDifference(name, *map(float, row))
        for name, *row in zip(x.names, *columns, strict=True)
    )


def _two_sided(
    value: np.ndarray, parts: tuple[np.ndarray, np.ndarray], degrees: list[np.ndarray]
) -> np.ndarray:
    """Two-sided p-value of a deviation: Student's t with Welch's degrees of freedom."""
    own, other = (part**2 for part in parts)
    total = own + other
    safe = np.where(total > 0, total, 1.0)
    nu = [np.maximum(d, 1.0) for d in degrees]
    welch = safe**2 / np.maximum(own**2 / nu[0] + other**2 / nu[1], np.finfo(float).tiny)
    p_value = 2 * stdtr(np.maximum(welch, 1.0), -np.abs(value) / np.sqrt(safe))
    return np.where(total > 0, p_value, np.where(value == 0, 1.0, 0.0))


def _coverage(
    x: np.ndarray, y: np.ndarray, own_size: np.ndarray, other_size: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Shares of the draws and of the reference within its central interval, and their errors.

    If all draws of a side are inside the interval, or none, the indicator is constant. Then the
    effective sample size of the mean is used.
    """
    tail = (1 - INTERVAL) / 2
    low, high = np.quantile(y, [tail, 1 - tail], axis=(0, 1))
    inside, inside_y = (((z >= low) & (z <= high)).astype(float) for z in (x, y))
    share = inside_y.mean(axis=(0, 1))  # not 0.9 where values are discrete
    sd = np.sqrt(np.maximum(share * (1 - share), tail * tail))
    errors = (
        sd / np.sqrt(effective_size(inside, own_size)),
        sd / np.sqrt(effective_size(inside_y, other_size)),
    )
    return inside.mean(axis=(0, 1)), share, errors


# --- calibration by simulation


def calibrate(
    model: Callable,
    method: MCMC | Callable[..., Any],
    rng_key: jax.Array,
    *args: Any,
    num_datasets: int = 200,
    lanes: bool = True,
    **kwargs: Any,
) -> Any:
    """Simulation-based calibration: are draws of the posterior right, for data from the prior?

    For each data set a parameter is drawn from the prior and data from the model, and the method
    draws given the data. The rank of the parameter among right draws is uniform (Talts et al.,
    2018). Draws are thinned until they are about independent, and ties are broken at random.

    Args:
        model: makes the data: the arguments that are named as observed sites, None by default.
        method: an MCMC, or a function of a key and the model's arguments that returns draws by
            site, ``(draws, ...)``.
        rng_key: for parameters, data and draws.
        args: other arguments of the model.
        num_datasets: number of data sets.
        lanes: whether all data sets are lanes of one program, by `jax.vmap`; otherwise they follow
            each other. In lanes a kernel does not choose coordinates of groups.
        kwargs: other arguments of the model, by name.

    Returns:
        A dataset of xarray. For each scalar: its ``p_values``, the least of a Kolmogorov-Smirnov
        test and tests of mean and variance of normal scores, corrected; and the ``shares`` of draws
        below the parameter, uniform on (0, 1) if all is right (PIT in ArviZ). ``p`` is the p-value
        of all. ``num_draws`` were ranked, as many as are independent in half of the data sets.
    """
    import xarray as xr  # slow to import, as the next one is
    from scipy import stats

    key_prior, key_draw, key_ties = random.split(rng_key, 3)
    prior = Predictive(model, num_samples=num_datasets)(key_prior, *args, **kwargs)
    data = {n: prior.pop(n) for n in inspect.signature(model).parameters if n in prior}
    if not data:
        raise ValueError(
            "expected an argument of the model with the name of an observed site, as y=None"
        )

    def draws_of(key: jax.Array, data: dict[str, jax.Array]) -> Any:
        if not isinstance(method, MCMC):
            return method(key, *args, **kwargs, **data)
        mcmc = copy.copy(method)
        mcmc.progress_bar, mcmc.sampler = False, copy.copy(method.sampler)  # which init changes
        mcmc.run(key, *args, **kwargs, **data)
        return mcmc.get_samples()

    keys = random.split(key_draw, num_datasets)
    if lanes:
        draws = jax.jit(jax.vmap(draws_of))(keys, data)
    else:
        each = (draws_of(k, {n: x[i] for n, x in data.items()}) for i, k in enumerate(keys))
        draws = jax.tree.map(lambda *x: np.stack(x), *map(jax.device_get, each))
    names, values = entries({n: host(x) for n, x in draws.items() if n in prior})
    truth = entries({n: host(prior[n])[:, None] for n in draws if n in prior}).values
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN if nothing changes
        sizes = effective_sample_size(values.swapaxes(0, 1)[None])
    usual = np.median(np.nan_to_num(sizes, nan=np.inf), axis=0).min()
    kept = values[:, evenly(values.shape[1], int(np.clip(usual, 1, values.shape[1])))]
    below, equal = (np.sum(x, 1) for x in (kept < truth, kept == truth))
    ties = np.asarray(random.uniform(key_ties, below.shape, minval=1e-6))
    shares = (below + ties * (equal + 1)) / (kept.shape[1] + 1)
    scores, law = stats.norm.ppf(shares), stats.chi2(num_datasets)
    squares = np.sum(scores**2, 0)
    by_test = (
        stats.kstest(shares, "uniform", axis=0).pvalue,
        2 * stats.norm.sf(np.abs(scores.mean(0)) * num_datasets**0.5),
        2 * np.minimum(law.cdf(squares), law.sf(squares)),
    )
    p_values = np.minimum(3 * np.min(by_test, 0), 1.0)  # Bonferroni's bound, twice
    found = {"shares": (("dataset", "scalar"), shares), "p_values": ("scalar", p_values)}
    found |= {"p": min(1.0, len(names) * p_values.min()), "num_draws": kept.shape[1]}
    return xr.Dataset(found, {"scalar": list(names)})
