"""Whatever worker fails, in whatever state: the answer is the one of an undisturbed run, and nothing is left behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from pdd_runtime.errors import WorkerLost
from tests.pipeline.conftest import START
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

Prompt = Callable[[int], list[int]]
Timeline = dict[str, Any]
GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: recovery-tests}
spec:
  model: {source: scripted}
  clusters: {dc-a: {}, dc-b: {}}
  links:
    wan: {between: [dc-a, dc-b], bandwidth: 2Mbit/s, rtt: 20ms, streams: 2, emulate: true}
  pools:
    prefill: {role: prefill, cluster: dc-a, engine: {plugin: scripted, config: {prefill_rate: 4000}}}
    relay: {role: relay, cluster: dc-a, engine: &e {plugin: scripted, config: {token_time: 0.005}}}
    main: {role: main, cluster: dc-b, engine: *e}
  edges:
    - {from: prefill, to: relay, carries: kv, transport: {plugin: tcp}}
    - {from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
    - {from: relay, to: main, carries: tokens, link: wan}
  recovery: {wait: 30s}
"""
ALONE = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: undisturbed}
spec:
  model: {source: scripted}
  clusters: {dc-a: {}}
  pools: {all: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}}
"""
RELAY, NEVER = "spec.routing={plugin: always-relay}", "spec.routing={plugin: never-relay}"
SEEDED = {"temperature": 0.8, "seed": 11, "logprobs": 2}
LONG = 1000
"""Tokens of a prompt whose KV takes most of a second to main."""


class Site:
    """One worker of each pool; those that a test has killed are there again for the next."""

    def __init__(self, fleet: Any, undisturbed: Any) -> None:
        self.fleet, self.undisturbed = fleet, undisturbed

    async def mend(self) -> None:
        await self.fleet.idle()
        for pool in self.fleet.graph.spec.pools:
            if (pool, 0) not in self.fleet.processes:
                await self.fleet.spawn(pool)
        for driver, _ in self.fleet._drivers.values():
            await until(lambda driver=driver: len({p.key.pool for p in driver._peers.ready}) == 3, START)

    async def expected(self, prompt: list[int], tokens: int, **sampling: Any) -> Any:
        driver = await self.undisturbed.driver()
        return await self.undisturbed.ask(driver, prompt, tokens, **sampling)

    def signal(self, pool: str, number: int) -> None:
        self.fleet.processes[pool, 0].send_signal(number)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(make_fleet: Callable[..., Any]) -> AsyncIterator[Site]:
    fleet, undisturbed = make_fleet(text=GRAPH), make_fleet(text=ALONE)
    await asyncio.gather(fleet.start(), undisturbed.start())
    try:
        yield Site(fleet, undisturbed)
    finally:
        await fleet.close()
        await undisturbed.close()


@pytest_asyncio.fixture(loop_scope="module")
async def site(workers: Site) -> AsyncIterator[Site]:
    yield workers
    await workers.mend()


def events(timeline: Timeline) -> list[str]:
    return [event["what"].partition(":")[0] for event in timeline["events"]]


def happened(what: str) -> Callable[[Timeline], bool]:
    return lambda timeline: what in events(timeline)


def made(tier: str, count: int) -> Callable[[Timeline], bool]:
    return lambda timeline: bool(timeline["tokens"][tier] > count)


async def when(site: Site, id: str, condition: Callable[[Timeline], bool]) -> None:
    """Return when the session's timeline is so."""

    def so() -> bool:
        timeline = site.fleet.timelines.get(id)
        return timeline is not None and condition(timeline.body())

    await until(so)


