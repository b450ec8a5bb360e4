"""Runs of a model on shapes alone: nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import random
from numpyro import handlers
from numpyro.infer.initialization import init_to_uniform

from .minibatch import SubsamplePlates


def abstract_trace(
    model: Callable, args: tuple, kwargs: dict, batch_sizes: Mapping[str, int]
) -> tuple[dict[str, Any], SubsamplePlates]:
    """The sites, and the handler that knows the plates; an error has the sites before it."""
    record = handlers.trace()
    plates = SubsamplePlates()

    def run() -> None:
        plates.indices = {p: jnp.zeros(b, jnp.int32) for p, b in batch_sizes.items()}
        with record, plates:
            with_start(model)(*args, **kwargs)

    try:
        jax.eval_shape(run)
    except Exception as error:
        error.trace = record.trace  # type: ignore[attr-defined]
        raise
    return dict(record.trace), plates


def with_start(model: Callable, seed: int = 0) -> Callable:
    """The model with given values of its latent sites."""
    return handlers.substitute(
        handlers.seed(model, random.key(seed)), substitute_fn=init_to_uniform()
    )
