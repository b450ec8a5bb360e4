"""Settings: the arguments of a kernel, each validated once, in one frozen object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpyro.infer import init_to_uniform

from .._checks import check_choice, check_flag, check_int, check_model, check_number
from .._start import check_batch_size
from ..metrics import get_metric
from ..metrics.identity import Identity
from ..model.expansion import Expansion
from ..model.minibatch import BATCHING
from .blocks import Blocks, check_blocks
from .schedules import Schedule, as_schedule

HOST_DEFAULTS: dict[str, Any] = {
    "model": None,
    "potential_fn": None,
    "metric": "identity",
    "step_size": "auto",
    "batch_size": None,
    "num_steps": "auto",
    "temperature": 1.0,
    "batching": "replacement",
    "bias_tolerance": 0.1,
    "control_variate": False,
    "anchor_interval": None,
    "max_norm": None,
    "expansion": None,
    "dense_mass": None,
    "inverse_mass_matrix": None,
    "adapt_mass_matrix": True,
    "init_strategy": init_to_uniform,
    "constrained_init": False,
}
"""Defaults of arguments that every kernel needs and that some constructors do not have."""

FUNCTIONS = ("model", "potential_fn", "full_potential_fn", "init_strategy")
"""Arguments that are functions, which a file cannot store."""


class Settings:
    """Arguments of a kernel by name, after validation; read only.

    Read them as ``settings.temperature``, and so on. The types and values that an argument accepts
    are written once, in this module. A kernel checks its own arguments and their combinations.

    Args:
        arguments: the constructor's arguments by name.
        fixed: settings that the kernel does not leave to its user.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.
    """

    def __init__(self, arguments: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
        values = {**HOST_DEFAULTS, **arguments, **fixed}
        values = {name: _CHECKS.get(name, _accept)(name, value) for name, value in values.items()}
        if values["control_variate"] == "auto" and values["anchor_interval"] is not None:
            values["control_variate"] = True  # a moving anchor implies a control variate
        if values.get("gamma", "") is None:
            values["gamma"] = values["metric"].default_gamma
        _check_target(values)
        self.__dict__.update(values, _names=tuple(arguments))

    @property
    def schedule(self) -> Schedule | None:
        """The step sizes; None if they are automatic."""
        return None if isinstance(self.step_size, str) else self.step_size

    @property
    def given_num_steps(self) -> int | None:
        """Steps per draw; None if they are automatic."""
        return None if isinstance(self.num_steps, str) else self.num_steps

    @property
    def scales(self) -> bool:
        """Whether chains move in scaled coordinates."""
        return isinstance(self.dense_mass, bool | tuple) or self.inverse_mass_matrix is not None

    @property
    def moves_vector(self) -> bool:
        """Whether steps move one vector and not the sites. A vector compiles faster."""
        return self.scales and isinstance(self.metric, Identity)

    @property
    def blocks(self) -> Blocks:
        """The blocks of sites that are scaled together, if not all sites are one block."""
        return self.dense_mass if isinstance(self.dense_mass, tuple) else ()

    @property
    def finds_scale(self) -> bool:
        """Whether a scale is searched for before the first draw, because none is given."""
        return self.scales and self.inverse_mass_matrix is None

    @property
    def learns_scale(self) -> bool:
        """Whether warm-up renews the scale."""
        return self.scales and self.adapt_mass_matrix

    @property
    def dense_scale(self) -> bool:
        """Whether the scale is a matrix and not a diagonal."""
        if isinstance(self.dense_mass, bool):
            return self.dense_mass
        given = self.inverse_mass_matrix
        return bool(self.blocks) or isinstance(given, dict) or np.ndim(given) == 2

    def as_dict(self) -> dict[str, Any]:
        """The constructor's arguments except the model, as they are after validation."""
        return {name: getattr(self, name) for name in self._names if name != "model"}

    def record(self) -> dict[str, Any]:
        """The same arguments without functions, in types that netCDF can store."""
        plain = (str, bool, int, float)
        return {
            name: value if isinstance(value, plain) else "none" if value is None else repr(value)
            for name, value in self.as_dict().items()
            if name not in FUNCTIONS
        }

    def with_values(self, **values: Any) -> Settings:
        """A copy with other values, which are not validated."""
        new = object.__new__(Settings)
        new.__dict__.update(self.__dict__, **values)
        return new

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no setting {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"settings are frozen: use kernel.replace({name}=...)")

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{n}={v!r}' for n, v in self.as_dict().items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]


def auto_or(check: Callable[[str, Any], Any], expected: str) -> Callable[[str, Any], Any]:
    """A check that lets ``"auto"`` pass."""

    def checked(name: str, value: Any) -> Any:
        if not isinstance(value, str):
            return check(name, value)
        if value != "auto":
            raise ValueError(f"{name} must be 'auto' or {expected}, got {value!r}")
        return value

    return checked


def _accept(_: str, value: Any) -> Any:
    return value


def _optional(check: Callable) -> Callable:
    return lambda name, value: None if value is None else check(name, value)


def _function(name: str, value: Any) -> Any:
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {type(value).__name__}")
    return value


def _init_strategy(name: str, value: Any) -> Any:
    if not callable(value):
        raise TypeError(
            f"{name} must be one of numpyro.infer's, such as init_to_median, got {value!r}"
        )
    return value


def _expansion(name: str, value: Any) -> Any:
    if isinstance(value, Expansion):
        return value
    raise TypeError(
        f"{name} must be a numpyro_geom.Expansion such as Expansion(left=1, right=1), or None, "
        f"got {type(value).__name__}"
    )


