"""Chains and rows on a mesh of devices: the same draws on any mesh, and the communication."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.sharding import Mesh
from numpyro.infer import MCMC, NUTS
from tiers import short

from numpyro_geom import GGMC, SGRLD, HostRows, run_in_segments, to_inference_data
from numpyro_geom.model.minibatch import Subsampling, draw
from numpyro_geom.rows.mesh_rows import MeshRows, OverMesh
from numpyro_geom.rows.reader import NO_ROW, Hint, hints
from numpyro_geom.runs.mesh import DeviceLayout
from numpyro_geom.runs.segments import Job, Segments

ROWS, COLUMNS, BATCH = 301, 3, 16
"""The rows cannot be shared out evenly, by none of the meshes; the batch by all of them."""


def data():
    rng = np.random.default_rng(4)
    return rng.standard_normal((ROWS, COLUMNS)), rng.integers(0, 2, ROWS)


def model(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ slope), obs=None if y is None else y[i])


SETTINGS = {"batch_size": BATCH, "step_size": 1e-2, "num_steps": 3}
KERNELS = {
    "SGRLD": lambda: SGRLD(model, **SETTINGS),
    "control variate": lambda: SGRLD(model, control_variate=True, **SETTINGS, batching="epoch"),
    "stratified": lambda: SGRLD(model, batching="stratified", **SETTINGS),
    "GGMC": lambda: GGMC(model, **{**SETTINGS, "step_size": 0.02}),
    "NUTS": lambda: NUTS(model, max_tree_depth=3),
}
SHAPES = {
    "control variate": [(1, 4), (2, 4)],
    "stratified": [(2, 4)],
    "GGMC": [(2, 4)],
    "NUTS": [(2, 4)],
}
"""Devices for chains, and for rows."""


ON_HOST = ("GGMC", "stratified", "control variate")
"""Kernels that run with `HostRows`."""


def make(kernel, num_samples=6, num_chains=2, **settings):
    settings = {"chain_method": "vectorized", "progress_bar": False, **settings}
    return MCMC(kernel, num_warmup=6, num_samples=num_samples, num_chains=num_chains, **settings)


def on(shape):
    """A mesh of the first devices."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return {"mesh": Mesh(devices, ("chains", "rows")), "chain_axis": "chains", "data_axis": "rows"}


def draws(kernel, shape=None, rows=None):
    """Of `run` without a mesh, or of its segments on one."""
    if shape is None:
        result = run_in_segments(make(kernel), jax.random.key(0), *data(), draws_per_segment=4)
        return np.asarray(result.mcmc.get_samples(group_by_chain=True)["slope"])
    mcmc = make(kernel)
    segments = segments_of(mcmc, shape, 6, rows)
    state, _ = segments.advance(segments.start, 1, mcmc.num_warmup)
    return segments.advance(state, 6, 1)[1]["z"]["slope"]


def segments_of(mcmc, shape, length, rows=None):
    layout = DeviceLayout.of(mcmc, **on(shape))
    return Segments(Job(mcmc, jax.random.key(0), rows or data()), length, layout)


def compare(name):
    """Largest differences from draws on one device, by shape of the mesh; and their size."""
    one = draws(KERNELS[name](), (1, 1))
    found = {str(s): float(abs(draws(KERNELS[name](), s) - one).max()) for s in SHAPES[name]}
    if name in ON_HOST:
        rows = tuple(map(HostRows, data()))
        found["on the host"] = float(abs(draws(KERNELS[name](), (2, 4), rows) - one).max())
    return found | {"spread": float(one.std(1).max())}


def compare_to_file(name, out):
    jax.config.update("jax_enable_x64", True)
    Path(out).write_text(json.dumps(compare(name)))


# Draws


def with_eight_devices(name, out):
    """What `compare` finds in a process of its own."""
    code = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]; "
    code += f"import test_mesh; test_mesh.compare_to_file({name!r}, {str(out)!r})"
    # compiling is most of the time, and less of it will do
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    flags += "--xla_llvm_disable_expensive_passes=true"
    variables = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", short(SHAPES, kept=["stratified"]))
def test_draws_do_not_depend_on_the_number_of_devices(tmp_path, name):
    found = with_eight_devices(name, tmp_path / "out.json")
    assert found.pop("spread") > 0.01
    assert len(found) == len(SHAPES[name]) + (name in ON_HOST)
    # In 64 bits sums in another order differ by some 1e-16, and steps as short as these contract.
    # What a leapfrog step of NUTS makes of it is measured: below 1e-12.
    for shape, difference in found.items():
        assert difference < 1e-10, shape


