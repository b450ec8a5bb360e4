"""Plausible mistakes, and the errors that the package raises for them.

Each mistake is a line of code that a user might type. The script runs them and makes the table of
the page "Mistakes". The tests check that every message names the argument and the remedy.

    python examples/mistakes.py            # print
    python examples/mistakes.py --write    # write docs/tables/mistakes.md
"""

from __future__ import annotations

import argparse
import re
import textwrap
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import scipy.sparse
from numpyro import optim
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO

import numpyro_geom
from numpyro_geom import diagnostics

TABLE = Path(__file__).parents[1] / "docs" / "tables" / "mistakes.md"
LONG_LIST = re.compile(r"\['[^\]]{100,}\]")
"""Names of all arguments or fields, which the table leaves out."""
SPECIFIC = re.compile(
    r"""^[\w.]+ |'[^']*'|\[[^\]]*\]|\([^)]*\)|`[^`]*`|, got .*|is a .*|\b[A-Z]\w*|\d+"""
    r"""|init_\w+"""
)
"""Parts in which messages of one kind differ: names, values, and what the user gave."""


SHOWN = 3
"""Mistakes of a group in the table."""
LONGEST = 90
"""Characters of a message that the table shows."""


class Mistake(NamedTuple):
    """A mistake.

    Attributes:
        code: the user's code.
        error: the type of the error.
        argument: text that the message must contain, to name the argument.
        remedy: text that the message must contain, to say what to do.
    """

    code: str
    error: type[Exception]
    argument: str
    remedy: str


