"""What one request was like, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

METRICS = {
    "ttft": "time to the first token",
    "tt10": "time to the tenth token",
    "tpot": "time per output token after the first",
    "longest_gap": "longest wait between two tokens",
    "handoff_gap": "gap at the handoff",
    "e2e": "end to end",
}
"""What is measured of a request, in seconds. Handoff gaps are the server's own; all else is the client's stopwatch."""


@dataclass
class Outcome:
    """Times are seconds on the client's clock."""

    session: int
    turn: int
    prompt: int
    """Tokens."""
    due: float
    """When it was to be sent: where all times of a request begin, so that a late client counts against the graph."""
    sent: float
    stamps: list[float] = field(default_factory=list)
    """When each output token was there. Tokens that came together have the same time."""
    tokens: list[int] = field(default_factory=list)
    ended: float = 0.0
    error: str | None = None
    refused: bool = False
    """The error was an answer that asks to come back later: nothing was begun."""
    request_id: str = ""
    timeline: dict[str, Any] | None = None
    """None: the server has none."""

    @property
    def key(self) -> tuple[int, int]:
        """The same request of the workload, at whatever graph."""
        return self.session, self.turn

    def metric(self, name: str) -> float | None:
        """One of `METRICS`; None where this request has none, e.g. no tenth token, or an error."""
        if self.error is not None:
            return None
        stamps = self.stamps
        match name:
            case "ttft":
                return stamps[0] - self.due
            case "tt10":
                return stamps[9] - self.due if len(stamps) >= 10 else None
            case "tpot":
                return (stamps[-1] - stamps[0]) / (len(stamps) - 1) if len(stamps) > 1 else None
            case "longest_gap":
                return max((b - a for a, b in pairwise(stamps)), default=None)
            case "handoff_gap":
                handoff = (self.timeline or {}).get("handoff") or {}
                gap = handoff.get("gap")
                return None if gap is None else float(gap)
            case "e2e":
                return self.ended - self.due
        raise ValueError(name)
