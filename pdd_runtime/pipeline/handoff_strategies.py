"""The built-in handoff strategies.

All counts of a `HandoffView` are output tokens, and the first of them is the prefill's: so "n relay tokens" means
n + 1 output tokens.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from pdd_runtime.plugins import hookimpl
from pdd_runtime.plugins.handoff import HandoffConfig, HandoffStrategy, HandoffView, Step

WAIT = Step("wait")


def seal_next(view: HandoffView) -> Step:
    """Seal behind the token that the relay is making now, where it is making one.

    It is already paid for, and the user gets it in the meantime: so the gap begins with its delivery, just when main
    is told to begin, and no part of a decode step is added to it.
    """
    making = view.relay_tokens > 0 and not view.relay_stopped
    return Step("seal", view.known + 1 if making else view.known)


def seal_at_once(view: HandoffView, config: HandoffConfig) -> Step:
    """Seal as soon as main has the prompt's KV, and the relay has made its minimum."""
    if not view.main_ready or view.known == 0:
        return WAIT
    step = seal_next(view)
    if view.relay_stopped:
        return step
    return Step("seal", max(step.tokens, 1 + config.min_relay_tokens))


class OneShot(HandoffStrategy):
    """Seals as soon as main has the prompt's KV; main then extends over everything at once.

    Frees the relay soonest. The user sees a gap of one extend over all that the relay made.
    """

    name = "one-shot"

    def step(self, view: HandoffView) -> Step:
        return seal_at_once(view, self.config)


class KvTransfer(OneShot):
    """Seals like `one-shot`, then moves the relay's KV to main instead of token IDs: the baseline to compare with.

    Needs an edge that carries kv from the relay's pool to main's.
    """

    name = "kv-transfer"
    carries = "kv"


class Stay(HandoffStrategy):
    """The relay serves the request to its end, or to its bound where one is set; main only takes over there."""

    name = "none"

    def step(self, view: HandoffView) -> Step:
        if view.relay_stopped:
            return Step("seal", view.known) if view.main_ready else WAIT
        return Step("stay")


class CatchUpConfig(HandoffConfig):
    threshold: int = Field(default=64, ge=1)
    """With more tokens than this outstanding the relay runs on, even after a round that did not shrink them."""
    seal_at: int = Field(default=4, ge=0)
    """Outstanding tokens at which the relay is stopped: so few cost main no more than a decode step."""
    patience: int = Field(default=3, ge=1)
    """After so many rounds a main that does not catch up takes over even with more than `threshold` outstanding."""


class CatchUp(HandoffStrategy):
    """Main extends in rounds while the relay goes on, and takes over when little is outstanding.

    Each round covers all that the relay has made so far. An extend makes many tokens in the time of few decode
    steps, so the rounds get shorter: what is outstanding after one is what the relay made during it. Main takes over
    when at most `seal_at` tokens are outstanding, or when a round did not shrink what is outstanding: further ones
    would not either (the RTT alone is that long), and the relay would never be let go. Above `threshold` that would
    be a visible stop, so there such a round (main was busy) is forgiven, `patience` times.

    The gap that the user sees: from the relay's last token, main's request takes half an RTT, its one pass over the few
    outstanding tokens about a decode step, its first token half an RTT back, and at worst a step under way on main has
    to end first. So RTT + 2 decode steps.
    """

    name = "catch-up"
    Config: ClassVar[type[HandoffConfig]] = CatchUpConfig

    def step(self, view: HandoffView) -> Step:
        assert isinstance(self.config, CatchUpConfig)
        if not view.main_ready or view.known == 0:
            return WAIT
        if view.relay_stopped:
            # Nothing is gained by rounds: the user is waiting for main already.
            return seal_next(view)
        if view.extending:
            return WAIT
        outstanding, many = view.outstanding, view.outstanding > self.config.threshold
        if view.relay_tokens < self.config.min_relay_tokens:
            return Step("extend", view.known) if many else WAIT
        shrank = view.last_outstanding is None or outstanding < view.last_outstanding
        if outstanding > self.config.seal_at and (shrank or (many and view.rounds < self.config.patience)):
            return Step("extend", view.known)
        return seal_next(view)


class AdaptiveConfig(CatchUpConfig):
    busy: float = Field(default=0.75, gt=0)
    """The relay's load (running and waiting requests over its batch limit) from which it is let go at once."""
    busy_tokens: int = Field(default=256, ge=1)
    """What the relay makes at most for a request that it begins under that load; the more load, the less."""


class Adaptive(CatchUp):
    """`catch-up` while the relay has room, and `one-shot` while it is busy (the PDD report's rule).

    Its bound follows the load as well: `busy_tokens * busy / load` from `busy` on, so that what all its requests may
    still make stays the same however many they are. Below, it is `max_relay_tokens` alone.
    """

    name = "adaptive"
    Config: ClassVar[type[HandoffConfig]] = AdaptiveConfig

    def step(self, view: HandoffView) -> Step:
        assert isinstance(self.config, AdaptiveConfig)
        if view.relay_load >= self.config.busy and not view.extending:
            return seal_at_once(view, self.config)
        return super().step(view)

    def relay_bound(self, relay_load: float) -> int | None:
        assert isinstance(self.config, AdaptiveConfig)
        most = self.config.max_relay_tokens
        if relay_load < self.config.busy:
            return most
        bound = max(1, self.config.min_relay_tokens, int(self.config.busy_tokens * self.config.busy / relay_load))
        return bound if most is None else min(bound, most)


@hookimpl
def pdd_register_handoff_strategies() -> list[type[HandoffStrategy]]:
    return [OneShot, CatchUp, Adaptive, Stay, KvTransfer]
