"""The command line and configuration file of a trtllm-serve with our connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.launch import Launch
from pdd_trtllm.config import TrtllmConfig

FILE = "trtllm.yaml"
CONNECTOR = {
    "connector_module": "pdd_connector.trtllm.connector",
    "connector_scheduler_class": "PddConnectorScheduler",
    "connector_worker_class": "PddConnectorWorker",
}


def launch(config: TrtllmConfig, model: ModelSpec, directory: Path, port: int, socket: str) -> Launch:
    """The server for the model in `directory`, on 127.0.0.1:`port`, whose connector dials `socket`."""
    argv = [config.interpreter, "-m", "tensorrt_llm.commands.serve", "serve", str(directory)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--backend", "pytorch"]
    argv += ["--tp_size", str(config.tp), "--max_batch_size", str(config.batch_limit)]
    argv += ["--max_num_tokens", str(config.token_budget)]
    if config.context_length is not None:
        argv += ["--max_seq_len", str(config.context_length)]
    argv += ["--extra_llm_api_options", FILE, *config.args]
    # TensorRT-LLM hands on to its other ranks what begins with its name.
    env = {"PDD_SOCKET": socket, "TRTLLM_PDD_SOCKET": socket, "HF_HUB_OFFLINE": "1"}
    text = yaml.safe_dump(options(config, model), sort_keys=True)
    return Launch(tuple(argv), env | config.env, {FILE: text})


def options(config: TrtllmConfig, model: ModelSpec) -> dict[str, Any]:
    """What stands in the configuration file."""
    cache: dict[str, Any] = {
        "enable_block_reuse": True,
        "enable_partial_reuse": False,
        "tokens_per_block": config.block_size,
        "dtype": "auto",
    }
    if config.engine_kv_memory is not None:
        cache["max_gpu_total_bytes"] = int(config.engine_kv_memory)
    ours: dict[str, Any] = {
        "dtype": model.dtype,
        "attn_backend": config.attention,
        "enable_chunked_prefill": True,
        "disable_overlap_scheduler": not config.overlap,
        "cuda_graph_config": {"enable_padding": True} if config.cuda_graphs else None,
        "enable_iter_perf_stats": True,
        "kv_cache_config": cache,
        "kv_connector_config": CONNECTOR,
    }
    return _merged(config.options, ours)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over`, and what it says nothing of from `base`."""
    merged = dict(base)
    for name, value in over.items():
        mine = merged.get(name)
        merged[name] = _merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged
