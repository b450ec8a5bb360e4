"""The samplers. Each is a class with explicit arguments and defines an algorithm as a value."""

from .ggmc import GGMC
from .microcanonical import Microcanonical
from .sghmc import SGHMC
from .sgnht import SGNHT
from .sgrld import SGRLD

__all__ = ["GGMC", "SGHMC", "SGNHT", "SGRLD", "Microcanonical"]
