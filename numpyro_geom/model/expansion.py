"""Parameter expansion: sample factors P, V, Q whose product W = P V Q is the model's matrix.

A chain on the factors moves W along other paths than a chain on W itself. With G the gradient of
the energy in W, the gradient in V is P' G Q'. So the factors are a metric that the chain learns.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro.distributions import constraints
from numpyro.primitives import Messenger

from .. import _linalg
from .._checks import check_choice, check_int, check_number
from .._util import PyTree, tree_vdot
from .potential import Potential, in_coordinates

Expanded = dict[str, dict[str, Any]]

TARGETS = ("posterior", "factors")


class LowRank(NamedTuple):
    """The factor D + L1' L2 on a side of dimension m.

    Attributes:
        diagonal: D, of shape (m,).
        first: L1, of shape (rank, m).
        second: L2, of shape (rank, m).
    """

    diagonal: jax.Array
    first: jax.Array
    second: jax.Array


class Side(NamedTuple):
    """One side of one site that has factors: names, shapes and counts.

    Attributes:
        site: the key in ``"factors"``.
        side: ``"left"`` or ``"right"``.
        dimension: number of rows of a factor.
        num_factors: number of factors.
        rank: rows of L1 and L2, None for full factors.
        members: the sites that the factors multiply.
        multiplicity: how often each determinant counts: the rows of all members together.
        dtype: dtype of the site and of its factors.
    """

    site: str
    side: str
    dimension: int
    num_factors: int
    rank: int | None
    members: tuple[str, ...]
    multiplicity: int
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors of one site, where they differ from the general ones of `Expansion`.

    Args:
        left: number of factors on the left, the input side of a site W in ``x @ W``. None takes
            the number of `Expansion`.
        right: number of factors on the right, the output side; None as for ``left``.
        vectors: name or names of 1-D sites that share the factors of one side: the bias of a
            layer, or the other vectors of a normalisation layer.
        side: the side that the vectors share: ``"right"`` for ``x @ W + b``, ``"left"`` for
            ``W @ x + b``.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: if there is no factor at all, or no such side.
    """

    left: int | None = None
    right: int | None = None
    vectors: tuple[str, ...] = ()
    side: Literal["left", "right"] = "right"

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                _set(self, name, check_int(name, getattr(self, name), least=0))
        if self.left == 0 and self.right == 0:
            raise ValueError("left and right are both 0: expected a factor, or leave the site out")
        given: Any = self.vectors
        _set(
            self, "vectors", _check_names("vectors", (given,) if isinstance(given, str) else given)
        )
        check_choice("side", self.side, ("left", "right"))


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
      W then has the prior of a product of Gaussian matrices, with heavier tails. The energy is
      U(P V Q) without the replaced priors (see `WithoutPrior`), minus the log density of the new
      priors. The whole energy is tempered.

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
            _set(self, name, check_int(name, getattr(self, name), least=0))
        _set(self, "rank", _check_rank(self.rank))
        _set(self, "sites", _as_pairs(self.sites))
        own = any(factors.left or factors.right for _, factors in self.sites or ())
        if self.left == 0 and self.right == 0 and not own:
            raise ValueError("left and right are both 0: expected at least one factor on a side")
        if self.biases is not None:
            _set(self, "biases", _check_names("biases", self.biases))
            if len(self.biases) != 2 or not all(self.biases):
                raise ValueError(
                    "biases must be two words, what W's name has and what its bias's has in its "
                    f"place, such as ('kernel', 'bias'), got {self.biases!r}"
                )
        check_choice("target", self.target, TARGETS)
        for name in ("factor_scale", "factor_friction", "prior_scale", "factor_prior_scale"):
            _set(self, name, check_number(name, getattr(self, name), above=0.0))

    def replaced(self, position: PyTree) -> tuple[str, ...]:
        """Names of the multiplied sites, whose prior ``"factors"`` replaces.

        Raises:
            TypeError: for a position that is no dict of arrays.
            ValueError: if the settings do not fit the position.
        """
        return tuple(sorted({name for side in _sides(self, position) for name in side.members}))

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
        sides = _sides(self, position)
        factors: dict[str, dict] = {}
        for key, side in zip(random.split(rng_key, len(sides)), sides, strict=True):
            factors.setdefault(side.site, {})[side.side] = tuple(
                self._first_factor(k, side) for k in random.split(key, side.num_factors)
            )
        return {"sites": dict(position), "factors": factors}

    def merge(self, expanded: Expanded) -> dict[str, jax.Array]:
        """The position dict site -> array of one expanded position; ``vmap`` it over chains."""
        return self._multiply(expanded["sites"], expanded["factors"], _product)

    def contract(self, position: PyTree, expanded: Expanded) -> Expanded:
        """The expanded position with the factors of ``expanded`` that merges to ``position``.

        Use it when something else has moved the position. It is accurate to rounding times the
        condition numbers of the factors.
        """
        factors = expanded["factors"]
        backwards = jax.tree.map(
            lambda side: side[::-1], factors, is_leaf=lambda x: isinstance(x, tuple)
        )
        return {"sites": self._multiply(position, backwards, _quotient), "factors": factors}

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
        for side in _sides(self, expanded["sites"]):
            for factor in expanded["factors"][side.site][side.side]:
                if self.target == "factors":
                    total += _half_squares(factor, self.factor_prior_scale)
                    continue
                off = jax.tree.map(jnp.subtract, factor, _identity(side))
                scale = self.factor_scale / math.sqrt(side.dimension)
                log_det = side.multiplicity * _log_abs_det(factor)
                total += temperature * (_half_squares(off, scale) - log_det)
        if self.target == "factors":
            own = [expanded["sites"][name] for name in self.replaced(expanded["sites"])]
            total += _half_squares(own, self.prior_scale)
        return total

    def friction_scale(self, expanded: Expanded) -> Expanded:
        """Relative friction: a pytree of numbers, 1 for sites and ``factor_friction`` for factors.

        Each number stands for a whole array of ``expanded``.
        """
        return {
            "sites": jax.tree.map(lambda _: 1.0, expanded["sites"]),
            "factors": jax.tree.map(lambda _: self.factor_friction, expanded["factors"]),
        }

    def _first_factor(self, rng_key: jax.Array, side: Side) -> Any:
        factor = _identity(side)
        if not isinstance(factor, LowRank):
            return factor
        # L1 = L2 = 0 would be a stationary point of every energy
        noise = random.normal(rng_key, factor.first.shape, side.dtype)
        return factor._replace(first=noise * (self.factor_scale / math.sqrt(side.dimension)))

    def _multiply(self, sites: PyTree, factors: PyTree, apply: Callable) -> dict[str, jax.Array]:
        """Apply the factors of every side, in their order, to the sites on that side."""
        sites = dict(sites)
        for side in _sides(self, sites):
            for name in side.members:
                for factor in factors[side.site][side.side]:
                    sites[name] = _on_side(sites[name], factor, side.side, apply)
        return sites


