"""Scores of a NumPyro model at draws, in unconstrained space."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import MCMC, init_to_uniform

from .._checks import check_int, check_key, check_model
from .._numpyro import arguments_of
from .._start import check_batch_size
from ..kernel import SGKernel
from ..model.minibatch import SubsamplePlates
from ..model.model import read
from .arrays import Arrays, as_array, stored_name
from .full_data import read_model
from .sources import check_run, draws_of

ROWS_AT_ONCE = 2**18
"""Rows times draws whose gradients are computed at once."""


class ScoredDraws(NamedTuple):
    """Unconstrained draws and their scores.

    Sites are in the order of their sorted names, and the entries of a site are in row-major order
    (the order of `jax.flatten_util.ravel_pytree`). Chains are concatenated.

    Attributes:
        draws: unconstrained positions, shape (n, D).
        scores: grad log posterior there, shape (n, D), in nats per unconstrained unit.
    """

    draws: np.ndarray
    scores: np.ndarray


def scores(
    model: Callable,
    source: Any,
    *args: Any,
    batch_size: int | Mapping[str, int] | None = None,
    rng_key: jax.Array | None = None,
    draws_at_once: int | None = None,
    **kwargs: Any,
) -> ScoredDraws:
    """Scores of a model's posterior at draws: s = -grad U in unconstrained space.

    U includes the log-Jacobians of the constraining transforms. The target has temperature 1. For
    the target exp(-U / tau), divide the scores by tau.

    Args:
        model: a NumPyro model with its `param` sites substituted; or the model of the run, if
            ``source`` is an `MCMC` of this package.
        source: draws in the model's own space: a `numpyro.infer.MCMC` that has run; an ArviZ
            object with a ``posterior``; or a dict of arrays, shaped (n, ...) or
            (chains, draws, ...) for a site of shape (...). Sites that are not latent are ignored.
        args: the model's arguments, with the data. For an `MCMC`, the default is the arguments of
            its run, if both ``args`` and ``kwargs`` are empty.
        batch_size: None for all rows; or the number of rows of a minibatch, drawn with replacement
            for each draw separately. The scores are then unbiased estimates, for a stochastic Stein
            discrepancy. An int for the only plate with observed rows, or a dict plate -> int.
        rng_key: a key for the minibatches.
        draws_at_once: number of draws whose gradients are computed together; None for as many
            draws as have 262,144 rows in total.
        kwargs: the model's keyword arguments.

    Returns:
        `ScoredDraws`, the input of `ksd`, `ksd_test` and `thin`.

    Raises:
        TypeError: for another kind of ``source``.
        ValueError: for an `MCMC` that has not run; for a model without latent sites, with discrete
            latent sites, or with `param` sites; for draws that are missing, of a wrong shape or of
            unequal number; for ``batch_size`` without ``rng_key``; for draws or scores that are not
            finite.

    Examples:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_geom.diagnostics.stein import ksd, scores
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with numpyro.plate("data", y.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])
        >>> y = jax.numpy.zeros(3)  # posterior N(0, 1 / 4)
        >>> mu = jax.random.normal(jax.random.key(0), (500,)) / 2
        >>> found = scores(model, {"mu": mu}, y)
        >>> bool(abs(found.scores + 4 * found.draws).max() < 1e-5)
        True
        >>> ksd(found.draws, found.scores) < 0.01
        True
    """
    if isinstance(source, MCMC):
        check_run(source)
        if not args and not kwargs:
            args, kwargs = arguments_of(source)
        if isinstance(source.sampler, SGKernel) and source.sampler.model == model:
            bound = source.sampler.bound.model
            model = model if bound is None else bound.runnable
    check_model("model", model)
    if rng_key is not None:
        check_key("rng_key", rng_key)
    batch_size = check_batch_size(batch_size)
    if draws_at_once is not None:
        draws_at_once = check_int("draws_at_once", draws_at_once)
    if batch_size is not None and rng_key is None:
        raise ValueError(
            "batch_size draws minibatches and needs a single rng_key, such as jax.random.key(0)"
        )
    key: Any = rng_key
    data = read(model, args, kwargs, batch_size=batch_size)
    args, kwargs, plan = data.args, data.kwargs, data.plan
    if plan.has_params:
        _check_params(model, args, kwargs)
    sites = read_model(model, args, kwargs).sites
    latent = [s.name for s in plan.sites if s.kind == "latent" and not s.discrete]
    shapes = {name: sites[name].shape for name in latent}
    samples = _latent_values(source, shapes)
    num_draws = next(iter(samples.values())).shape[0]

    rows = plan.num_data
    if batch_size is not None:
        rows = max(plan.batch_sizes.values(), default=rows)
    if draws_at_once is None:
        draws_at_once = max(1, ROWS_AT_ONCE // rows)

    def of_draw(arrays: list, item: tuple) -> tuple[jax.Array, jax.Array]:
        number, sample = item
        known = data.with_arrays(arrays)
        position = known.unconstrain(sample)
        flat, unravel = ravel_pytree({name: position[name] for name in sorted(shapes)})
        potential = known.potential()
        batch: Any = {}  # all rows
        if batch_size is not None:
            batch, _ = potential.draw(random.fold_in(key, number), ())
        return flat, -jax.grad(lambda x: potential.energy(unravel(x), batch))(flat)

    @jax.jit
    def of_all(arrays: list, samples: dict) -> tuple[jax.Array, jax.Array]:
        items = (jnp.arange(num_draws), samples)
        return lax.map(partial(of_draw, arrays), items, batch_size=min(draws_at_once, num_draws))

    draws, found = (np.asarray(x) for x in of_all(data.arrays, samples))
    _check_finite(draws, found, samples)
    return ScoredDraws(draws, found)


def _latent_values(source: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Draws of the latent sites, shaped (n, ...)."""
    given: Any = draws_of(source)
    if given is None:
        if not isinstance(source, Mapping):
            raise TypeError(
                "source must be an MCMC of a model, an ArviZ object with a posterior, or a dict of "
                f"draws by site, got {type(source).__name__}"
            )
        given = source
    keys = {name: name if name in given else stored_name(name) for name in shapes}
    missing = sorted(name for name, key in keys.items() if key not in given)
    if missing:
        raise ValueError(
            f"the draws lack the latent sites {missing}: expected {sorted(shapes)}, in the model's "
            "own (constrained) space"
        )
    found = {}
    for name, shape in shapes.items():
        x = as_array("draws", given[keys[name]])
        leading = x.shape[: max(0, x.ndim - len(shape))]
        if x.shape[len(leading) :] != shape or len(leading) not in (1, 2) or 0 in leading:
            raise ValueError(
                f"draws of site {name!r} must have shape (n, ...) or (chains, draws, ...) with "
                f"{shape} in place of the dots, and at least one draw, got {x.shape}"
            )
        found[name] = jnp.asarray(x.reshape((-1, *shape)), jnp.result_type(float))
    counts = {name: len(x) for name, x in found.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"all sites must have the same number of draws, got {counts}")
    return found


