"""Approximate samplers for comparison: none leaves the posterior invariant."""

from .adam_sgld import AdamSGLD
from .isgd import ISGD

__all__ = ["ISGD", "AdamSGLD"]