# By name: the driver's graph, who fails, when, and whether it comes back.
MOMENTS: dict[str, tuple[tuple[str, ...], str, Callable[[Timeline], bool]]] = {
    "prefill, prefilling": ((RELAY,), "prefill", happened("prefill starts")),
    "prefill, prefilling, no relay": ((NEVER,), "prefill", happened("prefill starts")),
    "prefill, giving to main": ((RELAY,), "prefill", made("relay", 3)),
    "prefill, giving to main, no relay": ((NEVER,), "prefill", happened("first token")),
    "relay, receiving": ((RELAY,), "relay", happened("prefill starts")),
    "relay, decoding": ((RELAY,), "relay", made("relay", 3)),
    "relay, sealed": ((RELAY,), "relay", happened("seal")),
    "main, receiving": ((RELAY,), "main", made("relay", 3)),
    "main, extending": ((RELAY,), "main", happened("extended")),
    "main, sealed": ((RELAY,), "main", happened("seal")),
    "main, decoding": ((RELAY,), "main", made("main", 3)),
    "main, decoding, no relay": ((NEVER,), "main", made("main", 3)),
}


@pytest.mark.parametrize("moment", MOMENTS)
async def test_after_a_kill_the_answer_is_that_of_an_undisturbed_run(site: Site, prompt: Prompt, moment: str) -> None:
    overrides, pool, condition = MOMENTS[moment]
    driver, tokens = await site.fleet.driver(*overrides), prompt(LONG)
    expected = await site.expected(tokens, 250, **SEEDED)
    asking = asyncio.create_task(site.fleet.ask(driver, tokens, 250, id=moment, **SEEDED))
    await when(site, moment, condition)
    await site.fleet.kill(pool)
    await site.fleet.spawn(pool)
    answer = await asking
    assert answer.tokens == expected.tokens
    assert answer.finish.reason == "length"
    recoveries = answer.timeline["recoveries"]
    assert {recovery["worker"] for recovery in recoveries} <= {f"{pool}/0"}
    assert recoveries or "sealed" in moment or "giving" in moment  # then it may have given all
    told(moment, answer)


@pytest.mark.parametrize(("pool", "condition"), [("relay", made("relay", 3)), ("main", made("main", 3))])
async def test_a_worker_that_hangs_is_not_waited_for_where_another_can_go_on(
    site: Site, prompt: Prompt, pool: str, condition: Callable[[Timeline], bool]
) -> None:
    driver, tokens = (
        await site.fleet.driver(RELAY, "spec.handoff={plugin: catch-up, config: {min_relay_tokens: 10}}"),
        prompt(200),
    )
    expected = await site.expected(tokens, 1000)
    asking = asyncio.create_task(site.fleet.ask(driver, tokens, 1000, id=f"{pool} hangs"))
    await when(site, f"{pool} hangs", condition)
    site.signal(pool, signal.SIGSTOP)
    try:
        answer = await asking
    finally:
        site.signal(pool, signal.SIGCONT)
    assert answer.ids == expected.ids
    assert [(r["role"], r["reason"]) for r in answer.timeline["recoveries"]] == [(pool, "silent")]
    told(f"{pool} hangs", answer)


async def test_a_worker_that_hangs_alone_goes_on_when_it_is_heard_again(
    new_fleet: Callable[..., Any], prompt: Prompt
) -> None:
    fleet = new_fleet("spec.pools.all.engine.config={token_time: 0.01}", text=ALONE)
    await fleet.start()
    driver, tokens = await fleet.driver(), prompt(100)
    expected = await fleet.ask(driver, tokens, 150)
    asking = asyncio.create_task(fleet.ask(driver, tokens, 150, id="hangs"))
    await until(lambda: fleet.timelines.get("hangs") and fleet.timelines.get("hangs").tokens.main > 3)
    peer = driver._peers.ready[0]
    fleet.processes["all", 0].send_signal(signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE):
        await peer.connection.wait_suspected()
    assert not driver.ready
    fleet.processes["all", 0].send_signal(signal.SIGCONT)
    answer = await asking
    assert answer.ids == expected.ids
    assert answer.timeline["recoveries"] == []
    await fleet.idle()


def told(what: str, answer: Any) -> None:
    """Print the longest wait of its user, for who runs this with `-s`."""
    gaps = [after - before for before, after in zip([0.0, *answer.times], answer.times, strict=False)]
    print(f"{what}: the longest wait for a token was {max(gaps):.2f} s")


