"""Fisher information: of NumPyro's distributions, of priors, and of the sites of a model."""

from . import scalars, vectors  # noqa: F401 (closed forms, which register themselves)
from .prior import prior_root
from .root import fisher_root

__all__ = ["fisher_root", "prior_root"]
