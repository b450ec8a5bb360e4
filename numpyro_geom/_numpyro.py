"""Private names of NumPyro and its `MCMC`. `kernel.py` has what is replaced during a run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from numpyro import distributions as dist
from numpyro.infer import MCMC
from numpyro.infer.util import _unconstrain_reparam

from ._util import PyTree

unconstrained_value = _unconstrain_reparam
"""The value of a site, from unconstrained values of all sites."""


def validates() -> bool:
    """Whether NumPyro checks values and parameters, as after `numpyro.enable_validation`."""
    return dist.Distribution._validate_args


def arguments_of(mcmc: MCMC) -> tuple[tuple, dict[str, Any]]:
    """The model's arguments in the last run."""
    return mcmc._args, mcmc._kwargs


def states_of(mcmc: MCMC) -> dict[str, PyTree] | None:
    """The fields that the last run has collected: arrays of shape (chains, draws, ...)."""
    return mcmc._states


def fields_of(mcmc: MCMC, extra_fields: tuple[str, ...]) -> tuple[tuple[str, ...], set[str]]:
    """State fields to collect, with the draw first; and sites to leave out of the draw."""
    field = mcmc._sample_field
    asked = (field, *mcmc._default_fields, *extra_fields)
    removed = {name.removeprefix(f"~{field}.") for name in asked if name.startswith(f"~{field}.")}
    return tuple(dict.fromkeys(name for name in asked if not name.startswith("~"))), removed


def traces_arguments(mcmc: MCMC) -> bool:
    """Whether the model's arguments are inputs of the compiled program and not constants."""
    return mcmc._jit_model_args


def holding(
    mcmc: MCMC,
    arguments: tuple[tuple, dict[str, Any]],
    states: Mapping[str, PyTree] | None = None,
    last_state: PyTree = None,
) -> MCMC:
    """A copy of an MCMC with these arguments and draws, and without any earlier run."""
    new = copy.copy(mcmc)
    new._args, new._kwargs = arguments
    new._states, new._states_flat = None if states is None else dict(states), None
    new._last_state = last_state
    return new
