"""Runs tutorial scripts part by part, and writes their output and figures into the documentation.

    python tests/tutorials.py regression laplace

A part is the code between ``# --8<-- [start:NAME]`` and ``# --8<-- [end:NAME]``, which the page of
the tutorial includes. The printed output of the part goes to
``docs/tables/tutorial_SCRIPT_NAME.md``, and the figures of the script go to
``docs/figures/tutorial_SCRIPT_*.png``. Code between parts, and a part ``cost``, is not on the page:
it takes times. It sees the names of the parts, and no part sees its names, so that a page runs as
it is shown.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pages import changed

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"^# --8<-- \[(start|end):(\w+)\]$")
NOT_SHOWN = {"", "cost"}
GREY = "#808080"
"""Of text and axes: seen on white pages and on dark ones."""
STYLE = {
    **{name: GREY for name in ("text.color", "axes.labelcolor", "axes.edgecolor")},
    **{f"{axis}tick.{kind}": GREY for axis in "xy" for kind in ("color", "labelcolor")},
    **{"axes.titlecolor": GREY, "savefig.transparent": True, "savefig.dpi": 80},
    **{"savefig.bbox": "tight", "axes.facecolor": "none", "figure.max_open_warning": 0},
    **{"legend.framealpha": 0.0},
}


def script(name: str) -> Path:
    """Path of the script of a tutorial."""
    return ROOT / "examples" / f"tutorial_{name}.py"


def parts(text: str) -> Iterator[tuple[str, int, str]]:
    """For each part: its name (empty between parts), the number of lines above it, and its code."""
    name, first, lines = "", 0, text.splitlines(keepends=True)
    for k, line in enumerate([*lines, "# --8<-- [end:]"]):
        if found := MARK.match(line) or (k == len(lines)):
            yield name, first, "".join(lines[first:k])
            if found is not True:
                name, first = (found[2] if found[1] == "start" else ""), k + 1


def run(name: str, out: Path, small: dict[str, str] | None = None) -> dict[str, str]:
    """Printed output of each part; files are written to `out`.

    Args:
        name: of the tutorial.
        out: a folder.
        small: lines of the script, and what runs in place of each.
    """
    import matplotlib as mpl

    path, printed = script(name), {}
    of_page = {"__name__": "__main__"}
    not_shown = {**of_page}
    with contextlib.chdir(out), mpl.rc_context(STYLE):
        for part, above, code in parts(path.read_text()):
            shown = part not in NOT_SHOWN
            not_shown |= of_page
            to = io.StringIO()
            with contextlib.redirect_stdout(to):
                code = "\n" * above + changed(code, small or {})
                code = compile(code, str(path), "exec", dont_inherit=True)
                exec(code, of_page if shown else not_shown)
            if part and to.getvalue():
                printed[part] = "\n".join(line.rstrip() for line in to.getvalue().split("\n"))
    return printed


def main(tutorials: list[str]) -> None:
    """Write tables and figures of these tutorials."""
    for name in tutorials:
        tables, figures = ROOT / "docs" / "tables", ROOT / "docs" / "figures"
        for old in (*tables.glob(f"tutorial_{name}_*"), *figures.glob(f"tutorial_{name}_*")):
            old.unlink()
        with tempfile.TemporaryDirectory() as folder:
            for part, text in run(name, Path(folder)).items():
                print(text, flush=True)
                table = tables / f"tutorial_{name}_{part}.md"
                table.write_text(f"```text\n{text.strip(chr(10))}\n```\n")
            for figure in Path(folder).glob("*.png"):
                (figures / f"tutorial_{name}_{figure.name}").write_bytes(figure.read_bytes())


if __name__ == "__main__":
    main(sys.argv[1:])
