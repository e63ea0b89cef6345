from __future__ import annotations

import json
from pathlib import Path

import pytest
from pdd_sglang.config import SglangConfig
from pdd_sglang.engine import SglangEngine
from pydantic import ValidationError

from pdd_runtime.errors import EngineError
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


@pytest.mark.parametrize("args", [["--page-size", "16"], ["--dtype=float16"], ["--disaggregation-mode", "decode"]])
def test_a_flag_that_would_break_the_sharing_is_refused_with_the_reason(args: list[str]) -> None:
    with pytest.raises(ValidationError, match="is not for args"):
        SglangConfig.model_validate({"args": args})


async def test_an_exact_mode_is_refused(tiny: Path) -> None:
    engine = SglangEngine(SglangConfig(), ModelSpec(source=str(tiny), mode="exact"))
    with pytest.raises(EngineError, match="no exact mode"):
        await engine.start(StoreHost())
