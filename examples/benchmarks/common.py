"""What the benchmarks share: a model, chains, runs in processes of their own, and tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

DOCS = Path(__file__).parents[2] / "docs"
TABLES = DOCS / "tables"


def logistic(X: Any, y: Any, subsample_size: int | None = None, scale: float = 1.0) -> None:
    """Logistic regression; only HMCECS passes a subsample size."""
    w = numpyro.sample("w", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("data", X.shape[0], subsample_size=subsample_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])


def chains(kernel: Any, num_warmup: int, num_samples: int, num_chains: int = 4) -> MCMC:
    """Vectorised chains, not yet run."""
    lengths = {"num_warmup": num_warmup, "num_samples": num_samples, "num_chains": num_chains}
    return MCMC(kernel, **lengths, chain_method="vectorized", progress_bar=False)


def memory(field: str) -> float:
    """A figure of this process in MB, from Linux; `getrusage` would include the parent's."""
    text = Path("/proc/self/status").read_text()
    return float(text.partition(f"{field}:")[2].split()[0]) / 1024


def head(*titles: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def versions() -> str:
    """The line below a table."""
    return f"jax {jax.__version__}, numpyro {numpyro.__version__}."


def in_process(
    script: str,
    *arguments: Any,
    seconds: float | None = None,
    python: str = sys.executable,
    **options: Any,
) -> Any:
    """The JSON that a script prints last, or a dict whose "failed" says why there is none.

    Args:
        script: its file.
        arguments: of its command line.
        seconds: after which it is stopped.
        python: the interpreter.
        options: further ones of `subprocess.run`, such as ``env``.
    """
    command = [python, script, *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": seconds, **options}
    try:
        done = subprocess.run(command, **options)
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {seconds:.0f} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    print(done.stderr[-1000:], file=sys.stderr)
    # below the traceback JAX has a line and a remark on the frames that it leaves out
    told = [x for x in done.stderr.splitlines() if not x.startswith(("-", "For simplicity"))]
    return {"failed": told[-1] if told else f"ended with status {done.returncode}"}


def kept_cells(path: Path) -> dict[tuple[str, str], str]:
    """Cells of a table as it is, by its line and column."""
    text = path.read_text() if path.exists() else ""
    rows = [[x.strip() for x in line[1:-1].split("|")] for line in text.splitlines() if "|" in line]
    return {(row[0], m): x for row in rows for m, x in zip(rows[0][1:], row[1:], strict=True)}