class WithoutPrior(Messenger):
    """A model with a flat prior on some latent sites: they stay latent and have density one.

    ``Expansion(target="factors")`` uses this model and gives these sites another prior. The
    parameters of the old prior lose their link to the site: with w ~ N(0, s), s no longer depends
    on w.

    Raises:
        ValueError: when the model runs, for a site whose support is not the whole space or that is
            observed.
    """

    def __init__(self, fn: Callable | None = None, names: Sequence[str] = ()):
        super().__init__(fn)
        self.names = frozenset(_check_names("names", names))

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

    Under ``target="factors"`` it takes the potential of `WithoutPrior`. Apply a control variate
    before the expansion: its anchor is a position of the model.
    """
    return in_coordinates(
        potential, expansion.merge, lambda expanded: expansion.correction(expanded, temperature)
    )


def _sides(expansion: Any, position: PyTree) -> list[Side]:
    """Every side that has factors under an `Expansion`, checked against a position's shapes.

    Raises:
        TypeError: if the position is not a dict site -> array.
        ValueError: for sites that do not exist or have the wrong shape, and for no sites at all.
    """
    if not isinstance(position, Mapping):
        raise TypeError(
            f"expected a position that is a dict site -> array, got {type(position).__name__}: "
            "an expansion needs a model, or a potential_fn of a dict"
        )
    for name, value in position.items():
        if not jax.tree_util.all_leaves([value]):
            raise TypeError(
                "expected a position that is a dict site -> array, got a "
                f"{type(value).__name__} at {name!r}: flatten it, or drop the expansion"
            )
    shapes = {name: jnp.shape(value) for name, value in position.items()}
    given = expansion.sites
    if given is None:
        given = tuple((n, Factors()) for n, shape in shapes.items() if len(shape) in (2, 4))
    sides: list[Side] = []
    owner: dict[str, str] = {}
    for site, setting in given:
        counts = {
            "left": expansion.left if setting.left is None else setting.left,
            "right": expansion.right if setting.right is None else setting.right,
        }
        vectors = setting.vectors or _by_rule(expansion.biases, site, shapes, counts)
        for name in (site, *vectors):
            if name not in shapes:
                raise ValueError(f"no site {name!r} to expand: expected one of {list(shapes)}")
            if name in owner:
                raise ValueError(
                    f"site {name!r} is multiplied with {owner[name]!r} and with {site!r}: "
                    "expected every site once, as a key of `sites` or in one `vectors`"
                )
            owner[name] = site
        dtype = jnp.result_type(position[site])
        sides += _sides_of_site(site, shapes, counts, setting, vectors, expansion.rank, dtype)
    if expansion.biases is not None and len(owner) == len(given):
        raise ValueError(
            f"biases={expansion.biases!r} pairs no bias with a matrix: expected names such as "
            f"'{expansion.biases[0]}' and '{expansion.biases[1]}', got the sites {list(shapes)}"
        )
    if not sides:
        raise ValueError(
            f"nothing to expand: expected a site with two axes or four, got {shapes}; name "
            "others in `sites`, or drop the expansion"
        )
    return sides


def _by_rule(
    words: tuple[str, str] | None, site: str, shapes: Mapping, counts: Mapping
) -> tuple[str, ...]:
    """The bias that shares the right factors of a site, by the naming rule ``biases``."""
    if words is None or counts["right"] == 0 or words[0] not in site:
        return ()
    start, _, end = site.rpartition(words[0])
    name = start + words[1] + end
    return (name,) if len(shapes.get(name, ())) == 1 else ()


def _sides_of_site(
    site: str,
    shapes: Mapping[str, tuple[int, ...]],
    counts: Mapping[str, int],
    setting: Factors,
    vectors: tuple[str, ...],
    rank: int | float | None,
    dtype: Any,
) -> list[Side]:
    shape = shapes[site]
    if not shape:
        raise ValueError(f"site {site!r} is a scalar: expected a matrix, a kernel or a vector")
    axes = {"right": -1} if len(shape) == 1 else {"left": -2, "right": -1}
    if len(shape) == 1 and (setting.left or setting.side == "left"):
        raise ValueError(f"site {site!r} is a vector and has right factors only, got {setting}")
    axes = {side: axis for side, axis in axes.items() if counts[side]}
    if not axes:
        raise ValueError(
            f"site {site!r} of shape {shape} gets no factor: expected Factors(left=1) or "
            "Factors(right=1) for it in `sites` (a vector has right factors only)"
        )
    for name in vectors:
        if setting.side not in axes:
            raise ValueError(
                f"vector {name!r} shares the {setting.side} factors of {site!r}, which has none: "
                f"expected Factors({setting.side}=1), or the vector left out"
            )
        if shapes[name] != (shape[axes[setting.side]],):
            raise ValueError(
                f"vector {name!r} shares the {setting.side} side of {site!r} and must have the "
                f"shape {(shape[axes[setting.side]],)}, got {shapes[name]}: the other side is "
                "Factors(side='left') for W @ x + b, Factors(side='right') for x @ W + b"
            )
    sides = []
    for side, axis in axes.items():
        dimension = shape[axis]
        if isinstance(rank, int) and rank > dimension:
            raise ValueError(
                f"rank is {rank} and the {side} side of site {site!r} has dimension {dimension}: "
                "expected at most this dimension, or a fraction of the side such as rank=0.25"
            )
        own = max(1, int(rank * dimension)) if isinstance(rank, float) else rank
        shared = vectors if setting.side == side else ()
        multiplicity = math.prod(shape) // dimension + len(shared)
        members = (site, *shared)
        sides.append(Side(site, side, dimension, counts[side], own, members, multiplicity, dtype))
    return sides


def _as_pairs(sites: Any) -> tuple[tuple[str, Factors], ...] | None:
    """``sites`` as pairs (name, `Factors`); such pairs are accepted as well."""
    if sites is None:
        return None
    if isinstance(sites, Mapping):
        pairs = tuple(sites.items())
    elif isinstance(sites, tuple) and all(isinstance(pair, tuple) for pair in sites):
        pairs = sites
    else:
        pairs = tuple((name, Factors()) for name in _check_names("sites", sites))
    if not pairs:
        raise ValueError("sites is empty: expected names, or None for all matrices")
    for name, setting in pairs:
        if not isinstance(name, str) or not isinstance(setting, Factors):
            raise TypeError(
                "sites must map names to Factors(...), such as {'w': Factors(left=0)}, got "
                f"{name!r}: {setting!r}"
            )
    return pairs


def _check_names(label: str, names: Any) -> tuple[str, ...]:
    """A sequence of site names, as a tuple."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"{label} must be a sequence of names, got {names!r}")
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise TypeError(f"{label} must be names of sites, got {wrong[0]!r}")
    return tuple(names)


