from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from pdd_runtime.clock import now
from pdd_runtime.errors import (
    Cancelled,
    CapacityError,
    ConnectionLost,
    DeadlineExceeded,
    EngineError,
    RemoteError,
    RpcError,
)
from pdd_runtime.rpc import Greeting, RpcConnection, RpcContext, RpcServer, connect
from pdd_runtime.rpc.frames import FRAME_LIMIT
from tests.waiting import PATIENCE, until

Dial = Callable[..., Awaitable[RpcConnection]]


class Sum(msgspec.Struct, frozen=True):
    a: int
    b: int


async def echo(params: bytes, context: RpcContext) -> bytes:
    return params


async def test_a_call_gets_its_answer_in_its_type(server: RpcServer, dial: Dial) -> None:
    async def add(params: Sum, context: RpcContext) -> Sum:
        return Sum(params.a + params.b, 0)

    server.unary("add", Sum, add)
    assert await (await dial()).call("add", Sum(1, 2), Sum, timeout=5) == Sum(3, 0)


async def test_a_thousand_calls_at_once_share_one_connection(server: RpcServer, dial: Dial) -> None:
    everybody = asyncio.Barrier(1000)

    async def together(params: int, context: RpcContext) -> int:
        await everybody.wait()
        return params * 2

    server.unary("together", int, together)
    connection = await dial()
    answers = await asyncio.gather(*(connection.call("together", i, int, timeout=PATIENCE) for i in range(1000)))
    assert answers == [2 * i for i in range(1000)]
    assert server.calls == 0


async def test_calls_beyond_the_limit_of_a_connection_are_refused_and_the_rest_served(
    greeting: Callable[..., Greeting],
) -> None:
    server = RpcServer(greeting(), max_calls=3)
    gate = asyncio.Event()

    async def wait(params: None, context: RpcContext) -> str:
        await gate.wait()
        return "done"

    server.unary("wait", type(None), wait)
    connection = await connect(await server.start("127.0.0.1"), greeting())
    waiting = [asyncio.create_task(connection.call("wait", None, str, timeout=5)) for _ in range(3)]
    await until(lambda: server.calls == 3)
    with pytest.raises(CapacityError, match="3 calls in flight"):
        await connection.call("wait", None, str, timeout=5)
    gate.set()
    assert await asyncio.gather(*waiting) == ["done"] * 3
    assert await connection.call("wait", None, str, timeout=5) == "done"
    await connection.close()
    await server.close()


async def test_an_error_of_ours_keeps_its_type_and_every_field(server: RpcServer, dial: Dial) -> None:
    async def fail(params: None, context: RpcContext) -> None:
        raise EngineError("no such model", where="main/0", why="the file is gone", fix="download it")

    server.unary("fail", type(None), fail)
    with pytest.raises(EngineError) as caught:
        await (await dial()).call("fail", None, int, timeout=5)
    error = caught.value
    assert (error.what, error.where, error.why, error.fix) == (
        "no such model",
        "main/0",
        "the file is gone",
        "download it",
    )


