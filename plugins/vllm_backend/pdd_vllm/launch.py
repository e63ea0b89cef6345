"""The command line, environment and files of a vLLM server whose KV can come and go."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from pdd_connector import stand_in

from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.launch import Launch
from pdd_vllm.config import VllmConfig
from pdd_vllm.nixl import events_at, replay_at

PACKAGE = "connector"
"""The directory that the server finds the connector's package in."""


def server(config: VllmConfig, model: ModelSpec, directory: Path, port: int, socket: str, side: int) -> Launch:
    """For the model in `directory`, on 127.0.0.1:`port`. Its connector dials `socket`; with NIXL, what it caches is
    published there, and its readers ask for what they need at the port `side`."""
    argv = [
        *(config.interpreter, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(directory), "--dtype", model.dtype),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--block-size", str(config.block_size), "--max-num-seqs", str(config.batch_limit)),
        *("--tensor-parallel-size", str(config.tp), "--enable-prefix-caching"),
        # The model's own sampling defaults are no part of a request.
        *("--generation-config", "vllm", "--max-logprobs", str(config.max_logprobs)),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
    ]
    if config.data_plane == "nixl":
        argv += ["--kv-transfer-config", json.dumps(nixl(config)), "--kv-events-config", json.dumps(events(socket))]
    else:
        argv += ["--kv-transfer-config", json.dumps(kv_transfer(socket))]
    if config.engine_kv_memory is not None:
        argv += ["--kv-cache-memory-bytes", str(int(config.engine_kv_memory))]
    if config.context_length is not None:
        # One more: a sequence may be as long as that, and have a token behind it that nothing is computed of.
        argv += ["--max-model-len", str(config.context_length + 1)]
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    }
    if config.threads is not None:
        env |= {"OMP_NUM_THREADS": str(config.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= config.env
    if config.data_plane == "nixl":
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": config.nixl_host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)}
        return Launch((*argv, *config.args), env)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (PACKAGE, env.get("PYTHONPATH"))))
    files = {f"{PACKAGE}/pdd_connector/__init__.py": stand_in.source()}
    return Launch((*argv, *config.args), env, files)


def kv_transfer(socket: str) -> dict[str, Any]:
    """The value of `--kv-transfer-config`."""
    return {
        "kv_connector": "PddConnector",
        "kv_connector_module_path": "pdd_connector.vllm.connector",
        "kv_role": "kv_both",
        # By default a request whose KV could not be loaded fails; it can just as well be computed.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pdd_socket": socket},
    }


def nixl(config: VllmConfig) -> dict[str, Any]:
    """The same with vLLM's own connector."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        # A pull that did not succeed must be known as such: whoever asked for it has the tokens computed otherwise.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": math.ceil(config.lease)},
    }


def events(socket: str) -> dict[str, Any]:
    """The value of `--kv-events-config`."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events_at(socket),
        "replay_endpoint": replay_at(socket),
    }
