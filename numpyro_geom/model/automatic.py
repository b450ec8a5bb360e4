"""Automatic arguments: some follow from the model alone, others are left to a measurement."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .._warning import warn_outside
from ..metrics.by_site import BySite
from ..metrics.identity import Identity
from ..sampling.settings import DENSE_LIMIT, Settings
from ..warmup.start import FEW_ROWS, FIRST_ROWS
from .minibatch import Subsampling
from .plates import read_subsampling

PyTree = Any

CHOSEN = ("batch_size", "control_variate")
"""Arguments whose automatic values are chosen by measurement."""


def planned(
    settings: Settings, args: tuple, kwargs: dict, num_warmup: int
) -> tuple[Subsampling, Any]:
    """The minibatches, and rows per step in the form of ``batch_size``.

    Automatic minibatches are used only with many rows and an automatic step size.

    Warns:
        UserWarning: for many rows in a model that cannot be subsampled.
    """
    read = partial(read_subsampling, settings.model, args, kwargs, batching=settings.batching)
    if settings.batch_size != "auto":
        return read(settings.batch_size), settings.batch_size
    plan = read(None)
    adapts = settings.schedule is None and num_warmup > 0 and not getattr(settings, "adjusted", 0)
    if plan.batch_sizes or plan.num_data <= FEW_ROWS or not adapts:
        return plan, None
    try:
        return read(FIRST_ROWS), FIRST_ROWS
    except ValueError as error:
        warn_outside(
            f"every step takes all {plan.num_data} rows, since minibatches are not possible: "
            f"{error}. Pass batch_size=None to take all rows without this warning",
            UserWarning,
        )
        return plan, None


def resolved(
    settings: Settings, plan: Subsampling | None, rows: Any, position: PyTree, num_warmup: int
) -> tuple[Settings, tuple[str, ...]]:
    """Settings with a value for each automatic argument.

    Args:
        settings: the kernel's settings.
        plan: the minibatches; None without a model.
        rows: rows per step, in the form of ``batch_size``.
        position: position of one chain.
        num_warmup: draws of warm-up.

    Returns:
        The settings, and the names of those arguments in `CHOSEN` whose values only serve for
        measuring.
        measure.
    """
    found = settings.with_values(
        dense_mass=_dense_mass(settings, position, num_warmup),
        batch_size=rows,
        metric=_with_interval(settings.metric, plan),
    )
    measures = (
        found.scales
        and found.schedule is None
        and num_warmup > 0
        and plan is not None
        and len(plan.batch_sizes) > 0
        and not getattr(found, "noise_correction", False)
    )
    undecided = []
    if measures and settings.batch_size == "auto" and rows is not None:
        undecided.append("batch_size")
    if settings.control_variate == "auto":
        correctable = measures and not plan.is_random  # type: ignore[union-attr]
        found = found.with_values(control_variate=correctable)
        undecided += ["control_variate"] * correctable
    return found, tuple(undecided)


def _with_interval(metric: Any, plan: Subsampling | None) -> Any:
    """The metric, with an interval of one epoch replaced by a number of steps."""
    if metric.interval is not None:
        return metric
    if not dataclasses.is_dataclass(metric):
        raise TypeError(
            "interval=None means one epoch and needs a metric that is a dataclass, got "
            f"{type(metric).__name__}: make it one, or give the interval in steps"
        )
    steps = 1 if plan is None else plan.steps_per_epoch
    return dataclasses.replace(metric, interval=steps)  # type: ignore[type-var]


def _dense_mass(settings: Settings, position: PyTree, num_warmup: int) -> Any:
    """The argument ``dense_mass``, with a value instead of ``"auto"``."""
    if not isinstance(settings.dense_mass, str):
        return settings.dense_mass
    size = sum(map(jnp.size, jax.tree.leaves(position)))
    # a given step size refers to the parameters as they are
    free = settings.schedule is None and settings.expansion is None and num_warmup > 0
    if not free or isinstance(settings.metric, BySite):  # one matrix for all would mix the sites
        return None
    if size <= DENSE_LIMIT:
        return True
    # any other metric is already a scale
    return False if isinstance(settings.metric, Identity) else None