def _covariance(name: str, value: Any) -> tuple:
    """Variances, or the rows of a covariance matrix, as a value that can be compared."""
    try:
        matrix = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        matrix = np.empty(0)
    if matrix.ndim not in (1, 2) or matrix.size == 0 or matrix.shape[0] != matrix.shape[-1]:
        raise TypeError(
            f"{name} must be an array of variances, shape (D,), or a covariance, shape (D, D), of "
            f"the unconstrained parameters, got {type(value).__name__} of shape {np.shape(value)}"
        )
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.sqrt(np.abs(matrix if matrix.ndim == 1 else np.diagonal(matrix)))
        scaled = matrix / spread**2 if matrix.ndim == 1 else matrix / spread / spread[:, None]
    if not np.isfinite(scaled).all():
        problem = "variances that are zero or not finite"
    elif not np.allclose(scaled, scaled.T, atol=1e-4):
        problem = "one that is not symmetric"
    else:
        least = scaled.min() if matrix.ndim == 1 else np.linalg.eigvalsh(scaled)[0]
        if least > 0:
            rows = ((matrix + matrix.T) / 2).tolist()
            return tuple(tuple(x) if matrix.ndim == 2 else x for x in rows)
        problem = f"a smallest eigenvalue of {least:g}, with its diagonal scaled to 1"
    raise ValueError(
        f"{name} must be symmetric and positive definite, got {problem}: add a multiple of the "
        "identity, or pass the diagonal alone"
    )


def _covariances(name: str, value: Any) -> Any:
    """The same for blocks of sites, or for one block of all sites."""
    if not isinstance(value, Mapping) or not value:
        return _covariance(name, value)
    blocks = check_blocks(name, [*value])
    return {
        block: _covariance(f"{name}[{key!r}]", x)
        for block, (key, x) in zip(blocks, value.items(), strict=True)
    }


def _dense_mass(name: str, value: Any) -> Any:
    return value if isinstance(value, bool) else check_blocks(name, value)


def _probability(name: str, value: Any) -> float:
    if check_number(name, value, above=0.0) >= 1:
        raise ValueError(f"{name} must be below 1, got {value!r}")
    return float(value)


def _decay(name: str, value: Any) -> float:
    decay = check_number(name, value, least=0.0)
    if decay >= 1:
        raise ValueError(
            f"{name} must be a number in [0, 1), got {value!r}: with decay 1 nothing is learned"
        )
    return decay


_positive = partial(check_number, above=0.0)

_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "model": _optional(check_model),
    "potential_fn": _optional(_function),
    "metric": lambda _, value: get_metric(value),
    "step_size": auto_or(lambda _, value: as_schedule(value), "a positive number or a schedule"),
    "batch_size": auto_or(lambda _, value: check_batch_size(value), "rows per step, or None"),
    "num_steps": auto_or(check_int, "an integer of at least 1"),
    "temperature": partial(check_number, least=0.0),
    "batching": partial(check_choice, choices=BATCHING),
    "bias_tolerance": _positive,
    "control_variate": auto_or(check_flag, "True or False"),
    "anchor_interval": _optional(check_int),
    "expansion": _optional(_expansion),
    "dense_mass": _optional(auto_or(_dense_mass, "True, False, None or blocks of sites")),
    "inverse_mass_matrix": _optional(_covariances),
    "adapt_mass_matrix": check_flag,
    "init_strategy": _init_strategy,
    "constrained_init": check_flag,
    "friction": auto_or(_positive, "a positive number"),
    "thermostat_mass": auto_or(_positive, "a positive number"),
    "adjusted": check_flag,
    "noise_correction": check_flag,
    "gamma_probes": check_int,
    "max_norm": _optional(_positive),
    "target_accept": _probability,
    "eps": _positive,
    "drift": partial(check_number, least=0.0),
    "mean_decay": _decay,
    "square_decay": _decay,
    "num_data": _optional(check_int),
}


def _check_target(values: Mapping[str, Any]) -> None:
    """Raise if arguments about the target contradict each other."""
    model, potential_fn = values["model"], values["potential_fn"]
    if (model is None) == (potential_fn is None):
        raise ValueError(
            "expected exactly one of `model` and `potential_fn`, got "
            + ("neither" if model is None else "both")
        )
    if potential_fn is not None and values["batch_size"] not in (None, "auto"):
        raise ValueError(
            "batch_size needs a model, whose plates can be subsampled: with potential_fn, "
            "draw the minibatch in `potential_fn(z, rng_key)`"
        )
    if potential_fn is not None and values["constrained_init"]:
        raise ValueError(
            "constrained_init=True needs a model, whose sites have supports: drop constrained_init"
        )
    if values["expansion"] is not None and (
        isinstance(values["dense_mass"], bool | tuple) or values["inverse_mass_matrix"] is not None
    ):
        raise ValueError(
            "an expanded chain moves in the coordinates of its factors: expected no dense_mass and "
            "no inverse_mass_matrix with expansion"
        )
    given = values["inverse_mass_matrix"]
    given = [*given.values()] if isinstance(given, dict) else [given]
    if values["dense_mass"] is False and any(np.ndim(matrix) == 2 for matrix in given):
        raise ValueError(
            "dense_mass=False scales each parameter alone: expected inverse_mass_matrix of shape "
            "(D,), got a matrix; pass its diagonal, or dense_mass=True"
        )
    interval, expansion = values["anchor_interval"], values["expansion"]
    if interval is not None and not values["control_variate"]:
        raise ValueError(
            f"anchor_interval={interval} needs a control variate: pass "
            "control_variate=True, or drop anchor_interval"
        )
    if expansion is not None and model is None and expansion.target == "factors":
        raise ValueError(
            "target='factors' replaces the prior of a model, and potential_fn has none to "
            "find: pass a model, or use target='posterior'"
        )
