"""What API keys may use of the graph, and have used."""

from __future__ import annotations

from collections.abc import Callable

from pdd_runtime.clock import now
from pdd_runtime.frontend.errors import RateLimitError
from pdd_runtime.frontend.keys import Key

MINUTE = 60.0


class Bucket:
    """Holds a minute's worth of something, and fills up as time goes."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = now) -> None:
        self._clock, self._level, self._at = clock, float(per_minute), clock()
        self._per_minute = per_minute

    @property
    def per_minute(self) -> int:
        return self._per_minute

    @per_minute.setter
    def per_minute(self, per_minute: int) -> None:
        # What is left stays: who has keys of two limits must not fill the bucket by changing between them.
        self._level = self.left
        self._per_minute = per_minute

    @property
    def left(self) -> float:
        """Below zero: what was used beyond it."""
        at = self._clock()
        self._level = min(self._level + (at - self._at) * self.per_minute / MINUTE, self.per_minute)
        self._at = at
        return self._level

    def wait(self, wanted: int) -> float:
        """Seconds until so much may be taken; of what is more than it ever holds, until it is full."""
        return max(min(wanted, self.per_minute) - self.left, 0.0) * MINUTE / self.per_minute

    def take(self, used: int) -> None:
        """There may be less: the rest is owed."""
        self._level = self.left - used

    @property
    def full_in(self) -> float:
        """Seconds."""
        return (self.per_minute - self.left) * MINUTE / self.per_minute


class Account:
    """What one owner of keys has used."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self.running = 0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None

    def begin(self, key: Key) -> None:
        """A request comes. Raises `RateLimitError` where it may not."""
        self._requests = self._bucket(self._requests, key.requests_per_minute)
        self._tokens = self._bucket(self._tokens, key.tokens_per_minute)
        if key.requests is not None and self.running >= key.requests:
            raise _refusal(f"{self.running} requests of key {key.name} are running", f"{key.requests} at once", 1.0)
        if self._requests is not None:
            if wait := self._requests.wait(1):
                raise _refusal(f"key {key.name} asks too often", f"{key.requests_per_minute} requests a minute", wait)
            self._requests.take(1)
        self.running += 1

    def prompt(self, key: Key, tokens: int) -> None:
        """Its prompt has so many tokens. Raises `RateLimitError`, and then counts nothing."""
        if self._tokens is not None:
            if wait := self._tokens.wait(tokens):
                limit = f"{key.tokens_per_minute} tokens a minute"
                raise _refusal(f"key {key.name} has no room for {tokens} tokens of prompt now", limit, wait)
            self._tokens.take(tokens)

    def end(self, answered: int) -> None:
        """It has ended with so many tokens of answers. Nobody knows them before, so they may be owed."""
        self.running -= 1
        if self._tokens is not None:
            self._tokens.take(answered)

    def _bucket(self, bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
        """As the key has it now."""
        if per_minute is None:
            return None
        if bucket is None:
            return Bucket(per_minute, self._clock)
        if bucket.per_minute != per_minute:
            bucket.per_minute = per_minute
        return bucket

    def headers(self) -> dict[str, str]:
        """As OpenAI tells it."""
        headers = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(int(bucket.left), 0))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.full_in:.3f}s"
        return headers


def _refusal(what: str, limit: str, wait: float) -> RateLimitError:
    error = RateLimitError(what, why=f"its limit is {limit}", fix=f"try again in {wait:.3g} s")
    error.retry_after = wait
    return error
