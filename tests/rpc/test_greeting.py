from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, PddError, RpcError
from pdd_runtime.rpc import Greeting, RpcServer, connect
from pdd_runtime.rpc.greeting import PROTOCOL

Make = Callable[..., Greeting]


@pytest.fixture
def tls() -> None:
    """What is greeted here is a server in clear."""


async def refused(server: RpcServer, theirs: Greeting) -> str:
    """What the client reads when it greets so."""
    endpoint = await server.start("127.0.0.1")
    with pytest.raises(RpcError) as caught:
        await connect(endpoint, theirs)
    assert type(caught.value) is RpcError
    assert "hush" not in str(caught.value)
    return str(caught.value)


async def test_both_sides_learn_who_the_other_is_but_keep_no_secret(server: RpcServer, greeting: Make) -> None:
    seen: list[Greeting] = []

    async def whoami(params: int, context: object) -> None:
        seen.append(context.peer)  # type: ignore[attr-defined]

    server.unary("whoami", int, whoami)
    server.greeting = greeting("main/0", epoch="e7", fingerprint="f1")
    connection = await connect(await server.start("127.0.0.1"), greeting("relay/1", epoch="e8"))
    await connection.call("whoami", 0, type(None), timeout=5)
    assert connection.peer == greeting("main/0", epoch="e7", fingerprint="f1", secret="")
    assert seen == [greeting("relay/1", epoch="e8", secret="")]
    await connection.close()


async def test_another_protocol_is_refused_naming_both(server: RpcServer, greeting: Make) -> None:
    assert f"999 != {PROTOCOL}" in await refused(server, greeting(protocol=999))


async def test_another_graph_is_refused_naming_both(server: RpcServer, greeting: Make) -> None:
    assert "'other' != 'g'" in await refused(server, greeting(graph="other"))


async def test_another_secret_is_refused_without_telling_either(server: RpcServer, greeting: Make) -> None:
    assert "do not share a secret" in await refused(server, greeting(secret="hush-other"))


async def test_a_secret_beyond_ascii_is_compared_as_well(server: RpcServer, greeting: Make) -> None:
    assert "do not share a secret" in await refused(server, greeting(secret="hush-ü"))


async def test_two_fingerprints_are_refused_naming_both(server: RpcServer, greeting: Make) -> None:
    server.greeting = greeting(fingerprint="smollm2-1111")
    message = await refused(server, greeting("relay/0", fingerprint="smollm2-2222"))
    assert "smollm2-2222 != smollm2-1111" in message
    assert "relay/0" in message
    assert "main/0" in message


async def test_an_unknown_fingerprint_fits_any_and_may_be_learned_later(server: RpcServer, greeting: Make) -> None:
    endpoint = await server.start("127.0.0.1")
    early = await connect(endpoint, greeting(fingerprint="f2"))
    server.greeting = greeting(fingerprint="f1")
    assert not early.closed
    with pytest.raises(RpcError, match="f2 != f1"):
        await connect(endpoint, greeting(fingerprint="f2"))
    unknown = await connect(endpoint, greeting())
    for connection in (early, unknown):
        await connection.close()


async def test_a_client_that_does_not_know_its_graph_yet_is_let_in_by_the_secret(
    server: RpcServer, greeting: Make
) -> None:
    connection = await connect(await server.start("127.0.0.1"), greeting(graph=""))
    assert connection.peer.graph == "g"
    await connection.close()


async def test_a_greeting_is_printed_without_its_secret(greeting: Make) -> None:
    assert "hush" not in f"{greeting()} {greeting()!r} {[greeting()]}"


async def test_nobody_listening_is_a_connection_lost_that_names_the_endpoint(greeting: Make) -> None:
    listener = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    with pytest.raises(ConnectionLost, match=f"127.0.0.1:{port}"):
        await connect(f"127.0.0.1:{port}", greeting())


@pytest.mark.parametrize("endpoint", ["nowhere", ":1", "host:port"])
async def test_what_is_no_endpoint_is_refused(endpoint: str, greeting: Make) -> None:
    with pytest.raises(RpcError, match="no endpoint"):
        await connect(endpoint, greeting())


async def test_a_server_that_never_greets_is_given_up_at_the_timeout(greeting: Make) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    with pytest.raises(DeadlineExceeded, match="no greeting"):
        await connect(f"127.0.0.1:{port}", greeting(), timeout=0.2)
    listener.close()


async def first_bytes(endpoint: str, data: bytes) -> bytes:
    """Write them as a stranger, and read until the server closes."""
    host, port = endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff" + bytes(1000),
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x00",
        (65 * 1024).to_bytes(4, "big") + bytes(65 * 1024),
        b"\x00\x00\x00\x03\x92\x07\x01",
    ],
    ids=["http", "oversize", "garbage", "empty", "over the greeting's limit", "a frame out of turn"],
)
async def test_a_first_frame_that_is_no_greeting_is_refused_and_the_server_lives_on(
    data: bytes, server: RpcServer, greeting: Make
) -> None:
    endpoint = await server.start("127.0.0.1")
    answer = await first_bytes(endpoint, data)
    assert msgspec.msgpack.decode(answer[4:])[0] == 9
    connection = await connect(endpoint, greeting())
    await connection.close()


async def test_a_client_that_does_not_greet_is_cut_off(greeting: Make) -> None:
    server = RpcServer(greeting(), greeting_timeout=0.1)
    endpoint = await server.start("127.0.0.1")
    assert b"no greeting came" in await first_bytes(endpoint, b"")
    await server.close()


async def test_a_port_that_is_taken_is_an_error_that_says_so(server: RpcServer, greeting: Make) -> None:
    endpoint = await server.start("127.0.0.1")
    with pytest.raises(PddError, match=f"cannot listen on {endpoint}"):
        await RpcServer(greeting()).start("127.0.0.1", int(endpoint.split(":")[1]))
