"""How many requests end on relays, which main never hears of."""

from __future__ import annotations

import math
from collections import Counter

from pdd_runtime.pipeline.hit_rates import HitRates
from pdd_runtime.plugins.routing import Finishing, Route

MEMORY = 100.0
"""Requests after which one that ended on the relay counts for a third."""


class FinishingGuard:
    """Counts what ends on relays, for the policy that decides whether one more may."""

    def __init__(self, rates: HitRates, frontends: int) -> None:
        """Each frontend counts its own: of a relay's places it has its part."""
        self._rates, self._frontends = rates, frontends
        self._sessions: Counter[str] = Counter()
        self._share = 0.0
        self._view: Finishing | None = Finishing()

    @property
    def view(self) -> Finishing:
        if self._view is None:
            sessions = {relay: count * self._frontends for relay, count in self._sessions.items()}
            self._view = Finishing(share=self._share, sessions=sessions, hit_rate_gaps=self._rates.gaps())
        return self._view

    def begun(self, route: Route) -> None:
        """A request took this route."""
        finishes = route.kind == "P-RLD"
        kept = math.exp(-1.0 / MEMORY)
        self._share = self._share * kept + (1.0 - kept) * finishes
        if finishes:
            self._sessions[str(route.relay)] += 1
        self._view = None

    def ended(self, route: Route) -> None:
        """Its session is over."""
        if route.kind == "P-RLD":
            self._sessions[str(route.relay)] -= 1
            self._view = None