@pytest.mark.slow
def test_a_run_goes_on_with_another_mesh(tmp_path):
    alone = draws(KERNELS["SGRLD"]())

    def go(num_samples, **mesh):
        mcmc = make(KERNELS["SGRLD"](), num_samples)
        return run_in_segments(
            mcmc, jax.random.key(0), *data(), directory=tmp_path, draws_per_segment=4, **mesh
        )

    go(2, **on((1, 2)))
    with pytest.raises(ValueError, match=r"on a mesh \(was True, is False\)"):
        go(4)
    with pytest.warns(RuntimeWarning, match=r"other versions.*'rows': 2}, now .*'rows': 1}"):
        go(4, **on((2, 1)))
    with pytest.warns(RuntimeWarning, match=r"other versions.*, now .*'rows': 1}"):
        result = go(6, **on((1, 1)))
    found = np.asarray(result.mcmc.get_samples(group_by_chain=True)["slope"])
    # in 32 bits a sum of some tens of terms in another order differs by about 1e-6 of it
    np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5)
    idata = to_inference_data(result.mcmc)
    np.testing.assert_array_equal(idata.observed_data["y"].values, data()[1])


def what_travels(kernel, rows=None):
    """A program of two devices, its state, and the collectives in it by kind and shape."""
    segments = segments_of(make(kernel), (1, 2), 4, rows)
    state = segments.layout.place(segments.start)
    text = segments.program.lower(state, *counts(), segments.arrays).compile().as_text()
    travel = re.findall(r"= (.*?) (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", text)
    return segments, state, {
        (kind, shape) for all_, kind in travel for shape in re.findall(r"\w\d*\[[\d,]*\]", all_)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("batching", "kind"),
    short(
        [("stratified", np.asarray), ("replacement", HostRows)],
        kept=[("replacement", HostRows)],
    ),
)
def test_no_row_travels(batching, kind):
    kernel = SGRLD(model, batching=batching, **SETTINGS)
    _, _, shapes = what_travels(kernel, tuple(map(kind, data())))
    # gradients; energies, and that of a draw's last check
    assert shapes <= {
        ("all-reduce", f"f32[2,{COLUMNS}]"),
        ("all-reduce", "f32[2]"),
        ("all-reduce", "f32[]"),
    }


def test_only_rows_of_the_minibatch_and_gradients_travel():
    segments, state, shapes = what_travels(SGRLD(model, **SETTINGS))
    # chains, rows of the minibatch, columns; responses; those of a draw's last check, which are the
    # same for all chains; gradients; energies
    assert shapes == {
        ("all-reduce", f"u32[2,{BATCH},{COLUMNS}]"),
        ("all-reduce", f"s32[2,{BATCH}]"),
        ("all-reduce", f"u32[{BATCH},{COLUMNS}]"),
        ("all-reduce", f"s32[{BATCH}]"),
        ("all-reduce", f"f32[2,{COLUMNS}]"),
        ("all-reduce", "f32[2]"),
    }
    # and one program does all segments
    for _ in range(2):
        state, _ = segments.advance(state, 2, 1)
    assert segments.program._cache_size() == 1
    assert state.z["slope"].sharding.spec[0] == "chains"


def counts():
    return jnp.int32(1), jnp.int32(1)


# Rows

