"""The sampling kernels."""

from .adam_sgld import AdamSGLD
from .isgd import ISGD
from .sgrld import SGRLD
from .vsgd import VSGD

__all__ = ["ISGD", "SGRLD", "VSGD", "AdamSGLD"]
