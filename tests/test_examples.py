"""The examples run, at a small size, and write what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_quickstart_runs_small(tmp_path):
    pytest.importorskip("sklearn", reason="the examples extra is not installed")
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "examples" / "quickstart.py", "--small"),
            *("--metrics", "rmsprop", "shampoo", "--out", tmp_path),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # the last metric on the first data set and both on the second, each with the control variate
    lines = re.findall(r"^SGRLD (\w+) ", done.stdout, re.M)
    assert lines == ["shampoo", "control", "rmsprop", "shampoo", "control"]
    assert (tmp_path / "generated_sgrld.nc").stat().st_size > 0
    assert (tmp_path / "generated_sgrld.png").stat().st_size > 0
