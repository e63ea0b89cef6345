"""Counts requests as they end, in memory that does not grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pdd_runtime.planner.simulate.histogram import Histogram
from pdd_runtime.planner.simulate.outcome import METRICS, Outcome, Pairs

if TYPE_CHECKING:
    from pdd_runtime.planner.simulate.flight import Flight
    from pdd_runtime.planner.simulate.visit import Visit

_FLUSH: Final = 4096


class Recorder:
    """Of all requests, those are measured that were sent behind the warm-up."""

    def __init__(self, warmup: int, requests: int, observe: Callable[[Outcome], None] | None) -> None:
        self.histograms = {metric: Histogram() for metric in METRICS}
        self.pairs = Pairs()
        self.routes: dict[str, int] = {}
        self.begins: Callable[[], None] = _nothing
        """Called when the first that is measured is sent."""
        self.all_sent: Callable[[], None] = _nothing
        """Called when the last that is measured is sent."""
        self.rejected = self.failed = 0
        self.too_long = 0
        """Of those rejected."""
        self.answered = 0
        self.began = float("inf")
        """When the first that is measured was sent."""
        self.last = 0.0
        """When the last ended."""
        self.sent_last = 0.0
        """When the last that is measured was sent."""
        self.within = 0
        """Requests that ended, the measured and others, while measured ones were sent."""
        self.tokens = {"prefill": 0, "relay": 0, "main": 0}
        self.prompt_tokens = 0
        self.cached = {"prefill": 0, "main": 0}
        self.open = requests
        """Measured ones that have not ended yet."""
        self._skip = warmup
        self._left = requests
        self._observe = observe
        self._values: dict[str, list[float]] = {metric: [] for metric in METRICS}
        self._ttft, self._tt10, self._tpot = (self._values[name].append for name in ("ttft", "tt10", "tpot"))
        self._e2e, self._longest_gap = self._values["e2e"].append, self._values["longest_gap"].append
        self._handoff_gap = self._values["handoff_gap"].append
        self._both: tuple[list[float], list[float]] = ([], [])
        self._pending = 0

    def sent(self, visit: Visit) -> bool:
        """A request is sent. Is it measured?"""
        if self._skip:
            self._skip -= 1
            return False
        if not self._left:
            return False
        self._left -= 1
        if self.began > visit.due:
            self.began = visit.due
            self.begins()
        self.sent_last = visit.due
        if not self._left:
            self.all_sent()
        return True

    @property
    def enough(self) -> bool:
        """All that are measured have been sent."""
        return not self._left and not self._skip

    @property
    def sending(self) -> bool:
        """Measured ones are being sent."""
        return self._left > 0 and self.began < float("inf")

    def ended(self, flight: Flight) -> None:
        """One that is measured has its whole answer."""
        self.open -= 1
        self.answered += 1
        due, first, last = flight.due, flight.first_at, flight.last_at
        more = flight.turn.output - 1
        ttft = first - due
        tpot = (last - first) / more if more else None
        self._ttft(ttft)
        self._e2e(last - due)
        both = self._both
        both[0].append(ttft)
        if tpot is None:
            both[1].append(0.0)
        else:
            self._tpot(tpot)
            both[1].append(tpot)
        tenth = flight.tenth_at
        if tenth is not None:
            tenth -= due
            self._tt10(tenth)
        if flight.longest is not None:
            self._longest_gap(flight.longest)
        if flight.gap is not None:
            self._handoff_gap(flight.gap)
        if last > self.last:
            self.last = last
        routes, kind = self.routes, flight.route.kind
        routes[kind] = routes.get(kind, 0) + 1
        tokens = self.tokens
        tokens["prefill"] += flight.prefill_tokens
        tokens["relay"] += flight.relay_tokens
        tokens["main"] += flight.main_tokens
        self.prompt_tokens += flight.turn.prompt
        cached = self.cached
        cached["prefill"] += flight.prefill_cached
        cached["main"] += flight.main_cached
        self._pending += 1
        if self._pending == _FLUSH:
            self.flush()
        if self._observe is not None:
            self._observe(
                Outcome(
                    session=flight.visit.session.number,
                    turn=flight.number,
                    due=due,
                    prompt=flight.turn.prompt,
                    output=flight.turn.output,
                    route=kind,
                    prefill_cached=flight.prefill_cached,
                    main_cached=flight.main_cached,
                    relay_tokens=flight.relay_tokens,
                    ttft=ttft,
                    tt2=None if flight.second_at is None else flight.second_at - due,
                    tt10=tenth,
                    tpot=tpot,
                    longest_gap=flight.longest,
                    handoff_gap=flight.gap,
                    e2e=last - due,
                )
            )

    def refused(self, visit: Visit) -> None:
        """One that is measured was refused."""
        self.open -= 1
        self.rejected += 1
        self._unanswered(visit)

    def longer(self, visit: Visit) -> None:
        """One is refused for its length."""
        if visit.measured:
            self.too_long += 1

    def gave_up(self, visit: Visit) -> None:
        """One that is measured has lost its workers, and no others came."""
        self.open -= 1
        self.failed += 1
        self._unanswered(visit)

    def _unanswered(self, visit: Visit) -> None:
        if self._observe is not None:
            turn, nothing = visit.turn, (None,) * (len(METRICS) + 1)
            asked = (visit.session.number, visit.number, visit.due, turn.prompt, turn.output)
            self._observe(Outcome(*asked, "", 0, 0, 0, *nothing))

    def flush(self) -> None:
        """Enter what is pending into the histograms."""
        self._pending = 0
        for metric, values in self._values.items():
            self.histograms[metric].add(values)
            values.clear()
        if self._both[0]:
            self.pairs.add(*self._both)
            for values in self._both:
                values.clear()


def _nothing() -> None:
    pass
