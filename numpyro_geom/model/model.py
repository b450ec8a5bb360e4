"""Model: a NumPyro model with its arguments, read once. Read this file before the others here.

`read` runs the model on shapes alone and finds its sites, plates and rows. The value that it
returns is all that the package knows about a model. Kernels, guides, reports and long runs ask it
for the energy on some rows, for log densities by row, for values in the supports of the sites, and
for sums over all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro import handlers
from numpyro.infer.util import constrain_fn, potential_energy, unconstrain_fn

from .._numpyro import unconstrained_value
from .._util import LANES, PyTree, digest, key_word, num_at_once, scattered
from ..rows.host_rows import HostRows, fetch, host_rows_in
from ..rows.reader import Hint, hint_part, hints
from . import minibatch
from .abstract import abstract_trace
from .arguments import HostArray, on_device, reads_values, split_arrays
from .centring import InShares, Shares, coordinates, off_paths, onto_paths
from .minibatch import RNG_KEY, Batch, Site, Strata, SubsamplePlates, Subsampling
from .plates import enumerating, read_subsampling
from .potential import Potential

CURVATURE_ROWS = 2048
"""Number of rows that measure curvature and gradient noise in warm-up."""
RANDOM_KEYS = 32
"""Number of keys that measure the noise of a model that asks for keys."""


def read(
    fn: Callable,
    args: tuple = (),
    kwargs: dict | None = None,
    *,
    batch_size: int | Mapping[str, int] | None = None,
    batching: str = "replacement",
    sums: bool = True,
) -> Model:
    """Read a model and check that its rows can be drawn as asked.

    Args:
        fn: a NumPyro model.
        args: its positional arguments, possibly traced.
        kwargs: its keyword arguments.
        batch_size: rows per step: an int for the only plate with observed rows, a dict
            plate -> int, or None for the model's own subsampling (all rows if there is none).
        batching: ``"replacement"``, ``"stratified"`` or ``"epoch"``.
        sums: whether discrete latent sites are summed out, on all rows; otherwise they are errors.

    Raises:
        ValueError: for a model that cannot be read, or whose rows cannot be drawn as asked, see
            `numpyro_geom.model.plates.read_subsampling`.
        TypeError: for arguments that JAX cannot use.
        ImportError: for discrete latent sites without the package funsor.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_geom.model import read
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> found = read(model, (jax.numpy.ones(100),), batch_size=10)
        >>> dict(found.plan.batch_sizes), found.sites["y"].kind
        ({'data': 10}, 'observed')
        >>> float(found.sum_over_rows(lambda rows: found.energy({"mu": 1.0}, rows))) > 0
        True
    """
    args, kwargs = on_device(args, kwargs)
    plan = read_subsampling(fn, args, kwargs, batch_size, batching, sums=sums)
    return Model(fn, args, kwargs, plan)


@jax.custom_jvp
def _without_mass(energy: jax.Array) -> jax.Array:
    """Inf for minus inf. No gradient depends on this choice: XLA would compute U for each entry."""
    return jnp.where(energy == -jnp.inf, jnp.inf, energy)


_without_mass.defjvp(lambda primals, tangents: (_without_mass(*primals), *tangents))


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A NumPyro model with its arguments, and what `read` has found out about it.

    Attributes:
        fn: the user's model.
        args: its positional arguments, NumPy arrays with their copies on the device.
        kwargs: its keyword arguments.
        plan: plates, batch sizes, N, and the sites.
        fixed: values of ``param`` and ``mutable`` sites.
        transforms: map from an unconstrained position to site values; None if this map needs a run
            of the model.
        shares: sites that are not centred, with the share of the rows in each entry's precision.
    """

    fn: Callable
    args: tuple
    kwargs: dict[str, Any]
    plan: Subsampling
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    transforms: Callable | None = None
    shares: Shares = dataclasses.field(default_factory=dict)

    # What the model is

    @property
    def sites(self) -> dict[str, Site]:
        """Sample and deterministic sites by name, in the order in which the model runs them."""
        return {site.name: site for site in self.plan.sites}

    def of_kind(self, *kinds: str) -> list[str]:
        """Names of the sites of these kinds."""
        return [name for name, site in self.sites.items() if site.kind in kinds]

    @property
    def runnable(self) -> Callable:
        """The user's model, with ``param`` sites at their values."""
        return handlers.substitute(self.fn, data=self.fixed) if self.fixed else self.fn

    @property
    def on_host(self) -> bool:
        """Whether rows come from `numpyro_geom.HostRows`."""
        return bool(host_rows_in((self.args, self.kwargs)))

    def __getstate__(self) -> dict[str, Any]:  # cached properties hold functions
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def replace(self, **values: Any) -> Model:
        """The model with other values of some attributes."""
        return dataclasses.replace(self, **values)

    # Its arrays, as inputs of compiled programs

    @property
    def arrays(self) -> list:
        """Arrays of the arguments that are inputs of compiled programs, see `with_arrays`.

        Empty for a model that needs their values, such as the largest entry of an index. The
        arrays are then constants of the programs.
        """
        return self._inputs[0]

    def with_arrays(self, arrays: list) -> Model:
        """The model with these arrays in the place of its own, for instance within a program."""
        args, kwargs = self._inputs[1](arrays)
        return self.replace(args=args, kwargs=kwargs)

    @cached_property
    def _inputs(self) -> tuple[list, Callable[[list], tuple[tuple, dict]]]:
        given = self.args, self.kwargs
        arrays, fill = split_arrays(given)

        try:
            jax.eval_shape(lambda arrays: self._run_abstractly(*fill(arrays)), arrays)
        except Exception:  # a model can raise anything where it needs a value
            return [], lambda _: given
        return arrays, fill

    def _run_abstractly(self, args: tuple, kwargs: dict) -> None:
        abstract_trace(self.runnable, args, kwargs, {})

    @cached_property
    def signature(self) -> str:
        """Text of all that a compiled program depends on besides `fn` and `arrays`."""
        given = self.args, self.kwargs
        leaves, treedef = jax.tree.flatten(given)
        by_value = not self.arrays or reads_values(self._run_abstractly, *given)

        def told(x: Any) -> Any:
            if not isinstance(x, (jax.Array, HostArray)):
                return repr(x)
            return digest(x) if by_value else (x.shape, str(x.dtype))

        return f"{treedef}{[told(x) for x in leaves]}{self.plan}"

    # Its density

    def trace(
        self,
        values: Mapping[str, Any],
        rows: Batch | None = None,
        *,
        unconstrained: bool = False,
        rng_key: jax.Array | None = None,
        redraw: bool = False,
    ) -> dict[str, Any]:
        """Run the model: site name -> NumPyro's record of the site.

        Args:
            values: values of latent sites, on all rows.
            rows: plate -> row indices; all rows of a plate that is not named.
            unconstrained: whether ``values`` is a position, or holds values in the supports.
            rng_key: for sites without a value; without a key such a site is an error.
            redraw: whether observed sites are drawn, too.
        """
        rows = {} if rows is None else rows
        fn = self.runnable if rng_key is None else handlers.seed(self.runnable, rng_key)
        if unconstrained:
            fn = InShares(fn, self.shares)
            values, _ = off_paths(self, values, rows)
        values = minibatch.gather_local(self.plan, dict(values), rows)
        if unconstrained:
            fn = handlers.substitute(fn, substitute_fn=partial(unconstrained_value, values))
        else:
            fn = handlers.substitute(fn, data=values)
        fn = handlers.uncondition(fn) if redraw else fn
        run = SubsamplePlates(fn, rows, self.plan.sizes)
        return handlers.trace(run).get_trace(*self.args, **self.kwargs)

    def energy(self, position: PyTree, rows: Batch | None = None) -> jax.Array:
        """U of these rows in nats, scaled to all rows: an unbiased estimate if rows are drawn.

        U is minus the log joint density in unconstrained coordinates, with the log-Jacobians of the
        transforms. Discrete latent sites are summed out. Where the density is infinite, as where a
        normaliser underflows, U is inf: no search and no step may end there.
        """
        rows = {} if rows is None else rows
        sums = any(s.discrete for s in self.plan.sites)
        run = SubsamplePlates(InShares(self.runnable, self.shares), rows, self.plan.sizes)
        position, change = off_paths(self, position, rows)
        ordered = rows.values() if isinstance(rows, Strata) else ()
        with hints(*(Hint(index, ordered=True) for index in ordered)):
            energy = potential_energy(
                enumerating(run, self.plan.sites) if sums else run,
                self.args,
                self.kwargs,
                minibatch.gather_local(self.plan, position, rows),
                enum=sums,
            )
        return _without_mass(energy - change)

    def log_prob(
        self, values: Mapping[str, Any], rows: Batch, names: Sequence[str]
    ) -> dict[str, jax.Array]:
        """Log densities of some sites, entry by entry, at values in the supports.

        Factors of ``scale`` handlers and of plates are left out.
        """
        found = self.trace(values, rows, rng_key=random.key(0))
        return {name: found[name]["fn"].log_prob(found[name]["value"]) for name in names}

    def row_energies(self, position: PyTree, plate: str, rows: Batch) -> jax.Array:
        """Energies of single rows of a plate, an array of shape (rows of the batch,).

        The plate's own factor N/B is removed. The factors of other plates and of ``scale`` handlers
        remain.
        """
        position, _ = off_paths(self, position, rows)
        with handlers.trace() as found:
            potential_energy(
                SubsamplePlates(InShares(self.runnable, self.shares), rows, self.plan.sizes),
                self.args,
                self.kwargs,
                minibatch.gather_local(self.plan, position, rows),
            )
        total = jnp.zeros(())
        for site in found.values():
            if site["type"] != "sample":
                continue
            dims = {frame.name: frame.dim for frame in site["cond_indep_stack"]}
            if plate not in dims:
                continue
            log_prob = site["fn"].log_prob(site["value"])
            if site["scale"] is not None:
                log_prob = log_prob * site["scale"]
            kept = log_prob.ndim + dims[plate]
            total = total - jnp.sum(log_prob, [a for a in range(log_prob.ndim) if a != kept])
        return total * (rows[plate].shape[0] / self.plan.sizes[plate])

    # Its two spaces

    def constrain(self, position: PyTree) -> PyTree:
        """Values of the latent sites in their supports, and of deterministic sites where these
        need a run of the model.
        """  # noqa: D205
        return self.constrain_fn(position)

    @cached_property
    def constrain_fn(self) -> Callable:
        """`constrain` as a function for one model and its arguments.

        If the map needs a run of the model, the run is on all rows. Rows that no requested site
        needs are never computed.
        """
        return self.replay if self.transforms is None or self.shares else self.transforms

    @cached_property
    def replay(self) -> Callable:
        """The map from a position to the values of all sites, by a run of the model on all rows."""

        def constrain(position: PyTree) -> PyTree:
            shared = InShares(self.runnable, self.shares)
            # in a composite kernel, sites of the other kernels are requested, and need a key
            seeded = handlers.seed(SubsamplePlates(shared), random.key(0))
            position, _ = off_paths(self, position, {})
            found = constrain_fn(
                seeded, self.args, self.kwargs, position, return_deterministic=True
            )
            return found | shared.values

        # compiled even if NumPyro calls it eagerly, so that unused rows are not gathered
        return jax.jit(constrain)

    def unconstrain(self, values: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The position of the latent sites for values in their supports."""
        seeded = handlers.seed(SubsamplePlates(self.runnable), random.key(0))
        found = unconstrain_fn(seeded, self.args, self.kwargs, dict(values))
        if self.shares:
            trace = self.trace(values, rng_key=random.key(0))
            found = found | coordinates(trace, self.shares) | onto_paths(self, found)
        return {name: found[name] for name in values}

    # All rows

    def sum_over_rows(self, fn: Callable[[Batch], PyTree]) -> PyTree:
        """``sum_k w_k fn(chunk k)`` over all rows, where w_k is the chunk's share of its plate.

        A plate scales its sites by its size over the number of given rows, and w_k cancels this
        factor. Terms outside the plate count with the sum of the w_k = 1. So the result is
        exact for functions that are linear in the energy, and memory is bounded. With several
        plates the sum runs over all pairs of their chunks. This is right for nested and for
        independent plates. Plates that the plan does not subsample are not cut.
        """
        return _sum_over_chunks(self.plan, fn)

    def potential(self) -> Potential:
        """The energy and its estimates by the plan's minibatches, as pure functions."""
        plan = self.plan

        return Potential(
            energy=self.energy,
            init_stream=lambda rng_key: minibatch.init_stream(plan, rng_key),
            draw=lambda rng_key, stream: minibatch.draw(plan, rng_key, stream),
            split=_split_rows,
            curvature_batch=lambda rng_key: _some_rows(plan, rng_key, {}),
            score_noise=partial(_score_noise, self),
            on_all_rows=self.sum_over_rows,
            num_data=plan.num_data,
            steps_per_epoch=plan.steps_per_epoch,
            deterministic=not plan.batch_sizes and not plan.is_random,
            on_host=self.on_host,
        )


def _score_noise(model: Model, rng_key: jax.Array) -> tuple:
    plan, groups = model.plan, []
    for plate, batch_rows in plan.batch_sizes.items():
        # other subsampled plates keep about their batch size
        others = {other: rows for other, rows in plan.batch_sizes.items() if other != plate}
        rows = _some_rows(plan, rng_key, others)
        found: Any = partial(model.row_energies, plate=plate, rows=rows)
        groups.append((plan.sizes[plate] ** 2 / batch_rows, found))
    if plan.is_random:
        rows = _some_rows(plan, rng_key, plan.batch_sizes)
        keys = random.split(random.key(0), RANDOM_KEYS)  # the noise of keys on the same rows

        def by_key(position: PyTree) -> jax.Array:
            return lax.map(lambda key: model.energy(position, {**rows, RNG_KEY: key}), keys)

        groups.append((1.0, by_key))
    return tuple(groups)


def _some_rows(plan: Subsampling, rng_key: jax.Array, at_most: Mapping[str, int]) -> Batch:
    """Distinct rows from all over each subsampled plate."""
    if not plan.batch_sizes:
        return {}  # as a step's batch, so that a trace of the energy serves both
    return Strata(
        (
            plate,
            _spread_rows(
                key_word(rng_key) + i, plan.sizes[plate], at_most.get(plate, CURVATURE_ROWS)
            ),
        )
        for i, plate in enumerate(plan.batch_sizes)
    )


def _spread_rows(word: jax.Array, size: int, at_most: int) -> jax.Array:
    """Distinct rows from all over a plate: one from each of its equal stretches."""
    num_rows = min(size, at_most)
    bounds = np.arange(num_rows + 1) * size // num_rows
    first = jnp.asarray(bounds[:-1], jnp.int32)
    if num_rows == size:
        return first
    lengths = jnp.asarray(np.diff(bounds), jnp.uint32)
    return first + (scattered(word, num_rows) % lengths).astype(jnp.int32)


def _split_rows(batch: dict[str, jax.Array], num_parts: int) -> tuple[Batch, ...]:
    parts: tuple[dict, ...] = tuple({} for _ in range(num_parts))
    for plate, rows in batch.items():
        if plate == RNG_KEY:
            for part, key in zip(parts, random.split(rows, num_parts), strict=True):
                part[plate] = key
            continue
        share = rows.shape[0] // num_parts
        for k, part in enumerate(parts):
            stretch = k * share, (k + 1) * share
            part[plate] = rows[slice(*stretch)]
            hint_part(rows, part[plate], *stretch)
    return parts


def _sum_over_chunks(plan: Subsampling, fn: Callable[[Batch], PyTree]) -> PyTree:
    """See `Model.sum_over_rows`."""
    plates = list(plan.batch_sizes)

    def over(k: int, batch: Batch) -> PyTree:
        if k == len(plates):
            return fn(batch)
        plate, size = plates[k], plan.sizes[plates[k]]
        chunk = min(size, num_at_once(32 * LANES))
        # a remainder would be compiled besides
        chunk = next((n for n in range(chunk, chunk // 2, -1) if size % n == 0), chunk)
        num_chunks, rest = divmod(size, chunk)

        def part(index: jax.Array, **known: Any) -> PyTree:
            with hints(Hint(index, **known)):
                value = over(k + 1, {**batch, plate: index})
            return jax.tree.map(lambda x: x * (index.size / size), value)

        def indices(first: Any, rows: int = chunk) -> jax.Array:
            return first + jnp.arange(rows, dtype=jnp.int32)

        if num_chunks == 1:
            total = part(indices(0))
        else:
            on_host: list[HostRows] = []
            shapes = jax.eval_shape(lambda: part(indices(0), used=on_host))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def add(j: jax.Array, total: PyTree) -> PyTree:
                index = indices(j * chunk)
                known = {}
                if on_host:
                    rows = fetch(tuple((x, 0) for x in on_host), (index,), (index + chunk,))
                    known["rows"] = dict(zip(on_host, rows, strict=True))
                return jax.tree.map(jnp.add, total, part(index, **known))

            total = lax.fori_loop(0, num_chunks, add, zeros)
        if rest:
            total = jax.tree.map(jnp.add, total, part(indices(num_chunks * chunk, rest)))
        return total

    return over(0, {})
