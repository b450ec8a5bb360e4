"""Random arguments, most of them bad, for every public name of the package.

Each entry of `CALLS` is a public function or class with arguments that work. A case replaces one
or two of them by random values. The call must then raise a typed error, or return a result
without NaN. The script prints the cases that end otherwise, and how to repeat them:

    python examples/benchmarks/fuzz_arguments.py [--seconds 600] [--seed 0]
    python examples/benchmarks/fuzz_arguments.py --case Monge alpha2 -1
"""

from __future__ import annotations

import argparse
import contextlib
import fractions
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from fuzz_outcomes import FAILURES, outcome_of
from numpyro.infer import MCMC, NUTS, init_to_uniform

import numpyro_geom as ng
from numpyro_geom import baselines, diagnostics
from numpyro_geom.laplace import information

X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=12).astype(np.float32)
KEY = jax.random.key(0)
USUAL = object()


def regression(x: Any = X, y: Any = Y) -> None:
    """A matrix site, a positive site, and rows."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 2]).to_event(2))
    s = numpyro.sample("s", dist.HalfNormal(1))
    with numpyro.plate("rows", 12) as i:
        numpyro.sample("y", dist.Normal((x[i] @ w).sum(-1), s), obs=y[i])


def half_square(z: Any) -> jax.Array:
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(z)) / 2


# --- values

ARRAYS: dict[str, Callable[[], Any]] = {
    "0-D": lambda: np.float32(0.5),
    "array()": lambda: np.array(0.5),
    "int()": lambda: np.array(3),
    "bool()": lambda: np.array(True),
    "nan()": lambda: np.array(np.nan),
    "str()": lambda: np.array("x"),
    "complex()": lambda: np.array(1j),
    "empty": lambda: np.zeros(0),
    "empty rows": lambda: np.zeros((0, 2)),
    "one": lambda: np.ones(1),
    "vector": lambda: np.arange(3.0),
    "rows": lambda: np.arange(12.0),
    "matrix": lambda: np.eye(2),
    "5x5": lambda: np.eye(5),
    "not symmetric": lambda: np.arange(25.0).reshape(5, 5),
    "3-D": lambda: np.ones((2, 3, 4)),
    "6-D": lambda: np.ones((1, 1, 2, 1, 1, 3)),
    "nans": lambda: np.full((12, 2), np.nan),
    "infs": lambda: np.full(12, np.inf),
    "huge": lambda: np.full((12, 2), 1e300),
    "ints": lambda: np.arange(12),
    "negative ints": lambda: -np.arange(1, 13),
    "big ints": lambda: np.full(12, 2**62),
    "bools": lambda: np.arange(12) % 2 == 0,
    "complexes": lambda: np.ones((12, 2), complex),
    "objects": lambda: np.array([None, 1, "x"], object),
    "texts": lambda: np.array(["a", "b"]),
    "dates": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "structured": lambda: np.zeros(3, [("a", float), ("b", int)]),
    "float16": lambda: np.ones((12, 2), np.float16),
    "masked": lambda: np.ma.masked_less(np.arange(12.0), 3),
    "fortran": lambda: np.asfortranarray(np.ones((12, 2))),
    "big endian": lambda: np.ones(12, ">f8"),
    "jax": lambda: jnp.ones((12, 2)),
    "jax nan": lambda: jnp.array(jnp.nan),
    "jax int": lambda: jnp.arange(3),
    "key": lambda: jax.random.key(1),
    "keys": lambda: jax.random.split(jax.random.key(1), 3),
    "old key": lambda: jax.random.PRNGKey(1),
}
VALUES: dict[str, Callable[[], Any]] = {
    **{
        repr(x): functools.partial(lambda x: x, x)
        for x in (
            None, True, False, 0, 1, -1, 2, 3, 12, 13, 10**9, 0.5, -0.5, 0.0, -0.0, 1.0, 1.5, 1e-30,
            1e-320, 1e30, 1e308, float("nan"), float("inf"), -float("inf"), 1j, "", "x", "auto",
            "nan", "1", "w", "rows", "epoch", "monge", "none", "posterior", "w ", "ü", "a" * 300,
            b"x", (), [], {}, (1,), (1, 2), [0.5], ["w"], ["w", "w"], ("w", "s"), [("w",), ("s",)],
            [1, "w"], [None], [[]], {"w": 1}, {"rows": 3}, {"rows": -1}, {"rows": 0.5},
            {"rows": None}, {1: 2}, {"w": "rmsprop", "*": "identity"}, {"": ""}, {"w": {}},
            {None: None}, {"w": np.ones((2, 2))}, {("w",): np.eye(4)}, set(), frozenset({"w"}),
            range(3), slice(None), Ellipsis, np.nan, np.int64(3), np.bool_(True),
            np.float16(0.5), np.str_("w"), fractions.Fraction(1, 2),
        )
    },
    "10**400": lambda: 10**400,
    "-10**400": lambda: -(10**400),
    "object()": object,
    "distribution": lambda: dist.Normal(0, 1),
    "module": lambda: np,
    "generator": lambda: (x for x in "w"),
    "lambda: None": lambda: lambda: None,
    "lambda x: x": lambda: lambda x: x,
    "lambda *x, **y: nan": lambda: lambda *x, **y: jnp.nan,
    "kernel": lambda: ng.SGRLD(regression),
    "metric class": lambda: ng.Monge,
    "metric": lambda: ng.RMSprop(),
    "schedule": lambda: lambda i: 0.1,
    "guide": lambda: ng.RiemannianLaplace(regression),
    "mcmc": lambda: MCMC(NUTS(regression), num_warmup=1, num_samples=1, progress_bar=False),
    "host rows": lambda: ng.HostRows(X),
    "optimiser": lambda: optax.sgd(0.1),
    "nested": lambda: {"w": {"w": [np.ones(2), None, "x"]}},
    **ARRAYS,
}  # fmt: skip


# --- calls


class Call(NamedTuple):
    """A public name with arguments that work.

    Attributes:
        function: what is called.
        arguments: makes arguments that work, by name; the one named ``*`` comes first.
    """

    function: Callable
    arguments: Callable[[], dict[str, Any]]


def start(kernel: Callable) -> Callable:
    """Construct a kernel, start a chain, and take a draw."""

    def call(init_params: Any = None, x: Any = X, y: Any = Y, **settings: Any) -> Any:
        if settings.get("potential_fn") is not None:
            settings = {**settings, "model": None}
            init_params = {"w": np.ones((2, 2))} if init_params is None else init_params
        chain = kernel(settings.pop("model"), **settings)
        repr(chain)
        state = chain.init(KEY, 1, init_params, (x, y), {})
        return jax.tree.map(np.asarray, chain.sample(state, (x, y), {}).z)

    return call


COMMON = {
    "model": regression, "potential_fn": None, "init_params": None, "x": X, "y": Y,
    "batch_size": None, "num_steps": 1, "temperature": 1.0, "batching": "replacement",
    "init_strategy": init_to_uniform,
}  # fmt: skip
STEPS = {"step_size": 0.01}
TUNED = {**STEPS, "bias_tolerance": 0.1, "control_variate": False}
SCALED = {"dense_mass": None, "inverse_mass_matrix": None}
MOVES = {**COMMON, **TUNED, "metric": "identity"}
KERNELS: dict[str, tuple[Callable, dict[str, Any]]] = {
    "SGRLD": (ng.SGRLD, {
        **MOVES, **SCALED, "divergence": "frozen", "adjusted": False,
    }),
    "SGHMC": (ng.SGHMC, {
        **MOVES, **SCALED, "divergence": "frozen", "friction": 1.0,
    }),
    "SGNHT": (ng.SGNHT, {
        **MOVES, **SCALED, "friction": 1.0, "thermostat_mass": 1.0,
    }),
    "GGMC": (ng.GGMC, {
        **{n: x for n, x in COMMON.items() if n != "batching"}, **STEPS, **SCALED,
        "metric": "identity", "friction": 1.0, "target_accept": 0.8,
        "control_variate": False, "full_potential_fn": None, "num_data": None,
    }),
    "ISGD": (baselines.ISGD, {**COMMON, "batch_size": 3, "groups": None, "decay": 0.5}),
    "AdamSGLD": (baselines.AdamSGLD, {
        **COMMON, **TUNED, "drift": 1.0, "mean_decay": 0.9, "square_decay": 0.999, "eps": 1e-8,
    }),
}  # fmt: skip


@functools.cache
def short_run() -> MCMC:
    mcmc = MCMC(
        ng.SGRLD(regression, batch_size=3, step_size=1e-3, num_steps=2),
        num_warmup=20, num_samples=40, num_chains=2, chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.run(KEY, X, Y)
    return mcmc


@functools.cache
def fitted() -> tuple[ng.RiemannianLaplace, dict]:
    guide = ng.RiemannianLaplace(regression, metric="euclidean")
    return guide, guide.fit(KEY, X, Y, num_starts=1, max_steps=50)


@functools.cache
def laplace_draws() -> Any:
    guide, params = fitted()
    return guide.draw(KEY, params, X, Y, sample_shape=(2, 10))


def draws() -> dict[str, np.ndarray]:
    return {k: np.asarray(v) for k, v in short_run().get_samples(group_by_chain=True).items()}


def one_chain() -> dict[str, np.ndarray]:
    return {name: x[0] for name, x in draws().items()}


def fit_laplace(init_params: Any, num_starts: Any, max_steps: Any, x: Any, y: Any, **s: Any) -> Any:
    guide = ng.RiemannianLaplace(s.pop("model"), s.pop("metric_of"), **s)
    params = guide.fit(
        KEY, x, y, num_starts=num_starts, max_steps=max_steps, init_params=init_params
    )
    return guide.sample_posterior(KEY, params, x, y, sample_shape=(2,))


def draw_laplace(rng_key: Any, params: Any, sample_shape: Any, resample: Any) -> Any:
    guide, _ = fitted()
    return guide.sample_posterior(
        rng_key, params, X, Y, sample_shape=sample_shape, resample=resample
    )


def do_run(rows: Any, mcmc: Any, rng_key: Any, directory: Any, **settings: Any) -> Any:
    kernel = ng.SGRLD(regression, batch_size=3, step_size=1e-3, num_steps=1)
    usual = MCMC(kernel, num_warmup=4, num_samples=4, progress_bar=False)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        given = usual if mcmc is USUAL else mcmc
        return ng.run_in_segments(
            given, rng_key, X, rows, directory=directory, **settings
        ).mcmc.get_samples()


def rows_of(array_like: Any, timeout: Any, item: Any) -> Any:
    return ng.HostRows(array_like, timeout=timeout)[item]


def trained(x: Any, y: Any, rng_key: Any, model: Any, **settings: Any) -> Any:
    return ng.train(model, rng_key, x, y, **settings)


def stream(labels: Any, logits: Any, batch: Any) -> Any:
    told = diagnostics.PredictionStream(labels, logits=logits)
    told.add(batch)
    return told


def root_of(root: Callable, tangent: Any, d: Any) -> Any:
    return root(d, tangent)


def fields(**values: Any) -> Callable[[], dict[str, Any]]:
    return lambda: dict(values)


P = np.full((5, 12, 3), 1 / 3)
LABELS = np.arange(12) % 3
CALLS: dict[str, Call] = {
    **{name: Call(start(k), fields(**given)) for name, (k, given) in KERNELS.items()},
    "Identity": Call(ng.Identity, fields(scale=0.5)),
    "RMSprop": Call(ng.RMSprop, fields(decay=0.9, eps=1e-8)),
    "Wenzel": Call(ng.Wenzel, fields(decay=0.9, eps=1e-8, interval=None)),
    "Monge": Call(ng.Monge, fields(alpha2=None, decay=0.9)),
    "Shampoo": Call(
        ng.Shampoo, fields(decay=0.9, eps=1e-8, interval=10, block_size=8, vector="diagonal")
    ),
    "Expanded": Call(
        ng.Expanded, fields(left=1, right=1, rank=1, factor_scale=0.25, prior_scale=1.0)
    ),
    "cyclical": Call(ng.cyclical, fields(peak=0.1, period=10, floor=0.0, explore=0.0)),
    "HostRows": Call(rows_of, fields(array_like=X, timeout=30.0, item=np.array([1, 2]))),
    "RiemannianLaplace": Call(
        fit_laplace,
        fields(
            model=regression, metric_of="euclidean", mode="auto", precision="auto",
            prior_metric="auto", solver="auto", alpha2=1.0, damping=0.0, batch_size=None, rtol=1e-3,
            atol=1e-6, max_steps=20, prefix="auto", init_loc_fn=init_to_uniform, init_params=None,
            num_starts=1, x=X, y=Y,
        ),
    ),
    "RiemannianLaplace.sample_posterior": Call(
        draw_laplace,
        lambda: {"rng_key": KEY, "params": fitted()[1], "sample_shape": (2,), "resample": False},
    ),
    "train": Call(
        trained,
        fields(
            model=regression, rng_key=KEY, x=X, y=Y, batch_size=4, optimiser=None, num_epochs=2,
            validation=None, patience=2, num_starts=None, init_params=None,
            init_strategy=init_to_uniform,
        ),
    ),
    "run": Call(
        do_run,
        fields(
            mcmc=USUAL, rng_key=KEY, rows=Y, directory="folder", draws_per_segment=2,
            on_bad_rows="error", extra_fields=(), init_params=None, monitor=None, mesh=None,
            chain_axis=None, data_axis=None,
        ),
    ),
    "to_inference_data": Call(
        ng.to_inference_data,
        lambda: {
            "*": short_run(), "log_likelihood": False, "gradients": False, "coords": None,
            "constant_data": {"y": Y},
        },
    ),
    "to_inference_data of a guide": Call(
        ng.to_inference_data, lambda: {"*": laplace_draws(), "log_likelihood": True}
    ),
    "diagnose": Call(
        ng.diagnose,
        lambda: {"*": short_run(), "var_names": None, "gradients": False, "seconds": None},
    ),
    "compare_draws": Call(
        diagnostics.compare_draws,
        lambda: {"draws": draws(), "reference": draws(), "var_names": None},
    ),
    "fisher_root": Call(
        functools.partial(root_of, information.fisher_root, dist.Normal(0.5, 0.5)),
        lambda: {"d": dist.Normal(1.0, 2.0)},
    ),
    "prior_root": Call(
        functools.partial(root_of, information.prior_root, np.float32(0.5)),
        lambda: {"d": dist.Normal(1.0, 2.0)},
    ),
    "PredictionStream": Call(
        stream, fields(labels=LABELS, logits=False, batch=P[None])
    ),
}  # fmt: skip


JUNK = {"Ellipsis", "module", "object()", "1j", "b'x'", "dates", "structured", "nan()", "texts"}
"""Values that no argument can use, so that a call must refuse them."""


class Arguments(NamedTuple):
    """A call with some arguments replaced: names of entries of `CALLS` and `VALUES`."""

    call: str
    changes: tuple[tuple[str, str], ...]

    def __call__(self) -> str:
        """Call it; returns what is wrong with the result."""
        function, make = CALLS[self.call]
        given = make() | {name: VALUES[value]() for name, value in self.changes}
        first = [given.pop("*")] if "*" in given else []
        result = function(*first, **given)
        taken = [f"{name}={value}" for name, value in self.changes if value in JUNK]
        return f"takes {', '.join(taken)}" if taken else nan_in(result)


def nan_in(result: Any) -> str:
    """Where a result is NaN."""
    if hasattr(result, "posterior"):  # ArviZ
        result = {n: x.values for n, x in result.posterior.data_vars.items()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if getattr(leaf, "dtype", np.dtype(object)).kind in "fc" or isinstance(leaf, float):
            if np.isnan(np.asarray(leaf)).any():
                return f"NaN in the result at {jax.tree_util.keystr(path) or 'its top'}"
    return ""


def random_case(rng: np.random.Generator, calls: tuple[str, ...] = ()) -> Arguments:
    """A random case of some calls, or of all."""
    name = str(rng.choice(list(calls) or list(CALLS)))
    names = list(CALLS[name].arguments())
    count = min(len(names), 1 + int(rng.random() < 0.2))
    chosen = rng.choice(names, count, replace=False) if names else []
    return Arguments(name, tuple((str(n), str(rng.choice(list(VALUES)))) for n in chosen))


def main() -> None:
    """Random cases until the time is over, or one case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of the processor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", nargs=3, metavar=("CALL", "ARGUMENT", "VALUE"), help="repeat it")
    options = parser.parse_args()
    if options.case:
        call, *change = options.case
        print(outcome_of(Arguments(call, (tuple(change),))))
        return
    rng, counts = np.random.default_rng(options.seed), Counter()
    until = time.process_time() + options.seconds
    while time.process_time() < until:
        case = random_case(rng)
        outcome = outcome_of(case)
        counts[outcome.kind] += 1
        if outcome.kind in FAILURES:
            print(case, outcome, flush=True)
        if counts.total() % 100 == 0:
            jax.clear_caches()  # a process cannot keep any number of programs
    print(dict(counts))


if __name__ == "__main__":
    main()
