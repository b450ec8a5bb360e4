"""The sampling kernels."""

from .sgrld import SGRLD

__all__ = ["SGRLD"]
