from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from pdd_runtime.graph import Graph
from pdd_runtime.testing.faults import KINDS, FaultError, schedule, targets


def graph(**spec: Any) -> Graph:
    engine = {"plugin": "scripted"}
    return Graph.model_validate(
        {
            "apiVersion": "pdd/v1alpha1",
            "kind": "InferenceGraph",
            "metadata": {"name": "g"},
            "spec": {
                "model": {"source": "m"},
                "clusters": {"dc-a": {}, "dc-b": {}},
                "links": {"wan": {"between": ["dc-a", "dc-b"], "bandwidth": "1Gbit/s", "rtt": "1ms", "emulate": True}},
                "pools": {
                    "prefill": {"role": "prefill", "cluster": "dc-a", "engine": engine},
                    "main": {"role": "main", "cluster": "dc-b", "replicas": 2, "engine": engine},
                },
                "discovery": {"plugin": "etcd", "config": {"endpoints": ["http://127.0.0.1:2379"]}},
                **spec,
            },
        }
    )


def test_the_same_seed_makes_the_same_faults_and_another_one_others() -> None:
    one, two, other = (schedule(graph(), KINDS, 600, 20, 5, seed) for seed in (1, 1, 2))
    assert one == two
    assert one != other


def test_each_kind_comes_as_often_and_each_target_too_in_time() -> None:
    faults = schedule(graph(), KINDS, span=1250, every=10, lasting=5, seed=3)
    kinds = Counter(fault.kind for fault in faults)
    assert set(kinds) == set(KINDS)
    assert max(kinds.values()) - min(kinds.values()) <= 1
    struck = Counter(fault.target for fault in faults if fault.kind == "kill")
    assert set(struck) == {"prefill/0", "main/0", "main/1"}
    assert max(struck.values()) - min(struck.values()) <= 1
    assert all(7.5 <= b.at - a.at <= 12.5 for a, b in pairwise(faults))
    assert faults[0].at >= 5
    assert all(fault.at + fault.seconds <= 1250 for fault in faults)
    assert {fault.kind for fault in faults if fault.seconds} == {"hang", "cut", "etcd", "disk"}


def test_a_short_span_has_no_fault() -> None:
    assert schedule(graph(), ("kill",), span=4, every=10, lasting=5, seed=0) == ()


def test_the_frontends_cluster_is_not_killed() -> None:
    assert targets(graph(), "cluster") == ("dc-b",)


@pytest.mark.parametrize(
    ("kind", "spec", "told"),
    [
        ("kil", {}, "there is no fault"),
        ("cut", {"links": {}}, "only links with emulate: true"),
        ("etcd", {"discovery": {"plugin": "local"}}, "its discovery is not etcd"),
    ],
)
def test_what_the_graph_has_nothing_for_is_refused(kind: str, spec: dict[str, Any], told: str) -> None:
    with pytest.raises(FaultError, match=told):
        schedule(graph(**spec), (kind,), 60, 10, 5, 0)
