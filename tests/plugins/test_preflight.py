from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from pdd_runtime.errors import PddError
from pdd_runtime.graph import load
from pdd_runtime.plugins import PluginManager, load_plugins
from pdd_runtime.plugins.engine import Capabilities, ModelSpec
from pdd_runtime.plugins.preflight import preflight
from pdd_runtime.testing.scripted import ScriptedEngine

QUICKSTART = Path(__file__).parents[2] / "graphs" / "quickstart.yaml"


TORCH = tuple(f"spec.pools.{pool}.engine.plugin=torch" for pool in ("prefill", "relay", "main"))


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return load_plugins()


def faults(plugins: PluginManager, *overrides: str) -> list[str]:
    return [f"{error.where}: {error.what}" for error in preflight(load(QUICKSTART, overrides), plugins)]


@pytest.mark.parametrize("path", sorted(QUICKSTART.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_runs_on_what_is_installed(plugins: PluginManager, path: Path) -> None:
    assert preflight(load(path), plugins) == []


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("spec.pools.relay.engine.plugin=tourch", 'no installed plugin brings an engine called "tourch"'),
        ("spec.edges.1.transport.plugin=pigeon", 'no installed plugin brings a transport called "pigeon"'),
        ("spec.edges.1.transport.config.stream=2", 'transport tcp has no setting "stream"'),
        ("spec.routing.plugin=hit", 'no installed plugin brings a routing policy called "hit"'),
        ("spec.routing.config.threshold=2", 'setting "threshold" of routing policy hit-threshold is 2'),
        ("spec.handoff.plugin=late", 'no installed plugin brings a handoff strategy called "late"'),
        ("spec.discovery.plugin=zookeeper", 'no installed plugin brings a discovery called "zookeeper"'),
        ("spec.discovery.config.ttl=2", 'discovery local has no setting "ttl"'),
    ],
)
def test_every_plugin_and_setting_of_a_graph_is_checked_where_it_stands(
    plugins: PluginManager, override: str, what: str
) -> None:
    assert faults(plugins, override) == [f"--set {override}: {what}"]


