"""The command line, environment and files of an SGLang server that shares its KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdd_connector import stand_in

from pdd_runtime.models.directory import read_config
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.geometry import read_geometry
from pdd_runtime.server.launch import Launch
from pdd_sglang.config import SglangConfig

PACKAGE = "connector"
"""The directory that the server finds the connector's package in."""
SPARE = 8
"""Tokens that SGLang wants behind the longest sequence: it takes no prompt that comes within six of its limit."""
CPU = "pdd-cpu"
"""The platform that `pdd-sglang-cpu` adds."""


def server(config: SglangConfig, model: ModelSpec, directory: Path, port: int, socket: str) -> Launch:
    """For the model in `directory`, on 127.0.0.1:`port`; its linker dials `socket`. Raises `EngineError` for a model
    whose KV cannot be shared."""
    layout = read_geometry(directory, dtype=model.dtype, block_size=config.block_size, tp=config.tp)
    argv = [
        *(config.interpreter, "-m", "sglang.launch_server", "--model-path", str(directory), "--dtype", model.dtype),
        *("--host", "127.0.0.1", "--port", str(port), "--device", config.device, "--tp-size", str(config.tp)),
        *("--page-size", "1", "--max-running-requests", str(config.batch_limit)),
        *("--context-length", str(_context(config, directory) + SPARE)),
        # Token IDs in, token IDs out; and the worker's first request warms the server up.
        *("--skip-tokenizer-init", "--incremental-streaming-output", "--skip-server-warmup"),
        *("--enable-metrics", "--enable-cache-report"),
        *("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic"),
        *("--unified-cache-external-linker-config", json.dumps(linker(socket))),
    ]
    if config.engine_kv_memory is not None:
        tokens = int(config.engine_kv_memory) * config.tp // layout.token_bytes
        argv += ["--max-total-tokens", str(max(1, tokens))]
    if config.token_budget is not None:
        argv += ["--chunked-prefill-size", str(config.token_budget)]
    attention = config.attention or ("torch_native" if config.device == "cpu" else None)
    if attention is not None:
        argv += ["--attention-backend", attention]
    env = {
        "PYTHONPATH": PACKAGE,
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Logprobs of the model itself, whatever the temperature.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    }
    if config.device == "cpu":
        argv += ["--sampling-backend", "pytorch", "--cuda-graph-backend-decode", "disabled"]
        argv += ["--cuda-graph-backend-prefill", "disabled"]
        env |= {"SGLANG_PLATFORM": CPU, "SGLANG_USE_CPU_ENGINE": "0", "OMP_NUM_THREADS": "1"}
    files = {f"{PACKAGE}/pdd_connector/__init__.py": stand_in.source()}
    return Launch((*argv, *config.args), env | config.env, files)


def linker(socket: str) -> dict[str, Any]:
    """The value of `--unified-cache-external-linker-config`."""
    return {
        "linker": "PddLinker",
        "linker_module_path": "pdd_connector.sglang.connector",
        "linker_extra_config": {"pdd_socket": socket},
    }


def _context(config: SglangConfig, directory: Path) -> int:
    own: int = read_config(directory)["max_position_embeddings"]
    return own if config.context_length is None else min(own, config.context_length)