MISTAKES: dict[str, list[Mistake]] = {
    "Arguments of other samplers": [
        Mistake(
            "GGMC(model, target_accept_prob=0.9)",
            TypeError,
            "target_accept_prob",
            "did you mean 'target_accept'",
        ),
        Mistake("SGHMC(model, max_tree_depth=10)", TypeError, "max_tree_depth", "'num_steps'"),
        Mistake("SGRLD(model, learning_rate=0.01)", TypeError, "learning_rate", "'step_size'"),
        Mistake("SGRLD(model, num_samples=1000)", TypeError, "num_samples", "pass it to MCMC"),
        Mistake("SGRLD(model, init_params={})", TypeError, "init_params", "pass it to mcmc.run"),
        Mistake("SGRLD(model, batchsize=4)", TypeError, "batchsize", "did you mean 'batch_size'"),
        Mistake("SGRLD(model, 0.01)", TypeError, "positional argument", "by name"),
    ],
    "What is not a kernel": [
        Mistake(
            "MCMC(RiemannianLaplace(model), num_warmup=10, num_samples=10)",
            AttributeError,
            "RiemannianLaplace, a guide",
            "guide.sample_posterior",
        ),
        Mistake(
            "MCMC(SGRLD, num_warmup=10, num_samples=10)",
            AttributeError,
            "the class SGRLD",
            "MCMC(SGRLD(model)",
        ),
        Mistake(
            "SVI(model, SGRLD(model), optim.Adam(0.1), Trace_ELBO()).run(key, 10, X, y)",
            TypeError,
            "the kernel SGRLD",
            "run it with MCMC",
        ),
        Mistake(
            "MCMC(NUTS(SGRLD(model)), num_warmup=10, num_samples=10).run(key, X, y)",
            TypeError,
            "the kernel SGRLD",
            "run it with MCMC",
        ),
        Mistake("SGRLD(NUTS(model))", TypeError, "model", "pass a function"),
        Mistake("RiemannianLaplace(SGRLD(model))", TypeError, "model", "pass the model itself"),
        Mistake(
            "run_in_segments(SGRLD(model), key, X, y)", TypeError, "got SGRLD", "pass MCMC(kernel"
        ),
    ],
    "Keys, fields and lengths": [
        Mistake("mcmc.run(X, y)", TypeError, "rng_key", "such as jax.random.key(0)"),
        Mistake("mcmc.run(0, X, y)", TypeError, "rng_key", "such as jax.random.key(0)"),
        Mistake("run_in_segments(mcmc, X, y)", TypeError, "rng_key", "such as jax.random.key(0)"),
        Mistake(
            "RiemannianLaplace(model).fit(X, y)", TypeError, "rng_key", "such as jax.random.key(0)"
        ),
        Mistake(
            "mcmc.run(key, X, y, extra_fields=('accept',))",
            ValueError,
            "extra_fields",
            "expected some of ['i', 'z'",
        ),
        Mistake(
            "mcmc.run(key, X, y, extra_fields=('adapt_state.step_size',))",
            ValueError,
            "extra_fields",
            "'step_size'",
        ),
        Mistake(
            "run_in_segments(mcmc, key, X, y, extra_fields='step_size')",
            TypeError,
            "extra_fields",
            "such as ('step_size',)",
        ),
        Mistake(
            "MCMC(SGRLD(model), num_warmup=-1, num_samples=10)",
            ValueError,
            "num_warmup",
            "nonnegative",
        ),
        Mistake(
            "MCMC(SGRLD(model), num_warmup=10, num_samples=0)",
            ValueError,
            "num_samples",
            "positive",
        ),
    ],
    "Where chains start": [
        Mistake(
            "mcmc.run(key, X, y, init_params={'w': np.zeros(3), 's': 0.5})",
            ValueError,
            "init_params['w']",
            "expected the unconstrained shape (2,)",
        ),
        Mistake(
            "mcmc.run(key, X, y, init_params={'w': np.zeros(2)})",
            ValueError,
            "init_params",
            "missing ['s']",
        ),
        Mistake(
            "mcmc.run(key, X, y, init_params={'net': {'w': np.zeros(2)}, 's': 0.5})",
            ValueError,
            "init_params",
            "latent sites ['s', 'w']",
        ),
        Mistake(
            "mcmc.run(key, X, y, init_params={'w': [0.0, 0.0], 's': 0.5})",
            TypeError,
            "init_params['w']",
            "jnp.asarray",
        ),
        Mistake(
            "mcmc.run(key, X, y, init_params={'w': np.zeros(2), 's': 1})",
            TypeError,
            "init_params['s']",
            "jnp.asarray(x, float)",
        ),
        Mistake(
            "mcmc.run(key, X, y, init_params=np.zeros(3))",
            TypeError,
            "init_params",
            "pass one with the sites",
        ),
        Mistake(
            "mcmc.run(key, X, y, init_params={'w': np.zeros(2), 's': np.nan})",
            ValueError,
            "init_params['s']",
            "finite unconstrained values",
        ),
        Mistake(
            "SGRLD(model, init_strategy='median')",
            TypeError,
            "init_strategy",
            "such as init_to_median",
        ),
    ],
    "Batches and plates": [
        Mistake("SGRLD(model, batch_size=0)", ValueError, "batch_size", "of at least 1"),
        Mistake("SGRLD(model, batch_size=-4)", ValueError, "batch_size", "of at least 1"),
        Mistake("SGRLD(model, batch_size=2.5)", TypeError, "batch_size", "integer"),
        Mistake(
            "MCMC(SGRLD(model, batch_size=64), num_warmup=1, num_samples=1).run(key, X, y)",
            ValueError,
            "batch_size=64",
            "between 1 and that",
        ),
        Mistake(
            "MCMC(SGRLD(model, batch_size={'rows': 4}), num_warmup=1, num_samples=1)"
            ".run(key, X, y)",
            ValueError,
            "batch_size names unknown plates",
            "the model's plates are ['data']",
        ),
        Mistake(
            "MCMC(SGRLD(unindexed, batch_size=4), num_warmup=1, num_samples=1).run(key, X, y)",
            ValueError,
            "site 'y' is not indexed by plate 'data'",
            "Index every array",
        ),
        Mistake(
            "MCMC(SGRLD(mixture), num_warmup=1, num_samples=1).run(key, y)",
            ValueError,
            "discrete latent sites ['c']",
            "numpyro.infer.DiscreteGibbs",
        ),
    ],
    "Settings of kernels": [
        Mistake("SGRLD(model, step_size=-0.1)", ValueError, "step_size", "above 0"),
        Mistake("SGRLD(model, step_size='adam')", ValueError, "step_size", "must be 'auto' or"),
        Mistake(
            "SGRLD(model, step_size=lambda t: 0.1 / t)", ValueError, "step_size", "count from 1"
        ),
        Mistake("cyclical(0.1, 0)", ValueError, "period", "of at least 1"),
        Mistake("SGRLD(model, num_steps=0)", ValueError, "num_steps", "of at least 1"),
        Mistake("SGRLD(model, temperature=-1)", ValueError, "temperature", "at least 0"),
        Mistake(
            "SGNHT(model, temperature=0)", ValueError, "temperature", "Use SGHMC(temperature=0)"
        ),
        Mistake(
            "SGRLD(model, metric='fisher')", ValueError, "metric", "must be one of ['identity'"
        ),
        Mistake("SGRLD(model, metric=RMSprop)", TypeError, "metric", "write RMSprop()"),
        Mistake(
            "SGHMC(model, dense_mass='yes')",
            ValueError,
            "dense_mass",
            "must be 'auto', 'structured'",
        ),
        Mistake(
            "MCMC(SGHMC(model, dense_mass=[('w', 'tau')]), num_warmup=1, num_samples=1)"
            ".run(key, X, y)",
            ValueError,
            "['tau']",
            "Expected some of ['s', 'w']",
        ),
        Mistake(
            "MCMC(SGHMC(model, inverse_mass_matrix=np.eye(7)), num_warmup=1, num_samples=1)"
            ".run(key, X, y)",
            ValueError,
            "inverse_mass_matrix",
            "expected (3,) or (3, 3)",
        ),
        Mistake(
            "SGRLD(model, adjusted=True, batch_size=4)", ValueError, "adjusted", "drop batch_size"
        ),
        Mistake("GGMC(model, target_accept=80)", ValueError, "target_accept", "below 1"),
    ],
    "Guides": [
        Mistake(
            "RiemannianLaplace(model, metric='rmsprop')", ValueError, "metric", "must be one of"
        ),
        Mistake("RiemannianLaplace(model, mode='map')", ValueError, "mode", "must be one of"),
        Mistake("RiemannianLaplace(model, damping=-1)", ValueError, "damping", "at least 0"),
        Mistake(
            "RiemannianLaplace(model).sample_posterior(key, {}, sample_shape=(10,))",
            RuntimeError,
            "training data",
            "expected a call of `fit`",
        ),
        Mistake(
            "RiemannianLaplace(model).draw(key, {}, sample_shape=1e3)",
            TypeError,
            "sample_shape",
            "an integer of at least 0",
        ),
    ],
    "Diagnostics": [
        Mistake("diagnose(mcmc)  # not run", ValueError, "has not run", "call `mcmc.run"),
        Mistake("diagnose(samples)", TypeError, "got dict", "expected a numpyro.infer.MCMC"),
        Mistake("to_inference_data(samples)", TypeError, "got dict", "pass the MCMC itself"),
        Mistake(
            "diagnostics.compare_draws(finished, samples)",
            ValueError,
            "reference",
            "get_samples(group_by_chain=True)",
        ),
        Mistake("diagnose(finished, var_names='tau')", ValueError, "['tau']", "it has ['s', 'w']"),
    ],
    "Data": [
        Mistake(
            "mcmc.run(key, X[:0], y[:0])", ValueError, "the data are empty", "at least one row"
        ),
        Mistake("mcmc.run(key, X.tolist(), y)", TypeError, "'X'", "asarray"),
        Mistake("mcmc.run(key, X, y.tolist())", TypeError, "'y'", "asarray"),
        Mistake("mcmc.run(key, X, pd.Series(y))", TypeError, "'y'", "asarray"),
        Mistake("mcmc.run(key, pd.DataFrame(X), y)", TypeError, "'X'", "asarray"),
        Mistake("mcmc.run(key, X.astype(object), y)", TypeError, "'X'", "asarray"),
        Mistake("mcmc.run(key, X.astype(str), y)", TypeError, "'X'", "asarray"),
        Mistake("mcmc.run(key, np.ma.masked_less(X, 0), y)", TypeError, "'X'", "filled"),
        Mistake("mcmc.run(key, scipy.sparse.csr_matrix(X), y)", TypeError, "'X'", "toarray"),
        Mistake("mcmc.run(key, np.where(X > 1, np.nan, X), y)", ValueError, "X", "row"),
        Mistake("mcmc.run(key, X, np.where(y > 1, np.inf, y))", ValueError, "y", "row"),
    ],
}


