"""What `import numpyro_geom` loads and exports."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import pytest
from numpyro.infer import MCMC, NUTS
from targets import KERNELS

import numpyro_geom


def test_dir_has_the_public_names_alone() -> None:
    assert set(numpyro_geom.__all__) < set(dir(numpyro_geom))
    modules = {"baselines", "diagnostics", "laplace", "metrics"}
    dunder = {"__all__", "__doc__", "__version__"}
    assert set(dir(numpyro_geom)) == {*numpyro_geom.__all__, *modules, *dunder}
    for name in dir(numpyro_geom):
        assert getattr(numpyro_geom, name) is not None


def test_what_reports_and_guides_need_is_imported_late() -> None:
    heavy = "{'arviz', 'diffrax', 'matplotlib', 'scipy.optimize', 'scipy.stats', 'xarray'}"
    # which each run imports at its end
    code = f"import sys, numpyro_geom.diagnostics; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_does_not_grow() -> None:
    size = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "size.py"))
    found, limits = size["package"](), size["LIMITS"]
    assert found.keys() == limits.keys()
    assert all(found[x] <= limits[x] for x in found), (found, limits)


SNAPSHOT = """
import sys, numpyro, numpyro.infer.mcmc, numpyro.infer.hmc, numpyro.util, numpyro.contrib.module

def attributes():
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "numpyro"]
    classes = {x for m in modules for x in vars(m).values() if isinstance(x, type)}
    own = [x for x in classes if x.__module__.split(".")[0] == "numpyro"]
    return {(repr(x), n): id(v) for x in [*modules, *own] for n, v in vars(x).items()}

before = attributes()
"""
"""Each attribute of NumPyro's modules and of the classes in them."""


def test_an_import_replaces_nothing_of_numpyro() -> None:
    """And the first kernel replaces `MCMC.run` alone."""
    code = (
        f"{SNAPSHOT}\nimport numpyro_geom, numpyro_geom.diagnostics, numpyro_geom.runs\n"
        "def changed():\n"
        "    after = attributes()\n"
        "    return [k[1] for k, x in before.items() if k[1][:2] != '__' and after.get(k) != x]\n"
        "print(changed())\nnumpyro_geom.SGRLD(lambda: None)\nprint(changed())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "['run']"]


def test_other_kernels_run_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """`MCMC.run` calls NumPyro's own function, and looks only at draws of this package."""
    numpyro_geom.SGRLD(lambda: None)
    looked: list[Any] = []
    monkeypatch.setattr("numpyro_geom.diagnostics.inference_data.after_run", looked.append)
    for kernel, count in (NUTS, 0), (numpyro_geom.SGRLD, 1):
        mcmc = MCMC(kernel(potential_fn=energy), num_warmup=1, num_samples=1, progress_bar=False)
        mcmc.run(jax.random.key(0), init_params={"x": jnp.zeros(2)})
        assert looked == [mcmc] * count
        assert "_single_chain_mcmc" not in vars(mcmc)
    assert MCMC.run.__wrapped__.__module__ == "numpyro.infer.mcmc"
    assert not hasattr(MCMC.run.__wrapped__, "__wrapped__")  # whatever the number of kernels


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'NUTS'"):
        _ = numpyro_geom.NUTS


def energy(z: dict) -> jax.Array:
    return jnp.sum(z["x"] ** 2) / 2


def literals(hint: Any) -> list[str]:
    """Strings that a type allows, besides "auto"."""
    if get_origin(hint) is Literal:
        return [x for x in get_args(hint) if x != "auto"]
    return [x for part in get_args(hint) for x in literals(part)]


def run(**options: Any) -> Any:
    mcmc = MCMC(NUTS(potential_fn=energy), num_warmup=1, num_samples=1)
    return numpyro_geom.run_in_segments(mcmc, jax.random.key(0), **options)


def hints(call: Any) -> dict[str, Any]:
    """The types of a public function's arguments."""
    call = numpyro_geom.run_in_segments if call is run else call
    return get_type_hints(call.__init__ if isinstance(call, type) else call)


CALLS = {
    **{kernel: {"potential_fn": energy} for kernel in KERNELS},
    numpyro_geom.RiemannianLaplace: {"model": energy},
    numpyro_geom.Shampoo: {},
    numpyro_geom.Expanded: {},
    run: {},
}
"""What is called, with the arguments that it needs."""
CHOICES = [
    pytest.param(call, name, found, id=f"{call.__name__}-{name}")
    for call in CALLS
    for name, hint in hints(call).items()
    if (found := literals(hint))
]


@pytest.mark.parametrize(("call", "name", "names"), CHOICES)
def test_types_name_what_is_accepted(call: Any, name: str, names: list[str]) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        call(**CALLS[call], **{name: "no such name"})
    assert all(repr(x) in str(caught.value) for x in names)
