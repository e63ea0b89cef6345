"""A tiny random Llama on disk, for tests."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from pdd_runtime.testing.byte_tokenizer import END, SIZE, START, byte_tokenizer


def build_tiny_model(
    path: Path,
    seed: int = 0,
    *,
    layers: int = 2,
    hidden: int = 64,
    ffn: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = SIZE,
    context: int = 1024,
    tied: bool = True,
) -> Path:
    """Write a model directory (config.json, model.safetensors, tokenizer files) with a token per byte; returns `path`.
    The same arguments give the same bytes. Its text is noise, but every token depends on all before it."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    head_dim = hidden // heads

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # Twice the usual scale: attention and next tokens then differ clearly between contexts.
        return torch.randn(rows, columns, generator=generator) * (2 / math.sqrt(columns))

    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator),
        "model.norm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
    }
    if not tied:
        tensors["lm_head.weight"] = matrix(vocab, hidden)
    for i in range(layers):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
            f"{layer}.self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            f"{layer}.post_attention_layernorm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
            f"{layer}.mlp.gate_proj.weight": matrix(ffn, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(ffn, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, ffn),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": START,
        "eos_token_id": END,
    }
    files = byte_tokenizer()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "tokenizer.json").write_text(files.tokenizer_json)
    (path / "tokenizer_config.json").write_text(
        json.dumps({**files.special_tokens, "chat_template": files.chat_template})
    )
    return path
