"""What became of the requests of one variant, in numbers that add up over processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.observe.pace import Pace
from pdd_runtime.observe.sketch import Sketch

SLICES = 20
"""Parts of a window: what is older than it goes one part at a time."""


class Tally(msgspec.Struct):
    """Times are seconds, of answers that were completed by the variant itself."""

    requests: int = 0
    """That ended, but for those whose client was wrong, or left."""
    failed: int = 0
    """Of them: with an error, refused for want of room, or served by others because the variant could not."""
    elsewhere: int = 0
    """Of those that failed: how many others served, so that their users did not notice."""
    ttft: Sketch = msgspec.field(default_factory=Sketch)
    tpot: Sketch = msgspec.field(default_factory=Sketch)
    gap: Sketch = msgspec.field(default_factory=Sketch)
    """The longest wait between two tokens of an answer."""
    e2e: Sketch = msgspec.field(default_factory=Sketch)
    tokens: dict[str, int] = {}
    """Of answers, by tier."""
    cached: dict[str, int] = {}
    """Of prompts, by tier."""
    prompt_tokens: int = 0

    def saw(self, status: int, seconds: float, pace: Pace | None, elsewhere: bool, body: dict[str, Any] | None) -> None:
        """A request ended. `elsewhere`: others had to serve it; `body`: of its timeline."""
        if 400 <= status < 500 and status != 429:
            return
        failed = status != 200 or elsewhere
        self.requests += 1
        self.failed += failed
        self.elsewhere += elsewhere and status == 200
        if body is not None:
            self.prompt_tokens += body["prompt_tokens"]
            _add(self.tokens, body["tokens"])
            _add(self.cached, body["cached"])
        if failed or pace is None:
            return
        self.e2e.add(seconds)
        for sketch, value in ((self.ttft, pace.ttft), (self.tpot, pace.tpot), (self.gap, pace.longest_gap)):
            if value is not None:
                sketch.add(value)

    def merge(self, other: Tally) -> None:
        """Take in what another has seen."""
        self.requests += other.requests
        self.failed += other.failed
        self.elsewhere += other.elsewhere
        self.prompt_tokens += other.prompt_tokens
        for own, more in (
            *((self.ttft, other.ttft), (self.tpot, other.tpot)),
            *((self.gap, other.gap), (self.e2e, other.e2e)),
        ):
            own.merge(more)
        _add(self.tokens, other.tokens)
        _add(self.cached, other.cached)


class Tallies:
    """Of one variant: since the process began, and of late."""

    def __init__(self, window: float, clock: Callable[[], float] = now) -> None:
        """`window`: seconds that are of late."""
        self._window, self._clock = window, clock
        self.whole = Tally()
        self._slices: deque[tuple[float, Tally]] = deque()

    def saw(self, status: int, seconds: float, pace: Pace | None, elsewhere: bool, body: dict[str, Any] | None) -> None:
        """As `Tally.saw`."""
        self.whole.saw(status, seconds, pace, elsewhere, body)
        at = self._clock()
        if not self._slices or at >= self._slices[-1][0] + self._window / SLICES:
            self._forget(at)
            self._slices.append((at, Tally()))
        self._slices[-1][1].saw(status, seconds, pace, elsewhere, body)

    def late(self) -> Tally:
        """Of the window."""
        self._forget(self._clock())
        tally = Tally()
        for _, part in self._slices:
            tally.merge(part)
        return tally

    def forget(self) -> None:
        """What was of late counts no more, as when the split has changed."""
        self._slices.clear()

    def _forget(self, at: float) -> None:
        while self._slices and self._slices[0][0] <= at - self._window:
            self._slices.popleft()


def _add(own: dict[str, int], more: dict[str, int | None] | dict[str, int]) -> None:
    for name, count in more.items():
        own[name] = own.get(name, 0) + (count or 0)
