from __future__ import annotations

import pytest

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import loads


def fault(text: str, *overrides: str) -> str:
    with pytest.raises(GraphError) as caught:
        loads(text, overrides, "g.yaml")
    return str(caught.value)


def test_a_value_is_parsed_as_yaml_and_replaces_the_files(pdd: str) -> None:
    spec = loads(
        pdd,
        [
            "spec.frontend.port=9000",
            "spec.model.mode=exact",
            "spec.pools.main.env={A: '1'}",
            "spec.links.wan.emulate=true",
            "spec.handoff={plugin: one-shot}",
            "spec.pools.main.engine.config.note=",
        ],
    ).graph.spec
    assert spec.frontend.port == 9000
    assert spec.model.mode == "exact"
    assert spec.pools["main"].env == {"A": "1"}
    assert spec.links["wan"].emulate is True
    assert spec.handoff.plugin == "one-shot"
    assert spec.pools["main"].engine.config == {"note": ""}


def test_a_list_takes_indices_and_the_next_one_appends(pdd: str) -> None:
    spec = loads(
        pdd,
        [
            "spec.edges.3={from: relay, to: main, carries: kv, transport: {plugin: wire}, link: wan}",
            "spec.edges.0.transport.plugin=other",
        ],
    ).graph.spec
    assert spec.edges[3].carries == "kv"
    assert spec.edges[0].transport is not None
    assert spec.edges[0].transport.plugin == "other"


def test_the_last_of_two_overrides_counts(pdd: str) -> None:
    assert loads(pdd, ["spec.frontend.port=1", "spec.frontend.port=2"]).graph.spec.frontend.port == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "spec.frontend.port=high",
            "--set spec.frontend.port=high: spec.frontend.port is 'high'\n  why: it must be a whole number\n"
            "  fix: leave it out for the default, 8000",
        ),
        (
            "spec.slo.ttft=1s",
            '--set spec.slo.ttft=1s: unknown key "ttft" in spec.slo\n'
            '  why: the keys here are ttft_p90, tpot_p90, hit_rate_gap\n  fix: did you mean "ttft_p90"?',
        ),
        (
            "spec.edges.5={}",
            '--set spec.edges.5={}: spec.edges is a list: "5" is no place in it\n  why: it has 3 items\n'
            "  fix: write a number from 0 to 3; 3 appends",
        ),
        (
            "spec.edges.first.link=wan",
            '--set spec.edges.first.link=wan: spec.edges is a list: "first" is no place in it\n'
            "  why: it has 3 items\n  fix: write a number from 0 to 3; 3 appends",
        ),
        (
            "spec.model.source.name=x",
            "--set spec.model.source.name=x: spec.model.source is one value: nothing is below it\n  why: it is 'tiny'",
        ),
        (
            "spec.model.mode",
            "--set spec.model.mode: this is not an override\n"
            "  fix: write a path and a value: --set spec.frontend.port=9000",
        ),
        (
            "spec..mode=exact",
            "--set spec..mode=exact: this is not an override\n"
            "  fix: write a path and a value: --set spec.frontend.port=9000",
        ),
        (
            "spec.pools.spare.role=main",
            '--set spec.pools.spare.role=main: spec.pools.spare has no "cluster"\n'
            '  why: it is required: where they stand\n  fix: add "cluster:" below it\n'
            '--set spec.pools.spare.role=main: spec.pools.spare has no "engine"\n'
            '  why: it is required: the engine plugin that computes\n  fix: add "engine:" below it',
        ),
    ],
)
def test_an_error_names_the_override(pdd: str, override: str, message: str) -> None:
    assert fault(pdd, override) == message


def test_a_value_that_is_no_yaml_names_the_override(pdd: str) -> None:
    assert fault(pdd, "spec.pools.main.env={A: ").startswith("--set spec.pools.main.env={A: :1:")
