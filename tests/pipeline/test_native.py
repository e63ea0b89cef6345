"""KV that the engines move themselves: the same answers, and no more left behind than by blocks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from pdd_runtime.errors import EngineError, GraphError
from pdd_runtime.pipeline import deadlines
from pdd_runtime.plugins.engine import Load
from pdd_runtime.plugins.messages import Empty
from tests.pipeline.conftest import START
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

Prompt = Callable[[int], list[int]]
RELAY = "spec.routing={plugin: always-relay}"
NEVER = "spec.routing={plugin: never-relay}"
GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: native-tests}
spec:
  model: {source: scripted}
  clusters: {dc-a: {}, dc-b: {}}
  links:
    wan: {between: [dc-a, dc-b], bandwidth: 1Gbit/s, rtt: 1ms}
  pools:
    prefill: {role: prefill, cluster: dc-a, engine: &e {plugin: scripted, config: {token_time: 0.002, eos_every: 128, data_plane: native}}}
    relay: {role: relay, cluster: dc-a, engine: *e}
    main: {role: main, cluster: dc-b, engine: *e}
    all: {role: aggregated, cluster: dc-a, engine: {plugin: scripted, config: {token_time: 0.002, eos_every: 128}}}
  edges:
    - {from: prefill, to: relay, carries: kv}
    - {from: prefill, to: main, carries: kv, link: wan}
    - {from: relay, to: main, carries: tokens, link: wan}
    - {from: relay, to: main, carries: kv, link: wan}
"""  # noqa: E501
ASSISTED = tuple(f"spec.pools.{pool}.engine.config.extend=prefill_assisted" for pool in ("relay", "main"))
KINDS = {"local": (), "assisted": ASSISTED, "main assisted": ASSISTED[1:]}
SLOW_KV = "spec.pools.prefill.engine.config.native_rate=20000"
"""A prompt of 1,000 tokens, of 128 bytes each, takes six seconds."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def native(request: pytest.FixtureRequest, make_fleet: Callable[..., Any]) -> AsyncIterator[Any]:
    fleet = make_fleet(*KINDS[request.param], text=GRAPH)
    await fleet.start()
    fleet.kind = request.param
    try:
        yield fleet
    finally:
        await fleet.close()


def relayed(strategy: str, n: int) -> tuple[str, str]:
    config = f"{{min_relay_tokens: {n}, max_relay_tokens: {n}}}"
    return RELAY, f"spec.handoff={{plugin: {strategy}, config: {config}}}"


def events(timeline: dict[str, Any]) -> list[str]:
    return [event["what"].partition(":")[0] for event in timeline["events"]]


def edges(timeline: dict[str, Any]) -> list[str]:
    return [transfer["edge"] for transfer in timeline["kv"]]


async def when(fleet: Any, id: str, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Return when the session's timeline is so."""

    def so() -> bool:
        timeline = fleet.timelines.get(id)
        return timeline is not None and condition(timeline.body())

    await until(so)


# The answers


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 11, "logprobs": 2}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("n", [1, 7, 65])
@pytest.mark.parametrize("strategy", ["one-shot", "catch-up", "none"])
async def test_a_handoff_is_token_for_token_what_portable_kv_gives(
    native: Any, prompt: Prompt, strategy: str, n: int, sampling: dict[str, Any]
) -> None:
    tokens = prompt(150)
    expected = await native.ask(await native.aggregated(), tokens, n + 20, **sampling)
    answer = await native.ask(await native.driver(*relayed(strategy, n)), tokens, n + 20, **sampling)
    assert answer.tokens == expected.tokens
    assert answer.timeline["tokens"] == {"prefill": 1, "relay": n, "main": 19}
    await native.idle()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 128, 1000])
@pytest.mark.parametrize("max_tokens", [1, 2, 30])
async def test_without_a_relay_it_is_as_well(native: Any, prompt: Prompt, length: int, max_tokens: int) -> None:
    tokens = prompt(length)
    expected = await native.ask(await native.aggregated(), tokens, max_tokens)
    answer = await native.ask(await native.driver(NEVER), tokens, max_tokens)
    assert answer.tokens == expected.tokens
    assert answer.finish.reason == "length"
    await native.idle()


