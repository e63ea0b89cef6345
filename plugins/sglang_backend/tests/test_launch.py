from __future__ import annotations

import json
from pathlib import Path

import pytest
from pdd_sglang.config import SglangConfig
from pdd_sglang.engine import SglangEngine
from pydantic import ValidationError

from pdd_runtime.errors import EngineError
from pdd_runtime.graph import Role
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.launch import Launch
from pdd_runtime.testing.engine_harness import StoreHost
from pdd_runtime.testing.tiny_model import write_tiny_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny", kv_heads=2, head_dim=32, layers=2, context=1024)


def launched(tiny: Path, **config: object) -> Launch:
    engine = SglangEngine(SglangConfig.model_validate(config), ModelSpec(source=str(tiny), dtype="bfloat16"))
    return engine.launch(tiny, 4000, "/run/agent")


def flag(launch: Launch, name: str) -> str:
    return launch.argv[launch.argv.index(name) + 1]


def test_the_linker_is_told_where_the_worker_is(tiny: Path) -> None:
    launch = launched(tiny)
    config = json.loads(flag(launch, "--unified-cache-external-linker-config"))
    assert config["linker_module_path"] == "pdd_connector.sglang.connector"
    assert config["linker_extra_config"] == {"pdd_socket": "/run/agent"}


def test_the_connector_is_the_worker_s_own_and_comes_alone(tiny: Path) -> None:
    launch = launched(tiny)
    assert launch.env["PYTHONPATH"] == "connector"
    (name,) = launch.files
    scope: dict[str, list[str]] = {}
    exec(launch.files[name], scope)
    assert name == "connector/pdd_connector/__init__.py"
    assert (Path(scope["__path__"][0]) / "sglang" / "connector.py").is_file()


def test_a_sequence_may_be_as_long_as_the_context(tiny: Path) -> None:
    assert int(flag(launched(tiny), "--context-length")) > 1024 + 6
    assert int(flag(launched(tiny, context_length=500), "--context-length")) - 500 < 24
    assert int(flag(launched(tiny, context_length=5000), "--context-length")) < 1100


def test_memory_of_all_accelerators_is_given_in_tokens(tiny: Path) -> None:
    token = 2 * 2 * 2 * 32 * 2  # layers, K and V, heads, elements, bytes
    assert "--max-total-tokens" not in launched(tiny).argv
    assert flag(launched(tiny, engine_kv_memory=100 * token), "--max-total-tokens") == "100"
    assert flag(launched(tiny, engine_kv_memory=100 * token, tp=2), "--max-total-tokens") == "200"


def test_a_user_s_flags_come_last_and_environment_wins(tiny: Path) -> None:
    launch = launched(tiny, args=["--log-level", "debug"], env={"HF_HUB_OFFLINE": "0"})
    assert launch.argv[-2:] == ("--log-level", "debug")
    assert launch.env["HF_HUB_OFFLINE"] == "0"


def test_the_platform_for_any_cpu_is_for_cpus_alone(tiny: Path) -> None:
    assert "SGLANG_PLATFORM" not in launched(tiny).env
    assert launched(tiny, device="cpu").env["SGLANG_PLATFORM"] == "pdd-cpu"


@pytest.mark.parametrize(
    "args", [["--page-size", "16"], ["--page", "16"], ["--dtype=float16"], ["--disaggregation-mode", "decode"]]
)
def test_a_flag_that_would_break_the_sharing_is_refused_with_the_reason(args: list[str]) -> None:
    with pytest.raises(ValidationError, match="is not for args"):
        SglangConfig.model_validate({"args": args})


async def test_an_exact_mode_is_refused(tiny: Path) -> None:
    engine = SglangEngine(SglangConfig(), ModelSpec(source=str(tiny), mode="exact"))
    with pytest.raises(EngineError, match="no exact mode"):
        await engine.start(StoreHost())