INDICES = {
    "some": np.array([0, 7, 6, 3, 3, 1]),
    "not even": np.array([2, 5, 2]),
    "none": np.zeros(0, int),
    "counted from the end": np.array([-1, -7, 6, 0]),
    "a table": np.array([[1, 2, 3], [6, 0, 6]]),
    "all in order": np.arange(7),
    "all out of order": np.array([6, 0, 1, 2, 3, 4, 4]),
    "all but two in order": np.array([0, 2, 1, 3, 4, 5, 6]),
    "beyond": np.array([9, 6]),
}
VALUES = {
    "floats": np.array([[np.nan, -0.0], [np.inf, 0.0], [1e-45, -np.inf], *[[0.1, 2.0]] * 4], "f4"),
    "halves": np.linspace(-1, 1, 7).astype("f2"),
    "whole numbers": np.array([-5, 2**31 - 1, -(2**31), 0, 1, 2, 3], "i4"),
    "bytes": np.arange(250, 257).astype("u1").reshape(7, 1, 1),
    "flags": np.array([True, False, True, True, False, False, True]),
    "complex": np.arange(7) * (1 + 2j),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_indexed_rows_are_those_of_a_plain_array(values):
    plain = jnp.asarray(values)
    rows = MeshRows.of(values, on((1, 2))["mesh"], "rows")
    assert (rows.shape, rows.ndim, rows.size, rows.dtype, len(rows)) == (
        plain.shape, plain.ndim, plain.size, plain.dtype, len(plain)
    )  # fmt: skip
    found, expected = jax.jit(lambda a, i: (jax.tree.map(lambda k: a[k], i), a))(
        rows, {k: jnp.asarray(i) for k, i in INDICES.items()}
    )
    for name, i in INDICES.items():
        here, there = np.asarray(found[name]), np.asarray(plain[i])
        assert here.dtype == there.dtype
        assert here.tobytes() == there.tobytes(), name
    assert isinstance(expected, MeshRows)
    assert np.asarray(jnp.asarray(rows)).tobytes() == np.asarray(plain).tobytes()


def test_rows_under_vmap_and_as_an_array():
    x = np.arange(14.0, dtype="f4").reshape(7, 2)
    rows = MeshRows.of(x, on((1, 2))["mesh"], "rows")
    i = np.array([[1, 2], [6, 0], [3, 3]])
    np.testing.assert_array_equal(jax.vmap(lambda k: rows[k])(jnp.asarray(i)), x[i])
    w = jnp.array([1.0, -1.0])
    for found, expected in (
        (rows @ w, x @ w),
        (jnp.ones(7) @ rows, np.ones(7) @ x),
        (2 * rows - rows, x),
        (jnp.dot(rows, w), x @ w),
        (rows.T, x.T),
        (rows.sum(0), x.sum(0)),
        (rows[jnp.array([4, 1]), 1], x[[4, 1], 1]),
        (rows[jnp.array([4, 1]), None, 1:], x[[4, 1], None, 1:]),
        (rows[2:5], x[2:5]),
        (rows[:, 0], x[:, 0]),
        (rows[3], x[3]),
        (jnp.take(rows, jnp.array([4, 1]), axis=0), x[[4, 1]]),
        (rows > 3, x > 3),
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("size", "batch"), [(7, 2), (7, 4), (7, 6), (8, 4), (301, 16)])
def test_rows_of_stratified_batches_are_in_place(size, batch):
    plate = Subsampling({"rows": size}, (), {"rows": batch}, "stratified")
    values = np.random.default_rng(0).standard_normal((size, 3))
    rows = MeshRows.of(values, on((1, 2))["mesh"], "rows")

    @jax.jit
    @jax.vmap
    def both(key):
        i = draw(plate, key, ())[0]["rows"]
        with hints(Hint(i, ordered=True)):
            return rows[i], rows[i, 1:], i

    found, part, i = both(jax.random.split(jax.random.key(0), 500))
    assert len(np.unique(i)) == size
    np.testing.assert_array_equal(found, jnp.asarray(values)[i])
    np.testing.assert_array_equal(part, jnp.asarray(values)[i, 1:])


def test_each_device_reads_its_own_rows():
    asked = []

    class Source:
        shape, ndim, dtype = (7, 2), 2, np.dtype("f4")

        def __getitem__(self, index):
            asked.append((index.start, index.stop))
            return np.zeros(self.shape, self.dtype)[index]

    rows = MeshRows.of(Source(), on((1, 2))["mesh"], "rows")
    assert asked == [(0, 4), (3, 8)]  # row 3 is in the middle of 7
    assert [x.data.shape for x in rows.blocks.addressable_shards] == [(1, 5, 2)] * 2
    with pytest.raises(AttributeError, match="_private"):
        _ = rows._private


# Rows on the host


class Source:
    """An array that remembers which rows were asked for together."""

    def __init__(self, array, fails_at=None):
        self.array, self.fails_at, self.asked = array, fails_at, []
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, rows):
        if len(self.asked) == self.fails_at:
            raise OSError("the drive is gone")
        self.asked.append(np.arange(len(self.array))[rows].tolist())
        return self.array[rows]


