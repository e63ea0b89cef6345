"""What is run, and what a pool may set."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pdd_trtllm.config import TrtllmConfig
from pdd_trtllm.engine import TrtllmEngine
from pdd_trtllm.launch import FILE, launch
from pdd_trtllm.sampling import completion
from pdd_trtllm.testing.arguments import parse
from pdd_trtllm.testing.protocol import CompletionRequest
from pydantic import ValidationError

from pdd_runtime.errors import EngineError
from pdd_runtime.graph import Role
from pdd_runtime.plugins.engine import ModelSpec, Sampling
from pdd_runtime.server.launch import Launch
from pdd_runtime.testing.engine_harness import StoreHost

NATIVE: dict[str, Any] = {"data_plane": "native"}
SPEC = ModelSpec(source="/models/llama", dtype="bfloat16")


def launched(**settings: Any) -> Launch:
    return launch(TrtllmConfig(**settings), SPEC, Path("/models/llama"), 8123, "/run/agent")


def test_the_command_is_what_the_server_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flag and every word of its file is known there: the stand-in refuses what the real one refuses."""
    found = launched(
        tp=2, batch_limit=64, token_budget=4096, context_length=4096, engine_kv_memory="4GiB", overlap=False
    )
    found.write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert found.argv[1:4] == ("-m", "tensorrt_llm.commands.serve", "serve")
    served = parse(found.argv[3:])
    args = served.args
    assert (served.host, served.port) == ("127.0.0.1", 8123)
    assert (args.model, args.dtype, args.tensor_parallel_size) == ("/models/llama", "bfloat16", 2)
    assert (args.max_batch_size, args.max_num_tokens, args.max_seq_len) == (64, 4096, 4096)
    assert args.enable_chunked_prefill
    assert args.disable_overlap_scheduler
    assert args.kv_cache_config.enable_block_reuse
    assert not args.kv_cache_config.enable_partial_reuse
    assert (args.kv_cache_config.tokens_per_block, args.kv_cache_config.max_gpu_total_bytes) == (32, 4 << 30)
    assert args.kv_connector_config is not None
    assert args.kv_connector_config.connector_module == "pdd_connector.trtllm.connector"


@pytest.mark.parametrize(("role", "overlaps"), [("prefill", False), ("relay", True), ("main", True)])
def test_the_native_command_is_what_the_server_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, overlaps: bool
) -> None:
    config = TrtllmConfig.model_validate(
        NATIVE | {"transceiver": "UCX", "context_length": 4096, "transfer_timeout": "90s"}
    )
    found = launch(config, SPEC, Path("/models/llama"), 8123, "/run/agent", role)
    found.write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    args = parse(found.argv[3:]).args
    assert args.kv_connector_config is None
    assert args.cache_transceiver_config is not None
    transceiver = args.cache_transceiver_config
    assert (transceiver.backend, transceiver.max_tokens_in_buffer) == ("UCX", 4096)
    assert transceiver.kv_transfer_timeout_ms == 90_000
    assert args.kv_cache_config.event_buffer_max_size > 0
    assert args.kv_cache_config.enable_partial_reuse
    assert args.disable_overlap_scheduler is not overlaps
    assert "PDD_SOCKET" not in found.env


def test_a_buffer_for_transfers_holds_the_longest_prompt(tiny: Path) -> None:
    def tokens(directory: Path, **settings: Any) -> int | None:
        found = launch(TrtllmConfig.model_validate(NATIVE | settings), SPEC, directory, 8123, "", "main")
        most: int | None = yaml.safe_load(found.files[FILE])["cache_transceiver_config"].get("max_tokens_in_buffer")
        return most

    longest = json.loads((tiny / "config.json").read_text())["max_position_embeddings"]
    assert tokens(tiny) == longest
    assert tokens(tiny, context_length=128) == 128
    assert tokens(tiny, context_length=128, transfer_tokens=64) == 64
    assert tokens(tiny / "elsewhere") is None


def test_a_native_pool_attaches_by_its_url_alone() -> None:
    config = TrtllmConfig.model_validate(NATIVE | {"url": "http://127.0.0.1:8000"})
    assert config.socket is None


def test_the_connector_is_told_its_socket_on_every_rank() -> None:
    env = launched(env={"CUDA_VISIBLE_DEVICES": "0,1"}).env
    assert env["PDD_SOCKET"] == env["TRTLLM_PDD_SOCKET"] == "/run/agent"
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_graphs_own_options_stand_beside_ours() -> None:
    found = launched(options={"kv_cache_config": {"free_gpu_memory_fraction": 0.5}, "print_iter_log": True})
    file = yaml.safe_load(found.files[FILE])
    assert file["print_iter_log"] is True
    assert file["kv_cache_config"]["free_gpu_memory_fraction"] == 0.5
    assert file["kv_cache_config"]["enable_block_reuse"] is True


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"options": {"kv_connector_config": {}}}, "connector"),
        ({"options": {"kv_cache_config": {"enable_block_reuse": False}}}, "enable_block_reuse"),
        ({"options": {"kv_cache_config": {"tokens_per_block": 64}}}, "block_size"),
        ({"block_size": 24}, "power of two"),
        ({"block_size": 64, "token_budget": 32}, "less than a block"),
        ({"transceiver": "UCX"}, "data_plane: native"),
        ({"url": "http://127.0.0.1:8000"}, "socket"),
        (NATIVE | {"kv_memory": "1GiB"}, "engine_kv_memory"),
        (NATIVE | {"options": {"cache_transceiver_config": {}}}, "transfer_timeout"),
        (NATIVE | {"options": {"kv_connector_config": {}}}, "no connector"),
        (NATIVE | {"options": {"kv_cache_config": {"event_buffer_max_size": 0}}}, "events"),
        (NATIVE | {"url": "http://127.0.0.1:8000", "socket": "/run/agent"}, "of no use"),
    ],
)
def test_what_would_break_the_data_plane_is_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        TrtllmConfig(**settings)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0),
        Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=2**64 - 1),
        Sampling(temperature=1, stop_token_ids=(2, 7), logit_bias=((5, 1000.0), (6, -3.0))),
    ],
)
def test_a_request_has_only_fields_that_the_server_knows(sampling: Sampling) -> None:
    request = CompletionRequest.model_validate(completion((1, 2, 3), 10, sampling))
    assert request.prompt == [1, 2, 3]
    assert request.stream
    assert not request.detokenize
    assert request.stop_token_ids == list(sampling.stop_token_ids)
    assert all(abs(bias) <= 100 for bias in (request.logit_bias or {}).values())


def test_listing_the_plugin_imports_no_torch_and_no_tensorrt() -> None:
    code = "import sys, pdd_trtllm.plugin as p; p.pdd_register_engines(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_more_is_promised_than_survives_a_handoff() -> None:
    promised = TrtllmEngine.promises(SPEC, TrtllmConfig())
    assert promised.names == {"fan_out", "logit_bias"}
    native = TrtllmEngine.promises(SPEC, TrtllmConfig.model_validate(NATIVE))
    assert native.names == {"logit_bias"}
    assert (native.kv, native.extend) == ("native", "local")


async def test_an_exact_mode_is_refused(tmp_path: Path) -> None:
    engine = TrtllmEngine(TrtllmConfig(), ModelSpec(source=str(tmp_path), mode="exact"))
    with pytest.raises(EngineError, match="no exact mode"):
        await engine.start(StoreHost())
