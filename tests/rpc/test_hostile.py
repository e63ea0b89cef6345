"""Who is not to be let in costs little, is told of in the log, and keeps nobody out."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd_runtime.errors import CapacityError, EngineError, PddError
from pdd_runtime.rpc import Greeting, Heartbeat, RpcContext, RpcServer, SparseLog, Tls, caller, sparse
from pdd_runtime.rpc.frames import Call, Hello, encode, pack
from pdd_runtime.testing.strangers import STRANGERS, Door, Stranger, at, crowd, framed, strangers
from tests.certificates import Issuer
from tests.rpc.any_frames import frames
from tests.waiting import PATIENCE, until

Make = Callable[..., Greeting]


async def echo(params: str, context: RpcContext) -> str:
    return params


async def count(params: int, context: RpcContext) -> AsyncGenerator[int, None]:
    for number in range(min(params, 1000)):
        yield number


def serving(server: RpcServer) -> RpcServer:
    server.unary("echo", str, echo)
    server.stream("count", int, count)
    return server


@pytest.fixture
async def door(greeting: Make, tls: Tls | None, tmp_path: Path) -> AsyncIterator[Door]:
    server = serving(RpcServer(greeting(), tls=tls, greeting_timeout=0.5))
    other = None if tls is None else Issuer("g", tmp_path / "other").tls("dc-a")
    yield Door(await server.start("127.0.0.1"), greeting("frontend/0"), tls, other)
    await server.close()


async def is_open(door: Door) -> None:
    connection = await door.connect()
    assert await connection.call("echo", "hello", str, timeout=PATIENCE) == "hello"
    await connection.close()


@pytest.mark.parametrize(
    ("tls", "stranger"),
    [(tls, each) for tls in ("plain", "tls") for each in STRANGERS if tls == "tls" or not each.needs_tls],
    indirect=["tls"],
    ids=lambda value: value.name if isinstance(value, Stranger) else value,
)
async def test_a_stranger_is_refused_with_a_line_in_the_log_and_others_are_served(
    stranger: Stranger, door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    assert stranger in strangers(door)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = await stranger.come(door)
    await is_open(door)
    await until(lambda: stranger.is_in(caplog.text))
    assert "hush" not in caplog.text + told
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "in KiB"


async def test_a_thousand_who_say_nothing_keep_nobody_out_and_do_not_fill_the_log(
    greeting: Make, tls: Tls | None, caplog: pytest.LogCaptureFixture
) -> None:
    server = serving(RpcServer(greeting(), tls=tls, max_strangers=64))
    door = Door(await server.start("127.0.0.1"), greeting("frontend/0"), tls)
    async with crowd(door.address, 1000) as idle:
        assert len(idle) == 1000
        await until(lambda: len(server._channels) + len(server._shaking) <= 65)
        await is_open(door)
    await until(lambda: not server._channels and not server._shaking)
    assert len(server._strangers) == 0
    assert "has not greeted, and 64 others have come" in caplog.text
    assert len(caplog.records) < 100
    await is_open(door)
    await server.close()


FEW_FILES = """
import asyncio
import resource

import uvloop

from pdd_runtime.rpc import Greeting, RpcServer
from tests.rpc.test_hostile import serving

resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))

async def main():
    server = serving(RpcServer(Greeting(graph="g", secret="hush-hush", cluster="dc-a", name="main/0")))
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.Event().wait()

uvloop.run(main())
"""


def resident(process: asyncio.subprocess.Process) -> int:
    """Bytes of memory that it has."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def test_a_process_that_may_open_few_files_outlives_a_crowd_and_all_others_in_little_memory(
    greeting: Make,
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FEW_FILES, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        assert process.stdout is not None
        endpoint = (await asyncio.wait_for(process.stdout.readline(), PATIENCE)).decode().strip()
        door = Door(endpoint, greeting("frontend/0"))
        known = await door.connect()
        before = resident(process)
        for stranger in strangers(door) * 3:
            if "no greeting" not in stranger.logs:  # Those take their time.
                await stranger.come(door)
        async with crowd(door.address, 400):
            await is_open(door)
            assert await known.call("echo", "still", str, timeout=PATIENCE) == "still"
        await is_open(door)
        assert resident(process) - before < 16 << 20
        await known.close()
    finally:
        process.kill()
        await process.wait()


