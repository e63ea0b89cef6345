"""A small Llama with random weights on disk, for servers: any of them reads it, and none is needed to write it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdd_runtime.testing.byte_tokenizer import END, SIZE, START, byte_tokenizer

Weights = dict[str, NDArray[np.float32]]


def write_tiny_model(
    path: Path,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = SIZE,
    context: int = 1024,
    seed: int = 0,
) -> Path:
    """Write a model directory (config.json, model.safetensors in float32, tokenizer files) with a token per byte;
    returns `path`. The same arguments give the same bytes. Its text is noise, but every token depends on all before."""
    path.mkdir(parents=True, exist_ok=True)
    hidden = heads * head_dim
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": START,
        "eos_token_id": END,
    }
    files = byte_tokenizer()
    _save(_weights(layers, heads, kv_heads, head_dim, vocab, seed), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "tokenizer.json").write_text(files.tokenizer_json)
    words = {**files.special_tokens, "chat_template": files.chat_template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(words))
    return path


def _weights(layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int, seed: int) -> Weights:
    random, hidden = np.random.default_rng(seed), heads * head_dim

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        # Twice the usual scale: attention and next tokens then differ clearly between contexts.
        return random.standard_normal((rows, columns), np.float32) * np.float32(2 / columns**0.5)

    def norm() -> NDArray[np.float32]:
        return 1 + np.float32(0.1) * random.standard_normal(hidden, np.float32)

    weights = {
        "model.embed_tokens.weight": random.standard_normal((vocab, hidden), np.float32),
        "model.norm.weight": norm(),
    }
    for index in range(layers):
        layer = f"model.layers.{index}"
        weights |= {
            f"{layer}.input_layernorm.weight": norm(),
            f"{layer}.self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{layer}.post_attention_layernorm.weight": norm(),
            f"{layer}.mlp.gate_proj.weight": matrix(2 * hidden, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(2 * hidden, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, 2 * hidden),
        }
    return weights


def _save(weights: Weights, path: Path) -> None:
    """As safetensors (https://github.com/huggingface/safetensors#format)."""
    header, start = dict[str, object](), 0
    for name, values in weights.items():
        end = start + values.nbytes
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": (start, end)}
        start = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    data = b"".join(values.astype("<f4").tobytes() for values in weights.values())
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
