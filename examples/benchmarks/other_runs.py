"""Changes with which `run` refuses to continue a run, and changes with which it continues.

Each row of the table is a run that is started, a change, and a call that should continue it. The
first text of a case is an imported module; the second is the same module after the change. Draws
are on disk. The call is refused or accepted as a user's call would be.

    python examples/benchmarks/other_runs.py --table docs/tables/other_runs.md
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh
from numpyro.infer import MCMC

from numpyro_geom import run
from numpyro_geom.runs import fingerprint, keep

PRELUDE = """
import dataclasses, functools
import jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
from jax import lax
from numpyro import handlers
from numpyro.infer import AIES, HMCECS, NUTS, SA
from numpyro.infer.reparam import LocScaleReparam
from numpyro_geom import SGHMC, SGNHT, SGRLD, HostRows, RMSprop

x = jnp.linspace(-1, 1, 8)
FIXED = dict(step_size=1e-3, batch_size=4, num_steps=1, dense_mass=False, adapt_mass_matrix=False)
args, settings, config, kernel = (x,), {}, {}, None

def model(x):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", 8) as i:
        numpyro.sample("y", dist.Normal(x[i] * w, 1), obs=0.5 * x[i])

def density(of):
    return SGRLD(potential_fn=lambda z: 0.5 * z**2 + of(z), **{**FIXED, "batch_size": None})

def sgrld(model=model, **changed):
    return SGRLD(model, **{**FIXED, **changed})

"""
LADDER = "\n".join(
    f"def f{k}(z): return f{k - 1}(z) + f{k - 1}(z * 0.5)" if k else "def f0(z): return 0.1 * z"
    for k in range(9)
)
CLOSING = """
def outer(table):
    return lambda z: jnp.sum(table * z)
