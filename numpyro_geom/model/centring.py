"""Centred or not: the coordinates of the values of many groups, given the parameters of their law.

The value x_g ~ N(m, s) of a group is centred if its coordinate is x_g, and non-centred if it is
(x_g - m) / s. Where rows say little about a group, x_g follows s, and a chain in x_g cannot reach a
small s (a funnel). Where rows say much, (x_g - m) / s follows s instead. In between, the coordinate

    u_g = c_g m + s^{c_g - 1} (x_g - m),    u_g ~ N(c_g m, s^{c_g}),

depends least on s if c_g is the share of the rows in the precision of x_g (Papaspiliopoulos,
Roberts, Skoeld 2007, A general framework for the parametrization of hierarchical models). The share
is measured group by group, where the search before the first draw has ended, and is taken at a
lower scale, see `LOWER`. If it differs little from that of the model's own coordinates, these stay.
Otherwise the search goes on in the new ones, and the share is measured again: a search in a funnel
ends at too large a scale. Then the scale itself has other coordinates as well, see `Positive`.

The times of a series depend on each other, and what follows their scale s is not one value. It is
the sum of the squares of all innovations, of which the rows know little. With a path m, where the
search has ended, and the scale s_0 there, the coordinates of a `Path` are

    x = m + (s / s_0)^{1 - c} (u - m).

They keep the neighbours of each time. The share c is that of the rows in the precision, as a mean
over the times: innovations have 1 - c of the variance in the posterior that they have in the prior.

A model may be written the other way: values z ~ N(0, 1) enter the rows as s z. The program of its
densities shows such a `Product`. The coordinates u = s^c z have the same share c, so the chain does
not depend on how the model is written. A walk may be written by its innovations: if the program
adds up s z over time, and the sums make a series of neighbours, they have the coordinates of a path
(`Sum`).

NumPyro's ``LocScaleReparam`` makes the same change to a model, but its latent site has another name
and `print_summary` of NumPyro leaves out x. Here x keeps its name, as with any other transform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.extend.core import Jaxpr, Literal
from jax.flatten_util import ravel_pytree as ravel
from numpyro.distributions import constraints
from numpyro.primitives import Messenger

from .._util import PyTree, is_traced
from .arrowhead import FEWEST_TIMES
from .jaxprs import RESHAPES, compiled, counts_of_scan, followed, inner, needed


class Path(NamedTuple):
    """The coordinates of the values x of a series.

    Attributes:
        share: c, in a shape that broadcasts to that of x.
        middle: m, in the shape of x.
        width: s_0, in a shape that broadcasts to that of x.
    """

    share: Any
    middle: Any
    width: Any

    def x_of(self, u: jax.Array, scale: jax.Array) -> jax.Array:
        """X, given s."""
        return self.middle + _power(scale / self.width, 1 - self.share) * (u - self.middle)

    def u_of(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """U, given s."""
        return self.middle + _power(scale / self.width, self.share - 1) * (x - self.middle)

    def log_det(self, scale: jax.Array) -> jax.Array:
        """Log |dx/du|, given s."""
        each = (1 - self.share) * jnp.log(scale / self.width)
        return jnp.sum(jnp.broadcast_to(each, np.shape(self.middle)))


class Sum(Path):
    """The same for a site with values z that make up a series: x is the sum of f z over time."""

    def x_of(self, u: jax.Array, scale: jax.Array, factor: jax.Array) -> jax.Array:  # type: ignore
        """Z, given s and f."""
        return jnp.diff(super().x_of(u, scale), axis=0, prepend=0) / factor

    def u_of(self, x: jax.Array, scale: jax.Array, factor: jax.Array) -> jax.Array:  # type: ignore
        """U, given s and f."""
        return super().u_of(jnp.cumsum(factor * x, axis=0), scale)

    def log_det(self, scale: jax.Array, factor: jax.Array) -> jax.Array:  # type: ignore
        """Log |dz/du|, given s and f."""
        each = jnp.broadcast_to(jnp.log(factor), np.shape(self.middle))
        return super().log_det(scale) - jnp.sum(each)


class Product(NamedTuple):
    """The coordinates of values z that enter the rows as s z alone: they are non-centred.

    Attributes:
        share: c, in a shape that broadcasts to that of z; u is s^c z.
    """

    share: Any

    def x_of(self, u: jax.Array, scale: jax.Array) -> jax.Array:
        """Z, given s."""
        return u * _power(scale, -self.share)

    def u_of(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """U, given s."""
        return x * _power(scale, self.share)

    def log_det(self, scale: jax.Array) -> jax.Array:
        """Log |dz/du|, given s."""
        return -jnp.sum(self.share * jnp.log(scale))


class Positive(NamedTuple):
    """The coordinates of positive values s: logarithms below 1 / k, and linear above it.

    The unconstrained value x is log s, and s = log(1 + k e^u) / k. With k = 0, u is x.

    Attributes:
        rate: k, in the shape of x.
    """

    rate: Any

    def x_of(self, u: jax.Array) -> jax.Array:
        """Log s."""
        return jnp.where(self.rate > 0, _log_softplus(u + self._shift) - self._shift, u)

    def u_of(self, x: jax.Array) -> jax.Array:
        """U."""
        v = SOFTPLUS.inv(jnp.exp(x + self._shift))
        return jnp.where(self.rate > 0, v - self._shift, x)

    def log_det(self, u: jax.Array) -> jax.Array:
        """Log |dx/du|."""
        v = u + self._shift
        each = SOFTPLUS.log_abs_det_jacobian(v, None) - _log_softplus(v)
        return jnp.sum(jnp.where(self.rate > 0, each, 0))

    @property
    def _shift(self) -> jax.Array:
        return jnp.log(jnp.where(self.rate > 0, self.rate, 1))


Share = np.ndarray | Path | Product | Positive
Shares = Mapping[str, Share]
Series = Mapping[str, type[Path]]
"""The sites of a series, with the kind of their coordinates."""

SOFTPLUS = dist.transforms.SoftplusTransform()
LOWER = 2.0
"""Shares are taken at a scale that is lower by so many of its posterior standard deviations. A
chain has to go there too. At the usual scale of eight groups, rows may have most of the precision,
and a centred chain still misses small scales."""
ALIKE = 0.25
"""Coordinates stay if no share, nor the logarithm of a path's scale, would change by more, and no
rate by a factor above 4."""
SIGN_KEEPING = (
    *RESHAPES, "add", "concatenate", "cumsum", "div", "dynamic_slice", "gather", "log1p", "mul",
    "pow", "reduce_sum", "slice", "sqrt",
)  # fmt: skip
"""Operations whose results are positive if all numbers are."""
STEPS = 16
"""Shares are multiples of one over this number, so that rounding errors do not change them."""


def alike(some: Shares, others: Shares) -> bool:
    """Whether coordinates differ little."""

    def figures(share: Share) -> list[np.ndarray]:
        if isinstance(share, Positive):
            return [np.log2(np.maximum(share.rate, np.finfo("f4").tiny)) / 8]
        if isinstance(share, Path):
            return [share.share, np.log(share.width)]
        return jax.tree.leaves(share)

    return some.keys() == others.keys() and all(
        np.max(np.abs(x - y), initial=0) <= ALIKE
        for name in some
        for x, y in zip(figures(some[name]), figures(others[name]), strict=True)
    )


def normal_of(law: Any) -> dist.Normal | None:
    """The normal law of a site's entries, if they are independent given its parameters."""
    while isinstance(law, dist.ExpandedDistribution | dist.Independent):
        law = law.base_dist
    return law if type(law) is dist.Normal else None


