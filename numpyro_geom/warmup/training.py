"""Training by an Optax optimiser: gives starts for chains on networks and Laplace guides."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random
from numpyro.infer import init_to_uniform
from tqdm import tqdm

from .._checks import (
    check_batch_size,
    check_int,
    check_key,
    check_model,
    check_share,
    check_strategy,
)
from .._util import PyTree, in_trace, tree_scale, tree_size, tree_where
from ..model import minibatch
from ..model.jaxprs import compiled, program
from ..model.minibatch import Subsampling
from ..model.model import Model, read
from ..model.start import check_rows, find_start

HELD_OUT = 0.1
"""Share of held-out rows where a batch size is given. They judge the training."""
TRAINING_ROWS, TRAINING_STEPS, LEARNING_RATE = 64, 40_000, 3e-3
"""Rows per step, most steps and Adam's learning rate of a chain's own training."""
LEAST_EPOCHS, MOST_EPOCHS = 10, 1000
"""Bounds of the passes over the rows in a chain's own training, and of its patience."""
VALIDATION_ROWS = 1024
"""Held-out rows per evaluation; larger held-out sets are a multiple of this number."""


class Trained(NamedTuple):
    """What `train` returns. With ``num_starts`` every array has a leading axis of starts.

    Attributes:
        position: unconstrained site values of the best epoch. Chains start from it
            (``init_params`` of ``mcmc.run``), and so does `RiemannianLaplace.fit`.
        epoch: the best epoch, counted from 1; without validation the last one.
        losses: mean of U / N over the steps of each epoch, shape (epochs,).
        validation: mean energy of the held-out rows after each epoch, shape (epochs,). It is minus
            their log likelihood where the plate holds observed sites only. NaN without validation.
    """

    position: PyTree
    epoch: np.ndarray
    losses: np.ndarray
    validation: np.ndarray


class _Training(NamedTuple):
    """State between two steps: of the optimiser and the rows, and the best position so far."""

    position: PyTree
    optimiser: PyTree
    stream: Any
    best: PyTree
    lowest: jax.Array
    best_epoch: jax.Array


def train(
    model: Callable,
    rng_key: jax.Array,
    *args: Any,
    batch_size: int | None = None,
    optimiser: optax.GradientTransformation | None = None,
    num_epochs: int = 100,
    validation: float | None = None,
    patience: int = 10,
    num_starts: int | None = None,
    init_params: PyTree = None,
    init_strategy: Callable = init_to_uniform,
    **kwargs: Any,
) -> Trained:
    """Lower a model's energy U by an optimiser on minibatches, with early stopping.

    The loss is U / N: minus the log joint density in unconstrained coordinates, over the number of
    rows. Its minimum is the maximum a posteriori estimate in these coordinates. After each epoch
    the mean energy of held-out rows, which no step uses, is measured. `train` returns the position
    with the lowest such energy. Training ends after ``patience`` epochs without a new lowest one.
    If it takes more than five seconds, it shows a progress bar.

    Args:
        model: a NumPyro model with continuous latent sites.
        rng_key: for the start, the order of the rows and the split.
        args: the model's arguments.
        batch_size: rows per step of the only plate with observed rows; None for all of them.
        optimiser: an Optax optimiser, with its learning rate or schedule; None for
            ``optax.adam(1e-3)``.
        num_epochs: largest number of passes over the rows.
        validation: share of the rows to hold out, 0 for none; None for 0.1 with a ``batch_size``
            and for 0 without.
        patience: epochs without a new best one that end the training.
        num_starts: number of independent trainings at once, for an ensemble or for several chains.
            Each has its own start and its own order of rows. None for one training.
        init_params: where to start, as for ``mcmc.run``, with a leading axis of starts if there
            are several. None starts where ``init_strategy`` says.
        init_strategy: NumPyro's strategy for the start.
        kwargs: the model's keyword arguments.

    Returns:
        The best position and the record of the training, see `Trained`.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range, for a model whose rows cannot be subsampled, and for
            validation without a batch size.
        FloatingPointError: if energies are not finite; with validation, if none was ever finite.

    Examples:
        >>> import jax, numpyro
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro_geom import train
        >>> def model(X, y):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     with numpyro.plate("data", X.shape[0]) as i:
        ...         numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=y[i])
        >>> X = jax.random.normal(jax.random.key(0), (500, 2))
        >>> y = X @ jnp.array([1.0, -1.0])
        >>> found = train(model, jax.random.key(1), X, y, batch_size=50, num_starts=4)
        >>> found.position["w"].shape
        (4, 2)
    """
    check_key("rng_key", rng_key)
    check_model("model", model)
    check_batch_size(batch_size)
    check_strategy("init_strategy", init_strategy)
    optimiser = optax.adam(1e-3) if optimiser is None else optimiser
    if not isinstance(optimiser, optax.GradientTransformation):
        raise TypeError(
            "optimiser must be one of optax, such as optax.adam(1e-3), got "
            f"{type(optimiser).__name__}"
        )
    num_epochs, patience = check_int("num_epochs", num_epochs), check_int("patience", patience)
    validation = _check_validation(validation, batch_size)
    starts = 1 if num_starts is None else check_int("num_starts", num_starts)
    if num_starts is None and init_params is not None:
        init_params = jax.tree.map(lambda x: jnp.asarray(x)[None], init_params)
    key_start, key_split, key_train = random.split(rng_key, 3)
    found = read(model, args, kwargs, batch_size=batch_size)
    found, position = find_start(
        found, random.split(key_start, starts), init_params, init_strategy, batched=True
    )
    one = jax.tree.map(lambda x: x[0], position)
    if not tree_size(one):
        raise ValueError(
            "the model has no free parameter: expected a `numpyro.sample` without `obs` whose "
            "support is more than a point"
        )
    check_rows(found, one)
    if init_params is None:
        position = shortened(found, position)
    rows, held_out = _split(found.plan, key_split, validation)
    outcome = _train(
        found,
        optimiser,
        rows,
        held_out,
        position,
        random.split(key_train, starts),
        num_epochs=num_epochs,
        patience=patience,
    )
    best, lowest, best_epoch, losses, judged, done = jax.device_get(outcome)
    lost = ~np.isfinite(lowest)
    if not len(held_out):
        lost |= best_epoch < done
    if lost.any():
        raise FloatingPointError(
            f"{lost.sum()} of {starts} trainings left the finite numbers: expected finite "
            "energies. Use a smaller learning rate, a schedule with a warm-up, or optax.chain("
            "optax.clip_by_global_norm(1.0), ...)"
        )
    result = Trained(best, best_epoch, losses[:, :done], judged[:, :done])
    return result if num_starts is not None else jax.tree.map(lambda x: x[0], result)


