"""HostRows: the draws equal those with a device array, for any source; errors and stalls."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import warnings
import weakref
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS
from scripts import load_script
from tiers import short

from numpyro_geom import (
    GGMC,
    SGRLD,
    HostRows,
    RiemannianLaplace,
    diagnose,
    run_in_segments,
    to_inference_data,
)
from numpyro_geom.baselines import ISGD
from numpyro_geom.model import model as model_module
from numpyro_geom.model import trial
from numpyro_geom.rows import host_rows
from numpyro_geom.runs.identity import data_of
from numpyro_geom.runs.segments import Job

N, D = 301, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D))
Y = (RNG.random(N) < 1 / (1 + np.exp(-X @ np.array([1.0, -1.0])))).astype(np.int32)


def model(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


def network(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1], 2]).to_event(2))
    with numpyro.plate("data", X.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=jnp.tanh(X[i] @ w).sum(-1)), obs=y[i])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Several chunks and blocks in a pass over the data, and several blocks in a draw."""
    monkeypatch.setattr(model_module, "num_at_once", lambda _: 32)
    monkeypatch.setattr(host_rows, "num_at_once", lambda entries: max(1, 2**14 // entries))


FIXED = {"batch_size": 8, "step_size": 1e-3, "num_steps": 10}
STARTED = {"batch_size": 8, "num_steps": 10}
# those that ask for rows in another way: other kernels share their loop
KERNELS = {
    "SGRLD": lambda: SGRLD(model, **FIXED),
    "SGRLD in epochs": lambda: SGRLD(model, batching="epoch", **FIXED),
    "SGRLD auxiliary": lambda: SGRLD(model, metric="monge", divergence="auxiliary", **FIXED),
    "SGRLD all rows": lambda: SGRLD(model, step_size=1e-3, num_steps=2),
    "GGMC": lambda: GGMC(model, friction=1.0, **FIXED),
    "ISGD": lambda: ISGD(model, **STARTED),
}


def some_draws(kernel, *data):
    """The state after a few draws, warm-up included."""
    state = kernel.init(random.key(1), 2, {"w": 0.1 * jnp.ones(shape_of(kernel))}, data, {})
    step = jax.jit(lambda state: kernel.sample(state, data, {}))
    for _ in range(4):
        state = step(state)
    return state


def shape_of(kernel):
    return (D, 2) if kernel.model is network else (D,)


def assert_same(left, right, rtol=0.0):
    for one, two in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, two = random.key_data(one), random.key_data(two)
        np.testing.assert_allclose(one, two, rtol=rtol)


IN_SHORT = ("SGRLD in epochs",)


@pytest.mark.parametrize("name", short(KERNELS, kept=IN_SHORT))
def test_every_kernel_takes_the_same_steps(name, request):
    if name == "SGRLD in epochs":  # else one sum is rounded in another order
        request.getfixturevalue("optimised")
    make = KERNELS[name]
    host, device = (
        some_draws(make(), HostRows(X), HostRows(Y)),
        some_draws(make(), jnp.asarray(X), Y),
    )
    # one program rounds the momentum of a trajectory otherwise, by 1.3e-7 of it
    assert_same(host, device, rtol=4e-7 if name == "GGMC" else 0.0)


@pytest.mark.slow
def test_automatic_settings_are_the_same():
    """The law about a start, curvature and the anchor of warm-up.

    Without a start there are several searches, and one with rows on the host.
    """

    def draws(*data):
        kernel = SGRLD(model, batch_size=8, control_variate=True)
        start = {"w": jnp.zeros(D)}
        return run_mcmc(kernel, *data, num_warmup=30, start=start).last_state

    one, two = draws(HostRows(X), HostRows(Y)), draws(X, Y)
    # a Hessian sums rows in another order, and what follows moves with it: draws by 4e-5 here, the
    # step size by 1e-3
    np.testing.assert_allclose(one.z["w"], two.z["w"], rtol=2e-4)
    np.testing.assert_allclose(one.step_size, two.step_size, rtol=5e-3)
    np.testing.assert_array_equal(one.num_steps, two.num_steps)
    anchors = (state.control.anchor.position for state in (one, two))
    np.testing.assert_allclose(*anchors, rtol=2e-4)


def run_mcmc(kernel, *data, num_warmup=2, num_samples=4, start=None, **settings):
    mcmc = MCMC(
        kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False, **settings
    )
    mcmc.run(random.key(2), *data, init_params=start)
    return mcmc


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chains", "settings"),
    [
        (3, {"chain_method": "vectorized"}),
        pytest.param(
            2, {"chain_method": "parallel", "jit_model_args": True}, marks=pytest.mark.slow
        ),
    ],
    ids=["vectorized", "parallel"],
)
def test_chains(chains, settings):
    found = [
        run_mcmc(SGRLD(model, **FIXED), *data, num_chains=chains, **settings)
        for data in ((HostRows(X), HostRows(Y)), (X, Y))
    ]
    assert_same(found[0].get_samples(), found[1].get_samples())


@pytest.mark.slow
@pytest.mark.parametrize("chain_method", ["vectorized", "parallel"])
def test_large_indices_do_not_deadlock(chain_method, monkeypatch):
    """JAX copies arguments above 100 KiB in a thread of the pool that waits for the call."""
    monkeypatch.undo()
    rows = np.arange(400_000, dtype=np.float32).reshape(200_000, 2) / 400_000
    data = HostRows(rows), HostRows(np.zeros(200_000, np.int32))
    kernel = SGRLD(model, batch_size=100_000, step_size=1e-6, num_steps=3)
    chains = 4 if chain_method == "vectorized" else 2
    done = []

    def go():
        done.append(run_mcmc(kernel, *data, num_chains=chains, chain_method=chain_method))

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    thread.join(120)
    assert done


def test_log_likelihood_of_all_rows():
    mcmc = run_mcmc(SGRLD(model, **FIXED), HostRows(X), HostRows(Y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a run of four draws
        found = to_inference_data(mcmc, log_likelihood=True).log_likelihood["y"].values[0]
    logits = mcmc.get_samples()["w"] @ X.T.astype(np.float32)
    # sums of 2 products of order 1 in float32
    np.testing.assert_allclose(found, dist.Bernoulli(logits=logits).log_prob(Y), atol=1e-5)


@pytest.mark.slow
def test_diagnose_says_the_same():
    texts = []
    for data in ((HostRows(X), HostRows(Y)), (X, Y)):
        mcmc = run_mcmc(SGRLD(model, **FIXED), *data, num_warmup=50, num_samples=100)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            texts.append(str(diagnose(mcmc, seconds=1.0)))
    assert texts[0] == texts[1]


def test_kernels_of_numpyro_take_the_same_steps():
    on_device = jnp.asarray(X), jnp.asarray(Y)
    found = [run_mcmc(NUTS(model), *data) for data in ((HostRows(X), HostRows(Y)), on_device)]
    assert_same(found[0].get_samples(), found[1].get_samples())


def test_guides_give_the_same_draws():
    def draws(*data):
        guide = RiemannianLaplace(model, metric="euclidean", batch_size=64)
        params = guide.fit(random.key(0), *data)
        return guide.sample_posterior(random.key(1), params, sample_shape=(5,))

    found, expected = draws(HostRows(X), HostRows(Y)), draws(X, Y)
    # the compiler may fuse a gather on the device into a sum: its last bits then differ
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-5)


def test_parameters_are_found_from_some_rows():
    def with_param(X, y):
        scale = numpyro.param("scale", lambda key: random.uniform(key) + 1.0)
        w = numpyro.sample("w", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("data", X.shape[0]) as i:
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])

    source, kernels = Broken(X), [SGRLD(with_param, **FIXED) for _ in range(2)]
    for kernel, data in zip(kernels, ((HostRows(source), HostRows(Y)), (X, Y)), strict=True):
        with pytest.warns(UserWarning, match="stay at random first values"):
            kernel.init(random.key(0), 0, None, data, {})
    assert_same(kernels[0].bound.model.fixed, kernels[1].bound.model.fixed)
    # the parameters and the start need a batch, and the trial of rows a few more
    assert max(np.size(rows) for rows in source.reads) <= trial.MOST_ROWS < N


# Sources


class Broken:
    """Raises or stalls at the reads named in ``at``, counted from 1."""

    def __init__(self, array, at=(), seconds=None):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.at, self.seconds, self.reads, self.threads = at, seconds, [], set()

    def __getitem__(self, rows):
        self.reads.append(rows)
        self.threads.add(threading.get_ident())
        if len(self.reads) in self.at:
            if self.seconds is None:
                raise OSError("the drive is gone")
            time.sleep(self.seconds)
        return self.array[rows]


def source_of(kind, folder, array):
    if kind == "numpy":
        return array
    if kind == "memmap":
        source = np.memmap(folder / "rows.dat", array.dtype, "w+", shape=array.shape)
        source[:] = array
        return source
    if kind == "hdf5":
        h5py = pytest.importorskip("h5py")
        return h5py.File(folder / "rows.h5", "w").create_dataset("X", data=array, chunks=(7, 2))
    if kind == "zarr":
        zarr = pytest.importorskip("zarr")
        return zarr.create_array(folder / "rows.zarr", data=array, chunks=(7, 2))
    return Broken(array)


@pytest.mark.parametrize("kind", ["numpy", "memmap", "hdf5", "zarr", "other"])
def test_sources(kind, tmp_path):
    rows = HostRows(source_of(kind, tmp_path, X))
    device = jnp.asarray(X)
    assert (rows.shape, rows.dtype, rows.ndim, rows.size) == ((N, D), np.float32, 2, 2 * N)
    assert len(rows) == N
    take = jax.jit(lambda x, i: x[i])
    for index in (
        np.array([5, 3, 3, 299, 0]),
        np.arange(10, 40),
        np.array([[7, 2], [-1, 1000]]),  # JAX counts from the end, and clips
        np.int32(4),
    ):
        index = jnp.asarray(index)
        np.testing.assert_array_equal(take(rows, index), device[index])
        np.testing.assert_array_equal(rows[index], device[index])
    for one, two in (
        (rows[3], device[3]),
        (rows[-2:], device[-2:]),
        (rows[::50, 1], device[::50, 1]),
        (rows[index, :1], device[index, :1]),
        (rows[jnp.arange(3), None], device[jnp.arange(3), None]),
    ):
        np.testing.assert_array_equal(one, two)


def test_types_follow_x64():
    rows = HostRows(X)
    with jax.enable_x64(True):
        assert rows.dtype == np.float64
        np.testing.assert_array_equal(jax.jit(lambda i: rows[i])(jnp.arange(4)), X[:4])
    assert jax.jit(lambda i: rows[i])(jnp.arange(4)).dtype == np.float32


def test_vmap_of_two_axes_is_one_call():
    source = Broken(X)
    rows, before = HostRows(source), len(source.reads)
    index = jnp.asarray(RNG.integers(0, N, (2, 3, 5)))
    found = jax.jit(jax.vmap(jax.vmap(lambda i: rows[i, 0])))(index)
    np.testing.assert_array_equal(found, jnp.asarray(X)[index, 0])
    assert len(source.reads) == before + 1


# How rows travel


def test_rows_of_several_steps_travel_at_once_and_ahead(monkeypatch):
    """Ten steps in blocks of four: three reads of each source; the rows of a draw's last check are
    read when the program is traced.
    """
    monkeypatch.setattr(host_rows, "num_at_once", lambda entries: 2**13 // entries)
    source = Broken(X)
    data = HostRows(source), HostRows(Y)
    kernel = SGRLD(model, **FIXED)
    state = kernel.init(random.key(0), 0, None, data, {})
    step = jax.jit(lambda state: kernel.sample(state, data, {}))
    prepared = []
    prepare = host_rows.Reader.prepare
    monkeypatch.setattr(
        host_rows.Reader,
        "prepare",
        lambda self, index, dtype: prepared.append(len(index)) or prepare(self, index, dtype),
    )
    jax.block_until_ready(step(state).z)
    source.reads.clear()
    source.threads.clear()
    prepared.clear()
    jax.block_until_ready(step(state).z)
    assert len(source.reads) == 3
    assert threading.get_ident() not in source.threads
    # y beside X in three blocks, and both ahead in all but the last
    assert prepared.count(4 * 8) == 3 + 2 * 2


def test_nothing_is_kept_alive():
    source = Broken(X)
    gone = weakref.ref(source)
    rows = HostRows(source)
    rows[3]
    thread = rows.reader._thread
    del source, rows
    gc.collect()
    thread.join(10)
    assert gone() is None
    assert not thread.is_alive()


def test_copies_read_the_same_rows():
    rows = HostRows(X, timeout=7.0)
    for other in (pickle.loads(pickle.dumps(rows)), copy.deepcopy(rows)):
        np.testing.assert_array_equal(other[:], rows[:])
        assert other.timeout == 7.0


# Faults


def run_small(data, **settings):
    mcmc = MCMC(SGRLD(model, **FIXED), num_warmup=2, num_samples=8, progress_bar=False)
    return run_in_segments(mcmc, random.key(0), *data, draws_per_segment=2, **settings)


FAULTS = {
    "raises": (None, RuntimeError, "^HostRows .* could not read .* OSError: the drive is gone"),
    "stalls": (1.0, TimeoutError, "^HostRows .* within 0.3 seconds"),
}


@lru_cache
def without_a_fault():
    """Draws, and the source that gave them."""
    whole = Broken(X)
    return run_small((HostRows(whole), HostRows(Y))).mcmc.get_samples()["w"], whole


@pytest.mark.parametrize(
    ("seconds", "error", "text"), short(FAULTS.values(), kept=[FAULTS["raises"]]), ids=FAULTS
)
def test_a_run_goes_on_after_a_fault(seconds, error, text, tmp_path):
    expected, whole = without_a_fault()
    source = Broken(X, at=(3 * len(whole.reads) // 4,), seconds=seconds)
    data = HostRows(source, timeout=0.3), HostRows(Y)
    with pytest.raises(error, match=text):
        run_small(data, directory=tmp_path)
    reads = len(source.reads)
    found = run_small(data, directory=tmp_path)
    np.testing.assert_array_equal(found.mcmc.get_samples()["w"], expected)
    assert len(source.reads) - reads < len(whole.reads)  # not all of it anew


def test_the_error_of_a_source_is_not_buried():
    source = Broken(X)
    rows = HostRows(source)
    take = jax.jit(lambda i: rows[i])
    take(jnp.arange(3))
    source.at = (len(source.reads) + 1,)
    with (
        pytest.raises(RuntimeError, match="^HostRows of a Broken .* 3 rows from 0 to 2") as caught,
        host_rows.source_errors({"X": rows}),
    ):
        jax.block_until_ready(take(jnp.arange(3)))
    assert isinstance(caught.value.__cause__, OSError)
    np.testing.assert_array_equal(take(jnp.arange(3)), X[:3].astype(np.float32))


def test_other_errors_pass():
    with pytest.raises(KeyError, match="other"), host_rows.source_errors(HostRows(X)):
        raise KeyError("other")


def test_a_source_that_gives_wrong_rows_is_an_error():
    source = Broken(X)
    rows = HostRows(source)
    source.array = X[:, :1]
    with pytest.raises(RuntimeError, match=r"gave rows of shape \(1, 1\), expected \(1, 2\)"):
        rows[2]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_memory_map_whose_file_was_cut_short(when, tmp_path):
    np.save(tmp_path / "X.npy", np.zeros((20_000, 2), np.float32))
    source = np.load(tmp_path / "X.npy", mmap_mode="r")[5:]
    rows = None if when == "before" else HostRows(source)
    os.truncate(tmp_path / "X.npy", 4096)  # to read what was mapped beyond would end the process
    if rows is None:
        with pytest.raises(
            ValueError, match="4096 bytes, and 160128 were mapped: it was cut short"
        ):
            HostRows(source)
        with pytest.raises(ValueError, match=r"under args\[0\] has 4096 bytes"):
            run_small((source, Y), on_bad_rows="keep")
    else:
        with pytest.raises(RuntimeError, match="could not read 1 rows .* it was cut short"):
            rows[3]


def test_a_memory_map_whose_file_is_gone(tmp_path):
    np.save(tmp_path / "X.npy", X)
    rows = HostRows(np.load(tmp_path / "X.npy", mmap_mode="r"))
    (tmp_path / "X.npy").unlink()
    np.testing.assert_array_equal(rows[:], X.astype(np.float32))


VALUES = {
    "fractions for whole numbers": (np.int32, X, "float64 that int32 cannot hold"),
    "negative for unsigned": (np.uint8, -np.ones((N, D), int), "int64 that uint8 cannot hold"),
    "complex for real": (np.float32, X + 1j, "complex128 that float32"),
    "texts for numbers": (np.float32, X.astype(str), "that float32 cannot hold"),
    "above 32 bits": (np.int64, np.full((N, D), 2**40), "int64 that int32 .* enable 64 bits"),
    "above float32": (np.float64, np.full((N, D), 1e300), "float64 that float32 .* enable 64 bits"),
}


@pytest.mark.parametrize(("dtype", "values", "text"), VALUES.values(), ids=VALUES)
def test_values_that_their_type_cannot_hold(dtype, values, text):
    source = Broken(values)
    source.dtype = np.dtype(dtype)
    with pytest.raises(RuntimeError, match=text):
        HostRows(source)[2]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(np.uint8, np.ones((N, D), int)), (">f4", X.astype(">f4")), (np.int32, X > 0)],
)
def test_values_that_it_can(dtype, values):
    source = Broken(values)
    source.dtype = np.dtype(dtype)
    rows = HostRows(source)
    assert rows.dtype.isnative
    np.testing.assert_array_equal(jax.jit(lambda i: rows[i])(jnp.arange(N)), values)


def test_64_bits_reach_the_device_from_any_thread():
    def walk(i, x):
        return x + rows[i % N].sum()

    rows = HostRows(X)
    with jax.enable_x64(True):
        found = jax.jit(lambda: jax.lax.fori_loop(0, 5, walk, 0.0))()
        assert found.dtype == np.float64
    np.testing.assert_allclose(found, X[:5].sum(), rtol=1e-14)  # 10 sums of float64


def test_what_a_source_raises_to_end_the_process_is_an_error():
    source = Broken(X)
    rows = HostRows(source)

    class Exits:
        def __getitem__(self, rows):
            raise SystemExit(3)

    source.array = Exits()
    with pytest.raises(RuntimeError, match=r"could not read .* SystemExit\(3\)"):
        rows[2]


def test_a_source_keeps_the_shape_that_it_had():
    source = Broken(X)
    rows = HostRows(source)
    source.array, source.shape = np.concatenate([X, X + 1]), (2 * N, D)
    assert rows.shape == (N, D)
    np.testing.assert_array_equal(rows[-1], X[-1].astype(np.float32))


# Bad input


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (np.ma.masked_less(X, 0), TypeError, "got MaskedArray: .*filled"),
        ([[1.0]], TypeError, "got list: pass .*asarray"),
        (jnp.ones(3), TypeError, "got ArrayImpl: .*to the model as it is"),
        (HostRows(X), TypeError, "got HostRows"),
        (np.array(1.0), TypeError, r"shape \(\)"),
        (np.ones((0, 3)), ValueError, "at least one row"),
        (np.array(["a"]), TypeError, "of dtype .*: convert it"),
        (np.array([None]), TypeError, "of dtype .*: convert it"),
    ],
)
def test_bad_sources(source, error, text):
    with pytest.raises(error, match=text):
        HostRows(source)


