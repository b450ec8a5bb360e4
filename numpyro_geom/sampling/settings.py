"""Settings: the arguments of a kernel, each validated once, in one frozen object.

`SHARED` has the arguments that mean the same in every kernel: the check of each, its description,
and what holds in a kernel that does not have it. A kernel's constructor lists its arguments with
their defaults, and passes checks of its own arguments along.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_uniform

from .._checks import (
    check_batch_size,
    check_choice,
    check_int,
    check_model,
    check_number,
    check_strategy,
)
from ..metrics import get_metric
from ..metrics.identity import Identity
from ..model.arrowhead import Layout
from ..model.minibatch import BATCHING
from .schedules import check_step_size

SiteBlocks = tuple[tuple[str, ...], ...]
"""Sites that are scaled together, block by block."""
STRUCTURED = "structured"
"""The value of ``dense_mass`` for a scale that is structured by the groups of the model."""
LOW_RANK = "low_rank"
"""The value of ``dense_mass`` for a scale that is a diagonal and some further directions."""
LOW_RANK_LIMIT = 20_000
"""Most dimensions for which the further directions are looked for without being asked."""
DENSE_LIMIT = 256
"""Most dimensions whose matrices are formed in warm-up, and whose scale is a matrix."""

FUNCTIONS = ("model", "potential_fn", "full_potential_fn", "init_strategy")
"""Arguments that are functions: a file cannot store them."""


Validator = Callable[[str, Any], Any]
"""``(name, value) -> value``, the value as settings hold it. Raises for what is not accepted."""


class Setting(NamedTuple):
    """An argument of kernels.

    Attributes:
        check: see `Validator`.
        about: its entry in the docstrings of kernels that do not describe it themselves.
        without: the value in kernels that do not have the argument.
    """

    check: Validator
    about: str
    without: Any = None


class Settings:
    """Arguments of a kernel by name, after validation; read only.

    Read them as ``settings.temperature``, and so on.

    Args:
        arguments: the constructor's arguments by name.
        checks: checks of arguments that are not in `SHARED`, see `Setting`.
        fixed: settings that the kernel does not leave to its user.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        checks: Mapping[str, Validator],
        fixed: Mapping[str, Any],
    ) -> None:
        checks = {name: shared.check for name, shared in SHARED.items()} | dict(checks)
        values = {name: shared.without for name, shared in SHARED.items()}
        for name, value in {**arguments, **fixed}.items():
            values[name] = checks[name](name, value) if name in checks else value
        if values.get("divergence", "") is None:
            values["divergence"] = values["metric"].default_divergence
        _check_target(values)
        self.__dict__.update(values, _names=tuple(arguments), deep=False, settled=False)

    @property
    def schedule(self) -> Callable[[Any], jax.Array] | None:
        """The step size as a function of the step count; None if it is automatic."""
        given = self.step_size
        if isinstance(given, str):
            return None
        return lambda t: jnp.asarray(given(t) if callable(given) else given, float)

    @property
    def starts_anywhere(self) -> bool:
        """Whether chains start at uniform positions, so that any other is as good."""
        strategy = self.init_strategy
        return getattr(strategy, "func", strategy) is init_to_uniform

    @property
    def given_num_steps(self) -> int | None:
        """Steps per draw; None if they are automatic."""
        return None if isinstance(self.num_steps, str) else self.num_steps

    @property
    def given_friction(self) -> float | None:
        """The friction; None if it is automatic."""
        return None if isinstance(self.friction, str) else self.friction

    @property
    def scales(self) -> bool:
        """Whether chains move in scaled coordinates."""
        scaled = isinstance(self.dense_mass, bool | tuple | Layout)
        return scaled or self.dense_mass == LOW_RANK or self.inverse_mass_matrix is not None

    @property
    def moves_vector(self) -> bool:
        """Whether steps move one vector and not the sites. A vector compiles faster."""
        return (self.scales or self.deep) and isinstance(self.metric, Identity)

    @property
    def blocks(self) -> SiteBlocks:
        """The blocks of sites that are scaled together, if not all sites are one block."""
        return self.dense_mass if isinstance(self.dense_mass, tuple) else ()

    @property
    def layout(self) -> Layout | None:
        """The groups of the parameters, if the scale is structured by them."""
        return self.dense_mass if isinstance(self.dense_mass, Layout) else None

    @property
    def by_energy(self) -> bool:
        """Whether the step follows from the error of the energy, because no scale fits."""
        return self.deep and not self.scales

    @property
    def trains(self) -> bool:
        """Whether the chains of a network train first: nothing says where or how they start."""
        return self.deep and self.schedule is None and self.starts_anywhere

    @property
    def finds_scale(self) -> bool:
        """Whether a scale is searched for before the first draw, because none is given."""
        return self.scales and self.inverse_mass_matrix is None

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
        """A copy with other values. These are not validated."""
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
    found = values["dense_mass"] in (STRUCTURED, LOW_RANK)
    if found and values["inverse_mass_matrix"] is not None:
        raise ValueError(
            f"dense_mass={values['dense_mass']!r} finds the scale itself: expected no "
            "inverse_mass_matrix with it"
        )
    given = values["inverse_mass_matrix"]
    given = [*given.values()] if isinstance(given, dict) else [given]
    if values["dense_mass"] is False and any(np.ndim(matrix) == 2 for matrix in given):
        raise ValueError(
            "dense_mass=False scales each parameter alone: expected inverse_mass_matrix of shape "
            "(D,), got a matrix; pass its diagonal, or dense_mass=True"
        )


