"""Graphs whose traffic is split between variants."""

from __future__ import annotations

import pytest

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import loads


def told(text: str) -> str:
    with pytest.raises(GraphError) as caught:
        loads(text, [], "g.yaml")
    return str(caught.value)


def test_a_graph_without_variants_has_no_control(pdd: str) -> None:
    graph = loads(pdd, [], "g.yaml").graph
    assert (graph.spec.variants, graph.control) == ({}, "")


def test_the_control_is_the_first_unless_named(pdd: str) -> None:
    split = pdd + "  variants: {b: {weight: 9}, a: {routing: {plugin: never-relay}, pools: [prefill, main]}}\n"
    graph = loads(split.replace("weight: 9", "weight: 9, pools: [prefill, relay, main]"), [], "g.yaml").graph
    assert graph.control == "b"
    assert graph.spec.variants["a"].weight == 1.0
    assert loads(split, ["spec.experiment.control=a"], "g.yaml").graph.control == "a"


@pytest.mark.parametrize(
    ("variants", "words"),
    [
        ("  variants: {a: {pools: [prefill, man]}}", ['g.yaml:21:35: there is no pool "man"', 'mean "main"']),
        ("  variants: {a: {}}\n  experiment: {control: b}", ['g.yaml:22:25: there is no variant "b"']),
        (
            "  variants: {a: {}, b: {pools: [relay, main]}}",
            ['"b" has no whole route', "prefill pool that feeds"],
        ),
        ("  variants: {a: {weight: 0}}", ["no variant gets any requests"]),
        ("  variants: {a: {pools: [prefill, main]}}", ['no variant takes pool "relay"', "g.yaml:15:"]),
        ("  experiment: {salt: again}", ["nothing to split traffic between", "spec.variants: {a:"]),
        ("  variants: {a: {weight: -1}}", ["g.yaml:21:", "greater than or equal to 0"]),
        (
            "  variants: {a: {}}\n  experiment: {sticky: [cookie]}",
            ["g.yaml:22:", "none of: key, user, conversation"],
        ),
        ("  variants: {a: {}}\n  experiment: {guardrails: {window: 10}}", ["g.yaml:22:37:", "is not a duration"]),
    ],
)
def test_what_is_wrong_with_variants_is_told_with_its_place(pdd: str, variants: str, words: list[str]) -> None:
    message = told(f"{pdd}{variants}\n")
    for word in words:
        assert word in message, message