async def test_a_crash_keeps_its_type_and_message_and_leaves_its_traceback_in_the_servers_log(
    server: RpcServer, dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(params: None, context: RpcContext) -> None:
        raise KeyError("layer 7")

    server.unary("crash", type(None), crash)
    with caplog.at_level(logging.ERROR), pytest.raises(RemoteError, match="KeyError: 'layer 7'"):
        await (await dial()).call("crash", None, int, timeout=5)
    assert "crash, called by frontend/0" in caplog.text
    assert "Traceback" in caplog.text


async def test_an_enormous_error_message_arrives_cut(server: RpcServer, dial: Dial) -> None:
    async def fail(params: None, context: RpcContext) -> None:
        raise EngineError("x" * (FRAME_LIMIT + 1))

    server.unary("fail", type(None), fail)
    with pytest.raises(EngineError, match="xxx"):
        await (await dial()).call("fail", None, int, timeout=5)


async def test_an_unknown_method_and_one_of_the_other_kind_are_refused_by_name(server: RpcServer, dial: Dial) -> None:
    server.unary("echo", bytes, echo)
    connection = await dial()
    with pytest.raises(RpcError, match=r"no method 'engine\.fly'"):
        await connection.call("engine.fly", None, int, timeout=5)
    with pytest.raises(RpcError, match="echo is unary"):
        await anext(connection.stream("echo", b"", int, timeout=5))
    assert not connection.closed


async def test_parameters_of_another_type_are_refused_by_name(server: RpcServer, dial: Dial) -> None:
    server.unary("echo", bytes, echo)
    with pytest.raises(RpcError, match="the parameters of echo cannot be read"):
        await (await dial()).call("echo", 3, bytes, timeout=5)


async def test_a_result_of_another_type_is_refused_by_name(server: RpcServer, dial: Dial) -> None:
    server.unary("echo", bytes, echo)
    with pytest.raises(RpcError, match="the result of echo cannot be read"):
        await (await dial()).call("echo", b"abc", int, timeout=5)


async def test_the_deadline_travels_and_the_handler_is_cancelled_at_it(server: RpcServer, dial: Dial) -> None:
    ended = asyncio.Event()
    left: list[float | None] = []

    async def sleep(params: None, context: RpcContext) -> None:
        left.append(context.remaining)
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    server.unary("sleep", type(None), sleep)
    connection = await dial()
    began = now()
    with pytest.raises(DeadlineExceeded, match="sleep"):
        await connection.call("sleep", None, type(None), timeout=0.5)
    assert now() - began > 0.48
    await asyncio.wait_for(ended.wait(), PATIENCE)
    assert left[0] is not None
    assert 0 < left[0] <= 0.5
    assert server.calls == 0


async def test_a_timeout_error_of_the_handler_is_not_taken_for_the_deadline(server: RpcServer, dial: Dial) -> None:
    async def fail(params: None, context: RpcContext) -> None:
        raise TimeoutError("of its own")

    server.unary("fail", type(None), fail)
    with pytest.raises(RemoteError, match="TimeoutError: of its own"):
        await (await dial()).call("fail", None, int, timeout=5)


async def test_cancelling_a_call_cancels_its_handler_and_the_server_forgets_it(server: RpcServer, dial: Dial) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def sleep(params: None, context: RpcContext) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    server.unary("sleep", type(None), sleep)
    connection = await dial()
    task = asyncio.create_task(connection.call("sleep", None, type(None), timeout=30))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), PATIENCE)
    await until(lambda: server.calls == 0)


async def test_a_call_cancelled_before_its_handler_began_is_forgotten_too(server: RpcServer, dial: Dial) -> None:
    server.unary("echo", bytes, echo)
    connection = await dial()
    for _ in range(100):
        task = asyncio.create_task(connection.call("echo", b"", bytes, timeout=30))
        await asyncio.sleep(0)  # Call and Cancel leave in one write, and arrive in one tick.
        task.cancel()
        await asyncio.wait([task])
    assert await connection.call("echo", b"x", bytes, timeout=5) == b"x"
    assert server.calls == 0


async def test_a_handler_that_is_cancelled_by_its_own_side_says_so(server: RpcServer, dial: Dial) -> None:
    async def give_up(params: None, context: RpcContext) -> None:
        raise asyncio.CancelledError

    server.unary("give_up", type(None), give_up)
    with pytest.raises(Cancelled, match="give_up"):
        await (await dial()).call("give_up", None, int, timeout=5)


async def test_a_frame_that_is_too_big_fails_its_call_on_either_side_and_the_connection_lives_on(
    server: RpcServer, dial: Dial
) -> None:
    async def huge(params: int, context: RpcContext) -> bytes:
        return bytes(params)

    server.unary("echo", bytes, echo)
    server.unary("huge", int, huge)
    connection = await dial()
    with pytest.raises(RpcError, match=r"call frame of .* over the limit"):
        await connection.call("echo", bytes(FRAME_LIMIT), bytes, timeout=5)
    with pytest.raises(RpcError, match=r"result frame of .* over the limit"):
        await connection.call("huge", FRAME_LIMIT, bytes, timeout=5)
    assert len(await connection.call("huge", FRAME_LIMIT - 100, bytes, timeout=20)) == FRAME_LIMIT - 100
    assert server.calls == 0


async def test_a_result_that_cannot_be_encoded_is_a_crash_of_the_handler(server: RpcServer, dial: Dial) -> None:
    async def odd(params: None, context: RpcContext) -> object:
        return object()

    server.unary("odd", type(None), odd)
    with pytest.raises(RemoteError, match="TypeError"):
        await (await dial()).call("odd", None, int, timeout=5)


async def test_closing_the_server_ends_calls_with_its_reason(server: RpcServer, dial: Dial) -> None:
    ended = asyncio.Event()

    async def sleep(params: None, context: RpcContext) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    server.unary("sleep", type(None), sleep)
    connection = await dial()
    task = asyncio.create_task(connection.call("sleep", None, type(None), timeout=30))
    await until(lambda: server.calls == 1)
    await server.close()
    assert ended.is_set()
    with pytest.raises(ConnectionLost, match="main/0 is closing"):
        await task
    await asyncio.wait_for(connection.wait_closed(), PATIENCE)


async def test_two_methods_of_one_name_are_refused(server: RpcServer) -> None:
    server.unary("echo", bytes, echo)
    with pytest.raises(ValueError, match="two methods are named echo"):
        server.unary("echo", bytes, echo)