def auto_or(check: Validator, expected: str) -> Validator:
    """A check that lets ``"auto"`` pass."""

    def checked(name: str, value: Any) -> Any:
        if not isinstance(value, str):
            return check(name, value)
        if value != "auto":
            raise ValueError(f"{name} must be 'auto' or {expected}, got {value!r}")
        return value

    return checked


def one_of(choices: tuple[str, ...]) -> Validator:
    """A check of names."""
    return partial(check_choice, choices=choices)


def optional(check: Validator) -> Validator:
    """A check that lets None pass."""
    return lambda name, value: None if value is None else check(name, value)


def _order(name: str, value: Any) -> int:
    if not isinstance(value, int | np.integer) or value not in (0, 1, 2):
        raise TypeError(f"{name} must be True, False or an order 0, 1 or 2, got {value!r}")
    return int(value)


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
    blocks = _blocks(name, [*value])
    return {
        block: _covariance(f"{name}[{key!r}]", x)
        for block, (key, x) in zip(blocks, value.items(), strict=True)
    }


def _dense_mass(name: str, value: Any) -> Any:
    words = ("auto", STRUCTURED, LOW_RANK)
    if isinstance(value, bool) or (isinstance(value, str) and value in words):
        return value
    if isinstance(value, str):
        raise ValueError(
            f"{name} must be 'auto', '{STRUCTURED}', '{LOW_RANK}', True, False, None or tuples of "
            f"names of sites, got {value!r}"
        )
    return _blocks(name, value)


def _blocks(name: str, value: Any) -> SiteBlocks:
    """Tuples of site names, as in NumPyro's kernels."""
    given = None
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        given = [(block,) if isinstance(block, str) else tuple(block) for block in value]
    if given is None or not all(isinstance(site, str) for block in given for site in block):
        raise TypeError(
            f"{name} must be True, False, None, 'auto' or tuples of names of sites such as "
            f"[('a', 'b')], got {value!r}"
        )
    sites = [site for block in given for site in block]
    twice = sorted({site for site in sites if sites.count(site) > 1})
    if twice:
        raise ValueError(f"{name} must have each site in one block, got {twice} in several")
    return tuple(given)


positive = partial(check_number, above=0.0)

