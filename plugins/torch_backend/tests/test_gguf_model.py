from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from pdd_torch.safetensors_model import SafetensorsModel
from pdd_torch.source import open_source
from pdd_torch.weights import prepare
from safetensors.torch import load_file

from pdd_runtime.errors import EngineError

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture
def converted(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model as a GGUF file, written by the reference package."""
    arch = SafetensorsModel(tiny).architecture
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(arch.layers)
    writer.add_embedding_length(arch.hidden)
    writer.add_feed_forward_length(arch.ffn)
    writer.add_head_count(arch.heads)
    writer.add_head_count_kv(arch.kv_heads)
    writer.add_context_length(arch.context)
    writer.add_rope_freq_base(arch.rope_theta)
    writer.add_layer_norm_rms_eps(arch.norm_eps)
    writer.add_token_list([str(i) for i in range(arch.vocab)])
    for name, tensor in load_file(tiny / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            stored = f"blk.{layer}.{NAMES[part]}.weight"
        else:
            stored = f"{NAMES[stem]}.weight"
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.view(-1, 2, arch.head_dim // 2, arch.hidden).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(stored, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_holds_the_same_model_as_a_directory(tiny: Path, converted: Path) -> None:
    model = open_source(str(converted))
    assert model.architecture.kv_heads == SafetensorsModel(tiny).architecture.kv_heads
    expected, found = prepare(SafetensorsModel(tiny), torch.float32), prepare(model, torch.float32)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_cut_tensor_is_named(converted: Path) -> None:
    converted.write_bytes(converted.read_bytes()[:-5000])
    with pytest.raises(EngineError, match=r"tensor .*weight cannot be read"):
        prepare(open_source(str(converted)), torch.float32)
