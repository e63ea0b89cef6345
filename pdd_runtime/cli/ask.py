"""One question to a running graph: the answer as it streams, then its timeline."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from pdd_runtime.cli import timeline
from pdd_runtime.cli.console import Consoles, plain
from pdd_runtime.cli.find import find
from pdd_runtime.clock import now
from pdd_runtime.errors import LaunchError, PddError, RemoteError, RequestError
from pdd_runtime.launch import GraphState, ps

_SHOWN = 300
"""Characters of a question that are printed."""
_CONNECT = 5.0
_NEXT = 120.0
"""Seconds to wait for the next piece of an answer."""
_SETTLED = 2.0
"""Seconds for a request's timeline to get its end after the answer."""


def client(url: str) -> httpx.AsyncClient:
    # The frontend is on this host, or where the graph says: never behind the environment's proxy.
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(_NEXT, connect=_CONNECT), trust_env=False)


async def model_name(url: str) -> str:
    """The name of the model that is served."""
    async with client(url) as http:
        return str((await get(http, "/v1/models")).json()["data"][0]["id"])


def curl(url: str, model: str) -> str:
    """A line to paste into a shell."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    return f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"


def question(text: str) -> str:
    """What to ask: the text itself, or what stands in the file named behind an `@`. Raises `RequestError`."""
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            "the question cannot be read", where=str(path), why=str(error), fix="name a UTF-8 text file behind the @"
        ) from error


def ask_running(text: str, graph: str | None, max_tokens: int, as_json: bool, consoles: Consoles) -> None:
    """`pdd-runtime ask`."""

    async def run() -> None:
        url, asked = await url_of(find(graph)), question(text)
        if not as_json:
            await ask(consoles.out, url, asked, max_tokens)
            return
        pieces: list[str] = []
        with consoles.busy("answering"):
            body = await _answered(url, asked, max_tokens, pieces.append)
        consoles.json({"answer": "".join(pieces), "timeline": body})

    asyncio.run(run())


async def url_of(state: GraphState) -> str:
    """Where a running graph answers. Raises `LaunchError` where its frontend is not up."""
    status = await ps(state)
    if not status.url:
        why = status.why_not_ready or "it is in another cluster's part of the graph"
        raise LaunchError(f"the frontend of {state.name} is not up", why=why)
    return status.url


async def ask(console: Console, url: str, text: str, max_tokens: int) -> None:
    """Print the answer piece by piece, then draw the timeline. Raises `PddError`."""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN].rsplit(maxsplit=1)[0]} … ({len(text)} characters)"
    console.print(Text.assemble(("you: ", "bold"), shown))

    def show(piece: str) -> None:
        console.out(plain(piece), end="", highlight=False)
        console.file.flush()

    try:
        body = await _answered(url, text, max_tokens, show)
    finally:
        console.out("\n")
    console.print(timeline.draw(body, timeline.axis_width(console.width)))


async def _answered(url: str, text: str, max_tokens: int, take: Callable[[str], None]) -> dict[str, Any]:
    """Give the answer to `take`, piece by piece. Returns the timeline. Raises `PddError`."""
    async with client(url) as http:
        request = {
            "model": await model_name(url),
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        try:
            async with http.stream("POST", "/v1/chat/completions", json=request) as answer:
                if not answer.is_success:
                    await answer.aread()
                    _checked(answer)
                async for piece in _pieces(answer):
                    take(piece)
                request_id = answer.headers["x-pdd-request-id"]
        except httpx.HTTPError as error:
            raise _unreachable(url, error) from error
        return await fetch_timeline(http, request_id, _SETTLED)


async def fetch_timeline(
    http: httpx.AsyncClient, request_id: str, patience: float = 0.0, *, settled: bool = False
) -> dict[str, Any]:
    """The timeline of a request, waiting for its end (with `settled`, for that of its transfers, too) for up to
    `patience` seconds. Raises `RequestError` where there is none."""
    deadline = now() + patience
    while True:
        body: dict[str, Any] = (await get(http, f"/pdd/requests/{request_id}")).json()
        ended = body["finish_reason"] is not None or body["error"] is not None
        if settled and body["error"] is None:
            ended = ended and all(transfer["finished"] is not None for transfer in body["kv"])
        if ended or now() >= deadline:
            return body
        await asyncio.sleep(0.05)


async def _pieces(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise RemoteError(f"the answer broke off: {event['error']['message']}")
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


async def get(http: httpx.AsyncClient, path: str) -> httpx.Response:
    """What the frontend has there. Raises `RemoteError` and `RequestError`."""
    try:
        return _checked(await http.get(path))
    except httpx.HTTPError as error:
        raise _unreachable(str(http.base_url), error) from error


async def post(http: httpx.AsyncClient, path: str, body: object) -> httpx.Response:
    """The same with a body."""
    try:
        return _checked(await http.post(path, json=body))
    except httpx.HTTPError as error:
        raise _unreachable(str(http.base_url), error) from error


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    kind: type[PddError] = RequestError if answer.is_client_error else RemoteError
    raise kind(f"the frontend answered {answer.status_code}: {message}", where=str(answer.url))


def _unreachable(url: str, error: httpx.HTTPError) -> PddError:
    return RemoteError(
        "the frontend cannot be reached",
        where=url,
        why=f"{type(error).__name__}: {error}".rstrip(": "),
        fix="`pdd-runtime ps` shows whether it runs, `pdd-runtime logs frontend` what it says",
    )
