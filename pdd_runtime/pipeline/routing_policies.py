"""The built-in routing policies."""

from __future__ import annotations

from abc import abstractmethod

from pydantic import BaseModel, Field

from pdd_runtime.pipeline.placement import Placement, place
from pdd_runtime.plugins import hookimpl
from pdd_runtime.plugins.routing import ClusterView, RequestFacts, Route, RoutingPolicy


class NoConfig(BaseModel, extra="forbid"):
    """Nothing to set."""


class HitThresholdConfig(BaseModel, extra="forbid"):
    threshold: float = Field(default=0.9, ge=0.0, le=1.0)
    """A prompt with at least this share of its tokens cached on main needs no relay: little crosses the link."""


class PlacingPolicy(RoutingPolicy):
    """Takes the cheapest workers; subclasses only say whether the relay is worth it."""

    def plan(self, facts: RequestFacts, view: ClusterView) -> Route:
        placement = place(facts, view)
        if placement.prefill is None:
            return Route(kind="A", main=placement.main.key, reason="an aggregated pool serves it alone")
        workers = {"main": placement.main.key, "prefill": placement.prefill.key}
        if facts.max_tokens == 1:
            return Route(kind="P-MD", reason="the one token asked for comes from prefill", **workers)
        relayed, reason = self.relays(facts, placement)
        if not relayed:
            return Route(kind="P-MD", reason=reason, **workers)
        if placement.relay is None:
            return Route(kind="P-MD", reason=f"no relay is there, though {reason}", **workers)
        return Route(kind="P-RLD-MD", relay=placement.relay.key, reason=reason, **workers)

    @abstractmethod
    def relays(self, facts: RequestFacts, placement: Placement) -> tuple[bool, str]:
        """Is a relay wanted, and why (not)?"""


class HitThreshold(PlacingPolicy):
    """P-MD where enough of the prompt is cached on main, else P-RLD-MD (the PDD report's rule)."""

    name = "hit-threshold"
    Config = HitThresholdConfig

    def relays(self, facts: RequestFacts, placement: Placement) -> tuple[bool, str]:
        assert isinstance(self.config, HitThresholdConfig)
        if placement.link is None:
            return False, "prefill and main are in one cluster: no wait for a relay to hide"
        hit = min(placement.main.cached_tokens, facts.prompt_tokens) / max(1, facts.prompt_tokens)
        share = f"{placement.main.cached_tokens} of {facts.prompt_tokens} prompt tokens ({hit:.0%}) are cached on main"
        if hit >= self.config.threshold:
            return False, f"{share}, at least the threshold of {self.config.threshold:.0%}"
        return True, f"{share}, below the threshold of {self.config.threshold:.0%}"


class AlwaysRelay(PlacingPolicy):
    """P-RLD-MD wherever a relay joins prefill and main."""

    name = "always-relay"
    Config = NoConfig

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
    return [HitThreshold, AlwaysRelay, NeverRelay]
