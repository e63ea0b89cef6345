"""The handoff contract: when decoding passes from relay to main, decided by a pure function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import msgspec
from pydantic import BaseModel, Field, model_validator


class HandoffConfig(BaseModel, extra="forbid"):
    """What every strategy understands."""

    min_relay_tokens: int = Field(0, ge=0)
    """Do not seal before the relay has made this many tokens."""
    max_relay_tokens: int | None = Field(None, ge=1)
    """The relay's output bound for one request; it then waits for main. None: the request's own bound. A strategy may
    set a lower one by the relay's load."""

    @model_validator(mode="after")
    def _ordered(self) -> HandoffConfig:
        if self.max_relay_tokens is not None and self.min_relay_tokens > self.max_relay_tokens:
            raise ValueError("min_relay_tokens is above max_relay_tokens: the request could never be handed off")
        return self


class HandoffView(msgspec.Struct, frozen=True, kw_only=True):
    """One session between relay and main. All counts are output tokens, the prefill's first one included."""

    known: int
    """Output tokens in the log."""
    relay_tokens: int
    """How many of them the relay made."""
    main_ready: bool
    """Main has the prompt's KV."""
    main_known: int
    """Output tokens whose KV main has."""
    extending: bool
    """An extend is under way on main."""
    rounds: int
    """Extends finished so far."""
    last_outstanding: int | None
    """`known - main_known` when the last finished extend was begun; None: none yet."""
    relay_stopped: bool
    """The relay has reached its bound and makes no more tokens."""
    relay_load: float
    """Running and waiting requests over its batch limit."""

    @property
    def outstanding(self) -> int:
        return self.known - self.main_known


class Step(msgspec.Struct, frozen=True):
    """`wait`: until something changes. `extend`: main computes the KV of the first `tokens` output tokens while
    the relay goes on. `seal`: the relay stops when `tokens` are out and main decodes from there.
    `stay`: the relay serves the request to its end."""

    kind: Literal["wait", "extend", "seal", "stay"]
    tokens: int = 0


class HandoffStrategy(ABC):
    """Pure: no I/O, no clock, no state. The simulator runs the same object."""

    name: ClassVar[str]
    Config: ClassVar[type[HandoffConfig]] = HandoffConfig
    carries: ClassVar[Literal["tokens", "kv"]] = "tokens"
    """What goes from relay to main after the seal: token IDs, recomputed there, or the relay's KV."""

    def __init__(self, config: HandoffConfig) -> None:
        self.config = config

    def relay_bound(self, relay_load: float) -> int | None:
        """How many tokens the relay may make for a request that it begins under this load (as `HandoffView` has it);
        it then waits for main. None: the request's own bound. Between `min_relay_tokens`, at least 1, and
        `max_relay_tokens`."""
        return self.config.max_relay_tokens

    @abstractmethod
    def step(self, view: HandoffView) -> Step:
        """Asked after every change of the view; not while sealed.

        Extends and seals only when main is ready; extends to more than main has and no more than is known; seals at
        no fewer tokens than are known, and behind the first one and `min_relay_tokens` more unless the relay has
        stopped. Where it has stopped and main is ready it must not wait: nothing would change any more."""