def support_of(law: Any) -> constraints.Constraint:
    """The support of a site's entries."""
    support = law.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _log_softplus(v: jax.Array) -> jax.Array:
    """The logarithm of log(1 + e^v), without underflow."""
    return jnp.where(v < -15, v, jnp.log(SOFTPLUS(jnp.maximum(v, -15))))


def _power(scale: jax.Array, exponent: Any) -> jax.Array:
    """A power of a positive number. Derivatives of JAX's own have several times as many lines."""
    return jnp.exp(exponent * jnp.log(scale))


class InShares(Messenger):
    """A model whose sites have the coordinates u in the place of their values x.

    Attributes:
        values: x of the sites of the last run.
    """

    def __init__(self, fn: Any, shares: Shares) -> None:
        super().__init__(fn)
        self.shares = {n: x for n, x in shares.items() if not isinstance(x, tuple)}
        self.values: dict[str, jax.Array] = {}
        self._laws: dict[str, dist.Normal] = {}

    def process_message(self, msg: dict[str, Any]) -> None:
        """Give the site the law of u."""
        if msg["type"] != "sample" or msg["name"] not in self.shares:
            return
        share, law = self.shares[msg["name"]], msg["fn"]
        normal: Any = normal_of(law)
        self._laws[msg["name"]] = normal
        of_u = dist.Normal(share * normal.loc, _power(normal.scale, share))
        msg["fn"] = of_u.expand(law.shape()).to_event(law.event_dim)

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        """Give x to the model. The records of other handlers keep u."""
        if msg["type"] != "sample" or msg["name"] not in self.shares:
            return
        share, normal = self.shares[msg["name"]], self._laws[msg["name"]]
        away = msg["value"] - share * normal.loc
        msg["value"] = self.values[msg["name"]] = (
            normal.loc + _power(normal.scale, 1 - share) * away
        )


