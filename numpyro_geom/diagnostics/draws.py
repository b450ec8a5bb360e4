"""Draws as named arrays, and their means and standard deviations with Monte Carlo errors.

Draws are read from an MCMC that has run, an ArviZ object or a dict. An error is s / sqrt(n), where
s is the standard deviation of the averaged quantity and n is the effective sample size of the same
quantity. For a standard deviation, the quantity is (x - mean)^2; for a share, it is an indicator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from .._checks import check_names
from .._numpyro import states_of
from .._util import PyTree, evenly

Arrays = dict[str, np.ndarray]
LEAST_PER_CHAIN = 8
"""Draws per chain that an effective sample size needs, because it splits chains."""
MAX_ENTRIES = 500
"""Largest number of entries of a variable, evenly spaced, that are looked at."""
MOST_CHAINS = 10
"""A plain array with more than this many times as many chains as draws is an error: its first axis
is probably one of draws."""


class Scalars(NamedTuple):
    """Draws of scalars, with names such as ``w[0, 1]`` for an entry of an array."""

    names: tuple[str, ...]
    values: np.ndarray  # shape (chains, draws, scalars), float64

    def keep(self, flags: Any) -> Scalars:
        """The scalars whose flag is True."""
        return Scalars(named(self.names, flags), self.values[..., np.asarray(flags)])


def named(names: Sequence[str], flags: Any) -> tuple[str, ...]:
    """The names whose flag is True."""
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag)


def host(x: Any) -> np.ndarray:
    """A NumPy array of a type that can be stored."""
    array = np.asarray(jax.device_get(x))
    # xarray and netCDF do not support bfloat16 and similar types
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def is_numeric(x: Any) -> bool:
    """Whether ``x`` is an array of numbers or booleans."""
    return isinstance(x, (np.ndarray, jax.Array)) and (
        jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
    )


def paths(tree: PyTree, root: str) -> Iterator[tuple[str, Any]]:
    """Leaves of a pytree, named by path; ``root`` is put before paths that start with a number."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path]
        if not keys or not isinstance(keys[0], str):
            keys.insert(0, root)
        yield ".".join(map(str, keys)), leaf


def stored_name(name: Any) -> str:
    """The name of a site in an export; netCDF reserves the slash."""
    return str(name).replace("/", ".")


def entries(arrays: Mapping[str, np.ndarray], most: int | None = None) -> Scalars:
    """Entries of all variables side by side; up to ``most`` evenly spaced entries of each."""
    names: list[str] = []
    columns = []
    for name, x in arrays.items():
        flat = x.reshape((*x.shape[:2], -1))
        chosen = evenly(flat.shape[2], flat.shape[2] if most is None else most)
        indices = (np.unravel_index(k, x.shape[2:]) for k in chosen)
        names += [f"{name}[{', '.join(map(str, i))}]" if i else name for i in indices]
        columns.append(flat[..., chosen].astype(np.float64))
    return Scalars(tuple(names), np.concatenate(columns, axis=-1))


def chosen(names: Any, known: Iterable[str], what: str, label: str = "var_names") -> list[str]:
    """The names of one or several variables, each once; an error for no names and unknown names."""
    given = check_names(label, names)
    missing = [name for name in given if name not in known]
    if not given:
        raise ValueError(f"expected names of variables, got none: {what} has {sorted(known)}")
    if missing:
        raise ValueError(f"{what} has no variables {missing}: it has {sorted(known)}")
    return given


def variables_of(dataset: Any) -> Arrays:
    """Variables of a Dataset or DataTree node with chains and draws, as their first axes."""
    return {
        str(name): x.transpose("chain", "draw", ...).values
        for name, x in dataset.data_vars.items()
        if {"chain", "draw"} <= set(x.dims)
    }


def numeric(arrays: Arrays) -> Arrays:
    """The arrays of numbers or booleans."""
    return {name: x for name, x in arrays.items() if x.dtype.kind in "biuf"}


def group_of(container: Any, name: str) -> Arrays:
    """Numeric variables of a group of an InferenceData or DataTree; empty without the group."""
    return numeric(variables_of(container[name])) if hasattr(container, name) else {}


def as_array(name: str, value: Any) -> np.ndarray:
    """The value as a NumPy array."""
    try:
        return np.asarray(jax.device_get(value))
    except (TypeError, ValueError) as error:  # keys; lists of unequal length
        raise TypeError(
            f"{name} must be an array, got {type(value).__name__}, which NumPy cannot read: {error}"
        ) from None