ORDERED, ANY = [1, 9, 12, 19, 20, 29, 30, 39], [39, 0, 5, 5, -1, 21, 50, 19]
ASKED = {
    # (mesh, index): the rows that each device asks for
    "stratified": ((1, 2), ORDERED, [ORDERED[:4], ORDERED[4:]]),
    "any": ((1, 2), ANY, [[0, 5, 39], [19, 21, 39]]),
    "not even": ((1, 2), [3, 39, 21], [[3, 21, 39]] * 2),
    "no row": ((1, 2), [3, NO_ROW, 21], [[3, 21]] * 2),
    "chains": ((2, 1), [ORDERED, ANY], [[0, 5, 19, 21, 39], ORDERED]),
    "chains and rows": ((1, 2), [ORDERED, ANY],
                        [[0, 1, 5, 9, 12, 19, 39], [19, 20, 21, 29, 30, 39]]),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "index", "asked"), ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("dtype", ["f4", "i4", "?"])
def test_each_device_asks_the_host_for_its_rows(shape, index, asked, dtype):
    array = np.random.default_rng(0).standard_normal((40, 2)).astype(dtype)
    array[5] = np.array([-0.0, np.nan]).astype("f4" if dtype == "f4" else "?")
    source = Source(array)
    rows = HostRows(source).over_mesh(OverMesh(on(shape)["mesh"], "rows", "chains"))
    source.asked.clear()
    index = jnp.asarray(index)
    take = jax.vmap(rows.__getitem__) if index.ndim > 1 else rows.__getitem__
    found = jax.jit(take)(index)
    there = (index != NO_ROW)[..., None]
    expected = jnp.where(there, jnp.asarray(array)[index], jnp.zeros((), dtype))
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    assert sorted(source.asked) == asked


def test_a_source_that_fails_on_a_mesh():
    """A callback that raised would let the other device wait for ever."""
    x, y = data()
    source = Source(x, fails_at=12)  # two draws later than the start
    mcmc = make(SGRLD(model, **SETTINGS), num_chains=1)
    with pytest.raises(RuntimeError, match="^HostRows of a Source .* the drive is gone") as caught:
        run_in_segments(
            mcmc, jax.random.key(0), HostRows(source), y, on_bad_rows="keep", **on((1, 2))
        )
    assert isinstance(caught.value.__cause__, OSError)
    assert len(source.asked) == 12


# Bad input


def no_plate(x, y):
    numpyro.sample("slope", dist.Normal(0, jnp.sum(x) + jnp.sum(y)))


TWO = {"chain_method": "vectorized", "num_chains": 2}
BAD_INPUT = [
    ({"chain_axis": "chains"}, {}, ValueError, "chain_axis name.* and there is none: pass mesh="),
    ({"mesh": 8}, {}, TypeError, "mesh must be a jax.sharding.Mesh .* got int"),
    ({**on((1, 2)), "data_axis": None, "chain_axis": None}, {}, ValueError, "needs chain_axis"),
    ({**on((1, 2)), "data_axis": "row"}, {}, ValueError, "data_axis must be an axis .* got 'row'"),
    ({**on((1, 2)), "data_axis": "chains"}, {}, ValueError, "are both 'chains': expected two"),
    (on((1, 2)), {**TWO, "chain_method": "sequential"}, ValueError, "chain_method='vectorized'"),
    (on((2, 1)), {**TWO, "num_chains": 3}, ValueError, "num_chains=3 cannot be .* expected a mult"),
    (on((2, 1)), {"num_chains": 1}, ValueError, "num_chains=1 cannot be shared out evenly"),
    (on((1, 2)), {"kernel": SGRLD(no_plate)}, ValueError, "no argument has as many rows"),
    (
        on((1, 2)),
        {"kernel": SGRLD(potential_fn=lambda z: z**2)},
        ValueError,
        "this kernel has no model",
    ),
]


@pytest.mark.parametrize(("mesh", "settings", "error", "match"), BAD_INPUT)
def test_bad_input(mesh, settings, error, match):
    settings = {"kernel": SGRLD(model, **SETTINGS), **settings}
    x, y = data()
    x = settings.pop("x", x)
    with pytest.raises(error, match=match):
        run_in_segments(make(**settings), jax.random.key(0), x, y, **mesh)


def test_a_start_that_is_not_finite():
    def improper(x):
        scale = numpyro.sample("scale", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]) as i:
            numpyro.sample("x", dist.Normal(jnp.inf * scale, 1), obs=x[i])

    mcmc = make(SGRLD(improper, batch_size=4, step_size=1e-3, num_steps=1))
    with pytest.raises(ValueError, match="energy is not finite where the chain starts"):
        run_in_segments(mcmc, jax.random.key(0), np.ones(8), **on((1, 2)))
