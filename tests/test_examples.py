"""The examples run at a small size, and write the promised files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from numpyro.infer.hmc import HMCState
from scripts import EXAMPLES, load_script

from numpyro_geom.sampling.state import Adaptation, SGState

ROOT = Path(__file__).parents[1]


def test_scripts_read_fields_that_a_state_has():
    """Few scripts run in a test."""
    fields = {*SGState._fields, *Adaptation._fields, *HMCState._fields}
    found = {
        (script.name, name)
        for script in EXAMPLES.rglob("*.py")
        for name in re.findall(r"\b(?:last_state|adaptation)\.([a-z]\w*)", script.read_text())
    }
    assert len(found) > 3
    assert not {x for x in found if x[1] not in fields}


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
    assert (tmp_path / "sghmc.nc").stat().st_size > 0
    assert (tmp_path / "rates.png").stat().st_size > 0


@pytest.mark.slow
def test_the_benchmark_of_rivals_runs_small(tmp_path, monkeypatch, capsys):
    for name in ("blackjax", "matplotlib"):
        pytest.importorskip(name, reason="the examples extra is not installed")
    rivals = load_script("benchmarks/rivals")
    monkeypatch.setattr(rivals, "DOCS", tmp_path)
    for folder in ("tables", "figures"):
        (tmp_path / folder).mkdir()
    small = ["--rows", "1000", "--condition", "1", "--seconds", "0.1", "--limit", "100"]
    methods = ["NUTS, dense", "MAMS", "SGHMC"]
    rivals.main(["bernoulli", *small, "--methods", *methods])
    (title, (lines, _)), *rest = rivals.read(tmp_path / "tables" / "rivals_families.md").items()
    assert not rest
    assert title.startswith("**`bernoulli`, 1,000 rows, condition ")
    assert [*lines] == methods
    assert all(re.fullmatch(r"[\d.]+", x.split("|")[3].strip()) for x in lines.values()), lines
    # a method that does not end in time says so
    rivals.main(["bernoulli", *small[:-1], "1", "--methods", "NUTS, dense", "--no-table"])
    assert "not done in 1 s" in capsys.readouterr().out
    # the figure has what has reached the goal on a badly scaled regression
    for rows, seconds in (("1,000", 5.0), ("10,000", 50.0)):
        r = {"seconds": [1, 1, 1, seconds], "draws": 9, "size": 1e3, "gradients": None, "error": 0}
        good = rivals.line("NUTS", {**r, "ratios": [1, 1], "wrong": ""}, 1)
        title = f"**`logistic`, {rows} rows, condition 4.0e+06**"
        rivals.put(rivals.path_of("logistic"), title, "NUTS", good, "2000-01-01")
    bad = rivals.line("GGMC", {**r, "ratios": [1, 1], "wrong": "moments"}, 1)
    rivals.put(rivals.path_of("logistic"), title, "GGMC", bad, "2000-01-01")
    assert rivals.points() == {"NUTS": [(1000, 8.0), (10_000, 53.0)]}
    assert rivals.failures() == ["GGMC"]
    rivals.main(["--figure"])
    assert (tmp_path / "figures" / "time_to_accuracy_dark.png").stat().st_size > 0
