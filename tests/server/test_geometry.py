from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pdd_torch.runner import TorchRunner
from pdd_torch.testing import build_tiny_model

from pdd_runtime.errors import EngineError
from pdd_runtime.inprocess import InProcessConfig
from pdd_runtime.kv import KvLayout
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.geometry import read_geometry, read_model

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
}


def geometry(path: Path, config: dict[str, Any], tp: int = 1) -> KvLayout:
    (path / "config.json").write_text(json.dumps(config))
    return read_geometry(path, dtype="bfloat16", block_size=16, tp=tp)


def test_it_is_what_the_torch_engine_finds_in_the_same_directory(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path)
    torch = TorchRunner(InProcessConfig(block_size=32), ModelSpec(source=str(path)))
    model = read_model(path, dtype="float32", block_size=32, tp=1)
    assert (model.layout, model.fingerprint) == (torch.layout, torch.fingerprint)
    assert (model.context, model.vocab) == (torch.context, torch.vocab)


def test_heads_are_split_over_accelerators(tmp_path: Path) -> None:
    assert geometry(tmp_path, LLAMA, tp=4) == KvLayout(
        layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16, tp_size=4
    )
    with pytest.raises(EngineError, match="8 KV heads cannot be split over tp: 16"):
        geometry(tmp_path, LLAMA, tp=16)


@pytest.mark.parametrize(
    ("fields", "heads", "head_dim"),
    [
        ({"head_dim": 64}, 8, 64),
        ({"num_key_value_heads": None}, 32, 128),
        ({"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28}, 8, 128),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 32}, 8, 128),
        ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": None}}, 8, 128),
    ],
)
def test_plain_attention_is_read_as_it_is_written(
    tmp_path: Path, fields: dict[str, Any], heads: int, head_dim: int
) -> None:
    layout = geometry(tmp_path, LLAMA | fields)
    assert (layout.kv_heads, layout.head_dim) == (heads, head_dim)


def test_of_a_model_that_sees_the_text_counts(tmp_path: Path) -> None:
    config = {"model_type": "mistral3", "text_config": LLAMA, "vision_config": {"num_hidden_layers": 24}}
    assert geometry(tmp_path, config).layers == 32
    with pytest.raises(EngineError, match="sliding_window: 1024"):
        geometry(tmp_path, config | {"text_config": LLAMA | {"sliding_window": 1024}})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank: 512"),
        ({"sliding_window": 4096}, "sliding_window: 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: sliding_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types: linear_attention"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size: 8192"),
        ({"mamba_d_state": 128}, "mamba_d_state: 128"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"full_attention_interval": 4}, "full_attention_interval: 4"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: True"),
        ({"num_kv_shared_layers": 15}, "num_kv_shared_layers: 15"),
        ({"v_head_dim": 64}, "v_head_dim: 64"),
        ({"num_key_value_heads": [8, 4]}, r"num_key_value_heads is \[8, 4\]"),
        ({"multi_query": True}, "multi_query: True"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, r"quantization_config\.kv_cache_scheme"),
    ],
)
def test_kv_of_another_kind_is_refused_by_the_field(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineError, match=named) as caught:
        geometry(tmp_path, LLAMA | fields)
    assert caught.value.where == str(tmp_path / "config.json")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no readable config\.json"):
        read_geometry(tmp_path, dtype="bfloat16", block_size=16, tp=1)
    with pytest.raises(EngineError, match="no num_hidden_layers"):
        geometry(tmp_path, {"num_attention_heads": 4, "hidden_size": 64})
    geometry(tmp_path, LLAMA)
    with pytest.raises(EngineError, match=r"no \*\.safetensors"):
        read_model(tmp_path, dtype="bfloat16", block_size=16, tp=1)