SHARED: dict[str, Setting] = {
    "model": Setting(optional(check_model), "a NumPyro model with continuous latent sites."),
    "potential_fn": Setting(
        optional(check_model),
        "replaces the model: ``potential_fn(z)`` or ``potential_fn(z, rng_key)``.",
    ),
    "metric": Setting(
        lambda _, value: get_metric(value),
        """``"identity"``, ``"rmsprop"``, ``"wenzel"``, ``"monge"``, ``"shampoo"``, a metric object,
        or a dict from patterns of site names to metrics. With a momentum: the mass matrix.""",
        without=Identity(),
    ),
    "friction": Setting(
        auto_or(positive, "a positive number"),
        """gamma in units of 1 / h, or ``"auto"``. The papers' momentum decay is gamma h.""",
    ),
    "step_size": Setting(
        auto_or(lambda _, value: check_step_size(value), "a positive number or a schedule"),
        """``"auto"``, a number h, or a schedule: any function of the step count.""",
        without="auto",
    ),
    "batch_size": Setting(
        auto_or(lambda _, value: check_batch_size(value), "rows per step, or None"),
        """rows per step: an int, a dict plate -> int, or None for all rows. ``"auto"`` chooses by
        measured noise. It takes all rows up to 2,048, where gradients cost less than a choice, if
        ``step_size`` is given, and if the model cannot be subsampled.""",
    ),
    "num_steps": Setting(
        auto_or(check_int, "an integer of at least 1"),
        """steps between two draws, or ``"auto"`` for half a relaxation time (with a momentum, a
        whole one).""",
        without="auto",
    ),
    "temperature": Setting(partial(check_number, least=0.0), "tau, at least 0.", without=1.0),
    "batching": Setting(
        one_of(BATCHING),
        """``"replacement"``, ``"stratified"`` or ``"epoch"``.""",
        without="replacement",
    ),
    "bias_tolerance": Setting(
        positive, """relative error of the variances that ``"auto"`` may cause.""", without=0.1
    ),
    "control_variate": Setting(
        auto_or(_order, "True, False or an order 0, 1 or 2"),
        """True (order 1) corrects minibatch gradients by those at an anchor: far less noise, for
        two gradients per step. Order 2 also uses the Hessian there, for about four; it needs groups
        or at most 256 parameters. ``"auto"`` chooses by measured noise, if coordinates are scaled.
        """,
        without=False,
    ),
    "dense_mass": Setting(
        optional(_dense_mass),
        """how warm-up scales the coordinates, to which the metric and h refer. True: any
        directions. False: each parameter alone. Tuples of site names: the sites of a tuple
        together. ``"structured"``: the groups or times of the model. ``"low_rank"``: each
        parameter, and the stiffest and flattest directions. None: not at all, unless a matrix is
        given.
        ``"auto"``: True up to 256 parameters; beyond, and where it is None, see the page on
        scale.""",
    ),
    "inverse_mass_matrix": Setting(
        optional(_covariances),
        """the scale to start from, shape (D,) or (D, D), as in `numpyro.infer.NUTS`, with sites in
        the order of their names; or a dict from tuples of sites to such arrays. None finds one.
        Warm-up renews it from its draws.""",
    ),
    "init_strategy": Setting(
        check_strategy,
        "where the chains start: NumPyro's strategy, or `init_to_draws`.",
        without=init_to_uniform,
    ),
}
"""Arguments that several kernels have, with the same meaning in each."""


def documented(cls: type) -> str | None:
    """The docstring of a kernel, with an entry for each shared argument that it leaves out."""
    text = inspect.cleandoc(cls.__doc__ or "")
    head, title, rest = text.partition("\nArgs:\n")
    if not title:
        return cls.__doc__
    own, blank, tail = rest.partition("\n\n")
    parts = re.split(r"^ {4}(?=\w+: )", own, flags=re.MULTILINE)[1:]
    entries = {part.partition(":")[0]: f"    {part.rstrip()}" for part in parts}
    for name in SHARED.keys() - entries.keys():
        about = " ".join(SHARED[name].about.split())
        entries[name] = textwrap.fill(
            f"{name}: {about}", 96, initial_indent=" " * 4, subsequent_indent=" " * 8
        )
    names = [name for name in inspect.signature(cls).parameters if name in entries]
    return head + title + "\n".join(entries[name] for name in names) + blank + tail