def _check_params(model: Callable, args: tuple, kwargs: dict) -> None:
    """Raise if a `param` site has no value."""
    free: list[str] = []
    start = init_to_uniform()

    def value_of(site: dict[str, Any]) -> Any:
        if site["type"] in ("param", "mutable") and site["value"] is None:
            free.append(site["name"])
        return start(site)

    seeded = handlers.seed(SubsamplePlates(model), random.key(0))
    jax.eval_shape(lambda: handlers.substitute(seeded, substitute_fn=value_of)(*args, **kwargs))
    if free:
        raise ValueError(
            f"the model has param sites {free}, and the draws do not hold their "
            "values: pass `numpyro.handlers.substitute(model, data=params)` as the model"
        )


def _check_finite(draws: np.ndarray, found: np.ndarray, samples: Arrays | dict) -> None:
    for what, x in (("draws", draws), ("scores", found)):
        bad = np.flatnonzero(~np.isfinite(x).all(axis=1))
        if not bad.size:
            continue
        sizes = {name: samples[name][0].size for name in sorted(samples)}
        ends = np.cumsum(list(sizes.values()))
        columns = np.flatnonzero(~np.isfinite(x[bad]).all(axis=0))
        sites = sorted({list(sizes)[k] for k in np.searchsorted(ends, columns, side="right")})
        raise ValueError(
            f"{bad.size} of {len(x)} {what} are not finite on the unconstrained space, the first "
            f"of them number {bad[0]}, in the sites {sites}: a draw lies on the edge of its "
            "support or outside of it, or the model overflows there. Leave such draws out and say "
            "so, or run in 64 bits"
        )