# Who takes over


async def test_a_relay_that_no_edge_joins_to_the_prefill_takes_over(
    new_fleet: Callable[..., Any], site: Site, prompt: Prompt
) -> None:
    pools = "    main: {role: main"
    others = (
        "    far: {role: prefill, cluster: dc-a, engine: *e}\n    other: {role: relay, cluster: dc-a, engine: *e}\n"
    )
    edges = """  edges:
    - {from: far, to: other, carries: kv, transport: {plugin: tcp}}
    - {from: far, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
    - {from: other, to: main, carries: tokens, link: wan}
"""
    text = GRAPH.replace(pools, others + pools).replace("  edges:\n", edges)
    fleet = new_fleet("spec.links.wan.bandwidth=1Mbit/s", text=text)
    await fleet.start()
    driver, tokens, id = await fleet.driver(RELAY), prompt(LONG), "unjoined"
    await until(lambda: len(driver._peers.ready) == 5)

    def relays() -> list[str]:
        timeline = fleet.timelines.get(id)
        return [e["worker"] for e in timeline.body()["events"] if e["what"] == "relay starts"] if timeline else []

    asking = asyncio.create_task(fleet.ask(driver, tokens, 200, id=id))
    await until(relays)
    await fleet.kill(relays()[0].partition("/")[0])
    answer = await asking
    assert answer.ids == (await site.expected(tokens, 200)).ids
    assert [recovery["role"] for recovery in answer.timeline["recoveries"]] == ["relay"]
    await fleet.idle()


async def test_others_of_the_same_pool_take_over_what_there_is(new_fleet: Callable[..., Any], prompt: Prompt) -> None:
    pools = (f"spec.pools.{pool}.replicas=2" for pool in ("prefill", "main"))
    fleet = new_fleet(*pools, "spec.links.wan.bandwidth=1Mbit/s", text=GRAPH)
    await fleet.start()
    driver, tokens = await fleet.driver(RELAY), prompt(LONG)
    ids = [f"both-{i}" for i in range(2)]

    def told(name: str) -> list[str]:
        """At which worker this happened, for each of the two."""
        found = [fleet.timelines.get(id) for id in ids]
        return [e["worker"] for t in found if t is not None for e in t.body()["events"] if e["what"].startswith(name)]

    # Two that ask the same at once find one worker of each pool each, so that both prefill workers have the prompt.
    asking = [asyncio.create_task(fleet.ask(driver, tokens, 400, id=id)) for id in ids]
    await until(lambda: len(told("relay starts")) == 2)
    givers = told("prefill starts")
    assert sorted(givers) == ["prefill/0", "prefill/1"]
    await fleet.kill("prefill", 0)
    await until(lambda: len(told("commit")) == 2)
    mains = told("commit")
    assert sorted(mains) == ["main/0", "main/1"]
    await fleet.kill("main", 0)
    answers = await asyncio.gather(*asking)
    assert answers[0].ids == answers[1].ids
    for worker, other, bereft in (("prefill/0", "prefill/1", givers), ("main/0", "main/1", mains)):
        recoveries = answers[bereft.index(worker)].timeline["recoveries"]
        (to,) = (recovery["to"] for recovery in recoveries if recovery["worker"] == worker)
        assert other in to
    await fleet.idle()


async def test_an_engine_that_crashes_is_gone_on_for_elsewhere(new_fleet: Callable[..., Any], prompt: Prompt) -> None:
    """Not the process dies but the engine in it, in the middle of an answer."""
    fleet = new_fleet("spec.pools.main.engine.config.crash_after=50", text=GRAPH)
    await fleet.start()
    driver, tokens = await fleet.driver(NEVER), prompt(100)
    answer = await fleet.ask(driver, tokens, 120)
    recovery = answer.timeline["recoveries"][0]
    assert (recovery["role"], recovery["to"]) == ("main", "relay/0")
    assert recovery["reason"] in {"engine", "worker-lost"}  # whichever is told first
    assert answer.timeline["tokens"]["relay"] > 0
    await fleet.processes.pop(("main", 0)).wait()
    await fleet.idle()


