"""Shared by all tests: two CPU devices, 64-bit mode on demand, and the optional data sets."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jaxlib
import numpyro
import pytest


def compile_quickly() -> None:
    """Let XLA compile with few optimisations; processes that tests start inherit this setting.

    Compilation is most of the cost of the tests. Without LLVM's passes and with XLA's older
    emitters of CPU code it takes a third of the time (a step of SGRLD 0.5 s instead of 1.8 s, with
    warm-up 3.2 s instead of 8.0 s). The results are the same up to rounding. To test the users'
    configuration, set either variable: JAX_DISABLE_MOST_OPTIMIZATIONS=0
    XLA_FLAGS=--xla_cpu_use_fusion_emitters=true.
    """
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    chosen = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"].lower()
    jax.config.update("jax_disable_most_optimizations", chosen not in ("0", "false", "off"))
    # no lines of Python in compiled programs, which take a twentieth of the time
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    jax.config.update("jax_traceback_in_locations_limit", 0)
    # XLA ends a process that sets an unknown flag: jaxlib 0.12 has no such emitters. One module of
    # LLVM a program instead of 32, made for many cores, takes a tenth off.
    flags = os.environ.get("XLA_FLAGS", "")
    quick = {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}
    if (0, 8) <= jaxlib.version.__version_info__[:2] <= (0, 10):
        quick = {name: value for name, value in quick.items() if name not in flags}
        os.environ["XLA_FLAGS"] = " ".join([flags, *(f"--{n}={x}" for n, x in quick.items())])


# Tracing makes many small objects. With the threshold of 700 that Python has, a tenth of the time
# goes into looking for cycles among them.
gc.set_threshold(50_000)

# All must be set before the first JAX computation and the first figure. Two devices, because
# chain_method="parallel" puts each chain on its own device, and falls back if there is only one.
compile_quickly()
numpyro.set_host_device_count(2)
os.environ["MPLBACKEND"] = "Agg"

CHECKOUT = Path(__file__).resolve().parents[1]
MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 20_000
"""Linux allows a process 65,530 mappings, and each compiled program uses some."""


SLOW_EXAMPLES = {"GGMC", "ISGD", "Microcanonical", "SGHMC", "SGNHT", "AdamSGLD"} | {
    "RiemannianLaplace"
}
"""Samplers and guides whose docstrings' examples are slow. That of `SGRLD` is in the default run;
all run in `test_conformance` or in tests of their own."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the examples of `SLOW_EXAMPLES`, which have no place for a mark of their own."""
    for item in items:
        if item.nodeid.startswith("numpyro_geom/") and item.name.split(".")[-1] in SLOW_EXAMPLES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Drop compiled programs after a file if there are many; otherwise LLVM ends the process."""
    yield
    if MAPPINGS.is_file() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@contextmanager
def _optimisation() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def optimised() -> Iterator[None]:
    """LLVM's passes, for a test whose steps take longer than compilation (above about 4 s)."""
    with _optimisation():
        yield


@pytest.fixture(scope="module")
def optimised_file() -> Iterator[None]:
    """The same for all tests of a file, and for their shared fixtures."""
    with _optimisation():
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit arithmetic within the test; the earlier setting is restored after it."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the optional real data sets, one `<name>.npz` each; the test skips without it.

    The environment variable NUMPYRO_GEOM_DATA names it. Otherwise the folder is searched next to
    the checkout. If the variable names a folder that does not exist, the test fails.
    """
    named = os.environ.get("NUMPYRO_GEOM_DATA")
    if named is not None:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            pytest.fail(f"NUMPYRO_GEOM_DATA names {named!r}, which is not a folder")
        return folder
    folder = CHECKOUT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no data sets: set NUMPYRO_GEOM_DATA to the folder that holds the .npz files")
    return folder
