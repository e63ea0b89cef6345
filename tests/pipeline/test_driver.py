from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdd_runtime.discovery import LocalDiscovery
from pdd_runtime.errors import GraphError, NoRoute, PluginError
from pdd_runtime.graph import Graph
from pdd_runtime.observe import Timelines
from pdd_runtime.pipeline import Driver, SessionRequest
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.engine import Sampling
from pdd_runtime.plugins.lines import Lines
from pdd_runtime.rpc import Greeting
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


def make(graph: Graph, timelines: Timelines) -> Driver:
    """A driver that is not started."""
    discovery = LocalDiscovery(LocalDiscovery.Config(), "127.0.0.1:1", "secret")
    greeting = Greeting(graph=graph.name, secret="secret", cluster="dc-a", name="frontend/0")
    return Driver(graph, load_plugins(), discovery, greeting, Lines(graph, "dc-a"), timelines)


async def test_moving_the_relays_kv_needs_an_edge_for_it(fleet: Any) -> None:
    graph = fleet.graph_with("spec.handoff={plugin: kv-transfer}")
    assert make(graph, Timelines())
    lacking = tuple(edge for edge in graph.spec.edges if (edge.source, edge.carries) != ("relay", "kv"))
    graph = graph.model_copy(update={"spec": graph.spec.model_copy(update={"edges": lacking})})
    with pytest.raises(GraphError, match="moves KV from relay to main, and no edge carries it") as caught:
        make(graph, Timelines())
    assert "{from: relay, to: main, carries: kv, transport: {plugin: …}, link: wan}" in caught.value.fix


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("spec.handoff={plugin: sometime}", "sometime"),
        ("spec.routing={plugin: hit-threshold, config: {treshold: 1}}", "treshold"),
        ("spec.handoff={plugin: one-shot, config: {min_relay_tokens: 3, max_relay_tokens: 2}}", "never be handed off"),
    ],
)
async def test_a_policy_that_is_not_there_or_badly_set_is_refused(fleet: Any, override: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make(fleet.graph_with(override), Timelines())


async def test_it_tells_what_is_served(fleet: Any) -> None:
    driver = await fleet.driver()
    assert (await driver.info()).model == "scripted"
    assert (await driver.tokenizer()).eos_token_ids == (257,)


@pytest.mark.parametrize("short", ["prefill", "relay", "main"])
async def test_the_context_is_the_shortest_of_those_that_are_there(new_fleet: Callable[..., Any], short: str) -> None:
    fleet = new_fleet(f"spec.pools.{short}.engine.config.context_length=256")
    await fleet.start()
    driver = await fleet.driver()
    assert (await driver.info()).context_length == 256
    await fleet.kill(short)
    await until(lambda: short not in {member.key.pool for member, _ in driver.workers()})
    assert (await driver.info()).context_length == 8192


async def test_without_workers_a_request_ends_at_once_and_says_what_is_missing(fleet: Any) -> None:
    timelines = Timelines()
    driver = make(fleet.graph, timelines)
    request = SessionRequest(id="req-1", tokens=(65,), max_tokens=5, sampling=Sampling())
    with pytest.raises(NoRoute, match="no prefill and no main worker is ready"):
        async for _ in driver.run(request):
            pass
    timeline = timelines.get("req-1")
    assert timeline is not None
    assert "no prefill and no main worker is ready" in timeline.body()["error"]
    assert driver.sessions == 0
    assert not driver.ready
