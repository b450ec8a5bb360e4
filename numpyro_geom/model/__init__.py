"""A NumPyro model with its arguments, and its energy."""

from .model import Model, read

__all__ = ["Model", "read"]