def coordinates(trace: Mapping[str, Any], shares: Shares) -> dict[str, jax.Array]:
    """U of the sites, from a record of the model at their values x."""
    found = {}
    for name, share in shares.items():
        if isinstance(share, tuple):
            continue
        normal: Any = normal_of(trace[name]["fn"])
        away = trace[name]["value"] - normal.loc
        found[name] = share * normal.loc + _power(normal.scale, share - 1) * away
    return found


def unmeasured(model: Any, position: PyTree, series: Series | None = None) -> Shares:
    """Shares of 1 for all sites that may not be centred: u is x.

    A start with them is the same program as a start with measured shares. It is empty for a series
    whose scale is known or follows from its times.
    """
    if series is None:
        scales = _scales_of_groups(model, position)
        names = _following(model, scales, position)
        found: dict[str, Share] = {}
        for name in (*names, *_products(model, position, names)):
            one = np.ones(position[name].shape, position[name].dtype)
            found[name] = one if name in names else Product(0 * one)
        for name in _positive_sites(model, position) if found else []:
            found[name] = Positive(np.zeros(position[name].shape, position[name].dtype))
        return found
    if not _may_change(model) or model.plan.local_axes:
        return {}
    paths = {}
    for name, kind in series.items():
        x = position[name]
        one = np.ones([1] * x.ndim, x.dtype)
        paths[name] = kind(one, np.zeros(x.shape, x.dtype), one)
    found = model.replace(shares=paths)
    try:
        jax.eval_shape(lambda x, rows: _paths(found, x, rows)[1], position, _some_rows(model))
    except _UnknownScaleError:
        return {}
    return paths


def find_sums(model: Any, position: PyTree) -> Series:
    """Long normal sites with a scale or a factor, in a program that sums: perhaps innovations."""
    if not _may_change(model):
        return {}
    rows, scales = _some_rows(model), _scales_of_groups(model, position)
    program = str(jax.make_jaxpr(model.energy)(position, rows))
    if "cumsum" not in program and "scan" not in program:
        return {}
    following = _following(model, scales, position)
    found = {*_products(model, position, following, sums=True), *following}
    found -= {*_traced_factors(model, position, rows, following)[2]}  # perhaps negative
    return {n: Sum for n in sorted(found) if len(position[n]) >= FEWEST_TIMES}


def find_shares(
    model: Any, position: PyTree, variance: Callable[[np.ndarray], jax.Array], used: Shares
) -> Shares:
    """The coordinates of the sites that have those of ``used``; empty in a transformation.

    ``variance(index)`` are variances of the parameters u under the shares ``used``, shape (D,). The
    parameters with these indices are those of all groups, and their variances are those given all
    other parameters: slopes of a group may lean on each other.
    """
    shares: Any = {n: x for n, x in used.items() if not isinstance(x, Positive)}
    others = [n for n, x in shares.items() if isinstance(x, Product)]
    if not shares:
        return {}
    inside = [np.full(jnp.size(position[n]), n in shares) for n in sorted(position)]
    index, scales = np.flatnonzero(np.concatenate(inside)), _scales_of_groups(model, position)

    def measured(position: PyTree) -> tuple[dict, dict]:
        rows = model.potential().curvature_batch(jax.random.key(0))
        law, factor = scales(position, rows), _factors(model, position, rows, others)
        known, groups = ravel(position)[1](variance(index)), {}
        for n, share in shares.items():
            own = _power(factor.get(n, law[n]), 2.0 - 2 * getattr(share, "share", share))
            groups[n] = law[n] * factor.get(n, 1.0), 1 / (own * known[n])
        return groups, {n: jnp.exp(position[n]) for n in used.keys() - shares.keys()}

    found = compiled(measured, position)
    if is_traced(found):
        return {}
    groups, values = jax.tree.map(np.asarray, found)
    scale, precision = (np.concatenate([np.ravel(x[k]) for x in groups.values()]) for k in (0, 1))
    share, of_scales = _by_scale(scale, precision, values)
    ends = np.cumsum([position[n].size for n in groups])
    parts = zip(groups, np.split(share, ends), strict=False)
    found = {n: x.reshape(position[n].shape) for n, x in parts}
    return {n: Product(x) if n in others else x for n, x in found.items()} | of_scales


