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
from pdd_runtime.cli.front import Front, front_of
from pdd_runtime.clock import now
from pdd_runtime.errors import PddError, RemoteError, RequestError

_SHOWN = 300
"""Characters of a question that are printed."""
_SETTLED = 2.0
"""Seconds for a request's timeline to get its end after the answer."""


async def model_name(front: Front) -> str:
    """The name of the model that is served."""
    async with front.client() as http:
        return str((await get(http, "/v1/models")).json()["data"][0]["id"])


def curl(front: Front, model: str) -> str:
    """A line to paste into a shell. The user's own key is to be put in, not the graph's."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    key = ' -H "authorization: Bearer $PDD_API_KEY"' if front.key else ""
    about = f"-H 'content-type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
    return f"curl -N {front.url}/v1/chat/completions {about}"


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
        front, asked = await front_of(find(graph)), question(text)
        if not as_json:
            await ask(consoles.out, front, asked, max_tokens)
            return
        pieces: list[str] = []
        with consoles.busy("answering"):
            body = await _answered(front, asked, max_tokens, pieces.append)
        consoles.json({"answer": "".join(pieces), "timeline": body})

    asyncio.run(run())


async def ask(console: Console, front: Front, text: str, max_tokens: int) -> None:
    """Print the answer piece by piece, then draw the timeline. Raises `PddError`."""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN].rsplit(maxsplit=1)[0]} … ({len(text)} characters)"
    console.print(Text.assemble(("you: ", "bold"), shown))

    def show(piece: str) -> None:
        console.out(plain(piece), end="", highlight=False)
        console.file.flush()

    try:
        body = await _answered(front, text, max_tokens, show)
    finally:
        console.out("\n")
    console.print(timeline.draw(body, timeline.axis_width(console.width)))


async def _answered(front: Front, text: str, max_tokens: int, take: Callable[[str], None]) -> dict[str, Any]:
    """Give the answer to `take`, piece by piece. Returns the timeline. Raises `PddError`."""
    async with front.client() as http:
        request = {
            "model": await model_name(front),
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
            raise _unreachable(front.url, error) from error
    async with front.client(admin=True) as http:
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


async def delete(http: httpx.AsyncClient, path: str) -> httpx.Response:
    """End what is there."""
    try:
        return _checked(await http.delete(path))
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
