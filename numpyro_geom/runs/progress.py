"""One progress bar over a whole run."""

from __future__ import annotations

from typing import Any

import numpy as np
from tqdm.auto import tqdm

from .job import Lengths

PyTree = Any


class Progress:
    """Calls of ``kernel.sample`` done, their rate, time left, divergences and step size.

    Args:
        lengths: of the run.
        number: segments that an earlier run has done.
        shown: whether to show the bar.
    """

    def __init__(self, lengths: Lengths, number: int, shown: bool) -> None:
        done, total = lengths.steps(number), lengths.steps(lengths.segments)
        self._lengths = lengths
        self._bar = tqdm(total=total, initial=done, disable=not shown, unit="step")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, number: int, divergences: int, state: PyTree) -> None:
        """The segment with this number is done."""
        lengths = self._lengths
        facts = {"divergences": str(divergences)}
        step_size = getattr(getattr(state, "adapt_state", state), "step_size", None)
        if step_size is not None:  # a mean over the chains
            facts["step size"] = f"{float(np.mean(np.asarray(step_size))):.2e}"
        phase = "warmup" if number < lengths.warmup_segments else "sample"
        self._bar.set_description(phase, refresh=False)
        self._bar.set_postfix(facts, refresh=False)
        self._bar.update(lengths.steps(number + 1) - lengths.steps(number))
        self._bar.refresh()
