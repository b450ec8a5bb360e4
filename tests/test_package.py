"""What `import numpyro_geom` loads and shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

import numpyro_geom


def test_dir_has_the_public_names_alone() -> None:
    assert set(numpyro_geom.__all__) < set(dir(numpyro_geom))
    modules = {"diagnostics", "information", "laplace", "metrics", "published", "schedules"}
    dunder = {"__all__", "__doc__", "__version__"}
    assert set(dir(numpyro_geom)) == {*numpyro_geom.__all__, *modules, *dunder}
    for name in dir(numpyro_geom):
        assert getattr(numpyro_geom, name) is not None


def test_what_reports_and_guides_need_is_imported_late() -> None:
    heavy = "{'arviz', 'diffrax', 'matplotlib', 'pandas', 'xarray'}"
    code = f"import sys, numpyro_geom; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'NUTS'"):
        _ = numpyro_geom.NUTS