def _set(settings: Any, name: str, value: Any) -> None:
    """Set a field of a frozen dataclass. Only its own constructor may call this."""
    object.__setattr__(settings, name, value)


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


# Factors act on the last axis from the right; the left side is the right side of the transpose.
# Products are exact to the dtype on every device, because W must match the position exactly.
_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def _identity(side: Side) -> Any:
    """The identity factor of a side."""
    if side.rank is None:
        return jnp.eye(side.dimension, dtype=side.dtype)
    none = jnp.zeros((side.rank, side.dimension), side.dtype)
    return LowRank(jnp.ones(side.dimension, side.dtype), none, none)


def _on_side(x: jax.Array, factor: Any, side: str, apply: Callable) -> jax.Array:
    """P x for the left side, x Q for the right side; ``apply`` is the product or its inverse."""
    if side == "right":
        return apply(x, factor)
    if isinstance(factor, LowRank):
        factor = LowRank(factor.diagonal, factor.second, factor.first)
    else:
        factor = factor.T
    return apply(x, factor) if x.ndim == 1 else apply(x.mT, factor).mT


def _product(x: jax.Array, factor: Any) -> jax.Array:
    """The product of x and a factor."""
    if isinstance(factor, LowRank):
        return x * factor.diagonal + _matmul(_matmul(x, factor.first.T), factor.second)
    return _matmul(x, factor)


