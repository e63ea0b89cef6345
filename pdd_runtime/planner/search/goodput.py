"""The highest rate at which a deployment keeps its promise, by bisection."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pdd_runtime.planner.search.point import Candidate
from pdd_runtime.planner.search.trial import Change
from pdd_runtime.planner.search.trials import Steps, Trials

EXACT = 0.015
"""It is found to within this part."""
STEEP = 2.0
"""How much faster than the rate its P90s rise near the SLO, on a logarithmic scale; for first steps only."""
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
    low, high = 0.0, math.inf
    rate, seen = guess, list[tuple[float, float]]()
    while high == math.inf or high - low > EXACT * high:
        verdict = yield trials.trial(candidate, rate, changes, longer=longer, seed=seed)
        low, high = (rate, high) if verdict.kept else (low, rate)
        if high < LEAST * guess:
            return 0.0
        seen.append((rate, math.log(max(1e-9, verdict.margin))))
        rate = _next(low, high, seen)
    return low


def _next(low: float, high: float, seen: Sequence[tuple[float, float]]) -> float:
    """Where the promise may just be kept: between the two nearest, by how far from it each was, on a side of that from
    which one more trial closes the bracket."""
    rate, far = seen[-1]
    if low and high < math.inf:
        far_from = dict(seen)
        below, above = far_from[low], far_from[high]
        width = high - low
        if not below < 0 < above:
            return low + width / 2
        aim = low + width * -below / (above - below)
        aim *= 1 + EXACT * (0.45 if rate == low else -0.45)
        return min(max(aim, low + 0.1 * width), high - 0.1 * width)
    step = 1 + 2 * EXACT * 2.0 ** len(seen)
    by = min(step, math.exp(abs(far) / STEEP)) if far else step
    by = max(by, 1 + EXACT)
    return rate * by if low else rate / by


def goodputs(
    trials: Trials, what: str, candidates: Iterable[tuple[Candidate, float]], longer: int = 1
) -> dict[Candidate, float]:
    """Of each candidate, with a guess of it."""
    steps = {candidate: goodput(trials, candidate, guess=guess, longer=longer) for candidate, guess in candidates}
    return trials.together(what, steps)
