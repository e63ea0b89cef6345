"""What is wrong with edges between engines that move their KV themselves is told, with its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import BaseModel

from pdd_runtime.graph import loads
from pdd_runtime.plugins import PluginManager, load_plugins
from pdd_runtime.plugins.engine import Capabilities, ModelSpec
from pdd_runtime.plugins.preflight import preflight
from pdd_runtime.testing.scripted import ScriptedEngine

GRAPH = """\
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: native}
spec:
  model: {source: script}
  clusters: {a: {}, b: {}}
  links:
    wan: {between: [a, b], bandwidth: 1Gbit/s, rtt: 50ms}
  pools:
    prefill: {role: prefill, cluster: a, engine: {plugin: scripted, config: {data_plane: native}}}
    relay: {role: relay, cluster: a, engine: {plugin: scripted, config: {data_plane: native}}}
    main: {role: main, cluster: b, engine: {plugin: scripted, config: {data_plane: native}}}
  edges:
    - {from: prefill, to: relay, carries: kv}
    - {from: prefill, to: main, carries: kv, link: wan}
    - {from: relay, to: main, carries: tokens, link: wan}
"""
MAIN = "b, engine: {plugin: scripted, config: {data_plane: native}}"
LINK = "rtt: 50ms"
TO_MAIN = "to: main, carries: kv, link: wan"
KINDS = [
    (
        # A portable pool fed by a native one.
        MAIN,
        "b, engine: {plugin: scripted}",
        [
            "g.yaml:15:7: edge prefill → main moves KV from data_plane: native to data_plane: pdd\n"
            "  why: what scripted moves itself is read only by one that moves it in the same way\n"
            "  fix: give both pools the same data_plane"
        ],
    ),
    (
        # Another engine.
        MAIN,
        "b, engine: {plugin: other, config: {data_plane: native}}",
        [
            "g.yaml:15:7: edge prefill → main moves KV from engine scripted to engine other\n"
            "  why: the KV of engine scripted is its own: no other engine reads it\n"
            "  fix: give both pools one engine, or engines with portable KV"
        ],
    ),
    (
        # Another engine, with portable KV.
        MAIN,
        "b, engine: {plugin: other}",
        [
            "g.yaml:15:7: edge prefill → main moves KV from engine scripted to engine other\n"
            "  why: the KV of engine scripted is its own: no other engine reads it\n"
            "  fix: give both pools one engine, or engines with portable KV"
        ],
    ),
    (
        TO_MAIN,
        "to: main, carries: kv, transport: {plugin: tcp}, link: wan",
        [
            "g.yaml:15:57: edge prefill → main has a transport, and its engines move KV themselves\n"
            "  why: both pools have scripted with data_plane: native: no block passes a transport\n"
            "  fix: remove the transport, or give both pools portable KV"
        ],
    ),
    (
        LINK,
        "rtt: 50ms, emulate: true",
        [
            'g.yaml:15:52: edge prefill → main crosses link "wan", which is emulated, '
            "and its engines move KV themselves\n"
            "  why: only what passes our own processes can be slowed: KV would cross at once, tokens would not\n"
            "  fix: remove `emulate` from the link, or give both pools portable KV"
        ],
    ),
    (
        "  edges:\n",
        "  handoff: {plugin: kv-transfer}\n  edges:\n",
        [
            'g.yaml:13:12: handoff strategy kv-transfer moves kv, and that of pool "relay" is native\n'
            "  why: scripted with data_plane: native gives out what it has prefilled, not what it is decoding\n"
            "  fix: choose a strategy that hands off token IDs, e.g. catch-up"
        ],
    ),
    (
        "  edges:\n",
        "    all: {role: aggregated, cluster: a, engine: "
        "{plugin: scripted, config: {data_plane: native, extend: prefill_assisted}}}\n  edges:\n",
        [
            'g.yaml:13:17: pool "all" is aggregated, and its engine cannot serve a request alone\n'
            "  why: scripted with data_plane: native computes no prompt: a prefill pool does it for it\n"
            "  fix: set another data_plane, or make it a main pool that a prefill pool feeds"
        ],
    ),
    (
        MAIN,
        "b, engine: {plugin: scripted, config: {data_plane: native, block_size: 32}}",
        [
            "g.yaml:15:7: edge prefill → main moves KV with block_size 16 to a pool with block_size 32\n"
            "  why: scripted with data_plane: native moves KV as it lies, and converts nothing\n"
            "  fix: give both pools the same block_size, or portable KV"
        ],
    ),
    (
        # Portable ones need a transport.
        "config: {data_plane: native}",
        "config: {}",
        [
            f"g.yaml:{line}:7: edge prefill → {pool} carries kv and has no transport\n"
            "  why: the KV of both pools is portable: it moves in bulk, block by block, which is a plugin's work\n"
            "  fix: add transport: {plugin: …} (`pdd-runtime plugins` lists them), "
            "or give both pools another data_plane"
            for line, pool in ((14, "relay"), (15, "main"))
        ],
    ),
]


class _Other(ScriptedEngine):
    name = "other"


class _Silent(ScriptedEngine):
    """Says nothing before it has started."""

    name = "silent"
    Config = type("Config", (BaseModel,), {})

    @classmethod
    def promises(cls, model: ModelSpec, config: BaseModel) -> Capabilities | None:
        return None


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    plugins = load_plugins()
    scripted = next(entry for entry in plugins.registered if entry.name == "scripted")
    plugins.registered += [replace(scripted, name=cls.name, cls=cls) for cls in (_Other, _Silent)]
    return plugins


def faults(plugins: PluginManager, text: str) -> list[str]:
    return [str(fault) for fault in preflight(loads(text, name="g.yaml"), plugins)]


def test_pools_of_one_engine_and_data_plane_need_no_transport(plugins: PluginManager) -> None:
    assert faults(plugins, GRAPH) == []
    assisted = GRAPH.replace("data_plane: native}", "data_plane: native, extend: prefill_assisted}")
    assert faults(plugins, assisted) == []


@pytest.mark.parametrize(("here", "instead", "expected"), KINDS)
def test_a_fault_is_told(plugins: PluginManager, here: str, instead: str, expected: list[str]) -> None:
    assert here in GRAPH
    assert faults(plugins, GRAPH.replace(here, instead)) == expected


def test_an_engine_that_says_nothing_has_portable_kv(plugins: PluginManager) -> None:
    silent = GRAPH.replace("{plugin: scripted, config: {data_plane: native}}", "{plugin: silent}")
    first, second = faults(plugins, silent)
    assert "prefill → relay carries kv and has no transport" in first
    assert second.endswith("(`pdd-runtime plugins` lists them)")
