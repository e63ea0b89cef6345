"""What a session does beside giving the right tokens: when they come, what crosses the link, what main has after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdd_runtime.ids import new_id
from pdd_runtime.pipeline import Finish, SessionRequest
from pdd_runtime.plugins.engine import Sampling, Token
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

Prompt = Callable[[int], list[int]]
RELAY = "spec.routing={plugin: always-relay}"
NEVER = "spec.routing={plugin: never-relay}"
STAY = "spec.handoff={plugin: none}"
BLOCK_BYTES = 16 * 128


def what(timeline: dict[str, Any], start: str) -> dict[str, Any]:
    """The one event that begins so."""
    found = [event for event in timeline["events"] if event["what"].startswith(start)]
    assert len(found) == 1, (start, timeline["events"])
    event: dict[str, Any] = found[0]
    return event


async def test_tokens_come_before_main_has_the_kv_and_without_a_relay_only_the_first(
    new_fleet: Callable[..., Any], prompt: Prompt
) -> None:
    # 2,000 tokens are 256 KB: two seconds on this link.
    slow = (f"spec.pools.{pool}.engine.config.token_time=0.01" for pool in ("relay", "main"))
    fleet = new_fleet("spec.links.wan.bandwidth=1Mbit/s", *slow)
    await fleet.start()
    relayed = await fleet.settled(await fleet.ask(await fleet.driver(RELAY), prompt(2000), 60))
    there = relayed.transfer("prefill->main")["finished"]
    assert there > 2
    assert relayed.times[9] < there
    assert relayed.timeline["tokens"]["relay"] >= 10
    direct = await fleet.ask(await fleet.driver(NEVER), prompt(2000), 20)
    assert direct.times[0] < direct.transfer("prefill->main")["finished"] < direct.times[1]
    await fleet.idle()


async def test_the_gap_at_the_handoff_is_the_time_between_the_two_tokens(fleet: Any, prompt: Prompt) -> None:
    config = "{min_relay_tokens: 40}"
    driver = await fleet.driver(RELAY, f"spec.handoff={{plugin: catch-up, config: {config}}}")
    answer = await fleet.ask(driver, prompt(1000), 1000)
    handoff = answer.timeline["handoff"]
    n = handoff["sealed_at"]
    assert handoff["gap"] == pytest.approx(answer.times[n] - answer.times[n - 1], abs=0.01)
    assert handoff["gap"] > 0.02  # The round trip.
    # All that the relay made, main has computed: in rounds, and what was left in its first pass.
    assert handoff["rounds"] >= 1
    assert handoff["extended"] == n
    await fleet.idle()


@pytest.mark.parametrize("routing", [RELAY, NEVER])
async def test_the_second_turn_sends_its_suffix_only(fleet: Any, prompt: Prompt, routing: str) -> None:
    driver = await fleet.driver(routing)
    first, answer_tokens, more = prompt(160), 64, prompt(80)
    answer = await fleet.settled(await fleet.ask(driver, first, answer_tokens))
    assert answer.transfer("prefill->main")["bytes"] == 10 * BLOCK_BYTES
    assert answer.timeline["cached"] == {"prefill": 0, "main": 0}
    assert answer.finish.cached_tokens == 0

    second = await fleet.settled(await fleet.ask(driver, first + answer.ids + more, 10))
    # 304 tokens are 19 blocks. Main has the prompt and the answer, but for a last token that it has made itself.
    there = 13 if answer.timeline["tokens"]["main"] else 14
    kv = second.transfer("prefill->main")
    assert (kv["blocks_cached"], kv["blocks_sent"], kv["bytes"]) == (there, 19 - there, (19 - there) * BLOCK_BYTES)
    assert kv["bytes_cached"] == there * BLOCK_BYTES
    # Prefill has only ever seen the prompt.
    assert second.timeline["cached"] == {"prefill": 160, "main": there * 16}
    assert second.finish.cached_tokens == 160


async def test_hit_threshold_sends_the_second_turn_to_main_directly(fleet: Any, prompt: Prompt) -> None:
    driver = await fleet.driver()
    first = prompt(480)
    answer = await fleet.ask(driver, first, 32)
    assert answer.timeline["route"] == "P-RLD-MD"
    assert "0 of 480 prompt tokens (0%) are cached on main" in answer.timeline["reason"]
    await fleet.idle()
    second = await fleet.ask(driver, first + answer.ids, 5)
    assert second.timeline["route"] == "P-MD"
    assert "at least the threshold of 90%" in second.timeline["reason"]
    await fleet.idle()


async def test_an_aggregated_worker_tells_what_it_had_cached(fleet: Any, prompt: Prompt) -> None:
    driver = await fleet.aggregated()
    tokens = prompt(100)
    answer = await fleet.ask(driver, tokens, 20)
    assert answer.finish.cached_tokens == 0
    second = await fleet.ask(driver, tokens + answer.ids + prompt(5), 5)
    assert second.finish.cached_tokens == 119
    assert second.timeline["cached"] == {"prefill": None, "main": 119}
    assert second.timeline["kv"] == []
    assert second.timeline["tokens"] == {"prefill": 0, "relay": 0, "main": 5}
    await fleet.idle()


async def test_tenants_share_no_kv(fleet: Any, prompt: Prompt) -> None:
    driver, tokens = await fleet.driver(RELAY), prompt(100)
    await fleet.ask(driver, tokens, 10, salt="a")
    await fleet.idle()
    other = await fleet.settled(await fleet.ask(driver, tokens, 10, salt="b"))
    assert other.timeline["cached"] == {"prefill": 0, "main": 0}
    same = await fleet.settled(await fleet.ask(driver, tokens, 10, salt="a"))
    assert same.timeline["cached"] == {"prefill": 100, "main": 100}


@pytest.mark.parametrize("max_tokens", [1, 30])
async def test_main_gets_the_kv_of_what_was_finished_without_it(fleet: Any, prompt: Prompt, max_tokens: int) -> None:
    driver, tokens = await fleet.driver(RELAY, STAY), prompt(1000)
    answer = await fleet.ask(driver, tokens, max_tokens)
    assert answer.timeline["tokens"]["main"] == 0
    # The user is not kept waiting for that: the KV alone takes 50 ms.
    assert driver.sessions == 1
    await fleet.settled(answer)
    assert what(answer.timeline, "settled")["worker"] == "main/0"
    assert answer.timeline["tokens"]["main"] == 0
    again = await fleet.settled(await fleet.ask(driver, tokens + answer.ids, 5))
    assert again.timeline["cached"]["main"] == 1000 + max_tokens


async def test_the_relay_is_let_go_when_main_has_taken_over(fleet: Any, prompt: Prompt) -> None:
    driver = await fleet.driver(
        RELAY, "spec.handoff={plugin: one-shot, config: {min_relay_tokens: 5, max_relay_tokens: 5}}"
    )
    # Twelve seconds of tokens: main goes on while the relay is looked at.
    asking = asyncio.create_task(fleet.ask(driver, prompt(100), 6000, id="req-let-go"))

    def handed_off() -> bool:
        found = fleet.timelines.get("req-let-go")
        handoff = found.body()["handoff"] if found else None
        return handoff is not None and handoff["gap"] is not None

    await until(handed_off)
    relay = next(peer for peer in driver._peers.ready if peer.member.role == "relay")
    await until(lambda: relay.load.blocks_used == 0 and relay.sessions == 0)
    assert not asking.done()
    driver.stop("req-let-go")
    await asking
    await fleet.idle()


@pytest.mark.parametrize("strategy", ["one-shot", "catch-up", "none", "kv-transfer", None])
async def test_kv_that_cannot_be_moved_is_recomputed(fleet: Any, prompt: Prompt, strategy: str | None) -> None:
    tokens = prompt(100)
    expected = await fleet.ask(await fleet.aggregated(), tokens, 20)
    config = "{min_relay_tokens: 4, max_relay_tokens: 4}"
    routing = (RELAY, f"spec.handoff={{plugin: {strategy}, config: {config}}}") if strategy else (NEVER,)
    driver = await fleet.driver(*routing, "spec.links.wan.rtt=21ms")
    # Whoever asks for prefill's KV finds nobody there.
    prefill = next(peer for peer in driver._peers.ready if peer.member.role == "prefill")
    prefill.member = msgspec.structs.replace(prefill.member, transports={"tcp": ""})
    answer = await fleet.ask(driver, tokens, 20)
    assert answer.tokens == expected.tokens
    failed = [event for event in answer.timeline["events"] if event["what"].startswith("KV from prefill failed")]
    assert {event["worker"] for event in failed} == ({"main/0", "relay/0"} if strategy else {"main/0"})
    assert answer.transfer("prefill->main")["finished"] is None
    if strategy:
        assert what(answer.timeline, "recomputed")["worker"] == "main/0"
        assert answer.timeline["tokens"]["relay"] == 4
    await fleet.idle()


async def test_moving_the_relays_kv_leaves_one_token_to_compute(fleet: Any, prompt: Prompt) -> None:
    config = "{min_relay_tokens: 40, max_relay_tokens: 40}"
    driver = await fleet.driver(RELAY, f"spec.handoff={{plugin: kv-transfer, config: {config}}}")
    answer = await fleet.ask(driver, prompt(100), 60)
    # 141 tokens are known, and the last one's KV is nowhere. Prefill sent 7 blocks, the last of 4 tokens; that one and
    # those behind it come from the relay.
    assert answer.transfer("prefill->main")["blocks_sent"] == 7
    kv = answer.transfer("relay->main")
    assert (kv["blocks_cached"], kv["blocks_sent"]) == (6, 3)
    assert answer.timeline["handoff"]["extended"] == 1
    await fleet.idle()


async def test_a_prompt_that_is_too_long_ends_in_the_engines_error(fleet: Any, prompt: Prompt) -> None:
    from pdd_runtime.errors import CapacityError

    with pytest.raises(CapacityError, match="context length"):
        await fleet.ask(await fleet.driver(RELAY), prompt(9000), 5, id="req-long")
    timeline = fleet.timelines.get("req-long").body()
    assert "context length" in timeline["error"]
    assert timeline["finish_reason"] is None
    await fleet.idle()


@pytest.mark.parametrize("routing", [RELAY, NEVER])
async def test_the_end_of_the_context_ends_the_answer(fleet: Any, prompt: Prompt, routing: str) -> None:
    answer = await fleet.ask(await fleet.driver(routing), prompt(8100), 200)
    assert answer.finish.reason == "length"
    assert len(answer.tokens) == 92
    await fleet.idle()


@pytest.mark.parametrize(("overrides", "after"), [((RELAY, STAY), 5), ((RELAY,), 80), ((NEVER,), 1), ((NEVER,), 9)])
async def test_an_answer_that_is_stopped_ends_at_once_and_main_keeps_its_kv(
    fleet: Any, prompt: Prompt, overrides: tuple[str, ...], after: int
) -> None:
    driver, tokens = await fleet.driver(*overrides), prompt(320)
    request = SessionRequest(
        id=new_id("req"), tokens=tuple(tokens), max_tokens=2000, sampling=Sampling(temperature=0.0)
    )
    got: list[Token] = []
    finish = None
    async for item in driver.run(request):
        if isinstance(item, Finish):
            finish = item
            continue
        got.append(item)
        if len(got) == after:
            driver.stop(request.id)
    assert finish == Finish("stop", 0)
    # What was queued when it was stopped still comes.
    assert after <= len(got) < 1000
    await fleet.idle()
    timeline = fleet.timelines.get(request.id).body()
    assert (timeline["finish_reason"], timeline["error"]) == ("stop", None)
    driver.stop(request.id)
    again = await fleet.ask(await fleet.driver(NEVER), tokens, 2)
    assert again.timeline["cached"]["main"] == 320
    await fleet.idle()
