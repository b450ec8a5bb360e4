"""Fisher information: of NumPyro's distributions, of priors, and of the sites of a model."""

from . import closed_forms  # noqa: F401 (the closed forms register themselves)
from .prior import prior_root
from .root import fisher_root

__all__ = ["fisher_root", "prior_root"]
