from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdd_runtime.graph import load

GRAPHS = Path(__file__).parents[2] / "graphs"
NAMES = ["aggregated", "pd-intra", "pd-cross", "quickstart"]


@pytest.mark.parametrize("path", sorted(GRAPHS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_right_and_says_what_it_shows(path: Path) -> None:
    assert load(path).graph.name == path.stem
    assert path.read_text().startswith("# ")


def test_the_examples_differ_only_where_they_must() -> None:
    specs: dict[str, dict[str, Any]] = {
        name: load(GRAPHS / f"{name}.yaml").graph.spec.model_dump(by_alias=True, mode="json") for name in NAMES
    }
    quickstart = specs["quickstart"]
    for spec in specs.values():
        for key in ("model", "slo", "frontend", "discovery"):
            assert spec[key] == quickstart[key]
        for pool in spec["pools"].values():
            assert {**pool, "role": "", "cluster": ""} == {**quickstart["pools"]["main"], "role": "", "cluster": ""}
        for edge in spec["edges"]:
            assert edge["transport"] == (None if edge["carries"] == "tokens" else quickstart["edges"][0]["transport"])
    assert specs["pd-cross"]["links"] == quickstart["links"]
    assert [edge for edge in quickstart["edges"] if "relay" not in (edge["from"], edge["to"])] == specs["pd-cross"][
        "edges"
    ]


@pytest.mark.parametrize("name", ["quickstart-torch", "mixed"])
def test_quickstart_on_other_engines_is_the_same_graph(name: str) -> None:
    specs = [load(GRAPHS / f"{graph}.yaml").graph.spec for graph in ("quickstart", name)]
    ours, theirs = (spec.model_dump(by_alias=True, mode="json") for spec in specs)
    for pool, other in zip(ours["pools"].values(), theirs["pools"].values(), strict=True):
        other["engine"] = pool["engine"]
    assert theirs == ours
