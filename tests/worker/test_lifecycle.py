"""Promises of the worker process: how it starts, shows itself, and ends."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from pdd_runtime.errors import EngineError, PddError, RpcError, TransferError
from pdd_runtime.plugins.engine import (
    DecodeEvent,
    DecodeRequest,
    Extended,
    Load,
    PrefillEvent,
    PrefillRequest,
    Sampling,
    Stopped,
    TokenizerFiles,
)
from pdd_runtime.plugins.messages import Cached, Drain, Empty, FetchEvent, FetchRequest, RequestId, Seal, WatchEvent
from pdd_runtime.rpc import Greeting, connect
from tests.waiting import PATIENCE

GREEDY = Sampling(temperature=0)
PROMPT = tuple(range(40, 90))


def decode(request_id: str = "r", max_tokens: int = 1_000, hold: bool = False) -> DecodeRequest:
    return DecodeRequest(
        id=request_id, tokens=PROMPT, prompt_tokens=50, max_tokens=max_tokens, sampling=GREEDY, hold=hold
    )


async def test_a_worker_shows_itself_before_it_is_ready(cluster: Any) -> None:
    worker = await cluster.start("main", "spec.pools.main.engine.config.start_time=0.5", connect=False)
    starting = await worker.state("starting")
    assert (starting.role, starting.cluster, starting.pid) == ("main", "dc-b", worker.process.pid)
    assert starting.info is None
    ready = await worker.state("ready")
    assert ready.info is not None
    assert ready.transports == {}, "nobody fetches from main"
    connection = await worker.connect()
    assert connection.peer.fingerprint == ready.info.fingerprint
    assert connection.peer.epoch == worker.key.epoch
    with pytest.raises(RpcError, match="different models"):
        await connect(
            ready.endpoint,
            Greeting(graph="tested", secret="a secret of this test", cluster="dc-a", name="x", fingerprint="other"),
        )


async def test_a_source_of_kv_names_its_transports(cluster: Any) -> None:
    worker = await cluster.start("prefill")
    assert list(worker.member.transports) == ["tcp"]


async def test_every_method_answers(cluster: Any) -> None:
    worker = await cluster.start("main")
    connection = await worker.connect()
    assert (await connection.call("engine.load", Empty(), Load, timeout=PATIENCE)).blocks_total == 1024
    assert (await connection.call("engine.tokenizer", Empty(), TokenizerFiles, timeout=PATIENCE)).eos_token_ids == (
        257,
    )
    prefill = PrefillRequest(id="r", tokens=PROMPT, sampling=GREEDY)
    async with connection.stream("engine.prefill", prefill, PrefillEvent, timeout=PATIENCE) as events:
        assert len([event async for event in events]) == 2
    assert await connection.call("engine.cached", Cached(PROMPT), int, timeout=PATIENCE) == len(PROMPT)
    async with connection.stream("worker.watch", Empty(), WatchEvent, timeout=PATIENCE) as watching:
        first = await anext(watching)
        assert len(first.added) == 4
        async with connection.stream("engine.decode", decode(hold=True), DecodeEvent, timeout=PATIENCE) as events:
            assert isinstance(await anext(events), Extended)
            await connection.call("engine.seal", Seal("r", len(PROMPT) + 300), type(None), timeout=PATIENCE)
            last = None
            async for last in events:
                if isinstance(last, Stopped):
                    break
            assert last == Stopped("sealed", len(PROMPT) + 300)
            await connection.call("engine.cancel", RequestId("r"), type(None), timeout=PATIENCE)
            with pytest.raises(PddError, match="cancelled"):
                await anext(events)
        added = 0
        while added < 15:
            added += len((await anext(watching)).added)
    fetch = FetchRequest(id="r", tokens=PROMPT, transport="rdma", endpoint="h:1", epoch="e")
    with pytest.raises(TransferError, match="no edge brings KV to pool main over transport rdma"):
        async with connection.stream("kv.fetch", fetch, FetchEvent, timeout=PATIENCE) as events:
            await anext(events)
    await worker.unused()


async def test_a_lost_connection_frees_everything(cluster: Any) -> None:
    worker = await cluster.start("main", "spec.pools.main.engine.config.token_time=0.01")
    other = await worker.connect()
    streams = [
        other.stream("engine.decode", decode(f"r{number}", hold=number % 2 == 0), DecodeEvent, timeout=60)
        for number in range(8)
    ]
    for stream in streams:
        await anext(stream)
    assert (await worker.load()).sessions == 8
    await other.close()
    await worker.unused()


async def test_end_of_stdin_ends_a_busy_worker_at_once(cluster: Any) -> None:
    worker = await cluster.start("main", "spec.pools.main.engine.config.token_time=0.01")
    connection = await worker.connect()
    # A minute of tokens: it does not end by itself while the test waits.
    stream = connection.stream("engine.decode", decode(max_tokens=6_000), DecodeEvent, timeout=None)
    await anext(stream)
    worker.process.stdin.close()
    assert await worker.ended() == 0
    assert worker.member is None


async def test_end_of_stdin_ends_a_worker_that_still_starts(cluster: Any) -> None:
    worker = await cluster.start("main", "spec.pools.main.engine.config.start_time=600", connect=False)
    await worker.state("starting")
    worker.process.stdin.close()
    assert await worker.ended() == 0


async def test_sigterm_lets_the_running_end_and_takes_no_more(cluster: Any) -> None:
    worker = await cluster.start("main", "spec.pools.main.engine.config.token_time=0.01")
    connection = await worker.connect()
    running = connection.stream("engine.decode", decode(max_tokens=300), DecodeEvent, timeout=60)
    await anext(running)
    worker.process.send_signal(signal.SIGTERM)
    await worker.state("draining")
    with pytest.raises(EngineError, match="draining"):
        await anext(connection.stream("engine.decode", decode("s"), DecodeEvent, timeout=60))
    assert [event async for event in running][-1] == Stopped("length", len(PROMPT) + 300)
    assert await worker.ended() == 0
    assert worker.member is None


async def test_drain_over_the_message_plane(cluster: Any) -> None:
    worker = await cluster.start("main")
    connection = await worker.connect()
    running = connection.stream("engine.decode", decode(max_tokens=1, hold=True), DecodeEvent, timeout=60)
    await anext(running)
    drain = asyncio.create_task(connection.call("worker.drain", Drain(PATIENCE), type(None), timeout=PATIENCE))
    await worker.state("draining")
    assert not drain.done()
    await running.aclose()
    await drain


async def test_ctrl_c_is_the_launchers_to_handle(cluster: Any) -> None:
    worker = await cluster.start("main")
    worker.process.send_signal(signal.SIGINT)
    await asyncio.sleep(0.1)
    await worker.unused()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("spec.pools.main.engine.config.start_error=the weights are torn", "the weights are torn"),
        ("spec.pools.main.engine.config.blocksize=4", 'engine scripted has no setting "blocksize"'),
        ("spec.pools.main.engine.plugin=nosuch", 'no installed plugin brings an engine called "nosuch"'),
        ("spec.edges.0.transport.config.stream=4", 'transport tcp has no setting "stream"'),
    ],
)
async def test_a_start_that_fails_says_why_and_exits_with_3(cluster: Any, override: str, message: str) -> None:
    worker = await cluster.start("main", override, connect=False)
    assert await worker.ended() == 3
    assert message in worker.log.read_text()
    assert "Traceback" not in worker.log.read_text()
    assert worker.member is None


async def test_an_engine_that_crashes_takes_its_worker_with_it(cluster: Any) -> None:
    worker = await cluster.start("main", "spec.pools.main.engine.config.crash_after=5")
    connection = await worker.connect()
    with pytest.raises(PddError, match="crashed after 5 tokens"):
        async for _ in connection.stream("engine.decode", decode(), DecodeEvent, timeout=60):
            pass
    assert await worker.ended() == 4
    assert "main/0 ends: its engine failed: the engine crashed after 5 tokens" in worker.log.read_text()
