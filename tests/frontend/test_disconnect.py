"""A client that leaves stops its sessions, whatever it was waiting for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from pdd_runtime.pipeline import Finish
from tests.waiting import PATIENCE, until

Start = Callable[..., Awaitable[Any]]
MUCH = 60_000
"""Tokens: with their logprobs more than the system's buffers hold for a client that does not read."""


async def ask(url: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request over a bare socket."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    data = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
    )
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_token(given: Start, stream: bool) -> None:
    server = await given(asyncio.Event())
    _, writer = await ask(server.url, {"prompt": ["a", "b"], "stream": stream})
    await until(lambda: server.driver.sessions == 2)
    writer.close()
    await until(lambda: server.driver.sessions == 0)
    await until(lambda: [end.line.status for end in server.service.recent().ended] == [499, 499])


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_in_the_middle(given: Start, stream: bool) -> None:
    server = await given(b"abc", asyncio.Event())
    reader, writer = await ask(server.url, {"prompt": "x", "stream": stream})
    if stream:
        await reader.readuntil(b"abc")
    else:
        await until(lambda: server.driver.sessions == 1)
    assert [line.status for line in server.service.recent().running] == [None]
    writer.close()
    await until(lambda: server.driver.sessions == 0)


async def test_a_connection_that_is_reset_counts_as_left(given: Start) -> None:
    server = await given(b"abc", asyncio.Event())
    reader, writer = await ask(server.url, {"prompt": "x", "stream": True})
    await reader.readuntil(b"abc")
    writer.transport.abort()
    await until(lambda: server.driver.sessions == 0)


async def test_leaving_while_sending_the_request(given: Start) -> None:
    server = await given(b"abc", Finish("length", 0))
    at = urlsplit(server.url)
    _, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await until(lambda: [end.line.status for end in server.service.recent().ended] == [499])
    assert server.driver.requests == []


async def test_a_client_that_does_not_read_holds_up_nobody_and_may_still_leave(given: Start) -> None:
    stalled = await given(b"x" * MUCH, asyncio.Event())
    _, writer = await ask(stalled.url, {"prompt": "x", "stream": True, "logprobs": 5, "max_tokens": 200})
    await until(lambda: stalled.driver.said == MUCH)
    assert (await stalled.client.get("/health")).status_code == 200
    writer.transport.abort()
    await until(lambda: stalled.driver.sessions == 0)


async def test_a_client_that_reads_late_gets_everything_in_order(given: Start) -> None:
    text = "".join(f"{number} " for number in range(MUCH // 6))
    server = await given(text.encode(), Finish("stop", 0), context=2 * MUCH)
    reader, writer = await ask(server.url, {"prompt": "x", "stream": True, "logprobs": 5, "max_tokens": MUCH})
    await until(lambda: server.driver.said == len(text))
    answer = b""
    while not answer.endswith(b"0\r\n\r\n"):
        answer += await reader.read(2**20)
    writer.close()
    events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text


async def test_a_client_that_does_not_read_cannot_hold_up_a_stop(given: Start) -> None:
    server = await given(b"x" * MUCH, asyncio.Event())
    _, writer = await ask(server.url, {"prompt": "x", "stream": True, "logprobs": 5, "max_tokens": 200})
    await until(lambda: server.driver.said == MUCH)
    async with asyncio.timeout(PATIENCE):
        await server.service.stop(0.2)
    writer.transport.abort()