# What nobody can go on with


async def test_a_session_waits_for_a_worker_to_come_back_and_no_longer_than_it_may(
    new_fleet: Callable[..., Any], prompt: Prompt
) -> None:
    fleet = new_fleet("spec.pools.all.engine.config={token_time: 0.01}", text=ALONE)
    await fleet.start()
    driver, tokens = await fleet.driver(), prompt(100)
    hasty = await fleet.driver("spec.recovery.wait=200ms")
    expected = await fleet.ask(driver, tokens, 150)
    drivers = (driver, hasty, driver, driver)
    asking = [asyncio.create_task(fleet.ask(d, tokens, 150, id=str(i))) for i, d in enumerate(drivers)]
    for i in range(4):
        await until(lambda i=i: fleet.timelines.get(str(i)) and fleet.timelines.get(str(i)).tokens.main > 3)
    await fleet.kill("all")
    with pytest.raises(WorkerLost, match=r"worker all/0 \(aggregated\) was lost") as failure:
        await asking[1]
    assert "in 0.2 s nobody came who can go on: no aggregated worker is ready" in failure.value.why
    # Those who wait as well, and are cancelled, or have had enough.
    asking[2].cancel()
    await asyncio.wait({asking[2]})
    driver.stop("3")
    assert (await asking[3]).finish.reason == "stop"
    await until(lambda: driver.sessions == 1)
    await fleet.spawn("all")
    answer = await asking[0]
    assert answer.ids == expected.ids
    assert answer.timeline["recoveries"][0]["to"] == "all/0"
    await fleet.idle()


async def test_who_cannot_go_on_as_it_was_begun_is_not_asked(new_fleet: Callable[..., Any], prompt: Prompt) -> None:
    lacks = "spec.pools.relay.engine.config={token_time: 0.005, lacks: [penalties]}"
    fleet = new_fleet(lacks, "spec.recovery.wait=100ms", text=GRAPH)
    await fleet.start()
    driver = await fleet.driver(NEVER)
    for id, sampling in (("plain", {}), ("penalised", {"frequency_penalty": 0.5})):
        asking = asyncio.create_task(fleet.ask(driver, prompt(100), 150, id=id, **sampling))
        await until(lambda id=id: fleet.timelines.get(id) and fleet.timelines.get(id).tokens.main > 3)
        if id == "plain":
            await fleet.kill("main")
            assert (await asking).timeline["recoveries"][0]["to"] == "relay/0"
            await fleet.spawn("main")
            await until(lambda: len(driver._peers.ready) == 3)
            continue
        await fleet.kill("main")
        with pytest.raises(WorkerLost, match="main/0") as failure:
            await asking
        assert "in 0.1 s nobody came who can go on" in failure.value.why
        assert "relay/0 cannot: penalties" in failure.value.why
    await fleet.idle()


async def test_choices_of_one_request_recover_each_and_share_what_they_shared(
    new_fleet: Callable[..., Any], prompt: Prompt
) -> None:
    fleet = new_fleet(text=GRAPH)
    await fleet.start()
    driver, tokens = await fleet.driver(RELAY), prompt(300)
    sampling = [{"temperature": 0.8, "seed": i} for i in range(4)]
    expected = await asyncio.gather(*(fleet.ask(driver, tokens, 200, **sampling[i]) for i in range(4)))
    await fleet.idle()
    beside = ["", "choice-0", "choice-0", "choice-0"]
    asking = [
        asyncio.create_task(
            fleet.ask(driver, tokens, 200, id=f"choice-{i}", beside=beside[i], **sampling[i]),
        )
        for i in range(4)
    ]
    await until(lambda: all((t := fleet.timelines.get(f"choice-{i}")) and t.tokens.main > 3 for i in range(4)))
    await fleet.kill("main")
    answers = await asyncio.gather(*asking)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    await fleet.idle()