def _positive_sites(model: Any, position: PyTree) -> list[str]:
    """The sites with positive values, whose unconstrained values are their logarithms."""
    found: list[str] = []

    def look(position: PyTree, rows: Any) -> None:
        trace = model.trace(position, rows, unconstrained=True)
        names = sorted(position.keys() & trace.keys())
        found.extend(n for n in names if support_of(trace[n]["fn"]) is constraints.positive)

    jax.eval_shape(look, position, _some_rows(model))
    return [n for n in found if n not in model.plan.local_axes]


def _by_scale(
    scale: np.ndarray, precision: np.ndarray, values: dict[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, Positive]]:
    """The shares of the rows in precisions, at the lower scale, and coordinates of scales.

    Entries of equal scale s know it together: each has the information 2 c^2 about log s. Of a
    small s^2 they have q^-2, the sum of p^2 / 2 for precisions p by the rows. If the lower scale is
    `LOWER` times q^{1/2} or less, the posterior of s ends at 0 as if cut off, with an sd of about
    q^{1/2} / 2. Its logarithm would have a long tail, so s is linear above that.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # of the rows' precision to the law's; what is not known stays
        ratio = np.nan_to_num(np.maximum(scale**2 * precision - 1, 0), nan=np.inf, posinf=np.inf)
        each, which = np.unique(scale, return_inverse=True)
        error = np.bincount(which, 2 * (1 - 1 / (1 + ratio)) ** 2) ** -0.5  # of log s
        lower = ratio * np.exp(-2 * LOWER * error[which])
        share = np.round((1 - 1 / (1 + lower)) * STEPS) / STEPS
        rate = 2 * np.bincount(which, ratio**2 / 2) ** 0.25 / each
        bends = each * np.exp(-LOWER * error) < 2 * LOWER / rate
        rate = np.where(bends, 2 ** np.round(np.log2(rate)), 0)
    positive, tiny = {}, np.finfo("f4").resolution
    for name, s in values.items():
        place = np.minimum(np.searchsorted(each, s * (1 - tiny)), each.size - 1)
        k = np.where(np.abs(each[place] - s) <= tiny * s, rate[place], 0)
        positive[name] = Positive(k.astype(s.dtype))
    return share.astype(scale.dtype), positive


def _scales_of_groups(model: Any, position: PyTree) -> Callable[[PyTree, Any], dict]:
    """The scales of sites with normal entries that are independent given other sites."""
    local = model.plan.local_axes

    def scales(position: PyTree, rows: Any) -> dict[str, jax.Array]:
        trace = model.trace(position, rows, unconstrained=True)
        laws = {name: normal_of(trace[name]["fn"]) for name in position if name in trace}
        return {
            name: jnp.broadcast_to(law.scale, position[name].shape)
            for name, law in laws.items()
            if law is not None and position[name].size > 1 and name not in local
        }

    return scales


def _following(model: Any, scales: Callable, position: PyTree) -> list[str]:
    """The sites whose scale depends on other sites."""
    if not _may_change(model) or len(position) < 2:  # no other site determines a scale
        return []
    traced, shapes = jax.make_jaxpr(scales, return_shape=True)(position, _some_rows(model))
    jaxpr = traced.jaxpr
    latent = jaxpr.invars[: len(position)]
    return [
        name
        for name, out in zip(sorted(shapes), jaxpr.outvars, strict=True)
        if not needed(jaxpr, [out])[1].isdisjoint(latent)
    ]


def _may_change(model: Any) -> bool:
    """Whether sites of the model may have other coordinates."""
    plan = model.plan
    known = not (plan.is_random or model.on_host)
    return known and not any(s.discrete for s in plan.sites)


def _some_rows(model: Any) -> Any:
    return jax.eval_shape(model.potential().curvature_batch, jax.random.key(0))


# Products


def _products(model: Any, position: PyTree, following: list[str], sums: bool = False) -> list[str]:
    """The sites with normal values z that enter all other densities as s z alone, with s > 0.

    With ``sums`` they may enter as sums of s z. The scale s depends on other sites, and not on
    those that are ``following`` or products.
    """
    if not _may_change(model):
        return []
    rows = _some_rows(model)
    normal = jax.eval_shape(_scales_of_groups(model, position), position, rows)
    names = [n for n in normal if n not in following]
    jaxpr, _, found = _traced_factors(model, position, rows, names, sums)
    inputs = dict(zip(sorted(position), jaxpr.invars, strict=False))
    moved = {inputs[n] for n in (*found, *following)}
    depends = {n: needed(jaxpr, [s])[1] & {*inputs.values()} for n, (s, _) in found.items()}
    factors = [s for s, _ in found.values()]
    part = jaxpr.replace(eqns=needed(jaxpr, factors)[0], outvars=factors)
    positive = followed(part, [False] * len(jaxpr.invars), _positive, None)
    signs = dict(zip(found, positive, strict=True))
    return [n for n, given in depends.items() if given and signs[n] and not given & moved]


def _positive(equation: Any, given: list) -> list:
    """Whether results are positive, from the same about inputs; a rule for `followed`."""
    name = equation.primitive.name
    known = [
        x or (isinstance(v, Literal) and np.all(v.val > 0))
        for v, x in zip(equation.invars, given, strict=True)
        if jnp.issubdtype(v.aval.dtype, jnp.floating)  # and no index
    ]
    return [name == "exp" or (name in SIGN_KEEPING and all(known))] * len(equation.outvars)


def _factors(model: Any, position: PyTree, rows: Any, names: Sequence[str]) -> dict[str, jax.Array]:
    """The scale s of those sites that are products, in the shapes of their values."""
    if not names:
        return {}
    jaxpr, consts, found = _traced_factors(model, position, rows, names)
    names = [n for n in names if n in found]
    results = [found[n][0] for n in names]
    part = jaxpr.replace(eqns=needed(jaxpr, results)[0], outvars=results)
    values = jax.core.eval_jaxpr(part, consts, *jax.tree.leaves((position, rows)))
    wanted = {}
    for name, s in zip(names, values, strict=True):
        shape = position[name].shape
        each = jnp.broadcast_to(s, found[name][1]).reshape(shape) if s.size > 1 else s.reshape(())
        wanted[name] = jnp.broadcast_to(each, shape)
    return wanted


def _traced_factors(
    model: Any, position: PyTree, rows: Any, names: Iterable[str], sums: bool = True
) -> tuple[Jaxpr, list, dict[str, tuple[Any, tuple]]]:
    """A program of all densities; the factors of some sites' values there, and their shapes."""
    plain = model.replace(shares={})

    def densities(position: PyTree, rows: Any) -> dict[str, jax.Array]:
        trace = plain.trace(position, rows, unconstrained=True)
        sites = {n: s for n, s in trace.items() if s["type"] == "sample"}
        return {n: s["fn"].log_prob(s["value"]) for n, s in sites.items()}

    traced, shapes = jax.make_jaxpr(densities, return_shape=True)(position, rows)
    jaxpr, found = traced.jaxpr, {}
    inputs: dict[str, Any] = dict(zip(sorted(position), jaxpr.invars, strict=False))
    results = dict(zip(sorted(shapes), jaxpr.outvars, strict=True))
    for name in names:
        others = [x for n, x in results.items() if n != name]
        if (factor := _factor_of(jaxpr, others, inputs[name], sums)) is not None:
            found[name] = factor
    return jaxpr, traced.consts, found


