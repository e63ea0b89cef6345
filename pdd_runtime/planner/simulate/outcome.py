"""What one simulated request was like, and how all of them are counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from pdd_runtime.planner.simulate.histogram import bins

METRICS = ("ttft", "tt10", "tpot", "longest_gap", "handoff_gap", "e2e")
"""As `pdd_runtime.experiments` measures them, in seconds."""
_COARSE = 4
"""Bins of a histogram in one of the pairs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. Times are seconds; None: it has no such thing."""

    session: int
    turn: int
    due: float
    """When it was sent, from the beginning."""
    prompt: int
    """Tokens."""
    output: int
    route: str
    """Empty: it was refused."""
    prefill_cached: int
    """Of its prompt's tokens, those that were there."""
    main_cached: int
    relay_tokens: int
    ttft: float | None
    tt2: float | None
    """To the second token, the first of a worker that decodes."""
    tt10: float | None
    tpot: float | None
    longest_gap: float | None
    handoff_gap: float | None
    e2e: float | None


class Pairs:
    """TTFT and TPOT of each request together, in coarse bins: for how many kept both of two promises."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()

    def add(self, ttft: list[float], tpot: list[float]) -> None:
        """Of the same requests; one without a TPOT has 0."""
        codes = (bins(np.array(ttft)) // _COARSE) * 100_000 + bins(np.array(tpot)) // _COARSE
        for code, count in zip(*np.unique(codes, return_counts=True), strict=True):
            self._counts[divmod(int(code), 100_000)] += int(count)

    def within(self, ttft: float, tpot: float) -> int:
        """How many had at most that of both."""
        first, second = (int(bins(np.array([most]))[0]) // _COARSE for most in (ttft, tpot))
        return sum(count for (a, b), count in self._counts.items() if a <= first and b <= second)
