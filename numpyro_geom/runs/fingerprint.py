"""The identity of a run, as texts: model, kernel, settings, key and data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.infer.mcmc import MCMCKernel

from .._warning import warn_outside
from ..diagnostics.record import package_versions
from ..kernel import SGKernel
from ..model.digests import (
    FUNCTION,
    OTHER_CLASS,
    PLAIN,
    PYTHON,
    Digests,
    class_name,
    function_name,
    is_array,
    kept,
    without_addresses,
)
from ..model.programs import Program
from ..rows.host_rows import HostRows, host_rows_in, is_host_rows
from .mesh import Processes
from .segments import Job, Segments, without_mesh

SCHEME = "4: the program, and settings by name"
"""Version of the comparison of runs."""
KEPT_APART = ("_kernels", "_specs", "_weights")
"""Settings of NumPyro's kernels whose attributes do not have the names of the arguments."""
LENGTHS = ("num_", "thinning", "chain_method", "extra_fields", "draws_per_segment")
"""Prefixes of the names whose texts are the same in earlier schemes."""
CONFIG = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
)
"""Settings of JAX that affect numbers; a traced program does not show some of them."""


class KernelDigests(Digests):
    """Digests that also tell kernels apart, by their settings."""

    def parts(self, value: Any) -> Iterator[Any]:
        """Texts and bytes that distinguish a value from others."""
        if isinstance(value, MCMCKernel):
            yield f"{class_name(value)} {self.of(settings_of(value))}"
        else:
            yield from super().parts(value)


def settings_of(kernel: MCMCKernel) -> dict[str, Any]:
    """Arguments of a kernel's constructor, as far as the kernel keeps them."""
    if isinstance(kernel, SGKernel):  # their values before ``init``
        return kernel.replace().settings.as_dict()
    found = {name: x for name, x in kept(kernel).items() if name != "model"}
    return found | {name: x for name, x in vars(kernel).items() if name in KEPT_APART}


def fingerprint(job: Job, length: int, digests: Digests | None = None) -> dict[str, str]:
    """Everything besides the program that determines the draws of a run, by name."""
    mcmc, digests = job.mcmc, KernelDigests() if digests is None else digests
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
            found[f"data {root}{jax.tree_util.keystr(path)}"] = _argument(leaf, digests)
    return found


def versions() -> dict[str, str]:
    """Versions that may change the last bits of draws without being an error."""
    return {**package_versions(), "python": PYTHON, "device": jax.devices()[0].device_kind}


def program_of(segments: Segments, digests: Digests) -> Program:
    """The program of a run, whether the data are inside the program or inputs of it."""
    arguments = {}
    for k, x in segments.arguments().items():  # arrays in the type that they have in a program
        kind = jax.dtypes.canonicalize_dtype(x.dtype)
        arguments[k] = digests.of(x if isinstance(x, jax.Array) else x.astype(kind))
    return Program.of(segments.traced(), digests, arguments)


def changes(old: Mapping[str, str], new: Mapping[str, str], but: Collection[str] = ()) -> list[str]:
    """Names of the texts that differ, except ``but``, with both values if they are readable."""
    found = []
    for name in sorted((old.keys() | new.keys()) - set(but)):
        before, now = old.get(name, "absent"), new.get(name, "absent")
        if before != now:
            found.append(f"{name} (was {before}, is {now})")
    return found


def digests_of_parts(processes: Processes, job: Job) -> Digests:
    """Digests that know `HostRows` of which each process holds a part."""
    digests, parts = KernelDigests(), [x for x in host_rows_in((job.args, job.kwargs)) if x.is_part]
    for rows, text in zip(parts, processes.all(lambda: [*map(digests.of, parts)]), strict=True):
        digests.know(rows, " ".join(processes.each(text)))
    return digests


def check_same(
    where: Any, old: Mapping[str, Any], new: Mapping[str, Any], other_program: bool = False
) -> None:
    """Raise a ValueError that names what differs between the records of a run and a call of it.

    ``other_program`` allows different programs.
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
    changed = changes(before, now, but)
    if changed:
        raise ValueError(
            f"{where} holds a run that differs in: {'; '.join(changed)}. Expected the same "
            "arguments as before, or another directory"
        )
    versions = "; ".join(changes(old["versions"], new["versions"]))
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
    """Raise a ValueError unless all processes were given the same arguments, or arrays alike."""
    if not processes.several:
        return
    args, kwargs, init_params = jax.tree.map(
        lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else x,
        (job.args, job.kwargs, job.init_params),
    )
    digests = KernelDigests()
    for rows in host_rows_in((args, kwargs)):
        digests.know(rows, "a part of the rows" if rows.is_part else "all rows")
    alike = job._replace(args=args, kwargs=kwargs, init_params=init_params)
    here = fingerprint(alike, 0, digests)
    here |= {name: str(x) for name, x in others.items()}
    here["num_samples"] = str(job.mcmc.num_samples)
    program = processes.all(lambda: Program.of(without_mesh(job, None).traced(), digests))
    here["program"] = program.digest
    changed = changes(processes.first(lambda: here), here)

    def check() -> None:
        if changed:
            raise ValueError(
                f"process {jax.process_index()} was given other arguments than process 0: "
                f"{'; '.join(changed)}. Expected the same in all"
            )

    processes.all(check)


def warn(message: str) -> None:
    """Warn at the line of user code that called the package."""
    warn_outside(message, RuntimeWarning)


def _argument(leaf: Any, digests: Digests) -> str:
    """Digest of an argument of the model; for arrays, with type and shape."""
    if is_array(leaf) or isinstance(leaf, HostRows):
        return f"{leaf.dtype}{list(leaf.shape)} {digests.of(leaf)}"
    return repr(leaf) if isinstance(leaf, PLAIN) else digests.of(leaf)


def _readable(value: Any, digests: Digests) -> str:
    """A digest for people to read, with the value itself if it is short."""
    if isinstance(value, PLAIN):
        return repr(value)
    if callable(value) and not dataclasses.is_dataclass(value):
        name = function_name(value)
        return f"{name} {digests.of(value)}" if isinstance(value, functools.partial) else name
    ours = dataclasses.is_dataclass(value) and class_name(value) != OTHER_CLASS
    text = without_addresses(repr(value)) if ours else ""
    text = "" if "<" in text else text  # it has the name of a function
    return f"{text} {digests.of(value)}" if 0 < len(text) < 80 else digests.of(value)


def _setting(name: str, value: Any, digests: Digests) -> str:
    """Digest of a setting by its content; for a schedule, also of the program that computes it."""
    text = _readable(value, digests)
    if name == "step_size" and callable(value):
        with contextlib.suppress(Exception):  # it may not be a schedule that JAX can trace
            traced = jax.make_jaxpr(value)(jnp.zeros((), jnp.int32))
            text += f" {Program.of(traced, digests).digest[:16]}"
    return text
