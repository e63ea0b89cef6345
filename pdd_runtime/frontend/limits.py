"""What API keys may use of the graph, and have used."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

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


class Used(msgspec.Struct, frozen=True):
    """What a process has seen one owner use."""

    running: int = 0
    """Requests, now."""
    requests: int = 0
    """Since the process started, as are the tokens."""
    tokens: int = 0


class Account:
    """What one owner of keys has used."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self.used = Used()
        """In this process."""
        self.elsewhere = 0
        """Requests that run in other processes."""
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None

    def begin(self, key: Key) -> None:
        """A request comes. Raises `RateLimitError` where it may not."""
        self._requests = self._bucket(self._requests, key.requests_per_minute)
        self._tokens = self._bucket(self._tokens, key.tokens_per_minute)
        running = self.used.running + self.elsewhere
        if key.requests is not None and running >= key.requests:
            raise _refusal(f"{running} requests of key {key.name} are running", f"{key.requests} at once", 1.0)
        if self._requests is not None and (wait := self._requests.wait(1)):
            raise _refusal(f"key {key.name} asks too often", f"{key.requests_per_minute} requests a minute", wait)
        self.take(requests=1)
        self.used = Used(self.used.running + 1, self.used.requests + 1, self.used.tokens)

    def prompt(self, key: Key, tokens: int) -> None:
        """Its prompt has so many tokens. Raises `RateLimitError`, and then counts nothing."""
        if self._tokens is not None and (wait := self._tokens.wait(tokens)):
            limit = f"{key.tokens_per_minute} tokens a minute"
            raise _refusal(f"key {key.name} has no room for {tokens} tokens of prompt now", limit, wait)
        self.take(tokens=tokens)
        self.used = Used(self.used.running, self.used.requests, self.used.tokens + tokens)

    def end(self, answered: int) -> None:
        """It has ended with so many tokens of answers. Nobody knows them before, so they may be owed."""
        self.take(tokens=answered)
        self.used = Used(self.used.running - 1, self.used.requests, self.used.tokens + answered)

    def take(self, requests: int = 0, tokens: int = 0) -> None:
        """So much was used, here or elsewhere."""
        for bucket, used in ((self._requests, requests), (self._tokens, tokens)):
            if bucket is not None and used:
                bucket.take(used)

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


class Ledger:
    """The accounts of all owners, by name. Of several processes each has one, and hears what the others have seen."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._heard: dict[tuple[int, str], Used] = {}

    def account(self, name: str) -> Account:
        return self._accounts.setdefault(name, Account())

    def used(self) -> dict[str, Used]:
        """In this process, by name."""
        return {name: account.used for name, account in self._accounts.items()}

    def hear(self, others: Mapping[int, Mapping[str, Used]]) -> None:
        """What the other processes have seen, by their indices. What each had seen before it was first heard, or since
        it was started again, is over."""
        for account in self._accounts.values():
            account.elsewhere = 0
        for index, owners in others.items():
            for name, used in owners.items():
                account, before = self.account(name), self._heard.get((index, name))
                account.elsewhere += used.running
                if before is not None and before.requests <= used.requests and before.tokens <= used.tokens:
                    account.take(used.requests - before.requests, used.tokens - before.tokens)
                self._heard[index, name] = used


def _refusal(what: str, limit: str, wait: float) -> RateLimitError:
    error = RateLimitError(what, why=f"its limit is {limit}", fix=f"try again in {wait:.3g} s")
    error.retry_after = wait
    return error
