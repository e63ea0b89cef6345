from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from pdd_runtime.errors import CapacityError, EngineError, PddError, RequestError
from pdd_runtime.server import http as module
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.process import free_port
from tests.server.web import Handler, send_events, serving
from tests.waiting import PATIENCE


@asynccontextmanager
async def client(handler: Handler, **options: Any) -> AsyncIterator[HttpClient]:
    async with serving(handler) as url:
        http = HttpClient(url, **options)
        try:
            yield http
        finally:
            await http.close()


async def collect(http: HttpClient) -> list[Any]:
    return [event async for event in http.stream("/generate", {})]


async def until_gone(gone: asyncio.Event) -> None:
    """Of a handler: it is cancelled when its client goes."""
    try:
        await asyncio.Event().wait()
    finally:
        gone.set()


async def test_json_goes_there_and_back() -> None:
    async def echo(request: web.Request) -> web.Response:
        assert request.content_type == "application/json"
        return web.json_response({"path": request.path, "body": await request.json()})

    async with client(echo) as http:
        assert await http.post_json("/v1/completions", {"prompt": [1, 2]}) == {
            "path": "/v1/completions",
            "body": {"prompt": [1, 2]},
        }


async def test_an_answer_without_a_body_is_none_and_text_is_text() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="" if request.path == "/health" else "a 1\n")

    async with client(answer) as http:
        assert await http.get_json("/health") is None
        assert await http.get_text("/metrics") == "a 1\n"


