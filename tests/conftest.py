"""What every test shares: two CPU devices, 64-bit mode on demand, and the optional data sets."""

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
    """Have XLA translate programs plainly; processes that tests start inherit it.

    Compiling is most of what the tests cost, and takes a third of the time without LLVM's passes
    and with XLA's older emitters of CPU code (a step of SGRLD 0.5 s in place of 1.8 s, with
    warm-up 3.2 s in place of 8.0 s). What is computed is the same up to rounding. Set either
    variable to test what users run: JAX_DISABLE_MOST_OPTIMIZATIONS=0
    XLA_FLAGS=--xla_cpu_use_fusion_emitters=true.
    """
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    chosen = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"].lower()
    jax.config.update("jax_disable_most_optimizations", chosen not in ("0", "false", "off"))
    # XLA ends a process that sets a flag which it does not know: jaxlib 0.12 has no such emitters
    name, flags = "xla_cpu_use_fusion_emitters", os.environ.get("XLA_FLAGS", "")
    if name not in flags and (0, 8) <= jaxlib.version.__version_info__[:2] <= (0, 10):
        os.environ["XLA_FLAGS"] = f"{flags} --{name}=false"


# All must be set before the first JAX computation and the first figure. Two devices, because
# chain_method="parallel" puts each chain on a device of its own and falls back without it.
compile_quickly()
numpyro.set_host_device_count(2)
os.environ["MPLBACKEND"] = "Agg"

CHECKOUT = Path(__file__).resolve().parents[1]
MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 20_000
"""Linux lets a process have 65,530, and each compiled program takes some."""


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Forget compiled programs at the end of a file if there are many: LLVM ends the process."""
    yield
    if MAPPINGS.is_file() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def programs_on_disk(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile what many tests have in common once: compiling is most of the time.

    Each worker has a folder of its own, because JAX's cache is not safe for two writers.
    """
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextmanager
def _optimisation() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def optimised() -> Iterator[None]:
    """LLVM's passes: for a test whose steps take longer than compiling (above some 4 s)."""
    with _optimisation():
        yield


@pytest.fixture(scope="module")
def optimised_file() -> Iterator[None]:
    """The same for all tests of a file, and for what they share."""
    with _optimisation():
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit arithmetic within the test, and what was before after it."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the optional real data sets, one `<name>.npz` each; the test skips without it.

    The environment variable NUMPYRO_GEOM_DATA names it; otherwise it is looked for beside the
    checkout. A variable that names no folder is a mistake, not a missing option: it fails.
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
