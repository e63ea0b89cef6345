"""Promises about which transports a worker has."""

from __future__ import annotations

from typing import Any

import pytest

from pdd_runtime.errors import PluginError, TransferError
from pdd_runtime.graph import Graph, loads
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.transport import Transport
from pdd_runtime.testing.kv_parties import Context
from pdd_runtime.worker.transports import Transports

GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: many}
spec:
  model: {source: script}
  clusters: {dc-a: {}, dc-b: {}}
  links:
    wan: {between: [dc-a, dc-b], bandwidth: 1Gbit/s, rtt: 50ms, streams: 8}
  pools:
    near: {role: prefill, cluster: dc-b, engine: {plugin: scripted}}
    far: {role: prefill, cluster: dc-a, engine: {plugin: scripted}}
    tuned: {role: prefill, cluster: dc-a, engine: {plugin: scripted}}
    twin: {role: prefill, cluster: dc-a, engine: {plugin: scripted}}
    main: {role: main, cluster: dc-b, engine: {plugin: scripted}}
    other: {role: main, cluster: dc-b, engine: {plugin: scripted}}
  edges:
    - {from: near, to: main, carries: kv, transport: {plugin: tcp}}
    - {from: far, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
    - {from: tuned, to: main, carries: kv, transport: {plugin: tcp, config: {streams: 2}}, link: wan}
    - {from: twin, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
    - {from: near, to: other, carries: kv, transport: {plugin: tcp, config: {streams: 3}}}
"""


class NoSource:
    def open(self, subscription: Any) -> Any:
        raise AssertionError("nobody subscribes")


@pytest.fixture
def graph() -> Graph:
    return loads(GRAPH).graph


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, graph: Graph) -> Any:
    monkeypatch.setenv("PDD_PLUGINS", "tcp")
    return lambda pool: Transports(graph, pool, load_plugins(), Context("dc-b"))


def streams(transport: Transport) -> int:
    value: int = transport.config.streams  # type: ignore[attr-defined]
    return value


async def test_a_links_streams_are_the_default_of_its_edges(make: Any) -> None:
    transports = make("main")
    assert streams(transports.fetching("tcp", "near")) == 4
    assert streams(transports.fetching("tcp", "far")) == 8
    assert streams(transports.fetching("tcp", "tuned")) == 2
    await transports.close()


async def test_edges_of_equal_settings_share_one_instance(make: Any) -> None:
    transports = make("main")
    assert transports.fetching("tcp", "far") is transports.fetching("tcp", "twin")
    assert transports.fetching("tcp", "far") is not transports.fetching("tcp", "near")
    assert transports.fetching("tcp", "") is transports.fetching("tcp", "near")
    await transports.close()


async def test_a_pool_serves_its_outgoing_edges_and_fetches_from_none_of_them(make: Any) -> None:
    transports = make("near")
    assert list(await transports.serve(NoSource(), "127.0.0.1")) == ["tcp"]
    with pytest.raises(TransferError, match="no edge brings KV to pool near over transport tcp from main") as failure:
        transports.fetching("tcp", "main")
    assert "none" in failure.value.why
    await transports.close()


async def test_a_pool_that_only_receives_serves_nothing(make: Any) -> None:
    transports = make("main")
    assert await transports.serve(NoSource(), "127.0.0.1") == {}
    await transports.close()


async def test_a_wrong_setting_names_its_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDD_PLUGINS", "tcp")
    graph = loads(GRAPH, ["spec.edges.1.transport.config.streams=0"]).graph
    with pytest.raises(PluginError) as failure:
        Transports(graph, "main", load_plugins(), Context("dc-b"))
    assert failure.value.where == "spec.edges.1.transport.config"
