"""What a simulation found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pdd_runtime.planner.simulate.histogram import Histogram
from pdd_runtime.planner.simulate.outcome import METRICS, Pairs


@dataclass(frozen=True)
class Metric:
    """One figure of all requests that have it, in seconds. Right to half a percent; None: no request has it."""

    histogram: Histogram

    @property
    def count(self) -> int:
        """Requests that have it."""
        return self.histogram.count

    @property
    def mean(self) -> float | None:
        return self.histogram.mean

    @property
    def p50(self) -> float | None:
        return self.histogram.quantile(0.5)

    @property
    def p90(self) -> float | None:
        return self.histogram.quantile(0.9)

    @property
    def p99(self) -> float | None:
        return self.histogram.quantile(0.99)

    def quantile(self, q: float) -> float | None:
        """The least value that at least the share `q` of all does not exceed."""
        return self.histogram.quantile(q)

    def share_within(self, most: float) -> float:
        """How many of 1 had at most that."""
        return self.histogram.share_within(most)

    def to_json(self) -> dict[str, float | None]:
        return {"mean": self.mean, "p50": self.p50, "p90": self.p90, "p99": self.p99}


@dataclass(frozen=True)
class LinkUse:
    """One direction of a link."""

    link: str
    source: str
    """The cluster it leads from."""
    bytes: float
    busy: float
    """The share of the line that was used while requests were sent that are measured, 0 to 1."""
    queue: float
    """Bytes that waited for it, on average over requests as they came."""


@dataclass(frozen=True)
class PoolUse:
    """The workers of a pool, while requests were sent that are measured."""

    pool: str
    utilisation: float
    """The share of the time in which they computed, 0 to 1."""
    requests: float
    """On each of them, on average over requests as they came."""


@dataclass(frozen=True)
class Simulated:
    """One run. Of the requests that were sent behind the warm-up."""

    requests: int
    answered: int
    rejected: int
    """Refused: by admission, or since they are too long."""
    too_long: int
    """Of those rejected, the ones that are longer than the context."""
    failed: int
    """Given up after failures."""
    ttft: Metric
    tt10: Metric
    tpot: Metric
    longest_gap: Metric
    handoff_gap: Metric
    e2e: Metric
    tokens: dict[str, int]
    """Output tokens by the tier that made them: prefill, relay, main."""
    routes: dict[str, int]
    """Requests by the route they took."""
    hit_rates: dict[str, float]
    """Share of prompt tokens that were there already, at prefill and at main."""
    links: tuple[LinkUse, ...]
    pools: tuple[PoolUse, ...]
    duration: float
    """Simulated seconds from the first one's sending to the last one's end."""
    offered_rate: float
    """Requests a second that were sent."""
    achieved_rate: float
    """Requests a second that were answered, whichever they were, while measured ones were sent: long answers that are
    still being made when the last one is sent do not count against it. Where none was: answered over `duration`."""
    pairs: Pairs = field(repr=False)

    @property
    def relay_share(self) -> float:
        """Of the tokens that relay and main made."""
        relay, main = self.tokens["relay"], self.tokens["main"]
        return relay / max(1, relay + main)

    @property
    def link_bytes(self) -> dict[str, float]:
        """KV that crossed each link, both directions together."""
        total: dict[str, float] = {}
        for use in self.links:
            total[use.link] = total.get(use.link, 0.0) + use.bytes
        return total

    @property
    def utilisation(self) -> dict[str, float]:
        """By pool."""
        return {use.pool: use.utilisation for use in self.pools}

    def within(self, ttft: float = float("inf"), tpot: float = float("inf")) -> float:
        """Share of all measured requests, of 1, whose TTFT and TPOT were both at most so long; right to about 2 % of
        either bound."""
        return self.pairs.within(ttft, tpot) / max(1, self.requests)

    def goodput(self, ttft: float = float("inf"), tpot: float = float("inf")) -> float:
        """Requests a second that were answered within both bounds."""
        return self.achieved_rate * self.pairs.within(ttft, tpot) / max(1, self.answered)

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "answered": self.answered,
            "rejected": self.rejected,
            "too_long": self.too_long,
            "failed": self.failed,
            **{metric: getattr(self, metric).to_json() for metric in METRICS},
            "tokens": self.tokens,
            "relay_share": self.relay_share,
            "routes": self.routes,
            "hit_rates": self.hit_rates,
            "link_bytes": self.link_bytes,
            "links": [asdict(use) for use in self.links],
            "pools": [asdict(use) for use in self.pools],
            "duration": self.duration,
            "offered_rate": self.offered_rate,
            "achieved_rate": self.achieved_rate,
        }