def real_numbers(name: str, value: Any) -> np.ndarray:
    """The value as a finite float64 array."""
    x = as_array(name, value)
    if x.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be real numbers, got dtype {x.dtype}")
    if not np.isfinite(x).all():
        raise ValueError(
            f"{name} must be finite, and {(~np.isfinite(x)).sum()} of {x.size} are not"
        )
    return x.astype(np.float64)


def check_run(mcmc: Any) -> None:
    """Raise unless ``mcmc`` is an MCMC that has drawn something."""
    if not isinstance(mcmc, MCMC):
        raise TypeError(
            f"expected a numpyro.infer.MCMC, got {type(mcmc).__name__}: pass the object itself, "
            "not its draws"
        )
    if states_of(mcmc) is None:
        raise ValueError("the MCMC has not run: call `mcmc.run(rng_key, ...)` first")
    state = mcmc.last_state
    if state is not None and state is mcmc.post_warmup_state:  # as before a run is resumed
        draws = getattr(state, "i", None)
        if draws is not None and int(np.max(draws)) <= mcmc.num_warmup:
            raise ValueError(
                "the MCMC has only been warmed up and holds no draws of the posterior: call "
                "`mcmc.run(rng_key, ...)` first"
            )
    if not jax.tree.leaves(mcmc.get_samples(group_by_chain=True)):
        raise ValueError(
            "the run holds no draws of any site: do not exclude all of them in `extra_fields`"
        )


def draws_by_name(mcmc: MCMC) -> Arrays:
    """Draws of a run, shaped (chains, draws, ...); the leaves of a pytree are named by path."""
    return {name: host(x) for name, x in paths(mcmc.get_samples(group_by_chain=True), "z")}


def read_draws(source: Any, what: str) -> Arrays:
    """Numeric variables of a source, each (chains, draws, ...); errors call the source ``what``.

    A slash in a name becomes a dot, as in exports. A dict whose axis of chains seems to be one of
    draws is an error.
    """
    known = True
    if isinstance(source, MCMC):
        check_run(source)
        given = draws_by_name(source)
    elif hasattr(source, "posterior") or hasattr(source, "data_vars"):  # ArviZ, or a group of it
        given = variables_of(source["posterior"] if hasattr(source, "posterior") else source)
    elif isinstance(source, Mapping):
        known, given = False, {name: as_array(what, x) for name, x in source.items()}
    else:
        raise TypeError(
            f"{what} must be a run MCMC, an InferenceData or DataTree with a posterior, or a "
            f"dict of arrays (chains, draws, ...), got {type(source).__name__}"
        )
    arrays = {stored_name(name): x for name, x in given.items()}
    if len(arrays) < len(given):
        names = sorted(map(str, given))
        raise ValueError(f"{what} must have names that differ after '/' becomes '.', got {names}")
    for name, x in arrays.items():
        if x.ndim < 2:
            problem = f"got {name!r} of shape {x.shape}"
        elif not known and x.shape[0] > MOST_CHAINS * x.shape[1]:
            problem = (
                f"and {name!r} of shape {x.shape} would be {x.shape[0]} chains of {x.shape[1]}"
            )
        else:
            continue
        raise ValueError(
            f"{what} must have arrays of shape (chains, draws, ...), {problem}: use "
            "`mcmc.get_samples(group_by_chain=True)`, or x[None] for one chain"
        )
    return numeric(arrays)


def to_scalars(arrays: Mapping[str, np.ndarray], what: str) -> Scalars:
    """Entries of all variables side by side: finite, of equal length, and enough draws."""
    lead = next(iter(arrays.values())).shape[:2]
    for name, x in arrays.items():
        if x.shape[:2] != lead:
            raise ValueError(
                f"{what} must have the same chains and draws for every variable, got {lead} and, "
                f"for {name!r}, {x.shape[:2]}"
            )
        if not np.all(np.isfinite(x)):
            raise ValueError(
                f"{what} has draws of {name!r} that are not finite ({np.sum(~np.isfinite(x))} "
                "values): look for undone or diverging steps, or leave it out by var_names"
            )
    if lead[0] < 1 or lead[1] < LEAST_PER_CHAIN:
        raise ValueError(
            f"{what} must have at least {LEAST_PER_CHAIN} draws per chain, which an effective "
            f"sample size needs, got {lead[0]} chains of {lead[1]}"
        )
    return entries(arrays)


