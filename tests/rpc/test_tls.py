"""Who is let in by a certificate, and who is not."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pdd_runtime.errors import RpcError
from pdd_runtime.rpc import Greeting, RpcContext, RpcServer, Tls, connect
from pdd_runtime.rpc.frames import Hello, encode
from tests.certificates import Issuer
from tests.waiting import PATIENCE, until

Make = Callable[..., Greeting]


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer("g", tmp_path / "ours")


@pytest.fixture
def tls(issuer: Issuer) -> Tls:
    return issuer.tls("dc-a")


@pytest.fixture
async def endpoint(server: RpcServer) -> AsyncIterator[str]:
    async def echo(params: str, context: RpcContext) -> str:
        return params

    server.unary("echo", str, echo)
    yield await server.start("127.0.0.1")
    assert not server._shaking, "no handshake is left behind"


async def refused(endpoint: str, greeting: Greeting, tls: Tls | None) -> str:
    with pytest.raises(RpcError) as caught:
        await connect(endpoint, greeting, tls=tls, timeout=PATIENCE)
    assert "hush" not in str(caught.value)
    return str(caught.value)


async def test_what_crosses_is_encrypted(server: RpcServer, greeting: Make, tls: Tls, endpoint: str) -> None:
    seen = bytearray()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                seen.extend(data)
                writer.write(data)
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = endpoint.split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    proxy = await asyncio.start_server(between, "127.0.0.1", 0)
    host, port = proxy.sockets[0].getsockname()
    connection = await connect(f"{host}:{port}", greeting("frontend/0"), tls=tls, timeout=PATIENCE)
    text = "a secret text " * 100_000
    assert await connection.call("echo", text, str, timeout=PATIENCE) == text
    await connection.close()
    proxy.close()
    assert len(seen) > 2 * len(text)
    for plain in (b"a secret text", b"hush-hush", b"frontend/0", b"echo"):
        assert plain not in seen


async def test_a_certificate_of_another_ca_is_refused_by_both(
    greeting: Make, endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Issuer("g", tmp_path / "other")
    assert "its certificate: self-signed certificate" in await refused(endpoint, greeting("f"), other.tls("dc-a"))
    await until(lambda: "refused this side's certificate or protocol: unknown ca" in caplog.text)
    assert re.search(r"connection refused: 127\.0\.0\.1:\d+: no TLS", caplog.text)


async def test_the_server_refuses_one_of_another_ca_that_does_not_mind(
    greeting: Make, endpoint: str, issuer: Issuer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thief = Issuer("g", tmp_path / "other").thief("dc-a", issuer)
    said = await refused(endpoint, greeting("f"), thief)
    assert "the peer refused this side's certificate or protocol: unknown ca" in said
    await until(lambda: "connection refused" in caplog.text)
    await until(lambda: "its certificate: " in caplog.text)


async def test_one_without_a_certificate_is_refused(
    greeting: Make, endpoint: str, issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context(cafile=issuer.directory / "ca.pem")
    context.check_hostname = False
    host, port = endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    writer.write(encode(Hello(greeting("f"))))
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
        await reader.read()
    writer.close()
    await until(lambda: "it has no certificate" in caplog.text)


@pytest.mark.parametrize("days", [-1.0])
async def test_an_expired_certificate_is_not_even_shown(issuer: Issuer, days: float) -> None:
    issuer.authority.issue(issuer.directory, "dc-b", days=days)
    files = {kind: issuer.directory / f"dc-b.{end}" for kind, end in (("cert", "pem"), ("key", "key"))}
    with pytest.raises(RpcError, match=r"dc-b\.pem: this certificate is not to be used\n.*has expired"):
        Tls(ca=issuer.directory / "ca.pem", **files, graph="g", cluster="dc-b")


async def test_a_certificate_that_expires_while_its_process_runs_is_refused_from_then_on(
    greeting: Make, endpoint: str, issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    issuer.authority.issue(issuer.directory, "dc-a", days=8 / 86400)
    end = time.time() + 8
    cert, key = issuer.directory / "dc-a.pem", issuer.directory / "dc-a.key"
    short = Tls(ca=issuer.directory / "ca.pem", cert=cert, key=key, graph="g", cluster="dc-a")
    await until(lambda: time.time() > end + 1)
    said = await refused(endpoint, greeting("f"), short)
    assert "the peer refused this side's certificate or protocol: certificate expired" in said
    await until(lambda: "its certificate: certificate has expired" in caplog.text)


async def test_another_graph_is_refused_by_its_certificate_though_the_ca_is_the_same(
    greeting: Make, endpoint: str, issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    assert "pdd://" in await refused(endpoint, greeting("f"), issuer.tls("dc-a", graph="h"))
    await until(lambda: "connection refused" in caplog.text)
    await until(lambda: "it names pdd://h/dc-a; the side that refuses it is pdd://g/dc-a" in caplog.text)


async def test_a_process_that_says_it_is_in_another_cluster_than_its_certificate_does_is_refused(
    greeting: Make, endpoint: str, issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    said = await refused(endpoint, greeting("f", cluster="dc-a"), issuer.tls("dc-b"))
    assert "not who they say they are: in cluster 'dc-a', by a certificate of 'dc-b'" in said
    await until(lambda: "refused" in caplog.text)
    connection = await connect(endpoint, greeting("f", cluster="dc-b"), tls=issuer.tls("dc-b"), timeout=PATIENCE)
    await connection.close()


async def test_plain_text_and_tls_do_not_meet_and_both_sides_say_so(
    greeting: Make, endpoint: str, tls: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    assert "no TLS connection with the peer" in await refused(endpoint, greeting("f"), None)
    await until(lambda: "it does not speak TLS" in caplog.text)
    plain = RpcServer(greeting("plain/0"))
    assert "it does not speak TLS" in await refused(await plain.start("127.0.0.1"), greeting("f"), tls)
    await until(lambda: "the peer speaks TLS, and this side plain text" in caplog.text)
    await plain.close()


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"])
async def test_a_handshake_that_does_not_end_ends_at_its_deadline_and_holds_up_nobody(
    greeting: Make, tls: Tls, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = RpcServer(greeting(), tls=tls, greeting_timeout=1.0)
    host, port = (await server.start("127.0.0.1")).split(":")
    slow = [await asyncio.open_connection(host, int(port)) for _ in range(50)]
    for _, writer in slow:
        writer.write(said)
    connection = await connect(f"{host}:{port}", greeting("f"), tls=tls, timeout=PATIENCE)
    await connection.close()
    for reader, writer in slow:
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        writer.close()
    assert caplog.text.count("no TLS handshake in 1 s") == 50
    await server.close()


async def test_a_server_that_closes_ends_handshakes_too(greeting: Make, tls: Tls) -> None:
    server = RpcServer(greeting(), tls=tls, greeting_timeout=3600)
    host, port = (await server.start("127.0.0.1")).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await until(lambda: bool(server._shaking))
    await server.close()
    with suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
    writer.close()


async def test_only_tls_1_3_is_spoken(endpoint: str, tls: Tls) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    host, port = endpoint.split(":")
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version|unsupported"):
        await asyncio.open_connection(host, int(port), ssl=old)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ca": "nothing.pem"}, "the CA's certificate cannot be read"),
        ({"key": "ca.key"}, "the key is not that of the certificate"),
        ({"cert": "nothing.pem"}, "the certificate or its key cannot be read"),
        ({"graph": "h"}, "this certificate is not of this graph"),
        ({"cluster": "dc-b"}, 'this certificate is of cluster "dc-a"'),
    ],
)
def test_files_that_do_not_fit_are_told_before_anything_is_said(
    issuer: Issuer, change: dict[str, str], said: str
) -> None:
    issuer.authority.issue(issuer.directory, "dc-a")
    fields = {"ca": "ca.pem", "cert": "dc-a.pem", "key": "dc-a.key", "graph": "g", "cluster": "dc-a"} | change
    paths = {kind: issuer.directory / fields.pop(kind) for kind in ("ca", "cert", "key")}
    with pytest.raises(RpcError, match=said):
        Tls(**paths, **fields)
