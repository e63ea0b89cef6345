from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from pydantic import BaseModel

from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.schema import graph_schema, settings_schema

GRAPHS = sorted((Path(__file__).parents[2] / "graphs").glob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return graph_schema(load_plugins())


@pytest.fixture
def quickstart() -> dict[str, Any]:
    graph: dict[str, Any] = yaml.safe_load(next(path for path in GRAPHS if path.stem == "quickstart").read_text())
    return graph


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_every_example_is_valid(schema: dict[str, Any], path: Path) -> None:
    jsonschema_rs.validate(schema, yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("spec.links.wan.bandwidth", "200Mbps"),
        ("spec.links.wan.rtt", 50),
        ("spec.pools.main.role", "mian"),
        ("spec.pools.main.replica", 2),
        ("spec.pools.Main", {"role": "main"}),
        ("spec.pools.main.engine.plugin", "tourch"),
        ("spec.pools.main.engine.config.thread", 2),
        ("spec.pools.main.engine.config.threads", 0),
        ("spec.edges.0.transport.config.stream", 2),
        ("spec.routing.plugin", "catch-up"),
    ],
)
def test_an_editor_sees_what_is_wrong(
    schema: dict[str, Any], quickstart: dict[str, Any], place: str, value: object
) -> None:
    graph = copy.deepcopy(quickstart)
    here: Any = graph
    *steps, last = [int(step) if step.isdecimal() else step for step in place.split(".")]
    for step in steps:
        here = here.setdefault(step, {}) if isinstance(here, dict) else here[step]
    here[last] = value
    assert not jsonschema_rs.is_valid(schema, graph)


def test_an_editor_has_something_to_say_about_every_key(schema: dict[str, Any]) -> None:
    for name, form in schema["$defs"].items():
        # Plugins' own settings, such as "engine.torch", are their authors' to describe.
        for key, value in ({} if "." in name else form.get("properties", {})).items():
            assert value.get("description"), f"{name}.{key}"


def test_defaults_are_written_as_people_write_them(schema: dict[str, Any]) -> None:
    assert schema["$defs"]["Link"]["properties"]["jitter"]["default"] == "0s"


def test_the_text_below_a_setting_is_its_description() -> None:
    class Config(BaseModel):
        speed: int = 1
        """How fast it is,
        in tokens."""
        plain: int = 2

    properties = settings_schema(Config)["properties"]
    assert properties["speed"]["description"] == "How fast it is, in tokens."
    assert "description" not in properties["plain"]
