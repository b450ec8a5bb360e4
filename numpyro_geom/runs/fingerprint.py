"""What a run is of, as texts that tell two runs apart: model, kernel, settings, key and data."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._warning import warn_outside
from ..diagnostics.run_record import package_versions
from ..rows.host_rows import is_host_rows
from .digest import FUNCTION, PYTHON, Digests, class_name, settings_of
from .job import Job
from .processes import Processes
from .program import Program
from .segments import Segments, without_mesh

SCHEME = "4: the program, and settings by name"
"""How runs are compared."""
LENGTHS = ("num_", "thinning", "chain_method", "extra_fields", "draws_per_segment")
"""Of what is told of a run, what earlier schemes told alike."""
CONFIG = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
)
"""Settings of JAX that decide numbers, some of which a traced program does not show."""


def fingerprint(job: Job, length: int, digests: Digests | None = None) -> dict[str, str]:
    """What decides the draws of a run apart from its program, by name."""
    mcmc, digests = job.mcmc, Digests() if digests is None else digests
    method = mcmc.chain_method
    found = {
        "fingerprint": SCHEME,
        "kernel": class_name(mcmc.sampler),
        **{
            f"kernel setting {name}": _setting(name, x, digests)
            for name, x in settings_of(mcmc.sampler).items()
            if name != "model"
        },
        "num_warmup": str(mcmc.num_warmup),
        "thinning": str(mcmc.thinning),
        "num_chains": str(mcmc.num_chains),
        "chain_method": method if isinstance(method, str) else FUNCTION,
        "extra_fields": ", ".join(job.extra_fields),
        "draws_per_segment": str(length),
        "rng_key": digests.of(job.rng_key),
        **{name: str(getattr(jax.config, name)) for name in CONFIG},
    }
    trees = {"args": list(job.args), "kwargs": job.kwargs, "init_params": job.init_params}
    for root, tree in trees.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_host_rows)[0]:
            found[f"data {root}{jax.tree_util.keystr(path)}"] = digests.data(leaf)
    return found


def versions() -> dict[str, str]:
    """What may change the last bits of draws without being a mistake."""
    return {**package_versions(), "python": PYTHON, "device": jax.devices()[0].device_kind}


def program_of(segments: Segments, digests: Digests) -> Program:
    """What a run executes, whether the data are part of the program or given to it."""
    arguments = {k: digests.of(_as_on_device(x)) for k, x in segments.arguments().items()}
    return Program.of(segments.traced(), digests, arguments)


def differences(
    old: Mapping[str, str], new: Mapping[str, str], but: Collection[str] = ()
) -> list[str]:
    """Names of what differs, some left out, with both values where they can be read."""
    found = []
    for name in sorted((old.keys() | new.keys()) - set(but)):
        before, now = old.get(name, "absent"), new.get(name, "absent")
        if before != now:
            found.append(f"{name} (was {before}, is {now})")
    return found


def check_same(
    where: Any, old: Mapping[str, Any], new: Mapping[str, Any], other_program: bool = False
) -> None:
    """Compare the record of a run with that of one that is to go on with it.

    ``other_program`` lets programs differ.

    Raises:
        ValueError: if the runs differ; the text names what does.
    """
    before, now = old["fingerprint"], new["fingerprint"]
    earlier = before.get("fingerprint") != SCHEME
    but = {n for n in before.keys() | now.keys() if not n.startswith(LENGTHS)} if earlier else set()
    if earlier:
        warn(
            f"{where} was begun with an earlier version of numpyro_geom, whose record of code and "
            "data cannot be compared: make sure that these are the same as then: model, kernel and "
            "its settings, postprocess_fn, data, rng_key"
        )
    changed = differences(before, now, but)
    if changed:
        raise ValueError(
            f"{where} holds a run that differs in: {'; '.join(changed)}. Expected the same "
            "arguments as before, or another directory"
        )
    versions = "; ".join(differences(old["versions"], new["versions"]))
    if not earlier and not other_program:
        _check_programs(where, Program(**old["program"]), Program(**new["program"]), versions)
    if versions:
        warn(f"the run was begun with other versions, and draws may differ: {versions}")


def _check_programs(where: Any, old: Program, new: Program, versions: str) -> None:
    if old.digest != new.digest:
        advice = (
            f"It was begun with other versions ({versions}), which may be why: if you have changed "
            "nothing yourself, pass resume='other_program' once"
            if versions
            else "Expected code and values as they were, or another directory"
        )
        raise ValueError(
            f"{where} holds a run of another program: {new.after(old)}. The model, the kernel or "
            "postprocess_fn, a function that one of them calls or a value that one reads is not "
            f"what it was. {advice}"
        )
    if old.host != new.host:
        names = "the functions that the program calls on the host (by jax.pure_callback or alike)"
        if "python (" not in versions:
            raise ValueError(
                f"{where} holds a run that differs in: {names}. Expected them as they were, or "
                "another directory"
            )
        warn(
            f"{where} was begun with another version of Python, in which {names} cannot be "
            "compared: make sure that they are the same as then"
        )


def check_alike(processes: Processes, job: Job, **others: Any) -> None:
    """Check that all processes were given the same, of arrays the same shapes.

    Raises:
        ValueError: if not; the text names what differs.
    """
    if not processes.several:
        return
    args, kwargs, init_params = jax.tree.map(
        lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else x,
        (job.args, job.kwargs, job.init_params),
    )
    here = fingerprint(job._replace(args=args, kwargs=kwargs, init_params=init_params), 0)
    here |= {name: str(x) for name, x in others.items()}
    here["num_samples"] = str(job.mcmc.num_samples)
    programs: list[Program] = []
    processes.all(
        lambda: programs.append(Program.of(without_mesh(job, None).traced(), Digests(), {}))
    )
    here["program"] = programs[0].digest
    changed = differences(processes.first(lambda: here), here)

    def check() -> None:
        if changed:
            raise ValueError(
                f"process {jax.process_index()} was given other arguments than process 0: "
                f"{'; '.join(changed)}. Expected the same in all"
            )

    processes.all(check)


def warn(message: str) -> None:
    """Warn where the caller of the package is."""
    warn_outside(message, RuntimeWarning)


def _as_on_device(x: Any) -> Any:
    """An array in the type that it has within a program."""
    return x if isinstance(x, jax.Array) else x.astype(jax.dtypes.canonicalize_dtype(x.dtype))


def _setting(name: str, value: Any, digests: Digests) -> str:
    """By its content; a schedule also by what it computes of the number of a step."""
    text = digests.text(value)
    if name == "step_size" and callable(value):
        with contextlib.suppress(Exception):  # it may be none
            traced = jax.make_jaxpr(value)(jnp.zeros((), jnp.int32))
            text += f" {Program.of(traced, digests, {}).digest[:16]}"
    return text
