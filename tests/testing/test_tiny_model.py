from __future__ import annotations

from pathlib import Path

from pdd_torch.engine import TorchEngine

from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.testing.engine_harness import EngineHarness
from pdd_runtime.testing.tiny_model import write_tiny_model


def test_the_same_arguments_give_the_same_bytes_and_another_seed_gives_others(tmp_path: Path) -> None:
    paths = [write_tiny_model(tmp_path / str(n), seed=n // 2) / "model.safetensors" for n in range(3)]
    one, same, other = (path.read_bytes() for path in paths)
    assert one == same != other


async def test_an_engine_reads_it_and_its_tokens_depend_on_the_prompt(tmp_path: Path) -> None:
    source = str(write_tiny_model(tmp_path / "tiny", layers=3, heads=4, kv_heads=1, head_dim=16))
    async with EngineHarness.started(TorchEngine(TorchEngine.Config(), ModelSpec(source=source))) as harness:
        assert (harness.info.layout.layers, harness.info.layout.kv_heads, harness.info.layout.head_dim) == (3, 1, 16)
        answers = {await harness.generate((first, *range(100, 130)), 12) for first in range(5)}
    assert len(answers) == 5