def _quotient(x: jax.Array, factor: Any) -> jax.Array:
    """The y whose product with the factor is x."""
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(factor, LowRank):
        rows = rows / factor.diagonal
        part = _matmul(_matmul(rows, factor.first.T), _linalg.inverse(_capacitance(factor)))
        rows = rows - _matmul(part, factor.second / factor.diagonal)
    else:
        rows = _matmul(rows, _linalg.inverse(factor))
    return rows.reshape(x.shape)


def _log_abs_det(factor: Any) -> jax.Array:
    """Log of the absolute determinant of a factor."""
    if isinstance(factor, LowRank):
        small = _linalg.log_abs_det(_capacitance(factor))
        return jnp.sum(jnp.log(jnp.abs(factor.diagonal))) + small
    return _linalg.log_abs_det(factor)


def _capacitance(factor: LowRank) -> jax.Array:
    """I + L2 D^-1 L1', of shape (rank, rank), whose determinant is det P / det D."""
    own = _matmul(factor.second / factor.diagonal, factor.first.T)
    return jnp.eye(own.shape[0], dtype=own.dtype) + own


def _half_squares(tree: PyTree, scale: float) -> jax.Array:
    """The energy of normal numbers of standard deviation ``scale``, up to a constant."""
    squares = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)]
    return functools.reduce(jnp.add, squares) / (2 * scale**2)