def test_a_plugin_or_setting_that_is_not_there_is_told_with_the_nearest(plugins: PluginManager, tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    path.write_text(
        QUICKSTART.read_text()
        .replace("transport: {plugin: tcp}}", "transport: {plugin: tpc}}")
        .replace("config: {threshold: 0.9}", "config: {treshold: 0.9}")
    )
    lines = path.read_text().splitlines()
    edge = next(number for number, line in enumerate(lines, 1) if "plugin: tpc" in line)
    routing = next(number for number, line in enumerate(lines, 1) if "treshold" in line)
    transports = ", ".join(sorted(entry.name for entry in plugins.registered if entry.kind.noun == "transport"))
    assert [str(error) for error in preflight(load(path), plugins)] == [
        f'{path}:{edge}:67: no installed plugin brings a transport called "tpc"\n'
        f"  why: the transports are: {transports}\n"
        '  fix: did you mean "tcp"? Else install the distribution that brings it; `pdd-runtime plugins` then lists it, '
        "or what is wrong with it",
        f'{path}:{routing}:45: routing policy hit-threshold has no setting "treshold"\n'
        "  why: its settings are: finish_on_relay, threshold\n"
        '  fix: did you mean "threshold"?',
    ]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_PLACES = (
    "spec.pools.main.engine",
    "spec.pools.main.engine.plugin",
    "spec.pools.main.engine.config",
    "spec.pools.main.engine.config.kv_memory",
    "spec.pools.main.engine.config.block_size",
    "spec.edges.0.transport.config.streams",
    "spec.edges.0.transport.config.io_timeout",
    "spec.routing.config.threshold",
    "spec.handoff.config",
    "spec.discovery.config",
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(_PLACES), _json)
def test_no_setting_makes_anything_but_an_error_of_ours(plugins: PluginManager, place: str, value: object) -> None:
    with suppress(PddError):
        for fault in preflight(load(QUICKSTART, [f"{place}={json.dumps(value)}"]), plugins):
            assert isinstance(fault, PddError)
            assert fault.where


def test_a_fault_in_the_file_has_its_line(plugins: PluginManager, tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    path.write_text(QUICKSTART.read_text().replace("threshold: 64", "treshold: 64"))
    (error,) = preflight(load(path), plugins)
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "treshold" in text)
    assert error.where.startswith(f"{path}:{line}:")
    assert error.fix == 'did you mean "threshold"?'


def test_a_strategy_that_moves_kv_needs_an_edge_for_it(plugins: PluginManager) -> None:
    kv = "spec.handoff={plugin: kv-transfer}"
    what = 'handoff strategy kv-transfer moves kv, but no edge carries kv from "relay"'
    assert faults(plugins, kv) == [f"--set {kv}: {what}"]
    edge = "spec.edges.3={from: relay, to: main, carries: kv, transport: {plugin: tcp}, link: wan}"
    assert faults(plugins, kv, edge) == []


def test_pools_may_cut_kv_into_blocks_of_different_sizes(plugins: PluginManager) -> None:
    assert faults(plugins, "spec.pools.main.engine.config.block_size=32") == []


class _Native(ScriptedEngine):
    name = "native"

    @classmethod
    def promises(cls, model: ModelSpec, config: BaseModel) -> Capabilities:
        return Capabilities(kv="native")


def test_what_engines_promise_is_compared_with_what_the_graph_asks(tmp_path: Path) -> None:
    plugins = load_plugins()
    scripted = next(entry for entry in plugins.registered if entry.name == "scripted")
    plugins.registered.append(replace(scripted, name="native", cls=_Native))
    path = tmp_path / "g.yaml"
    path.write_text(
        QUICKSTART.read_text()
        .replace("mode: fast", "mode: exact")
        .replace("plugin: llamacpp", "plugin: scripted")
        .replace(
            "cluster: dc-b, replicas: 1, hardware: cpu, engine: {plugin: scripted",
            "cluster: dc-b, engine: {plugin: native",
        )
    )
    lines = path.read_text().splitlines()
    mode = next(number for number, line in enumerate(lines, 1) if "mode: exact" in line)
    edge = next(number for number, line in enumerate(lines, 1) if "from: prefill, to: main" in line)
    assert [str(error) for error in preflight(load(path), plugins)] == [
        f'{path}:{mode}:50: pool "main" cannot compute in exact mode\n'
        "  why: engine native has only the fast one\n  fix: set mode: fast, or choose another engine",
        f"{path}:{edge}:7: edge prefill → main moves KV from engine scripted to engine native\n"
        "  why: the KV of engine native is its own: no other engine reads it\n"
        "  fix: give both pools one engine, or engines with portable KV",
    ]


def test_a_running_server_has_one_worker() -> None:
    plugins, graph = load_plugins(), QUICKSTART.with_name("vllm.yaml")

    def attach(pool: str, port: int, socket: str) -> str:
        return f"spec.pools.{pool}.engine.config={{url: 'http://127.0.0.1:{port}', socket: {socket}}}"

    def found(*overrides: str) -> list[str]:
        return [f"{fault.what}: {fault.why}" for fault in preflight(load(graph, overrides), plugins)]

    assert found(attach("main", 8001, "/run/one"), attach("relay", 8002, "/run/two")) == []
    assert found(attach("main", 8001, "/run/one"), "spec.pools.main.replicas=2") == [
        'one worker alone can attach to url http://127.0.0.1:8001: "main" has 2 workers, '
        "and a server shares memory with one"
    ]
    for one, other, what in ((8001, 8001, "url http://127.0.0.1:8001"), (8001, 8002, "socket /run/one")):
        second = "/run/one" if one != other else "/run/two"
        assert found(attach("relay", one, "/run/one"), attach("main", other, second)) == [
            f'one worker alone can attach to {what}: pool "relay" has it as well, and a server shares memory with one'
        ]


def test_exact_mode_is_not_run_over_what_is_lossy(plugins: PluginManager) -> None:
    lossy = "spec.edges.1.transport.config.quantize=int8-channel"
    assert faults(plugins, lossy) == []
    exact = (*TORCH, "spec.model.mode=exact")
    assert faults(plugins, *exact) == []
    (fault,) = faults(plugins, *exact, lossy)
    assert "quickstart.yaml:31:57: transport tcp is lossy with these settings" in fault
