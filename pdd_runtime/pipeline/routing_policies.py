"""The built-in routing policies."""

from __future__ import annotations

from abc import abstractmethod

from pydantic import BaseModel, Field

from pdd_runtime.graph.units import Duration
from pdd_runtime.pipeline.placement import Placement, place
from pdd_runtime.plugins import hookimpl
from pdd_runtime.plugins.routing import (
    ClusterView,
    Finishing,
    RequestFacts,
    Route,
    RouteKind,
    RoutingPolicy,
    WorkerKey,
)


class NoConfig(BaseModel, extra="forbid"):
    """Nothing to set."""


class FinishOnRelay(BaseModel, extra="forbid", use_attribute_docstrings=True):
    """Which requests end on the relay, and how many. Main never gets their KV: were they many, main's hit rate would
    fall behind prefill's, and ever more requests would need a relay."""

    max_tokens: int = Field(default=64, ge=1)
    """Answers that may be longer go on to main."""
    cached: float = Field(default=0.1, ge=0.0, le=1.0)
    """Prompts of which prefill has cached more than this share belong to a conversation, and go on to main, unless the
    request says that nothing will build on it."""
    requests: float = Field(default=0.05, ge=0.0, le=1.0)
    """At most this share of requests."""
    slots: float = Field(default=0.25, gt=0.0, le=1.0)
    """At most this share of a relay's batch."""
    hit_rate_gap: float = Field(default=0.05, ge=0.0, le=1.0)
    """None while main's hit rate is more than this below prefill's."""


class RelayingConfig(BaseModel, extra="forbid"):
    finish_on_relay: FinishOnRelay | None = None
    """Let requests that nothing will build on end on the relay, within its `max_tokens` (64 of the answer), `cached`
    (0.1 of the prompt), `requests` (0.05 of all), `slots` (0.25 of a relay's batch) and `hit_rate_gap` (0.05)."""


class HitThresholdConfig(RelayingConfig):
    threshold: float = Field(default=0.9, ge=0.0, le=1.0)
    """A prompt with at least this share of its tokens cached on main needs no relay: little crosses the link."""


class PredictiveConfig(RelayingConfig):
    budget: Duration = 0.3
    """How long a user may wait for the KV's way to main before a relay is worth it, e.g. `300ms`."""


class PlacingPolicy(RoutingPolicy):
    """Takes the cheapest workers; subclasses only say whether the relay is worth it."""

    def plan(self, facts: RequestFacts, view: ClusterView) -> Route:
        placement = place(facts, view)
        also = f"; {placement.why}" if placement.why else ""
        if placement.prefill is None:
            return Route(kind="A", main=placement.main.key, reason=f"an aggregated pool serves it alone{also}")
        kind, relay, reason = self._along(facts, view, placement)
        main, prefill = placement.main.key, placement.prefill.key
        return Route(kind=kind, main=main, prefill=prefill, relay=relay, reason=reason + also)

    @abstractmethod
    def relays(self, facts: RequestFacts, placement: Placement) -> tuple[bool, str]:
        """Is a relay wanted, and why (not)?"""

    def _along(
        self, facts: RequestFacts, view: ClusterView, placement: Placement
    ) -> tuple[RouteKind, WorkerKey | None, str]:
        """Which kind of route, over which relay, and why."""
        if facts.max_tokens == 1:
            return "P-MD", None, "the one token asked for comes from prefill"
        relayed, reason = self.relays(facts, placement)
        if not relayed:
            return "P-MD", None, reason
        relay = placement.relay
        if relay is None:
            return "P-MD", None, f"no relay is there, though {reason}"
        limits = self.config.finish_on_relay if isinstance(self.config, RelayingConfig) else None
        if limits is not None and (why := singular(limits, facts, placement, view.finishing)):
            return "P-RLD", relay.key, f"{why}, and {reason}"
        return "P-RLD-MD", relay.key, reason