def _factor_of(jaxpr: Jaxpr, results: list, value: Any, sums: bool) -> tuple[Any, tuple] | None:
    """What multiplies a value, or its ``sums``, before all else; the product's shape."""
    equations, variables = needed(jaxpr, results)
    makers = {x: e for e in equations for x in e.outvars}
    start, in_order = value, True
    while len(users := [e for e in equations if value in e.invars]) == 1:
        (user,) = users
        steps = {e.primitive.name for part in inner(user) for e in part.eqns}
        steps = steps or {user.primitive.name}
        if not steps <= {*RESHAPES, "gather", *("cumsum", "dynamic_slice") * sums}:
            break
        value = user.outvars[0]
        in_order &= steps <= {*RESHAPES} and value.aval.size == start.aval.size
    if len(users) != 1:
        return None
    if user.primitive.name == "scan" and sums:  # a value of each turn, and a factor of all turns
        body, (number, carried) = user.params["jaxpr"].jaxpr, counts_of_scan(dict(user.params))
        ends = [
            x for k, x in enumerate(body.outvars) if k < carried or user.outvars[k] in variables
        ]
        each = _factor_of(body, ends, body.invars[user.invars.index(value)], sums)
        if each is None or each[0] not in body.invars[:number] or each[0].aval.size > 1:
            return None
        return user.invars[body.invars.index(each[0])], value.aval.shape
    if user.primitive.name != "mul":
        return None
    factor: Any = user.invars[user.invars[0] is value]
    if isinstance(factor, Literal) or start in needed(jaxpr, [factor])[1]:
        return None
    while (made := makers.get(factor)) and made.primitive.name in RESHAPES:
        source: Any = made.invars[0]
        if isinstance(source, Literal) or source.aval.size not in (1, factor.aval.size):
            break
        factor = source
    return (factor, value.aval.shape) if in_order or factor.aval.size == 1 else None