@pytest.mark.parametrize("strategy", ["one-shot", "catch-up", "none"])
async def test_sixteen_at_once(native: Any, prompt: Prompt, strategy: str) -> None:
    handoff = f"spec.handoff={{plugin: {strategy}}}"
    driver, alone = await native.driver(RELAY, handoff), await native.aggregated()
    prompts = [prompt(40 + 23 * i) for i in range(16)]
    expected = await asyncio.gather(*(native.ask(alone, tokens, 40) for tokens in prompts))
    answers = await asyncio.gather(*(native.ask(driver, tokens, 40) for tokens in prompts))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    await native.idle()


async def test_the_end_token_ends_it_and_main_has_the_kv_of_all(native: Any, prompt: Prompt) -> None:
    tokens = prompt(122)
    driver = await native.driver(RELAY, "spec.handoff={plugin: none}")
    answer = await native.settled(await native.ask(driver, tokens, 50, stop_token_ids=(257,)))
    assert answer.ids[-1] == 257
    assert answer.finish.reason == "stop"
    assert "settled" in events(answer.timeline)
    again = await native.settled(await native.ask(await native.driver(NEVER), [*tokens, *answer.ids, 40], 2))
    assert again.timeline["cached"]["main"] == 128  # the full blocks of what it knows
    assert "failed" not in str(again.timeline["events"])


# What crosses


async def test_what_crosses_is_told_in_tokens_that_were_received(native: Any, prompt: Prompt) -> None:
    tokens = prompt(160)
    driver = await native.driver(NEVER)
    answer = await native.settled(await native.ask(driver, tokens, 20))
    kv = answer.transfer("prefill->main")
    # An assisted main is told the first token with the offer, in its one decode: there is no transfer beside it.
    crossed = 160 if native.kind == "local" else 161
    assert (kv["bytes"], kv["bytes_cached"], kv["blocks_cached"]) == (crossed * 128, 0, 0)
    assert kv["blocks_sent"] == (10 if native.kind == "local" else 11)
    assert kv["finished"] > kv["started"]
    assert kv["goodput"] > 0
    assert answer.timeline["cached"] == {"prefill": 0, "main": 0}
    again = await native.settled(await native.ask(driver, tokens + answer.ids + prompt(40), 5))
    kv = again.transfer("prefill->main")
    # Main has 179 tokens of those 220, in eleven full blocks; prefill has what it prefilled and what it offered.
    assert kv["blocks_cached"] == 11
    assert kv["bytes"] + kv["bytes_cached"] == (220 if native.kind == "local" else 221) * 128
    assert again.timeline["cached"]["prefill"] == crossed
    assert again.timeline["cached"]["main"] >= 176


async def test_routing_sees_what_is_cached_on_main(native: Any, prompt: Prompt) -> None:
    driver, tokens = await native.driver(), prompt(480)
    answer = await native.settled(await native.ask(driver, tokens, 32))
    assert answer.timeline["route"] == "P-RLD-MD"
    second = await native.ask(driver, [*tokens, *answer.ids], 5)
    assert second.timeline["route"] == "P-MD"
    assert "at least the threshold of 90%" in second.timeline["reason"]
    await native.idle()


async def test_each_way_brings_its_kv_in_its_own_number_of_transfers(native: Any, prompt: Prompt) -> None:
    answer = await native.settled(await native.ask(await native.driver(*relayed("one-shot", 20)), prompt(300), 40))
    to_main = edges(answer.timeline).count("prefill->main")
    # Assisted, it takes one for the prompt and one for its decode.
    assert to_main == (1 if native.kind == "local" else 2)
    assert edges(answer.timeline).count("prefill->relay") == 1
    assert all(transfer["finished"] for transfer in answer.timeline["kv"])
    assert answer.timeline["handoff"]["extended"] == (21 if native.kind == "local" else 0)
    if native.kind != "local":
        last = answer.timeline["kv"][-1]
        assert last["blocks_sent"] + last["blocks_cached"] == 21  # 321 tokens: the last block's again
        assert last["blocks_cached"] == 18