async def test_one_who_greets_when_all_places_are_taken_is_told_so(
    greeting: Make, caplog: pytest.LogCaptureFixture
) -> None:
    server = serving(RpcServer(greeting(), max_connections=2))
    door = Door(await server.start("127.0.0.1"), greeting("frontend/0"))
    first, second = await door.connect(), await door.connect()
    with pytest.raises(CapacityError, match="has 2 connections"):
        await door.connect()
    assert "has 2 connections" in caplog.text
    await second.close()
    await until(lambda: len(server._callers) == 1)
    await is_open(door)
    await first.close()
    await server.close()


async def test_one_who_asks_on_and_on_and_reads_no_answer_is_cut_off(
    greeting: Make, tls: Tls | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller, "MOST_UNREAD", 1 << 20)
    server = serving(RpcServer(greeting(), tls=tls))
    door = Door(await server.start("127.0.0.1"), greeting("frontend/0"), tls)
    call = encode(Call(1, "none" * 1000, pack(None), None, False))
    async with at(door) as line:
        await line.say(encode(Hello(door.greeting)))
        await line.hear()
        with suppress(ConnectionError):
            for _ in range(100_000):
                await line.say(call)
    await until(lambda: "goes on asking and reads no answer" in caplog.text)
    await is_open(door)
    await server.close()


async def test_no_error_tells_a_client_a_secret(greeting: Make) -> None:
    server = RpcServer(greeting(), hide=["t0p-secret", "on"])

    async def fail(params: str, context: RpcContext) -> str:
        raise EngineError("hush-hush is on", where=params, why="token t0p-secret", fix="use another than t0p-secret")

    async def crash(params: str, context: RpcContext) -> str:
        raise ValueError("t0p-secret")

    server.unary("fail", str, fail)
    server.unary("crash", str, crash)
    connection = await Door(await server.start("127.0.0.1"), greeting("frontend/0")).connect()
    for method, said in (("fail", "here: *** is on\n  why: token ***\n  fix: use another than ***"), ("crash", "***")):
        with pytest.raises(PddError) as caught:
            await connection.call(method, "here", str, timeout=PATIENCE)
        assert said in str(caught.value)
        assert "t0p-secret" not in str(caught.value)
    await connection.close()
    await server.close()


async def test_one_who_greets_and_falls_silent_is_told_of(greeting: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = serving(RpcServer(greeting(), heartbeat=Heartbeat(interval=0.1, dead_after=1.0)))
    door = Door(await server.start("127.0.0.1"), greeting("frontend/7"))
    async with crowd(door.address, 1, encode(Hello(door.greeting))):
        await until(lambda: "frontend/7 ended" in caplog.text)
    assert "fell silent" in caplog.text
    await server.close()


def test_whatever_a_peer_of_the_graph_sends_the_server_serves_the_next(caplog: pytest.LogCaptureFixture) -> None:
    """Frames of any kind in any order, what is none among them, before and behind a greeting."""
    mine = Greeting(graph="g", secret="hush", cluster="dc-a", name="main/0")
    calls = st.builds(
        Call,
        st.integers(0, 5),
        st.sampled_from(["echo", "count", "none"]),
        st.sampled_from([pack("text"), pack(5), pack(None)]),
        st.none() | st.floats(),
        st.booleans(),
    )
    parts = st.one_of((frames | calls).map(encode), st.binary(max_size=40).map(framed), st.binary(max_size=40))

    async def serve() -> tuple[RpcServer, Door]:
        server = serving(RpcServer(mine))
        return server, Door(await server.start("127.0.0.1"), mine)

    async def send(address: tuple[str, int], data: list[bytes], *, greets: bool) -> None:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(*address)
            writer.write((encode(Hello(mine)) if greets else b"") + b"".join(data))
            with suppress(OSError):
                writer.write_eof()
                while await reader.read(1 << 16):
                    pass
            writer.close()

    async def end(server: RpcServer, door: Door) -> None:
        await until(lambda: not server._channels)
        assert server.calls == 0
        await is_open(door)
        await server.close()

    with asyncio.Runner() as runner:
        server, door = runner.run(serve())

        @given(st.lists(parts, max_size=8), st.booleans())
        def attack(data: list[bytes], greets: bool) -> None:
            runner.run(send(door.address, data, greets=greets))

        attack()
        runner.run(end(server, door))
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_flood_of_lines_is_thinned_out_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = 0.0
    monkeypatch.setattr(sparse, "now", lambda: time)
    lines = SparseLog(logging.getLogger("flood"), burst=3, every=2.0)
    for number in range(10):
        lines.warning("refused: %d", number)
    time = 2.0
    lines.warning("refused: %s", "later")
    assert caplog.messages == [
        "refused: 0",
        "refused: 1",
        "refused: 2",
        "refused: later (7 lines like it were left out before)",
    ]
