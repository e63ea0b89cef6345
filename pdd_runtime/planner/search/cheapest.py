"""The cheapest deployment that serves a rate: bounds say where it cannot be, trials where it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pdd_runtime.planner.search.family import Sizes, neighbours
from pdd_runtime.planner.search.point import Candidate
from pdd_runtime.planner.search.trial import Verdict
from pdd_runtime.planner.search.trials import Steps, Trials, kept

FILL = 0.85
"""How busy workers are in a deployment that just keeps its promise: where the search begins, nothing more."""
DEARER = 1.1
"""A way up is followed while it costs at most so many times as much as the best so far: a way down may follow."""
MOST = 60
"""Trials at one rate; only where nearly all choices are alike do they not suffice."""

Cost = Callable[[Candidate], float]


class Cheapest:
    """At one rate, over some families, those first that seem cheapest."""

    def __init__(self, trials: Trials, cost: Cost, rate: float, among: Sequence[int]) -> None:
        self._trials, self._cost, self._rate, self._among = trials, cost, rate, among
        self._best: Candidate | None = None
        self._asked = 0

    def find(self) -> Steps[Candidate | None]:
        """None: nothing that may be chosen serves it."""
        for family in self._order():
            yield from self._climb(family)
        return self._best

    @property
    def _limit(self) -> float:
        return math.inf if self._best is None else self._cost(self._best)

    def _order(self) -> list[int]:
        guessed = []
        for family in self._among:
            bounds = self._trials.bounds[family]
            sizes = bounds.least(self._rate, FILL) or bounds.least(self._rate, 1.0)
            if sizes is not None:
                guessed.append((self._cost(Candidate(family, sizes)), family))
        return [family for _, family in sorted(guessed)]

    def _climb(self, family: int) -> Steps[None]:
        """Up until the rate is served, then down."""
        lowest = self._trials.bounds[family].least(self._rate, 1.0)
        if lowest is None or self._cost(Candidate(family, lowest)) >= self._limit:
            return
        here = Candidate(family, self._start(family, lowest))
        step = 1
        while not kept(verdict := (yield from self._holds(here))):
            if step == 2 and not kept((yield from self._holds(self._largest(family)))):
                return
            more = self._more(here, verdict, step)
            if more is None or self._cost(more) >= DEARER * self._limit or self._asked > MOST:
                return
            here, step = more, 2 * step
        here = yield from self._down(here, lowest)
        if self._cost(here) < self._limit:
            self._best = here

    def _largest(self, family: int) -> Candidate:
        choices = self._trials.families[family].choices
        return Candidate(family, tuple(counts[-1] for counts in choices.values()))

    def _holds(self, candidate: Candidate) -> Steps[Verdict | bool]:
        before = self._trials.done
        verdict = yield from self._trials.holds(candidate, self._rate)
        self._asked += self._trials.done > before
        return verdict

    def _start(self, family: int, lowest: Sizes) -> Sizes:
        """Where others have ended, if they have the same pools; else where workers would be rather busy."""
        choices = self._trials.families[family].choices
        best = self._best
        if best is None or self._trials.families[best.family].pools != tuple(choices):
            sizes = self._trials.bounds[family].least(self._rate, FILL)
            return sizes or self._largest(family).sizes
        return tuple(
            next((count for count in counts if count >= max(size, low)), counts[-1])
            for counts, size, low in zip(choices.values(), best.sizes, lowest, strict=True)
        )

    def _more(self, candidate: Candidate, verdict: Verdict | bool, step: int) -> Candidate | None:
        """With `step` workers more in the pool that lacks them most; None: all have as many as they may."""
        family = self._trials.families[candidate.family]
        counts, pools = list(family.choices.values()), family.smallest.spec.pools
        room = [axis for axis, size in enumerate(candidate.sizes) if size < counts[axis][-1]]
        if not room:
            return None

        used = self._trials.bounds[candidate.family].used(candidate.sizes, self._rate)

        def lack(axis: int) -> tuple[float, float]:
            if isinstance(verdict, bool):
                return used[family.pools[axis]], -candidate.sizes[axis]
            late = "tpot" if pools[family.pools[axis]].role == "main" else "ttft"
            return used[family.pools[axis]] + (late in verdict.missed), -candidate.sizes[axis]

        axis = max(room, key=lack)
        least = candidate.sizes[axis] + step
        size = next((count for count in counts[axis] if count >= least), counts[axis][-1])
        return _with(candidate, axis, size)

    def _down(self, candidate: Candidate, lowest: Sizes) -> Steps[Candidate]:
        """To what is cheaper and still serves the rate: pool by pool by halves, then until no neighbour does."""
        choices = self._trials.families[candidate.family].choices
        for axis, counts in enumerate(choices.values()):
            fewer = [count for count in counts if lowest[axis] <= count <= candidate.sizes[axis]]
            while len(fewer) > 1:
                middle = (len(fewer) - 1) // 2
                if kept((yield from self._holds(_with(candidate, axis, fewer[middle])))):
                    fewer = fewer[: middle + 1]
                else:
                    fewer = fewer[middle + 1 :]
            candidate = _with(candidate, axis, fewer[0]) if fewer else candidate
        while True:
            for other in sorted(
                (candidate._replace(sizes=sizes) for sizes in neighbours(candidate.sizes, choices)),
                key=lambda each: (self._cost(each), each.sizes),
            ):
                if self._cost(other) >= self._cost(candidate) or self._asked > MOST:
                    return candidate
                if kept((yield from self._holds(other))):
                    candidate = other
                    break
            else:
                return candidate


def _with(candidate: Candidate, axis: int, size: int) -> Candidate:
    return candidate._replace(sizes=(*candidate.sizes[:axis], size, *candidate.sizes[axis + 1 :]))


def cheapest(trials: Trials, cost: Cost, rates: Sequence[float], among: Sequence[int]) -> dict[float, Candidate | None]:
    """For each rate, among the families of these numbers."""
    steps = {rate: Cheapest(trials, cost, rate, among).find() for rate in rates}
    return trials.together("looks for the cheapest", steps)
