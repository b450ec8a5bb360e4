"""How large the repository is.

    python .ci/size.py

A change that makes the package larger than `LIMITS` takes something away first.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTANT = re.compile(r"^((?:_?[A-Z][A-Z0-9_]+, )*_?[A-Z][A-Z0-9_]+)(?:: [^=]+)? = .*[0-9]", re.M)
"""A module's constants with a number in them."""
LIMITS = {"lines": 23_178, "files": 94, "constants": 160}
"""The most that `numpyro_geom/` may have; `tests/test_package.py` holds it."""


def lines(folder: str) -> int:
    """Lines of the Python files in a folder."""
    return sum(len(x.read_text().splitlines()) for x in (ROOT / folder).rglob("*.py"))


def package() -> dict[str, int]:
    """Lines, files and constants with numbers of the package."""
    files = [*(ROOT / "numpyro_geom").rglob("*.py")]
    found = [names for x in files for names in CONSTANT.findall(x.read_text())]
    constants = sum(len(names.split(", ")) for names in found)
    return {"lines": lines("numpyro_geom"), "files": len(files), "constants": constants}


def most_parameters() -> tuple[int, str]:
    """The most parameters of a public constructor, and its name. States and records are none."""
    import numpyro_geom

    public = [getattr(numpyro_geom, x) for x in numpyro_geom.__all__]
    classes = [x for x in public if inspect.isclass(x) and not issubclass(x, tuple)]
    return max((len(inspect.signature(x).parameters), x.__name__) for x in classes)


if __name__ == "__main__":
    for what, size in package().items():
        print(f"{size:6,d}  {what} of the package, at most {LIMITS[what]:,}")
    print("{:6,d}  parameters of {}, the most of a constructor".format(*most_parameters()))
    print(f"{lines('tests'):6,d}  lines of tests")
    print(f"{lines('examples/benchmarks'):6,d}  lines of benchmarks")