kernel = density(outer(jnp.array([0.1, 0.2])))"""


class Case(NamedTuple):
    """A change.

    Attributes:
        name: what is changed.
        code: a module's text, after the prelude.
        old: the part of the text that is replaced.
        new: its replacement.
    """

    name: str
    code: str
    old: str
    new: str


REFUSED = [
    # Schedules and settings
    Case(
        "lambda as a schedule", "kernel = sgrld(step_size=lambda t: 1e-3 / (1 + t))", "1 +", "2 +"
    ),
    Case(
        "what a schedule closes over",
        "def s(c): return lambda t: c / (1 + t)\nkernel = sgrld(step_size=s(1e-3))",
        "1e-3))",
        "2e-3))",
    ),
    Case(
        "rate of an Optax schedule",
        "import optax\nkernel = sgrld(step_size=optax.exponential_decay(1e-3, 10, 0.5))",
        "0.5)",
        "0.6)",
    ),
    Case(
        "private attribute of a schedule object",
        "class S:\n    def __init__(s, r): s._r = r\n    def __call__(s, t): return s._r / (1 + t)\n"
        "kernel = sgrld(step_size=S(1e-3))",
        "S(1e-3)",
        "S(2e-3)",
    ),
    Case(
        "argument of functools.partial",
        "def s(t, c): return c / (1 + t)\nkernel = sgrld(step_size=functools.partial(s, c=1e-3))",
        "c=1e-3",
        "c=2e-3",
    ),
    Case(
        "thermostat_mass of SGNHT",
        "kernel = SGNHT(model, thermostat_mass=1.0, **FIXED)",
        "1.0,",
        "2.0,",
    ),
    Case("field of a metric", "kernel = sgrld(metric=RMSprop(decay=0.9))", "0.9", "0.8"),
    Case("batch_size", "kernel = sgrld(batch_size=4)", "4)", "5)"),
    Case("max_tree_depth of NUTS", "kernel = NUTS(model, max_tree_depth=3)", "3)", "2)"),
    Case(
        "weights of AIES's moves",
        "kernel = AIES(model, moves={AIES.DEMove(): 0.5, AIES.StretchMove(): 0.5})\n"
        "settings = dict(num_chains=4, chain_method='vectorized')",
        "0.5, AIES.StretchMove(): 0.5",
        "0.6, AIES.StretchMove(): 0.4",
    ),
    Case(
        "setting of a move of AIES",
        "kernel = AIES(model, moves={AIES.DEMove(sigma=1e-5): 1.0})\n"
        "settings = dict(num_chains=4, chain_method='vectorized')",
        "1e-5",
        "1e-2",
    ),
    Case("adapt_state_size of SA", "kernel = SA(model, adapt_state_size=4)", "4)", "5)"),
    # Handlers
    Case(
        "data in handlers.condition",
        "def free():\n    w = numpyro.sample('w', dist.Normal(0, 1))\n"
        "    numpyro.sample('y', dist.Normal(w, 1))\n"
        "kernel = sgrld(handlers.condition(free, {'y': jnp.array(1.0)}), batch_size=None)\nargs = ()",
        "jnp.array(1.0)",
        "jnp.array(2.0)",
    ),
    Case(
        "value in handlers.substitute",
        "def free():\n    m = numpyro.param('m', jnp.array(0.0))\n"
        "    numpyro.sample('w', dist.Normal(m, 1))\n"
        "kernel = sgrld(handlers.substitute(free, {'m': jnp.array(1.0)}), batch_size=None)\nargs = ()",
        "jnp.array(1.0)",
        "jnp.array(1.7)",
    ),
    Case("factor in handlers.scale", "kernel = sgrld(handlers.scale(model, 0.5))", "0.5", "0.6"),
    Case(
        "table in handlers.mask",
        "kernel = sgrld(handlers.mask(model, jnp.array(True)), batch_size=None)",
        "True",
        "False",
    ),
    Case(
        "setting of a reparametrisation",
        "def free():\n    m = numpyro.sample('m', dist.Normal(0, 1))\n"
        "    numpyro.sample('w', dist.Normal(m, 2))\n"
        "kernel = sgrld(handlers.reparam(free, {'w': LocScaleReparam(0.5)}), batch_size=None)\n"
        "args = ()",
        "Reparam(0.5)",
        "Reparam(0.6)",
    ),
    # What functions read
    Case("number in the model", "def f(z): return z**4 / 3\nkernel = density(f)", "/ 3", "/ 4"),
    Case("operation", "def f(z): return jnp.sin(z)\nkernel = density(f)", "sin", "cos"),
    Case(
        "default argument", "def f(z, a=0.1): return a * z\nkernel = density(f)", "a=0.1", "a=0.2"
    ),
    Case("global number", "A = 0.1\ndef f(z): return A * z\nkernel = density(f)", "0.1", "0.2"),
    Case(
        "global array",
        "A = np.array([0.1, 0.2])\ndef f(z): return jnp.sum(A * z)\nkernel = density(f)",
        ".2]",
        ".3]",
    ),
    Case(
        "global list", "A = [0.1]\ndef f(z): return A[0] * z\nkernel = density(f)", "[0.1]", "[0.2]"
    ),
    Case(
        "global dict",
        "A = {'a': 0.1}\ndef f(z): return A['a'] * z\nkernel = density(f)",
        "0.1",
        "0.2",
    ),
    Case(
        "attribute of a global object",
        "class C: pass\nC = C(); C.a = 0.1\ndef f(z): return C.a * z\nkernel = density(f)",
        "0.1",
        "0.2",
    ),
    Case(
        "private attribute of a global object",
        "class C:\n    def __init__(self, a): self._hidden = a\n"
        "c = C(0.1)\ndef f(z): return c._hidden * z\nkernel = density(f)",
        "C(0.1)",
        "C(0.2)",
    ),
    Case("array that is closed over", CLOSING, "0.2]", "0.3]"),
    Case(
        "function of an imported module",
        "import helpers\nkernel = density(lambda z: helpers.term(z))\n# in helpers: 0.1 * z",
        "0.1 *",
        "0.2 *",
    ),
    Case(
        "constant of an imported module",
        "import helpers\nkernel = density(lambda z: helpers.CONSTANT * z)\n# in helpers: 0.1 * z",
        "0.1 *",
        "0.2 *",
    ),
    Case("nine helpers deep", f"{LADDER}\nkernel = density(f8)", "0.1 * z", "0.2 * z"),
    Case(
        "helper behind jax.jit",
        "@jax.jit\ndef f(z): return 0.1 * z\nkernel = density(lambda z: f(z))",
        "0.1",
        "0.2",
    ),
    Case(
        "class attribute",
        "class M:\n    a = 0.1\n    def f(self, z): return self.a * z\nkernel = density(M().f)",
        "0.1",
        "0.2",
    ),
    Case(
        "method of a base class",
        "class B:\n    def g(self, z): return 0.1 * z\nclass M(B):\n"
        "    def f(self, z): return self.g(z)\nkernel = density(M().f)",
        "0.1",
        "0.2",
    ),
    Case(
        "rule of a custom_vjp",
        "@jax.custom_vjp\ndef f(z): return 0.1 * z\n"
        "f.defvjp(lambda z: (f(z), None), lambda _, g: (0.1 * g,))\nkernel = density(f)",
        "(0.1 * g,)",
        "(0.2 * g,)",
    ),
    Case(
        "rule of a custom_jvp",
        "@jax.custom_jvp\ndef f(z): return 0.1 * z\n"
        "f.defjvp(lambda p, t: (f(*p), 0.1 * t[0]))\nkernel = density(f)",
        "0.1 * t",
        "0.2 * t",
    ),
    Case(
        "parameters of a Flax module",
        "import flax.linen as nn\nnet = nn.Dense(1)\nv = net.init(jax.random.key(0), jnp.ones(2))\n"
        "def f(z): return net.apply(v, jnp.stack([z, z])).sum()\nkernel = density(f)",
        "key(0)",
        "key(1)",
    ),
    Case(
        "activation of a Flax module",
        "import flax.linen as nn\n"
        "net = nn.Sequential([nn.Dense(2), nn.tanh, nn.Dense(1)])\n"
        "v = net.init(jax.random.key(0), jnp.ones(2))\n"
        "def f(z): return net.apply(v, jnp.stack([z, z])).sum()\nkernel = density(f)",
        "nn.tanh",
        "nn.relu",
    ),
    Case(
        "parameters of an nnx module",
        "from flax import nnx\nnet = nnx.Linear(2, 1, rngs=nnx.Rngs(0))\n"
        "def f(z): return net(jnp.stack([z, z])).sum()\nkernel = density(f)",
        "Rngs(0)",
        "Rngs(1)",
    ),
    Case(
        "file that the model reads",
        "import pathlib\nheld = '0.1'\npathlib.Path(__file__).with_name('a.txt').write_text(held)\n"
        "def f(z): return float(pathlib.Path(__file__).with_name('a.txt').read_text()) * z\n"
        "kernel = density(f)",
        "'0.1'",
        "'0.2'",
    ),
    Case(
        "function of a library, replaced by another",
        "numpyro.distributions.Normal.extra = 0.0\n"
        "def f(z): return dist.Normal.extra * z\nkernel = density(f)",
        "extra = 0.0",
        "extra = 0.1",
    ),
    Case(
        "postprocess_fn",
        "kernel = density(lambda z: 0.0)\nsettings = dict(postprocess_fn=lambda z: 2 * z)",
        "2 * z",
        "3 * z",
    ),
    Case(
        "function that is called on the host",
        "def host(z): return np.float32(0.1) * z\n"
        "settings = dict(postprocess_fn=lambda z: jax.pure_callback(host, z, z))\n"
        "kernel = density(lambda z: 0.0)",
        "0.1",
        "0.2",
    ),
    Case(
        "array that a function on the host reads",
        "A = np.full(1, 0.1, np.float32)\ndef host(z): return A[0] * z\n"
        "settings = dict(postprocess_fn=lambda z: jax.pure_callback(host, z, z))\n"
        "kernel = density(lambda z: 0.0)",
        "0.1",
        "0.2",
    ),
    Case(
        "control variate of HMCECS",
        "def sub(x):\n    w = numpyro.sample('w', dist.Normal(0, 1))\n"
        "    with numpyro.plate('rows', 8, subsample_size=4):\n"
        "        b = numpyro.subsample(x, 0)\n"
        "        numpyro.sample('y', dist.Normal(b * w, 1), obs=0.5 * b)\n"
        "proxy = HMCECS.taylor_proxy({'w': jnp.array(0.3)})\n"
        "kernel = HMCECS(NUTS(sub, max_tree_depth=2), num_blocks=2, proxy=proxy)",
        "array(0.3)",
        "array(0.4)",
    ),
    Case(
        "num_blocks of HMCECS",
        "def sub(x):\n    w = numpyro.sample('w', dist.Normal(0, 1))\n"
        "    with numpyro.plate('rows', 8, subsample_size=4):\n"
        "        b = numpyro.subsample(x, 0)\n"
        "        numpyro.sample('y', dist.Normal(b * w, 1), obs=0.5 * b)\n"
        "kernel = HMCECS(NUTS(sub, max_tree_depth=2), num_blocks=2)",
        "num_blocks=2",
        "num_blocks=4",
    ),
    # Data and JAX
    Case(
        "last bit of the data",
        "args = (x.at[3].set(0.1),)\nkernel = sgrld()",
        "0.1)",
        "0.10000001)",
    ),
    Case(
        "row of a memory map on the host",
        "args = (HostRows(np.linspace(-1, 1, 8)),)\nkernel = sgrld()",
        "-1, 1, 8",
        "-1, 1.1, 8",
    ),
    Case(
        "cell of a table of pandas",
        "import pandas\nargs = (pandas.DataFrame({'a': np.arange(8.0), 'b': list('abcdefgh')}),)\n"
        "def model(t):\n    numpyro.sample('w', dist.Normal(0, 1))\n"
        "kernel = NUTS(model, max_tree_depth=2)",
        "abcdefgh",
        "abcdefgi",
    ),
    Case("key", "kernel = density(lambda z: 0.0)\nkey = 0", "key = 0", "key = 1"),
    Case("init_params", "kernel = density(lambda z: 0.0)\nstart = 1.0", "= 1.0", "= 2.0"),
    Case(
        "jax_threefry_partitionable",
        "kernel = density(lambda z: 0.0)\nconfig = {'jax_threefry_partitionable': True}",
        "e': True",
        "e': False",
    ),
    Case(
        "jax_default_matmul_precision",
        "kernel = density(lambda z: 0.0)\nconfig = {'jax_default_matmul_precision': None}",
        "None",
        "'float32'",
    ),
    Case(
        "matmul precision of one product",
        "m = jnp.eye(2)\ndef f(z): return jnp.sum(jnp.dot(m, m * z, precision='default'))\n"
        "kernel = density(f)",
        "'default'",
        "'highest'",
    ),
    Case(
        "64-bit mode",
        "kernel = density(lambda z: 0.0)\nconfig = {'jax_enable_x64': False}",
        "False",
        "True",
    ),
    Case(
        "another schedule on a mesh",
        "kernel = sgrld(step_size=lambda t: 1e-3 / (1 + t))\nmesh = True",
        "1 +",
        "2 +",
    ),
    Case(
        "global number, chains in turn",
        "A = 0.1\ndef f(z): return A * z\nkernel = density(f)\n"
        "settings = dict(num_chains=2, chain_method='sequential')",
        "0.1",
        "0.2",
    ),
    Case(
        "global number, chains in parallel",
        "A = 0.1\ndef f(z): return A * z\nkernel = density(f)\n"
        "settings = dict(num_chains=2, chain_method='parallel')",
        "0.1",
        "0.2",
    ),
]
GOES_ON = [
    Case("nothing", "kernel = sgrld()", "", ""),
    Case("docstring", "def f(z):\n    'Old.'\n    return z\nkernel = density(f)", "Old", "New"),
    Case("comment", "def f(z):\n    return z  # old\nkernel = density(f)", "old", "new\n\n\n"),
    Case("annotation", "def f(z): return z\nkernel = density(f)", "(z):", "(z: jax.Array) -> None:"),
    Case("name of a function", "def fun(z): return z\nkernel = density(fun)", "fun", "other"),
    Case("name of a global", "A = 0.1\ndef f(z): return A * z\nkernel = density(f)", "A ", "LONG "),
    Case("name of a class", "class One:\n    def f(self, z): return z\nkernel = density(One().f)", "One", "Two"),
    Case("global that nobody reads", "A = 0.1\nkernel = density(lambda z: z)", "0.1", "0.2"),
    Case(
        "text that is printed",
        "def f(z):\n    print('old', end='\\r')\n    jax.debug.print('old', ordered=False)\n"
        "    return z\nkernel = density(f)",
        "old", "new",
    ),
    Case("name of the module's file", "kernel = sgrld()", "", "# moved"),
    Case("cell of a notebook, run again", "kernel = sgrld()", "", "# cell"),
    Case(
        "helper that was taken out",
        "def f(z): return 0.1 * z\nkernel = density(f)", "def f(z): return 0.1 * z",
        "def g(z): return 0.1 * z\ndef f(z): return g(z)",
    ),
    Case(
        "where a site starts, in handlers.substitute",
        "def free(): numpyro.sample('w', dist.Normal(0, 1))\n"
        "kernel = sgrld(handlers.substitute(free, {'w': jnp.array(1.0)}), batch_size=None)\nargs = ()",
        "jnp.array(1.0)",
        "jnp.array(1.7)",
    ),
    Case("order of lines", CLOSING + "\nA = 1\nB = 2", "A = 1\nB = 2", "B = 2\nA = 1"),
    Case("order of a dict", "A = {'a': 1., 'b': 2.}\nkernel = density(lambda z: A['a'] * z)",
         "'a': 1., 'b': 2.", "'b': 2., 'a': 1."),
    Case("data as arguments", "kernel = sgrld()\nsettings = dict(jit_model_args=False)", "False", "True"),
    Case("array of JAX or NumPy", "kernel = sgrld()\nargs = (jnp.linspace(-1, 1, 8),)",
         "(jnp.linspace(-1, 1, 8),)", "(np.asarray(jnp.linspace(-1, 1, 8)),)"),
    Case("without a mesh", "kernel = sgrld()\nmesh = True", "True", "False"),
    Case("on a mesh", "kernel = sgrld()\nmesh = False", "False", "True"),
    Case("name of a function on the host",
         "def host(z): return np.float32(2) * z\n"
         "settings = dict(postprocess_fn=lambda z: jax.pure_callback(host, z, z))\n"
         "kernel = density(lambda z: 0.0)", "host", "other"),
    Case("memory map or array on the host", "args = (HostRows(np.linspace(-1, 1, 8)),)\n"
         "kernel = sgrld()", "8)),)", "8), timeout=9.0),)"),
    Case("version of Python", "kernel = sgrld()", "", "# python"),
    Case("version of JAX, the same program", "kernel = sgrld()", "", "# jax"),
    Case("version of JAX and resume='other_program'",
         "kernel = density(lambda z: z)", "lambda z: z", "lambda z: z * 1.5)  # jax, other_program\n# ("),
]  # fmt: skip


def loaded(folder: Path, text: str, name: str):
    """Import the prelude, a text and its helper anew, as a module."""
    value = 0.2 if "0.2 *" in text else 0.1
    (folder / "helpers.py").write_text(f"CONSTANT = {value}\ndef term(z): return {value} * z\n")
    (folder / f"{name}.py").write_text(PRELUDE + text)
    importlib.invalidate_caches()
    for module in ("helpers", name):
        sys.modules.pop(module, None)
    for cached in (folder / "__pycache__").glob("*"):
        cached.unlink()
    if "# cell" in text:  # as IPython runs one
        module = type(sys)("__main__")
        module.__file__ = str(folder / f"{name}.py")
        exec(compile(PRELUDE + text, "<ipython-input-2>", "exec"), vars(module))
        return module
    return importlib.import_module(name)


def go(folder: Path, text: str, num_samples: int, name: str = "user") -> None:
    """Run the module of a text, with draws in this folder."""
    with contextlib.ExitStack() as held:
        module = loaded(folder, text, name)
        for key, value in module.config.items():
            held.callback(jax.config.update, key, jax.config.values[key])
            jax.config.update(key, value)
        told = fingerprint.versions()
        changed = {"# python": {"python": "3.9"}, "# jax": {"jax_version": "99"}}
        for mark, other in changed.items():
            if mark in text:
                versions = lambda other=other: {**told, **other}  # noqa: E731
                held.enter_context(mock.patch.object(keep, "versions", versions))
        mesh = {}
        if getattr(module, "mesh", False):
            devices = np.array(jax.devices()[:1]).reshape(1)
            mesh = {"mesh": Mesh(devices, ("rows",)), "data_axis": "rows"}
        free = getattr(module.kernel, "model", None) is None
        chains = module.settings.get("num_chains", 1)
        start = getattr(module, "start", 0.1)
        mcmc = MCMC(
            module.kernel, num_warmup=0, num_samples=num_samples, progress_bar=False,
            **module.settings,
        )  # fmt: skip
        run(
            mcmc,
            jax.random.key(getattr(module, "key", 0)),
            *(() if free else module.args),
            directory=folder / "run",
            draws_per_segment=1,
            resume="other_program" if "other_program" in text else "auto",
            init_params=np.full((chains,) if chains > 1 else (), start, "f4") if free else None,
            **mesh,
        )


def outcome(case: Case) -> str:
    """The result of the continuing call: an error, a warning or nothing."""
    with tempfile.TemporaryDirectory() as name, mock.patch.object(sys, "path", [name, *sys.path]):
        folder = Path(name)
        go(folder, case.code, 1)
        text = case.code.replace(case.old, case.new) if case.old else f"{case.code}\n{case.new}"
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                go(folder, text, 2, "moved" if "# moved" in text else "user")
            except ValueError as error:
                if "holds a run" not in str(error):
                    raise
                return f"refused: {str(error).partition(' holds a run ')[2].partition('. ')[0]}"
        told = [str(w.message) for w in told if "begun with" in str(w.message)]
        return "goes on" + "".join(f", with a warning: {text.partition(': ')[2]}" for text in told)


def table(cases: list[tuple[str, Case]]) -> tuple[str, list[str]]:
    """The changes by outcome, and names of those whose outcome is not as expected."""
    names: dict[str, list[str]] = {}
    wrong = []
    for expected, case in cases:
        found = outcome(case)
        if not found.startswith(expected):
            wrong.append(f"{case.name}: {found}")
            expected = "**not as expected**"
        names.setdefault(expected, []).append(case.name)
        print(f"{case.name}: {found}", flush=True)
    lines = [f"| {outcome} | {len(changed)} |\n" for outcome, changed in names.items()]
    return "| outcome | changes |\n|---|---|\n" + "".join(lines), wrong


def all_cases() -> list[tuple[str, Case]]:
    """All cases with their expected outcomes."""
    return [("refused", x) for x in REFUSED] + [("goes on", x) for x in GOES_ON]


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, help="file to write the table to")
    parser.add_argument("--only", default="", help="those with this in their name")
    options = parser.parse_args()
    start = time.perf_counter()
    text, wrong = table([(e, x) for e, x in all_cases() if options.only in x.name])
    print(f"{time.perf_counter() - start:.0f} s; not as expected: {wrong}")
    if options.table is not None:
        options.table.write_text(text)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    main()
