"""Settings of the built-in routing policies."""

from __future__ import annotations

from pydantic import BaseModel, Field

from pdd_runtime.graph.units import Duration


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
