"""HTTP with one server: JSON in and out, and streams of events whose end aborts what made them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from pdd_runtime.errors import CapacityError, EngineError, PddError, RequestError
from pdd_runtime.server.config import check_url

if TYPE_CHECKING:
    # Loaded with the first client: it would be a quarter of the start of processes that have none.
    import aiohttp

MAX_BODY = 64 << 20
"""Bytes of an answer; /metrics of a large server has less than one in a hundred of it."""
MAX_EVENT = 8 << 20
"""Bytes of one event: a token with its logprobs has some thousands."""
_CONNECT = 10.0
_KEPT = 2.0
"""Seconds that an idle connection is kept: less than the five after which uvicorn, in most servers, closes it, so that
no request meets a connection that is just being closed."""
_LAST = 1.0
"""Seconds that a stream may take to close after its last event."""
_SETUP = {401, 403, 404, 405}
"""What no request of a user's causes."""


class HttpClient:
    """To one server, over as many connections as there are requests at once; kept for the next ones. Made on a running
    loop."""

    def __init__(self, url: str, *, timeout: float = 30.0, idle_timeout: float | None = None) -> None:
        """`timeout`: seconds for a whole answer that is no stream. `idle_timeout`: seconds that a stream may be
        silent; None: for ever. Raises `EngineError` for an address that is none, or leaves this host in the clear."""
        import aiohttp

        try:
            self.url = check_url(url)
        except ValueError as error:
            raise EngineError("a server cannot be reached at this address", why=str(error)) from error
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT)
        self._stream_timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=idle_timeout)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def get_json(self, path: str) -> Any:
        """Raises as `post_json` does."""
        return self._decode(path, await self._answer("GET", path, None))

    async def get_text(self, path: str) -> str:
        """Raises as `post_json` does."""
        return (await self._answer("GET", path, None)).decode(errors="replace")

    async def post_json(self, path: str, body: Mapping[str, Any], timeout: float | None = None) -> Any:
        """Raises `RequestError` where the server says what is wrong with it, `CapacityError` where it says that it is
        full, and `EngineError` where it fails, is not there, or is no server of this kind. An empty answer is None.
        `timeout`: seconds for this answer."""
        import aiohttp

        limit = self._timeout if timeout is None else aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT)
        return self._decode(path, await self._answer("POST", path, body, limit))

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """The events of a server-sent stream, each parsed, until `[DONE]`. Raises as `post_json` does, also for an
        error that comes as an event. Closing it early closes the connection, by which servers know to abort."""
        async with self._request("POST", path, body, self._stream_timeout) as response:
            ended = False
            try:
                async for data in _events(response.content):
                    if data == b"[DONE]":
                        ended = True
                        break
                    event = self._decode(path, data)
                    if isinstance(event, dict) and event.get("error"):
                        self._refuse(path, _status(event), data)
                    yield event
                else:
                    raise EngineError(
                        "the server broke off a stream",
                        where=self._at(path),
                        why="the answer ended without its last event, [DONE]",
                        fix="its log has the cause: `pdd-runtime logs`",
                    )
            finally:
                if not (ended and await _is_over(response.content)):
                    response.close()

    async def close(self) -> None:
        """Running requests end with `EngineError`. Idempotent."""
        await self._session.close()

    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: aiohttp.ClientTimeout | None = None
    ) -> bytes:
        async with self._request(method, path, body, timeout or self._timeout) as response:
            return await self._read(path, response)

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is no refusal. What aiohttp raises, also in the caller's block, becomes ours."""
        import aiohttp

        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if data is not None else None
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    self._refuse(path, response.status, await self._read(path, response))
                yield response
        except TimeoutError as error:
            raise EngineError(
                "the server does not answer",
                where=self._at(path),
                why="nothing came within the time that is set for it",
                fix="see whether it hangs: `pdd-runtime logs`",
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise EngineError(
                "the server cannot be reached", where=self._at(path), why=str(error.os_error), fix="see whether it runs"
            ) from error
        except (aiohttp.ClientError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not self._session.closed:
                raise
            raise EngineError(
                "the connection to the server was lost",
                where=self._at(path),
                why=f"{type(error).__name__}: {error}",
                fix="see whether it runs: `pdd-runtime logs`",
            ) from error

    async def _read(self, path: str, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > MAX_BODY:
                raise EngineError(f"the server's answer is longer than {MAX_BODY} bytes", where=self._at(path))
        return bytes(body)

    def _decode(self, path: str, data: bytes) -> Any:
        try:
            return msgspec.json.decode(data) if data.strip() else None
        except msgspec.DecodeError as error:
            start = data[:80].decode(errors="replace")
            raise EngineError(
                "the server's answer is not JSON", where=self._at(path), why=f"{error}; it begins with {start!r}"
            ) from error

    def _refuse(self, path: str, status: int, body: bytes) -> NoReturn:
        message, field = _complaint(body)
        error: PddError
        if status == 429:
            error = CapacityError("the server takes no more requests now", where=self._at(path), why=message)
        elif 400 <= status < 500 and status not in _SETUP:
            error = RequestError(message or f"the server refuses it with status {status}", where=field)
        else:
            error = EngineError(
                f"the server answers with status {status}",
                where=self._at(path),
                why=message or "it does not say why",
                fix="its log has more: `pdd-runtime logs`"
                if status >= 500
                else "see whether this is the right server, of a version that the plugin knows",
            )
        raise error

    def _at(self, path: str) -> str:
        return self.url + path


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """The data of each event; several lines of it are joined, comments and other fields left out
    (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    rest, data = b"", list[bytes]()
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
        if len(rest) + sum(map(len, data)) > MAX_EVENT:
            raise EngineError(f"the server sent an event longer than {MAX_EVENT} bytes")


async def _is_over(content: aiohttp.StreamReader) -> bool:
    """Whether the answer ends now, so that the next request can have its connection."""
    import aiohttp

    try:
        async with asyncio.timeout(_LAST):
            return not await content.read(1)
    except (TimeoutError, aiohttp.ClientError):
        return False


def _status(event: dict[str, Any]) -> int:
    error = event["error"]
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _complaint(body: bytes) -> tuple[str, str]:
    """What a refusal says, and of which field: in OpenAI's form, in its older one without `error`, or FastAPI's."""
    try:
        answer = json.loads(body)
    except ValueError:
        return " ".join(body[:500].decode(errors="replace").split()), ""
    if not isinstance(answer, dict):
        return str(answer)[:500], ""
    error = answer.get("error", answer)
    if not isinstance(error, dict):
        return str(error), ""
    detail = error.get("detail")
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        return str(detail[0].get("msg", "")), _field(".".join(map(str, detail[0].get("loc", ()))))
    message = str(error.get("message") or detail or "")
    return " ".join(message.split()), _field(str(error.get("param") or ""))


def _field(place: str) -> str:
    """Where in the body something is wrong."""
    return place.removeprefix("body.")
