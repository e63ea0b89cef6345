"""Prefill's and main's shares of cached prompt tokens, side by side."""

from __future__ import annotations

import logging
import math

log = logging.getLogger(__name__)

MEMORY = 100.0
"""Requests after which what was seen counts for a third."""
LEAST = 20
"""Requests before which nothing is said."""
CLEARED = 0.8
"""An alarm ends where the gap is below this part of its bound: not at once, lest it comes and goes."""


class HitRates:
    """What is cached decides how much crosses the link. When main's share falls behind prefill's, ever more must, and
    ever more requests need a relay: the gap is the first sign of that. One for each main pool."""

    def __init__(self, bound: float | None) -> None:
        """`bound`: the gap above which there is an alarm; None: never."""
        self._bound = bound
        self._pools: dict[str, _Pool] = {}
        self.alarms: set[str] = set()
        """Main pools whose gap is above the bound."""

    def saw(self, pool: str, prompt_tokens: int, prefill: int, main: int) -> None:
        """A request came, of whose prompt so many tokens were cached on its prefill worker, and on its main worker."""
        seen = self._pools.setdefault(pool, _Pool())
        seen.add(prompt_tokens, min(prefill, prompt_tokens), min(main, prompt_tokens))
        if self._bound is None or seen.requests < LEAST:
            return
        if pool not in self.alarms and seen.gap > self._bound:
            self.alarms.add(pool)
            log.warning(
                "main pool %s falls behind: %.0f %% of prompt tokens are cached there, %.0f %% on prefill; the bound "
                "is a gap of %.0f %%. Its cache is too small or was lost, or too many requests end without it",
                *(pool, 100 * seen.main_rate, 100 * seen.prefill_rate, 100 * self._bound),
            )
        elif pool in self.alarms and seen.gap < CLEARED * self._bound:
            self.alarms.discard(pool)
            log.info("main pool %s has caught up: the gap in cached tokens is %.0f %%", pool, 100 * seen.gap)

    def rates(self) -> dict[str, tuple[float, float]]:
        """(prefill's, main's) of late, by main pool."""
        return {name: (pool.prefill_rate, pool.main_rate) for name, pool in self._pools.items()}

    def gaps(self) -> dict[str, float]:
        """Of those of which enough was seen."""
        return {name: pool.gap for name, pool in self._pools.items() if pool.requests >= LEAST}


class _Pool:
    """Means over tokens, of which older ones count for less."""

    def __init__(self) -> None:
        self.requests = 0
        self._tokens = self._prefill = self._main = 0.0

    def add(self, tokens: int, prefill: int, main: int) -> None:
        kept = math.exp(-1.0 / MEMORY)
        self.requests += 1
        self._tokens = self._tokens * kept + tokens
        self._prefill = self._prefill * kept + prefill
        self._main = self._main * kept + main

    @property
    def prefill_rate(self) -> float:
        return self._prefill / max(1.0, self._tokens)

    @property
    def main_rate(self) -> float:
        return self._main / max(1.0, self._tokens)

    @property
    def gap(self) -> float:
        return self.prefill_rate - self.main_rate
