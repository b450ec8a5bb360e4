"""One progress bar over a whole run."""

from __future__ import annotations

from typing import Any

import numpy as np
from tqdm.auto import tqdm

PyTree = Any


class Progress:
    """Calls of ``kernel.sample`` done, their rate, time left, divergences and step size.

    Args:
        done: calls that an earlier run has done.
        total: calls of the whole run.
        shown: whether to show the bar.
    """

    def __init__(self, done: int, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, initial=done, disable=not shown, unit="step")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, steps: int, phase: str, divergences: int, state: PyTree) -> None:
        """A segment is done."""
        facts = {"divergences": str(divergences)}
        step_size = _step_size(state)
        if step_size is not None:
            facts["step size"] = f"{step_size:.2e}"
        self._bar.set_description(phase, refresh=False)
        self._bar.set_postfix(facts, refresh=False)
        self._bar.update(steps)
        self._bar.refresh()


def _step_size(state: PyTree) -> float | None:
    """A mean over the chains; None for kernels that have none."""
    found = getattr(getattr(state, "adapt_state", state), "step_size", None)
    return None if found is None else float(np.mean(np.asarray(found)))
