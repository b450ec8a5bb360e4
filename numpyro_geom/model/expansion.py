"""Parameter expansion: sample factors P, V, Q whose product W = P V Q is the model's matrix.

A chain on the factors moves W along other paths than a chain on W itself. With G the gradient of
the energy in W, the gradient in V is P' G Q'. So the factors are a metric that the chain learns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from .._checks import check_choice, check_int, check_number
from .._util import tree_vdot
from .expansion_sides import as_pairs, check_names, keep, sides_of
from .factors import LowRank, Side, divide, half_squares, identity, log_abs_det, on_side, times

PyTree = Any
Expanded = dict[str, dict[str, Any]]

TARGETS = ("posterior", "factors")


@dataclasses.dataclass(frozen=True)
class Expansion:
    """Matrix-shaped sites as products W = P_c ... P_1 V Q_1 ... Q_e.

    For a site W of shape (m, n), P has shape (m, m) and Q has shape (n, n). A convolution kernel
    (k, k, in, out) is multiplied on its channels, and each spatial slice has the same factors. Any
    other named site of more than two axes is multiplied on its last two axes. A vector that shares
    a side is multiplied by Q, for ``x @ W + b`` (the papers' b = P a is the transpose). A vector
    without a matrix, of a normalisation layer, is v Q. ``target`` sets the target of (V, P, Q):

    - ``"posterior"``: the law of W is the model's, exp(-U / tau), for any factors. The energy is
      U(P V Q) - tau [n log|det P| + m log|det Q| + log q(P, Q)]. Each vector on the side adds one
      log-determinant. For a kernel a log-determinant counts once for each spatial slice and each
      channel of the other side. W is then independent of (P, Q), whose law is q. Under q each entry
      is normal about the identity with standard deviation ``factor_scale`` / sqrt(side).
    - ``"factors"``: the papers' target. The model's priors of W and of the vectors that share a
      side are replaced: V, the vectors and the factors are N(0, scale^2). This CHANGES THE MODEL.
      The implied prior of W is that of products of Gaussian matrices, with heavier tails. The
      energy is U(P V Q) without the replaced priors (see `WithoutPrior`), minus the log density of
      the new priors. The whole energy is tempered.

    Choose it for networks whose chains explore too little; for these the papers report more diverse
    draws. On a Gaussian, expansion only costs: the factors' own curvature bounds the step size, and
    a relaxation takes more steps. Cost per step: the products. ``"posterior"`` adds one LU
    decomposition of each factor: O(m^3), or O(m rank^2 + rank^3) for a low rank, which forms no m
    by m matrix. All factors are the identity at the start.

    Args:
        left: number of factors on the left, at least 0.
        right: number of factors on the right, at least 0. A vector on its own has these factors.
        rank: None for full factors. For factors D + L1' L2, the number of rows of L1 and L2: an
            integer up to the side, or a fraction of the side below 1 (rounded down, at least 1).
        sites: what to expand. None for all sites with two axes, or with four axes as convolution
            kernels; names; or a mapping from names to `Factors`.
        biases: None, or a naming rule that pairs a bias with its W: two words such as
            ``("kernel", "bias")``. The second word replaces the last occurrence of the first word
            in W's name. If the result names a 1-D site, that site shares W's right factors.
        target: ``"posterior"`` or ``"factors"``.
        factor_scale: above 0. Under ``"posterior"`` it is c in the standard deviation
            c / sqrt(side) of the factors' entries about the identity (of L1's and L2's entries
            about 0). Under both targets it is also c for L1's entries at the start. From about 0.5
            on, factors come close to singular.
        factor_friction: friction on the factors, relative to the friction on the sites; above 0.
            The papers' value is 0.01, with which energy stays in the factors for long.
        prior_scale: standard deviation of V and the vectors under ``"factors"``.
        factor_prior_scale: standard deviation of the factors' entries under ``"factors"``.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_geom import Expansion, Factors
        >>> position = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3), "scale": jnp.zeros(())}
        >>> expansion = Expansion(left=0, sites={"w": Factors(vectors="b")})
        >>> expanded = expansion.init(jax.random.key(0), position)
        >>> jax.tree.map(jnp.shape, expanded["factors"])
        {'w': {'right': ((3, 3),)}}
        >>> bool(jnp.all(expansion.merge(expanded)["w"] == position["w"]))
        True

    References:
        Kim, Nam, Yun, Yang, Lee, "Parameter Expanded Stochastic Gradient Markov Chain Monte
        Carlo", ICLR 2025, Eq. 9 (layers), Eq. 16 (kernels), appendix B.6 (low rank). The target
        ``"posterior"`` is ours, and the default. Other deviations: the vectors of a normalisation
        layer share one product, of ``right`` factors (in the paper's text each has its own, on
        both sides, but its parameter counts fit one shared product); factors are square. The
        paper's N(0, 0.5) for factors is read as a variance; the start is the identity.
    """

    left: int = 1
    right: int = 1
    rank: int | float | None = None
    sites: Any = None
    biases: tuple[str, str] | None = None
    target: Literal["posterior", "factors"] = "posterior"
    factor_scale: float = 0.25
    factor_friction: float = 1.0
    prior_scale: float = 1.0
    factor_prior_scale: float = math.sqrt(0.5)

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            keep(self, name, check_int(name, getattr(self, name), least=0))
        keep(self, "rank", _check_rank(self.rank))
        keep(self, "sites", as_pairs(self.sites))
        own = any(factors.left or factors.right for _, factors in self.sites or ())
        if self.left == 0 and self.right == 0 and not own:
            raise ValueError("left and right are both 0: expected at least one factor on a side")
        if self.biases is not None:
            keep(self, "biases", check_names("biases", self.biases))
            if len(self.biases) != 2 or not all(self.biases):
                raise ValueError(
                    "biases must be two words, what W's name has and what its bias's has in its "
                    f"place, such as ('kernel', 'bias'), got {self.biases!r}"
                )
        check_choice("target", self.target, TARGETS)
        for name in ("factor_scale", "factor_friction", "prior_scale", "factor_prior_scale"):
            keep(self, name, check_number(name, getattr(self, name), above=0.0))

    def check(self, position: PyTree) -> None:
        """Raise TypeError or ValueError if the settings do not fit a position."""
        sides_of(self, position)

    def replaced(self, position: PyTree) -> tuple[str, ...]:
        """Names of the multiplied sites, whose prior ``"factors"`` replaces."""
        return tuple(sorted({name for side in sides_of(self, position) for name in side.members}))

    def init(self, rng_key: jax.Array, position: PyTree) -> Expanded:
        """The expanded position with identity factors; it merges to ``position`` exactly.

        Args:
            rng_key: for L1 of a low rank.
            position: dict site -> array.

        Returns:
            ``{"sites": {site: array}, "factors": {site: {"left": (P_1, ...), "right": (...)}}}``.
            All sites are in ``"sites"``, with V and a in the place of W and b. The factors are
            arrays, or `LowRank`. A side without factors is left out. The first factor is next to V.
        """
        sides = sides_of(self, position)
        factors: dict[str, dict] = {}
        for key, side in zip(random.split(rng_key, len(sides)), sides, strict=True):
            factors.setdefault(side.site, {})[side.side] = tuple(
                self._first_factor(k, side) for k in random.split(key, side.num_factors)
            )
        return {"sites": dict(position), "factors": factors}

    def merge(self, expanded: Expanded) -> dict[str, jax.Array]:
        """The position dict site -> array of one expanded position; ``vmap`` it over chains."""
        return self._multiply(expanded["sites"], expanded["factors"], times)

    def contract(self, position: PyTree, expanded: Expanded) -> Expanded:
        """The expanded position with the factors of ``expanded`` that merges to ``position``.

        Use it when something else has moved the position. It is accurate to rounding times the
        condition numbers of the factors.
        """
        factors = expanded["factors"]
        backwards = jax.tree.map(
            lambda side: side[::-1], factors, is_leaf=lambda x: isinstance(x, tuple)
        )
        return {"sites": self._multiply(position, backwards, divide), "factors": factors}

    def curvature_factor(self, position: PyTree) -> jax.Array:
        """Upper bound on the growth of the largest curvature, for a chain that starts here.

        It is the largest eigenvalue of J J', with J the derivative of the merged position in the
        expanded one where all factors are the identity. The Hessian H of the energy at a mode
        becomes J'HJ, whose eigenvalues are at most this factor times the largest eigenvalue of H.
        For `SGRLD`, divide a step size that is right without the expansion by this factor. For
        kernels with a momentum, divide by its square root. For one matrix with singular values up
        to s the factor is 1 + (left + right) s^2. The automatic step sizes measure the curvature
        itself and do not need this factor.

        Args:
            position: dict site -> array, where the chain starts.

        Returns:
            A scalar >= 1, by 50 power iterations: a close lower bound of the eigenvalue.
        """
        _, push = jax.linearize(self.merge, self.init(random.key(0), position))
        pull = jax.linear_transpose(push, self.init(random.key(0), position))

        def towards(_: Any, carry: tuple) -> tuple:
            direction, _ = carry
            image = push(*pull(direction))
            length = jnp.sqrt(tree_vdot(image, image))
            return jax.tree.map(lambda x: x / length, image), length

        start = jax.tree.map(jnp.ones_like, position)
        return lax.fori_loop(0, 50, towards, (start, jnp.zeros_like(tree_vdot(start, start))))[1]

    def correction(self, expanded: Expanded, temperature: Any) -> jax.Array:
        """What the expanded energy adds to U of the merged position, up to a constant."""
        total: Any = 0.0
        for side in sides_of(self, expanded["sites"]):
            for factor in expanded["factors"][side.site][side.side]:
                if self.target == "factors":
                    total += half_squares(factor, self.factor_prior_scale)
                    continue
                off = jax.tree.map(jnp.subtract, factor, identity(side))
                scale = self.factor_scale / math.sqrt(side.dimension)
                log_det = side.multiplicity * log_abs_det(factor)
                total += temperature * (half_squares(off, scale) - log_det)
        if self.target == "factors":
            own = [expanded["sites"][name] for name in self.replaced(expanded["sites"])]
            total += half_squares(own, self.prior_scale)
        return total

    def friction_scale(self, expanded: Expanded) -> Expanded:
        """Relative friction: a pytree of numbers, 1 for sites and ``factor_friction`` for factors.

        Each number stands for a whole array: the tree structure is that of ``expanded``.
        """
        return {
            "sites": jax.tree.map(lambda _: 1.0, expanded["sites"]),
            "factors": jax.tree.map(lambda _: self.factor_friction, expanded["factors"]),
        }

    def _first_factor(self, rng_key: jax.Array, side: Side) -> Any:
        factor = identity(side)
        if not isinstance(factor, LowRank):
            return factor
        # L1 = L2 = 0 would be a stationary point of every energy
        noise = random.normal(rng_key, factor.first.shape, side.dtype)
        return factor._replace(first=noise * (self.factor_scale / math.sqrt(side.dimension)))

    def _multiply(self, sites: PyTree, factors: PyTree, apply: Callable) -> dict[str, jax.Array]:
        """Apply the factors of every side, in their order, to the sites on that side."""
        sites = dict(sites)
        for side in sides_of(self, sites):
            for name in side.members:
                for factor in factors[side.site][side.side]:
                    sites[name] = on_side(sites[name], factor, side.side, apply)
        return sites


def _check_rank(rank: Any) -> int | float | None:
    if rank is None:
        return None
    value = rank.item() if getattr(rank, "shape", None) == () else rank
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if (whole and value >= 1) or (isinstance(value, float) and 0 < value < 1):
        return int(value) if whole else value
    error = ValueError if whole or isinstance(value, float) else TypeError
    raise error(
        "rank must be an integer of at least 1, None, or a fraction of the side between 0 and 1, "
        f"got {rank!r}"
    )