def model(X, y=None):
    """A linear regression."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, s), obs=None if y is None else y[i])


def unindexed(X, y):
    """The same regression, without the indices of its plate."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def mixture(y):
    """A model with a discrete site."""
    c = numpyro.sample("c", dist.Bernoulli(0.5))
    with numpyro.plate("data", y.shape[0]) as i:
        numpyro.sample("y", dist.Normal(c, 1), obs=y[i])


def names() -> dict[str, Any]:
    """The names that the code of a mistake can use."""
    X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
    key, y = jax.random.key(0), X.sum(1)

    def chain(kernel: Any) -> MCMC:
        return MCMC(kernel, num_warmup=2, num_samples=2, progress_bar=False)

    kernel = numpyro_geom.SGRLD(model, step_size=0.01, num_steps=1)
    finished, nuts = chain(kernel), chain(NUTS(model))
    for mcmc in (finished, nuts):
        mcmc.run(key, *map(jax.numpy.asarray, (X, y)))
    return {
        **{x: getattr(numpyro_geom, x) for x in numpyro_geom.__all__},
        **{f.__name__: f for f in (model, unindexed, mixture, MCMC, NUTS, SVI, Trace_ELBO)},
        **{"np": np, "pd": pd, "scipy": scipy, "optim": optim, "diagnostics": diagnostics},
        **{"X": X, "y": y, "key": key, "finished": finished, "nuts": nuts},
        "mcmc": chain(kernel),
        "samples": finished.get_samples(),
    }


def raised(mistake: Mistake, known: dict[str, Any]) -> Exception:
    """The error that the code raises.

    Raises:
        RuntimeError: if the code raises nothing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(mistake.code, dict(known))
        except Exception as error:
            return error
    raise RuntimeError(f"accepted, and should not be: {mistake.code}")


def table() -> str:
    """In Markdown the first mistakes of each group, one of each kind of message."""
    known, rows = names(), ["| call | error |", "|---|---|"]
    for title, mistakes in MISTAKES.items():
        rows.append(f"| **{title}** | |")
        kinds: set[str] = set()
        for mistake in mistakes:
            error = raised(mistake, known)
            text = " ".join(str(error).split()).replace("|", "\\|")
            text = LONG_LIST.sub("[...]", text)
            kind = SPECIFIC.sub("", text)
            if kind in kinds or len(kinds) == SHOWN:
                continue
            kinds.add(kind)
            text = textwrap.shorten(text, LONGEST, placeholder=" ...")
            rows.append(f"| `{mistake.code}` | `{type(error).__name__}`: {text} |")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write into the documentation")
    made = table()
    if parser.parse_args(arguments).write:
        TABLE.write_text(made + "\n")
    else:
        print(made)


if __name__ == "__main__":
    main()
