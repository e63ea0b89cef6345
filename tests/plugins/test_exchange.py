from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from pdd_runtime.graph import load
from pdd_runtime.kv import KvLayout
from pdd_runtime.plugins import PluginManager, load_plugins
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.plugins.exchange import exchanges
from pdd_runtime.plugins.preflight import preflight
from pdd_runtime.testing.scripted import ScriptedEngine

GRAPHS = Path(__file__).parents[2] / "graphs"
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
}
UNSETTLED = "portable; whether and how it is converted is settled when both have started"


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return load_plugins()


def model(path: Path, **fields: Any) -> str:
    """A model of which only config.json is here, as an override."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA | fields))
    return f"source={path}"


def told(plugins: PluginManager, graph: str, *overrides: str) -> dict[str, str]:
    loaded = load(GRAPHS / f"{graph}.yaml", overrides)
    assert preflight(loaded, plugins) == []
    return {f"{found.source} → {found.target}": found.how for found in exchanges(loaded, plugins)}


def test_what_is_known_only_after_the_start_is_said_so(plugins: PluginManager) -> None:
    assert told(plugins, "quickstart") == {"prefill → relay": UNSETTLED, "prefill → main": UNSETTLED}
    assert told(plugins, "h100-h200") == {"prefill → relay": UNSETTLED, "prefill → main": UNSETTLED}


@pytest.mark.parametrize(
    ("graph", "how"),
    [
        ("vllm", "portable; it arrives as it was sent"),
        ("sglang", "portable; it arrives as it was sent"),
        ("trtllm", "portable; it arrives as it was sent"),
        ("sglang-vllm", "portable; it arrives as it was sent"),
        ("h100-h200", "portable; converted as it arrives: tp_size 4 → 2"),
    ],
)
def test_what_happens_to_kv_between_engines_is_told_where_the_model_is(
    plugins: PluginManager, tmp_path: Path, graph: str, how: str
) -> None:
    assert told(plugins, graph, f"spec.model.{model(tmp_path)}")["prefill → main"] == how
    assert (
        told(plugins, graph, f"spec.model.{model(tmp_path)}")["prefill → relay"]
        == "portable; it arrives as it was sent"
    )


def test_pools_may_cut_and_write_kv_differently(plugins: PluginManager, tmp_path: Path) -> None:
    found = told(
        plugins,
        "sglang-vllm",
        f"spec.model.{model(tmp_path)}",
        "spec.pools.main.engine.config.block_size=64",
        f"spec.pools.main.model={{source: {tmp_path}, dtype: float32}}",
    )
    assert found["prefill → main"] == (
        "portable; converted as it arrives: dtype bfloat16 → float32, block_size 32 → 64"
    )


def test_an_engine_that_moves_its_own_kv_is_told(plugins: PluginManager) -> None:
    native = "{plugin: scripted, config: {data_plane: native}}"
    engines = [f"spec.pools.{pool}.engine={native}" for pool in ("prefill", "relay", "main")]
    edges = [
        "spec.edges.0={from: prefill, to: relay, carries: kv}",
        "spec.edges.1={from: prefill, to: main, carries: kv, link: wan}",
    ]
    found = told(plugins, "quickstart", *engines, *edges, "spec.links.wan.emulate=false")
    how = "native; scripted moves it itself (data_plane: native)"
    assert found == {"prefill → relay": how, "prefill → main": how}


def test_a_model_that_an_engine_cannot_serve_is_refused_where_it_stands(plugins: PluginManager, tmp_path: Path) -> None:
    override = f"spec.model.{model(tmp_path, kv_lora_rank=512)}"
    first, second = preflight(load(GRAPHS / "sglang-vllm.yaml", [override]), plugins)
    assert first.where == second.where == f"--set {override}"
    assert first.what == 'engine sglang of pool "prefill" cannot serve this model'
    assert second.what == 'engine vllm of pool "main" cannot serve this model'
    assert first.why.startswith(
        f"kv_lora_rank: 512 is not supported ({tmp_path / 'config.json'}): its attention is latent"
    )
    (fault,) = preflight(load(GRAPHS / "vllm.yaml", ["spec.model.source=smollm2"]), plugins)
    assert "vllm reads no .gguf file" in fault.why


def test_kv_that_cannot_be_converted_is_refused_by_what_differs(tmp_path: Path) -> None:
    class Stateful(ScriptedEngine):
        name = "stateful"

        @classmethod
        def foresee(cls, model: ModelSpec, config: BaseModel) -> KvLayout:
            return KvLayout(layers=80, kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16, state_bytes=64)

    plugins = load_plugins()
    scripted = next(entry for entry in plugins.registered if entry.name == "scripted")
    plugins.registered.append(replace(scripted, name="stateful", cls=Stateful))
    overrides = (f"spec.model.{model(tmp_path)}", "spec.pools.main.engine={plugin: stateful}")
    (fault,) = preflight(load(GRAPHS / "vllm.yaml", overrides), plugins)
    assert fault.what == "edge prefill → main moves KV that main cannot use"
    assert fault.why.startswith("state_bytes: 0 != 64 (80 layers, 8 heads of 128")