def test_labels_and_shapes():
    class Labelled(Broken):
        iloc = None

    with pytest.raises(TypeError, match="got Labelled of .*: convert it"):
        HostRows(Labelled(X))
    source = Broken(X)
    source.shape = (None, 2)
    with pytest.raises(TypeError, match="shape .*None, 2.*: expected rows"):
        HostRows(source)


@pytest.mark.parametrize(
    ("timeout", "error"), [(0.0, ValueError), ("a", TypeError), (np.inf, ValueError)]
)
def test_bad_timeouts(timeout, error):
    with pytest.raises(error, match="timeout must be"):
        HostRows(X, timeout=timeout)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x @ jnp.ones(D),
        lambda x: np.ones(N) @ x,
        lambda x: 2 * x,
        lambda x: -x,
        lambda x: x < 1,
        lambda x: jnp.sum(x),
        lambda x: np.asarray(x),
        lambda x: jnp.take(x, 0, axis=0),
        bool,
    ],
)
def test_use_as_a_whole(use):
    with pytest.raises(TypeError, match="cannot be used as a whole"):
        use(HostRows(X))


@pytest.mark.parametrize("index", [None, ..., 0.5, np.ones(N, bool), "a", ()])
def test_bad_indices(index):
    with pytest.raises(TypeError, match="indexed by row numbers"):
        HostRows(X)[index]


