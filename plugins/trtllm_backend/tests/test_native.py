"""The native data plane where a transfer fails: the read is an error, and the answer is right all the same."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytest_asyncio
from pdd_trtllm import native
from pdd_trtllm.config import TrtllmConfig
from pdd_trtllm.engine import TrtllmEngine
from pdd_trtllm.testing import standin

from pdd_runtime.errors import EngineError
from pdd_runtime.graph import Role
from pdd_runtime.plugins.engine import ModelSpec, Offer
from pdd_runtime.server.http import HttpClient
from pdd_runtime.testing.engine_harness import EngineHarness

PAGE = 8
SMALL: dict[str, Any] = {
    **{"data_plane": "native", "block_size": PAGE, "context_length": 256, "batch_limit": 4, "token_budget": 64},
    **{"transceiver": "UCX"},
    **{"start_timeout": "5min"},
}


class Servers:
    """Engines at stand-ins that run as long as the module."""

    def __init__(self, model: ModelSpec, engines: dict[Role, type[TrtllmEngine]]) -> None:
        self._model, self._engines = model, engines

    @asynccontextmanager
    async def engine(self, role: Role, transfer_timeout: str) -> AsyncGenerator[EngineHarness, None]:
        config = TrtllmConfig.model_validate(SMALL | {"transfer_timeout": transfer_timeout})
        async with EngineHarness.started(self._engines[role](config, self._model), role) as harness:
            yield harness


@pytest.fixture(scope="module")
def at(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    places = {role: tmp_path_factory.mktemp(role) for role in ("prefill", "main")}
    with standin.attaching(places["prefill"], "prefill") as giver, standin.attaching(places["main"], "main") as reader:
        yield Servers(ModelSpec(source=str(tiny)), {"prefill": giver, "main": reader})


class Pair:
    """`late`: a giver that keeps nothing for long. `hasty`: a reader that waits for nothing long."""

    long, short = "60s", "300ms"
    names: ClassVar[dict[str, tuple[Role, str]]] = {
        "giver": ("prefill", long),
        "late": ("prefill", short),
        "reader": ("main", long),
        "hasty": ("main", short),
    }

    def __init__(self, at: Servers, stack: AsyncExitStack) -> None:
        self._at, self._stack = at, stack

    async def engine(self, name: str) -> EngineHarness:
        return await self._stack.enter_async_context(self._at.engine(*self.names[name]))


@pytest_asyncio.fixture
async def pair(at: Servers) -> AsyncGenerator[Pair, None]:
    async with AsyncExitStack() as stack:
        yield Pair(at, stack)


@pytest.fixture
def tokens(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return tuple(random.Random(request.node.nodeid).choices(range(3, 200), k=3 * PAGE + 5))


async def test_a_late_reader_fails_and_computes_the_prompt_itself(pair: Pair, tokens: tuple[int, ...]) -> None:
    giver, reader = await pair.engine("late"), await pair.engine("reader")
    first = (await giver.prefill(tokens)).first
    async with aclosing(giver.offering(tokens)) as offers:
        offer = await anext(offers)
        with pytest.raises(EngineError, match="in its time"):
            await anext(offers)
    with pytest.raises(EngineError, match="did not get the KV"):
        await anext(reader.receiving(tokens, offer))
    await right(giver, reader, (*tokens, first.id))


async def test_a_second_reader_fails_and_computes_the_prompt_itself(pair: Pair, tokens: tuple[int, ...]) -> None:
    giver, reader, second = [await pair.engine(name) for name in ("giver", "reader", "hasty")]
    first = (await giver.prefill(tokens)).first
    async with aclosing(giver.offering(tokens)) as offers:
        offer = await anext(offers)
        received = await anext(reader.receiving(tokens, offer))
        assert (received.cached, received.received) == (0, len(tokens))
        with pytest.raises(EngineError, match="did not get the KV"):
            await anext(second.receiving(tokens, offer))
    await right(giver, second, (*tokens, first.id))


async def test_a_reader_of_another_prompt_fails(pair: Pair, tokens: tuple[int, ...]) -> None:
    giver, reader = await pair.engine("giver"), await pair.engine("reader")
    async with aclosing(giver.offering(tokens)) as offers:
        offer = await anext(offers)
        with pytest.raises(EngineError, match="of other tokens"):
            await anext(reader.receiving((*tokens, 5), offer))


async def test_a_reader_that_reads_otherwise_fails(pair: Pair, tokens: tuple[int, ...]) -> None:
    giver, reader = await pair.engine("giver"), await pair.engine("reader")
    async with aclosing(giver.offering(tokens)) as offers:
        offer = await anext(offers)
        with pytest.raises(EngineError, match="kept for NIXL, and this server reads by UCX"):
            await anext(reader.receiving(tokens, Offer(offer.params | {"transceiver": "NIXL"})))
        assert (await anext(reader.receiving(tokens, Offer(offer.params | {"transceiver": "DEFAULT"})))).received


async def test_what_a_reader_has_is_said(pair: Pair, tokens: tuple[int, ...]) -> None:
    giver, reader = await pair.engine("giver"), await pair.engine("reader")
    await reader.prefill(tokens[: 2 * PAGE + 1])

    async def unknown() -> object:
        return None if await reader.engine.cached(tokens) else "nothing"

    await reader.eventually(unknown, "the server has not said what it has cached")
    async with aclosing(giver.offering(tokens)) as offers:
        received = await anext(reader.receiving(tokens, await anext(offers)))
    assert (received.cached, received.received) == (2 * PAGE, len(tokens) - 2 * PAGE)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        ({"choices": []}, "no completion"),
        ({"choices": [{"finish_reason": "stop", "disaggregated_params": {}}]}, "finish_reason is stop"),
        ({"choices": [{"finish_reason": "length", "disaggregated_params": None}]}, "where the KV is"),
        ({"choices": [{"finish_reason": "length"}], "prompt_token_ids": [1]}, "another prompt"),
        ("long", "too long"),
    ],
)
async def test_an_answer_that_is_no_offer_is_an_error(
    pair: Pair, tokens: tuple[int, ...], answer: Any, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    giver = await pair.engine("giver")
    if answer == "long":
        params = {"ctx_request_id": 1, "first_gen_tokens": [1], "encoded_opaque_state": "A" * 70_000}
        answer = {"choices": [{"finish_reason": "not_finished", "disaggregated_params": params}]}

    async def post(self: HttpClient, path: str, body: dict[str, Any], *, timeout: float | None = None) -> Any:
        return answer if path == native.PATH else []

    monkeypatch.setattr(HttpClient, "post_json", post)
    with pytest.raises(EngineError, match=word):
        await anext(giver.offering(tokens))


async def test_an_offer_that_lacks_something_is_not_asked_for(pair: Pair, tokens: tuple[int, ...]) -> None:
    reader = await pair.engine("reader")
    with pytest.raises(EngineError, match="no offer of a TensorRT-LLM server"):
        await anext(reader.receiving(tokens, Offer({"encoded_opaque_state": "AAAA"})))


async def right(giver: EngineHarness, reader: EngineHarness, known: tuple[int, ...]) -> None:
    """The reader computes all that is known, and goes on as the giver does."""
    decoded = await reader.decode(known, 6)
    assert decoded.extended.cached == 0
    assert decoded.ids == (await giver.decode(known, 6)).ids
