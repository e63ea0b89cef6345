from __future__ import annotations

from pathlib import Path

import pytest

from pdd_runtime.discovery.mark import differences, mark_of
from pdd_runtime.graph import load

GRAPH = Path(__file__).parents[2] / "graphs" / "quickstart.yaml"


def differing(*overrides: str) -> list[str]:
    ours, theirs = mark_of(load(GRAPH).graph), mark_of(load(GRAPH, overrides).graph)
    found = differences(ours.shared, theirs.shared)
    assert (ours.digest == theirs.digest) == (not found)
    return found


@pytest.mark.parametrize(
    "override",
    [
        "spec.frontend.port=9000",
        "spec.frontend.replicas=2",
        "spec.pools.main.replicas=3",
        "spec.pools.main.env={A: b}",
        "spec.pools.main.engine.config={threads: 2}",
        "spec.slo.ttft_p90=1s",
    ],
)
def test_what_only_one_cluster_goes_by_makes_no_other_graph(override: str) -> None:
    assert differing(override) == []


def test_what_both_sides_go_by_is_told_part_by_part() -> None:
    assert differing("spec.links.wan.rtt=90ms") == ['spec.links.wan.rtt: "50ms" here, "90ms" there']
    assert differing("spec.pools.main.engine.plugin=torch") == [
        'spec.pools.main.engine: "llamacpp" here, "torch" there',
    ]
    assert differing("spec.edges.1.transport.config={checksum: false}") == [
        "spec.edges.1.transport.config.checksum: nothing here, false there"
    ]
    assert differing("spec.frontend.cluster=[dc-a, dc-b]") == [
        'spec.frontend.cluster: "dc-a" here, ["dc-a", "dc-b"] there'
    ]
    assert differing("spec.frontend.cluster=dc-b") == ['spec.frontend.cluster: "dc-a" here, "dc-b" there']
    assert differing("spec.model.dtype=bfloat16") == [
        f'spec.pools.{pool}.model.dtype: "float32" here, "bfloat16" there' for pool in ("main", "prefill", "relay")
    ]


def test_what_one_side_lacks_is_told_and_a_long_value_is_cut() -> None:
    ours = {"links": {"wan": {"rtt": "50ms"}}, "routing": {"config": {"words": "a" * 200}}}
    found = differences(ours, {"links": {}, "routing": {"config": {"words": ""}}})
    assert found[0] == 'spec.links.wan: {"rtt": "50ms"} here, nothing there'
    assert len(found[1]) < 150
    assert found[1].endswith('… here, "" there')
