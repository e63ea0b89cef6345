"""What became of the requests of one variant, in numbers that add up over processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.observe.pace import Pace
from pdd_runtime.observe.sketch import Sketch

LATE = 20
"""Stretches of time that are of late."""
MOST = 48
"""Stretches that are remembered of the whole time; then they become longer."""


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


class Slices(msgspec.Struct):
    """Tallies of stretches of time, which are the same in all processes of a host."""

    span: float
    """Seconds of each."""
    parts: dict[int, Tally] = {}
    """By number: how often the span fits into the host's clock."""

    def at(self, time: float) -> Tally:
        """That of a moment."""
        return self.parts.setdefault(int(time // self.span), Tally())

    def coarsen(self) -> None:
        """Stretches of twice the length."""
        finer, self.span, self.parts = self.parts, 2 * self.span, {}
        for number, tally in finer.items():
            self.parts.setdefault(number // 2, Tally()).merge(tally)

    def merge(self, other: Slices) -> None:
        """Take in those of another process, whose spans may have doubled more often or less."""
        while self.span < other.span:
            self.coarsen()
        ratio = round(self.span / other.span)
        for number, tally in other.parts.items():
            self.parts.setdefault(number // ratio, Tally()).merge(tally)

    def whole(self) -> Tally:
        """All together."""
        tally = Tally()
        for part in self.parts.values():
            tally.merge(part)
        return tally

    def sketches(self, time: str) -> list[Sketch]:
        """Of one of the times, those that have any."""
        return [sketch for part in self.parts.values() if (sketch := getattr(part, time)).count]


class Seen(msgspec.Struct):
    """What became of a variant's requests."""

    late: Slices
    """Of late, and since the split last changed."""
    whole: Slices
    """Since the processes were started."""

    @staticmethod
    def none(window: float) -> Seen:
        """`window`: seconds that are of late."""
        return Seen(Slices(window / LATE), Slices(window / LATE))

    def only_late(self) -> Seen:
        """Without the rest."""
        return Seen(self.late, Slices(self.late.span))

    def merge(self, other: Seen) -> None:
        """Take in what another process has seen."""
        self.late.merge(other.late)
        self.whole.merge(other.whole)


class Tallies:
    """Of one variant, in one process."""

    def __init__(self, window: float, clock: Callable[[], float] = now) -> None:
        """`window`: seconds that are of late."""
        self._clock, self._seen = clock, Seen.none(window)

    def saw(self, status: int, seconds: float, pace: Pace | None, elsewhere: bool, body: dict[str, Any] | None) -> None:
        """As `Tally.saw`, now."""
        at = self._clock()
        for slices in (self._seen.late, self._seen.whole):
            slices.at(at).saw(status, seconds, pace, elsewhere, body)
        if len(self._seen.whole.parts) > MOST:
            self._seen.whole.coarsen()

    def seen(self) -> Seen:
        """To be read, not changed."""
        late = self._seen.late
        oldest = int(self._clock() // late.span) - LATE
        late.parts = {number: tally for number, tally in late.parts.items() if number > oldest}
        return self._seen

    def forget(self) -> None:
        """What was of late counts no more, as when the split has changed."""
        self._seen.late.parts = {}


def _add(own: dict[str, int], more: dict[str, int | None] | dict[str, int]) -> None:
    for name, count in more.items():
        own[name] = own.get(name, 0) + (count or 0)
