"""How fast one answer came, as its user saw it."""

from __future__ import annotations


class Pace:
    """Times are those of `pdd_runtime.clock`, results seconds. Tokens that go out together count as one moment."""

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.tokens = 0
        self.ttft: float | None = None
        self.tenth: float | None = None
        """From arrival until ten tokens were out."""
        self.longest_gap: float | None = None
        """Between two moments at which tokens went out."""
        self._last = arrived

    def sent(self, tokens: int, at: float) -> None:
        """`tokens` more are out, at least one."""
        if self.tokens == 0:
            self.ttft = at - self.arrived
        else:
            self.longest_gap = max(self.longest_gap or 0.0, at - self._last)
        if self.tokens < 10 <= self.tokens + tokens:
            self.tenth = at - self.arrived
        self.tokens += tokens
        self._last = at

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None below two tokens."""
        if self.ttft is None or self.tokens < 2:
            return None
        return (self._last - self.arrived - self.ttft) / (self.tokens - 1)
