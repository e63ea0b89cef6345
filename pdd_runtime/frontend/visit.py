"""One request of somebody, from its arrival to its end: what their API key lets it ask for."""

from __future__ import annotations

import msgspec

from pdd_runtime.errors import RequestError
from pdd_runtime.frontend.job import Job
from pdd_runtime.frontend.keys import Key
from pdd_runtime.frontend.limits import Account
from pdd_runtime.frontend.requests import Body, ChatRequest
from pdd_runtime.pipeline import SessionRequest


class Visit:
    """`begin` when it comes, `admit` when it is read, `end` once."""

    def __init__(self, key: Key | None = None, account: Account | None = None, *, share: bool = False) -> None:
        """No `key`: the graph has none, and all may ask for anything. `share`: unless the key says otherwise."""
        self.key = key
        self._account, self._share = account, share
        self._begun = False

    @property
    def name(self) -> str:
        """Of the key; empty: there is none."""
        return self.key.name if self.key else ""

    def begin(self) -> None:
        """Raises `RateLimitError`."""
        if self.key is not None and self._account is not None:
            self._account.begin(self.key)
            self._begun = True

    def admit(self, asked: Body, job: Job) -> Job:
        """The job as its owner's. Raises `RequestError` for what the key may not ask for, and `RateLimitError`."""
        key = self.key
        if key is None:
            return job
        priority = _priority(key, asked)
        _check_length(key, asked)
        if self._account is not None:
            self._account.prompt(key, job.usage().prompt_tokens)
        return job._replace(sessions=tuple(self._own(key, session, priority) for session in job.sessions))

    def end(self, answered: int) -> None:
        """So many tokens of answers were made. Idempotent."""
        if self._begun and self._account is not None:
            self._begun = False
            self._account.end(answered)

    def headers(self) -> dict[str, str]:
        """What is left of its limits."""
        return self._account.headers() if self._account is not None else {}

    def _own(self, key: Key, session: SessionRequest, priority: int) -> SessionRequest:
        shares = self._share if key.share is None else key.share
        # A name has no slash, so whatever a client's own salt is, it is in a space of its key's, or in the shared one.
        salt = f"{'' if shares else key.name}/{session.salt}"
        most = min(session.max_tokens, key.max_tokens or session.max_tokens)
        return msgspec.structs.replace(session, tenant=key.name, priority=priority, salt=salt, max_tokens=most)


def _priority(key: Key, asked: Body) -> int:
    least = key.priority
    if asked.priority is None:
        return max(least or 0, 0)
    if least is not None and asked.priority < least:
        raise RequestError(f"key {key.name} may ask for {least} and above", where="priority")
    return asked.priority


def _check_length(key: Key, asked: Body) -> None:
    if key.max_tokens is None:
        return
    newer = asked.max_completion_tokens if isinstance(asked, ChatRequest) else None
    for field, tokens in (
        ("min_tokens", asked.min_tokens),
        ("max_completion_tokens", newer),
        ("max_tokens", None if newer else asked.max_tokens),
    ):
        if tokens is not None and tokens > key.max_tokens:
            raise RequestError(f"key {key.name} may ask for at most {key.max_tokens} tokens", where=field)