async def test_a_strategy_that_moves_the_relays_kv_is_refused(native: Any) -> None:
    with pytest.raises(GraphError, match="moves KV from relay to main") as failure:
        await native.driver(RELAY, "spec.handoff={plugin: kv-transfer}")
    assert "native KV" in failure.value.why


async def test_tenants_share_no_kv(native: Any, prompt: Prompt) -> None:
    driver, tokens = await native.driver(RELAY), prompt(100)
    await native.settled(await native.ask(driver, tokens, 10, salt="a"))
    other = await native.settled(await native.ask(driver, tokens, 10, salt="b"))
    assert other.timeline["cached"] == {"prefill": 0, "main": 0}
    same = await native.settled(await native.ask(driver, tokens, 10, salt="a"))
    assert same.timeline["cached"]["prefill"] == 100
    assert same.timeline["cached"]["main"] >= 96


async def test_an_offer_that_nobody_needs_is_closed_before_the_answer_ends(
    native: Any, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Main has all of it already, so nobody reads it."""
    if native.kind != "local":
        pytest.skip("an assisted main reads at least the last block")
    monkeypatch.setattr(deadlines, "NOTICED", 0.05)
    driver, tokens = await native.driver(NEVER), prompt(160)
    await native.settled(await native.ask(driver, tokens, 1))
    asking = asyncio.create_task(native.ask(driver, tokens, 7500, id="long"))
    await when(native, "long", lambda t: t["tokens"]["main"] > 3)
    prefill = next(peer for peer in driver._peers.ready if peer.member.role == "prefill")
    async with asyncio.timeout(PATIENCE):
        # Asked, not watched: what it said last may be of before.
        while (await prefill.connection.call("engine.load", Empty(), Load, timeout=PATIENCE)).sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert not asking.done()
    driver.stop("long")
    kv = (await asking).transfer("prefill->main")
    assert (kv["bytes"], kv["blocks_cached"]) == (0, 10)
    await native.idle()


# What fails


@pytest.mark.parametrize("strategy", ["one-shot", "catch-up", None])
async def test_what_cannot_be_received_is_recomputed(
    new_fleet: Callable[..., Any], prompt: Prompt, strategy: str | None
) -> None:
    # An offer that has expired before anybody can read it.
    fleet = new_fleet("spec.pools.prefill.engine.config.lease=0.000001", text=GRAPH)
    await fleet.start()
    tokens = prompt(100)
    expected = await fleet.ask(await fleet.aggregated(), tokens, 20)
    answer = await fleet.ask(await fleet.driver(*(relayed(strategy, 4) if strategy else (NEVER,))), tokens, 20)
    assert answer.tokens == expected.tokens
    failed = [event for event in answer.timeline["events"] if event["what"].startswith("KV from prefill failed")]
    assert {event["worker"] for event in failed} == ({"main/0", "relay/0"} if strategy else {"main/0"})
    assert all("expired" in event["what"] and "recomputed" in event["what"] for event in failed)
    assert answer.transfer("prefill->main")["finished"] is None
    assert ("recomputed" in events(answer.timeline)) is (strategy is not None)
    await fleet.idle()


@pytest.mark.parametrize("routing", [RELAY, NEVER])
async def test_where_an_assisted_engine_cannot_read_another_goes_on_or_the_answer_ends(
    new_fleet: Callable[..., Any], prompt: Prompt, routing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "DEATH", 0.01)
    fleet = new_fleet("spec.pools.prefill.engine.config.lease=0.000001", *ASSISTED, text=GRAPH)
    await fleet.start()
    tokens = prompt(100)
    expected = await fleet.ask(await fleet.aggregated(), tokens, 20)
    driver = await fleet.driver(routing)
    answer = await fleet.ask(driver, tokens, 20)
    assert answer.ids == expected.ids
    assert answer.timeline["recoveries"][-1]["to"] == "all/0"
    await fleet.idle()
    await fleet.kill("all")
    await until(lambda: len(driver._peers.ready) == 3)
    with pytest.raises(EngineError, match="expired") as failure:
        await fleet.ask(driver, prompt(100), 20, id="lost")
    assert "gone on elsewhere 3 times" in failure.value.why
    assert "expired" in fleet.timelines.get("lost").body()["error"]
    await fleet.idle()


async def test_a_relay_serves_what_main_can_never_take_over(
    new_fleet: Callable[..., Any], prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "DEATH", 0.01)
    monkeypatch.setattr(deadlines, "LAST_PAUSE", 0.01)
    fleet = new_fleet("spec.pools.prefill.engine.config.lease=0.000001", *KINDS["main assisted"], text=GRAPH)
    await fleet.start()
    tokens = prompt(100)
    expected = await fleet.ask(await fleet.aggregated(), tokens, 500)
    answer = await fleet.settled(await fleet.ask(await fleet.driver(RELAY), tokens, 500))
    assert answer.tokens == expected.tokens
    assert answer.timeline["tokens"]["main"] == 0
    assert "goes on without main" in events(answer.timeline)
    # Who says that the offer has expired, its giver or its reader, is a race; each may fail so often in a row.
    assert max(Counter(recovery["role"] for recovery in answer.timeline["recoveries"]).values()) == 3


Condition = Callable[[dict[str, Any]], bool]
MOMENTS: dict[str, tuple[str, str, Condition]] = {
    "prefill, prefilling": (RELAY, "prefill", lambda t: "prefill starts" in events(t)),
    "prefill, giving to main": (NEVER, "prefill", lambda t: "KV from prefill starts" in events(t)),
    "prefill, giving to both": (RELAY, "prefill", lambda t: events(t).count("KV from prefill starts") == 2),
    "relay, receiving": (RELAY, "relay", lambda t: "prefill->relay" in edges(t)),
    "relay, decoding": (RELAY, "relay", lambda t: t["tokens"]["relay"] > 3),
    "main, receiving": (NEVER, "main", lambda t: "prefill->main" in edges(t)),
    "main, receiving behind a relay": (RELAY, "main", lambda t: t["tokens"]["relay"] > 3),
    "main, decoding": (NEVER, "main", lambda t: t["tokens"]["main"] > 3),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["local", "assisted"])
async def test_after_a_killed_worker_the_answer_is_that_of_an_undisturbed_run(
    new_fleet: Callable[..., Any], prompt: Prompt, kind: str
) -> None:
    rates = (
        "spec.pools.prefill.engine.config.native_rate=200000",
        "spec.pools.prefill.engine.config.prefill_rate=4000",
    )
    fleet = new_fleet(*rates, *KINDS[kind], text=GRAPH)
    await fleet.start()
    alone, recovered = await fleet.aggregated(), 0
    for moment, (routing, pool, condition) in MOMENTS.items():
        handoff = "spec.handoff={plugin: catch-up, config: {min_relay_tokens: 20}}"
        driver, tokens = await fleet.driver(routing, handoff), prompt(600)
        expected = await fleet.ask(alone, tokens, 300, temperature=0.8, seed=3)
        other = asyncio.create_task(fleet.ask(alone, prompt(50), 200))
        asking = asyncio.create_task(fleet.ask(driver, tokens, 300, id=moment, temperature=0.8, seed=3))
        await when(fleet, moment, condition)
        await fleet.kill(pool)
        await fleet.spawn(pool)
        answer = await asking
        assert answer.tokens == expected.tokens, moment
        # None at all where it had given all before it was killed.
        assert {recovery["worker"] for recovery in answer.timeline["recoveries"]} <= {f"{pool}/0"}, moment
        recovered += bool(answer.timeline["recoveries"])
        assert (await other).finish.reason == "length"
        await fleet.idle()
        await until(
            lambda driver=driver: {peer.key.pool for peer in driver._peers.ready} == set(fleet.graph.spec.pools), START
        )
    assert recovered > len(MOMENTS) / 2


@pytest.mark.slow
async def test_an_assisted_main_waits_for_another_prefill_worker(new_fleet: Callable[..., Any], prompt: Prompt) -> None:
    """Main cannot compute what the relay has made."""
    slow = (f"spec.pools.{pool}.engine.config.token_time=0.02" for pool in ("relay", "main"))
    fleet = new_fleet(*slow, *ASSISTED, text=GRAPH)
    await fleet.start()
    driver, tokens = (
        await fleet.driver(RELAY, "spec.handoff={plugin: one-shot, config: {min_relay_tokens: 50}}"),
        prompt(100),
    )
    asking = asyncio.create_task(fleet.ask(driver, tokens, 300, id="waits"))
    await when(fleet, "waits", lambda t: t["tokens"]["relay"] > 3 and edges(t).count("prefill->main") == 1)
    await fleet.kill("prefill")
    await when(fleet, "waits", lambda t: bool(t["recoveries"]))
    await fleet.spawn("prefill")
    answer = await asking
    assert answer.ids == (await fleet.ask(await fleet.aggregated(), tokens, 300)).ids
    assert answer.timeline["tokens"]["main"] > 0
    await fleet.idle()


@pytest.mark.slow
async def test_a_main_that_has_its_kv_needs_no_prefill_worker_any_more(
    new_fleet: Callable[..., Any], prompt: Prompt
) -> None:
    slow = (f"spec.pools.{pool}.engine.config.token_time=0.02" for pool in ("relay", "main", "all"))
    for kind in ("local", "assisted"):
        fleet = new_fleet(*slow, *KINDS[kind], text=GRAPH)
        await fleet.start()
        tokens = prompt(100)
        asking = asyncio.create_task(fleet.ask(await fleet.driver(NEVER), tokens, 60, id=kind))
        await when(fleet, kind, lambda t: t["tokens"]["main"] > 3)
        await fleet.kill("prefill")
        answer = await asking
        assert answer.ids == (await fleet.ask(await fleet.aggregated(), tokens, 60)).ids
        await fleet.idle()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "assisted"])
async def test_a_prefill_worker_that_comes_back_offers_again(
    new_fleet: Callable[..., Any], prompt: Prompt, kind: str
) -> None:
    fleet = new_fleet(*KINDS[kind], text=GRAPH)
    await fleet.start()
    driver, tokens = await fleet.driver(RELAY), prompt(100)
    expected = await fleet.ask(driver, tokens, 20)
    await fleet.idle()
    await fleet.kill("prefill")
    await until(lambda: len(driver._peers.ready) == 3)
    await fleet.spawn("prefill")
    await until(lambda: len(driver._peers.ready) == 4)
    answer = await fleet.settled(await fleet.ask(driver, tokens, 20))
    assert answer.ids == expected.ids
    assert answer.timeline["route"] == "P-RLD-MD"
    # The new one has nothing cached; main has what it had, so that little crosses again.
    assert answer.timeline["cached"]["prefill"] == 0
    assert answer.timeline["cached"]["main"] >= 96


STATES: dict[str, tuple[str, Condition]] = {
    "before anything": (RELAY, lambda t: True),
    "prefilling": (RELAY, lambda t: "prefill starts" in events(t)),
    "giving to both": (RELAY, lambda t: events(t).count("KV from prefill starts") == 2),
    "receiving": (NEVER, lambda t: "prefill->main" in edges(t)),
    "relaying": (RELAY, lambda t: t["tokens"]["relay"] > 3),
    "main decodes": (NEVER, lambda t: t["tokens"]["main"] > 3),
    "after the handoff": (RELAY, lambda t: t["tokens"]["main"] > 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "assisted"])
async def test_a_cancel_in_any_state_frees_all(new_fleet: Callable[..., Any], prompt: Prompt, kind: str) -> None:
    rates = (
        "spec.pools.prefill.engine.config.native_rate=200000",
        "spec.pools.prefill.engine.config.prefill_rate=4000",
    )
    fleet = new_fleet(*rates, *KINDS[kind], text=GRAPH)
    await fleet.start()
    for state, (routing, condition) in STATES.items():
        driver = await fleet.driver(routing, "spec.handoff={plugin: catch-up, config: {min_relay_tokens: 20}}")
        asking = asyncio.create_task(fleet.ask(driver, prompt(500), 2000, id=state))
        await when(fleet, state, condition)
        asking.cancel()
        await asyncio.wait({asking})
        assert "cancelled" in fleet.timelines.get(state).body()["error"], state
        await fleet.idle()
