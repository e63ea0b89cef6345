from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pdd_runtime.errors import PddError
from pdd_runtime.planner.plan_spec import PlanError, PlanErrors, read_plan

PLAN = """
apiVersion: pdd/v1alpha1
kind: Plan
metadata: {name: sought}
spec:
  graph: pdd.yaml
  prices: {nodes: {h100: 20, h200: [24, 26]}, line: 7}
  pools:
    prefill: {replicas: 4..6, hardware: [8xH100, {hardware: 16xh100, config: {tp: 8}}]}
    main: {replicas: [2, 4]}
  links: {wan: {bandwidth: [10Gbit/s, 20Gbit/s]}}
  handoff: [catch-up, {plugin: one-shot, config: {max_relay_tokens: 9}}]
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "plan.yaml"
    path.write_text(text)
    return path


def test_short_forms_are_what_the_long_ones_say(tmp_path: Path) -> None:
    spec = read_plan(written(tmp_path, PLAN))[0].spec
    assert spec.pools["prefill"].replicas == (4, 5, 6)
    kinds = spec.pools["prefill"].hardware
    assert kinds is not None
    assert [(kind.hardware, kind.config) for kind in kinds] == [("8xh100", {}), ("16xh100", {"tp": 8})]
    assert spec.links["wan"].bandwidth == (1e10, 2e10)
    assert spec.handoff is not None
    assert [ref.plugin for ref in spec.handoff] == ["catch-up", "one-shot"]
    assert spec.prices.nodes["h200"].price.middle == 25
    assert spec.prices.line.price.low == 7


def test_a_plan_can_be_changed_from_outside(tmp_path: Path) -> None:
    path = written(tmp_path, PLAN)
    assert read_plan(path, ["spec.budget=80", "spec.pools.main.replicas=3"])[0].spec.budget == 80
    with pytest.raises(PlanError, match="unknown key") as told:
        read_plan(path, ["spec.bugdet=80"])
    assert told.value.where == "--set spec.bugdet=80"
    assert told.value.fix == 'did you mean "budget"?'


@pytest.mark.parametrize(
    ("old", "new", "line", "what", "help_"),
    [
        ("graph: pdd.yaml", "grahp: pdd.yaml", 6, 'unknown key "grahp"', 'did you mean "graph"?'),
        ("kind: Plan", "kind: InferenceGraph", 3, "kind is 'InferenceGraph'", "docs/planner.md"),
        ("4..6", "6..4", 9, "spec.pools.prefill.replicas is '6..4'", "6 is more than 4"),
        ("[2, 4]", "[2, 2]", 10, "spec.pools.main.replicas is a list", "stands twice"),
        ("8xH100", "0xH100", 9, "spec.pools.prefill.hardware.0", "has no chips"),
        ("20Gbit/s", "20Gbps", 11, "spec.links.wan.bandwidth.1 is '20Gbps'", 'did you mean "20Gbit/s"?'),
        ("[24, 26]", "[26, 24]", 7, "spec.prices.nodes.h200.price", "LOW not above HIGH"),
        ("line: 7}", "line: -7}", 7, "spec.prices.line.price is -7", "0 or more"),
        ("links:", "budget: 3\n  goodput: 2\n  links:", 6, "spec is a mapping", "exclude each other"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(
    tmp_path: Path, old: str, new: str, line: int, what: str, help_: str
) -> None:
    assert old in PLAN
    with pytest.raises(PlanError) as told:
        read_plan(written(tmp_path, PLAN.replace(old, new)))
    assert f"plan.yaml:{line}:" in told.value.where
    assert what in told.value.what
    assert help_ in f"{told.value.why} {told.value.fix}"
    assert "graph.md" not in str(told.value)


def test_several_faults_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(PlanErrors) as told:
        read_plan(written(tmp_path, PLAN.replace("[2, 4]", "-1").replace("h100: 20", "h100: x")))
    assert len(told.value.errors) == 2


def test_a_graph_in_a_plans_place_is_told_once(tmp_path: Path) -> None:
    graph = Path(__file__).parents[2] / "graphs" / "quickstart.yaml"
    with pytest.raises(PlanError, match="kind is 'InferenceGraph'") as told:
        read_plan(graph)
    assert not isinstance(told.value, PlanErrors)
    assert "graph: quickstart.yaml" in told.value.fix


@pytest.mark.parametrize("text", ["", "[]", "a: b: c", "\x00"])
def test_what_is_no_plan_at_all_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(PddError) as told:
        read_plan(written(tmp_path, text))
    assert isinstance(told.value, PlanError)


def test_the_examples_are_right() -> None:
    for path in sorted((Path(__file__).parents[2] / "examples" / "plan").glob("*.yaml")):
        if yaml.safe_load(path.read_text()).get("kind") == "Plan":
            plan, _ = read_plan(path)
            assert (path.parent / plan.spec.graph).exists()
