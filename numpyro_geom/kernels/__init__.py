"""The kernels: SGRLD, those with a momentum, and those of other stochastic-gradient dynamics."""

from .adam_sgld import AdamSGLD
from .ggmc import GGMC
from .isgd import ISGD
from .sghmc import PXSGHMC, SGHMC
from .sgnht import SGNHT
from .sgrld import SGRLD
from .vsgd import VSGD

__all__ = ["GGMC", "PXSGHMC", "ISGD", "SGHMC", "SGNHT", "SGRLD", "VSGD", "AdamSGLD"]
