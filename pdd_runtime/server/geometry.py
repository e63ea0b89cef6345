"""What a model directory says of the KV that any engine makes with it, before one has started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from pdd_runtime.errors import EngineError
from pdd_runtime.kv import KvLayout
from pdd_runtime.models import directory

Config = Mapping[str, Any]
Dtype = Literal["float32", "bfloat16", "float16"]
_WITHOUT = {
    "kv_lora_rank": "its attention is latent (MLA): it keeps no keys and values of its heads",
    "attention_chunk_size": "it attends within chunks",
    "dual_chunk_attention_config": "it attends within chunks",
    "cross_attention_layers": "some layers attend to another input",
    "block_configs": "its layers differ",
    "num_key_value_heads_per_layer": "its layers have different numbers of heads",
    "num_kv_shared_layers": "layers share their KV",
    "cla_share_factor": "layers share their KV",
    "multi_query": "its heads are counted otherwise",
    "multi_query_group_num": "its heads are counted otherwise",
    **dict.fromkeys(
        (
            *("mamba_d_state", "mamba_d_conv", "mamba_num_heads", "mamba_expand", "ssm_state_size", "state_size"),
            *("ssm_cfg", "conv_kernel", "time_step_rank", "linear_conv_kernel_dim", "linear_num_key_heads"),
            *("layers_block_type", "hybrid_override_pattern", "attn_layer_period", "attn_type_list"),
            *("full_attention_interval", "recurrent_block_type", "block_types", "linear_attn_config", "lru_width"),
            "attn_layer_indices",
        ),
        "some layers keep a state instead of keys and values",
    ),
}
"""Fields whose presence means that KV is more, or otherwise, than K and V of every head in every layer."""
_OFF: tuple[object, ...] = (None, False, 0, [], {})


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that any server engine can serve."""

    layout: KvLayout
    fingerprint: str
    """As the torch engine's, so that their KV has the same names."""
    context: int
    """Tokens of the longest sequence that it was made for."""
    vocab: int
    """Token ids are below it."""


def read_model(path: Path, *, dtype: Dtype, block_size: int, tp: int) -> Model:
    """Reads every byte of the weights, but for large ones that have been read before. Raises `EngineError` as
    `read_geometry` does, and where there are none."""
    whole = directory.read_config(path)
    config = _of_text(whole)
    return Model(
        layout=_layout(config, path, dtype, block_size, tp),
        fingerprint=_fingerprint(whole, path),
        context=_number(config, "max_position_embeddings", path),
        vocab=_number(config, "vocab_size", path),
    )


def read_geometry(path: Path, *, dtype: Dtype, block_size: int, tp: int) -> KvLayout:
    """The layout of blocks that engines, worker and connectors share. Raises `EngineError` naming the field for a model
    whose KV is not K and V of every head in every layer, for all tokens, and where `tp` does not split the heads."""
    return _layout(_of_text(directory.read_config(path)), path, dtype, block_size, tp)


def _fingerprint(config: Config, path: Path) -> str:
    if not directory.weight_files(path):
        raise EngineError(
            "the directory has no *.safetensors",
            where=str(path),
            fix="give spec.model.source the model's directory, with its weights in safetensors",
        )
    return directory.digest(path, config)


def _layout(config: Config, path: Path, dtype: Dtype, block_size: int, tp: int) -> KvLayout:
    _check(config, path)
    heads = _number(config, "num_attention_heads", path)
    kv_heads = _number(config, "num_key_value_heads", path) if config.get("num_key_value_heads") else heads
    head_dim = (
        _number(config, "head_dim", path) if config.get("head_dim") else _number(config, "hidden_size", path) // heads
    )
    if config.get("v_head_dim") not in (None, head_dim):
        raise _refused(path, "v_head_dim", config["v_head_dim"], f"keys have {head_dim} elements")
    if kv_heads % tp:
        raise EngineError(
            f"{kv_heads} KV heads cannot be split over tp: {tp}",
            where=_place(path),
            why="each accelerator must have as many whole heads as any other",
            fix=f"set tp to a divisor of {kv_heads}",
        )
    return KvLayout(
        layers=_number(config, "num_hidden_layers", path),
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        block_size=block_size,
        tp_size=tp,
    )


def _check(config: Config, path: Path) -> None:
    for field, why in _WITHOUT.items():
        if config.get(field) not in _OFF:
            raise _refused(path, field, config[field], why)
    if config.get("is_encoder_decoder"):
        raise _refused(path, "is_encoder_decoder", True, "an encoder's output is part of what decoding needs")
    # `use_sliding_window: false` leaves the number there, unused.
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        raise _refused(path, "sliding_window", config["sliding_window"], "KV behind the window is dropped")
    for kind in config.get("layer_types") or ():
        if kind not in ("full_attention", "attention"):
            raise _refused(path, "layer_types", kind, "not every layer keeps the KV of all tokens")
    quantized = config.get("quantization_config") or {}
    for field in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if quantized.get(field) not in _OFF:
            raise _refused(path, f"quantization_config.{field}", quantized[field], "its KV is quantised")


def _of_text(config: Config) -> Config:
    """Of a model that sees as well, the part that writes."""
    text = config.get("text_config")
    return {**text, "quantization_config": config.get("quantization_config")} if isinstance(text, dict) else config


def _number(config: Config, field: str, path: Path) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        what = f"{field} is {value!r}" if field in config else f"config.json has no {field}"
        raise EngineError(
            what,
            where=_place(path),
            why="it must be one positive number, which holds for every layer",
            fix="use another model, or an engine plugin that knows this one",
        )
    return value


def _refused(path: Path, field: str, value: object, why: str) -> EngineError:
    return EngineError(
        f"{field}: {value} is not supported",
        where=_place(path),
        why=f"{why}, and blocks hold K and V of every head in every layer",
        fix="use a model with plain attention in all its layers",
    )


def _place(path: Path) -> str:
    return str(path / "config.json")
