"""What a worker's engine works on: for whom, and how fast it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pdd_runtime.clock import now

WINDOW = 32
"""Requests after which what was measured before counts for half."""


@dataclass
class Prompt:
    """Known tokens that are being computed."""

    tokens: int = 0
    """How many, as far as is known: without those that were cached."""
    over: bool = False


class Work:
    """Prompts that are computed and answers that are decoded, each from its beginning to its end: time in the engine's
    queue is part of it."""

    def __init__(self) -> None:
        self.limit = 1
        """Requests that are computed at once."""
        self._callers: Counter[str] = Counter()
        self._at = now()
        self._prefilling = self._computing = self._decoding = 0
        self._prompts, self._tokens, self._answers = _Spent(), _Spent(), _Spent()

    @property
    def token_time(self) -> float | None:
        """Seconds to compute a known token, by those of late; None: there were none yet."""
        return self._tokens.each

    @property
    def request_time(self) -> float | None:
        """Seconds by which a request delays the one behind it, by those of late; None: none has ended yet. Where
        prompts are prefilled, they alone count."""
        return self._answers.each if self._prompts.each is None else self._prompts.each

    def of(self, caller: str) -> int:
        """Requests of that caller that are here."""
        return self._callers[caller]

    @contextmanager
    def prefill(self, caller: str) -> Iterator[Prompt]:
        """A prompt is prefilled inside."""
        self._tick()
        self._prefilling += 1
        try:
            with self._request(caller) as prompt:
                yield prompt
        finally:
            self._prefilling -= 1
            self._prompts.ended(1)

    @contextmanager
    def decode(self, caller: str) -> Iterator[Prompt]:
        """An answer is decoded inside. Whoever knows that its known tokens are computed says so by `computed`."""
        self._tick()
        self._decoding += 1
        try:
            with self._request(caller) as prompt:
                yield prompt
        finally:
            self._tick()
            self._decoding -= 1
            self._answers.ended(1)

    def computed(self, prompt: Prompt) -> None:
        """All of it is. Idempotent."""
        if not prompt.over:
            prompt.over = True
            self._tick()
            self._computing -= 1
            self._tokens.ended(prompt.tokens)

    @contextmanager
    def _request(self, caller: str) -> Iterator[Prompt]:
        prompt = Prompt()
        self._callers[caller] += 1
        self._computing += 1
        try:
            yield prompt
        finally:
            self.computed(prompt)
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]

    def _tick(self) -> None:
        at = now()
        took, self._at = at - self._at, at
        self._prompts.seconds += took * bool(self._prefilling)
        self._tokens.seconds += took * bool(self._computing)
        # Of a batch each has its share; who waits for a place in it takes none.
        self._answers.seconds += took * min(self._decoding, self.limit) / self.limit


class _Spent:
    """Seconds, and how much was done in them."""

    def __init__(self) -> None:
        self.seconds = self._done = 0.0
        self._ends = 0
        self.each: float | None = None
        """Seconds of one, as of the last end; None: nothing was done."""

    def ended(self, done: int) -> None:
        self._done += done
        self._ends += 1
        if self._done:
            self.each = self.seconds / self._done
        if self._ends % WINDOW == 0:
            self.seconds, self._done = self.seconds / 2, self._done / 2
