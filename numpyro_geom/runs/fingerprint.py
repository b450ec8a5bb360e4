"""What a run is of, as texts that tell two runs apart: model, kernel, settings, key and data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from .._mcmc import model_of
from .._warning import warn_outside
from ..diagnostics.run_record import package_versions
from ..rows.host_rows import HostRows, is_host_rows
from .digest import BY_BYTE_CODE, PLAIN, PYTHON, as_text, digest, settings_of
from .job import Job
from .processes import Processes

SCHEME = "3: code by its byte code, settings by name"
"""How code and settings are compared."""
CODE = ("model", "kernel", "postprocess_fn", "fingerprint")


def fingerprint(job: Job, length: int) -> dict[str, str]:
    """What decides the draws of a run, by name.

    Code is compared by what it does: comments, annotations and names of files do not matter;
    functions that the model calls outside of libraries, values that it closes over and global
    constants that it reads do.
    """
    mcmc = job.mcmc
    method = mcmc.chain_method
    found = {
        "fingerprint": SCHEME,
        "model": digest(model_of(mcmc.sampler)),
        "kernel": f"{type(mcmc.sampler).__qualname__} {digest(type(mcmc.sampler))}",
        **{f"kernel setting {n}": as_text(x) for n, x in settings_of(mcmc.sampler).items()},
        "num_warmup": str(mcmc.num_warmup),
        "thinning": str(mcmc.thinning),
        "num_chains": str(mcmc.num_chains),
        "chain_method": method if isinstance(method, str) else getattr(method, "__name__", "?"),
        "postprocess_fn": digest(mcmc.postprocess_fn),
        "extra_fields": ", ".join(job.extra_fields),
        "draws_per_segment": str(length),
        "rng_key": digest(job.rng_key),
        "x64": str(bool(jax.config.read("jax_enable_x64"))),
    }
    trees = {"args": list(job.args), "kwargs": job.kwargs, "init_params": job.init_params}
    for root, tree in trees.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_host_rows)[0]:
            found[f"data {root}{jax.tree_util.keystr(path)}"] = _data(leaf)
    return found


def versions() -> dict[str, str]:
    """What may change the last bits of draws without being a mistake."""
    return {**package_versions(), "python": PYTHON, "device": jax.devices()[0].device_kind}


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


def check_same(where: Any, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Compare the record of a run with that of one that is to go on with it.

    Raises:
        ValueError: if the runs differ; the text names what does.
    """
    before, now = old["fingerprint"], new["fingerprint"]
    if before.get("fingerprint") != SCHEME:
        other = "an earlier version of numpyro_geom"
        names = before.keys() | now.keys()
        code = {n for n in names if n in CODE or n.startswith("kernel setting")}
    else:
        other = "another version of Python"
        pythons = {name: (_python(before.get(name, "")), _python(x)) for name, x in now.items()}
        code = {name for name, (was, this) in pythons.items() if was and this and was != this}
    if code:
        warn(
            f"{where} was begun with {other}, whose record of code cannot be compared: make sure "
            f"that these are the same as then: {', '.join(sorted(code - {'fingerprint'}))}"
        )
    changed = differences(before, now, but=code)
    if changed:
        raise ValueError(
            f"{where} holds a run that differs in: {'; '.join(changed)}. Expected the same "
            "arguments as before, or another directory"
        )
    changed = differences(old["versions"], new["versions"])
    if changed:
        warn(f"the run was begun with other versions, and draws may differ: {'; '.join(changed)}")


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


def _python(text: str) -> str:
    """The version of Python by whose byte code a value is told; empty if by none."""
    return text.partition(BY_BYTE_CODE)[2]


def _data(leaf: Any) -> str:
    if isinstance(leaf, (np.ndarray, jax.Array, HostRows)):
        return f"{leaf.dtype}{list(leaf.shape)} {digest(leaf)}"
    return repr(leaf) if isinstance(leaf, PLAIN) else digest(leaf)
