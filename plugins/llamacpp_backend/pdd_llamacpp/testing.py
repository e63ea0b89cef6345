"""GGUF files for tests: a tiny random Llama, and any model with its weights as float32."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pdd_runtime.testing.byte_tokenizer import END, SIZE, START, byte_tokenizer


def build_tiny_gguf(
    path: Path,
    seed: int = 0,
    *,
    layers: int = 2,
    hidden: int = 64,
    ffn: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 1024,
) -> Path:
    """Write a Llama of random float32 weights with a token per byte; returns `path`. The same arguments give the same
    weights. Its text is noise, but every token depends on all before it."""
    random = np.random.default_rng(seed)
    head_dim = hidden // heads

    def matrix(rows: int, columns: int) -> Any:
        # Twice the usual scale: attention and next tokens then differ clearly between contexts.
        return random.standard_normal((rows, columns), np.float32) * np.float32(2 / math.sqrt(columns))

    def norm() -> Any:
        return 1 + np.float32(0.1) * random.standard_normal(hidden, np.float32)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(SIZE + 1)
    _add_tokenizer(writer)
    writer.add_tensor("token_embd.weight", random.standard_normal((SIZE + 1, hidden), np.float32))
    writer.add_tensor("output_norm.weight", norm())
    for i in range(layers):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", norm())
        writer.add_tensor(f"blk.{i}.attn_q.weight", matrix(heads * head_dim, hidden))
        writer.add_tensor(f"blk.{i}.attn_k.weight", matrix(kv_heads * head_dim, hidden))
        writer.add_tensor(f"blk.{i}.attn_v.weight", matrix(kv_heads * head_dim, hidden))
        writer.add_tensor(f"blk.{i}.attn_output.weight", matrix(hidden, heads * head_dim))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", norm())
        writer.add_tensor(f"blk.{i}.ffn_gate.weight", matrix(ffn, hidden))
        writer.add_tensor(f"blk.{i}.ffn_up.weight", matrix(ffn, hidden))
        writer.add_tensor(f"blk.{i}.ffn_down.weight", matrix(hidden, ffn))
    _close(writer)
    return path


def dequantise(source: Path, path: Path) -> Path:
    """Write the model in `source` with all weights as float32: what engines that dequantise compute with. Returns
    `path`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind, element = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), kind, element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    _close(writer)
    return path


def _add_tokenizer(writer: Any) -> None:
    """A token per byte, a start and an end token, and one more: a file must have a merge. It is of two bytes that stand
    in no text."""
    files = byte_tokenizer()
    ids: dict[str, int] = json.loads(files.tokenizer_json)["model"]["vocab"]
    letters = sorted(ids, key=ids.__getitem__)
    first, second = letters[-2:]
    tokens = [*letters, files.special_tokens["bos_token"], files.special_tokens["eos_token"], first + second]
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([normal] * len(letters) + [control, control, normal])
    writer.add_token_merges([f"{first} {second}"])
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    writer.add_chat_template(files.chat_template)


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
