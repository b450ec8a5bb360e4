"""Approximate samplers and guides for comparison: none leaves the posterior invariant."""

from .adam_sgld import AdamSGLD
from .isgd import ISGD
from .swag import SWAG

__all__ = ["ISGD", "SWAG", "AdamSGLD"]
