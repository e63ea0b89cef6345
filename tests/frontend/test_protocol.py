"""Clients that are slow, large, idle or many are outlived, and each has its line in the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from pdd_runtime.frontend import protocol
from pdd_runtime.frontend.server import more_files
from pdd_runtime.pipeline import Finish
from tests.frontend.test_disconnect import ask
from tests.waiting import PATIENCE, until

Start = Callable[..., Awaitable[Any]]
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
BODY = json.dumps({"prompt": "x"}).encode()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes tens of seconds takes tenths."""
    monkeypatch.setattr(protocol, "HEAD_TIME", 0.3)
    monkeypatch.setattr(protocol, "BODY_TIME", 0.3)


async def connect(server: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    at = urlsplit(server.url)
    return await asyncio.open_connection(at.hostname, at.port)


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    """Send a byte now and then, until the server has had enough. Returns what it says, empty where a byte that was
    still on its way made a reset of it."""

    async def send() -> None:
        for byte in data:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        sending.cancel()
        writer.close()


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nx: " + b"y" * 10_000, b"\r\n" * 5_000, b"G" * 1])
async def test_a_header_that_never_ends_is_not_waited_for(
    given: Start, hurried: None, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = await given()
    said = await drip(*await connect(server), head)
    assert said[:13] in (b"HTTP/1.1 408 ", b"")
    assert "connection of 127.0.0.1 closed: no whole header in 0.3 s" in caplog.text


async def test_a_body_that_drips_is_not_waited_for(
    given: Start, hurried: None, caplog: pytest.LogCaptureFixture
) -> None:
    server = await given()
    reader, writer = await connect(server)
    writer.write(POST % 10_000)
    assert (await drip(reader, writer, b"x" * 10_000))[:13] in (b"HTTP/1.1 408 ", b"")
    assert "bytes of a body in" in caplog.text
    await until(lambda: [end.line.status for end in server.service.recent().ended] == [499])


async def test_a_body_that_comes_slowly_but_steadily_is_read(
    given: Start, hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "BODY_TIME", 1.0)
    monkeypatch.setattr(protocol, "BODY_RATE", 100)
    server = await given(b"abc", Finish("length", 0))
    body = json.dumps({"prompt": "x" * 200}).encode()
    reader, writer = await connect(server)
    writer.write(POST % len(body))
    for start in range(0, len(body), 10):
        writer.write(body[start : start + 10])
        await asyncio.sleep(0.06)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_body_that_nobody_reads_must_come_in_time_too(given: Start, hurried: None) -> None:
    server = await given()
    reader, writer = await connect(server)
    writer.write(POST.replace(b"/v1/completions", b"/health") % 10_000)
    said = await drip(reader, writer, b"x" * 10_000)
    assert said[:13] in (b"HTTP/1.1 405 ", b"")
    assert b" 408 " not in said


async def test_a_header_without_end_and_size_is_cut(given: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = await given()
    reader, writer = await connect(server)
    writer.write(b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 3 * protocol.MAX_HEAD)
    assert (await drip(reader, writer, b"y" * 10_000))[:13] in (b"HTTP/1.1 431 ", b"")
    assert "its header has more than" in caplog.text


async def test_nonsense_is_answered_and_told(given: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = await given()
    reader, writer = await connect(server)
    writer.write(b"\x16\x03\x01 what is this\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
    writer.close()
    assert "connection of 127.0.0.1 closed: it speaks no HTTP" in caplog.text


async def test_a_thousand_idle_clients_hold_nobody_up_and_end(
    given: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(protocol, "KEEP_ALIVE", 2.0)
    more_files()
    server = await given()
    idle = [await connect(server) for _ in range(1000)]
    assert (await server.client.get("/health")).status_code == 200
    for reader, writer in idle:
        assert await reader.read() == b""
        writer.close()
    assert "nothing came for" in caplog.text


async def test_above_the_limit_who_is_idle_gives_way_to_who_comes(
    given: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server = await given(asyncio.Event(), most=4)
    busy = [await ask(server.url, {"prompt": "x"}) for _ in range(2)]
    await until(lambda: server.driver.sessions == 2)
    idle = [await connect(server) for _ in range(2)]
    for number in range(10):
        reader, writer = await connect(server)
        writer.write(GET)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 "), number
        writer.close()
        await writer.wait_closed()
    assert server.driver.sessions == 2
    assert await idle[0][0].read() == b""
    assert "it was idle the longest" in caplog.text
    more = [await ask(server.url, {"prompt": "x"}) for _ in range(2)]
    await until(lambda: server.driver.sessions == 4)
    reader, writer = await connect(server)
    assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
    for _, each in [*busy, *idle, *more, (reader, writer)]:
        each.close()
    await until(lambda: server.driver.sessions == 0)


async def test_a_connection_is_kept_from_request_to_request(given: Start) -> None:
    server = await given(b"abc", Finish("length", 0))
    reader, writer = await connect(server)
    for _ in range(3):
        writer.write(POST % len(BODY) + BODY)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().splitlines() if line.startswith(b"content-length:"))
        assert b"abc" in await reader.readexactly(length)
    writer.close()


async def test_a_line_end_behind_a_body_costs_no_answer(given: Start, hurried: None) -> None:
    go = asyncio.Event()
    server = await given(go, b"abc", Finish("length", 0))
    reader, writer = await connect(server)
    writer.write(POST % len(BODY) + BODY + b"\r\n")
    await until(lambda: server.driver.sessions == 1)
    await asyncio.sleep(2 * protocol.HEAD_TIME)
    go.set()
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()
