"""A load that fails in a real server costs time and no token."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pdd_vllm import testing
from pdd_vllm.engine import VllmEngine

from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.launch import Launch
from pdd_runtime.testing.engine_harness import EngineHarness
from pdd_runtime.testing.tiny_model import write_tiny_model

TOKENS = tuple(range(20, 170))


class FailingEngine(VllmEngine):
    def launch(self, model: Path, port: int, socket: str) -> Launch:
        launch = super().launch(model, port, socket)
        argv = [
            arg.replace("PddConnector", "FailingConnector").replace("pdd_connector.vllm.connector", "failing_connector")
            for arg in launch.argv
        ]
        path = f"{launch.env['PYTHONPATH']}:{Path(__file__).parent}"
        return dataclasses.replace(launch, argv=tuple(argv), env={**launch.env, "PYTHONPATH": path})


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_what_could_not_be_loaded_is_computed_and_what_could_is_not(tmp_path: Path) -> None:
    config = testing.settings()
    model = ModelSpec(source=str(write_tiny_model(tmp_path / "tiny")))
    async with EngineHarness.started(FailingEngine(config, model)) as harness:
        first = (await harness.prefill(TOKENS)).first
        known = (*TOKENS, first.id)
        expected = await harness.generate(known, 20)
        found = []
        for _ in range(4):
            await harness.engine._http.post_json("/reset_prefix_cache", {})  # type: ignore[attr-defined]
            decoded = await harness.decode(known, 20)
            assert decoded.ids == expected
            found.append(decoded.extended.cached)
        # The first of the loads was the one of `expected`, of the tail that vLLM's own cache has not.
        assert found == [len(TOKENS), 0, len(TOKENS), 0]
        await harness.idle()
