"""A client with a stopwatch: one streamed completion, and its timeline afterwards."""

from __future__ import annotations

import asyncio
import gc
import os
import ssl
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Protocol

import httpx
import msgspec

from pdd_runtime.clock import now
from pdd_runtime.errors import RemoteError
from pdd_runtime.experiments.outcome import Outcome

API_KEY = "PDD_API_KEY"
"""Environment: the key for graphs that ask for one."""
_CONNECT = 10.0
_SETTLED = 30.0
_REFUSED = (429, 503)
_KEPT = 256
"""Requests after which what has been measured so far is left out of garbage collection: one that looks at many
timelines stops the stopwatch for seconds."""
_FIRST_LOOK, _LAST_LOOK = 0.05, 1.0
"""Seconds between two looks at a timeline: doubled from the first to the last."""


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Failed(Exception):
    """The request has no whole answer; the message says why."""


class Front(Protocol):
    """How a graph's frontend is reached that wants more of its clients than a URL."""

    def client(self, *, admin: bool = False) -> httpx.AsyncClient:
        """A new one; `admin`: for what operators may ask."""
        ...


class Client:
    """Each request has a connection of its own, as another user's would. Use it as a context manager: leaving it
    waits for the timelines that are still to come."""

    def __init__(
        self, url: str, timeout: float, salt: str, front: Front | None = None, settling: float = _SETTLED
    ) -> None:
        """`timeout`: seconds of a whole request. `salt` keeps prompts from sharing KV with those of other runs.
        `front`: of the graph at `url`, where that is known. `settling`: seconds that a request's transfers may go on
        after its answer, until its timeline is taken as it is."""
        self.url = url.rstrip("/")
        self._timeout, self._salt, self._front = timeout, salt, front
        self.model = ""
        """That is served there; known when it is entered."""
        self._settling = settling
        # Loading certificates takes tens of milliseconds: once, not for every request.
        self._tls = httpx.create_ssl_context() if url.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tasks = asyncio.TaskGroup()
        self._asked = 0
        self._following: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Client:
        """Raises `RemoteError` where nobody answers at the URL."""
        try:
            async with self._http() as http:
                answer = await http.get("/v1/models", timeout=_CONNECT)
                self.model = str(answer.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise RemoteError(
                "no model is served here", where=self.url, why=_why(error), fix="`pdd-runtime ps` shows the URL"
            ) from error
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup:
            # What went wrong inside is told as it is, not as a group of one.
            if error is None:
                raise

    def body(self, prompt: Sequence[int], output: int, *, seed: int | None = None, salt: str = "") -> bytes:
        """The request for `output` tokens behind `prompt`, ready to be sent: greedy, or where `seed` is given drawn
        with it at temperature 1. `salt`: instead of the client's own."""
        return msgspec.json.encode(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": output,
                **({"temperature": 0} if seed is None else {"temperature": 1, "seed": seed}),
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
                "cache_salt": salt or self._salt,
            }
        )

    async def ask(self, body: bytes, outcome: Outcome) -> None:
        """Send it and write into `outcome` what comes of it; an error too, which is never raised."""
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(self._http())
            outcome.sent = now()
            try:
                async with asyncio.timeout(self._timeout):
                    await self._stream(http, body, outcome)
            except TimeoutError:
                outcome.error = f"no whole answer in {self._timeout:g} s"
            except _Failed as error:
                outcome.error = str(error)
            except (httpx.HTTPError, httpx.StreamError, msgspec.MsgspecError) as error:
                outcome.error = _why(error)
            outcome.ended = now()
            self._asked += 1
            if self._asked % _KEPT == 0:
                gc.freeze()
            if outcome.request_id:
                # The same connection, since several frontends may listen behind the URL.
                self._follow(stack.pop_all(), http, outcome)

    async def follow(self, outcome: Outcome) -> None:
        """Get the timeline of a request that somebody else has sent."""
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(self._http())
            self._follow(stack.pop_all(), http, outcome)

    async def settled(self) -> None:
        """Until the timelines of all requests so far are there: the graph then has nothing more to do for them."""
        while self._following:
            await asyncio.wait(self._following)

    def _follow(self, stack: AsyncExitStack, http: httpx.AsyncClient, outcome: Outcome) -> None:
        task = self._tasks.create_task(self._fetch_timeline(stack, http, outcome))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _stream(self, http: httpx.AsyncClient, body: bytes, outcome: Outcome) -> None:
        headers = {"content-type": "application/json"}
        async with http.stream("POST", "/v1/completions", content=body, headers=headers) as answer:
            outcome.request_id = answer.headers.get("x-pdd-request-id", "")
            if not answer.is_success:
                outcome.refused = answer.status_code in _REFUSED
                raise _Failed(f"{answer.status_code}: {_message(await answer.aread())}")
            rest = b""
            async for data in answer.aiter_bytes():
                at = now()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                        self._take(_decode(line[6:]), at, outcome)
                    elif line.startswith(b"data: [DONE]"):
                        if not outcome.tokens:
                            raise _Failed("the answer has no tokens")
                        return
        raise _Failed("the answer broke off")

    def _take(self, chunk: _Chunk, at: float, outcome: Outcome) -> None:
        if chunk.error is not None:
            raise _Failed(chunk.error.message)
        for choice in chunk.choices:
            if choice.text and choice.token_ids is None:
                raise _Failed("the server does not tell token ids (return_token_ids), so tokens cannot be counted")
            tokens = choice.token_ids or ()
            outcome.tokens += tokens
            outcome.stamps += [at] * len(tokens)

    async def _fetch_timeline(self, stack: AsyncExitStack, http: httpx.AsyncClient, outcome: Outcome) -> None:
        """KV may go on to main after a short answer has ended, and its bytes count: look until it is there."""
        async with stack:
            if self._front is not None:
                http = await stack.enter_async_context(self._front.client(admin=True))
            deadline, pause = now() + self._settling, _FIRST_LOOK
            with suppress(httpx.HTTPError, ValueError):
                while True:
                    answer = await http.get(f"/pdd/requests/{outcome.request_id}")
                    if not answer.is_success:
                        return
                    outcome.timeline = answer.json()
                    if _settled(outcome.timeline) or now() > deadline:
                        return
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LAST_LOOK)

    def _http(self) -> httpx.AsyncClient:
        if self._front is not None:
            return self._front.client()
        key = os.environ.get(API_KEY)
        # Never behind the environment's proxy: a graph is on this host or where the user says.
        return httpx.AsyncClient(
            base_url=self.url,
            verify=self._tls,
            timeout=httpx.Timeout(None, connect=_CONNECT),
            trust_env=False,
            headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {}),
        )


def _settled(timeline: Any) -> bool:
    """Whether nothing will be added to it that we read."""
    open_transfers = sum(transfer["finished"] is None for transfer in timeline["kv"])
    # A transfer that failed keeps its end open, and an event says so.
    failed = sum(event["what"].startswith("KV from") and " failed" in event["what"] for event in timeline["events"])
    ended = timeline["finish_reason"] is not None or timeline["error"] is not None
    return ended and open_transfers <= failed


def _message(body: bytes) -> str:
    with suppress(msgspec.MsgspecError):
        error = _decode(body).error
        if error is not None:
            return error.message
    return body[:200].decode(errors="replace")


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
