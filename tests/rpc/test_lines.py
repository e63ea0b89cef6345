from __future__ import annotations

from typing import Any

import pytest

from pdd_runtime.graph.models import Graph
from pdd_runtime.plugins.lines import Lines


def graph(**links: dict[str, Any]) -> Graph:
    return Graph.model_validate(
        {
            "apiVersion": "pdd/v1alpha1",
            "kind": "InferenceGraph",
            "metadata": {"name": "g"},
            "spec": {
                "model": {"source": "m"},
                "clusters": {"dc-a": {}, "dc-b": {}, "dc-c": {}},
                "links": links,
                "pools": {"all": {"role": "aggregated", "cluster": "dc-a", "engine": {"plugin": "e"}}},
            },
        }
    )


WAN = {"between": ["dc-a", "dc-b"], "bandwidth": "200Mbit/s", "rtt": "50ms", "jitter": "4ms", "emulate": True}


def test_an_emulated_link_gives_a_line_with_half_its_round_trip_in_each_direction() -> None:
    for here, there in (("dc-a", "dc-b"), ("dc-b", "dc-a")):
        line = Lines(graph(wan=WAN), here).to(there)
        assert line is not None
        assert [line.bandwidth, line.delay, line.jitter] == pytest.approx([200e6, 0.025, 0.002])


def test_all_senders_of_a_process_share_one_line() -> None:
    lines = Lines(graph(wan=WAN), "dc-a")
    assert lines.to("dc-b") is lines.to("dc-b")


def test_without_an_emulated_link_the_network_is_as_it_is() -> None:
    lines = Lines(graph(wan=WAN, real=WAN | {"between": ["dc-a", "dc-c"], "emulate": False}), "dc-a")
    assert lines.to("dc-c") is None
    assert lines.to("dc-a") is None
    assert lines.to("elsewhere") is None
