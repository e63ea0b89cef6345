"""What a changed graph makes of the processes that run: nothing that it need not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdd_runtime.graph import Graph, load, loads
from pdd_runtime.launch.difference import difference, unchangeable
from pdd_runtime.launch.forms import forms
from pdd_runtime.launch.part import Part
from pdd_runtime.launch.slot import Slot
from tests.graphs import pdd

QUICKSTART = Path(__file__).parents[2] / "graphs" / "quickstart.yaml"
GRAPH = pdd("changing", prefill="replicas: 2", main="replicas: 2", wan="bandwidth: 200Mbit/s, rtt: 20ms, streams: 8")
MORE = {
    "a second relay pool": (
        "spec.pools.relay2={role: relay, cluster: dc-a, engine: {plugin: scripted}}",
        "spec.edges=[{from: prefill, to: relay, carries: kv, transport: {plugin: tcp}},"
        "{from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan},"
        "{from: relay, to: main, carries: tokens, link: wan},"
        "{from: prefill, to: relay2, carries: kv, transport: {plugin: tcp}},"
        "{from: relay2, to: main, carries: tokens, link: wan}]",
    ),
    "no relay": (
        "spec.pools={prefill: {role: prefill, cluster: dc-a, replicas: 2, engine: {plugin: scripted}},"
        "main: {role: main, cluster: dc-b, replicas: 2, engine: {plugin: scripted}}}",
        "spec.edges=[{from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan}]",
    ),
}


def graph(*overrides: str) -> Graph:
    return loads(GRAPH, overrides).graph


def done(*overrides: str, part: Part = Part()) -> list[str]:  # noqa: B008 - frozen
    """`+main/1`, `~main/0` and `-relay/0`: what is added, replaced and removed, in order."""
    sign = {"add": "+", "replace": "~", "remove": "-"}
    changes = difference(forms(graph(), part), forms(graph(*overrides), part))
    return [f"{sign[change.kind]}{change.slot}" for change in changes]


def test_nothing_changed_is_nothing_to_do() -> None:
    assert done() == []
    quickstart = load(QUICKSTART).graph
    assert difference(forms(quickstart, Part()), forms(quickstart, Part())) == ()


def test_every_process_has_a_form() -> None:
    slots = ["prefill/0", "prefill/1", "relay/0", "main/0", "main/1", "frontend/0"]
    assert [str(slot) for slot in forms(graph(), Part())] == slots
    assert [str(slot) for slot in forms(graph(), Part("dc-b"))] == ["main/0", "main/1"]


ROLLED = ["~prefill/0", "~prefill/1", "~relay/0", "~main/0", "~main/1", "~frontend/0"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("spec.pools.main.replicas=4", ["+main/2", "+main/3"]),
        ("spec.pools.main.replicas=1", ["-main/1"]),
        ("spec.pools.main.hardware=h200", []),
        ("spec.pools.main.env={A: b}", ["~main/0", "~main/1"]),
        ("spec.pools.relay.engine.config={token_time: 0.01}", ["~relay/0"]),
        ("spec.routing={plugin: never-relay}", ["~frontend/0"]),
        ("spec.handoff={plugin: one-shot}", ["~frontend/0"]),
        ("spec.recovery.attempts=7", ["~frontend/0"]),
        ("spec.links.wan.rtt=30ms", ROLLED),
        ("spec.clusters.dc-b={advertise: localhost}", ["~main/0", "~main/1", "~frontend/0"]),
        ("spec.edges.0.transport={plugin: tcp, config: {checksum: false}}", ["~prefill/0", "~prefill/1", "~relay/0"]),
        ("spec.frontend.replicas=2", ["~frontend/0", "+frontend/1"]),
        ("spec.frontend.cluster=dc-b", ["~frontend/0"]),
    ],
)
def test_only_what_is_made_from_it_is_touched(override: str, expected: list[str]) -> None:
    if "edges" in override:
        # The frontends go by edges as well.
        expected = [*expected, "~frontend/0"]
    assert sorted(done(override)) == sorted(expected)


def test_another_reader_of_what_is_served_anyway_replaces_nobody_but_the_frontend() -> None:
    assert done(*MORE["a second relay pool"]) == ["+relay2/0", "~frontend/0"]


def test_what_is_not_used_any_more_goes_last() -> None:
    # What prefill serves has the settings of the first edge that asks for it: now that to main, with its streams.
    assert done(*MORE["no relay"]) == ["~prefill/0", "~prefill/1", "~frontend/0", "-relay/0"]


def test_a_part_has_its_own_difference() -> None:
    changed = ("spec.pools.main.replicas=3", "spec.routing={plugin: never-relay}")
    assert done(*changed, part=Part("dc-b")) == ["+main/2"]
    assert done(*changed, part=Part("dc-a")) == ["~frontend/0"]
    moved = "spec.frontend.cluster=dc-b"
    assert done(moved, part=Part("dc-a")) == ["-frontend/0"]
    assert done(moved, part=Part("dc-b")) == ["+frontend/0"]


def test_a_replacement_says_what_has_changed() -> None:
    before, after = forms(graph(), Part()), forms(graph("spec.pools.main.env={A: b}"), Part())
    (first, _) = difference(before, after)
    assert first.slot == Slot("main", 0)
    assert first.why == ('spec.pools.main.env.A: nothing → "b"',)


def test_no_secret_is_told_with_a_change() -> None:
    before, after = (
        forms(graph(f"spec.pools.main.engine.config={{api_key: {key}}}"), Part()) for key in ("hush", "sesame")
    )
    (first, _) = difference(before, after)
    (why,) = first.why
    assert why.startswith("spec.pools.main.engine.config.api_key: ")
    assert "hush" not in why
    assert "sesame" not in why


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("spec.discovery={plugin: etcd}", 'spec.discovery.plugin cannot be changed while the graph runs: "local" →'),
        ("spec.frontend.port=9000", "spec.frontend.port cannot be changed while the graph runs: 8000 → 9000"),
        ("spec.model.dtype=bfloat16", "spec.model.dtype cannot be changed while the graph runs:"),
        ("spec.security.tls={ca: a, cert: b, key: c}", "spec.security.tls cannot be changed"),
    ],
)  # fmt: skip
def test_what_cannot_be_changed_is_named_with_a_way_out(override: str, what: str) -> None:
    (fault,) = unchangeable(graph(), graph(override))
    assert what in fault.what
    assert fault.why
    assert "--set metadata.name" in fault.fix


def test_a_model_is_that_of_the_pools_that_stay() -> None:
    assert unchangeable(graph(), graph()) == []
    assert unchangeable(graph(), graph("spec.pools.relay.replicas=3", "spec.routing={plugin: never-relay}")) == []