def native(tiny: Path, role: Role, **config: object) -> Launch:
    settings = SglangConfig.model_validate({"data_plane": "mooncake", **config})
    engine = SglangEngine(settings, ModelSpec(source=str(tiny), dtype="bfloat16"))
    engine.role = role
    return engine.launch(tiny, 4000, "/run/agent")


def test_a_server_that_moves_kv_itself_has_the_mode_of_its_pool_s_role(tiny: Path) -> None:
    prefill = native(tiny, "prefill", bootstrap_port=8998)
    assert flag(prefill, "--disaggregation-mode") == "prefill"
    assert flag(prefill, "--disaggregation-bootstrap-port") == "8998"
    # So that the first token, and all that readers will want, is made before there is one.
    assert int(flag(prefill, "--optimistic-prefill-attempts")) > 1
    assert "--disaggregation-decode-enable-radix-cache" not in prefill.argv
    for role in ("relay", "main"):
        decode = native(tiny, role)  # type: ignore[arg-type]
        assert flag(decode, "--disaggregation-mode") == "decode"
        assert "--disaggregation-decode-enable-radix-cache" in decode.argv
        assert "--disaggregation-bootstrap-port" not in decode.argv
    with pytest.raises(EngineError, match="nobody to exchange KV with"):
        native(tiny, "aggregated")


def test_it_has_no_connector_and_pages_as_blocks(tiny: Path) -> None:
    launch = native(tiny, "main", block_size=32)
    assert flag(launch, "--page-size") == "32"
    assert not launch.files
    assert "PYTHONPATH" not in launch.env
    assert not [part for part in launch.argv if "linker" in part]


def test_it_is_told_its_backend_its_time_and_where_its_events_are_heard(tiny: Path) -> None:
    launch = native(tiny, "main", data_plane="nixl", transfer_timeout="90s")
    assert flag(launch, "--disaggregation-transfer-backend") == "nixl"
    assert launch.env["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] == "90"
    assert launch.env["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "90"
    events = json.loads(flag(launch, "--kv-events-config"))
    assert (events["endpoint"], events["replay_endpoint"]) == ("ipc:///run/agent", "ipc:///run/agent.replay")


def test_it_listens_beyond_this_host_only_where_readers_are_to_reach_it(tiny: Path) -> None:
    assert flag(native(tiny, "prefill"), "--host") == "127.0.0.1"
    assert native(tiny, "prefill").env["SGLANG_HOST_IP"] == "127.0.0.1"
    assert flag(native(tiny, "prefill", transfer_host="10.0.0.5"), "--host") == "0.0.0.0"
    assert flag(native(tiny, "main", transfer_host="10.0.0.5"), "--host") == "127.0.0.1"
    assert native(tiny, "main", transfer_host="10.0.0.5").env["SGLANG_HOST_IP"] == "10.0.0.5"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"args": ["--disaggregation-mode", "decode"]}, "not for args"),
        ({"args": ["--page-size=1"]}, "set block_size"),
        ({"args": ["--disaggregation-transfer", "nixl"]}, "set data_plane"),
        ({"args": ["--kv-events-config", "{}"]}, "the worker reads the events"),
        ({"args": ["--dp-size", "2"]}, "set replicas"),
        ({"env": {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "9"}}, "set transfer_timeout"),
        ({"kv_memory": "1GiB"}, "engine_kv_memory"),
        ({"transfer_host": "0.0.0.0"}, "no IP address"),
        ({"transfer_host": "prefill.example"}, "no IP address"),
        ({"transfer_timeout": "0s"}, "greater than or equal"),
        ({"device": "cpu"}, "mooncake_tcp"),
        ({"url": "http://127.0.0.1:1", "socket": "/run/a", "transfer_timeout": "9s"}, "of its own"),
        ({"url": "http://127.0.0.1:1", "socket": "/run/" + 100 * "a"}, "shorter"),
        ({"data_plane": "pdd", "bootstrap_port": 9}, "SGLang's own transfer"),
    ],
)
def test_settings_that_do_not_fit_its_data_plane_are_refused(config: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        SglangConfig.model_validate({"data_plane": "mooncake", **config})