class MomentEstimates(NamedTuple):
    """Means and sds of scalars with their Monte Carlo errors, arrays of shape (scalars,)."""

    mean: np.ndarray
    mean_error: np.ndarray
    sd: np.ndarray
    sd_error: np.ndarray
    mean_size: np.ndarray  # effective sample size of the mean
    sd_size: np.ndarray  # effective sample size of the squared deviation from the mean

    @property
    def least_size(self) -> np.ndarray:
        """The smaller of both effective sample sizes."""
        return np.minimum(self.mean_size, self.sd_size)


def by_arviz(figure: str, values: np.ndarray, undefined: float, **options: Any) -> np.ndarray:
    """A figure of ArviZ, ``ess`` or ``rhat``, for each scalar."""
    import arviz  # slow to import, and only needed here
    import xarray

    # ArviZ 0.2x and 1.x both accept a dataset
    data = xarray.Dataset({"x": (["chain", "draw", "scalar"], values)})
    with np.errstate(divide="ignore", invalid="ignore"):  # chains that do not move
        found = getattr(arviz, figure)(data, **options)["x"].values
    return np.where(np.isnan(found), undefined, found)


def effective_size(values: np.ndarray, still: Any = 1.0) -> np.ndarray:
    """Effective number of draws of each scalar's mean, from draws (chains, draws, scalars).

    A scalar that never changes says nothing of it and gets ``still``: the number for the draws that
    it is computed from, if that is known.
    """
    sizes = np.array(np.broadcast_to(still, values.shape[2]), float)
    moves = np.ptp(values, axis=(0, 1)) > 0
    if moves.any():
        sizes[moves] = np.maximum(by_arviz("ess", values[..., moves], 1.0, method="mean"), 1.0)
    return sizes


def estimate_moments(values: np.ndarray) -> MomentEstimates:
    """Moments of draws (chains, draws, scalars); errors of an sd by the delta method."""
    mean = values.mean(axis=(0, 1))
    squares = (values - mean) ** 2
    sd = np.sqrt(squares.mean(axis=(0, 1)))
    mean_size = effective_size(values)
    sd_size = effective_size(squares, mean_size)
    mean_error = sd / np.sqrt(mean_size)
    sd_error = squares.std(axis=(0, 1)) / np.sqrt(sd_size) / (2 * np.where(sd > 0, sd, 1.0))
    return MomentEstimates(mean, mean_error, sd, sd_error, mean_size, sd_size)


class Mixing(NamedTuple):
    """What draws say of themselves, for each of their entries that is finite and changes.

    Attributes:
        names: of these entries.
        size: effective draws, for the mean or the square about it, whichever has fewer.
        rhat: rank-normalised R-hat of several chains; None for one chain.
        alone: effective draws of the entry of largest R-hat about each chain's own mean.
        not_finite: names of the entries that are not finite.
        draws: draws per chain. If they are too few, no entry is judged.
    """

    names: tuple[str, ...]
    size: np.ndarray
    rhat: np.ndarray | None
    alone: float
    not_finite: tuple[str, ...]
    draws: int


def mixing_of(arrays: Arrays, *, independent: bool = False) -> Mixing | None:
    """Read up to `MAX_ENTRIES` entries of each variable; None if there are none.

    Of draws that are ``independent`` no entry is judged.
    """
    arrays = {name: x for name, x in numeric(arrays).items() if x.size}
    if not arrays:
        return None
    found = entries(arrays, MAX_ENTRIES)
    finite = np.isfinite(found.values).all((0, 1))
    names, values = found.keep(finite)
    judged = values.shape[1] >= LEAST_PER_CHAIN and not independent
    names, values = Scalars(names, values).keep(judged & (np.ptp(values, (0, 1)) > 0))
    size, rhat, alone = np.zeros(0), None, 0.0
    if names:
        size = estimate_moments(values).least_size
    if names and values.shape[0] > 1:
        rhat = by_arviz("rhat", values, np.inf)
        own = values[..., [np.argmax(rhat)]]
        alone = float(effective_size(own - own.mean(1, keepdims=True))[0])
    not_finite = named(found.names, ~finite)
    return Mixing(names, size, rhat, alone, not_finite, found.values.shape[1])
