"""A relay and a main under a handoff strategy, in a world where time goes in ticks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pdd_runtime.plugins.handoff import HandoffStrategy, HandoffView, Step

TICKS = 30_000
"""After so many a session counts as hung."""


@dataclass
class Pair:
    """One session. `run` asks the strategy after every tick, as the driver does after every change."""

    strategy: HandoffStrategy
    relay_rate: float
    """Tokens a tick."""
    extend_rate: float
    """Tokens a tick that main extends, behind `latency` ticks of round trip."""
    latency: int
    ready_at: int
    """The tick at which main has the prompt's KV."""
    max_tokens: int
    relay_load: float = 0.5
    seen: list[tuple[HandoffView, Step]] = field(default_factory=list)
    """What the strategy was asked, and what it said."""

    def run(self) -> tuple[Literal["sealed", "finished"], int]:
        """How it ended, and at how many output tokens: `sealed`, main decodes on; `finished`, the relay made all.
        Raises `AssertionError` for a step that no driver could take, and for a session that hangs."""
        known, main_known, rounds = 1, 0, 0
        last: int | None = None
        extend: tuple[float, int, int] | None = None
        made, sealed, bound = 0.0, None, self._bound
        for tick in range(self.ready_at + TICKS):
            if extend and tick >= extend[0]:
                _, main_known, last = extend
                extend, rounds = None, rounds + 1
            made += self.relay_rate
            known = min(1 + int(made), bound if sealed is None else min(bound, sealed))
            if known >= self.max_tokens:
                return "finished", known
            if sealed is not None:
                if known == sealed and tick >= self.ready_at:
                    return "sealed", known
                continue
            view = HandoffView(
                known=known,
                relay_tokens=known - 1,
                main_ready=tick >= self.ready_at,
                main_known=main_known,
                extending=extend is not None,
                rounds=rounds,
                last_outstanding=last,
                relay_stopped=known == bound,
                relay_load=self.relay_load,
            )
            step = self.strategy.step(view)
            self.seen.append((view, step))
            self._check(view, step)
            if step.kind == "extend":
                outstanding = known - main_known
                extend = (tick + self.latency + outstanding / self.extend_rate, step.tokens, outstanding)
            elif step.kind == "seal":
                sealed = min(step.tokens, bound)
                if known == sealed:
                    return "sealed", known
        raise AssertionError(f"it hangs: the last it was asked was {self.seen[-1][0]}, and it said {self.seen[-1][1]}")

    @property
    def _bound(self) -> int:
        """Output tokens at which the relay stops by itself; the first is the prefill's."""
        relay = self.strategy.relay_bound(self.relay_load)
        return self.max_tokens if relay is None else min(self.max_tokens, 1 + relay)

    @staticmethod
    def _check(view: HandoffView, step: Step) -> None:
        assert isinstance(step, Step), f"step returned {step!r}"
        match step.kind:
            case "extend":
                assert view.main_ready, "an extend before main has the prompt's KV"
                assert not view.extending, "an extend while one is under way"
                assert view.main_known < step.tokens <= view.known, (
                    f"an extend to {step.tokens}, where main has {view.main_known} of {view.known}"
                )
            case "seal":
                assert view.main_ready, "a seal before main has the prompt's KV: the user would wait for the link"
                assert step.tokens >= view.known, f"a seal at {step.tokens}, where {view.known} are out"
            case "wait" | "stay":
                pass
            case _:
                raise AssertionError(f"there is no step {step.kind!r}")
