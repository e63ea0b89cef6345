from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from pdd_runtime.errors import EngineError, RequestError
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.launch import Launch
from pdd_runtime.server.process import ServerProcess, free_port
from pdd_runtime.server.readiness import wait_ready
from tests.server.web import serving
from tests.waiting import PATIENCE, until

SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    process = ServerProcess("stock", tmp_path)
    yield process
    await process.stop(patience=0)


async def fine() -> None: ...


async def test_it_is_ready_when_it_answers_and_has_made_a_token(process: ServerProcess) -> None:
    port, probed = free_port(), 0

    async def probe() -> None:
        nonlocal probed
        assert await http.get_text("/health") == ""
        probed += 1

    http = HttpClient(f"http://127.0.0.1:{port}")
    try:
        await process.start(Launch((sys.executable, "-c", SERVE, str(port))))
        await wait_ready(http, process, "/health", probe, timeout=PATIENCE)
    finally:
        await http.close()
    assert probed == 1


async def test_a_server_that_dies_is_not_waited_for(process: ServerProcess) -> None:
    http = HttpClient(f"http://127.0.0.1:{free_port()}")
    try:
        await process.start(Launch((sys.executable, "-c", "print('no such model'); raise SystemExit(1)")))
        with pytest.raises(EngineError, match="ended: exit code 1") as caught:
            await wait_ready(http, process, "/health", fine, timeout=10 * PATIENCE)
    finally:
        await http.close()
    assert "no such model" in caught.value.why


async def test_dying_at_the_first_token_is_told_as_dying(process: ServerProcess) -> None:
    port = free_port()

    async def probe() -> None:
        await process.stop(patience=0)
        raise EngineError("the connection was lost")

    http = HttpClient(f"http://127.0.0.1:{port}")
    try:
        await process.start(Launch((sys.executable, "-c", SERVE, str(port))))
        with pytest.raises(EngineError, match="the stock server ended"):
            await wait_ready(http, process, "/health", probe, timeout=PATIENCE)
    finally:
        await http.close()


async def test_the_last_trouble_of_a_late_server_is_told() -> None:
    async def loading(request: web.Request) -> web.Response:
        return web.Response(status=503, text="loading weights")

    async with serving(loading) as url:
        http = HttpClient(url)
        try:
            with pytest.raises(EngineError, match=r"not ready after 0\.5 s") as caught:
                await wait_ready(http, None, "/health", fine, timeout=0.5)
        finally:
            await http.close()
    assert caught.value.why == "loading weights"


async def test_a_server_that_is_well_but_makes_no_token_is_not_ready() -> None:
    async def well(request: web.Request) -> web.Response:
        return web.Response()

    async def refuse() -> None:
        raise RequestError("no such model")

    async with serving(well) as url:
        http = HttpClient(url)
        try:
            with pytest.raises(EngineError) as caught:
                await wait_ready(http, None, "/health", asyncio.Event().wait, timeout=0.5)
            with pytest.raises(RequestError, match="no such model"):
                await wait_ready(http, None, "/health", refuse, timeout=PATIENCE)
        finally:
            await http.close()
    assert "has made no token" in caught.value.why


async def test_a_wait_can_be_cancelled(process: ServerProcess) -> None:
    http = HttpClient(f"http://127.0.0.1:{free_port()}")
    await process.start(Launch((sys.executable, "-c", "print('up'); import time; time.sleep(600)")))
    waiting = asyncio.create_task(wait_ready(http, process, "/health", fine, timeout=PATIENCE))
    try:
        await until(lambda: process.last_lines)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not process.ended.done()
    finally:
        await http.close()
