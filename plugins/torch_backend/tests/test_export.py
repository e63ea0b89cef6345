from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pdd_torch.engine import TorchEngine
from pdd_torch.export import write_directory
from pdd_torch.source import open_source
from pdd_torch.testing import build_tiny_model
from pdd_torch.weights import prepare

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import ModelSpec, Sampling, Token
from pdd_runtime.testing.engine_harness import EngineHarness

LENGTH = 8


@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_holds_the_same_model(tmp_path: Path, tied: bool) -> None:
    source = open_source(str(build_tiny_model(tmp_path / "tiny", tied=tied)))
    made = open_source(str(write_directory(str(tmp_path / "tiny"), tmp_path / "made")))
    assert made.architecture == source.architecture
    assert made.tokenizer() == source.tokenizer()
    expected, found = prepare(source, torch.float32), prepare(made, torch.float32)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


async def answer(source: str, prompt: tuple[int, ...]) -> tuple[Token, ...]:
    engine = TorchEngine(TorchEngine.Config(), ModelSpec(source=source, mode="exact"))
    async with EngineHarness.started(engine) as harness:
        return (await harness.decode(prompt, LENGTH, Sampling(temperature=0, logprobs=2))).tokens


@pytest.fixture
def smollm2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Made of its file, by the command. Nothing of it stays: not here, nor in the user's cache."""
    with tempfile.TemporaryDirectory() as scratch:
        monkeypatch.setenv("XDG_CACHE_HOME", f"{scratch}/cache")
        path = Path(scratch) / "smollm2"
        done = subprocess.run([sys.executable, "-m", "pdd_torch.export", "smollm2", path], check=False)
        assert done.returncode == 0
        yield path


@pytest.mark.model
@pytest.mark.slow
async def test_smollm2_says_the_same_from_a_directory_and_from_its_file(smollm2: Path) -> None:
    assert open_source(str(smollm2)).tokenizer() == open_source("smollm2").tokenizer()
    prompt = tuple(range(1000, 1050))
    expected = await answer("smollm2", prompt)
    assert len(expected) == LENGTH
    assert await answer(str(smollm2), prompt) == expected


def test_what_is_there_already_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with pytest.raises(EngineError, match="something already"):
        write_directory(str(tiny), tmp_path / "kept")
    command = [sys.executable, "-m", "pdd_torch.export", tiny, tmp_path / "kept"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "something already" in done.stderr
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_model_that_cannot_be_read_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"no \*\.safetensors file here has the tensor"):
        write_directory(str(broken), tmp_path / "made" / "model")
    assert list((tmp_path / "made").iterdir()) == []