async def test_a_stream_gives_its_events_and_leaves_the_connection_for_the_next() -> None:
    ports = set()

    async def stream(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername"))
        return await send_events(request, '{"id": 1}', '{"id": 2}', "[DONE]")

    async with client(stream) as http:
        for _ in range(3):
            assert await collect(http) == [{"id": 1}, {"id": 2}]
    assert len(ports) == 1


async def test_events_are_read_however_they_are_cut_and_ended() -> None:
    text = ': ping\r\n\r\nevent: x\r\ndata: {"a":\r\ndata: 1}\r\n\r\ndata:{"b": "ü"}\n\ndata: [DONE]\n\n'.encode()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for at in range(len(text)):
            await response.write(text[at : at + 1])
        return response

    async with client(stream) as http:
        assert await collect(http) == [{"a": 1}, {"b": "ü"}]


async def test_leaving_a_stream_is_seen_by_the_server() -> None:
    gone = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        await send_events(request, '{"id": 1}')
        await until_gone(gone)
        raise AssertionError

    async with client(stream) as http:
        async with aclosing(http.stream("/generate", {})) as events:
            assert await anext(events) == {"id": 1}
            assert not gone.is_set()
        async with asyncio.timeout(PATIENCE):
            await gone.wait()


async def test_cancelling_a_reader_is_seen_by_the_server() -> None:
    gone, begun = asyncio.Event(), asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        await send_events(request)
        begun.set()
        await until_gone(gone)
        raise AssertionError

    async with client(stream) as http:
        reader = asyncio.create_task(collect(http))
        await begun.wait()
        reader.cancel()
        async with asyncio.timeout(PATIENCE):
            await gone.wait()


@pytest.mark.parametrize(
    ("status", "body", "kind", "what", "where"),
    [
        (
            400,
            {"error": {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}},
            RequestError,
            "too long",
            "prompt",
        ),
        (400, {"object": "error", "message": "no such id", "param": None, "code": 400}, RequestError, "no such id", ""),
        (
            422,
            {"detail": [{"type": "missing", "loc": ["body", "sampling_params", "n"], "msg": "Field required"}]},
            RequestError,
            "Field required",
            "sampling_params.n",
        ),
        (
            400,
            {"error": {"message": "1 validation error:\n  not an integer", "param": "body.max_tokens"}},
            RequestError,
            "1 validation error: not an integer",
            "max_tokens",
        ),
        (400, {"detail": "no input"}, RequestError, "no input", ""),
        (413, "<p>too large</p>", RequestError, "<p>too large</p>", ""),
        (400, "", RequestError, "status 400", ""),
    ],
)
async def test_what_a_server_refuses_is_the_requests_fault_in_its_words(
    status: int, body: Any, kind: type[PddError], what: str, where: str
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

    async with client(refuse) as http:
        for call in (http.post_json("/v1/completions", {}), collect(http)):
            with pytest.raises(kind) as caught:
                await call
            assert what in caught.value.what
            assert caught.value.where == where


@pytest.mark.parametrize(
    ("status", "kind", "why"),
    [
        (500, EngineError, "out of memory"),
        (503, EngineError, "out of memory"),
        (404, EngineError, "out of memory"),
        (401, EngineError, "out of memory"),
        (302, EngineError, "out of memory"),
        (429, CapacityError, "out of memory"),
    ],
)
async def test_what_is_no_requests_fault_is_the_engines(status: int, kind: type[PddError], why: str) -> None:
    async def fail(request: web.Request) -> web.Response:
        headers = {"Location": "/elsewhere"} if status == 302 else {}
        return web.json_response({"error": {"message": why}}, status=status, headers=headers)

    async with client(fail) as http:
        with pytest.raises(kind) as caught:
            await http.post_json("/generate", {})
        assert caught.value.why == why
        assert caught.value.where == f"{http.url}/generate"


async def test_an_error_that_comes_as_an_event_is_raised() -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        code = "400" if request.path == "/user" else "500"
        return await send_events(request, '{"id": 1}', f'{{"error": {{"message": "stopped", "code": {code}}}}}')

    async with client(stream) as http:
        for path, kind in (("/user", RequestError), ("/server", EngineError)):
            events = http.stream(path, {})
            assert await anext(events) == {"id": 1}
            with pytest.raises(kind, match="stopped"):
                await anext(events)


async def test_a_server_that_is_not_there_is_named() -> None:
    http = HttpClient(f"http://127.0.0.1:{free_port()}")
    try:
        with pytest.raises(EngineError, match="cannot be reached") as caught:
            await http.get_text("/health")
        assert caught.value.where == f"{http.url}/health"
        assert caught.value.why
    finally:
        await http.close()


@pytest.mark.parametrize("after", ["", "data: {}\n\n"])
async def test_a_connection_that_breaks_is_the_engines_failure(after: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{len(after):x}\r\n{after}\r\n".encode())
        await writer.drain()
        writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1")
    http = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        with pytest.raises(EngineError):
            await collect(http)
    finally:
        await http.close()
        server.close()


async def test_a_stream_that_ends_without_its_last_event_was_broken_off() -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        return await send_events(request, '{"id": 1}')

    async with client(stream) as http:
        with pytest.raises(EngineError, match="broke off"):
            await collect(http)


async def test_a_silent_stream_ends_by_its_idle_time_and_a_silent_answer_by_its_own() -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":
            await send_events(request, "{}")
        await asyncio.Event().wait()
        raise AssertionError

    async with client(silent, timeout=0.2, idle_timeout=0.2) as http:
        with pytest.raises(EngineError, match="does not answer"):
            await http.get_text("/health")
        with pytest.raises(EngineError, match="does not answer"):
            await collect(http)
    async with client(silent) as http:
        with pytest.raises(EngineError, match="does not answer"):
            await http.post_json("/v1/completions", {}, timeout=0.2)


async def test_what_grows_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BODY", 1 << 16)
    monkeypatch.setattr(module, "MAX_EVENT", 1 << 16)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100):
            await response.write(b"data: " if request.path == "/lines" else b"data" * 4096)
            await response.write(b"\n" if request.path == "/lines" else b"")
        return response

    async with client(endless) as http:
        with pytest.raises(EngineError, match="longer than 65536 bytes"):
            await http.get_text("/metrics")
        with pytest.raises(EngineError, match="longer than 65536 bytes"):
            await collect(http)


async def test_what_is_not_json_is_shown() -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        return await send_events(request, "<html>")

    async with client(stream) as http:
        with pytest.raises(EngineError, match="not JSON") as caught:
            await collect(http)
        assert "<html>" in caught.value.why


async def test_a_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def well(request: web.Request) -> web.Response:
        return web.Response(text="well")

    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    async with client(well) as http:
        assert await http.get_text("/health") == "well"


async def test_an_address_elsewhere_must_be_https() -> None:
    with pytest.raises(EngineError) as caught:
        HttpClient("http://engine.example:8000")
    assert "leaves this host in the clear" in caught.value.why


async def test_closing_ends_what_runs() -> None:
    begun = asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with client(silent) as http:
        asking = asyncio.create_task(http.post_json("/generate", {}))
        await begun.wait()
        await http.close()
        with pytest.raises(EngineError):
            await asking
        with pytest.raises(EngineError):
            await http.get_text("/health")
