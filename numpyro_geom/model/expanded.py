"""The target of an expanded position: its energy, and a model without the replaced priors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpyro.distributions import constraints
from numpyro.primitives import Messenger

from .expansion import Expansion
from .expansion_sides import check_names
from .potential import Potential, in_coordinates


class WithoutPrior(Messenger):
    """A model with a flat prior on some latent sites: they stay latent and have density one.

    ``Expansion(target="factors")`` uses this model and gives these sites another prior. The
    parameters of the old prior lose their link to the site: with w ~ N(0, s), s no longer depends
    on w.

    Args:
        fn: the model.
        names: sites, see `Expansion.replaced`.

    Raises:
        ValueError: when the model runs, for a site whose support is not the whole space or that is
            observed.
    """

    def __init__(self, fn: Callable | None = None, names: Sequence[str] = ()):
        super().__init__(fn)
        self.names = frozenset(check_names("names", names))

    def process_message(self, msg: dict[str, Any]) -> None:
        """Mask the density of the sites."""
        if msg["type"] != "sample" or msg["name"] not in self.names:
            return
        support = msg["fn"].support
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        if msg["is_observed"] or support != constraints.real:
            got = "observed" if msg["is_observed"] else f"on {support}"
            raise ValueError(
                f"target='factors' puts a Gaussian in place of the prior of site {msg['name']!r}, "
                f"which is {got}: expected a latent site on the real numbers; use "
                "target='posterior', or leave the site out of `sites`"
            )
        msg["fn"] = msg["fn"].mask(False)


def with_expansion(potential: Potential, expansion: Expansion, temperature: Any) -> Potential:
    """The potential of the expanded position, with the same minibatches.

    Args:
        potential: potential of the position dict site -> array; under ``target="factors"`` the
            potential of `WithoutPrior`. Apply a control variate before the expansion: its anchor
            is a position of the model.
        expansion: the settings.
        temperature: tau of the chain.
    """
    return in_coordinates(
        potential, expansion.merge, lambda expanded: expansion.correction(expanded, temperature)
    )
