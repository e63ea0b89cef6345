"""HTTPS: who does not come to the end of the handshake holds no place."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from pdd_runtime.errors import GraphError
from pdd_runtime.frontend import handshake, server
from pdd_runtime.graph.models import FrontendTls
from pdd_runtime.pipeline import Finish
from tests.certificates import Issuer
from tests.waiting import PATIENCE, until

Start = Callable[..., Awaitable[Any]]


@pytest.fixture
def tls(tmp_path: Path) -> FrontendTls:
    Issuer("g", tmp_path).tls("dc")
    return FrontendTls(cert=str(tmp_path / "g" / "dc.pem"), key=str(tmp_path / "g" / "dc.key"))


def client(url: str, tls: FrontendTls) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=tls.cert)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return httpx.AsyncClient(base_url=url, verify=context, timeout=PATIENCE)


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    at = urlsplit(url)
    return await asyncio.open_connection(at.hostname, at.port)


async def test_answers_stream_over_it(given: Start, tls: FrontendTls) -> None:
    served = await given(b"abc" * 1000, Finish("length", 0), tls=tls, context=10_000)
    async with client(served.url, tls) as http:
        for stream in (True, False, True):
            answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3000, "stream": stream})
            assert answer.status_code == 200
            assert answer.text.endswith("data: [DONE]\n\n") == stream


async def test_who_says_nothing_or_no_tls_is_told_in_the_log(
    given: Start, tls: FrontendTls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIME", 0.3)
    served = await given(tls=tls)
    silent, plain = await connect(served.url), await connect(served.url)
    plain[1].write(b"GET / HTTP/1.1\r\n\r\n")
    for reader, writer in (silent, plain):
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(reader.read(), return_exceptions=True)
        writer.close()
    await until(lambda: caplog.text.count("connection of 127.0.0.1 closed: no TLS handshake in 0.3 s") == 2)


async def test_many_that_do_not_shake_hands_keep_nobody_out(
    given: Start, tls: FrontendTls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "SHAKING", 4)
    served = await given(tls=tls)
    silent = [await connect(served.url) for _ in range(20)]
    async with client(served.url, tls) as http:
        assert (await http.get("/health")).status_code == 200
    assert "it waited the longest, and the place was needed" in caplog.text
    for _, writer in silent:
        writer.close()


async def _nothing(*_: object) -> None:
    """An application."""


def test_a_certificate_that_is_of_no_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("nonsense")
    tls = FrontendTls(cert=str(tmp_path / "cert.pem"), key=str(tmp_path / "no.key"))
    with pytest.raises(GraphError, match=r"spec\.frontend\.tls: the frontend's certificate cannot be used"):
        server.create_server(_nothing, tls=tls)