# Series


def off_paths(model: Any, position: PyTree, rows: Any) -> tuple[PyTree, jax.Array | float]:
    """The position with x in the place of u, for series and products, and log |dx/du|."""
    positive = {n: x for n, x in model.shares.items() if isinstance(x, Positive)}
    changes = [x.log_det(position[n]) for n, x in positive.items()]
    position = {**position, **{n: x.x_of(position[n]) for n, x in positive.items()}}
    paths, scales = _paths(model, position, rows)
    found = {name: path.x_of(position[name], *scales[name]) for name, path in paths.items()}
    changes += [path.log_det(*scales[name]) for name, path in paths.items()]
    return {**position, **found}, sum(changes)


def onto_paths(model: Any, position: PyTree) -> dict[str, jax.Array]:
    """U of series and products, from a position with their values x."""
    paths, scales = _paths(model, position, {})
    found = {name: path.u_of(position[name], *scales[name]) for name, path in paths.items()}
    positive = {n: x for n, x in model.shares.items() if isinstance(x, Positive)}
    return found | {n: x.u_of(position[n]) for n, x in positive.items()}


def _paths(model: Any, position: PyTree, rows: Any) -> tuple[dict, dict]:
    """The coordinates of series and products, and what they are given: s, and of series f."""
    paths = {name: x for name, x in model.shares.items() if isinstance(x, Path | Product)}
    series = tuple(n for n, x in paths.items() if isinstance(x, Path))
    sums = [n for n, x in paths.items() if isinstance(x, Product | Sum)]
    given: dict[str, tuple] = {n: (x,) for n, x in _factors(model, position, rows, sums).items()}
    scales = _scales(model, position, rows, series, {*given}) if series else {}
    for name, scale in scales.items():
        (factor,) = given.get(name, (jnp.ones(()),))
        given[name] = (scale * factor, factor) if name in sums else (scale,)
    return paths, given


