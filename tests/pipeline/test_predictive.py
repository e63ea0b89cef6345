"""The policy that reckons how long a prompt's KV takes to main."""

from __future__ import annotations

from typing import Any

import pytest

from pdd_runtime.graph import loads
from pdd_runtime.pipeline.links import Links
from pdd_runtime.pipeline.routing_policies import Predictive
from pdd_runtime.pipeline.sender import Seen
from pdd_runtime.plugins.routing import (
    ClusterView,
    EdgeView,
    LinkView,
    RequestFacts,
    Role,
    Route,
    WorkerKey,
    WorkerView,
)
from pdd_runtime.plugins.transport import LinkTelemetry

FACTS = RequestFacts(prompt_tokens=1000, max_tokens=100)
EDGES = (
    EdgeView(source="prefill", target="relay", carries="kv", link=None),
    EdgeView(source="prefill", target="main", carries="kv", link="wan"),
    EdgeView(source="relay", target="main", carries="tokens", link="wan"),
)
WAN = LinkView(name="wan", source="dc-a", target="dc-b", bandwidth=25e6, rtt=0.05)
BACK = LinkView(name="wan", source="dc-b", target="dc-a", bandwidth=25e6, rtt=0.05, queue=10**12)


def worker(role: Role, **more: Any) -> WorkerView:
    settings: dict[str, Any] = {"cached_tokens": 0, "running": 0, "waiting": 0, "batch_limit": 16, "token_bytes": 46080}
    cluster = "dc-b" if role == "main" else "dc-a"
    return WorkerView(key=WorkerKey(role, 0, "e"), role=role, cluster=cluster, **(settings | more))


def plan(link: LinkView | None = WAN, *, budget: str = "300ms", cached: int = 0, **relay: Any) -> Route:
    workers = (worker("prefill"), worker("relay", **relay), worker("main", cached_tokens=cached))
    links = (BACK, link) if link is not None else ()
    policy = Predictive(Predictive.Config.model_validate({"budget": budget}))
    return policy.plan(FACTS, ClusterView(workers=workers, edges=EDGES, links=links))


def seen(**more: Any) -> LinkView:
    return LinkView(name="wan", source="dc-a", target="dc-b", bandwidth=25e6, **({"rtt": 0.05} | more))


def test_a_cold_prompt_on_a_slow_line_is_relayed_and_the_numbers_say_why() -> None:
    route = plan()
    assert route.kind == "P-RLD-MD"
    # 46.08 MB at 25 MB/s, and a round trip.
    assert "46.1 MB behind 0 MB over wan at 200 Mbit/s (declared) take 1.89 s" in route.reason
    assert "budget of 0.3 s" in route.reason


def test_what_main_lacks_decides() -> None:
    # 100 tokens are 4.608 MB, 0.184 s and a round trip.
    assert plan(cached=900).kind == "P-MD"
    assert plan(cached=900, budget="200ms").kind == "P-RLD-MD"
    assert plan(cached=1000, budget="0ms").kind == "P-MD"


def test_goodput_as_measured_counts_rather_than_the_graphs_word() -> None:
    fast = plan(seen(goodput=1e9, rtt=0.001))
    assert fast.kind == "P-MD"
    assert "8e+03 Mbit/s (measured)" in fast.reason
    assert plan(seen(goodput=1e6), cached=980).kind == "P-RLD-MD"


def test_what_waits_on_the_link_already_counts() -> None:
    assert plan(seen(queue=0), cached=990).kind == "P-MD"
    queued = plan(seen(queue=25_000_000), cached=990)
    assert queued.kind == "P-RLD-MD"
    assert "behind 25 MB" in queued.reason


def test_a_relay_that_is_full_hides_less() -> None:
    assert plan(running=15).kind == "P-RLD-MD"
    assert "queue hides" not in plan(running=15).reason
    half = plan(running=16, waiting=7)
    assert half.kind == "P-RLD-MD"
    assert "a relay with 8 in its queue hides 0.947 s" in half.reason
    assert plan(running=16, waiting=15).kind == "P-MD"
    assert plan(running=16, waiting=40).kind == "P-MD"


def test_where_nothing_is_known_of_the_way_the_relay_is_taken() -> None:
    assert plan(None).kind == "P-RLD-MD"


GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: g}
spec:
  model: {source: x}
  clusters: {dc-a: {}, dc-b: {}}
  links: {wan: {between: [dc-a, dc-b], bandwidth: 200Mbit/s, rtt: 50ms}}
  pools: {all: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}}
"""


@pytest.fixture
def links() -> Links:
    return Links(loads(GRAPH).graph)


def test_a_link_nobody_has_sent_over_is_as_the_graph_says(links: Links) -> None:
    there, back = links.views([])
    assert there == WAN
    assert (back.source, back.target) == ("dc-b", "dc-a")


def test_each_direction_is_its_senders(links: Links) -> None:
    idle = LinkTelemetry(cluster="dc-b", goodput=20e6, rtt=0.06)
    there, back = links.views([Seen("dc-a", idle), Seen("dc-b", LinkTelemetry(cluster="dc-a", queue=7))])
    assert (there.goodput, there.rtt, there.queue) == (20e6, 0.06, 0)
    assert (back.goodput, back.rtt, back.queue) == (None, 0.05, 7)


def test_senders_that_are_busy_share_the_line_and_idle_ones_do_not_count(links: Links) -> None:
    busy = [
        Seen("dc-a", LinkTelemetry(cluster="dc-b", goodput=g, rtt=r, queue=5)) for g, r in ((10e6, 0.08), (9e6, 0.05))
    ]
    there, _ = links.views([*busy, Seen("dc-a", LinkTelemetry(cluster="dc-b", goodput=22e6))])
    assert (there.goodput, there.rtt, there.queue) == (19e6, 0.05, 10)
    there, _ = links.views([Seen("dc-a", LinkTelemetry(cluster="dc-b", goodput=g)) for g in (20e6, 22e6)])
    assert there.goodput == 22e6


def test_what_is_inside_a_cluster_or_beyond_the_graph_is_no_link(links: Links) -> None:
    assert links.views([Seen("dc-a", LinkTelemetry(cluster="dc-a", queue=9))]) == links.views([])
