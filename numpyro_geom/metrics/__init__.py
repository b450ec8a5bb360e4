"""Metrics: what turns a stream of gradients into a preconditioner.

See `numpyro_geom.metrics.base` for the protocol and for writing a metric in a few lines.
"""

from __future__ import annotations

from .base import Metric, MetricLike, MetricState
from .by_site import METRICS, get_metric
from .identity import Identity
from .monge import Monge
from .rmsprop import RMSprop
from .shampoo import Shampoo
from .wenzel import Wenzel

__all__ = [
    "METRICS",
    "Identity",
    "Metric",
    "MetricLike",
    "MetricState",
    "Monge",
    "RMSprop",
    "Shampoo",
    "Wenzel",
    "get_metric",
]
