"""The highest rate at which a deployment keeps its promise, by bisection."""

from __future__ import annotations

from collections.abc import Iterable

from pdd_runtime.planner.search.point import Candidate
from pdd_runtime.planner.search.trial import Change
from pdd_runtime.planner.search.trials import Steps, Trials

EXACT = 0.015
"""It is found to within this part."""
LEAST = 1e-3
"""Below this part of what the bounds allow it is taken for none."""


def goodput(
    trials: Trials,
    candidate: Candidate,
    changes: tuple[Change, ...] = (),
    *,
    guess: float,
    longer: int = 1,
    seed: int | None = None,
) -> Steps[float]:
    """Requests/s; 0: it keeps its promise at no rate. `guess`: where to begin."""
    low, high = 0.0, float("inf")
    rate, factor = guess, 1.0 + 2 * EXACT
    while high - low > EXACT * high or high == float("inf"):
        verdict = yield trials.trial(candidate, rate, changes, longer=longer, seed=seed)
        low, high = (rate, high) if verdict.kept else (low, rate)
        if high < LEAST * guess:
            return 0.0
        if low and high < float("inf"):
            rate = (low + high) / 2
        else:
            rate = rate / factor if not low else rate * factor
            factor = min(2.0, factor**2)
    return low


def goodputs(
    trials: Trials, what: str, candidates: Iterable[tuple[Candidate, float]], longer: int = 1
) -> dict[Candidate, float]:
    """Of each candidate, with a guess of it."""
    steps = {candidate: goodput(trials, candidate, guess=guess, longer=longer) for candidate, guess in candidates}
    return trials.together(what, steps)
