"""The examples run at a small size, and write the promised files."""

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
    pytest.importorskip("matplotlib", reason="the examples extra is not installed")
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "examples" / "quickstart.py"),
            *("--rows", "300", "2000", "--out", tmp_path),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = re.findall(r"^ +([\d,]+)  (\w+) ", done.stdout, re.M)
    assert lines == [(n, name) for n in ("300", "2,000") for name in ("NUTS", "SGHMC")]
    assert "faster" in done.stdout
    assert (tmp_path / "sghmc.nc").stat().st_size > 0
    assert (tmp_path / "time_to_accuracy.png").stat().st_size > 0
