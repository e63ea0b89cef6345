from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from pdd_runtime import clock
from pdd_runtime.errors import EngineError
from pdd_runtime.server import pulse
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.pulse import Pulse
from tests.server.web import serving
from tests.waiting import PATIENCE, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "PERIOD", 0.02)


class Server:
    """One that can be told to answer no more, and to make no more tokens."""

    def __init__(self) -> None:
        self.answers, self.makes_tokens = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.makes_tokens.set()
        self.connected = self.busy = True
        self.looks = self.probes = 0

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/metrics":
            self.looks += 1
            await self.answers.wait()
        else:
            self.probes += 1
            await self.makes_tokens.wait()
        return web.json_response({})


@asynccontextmanager
async def watched(server: Server, health: float = 0.4, stall: float = 60.0) -> AsyncGenerator[tuple[Pulse, HttpClient]]:
    async with serving(server.handle) as url:
        http = HttpClient(url)
        try:
            yield (
                Pulse(
                    "stock",
                    url,
                    look=lambda: http.get_json("/metrics"),
                    connected=lambda: server.connected,
                    probe=lambda: http.get_json("/probe"),
                    busy=lambda: server.busy,
                    health_timeout=health,
                    stall_timeout=stall,
                ),
                http,
            )
        finally:
            await http.close()


async def failure(watching: Pulse) -> EngineError:
    async with asyncio.timeout(PATIENCE):
        return await watching.death()


async def test_a_server_that_takes_what_is_asked_and_never_answers_is_dead() -> None:
    server = Server()
    async with watched(server) as (watching, _):
        dying = asyncio.create_task(failure(watching))
        await until(lambda: server.looks > 2)
        assert not dying.done()
        server.answers.clear()
        error = await dying
    assert "does not answer any more" in error.what
    assert "health_timeout" in error.fix


async def test_a_server_that_is_gone_is_dead() -> None:
    async with watched(Server()) as (watching, _):
        pass
    assert "does not answer any more" in (await failure(watching)).what


async def test_a_server_whose_answers_make_no_sense_is_dead() -> None:
    async with watched(Server()) as (watching, _):
        watching._look = lambda: asyncio.sleep(0, 1 / 0)  # type: ignore[method-assign]
        assert "ZeroDivisionError" in (await failure(watching)).why


async def test_one_look_without_an_answer_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long ago it was well: this process may have been stopped, and not the server."""
    server, stopped = Server(), 0.0
    monkeypatch.setattr(pulse, "now", lambda: clock.now() + stopped)
    async with watched(server, health=2.0) as (watching, _):
        dying = asyncio.create_task(failure(watching))
        await until(lambda: server.looks > 2)
        server.answers.clear()
        begun = server.looks
        await until(lambda: server.looks == begun + 1)
        stopped = 100.0
        await until(lambda: server.looks == begun + 2)
        server.answers.set()
        await until(lambda: server.looks > begun + 5)
        assert not dying.done()
        dying.cancel()


async def test_a_server_whose_connector_has_left_for_long_is_dead() -> None:
    server = Server()
    async with watched(server) as (watching, _):
        dying = asyncio.create_task(failure(watching))
        await until(lambda: server.looks > 2)
        server.connected = False
        await until(lambda: watching.silent == 0)
        error = await dying
    assert "connector" in error.why


async def test_a_server_that_answers_and_computes_nothing_is_probed_and_dead() -> None:
    server = Server()
    server.makes_tokens.clear()
    async with watched(server, stall=0.3) as (watching, _):
        error = await failure(watching)
    assert "no tokens" in error.what
    assert server.probes == 1


async def test_slow_requests_are_no_death_where_a_probe_is_answered() -> None:
    server = Server()
    async with watched(server, stall=0.05) as (watching, _):
        dying = asyncio.create_task(failure(watching))
        await until(lambda: server.probes > 3)
        assert not dying.done()
        dying.cancel()


async def test_without_requests_nothing_is_probed() -> None:
    server = Server()
    server.busy = False
    server.makes_tokens.clear()
    async with watched(server, stall=0.01) as (watching, _):
        dying = asyncio.create_task(failure(watching))
        await until(lambda: server.looks > 10)
        assert not dying.done()
        assert not server.probes
        dying.cancel()
