"""The command line, environment and files of an SGLang server whose KV leaves and enters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from ipaddress import ip_address
from math import ceil
from pathlib import Path
from typing import Any

from pdd_connector import stand_in

from pdd_runtime.errors import EngineError
from pdd_runtime.graph import Role
from pdd_runtime.models.directory import read_config
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.geometry import read_geometry
from pdd_runtime.server.launch import Launch
from pdd_runtime.server.process import free_port
from pdd_sglang.config import REPLAY, SglangConfig

PACKAGE = "connector"
"""The directory that the server finds the connector's package in."""
SPARE = 8
"""Tokens that SGLang wants behind the longest sequence: it takes no prompt that comes within six of its limit."""
CPU = "pdd-cpu"
"""The platform that `pdd-sglang-cpu` adds."""
ATTEMPTS = 100
"""How often a prompt's computing may begin before a reader is there: it yields to those whose reader is."""


def server(config: SglangConfig, model: ModelSpec, directory: Path, port: int, socket: str, role: Role) -> Launch:
    """For the model in `directory`, on 127.0.0.1:`port`; its linker dials `socket`, or its events are heard there.
    Raises `EngineError` for a model whose KV cannot be shared, and a role that SGLang's own transfer does not have."""
    layout = read_geometry(directory, dtype=model.dtype, block_size=config.block_size, tp=config.tp)
    native = config.native
    argv = [
        *(config.interpreter, "-m", "sglang.launch_server", "--model-path", str(directory), "--dtype", model.dtype),
        *("--host", _host(config, role), "--port", str(port), "--device", config.device, "--tp-size", str(config.tp)),
        *("--page-size", str(config.block_size if native else 1), "--max-running-requests", str(config.batch_limit)),
        *("--context-length", str(_context(config, directory) + SPARE)),
        # Token IDs in, token IDs out; and the worker's first request warms the server up.
        *("--skip-tokenizer-init", "--incremental-streaming-output", "--skip-server-warmup"),
        *("--enable-metrics", "--enable-cache-report"),
        *(_transfer(config, role, socket) if native else _sharing(socket)),
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
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Logprobs of the model itself, whatever the temperature.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    }
    if config.device == "cpu":
        argv += ["--sampling-backend", "pytorch", "--cuda-graph-backend-decode", "disabled"]
        argv += ["--cuda-graph-backend-prefill", "disabled"]
        env |= {"SGLANG_PLATFORM": CPU, "SGLANG_USE_CPU_ENGINE": "0", "OMP_NUM_THREADS": "1"}
    if native:
        seconds = str(ceil(config.transfer_timeout))
        env |= {
            "SGLANG_HOST_IP": config.transfer_host,
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": seconds,
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": seconds,
        }
        if config.device == "cpu":
            # Otherwise page numbers are staged in memory that an accelerator reads.
            env["SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"] = "1"
        return Launch((*argv, *config.args), env | config.env)
    env["PYTHONPATH"] = PACKAGE
    files = {f"{PACKAGE}/pdd_connector/__init__.py": stand_in.source()}
    return Launch((*argv, *config.args), env | config.env, files)


def linker(socket: str) -> dict[str, Any]:
    """The value of `--unified-cache-external-linker-config`."""
    return {
        "linker": "PddLinker",
        "linker_module_path": "pdd_connector.sglang.connector",
        "linker_extra_config": {"pdd_socket": socket},
    }


def events(socket: str) -> dict[str, Any]:
    """The value of `--kv-events-config`."""
    return {"publisher": "zmq", "endpoint": f"ipc://{socket}", "replay_endpoint": f"ipc://{socket}{REPLAY}"}


def mode(role: Role) -> str:
    """The value of `--disaggregation-mode`. Raises `EngineError`."""
    if role == "aggregated":
        raise EngineError(
            "an aggregated pool has nobody to exchange KV with",
            why="a server that moves its KV itself either prefills or decodes",
            fix="leave data_plane out of its config",
        )
    return "prefill" if role == "prefill" else "decode"


def _sharing(socket: str) -> Iterator[str]:
    yield from ("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic")
    yield from ("--unified-cache-external-linker-config", json.dumps(linker(socket)))


def _transfer(config: SglangConfig, role: Role, socket: str) -> Iterator[str]:
    yield from ("--disaggregation-mode", mode(role), "--disaggregation-transfer-backend", config.data_plane)
    yield from ("--kv-events-config", json.dumps(events(socket)))
    if role == "prefill":
        yield from ("--disaggregation-bootstrap-port", str(config.bootstrap_port or free_port()))
        yield from ("--optimistic-prefill-attempts", str(ATTEMPTS))
    else:
        yield "--disaggregation-decode-enable-radix-cache"
    if config.device == "cpu":
        # What overlaps there waits for events of an accelerator.
        yield "--disable-overlap-schedule"


def _host(config: SglangConfig, role: Role) -> str:
    """A prefill server is asked for its KV beside its API, so both are where its readers reach them."""
    if not config.native or role != "prefill" or ip_address(config.transfer_host).is_loopback:
        return "127.0.0.1"
    return "0.0.0.0"


def _context(config: SglangConfig, directory: Path) -> int:
    own: int = read_config(directory)["max_position_embeddings"]
    return own if config.context_length is None else min(own, config.context_length)
