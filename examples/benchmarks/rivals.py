"""The rivals of today and this package, side by side: the time that each needs.

    python examples/benchmarks/rivals.py logistic --rows 1000 10000 100000
    python examples/benchmarks/rivals.py normal poisson robust --methods nutpie SGHMC
    python examples/benchmarks/rivals.py --figure

Each method is a process of its own on one core. Seconds are seconds of the processor in that
process, from after the imports, so that other work on the machine hardly changes them. A method
samples for ``--seconds`` and until 1,000 effective draws, or until ``--limit`` ends. Lines are put
into docs/tables/rivals_*.md as soon as they are measured; other lines there stay. The figure is
drawn from the table of the logistic regression.

nutpie is no dependency of this package, because it wants an ArviZ below 1: `pip install nutpie`.
Without it, its lines are left out, which is printed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import blackjax
import families
import hierarchies
import jax
import jax.numpy as jnp
import numpy as np
import regression
from blackjax.diagnostics import psis_weights
from blackjax.mcmc.adjusted_mclmc_dynamic import build_kernel, make_random_trajectory_length_fn
from common import DOCS, head, versions
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import HMCECS, MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.util import log_density, potential_energy, unconstrain_fn
from numpyro.optim import Adam

from numpyro_geom import GGMC, SGHMC, SGRLD, HostRows, RiemannianLaplace, SGKernel

GOAL = 1000
"""Effective draws in the column "seconds to"."""
ON_HOST = 10_000_000
"""Rows from which our kernels read them from a file."""
WARMUP = 500
"""Draws of warm-up of NUTS, which has no default."""
TUNING = 10_000
"""``num_steps`` of MAMS's tuning, of which it takes three tenths."""
PATHS = 4
SVI_STEPS = 10_000
MEMORY = 8 * 2**30
"""Bytes that a process may have."""
LARGEST_K, LARGEST_ERROR, SD_RATIOS = 0.7, 0.25, (0.8, 1.25)
"""Beyond these a result is called wrong: tail shape of the weights, error of a mean in posterior
standard deviations, ratios of standard deviations. With 1,000 effective draws of 20 parameters the
largest Monte Carlo error of a mean is 0.1 or so, and ratios are within 0.07 of 1."""


class Problem(NamedTuple):
    """A model, its data, and the moments of its unconstrained parameters.

    Attributes:
        model: NumPyro model.
        data: its arguments.
        mean: exact means, shape (D,).
        sd: exact standard deviations, shape (D,).
        condition: condition number of the posterior's covariance.
        grouped: whether it is a model with groups, where our kernels may have other coordinates.
    """

    model: Callable
    data: tuple
    mean: np.ndarray
    sd: np.ndarray
    condition: float
    grouped: bool = False


class Measured(NamedTuple):
    """What a method has done.

    Attributes:
        seconds: of start, compilation, warm-up and sampling.
        draws: shape (draws, D), unconstrained.
        size: effective draws of the worst parameter.
        gradients: gradient evaluations of sampling, or None.
        weights: importance weights of the draws, or None.
        wrong: why the draws are not to be trusted, as the method itself says; or "".
    """

    seconds: list[float]
    draws: np.ndarray
    size: float
    gradients: float | None = None
    weights: np.ndarray | None = None
    wrong: str = ""


class Clock:
    """Seconds of the processor: laps, and the time at which a measurement has to end."""

    def __init__(self, limit: float) -> None:
        self.last = time.process_time()
        self.end = self.last + limit

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self.last = self.last, time.process_time()
        return self.last - before

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return time.process_time() > self.end


class OutOfTimeError(Exception):
    """Warm-up has not ended within the limit."""


def worst_size(draws: np.ndarray) -> float:
    """Effective draws of the worst parameter, some parameters at a time, for memory."""
    columns = range(0, draws.shape[1], 20)
    return min(float(np.min(effective_sample_size(draws[None, :, k : k + 20]))) for k in columns)


