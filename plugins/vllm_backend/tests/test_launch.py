"""What is run, without running it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pdd_vllm.config import VllmConfig
from pdd_vllm.engine import VllmEngine
from pydantic import ByteSize

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.launch import Launch
from pdd_runtime.testing.engine_harness import StoreHost

MODEL = ModelSpec(source="/models/llama", dtype="bfloat16")


def launch(config: VllmConfig) -> Launch:
    return VllmEngine(config, MODEL).launch(Path("/models/llama"), 8123, "/run/pdd/agent")


def flag(launch: Launch, name: str) -> str:
    return launch.argv[launch.argv.index(name) + 1]


def test_the_command_says_all_that_both_sides_must_agree_on() -> None:
    run = launch(VllmConfig(python=Path("/envs/vllm/bin/python"), tp=2, block_size=64, batch_limit=100))
    assert run.argv[:3] == ("/envs/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    assert flag(run, "--model") == "/models/llama"
    assert flag(run, "--dtype") == "bfloat16"
    assert flag(run, "--host") == "127.0.0.1"
    assert flag(run, "--port") == "8123"
    assert flag(run, "--tensor-parallel-size") == "2"
    assert flag(run, "--block-size") == "64"
    assert flag(run, "--max-num-seqs") == "100"
    transfer = json.loads(flag(run, "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"] == {"pdd_socket": "/run/pdd/agent"}
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert "--max-model-len" not in run.argv
    assert "--kv-cache-memory-bytes" not in run.argv


def test_what_a_pool_sets_reaches_the_command_and_its_own_flags_come_last() -> None:
    args = ("--gpu-memory-utilization", "0.5")
    config = VllmConfig(
        engine_kv_memory=ByteSize(2**30), context_length=4096, threads=3, args=args, env={"A": "b", "PYTHONPATH": "/x"}
    )
    run = launch(config)
    assert flag(run, "--kv-cache-memory-bytes") == str(2**30)
    assert flag(run, "--max-model-len") == "4097"
    assert run.argv[-2:] == args
    assert run.env["PYTHONPATH"] == "connector:/x"
    assert run.env["OMP_NUM_THREADS"] == "3"
    assert run.env["A"] == "b"
    assert "OMP_NUM_THREADS" not in launch(VllmConfig()).env


def test_the_server_finds_the_worker_s_own_release_of_the_connector(tmp_path: Path) -> None:
    """And nothing else of the worker's environment."""
    run = launch(VllmConfig())
    run.write_files(tmp_path)
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import sys, pdd_connector.wire as w; print(w.__file__); print(sys.path)"],
        cwd=tmp_path,
        env=run.environment(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    found, path = done.stdout.splitlines()
    import pdd_connector.wire

    assert found == str(Path(pdd_connector.wire.__file__).resolve())
    assert str(Path(found).parents[1]) not in path


def test_with_its_own_transfer_it_has_no_connector_of_ours_and_publishes_what_it_caches() -> None:
    config = VllmConfig.model_validate(
        {
            "data_plane": "nixl",
            "nixl_host": "10.1.2.3",
            "nixl_port": 5601,
            "lease": "90500ms",
            "env": {"UCX_TLS": "tcp"},
        }
    )
    run = launch(config)
    assert json.loads(flag(run, "--kv-transfer-config")) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": 91},
    }
    assert json.loads(flag(run, "--kv-events-config")) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc:///run/pdd/agent",
        "replay_endpoint": "ipc:///run/pdd/agent-replay",
    }
    assert run.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.1.2.3"
    assert run.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5601"
    assert run.env["UCX_TLS"] == "tcp"
    assert "PYTHONPATH" not in run.env
    assert not run.files
    assert "--kv-events-config" not in launch(VllmConfig()).argv


def test_where_any_port_is_free_to_take_vllm_s_own_is_shown() -> None:
    assert launch(VllmConfig(data_plane="nixl")).env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"


def test_its_own_transfer_is_promised_as_such() -> None:
    portable = VllmEngine.promises(MODEL, VllmConfig())
    native = VllmEngine.promises(MODEL, VllmConfig(data_plane="nixl"))
    assert (portable.kv, portable.fan_out, portable.extend) == ("portable", True, "local")
    assert (native.kv, native.fan_out, native.extend) == ("native", False, "local")
    assert native.names == portable.names - {"fan_out"}


async def test_an_exact_mode_is_refused_before_anything_starts() -> None:
    engine = VllmEngine(VllmConfig(), ModelSpec(source="/models/llama", mode="exact"))
    with pytest.raises(EngineError, match="exact"):
        await engine.start(StoreHost())
    await engine.close()


@pytest.mark.parametrize(
    "flag",
    ["--port", "--kv-transfer-config={}", "--kv_transfer_config", "--block-size=16", "-tp", "--por=1", "--max-model"],
)
def test_a_flag_that_the_worker_sets_is_refused(flag: str) -> None:
    with pytest.raises(ValueError, match="is set by"):
        VllmConfig(args=("--seed", "1", flag))


def test_a_misspelt_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="blok_size"):
        VllmConfig.model_validate({"blok_size": 32})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"lease": "60s"}, "lease is of no use without data_plane: nixl"),
        ({"nixl_port": 5601}, "nixl_port is of no use"),
        ({"data_plane": "nixl", "lease": "1s"}, "greater than or equal to 12"),
        ({"data_plane": "nixl", "kv_memory": "1GiB"}, "see engine_kv_memory"),
        ({"data_plane": "nixl", "args": ["--pipeline-parallel-size=2"]}, "no pipeline"),
        ({"data_plane": "nixl", "args": ["-dp", "2"]}, "replicas"),
        ({"data_plane": "nixl", "args": ["--kv-events-config", "{}"]}, "is set by the worker"),
        ({"data_plane": "nixl", "args": ["--no-enable-prefix-caching"]}, "is set by the worker"),
        ({"data_plane": "nixl", "env": {"VLLM_NIXL_SIDE_CHANNEL_PORT": "1"}}, "is set by nixl_host and nixl_port"),
        ({"data_plane": "mooncake"}, "'pdd' or 'nixl'"),
        ({"data_plane": "nixl", "url": "http://127.0.0.1:1", "socket": "/run/" + 97 * "a"}, "shorter"),
    ],
)
def test_what_would_break_a_data_plane_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        VllmConfig.model_validate(settings)