def singular(limits: FinishOnRelay, facts: RequestFacts, placement: Placement, finishing: Finishing) -> str:
    """Why the request is to end on the relay; empty: it goes on to main."""
    assert placement.prefill is not None
    assert placement.relay is not None
    relay, most = placement.relay, max(1, int(limits.slots * placement.relay.batch_limit))
    cached = placement.prefill.cached_tokens / max(1, facts.prompt_tokens)
    if (
        facts.max_tokens > limits.max_tokens
        or not (facts.single or cached <= limits.cached)
        or finishing.share >= limits.requests
        or finishing.sessions.get(str(relay.key), 0) >= most
        or finishing.hit_rate_gaps.get(placement.main.key.pool, 0.0) > limits.hit_rate_gap
    ):
        return ""
    why = "nothing will build on it" if facts.single else f"{cached:.0%} of its prompt was seen before"
    return f"at most {facts.max_tokens} tokens end on the relay: {why}"


class HitThreshold(PlacingPolicy):
    """P-MD where enough of the prompt is cached on main, else P-RLD-MD (the PDD report's rule)."""

    name = "hit-threshold"
    Config = HitThresholdConfig

    def __init__(self, config: BaseModel) -> None:
        assert isinstance(config, HitThresholdConfig)
        super().__init__(config)
        self._threshold = config.threshold
        self._enough = f"at least the threshold of {config.threshold:.0%}"
        self._too_few = f"below the threshold of {config.threshold:.0%}"

    def relays(self, facts: RequestFacts, placement: Placement) -> tuple[bool, str]:
        if placement.link is None:
            return False, "prefill and main are in one cluster: no wait for a relay to hide"
        cached, prompt = placement.main.cached_tokens, facts.prompt_tokens
        hit = min(cached, prompt) / max(1, prompt)
        relayed = hit < self._threshold
        why = self._too_few if relayed else self._enough
        return relayed, f"{cached} of {prompt} prompt tokens ({round(100 * hit)}%) are cached on main, {why}"


class Predictive(PlacingPolicy):
    """P-RLD-MD where a relay would hide more than `budget` of the KV's way to main.

    The way takes `rtt + (queue + bytes) / goodput`: what waits on the link already, and what main lacks of this
    prompt. It is reckoned from prefill's end, though part of it passes during prefill, so the relay's share errs
    on the side of a steady stream. A relay that is full makes the request wait as well: for `ahead / batch_limit` of a
    sojourn there, which is as long as the way, since a session leaves the relay when its KV has arrived at main."""

    name = "predictive"
    Config = PredictiveConfig

    def relays(self, facts: RequestFacts, placement: Placement) -> tuple[bool, str]:
        assert isinstance(self.config, PredictiveConfig)
        assert placement.prefill is not None
        if placement.link is None:
            return False, "prefill and main are in one cluster: no wait for a relay to hide"
        way, token_bytes = placement.way, placement.prefill.token_bytes
        if way is None or not token_bytes:
            return True, f"nothing is known of the KV's way over {placement.link}"
        size = token_bytes * max(0, facts.prompt_tokens - placement.main.cached_tokens)
        wait = way.rtt + (way.queue + size) / way.rate if size else 0.0
        seen = "measured" if way.goodput else "declared"
        reason = (
            f"{size / 1e6:.3g} MB behind {way.queue / 1e6:.3g} MB over {way.name} at {way.rate * 8e-6:.3g} Mbit/s "
            f"({seen}) take {wait:.3g} s"
        )
        hidden = wait
        if placement.relay is not None:
            relay = placement.relay
            ahead = max(0, relay.running + relay.waiting + 1 - relay.batch_limit)
            if ahead:
                hidden = wait * max(0.0, 1.0 - ahead / relay.batch_limit)
                reason += f", of which a relay with {ahead} in its queue hides {hidden:.3g} s"
        if hidden <= self.config.budget:
            return False, f"{reason}, within the budget of {self.config.budget:.3g} s"
        return True, f"{reason}, more than the budget of {self.config.budget:.3g} s"


class AlwaysRelay(PlacingPolicy):
    """P-RLD-MD wherever a relay joins prefill and main."""

    name = "always-relay"
    Config = RelayingConfig

    def relays(self, facts: RequestFacts, placement: Placement) -> tuple[bool, str]:
        return True, "the policy is to relay always"


class NeverRelay(PlacingPolicy):
    """P-MD for every request."""

    name = "never-relay"
    Config = NoConfig

    def relays(self, facts: RequestFacts, placement: Placement) -> tuple[bool, str]:
        return False, "the policy is to relay never"


@hookimpl
def pdd_register_routing_policies() -> list[type[RoutingPolicy]]:
    return [HitThreshold, Predictive, AlwaysRelay, NeverRelay]
