"""Who is let in, who waits and who is refused, over workers that a test makes up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from pdd_runtime.errors import Cancelled, NoRoute, Overloaded, RequestError
from pdd_runtime.graph import loads
from pdd_runtime.observe import Timeline
from pdd_runtime.pipeline.admission import Admission, Admitted
from pdd_runtime.pipeline.admission_metrics import AdmissionCollector
from pdd_runtime.pipeline.admission_room import Stock
from pdd_runtime.pipeline.capable import plan_capable
from pdd_runtime.pipeline.edges import Edges
from pdd_runtime.pipeline.links import Links
from pdd_runtime.pipeline.request import SessionRequest
from pdd_runtime.pipeline.routing_policies import AlwaysRelay
from pdd_runtime.plugins.engine import Sampling
from pdd_runtime.plugins.routing import ClusterView, Role, Route, WorkerKey, WorkerView
from tests.pipeline.conftest import GRAPH
from tests.waiting import until

TOKEN_BYTES = 1000


class World:
    """Workers with two places in each batch, and an admission before them."""

    def __init__(self, *overrides: str, text: str = GRAPH) -> None:
        graph = loads(text, list(overrides)).graph
        self.edges, self._links = Edges(graph), Links(graph)
        self.workers = {
            name: self.worker(name, pool.role, pool.cluster) for name, pool in graph.spec.pools.items() if name != "all"
        }
        self.stocks: dict[str, Stock] = {}
        self.queued = 0
        """Bytes that wait for the way to main."""
        self.at = 100.0
        self.admission = Admission(graph, self.view, self.plan, self.stock, clock=lambda: self.at)
        self.timelines: dict[str, Timeline] = {}
        self._number = 0

    def worker(self, pool: str, role: Role, cluster: str) -> WorkerView:
        return WorkerView(
            key=WorkerKey(pool, 0, "epoch"), role=role, cluster=cluster, cached_tokens=0, running=0, waiting=0,
            batch_limit=2, capabilities=frozenset({"seeded"}), token_bytes=TOKEN_BYTES,
        )  # fmt: skip

    def set(self, pool: str, **changes: Any) -> None:
        self.workers[pool] = msgspec.structs.replace(self.workers[pool], **changes)

    def view(self, tokens: Sequence[int], salt: str) -> ClusterView:
        return ClusterView(
            workers=tuple(self.workers.values()),
            edges=self.edges.views,
            links=tuple(
                msgspec.structs.replace(link, queue=self.queued if link.source == "dc-a" else 0)
                for link in self._links.views(())
            ),
            finishing=self.admission.finishing.view,
        )

    def plan(self, request: SessionRequest, view: ClusterView) -> Route:
        return plan_capable(AlwaysRelay(AlwaysRelay.Config()), request.facts, view)

    def stock(self, key: WorkerKey) -> Stock:
        return self.stocks.get(key.pool, Stock(0, 0))

    async def ask(self, tenant: str = "", *, prompt: int = 10, answer: int = 10, **more: Any) -> Admitted:
        self._number += 1
        request = SessionRequest(
            id=f"req-{self._number}",
            tokens=tuple(range(prompt)),
            max_tokens=answer,
            sampling=more.pop("sampling", Sampling()),
            tenant=tenant,
            **more,
        )
        timeline = self.timelines[request.id] = Timeline(request.id, "graph", prompt)
        return await self.admission.admit(request, timeline)

    def asks(self, tenant: str = "", **more: Any) -> asyncio.Task[Admitted]:
        """Beside the test, which need not look at what comes of it."""
        task = asyncio.create_task(self.ask(tenant, **more))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def fill(self) -> list[Admitted]:
        """Until there is no room: of prefill, which has the fewest places, three."""
        return [await self.ask() for _ in range(3)]

    async def waiting(self, count: int) -> None:
        await until(lambda: len(self.admission.queue) == count)

    def events(self, id: str) -> list[str]:
        return [event["what"] for event in self.timelines[id].body()["events"]]

    def metrics(self) -> dict[str, float]:
        found = {}
        for family in AdmissionCollector(self.admission).collect():
            for sample in family.samples:
                labels = ",".join(value for key, value in sample.labels.items() if key != "le")
                found[f"{sample.name}{{{labels}}}"] = sample.value
        return found


async def test_where_there_is_room_nobody_waits_not_even_for_a_step_of_the_loop() -> None:
    world = World()
    admitting = world.ask()
    with pytest.raises(StopIteration) as ended:
        admitting.send(None)
    assert ended.value.value.route.kind == "P-RLD-MD"
    assert world.events("req-1") == []


async def test_in_flight_is_bounded_by_the_stage_that_holds_least() -> None:
    world = World()
    held = await world.fill()
    fourth = world.asks()
    await world.waiting(1)
    assert world.events("req-4") == ["queued: behind 0: prefill/0 is full with 3 of 3 requests"]
    held[1].over()
    assert (await fourth).route.prefill is not None
    assert world.events("req-4")[1].startswith("admitted: after ")
    assert world.metrics()["pdd_queue_wait_seconds_count{}"] == 1


async def test_what_other_frontends_have_there_counts_too() -> None:
    world = World()
    world.set("main", running=2, waiting=2)
    asking = world.asks()
    await world.waiting(1)
    assert world.events("req-1") == ["queued: behind 0: main/0 is full with 4 of 4 requests"]
    world.set("main", running=2, waiting=1)
    await asking


async def test_who_has_a_queue_of_its_own_gets_no_more_although_others_are_still_on_their_way_to_it() -> None:
    world = World()
    world.set("main", running=2, waiting=1)
    world.stocks["main"] = Stock(0, 0, waiting=2)
    asking = world.asks()
    await world.waiting(1)
    assert world.events("req-1") == ["queued: behind 0: main/0 has 2 in its own queue, more than 1"]
    world.stocks["main"] = Stock(0, 0, waiting=1)
    await asking


async def test_main_takes_as_many_more_as_are_on_their_way_while_its_batch_makes_room() -> None:
    world = World()
    world.set("main", batch_limit=8)
    main = world.workers["main"]
    assert world.admission.room.most(main) == 16
    for _ in range(200):
        admitted = await world.ask()
        timeline = world.timelines[f"req-{world._number}"] = Timeline("slow", "graph", 10, clock=lambda: world.at)
        admitted.begins(timeline)
        world.at += 3.0
        timeline.event("main/0", "main starts: behind 7 tokens")
        timeline.event("main/0", "commit: gap 0.1 s")
        timeline.tokens.main = 10
        world.at += 4.0
        admitted.over(10, whole=True)
    assert world.admission.room.most(main) == 8 + 2 + 6
    world.admission.room.learn_way("main", 0.0, 4.0)
    for _ in range(200):
        world.admission.room.learn_way("main", 0.2, 4.0)
    assert world.admission.room.most(main) == 8 + 2 + 1
    for _ in range(200):
        world.admission.room.learn_way("main", 400.0, 4.0)
    assert world.admission.room.most(main) == 8 + 2 + 32


async def test_a_full_relay_is_left_out_and_nobody_waits_for_it() -> None:
    world = World()
    world.set("relay", running=2, waiting=2)
    admitted = await world.ask()
    assert admitted.route.kind == "P-MD"
    assert admitted.route.reason == "relay/0 is full with 4 of 4 requests, though the policy is to relay always"


async def test_another_main_pool_takes_what_the_first_has_no_room_for() -> None:
    other = "{role: main, cluster: dc-b, engine: {plugin: scripted}}"
    edge = "{from: prefill, to: other, carries: kv, transport: {plugin: tcp}, link: wan}"
    world = World(f"spec.pools.other={other}", f"spec.edges.4={edge}")
    world.set("other", waiting=3)
    world.set("main", running=2, waiting=2)
    assert (await world.ask()).route.main.pool == "other"


async def test_prefill_does_not_run_ahead_of_the_blocks_of_main() -> None:
    world = World()
    world.stocks["main"] = Stock(used=0, total=1000)
    first = await world.ask(prompt=600, answer=100)
    second = world.asks(prompt=400, answer=100)
    await world.waiting(1)
    assert world.events("req-2") == ["queued: behind 0: main/0 has 700 of 1000 tokens in use, too many for 500 more"]
    first.over(answer=100, whole=True)
    await second


async def test_one_that_is_larger_than_all_blocks_is_let_in_when_nothing_else_is_there() -> None:
    world = World()
    world.stocks["main"] = Stock(used=0, total=1000)
    await world.ask(prompt=5000)


async def test_blocks_of_a_relay_count_until_it_is_let_go() -> None:
    world = World()
    world.stocks["relay"] = Stock(used=0, total=1000)
    first = await world.ask(prompt=900)
    timeline = world.timelines["req-1"]
    first.begins(timeline)
    world.set("relay", running=1)
    assert (await world.ask(prompt=900)).route.kind == "P-MD"
    timeline.hands_off("catch-up").gap = 0.05
    assert (await world.ask(prompt=900)).route.kind == "P-RLD-MD"


async def test_kv_for_a_link_is_bounded_by_what_it_carries_in_its_time() -> None:
    world = World("spec.admission.link_time=1s")  # 2.5 MB of 20 Mbit/s
    first = await world.ask(prompt=2000)
    first.begins(world.timelines["req-1"])
    second = world.asks(prompt=2000)
    await world.waiting(1)
    assert world.events("req-2") == ["queued: behind 0: 2 of 2.5 MB wait for wan, too many for 2 more"]
    transfer = world.timelines["req-1"].transfer("prefill", "main")
    await asyncio.sleep(0)
    assert not second.done()
    transfer.finished = 1.0
    await second


async def test_bytes_that_others_have_waiting_for_a_link_count_too() -> None:
    world = World("spec.admission.links.wan.bytes=1MB")
    world.queued = 999_999
    asking = world.asks(prompt=100)
    await world.waiting(1)
    world.set("main", cached_tokens=100)  # It needs nothing of the link now.
    await asking


async def test_limits_of_a_pool_are_those_that_the_graph_says() -> None:
    world = World("spec.admission.pools.prefill.requests=1")
    await world.ask()
    world.asks()
    await world.waiting(1)
    metrics = world.metrics()
    assert (metrics["pdd_pool_requests_limit{prefill}"], metrics["pdd_pool_requests{prefill}"]) == (1, 1)
    world.admission.close()


async def test_turns_are_by_priority_then_by_shares() -> None:
    world = World("spec.admission.shares={b: 2}")
    held = await world.fill()
    order: list[str] = []

    async def one(name: str, tenant: str, priority: int) -> None:
        await world.ask(tenant, priority=priority)
        order.append(name)

    tasks = [asyncio.create_task(one(f"a{number}", "a", 0)) for number in range(4)]
    await world.waiting(4)
    tasks += [asyncio.create_task(one(f"b{number}", "b", 0)) for number in range(4)]
    await world.waiting(8)
    tasks.append(asyncio.create_task(one("urgent", "a", -1)))
    await world.waiting(9)
    assert world.metrics()["pdd_queue_length{a}"] == 5
    world.set("prefill", batch_limit=100)
    world.set("main", batch_limit=100)
    world.set("relay", batch_limit=100)
    held[0].over()
    await asyncio.gather(*tasks)
    assert order[0] == "urgent"
    assert order[1:7].count("a0") + order[1:7].count("a1") == 2, order
    assert [name for name in order if name[0] == "b"] == ["b0", "b1", "b2", "b3"]


async def test_a_full_queue_refuses_the_newest_of_who_has_most_waiting() -> None:
    world = World("spec.admission.queue=2")
    await world.fill()
    flood = [world.asks("flood"), world.asks("flood")]
    await world.waiting(2)
    with pytest.raises(Overloaded, match="the queue is full, with 2"):
        await world.ask("flood")
    modest = world.asks("modest")
    with pytest.raises(Overloaded):
        await flood[1]
    assert not modest.done()
    assert world.metrics()["pdd_refused_total{flood,full}"] == 2
    assert world.timelines["req-5"].body()["error"].startswith("request req-5: more is asked for than can be served")
    world.admission.close()


async def test_without_a_queue_one_that_finds_no_room_is_refused_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World("spec.admission.queue=0")
    await world.fill()
    for _ in range(3):
        with pytest.raises(Overloaded):
            await world.ask()
    world.at += 61
    with pytest.raises(Overloaded):
        await world.ask()
    assert caplog.messages == ["requests are refused from now on: the queue is full, with 0"] * 2


async def test_who_would_wait_too_long_is_told_so_at_once_and_when_to_come_again() -> None:
    world = World("spec.admission.max_wait=10s")
    held = await world.fill()
    tasks = [world.asks("a") for _ in range(40)]
    await world.waiting(40)
    for number in range(20):  # two a second
        world.at += 0.5
        held[number].over()
        held.append(await tasks[number])
    # Twenty wait, which takes ten seconds, about.
    refused: list[asyncio.Task[Admitted]] = []
    while not refused:
        task = world.asks("a")
        await until(lambda task=task: task.done() or len(world.admission.queue) == 20 + len(tasks) - 39)
        (refused if task.done() else tasks).append(task)
    ahead = len(world.admission.queue)
    assert 18 <= ahead <= 23
    with pytest.raises(
        Overloaded, match=f"{ahead} come first, and none waits for more than 10 s; 2.* a second"
    ) as caught:
        await refused[0]
    assert caught.value.retry_after == pytest.approx((ahead + 1) / 2, rel=0.1)
    # Another tenant's turn comes sooner.
    other = world.asks("b")
    await world.waiting(ahead + 1)
    assert world.metrics()["pdd_refused_total{a,long}"] == 1
    other.cancel()
    world.admission.close()
    await asyncio.wait(tasks)


async def test_who_has_waited_for_too_long_is_refused() -> None:
    world = World("spec.admission.max_wait=50ms")
    held = await world.fill()
    with pytest.raises(Overloaded, match=r"no room for it within 0\.05 s; none was let in of late"):
        await world.ask()
    assert len(world.admission.queue) == 0
    held[0].over()
    await world.ask()


async def test_cancelling_while_queued_frees_the_place_at_once() -> None:
    world = World("spec.admission.queue=1")
    await world.fill()
    first = world.asks()
    await world.waiting(1)
    first.cancel()
    await asyncio.wait({first})
    assert first.cancelled()
    assert len(world.admission.queue) == 0
    assert world.events("req-4")[-1] == "cancelled"
    world.asks()
    await world.waiting(1)
    world.admission.close()


async def test_cancelled_in_the_very_step_of_its_admission_it_gives_its_place_to_the_next() -> None:
    world = World()
    held = await world.fill()
    first, second = world.asks(), world.asks()
    await world.waiting(2)
    held[0].over()
    first.cancel()
    assert (await second).route.kind == "P-RLD-MD"
    assert first.cancelled()
    for _ in range(3):
        held.append(world.asks())  # type: ignore[arg-type]
    await world.waiting(3)
    world.admission.close()


async def test_without_a_route_a_new_request_fails_and_a_queued_one_waits_for_the_worker_to_come_back() -> None:
    world = World()
    held = await world.fill()
    queued = world.asks()
    await world.waiting(1)
    main = world.workers.pop("main")
    held[0].over()
    await asyncio.sleep(0.1)  # several looks
    assert not queued.done()
    world.workers["main"] = main
    await queued
    world.workers.pop("main")
    for each in held:
        each.over()
    with pytest.raises(NoRoute, match="no main worker is ready"):
        await world.ask()


async def test_what_nobody_can_do_is_refused_and_blocks_nobody() -> None:
    world = World()
    with pytest.raises(RequestError, match="cannot: logprobs"):
        await world.ask(sampling=Sampling(logprobs=1))
    held = await world.fill()
    first, wrong, right = world.asks(), world.asks(sampling=Sampling(logprobs=1)), world.asks()
    await world.waiting(3)
    held[0].over()
    (await first).over()
    with pytest.raises(RequestError, match="cannot: logprobs"):
        await wrong
    await right


async def test_closing_tells_those_who_wait() -> None:
    world = World()
    await world.fill()
    asking = world.asks()
    await world.waiting(1)
    world.admission.close()
    with pytest.raises(Cancelled, match="closing"):
        await asking
