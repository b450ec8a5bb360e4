"""Attack long runs on disk from outside, and report the outcomes.

Each attack is made on real runs, in a separate process with a time limit, so that a crash or an
endless wait is an outcome too. There are two good outcomes: draws that are bit for bit those of an
undisturbed run, and errors that name the file. `kill_runs.py` has the kills, and tests have files
that are damaged, exchanged or missing.

    python examples/benchmarks/attacks_store.py --table docs/tables/attacks_store.md
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from kill_runs import have_ended, in_child
from numpyro.infer import MCMC

from numpyro_geom import SGRLD
from numpyro_geom.runs import run_in_segments
from numpyro_geom.runs.segments import Segments

PATIENCE = 60.0
"""Seconds after which an attack counts as an endless wait."""
OTHERS, DISK = "Paths and two processes", "A full disk and signals"
ATTACKS: list[tuple[str, str, Callable[[Path], str]]] = []
"""Part of the table, title, and function of a folder that is not there yet."""


def attack(part: str, title: str) -> Callable:
    """Add an attack."""

    def note(do: Callable[[Path], str]) -> Callable[[Path], str]:
        ATTACKS.append((part, title, do))
        return do

    return note


def go(folder, draws=40, *, key=0):
    """Start or continue a chain in a folder: 10 draws per segment, one segment of warm-up."""
    kernel = SGRLD(potential_fn=lambda z: (z["x"] ** 2).sum() / 2, step_size=0.1, num_steps=1)
    mcmc = MCMC(kernel, num_warmup=10, num_samples=draws, progress_bar=False)
    how = {"directory": folder, "draws_per_segment": 10, "init_params": {"x": jnp.zeros(3)}}
    return run_in_segments(mcmc, random.key(key), **how)


def same(result: Any, draws: int = 40) -> str:
    """The outcome of a run that must equal an undisturbed run."""
    assert result.finished, "not finished"
    found, expected = (r.mcmc.get_samples()["x"] for r in (result, go(None, draws)))
    assert np.array_equal(found, expected), "other draws"
    return "the same draws"


def refused(do: Callable[[], Any], named: Path | str) -> str:
    """The error of a call, which names a file."""
    try:
        do()
    except (ValueError, OSError) as error:
        text = " ".join(str(error).split())
        assert str(named) in text, f"no file is named: {text}"
        return f"{type(error).__name__}: {text[:150]}"
    raise AssertionError("no error")


def before_segment(number: int, do: Callable[[], Any]) -> None:
    """Do something before the segment with this number, counted from 0; once in a process."""
    original, calls = Segments.do, iter(range(10**9))

    def segment(self, *arguments):
        if next(calls) == number:
            do()
        return original(self, *arguments)

    Segments.do = segment


@attack(OTHERS, "the directory is moved away during the run")
def _(folder):
    moved = folder.with_name("moved")
    before_segment(2, lambda: folder.rename(moved))
    text = refused(lambda: go(folder), folder)
    assert not folder.exists(), "another directory was begun"
    return f"{text}; then {same(go(moved))}"


for lengths in ((2000, 2000), (995, 2000)):

    @attack(OTHERS, f"two processes at once, of {lengths} draws")
    def _(folder, lengths=lengths):
        children = [in_child(lambda n=n: not go(folder, n).finished) for n in lengths]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0], "one failed"
        return same(go(folder, 2000), 2000)


@attack(OTHERS, "two processes begin runs with other keys at once")
def _(folder):
    children = [in_child(lambda key=key: go(folder, 500, key=key)) for key in (0, 1)]
    have_ended(children)
    try:
        return same(go(folder, 500), 500)
    except ValueError:
        return refused(lambda: go(folder, 500).mcmc, folder)


@attack(DISK, "a file system of 64 KB fills, and is made larger")
def _(folder):
    folder.mkdir()
    code = (
        "import attacks_store as a, os, sys\n"
        "folder = a.Path(sys.argv[1])\n"
        "text = a.refused(lambda: a.go(folder, 500), folder)\n"
        "assert not list(folder.glob('*.new'))\n"
        "assert not os.system(f'mount -o remount,size=64m {folder}')\n"
        "print(text + '; then ' + a.same(a.go(folder, 500), 500))\n"
    )
    mount = f'mount -t tmpfs -o size=64k none {folder} && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "-"]
    found = subprocess.run(
        [*inside, sys.executable, "-c", code, str(folder)],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not found.returncode, found.stderr.strip()[-300:]
    return found.stdout.strip().splitlines()[-1]


@attack(DISK, "SIGINT twice")
def _(folder):
    before_segment(2, lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)])
    try:
        go(folder)
    except KeyboardInterrupt:
        return f"KeyboardInterrupt; then {same(go(folder))}"
    raise AssertionError("no interrupt")


def outcome_of(do: Callable[[Path], str], folder: Path) -> str:
    """The outcome of an attack, made in a separate process."""
    folder.mkdir()
    out = folder / "outcome"

    def task() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        warnings.simplefilter("ignore")
        try:
            text = do(folder / "here")
        except BaseException as error:
            text = f"WRONG: {type(error).__name__}: {error}"
        out.write_text(text)

    ended = have_ended([in_child(task)], PATIENCE)
    return out.read_text() if ended and out.exists() else "WRONG: no end, or a crash"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="file to write the table to")
    parser.add_argument("--only", default="", help="attacks whose title or part holds this text")
    options = parser.parse_args()
    chosen = [each for each in ATTACKS if options.only in each[0] + each[1]]
    right = {part: [0, 0] for part, _, _ in chosen}
    with tempfile.TemporaryDirectory() as folder:
        # compiled programs are kept on disk; otherwise compilation would take most of the time
        jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        for number, (part, title, do) in enumerate(chosen):
            begun = time.monotonic()
            outcome = outcome_of(do, Path(folder) / f"{number}")
            right[part][0] += 1
            right[part][1] += not outcome.startswith("WRONG")
            print(f"{time.monotonic() - begun:5.1f} s  {title}: {outcome}", flush=True)
    if options.table:
        lines = [f"| {part} | {n} | {good} |\n" for part, (n, good) in right.items()]
        head = "| attacks on | number | right outcome |\n|---|---|---|\n"
        options.table.write_text(head + "".join(lines))
    if any(n > good for n, good in right.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
