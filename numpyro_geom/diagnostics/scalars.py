"""Draws as a table of scalars, and how sure they are of means, spreads and shares.

Monte Carlo errors are s / sqrt(n), s the standard deviation of what is averaged and n its own
effective sample size: that of (x - mean)^2 for a spread, of an indicator for a share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

from .results import paths
from .summary import check_run

FEWEST_DRAWS = 8
"""Draws a chain below which halves of it have no autocovariance to speak of."""
MOST_CHAINS = 10
"""Times as many chains as draws: in a plain array that is rather draws of a vector."""
COLUMNS = 128
"""Scalars whose autocovariances are in memory at once."""


class Scalars(NamedTuple):
    """Draws of scalars.

    Attributes:
        names: of the scalars, ``w[0, 1]`` for an entry of an array.
        values: shape (chains, draws, scalars), float64.
    """

    names: tuple[str, ...]
    values: np.ndarray


class Moments(NamedTuple):
    """Means and spreads of scalars with their Monte Carlo errors, arrays of shape (scalars,).

    Attributes:
        mean: the means.
        mean_error: their standard errors.
        sd: the standard deviations.
        sd_error: their standard errors.
        mean_size: effective sample size of the mean.
        sd_size: effective sample size of the squared deviation from it.
    """

    mean: np.ndarray
    mean_error: np.ndarray
    sd: np.ndarray
    sd_error: np.ndarray
    mean_size: np.ndarray
    sd_size: np.ndarray

    @property
    def least_size(self) -> np.ndarray:
        """The smaller of both effective sample sizes."""
        return np.minimum(self.mean_size, self.sd_size)


def read_draws(source: Any, what: str) -> dict[str, np.ndarray]:
    """Numeric variables of a run by name, each of shape (chains, draws, ...).

    Args:
        source: a run MCMC, an InferenceData or DataTree with a posterior, a Dataset of such, or a
            dict of arrays. A slash in a name becomes a dot, as in exports.
        what: its name, for errors.

    Raises:
        TypeError: for anything else.
        ValueError: for a run without draws, for arrays without both leading axes, and for dicts
            of arrays whose axis of chains seems to be one of draws.
    """
    is_named = hasattr(source, "posterior") or hasattr(source, "data_vars")
    if isinstance(source, MCMC):
        check_run(source)
        source = dict(paths(source.get_samples(group_by_chain=True), "z"))
        is_named = True
    elif hasattr(source, "posterior"):
        source = source["posterior"]
    if hasattr(source, "data_vars"):
        source = {
            name: x.transpose("chain", "draw", ...)
            for name, x in source.data_vars.items()
            if {"chain", "draw"} <= set(x.dims)
        }
    if not isinstance(source, Mapping):
        raise TypeError(
            f"{what} must be a run MCMC, an InferenceData or DataTree with a posterior, or a dict "
            f"of arrays (chains, draws, ...), got {type(source).__name__}"
        )
    arrays = {stored_name(name): np.asarray(x) for name, x in source.items()}
    if len(arrays) < len(source):
        raise ValueError(
            f"{what} must have names that differ once each slash is a dot, as exports have it, got "
            f"{sorted(map(str, source))}"
        )
    for name, x in arrays.items():
        if x.ndim < 2:
            raise ValueError(
                f"{what} must have arrays of shape (chains, draws, ...), got {name!r} of shape "
                f"{x.shape}: use `mcmc.get_samples(group_by_chain=True)`, or x[None] for one chain"
            )
        if not is_named and x.shape[0] > MOST_CHAINS * x.shape[1]:
            raise ValueError(
                f"{what} must have arrays of shape (chains, draws, ...), and {name!r} of shape "
                f"{x.shape} would be {x.shape[0]} chains of {x.shape[1]}: use "
                "`mcmc.get_samples(group_by_chain=True)`, or x[None] for one chain"
            )
    return {name: x for name, x in arrays.items() if x.dtype.kind in "biuf"}


def stored_name(name: Any) -> str:
    """What an export calls a site."""
    return str(name).replace("/", ".")


def to_scalars(arrays: Mapping[str, np.ndarray], what: str) -> Scalars:
    """Entries of all variables side by side.

    Raises:
        ValueError: for values that are not finite, for too few draws, and for variables whose
            numbers of chains or draws differ.
    """
    names: list[str] = []
    columns = []
    lead = next(iter(arrays.values())).shape[:2]
    for name, x in arrays.items():
        if x.shape[:2] != lead:
            raise ValueError(
                f"{what} must have as many chains and draws of every variable, got {lead} and, "
                f"for {name!r}, {x.shape[:2]}"
            )
        if not np.all(np.isfinite(x)):
            raise ValueError(
                f"{what} has draws of {name!r} that are not finite ({np.sum(~np.isfinite(x))} "
                "values): look for undone or diverging steps, or leave it out by var_names"
            )
        names.extend(entry_names(name, x.shape[2:]))
        columns.append(x.reshape(*lead, -1).astype(np.float64))
    if lead[0] < 1 or lead[1] < FEWEST_DRAWS:
        raise ValueError(
            f"{what} must have at least {FEWEST_DRAWS} draws a chain, which an effective sample "
            f"size needs, got {lead[0]} chains of {lead[1]}"
        )
    return Scalars(tuple(names), np.concatenate(columns, axis=-1))


def entry_names(name: str, shape: Sequence[int]) -> list[str]:
    """``w[0, 1]`` and so on."""
    if not shape:
        return [name]
    return [f"{name}[{', '.join(map(str, index))}]" for index in np.ndindex(*shape)]


def effective_size(values: np.ndarray) -> np.ndarray:
    """Effective sample size of the mean of each scalar, between 1 and n log10(n).

    Chains count as two halves each, so that one that drifts is seen to. A scalar that never
    changes has 1.

    Args:
        values: shape (chains, draws, scalars).
    """
    half = values.shape[1] // 2
    halves = np.concatenate([values[:, :half], values[:, -half:]])
    number = values.shape[0] * values.shape[1]
    sizes = np.ones(values.shape[2])
    moves = np.ptp(halves, axis=(0, 1)) > 0
    for start in range(0, values.shape[2], COLUMNS):
        some = np.flatnonzero(moves[start : start + COLUMNS]) + start
        if some.size:
            sizes[some] = effective_sample_size(halves[..., some])
    # without variance within chains it is not a number; so anticorrelated is no estimate reliable
    sizes = np.where(np.isfinite(sizes) & (sizes > 0), sizes, np.where(sizes < 0, np.inf, 1.0))
    return np.clip(sizes, 1.0, number * max(1.0, np.log10(number)))


def moments(values: np.ndarray) -> Moments:
    """Means and standard deviations with their errors; the latter's by the delta method.

    Args:
        values: shape (chains, draws, scalars).
    """
    mean = values.mean(axis=(0, 1))
    squares = (values - mean) ** 2
    variance = squares.mean(axis=(0, 1))
    sd = np.sqrt(variance)
    mean_size, sd_size = effective_size(values), effective_size(squares)
    spread = squares.std(axis=(0, 1))
    safe = np.where(sd > 0, sd, 1.0)
    return Moments(
        mean=mean,
        mean_error=sd / np.sqrt(mean_size),
        sd=sd,
        sd_error=spread / np.sqrt(sd_size) / (2 * safe),
        mean_size=mean_size,
        sd_size=sd_size,
    )


def figure(value: float, digits: int = 3) -> str:
    """A number in a few digits."""
    return f"{value:.{digits}g}"


def align(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table: first column to the left, others to the right."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[k]) for row in table) for k in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, table))


def to_html(
    header: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[str], escape: Callable
) -> str:
    """The same as HTML, with lines of text below."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    below = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
