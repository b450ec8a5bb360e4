"""Former place of `numpyro_geom.information.prior_root`."""

from .information import prior_root as value_root

__all__ = ["value_root"]
