"""What a workload is like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdd_runtime.planner.workload import Workload, first

_LIMITS = (100, 500, 1000)


@dataclass(frozen=True)
class Spread:
    """How something is spread over requests, or over sessions."""

    mean: float
    p10: float
    p50: float
    p90: float
    p99: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None of none."""
        if not len(values):
            return None
        array = np.asarray(values, float)
        p10, p50, p90, p99 = np.percentile(array, (10, 50, 90, 99)).tolist()
        return Spread(float(array.mean()), p10, p50, p90, p99, float(array.min()), float(array.max()))


@dataclass(frozen=True)
class Hits:
    """How much of prompts earlier requests had, were everything kept. Shares, 0 to 1."""

    of_tokens: float
    """Of all prompts' tokens together."""
    above_95: float
    """Requests of whose prompt more is known."""
    below_90: float
    share: Spread
    """Of each prompt."""


@dataclass(frozen=True)
class Described:
    """Lengths are tokens, times seconds."""

    requests: int
    sessions: int
    prompt: Spread
    uncached: Spread
    """Of prompts: what no earlier request had."""
    output: Spread
    outputs_below: dict[int, float]
    """Answers that are shorter than so many tokens, as shares."""
    hit: Hits
    turns: Spread
    think: Spread | None
    """Between turns of a session; None where sessions have one."""
    rate: float | None
    """Requests a second until the last session begins; None in a closed loop."""
    gap: Spread | None
    """Between the starts of sessions."""
    gap_variation: float | None
    """The gaps' standard deviation over their mean: 1 is a Poisson process, more is bursty."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(workload: Workload, requests: int, seed: int) -> Described:
    """Of the first `requests` of the workload, or as many as a trace has. Raises `WorkloadError`."""
    turns: list[tuple[int, int, int]] = []
    starts, counts, thinks = [], [], []
    for session in first(workload.stream(seed), requests):
        starts.append(session.start)
        counts.append(len(session.turns))
        for turn in session.turns:
            turns.append((turn.prompt, turn.reused, turn.output))
        thinks += [turn.think for turn in session.turns[1:]]
    prompts, reused, outputs = np.array(turns, float).T
    shares = reused / prompts
    gaps = np.diff([start for start in starts if start is not None])
    return Described(
        requests=len(turns),
        sessions=len(counts),
        prompt=_spread(prompts),
        uncached=_spread(prompts - reused),
        output=_spread(outputs),
        outputs_below={limit: float((outputs < limit).mean()) for limit in _LIMITS},
        hit=Hits(
            of_tokens=float(reused.sum() / prompts.sum()),
            above_95=float((shares > 0.95).mean()),
            below_90=float((shares < 0.9).mean()),
            share=_spread(shares),
        ),
        turns=_spread(np.array(counts, float)),
        think=Spread.of(thinks),
        rate=float(sum(counts[:-1]) / gaps.sum()) if gaps.size and gaps.sum() > 0 else None,
        gap=Spread.of(gaps.tolist()),
        gap_variation=float(gaps.std() / gaps.mean()) if gaps.size > 1 and gaps.mean() > 0 else None,
    )


def _spread(values: NDArray[np.float64]) -> Spread:
    found = Spread.of(values.tolist())
    assert found is not None
    return found
