"""The command line and configuration file of a trtllm-serve: with our connector, or with transfers of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from pdd_runtime.errors import EngineError
from pdd_runtime.graph import Role
from pdd_runtime.models.directory import read_config
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.launch import Launch
from pdd_trtllm.config import TrtllmConfig

FILE = "trtllm.yaml"
EVENTS = 1 << 16
"""Events of its cache that it keeps until the worker asks for them."""
CONNECTOR = {
    "connector_module": "pdd_connector.trtllm.connector",
    "connector_scheduler_class": "PddConnectorScheduler",
    "connector_worker_class": "PddConnectorWorker",
}


def launch(
    config: TrtllmConfig, model: ModelSpec, directory: Path, port: int, socket: str, role: Role = "aggregated"
) -> Launch:
    """The server for the model in `directory`, on 127.0.0.1:`port`, whose connector dials `socket`, in a pool of that
    role."""
    argv = [config.interpreter, "-m", "tensorrt_llm.commands.serve", "serve", str(directory)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--backend", "pytorch"]
    argv += ["--tp_size", str(config.tp), "--max_batch_size", str(config.batch_limit)]
    argv += ["--max_num_tokens", str(config.token_budget)]
    if config.context_length is not None:
        argv += ["--max_seq_len", str(config.context_length)]
    argv += ["--extra_llm_api_options", FILE, *config.args]
    env = {"HF_HUB_OFFLINE": "1"}
    if not config.native:
        # TensorRT-LLM hands on to its other ranks what begins with its name.
        env |= {"PDD_SOCKET": socket, "TRTLLM_PDD_SOCKET": socket}
    ours = _common(config, model)
    more = _transfers(config, directory, role) if config.native else _connector()
    text = yaml.safe_dump(_merged(config.options, _merged(ours, more)), sort_keys=True)
    return Launch(tuple(argv), env | config.env, {FILE: text})


def _common(config: TrtllmConfig, model: ModelSpec) -> dict[str, Any]:
    """What stands in the configuration file, whatever the data plane."""
    cache: dict[str, Any] = {"enable_block_reuse": True, "tokens_per_block": config.block_size, "dtype": "auto"}
    if config.engine_kv_memory is not None:
        cache["max_gpu_total_bytes"] = int(config.engine_kv_memory)
    return {
        "dtype": model.dtype,
        "attn_backend": config.attention,
        "enable_chunked_prefill": True,
        "disable_overlap_scheduler": not config.overlap,
        "cuda_graph_config": {"enable_padding": True} if config.cuda_graphs else None,
        "enable_iter_perf_stats": True,
        "kv_cache_config": cache,
    }


def _connector() -> dict[str, Any]:
    return {"kv_cache_config": {"enable_partial_reuse": False}, "kv_connector_config": CONNECTOR}


def _transfers(config: TrtllmConfig, directory: Path, role: Role) -> dict[str, Any]:
    transceiver = {"backend": config.transceiver, "kv_transfer_timeout_ms": math.ceil(config.transfer_timeout * 1000)}
    tokens = config.transfer_tokens or config.context_length or _longest(directory)
    if tokens is not None:
        transceiver["max_tokens_in_buffer"] = tokens
    more: dict[str, Any] = {
        "kv_cache_config": {"event_buffer_max_size": EVENTS},
        "cache_transceiver_config": transceiver,
    }
    if role in ("prefill", "aggregated"):
        # It refuses what is `context_only` where passes overlap.
        more["disable_overlap_scheduler"] = True
    return more


def _longest(directory: Path) -> int | None:
    """Tokens of the longest sequence; None where the model's directory is on another host."""
    try:
        longest = read_config(directory).get("max_position_embeddings")
    except EngineError:
        return None
    return longest if isinstance(longest, int) else None


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over`, and what it says nothing of from `base`."""
    merged = dict(base)
    for name, value in over.items():
        mine = merged.get(name)
        merged[name] = _merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged
