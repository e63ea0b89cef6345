"""The shape of a Llama model, read from the two forms in which models come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdd_runtime.errors import EngineError


@dataclass(frozen=True)
class Architecture:
    """RMSNorm, rotary positions in halves, grouped-query attention, SwiGLU, no biases."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    norm_eps: float
    tied: bool
    """The output projection is the embedding."""


def from_config_json(config: Mapping[str, Any], where: str) -> Architecture:
    """From a Hugging Face `config.json`. Raises `EngineError` naming the field that this engine cannot follow."""
    if config.get("model_type") != "llama":
        raise _unsupported(where, "model_type", config.get("model_type"), "llama")
    expected: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "quantization_config": (None,),
    }
    for field, allowed in expected.items():
        if config.get(field, allowed[0]) not in allowed:
            raise _unsupported(where, field, config[field], str(allowed[0]))
    # Newer files keep the rotary settings in `rope_parameters`, older ones at the top and in `rope_scaling`.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise _unsupported(where, "rope_scaling", kind, "default")
    try:
        heads = int(config["num_attention_heads"])
        return Architecture(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            ffn=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            vocab=int(config["vocab_size"]),
            context=int(config["max_position_embeddings"]),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            norm_eps=float(config["rms_norm_eps"]),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise EngineError(f"config.json has no {error.args[0]}", where=where) from error


def from_gguf(metadata: Mapping[str, Any], tied: bool, where: str) -> Architecture:
    """From the metadata of a GGUF file. Raises `EngineError` naming the field that this engine cannot follow."""
    if metadata.get("general.architecture") != "llama":
        raise _unsupported(where, "general.architecture", metadata.get("general.architecture"), "llama")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise _unsupported(where, "llama.rope.scaling.type", scaling, "none")
    try:
        hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
        head_dim = metadata.get("llama.attention.key_length", hidden // heads)
        if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
            raise _unsupported(
                where, "llama.rope.dimension_count", metadata["llama.rope.dimension_count"], str(head_dim)
            )
        return Architecture(
            layers=metadata["llama.block_count"],
            hidden=hidden,
            ffn=metadata["llama.feed_forward_length"],
            heads=heads,
            kv_heads=metadata.get("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab=len(metadata["tokenizer.ggml.tokens"]),
            context=metadata["llama.context_length"],
            rope_theta=metadata.get("llama.rope.freq_base", 10000.0),
            norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
            tied=tied,
        )
    except KeyError as error:
        raise EngineError(f"the file has no {error.args[0]}", where=where) from error


def _unsupported(where: str, field: str, value: object, supported: str) -> EngineError:
    return EngineError(
        f"{field}: {value} is not supported",
        where=where,
        why=f"the torch engine computes Llama models with {field}: {supported}",
        fix="use another model, or an engine plugin that knows this one",
    )
