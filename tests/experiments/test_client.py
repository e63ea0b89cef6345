"""The client against servers that behave in every way a server can."""

from __future__ import annotations

import asyncio

import pytest

from pdd_runtime.clock import now
from pdd_runtime.errors import RemoteError
from pdd_runtime.experiments.client import Client
from pdd_runtime.experiments.outcome import Outcome
from tests.experiments.server import SSE, TIMELINE, Answer, event, send, server, whole


async def ask(answer: Answer, timeout: float = 10, timelines: list[object] | None = None) -> Outcome:
    async with server(answer, timelines) as url:
        async with Client(url, timeout, "salt") as client:
            at = now()
            outcome = Outcome(session=0, turn=0, prompt=3, due=at, sent=at)
            await client.ask(client.body([1, 2, 3], 8), outcome)
        return outcome


async def test_every_token_of_a_chunk_counts_at_the_time_it_came() -> None:
    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(SSE)
        await send(writer, event(5))
        await asyncio.sleep(1.0)
        both = event(6, 7) + event(8, text="")
        # An event may be cut anywhere.
        await send(writer, both[:20])
        await send(writer, both[20:] + b"data: [DONE]\n\n")
        await send(writer, b"")

    outcome = await ask(answer)
    assert outcome.error is None
    assert outcome.tokens == [5, 6, 7, 8]
    first, *rest = outcome.stamps
    assert len(set(rest)) == 1
    assert rest[0] - first >= 0.5
    assert outcome.timeline == TIMELINE


async def test_the_timeline_is_awaited_until_its_transfers_have_ended() -> None:
    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(SSE)
        await send(writer, event(5) + b"data: [DONE]\n\n")
        await send(writer, b"")

    under_way = {**TIMELINE, "kv": [{"finished": None}]}
    done = {**TIMELINE, "kv": [{"finished": 1.0}]}
    assert (await ask(answer, timelines=[under_way, under_way, done])).timeline == done
    failed = {**under_way, "events": [{"what": "KV from prefill failed: cut"}]}
    assert (await ask(answer, timelines=[under_way, failed])).timeline == failed


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (event(5) + b'data: {"error": {"message": "worker main/0 is gone"}}\n\n', "worker main/0 is gone"),
        (event(5), "the answer broke off"),
        (b"data: [DONE]\n\n", "the answer has no tokens"),
        (b'data: {"choices": [{"text": "hello"}]}\n\n', "does not tell token ids"),
        (b"data: {nonsense\n\n", "DecodeError"),
    ],
)
async def test_an_answer_that_is_not_whole_is_an_error(data: bytes, error: str) -> None:
    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(SSE)
        await send(writer, data)
        await send(writer, b"")

    outcome = await ask(answer)
    assert error in (outcome.error or "")
    assert outcome.metric("ttft") is None


async def test_a_refusal_keeps_its_status_and_message() -> None:
    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(whole({"error": {"message": "the queue is full"}}, "429 Too Many Requests"))

    assert (await ask(answer)).error == "429: the queue is full"


async def test_a_connection_that_is_cut_is_an_error() -> None:
    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(SSE)
        await send(writer, event(5))
        writer.close()

    outcome = await ask(answer)
    assert "RemoteProtocolError" in (outcome.error or "")


async def test_an_answer_that_takes_too_long_is_an_error() -> None:
    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(SSE)
        await send(writer, event(5))
        await asyncio.sleep(3600)

    assert (await ask(answer, timeout=0.3)).error == "no whole answer in 0.3 s"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[", "ftp://127.0.0.1"])
async def test_a_url_where_nobody_answers_is_said_before_anything_is_measured(url: str) -> None:
    with pytest.raises(RemoteError) as told:
        async with Client(url, 5, ""):
            pass
    assert told.value.what == "no model is served here"
    assert told.value.why
