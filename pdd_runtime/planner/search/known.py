"""What trials have shown, and what follows for others: more workers serve no less, a higher rate is no easier."""

from __future__ import annotations

from collections import defaultdict

from pdd_runtime.planner.search.family import Sizes
from pdd_runtime.planner.search.trial import Trial, Verdict


class Known:
    """Of trials of one length and seed, without changes."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[Sizes, float]]] = defaultdict(list)
        self._missed: dict[int, list[tuple[Sizes, float]]] = defaultdict(list)

    def learn(self, trial: Trial, verdict: Verdict) -> None:
        (self._kept if verdict.kept else self._missed)[trial.family].append((trial.sizes, trial.rate))

    def keeps(self, family: int, sizes: Sizes, rate: float) -> bool | None:
        """None: nothing follows."""
        if any(rate <= shown and _within(fewer, sizes) for fewer, shown in self._kept[family]):
            return True
        if any(rate >= shown and _within(sizes, more) for more, shown in self._missed[family]):
            return False
        return None


def _within(fewer: Sizes, more: Sizes) -> bool:
    return all(a <= b for a, b in zip(fewer, more, strict=True))
