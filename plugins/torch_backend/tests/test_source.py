from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pdd_torch.source import open_source
from pdd_torch.testing import build_tiny_model
from pdd_torch.weights import prepare
from safetensors.torch import load_file, save_file

from pdd_runtime.errors import EngineError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "model")


def edit(model: Path, **fields: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | fields))


def test_the_fingerprint_follows_content_not_place(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    digest = open_source(str(model)).digest()
    assert open_source(str(copy)).digest() == digest
    (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text())))
    assert open_source(str(copy)).digest() == digest
    edit(copy, rope_theta=5000.0)
    assert open_source(str(copy)).digest() != digest
    assert open_source(str(build_tiny_model(tmp_path / "other", seed=1))).digest() != digest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "qwen3"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("quantization_config", {"quant_method": "awq"}),
    ],
)
def test_a_model_of_another_kind_is_refused_by_the_field(model: Path, field: str, value: Any) -> None:
    edit(model, **{field: value})
    with pytest.raises(EngineError, match=field) as caught:
        open_source(str(model))
    assert caught.value.where.endswith("config.json")


def test_a_config_without_a_field_names_it(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="num_hidden_layers"):
        open_source(str(model))


def test_both_ways_to_write_the_rotary_base_are_read(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    (model / "config.json").write_text(json.dumps(config))
    assert open_source(str(model)).architecture.rope_theta == 10000.0


def test_a_missing_and_a_misshapen_tensor_are_named(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][:5].clone()}, model / "model.safetensors")
    with pytest.raises(EngineError, match=r"1\.mlp\.up_proj.*\(5, 64\)"):
        prepare(open_source(str(model)), torch.float32)
    del tensors[name]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(EngineError, match=r"1\.mlp\.up_proj"):
        prepare(open_source(str(model)), torch.float32)


def test_a_model_in_several_files_is_one(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    whole = prepare(open_source(str(model)), torch.float32)
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:9]}, model / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[9:]}, model / "model-2.safetensors")
    parts = prepare(open_source(str(model)), torch.float32)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_what_is_no_model_says_what_would_be_one(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no model nothing") as caught:
        open_source("nothing")
    assert "smollm2" in caught.value.why
    with pytest.raises(EngineError, match=r"config\.json"):
        open_source(str(tmp_path))
    (tmp_path / "broken.gguf").write_bytes(b"no such thing")
    with pytest.raises(EngineError, match="not a whole GGUF file"):
        open_source(str(tmp_path / "broken.gguf"))


@pytest.mark.model
def test_smollm2_has_the_right_shape() -> None:
    source = open_source("smollm2")
    arch = source.architecture
    assert (arch.layers, arch.hidden, arch.heads, arch.kv_heads, arch.head_dim, arch.vocab) == (
        30,
        576,
        9,
        3,
        64,
        49152,
    )
    assert arch.tied