class Until:
    """Whether sampling may end: the seconds are over and there are enough effective draws.

    The draws are looked at each time that the seconds have grown by half, outside the clock.
    """

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.next, self.clock, self.spent = seconds, clock, 0.0

    def enough(self, draws: Callable[[], np.ndarray], sampled: float) -> bool:
        """``sampled`` seconds have been spent on the draws."""
        if self.clock.over:
            return True
        if sampled < self.next:
            return False
        begun = time.process_time()
        found, self.next = worst_size(draws()) >= GOAL, 1.5 * sampled
        self.spent += time.process_time() - begun
        return found


# Methods: (problem, seconds of sampling, clock) -> what was measured


def loop(
    clock: Clock,
    seconds: float,
    start: float,
    state: Any,
    advance: Callable,
    data: tuple,
    num_warmup: int,
    chunk: int,
    view: Callable = lambda draws: draws,
) -> Measured:
    """Warm-up and sampling of ``advance(state, data) -> (state, (draw, gradients))``.

    ``view`` maps draws to unconstrained vectors, outside the clock.
    """

    @jax.jit
    def many(state: Any, data: tuple) -> tuple:
        return lax.scan(lambda s, _: advance(s, data), state, None, chunk)

    program = many.lower(state, data).compile()
    compiling = clock.lap()
    for _ in range(-(-num_warmup // chunk)):
        state, _ = jax.block_until_ready(program(state, data))
        if clock.over:
            raise OutOfTimeError
    warmup = clock.lap()
    if clock.over:
        raise OutOfTimeError
    until, draws, gradients, sampling = Until(seconds, clock), [], 0.0, 0.0
    while not until.enough(lambda: view(np.concatenate(draws)), sampling):
        clock.lap()
        state, (draw, count) = program(state, data)
        draws.append(np.asarray(draw, np.float64))
        gradients += float(np.sum(count))
        sampling += clock.lap()
    found = view(np.concatenate(draws))
    return Measured([start, compiling, warmup, sampling], found, worst_size(found), gradients)


def of_kernel(
    make: Callable,
    num_warmup: int,
    chunk: int,
    *more: Any,
    inner: Callable = lambda state: state,
) -> Callable:
    """A NumPyro kernel: ``make(model, data)``.

    Args:
        make: (model, data) -> kernel.
        num_warmup: draws of warm-up.
        chunk: draws of a program, at most; fewer where there are many rows.
        more: further arguments of the model.
        inner: state -> the part with the draw and the number of steps.
    """

    def run(problem: Problem, seconds: float, clock: Clock) -> Measured:
        kernel = make(problem.model, problem.data)
        args = (*problem.data, *more)
        state = jax.block_until_ready(kernel.init(random.key(1), num_warmup, None, args, {}))
        on_host = isinstance(problem.data[0], HostRows)

        def advance(state: Any, data: tuple) -> tuple:
            args = problem.data if on_host else data
            state = kernel.sample(state, (*args, *more), {})
            return state, (ravel_pytree(inner(state).z)[0], inner(state).num_steps)

        size = max(1, min(chunk, chunk * 20_000 // len(problem.data[-1])))
        data = () if on_host else problem.data
        begun = clock.lap()
        if not (problem.grouped and isinstance(kernel, SGKernel)):
            return loop(clock, seconds, begun, state, advance, data, num_warmup, size)
        post = jax.vmap(kernel.postprocess_fn(args, {}))
        unravel = jax.vmap(ravel_pytree(state.z)[1])

        def view(draws: np.ndarray) -> np.ndarray:
            return to_vectors(problem, jax.jit(lambda z: post(unravel(z)))(draws.astype("f4")))

        return loop(clock, seconds, begun, state, advance, data, num_warmup, size, view)

    return run


def density(problem: Problem) -> tuple[jax.Array, Callable]:
    """A start, uniform from -2 to 2 as in NumPyro, and the log density, (x, data) -> scalar."""
    zeros, unravel = families.unconstrained_zeros(problem.model, problem.data)
    flat = random.uniform(random.key(1), zeros.shape, zeros.dtype, -2, 2)
    return flat, lambda x, data: -potential_energy(problem.model, data, {}, unravel(x))


def is_over(sampler: Any) -> bool:
    """Whether a sampler of nutpie has ended, after a moment; an error of it is raised here."""
    time.sleep(0.02)
    try:
        return sampler.is_finished
    except TimeoutError:
        return False


def of_nutpie(
    problem: Problem, seconds: float, clock: Clock, dtype: str = "f4", **settings: Any
) -> Measured:
    """The density in nutpie, whose warm-up has its own length."""
    import nutpie
    from nutpie.compiled_pyfunc import from_pyfunc

    if dtype == "f8":
        jax.config.update("jax_enable_x64", True)  # for its threads too; the process is its own
    data = tuple(x.astype(dtype) if x.dtype == "f4" else x for x in problem.data)
    flat, log_density = density(problem._replace(data=data))
    start = clock.lap()
    program = jax.jit(jax.value_and_grad(log_density)).lower(flat, data).compile()
    compiling = clock.lap()
    times, draws, calls = [], [], [0]

    def make_density() -> Callable:
        def evaluate(x: np.ndarray) -> tuple:
            calls[0] += 1
            value, grad = program(np.asarray(x, flat.dtype), data)
            return float(value), np.asarray(grad, np.float64)

        return evaluate

    def make_record(*_: Any) -> Callable:
        def record(x: np.ndarray) -> dict:
            times.append((time.process_time(), calls[0]))
            draws.append(np.array(x))
            return {"x": x}

        return record

    shape = (len(flat),)
    model = from_pyfunc(len(flat), make_density, make_record, [np.dtype("float64")], [shape], ["x"])
    options = {"chains": 1, "cores": 1, "seed": 1, "progress_bar": False, "save_warmup": False}
    most = min(10**6, 10**8 // len(flat))  # memory for all draws is taken at once
    sampler = nutpie.sample(model, draws=most, blocking=False, **options, **settings)
    tune = sampler._settings.num_tune

    def so_far() -> tuple:
        return lambda: np.stack(draws[tune:]), times[-1][0] - times[tune - 1][0] - until.spent

    until = Until(seconds, clock)
    while not is_over(sampler) and (len(draws) < tune + 10 or not until.enough(*so_far())):
        if clock.over:
            break
    number = len(draws)
    sampler.cancel()
    if number <= tune + 1:
        raise OutOfTimeError
    (begin, before), (end, after) = times[tune - 1], times[number - 1]
    warmup, sampling, gradients = begin - clock.last, end - begin - until.spent, after - before
    found = np.stack(draws[tune:number])
    parts = [start, compiling, warmup, sampling]
    return Measured(parts, found, worst_size(found), gradients)


def of_mams(problem: Problem, seconds: float, clock: Clock) -> Measured:
    """Blackjax's adjusted MCLMC with its own tuning of length, step and diagonal scale."""
    flat, log_density = density(problem)
    kernel = build_kernel(integration_steps_fn=make_random_trajectory_length_fn(True))
    key_init, key_tune, key_run = random.split(random.key(1), 3)

    @jax.jit
    def tune(flat: jax.Array, data: tuple) -> tuple:
        of = partial(log_density, data=data)
        state = blackjax.adjusted_mclmc_dynamic.init(flat, of, key_init)
        return blackjax.adjusted_mclmc_find_L_and_step_size(
            kernel, of, TUNING, state, key_tune, target=0.9
        )[:2]

    start = clock.lap()
    program = tune.lower(flat, problem.data).compile()
    compiling = clock.lap()
    state, tuned = jax.block_until_ready(program(flat, problem.data))
    warmup = clock.lap()

    def advance(state: tuple, data: tuple) -> tuple:
        key_next, key_step = random.split(state[0])
        new, info = kernel(
            key_step,
            state[1],
            partial(log_density, data=data),
            tuned.step_size,
            inverse_mass_matrix=tuned.inverse_mass_matrix,
            integration_steps_params=(tuned.L / tuned.step_size,),
        )
        # McLachlan's integrator has two gradients in a step
        return (key_next, new), (new.position, 2 * info.num_integration_steps)

    chunk = 100 if len(problem.data[0]) < 10**6 else 10
    run = (key_run, state)
    found = loop(clock, seconds, start, run, advance, problem.data, 0, chunk)
    found.seconds[1] += compiling
    found.seconds[2] = warmup
    return found


def of_pathfinder(problem: Problem, seconds: float, clock: Clock) -> Measured:
    """Pathfinder from four starts, and the draws weighted by Pareto-smoothed importance."""
    flat, log_density = density(problem)
    of = partial(log_density, data=problem.data)
    key_paths, key_starts, key_draws = random.split(random.key(1), 3)
    starts = random.uniform(key_starts, (PATHS, len(flat)), minval=-2, maxval=2)
    find = jax.jit(lambda key, x: blackjax.pathfinder.approximate(key, of, x)[0])
    paths = [find(*x) for x in zip(random.split(key_paths, PATHS), starts, strict=True)]
    jax.block_until_ready(paths)
    start = clock.lap()

    @partial(jax.jit, static_argnums=2)
    def draw(key: jax.Array, path: Any, count: int) -> tuple:
        x, logq = blackjax.pathfinder.sample(key, path, count)
        return x, lax.map(of, x) - logq

    parts = [draw(k, p, GOAL) for k, p in zip(random.split(key_draws, PATHS), paths, strict=True)]
    draws, ratios = (np.concatenate(x) for x in zip(*parts, strict=True))
    logs, k = psis_weights(jnp.nan_to_num(ratios, nan=-jnp.inf))
    weights = np.exp(np.asarray(logs, np.float64))
    sampling = clock.lap()
    wrong = f"k of the weights {float(k):.2f}" if not k < LARGEST_K else ""
    size = 1 / np.sum(weights**2)
    return Measured([start, 0, 0, sampling], draws, size, None, weights, wrong)


def of_guide(problem: Problem, seconds: float, clock: Clock) -> Measured:
    """A normal law by variational inference. Its draws are independent, and have no weights."""
    guide = AutoMultivariateNormal(problem.model)
    svi = SVI(problem.model, guide, Adam(0.01), Trace_ELBO())
    found = svi.run(random.key(1), SVI_STEPS, *problem.data, progress_bar=False)
    jax.block_until_ready(found.params)
    start = clock.lap()
    sites = guide.sample_posterior(random.key(2), found.params, sample_shape=(2 * GOAL,))
    draws = to_vectors(problem, sites)
    return Measured([start, 0, 0, clock.lap()], draws, len(draws))


def of_laplace(problem: Problem, seconds: float, clock: Clock) -> Measured:
    """The guide of this package. Its draws are independent, and have no weights by default."""
    guide = RiemannianLaplace(problem.model)
    params = guide.fit(random.key(1), *problem.data)
    start = clock.lap()
    found = guide.draw(random.key(2), params, sample_shape=(GOAL,), progress_bar=False)
    draws = to_vectors(problem, found.samples)[np.asarray(found.success)]
    return Measured([start, 0, 0, clock.lap()], draws, len(draws))


def to_vectors(problem: Problem, sites: dict) -> np.ndarray:
    """Unconstrained vectors of constrained draws."""

    def flat(sites: dict) -> jax.Array:
        return ravel_pytree(unconstrain_fn(problem.model, problem.data, {}, sites))[0]

    model = {k: x for k, x in sites.items() if not k.startswith("_auto")}
    return np.asarray(jax.jit(lambda x: lax.map(flat, x))(model), np.float64)


def nuts(**settings: Any) -> Callable:
    """NumPyro's NUTS."""
    return of_kernel(lambda model, _: NUTS(model, **settings), WARMUP, 50)


def newton(data: tuple) -> jax.Array:
    """A mode, in float32 and in one program, as a user would write it."""

    @jax.jit
    def search(data: tuple) -> jax.Array:
        def energy(w: jax.Array) -> jax.Array:
            return -log_density(regression.logistic, data, {}, {"w": w})[0]

        def step(_: int, w: jax.Array) -> jax.Array:
            return w - jnp.linalg.solve(jax.hessian(energy)(w), jax.grad(energy)(w))

        return lax.fori_loop(0, 12, step, jnp.zeros(regression.COLUMNS))

    return search(data)


def hmcecs(data: tuple) -> HMCECS:
    """HMCECS with a Taylor proxy at a mode; the search for the mode is part of the start."""
    proxy = HMCECS.taylor_proxy({"w": newton(data)})
    return HMCECS(NUTS(regression.logistic, dense_mass=True), num_blocks=10, proxy=proxy)


METHODS: dict[str, Callable] = {
    "NUTS": nuts(),
    "NUTS, dense": nuts(dense_mass=True),
    "nutpie": of_nutpie,
    "nutpie, low rank": partial(of_nutpie, low_rank_modified_mass_matrix=True),
    "nutpie, low rank, float64": partial(of_nutpie, dtype="f8", low_rank_modified_mass_matrix=True),
    "MAMS": of_mams,
    "HMCECS": of_kernel(
        lambda _, data: hmcecs(data), 1000, 1000, 256, inner=lambda state: state.hmc_state
    ),
    "Pathfinder": of_pathfinder,
    "normal guide": of_guide,
    "SGHMC": of_kernel(lambda model, _: SGHMC(model), 1000, 1000),
    "GGMC": of_kernel(lambda model, _: GGMC(model), 1000, 1000),
    "SGRLD": of_kernel(lambda model, _: SGRLD(model), 1000, 1000),
    "RiemannianLaplace": of_laplace,
}
"""docs/measured/rivals.md has the calls."""
READS_FILES = ("SGHMC", "SGRLD")
"""Methods that can read rows from a file."""

# Problems

WIDE = 100.0
"""Standard deviation of the coefficients' prior, so wide that the rows decide."""
FAMILIES: dict[str, Callable] = {
    f.__name__: partial(f, prior_sd=WIDE)
    for f in (
        *(families.normal, families.bernoulli, families.poisson),
        *(families.negative_binomial, families.robust),
    )
}
GROUPED = ("zipf", "items", "nested", "slopes_apart")
"""Hierarchies of hierarchies.py."""


@functools.cache
def grouped(name: str) -> tuple[Callable, tuple]:
    """A hierarchy and its data."""
    model, data = hierarchies.MODELS[name][0]()
    return model, tuple(map(jnp.asarray, data))


MODELS = {
    **{"logistic": regression.logistic, **FAMILIES, "two_level": families.two_level},
    **{name: lambda *data, name=name: grouped(name)[0](*data) for name in GROUPED},
}
BADLY_SCALED = 1e5
"""Smallest condition number of the tables in the figure."""


def exact(model: Callable, data: tuple, num_draws: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Moments from NUTS in float64 with the inverse Hessian as its mass matrix; a condition."""
    mode, covariance = families.laplace(model, data)
    with jax.enable_x64(True):
        args = tuple(jnp.asarray(x, np.float64 if x.dtype.kind == "f" else None) for x in data)
        _, unravel = families.unconstrained_zeros(model, args)
        kernel = NUTS(
            potential_fn=lambda z: potential_energy(model, args, {}, unravel(z)),
            inverse_mass_matrix=jnp.asarray(covariance),
            adapt_mass_matrix=False,
            dense_mass=True,
        )
        mcmc = MCMC(kernel, num_warmup=200, num_samples=num_draws, progress_bar=False)
        mcmc.run(random.key(0), init_params=jnp.asarray(mode))
        draws = np.asarray(mcmc.get_samples())
    return draws.mean(0), draws.std(0), float(np.linalg.cond(covariance))


def make(name: str, num_rows: int, condition: float, folder: Path) -> Problem:
    """A problem with NumPy's arrays, memory maps in a folder for the largest."""
    if name == "two_level":
        data = families.two_level_rows(num_rows)
        mean, sd = families.exact_two_level(data)
        return Problem(families.two_level, data, mean, sd, np.nan)
    if name in GROUPED:
        model, data = grouped(name)
        problem = Problem(model, data, np.zeros(0), np.zeros(0), np.nan)
        mcmc = MCMC(GGMC(model), num_warmup=1000, num_samples=10_000, progress_bar=False)
        mcmc.run(random.key(0), *data)
        draws = to_vectors(problem, mcmc.get_samples())
        return problem._replace(mean=draws.mean(0), sd=draws.std(0))
    smallest = condition**-0.5
    on_host = num_rows >= ON_HOST
    X, y = regression.rows(num_rows, smallest, folder if on_host else None)
    if name == "logistic":
        if num_rows < 10_000:
            return Problem(regression.logistic, (X, y), *exact(regression.logistic, (X, y), 20_000))
        mean, precision = regression.laplace(X, y)
        sd = np.sqrt(np.diag(np.linalg.inv(precision)))
        return Problem(regression.logistic, (X, y), mean, sd, float(np.linalg.cond(precision)))
    rng = np.random.default_rng(1)
    values, vectors = np.linalg.eigh(X.T @ X / num_rows)
    predictor = X @ (vectors @ (0.2 * rng.normal(size=len(values)) / values**0.25))
    y, other = families.outcomes(name, rng, predictor)
    data = (X, y, other)
    return Problem(MODELS[name], data, *exact(MODELS[name], data, 2000))


def save(problem: Problem, folder: Path) -> None:
    """Write what a process needs."""
    np.savez(folder / "moments.npz", mean=problem.mean, sd=problem.sd)
    for k, x in enumerate(problem.data):
        path = folder / f"data{k}.npy"
        if isinstance(x, np.memmap):
            path.symlink_to(x.filename)
        else:
            np.save(path, x)


# One method, in a process of its own


def one(name: str, method: str, folder: Path, seconds: float, limit: float) -> None:
    """Measure and print a result as JSON."""
    warnings.simplefilter("ignore")
    saved = np.load(folder / "moments.npz")
    paths = sorted(folder.glob("data*.npy"))
    on_host = len(np.load(paths[0], mmap_mode="r")) >= ON_HOST
    if on_host and method.startswith(READS_FILES):
        data = tuple(HostRows(np.load(x, mmap_mode="r")) for x in paths)
    else:
        data = tuple(jnp.asarray(np.load(x)) for x in paths)
    problem = Problem(MODELS[name], data, saved["mean"], saved["sd"], np.nan, name in GROUPED)
    spent = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (int(spent + 1.2 * limit + 5),) * 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        found = METHODS[method](problem, seconds, Clock(limit))
    except OutOfTimeError:
        print(json.dumps({"failed": f"warm-up not done in {limit:.0f} s"}))
        return
    weights = np.ones(len(found.draws)) if found.weights is None else found.weights
    weights = weights / weights.sum()
    mean = weights @ found.draws
    ratios = np.sqrt(weights @ (found.draws - mean) ** 2) / problem.sd
    error = float(np.abs((mean - problem.mean) / problem.sd).max())
    low, high = float(ratios.min()), float(ratios.max())
    right = error < LARGEST_ERROR and SD_RATIOS[0] < low and high < SD_RATIOS[1]
    result = {
        "seconds": found.seconds,
        "draws": len(found.draws),
        "size": float(found.size),
        "gradients": found.gradients,
        "error": error,
        "ratios": [low, high],
        "wrong": found.wrong or ("" if right else "moments"),
    }
    print(json.dumps(result), flush=True)
    os._exit(0)  # threads of a cancelled sampler may still run


def in_process(
    name: str, method: str, folder: Path, seconds: float, limit: float, core: int
) -> dict[str, Any]:
    """`one` in a process of its own on one core; a dict with "failed" if it gives no result."""
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [
            *("taskset", "-c", str(core), sys.executable, __file__),
            *("--one", name, method, str(folder)),
            *("--seconds", str(seconds), "--limit", str(limit)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    print(done.stderr[-1000:], file=sys.stderr)
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begun.ru_utime
    if used > limit:
        return {"failed": f"not done in {limit:.0f} s"}
    if any(x in done.stderr for x in ("RESOURCE_EXHAUSTED", "Out of memory", "bad_alloc")):
        return {"failed": f"fails: more than {MEMORY / 2**30:.0f} GiB of memory"}
    last = [x for x in done.stderr.splitlines() if re.match(r"\w*(\.\w+)*Error", x)]
    return {"failed": f"fails: {last[-1][:100]}" if last else f"fails: signal {-done.returncode}"}


# The tables

HEAD = head(
    *("method", "start, compile, warm-up, sample (s)", f"seconds to ESS {GOAL:,}"),
    *("ESS/s, sampling", "gradients per ESS", "mean error", "sd ratios"),
)


def line(method: str, r: dict[str, Any], limit: float) -> str:
    """A line of a table."""
    if "failed" in r:
        return f"| {method} | {r['failed']} |" + " |" * 5
    *before, sampling = r["seconds"]
    size, total = r["size"], sum(r["seconds"])
    needed = sum(before) + sampling * GOAL / size
    if r["wrong"]:
        cells = [f"wrong: {r['wrong']}", "–"]
    elif size < GOAL:
        cells = [f"not reached in {total:.0f} s", f"{size / sampling:.3g}"]
    else:
        cells = [f"{needed:.1f}", f"{size / sampling:.3g}"]
    cells.append("–" if r["wrong"] or not r["gradients"] else f"{r['gradients'] / size:.3g}")
    low, high = r["ratios"]
    parts = ", ".join(f"{x:.1f}" for x in r["seconds"])
    text = " | ".join([method, parts, *cells])
    return f"| {text} | {r['error']:.2f} | {low:.2f} to {high:.2f} |"


def path_of(name: str) -> Path:
    """The table's file."""
    kind = "families" if name in FAMILIES else name if name == "logistic" else "hierarchy"
    return DOCS / "tables" / f"rivals_{kind}.md"


def read(path: Path) -> dict[str, tuple[dict[str, str], str]]:
    """Lines by method, and machine and versions, by title."""
    parts = {}
    for text in re.split(r"(?m)^(?=\*\*)", path.read_text() if path.exists() else ""):
        found = re.finditer(r"(?m)^\| (.*?) \|.*$", text)
        lines = {m[1]: m[0] for m in found if m[1] in METHODS}
        made = re.findall(r"(?m)^\d{4}-.*$", text)
        if lines:
            parts[text.splitlines()[0]] = (lines, made[-1])
    return parts


def about(title: str) -> tuple[int, int, float]:
    """Place of a problem among all, its rows and its condition, or number of parameters."""
    name, rows, last = re.findall(r"`(\w+)`, ([\d,]+) rows, \D*([\d,.e+]+)", title)[0]
    return [*MODELS].index(name), int(rows.replace(",", "")), float(last.replace(",", ""))


def put(path: Path, title: str, method: str, text: str, made: str) -> None:
    """Replace a line, or add it."""
    parts = read(path)
    lines = {**parts.get(title, ({}, ""))[0], method: text}
    parts[title] = ({m: lines[m] for m in METHODS if m in lines}, made)

    titles = sorted(parts, key=about)
    texts = ["\n".join([t, "", *HEAD, *parts[t][0].values(), "", parts[t][1], ""]) for t in titles]
    path.write_text("\n".join(texts))


def table(name: str, num_rows: int, condition: float, given: argparse.Namespace) -> None:
    """Measure a problem's methods, and write each line when it is done."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        problem = make(name, num_rows, condition, folder)
        save(problem, folder)
        num_rows = len(problem.data[-1])
        last = f"condition {problem.condition:.1e}"
        if np.isnan(problem.condition):
            last = f"{len(problem.mean):,} parameters"
        title = f"**`{name}`, {num_rows:,} rows, {last}**"
        del problem
        print(f"{title}\n\n" + "\n".join(HEAD), flush=True)
        for method in METHODS:
            if given.methods and method not in given.methods:
                continue
            if "HMCECS" in method and name != "logistic":
                continue  # its model has to take the number of rows of a step
            if "nutpie" in method and importlib.util.find_spec("nutpie") is None:
                print(f"{method} is left out: pip install nutpie")
                continue
            r = in_process(name, method, folder, given.seconds, given.limit, given.core)
            text = line(method, r, given.limit)
            print(text, r, flush=True)
            if not given.no_table:
                put(path_of(name), title, method, text, f"{datetime.date.today()}, {versions()}")


# The figure


def points() -> dict[str, list[tuple[int, float]]]:
    """Rows and seconds by method, of the logistic regression's worst condition."""
    found: dict[str, list[tuple[int, float]]] = {}
    for title, (lines, _) in read(path_of("logistic")).items():
        _, num_rows, condition = about(title)
        if condition < BADLY_SCALED:
            continue
        for method, text in lines.items():
            cell = text.split("|")[3].strip().replace(",", "")
            if re.fullmatch(r"[\d.]+", cell):
                found.setdefault(method, []).append((num_rows, float(cell)))
    return {m: sorted(found[m]) for m in METHODS if m in found}


def failures() -> list[str]:
    """Names of the methods in those tables that have no seconds in any of them."""
    tables = read(path_of("logistic")).items()
    run = {
        method for title, (lines, _) in tables for method in lines if about(title)[2] > BADLY_SCALED
    }
    return [method for method in METHODS if method in run and method not in points()]


def summary(found: dict[str, list[tuple[int, float]]]) -> str:
    """The figure's numbers as a table, with a line for each number of rows."""
    lines = head("rows", *found)
    for num_rows in sorted({n for values in found.values() for n, _ in values}):
        seconds = [dict(values).get(num_rows) for values in found.values()]
        cells = ["–" if x is None else f"{x:,.1f}" for x in seconds]
        lines.append(f"| {num_rows:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


OURS = {"SGHMC": "#5c7cfa", "GGMC": "#15aabf", "SGRLD": "#cc5de8", "RiemannianLaplace": "#868e96"}
THEIRS = ("#e07b39", "#c0392b", "#8d6e63", "#2f9e44", "#e8a33d", "#868e96", "#d6336c", "#74b816")


def draw(style: str, path: Path) -> None:
    """Seconds over rows, in the colours of light or dark pages."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with plt.style.context(style):
        figure, ax = plt.subplots(figsize=(5.2, 4.6))
        theirs = iter(THEIRS)
        for name, values in points().items():
            ours = name in OURS
            ax.loglog(
                *zip(*values, strict=True),
                marker="o" if ours else "s",
                markersize=5 if ours else 4,
                linestyle="-" if ours else "--",
                label=name,
                color=OURS[name] if ours else next(theirs),
            )
        missing = textwrap.fill(f"Wrong, or not in time: {', '.join(failures())}", 72)
        figure.text(0.5, 0, missing, fontsize=8, ha="center", va="top")
        ax.set(xlabel="rows", ylabel="seconds to 1,000 effective draws")
        ax.yaxis.set_major_locator(mpl.ticker.LogLocator(10, (1, 2, 5)))
        ax.yaxis.set_minor_locator(mpl.ticker.NullLocator())
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:,.0f}"))
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(
            frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.45, -0.14), ncol=3
        )
        figure.tight_layout()
        settings = {"dpi": 150, "transparent": True, "bbox_inches": "tight"}
        figure.savefig(path, **settings, metadata={"Software": None})
        plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Run the problems, or draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000])
    parser.add_argument("--condition", type=float, nargs="+", default=[4e6])
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], help="only those")
    parser.add_argument("--seconds", type=float, default=5.0, help="of sampling, at least")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds of a method, at most")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--no-table", action="store_true", help="print only")
    parser.add_argument("--figure", action="store_true", help="draw it, and write its numbers")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one:
        name, method, folder = given.one
        one(name, method, Path(folder), given.seconds, given.limit)
        return
    for name in given.problems:
        if name not in MODELS:
            parser.error(f"expected problems of {', '.join(MODELS)}; got {name}")
        for num_rows in given.rows:
            for condition in given.condition:
                table(name, num_rows, condition, given)
    if given.figure:
        (DOCS / "tables" / "rivals_seconds.md").write_text(summary(points()))
        draw("default", DOCS / "figures" / "time_to_accuracy.png")
        draw("dark_background", DOCS / "figures" / "time_to_accuracy_dark.png")


if __name__ == "__main__":
    main()