def find_paths(model: Any, series: Series, position: PyTree, away: PyTree) -> Shares:
    """The coordinates of series, see `unmeasured`.

    ``position`` is m, and the other sites there. ``away`` is a draw of the posterior's series about
    it, given the other sites.
    """
    ones: Any = unmeasured(model, position, series)
    if not ones:
        return {}
    model = model.replace(shares=ones)

    def measured(position: PyTree, away: PyTree) -> dict[str, Path]:
        rows = model.potential().curvature_batch(jax.random.key(0))
        _, given = _paths(model, position, rows)
        here, there = (
            model.trace(x, rows, unconstrained=True)
            for x in (position, position | {n: position[n] + away[n] for n in series})
        )
        found = {}
        for name, (scale, *factor) in given.items():
            change = (_innovations(there[name]) - _innovations(here[name])) / scale
            for each in factor:
                change *= each
            one = (1,) * change.ndim  # no scalars: they would be numbers in a program
            share = jnp.reshape(1 - jnp.mean(change**2), one)
            width = jnp.reshape(scale, one[scale.ndim :] + scale.shape)
            found[name] = series[name](share, position[name], width)
        return found

    found = compiled(measured, position, away)
    if is_traced(found):
        return {}
    paths = {n: x for n, x in ones.items() if isinstance(x, Sum)}
    for name, path in jax.tree.map(np.asarray, found).items():
        share = np.round(np.clip(path.share, 0, 1) * STEPS) / STEPS
        if (
            np.all(share < 1 - ALIKE)
            and np.all(np.isfinite(path.middle))
            and np.all(path.width > 0)
        ):
            paths[name] = path._replace(share=share.astype(path.middle.dtype))
    return paths


class _UnknownScaleError(Exception):
    """The scale of a series is not a function of other sites alone."""


def _innovations(record: Mapping[str, Any]) -> jax.Array:
    """The values of a series without what follows from the time before."""
    law, x = record["fn"], record["value"]
    normal = normal_of(law)
    return jnp.diff(x, prepend=0.0) if normal is None else x - normal.loc


def _scales(
    model: Any, position: PyTree, rows: Any, names: tuple[str, ...], known: set[str]
) -> dict[str, jax.Array]:
    """The scale of the innovations of each series, in a shape that broadcasts to its values.

    A scale that is the same at all times is taken from outside of the model's loop over times. It
    must follow from other sites, unless it may be ``known``: such a site has a factor.
    """
    plain = model.replace(shares={})

    def scales(position: PyTree, rows: Any) -> list[jax.Array]:
        trace, found = plain.trace(position, rows, unconstrained=True), []
        for name in names:
            law = trace[name]["fn"] if name in trace else None
            if isinstance(law, dist.GaussianRandomWalk):
                found.append(jnp.asarray(law.scale)[..., None])
            elif (normal := normal_of(law)) is not None:
                found.append(normal.scale)
            else:
                raise _UnknownScaleError
        return found

    traced = jax.make_jaxpr(scales)(position, rows)
    jaxpr = traced.jaxpr
    given, finish = zip(*(_before_loops(jaxpr, out) for out in jaxpr.outvars), strict=True)
    of_site, leaves = [*sorted(position)], jax.tree.leaves((position, rows))
    inside = {x for n, x in zip(of_site, jaxpr.invars, strict=False) if n in names}
    others = set(jaxpr.invars[: len(of_site)]) - inside
    for name, each in zip(names, given, strict=True):
        sites = needed(jaxpr, each)[1]
        if not (sites & others or name in known) or sites & inside:
            raise _UnknownScaleError
    found = {}
    for name, each, last in zip(names, given, finish, strict=True):
        part = jaxpr.replace(eqns=needed(jaxpr, each)[0], outvars=each)
        found[name] = last(jax.core.eval_jaxpr(part, traced.consts, *leaves))
    return found


def _before_loops(jaxpr: Any, out: Any) -> tuple[list, Callable[[list], jax.Array]]:
    """Variables from which a result follows, and how: from outside of a loop if all turns agree."""
    scans = [e for e in jaxpr.eqns if e.primitive.name == "scan" and out in e.outvars]
    if not scans:
        return [out], lambda values: values[0]
    (equation,) = scans
    closed = equation.params["jaxpr"]
    body, one = closed.jaxpr, closed.jaxpr.outvars[equation.outvars.index(out)]
    number = counts_of_scan(dict(equation.params))[0]
    equations, variables = needed(body, [one])
    if variables & set(body.invars[number:]):
        return [out], lambda values: values[0]
    used = [k for k in range(number) if body.invars[k] in variables]
    turn = body.replace(eqns=equations, outvars=[one])

    def last(values: list) -> jax.Array:
        known = dict(zip(used, values, strict=True))
        inputs = [known.get(k) for k in range(len(body.invars))]
        return jax.core.eval_jaxpr(turn, closed.consts, *inputs)[0]

    return [equation.invars[k] for k in used], last