def trained(model: Model, rng_key: jax.Array, position: PyTree, *, single: bool) -> PyTree:
    """Where chains on a network start: each after a training of its own, by `train`'s method.

    ``position`` is that of one chain, or of all chains in one pytree, with as many keys.
    """
    if single:
        position, rng_key = jax.tree.map(lambda x: x[None], position), rng_key[None]
    with contextlib.suppress(ValueError):  # a model whose rows cannot be drawn
        plan = read(model.fn, model.args, model.kwargs, batch_size=TRAINING_ROWS).plan
        model = model.replace(plan=plan)
    plan = model.plan
    one_plate = len(plan.batch_sizes) == 1 and not plan.local_axes
    rows, held_out = _split(plan, random.fold_in(rng_key[0], 1), HELD_OUT if one_plate else 0.0)
    epochs = max(LEAST_EPOCHS, min(MOST_EPOCHS, TRAINING_STEPS // plan.steps_per_epoch))
    best, lowest, *_ = _train(
        model,
        optax.adam(LEARNING_RATE),
        rows,
        held_out,
        shortened(model, position),
        jax.vmap(lambda key: random.fold_in(key, 2))(rng_key),
        num_epochs=epochs,
        patience=max(LEAST_EPOCHS, epochs // 10),
    )
    best = jax.vmap(tree_where)(jnp.isfinite(lowest), best, position)
    return jax.tree.map(lambda x: x[0], best) if single else best


def shortened(model: Model, position: PyTree) -> PyTree:
    """Positions of several starts, each as near to 0 as gives it the lowest energy.

    NumPyro's starts in (-2, 2) are for parameters of order one. A sum of many products is as much
    longer as it has terms, and a network multiplies several of such sums.
    """
    potential = model.potential()

    def one(position: PyTree) -> PyTree:
        rows = potential.curvature_batch(random.key(0))
        lengths = 0.5 ** jnp.arange(8)
        energies = lax.map(lambda x: potential.energy(tree_scale(x, position), rows), lengths)
        energies = jnp.where(jnp.isfinite(energies), energies, jnp.inf)
        return tree_scale(lengths[jnp.argmin(energies)], position)

    return compiled(jax.vmap(one), position)


def _check_validation(validation: Any, batch_size: Any) -> float:
    if validation is None:
        return 0.0 if batch_size is None else HELD_OUT
    validation = check_share("validation", validation)
    if validation > 0 and batch_size is None:
        raise ValueError(
            "validation holds rows out, and with batch_size=None every step takes all: expected a "
            "batch_size, or validation=0"
        )
    return validation


def _split(plan: Subsampling, rng_key: jax.Array, validation: float) -> tuple:
    """Rows to train on and batches of held-out rows; both empty if no rows are held out."""
    if validation == 0 or not plan.batch_sizes:
        return (), ()
    if len(plan.batch_sizes) > 1:
        raise ValueError(
            f"validation holds out rows of one plate, and {sorted(plan.batch_sizes)} are "
            "subsampled: expected one of them, or validation=0"
        )
    ((plate, batch),) = plan.batch_sizes.items()
    size = plan.sizes[plate]
    held_out = max(1, round(validation * size))
    lot = min(held_out, VALIDATION_ROWS)
    held_out -= held_out % lot
    if size - held_out < batch:
        raise ValueError(
            f"batch_size={batch} is more than the {size - held_out} rows of plate {plate!r} that "
            f"validation={validation:g} leaves: lower one of the two"
        )
    order = random.permutation(rng_key, size).astype(jnp.int32)
    return order[held_out:], order[:held_out].reshape(-1, lot)


def _train(
    model: Model,
    optimiser: optax.GradientTransformation,
    rows: Any,
    held_out: Any,
    start: PyTree,
    keys: jax.Array,
    *,
    num_epochs: int,
    patience: int,
) -> tuple:
    """Train all starts together, until none has improved for ``patience`` epochs."""
    plan = drawn = model.plan
    starts, dtype = keys.shape[0], jax.tree.leaves(start)[0].dtype
    if len(held_out):
        (plate,) = plan.batch_sizes
        drawn = dataclasses.replace(plan, sizes={**plan.sizes, plate: len(rows)})

    def draw(rng_key: jax.Array, stream: Any) -> tuple[Any, Any]:
        batch, stream = minibatch.draw(drawn, rng_key, stream)
        if len(held_out):
            batch[plate] = rows[batch[plate]]
        return batch, stream

    def judge(position: PyTree) -> jax.Array:
        """Mean energy of the held-out rows."""

        def mean_of(lot: jax.Array) -> jax.Array:
            return jnp.mean(model.row_energies(position, plate, {plate: lot}))

        return jnp.mean(lax.map(mean_of, held_out)).astype(dtype)

    def epoch(training: _Training, key: jax.Array, number: jax.Array) -> tuple:
        key = random.fold_in(key, number)

        def step(k: jax.Array, carry: tuple) -> tuple:
            (position, state, stream, *rest), total = carry
            batch, stream = draw(random.fold_in(key, k), stream)
            value, grad = jax.value_and_grad(model.energy)(position, batch)
            grad = jax.tree.map(lambda g: g / plan.num_data, grad)
            updates, state = optimiser.update(grad, state, position)
            position = optax.apply_updates(position, updates)
            return _Training(position, state, stream, *rest), total + value / plan.num_data

        steps, zero = drawn.steps_per_epoch, jnp.zeros((), dtype)
        training, total = lax.fori_loop(0, steps, step, (training, zero))
        loss = total / steps
        if len(held_out):
            judged = value = judge(training.position)
            better = judged < training.lowest
        else:  # the last epoch is the best, if it is finite
            judged, value, better = jnp.full((), jnp.nan, dtype), loss, jnp.isfinite(loss)
        lowest = jnp.where(better, value, training.lowest)
        best = tree_where(better, training.position, training.best)
        best_epoch = jnp.where(better, number + 1, training.best_epoch)
        found = training._replace(best=best, lowest=lowest, best_epoch=best_epoch)
        return found, loss, judged

    def begin(x: PyTree) -> _Training:
        infinite, zero = jnp.full((), jnp.inf, dtype), jnp.zeros((), jnp.int32)
        return _Training(x, optimiser.init(x), (), x, infinite, zero)

    def proceed(carry: tuple) -> tuple:
        training, losses, judged, number = carry
        training, *new = jax.vmap(epoch, in_axes=(0, 0, None))(training, keys, number)
        losses, judged = (
            x.at[:, number].set(y) for x, y in zip((losses, judged), new, strict=True)
        )
        return training, losses, judged, number + 1

    def unfinished(carry: tuple) -> jax.Array:
        training, *_, number = carry
        return (number < num_epochs) & jnp.any(number - training.best_epoch < patience)

    def some(carry: tuple, length: int) -> tuple[tuple, jax.Array]:
        end = carry[-1] + length
        carry = lax.while_loop(lambda x: unfinished(x) & (x[-1] < end), proceed, carry)
        return carry, unfinished(carry)

    empty = jnp.zeros((starts, num_epochs), dtype)
    carry = compiled(jax.vmap(begin), start), empty, empty, jnp.zeros((), jnp.int32)
    if in_trace((rows, held_out, carry, keys)):
        carry, _ = some(carry, num_epochs)
    else:
        length, more = -(-num_epochs // 50), True
        run = program(some, carry, length)
        with tqdm(total=num_epochs, desc="training", delay=5) as bar:
            while more:  # at most 50 times
                carry, more = run(carry, length)
                bar.update(int(carry[-1]) - bar.n)
    training, *record = carry
    return *training[3:], *record