def test_columns_by_an_array():
    with pytest.raises(TypeError, match="rows first"):
        HostRows(X)[jnp.arange(2), jnp.arange(2)]


def test_a_model_that_uses_the_whole():
    def whole(X, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("data", X.shape[0]) as i:
            numpyro.sample("y", dist.Bernoulli(logits=(X @ w)[i]), obs=y[i])

    with pytest.raises(TypeError, match="cannot be used as a whole"):
        run_mcmc(SGRLD(whole, **FIXED), HostRows(X), HostRows(Y))


# Identity of a run


def test_the_rows_are_read_to_identify_a_run(tmp_path):
    def of(rows):
        return data_of(Job(None, None, (rows,), {"y": rows}), values=True)

    memmap = HostRows(source_of("memmap", tmp_path, X))
    assert of(memmap) == of(HostRows(X, timeout=1.0))
    changed = X.copy()
    changed[N - 1, 1] += 1e-3
    old, new = of(memmap), of(HostRows(changed))
    assert {k for k in old if old[k] != new[k]} == {"data args[0]", "data kwargs['y']"}


def test_blocks(monkeypatch):
    monkeypatch.setattr(host_rows, "num_at_once", lambda _: 37)
    blocks = list(HostRows(X).blocks())
    assert len(blocks) > 1
    np.testing.assert_array_equal(np.concatenate(blocks), X.astype(np.float32))


# The benchmark


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path, monkeypatch):
    script = load_script("benchmarks/host_rows")
    table = tmp_path / "table.md"
    monkeypatch.setattr("sys.argv", ["host_rows.py", "--quick", "--table", str(table)])
    script.main()
    lines = table.read_text().splitlines()
    assert len(lines) == 4 + 1 + 3 + 1 + 5
    assert all(line.startswith("|") for line in lines if line)
    assert "want of memory" not in lines[2]


def test_a_read_takes_no_longer_among_many_rows() -> None:
    """A number of NumPy is looked for in a range one by one: 5 s for this one."""
    many = HostRows(np.broadcast_to(np.float32(2), (100_000_000,)))
    began = time.process_time()
    assert many[np.array([99_999_999])].tolist() == [2.0]
    assert time.process_time() - began < 1
