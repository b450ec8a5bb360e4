"""Metrics: what turns a stream of gradients into a preconditioner.

See `numpyro_geom.metrics.base` for the protocol and for writing a metric in a few lines.
"""

from __future__ import annotations

from .base import Metric, MetricLike, MetricState, get_metric
from .by_site import BySite, Scaled
from .foreign import ForeignMetric
from .identity import Identity
from .monge import Monge
from .rmsprop import RMSprop
from .shampoo import Shampoo
from .wenzel import Wenzel

METRICS: dict[str, type[Metric]] = {
    "identity": Identity,
    "rmsprop": RMSprop,
    "wenzel": Wenzel,
    "monge": Monge,
    "shampoo": Shampoo,
}
"""Metrics by name."""

__all__ = [
    "METRICS",
    "BySite",
    "ForeignMetric",
    "Identity",
    "Metric",
    "MetricLike",
    "MetricState",
    "Monge",
    "RMSprop",
    "Scaled",
    "Shampoo",
    "Wenzel",
    "get_metric",
]
